//! Which buffers are alive while a section runs: results that share or take over those of what they are made from need
//! none.

use ir::program::{Instruction, ValueId};
use ir::units::Bytes;

use super::Account;
use crate::tensor_bytes::{Buffers, backward_buffers, forward_buffers};

/// Buffers alive at one point of a section. Values that share a buffer have one owner.
pub(super) struct Walk<'a> {
    account: &'a Account<'a>,
    /// Per value, whose buffer it uses; nothing where it is not there.
    owners: Vec<Option<ValueId>>,
    /// Per owner, the size of its buffer and the values that use it.
    buffers: Vec<(Bytes, u32)>,
    /// Bytes alive.
    pub(super) live: Bytes,
}

impl<'a> Walk<'a> {
    /// Where nothing is alive yet.
    pub(super) fn new(account: &'a Account<'a>) -> Self {
        let n = account.program.values.len();
        Self { account, owners: vec![None; n], buffers: vec![(Bytes::ZERO, 0); n], live: Bytes::ZERO }
    }

    /// Goes on by an instruction, with what follows it.
    pub(super) fn step(&mut self, instruction: &Instruction, rest: &[Instruction]) {
        match instruction {
            Instruction::Load { output }
            | Instruction::Parameter { output, .. }
            | Instruction::Convert { output, .. } => self.allocate(*output),
            Instruction::Forward { op, operands, results } => {
                let mode = forward_buffers(&self.account.layer.ops[op.0].kind);
                self.results(mode, operands.first().copied(), results, rest);
            }
            Instruction::Backward { op, gradients, results, .. } => {
                let mode = backward_buffers(&self.account.layer.ops[op.0].kind);
                let results: Vec<ValueId> = results.iter().flatten().copied().collect();
                self.results(mode, gradients.iter().flatten().next().copied(), &results, rest);
            }
            Instruction::Accumulate { .. } => {}
            Instruction::Free { value } => self.free(*value),
        }
    }

    fn results(&mut self, mode: Buffers, source: Option<ValueId>, results: &[ValueId], rest: &[Instruction]) {
        match (mode, source) {
            (Buffers::Shared, Some(source)) => results.iter().for_each(|&result| self.share(source, result)),
            (Buffers::TakenOver, Some(source)) if self.dies(source, rest) => {
                self.free(source);
                results.iter().for_each(|&result| self.allocate(result));
            }
            (Buffers::Shared | Buffers::TakenOver | Buffers::Own, _) => {
                results.iter().for_each(|&result| self.allocate(result));
            }
        }
    }

    /// Whether a value is freed right here and nobody else uses its buffer.
    fn dies(&self, value: ValueId, rest: &[Instruction]) -> bool {
        let frees = rest
            .iter()
            .map_while(|one| if let Instruction::Free { value } = one { Some(*value) } else { None });
        let users = self.owners[value.0].map_or(0, |owner| self.buffers[owner.0].1);
        users == 1 && frees.into_iter().any(|freed| freed == value)
    }

    /// A buffer for a value that has none yet.
    pub(super) fn allocate(&mut self, value: ValueId) {
        if self.owners[value.0].is_some() {
            return;
        }
        let bytes = self.account.bytes(self.account.program.value(value));
        self.owners[value.0] = Some(value);
        self.buffers[value.0] = (bytes, 1);
        self.live += bytes;
    }

    fn share(&mut self, source: ValueId, value: ValueId) {
        let Some(owner) = self.owners[source.0] else { return self.allocate(value) };
        if self.owners[value.0].replace(owner).is_none() {
            self.buffers[owner.0].1 += 1;
        }
    }

    /// Frees a value; once freed, a second time does nothing.
    fn free(&mut self, value: ValueId) {
        let Some(owner) = self.owners[value.0].take() else { return };
        let (bytes, users) = &mut self.buffers[owner.0];
        *users -= 1;
        if *users == 0 {
            self.live = self.live - *bytes;
        }
    }
}
