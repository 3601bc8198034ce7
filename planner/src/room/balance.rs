//! How long the slowest stage takes at least: every stage can hold only so many layers in its time and its memory.
//!
//! ```text
//! c(s, k, r) = min over choices x of a layer of kind k of  t(x) + r (state(x) + flight(s) saved(x))
//! u(s, r)    = max over kinds k of  v(k) / c(s, k, r)                      v: what a layer counts
//! K(s, T)    = min over prices r of  u(s, r) (T + r C)                     what stage s holds in time T and memory C at most
//! no T for which  sum over s of K(s, T) - min over s of u(s, r(s)) x rare layers' time  <  sum over k of v(k) layers of k
//! ```
//! A stage whose layers take `T` and `C` at most has `sum_k n(k) c(s, k, r) <= T + r C` for every price `r`: the dual of the linear
//! program of that stage alone. Prices of a byte differ from stage to stage here, against its own seconds, where `dual.rs`
//! prices the seconds of all stages alike and so lets those with few micro-batches in flight hold most layers.
//!
//! `c` is least over choices of something linear in the flight, so concave in it: between two flights it is no less than
//! the straight line. Of the most frequent kind, and of all that are not rare, a stage has a whole number, beside embedding or
//! head where it is the first or the last.

use super::dual::{By, Flights, Stage, priced};
use super::tables::{Ready, Tables};
use crate::candidate::{Candidate, Scope};

/// Prices that are tried at most.
const ROUNDS: usize = 6;

/// The next price is so many times the last, or that part of it, until some are too low and some too high.
const STEP: f64 = 4.0;

/// Steps that halve where the time is looked for.
const HALVINGS: usize = 24;

/// Whole layers are not missed by rounding.
const WHOLE: f64 = 1.0 + 1e-9;

/// Per frequent kind, what a layer costs at a price, at every flight of [`Balance::anchors`].
struct Asked {
    price: f64,
    costs: Vec<Vec<f64>>,
}

/// What is known of the stages of a candidate.
struct Balance<'a> {
    flights: &'a [f64],
    capacity: f64,
    /// Flights that were asked about, ascending.
    anchors: Vec<f64>,
    /// Per frequent kind, what a layer counts and how many there are.
    kinds: Vec<(f64, f64)>,
    /// Which of them is the most frequent.
    main: usize,
    /// Time of all layers of rare kinds where memory is free.
    rare: f64,
    /// Time of the first and of the last layer where memory is free, as far as they surely stand on the first and the last
    /// stage and are of kinds of their own.
    ends: [f64; 2],
    asked: Vec<Asked>,
}

impl Balance<'_> {
    /// What a layer of a frequent kind costs on a stage with so many in flight.
    fn cost(&self, one: &Asked, kind: usize, flight: f64) -> f64 {
        let costs = &one.costs[kind];
        let after = self.anchors.partition_point(|&anchor| anchor < flight).clamp(1, costs.len().max(2) - 1);
        let (Some(&from), Some(&to)) = (self.anchors.get(after - 1), self.anchors.get(after)) else {
            return costs[0];
        };
        let part = ((flight - from) / (to - from)).clamp(0.0, 1.0);
        costs[after - 1] + part * (costs[after] - costs[after - 1])
    }

    /// Whether the stages cannot hold all layers if all are to end in so much time.
    fn is_impossible(&self, time: f64) -> bool {
        let all: Vec<usize> = (0..self.kinds.len()).collect();
        self.is_too_much(time)
            || [&all[..], &[self.main]].into_iter().any(|kinds| self.are_too_many(kinds, time))
    }

    /// The same of layers that may be cut.
    fn is_too_much(&self, time: f64) -> bool {
        let (mut held, mut least_unit) = (0.0, f64::INFINITY);
        for &flight in self.flights {
            let of_price = |one: &Asked| {
                let counts =
                    |(kind, &(counts, _)): (usize, &(f64, f64))| counts / self.cost(one, kind, flight);
                let unit = self.kinds.iter().enumerate().map(counts).fold(0.0, f64::max);
                (unit * (time + one.price * self.capacity), unit)
            };
            let least = self.asked.iter().map(of_price).min_by(|a, b| a.0.total_cmp(&b.0));
            let Some((most, unit)) = least else { continue };
            held += most;
            least_unit = least_unit.min(unit);
        }
        let needed: f64 = self.kinds.iter().map(|(counts, layers)| counts * layers).sum();
        held - least_unit * self.rare < needed
    }

    /// The same of whole layers of some kinds, each as if it were of the cheapest.
    fn are_too_many(&self, kinds: &[usize], time: f64) -> bool {
        let last = self.flights.len() - 1;
        let of_stage = |(at, &flight): (usize, &f64)| {
            // The fewest are in flight on the last stage, the most on the first.
            let taken =
                if at == 0 { self.ends[1] } else { 0.0 } + if at == last { self.ends[0] } else { 0.0 };
            let of_price = |one: &Asked| {
                let cost =
                    kinds.iter().map(|&kind| self.cost(one, kind, flight)).fold(f64::INFINITY, f64::min);
                (time - taken + one.price * self.capacity) / cost
            };
            (self.asked.iter().map(of_price).fold(f64::INFINITY, f64::min) * WHOLE).floor()
        };
        let held: f64 = self.flights.iter().enumerate().map(of_stage).sum();
        held < kinds.iter().map(|&kind| self.kinds[kind].1).sum::<f64>()
    }

    /// The longest time in which it is known that they do not end, between one that is known and another.
    fn longest(&self, known: f64, most: f64) -> f64 {
        let (mut low, mut high) = (known, most);
        if self.is_impossible(high) {
            return high;
        }
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(low, high);
            if self.is_impossible(middle) { low = middle } else { high = middle }
        }
        low
    }
}

impl Scope<'_> {
    /// Least seconds of the slowest stage that holds as many layers as it must in its memory, if that is more than is known;
    /// looked for until it is enough.
    pub(super) fn balanced_in_room(
        &self,
        (tables, ready): (&Tables<'_>, &Ready<'_>),
        (candidate, flights): (&Candidate, &Flights),
        (known, enough): (f64, f64),
    ) -> Option<f64> {
        let ends = flights.ends;
        let anchors = match ends[0] < ends[1] {
            true => vec![ends[0], f64::midpoint(ends[0], ends[1]), ends[1]],
            false => vec![ends[0]],
        };
        let is_frequent = |&kind: &usize| !self.is_rare(kind) && !self.is_end(kind);
        let frequent: Vec<usize> = (0..self.counts.len()).filter(is_frequent).collect();
        let of_rare = (0..self.counts.len()).filter(|kind| !is_frequent(kind));
        let rare = of_rare.map(|kind| ready.free[kind] * self.counts[kind] as f64).sum();
        let cost = |kind: usize, flight: f64, price: f64| {
            let stage = Stage { flight, weight: 1.0, by: By::Most };
            priced(&ready.kinds[kind], tables, (&[stage], price))
        };
        let kinds: Option<Vec<(f64, f64)>> = frequent
            .iter()
            .map(|&kind| Some((cost(kind, ends[0], 0.0)?.value, self.counts[kind] as f64)))
            .collect();
        let kinds = kinds?;
        let Some(main) = frequent.iter().position(|&kind| kind == self.most_frequent()) else {
            return Some(known);
        };
        let free = kinds.iter().map(|(least, _)| vec![*least; anchors.len()]).collect();
        let capacity = tables.bench.setting.capacity;
        let asked = vec![Asked { price: 0.0, costs: free }];
        let ends = self.pieces(candidate, &ready.free).ends;
        let mut balance =
            Balance { flights: &flights.ascending, capacity, anchors, kinds, main, rare, ends, asked };
        let (mut price, mut low, mut high) = (ready.first_price, None, None);
        for _ in 0..ROUNDS {
            let mut costs = vec![Vec::new(); frequent.len()];
            let mut crowds = false;
            for (of_kind, &kind) in costs.iter_mut().zip(&frequent) {
                for &flight in &balance.anchors {
                    let found = cost(kind, flight, price)?;
                    // At the right price a stage runs out of time and of memory at once.
                    if kind == frequent[main] {
                        let seconds = found.value - price * found.weighed;
                        crowds = found.weighed * enough > capacity * seconds;
                    }
                    of_kind.push(found.value);
                }
            }
            balance.asked.push(Asked { price, costs });
            if balance.is_impossible(enough) {
                return Some(enough);
            }
            *(if crowds { &mut low } else { &mut high }) = Some(price);
            price = match (low, high) {
                (Some(low), Some(high)) => (low * high).sqrt(),
                (Some(low), None) => low * STEP,
                (None, high) => high.unwrap_or(price) / STEP,
            };
        }
        Some(balance.longest(known, enough))
    }
}
