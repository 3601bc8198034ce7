//! What a layer's choices weigh for states, for what a stage has once for all its layers and for what hosts have, held
//! to the programs that they mean.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use cost_model::Constants;
use cost_model::memory::gathered_units;
use cost_model::program_memory::{MemoryContext, ProgramMemory, program_memory};
use frontends::{read_cluster, read_model, shipped_cluster, shipped_model};
use ir::engine::{Accumulation, Engine};
use ir::graph::{Layer, Sizes};
use ir::lower::{LayerChoice, lower};
use ir::mesh::Mesh;
use ir::program::Home;
use ir::token_order::TokenOrder;
use planner::chooser::{Chooser, Troubles};
use planner::clock::Clock;
use planner::given::{Given, StateRule};
use planner::layer_problem::LayerProblem;
use planner::prices::Prices;
use planner::request::Solver;
use tests::layers::{machine, memory_context};

/// Prices of a byte, in multiples of what makes all bytes as dear as all seconds.
const PRICES: [f64; 5] = [0.0, 0.1, 1.0, 10.0, 1000.0];

/// Layers of a stage on average: no whole number.
const LAYERS: f64 = 7.5;

/// Micro-batches in flight.
const IN_FLIGHT: f64 = 2.0;

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

/// The choices of a layer of a model on four devices, at several prices, in the hands of whoever holds them to their
/// programs.
fn asked<T>(
    model: &str,
    accumulation: Accumulation,
    given: &Given,
    of: impl Fn(&Asked<'_>, &[usize]) -> T,
) -> Vec<T> {
    let model = read_model(model, shipped_model(model).unwrap().text).unwrap();
    let cluster = read_cluster("dgx-a100-80", shipped_cluster("dgx-a100-80").unwrap().text).unwrap();
    let constants = Constants::load().under(Engine { accumulation, ..Engine::default() });
    let mesh = Mesh::of_sizes(&[2, 2]).unwrap();
    let machine = machine(&cluster, &constants, TokenOrder::ZigZag);
    let context = memory_context(&machine);
    let prices = Prices::new(machine, &mesh, &[]);
    let layer = model.layers.iter().find(|layer| !layer.is_end()).unwrap();
    let sizes = layer.sizes(4, 1024);
    let clock = Clock::after((8.0, IN_FLIGHT), LAYERS);
    let problem = LayerProblem::new(layer, &sizes, &prices, clock, given).unwrap();
    let troubles = Troubles::default();
    let chooser = Chooser::new(Solver::Structured, &problem, &troubles);
    let fastest = problem.problem.total(&chooser.cheapest(0.0).unwrap().choices).unwrap();
    let slack = constants.fragmentation_factor;
    let asked = Asked { problem: &problem, context, layer, mesh: &mesh, sizes: &sizes, slack };
    let at = |multiple: &f64| {
        let choices = chooser.cheapest(multiple * fastest.time / fastest.memory).unwrap().choices;
        of(&asked, &choices)
    };
    PRICES.iter().map(at).collect()
}

/// A choice problem, and what its programs are made of.
struct Asked<'a> {
    problem: &'a LayerProblem<'a>,
    context: MemoryContext<'a>,
    layer: &'a Layer,
    mesh: &'a Mesh,
    sizes: &'a Sizes,
    /// What the allocator holds for every byte.
    slack: f64,
}

impl Asked<'_> {
    fn memory(&self, choice: &LayerChoice) -> ProgramMemory {
        let program = lower(self.layer, self.mesh, self.sizes, choice).unwrap();
        program_memory(&self.context, self.layer, self.mesh, self.sizes, &program)
    }

    /// Bytes of states, and of what a stage has once, as choices weigh them.
    fn weighed(&self, choices: &[usize]) -> f64 {
        let nodes = choices.iter().zip(&self.problem.problem.nodes);
        nodes.map(|(&at, node)| node.choices[at].memory).sum()
    }
}

/// Parameters gathered for use and their gradients, with what the allocator holds beside them.
fn gathered(memory: &ProgramMemory, slack: f64) -> f64 {
    gathered_units(std::iter::once(memory.unit(LAYERS))).0 * slack
}

/// The layers of a model, at several prices.
fn held(model: &str, accumulation: Accumulation, given: &Given) -> Vec<Held> {
    asked(model, accumulation, given, |asked, choices| {
        let memory = asked.memory(&asked.problem.choice(choices));
        Held {
            weighed: asked.weighed(choices),
            states: memory.states().0,
            stand_ins: memory.stand_ins.0,
            gathered: gathered(&memory, asked.slack),
        }
    })
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

/// What bounds take for what hosts have of a layer, and for what that leaves on the device
/// (`planner/src/room/hosts.rs`).
#[test]
fn hosts_have_what_choices_say_and_devices_the_rest() {
    let given = Given { homes: StateRule::Free, of_bound: true, ..Given::default() };
    for model in ["llama-3-8b", "gpt2-xl", "mixtral-8x7b"] {
        let all = asked(model, Accumulation::Separate, &given, |asked, choices| {
            let choice = asked.problem.choice(choices);
            let stays = asked.memory(&choice);
            let kept = asked.memory(&LayerChoice { kept: Home::Host, ..choice.clone() });
            let away = asked.memory(&LayerChoice { parameters: Home::Host, ..choice });
            let (own, weighed) = (asked.problem.on_host(choices), asked.weighed(choices));
            let near = |what: &str, found: f64, expected: f64| {
                assert!((found - expected).abs() <= 1e-9 * weighed, "{model}: {found} of {expected} {what}");
            };
            near("states on the host", own.states, stays.host.0);
            // One that is cut like its optimizer state is no more than that state on the device.
            near("parameters", own.parameters, stays.parameters.0);
            let there = away.parameters_on_host.0;
            assert!(own.parameters <= there * (1.0 + 1e-9), "{model}: {} of {there}", own.parameters);
            near(
                "on the device",
                weighed - own.freed,
                away.states().0 + gathered(&away, asked.slack) / LAYERS.ceil(),
            );
            let saved = asked.problem.problem.parts(choices).unwrap().1.memory / IN_FLIGHT;
            // What kernels keep beside their operands is in no choice.
            let there = kept.kept_on_host.0;
            assert!(saved <= there * (1.0 + 1e-9) && saved >= there * 0.99, "{model}: {saved} of {there}");
            assert!(kept.working().0 >= 2.0 * saved * (1.0 - 1e-9), "{model}: {}", kept.working().0);
            own
        });
        assert!(all.iter().any(|own| own.states == 0.0), "{model}: no states are on the device");
        assert!(all.iter().any(|own| own.states > 0.0), "{model}: no states are on the host");
        assert!(all.iter().any(|own| own.freed < own.parameters), "{model}: no parameter is whole");
    }
}
