//! What a candidate takes were memory free: its fastest choices, cut and simulated as plans are.
//!
//! Bounds say by formulas what stages idle, for any cut of the layers; of cuts that are tried, schedules that are
//! simulated say more. Where the fastest choices fit after all, there is nothing else to gain. Elsewhere that is no
//! bound in the strict sense: prices of choices miss some of what programs hide, so that rarely others are faster
//! (`tests/tests/suite/exhaustive.rs` counts them).

use std::sync::Arc;

use ir::units::Seconds;

use crate::arrange::Arranged;
use crate::asking::Asking;
use crate::bound::Bound;
use crate::candidate::{Candidate, Scope};
use crate::chooser::Troubles;
use crate::forms::Forms;
use crate::polish::{NEAR_BEST_TO_SHIFT, are_few};
use crate::price::setting::Setting;

/// Bytes that no layer comes near.
const MORE_THAN_ANY: f64 = 1e18;

impl Scope<'_> {
    /// The same on devices that hold whatever they are given. `None` where stages may stand on several grounds, whose
    /// memories are those of the cluster.
    #[must_use]
    pub fn with_free_memory(&self) -> Option<Self> {
        let cluster = &self.request.cluster;
        if cluster.is_mixed() || cluster.groups.iter().any(|group| !group.links.is_empty()) {
            return None;
        }
        let setting = Setting { memory: MORE_THAN_ANY, capacity: MORE_THAN_ANY, ..self.setting.clone() };
        // Bounds that are known are of the memory that there is; what kept a solver from an answer here keeps nobody
        // from a plan.
        let (troubles, bounds) = (Troubles::default(), Arc::default());
        Some(Self { setting, capacity: MORE_THAN_ANY, troubles, bounds, ..self.clone() })
    }

    /// Whether it is that of such devices.
    pub(crate) fn has_free_memory(&self) -> bool {
        self.capacity >= MORE_THAN_ANY
    }

    /// On such devices, what a candidate takes by its fastest choices, in the leading forms or in all, by the cuts that
    /// are tried; infinite where that is more than a limit.
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
            Some((found, Asking { way, shifts: true, ..asked(forms) }))
        };
        let time = |one: &(Arranged, Asking<'_>)| one.0.step_time().0;
        let fastest = forms.filter_map(of_forms).min_by(|a, b| time(a).total_cmp(&time(b)));
        let Some((found, asked)) = fastest else { return Seconds(f64::INFINITY) };
        let may_shift = shifts && self.may_shift(&found);
        let shifted = may_shift.then(|| self.evaluate_below(candidate, bound, asked).ok()).flatten();
        shifted.map_or(found.step_time(), |shifted| shifted.step_time().min(found.step_time()))
    }
}
