//! What the search finds on its own: nothing in it names a parallelism.

use cost_model::Constants;
use ir::cluster::{Architecture, Cluster, Device, DeviceGroup, InSwitchReduction, Precision, Tier, Wiring};
use ir::graph::Layer;
use ir::mesh::Mesh;
use ir::op_work::KernelChoice;
use ir::units::{Bytes, BytesPerSecond, FlopsPerSecond, Seconds};
use ir::work::AttentionKernel;

use crate::layer_problem::{Clock, Given, LayerProblem};
use crate::menu::{Candidate, fastest};
use crate::prices::{Machine, Prices};
use crate::test_models::{Width, dense, experts, mlp_only};

/// Nodes of eight A100 with a network of 25 GB/s per device.
fn cluster(n_nodes: u64) -> Cluster {
    let device = Device {
        name: "a100".into(),
        architecture: Architecture::Ampere,
        peak_flops_per_s: [(Precision::Bf16, FlopsPerSecond(312e12))].into(),
        memory_bytes: Bytes(80e9),
        memory_bandwidth_bytes_per_s: BytesPerSecond(2.039e12),
        compute_units: 108,
        host_link_bytes_per_s: BytesPerSecond(31e9),
        watts: None,
    };
    let tier = |name: &str, devices, bandwidth, latency| Tier {
        name: name.into(),
        devices,
        bandwidth_bytes_per_s: BytesPerSecond(bandwidth),
        latency_s: Seconds(latency),
        wiring: Wiring::Switch,
        oversubscription: 1.0,
        in_switch_reduction: InSwitchReduction::Absent,
    };
    Cluster {
        schema_version: 1,
        name: "test".into(),
        groups: vec![DeviceGroup {
            device,
            count: 8 * n_nodes,
            devices_per_node: 8,
            host_memory_bytes: Bytes(1e12),
            price_per_device_hour: None,
            failures_per_device_hour: None,
        }],
        tiers: vec![tier("nvlink", 8, 300e9, 2e-6), tier("infiniband", 8 * n_nodes, 25e9, 5e-6)],
        reserve_bytes: Bytes(2e9),
    }
}

/// The menu of a layer on a mesh, one line per operator of the entry at `pick` and its collectives.
fn menu(layer: &Layer, n_nodes: u64, axes: &[u64], batch: (u64, u64), clock: Clock) -> Vec<Candidate> {
    let cluster = cluster(n_nodes);
    let constants = Constants::load();
    let mesh = Mesh::of_sizes(axes).unwrap();
    let machine = Machine {
        cluster: &cluster,
        device: &cluster.groups[0].device,
        constants: &constants,
        precision: Precision::Bf16,
        kernels: KernelChoice { attention: AttentionKernel::Flash, element_bytes: 2.0 },
    };
    let prices = Prices::new(machine, &mesh, &[]);
    let sizes = layer.sizes(batch.0, batch.1);
    let problem = LayerProblem::new(layer, &sizes, &prices, clock, &Given::default()).unwrap();
    let (_, unit, _) = fastest(&problem).unwrap();
    crate::menu::menu(layer, &sizes, &prices, &problem, (unit, &crate::menu::MEMORY_PRICES)).unwrap().entries
}

fn describe(layer: &Layer, candidate: &Candidate) -> String {
    let mut text = String::new();
    for (op, (strategy, again)) in
        layer.ops.iter().zip(candidate.choice.strategies.iter().zip(&candidate.choice.recompute))
    {
        let sig = ir::signature::signature(layer, op);
        let uses: Vec<String> = strategy
            .0
            .iter()
            .map(|one| match one {
                ir::strategy::AxisUse::Factor(f) => sig.factors[f.0 as usize].name.clone(),
                other => format!("{other:?}").to_lowercase(),
            })
            .collect();
        text += &format!("{} {} {again:?}\n", op.name, uses.join(","));
    }
    text + &format!("{:?}\n{:?}\n", candidate.choice.stream, candidate.choice.storage)
}

const LLAMA_7B: Width = Width { hidden: 4096, kv_heads: 32, group: 1, head: 128, ffn: 11008 };
const STEADY: Clock = Clock { micro_batches: 16.0, in_flight: 1.0 };

#[test]
fn scratch() {
    let layer = dense(LLAMA_7B);
    for (axes, nodes, batch) in [(vec![8_u64], 1, (8, 4096)), (vec![2, 8], 2, (2, 4096)), (vec![4,4], 2, (4, 4096))] {
        let t = std::time::Instant::now();
        let list = menu(&layer, nodes, &axes, batch, STEADY);
        println!("=== {axes:?} {} {:?}", list.len(), t.elapsed());
        for c in &list { println!("{} saved {}\n{}", c.objective, c.program.saved.len(), describe(&layer, c)); }
    }
    let layer = experts(Width { ffn: 14336, ..LLAMA_7B }, 8, 2);
    for (axes, nodes, batch) in [(vec![8_u64], 1, (8, 4096))] {
        let list = menu(&layer, nodes, &axes, batch, STEADY);
        println!("=== moe {axes:?} {}", list.len());
        for c in &list { println!("{}\n{}", c.objective, describe(&layer, c)); }
    }
    let _ = mlp_only(LLAMA_7B);
}
