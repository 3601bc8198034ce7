//! Price of a lowered program on real devices, from the program alone: what the search says a layer costs must come
//! out here again, so nothing is shared with the search.
//!
//! ```text
//! forward, backward = compute + exposed communication                                -> SectionPrice::seconds()
//! compute           = sum of the work of every operator that runs, recomputed ones apart
//! exposed           = tensor conversions: all, but for gathers and scatters beside products     -> exposure.rs
//!                     and tokens sent to experts beside another micro-batch                    -> dispatch.rs
//!                   + parameter gathers and gradient reductions of the micro-batch: what a layer's compute,
//!                     running one layer ahead or behind, does not hide                     -> gathered_layer()
//! update            = gradients reduced, optimizer here or on the host, parameters gathered; once per step, nothing
//!                     hidden here
//! ```
//! Communication of parameters and their gradients runs in buckets: per layer, all steps of one kind over the same axes
//! are one collective. Sizes are those of the device with the largest block, expert slots count as filled.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::BTreeMap;

use ir::conversion::Step;
use ir::engine::{Accumulation, GradientOverlap, ParameterSpread, Recomputation};
use ir::graph::{Layer, OpId, Sizes, TensorId};
use ir::mesh::{AxisId, Mesh};
use ir::program::{Home, Instruction, Program, StateHome, Storage, Update, ValueId};
use ir::sharding::Sharding;
use ir::split::SplitBackward;
use ir::units::{Bytes, Seconds};
use ir::work::{Pass, Work};

use crate::collective::CollectiveKind;
use crate::dispatch::{Routing, cover, shown};
use crate::expert_launches::{behind_counts, kernels, n_casts, waits};
use crate::exposure::{Beside, Neighbours, OpSeconds, exposed};
use crate::memory::StateBytes;
use crate::offload::{HostShare, HostUpdate};
use crate::overlap::gathered_layer;
use crate::program_bytes::CommunicationClass;
use crate::program_memory::{MemoryContext, kept_on_host};
use crate::program_work::ProgramWork;
use crate::rates::{Rates, element_bytes};
use crate::ring::ring_time;
use crate::section_price::{
    Communication, CommunicationPrice, ProgramPrice, SectionPrice, SplitPrice, UpdatePrice,
};
use crate::step_price::{
    PriceContext, StepPrice, collective_kind, group_of, price_broadcasts, price_full, price_step,
};
use crate::stream::update_time;
use crate::tensor_bytes::{filled_fraction, tensor_element_bytes};
use crate::traffic::bytes_sent_per_tier;
use crate::work_time::work_time;

mod events;

pub use events::{RowPrice, Stream};

/// Prices a program.
pub fn price_program(
    context: &PriceContext<'_>,
    layer: &Layer,
    mesh: &Mesh,
    sizes: &Sizes,
    program: &Program,
) -> ProgramPrice {
    let pricing = Pricing::new(context, layer, mesh, sizes, program);
    let backward = pricing.backward();
    let moved = [(&*program.forward, Pass::Forward), (&*backward, Pass::Backward)];
    let [forward_moved, backward_moved] = moved.map(|(code, pass)| pricing.moved(code, pass).longer());
    ProgramPrice {
        forward: SectionPrice { moved: forward_moved, ..pricing.section(&program.forward, Pass::Forward) },
        backward: SectionPrice { moved: backward_moved, ..pricing.section(&backward, Pass::Backward) },
        update: pricing.update(),
    }
}

/// A layer's forward and backward as events in a row of such layers: a second witness of the same section's
/// `SectionPrice::seconds`. Launches count where they take longer, as there.
pub fn price_events(
    context: &PriceContext<'_>,
    layer: &Layer,
    mesh: &Mesh,
    sizes: &Sizes,
    program: &Program,
) -> [RowPrice; 2] {
    let pricing = Pricing::new(context, layer, mesh, sizes, program);
    let backward = pricing.backward();
    [(&*program.forward, Pass::Forward), (&*backward, Pass::Backward)]
        .map(|(code, pass)| pricing.in_a_row(code, pass))
}

/// Prices the two parts of a program's backward.
pub fn price_split(
    (context, layer, mesh, sizes): (&PriceContext<'_>, &Layer, &Mesh, &Sizes),
    program: &Program,
    split: &SplitBackward,
) -> SplitPrice {
    let pricing = Pricing::new(context, layer, mesh, sizes, program);
    SplitPrice {
        input: SectionPrice {
            moved: pricing.moved(&split.input, Pass::Backward).longer(),
            ..pricing.section(&split.input, Pass::Backward)
        },
        weight: SectionPrice {
            moved: pricing.fetched(&split.weight),
            ..pricing.section(&split.weight, Pass::Backward)
        },
    }
}

/// Time of everything an operator runs in one pass, on local factor lengths.
pub fn op_seconds(context: &PriceContext<'_>, works: &[Work]) -> Seconds {
    works.iter().map(|work| work_time(work, context.device, context.precision, context.constants)).sum()
}

pub(crate) struct Pricing<'a> {
    pub(crate) context: &'a PriceContext<'a>,
    pub(crate) layer: &'a Layer,
    pub(crate) mesh: &'a Mesh,
    pub(crate) sizes: &'a Sizes,
    pub(crate) program: &'a Program,
    work: ProgramWork<'a>,
}

/// Times on the link to the host, which carries both ways at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Moved {
    pub(crate) down: Seconds,
    pub(crate) up: Seconds,
}

impl Moved {
    fn longer(self) -> Seconds {
        self.down.max(self.up)
    }
}

/// Bytes of bucketed communications by purpose, kind and axes.
pub(crate) type Buckets = BTreeMap<(CommunicationClass, CollectiveKind, Vec<AxisId>), Bytes>;

impl<'a> Pricing<'a> {
    pub(crate) fn new(
        context: &'a PriceContext<'a>,
        layer: &'a Layer,
        mesh: &'a Mesh,
        sizes: &'a Sizes,
        program: &'a Program,
    ) -> Self {
        let work = ProgramWork::new(layer, mesh, sizes, program);
        Self { context, layer, mesh, sizes, program, work }
    }

    /// Backward as the engine runs it.
    fn backward(&self) -> Cow<'_, [Instruction]> {
        match self.context.constants.engine.recomputation {
            Recomputation::Needed => Cow::Borrowed(&self.program.backward),
            Recomputation::Whole => Cow::Owned(self.whole_backward()),
        }
    }

    /// Time on the link to the host, each way, of what the layer keeps there and of the parameters that it has from
    /// there.
    pub(crate) fn moved(&self, code: &[Instruction], pass: Pass) -> Moved {
        let PriceContext { precision, constants, kernels, .. } = *self.context;
        let context = MemoryContext { precision, engine: constants.engine, kernels, constants };
        let kept = kept_on_host(&context, (self.layer, self.mesh, self.sizes), self.program);
        let (kept, fetched) = (self.host_share().moves(kept), self.fetched(code));
        match pass {
            Pass::Forward => Moved { down: kept, up: fetched },
            Pass::Backward => Moved { down: Seconds::ZERO, up: kept + fetched },
        }
    }

    /// Time of the parameters that some code has from the host.
    fn fetched(&self, code: &[Instruction]) -> Seconds {
        let of = |one: &Instruction| match one {
            Instruction::Parameter { output, .. } => self.stored(self.program.value(*output).tensor),
            Instruction::Load { .. }
            | Instruction::Forward { .. }
            | Instruction::Backward { .. }
            | Instruction::Convert { .. }
            | Instruction::Accumulate { .. }
            | Instruction::Free { .. } => Bytes::ZERO,
        };
        self.host_share().moves(code.iter().map(of).sum())
    }

    /// Bytes of a parameter, as it is stored, if the host holds it.
    fn stored(&self, tensor: TensorId) -> Bytes {
        let held = self.program.used().find(|used| used.tensor == tensor);
        match (self.program.parameters, held) {
            (Home::Host, Some(held)) => {
                let axes = held.storage.parameter.axes().into_iter();
                let parts: f64 = axes.map(|axis| self.mesh.size(axis) as f64).product();
                self.states().parameter * (self.local_elements(tensor, held.used) / parts)
            }
            (Home::Device, _) | (_, None) => Bytes::ZERO,
        }
    }

    fn host_share(&self) -> HostShare {
        HostShare::of(self.context.device, self.context.cluster, self.context.constants)
    }

    /// Backward of an engine that, where it computes products again, runs all of forward again.
    fn whole_backward(&self) -> Vec<Instruction> {
        let backward = &self.program.backward;
        let runs = |op: OpId| move |one: &Instruction| matches!(one, Instruction::Forward { op: own, .. } if *own == op);
        let again = |op: &OpId| backward.iter().any(runs(*op));
        if !self.program.runs_products_again(self.layer) {
            return backward.clone();
        }
        // Values of the second run have names of their own; what they are of tells them.
        let ends = |one: &Instruction| match one {
            Instruction::Convert { input, output, .. } => {
                Some((self.program.value(*input), self.program.value(*output)))
            }
            Instruction::Load { .. }
            | Instruction::Parameter { .. }
            | Instruction::Forward { .. }
            | Instruction::Backward { .. }
            | Instruction::Accumulate { .. }
            | Instruction::Free { .. } => None,
        };
        let left_out = |one: &&Instruction| {
            matches!(one, Instruction::Forward { op, .. } if !again(op))
                || ends(one).is_some_and(|own| !backward.iter().any(|other| ends(other) == Some(own)))
        };
        self.program.forward.iter().filter(left_out).chain(backward).cloned().collect()
    }

    fn section(&self, code: &[Instruction], pass: Pass) -> SectionPrice {
        let mut price = SectionPrice { bytes_per_tier: self.no_bytes(), ..SectionPrice::default() };
        let works: Vec<(Vec<Work>, bool)> = code.iter().map(|one| self.works(one, pass)).collect();
        let times: Vec<OpSeconds> = works.iter().map(|works| self.compute(works, &mut price)).collect();
        code.iter().for_each(|one| self.rings(one, pass, &mut price));
        let neighbours = OnceCell::new();
        for instruction in code {
            if let Instruction::Convert { input, output, steps } = instruction {
                let neighbours = neighbours.get_or_init(|| Neighbours::new(self.layer, code, &times));
                self.convert((*input, *output), steps, (neighbours, pass), &mut price);
            }
        }
        self.hide_buckets(self.section_buckets(code), &mut price);
        let n_collectives: u32 = price.communication.values().map(|one| one.count).sum();
        let n_kernels: f64 = works.iter().map(|(works, _)| self.kernels_of(works)).sum();
        price.launch = self.context.constants.launch() * (n_kernels + f64::from(n_collectives));
        price.counts = self.counts(code, pass);
        price
    }

    /// Parameters and their gradients that a section moves.
    pub(crate) fn section_buckets(&self, code: &[Instruction]) -> Buckets {
        let mut buckets = Buckets::new();
        for instruction in code {
            match instruction {
                Instruction::Parameter { output, gather } => {
                    let element = element_bytes(self.context.precision);
                    self.fill(&mut buckets, (CommunicationClass::ParameterGather, *output), gather, element);
                }
                Instruction::Accumulate { gradient, reduce } => {
                    let class = CommunicationClass::GradientAccumulate;
                    self.fill(&mut buckets, (class, *gradient), reduce, self.states().gradient);
                }
                Instruction::Convert { .. }
                | Instruction::Load { .. }
                | Instruction::Forward { .. }
                | Instruction::Backward { .. }
                | Instruction::Free { .. } => {}
            }
        }
        buckets
    }

    /// Gradients and parameters that the update moves.
    pub(crate) fn update_buckets(&self) -> Buckets {
        let (states, mut buckets) = (self.states(), Buckets::new());
        for update in self.program.own_updates() {
            let elements = self.local_elements(update.tensor, update.used);
            let classes = (CommunicationClass::GradientReduce, CommunicationClass::Update);
            self.fill_flat(&mut buckets, classes.0, &update.reduce, states.gradient * elements);
            self.fill_flat(&mut buckets, classes.1, &update.gather, states.parameter * elements);
        }
        buckets
    }

    /// Kernels that an instruction launches, collectives apart.
    fn kernels_of(&self, works: &[Work]) -> f64 {
        let experts = self.context.constants.engine.experts;
        let n_casts = n_casts(self.layer, experts, self.context.precision);
        kernels(works, experts, n_casts)
    }

    /// What the device waits where the host has to know how many tokens each expert got.
    fn counts(&self, code: &[Instruction], pass: Pass) -> Seconds {
        let behind = behind_counts(self.layer, self.context.constants.engine.experts);
        let runs = |one: &Instruction| match one.kernel() {
            Some((op, Pass::Forward)) => Some(op.0),
            Some((_, Pass::Backward)) | None => None,
        };
        // Tokens that are not sent again are counted already.
        let from_dispatch = code.iter().skip_while(|one| runs(one).is_none_or(|op| op != behind.start));
        let again = from_dispatch.take_while(|one| !matches!(one, Instruction::Backward { .. }));
        let inside = again.filter(|one| runs(one).is_some_and(|op| behind.contains(&op)));
        let waits = |one: &Instruction| {
            let (works, _) = self.works(one, pass);
            waits(self.kernels_of(&works), op_seconds(self.context, &works), self.context.constants)
        };
        inside.map(waits).sum()
    }

    /// Prices what an instruction computes, given its work and whether that is done again.
    fn compute(&self, (works, again): &(Vec<Work>, bool), price: &mut SectionPrice) -> OpSeconds {
        let mut seconds = OpSeconds::default();
        for work in works {
            let time = op_seconds(self.context, std::slice::from_ref(work));
            if *again {
                price.compute.recompute += time;
            } else {
                price.compute.add(work, time);
            }
            seconds.add(work, time);
        }
        price.weight_gradient += seconds.weight_products;
        seconds
    }

    /// The work of an instruction, and whether it is done again.
    fn works(&self, instruction: &Instruction, pass: Pass) -> (Vec<Work>, bool) {
        match instruction {
            Instruction::Forward { op, .. } => {
                (self.work.of(*op, Pass::Forward, &self.context.kernels), pass == Pass::Backward)
            }
            Instruction::Backward { op, results, .. } => {
                (self.work.backward(*op, results, &self.context.kernels), false)
            }
            Instruction::Accumulate { gradient, reduce } => (self.added(*gradient, reduce), false),
            Instruction::Load { .. }
            | Instruction::Parameter { .. }
            | Instruction::Convert { .. }
            | Instruction::Free { .. } => (Vec::new(), false),
        }
    }

    /// A gradient added to what is accumulated: read, and the accumulator read and written.
    fn added(&self, gradient: ValueId, reduce: &[Step]) -> Vec<Work> {
        let value = self.program.value(gradient);
        let parts: u64 =
            reduce.iter().flat_map(|step| &step.axes).map(|&axis| self.mesh.size(axis)).product();
        let elements = self.local_elements(value.tensor, value.sharding) / parts as f64;
        let bytes = (element_bytes(self.context.precision) + self.states().gradient * 2.0) * elements;
        match self.context.constants.engine.accumulation {
            Accumulation::Separate => vec![Work::Stream { bytes, kernels: 1 }],
            Accumulation::Fused => Vec::new(),
        }
    }

    /// Prices what attention on a ring adds to attention: blocks merged, and hops that show.
    fn rings(&self, instruction: &Instruction, section: Pass, price: &mut SectionPrice) {
        let Some((op, pass)) = instruction.kernel() else { return };
        let Some((axes, sizes)) = self.work.ring(op, self.context.kernels.element_bytes) else { return };
        let attention = op_seconds(self.context, &self.work.of(op, pass, &self.context.kernels));
        let merge = op_seconds(self.context, &[sizes.merge(pass)]);
        let group = group_of(self.context, self.mesh, &axes);
        let worlds = (self.context.cluster, self.context.constants);
        let time = ring_time(sizes, pass, (attention, merge), &group, worlds);
        match (section, pass) {
            (Pass::Backward, Pass::Forward) => price.compute.recompute += time.merging,
            (Pass::Forward | Pass::Backward, _) => price.compute.attention += time.merging,
        }
        let class = match (section, pass) {
            (Pass::Forward, _) => CommunicationClass::Forward,
            (Pass::Backward, Pass::Forward) => CommunicationClass::Recompute,
            (Pass::Backward, Pass::Backward) => CommunicationClass::Gradient,
        };
        let entry = price.communication.entry((class, CollectiveKind::SendRecv)).or_default();
        let (count, total, exposed) = (time.n_hops, time.communication, time.exposed);
        entry.add(CommunicationPrice { count, total, exposed });
        // A block goes round like the blocks of an all-gather.
        let all = time.hop * group.n_members() as f64;
        let tiers = bytes_sent_per_tier(CollectiveKind::AllGather, all, &group, self.context.cluster);
        add_tiers(&mut price.bytes_per_tier, &tiers);
    }

    fn convert(
        &self,
        (input, output): (ValueId, ValueId),
        steps: &[Step],
        (neighbours, pass): (&Neighbours<'_>, Pass),
        price: &mut SectionPrice,
    ) {
        let value = self.program.value(input);
        let shape = self.layer.shape(value.tensor, self.sizes);
        let element = self.element(value.tensor);
        let beside = Beside { before: neighbours.before(input), after: neighbours.after(output) };
        let overlap = self.context.tensor_overlap;
        let routing = Routing::of(self.layer, value.tensor);
        let mut cover = self.cover(routing);
        for step in steps {
            let Some(one) = price_step(self.context, self.mesh, step, (&shape, element), routing) else {
                continue;
            };
            let total = one.choice.time;
            let exposed = match (one.kind, routing) {
                (CollectiveKind::AllToAll, Some(_)) => {
                    let (shows, left) = shown(total, cover, self.context.constants);
                    cover = left;
                    shows
                }
                _ => exposed(total, (one.kind, value.side), beside, overlap, self.context.constants),
            };
            let class = CommunicationClass::of_conversion(value.side, pass);
            let entry = price.communication.entry((class, one.kind)).or_default();
            entry.add(CommunicationPrice { count: 1, total, exposed });
            add_tiers(&mut price.bytes_per_tier, &one.bytes_per_tier);
        }
    }

    /// What an exchange of tokens may hide behind.
    pub(crate) fn cover(&self, routing: Option<Routing>) -> Seconds {
        let PriceContext { device, precision, constants, ref kernels, .. } = *self.context;
        if routing.is_none() || constants.engine.exchange_overlap.is_absent() {
            return Seconds::ZERO;
        }
        let seconds = |work: &Work| work_time(work, device, precision, constants);
        cover((self.layer, self.sizes), self.mesh, kernels, seconds)
    }

    /// Real bytes of an element of an activation or its gradient, as far as it is filled.
    pub(crate) fn element(&self, tensor: TensorId) -> Bytes {
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
            let (one, count) = match (class, self.context.constants.engine.parameter_spread) {
                (CommunicationClass::Update, ParameterSpread::Broadcast) => self.broadcasts(&axes, full),
                (_, ParameterSpread::Gathered | ParameterSpread::Broadcast) => {
                    (price_full(self.context, self.mesh, (kind, &axes), full), 1)
                }
            };
            let total = one.choice.time;
            let entry = communication.entry((class, one.kind)).or_default();
            entry.add(CommunicationPrice { count, total, exposed: total });
            add_tiers(bytes_per_tier, &one.bytes_per_tier);
        }
        communication
    }

    /// New parameters from the ranks that own them: a broadcast per matrix, with which smaller tensors travel.
    fn broadcasts(&self, axes: &[AxisId], full: Bytes) -> (StepPrice, u32) {
        let is_matrix = |update: &&Update| self.layer.shape(update.tensor, self.sizes).len() > 1;
        let is_spread = |update: &&Update| update.gather.iter().any(|step| step.axes == axes);
        let count = self.program.own_updates().filter(is_spread).filter(is_matrix).count().max(1) as u32;
        (price_broadcasts(self.context, self.mesh, axes, (count, full)), count)
    }

    /// Parameters and gradients of the micro-batch move beside the layer's compute; each shows its share.
    fn hide_buckets(&self, buckets: Buckets, price: &mut SectionPrice) {
        let moved = self.price_buckets(buckets, &mut price.bytes_per_tier);
        let total: Seconds = moved.values().map(|one| one.total).sum();
        if total <= Seconds::ZERO {
            return;
        }
        let compute = price.compute.total();
        let exposed = match self.context.constants.engine.gradient_overlap {
            GradientOverlap::Beside => gathered_layer(compute, total, self.context.constants) - compute,
            GradientOverlap::Absent => total,
        };
        for (key, one) in moved {
            let share = CommunicationPrice { exposed: exposed * (one.total / total), ..one };
            price.communication.entry(key).or_default().add(share);
        }
    }

    fn update(&self) -> UpdatePrice {
        let states = self.states();
        let owned = |home: StateHome| -> f64 {
            let there = self.program.own_updates().filter(|update| update.storage.home == home);
            there.map(|one| self.local_elements(one.tensor, one.used) / self.parts(one.storage)).sum()
        };
        let on_host = |home: StateHome| HostUpdate::at(home, owned(home), states, self.host_share()).total();
        let mut bytes_per_tier = self.no_bytes();
        let communication = self.price_buckets(self.update_buckets(), &mut bytes_per_tier);
        let of = |class| {
            let all = communication.iter().filter(|((own, _), _)| *own == class);
            all.map(|(_, price)| price.total).sum::<Seconds>()
        };
        UpdatePrice {
            gradient_reduce: of(CommunicationClass::GradientReduce),
            optimizer: self.optimizer(owned(StateHome::Device), states),
            host: on_host(StateHome::Host) + on_host(StateHome::Nvme) + self.stored_again(),
            parameter_gather: of(CommunicationClass::Update),
            communication,
            bytes_per_tier,
        }
    }

    /// One pass over all states of the layer.
    fn optimizer(&self, n_parameters: f64, states: StateBytes) -> Seconds {
        if n_parameters <= 0.0 {
            return Seconds::ZERO;
        }
        let rates = Rates::new(self.context.device, self.context.precision, self.context.constants);
        update_time(n_parameters, states, &rates, self.context.constants)
    }

    /// New parameters on their way to the host that holds them between uses.
    fn stored_again(&self) -> Seconds {
        let updates = self.program.own_updates();
        self.host_share().moves(updates.map(|update| self.stored(update.tensor)).sum())
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

fn add_tiers(tiers: &mut [Bytes], more: &[Bytes]) {
    tiers.iter_mut().zip(more).for_each(|(tier, bytes)| *tier += *bytes);
}

#[cfg(test)]
#[path = "program_price_tests.rs"]
mod tests;
