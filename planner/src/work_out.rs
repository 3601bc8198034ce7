//! Candidates bounded and worked out, the most promising first, until no bound left is below the best.

use ir::units::Seconds;
use rayon::prelude::*;

use crate::arrange::Arranged;
use crate::asking::Asking;
use crate::bound::Bound;
use crate::candidate::{Candidate, Dropped, Scope, same_mesh};
use crate::forms::Forms;
use crate::found::{Misnamed, Start, Tally, WORTH_SHOWING, lesser};
use crate::frontier::{Frontier, Refined, Task, dividing};
use crate::inside::{inside, shows_once};
use crate::more_ways::{ask_fastest, ask_near};
use crate::polish::{CROWDED, Worked, insert};
use crate::request::{OnProgress, Progress, Stop};
use crate::room::Room;

/// Candidates worked out between two looks at the best: a fixed number, so that threads do not change the work.
pub(crate) const BATCH: usize = 8;

/// Candidates that are seen to beyond the limit on work: so few take little more of it, and a proof is worth that.
const FEW_LEFT: u64 = 16;

/// Multiples of the devices' memory that hosts can make up for: what lies beyond crosses their links too often.
const ROOMY: f64 = 3.0;

/// A candidate with its bound, and those of its mesh whose micro-batches divide its own.
type Chain = ((usize, Bound), Vec<usize>);

/// The candidates of a mesh, the smallest micro-batch first, by what they divide: the largest that the mesh can run at
/// all, of the others the largest again. What cannot run is in none.
fn chains(scope: &Scope<'_>, (candidates, of): (&[Candidate], Forms<'_>), group: &[usize]) -> Vec<Chain> {
    let (mut rest, mut chains) = (group.to_vec(), Vec::new());
    while let Some(largest) = rest.pop() {
        let Some(bound) = scope.bound_by_known(&candidates[largest], of) else { continue };
        let (left, others) = dividing((candidates, scope.request.job.sequence), largest, rest);
        chains.push(((largest, bound), left));
        rest = others;
    }
    chains
}

/// What can be done, from the bound of the largest micro-batch of every mesh.
fn frontier<'a>(
    scope: &'a Scope<'a>,
    (candidates, of): (&'a [Candidate], Forms<'_>),
    on_progress: OnProgress<'_>,
) -> Frontier<'a> {
    let all: Vec<usize> = (0..candidates.len()).collect();
    let groups: Vec<&[usize]> = all.chunk_by(|a, b| same_mesh(&candidates[*a], &candidates[*b])).collect();
    let mut frontier = Frontier::new(scope, candidates);
    let mut done = 0;
    for some in groups.chunks(BATCH * 16) {
        let found: Vec<Vec<Chain>> =
            some.par_iter().map(|group| chains(scope, (candidates, of), group)).collect();
        for (group, chains) in some.iter().zip(found) {
            let n_legal: usize = chains.iter().map(|(_, left)| 1 + left.len()).sum();
            frontier.n_illegal += (group.len() - n_legal) as u64;
            chains.into_iter().for_each(|(largest, left)| frontier.add(largest, left));
            done += group.len() as u64;
        }
        on_progress(Progress { done, total: candidates.len() as u64, best: None, change: None });
    }
    frontier
}

/// What came of working candidates out.
#[derive(Default)]
pub(crate) struct Ranked {
    /// The fastest first.
    pub(crate) worked: Vec<Worked>,
    /// The closest that overflows.
    pub(crate) closest: Option<Dropped>,
}

impl Ranked {
    pub(crate) fn best(&self) -> Option<&Arranged> {
        self.worked.first().map(|one| &one.arranged)
    }

    /// Takes in a candidate that was worked out; whether it is the fastest by now.
    fn take(&mut self, found: Result<Worked, Dropped>, tally: &mut Tally) -> bool {
        match found {
            Ok(worked) => {
                tally.n_simulated += 1;
                let is_fastest =
                    self.best().is_none_or(|best| worked.arranged.step_time() < best.step_time());
                insert(&mut self.worked, worked);
                return is_fastest;
            }
            Err(Dropped::Slower) => tally.n_bounded += 1,
            Err(dropped) => {
                tally.n_unfit += 1;
                self.closest = [self.closest.take(), Some(dropped)].into_iter().flatten().reduce(nearer);
            }
        }
        false
    }
}

/// What may be left: in candidates that were worked out, and those that were not.
pub(crate) struct Left<'a> {
    frontier: Frontier<'a>,
    /// Those that fit with choices that may not be the best that do.
    crowded: Vec<usize>,
    /// Whether it ended because nothing came closer to what must be undercut: those left are not counted yet.
    pub(crate) gave_up: bool,
}

impl<'a> Left<'a> {
    /// What all its candidates share.
    pub(crate) fn scope(&self) -> &'a Scope<'a> {
        self.frontier.scope()
    }

    /// Bounds what other choices could come to; the candidates that could be faster than a limit by their bounds alone,
    /// the most promising first.
    pub(crate) fn look_inside(
        &self,
        of: Forms<'_>,
        limit: Seconds,
        tally: &mut Tally,
    ) -> Vec<(Candidate, Bound)> {
        let Self { frontier, crowded, .. } = self;
        // What layers may do that are to cut no tokens beside products, they may on a mesh that leaves it open: its
        // bound is theirs.
        let leaves_tokens = frontier.scope().pins().leaves_tokens();
        let is_bounded = |at: &usize| leaves_tokens && frontier.at(*at).shape.cuts_no_tokens();
        let crowded: Vec<usize> = crowded.iter().copied().filter(|at| !is_bounded(at)).collect();
        let inside = inside(frontier, &crowded, (of, limit.0, tally.open_bound));
        tally.inside_bound = lesser(tally.inside_bound, inside.least);
        tally.by_sums = lesser(tally.by_sums, inside.by_sums);
        let with_bound = |&at: &usize| Some((frontier.at(at).clone(), frontier.own(at)?.clone()));
        inside.promising.iter().take(BATCH).filter_map(with_bound).collect()
    }
}

/// Bounds candidates and works them out, the most promising first, until no bound left is below the best, or the limit
/// is reached.
pub(crate) fn work_out<'a>(
    scope: &'a Scope<'a>,
    (candidates, of): (&'a [Candidate], Forms<'_>),
    ranked: &mut Ranked,
    (start, tally): (&Start, &mut Tally),
    watch: (Stop<'_>, OnProgress<'_>),
) -> Left<'a> {
    tally.n_candidates += candidates.len() as u64;
    let frontier = frontier(scope, (candidates, of), watch.1);
    let mut left = Left { frontier, crowded: Vec::new(), gave_up: false };
    go_on(&mut left, of, ranked, (start, tally), watch);
    left
}

/// The same with what is left.
pub(crate) fn go_on(
    Left { frontier, crowded, gave_up }: &mut Left<'_>,
    of: Forms<'_>,
    ranked: &mut Ranked,
    (start, tally): (&Start, &mut Tally),
    (stop, on_progress): (Stop<'_>, OnProgress<'_>),
) {
    let scope = frontier.scope();
    *gave_up = false;
    // Whoever says how many batches to do gets as many.
    let most = if stop.work.is_some() { u64::MAX } else { tally.work + frontier.affordable() };
    // Candidates worked out since the fastest was.
    let mut since = 0;
    let limit = |ranked: &Ranked| start.least(ranked.best()).map_or(f64::INFINITY, |least| least.0);
    let bounds_limit = |ranked: &Ranked| match start.is_unmet(ranked.best()) {
        true => limit(ranked) / start.over_bound,
        false => limit(ranked),
    };
    let has_plan = |ranked: &Ranked| start.least(ranked.best()).is_some();
    let goes_on = |work: u64, frontier: &Frontier<'_>| work < most || frontier.n_left() <= FEW_LEFT;
    while goes_on(tally.work, frontier) || !has_plan(ranked) {
        let has_plan = has_plan(ranked);
        let ends = match has_plan {
            true => start.is_settled(tally) || stop.now(tally.work),
            false => start.ends(tally.work, stop, ranked.closest.as_ref()),
        };
        if ends {
            tally.stopped = true;
            break;
        }
        if since >= start.patience && start.is_in_vain(ranked.best()) {
            *gave_up = true;
            break;
        }
        // Until something undercuts what must be nobody asks for a proof, and working a few out takes less time than
        // bounding all.
        let weighs = has_plan && !start.is_in_vain(ranked.best());
        let (tasks, n_dropped) = frontier.take((BATCH, tally.work), (bounds_limit(ranked), weighs));
        tally.n_bounded += n_dropped;
        if tasks.is_empty() {
            break;
        }
        tally.work += 1;
        let shown = if start.is_unmet(ranked.best()) { start.reach } else { WORTH_SHOWING };
        let tasks: Vec<(Task, usize)> =
            tasks.into_iter().filter_map(|task| Some((task, frontier.candidate(task)?))).collect();
        let limits = Limits {
            bounds: bounds_limit(ranked),
            known: limit(ranked),
            showing: limit(ranked) * shown,
            weighs,
        };
        let mut done: Vec<(usize, usize, Done)> = longest_first(tasks)
            .into_par_iter()
            .with_max_len(1)
            .map(|(place, (task, at))| (place, at, do_task(frontier, (task, at), of, limits)))
            .collect();
        done.sort_by_key(|(place, ..)| *place);
        for (_, at, one) in done {
            let one = without_misnamed(scope, one, tally);
            if fits_by_some_choices(frontier, at, &one) {
                crowded.push(at);
            }
            if let Some(is_fastest) = take_in(frontier, (at, one), ranked, (limits.bounds, tally)) {
                since = if is_fastest { 0 } else { since + 1 };
            }
        }
        ask_fastest(scope, ranked, (start, tally));
        let total = frontier.n_all();
        let best = ranked.best().map(Arranged::step_time);
        on_progress(Progress { done: total - frontier.n_left(), total, best, change: None });
    }
    ask_near(scope, ranked, (start, tally), stop);
    // Of a search that found nothing nobody asks what it could have been.
    if !ranked.best().is_some_and(|best| start.is_within_reach(best)) {
        crowded.clear();
    }
    tally.roomy_bound = lesser(tally.roomy_bound, frontier.roomy(ROOMY));
    tally.n_illegal += std::mem::take(&mut frontier.n_illegal);
    tally.n_unfit += std::mem::take(&mut frontier.n_overflow);
    if *gave_up {
        return;
    }
    let (n_open, open_bound) = frontier.open(bounds_limit(ranked));
    tally.n_bounded += frontier.n_left() - n_open;
    tally.n_open += n_open;
    tally.open_bound = lesser(tally.open_bound, open_bound.map(Seconds));
}

/// Tasks with their places, in the order in which they are begun: what takes longest last would leave all threads but one
/// idle.
fn longest_first(tasks: Vec<(Task, usize)>) -> Vec<(usize, (Task, usize))> {
    let mut order: Vec<(usize, (Task, usize))> = tasks.into_iter().enumerate().collect();
    order.sort_by_key(|(_, (task, _))| match task {
        Task::WorkOut(_) => 0,
        Task::WeighAll(_) => 1,
        Task::Weigh(_) => 2,
        Task::Refine(_) => 3,
    });
    order
}

/// Takes in what was done about a candidate; whether that is the fastest by now, where it was worked out.
fn take_in(
    frontier: &mut Frontier<'_>,
    (at, done): (usize, Done),
    ranked: &mut Ranked,
    (limit, tally): (f64, &mut Tally),
) -> Option<bool> {
    match done {
        Done::Refined(group, at, found) => {
            tally.n_bounded += frontier.refined((group, at), found.map(|found| *found), limit);
            None
        }
        Done::Weighed(task, room) => {
            tally.n_bounded += frontier.weighed(task, room, limit);
            None
        }
        Done::WorkedOut(found) => {
            if let Err(Dropped::Memory { needed, capacity, .. }) = &*found {
                frontier.overflowed(at, needed / capacity);
            }
            let is_fastest = ranked.take(*found, tally);
            if is_fastest {
                frontier.favour(at);
            }
            Some(is_fastest)
        }
    }
}

/// Whether a candidate was worked out and fits, by choices that are some of many: where memory is crowded, what is sent
/// once per step shows, or hosts may hold what no choice problem knows.
fn fits_by_some_choices(frontier: &Frontier<'_>, at: usize, done: &Done) -> bool {
    let own = frontier.own(at);
    let is_one_of_many =
        own.is_some_and(|bound| bound.crowding >= CROWDED) || shows_once(frontier.at(at), own);
    let Done::WorkedOut(found) = done else { return false };
    let fits = matches!(**found, Ok(_) | Err(Dropped::Slower));
    fits && (is_one_of_many || frontier.scope().hosts_may_hold_more())
}

/// Whether a plan has not the degrees that were pinned; the fastest such is kept, to be told where there is no other.
pub(crate) fn is_misnamed(scope: &Scope<'_>, worked: &Worked, tally: &mut Tally) -> bool {
    let misnamed = Misnamed::of(scope, &worked.arranged);
    let is_misnamed = misnamed.is_some();
    tally.misnamed = tally.misnamed.take().into_iter().chain(misnamed).reduce(Misnamed::faster);
    is_misnamed
}

/// What was done, where a plan without the degrees that were pinned is none.
fn without_misnamed(scope: &Scope<'_>, done: Done, tally: &mut Tally) -> Done {
    match done {
        Done::WorkedOut(found) => Done::WorkedOut(Box::new(match *found {
            Ok(one) if is_misnamed(scope, &one, tally) => Err(Dropped::NoStrategy),
            other => other,
        })),
        other @ (Done::Refined(..) | Done::Weighed(..)) => other,
    }
}

/// Seconds from which on something is of no interest.
#[derive(Clone, Copy)]
struct Limits {
    /// What has such a bound.
    bounds: f64,
    /// A plan, were it the fastest.
    known: f64,
    /// A plan to be shown.
    showing: f64,
    /// Whether what crowds memory is bounded in the memory that there is before it is worked out.
    weighs: bool,
}

/// Does a task about a candidate.
fn do_task(frontier: &Frontier<'_>, (task, at): (Task, usize), of: Forms<'_>, limits: Limits) -> Done {
    let (scope, candidate) = (frontier.scope(), frontier.at(at));
    let limit = limits.bounds;
    match task {
        Task::Refine(group) => {
            let worth = frontier.worth(task, at);
            let at_once = frontier.weighs_at_once(group, at).filter(|_| limits.weighs);
            Done::Refined(
                group,
                at,
                match at_once {
                    Some(left) => scope.bound_and_rooms(candidate, &left, (of, limit, worth)),
                    None => scope.bound_by_known(candidate, of).map(|bound| (bound, [None, None])),
                }
                .map(Box::new),
            )
        }
        Task::Weigh(_) | Task::WeighAll(_) => {
            let worth = frontier.worth(task, at);
            let room = |(tables, all): (_, Vec<&Candidate>)| scope.room(tables, &all, (of, limit, worth));
            Done::Weighed(task, frontier.weighs(task).and_then(room))
        }
        Task::WorkOut(_) => {
            // Which choices lead where memory is free is asked again of those that compute nothing twice.
            let own = match frontier.own(at) {
                Some(own) if own.computes_again => scope.bound(candidate, of),
                own => own.cloned(),
            };
            Done::WorkedOut(Box::new(own.ok_or(Dropped::NoStrategy).and_then(|bound| {
                let asked =
                    Asking { limit: limits.showing, known: limits.known, ..Asking::of(Forms::Leading) };
                let arranged = scope.evaluate_below(candidate, &bound, asked)?;
                let least = frontier.least(at);
                debug_assert!(
                    arranged.step_time().0 >= least,
                    "{:?} of {candidate:?}, at least {least}, bound {bound:?}",
                    arranged.step_time(),
                );
                Ok(Worked::new(arranged, bound, asked.way))
            })))
        }
    }
}

/// What came of a task.
enum Done {
    /// The bound of a candidate of a mesh.
    Refined(usize, usize, Option<Box<Refined>>),
    /// Least work in the memory that there is.
    Weighed(Task, Option<Room>),
    /// A candidate worked out.
    WorkedOut(Box<Result<Worked, Dropped>>),
}

/// Of two that overflow, the one that needs less; ties to the first.
pub(crate) fn nearer(known: Dropped, next: Dropped) -> Dropped {
    let need = |dropped: &Dropped| match dropped {
        Dropped::Memory { needed, .. } => (*needed, 0.0),
        // Its devices have room.
        Dropped::Host { needed, capacity, .. } => (0.0, needed / capacity),
        Dropped::NoStrategy | Dropped::Slower => (f64::INFINITY, 0.0),
    };
    if need(&known) <= need(&next) { known } else { next }
}
