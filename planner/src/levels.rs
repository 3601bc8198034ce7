//! What layers cost at every price of memory, and the fastest way to run consecutive ones within a memory.
//!
//! A level is a price of memory, at which every kind of layer has its choice. A chunk runs its layers at one level, or so many of the most
//! frequent kind at the next as it must to fit.

use cost_model::memory::{GatheredUnit, gathered_units};
use ir::units::Bytes;

use crate::flights::Flight;
use crate::partition::{Place, Used};

/// What one layer costs under one choice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// Forward and backward of one micro-batch, in seconds.
    pub time: f64,
    /// Parameter, gradient and optimizer bytes on the device.
    pub state: f64,
    /// Bytes of optimizer states and parameters in the host's memory.
    pub host: f64,
    /// Bytes of optimizer states on the host's drives.
    pub nvme: f64,
    /// Of these, what passes through the host's memory at once: of any layer.
    pub nvme_passing: f64,
    /// Bytes kept there per micro-batch in flight.
    pub kept_on_host: f64,
    /// Bytes kept per micro-batch in flight.
    pub saved: f64,
    /// Bytes kept of one that waits for the second part of backward.
    pub carried: f64,
    /// Bytes needed while it runs.
    pub working: f64,
    /// Bytes of the logits while it runs.
    pub logits: f64,
    /// Bytes that a stage has once for every kind of layer that it has.
    pub once: f64,
    /// Bytes that it has once for all its layers: those of the layer that needs most.
    pub copied: f64,
    /// Bytes of the parameters that are gathered for use, whole.
    pub gathered: f64,
    /// Bytes of their gradients before these are reduced.
    pub unreduced: f64,
}

impl LayerCost {
    /// Bytes kept at most.
    pub(crate) fn kept(&self, flight: Flight) -> f64 {
        flight.bytes(self.saved, self.carried)
    }

    /// Bytes held all the time, with all micro-batches in flight.
    pub(crate) fn lasts(&self, flight: Flight) -> f64 {
        self.state + self.kept(flight)
    }

    /// Bytes that a chunk may need more while it runs if some of its layers cost as the other.
    pub(crate) fn working_more(&self, other: &Self) -> f64 {
        let more = |of: fn(&Self) -> f64| (of(other) - of(self)).max(0.0);
        more(|cost| cost.working)
            + more(|cost| cost.logits)
            + more(|cost| cost.once)
            + more(|cost| cost.copied)
            + more(|cost| 2.0 * cost.gathered + cost.unreduced)
    }
}

/// Costs of every kind at every level: a level is a price of memory, from fastest to smallest.
#[derive(Clone, Debug)]
pub struct Levels {
    /// `costs[level][kind]`.
    pub costs: Vec<Vec<LayerCost>>,
    /// Kind of every layer of the model in order.
    pub kinds: Vec<usize>,
    /// `counts[i][kind]`: layers of a kind among the first `i`.
    counts: Vec<Vec<u64>>,
    /// `ends[i][kind]`: one past the last layer of a kind among the first `i`.
    ends: Vec<Vec<usize>>,
    /// Per kind, the least seconds of a layer.
    least: Vec<f64>,
}

/// What consecutive layers consist of.
pub(crate) struct Range {
    /// Kinds that are among them, and how many of each.
    layers: Vec<(usize, f64)>,
    /// Per such kind, the same of those behind its last.
    behind: Vec<Vec<(usize, f64)>>,
}

/// What layers have of something together.
fn summed(layers: &[(usize, f64)], costs: &[LayerCost], of: impl Fn(&LayerCost) -> f64) -> f64 {
    layers.iter().map(|&(kind, count)| count * of(&costs[kind])).sum()
}

/// Layers of one chunk and how they are run.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    /// First layer.
    pub from: usize,
    /// One past the last layer.
    pub to: usize,
    /// Level of most layers.
    pub level: usize,
    /// So many of its first layers of one kind run at the next level instead.
    pub smaller: u64,
    /// That kind: the most frequent.
    pub kind: usize,
    /// Seconds of one micro-batch.
    pub time: f64,
    /// Bytes that it holds all the time, with all micro-batches in flight.
    pub lasting: f64,
    /// Bytes that it needs beside that while it runs, at most.
    pub passing: f64,
}

impl Chunk {
    /// Bytes at the peak, reserve apart.
    pub fn memory(&self) -> f64 {
        self.lasting + self.passing
    }
}

impl Levels {
    /// Prepares costs for many questions about ranges of layers.
    pub fn new(costs: Vec<Vec<LayerCost>>, kinds: Vec<usize>) -> Self {
        let n_kinds = costs.first().map_or(0, Vec::len);
        let (mut counts, mut ends) = (vec![vec![0; n_kinds]], vec![vec![0; n_kinds]]);
        for (i, &kind) in kinds.iter().enumerate() {
            let mut next = counts.last().cloned().unwrap_or_default();
            next[kind] += 1;
            counts.push(next);
            let mut next = ends.last().cloned().unwrap_or_default();
            next[kind] = i + 1;
            ends.push(next);
        }
        let time = |kind: usize| costs.iter().map(move |level| level[kind].time);
        let least = (0..n_kinds).map(|kind| time(kind).fold(f64::INFINITY, f64::min)).collect();
        Self { costs, kinds, counts, ends, least }
    }

    /// The same of layers that run so much of a sequence at a time.
    pub(crate) fn of_slices(&self, part: f64) -> Self {
        let sliced = |cost: &LayerCost| LayerCost {
            working: cost.working * part,
            logits: cost.logits * part,
            ..*cost
        };
        let costs = self.costs.iter().map(|level| level.iter().map(sliced).collect()).collect();
        Self { costs, ..self.clone() }
    }

    pub(crate) fn count(&self, from: usize, to: usize, kind: usize) -> f64 {
        (self.counts[to][kind] - self.counts[from][kind]) as f64
    }

    pub(crate) fn sum(&self, from: usize, to: usize, level: usize, of: impl Fn(&LayerCost) -> f64) -> f64 {
        self.costs[level].iter().enumerate().map(|(kind, cost)| self.count(from, to, kind) * of(cost)).sum()
    }

    /// A time that no way to run some layers undercuts.
    pub(crate) fn least(&self, from: usize, to: usize) -> f64 {
        self.least.iter().enumerate().map(|(kind, least)| self.count(from, to, kind) * least).sum()
    }

    /// A time that no way to run all layers undercuts.
    pub(crate) fn least_of_all(&self) -> f64 {
        self.least(0, self.counts.len() - 1)
    }

    /// What a range of layers consists of.
    pub(crate) fn range(&self, from: usize, to: usize) -> Range {
        let between = |from: usize, to: usize| -> Vec<(usize, f64)> {
            let counts = self.counts[to].iter().zip(&self.counts[from]).enumerate();
            counts
                .filter(|(_, (to, from))| to > from)
                .map(|(kind, (to, from))| (kind, (to - from) as f64))
                .collect()
        };
        let layers = between(from, to);
        let behind = layers.iter().map(|&(kind, _)| between(self.ends[to][kind], to)).collect();
        Range { layers, behind }
    }

    /// Bytes that it needs beside what it holds all the time while one of its layers runs.
    fn passing(&self, Range { layers, behind }: &Range, level: usize) -> f64 {
        let costs = &self.costs[level];
        // When backward reaches a layer, what those behind it kept is free again.
        let beside = |(&(kind, _), behind): (&(usize, f64), &Vec<(usize, f64)>)| {
            let free = summed(behind, costs, |cost| cost.saved);
            (costs[kind].working - free).max(0.0) + costs[kind].logits
        };
        let unit = |&(kind, count): &(usize, f64)| GatheredUnit {
            parameters: Bytes(costs[kind].gathered),
            gradient: Bytes(costs[kind].unreduced),
            count,
        };
        let once: f64 = layers.iter().map(|&(kind, _)| costs[kind].once).sum();
        let copied = layers.iter().map(|&(kind, _)| costs[kind].copied).fold(0.0, f64::max);
        once + copied
            + gathered_units(layers.iter().map(unit)).0
            + layers.iter().zip(behind).map(beside).fold(0.0, f64::max)
    }

    /// The kind with most layers in a range; ties to the first.
    fn main_kind(&self, from: usize, to: usize) -> usize {
        let count = |kind: usize| self.counts[to][kind] - self.counts[from][kind];
        (0..self.counts[0].len()).rev().max_by_key(|&kind| count(kind)).unwrap_or(0)
    }

    /// All of a range of layers at a level.
    pub(crate) fn at(
        &self,
        (from, to): (usize, usize),
        range: &Range,
        (level, kind): (usize, usize),
        flight: Flight,
    ) -> Chunk {
        let costs = &self.costs[level];
        Chunk {
            from,
            to,
            level,
            smaller: 0,
            kind,
            time: summed(&range.layers, costs, |cost| cost.time),
            lasting: summed(&range.layers, costs, |cost| cost.lasts(flight)),
            passing: self.passing(range, level),
        }
    }

    /// The fastest way to run a range of layers within a memory; `None` where nothing fits.
    pub fn chunk(&self, from: usize, to: usize, flight: Flight, capacity: f64) -> Option<Chunk> {
        self.chunk_beside(from, to, (flight, capacity), (Used::default(), 0.0))
    }

    /// The same beside what other chunks of the device use, and `later` more that hold as many layers of the most frequent
    /// kind.
    pub(crate) fn chunk_beside(
        &self,
        from: usize,
        to: usize,
        (flight, capacity): (Flight, f64),
        (used, later): (Used, f64),
    ) -> Option<Chunk> {
        let kind = self.main_kind(from, to);
        let range = self.range(from, to);
        let lasts = |cost: &LayerCost| cost.lasts(flight);
        let each = |level: usize| lasts(&self.costs[level][kind]);
        let own = |level: usize| summed(&range.layers, &self.costs[level], lasts);
        let time = |level: usize| summed(&range.layers, &self.costs[level], |cost| cost.time);
        let lasting =
            |level: usize| used.lasting + own(level) + later * self.count(from, to, kind) * each(level);
        let needs = |level: usize| lasting(level) + used.passing.max(self.passing(&range, level));
        // What it holds all the time rules most out, and takes less to say.
        let fits = |&level: &usize| lasting(level) <= capacity && needs(level) <= capacity;
        let level = (0..self.costs.len()).find(fits)?;
        let plain = |level: usize| self.at((from, to), &range, (level, kind), flight);
        let Some(faster) = level.checked_sub(1) else { return Some(plain(level)) };
        // Between two levels: only as many layers of the main kind go to the smaller one as must.
        let gain = each(faster) - each(level);
        let working = self.costs[faster][kind].working_more(&self.costs[level][kind]);
        let over = needs(faster) + working - capacity;
        let needed = (over / (gain * (1.0 + later))).ceil();
        if gain > 0.0 && needed >= 1.0 && needed < self.count(from, to, kind) {
            let slower = self.costs[level][kind].time - self.costs[faster][kind].time;
            let time = time(faster) + needed * slower;
            let lasting = own(faster) - needed * gain;
            let passing = self.passing(&range, faster) + working;
            let mixed = Chunk { smaller: needed as u64, time, lasting, passing, ..plain(faster) };
            if mixed.time < plain(level).time {
                return Some(mixed);
            }
        }
        Some(plain(level))
    }

    /// What a chunk has that keeps so much in flight and may take so much memory, all for itself.
    pub fn place(&self, flight: Flight, capacity: f64) -> Place<'_> {
        Place { levels: self, flight, capacity, shared: None }
    }
}
