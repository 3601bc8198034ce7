//! One candidate: a mesh for every stage, a number of stages, a micro-batch. How fast it could be, and how fast it is.
//!
//! `bound` asks only for the fastest choice of each layer kind, whatever memory it takes. `evaluate` fills menus, cuts
//! the model into stages for each number of virtual stages, checks memory, and simulates the schedule.

use std::collections::BTreeMap;

use cost_model::memory::{GradientFormat, LossKernel};
use cost_model::overlap::{gradient_reduction_exposed, jitter, parameter_gather_exposed};
use cost_model::program_memory::{MemoryContext, ProgramMemory, program_memory};
use cost_model::{Constants, PipelineTimes, Transfers, simulate};
use cost_model::{PriceContext, ProgramPrice, price_program};
use ir::graph::{Model, Sizes, TensorId};
use ir::lower::{LayerChoice, lower, whole_axes};
use ir::op_work::KernelChoice;
use ir::program::{AxisSet, Program, Storage};
use ir::schedule::{Schedule, peak_in_flight, table};
use ir::sharding::Sharding;
use ir::units::{Bytes, Seconds};

use crate::layer_problem::{Clock, Given, LayerProblem, RecomputeRule, StorageRule};
use crate::menu::{MEMORY_PRICES, fastest};
use crate::partition::{Chunk, LayerCost, Levels};
use crate::prices::{Machine, Prices};
use crate::request::{Pins, RecomputeKind, Request, ScheduleKind};
use crate::shapes::{Shape, divisors};
use crate::solve::Prepared;

/// Everything that all candidates share.
pub struct Scope<'a> {
    /// The question.
    pub request: &'a Request,
    /// Constants of the cost model.
    pub constants: &'a Constants,
    /// Prices' view of the machines.
    pub machine: Machine<'a>,
    /// Smallest device memory less the reserve.
    pub capacity: f64,
    /// Layers of each kind.
    pub counts: Vec<u64>,
}

/// A mesh, a number of stages, a micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Mesh of every stage and its rules.
    pub shape: Shape,
    /// Pipeline stages.
    pub n_stages: u64,
    /// Sequences of a micro-batch over the mesh.
    pub micro_batch: u64,
    /// Micro-batches of a step.
    pub n_micro_batches: u64,
}

/// What is known of a candidate before it is worked out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// It is not faster than this.
    pub time: Seconds,
    /// Time of the layers alone, were every stage busy all the time.
    pub work: f64,
    /// Bytes that the fastest choices take on a device, reserve apart, over what there is.
    pub crowding: f64,
    /// Sharding of the stream in the kind of layer that takes most of the time.
    pub stream: Sharding,
    /// What memory is worth there.
    pub seconds_per_byte: f64,
}

/// A choice for a layer kind with all its prices.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The layer kind.
    pub kind: usize,
    /// What was chosen.
    pub choice: LayerChoice,
    /// Times.
    pub price: ProgramPrice,
    /// Bytes.
    pub memory: ProgramMemory,
}

/// Use and storage that tied parameters of a layer kind must have.
type TiedUses = BTreeMap<TensorId, (Sharding, Storage)>;

/// The choices tried so far for every layer kind, with their figures.
#[derive(Default)]
struct Shelf {
    /// Per kind, distinct choices.
    entries: Vec<Vec<Entry>>,
    /// Per kind and price of memory, which choice.
    levels: Vec<Vec<usize>>,
}

/// A candidate worked out: stages, schedule, figures.
#[derive(Clone, Debug)]
pub struct Arranged {
    /// What it was made from.
    pub candidate: Candidate,
    /// Order of micro-batches.
    pub schedule: Schedule,
    /// Entries in use.
    pub entries: Vec<Entry>,
    /// Per chunk, runs of (entry, count).
    pub chunks: Vec<Vec<(usize, u64)>>,
    /// Whole step.
    pub step_time: Seconds,
    /// Parts of the step.
    pub parts: StepParts,
    /// Micro-batches in flight at the peak, per stage, in whole stages.
    pub in_flight: Vec<f64>,
}

/// Where the time of a step goes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepParts {
    /// The pipeline, fill and drain included.
    pub pipeline: Seconds,
    /// Idle time of the busiest stage in it.
    pub bubble: Seconds,
    /// Stage that sets the pace.
    pub slowest_stage: usize,
    /// Gradient reduction that shows.
    pub gradient_sync: Seconds,
    /// Parameter gather that shows.
    pub parameter_gather: Seconds,
    /// Optimizer.
    pub optimizer: Seconds,
    /// Host.
    pub host: Seconds,
    /// Stragglers.
    pub jitter: Seconds,
}

/// Why a candidate came to nothing.
#[derive(Clone, Debug, PartialEq)]
pub enum Dropped {
    /// Some layer has no legal strategy there.
    NoStrategy,
    /// The least memory it can do with is too much: the stage, its largest category, and what it needs.
    Memory {
        /// Stage that overflows.
        stage: usize,
        /// Largest category.
        term: &'static str,
        /// What the stage needs, reserve apart.
        needed: f64,
    },
}

impl<'a> Scope<'a> {
    /// Prepares a request. `None` for a cluster without devices or tiers.
    pub fn new(request: &'a Request, constants: &'a Constants) -> Option<Self> {
        let cluster = &request.cluster;
        let precision = request.job.precision;
        let rate = |device: &ir::cluster::Device| cost_model::Rates::new(device, precision, constants).gemm.0;
        let device =
            cluster.groups.iter().map(|group| &group.device).min_by(|a, b| rate(a).total_cmp(&rate(b)))?;
        let smallest =
            cluster.groups.iter().map(|group| group.device.memory_bytes.0).min_by(f64::total_cmp)?;
        let own =
            constants.context_bytes.0 + constants.workspace_bytes.0 + 4.0 * constants.communicator_bytes.0;
        let element_bytes = cost_model::rates::element_bytes(precision).0;
        let kernels = KernelChoice { attention: request.job.attention, element_bytes };
        let mut counts = vec![0; request.model.layers.len()];
        for run in &request.model.sequence {
            counts[run.layer] += run.count;
        }
        Some(Self {
            request,
            constants,
            machine: Machine { cluster, device, constants, precision, kernels },
            capacity: smallest - own.max(cluster.reserve_bytes.0),
            counts,
        })
    }

    fn model(&self) -> &'a Model {
        &self.request.model
    }

    fn pins(&self) -> &'a Pins {
        &self.request.pins
    }

    fn sizes(&self, candidate: &Candidate) -> Vec<Sizes> {
        let sizes = |layer: &ir::graph::Layer| layer.sizes(candidate.micro_batch, self.request.job.sequence);
        self.model().layers.iter().map(sizes).collect()
    }

    fn given(&self) -> Given {
        let recompute = match self.pins().recompute {
            None => RecomputeRule::Free,
            Some(RecomputeKind::None) => RecomputeRule::Never,
            Some(RecomputeKind::Selective) => RecomputeRule::AttentionOnly,
            Some(RecomputeKind::Full) => RecomputeRule::Always,
        };
        let storage = match self.pins().zero {
            None => StorageRule::Free,
            Some(0) => StorageRule::Whole,
            Some(1) => StorageRule::Optimizer,
            Some(2) => StorageRule::Gradient,
            Some(_) => StorageRule::Parameter,
        };
        Given { stream: None, tied: BTreeMap::new(), recompute, storage }
    }

    /// What is given where memory is free: then nothing is gained by computing again.
    fn given_fastest(&self) -> Given {
        let given = self.given();
        let recompute = match given.recompute {
            RecomputeRule::Free => RecomputeRule::Never,
            pinned @ (RecomputeRule::Never | RecomputeRule::AttentionOnly | RecomputeRule::Always) => pinned,
        };
        Given { recompute, ..given }
    }

    /// Numbers of virtual stages worth trying.
    fn virtual_stages(&self, candidate: &Candidate) -> Vec<u32> {
        let (p, m) = (candidate.n_stages, candidate.n_micro_batches);
        let interleaves = p > 1 && m.is_multiple_of(p);
        let all = self.model().n_layers();
        let fits = |v: &u32| *v == 1 || (interleaves && p * u64::from(*v) <= all);
        let options: Vec<u32> = match (self.pins().vpp, self.pins().schedule) {
            (Some(v), _) => vec![v.max(1)],
            (None, Some(ScheduleKind::GPipe | ScheduleKind::OneFOneB)) => vec![1],
            (None, Some(ScheduleKind::Interleaved)) => vec![2, 3, 4, 6, 8],
            (None, None) => vec![1, 2, 3, 4, 6, 8],
        };
        options.into_iter().filter(fits).collect()
    }

    /// A time that the candidate cannot beat, but for what overlaps better between layers than inside them.
    pub fn bound(&self, candidate: &Candidate) -> Option<Bound> {
        let prices = Prices::new(self.machine.clone(), &candidate.shape.mesh, &candidate.shape.rules);
        let sizes = self.sizes(candidate);
        let clock = Self::clock(candidate);
        let layers = &self.model().layers;
        let (mut total, mut bytes) = (0.0, 0.0);
        let mut main: Option<(f64, Sharding, f64)> = None;
        for (kind, layer) in layers.iter().enumerate() {
            let problem = LayerProblem::new(layer, &sizes[kind], &prices, clock, &self.given_fastest())?;
            let (time, unit, choices) = fastest(&problem)?;
            let weight = time * self.counts[kind] as f64;
            total += weight;
            bytes += problem.problem.total(&choices)?.memory * self.counts[kind] as f64;
            let passes_stream = layer.stream_in.is_some() && !layer.tensors[layer.out.0].dims.is_empty();
            // The kind that takes most of the time decides in which sharding the stream passes everywhere.
            if passes_stream && main.is_none_or(|(most, ..)| weight > most) {
                main = Some((weight, problem.choice(&choices).stream, unit));
            }
        }
        let (_, stream, seconds_per_byte) = main?;
        let p = candidate.n_stages as f64;
        let work = total / p;
        let time = self.with_bubble(candidate, work)?;
        Some(Bound { time, work, crowding: bytes / p / self.capacity, stream, seconds_per_byte })
    }

    /// Least time of a step whose layers take `work` on every stage: fill and drain of the most virtual stages.
    ///
    /// `None` where no number of virtual stages is allowed.
    pub fn with_bubble(&self, candidate: &Candidate, work: f64) -> Option<Seconds> {
        let (m, p) = (candidate.n_micro_batches as f64, candidate.n_stages as f64);
        let v = f64::from(self.virtual_stages(candidate).into_iter().max()?);
        Some(Seconds(work * (1.0 + (p - 1.0) / (m * v))))
    }

    fn clock(candidate: &Candidate) -> Clock {
        let (m, p) = (candidate.n_micro_batches as f64, candidate.n_stages as f64);
        Clock { micro_batches: m, in_flight: p.min(m) }
    }

    /// Works a candidate out for every number of virtual stages; the fastest that fits.
    ///
    /// # Errors
    /// Why none does.
    pub fn evaluate(&self, candidate: &Candidate, bound: &Bound) -> Result<Arranged, Dropped> {
        let prices = Prices::new(self.machine.clone(), &candidate.shape.mesh, &candidate.shape.rules);
        let sizes = self.sizes(candidate);
        let mut shelf = Shelf::default();
        // Most candidates fit with the fastest choices or nearly so: dearer memory is asked about only when not.
        let fastest = self.problems((candidate, bound), &prices, &sizes, &self.given_fastest());
        let fastest = fastest.ok_or(Dropped::NoStrategy)?;
        let ready = prepare(&fastest);
        self.extend(&mut shelf, (&fastest, &ready), (candidate, &prices, &sizes), 0.0)
            .ok_or(Dropped::NoStrategy)?;
        if let (Some(found), true) = self.best_of(candidate, &shelf, &prices) {
            return Ok(found);
        }
        let free =
            self.problems((candidate, bound), &prices, &sizes, &self.given()).ok_or(Dropped::NoStrategy)?;
        let ready = prepare(&free);
        let mut best = None;
        for multiple in &MEMORY_PRICES[1..] {
            let price = multiple * bound.seconds_per_byte;
            self.extend(&mut shelf, (&free, &ready), (candidate, &prices, &sizes), price)
                .ok_or(Dropped::NoStrategy)?;
            let (found, all_fit) = self.best_of(candidate, &shelf, &prices);
            best = found;
            if all_fit {
                break;
            }
        }
        best.ok_or_else(|| self.overflow(candidate, &self.levels(&shelf)))
    }

    /// Adds the choices at the next price of memory to the shelf, and their figures.
    fn extend(
        &self,
        shelf: &mut Shelf,
        (problems, ready): (&[LayerProblem<'_>], &[Prepared<'_>]),
        (candidate, prices, sizes): (&Candidate, &Prices<'_>, &[Sizes]),
        price: f64,
    ) -> Option<()> {
        for (kind, (problem, ready)) in problems.iter().zip(ready).enumerate() {
            if shelf.entries.len() <= kind {
                shelf.entries.push(Vec::new());
                shelf.levels.push(Vec::new());
            }
            let (_, choices) = ready.eliminate(price)?;
            let choice = problem.choice(&choices);
            let known = shelf.entries[kind].iter().position(|entry| entry.choice == choice);
            let at = match known {
                Some(at) => at,
                None => {
                    let layer = &self.model().layers[kind];
                    let program = lower(layer, prices.mesh(), &sizes[kind], &choice).ok()?;
                    shelf.entries[kind].push(self.priced((candidate, &sizes[kind]), kind, choice, &program));
                    shelf.entries[kind].len() - 1
                }
            };
            shelf.levels[kind].push(at);
        }
        Some(())
    }

    fn levels(&self, shelf: &Shelf) -> Levels {
        let slack = self.constants.fragmentation_factor;
        let cost = |entry: &Entry| LayerCost {
            time: (entry.price.forward.seconds() + entry.price.backward.seconds()).0,
            state: entry.memory.states().0,
            saved: entry.memory.saved_total().0 * slack,
            working: (entry.memory.working() + entry.memory.logits).0 * slack,
        };
        let depth = shelf.levels.first().map_or(0, Vec::len);
        let at = |level: usize| {
            shelf.levels.iter().zip(&shelf.entries).map(|(levels, list)| cost(&list[levels[level]])).collect()
        };
        Levels::new((0..depth).map(at).collect(), self.model().kinds_in_order())
    }

    /// The fastest arrangement of what is on the shelf, and whether every number of virtual stages had one.
    fn best_of(&self, candidate: &Candidate, shelf: &Shelf, prices: &Prices<'_>) -> (Option<Arranged>, bool) {
        let levels = self.levels(shelf);
        let mut best: Option<Arranged> = None;
        let mut all = true;
        for v in self.virtual_stages(candidate) {
            match self.arrange(candidate, v, (&levels, shelf), prices) {
                Some(found) if best.as_ref().is_none_or(|b| found.step_time < b.step_time) => {
                    best = Some(found)
                }
                Some(_) => {}
                None => all = false,
            }
        }
        (best, all)
    }

    /// The choice problem of every layer kind, the stream passing in the sharding of the bound.
    fn problems(
        &self,
        (candidate, bound): (&Candidate, &Bound),
        prices: &Prices<'_>,
        sizes: &[Sizes],
        given: &Given,
    ) -> Option<Vec<LayerProblem<'a>>> {
        let clock = Self::clock(candidate);
        let layers = &self.model().layers;
        let problem =
            |kind: usize, given: &Given| LayerProblem::new(&layers[kind], &sizes[kind], prices, clock, given);
        let base = Given { stream: Some(bound.stream), ..given.clone() };
        let tied = self.tied_uses(prices, &base, &problem)?;
        (0..layers.len())
            .map(|kind| {
                problem(kind, &Given { tied: tied.get(&kind).cloned().unwrap_or_default(), ..base.clone() })
            })
            .collect()
    }

    /// Use and storage of every tied parameter, per kind: one for all levels, since both sides must agree.
    ///
    /// The use is that of the copy's fastest choice; the states beside the parameter are cut as far as they can be,
    /// unless the user says otherwise.
    fn tied_uses<'p>(
        &self,
        prices: &Prices<'_>,
        base: &Given,
        problem: &dyn Fn(usize, &Given) -> Option<LayerProblem<'p>>,
    ) -> Option<BTreeMap<usize, TiedUses>> {
        let mut uses: BTreeMap<usize, TiedUses> = BTreeMap::new();
        for tie in &self.model().ties {
            let built = problem(tie.copy.layer, base)?;
            let choice = built.choice(&fastest(&built)?.2);
            let used = built.used(&choice, tie.copy.tensor)?;
            let storage = match base.storage {
                StorageRule::Free => {
                    let cut = whole_axes(prices.mesh(), used);
                    Storage { parameter: AxisSet::EMPTY, gradient: cut, optimizer: cut }
                }
                StorageRule::Whole
                | StorageRule::Optimizer
                | StorageRule::Gradient
                | StorageRule::Parameter => choice.storage.get(&tie.copy.tensor).copied()?,
            };
            for side in [tie.owner, tie.copy] {
                uses.entry(side.layer).or_default().insert(side.tensor, (used, storage));
            }
        }
        Some(uses)
    }

    fn priced(
        &self,
        (candidate, sizes): (&Candidate, &Sizes),
        kind: usize,
        choice: LayerChoice,
        program: &Program,
    ) -> Entry {
        let layer = &self.model().layers[kind];
        let mesh = &candidate.shape.mesh;
        let context = PriceContext {
            cluster: self.machine.cluster,
            device: self.machine.device,
            precision: self.machine.precision,
            gradients: GradientFormat::Full,
            constants: self.constants,
            kernels: self.machine.kernels,
            tensor_overlap: cost_model::exposure::TensorOverlap::Absent,
            rank_offset: 0,
        };
        let bytes = MemoryContext {
            precision: self.machine.precision,
            gradients: GradientFormat::Full,
            loss: LossKernel::Unfused,
            kernels: self.machine.kernels,
            constants: self.constants,
        };
        Entry {
            kind,
            choice,
            price: price_program(&context, layer, mesh, sizes, program),
            memory: program_memory(&bytes, layer, mesh, sizes, program),
        }
    }

    fn schedule(&self, v: u32) -> Schedule {
        match (v, self.pins().schedule) {
            (1, Some(ScheduleKind::GPipe)) => Schedule::GPipe,
            (1, _) => Schedule::OneFOneB,
            _ => Schedule::Interleaved { virtual_stages: v },
        }
    }

    /// Upper bounds on the micro-batches in flight per chunk: closed forms of the schedules.
    fn in_flight(candidate: &Candidate, schedule: Schedule) -> Vec<f64> {
        let (p, m) = (candidate.n_stages as f64, candidate.n_micro_batches as f64);
        let v = f64::from(schedule.n_virtual_stages());
        let of_rank = |rank: f64| match schedule {
            Schedule::GPipe => m,
            Schedule::OneFOneB => m.min(p - rank),
            Schedule::Interleaved { .. } => (m * v).min(2.0 * (p - rank - 1.0) + (v - 1.0) * p + 1.0) / v,
        };
        let chunks = candidate.n_stages * u64::from(schedule.n_virtual_stages());
        (0..chunks).map(|chunk| of_rank((chunk % candidate.n_stages) as f64)).collect()
    }

    fn arrange(
        &self,
        candidate: &Candidate,
        v: u32,
        (levels, shelf): (&Levels, &Shelf),
        prices: &Prices<'_>,
    ) -> Option<Arranged> {
        let schedule = self.schedule(v);
        let in_flight = Self::in_flight(candidate, schedule);
        let capacity = self.capacity / f64::from(v);
        let cuts = match &self.pins().layers_per_stage {
            // The user counts decoder layers; embedding and head stand at the ends.
            Some(counts) if counts.len() == in_flight.len() => {
                let mut counts: Vec<usize> = counts.iter().map(|&n| n as usize).collect();
                *counts.first_mut()? += 1;
                *counts.last_mut()? += 1;
                levels.as_given(&counts, &in_flight, capacity)?
            }
            Some(_) => return None,
            None => levels.partition(&in_flight, capacity)?,
        };
        let mut names: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        let mut entries: Vec<Entry> = Vec::new();
        let chunks: Vec<Vec<(usize, u64)>> = cuts
            .iter()
            .map(|cut| {
                runs(cut, levels, shelf, &mut |kind, at| {
                    *names.entry((kind, at)).or_insert_with(|| {
                        entries.push(shelf.entries[kind][at].clone());
                        entries.len() - 1
                    })
                })
            })
            .collect();
        self.finish(candidate, schedule, (entries, chunks), prices)
    }

    /// Simulates the schedule and adds what a step has once.
    fn finish(
        &self,
        candidate: &Candidate,
        schedule: Schedule,
        (entries, chunks): (Vec<Entry>, Vec<Vec<(usize, u64)>>),
        prices: &Prices<'_>,
    ) -> Option<Arranged> {
        let p = candidate.n_stages as usize;
        let sum = |chunk: &[(usize, u64)], of: &dyn Fn(&Entry) -> Seconds| -> Seconds {
            chunk.iter().map(|&(entry, count)| of(&entries[entry]) * count as f64).sum()
        };
        let forward = |entry: &Entry| entry.price.forward.seconds();
        let backward = |entry: &Entry| entry.price.backward.seconds();
        let times = PipelineTimes {
            forward: chunks.iter().map(|chunk| sum(chunk, &forward)).collect(),
            backward: chunks.iter().map(|chunk| sum(chunk, &backward)).collect(),
            boundary: vec![self.boundary(candidate, &entries, prices); chunks.len() - 1],
            transfers: if schedule.n_virtual_stages() > 1 {
                Transfers::Overlapped
            } else {
                Transfers::Exposed
            },
        };
        let actions = table(schedule, candidate.n_stages as u32, candidate.n_micro_batches as u32).ok()?;
        let timeline = simulate(&actions, &times).ok()?;
        let v = f64::from(schedule.n_virtual_stages());
        let in_flight: Vec<f64> = peak_in_flight(&actions).iter().map(|&n| f64::from(n) / v).collect();
        let mut parts = StepParts { pipeline: timeline.makespan_s, ..StepParts::default() };
        for stage in 0..p {
            let once = |of: &dyn Fn(&Entry) -> Seconds| -> Seconds {
                chunks.iter().skip(stage).step_by(p).map(|chunk| sum(chunk, of)).sum()
            };
            let n_layers: u64 = chunks.iter().skip(stage).step_by(p).flatten().map(|run| run.1).sum();
            let buckets = u32::try_from(n_layers).unwrap_or(u32::MAX);
            let sync = gradient_reduction_exposed(
                once(&|e| e.price.update.gradient_reduce),
                once(&backward),
                buckets,
                self.constants,
            );
            let gather = parameter_gather_exposed(
                once(&|e| e.price.update.parameter_gather),
                once(&forward),
                buckets,
                self.constants,
            );
            let optimizer = once(&|e| e.price.update.optimizer);
            if sync + gather + optimizer > parts.gradient_sync + parts.parameter_gather + parts.optimizer {
                (parts.gradient_sync, parts.parameter_gather, parts.optimizer) = (sync, gather, optimizer);
            }
            if timeline.ranks[stage].busy_s > timeline.ranks[parts.slowest_stage].busy_s {
                parts.slowest_stage = stage;
            }
        }
        let busiest = &timeline.ranks[parts.slowest_stage];
        parts.bubble = timeline.makespan_s - busiest.busy_s;
        parts.host = self.constants.host_per_iteration_s;
        let work = parts.pipeline + parts.gradient_sync + parts.parameter_gather + parts.optimizer;
        let node = self.machine.cluster.groups.first().map_or(1, |group| group.devices_per_node.max(1));
        let n_nodes = self.machine.cluster.n_devices().div_ceil(node);
        parts.jitter = work * (jitter(n_nodes, self.constants) - 1.0);
        let step_time = work + parts.jitter + parts.host;
        let arranged =
            Arranged { candidate: candidate.clone(), schedule, entries, chunks, step_time, parts, in_flight };
        let fits = (0..p)
            .all(|stage| self.stage_memory(&arranged, stage).total().0 <= self.capacity + self.reserve());
        fits.then_some(arranged)
    }

    /// Bytes of a device that no plan may use.
    pub fn reserve(&self) -> f64 {
        let smallest =
            self.machine.cluster.groups.iter().map(|g| g.device.memory_bytes.0).min_by(f64::total_cmp);
        smallest.unwrap_or(0.0) - self.capacity
    }

    /// Peak memory of a stage by category.
    pub fn stage_memory(&self, arranged: &Arranged, stage: usize) -> cost_model::MemoryBreakdown {
        let p = arranged.candidate.n_stages as usize;
        let mut memory = cost_model::MemoryBreakdown::default();
        let in_flight = arranged.in_flight[stage];
        let (mut working, mut freed) = (Bytes::ZERO, Bytes::ZERO);
        for &(entry, count) in arranged.chunks.iter().skip(stage).step_by(p).flatten() {
            let own = &arranged.entries[entry].memory;
            memory.parameters += own.parameters * count as f64;
            memory.gradients += own.gradients * count as f64;
            memory.optimizer += own.optimizer * count as f64;
            for (kind, bytes) in &own.saved {
                let all = *bytes * (count as f64 * in_flight);
                *memory.activations.entry(kind.name().to_string()).or_default() += all;
                freed += all;
            }
            memory.logits = memory.logits.max(own.logits);
            working = working.max(own.working());
        }
        memory.buffers = working;
        freed += working + memory.logits;
        memory.reserve = freed * (self.constants.fragmentation_factor - 1.0) + Bytes(self.reserve());
        memory
    }

    /// Transfer of the stream between neighbouring stages.
    fn boundary(&self, candidate: &Candidate, entries: &[Entry], prices: &Prices<'_>) -> Seconds {
        let mesh = &candidate.shape.mesh;
        let stream = entries.iter().find_map(|entry| {
            let layer = &self.model().layers[entry.kind];
            let tensor = layer.stream_in?;
            let sizes = layer.sizes(candidate.micro_batch, self.request.job.sequence);
            Some(entry.choice.stream.local_elements(mesh, &layer.shape(tensor, &sizes)))
        });
        stream.map_or(Seconds::ZERO, |elements| prices.transfer(elements as f64, mesh.n_devices()))
    }

    /// What the candidate would need at least, for the report.
    fn overflow(&self, candidate: &Candidate, levels: &Levels) -> Dropped {
        let last = levels.costs.len() - 1;
        let smallest = Levels::new(vec![levels.costs[last].clone()], levels.kinds.clone());
        let schedule = self.schedule(1);
        let in_flight = Self::in_flight(candidate, schedule);
        let Some(cuts) = smallest.partition(&in_flight, f64::INFINITY) else { return Dropped::NoStrategy };
        let worst =
            cuts.iter().enumerate().max_by(|a, b| a.1.memory.total_cmp(&b.1.memory).then(b.0.cmp(&a.0)));
        let Some((stage, cut)) = worst else { return Dropped::NoStrategy };
        let sum = |of: &dyn Fn(&LayerCost) -> f64| -> f64 {
            (cut.from..cut.to).map(|layer| of(&smallest.costs[0][smallest.kinds[layer]])).sum()
        };
        let (state, saved) = (sum(&|c| c.state), sum(&|c| c.saved) * in_flight[stage]);
        let working = cut.memory - state - saved;
        let term = if state >= saved && state >= working {
            "parameters, gradients and optimizer state"
        } else if saved >= working {
            "activations kept for backward"
        } else {
            "working tensors of one layer"
        };
        Dropped::Memory { stage, term, needed: cut.memory }
    }
}

fn prepare<'p>(problems: &'p [LayerProblem<'_>]) -> Vec<Prepared<'p>> {
    problems.iter().map(|one| Prepared::new(&one.problem)).collect()
}

/// The runs of equal entries of a chunk.
fn runs(
    cut: &Chunk,
    levels: &Levels,
    shelf: &Shelf,
    name: &mut dyn FnMut(usize, usize) -> usize,
) -> Vec<(usize, u64)> {
    let range = &levels.kinds[cut.from..cut.to];
    let mut counts: BTreeMap<usize, u64> = BTreeMap::new();
    for &kind in range {
        *counts.entry(kind).or_default() += 1;
    }
    let main = counts.iter().max_by(|a, b| a.1.cmp(b.1).then(b.0.cmp(a.0))).map_or(0, |(&kind, _)| kind);
    let mut smaller = cut.smaller;
    let mut list: Vec<(usize, u64)> = Vec::new();
    for &kind in range {
        let down = kind == main && smaller > 0;
        if down {
            smaller -= 1;
        }
        let level = if down { cut.level + 1 } else { cut.level };
        let entry = name(kind, shelf.levels[kind][level]);
        match list.last_mut() {
            Some((last, count)) if *last == entry => *count += 1,
            _ => list.push((entry, 1)),
        }
    }
    list
}

/// Micro-batches worth trying for a stage of a mesh.
pub fn micro_batches(request: &Request, shape: &Shape) -> Vec<u64> {
    let batch = request.job.global_batch;
    if let Some(per_replica) = request.pins.micro_batch {
        let all = per_replica * shape.data_degree;
        return if all > 0 && batch.is_multiple_of(all) { vec![all] } else { Vec::new() };
    }
    let tokens = |b: u64| b * request.job.sequence / shape.mesh.n_devices().max(1);
    let all = divisors(batch);
    let good: Vec<u64> = all.iter().copied().filter(|&b| TOKENS_PER_DEVICE.contains(&tokens(b))).collect();
    if good.is_empty() {
        // Nothing is near: the micro-batch nearest to the range from below, or the smallest.
        let near = all.iter().copied().filter(|&b| tokens(b) <= *TOKENS_PER_DEVICE.end()).max();
        return near.or_else(|| all.first().copied()).into_iter().collect();
    }
    good
}

/// Tokens that a device gets of a micro-batch: below, kernels are short; above, memory is wasted without gain.
const TOKENS_PER_DEVICE: std::ops::RangeInclusive<u64> = 64..=16_384;
