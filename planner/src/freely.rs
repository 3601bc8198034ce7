//! What a candidate takes were memory free: its fastest choices, cut and simulated as plans are.
//!
//! Bounds say by formulas what stages idle, for any cut of the layers; of cuts that are tried, schedules that are simulated say more. No other
//! choices are faster than the fastest, so a candidate whose fastest fit in any case takes just that.

use std::sync::Arc;

use ir::units::Seconds;

use crate::bound::Bound;
use crate::candidate::{Candidate, Scope};
use crate::chooser::Troubles;
use crate::cut_sequences::SlicedEntries;
use crate::evaluate::Asking;
use crate::flights::Flights;
use crate::forms::Forms;
use crate::memos::Memos;
use crate::polish::{NEAR_BEST_TO_SHIFT, are_few};
use crate::price::setting::Setting;

/// Bytes that no layer comes near.
const MORE_THAN_ANY: f64 = 1e18;

impl Scope<'_> {
    /// The same on devices that hold whatever they are given. `None` where stages may stand on several grounds, whose memories are those of
    /// the cluster.
    pub(crate) fn with_free_memory(&self) -> Option<Self> {
        let cluster = &self.request.cluster;
        if cluster.is_mixed() || cluster.groups.iter().any(|group| !group.links.is_empty()) {
            return None;
        }
        let setting = Setting { memory: MORE_THAN_ANY, capacity: MORE_THAN_ANY, ..self.setting.clone() };
        Some(Self {
            request: self.request,
            constants: self.constants,
            setting,
            machine: self.machine.clone(),
            capacity: MORE_THAN_ANY,
            counts: self.counts.clone(),
            troubles: Troubles::default(),
            forms: self.forms.clone(),
            leading: self.leading.clone(),
            wide: self.wide.clone(),
            bends: self.bends.clone(),
            memos: Memos::default(),
            flights: Flights::default(),
            sliced: SlicedEntries::default(),
            bounds: Arc::default(),
        })
    }

    /// Whether it is that of such devices.
    pub(crate) fn has_free_memory(&self) -> bool {
        self.capacity >= MORE_THAN_ANY
    }

    /// On such devices, what a candidate takes at least, by cuts that are tried, in forms that save as much as its bound says; infinite where that
    /// is clearly more than a limit.
    pub(crate) fn time_freely(&self, candidate: &Candidate, bound: &Bound, limit: Seconds) -> Seconds {
        let shifts = are_few(candidate);
        let reach = if shifts { NEAR_BEST_TO_SHIFT } else { 1.0 };
        let known = (limit + bound.saving).0 * reach;
        let asked = Asking { limit: known, known, shifts, ..Asking::of(Forms::Leading) };
        match self.evaluate_ways(candidate, bound, asked) {
            Ok((found, _)) => found.step_time() - bound.saving,
            Err(_) => Seconds(f64::INFINITY),
        }
    }
}
