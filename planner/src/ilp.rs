//! The choice problem as an integer linear program, written with good_lp and solved by microlp.
//!
//! One-hot `x[i, c]` per node, over the choices that no other with the same ports beats in both time and memory, and
//! per edge `y[p, q] >= 0` over its pairs of ports with the row and column sums of the local polytope: `sum_q y[p, q]`
//! is the weight of port `p`, so `y` is integral where `x` is. It shares the data and nothing else with `solve`: each
//! is the other's check, and `--solver microlp` lets the user ask it instead.

use std::collections::BTreeMap;

use good_lp::{
    Constraint, Expression, ProblemVariables, ResolutionError, Solution as _, SolverModel, Variable, microlp,
    variable, variables,
};

use crate::problem::{Cost, Edge, Node, Problem, Solution};

/// Variables of the program of a problem.
pub fn n_variables(problem: &Problem) -> usize {
    let nodes: usize = worth_having(problem).iter().map(Vec::len).sum();
    let pairs: usize = problem.edges.iter().map(|edge| edge.table.iter().flatten().count()).sum();
    nodes + pairs
}

/// Per node, the choices that no other with the same ports beats or equals in time and in memory; of equals the first.
fn worth_having(problem: &Problem) -> Vec<Vec<usize>> {
    let mut ports: Vec<Vec<&Vec<u32>>> = vec![Vec::new(); problem.nodes.len()];
    for edge in &problem.edges {
        ports[edge.from].push(&edge.from_port);
        ports[edge.to].push(&edge.to_port);
    }
    let of_node = |(node, ports): (&Node, &Vec<&Vec<u32>>)| {
        let mut alike: BTreeMap<Vec<u32>, Vec<usize>> = BTreeMap::new();
        for choice in 0..node.choices.len() {
            alike.entry(ports.iter().map(|ports| ports[choice]).collect()).or_default().push(choice);
        }
        let beats = |other: usize, choice: usize| {
            let (a, b) = (node.choices[other], node.choices[choice]);
            a.time <= b.time && a.memory <= b.memory && (a != b || other < choice)
        };
        let kept = |list: &Vec<usize>| -> Vec<usize> {
            list.iter().copied().filter(|&choice| !list.iter().any(|&other| beats(other, choice))).collect()
        };
        let mut all = alike.values().map(kept).collect::<Vec<_>>().concat();
        all.sort_unstable();
        all
    };
    problem.nodes.iter().zip(&ports).map(of_node).collect()
}

/// What kept the solver from an answer. A problem without a plan is not among it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GaveUp {
    /// The solver's own words.
    #[error("{0}")]
    Solver(#[from] ResolutionError),
    /// Its answer, rounded to one choice per node, takes a pair that is forbidden.
    #[error("its answer is no plan")]
    NoPlan,
}

/// Least time of a plan whose memory fits; `None` where none does.
///
/// # Errors
/// Where the solver gives up.
pub fn solve(problem: &Problem, capacity: f64) -> Result<Option<Solution>, GaveUp> {
    program(problem, 0.0, capacity)
}

/// Least `time + price * memory`, and the choices that reach it; `None` where every combination is forbidden.
///
/// # Errors
/// Where the solver gives up.
pub fn cheapest(problem: &Problem, price: f64) -> Result<Option<(f64, Vec<usize>)>, GaveUp> {
    let solution = program(problem, price, f64::INFINITY)?;
    Ok(solution.map(|solution| (solution.cost.weighed(price), solution.choices)))
}

/// The variables: `x` per node and choice worth having, `y` per edge and allowed pair.
struct Variables {
    x: Vec<Vec<(usize, Variable)>>,
    y: Vec<Vec<Option<Variable>>>,
}

/// Which port of each edge's second node has no row of its own.
#[derive(Clone, Copy, Debug)]
enum LeftOut {
    First,
    Last,
}

/// The program: least `time + price * memory` within a capacity. Where the solver ends in a singular matrix, once more
/// with other rows.
fn program(problem: &Problem, price: f64, capacity: f64) -> Result<Option<Solution>, GaveUp> {
    match program_without(LeftOut::First, problem, price, capacity) {
        Err(GaveUp::Solver(_)) => program_without(LeftOut::Last, problem, price, capacity),
        answer => answer,
    }
}

/// The same with these rows alone.
fn program_without(
    left_out: LeftOut,
    problem: &Problem,
    price: f64,
    capacity: f64,
) -> Result<Option<Solution>, GaveUp> {
    let mut vars = variables!();
    let one_hot =
        |list: Vec<usize>| list.into_iter().map(|choice| (choice, vars.add(variable().binary()))).collect();
    let x = worth_having(problem).into_iter().map(one_hot).collect();
    let y = problem.edges.iter().map(|edge| pair_variables(&mut vars, edge)).collect();
    let variables = Variables { x, y };
    let cost = Sum::new(problem, &variables, |cost| cost.weighed(price));
    let mut model = vars.minimise(cost.excess).using(microlp);
    for row in rows(problem, &variables, left_out) {
        model = model.with(row);
    }
    if capacity.is_finite() {
        let memory = Sum::new(problem, &variables, |cost| cost.memory);
        model = model.with(memory.excess.leq((capacity - memory.least) / memory.unit));
    }
    let solved = match model.solve() {
        Ok(solved) => solved,
        Err(ResolutionError::Infeasible) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let pick = |xs: &Vec<(usize, Variable)>| {
        let heavier = |a: &(usize, f64), b: &(usize, f64)| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0));
        let weights = xs.iter().map(|&(choice, var)| (choice, solved.value(var)));
        weights.max_by(heavier).map_or(0, |(choice, _)| choice)
    };
    let choices: Vec<usize> = variables.x.iter().map(pick).collect();
    let cost = problem.total(&choices).ok_or(GaveUp::NoPlan)?;
    Ok(Some(Solution { choices, cost }))
}

/// One choice per node, and pairs that follow the choices.
///
/// The row of one port of each edge's second node follows from the others and is left out; equations that follow from
/// others end in singular matrices.
fn rows(problem: &Problem, variables: &Variables, left_out: LeftOut) -> Vec<Constraint> {
    let mut list: Vec<Constraint> =
        variables.x.iter().map(|xs| xs.iter().map(|(_, var)| *var).sum::<Expression>().eq(1.0)).collect();
    for (edge, ys) in problem.edges.iter().zip(&variables.y) {
        let (n_from, n_to) = (edge.table.len() / edge.n_to_ports, edge.n_to_ports);
        for port in 0..n_from {
            let row: Expression = (0..n_to).filter_map(|q| ys[port * n_to + q]).sum();
            list.push((row - weight(&variables.x[edge.from], &edge.from_port, port)).eq(0.0));
        }
        let others = match left_out {
            LeftOut::First => 1..n_to,
            LeftOut::Last => 0..n_to - 1,
        };
        for port in others {
            let column: Expression = (0..n_from).filter_map(|p| ys[p * n_to + port]).sum();
            list.push((column - weight(&variables.x[edge.to], &edge.to_port, port)).eq(0.0));
        }
    }
    list
}

/// A sum over the choices and pairs that are taken: `least + unit * excess`.
///
/// Times of microseconds and memories of gigabytes in one program, or small differences of large numbers, upset the
/// pivoting: what every plan pays is left out, and the largest of the rest is one.
struct Sum {
    excess: Expression,
    least: f64,
    unit: f64,
}

impl Sum {
    fn new(problem: &Problem, variables: &Variables, of: impl Fn(&Cost) -> f64) -> Self {
        let mut terms: Vec<(f64, Variable)> = Vec::new();
        let mut least = 0.0;
        let mut add = |group: Vec<(f64, Variable)>| {
            let smallest = group.iter().map(|(value, _)| *value).fold(f64::INFINITY, f64::min);
            if smallest.is_finite() {
                least += smallest;
                terms.extend(group.into_iter().map(|(value, var)| (value - smallest, var)));
            }
        };
        for (node, xs) in problem.nodes.iter().zip(&variables.x) {
            add(xs.iter().map(|&(choice, var)| (of(&node.choices[choice]), var)).collect());
        }
        for (edge, ys) in problem.edges.iter().zip(&variables.y) {
            let pairs =
                edge.table.iter().zip(ys).filter_map(|(cost, var)| Some((of(cost.as_ref()?), (*var)?)));
            add(pairs.collect());
        }
        let largest = terms.iter().map(|(value, _)| *value).fold(0.0, f64::max);
        let unit = if largest > 0.0 { largest } else { 1.0 };
        let excess =
            terms.into_iter().filter(|(value, _)| *value > 0.0).map(|(value, var)| value / unit * var);
        Self { excess: excess.sum(), least, unit }
    }
}

fn pair_variables(vars: &mut ProblemVariables, edge: &Edge) -> Vec<Option<Variable>> {
    edge.table.iter().map(|cost| cost.map(|_| vars.add(variable().min(0.0).max(1.0)))).collect()
}

/// Sum of the one-hot variables whose choice has a port.
fn weight(xs: &[(usize, Variable)], ports: &[u32], port: usize) -> Expression {
    xs.iter().filter(|(choice, _)| ports[*choice] as usize == port).map(|(_, var)| *var).sum()
}
