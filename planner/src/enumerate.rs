//! Every candidate of the space.

use std::ops::RangeInclusive;

use crate::candidate::{Candidate, Scope, batches};
use crate::polish::Worked;
use crate::request::{Pins, Request, SequenceParallel};
use crate::shapes::{Facts, divisors, finest, names_degrees, shapes, without_names};
use crate::{shares, unequal};

/// Numbers of stages and micro-batches for which free axes are always asked where degrees are pinned or ruled out, at most.
const MOST_FREED: usize = 4;

/// They are those of plans on named axes that take no more than so many times the fastest: free ones take down to three quarters of that.
const NEAR_FREED: f64 = 1.25;

/// For more of them they are asked where that comes to no more meshes and micro-batches than this: it takes some tenths of a second.
const FEW_FREED: usize = 64;

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
        let all = if takes_finest(request, &request.pins) { finest(all, facts) } else { all };
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

/// Whether meshes that pins allow are left out where others cover them. What is forbidden is forbidden by axes, but for schedules, and
/// groups of devices lie along them.
pub(crate) fn takes_finest(request: &Request, pins: &Pins) -> bool {
    pins.forbid.leaves_layers() && !request.cluster.is_mixed()
}

/// Stages of a step, and micro-batches: how large, how many.
type Size = (u64, u64, u64);

/// Meshes of free axes for the stages and micro-batches that the fastest plans on named axes have, and for others where that makes few;
/// where nothing on named axes fits, for theirs if these are few, or if something on them has other degrees. What comes to the degrees
/// that are pinned, or to none that is ruled out, may be faster in another order of axes, or where it cuts the vocabulary, and fit where
/// nothing named does. Named ones are asked once more that cut no tokens beside products: layers that do cut them come to other degrees
/// where heads do not divide.
pub(crate) fn freed_candidates(
    scope: &Scope<'_>,
    named: &[Candidate],
    (fastest_named, misnamed): (&[Worked], &[Worked]),
) -> Vec<Candidate> {
    let request = scope.request;
    let Some(pins) = without_names(&request.pins) else { return Vec::new() };
    let near = fastest_named.first().map(|best| best.arranged.step_time() * NEAR_FREED);
    let knows_others = near.is_some() || !misnamed.is_empty();
    let mut first = match near {
        Some(near) => {
            distinct(worked(fastest_named.iter().take_while(|one| one.arranged.step_time() <= near)))
        }
        None if knows_others => Vec::new(),
        None => distinct(named.iter()),
    };
    // Without a plan no bound rules any of them out.
    if !knows_others && first.len() > MOST_FREED {
        return Vec::new();
    }
    first.truncate(MOST_FREED);
    let all_pins: Vec<Pins> = [pins.clone()].into_iter().chain(without_tokens(&request.pins)).collect();
    let facts = Facts::of(request);
    let of_size = |&(n_stages, micro_batch, n_micro_batches): &Size| {
        // On axes that others cover layers choose among fewer degrees: those that are asked for may be what they come to.
        let n_devices = request.cluster.n_devices() / n_stages;
        let all = all_pins.iter().flat_map(move |pins| shapes(n_devices, facts, pins));
        let candidate = move |shape| {
            let meshes = Vec::new();
            Candidate { shape, meshes, n_stages, micro_batch, n_micro_batches }
        };
        all.filter_map(move |shape| shares::shape(request, shape, n_stages)).map(candidate)
    };
    let mut list: Vec<Candidate> = first.iter().flat_map(of_size).collect();
    if !knows_others || list.len() >= FEW_FREED {
        return list;
    }
    let free = candidates(&Request { pins, ..request.clone() });
    let others = distinct(worked(fastest_named.iter()).chain(named).chain(&free));
    for size in others.iter().filter(|size| !first.contains(size)) {
        if list.len() >= FEW_FREED {
            break;
        }
        let some: Vec<Candidate> = of_size(size).collect();
        if list.len() + some.len() <= FEW_FREED {
            list.extend(some);
        }
    }
    list
}

/// The candidates that were worked out.
fn worked<'w>(some: impl Iterator<Item = &'w Worked>) -> impl Iterator<Item = &'w Candidate> {
    some.map(|one| &one.arranged.candidate)
}

/// The pins without sequence parallelism, where they leave it open and say something of tensor parallelism.
fn without_tokens(pins: &Pins) -> Option<Pins> {
    let is_open = pins.sequence_parallel.is_none() && pins.forbid.sequence_parallel.is_empty();
    let is_cut = pins.tp.is_some_and(|tp| tp > 1) || !pins.forbid.tp.single.is_empty();
    (is_open && is_cut).then(|| Pins { sequence_parallel: Some(SequenceParallel::Off), ..pins.clone() })
}

/// The sizes of some candidates, in the order in which they come.
fn distinct<'c>(candidates: impl Iterator<Item = &'c Candidate>) -> Vec<Size> {
    let mut sizes = Vec::new();
    for one in candidates {
        let size = (one.n_stages, one.micro_batch, one.n_micro_batches);
        if !sizes.contains(&size) {
            sizes.push(size);
        }
    }
    sizes
}

/// The same with a tensor degree by name, of a least and a largest, unless the user names degrees. Free axes have more
/// choices, of which the menus of layers keep a few; what fits may not be among them.
pub(crate) fn named_candidates(scope: &Scope<'_>, sizes: RangeInclusive<u64>) -> Vec<Candidate> {
    let request = scope.request;
    let of_degree = |tp: u64| {
        // Experts are cut as all else is, unless somebody says otherwise.
        let etp = request.pins.etp.or(request.pins.forbid.etp.allows(tp).then_some(tp));
        let pins = Pins { tp: Some(tp), etp, ..request.pins.clone() };
        candidates(&Request { pins, ..request.clone() }).into_iter().filter(|one| scope.has_schedule(one))
    };
    let degrees = divisors(request.cluster.n_devices())
        .into_iter()
        .filter(|tp| sizes.contains(tp) && request.pins.forbid.tp.allows(*tp));
    if names_degrees(&request.pins) { Vec::new() } else { degrees.flat_map(of_degree).collect() }
}
