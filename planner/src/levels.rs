//! What layers cost at every price of memory, and the fastest way to run consecutive ones within a memory.
//!
//! A level is a price of memory, at which every kind of layer has its choice. Where several frequent kinds have others
//! at the next, there is a step between for each, the kind that pays least for a byte first. A chunk runs its layers at
//! one step, or so many of one kind at the next as it must to fit: of that which has another choice there, or else of
//! the most frequent.

use cost_model::memory::{GatheredUnit, gathered_units};
use cost_model::overlap::exposed_with;
use ir::units::{Bytes, Seconds};
use smallvec::SmallVec;

use crate::flights::Flight;
use crate::partition::{Place, Used};

/// What one layer costs under one choice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// Forward and backward of one micro-batch, in seconds.
    pub time: f64,
    /// Of that, forward.
    pub forward: f64,
    /// Seconds once per step, were nothing hidden: gradients reduced.
    pub reduce: f64,
    /// Parameters spread.
    pub spread: f64,
    /// Seconds of the update.
    pub update: f64,
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

/// How what a step has once shows beside its micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Once {
    /// Micro-batches of a step.
    pub(crate) micro_batches: u64,
    /// By how much it slows down the computation that it hides behind, if it does.
    pub(crate) slowdown: Option<f64>,
}

/// A kind of layers is frequent of which there is at least one in so many of all.
const FREQUENT: u64 = 16;

/// Whether a model has as many layers of a kind as make what each of them costs count in choices.
pub(crate) fn is_frequent(of_kind: u64, of_all: u64) -> bool {
    of_kind * FREQUENT >= of_all
}

/// Costs of every kind at every level: a level is a price of memory, from fastest to smallest, or a step between two.
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
    /// Per level and kind, the price of memory of its choice, where levels are steps between prices.
    prices: Vec<Vec<usize>>,
    /// Per level, the one frequent kind that has another choice at the next.
    goes_down: Vec<Option<usize>>,
    once: Once,
}

/// What consecutive layers consist of.
pub(crate) struct Range {
    /// One past the last.
    to: usize,
    /// Kinds that are among them, and how many of each: cuts ask for thousands of ranges, of mostly a kind or two.
    layers: SmallVec<[(usize, f64); 4]>,
}

impl Range {
    /// What its layers have of something together.
    pub(crate) fn sum(&self, costs: &[LayerCost], of: impl Fn(&LayerCost) -> f64) -> f64 {
        summed(&self.layers, costs, of)
    }
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
    /// That kind.
    pub kind: usize,
    /// The highest price of memory at which a layer of it has its choice.
    pub(crate) price: usize,
    /// Seconds of one micro-batch.
    pub time: f64,
    /// Bytes that it holds all the time, with all micro-batches in flight.
    pub lasting: f64,
    /// Bytes that it needs beside that while it runs, at most.
    pub passing: f64,
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
        let prices = (0..costs.len()).map(|level| vec![level; n_kinds]).collect();
        let goes_down = vec![None; costs.len()];
        Self { costs, kinds, counts, ends, least, prices, goes_down, once: Once::default() }
    }

    /// The same with a step between two prices of memory for every frequent kind that has other choices at the second,
    /// with so many micro-batches in flight.
    pub(crate) fn in_steps(
        costs: &[Vec<LayerCost>],
        kinds: Vec<usize>,
        (in_flight, once): (f64, Once),
    ) -> Self {
        let n_kinds = costs.first().map_or(0, Vec::len);
        let n_layers = |kind: usize| kinds.iter().filter(|own| **own == kind).count() as u64;
        let frequent: Vec<usize> =
            (0..n_kinds).filter(|&kind| is_frequent(n_layers(kind), kinds.len() as u64)).collect();
        let differ = |kind: &usize, level: usize| costs[level - 1][*kind] != costs[level][*kind];
        let mut prices: Vec<Vec<usize>> = vec![vec![0; n_kinds]];
        let mut goes_down = Vec::new();
        for level in 1..costs.len() {
            let mut down: Vec<usize> = frequent.iter().copied().filter(|kind| differ(kind, level)).collect();
            let flight = Flight::whole(in_flight);
            let paid = |kind: usize| {
                let [from, to] = [level - 1, level].map(|level| &costs[level][kind]);
                (to.time - from.time) / (from.lasts(flight) - to.lasts(flight)).max(1.0)
            };
            down.sort_by(|&a, &b| paid(a).total_cmp(&paid(b)).then(a.cmp(&b)));
            let (last, before) = match down.split_last() {
                Some((last, before)) => (Some(*last), before),
                None => (None, &[][..]),
            };
            for &kind in before {
                let mut step = prices.last().cloned().unwrap_or_default();
                step[kind] = level;
                prices.push(step);
                goes_down.push(Some(kind));
            }
            prices.push(vec![level; n_kinds]);
            goes_down.push(last);
        }
        goes_down.push(None);
        let cost = |step: &Vec<usize>| (0..n_kinds).map(|kind| costs[step[kind]][kind]).collect();
        let costs = prices.iter().map(cost).collect();
        Self { prices, goes_down, once, ..Self::new(costs, kinds) }
    }

    /// The price of memory of a kind's choice at a level.
    pub(crate) fn price(&self, level: usize, kind: usize) -> usize {
        self.prices[level][kind]
    }

    /// The highest price of memory of a level.
    pub(crate) fn highest_price(&self, level: usize) -> usize {
        self.prices[level].iter().copied().max().unwrap_or(0)
    }

    /// The kind of which some layers run at the next level where not all fit at this one, of layers of which so many
    /// are of one.
    pub(crate) fn going_down(&self, level: usize, main: usize) -> usize {
        self.goes_down[level].unwrap_or(main)
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

    /// Per kind, a time that no way to run a layer undercuts.
    pub(crate) fn least_times(&self) -> &[f64] {
        &self.least
    }

    /// A time that no way to run all layers undercuts.
    pub(crate) fn least_of_all(&self) -> f64 {
        self.least(0, self.counts.len() - 1)
    }

    /// The longest layer, were each as short as it can be.
    pub(crate) fn longest_least(&self) -> f64 {
        self.least.iter().copied().fold(0.0, f64::max)
    }

    /// What a range of layers consists of.
    pub(crate) fn range(&self, from: usize, to: usize) -> Range {
        let counts = self.counts[to].iter().zip(&self.counts[from]).enumerate();
        let some = counts.filter(|(_, (to, from))| to > from);
        Range { to, layers: some.map(|(kind, (to, from))| (kind, (to - from) as f64)).collect() }
    }

    /// Bytes that it needs beside what it holds all the time while one of its layers runs.
    fn passing(&self, Range { to, layers }: &Range, level: usize) -> f64 {
        let costs = &self.costs[level];
        // When backward reaches a layer, what those behind it kept is free again.
        let beside = |&(kind, _): &(usize, f64)| {
            let last = self.ends[*to][kind];
            let behind = |&(other, _): &(usize, f64)| self.count(last, *to, other) * costs[other].saved;
            let free: f64 = if last == *to { 0.0 } else { layers.iter().map(behind).sum() };
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
            + layers.iter().map(beside).fold(0.0, f64::max)
    }

    /// Seconds of a micro-batch of layers that have so much of everything, with their share of what the step has once.
    pub(crate) fn with_once(&self, n_layers: usize, of_all: impl Fn(fn(&LayerCost) -> f64) -> f64) -> f64 {
        let time = of_all(|cost| cost.time);
        let Once { micro_batches, slowdown } = self.once;
        if micro_batches == 0 {
            return time;
        }
        let forward = of_all(|cost| cost.forward);
        let shown = |sent: f64, beside: f64| match slowdown {
            Some(slowdown) => exposed_with(Seconds(sent), Seconds(beside), n_layers as f64, slowdown).0,
            None => sent,
        };
        let (reduce, spread) = (of_all(|cost| cost.reduce), of_all(|cost| cost.spread));
        let once = shown(reduce, time - forward) + shown(spread, forward) + of_all(|cost| cost.update);
        time + once / micro_batches as f64
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
            price: self.highest_price(level),
            time: summed(&range.layers, costs, |cost| cost.time),
            lasting: summed(&range.layers, costs, |cost| cost.lasts(flight)),
            passing: self.passing(range, level),
        }
    }

    /// The fastest way to run a range of layers within a memory; `None` where nothing fits.
    pub fn chunk(&self, from: usize, to: usize, flight: Flight, capacity: f64) -> Option<Chunk> {
        self.chunk_beside(from, to, (flight, capacity), (Used::default(), 0.0))
    }

    /// The same beside what other chunks of the device use, and `later` more that hold as many layers of the most
    /// frequent kind.
    pub(crate) fn chunk_beside(
        &self,
        from: usize,
        to: usize,
        (flight, capacity): (Flight, f64),
        (used, later): (Used, f64),
    ) -> Option<Chunk> {
        let main = self.main_kind(from, to);
        let range = self.range(from, to);
        let lasts = |cost: &LayerCost| cost.lasts(flight);
        let own = |level: usize| summed(&range.layers, &self.costs[level], lasts);
        let time = |level: usize| summed(&range.layers, &self.costs[level], |cost| cost.time);
        let behind = |level: usize| self.count(from, to, main) * lasts(&self.costs[level][main]);
        let lasting = |level: usize, own: f64| used.lasting + own + later * behind(level);
        // What it holds all the time rules most out, and takes less to say.
        let fits = |&level: &usize| {
            let lasting = lasting(level, own(level));
            lasting <= capacity && lasting + used.passing.max(self.passing(&range, level)) <= capacity
        };
        let level = (0..self.costs.len()).find(fits)?;
        let plain = |level: usize| self.at((from, to), &range, (level, main), flight);
        let Some(faster) = level.checked_sub(1) else { return Some(plain(level)) };
        // Between two levels: only as many layers of one kind go to the smaller one as must.
        let kind = self.going_down(faster, main);
        let gain = lasts(&self.costs[faster][kind]) - lasts(&self.costs[level][kind]);
        let working = self.costs[faster][kind].working_more(&self.costs[level][kind]);
        let before = plain(faster);
        let needed_before = lasting(faster, before.lasting) + used.passing.max(before.passing);
        let over = needed_before + working - capacity;
        let needed = (over / (gain * (1.0 + later))).ceil();
        let mixed = || {
            let slower = self.costs[level][kind].time - self.costs[faster][kind].time;
            Chunk {
                smaller: needed as u64,
                kind,
                price: self.highest_price(level),
                time: before.time + needed * slower,
                lasting: before.lasting - needed * gain,
                passing: before.passing + working,
                ..before
            }
        };
        let is_between = gain > 0.0 && needed >= 1.0 && needed < self.count(from, to, kind);
        let all_at =
            |level: usize| self.with_once(to - from, |of| summed(&range.layers, &self.costs[level], of));
        let of_mixed = |of: fn(&LayerCost) -> f64| {
            let more = of(&self.costs[level][kind]) - of(&self.costs[faster][kind]);
            summed(&range.layers, &self.costs[faster], of) + needed * more
        };
        let (own, between) = (all_at(level), self.with_once(to - from, of_mixed));
        let mixed = (is_between && between < own).then(mixed);
        // What memory is dearer for may be faster than what just fits: programs hide what the sums of choices do not.
        let limit = if mixed.is_some() { between } else { own };
        let dearer = (level + 1..self.costs.len()).filter(|level| time(*level) < limit && fits(level));
        let fastest = dearer.map(|level| (all_at(level), level)).min_by(|a, b| a.0.total_cmp(&b.0));
        match fastest.filter(|(seconds, _)| *seconds < limit) {
            Some((_, level)) => Some(plain(level)),
            None => Some(mixed.unwrap_or_else(|| plain(level))),
        }
    }

    /// What a chunk has that keeps so much in flight and may take so much memory, all for itself.
    pub fn place(&self, flight: Flight, capacity: f64) -> Place<'_> {
        Place { levels: self, flight, capacity, shared: None }
    }
}
