//! Small models and plans made by hand, for tests of what reads plans.

use std::collections::{BTreeMap, BTreeSet};

use crate::builder::LayerBuilder;
use crate::cluster::{
    Architecture, Cluster, Device, DeviceGroup, InSwitchReduction, Nvme, Precision, Tier, Wiring,
};
use crate::engine::Engine;
use crate::graph::{Data, Extent, Init, Layer, Model, Op, ParameterRef, Role, Segment, TensorId, Tie};
use crate::lower::{LayerChoice, Recompute, whole_axes};
use crate::mesh::Mesh;
use crate::native;
use crate::op::{
    Activation, AttentionBias, AttentionMask, Gating, GroupScore, Normalize, OpKind, RotarySide, RouterScore,
};
use crate::plan::entry::Entry;
use crate::plan::{EntryRun, InputDigests, Job, Optimizer, PLAN_SCHEMA_VERSION, Plan, RankMap, check};
use crate::program::{AxisSet, Home, Storage};
use crate::schedule::Schedule;
use crate::sharding::{Placement, Sharding};
use crate::signature::{Split, signature};
use crate::strategy::{AxisUse, Strategy, placements};
use crate::token_order::TokenOrder;
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond, Seconds};
use crate::work::AttentionKernel;

/// A kind of transformer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// Grouped queries, gated MLP, tied embedding.
    Dense,
    /// Grouped queries with a window, routed experts.
    Experts,
    /// Latent attention, experts in groups behind dense first layers.
    Latent,
    /// Queries of the stream over keys of another length, made of numbers of the batch.
    Crossing,
}

/// What an axis is meant to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    Data,
    Tensor,
    TensorSequence,
    Gather,
    /// The sequence of everything; in attention keys travel round a ring.
    Ring,
    Ulysses,
    /// The batch outside, the experts inside.
    Expert,
}

/// A plan in the making.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub family: Family,
    pub axes: Vec<(u64, Policy)>,
    pub zero: u8,
    pub recompute: fn(&str) -> bool,
    pub n_stages: u64,
    pub schedule: Schedule,
    pub n_micro_batches: u64,
    pub slices: Vec<u64>,
    pub per_replica: u64,
    pub n_layers: u64,
    pub vocabulary: u64,
    pub sequence: u64,
}

impl Sample {
    pub(crate) fn new(family: Family, axes: &[(u64, Policy)]) -> Self {
        Self {
            family,
            axes: axes.to_vec(),
            zero: 0,
            recompute: |_| false,
            n_stages: 1,
            schedule: Schedule::OneFOneB,
            slices: Vec::new(),
            n_micro_batches: 2,
            per_replica: 1,
            n_layers: 6,
            vocabulary: 1001,
            sequence: 64,
        }
    }

    pub(crate) fn model(&self) -> Model {
        let (body, n_first): (Vec<Layer>, u64) = match self.family {
            Family::Dense => (vec![decoder("decoder", grouped, |b, x| mlp(b, x, "f"))], 0),
            Family::Experts => (vec![decoder("moe", windowed, |b, x| experts(b, x, 1))], 0),
            Family::Crossing => (vec![decoder("decoder", crossing, |b, x| mlp(b, x, "f"))], 0),
            Family::Latent => {
                let dense = decoder("dense", latent, |b, x| mlp(b, x, "f"));
                (vec![dense, decoder("moe", latent, |b, x| experts(b, x, 4))], 1)
            }
        };
        let mut layers = vec![embedding(self.vocabulary)];
        layers.extend(body);
        layers.push(head(self.vocabulary));
        let last = layers.len() - 1;
        let mut sequence = vec![Segment { layer: 0, count: 1 }];
        if n_first > 0 {
            sequence.push(Segment { layer: 1, count: n_first });
        }
        sequence.push(Segment { layer: last - 1, count: self.n_layers - n_first });
        sequence.push(Segment { layer: last, count: 1 });
        let place = |layer: usize, name: &str| ParameterRef {
            layer,
            tensor: TensorId(layers[layer].tensors.iter().position(|t| t.name == name).unwrap()),
        };
        let ties = match self.family {
            Family::Dense => vec![Tie { owner: place(0, "table"), copy: place(last, "w_logits") }],
            Family::Experts | Family::Latent | Family::Crossing => Vec::new(),
        };
        Model { name: "sample".into(), default_sequence: self.sequence, layers, sequence, ties }
    }

    pub(crate) fn mesh(&self) -> Mesh {
        Mesh::of_sizes(&self.axes.iter().map(|(size, _)| *size).collect::<Vec<_>>()).unwrap()
    }

    pub(crate) fn plan(&self) -> Plan {
        let (model, mesh) = (self.model(), self.mesh());
        let batch_axes = self.axes.iter().filter(|(_, p)| matches!(p, Policy::Data | Policy::Expert));
        let micro_batch = batch_axes.map(|(size, _)| size).product::<u64>() * self.per_replica;
        let job = Job {
            sequence: self.sequence,
            global_batch: micro_batch * self.n_micro_batches,
            precision: Precision::Bf16,
            optimizer: Optimizer::AdamW,
            attention: AttentionKernel::Flash,
            token_order: TokenOrder::Natural,
            engine: Engine::default(),
        };
        let entries =
            model.layers.iter().map(|layer| Entry::of(layer, &mesh, &self.choice(layer, &mesh))).collect();
        let no_layers = crate::names::Arrangement {
            mesh: &mesh,
            layers: Vec::new(),
            n_stages: self.n_stages,
            schedule: self.schedule,
            micro_batch,
            n_micro_batches: self.n_micro_batches,
        };
        let mut plan = Plan {
            schema_version: PLAN_SCHEMA_VERSION,
            tool_version: "0".into(),
            inputs: InputDigests { model: "sha256:0".into(), cluster: "sha256:0".into() },
            job,
            roles: crate::names::roles(&no_layers),
            mesh: mesh.clone(),
            stage_meshes: Vec::new(),
            rank_map: RankMap::StageMajor,
            n_stages: self.n_stages,
            schedule: self.schedule,
            table: None,
            slices: self.slices.clone(),
            micro_batch,
            n_micro_batches: self.n_micro_batches,
            shares: Vec::new(),
            entries,
            chunks: self.chunks(&model),
            predicted: None,
            search: None,
            runners_up: Vec::new(),
            warnings: Vec::new(),
            forms: Vec::new(),
            cluster: cluster(mesh.n_devices() * self.n_stages),
            model: native::write(&model),
        };
        if let Ok(opened) = check::open(&plan) {
            plan.roles = opened.roles(&plan);
        }
        plan
    }

    /// Layers dealt out from the front, the first chunks taking what does not divide.
    fn chunks(&self, model: &Model) -> Vec<Vec<EntryRun>> {
        let kinds = model.kinds_in_order();
        let n_chunks = self.schedule.placement().n_chunks(self.n_stages as u32) as usize;
        let mut chunks = Vec::new();
        let mut at = 0;
        for c in 0..n_chunks {
            let take = (kinds.len() - at).div_ceil(n_chunks - c);
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
        chunks
    }

    pub(crate) fn choice(&self, layer: &Layer, mesh: &Mesh) -> LayerChoice {
        let strategies: Vec<Strategy> = layer.ops.iter().map(|op| self.strategy(layer, op)).collect();
        let mut storage = BTreeMap::new();
        for (op, &strategy) in layer.ops.iter().zip(&strategies) {
            let used = placements(&signature(layer, op), strategy).operands;
            for (&tensor, used) in op.operands.iter().zip(used).filter(|(t, _)| layer.is_parameter(**t)) {
                let whole = whole_axes(mesh, used);
                let from = |stage: u8| if self.zero >= stage { whole } else { AxisSet::EMPTY };
                storage.insert(tensor, Storage::on_device(from(3), from(2), from(1)));
            }
        }
        let again = |op: &Op| if (self.recompute)(&op.name) { Recompute::Again } else { Recompute::Keep };
        let is_loss = layer.has_loss();
        LayerChoice {
            stream: if layer.stream_in.is_empty() { Sharding::REPLICATED } else { self.stream() },
            out: if is_loss { Sharding::REPLICATED } else { self.stream() },
            strategies,
            recompute: layer.ops.iter().map(again).collect(),
            kept: Home::Device,
            parameters: Home::Device,
            storage,
            shared: self.shared(layer),
        }
    }

    /// On one stage the tied embedding is held once.
    fn shared(&self, layer: &Layer) -> BTreeSet<TensorId> {
        let is_copy = |tensor: &TensorId| {
            self.family == Family::Dense && self.n_stages == 1 && layer.tensors[tensor.0].name == "w_logits"
        };
        layer.parameters().filter(is_copy).collect()
    }

    fn stream(&self) -> Sharding {
        let mut stream = Sharding::REPLICATED;
        for (axis, (size, policy)) in self.axes.iter().enumerate() {
            stream.0[axis] = match policy {
                _ if *size == 1 => Placement::Replicate,
                Policy::Data | Policy::Expert => Placement::Shard(0),
                Policy::Tensor => Placement::Replicate,
                Policy::TensorSequence | Policy::Gather | Policy::Ring | Policy::Ulysses => {
                    Placement::Shard(1)
                }
            };
        }
        stream
    }

    fn strategy(&self, layer: &Layer, op: &Op) -> Strategy {
        let sig = signature(layer, op);
        let has_slots =
            |t: &TensorId| layer.labelled_shape(*t, &layer.sizes(1, 1)).iter().any(|d| d.0 == "c");
        let is_expert = op.operands.first().is_some_and(has_slots) && !matches!(op.kind, OpKind::Combine);
        let mut strategy = Strategy::SAME;
        for (axis, (size, policy)) in self.axes.iter().enumerate() {
            let wanted: &[&str] = match policy {
                _ if *size == 1 => &[],
                Policy::Data => &["b"],
                Policy::Tensor => &["k", "f", "v"],
                Policy::TensorSequence => &["k", "f", "v", "s"],
                Policy::Gather | Policy::Ring => &["s"],
                Policy::Ulysses if matches!(op.kind, OpKind::Attention { .. }) => &["k"],
                Policy::Ulysses => &["s"],
                Policy::Expert if is_expert => &["e"],
                Policy::Expert => &["b"],
            };
            let found = wanted.iter().filter_map(|name| sig.factor(name));
            let mut open = found.filter(|factor| sig.factors[factor.0 as usize].split != Split::Whole);
            strategy.0[axis] = match sig.ring {
                Some(ring) if *policy == Policy::Ring && *size > 1 => AxisUse::Ring(ring),
                _ => open.next().map_or(AxisUse::Same, AxisUse::Factor),
            };
        }
        strategy
    }
}

fn start(name: &str) -> LayerBuilder {
    let mut b = LayerBuilder::new(name);
    b.fixed("h", 512);
    b
}

fn norm(b: &mut LayerBuilder, name: &str, x: TensorId) -> TensorId {
    let weight = b.parameter(&format!("{name}.weight"), "h", Init::One);
    b.op(name, OpKind::RmsNorm { eps: 1e-5, shift: 0.0 }, &[x, weight], "b s h")
}

fn linear(b: &mut LayerBuilder, name: &str, x: TensorId, dims: [&str; 2]) -> TensorId {
    let weight = b.parameter(&format!("w_{name}"), dims[0], Init::Normal);
    b.op(name, OpKind::Linear, &[x, weight], dims[1])
}

fn decoder(
    name: &str,
    attention: fn(&mut LayerBuilder, TensorId) -> TensorId,
    feed: fn(&mut LayerBuilder, TensorId) -> TensorId,
) -> Layer {
    let mut b = start(name);
    let x = b.stream();
    let n = norm(&mut b, "norm1", x);
    let a = attention(&mut b, n);
    let x = b.op("add1", OpKind::Add, &[x, a], "b s h");
    let n = norm(&mut b, "norm2", x);
    let m = feed(&mut b, n);
    let out = b.op("add2", OpKind::Add, &[x, m], "b s h");
    b.finish(out)
}

fn grouped(b: &mut LayerBuilder, x: TensorId) -> TensorId {
    queries_and_keys(b, x, None)
}

fn windowed(b: &mut LayerBuilder, x: TensorId) -> TensorId {
    queries_and_keys(b, x, Some(16))
}

/// 16 key heads of 2 query heads each; half of each head is rotated.
fn queries_and_keys(b: &mut LayerBuilder, x: TensorId, window: Option<u64>) -> TensorId {
    for (dim, length) in [("k", 16), ("r", 2), ("d", 32)] {
        b.fixed(dim, length);
    }
    let positions = b.tensor("positions", "s", Role::Data(Data::Positions));
    let rope = OpKind::Rope { theta: 1e4, dims: 16, side: RotarySide::First };
    let q = linear(b, "q", x, ["h k r d", "b s k r d"]);
    let q = b.op("q_rope", rope.clone(), &[q, positions], "b s k r d");
    let k = linear(b, "k", x, ["h k d", "b s k d"]);
    let k = b.op("k_rope", rope, &[k, positions], "b s k d");
    let v = linear(b, "v", x, ["h k d", "b s k d"]);
    let core = OpKind::Attention {
        scale: None,
        window,
        softcap: None,
        bias: AttentionBias::None,
        mask: AttentionMask::Causal,
    };
    let o = b.op("core", core, &[q, k, v, positions, positions], "b s k r d");
    linear(b, "o", o, ["k r d h", "b s h"])
}

/// Queries over 24 places of 48 numbers each, which see the six before them; then those of the stream over all of them.
fn crossing(b: &mut LayerBuilder, x: TensorId) -> TensorId {
    for (dim, length) in [("k", 16), ("r", 2), ("d", 32), ("m", 24), ("w", 48), ("q", 26)] {
        b.fixed(dim, length);
    }
    let patches = b.tensor("patches", "b m w", Role::Data(Data::Features));
    let places = b.tensor("places", "m", Role::Data(Data::Positions));
    let rows = b.parameter("rows", "q h", Init::Normal);
    let core = |window, mask| {
        let bias = AttentionBias::None;
        OpKind::Attention { scale: None, window, softcap: None, bias, mask }
    };
    let e = linear(b, "patch", patches, ["w h", "b m h"]);
    let e = b.op("placed", OpKind::AddPosition { offset: 2 }, &[e, places, rows], "b m h");
    let (q, k) = (linear(b, "eq", e, ["h k r d", "b m k r d"]), linear(b, "ek", e, ["h k d", "b m k d"]));
    let v = linear(b, "ev", e, ["h k d", "b m k d"]);
    let seen = core(Some(6), AttentionMask::Causal);
    let o = b.op("seen", seen, &[q, k, v, places, places], "b m k r d");
    let e = linear(b, "eo", o, ["k r d h", "b m h"]);
    let (q, k) = (linear(b, "q", x, ["h k r d", "b s k r d"]), linear(b, "k", e, ["h k d", "b m k d"]));
    let v = linear(b, "v", e, ["h k d", "b m k d"]);
    let o = b.op("core", core(None, AttentionMask::Full), &[q, k, v], "b s k r d");
    linear(b, "o", o, ["k r d h", "b s h"])
}

/// Keys and values from 64 compressed elements; 24 elements of a head, of which the last 8 are rotated and shared.
fn latent(b: &mut LayerBuilder, x: TensorId) -> TensorId {
    for (dim, length) in
        [("k", 16), ("r", 1), ("d", 24), ("m", 16), ("p", 8), ("n", 16), ("l", 64), ("j", 72)]
    {
        b.fixed(dim, length);
    }
    let positions = b.tensor("positions", "s", Role::Data(Data::Positions));
    let rope = |side| OpKind::Rope { theta: 1e4, dims: 8, side };
    let q = linear(b, "q", x, ["h k r d", "b s k r d"]);
    let q = b.op("q_rope", rope(RotarySide::Last), &[q, positions], "b s k r d");
    let joint = linear(b, "kv_down", x, ["h j", "b s j"]);
    let split = OpKind::Split { sizes: vec![64, 8] };
    let parts = b.op_many("kv_split", split, &[joint], &[("compressed", "b s l"), ("shared", "b s p")]);
    let shared = b.op("k_rope", rope(RotarySide::First), &[parts[1], positions], "b s p");
    let k = linear(b, "k", parts[0], ["l k m", "b s k m"]);
    let v = linear(b, "v", parts[0], ["l k n", "b s k n"]);
    let k = b.op("k_append", OpKind::AppendShared, &[k, shared], "b s k d");
    let core = OpKind::CAUSAL_ATTENTION;
    let o = b.op("core", core, &[q, k, v, positions, positions], "b s k r n");
    linear(b, "o", o, ["k r n h", "b s h"])
}

fn mlp(b: &mut LayerBuilder, x: TensorId, inner: &str) -> TensorId {
    b.fixed(inner, 1536);
    let gate = linear(b, "gate", x, ["h f", "b s f"]);
    let up = linear(b, "up", x, ["h f", "b s f"]);
    let act = OpKind::Glu { gating: Gating::Product { act: Activation::Silu } };
    let y = b.op("glu", act, &[gate, up], "b s f");
    linear(b, "down", y, ["f h", "b s h"])
}

/// 32 experts, 4 to a token, in `groups` groups of which the best half is chosen from.
fn experts(b: &mut LayerBuilder, x: TensorId, groups: u64) -> TensorId {
    b.fixed("e", 32);
    b.dim("c", Extent::Slots { filled: 0.125, capacity: None });
    b.fixed("f", 256);
    let logits = linear(b, "router", x, ["h e", "b s e"]);
    let bias = b.tensor("correction", "e", Role::Data(Data::RouterBias));
    let route = OpKind::Route {
        top_k: 4,
        score: RouterScore::Sigmoid,
        normalize: Normalize::Sum,
        scale: 1.0,
        groups,
        top_groups: groups.div_ceil(2),
        group_score: if groups > 1 { GroupScore::TopTwo } else { GroupScore::Max },
    };
    let weight = b.op("route", route, &[logits, bias], "b s e");
    let tokens = b.op("dispatch", OpKind::Dispatch, &[x, weight], "b e c h");
    let gate = linear(b, "gate", tokens, ["e h f", "b e c f"]);
    let up = linear(b, "up", tokens, ["e h f", "b e c f"]);
    let act = OpKind::Glu { gating: Gating::Product { act: Activation::Silu } };
    let y = b.op("glu", act, &[gate, up], "b e c f");
    let y = linear(b, "down", y, ["e f h", "b e c h"]);
    b.op("combine", OpKind::Combine, &[y, weight], "b s h")
}

fn embedding(vocabulary: u64) -> Layer {
    let mut b = start("embedding");
    b.dim("v", Extent::Uneven(vocabulary));
    b.fixed("p", 130);
    let tokens = b.tensor("tokens", "b s", Role::Data(Data::Tokens));
    let positions = b.tensor("positions", "s", Role::Data(Data::Positions));
    let table = b.parameter("table", "v h", Init::Normal);
    let rows = b.parameter("rows", "p h", Init::Normal);
    let x = b.op("lookup", OpKind::Embed, &[tokens, table], "b s h");
    let x = b.op("add_position", OpKind::AddPosition { offset: 2 }, &[x, positions, rows], "b s h");
    b.finish(x)
}

fn head(vocabulary: u64) -> Layer {
    let mut b = start("head");
    b.dim("v", Extent::Uneven(vocabulary));
    let x = b.stream();
    let z = norm(&mut b, "norm", x);
    let z = linear(&mut b, "logits", z, ["v h", "b s v"]);
    let labels = b.tensor("labels", "b s", Role::Data(Data::Labels));
    let max = b.op("row_max", OpKind::RowMax, &[z], "b s");
    let sum = b.op("sum_exp", OpKind::SumExp, &[z, max], "b s");
    let picked = b.op("pick", OpKind::Pick, &[z, labels], "b s");
    let each = b.op("cross_entropy", OpKind::CrossEntropy, &[sum, max, picked], "b s");
    let loss = b.op("loss", OpKind::SumLoss, &[each], "");
    b.finish(loss)
}

/// Drives of a node.
pub(crate) fn drives() -> Nvme {
    let rate = BytesPerSecond(1e9);
    Nvme { capacity_bytes: Bytes(1e12), read_bytes_per_s: rate, write_bytes_per_s: rate }
}

/// One group of plain devices behind one tier.
pub(crate) fn cluster(n_devices: u64) -> Cluster {
    let device = Device {
        name: "sample".into(),
        architecture: Architecture::Other,
        peak_flops_per_s: BTreeMap::from([(Precision::Bf16, FlopsPerSecond(1e12))]),
        memory_bytes: Bytes(1e9),
        memory_bandwidth_bytes_per_s: BytesPerSecond(1e10),
        compute_units: 1,
        host_link_bytes_per_s: BytesPerSecond(1e9),
        watts: None,
    };
    let group = DeviceGroup {
        device,
        count: n_devices,
        devices_per_node: n_devices,
        host_memory_bytes: Bytes(1e9),
        nvme: None,
        price_per_device_hour: None,
        failures_per_device_hour: None,
        links: Vec::new(),
        nodes: None,
        part_of: None,
    };
    let tier = Tier {
        name: "link".into(),
        devices: n_devices,
        bandwidth_bytes_per_s: BytesPerSecond(1e9),
        latency_s: Seconds(1e-6),
        wiring: Wiring::Switch,
        oversubscription: 1.0,
        routing: Default::default(),
        in_switch_reduction: InSwitchReduction::Absent,
    };
    Cluster {
        schema_version: 1,
        name: "sample".into(),
        groups: vec![group],
        tiers: vec![tier],
        reserve_bytes: Bytes(0.0),
        calibration: None,
    }
}
