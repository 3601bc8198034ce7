//! The arrangements of a candidate by what is on its shelves: cut for every schedule, simulated as long as one could be
//! the fastest.

use std::collections::{BTreeMap, BTreeSet};

use ir::schedule::Schedule;
use rayon::prelude::*;

use crate::arrange::{Arranged, Cutting, Failed, Over};
use crate::by_device::Evened;
use crate::candidate::{Candidate, Scope};
use crate::levels::{Chunk, Levels};
use crate::shelf::Shelf;

/// What a cut takes at least is taken at this fraction of itself: its layers count what hides behind their own
/// operators, which a stage hides in larger pieces.
pub(crate) const CUT_SLACK: f64 = 0.97;

/// Times that layers are cut again for what stages overflow.
const MOST_CUTS: usize = 2;

/// A cut for the slowest device is of no interest that saves less than this leaves of a cut for the slowest chunk.
const EVENLY: f64 = 0.999;

/// Chunks of a candidate for a schedule, in other ways to share devices.
struct Cut {
    /// What they take at least.
    least: f64,
    /// Place among all schedules and ends that are tried.
    at: usize,
    order: (Schedule, Cutting),
    cuts: Vec<Vec<Chunk>>,
}

/// What was simulated of a schedule.
struct Simulated {
    cuts: Vec<Vec<Chunk>>,
    /// Whether some of these cuts fit.
    fits: bool,
    /// The first that does, or another for what these overflow.
    fitting: Option<Vec<Chunk>>,
}

/// The first cut that fits, and its arrangement unless it takes no less than what is known; or what the first overflow,
/// if that is why none fit.
type First = Result<(Vec<Chunk>, Option<Arranged>), Option<Over>>;

/// Cuts for as much less memory as others overflow.
type Cuts<'c> = &'c dyn Fn(&Over) -> Vec<Vec<Chunk>>;

/// Arrangements of a candidate so far, by the place of their schedule.
#[derive(Default)]
pub(crate) struct Arrangements {
    /// What takes no less is not simulated.
    limit: f64,
    /// Whether something was not for that.
    pub(crate) beaten: bool,
    /// Whether some schedule takes the limit however it is cut, and so was not.
    pub(crate) passed_over: bool,
    /// At how many prices of memory in turn a schedule fitted.
    fitted: BTreeMap<Schedule, usize>,
    /// Whether prices of memory are those between the first.
    pub(crate) finer: bool,
    /// Whether layers move afterwards, so that some stage may need dearer prices than all fit at.
    pub(crate) shifts: bool,
    /// The fastest; of equal ones that of the first schedule. At finer prices, those that are worth their programs.
    best: Option<(usize, Arranged)>,
    /// What was simulated last, whether some of it fitted, and what did.
    simulated: BTreeMap<usize, Simulated>,
    /// How many layers chunks have where devices work alike.
    evened: Evened,
    /// What those overflow that overflow least.
    pub(crate) over: Option<Over>,
}

impl Arrangements {
    /// None yet, of which those that take a limit are of no interest.
    pub(crate) fn below(limit: f64) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Whether nothing fits so far, not even something slow.
    pub(crate) fn is_none(&self) -> bool {
        self.best.is_none() && !self.beaten
    }

    fn best_time(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |(_, best)| best.step_time().0)
    }

    /// The chunks that fitted at a place.
    fn fitting(&self, at: usize) -> Option<&[Chunk]> {
        self.simulated.get(&at)?.fitting.as_deref()
    }

    /// Levels of the fastest arrangement between which another price of memory could have other choices: the upper
    /// ones.
    pub(crate) fn between(&self, shelves: &[Shelf]) -> BTreeSet<usize> {
        let cuts = self.best.as_ref().and_then(|(at, _)| self.fitting(*at));
        let uppers = cuts.into_iter().flatten().map(|chunk| chunk.price);
        let differ = |level: &usize| {
            let kinds = || shelves.iter().flat_map(|shelf| &shelf.levels);
            *level > 0 && kinds().any(|levels| levels[level - 1] != levels[*level])
        };
        uppers.filter(differ).collect()
    }

    /// Whether a schedule fitted at two prices in turn: a stage mixes layers of those two, and at dearer ones they take
    /// longer.
    fn has_fitted(&self, schedule: Schedule) -> bool {
        !self.finer && !self.shifts && self.fitted.get(&schedule).is_some_and(|times| *times > 1)
    }

    /// At how many prices in turn a schedule fitted so far.
    fn fitted(&mut self, schedule: Schedule) -> &mut usize {
        self.fitted.entry(schedule).or_default()
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
        let schedules = self.schedules(candidate);
        // What cannot be the fastest however it is cut need not be.
        let takes =
            |schedule, limit| self.least_divided_in(candidate, schedule, &levels) * CUT_SLACK >= limit;
        known.passed_over |= schedules.iter().any(|&schedule| takes(schedule, known.limit));
        let least = known.limit.min(known.best_time());
        let is_open = |schedule| !takes(schedule, least) && !known.has_fitted(schedule);
        let orders = schedules.into_iter().flat_map(cuttings).enumerate();
        let orders: Vec<(usize, (Schedule, Cutting))> =
            orders.filter(|(_, (schedule, _))| is_open(*schedule)).collect();
        let none = Over::default();
        let cut_for = |&(_, order): &(usize, (Schedule, Cutting))| {
            self.cuts(candidate, order, (&levels, &none, &known.evened))
        };
        let all_cuts: Vec<Vec<Vec<Chunk>>> = orders.par_iter().with_max_len(1).map(cut_for).collect();
        for ((at, (schedule, cutting)), cuts) in orders.into_iter().zip(all_cuts) {
            if let Some(first) = cuts.first() {
                let least = self.least_time(candidate, schedule, first);
                // Cut for the slowest chunk first: where its devices are as even, there is no other.
                let even = cut.last().filter(|other: &&Cut| other.order.0 == schedule);
                let is_even = even.is_some_and(|other| least > other.least * EVENLY);
                if cutting != Cutting::ByDevice || !is_even {
                    cut.push(Cut { least, at, order: (schedule, cutting), cuts });
                }
            } else if cutting == Cutting::Anywhere {
                *known.fitted(schedule) = 0;
                all_fit = false;
            }
        }
        cut.sort_by(|a, b| a.least.total_cmp(&b.least).then(a.at.cmp(&b.at)));
        for Cut { least, at, order, cuts } in cut {
            let mut fits = true;
            if let Some(known) = known.simulated.get(&at).filter(|known| known.cuts == cuts) {
                fits = known.fits;
            } else if least * CUT_SLACK >= known.limit {
                known.beaten = true;
            } else if least * CUT_SLACK < known.best_time() {
                let mut found = self.arrange_first(candidate, (order.0, &cuts), (&levels, shelves), known);
                fits = found.is_ok();
                if let Err(Some(over)) = &found {
                    let over = over.clone();
                    known.over = known.over.take().into_iter().chain([over.clone()]).reduce(Over::lesser);
                    // Where there are other choices, some that take less memory may make up for what a cut did not see.
                    if levels[0].costs.len() > 1 {
                        found = self.arrange_again(candidate, (order, over), (&levels, shelves), known);
                    }
                }
                let (fitting, found) = match found {
                    Ok((fitting, found)) => (Some(fitting), Some(found)),
                    Err(_) => (None, None),
                };
                known.simulated.insert(at, Simulated { cuts, fits, fitting });
                match found {
                    Some(Some(found)) => known.take(at, found),
                    Some(None) => known.beaten = true,
                    None => {}
                }
            }
            all_fit &= fits;
            if order.1 == Cutting::Anywhere {
                let times = known.fitted(order.0);
                *times = if fits { *times + 1 } else { 0 };
            }
        }
        all_fit
    }

    /// Arranges the first chunks that fit, of those that share devices in other ways.
    fn arrange_first(
        &self,
        candidate: &Candidate,
        (schedule, all): (Schedule, &[Vec<Chunk>]),
        (levels, shelves): (&[Levels], &[Shelf]),
        known: &Arrangements,
    ) -> First {
        let limit = known.best_time().min(known.limit);
        let mut least = None;
        for cuts in all {
            match self.arrange(candidate, (schedule, cuts), (levels, shelves), limit) {
                Ok(found) => return Ok((cuts.clone(), Some(found))),
                Err(Failed::Slower) => return Ok((cuts.clone(), None)),
                Err(Failed::Overflows(over)) => least = least.or(Some(over)),
                Err(Failed::Unfit) => {}
            }
        }
        Err(least)
    }

    /// The same in a cut for so much less memory as others overflow, where that is little.
    fn arrange_again(
        &self,
        candidate: &Candidate,
        (order, over): ((Schedule, Cutting), Over),
        (levels, shelves): (&[Levels], &[Shelf]),
        known: &Arrangements,
    ) -> First {
        let cuts = |over: &Over| self.cuts(candidate, order, (levels, over, &known.evened));
        self.arrange_within(candidate, (order.0, over), (levels, shelves), (known, &cuts))
    }

    /// Arranges the first cuts that fit in as much less memory as others overflow.
    fn arrange_within(
        &self,
        candidate: &Candidate,
        (schedule, mut over): (Schedule, Over),
        (levels, shelves): (&[Levels], &[Shelf]),
        (known, cuts): (&Arrangements, Cuts<'_>),
    ) -> First {
        for _ in 0..MOST_CUTS {
            if !over.is_little(self.capacity) {
                break;
            }
            let cuts = cuts(&over);
            let least = cuts.first().map(|first| self.least_time(candidate, schedule, first));
            if least.is_none_or(|least| least * CUT_SLACK >= known.best_time().min(known.limit)) {
                break;
            }
            match self.arrange_first(candidate, (schedule, &cuts), (levels, shelves), known) {
                Err(Some(more)) => over = over.and(&more),
                found => return found,
            }
        }
        Err(None)
    }

    /// Arranges what is on the shelves where no cut of one chunk after the other fits: all chunks of a device together.
    pub(crate) fn arrange_together(
        &self,
        candidate: &Candidate,
        shelves: &[Shelf],
        known: &mut Arrangements,
    ) {
        let levels = self.levels_on(candidate, shelves);
        for (at, schedule) in self.schedules(candidate).into_iter().enumerate() {
            let cut = |over: &Over| Vec::from_iter(self.cut_together(candidate, schedule, (&levels, over)));
            let on = (schedule, Over::default());
            match self.arrange_within(candidate, on, (&levels, shelves), (known, &cut)) {
                Ok((fitting, Some(found))) => {
                    let simulated = Simulated { cuts: Vec::new(), fits: true, fitting: Some(fitting) };
                    known.simulated.insert(at, simulated);
                    known.take(at, found);
                }
                Ok((_, None)) => known.beaten = true,
                Err(_) => {}
            }
        }
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
