//! Which candidate next: bounds are refined where that could matter, and what is promising by its own bound is worked
//! out.
//!
//! A mesh is asked for the bound of its largest micro-batch first, whose kernels are the longest and whose collectives
//! are the fewest. What is found of one micro-batch holds for all smaller ones on its mesh until they are asked
//! themselves, so a mesh whose large micro-batches are too slow is never asked about its small ones. Those that would
//! crowd memory are passed over at first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::bound::Bound;
use crate::candidate::{Candidate, Scope};

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Task {
    /// Work out a candidate that has a bound of its own.
    WorkOut(usize),
    /// Ask a mesh about a micro-batch that it has not been asked about.
    Refine(usize),
}

/// Candidates of a mesh and a number of stages that differ in their micro-batch.
struct Group {
    /// Those without a bound of their own, the smallest micro-batch first.
    left: Vec<usize>,
    /// The smallest that was asked of those with larger micro-batches, and its bound.
    last: (usize, Bound),
}

/// What is left to do, the most promising first.
pub(crate) struct Frontier<'a> {
    scope: &'a Scope<'a>,
    candidates: &'a [Candidate],
    groups: Vec<Group>,
    own: Vec<Option<Bound>>,
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
            asked: BinaryHeap::new(),
            ready: BinaryHeap::new(),
            n_illegal: 0,
        }
    }

    /// Adds the candidates of a mesh, the smallest micro-batch first, with the bound of the largest that the mesh can
    /// run at all and its place among them.
    pub(crate) fn add(&mut self, all: &[usize], largest: Option<(usize, Bound)>) {
        let Some((place, bound)) = largest else {
            self.n_illegal += all.len() as u64;
            return;
        };
        self.n_illegal += (all.len() - place - 1) as u64;
        self.add_group(Group { left: all[..place].to_vec(), last: (all[place], bound.clone()) });
        self.found(all[place], bound);
    }

    fn add_group(&mut self, group: Group) {
        self.groups.push(group);
        self.queue_group(self.groups.len() - 1);
    }

    /// What a mesh said of the candidate that `take` gave out for it.
    pub(crate) fn refined(&mut self, group: usize, candidate: usize, bound: Option<Bound>) {
        match bound {
            Some(bound) => {
                self.groups[group].last = (candidate, bound.clone());
                self.found(candidate, bound);
            }
            None => self.n_illegal += 1,
        }
        self.queue_group(group);
    }

    /// The most promising tasks, at most `n`; what cannot be faster than `limit` is dropped, and counted. Bounds alone are
    /// no plan: in every `PLAN_EVERY`th batch one candidate at least is worked out, if there is one.
    pub(crate) fn take(&mut self, (n, batch): (usize, u64), limit: f64) -> (Vec<Task>, u64) {
        let (mut tasks, mut n_dropped): (Vec<Task>, u64) = (Vec::new(), 0);
        while tasks.len() < n {
            let only_asked = tasks.iter().all(|task| matches!(task, Task::Refine(_)));
            let must_plan = batch.is_multiple_of(PLAN_EVERY) && tasks.len() + 1 == n && only_asked;
            let next = match (self.asked.peek(), self.ready.peek()) {
                (Some(asked), Some(ready)) if !must_plan && asked > ready => self.asked.pop(),
                (Some(_), None) => self.asked.pop(),
                (_, Some(_)) => self.ready.pop(),
                (None, None) => break,
            };
            let Some(Reverse((_, task))) = next else { break };
            if self.bound(task) < limit {
                tasks.push(task);
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
                let (next, Group { left, last }) = (self.next(group)?, &mut self.groups[group]);
                let (passed, last) = (left.split_off(next + 1), last.clone());
                let candidate = left.pop();
                if !passed.is_empty() {
                    self.add_group(Group { left: passed, last });
                }
                candidate
            }
        }
    }

    /// Place of the candidate that a mesh is asked about next: the largest micro-batch, or where one as large would crowd
    /// memory, the largest that would not, as far as bytes grow with it.
    fn next(&self, group: usize) -> Option<usize> {
        let left = &self.groups[group].left;
        let roomy = |&at: &usize| self.crowding(group, at) <= ROOMY;
        left.iter().rposition(roomy).or_else(|| left.len().checked_sub(1).map(|_| 0))
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
            Task::WorkOut(_) => 1,
            Task::Refine(group) => self.groups[group].left.len() as u64,
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

    /// Seconds that no candidate of a task beats; infinite where there is none.
    fn bound(&self, task: Task) -> f64 {
        match task {
            Task::WorkOut(candidate) => self.own[candidate].as_ref().map_or(f64::INFINITY, |own| own.time.0),
            Task::Refine(group) => {
                let Group { left, last } = &self.groups[group];
                let time = |&at: &usize| Some(self.scope.with_bubble(&self.candidates[at], last.1.work)?.0);
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

/// Every so many batches of tasks, one at least works a candidate out.
const PLAN_EVERY: u64 = 4;

/// Crowding up to which micro-batches are asked about first.
const ROOMY: f64 = 3.0;
