//! What was priced on a mesh is kept for the next candidate there: micro-batches of other sizes send by the same
//! collectives and keep the same parameters.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::candidate::{Candidate, same_mesh};
use crate::prices::Memo;

/// Meshes that are kept at most: a megabyte each where layers have experts. A search comes back to the same ones.
const MOST: usize = 128;

/// What was priced on the meshes of the candidates that were looked at last, each on one ground of its stages. Clones
/// share it.
#[derive(Clone, Default)]
pub(crate) struct Memos(Arc<Mutex<VecDeque<(Candidate, usize, Memo)>>>);

impl Memos {
    /// What was priced on the mesh of a candidate; nothing while another thread has it.
    pub(crate) fn take(&self, candidate: &Candidate, ground: usize) -> Memo {
        self.remove(candidate, ground, &mut lock(&self.0)).unwrap_or_default()
    }

    /// Gives it back, with what was priced since.
    pub(crate) fn give(&self, candidate: &Candidate, ground: usize, memo: Memo) {
        let mut all = lock(&self.0);
        self.remove(candidate, ground, &mut all);
        all.push_back((candidate.clone(), ground, memo));
        if all.len() > MOST {
            all.pop_front();
        }
    }

    fn remove(
        &self,
        candidate: &Candidate,
        ground: usize,
        all: &mut VecDeque<(Candidate, usize, Memo)>,
    ) -> Option<Memo> {
        let is_there =
            |(known, at, _): &(Candidate, usize, Memo)| *at == ground && same_mesh(known, candidate);
        let at = all.iter().position(is_there)?;
        all.remove(at).map(|(.., memo)| memo)
    }
}

/// What a lock guards, whoever panicked with it.
pub(crate) fn lock<T>(guarded: &Mutex<T>) -> MutexGuard<'_, T> {
    guarded.lock().unwrap_or_else(PoisonError::into_inner)
}
