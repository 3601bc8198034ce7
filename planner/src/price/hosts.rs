//! What an arrangement has in the memory of hosts and on their drives: optimizer states, and what layers keep for
//! backward.

use cost_model::offload::{NodeMemory, OnNode, fullest_node};
use ir::units::Bytes;

use crate::price::held::Held;
use crate::price::setting::{Entry, Setting};
use crate::price::staged::Staged;

/// What a device has on its node of so many layers each: the drives' states of the largest parameter pass through the
/// memory.
pub fn of_layers<'e>(layers: impl Iterator<Item = (&'e Entry, f64)>, held: &Held) -> OnNode {
    let (mut all, mut passing) = (OnNode::default(), Bytes::ZERO);
    for (entry, count) in layers {
        let memory = &entry.memory;
        all.host += (memory.host + memory.parameters_on_host + memory.kept_on_host * held.kept) * count;
        all.nvme += memory.nvme * count;
        passing = passing.max(memory.nvme_passing);
    }
    OnNode { host: all.host + passing, ..all }
}

/// What a device of a stage has there.
pub fn of_stage(staged: &Staged<'_>, stage: usize, held: &Held) -> OnNode {
    of_layers(staged.runs(stage).map(|(entry, count)| (entry, count as f64)), held)
}

/// The node whose host or drives are fullest; nothing where none hold anything. `held` is that of every stage.
pub fn fullest(setting: &Setting<'_>, staged: &Staged<'_>, held: &[Held]) -> Option<NodeMemory> {
    let on_node = |(stage, held): (usize, &Held)| {
        (of_stage(staged, stage, held), staged.meshes.of(stage as u64).n_devices())
    };
    let stages: Vec<(OnNode, u64)> = held.iter().enumerate().map(on_node).collect();
    fullest_node((setting.machine.cluster, setting.machine.constants), &stages)
}
