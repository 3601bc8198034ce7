//! How fast a candidate is: choices at rising prices of memory until every schedule has an arrangement that fits.

use std::collections::{BTreeMap, BTreeSet};

use ir::sharding::{Placement, Sharding};
use rayon::prelude::*;

use crate::arrange::{Arranged, fastest};
use crate::arrangements::{Arrangements, CUT_SLACK};
use crate::asking::{Asking, Way, ways};
use crate::bound::Bound;
use crate::candidate::{Candidate, Dropped, Scope};
use crate::chooser::Chooser;
use crate::forms::Forms;
use crate::given::{Given, HomeRule, StorageRule};
use crate::levels::Levels;
use crate::priced_choices::{AskedOfKind, Choosers, Hides, Sum, with_tied};
use crate::shelf::{Bench, Shelf};
use crate::tied::TiedUses;

/// What needs more than this multiple of the memory with its smallest choices is given up at once.
const NEARLY: f64 = 1.25;

/// What one way to count what hides makes slower than the best by more than this, the other does not make the best: of
/// candidates that crowd memory the step became up to 1.09 times as fast by it.
const FAR: f64 = 1.12;

/// The same for another way to choose by what shows of what a step sends once: steps became up to 1.46 times as fast by
/// it.
const TOO_FAR: f64 = 1.5;

/// Parts of the way from covering all of what a step sends once to covering what bounds say: what is sent and computed
/// for as long as each other is chosen by neither.
const BETWEEN: [f64; 2] = [0.25, 0.5];

/// What another way could leave slower than the best by more than this at best is asked in none.
const WORTH_A_WAY: f64 = 1.03;

/// So many times what shows of what a step has once is the most that another way to count it may save: of 1,076
/// candidates that were worked out in all ways, the 175 that would not have come within 1.1 of the best by that came no
/// closer than 1.05.
const SPARED: f64 = 1.5;

/// Where more than this part of a step is what it sends once, ways and shardings of the stream go together: a step of
/// gpt2 became a seventh shorter in another way with a sharding that suits a third.
const SHOWS_MUCH: f64 = 0.1;

/// Prices of memory tried, as multiples of (time of the fastest plan) / (memory of the fastest plan): from free to a
/// price at which memory is all that counts. Between two of them a stage mixes layers of both.
const MEMORY_PRICES: [f64; 7] = [0.0, 0.03, 0.15, 0.6, 3.0, 30.0, DEAREST];

/// Those of them at which layers take least in some candidate: a price is of what all layers hold together, and the
/// dearest lets one need any number of bytes while it runs so that all hold a few fewer.
pub(crate) const DEAR_PRICES: [f64; 3] = [DEAREST, 30.0, 3.0];

/// The last of them.
pub(crate) const DEAREST: f64 = 1000.0;

/// Times that prices of memory between those in use are tried: after three, neighbours are a fifth apart.
pub(crate) const ROUNDS: usize = 3;

/// What is kept for backward counts so much of what it does on the first stage, beside all of it: later stages have
/// fewer micro-batches in flight, and there other choices are worth their memory.
const KEPT: f64 = 0.5;

/// What that is asked of takes no more than so many times what is known.
const FAR_BY_KEPT: f64 = 1.04;

/// The first price above none, as a fraction of the next.
const FIRST: f64 = 0.25;

/// Prices of memory, as multiples like those of menus, at which another sharding of the stream is looked for.
const STREAM_PRICES: [f64; 4] = [0.6, 3.0, 30.0, 1000.0];

impl Scope<'_> {
    /// Works a candidate out for every schedule; the fastest that fits. Where nothing fits, layers pass the stream in
    /// the sharding that suits them when memory is dear.
    ///
    /// # Errors
    /// Why none does.
    pub fn evaluate(
        &self,
        candidate: &Candidate,
        bound: &Bound,
        forms: Forms<'_>,
    ) -> Result<Arranged, Dropped> {
        self.evaluate_below(candidate, bound, Asking { rounds: ROUNDS, ..Asking::of(forms) })
    }

    /// The same, with one storage for all parameters.
    ///
    /// # Errors
    /// Why none does.
    pub fn evaluate_stored(
        &self,
        candidate: &Candidate,
        bound: &Bound,
        (forms, storage): (Forms<'_>, StorageRule),
    ) -> Result<Arranged, Dropped> {
        let asked = Asking { way: Way::stored(storage), rounds: ROUNDS, ..Asking::of(forms) };
        self.evaluate_below(candidate, bound, asked)
    }

    /// The same, given up where its layers alone take a limit, once they are on their stages.
    ///
    /// # Errors
    /// Why none fits, or that none is as fast.
    pub(crate) fn evaluate_below(
        &self,
        candidate: &Candidate,
        bound: &Bound,
        asked: Asking<'_>,
    ) -> Result<Arranged, Dropped> {
        let grounds = self.grounds(candidate);
        self.evaluate_at(&self.benches(candidate, &grounds), bound, asked)
    }

    /// The same, where prices of the candidate are at hand.
    pub(crate) fn evaluate_at(
        &self,
        benches: &[Bench<'_>],
        bound: &Bound,
        asked: Asking<'_>,
    ) -> Result<Arranged, Dropped> {
        if let Some(stream) = asked.way.stream {
            return self.evaluate_on(benches, (bound, &on_benches(stream, benches)), asked);
        }
        let found = self.evaluate_by_layers(benches, bound, asked);
        let Some(stream) = self.stream_of_stages(&benches[0], bound) else { return found };
        let limit = found.as_ref().map_or(asked.limit, |found| found.step_time().0.min(asked.limit));
        let asked = Asking { limit, ..asked };
        let other = self.evaluate_on(benches, (bound, &on_benches(stream, benches)), asked).ok();
        match (found, other) {
            (Ok(found), Some(other)) if found.step_time() <= other.step_time() => Ok(found),
            (_, Some(other)) => Ok(other),
            (found, None) => found,
        }
    }

    /// The same with the sharding of the stream that suits layers, whatever stages send.
    fn evaluate_by_layers(
        &self,
        benches: &[Bench<'_>],
        bound: &Bound,
        asked: Asking<'_>,
    ) -> Result<Arranged, Dropped> {
        let alike = |stream: Sharding| on_benches(stream, benches);
        // On every ground the sharding that suits it, converted where they meet; or one for all.
        let own: Vec<Sharding> = (0..benches.len()).map(|ground| bound.on(ground).stream).collect();
        let apart =
            (own != alike(bound.stream)).then(|| self.evaluate_on(benches, (bound, &own), asked).ok());
        let together = self.evaluate_on(benches, (bound, &alike(bound.stream)), asked);
        let dropped = match (apart.flatten(), together) {
            (Some(apart), Ok(together)) if together.step_time() <= apart.step_time() => return Ok(together),
            (Some(apart), _) => return Ok(apart),
            (None, Err(dropped)) if self.nearly_fits(&dropped) => dropped,
            (None, found) => return found,
        };
        self.other_streams(benches, bound, asked).ok_or(dropped)
    }

    /// The same, or the fastest of more ways where one of them is faster.
    ///
    /// # Errors
    /// As above.
    pub(crate) fn evaluate_ways(
        &self,
        candidate: &Candidate,
        bound: &Bound,
        asked: Asking<'_>,
    ) -> Result<(Arranged, Way), Dropped> {
        let found = self.evaluate_below(candidate, bound, asked)?;
        Ok(self.in_more_ways(&found, bound, asked).unwrap_or((found, asked.way)))
    }

    /// What was found for a candidate, in other ways where what a step sends once shows: choices are made by what shows
    /// of it at most or at least, and of a stage it is something between. Nothing where that is not known to be faster.
    pub(crate) fn in_more_ways(
        &self,
        found: &Arranged,
        bound: &Bound,
        asked: Asking<'_>,
    ) -> Option<(Arranged, Way)> {
        if !self.has_more_ways(found, bound, asked.known) {
            return None;
        }
        let covers = bound.other_covers.iter().copied().chain(bound.covers_between(&BETWEEN));
        let covered = covers.map(|covers| Way { covers: Some(covers), ..asked.way });
        let limit = found.step_time().0;
        let ways = ways(self.pins()).skip(1).chain(covered);
        let each: Vec<Asking<'_>> = ways.map(|way| Asking { way, limit, ..asked }).collect();
        let mut best: Option<(Arranged, Way)> = None;
        for (way, other) in self.evaluate_in(&found.candidate, bound, &each) {
            let known = best.as_ref().map_or(found, |(best, _)| best);
            if let Some(other) = other.filter(|other| other.is_worth_it(known)) {
                best = Some((other, way));
            }
        }
        best
    }

    /// Whether another way could bring what was found for a candidate near what is known.
    pub(crate) fn has_more_ways(&self, found: &Arranged, bound: &Bound, known: f64) -> bool {
        // What hosts may hold is a choice of its own, at prices of its own.
        let on_devices = self.given().parameters == HomeRule::Device;
        let (time, once) = (found.step_time().0, found.step.parts.once().0);
        let is_far = time > TOO_FAR * known || time - SPARED * once > WORTH_A_WAY * known;
        on_devices && !bound.other_covers.is_empty() && !is_far
    }

    /// Works a candidate out in several ways; nothing for one in which it does not fit, or takes its limit.
    pub(crate) fn evaluate_in(
        &self,
        candidate: &Candidate,
        bound: &Bound,
        each: &[Asking<'_>],
    ) -> Vec<(Way, Option<Arranged>)> {
        let grounds = self.grounds(candidate);
        self.evaluate_each(&self.benches(candidate, &grounds), bound, each)
    }

    /// The same, where prices of the candidate are at hand: what conversions take is the same in every way. What suits
    /// layers in one of the ways is tried in the fastest of them, or in all where much of what a step sends once shows.
    fn evaluate_each(
        &self,
        benches: &[Bench<'_>],
        bound: &Bound,
        each: &[Asking<'_>],
    ) -> Vec<(Way, Option<Arranged>)> {
        let one = |&asked: &Asking<'_>| (asked.way, self.evaluate_at(benches, bound, asked).ok());
        let mut found: Vec<(Way, Option<Arranged>)> = each.par_iter().with_max_len(1).map(one).collect();
        let time = |at: &usize| found[*at].1.as_ref().map_or(f64::INFINITY, |found| found.step_time().0);
        let Some(fastest) = (0..each.len()).min_by(|a, b| time(a).total_cmp(&time(b))) else { return found };
        let shows = |found: &Arranged| found.step.parts.once() > found.step_time() * SHOWS_MUCH;
        let in_all = time(&fastest).is_infinite() || found.iter().filter_map(|one| one.1.as_ref()).any(shows);
        let of_way = |asked: &Asking<'_>| self.stream_of_way(&benches[0], bound, asked.way);
        let streams: BTreeSet<Sharding> =
            each.par_iter().with_max_len(1).filter_map(of_way).collect::<Vec<_>>().into_iter().collect();
        let with = |stream: Sharding| {
            let ways = if in_all { each } else { &each[fastest..=fastest] };
            ways.iter().map(move |&asked| Asking { way: Way { stream: Some(stream), ..asked.way }, ..asked })
        };
        let more: Vec<Asking<'_>> = streams.into_iter().flat_map(with).collect();
        found.par_extend(more.par_iter().with_max_len(1).map(one));
        found
    }

    fn other_streams(&self, benches: &[Bench<'_>], bound: &Bound, asked: Asking<'_>) -> Option<Arranged> {
        let streams = self.streams_at(&benches[0], bound).into_iter();
        let of = |stream| self.evaluate_on(benches, (bound, &on_benches(stream, benches)), asked).ok();
        fastest(streams.filter_map(of))
    }

    /// The sharding of the stream that suits layers that have something in common, if that is another than the bound's.
    fn stream_of_way(&self, bench: &Bench<'_>, bound: &Bound, way: Way) -> Option<Sharding> {
        if way == Way::default() {
            return None;
        }
        let kind = self.most_frequent();
        let given = on_ground(bench.setting.ground, (bound, None), way, self.given_fastest());
        let asked = self.asked(bench, kind, &given, Forms::Leading);
        let (_, problem) = asked.first()?;
        self.passed_at(0.0, kind, &self.chooser(problem)).filter(|stream| *stream != bound.stream)
    }

    /// The sharding of the stream beside a layer by the choices that are the cheapest at a price of memory.
    pub(crate) fn passed_at(&self, price: f64, kind: usize, chooser: &Chooser<'_>) -> Option<Sharding> {
        let choices = chooser.cheapest(price)?.choices;
        Some(self.passes(kind, &chooser.problem().choice(&choices)))
    }

    /// Whether another way to run the same layers might fit.
    pub(crate) fn nearly_fits(&self, dropped: &Dropped) -> bool {
        matches!(dropped, Dropped::Memory { needed, capacity, .. } if *needed <= NEARLY * capacity)
    }

    /// Shardings of the stream beside the bound's that suit some kind of layer at a price of memory.
    fn streams_at(&self, bench: &Bench<'_>, bound: &Bound) -> Vec<Sharding> {
        let mut streams = vec![bound.stream];
        for kind in 0..self.forms.len() {
            let given = Given { covers: bound.covers, ..self.given() };
            let asked = self.asked(bench, kind, &given, Forms::Leading);
            let Some((_, problem)) = asked.first() else { continue };
            let chooser = self.chooser(problem);
            let unit = bound.on(0).seconds_per_byte;
            let at = |multiple: &f64| self.passed_at(multiple * unit, kind, &chooser);
            for stream in STREAM_PRICES.iter().filter_map(at) {
                if !streams.contains(&stream) {
                    streams.push(stream);
                }
            }
        }
        streams.split_off(1)
    }

    /// Works a candidate out with choices for every ground, whose layers pass the stream in the sharding given for it.
    fn evaluate_on(
        &self,
        benches: &[Bench<'_>],
        (bound, streams): (&Bound, &[Sharding]),
        asked: Asking<'_>,
    ) -> Result<Arranged, Dropped> {
        let first = on_ground(0, (bound, Some(streams[0])), asked.way, self.given_fastest());
        // What is tied may stand on different grounds: one use for all of them.
        let mut found = Err(Dropped::NoStrategy);
        for tying in self.tyings(benches[0].candidate, bound.time) {
            let Some(uses) = self.tied_uses(&benches[0], &first, tying) else { continue };
            found = self.evaluate_uses((benches, streams), (bound, &uses), asked);
            if !matches!(found, Err(Dropped::NoStrategy)) {
                break;
            }
        }
        found
    }

    /// The fastest with uses and storages for what is tied.
    fn evaluate_uses(
        &self,
        on: (&[Bench<'_>], &[Sharding]),
        (bound, uses): (&Bound, &[BTreeMap<usize, TiedUses>]),
        asked: Asking<'_>,
    ) -> Result<Arranged, Dropped> {
        let (mut best, mut dropped): (Option<Arranged>, _) = (None, Dropped::NoStrategy);
        for tied in uses {
            let limit = best.as_ref().map_or(asked.limit, |best| best.step_time().0);
            match self.evaluate_tied(on, (bound, tied), Asking { limit, ..asked }) {
                Ok((found, n_levels)) => {
                    best = fastest(best.into_iter().chain([found]));
                    // Cut gradients save memory and nothing else.
                    if n_levels == 1 {
                        break;
                    }
                }
                Err(failed) if !matches!(dropped, Dropped::Slower) => dropped = failed,
                Err(_) => {}
            }
        }
        best.ok_or(dropped)
    }

    /// The same with one use and storage of each; and at how many prices of memory.
    fn evaluate_tied(
        &self,
        (benches, streams): (&[Bench<'_>], &[Sharding]),
        (bound, tied): (&Bound, &BTreeMap<usize, TiedUses>),
        asked: Asking<'_>,
    ) -> Result<(Arranged, usize), Dropped> {
        let Asking { forms, limit, known: best_known, way, shifts, .. } = asked;
        let candidate = benches[0].candidate;
        let mut shelves: Vec<Shelf> = benches.iter().map(|_| Shelf::new(self.forms.len())).collect();
        let base =
            |ground: usize| on_ground(ground, (bound, Some(streams[ground])), way, self.given_fastest());
        // Most candidates fit with the fastest choices or nearly so: dearer memory is asked about only when not.
        for (ground, (bench, shelf)) in benches.iter().zip(&mut shelves).enumerate() {
            let given = (&base(ground), tied);
            self.fastest_level(shelf, (bench, bound), given, forms).ok_or(Dropped::NoStrategy)?;
        }
        let mut known = Arrangements::below(limit);
        // Where layers move, some stage may need choices that take less memory.
        if self.arrange_all(candidate, &shelves, &mut known) && (!shifts || self.has_free_memory()) {
            return self
                .moved(candidate, known, (&shelves, shifts))
                .map(|best| (best, 1))
                .ok_or(Dropped::Slower);
        }
        if self.least_divided(candidate, &self.levels_on(candidate, &shelves)) * CUT_SLACK >= limit {
            return Err(Dropped::Slower);
        }
        let base = |ground: usize| on_ground(ground, (bound, Some(streams[ground])), way, self.given());
        let problems: Vec<Vec<AskedOfKind<'_>>> = benches
            .iter()
            .enumerate()
            .map(|(ground, bench)| self.all_asked(bench, (&base(ground), tied), forms))
            .collect();
        let ready: Vec<Vec<Choosers<'_>>> = problems
            .iter()
            .map(|kinds| kinds.iter().map(|[own, on_drives]| self.choosers(own, on_drives)).collect())
            .collect();
        if let Some(dropped) = self.least_overflow((benches, &mut shelves), bound, &ready)? {
            return Err(dropped);
        }
        let mut best: Result<(Arranged, usize), Dropped> = Err(Dropped::NoStrategy);
        for (hides, kept, far) in sums(candidate) {
            let is_far = match &best {
                Ok((best, _)) => best.step_time().0 > far * best_known,
                Err(Dropped::Slower) => limit > far * best_known,
                Err(_) => false,
            };
            if is_far {
                break;
            }
            let limit = best.as_ref().map_or(limit, |(best, _)| best.step_time().0);
            let found = self.at_prices(
                (benches, shelves.clone()),
                bound,
                (&ready, hides, kept),
                Asking { limit, ..asked },
            );
            best = match (best, found) {
                (Ok(best), Ok(found)) => Ok(if found.0.is_worth_it(&best.0) { found } else { best }),
                (Err(Dropped::NoStrategy | Dropped::Slower), found) => found,
                (best, Err(_)) => best,
                (Err(_), found) => found,
            };
        }
        best
    }

    /// The fastest by choices at rising prices of memory, behind the first that is on the shelves; and at how many
    /// prices.
    fn at_prices<'s>(
        &'s self,
        (benches, mut shelves): (&[Bench<'s>], Vec<Shelf>),
        bound: &Bound,
        (ready, hides, kept): (&[Vec<Choosers<'_>>], Hides, f64),
        Asking { limit, rounds, shifts, .. }: Asking<'_>,
    ) -> Result<(Arranged, usize), Dropped> {
        let candidate = benches[0].candidate;
        let mut known = Arrangements::below(limit);
        known.shifts = shifts;
        let mut multiples = vec![MEMORY_PRICES[0]];
        let add_level = |shelves: &mut [Shelf], multiple: f64, level: usize| {
            for (ground, (bench, shelf)) in benches.iter().zip(shelves).enumerate() {
                let price = multiple * bound.on(ground).seconds_per_byte;
                for (kind, ready) in ready[ground].iter().enumerate() {
                    self.add((shelf, level), bench, (kind, ready), Sum { price, kept, hides })?;
                }
            }
            Some(())
        };
        let mut fitted = false;
        for &multiple in &MEMORY_PRICES[1..] {
            add_level(&mut shelves, multiple, multiples.len()).ok_or(Dropped::NoStrategy)?;
            multiples.push(multiple);
            let fits = self.arrange_all(candidate, &shelves, &mut known);
            if fits && fitted && !shifts {
                break;
            }
            fitted = fits;
        }
        known.finer = true;
        for _ in 0..rounds {
            let between = known.between(&shelves);
            if between.is_empty() {
                break;
            }
            for level in between.into_iter().rev() {
                let (low, high) = (multiples[level - 1], multiples[level]);
                let multiple = if low > 0.0 { (low * high).sqrt() } else { high * FIRST };
                add_level(&mut shelves, multiple, level).ok_or(Dropped::NoStrategy)?;
                multiples.insert(level, multiple);
            }
            self.arrange_all(candidate, &shelves, &mut known);
        }
        if known.is_none() {
            self.arrange_together(candidate, &shelves, &mut known);
        }
        let (beaten, over) = (known.beaten || known.passed_over, known.over.take());
        let best = self.moved(candidate, known, (&shelves, shifts));
        best.map(|best| (best, multiples.len())).ok_or_else(|| match beaten {
            true => Dropped::Slower,
            false => self.overflow_of((candidate, over.as_ref()), &self.levels_on(candidate, &shelves)),
        })
    }

    /// The first level: the fastest choices, those of the bound where it made them under the same conditions.
    fn fastest_level(
        &self,
        shelf: &mut Shelf,
        (bench, bound): (&Bench<'_>, &Bound),
        (base, tied): (&Given, &BTreeMap<usize, TiedUses>),
        forms: Forms<'_>,
    ) -> Option<()> {
        for kind in 0..self.forms.len() {
            let is_asked = |form: usize| match forms {
                Forms::Leading => true,
                Forms::Chosen(chosen) => chosen[kind] == form,
                Forms::All => self.forms[kind].len() == 1,
            };
            let fastest = self.given_fastest();
            let as_asked = (base.storage, base.recompute) == (fastest.storage, fastest.recompute)
                && base.covers == bound.on(bench.setting.ground).covers
                && ![base.kept, base.parameters].contains(&HomeRule::Host);
            let known = bound.on(bench.setting.ground).fastest.get(kind).filter(|(form, choice)| {
                let passes = Some(self.passes(kind, choice)) == base.stream;
                is_asked(*form) && as_asked && !tied.contains_key(&kind) && passes
            });
            match known {
                Some((form, choice)) => self.put((shelf, 0), bench, (kind, *form), choice.clone())?,
                None => {
                    let asked = self.asked(bench, kind, &with_tied(base, tied, kind), forms);
                    self.add(
                        (shelf, 0),
                        bench,
                        (kind, &self.choosers(&asked, &[])),
                        Sum::at(0.0, Hides::BehindLayer),
                    )?;
                }
            }
        }
        Some(())
    }

    pub(crate) fn levels_on(&self, candidate: &Candidate, shelves: &[Shelf]) -> Vec<Levels> {
        shelves.iter().map(|shelf| self.levels(candidate, shelf)).collect()
    }
}

/// The sums that choices go by one after the other, each with what kept bytes count in it and how far behind what is
/// known it is in vain.
fn sums(candidate: &Candidate) -> impl Iterator<Item = (Hides, f64, f64)> {
    let all = [(Hides::BehindOperator, 1.0, FAR), (Hides::BehindLayer, 1.0, FAR)];
    let later = (candidate.n_stages > 1).then_some((Hides::BehindOperator, KEPT, FAR_BY_KEPT));
    all.into_iter().chain(later)
}

/// One sharding of the stream on the meshes of all grounds: nothing is cut along an axis of one device.
fn on_benches(stream: Sharding, benches: &[Bench<'_>]) -> Vec<Sharding> {
    let on = |bench: &Bench<'_>| {
        let mesh = bench.prices.mesh();
        let single = mesh.axis_ids().filter(|&axis| mesh.size(axis) == 1);
        single.fold(stream, |stream, axis| stream.with(axis, Placement::Replicate))
    };
    benches.iter().map(on).collect()
}

/// What is given on a ground, with a sharding of the stream, if one is, and what all parameters and layers keep to.
pub(crate) fn on_ground(
    ground: usize,
    (bound, stream): (&Bound, Option<Sharding>),
    way: Way,
    given: Given,
) -> Given {
    Given {
        stream,
        storage: way.storage.unwrap_or(given.storage),
        recompute: way.recompute.unwrap_or(given.recompute),
        covers: way.covers.unwrap_or(bound.on(ground).covers),
        ..given
    }
}
