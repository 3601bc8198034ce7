//! What a candidate takes were memory free: its fastest choices, cut and simulated as plans are.
//!
//! Bounds say by formulas what stages idle, for any cut of the layers; of cuts that are tried, schedules that are simulated say more. No other
//! choices are faster than the fastest, so a candidate whose fastest fit in any case takes just that.

use std::sync::Arc;

use ir::units::Seconds;

use crate::arrange::fastest;
use crate::bound::Bound;
use crate::candidate::{Candidate, Scope};
use crate::chooser::Troubles;
use crate::cut_sequences::SlicedEntries;
use crate::evaluate::{Asking, ways};
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
    #[must_use]
    pub fn with_free_memory(&self) -> Option<Self> {
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

    /// On such devices, what a candidate takes at least, by cuts that are tried; infinite where that
    /// is clearly more than a limit.
    pub fn time_freely(&self, candidate: &Candidate, bound: &Bound, limit: Seconds) -> Seconds {
        let shifts = are_few(candidate);
        let reach = if shifts { NEAR_BEST_TO_SHIFT } else { 1.0 };
        let known = limit.0 * reach;
        let asked = |forms: Forms<'static>| Asking { limit: known, known, shifts, ..Asking::of(forms) };
        // What fused forms save by prices is less than what they save in programs, and so is what is gathered and reduced in buckets.
        let has_forms = self.forms.iter().any(|forms| forms.len() > 1);
        let forms = [Some(Forms::Leading), has_forms.then_some(Forms::All)].into_iter().flatten();
        let of_forms = |forms: Forms<'static>| {
            let stored: Vec<Asking<'static>> =
                ways(self.pins()).skip(1).map(|way| Asking { way, ..asked(forms) }).collect();
            let stored =
                self.evaluate_in(candidate, bound, &stored).into_iter().filter_map(|(_, found)| found);
            let own = self.evaluate_ways(candidate, bound, asked(forms)).map(|(found, _)| found);
            own.into_iter().chain(stored)
        };
        let fastest = fastest(forms.flat_map(of_forms));
        fastest.map_or(Seconds(f64::INFINITY), |found| found.step_time())
    }
}
