//! How fast a candidate could be in the memory that there is: its layers where every byte has a price.
//!
//! ```text
//! least T such that for every stage s:  sum_x n(s, x) t(x) <= T,  sum_x n(s, x) (state(x) + flight(s) saved(x)) <= C
//!                   for every kind k:   sum of n(s, x) over stages and choices of k = layers of k
//! ```
//! with any choice x for any fraction of a layer on any stage. The bound is a value of the dual of this linear program.
//! Memory on stage s has a price in proportion to `1 / (flight(s) + a)`, so that a layer costs
//! `min_x t(x) + price (state(x) + flight(s) saved(x)) / (flight(s) + a)` there: monotone in the flight, so that the
//! least over the stages is at one of the ends of the pipeline. No price and no `a` make a bound too high. What a stage
//! has once for layers whose parameters are gathered, or whose gradients something stands for, is shared by the most
//! layers that a stage has where they are as even as can be. Left out are other buffers and what an operator needs
//! while it runs. Where that is not enough, layers of the most frequent kind are counted whole, `L` of them on `p`
//! stages, `n = ceil(L / p)`: some stage has more than `n`, or at least `L - p (n - 1)` stages have `n`, and of these
//! one has no fewer micro-batches in flight than the fewest of so many stages.
//!
//! The leading form of every kind is priced first: where it is faster than what is asked about, the least over all
//! forms is too. The tables of a micro-batch stand for those that divide it too: their conversions take no less, they
//! keep less in proportion, and what operators take by themselves is priced anew.

mod balance;
mod dual;
mod grounds;
mod hosts;
mod tables;

use ir::units::Seconds;

use crate::bound::{Bound, Work};
use crate::candidate::{Candidate, Scope};
use crate::clock::Covers;
use crate::forms::Forms;
use crate::known_rooms::{WorkInRoom, most_work};
use crate::request::Solver;
use crate::schedules::{Family, FamilyKind};
use tables::{Ready, Tables};

/// What memory is worth, as far as it was found: what is asked about next starts there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Worth {
    /// Seconds for a byte of every stage.
    price: f64,
    /// Micro-batches in flight that states count as, in the most of a stage.
    a: f64,
    /// At both ends of the pipeline, the parts of what forward and backward send for longer than they compute, by which
    /// a layer costs most.
    parts: [[f64; 2]; 2],
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
    /// Least work of each of them, as far as it was asked.
    works: Vec<Vec<WorkInRoom>>,
}

/// Which schedules are bounded together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Together {
    /// Those of a family, as if one had the fewest in flight and the smallest bubble of all.
    Family,
    /// None.
    Schedule,
}

/// How far a bound is looked for.
#[derive(Clone, Copy, Debug)]
struct Goal {
    /// Seconds that are enough.
    limit: f64,
    /// How well it is looked for.
    effort: Effort,
}

/// How well it is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// It ends where the first prices stay far behind, and with the first family of schedules that may be faster.
    GivesUp,
    /// At a few prices, by bounds of what layers cost.
    Quick,
    /// At more, by what they cost.
    Thorough,
}

/// Least work of a candidate in its memory.
#[derive(Clone, Copy, Debug)]
struct InRoom {
    /// With embedding and head where the schedules that were asked about have them.
    work: Work,
    /// Wherever these stand.
    anywhere: Work,
}

impl InRoom {
    /// That of which where they stand says nothing.
    fn anywhere(work: Work) -> Self {
        Self { work, anywhere: work }
    }
}

/// Least work by what schedules keep.
struct Works {
    /// Where memory is free.
    free: Work,
    /// In the memory that there is, as far as it was asked.
    known: Vec<(FamilyKind, Work)>,
    /// The same of all schedules that hold as much, where it is more than where memory is free.
    kept: Vec<WorkInRoom>,
}

impl Works {
    fn of(&self, kind: FamilyKind) -> Work {
        let of = |kind: FamilyKind| self.known.iter().find(|(own, _)| *own == kind).map(|(_, known)| *known);
        // Virtual stages keep no less than whole ones.
        let whole = || of(FamilyKind::WholeStages).filter(|_| kind == FamilyKind::VirtualStages);
        of(kind).or_else(whole).unwrap_or(self.free)
    }
}

impl Scope<'_> {
    /// What is known of some candidates on one mesh in their memory, the smallest micro-batch first, as far as it takes
    /// to say that they are slower than a limit: by the tables of a candidate whose micro-batch is a multiple of
    /// theirs, and its bound.
    pub(crate) fn room<'s>(
        &'s self,
        (candidate, bound): (&Candidate, &Bound),
        candidates: &[&Candidate],
        (of, limit, worth): (Forms<'s>, f64, Option<Worth>),
    ) -> Option<Room> {
        if !self.knows_room(candidate) {
            // On several grounds the tables of a candidate stand for no other.
            let is_alone = candidates.len() == 1 && candidates[0] == candidate;
            if !is_alone {
                return None;
            }
            let by = |of: Forms<'s>, _| {
                let time = self.bound_on_grounds((candidate, bound), (of, limit))?;
                Some(Room { times: vec![time], likely: time, worth: None, works: Vec::new() })
            };
            return self.by_forms(by, (bound, candidates), (of, limit, worth));
        }
        let by = |of: Forms<'s>, worth| {
            let tables = self.priced_tables(candidate, bound.covers, of);
            self.room_by((&tables, bound, of), candidates, (limit, worth))
        };
        self.by_forms(by, (bound, candidates), (of, limit, worth))
    }

    /// Keeps what is known of candidates in their memory for searches of other schedules.
    fn keep_works(&self, candidates: &[&Candidate], room: &Room) {
        for (candidate, works) in candidates.iter().zip(&room.works) {
            self.rooms.keep(candidate, works);
        }
    }

    /// What a candidate cannot beat in its memory, by what was found of it in schedules that hold less; nothing where
    /// that says nothing.
    pub(crate) fn time_in_known_room(&self, candidate: &Candidate) -> Option<Seconds> {
        let known = self.rooms.of(candidate)?;
        let of_family = |family: &Family| {
            let work = most_work(&known, candidate, &family.in_flight)?;
            Some(self.in_family(candidate, work, family))
        };
        let times = self.families(candidate).iter().map(of_family).collect::<Option<Vec<Seconds>>>()?;
        times.into_iter().reduce(Seconds::min)
    }

    /// The leading forms first: where they may be faster than the limit, the others may too, and nothing is known but
    /// the bound.
    fn by_forms<'s>(
        &'s self,
        by: impl Fn(Forms<'s>, Option<Worth>) -> Option<Room>,
        (bound, candidates): (&Bound, &[&Candidate]),
        (of, limit, worth): (Forms<'s>, f64, Option<Worth>),
    ) -> Option<Room> {
        let leading = by(Forms::Leading, worth)?;
        if of != Forms::All || self.forms.iter().all(|forms| forms.len() == 1) {
            self.keep_works(candidates, &leading);
            return Some(leading);
        }
        let times = match leading.times.iter().any(|time| time.0 >= limit) {
            true => {
                let all = by(of, leading.worth)?;
                self.keep_works(candidates, &all);
                all.times
            }
            false => candidates.iter().map(|one| self.time_free(one, bound.work)).collect(),
        };
        Some(Room { times, ..leading })
    }

    /// The bound of a candidate, and by the same tables what is known in the memory that there is of it and of smaller
    /// micro-batches on its mesh that divide its own, as far as the bound does not say that they take as long as the
    /// limit.
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
        self.in_schedules(candidate, |kind| works.of(kind)).unwrap_or(Seconds(f64::INFINITY))
    }

    /// The least times of some candidates, the smallest micro-batch first: of all in the memory of the smallest, and
    /// where that does not rule them all out, of each by its own lengths and in its own memory, from the largest on,
    /// until one is not ruled out.
    fn room_by<'s>(
        &'s self,
        (tables, bound, of): (&Tables<'s>, &Bound, Forms<'s>),
        candidates: &[&Candidate],
        (limit, worth): (f64, Option<Worth>),
    ) -> Option<Room> {
        let mut ready = self.ready((tables, bound, of), worth);
        let goal = Goal { limit, effort: Effort::GivesUp };
        let all = self.works_in_room((tables, &mut ready), candidates[0], goal)?;
        let mut times: Vec<Seconds> = candidates.iter().map(|one| self.time_in(one, &all)).collect();
        let likely = times[0];
        let mut works = vec![all.kept; candidates.len()];
        let open = candidates.iter().zip(times.iter_mut().zip(&mut works)).rev();
        for (one, (time, works)) in open.filter(|(_, (time, _))| time.0 < limit) {
            if one.micro_batch == tables.bench.candidate.micro_batch {
                break;
            }
            let Some(base) = self.by_own_lengths((tables, bound), &mut ready, one) else { break };
            *time = time.max(self.time_free(one, base));
            if time.0 < limit
                && let Some(own) = self.works_in_room((tables, &mut ready), one, goal)
            {
                *time = time.max(self.time_in(one, &own));
                works.extend(own.kept);
            }
            if time.0 < limit {
                break;
            }
        }
        Some(Room { times, likely, worth: Some(ready.worth), works })
    }

    /// A time that a candidate cannot beat in its memory, looked for until it reaches a limit: by the tables of a
    /// candidate on its mesh with a micro-batch that is a multiple of its own, and its bound. With so much effort where
    /// schedules are asked by themselves, quickly where families are. `None` where memory says nothing of it.
    pub fn bound_in_room<'s>(
        &'s self,
        (of_tables, bound): (&Candidate, &Bound),
        candidate: &Candidate,
        ((of, together, effort), limit): ((Forms<'s>, Together, Effort), Seconds),
    ) -> Option<Seconds> {
        if !self.knows_room(candidate) {
            let is_alone = together == Together::Family && of_tables == candidate;
            return if is_alone { self.bound_on_grounds((candidate, bound), (of, limit.0)) } else { None };
        }
        let goal = Goal { limit: limit.0, effort: Effort::Quick };
        let tables = self.priced_tables(of_tables, bound.covers, of);
        let mut ready = self.ready((&tables, bound, of), None);
        if candidate.micro_batch < tables.bench.candidate.micro_batch {
            self.by_own_lengths((&tables, bound), &mut ready, candidate)?;
        }
        let works = self.works_in_room((&tables, &mut ready), candidate, goal)?;
        match together {
            Together::Family => Some(self.time_in(candidate, &works)),
            Together::Schedule => {
                let goal = Goal { effort, ..goal };
                self.least_schedule((&tables, &mut ready), candidate, (&works, goal))
            }
        }
    }

    /// The least time of all schedules of a candidate, each asked by itself where what is known of its family could be
    /// less.
    fn least_schedule<'s: 't, 't>(
        &'s self,
        (tables, ready): (&'t Tables<'s>, &mut Ready<'t>),
        candidate: &Candidate,
        (works, goal): (&Works, Goal),
    ) -> Option<Seconds> {
        let known = |schedule| {
            let one = self.sending(candidate, schedule);
            (self.in_family(candidate, works.of(one.kind), &one).0, one)
        };
        let mut all: Vec<(f64, Family)> = self.schedules(candidate).into_iter().map(known).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut least = f64::INFINITY;
        for (known, one) in &all {
            if *known >= least {
                break;
            }
            let InRoom { work, .. } = self.work_in_room((tables, ready), (candidate, one), goal)?;
            let own = self.in_family(candidate, work, one).0.max(*known);
            least = least.min(own);
        }
        Some(Seconds(least))
    }

    /// Whether memory says anything of a candidate and of others by its tables: not where stages stand on several
    /// grounds.
    pub(crate) fn knows_room(&self, candidate: &Candidate) -> bool {
        self.counts_memory() && self.grounds(candidate).settings.len() == 1
    }

    /// Whether memory says anything of any: the integer program would take hours for it.
    fn counts_memory(&self) -> bool {
        self.request.solver == Solver::Structured
    }

    /// Least work of a candidate in its memory, schedule family by family.
    fn works_in_room<'s: 't, 't>(
        &'s self,
        (tables, ready): (&'t Tables<'s>, &mut Ready<'t>),
        candidate: &Candidate,
        goal: Goal,
    ) -> Option<Works> {
        let mut works = Works { free: ready.base, known: Vec::new(), kept: Vec::new() };
        for family in self.families(candidate) {
            let InRoom { work, anywhere } = self.work_in_room((tables, ready), (candidate, &family), goal)?;
            works.known.push((family.kind, work));
            if anywhere != works.free {
                works.kept.push(WorkInRoom::new(candidate, &family.in_flight, anywhere));
            }
            if goal.effort == Effort::GivesUp && self.in_family(candidate, work, &family).0 < goal.limit {
                break;
            }
        }
        Some(works)
    }
}
