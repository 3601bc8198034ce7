//! Equal forms of the layer kinds, among which the search chooses.
//!
//! A fused product reads its operand once, starts fewer kernels, adds no gradients of copies and converts one result
//! instead of several; but its parts can only be cut where all of them can.

use ir::graph::{Layer, Model, Op, ParameterRef, Segment, TensorId, Tie};
use ir::op::OpKind;

use crate::constraints::Constraints;
use crate::rewrite::{FusedParameter, Variant, variants};
use crate::space::Space;

/// Which forms of a layer are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forms<'f> {
    /// One of every kind: the layer as it was read, unless another leads (`Scope::leading`).
    Leading,
    /// One of every kind: this.
    Chosen(&'f [usize]),
    /// All.
    All,
}

/// The forms of every layer kind, the original first. A kind with a parameter that is tied to another layer's has no
/// other, since both sides must hold it in one way.
pub fn forms_of(model: &Model) -> Vec<Vec<Variant>> {
    let is_tied = |kind: usize| {
        model.ties.iter().any(|tie| [tie.owner, tie.copy].iter().any(|side| side.layer == kind))
    };
    let of_kind = |(kind, layer): (usize, &Layer)| {
        let mut list = variants(layer);
        if is_tied(kind) {
            list.truncate(1);
        }
        list
    };
    model.layers.iter().enumerate().map(of_kind).collect()
}

/// The forms that are left by what a user says of single layers: what is said of a tensor or an operator of a kind is
/// said of the form in which it was read.
pub(crate) fn forms_within(model: &Model, constraints: &Constraints) -> Vec<Vec<Variant>> {
    let mut forms = forms_of(model);
    for (list, layer) in forms.iter_mut().zip(&model.layers) {
        if constraints.names(layer) {
            list.truncate(1);
        }
    }
    forms
}

/// Leaves the forms whose products can be cut in so many parts, wherever those they stand for can.
pub(crate) fn leave_cut(forms: &mut [Vec<Variant>], model: &Model, parts: u64) {
    for (list, layer) in forms.iter_mut().zip(&model.layers) {
        list.retain(|form| cuts_fused(layer, form, parts));
    }
}

/// Whether the products of a form can be cut in so many parts, wherever one that they stand for can.
fn cuts_fused(layer: &Layer, form: &Variant, parts: u64) -> bool {
    let cuts = |layer: &Layer, weight: TensorId| {
        let space = Space::new(layer, None);
        let reads = |op: &&Op| op.kind == OpKind::Linear && op.operands.contains(&weight);
        layer.ops.iter().filter(reads).all(|op| space.most_parts(op).is_multiple_of(parts))
    };
    let keeps = |fused: &FusedParameter| {
        cuts(&form.layer, fused.tensor) || !fused.parts.iter().any(|part| cuts(layer, part.tensor))
    };
    form.fused.iter().all(keeps)
}

/// First layer kind of the wide model for a kind.
pub(crate) fn first_of(forms: &[Vec<Variant>], kind: usize) -> usize {
    forms[..kind].iter().map(Vec::len).sum()
}

/// The model with a layer kind for every form; its layers are in their original forms.
pub(crate) fn wide(model: &Model, forms: &[Vec<Variant>]) -> Model {
    let side = |side: ParameterRef| ParameterRef { layer: first_of(forms, side.layer), ..side };
    let run = |run: &Segment| Segment { layer: first_of(forms, run.layer), ..*run };
    Model {
        layers: forms.iter().flatten().map(|form| form.layer.clone()).collect(),
        sequence: model.sequence.iter().map(run).collect(),
        ties: model.ties.iter().map(|tie| Tie { owner: side(tie.owner), copy: side(tie.copy) }).collect(),
        ..model.clone()
    }
}
