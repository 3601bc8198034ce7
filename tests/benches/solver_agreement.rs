//! The structured solver against the integer program and brute force: `cargo bench -p tests --bench solver_agreement`.
//!
//! Every layer kind of every shipped model on meshes of one and two axes, with at most 32 choices of an operator so
//! that the program ends, or 16, or 8 where it cannot hold more, with plenty of memory and with little; and random
//! graphs, the small ones tried in every combination too. A row has how many problems there were, how many answers were
//! equal, the variables of the programs and the seconds of both. What the program cannot hold, or gives up on, is
//! listed by name. Ends with 1 where two answers differ.

#![expect(clippy::print_stdout, reason = "a benchmark prints")]
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::process::ExitCode;
use std::time::{Duration, Instant};

use frontends::shipped_models;
use planner::given::Given;
use planner::problem::{Problem, brute};
use planner::{ilp, solve};
use tests::agreement::{Draw, layer_problems, limited, random_problem, tight};

/// Choices of an operator, and how many where the program cannot hold as many as before.
const CHOICES: [usize; 3] = [32, 16, 8];

/// Where the program is larger than this, its branching takes minutes.
const MAX_VARIABLES: usize = 6_000;

/// A capacity above every memory.
const PLENTY: f64 = 1e30;

/// Relative difference of two times that are equal but for the order of additions.
const ROUNDING: f64 = 1e-9;

const MESHES: [&[u64]; 5] = [&[2], &[4], &[8], &[2, 2], &[2, 4]];

/// Random graphs: how many, nodes, choices of each; tried in every combination where these are few.
const GRAPHS: [(u64, u64, u64); 3] = [(400, 5, 4), (200, 10, 8), (100, 20, 12)];

/// Combinations that are all tried.
const FEW: f64 = 2_000.0;

/// What came of some problems.
#[derive(Default)]
struct Row {
    problems: usize,
    equal: usize,
    also_brute: usize,
    variables: Vec<usize>,
    structured: Duration,
    program: Duration,
    not_held: Vec<String>,
    different: Vec<String>,
}

impl Row {
    /// One problem with much memory and with little.
    fn ask_twice(&mut self, name: &str, problem: &Problem) {
        self.ask(&format!("{name}, much memory"), problem, PLENTY);
        if let Some(capacity) = tight(problem) {
            self.ask(&format!("{name}, little memory"), problem, capacity);
        }
    }

    /// One problem at one capacity.
    fn ask(&mut self, name: &str, problem: &Problem, capacity: f64) {
        self.problems += 1;
        let variables = ilp::n_variables(problem);
        let started = Instant::now();
        let found = solve::solve(problem, capacity);
        self.structured += started.elapsed();
        if variables > MAX_VARIABLES {
            self.not_held.push(format!("{name}: {variables} variables"));
            return;
        }
        let started = Instant::now();
        let program = ilp::solve(problem, capacity);
        self.program += started.elapsed();
        self.variables.push(variables);
        let program = match program {
            Ok(solution) => solution,
            Err(error) => return self.not_held.push(format!("{name}: gave up, {error}")),
        };
        let time = |choices: &[usize]| {
            problem.total(choices).filter(|cost| cost.memory <= capacity * (1.0 + ROUNDING))
        };
        let times = [
            found.as_ref().map(|found| time(&found.solution.choices).map_or(f64::NAN, |cost| cost.time)),
            program.as_ref().map(|program| time(&program.choices).map_or(f64::NAN, |cost| cost.time)),
        ];
        let certified = found.as_ref().is_none_or(|found| {
            found.solution.cost.time - found.bound <= ROUNDING * found.solution.cost.time
        });
        let mut agree = certified && same(times[0], times[1]);
        if problem.n_combinations() <= FEW {
            self.also_brute += 1;
            agree &= same(times[0], brute(problem, capacity).map(|best| best.cost.time));
        }
        if agree { self.equal += 1 } else { self.different.push(format!("{name}: {times:?}")) }
    }

    fn print(&self, name: &str) {
        let (least, most) = (self.variables.iter().min(), self.variables.iter().max());
        println!(
            "| {name} | {} | {} | {} | {} | {} to {} | {:.2} s | {:.2} s |",
            self.problems,
            self.equal,
            self.also_brute,
            self.not_held.len(),
            least.copied().unwrap_or(0),
            most.copied().unwrap_or(0),
            self.structured.as_secs_f64(),
            self.program.as_secs_f64()
        );
    }
}

/// Whether two solvers say the same: as little time, or that there is no plan.
fn same(a: Option<f64>, b: Option<f64>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => (a - b).abs() <= ROUNDING * b.abs(),
        (None, None) => true,
        (Some(_), None) | (None, Some(_)) => false,
    }
}

/// Layers with so many choices of an operator at most; those that the program cannot hold so are asked with fewer.
fn layers(sizes: &[u64]) -> [Row; CHOICES.len()] {
    let mut rows = CHOICES.map(|_| Row::default());
    for model in shipped_models() {
        for (layer, problem) in layer_problems(model.name, sizes, &Given::default()) {
            let name = format!("`{layer}` of {} on {sizes:?}", model.name);
            for (row, most) in rows.iter_mut().zip(CHOICES) {
                let Some(few) = problem.as_ref().and_then(|problem| limited(problem, most)) else {
                    row.not_held.push(format!("{name}: no choice"));
                    break;
                };
                row.ask_twice(&format!("{name}, {most} choices"), &few);
                if ilp::n_variables(&few) <= MAX_VARIABLES {
                    break;
                }
            }
        }
    }
    rows
}

fn graphs((n, n_nodes, n_choices): (u64, u64, u64)) -> Row {
    let (mut row, mut draw) = (Row::default(), Draw::new(n_nodes));
    for at in 0..n {
        let problem = random_problem(&mut draw, (n_nodes, n_choices));
        let capacity = draw.below(12 * n_nodes) as f64;
        row.ask(&format!("graph {at} of {n_nodes} nodes"), &problem, capacity);
    }
    row
}

fn main() -> ExitCode {
    println!(
        "| problems | asked | equal | also by brute force | not held | variables | structured | program |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|--:|");
    let mut rows = Vec::new();
    for sizes in MESHES {
        let mesh = sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ");
        for (row, most) in layers(sizes).into_iter().zip(CHOICES) {
            if row.problems > 0 {
                row.print(&format!("layers on {mesh}, at most {most} choices"));
            }
            rows.push(row);
        }
    }
    for size in GRAPHS {
        let row = graphs(size);
        row.print(&format!("random graphs of {} nodes", size.1));
        rows.push(row);
    }
    for line in rows.iter().flat_map(|row| &row.not_held) {
        println!("not held: {line}");
    }
    let different: Vec<&String> = rows.iter().flat_map(|row| &row.different).collect();
    different.iter().for_each(|line| println!("different: {line}"));
    if different.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
