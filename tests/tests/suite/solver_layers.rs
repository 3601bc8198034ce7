//! The structured solver and the integer program on every layer of every shipped model: each is the other's check.
//!
//! Both judge with `Problem::total`, which neither shares: with plenty of memory, and with a capacity that does not let
//! the fastest choice through. A program that gives up proves nothing, and fails the test.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use std::cell::Cell;

use cost_model::Constants;
use frontends::{read_cluster, read_model, shipped_cluster, shipped_model, shipped_models};
use ir::mesh::Mesh;
use ir::token_order::TokenOrder;
use planner::clock::Clock;
use planner::given::{Given, RecomputeRule, StorageRule};
use planner::layer_problem::LayerProblem;
use planner::prices::Prices;
use planner::problem::{Problem, Solution};
use planner::solve::Certified;
use planner::{ilp, solve};
use tests::layers::machine;

/// A capacity above every memory. (Not infinite: an infinite one times a price of zero is no number.)
const PLENTY: f64 = 1e30;

/// A price of memory, in seconds per byte, at which nothing else counts.
const DEAR: f64 = 1.0;

/// Relative difference of two times that are equal but for the order of additions.
const ROUNDING: f64 = 1e-9;

fn everything() -> Given {
    Given::default()
}

/// What is left when storage is settled and only attention may be computed again.
fn little() -> Given {
    Given { recompute: RecomputeRule::AttentionOnly, storage: StorageRule::Parameter, ..Given::default() }
}

/// Calls `check` with the choice problem of every layer kind of a model on a mesh, and a name for it.
fn each_problem(model: &str, sizes: &[u64], given: &Given, check: impl Fn(&str, &Problem)) {
    let model = read_model(model, shipped_model(model).unwrap().text).unwrap();
    let cluster = read_cluster("dgx-a100-80", shipped_cluster("dgx-a100-80").unwrap().text).unwrap();
    let constants = Constants::load();
    let mesh = Mesh::of_sizes(sizes).unwrap();
    let machine = machine(&cluster, &constants, TokenOrder::ZigZag);
    let prices = Prices::new(machine, &mesh, &[]);
    let clock = Clock::after((8.0, 2.0), 16.0);
    for layer in &model.layers {
        let name = format!("{} of {} on {sizes:?}", layer.name, model.name);
        let lengths = layer.sizes(4, 2048);
        let built = LayerProblem::new(layer, &lengths, &prices, clock, given);
        check(&name, &built.unwrap_or_else(|| panic!("{name}: no choice")).problem);
    }
}

/// A capacity between the least memory and that of the fastest choice, at 60 % of the way.
fn tight(problem: &Problem) -> f64 {
    let (_, leanest) = solve::eliminate(problem, DEAR).unwrap();
    let (_, fastest) = solve::eliminate(problem, 0.0).unwrap();
    let memory = |choices: &[usize]| problem.total(choices).unwrap().memory;
    let (least, most) = (memory(&leanest), memory(&fastest));
    least + 0.6 * (most - least)
}

/// A solution is what it says, and fits.
#[track_caller]
fn assert_honest(name: &str, problem: &Problem, solution: &Solution, capacity: f64) {
    assert_eq!(problem.total(&solution.choices), Some(solution.cost), "{name}");
    assert!(solution.cost.memory <= capacity * (1.0 + ROUNDING), "{name}");
}

#[track_caller]
fn assert_same_time(name: &str, structured: f64, program: f64) {
    let difference = (structured - program).abs() / program;
    assert!(difference <= ROUNDING, "{name}: solve {structured:e}, integer program {program:e}");
}

/// No plan that fits is faster.
#[track_caller]
fn assert_certified(name: &str, found: &Certified) {
    let best = found.solution.cost.time;
    assert!(best - found.bound <= ROUNDING * best, "{name}: no certificate, {found:?}");
}

/// Both solvers at a capacity, to the same time; the structured one with a certificate, and its relaxation around it.
fn agree(name: &str, problem: &Problem, capacity: f64) {
    let structured = solve::solve(problem, capacity).unwrap_or_else(|| panic!("{name}: solve finds nothing"));
    let relaxed = solve::relax(problem, capacity).unwrap_or_else(|| panic!("{name}: relax finds nothing"));
    let program = ilp::solve(problem, capacity)
        .unwrap_or_else(|error| panic!("{name}: the program gave up: {error}"))
        .unwrap_or_else(|| panic!("{name}: the program finds nothing"));
    for solution in [&structured.solution, &relaxed.solution, &program] {
        assert_honest(name, problem, solution, capacity);
    }
    let best = structured.solution.cost.time;
    assert_same_time(name, best, program.cost.time);
    assert_certified(name, &structured);
    let slack = ROUNDING * best;
    assert!(relaxed.bound <= best + slack && best <= relaxed.solution.cost.time + slack, "{name}");
}

/// Both solvers at a capacity that lets everything through, and at one that does not.
fn agree_with_much_and_with_little(name: &str, problem: &Problem) {
    agree(name, problem, PLENTY);
    agree(name, problem, tight(problem));
}

fn model_names() -> impl Iterator<Item = &'static str> {
    shipped_models().iter().map(|model| model.name)
}

#[test]
fn on_two_devices_every_layer_of_every_model_with_all_its_choices() {
    for model in model_names() {
        each_problem(model, &[2], &everything(), agree_with_much_and_with_little);
    }
}

#[test]
fn on_four_devices_every_layer_of_every_model() {
    for model in model_names() {
        each_problem(model, &[4], &little(), agree_with_much_and_with_little);
    }
}

/// Where the program is larger than this, its branching takes minutes.
const MAX_VARIABLES: usize = 4_000;

#[test]
fn on_two_axes_every_layer_that_the_program_can_hold() {
    let kinds = Cell::new(0);
    for model in model_names() {
        each_problem(model, &[2, 2], &little(), |name, problem| {
            if ilp::n_variables(problem) <= MAX_VARIABLES {
                agree_with_much_and_with_little(name, problem);
                kinds.set(kinds.get() + 1);
            }
        });
    }
    assert!(kinds.get() >= 70, "{}", kinds.get());
}

/// What the program cannot hold, the structured solver still proves: its plan fits, and no bound of its own lies below.
#[test]
fn on_two_axes_with_all_choices_the_structured_solver_certifies_every_layer() {
    for model in model_names() {
        each_problem(model, &[2, 2], &everything(), |name, problem| {
            let capacity = tight(problem);
            let found = solve::solve(problem, capacity).unwrap();
            assert_honest(name, problem, &found.solution, capacity);
            assert_certified(name, &found);
        });
    }
}
