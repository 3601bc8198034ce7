//! What every price of a job stands on: the machines, the job, the bytes a device has; and the price of one layer.

use std::collections::BTreeSet;

use cost_model::memory::{
    Owned, StateBytes, copied_buckets, copied_gradients, copied_tensors, reserve_bytes,
};
use cost_model::program_memory::{MemoryContext, ProgramMemory, carried_bytes, owed_bytes, program_memory};
use cost_model::rates::element_bytes;
use cost_model::{
    Constants, PriceContext, ProgramPrice, Rates, RowPrice, SectionPrice, SplitPrice, algorithms,
    price_events, price_program, price_split,
};
use ir::cluster::{Cluster, Device, DeviceGroup, Precision};
use ir::collective::Rule;
use ir::engine::Recomputation;
use ir::graph::{Layer, Model, OpId, Sizes, TensorId};
use ir::lower::LayerChoice;
use ir::mesh::Mesh;
use ir::op_work::KernelChoice;
use ir::program::{Program, Update};
use ir::slices::Slices;
use ir::split::split_backward;
use ir::token_order::TokenOrder;
use ir::units::{Bytes, BytesPerSecond, Seconds};

use crate::prices::Machine;
use crate::request::Job;

/// Communicators of a rank that take buffers: data, tensor, pipeline and expert parallel ones.
const N_COMMUNICATORS: u32 = 4;

/// The machines and the job.
#[derive(Clone, Debug)]
pub struct Setting<'a> {
    /// Prices' view of the machines: the slowest device.
    pub machine: Machine<'a>,
    /// Which of the kinds of machines under the stages these are, as [`Grounds`](crate::price::grounds::Grounds) number
    /// them.
    pub ground: usize,
    /// The job.
    pub job: Job,
    /// Bytes of the smallest device.
    pub memory: f64,
    /// Bytes of it that a plan may use.
    pub capacity: f64,
    /// How backward is run.
    pub backward: Backward,
    /// By which of two witnesses sections are timed.
    pub witness: Witness,
}

/// How it is found what a section shows of its communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Witness {
    /// By a closed form per collective: what prices are.
    ClosedForms,
    /// By events on a stream of computation and two links, where backward runs as one and sequences are whole;
    /// elsewhere as above.
    Events,
}

/// How backward is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backward {
    /// As one.
    Whole,
    /// In two parts, some of them perhaps one after the other.
    Parts,
}

/// Figures of a backward in two parts.
#[derive(Clone, Debug)]
pub struct SplitFigures {
    /// Times of both parts.
    pub price: SplitPrice,
    /// Bytes carried from one to the other, per micro-batch.
    pub carried: Bytes,
}

/// A choice for a layer kind with all its prices.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The layer kind.
    pub kind: usize,
    /// The machines that its figures are of, by their number among those under the stages.
    pub ground: usize,
    /// What was chosen.
    pub choice: LayerChoice,
    /// Times.
    pub price: ProgramPrice,
    /// Bytes.
    pub memory: ProgramMemory,
    /// Backward in two parts, where it is run so.
    pub split: Option<SplitFigures>,
    /// Forward and backward as events, where these are asked.
    pub events: Option<[RowPrice; 2]>,
    /// Operators that run a second time before their gradients.
    pub again: BTreeSet<OpId>,
    /// Parameters that other layers share: elements that one device updates.
    pub shared: Vec<(TensorId, f64)>,
    /// Elements of all parameters that one device updates.
    pub updated: f64,
    /// What a step asks for again and again, of the whole micro-batch.
    pub whole: SliceFigures,
    /// The same by slice, where sequences are cut: prices and bytes above are then sums over slices.
    pub slices: Vec<SliceFigures>,
}

/// Figures of a layer that an action computes.
struct Figures {
    price: ProgramPrice,
    memory: ProgramMemory,
    split: Option<SplitFigures>,
    events: Option<[RowPrice; 2]>,
}

/// Figures of one slice of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SliceFigures {
    /// Forward.
    pub forward: Seconds,
    /// Backward, whole or both parts.
    pub backward: Seconds,
    /// The two parts of backward, where it is run so.
    pub parts: [Seconds; 2],
    /// Bytes kept for backward.
    pub saved: Bytes,
    /// Bytes carried between the parts of backward.
    pub carried: Bytes,
    /// Bytes of gradients that its backward leaves for the slices before.
    pub owed: Bytes,
}

impl Entry {
    /// Sections of backward as they are run.
    pub fn backward(&self) -> Vec<&SectionPrice> {
        self.split
            .as_ref()
            .map_or(vec![&self.price.backward], |split| vec![&split.price.input, &split.price.weight])
    }

    /// Forward of one micro-batch.
    pub fn forward_seconds(&self) -> Seconds {
        self.whole.forward
    }

    /// Backward of one micro-batch, whole or both parts.
    pub fn backward_seconds(&self) -> Seconds {
        self.whole.backward
    }

    /// Bytes carried between the parts of backward, per micro-batch.
    pub fn carried(&self) -> Bytes {
        self.whole.carried
    }

    /// Figures of a slice; of the whole micro-batch where sequences are not cut.
    pub fn slice(&self, slice: usize) -> SliceFigures {
        self.slices.get(slice).copied().unwrap_or(self.whole)
    }
}

impl Figures {
    /// Sums of what an action computes and keeps.
    fn summed(&self) -> SliceFigures {
        let parts = self.split.as_ref().map(|split| [&split.price.input, &split.price.weight]);
        let parts = parts.map(|parts| parts.map(SectionPrice::seconds));
        let [forward, backward] = match self.events {
            Some(events) => events.map(|one| one.seconds),
            None => [&self.price.forward, &self.price.backward].map(SectionPrice::seconds),
        };
        SliceFigures {
            forward,
            backward: parts.map_or(backward, |parts| parts.into_iter().sum()),
            parts: parts.unwrap_or_default(),
            saved: self.memory.saved_total(),
            carried: self.split.as_ref().map_or(Bytes::ZERO, |split| split.carried),
            owed: Bytes::ZERO,
        }
    }
}

impl<'a> Setting<'a> {
    /// The machines as prices see them. `None` for a cluster without devices.
    pub fn new(cluster: &'a Cluster, job: Job, constants: &'a Constants) -> Option<Self> {
        let precision = job.precision;
        let (device, memory) = weakest(&cluster.groups, precision, constants)?;
        let link = cluster.tiers.first().map_or(BytesPerSecond(0.0), |tier| tier.bandwidth_bytes_per_s);
        let own = reserve_bytes(N_COMMUNICATORS, link, constants).0;
        let kernels =
            KernelChoice::of(&job.engine, (job.attention, job.token_order), element_bytes(precision).0);
        Some(Self {
            machine: Machine {
                cluster,
                device,
                home: None,
                constants,
                precision,
                kernels,
                gradients: job.engine.gradients,
                tensor_overlap: job.engine.tensor_overlap,
            },
            ground: 0,
            job,
            memory,
            capacity: memory - own.max(cluster.reserve_bytes.0),
            backward: Backward::Whole,
            witness: Witness::ClosedForms,
        })
    }

    /// The same on other machines: the slowest device and the smallest memory among some groups of the cluster, and the
    /// links of one where it is alone.
    pub(crate) fn among(&self, groups: &'a [DeviceGroup]) -> Self {
        let machine = &self.machine;
        let home = self.home_of(groups);
        let Some((device, memory)) = weakest(groups, machine.precision, machine.constants) else {
            return self.clone();
        };
        Self {
            machine: Machine { device, home, ..machine.clone() },
            memory,
            capacity: memory - self.reserve(),
            ..self.clone()
        }
    }

    /// The group on whose own links some groups of the cluster are: where there is one, and it has such.
    pub(crate) fn home_of(&self, groups: &[DeviceGroup]) -> Option<usize> {
        match groups {
            [one] if !one.links.is_empty() => {
                self.machine.cluster.groups.iter().position(|group| std::ptr::eq(group, one))
            }
            _ => None,
        }
    }

    /// What the device sustains in matrix products, in FLOP/s.
    pub(crate) fn rate(&self) -> f64 {
        let machine = &self.machine;
        Rates::new(machine.device, machine.precision, machine.constants).gemm.0
    }

    /// Bytes of a device that no plan may use.
    pub fn reserve(&self) -> f64 {
        self.memory - self.capacity
    }

    /// Parameters of a layer on a device, and those of them that the device updates: what a host updates is copied
    /// there.
    pub(crate) fn owned(&self, entry: &Entry) -> Owned {
        let updated = if entry.memory.host > Bytes::ZERO { 0.0 } else { entry.updated };
        Owned {
            local: entry.memory.gradients / self.states().gradient,
            updated,
            largest: entry.memory.largest_gradient,
        }
    }

    /// Gradients of a layer that the optimizer copies.
    pub(crate) fn copied_gradients(&self, entry: &Entry) -> Bytes {
        let Owned { local, updated, .. } = self.owned(entry);
        let constants = self.machine.constants;
        copied_gradients(self.job.engine.copies, (local, updated), self.job.precision, constants)
    }

    /// Copies of a layer's largest gradient, once for all such layers.
    pub(crate) fn copied_tensors(&self, entry: &Entry) -> Bytes {
        let Owned { updated, largest, .. } = self.owned(entry);
        let largest = if updated > 0.0 { largest } else { 0.0 };
        let of = (largest, updated);
        copied_tensors(self.job.engine.copies, of, self.job.precision, self.machine.constants)
    }

    /// Buckets that the optimizer copies through, at most.
    pub(crate) fn copied_buckets(&self) -> Bytes {
        copied_buckets(self.job.engine.copies, self.job.precision, self.machine.constants)
    }

    /// Bytes of one parameter's states.
    pub fn states(&self) -> StateBytes {
        StateBytes::adamw(self.machine.precision, self.job.engine.gradients)
    }

    /// Prices the program of a choice for a layer kind.
    pub fn entry(
        &self,
        model: &Model,
        (kind, choice): (usize, LayerChoice),
        (mesh, sizes): (&Mesh, &Sizes),
        program: &Program,
    ) -> Entry {
        let layer = &model.layers[kind];
        let figures = self.figures(layer, (mesh, sizes), program);
        let whole = figures.summed();
        let Figures { price, memory, split, events } = figures;
        let updated = |update: &Update| updated_elements(layer, (mesh, sizes), update);
        Entry {
            split,
            events,
            updated: program.own_updates().map(updated).sum(),
            kind,
            ground: self.ground,
            choice,
            price,
            memory,
            again: self.runs_again(layer, program),
            shared: shared(model, kind, (mesh, sizes), program),
            whole,
            slices: Vec::new(),
        }
    }

    /// Operators that an engine runs a second time: all, in one that runs all of forward again wherever it runs a
    /// product again.
    fn runs_again(&self, layer: &Layer, program: &Program) -> BTreeSet<OpId> {
        match self.machine.constants.engine.recomputation {
            Recomputation::Whole if program.runs_products_again(layer) => layer.op_ids().collect(),
            Recomputation::Needed | Recomputation::Whole => program.runs_again().collect(),
        }
    }

    /// Prices an entry whose layer runs slice by slice: `program` is that of the sliced layer, and of every slice.
    pub fn sliced(
        &self,
        whole: &Entry,
        (layer, program): (&Layer, &Program),
        (mesh, micro_batch): (&Mesh, u64),
        slices: &Slices,
    ) -> Entry {
        // In their natural order the tokens of a slice are the last that attention has seen.
        let kernels = KernelChoice { token_order: TokenOrder::Natural, ..self.machine.kernels };
        let machine = Machine { kernels, ..self.machine.clone() };
        let natural = Self { machine, witness: Witness::ClosedForms, ..self.clone() };
        let sizes: Vec<Sizes> =
            (0..slices.n()).map(|slice| slices.sizes(layer, micro_batch, slice)).collect();
        let all: Vec<Figures> =
            sizes.iter().map(|sizes| natural.figures(layer, (mesh, sizes), program)).collect();
        let of_slice = |(slice, (figures, sizes)): (u32, (&Figures, &Sizes))| {
            let range = slices.range(slice);
            let owed = owed_bytes((&natural.bytes(), layer, mesh, sizes), program, &range);
            SliceFigures { owed, ..figures.summed() }
        };
        let split = all.iter().map(|one| one.split.clone()).collect::<Option<Vec<_>>>();
        let together = Figures {
            price: ProgramPrice {
                forward: SectionPrice::sum(all.iter().map(|one| &one.price.forward)),
                backward: SectionPrice::sum(all.iter().map(|one| &one.price.backward)),
                update: whole.price.update.clone(),
            },
            memory: ProgramMemory::of_slices(&all.iter().map(|one| one.memory.clone()).collect::<Vec<_>>()),
            split: split.map(|parts| SplitFigures {
                price: SplitPrice {
                    input: SectionPrice::sum(parts.iter().map(|one| &one.price.input)),
                    weight: SectionPrice::sum(parts.iter().map(|one| &one.price.weight)),
                },
                carried: parts.iter().map(|one| one.carried).sum(),
            }),
            events: None,
        };
        let summed = together.summed();
        let Figures { price, memory, split, events } = together;
        let slices = (0..).zip(all.iter().zip(&sizes)).map(of_slice).collect();
        Entry { price, memory, split, events, whole: summed, slices, ..whole.clone() }
    }

    fn bytes(&self) -> MemoryContext<'_> {
        let machine = &self.machine;
        MemoryContext {
            precision: machine.precision,
            engine: self.job.engine,
            kernels: machine.kernels,
            constants: machine.constants,
        }
    }

    fn figures(&self, layer: &Layer, (mesh, sizes): (&Mesh, &Sizes), program: &Program) -> Figures {
        let (times, bytes) = (self.times(), self.bytes());
        let split = (self.backward == Backward::Parts).then(|| {
            let split = split_backward(layer, program);
            SplitFigures {
                price: price_split((&times, layer, mesh, sizes), program, &split),
                carried: carried_bytes((&bytes, layer, mesh, sizes), program, &split),
            }
        });
        let events = (self.witness == Witness::Events && self.backward == Backward::Whole)
            .then(|| price_events(&times, layer, mesh, sizes, program));
        Figures {
            split,
            events,
            price: price_program(&times, layer, mesh, sizes, program),
            memory: program_memory(&bytes, layer, mesh, sizes, program),
        }
    }

    /// The algorithms of a program's collectives: those that its times are of.
    pub fn algorithms(&self, layer: &Layer, (mesh, sizes): (&Mesh, &Sizes), program: &Program) -> Vec<Rule> {
        algorithms(&self.times(), layer, mesh, sizes, program)
    }

    fn times(&self) -> PriceContext<'_> {
        let machine = &self.machine;
        PriceContext {
            cluster: machine.cluster,
            device: machine.device,
            precision: machine.precision,
            gradients: self.job.engine.gradients,
            constants: machine.constants,
            kernels: machine.kernels,
            tensor_overlap: self.job.engine.tensor_overlap,
            rank_offset: 0,
            home: machine.home,
        }
    }

    /// Bytes of `elements` of an activation.
    pub fn activation(&self, elements: f64) -> Bytes {
        Bytes(elements * self.machine.kernels.element_bytes)
    }
}

/// The slowest device of some groups, and the bytes of the smallest. `None` where there are none.
fn weakest<'a>(
    groups: &'a [DeviceGroup],
    precision: Precision,
    constants: &Constants,
) -> Option<(&'a Device, f64)> {
    let rate = |device: &Device| Rates::new(device, precision, constants).gemm.0;
    let devices = || groups.iter().map(|group| &group.device);
    let device = devices().min_by(|a, b| rate(a).total_cmp(&rate(b)))?;
    let memory = devices().map(|device| device.memory_bytes.0).min_by(f64::total_cmp)?;
    Some((device, memory))
}

fn shared(
    model: &Model,
    kind: usize,
    (mesh, sizes): (&Mesh, &Sizes),
    program: &Program,
) -> Vec<(TensorId, f64)> {
    let sides = || model.ties.iter().flat_map(|tie| [tie.owner, tie.copy]);
    let is_shared = |update: &&Update| sides().any(|side| side.layer == kind && side.tensor == update.tensor);
    let layer = &model.layers[kind];
    let updates = program.own_updates().filter(is_shared);
    updates.map(|update| (update.tensor, updated_elements(layer, (mesh, sizes), update))).collect()
}

/// Elements of a parameter that the device with the most of them updates.
fn updated_elements(layer: &Layer, (mesh, sizes): (&Mesh, &Sizes), update: &Update) -> f64 {
    let local = update.used.local_elements(mesh, &layer.shape(update.tensor, sizes));
    let parts: u64 = update.storage.optimizer.axes().into_iter().map(|axis| mesh.size(axis)).product();
    local.div_ceil(parts.max(1)) as f64
}
