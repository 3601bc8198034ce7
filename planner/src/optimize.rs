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
//! what it saves at all, or so many times that as some were seen to save, so that the candidates behind the best by
//! more than that need not be asked again. Where forms times meshes are too many, one form of every kind, the fastest
//! on a few meshes, leads: layers are worked out in it, bounds are of it, and only the first candidates are asked
//! again. Workers compute and never decide: batches have a fixed size and are reduced in order, so the plan and the
//! counts in it are the same with any number of threads.

use std::sync::Arc;

use cost_model::Constants;
use ir::units::Seconds;
use rayon::prelude::*;

use crate::bound::Bound;
use crate::candidate::{Candidate, Dropped, Scope, same_mesh};
use crate::enumerate::{candidates, named_candidates};
use crate::forms::Forms;
use crate::found::{Again, Found, Further, Start, Tally};
use crate::freed::held_candidates;
use crate::polish::{Worked, insert, keep_distinct, polish, reconsider};
use crate::refusals::{check_request, no_candidate, no_schedule, nothing_fits, states_overflow};
use crate::request::{NoPlan, OnProgress, Request, Solver, Stop, Untried};
use crate::shapes::gcd;
use crate::work_out::{Left, Ranked, go_on, is_misnamed, work_out};

/// Fused forms of layers times meshes, up to which bounds are those of all forms: beyond, they would take most of the
/// time of the search (deepseek-v2 on 128 and on 256 devices took four to five times as long for the same plans).
const MAX_FORM_BOUNDS: usize = 300;

/// Where so many times as many candidates overflow as fit, tensor degrees are tried by name as well.
const FEW_FIT: u64 = 8;

/// Where candidates that crowd memory could come to less than this part of the best by other choices, tensor degrees
/// are tried by name too, and these candidates in more ways.
const WORTH_LOOKING: f64 = 0.98;

/// That is done where there are no more candidates than this: it takes as long again.
const FEW_CANDIDATES: usize = 200;

/// It is always done where there are no more than this: it takes some tenths of a second.
const HANDFUL: usize = 100;

/// No more candidates than this are worked out though the states alone are more than all devices hold: it takes some
/// tenths of a second.
const FEW_TO_TELL: usize = 12;

/// Candidates that are asked which forms are the fastest.
const PROBES: usize = 8;

/// What a search says of which nothing is near what it must undercut; nobody is told.
const BEYOND_REACH: &str = "nothing is within reach of what is known";

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
    // A fused form may be faster where tokens are cut than its parts are as they should be, and is then what is found
    // of a mesh.
    let mut tally = new();
    let (bounds, rooms) = (None, None);
    let found = searched(scope.with_forms_cut(tp), (Start { bounds, rooms, ..start }, &mut tally), watch);
    // Its bounds are of fewer forms than other searches have.
    let own = |found: Found<'a>| {
        let (bounds, rooms) = (Arc::default(), Arc::default());
        Found { scope: Scope { bounds, rooms, ..found.scope }, ..found }
    };
    (found.map(own), tally)
}

/// Candidates on meshes of which some have a schedule.
fn scheduled(scope: &Scope<'_>) -> Result<Vec<Candidate>, NoPlan> {
    let all = candidates(scope.request);
    if all.is_empty() {
        return Err(NoPlan::Impossible { what: no_candidate(scope.request) });
    }
    let has_schedule = |group: &&[Candidate]| group.iter().any(|one| scope.has_schedule(one));
    let some: Vec<Candidate> = all.chunk_by(same_mesh).filter(has_schedule).flatten().cloned().collect();
    if some.is_empty() { Err(NoPlan::Impossible { what: no_schedule(scope.request) }) } else { Ok(some) }
}

fn searched<'a>(
    mut scope: Scope<'a>,
    (start, tally): (Start, &mut Tally),
    watch: (Stop<'_>, OnProgress<'_>),
) -> Result<Found<'a>, NoPlan> {
    let request = scope.request;
    let candidates = scheduled(&scope)?;
    // Of a few, what the closest needs is told, not what none does without.
    let is_told = start.settles.is_none() && candidates.len() <= FEW_TO_TELL;
    if let Some(what) = too_large(&scope, &candidates) {
        return Err(NoPlan::Impossible { what });
    }
    if let Some(overflow) = states_overflow(&scope, request).filter(|_| !is_told) {
        return Err(overflow);
    }
    scope.bounds = start.bounds.clone().unwrap_or_default();
    scope.rooms = start.rooms.clone().unwrap_or_default();
    let forms = || match forms_of_bounds(&scope, &candidates) {
        Forms::Leading => (true, leading(&scope, &candidates)),
        Forms::Chosen(_) | Forms::All => (false, vec![0; scope.forms.len()]),
    };
    (tally.bounds_leading, scope.leading) = scope.bounds.clone().forms(forms);
    let of = if tally.bounds_leading { Forms::Leading } else { Forms::All };
    let mut ranked = Ranked::default();
    // Axes that may do more come first: of plans that are the same it is theirs that may be faster in other forms.
    let held = if start.again >= Again::InForms { held_candidates(&scope, &candidates) } else { Vec::new() };
    let mut lefts = Vec::new();
    if !held.is_empty() {
        tally.further.insert(Further::HeldAxes);
        lefts.push(work_out(&scope, (&held, of), &mut ranked, (&start, &mut *tally), watch));
        // What named axes come to says why they do not come to what is pinned.
        tally.misnamed = None;
    }
    lefts.push(work_out(&scope, (&candidates, of), &mut ranked, (&start, &mut *tally), watch));
    let least_degree = if candidates.len() <= HANDFUL { 1 } else { 2 };
    let degrees = least_degree..=most_degree(request);
    let nearly_fits = ranked.closest.as_ref().is_some_and(|dropped| scope.nearly_fits(dropped));
    let some_fit = ranked.best().is_some() || nearly_fits;
    let few_fit = some_fit && !start.is_of_schedules && tally.n_unfit > FEW_FIT * tally.n_simulated;
    let named =
        if few_fit && !tally.stopped { named_candidates(&scope, degrees.clone()) } else { Vec::new() };
    if !named.is_empty() {
        lefts.push(work_out(&scope, (&named, of), &mut ranked, (&start, &mut *tally), watch));
    }
    let Ranked { mut worked, closest, .. } = ranked;
    if worked.first().is_some_and(|best| !start.is_within_reach(&best.arranged)) {
        return Err(NoPlan::Impossible { what: BEYOND_REACH.into() });
    }
    if start.again >= Again::InForms {
        let undercuts = start.must_undercut(worked.first().map(|one| &one.arranged));
        polish(&scope, &mut worked, (undercuts, tally), watch.0);
    }
    worked = take_up(&mut lefts, of, worked, (&start, tally), watch);
    let n_candidates = || candidates.iter().filter(|one| scope.has_schedule(one)).count();
    let is_in_vain = start.is_in_vain(worked.first().map(|one| &one.arranged));
    let mut promising = Vec::new();
    if let Some(best) = worked.first().filter(|_| !is_in_vain && start.settles.is_none()) {
        let limit = start.at_most(best.arranged.step_time());
        for left in &lefts {
            promising.extend(left.look_inside(of, limit, tally));
        }
    }
    let misses = || worked.first().is_some_and(|best| misses(n_candidates(), tally.inside_bound, best));
    let is_looked_at = !is_in_vain || may_come_closer(n_candidates(), worked.first());
    if start.again == Again::InMoreWays && is_looked_at && !tally.stopped && misses() {
        let named = if few_fit { Vec::new() } else { named_candidates(&scope, degrees) };
        look_again((&scope, of), (&named, &promising), (&mut worked, tally), watch);
    }
    if let Some(what) = scope.troubles.first() {
        return Err(NoPlan::Impossible { what });
    }
    // Other choices inside a candidate may have made other degrees of it.
    worked.retain(|one| !is_misnamed(&scope, one, tally));
    // Where something has no room only, what has room and other degrees is no answer.
    let lacks_memory = matches!(closest, Some(Dropped::Memory { .. } | Dropped::Host { .. }));
    if worked.is_empty()
        && !lacks_memory
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

/// Works out to its end what was given up, where what came of it turned out to be worth it.
fn take_up<'a>(
    lefts: &mut [Left<'a>],
    of: Forms<'_>,
    worked: Vec<Worked>,
    (start, tally): (&Start, &mut Tally),
    watch: (Stop<'_>, OnProgress<'_>),
) -> Vec<Worked> {
    let mut ranked = Ranked { worked, ..Ranked::default() };
    if !start.is_in_vain(ranked.best()) {
        for left in lefts.iter_mut().filter(|left| left.gave_up) {
            go_on(left, of, &mut ranked, (start, tally), watch);
            polish(left.scope(), &mut ranked.worked, (None, tally), watch.0);
        }
    }
    ranked.worked
}

/// The largest tensor degree that is tried by name: that of a node, unless nodes can cut neither batch nor sequence
/// among them.
fn most_degree(request: &Request) -> u64 {
    let (close, job) = (request.cluster.n_close(), &request.job);
    let n_nodes = request.cluster.n_devices() / close.max(1);
    let are_odd = [job.global_batch, job.sequence].into_iter().all(|length| gcd(length, n_nodes) == 1);
    if are_odd { request.cluster.n_devices() } else { close }
}

/// Whether candidates are so few that it costs nothing to look again, or prices miss what decides and candidates are
/// few enough to look for it: other choices could make those that crowd memory much faster than the best, or devices
/// wait for launches.
fn misses(n_candidates: usize, inside: Option<Seconds>, best: &Worked) -> bool {
    let time = best.arranged.step_time();
    let is_worth_it =
        || inside.is_some_and(|least| least < time * WORTH_LOOKING) || best.arranged.waits_much();
    n_candidates <= HANDFUL || n_candidates <= FEW_CANDIDATES && is_worth_it()
}

/// Whether what is in vain so far may still come to what must be undercut: of a handful where kernels are short, by
/// other forms or named degrees.
fn may_come_closer(n_candidates: usize, best: Option<&Worked>) -> bool {
    n_candidates <= HANDFUL && best.is_some_and(|best| best.arranged.waits_much())
}

/// Looks for what is faster than the best with tensor degrees by name, and by other choices in the candidates that
/// could be.
fn look_again(
    (scope, of): (&Scope<'_>, Forms<'_>),
    (named, promising): (&[Candidate], &[(Candidate, Bound)]),
    (worked, tally): (&mut Vec<Worked>, &mut Tally),
    watch: (Stop<'_>, OnProgress<'_>),
) {
    let Some(best) = worked.first().map(|one| one.arranged.step_time()) else { return };
    let n_forms_open = tally.n_forms_open;
    let start = Start { work: tally.work, limit: Some(best), ..Start::default() };
    let mut ranked = Ranked::default();
    let left = work_out(scope, (named, of), &mut ranked, (&start, tally), watch);
    let mut others = ranked.worked;
    let limit = others.first().map_or(best, |one| start.at_most(one.arranged.step_time()));
    left.look_inside(of, limit, tally);
    reconsider(scope, &mut others, promising, best);
    polish(scope, &mut others, (None, tally), watch.0);
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
