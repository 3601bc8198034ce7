//! The arrangements of a candidate by what is on its shelves: cut for every schedule, simulated as long as one could be the fastest.

use std::collections::{BTreeMap, BTreeSet};

use ir::schedule::Schedule;
use rayon::prelude::*;

use crate::arrange::{Arranged, Cutting, Failed};
use crate::candidate::{Candidate, Scope};
use crate::levels::{Chunk, Levels};
use crate::shelf::Shelf;

/// What a cut takes at least is taken at this fraction of itself: its layers count what hides behind their own operators,
/// which a stage hides in larger pieces.
pub(crate) const CUT_SLACK: f64 = 0.97;

/// A cut for the slowest device is of no interest that saves less than this leaves of a cut for the slowest chunk.
const EVENLY: f64 = 0.999;

/// Chunks of a candidate for a schedule, in other ways to share devices.
struct Cut {
    /// What they take at least.
    least: f64,
    /// Place among all schedules and ends that are tried.
    at: usize,
    schedule: Schedule,
    cuts: Vec<Vec<Chunk>>,
}

/// Arrangements of a candidate so far, by the place of their schedule.
#[derive(Default)]
pub(crate) struct Arrangements {
    /// What takes no less is not simulated.
    limit: f64,
    /// Whether something was not for that.
    pub(crate) beaten: bool,
    /// Whether prices of memory are those between the first.
    pub(crate) finer: bool,
    /// The fastest; of equal ones that of the first schedule. At finer prices, those that are worth their programs.
    best: Option<(usize, Arranged)>,
    /// What was simulated last, and which of it was the first that fitted.
    simulated: BTreeMap<usize, (Vec<Vec<Chunk>>, Option<usize>)>,
}

impl Arrangements {
    /// None yet, of which those that take a limit are of no interest.
    pub(crate) fn below(limit: f64) -> Self {
        Self { limit, ..Self::default() }
    }

    fn best_time(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |(_, best)| best.step_time().0)
    }

    /// The chunks that fitted at a place.
    fn fitting(&self, at: usize) -> Option<&[Chunk]> {
        let (cuts, fitting) = self.simulated.get(&at)?;
        Some(&cuts[(*fitting)?])
    }

    /// Levels of the fastest arrangement between which another price of memory could have other choices: the upper ones.
    pub(crate) fn between(&self, shelves: &[Shelf]) -> BTreeSet<usize> {
        let cuts = self.best.as_ref().and_then(|(at, _)| self.fitting(*at));
        let uppers = cuts.into_iter().flatten().map(|chunk| chunk.price);
        let differ = |level: &usize| {
            let kinds = || shelves.iter().flat_map(|shelf| &shelf.levels);
            *level > 0 && kinds().any(|levels| levels[level - 1] != levels[*level])
        };
        uppers.filter(differ).collect()
    }

    fn take(&mut self, at: usize, found: Arranged) {
        let is_better = |(known_at, known): &(usize, Arranged)| {
            let order = found.step_time().0.total_cmp(&known.step_time().0).then(at.cmp(known_at));
            if self.finer { found.is_worth_it(known) } else { order.is_lt() }
        };
        if self.best.as_ref().is_none_or(is_better) {
            self.best = Some((at, found));
        }
    }
}

impl Scope<'_> {
    /// Arranges what is on the shelves in every schedule; says whether all had an arrangement.
    ///
    /// Schedules are simulated in the order of what they take at least, until none left can be faster.
    pub(crate) fn arrange_all(
        &self,
        candidate: &Candidate,
        shelves: &[Shelf],
        known: &mut Arrangements,
    ) -> bool {
        let levels = self.levels_on(candidate, shelves);
        let mut all_fit = true;
        let mut cut: Vec<Cut> = Vec::new();
        let cuttings = |schedule| self.cuttings(candidate, schedule).iter().map(move |&own| (schedule, own));
        let orders: Vec<(Schedule, Cutting)> =
            self.schedules(candidate).into_iter().flat_map(cuttings).collect();
        let cut_for = |&order: &(Schedule, Cutting)| self.cuts(candidate, order, &levels);
        let all_cuts: Vec<Vec<Vec<Chunk>>> = orders.par_iter().with_max_len(1).map(cut_for).collect();
        for ((at, (schedule, cutting)), cuts) in orders.into_iter().enumerate().zip(all_cuts) {
            match cuts.first() {
                Some(first) => {
                    let least = self.least_time(candidate, schedule, first);
                    // Cut for the slowest chunk first: where its devices are as even, there is no other.
                    let even = cut.last().filter(|other: &&Cut| other.schedule == schedule);
                    let is_even = even.is_some_and(|other| least > other.least * EVENLY);
                    if cutting != Cutting::ByDevice || !is_even {
                        cut.push(Cut { least, at, schedule, cuts });
                    }
                }
                None => all_fit &= cutting != Cutting::Anywhere,
            }
        }
        cut.sort_by(|a, b| a.least.total_cmp(&b.least).then(a.at.cmp(&b.at)));
        for Cut { least, at, schedule, cuts } in cut {
            if let Some((_, fitting)) = known.simulated.get(&at).filter(|(own, _)| *own == cuts) {
                all_fit &= fitting.is_some();
            } else if least * CUT_SLACK >= known.limit {
                known.beaten = true;
            } else if least * CUT_SLACK < known.best_time() {
                let found = self.arrange_first(candidate, (schedule, &cuts), (&levels, shelves), known);
                let fitting = found.as_ref().map(|(place, _)| *place);
                known.simulated.insert(at, (cuts, fitting));
                all_fit &= fitting.is_some();
                match found {
                    Some((_, Some(found))) => known.take(at, found),
                    Some((_, None)) => known.beaten = true,
                    None => {}
                }
            }
        }
        all_fit
    }

    /// Arranges the first chunks that fit, of those that share devices in other ways: which they are, and nothing of them where they take
    /// no less than what is known.
    fn arrange_first(
        &self,
        candidate: &Candidate,
        (schedule, all): (Schedule, &[Vec<Chunk>]),
        (levels, shelves): (&[Levels], &[Shelf]),
        known: &Arrangements,
    ) -> Option<(usize, Option<Arranged>)> {
        let limit = known.best_time().min(known.limit);
        all.iter().enumerate().find_map(|(place, cuts)| {
            match self.arrange(candidate, (schedule, cuts), (levels, shelves), limit) {
                Ok(found) => Some((place, Some(found))),
                Err(Failed::Slower) => Some((place, None)),
                Err(Failed::Unfit) => None,
            }
        })
    }

    /// The best of some arrangements, where layers have moved between its stages if they are to.
    pub(crate) fn moved(
        &self,
        candidate: &Candidate,
        known: Arrangements,
        (shelves, shifts): (&[Shelf], bool),
    ) -> Option<Arranged> {
        let fitting = known.best.as_ref().and_then(|(at, _)| known.fitting(*at)).filter(|_| shifts);
        let fitting = fitting.map(<[Chunk]>::to_vec);
        known.best.map(|(_, best)| match fitting {
            Some(chunks) => self.shifted(best, &chunks, (&self.levels_on(candidate, shelves), shelves)),
            None => best,
        })
    }
}
