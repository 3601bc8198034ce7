//! Plans drawn at random from everything that is legal, not only from what a search would choose.
//!
//! A [`Case`] is a description that proptest can draw and shrink: sizes of a model, a mesh, a schedule, and a list of
//! decisions. Decisions are taken in turn from the list, each modulo the number of legal options, of which the first is
//! the simplest; past the end of the list everything is simplest. So a shorter list of smaller numbers is a simpler
//! plan.

use ir::cluster::{Cluster, Precision};
use ir::collective::{Algorithm, Rule};
use ir::engine::Engine;
use ir::graph::Model;
use ir::mesh::Mesh;
use ir::names::{Arrangement, roles};
use ir::native;
use ir::plan::check::open;
use ir::plan::entry::Entry;
use ir::plan::shares::AXIS;
use ir::plan::{EntryRun, InputDigests, Job, Optimizer, PLAN_SCHEMA_VERSION, Plan, RankMap};
use ir::program::Home;
use ir::schedule::{Schedule, table};
use ir::token_order::TokenOrder;
use ir::work::AttentionKernel;
use proptest::prelude::*;
use serde_json::json;

mod draw;
mod models;

pub(crate) use draw::Chooser;
use draw::{Decisions, Drawn, draw_model};
pub(crate) use models::model;
pub use models::{Family, ModelSizes};

/// Most devices of a case.
pub const MAX_RANKS: u64 = 32;

/// A plan that can be drawn, shrunk and written down.
#[derive(Clone, Debug)]
pub struct Case {
    /// Kind of model.
    pub family: Family,
    /// Its sizes.
    pub sizes: ModelSizes,
    /// Devices along the axes of the mesh.
    pub axes: Vec<u64>,
    /// Pipeline stages.
    pub n_stages: u32,
    /// Which schedule, among those that fit.
    pub schedule: usize,
    /// Micro-batches of a step, in units that the schedule allows.
    pub n_micro_batches: u32,
    /// Sequences of a micro-batch.
    pub micro_batch: u64,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Whether coordinates of the outermost axis may run unequal shares of the micro-batches.
    pub shares: Shares,
    /// What ranks run on.
    pub devices: Devices,
    /// Everything else.
    pub decisions: Vec<u16>,
}

/// What coordinates of the outermost axis run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shares {
    /// All as many micro-batches.
    Equal,
    /// Each its own number, where the schedule has tables for that; else as many.
    Unequal,
}

/// What ranks run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Devices {
    /// A device each.
    Alone,
    /// The first three quarters three to a device, the others alone.
    Shared,
}

/// A strategy that draws cases.
pub fn cases() -> impl Strategy<Value = Case> {
    let axis = prop_oneof![3 => Just(2_u64), 1 => Just(1), 1 => Just(3), 1 => Just(4)];
    let axes = prop::collection::vec(axis, 0..=4);
    let pipeline = (1_u32..=4, 0_usize..16, 1_u32..=3);
    let shares = prop_oneof![3 => Just(Shares::Equal), 1 => Just(Shares::Unequal)];
    let devices = prop_oneof![3 => Just(Devices::Alone), 1 => Just(Devices::Shared)];
    let batch = (prop_oneof![Just(1_u64), Just(2), Just(4), Just(6), Just(12)], 2_u64..=12, shares, devices);
    let decisions = prop::collection::vec(any::<u16>(), 0..400);
    let drawn = (models::families(), models::sizes(), axes, pipeline, batch, decisions);
    let case = |(family, sizes, axes, pipeline, batch, decisions): (
        _,
        _,
        Vec<u64>,
        _,
        (u64, u64, Shares, Devices),
        _,
    )| {
        let (n_stages, schedule, n_micro_batches) = pipeline;
        let (micro_batch, half, shares, devices) = batch;
        // Unequal shares need sequences for every coordinate, and more than one micro-batch.
        let (micro_batch, n_micro_batches) = match (shares, axes.first()) {
            (Shares::Unequal, Some(size)) => (micro_batch.next_multiple_of(*size), n_micro_batches + 1),
            (Shares::Unequal | Shares::Equal, _) => (micro_batch, n_micro_batches),
        };
        Case {
            family,
            sizes,
            axes,
            n_stages,
            schedule,
            n_micro_batches,
            micro_batch,
            sequence: 2 * half,
            shares,
            devices,
            decisions,
        }
    };
    drawn.prop_map(case)
}

impl Case {
    /// The plan; `None` where the case has too many devices, or no legal choice was drawn.
    pub fn plan(&self) -> Option<Plan> {
        let mesh = Mesh::of_sizes(&self.axes)?;
        if mesh.n_devices() * u64::from(self.n_stages) > MAX_RANKS {
            return None;
        }
        let model = models::model(self.family, &self.sizes)?;
        let n_layers = model.kinds_in_order().len() as u32;
        let order = self.schedule(n_layers)?;
        self.on_nodes(1, (&model, mesh), order, &mut Decisions::new(&self.decisions))
    }

    /// The plan on so many nodes in which somebody decides everything that sizes, mesh and schedule leave open.
    pub(crate) fn on_nodes(
        &self,
        n_nodes: u64,
        (model, mesh): (&Model, Mesh),
        order: (Schedule, u32),
        chooser: &mut dyn Chooser,
    ) -> Option<Plan> {
        let shares = if may_be_unequal(order.0, &mesh) { self.shares } else { Shares::Equal };
        let mut drawn = draw_model(model, &mesh, (self.micro_batch, self.sequence, shares), chooser)?;
        if order.0.n_slices() > 1 {
            // Later slices read what a slice keeps.
            drawn.iter_mut().for_each(|one| one.choice.kept = Home::Device);
        }
        let chunks = chunks(model, order.0.placement().n_chunks(self.n_stages), chooser)?;
        let slices = self.slices(order.0, chooser);
        let counts = match shares {
            Shares::Equal => Vec::new(),
            Shares::Unequal => self.unequal((&mesh, order), chooser),
        };
        let mut plan = self.document((model, mesh), (order, slices, counts), (drawn, chunks))?;
        plan.cluster = match self.devices {
            Devices::Alone => cluster(n_nodes)?,
            Devices::Shared => sharing()?,
        };
        with_algorithms(with_token_order(with_shared(plan, chooser), chooser), chooser)
    }

    /// Slices of one or two times the drawn sequence each, so that what is cut divides; empty where none are asked for.
    fn slices(&self, schedule: Schedule, chooser: &mut dyn Chooser) -> Vec<u64> {
        match schedule.n_slices() {
            1 => Vec::new(),
            n => (0..n).map(|slice| self.sequence * (1 + chooser.slice(slice) as u64 % 2)).collect(),
        }
    }

    /// Shares of the micro-batches: each coordinate but the first gives some of its own to the one before it.
    fn unequal(
        &self,
        (mesh, (schedule, n_micro_batches)): (&Mesh, (Schedule, u32)),
        chooser: &mut dyn Chooser,
    ) -> Vec<u64> {
        // Interleaved schedules take micro-batches in multiples of the stages.
        let unit = if matches!(schedule, Schedule::Interleaved { .. }) { self.n_stages } else { 1 };
        let mut shares = vec![u64::from(n_micro_batches); mesh.size(AXIS) as usize];
        for at in 1..shares.len() {
            let most = (n_micro_batches - 1) / unit;
            let given = u64::from(unit) * chooser.given_away(most as usize) as u64;
            shares[at - 1] += given;
            shares[at] -= given;
        }
        shares
    }

    /// The schedule among those that have a table here, with micro-batches that suit it.
    fn schedule(&self, n_layers: u32) -> Option<(Schedule, u32)> {
        let p = self.n_stages;
        let options: Vec<(Schedule, u32)> = schedules()
            .into_iter()
            .flat_map(|schedule| [self.n_micro_batches, self.n_micro_batches * p].map(|m| (schedule, m)))
            .filter(|(schedule, _)| schedule.placement().n_chunks(p) <= n_layers)
            .filter(|(schedule, m)| table(*schedule, p, *m).is_ok())
            .collect();
        options.get(self.schedule % options.len().max(1)).copied()
    }

    fn document(
        &self,
        (model, mesh): (&Model, Mesh),
        ((schedule, n_micro_batches), slices, shares): ((Schedule, u32), Vec<u64>, Vec<u64>),
        (drawn, chunks): (Vec<Drawn>, Vec<Vec<EntryRun>>),
    ) -> Option<Plan> {
        let entries =
            model.layers.iter().zip(&drawn).map(|(layer, one)| Entry::of(layer, &mesh, &one.choice));
        let none = Arrangement {
            mesh: &mesh,
            layers: Vec::new(),
            n_stages: u64::from(self.n_stages),
            schedule,
            micro_batch: self.micro_batch,
            n_micro_batches: u64::from(n_micro_batches),
        };
        let mut plan = Plan {
            schema_version: PLAN_SCHEMA_VERSION,
            tool_version: "fuzz".into(),
            inputs: InputDigests { model: "none:0".into(), cluster: "none:0".into() },
            job: Job {
                sequence: if slices.is_empty() { self.sequence } else { slices.iter().sum() },
                global_batch: self.micro_batch * u64::from(n_micro_batches),
                precision: Precision::Bf16,
                optimizer: Optimizer::AdamW,
                attention: AttentionKernel::Flash,
                token_order: TokenOrder::Natural,
                engine: Engine::default(),
            },
            roles: roles(&none),
            entries: entries.collect(),
            mesh,
            stage_meshes: Vec::new(),
            rank_map: RankMap::StageMajor,
            n_stages: u64::from(self.n_stages),
            schedule,
            table: None,
            slices,
            micro_batch: self.micro_batch,
            n_micro_batches: u64::from(n_micro_batches),
            shares,
            chunks,
            predicted: None,
            search: None,
            runners_up: Vec::new(),
            warnings: Vec::new(),
            forms: Vec::new(),
            cluster: cluster(1)?,
            model: native::write(model),
        };
        plan.roles = open(&plan).ok()?.roles(&plan);
        Some(plan)
    }
}

/// Whether coordinates of the outermost axis can run unequal shares at all: several, in whole sequences, of one copy.
fn may_be_unequal(schedule: Schedule, mesh: &Mesh) -> bool {
    let is_whole = schedule.n_slices() == 1 && schedule.placement().n_copies() == 1;
    is_whole && mesh.axes.first().is_some_and(|axis| axis.size > 1)
}

/// The plan in another order of tokens, where its sequence cuts into such pieces and so it was decided.
fn with_token_order(mut plan: Plan, chooser: &mut dyn Chooser) -> Plan {
    let parts = open(&plan).map_or(1, |opened| opened.token_parts(&plan));
    let fits = |order: &TokenOrder| plan.job.sequence.is_multiple_of(order.pieces(parts));
    let orders = [TokenOrder::Natural, TokenOrder::ZigZag, TokenOrder::Striped];
    let orders: Vec<TokenOrder> = orders.into_iter().filter(fits).collect();
    if parts > 1 && orders.len() > 1 && plan.slices.is_empty() {
        plan.job.token_order = orders[chooser.token_order(&orders) % orders.len()];
    }
    plan
}

/// The plan with copies of ties that are their owners' tensors, where they can be and so it was decided.
fn with_shared(mut plan: Plan, chooser: &mut dyn Chooser) -> Plan {
    let copies: Vec<String> = plan.model.ties.iter().map(|tie| tie.copy.clone()).collect();
    for copy in copies {
        let mut shared = plan.clone();
        let is_it = |layer: &str, tensor: &str| copy == format!("{layer}.{tensor}");
        for entry in &mut shared.entries {
            let own = entry.parameters.iter_mut().filter(|one| is_it(&entry.layer, &one.tensor));
            own.for_each(|one| one.shared = true);
        }
        if open(&shared).is_ok() && chooser.shared() {
            plan = shared;
        }
    }
    plan
}

/// The plan with an algorithm drawn for every purpose, kind and axes of its collectives.
fn with_algorithms(mut plan: Plan, chooser: &mut dyn Chooser) -> Option<Plan> {
    let opened = open(&plan).ok()?;
    for (entry, open) in plan.entries.iter_mut().zip(&opened.entries) {
        let mut rules: Vec<Rule> = Vec::new();
        for (class, _, step) in open.program.collectives() {
            let Some(kind) = step.kind.collective() else { continue };
            // What goes by levels sums in the order of devices, which differs from group to group where some run more
            // ranks.
            let suits = |one: &&Algorithm| {
                !plan.cluster.shares_devices() || matches!(one, Algorithm::Ring | Algorithm::Direct)
            };
            let options: Vec<Algorithm> = kind.algorithms().iter().filter(suits).copied().collect();
            if !rules.iter().any(|rule| (rule.class, rule.kind, &rule.axes) == (class, kind, &step.axes)) {
                let algorithm = options[chooser.algorithm(&options) % options.len()];
                rules.push(Rule { class, kind, axes: step.axes, tensor: None, algorithm });
            }
        }
        *entry = entry.clone().with_rules(&opened.model.layers[open.layer], &plan.mesh, &rules);
    }
    Some(plan)
}

/// Every schedule that a case may have.
fn schedules() -> Vec<Schedule> {
    vec![
        Schedule::OneFOneB,
        Schedule::GPipe,
        Schedule::Interleaved { virtual_stages: 2 },
        Schedule::Interleaved { virtual_stages: 3 },
        Schedule::Eager,
        Schedule::Dapple { warm_up: 3 },
        Schedule::BreadthFirst { virtual_stages: 2 },
        Schedule::ZbH1,
        Schedule::ZbH2,
        Schedule::ZbV,
        Schedule::VHalf,
        Schedule::VMin,
        Schedule::Hanayo { waves: 1 },
        Schedule::Hanayo { waves: 2 },
        Schedule::DualPipeV,
        Schedule::Chimera,
        Schedule::Seq1F1B { slices: 2 },
        Schedule::Seq1F1B { slices: 3 },
        Schedule::TeraPipe { slices: 2 },
    ]
}

/// Layers in order, cut at random places; no chunk is empty.
fn chunks(model: &Model, n_chunks: u32, chooser: &mut dyn Chooser) -> Option<Vec<Vec<EntryRun>>> {
    let kinds = model.kinds_in_order();
    let n_chunks = n_chunks as usize;
    let mut chunks = Vec::new();
    let mut at = 0;
    for left in (1..=n_chunks).rev() {
        let most = (kinds.len() - at).checked_sub(left - 1).filter(|&most| most > 0)?;
        let even = (kinds.len() - at).div_ceil(left).min(most);
        let take = if left == 1 { most } else { chooser.layers(even, most) };
        let mut runs: Vec<EntryRun> = Vec::new();
        for &kind in &kinds[at..at + take] {
            match runs.last_mut() {
                Some(last) if last.entry == kind => last.count += 1,
                _ => runs.push(EntryRun { entry: kind, count: 1 }),
            }
        }
        at += take;
        chunks.push(runs);
    }
    Some(chunks)
}

/// The drives of every node.
fn drives() -> serde_json::Value {
    json!({"capacity_tb": 1, "read_gb_per_s": 10, "write_gb_per_s": 5})
}

/// So many nodes with as many devices as any case has.
fn cluster(n_nodes: u64) -> Option<Cluster> {
    let per_node = MAX_RANKS / n_nodes;
    let inner = json!({"name": "links", "devices": per_node, "bandwidth_gb_per_s": 100, "latency_us": 2, "wiring": "switch"});
    let outer = json!({"name": "network", "devices": MAX_RANKS, "bandwidth_gb_per_s": 25, "latency_us": 10, "wiring": "switch"});
    let tiers = if n_nodes == 1 { vec![inner] } else { vec![inner, outer] };
    let group = json!({"device": "h100-sxm", "count": MAX_RANKS, "devices_per_node": per_node, "host_memory_gib": 64, "nvme": drives()});
    let document = json!({"schema_version": 1, "name": "fuzz", "groups": [group], "tiers": tiers});
    frontends::read_cluster("fuzz.json", &document.to_string()).ok()
}

/// Eight devices with three ranks each and eight with one.
fn sharing() -> Option<Cluster> {
    let n = MAX_RANKS / 4;
    let tier = json!({"name": "links", "devices": 2 * n, "bandwidth_gb_per_s": 100, "latency_us": 2, "wiring": "switch"});
    let group = |device: &str| json!({"device": device, "count": n, "devices_per_node": n, "host_memory_gib": 64, "nvme": drives()});
    let groups = [group("h100-sxm"), group("a100-sxm-80")];
    let document = json!({"schema_version": 1, "name": "fuzz", "groups": groups, "tiers": [tier]});
    frontends::read_cluster("fuzz.json", &document.to_string()).ok()?.with_ranks(&[3, 1])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ir::program::StateHome;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    use super::*;

    /// What there is to see in a plan.
    fn traits(case: &Case, plan: &Plan) -> Vec<String> {
        let words =
            |text: &str| plan.entries.iter().flat_map(|e| &e.ops).any(|op| op.axes.iter().any(|w| w == text));
        let cut = |state: fn(&ir::plan::entry::ParameterEntry) -> bool| {
            plan.entries.iter().flat_map(|entry| &entry.parameters).any(state)
        };
        let stream =
            plan.entries.iter().map(|entry| entry.stream.as_str()).find(|s| *s != "replicated").unwrap_or("");
        let mut list = vec![format!("{:?}", case.family), plan.schedule.to_string()];
        let marks = [
            ("more than 8 ranks", plan.n_devices() > 8),
            ("an axis of 3", case.axes.contains(&3)),
            ("three axes", plan.mesh.axes.iter().filter(|axis| axis.size > 1).count() > 2),
            ("defer", words("defer")),
            ("through", words("through")),
            ("recompute", plan.entries.iter().flat_map(|entry| &entry.ops).any(|op| op.recompute)),
            ("cut parameters", cut(|p| !p.parameter.is_empty())),
            ("cut gradients", cut(|p| !p.gradient.is_empty() && p.parameter.is_empty())),
            ("cut optimizer", cut(|p| !p.optimizer.is_empty() && p.gradient.is_empty())),
            ("states on the host", cut(|p| p.optimizer_home == StateHome::Host)),
            ("states on drives", cut(|p| p.optimizer_home == StateHome::Nvme)),
            ("parameters on the host", plan.entries.iter().any(|e| e.parameters_home == Home::Host)),
            ("activations on the host", plan.entries.iter().any(|entry| entry.kept_home == Home::Host)),
            ("stream cut along hidden", stream.contains("h@")),
            ("stream cut along sequence", stream.contains("s@")),
            ("ring", words("ring")),
            ("striped", plan.job.token_order == TokenOrder::Striped),
            ("zig-zag", plan.job.token_order == TokenOrder::ZigZag),
            ("tie", !plan.model.ties.is_empty()),
            ("tied parameters held once", cut(|parameter| parameter.shared)),
            ("uneven vocabulary", plan.roles.vocabulary_parallel > 1),
            ("adapters", case.sizes.lora > 0),
            ("predictions further ahead", case.sizes.mtp > 0),
            ("a tower beside the first layers", case.sizes.tower > 0),
            ("ranks that share devices", plan.n_whole_devices() < plan.n_devices()),
            ("unequal shares", plan.shares.iter().any(|share| *share != plan.n_micro_batches)),
        ];
        list.extend(marks.into_iter().filter(|(_, has)| *has).map(|(name, _)| name.to_owned()));
        list
    }

    #[test]
    fn cases_cover_the_space() {
        let mut runner = TestRunner::deterministic();
        let mut seen: BTreeMap<String, u32> = BTreeMap::new();
        let mut plans = 0;
        for _ in 0..2000 {
            let case = cases().new_tree(&mut runner).unwrap().current();
            let Some(plan) = case.plan() else { continue };
            plans += 1;
            traits(&case, &plan).into_iter().for_each(|name| *seen.entry(name).or_insert(0) += 1);
        }
        assert!(plans > 400, "only {plans} of 2000 cases have a plan");
        let expected = [
            "Llama",
            "Gpt2",
            "Gemma2",
            "Falcon",
            "Bloom",
            "Mixtral",
            "GptOss",
            "DeepSeekV2",
            "DeepSeekV3",
            "1f1b",
            "gpipe",
            "interleaved(2)",
            "interleaved(3)",
            "more than 8 ranks",
            "an axis of 3",
            "three axes",
            "defer",
            "through",
            "recompute",
            "cut parameters",
            "cut gradients",
            "cut optimizer",
            "states on the host",
            "activations on the host",
            "parameters on the host",
            "stream cut along hidden",
            "stream cut along sequence",
            "ring",
            "striped",
            "zig-zag",
            "tie",
            "uneven vocabulary",
            "adapters",
            "a tower beside the first layers",
            "unequal shares",
            "ranks that share devices",
        ];
        let rare: Vec<&str> =
            expected.into_iter().filter(|name| seen.get(*name).copied().unwrap_or(0) < plans / 60).collect();
        assert!(rare.is_empty(), "rare: {rare:?}; of {plans} plans: {seen:?}");
    }
}
