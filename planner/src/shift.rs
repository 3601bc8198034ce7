//! Moves layers between the chunks of an arrangement as long as that makes it faster.
//!
//! Cuts are made for the least longest stage (`partition`). That is all that counts where micro-batches are many. Where
//! they are few, a stage computes while the first of them is behind it, so that a lighter last stage is worth a longer
//! one before it; and what a stage has once in a step is not cut for at all.

use rayon::prelude::*;

use crate::arrange::Arranged;
use crate::candidate::Scope;
use crate::levels::{Chunk, Levels};
use crate::shelf::Shelf;

/// Layers that move, at most.
const MAX_SHIFTS: usize = 16;

/// Chunks between any two of which layers move.
const FEW_CHUNKS: usize = 8;

/// Chunks of which two layers move at once where one alone makes nothing faster.
const MOST_TO_PAIR: usize = 4;

/// Chunks of which none moves where there are more: trying all moves takes as long as the square of their number.
const MOST_CHUNKS: usize = 32;

impl Scope<'_> {
    /// Whether layers of an arrangement may move: the user does not say how many a stage has, and chunks are not too
    /// many.
    pub(crate) fn may_shift(&self, arranged: &Arranged) -> bool {
        self.pins().layers_per_stage.is_none() && arranged.chunks.len() <= MOST_CHUNKS
    }

    /// What becomes of an arrangement in such chunks; `levels` and `shelves` are those of its candidate's grounds.
    pub(crate) fn shifted(
        &self,
        mut best: Arranged,
        chunks: &[Chunk],
        (levels, shelves): (&[Levels], &[Shelf]),
    ) -> Arranged {
        let mut counts: Vec<usize> = chunks.iter().map(|chunk| chunk.to - chunk.from).collect();
        let moves: Vec<(usize, usize)> = moves(counts.len()).collect();
        for _ in 0..MAX_SHIFTS {
            let fastest = |all: &[Vec<usize>]| {
                let (candidate, schedule) = (&best.candidate, best.schedule);
                let one = |(counts, cuts): (&Vec<usize>, &Option<Vec<Chunk>>)| {
                    let order = (schedule, cuts.as_deref()?);
                    let limit = best.step_time().0;
                    let found = self.arrange(candidate, order, (levels, shelves), limit).ok()?;
                    found.is_worth_it(&best).then(|| (counts.clone(), found))
                };
                let time = |(_, found): &(Vec<usize>, Arranged)| found.step_time().0;
                // Most of their chunks are alike, and asked about once where one thread asks.
                let cuts = self.cuts_of(candidate, (schedule, all), levels);
                let found: Vec<Option<(Vec<usize>, Arranged)>> = all.par_iter().zip(&cuts).map(one).collect();
                found.into_iter().flatten().min_by(|a, b| time(a).total_cmp(&time(b)))
            };
            let near = after(&[counts.clone()], &moves);
            let found = fastest(&near)
                .or_else(|| (counts.len() <= MOST_TO_PAIR).then(|| fastest(&after(&near, &moves))).flatten());
            let Some((next, found)) = found else { break };
            (counts, best) = (next, found);
        }
        best
    }
}

/// What numbers of layers become by one move.
fn after(all: &[Vec<usize>], moves: &[(usize, usize)]) -> Vec<Vec<usize>> {
    let one = |counts: &Vec<usize>, &(from, to): &(usize, usize)| {
        let mut counts = counts.clone();
        counts[from] = counts[from].checked_sub(1).filter(|&left| left > 0)?;
        counts[to] += 1;
        Some(counts)
    };
    let moved = all.iter().flat_map(|counts| moves.iter().filter_map(move |between| one(counts, between)));
    let mut list: Vec<Vec<usize>> = moved.collect();
    list.sort();
    list.dedup();
    list
}

/// From which chunk to which a layer may move: between any two of a few; of many, between neighbours, and to or from
/// the first and the last.
fn moves(n_chunks: usize) -> impl Iterator<Item = (usize, usize)> {
    let is_end = move |chunk: usize| chunk == 0 || chunk + 1 == n_chunks;
    let is_tried = move |&(from, to): &(usize, usize)| {
        let is_near = n_chunks <= FEW_CHUNKS || from.abs_diff(to) == 1;
        from != to && (is_near || is_end(from) || is_end(to))
    };
    (0..n_chunks).flat_map(move |from| (0..n_chunks).map(move |to| (from, to))).filter(is_tried)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_move_between_neighbours_and_the_ends() {
        assert_eq!(moves(3).count(), 6);
        assert_eq!(moves(FEW_CHUNKS).count(), FEW_CHUNKS * (FEW_CHUNKS - 1));
        let many: Vec<(usize, usize)> = moves(16).collect();
        assert!(many.contains(&(0, 9)) && many.contains(&(9, 15)) && many.contains(&(9, 8)));
        assert!(!many.contains(&(9, 7)) && many.iter().all(|(from, to)| from != to));
    }
}
