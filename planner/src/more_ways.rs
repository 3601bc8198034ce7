//! What was worked out, in other ways to choose: the fastest at once, for it is what others are held to, and those near
//! it once all are worked out. Of most candidates other ways make nothing, and they take several times as long as the
//! first.

use rayon::prelude::*;

use crate::arrange::Arranged;
use crate::asking::{Asking, Way};
use crate::candidate::Scope;
use crate::forms::Forms;
use crate::found::{Start, Tally};
use crate::polish::{Worked, by_time, keep_distinct};
use crate::request::Stop;
use crate::work_out::{BATCH, Ranked, is_misnamed};

/// Asks the fastest in more ways, if it has not been.
pub(crate) fn ask_fastest(scope: &Scope<'_>, ranked: &mut Ranked, (start, tally): (&Start, &mut Tally)) {
    if ranked.worked.first().is_some_and(|best| !best.is_asked_in_ways) {
        ask(scope, &mut ranked.worked, &[0], (start, tally));
    }
}

/// Asks all that another way could bring near the best, the fastest first, until none is left or somebody says stop.
pub(crate) fn ask_near(
    scope: &Scope<'_>,
    ranked: &mut Ranked,
    (start, tally): (&Start, &mut Tally),
    stop: Stop<'_>,
) {
    keep_distinct(&mut ranked.worked);
    loop {
        let Some(known) = start.least(ranked.best()) else { return };
        let may =
            |one: &Worked| !one.is_asked_in_ways && scope.has_more_ways(&one.arranged, &one.bound, known.0);
        let worked = &mut ranked.worked;
        let some: Vec<usize> = (0..worked.len()).filter(|&at| may(&worked[at])).take(BATCH).collect();
        if some.is_empty() {
            return;
        }
        if stop.now(tally.work) {
            tally.stopped = true;
            return;
        }
        tally.work += 1;
        ask(scope, worked, &some, (start, tally));
    }
}

/// Asks some in more ways.
fn ask(scope: &Scope<'_>, worked: &mut [Worked], some: &[usize], (start, tally): (&Start, &mut Tally)) {
    let Some(known) = start.least(worked.first().map(|one| &one.arranged)) else { return };
    let asked = Asking { known: known.0, ..Asking::of(Forms::Leading) };
    let in_ways = |&at: &usize| scope.in_more_ways(&worked[at].arranged, &worked[at].bound, asked);
    let found: Vec<Option<(Arranged, Way)>> = some.par_iter().with_max_len(1).map(in_ways).collect();
    for (&at, found) in some.iter().zip(found) {
        worked[at].is_asked_in_ways = true;
        let Some((arranged, way)) = found else { continue };
        let bound = worked[at].bound.clone();
        debug_assert!(arranged.step_time() >= bound.time, "{way:?} of {:?}", arranged.candidate);
        let other = Worked { is_asked_in_ways: true, ..Worked::new(arranged, bound, way) };
        // Other choices may have made other degrees of it.
        if !is_misnamed(scope, &other, tally) {
            worked[at] = other;
        }
    }
    by_time(worked);
}
