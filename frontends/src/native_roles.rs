//! Whether the data tensors of a native document stand where their kind belongs: tokens in a lookup, positions in a
//! rotation, labels in the loss.

use std::collections::BTreeMap;

use ir::native::{DimDocument, LayerDocument, Length, OpDocument, TensorDocument, TensorRole};
use ir::op::{AttentionBias, AttentionMask, OpKind};

use crate::document::{Document, key};
use crate::input_error::InputError;
use crate::scan::{Step, clip};

/// Checks shapes and readers of the data tensors of one layer.
pub(crate) fn check_roles(
    document: &Document<'_>,
    at: &[Step<'_>],
    layer: &LayerDocument,
) -> Result<(), InputError> {
    let path = |list: &'static str, j: usize| [at, &[key(list), Step::Index(j)]].concat();
    // Of tensors with one name the first, as where names are read.
    let roles: BTreeMap<&str, TensorRole> =
        layer.tensors.iter().rev().map(|tensor| (tensor.name.as_str(), tensor.role)).collect();
    for (j, tensor) in layer.tensors.iter().enumerate() {
        if !has_shape_of_role(layer, tensor) {
            let what = format!(
                "`{}` has the wrong dims for its role: {}",
                clip(&tensor.name),
                shape_of(tensor.role)
            );
            return Err(document.error(&path("tensors", j), what));
        }
    }
    for (j, op) in layer.ops.iter().enumerate() {
        if let Some((at, expected)) = misplaced(&roles, op) {
            let mut place = path("ops", j);
            place.extend([key("operands"), Step::Index(at)]);
            let what = format!("operand {at} of {} must have role {expected}", op.kind.line().name);
            return Err(document.error(&place, what));
        }
    }
    Ok(())
}

fn shape_of(role: TensorRole) -> &'static str {
    match role {
        TensorRole::Tokens => "expected a micro-batch dim, then a sequence dim or one of fixed length",
        TensorRole::Labels => "expected a micro-batch dim, a sequence dim, and perhaps one of fixed length",
        TensorRole::Ahead => "expected a micro-batch dim, then a sequence dim",
        TensorRole::Positions => "expected one dim, a sequence or of fixed length",
        TensorRole::Features => "expected a micro-batch dim, then others, of sequence or fixed length",
        TensorRole::AlibiSlopes | TensorRole::RouterBias => "expected dims of fixed length",
        TensorRole::Activation
        | TensorRole::Parameter
        | TensorRole::ParameterOne
        | TensorRole::ParameterZero => "any dims",
    }
}

fn has_shape_of_role(layer: &LayerDocument, tensor: &TensorDocument) -> bool {
    let find = |name| layer.dims.iter().find(|dim: &&DimDocument| dim.name == name).map(|dim| &dim.length);
    let lengths: Vec<Option<&Length>> = tensor.dims.split_whitespace().map(find).collect();
    // A dim that does not exist is reported by the reader of the document.
    if lengths.iter().any(Option::is_none) {
        return true;
    }
    match tensor.role {
        TensorRole::Tokens => {
            matches!(lengths[..], [Some(Length::MicroBatch), Some(Length::Sequence | Length::Fixed(_))])
        }
        TensorRole::Ahead => matches!(lengths[..], [Some(Length::MicroBatch), Some(Length::Sequence)]),
        TensorRole::Labels => matches!(
            lengths[..],
            [Some(Length::MicroBatch), Some(Length::Sequence)]
                | [Some(Length::MicroBatch), Some(Length::Sequence), Some(Length::Fixed(_))]
        ),
        TensorRole::Positions => matches!(lengths[..], [Some(Length::Sequence | Length::Fixed(_))]),
        TensorRole::Features => {
            let is_given = |length: &Option<&Length>| {
                matches!(length, Some(Length::Sequence | Length::Fixed(_) | Length::Uneven(_)))
            };
            matches!(&lengths[..], [Some(Length::MicroBatch), others @ ..] if others.iter().all(is_given))
        }
        TensorRole::AlibiSlopes | TensorRole::RouterBias => {
            lengths.iter().all(|length| matches!(length, Some(Length::Fixed(_) | Length::Uneven(_))))
        }
        TensorRole::Activation
        | TensorRole::Parameter
        | TensorRole::ParameterOne
        | TensorRole::ParameterZero => true,
    }
}

/// The first operand whose role is not the one that its place asks for, and that role's name in files.
fn misplaced(roles: &BTreeMap<&str, TensorRole>, op: &OpDocument) -> Option<(usize, &'static str)> {
    let role = |at: usize| roles.get(op.operands.get(at)?.as_str()).copied();
    let wanted = wanted_roles(&op.kind);
    let is_text = |found| matches!((&op.kind, found), (OpKind::Embed, TensorRole::Ahead));
    let wrong = |&&(at, wanted, _): &&(usize, TensorRole, &str)| {
        role(at).is_some_and(|found| found != wanted && !is_text(found))
    };
    if let Some(&(at, _, name)) = wanted.iter().find(wrong) {
        return Some((at, name));
    }
    let is_computed = |at: &usize| {
        !wanted.iter().any(|(other, ..)| other == at) && role(*at).is_some_and(|found| !holds_numbers(found))
    };
    (0..op.operands.len()).find(is_computed).map(|at| (at, "activation, parameter or features"))
}

/// What any operator may read.
fn holds_numbers(role: TensorRole) -> bool {
    match role {
        TensorRole::Activation
        | TensorRole::Parameter
        | TensorRole::ParameterOne
        | TensorRole::ParameterZero
        | TensorRole::Features => true,
        TensorRole::Tokens
        | TensorRole::Labels
        | TensorRole::Ahead
        | TensorRole::Positions
        | TensorRole::AlibiSlopes
        | TensorRole::RouterBias => false,
    }
}

/// Places of an operator that hold data of its own, and the role's name in files.
fn wanted_roles(kind: &OpKind) -> &'static [(usize, TensorRole, &'static str)] {
    const POSITIONS: (TensorRole, &str) = (TensorRole::Positions, "positions");
    match kind {
        OpKind::Embed => &[(0, TensorRole::Tokens, "tokens")],
        OpKind::AddPosition { .. } | OpKind::Rope { .. } => &[(1, POSITIONS.0, POSITIONS.1)],
        OpKind::Attention { mask: AttentionMask::Full, .. } => &[],
        OpKind::Attention { bias: AttentionBias::Slopes, .. } => &[
            (3, POSITIONS.0, POSITIONS.1),
            (4, POSITIONS.0, POSITIONS.1),
            (5, TensorRole::AlibiSlopes, "alibi_slopes"),
        ],
        OpKind::Attention { bias: AttentionBias::None | AttentionBias::Sinks, .. } => {
            &[(3, POSITIONS.0, POSITIONS.1), (4, POSITIONS.0, POSITIONS.1)]
        }
        OpKind::Route { .. } => &[(1, TensorRole::RouterBias, "router_bias")],
        OpKind::Pick | OpKind::SumLoss => &[(1, TensorRole::Labels, "labels")],
        OpKind::Dispatch | OpKind::Combine => &[(2, POSITIONS.0, POSITIONS.1)],
        OpKind::Linear
        | OpKind::Bias
        | OpKind::RmsNorm { .. }
        | OpKind::LayerNorm { .. }
        | OpKind::Glu { .. }
        | OpKind::Act { .. }
        | OpKind::Gate
        | OpKind::Add
        | OpKind::Scale { .. }
        | OpKind::Softcap { .. }
        | OpKind::Fork
        | OpKind::Split { .. }
        | OpKind::Concat { .. }
        | OpKind::Extend
        | OpKind::AppendShared
        | OpKind::RowMax
        | OpKind::SumExp
        | OpKind::CrossEntropy
        | OpKind::Weigh { .. } => &[],
    }
}
