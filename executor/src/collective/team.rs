//! The members of a collective, or of one phase of it, and the mail between them.

use std::sync::Arc;

use ir::collective::Algorithm;

use crate::element::{Element, Reduce};
use crate::error::ExecutorError;
use crate::fabric::RankComm;
use crate::instruction::Instruction;

/// Some members of a group in order, and which of them this rank is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Team {
    pub(super) members: Vec<usize>,
    pub(super) position: usize,
}

impl Team {
    /// Nothing where the rank is none of the members.
    pub(super) fn of(members: &[usize], rank: usize) -> Option<Self> {
        let position = members.iter().position(|&member| member == rank)?;
        Some(Self { members: members.to_vec(), position })
    }

    pub(super) fn n(&self) -> usize {
        self.members.len()
    }

    pub(super) fn position_of(&self, rank: usize) -> Option<usize> {
        self.members.iter().position(|&member| member == rank)
    }

    /// Position `steps` before this one, `steps <= n`.
    pub(super) fn before(&self, steps: usize) -> usize {
        (self.position + self.n() - steps) % self.n()
    }

    /// Position `steps` after this one.
    pub(super) fn after(&self, steps: usize) -> usize {
        (self.position + steps) % self.n()
    }

    pub(super) fn member_before(&self, steps: usize) -> usize {
        self.members[self.before(steps)]
    }

    pub(super) fn member_after(&self, steps: usize) -> usize {
        self.members[self.after(steps)]
    }
}

/// The mail of one rank in one collective.
pub(super) struct Post<'c, 'a, E: Element> {
    comm: &'c mut RankComm<'a, E>,
    instruction: Arc<Instruction>,
}

impl<'c, 'a, E: Element> Post<'c, 'a, E> {
    pub(super) fn new(comm: &'c mut RankComm<'a, E>, instruction: Arc<Instruction>) -> Self {
        Self { comm, instruction }
    }

    pub(super) fn rank(&self) -> usize {
        self.comm.rank()
    }

    pub(super) fn instruction(&self) -> &Arc<Instruction> {
        &self.instruction
    }

    pub(super) fn algorithm(&self) -> Algorithm {
        self.instruction.algorithm
    }

    pub(super) fn tier_of(&self, a: usize, b: usize) -> usize {
        self.comm.tier_of(a, b)
    }

    pub(super) fn send(&mut self, to: usize, data: Vec<E>) -> Result<(), ExecutorError> {
        self.comm.post(to, &self.instruction, data)
    }

    /// Sends to the switch of a tier, which `host` plays.
    pub(super) fn send_up(&mut self, tier: usize, host: usize, data: Vec<E>) -> Result<(), ExecutorError> {
        self.comm.post_over(tier, (host, &self.instruction), data)
    }

    /// Sends as the switch.
    pub(super) fn send_down(&self, to: usize, data: Vec<E>) -> Result<(), ExecutorError> {
        self.comm.deliver(to, &self.instruction, data)
    }

    pub(super) fn take(&self, from: usize) -> Result<Vec<E>, ExecutorError> {
        self.comm.take(from, &self.instruction)
    }

    /// A message of known length.
    pub(super) fn take_len(&self, from: usize, len: usize) -> Result<Vec<E>, ExecutorError> {
        let data = self.take(from)?;
        self.check_len("the part that arrived", data.len(), len)?;
        Ok(data)
    }

    /// Combines what arrives from a rank with what is here, in that order.
    pub(super) fn take_into(&self, from: usize, own: &mut [E], reduce: Reduce) -> Result<(), ExecutorError> {
        let arrived = self.take_len(from, own.len())?;
        for (own, arrived) in own.iter_mut().zip(arrived) {
            *own = reduce.combine(arrived, *own);
        }
        Ok(())
    }

    pub(super) fn check_count(&self, what: &str, found: usize, team: &Team) -> Result<(), ExecutorError> {
        if found == team.n() {
            return Ok(());
        }
        Err(self.bad_call(format!("{found} {what} for {} members", team.n())))
    }

    pub(super) fn check_len(&self, what: &str, found: usize, expected: usize) -> Result<(), ExecutorError> {
        if found == expected {
            return Ok(());
        }
        let (instruction, what) = (Box::new(self.instruction.as_ref().clone()), what.to_owned());
        Err(self.comm.fail(ExecutorError::WrongLength {
            rank: self.rank(),
            instruction,
            what,
            found,
            expected,
        }))
    }

    pub(super) fn bad_call(&self, reason: String) -> ExecutorError {
        let instruction = Box::new(self.instruction.as_ref().clone());
        self.comm.fail(ExecutorError::BadCall { rank: self.rank(), instruction, reason })
    }
}

/// `data` in `n` chunks of equal length, the last ones short or empty.
pub(super) fn chunks<E: Element>(data: &[E], n: usize) -> Vec<Vec<E>> {
    let chunk_len = data.len().div_ceil(n).max(1);
    let mut chunks: Vec<Vec<E>> = data.chunks(chunk_len).map(<[E]>::to_vec).collect();
    chunks.resize_with(n, Vec::new);
    chunks
}

/// `data` in pieces of the given lengths.
pub(super) fn pieces<E: Element>(data: &[E], lens: impl Iterator<Item = usize>) -> Vec<Vec<E>> {
    let cut = |at: &mut usize, len: usize| {
        let start = (*at).min(data.len());
        *at = (start + len).min(data.len());
        Some(data[start..*at].to_vec())
    };
    lens.scan(0, cut).collect()
}
