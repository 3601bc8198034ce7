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
mod by_device;
mod known_bounds;
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
pub mod found;
mod enumerate;
mod refusals;
pub mod optimize;
mod work_out;
mod layouts;
mod offload;
pub mod split_schedules;
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
use request::{NoPlan, OnProgress, Pins, Relaxation, Request, SharesKind, Stop, Untried, Wait};

/// Finds the fastest plan for a request. Digests and the tool's version in it are left for the caller to fill.
///
/// # Errors
/// Where the request contradicts itself, or no plan fits; then with changes that would make one fit.
pub fn optimize(request: &Request, on_progress: OnProgress<'_>) -> Result<Plan, NoPlan> {
    optimize_until(request, Stop::never(), on_progress)
}

/// The same, ended before it is done: the best plan so far, with what is left to gain. The plan says after how much work;
/// ended after as much, the search finds it again.
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

/// Why there is no plan for a request, where nothing fits with changes that would make one fit: those that are tried until somebody
/// wants an answer.
pub fn with_changes(request: &Request, why: NoPlan, watch: (Stop<'_>, OnProgress<'_>)) -> NoPlan {
    let NoPlan::NothingFits { stage, term, needed, capacity, untried, .. } = why else { return why };
    let constants = match on_cluster(request, Constants::load()) {
        Ok(constants) => constants,
        Err(wrong) => return wrong,
    };
    let tried = relax::relaxations((request, Hosts::Asked), &constants, watch);
    let untried = untried.or(tried.ended_early.then_some(Untried::Changes));
    NoPlan::NothingFits { stage, term, needed, capacity, relaxations: tried.relaxations, untried }
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

/// The same in the devices' memory; where nothing fits there, in the hosts' too, unless somebody has said which: for a first plan of
/// the devices half of the time is waited, so that there is as much left for one with hosts.
fn found_or_offloaded(
    layouts: &[Request],
    constants: &Constants,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Result<Plan, NoPlan> {
    let pins = &layouts[0].pins;
    let alone = || -> Vec<Request> { layouts.iter().map(offload::forgone).collect() };
    if offload::may_be_forgone(pins) {
        return found_on((layouts, &alone()), constants, Start::default(), watch);
    }
    if !offload::is_open(pins) {
        return found_on((layouts, &[]), constants, Start::default(), watch);
    }
    let with_hosts = || -> Vec<Request> { layouts.iter().map(offload::allowed).collect() };
    if offload::is_due(pins) {
        return found_on((&with_hosts(), &[]), constants, Start::default(), watch);
    }
    let start = Start { waits: Some(Wait::Half), ..Start::default() };
    match found_on((layouts, &[]), constants, start, watch) {
        Ok(plan) => Ok(offload::without(plan, &layouts[0])),
        Err(without @ NoPlan::NothingFits { untried, .. }) => {
            let on_hosts = found_on((&with_hosts(), &[]), constants, Start::default(), watch);
            let on_hosts = on_hosts.map_err(|why| refusals::of_both(without, why, watch.0));
            on_hosts.map(|plan| offload::with(plan, untried))
        }
        Err(other @ (NoPlan::Impossible { .. } | NoPlan::Broken { .. } | NoPlan::Overflows { .. })) => {
            Err(other)
        }
    }
}

/// The fastest plan on a cluster whose groups may be used in several selections and orders; with the same question to the devices alone,
/// where it allows hosts and they need not be used.
fn found_on(
    (layouts, alone): (&[Request], &[Request]),
    constants: &Constants,
    start: Start,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Result<Plan, NoPlan> {
    let request = &layouts[0];
    if let Some(what) = split_schedules::contradiction(request) {
        return Err(NoPlan::Impossible { what });
    }
    let unequal = |equal| share_plans::faster(request, constants, watch, equal);
    if request.pins.shares == Some(SharesKind::Unequal) {
        let none = || NoPlan::Impossible { what: NO_SHARES.into() };
        return unequal(None).ok_or_else(none).and_then(|plan| as_pinned(request, plan));
    }
    let parted = |other| tensor_shares::faster(request, constants, watch, other);
    if request.pins.tensor_shares == Some(SharesKind::Unequal) {
        let none = || NoPlan::Impossible { what: NO_TENSOR_SHARES.into() };
        return parted(None).ok_or_else(none).and_then(|plan| as_pinned(request, plan));
    }
    let equal = found_equal((layouts, alone), constants, start, watch);
    let is_stopped = |plan: &Plan| plan.search.as_ref().is_some_and(|report| report.stopped_after.is_some());
    if matches!(equal, Err(NoPlan::Broken { .. })) || equal.as_ref().is_ok_and(is_stopped) {
        return equal;
    }
    let best = unequal(equal.as_ref().ok()).map_or(equal, |plan| as_pinned(request, plan));
    parted(best.as_ref().ok()).map_or(best, |plan| as_pinned(request, plan))
}

/// What to say where unequal tensor shares are asked for and there is no such plan.
const NO_TENSOR_SHARES: &str = "tensor-shares=unequal: the cluster has not two kinds of devices in domains of links that \
    would all have as many ranks, at most 32 in all; or no plan with more ranks on its faster devices fits";

/// What to say where unequal shares are asked for and there is no such plan.
const NO_SHARES: &str = "shares=unequal: no mesh has an outermost axis of replicas across groups of different devices, with \
    at most the optimizer state cut along it, whose fastest shares are unequal";

/// The plan on the fastest of several selections and orders, all of whose devices run as many micro-batches.
fn found_equal(
    (layouts, alone): (&[Request], &[Request]),
    constants: &Constants,
    start: Start,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Result<Plan, NoPlan> {
    let [layouts, alone] = [layouts, alone].map(of_equal_shares);
    if !alone.is_empty() {
        return found_beside((&layouts, &alone), constants, start, watch);
    }
    let in_v = split_schedules::in_v(&layouts);
    let (found, _) = further::whole((&layouts, &in_v), constants, start, watch);
    let found = found?;
    let questions = split_schedules::questions(&found, &layouts);
    let (mut found, whole) = further::split(found, &questions, constants, watch);
    let with_hosts: Vec<Request> = layouts.iter().map(offload::allowed).collect();
    let on_hosts = further::on_hosts(&mut found, (&layouts, &with_hosts), constants, watch);
    let on_hosts = on_hosts.and_then(|other| written(&other, constants).ok());
    match on_hosts {
        Some(plan) => Ok(offload::instead(plan, found.step_time())),
        None => Ok(split_schedules::instead(written(&found, constants)?, whole)),
    }
}

/// The same where hosts may be used: the faster of a plan on the devices alone, which a search of both can miss, for hosts may hold more
/// than choice problems know, and one with hosts.
fn found_beside(
    (layouts, alone): (&[Request], &[Request]),
    constants: &Constants,
    start: Start,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Result<Plan, NoPlan> {
    let [in_v, in_v_on_hosts] = [alone, layouts].map(split_schedules::in_v);
    let first = Start { waits: Some(Wait::Half), ..start.clone() };
    let (found, tally) = further::whole((alone, &in_v), constants, first, watch);
    let found = match found {
        Ok(found) => found,
        Err(broken @ NoPlan::Broken { .. }) => return Err(broken),
        Err(without) => {
            let start = Start { work: tally.work, ..start };
            let on_hosts = found_equal((layouts, &[]), constants, start, watch);
            return on_hosts.map_err(|why| refusals::of_both(without, why, watch.0));
        }
    };
    let [of_devices, of_hosts] = [alone, layouts].map(|asked| split_schedules::questions(&found, asked));
    let (found, whole) = further::split(found, &of_devices, constants, watch);
    let without = found.step_time();
    let (found, after) = further::beside(found, (layouts, &in_v_on_hosts), constants, watch);
    let whole = whole.filter(|_| after.is_none());
    let of_hosts = after.unwrap_or(of_hosts);
    let (found, before) = further::split(found, &of_hosts, constants, watch);
    let whole = whole.or(before);
    let plan = split_schedules::instead(written(&found, constants)?, whole);
    Ok(if offload::is_used(&plan) { offload::instead(plan, without) } else { plan })
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

/// The plan, if it has the degrees that were pinned: an axis that nothing in the model can use is not what was asked for.
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
