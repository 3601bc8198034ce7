//! Which pipeline rank holds which chunk of the model, and which copy of it a micro-batch runs on.
//!
//! ```text
//! looped, v = 2          waves, v = 2 (a V)      bidirectional
//! rank 0: chunks 0, p    rank 0: 0, 2p-1         rank 0: 0, and p-1 of the other way
//! rank 1: chunks 1, p+1  rank 1: 1, 2p-2         rank 1: 1, and p-2
//! ```
//! Micro-batches pass chunks in rising order forward and in falling order backward.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where the chunks of a model are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// Virtual stage `i` of rank `r` is chunk `i p + r`.
    Looped {
        /// Virtual stages of each rank.
        virtual_stages: u32,
    },
    /// As looped, but every other loop runs from the last rank to the first.
    Waves {
        /// Virtual stages of each rank.
        virtual_stages: u32,
    },
    /// Two copies of every chunk: chunk `c` on rank `c` for even micro-batches, on rank `p - 1 - c` for odd ones.
    Bidirectional,
}

/// One of the places in which chunks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seat {
    /// Pipeline rank.
    pub rank: u32,
    /// Which of the rank's virtual stages.
    pub virtual_stage: u32,
}

impl Placement {
    /// Virtual stages that each rank holds.
    pub fn n_virtual_stages(self) -> u32 {
        match self {
            Self::Looped { virtual_stages } | Self::Waves { virtual_stages } => virtual_stages,
            Self::Bidirectional => 2,
        }
    }

    /// Chunks the model is cut into over `n_stages` ranks.
    pub fn n_chunks(self, n_stages: u32) -> u32 {
        match self {
            Self::Looped { virtual_stages } | Self::Waves { virtual_stages } => {
                n_stages.saturating_mul(virtual_stages)
            }
            Self::Bidirectional => n_stages,
        }
    }

    /// Ranks that hold a copy of a chunk.
    pub fn n_copies(self) -> u32 {
        match self {
            Self::Looped { .. } | Self::Waves { .. } => 1,
            Self::Bidirectional => 2,
        }
    }

    /// The chunk in a seat.
    pub fn chunk(self, n_stages: u32, Seat { rank, virtual_stage }: Seat) -> u32 {
        let loops = match self {
            Self::Looped { .. } | Self::Waves { .. } => virtual_stage * n_stages,
            Self::Bidirectional => 0,
        };
        loops + if self.runs_up(virtual_stage) { n_stages - 1 - rank } else { rank }
    }

    /// Where a micro-batch finds a chunk.
    pub fn seat(self, n_stages: u32, chunk: u32, micro_batch: u32) -> Seat {
        let virtual_stage = match self {
            Self::Looped { .. } | Self::Waves { .. } => chunk / n_stages,
            Self::Bidirectional => micro_batch % 2,
        };
        let at = chunk % n_stages;
        let rank = if self.runs_up(virtual_stage) { n_stages - 1 - at } else { at };
        Seat { rank, virtual_stage }
    }

    /// Every rank with a copy of a chunk; the first owns its parameters.
    pub fn ranks(self, n_stages: u32, chunk: u32) -> impl ExactSizeIterator<Item = u32> {
        (0..self.n_copies()).map(move |copy| self.seat(n_stages, chunk, copy).rank)
    }

    /// The chunks of a rank, by virtual stage.
    pub fn chunks_of(self, n_stages: u32, rank: u32) -> impl ExactSizeIterator<Item = u32> + Clone {
        let of = move |virtual_stage| self.chunk(n_stages, Seat { rank, virtual_stage });
        (0..self.n_virtual_stages()).map(of)
    }

    /// Whether chunks of a virtual stage rise from the last rank to the first.
    fn runs_up(self, virtual_stage: u32) -> bool {
        match self {
            Self::Looped { .. } => false,
            Self::Waves { .. } | Self::Bidirectional => virtual_stage % 2 == 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seat_and_its_chunk_find_each_other() {
        let placements = [
            Placement::Looped { virtual_stages: 3 },
            Placement::Waves { virtual_stages: 4 },
            Placement::Bidirectional,
        ];
        for placement in placements {
            let mut held = Vec::new();
            for rank in 0..4 {
                held.extend(placement.chunks_of(4, rank));
                for virtual_stage in 0..placement.n_virtual_stages() {
                    let seat = Seat { rank, virtual_stage };
                    let chunk = placement.chunk(4, seat);
                    let copy = (0..2).find(|&m| placement.seat(4, chunk, m) == seat);
                    assert!(copy.is_some(), "{placement:?} {seat:?}");
                    assert!(placement.ranks(4, chunk).any(|own| own == rank));
                }
            }
            held.sort_unstable();
            let copies = placement.n_copies();
            let expected: Vec<u32> =
                (0..placement.n_chunks(4)).flat_map(|c| (0..copies).map(move |_| c)).collect();
            assert_eq!(held, expected, "{placement:?}");
        }
    }

    #[test]
    fn a_v_has_the_first_and_the_last_chunk_on_the_first_rank() {
        let v = Placement::Waves { virtual_stages: 2 };
        let chunks_of = |rank| v.chunks_of(4, rank).collect::<Vec<_>>();
        assert_eq!((chunks_of(0), chunks_of(3)), (vec![0, 7], vec![3, 4]));
    }
}
