//! Bounds that one search leaves to the next of the same question under other schedules, or with hosts: what layers take where memory is free
//! depends on neither.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock};

use crate::bound::Bound;
use crate::candidate::Candidate;
use crate::memos::lock;

/// Candidates by their stages and micro-batches, with their bounds.
type ByCounts = BTreeMap<(u64, u64), Vec<(Candidate, Bound)>>;

/// What was bounded so far, on stages that stand on one ground.
#[derive(Default)]
pub(crate) struct KnownBounds {
    /// Whether they are of the leading forms, and which form of every kind leads.
    forms: OnceLock<(bool, Vec<usize>)>,
    all: Mutex<ByCounts>,
}

impl KnownBounds {
    /// The forms that bounds are of, which the first search says: those of the leading forms alone, or all; and per kind the form that
    /// leads.
    pub(crate) fn forms(&self, said: impl FnOnce() -> (bool, Vec<usize>)) -> (bool, Vec<usize>) {
        self.forms.get_or_init(said).clone()
    }

    /// Keeps the bound of a candidate.
    pub(crate) fn keep(&self, candidate: &Candidate, bound: &Bound) {
        if bound.grounds.is_empty() {
            let mut all = lock(&self.all);
            let alike = all.entry((candidate.n_stages, candidate.n_micro_batches)).or_default();
            if alike.iter().all(|(known, _)| known != candidate) {
                alike.push((candidate.clone(), bound.clone()));
            }
        }
    }

    /// The bound of a candidate, under the schedules of the search that left it.
    pub(crate) fn of(&self, candidate: &Candidate) -> Option<Bound> {
        let all = lock(&self.all);
        let alike = all.get(&(candidate.n_stages, candidate.n_micro_batches))?;
        alike.iter().find(|(known, _)| known == candidate).map(|(_, bound)| bound.clone())
    }
}
