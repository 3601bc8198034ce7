//! The search: variants of layers, strategies inside them, stages across them, and the proof that the result is right.
//!
//! Modules in reading order; each uses only those above it.
#![warn(missing_docs)]

pub mod rewrite;
pub mod reshard;
pub mod moving;
pub mod prove;
pub mod constraints;
mod conversions;
pub mod single_layers;
pub mod request;
pub mod forbid;
pub mod problem;
pub mod solve;
pub mod ilp;
mod inside;
pub mod space;
mod ways;
pub mod prices;
pub mod clock;
pub mod given;
pub mod meeting;
mod memos;
mod stored;
mod blended;
mod tied;
mod stream;
pub mod layer_problem;
pub mod chooser;
pub mod shapes;
pub mod levels;
mod levelled;
pub mod partition;
pub mod price;
pub mod forms;
pub mod freely;
mod frontier;
pub mod candidate;
mod fill;
pub mod flights;
pub mod room;
pub mod schedules;
pub mod shelf;
mod shift;
pub mod bound;
mod covered;
mod by_device;
mod known_bounds;
mod known_rooms;
pub mod mixed;
pub mod cut_sequences;
mod arrange;
mod arrangements;
mod asking;
pub mod overflow;
pub mod evaluate;
mod priced_choices;
mod sends;
mod shares;
mod unequal;
mod packing;
mod polish;
mod more_ways;
pub mod found;
mod enumerate;
mod refusals;
pub mod optimize;
mod work_out;
mod layouts;
mod offload;
pub mod split_schedules;
mod freed;
mod further;
pub mod relax;
pub mod chosen;
pub mod document;
mod share_plans;
mod tensor_shares;
pub mod near;
pub mod pareto;
pub mod target;

use arrange::Arranged;
use cost_model::{CalibrationError, Constants};
use found::{Found, Start};
use ir::plan::{Plan, PlanError};
use relax::Hosts;
use request::{NoPlan, OffloadKind, OnProgress, Pins, Relaxation, Request, SharesKind, Stop, Untried, Wait};
use split_schedules::Orders;

/// Finds the fastest plan for a request. Digests and the tool's version in it are left for the caller to fill.
///
/// # Errors
/// Where the request contradicts itself, or no plan fits; then with changes that would make one fit.
pub fn optimize(request: &Request, on_progress: OnProgress<'_>) -> Result<Plan, NoPlan> {
    optimize_until(request, Stop::never(), on_progress)
}

/// The same, ended before it is done: the best plan so far, with what is left to gain. The plan says after how much
/// work; ended after as much, the search finds it again.
///
/// # Errors
/// As those of [`optimize()`].
pub fn optimize_until(
    request: &Request,
    stop: Stop<'_>,
    on_progress: OnProgress<'_>,
) -> Result<Plan, NoPlan> {
    optimize_alone(request, stop, on_progress).map_err(|why| with_changes(request, why, (stop, on_progress)))
}

/// The same without changes that would make a plan fit: for one of several questions.
///
/// # Errors
/// As those of [`optimize()`].
pub fn optimize_alone(
    request: &Request,
    stop: Stop<'_>,
    on_progress: OnProgress<'_>,
) -> Result<Plan, NoPlan> {
    found(request, &Constants::load(), (stop, on_progress))
}

/// Why there is no plan for a request, where nothing fits with changes that would make one fit: those that are tried
/// until somebody wants an answer.
pub fn with_changes(request: &Request, why: NoPlan, watch: (Stop<'_>, OnProgress<'_>)) -> NoPlan {
    let NoPlan::NothingFits { need, stage, term, needed, capacity, also, untried, .. } = why else {
        return why;
    };
    let constants = match on_cluster(request, Constants::load()) {
        Ok(constants) => constants,
        Err(wrong) => return wrong,
    };
    let tried = relax::relaxations((request, Hosts::Asked), &constants, watch);
    let untried = untried.or(tried.ended_early.then_some(Untried::Changes));
    let relaxations = tried.relaxations;
    NoPlan::NothingFits { need, stage, term, needed, capacity, also, relaxations, untried }
}

/// The same in a world with given constants, without changes that would make a plan fit.
///
/// # Errors
/// As those of [`optimize()`].
pub fn optimize_with(
    request: &Request,
    constants: &Constants,
    on_progress: OnProgress<'_>,
) -> Result<Plan, NoPlan> {
    found(request, constants, (Stop::never(), on_progress))
}

/// The same on all groups of the cluster in the order that they have: for who must know which rank is which device.
///
/// # Errors
/// As those of [`optimize()`].
pub fn optimize_in_order(
    request: &Request,
    constants: &Constants,
    on_progress: OnProgress<'_>,
) -> Result<Plan, NoPlan> {
    let constants = on_cluster(request, constants.clone())?;
    found_or_offloaded(std::slice::from_ref(request), &constants, (Stop::never(), on_progress))
}

fn found(
    request: &Request,
    constants: &Constants,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Result<Plan, NoPlan> {
    let constants = on_cluster(request, constants.clone())?;
    found_or_offloaded(&layouts::layouts(request, &constants), &constants, watch)
}

/// The same in the devices' memory; where nothing fits there, in the hosts' too, unless somebody has said which: for a
/// first plan of the devices half of the time is waited, so that there is as much left for one with hosts.
fn found_or_offloaded(
    layouts: &[Request],
    constants: &Constants,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Result<Plan, NoPlan> {
    let pins = &layouts[0].pins;
    if !offload::is_open(pins) {
        return found_on(layouts, constants, Start::default(), watch);
    }
    let with_hosts = || -> Vec<Request> { layouts.iter().map(offload::allowed).collect() };
    if offload::is_due(pins) {
        return found_on(&with_hosts(), constants, Start::default(), watch);
    }
    let start = Start { waits: Some(Wait::Half), ..Start::default() };
    match found_on(layouts, constants, start, watch) {
        Ok(plan) => Ok(offload::without(plan, &layouts[0])),
        Err(without @ NoPlan::NothingFits { untried, .. }) => {
            let with_hosts = with_hosts();
            let kinds = offload::narrower(&with_hosts[0]).filter(|kind| *kind != OffloadKind::None);
            let narrower = of_kinds(&with_hosts, kinds);
            let on_hosts = found_of((&with_hosts, &narrower), constants, Start::default(), watch);
            let is_over = match &on_hosts {
                Err(NoPlan::NothingFits { untried, .. }) => untried.is_some(),
                // It came to none of its candidates.
                Err(NoPlan::Impossible { .. }) => (watch.0.asked)(),
                Ok(_) | Err(NoPlan::Broken { .. } | NoPlan::Overflows { .. }) => false,
            };
            if is_over {
                return Err(refusals::stopped(without));
            }
            on_hosts.map(|plan| offload::with(plan, untried))
        }
        Err(other @ (NoPlan::Impossible { .. } | NoPlan::Broken { .. } | NoPlan::Overflows { .. })) => {
            Err(other)
        }
    }
}

/// The fastest plan on a cluster whose groups may be used in several selections and orders. Where hosts may be used,
/// narrower questions are asked besides.
fn found_on(
    layouts: &[Request],
    constants: &Constants,
    start: Start,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Result<Plan, NoPlan> {
    let narrower = of_kinds(layouts, offload::narrower(&layouts[0]));
    found_of((layouts, &narrower), constants, start, watch)
}

/// A question by what hosts may hold.
fn of_kinds(layouts: &[Request], kinds: impl Iterator<Item = OffloadKind>) -> Vec<Vec<Request>> {
    kinds.map(|kind| layouts.iter().map(|layout| offload::of_kind(layout, kind)).collect()).collect()
}

/// The same with some narrower questions, which are asked after it.
fn found_of(
    (layouts, narrower): (&[Request], &[Vec<Request>]),
    constants: &Constants,
    start: Start,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Result<Plan, NoPlan> {
    let request = &layouts[0];
    if let Some(what) = split_schedules::contradiction(request) {
        return Err(NoPlan::Impossible { what });
    }
    let requests = || std::iter::once(request).chain(narrower.iter().map(|layouts| &layouts[0]));
    let unequal = |best: Result<Plan, NoPlan>, request: &Request| {
        let found = share_plans::faster(request, constants, watch, best.as_ref().ok());
        or_better(request, best, found)
    };
    let parted = |best: Result<Plan, NoPlan>, request: &Request| {
        let found = tensor_shares::faster(request, constants, watch, best.as_ref().ok());
        or_better(request, best, found)
    };
    if request.pins.shares == Some(SharesKind::Unequal) {
        return requests().fold(Err(NoPlan::Impossible { what: NO_SHARES.into() }), unequal);
    }
    if request.pins.tensor_shares == Some(SharesKind::Unequal) {
        return requests().fold(Err(NoPlan::Impossible { what: NO_TENSOR_SHARES.into() }), parted);
    }
    let equal = found_equal((layouts, narrower), constants, start, watch);
    let is_stopped = |plan: &Plan| plan.search.as_ref().is_some_and(|report| report.stopped_after.is_some());
    if matches!(equal, Err(NoPlan::Broken { .. })) || equal.as_ref().is_ok_and(is_stopped) {
        return equal;
    }
    requests().fold(requests().fold(equal, unequal), parted)
}

/// A plan that is faster than what is known, if one was found and is as pinned; else what is known.
fn or_better(request: &Request, known: Result<Plan, NoPlan>, found: Option<Plan>) -> Result<Plan, NoPlan> {
    match found.map(|plan| as_pinned(request, plan)) {
        Some(Ok(plan)) => Ok(plan),
        Some(Err(why)) => known.or(Err(why)),
        None => known,
    }
}

/// What to say where unequal tensor shares are asked for and there is no such plan.
const NO_TENSOR_SHARES: &str = "tensor-shares=unequal: the cluster has not two kinds of devices in domains of links that \
    would all have as many ranks, at most 32 in all; or no plan with more ranks on its faster devices fits";

/// What to say where unequal shares are asked for and there is no such plan.
const NO_SHARES: &str = "shares=unequal: no mesh has an outermost axis of replicas across groups of different devices, with \
    at most the optimizer state cut along it, whose fastest shares are unequal";

/// The fastest plan whose devices all run as many micro-batches.
fn found_equal(
    (layouts, narrower): (&[Request], &[Vec<Request>]),
    constants: &Constants,
    start: Start,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Result<Plan, NoPlan> {
    let all = std::iter::once(layouts).chain(narrower.iter().map(Vec::as_slice));
    let all: Vec<Orders> = all.map(|layouts| Orders::new(of_equal_shares(layouts))).collect();
    let mut best = further::fastest(&all, constants, start, watch)?;
    let layouts = &all[0].plain;
    let with_hosts: Vec<Request> = layouts.iter().map(offload::allowed).collect();
    let on_hosts = further::on_hosts(&mut best.found, (layouts, &with_hosts), constants, watch);
    let on_hosts = on_hosts.and_then(|other| written(&other, constants).ok());
    if let Some(plan) = on_hosts {
        return Ok(offload::instead(plan, &best.found));
    }
    Ok(split_schedules::instead(written(&best.found, constants)?, best.in_order))
}

/// Requests in which all devices run as many micro-batches.
fn of_equal_shares(layouts: &[Request]) -> Vec<Request> {
    let equal = |layout: &Request| Pins { shares: Some(SharesKind::Equal), ..layout.pins.clone() };
    layouts.iter().map(|layout| Request { pins: equal(layout), ..layout.clone() }).collect()
}

/// The plan of what was found, if it is as pinned.
fn written(found: &Found<'_>, constants: &Constants) -> Result<Plan, NoPlan> {
    match document::plan(found, constants) {
        Some(Ok(plan)) => as_pinned(found.scope.request, plan),
        Some(Err(PlanError { place, what })) => Err(NoPlan::Broken { place, what }),
        None => Err(NoPlan::Broken { place: "search".into(), what: "it came back without a plan".into() }),
    }
}

/// The world as the request's cluster and software have it.
fn on_cluster(request: &Request, constants: Constants) -> Result<Constants, NoPlan> {
    let wrong =
        |error: CalibrationError| NoPlan::Impossible { what: format!("the cluster's calibration: {error}") };
    constants.on(&request.cluster, request.job.engine).map_err(wrong)
}

/// The plan, if it has the degrees that were pinned: an axis that nothing in the model can use is not what was asked
/// for.
fn as_pinned(request: &Request, plan: Plan) -> Result<Plan, NoPlan> {
    match refusals::not_as_pinned(request, &plan.roles) {
        Some(what) => Err(NoPlan::Impossible { what }),
        None => Ok(plan),
    }
}

/// Changes that would make a job fit whose plan does not: first another plan for it, then other machines or sequences.
pub fn relaxations(request: &Request) -> Vec<Relaxation> {
    let Ok(constants) = on_cluster(request, Constants::load()) else { return Vec::new() };
    let mut list =
        relax::relaxations((request, Hosts::NotAsked), &constants, (Stop::never(), &|_| ())).relaxations;
    if let Ok(found) = optimize::search(request, &constants, (Stop::never(), &|_| ())) {
        let fastest = found.ranking.first();
        let another = |one: &Arranged| Relaxation {
            change: "another plan for the same job".into(),
            step_time: one.step_time(),
            tokens: request.job.tokens(),
        };
        list.splice(..0, fastest.map(another));
    }
    list
}

#[cfg(test)]
mod prices_tests;
#[cfg(test)]
mod solver_tests;
#[cfg(test)]
mod chooser_tests;
#[cfg(test)]
mod test_models;
#[cfg(test)]
mod discovery_tests;
