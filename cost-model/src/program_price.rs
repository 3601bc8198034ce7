//! Price of a lowered program on real devices, from the program alone: what the search says a layer costs must come
//! out here again, so nothing is shared with the search.
//!
//! ```text
//! forward, backward = compute + exposed communication                                -> SectionPrice::seconds()
//! compute           = sum of the work of every operator that runs, recomputed ones apart
//! exposed           = tensor conversions: all, but for gathers and scatters beside products     -> exposure.rs
//!                   + parameter gathers and gradient reductions of the micro-batch: what a layer's compute,
//!                     running one layer ahead or behind, does not hide                     -> gathered_layer()
//! update            = gradients reduced, optimizer, parameters gathered; once per step, nothing hidden here
//! ```
//! Communication of parameters and their gradients runs in buckets: per layer, all steps of one kind over the same axes
//! are one collective. Sizes are those of the device with the largest block, expert slots count as filled.

use std::collections::BTreeMap;

use ir::cluster::{Cluster, Device, Precision};
use ir::conversion::{Step, StepKind};
use ir::graph::{Layer, Sizes, TensorId};
use ir::mesh::{AxisId, Mesh};
use ir::op_work::KernelChoice;
use ir::program::{Instruction, Program, Side, Storage, ValueId};
use ir::sharding::Sharding;
use ir::units::{Bytes, Seconds};
use ir::work::{GemmOutput, Pass, Work};

use crate::collective::{Choice, CollectiveKind, choose};
use crate::constants::Constants;
use crate::exposure::{Neighbours, OpSeconds, TensorOverlap, behind_products, beside_products};
use crate::group::{Group, GroupAxis};
use crate::memory::{GradientFormat, StateBytes, update_traffic};
use crate::overlap::gathered_layer;
use crate::program_bytes::CommunicationClass;
use crate::program_work::ProgramWork;
use crate::rates::{Rates, element_bytes};
use crate::stream::stream_time;
use crate::tensor_bytes::{filled_fraction, tensor_element_bytes};
use crate::traffic::bytes_sent_per_tier;
use crate::work_time::work_time;

/// Where and how a program runs.
#[derive(Clone, Copy, Debug)]
pub struct PriceContext<'a> {
    /// The machines.
    pub cluster: &'a Cluster,
    /// The device of this mesh.
    pub device: &'a Device,
    /// Precision of the job.
    pub precision: Precision,
    /// Format in which gradients are accumulated and reduced.
    pub gradients: GradientFormat,
    /// Constants of the world.
    pub constants: &'a Constants,
    /// Kernels of the engine.
    pub kernels: KernelChoice,
    /// Whether the engine cuts tensor parallel products to overlap them.
    pub tensor_overlap: TensorOverlap,
    /// Cluster rank of the mesh's first device.
    pub rank_offset: u64,
}

/// Compute of one section by what bounds it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ComputePrice {
    /// Matrix products.
    pub gemm: Seconds,
    /// Attention cores.
    pub attention: Seconds,
    /// Operators bound by memory.
    pub stream: Seconds,
    /// Everything computed a second time.
    pub recompute: Seconds,
}

impl ComputePrice {
    /// All of it.
    pub fn total(&self) -> Seconds {
        self.gemm + self.attention + self.stream + self.recompute
    }

    fn add(&mut self, work: &Work, time: Seconds) {
        match work {
            Work::Gemm { .. } => self.gemm += time,
            Work::Attention { .. } => self.attention += time,
            Work::Stream { .. } => self.stream += time,
        }
    }
}

/// Price of the communications of one class and kind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CommunicationPrice {
    /// Collectives.
    pub count: u32,
    /// Their time.
    pub total: Seconds,
    /// The part of it that adds to the section.
    pub exposed: Seconds,
}

/// Communications by class and kind.
pub type Communication = BTreeMap<(CommunicationClass, CollectiveKind), CommunicationPrice>;

/// Price of one section for one micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SectionPrice {
    /// Compute.
    pub compute: ComputePrice,
    /// The part of compute that yields gradients of parameters.
    pub weight_gradient: Seconds,
    /// Communications.
    pub communication: Communication,
    /// Bytes a device sends per tier of the cluster.
    pub bytes_per_tier: Vec<Bytes>,
}

impl SectionPrice {
    /// Wall time: compute and what shows of communication.
    pub fn seconds(&self) -> Seconds {
        self.compute.total() + self.exposed()
    }

    /// What shows of communication.
    pub fn exposed(&self) -> Seconds {
        self.communication.values().map(|price| price.exposed).sum()
    }
}

/// Price of what happens once per step; what the last backward and the next forward hide is the schedule's to say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UpdatePrice {
    /// Accumulators to the optimizer's cut.
    pub gradient_reduce: Seconds,
    /// The optimizer's pass over its states.
    pub optimizer: Seconds,
    /// New parameters to their storage.
    pub parameter_gather: Seconds,
    /// Both communications by kind.
    pub communication: Communication,
    /// Bytes a device sends per tier of the cluster.
    pub bytes_per_tier: Vec<Bytes>,
}

/// Price of a layer's program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProgramPrice {
    /// Forward, per micro-batch.
    pub forward: SectionPrice,
    /// Backward, per micro-batch.
    pub backward: SectionPrice,
    /// Update, per step.
    pub update: UpdatePrice,
}

/// Price of one collective.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPrice {
    /// What it is.
    pub kind: CollectiveKind,
    /// Algorithm and time.
    pub choice: Choice,
    /// Bytes a device sends per tier of the cluster.
    pub bytes_per_tier: Vec<Bytes>,
}

/// Prices a program.
pub fn price_program(
    context: &PriceContext<'_>,
    layer: &Layer,
    mesh: &Mesh,
    sizes: &Sizes,
    program: &Program,
) -> ProgramPrice {
    let pricing = Pricing { context, layer, mesh, sizes, program };
    ProgramPrice {
        forward: pricing.section(&program.forward, Pass::Forward),
        backward: pricing.section(&program.backward, Pass::Backward),
        update: pricing.update(),
    }
}

/// Price of one step of a conversion of a tensor of `shape`; nothing for a local one.
pub fn price_step(
    context: &PriceContext<'_>,
    mesh: &Mesh,
    step: &Step,
    shape: &[u64],
    element: Bytes,
) -> Option<StepPrice> {
    let kind = collective_kind(step.kind)?;
    Some(price_full(context, mesh, (kind, &step.axes), element * full_elements(step, mesh, shape)))
}

/// The tensor that a step's price is about: what a rank holds before, or gathers.
fn full_elements(step: &Step, mesh: &Mesh, shape: &[u64]) -> f64 {
    let side = if matches!(step.kind, StepKind::AllGather { .. }) { step.after } else { step.before };
    side.local_elements(mesh, shape) as f64
}

fn price_full(
    context: &PriceContext<'_>,
    mesh: &Mesh,
    (kind, axes): (CollectiveKind, &[AxisId]),
    full: Bytes,
) -> StepPrice {
    let group = group_of(context, mesh, axes);
    let choice = choose(kind, full, &group, context.cluster, context.constants);
    let bytes_per_tier = bytes_sent_per_tier(kind, full, &group, context.cluster);
    StepPrice { kind, choice, bytes_per_tier }
}

/// The collective of a step, if it is one.
pub fn collective_kind(kind: StepKind) -> Option<CollectiveKind> {
    match kind {
        StepKind::AllReduce | StepKind::AllReduceMax => Some(CollectiveKind::AllReduce),
        StepKind::ReduceScatter { .. } => Some(CollectiveKind::ReduceScatter),
        StepKind::AllGather { .. } => Some(CollectiveKind::AllGather),
        StepKind::AllToAll { .. } => Some(CollectiveKind::AllToAll),
        StepKind::Slice { .. } | StepKind::Zero => None,
    }
}

/// The group of a collective along mesh axes; where the mesh lies across domains of a tier, its worst group.
pub fn group_of(context: &PriceContext<'_>, mesh: &Mesh, axes: &[AxisId]) -> Group {
    let n = mesh.n_devices();
    let offset = context.rank_offset;
    let fits = |domain: u64| domain == 0 || offset % domain == 0 || offset % domain + n <= domain;
    if context.cluster.tiers.iter().all(|tier| fits(tier.devices)) {
        let axis = |&axis: &AxisId| GroupAxis { stride: mesh.stride(axis), size: mesh.size(axis) };
        return Group::from_axes(&axes.iter().map(axis).collect::<Vec<_>>(), context.cluster);
    }
    let groups = (0..n).map(|rank| mesh.group(rank, axes)).enumerate();
    let firsts = groups.filter(|(rank, group)| group.first() == Some(&(*rank as u64)));
    let placed = firsts.map(|(_, group)| {
        let ranks: Vec<u64> = group.into_iter().map(|rank| rank + offset).collect();
        Group::from_ranks(&ranks, context.cluster)
    });
    placed
        .min_by(|a, b| a.members_per_domain().cmp(b.members_per_domain()))
        .unwrap_or_else(|| Group::alone(context.cluster))
}

/// Time of everything an operator runs in one pass, on local factor lengths.
pub fn op_seconds(context: &PriceContext<'_>, works: &[Work]) -> Seconds {
    works.iter().map(|work| work_time(work, context.device, context.precision, context.constants)).sum()
}

struct Pricing<'a> {
    context: &'a PriceContext<'a>,
    layer: &'a Layer,
    mesh: &'a Mesh,
    sizes: &'a Sizes,
    program: &'a Program,
}

/// Bytes of bucketed communications by purpose, kind and axes.
type Buckets = BTreeMap<(CommunicationClass, CollectiveKind, Vec<AxisId>), Bytes>;

impl Pricing<'_> {
    fn section(&self, code: &[Instruction], pass: Pass) -> SectionPrice {
        let mut price = SectionPrice { bytes_per_tier: self.no_bytes(), ..SectionPrice::default() };
        let times: Vec<OpSeconds> = code.iter().map(|one| self.compute(one, pass, &mut price)).collect();
        let neighbours = Neighbours::new(self.layer, code, &times);
        let mut buckets = Buckets::new();
        for instruction in code {
            match instruction {
                Instruction::Convert { input, output, steps } => {
                    self.convert((*input, *output), steps, &neighbours, &mut price);
                }
                Instruction::Parameter { output, gather } => {
                    let element = element_bytes(self.context.precision);
                    self.fill(&mut buckets, (CommunicationClass::ParameterGather, *output), gather, element);
                }
                Instruction::Accumulate { gradient, reduce } => {
                    let element = self.states().gradient;
                    self.fill(&mut buckets, (CommunicationClass::GradientReduce, *gradient), reduce, element);
                }
                Instruction::Load { .. }
                | Instruction::Forward { .. }
                | Instruction::Backward { .. }
                | Instruction::Free { .. } => {}
            }
        }
        self.hide_buckets(buckets, &mut price);
        price
    }

    /// Prices what an instruction computes.
    fn compute(&self, instruction: &Instruction, pass: Pass, price: &mut SectionPrice) -> OpSeconds {
        let (works, again) = match instruction {
            Instruction::Forward { op, .. } => {
                (self.work().of(*op, Pass::Forward, &self.context.kernels), pass == Pass::Backward)
            }
            Instruction::Backward { op, results, .. } => {
                (self.work().backward(*op, results, &self.context.kernels), false)
            }
            Instruction::Load { .. }
            | Instruction::Parameter { .. }
            | Instruction::Convert { .. }
            | Instruction::Accumulate { .. }
            | Instruction::Free { .. } => (Vec::new(), false),
        };
        let mut seconds = OpSeconds::default();
        for work in &works {
            let time = op_seconds(self.context, std::slice::from_ref(work));
            let for_parameter = matches!(work, Work::Gemm { output: GemmOutput::Accumulator, .. });
            if again {
                price.compute.recompute += time;
            } else {
                price.compute.add(work, time);
            }
            if for_parameter {
                price.weight_gradient += time;
                seconds.weight_products += time;
            } else if matches!(work, Work::Gemm { .. }) {
                seconds.products += time;
            }
        }
        seconds
    }

    fn work(&self) -> ProgramWork<'_> {
        ProgramWork { layer: self.layer, mesh: self.mesh, sizes: self.sizes, program: self.program }
    }

    fn convert(
        &self,
        (input, output): (ValueId, ValueId),
        steps: &[Step],
        neighbours: &Neighbours<'_>,
        price: &mut SectionPrice,
    ) {
        let value = self.program.value(input);
        let shape = self.layer.shape(value.tensor, self.sizes);
        let element = self.element(value.tensor);
        for step in steps {
            let Some(one) = price_step(self.context, self.mesh, step, &shape, element) else { continue };
            let total = one.choice.time;
            let exposed = self.exposed(total, (one.kind, value.side), (input, output), neighbours);
            let entry = price.communication.entry((CommunicationClass::of_side(value.side), one.kind)).or_default();
            add_price(entry, CommunicationPrice { count: 1, total, exposed });
            add_tiers(&mut price.bytes_per_tier, &one.bytes_per_tier);
        }
    }

    fn exposed(
        &self,
        total: Seconds,
        (kind, side): (CollectiveKind, Side),
        (input, output): (ValueId, ValueId),
        neighbours: &Neighbours<'_>,
    ) -> Seconds {
        let products = match kind {
            CollectiveKind::AllGather => neighbours.after(output),
            CollectiveKind::ReduceScatter => neighbours.before(input),
            CollectiveKind::AllReduce
            | CollectiveKind::AllToAll
            | CollectiveKind::SendRecv
            | CollectiveKind::Broadcast => return total,
        };
        let regathers = side == Side::Primal && products.weight_products > Seconds::ZERO;
        if regathers && kind == CollectiveKind::AllGather {
            return behind_products(total, products, self.context.constants);
        }
        beside_products(total, products, self.context.tensor_overlap, self.context.constants)
    }

    /// Real bytes of an element of an activation or its gradient, as far as it is filled.
    fn element(&self, tensor: TensorId) -> Bytes {
        let whole = tensor_element_bytes(self.layer, tensor, self.context.precision);
        whole * filled_fraction(self.layer, tensor, self.sizes)
    }

    fn fill(
        &self,
        buckets: &mut Buckets,
        (class, id): (CommunicationClass, ValueId),
        steps: &[Step],
        element: Bytes,
    ) {
        let value = self.program.value(id);
        self.fill_flat(buckets, class, steps, element * self.local_elements(value.tensor, value.sharding));
    }

    /// `whole` is the flattened block in bytes.
    fn fill_flat(&self, buckets: &mut Buckets, class: CommunicationClass, steps: &[Step], whole: Bytes) {
        for step in steps {
            let Some(kind) = collective_kind(step.kind) else { continue };
            let side = if kind == CollectiveKind::AllGather { step.after } else { step.before };
            let parts: u64 = side.axes_of(0).map(|axis| self.mesh.size(axis)).product();
            *buckets.entry((class, kind, step.axes.clone())).or_default() += whole / parts as f64;
        }
    }

    fn local_elements(&self, tensor: TensorId, used: Sharding) -> f64 {
        used.local_elements(self.mesh, &self.layer.shape(tensor, self.sizes)) as f64
    }

    fn price_buckets(&self, buckets: Buckets, bytes_per_tier: &mut [Bytes]) -> Communication {
        let mut communication = Communication::new();
        for ((class, kind, axes), full) in buckets {
            let one = price_full(self.context, self.mesh, (kind, &axes), full);
            let total = one.choice.time;
            let entry = communication.entry((class, kind)).or_default();
            add_price(entry, CommunicationPrice { count: 1, total, exposed: total });
            add_tiers(bytes_per_tier, &one.bytes_per_tier);
        }
        communication
    }

    /// Parameters and gradients of the micro-batch move beside the layer's compute; each shows its share.
    fn hide_buckets(&self, buckets: Buckets, price: &mut SectionPrice) {
        let moved = self.price_buckets(buckets, &mut price.bytes_per_tier);
        let total: Seconds = moved.values().map(|one| one.total).sum();
        if total <= Seconds::ZERO {
            return;
        }
        let compute = price.compute.total();
        let exposed = gathered_layer(compute, total, self.context.constants) - compute;
        for (key, one) in moved {
            let share = CommunicationPrice { exposed: exposed * (one.total / total), ..one };
            add_price(price.communication.entry(key).or_default(), share);
        }
    }

    fn update(&self) -> UpdatePrice {
        let (states, mut buckets, mut owned) = (self.states(), Buckets::new(), 0.0);
        for update in &self.program.updates {
            let elements = self.local_elements(update.tensor, update.used);
            let classes = (CommunicationClass::GradientReduce, CommunicationClass::ParameterGather);
            self.fill_flat(&mut buckets, classes.0, &update.reduce, states.gradient * elements);
            self.fill_flat(&mut buckets, classes.1, &update.gather, states.parameter * elements);
            owned += elements / self.parts(update.storage);
        }
        let mut bytes_per_tier = self.no_bytes();
        let communication = self.price_buckets(buckets, &mut bytes_per_tier);
        let of = |class| {
            let all = communication.iter().filter(|((own, _), _)| *own == class);
            all.map(|(_, price)| price.total).sum::<Seconds>()
        };
        UpdatePrice {
            gradient_reduce: of(CommunicationClass::GradientReduce),
            optimizer: self.optimizer(owned, states),
            parameter_gather: of(CommunicationClass::ParameterGather),
            communication,
            bytes_per_tier,
        }
    }

    /// One fused pass over all states of the layer.
    fn optimizer(&self, n_parameters: f64, states: StateBytes) -> Seconds {
        if n_parameters <= 0.0 {
            return Seconds::ZERO;
        }
        let rates = Rates::new(self.context.device, self.context.precision, self.context.constants);
        stream_time(update_traffic(n_parameters, states), 1, &rates, self.context.constants)
    }

    fn parts(&self, storage: Storage) -> f64 {
        storage.optimizer.axes().iter().map(|&axis| self.mesh.size(axis) as f64).product()
    }

    fn states(&self) -> StateBytes {
        StateBytes::adamw(self.context.precision, self.context.gradients)
    }

    fn no_bytes(&self) -> Vec<Bytes> {
        vec![Bytes::ZERO; self.context.cluster.tiers.len()]
    }
}

fn add_price(entry: &mut CommunicationPrice, more: CommunicationPrice) {
    entry.count += more.count;
    entry.total += more.total;
    entry.exposed += more.exposed;
}

fn add_tiers(tiers: &mut [Bytes], more: &[Bytes]) {
    tiers.iter_mut().zip(more).for_each(|(tier, bytes)| *tier += *bytes);
}

#[cfg(test)]
#[path = "program_price_tests.rs"]
mod tests;
