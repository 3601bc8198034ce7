//! One candidate: a mesh for every stage, a number of stages, a micro-batch; and what all candidates of a request
//! share.
//!
//! What is done with one stands in the files that follow: `bound`, `shelf`, `arrange`, `overflow`, `evaluate`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cost_model::Constants;
use cost_model::offload::{NodeMemory, NodeStore};
use ir::engine::GradientOverlap;
use ir::graph::Model;
use ir::links::bends;
use ir::mesh::{Mesh, Meshes};
use ir::token_order::TokenOrder;

use crate::chooser::{Chooser, Troubles};
use crate::clock::{Clock, Covers};
use crate::cut_sequences::SlicedEntries;
use crate::flights::Flights;
use crate::forms::{first_of, forms_within, leave_cut, wide};
use crate::given::{Given, HomeRule, RecomputeRule, StateRule, StorageRule};
use crate::known_bounds::KnownBounds;
use crate::known_rooms::KnownRooms;
use crate::layer_problem::LayerProblem;
use crate::memos::Memos;
use crate::price::grounds::Grounds;
use crate::price::setting::{Backward, Setting};
use crate::prices::Machine;
use crate::request::{
    ContextKind, GradientsKind, Job, OffloadKind, Pins, RecomputeKind, Request, ScheduleKind,
};
use crate::rewrite::Variant;
use crate::shapes::{Shape, divisors};
use crate::space::AxisRule;

/// Everything that all candidates share.
#[derive(Clone)]
pub struct Scope<'a> {
    /// The question.
    pub request: &'a Request,
    /// Constants of the cost model.
    pub constants: &'a Constants,
    /// What prices stand on.
    pub setting: Setting<'a>,
    /// Prices' view of the machines.
    pub machine: Machine<'a>,
    /// Smallest device memory less the reserve.
    pub capacity: f64,
    /// Layers of each kind.
    pub counts: Vec<u64>,
    /// What kept a solver from an answer.
    pub troubles: Troubles,
    /// Forms of each kind, the original first.
    pub forms: Vec<Vec<Variant>>,
    /// Per kind, the form that stands for all where only one is asked.
    pub leading: Vec<usize>,
    /// The model with a layer kind for every form: all forms of the first kind, then of the next.
    pub wide: Model,
    /// Layers, by their place in the model, where branches begin and meet.
    pub bends: Vec<usize>,
    /// What was priced on the meshes that were looked at last.
    pub(crate) memos: Memos,
    /// What schedules hold, as far as it was counted.
    pub(crate) flights: Flights,
    /// Entries that were priced by slices.
    pub(crate) sliced: SlicedEntries,
    /// Bounds of this search and of those before it.
    pub(crate) bounds: Arc<KnownBounds>,
    /// The same in the memory that there is, of searches that differ in schedules alone.
    pub(crate) rooms: Arc<KnownRooms>,
}

/// A mesh, a number of stages, a micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Mesh of every stage, or of the first, and its rules.
    pub shape: Shape,
    /// Meshes of the stages, where they have not all that one.
    pub meshes: Vec<Mesh>,
    /// Pipeline stages.
    pub n_stages: u64,
    /// Sequences of a micro-batch over the mesh.
    pub micro_batch: u64,
    /// Micro-batches of a step.
    pub n_micro_batches: u64,
}

impl Candidate {
    /// Meshes of its stages.
    pub fn meshes(&self) -> Meshes<'_> {
        Meshes { alike: &self.shape.mesh, each: &self.meshes }
    }

    /// Whether bounds of it, and its tables, hold for another on its mesh: of a micro-batch that divides its own, and
    /// for which no axis may do what it may not here. An axis that is to split sequences computes the same everywhere
    /// where they do not divide.
    pub fn stands_for(&self, other: &Self, sequence: u64) -> bool {
        let offers_more = |size: u64, rule: AxisRule| {
            let splits = |one: &Self| one.micro_batch.is_multiple_of(size);
            let is_left_without = match rule {
                AxisRule::Sequences | AxisRule::Replicas | AxisRule::Shares | AxisRule::Experts => true,
                AxisRule::Free | AxisRule::Around => !sequence.is_multiple_of(size),
                AxisRule::Tokens
                | AxisRule::TokensAndExperts
                | AxisRule::Inside(_)
                | AxisRule::InsideAndExperts(_) => false,
            };
            is_left_without && splits(self) && !splits(other)
        };
        let mut axes = std::iter::once(&self.shape.mesh).chain(&self.meshes).flat_map(|mesh| {
            mesh.axis_ids().zip(&self.shape.rules).map(|(axis, &rule)| (mesh.size(axis), rule))
        });
        self.micro_batch.is_multiple_of(other.micro_batch)
            && !axes.any(|(size, rule)| offers_more(size, rule))
    }

    /// Whether parameters that are one are held once, by the owner: all layers are on one stage.
    pub(crate) fn holds_ties_once(&self) -> bool {
        self.n_stages == 1
    }
}

/// Why a candidate came to nothing.
#[derive(Clone, Debug, PartialEq)]
pub enum Dropped {
    /// Some layer has no legal strategy there.
    NoStrategy,
    /// Its layers alone take longer than what was asked for.
    Slower,
    /// The host of some node, or its drives, lack the memory for the states that devices cannot hold.
    Host {
        /// Which of the two.
        store: NodeStore,
        /// Stage with most of them.
        stage: usize,
        /// What the devices of a node need together.
        needed: f64,
        /// What the node has for them.
        capacity: f64,
    },
    /// The least memory it can do with is too much: the stage, its largest category, and what it needs.
    Memory {
        /// Stage that overflows.
        stage: usize,
        /// Largest category.
        term: &'static str,
        /// What the stage needs, reserve apart.
        needed: f64,
        /// What it has.
        capacity: f64,
        /// A node whose host, or drives, lack memory besides.
        also: Option<NodeMemory>,
    },
}

impl<'a> Scope<'a> {
    /// Prepares a request. `None` for a cluster without devices or tiers.
    pub fn new(request: &'a Request, constants: &'a Constants) -> Option<Self> {
        let cuts = request.pins.schedule.is_some_and(ScheduleKind::cuts_sequences);
        let default = if cuts { TokenOrder::Natural } else { request.job.token_order };
        let token_order = request.pins.token_order.unwrap_or(request.pins.forbid.token_order(default));
        let job = Job { token_order, ..request.job };
        let backward = match request.pins.schedule {
            Some(kind) if kind.splits_backward() => Backward::Parts,
            Some(_) | None => Backward::Whole,
        };
        let setting = Setting { backward, ..Setting::new(&request.cluster, job, constants)? };
        let mut counts = vec![0; request.model.layers.len()];
        for run in &request.model.sequence {
            counts[run.layer] += run.count;
        }
        let (machine, capacity) = (setting.machine.clone(), setting.capacity);
        let forms = forms_within(&request.model, &request.pins.constraints);
        let wide = wide(&request.model, &forms);
        let leading = vec![0; forms.len()];
        Some(Self {
            leading,
            request,
            constants,
            setting,
            machine,
            capacity,
            counts,
            troubles: Troubles::default(),
            forms,
            wide,
            memos: Memos::default(),
            flights: Flights::default(),
            sliced: SlicedEntries::default(),
            bounds: Arc::default(),
            rooms: Arc::default(),
            bends: bends(request.model.kinds_in_order().iter().map(|&kind| &request.model.layers[kind])),
        })
    }

    /// The same without forms that cannot be cut in as many parts as products are to be.
    #[must_use]
    pub(crate) fn with_forms_cut(mut self, parts: u64) -> Self {
        leave_cut(&mut self.forms, &self.request.model, parts);
        self.wide = wide(&self.request.model, &self.forms);
        self
    }

    /// What the stages of a candidate stand on.
    pub fn grounds(&self, candidate: &Candidate) -> Grounds<'a> {
        Grounds::new(&self.setting, candidate.n_stages, candidate.meshes())
    }

    /// The mesh of the stages of a candidate that are on one ground.
    pub(crate) fn mesh_on<'c>(&self, candidate: &'c Candidate, ground: usize) -> &'c Mesh {
        let meshes = candidate.meshes();
        match meshes.each {
            [] => meshes.alike,
            _ => self.grounds(candidate).mesh(meshes, ground),
        }
    }

    /// The choice problem of a layer in the hands of the solver that is asked for.
    pub(crate) fn chooser<'s>(&'s self, problem: &'s LayerProblem<'s>) -> Chooser<'s> {
        Chooser::new(self.request.solver, problem, &self.troubles)
    }

    pub(crate) fn model(&self) -> &'a Model {
        &self.request.model
    }

    pub(crate) fn pins(&self) -> &'a Pins {
        &self.request.pins
    }

    /// Layer kind of the wide model for a form of a kind.
    pub(crate) fn wide_kind(&self, kind: usize, form: usize) -> usize {
        first_of(&self.forms, kind) + form
    }

    /// The form of a kind that a layer kind of the wide model is, if it is one of its.
    pub(crate) fn form_of(&self, kind: usize, wide: usize) -> Option<usize> {
        wide.checked_sub(first_of(&self.forms, kind)).filter(|&form| form < self.forms[kind].len())
    }

    pub(crate) fn given(&self) -> Given {
        let forbid = &self.pins().forbid;
        let recompute = match self.pins().recompute {
            None => recompute_left(&forbid.recompute),
            Some(RecomputeKind::None) => RecomputeRule::Never,
            Some(RecomputeKind::Selective) => RecomputeRule::AttentionOnly,
            Some(RecomputeKind::Full) => RecomputeRule::Always,
        };
        let storage = match (self.pins().zero, self.pins().gradients) {
            (None, _) => StorageRule::Free,
            (Some(3), Some(GradientsKind::Whole)) => StorageRule::ButGradient,
            (Some(stage), _) => StorageRule::of_stage(stage),
        };
        let (mut homes, [mut kept, parameters]) = self.pins().offload.unwrap_or(OffloadKind::None).rules();
        let no_drives = !self.request.cluster.has_nvme() || forbid.offload.contains(&OffloadKind::Nvme);
        if homes == StateRule::Anywhere && no_drives {
            homes = StateRule::Free;
        }
        let is_free = matches!(homes, StateRule::Free | StateRule::Anywhere);
        if is_free && forbid.offload.contains(&OffloadKind::Optimizer) {
            homes = StateRule::Device;
        }
        // Keys on a ring cannot be carried from slice to slice, nor can keys on the host.
        let cuts = self.pins().schedule.is_some_and(ScheduleKind::cuts_sequences);
        if kept == HomeRule::Free && (cuts || forbid.offload.contains(&OffloadKind::Activations)) {
            kept = HomeRule::Device;
        }
        let context = self.pins().cp_kind.or(cuts.then_some(ContextKind::Gather));
        let constraints = self.pins().constraints.clone();
        let forbid = forbid.clone();
        let (tied, shared, covers) = (BTreeMap::new(), BTreeSet::new(), Covers::default());
        Given {
            stream: None,
            tied,
            shared,
            recompute,
            storage,
            homes,
            kept,
            parameters,
            of_bound: false,
            context,
            forbid,
            constraints,
            covers,
            cuts,
        }
    }

    /// What is given where memory is free: then nothing is gained by computing again, unless what is kept must go to
    /// the host, nor by states anywhere but on the device.
    pub(crate) fn given_fastest(&self) -> Given {
        let given = self.given();
        let homes = match given.homes {
            StateRule::Free | StateRule::Anywhere | StateRule::OrNvme => StateRule::Device,
            pinned @ (StateRule::Device | StateRule::Host | StateRule::Nvme) => pinned,
        };
        let given = Given { homes, ..given };
        if given.kept == HomeRule::Host {
            return given;
        }
        let recompute = match given.recompute {
            RecomputeRule::Free | RecomputeRule::ButProducts => RecomputeRule::Never,
            pinned @ (RecomputeRule::Never | RecomputeRule::AttentionOnly | RecomputeRule::Always) => pinned,
            // The least of it is the fastest.
            RecomputeRule::AtLeastAttention => RecomputeRule::AttentionOnly,
        };
        Given { recompute, ..given }
    }

    /// How often things happen, where compute covers what it does.
    pub fn clock(&self, candidate: &Candidate, covers: Covers) -> Clock {
        let (m, p) = (candidate.n_micro_batches as f64, candidate.n_stages as f64);
        let layers = (self.model().n_layers() as f64 / p).max(1.0);
        match self.request.job.engine.gradient_overlap {
            GradientOverlap::Beside => Clock::beside((m, p.min(m)), layers, covers, self.constants),
            GradientOverlap::Absent => Clock::after((m, p.min(m)), layers),
        }
    }
}

/// What may be computed again where some of it is forbidden.
fn recompute_left(forbidden: &[RecomputeKind]) -> RecomputeRule {
    let no = |kind: RecomputeKind| forbidden.contains(&kind);
    match (no(RecomputeKind::None), no(RecomputeKind::Selective), no(RecomputeKind::Full)) {
        (false, false, false) => RecomputeRule::Free,
        (false, false, true) => RecomputeRule::ButProducts,
        (false, true, _) => RecomputeRule::Never,
        (true, true, _) => RecomputeRule::Always,
        (true, false, false) => RecomputeRule::AtLeastAttention,
        (true, false, true) => RecomputeRule::AttentionOnly,
    }
}

/// Whether two candidates differ in their micro-batches alone.
pub(crate) fn same_mesh(a: &Candidate, b: &Candidate) -> bool {
    a.n_stages == b.n_stages && a.shape == b.shape && a.meshes == b.meshes
}

/// Micro-batches worth trying in a pipeline of stages of a mesh, and how many of each a step has.
pub(crate) fn batches(request: &Request, shape: &Shape, n_stages: u64) -> Vec<(u64, u64)> {
    let all = micro_batches(request, shape, n_stages).into_iter().map(|b| (b, request.job.global_batch / b));
    all.collect()
}

/// Of some candidates those with enough micro-batches for their stages: with fewer than half as many most stages idle
/// most of the time. But there may be few sequences, or somebody may want so many stages.
pub(crate) fn filled(request: &Request, candidates: Vec<Candidate>) -> Vec<Candidate> {
    let pins = &request.pins;
    if pins.pp.is_some() || !pins.forbid.pp.is_empty() || pins.layers_per_stage.is_some() {
        return candidates;
    }
    let of_mesh = |all: &[Candidate]| {
        let most = all.iter().map(|one| one.n_micro_batches).max();
        let enough = all.first().map_or(0, |one| one.n_stages.min(request.job.global_batch));
        let fills =
            move |one: &&Candidate| one.n_micro_batches * 2 >= enough || Some(one.n_micro_batches) == most;
        all.iter().filter(fills).cloned().collect::<Vec<_>>()
    };
    candidates.chunk_by(same_mesh).flat_map(of_mesh).collect()
}

/// Micro-batches worth trying for one of so many stages of a mesh.
pub fn micro_batches(request: &Request, shape: &Shape, n_stages: u64) -> Vec<u64> {
    let batch = request.job.global_batch;
    if let Some(per_replica) = request.pins.micro_batch {
        let all = per_replica * shape.data_degree;
        return if all > 0 && batch.is_multiple_of(all) { vec![all] } else { Vec::new() };
    }
    let most = if n_stages == 1 { MOST_TOKENS_ALONE } else { MOST_TOKENS };
    let tokens = |b: u64| b * request.job.sequence / shape.mesh.n_devices().max(1);
    let forbid = &request.pins.forbid;
    let replicas = shape.data_degree.max(1);
    let allows = |b: &u64| {
        forbid.micro_batch.allows(b.div_ceil(replicas)) && (!forbid.copies || b.is_multiple_of(replicas))
    };
    let all: Vec<u64> = divisors(batch).into_iter().filter(allows).collect();
    let good: Vec<u64> =
        all.iter().copied().filter(|&b| (LEAST_TOKENS..=most).contains(&tokens(b))).collect();
    if good.iter().any(|b| batch / b >= n_stages) {
        return good;
    }
    // Stages without a micro-batch each idle for longer than short kernels take, and few schedules run them: the
    // nearest to the range from below, and the largest of which every stage has one.
    let near = if good.is_empty() {
        all.iter().copied().filter(|&b| tokens(b) <= most).max().or_else(|| all.first().copied())
    } else {
        all.iter().copied().filter(|&b| tokens(b) < LEAST_TOKENS).max()
    };
    let fills = all.iter().copied().filter(|&b| batch / b >= n_stages).max();
    let fills = fills.filter(|fills| near.is_some_and(|near| *fills < near));
    fills.into_iter().chain(near).chain(good).collect()
}

/// Fewest tokens that a device gets of a micro-batch, unless stages then have none each: below, kernels are short.
const LEAST_TOKENS: u64 = 64;

/// Most tokens that it gets: above, memory is wasted without gain, and a pipeline has too few micro-batches.
const MOST_TOKENS: u64 = 65_536;

/// The same where there is no pipeline to fill: models of some hundred million parameters still gain a per cent by
/// sending what every micro-batch sends half as often.
const MOST_TOKENS_ALONE: u64 = 2 * MOST_TOKENS;
