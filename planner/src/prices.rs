//! Prices of what a layer's choices are made of: operators, conversions, storage; each by the cost model, once.
//!
//! It knows how a choice becomes seconds and bytes on one mesh; it does not know which choice is wanted.

use std::collections::BTreeMap;
use std::sync::Mutex;

use cost_model::collective::broadcasts;
use cost_model::dispatch::{Routing, cover, exchange, shown};
use cost_model::expert_launches;
use cost_model::exposure::{Beside, OpSeconds, exposed};
use cost_model::memory::{GatheredUnit, StateBytes, gathered_units};
use cost_model::offload::{HostShare, HostUpdate, gradient_bytes, host_bytes};
use cost_model::program_memory::doubles_as_master;
use cost_model::ring::{RingSizes, ring_time};
use cost_model::stream::update_time;
use cost_model::{CollectiveKind, Constants, Group, GroupAxis, Rates, price, work_time};
use ir::cluster::{Cluster, Device, Precision};
use ir::conversion::{Change, Step};
use ir::engine::{GradientFormat, ParameterSpread, TensorOverlap};
use ir::graph::{Layer, Op, Sizes, TensorId};
use ir::lower::{flat_steps, partial_cut, whole_axes};
use ir::mesh::{AxisId, Mesh};
use ir::op_work::{KernelChoice, backward_work, local_lengths, op_work};
use ir::program::{AxisSet, Side, StateHome, Storage};
use ir::sharding::Sharding;
use ir::signature::Signature;
use ir::strategy::Strategy;
use ir::units::{Bytes, Seconds};
use ir::work::{Pass, Work};

use crate::clock::Spans;
pub use crate::conversions::{Conversion, Conversions};
use crate::conversions::{Hop, Routes, Sends, Sent, whole};
use crate::forbid::Barred;
use crate::meeting;
use crate::memos::lock;
use crate::request::GradientsKind;
use crate::space::{AxisRule, AxisView, Reach};

/// The machines and the engine, as prices see them.
#[derive(Clone, Debug)]
pub struct Machine<'a> {
    /// The cluster.
    pub cluster: &'a Cluster,
    /// The device that computes: the slowest of the cluster where they differ.
    pub device: &'a Device,
    /// The group of the cluster that holds every device at work, where its links are others than the cluster's.
    pub home: Option<usize>,
    /// Constants of the cost model.
    pub constants: &'a Constants,
    /// Precision of the job.
    pub precision: Precision,
    /// Kernels of the engine.
    pub kernels: KernelChoice,
    /// Format in which gradients are accumulated and reduced.
    pub gradients: GradientFormat,
    /// Whether the engine cuts tensor parallel products to overlap them.
    pub tensor_overlap: TensorOverlap,
}

/// Seconds of an operator's pass.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OpTime {
    /// All of it.
    pub total: f64,
    /// Matrix products among it.
    pub products: OpSeconds,
}

/// What one storage of one parameter costs: seconds, were nothing hidden, and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StoragePrice {
    /// What is sent every micro-batch and once per step, and the update.
    pub spans: Spans,
    /// Parameter, gradient and optimizer state on the device.
    pub state: f64,
    /// Of these what the parameter takes between uses: nothing where its host has it.
    pub parameter: f64,
    /// States in the host's memory.
    pub host: f64,
    /// What a stage has once while it runs such layers: parameters gathered for use, a gradient before it is reduced.
    /// The choice problem adds what the allocator holds beside them, and what stands for a gradient.
    pub once: f64,
}

/// Local elements below which only the widest cut of a parameter is tried: all its states are below 20 MB.
const SMALL_PARAMETER: u64 = 1 << 20;

/// What one storage asks for, before anything is hidden.
struct StorageTimes {
    storage: Storage,
    gather: f64,
    every: f64,
    reduce: f64,
    spread: f64,
    update: f64,
    state: f64,
    parameter: f64,
    host: f64,
    gathered: f64,
}

impl StorageTimes {
    fn price(&self, until: Pass) -> StoragePrice {
        let Self { gather, every, reduce, spread, update, state, parameter, host, gathered, .. } = *self;
        let every = every + again(gather, until);
        let spans = Spans { gather, every, reduce, spread, update, ..Spans::default() };
        StoragePrice { spans, state, parameter, host, once: gathered }
    }
}

/// Local elements, the memory of the optimizer state, axes that hold the parameter whole, and those of its unfinished
/// gradient.
type StorageKey = (Parcel, StateHome, [AxisSet; 2]);

/// A parameter on a device, and what it is sent with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Parcel {
    /// Its elements.
    pub elements: u64,
    /// Elements of the piece in which it is sent: its own, or more where a layer sends several parameters as one.
    pub sent: u64,
}

impl Parcel {
    /// Its part of that piece.
    fn share(self) -> f64 {
        self.elements as f64 / self.sent.max(1) as f64
    }
}

/// Prices on one mesh.
pub struct Prices<'a> {
    machine: Machine<'a>,
    mesh: &'a Mesh,
    views: Vec<AxisView>,
    /// Shapes of what layers of other kinds pass on, which is cut like a layer's own.
    passed: Vec<Vec<u64>>,
    /// How gradients of parameters that are cut are kept, where that is said.
    gradients: Option<GradientsKind>,
    /// What holds for micro-batches of any size.
    pub(crate) memo: Memo,
    /// Tensors already converted.
    sent: Mutex<Vec<Sent>>,
    /// Edges of choice problems already priced.
    pub(crate) tables: Mutex<Vec<meeting::Known>>,
}

/// What was asked on a mesh already, whatever the micro-batch.
#[derive(Default)]
pub(crate) struct Memo {
    routes: Mutex<Routes>,
    groups: Mutex<BTreeMap<AxisSet, Group>>,
    /// Collectives, by what they are, their axes and the bits of their bytes.
    collectives: Mutex<BTreeMap<(CollectiveKind, AxisSet, u64), f64>>,
    storages: Mutex<BTreeMap<StorageKey, Vec<StorageTimes>>>,
}

impl<'a> Prices<'a> {
    /// Prices on a mesh whose first rank starts a domain of every tier it fills, and what its axes may do.
    pub fn new(machine: Machine<'a>, mesh: &'a Mesh, rules: &[AxisRule]) -> Self {
        let node = machine.cluster.n_close();
        let view = |axis: AxisId| {
            let extent = mesh.stride(axis) * mesh.size(axis);
            let reach = if extent <= node { Reach::Node } else { Reach::Network };
            let rule = rules.get(axis.0).copied().unwrap_or(AxisRule::Free);
            AxisView { reach, rule, barred: Barred::default() }
        };
        let views = mesh.axis_ids().map(view).collect();
        Self {
            machine,
            mesh,
            views,
            passed: Vec::new(),
            gradients: None,
            memo: Memo::default(),
            sent: Mutex::default(),
            tables: Mutex::default(),
        }
    }

    /// The same where axes may not do everything that their rules allow.
    pub fn barred(mut self, barred: &[Barred]) -> Self {
        for (view, barred) in self.views.iter_mut().zip(barred) {
            view.barred = *barred;
        }
        self
    }

    /// The same where one sharding must suit all that layers of a model pass on.
    pub(crate) fn passing(self, passed: Vec<Vec<u64>>) -> Self {
        Self { passed, ..self }
    }

    /// The same where it is said how gradients of parameters that are cut are kept. Whole ones take as many bytes as
    /// that saves sends: whole parameters with cut gradients take fewer, and send no more, so that only who is told to
    /// has them.
    pub(crate) fn keeping(self, gradients: Option<GradientsKind>) -> Self {
        Self { gradients, ..self }
    }

    /// Shapes of what layers of any kind pass on.
    pub(crate) fn passed(&self) -> &[Vec<u64>] {
        &self.passed
    }

    /// The mesh.
    pub fn mesh(&self) -> &'a Mesh {
        self.mesh
    }

    /// The machine.
    pub fn machine(&self) -> &Machine<'a> {
        &self.machine
    }

    /// The axes as the space sees them.
    pub fn views(&self) -> &[AxisView] {
        &self.views
    }

    /// Seconds of an operator's pass.
    pub fn op(&self, layer: &Layer, op: &Op, sig: &Signature, at: (Strategy, &Sizes, Pass)) -> OpTime {
        let (strategy, sizes, pass) = at;
        let local = local_lengths(sig, strategy, self.mesh, sizes);
        let work = op_work((layer, op, sig), &local, sizes, pass, &self.machine.kernels);
        self.op_time((sig, strategy), (&local, pass), &work)
    }

    /// Seconds that a device waits in an operator's forward where the host has no lead over it: its kernels are
    /// launched when it is to run.
    pub fn waits(&self, layer: &Layer, op: &Op, sig: &Signature, at: (Strategy, &Sizes)) -> f64 {
        let (strategy, sizes) = at;
        let Machine { constants, precision, kernels, .. } = &self.machine;
        let local = local_lengths(sig, strategy, self.mesh, sizes);
        let work = op_work((layer, op, sig), &local, sizes, Pass::Forward, kernels);
        let runs = Seconds(work.iter().map(|one| self.work(one)).sum());
        let experts = constants.engine.experts;
        let n_casts = expert_launches::n_casts(layer, experts, *precision);
        let n_kernels = expert_launches::kernels(&work, experts, n_casts);
        expert_launches::waits(n_kernels, runs, constants).0
    }

    /// Seconds of an operator's backward, as far as its operands get gradients.
    pub fn backward(
        &self,
        layer: &Layer,
        op: &Op,
        sig: &Signature,
        (strategy, sizes, gets): (Strategy, &Sizes, &[bool]),
    ) -> OpTime {
        let local = local_lengths(sig, strategy, self.mesh, sizes);
        let work = backward_work((layer, op, sig), &local, sizes, &self.machine.kernels, gets);
        self.op_time((sig, strategy), (&local, Pass::Backward), &work)
    }

    fn op_time(&self, (sig, strategy): (&Signature, Strategy), at: (&[f64], Pass), work: &[Work]) -> OpTime {
        let mut time = OpTime::default();
        for one in work {
            let seconds = self.work(one);
            time.total += seconds;
            time.products.add(one, Seconds(seconds));
        }
        OpTime { total: time.total + self.ring(sig, strategy, at, time.total), ..time }
    }

    /// What a ring adds to attention over all keys.
    fn ring(
        &self,
        sig: &Signature,
        strategy: Strategy,
        (local, pass): (&[f64], Pass),
        attention: f64,
    ) -> f64 {
        let axes = strategy.ring_axes();
        if axes.is_empty() {
            return 0.0;
        }
        let group = self.group(&axes);
        let sizes = RingSizes::new(sig, local, group.n_members(), self.machine.kernels.element_bytes);
        let compute = (Seconds(attention), Seconds(self.work(&sizes.merge(pass))));
        let time = ring_time(sizes, pass, compute, &group, (self.machine.cluster, self.machine.constants));
        (time.merging + time.exposed).0
    }

    fn work(&self, work: &Work) -> f64 {
        work_time(work, self.machine.device, self.machine.precision, self.machine.constants).0
    }

    /// Seconds of the conversions of a tensor of `shape`, of which a fraction `filled` is moved, as its tokens are
    /// routed, from every sharding of one list to every one of another.
    pub fn conversions(
        &self,
        (shape, filled, routing): (&[u64], f64, Option<Routing>),
        from: &[Sharding],
        to: &[Sharding],
    ) -> Conversions {
        let mut routes = lock(&self.memo.routes);
        let lists = [from, to].map(|list| routes.numbers(list));
        let mut all = lock(&self.sent);
        let sent = Sent::of(&mut all, (shape, filled, routing));
        Conversions::new(lists, (&mut routes, sent), self)
    }

    /// What an exchange of a tensor's tokens may hide behind.
    pub fn cover(&self, (layer, sizes): (&Layer, &Sizes), routing: Option<Routing>) -> Seconds {
        let Machine { kernels, constants, .. } = &self.machine;
        if routing.is_none() || constants.engine.exchange_overlap.is_absent() {
            return Seconds::ZERO;
        }
        cover((layer, sizes), self.mesh, kernels, |work| Seconds(self.work(work)))
    }

    /// Seconds that show of a conversion, of a value or of a gradient, between products, or of tokens behind what
    /// covers them.
    pub fn shows(&self, conversion: Conversion, side: Side, beside: Beside, cover: Seconds) -> f64 {
        let Machine { tensor_overlap, constants, .. } = &self.machine;
        let Conversion { gather, scatter, reduce, exchange, other } = conversion;
        if gather + scatter + reduce + exchange + other == 0.0 {
            return 0.0;
        }
        let other = other + shown(Seconds(exchange), cover, constants).0.0;
        if gather + scatter + reduce == 0.0 {
            return other;
        }
        let of = |total: f64, kind: CollectiveKind| match total > 0.0 {
            true => exposed(Seconds(total), (kind, side), beside, *tensor_overlap, constants).0,
            false => 0.0,
        };
        of(gather, CollectiveKind::AllGather)
            + of(scatter, CollectiveKind::ReduceScatter)
            + of(reduce, CollectiveKind::AllReduce)
            + other
    }

    /// Seconds of one step of a conversion.
    pub fn step(&self, step: &Step, shape: &[u64], element_bytes: f64) -> f64 {
        let Step { kind, before, after, .. } = *step;
        let Some(collective) = kind.collective() else { return 0.0 };
        let full = whole(collective, before, after).local_elements(self.mesh, shape) as f64 * element_bytes;
        self.collective(collective, AxisSet::of(&step.axes), full)
    }

    fn collective(&self, kind: CollectiveKind, axes: AxisSet, full: f64) -> f64 {
        let time = || {
            let mut groups = lock(&self.memo.groups);
            let group = groups.entry(axes).or_insert_with(|| self.group(&axes.axes()));
            price(kind, Bytes(full), group, self.machine.cluster, self.machine.constants).0
        };
        *lock(&self.memo.collectives).entry((kind, axes, full.to_bits())).or_insert_with(time)
    }

    /// Seconds in which a parameter is sent, its part of the piece with which it is.
    fn sent(&self, parcel: Parcel, steps: &[Step], element: Bytes) -> f64 {
        let whole: f64 = steps.iter().map(|step| self.step(step, &[parcel.sent], element.0)).sum();
        whole * parcel.share()
    }

    /// Seconds in which a new parameter reaches those who use it, as the engine sends it.
    fn spread(&self, parcel: Parcel, steps: &[Step], element: Bytes) -> f64 {
        let Machine { cluster, constants, .. } = &self.machine;
        match constants.engine.parameter_spread {
            ParameterSpread::Gathered => self.sent(parcel, steps, element),
            ParameterSpread::Broadcast => {
                let whole = element * parcel.sent as f64;
                let one = |step: &Step| broadcasts(1, whole, &self.group(&step.axes), cluster, constants).0;
                steps.iter().map(one).sum::<f64>() * parcel.share()
            }
        }
    }

    fn group(&self, axes: &[AxisId]) -> Group {
        let one = |&axis: &AxisId| GroupAxis { stride: self.mesh.stride(axis), size: self.mesh.size(axis) };
        let axes: Vec<GroupAxis> = axes.iter().rev().map(one).collect();
        Group::from_axes(&axes, self.machine.cluster).at(self.machine.home)
    }

    /// Storages of a parameter that an operator uses in a sharding until one of the passes, with the optimizer state in
    /// one of the memories, each with its price; the plain one first.
    pub fn storages(
        &self,
        (parcel, home): (Parcel, StateHome),
        (used, until): (Sharding, Pass),
        gradient: Sharding,
    ) -> Vec<(Storage, StoragePrice)> {
        let whole = whole_axes(self.mesh, used);
        let unfinished = AxisSet::of(&gradient.partial_axes());
        let mut known = lock(&self.memo.storages);
        let times = known
            .entry((parcel, home, [whole, unfinished]))
            .or_insert_with(|| self.all_storage_times((parcel, home), whole, unfinished));
        times.iter().map(|one| (one.storage, one.price(until))).collect()
    }

    /// Storages of a frozen parameter that is read until one of the passes, each with its price; the plain one first.
    /// It is gathered before the operator, and before its backward if that reads it; nothing else is ever sent or
    /// updated.
    pub fn frozen_storages(
        &self,
        parcel: Parcel,
        (used, until): (Sharding, Pass),
    ) -> Vec<(Storage, StoragePrice)> {
        let element = StateBytes::adamw(self.machine.precision, GradientFormat::Full).parameter;
        let elements = parcel.elements;
        let price = |cut: AxisSet| {
            let gather = self.sent(parcel, &flat_steps(AxisSet::EMPTY, cut, AxisSet::EMPTY)?, element);
            let spans = Spans { gather, every: again(gather, until), ..Spans::default() };
            let whole = elements as f64 * element.0;
            let state = whole / self.parts(cut);
            let once = gathered(cut, (Bytes(whole), Bytes::ZERO));
            Some((Storage::frozen(cut), StoragePrice { spans, state, parameter: state, host: 0.0, once }))
        };
        let cuts = self.cuts(elements, whole_axes(self.mesh, used));
        let cuts = cuts.into_iter().filter(|cut| self.is_crossed_at_any_time(*cut));
        std::iter::once(AxisSet::EMPTY).chain(cuts).filter_map(price).collect()
    }

    /// Axes along which states may be cut, of those that hold a parameter whole.
    pub fn shardable(&self, whole: AxisSet) -> AxisSet {
        let may = |axis: &AxisId| self.views[axis.0].rule != AxisRule::Replicas;
        AxisSet::of(&whole.axes().into_iter().filter(may).collect::<Vec<AxisId>>())
    }

    /// Whether all axes of a cut may be crossed within a micro-batch, and not only once per step.
    pub(crate) fn is_crossed_at_any_time(&self, cut: AxisSet) -> bool {
        cut.axes().iter().all(|axis| self.views[axis.0].rule != AxisRule::Shares)
    }

    /// Ways to cut a parameter between uses over axes that hold it whole: all of them, those of a node, one.
    fn cuts(&self, elements: u64, whole: AxisSet) -> Vec<AxisSet> {
        let whole = self.shardable(whole);
        let near = |axis: &AxisId| self.views[axis.0].reach == Reach::Node;
        let node: Vec<AxisId> = whole.axes().into_iter().filter(near).collect();
        let mut cuts = vec![whole, AxisSet::of(&node)];
        cuts.extend(whole.axes().into_iter().map(|axis| AxisSet::of(&[axis])));
        if elements < SMALL_PARAMETER {
            cuts.truncate(1);
        }
        let mut seen: Vec<AxisSet> = Vec::new();
        for cut in cuts.into_iter().filter(|cut| !cut.is_empty()) {
            if !seen.contains(&cut) {
                seen.push(cut);
            }
        }
        seen
    }

    fn all_storage_times(
        &self,
        (parcel, home): (Parcel, StateHome),
        whole: AxisSet,
        unfinished: AxisSet,
    ) -> Vec<StorageTimes> {
        let mut storages = vec![Storage::default()];
        for cut in self.cuts(parcel.elements, whole) {
            let none = AxisSet::EMPTY;
            storages.push(Storage::on_device(none, none, cut));
            if self.is_crossed_at_any_time(cut) {
                storages.push(Storage::on_device(none, cut, cut));
                storages.push(Storage::on_device(cut, cut, cut));
                if self.gradients == Some(GradientsKind::Whole) {
                    storages.push(Storage::on_device(cut, none, cut));
                }
            }
        }
        let there = storages.into_iter().map(|storage| Storage { home, ..storage });
        there.filter_map(|storage| self.storage_times(parcel, storage, unfinished)).collect()
    }

    fn parts(&self, cut: AxisSet) -> f64 {
        cut.axes().iter().map(|&axis| self.mesh.size(axis) as f64).product()
    }

    /// What a device gets of its host.
    pub(crate) fn host_share(&self) -> HostShare {
        HostShare::of(self.machine.device, self.machine.cluster, self.machine.constants)
    }

    /// Seconds of everything that one storage of `elements` local elements asks for, shown in full, and its bytes.
    fn storage_times(&self, parcel: Parcel, storage: Storage, unfinished: AxisSet) -> Option<StorageTimes> {
        let bytes = StateBytes::adamw(self.machine.precision, self.machine.gradients);
        let flat = |list: &[Step], element: Bytes| self.sent(parcel, list, element);
        let none = AxisSet::EMPTY;
        let rest = AxisSet(unfinished.0 & !storage.gradient.0);
        let every = if storage.gradient.is_empty() {
            0.0
        } else {
            flat(&partial_cut(unfinished, none, storage.gradient, rest)?, bytes.gradient)
        };
        let local = parcel.elements as f64;
        let updated = local / self.parts(storage.optimizer);
        // A parameter that is cut like its optimizer state is that state's own fp32 copy.
        let copy = if doubles_as_master(storage, bytes) {
            0.0
        } else {
            bytes.parameter.0 / self.parts(storage.parameter)
        };
        let (optimizer, update) = match storage.home {
            StateHome::Device => {
                // One pass over all that a layer has in one piece, of which this is a share.
                let together = parcel.sent as f64 / self.parts(storage.optimizer);
                let Machine { device, precision, constants, .. } = self.machine;
                let pass = update_time(together, bytes, &Rates::new(device, precision, constants), constants);
                (bytes.optimizer().0 / self.parts(storage.optimizer), pass.0 * parcel.share())
            }
            home @ (StateHome::Host | StateHome::Nvme) => {
                (0.0, HostUpdate::at(home, updated, bytes, self.host_share()).total().0)
            }
        };
        let host = match storage.home {
            StateHome::Device => Bytes::ZERO,
            StateHome::Host => host_bytes(bytes) * updated,
            StateHome::Nvme => gradient_bytes(bytes) * updated,
        };
        let state = copy + bytes.gradient.0 / self.parts(storage.gradient) + optimizer;
        Some(StorageTimes {
            storage,
            gather: flat(&flat_steps(none, storage.parameter, none)?, bytes.parameter),
            every,
            reduce: flat(&flat_steps(rest, storage.gradient, storage.optimizer)?, bytes.gradient),
            spread: self.spread(
                parcel,
                &flat_steps(none, storage.optimizer, storage.parameter)?,
                bytes.parameter,
            ),
            update,
            state: local * state,
            parameter: local * copy,
            host: host.0,
            gathered: gathered(storage.parameter, (bytes.parameter * local, bytes.gradient * local)),
        })
    }
}

impl Sends for Prices<'_> {
    fn mesh(&self) -> &Mesh {
        self.mesh
    }

    fn element_bytes(&self) -> f64 {
        self.machine.kernels.element_bytes
    }

    fn collective(&self, hop: &Hop, bytes: f64) -> f64 {
        self.collective(hop.collective, hop.change.axes, bytes)
    }

    fn exchange(&self, hop: &Hop, routing: Routing, bytes: f64) -> Option<f64> {
        let Change { kind, axes, before, after } = hop.change;
        let worlds = (self.machine.cluster, self.machine.constants);
        let group = || self.group(&axes.axes());
        let choice = exchange(routing, (kind, before, after), (Bytes(bytes), self.mesh), group, worlds)?;
        Some(choice.time.0)
    }
}

/// Seconds in which backward gathers again what forward did, if it reads it: it does not read the table of an
/// embedding.
fn again(gather: f64, until: Pass) -> f64 {
    match until {
        Pass::Forward => 0.0,
        Pass::Backward => gather,
    }
}

/// Bytes of a parameter and of its gradient that a stage has once for all its layers where the parameter is cut.
fn gathered(cut: AxisSet, (parameters, gradient): (Bytes, Bytes)) -> f64 {
    let unit = GatheredUnit { parameters, gradient, count: if cut.is_empty() { 0.0 } else { 2.0 } };
    gathered_units(std::iter::once(unit)).0
}

/// Local elements of a parameter in the sharding of its use.
pub fn local_parameter(layer: &Layer, tensor: TensorId, mesh: &Mesh, sizes: &Sizes, used: Sharding) -> u64 {
    used.local_elements(mesh, &layer.shape(tensor, sizes))
}
