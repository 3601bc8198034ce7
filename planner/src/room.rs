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
//! an operator needs while it runs. Where that is not enough, layers of the most frequent kind are counted whole, `L` of them on
//! `p` stages, `n = ceil(L / p)`: some stage has more than `n`, or at least `L - p (n - 1)` stages have `n`, and of these one has no
//! fewer micro-batches in flight than the fewest of so many stages.
//!
//! The leading form of every kind is priced first: where it is faster than what is asked about, the least over all forms
//! is too. The tables of a micro-batch stand for those that divide it too: their conversions take no less, they keep less in
//! proportion, and what operators take by themselves is priced anew.

use std::cell::OnceCell;

use ir::schedule::Schedule;
use ir::units::Seconds;

use crate::bound::{Bound, Work};
use crate::candidate::{Candidate, Scope};
use crate::chooser::{Cheapest, Chooser, Question};
use crate::clock::Covers;
use crate::forms::Forms;
use crate::given::{Given, HomeRule};
use crate::layer_problem::Shift;
use crate::request::Solver;
use crate::schedules::{Family, FamilyKind};
use crate::shelf::{Asked, Bench};

/// Prices of memory that are tried at most.
const ROUNDS: usize = 8;

/// The same for the memory of one stage.
const STAGE_ROUNDS: usize = 4;

/// The first, in multiples of what a byte is worth by the fastest choices, as in menus.
const FIRST_PRICE: f64 = 0.15;

/// A kind of layers is rare of which there are fewer than this part of all.
const FREQUENT: u64 = 16;

/// Memory becomes so many times as dear where all prices tried are too low, and as cheap where they are too high.
const STEP: f64 = 5.0;

/// After each of the first prices `a` is set anew by what it found; no other is tried where the limit is further away than
/// this fraction of it.
const HOPELESS: [f64; 2] = [0.75, 0.9];

/// The layers of a candidate with a choice for every price of memory.
struct Tables<'s> {
    bench: Bench<'s>,
    given: Given,
    of: Forms<'s>,
    /// Per kind, its forms; nothing of rare ones, or only choices for where memory is free.
    kinds: Vec<Asked<'s>>,
    /// The same of rare ones, once somebody asked; nothing of the others.
    rare: OnceCell<Vec<Asked<'s>>>,
    /// Micro-batches that the tables take to be in flight.
    in_flight: f64,
    /// Whether hosts may hold what layers keep.
    on_host: bool,
}

/// A form of a layer in the hands of the solver.
struct Hand<'t> {
    chooser: Chooser<'t>,
    /// What its choices cost more with the micro-batch that is asked about.
    shift: Option<Shift>,
}

/// The layers of all stages in the hands of the solver.
struct Ready<'t> {
    /// Per kind, its forms; nothing of rare ones.
    kinds: Vec<Vec<Hand<'t>>>,
    /// The same of rare ones, once somebody asked; nothing of the others.
    rare: OnceCell<Vec<Vec<Hand<'t>>>>,
    /// Per kind, the least seconds of a layer where memory is free.
    free: Vec<f64>,
    of: Forms<'t>,
    /// Least work where memory is free.
    base: Work,
    /// Where to start.
    worth: Worth,
}

/// What memory is worth, as far as it was found: what is asked about next starts there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Worth {
    /// Seconds for a byte of every stage.
    price: f64,
    /// Micro-batches in flight that states count as, in the most of a stage.
    a: f64,
    /// At both ends of the pipeline, the parts of what forward and backward send for longer than they compute, by which a
    /// layer costs most.
    parts: [[f64; 2]; 2],
}

/// What is asked of layers at a price of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effort {
    /// What those that are not rare cost by the sum that is given.
    Least,
    /// The same by the sum that says most.
    Frequent,
    /// What all cost, exactly.
    All,
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
    /// By which parts of what is sent for longer than is computed a layer of the most frequent kind costs most, at both ends
    /// of the pipeline.
    parts: [[f64; 2]; 2],
}

/// A stage as a layer sees it.
#[derive(Clone, Copy, Debug)]
struct Stage {
    /// Micro-batches in flight.
    flight: f64,
    /// What its bytes weigh.
    weight: f64,
    by: By,
}

/// By what layers are priced.
#[derive(Clone, Copy, Debug)]
enum By {
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

/// What is known of candidates in their memory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Room {
    /// What none of them can beat.
    pub(crate) times: Vec<Seconds>,
    /// The same of the first in the leading forms alone: what it is likely to come to.
    pub(crate) likely: Seconds,
    /// What memory is worth there, if that was asked.
    pub(crate) worth: Option<Worth>,
}

/// How far a bound is looked for.
#[derive(Clone, Copy, Debug)]
struct Goal {
    /// Seconds that are enough.
    limit: f64,
    /// Whether it ends where the first prices stay far behind, and with the first family of schedules that may be faster.
    gives_up: bool,
}

/// Least work by what schedules keep.
struct Works {
    /// Where memory is free.
    free: Work,
    /// In the memory that there is, as far as it was asked.
    known: Vec<(FamilyKind, Work)>,
}

impl Works {
    fn of(&self, kind: FamilyKind) -> Work {
        let of = |kind: FamilyKind| self.known.iter().find(|(own, _)| *own == kind).map(|(_, work)| *work);
        // Virtual stages keep no less than whole ones.
        let whole = || of(FamilyKind::WholeStages).filter(|_| kind == FamilyKind::VirtualStages);
        of(kind).or_else(whole).unwrap_or(self.free)
    }
}

/// Micro-batches in flight on every stage, in those of the tables.
struct Flights {
    ascending: Vec<f64>,
    /// The fewest and the most of a stage.
    ends: [f64; 2],
}

impl Flights {
    /// What a byte weighs at both ends, and the weight of all stages; 1 where most are in flight.
    fn weights(&self, a: f64) -> ([f64; 2], f64) {
        let weight = |flight: f64| (self.ends[1] + a) / (flight + a);
        (self.ends.map(weight), self.ascending.iter().map(|&flight| weight(flight)).sum())
    }
}

impl Scope<'_> {
    /// What is known of some candidates on one mesh in their memory, the smallest micro-batch first, as far as it takes to
    /// say that they are slower than a limit: by the tables of a candidate whose micro-batch is a multiple of theirs, and its
    /// bound.
    pub(crate) fn room<'s>(
        &'s self,
        (candidate, bound): (&Candidate, &Bound),
        candidates: &[&Candidate],
        (of, limit, worth): (Forms<'s>, f64, Option<Worth>),
    ) -> Option<Room> {
        if !self.knows_room(candidate) {
            return None;
        }
        let by = |of: Forms<'s>, worth| {
            let tables = self.priced_tables(candidate, bound.covers, of);
            self.room_by((&tables, bound, of), candidates, (limit, worth))
        };
        self.by_forms(by, (bound, candidates), (of, limit, worth))
    }

    /// The leading forms first: where they may be faster than the limit, the others may too, and nothing is known but the bound.
    fn by_forms<'s>(
        &'s self,
        by: impl Fn(Forms<'s>, Option<Worth>) -> Option<Room>,
        (bound, candidates): (&Bound, &[&Candidate]),
        (of, limit, worth): (Forms<'s>, f64, Option<Worth>),
    ) -> Option<Room> {
        let leading = by(Forms::Leading, worth)?;
        if of != Forms::All || self.forms.iter().all(|forms| forms.len() == 1) {
            return Some(leading);
        }
        let times = match leading.times.iter().any(|time| time.0 >= limit) {
            true => by(of, leading.worth)?.times,
            false => candidates.iter().map(|one| self.time_free(one, bound.work)).collect(),
        };
        Some(Room { times, ..leading })
    }

    /// The bound of a candidate, and by the same tables what is known in the memory that there is of it and of smaller
    /// micro-batches on its mesh that divide its own, as far as the bound does not say that they take as long as the limit.
    pub(crate) fn bound_and_rooms<'s>(
        &'s self,
        candidate: &Candidate,
        smaller: &[&Candidate],
        (of, limit, worth): (Forms<'s>, f64, Option<Worth>),
    ) -> Option<(Bound, [Option<Room>; 2])> {
        let mut tables = self.priced_tables(candidate, Covers::default(), of);
        let fastest = self.given_fastest();
        for kind in (0..self.forms.len()).filter(|&kind| self.is_rare(kind)) {
            tables.kinds[kind] = self.asked(&tables.bench, kind, &fastest, of);
        }
        let bound = self.bound_by(&tables.bench, &mut tables.kinds, of)?;
        let bound = Bound { computes_again: true, ..bound };
        tables.given.covers = bound.covers;
        let clock = self.clock(candidate, bound.covers);
        tables.kinds.iter_mut().flatten().for_each(|(_, problem)| problem.set_clock(clock));
        let mut last = worth;
        let rooms = [&[candidate][..], smaller].map(|some| {
            if some.iter().all(|one| self.time_free(one, bound.work).0 >= limit) {
                return None;
            }
            let by = |of: Forms<'s>, worth| self.room_by((&tables, &bound, of), some, (limit, worth));
            let room = self.by_forms(by, (&bound, some), (of, limit, last));
            last = room.as_ref().and_then(|room| room.worth).or(last);
            room
        });
        Some((bound, rooms))
    }

    /// The least time of a candidate whose layers take so long, in whatever schedule; infinite where none is allowed.
    pub(crate) fn time_free(&self, candidate: &Candidate, work: Work) -> Seconds {
        self.with_bubble(candidate, work).unwrap_or(Seconds(f64::INFINITY))
    }

    /// The same where what layers take depends on what schedules keep.
    fn time_in(&self, candidate: &Candidate, works: &Works) -> Seconds {
        let time = |schedule: Schedule| {
            let work = works.of(FamilyKind::of(schedule));
            self.with_share(candidate, work, self.bubble(candidate, schedule))
        };
        self.schedules(candidate)
            .into_iter()
            .map(time)
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .unwrap_or(Seconds(f64::INFINITY))
    }

    /// The least times of some candidates, the smallest micro-batch first: of all in the memory of the smallest, and where
    /// that does not rule them all out, of each by its own lengths and in its own memory, from the largest on, until one is
    /// not ruled out.
    fn room_by<'s>(
        &'s self,
        (tables, bound, of): (&Tables<'s>, &Bound, Forms<'s>),
        candidates: &[&Candidate],
        (limit, worth): (f64, Option<Worth>),
    ) -> Option<Room> {
        let mut ready = self.ready((tables, bound, of), worth);
        let goal = Goal { limit, gives_up: true };
        let all = self.works_in_room((tables, &mut ready), candidates[0], goal)?;
        let mut times: Vec<Seconds> = candidates.iter().map(|one| self.time_in(one, &all)).collect();
        let likely = times[0];
        let open = candidates.iter().zip(&mut times).rev();
        for (one, time) in open.filter(|(_, time)| time.0 < limit) {
            if one.micro_batch == tables.bench.candidate.micro_batch {
                break;
            }
            let Some(base) = self.by_own_lengths((tables, bound), &mut ready, one) else { break };
            *time = time.max(self.time_free(one, base));
            if time.0 < limit
                && let Some(own) = self.works_in_room((tables, &mut ready), one, goal)
            {
                *time = time.max(self.time_in(one, &own));
            }
            if time.0 < limit {
                break;
            }
        }
        Some(Room { times, likely, worth: Some(ready.worth) })
    }

    /// Prices what operators take by themselves as a candidate has it, whose micro-batch divides that of the tables; its least
    /// work where memory is free.
    fn by_own_lengths<'s: 't, 't>(
        &'s self,
        (tables, bound): (&'t Tables<'s>, &Bound),
        ready: &mut Ready<'t>,
        candidate: &Candidate,
    ) -> Option<Work> {
        let clock = self.clock(candidate, tables.given.covers);
        for (kind, hands) in ready.kinds.iter_mut().enumerate() {
            for (hand, (form, problem)) in hands.iter_mut().zip(&tables.kinds[kind]) {
                let layer = &self.forms[kind][*form].layer;
                let sizes = layer.sizes(candidate.micro_batch, self.request.job.sequence);
                hand.shift = Some(problem.shift(&sizes, &tables.bench.prices, clock, &tables.given));
            }
        }
        let p = candidate.n_stages as f64;
        let (mut average, mut slowest): (f64, f64) = (0.0, 0.0);
        for (kind, &count) in self.counts.iter().enumerate() {
            let least = match self.is_rare(kind) {
                true => ready.free[kind],
                false => least_free(&ready.kinds[kind])?,
            };
            average += least * count as f64 / p;
            slowest = slowest.max((count as f64 / p).ceil() * least);
        }
        let free = in_memory(bound.work, average.max(bound.work.average));
        ready.base = Work { slowest: free.slowest.max(slowest), ..free };
        Some(ready.base)
    }

    /// A time that a candidate cannot beat in its memory, looked for until it reaches a limit: by the tables of a candidate
    /// on its mesh with a micro-batch that is a multiple of its own, and its bound. `None` where memory says nothing of it.
    pub fn bound_in_room<'s>(
        &'s self,
        (of_tables, bound): (&Candidate, &Bound),
        candidate: &Candidate,
        (of, limit): (Forms<'s>, Seconds),
    ) -> Option<Seconds> {
        if !self.knows_room(candidate) {
            return None;
        }
        let goal = Goal { limit: limit.0, gives_up: false };
        let tables = self.priced_tables(of_tables, bound.covers, of);
        let mut ready = self.ready((&tables, bound, of), None);
        if candidate.micro_batch < tables.bench.candidate.micro_batch {
            self.by_own_lengths((&tables, bound), &mut ready, candidate)?;
        }
        let works = self.works_in_room((&tables, &mut ready), candidate, goal)?;
        Some(self.time_in(candidate, &works))
    }

    /// Whether memory says anything of a candidate: not where stages stand on several grounds, nor where parameters may be
    /// on hosts, for nobody knows how little devices then hold of states. The integer program would take hours for it.
    pub(crate) fn knows_room(&self, candidate: &Candidate) -> bool {
        self.request.solver == Solver::Structured
            && self.grounds(candidate).settings.len() == 1
            && self.given().parameters == HomeRule::Device
    }

    fn most_frequent(&self) -> usize {
        (0..self.counts.len()).max_by_key(|&kind| self.counts[kind]).unwrap_or(0)
    }

    /// Whether so few layers are of a kind that what memory costs them is asked last.
    fn is_rare(&self, kind: usize) -> bool {
        self.counts[kind] * FREQUENT < self.model().n_layers()
    }

    fn priced_tables<'s>(&'s self, candidate: &'s Candidate, covers: Covers, of: Forms<'s>) -> Tables<'s> {
        let bench = self.bench(candidate);
        let given = Given { covers, ..self.given() };
        let kinds = self.asked_of((&bench, &given), of, |kind| !self.is_rare(kind));
        let in_flight = self.clock(candidate, given.covers).in_flight;
        let on_host = given.kept != HomeRule::Device;
        Tables { bench, given, of, kinds, rare: OnceCell::new(), in_flight, on_host }
    }

    /// Per kind, its forms; nothing of kinds that are not wanted.
    fn asked_of<'s>(
        &'s self,
        (bench, given): (&Bench<'s>, &Given),
        of: Forms<'_>,
        is_wanted: impl Fn(usize) -> bool,
    ) -> Vec<Asked<'s>> {
        let asked = |kind| match is_wanted(kind) {
            true => self.asked(bench, kind, given, of),
            false => Vec::new(),
        };
        (0..self.forms.len()).map(asked).collect()
    }

    /// Forms of rare kinds in the hands of the solver.
    fn rare<'s: 't, 't>(&'s self, (tables, of): (&'t Tables<'s>, Forms<'_>)) -> Vec<Vec<Hand<'t>>> {
        let asked = || self.asked_of((&tables.bench, &tables.given), tables.of, |kind| self.is_rare(kind));
        let kinds = tables.rare.get_or_init(asked);
        kinds.iter().map(|forms| self.in_hand(forms, of)).collect()
    }

    fn in_hand<'t>(&'t self, forms: &'t Asked<'t>, of: Forms<'_>) -> Vec<Hand<'t>> {
        let n_asked = match of {
            Forms::Leading | Forms::Chosen(_) => 1,
            Forms::All => forms.len(),
        };
        let hand = |(_, problem): &'t (usize, _)| Hand { chooser: self.chooser(problem), shift: None };
        forms.iter().take(n_asked).map(hand).collect()
    }

    fn ready<'s: 't, 't>(
        &'s self,
        (tables, bound, of): (&'t Tables<'s>, &Bound, Forms<'t>),
        worth: Option<Worth>,
    ) -> Ready<'t> {
        let choosers = |(kind, forms): (usize, &'t Asked<'t>)| match self.is_rare(kind) {
            true => Vec::new(),
            false => self.in_hand(forms, of),
        };
        let free = bound.layers.iter().map(|layer| match of {
            Forms::Leading | Forms::Chosen(_) => layer.plain,
            Forms::All => layer.least,
        });
        Ready {
            kinds: tables.kinds.iter().enumerate().map(choosers).collect(),
            rare: OnceCell::new(),
            free: free.collect(),
            of,
            base: bound.work,
            worth: worth.unwrap_or(Worth {
                price: FIRST_PRICE * bound.seconds_per_byte,
                a: 1.0,
                parts: [[0.0; 2]; 2],
            }),
        }
    }

    /// Least work of a candidate in its memory, schedule family by family.
    fn works_in_room<'s: 't, 't>(
        &'s self,
        (tables, ready): (&'t Tables<'s>, &mut Ready<'t>),
        candidate: &Candidate,
        goal: Goal,
    ) -> Option<Works> {
        let mut works = Works { free: ready.base, known: Vec::new() };
        for family in self.families(candidate) {
            let work = self.work_in_room((tables, ready), (candidate, &family), goal)?;
            works.known.push((family.kind, work));
            if goal.gives_up && self.with_share(candidate, work, family.bubble).0 < goal.limit {
                break;
            }
        }
        Some(works)
    }

    /// Least work of a candidate in its memory with what a family of schedules keeps, as far as prices of it were tried. What
    /// memory costs rare kinds of layers is asked at the best price alone, and only where the others do not reach the limit by
    /// themselves.
    fn work_in_room<'s: 't, 't>(
        &'s self,
        (tables, ready): (&'t Tables<'s>, &mut Ready<'t>),
        (candidate, family): (&Candidate, &Family),
        Goal { limit, gives_up }: Goal,
    ) -> Option<Work> {
        let time = |work: Work| self.with_share(candidate, work, family.bubble).0;
        let free = ready.base;
        if time(free) >= limit {
            return Some(free);
        }
        let flights = self.flights((candidate, family), tables)?;
        let mut most = free.average;
        let mut tangents = Tangents::default();
        let (mut asked, mut best) = (ready.worth, ready.worth);
        // Most that are too slow are so by what the last were.
        let (tangent, _) = self.tangent((tables, ready), (&flights, asked), Effort::Least)?;
        if tangent.value > most && time(in_memory(free, tangent.value)) >= limit {
            return Some(in_memory(free, tangent.value));
        }
        for round in 0..ROUNDS {
            let (tangent, sum) = self.tangent((tables, ready), (&flights, asked), Effort::Frequent)?;
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
            let (tangent, _) = self.tangent((tables, ready), (&flights, best), Effort::All)?;
            work = in_memory(free, most.max(tangent.value));
        }
        if time(work) < limit {
            let is_enough = |slowest: f64| time(Work { slowest, ..work }) >= limit;
            work.slowest = self.slowest_in_room((tables, ready), &flights, (work.slowest, is_enough))?;
        }
        Some(work)
    }

    /// The bound at a price of memory, per stage, and the layers that make it.
    fn tangent<'s: 't, 't>(
        &'s self,
        (tables, ready): (&'t Tables<'s>, &Ready<'t>),
        (flights, worth): (&Flights, Worth),
        effort: Effort,
    ) -> Option<(Tangent, Priced)> {
        let (weights, all) = flights.weights(worth.a * flights.ends[1]);
        let capacity = tables.bench.setting.capacity * all;
        let sum = self.all_priced((tables, ready), (flights, weights, worth), effort)?;
        let p = flights.ascending.len() as f64;
        let value = (sum.value - worth.price * capacity) / p;
        Some((Tangent { price: worth.price, value, slope: (sum.weighed - capacity) / p }, sum))
    }

    /// Least seconds of the slowest stage for its layers of the most frequent kind, in its memory, if that is more than is
    /// known; looked for until it is enough. Either a stage has more of them than rounding up gives it, with as few
    /// micro-batches in flight as any stage has; or no stage has more, and of those that have as many, one has no fewer in
    /// flight than as many stages have as there must be of those.
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
        let in_flight = |place: u64| flights.ascending.get(place as usize).copied();
        let full = self.stage_of((tables, ready), (most, in_flight(n_full - 1)?), (known, is_enough))?;
        let is_more = |slowest: f64| slowest >= full;
        let over = self.stage_of((tables, ready), (most + 1, in_flight(0)?), (known, is_more))?;
        Some(full.min(over))
    }

    /// Least seconds of a stage with so many layers of the most frequent kind, in its memory, with so many micro-batches in
    /// flight, if that is more than is known; looked for until it is enough.
    fn stage_of(
        &self,
        (tables, ready): (&Tables<'_>, &Ready<'_>),
        (n_layers, flight): (u64, f64),
        (known, is_enough): (f64, impl Fn(f64) -> bool),
    ) -> Option<f64> {
        let (count, capacity) = (n_layers as f64, tables.bench.setting.capacity);
        let (mut most, mut tangents, mut price) = (known, Tangents::default(), ready.worth.price);
        for _ in 0..STAGE_ROUNDS {
            let stage = Stage { flight, weight: 1.0, by: By::Most };
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
        let mut ascending: Vec<f64> = family.in_flight.iter().map(|flight| flight * bytes).collect();
        ascending.sort_by(f64::total_cmp);
        let ends = [*ascending.first()?, *ascending.last()?];
        Some(Flights { ascending, ends })
    }

    /// All layers, each in the form, at the end of the pipeline and by the choice where it costs least; what is not asked as
    /// where memory is free.
    fn all_priced<'s: 't, 't>(
        &'s self,
        (tables, ready): (&'t Tables<'s>, &Ready<'t>),
        (flights, weights, worth): (&Flights, [f64; 2], Worth),
        effort: Effort,
    ) -> Option<Priced> {
        let n_ends = if flights.ends[0] < flights.ends[1] { 2 } else { 1 };
        let stages: Vec<Stage> = (0..n_ends)
            .map(|end| Stage {
                flight: flights.ends[end],
                weight: weights[end],
                by: match effort {
                    Effort::Least => By::One(worth.parts[end]),
                    Effort::Frequent => By::Most,
                    Effort::All => By::Exact,
                },
            })
            .collect();
        let main = self.most_frequent();
        let mut sum = Priced::default();
        for (kind, &count) in self.counts.iter().enumerate() {
            let least = match (self.is_rare(kind), effort) {
                (false, _) => priced(&ready.kinds[kind], tables, (&stages, worth.price))?,
                (true, Effort::Least | Effort::Frequent) => {
                    Priced { value: ready.free[kind], ..Priced::default() }
                }
                (true, Effort::All) => {
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
fn priced(forms: &[Hand<'_>], tables: &Tables<'_>, (stages, price): (&[Stage], f64)) -> Option<Priced> {
    let mut least: Option<Priced> = None;
    let mut parts = [[0.0; 2]; 2];
    let on_stages = forms.iter().enumerate();
    let on_stages = on_stages.flat_map(|form| stages.iter().enumerate().map(move |stage| (form, stage)));
    for ((form, Hand { chooser, shift }), (end, stage)) in on_stages {
        // What the hosts may hold takes no memory of the devices, and at best no time.
        let kept = if tables.on_host { 0.0 } else { stage.flight / tables.in_flight };
        let price = price * stage.weight;
        let question = Question { price, kept: price * kept, shift: shift.as_ref() };
        let mut of_parts = |found: Cheapest| {
            if form == 0 {
                parts[end] = found.parts;
            }
            (found.bound, found.at_bound)
        };
        let (value, choices) = match stage.by {
            By::One(parts) => chooser.bound_at(question, parts)?,
            By::Most => of_parts(chooser.bound_apart(question)?),
            By::Exact => of_parts(chooser.cheapest_apart(question)?),
        };
        if least.is_none_or(|least| value < least.value) {
            let (nodes, edges) = chooser.problem().problem.parts(&choices)?;
            let saved = if tables.on_host { 0.0 } else { edges.memory / tables.in_flight };
            let states = nodes.memory;
            let weighed = (states + stage.flight * saved) * stage.weight;
            least = Some(Priced { value, weighed, states, saved, parts });
        }
    }
    least.map(|least| Priced { parts, ..least })
}

/// Least seconds of a layer in any of its forms where memory is free.
fn least_free(forms: &[Hand<'_>]) -> Option<f64> {
    let of = |Hand { chooser, shift }: &Hand<'_>| {
        let question = Question { shift: shift.as_ref(), ..Question::at(0.0) };
        Some(chooser.bound_apart(question)?.bound)
    };
    forms.iter().filter_map(of).min_by(f64::total_cmp)
}

/// The work of stages whose average takes more in their memory than where memory is free. What of it a step has once is
/// not known: all of what is more.
fn in_memory(free: Work, average: f64) -> Work {
    let more = average - free.average;
    Work { average, slowest: free.slowest.max(average), once: free.once + more }
}
