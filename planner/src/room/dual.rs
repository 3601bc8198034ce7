//! The dual of the linear program of a candidate in its memory: prices of a byte that say most, for all stages and for
//! the slowest of them.

use super::hosts::Held;
use super::tables::{Hand, Ready, Tables};
use super::{Effort, Goal, InRoom, Worth};
use crate::bound::Work;
use crate::candidate::{Candidate, Scope};
use crate::chooser::{Cheapest, Question};
use crate::schedules::Family;

/// Prices of memory that are tried at most.
const ROUNDS: usize = 8;

/// The same for the memory of one stage.
const STAGE_ROUNDS: usize = 4;

/// Memory becomes so many times as dear where all prices tried are too low, and as cheap where they are too high.
const STEP: f64 = 5.0;

/// After each of the first prices `a` is set anew by what it found; no other is tried where the limit is further away
/// than this fraction of it.
const HOPELESS: [f64; 2] = [0.75, 0.9];

/// What each stage holds for itself is asked where the limit is no further away than this part of it.
const NEAR: f64 = 0.97;

/// What is asked of layers at a price of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exactness {
    /// What those that are not rare cost by the sum that is given.
    Least,
    /// The same by the sum that says most.
    Frequent,
    /// What all cost, exactly.
    All,
}

/// Layers at a price of memory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Priced {
    /// Seconds, with what their bytes cost.
    pub(super) value: f64,
    /// Bytes, as the stages weigh them.
    pub(super) weighed: f64,
    /// Bytes of their states.
    states: f64,
    /// Bytes that a micro-batch keeps.
    saved: f64,
    /// By which parts of what is sent for longer than is computed a layer of the most frequent kind costs most, at both
    /// ends of the pipeline.
    parts: [[f64; 2]; 2],
}

/// A stage as a layer sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stage {
    /// Micro-batches in flight.
    pub(super) flight: f64,
    /// What its bytes weigh.
    pub(super) weight: f64,
    /// Its micro-batch, in those of the tables.
    pub(super) part: f64,
    pub(super) by: By,
}

/// By what layers are priced.
#[derive(Clone, Copy, Debug)]
pub(super) enum By {
    /// A bound by one sum.
    One([f64; 2]),
    /// A bound by the sum that says most.
    Most,
    /// The least by that.
    Exact,
}

/// The bound at a price of memory, per stage, and how it changes with the price. It is concave: never above a tangent.
#[derive(Clone, Copy, Debug)]
struct Tangent {
    price: f64,
    value: f64,
    slope: f64,
}

/// The closest tangents on both sides of the best price.
#[derive(Clone, Copy, Debug, Default)]
struct Tangents {
    rising: Option<Tangent>,
    falling: Option<Tangent>,
}

impl Tangents {
    fn add(&mut self, one: Tangent) {
        let side = if one.slope > 0.0 { &mut self.rising } else { &mut self.falling };
        *side = Some(one);
    }

    /// Where the two meet; nothing where one is missing or both are level.
    fn meet(&self) -> Option<Tangent> {
        let (a, b) = (self.rising?, self.falling?);
        let price = (b.value - a.value + a.slope * a.price - b.slope * b.price) / (a.slope - b.slope);
        let value = a.value + a.slope * (price - a.price);
        (price > a.price && price < b.price).then_some(Tangent { price, value, slope: 0.0 })
    }

    /// The price to try next: where tangents meet, or far from the only one.
    fn next_price(&self) -> f64 {
        match (self.meet(), self.rising, self.falling) {
            (Some(meet), ..) => meet.price,
            (None, Some(low), None) => low.price * STEP,
            (None, None, Some(high)) => high.price / STEP,
            (None, Some(low), Some(high)) => (low.price * high.price).sqrt(),
            (None, None, None) => 0.0,
        }
    }

    /// What no price brings more than, as far as it is known.
    fn most(&self) -> Option<f64> {
        match (self.rising, self.falling) {
            (Some(low), Some(high)) => Some(self.meet().map_or(low.value.max(high.value), |meet| meet.value)),
            _ => None,
        }
    }
}

/// Micro-batches in flight on every stage, in those of the tables.
pub(super) struct Flights {
    pub(super) ascending: Vec<f64>,
    /// What each of these stages waits for its sends longer than the one that waits least.
    pub(super) waits: Vec<f64>,
    /// The fewest and the most of a stage.
    pub(super) ends: [f64; 2],
    /// The micro-batch.
    pub(super) part: f64,
}

impl Flights {
    /// What a byte weighs at both ends, and the weight of all stages; 1 where most are in flight.
    fn weights(&self, a: f64) -> ([f64; 2], f64) {
        let weight = |flight: f64| (self.ends[1] + a) / (flight + a);
        (self.ends.map(weight), self.ascending.iter().map(|&flight| weight(flight)).sum())
    }
}

impl Scope<'_> {
    /// Least work of a candidate in its memory with what a family of schedules keeps, as far as prices of it were
    /// tried. What memory costs rare kinds of layers is asked at the best price alone, and only where the others do not
    /// reach the limit by themselves.
    pub(super) fn work_in_room<'s: 't, 't>(
        &'s self,
        (tables, ready): (&'t Tables<'s>, &mut Ready<'t>),
        (candidate, family): (&Candidate, &Family),
        Goal { limit, effort }: Goal,
    ) -> Option<InRoom> {
        let time = |work: Work| self.in_family(candidate, work, family).0;
        let gives_up = effort == Effort::GivesUp;
        let free = ready.base;
        if time(free) >= limit {
            return Some(InRoom::anywhere(free));
        }
        let flights = self.flights((candidate, family), tables)?;
        let mut most = free.average;
        let mut tangents = Tangents::default();
        let (mut asked, mut best) = (ready.worth, ready.worth);
        // Most that are too slow are so by what the last were.
        let (tangent, _) = self.tangent((tables, ready), (&flights, asked), Exactness::Least)?;
        if tangent.value > most && time(in_memory(free, tangent.value)) >= limit {
            return Some(InRoom::anywhere(in_memory(free, tangent.value)));
        }
        for round in 0..ROUNDS {
            let (tangent, sum) = self.tangent((tables, ready), (&flights, asked), Exactness::Frequent)?;
            if tangent.value > most {
                (most, best) = (tangent.value, Worth { parts: sum.parts, ..asked });
            }
            let reaches = |average: f64| time(in_memory(free, average));
            let reached = reaches(most);
            let is_hopeless = gives_up && HOPELESS.get(round).is_some_and(|part| reached < limit * part);
            if reached >= limit || is_hopeless {
                break;
            }
            tangents.add(tangent);
            asked.price = tangents.next_price();
            if round < HOPELESS.len() {
                if sum.saved > 0.0 {
                    asked.a = (asked.a * sum.states.max(1.0) / sum.saved / flights.ends[1]).sqrt();
                }
                // With another `a` it is another function of the price: what was found is no more than a hint.
                if round + 1 == HOPELESS.len() {
                    tangents = Tangents::default();
                }
            } else if let Some(most) = tangents.most()
                && reaches(most) < limit
            {
                break;
            }
        }
        ready.worth = best;
        let mut work = in_memory(free, most);
        if time(work) < limit && (!gives_up || time(work) >= limit * HOPELESS[1]) {
            let (tangent, _) = self.tangent((tables, ready), (&flights, best), Exactness::All)?;
            work = in_memory(free, most.max(tangent.value));
        }
        if time(work) < limit {
            let is_enough = |slowest: f64| time(Work { slowest, ..work }) >= limit;
            work.slowest = self.slowest_in_room((tables, ready), &flights, (work.slowest, is_enough))?;
        }
        let anywhere = work;
        let is_near = !gives_up || time(work) >= limit * NEAR;
        if candidate.n_stages > 1 && time(work) < limit && is_near {
            let enough = least_that(work.slowest, |slowest| time(Work { slowest, ..work }) >= limit);
            let looked_for = ((work.slowest, enough), effort);
            work.slowest = self.balanced_in_room((tables, ready), (candidate, &flights), looked_for)?;
        }
        Some(InRoom { work, anywhere })
    }

    /// The bound at a price of memory, per stage, and the layers that make it.
    fn tangent<'s: 't, 't>(
        &'s self,
        (tables, ready): (&'t Tables<'s>, &Ready<'t>),
        (flights, worth): (&Flights, Worth),
        exactness: Exactness,
    ) -> Option<(Tangent, Priced)> {
        let (weights, all) = flights.weights(worth.a * flights.ends[1]);
        let capacity = tables.capacity() * all;
        let sum = self.all_priced((tables, ready), (flights, weights, worth), exactness)?;
        let p = flights.ascending.len() as f64;
        let value = (sum.value - worth.price * capacity) / p;
        Some((Tangent { price: worth.price, value, slope: (sum.weighed - capacity) / p }, sum))
    }

    /// Least seconds of the slowest stage for its layers of the most frequent kind, in its memory, if that is more than
    /// is known; looked for until it is enough. Either a stage has more of them than rounding up gives it, with as few
    /// micro-batches in flight as any stage has; or no stage has more, and of those that have as many, one has no fewer
    /// in flight than as many stages have as there must be of those.
    fn slowest_in_room(
        &self,
        (tables, ready): (&Tables<'_>, &Ready<'_>),
        flights: &Flights,
        (known, is_enough): (f64, impl Fn(f64) -> bool),
    ) -> Option<f64> {
        let p = flights.ascending.len() as u64;
        let n_layers = self.counts[self.most_frequent()];
        let most = n_layers.div_ceil(p);
        let n_full = n_layers - p * (most - 1);
        let stage = |place: u64| {
            let flight = *flights.ascending.get(place as usize)?;
            Some(Stage { flight, weight: 1.0, part: flights.part, by: By::Most })
        };
        let full = self.stage_of((tables, ready), (most, stage(n_full - 1)?), (known, is_enough))?;
        let is_more = |slowest: f64| slowest >= full;
        let over = self.stage_of((tables, ready), (most + 1, stage(0)?), (known, is_more))?;
        Some(full.min(over))
    }

    /// Least seconds of a stage with so many layers of the most frequent kind, in its memory, with so many
    /// micro-batches in flight, if that is more than is known; looked for until it is enough.
    fn stage_of(
        &self,
        (tables, ready): (&Tables<'_>, &Ready<'_>),
        (n_layers, stage): (u64, Stage),
        (known, is_enough): (f64, impl Fn(f64) -> bool),
    ) -> Option<f64> {
        let (count, capacity) = (n_layers as f64, tables.capacity());
        let (mut most, mut tangents, mut price) = (known, Tangents::default(), ready.worth.price);
        for _ in 0..STAGE_ROUNDS {
            let one = priced(&ready.kinds[self.most_frequent()], tables, (&[stage], price))?;
            let value = one.value * count - price * capacity;
            most = most.max(value);
            tangents.add(Tangent { price, value, slope: one.weighed * count - capacity });
            if is_enough(most) || tangents.most().is_some_and(|highest| highest <= known) {
                break;
            }
            price = tangents.next_price();
        }
        Some(most)
    }

    fn flights(&self, (candidate, family): (&Candidate, &Family), tables: &Tables<'_>) -> Option<Flights> {
        let micro_batch = candidate.micro_batch as f64 / tables.bench.candidate.micro_batch as f64;
        let bytes = micro_batch * self.constants.fragmentation_factor;
        let least = family.sends.waits().least;
        let waits = (0..).map(|stage| family.sends.of_stages.get(stage).map_or(0.0, |own| own - least));
        let mut stages: Vec<(f64, f64)> =
            family.in_flight.iter().map(|flight| flight * bytes).zip(waits).collect();
        // Of stages with as many in flight, the last comes first.
        stages.reverse();
        stages.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (ascending, waits): (Vec<f64>, Vec<f64>) = stages.into_iter().unzip();
        let ends = [*ascending.first()?, *ascending.last()?];
        Some(Flights { ascending, waits, ends, part: micro_batch })
    }

    /// All layers, each in the form, at the end of the pipeline and by the choice where it costs least; what is not
    /// asked as where memory is free.
    fn all_priced<'s: 't, 't>(
        &'s self,
        (tables, ready): (&'t Tables<'s>, &Ready<'t>),
        (flights, weights, worth): (&Flights, [f64; 2], Worth),
        exactness: Exactness,
    ) -> Option<Priced> {
        let n_ends = if flights.ends[0] < flights.ends[1] { 2 } else { 1 };
        let stages: Vec<Stage> = (0..n_ends)
            .map(|end| Stage {
                flight: flights.ends[end],
                weight: weights[end],
                part: flights.part,
                by: match exactness {
                    Exactness::Least => By::One(worth.parts[end]),
                    Exactness::Frequent => By::Most,
                    Exactness::All => By::Exact,
                },
            })
            .collect();
        let main = self.most_frequent();
        let mut sum = Priced::default();
        for (kind, &count) in self.counts.iter().enumerate() {
            let least = match (self.is_rare(kind), exactness) {
                (false, _) => priced(&ready.kinds[kind], tables, (&stages, worth.price))?,
                (true, Exactness::Least | Exactness::Frequent) => {
                    Priced { value: ready.free[kind], ..Priced::default() }
                }
                (true, Exactness::All) => {
                    let rare = ready.rare.get_or_init(|| self.rare((tables, ready.of)));
                    priced(&rare[kind], tables, (&stages, worth.price))?
                }
            };
            if kind == main {
                sum.parts = least.parts;
            }
            let count = count as f64;
            sum.value += least.value * count;
            sum.weighed += least.weighed * count;
            sum.states += least.states * count;
            sum.saved += least.saved * count;
        }
        Some(sum)
    }
}

/// A layer of a kind in the form, on the stage and by the choice where it costs least.
pub(super) fn priced<'h>(
    forms: &'h [Hand<'_>],
    tables: &Tables<'_>,
    (stages, price): (&'h [Stage], f64),
) -> Option<Priced> {
    let mut least: Option<Priced> = None;
    let mut parts = [[0.0; 2]; 2];
    let hosts = tables.hosts();
    let on_stage = |stage @ (_, one): (usize, &'h Stage)| {
        let ways = forms.iter().flat_map(move |hand| hand.ways(price * one.weight));
        ways.enumerate().map(move |way| (way, stage))
    };
    for ((nth, way), (end, stage)) in stages.iter().enumerate().flat_map(on_stage) {
        let (chooser, question) = (way.chooser, way.question((tables, hosts), (stage, price * stage.weight)));
        let mut of_parts = |found: Cheapest| {
            if nth == 0 {
                parts[end] = found.parts;
            }
            (found.bound, found.at_bound)
        };
        let limit = least.map_or(f64::INFINITY, |least| least.value);
        // The first says by which parts a layer costs most, whatever it costs.
        let limited = Question { limit: if nth == 0 { f64::INFINITY } else { limit }, ..question };
        let found = match stage.by {
            By::One(parts) => chooser.bound_at(limited, parts),
            By::Most => chooser.bound_apart(limited).map(&mut of_parts),
            By::Exact => {
                let is_open = chooser.bound_apart(limited).is_some_and(|known| known.bound < limit);
                let asked = || chooser.cheapest_apart(Question { limit, ..question });
                is_open.then(asked).flatten().map(&mut of_parts)
            }
        };
        let (value, choices) = match found {
            Some(found) => found,
            None if least.is_some() => continue,
            None => return None,
        };
        if least.is_none_or(|least| value < least.value) {
            let Held { all, states, saved } =
                way.held((tables, hosts), (stage, price * stage.weight), &choices)?;
            let weighed = all * stage.weight;
            least = Some(Priced { value, weighed, states, saved, parts });
        }
    }
    least.map(|least| Priced { parts, ..least })
}

/// The least that is enough, above one that is not, where more never is less: nearly, and never below it.
pub(super) fn least_that(low: f64, is_enough: impl Fn(f64) -> bool) -> f64 {
    /// Halvings of what is between.
    const HALVINGS: usize = 24;
    let (mut low, mut high) = (low, 2.0 * low);
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(low, high);
        if is_enough(middle) { high = middle } else { low = middle }
    }
    high
}

/// The work of stages whose average takes more in their memory than where memory is free. What of it a step has once is
/// not known: all of what is more.
pub(super) fn in_memory(free: Work, average: f64) -> Work {
    let more = average - free.average;
    Work { average, slowest: free.slowest.max(average), once: free.once + more, ..free }
}
