//! How long the slowest stage takes at least where stages stand on different devices, each with the memory of its own.
//!
//! ```text
//! c(g, k, r, f) = min over choices x of a layer of kind k on ground g of  t(x) + r (state(x) + f saved(x))
//! no T for which  sum over s of floor(min over r of (T + r C(g(s))) / c(g(s), k, r, f(s)))  <  layers of kind k
//! ```
//! A stage whose layers take `T` and `C` at most has `n(k) c(g, k, r, f) <= T + r C` for every price `r`, as in
//! `balance.rs`: at no price it says how fast its devices are, at the highest how much they hold. Between, a fast
//! device of little memory holds as many layers as it has room for where it computes them again. What is no layer of
//! the kind takes room and time besides, and is left out.

use ir::units::Seconds;

use super::Works;
use super::balance::{WHOLE, longest};
use super::dual::{By, Stage, least_that, priced};
use super::tables::{Ready, Tables};
use crate::bound::{Bound, Together, Work};
use crate::candidate::{Candidate, Scope};
use crate::forms::Forms;
use crate::price::grounds::Grounds;
use crate::price::setting::Setting;
use crate::schedules::Family;

/// Prices of memory, in multiples of what a byte is worth by the fastest choices of a ground. The first says what a
/// stage holds at most, whatever time that takes.
const PRICES: [f64; 5] = [1000.0, 0.6, 0.15, 3.0, 0.05];

/// Where nothing is known to be enough, it is looked for up to so many times what it is where memory is free.
const FARTHEST: f64 = 16.0;

/// What a layer costs on a ground at a price, with the fewest and with the most micro-batches in flight of its stages.
#[derive(Clone, Copy, Debug)]
struct Cost {
    price: f64,
    ends: [f64; 2],
}

/// The stages on a ground.
#[derive(Clone, Debug)]
struct Alike {
    /// Micro-batches in flight on each, as bytes count them.
    flights: Vec<f64>,
    /// Seconds that each waits for its sends longer than the stage of all that waits least.
    waits: Vec<f64>,
    capacity: f64,
    /// By the prices that were tried.
    costs: Vec<Cost>,
}

impl Alike {
    /// The fewest and the most in flight.
    fn ends(&self) -> [f64; 2] {
        let most = self.flights.iter().copied().fold(0.0, f64::max);
        [self.flights.iter().copied().fold(most, f64::min), most]
    }

    /// Layers for which these stages have room and time, none of them cut.
    fn held(&self, time: f64) -> f64 {
        let [fewest, most] = self.ends();
        let of_stage = |(flight, wait): (&f64, &f64)| {
            // Least of something linear in the flight, a layer costs no less than the straight line between two
            // flights.
            let part = if most > fewest { (flight - fewest) / (most - fewest) } else { 0.0 };
            let at_price = |one: &Cost| {
                let [low, high] = one.ends;
                (time - wait + one.price * self.capacity) / (low + part * (high - low))
            };
            (self.costs.iter().map(at_price).fold(f64::INFINITY, f64::min) * WHOLE).floor().max(0.0)
        };
        self.flights.iter().zip(&self.waits).map(of_stage).sum()
    }
}

/// Whether stages cannot hold so many layers if all are to end in so much time.
fn is_impossible(stages: &[Alike], n_layers: f64, time: f64) -> bool {
    stages.iter().map(|alike| alike.held(time)).sum::<f64>() < n_layers
}

impl Scope<'_> {
    /// A time that a candidate cannot beat whose stages stand on several grounds, in the memory of each, looked for
    /// until it reaches a limit.
    pub(super) fn bound_on_grounds<'s>(
        &'s self,
        (candidate, bound): (&'s Candidate, &Bound),
        (of, limit): (Forms<'s>, f64),
    ) -> Option<Seconds> {
        if !self.counts_memory() {
            return None;
        }
        let grounds = &self.grounds(candidate);
        let tables: Vec<Tables<'_>> = self
            .benches(candidate, grounds)
            .into_iter()
            .enumerate()
            .map(|(ground, bench)| self.tables_on(bench, bound.on(ground).covers, of))
            .collect();
        let ready = tables.iter().enumerate();
        let ready: Vec<Ready<'_>> =
            ready.map(|(ground, tables)| self.ready((tables, bound.on(ground), of), None)).collect();
        let mut works = Works { free: bound.work, known: Vec::new(), kept: Vec::new() };
        for family in self.families_sending(candidate) {
            let mut stages = self.alike(grounds, &family);
            let asked = (&mut stages[..], (&tables[..], &ready[..]));
            let work = self.work_on_grounds(asked, (candidate, &family, bound), limit)?;
            works.known.push((family.kind, work));
        }
        // What stages take together was asked as far as they take no longer than is enough.
        Some(self.time_in(candidate, &works).min(Seconds(limit)).max(bound.time))
    }

    /// The stages on every ground, in the schedules of a family.
    fn alike(&self, grounds: &Grounds<'_>, family: &Family) -> Vec<Alike> {
        let least = family.sends.waits().least;
        let on = |(ground, setting): (usize, &Setting<'_>)| {
            let own = || (0..grounds.of_stage.len()).filter(|&stage| grounds.of_stage[stage] == ground);
            let flight = |stage: usize| family.in_flight[stage] * self.constants.fragmentation_factor;
            let wait = |stage: usize| family.sends.of_stages.get(stage).map_or(0.0, |own| own - least);
            let (flights, waits) = (own().map(flight).collect(), own().map(wait).collect());
            Alike { flights, waits, capacity: setting.capacity, costs: Vec::new() }
        };
        grounds.settings.iter().enumerate().map(on).collect()
    }

    /// Least work of a candidate whose stages hold as many layers of the most frequent kind as they must, in the
    /// schedules of a family, as far as prices were tried until it takes as long as a limit.
    fn work_on_grounds(
        &self,
        (stages, (tables, ready)): (&mut [Alike], (&[Tables<'_>], &[Ready<'_>])),
        (candidate, family, bound): (&Candidate, &Family, &Bound),
        limit: f64,
    ) -> Option<Work> {
        let (main, free) = (self.most_frequent(), bound.work);
        let n_layers = self.counts[main] as f64;
        let time = |work: Work| self.in_family(candidate, work, family).0;
        let with = |slowest: f64| Work { slowest, ..free };
        if self.is_rare(main) || time(free) >= limit {
            return Some(free);
        }
        let enough = if limit.is_finite() {
            least_that(free.slowest, |slowest| time(with(slowest)) >= limit)
        } else {
            free.slowest * FARTHEST
        };
        let mut known = free.slowest;
        for (alike, ready) in stages.iter_mut().zip(ready) {
            alike.costs.push(Cost { price: 0.0, ends: [ready.free[main]; 2] });
        }
        for multiple in PRICES {
            for (ground, alike) in stages.iter_mut().enumerate() {
                let (tables, ready) = (&tables[ground], &ready[ground]);
                let price = multiple * bound.on(ground).seconds_per_byte;
                let cost = |flight: f64| {
                    let stage = Stage { flight, weight: 1.0, part: 1.0, by: By::Most };
                    Some(priced(&ready.kinds[main], tables, (&[stage], price))?.value)
                };
                let [fewest, most] = alike.ends();
                let low = cost(fewest)?;
                let high = if most > fewest { cost(most)? } else { low };
                alike.costs.push(Cost { price, ends: [low, high] });
            }
            if is_impossible(stages, n_layers, enough) {
                return Some(with(enough));
            }
            known = longest((known, enough), |time| is_impossible(stages, n_layers, time));
        }
        let held: Vec<f64> = stages.iter().map(|alike| alike.held(enough)).collect();
        let together = Work { together: Some(self.together_in_room(bound, &held)), ..with(known) };
        Some(if time(together) > time(with(known)) { together } else { with(known) })
    }

    /// What stages take together in the micro-batches of a step, of which those on each ground hold so many layers of
    /// the most frequent kind at most: layers are where they are the fastest as far as there is room.
    fn together_in_room(&self, bound: &Bound, held: &[f64]) -> Together {
        let seconds = |kind: usize| bound.grounds.iter().map(move |own| own.layers[kind].least.repeated);
        let main = self.most_frequent();
        let others = (0..self.counts.len()).filter(|&kind| kind != main);
        let least = |kind: usize| self.counts[kind] as f64 * seconds(kind).fold(f64::INFINITY, f64::min);
        let of_main = least_of_all(self.counts[main] as f64, seconds(main).zip(held.iter().copied()));
        Together { all: others.map(least).sum::<f64>() + of_main, falls: 0.0 }
    }
}

/// Least seconds of so many layers on grounds where each takes so long, and so many have room.
fn least_of_all(n_layers: f64, grounds: impl Iterator<Item = (f64, f64)>) -> f64 {
    let mut fastest: Vec<(f64, f64)> = grounds.collect();
    fastest.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut left, mut all) = (n_layers, 0.0);
    for (seconds, room) in fastest {
        let here = room.min(left);
        all += here * seconds;
        left -= here;
    }
    all
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn layers_are_where_they_are_the_fastest_as_far_as_there_is_room() {
        // Four of eight where each takes one second, the rest where each takes three.
        assert_eq!(least_of_all(8.0, [(3.0, 100.0), (1.0, 4.0)].into_iter()), 4.0 + 12.0);
        assert_eq!(least_of_all(3.0, [(3.0, 100.0), (1.0, 4.0)].into_iter()), 3.0);
    }

    proptest! {
        /// Against all ways to give stages whole layers, each by one of several choices.
        #[test]
        fn no_way_to_hold_the_layers_is_faster(
            grounds in proptest::collection::vec(
                (
                    proptest::collection::vec((0.1..4.0_f64, 0.1..2.0_f64, 0.0..1.0_f64), 1..4),
                    2.0..9.0_f64,
                    proptest::collection::vec(0.5..3.0_f64, 1..3),
                ),
                1..3,
            ),
            n_layers in 1..9_u32,
        ) {
            let mut alike: Vec<Alike> = Vec::new();
            // Per stage, the fastest way to hold every number of layers, if there is one.
            let mut fastest: Vec<Vec<f64>> = Vec::new();
            for (choices, capacity, flights) in &grounds {
                let cost = |price: f64, flight: f64| {
                    let of = |(time, state, saved): &(f64, f64, f64)| time + price * (state + flight * saved);
                    choices.iter().map(of).fold(f64::INFINITY, f64::min)
                };
                let waits = vec![0.0; flights.len()];
                let mut own = Alike { flights: flights.clone(), waits, capacity: *capacity, costs: Vec::new() };
                let ends = own.ends();
                own.costs = PRICES.into_iter().chain([0.0]).map(|price| Cost { price, ends: ends.map(|flight| cost(price, flight)) }).collect();
                alike.push(own);
                fastest.extend(flights.iter().map(|flight| least_times(choices, (*capacity, *flight), n_layers)));
            }
            let most = fastest.iter().flatten().filter(|time| time.is_finite()).copied().fold(0.0, f64::max);
            let ends_in = |time: f64| -> u32 {
                fastest.iter().map(|times| times.iter().rposition(|own| *own <= time).unwrap_or(0) as u32).sum()
            };
            let steps = (0..200).map(|step| most * f64::from(step) / 199.0);
            for time in steps.filter(|&time| ends_in(time) >= n_layers) {
                prop_assert!(!is_impossible(&alike, f64::from(n_layers), time * (1.0 + 1e-9)), "{time}");
            }
        }
    }

    /// Least time of so many layers of a stage, each by one of some choices, for 0 up to all; infinite where they do
    /// not fit.
    fn least_times(choices: &[(f64, f64, f64)], (capacity, flight): (f64, f64), n_layers: u32) -> Vec<f64> {
        let mut ways = vec![(0.0, 0.0)];
        let mut least = vec![0.0];
        for _ in 0..n_layers {
            let more = |&(time, bytes): &(f64, f64)| {
                choices.iter().map(move |(own, state, saved)| (time + own, bytes + state + flight * saved))
            };
            ways = ways.iter().flat_map(more).filter(|(_, bytes)| *bytes <= capacity).collect();
            least.push(ways.iter().map(|way| way.0).fold(f64::INFINITY, f64::min));
        }
        least
    }
}
