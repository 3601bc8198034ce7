//! Bounds that one search leaves to the next of the same question under other schedules, or with hosts: what layers
//! take where memory is free depends on neither.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock};

use crate::bound::Bound;
use crate::candidate::Candidate;
use crate::memos::lock;

/// Candidates by their stages and micro-batches, each with something.
type ByCounts<T> = BTreeMap<(u64, u64), Vec<(Candidate, T)>>;

/// Something of every candidate.
#[derive(Default)]
pub(crate) struct ByCandidate<T>(Mutex<ByCounts<T>>);

impl<T: Clone + Default> ByCandidate<T> {
    /// Changes what there is of a candidate.
    pub(crate) fn change(&self, candidate: &Candidate, change: impl FnOnce(&mut T)) {
        let mut all = lock(&self.0);
        let alike = all.entry((candidate.n_stages, candidate.n_micro_batches)).or_default();
        match alike.iter_mut().find(|(known, _)| known == candidate) {
            Some((_, known)) => change(known),
            None => {
                let mut new = T::default();
                change(&mut new);
                alike.push((candidate.clone(), new));
            }
        }
    }

    /// What there is of a candidate.
    pub(crate) fn of(&self, candidate: &Candidate) -> Option<T> {
        let all = lock(&self.0);
        let alike = all.get(&(candidate.n_stages, candidate.n_micro_batches))?;
        alike.iter().find(|(known, _)| known == candidate).map(|(_, of)| of.clone())
    }
}

/// What was bounded so far, on stages that stand on one ground.
#[derive(Default)]
pub(crate) struct KnownBounds {
    /// Whether they are of the leading forms, and which form of every kind leads.
    forms: OnceLock<(bool, Vec<usize>)>,
    all: ByCandidate<Option<Bound>>,
}

impl KnownBounds {
    /// The forms that bounds are of, which the first search says: those of the leading forms alone, or all; and per
    /// kind the form that leads.
    pub(crate) fn forms(&self, said: impl FnOnce() -> (bool, Vec<usize>)) -> (bool, Vec<usize>) {
        self.forms.get_or_init(said).clone()
    }

    /// Keeps the bound of a candidate; the first of several.
    pub(crate) fn keep(&self, candidate: &Candidate, bound: &Bound) {
        if bound.grounds.is_empty() {
            self.all.change(candidate, |known| {
                known.get_or_insert_with(|| bound.clone());
            });
        }
    }

    /// The bound of a candidate, under the schedules of the search that left it.
    pub(crate) fn of(&self, candidate: &Candidate) -> Option<Bound> {
        self.all.of(candidate).flatten()
    }
}
