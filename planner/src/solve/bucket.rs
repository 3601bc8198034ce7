//! Bucket elimination: nodes leave one by one, and what a node can save or cost its neighbours becomes a table over
//! their ports (Bertele and Brioschi 1972; Dechter 1999). Exact for any graph, fast where few neighbours meet.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::weighed::{Pairs, Ports, Weighed};

/// A table over the ports of a few nodes, left by an eliminated node.
pub(super) struct Table<T> {
    /// Nodes, each with the port of every class and the number of ports.
    pub(super) scope: Vec<(usize, Ports, usize)>,
    /// One per combination of ports, the last node's fastest.
    pub(super) values: Vec<T>,
}

impl<T> Table<T> {
    /// The table of an edge.
    pub(super) fn of_pair(pair: &Pairs, values: Vec<T>) -> Self {
        let side = |side: usize| (pair.nodes[side], pair.ports[side].clone(), pair.n_ports[side]);
        Self { scope: vec![side(0), side(1)], values }
    }

    /// Whether a node is in its scope.
    pub(super) fn sees(&self, node: usize) -> bool {
        self.scope.iter().any(|(n, ..)| *n == node)
    }
}

/// How to find an eliminated node's best class once its neighbours are chosen.
struct Back {
    node: usize,
    scope: Vec<(usize, Ports, usize)>,
    best: Vec<u32>,
}

/// The cheapest combination and its cost. `None` where every combination is forbidden.
///
/// Among equals the smaller class of the node that is eliminated later.
pub(super) fn cheapest(weighed: Weighed) -> Option<(f64, Vec<usize>)> {
    let Weighed { mut costs, tables: edges, .. } = weighed;
    // Most nodes of a narrowed problem have one class left.
    let is_settled: Vec<bool> = costs.iter().map(|costs| costs.len() == 1).collect();
    let mut total: f64 = costs.iter().filter(|costs| costs.len() == 1).map(|costs| costs[0]).sum();
    let mut tables: Vec<Table<f64>> = Vec::new();
    for mut pair in edges {
        match pair.nodes.map(|node| is_settled[node]) {
            [true, true] => total += pair.values[pair.at(0, 0)],
            [true, false] => add_to(&mut costs, &pair, 1, |class| pair.at(0, class)),
            [false, true] => add_to(&mut costs, &pair, 0, |class| pair.at(class, 0)),
            [false, false] => {
                let values = Arc::unwrap_or_clone(std::mem::take(&mut pair.values));
                tables.push(Table::of_pair(&pair, values));
            }
        }
    }
    let mut left: Vec<usize> = (0..costs.len()).filter(|&node| !is_settled[node]).collect();
    let mut backs = Vec::new();
    while let Some(node) = next_node(&left, &tables) {
        left.retain(|&other| other != node);
        let (touching, rest): (Vec<_>, Vec<_>) = tables.into_iter().partition(|table| table.sees(node));
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
    let mut picked = vec![0; costs.len()];
    for back in backs.iter().rev() {
        let at = back.scope.iter().fold(0, |at, (n, ports, size)| at * size + ports[picked[*n]] as usize);
        picked[back.node] = back.best[at] as usize;
    }
    Some((total, picked))
}

/// Adds to the classes of the node on one side of an edge what the pair with the other's only class costs.
fn add_to(costs: &mut [Vec<f64>], pair: &Pairs, side: usize, at: impl Fn(usize) -> usize) {
    let costs = &mut costs[pair.nodes[side]];
    costs.iter_mut().enumerate().for_each(|(class, cost)| *cost += pair.values[at(class)]);
}

/// The node whose elimination leaves the smallest table; ties to the smaller id.
pub(super) fn next_node<T>(left: &[usize], tables: &[Table<T>]) -> Option<usize> {
    let size = |node: usize| -> f64 {
        let beside = tables.iter().filter(|table| table.sees(node)).flat_map(|table| &table.scope);
        beside.filter(|(n, ..)| *n != node).map(|(_, _, ports)| *ports as f64).product()
    };
    let sizes = left.iter().map(|&node| (size(node), node));
    sizes.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))).map(|(_, node)| node)
}

/// Where eliminating all nodes takes more than so many look-ups, at most, the node with the most classes of those whose
/// table is the first that is too large.
pub(super) fn heaviest(weighed: &Weighed, most: f64) -> Option<usize> {
    let n_classes = |node: usize| weighed.costs[node].len();
    let is_open = |node: usize| n_classes(node) > 1;
    let mut left: Vec<usize> = (0..weighed.costs.len()).filter(|&node| is_open(node)).collect();
    // Most problems are narrowed to a few combinations.
    if left.iter().map(|&node| n_classes(node) as f64).product::<f64>() <= most {
        return None;
    }
    // Of tables nothing but which open nodes they see by how many ports.
    let of_pair = |pair: &Pairs| {
        let mut table: Table<()> = Table::of_pair(pair, Vec::new());
        table.scope.retain(|(node, ..)| is_open(*node));
        table
    };
    let mut tables: Vec<Table<()>> = weighed.tables.iter().map(of_pair).collect();
    let mut work = 0.0;
    while let Some(node) = next_node(&left, &tables) {
        left.retain(|&other| other != node);
        let (touching, rest): (Vec<_>, Vec<_>) = tables.into_iter().partition(|table| table.sees(node));
        tables = rest;
        let others = neighbours(node, &touching);
        let n_ports = |other: usize| -> usize {
            let seen = touching.iter().flat_map(|table| &table.scope).filter(|(n, ..)| *n == other);
            seen.fold(1_usize, |all, (_, _, ports)| all.saturating_mul(*ports)).min(n_classes(other))
        };
        let scope: Vec<(usize, Ports, usize)> =
            others.iter().map(|&other| (other, Ports::default(), n_ports(other))).collect();
        work += scope.iter().map(|(.., ports)| *ports as f64).product::<f64>() * n_classes(node) as f64;
        if work > most {
            return others.into_iter().chain([node]).max_by_key(|&one| (n_classes(one), one));
        }
        if scope.len() > 1 {
            tables.push(Table { scope, values: Vec::new() });
        }
    }
    None
}

/// Nodes that some table sees beside a node, in rising order.
pub(super) fn neighbours<T>(node: usize, tables: &[Table<T>]) -> Vec<usize> {
    let all = tables.iter().flat_map(|table| table.scope.iter().map(|(n, ..)| *n));
    all.filter(|n| *n != node).collect::<BTreeSet<usize>>().into_iter().collect()
}

/// Joint ports of a node over all tables that see it: one per distinct tuple among its classes.
pub(super) fn joint_ports<T>(
    node: usize,
    tables: &[Table<T>],
    classes: std::ops::Range<usize>,
) -> (Vec<u32>, Vec<Vec<u32>>) {
    let seen = tables.iter().flat_map(|table| &table.scope).filter(|(n, ..)| *n == node);
    let seen: Vec<&Ports> = seen.map(|(_, ports, _)| ports).collect();
    let tuples: Vec<Vec<u32>> =
        classes.map(|class| seen.iter().map(|ports| ports[class]).collect()).collect();
    let mut numbers: BTreeMap<&Vec<u32>, u32> = BTreeMap::new();
    let mut distinct = Vec::new();
    let number = |tuple| {
        *numbers.entry(tuple).or_insert_with(|| {
            distinct.push(tuple.clone());
            distinct.len() as u32 - 1
        })
    };
    (tuples.iter().map(number).collect(), distinct)
}

/// Eliminates a node: the best it can do for every combination of its neighbours' joint ports.
fn absorb(node: usize, own: &[f64], touching: &[Table<f64>], costs: &[Vec<f64>]) -> (Table<f64>, Back) {
    let others = neighbours(node, touching);
    // Classes of the node that look alike to every table: keep the cheapest of each group.
    let (own_ports, own_tuples) = joint_ports(node, touching, 0..own.len());
    let mut groups: Vec<(u32, f64)> = vec![(0, f64::INFINITY); own_tuples.len()];
    for (class, &cost) in own.iter().enumerate() {
        let group = &mut groups[own_ports[class] as usize];
        if cost < group.1 {
            *group = (class as u32, cost);
        }
    }
    // Cheapest first, so that the search over groups can stop early.
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by(|&a, &b| groups[a].1.total_cmp(&groups[b].1).then(a.cmp(&b)));
    let groups: Vec<(u32, f64)> = order.iter().map(|&g| groups[g]).collect();
    let own_tuples: Vec<Vec<u32>> = order.iter().map(|&g| own_tuples[g].clone()).collect();
    let joint: Vec<(Vec<u32>, Vec<Vec<u32>>)> =
        others.iter().map(|&other| joint_ports(other, touching, 0..costs[other].len())).collect();
    let sizes: Vec<usize> = joint.iter().map(|(_, tuples)| tuples.len()).collect();
    let mut values = Vec::with_capacity(sizes.iter().product());
    let mut best = Vec::with_capacity(sizes.iter().product());
    let (own, rows) = offsets(node, touching, &others, &own_tuples, &joint);
    let least = touching.iter().map(|table| table.values.iter().copied().fold(f64::INFINITY, f64::min)).sum();
    let plan = Lookup { tables: touching, own, others: rows, least };
    let mut at = vec![0; others.len()];
    let mut bases = vec![0; touching.len()];
    loop {
        let (value, group) = plan.minimum(&at, &groups, &mut bases);
        values.push(value);
        best.push(group);
        let Some(dim) = (0..at.len()).rev().find(|&dim| at[dim] + 1 < sizes[dim]) else { break };
        at[dim] += 1;
        at[dim + 1..].fill(0);
    }
    let scope: Vec<(usize, Ports, usize)> = others
        .iter()
        .zip(joint)
        .map(|(&other, (ports, tuples))| (other, ports.into(), tuples.len()))
        .collect();
    (Table { scope: scope.clone(), values }, Back { node, scope, best })
}

/// Per table, the offset of every joint port of a node that is eliminated; and per table and neighbour, of every joint
/// port of the neighbour, empty where the table does not see it.
type Offsets = (Vec<Vec<usize>>, Vec<Vec<Vec<usize>>>);

/// Where in the tables that touch a node its groups and its neighbours' joint ports lead.
pub(super) fn offsets<T>(
    node: usize,
    tables: &[Table<T>],
    others: &[usize],
    own_tuples: &[Vec<u32>],
    joint: &[(Vec<u32>, Vec<Vec<u32>>)],
) -> Offsets {
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
            row.push(stride(other).map_or_else(Vec::new, |step| {
                let at = seen_by[k];
                seen_by[k] += 1;
                joint[k].1.iter().map(|tuple| tuple[at] as usize * step).collect()
            }));
        }
        all.push(row);
    }
    (own, all)
}

/// The tables that touch a node and where in them its groups and its neighbours lead.
struct Lookup<'a> {
    tables: &'a [Table<f64>],
    own: Vec<Vec<usize>>,
    others: Vec<Vec<Vec<usize>>>,
    /// Sum of the tables' least values: no combination adds less to a group's own cost.
    least: f64,
}

impl Lookup<'_> {
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
