//! Why a schedule has no table, or why a table is wrong: rank, action and cause.

use thiserror::Error;

use super::{Action, MAX_ACTIONS};

/// Why a schedule has no table, or why a table is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ScheduleError {
    /// A count is zero.
    #[error("a pipeline needs at least one stage, one virtual stage, one micro-batch and one slice")]
    Empty,
    /// A sequence in one piece has another schedule.
    #[error("sequences are cut into at least 2 slices; with 1, use `1f1b` or `gpipe`")]
    NotSliced,
    /// Interleaving over one virtual stage is another schedule.
    #[error("`interleaved` needs at least 2 virtual stages; with 1, use `1f1b`")]
    NotInterleaved,
    /// Megatron's interleaved order takes micro-batches in groups of the pipeline's length.
    #[error("`interleaved` needs micro-batches in multiples of {n_stages} stages, found {n_micro_batches}")]
    NotAMultiple {
        /// Micro-batches asked for.
        n_micro_batches: u32,
        /// Pipeline ranks.
        n_stages: u32,
    },
    /// The schedule's warm-up and cool-down take more micro-batches than there are.
    #[error("`dualpipe-v` needs at least {needed} micro-batches, two per stage, found {n_micro_batches}")]
    TooFewMicroBatches {
        /// Least micro-batches.
        needed: u64,
        /// Micro-batches asked for.
        n_micro_batches: u32,
    },
    /// A custom schedule is nothing but its table.
    #[error("a `custom` schedule needs a `table`")]
    NoRule,
    /// The rule came to an end before its table did.
    #[error("no table of this schedule for {n_stages} stages and {n_micro_batches} micro-batches was found")]
    Stuck {
        /// Pipeline ranks.
        n_stages: u32,
        /// Micro-batches.
        n_micro_batches: u32,
    },
    /// In the middle of an odd pipeline both copies of a chunk would be on one rank.
    #[error("a bidirectional placement needs an even number of stages, found {n_stages}")]
    OddBidirectional {
        /// Pipeline ranks.
        n_stages: u32,
    },
    /// More actions than `MAX_ACTIONS`.
    #[error("a table of {n_actions} actions is above the limit of {MAX_ACTIONS}")]
    TooLarge {
        /// Actions the table would have.
        n_actions: u64,
    },
    /// An action names another rank, a virtual stage or micro-batch that does not exist, or a copy of the chunk that
    /// its micro-batch does not run on.
    #[error("rank {rank}: {action} (marked rank {}) does not belong in this table", action.rank)]
    OutOfPlace {
        /// Row of the table.
        rank: u32,
        /// The stray action.
        action: Action,
    },
    /// An action is listed twice, or backward both whole and in parts.
    #[error("rank {rank}: {action} is listed twice")]
    Twice {
        /// Row of the table.
        rank: u32,
        /// The repeated action.
        action: Action,
    },
    /// An action is not listed.
    #[error("rank {rank}: {action} is missing")]
    Missing {
        /// Row of the table.
        rank: u32,
        /// The absent action.
        action: Action,
    },
    /// A slice's keys are needed by those behind it, and the gradients of its keys come from them.
    #[error(
        "rank {rank}: {action} stands where slice {due} is due: forwards take the slices of a micro-batch in order, \
         backwards from the last to the first"
    )]
    SliceOrder {
        /// Row of the table.
        rank: u32,
        /// The action that comes too early.
        action: Action,
        /// The slice that should have come.
        due: u32,
    },
    /// A rank waits for something that never comes.
    #[error("rank {rank}: {action} waits for ever on {needs} of rank {}", needs.rank)]
    Deadlock {
        /// A rank that cannot go on, one of a circle.
        rank: u32,
        /// What it tries to run.
        action: Action,
        /// What it needs first.
        needs: Action,
    },
}
