//! The choice problem as an integer linear program, written with good_lp and solved by microlp.
//!
//! One-hot `x[i, c]` per node, and per edge `y[p, q] >= 0` over its pairs of ports with the row and column sums of the
//! local polytope: `sum_q y[p, q]` is the weight of port `p`, so `y` is integral where `x` is. It shares the data and
//! nothing else with `solve`: each is the other's check, and `--solver microlp` lets the user ask it instead.

use good_lp::{
    Expression, ProblemVariables, ResolutionError, Solution as _, SolverModel, Variable, microlp, variable,
    variables,
};

use crate::problem::{Problem, Solution};

/// Variables of the program of a problem.
pub fn n_variables(problem: &Problem) -> usize {
    let nodes: usize = problem.nodes.iter().map(|node| node.choices.len()).sum();
    let pairs: usize = problem.edges.iter().map(|edge| edge.table.iter().flatten().count()).sum();
    nodes + pairs
}

/// Least time of a plan whose memory fits; `None` where none does or the solver gives up.
pub fn solve(problem: &Problem, capacity: f64) -> Option<Solution> {
    program(problem, 0.0, capacity).ok()?
}

/// Least `time + price * memory`, and the choices that reach it; `None` where every combination is forbidden.
///
/// # Errors
/// Where the solver gives up.
pub fn cheapest(problem: &Problem, price: f64) -> Result<Option<(f64, Vec<usize>)>, ResolutionError> {
    let solution = program(problem, price, f64::INFINITY)?;
    Ok(solution.map(|solution| (solution.cost.weighed(price), solution.choices)))
}

/// The program: least `time + price * memory` within a capacity.
fn program(problem: &Problem, price: f64, capacity: f64) -> Result<Option<Solution>, ResolutionError> {
    // Times of microseconds and memories of gigabytes in one program upset the pivoting; scale both to about one.
    let cost_scale = scale(problem, |cost| cost.weighed(price));
    let memory_scale = scale(problem, |cost| cost.memory).max(f64::MIN_POSITIVE);
    let mut vars = variables!();
    let x: Vec<Vec<Variable>> = problem
        .nodes
        .iter()
        .map(|node| node.choices.iter().map(|_| vars.add(variable().binary())).collect())
        .collect();
    let y: Vec<Vec<Option<Variable>>> =
        problem.edges.iter().map(|edge| pair_variables(&mut vars, edge)).collect();
    let mut total = Expression::from(0.0);
    let mut memory = Expression::from(0.0);
    for (node, xs) in problem.nodes.iter().zip(&x) {
        for (cost, &var) in node.choices.iter().zip(xs) {
            total += cost.weighed(price) / cost_scale * var;
            memory += cost.memory / memory_scale * var;
        }
    }
    for (edge, ys) in problem.edges.iter().zip(&y) {
        for (cost, var) in edge.table.iter().zip(ys) {
            if let (Some(cost), Some(var)) = (cost, var) {
                total += cost.weighed(price) / cost_scale * *var;
                memory += cost.memory / memory_scale * *var;
            }
        }
    }
    let mut model = vars.minimise(total).using(microlp);
    for xs in &x {
        model = model.with(xs.iter().sum::<Expression>().eq(1.0));
    }
    for (edge, ys) in problem.edges.iter().zip(&y) {
        let n_from = edge.table.len() / edge.n_to_ports;
        for port in 0..n_from {
            let row: Expression = (0..edge.n_to_ports).filter_map(|q| ys[port * edge.n_to_ports + q]).sum();
            model = model.with((row - weight(&x[edge.from], &edge.from_port, port)).eq(0.0));
        }
        for port in 0..edge.n_to_ports {
            let column: Expression = (0..n_from).filter_map(|p| ys[p * edge.n_to_ports + port]).sum();
            model = model.with((column - weight(&x[edge.to], &edge.to_port, port)).eq(0.0));
        }
    }
    if capacity.is_finite() {
        model = model.with(memory.leq(capacity / memory_scale));
    }
    let solved = match model.solve() {
        Ok(solved) => solved,
        Err(ResolutionError::Infeasible) => return Ok(None),
        Err(error) => return Err(error),
    };
    let pick = |xs: &Vec<Variable>| {
        let value = |i: &usize| solved.value(xs[*i]);
        (0..xs.len()).max_by(|a, b| value(a).total_cmp(&value(b)).then(b.cmp(a))).unwrap_or(0)
    };
    let choices: Vec<usize> = x.iter().map(pick).collect();
    Ok(problem.total(&choices).map(|cost| Solution { choices, cost }))
}

fn scale(problem: &Problem, of: impl Fn(&crate::problem::Cost) -> f64) -> f64 {
    let largest =
        problem.nodes.iter().flat_map(|node| &node.choices).map(|cost| of(cost).abs()).fold(0.0, f64::max);
    if largest > 0.0 { largest } else { 1.0 }
}

fn pair_variables(vars: &mut ProblemVariables, edge: &crate::problem::Edge) -> Vec<Option<Variable>> {
    edge.table.iter().map(|cost| cost.map(|_| vars.add(variable().min(0.0).max(1.0)))).collect()
}

/// Sum of the one-hot variables whose choice has a port.
fn weight(xs: &[Variable], ports: &[u32], port: usize) -> Expression {
    xs.iter().zip(ports).filter(|(_, p)| **p as usize == port).map(|(&var, _)| var).sum()
}
