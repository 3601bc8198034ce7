//! Optimizer states of an arrangement in the memory of hosts.

use cost_model::offload::{HostMemory, fullest_host};
use ir::units::Bytes;

use crate::price::setting::Setting;
use crate::price::staged::Staged;

/// The node whose host is fullest; nothing where no host holds any state.
pub fn fullest(setting: &Setting<'_>, staged: &Staged<'_>) -> Option<HostMemory> {
    let of_stage = |stage: usize| {
        let bytes: Bytes = staged.runs(stage).map(|(entry, count)| entry.memory.host * count as f64).sum();
        (bytes, staged.meshes.of(stage as u64).n_devices())
    };
    let stages: Vec<(Bytes, u64)> = (0..staged.n_stages as usize).map(of_stage).collect();
    fullest_host((setting.machine.cluster, setting.machine.constants), &stages)
}
