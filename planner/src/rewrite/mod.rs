//! Equal algebraic forms of a layer, among which the search may choose.
//!
//! A layer is written as an e-graph in which forks are plain sharing; rules add fused forms of operators that read the
//! same value (`siblings`), and layers are read back from it (`extract`). Every variant computes the same function of
//! the same parameters, which it may hold side by side in one tensor. Rules look at which dims operators walk, never at
//! names.

mod extract;
pub mod parts;
mod form;
mod siblings;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod shipped_tests;

use std::collections::BTreeSet;

use ir::graph::{Layer, TensorId};

use extract::extract;
use form::{Classes, Form, Forms, forms};
use siblings::{Group, groups};

/// Groups of operators that are fused or not, independently: each doubles the number of variants.
const MAX_GROUPS: usize = 4;

/// Parameters that lie in one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FusedParameter {
    /// The tensor of the variant.
    pub tensor: TensorId,
    /// Its dim along which the parts lie.
    pub dim: usize,
    /// The parts, which cover the dim in order.
    pub parts: Vec<FusedPart>,
}

/// A parameter of the original layer inside a tensor of a variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedPart {
    /// The parameter of the original layer; of length one along the dim it lacks it.
    pub tensor: TensorId,
    /// Its first element along the dim.
    pub from: u64,
    /// Its elements along the dim.
    pub length: u64,
}

/// A form of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Variant {
    /// The operators that are fused: `q+k+v gate+up`; `original` for the layer itself.
    pub name: String,
    /// The layer in this form.
    pub layer: Layer,
    /// Parameters that lie side by side in one tensor.
    pub fused: Vec<FusedParameter>,
    /// Parameters that are as they were: the original tensor and that of the variant.
    pub kept: Vec<(TensorId, TensorId)>,
}

/// All forms of a layer; the first is the layer itself.
pub fn variants(layer: &Layer) -> Vec<Variant> {
    let (mut graph, classes) = forms(layer);
    let mut groups = groups(layer, &classes);
    groups.truncate(MAX_GROUPS);
    for (i, group) in groups.iter().enumerate() {
        fuse(&mut graph, &classes, layer, (i, group));
        graph.rebuild();
    }
    let kept = layer.parameters().map(|tensor| (tensor, tensor)).collect();
    let mut list = vec![Variant { name: "original".into(), layer: layer.clone(), fused: Vec::new(), kept }];
    for choice in 1..1_usize << groups.len() {
        let chosen: BTreeSet<usize> = (0..groups.len()).filter(|i| choice >> i & 1 == 1).collect();
        if disjoint(&groups, &chosen) {
            list.extend(extract(layer, (&graph, &classes), &groups, &chosen));
        }
    }
    list
}

/// Whether a layer is one of the forms of another, whatever its name: both are then in one class of the e-graph.
pub fn is_form_of(layer: &Layer, original: &Layer) -> bool {
    let renamed = |variant: Variant| Layer { name: layer.name.clone(), ..variant.layer };
    variants(original).into_iter().any(|variant| renamed(variant) == *layer)
}

/// Adds the fused form of a group: each product is a part of the fused product, each biased product a part of the
/// biased one.
fn fuse(graph: &mut Forms, classes: &Classes, layer: &Layer, (index, group): (usize, &Group)) {
    let Some(&reads) = classes.get(&group.reads) else { return };
    let mut whole = reads;
    for (step, fused) in group.steps.iter().enumerate() {
        let parameter = |op: &ir::graph::OpId| classes.get(&layer.ops[op.0].operands[1]).copied();
        let parts = fused.ops.iter().filter_map(parameter).collect();
        let pack = graph.add(Form::Pack { group: index, step, parts });
        whole = graph.add(Form::Fused { group: index, step, operands: [whole, pack] });
        for (member, op) in fused.ops.iter().enumerate() {
            let part = graph.add(Form::Part { group: index, member, whole: [whole] });
            if let Some(&class) = classes.get(&layer.ops[op.0].results[0]) {
                graph.union(part, class);
            }
        }
    }
}

/// Whether no operator would have to be in two groups.
fn disjoint(groups: &[Group], chosen: &BTreeSet<usize>) -> bool {
    let mut ops: Vec<_> = chosen.iter().flat_map(|&i| &groups[i].steps[0].ops).collect();
    let n = ops.len();
    ops.sort_unstable();
    ops.dedup();
    ops.len() == n
}
