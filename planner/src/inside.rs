//! What other choices of layers inside the candidates that were worked out could come to.
//!
//! A candidate whose fastest choices overflow memory is worked out by some of the choices that fit. What all of them
//! could come to is its bound in the memory that there is: asked of those alone whose bounds are the least, once the
//! best is known. Those of which that is still the least are then asked what they take were memory free (`freely.rs`).
//! Choices go by how much of what a step sends once shows at least; where some of it does, what all choices could come
//! to is a closer bound (`covered.rs`).

use std::cmp::Ordering;
use std::sync::atomic::{self, AtomicBool};

use ir::units::Seconds;
use rayon::prelude::*;

use crate::bound::Bound;
use crate::candidate::{Candidate, Scope};
use crate::forms::Forms;
use crate::frontier::{Frontier, average_pairs};
use crate::polish::CROWDED;
use crate::room::{Effort, Together};

/// Candidates that are asked between two looks at the least: a fixed number, so that threads do not change the work.
const AT_ONCE: usize = 4;

/// Times that the candidates with the least bounds are asked, at most.
const ROUNDS: usize = 96;

/// Candidates that may be asked schedule by schedule, at most: that takes several times as long as family by family.
const BY_SCHEDULE: usize = 36;

/// Once no more may be, all are asked what they take were memory free before any of them is.
const LAST_BY_SCHEDULE: usize = 12;

/// [`BY_SCHEDULE`] times the pairs of ports that their bounds price, unless that is fewer than [`LEAST_BY_SCHEDULE`]: of gpt-oss-120b on 256
/// devices each takes seconds.
const PAIRS_BY_SCHEDULE: usize = 3_600_000;

/// Candidates that may be asked schedule by schedule however many pairs they have.
const LEAST_BY_SCHEDULE: usize = 24;

/// A candidate whose fastest choices take no more than so many times the memory that there is is asked what it takes
/// were memory free before it is asked schedule by schedule, others last: of gpt-oss-120b on 64 devices and
/// qwen3-30b-a3b on 1,024 that said more of all but one, in a tenth of the time; of deepseek-v3 on 2,048, where they
/// take three times the memory and more, it said less of 17 in 18.
const NEARLY_FITS: f64 = 2.5;

/// Where a bound prices more pairs of ports it is even the first, though it is no bound in the strict sense: of
/// qwen3-30b-a3b on 1,024 devices, with 810,000, it takes 80 ms and another look at all schedules 380.
pub(crate) const MANY_PAIRS: usize = 150_000;

/// Those that could come to no less than this part of the limit are asked no further: the gap is about half a per cent
/// then.
const ENOUGH: f64 = 0.995;

/// A candidate is asked with more effort where it comes to no less than this part of what is enough, or of the least of
/// which memory says no more: it raised none of those of gpt-oss-120b on 256 devices that come to less, at five seconds
/// each.
const NEARLY_ENOUGH: f64 = 0.9;

/// What a candidate can be asked.
#[derive(Clone, Copy)]
enum Ask<'s> {
    /// What it could come to in the memory that there is.
    InMemory(Together),
    /// What it takes in a scope whose memory is free.
    Freely(&'s Scope<'s>),
    /// What it could come to by a closer bound where memory is free.
    Closely,
}

impl Ask<'_> {
    fn is_by_schedule(&self) -> bool {
        matches!(self, Self::InMemory(Together::Schedule))
    }

    fn is_freely(&self) -> bool {
        matches!(self, Self::Freely(_))
    }
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
    /// The same by the sums that choices go by, which miss some of what plans show.
    by_sums: f64,
    at: usize,
    /// What it is asked next, the first of it last.
    next: Vec<Ask<'s>>,
}

impl<'s> Open<'s> {
    /// A candidate that was asked nothing yet.
    fn new(frontier: &Frontier<'_>, at: usize, free: Option<&'s Scope<'s>>) -> Self {
        let [by_family, by_schedule] =
            [Together::Family, Together::Schedule].map(|own| Some(Ask::InMemory(own)));
        let freely = free.map(Ask::Freely);
        let (own, least) = (frontier.own(at), frontier.least(at));
        // Where hosts have room memory says little, and takes seconds.
        let has_hosts = frontier.scope().hosts_may_hold_more();
        let nearly_fits = has_hosts || own.is_some_and(|own| own.crowding <= NEARLY_FITS);
        let has_many_pairs = has_hosts || own.is_some_and(|own| own.n_pairs > MANY_PAIRS);
        let shows_once = shows_once(frontier.at(at), own);
        let is_crowded = own.is_some_and(|own| own.crowding >= CROWDED);
        let closely = Some(Ask::Closely);
        let next = match (shows_once, nearly_fits, has_many_pairs) {
            // What a candidate takes by choices of its own says nothing of what a blend of them could hide.
            (true, ..) if is_crowded => [by_schedule, by_family, closely],
            (true, ..) => [None, None, closely],
            (false, true, true) => [by_schedule, by_family, freely],
            (false, true, false) => [by_schedule, freely, by_family],
            (false, false, _) => [freely, by_schedule, by_family],
        };
        Self { least, by_sums: least, at, next: next.into_iter().flatten().collect() }
    }

    fn by_bound(&self, other: &Self) -> Ordering {
        self.least.total_cmp(&other.least).then(self.at.cmp(&other.at))
    }

    fn is_asked_by_schedule(&self) -> bool {
        self.next.last().is_some_and(Ask::is_by_schedule)
    }
}

/// Whether a candidate waits for what it sends once, and its bound says what it could come to without: on one stage,
/// for of pipelines that are hardly filled bounds say little.
pub(crate) fn shows_once(candidate: &Candidate, own: Option<&Bound>) -> bool {
    candidate.n_stages == 1 && own.is_some_and(|own| !own.other_covers.is_empty() && own.grounds.is_empty())
}

/// What candidates could come to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Inside {
    /// The least of all.
    pub(crate) least: Option<Seconds>,
    /// The same by the sums that choices go by.
    pub(crate) by_sums: Option<Seconds>,
    /// Those that could be faster than the limit, the most promising first.
    pub(crate) promising: Vec<usize>,
}

/// What some candidates could come to, as far as that is less than a limit: those with the least bounds are asked until
/// no more can be said of the least, or it is nearly the limit, or what some that were not worked out could come to.
pub(crate) fn inside(
    frontier: &Frontier<'_>,
    worked_out: &[usize],
    (of, limit, open): (Forms<'_>, f64, Option<Seconds>),
) -> Inside {
    let goal = Goal { limit, enough: open.map_or(f64::INFINITY, |open| open.0).min(limit * ENOUGH) };
    let free = frontier.scope().with_free_memory();
    let mut all: Vec<Open<'_>> =
        worked_out.iter().map(|&at| Open::new(frontier, at, free.as_ref())).collect();
    ask_least(frontier, &mut all, (of, goal), affordable(frontier, worked_out));
    let least = |of: fn(&Open<'_>) -> f64| {
        all.iter().map(of).filter(|least| least.is_finite()).min_by(f64::total_cmp).map(Seconds)
    };
    let (least, by_sums) = (least(|one| one.least), least(|one| one.by_sums));
    all.sort_by(Open::by_bound);
    let promising = all.iter().take_while(|one| one.least < limit).map(|one| one.at).collect();
    Inside { least, by_sums, promising }
}

/// How many may be asked schedule by schedule.
fn affordable(frontier: &Frontier<'_>, worked_out: &[usize]) -> usize {
    let n_pairs = average_pairs(worked_out.iter().filter_map(|&at| frontier.own(at)));
    (PAIRS_BY_SCHEDULE / n_pairs.max(1)).clamp(LEAST_BY_SCHEDULE, BY_SCHEDULE)
}

/// Asks those that could come to the least, so many of them schedule by schedule, until no more can be said of the
/// least, or it is enough.
fn ask_least<'s>(
    frontier: &Frontier<'_>,
    all: &mut [Open<'s>],
    (of, Goal { limit, enough }): (Forms<'_>, Goal),
    mut by_schedule: usize,
) {
    // Where each takes long, nobody is asked whom the one before it may spare that.
    let at_once: usize = if by_schedule < BY_SCHEDULE { 1 } else { AT_ONCE };
    for _ in 0..ROUNDS {
        if by_schedule <= LAST_BY_SCHEDULE {
            all.iter_mut().for_each(|one| one.next.sort_by_key(Ask::is_freely));
        }
        if by_schedule == 0 {
            all.iter_mut().for_each(|one| one.next.retain(|ask| !ask.is_by_schedule()));
        }
        all.sort_by(Open::by_bound);
        let is_open = |one: &Open<'_>| !one.next.is_empty();
        let known = all.iter().filter(|one| !is_open(one)).map(|one| one.least).fold(enough, f64::min);
        let are_told = |one: &&Open<'_>| !one.next.iter().any(|ask| !ask.is_freely());
        // Nobody is bounded beyond the least of which memory says no more.
        let told = all.iter().filter(are_told).map(|one| one.least).fold(known, f64::min);
        let asked: Vec<&mut Open<'s>> = all
            .iter_mut()
            .filter(|one| is_open(one) && one.least < known)
            .take(AT_ONCE)
            .scan(at_once, |left, one| {
                let goes_on = !one.is_asked_by_schedule() || *left > 0;
                *left = left.saturating_sub(one.is_asked_by_schedule().into());
                Some(goes_on.then_some(one))
            })
            .flatten()
            .collect();
        if asked.is_empty() {
            break;
        }
        by_schedule =
            by_schedule.saturating_sub(asked.iter().filter(|one| one.is_asked_by_schedule()).count());
        asked.into_par_iter().with_max_len(1).for_each(|one| {
            let Some(own) = frontier.own(one.at) else { return one.next.clear() };
            match one.next.pop() {
                Some(Ask::InMemory(together)) => {
                    let found = in_memory(frontier, (one.at, own), (of, together), told);
                    one.by_sums = one.by_sums.max(found);
                    one.least = one.least.max(found);
                }
                Some(Ask::Freely(free)) => {
                    let found = free.time_freely(frontier.at(one.at), own, (of, Seconds(limit)));
                    one.least = one.least.max(found.0);
                }
                Some(Ask::Closely) => {
                    let found = frontier.scope().bound_closely(frontier.at(one.at), own, of);
                    one.least = one.least.max(found.0);
                    one.by_sums = one.least;
                }
                None => {}
            }
        });
    }
}

/// What a candidate could come to in the memory that there is, looked for up to a limit; 0 where memory says nothing.
/// Where memory is dear another count of what compute covers may say more than where it is free: schedule by schedule
/// all are asked, and those that come near the limit once more with more effort.
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
    let quick = until(limit, &all, &|bound| room(bound, Effort::Quick));
    let most = quick.iter().copied().fold(0.0, f64::max);
    if most >= limit || together != Together::Schedule {
        return most;
    }
    let is_near = |(_, found): &(&Bound, f64)| *found >= limit * NEARLY_ENOUGH;
    let near: Vec<&Bound> = all.iter().zip(quick).filter(is_near).map(|(bound, _)| bound).collect();
    let thorough = until(limit, &near, &|bound| room(bound, Effort::Thorough));
    thorough.into_iter().fold(most, f64::max)
}

/// What each says, up to the first that says no less than a limit. Those behind one that is still asked are asked at
/// once where a thread has nothing else to do; what they say then counts no more than if they had not been.
fn until<T: Sync>(limit: f64, all: &[T], ask: &(impl Fn(&T) -> f64 + Sync)) -> Vec<f64> {
    let Some((first, rest)) = all.split_first() else { return Vec::new() };
    let reached = AtomicBool::new(false);
    let of_first = || {
        let found = ask(first);
        reached.store(found >= limit, atomic::Ordering::Relaxed);
        found
    };
    let of_rest = || match reached.load(atomic::Ordering::Relaxed) {
        true => Vec::new(),
        false => until(limit, rest, ask),
    };
    let (found, others) = rayon::join(of_first, of_rest);
    let others = if found >= limit { Vec::new() } else { others };
    std::iter::once(found).chain(others).collect()
}
