//! Every candidate of the space.

use std::ops::RangeInclusive;

use crate::candidate::{Candidate, Scope, batches, filled};
use crate::request::{Pins, Request};
use crate::shapes::{Facts, Shape, divisors, finest, names_degrees, rare, shapes};
use crate::{shares, unequal};

/// Pipelines that idle most of the time, devices that do the same and short parts of sequences are asked too where that
/// makes no more candidates than this: of devices and batches that little divides the fastest may be one of them
/// (gpt2-xl on seven A100-80 with nine sequences of 200 0.78 of the time of seven that do the same).
const FEW: usize = 100;

/// Every number of stages, mesh and micro-batch that the request allows.
pub(crate) fn candidates(request: &Request) -> Vec<Candidate> {
    let mut list = common(request);
    if list.len() < FEW {
        let others = on_meshes(request, rare);
        let are_few = list.len() + others.len() <= FEW;
        // Where meshes have the degrees and no micro-batch divides among them, that is what to say.
        let is_asked = if list.is_empty() { !has_meshes(request) } else { are_few };
        list.extend(others.into_iter().filter(|_| is_asked));
    }
    list
}

/// Whether some mesh has the degrees that are asked for.
fn has_meshes(request: &Request) -> bool {
    let (n_devices, facts) = (request.cluster.n_devices(), Facts::of(request));
    stages(request).any(|p| !shapes(n_devices / p, facts, &request.pins).is_empty())
}

/// The same on meshes that are mostly good for something.
fn common(request: &Request) -> Vec<Candidate> {
    let mut list = on_meshes(request, shapes);
    list.extend(unequal::candidates(request, Facts::of(request), &|p| allows(request, *p)));
    if list.len() <= FEW { list } else { filled(request, list) }
}

/// Every number of stages on such meshes, and every micro-batch.
fn on_meshes(request: &Request, meshes: fn(u64, Facts, &Pins) -> Vec<Shape>) -> Vec<Candidate> {
    let (n_devices, facts) = (request.cluster.n_devices(), Facts::of(request));
    let mut list = Vec::new();
    for n_stages in stages(request) {
        let all = meshes(n_devices / n_stages, facts, &request.pins);
        let all = if takes_finest(request, &request.pins) { finest(all, facts) } else { all };
        for shape in all.into_iter().filter_map(|shape| shares::shape(request, shape, n_stages)) {
            let sizes = batches(request, &shape, n_stages).into_iter();
            list.extend(sizes.map(|(of_each, count)| alike(shape.clone(), (n_stages, of_each, count))));
        }
    }
    list
}

/// A candidate of a size whose stages have all one mesh.
pub(crate) fn alike(shape: Shape, (n_stages, micro_batch, n_micro_batches): (u64, u64, u64)) -> Candidate {
    Candidate { shape, meshes: Vec::new(), n_stages, micro_batch, n_micro_batches }
}

/// Numbers of stages that divide the devices and are allowed.
fn stages(request: &Request) -> impl Iterator<Item = u64> {
    divisors(request.cluster.n_devices()).into_iter().filter(|p| allows(request, *p))
}

/// Whether a number of stages is allowed.
fn allows(request: &Request, n_stages: u64) -> bool {
    let pins = &request.pins;
    n_stages <= request.model.n_layers()
        && pins.pp.is_none_or(|pin| pin == n_stages)
        && pins.forbid.pp.allows(n_stages)
}

/// Whether meshes that pins allow are left out where others cover them. What is forbidden is forbidden by axes, but for
/// schedules, and groups of devices lie along them.
pub(crate) fn takes_finest(request: &Request, pins: &Pins) -> bool {
    pins.forbid.leaves_layers() && !request.cluster.is_mixed()
}

/// The same with a tensor degree by name, of a least and a largest, unless the user names degrees. Free axes have more
/// choices, of which the menus of layers keep a few; what fits may not be among them.
pub(crate) fn named_candidates(scope: &Scope<'_>, sizes: RangeInclusive<u64>) -> Vec<Candidate> {
    let request = scope.request;
    let of_degree = |tp: u64| {
        // Experts are cut as all else is, unless somebody says otherwise.
        let etp = request.pins.etp.or(request.pins.forbid.etp.allows(tp).then_some(tp));
        let pins = Pins { tp: Some(tp), etp, ..request.pins.clone() };
        let all = common(&Request { pins, ..request.clone() }).into_iter();
        // Nobody asks what degree layers come to that cut tokens beside products.
        let is_asked = |one: &Candidate| !request.pins.leaves_tokens() || !one.shape.says_of_tokens();
        all.filter(move |one| is_asked(one) && scope.has_schedule(one))
    };
    let degrees = divisors(request.cluster.n_devices())
        .into_iter()
        .filter(|tp| sizes.contains(tp) && request.pins.forbid.tp.allows(*tp));
    if names_degrees(&request.pins) { Vec::new() } else { degrees.flat_map(of_degree).collect() }
}
