//! Bytes of a device of one stage at its peak, by category.
//!
//! ```text
//! states + in flight * saved + streams that wait + waiting * carried + owed to earlier slices + the largest working set of a layer + stand-ins
//!   + what the optimizer copies + logits + gathered units + reserve                                                                                -> stage_memory()
//! ```

use std::collections::BTreeMap;

use cost_model::MemoryBreakdown;
use cost_model::memory::{Owned, copied_bytes, gathered_units};
use ir::units::Bytes;

use crate::price::held::Held;
use crate::price::hosts;
use crate::price::setting::Setting;
use crate::price::staged::Staged;

/// What the second part of backward waits with.
const CARRIED: &str = "carried to weight gradients";

/// What the engine holds of streams that were sent.
const OUTPUTS: &str = "streams between stages";

/// Streams that a layer behind others takes over.
const WAITING: &str = "streams that wait";

/// What slices leave for those before them.
const OWED: &str = "gradients owed to earlier slices";

/// Peak memory of a stage by category; `held` counts its micro-batches in whole stages.
pub fn stage_memory(
    setting: &Setting<'_>,
    staged: &Staged<'_>,
    stage: usize,
    held: &Held,
) -> MemoryBreakdown {
    let (mut memory, _) = but_activations(setting, staged, stage, held);
    let chunks = staged.chunks_of(stage).enumerate();
    let runs = chunks.flat_map(|(chunk, runs)| runs.iter().map(move |&run| (run, held.of_chunk(chunk))));
    for ((entry, count), [saved, carried]) in runs {
        let (entry, count) = (&staged.entries[entry], count as f64);
        for (kind, bytes) in &entry.memory.saved {
            *memory.activations.entry(kind.name().to_string()).or_default() += *bytes * (count * saved);
        }
        let carried = entry.carried() * (count * carried);
        if carried > Bytes::ZERO {
            *memory.activations.entry(CARRIED.to_string()).or_default() += carried;
        }
    }
    let outputs = staged.held_outputs(setting, stage, held.streams);
    if outputs > Bytes::ZERO {
        memory.activations.insert(OUTPUTS.to_string(), outputs);
    }
    let waiting = staged.waiting(setting, stage);
    if waiting > Bytes::ZERO {
        memory.activations.insert(WAITING.to_string(), waiting);
    }
    if held.owed > Bytes::ZERO {
        memory.activations.insert(OWED.to_string(), held.owed);
    }
    memory
}

/// All of it together, for whoever asks again and again.
pub fn stage_peak(setting: &Setting<'_>, staged: &Staged<'_>, stage: usize, held: &Held) -> Bytes {
    let (memory, activations) = but_activations(setting, staged, stage, held);
    memory.total() + activations
}

/// All categories but what is kept for backward, and that in one sum.
fn but_activations(
    setting: &Setting<'_>,
    staged: &Staged<'_>,
    stage: usize,
    held: &Held,
) -> (MemoryBreakdown, Bytes) {
    let mut memory = MemoryBreakdown::default();
    let mut kept = held.owed;
    let mut stand_ins: BTreeMap<usize, Bytes> = BTreeMap::new();
    let mut owned = Owned::default();
    for (entry, count) in staged.runs(stage) {
        let own = &entry.memory;
        memory.parameters += own.parameters * count as f64;
        memory.gradients += own.gradients * count as f64;
        memory.optimizer += own.optimizer * count as f64;
        let of_one = setting.owned(entry);
        owned.local += of_one.local * count as f64;
        owned.updated += of_one.updated * count as f64;
        owned.largest = owned.largest.max(of_one.largest);
        kept += entry.whole.saved * (count as f64 * held.saved);
        kept += entry.carried() * (count as f64 * held.carried);
        let most = stand_ins.entry(entry.kind).or_default();
        *most = most.max(own.stand_ins);
    }
    memory.on_node = hosts::of_stage(staged, stage, held);
    kept += staged.held_outputs(setting, stage, held.streams) + staged.waiting(setting, stage);
    let (working, logits) = beside_all_saved(staged, stage);
    memory.logits = logits;
    let (precision, constants) = (setting.job.precision, setting.machine.constants);
    let copied = copied_bytes(setting.job.engine.copies, owned, precision, constants);
    memory.buffers = working + stand_ins.into_values().sum() + copied;
    memory.gathered_units =
        gathered_units(staged.runs(stage).map(|(entry, count)| entry.memory.unit(count as f64)));
    let freed = kept + working + memory.logits + memory.gathered_units;
    let slack = setting.machine.constants.fragmentation_factor - 1.0;
    memory.reserve = freed * slack + Bytes(setting.reserve());
    (memory, kept)
}

/// The working set and the logits of the layer that needs most beyond what the stage keeps for backward.
///
/// When backward reaches a layer, what those behind it in their chunk kept is free again; of slices, that of the last,
/// which runs backward first.
fn beside_all_saved(staged: &Staged<'_>, stage: usize) -> (Bytes, Bytes) {
    let mut most = (Bytes::ZERO, Bytes::ZERO);
    let last = staged.slices.n() as usize - 1;
    for runs in staged.chunks_of(stage) {
        let mut free = Bytes::ZERO;
        for (entry, count) in runs.iter().rev().map(|&(entry, count)| (&staged.entries[entry], count)) {
            let logits = entry.memory.logits;
            let working = (entry.memory.working() - free).max(Bytes::ZERO);
            if working + logits > most.0 + most.1 {
                most = (working, logits);
            }
            free += entry.slice(last).saved * count as f64;
        }
    }
    most
}
