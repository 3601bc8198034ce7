//! What comes before the most promising: whatever else the mesh of the fastest does.
//!
//! Bounds are far below what comes out of a mesh where memory is short, by more the fewer its stages are, so the most
//! promising by bounds alone are often hundreds that come to nothing. Micro-batches of one mesh come to times that are
//! near each other: once one is the fastest so far, its neighbours are the shortest way to a limit that rules the
//! others out.

use std::cmp::Reverse;

use super::{Frontier, Task};
use crate::candidate::same_mesh;

impl Frontier<'_> {
    /// A candidate is the fastest by now: its mesh comes first.
    pub(crate) fn favour(&mut self, candidate: usize) {
        self.favoured = Some(candidate);
    }

    /// The most promising task of the favoured mesh that may be faster than a limit, which is then no longer among
    /// those to do; its mesh is favoured no longer where there is none.
    pub(super) fn take_favoured(&mut self, limit: f64) -> Option<Task> {
        let fastest = &self.candidates[self.favoured?];
        let is_of_mesh = |task: Task| {
            let at = match task {
                Task::WorkOut(at) | Task::Weigh(at) => at,
                Task::Refine(group) | Task::WeighAll(group) => self.groups[group].last.0,
            };
            same_mesh(&self.candidates[at], fastest)
        };
        let queued = self.asked.iter().chain(&self.ready).map(|Reverse(one)| *one);
        let next = queued.filter(|&(_, task)| is_of_mesh(task) && self.bound(task) < limit).min();
        let Some(next) = next else {
            self.favoured = None;
            return None;
        };
        for queue in [&mut self.asked, &mut self.ready] {
            queue.retain(|Reverse(one)| *one != next);
        }
        Some(next.1)
    }
}
