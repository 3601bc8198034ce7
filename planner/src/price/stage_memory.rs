//! Bytes of a device of one stage at its peak, by category.
//!
//! ```text
//! states + in flight * saved + the largest working set of a layer + logits + reserve        -> stage_memory()
//! ```

use cost_model::MemoryBreakdown;
use ir::units::Bytes;

use crate::price::setting::Setting;
use crate::price::staged::Staged;

/// Peak memory of a stage by category; `in_flight` counts its micro-batches in whole stages.
pub fn stage_memory(
    setting: &Setting<'_>,
    staged: &Staged<'_>,
    stage: usize,
    in_flight: f64,
) -> MemoryBreakdown {
    let mut memory = MemoryBreakdown::default();
    let (mut working, mut freed) = (Bytes::ZERO, Bytes::ZERO);
    for (entry, count) in staged.runs(stage) {
        let own = &entry.memory;
        memory.parameters += own.parameters * count as f64;
        memory.gradients += own.gradients * count as f64;
        memory.optimizer += own.optimizer * count as f64;
        for (kind, bytes) in &own.saved {
            let all = *bytes * (count as f64 * in_flight);
            *memory.activations.entry(kind.name().to_string()).or_default() += all;
            freed += all;
        }
        memory.logits = memory.logits.max(own.logits);
        working = working.max(own.working());
    }
    memory.buffers = working;
    freed += working + memory.logits;
    let slack = setting.machine.constants.fragmentation_factor - 1.0;
    memory.reserve = freed * slack + Bytes(setting.reserve());
    memory
}
