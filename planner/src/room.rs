//! How fast a candidate could be in the memory that there is: its layers where every byte has a price.
//!
//! ```text
//! least T such that for every stage s:  sum_x n(s, x) t(x) <= T,  sum_x n(s, x) (state(x) + flight(s) saved(x)) <= C
//!                   for every kind k:   sum of n(s, x) over stages and choices of k = layers of k
//! ```
//! with any choice x for any fraction of a layer on any stage. The bound is a value of the dual of this linear program.
//! Memory on stage s has a price in proportion to `1 / (flight(s) + a)`, so that a layer costs `min_x t(x) + price
//! (state(x) + flight(s) saved(x)) / (flight(s) + a)` there: monotone in the flight, so that the least over the stages
//! is at one of the ends of the pipeline. No price and no `a` make a bound too high. Left out are buffers, logits and what
//! an operator needs while it runs.
//!
//! The leading form of every kind is priced first: where it is faster than what is asked about, the least over all forms
//! is too. The tables of a micro-batch stand for smaller ones on its mesh too, which take as long and keep less in proportion.

use ir::units::Seconds;

use crate::bound::{Bound, Work};
use crate::candidate::{Candidate, Scope};
use crate::chooser::{Cheapest, Chooser};
use crate::forms::Forms;
use crate::given::{Given, HomeRule};
use crate::layer_problem::LayerProblem;
use crate::request::Solver;
use crate::shelf::Asked;

/// Prices of memory that are tried at most.
const ROUNDS: usize = 8;

/// The same for the memory of one stage.
const STAGE_ROUNDS: usize = 4;

/// The first, in multiples of what a byte is worth by the fastest choices, as in menus.
const FIRST_PRICE: f64 = 0.15;

/// Memory becomes so many times as dear where all prices tried are too low, and as cheap where they are too high.
const STEP: f64 = 5.0;

/// After each of the first prices `a` is set anew by what it found; no other is tried where the limit is further away than
/// this fraction of it.
const HOPELESS: [f64; 2] = [0.75, 0.9];

/// The layers of a candidate with a choice for every price of memory.
pub(crate) struct Tables<'s> {
    candidate: &'s Candidate,
    bound: &'s Bound,
    capacity: f64,
    /// Per kind, its forms.
    kinds: Vec<Asked<'s>>,
    /// Micro-batches that the tables take to be in flight.
    in_flight: f64,
    /// Whether hosts may hold what layers keep.
    on_host: bool,
}

/// The layers of all stages in the hands of the solver.
struct Ready<'t> {
    kinds: Vec<Vec<Chooser<'t>>>,
    /// Price and `a` to start with.
    price: f64,
    a: f64,
}

/// Layers at a price of memory.
#[derive(Clone, Copy, Debug, Default)]
struct Priced {
    /// Seconds, with what their bytes cost.
    value: f64,
    /// Bytes, as the stages weigh them.
    weighed: f64,
    /// Bytes of their states.
    states: f64,
    /// Bytes that a micro-batch keeps.
    saved: f64,
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

/// What is known of candidates in their memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Room {
    /// Of these, the smallest micro-batch first, so many may be faster than the limit.
    pub(crate) n_open: usize,
    /// Least work of the average and of the slowest stage of each of them.
    pub(crate) work: Work,
    /// The same of the leading forms alone: what it is likely to come to.
    pub(crate) likely: Work,
}

/// Micro-batches in flight on every stage, in those of the tables.
struct Flights {
    all: Vec<f64>,
    /// The fewest and the most of a stage.
    ends: [f64; 2],
}

impl Flights {
    /// What a byte weighs at both ends, and the weight of all stages; 1 where most are in flight.
    fn weights(&self, a: f64) -> ([f64; 2], f64) {
        let weight = |flight: f64| (self.ends[1] + a) / (flight + a);
        (self.ends.map(weight), self.all.iter().map(|&flight| weight(flight)).sum())
    }
}

impl Scope<'_> {
    /// Which of some candidates on one mesh, the smallest micro-batch first, are slower than a limit in their memory,
    /// from the largest on, and what is known of the others: by the tables of a candidate whose micro-batch is no smaller.
    pub(crate) fn room(
        &self,
        (tables, bound): (&Candidate, &Bound),
        candidates: &[&Candidate],
        (of, limit): (Forms, f64),
    ) -> Room {
        let all = Room { n_open: candidates.len(), work: bound.work, likely: bound.work };
        if self.request.solver != Solver::Structured || !self.knows_room(bound) {
            return all;
        }
        let leading = self.room_by(self.priced_tables((tables, bound), Forms::Leading), candidates, limit);
        let leads = of == Forms::Leading || self.forms.iter().all(|forms| forms.len() == 1);
        match leading {
            Some((n_open, work)) if leads => Room { n_open, work, likely: work },
            Some((n_open, likely)) if n_open < candidates.len() => {
                let found = self.room_by(self.priced_tables((tables, bound), of), candidates, limit);
                found.map_or(all, |(n_open, work)| Room { n_open, work, likely })
            }
            Some((_, likely)) => Room { likely, ..all },
            None => all,
        }
    }

    /// How many of the candidates may be faster, and the least work of the smallest.
    fn room_by(&self, tables: Tables<'_>, candidates: &[&Candidate], limit: f64) -> Option<(usize, Work)> {
        let mut ready = self.ready(&tables);
        let slower =
            |one: &Candidate, work: Work| self.with_bubble(one, work).is_none_or(|time| time.0 >= limit);
        // What the smallest does not reach, some of the larger may.
        let work = self.work_in_room((&tables, &mut ready), candidates[0], limit)?;
        if candidates.iter().all(|one| slower(one, work)) {
            return Some((0, work));
        }
        let mut n_open = candidates.len();
        while n_open > 1 {
            let one = candidates[n_open - 1];
            match self.work_in_room((&tables, &mut ready), one, limit) {
                Some(work) if slower(one, work) => n_open -= 1,
                Some(_) | None => break,
            }
        }
        Some((n_open, work))
    }

    /// A time that a candidate cannot beat in its memory, looked for until it reaches a limit: by the tables of a candidate
    /// on its mesh with a micro-batch that is no smaller, and its bound. `None` where memory says nothing of it.
    pub fn bound_in_room(
        &self,
        (tables, bound): (&Candidate, &Bound),
        candidate: &Candidate,
        (of, limit): (Forms, Seconds),
    ) -> Option<Seconds> {
        if !self.knows_room(bound) {
            return None;
        }
        let tables = self.priced_tables((tables, bound), of);
        let work = self.work_in_room((&tables, &mut self.ready(&tables)), candidate, limit.0)?;
        self.with_bubble(candidate, work)
    }

    /// Whether memory says anything of a candidate: not where stages stand on several grounds, nor where parameters may be
    /// on hosts, for nobody knows how little devices then hold of states.
    fn knows_room(&self, bound: &Bound) -> bool {
        bound.grounds.is_empty() && self.given().parameters == HomeRule::Device
    }

    fn priced_tables<'s>(&'s self, (candidate, bound): (&'s Candidate, &'s Bound), of: Forms) -> Tables<'s> {
        let bench = self.bench(candidate);
        let given = Given { covers: bound.covers, ..self.given() };
        let kinds = (0..self.forms.len()).map(|kind| self.asked(&bench, kind, &given, of)).collect();
        let in_flight = self.clock(candidate, given.covers).in_flight;
        let on_host = given.kept != HomeRule::Device;
        Tables { candidate, bound, capacity: bench.setting.capacity, kinds, in_flight, on_host }
    }

    fn ready<'t>(&'t self, tables: &'t Tables<'t>) -> Ready<'t> {
        let one = |(_, problem): &'t (usize, LayerProblem<'t>)| self.chooser(problem);
        Ready {
            kinds: tables.kinds.iter().map(|forms| forms.iter().map(one).collect()).collect(),
            price: FIRST_PRICE * tables.bound.seconds_per_byte,
            a: 1.0,
        }
    }

    /// Least work of a candidate in its memory, as far as prices of it were tried.
    fn work_in_room(
        &self,
        (tables, ready): (&Tables<'_>, &mut Ready<'_>),
        candidate: &Candidate,
        limit: f64,
    ) -> Option<Work> {
        let flights = self.flights(candidate, tables)?;
        let (p, bound) = (candidate.n_stages as f64, tables.bound);
        let fullest = self.fullest_stage((tables, ready), (candidate, flights.ends[0]), limit)?;
        let free = Work { slowest: bound.work.slowest.max(fullest), ..bound.work };
        let mut most = bound.work.average;
        let mut tangents = Tangents::default();
        for round in 0..ROUNDS {
            let (weights, all) = flights.weights(ready.a * flights.ends[1]);
            let capacity = tables.capacity * all;
            let sum = self.all_priced(tables, ready, (&flights, weights))?;
            let tangent = Tangent {
                price: ready.price,
                value: (sum.value - ready.price * capacity) / p,
                slope: (sum.weighed - capacity) / p,
            };
            most = most.max(tangent.value);
            let reaches = |average: f64| self.with_bubble(candidate, in_memory(free, average));
            let reached = reaches(most)?.0;
            if reached >= limit || HOPELESS.get(round).is_some_and(|part| reached < limit * part) {
                break;
            }
            tangents.add(tangent);
            ready.price = tangents.next_price();
            if round < HOPELESS.len() {
                if sum.saved > 0.0 {
                    ready.a = (ready.a * sum.states.max(1.0) / sum.saved / flights.ends[1]).sqrt();
                }
                // With another `a` it is another function of the price: what was found is no more than a hint.
                if round + 1 == HOPELESS.len() {
                    tangents = Tangents::default();
                }
            } else if let Some(most) = tangents.most()
                && reaches(most)?.0 < limit
            {
                break;
            }
        }
        Some(in_memory(free, most))
    }

    /// Least seconds of the stage that has most layers of the most frequent kind, at least as many as rounding up gives it,
    /// in its memory: with as few micro-batches in flight as any stage has.
    fn fullest_stage(
        &self,
        (tables, ready): (&Tables<'_>, &Ready<'_>),
        (candidate, flight): (&Candidate, f64),
        limit: f64,
    ) -> Option<f64> {
        let kind = (0..self.counts.len()).max_by_key(|&kind| self.counts[kind])?;
        let count = self.counts[kind].div_ceil(candidate.n_stages) as f64;
        let (mut most, mut tangents, mut price): (f64, _, _) = (0.0, Tangents::default(), ready.price);
        for _ in 0..STAGE_ROUNDS {
            let one = priced(&ready.kinds[kind], tables, (&[(flight, 1.0)], price))?;
            let value = one.value * count - price * tables.capacity;
            most = most.max(value);
            tangents.add(Tangent { price, value, slope: one.weighed * count - tables.capacity });
            if most >= limit || tangents.most().is_some_and(|highest| highest <= tables.bound.work.slowest) {
                break;
            }
            price = tangents.next_price();
        }
        Some(most)
    }

    fn flights(&self, candidate: &Candidate, tables: &Tables<'_>) -> Option<Flights> {
        let micro_batch = candidate.micro_batch as f64 / tables.candidate.micro_batch as f64;
        let bytes = micro_batch * self.constants.fragmentation_factor;
        let all: Vec<f64> = self.least_in_flight(candidate).iter().map(|flight| flight * bytes).collect();
        let ends = [all.iter().copied().reduce(f64::min)?, all.iter().copied().reduce(f64::max)?];
        Some(Flights { all, ends })
    }

    /// All layers, each in the form, at the end of the pipeline and by the choice where it costs least.
    fn all_priced(
        &self,
        tables: &Tables<'_>,
        ready: &Ready<'_>,
        (flights, weights): (&Flights, [f64; 2]),
    ) -> Option<Priced> {
        let n_ends = if flights.ends[0] < flights.ends[1] { 2 } else { 1 };
        let ends: Vec<(f64, f64)> = flights.ends.into_iter().zip(weights).take(n_ends).collect();
        let mut sum = Priced::default();
        for (forms, &count) in ready.kinds.iter().zip(&self.counts) {
            let (least, count) = (priced(forms, tables, (&ends, ready.price))?, count as f64);
            sum.value += least.value * count;
            sum.weighed += least.weighed * count;
            sum.states += least.states * count;
            sum.saved += least.saved * count;
        }
        Some(sum)
    }
}

/// A layer of a kind in the form, on the stage and by the choice where it costs least; of every stage the micro-batches in
/// flight and what its bytes weigh.
fn priced(
    forms: &[Chooser<'_>],
    tables: &Tables<'_>,
    (stages, price): (&[(f64, f64)], f64),
) -> Option<Priced> {
    let mut least: Option<Priced> = None;
    let on_stages = forms.iter().flat_map(|form| stages.iter().map(move |stage| (form, stage)));
    for (chooser, &(flight, weight)) in on_stages {
        // What the hosts may hold takes no memory of the devices, and at best no time.
        let kept = if tables.on_host { 0.0 } else { flight / tables.in_flight };
        let price = price * weight;
        let Cheapest { bound: value, at_bound: choices, .. } = chooser.cheapest_apart(price, price * kept)?;
        if least.is_none_or(|least| value < least.value) {
            let (nodes, edges) = chooser.problem().problem.parts(&choices)?;
            let saved = if tables.on_host { 0.0 } else { edges.memory / tables.in_flight };
            let states = nodes.memory;
            let weighed = (states + flight * saved) * weight;
            least = Some(Priced { value, weighed, states, saved });
        }
    }
    least
}

/// The work of stages whose average takes more in their memory than where memory is free. What of it a step has once is
/// not known: all of what is more.
fn in_memory(free: Work, average: f64) -> Work {
    let more = average - free.average;
    Work { average, slowest: free.slowest.max(average), once: free.once + more }
}
