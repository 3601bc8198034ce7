//! The layer itself as terms: every operator once, forward and backward, on whole tensors.

use std::collections::BTreeMap;

use egg::Id;
use ir::graph::{Op, OpId, TensorId};
use ir::lower::{backward_reads, gradient_tensors};

use super::term::{Graph, Term};

/// The layer on whole tensors.
pub(super) struct Reference {
    pub(super) values: BTreeMap<TensorId, Id>,
    pub(super) gradients: BTreeMap<TensorId, Id>,
}

/// Adds the layer itself: forward, then backward from the gradients of its results.
pub(super) fn reference(graph: &mut Graph<'_>) -> Reference {
    let layer = graph.analysis.layer;
    let mut values: BTreeMap<TensorId, Id> = BTreeMap::new();
    let given = |t: &TensorId| layer.is_data(*t) || layer.is_parameter(*t) || layer.stream_in.contains(t);
    for tensor in layer.tensor_ids().filter(given) {
        values.insert(tensor, graph.add(Term::Whole(tensor)));
    }
    for (i, op) in layer.ops.iter().enumerate() {
        let operands: Vec<Id> = op.operands.iter().filter_map(|tensor| values.get(tensor).copied()).collect();
        for (result, &tensor) in op.results.iter().enumerate() {
            let term = Term::Apply { op: OpId(i), result, operands: operands.clone().into() };
            values.insert(tensor, graph.add(term));
        }
    }
    let have = gradient_tensors(layer);
    let mut gradients: BTreeMap<TensorId, Id> =
        layer.out.iter().map(|&out| (out, graph.add(Term::OutGradient(out)))).collect();
    for id in layer.op_ids().rev() {
        let op = &layer.ops[id.0];
        if !op.results.iter().any(|tensor| gradients.contains_key(tensor)) {
            continue;
        }
        let reads = backward_reads(op, &have);
        let read = |(k, tensor): (usize, &TensorId)| {
            let read = layer.is_data(*tensor) || reads.contains(&k);
            read.then(|| values.get(tensor).copied()).flatten()
        };
        let operands: Vec<Option<Id>> = op.operands.iter().enumerate().map(read).collect();
        let arriving: Vec<Option<Id>> =
            op.results.iter().map(|tensor| gradients.get(tensor).copied()).collect();
        for (operand, &tensor) in op.operands.iter().enumerate() {
            if op.kind.differentiates(operand) && have.contains(&tensor) {
                gradients.insert(tensor, graph.add(pullback((id, op), operand, &operands, &arriving)));
            }
        }
    }
    Reference { values, gradients }
}

/// The gradient of an operand from those operands and gradients that are there. Of a product it does not depend on the
/// operand itself.
pub(super) fn pullback(
    (id, op): (OpId, &Op),
    operand: usize,
    operands: &[Option<Id>],
    gradients: &[Option<Id>],
) -> Term {
    let depends = |i: usize| !op.kind.is_product() || op.kind.gradient_needs(operand).contains(&i);
    let operands = operands.iter().enumerate().map(|(i, id)| id.filter(|_| depends(i)));
    let all: Vec<Option<Id>> = operands.chain(gradients.iter().copied()).collect();
    let given =
        all.iter().enumerate().filter(|(_, id)| id.is_some()).fold(0, |bits, (i, _)| bits | 1u128 << i);
    Term::Pullback { op: id, operand, given, children: all.into_iter().flatten().collect() }
}
