//! The search over everything: the most promising candidates first, until no bound is below the best.
//!
//! ```text
//! for every number of stages and mesh:                bound(c)       -> frontier(), in parallel
//! the most promising first, while bound(c) < best:    bound(c), or
//!                                                     room(c), where memory is crowded, or
//!                                                     evaluate(c)    -> work_out(), in parallel batches
//! those that were the best, once more:                evaluate(c)    -> polish()
//! ```
//! Layers are worked out as they were read first. Bounds are those of all forms; what a form saves there is taken for
//! what it saves at all, or so many times that as some were seen to save, so that the candidates behind the best by more than
//! that need not be asked again. Where forms
//! times meshes are too many, one form of every kind, the fastest on a few meshes, leads: layers are worked out in it,
//! bounds are of it, and only the first candidates are asked again.
//! Workers compute and never decide: batches have a fixed size and are reduced in order, so the plan and the counts in
//! it are the same with any number of threads.

use cost_model::Constants;
use ir::units::Seconds;
use rayon::prelude::*;

use crate::bound::Bound;
use crate::candidate::{Candidate, Dropped, Scope, same_mesh};
use crate::enumerate::{candidates, named_candidates};
use crate::evaluate::Asking;
use crate::forms::Forms;
use crate::found::{Again, Found, Misnamed, Start, Tally, WORTH_SHOWING, lesser};
use crate::frontier::{Frontier, Refined, Task, dividing};
use crate::inside::inside;
use crate::polish::{CROWDED, Worked, insert, keep_distinct, polish, reconsider};
use crate::refusals::{NO_SCHEDULE, check_request, no_candidate, nothing_fits, states_overflow};
use crate::request::{NoPlan, OnProgress, Progress, Request, Solver, Stop, Untried};
use crate::room::Room;

/// Candidates worked out between two looks at the best: a fixed number, so that threads do not change the work.
pub(crate) const BATCH: usize = 8;

/// Candidates that are seen to beyond the limit on work: so few take little more of it, and a proof is worth that.
const FEW_LEFT: u64 = 16;

/// Fused forms of layers times meshes, up to which bounds are those of all forms: beyond, they would take most of the
/// time of the search (deepseek-v2 on 128 and on 256 devices took four to five times as long for the same plans).
const MAX_FORM_BOUNDS: usize = 300;

/// Where so many times as many candidates overflow as fit, tensor degrees are tried by name as well.
const FEW_FIT: u64 = 8;

/// Where candidates that crowd memory could come to less than this part of the best by other choices, tensor degrees are
/// tried by name too, and these candidates in more ways.
const WORTH_LOOKING: f64 = 0.98;

/// Where devices wait for launches for more than this part of a step, too.
const MUCH_WAITING: f64 = 0.05;

/// That is done where there are no more candidates than this: it takes as long again.
const FEW_CANDIDATES: usize = 200;

/// It is always done where there are no more than this: it takes some tenths of a second.
const HANDFUL: usize = 100;

/// Candidates that are asked which forms are the fastest.
const PROBES: usize = 8;

/// Multiples of the devices' memory that hosts can make up for: what lies beyond crosses their links too often.
const ROOMY: f64 = 3.0;

/// Finds the fastest arrangement.
///
/// # Errors
/// Where the request contradicts itself, or nothing fits.
pub fn search<'a>(
    request: &'a Request,
    constants: &'a Constants,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Result<Found<'a>, NoPlan> {
    search_from(request, constants, Start::default(), watch).0
}

/// The same after other searches; and how it went, whatever came of it.
pub(crate) fn search_from<'a>(
    request: &'a Request,
    constants: &'a Constants,
    start: Start,
    watch: (Stop<'_>, OnProgress<'_>),
) -> (Result<Found<'a>, NoPlan>, Tally) {
    let new = || Tally { work: start.work, n_layouts: 1, ..Tally::default() };
    if let Err(why) = check_request(request) {
        return (Err(why), new());
    }
    let Some(scope) = Scope::new(request, constants) else {
        return (Err(NoPlan::Impossible { what: "the cluster has no devices".into() }), new());
    };
    let mut tally = new();
    let found = searched(scope, (start.clone(), &mut tally), watch);
    let misnames = found.is_err() && tally.misnamed.is_some() && !tally.stopped;
    let Some(tp) = request.pins.tp.filter(|_| misnames) else { return (found, tally) };
    let Some(scope) = Scope::new(request, constants) else { return (found, tally) };
    // A fused form may be faster where tokens are cut than its parts are as they should be, and is then what is found of a mesh.
    let mut tally = new();
    let bounds = None;
    let found = searched(scope.with_forms_cut(tp), (Start { bounds, ..start }, &mut tally), watch);
    (found, tally)
}

fn searched<'a>(
    mut scope: Scope<'a>,
    (start, tally): (Start, &mut Tally),
    (stop, on_progress): (Stop<'_>, OnProgress<'_>),
) -> Result<Found<'a>, NoPlan> {
    let request = scope.request;
    let candidates = candidates(request);
    if candidates.is_empty() {
        return Err(NoPlan::Impossible { what: no_candidate(request) });
    }
    let has_schedule = |group: &&[Candidate]| group.iter().any(|one| scope.has_schedule(one));
    let candidates: Vec<Candidate> =
        candidates.chunk_by(same_mesh).filter(has_schedule).flatten().cloned().collect();
    if candidates.is_empty() {
        return Err(NoPlan::Impossible { what: NO_SCHEDULE.into() });
    }
    if let Some(what) = too_large(&scope, &candidates) {
        return Err(NoPlan::Impossible { what });
    }
    if let Some(overflow) = states_overflow(&scope, request) {
        return Err(overflow);
    }
    scope.bounds = start.bounds.clone().unwrap_or_default();
    let forms = || match forms_of_bounds(&scope, &candidates) {
        Forms::Leading => (true, leading(&scope, &candidates)),
        Forms::Chosen(_) | Forms::All => (false, vec![0; scope.forms.len()]),
    };
    (tally.bounds_leading, scope.leading) = scope.bounds.clone().forms(forms);
    let of = if tally.bounds_leading { Forms::Leading } else { Forms::All };
    let (mut worked, mut closest, promising) =
        work_out(&scope, (&candidates, of), Vec::new(), (&start, tally), (stop, on_progress));
    let least_degree = if candidates.len() <= HANDFUL { 1 } else { 2 };
    let some_fit = !worked.is_empty() || closest.as_ref().is_some_and(|dropped| scope.nearly_fits(dropped));
    // After another search most of what would fit is too slow to be worked out.
    let few_fit = some_fit && start.bounds.is_none() && tally.n_unfit > FEW_FIT * tally.n_simulated;
    if few_fit && !tally.stopped {
        let named = named_candidates(&scope, least_degree);
        let (all, nearest, _) = work_out(&scope, (&named, of), worked, (&start, tally), (stop, on_progress));
        worked = all;
        closest = [closest, nearest].into_iter().flatten().reduce(nearer);
    }
    if worked.first().is_some_and(|best| !start.is_within_reach(&best.arranged)) {
        let what = "nothing is within reach of what is known".into();
        return Err(NoPlan::Impossible { what });
    }
    if start.again >= Again::InForms {
        polish(&scope, &mut worked, tally, stop);
    }
    let n_candidates = || candidates.iter().filter(|one| scope.has_schedule(one)).count();
    let misses = || worked.first().is_some_and(|best| misses(n_candidates(), tally.inside_bound, best));
    if start.again == Again::InMoreWays && !tally.stopped && misses() {
        let named = if few_fit { Vec::new() } else { named_candidates(&scope, least_degree) };
        let watch = (stop, on_progress);
        look_again((&scope, of), (&named, &promising), (&mut worked, tally), watch);
    }
    if let Some(what) = scope.troubles.first() {
        return Err(NoPlan::Impossible { what });
    }
    // Other choices inside a candidate may have made other degrees of it.
    worked.retain(|one| !is_misnamed(&scope, one, tally));
    if worked.is_empty()
        && let Some(misnamed) = &tally.misnamed
    {
        return Err(NoPlan::Impossible { what: misnamed.what.clone() });
    }
    if worked.is_empty() {
        let untried = tally.stopped.then_some(Untried::Plans);
        return Err(nothing_fits(&scope, request, closest, untried));
    }
    let ranking = worked.into_iter().map(|one| one.arranged).collect();
    Ok(Found { asked: &request.cluster, scope, ranking, tally: tally.clone() })
}

/// Whether candidates are so few that it costs nothing to look again, or prices miss what decides and candidates are few enough
/// to look for it: other choices could make those that crowd memory much faster than the best, or devices wait for launches.
fn misses(n_candidates: usize, inside: Option<Seconds>, best: &Worked) -> bool {
    let time = best.arranged.step_time();
    let waits = || best.arranged.waiting() > time * MUCH_WAITING;
    let is_worth_it = || inside.is_some_and(|least| least < time * WORTH_LOOKING) || waits();
    n_candidates <= HANDFUL || n_candidates <= FEW_CANDIDATES && is_worth_it()
}

/// Looks for what is faster than the best with tensor degrees by name, and by other choices in the candidates that could be.
fn look_again(
    (scope, of): (&Scope<'_>, Forms<'_>),
    (named, promising): (&[Candidate], &[(Candidate, Bound)]),
    (worked, tally): (&mut Vec<Worked>, &mut Tally),
    watch: (Stop<'_>, OnProgress<'_>),
) {
    let Some(best) = worked.first().map(|one| one.arranged.step_time()) else { return };
    let n_forms_open = tally.n_forms_open;
    let start = Start { work: tally.work, limit: Some(best), ..Start::default() };
    let (mut others, ..) = work_out(scope, (named, of), Vec::new(), (&start, tally), watch);
    reconsider(scope, &mut others, promising, best);
    polish(scope, &mut others, tally, watch.0);
    tally.n_forms_open += n_forms_open;
    others.into_iter().for_each(|one| insert(worked, one));
    keep_distinct(worked);
}

/// What to say where the solver that is asked for cannot take the problem of some layer.
fn too_large(scope: &Scope<'_>, candidates: &[Candidate]) -> Option<String> {
    match scope.request.solver {
        Solver::Structured => None,
        Solver::Microlp => candidates.iter().find_map(|candidate| scope.too_large(candidate)),
    }
}

/// Which forms the bounds are of.
fn forms_of_bounds(scope: &Scope<'_>, candidates: &[Candidate]) -> Forms<'static> {
    let n_meshes = candidates.chunk_by(same_mesh).count();
    let n_fused: usize = scope.forms.iter().map(|forms| forms.len() - 1).sum();
    if n_fused * n_meshes <= MAX_FORM_BOUNDS { Forms::All } else { Forms::Leading }
}

/// Per kind, the form that is the fastest where memory is free, over a few candidates from the whole list.
fn leading(scope: &Scope<'_>, candidates: &[Candidate]) -> Vec<usize> {
    let step = candidates.len().div_ceil(PROBES);
    let probes: Vec<&Candidate> = candidates.iter().skip(step / 2).step_by(step).collect();
    let times: Vec<Vec<Vec<Option<f64>>>> =
        probes.par_iter().map(|probe| scope.times_of_forms(probe)).collect();
    let of_kind = |kind: usize| {
        let share = |form: usize| -> f64 {
            let one = |times: &Vec<Vec<Option<f64>>>| Some(times[kind][form]? / times[kind][0]?);
            // A form that a mesh cannot run is no help there.
            times.iter().map(|times| one(times).unwrap_or(1.0)).sum()
        };
        let forms = 0..scope.forms[kind].len();
        forms.min_by(|a, b| share(*a).total_cmp(&share(*b))).unwrap_or(0)
    };
    (0..scope.forms.len()).map(of_kind).collect()
}

/// A candidate with its bound, and those of its mesh whose micro-batches divide its own.
type Chain = ((usize, Bound), Vec<usize>);

/// The candidates of a mesh, the smallest micro-batch first, by what they divide: the largest that the mesh can run at all,
/// of the others the largest again. What cannot run is in none.
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

/// Bounds candidates and works them out, the most promising first, until no bound left is below the best, or the limit is reached;
/// fastest first, the closest that overflows, and those of which other choices could be faster.
fn work_out(
    scope: &Scope<'_>,
    (candidates, of): (&[Candidate], Forms<'_>),
    mut ranking: Vec<Worked>,
    (start, tally): (&Start, &mut Tally),
    (stop, on_progress): (Stop<'_>, OnProgress<'_>),
) -> (Vec<Worked>, Option<Dropped>, Vec<(Candidate, Bound)>) {
    tally.n_candidates += candidates.len() as u64;
    let mut frontier = frontier(scope, (candidates, of), on_progress);
    // Whoever says how many batches to do gets as many.
    let most = if stop.work.is_some() { u64::MAX } else { tally.work + frontier.affordable() };
    let mut closest: Option<Dropped> = None;
    // Worked out, and fit with choices that may not be the best that do.
    let mut crowded: Vec<usize> = Vec::new();
    let known = start.limit.map_or(f64::INFINITY, |limit| limit.0);
    let limit =
        |ranking: &[Worked]| ranking.first().map_or(known, |one| one.arranged.step_time().0.min(known));
    let has_plan = |ranking: &[Worked]| !ranking.is_empty() || start.limit.is_some();
    let goes_on = |work: u64, frontier: &Frontier<'_>| work < most || frontier.n_left() <= FEW_LEFT;
    while goes_on(tally.work, &frontier) || !has_plan(&ranking) {
        let ends = if has_plan(&ranking) { stop.now(tally.work) } else { start.ends(stop, closest.as_ref()) };
        if ends {
            tally.stopped = true;
            break;
        }
        let (tasks, n_dropped) = frontier.take((BATCH, tally.work), limit(&ranking));
        tally.n_bounded += n_dropped;
        if tasks.is_empty() {
            break;
        }
        tally.work += 1;
        let is_beaten =
            |ranking: &[Worked]| ranking.first().is_none_or(|one| one.arranged.step_time().0 >= known);
        let shown = if known.is_finite() && is_beaten(&ranking) { start.reach } else { WORTH_SHOWING };
        let worth_showing = limit(&ranking) * shown;
        let tasks: Vec<(Task, usize)> =
            tasks.into_iter().filter_map(|task| Some((task, frontier.candidate(task)?))).collect();
        let limits = (limit(&ranking), worth_showing);
        let done: Vec<Done> = tasks
            .par_iter()
            .with_max_len(1)
            .map(|&(task, at)| do_task(&frontier, (task, at), of, limits))
            .collect();
        for ((_, at), one) in tasks.into_iter().zip(done) {
            let one = without_misnamed(scope, one, tally);
            if fits_by_some_choices(&frontier, at, &one) {
                crowded.push(at);
            }
            match one {
                Done::Refined(group, at, found) => {
                    let found = found.map(|found| *found);
                    tally.n_bounded += frontier.refined((group, at), found, limits.0);
                }
                Done::Weighed(task, room) => tally.n_bounded += frontier.weighed(task, room, limits.0),
                Done::WorkedOut(found) => match *found {
                    Ok(worked) => {
                        tally.n_simulated += 1;
                        insert(&mut ranking, worked);
                    }
                    Err(Dropped::Slower) => tally.n_bounded += 1,
                    Err(dropped) => {
                        tally.n_unfit += 1;
                        closest = [closest, Some(dropped)].into_iter().flatten().reduce(nearer);
                    }
                },
            }
        }
        let total = candidates.len() as u64;
        let best = ranking.first().map(|found| found.arranged.step_time());
        on_progress(Progress { done: total - frontier.n_left(), total, best, change: None });
    }
    // Of a search that found nothing nobody asks what it could have been.
    if !ranking.first().is_some_and(|best| start.is_within_reach(&best.arranged)) {
        crowded.clear();
    }
    let inside = inside(&frontier, &crowded, (of, limit(&ranking)));
    tally.inside_bound = lesser(tally.inside_bound, inside.least);
    let promising = inside.promising.iter().take(BATCH);
    let promising =
        promising.filter_map(|&at| Some((frontier.at(at).clone(), frontier.own(at)?.clone()))).collect();
    tally.roomy_bound = lesser(tally.roomy_bound, frontier.roomy(ROOMY));
    let (n_open, open_bound) = frontier.open(limit(&ranking));
    tally.n_bounded += frontier.n_left() - n_open;
    tally.n_open += n_open;
    tally.n_illegal += frontier.n_illegal;
    tally.open_bound = lesser(tally.open_bound, open_bound.map(Seconds));
    (ranking, closest, promising)
}

/// Whether a candidate was worked out and fits, by choices that are some of many: where memory is crowded, or hosts may hold what no
/// choice problem knows.
fn fits_by_some_choices(frontier: &Frontier<'_>, at: usize, done: &Done) -> bool {
    let is_crowded = frontier.own(at).is_some_and(|bound| bound.crowding >= CROWDED);
    let Done::WorkedOut(found) = done else { return false };
    let fits = matches!(**found, Ok(_) | Err(Dropped::Slower));
    fits && (is_crowded || frontier.scope().hosts_may_hold_more())
}

/// Whether a plan has not the degrees that were pinned; the fastest such is kept, to be told where there is no other.
fn is_misnamed(scope: &Scope<'_>, worked: &Worked, tally: &mut Tally) -> bool {
    let misnamed = Misnamed::of(scope, &worked.arranged);
    let is_misnamed = misnamed.is_some();
    tally.misnamed = tally.misnamed.take().into_iter().chain(misnamed).reduce(Misnamed::faster);
    is_misnamed
}

/// What was done, where a plan without the degrees that were pinned is none.
fn without_misnamed(scope: &Scope<'_>, done: Done, tally: &mut Tally) -> Done {
    match done {
        Done::WorkedOut(found) if found.as_ref().as_ref().is_ok_and(|one| is_misnamed(scope, one, tally)) => {
            Done::WorkedOut(Box::new(Err(Dropped::NoStrategy)))
        }
        other @ (Done::Refined(..) | Done::Weighed(..) | Done::WorkedOut(_)) => other,
    }
}

/// Does a task about a candidate, where nothing is of interest that takes as long as the first limit, and is shown up to the
/// second.
fn do_task(
    frontier: &Frontier<'_>,
    (task, at): (Task, usize),
    of: Forms<'_>,
    (limit, worth_showing): (f64, f64),
) -> Done {
    let (scope, candidate) = (frontier.scope(), frontier.at(at));
    match task {
        Task::Refine(group) => {
            let worth = frontier.worth(task, at);
            let at_once = frontier.weighs_at_once(group, at).filter(|_| limit.is_finite());
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
                let asked = Asking { limit: worth_showing, known: limit, ..Asking::of(Forms::Leading) };
                let (arranged, way) = scope.evaluate_ways(candidate, &bound, asked)?;
                let least = frontier.least(at);
                debug_assert!(
                    arranged.step_time().0 >= least,
                    "{:?} of {candidate:?}, at least {least}, bound {bound:?}",
                    arranged.step_time(),
                );
                Ok(Worked { arranged, bound, way, forms: None, is_refined: false })
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
fn nearer(known: Dropped, next: Dropped) -> Dropped {
    let need = |dropped: &Dropped| match dropped {
        Dropped::Memory { needed, .. } => *needed,
        // Its devices have room.
        Dropped::Host { .. } => 0.0,
        Dropped::NoStrategy | Dropped::Slower => f64::INFINITY,
    };
    if need(&known) <= need(&next) { known } else { next }
}
