//! Choice problems on which solvers are held to each other: of shipped models' layers, and random ones.

use cost_model::Constants;
use frontends::{read_cluster, read_model, shipped_cluster, shipped_model};
use ir::mesh::Mesh;
use ir::token_order::TokenOrder;
use planner::clock::Clock;
use planner::given::Given;
use planner::layer_problem::LayerProblem;
use planner::prices::Prices;
use planner::problem::{Cost, Edge, Node, Problem};
use planner::solve;

use crate::layers::machine;

/// A price of memory, in seconds per byte, at which nothing else counts.
const DEAR: f64 = 1.0;

/// The choice problem of every layer kind of a shipped model on a mesh of A100, by the layer's name; nothing where a
/// layer has no choice there.
pub fn layer_problems(model: &str, sizes: &[u64], given: &Given) -> Vec<(String, Option<Problem>)> {
    let read = |name: &str| read_model(name, shipped_model(name)?.text).ok();
    let cluster = shipped_cluster("dgx-a100-80").and_then(|one| read_cluster("dgx-a100-80", one.text).ok());
    let (Some(model), Some(cluster), Some(mesh)) = (read(model), cluster, Mesh::of_sizes(sizes)) else {
        return Vec::new();
    };
    let constants = Constants::load();
    let prices = Prices::new(machine(&cluster, &constants, TokenOrder::ZigZag), &mesh, &[]);
    let clock = Clock::after((8.0, 2.0), 16.0);
    let problem = |layer: &ir::graph::Layer| {
        let lengths = layer.sizes(8, 2048);
        let built = LayerProblem::new(layer, &lengths, &prices, clock, given);
        (layer.name.clone(), built.map(|built| built.problem))
    };
    model.layers.iter().map(problem).collect()
}

/// A capacity between the least memory and that of the fastest choice, at 60 % of the way; nothing where no choice is
/// legal.
pub fn tight(problem: &Problem) -> Option<f64> {
    let memory = |choices: &[usize]| Some(problem.total(choices)?.memory);
    let least = memory(&solve::eliminate(problem, DEAR)?.1)?;
    let most = memory(&solve::eliminate(problem, 0.0)?.1)?;
    Some(least + 0.6 * (most - least))
}

/// The problem with at most so many choices of every node: those of its fastest and of its leanest plan, and others
/// spread evenly over the rest. Pairs of ports that no choice is left for are forbidden.
pub fn limited(problem: &Problem, most: usize) -> Option<Problem> {
    let (_, fastest) = solve::eliminate(problem, 0.0)?;
    let (_, leanest) = solve::eliminate(problem, DEAR)?;
    let kept = |(at, node): (usize, &Node)| -> Vec<usize> {
        let n = node.choices.len();
        let mut list = vec![fastest[at], leanest[at]];
        let spread = (0..most).map(|i| i * n / most);
        list.extend(spread);
        let mut unique: Vec<usize> = Vec::new();
        list.into_iter().for_each(|one| {
            if !unique.contains(&one) {
                unique.push(one)
            }
        });
        unique.truncate(most);
        unique.sort_unstable();
        unique
    };
    let kept: Vec<Vec<usize>> = problem.nodes.iter().enumerate().map(kept).collect();
    let node = |(node, kept): (&Node, &Vec<usize>)| Node {
        choices: kept.iter().map(|&choice| node.choices[choice]).collect(),
    };
    let edge = |edge: &Edge| {
        let ports = |ports: &[u32], at: usize| kept[at].iter().map(|&choice| ports[choice]).collect();
        let (from_port, to_port): (Vec<u32>, Vec<u32>) =
            (ports(&edge.from_port, edge.from), ports(&edge.to_port, edge.to));
        let price = |(at, price): (usize, &Option<Cost>)| {
            let (from, to) = ((at / edge.n_to_ports) as u32, (at % edge.n_to_ports) as u32);
            price.filter(|_| from_port.contains(&from) && to_port.contains(&to))
        };
        let table = edge.table.iter().enumerate().map(price).collect();
        Edge { from_port: from_port.clone(), to_port: to_port.clone(), table, ..*edge }
    };
    let nodes = problem.nodes.iter().zip(&kept).map(node).collect();
    Some(Problem { nodes, edges: problem.edges.iter().map(edge).collect() })
}

/// Numbers that look drawn and are the same every time (Knuth's linear congruence, MMIX).
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    /// Numbers from a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next below a bound.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound.max(1)
    }

    fn cost(&mut self) -> Cost {
        Cost { time: self.below(100) as f64, memory: self.below(20) as f64 }
    }
}

/// A random graph of so many nodes with at most so many choices each, in whole seconds and bytes: a chain with some
/// more edges, triangles and several between two nodes included; a sixth of the pairs is forbidden.
pub fn random_problem(draw: &mut Draw, (n_nodes, n_choices): (u64, u64)) -> Problem {
    let node = |draw: &mut Draw| {
        let n = 1 + draw.below(n_choices);
        Node { choices: (0..n).map(|_| draw.cost()).collect() }
    };
    let nodes: Vec<Node> = (0..n_nodes).map(|_| node(draw)).collect();
    let mut pairs: Vec<(usize, usize)> = (1..n_nodes as usize).map(|to| (to - 1, to)).collect();
    for _ in 0..draw.below(n_nodes) {
        let (from, to) = (draw.below(n_nodes) as usize, draw.below(n_nodes) as usize);
        pairs.extend((from != to).then_some((from, to)));
    }
    let mut edge = |(from, to): (usize, usize)| {
        let n_ports = 1 + draw.below(3);
        let mut ports = |at: usize| nodes[at].choices.iter().map(|_| draw.below(n_ports) as u32).collect();
        let (from_port, to_port) = (ports(from), ports(to));
        let table = (0..n_ports * n_ports).map(|_| (draw.below(6) > 0).then(|| draw.cost())).collect();
        Edge { from, to, from_port, to_port, n_to_ports: n_ports as usize, table }
    };
    let edges = pairs.into_iter().map(&mut edge).collect();
    Problem { nodes, edges }
}
