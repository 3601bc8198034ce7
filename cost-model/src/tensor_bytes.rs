//! Real bytes of a layer's tensors: number format, expected fill, and whose buffer a result takes.
//!
//! The one place of this crate that asks which operator a tensor comes from, to name it in reports and to know the few
//! results that need no buffer of their own.

use ir::cluster::Precision;
use ir::graph::{Layer, Sizes, TensorId};
use ir::op::OpKind;
use ir::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::rates::element_bytes;

/// Kinds of activations, by the operator that computes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ActivationKind {
    /// The residual stream: what a layer reads, and sums on it.
    Stream,
    /// Results of norms.
    Norm,
    /// Results of matrix products, biased, split or rotated.
    Linear,
    /// Results of the attention core, and what its kernel keeps.
    Attention,
    /// Results of the function between two products.
    Activation,
    /// Routing weights and routed tokens.
    Experts,
    /// Scores over the vocabulary.
    Logits,
    /// Sums and losses per token.
    Loss,
}

impl ActivationKind {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Norm => "norm",
            Self::Linear => "linear",
            Self::Attention => "attention",
            Self::Activation => "activation",
            Self::Experts => "experts",
            Self::Logits => "logits",
            Self::Loss => "loss",
        }
    }
}

/// The kind of an activation: that of its operator, or of what a fork forks.
pub fn activation_kind(layer: &Layer, tensor: TensorId) -> ActivationKind {
    if is_logits(layer, tensor) {
        return ActivationKind::Logits;
    }
    let Some(op) = layer.producer(tensor) else { return ActivationKind::Stream };
    let op = &layer.ops[op.0];
    match &op.kind {
        OpKind::Fork => activation_kind(layer, op.operands[0]),
        OpKind::Embed | OpKind::AddPosition { .. } | OpKind::Add => ActivationKind::Stream,
        OpKind::RmsNorm { .. } | OpKind::LayerNorm { .. } => ActivationKind::Norm,
        OpKind::Linear
        | OpKind::Bias
        | OpKind::Rope { .. }
        | OpKind::Split { .. }
        | OpKind::Concat { .. }
        | OpKind::Extend
        | OpKind::AppendShared
        | OpKind::Scale { .. }
        | OpKind::Softcap { .. } => ActivationKind::Linear,
        OpKind::Attention { .. } => ActivationKind::Attention,
        OpKind::Glu { .. } | OpKind::Act { .. } | OpKind::Gate => ActivationKind::Activation,
        OpKind::Route { .. } | OpKind::Dispatch | OpKind::Combine => ActivationKind::Experts,
        OpKind::RowMax
        | OpKind::SumExp
        | OpKind::Pick
        | OpKind::CrossEntropy
        | OpKind::Weigh { .. }
        | OpKind::SumLoss => ActivationKind::Loss,
    }
}

/// Whether a tensor holds the scores that the loss reads, before or after a fork.
pub fn is_logits(layer: &Layer, tensor: TensorId) -> bool {
    layer.reader(tensor).is_some_and(|op| {
        let op = &layer.ops[op.0];
        let reads_scores = matches!(op.kind, OpKind::RowMax | OpKind::SumExp | OpKind::Pick);
        let forked = op.kind == OpKind::Fork && op.results.iter().any(|&result| is_logits(layer, result));
        forked || (reads_scores && op.operands[0] == tensor)
    })
}

/// Bytes of one element of a tensor or of its gradient: the loss is in fp32, all else in the job's precision.
pub fn tensor_element_bytes(layer: &Layer, tensor: TensorId, precision: Precision) -> Bytes {
    let is_loss = !layer.is_parameter(tensor)
        && layer.producer(tensor).is_some()
        && activation_kind(layer, tensor) == ActivationKind::Loss;
    element_bytes(if is_loss { Precision::Fp32 } else { precision })
}

/// Expected fraction of a tensor's elements that hold something: expert slots are filled in part.
pub fn filled_fraction(layer: &Layer, tensor: TensorId, sizes: &Sizes) -> f64 {
    layer.tensors[tensor.0].dims.iter().map(|dim| sizes.filled[dim.0]).product()
}

/// Whose buffer an operator's results take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Buffers {
    /// Their own.
    Own,
    /// That of what they are made from, which stays readable.
    Shared,
    /// That of what they are made from, if nobody else reads it.
    TakenOver,
}

/// Buffers of the results forward: forks share; views and what is fused into the product before take over.
pub(crate) fn forward_buffers(kind: &OpKind) -> Buffers {
    match kind {
        OpKind::Fork => Buffers::Shared,
        OpKind::Split { .. } | OpKind::Bias | OpKind::Scale { .. } | OpKind::Weigh { .. } => {
            Buffers::TakenOver
        }
        OpKind::Embed
        | OpKind::AddPosition { .. }
        | OpKind::Linear
        | OpKind::RmsNorm { .. }
        | OpKind::LayerNorm { .. }
        | OpKind::Rope { .. }
        | OpKind::Attention { .. }
        | OpKind::Glu { .. }
        | OpKind::Act { .. }
        | OpKind::Gate
        | OpKind::Add
        | OpKind::Softcap { .. }
        | OpKind::Concat { .. }
        | OpKind::Extend
        | OpKind::AppendShared
        | OpKind::Route { .. }
        | OpKind::Dispatch
        | OpKind::Combine
        | OpKind::RowMax
        | OpKind::SumExp
        | OpKind::Pick
        | OpKind::CrossEntropy
        | OpKind::SumLoss => Buffers::Own,
    }
}

/// Buffers of the operands' gradients: a sum hands on what arrives, a fork adds into it.
pub(crate) fn backward_buffers(kind: &OpKind) -> Buffers {
    match kind {
        OpKind::Add => Buffers::Shared,
        OpKind::Fork | OpKind::Bias | OpKind::Scale { .. } | OpKind::Weigh { .. } => Buffers::TakenOver,
        OpKind::Embed
        | OpKind::AddPosition { .. }
        | OpKind::Linear
        | OpKind::RmsNorm { .. }
        | OpKind::LayerNorm { .. }
        | OpKind::Rope { .. }
        | OpKind::Attention { .. }
        | OpKind::Glu { .. }
        | OpKind::Act { .. }
        | OpKind::Gate
        | OpKind::Softcap { .. }
        | OpKind::Split { .. }
        | OpKind::Concat { .. }
        | OpKind::Extend
        | OpKind::AppendShared
        | OpKind::Route { .. }
        | OpKind::Dispatch
        | OpKind::Combine
        | OpKind::RowMax
        | OpKind::SumExp
        | OpKind::Pick
        | OpKind::CrossEntropy
        | OpKind::SumLoss => Buffers::Own,
    }
}
