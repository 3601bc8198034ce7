//! The structured solver of a choice problem: exact, by elimination; transformer layers have width two or three.
//!
//! - `eliminate`: least `time + price * memory` for one price of memory. Choices that cannot be part of it are closed
//!   (`narrow`); then nodes leave one by one, and what a node can save or cost its neighbours becomes a table over
//!   their ports (`bucket`). Exact for any graph, fast where few neighbours meet.
//! - `relax`: searches the price at which a plan just fits; that plan, and a bound no plan can beat (`capacity`).
//! - `solve`: the fastest plan that fits. Where the two differ, the choices of a node are split (`branch`) until the
//!   same
//!   elimination with every pair of time and memory that is worth having in place of the one least cost (`labels`)
//!   closes what is left.

use std::cell::RefCell;
use std::sync::Arc;

use crate::problem::{Cost, Edge, Node, Problem, Solution};

mod branch;
mod bucket;
mod capacity;
mod labels;
mod narrow;
mod parts;
mod weighed;

pub use branch::solve;
pub use capacity::relax;
use narrow::{Aim, Bounded, Moved, TOLERANCE};
use weighed::{Pairs, Ports, Values, Weighed};

/// A solution with its certificate.
#[derive(Clone, Debug, PartialEq)]
pub struct Certified {
    /// The best plan found.
    pub solution: Solution,
    /// No plan that fits is faster than this.
    pub bound: f64,
}

/// What a second and a byte weigh.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Weights {
    time: f64,
    memory: f64,
}

impl Weights {
    /// Time, and memory at a price.
    fn priced(price: f64) -> Self {
        Self { time: 1.0, memory: price }
    }

    fn of(self, cost: Cost) -> f64 {
        self.time * cost.time + self.memory * cost.memory
    }
}

/// The pairs of an edge, seconds and bytes apart, so that pricing them is one pass over each.
struct Costs {
    /// Infinite where the pair is forbidden.
    times: Values,
    /// Nothing where no pair takes any.
    bytes: Option<Vec<f64>>,
}

impl Costs {
    fn of(edge: &Edge) -> Self {
        let times = edge.table.iter().map(|cost| cost.map_or(f64::INFINITY, |cost| cost.time)).collect();
        let has_bytes = edge.table.iter().flatten().any(|cost| cost.memory != 0.0);
        let bytes = || edge.table.iter().map(|cost| cost.map_or(0.0, |cost| cost.memory)).collect();
        Self { times: Arc::new(times), bytes: has_bytes.then(bytes) }
    }

    fn weighed(&self, weights: Weights) -> Values {
        // Nothing times infinitely much is no number.
        let time = |time: f64| if time < f64::INFINITY { weights.time * time } else { f64::INFINITY };
        match &self.bytes {
            None if weights.time == 1.0 => Arc::clone(&self.times),
            None => Arc::new(self.times.iter().map(|&one| time(one)).collect()),
            Some(bytes) => {
                let pair = |(&one, bytes)| time(one) + weights.memory * bytes;
                Arc::new(self.times.iter().zip(bytes).map(pair).collect())
            }
        }
    }
}

/// A problem whose choices are sorted into classes that every edge sees alike; made once, asked at many prices.
pub struct Prepared<'a> {
    problem: &'a Problem,
    /// Per node, its choices by class.
    members: Vec<Classes>,
    /// Per edge, the ports of the classes of its two nodes.
    ports: Vec<[Ports; 2]>,
    /// Per edge, its pairs.
    costs: Arc<[Costs]>,
    /// Whether every port of every edge is that of some class.
    no_idle: bool,
    /// The pairs of every edge as they were priced last: many questions differ in what nodes cost alone.
    last: RefCell<Option<(Weights, Vec<Values>)>>,
}

impl<'a> Prepared<'a> {
    /// Sorts the choices.
    pub fn new(problem: &'a Problem) -> Self {
        let all: Vec<Vec<usize>> =
            problem.nodes.iter().map(|node| (0..node.choices.len()).collect()).collect();
        Self::of(problem, &all, problem.edges.iter().map(Costs::of).collect())
    }

    /// The same with only some of the choices of every node.
    fn with_open(&self, open: &[Vec<usize>]) -> Self {
        Self::of(self.problem, open, Arc::clone(&self.costs))
    }

    /// Sorts some of the choices of every node; the others are as if they were not.
    fn of(problem: &'a Problem, open: &[Vec<usize>], costs: Arc<[Costs]>) -> Self {
        let mut seen: Vec<Vec<&[u32]>> = vec![Vec::new(); problem.nodes.len()];
        for edge in &problem.edges {
            seen[edge.from].push(&edge.from_port);
            seen[edge.to].push(&edge.to_port);
        }
        let members: Vec<Classes> =
            open.iter().zip(&seen).map(|(open, seen)| Classes::of(open, seen)).collect();
        let side = |node: usize, ports: &[u32], members: &[Classes]| -> Ports {
            members[node].iter().map(|class| ports[class[0]]).collect()
        };
        let of_edge = |edge: &Edge| {
            [side(edge.from, &edge.from_port, &members), side(edge.to, &edge.to_port, &members)]
        };
        let ports: Vec<[Ports; 2]> = problem.edges.iter().map(of_edge).collect();
        let no_idle = problem.edges.iter().zip(&ports).all(|(edge, [from, to])| {
            let n_from = edge.table.len() / edge.n_to_ports.max(1);
            all_used(from, n_from) && all_used(to, edge.n_to_ports)
        });
        Self { problem, members, ports, costs, no_idle, last: RefCell::new(None) }
    }

    /// The choices that are sorted.
    fn open(&self) -> Vec<Vec<usize>> {
        let sorted = |classes: &Classes| {
            let mut list = classes.choices.clone();
            list.sort_unstable();
            list
        };
        self.members.iter().map(sorted).collect()
    }

    /// Least `time + price * memory`, and the choices that reach it. `None` where every combination is forbidden.
    ///
    /// Among equals the smaller choice of the node that is eliminated later.
    pub fn eliminate(&self, price: f64) -> Option<(f64, Vec<usize>)> {
        self.least(Weights::priced(price), Weights::priced(price))
    }

    /// The same with a price for the memory of nodes and another for that of edges.
    pub fn eliminate_apart(&self, nodes: f64, edges: f64) -> Option<(f64, Vec<usize>)> {
        self.least(Weights::priced(nodes), Weights::priced(edges))
    }

    /// The same where choices of nodes take so much more time, infinitely much where one may not be taken, if it costs
    /// no more than a limit, rounding apart: the lower that is, the sooner is known what cannot be part of it.
    pub(crate) fn eliminate_below(
        &self,
        (nodes, edges): (f64, f64),
        limit: f64,
        more: impl Fn(usize, usize) -> f64,
    ) -> Option<(f64, Vec<usize>)> {
        let weights = (Weights::priced(nodes), Weights::priced(edges));
        self.least_in_parts(weights, (limit + TOLERANCE * limit.abs(), parts::MOST_WORK), more)
    }

    /// A cost that no choices are below, where those of nodes take so much more time; nearly the least, in a part of
    /// the time, and choices that are nearly the cheapest. `None` where every combination is forbidden, or costs more
    /// than a limit.
    pub(crate) fn bound_below(
        &self,
        (nodes, edges): (f64, f64),
        limit: f64,
        more: impl Fn(usize, usize) -> f64,
    ) -> Option<(f64, Vec<usize>)> {
        let weighed = self.weighed(Weights::priced(nodes), Weights::priced(edges), &more)?;
        let choices = weighed.choices.clone();
        match Moved::new(weighed).bounded(limit) {
            Bounded::AboveLimit => None,
            Bounded::Unknown => self.eliminate_below((nodes, edges), limit, more),
            Bounded::Least(bound, classes) => {
                let choice = |(node, &class): (usize, &usize)| choices[node][class];
                Some((bound, classes.iter().enumerate().map(choice).collect()))
            }
        }
    }

    fn least(&self, nodes: Weights, edges: Weights) -> Option<(f64, Vec<usize>)> {
        self.least_in_parts((nodes, edges), (f64::INFINITY, parts::MOST_WORK), |_, _| 0.0)
    }

    /// The same where choices of nodes take so much more time, if it costs no more than a limit; what takes more than
    /// so much work to eliminate is done in parts.
    fn least_in_parts(
        &self,
        (nodes, edges): (Weights, Weights),
        (limit, most_work): (f64, f64),
        more: impl Fn(usize, usize) -> f64,
    ) -> Option<(f64, Vec<usize>)> {
        let aim = Aim::CheapestBelow(limit);
        let narrowed = Moved::new(self.weighed(nodes, edges, more)?).narrow(aim)?;
        parts::cheapest(narrowed, most_work)
    }

    /// As [`Self::eliminate`], in parts of so little work that hardly any node is eliminated before all but one of its
    /// choices are closed.
    #[cfg(test)]
    pub(crate) fn eliminate_in_parts(&self, price: f64, most_work: f64) -> Option<(f64, Vec<usize>)> {
        let weights = Weights::priced(price);
        self.least_in_parts((weights, weights), (f64::INFINITY, most_work), |_, _| 0.0)
    }

    /// The problem at prices of the memory of nodes and of edges, each class by its cheapest choice. `None` where all
    /// choices of a node cost infinitely much.
    fn weighed(&self, nodes: Weights, edges: Weights, more: impl Fn(usize, usize) -> f64) -> Option<Weighed> {
        let cheapest = |node: usize, class: &[usize]| {
            let own = |choice: usize| nodes.of(self.problem.nodes[node].choices[choice]) + more(node, choice);
            let cost = |&choice: &usize| (own(choice), choice);
            let first = cost(&class[0]);
            class[1..].iter().map(cost).fold(first, |best, next| if next.0 < best.0 { next } else { best })
        };
        let of_node = |(node, classes): (usize, &Classes)| -> (Vec<f64>, Vec<usize>) {
            classes.iter().map(|class| cheapest(node, class)).unzip()
        };
        let (costs, choices) = self.members.iter().enumerate().map(of_node).unzip();
        let weighed = Weighed { costs, choices, tables: self.tables(edges, self.ports.clone()) };
        let all_open = weighed.costs.iter().flatten().all(|cost| cost.is_finite());
        if self.no_idle && all_open { Some(weighed) } else { weighed.without_idle() }
    }

    /// The problem at a price of memory with every choice that no other of its class beats in time and memory.
    fn weighed_apart(&self, weights: Weights) -> Option<Weighed> {
        let (mut choices, mut classes) = (Vec::new(), Vec::new());
        for (node, members) in self.problem.nodes.iter().zip(&self.members) {
            let (mut own, mut of) = (Vec::new(), Vec::new());
            for (class, list) in members.iter().enumerate() {
                let front = front(list, |&choice| node.choices[choice]);
                of.extend(front.iter().map(|_| class));
                own.extend(front);
            }
            choices.push(own);
            classes.push(of);
        }
        let side = |node: usize, ports: &Ports| classes[node].iter().map(|&class| ports[class]).collect();
        let edges = self.problem.edges.iter().zip(&self.ports);
        let ports = edges.map(|(edge, [from, to])| [side(edge.from, from), side(edge.to, to)]).collect();
        let cost = |(node, list): (&Node, &Vec<usize>)| {
            list.iter().map(|&choice| weights.of(node.choices[choice])).collect()
        };
        let costs = self.problem.nodes.iter().zip(&choices).map(cost).collect();
        Weighed { costs, choices, tables: self.tables(weights, ports) }.without_idle()
    }

    fn tables(&self, weights: Weights, ports: Vec<[Ports; 2]>) -> Vec<Pairs> {
        let table = |((edge, values), ports): ((&Edge, Values), [Ports; 2])| Pairs {
            nodes: [edge.from, edge.to],
            ports,
            n_ports: [edge.table.len() / edge.n_to_ports, edge.n_to_ports],
            values,
        };
        self.problem.edges.iter().zip(self.priced(weights)).zip(ports).map(table).collect()
    }

    /// The pairs of every edge at a price of memory.
    fn priced(&self, weights: Weights) -> Vec<Values> {
        if let Some((_, known)) = self.last.borrow().as_ref().filter(|(last, _)| *last == weights) {
            return known.clone();
        }
        let all: Vec<Values> = self.costs.iter().map(|costs| costs.weighed(weights)).collect();
        self.last.replace(Some((weights, all.clone())));
        all
    }
}

/// Choices with the same port on every edge, class by class.
struct Classes {
    choices: Vec<usize>,
    /// Where among them each class ends.
    ends: Vec<usize>,
}

impl Classes {
    /// The classes of some choices of a node whose edges see them so.
    ///
    /// A class is split by one edge after the other: the ports of all edges at once could be more than any number
    /// holds.
    fn of(open: &[usize], seen: &[&[u32]]) -> Self {
        let (mut class_of, mut n_classes) = (vec![0; open.len()], 1);
        for ports in seen {
            let n_ports = open.iter().map(|&choice| ports[choice] as usize + 1).max().unwrap_or(0);
            // By class and port, the number of the new class plus one.
            let mut numbers = vec![0; n_classes * n_ports];
            n_classes = 0;
            for (class, &choice) in class_of.iter_mut().zip(open) {
                let number = &mut numbers[*class * n_ports + ports[choice] as usize];
                if *number == 0 {
                    n_classes += 1;
                    *number = n_classes;
                }
                *class = *number - 1;
            }
        }
        let mut ends = vec![0; if open.is_empty() { 0 } else { n_classes }];
        class_of.iter().for_each(|&class| ends[class] += 1);
        // Where each begins; every choice that it takes moves that on, to its end at last.
        let mut before = 0;
        for end in &mut ends {
            before += std::mem::replace(end, before);
        }
        let mut choices = vec![0; open.len()];
        for (&choice, &class) in open.iter().zip(&class_of) {
            choices[ends[class]] = choice;
            ends[class] += 1;
        }
        Self { choices, ends }
    }

    fn iter(&self) -> impl Iterator<Item = &[usize]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| &self.choices[start..end])
    }
}

/// Whether every one of so many ports is that of some class.
fn all_used(ports: &[u32], n_ports: usize) -> bool {
    let mut used = vec![false; n_ports];
    ports.iter().for_each(|&port| used[port as usize] = true);
    used.into_iter().all(|used| used)
}

/// Of a list, what nothing else in it beats or equals in both time and memory, the fastest first.
fn front<T: Copy>(list: &[T], cost: impl Fn(&T) -> Cost) -> Vec<T> {
    let mut sorted: Vec<(Cost, T)> = list.iter().map(|one| (cost(one), *one)).collect();
    sorted.sort_by(|a, b| a.0.time.total_cmp(&b.0.time).then(a.0.memory.total_cmp(&b.0.memory)));
    let mut least = f64::INFINITY;
    sorted.retain(|(cost, _)| {
        let better = cost.memory < least;
        least = least.min(cost.memory);
        better
    });
    sorted.into_iter().map(|(_, one)| one).collect()
}

/// Least `time + price * memory` of a problem that is asked once.
pub fn eliminate(problem: &Problem, price: f64) -> Option<(f64, Vec<usize>)> {
    Prepared::new(problem).eliminate(price)
}
