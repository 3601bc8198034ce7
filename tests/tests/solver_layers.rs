//! The structured solver and the integer program on the layers of real models: each is the other's check.

use cost_model::Constants;
use frontends::{read_cluster, read_model, shipped_cluster, shipped_model};
use ir::graph::Model;
use ir::mesh::Mesh;
use ir::op_work::KernelChoice;
use ir::work::AttentionKernel;
use planner::layer_problem::{Clock, Given, LayerProblem};
use planner::prices::{Machine, Prices};
use planner::problem::Problem;
use planner::{ilp, solve};

fn model(name: &str) -> Model {
    read_model(name, shipped_model(name).unwrap().text).unwrap()
}

#[test]
fn scratch() {
    let cluster = read_cluster("dgx-a100-80", shipped_cluster("dgx-a100-80").unwrap().text).unwrap();
    let constants = Constants::load();
    for name in ["gpt2", "llama-3-8b", "gemma-2-9b", "qwen2.5-7b", "falcon-7b", "bloom-176b", "opt-13b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v2"] {
        let model = model(name);
        for sizes in [&[2][..], &[4], &[2, 2]] {
            let mesh = Mesh::of_sizes(sizes).unwrap();
            let machine = Machine {
                cluster: &cluster,
                device: &cluster.groups[0].device,
                constants: &constants,
                precision: ir::cluster::Precision::Bf16,
                kernels: KernelChoice { attention: AttentionKernel::Flash, element_bytes: 2.0 },
            };
            let prices = Prices::new(machine, &mesh, &[]);
            for layer in &model.layers {
                let lengths = layer.sizes(4, 2048);
                let clock = Clock { micro_batches: 8.0, in_flight: 2.0 };
                let t = std::time::Instant::now();
                let Some(problem) = LayerProblem::new(layer, &lengths, &prices, clock, &Given::default()) else { println!("none"); continue };
                let p: &Problem = &problem.problem;
                let build = t.elapsed();
                let t = std::time::Instant::now();
                println!("{name} {sizes:?} {} nodes {} choices {} pairs {} build {build:?}",  layer.name, p.nodes.len(), p.nodes.iter().map(|n| n.choices.len()).sum::<usize>(), p.edges.iter().map(|e| e.table.len()).sum::<usize>());
                let free = solve::solve(p, f64::INFINITY).unwrap();
                let st = t.elapsed();
                let least = p.total(&solve::eliminate(p, 1.0).unwrap().1).unwrap().memory;
                let cap = least + 0.6 * (free.solution.cost.memory - least);
                let t = std::time::Instant::now();
                println!("   free {st:?}");
                if p.edges.iter().map(|e| e.table.len()).sum::<usize>() > 1500 { continue }
                let rel = solve::relax(p, cap).unwrap();
                println!("   relax {:?} gap {:e}", t.elapsed(), rel.solution.cost.time / rel.bound - 1.0);
                let j = ilp::solve(p, cap).map(|s| s.cost.time / rel.bound - 1.0);
                println!("    ilp {j:?} {:?}", t.elapsed());
                if true { continue }
                let tight = solve::solve(p, cap).unwrap();
                let tt = t.elapsed();
                println!("{name} {sizes:?} {} nodes {} choices {} pairs {} build {build:?} free {st:?} tight {tt:?} gap {:e}", layer.name, p.nodes.len(), p.nodes.iter().map(|n| n.choices.len()).sum::<usize>(), p.edges.iter().map(|e| e.table.len()).sum::<usize>(), tight.solution.cost.time / tight.bound - 1.0);
                if p.edges.iter().map(|e| e.table.len()).sum::<usize>() < 1500 {
                let t = std::time::Instant::now();
                let i = ilp::solve(p, f64::INFINITY).map(|s| s.cost.time / free.solution.cost.time - 1.0);
                let it = t.elapsed();
                let t = std::time::Instant::now();
                let j = ilp::solve(p, cap).map(|s| s.cost.time / tight.solution.cost.time - 1.0);
                println!("    ilp {i:?} {it:?}  {j:?} {:?}", t.elapsed());
                }
            }
        }
    }
}
