//! Meshes of free axes that are held to the degrees that are pinned, or ruled out one by one.
//!
//! Degrees are read off what most of the weights see (`ir::names`). That is all that an axis is held to here, in the
//! products that hold more than half of a layer's weights: attention and the others may split something else, as on no
//! axis by name.

use ir::mesh::AxisId;

use crate::candidate::{Candidate, Scope};
use crate::enumerate::{alike, candidates};
use crate::forbid::{Barred, NameBars};
use crate::request::{Degrees, Pins, Request};
use crate::shapes::{Facts, Shape, divisors, shapes, without_names};
use crate::shares;
use crate::space::AxisRule;

/// Stages of a step, and micro-batches: how large, how many.
type Size = (u64, u64, u64);

/// Every such mesh for all stages and micro-batches; none where nothing is said of a degree, or axes have names.
pub(crate) fn held_candidates(scope: &Scope<'_>, named: &[Candidate]) -> Vec<Candidate> {
    let request = scope.request;
    let Some(pins) = without_names(&request.pins) else { return Vec::new() };
    let free = candidates(&Request { pins: pins.clone(), ..request.clone() });
    let sizes = distinct(named.iter().chain(&free));
    // Stages of unequal widths have meshes of their own.
    let are_equal = |(n_stages, ..): &&Size| request.cluster.n_devices().is_multiple_of(*n_stages);
    let all = sizes.iter().filter(are_equal).flat_map(|size| on_all_meshes(request, &pins, *size));
    all.filter(|one| scope.has_schedule(one)).collect()
}

/// Every mesh for stages and micro-batches, in every way in which it may have the degrees: on axes that others cover
/// layers choose among fewer, and what they come to there may be faster.
fn on_all_meshes(request: &Request, pins: &Pins, size: Size) -> Vec<Candidate> {
    let (n_stages, micro_batch, _) = size;
    let (facts, n_devices) = (Facts::of(request), request.cluster.n_devices() / n_stages);
    let wanted = Wanted::of(&request.pins, micro_batch, &divisors(n_devices));
    let all = shapes(n_devices, facts, pins).into_iter();
    all.filter_map(|shape| shares::shape(request, shape, n_stages))
        .flat_map(|shape| held(&shape, facts, &wanted))
        .map(|shape| alike(shape, size))
        .collect()
}

/// What a degree may be; nothing where nobody says anything.
type Allowed = Option<Vec<u64>>;

/// Degrees of which something is said.
#[derive(Clone, Debug)]
struct Wanted {
    /// Data, context, tensor.
    dense: [Allowed; 3],
    /// Experts, the inside of their products.
    experts: [Allowed; 2],
}

/// The degree of tensor parallelism among those of the dense layers.
const TENSOR: usize = 2;

impl Wanted {
    /// What pins and prohibitions say of the degrees that there can be. A micro-batch on each replica says how many of
    /// these there are.
    fn of(pins: &Pins, micro_batch: u64, degrees: &[u64]) -> Self {
        let forbid = &pins.forbid;
        let left = |test: &dyn Fn(u64) -> bool| -> Allowed {
            Some(degrees.iter().copied().filter(|degree| test(*degree)).collect())
        };
        let of = |pin: Option<u64>, forbidden: &Degrees| match pin {
            Some(pin) => Some(vec![pin]),
            None if forbidden.single.is_empty() => None,
            None => left(&|degree| forbidden.allows(degree)),
        };
        let on_each = |replicas: u64| micro_batch.div_ceil(replicas.max(1));
        let has_share = |replicas: u64| {
            pins.micro_batch.is_none_or(|each| each == on_each(replicas))
                && forbid.micro_batch.allows(on_each(replicas))
        };
        let is_share_said = pins.micro_batch.is_some() || !forbid.micro_batch.is_empty();
        let data = match of(pins.dp, &forbid.dp) {
            Some(said) => Some(said.into_iter().filter(|replicas| has_share(*replicas)).collect()),
            None if is_share_said => left(&|replicas| has_share(replicas) && forbid.dp.allows(replicas)),
            None => None,
        };
        Self {
            dense: [data, of(pins.cp, &forbid.cp), of(pins.tp, &forbid.tp)],
            experts: [of(pins.ep, &forbid.ep), of(pins.etp, &forbid.etp)],
        }
    }
}

/// A mesh of free axes in every way in which its axes can have certain degrees.
fn held(shape: &Shape, facts: Facts, wanted: &Wanted) -> Vec<Shape> {
    let mesh = &shape.mesh;
    let splits_products = |axis: AxisId| {
        shape.rules[axis.0] == AxisRule::Free && mesh.stride(axis) * mesh.size(axis) <= facts.node
    };
    let sizes: Vec<(u64, bool)> =
        mesh.axis_ids().map(|axis| (mesh.size(axis), splits_products(axis))).collect();
    let dense = ways(&sizes, &wanted.dense, TENSOR);
    // A model without experts has all degrees of theirs.
    let experts = if facts.experts > 1 { wanted.experts.as_slice() } else { &[] };
    let experts = ways(&sizes, experts, 1);
    let barred = |dense: &Way, experts: &Way| -> Vec<Barred> {
        let with = |at: usize| {
            let [sequences, tokens, inside] = [0, 1, 2].map(|part| is_barred(&wanted.dense, dense[at], part));
            let [experts_whole, inside_experts] =
                [0, 1].map(|part| is_barred(&wanted.experts, experts[at], part));
            let own = shape.barred.get(at).copied().unwrap_or_default();
            Barred {
                names: NameBars { sequences, tokens, inside },
                experts: own.experts || experts_whole,
                inside_experts: own.inside_experts || inside_experts,
                tokens_of_experts: experts[at].is_some(),
                ..own
            }
        };
        (0..sizes.len()).map(with).collect()
    };
    let of = |dense: &Way| experts.iter().map(|experts| barred(dense, experts)).collect::<Vec<_>>();
    dense.iter().flat_map(of).map(|barred| Shape { barred, ..shape.clone() }).collect()
}

/// Per axis, which degree it is a part of, if of any that somebody wants.
type Way = Vec<Option<usize>>;

/// Every way to have degrees on axes, given with their sizes and whether they may split the inside of products, as the
/// part `inside` asks for.
fn ways(axes: &[(u64, bool)], degrees: &[Allowed], inside: usize) -> Vec<Way> {
    let mut ways: Vec<Way> = vec![Vec::new()];
    for (_, splits_products) in axes {
        let parts = (0..degrees.len())
            .filter(|part| degrees[*part].is_some() && (*part != inside || *splits_products))
            .map(Some);
        let parts: Vec<Option<usize>> = parts.chain([None]).collect();
        let longer =
            |way: &Way| parts.iter().map(|part| [way.as_slice(), &[*part]].concat()).collect::<Vec<_>>();
        ways = ways.iter().flat_map(longer).collect();
    }
    let degree = |way: &Way, part: usize| {
        axes.iter()
            .zip(way)
            .filter(|(_, own)| **own == Some(part))
            .map(|((size, _), _)| size)
            .product::<u64>()
    };
    let allows = |way: &Way, part: usize| {
        degrees[part].as_ref().is_none_or(|allowed| allowed.contains(&degree(way, part)))
    };
    let has = |way: &Way| (0..degrees.len()).all(|part| allows(way, part));
    ways.retain(has);
    ways
}

/// Whether an axis that is a part of one degree, or of none that is wanted, may not be of another.
fn is_barred(degrees: &[Allowed], own: Option<usize>, other: usize) -> bool {
    own.map_or(degrees[other].is_some(), |own| own != other)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Forbid;

    #[test]
    fn degrees_lie_on_axes_whose_product_they_are() {
        // Of two, four and two devices, of which the first may split no product.
        let axes = [(2, false), (4, true), (2, true)];
        let tensor = |tp: &[u64]| ways(&axes, &[None, None, Some(tp.to_vec())], TENSOR);
        assert_eq!(tensor(&[8]), [[None, Some(TENSOR), Some(TENSOR)]]);
        assert_eq!(tensor(&[2]), [[None, None, Some(TENSOR)]]);
        assert_eq!(tensor(&[1]), [[None; 3]]);
        assert!(tensor(&[16]).is_empty() && tensor(&[3]).is_empty());
        assert_eq!(tensor(&[1, 2]).len(), 2);
        let both = ways(&axes, &[Some(vec![4]), None, Some(vec![2])], TENSOR);
        assert_eq!(both, [[None, Some(0), Some(TENSOR)]]);
        let data = ways(&axes, &[Some(vec![4]), None, None], TENSOR);
        assert_eq!(data, [[Some(0), None, Some(0)], [None, Some(0), None]]);
    }

    #[test]
    fn an_axis_of_one_degree_is_of_no_other() {
        let degrees = [Some(vec![2]), None, Some(vec![4])];
        let barred = |own| [0, 1, 2].map(|other| is_barred(&degrees, own, other));
        assert_eq!(barred(Some(TENSOR)), [true, true, false]);
        assert_eq!(barred(Some(0)), [false, true, true]);
        // What is left may be whatever nobody asked for.
        assert_eq!(barred(None), [true, false, true]);
    }

    #[test]
    fn a_micro_batch_says_how_many_replicas_there_are() {
        let replicas = |pins: &Pins, of_all| Wanted::of(pins, of_all, &[1, 2, 4, 8]).dense[0].clone();
        let pins = Pins { micro_batch: Some(2), ..Pins::default() };
        assert_eq!([8, 2, 32].map(|of_all| replicas(&pins, of_all)), [vec![4], vec![1], vec![]].map(Some));
        let single = Degrees { single: [2].into(), above_one: false };
        let forbid = Forbid { micro_batch: single.clone(), ..Forbid::default() };
        assert_eq!(replicas(&Pins { forbid, ..Pins::default() }, 8), Some(vec![1, 2, 8]));
        let forbid = Forbid { dp: single, ..Forbid::default() };
        assert_eq!(replicas(&Pins { forbid: forbid.clone(), ..Pins::default() }, 8), Some(vec![1, 4, 8]));
        assert_eq!(replicas(&Pins { forbid, ..pins }, 4), Some(vec![]));
        assert_eq!(replicas(&Pins::default(), 8), None);
    }
}
