//! The choice problem inside a layer: one choice per node, a price for each choice and for each pair on an edge.
//!
//! ```text
//! minimise   sum_i t[i, c(i)]  +  sum_(i,j) t[i, j, c(i), c(j)]        -> Problem::total().time
//! such that  sum_i m[i, c(i)]  +  sum_(i,j) m[i, j, c(i), c(j)] <= cap  -> Problem::total().memory
//!            no pair on an edge is forbidden                            -> Problem::total() is some
//! ```
//! An edge sees a choice only through its *port* there (which sharding it leaves, which it wants), and many choices
//! share a port, so tables are small. This file holds the data and the evaluation from scratch; `solve`, `ilp` and
//! `brute` each find the minimum in their own way.

/// Time and memory of a choice. Units are the caller's; seconds and bytes in the planner.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// What is minimised.
    pub time: f64,
    /// What is bounded.
    pub memory: f64,
}

impl Cost {
    /// Sum of two.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self { time: self.time + other.time, memory: self.memory + other.memory }
    }

    /// `time + price * memory`.
    pub fn weighed(self, price: f64) -> f64 {
        self.time + price * self.memory
    }
}

/// One node: the prices of its choices. Never empty.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Price of each choice.
    pub choices: Vec<Cost>,
}

/// One edge: the price of each pair of ports, `None` where the pair is forbidden.
#[derive(Clone, Debug, PartialEq)]
pub struct Edge {
    /// First node.
    pub from: usize,
    /// Second node.
    pub to: usize,
    /// Port of each choice of the first node.
    pub from_port: Vec<u32>,
    /// Port of each choice of the second node.
    pub to_port: Vec<u32>,
    /// Ports of the second node: row length of the table.
    pub n_to_ports: usize,
    /// Price per pair, row by row.
    pub table: Vec<Option<Cost>>,
}

impl Edge {
    /// Price of a pair of choices.
    pub fn price(&self, from_choice: usize, to_choice: usize) -> Option<Cost> {
        self.table[self.from_port[from_choice] as usize * self.n_to_ports + self.to_port[to_choice] as usize]
    }
}

/// A choice problem.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Problem {
    /// Nodes.
    pub nodes: Vec<Node>,
    /// Edges.
    pub edges: Vec<Edge>,
}

impl Problem {
    /// The same where the memory of edges is paid in time, at a price, and takes none.
    #[must_use]
    pub fn with_edges_at(&self, price: f64) -> Self {
        let paid = |cost: Cost| Cost { time: cost.weighed(price), memory: 0.0 };
        let edge = |edge: &Edge| Edge {
            table: edge.table.iter().map(|cost| cost.map(paid)).collect(),
            ..edge.clone()
        };
        Self { nodes: self.nodes.clone(), edges: self.edges.iter().map(edge).collect() }
    }

    /// The same where choices of nodes take so much more time.
    #[must_use]
    pub fn with_more_at_nodes(&self, more: impl Fn(usize, usize) -> f64) -> Self {
        let node = |(at, node): (usize, &Node)| {
            let slower =
                |(choice, cost): (usize, &Cost)| Cost { time: cost.time + more(at, choice), ..*cost };
            Node { choices: node.choices.iter().enumerate().map(slower).collect() }
        };
        Self { nodes: self.nodes.iter().enumerate().map(node).collect(), edges: self.edges.clone() }
    }

    /// Price of one choice per node, from scratch; `None` where a pair is forbidden.
    pub fn total(&self, choices: &[usize]) -> Option<Cost> {
        let (nodes, edges) = self.parts(choices)?;
        Some(nodes.plus(edges))
    }

    /// The same of the nodes and of the edges.
    pub fn parts(&self, choices: &[usize]) -> Option<(Cost, Cost)> {
        let nodes =
            self.nodes.iter().zip(choices).fold(Cost::default(), |sum, (node, &c)| sum.plus(node.choices[c]));
        let edges = self.edges.iter().try_fold(Cost::default(), |sum, edge| {
            edge.price(choices[edge.from], choices[edge.to]).map(|price| sum.plus(price))
        })?;
        Some((nodes, edges))
    }

    /// Number of combinations, as a float since it overflows easily.
    pub fn n_combinations(&self) -> f64 {
        self.nodes.iter().map(|node| node.choices.len() as f64).product()
    }
}

/// One choice per node and its price.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// The choices.
    pub choices: Vec<usize>,
    /// Their price.
    pub cost: Cost,
}

/// Tries every combination; the oracle of the solvers on small problems. Among equal times the first combination.
pub fn brute(problem: &Problem, capacity: f64) -> Option<Solution> {
    let mut choices = vec![0; problem.nodes.len()];
    let mut best: Option<Solution> = None;
    loop {
        if let Some(cost) = problem.total(&choices)
            && cost.memory <= capacity
            && best.as_ref().is_none_or(|b| cost.time < b.cost.time)
        {
            best = Some(Solution { choices: choices.clone(), cost });
        }
        let Some(at) = (0..choices.len()).rev().find(|&i| choices[i] + 1 < problem.nodes[i].choices.len())
        else {
            return best;
        };
        choices[at] += 1;
        choices[at + 1..].fill(0);
    }
}
