//! What a kernel has to do, in the few shapes the cost model can price.
//!
//! An operator's line in `op.rs` says which work its forward and backward are; sizes are local to one device and may
//! be fractional (an expert's expected tokens).

use crate::units::Bytes;

/// The work of one kernel, or of a few that always run together.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// `batch` products of `m x k` by `k x n`.
    Gemm {
        /// Independent products.
        batch: f64,
        /// Rows of the result.
        m: f64,
        /// Columns of the result.
        n: f64,
        /// Length of the contraction.
        k: f64,
        /// Where the result goes.
        output: GemmOutput,
    },
    /// The core of attention: scores, softmax, weighted sum.
    Attention {
        /// Sequences times query heads.
        batch_heads: f64,
        /// Queries per sequence.
        queries: f64,
        /// Keys per sequence.
        keys: f64,
        /// Length of a query and a key.
        dim_qk: f64,
        /// Length of a value.
        dim_v: f64,
        /// Fraction of the `queries x keys` square that the mask leaves (one half for causal).
        unmasked: f64,
        /// Forward or backward.
        pass: Pass,
        /// Which kernel runs.
        kernel: AttentionKernel,
    },
    /// What a framework puts together from simpler kernels, each counted by itself, that one fused kernel could be.
    Composed {
        /// Bytes read and written by all of them.
        bytes: Bytes,
        /// How many they are.
        kernels: u32,
    },
    /// Element by element: bound by memory traffic.
    Stream {
        /// Bytes read and written.
        bytes: Bytes,
        /// Kernel launches.
        kernels: u32,
    },
}

/// Result type of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmOutput {
    /// The precision of the operands.
    Operand,
    /// Added to an fp32 accumulator (weight gradients).
    Accumulator,
}

/// Direction of a pass through an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pass {
    /// Forward.
    Forward,
    /// Backward.
    Backward,
}

/// Implementation of the attention core.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    serde::Serialize,
    serde::Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum AttentionKernel {
    /// Tiled with online softmax: scores never reach memory, backward recomputes them.
    Flash,
    /// Scores and probabilities materialised.
    Eager,
}
