//! Bytes of a device of one stage at its peak, by category.
//!
//! ```text
//! states + in flight * saved + waiting * carried + the largest working set of a layer + logits + reserve        -> stage_memory()
//! ```

use cost_model::MemoryBreakdown;
use ir::units::Bytes;

use crate::price::setting::Setting;
use crate::price::staged::Staged;
use crate::price::step::Held;

/// What the second part of backward waits with.
const CARRIED: &str = "carried to weight gradients";

/// Peak memory of a stage by category; `held` counts its micro-batches in whole stages.
pub fn stage_memory(setting: &Setting<'_>, staged: &Staged<'_>, stage: usize, held: Held) -> MemoryBreakdown {
    let mut memory = MemoryBreakdown::default();
    let (mut working, mut freed) = (Bytes::ZERO, Bytes::ZERO);
    for (entry, count) in staged.runs(stage) {
        let own = &entry.memory;
        memory.parameters += own.parameters * count as f64;
        memory.gradients += own.gradients * count as f64;
        memory.optimizer += own.optimizer * count as f64;
        for (kind, bytes) in &own.saved {
            let all = *bytes * (count as f64 * held.saved);
            *memory.activations.entry(kind.name().to_string()).or_default() += all;
            freed += all;
        }
        let carried = entry.carried() * (count as f64 * held.carried);
        if carried > Bytes::ZERO {
            *memory.activations.entry(CARRIED.to_string()).or_default() += carried;
            freed += carried;
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
