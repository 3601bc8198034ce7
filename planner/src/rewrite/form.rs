//! The language of equal forms: a layer's operators, and operators that several of them were fused into.
//!
//! Forks are left out: a value with several readers is one class read several times. Fused operators speak of a group,
//! by its position in the list of groups found.

use std::collections::BTreeMap;

use egg::{EGraph, Id, Language};
use ir::graph::{Layer, OpId, TensorId};
use ir::op::OpKind;

/// What a class holds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Form {
    /// The stream, a parameter or data.
    Given(TensorId),
    /// A result of an operator of the layer.
    Apply { op: OpId, result: usize, operands: Box<[Id]> },
    /// Parameters of a group's operators of one step, side by side along the group's dim.
    Pack { group: usize, step: usize, parts: Box<[Id]> },
    /// The operators of one step of a group as one: the products, then their biases.
    Fused { group: usize, step: usize, operands: [Id; 2] },
    /// One part of a fused result.
    Part { group: usize, member: usize, whole: [Id; 1] },
}

impl Language for Form {
    type Discriminant = std::mem::Discriminant<Self>;

    fn discriminant(&self) -> Self::Discriminant {
        std::mem::discriminant(self)
    }

    fn matches(&self, other: &Self) -> bool {
        let blank = |form: &Self| form.clone().map_children(|_| Id::from(0));
        blank(self) == blank(other)
    }

    fn children(&self) -> &[Id] {
        match self {
            Self::Given(_) => &[],
            Self::Apply { operands, .. } => operands,
            Self::Pack { parts, .. } => parts,
            Self::Fused { operands, .. } => operands,
            Self::Part { whole, .. } => whole,
        }
    }

    fn children_mut(&mut self) -> &mut [Id] {
        match self {
            Self::Given(_) => &mut [],
            Self::Apply { operands, .. } => operands,
            Self::Pack { parts, .. } => parts,
            Self::Fused { operands, .. } => operands,
            Self::Part { whole, .. } => whole,
        }
    }
}

/// The e-graph of a layer's forms.
pub(super) type Forms = EGraph<Form, ()>;

/// Class of every tensor of a layer.
pub(super) type Classes = BTreeMap<TensorId, Id>;

/// The layer as it is.
pub(super) fn forms(layer: &Layer) -> (Forms, Classes) {
    let mut graph = Forms::default();
    let mut classes = Classes::new();
    let given = |t: &TensorId| layer.is_data(*t) || layer.is_parameter(*t) || layer.stream_in.contains(t);
    for tensor in layer.tensor_ids().filter(given) {
        classes.insert(tensor, graph.add(Form::Given(tensor)));
    }
    for (i, op) in layer.ops.iter().enumerate() {
        let operands: Vec<Id> =
            op.operands.iter().filter_map(|tensor| classes.get(tensor).copied()).collect();
        for (result, &tensor) in op.results.iter().enumerate() {
            let form = Form::Apply { op: OpId(i), result, operands: operands.clone().into() };
            let class = if op.kind == OpKind::Fork { operands[0] } else { graph.add(form) };
            classes.insert(tensor, class);
        }
    }
    (graph, classes)
}
