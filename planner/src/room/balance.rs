//! How long the slowest stage takes at least: every stage can hold only so many layers in its time and its memory.
//!
//! ```text
//! c(s, k, r) = min over choices x of a layer of kind k of  t(x) + r (state(x) + flight(s) saved(x))
//! u(s, r)    = max over kinds k of  v(k) / c(s, k, r)                      v: what a layer counts
//! K(s, T)    = min over prices r of  u(s, r) (T + r C)                     what stage s holds in time T and memory C at most
//! no T for which  sum over s of K(s, T) - min over s of u(s, r(s)) x rare layers' time  <  sum over k of v(k) layers of k
//! ```
//! A stage whose layers take `T` and `C` at most has `sum_k n(k) c(s, k, r) <= T + r C` for every price `r`: the dual
//! of the linear program of that stage alone. Prices of a byte differ from stage to stage here, against its own
//! seconds, where `dual.rs` prices the seconds of all stages alike and so lets those with few micro-batches in flight
//! hold most layers.
//!
//! `c` is least over choices of something linear in the flight, so concave in it: between two flights it is no less
//! than the straight line. Of the most frequent kind, and of all that are not rare, a stage has a whole number, beside
//! embedding or head where it is the first or the last.

use super::Effort;
use super::dual::{By, Flights, Priced, Stage, priced};
use super::tables::{Ready, Tables};
use crate::candidate::{Candidate, Scope};

/// Prices that are tried at most for the stages at each of the flights that are asked about.
const ROUNDS: usize = 5;

/// The same of what layers cost, behind those at the prices whose bounds said most.
const EXACT_ROUNDS: usize = 1;

/// The same of bounds, in a hurry.
const QUICK_ROUNDS: usize = 2;

/// No more are tried where the last made less of a difference.
const GAINS: f64 = 1.0005;

/// The next price is so many times the last, or that part of it, until some are too low and some too high.
const STEP: f64 = 4.0;

/// Steps that halve where the time is looked for.
const HALVINGS: usize = 24;

/// Whole layers are not missed by rounding.
pub(super) const WHOLE: f64 = 1.0 + 1e-9;

/// What a stage runs out of first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Short {
    OfMemory,
    OfTime,
}

/// Where the price of memory lies at which a stage runs out of time and of memory at once.
#[derive(Clone, Copy, Debug, Default)]
struct Search {
    /// The highest that is too low.
    low: Option<f64>,
    /// The lowest that is too high.
    high: Option<f64>,
}

impl Search {
    /// The price to try next; the first that is given where none was tried.
    fn next(&self, first: f64) -> f64 {
        match (self.low, self.high) {
            (Some(low), Some(high)) => (low * high).sqrt(),
            (Some(low), None) => low * STEP,
            (None, Some(high)) => high / STEP,
            (None, None) => first,
        }
    }

    /// Takes in what a stage runs out of first at a price.
    fn learn(&mut self, price: f64, short: Short) {
        match short {
            Short::OfMemory => self.low = Some(self.low.map_or(price, |low| low.max(price))),
            Short::OfTime => self.high = Some(self.high.map_or(price, |high| high.min(price))),
        }
    }
}

/// What layers cost at a price.
struct Asked {
    price: f64,
    /// Per frequent kind, at every flight of [`Balance::anchors`].
    costs: Vec<Vec<f64>>,
    /// The first and the last layer on the first and the last stage; 0 where they are of no kind of their own, or may
    /// stand elsewhere.
    ends: [f64; 2],
}

/// What is known of the stages of a candidate.
struct Balance<'a> {
    flights: &'a [f64],
    /// Seconds that every stage waits for its sends longer than the one that waits least.
    waits: &'a [f64],
    capacity: f64,
    /// Flights that were asked about, ascending.
    anchors: Vec<f64>,
    /// Per frequent kind, what a layer counts and how many there are.
    kinds: Vec<(f64, f64)>,
    /// Which of them is the most frequent.
    main: usize,
    /// Time of all layers of rare kinds but the ends, where memory is free.
    rare: f64,
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

    /// Seconds that stage `at` of the ascending flights has for other layers than the ends, at a price of its bytes.
    fn budget(&self, (at, time): (usize, f64), one: &Asked) -> f64 {
        let [first, last] = one.ends;
        // The fewest are in flight on the last stage, the most on the first.
        let of_last = if at == 0 { last } else { 0.0 };
        let of_first = if at + 1 == self.flights.len() { first } else { 0.0 };
        time - self.waits[at] + one.price * self.capacity - of_last - of_first
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
        for (at, &flight) in self.flights.iter().enumerate() {
            let of_price = |one: &Asked| {
                let counts =
                    |(kind, &(counts, _)): (usize, &(f64, f64))| counts / self.cost(one, kind, flight);
                let unit = self.kinds.iter().enumerate().map(counts).fold(0.0, f64::max);
                (unit * self.budget((at, time), one), unit)
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
        let of_stage = |(at, &flight): (usize, &f64)| {
            let of_price = |one: &Asked| {
                let cost =
                    kinds.iter().map(|&kind| self.cost(one, kind, flight)).fold(f64::INFINITY, f64::min);
                self.budget((at, time), one) / cost
            };
            (self.asked.iter().map(of_price).fold(f64::INFINITY, f64::min) * WHOLE).floor()
        };
        let held: f64 = self.flights.iter().enumerate().map(of_stage).sum();
        held < kinds.iter().map(|&kind| self.kinds[kind].1).sum::<f64>()
    }

    fn longest(&self, known: f64, possible: f64) -> f64 {
        longest((known, possible), |time| self.is_impossible(time))
    }
}

/// The longest time in which it is known that stages do not end, between one that is known and one in which they may.
pub(super) fn longest((known, possible): (f64, f64), is_impossible: impl Fn(f64) -> bool) -> f64 {
    let (mut low, mut high) = (known, possible);
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(low, high);
        if is_impossible(middle) { low = middle } else { high = middle }
    }
    low
}

/// Where prices are looked for at one of the flights that are asked about, and where a time ends that is enough.
struct Looking {
    searches: Vec<Search>,
    first_price: f64,
    enough: f64,
}

impl Balance<'_> {
    /// The same at prices that are looked for at every flight that is asked about: what is worth most on one stage is
    /// not on another. Where bounds of what layers cost are not enough, what they cost is asked, near the prices that
    /// said most.
    fn looked_for(
        mut self,
        asked_at: impl Fn(f64, By) -> Option<(Asked, Vec<Short>)>,
        (known, mut looking): (f64, Looking),
        effort: Effort,
    ) -> Option<f64> {
        let enough = looking.enough;
        let quickly = match effort {
            Effort::GivesUp | Effort::Quick => QUICK_ROUNDS,
            Effort::Thorough => ROUNDS,
        };
        let longest = self.in_rounds(|price| asked_at(price, By::Most), (known, &mut looking), quickly)?;
        if longest >= enough || effort != Effort::Thorough {
            return Some(longest);
        }
        let anchors = self.anchors.iter().copied().enumerate();
        let best: Vec<f64> = anchors.map(|anchor| self.best_price(anchor, longest)).collect();
        for price in distinct(best) {
            let (asked, short) = asked_at(price, By::Exact)?;
            self.asked.push(asked);
            looking.learn(price, short);
        }
        let longest = self.longest(longest, enough);
        self.in_rounds(|price| asked_at(price, By::Exact), (longest, &mut looking), EXACT_ROUNDS)
    }

    /// So many prices at every flight that is asked about, at most.
    fn in_rounds(
        &mut self,
        asked_at: impl Fn(f64) -> Option<(Asked, Vec<Short>)>,
        (known, looking): (f64, &mut Looking),
        rounds: usize,
    ) -> Option<f64> {
        let mut longest = known;
        for _ in 0..rounds {
            for at in 0..looking.searches.len() {
                let price = looking.searches[at].next(looking.first_price);
                let (asked, short) = asked_at(price)?;
                self.asked.push(asked);
                if self.is_impossible(looking.enough) {
                    return Some(looking.enough);
                }
                looking.learn(price, short);
            }
            let before = longest;
            longest = self.longest(before, looking.enough);
            if before > known && longest <= before * GAINS {
                break;
            }
        }
        Some(longest)
    }

    /// Of the prices that were asked, the one by which a stage at one of the flights that were asked about holds fewest
    /// layers in so much time.
    fn best_price(&self, (anchor, flight): (usize, f64), time: f64) -> f64 {
        let stage = match anchor {
            0 => 0,
            _ if anchor + 1 == self.anchors.len() => self.flights.len() - 1,
            _ => self.flights.partition_point(|&own| own < flight).min(self.flights.len() - 1),
        };
        let held = |one: &&Asked| self.budget((stage, time), one) / self.cost(one, self.main, flight);
        let best = self.asked.iter().min_by(|a, b| held(a).total_cmp(&held(b)));
        best.map_or(0.0, |one| one.price)
    }
}

impl Looking {
    fn learn(&mut self, price: f64, short: Vec<Short>) {
        self.searches.iter_mut().zip(short).for_each(|(search, short)| search.learn(price, short));
    }
}

/// Prices, each once.
fn distinct(mut prices: Vec<f64>) -> Vec<f64> {
    prices.sort_by(f64::total_cmp);
    prices.dedup();
    prices
}

impl Scope<'_> {
    /// Least seconds of the slowest stage that holds as many layers as it must in its memory, if that is more than is
    /// known; looked for until it is enough.
    pub(super) fn balanced_in_room<'s: 't, 't>(
        &'s self,
        (tables, ready): (&'t Tables<'s>, &Ready<'t>),
        (candidate, flights): (&Candidate, &Flights),
        ((known, enough), effort): ((f64, f64), Effort),
    ) -> Option<f64> {
        let [fewest, most] = flights.ends;
        let anchors = match fewest < most {
            true => vec![fewest, f64::midpoint(fewest, most), most],
            false => vec![fewest],
        };
        let is_frequent = |&kind: &usize| !self.is_rare(kind) && !self.is_end(kind);
        let frequent: Vec<usize> = (0..self.counts.len()).filter(is_frequent).collect();
        let Some(main) = frequent.iter().position(|&kind| kind == self.most_frequent()) else {
            return Some(known);
        };
        let ends = self.ends_in_place(candidate);
        let is_other = |kind: &usize| !is_frequent(kind) && !ends.contains(&Some(*kind));
        let others = (0..self.counts.len()).filter(is_other);
        let rare = others.map(|kind| ready.free[kind] * self.counts[kind] as f64).sum();
        let of_rare = ready.rare.get_or_init(|| self.rare((tables, ready.of)));
        let cost = |kind: usize, flight: f64, (price, by): (f64, By)| {
            let stage = Stage { flight, weight: 1.0, part: flights.part, by };
            let hands = if self.is_rare(kind) { &of_rare[kind] } else { &ready.kinds[kind] };
            priced(hands, tables, (&[stage], price))
        };
        let asked_at = |price: f64, by: By| -> Option<(Asked, Vec<Short>)> {
            let mut found = vec![Vec::new(); frequent.len()];
            for (of_kind, &kind) in found.iter_mut().zip(&frequent) {
                for &flight in &anchors {
                    of_kind.push(cost(kind, flight, (price, by))?);
                }
            }
            let of_end = |(kind, flight): (Option<usize>, f64)| match kind {
                Some(kind) => cost(kind, flight, (price, by)),
                None => Some(Priced::default()),
            };
            let ends = [of_end((ends[0], most))?, of_end((ends[1], fewest))?];
            // At the right price a stage runs out of time and of memory at once.
            let short = |(at, layer): (usize, &Priced)| {
                let first = if at + 1 == anchors.len() { ends[0] } else { Priced::default() };
                let last = if at == 0 { ends[1] } else { Priced::default() };
                let seconds = |of: &Priced| of.value - price * of.weighed;
                let n = (enough - seconds(&first) - seconds(&last)) / seconds(layer);
                let bytes = n * layer.weighed + first.weighed + last.weighed;
                if bytes > tables.capacity() { Short::OfMemory } else { Short::OfTime }
            };
            let short = found[main].iter().enumerate().map(short).collect();
            let costs = found.iter().map(|kind| kind.iter().map(|one| one.value).collect()).collect();
            Some((Asked { price, costs, ends: ends.map(|end| end.value) }, short))
        };
        let (free, _) = asked_at(0.0, By::Most)?;
        let counts = frequent.iter().map(|&kind| self.counts[kind] as f64);
        let balance = Balance {
            flights: &flights.ascending,
            waits: &flights.waits,
            capacity: tables.capacity(),
            anchors: anchors.clone(),
            kinds: free.costs.iter().map(|costs| costs[0]).zip(counts).collect(),
            main,
            rare,
            asked: vec![free],
        };
        let searches = vec![Search::default(); anchors.len()];
        let looking = Looking { searches, first_price: ready.first_price, enough };
        balance.looked_for(asked_at, (known, looking), effort)
    }
}
