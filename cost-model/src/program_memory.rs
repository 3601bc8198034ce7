//! Bytes that a lowered program keeps on the device with the largest blocks, by walking over it with its frees.
//!
//! ```text
//! saved         = values kept from forward to backward, per micro-batch in flight, and what attention kernels keep
//! forward_peak  = most bytes alive at once in forward, those to be saved included    -> Walk
//! backward_peak = the same in backward, which begins with all that is saved          -> Walk
//! working()     = the larger peak less saved: once per stage, whatever is in flight
//! logits        = scores of the loss and their gradient beyond what is saved of them, once
//! states        = parameters, gradients, optimizer, each over its own cut; of frozen ones only the parameter; what the
//!                 host updates is the host's
//! ```
//! What a layer keeps on the host is no `saved`: both peaks then hold all of it, and as much again on its way down
//! behind the layer before, or up for the next. Gathered parameters and their gradients stand apart: how many units
//! live at once is the engine's affair (`memory::gathered_units`).

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ir::cluster::Precision;
use ir::engine::{Accumulation, Engine};
use ir::graph::{DimId, Layer, Op, Sizes, TensorId};
use ir::mesh::Mesh;
use ir::op::OpKind;
use ir::op_work::KernelChoice;
use ir::program::{AxisSet, Home, Instruction, Program, Side, StateHome, Storage, Update, Value, ValueId};
use ir::sharding::Sharding;
use ir::split::SplitBackward;
use ir::units::Bytes;
use ir::work::Pass;

use crate::constants::Constants;
use crate::memory::{GatheredUnit, StateBytes, kept_logits, logits_bytes, predictions};
use crate::offload::{gradient_bytes, host_bytes, nvme_bytes};
use crate::program_work::ProgramWork;
use crate::rates::element_bytes;
use crate::tensor_bytes::{ActivationKind, activation_kind, filled_fraction, tensor_element_bytes};

mod buffers;
mod kernels;

use buffers::Walk;

/// Formats and kernels that decide what is kept.
#[derive(Clone, Copy, Debug)]
pub struct MemoryContext<'a> {
    /// Precision of the job.
    pub precision: Precision,
    /// The engine.
    pub engine: Engine,
    /// Its kernels of attention.
    pub kernels: KernelChoice,
    /// Constants of the world.
    pub constants: &'a Constants,
}

/// Bytes of a layer on one device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProgramMemory {
    /// Kept from forward to backward, per micro-batch in flight.
    pub saved: BTreeMap<ActivationKind, Bytes>,
    /// Most bytes alive in forward.
    pub forward_peak: Bytes,
    /// Most bytes alive in backward.
    pub backward_peak: Bytes,
    /// Scores and their gradient beyond what is saved of them.
    pub logits: Bytes,
    /// Parameters as stored.
    pub parameters: Bytes,
    /// Gradient accumulators as stored.
    pub gradients: Bytes,
    /// Optimizer states and master copies as stored.
    pub optimizer: Bytes,
    /// The same, and gradients on their way to them, in the host's memory, and gradients on their way to states on its
    /// drives: no bytes of the device.
    pub host: Bytes,
    /// States on the host's drives.
    pub nvme: Bytes,
    /// States of the largest parameter on the drives, in the host's memory while it is updated: once, however many
    /// layers.
    pub nvme_passing: Bytes,
    /// What is kept from forward to backward in the host's memory, per micro-batch in flight: no bytes of the device.
    pub kept_on_host: Bytes,
    /// Parameters as stored in the host's memory: no bytes of the device.
    pub parameters_on_host: Bytes,
    /// Parameters that are gathered for use, or fetched from the host, whole: the unit of `memory::gathered_units`.
    pub gathered: Bytes,
    /// Their gradients before these are reduced.
    pub unreduced: Bytes,
    /// Tensors that stand for weight gradients which are added inside products: once, however many such layers there
    /// are.
    pub stand_ins: Bytes,
    /// Elements of the largest gradient, of the parameter as it is used.
    pub largest_gradient: f64,
}

impl ProgramMemory {
    /// All that is saved.
    pub fn saved_total(&self) -> Bytes {
        self.saved.values().copied().sum()
    }

    /// So many such layers of a stage as units that are gathered for use.
    pub fn unit(&self, count: f64) -> GatheredUnit {
        GatheredUnit { parameters: self.gathered, gradient: self.unreduced, count }
    }

    /// What a pass needs beyond what is saved.
    pub fn working(&self) -> Bytes {
        (self.forward_peak.max(self.backward_peak) - self.saved_total()).max(Bytes::ZERO)
    }

    /// The same with all that is saved in the host's memory: the device has it while the layer runs, and that of a
    /// neighbour on its way. Peaks hold scores of the loss apart.
    fn kept_there(self) -> Self {
        let all = self.saved_total();
        let scores = self.saved.get(&ActivationKind::Logits).copied().unwrap_or_default();
        Self {
            forward_peak: self.forward_peak + all + scores,
            backward_peak: self.backward_peak + all + scores,
            kept_on_host: all,
            saved: BTreeMap::new(),
            ..self
        }
    }

    /// The memory of a micro-batch that runs slice by slice: all that its slices save, and what the largest works with.
    pub fn of_slices(slices: &[Self]) -> Self {
        let mut all = slices.first().cloned().unwrap_or_default();
        all.saved = BTreeMap::new();
        for (kind, bytes) in slices.iter().flat_map(|one| &one.saved) {
            *all.saved.entry(*kind).or_default() += *bytes;
        }
        let most = |of: &dyn Fn(&Self) -> Bytes| slices.iter().map(of).fold(Bytes::ZERO, Bytes::max);
        let saved = all.saved_total();
        let beyond = |peak: &dyn Fn(&Self) -> Bytes| saved + most(&|one| peak(one) - one.saved_total());
        all.forward_peak = beyond(&|one| one.forward_peak);
        all.backward_peak = beyond(&|one| one.backward_peak);
        all.logits = most(&|one| one.logits);
        all
    }

    /// Parameters, gradients and optimizer on the device.
    pub fn states(&self) -> Bytes {
        self.parameters + self.gradients + self.optimizer
    }
}

/// Bytes of a program.
pub fn program_memory(
    context: &MemoryContext<'_>,
    layer: &Layer,
    mesh: &Mesh,
    sizes: &Sizes,
    program: &Program,
) -> ProgramMemory {
    let storages = program.used().map(|used| (used.tensor, used.storage)).collect();
    let account = Account::new(context, (layer, mesh, sizes), program, storages);
    let saved = account.saved();
    let mut memory = ProgramMemory {
        forward_peak: account.peak(&program.forward, Pass::Forward, program.stream.iter().copied().collect()),
        backward_peak: account.peak(&program.backward, Pass::Backward, account.backward_start()),
        logits: account.logits(&saved),
        saved,
        ..ProgramMemory::default()
    };
    account.states(&mut memory);
    memory.stand_ins = account.stand_ins();
    match program.kept {
        Home::Device => memory,
        Home::Host => memory.kept_there(),
    }
}

/// Bytes of what a program keeps for backward in the host's memory, per micro-batch.
pub fn kept_on_host(
    context: &MemoryContext<'_>,
    (layer, mesh, sizes): (&Layer, &Mesh, &Sizes),
    program: &Program,
) -> Bytes {
    match program.kept {
        Home::Device => Bytes::ZERO,
        Home::Host => {
            let storages = BTreeMap::new();
            Account::new(context, (layer, mesh, sizes), program, storages).saved().into_values().sum()
        }
    }
}

/// Bytes carried from the first part of a backward to the second, per micro-batch: what the products of weight
/// gradients read. Scores of the loss are among them, in the job's precision.
pub fn carried_bytes(
    (context, layer, mesh, sizes): (&MemoryContext<'_>, &Layer, &Mesh, &Sizes),
    program: &Program,
    split: &SplitBackward,
) -> Bytes {
    let storages = program.used().map(|used| (used.tensor, used.storage)).collect();
    let account = Account::new(context, (layer, mesh, sizes), program, storages);
    let bytes = |id: &ValueId| {
        let value = program.value(*id);
        match account.held(value.tensor).kind {
            ActivationKind::Logits => element_bytes(context.precision) * account.elements(value),
            ActivationKind::Stream
            | ActivationKind::Norm
            | ActivationKind::Linear
            | ActivationKind::Attention
            | ActivationKind::Activation
            | ActivationKind::Experts
            | ActivationKind::Loss => account.bytes(value),
        }
    };
    split.carried.iter().map(bytes).sum()
}

/// Bytes of gradients that a slice's backward leaves for the slices before: of all keys and values before its own.
pub fn owed_bytes(
    (context, layer, mesh, sizes): (&MemoryContext<'_>, &Layer, &Mesh, &Sizes),
    program: &Program,
    tokens: &Range<u64>,
) -> Bytes {
    let storages = program.updates.iter().map(|update| (update.tensor, update.storage)).collect();
    let account = Account::new(context, (layer, mesh, sizes), program, storages);
    let of_all = |instruction: &Instruction| match instruction {
        Instruction::Backward { op, gradients, .. } if layer.ops[op.0].kind == OpKind::Extend => {
            gradients.iter().flatten().map(|id| account.bytes(program.value(*id))).sum()
        }
        Instruction::Load { .. }
        | Instruction::Parameter { .. }
        | Instruction::Forward { .. }
        | Instruction::Backward { .. }
        | Instruction::Convert { .. }
        | Instruction::Accumulate { .. }
        | Instruction::Free { .. } => Bytes::ZERO,
    };
    let all: Bytes = program.backward.iter().map(of_all).sum();
    all * (tokens.start as f64 / tokens.end.max(1) as f64)
}

/// Whether a parameter is stored only as the optimizer's fp32 copy: cut like it, it is cast when it is gathered (FSDP:
/// Zhao et al. 2023, arXiv 2304.11277, section 4.4). A copy on the host is none that the device could gather, and of an
/// fp32 parameter there is none.
pub fn doubles_as_master(storage: Storage, states: StateBytes) -> bool {
    let is_cut_like_it = !storage.parameter.is_empty() && storage.parameter == storage.optimizer;
    states.has_master() && storage.home.is_device() && is_cut_like_it
}

/// Whether a weight's gradient is added to its accumulator inside the product that yields it: of matrices that are held
/// whole, beside accumulators that are.
pub fn adds_inside(layer: &Layer, (tensor, storage): (TensorId, &Storage), engine: Engine) -> bool {
    let is_whole = storage.parameter.is_empty() && storage.gradient.is_empty();
    engine.accumulation == Accumulation::Fused && is_whole && product_of(layer, tensor).is_some()
}

/// What stands for the gradient of such a weight where it is used in a sharding: one tensor in the job's precision, and
/// one for all experts (NVIDIA/TransformerEngine transformer_engine/pytorch/module/base.py, `get_dummy_wgrad`, which
/// keeps them by shape).
pub fn stand_in(
    (layer, mesh, sizes): (&Layer, &Mesh, &Sizes),
    weight: TensorId,
    used: Sharding,
    precision: Precision,
) -> Bytes {
    let shape = layer.shape(weight, sizes);
    let dims = |tensor: TensorId| &layer.tensors[tensor.0].dims;
    // Local length of what a weight, what it multiplies and the result all walk: its experts.
    let copies = product_of(layer, weight).map_or(1, |op| {
        let everywhere =
            |dim: &&DimId| op.results.iter().chain(&op.operands[..1]).all(|&t| dims(t).contains(dim));
        let own = dims(weight).iter().enumerate().filter(|(_, dim)| everywhere(dim));
        own.map(|(i, _)| used.local_size(mesh, i, shape[i])).product::<u64>()
    });
    element_bytes(precision) * (used.local_elements(mesh, &shape) as f64 / copies.max(1) as f64)
}

/// The product that reads a weight.
fn product_of(layer: &Layer, weight: TensorId) -> Option<&Op> {
    let is_weight = |op: &&Op| op.kind == OpKind::Linear && op.operands.get(1) == Some(&weight);
    layer.ops.iter().find(is_weight)
}

struct Account<'a> {
    context: &'a MemoryContext<'a>,
    layer: &'a Layer,
    mesh: &'a Mesh,
    sizes: &'a Sizes,
    program: &'a Program,
    work: ProgramWork<'a>,
    storages: BTreeMap<TensorId, Storage>,
    /// Per tensor, what was asked of it first.
    held: Vec<OnceCell<Held>>,
}

/// What one element of a tensor is, and how many there are.
struct Held {
    kind: ActivationKind,
    element: Bytes,
    shape: Vec<u64>,
    /// Expected fraction of the elements that hold something.
    filled: f64,
}

impl<'a> Account<'a> {
    fn new(
        context: &'a MemoryContext<'a>,
        (layer, mesh, sizes): (&'a Layer, &'a Mesh, &'a Sizes),
        program: &'a Program,
        storages: BTreeMap<TensorId, Storage>,
    ) -> Self {
        let work = ProgramWork::new(layer, mesh, sizes, program);
        let held = layer.tensors.iter().map(|_| OnceCell::new()).collect();
        Self { context, layer, mesh, sizes, program, work, storages, held }
    }

    fn held(&self, tensor: TensorId) -> &Held {
        self.held[tensor.0].get_or_init(|| Held {
            kind: activation_kind(self.layer, tensor),
            element: tensor_element_bytes(self.layer, tensor, self.context.precision),
            shape: self.layer.shape(tensor, self.sizes),
            filled: filled_fraction(self.layer, tensor, self.sizes),
        })
    }

    fn saved(&self) -> BTreeMap<ActivationKind, Bytes> {
        let mut saved: BTreeMap<ActivationKind, Bytes> = BTreeMap::new();
        for &id in &self.program.saved {
            let value = self.program.value(id);
            let kind = self.held(value.tensor).kind;
            let bytes = match kind {
                ActivationKind::Logits => self.saved_logits(value),
                ActivationKind::Stream
                | ActivationKind::Norm
                | ActivationKind::Linear
                | ActivationKind::Attention
                | ActivationKind::Activation
                | ActivationKind::Experts
                | ActivationKind::Loss => self.bytes(value),
            };
            *saved.entry(kind).or_default() += bytes;
        }
        let kernels = self.kernels_kept();
        if kernels > Bytes::ZERO {
            *saved.entry(ActivationKind::Attention).or_default() += kernels;
        }
        saved
    }

    fn saved_logits(&self, value: Value) -> Bytes {
        self.kept_logit() * self.elements(value)
    }

    fn kept_logit(&self) -> Bytes {
        kept_logits(1.0, self.context.engine.loss, self.context.constants)
    }

    /// The peak of the loss beyond what is kept. Losses of several predictions are taken one after another
    /// (NVIDIA/Megatron-LM, `process_mtp_loss`), and back in turn: beside the peak of one lies what is kept for the
    /// others.
    fn logits(&self, saved: &BTreeMap<ActivationKind, Bytes>) -> Bytes {
        let scores = self.program.values.iter().filter(|value| {
            value.side == Side::Primal && self.held(value.tensor).kind == ActivationKind::Logits
        });
        let all = scores.map(|&value| (self.elements(value), self.predictions(value.tensor)));
        let (largest, n) = all.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((0.0, 1.0));
        let kept = saved.get(&ActivationKind::Logits).copied().unwrap_or_default();
        let one = logits_bytes(largest / n, self.context.engine.loss, self.context.constants);
        (one + self.kept_logit() * (largest - largest / n) - kept).max(Bytes::ZERO)
    }

    /// Predictions of a token in its scores: lengths of dims between the tokens' and the vocabulary.
    fn predictions(&self, scores: TensorId) -> f64 {
        predictions(&self.held(scores).shape)
    }

    /// Blocks of keys that an instruction has on their way round a ring.
    fn on_their_way(&self, instruction: &Instruction) -> Bytes {
        let Some((op, pass)) = instruction.kernel() else { return Bytes::ZERO };
        let ring = self.work.ring(op, self.context.kernels.element_bytes);
        ring.map_or(Bytes::ZERO, |(axes, sizes)| {
            sizes.buffers(pass, axes.iter().map(|&axis| self.mesh.size(axis)).product())
        })
    }

    fn backward_start(&self) -> BTreeSet<ValueId> {
        self.program.saved.iter().chain(&self.program.out_gradient).copied().collect()
    }

    /// Local elements that are expected to hold something.
    fn elements(&self, value: Value) -> f64 {
        let held = self.held(value.tensor);
        value.sharding.local_elements(self.mesh, &held.shape) as f64 * held.filled
    }

    /// Bytes of a value while it lives; nothing for what is counted elsewhere.
    fn bytes(&self, value: Value) -> Bytes {
        if self.layer.is_data(value.tensor) {
            return Bytes::ZERO;
        }
        if let Some(storage) = self.storages.get(&value.tensor) {
            return match value.side {
                Side::Primal => Bytes::ZERO,
                Side::Gradient if self.adds_inside(value.tensor) => Bytes::ZERO,
                Side::Gradient => self.fresh_gradient(*storage) * self.elements(value),
            };
        }
        match self.held(value.tensor) {
            Held { kind: ActivationKind::Logits, .. } => Bytes::ZERO,
            Held { element, .. } => *element * self.elements(value),
        }
    }

    /// One element of a parameter's gradient as backward yields it: part of the gathered unit, or to be reduced, or
    /// in the job's precision until it is added.
    fn fresh_gradient(&self, storage: Storage) -> Bytes {
        match (storage.parameter.is_empty(), storage.gradient.is_empty()) {
            (false, _) => Bytes::ZERO,
            // Counted with what the optimizer copies.
            (true, true) if !self.context.engine.copies.is_none() => Bytes::ZERO,
            // Where all are reduced at once it is what is kept.
            (true, false) if !self.context.engine.gradient_reduction.is_by_layer() => Bytes::ZERO,
            (true, false) => self.state_bytes().gradient,
            (true, true) => element_bytes(self.context.precision),
        }
    }

    /// Whether a weight's gradient is added to its accumulator inside the product that yields it.
    fn adds_inside(&self, tensor: TensorId) -> bool {
        let storage = self.storages.get(&tensor);
        storage.is_some_and(|storage| adds_inside(self.layer, (tensor, storage), self.context.engine))
    }

    fn stand_ins(&self) -> Bytes {
        let of = |update: &Update| {
            stand_in((self.layer, self.mesh, self.sizes), update.tensor, update.used, self.context.precision)
        };
        self.program.updates.iter().filter(|update| self.adds_inside(update.tensor)).map(of).sum()
    }

    fn state_bytes(&self) -> StateBytes {
        StateBytes::adamw(self.context.precision, self.context.engine.gradients)
    }

    fn states(&self, memory: &mut ProgramMemory) {
        let one = self.state_bytes();
        for held in self.program.held() {
            let shape = self.layer.shape(held.tensor, self.sizes);
            let whole = held.used.local_elements(self.mesh, &shape);
            let cut = |axes: AxisSet| {
                axes.axes().iter().fold(whole, |elements, &axis| elements.div_ceil(self.mesh.size(axis)))
                    as f64
            };
            let is_cut = !held.storage.parameter.is_empty();
            let stored = one.parameter * cut(held.storage.parameter);
            match self.program.parameters {
                Home::Host => memory.parameters_on_host += stored,
                Home::Device if doubles_as_master(held.storage, one) => {}
                Home::Device => memory.parameters += stored,
            }
            if is_cut || self.program.parameters == Home::Host {
                memory.gathered += one.parameter * whole as f64;
            }
            let at_once = !self.context.engine.gradient_reduction.is_by_layer();
            if is_cut && !at_once {
                memory.unreduced += one.gradient * if held.trained { whole as f64 } else { 0.0 };
            }
            if held.trained {
                memory.largest_gradient = memory.largest_gradient.max(whole as f64);
                let kept = if at_once { AxisSet::EMPTY } else { held.storage.gradient };
                memory.gradients += one.gradient * cut(kept);
                let updated = cut(held.storage.optimizer);
                match held.storage.home {
                    StateHome::Device => memory.optimizer += one.optimizer() * updated,
                    StateHome::Host => memory.host += host_bytes(one) * updated,
                    StateHome::Nvme => {
                        memory.host += gradient_bytes(one) * updated;
                        memory.nvme += nvme_bytes(one) * updated;
                        memory.nvme_passing = memory.nvme_passing.max(nvme_bytes(one) * updated);
                    }
                }
            }
        }
    }

    /// Most bytes alive while a section runs that begins with the values of `start`.
    fn peak(&self, code: &[Instruction], pass: Pass, start: BTreeSet<ValueId>) -> Bytes {
        let mut walk = Walk::new(self);
        start.into_iter().for_each(|value| walk.allocate(value));
        if pass == Pass::Backward {
            walk.live += self.kernels_at_backward();
        }
        let mut peak = walk.live;
        for (i, instruction) in code.iter().enumerate() {
            walk.step(instruction, &code[i + 1..]);
            peak = peak.max(walk.live + self.on_their_way(instruction));
            match instruction {
                // Kept for backward, from forward or from here, or dropped at once.
                Instruction::Forward { op, .. } if pass == Pass::Backward || self.keeps(*op) => {
                    walk.live += self.kernel_bytes(*op);
                    peak = peak.max(walk.live);
                }
                Instruction::Forward { op, .. } => peak = peak.max(walk.live + self.kernel_bytes(*op)),
                Instruction::Backward { op, .. } => {
                    peak = peak.max(walk.live);
                    walk.live = walk.live - self.kernel_bytes(*op);
                }
                Instruction::Load { .. }
                | Instruction::Parameter { .. }
                | Instruction::Convert { .. }
                | Instruction::Accumulate { .. }
                | Instruction::Free { .. } => peak = peak.max(walk.live),
            }
        }
        peak
    }
}

#[cfg(test)]
#[path = "program_memory_tests.rs"]
mod tests;
