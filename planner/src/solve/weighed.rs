//! A choice problem at one price of memory: one number per class of choices and per pair of ports.

use std::sync::Arc;

/// Port of every class of a node on an edge.
pub(super) type Ports = Arc<[u32]>;

/// Cost per pair of an edge, row by row of the first node's ports; infinite where the pair is forbidden.
pub(super) type Values = Arc<Vec<f64>>;

/// Choices of a node that every edge sees alike are one class; the cheapest of them stands for all.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Weighed {
    /// Per node, the cost of each class.
    pub(super) costs: Vec<Vec<f64>>,
    /// Per node, the choice that stands for each class.
    pub(super) choices: Vec<Vec<usize>>,
    /// One table per edge.
    pub(super) tables: Vec<Pairs>,
}

/// The pairs of one edge.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pairs {
    /// The two nodes.
    pub(super) nodes: [usize; 2],
    /// Of either node.
    pub(super) ports: [Ports; 2],
    /// Ports of either node.
    pub(super) n_ports: [usize; 2],
    pub(super) values: Values,
}

impl Pairs {
    /// Where among the values two classes meet.
    pub(super) fn at(&self, from: usize, to: usize) -> usize {
        self.ports[0][from] as usize * self.n_ports[1] + self.ports[1][to] as usize
    }
}

impl Weighed {
    /// Cost of one class per node.
    pub(super) fn total(&self, classes: &[usize]) -> f64 {
        let own: f64 = self.costs.iter().zip(classes).map(|(costs, &class)| costs[class]).sum();
        let pair = |table: &Pairs| {
            let [from, to] = table.nodes.map(|node| classes[node]);
            table.values[table.at(from, to)]
        };
        own + self.tables.iter().map(pair).sum::<f64>()
    }

    /// The problem without the classes that cost infinitely much and the ports that no class has. `None` where a node
    /// has no class left.
    pub(super) fn without_idle(self) -> Option<Self> {
        let open = |costs: &Vec<f64>| (0..costs.len()).filter(|&class| costs[class].is_finite()).collect();
        let kept = Kept::new(&self, self.costs.iter().map(open).collect());
        if kept.classes.iter().any(Vec::is_empty) {
            return None;
        }
        let all_open = kept.classes.iter().zip(&self.costs).all(|(open, costs)| open.len() == costs.len());
        let n_ports =
            |table: &Pairs, ports: &[Vec<usize>; 2]| [ports[0].len(), ports[1].len()] == table.n_ports;
        let none_idle = self.tables.iter().zip(&kept.ports).all(|(table, ports)| n_ports(table, ports));
        Some(if all_open && none_idle { self } else { self.keep(&kept) })
    }

    /// The problem with only some classes left, and of every edge only the ports that they have.
    pub(super) fn keep(&self, kept: &Kept) -> Self {
        let table = |(table, ports): (&Pairs, &[Vec<usize>; 2])| {
            let [rows, columns] = ports;
            let row = |&p: &usize| columns.iter().map(move |&q| table.values[p * table.n_ports[1] + q]);
            Pairs {
                nodes: table.nodes,
                ports: [0, 1].map(|side| {
                    let mut number = vec![0; table.n_ports[side]];
                    ports[side].iter().enumerate().for_each(|(new, &old)| number[old] = new as u32);
                    let classes = &kept.classes[table.nodes[side]];
                    classes.iter().map(|&class| number[table.ports[side][class] as usize]).collect()
                }),
                n_ports: [rows.len(), columns.len()],
                values: Arc::new(rows.iter().flat_map(row).collect()),
            }
        };
        Self {
            costs: select(&self.costs, &kept.classes),
            choices: select(&self.choices, &kept.classes),
            tables: self.tables.iter().zip(&kept.ports).map(table).collect(),
        }
    }
}

/// Classes and ports that stay.
pub(super) struct Kept {
    /// Per node, its classes.
    pub(super) classes: Vec<Vec<usize>>,
    /// Per table and side, its ports.
    pub(super) ports: Vec<[Vec<usize>; 2]>,
}

impl Kept {
    /// The given classes and the ports that they have.
    pub(super) fn new(weighed: &Weighed, classes: Vec<Vec<usize>>) -> Self {
        let used = |table: &Pairs, side: usize| {
            let mut used = vec![false; table.n_ports[side]];
            for &class in &classes[table.nodes[side]] {
                used[table.ports[side][class] as usize] = true;
            }
            (0..used.len()).filter(|&port| used[port]).collect()
        };
        let ports = weighed.tables.iter().map(|table| [0, 1].map(|side| used(table, side))).collect();
        Self { classes, ports }
    }
}

/// Of every list, the entries at the given places.
pub(super) fn select<T: Copy>(lists: &[Vec<T>], at: &[Vec<usize>]) -> Vec<Vec<T>> {
    lists.iter().zip(at).map(|(list, at)| at.iter().map(|&i| list[i]).collect()).collect()
}
