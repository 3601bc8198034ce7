//! Which loop an axis cuts in most of a model, and so what it is called.

use std::collections::BTreeMap;

use crate::graph::{DimId, Extent, Layer, Op, OpId, TensorId};
use crate::mesh::AxisId;
use crate::names::PlacedLayer;
use crate::op::OpKind;
use crate::signature::{FactorId, signature};
use crate::strategy::AxisUse;

/// What an axis does in the dense part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DenseRole {
    Data,
    Gather,
    Ring,
    Ulysses,
    Tensor,
    Same,
}

/// What kind of loop an operator cuts along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Loop {
    Batch,
    Sequence,
    Slots,
    Expert,
    Weight,
}

/// The loop that operator `op` cuts along `axis`, if it cuts one.
pub(super) fn cut_loop(placed: PlacedLayer, op: OpId, axis: AxisId) -> Option<Loop> {
    let layer = placed.layer;
    let factor = placed.choice.strategies.get(op.0)?.on(axis).divides()?;
    let sig = signature(layer, &layer.ops[op.0]);
    let dim = sig.factors.get(factor.0 as usize)?.dim;
    Some(match layer.dims[dim.0].extent {
        Extent::MicroBatch => Loop::Batch,
        Extent::Sequence | Extent::UpToSlice => Loop::Sequence,
        Extent::Slots { .. } => Loop::Slots,
        Extent::Fixed(_) | Extent::Uneven(_) if layer.counts_tokens(dim) => Loop::Sequence,
        Extent::Fixed(_) | Extent::Uneven(_) if is_expert_dim(layer, dim) => Loop::Expert,
        Extent::Fixed(_) | Extent::Uneven(_) => Loop::Weight,
    })
}

fn is_slots(layer: &Layer, dim: DimId) -> bool {
    matches!(layer.dims[dim.0].extent, Extent::Slots { .. })
}

/// The experts' dim stands before the slots' in whatever was dispatched.
fn is_expert_dim(layer: &Layer, dim: DimId) -> bool {
    layer
        .tensors
        .iter()
        .any(|tensor| tensor.dims.windows(2).any(|pair| pair[0] == dim && is_slots(layer, pair[1])))
}

fn tensors_of(op: &Op) -> impl Iterator<Item = TensorId> + '_ {
    op.operands.iter().chain(&op.results).copied()
}

/// Works on what was dispatched to experts.
pub(super) fn is_expert_op(layer: &Layer, op: &Op) -> bool {
    tensors_of(op).any(|tensor| layer.tensors[tensor.0].dims.iter().any(|&dim| is_slots(layer, dim)))
}

/// Looks up or multiplies by a weight matrix: a parameter of two or more dims. A bias of heads has as many, but who
/// adds it need not have the heads of the product.
fn has_weights(layer: &Layer, op: &Op) -> bool {
    let is_product = matches!(op.kind, OpKind::Linear | OpKind::Embed);
    is_product && op.operands.iter().any(|&t| layer.is_parameter(t) && layer.tensors[t.0].dims.len() >= 2)
}

/// The operator that meets keys in a loop of their own: first one whose queries are tokens of the sequence, then one
/// whose keys are of the same dim as its queries.
pub(super) fn attention_of(layer: &Layer) -> Option<OpId> {
    let rank = |op: OpId| {
        let sig = signature(layer, &layer.ops[op.0]);
        let ring = sig.ring?;
        let dim = |factor: FactorId| sig.factors.get(factor.0 as usize).map(|factor| factor.dim);
        let (queries, keys) = (dim(ring.queries)?, dim(ring.keys)?);
        Some((layer.dims[queries.0].extent != Extent::Sequence, queries != keys, op))
    };
    layer.op_ids().filter_map(rank).min().map(|(.., op)| op)
}

/// The layers that speak for the model: those with attention, else those with weights, else all.
pub(super) fn body<'a>(layers: &[PlacedLayer<'a>]) -> Vec<PlacedLayer<'a>> {
    let with = |test: &dyn Fn(&Layer) -> bool| {
        layers.iter().copied().filter(|placed| test(placed.layer)).collect::<Vec<_>>()
    };
    let attention = with(&|layer| attention_of(layer).is_some());
    if !attention.is_empty() {
        return attention;
    }
    let inner = with(&|layer| !layer.is_end());
    if inner.is_empty() { layers.to_vec() } else { inner }
}

/// The key with the most votes; the smallest of equals.
pub(super) fn majority<K: Ord + Copy>(votes: impl Iterator<Item = (K, u64)>) -> Option<K> {
    let mut counts: BTreeMap<K, u64> = BTreeMap::new();
    for (key, weight) in votes {
        let count = counts.entry(key).or_default();
        *count = count.saturating_add(weight);
    }
    let mut best: Option<(K, u64)> = None;
    for (key, count) in counts {
        if best.is_none_or(|(_, most)| count > most) {
            best = Some((key, count));
        }
    }
    best.map(|(key, _)| key)
}

/// A layer that speaks for the model, and its operators that do.
pub(super) struct Speaker<'a> {
    placed: PlacedLayer<'a>,
    products: Vec<(OpId, u64)>,
    attention: Option<OpId>,
}

pub(super) fn speakers<'a>(layers: &[PlacedLayer<'a>]) -> Vec<Speaker<'a>> {
    let speaker = |placed: PlacedLayer<'a>| Speaker {
        placed,
        products: naming_products(placed.layer),
        attention: attention_of(placed.layer),
    };
    body(layers).into_iter().map(speaker).collect()
}

pub(super) fn dense_role(speakers: &[Speaker], axis: AxisId) -> DenseRole {
    let votes = speakers.iter().map(|speaker| (layer_role(speaker, axis), speaker.placed.count));
    majority(votes).unwrap_or(DenseRole::Same)
}

/// What an axis does in one layer, experts aside: what most of its matrices see, by elements, names it, and attention
/// says by which kind of context parallelism tokens meet. Of heads that are exchanged for sequences or tokens only
/// inside attention no weight knows.
fn layer_role(speaker: &Speaker, axis: AxisId) -> DenseRole {
    let Speaker { placed, products, attention } = speaker;
    let cut = |op: OpId| cut_loop(*placed, op, axis);
    let most = majority(products.iter().map(|&(op, elements)| (cut(op), elements))).flatten();
    let weights_cut = products.iter().any(|&(op, _)| cut(op) == Some(Loop::Weight));
    let inside = attention.and_then(cut);
    let is_ring = attention.is_some_and(|op| placed.choice.strategies[op.0].ring_axes().contains(&axis));
    let keys = if is_ring { DenseRole::Ring } else { DenseRole::Gather };
    match (most, inside) {
        (Some(Loop::Weight | Loop::Slots | Loop::Expert), _) => DenseRole::Tensor,
        (Some(Loop::Batch), _) => DenseRole::Data,
        (Some(Loop::Sequence), Some(Loop::Weight | Loop::Slots | Loop::Expert)) => DenseRole::Ulysses,
        (Some(Loop::Sequence), Some(Loop::Batch | Loop::Sequence) | None) => keys,
        (None, _) if weights_cut => DenseRole::Tensor,
        (None, Some(Loop::Batch)) => DenseRole::Data,
        (None, Some(Loop::Sequence)) => keys,
        (None, Some(Loop::Weight | Loop::Slots | Loop::Expert)) => DenseRole::Tensor,
        (None, None) => DenseRole::Same,
    }
}

/// The products of a layer that say what an axis is called, with the elements of their matrices: those of its tokens,
/// experts aside. A layer without any speaks by all its operators alike.
pub fn naming_products(layer: &Layer) -> Vec<(OpId, u64)> {
    let dense = || layer.op_ids().filter(|op| !is_expert_op(layer, &layer.ops[op.0]));
    // What makes keys of another length says nothing of the queries' tokens.
    let queries = attention_of(layer).and_then(|op| layer.tensors[layer.ops[op.0].operands[0].0].dims.get(1));
    let beside = |op: &OpId| {
        queries
            .is_some_and(|dim| tensors_of(&layer.ops[op.0]).all(|t| !layer.tensors[t.0].dims.contains(dim)))
    };
    let elements = |op: OpId| {
        let matrices = layer.ops[op.0].operands.iter().filter(|t| layer.is_parameter(**t));
        matrices.fold(0_u64, |all, t| all.saturating_add(layer.parameter_elements(*t)))
    };
    let weighty = dense().filter(|op| has_weights(layer, &layer.ops[op.0]));
    let products: Vec<(OpId, u64)> = weighty.filter(|op| !beside(op)).map(|op| (op, elements(op))).collect();
    if products.is_empty() { dense().map(|op| (op, 1)).collect() } else { products }
}

/// Whether most of the body's streams are cut along the sequence on an axis.
pub(super) fn stream_cut(layers: &[PlacedLayer], axis: AxisId) -> bool {
    let cut = |placed: PlacedLayer| {
        placed.layer.stream_in.last().is_some_and(|stream| {
            let dims = &placed.layer.tensors[stream.0].dims;
            let is_sequence = |dim: &DimId| placed.layer.counts_tokens(*dim);
            let at = dims.iter().position(is_sequence);
            at.is_some_and(|at| placed.choice.stream.axes_of(at).any(|own| own == axis))
        })
    };
    majority(body(layers).into_iter().map(|placed| (cut(placed), placed.count))) == Some(true)
}

/// The loop of the experts' products that an axis cuts, if most cut one.
pub(super) fn expert_loop(layers: &[PlacedLayer], axis: AxisId) -> Option<Loop> {
    let votes = layers.iter().flat_map(|&placed| {
        let layer = placed.layer;
        let expert = layer
            .op_ids()
            .filter(move |op| is_expert_op(layer, &layer.ops[op.0]) && has_weights(layer, &layer.ops[op.0]));
        expert.map(move |op| (cut_loop(placed, op, axis), placed.count))
    });
    majority(votes).flatten()
}

/// Whether the layer that ends in the loss cuts the vocabulary along an axis.
pub(super) fn cuts_vocabulary(layers: &[PlacedLayer], axis: AxisId) -> bool {
    let last = layers.iter().filter(|placed| placed.layer.has_loss());
    last.copied().any(|placed| {
        placed.layer.op_ids().any(|op| {
            let layer = placed.layer;
            let AxisUse::Factor(factor) = placed.choice.strategies[op.0].on(axis) else { return false };
            let sig = signature(layer, &layer.ops[op.0]);
            sig.factors
                .get(factor.0 as usize)
                .is_some_and(|factor| matches!(layer.dims[factor.dim.0].extent, Extent::Uneven(_)))
        })
    })
}
