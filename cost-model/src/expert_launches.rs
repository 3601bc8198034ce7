//! Experts that run one after another: how many kernels they take, and what the device waits for those.
//!
//! Without a capacity the host reads how many tokens every expert got before it launches what follows, so that its lead
//! over the device is gone: what runs inside the experts takes as long as its launches at least. With a capacity, or
//! with one kernel for all experts, the host need not know.

use std::ops::Range;

use ir::cluster::Precision;
use ir::engine::Experts;
use ir::graph::{Dim, Extent, Layer};
use ir::op::OpKind;
use ir::units::Seconds;
use ir::work::Work;

use crate::constants::Constants;
use crate::work_time::n_kernels;

/// Kernels that an operator with such work launches. Where every expert has its own, each has one per product, and so
/// many that cast its operand.
pub fn kernels(works: &[Work], experts: Experts, n_casts: u32) -> f64 {
    let once: f64 = works.iter().map(n_kernels).sum();
    if experts.is_together() {
        return once;
    }
    let experts = |work: &Work| match work {
        Work::Gemm { batch, .. } => *batch,
        Work::Attention { .. } | Work::Composed { .. } | Work::Stream { .. } => 1.0,
    };
    let n_experts = works.iter().map(experts).fold(1.0, f64::max);
    once + (n_experts - 1.0) * (works.len() as f64 + f64::from(n_casts))
}

/// Kernels of an expert that cast its operand to eight bits. With a capacity all experts are equal, and one kernel
/// casts for all.
pub fn n_casts(layer: &Layer, experts: Experts, precision: Precision) -> u32 {
    u32::from(precision == Precision::Fp8 && counts_tokens(layer, experts))
}

/// Whether the tokens of an expert are known only when they have been routed, and the host has to know them.
fn counts_tokens(layer: &Layer, experts: Experts) -> bool {
    let open = |dim: &Dim| matches!(dim.extent, Extent::Slots { capacity: None, .. });
    !experts.is_together() && layer.dims.iter().any(open)
}

/// Operators that are launched only when the host knows the tokens of its experts: from the dispatch to before the
/// combine.
pub fn behind_counts(layer: &Layer, experts: Experts) -> Range<usize> {
    let place = |kind: &OpKind| layer.ops.iter().position(|op| op.kind == *kind);
    match (counts_tokens(layer, experts), place(&OpKind::Dispatch), place(&OpKind::Combine)) {
        (true, Some(first), Some(end)) => first..end,
        _ => 0..0,
    }
}

/// What the device waits for an operator of so many kernels that runs so long, where the host has no lead.
pub fn waits(kernels: f64, runs: Seconds, constants: &Constants) -> Seconds {
    (constants.launch() * kernels - runs).max(Seconds::ZERO)
}
