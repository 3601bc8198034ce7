//! What the kernels of a program keep from forward to backward besides values.

use ir::cluster::Precision;
use ir::engine::{Dropout, Recomputation};
use ir::graph::OpId;
use ir::op::OpKind;
use ir::program::{Side, Value};
use ir::units::Bytes;
use ir::work::{AttentionKernel, Pass, Work};

use super::Account;
use crate::rates::element_bytes;

impl Account<'_> {
    pub(super) fn kernels_kept(&self) -> Bytes {
        self.of_kernels(|op| self.keeps(op))
    }

    /// What kernels keep that backward has when it begins: where the engine runs all of forward again, this has made it
    /// anew.
    pub(super) fn kernels_at_backward(&self) -> Bytes {
        self.of_kernels(|op| self.program.keeps(op))
    }

    /// What kernels keep of the operators that keep it.
    fn of_kernels(&self, keeps: impl Fn(OpId) -> bool) -> Bytes {
        let with_bytes = self.layer.op_ids().map(|op| (op, self.kernel_bytes(op)));
        // Most kernels have nothing to keep.
        with_bytes.filter(|&(op, bytes)| bytes > Bytes::ZERO && keeps(op)).map(|(_, bytes)| bytes).sum()
    }

    /// Whether what a kernel keeps besides values lies there between forward and backward.
    pub(super) fn keeps(&self, op: OpId) -> bool {
        self.program.keeps(op) && !self.runs_all_again()
    }

    /// Whether the engine runs all of forward again: also what no backward of the program asks for, such as a layer's
    /// last sum with the mask of its dropout (NVIDIA/Megatron-LM `CheckpointFunction` keeps a layer's input and nothing
    /// else).
    pub(super) fn runs_all_again(&self) -> bool {
        self.context.engine.recomputation == Recomputation::Whole
            && self.program.runs_products_again(self.layer)
    }

    /// What an operator's kernel keeps besides its operands: the log-sum-exp of each query in fp32, or, eager, the
    /// probabilities (arXiv 2307.08691 section 3); with dropout also what it makes of them, its mask, and the mask of
    /// what is added to the stream (arXiv 2205.05198 section 4.1).
    pub(super) fn kernel_bytes(&self, op: OpId) -> Bytes {
        // Probabilities before and after dropout, and its mask of one byte.
        let (copies, masks) = match self.context.engine.dropout {
            Dropout::On => (2.0, 1.0),
            Dropout::Off => (1.0, 0.0),
        };
        let bytes = |work: &Work| match *work {
            Work::Attention { batch_heads, queries, keys, kernel, .. } => match kernel {
                AttentionKernel::Flash => element_bytes(Precision::Fp32) * (batch_heads * queries),
                AttentionKernel::Eager => {
                    (element_bytes(self.context.precision) * copies + Bytes(masks))
                        * (batch_heads * queries * keys)
                }
            },
            Work::Gemm { .. } | Work::Composed { .. } | Work::Stream { .. } => Bytes::ZERO,
        };
        if self.layer.ops[op.0].kind == OpKind::Add {
            return Bytes(masks * self.made_elements(op));
        }
        if let Some(per_element) = self.kept_by_parts(op) {
            return Bytes(per_element * self.made_elements(op));
        }
        if let Some(out) = self.embedded(op) {
            return Bytes(masks * self.elements(out));
        }
        if !matches!(self.layer.ops[op.0].kind, OpKind::Attention { .. }) {
            return Bytes::ZERO;
        }
        self.work.of(op, Pass::Forward, &self.context.kernels).iter().map(bytes).sum()
    }

    /// The stream that an operator ends an embedding with, behind which dropout follows (NVIDIA/Megatron-LM
    /// `Embedding.forward`, in the sharding in which the stream leaves).
    fn embedded(&self, op: OpId) -> Option<Value> {
        let op = &self.layer.ops[op.0];
        let is_kind = matches!(op.kind, OpKind::Embed | OpKind::AddPosition { .. });
        let mut out = self.program.out.iter().map(|&id| self.program.value(id)).filter(|_| is_kind);
        out.find(|value| op.results.contains(&value.tensor))
    }

    /// Bytes per element of its result that an operator keeps for its parts, where it is put together from several: a
    /// norm its operand in fp32, in place of the operand, and what it yields before it is weighed; a gate what its
    /// function yields.
    fn kept_by_parts(&self, op: OpId) -> Option<f64> {
        let kind = &self.layer.ops[op.0].kind;
        if !self.context.kernels.composes() {
            None
        } else if matches!(kind, OpKind::RmsNorm { .. }) {
            Some(4.0)
        } else {
            matches!(kind, OpKind::Glu { .. }).then_some(2.0)
        }
    }

    /// Local elements of what an operator yields.
    fn made_elements(&self, op: OpId) -> f64 {
        let result = self.layer.ops[op.0].results.first();
        let made = self.program.values.iter().find(|v| Some(&v.tensor) == result && v.side == Side::Primal);
        made.map_or(0.0, |value| self.elements(*value))
    }
}
