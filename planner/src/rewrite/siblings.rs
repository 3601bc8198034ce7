//! Which products may become one: those that read the same value and whose results have the same dims but for one.
//!
//! The parts lie side by side along one dim, and all other dims keep their meaning, so that whatever could be cut
//! still can be: fused queries, keys and values stay interleaved by key-value head, gate and up by column.

use std::collections::BTreeMap;

use egg::Id;
use ir::graph::{DimId, Extent, Layer, OpId, Role, TensorId};
use ir::op::OpKind;
use ir::signature::{Split, signature};

use super::form::Classes;

/// Operators of one step that become one operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// The operators, in the order of the parts.
    pub(super) ops: Vec<OpId>,
    /// Dims of the fused parameter; `None` is the dim of the parts.
    pub(super) parameter: Vec<Option<DimId>>,
}

/// Products that become one, and the biases behind them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    /// What the products read.
    pub(super) reads: TensorId,
    /// Products, then biases if all have one.
    pub(super) steps: Vec<Step>,
    /// Elements of each part along the dim of the parts.
    pub(super) sizes: Vec<u64>,
    /// Dims of the fused result; `None` is the dim of the parts.
    pub(super) result: Vec<Option<DimId>>,
}

/// A product that may join others.
struct Product<'a> {
    op: OpId,
    reads: Id,
    weight: &'a [DimId],
    result: &'a [DimId],
    role: Role,
}

/// Dims that the members of a group share, with the place of the parts.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Frame {
    reads: Id,
    weight: Vec<Option<DimId>>,
    result: Vec<Option<DimId>>,
}

/// All groups of a layer, none inside another, in the order of their first operators.
pub(super) fn groups(layer: &Layer, classes: &Classes) -> Vec<Group> {
    let products = products(layer, classes);
    let mut frames: BTreeMap<Frame, Vec<usize>> = BTreeMap::new();
    for product in &products {
        for frame in frames_of(layer, product) {
            frames.entry(frame).or_default();
        }
    }
    for (frame, members) in &mut frames {
        members.extend((0..products.len()).filter(|&i| part(layer, frame, &products[i]).is_some()));
    }
    let settled = |(frame, members): (Frame, Vec<usize>)| {
        let (loss, members) = settle(layer, &frame, members, &products)?;
        Some((members[0], std::cmp::Reverse(members.len()), loss, frame, members))
    };
    let mut found: Vec<_> = frames.into_iter().filter_map(settled).collect();
    found.sort();
    let found = found.into_iter().map(|(.., frame, members)| (frame, members));
    let mut list: Vec<(Frame, Vec<usize>)> = Vec::new();
    for (frame, members) in found {
        if !list.iter().any(|(_, larger)| members.iter().all(|member| larger.contains(member))) {
            list.push((frame, members));
        }
    }
    list.into_iter().map(|(frame, members)| group(layer, &frame, &members, &products)).collect()
}

fn products<'a>(layer: &'a Layer, classes: &Classes) -> Vec<Product<'a>> {
    let dims = |tensor: TensorId| layer.tensors[tensor.0].dims.as_slice();
    let product = |op: OpId| {
        let it = &layer.ops[op.0];
        if it.kind != OpKind::Linear
            || !layer.is_parameter(it.operands[1])
            || layer.is_parameter(it.operands[0])
        {
            return None;
        }
        let (weight, result) = (dims(it.operands[1]), dims(it.results[0]));
        let role = layer.tensors[it.operands[1].0].role;
        Some(Product { op, reads: *classes.get(&it.operands[0])?, weight, result, role })
    };
    layer.op_ids().filter_map(product).collect()
}

/// Frames into which a product fits: with the dim of the parts behind all its own, or in the place of one of them.
fn frames_of(layer: &Layer, product: &Product<'_>) -> Vec<Frame> {
    let some = |dims: &[DimId]| dims.iter().copied().map(Some).collect::<Vec<_>>();
    let frame = |weight, result| Frame { reads: product.reads, weight, result };
    let behind = |dims: &[DimId]| [some(dims), vec![None]].concat();
    let mut list = vec![frame(behind(product.weight), behind(product.result))];
    for &dim in product.result.iter().filter(|&dim| own_length(layer, product, *dim).is_some()) {
        let blank = |dims: &[DimId]| dims.iter().map(|&d| (d != dim).then_some(d)).collect::<Vec<_>>();
        list.push(frame(blank(product.weight), blank(product.result)));
    }
    list
}

/// Length of a dim that comes from the weight alone.
fn own_length(layer: &Layer, product: &Product<'_>, dim: DimId) -> Option<u64> {
    let reads = &layer.tensors[layer.ops[product.op.0].operands[0].0].dims;
    match layer.dims[dim.0].extent {
        Extent::Fixed(n) if product.weight.contains(&dim) && !reads.contains(&dim) => Some(n),
        Extent::Fixed(_)
        | Extent::Uneven(_)
        | Extent::MicroBatch
        | Extent::Sequence
        | Extent::UpToSlice
        | Extent::Slots { .. } => None,
    }
}

/// The dim that a product has in the place of the parts: none, or one of its own.
fn filling(frame: &[Option<DimId>], dims: &[DimId]) -> Option<Option<DimId>> {
    let at = frame.iter().position(Option::is_none)?;
    let rest = |from: usize| frame[at + 1..].iter().copied().eq(dims.iter().skip(from).copied().map(Some));
    let before = frame[..at].iter().copied().eq(dims.iter().take(at).copied().map(Some));
    match (before, dims.len()) {
        (true, n) if n == frame.len() && rest(at + 1) => Some(Some(dims[at])),
        (true, n) if n + 1 == frame.len() && rest(at) => Some(None),
        _ => None,
    }
}

/// Elements of a product's part in a frame, if it fits.
fn part(layer: &Layer, frame: &Frame, product: &Product<'_>) -> Option<u64> {
    let (weight, result) = (filling(&frame.weight, product.weight)?, filling(&frame.result, product.result)?);
    if frame.reads != product.reads || weight != result {
        return None;
    }
    result.map_or(Some(1), |dim| own_length(layer, product, dim))
}

/// What fusing costs in ways to cut.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Loss {
    /// Nothing: the parts are single elements of a new dim.
    None,
    /// A dim of some members, beside others that can still be cut (the queries of one group).
    Inner,
    /// A dim that no reader lets be cut anyway.
    Unreadable,
}

/// The members for which a frame is one to use, if there are two: they hold parameters of one kind, and nothing is lost
/// that matters.
fn settle(
    layer: &Layer,
    frame: &Frame,
    mut members: Vec<usize>,
    products: &[Product<'_>],
) -> Option<(Loss, Vec<usize>)> {
    let role = products[*members.first()?].role;
    members.retain(|&i| products[i].role == role);
    let dim = |i: usize| filling(&frame.result, products[i].result).flatten();
    let first = &products[members[0]];
    let others_remain = frame
        .result
        .iter()
        .flatten()
        .any(|&d| first.weight.contains(&d) && own_length(layer, first, d).is_some());
    let n_without = members.iter().filter(|&&i| dim(i).is_none()).count();
    let loss = if n_without == members.len() {
        Loss::None
    } else if n_without > 0 && others_remain {
        Loss::Inner
    } else {
        members.retain(|&i| whole_for_reader(layer, &products[i], dim(i)));
        Loss::Unreadable
    };
    (members.len() > 1).then_some((loss, members))
}

/// Whether the reader of a product's result cannot cut a dim anyway.
fn whole_for_reader(layer: &Layer, product: &Product<'_>, dim: Option<DimId>) -> bool {
    let result = layer.ops[product.op.0].results[0];
    let (Some(dim), Some(reader)) = (dim, layer.reader(result)) else { return false };
    let op = &layer.ops[reader.0];
    let sig = signature(layer, op);
    let operand = op.operands.iter().position(|&tensor| tensor == result);
    let at = layer.tensors[result.0].dims.iter().position(|&d| d == dim);
    operand.zip(at).is_some_and(|(k, at)| sig.factors[sig.operands[k][at].0 as usize].split == Split::Whole)
}

fn group(layer: &Layer, frame: &Frame, members: &[usize], products: &[Product<'_>]) -> Group {
    let ops: Vec<OpId> = members.iter().map(|&i| products[i].op).collect();
    let sizes = members.iter().filter_map(|&i| part(layer, frame, &products[i])).collect();
    let mut steps = vec![Step { ops: ops.clone(), parameter: frame.weight.clone() }];
    steps.extend(biases(layer, frame, &ops));
    Group { reads: layer.ops[ops[0].0].operands[0], steps, sizes, result: frame.result.clone() }
}

/// The biases behind all products of a group, if they fuse the same way.
fn biases(layer: &Layer, frame: &Frame, products: &[OpId]) -> Option<Step> {
    let bias = |product: &OpId| {
        let reader = layer.reader(layer.ops[product.0].results[0])?;
        (layer.ops[reader.0].kind == OpKind::Bias).then_some(reader)
    };
    let ops: Vec<OpId> = products.iter().map(bias).collect::<Option<_>>()?;
    let dims = |op: &OpId| layer.tensors[layer.ops[op.0].operands[1].0].dims.as_slice();
    // The fused bias has those dims of the result that the separate ones have, and always that of the parts.
    let kept: Vec<Option<DimId>> = frame
        .result
        .iter()
        .copied()
        .filter(|dim| dim.is_none_or(|dim| ops.iter().all(|op| dims(op).contains(&dim))))
        .collect();
    let role = |op: &OpId| layer.tensors[layer.ops[op.0].operands[1].0].role;
    let fits = ops.iter().zip(products).all(|(op, product)| {
        let result = layer.ops[product.0].results[0];
        let own = filling(&frame.result, &layer.tensors[result.0].dims);
        layer.is_parameter(layer.ops[op.0].operands[1])
            && role(op) == role(&ops[0])
            && own.is_some()
            && filling(&kept, dims(op)) == own
    });
    fits.then_some(Step { ops, parameter: kept })
}
