//! The fastest plan whose memory fits, by branch and bound.
//!
//! One price of memory cannot share a capacity between a few large choices, such as where the states of all experts
//! live: its bound then lies far below every plan. So the choices of such a node are split into those that take little
//! memory and those that take much, and each part is relaxed by itself; what gap is left in a part is closed by labels.
//! The part with the least bound is next, so that bound holds for all that is open (Land and Doig 1960).

use super::capacity::{Relaxed, TOLERANCE};
use super::labels::{self, Labelled};
use super::narrow::{Aim, Moved};
use super::{Certified, Prepared, Weights};
use crate::problem::{Cost, Problem, Solution};

/// Labels made before the search settles for a certified gap; work, not time.
const MAX_LABELS: usize = 20_000_000;

/// Labels made before a part is split.
const PART_LABELS: usize = 100_000;

/// Part of the best cost by which a plan that is sought may seem to exceed it, for rounding.
const ROUNDING: f64 = 1e-9;

/// The fastest plan that fits, with a bound that equals its time unless the labels were too many. `None` where no plan
/// fits.
pub fn solve(problem: &Problem, capacity: f64) -> Option<Certified> {
    Prepared::new(problem).fastest_within(capacity)
}

impl Prepared<'_> {
    /// The fastest plan whose memory is at most `capacity`, with a bound that equals its time unless the labels were
    /// too many. `None` where no plan fits.
    pub fn fastest_within(&self, capacity: f64) -> Option<Certified> {
        self.fastest_of_parts(capacity, (PART_LABELS, MAX_LABELS))
    }

    /// The same with at most as many labels per part and in all.
    pub(crate) fn fastest_of_parts(&self, capacity: f64, limits: (usize, usize)) -> Option<Certified> {
        let (part_labels, mut labels_left) = limits;
        let relaxed = self.relax(capacity)?;
        let best = relaxed.certified.solution.clone();
        let mut search = Search { whole: self, capacity, best, parts: Vec::new() };
        search.add(Part { open: self.open(), relaxed });
        while let Some(part) = search.next() {
            let bound = part.relaxed.certified.bound;
            if labels_left == 0 {
                return Some(Certified { solution: search.best, bound });
            }
            labels_left = labels_left.saturating_sub(search.work(&part, part_labels.min(labels_left)));
        }
        let bound = search.best.cost.time;
        Some(Certified { solution: search.best, bound })
    }
}

/// Some of the choices of every node.
struct Part {
    open: Vec<Vec<usize>>,
    relaxed: Relaxed,
}

struct Search<'a> {
    whole: &'a Prepared<'a>,
    capacity: f64,
    best: Solution,
    /// Parts that may hold a faster plan.
    parts: Vec<Part>,
}

impl Search<'_> {
    fn found(&mut self, solution: Solution) {
        if solution.cost.memory <= self.capacity && solution.cost.time < self.best.cost.time {
            self.best = solution;
        }
    }

    fn add(&mut self, part: Part) {
        self.found(part.relaxed.certified.solution.clone());
        self.parts.push(part);
    }

    /// The part with the least bound, where that is below the best plan.
    fn next(&mut self) -> Option<Part> {
        let bound = |&i: &usize| self.parts[i].relaxed.certified.bound;
        let at = (0..self.parts.len()).min_by(|a, b| bound(a).total_cmp(&bound(b)))?;
        let best = self.best.cost.time;
        (best - bound(&at) > TOLERANCE * best.abs()).then(|| self.parts.swap_remove(at))
    }

    /// Finds the fastest plan of a part, or splits it; the number of labels made.
    fn work(&mut self, part: &Part, most: usize) -> usize {
        let price = part.relaxed.price;
        let cost = self.best.cost.time + price * self.capacity;
        let limit = cost + ROUNDING * cost.abs();
        let prepared = self.whole.with_open(&part.open);
        let apart = prepared.weighed_apart(Weights::priced(price));
        let Some(moved) = apart.and_then(|apart| Moved::new(apart).narrow(Aim::Below(limit))) else {
            return 0;
        };
        let (labelled, made) = labels::fastest(self.whole.problem, &moved, (self.capacity, limit), most);
        match labelled {
            Labelled::Nothing => {}
            Labelled::Fastest(choices) => {
                if let Some(cost) = self.whole.problem.total(&choices) {
                    self.found(Solution { choices, cost });
                }
            }
            Labelled::TooMany => {
                for open in self.split(moved.weighed.choices, &part.relaxed.ends) {
                    let relaxed = self.whole.with_open(&open).relax(self.capacity);
                    if let Some(relaxed) = relaxed {
                        self.add(Part { open, relaxed });
                    }
                }
            }
        }
        made
    }

    /// Two parts of the open choices that set the two ends apart, at the node where they differ most in memory.
    fn split(&self, open: Vec<Vec<usize>>, ends: &[Vec<usize>; 2]) -> [Vec<Vec<usize>>; 2] {
        let difference = |node: usize| {
            let [most, least] = ends.each_ref().map(|end| self.memory(node, end[node], &open));
            (most - least).abs()
        };
        let divisible = (0..open.len()).filter(|&node| open[node].len() > 1);
        let widest = divisible.map(|node| (difference(node), open[node].len(), node));
        let node = widest
            .max_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(b.2.cmp(&a.2)))
            .map_or(0, |(.., node)| node);
        let mut sorted: Vec<(f64, usize)> =
            open[node].iter().map(|&choice| (self.memory(node, choice, &open), choice)).collect();
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let middle = ends.iter().map(|end| self.memory(node, end[node], &open)).sum::<f64>() / 2.0;
        let below = sorted.iter().filter(|(memory, _)| *memory <= middle).count();
        let below = if below == 0 || below == sorted.len() { sorted.len() / 2 } else { below };
        let side = |list: &[(f64, usize)]| {
            let mut part = open.clone();
            part[node] = list.iter().map(|(_, choice)| *choice).collect();
            part[node].sort_unstable();
            part
        };
        [side(&sorted[..below]), side(&sorted[below..])]
    }

    /// Memory of a choice, and of its edges on the average of what is open opposite.
    fn memory(&self, node: usize, choice: usize, open: &[Vec<usize>]) -> f64 {
        let mean = |prices: Vec<Option<Cost>>| {
            let (n, sum) =
                prices.iter().flatten().fold((0.0, 0.0), |(n, sum), cost| (n + 1.0, sum + cost.memory));
            if n > 0.0 { sum / n } else { 0.0 }
        };
        let edges = self.whole.problem.edges.iter().map(|edge| {
            if edge.from == node {
                mean(open[edge.to].iter().map(|&to| edge.price(choice, to)).collect())
            } else if edge.to == node {
                mean(open[edge.from].iter().map(|&from| edge.price(from, choice)).collect())
            } else {
                0.0
            }
        });
        self.whole.problem.nodes[node].choices[choice].memory + edges.sum::<f64>()
    }
}
