//! What a candidate takes were memory free: its fastest choices, cut and simulated as plans are.
//!
//! Bounds say by formulas what stages idle, for any cut of the layers; of cuts that are tried, schedules that are simulated say more. Where the
//! fastest choices fit after all, there is nothing else to gain. Elsewhere that is no bound in the strict sense: prices of choices miss some of
//! what programs hide, so that rarely others are faster (`tests/tests/suite/exhaustive.rs` counts them).

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

    /// On such devices, what a candidate takes by its fastest choices, in the leading forms or in all, by the cuts that are tried; infinite where that is
    /// more than a limit.
    pub fn time_freely(
        &self,
        candidate: &Candidate,
        bound: &Bound,
        (of, limit): (Forms<'_>, Seconds),
    ) -> Seconds {
        let shifts = are_few(candidate);
        let known = limit.0 * if shifts { NEAR_BEST_TO_SHIFT } else { 1.0 };
        let asked = |forms: Forms<'static>| Asking { limit: known, known, ..Asking::of(forms) };
        // What fused forms save by prices is less than what they save in programs.
        let has_forms = of == Forms::All && self.forms.iter().any(|forms| forms.len() > 1);
        let forms = [Some(Forms::Leading), has_forms.then_some(Forms::All)].into_iter().flatten();
        let of_forms = |forms: Forms<'static>| {
            let (found, way) = self.evaluate_ways(candidate, bound, asked(forms)).ok()?;
            Some((found.step_time(), Asking { way, ..asked(forms) }))
        };
        let fastest = forms.filter_map(of_forms).min_by(|a, b| a.0.0.total_cmp(&b.0.0));
        let Some((time, asked)) = fastest else { return Seconds(f64::INFINITY) };
        let shifted = || self.evaluate_below(candidate, bound, Asking { shifts, ..asked }).ok();
        let shifted = if shifts { shifted() } else { None };
        shifted.map_or(time, |found| found.step_time().min(time))
    }
}
