//! Equal forms of the layer kinds, among which the search chooses.
//!
//! A fused product reads its operand once, starts fewer kernels, adds no gradients of copies and converts one result
//! instead of several; but its parts can only be cut where all of them can.

use ir::graph::{Layer, Model, Op, ParameterRef, Segment, Tie};
use ir::op::OpKind;

use crate::request::Pins;
use crate::rewrite::{Variant, variants};
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

/// The forms that are left by what a user says: what is said of a tensor or an operator of a kind is said of the form in which it was read,
/// and a form whose fused products cannot be cut in as many parts as they are to be is none.
pub(crate) fn forms_within(model: &Model, pins: &Pins) -> Vec<Vec<Variant>> {
    let mut forms = forms_of(model);
    for (list, layer) in forms.iter_mut().zip(&model.layers) {
        if pins.constraints.names(layer) {
            list.truncate(1);
        }
        let divides = |form: &Variant| pins.tp.is_none_or(|tp| cuts_fused(layer, &form.layer, tp));
        list.retain(divides);
    }
    forms
}

/// Whether the products that a form has in place of others can be cut in so many parts.
fn cuts_fused(layer: &Layer, form: &Layer, parts: u64) -> bool {
    let space = Space::new(form, None);
    let is_fused = |op: &&Op| op.kind == OpKind::Linear && layer.ops.iter().all(|own| own.name != op.name);
    form.ops.iter().filter(is_fused).all(|op| space.most_parts(op).is_multiple_of(parts))
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
