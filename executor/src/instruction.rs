//! What a rank is doing when it communicates: operation, tag, group and lengths.
//!
//! Every message carries the instruction of its sender. Two ranks agree exactly when their instructions are
//! equal, and an error can name both sides.

use std::fmt;
use std::sync::Arc;

use ir::collective::Algorithm;

use crate::element::Reduce;

/// Names one communication of the program: the label is its class, the sequence number tells its repetitions apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tag {
    label: Arc<str>,
    seq: u64,
}

impl Tag {
    /// A tag; clones share the label, so it pays to make the `Arc<str>` once per instruction of the program.
    pub fn new(label: impl Into<Arc<str>>, seq: u64) -> Self {
        Self { label: label.into(), seq }
    }

    /// The class of the communication: bytes are counted per label.
    pub fn label(&self) -> &Arc<str> {
        &self.label
    }

    /// Which repetition this is.
    pub fn seq(&self) -> u64 {
        self.seq
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` #{}", self.label, self.seq)
    }
}

/// The kinds of communication, as traffic is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CollectiveKind {
    /// Every member ends with the blocks of all.
    AllGather,
    /// Member i ends with the combined i-th part.
    ReduceScatter,
    /// Every member ends with the combined whole.
    AllReduce,
    /// Member i ends with the i-th part of every member.
    AllToAll,
    /// Every member ends with the root's data.
    Broadcast,
    /// One rank sends to another.
    SendReceive,
}

impl CollectiveKind {
    /// The same in a plan's words.
    pub fn of_plan(self) -> ir::collective::CollectiveKind {
        match self {
            CollectiveKind::AllGather => ir::collective::CollectiveKind::AllGather,
            CollectiveKind::ReduceScatter => ir::collective::CollectiveKind::ReduceScatter,
            CollectiveKind::AllReduce => ir::collective::CollectiveKind::AllReduce,
            CollectiveKind::AllToAll => ir::collective::CollectiveKind::AllToAll,
            CollectiveKind::Broadcast => ir::collective::CollectiveKind::Broadcast,
            CollectiveKind::SendReceive => ir::collective::CollectiveKind::SendRecv,
        }
    }

    /// How it runs unless somebody says otherwise; a message says so only then.
    fn plainest(self) -> Algorithm {
        self.of_plan().algorithms().first().copied().unwrap_or(Algorithm::Direct)
    }
}

impl fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.of_plan().name())
    }
}

/// A kind with what its members must agree on besides group and lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// See [`CollectiveKind::AllGather`].
    AllGather,
    /// See [`CollectiveKind::ReduceScatter`].
    ReduceScatter(Reduce),
    /// See [`CollectiveKind::AllReduce`].
    AllReduce(Reduce),
    /// See [`CollectiveKind::AllToAll`].
    AllToAll,
    /// See [`CollectiveKind::Broadcast`]; `root` is a rank.
    Broadcast {
        /// The rank whose data every member receives.
        root: usize,
    },
    /// See [`CollectiveKind::SendReceive`].
    SendReceive,
}

impl Operation {
    /// The kind under which its bytes are counted.
    pub fn kind(self) -> CollectiveKind {
        match self {
            Operation::AllGather => CollectiveKind::AllGather,
            Operation::ReduceScatter(_) => CollectiveKind::ReduceScatter,
            Operation::AllReduce(_) => CollectiveKind::AllReduce,
            Operation::AllToAll => CollectiveKind::AllToAll,
            Operation::Broadcast { .. } => CollectiveKind::Broadcast,
            Operation::SendReceive => CollectiveKind::SendReceive,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind())?;
        match self {
            Operation::ReduceScatter(reduce) | Operation::AllReduce(reduce) => write!(f, " ({reduce})"),
            Operation::Broadcast { root } => write!(f, " (from rank {root})"),
            Operation::AllGather | Operation::AllToAll | Operation::SendReceive => Ok(()),
        }
    }
}

/// One communication as one rank understands it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// What is done.
    pub operation: Operation,
    /// By which messages.
    pub algorithm: Algorithm,
    /// Its name in the program.
    pub tag: Tag,
    /// The ranks that take part, in group order; sender and receiver of a send-receive.
    pub group: Vec<usize>,
    /// The lengths in elements that all members must agree on; empty where lengths are each member's own affair.
    pub lens: Vec<usize>,
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.algorithm != self.operation.kind().plainest() {
            write!(f, "{} ", self.algorithm.name())?;
        }
        write!(f, "{} {} over ranks {}", self.operation, self.tag, Listed(&self.group))?;
        if self.lens.is_empty() { Ok(()) } else { write!(f, " of lengths {}", Listed(&self.lens)) }
    }
}

/// Numbers in brackets, cut after [`Listed::SHOWN`] so that a message about 64 ranks stays readable.
pub(crate) struct Listed<'a>(pub(crate) &'a [usize]);

impl Listed<'_> {
    /// Groups are rarely wider after shrinking; wider ones are recognised by their first members.
    pub(crate) const SHOWN: usize = 8;
}

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<String> = self.0.iter().take(Self::SHOWN).map(usize::to_string).collect();
        match self.0.len().checked_sub(Self::SHOWN) {
            Some(more) if more > 0 => write!(f, "[{}, and {more} more]", shown.join(", ")),
            Some(_) | None => write!(f, "[{}]", shown.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_reads_as_a_phrase() {
        let instruction = Instruction {
            operation: Operation::AllReduce(Reduce::Sum),
            algorithm: Algorithm::Ring,
            tag: Tag::new("grad wq", 3),
            group: (0..10).collect(),
            lens: vec![12],
        };
        let tree = Instruction { algorithm: Algorithm::Tree, ..instruction.clone() };
        assert!(tree.to_string().starts_with("tree all-reduce (sum) `grad wq` #3"));
        assert_eq!(
            instruction.to_string(),
            "all-reduce (sum) `grad wq` #3 over ranks [0, 1, 2, 3, 4, 5, 6, 7, and 2 more] of lengths [12]"
        );
    }
}
