//! The structured solver and the integer program on the layers of real models: each is the other's check.
//!
//! Both judge with `Problem::total`, which neither shares. Between the two stand, for a capacity that does not let the
//! fastest choice through, `relax` (a plan and a bound around the optimum) and `solve` (the optimum).

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use cost_model::Constants;
use frontends::{read_cluster, read_model, shipped_cluster, shipped_model};
use ir::cluster::Precision;
use ir::mesh::Mesh;
use ir::op_work::KernelChoice;
use ir::token_order::TokenOrder;
use ir::work::AttentionKernel;
use planner::layer_problem::{Given, LayerProblem, RecomputeRule, StorageRule};
use planner::meeting::Clock;
use planner::prices::{Machine, Prices};
use planner::problem::{Problem, Solution};
use planner::{ilp, solve};

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

/// Calls `check` with the choice problem of every layer kind of a model on every mesh, and a name for it.
fn each_problem(model: &str, meshes: &[&[u64]], given: &Given, check: impl Fn(&str, &Problem)) {
    let model = read_model(model, shipped_model(model).unwrap().text).unwrap();
    let cluster = read_cluster("dgx-a100-80", shipped_cluster("dgx-a100-80").unwrap().text).unwrap();
    let constants = Constants::load();
    for sizes in meshes {
        let mesh = Mesh::of_sizes(sizes).unwrap();
        let machine = Machine {
            cluster: &cluster,
            device: &cluster.groups[0].device,
            constants: &constants,
            precision: Precision::Bf16,
            kernels: KernelChoice {
                attention: AttentionKernel::Flash,
                token_order: TokenOrder::ZigZag,
                element_bytes: 2.0,
            },
        };
        let prices = Prices::new(machine, &mesh, &[]);
        let clock = Clock { micro_batches: 8.0, in_flight: 2.0 };
        for layer in &model.layers {
            let name = format!("{} of {} on {sizes:?}", layer.name, model.name);
            let lengths = layer.sizes(4, 2048);
            let built = LayerProblem::new(layer, &lengths, &prices, clock, given);
            check(&name, &built.unwrap_or_else(|| panic!("{name}: no choice")).problem);
        }
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

/// Both solvers at a capacity, to the same time and a certificate.
fn agree(name: &str, problem: &Problem, capacity: f64) {
    let structured = solve::solve(problem, capacity).unwrap_or_else(|| panic!("{name}: solve finds nothing"));
    let program =
        ilp::solve(problem, capacity).unwrap_or_else(|| panic!("{name}: the program finds nothing"));
    assert_honest(name, problem, &structured.solution, capacity);
    assert_honest(name, problem, &program, capacity);
    assert_same_time(name, structured.solution.cost.time, program.cost.time);
    let certified = structured.solution.cost.time - structured.bound;
    assert!(certified <= ROUNDING * structured.bound, "{name}: no certificate, {structured:?}");
}

/// Families that differ in what a layer is made of.
const MODELS: [&str; 7] =
    ["gpt2", "opt-13b", "llama-3-8b", "falcon-7b", "gemma-2-9b", "bloom-176b", "mixtral-8x7b"];

#[test]
fn with_plenty_of_memory_both_find_the_same_time() {
    for model in MODELS {
        each_problem(model, &[&[2], &[4]], &everything(), |name, problem| agree(name, problem, PLENTY));
        each_problem(model, &[&[2, 2]], &little(), |name, problem| agree(name, problem, PLENTY));
    }
}

#[test]
fn with_little_memory_the_program_lies_between_the_relaxed_plan_and_its_bound() {
    for model in MODELS {
        each_problem(model, &[&[2], &[4]], &little(), |name, problem| {
            let capacity = tight(problem);
            let relaxed = solve::relax(problem, capacity).unwrap();
            let program = ilp::solve(problem, capacity).unwrap();
            assert_honest(name, problem, &relaxed.solution, capacity);
            assert_honest(name, problem, &program, capacity);
            let slack = ROUNDING * program.cost.time;
            assert!(relaxed.bound <= program.cost.time + slack, "{name}");
            assert!(program.cost.time <= relaxed.solution.cost.time + slack, "{name}");
        });
    }
}

/// Where many choices are of nearly equal use, as in heads, branch and bound takes minutes to decide between them; the
/// test above holds the bounds of those.
#[test]
fn with_little_memory_both_find_the_same_time() {
    for model in ["gpt2", "opt-13b", "llama-3-8b", "falcon-7b", "gemma-2-9b", "mistral-7b", "phi-3-mini"] {
        each_problem(model, &[&[2], &[4]], &little(), |name, problem| {
            if !name.starts_with("head") {
                agree(name, problem, tight(problem));
            }
        });
    }
}
