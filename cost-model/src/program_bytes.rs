//! Bytes that running a lowered program moves and keeps, exact for every rank, so that a run can be held to them.
//!
//! Counted per group of a collective from the blocks its members hold (blocks may be unequal), by the algorithm that
//! the program names, per link tier: `collective_loads` has the formulas. This count knows elements of one width; real
//! number formats are the prices' business.

use std::collections::BTreeMap;

pub use ir::collective::CommunicationClass;
use ir::collective::{Algorithm, CollectiveKind};
use ir::conversion::{Step, StepKind};
use ir::graph::{Layer, OpId, Sizes, TensorId};
use ir::mesh::Mesh;
use ir::program::{Home, Instruction, Program, Side, StateHome, Update, ValueId};
use ir::sharding::{Placement, Sharding};
use ir::signature::signature;
use ir::split::SplitBackward;
use ir::work::Pass;

use crate::collective_loads::{Moved, PerTier, elements_per_tier};

/// One line of the count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sent {
    /// What the bytes are for.
    pub class: CommunicationClass,
    /// What is done.
    pub kind: CollectiveKind,
    /// By which messages.
    pub algorithm: Algorithm,
    /// Position of the link tier that they cross.
    pub tier: usize,
}

/// Bytes by purpose, collective and tier; nothing that sends no bytes has an entry.
pub type BytesByCollective = BTreeMap<Sent, u64>;

/// Where a program runs, as far as bytes go.
#[derive(Clone, Copy)]
pub struct Links<'a> {
    /// Width of an element.
    pub element_bytes: u64,
    /// Position of the link tier that joins two ranks of the mesh.
    pub tier_of: &'a dyn Fn(u64, u64) -> usize,
}

/// Bytes that all ranks of a mesh send, by section.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgramBytes {
    /// In forward, per micro-batch.
    pub forward: BytesByCollective,
    /// In backward, per micro-batch.
    pub backward: BytesByCollective,
    /// In the update, per step.
    pub update: BytesByCollective,
}

/// Bytes that all ranks of the mesh send per tier in one step of a conversion of a tensor of `shape`.
///
/// 8 x 4 elements of 2 bytes in blocks of rows over 2 ranks, gathered: each sends 32 B, together 64 B.
pub fn step_bytes(step: &Step, mesh: &Mesh, shape: &[u64], links: &Links<'_>) -> PerTier {
    bytes_sent(step, mesh, links, |_| shape.to_vec())
}

/// The same for a step on the flattened local block of a tensor of `shape` that is `used` in a sharding.
pub fn flat_step_bytes(
    step: &Step,
    mesh: &Mesh,
    (used, shape): (Sharding, &[u64]),
    links: &Links<'_>,
) -> PerTier {
    bytes_sent(step, mesh, links, |at: &[u64]| vec![block(used, mesh, at, shape).iter().product()])
}

/// Bytes that all ranks of the mesh send when a program runs.
pub fn program_bytes(
    layer: &Layer,
    mesh: &Mesh,
    sizes: &Sizes,
    program: &Program,
    links: &Links<'_>,
) -> ProgramBytes {
    let count = Count { layer, mesh, sizes, program, links };
    ProgramBytes {
        forward: count.section(&program.forward, Pass::Forward),
        backward: count.section(&program.backward, Pass::Backward),
        update: count.updates(program.own_updates()),
    }
}

/// Bytes that all ranks of the mesh send in the two parts of a backward, per micro-batch.
pub fn split_bytes(
    (layer, mesh, sizes): (&Layer, &Mesh, &Sizes),
    program: &Program,
    split: &SplitBackward,
    links: &Links<'_>,
) -> [BytesByCollective; 2] {
    let count = Count { layer, mesh, sizes, program, links };
    [&split.input, &split.weight].map(|code| count.section(code, Pass::Backward))
}

/// Bytes of the values that each rank keeps from forward to backward, by rank.
pub fn saved_bytes(
    layer: &Layer,
    mesh: &Mesh,
    sizes: &Sizes,
    program: &Program,
    element_bytes: u64,
) -> Vec<u64> {
    let values = kept_bytes((layer, mesh, sizes), program, &program.saved, element_bytes);
    let rings = |rank: u64| -> u64 {
        let at = mesh.coordinates(rank);
        layer.op_ids().map(|op| ring_kept((layer, op), mesh, sizes, (program, &at))).sum()
    };
    (0..).zip(values).map(|(rank, bytes)| bytes + rings(rank) * element_bytes).collect()
}

/// Bytes of some values of a program, by rank.
pub fn kept_bytes(
    (layer, mesh, sizes): (&Layer, &Mesh, &Sizes),
    program: &Program,
    values: &[ValueId],
    element_bytes: u64,
) -> Vec<u64> {
    let ranks = (0..mesh.n_devices()).map(|rank| mesh.coordinates(rank));
    let bytes = |coordinates: Vec<u64>| {
        let elements = |id: &_| {
            let value = program.value(*id);
            block(value.sharding, mesh, &coordinates, &layer.shape(value.tensor, sizes))
                .iter()
                .product::<u64>()
        };
        values.iter().map(elements).sum::<u64>() * element_bytes
    };
    ranks.map(bytes).collect()
}

/// Elements that attention on a ring keeps besides values: its result, and the log-sum of every query and head.
fn ring_kept(
    (layer, op): (&Layer, OpId),
    mesh: &Mesh,
    sizes: &Sizes,
    (program, coordinates): (&Program, &[u64]),
) -> u64 {
    let runs = program.forward.iter().find_map(|one| {
        let Instruction::Forward { op: own, operands, results } = one else { return None };
        (*own == op).then_some((operands, results))
    });
    let Some((operands, results)) = runs.filter(|_| program.keeps(op)) else { return 0 };
    let sig = signature(layer, &layer.ops[op.0]);
    if sig.ring.is_none() || program.ring_axes(&sig, operands[1]).is_empty() {
        return 0;
    }
    let value = program.value(results[0]);
    let lengths = block(value.sharding, mesh, coordinates, &layer.shape(value.tensor, sizes));
    let queries: u64 = lengths[..lengths.len() - 1].iter().product();
    lengths.iter().product::<u64>() + queries
}

/// Elements of a parameter that all ranks of the mesh update on their hosts in one step: so many gradients go down, and
/// so many new values come up; of states on the drives as many of each are read and written. A cut parts a block into
/// pieces that together are the block: `sum over ranks of block / parts`; none where devices update.
///
/// 8 x 4 elements on 4 ranks that all use them whole, the state cut over two: 4 x 32 / 2 = 64.
pub fn host_elements((mesh, shape): (&Mesh, &[u64]), update: &Update) -> u64 {
    match update.storage.home {
        StateHome::Device => 0,
        StateHome::Host | StateHome::Nvme => {
            let blocks = (0..mesh.n_devices()).map(|rank| mesh.coordinates(rank));
            let blocks = blocks.map(|at| block(update.used, mesh, &at, shape).iter().product::<u64>());
            let parts: u64 = update.storage.optimizer.axes().iter().map(|&axis| mesh.size(axis)).product();
            blocks.sum::<u64>() / parts
        }
    }
}

/// Bytes of parameters that each rank has from its host while some code of a program runs, by rank; none where devices
/// hold them.
pub fn fetched_bytes(
    (layer, mesh, sizes): (&Layer, &Mesh, &Sizes),
    (program, code): (&Program, &[Instruction]),
    element_bytes: u64,
) -> Vec<u64> {
    let read = |one: &Instruction| match one {
        Instruction::Parameter { output, .. } => Some(program.value(*output).tensor),
        Instruction::Load { .. }
        | Instruction::Forward { .. }
        | Instruction::Backward { .. }
        | Instruction::Convert { .. }
        | Instruction::Accumulate { .. }
        | Instruction::Free { .. } => None,
    };
    let tensors: Vec<TensorId> = code.iter().filter_map(read).collect();
    stored_bytes((layer, mesh, sizes), program, &tensors, element_bytes)
}

/// Bytes of some parameters that each rank stores on its host, by rank; none where devices hold them.
pub fn stored_bytes(
    (layer, mesh, sizes): (&Layer, &Mesh, &Sizes),
    program: &Program,
    tensors: &[TensorId],
    element_bytes: u64,
) -> Vec<u64> {
    let of = |at: &[u64], tensor: &TensorId| -> u64 {
        let Some(held) = program.used().find(|used| used.tensor == *tensor) else { return 0 };
        let flat = block(held.used, mesh, at, &layer.shape(*tensor, sizes)).iter().product();
        let cut = held.storage.parameter.axes().into_iter();
        let cut = cut.fold(Sharding::REPLICATED, |cut, axis| cut.with(axis, Placement::Shard(0)));
        block(cut, mesh, at, &[flat]).iter().product::<u64>() * element_bytes
    };
    let ranks = (0..mesh.n_devices()).map(|rank| mesh.coordinates(rank));
    match program.parameters {
        Home::Device => ranks.map(|_| 0).collect(),
        Home::Host => ranks.map(|at| tensors.iter().map(|tensor| of(&at, tensor)).sum()).collect(),
    }
}

/// Bytes that each rank of a stage sends when every rank passes its block of the stream on: one hop of a pipeline.
pub fn stream_bytes(mesh: &Mesh, shape: &[u64], stream: Sharding, element_bytes: u64) -> Vec<u64> {
    let ranks = (0..mesh.n_devices()).map(|rank| mesh.coordinates(rank));
    ranks.map(|at| block(stream, mesh, &at, shape).iter().product::<u64>() * element_bytes).collect()
}

/// Bytes of the stream between stages on meshes of other lengths, by device that gives and device that takes.
///
/// A device wants one block; of every other block with elements of it, it asks one of the devices that have it: of `n`,
/// the one with its own number modulo `n`.
pub fn handover_bytes(
    (from, given): (&Mesh, Sharding),
    (to, wanted): (&Mesh, Sharding),
    shape: &[u64],
    element_bytes: u64,
) -> BTreeMap<(u64, u64), u64> {
    let ranges = |mesh: &Mesh, sharding: Sharding, device: u64| -> Vec<(u64, u64)> {
        let at = mesh.coordinates(device);
        let range = |(dim, &size): (usize, &u64)| {
            let rows = sharding.local_range(mesh, &at, dim, size);
            (rows.start, rows.end)
        };
        shape.iter().enumerate().map(range).collect()
    };
    let mut givers: BTreeMap<Vec<(u64, u64)>, Vec<u64>> = BTreeMap::new();
    for device in 0..from.n_devices() {
        givers.entry(ranges(from, given, device)).or_default().push(device);
    }
    let mut bytes = BTreeMap::new();
    for device in 0..to.n_devices() {
        let own = ranges(to, wanted, device);
        for (block, holders) in &givers {
            let both = own.iter().zip(block).map(|(a, b)| a.1.min(b.1).saturating_sub(a.0.max(b.0)));
            let elements: u64 = both.product();
            if elements > 0 {
                let giver = holders[(device % holders.len() as u64) as usize];
                bytes.insert((giver, device), elements * element_bytes);
            }
        }
    }
    bytes
}

struct Count<'a> {
    layer: &'a Layer,
    mesh: &'a Mesh,
    sizes: &'a Sizes,
    program: &'a Program,
    links: &'a Links<'a>,
}

impl Count<'_> {
    fn section(&self, code: &[Instruction], section: Pass) -> BytesByCollective {
        let mut bytes = BytesByCollective::new();
        for instruction in code {
            match instruction {
                Instruction::Convert { input, steps, .. } => {
                    let value = self.program.value(*input);
                    let shape = self.layer.shape(value.tensor, self.sizes);
                    let sent = |step: &Step| step_bytes(step, self.mesh, &shape, self.links);
                    add(&mut bytes, CommunicationClass::of_conversion(value.side, section), steps, sent);
                }
                Instruction::Parameter { output: value, gather: steps } => {
                    let sent = |step: &Step| self.flat(step, *value);
                    add(&mut bytes, CommunicationClass::ParameterGather, steps, sent);
                }
                Instruction::Accumulate { gradient: value, reduce: steps } => {
                    let sent = |step: &Step| self.flat(step, *value);
                    add(&mut bytes, CommunicationClass::GradientAccumulate, steps, sent);
                }
                Instruction::Forward { op, operands, .. } => {
                    let operands: Vec<Option<ValueId>> = operands.iter().copied().map(Some).collect();
                    self.ring(
                        &mut bytes,
                        CommunicationClass::of_conversion(Side::Primal, section),
                        *op,
                        &operands,
                    );
                }
                Instruction::Backward { op, operands, .. } => {
                    self.ring(&mut bytes, CommunicationClass::Recompute, *op, operands);
                    self.ring(&mut bytes, CommunicationClass::Gradient, *op, operands);
                }
                Instruction::Load { .. } | Instruction::Free { .. } => {}
            }
        }
        bytes
    }

    /// Keys and values, or their gradients, once round a ring: every block travels `n - 1` hops.
    fn ring(
        &self,
        bytes: &mut BytesByCollective,
        class: CommunicationClass,
        op: OpId,
        operands: &[Option<ValueId>],
    ) {
        let sig = signature(self.layer, &self.layer.ops[op.0]);
        let Some(&[Some(keys), Some(values)]) = operands.get(1..3) else { return };
        let axes = self.program.ring_axes(&sig, keys);
        for rank in (0..self.mesh.n_devices()).filter(|_| !axes.is_empty()) {
            let group = self.mesh.group(rank, &axes);
            let next =
                group.iter().position(|&member| member == rank).map(|at| group[(at + 1) % group.len()]);
            let tier = (self.links.tier_of)(rank, next.unwrap_or(rank));
            let (kind, algorithm) = (CollectiveKind::SendRecv, Algorithm::Direct);
            let block = self.elements(keys, rank) + self.elements(values, rank);
            let sent = (group.len() as u64 - 1) * block * self.links.element_bytes;
            *bytes.entry(Sent { class, kind, algorithm, tier }).or_insert(0) += sent;
        }
    }

    fn elements(&self, id: ValueId, rank: u64) -> u64 {
        let value = self.program.value(id);
        let shape = self.layer.shape(value.tensor, self.sizes);
        block(value.sharding, self.mesh, &self.mesh.coordinates(rank), &shape).iter().product()
    }

    fn updates<'u>(&self, updates: impl Iterator<Item = &'u Update>) -> BytesByCollective {
        let mut bytes = BytesByCollective::new();
        for update in updates {
            let shape = self.layer.shape(update.tensor, self.sizes);
            let sent = |step: &Step| flat_step_bytes(step, self.mesh, (update.used, &shape), self.links);
            add(&mut bytes, CommunicationClass::GradientReduce, &update.reduce, sent);
            add(&mut bytes, CommunicationClass::Update, &update.gather, sent);
        }
        bytes
    }

    fn flat(&self, step: &Step, value: ValueId) -> PerTier {
        let value = self.program.value(value);
        let shape = self.layer.shape(value.tensor, self.sizes);
        flat_step_bytes(step, self.mesh, (value.sharding, &shape), self.links)
    }
}

fn add(
    bytes: &mut BytesByCollective,
    class: CommunicationClass,
    steps: &[Step],
    sent: impl Fn(&Step) -> PerTier,
) {
    for step in steps {
        let Some(kind) = step.kind.collective() else { continue };
        for (tier, count) in sent(step) {
            *bytes.entry(Sent { class, kind, algorithm: step.algorithm, tier }).or_insert(0) += count;
        }
    }
}

/// Lengths of the block that the rank at `coordinates` holds.
fn block(sharding: Sharding, mesh: &Mesh, coordinates: &[u64], shape: &[u64]) -> Vec<u64> {
    let length = |(dim, &size): (usize, &u64)| {
        let range = sharding.local_range(mesh, coordinates, dim, size);
        range.end - range.start
    };
    shape.iter().enumerate().map(length).collect()
}

/// Bytes sent by all ranks; the members of a group have one shape.
fn bytes_sent(step: &Step, mesh: &Mesh, links: &Links<'_>, shape_at: impl Fn(&[u64]) -> Vec<u64>) -> PerTier {
    let mut sums = PerTier::new();
    if !step.kind.is_collective() {
        return sums;
    }
    let groups = (0..mesh.n_devices()).map(|rank| (rank, mesh.group(rank, &step.axes)));
    for (rank, group) in groups.filter(|(rank, group)| group.first() == Some(rank)) {
        let sent = group_elements(step, mesh, (&group, links), &shape_at(&mesh.coordinates(rank)));
        for (tier, elements) in sent {
            *sums.entry(tier).or_insert(0) += elements * links.element_bytes;
        }
    }
    sums
}

/// Elements sent by one group.
fn group_elements(step: &Step, mesh: &Mesh, (group, links): (&[u64], &Links<'_>), shape: &[u64]) -> PerTier {
    let lengths = |rank: u64, sharding| block(sharding, mesh, &mesh.coordinates(rank), shape);
    let elements = |sharding| move |rank: &u64| lengths(*rank, sharding).iter().product::<u64>();
    let before = || group.iter().map(elements(step.before)).collect::<Vec<_>>();
    let moved = match step.kind {
        StepKind::AllReduce | StepKind::AllReduceMax => {
            Moved::AllReduce(before().first().copied().unwrap_or(0))
        }
        StepKind::ReduceScatter { .. } => {
            Moved::ReduceScatter(group.iter().map(elements(step.after)).collect())
        }
        StepKind::AllGather { .. } => Moved::AllGather(before()),
        StepKind::AllToAll { from, to } => {
            // What one has and the other wants is cut in the dim of before and in that of after.
            let piece = |a: u64, b: u64| {
                let (old, new) = (lengths(a, step.before), lengths(b, step.after));
                let dims = 0..shape.len();
                dims.map(|dim| match dim {
                    dim if dim == usize::from(from) => old[dim],
                    dim if dim == usize::from(to) => new[dim],
                    dim => old[dim].min(new[dim]),
                })
                .product::<u64>()
            };
            Moved::AllToAll(group.iter().map(|&a| group.iter().map(|&b| piece(a, b)).collect()).collect())
        }
        StepKind::Slice { .. } | StepKind::Zero => return PerTier::new(),
    };
    elements_per_tier(step.algorithm, &moved, &|a, b| (links.tier_of)(group[a], group[b]), group.len())
}

#[cfg(test)]
#[path = "program_bytes_tests.rs"]
mod tests;
