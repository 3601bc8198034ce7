//! The structured solver of a choice problem: exact, by elimination; transformer layers have width two or three.
//!
//! Three parts:
//! - `eliminate`: least `time + price * memory` for one price of memory. Nodes leave one by one; what a node can save
//!   or cost its neighbours becomes a table over their ports. Exact for any graph, fast where few neighbours meet.
//! - `relax`: bisection on the price finds a plan that fits and a bound no plan can beat (Everett 1963).
//! - `solve`: closes the gap between the two. Branch and bound over the nodes in elimination order, with the
//!   relaxation of what is left as the bound; the same elimination prices every remainder.

use std::collections::BTreeMap;

use crate::problem::{Edge, Problem, Solution};

mod bucket;
mod narrow;
mod weighed;

use narrow::{Known, Moved};
use weighed::{Pairs, Weighed};

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

/// A problem whose choices are sorted into classes that every edge sees alike; made once, asked at many prices.
pub struct Prepared<'a> {
    problem: &'a Problem,
    /// Per node, the choices of each class.
    members: Vec<Vec<Vec<usize>>>,
    /// Per edge, the ports of the classes of its two nodes.
    ports: Vec<(Vec<u32>, Vec<u32>)>,
}

impl<'a> Prepared<'a> {
    /// Sorts the choices.
    pub fn new(problem: &'a Problem) -> Self {
        let mut members = Vec::new();
        for (node, own) in problem.nodes.iter().enumerate() {
            let seen: Vec<(&Vec<u32>, u64)> = problem
                .edges
                .iter()
                .flat_map(|edge| {
                    let n_from = (edge.table.len() / edge.n_to_ports) as u64;
                    let from = (edge.from == node).then_some((&edge.from_port, n_from));
                    let to = (edge.to == node).then_some((&edge.to_port, edge.n_to_ports as u64));
                    from.into_iter().chain(to)
                })
                .collect();
            let mut index: BTreeMap<u128, usize> = BTreeMap::new();
            let mut classes: Vec<Vec<usize>> = Vec::new();
            for choice in 0..own.choices.len() {
                let key =
                    seen.iter().fold(0, |key, (ports, n)| key * u128::from(*n) + u128::from(ports[choice]));
                let class = *index.entry(key).or_insert_with(|| {
                    classes.push(Vec::new());
                    classes.len() - 1
                });
                classes[class].push(choice);
            }
            members.push(classes);
        }
        let side = |node: usize, ports: &[u32], members: &[Vec<Vec<usize>>]| -> Vec<u32> {
            members[node].iter().map(|class| ports[class[0]]).collect()
        };
        let ports = problem
            .edges
            .iter()
            .map(|edge| (side(edge.from, &edge.from_port, &members), side(edge.to, &edge.to_port, &members)))
            .collect();
        Self { problem, members, ports }
    }

    /// Least `time + price * memory`, and the choices that reach it. `None` where every combination is forbidden.
    ///
    /// Among equals the smaller choice of the node that is eliminated later.
    pub fn eliminate(&self, price: f64) -> Option<(f64, Vec<usize>)> {
        self.eliminate_fixed(price, &vec![None; self.problem.nodes.len()])
    }

    /// Best open choice of every class and its cost.
    fn classes(&self, price: f64, fixed: &[Option<usize>]) -> Vec<Vec<(f64, usize)>> {
        let best = |node: usize, class: &Vec<usize>| {
            let open = class.iter().copied().filter(|choice| fixed[node].is_none_or(|pin| pin == *choice));
            let cost = |choice: usize| (self.problem.nodes[node].choices[choice].weighed(price), choice);
            open.map(cost).min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::INFINITY, class[0]))
        };
        self.members
            .iter()
            .enumerate()
            .map(|(node, classes)| classes.iter().map(|class| best(node, class)).collect())
            .collect()
    }

    /// The problem at a price of memory.
    fn weighed(&self, price: f64, fixed: &[Option<usize>]) -> Weighed {
        let classes = self.classes(price, fixed);
        let table = |(edge, ports): (&Edge, &(Vec<u32>, Vec<u32>))| Pairs {
            nodes: [edge.from, edge.to],
            ports: [ports.0.clone(), ports.1.clone()],
            n_ports: [edge.table.len() / edge.n_to_ports, edge.n_to_ports],
            values: edge.table.iter().map(|cost| cost.map_or(f64::INFINITY, |c| c.weighed(price))).collect(),
        };
        Weighed {
            costs: classes.iter().map(|list| list.iter().map(|(cost, _)| *cost).collect()).collect(),
            choices: classes.iter().map(|list| list.iter().map(|(_, choice)| *choice).collect()).collect(),
            tables: self.problem.edges.iter().zip(&self.ports).map(table).collect(),
        }
    }

    fn eliminate_fixed(&self, price: f64, fixed: &[Option<usize>]) -> Option<(f64, Vec<usize>)> {
        let mut known = Known { cost: f64::INFINITY };
        let moved = Moved::new(self.weighed(price, fixed), f64::INFINITY).narrow(&mut known)?;
        let choices = moved.weighed.choices.clone();
        let (value, classes) = bucket::cheapest(moved.weighed)?;
        let choice = |(node, &class): (usize, &usize)| choices[node][class];
        Some((value, classes.iter().enumerate().map(choice).collect()))
    }
}

/// Least `time + price * memory` of a problem that is asked once.
pub fn eliminate(problem: &Problem, price: f64) -> Option<(f64, Vec<usize>)> {
    Prepared::new(problem).eliminate(price)
}

/// The largest single time of a problem, or one: the scale on which a price of memory starts.
fn largest_time(problem: &Problem) -> f64 {
    let nodes = problem.nodes.iter().flat_map(|node| &node.choices);
    let edges = problem.edges.iter().flat_map(|edge| edge.table.iter().flatten());
    let largest = nodes.chain(edges).map(|cost| cost.time.abs()).fold(0.0, f64::max);
    if largest > 0.0 { largest } else { 1.0 }
}

/// A plan that fits and a bound on all that do, by bisection on the price of memory.
///
/// Returns `None` where no plan fits.
pub fn relax(problem: &Problem, capacity: f64) -> Option<Certified> {
    relax_fixed(&Prepared::new(problem), capacity, &vec![None; problem.nodes.len()])
}

fn relax_fixed(prepared: &Prepared<'_>, capacity: f64, fixed: &[Option<usize>]) -> Option<Certified> {
    let problem = prepared.problem;
    let at = |price: f64| -> Option<(Solution, f64)> {
        let (value, choices) = prepared.eliminate_fixed(price, fixed)?;
        let cost = problem.total(&choices)?;
        // An infinite capacity has no price, and nothing times infinity is no number.
        let granted = if price > 0.0 { price * capacity } else { 0.0 };
        Some((Solution { choices, cost }, value - granted))
    };
    let (free, bound) = at(0.0)?;
    if free.cost.memory <= capacity {
        return Some(Certified { bound, solution: free });
    }
    let mut low = 0.0;
    let mut high = 1e-3 * largest_time(problem) / free.cost.memory.abs().max(f64::MIN_POSITIVE);
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
    let prepared = Prepared::new(problem);
    let root = relax_fixed(&prepared, capacity, &vec![None; problem.nodes.len()])?;
    let mut best = root.solution.clone();
    let mut open = vec![(root.bound, vec![None; problem.nodes.len()], root.solution.choices)];
    let mut cut_bound = f64::INFINITY;
    let mut branches = 0;
    while let Some((bound, fixed, near)) = open.pop() {
        if bound >= best.cost.time - 1e-12 * best.cost.time.abs() {
            continue;
        }
        let free = |i: &usize| fixed[*i].is_none() && problem.nodes[*i].choices.len() > 1;
        let Some(node) =
            (0..problem.nodes.len()).filter(free).max_by_key(|&i| problem.nodes[i].choices.len())
        else {
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
            if let Some(child) = relax_fixed(&prepared, capacity, &pinned) {
                if child.solution.cost.time < best.cost.time {
                    best = child.solution.clone();
                }
                children.push((child.bound, pinned, child.solution.choices));
            }
        }
        // Most promising last: it is taken next. Ties keep the relaxation's own choice on top.
        children.sort_by(|a, b| {
            b.0.total_cmp(&a.0).then((a.1[node] == Some(near[node])).cmp(&(b.1[node] == Some(near[node]))))
        });
        open.extend(children);
    }
    let bound = best.cost.time.min(cut_bound);
    Some(Certified { solution: best, bound })
}
