//! The stream between stages on meshes of other lengths: who sends which part of its block to whom.
//!
//! Every device that takes over wants one block. Of every block that the others hold and that has rows of it, it takes
//! these from one of the devices that hold it: of `n`, in order, from number `receiver mod n`, so that not all ask the
//! first.

use ir::mesh::Mesh;
use ir::sharding::Sharding;

use crate::block::Block;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Device of the mesh that gives.
    pub(crate) from: u64,
    /// Device of the mesh that takes.
    pub(crate) to: u64,
    /// The rows.
    pub(crate) block: Block,
}

/// How a tensor lies on the devices of a stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side<'a> {
    pub(crate) mesh: &'a Mesh,
    pub(crate) sharding: Sharding,
}

impl Side<'_> {
    pub(crate) fn block(&self, device: u64, shape: &[u64]) -> Block {
        Block::of(self.sharding, self.mesh, &self.mesh.coordinates(device), shape)
    }
}

/// All messages, by who takes, then by who gives.
pub(crate) fn parts(from: Side<'_>, to: Side<'_>, shape: &[u64]) -> Vec<Part> {
    let mut blocks: Vec<(Block, Vec<u64>)> = Vec::new();
    for device in 0..from.mesh.n_devices() {
        let block = from.block(device, shape);
        match blocks.iter_mut().find(|(known, _)| *known == block) {
            Some((_, devices)) => devices.push(device),
            None => blocks.push((block, vec![device])),
        }
    }
    let mut parts = Vec::new();
    for receiver in 0..to.mesh.n_devices() {
        let wanted = to.block(receiver, shape);
        for (block, devices) in &blocks {
            let common = wanted.intersection(block);
            if common.len() > 0 {
                let from = devices[receiver as usize % devices.len()];
                parts.push(Part { from, to: receiver, block: common });
            }
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use ir::mesh::AxisId;
    use ir::sharding::Placement::{Replicate, Shard};

    use super::*;

    fn check(
        sizes: [&[u64]; 2],
        placements: [&[ir::sharding::Placement]; 2],
        expected: &[(u64, u64, usize)],
    ) {
        let meshes = sizes.map(|sizes| Mesh::of_sizes(sizes).unwrap());
        let side = |at: usize| {
            let all = placements[at].iter().enumerate();
            let sharding =
                all.fold(Sharding::REPLICATED, |sharding, (axis, &one)| sharding.with(AxisId(axis), one));
            Side { mesh: &meshes[at], sharding }
        };
        let found = parts(side(0), side(1), &[8, 4]);
        let found: Vec<_> = found.iter().map(|part| (part.from, part.to, part.block.len())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn four_blocks_become_two_and_two_become_four() {
        check([&[4], &[2]], [&[Shard(0)]; 2], &[(0, 0, 8), (1, 0, 8), (2, 1, 8), (3, 1, 8)]);
        check([&[2], &[4]], [&[Shard(0)]; 2], &[(0, 0, 8), (0, 1, 8), (1, 2, 8), (1, 3, 8)]);
    }

    #[test]
    fn of_devices_that_hold_the_same_each_gives_to_its_like() {
        let kept = [Shard(0), Replicate];
        let expected =
            [(0, 0, 8), (2, 0, 8), (1, 1, 8), (3, 1, 8), (4, 2, 8), (6, 2, 8), (5, 3, 8), (7, 3, 8)];
        check([&[4, 2], &[2, 2]], [&kept; 2], &expected);
        // Whole on two devices, cut on four: each gives to two of them.
        check([&[2], &[4]], [&[Replicate], &[Shard(0)]], &[(0, 0, 8), (1, 1, 8), (0, 2, 8), (1, 3, 8)]);
    }

    #[test]
    fn rows_that_are_cut_otherwise_come_from_several() {
        let expected = [(0, 0, 12), (1, 0, 4), (1, 1, 8), (2, 1, 8)];
        check([&[3], &[2]], [&[Shard(0)]; 2], &expected);
    }
}
