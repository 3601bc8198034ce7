//! Which candidate next: bounds are refined where that could matter, and what is promising by its own bound is worked
//! out.
//!
//! A mesh is asked for the bound of its largest micro-batch first, whose kernels are the longest and whose collectives
//! are the fewest. What is found of one micro-batch holds for all smaller ones on its mesh until they are asked
//! themselves, so a mesh whose large micro-batches are too slow is never asked about its small ones. Those that would
//! crowd memory are passed over at first, and bounded in the memory that there is before more is done about them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use crate::bound::{Bound, Work};
use crate::candidate::{Candidate, Scope};
use crate::room::{Room, Worth};

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
    /// The smallest that was asked of those with larger micro-batches, and its bound.
    last: (usize, Bound),
    /// Least work of those left in the memory that there is.
    room: Option<Work>,
    /// Whether that was asked.
    is_weighed: bool,
    /// What memory is worth on the mesh, as far as it was asked.
    worth: Option<Worth>,
}

/// What is known of a candidate that a mesh was asked about: its bound, and what is known of it and of those of the mesh
/// that are left in the memory that there is.
pub(crate) type Refined = (Bound, [Option<Room>; 2]);

/// What is left to do, the most promising first.
pub(crate) struct Frontier<'a> {
    scope: &'a Scope<'a>,
    candidates: &'a [Candidate],
    groups: Vec<Group>,
    own: Vec<Option<Bound>>,
    /// Per candidate, its least work in the memory that there is, once that was asked.
    room: Vec<Option<Work>>,
    /// What memory is worth where that was asked last, by numbers of stages.
    worth: BTreeMap<u64, Worth>,
    /// Meshes to be asked about the next candidate, the most promising first.
    asked: BinaryHeap<Reverse<(u64, Task)>>,
    /// Candidates with a bound of their own, the most promising first.
    ready: BinaryHeap<Reverse<(u64, Task)>>,
    /// Candidates that no strategy fits.
    pub(crate) n_illegal: u64,
}

impl<'a> Frontier<'a> {
    /// Nothing to do yet.
    pub(crate) fn new(scope: &'a Scope<'a>, candidates: &'a [Candidate]) -> Self {
        Self {
            scope,
            candidates,
            groups: Vec::new(),
            own: vec![None; candidates.len()],
            room: vec![None; candidates.len()],
            worth: BTreeMap::new(),
            asked: BinaryHeap::new(),
            ready: BinaryHeap::new(),
            n_illegal: 0,
        }
    }

    /// What all candidates share.
    pub(crate) fn scope(&self) -> &'a Scope<'a> {
        self.scope
    }

    /// A candidate.
    pub(crate) fn at(&self, at: usize) -> &'a Candidate {
        &self.candidates[at]
    }

    /// Adds the candidates of a mesh, the smallest micro-batch first, with the bound of the largest that the mesh can
    /// run at all and its place among them.
    pub(crate) fn add(&mut self, all: &[usize], largest: Option<(usize, Bound)>) {
        let Some((place, bound)) = largest else {
            self.n_illegal += all.len() as u64;
            return;
        };
        self.n_illegal += (all.len() - place - 1) as u64;
        let (left, last) = (all[..place].to_vec(), (all[place], bound.clone()));
        self.add_group(Group { left, last, room: None, is_weighed: false, worth: None });
        self.found(all[place], bound);
    }

    fn add_group(&mut self, group: Group) {
        self.groups.push(group);
        self.queue_group(self.groups.len() - 1);
    }

    /// What a mesh said of the candidate that `take` gave out for it; how many were dropped for it.
    pub(crate) fn refined(&mut self, group: usize, candidate: usize, found: Option<Refined>) -> u64 {
        let Some((bound, [own, left])) = found else {
            self.n_illegal += 1;
            self.queue_group(group);
            return 0;
        };
        let known = &mut self.groups[group];
        (known.last, known.is_weighed) = ((candidate, bound.clone()), false);
        self.own[candidate] = Some(bound);
        self.weighed(Task::Weigh(candidate), own);
        match left {
            Some(left) => self.weighed(Task::WeighAll(group), Some(left)),
            None => {
                self.queue_group(group);
                0
            }
        }
    }

    /// The most promising tasks, at most `n`; what cannot be faster than `limit` is dropped, and counted. Bounds alone are
    /// no plan: in every `PLAN_EVERY`th batch one candidate at least is taken up that has one, to be worked out, or weighed
    /// before it is.
    pub(crate) fn take(&mut self, (n, batch): (usize, u64), limit: f64) -> (Vec<Task>, u64) {
        let (mut tasks, mut n_dropped): (Vec<Task>, u64) = (Vec::new(), 0);
        while tasks.len() < n {
            let only_asked = !tasks.iter().any(|task| matches!(task, Task::WorkOut(_)));
            let must_plan = batch.is_multiple_of(PLAN_EVERY) && tasks.len() + 1 == n && only_asked;
            let next = match (self.asked.peek(), self.ready.peek()) {
                (Some(asked), Some(ready)) if !must_plan && asked > ready => self.asked.pop(),
                (Some(_), None) => self.asked.pop(),
                (_, Some(_)) => self.ready.pop(),
                (None, None) => break,
            };
            let Some(Reverse((_, task))) = next else { break };
            if self.bound(task) < limit {
                tasks.push(if limit.is_finite() { self.weighed_first(task) } else { task });
            } else {
                n_dropped += self.n_candidates(task);
            }
        }
        (tasks, n_dropped)
    }

    /// The candidate of a task; of a mesh, the one that it is asked about, which is then no longer among those left.
    pub(crate) fn candidate(&mut self, task: Task) -> Option<usize> {
        match task {
            Task::WorkOut(candidate) => Some(candidate),
            Task::Refine(group) => {
                let (next, known) = (self.next(group)?, &mut self.groups[group]);
                let passed =
                    Group { left: known.left.split_off(next + 1), last: known.last.clone(), ..*known };
                let candidate = known.left.pop();
                if !passed.left.is_empty() {
                    self.add_group(passed);
                }
                candidate
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
                if crowds && self.room[at].is_none() { Task::Weigh(at) } else { task }
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

    /// Those of a mesh that are to be bounded in the memory that there is as soon as a candidate of it, because it would crowd
    /// memory, is; the smallest micro-batch first. `None` where that takes another look.
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

    /// What was found of a candidate, or of a mesh, in the memory that there is; how many were dropped for it.
    pub(crate) fn weighed(&mut self, task: Task, room: Option<Room>) -> u64 {
        let worth = room.and_then(|room| room.worth);
        match task {
            Task::WorkOut(at) | Task::Weigh(at) => {
                self.room[at] = room.map(|room| room.work);
                let likely = |room: Room| Some(self.scope.with_bubble(&self.candidates[at], room.likely)?.0);
                let promise = match room {
                    Some(room) => self.bound(task).max(likely(room).unwrap_or(0.0)),
                    None => self.own[at].as_ref().map_or(0.0, promise),
                };
                self.ready.push(Reverse((promise.to_bits(), Task::WorkOut(at))));
                self.worth.extend(worth.map(|worth| (self.candidates[at].n_stages, worth)));
                0
            }
            Task::Refine(group) | Task::WeighAll(group) => {
                let known = &mut self.groups[group];
                (known.is_weighed, known.worth) = (true, worth.or(known.worth));
                let n_stages = self.candidates[known.last.0].n_stages;
                let n_left = known.left.len();
                if let Some(room) = room {
                    known.room = Some(room.work);
                    known.left.truncate(room.n_open);
                }
                let n_dropped = n_left - known.left.len();
                self.worth.extend(worth.map(|worth| (n_stages, worth)));
                self.queue_group(group);
                n_dropped as u64
            }
        }
    }

    /// Place of the candidate that a mesh is asked about next: the largest micro-batch, or where one as large would crowd
    /// memory and nobody asked yet what that costs, the largest that would not, as far as bytes grow with it.
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
        let known = || self.own.iter().flatten().map(|bound| bound.n_pairs);
        let n_pairs = known().sum::<usize>() / known().count().max(1);
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

    fn found(&mut self, candidate: usize, bound: Bound) {
        self.ready.push(Reverse((promise(&bound).to_bits(), Task::WorkOut(candidate))));
        self.own[candidate] = Some(bound);
    }

    fn queue_group(&mut self, group: usize) {
        let time = self.bound(Task::Refine(group));
        if let (true, Some(next)) = (time.is_finite(), self.next(group)) {
            let crowding = self.crowding(group, self.groups[group].left[next]);
            self.asked.push(Reverse(((time * slower(crowding)).to_bits(), Task::Refine(group))));
        }
    }

    /// Seconds that a candidate does not beat, as far as it was asked.
    pub(crate) fn least(&self, at: usize) -> Option<f64> {
        let own = self.own[at].as_ref()?.time.0;
        let room = self.room[at].and_then(|room| self.scope.with_bubble(&self.candidates[at], room));
        Some(own.max(room.map_or(0.0, |room| room.0)))
    }

    /// Seconds that no candidate of a task beats; infinite where there is none.
    fn bound(&self, task: Task) -> f64 {
        match task {
            Task::WorkOut(at) | Task::Weigh(at) => self.least(at).unwrap_or(f64::INFINITY),
            Task::Refine(group) | Task::WeighAll(group) => {
                let Group { left, last, room, .. } = &self.groups[group];
                let bubble =
                    |at: usize, work: Work| Some(self.scope.with_bubble(&self.candidates[at], work)?.0);
                let time = |&at: &usize| {
                    let in_room = room.and_then(|work| bubble(at, work));
                    Some(bubble(at, last.1.work)?.max(in_room.unwrap_or(0.0)))
                };
                left.iter().filter_map(time).fold(f64::INFINITY, f64::min)
            }
        }
    }
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

/// Batches that every search may have. Mixtures of experts in tight memory have hundreds of candidates that only working
/// them out, or pricing their memory, can rule out: deepseek-v3 on 2,048 devices takes as many.
const MIN_BATCHES: usize = 110;

/// Batches that no search has, however small its layers are, unless somebody says how many.
const MAX_BATCHES: usize = 200;
