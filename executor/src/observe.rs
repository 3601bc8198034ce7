//! What every rank does, told as it happens: for progress bars and traces. Whoever listens may look at a clock;
//! nothing here does, and nothing depends on what is heard.

use ir::collective::{Algorithm, CollectiveKind};
use ir::schedule::Action;

use crate::instruction::Tag;

/// What a rank begins.
#[derive(Clone, Copy, Debug)]
pub enum Activity<'a> {
    /// An action of the table.
    Action {
        /// Step of the run, from zero.
        step: u32,
        /// The action.
        action: Action,
        /// Position of its chunk.
        chunk: u32,
    },
    /// The end of a step: gradients are finished, parameters updated and stored.
    Update {
        /// Step of the run, from zero.
        step: u32,
    },
    /// A collective, or one end of a message.
    Communication {
        /// What kind of.
        kind: CollectiveKind,
        /// By which messages.
        algorithm: Algorithm,
        /// What it is for.
        tag: &'a Tag,
    },
}

/// Bytes that a rank moved while it did something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Sent, as they are counted.
    pub sent: u64,
    /// Received.
    pub received: u64,
}

/// Somebody who is told, on the thread of the rank. What a rank begins last it ends first.
pub trait Observer: Sync {
    /// A rank begins something.
    fn begins(&self, rank: usize, activity: Activity<'_>);
    /// A rank ends what it began last.
    fn ends(&self, rank: usize, moved: Moved);
}

/// Nobody.
#[derive(Clone, Copy, Debug)]
pub struct Nobody;

impl Observer for Nobody {
    fn begins(&self, _rank: usize, _activity: Activity<'_>) {}

    fn ends(&self, _rank: usize, _moved: Moved) {}
}
