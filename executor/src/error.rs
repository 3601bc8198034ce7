//! What can go wrong while ranks run: each error names ranks and the instructions they were in.

use std::fmt;

use thiserror::Error;

use ir::lower::LowerError;
use ir::schedule::ScheduleError;

use crate::instruction::{Instruction, Listed};
use crate::kernels::KernelError;

/// Why a run stopped. When a run fails, every rank that is still in it gets the same error.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ExecutorError {
    /// Two ranks disagree on which collective comes next between them.
    #[error("mismatched collective: rank {rank} is in {own}, but rank {peer} sent it {theirs}")]
    Mismatch {
        /// The rank that noticed.
        rank: usize,
        /// What it is doing.
        own: Box<Instruction>,
        /// The rank whose message it read.
        peer: usize,
        /// What that rank was doing.
        theirs: Box<Instruction>,
    },
    /// A tensor or block of the wrong size.
    #[error("rank {rank} in {instruction}: {what} has {found} elements, expected {expected}")]
    WrongLength {
        /// The rank that noticed.
        rank: usize,
        /// What it is doing.
        instruction: Box<Instruction>,
        /// Which block, in words.
        what: String,
        /// Elements it has.
        found: usize,
        /// Elements it should have.
        expected: usize,
    },
    /// A communication that makes no sense whatever the other ranks do.
    #[error("rank {rank} in {instruction}: {reason}")]
    BadCall {
        /// The rank that made it.
        rank: usize,
        /// What it asked for.
        instruction: Box<Instruction>,
        /// What is wrong.
        reason: String,
    },
    /// Every unfinished rank waits for a message that nobody will send.
    #[error("deadlock: {}", describe_deadlock(.waiting, .finished))]
    Deadlock {
        /// The waiting ranks; those that explain the others (a cycle, or who waits for a finished rank) come first.
        waiting: Vec<Waiting>,
        /// The ranks that have finished.
        finished: Vec<usize>,
    },
    /// All ranks finished, but not every message was received.
    #[error("rank {rank} has finished without receiving what rank {from} sent it in {instruction}")]
    Unread {
        /// The rank that should have received.
        rank: usize,
        /// The rank that sent.
        from: usize,
        /// What the sender was doing.
        instruction: Box<Instruction>,
    },
    /// The code of a rank panicked.
    #[error("rank {rank} panicked {}: {message}", after(.last))]
    Panicked {
        /// The rank.
        rank: usize,
        /// The last communication it had entered.
        last: Option<Box<Instruction>>,
        /// The panic's own words.
        message: String,
    },
    /// The code of a rank returned an error of its own.
    #[error("rank {rank} stopped {}: {source}", after(.last))]
    Rank {
        /// The rank.
        rank: usize,
        /// The last communication it had entered.
        last: Option<Box<Instruction>>,
        /// The error it returned.
        source: Box<ExecutorError>,
    },
    /// The parts of a run do not fit together.
    #[error("{0}")]
    Unfit(String),
    /// A choice that has no program.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// A table of actions that cannot run.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// A kernel refused a call.
    #[error("{place}: {source}")]
    Kernel {
        /// Layer, section and operator.
        place: String,
        /// The kernel's own words.
        source: KernelError,
    },
    /// A program reads a value that is not there, leaves one behind, or has one of the wrong shape.
    #[error("{place}: `{tensor}` {what}")]
    Value {
        /// Layer and section.
        place: String,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        what: String,
    },
    /// Two ranks hold different numbers for the same element.
    #[error("{what}: element {element} is {} on rank {} and {} on rank {}", values.0, ranks.0, values.1, ranks.1)]
    Disagreement {
        /// Of which tensor.
        what: String,
        /// Position in the whole tensor.
        element: usize,
        /// The two ranks.
        ranks: (usize, usize),
        /// What they hold.
        values: (f64, f64),
    },
    /// No rank holds an element.
    #[error("{what}: no rank holds element {element}")]
    Hole {
        /// Of which tensor.
        what: String,
        /// Position in the whole tensor.
        element: usize,
    },
    /// The system refused a thread.
    #[error("no thread for rank {rank} of {n_ranks}: {reason}")]
    NoThread {
        /// The first rank without one.
        rank: usize,
        /// Ranks asked for.
        n_ranks: usize,
        /// The system's words.
        reason: String,
    },
}

/// A rank that waits for a message in a deadlock.
#[derive(Clone, Debug, PartialEq)]
pub struct Waiting {
    /// The rank.
    pub rank: usize,
    /// The rank whose message it needs.
    pub from: usize,
    /// What it is doing.
    pub instruction: Instruction,
    /// What `from` did send and this rank has not asked for.
    pub unread: Vec<Instruction>,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} waits for rank {} in {}", self.rank, self.from, self.instruction)?;
        match self.unread.first() {
            Some(unread) => write!(f, " (that rank sent it {unread} instead)"),
            None => Ok(()),
        }
    }
}

fn describe_deadlock(waiting: &[Waiting], finished: &[usize]) -> String {
    let mut clauses: Vec<String> = waiting.iter().take(Listed::SHOWN).map(Waiting::to_string).collect();
    if waiting.len() > Listed::SHOWN {
        clauses.push(format!("{} more ranks wait", waiting.len() - Listed::SHOWN));
    }
    if !finished.is_empty() {
        clauses.push(format!("ranks {} have finished", Listed(finished)));
    }
    clauses.join("; ")
}

fn after(last: &Option<Box<Instruction>>) -> String {
    match last {
        Some(instruction) => format!("after {instruction}"),
        None => "before its first communication".to_owned(),
    }
}
