//! What other choices of layers inside the candidates that were worked out could come to.
//!
//! A candidate whose fastest choices overflow memory is worked out by some of the choices that fit. What all of them could
//! come to is its bound in the memory that there is: asked of those alone whose bounds are the least, once the best
//! is known. Those of which that is still the least are then asked what they take were memory free (`freely.rs`).

use std::cmp::Ordering;
use std::collections::BTreeSet;

use ir::units::Seconds;
use rayon::prelude::*;

use crate::bound::Bound;
use crate::forms::Forms;
use crate::frontier::Frontier;
use crate::room::Together;

/// Candidates that are asked between two looks at the least: a fixed number, so that threads do not change the work.
const AT_ONCE: usize = 4;

/// Times that the candidates with the least bounds are asked, at most.
const ROUNDS: usize = 48;

/// Candidates that may be asked schedule by schedule, at most: that takes several times as long.
const BY_SCHEDULE: usize = 24;

/// The same of those that would be faster were memory free.
const MORE_BY_SCHEDULE: usize = 12;

/// Those that could come to no less than this part of the limit are asked no further: the gap is about half a per cent then.
const ENOUGH: f64 = 0.995;

/// What is known of a candidate.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// Seconds that it cannot beat.
    least: f64,
    at: usize,
    /// What it is asked next.
    next: Option<Together>,
}

impl Open {
    fn by_bound(&self, other: &Self) -> Ordering {
        self.least.total_cmp(&other.least).then(self.at.cmp(&other.at))
    }
}

/// What candidates could come to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Inside {
    /// The least of all.
    pub(crate) least: Option<Seconds>,
    /// The same by the sums that choices go by, which miss some of what plans show.
    pub(crate) by_sums: Option<Seconds>,
    /// Those that could be faster than the limit by these, the most promising first.
    pub(crate) promising: Vec<usize>,
}

/// What some candidates could come to, as far as that is less than a limit: those with the least bounds are asked until no
/// more can be said of the least, or it is nearly the limit.
pub(crate) fn inside(frontier: &Frontier<'_>, worked_out: &[usize], (of, limit): (Forms<'_>, f64)) -> Inside {
    let enough = limit * ENOUGH;
    let open = |&at: &usize| Open { least: frontier.least(at), at, next: Some(Together::Family) };
    let mut all: Vec<Open> = worked_out.iter().map(open).collect();
    let mut left = BY_SCHEDULE;
    for _ in 0..ROUNDS {
        all.sort_by(Open::by_bound);
        let is_open = |one: &Open| match one.next {
            Some(Together::Family) => true,
            Some(Together::Schedule) => left > 0,
            None => false,
        };
        let known = all.iter().filter(|one| !is_open(one)).map(|one| one.least).fold(enough, f64::min);
        let asked = all.iter_mut().filter(|one| is_open(one) && one.least < known).take(AT_ONCE);
        let asked: Vec<&mut Open> = asked.collect();
        if asked.is_empty() {
            break;
        }
        left = left.saturating_sub(asked.iter().filter(|one| one.next == Some(Together::Schedule)).count());
        asked.into_par_iter().for_each(|one| {
            let Some(together) = one.next else { return };
            one.least = one.least.max(in_memory(frontier, one.at, (of, together), known));
            one.next = match together {
                Together::Family => Some(Together::Schedule),
                Together::Schedule => None,
            };
        });
    }
    all.sort_by(Open::by_bound);
    let least = |all: &[Open]| {
        all.iter().map(|one| one.least).filter(|least| least.is_finite()).min_by(f64::total_cmp).map(Seconds)
    };
    let by_sums = least(&all);
    let promising = all.iter().take_while(|one| one.least < limit).map(|one| one.at).collect();
    freely(frontier, &mut all, (of, limit));
    Inside { least: least(&all), by_sums, promising }
}

/// Raises what candidates could come to, the least first, to what they take were memory free, and asks those of which that is not enough
/// schedule by schedule, until nothing more can be said of the least, or it is nearly the limit.
fn freely(frontier: &Frontier<'_>, all: &mut [Open], (of, limit): (Forms<'_>, f64)) {
    let enough = limit * ENOUGH;
    if all.first().is_none_or(|one| one.least >= enough) {
        return;
    }
    let Some(free) = frontier.scope().with_free_memory() else { return };
    let mut was_asked: BTreeSet<usize> = BTreeSet::new();
    let mut left = MORE_BY_SCHEDULE;
    for _ in 0..ROUNDS {
        all.sort_by(Open::by_bound);
        let is_open = |one: &Open| !was_asked.contains(&one.at) || (left > 0 && one.next.is_some());
        let known = all.iter().filter(|one| !is_open(one)).map(|one| one.least).fold(enough, f64::min);
        let asked = all.iter_mut().filter(|one| is_open(one) && one.least < known).take(AT_ONCE);
        let asked: Vec<(bool, &mut Open)> = asked.map(|one| (!was_asked.contains(&one.at), one)).collect();
        if asked.is_empty() {
            break;
        }
        left = left.saturating_sub(asked.iter().filter(|(is_new, _)| !is_new).count());
        was_asked.extend(asked.iter().map(|(_, one)| one.at));
        asked.into_par_iter().with_max_len(1).for_each(|(is_new, one)| {
            let Some(own) = frontier.own(one.at) else { return };
            let found = if is_new {
                free.time_freely(frontier.at(one.at), own, (of, Seconds(limit))).0
            } else {
                one.next = None;
                in_memory(frontier, one.at, (of, Together::Schedule), known)
            };
            one.least = one.least.max(found);
        });
    }
    all.sort_by(Open::by_bound);
}

/// What a candidate could come to in the memory that there is, looked for up to a limit; 0 where memory says nothing. Where memory is dear
/// another count of what compute covers may say more than where it is free: schedule by schedule all are asked.
fn in_memory(frontier: &Frontier<'_>, at: usize, asked: (Forms<'_>, Together), limit: f64) -> f64 {
    let (scope, candidate) = (frontier.scope(), frontier.at(at));
    let room = |bound: &Bound| scope.bound_in_room((candidate, bound), candidate, (asked, Seconds(limit)));
    let Some(own) = frontier.own(at) else { return 0.0 };
    let mut most = room(own).map_or(0.0, |time| time.0);
    let others = if asked.1 == Together::Schedule { own.other_covers.as_slice() } else { &[] };
    for &covers in others {
        if most < limit {
            let by = Bound { covers, ..own.clone() };
            most = most.max(room(&by).map_or(0.0, |time| time.0));
        }
    }
    most
}
