//! Layers and clusters built by hand for tests of the search.

use std::collections::BTreeMap;

use cost_model::Constants;
use ir::builder::LayerBuilder;
use ir::cluster::{
    Architecture, CLUSTER_SCHEMA_VERSION, Cluster, Device, DeviceGroup, InSwitchReduction, Precision, Tier,
    Wiring,
};
use ir::engine::{Engine, GradientFormat, TensorOverlap};
use ir::graph::{Data, Extent, Init, Layer, Role, TensorId};
use ir::op::{Activation, Gating, GroupScore, Normalize, OpKind, RotarySide, RouterScore};
use ir::op_work::KernelChoice;
use ir::token_order::TokenOrder;
use ir::units::{Bytes, BytesPerSecond, FlopsPerSecond, Seconds};
use ir::work::AttentionKernel;

use crate::prices::Machine;

/// Sizes of a small transformer.
#[derive(Clone, Copy)]
pub(crate) struct Width {
    pub hidden: u64,
    pub kv_heads: u64,
    pub group: u64,
    pub head: u64,
    pub ffn: u64,
}

fn norm(b: &mut LayerBuilder, name: &str, x: TensorId) -> TensorId {
    let g = b.parameter(&format!("{name}.weight"), "h", Init::One);
    b.op(name, OpKind::RmsNorm { eps: 1e-5, shift: 0.0 }, &[x, g], "b s h")
}

fn attention(b: &mut LayerBuilder, x: TensorId) -> TensorId {
    let positions = b.tensor("positions", "s", Role::Data(Data::Positions));
    let [wq, wk, wv] = [("wq", "h k r d"), ("wk", "h k d"), ("wv", "h k d")]
        .map(|(name, dims)| b.parameter(name, dims, Init::Normal));
    let rope = OpKind::Rope { theta: 1e4, dims: 1 << 20, side: RotarySide::First };
    let q = b.op("q", OpKind::Linear, &[x, wq], "b s k r d");
    let q = b.op("q.rope", rope.clone(), &[q, positions], "b s k r d");
    let k = b.op("k", OpKind::Linear, &[x, wk], "b s k d");
    let k = b.op("k.rope", rope, &[k, positions], "b s k d");
    let v = b.op("v", OpKind::Linear, &[x, wv], "b s k d");
    let core = OpKind::CAUSAL_ATTENTION;
    let o = b.op("core", core, &[q, k, v, positions, positions], "b s k r d");
    let wo = b.parameter("wo", "k r d h", Init::Normal);
    b.op("o", OpKind::Linear, &[o, wo], "b s h")
}

fn mlp(b: &mut LayerBuilder, x: TensorId) -> TensorId {
    let [wg, wu] = ["w_gate", "w_up"].map(|name| b.parameter(name, "h f", Init::Normal));
    let gate = b.op("gate", OpKind::Linear, &[x, wg], "b s f");
    let up = b.op("up", OpKind::Linear, &[x, wu], "b s f");
    let act =
        b.op("glu", OpKind::Glu { gating: Gating::Product { act: Activation::Silu } }, &[gate, up], "b s f");
    let wd = b.parameter("w_down", "f h", Init::Normal);
    b.op("down", OpKind::Linear, &[act, wd], "b s h")
}

fn start(name: &str, width: Width) -> LayerBuilder {
    let mut b = LayerBuilder::new(name);
    for (dim, length) in
        [("h", width.hidden), ("k", width.kv_heads), ("r", width.group), ("d", width.head), ("f", width.ffn)]
    {
        b.fixed(dim, length);
    }
    b
}

/// Norm, attention, residual, norm, gated MLP, residual.
pub(crate) fn dense(width: Width) -> Layer {
    let mut b = start("decoder", width);
    let x = b.stream();
    let n = norm(&mut b, "norm1", x);
    let a = attention(&mut b, n);
    let x = b.op("add1", OpKind::Add, &[x, a], "b s h");
    let n = norm(&mut b, "norm2", x);
    let m = mlp(&mut b, n);
    let out = b.op("add2", OpKind::Add, &[x, m], "b s h");
    b.finish(out)
}

/// Norm, gated MLP, residual.
pub(crate) fn mlp_only(width: Width) -> Layer {
    let mut b = start("mlp", width);
    let x = b.stream();
    let n = norm(&mut b, "norm", x);
    let m = mlp(&mut b, n);
    let out = b.op("add", OpKind::Add, &[x, m], "b s h");
    b.finish(out)
}

/// Norm, routed experts, residual.
pub(crate) fn experts(width: Width, experts: u64, top_k: u64) -> Layer {
    let mut b = start("moe", width);
    b.fixed("e", experts);
    b.dim("c", Extent::Slots { filled: top_k as f64 / experts as f64, capacity: None });
    let x = b.stream();
    let n = norm(&mut b, "norm", x);
    let w_router = b.parameter("w_router", "h e", Init::Normal);
    let logits = b.op("router", OpKind::Linear, &[n, w_router], "b s e");
    let route = OpKind::Route {
        top_k,
        score: RouterScore::SoftmaxOfChosen,
        normalize: Normalize::No,
        scale: 1.0,
        groups: 1,
        top_groups: 1,
        group_score: GroupScore::Max,
    };
    let weight = b.op("route", route, &[logits], "b s e");
    let slots = b.op("dispatch", OpKind::Dispatch, &[n, weight], "b e c h");
    let [wg, wu] = ["w_gate", "w_up"].map(|name| b.parameter(name, "e h f", Init::Normal));
    let gate = b.op("gate", OpKind::Linear, &[slots, wg], "b e c f");
    let up = b.op("up", OpKind::Linear, &[slots, wu], "b e c f");
    let glu = OpKind::Glu { gating: Gating::Product { act: Activation::Silu } };
    let act = b.op("glu", glu, &[gate, up], "b e c f");
    let wd = b.parameter("w_down", "e f h", Init::Normal);
    let down = b.op("down", OpKind::Linear, &[act, wd], "b e c h");
    let m = b.op("combine", OpKind::Combine, &[down, weight], "b s h");
    let out = b.op("add", OpKind::Add, &[x, m], "b s h");
    b.finish(out)
}

/// Devices in nodes of eight, `slow` times as slow as an A100 and with as much less memory.
fn group(name: &str, count: u64, (slow, memory_bandwidth): (f64, f64)) -> DeviceGroup {
    DeviceGroup {
        device: Device {
            name: name.into(),
            architecture: Architecture::Ampere,
            peak_flops_per_s: BTreeMap::from([(Precision::Bf16, FlopsPerSecond(312e12 / slow))]),
            memory_bytes: Bytes(80e9 / slow),
            memory_bandwidth_bytes_per_s: BytesPerSecond(memory_bandwidth),
            compute_units: 108,
            host_link_bytes_per_s: BytesPerSecond(31e9),
            watts: None,
        },
        count,
        devices_per_node: 8,
        host_memory_bytes: Bytes(1e12),
        nvme: None,
        price_per_device_hour: None,
        failures_per_device_hour: None,
        links: Vec::new(),
        nodes: None,
        part_of: None,
    }
}

fn tier(name: &str, devices: u64, (bandwidth, latency): (f64, f64)) -> Tier {
    Tier {
        name: name.into(),
        devices,
        bandwidth_bytes_per_s: BytesPerSecond(bandwidth),
        latency_s: Seconds(latency),
        wiring: Wiring::Switch,
        oversubscription: 1.0,
        routing: Default::default(),
        in_switch_reduction: InSwitchReduction::Absent,
    }
}

fn cluster(name: &str, (groups, tiers): (Vec<DeviceGroup>, Vec<Tier>), reserve: f64) -> Cluster {
    Cluster {
        schema_version: CLUSTER_SCHEMA_VERSION,
        name: name.into(),
        groups,
        tiers,
        reserve_bytes: Bytes(reserve),
        calibration: None,
    }
}

/// A cluster of groups of so many devices, each group's of its own kind, and of tiers of so many.
pub(crate) fn mixed(counts: &[u64], tiers: &[u64]) -> Cluster {
    let group_of =
        |(at, &count): (usize, &u64)| group(&format!("device {at}"), count, ((at + 1) as f64, 2e12));
    let tier_of = |(at, &devices): (usize, &u64)| {
        tier(&format!("tier {at}"), devices, (300e9 / 10_f64.powi(at as i32), 2e-6))
    };
    let groups = counts.iter().enumerate().map(group_of).collect();
    cluster("mixed", (groups, tiers.iter().enumerate().map(tier_of).collect()), 4e9)
}

/// Nodes of eight A100 with a network of 25 GB/s per device.
pub(crate) fn a100s(n_nodes: u64) -> Cluster {
    let groups = vec![group("a100", 8 * n_nodes, (1.0, 2.039e12))];
    let tiers = vec![tier("nvlink", 8, (300e9, 2e-6)), tier("infiniband", 8 * n_nodes, (25e9, 5e-6))];
    cluster("test", (groups, tiers), 2e9)
}

/// Those machines with flash attention and 16-bit numbers.
pub(crate) fn machine<'a>(cluster: &'a Cluster, constants: &'a Constants) -> Machine<'a> {
    Machine {
        cluster,
        device: &cluster.groups[0].device,
        home: None,
        constants,
        precision: Precision::Bf16,
        kernels: KernelChoice::of(&Engine::default(), (AttentionKernel::Flash, TokenOrder::ZigZag), 2.0),
        gradients: GradientFormat::Full,
        tensor_overlap: TensorOverlap::Absent,
    }
}

/// Norm, product, residual: a layer with few enough choices to try them all.
pub(crate) fn one_product(width: Width) -> Layer {
    let mut b = start("product", width);
    let x = b.stream();
    let n = norm(&mut b, "norm", x);
    let w = b.parameter("w", "h f", Init::Normal);
    let y = b.op("linear", OpKind::Linear, &[n, w], "b s f");
    let v = b.parameter("v", "f h", Init::Normal);
    let z = b.op("back", OpKind::Linear, &[y, v], "b s h");
    let out = b.op("add", OpKind::Add, &[x, z], "b s h");
    b.finish(out)
}
