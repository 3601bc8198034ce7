//! Elimination under a capacity: in place of one least cost, every pair of time and memory worth having.
//!
//! A label is a choice for some nodes: its time, its memory, and what it costs above the bound at the price of memory
//! (`narrow`: the excesses of its classes and pairs, none negative). A label is dropped where
//! - another with the same ports towards the rest is as fast and as small, or
//! - bound + excess exceeds the limit: then no completion of it is as fast as the plan already known.

use super::bucket::{Table, joint_ports, neighbours, next_node, offsets};
use super::front;
use super::narrow::Moved;
use crate::problem::{Cost, Problem};

/// How the search for the fastest plan ended.
pub(super) enum Labelled {
    /// The choices of the fastest plan that fits within the limit.
    Fastest(Vec<usize>),
    /// No plan fits within the limit.
    Nothing,
    /// There were more labels than were allowed.
    TooMany,
}

/// A choice for some nodes.
#[derive(Clone, Copy, Debug)]
struct Label {
    cost: Cost,
    excess: f64,
    /// Its place in the list of what labels are made of.
    made: u32,
}

/// What a label is made of.
#[derive(Clone, Copy, Debug)]
enum Made {
    /// A pair of an edge, whose classes are chosen elsewhere.
    Pair,
    /// A class of a node.
    Class { node: usize, class: usize },
    /// Two labels.
    Both(u32, u32),
}

struct Search<'a> {
    problem: &'a Problem,
    moved: &'a Moved,
    /// No excess above this.
    slack: f64,
    made: Vec<Made>,
    /// No more labels than these.
    most: usize,
}

/// The fastest plan within `capacity` that costs no more than `limit` at the price of `moved`, and the number of labels
/// made: about `most` at most.
pub(super) fn fastest(
    problem: &Problem,
    moved: &Moved,
    (capacity, limit): (f64, f64),
    most: usize,
) -> (Labelled, usize) {
    let slack = limit - moved.bound();
    let mut search = Search { problem, moved, slack, made: vec![Made::Pair], most };
    let labelled = match search.all() {
        None => Labelled::TooMany,
        Some(all) => {
            let fits = all.iter().filter(|label| label.cost.memory <= capacity);
            match fits.min_by(|a, b| a.cost.time.total_cmp(&b.cost.time)) {
                Some(label) => Labelled::Fastest(search.choices(label.made)),
                None => Labelled::Nothing,
            }
        }
    };
    (labelled, search.made.len())
}

impl Search<'_> {
    /// The labels of all nodes. `None` where there are too many.
    fn all(&mut self) -> Option<Vec<Label>> {
        let weighed = &self.moved.weighed;
        let mut tables: Vec<Table<Vec<Label>>> = (0..weighed.tables.len()).map(|t| self.table(t)).collect();
        let mut left: Vec<usize> = (0..weighed.costs.len()).collect();
        while let Some(node) = next_node(&left, &tables) {
            left.retain(|&other| other != node);
            let (touching, rest): (Vec<_>, Vec<_>) = tables.into_iter().partition(|table| table.sees(node));
            tables = rest;
            let table = self.absorb(node, &touching)?;
            tables.push(table);
        }
        let nothing = vec![Label { cost: Cost::default(), excess: 0.0, made: 0 }];
        tables.iter().try_fold(nothing, |all, table| self.product(&all, &table.values[0]))
    }

    /// The pairs of an edge, each a label.
    fn table(&self, t: usize) -> Table<Vec<Label>> {
        let pairs = &self.moved.weighed.tables[t];
        let edge = &self.problem.edges[t];
        let choices = &self.moved.weighed.choices;
        let [from, to] = [0, 1].map(|side| {
            // Ports were numbered anew; any choice that has one leads back to the edge's own.
            let list = &choices[pairs.nodes[side]];
            let first = |port: usize| pairs.ports[side].iter().position(|&p| p as usize == port);
            (0..pairs.n_ports[side]).map(|port| first(port).map(|class| list[class])).collect::<Vec<_>>()
        });
        let label = |row: usize, column: usize| {
            let cost = edge.price(from[row]?, to[column]?)?;
            let excess = self.moved.pair_excess(t, row, column);
            (excess <= self.slack).then_some(Label { cost, excess, made: 0 })
        };
        let cell = |row: usize| (0..to.len()).map(move |column| (row, column));
        let values =
            (0..from.len()).flat_map(cell).map(|(row, column)| label(row, column).into_iter().collect());
        Table::of_pair(pairs, values.collect())
    }

    /// Eliminates a node: for every combination of its neighbours' joint ports, the labels that are worth having.
    fn absorb(&mut self, node: usize, touching: &[Table<Vec<Label>>]) -> Option<Table<Vec<Label>>> {
        let others = neighbours(node, touching);
        let n_classes = |node: usize| self.moved.weighed.costs[node].len();
        let (own_ports, own_tuples) = joint_ports(node, touching, 0..n_classes(node));
        let mut groups: Vec<Vec<Label>> = vec![Vec::new(); own_tuples.len()];
        for (class, &port) in own_ports.iter().enumerate() {
            let choice = self.moved.weighed.choices[node][class];
            let cost = self.problem.nodes[node].choices[choice];
            let excess = self.moved.class_excess(node, class);
            self.made.push(Made::Class { node, class });
            groups[port as usize].push(Label { cost, excess, made: self.made.len() as u32 - 1 });
        }
        let joint: Vec<(Vec<u32>, Vec<Vec<u32>>)> =
            others.iter().map(|&other| joint_ports(other, touching, 0..n_classes(other))).collect();
        let (own, rows) = offsets(node, touching, &others, &own_tuples, &joint);
        let sizes: Vec<usize> = joint.iter().map(|(_, tuples)| tuples.len()).collect();
        let mut values = Vec::with_capacity(sizes.iter().product());
        let mut at = vec![0; others.len()];
        loop {
            let mut labels: Vec<Label> = Vec::new();
            for (g, group) in groups.iter().enumerate() {
                let mut list = group.clone();
                for (t, table) in touching.iter().enumerate() {
                    let base: usize =
                        rows[t].iter().zip(&at).filter(|(o, _)| !o.is_empty()).map(|(o, &i)| o[i]).sum();
                    list = self.product(&list, &table.values[base + own[t][g]])?;
                }
                labels.extend(list);
            }
            values.push(front(&labels, |label| label.cost));
            let Some(dim) = (0..at.len()).rev().find(|&dim| at[dim] + 1 < sizes[dim]) else { break };
            at[dim] += 1;
            at[dim + 1..].fill(0);
        }
        let scope =
            others.iter().zip(joint).map(|(&other, (ports, tuples))| (other, ports.into(), tuples.len()));
        Some(Table { scope: scope.collect(), values })
    }

    /// Every label of one list with every one of another, but for those that are not worth having. `None` where there
    /// are too many.
    fn product(&mut self, left: &[Label], right: &[Label]) -> Option<Vec<Label>> {
        let mut list = Vec::new();
        for a in left {
            for b in right {
                let excess = a.excess + b.excess;
                if excess <= self.slack {
                    let made = match (a.made, b.made) {
                        (one, 0) | (0, one) => one,
                        (one, other) => {
                            self.made.push(Made::Both(one, other));
                            self.made.len() as u32 - 1
                        }
                    };
                    list.push(Label { cost: a.cost.plus(b.cost), excess, made });
                }
            }
            if self.made.len() > self.most {
                return None;
            }
        }
        Some(if left.len() > 1 && right.len() > 1 { front(&list, |label| label.cost) } else { list })
    }

    /// The choice of every node in a label.
    fn choices(&self, made: u32) -> Vec<usize> {
        let choices = &self.moved.weighed.choices;
        let mut picked: Vec<usize> = choices.iter().map(|list| list[0]).collect();
        let mut open = vec![made];
        while let Some(made) = open.pop() {
            match self.made[made as usize] {
                Made::Pair => {}
                Made::Class { node, class } => picked[node] = choices[node][class],
                Made::Both(one, other) => open.extend([one, other]),
            }
        }
        picked
    }
}
