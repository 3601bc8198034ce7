//! What other choices of layers inside the candidates that were worked out could come to.
//!
//! A candidate whose fastest choices overflow memory is worked out by some of the choices that fit. What all of them could
//! come to is its bound in the memory that there is: asked of those alone whose bounds are the least, once the best
//! is known. Those of which that is still the least are then asked what they take were memory free (`freely.rs`).

use std::cmp::Ordering;

use ir::units::Seconds;
use rayon::prelude::*;

use crate::bound::Bound;
use crate::candidate::Scope;
use crate::forms::Forms;
use crate::frontier::{Frontier, average_pairs};
use crate::room::{Effort, Together};

/// Candidates that are asked between two looks at the least: a fixed number, so that threads do not change the work.
const AT_ONCE: usize = 4;

/// Times that the candidates with the least bounds are asked, at most.
const ROUNDS: usize = 48;

/// Candidates that may be asked schedule by schedule, at most: that takes several times as long.
const BY_SCHEDULE: usize = 24;

/// The same of those that would be faster were memory free.
const MORE_BY_SCHEDULE: usize = 12;

/// [`BY_SCHEDULE`] times the pairs of ports that their bounds price, unless that is fewer than [`LEAST_BY_SCHEDULE`]: of gpt-oss-120b on 256
/// devices each takes seconds.
const PAIRS_BY_SCHEDULE: usize = 2_400_000;

/// Candidates that may be asked schedule by schedule however many pairs they have.
const LEAST_BY_SCHEDULE: usize = 12;

/// Those that could come to no less than this part of the limit are asked no further: the gap is about half a per cent then.
const ENOUGH: f64 = 0.995;

/// A candidate is asked with more effort where it comes to no less than this part of what is enough: it raised none of those of gpt-oss-120b on
/// 256 devices that come to less, at five seconds each.
const NEARLY_ENOUGH: f64 = 0.9;

/// What a candidate can be asked.
#[derive(Clone, Copy)]
enum Ask<'s> {
    /// What it could come to in the memory that there is.
    InMemory(Together),
    /// What it takes in a scope whose memory is free.
    Freely(&'s Scope<'s>),
}

/// Up to what it is asked.
#[derive(Clone, Copy)]
struct Goal {
    /// Seconds of the fastest.
    limit: f64,
    /// Seconds from which on it is asked no further.
    enough: f64,
}

/// What is known of a candidate.
struct Open<'s> {
    /// Seconds that it cannot beat.
    least: f64,
    at: usize,
    /// What it is asked next, the first of it last.
    next: Vec<Ask<'s>>,
}

impl Open<'_> {
    fn by_bound(&self, other: &Self) -> Ordering {
        self.least.total_cmp(&other.least).then(self.at.cmp(&other.at))
    }

    fn is_asked_by_schedule(&self) -> bool {
        matches!(self.next.last(), Some(Ask::InMemory(Together::Schedule)))
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
/// more can be said of the least, or it is nearly the limit, or what some that were not worked out could come to.
pub(crate) fn inside(
    frontier: &Frontier<'_>,
    worked_out: &[usize],
    (of, limit, open): (Forms<'_>, f64, Option<Seconds>),
) -> Inside {
    let goal = Goal { limit, enough: open.map_or(f64::INFINITY, |open| open.0).min(limit * ENOUGH) };
    // What is asked freely holds on to it.
    let free;
    let next = [Together::Schedule, Together::Family].map(Ask::InMemory);
    let open = |&at: &usize| Open { least: frontier.least(at), at, next: next.to_vec() };
    let mut all: Vec<Open<'_>> = worked_out.iter().map(open).collect();
    ask_least(frontier, &mut all, (of, goal), affordable(frontier, worked_out));
    let least = |all: &[Open<'_>]| {
        all.iter().map(|one| one.least).filter(|least| least.is_finite()).min_by(f64::total_cmp).map(Seconds)
    };
    let by_sums = least(&all);
    let promising = all.iter().take_while(|one| one.least < limit).map(|one| one.at).collect();
    if all.first().is_some_and(|one| one.least < goal.enough)
        && let Some(scope) = frontier.scope().with_free_memory()
    {
        free = scope;
        all.iter_mut().for_each(|one| one.next.push(Ask::Freely(&free)));
        ask_least(frontier, &mut all, (of, goal), MORE_BY_SCHEDULE);
    }
    Inside { least: least(&all), by_sums, promising }
}

/// How many may be asked schedule by schedule.
fn affordable(frontier: &Frontier<'_>, worked_out: &[usize]) -> usize {
    let n_pairs = average_pairs(worked_out.iter().filter_map(|&at| frontier.own(at)));
    (PAIRS_BY_SCHEDULE / n_pairs.max(1)).clamp(LEAST_BY_SCHEDULE, BY_SCHEDULE)
}

/// Asks those that could come to the least, so many of them schedule by schedule, until no more can be said of the least, or it is enough;
/// sorts them by what is known then.
fn ask_least<'s>(
    frontier: &Frontier<'_>,
    all: &mut [Open<'s>],
    (of, Goal { limit, enough }): (Forms<'_>, Goal),
    mut by_schedule: usize,
) {
    for _ in 0..ROUNDS {
        all.sort_by(Open::by_bound);
        let is_open =
            |one: &Open<'_>| !one.next.is_empty() && (by_schedule > 0 || !one.is_asked_by_schedule());
        let known = all.iter().filter(|one| !is_open(one)).map(|one| one.least).fold(enough, f64::min);
        let asked = all.iter_mut().filter(|one| is_open(one) && one.least < known).take(AT_ONCE);
        let asked: Vec<&mut Open<'s>> = asked.collect();
        if asked.is_empty() {
            break;
        }
        by_schedule =
            by_schedule.saturating_sub(asked.iter().filter(|one| one.is_asked_by_schedule()).count());
        asked.into_par_iter().with_max_len(1).for_each(|one| {
            let Some(own) = frontier.own(one.at) else { return one.next.clear() };
            let found = match one.next.pop() {
                Some(Ask::InMemory(together)) => in_memory(frontier, (one.at, own), (of, together), known),
                Some(Ask::Freely(free)) => free.time_freely(frontier.at(one.at), own, (of, Seconds(limit))).0,
                None => 0.0,
            };
            one.least = one.least.max(found);
        });
    }
    all.sort_by(Open::by_bound);
}

/// What a candidate could come to in the memory that there is, looked for up to a limit; 0 where memory says nothing. Where memory is dear
/// another count of what compute covers may say more than where it is free: schedule by schedule all are asked, and those that come near the
/// limit once more with more effort.
fn in_memory(
    frontier: &Frontier<'_>,
    (at, own): (usize, &Bound),
    (of, together): (Forms<'_>, Together),
    limit: f64,
) -> f64 {
    let (scope, candidate) = (frontier.scope(), frontier.at(at));
    let room = |bound: &Bound, effort: Effort| {
        let asked = ((of, together, effort), Seconds(limit));
        scope.bound_in_room((candidate, bound), candidate, asked).map_or(0.0, |time| time.0)
    };
    let mut all = vec![own.clone()];
    if together == Together::Schedule {
        all.extend(own.other_covers.iter().map(|&covers| Bound { covers, ..own.clone() }));
    }
    let (mut most, mut near) = (0.0_f64, Vec::new());
    for bound in &all {
        let found = room(bound, Effort::Quick);
        most = most.max(found);
        if most >= limit {
            return most;
        }
        if together == Together::Schedule && found >= limit * NEARLY_ENOUGH {
            near.push(bound);
        }
    }
    for bound in near {
        if most < limit {
            most = most.max(room(bound, Effort::Thorough));
        }
    }
    most
}
