//! Stages: which layers on which rank, at which price of memory, so that the slowest chunk is as fast as can be.
//!
//! Greedy for a given limit on a chunk's time, bisection on the limit: for chunks of consecutive layers this finds the
//! least limit, since a chunk that takes more layers never hurts those behind it. Embedding, head and loss are layers
//! like any other and count with their own time and memory.

use cost_model::memory::{GatheredUnit, gathered_units};
use ir::units::Bytes;

/// What one layer costs under one choice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// Forward and backward of one micro-batch, in seconds.
    pub time: f64,
    /// Parameter, gradient and optimizer bytes.
    pub state: f64,
    /// Bytes kept per micro-batch in flight.
    pub saved: f64,
    /// Bytes needed while it runs.
    pub working: f64,
    /// Bytes of the logits while it runs.
    pub logits: f64,
    /// Bytes that a stage has once for every kind of layer that it has.
    pub once: f64,
    /// Bytes of the parameters that are gathered for use, whole.
    pub gathered: f64,
    /// Bytes of their gradients before these are reduced.
    pub unreduced: f64,
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
    /// So many of the first layers of the most frequent kind run at the next level instead.
    pub smaller: u64,
    /// Seconds of one micro-batch.
    pub time: f64,
    /// Bytes at the peak, reserve apart.
    pub memory: f64,
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
        Self { costs, kinds, counts, ends }
    }

    fn count(&self, from: usize, to: usize, kind: usize) -> f64 {
        (self.counts[to][kind] - self.counts[from][kind]) as f64
    }

    fn sum(&self, from: usize, to: usize, level: usize, of: impl Fn(&LayerCost) -> f64) -> f64 {
        self.costs[level].iter().enumerate().map(|(kind, cost)| self.count(from, to, kind) * of(cost)).sum()
    }

    fn memory(&self, from: usize, to: usize, level: usize, in_flight: f64) -> f64 {
        let present = || (0..self.costs[level].len()).filter(|&kind| self.count(from, to, kind) > 0.0);
        // When backward reaches a layer, what those behind it kept is free again.
        let beside = |kind: usize| {
            let cost = &self.costs[level][kind];
            let free = self.sum(self.ends[to][kind], to, level, |cost| cost.saved);
            (cost.working - free).max(0.0) + cost.logits
        };
        let unit = |kind: usize| GatheredUnit {
            parameters: Bytes(self.costs[level][kind].gathered),
            gradient: Bytes(self.costs[level][kind].unreduced),
            count: self.count(from, to, kind),
        };
        let once: f64 = present().map(|kind| self.costs[level][kind].once).sum();
        self.sum(from, to, level, |cost| cost.state + in_flight * cost.saved)
            + once
            + gathered_units(present().map(unit)).0
            + present().map(beside).fold(0.0, f64::max)
    }

    /// The kind with most layers in a range; ties to the first.
    fn main_kind(&self, from: usize, to: usize) -> usize {
        let count = |kind: usize| self.counts[to][kind] - self.counts[from][kind];
        (0..self.counts[0].len()).rev().max_by_key(|&kind| count(kind)).unwrap_or(0)
    }

    /// The fastest way to run a range of layers within a memory; `None` where nothing fits.
    pub fn chunk(&self, from: usize, to: usize, in_flight: f64, capacity: f64) -> Option<Chunk> {
        let fits = |level: usize| self.memory(from, to, level, in_flight) <= capacity;
        let level = (0..self.costs.len()).find(|&level| fits(level))?;
        let plain = |level: usize| Chunk {
            from,
            to,
            level,
            smaller: 0,
            time: self.sum(from, to, level, |cost| cost.time),
            memory: self.memory(from, to, level, in_flight),
        };
        let Some(faster) = level.checked_sub(1) else { return Some(plain(level)) };
        // Between two levels: only as many layers of the main kind go to the smaller one as must.
        let kind = self.main_kind(from, to);
        let each = |level: usize| self.costs[level][kind].state + in_flight * self.costs[level][kind].saved;
        let gain = each(faster) - each(level);
        let more = |of: &dyn Fn(&LayerCost) -> f64| {
            (of(&self.costs[level][kind]) - of(&self.costs[faster][kind])).max(0.0)
        };
        let working = more(&|cost| cost.working)
            + more(&|cost| cost.logits)
            + more(&|cost| cost.once)
            + more(&|cost| 2.0 * cost.gathered + cost.unreduced);
        let over = self.memory(from, to, faster, in_flight) + working - capacity;
        let needed = (over / gain).ceil();
        if gain > 0.0 && needed >= 1.0 && needed < self.count(from, to, kind) {
            let slower = self.costs[level][kind].time - self.costs[faster][kind].time;
            let time = self.sum(from, to, faster, |cost| cost.time) + needed * slower;
            let memory = self.memory(from, to, faster, in_flight) + working - needed * gain;
            let mixed = Chunk { from, to, level: faster, smaller: needed as u64, time, memory };
            if mixed.time < plain(level).time {
                return Some(mixed);
            }
        }
        Some(plain(level))
    }

    /// Cuts the layers into chunks, one per entry of `in_flight`, with the least time of the slowest.
    ///
    /// `capacity` is what each chunk may take. `None` where some chunk cannot fit.
    pub fn partition(&self, in_flight: &[f64], capacity: f64) -> Option<Vec<Chunk>> {
        let n_layers = self.kinds.len();
        if in_flight.is_empty() || in_flight.len() > n_layers {
            return None;
        }
        let slowest = |level: usize| self.sum(0, n_layers, level, |cost| cost.time);
        let mut high = (0..self.costs.len()).map(slowest).fold(0.0, f64::max) * 2.0;
        let mut best = self.fill(in_flight, capacity, high)?;
        let mut low = 0.0;
        for _ in 0..BISECTIONS {
            let middle = 0.5 * (low + high);
            match self.fill(in_flight, capacity, middle) {
                Some(found) => {
                    high = found.iter().map(|chunk| chunk.time).fold(0.0, f64::max).min(middle);
                    best = found;
                }
                None => low = middle,
            }
        }
        Some(best)
    }

    /// Takes for every chunk as many layers as fit the limit and the memory, and leaves one for each that follows.
    fn fill(&self, in_flight: &[f64], capacity: f64, limit: f64) -> Option<Vec<Chunk>> {
        let n_layers = self.kinds.len();
        let mut from = 0;
        let mut chunks = Vec::with_capacity(in_flight.len());
        for (i, &flight) in in_flight.iter().enumerate() {
            let last = n_layers - (in_flight.len() - 1 - i);
            let good = |to: usize| self.chunk(from, to, flight, capacity).filter(|chunk| chunk.time <= limit);
            let mut found = good(from + 1)?;
            let (mut low, mut high) = (from + 1, last);
            while low < high {
                let middle = (low + high).div_ceil(2);
                match good(middle) {
                    Some(chunk) => {
                        found = chunk;
                        low = middle;
                    }
                    None => high = middle - 1,
                }
            }
            from = found.to;
            chunks.push(found);
        }
        (from == n_layers).then_some(chunks)
    }

    /// Cuts the layers as the user says: counts of layers per chunk that must add up.
    pub fn as_given(&self, counts: &[usize], in_flight: &[f64], capacity: f64) -> Option<Vec<Chunk>> {
        let mut from = 0;
        let mut chunks = Vec::new();
        for (&count, &flight) in counts.iter().zip(in_flight) {
            chunks.push(self.chunk(from, from + count, flight, capacity)?);
            from += count;
        }
        (from == self.kinds.len()).then_some(chunks)
    }
}

/// Halvings of the limit: to one part in 10^9 of the whole model's time.
const BISECTIONS: usize = 30;

#[cfg(test)]
mod tests {
    use super::*;

    fn levels(times: &[f64], sequence: &[usize]) -> Levels {
        let cost = |time: &f64| LayerCost {
            time: *time,
            state: 1.0,
            saved: 1.0,
            working: 0.0,
            logits: 0.0,
            ..LayerCost::default()
        };
        let small = |time: &f64| LayerCost {
            time: *time * 1.5,
            state: 1.0,
            saved: 0.1,
            working: 0.0,
            logits: 0.0,
            ..LayerCost::default()
        };
        Levels::new(
            vec![times.iter().map(cost).collect(), times.iter().map(small).collect()],
            sequence.to_vec(),
        )
    }

    #[test]
    fn a_heavy_head_gets_fewer_layers_beside_it() {
        let levels = levels(&[1.0, 3.0], &[0, 0, 0, 0, 0, 1]);
        let chunks = levels.partition(&[1.0, 1.0], 100.0).unwrap();
        assert_eq!(chunks.iter().map(|c| c.to - c.from).collect::<Vec<_>>(), [4, 2]);
    }

    #[test]
    fn only_as_many_layers_as_must_are_made_smaller() {
        let levels = levels(&[1.0], &[0; 8]);
        // Eight layers, two in flight: 8 * (1 + 2) = 24 bytes; each smaller layer saves 1.8.
        let chunk = levels.chunk(0, 8, 2.0, 20.0).unwrap();
        assert_eq!((chunk.level, chunk.smaller), (0, 3));
        assert!(chunk.memory <= 20.0);
    }

    #[test]
    fn a_layer_works_beside_what_those_before_it_keep() {
        let cost = |working, logits, saved| LayerCost {
            time: 1.0,
            state: 0.0,
            saved,
            working,
            logits,
            ..LayerCost::default()
        };
        let levels = |first| Levels::new(vec![vec![cost(first, 0.0, 1.0), cost(1.0, 3.0, 2.0)]], vec![0, 1]);
        // Three bytes are kept; the last layer works in four, and the first in its own beside all but two.
        assert_eq!(levels(5.0).chunk(0, 2, 1.0, 8.0).map(|chunk| chunk.memory), Some(7.0));
        assert_eq!(levels(8.0).chunk(0, 2, 1.0, 9.0).map(|chunk| chunk.memory), Some(9.0));
        assert_eq!(levels(8.0).chunk(0, 2, 1.0, 8.0), None);
    }

    #[test]
    fn what_fits_nowhere_has_no_partition() {
        assert_eq!(levels(&[1.0], &[0; 8]).partition(&[1.0, 1.0], 2.0), None);
    }

    #[test]
    fn the_bottleneck_is_the_least_of_all_cuts() {
        let times = [1.0, 2.5, 4.0];
        let sequence = [0, 1, 1, 2, 0, 1, 0, 2];
        let levels = levels(&times, &sequence);
        let found = levels.partition(&[1.0; 3], 1e9).unwrap();
        let slowest = found.iter().map(|c| c.time).fold(0.0, f64::max);
        let sum = |a: usize, b: usize| sequence[a..b].iter().map(|&k| times[k]).sum::<f64>();
        let brute = (1..7)
            .flat_map(|i| (i + 1..8).map(move |j| (i, j)))
            .map(|(i, j)| sum(0, i).max(sum(i, j)).max(sum(j, 8)))
            .fold(f64::INFINITY, f64::min);
        assert_eq!(slowest, brute);
    }
}
