//! Layers of a flat graph as kinds that repeat: equal ones are stored once.
//!
//! Layers are equal if they differ in names alone. A layer that shares a parameter with another is a kind of its own,
//! for a tie joins layers that occur once.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ir::graph::{Layer, Model, ParameterRef, Segment, TensorId, Tie};
use ir::native::DocumentError;

use super::build::{Built, build};
use super::cut::Cuts;
use super::flow::{Flow, fault};
use super::names::{Naming, chosen, is_of_batch, shortened};

/// What a flat document says besides its graph.
#[derive(Clone, Debug)]
pub(crate) struct Heading {
    /// Name of the model.
    pub(crate) name: String,
    /// Sequence length of a job without another.
    pub(crate) default_sequence: u64,
}

/// The model whose layers are these stretches of operators.
///
/// # Errors
/// Where one layer uses a parameter twice.
pub(crate) fn model(
    flow: &Flow<'_>,
    cuts: &Cuts,
    layers: &[Range<usize>],
    heading: Heading,
) -> Result<Model, DocumentError> {
    let users = users(flow, layers)?;
    let is_shared = |built: &Built| built.parameters.iter().any(|(whole, _)| users[whole.0].len() > 1);
    let mut kinds: Vec<Layer> = Vec::new();
    let mut names: Vec<Naming> = Vec::new();
    let mut sequence: Vec<Segment> = Vec::new();
    let mut known: BTreeMap<String, usize> = BTreeMap::new();
    let mut places: BTreeMap<TensorId, Vec<ParameterRef>> = BTreeMap::new();
    for (at, (ops, built)) in layers.iter().zip(built(flow, cuts, layers)).enumerate() {
        let is_shared = is_shared(&built);
        let next = kinds.len();
        let kind = if is_shared { next } else { *known.entry(form(&built.layer)).or_insert(next) };
        if is_shared {
            for &(whole, own) in &built.parameters {
                places.entry(whole).or_default().push(ParameterRef { layer: kind, tensor: own });
            }
        }
        let own = Naming::new(ops.clone().map(|at| flow.op(at).name.as_str()), otherwise(at, layers.len()));
        if kind == next {
            kinds.push(shortened(built.layer, &own.words));
            names.push(own);
        } else {
            names[kind].join(own);
        }
        match sequence.last_mut() {
            Some(run) if run.layer == kind && kinds[kind].hands_on() => run.count += 1,
            Some(_) | None => sequence.push(Segment { layer: kind, count: 1 }),
        }
    }
    let ties = places.values().flat_map(|places| {
        let owner = places[0];
        places[1..].iter().map(move |&copy| Tie { owner, copy })
    });
    let sizes: Vec<usize> = kinds.iter().map(|kind| kind.ops.len()).collect();
    for (kind, name) in kinds.iter_mut().zip(chosen(&names, &sizes)) {
        kind.name = name;
    }
    let Heading { name, default_sequence } = heading;
    Ok(Model { name, default_sequence, ties: ties.collect(), layers: kinds, sequence })
}

fn otherwise(at: usize, n_layers: usize) -> &'static str {
    match at {
        0 => "embedding",
        at if at + 1 == n_layers => "head",
        _ => "layer",
    }
}

/// Layers that use each parameter.
fn users(flow: &Flow<'_>, layers: &[Range<usize>]) -> Result<Vec<Vec<usize>>, DocumentError> {
    let mut users: Vec<Vec<(usize, usize)>> = vec![Vec::new(); flow.whole.tensors.len()];
    for (layer, ops) in layers.iter().enumerate() {
        for at in ops.clone() {
            for (index, operand) in
                flow.operands[at].iter().enumerate().filter(|(_, t)| flow.whole.is_parameter(**t))
            {
                let before = users[operand.0].last().filter(|(other, _)| *other == layer);
                if let Some((_, other)) = before {
                    let what = format!(
                        "`{}` is used by `{}` too, in the layer from `{}` to `{}`: a parameter is used once in a layer, \
                         and may be shared by layers",
                        flow.whole.tensors[operand.0].name,
                        flow.op(*other).name,
                        flow.op(ops.start).name,
                        flow.op(ops.end - 1).name
                    );
                    return Err(fault(format!("ops[{}].operands[{index}]", flow.order[at]), what));
                }
                users[operand.0].push((layer, at));
            }
        }
    }
    Ok(users.into_iter().map(|users| users.into_iter().map(|(layer, _)| layer).collect()).collect())
}

/// Every layer with the values that it takes from the stack and those that it puts there.
///
/// It takes the topmost ones down to the lowest that it reads; of these it puts back what is read later too. A layer
/// that is met for the first time puts on top what is read next, a layer like one before it keeps that one's order.
fn built(flow: &Flow<'_>, cuts: &Cuts, layers: &[Range<usize>]) -> Vec<Built> {
    let mut orders: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let mut stack: Vec<TensorId> = Vec::new();
    let mut all = Vec::new();
    for ops in layers {
        let reads: BTreeSet<TensorId> = ops.clone().flat_map(|at| flow.reads(at)).collect();
        let lowest = stack.iter().position(|value| reads.contains(value)).unwrap_or(stack.len());
        let taken = stack.split_off(lowest);
        let made = ops.clone().flat_map(|at| flow.op(at).results.iter().copied());
        let later = |value: &TensorId| *value == flow.loss() || cuts.is_alive(*value, ops.end);
        let left: Vec<TensorId> = taken.iter().copied().chain(made).filter(later).collect();
        let found = build(flow, ops.clone(), &taken, &left);
        let order = orders.entry(form(&found.layer)).or_insert_with(|| by_next_read(flow, ops.end, &left));
        let ordered: Vec<TensorId> = order.iter().map(|&at| left[at]).collect();
        all.push(if ordered == left { found } else { build(flow, ops.clone(), &taken, &ordered) });
        stack.extend(ordered);
    }
    all
}

/// Positions of some values, what is read first from a place on last.
fn by_next_read(flow: &Flow<'_>, from: usize, values: &[TensorId]) -> Vec<usize> {
    let mut order: Vec<usize> = Vec::new();
    for read in (from..flow.len()).flat_map(|at| flow.reads(at)) {
        if order.len() == values.len() {
            break;
        }
        let slot = values.iter().position(|value| *value == read);
        order.extend(slot.filter(|slot| !order.contains(slot)));
    }
    order.reverse();
    // The loss is not read, and left alone.
    if order.is_empty() { (0..values.len()).collect() } else { order }
}

/// A layer without its names, but for data of the batch: those of one name are one.
fn form(layer: &Layer) -> String {
    let mut bare = layer.clone();
    bare.name.clear();
    bare.dims.iter_mut().for_each(|dim| dim.name.clear());
    bare.tensors.iter_mut().filter(|tensor| !is_of_batch(tensor)).for_each(|tensor| tensor.name.clear());
    bare.ops.iter_mut().for_each(|op| op.name.clear());
    format!("{bare:?}")
}
