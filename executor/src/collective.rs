//! The collectives, as the messages they consist of. Blocks may be uneven or empty.
//!
//! With n members and S bytes (all blocks together; for an all-reduce the whole tensor), all members send:
//! ```text
//! all-gather       (n - 1) * S      every block travels n - 1 hops around the ring
//! reduce-scatter   (n - 1) * S      every part does, and grows by one addend at each hop
//! all-reduce   2 * (n - 1) * S      a reduce-scatter of chunks of ceil(len / n), then their all-gather
//! all-to-all       what is not on the diagonal, directly
//! broadcast        (n - 1) * S      from member to member, starting at the root
//! ```
//! Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations in MPICH".
//!
//! Additions run in ring order: part c is summed from member c + 1 around to member c. Nothing depends on timing,
//! and as each chunk of an all-reduce is summed in one place, all members end with the same bits.

use std::sync::Arc;

use crate::element::{Element, Reduce};
use crate::error::ExecutorError;
use crate::fabric::RankComm;
use crate::instruction::{Instruction, Operation, Tag};

/// What one member brings to a broadcast.
#[derive(Clone, Debug, PartialEq)]
pub enum Broadcast<E> {
    /// This member is the root.
    Send(Vec<E>),
    /// Another rank is.
    Receive {
        /// The rank that sends.
        root: usize,
        /// Elements it sends.
        len: usize,
    },
}

impl<E: Element> RankComm<'_, E> {
    /// Gives every member's block to every member, in group order. `lens` holds the length of each block.
    pub fn all_gather_blocks(
        &mut self,
        group: &[usize],
        tag: Tag,
        own: Vec<E>,
        lens: &[usize],
    ) -> Result<Vec<Vec<E>>, ExecutorError> {
        let ring = self.join(Operation::AllGather, tag, group, lens.to_vec())?;
        self.check_count(&ring, "lengths", lens.len())?;
        self.check_len(&ring, "its own block", own.len(), lens[ring.position])?;
        self.gather_around(&ring, own)
    }

    /// Combines the i-th parts of all members and gives the result to member i.
    pub fn reduce_scatter_blocks(
        &mut self,
        group: &[usize],
        tag: Tag,
        parts: Vec<Vec<E>>,
        reduce: Reduce,
    ) -> Result<Vec<E>, ExecutorError> {
        let lens = parts.iter().map(Vec::len).collect();
        let ring = self.join(Operation::ReduceScatter(reduce), tag, group, lens)?;
        self.check_count(&ring, "parts", parts.len())?;
        self.reduce_around(&ring, parts, reduce)
    }

    /// Combines the data of all members; all get the same bits.
    pub fn all_reduce(
        &mut self,
        group: &[usize],
        tag: Tag,
        data: Vec<E>,
        reduce: Reduce,
    ) -> Result<Vec<E>, ExecutorError> {
        let ring = self.join(Operation::AllReduce(reduce), tag, group, vec![data.len()])?;
        let chunk_len = data.len().div_ceil(ring.n()).max(1);
        let mut chunks: Vec<Vec<E>> = data.chunks(chunk_len).map(<[E]>::to_vec).collect();
        chunks.resize_with(ring.n(), Vec::new);
        let own = self.reduce_around(&ring, chunks, reduce)?;
        Ok(self.gather_around(&ring, own)?.concat())
    }

    /// Sends the i-th part to member i; returns what came from each member. Lengths are the senders' affair,
    /// as where routing decides them.
    pub fn all_to_all(
        &mut self,
        group: &[usize],
        tag: Tag,
        parts: Vec<Vec<E>>,
    ) -> Result<Vec<Vec<E>>, ExecutorError> {
        let ring = self.join(Operation::AllToAll, tag, group, Vec::new())?;
        self.check_count(&ring, "parts", parts.len())?;
        self.exchange_pairwise(&ring, parts)
    }

    /// An all-to-all of known lengths: `lens[i]` elements come from member i, or it is an error.
    pub fn all_to_all_blocks(
        &mut self,
        group: &[usize],
        tag: Tag,
        parts: Vec<Vec<E>>,
        lens: &[usize],
    ) -> Result<Vec<Vec<E>>, ExecutorError> {
        let ring = self.join(Operation::AllToAll, tag, group, Vec::new())?;
        self.check_count(&ring, "parts", parts.len())?;
        self.check_count(&ring, "lengths", lens.len())?;
        let blocks = self.exchange_pairwise(&ring, parts)?;
        for (i, block) in blocks.iter().enumerate() {
            self.check_len(&ring, &format!("the block from rank {}", group[i]), block.len(), lens[i])?;
        }
        Ok(blocks)
    }

    /// Gives the root's data to every member.
    pub fn broadcast(
        &mut self,
        group: &[usize],
        tag: Tag,
        data: Broadcast<E>,
    ) -> Result<Vec<E>, ExecutorError> {
        let (root, len) = match &data {
            Broadcast::Send(data) => (self.rank(), data.len()),
            Broadcast::Receive { root, len } => (*root, *len),
        };
        let ring = self.join(Operation::Broadcast { root }, tag, group, vec![len])?;
        let data = match data {
            Broadcast::Send(data) => data,
            Broadcast::Receive { .. } if root == self.rank() => {
                return Err(self.bad_call(&ring.instruction, "the root must send".to_owned()));
            }
            Broadcast::Receive { .. } if !group.contains(&root) => {
                return Err(self.bad_call(&ring.instruction, "the root is not in the group".to_owned()));
            }
            Broadcast::Receive { .. } => self.take(ring.member_before(1), &ring.instruction)?,
        };
        if ring.member_after(1) != root {
            self.post(ring.member_after(1), &ring.instruction, data.clone())?;
        }
        Ok(data)
    }

    /// Sends data to one rank, without waiting for it.
    pub fn send(&mut self, to: usize, tag: Tag, data: Vec<E>) -> Result<(), ExecutorError> {
        let pair = vec![self.rank(), to];
        let instruction = self.begin(Operation::SendReceive, tag, pair, vec![data.len()])?;
        self.post(to, &instruction, data)
    }

    /// Waits for what `from` sends under the same tag, which must be `len` elements.
    pub fn recv(&mut self, from: usize, tag: Tag, len: usize) -> Result<Vec<E>, ExecutorError> {
        let pair = vec![from, self.rank()];
        let instruction = self.begin(Operation::SendReceive, tag, pair, vec![len])?;
        self.take(from, &instruction)
    }

    /// Hop by hop, passes on the block that came last, beginning with the own one.
    fn gather_around(&mut self, ring: &Ring, own: Vec<E>) -> Result<Vec<Vec<E>>, ExecutorError> {
        let mut blocks = vec![Vec::new(); ring.n()];
        blocks[ring.position] = own;
        for hop in 0..ring.n() - 1 {
            let outgoing = blocks[ring.before(hop)].clone();
            self.post(ring.member_after(1), &ring.instruction, outgoing)?;
            blocks[ring.before(hop + 1)] = self.take(ring.member_before(1), &ring.instruction)?;
        }
        Ok(blocks)
    }

    /// Hop by hop, adds the own part to the sum that came in and passes it on; the last one is this member's own.
    fn reduce_around(
        &mut self,
        ring: &Ring,
        mut parts: Vec<Vec<E>>,
        reduce: Reduce,
    ) -> Result<Vec<E>, ExecutorError> {
        for hop in 1..ring.n() {
            let outgoing = std::mem::take(&mut parts[ring.before(hop)]);
            self.post(ring.member_after(1), &ring.instruction, outgoing)?;
            let arrived = self.take(ring.member_before(1), &ring.instruction)?;
            let own = &mut parts[ring.before(hop + 1)];
            self.check_len(ring, "the part that arrived", arrived.len(), own.len())?;
            for (own, arrived) in own.iter_mut().zip(arrived) {
                *own = reduce.combine(arrived, *own);
            }
        }
        Ok(std::mem::take(&mut parts[ring.position]))
    }

    /// In step s, sends to the s-th member after this one and receives from the s-th before it.
    fn exchange_pairwise(
        &mut self,
        ring: &Ring,
        mut parts: Vec<Vec<E>>,
    ) -> Result<Vec<Vec<E>>, ExecutorError> {
        let mut blocks = vec![Vec::new(); ring.n()];
        blocks[ring.position] = std::mem::take(&mut parts[ring.position]);
        for step in 1..ring.n() {
            let outgoing = std::mem::take(&mut parts[ring.after(step)]);
            self.post(ring.member_after(step), &ring.instruction, outgoing)?;
            blocks[ring.before(step)] = self.take(ring.member_before(step), &ring.instruction)?;
        }
        Ok(blocks)
    }

    fn join(
        &self,
        operation: Operation,
        tag: Tag,
        group: &[usize],
        lens: Vec<usize>,
    ) -> Result<Ring, ExecutorError> {
        let instruction = self.begin(operation, tag, group.to_vec(), lens)?;
        match group.iter().position(|&member| member == self.rank()) {
            Some(position) => Ok(Ring { instruction, position }),
            None => Err(self.bad_call(&instruction, "it is not in the group".to_owned())),
        }
    }

    /// Enters an instruction, having checked its group.
    fn begin(
        &self,
        operation: Operation,
        tag: Tag,
        group: Vec<usize>,
        lens: Vec<usize>,
    ) -> Result<Arc<Instruction>, ExecutorError> {
        let instruction = Arc::new(Instruction { operation, tag, group, lens });
        self.enter(&instruction)?;
        let mut members = instruction.group.clone();
        members.sort_unstable();
        if let Some(stranger) = members.last().filter(|&&member| member >= self.n_ranks()) {
            let reason = format!("rank {stranger} does not exist; there are {} ranks", self.n_ranks());
            return Err(self.bad_call(&instruction, reason));
        }
        if let Some(pair) = members.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(self.bad_call(&instruction, format!("rank {} takes part twice", pair[0])));
        }
        Ok(instruction)
    }

    fn check_count(&self, ring: &Ring, what: &str, found: usize) -> Result<(), ExecutorError> {
        if found == ring.n() {
            return Ok(());
        }
        Err(self.bad_call(&ring.instruction, format!("{found} {what} for {} members", ring.n())))
    }

    fn check_len(&self, ring: &Ring, what: &str, found: usize, expected: usize) -> Result<(), ExecutorError> {
        if found == expected {
            return Ok(());
        }
        let (instruction, what) = (Box::new(ring.instruction.as_ref().clone()), what.to_owned());
        Err(self.fail(ExecutorError::WrongLength { rank: self.rank(), instruction, what, found, expected }))
    }

    fn bad_call(&self, instruction: &Instruction, reason: String) -> ExecutorError {
        let instruction = Box::new(instruction.clone());
        self.fail(ExecutorError::BadCall { rank: self.rank(), instruction, reason })
    }
}

/// A member's place in the ring that the group forms in its own order.
struct Ring {
    instruction: Arc<Instruction>,
    position: usize,
}

impl Ring {
    fn n(&self) -> usize {
        self.instruction.group.len()
    }

    /// Position `steps` before this one, `steps <= n`.
    fn before(&self, steps: usize) -> usize {
        (self.position + self.n() - steps) % self.n()
    }

    /// Position `steps` after this one.
    fn after(&self, steps: usize) -> usize {
        (self.position + steps) % self.n()
    }

    fn member_before(&self, steps: usize) -> usize {
        self.instruction.group[self.before(steps)]
    }

    fn member_after(&self, steps: usize) -> usize {
        self.instruction.group[self.after(steps)]
    }
}

#[cfg(test)]
mod tests;
