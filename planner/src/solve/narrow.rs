//! Closes classes that no cheapest combination contains, before anything expensive is done.
//!
//! The costs are moved between nodes and edges so that the sum of every combination stays what it is (equivalent
//! transformations; Kolmogorov 2006, "Convergent tree-reweighted message passing", section 3):
//! ```text
//! cost of a combination  =  sum_i n[i, c(i)] + sum_e (t[e, p, q] - a[e, p] - b[e, q])           -> Moved
//! pull:  a[e, p] = min_q (t[e, p, q] - b[e, q]),  and n[i, c] takes what a gained               -> pull()
//! push:  the edges ahead get an equal part of what n[i, c] exceeds min_c n[i, c] by             -> push()
//! ```
//! Edges never fall below zero, so `sum_i min_c n[i, c]` bounds every combination from below, and with `n[i, c]`
//! in place of node i's minimum every combination that contains class c. A class whose bound exceeds the cost of a
//! known combination is closed. On a tree one sweep each way makes the bounds exact; a layer is nearly one.

use super::weighed::{Kept, Weighed, select};

/// Sweeps each way at most. Most layers are narrowed to a few classes by the second.
const MAX_ROUNDS: usize = 8;

/// Classes are closed only if they are worse by this part of the best, so that rounding closes no equal.
pub(super) const TOLERANCE: f64 = 1e-9;

/// A problem whose costs are moved.
pub(super) struct Moved {
    /// The problem as it was.
    pub(super) weighed: Weighed,
    /// Costs of classes; infinite where closed.
    nodes: Vec<Vec<f64>>,
    /// What every port's row or column has given away.
    given: Vec<[Vec<f64>; 2]>,
    /// Least of every node.
    least: Vec<f64>,
    /// Per node, the tables that see it and on which side.
    incident: Vec<Vec<(usize, usize)>>,
    /// Per table and side, whether the node there has taken all that the edge asks: nothing has moved on it since.
    taken: Vec<[bool; 2]>,
    /// No combination above this is wanted.
    limit: f64,
    /// Room for what a port, and for what a class, is given.
    room: [Vec<f64>; 2],
}

/// Which combinations must be left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Aim {
    /// The cheapest, if it costs no more than this.
    CheapestBelow(f64),
    /// All that cost no more than this.
    Below(f64),
}

/// What one sweep each way says.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Bounded {
    /// No combination costs less, and one that nearly costs as little.
    Least(f64, Vec<usize>),
    /// Every combination costs more than the limit.
    AboveLimit,
    /// The combination that it came across is forbidden, or all are.
    Unknown,
}

/// The direction of a sweep over the nodes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sweep {
    Forward,
    Backward,
}

impl Moved {
    /// The problem with nothing moved but each edge's least cost.
    pub(super) fn new(weighed: Weighed) -> Self {
        let nodes = weighed.costs.clone();
        let least: Vec<f64> = nodes.iter().map(|costs| minimum(costs)).collect();
        let mut incident = vec![Vec::new(); nodes.len()];
        for (t, table) in weighed.tables.iter().enumerate() {
            (0..2).for_each(|side| incident[table.nodes[side]].push((t, side)));
        }
        // What edges cost at least is pulled out of them by the first sweep.
        let given =
            weighed.tables.iter().map(|table| table.n_ports.map(|n_ports| vec![0.0; n_ports])).collect();
        let taken = vec![[false; 2]; weighed.tables.len()];
        let (limit, room) = (f64::INFINITY, [Vec::new(), Vec::new()]);
        Self { weighed, nodes, given, least, incident, taken, limit, room }
    }

    /// No combination that is left is below this.
    pub(super) fn bound(&self) -> f64 {
        self.least.iter().sum()
    }

    /// Sweeps until few classes are left or nothing moves. `None` where every combination is forbidden or above the
    /// limit.
    pub(super) fn narrow(mut self, aim: Aim) -> Option<Self> {
        let (Aim::CheapestBelow(limit) | Aim::Below(limit)) = aim;
        self.limit = limit;
        let mut before = f64::NEG_INFINITY;
        for _ in 0..MAX_ROUNDS {
            for sweep in [Sweep::Forward, Sweep::Backward] {
                let picked = self.sweep(sweep)?;
                if matches!(aim, Aim::CheapestBelow(_)) {
                    let known = self.weighed.total(&picked);
                    self.limit = self.limit.min(known + TOLERANCE * known.abs());
                }
            }
            if self.n_closed() > 0 {
                self = self.compact();
            }
            let single = self.nodes.iter().all(|costs| costs.len() == 1);
            let bound = self.bound();
            if single || bound - before <= TOLERANCE * bound.abs() {
                break;
            }
            before = bound;
        }
        Some(self)
    }

    /// A cost that no combination is below, by one sweep each way, and the combination that the second came across.
    /// Nearly the least on what is nearly a tree.
    pub(super) fn bounded(mut self, limit: f64) -> Bounded {
        if self.hand_on().is_none() {
            return Bounded::Unknown;
        }
        // What is known half way is nearly all there is to know.
        if self.bound() > limit {
            return Bounded::AboveLimit;
        }
        match self.sweep(Sweep::Backward) {
            Some(picked) if self.weighed.total(&picked).is_finite() => Bounded::Least(self.bound(), picked),
            Some(_) | None => Bounded::Unknown,
        }
    }

    /// What a class costs above the least of its node.
    pub(super) fn class_excess(&self, node: usize, class: usize) -> f64 {
        (self.nodes[node][class] - self.least[node]).max(0.0)
    }

    /// What a pair costs above the least of its edge.
    pub(super) fn pair_excess(&self, table: usize, row: usize, column: usize) -> f64 {
        let [rows, columns] = &self.given[table];
        let value = self.weighed.tables[table].values[row * columns.len() + column];
        (value - rows[row] - columns[column]).max(0.0)
    }

    fn n_closed(&self) -> usize {
        self.nodes.iter().flatten().filter(|cost| cost.is_infinite()).count()
    }

    /// Every node takes what the edges behind it ask and hands it on to those ahead: half of a sweep, which picks
    /// nothing.
    fn hand_on(&mut self) -> Option<()> {
        for node in 0..self.nodes.len() {
            for i in 0..self.incident[node].len() {
                let (table, side) = self.incident[node][i];
                if self.weighed.tables[table].nodes[1 - side] < node {
                    self.pull(node, table, side);
                }
            }
            self.least[node] = minimum(&self.nodes[node]);
            if self.least[node].is_infinite() {
                return None;
            }
            self.push(node, Sweep::Forward);
        }
        Some(())
    }

    /// One sweep over all nodes; a combination that it comes across, or `None` where a node has no class left.
    fn sweep(&mut self, sweep: Sweep) -> Option<Vec<usize>> {
        let n = self.nodes.len();
        let mut picked = vec![usize::MAX; n];
        for step in 0..n {
            let node = if sweep == Sweep::Forward { step } else { n - 1 - step };
            for i in 0..self.incident[node].len() {
                let (table, side) = self.incident[node][i];
                self.pull(node, table, side);
            }
            self.least[node] = minimum(&self.nodes[node]);
            if self.least[node].is_infinite() || self.bound() > self.limit {
                return None;
            }
            self.close(node);
            picked[node] = self.pick(node, &picked);
            self.push(node, sweep);
        }
        Some(picked)
    }

    /// Moves all that an edge asks of a node's ports, whatever the other node does, to the node.
    fn pull(&mut self, node: usize, t: usize, side: usize) {
        if self.taken[t][side] {
            return;
        }
        let table = &self.weighed.tables[t];
        let [rows, columns] = &self.given[t];
        let lines = table.values.chunks_exact(table.n_ports[1]);
        let asked = &mut self.room[0];
        asked.clear();
        if side == 0 {
            asked.extend(lines.map(|row| least_difference(row, columns)));
        } else {
            asked.resize(table.n_ports[1], f64::INFINITY);
            for (row, given) in lines.zip(rows) {
                asked.iter_mut().zip(row).for_each(|(least, value)| *least = smaller(*least, value - given));
            }
        }
        std::mem::swap(asked, &mut self.given[t][side]);
        let (given, asked) = (&self.room[0], &mut self.given[t][side]);
        for (cost, &port) in self.nodes[node].iter_mut().zip(table.ports[side].iter()) {
            let (asked, given) = (asked[port as usize], given[port as usize]);
            // A port that was shut has no open class; one that nothing opposite can meet closes its own.
            *cost =
                if asked.is_finite() && given.is_finite() { *cost + (asked - given) } else { f64::INFINITY };
        }
        for (asked, given) in asked.iter_mut().zip(given) {
            if asked.is_infinite() || given.is_infinite() {
                *asked = f64::NEG_INFINITY;
            }
        }
        self.taken[t][side] = true;
        if *asked != *given {
            self.taken[t][1 - side] = false;
        }
    }

    /// Closes the classes of a node that are too dear, and shuts ports that no open class has.
    fn close(&mut self, node: usize) {
        let others = self.bound() - self.least[node];
        let limit = self.limit;
        let mut closed = false;
        for cost in self.nodes[node].iter_mut().filter(|cost| cost.is_finite() && others + **cost > limit) {
            *cost = f64::INFINITY;
            closed = true;
        }
        if !closed {
            return;
        }
        for &(t, side) in &self.incident[node] {
            let given = &mut self.given[t][side];
            let mut open = vec![false; given.len()];
            for (cost, &port) in self.nodes[node].iter().zip(self.weighed.tables[t].ports[side].iter()) {
                open[port as usize] |= cost.is_finite();
            }
            for (given, _) in given.iter_mut().zip(open).filter(|(given, open)| !open && given.is_finite()) {
                *given = f64::NEG_INFINITY;
                self.taken[t][1 - side] = false;
            }
        }
    }

    /// The class that suits best with what this sweep has picked so far.
    fn pick(&self, node: usize, picked: &[usize]) -> usize {
        let mut costs = self.nodes[node].clone();
        for &(t, side) in &self.incident[node] {
            let table = &self.weighed.tables[t];
            let other = table.nodes[1 - side];
            if other == node || picked[other] == usize::MAX {
                continue;
            }
            let port = table.ports[1 - side][picked[other]] as usize;
            let given = &self.given[t];
            for (cost, &own) in costs.iter_mut().zip(table.ports[side].iter()).filter(|(c, _)| c.is_finite())
            {
                let (row, column) = if side == 0 { (own as usize, port) } else { (port, own as usize) };
                *cost += table.values[row * table.n_ports[1] + column] - given[0][row] - given[1][column];
            }
        }
        (0..costs.len()).min_by(|&a, &b| costs[a].total_cmp(&costs[b])).unwrap_or(0)
    }

    /// Gives every edge ahead an equal part of what the node's classes cost above the least.
    fn push(&mut self, node: usize, sweep: Sweep) {
        let is_ahead = |&(t, side): &(usize, usize)| {
            let other = self.weighed.tables[t].nodes[1 - side];
            if sweep == Sweep::Forward { other > node } else { other < node }
        };
        let incident = &self.incident[node];
        let n_ahead = incident.iter().filter(|edge| is_ahead(edge)).count();
        if n_ahead == 0 {
            return;
        }
        let part = 1.0 / n_ahead.max(incident.len() - n_ahead) as f64;
        let least = self.least[node];
        let [pushed, excess] = &mut self.room;
        excess.clear();
        excess.extend(self.nodes[node].iter().map(|cost| part * (cost - least)));
        for &(t, side) in incident.iter().filter(|edge| is_ahead(edge)) {
            let ports = &self.weighed.tables[t].ports[side];
            pushed.clear();
            pushed.resize(self.given[t][side].len(), f64::INFINITY);
            for (excess, &port) in excess.iter().zip(ports.iter()) {
                pushed[port as usize] = smaller(pushed[port as usize], *excess);
            }
            self.taken[t] = [false; 2];
            let given = self.given[t][side].iter_mut().zip(pushed.iter());
            given.filter(|(_, pushed)| pushed.is_finite()).for_each(|(given, pushed)| *given -= pushed);
            let costs = self.nodes[node].iter_mut().zip(ports.iter());
            costs
                .filter(|(cost, _)| cost.is_finite())
                .for_each(|(cost, &port)| *cost -= pushed[port as usize]);
        }
    }

    /// Two parts of the problem, by the classes of a node: those whose bounds are the higher, then the others.
    pub(super) fn halves(&self, node: usize) -> [Weighed; 2] {
        let mut classes: Vec<usize> = (0..self.nodes[node].len()).collect();
        classes.sort_by(|&a, &b| self.nodes[node][a].total_cmp(&self.nodes[node][b]).then(a.cmp(&b)));
        let (low, high) = classes.split_at(classes.len().div_ceil(2));
        [high, low].map(|half| {
            let mut open: Vec<Vec<usize>> =
                self.nodes.iter().map(|costs| (0..costs.len()).collect()).collect();
            open[node] = half.to_vec();
            open[node].sort_unstable();
            self.weighed.keep(&Kept::new(&self.weighed, open))
        })
    }

    /// The same without closed classes and shut ports.
    fn compact(self) -> Self {
        let open = |costs: &Vec<f64>| (0..costs.len()).filter(|&class| costs[class].is_finite()).collect();
        let kept = Kept::new(&self.weighed, self.nodes.iter().map(open).collect());
        let side = |given: &[Vec<f64>; 2], ports: &[Vec<usize>; 2]| {
            [0, 1].map(|side| ports[side].iter().map(|&port| given[side][port]).collect())
        };
        Self {
            weighed: self.weighed.keep(&kept),
            nodes: select(&self.nodes, &kept.classes),
            given: self.given.iter().zip(&kept.ports).map(|(given, ports)| side(given, ports)).collect(),
            ..self
        }
    }
}

fn smaller(a: f64, b: f64) -> f64 {
    if b < a { b } else { a }
}

fn minimum(list: &[f64]) -> f64 {
    list.iter().copied().fold(f64::INFINITY, smaller)
}

/// `min_q (row[q] - given[q])`, in lanes that a compiler can keep in registers.
fn least_difference(row: &[f64], given: &[f64]) -> f64 {
    const LANES: usize = 8;
    let mut least = [f64::INFINITY; LANES];
    let (rows, givens) = (row.chunks_exact(LANES), given.chunks_exact(LANES));
    let rest = rows.remainder().iter().zip(givens.remainder());
    let rest = rest.fold(f64::INFINITY, |least, (value, given)| smaller(least, value - given));
    for (values, givens) in rows.zip(givens) {
        for lane in 0..LANES {
            least[lane] = smaller(least[lane], values[lane] - givens[lane]);
        }
    }
    smaller(minimum(&least), rest)
}
