//! Which candidate next: bounds are refined where that could matter, and what is promising by its own bound is worked
//! out.
//!
//! A mesh is asked for the bound of its largest micro-batch first, whose kernels are the longest and whose collectives
//! are the fewest. What is found of one micro-batch holds for all on its mesh that divide it until they are asked
//! themselves, so a mesh whose large micro-batches are too slow is never asked about its small ones. One that does not
//! divide it may be cut in ways in which it is not (192 over 64 devices, but not 240), and goes by another. Those that
//! would crowd memory are passed over at first, and bounded in the memory that there is before more is done about them.

mod favoured;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use ir::units::Seconds;

use crate::bound::Bound;
use crate::candidate::{Candidate, Scope, same_mesh};
use crate::room::{Room, Worth};
use crate::shapes::gcd;

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Task {
    /// Work out a candidate that has a bound of its own.
    WorkOut(usize),
    /// Ask a mesh about a micro-batch that it has not been asked about.
    Refine(usize),
    /// Bound a candidate in the memory that there is.
    Weigh(usize),
    /// Bound those of a mesh that it has not been asked about in the memory that there is.
    WeighAll(usize),
}

/// Candidates of a mesh and a number of stages that differ in their micro-batch.
struct Group {
    /// Those without a bound of their own, the smallest micro-batch first.
    left: Vec<usize>,
    /// One that was asked, whose micro-batch is a multiple of all of theirs, and its bound.
    last: (usize, Bound),
    /// Whether those left were bounded in the memory that there is.
    is_weighed: bool,
    /// What memory is worth on the mesh, as far as it was asked.
    worth: Option<Worth>,
}

/// What is known of a candidate that a mesh was asked about: its bound, and what is known of it and of those of the
/// mesh that are left in the memory that there is.
pub(crate) type Refined = (Bound, [Option<Room>; 2]);

/// Pairs of ports that a bound prices, on the average of some.
pub(crate) fn average_pairs<'b>(bounds: impl Iterator<Item = &'b Bound>) -> usize {
    let (sum, n) = bounds.fold((0, 0_usize), |(sum, n), bound| (sum + bound.n_pairs, n + 1));
    sum / n.max(1)
}

/// What is left to do, the most promising first.
pub(crate) struct Frontier<'a> {
    scope: &'a Scope<'a>,
    candidates: &'a [Candidate],
    groups: Vec<Group>,
    own: Vec<Option<Bound>>,
    /// Per candidate, seconds that it cannot beat, as far as it was asked.
    least: Vec<f64>,
    /// Per candidate, whether it was bounded in the memory that there is.
    is_weighed: Vec<bool>,
    /// What memory is worth where that was asked last, by numbers of stages.
    worth: BTreeMap<u64, Worth>,
    /// Meshes to be asked about the next candidate, the most promising first.
    asked: BinaryHeap<Reverse<(u64, Task)>>,
    /// Candidates with a bound of their own, the most promising first.
    ready: BinaryHeap<Reverse<(u64, Task)>>,
    /// The fastest so far, while its mesh may have something faster.
    favoured: Option<usize>,
    /// Candidates that no strategy fits.
    pub(crate) n_illegal: u64,
    /// Per candidate, whether one overflowed by more than this could.
    overflows: Vec<bool>,
    /// Of these, those that were dropped for it.
    pub(crate) n_overflow: u64,
}

impl<'a> Frontier<'a> {
    /// Nothing to do yet; candidates take no less than what is known of them by other schedules.
    pub(crate) fn new(scope: &'a Scope<'a>, candidates: &'a [Candidate]) -> Self {
        let known = |one: &Candidate| scope.time_in_known_room(one).map_or(0.0, |time| time.0);
        Self {
            scope,
            candidates,
            groups: Vec::new(),
            own: vec![None; candidates.len()],
            least: candidates.iter().map(known).collect(),
            is_weighed: vec![false; candidates.len()],
            worth: BTreeMap::new(),
            asked: BinaryHeap::new(),
            ready: BinaryHeap::new(),
            favoured: None,
            n_illegal: 0,
            overflows: vec![false; candidates.len()],
            n_overflow: 0,
        }
    }

    /// Least bound of those that were asked and whose fastest choices take no more than so many times the memory that
    /// there is.
    pub(crate) fn roomy(&self, memories: f64) -> Option<Seconds> {
        let asked = self.own.iter().flatten().filter(|bound| bound.crowding <= memories);
        asked.map(|bound| bound.time).reduce(Seconds::min)
    }

    /// A candidate overflows memory by its smallest choices, which need so many times what there is. Multiples of its
    /// micro-batch that the devices of its mesh split no further then do too.
    pub(crate) fn overflowed(&mut self, candidate: usize, times: f64) {
        let of = &self.candidates[candidate];
        if times < SURELY || !of.meshes.is_empty() {
            return;
        }
        let n_devices = of.shape.mesh.n_devices();
        let split = |one: &Candidate| gcd(one.micro_batch, n_devices);
        let others = (candidate + 1..self.candidates.len())
            .take_while(|&at| same_mesh(&self.candidates[at], of))
            .filter(|&at| {
                let one = &self.candidates[at];
                one.micro_batch.is_multiple_of(of.micro_batch) && split(one) == split(of)
            });
        for at in others {
            self.overflows[at] = true;
            self.least[at] = f64::INFINITY;
        }
    }

    /// How many of some are dropped as too slow, those that overflow apart.
    fn dropped(&mut self, some: &[usize]) -> u64 {
        let n_overflow = some.iter().filter(|&&at| self.overflows[at]).count();
        self.n_overflow += n_overflow as u64;
        (some.len() - n_overflow) as u64
    }

    fn sequence(&self) -> u64 {
        self.scope.request.job.sequence
    }

    /// What all candidates share.
    pub(crate) fn scope(&self) -> &'a Scope<'a> {
        self.scope
    }

    /// How many candidates there are, and were.
    pub(crate) fn n_all(&self) -> u64 {
        self.candidates.len() as u64
    }

    /// A candidate.
    pub(crate) fn at(&self, at: usize) -> &'a Candidate {
        &self.candidates[at]
    }

    /// Adds a candidate with its bound, and those of its mesh whose micro-batches divide its own, the smallest first.
    pub(crate) fn add(&mut self, (candidate, bound): (usize, Bound), left: Vec<usize>) {
        self.found(candidate, bound.clone());
        self.queue_candidate(candidate, None);
        self.add_group(Group { left, last: (candidate, bound), is_weighed: false, worth: None });
    }

    fn add_group(&mut self, group: Group) {
        self.groups.push(group);
        self.queue_group(self.groups.len() - 1);
    }

    /// A candidate, and those of its mesh whose micro-batches divide its own.
    fn divisors(&self, candidate: usize) -> Vec<usize> {
        let of = &self.candidates[candidate];
        let before = self.candidates[..=candidate].iter().rev().take_while(|one| same_mesh(one, of));
        let all = (candidate + 1 - before.count()..=candidate).collect();
        dividing((self.candidates, self.sequence()), candidate, all).0
    }

    /// A candidate that takes no less than some time.
    fn raise(&mut self, at: usize, time: Seconds) {
        self.least[at] = self.least[at].max(time.0);
    }

    /// What a mesh said of the candidate that `take` gave out for it; how many were dropped for it, as they cannot be
    /// faster than a limit.
    pub(crate) fn refined(
        &mut self,
        (group, candidate): (usize, usize),
        found: Option<Refined>,
        limit: f64,
    ) -> u64 {
        let Some((bound, [own, left])) = found else {
            self.n_illegal += 1;
            self.queue_group(group);
            return 0;
        };
        self.groups[group].last = (candidate, bound.clone());
        self.found(candidate, bound);
        self.is_weighed[candidate] = own.is_some();
        self.queue_candidate(candidate, own);
        self.groups[group].is_weighed = left.is_some();
        self.weighed_all(group, left, limit)
    }

    /// A task of the favoured mesh, if it has any, and the most promising ones, at most `n` together; what cannot be
    /// faster than `limit` is dropped, and counted. Bounds alone are no plan: in every `PLAN_EVERY`th batch one
    /// candidate at least is taken up that has one, to be worked out, or weighed before it is, if anything is to be.
    pub(crate) fn take(
        &mut self,
        (n, batch): (usize, u64),
        (limit, weighs): (f64, bool),
    ) -> (Vec<Task>, u64) {
        let (mut tasks, mut n_dropped): (Vec<Task>, u64) = (Vec::new(), 0);
        let mut favoured = self.take_favoured(limit);
        while tasks.len() < n {
            let only_asked = !tasks.iter().any(|task| matches!(task, Task::WorkOut(_)));
            let must_plan = batch.is_multiple_of(PLAN_EVERY) && tasks.len() + 1 == n && only_asked;
            let mut queued = || match (self.asked.peek(), self.ready.peek()) {
                (Some(asked), Some(ready)) if !must_plan && asked > ready => self.asked.pop(),
                (Some(_), None) => self.asked.pop(),
                (_, _) => self.ready.pop(),
            };
            let next = favoured.take().or_else(|| queued().map(|Reverse((_, task))| task));
            let Some(task) = next else { break };
            if let Task::Refine(group) = task {
                // All of them, where none is fast enough.
                n_dropped += self.drop_slow(group, limit);
            }
            if self.bound(task) < limit {
                tasks.push(if weighs { self.weighed_first(task) } else { task });
            } else if let Task::WorkOut(at) | Task::Weigh(at) = task {
                n_dropped += self.dropped(&[at]);
            }
        }
        (tasks, n_dropped)
    }

    /// The candidate of a task; of a mesh, the one that it is asked about, which is then no longer among those left.
    pub(crate) fn candidate(&mut self, task: Task) -> Option<usize> {
        match task {
            Task::WorkOut(candidate) => Some(candidate),
            Task::Refine(group) => {
                let sequence = self.sequence();
                let next = self.next(group)?;
                let known = &mut self.groups[group];
                let candidate = known.left.remove(next);
                let left = std::mem::take(&mut known.left);
                let (left, passed) = dividing((self.candidates, sequence), candidate, left);
                known.left = left;
                if !passed.is_empty() {
                    let passed = Group { left: passed, last: known.last.clone(), ..*known };
                    self.add_group(passed);
                }
                Some(candidate)
            }
            Task::Weigh(candidate) => Some(candidate),
            Task::WeighAll(group) => Some(self.groups[group].last.0),
        }
    }

    /// What to do before a task: what crowds memory is bounded in the memory that there is, once.
    fn weighed_first(&self, task: Task) -> Task {
        match task {
            Task::WorkOut(at) => {
                let crowds = self.own[at].as_ref().is_some_and(|own| own.crowding > CROWDED);
                if crowds && !self.is_weighed[at] { Task::Weigh(at) } else { task }
            }
            Task::Refine(group) => {
                if self.left_crowds(group) && !self.groups[group].is_weighed {
                    Task::WeighAll(group)
                } else {
                    task
                }
            }
            Task::Weigh(_) | Task::WeighAll(_) => task,
        }
    }

    /// What weighing takes: the candidate whose tables it goes by, its bound, and those that are bounded, the smallest
    /// micro-batch first.
    pub(crate) fn weighs(&self, task: Task) -> Option<((&Candidate, &Bound), Vec<&Candidate>)> {
        match task {
            Task::Weigh(at) => {
                Some(((&self.candidates[at], self.own[at].as_ref()?), vec![&self.candidates[at]]))
            }
            Task::WeighAll(group) => {
                let Group { left, last: (last, bound), .. } = &self.groups[group];
                Some((
                    (&self.candidates[*last], bound),
                    left.iter().map(|&at| &self.candidates[at]).collect(),
                ))
            }
            Task::WorkOut(_) | Task::Refine(_) => None,
        }
    }

    /// Whether the smallest micro-batch that a mesh has left would crowd memory.
    fn left_crowds(&self, group: usize) -> bool {
        let smallest = self.groups[group].left.first();
        smallest.is_some_and(|&at| self.crowding(group, at) > CROWDED)
    }

    /// Those of a mesh that are to be bounded in the memory that there is as soon as a candidate of it, because it
    /// would crowd memory, is; the smallest micro-batch first. `None` where that takes another look.
    pub(crate) fn weighs_at_once(&self, group: usize, candidate: usize) -> Option<Vec<&Candidate>> {
        let crowds =
            self.crowding(group, candidate) > CROWDED && self.scope.knows_room(&self.candidates[candidate]);
        let left = || self.groups[group].left.iter().map(|&at| &self.candidates[at]).collect();
        crowds.then(|| if self.left_crowds(group) { left() } else { Vec::new() })
    }

    /// What memory is worth on the mesh of a task, or was where another as deep was asked last.
    pub(crate) fn worth(&self, task: Task, candidate: usize) -> Option<Worth> {
        let own = match task {
            Task::Refine(group) | Task::WeighAll(group) => self.groups[group].worth,
            Task::WorkOut(_) | Task::Weigh(_) => None,
        };
        own.or_else(|| self.worth.get(&self.candidates[candidate].n_stages).copied())
    }

    /// What was found of a candidate, or of a mesh, in the memory that there is; how many were dropped for it, as they
    /// cannot be faster than a limit.
    pub(crate) fn weighed(&mut self, task: Task, room: Option<Room>, limit: f64) -> u64 {
        match task {
            Task::WorkOut(at) | Task::Weigh(at) => {
                self.is_weighed[at] = true;
                self.queue_candidate(at, room);
                0
            }
            Task::Refine(group) | Task::WeighAll(group) => {
                self.groups[group].is_weighed = true;
                self.weighed_all(group, room, limit)
            }
        }
    }

    fn queue_candidate(&mut self, at: usize, room: Option<Room>) {
        let promise = match room {
            Some(Room { times, likely, worth, .. }) => {
                times.iter().for_each(|&time| self.raise(at, time));
                self.worth.extend(worth.map(|worth| (self.candidates[at].n_stages, worth)));
                let crowding = self.own[at].as_ref().map_or(1.0, |own| own.crowding);
                self.least[at].max(likely.0) * slower_in_room(crowding)
            }
            None => self.own[at].as_ref().map_or(0.0, promise),
        };
        self.ready.push(Reverse((promise.to_bits(), Task::WorkOut(at))));
    }

    fn weighed_all(&mut self, group: usize, room: Option<Room>, limit: f64) -> u64 {
        let mut n_dropped = 0;
        if let Some(Room { times, worth, .. }) = room {
            let left = std::mem::take(&mut self.groups[group].left);
            left.iter().zip(times).for_each(|(&at, time)| self.raise(at, time));
            let n_stages = self.candidates[self.groups[group].last.0].n_stages;
            self.worth.extend(worth.map(|worth| (n_stages, worth)));
            let known = &mut self.groups[group];
            (known.left, known.worth) = (left, worth.or(known.worth));
            n_dropped = self.drop_slow(group, limit);
        }
        self.queue_group(group);
        n_dropped
    }

    /// Drops what a mesh has left that cannot be faster than a limit; how many.
    fn drop_slow(&mut self, group: usize, limit: f64) -> u64 {
        let left = std::mem::take(&mut self.groups[group].left);
        let (kept, slow): (Vec<usize>, Vec<usize>) = left.into_iter().partition(|&at| self.least[at] < limit);
        self.groups[group].left = kept;
        self.dropped(&slow)
    }

    /// Place of the candidate that a mesh is asked about next: the largest micro-batch, or where one as large would
    /// crowd memory and nobody asked yet what that costs, the largest that would not, as far as bytes grow with it.
    fn next(&self, group: usize) -> Option<usize> {
        let left = &self.groups[group].left;
        let roomy = |&at: &usize| self.crowding(group, at) <= ROOMY;
        let smallest = || left.len().checked_sub(1).map(|_| 0);
        match self.groups[group].worth {
            // What its tables then say of memory holds for all others.
            Some(_) => left.len().checked_sub(1),
            None => left.iter().rposition(roomy).or_else(smallest),
        }
    }

    /// How crowded memory would be with a smaller micro-batch, did all bytes shrink with it.
    fn crowding(&self, group: usize, at: usize) -> f64 {
        let (last, bound) = &self.groups[group].last;
        let shrinks = self.candidates[at].micro_batch as f64 / self.candidates[*last].micro_batch as f64;
        bound.crowding * shrinks
    }

    /// The bound of a candidate that has one of its own.
    pub(crate) fn own(&self, candidate: usize) -> Option<&Bound> {
        self.own[candidate].as_ref()
    }

    /// Limit on the batches of tasks: fewer where layers have more operators, or these more ways to meet.
    pub(crate) fn affordable(&self) -> u64 {
        let n_ops: usize = self.scope.forms.iter().map(|forms| forms[0].layer.ops.len()).sum();
        let n_pairs = average_pairs(self.own.iter().flatten());
        (MAX_OPS / n_ops.max(1)).min(MAX_PAIRS / n_pairs.max(1)).clamp(MIN_BATCHES, MAX_BATCHES) as u64
    }

    /// Candidates left whose bound is below a limit, and the least of these bounds.
    pub(crate) fn open(&self, limit: f64) -> (u64, Option<f64>) {
        let open = || self.tasks().filter(|&task| self.bound(task) < limit);
        (
            open().map(|task| self.n_candidates(task)).sum(),
            open().map(|task| self.bound(task)).min_by(f64::total_cmp),
        )
    }

    /// Candidates left.
    pub(crate) fn n_left(&self) -> u64 {
        self.tasks().map(|task| self.n_candidates(task)).sum()
    }

    fn tasks(&self) -> impl Iterator<Item = Task> {
        self.ready.iter().chain(&self.asked).map(|Reverse((_, task))| *task)
    }

    fn n_candidates(&self, task: Task) -> u64 {
        match task {
            Task::WorkOut(_) | Task::Weigh(_) => 1,
            Task::Refine(group) | Task::WeighAll(group) => self.groups[group].left.len() as u64,
        }
    }

    /// Takes over the bound of a candidate, which holds for all that divide it too.
    fn found(&mut self, candidate: usize, bound: Bound) {
        for at in self.divisors(candidate) {
            let time = self.scope.time_free(&self.candidates[at], bound.work);
            self.raise(at, time);
        }
        self.scope.bounds.keep(&self.candidates[candidate], &bound);
        self.own[candidate] = Some(bound);
    }

    fn queue_group(&mut self, group: usize) {
        let time = self.bound(Task::Refine(group));
        if let (true, Some(next)) = (time.is_finite(), self.next(group)) {
            let crowding = self.crowding(group, self.groups[group].left[next]);
            let slower =
                if self.groups[group].is_weighed { slower_in_room(crowding) } else { slower(crowding) };
            self.asked.push(Reverse(((time * slower).to_bits(), Task::Refine(group))));
        }
    }

    /// Seconds that a candidate cannot beat, as far as it was asked.
    pub(crate) fn least(&self, at: usize) -> f64 {
        self.least[at]
    }

    /// Seconds that no candidate of a task beats; infinite where there is none.
    fn bound(&self, task: Task) -> f64 {
        match task {
            Task::WorkOut(at) | Task::Weigh(at) => self.least[at],
            Task::Refine(group) | Task::WeighAll(group) => {
                let least = |&at: &usize| self.least[at];
                self.groups[group].left.iter().map(least).fold(f64::INFINITY, f64::min)
            }
        }
    }
}

/// Of candidates on one mesh, those that one of them stands for, and the others.
pub(crate) fn dividing(
    (candidates, sequence): (&[Candidate], u64),
    of: usize,
    some: Vec<usize>,
) -> (Vec<usize>, Vec<usize>) {
    some.into_iter().partition(|&at| candidates[of].stands_for(&candidates[at], sequence))
}

/// How promising a candidate is: its bound, and more where its fastest choices overflow the memory.
fn promise(bound: &Bound) -> f64 {
    bound.time.0 * slower(bound.crowding)
}

/// How much slower layers become that must do with a part of the memory of their fastest choices: about what the plans
/// of mixtures of experts in tight memory lost to recomputation and to parameters cut further. It only decides what is
/// looked at first.
fn slower(crowding: f64) -> f64 {
    1.0 + 0.17 * (crowding - 1.0).max(0.0)
}

/// How much slower they become than their bound in the memory that there is: about what those plans lost. It only
/// decides what is looked at first.
fn slower_in_room(crowding: f64) -> f64 {
    1.0 + (0.06 * (crowding - 1.0)).clamp(0.0, 0.3)
}

/// What needs so many times the memory that there is overflows with larger micro-batches too: of 2,680 pairs that
/// overflow the larger needed no less than 0.96 of what the smaller did.
const SURELY: f64 = 1.05;

/// Every so many batches of tasks, one at least brings a candidate nearer to a plan.
const PLAN_EVERY: u64 = 2;

/// Crowding up to which micro-batches are asked about first.
const ROOMY: f64 = 3.0;

/// Crowding from which candidates are bounded in the memory that there is before more is done.
const CROWDED: f64 = 1.0;

/// Batches of a search times the operators of all its layer kinds, at most.
const MAX_OPS: usize = 4000;

/// Batches of a search times the pairs of ports that a bound prices, at most.
const MAX_PAIRS: usize = 4_000_000;

/// Batches that every search may have. Mixtures of experts in tight memory have hundreds of candidates that only
/// working them out, or pricing their memory, can rule out: deepseek-v3 on 2,048 devices takes as many.
const MIN_BATCHES: usize = 160;

/// Batches that no search has, however small its layers are, unless somebody says how many.
const MAX_BATCHES: usize = 200;
