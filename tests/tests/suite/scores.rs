//! What a head's choices weigh for its scores, held to the programs that they mean.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use cost_model::Constants;
use cost_model::program_memory::program_memory;
use frontends::{read_cluster, read_model, shipped_cluster, shipped_model};
use ir::engine::{Engine, LossKernel};
use ir::lower::lower;
use ir::mesh::Mesh;
use ir::token_order::TokenOrder;
use planner::chooser::{Chooser, Troubles};
use planner::clock::Clock;
use planner::given::Given;
use planner::layer_problem::LayerProblem;
use planner::prices::Prices;
use planner::request::Solver;
use tests::layers::{machine, memory_context};

/// Prices of a byte, in multiples of what makes all bytes as dear as all seconds.
const PRICES: [f64; 4] = [0.0, 0.1, 1.0, 10.0];

/// Bytes that programs of the head of a model have at the peak of the loss, and what their choices weigh for it: on
/// four devices, at several prices.
fn scores(model: &str, loss: LossKernel) -> Vec<(f64, f64)> {
    let model = read_model(model, shipped_model(model).unwrap().text).unwrap();
    let cluster = read_cluster("dgx-a100-80", shipped_cluster("dgx-a100-80").unwrap().text).unwrap();
    let constants = Constants::load().under(Engine { loss, ..Engine::default() });
    let mesh = Mesh::of_sizes(&[2, 2]).unwrap();
    let machine = machine(&cluster, &constants, TokenOrder::ZigZag);
    let context = memory_context(&machine);
    let prices = Prices::new(machine, &mesh, &[]);
    let layer = model.layers.iter().find(|layer| layer.has_loss()).unwrap();
    let sizes = layer.sizes(4, 1024);
    let clock = Clock::after((8.0, 2.0), 16.0);
    let problem = LayerProblem::new(layer, &sizes, &prices, clock, &Given::default()).unwrap();
    let troubles = Troubles::default();
    let chooser = Chooser::new(Solver::Structured, &problem, &troubles);
    let fastest = problem.problem.total(&chooser.cheapest(0.0).unwrap().choices).unwrap();
    let at = |multiple: &f64| {
        let found = chooser.cheapest(multiple * fastest.time / fastest.memory).unwrap();
        let program = lower(layer, &mesh, &sizes, &problem.choice(&found.choices)).unwrap();
        let memory = program_memory(&context, layer, &mesh, &sizes, &program);
        (memory.logits.0 * constants.fragmentation_factor, problem.beside(&found.choices))
    };
    PRICES.iter().map(at).collect()
}

#[test]
fn choices_weigh_no_more_for_scores_than_their_programs_have() {
    for model in ["llama-3-8b", "gpt2", "gemma-2-9b"] {
        for (loss, is_more) in
            [(LossKernel::Plain, true), (LossKernel::Unfused, true), (LossKernel::Fused, false)]
        {
            let all = scores(model, loss);
            for (had, weighed) in &all {
                assert!(*weighed <= had * (1.0 + 1e-9), "{model} {loss:?}: {weighed} of {had}");
            }
            let whole = all.iter().filter(|(had, weighed)| *weighed > 0.0 && *weighed >= had * 0.999).count();
            assert!(!is_more || whole > 0, "{model} {loss:?}: {all:?}");
        }
    }
}
