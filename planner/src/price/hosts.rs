//! What an arrangement has in the memory of hosts: optimizer states, and what layers keep for backward.

use cost_model::offload::{HostMemory, fullest_host};
use ir::units::Bytes;

use crate::price::setting::{Entry, Setting};
use crate::price::staged::Staged;
use crate::price::step::Held;

/// Bytes of so many such layers in the host's memory.
pub fn of_layers(entry: &Entry, count: u64, held: Held) -> Bytes {
    (entry.memory.host + entry.memory.parameters_on_host + entry.memory.kept_on_host * held.kept)
        * count as f64
}

/// The node whose host is fullest; nothing where no host holds anything. `held` is that of every stage.
pub fn fullest(setting: &Setting<'_>, staged: &Staged<'_>, held: &[Held]) -> Option<HostMemory> {
    let of_stage = |(stage, held): (usize, &Held)| {
        let bytes: Bytes = staged.runs(stage).map(|(entry, count)| of_layers(entry, count, *held)).sum();
        (bytes, staged.meshes.of(stage as u64).n_devices())
    };
    let stages: Vec<(Bytes, u64)> = held.iter().enumerate().map(of_stage).collect();
    fullest_host((setting.machine.cluster, setting.machine.constants), &stages)
}
