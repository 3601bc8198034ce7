//! Bytes that running a lowered program moves and keeps, exact for every rank, so that a run can be held to them.
//!
//! Counted per group of a collective from the blocks its members hold (blocks may be unequal), with `n` members and `S`
//! the elements of all blocks together (for an all-reduce: of the whole local tensor):
//! ```text
//! all-gather       (n - 1) S      every block travels n - 1 hops
//! reduce-scatter   (n - 1) S      every part does, growing by one addend at each hop
//! all-reduce     2 (n - 1) S      one after the other
//! all-to-all       S less what stays where it is
//! ```
//! Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations in MPICH". This count knows
//! elements of one width; real number formats are the prices' business.

use std::collections::BTreeMap;

use ir::conversion::{Step, StepKind};
use ir::graph::{Layer, Sizes};
use ir::mesh::Mesh;
use ir::program::{Instruction, Program, Side, Update, ValueId};
use ir::sharding::Sharding;
use ir::work::Pass;
use serde::{Deserialize, Serialize};

/// What a communication is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CommunicationClass {
    /// Conversion of a tensor of the layer in forward.
    Forward,
    /// The same, once more in backward, because its result was not kept.
    Recompute,
    /// Conversion of a tensor's gradient.
    Gradient,
    /// Parameters brought from their storage to their use.
    ParameterGather,
    /// A micro-batch's parameter gradients into accumulators that are stored in parts.
    GradientAccumulate,
    /// Accumulated gradients to the optimizer, once per step.
    GradientReduce,
    /// New parameters from the optimizer to their storage, once per step.
    Update,
}

impl CommunicationClass {
    /// The name under which reports show it and a run counts it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward tensor",
            Self::Recompute => "recomputed tensor",
            Self::Gradient => "gradient",
            Self::ParameterGather => "parameter gather",
            Self::GradientAccumulate => "gradient accumulation",
            Self::GradientReduce => "gradient reduce",
            Self::Update => "update",
        }
    }

    /// The class of a value's conversion in a section.
    pub fn of_conversion(side: Side, section: Pass) -> Self {
        match (side, section) {
            (Side::Primal, Pass::Forward) => Self::Forward,
            (Side::Primal, Pass::Backward) => Self::Recompute,
            (Side::Gradient, _) => Self::Gradient,
        }
    }
}

/// Bytes by purpose and name of the collective; nothing that sends no bytes has an entry.
pub type BytesByCollective = BTreeMap<(CommunicationClass, &'static str), u64>;

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

/// Bytes that all ranks of the mesh send in one step of a conversion of a tensor of `shape`.
///
/// 8 x 4 elements of 2 bytes in blocks of rows over 2 ranks, gathered: each sends 32 B, together 64 B.
pub fn step_bytes(step: &Step, mesh: &Mesh, shape: &[u64], element_bytes: u64) -> u64 {
    elements_sent(step, mesh, |_| shape.to_vec()) * element_bytes
}

/// The same for a step on the flattened local block of a tensor of `shape` that is `used` in a sharding.
pub fn flat_step_bytes(
    step: &Step,
    mesh: &Mesh,
    (used, shape): (Sharding, &[u64]),
    element_bytes: u64,
) -> u64 {
    let local = |coordinates: &[u64]| vec![block(used, mesh, coordinates, shape).iter().product()];
    elements_sent(step, mesh, local) * element_bytes
}

/// Bytes that all ranks of the mesh send when a program runs with elements of `element_bytes`.
pub fn program_bytes(
    layer: &Layer,
    mesh: &Mesh,
    sizes: &Sizes,
    program: &Program,
    element_bytes: u64,
) -> ProgramBytes {
    let count = Count { layer, mesh, sizes, program, element_bytes };
    ProgramBytes {
        forward: count.section(&program.forward, Pass::Forward),
        backward: count.section(&program.backward, Pass::Backward),
        update: count.updates(&program.updates),
    }
}

/// Bytes of the values that each rank keeps from forward to backward, by rank.
pub fn saved_bytes(
    layer: &Layer,
    mesh: &Mesh,
    sizes: &Sizes,
    program: &Program,
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
        program.saved.iter().map(elements).sum::<u64>() * element_bytes
    };
    ranks.map(bytes).collect()
}

/// Bytes that each rank of a stage sends when every rank passes its block of the stream on: one hop of a pipeline.
pub fn stream_bytes(mesh: &Mesh, shape: &[u64], stream: Sharding, element_bytes: u64) -> Vec<u64> {
    let ranks = (0..mesh.n_devices()).map(|rank| mesh.coordinates(rank));
    ranks.map(|at| block(stream, mesh, &at, shape).iter().product::<u64>() * element_bytes).collect()
}

struct Count<'a> {
    layer: &'a Layer,
    mesh: &'a Mesh,
    sizes: &'a Sizes,
    program: &'a Program,
    element_bytes: u64,
}

impl Count<'_> {
    fn section(&self, code: &[Instruction], section: Pass) -> BytesByCollective {
        let mut bytes = BytesByCollective::new();
        for instruction in code {
            match instruction {
                Instruction::Convert { input, steps, .. } => {
                    let value = self.program.value(*input);
                    let shape = self.layer.shape(value.tensor, self.sizes);
                    let sent = |step: &Step| step_bytes(step, self.mesh, &shape, self.element_bytes);
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
                Instruction::Load { .. }
                | Instruction::Forward { .. }
                | Instruction::Backward { .. }
                | Instruction::Free { .. } => {}
            }
        }
        bytes
    }

    fn updates(&self, updates: &[Update]) -> BytesByCollective {
        let mut bytes = BytesByCollective::new();
        for update in updates {
            let shape = self.layer.shape(update.tensor, self.sizes);
            let sent =
                |step: &Step| flat_step_bytes(step, self.mesh, (update.used, &shape), self.element_bytes);
            add(&mut bytes, CommunicationClass::GradientReduce, &update.reduce, sent);
            add(&mut bytes, CommunicationClass::Update, &update.gather, sent);
        }
        bytes
    }

    fn flat(&self, step: &Step, value: ValueId) -> u64 {
        let value = self.program.value(value);
        let shape = self.layer.shape(value.tensor, self.sizes);
        flat_step_bytes(step, self.mesh, (value.sharding, &shape), self.element_bytes)
    }
}

fn add(
    bytes: &mut BytesByCollective,
    class: CommunicationClass,
    steps: &[Step],
    sent: impl Fn(&Step) -> u64,
) {
    for step in steps.iter().filter(|step| step.kind.is_collective()) {
        let count = sent(step);
        if count > 0 {
            *bytes.entry((class, step.kind.name())).or_insert(0) += count;
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

/// Elements sent by all ranks; the members of a group have one shape.
fn elements_sent(step: &Step, mesh: &Mesh, shape_at: impl Fn(&[u64]) -> Vec<u64>) -> u64 {
    if !step.kind.is_collective() {
        return 0;
    }
    let groups = (0..mesh.n_devices()).map(|rank| (rank, mesh.group(rank, &step.axes)));
    let firsts = groups.filter(|(rank, group)| group.first() == Some(rank));
    firsts.map(|(rank, group)| group_elements(step, mesh, &group, &shape_at(&mesh.coordinates(rank)))).sum()
}

/// Elements sent by one group.
fn group_elements(step: &Step, mesh: &Mesh, group: &[u64], shape: &[u64]) -> u64 {
    let others = group.len() as u64 - 1;
    let lengths = |rank: u64, sharding| block(sharding, mesh, &mesh.coordinates(rank), shape);
    let before = |rank: &u64| lengths(*rank, step.before).iter().product::<u64>();
    match step.kind {
        StepKind::AllReduce | StepKind::AllReduceMax => 2 * others * before(&group[0]),
        StepKind::ReduceScatter { .. } => others * before(&group[0]),
        StepKind::AllGather { .. } => others * group.iter().map(before).sum::<u64>(),
        StepKind::AllToAll { .. } => {
            // What stays is cut in the dim of before as well as in that of after.
            let stays = |rank: &u64| {
                let (old, new) = (lengths(*rank, step.before), lengths(*rank, step.after));
                old.iter().zip(new).map(|(&old, new)| old.min(new)).product::<u64>()
            };
            group.iter().map(|rank| before(rank) - stays(rank)).sum()
        }
        StepKind::Slice { .. } | StepKind::Zero => 0,
    }
}

#[cfg(test)]
#[path = "program_bytes_tests.rs"]
mod tests;
