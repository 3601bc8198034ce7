//! The structured solver of a choice problem: exact, by elimination; transformer layers have width two or three.
//!
//! Three parts:
//! - `eliminate`: least `time + price * memory` for one price of memory. Nodes leave one by one; what a node can save
//!   or cost its neighbours becomes a table over their ports. Exact for any graph, fast where few neighbours meet.
//! - `relax`: bisection on the price finds a plan that fits and a bound no plan can beat (Everett 1963).
//! - `solve`: closes the gap between the two. Branch and bound over the nodes in elimination order, with the
//!   relaxation of what is left as the bound; the same elimination prices every remainder.

use std::collections::BTreeMap;

use crate::problem::{Cost, Problem, Solution};

/// Bisection steps on the price of memory; 40 halvings reach the precision at which prices differ.
const PRICE_STEPS: usize = 40;

/// Branch-and-bound nodes before the search settles for a certified gap; work, not time.
const MAX_BRANCHES: usize = 20_000;

/// A solution with its certificate.
#[derive(Clone, Debug, PartialEq)]
pub struct Certified {
    /// The best plan found.
    pub solution: Solution,
    /// No plan that fits is faster than this.
    pub bound: f64,
}

/// A table over the ports of a few nodes, left by an eliminated node.
struct Table {
    /// Nodes, each with the port of every choice and the number of ports.
    scope: Vec<(usize, Vec<u32>, usize)>,
    values: Vec<f64>,
}

/// How to find an eliminated node's best choice once its neighbours are chosen.
struct Back {
    node: usize,
    scope: Vec<(usize, Vec<u32>, usize)>,
    best: Vec<u32>,
}

/// Least `time + price * memory`, and the choices that reach it. `None` where every combination is forbidden.
///
/// Among equals the smaller choice of the node that is eliminated later.
pub fn eliminate(problem: &Problem, price: f64) -> Option<(f64, Vec<usize>)> {
    let fixed = vec![None; problem.nodes.len()];
    eliminate_fixed(problem, price, &fixed)
}

fn eliminate_fixed(problem: &Problem, price: f64, fixed: &[Option<usize>]) -> Option<(f64, Vec<usize>)> {
    let mut costs: Vec<Vec<f64>> = problem
        .nodes
        .iter()
        .zip(fixed)
        .map(|(node, pin)| {
            let weigh = |(i, cost): (usize, &Cost)| match pin {
                Some(chosen) if *chosen != i => f64::INFINITY,
                _ => cost.weighed(price),
            };
            node.choices.iter().enumerate().map(weigh).collect()
        })
        .collect();
    let mut tables: Vec<Table> = problem
        .edges
        .iter()
        .map(|edge| Table {
            scope: vec![
                (edge.from, edge.from_port.clone(), edge.table.len() / edge.n_to_ports),
                (edge.to, edge.to_port.clone(), edge.n_to_ports),
            ],
            values: edge.table.iter().map(|cost| cost.map_or(f64::INFINITY, |c| c.weighed(price))).collect(),
        })
        .collect();
    let mut left: Vec<usize> = (0..problem.nodes.len()).collect();
    let mut backs = Vec::new();
    let mut total = 0.0;
    while let Some(node) = next_node(&left, &tables) {
        left.retain(|&other| other != node);
        let (touching, rest): (Vec<Table>, Vec<Table>) =
            tables.into_iter().partition(|table| table.scope.iter().any(|(n, ..)| *n == node));
        tables = rest;
        let (table, back) = absorb(node, &costs[node], &touching, &costs);
        match table.scope.as_slice() {
            [] => total += table.values[0],
            [(other, ports, _)] => {
                for (choice, &port) in ports.iter().enumerate() {
                    costs[*other][choice] += table.values[port as usize];
                }
            }
            _ => tables.push(table),
        }
        backs.push(back);
    }
    if !total.is_finite() {
        return None;
    }
    let mut choices = vec![0; problem.nodes.len()];
    for back in backs.iter().rev() {
        let at = back.scope.iter().fold(0, |at, (n, ports, size)| at * size + ports[choices[*n]] as usize);
        choices[back.node] = back.best[at] as usize;
    }
    Some((total, choices))
}

/// The node whose elimination leaves the smallest table; ties to the smaller id.
fn next_node(left: &[usize], tables: &[Table]) -> Option<usize> {
    let size = |node: usize| -> f64 {
        let mut neighbours: BTreeMap<usize, f64> = BTreeMap::new();
        for table in tables.iter().filter(|table| table.scope.iter().any(|(n, ..)| *n == node)) {
            for (other, _, ports) in table.scope.iter().filter(|(n, ..)| *n != node) {
                *neighbours.entry(*other).or_insert(1.0) *= *ports as f64;
            }
        }
        neighbours.values().product()
    };
    left.iter().copied().min_by(|&a, &b| size(a).total_cmp(&size(b)).then(a.cmp(&b)))
}

/// Joint ports of a node over all tables that see it: one per distinct tuple among its choices that are still open.
fn joint_ports(node: usize, tables: &[Table], costs: &[f64]) -> (Vec<u32>, Vec<Vec<u32>>) {
    let seen: Vec<&Vec<u32>> = tables
        .iter()
        .flat_map(|table| table.scope.iter().filter(|(n, ..)| *n == node).map(|(_, ports, _)| ports))
        .collect();
    let mut index: BTreeMap<Vec<u32>, u32> = BTreeMap::new();
    let mut tuples = Vec::new();
    let mut of_choice = vec![0; costs.len()];
    for choice in (0..costs.len()).filter(|&choice| costs[choice].is_finite()) {
        let tuple: Vec<u32> = seen.iter().map(|ports| ports[choice]).collect();
        of_choice[choice] = *index.entry(tuple.clone()).or_insert_with(|| {
            tuples.push(tuple);
            tuples.len() as u32 - 1
        });
    }
    (of_choice, tuples)
}

/// Eliminates a node: the best it can do for every combination of its neighbours' joint ports.
fn absorb(node: usize, own: &[f64], touching: &[Table], costs: &[Vec<f64>]) -> (Table, Back) {
    let mut others: Vec<usize> =
        touching.iter().flat_map(|table| table.scope.iter().map(|(n, ..)| *n)).filter(|n| *n != node).collect();
    others.sort_unstable();
    others.dedup();
    // Choices of the node that look alike to every table: keep the cheapest of each group.
    let (own_ports, own_tuples) = joint_ports(node, touching, own);
    let mut groups: Vec<(u32, f64)> = vec![(0, f64::INFINITY); own_tuples.len()];
    for (choice, &cost) in own.iter().enumerate().filter(|(_, cost)| cost.is_finite()) {
        let group = &mut groups[own_ports[choice] as usize];
        if cost < group.1 {
            *group = (choice as u32, cost);
        }
    }
    let joint: Vec<(Vec<u32>, Vec<Vec<u32>>)> =
        others.iter().map(|&other| joint_ports(other, touching, &costs[other])).collect();
    let sizes: Vec<usize> = joint.iter().map(|(_, tuples)| tuples.len()).collect();
    let mut values = Vec::with_capacity(sizes.iter().product());
    let mut best = Vec::with_capacity(sizes.iter().product());
    let plan = Lookup::new(node, touching, &others, &own_tuples, &joint);
    let mut at = vec![0; others.len()];
    if sizes.iter().all(|&size| size > 0) {
        loop {
            let (value, group) = plan.minimum(&at, &groups);
            values.push(value);
            best.push(group);
            let Some(dim) = (0..at.len()).rev().find(|&dim| at[dim] + 1 < sizes[dim]) else { break };
            at[dim] += 1;
            at[dim + 1..].fill(0);
        }
    }
    if values.is_empty() {
        values.push(f64::INFINITY);
        best.push(0);
    }
    let scope: Vec<(usize, Vec<u32>, usize)> =
        others.iter().zip(&joint).map(|(&other, (ports, tuples))| (other, ports.clone(), tuples.len().max(1))).collect();
    (Table { scope: scope.clone(), values }, Back { node, scope, best })
}

/// Offsets into the touching tables for the node's groups and for its neighbours' joint ports.
struct Lookup<'a> {
    tables: &'a [Table],
    /// Per table, offset of each group of the eliminated node.
    own: Vec<Vec<usize>>,
    /// Per table and neighbour, offset of each joint port; empty where the table does not see the neighbour.
    others: Vec<Vec<Vec<usize>>>,
}

impl<'a> Lookup<'a> {
    fn new(
        node: usize,
        tables: &'a [Table],
        others: &[usize],
        own_tuples: &[Vec<u32>],
        joint: &[(Vec<u32>, Vec<Vec<u32>>)],
    ) -> Self {
        let mut own = Vec::new();
        let mut seen_by = vec![0; others.len()];
        let mut all = Vec::new();
        for (t, table) in tables.iter().enumerate() {
            let stride = |n: usize| {
                let at = table.scope.iter().position(|(m, ..)| *m == n)?;
                Some(table.scope[at + 1..].iter().map(|(.., size)| size).product::<usize>())
            };
            let step = stride(node).unwrap_or(0);
            own.push(own_tuples.iter().map(|tuple| tuple[t] as usize * step).collect());
            let mut row = Vec::new();
            for (k, &other) in others.iter().enumerate() {
                row.push(match stride(other) {
                    Some(step) => {
                        let offsets = joint[k].1.iter().map(|tuple| tuple[seen_by[k]] as usize * step).collect();
                        seen_by[k] += 1;
                        offsets
                    }
                    None => Vec::new(),
                });
            }
            all.push(row);
        }
        Self { tables, own, others: all }
    }

    /// Best group for one combination of the neighbours' joint ports: its value and its choice.
    fn minimum(&self, at: &[usize], groups: &[(u32, f64)]) -> (f64, u32) {
        let bases: Vec<usize> = self
            .others
            .iter()
            .map(|row| row.iter().zip(at).filter(|(offsets, _)| !offsets.is_empty()).map(|(o, &i)| o[i]).sum())
            .collect();
        let mut best = (f64::INFINITY, groups.first().map_or(0, |group| group.0));
        for (g, &(choice, cost)) in groups.iter().enumerate() {
            let mut value = cost;
            for (t, table) in self.tables.iter().enumerate() {
                value += table.values[bases[t] + self.own[t][g]];
            }
            if value < best.0 {
                best = (value, choice);
            }
        }
        best
    }
}

/// A plan that fits and a bound on all that do, by bisection on the price of memory.
///
/// Returns `None` where no plan fits.
pub fn relax(problem: &Problem, capacity: f64) -> Option<Certified> {
    relax_fixed(problem, capacity, &vec![None; problem.nodes.len()])
}

fn relax_fixed(problem: &Problem, capacity: f64, fixed: &[Option<usize>]) -> Option<Certified> {
    let at = |price: f64| -> Option<(Solution, f64)> {
        let (value, choices) = eliminate_fixed(problem, price, fixed)?;
        let cost = problem.total(&choices)?;
        Some((Solution { choices, cost }, value - price * capacity))
    };
    let (free, bound) = at(0.0)?;
    if free.cost.memory <= capacity {
        return Some(Certified { bound, solution: free });
    }
    let mut low = 0.0;
    let mut high = 1e-3 * free.cost.time.abs().max(1e-300) / free.cost.memory.abs().max(1e-300);
    let mut bound = bound;
    let mut best: Option<Solution> = None;
    // Raise the price until a plan fits; twenty decades cover every ratio of times that a double can tell apart.
    for _ in 0..20 {
        let (solution, value) = at(high)?;
        bound = bound.max(value);
        if solution.cost.memory <= capacity {
            best = Some(solution);
            break;
        }
        (low, high) = (high, high * 10.0);
    }
    let mut best = best?;
    for _ in 0..PRICE_STEPS {
        let middle = 0.5 * (low + high);
        let (solution, value) = at(middle)?;
        bound = bound.max(value);
        if solution.cost.memory <= capacity {
            high = middle;
            if solution.cost.time < best.cost.time {
                best = solution;
            }
        } else {
            low = middle;
        }
        if best.cost.time - bound <= 1e-12 * best.cost.time.abs() {
            break;
        }
    }
    Some(Certified { solution: best, bound })
}

/// The fastest plan whose memory fits, with a bound that equals its time unless `MAX_BRANCHES` was reached.
///
/// Returns `None` where no plan fits.
pub fn solve(problem: &Problem, capacity: f64) -> Option<Certified> {
    let root = relax(problem, capacity)?;
    let mut best = root.solution.clone();
    let mut open = vec![(root.bound, vec![None; problem.nodes.len()], root.solution.choices)];
    let mut cut_bound = f64::INFINITY;
    let mut branches = 0;
    while let Some((bound, fixed, near)) = open.pop() {
        if bound >= best.cost.time - 1e-12 * best.cost.time.abs() {
            continue;
        }
        let free = |i: &usize| fixed[*i].is_none() && problem.nodes[*i].choices.len() > 1;
        let Some(node) = (0..problem.nodes.len()).filter(free).max_by_key(|&i| problem.nodes[i].choices.len()) else {
            continue;
        };
        if branches >= MAX_BRANCHES {
            cut_bound = cut_bound.min(bound);
            continue;
        }
        let mut children = Vec::new();
        for choice in 0..problem.nodes[node].choices.len() {
            branches += 1;
            let mut pinned = fixed.clone();
            pinned[node] = Some(choice);
            if let Some(child) = relax_fixed(problem, capacity, &pinned) {
                if child.solution.cost.time < best.cost.time {
                    best = child.solution.clone();
                }
                children.push((child.bound, pinned, child.solution.choices));
            }
        }
        // Most promising last: it is taken next. Ties keep the relaxation's own choice on top.
        children.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1[node] == Some(near[node])).cmp(&(b.1[node] == Some(near[node])))));
        open.extend(children);
    }
    let bound = best.cost.time.min(cut_bound);
    Some(Certified { solution: best, bound })
}
