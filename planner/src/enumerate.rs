//! Every candidate of the space.

use crate::candidate::{Candidate, Scope, batches};
use crate::request::{Pins, Request};
use crate::shapes::{Facts, divisors, finest, names_degrees, shapes};
use crate::{shares, unequal};

/// Every number of stages, mesh and micro-batch that the request allows.
pub(crate) fn candidates(request: &Request) -> Vec<Candidate> {
    let n_devices = request.cluster.n_devices();
    let facts = Facts::of(request);
    let n_layers = request.model.n_layers();
    let wanted = |p: &u64| {
        *p <= n_layers && request.pins.pp.is_none_or(|pin| pin == *p) && request.pins.forbid.pp.allows(*p)
    };
    let mut list = Vec::new();
    for n_stages in divisors(n_devices).into_iter().filter(wanted) {
        let all = shapes(n_devices / n_stages, facts, &request.pins);
        let all = if takes_finest(request) { finest(all, facts) } else { all };
        for shape in all.into_iter().filter_map(|shape| shares::shape(request, shape, n_stages)) {
            for (micro_batch, n_micro_batches) in batches(request, &shape, n_stages) {
                let (shape, meshes) = (shape.clone(), Vec::new());
                list.push(Candidate { shape, meshes, n_stages, micro_batch, n_micro_batches });
            }
        }
    }
    list.extend(unequal::candidates(request, facts, &wanted));
    list
}

/// Whether meshes are left out that others cover. What is forbidden is forbidden by axes, but for schedules, and groups of devices
/// lie along them.
pub(crate) fn takes_finest(request: &Request) -> bool {
    request.pins.forbid.leaves_layers() && !request.cluster.is_mixed()
}

/// The same with a tensor degree by name, from a least one on, unless the user names degrees. Free axes have more
/// choices, of which the menus of layers keep a few; what fits may not be among them.
pub(crate) fn named_candidates(scope: &Scope<'_>, least: u64) -> Vec<Candidate> {
    let request = scope.request;
    let of_degree = |tp: u64| {
        let pins = Pins { tp: Some(tp), ..request.pins.clone() };
        candidates(&Request { pins, ..request.clone() }).into_iter().filter(|one| scope.has_schedule(one))
    };
    let degrees = divisors(request.cluster.n_close())
        .into_iter()
        .filter(|&tp| tp >= least && request.pins.forbid.tp.allows(tp));
    if names_degrees(&request.pins) { Vec::new() } else { degrees.flat_map(of_degree).collect() }
}
