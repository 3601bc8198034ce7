//! Bucket elimination: nodes leave one by one, and what a node can save or cost its neighbours becomes a table over
//! their ports (Bertele and Brioschi 1972; Dechter 1999). Exact for any graph, fast where few neighbours meet.

use std::collections::BTreeMap;

use super::weighed::Weighed;

/// A table over the ports of a few nodes, left by an eliminated node.
struct Table {
    /// Nodes, each with the port of every class and the number of ports.
    scope: Vec<(usize, Vec<u32>, usize)>,
    values: Vec<f64>,
}

/// How to find an eliminated node's best class once its neighbours are chosen.
struct Back {
    node: usize,
    scope: Vec<(usize, Vec<u32>, usize)>,
    best: Vec<u32>,
}

/// The cheapest combination and its cost. `None` where every combination is forbidden.
///
/// Among equals the smaller class of the node that is eliminated later.
pub(super) fn cheapest(weighed: Weighed) -> Option<(f64, Vec<usize>)> {
    let Weighed { mut costs, tables, .. } = weighed;
    let scope = |nodes: [usize; 2], ports: [Vec<u32>; 2], n_ports: [usize; 2]| {
        let [from, to] = ports;
        vec![(nodes[0], from, n_ports[0]), (nodes[1], to, n_ports[1])]
    };
    let mut tables: Vec<Table> = tables
        .into_iter()
        .map(|table| Table { scope: scope(table.nodes, table.ports, table.n_ports), values: table.values })
        .collect();
    let mut left: Vec<usize> = (0..costs.len()).collect();
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
    let mut picked = vec![0; costs.len()];
    for back in backs.iter().rev() {
        let at = back.scope.iter().fold(0, |at, (n, ports, size)| at * size + ports[picked[*n]] as usize);
        picked[back.node] = back.best[at] as usize;
    }
    Some((total, picked))
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
