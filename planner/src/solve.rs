//! The structured solver of a choice problem: exact, by elimination; transformer layers have width two or three.
//!
//! Three parts:
//! - `eliminate`: least `time + price * memory` for one price of memory. Nodes leave one by one; what a node can save
//!   or cost its neighbours becomes a table over their ports. Exact for any graph, fast where few neighbours meet.
//! - `relax`: bisection on the price finds a plan that fits and a bound no plan can beat (Everett 1963).
//! - `solve`: closes the gap between the two. Branch and bound over the nodes in elimination order, with the
//!   relaxation of what is left as the bound; the same elimination prices every remainder.

use std::collections::BTreeMap;

use crate::problem::{Problem, Solution};

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

    fn eliminate_fixed(&self, price: f64, fixed: &[Option<usize>]) -> Option<(f64, Vec<usize>)> {
        let problem = self.problem;
        let classes = self.classes(price, fixed);
        let mut costs: Vec<Vec<f64>> =
            classes.iter().map(|list| list.iter().map(|(cost, _)| *cost).collect()).collect();
        let mut tables: Vec<Table> = problem
            .edges
            .iter()
            .zip(&self.ports)
            .map(|(edge, (from, to))| Table {
                scope: vec![
                    (edge.from, from.clone(), edge.table.len() / edge.n_to_ports),
                    (edge.to, to.clone(), edge.n_to_ports),
                ],
                values: edge
                    .table
                    .iter()
                    .map(|cost| cost.map_or(f64::INFINITY, |c| c.weighed(price)))
                    .collect(),
            })
            .collect();
        for _ in 0..PRUNE_ROUNDS {
            prune(&mut costs, &tables);
        }
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
                    for (class, &port) in ports.iter().enumerate() {
                        costs[*other][class] += table.values[port as usize];
                    }
                }
                _ => tables.push(table),
            }
            backs.push(back);
        }
        if !total.is_finite() {
            return None;
        }
        let mut picked = vec![0; problem.nodes.len()];
        for back in backs.iter().rev() {
            let at = back.scope.iter().fold(0, |at, (n, ports, size)| at * size + ports[picked[*n]] as usize);
            picked[back.node] = back.best[at] as usize;
        }
        let choices = picked.iter().enumerate().map(|(node, &class)| classes[node][class].1).collect();
        Some((total, choices))
    }
}

/// Least `time + price * memory` of a problem that is asked once.
pub fn eliminate(problem: &Problem, price: f64) -> Option<(f64, Vec<usize>)> {
    Prepared::new(problem).eliminate(price)
}

/// Rounds of closing classes: what one round closes makes the worst cases of the next milder.
const PRUNE_ROUNDS: usize = 2;

/// Classes of a node against which all others are held: the cheapest by themselves.
const RIVALS: usize = 6;

/// Closes classes that another one beats whatever the neighbours do: `c(j) + sum_e max_q (t[j, q] - t[i, q]) < c(i)`
/// (dead-end elimination: Goldstein 1994). Never closes all classes of a node, and no optimum but one of equals.
fn prune(costs: &mut [Vec<f64>], tables: &[Table]) {
    for node in 0..costs.len() {
        let sides: Vec<(&Table, usize)> = tables
            .iter()
            .flat_map(|table| (0..2).filter(|&s| table.scope[s].0 == node).map(move |s| (table, s)))
            .collect();
        // Two edges between the same nodes each take their own worst case, which is still a bound.
        let mut order: Vec<usize> = (0..costs[node].len()).filter(|&c| costs[node][c].is_finite()).collect();
        order.sort_by(|&a, &b| costs[node][a].total_cmp(&costs[node][b]).then(a.cmp(&b)));
        for rank in 0..order.len().min(RIVALS) {
            let rival = order[rank];
            if costs[node][rival].is_infinite() {
                continue;
            }
            let worst: Vec<Vec<f64>> =
                sides.iter().map(|(table, side)| worst_gaps(table, *side, rival, costs)).collect();
            for &class in &order[rank + 1..] {
                let gap: f64 =
                    sides.iter().zip(&worst).map(|((t, s), gaps)| gaps[t.scope[*s].1[class] as usize]).sum();
                if costs[node][rival] + gap < costs[node][class] {
                    costs[node][class] = f64::INFINITY;
                }
            }
        }
    }
}

/// Per port of one side of a table, the most by which the rival's port can be dearer over the open ports opposite.
fn worst_gaps(table: &Table, side: usize, rival: usize, costs: &[Vec<f64>]) -> Vec<f64> {
    let (_, ports, n_ports) = &table.scope[side];
    let (other, other_ports, n_other) = &table.scope[1 - side];
    let mut open = vec![false; *n_other];
    for (class, &port) in other_ports.iter().enumerate() {
        open[port as usize] |= costs[*other][class].is_finite();
    }
    let at = |port: usize, q: usize| {
        if side == 0 { table.values[port * n_other + q] } else { table.values[q * n_ports + port] }
    };
    let own = ports[rival] as usize;
    let gap = |port: usize, q: usize| match (at(own, q), at(port, q)) {
        // Where the other cannot go at all the rival is no worse, and where only the rival cannot, much worse.
        (_, theirs) if theirs.is_infinite() => f64::NEG_INFINITY,
        (mine, _) if mine.is_infinite() => f64::INFINITY,
        (mine, theirs) => mine - theirs,
    };
    (0..*n_ports)
        .map(|port| {
            (0..*n_other).filter(|&q| open[q]).map(|q| gap(port, q)).fold(f64::NEG_INFINITY, f64::max)
        })
        .collect()
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
    let seen: Vec<(&Vec<u32>, usize)> = tables
        .iter()
        .flat_map(|table| {
            table.scope.iter().filter(|(n, ..)| *n == node).map(|(_, ports, size)| (ports, *size))
        })
        .collect();
    let mut index: BTreeMap<u128, u32> = BTreeMap::new();
    let mut tuples = Vec::new();
    let mut of_choice = vec![0; costs.len()];
    for choice in (0..costs.len()).filter(|&choice| costs[choice].is_finite()) {
        let key = seen.iter().fold(0, |key, (ports, size)| key * *size as u128 + u128::from(ports[choice]));
        of_choice[choice] = *index.entry(key).or_insert_with(|| {
            tuples.push(seen.iter().map(|(ports, _)| ports[choice]).collect());
            tuples.len() as u32 - 1
        });
    }
    (of_choice, tuples)
}

/// Eliminates a node: the best it can do for every combination of its neighbours' joint ports.
fn absorb(node: usize, own: &[f64], touching: &[Table], costs: &[Vec<f64>]) -> (Table, Back) {
    let mut others: Vec<usize> = touching
        .iter()
        .flat_map(|table| table.scope.iter().map(|(n, ..)| *n))
        .filter(|n| *n != node)
        .collect();
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
    // Cheapest first, so that the search over groups can stop early.
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by(|&a, &b| groups[a].1.total_cmp(&groups[b].1).then(a.cmp(&b)));
    let groups: Vec<(u32, f64)> = order.iter().map(|&g| groups[g]).collect();
    let own_tuples: Vec<Vec<u32>> = order.iter().map(|&g| own_tuples[g].clone()).collect();
    let joint: Vec<(Vec<u32>, Vec<Vec<u32>>)> =
        others.iter().map(|&other| joint_ports(other, touching, &costs[other])).collect();
    let sizes: Vec<usize> = joint.iter().map(|(_, tuples)| tuples.len()).collect();
    let mut values = Vec::with_capacity(sizes.iter().product());
    let mut best = Vec::with_capacity(sizes.iter().product());
    let plan = Lookup::new(node, touching, &others, &own_tuples, &joint);
    let mut at = vec![0; others.len()];
    let mut bases = vec![0; touching.len()];
    if sizes.iter().all(|&size| size > 0) {
        loop {
            let (value, group) = plan.minimum(&at, &groups, &mut bases);
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
    let scope: Vec<(usize, Vec<u32>, usize)> = others
        .iter()
        .zip(&joint)
        .map(|(&other, (ports, tuples))| (other, ports.clone(), tuples.len().max(1)))
        .collect();
    (Table { scope: scope.clone(), values }, Back { node, scope, best })
}

/// Offsets into the touching tables for the node's groups and for its neighbours' joint ports.
struct Lookup<'a> {
    tables: &'a [Table],
    /// Per table, offset of each group of the eliminated node.
    own: Vec<Vec<usize>>,
    /// Per table and neighbour, offset of each joint port; empty where the table does not see the neighbour.
    others: Vec<Vec<Vec<usize>>>,
    /// Sum of the tables' least values: no combination adds less to a group's own cost.
    least: f64,
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
                        let offsets =
                            joint[k].1.iter().map(|tuple| tuple[seen_by[k]] as usize * step).collect();
                        seen_by[k] += 1;
                        offsets
                    }
                    None => Vec::new(),
                });
            }
            all.push(row);
        }
        let least =
            tables.iter().map(|table| table.values.iter().copied().fold(f64::INFINITY, f64::min)).sum();
        Self { tables, own, others: all, least }
    }

    /// Best group for one combination of the neighbours' joint ports: its value and its choice.
    fn minimum(&self, at: &[usize], groups: &[(u32, f64)], bases: &mut [usize]) -> (f64, u32) {
        for (base, row) in bases.iter_mut().zip(&self.others) {
            *base = row.iter().zip(at).filter(|(offsets, _)| !offsets.is_empty()).map(|(o, &i)| o[i]).sum();
        }
        let mut best = (f64::INFINITY, groups.first().map_or(0, |group| group.0));
        for (g, &(choice, cost)) in groups.iter().enumerate() {
            if cost + self.least >= best.0 {
                break;
            }
            let mut value = cost;
            for ((table, own), base) in self.tables.iter().zip(&self.own).zip(bases.iter()) {
                value += table.values[base + own[g]];
            }
            if value < best.0 {
                best = (value, choice);
            }
        }
        best
    }
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
