//! What a layer's choices weigh for states and for what a stage has once for all its layers, held to the programs that they mean.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use cost_model::Constants;
use cost_model::memory::gathered_units;
use cost_model::program_memory::program_memory;
use frontends::{read_cluster, read_model, shipped_cluster, shipped_model};
use ir::engine::{Accumulation, Engine};
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
const PRICES: [f64; 5] = [0.0, 0.1, 1.0, 10.0, 1000.0];

/// Layers of a stage on average: no whole number.
const LAYERS: f64 = 7.5;

/// Bytes of a device.
struct Held {
    /// As the choices weigh them.
    weighed: f64,
    /// States of the program.
    states: f64,
    /// What stands for gradients.
    stand_ins: f64,
    /// Parameters gathered for use and their gradients, with what the allocator holds beside them.
    gathered: f64,
}

/// The layers of a model on four devices, at several prices.
fn held(model: &str, accumulation: Accumulation, given: &Given) -> Vec<Held> {
    let model = read_model(model, shipped_model(model).unwrap().text).unwrap();
    let cluster = read_cluster("dgx-a100-80", shipped_cluster("dgx-a100-80").unwrap().text).unwrap();
    let constants = Constants::load().under(Engine { accumulation, ..Engine::default() });
    let mesh = Mesh::of_sizes(&[2, 2]).unwrap();
    let machine = machine(&cluster, &constants, TokenOrder::ZigZag);
    let context = memory_context(&machine);
    let prices = Prices::new(machine, &mesh, &[]);
    let layer = model.layers.iter().find(|layer| !layer.is_end()).unwrap();
    let sizes = layer.sizes(4, 1024);
    let clock = Clock::after((8.0, 2.0), LAYERS);
    let problem = LayerProblem::new(layer, &sizes, &prices, clock, given).unwrap();
    let troubles = Troubles::default();
    let chooser = Chooser::new(Solver::Structured, &problem, &troubles);
    let fastest = problem.problem.total(&chooser.cheapest(0.0).unwrap().choices).unwrap();
    let at = |multiple: &f64| {
        let choices = chooser.cheapest(multiple * fastest.time / fastest.memory).unwrap().choices;
        let program = lower(layer, &mesh, &sizes, &problem.choice(&choices)).unwrap();
        let memory = program_memory(&context, layer, &mesh, &sizes, &program);
        let gathered = gathered_units(std::iter::once(memory.unit(LAYERS)));
        Held {
            weighed: choices
                .iter()
                .zip(&problem.problem.nodes)
                .map(|(&at, node)| node.choices[at].memory)
                .sum(),
            states: memory.states().0,
            stand_ins: memory.stand_ins.0,
            gathered: gathered.0 * constants.fragmentation_factor,
        }
    };
    PRICES.iter().map(at).collect()
}

#[track_caller]
fn assert_weighed(all: &[Held], layers: f64) {
    for Held { weighed, states, stand_ins, gathered } in all {
        let had = states + (stand_ins + gathered) / layers;
        assert!((weighed / had - 1.0).abs() < 1e-9, "{weighed} of {had}: {states}, {stand_ins}, {gathered}");
    }
}

#[test]
fn choices_weigh_their_share_of_what_a_stage_has_once() {
    for model in ["llama-3-8b", "gpt2-xl", "mixtral-8x7b"] {
        for accumulation in [Accumulation::Fused, Accumulation::Separate] {
            let all = held(model, accumulation, &Given::default());
            assert_weighed(&all, LAYERS);
            assert_eq!(
                all.iter().any(|one| one.stand_ins > 0.0),
                accumulation == Accumulation::Fused,
                "{model}"
            );
            assert!(all.iter().any(|one| one.gathered > 0.0), "{model}: nothing is gathered");
        }
    }
}

#[test]
fn a_bound_weighs_no_more_of_it_than_a_stage_with_most_layers_has() {
    let given = Given { of_bound: true, ..Given::default() };
    assert_weighed(&held("llama-3-8b", Accumulation::Fused, &given), LAYERS.ceil());
}
