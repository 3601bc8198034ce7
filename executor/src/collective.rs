//! The collectives, as the messages they consist of. Blocks may be uneven or empty.
//!
//! An algorithm decides which messages; every member ends with the same numbers, up to the order of additions:
//! ```text
//! ring        part c is summed from member c + 1 around to member c                         ring.rs
//! tree        in group order, each inner member adding what is left and right of it         tree.rs
//! recursive   by halves of halves of the distance around the group                          recursive.rs
//! two-level   within each node as a ring, then over nodes in group order                    hierarchy.rs
//! in-switch   the same, but the last sum is in group order                                  switch.rs
//! ```
//! Nothing depends on timing, and each element of an all-reduce is summed in one place, so all members end with the
//! same bits. `cost-model::collective_loads` has the bytes that each algorithm sends; the two share no code.

use std::sync::Arc;

use ir::collective::Algorithm;

use crate::element::{Element, Reduce};
use crate::error::ExecutorError;
use crate::fabric::RankComm;
use crate::instruction::{Instruction, Operation, Tag};

mod team;

mod ring;

mod tree;

mod recursive;

mod switch;

mod hierarchy;

use hierarchy::Outermost;
use team::{Post, Team};

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

/// One rank's collectives by one algorithm.
pub struct Collectives<'c, 'a, E: Element> {
    comm: &'c mut RankComm<'a, E>,
    algorithm: Algorithm,
}

impl<'a, E: Element> RankComm<'a, E> {
    /// The collectives by an algorithm; one that the collective does not have is an error.
    pub fn by(&mut self, algorithm: Algorithm) -> Collectives<'_, 'a, E> {
        Collectives { comm: self, algorithm }
    }

    /// Sends data to one rank, without waiting for it.
    pub fn send(&mut self, to: usize, tag: Tag, data: Vec<E>) -> Result<(), ExecutorError> {
        let pair = vec![self.rank(), to];
        self.during_message(&tag.clone(), |comm| {
            let lens = vec![data.len()];
            let instruction = comm.by(Algorithm::Direct).begin(Operation::SendReceive, tag, pair, lens)?;
            comm.post(to, &instruction, data)
        })
    }

    /// Waits for what `from` sends under the same tag, which must be `len` elements.
    pub fn recv(&mut self, from: usize, tag: Tag, len: usize) -> Result<Vec<E>, ExecutorError> {
        let pair = vec![from, self.rank()];
        self.during_message(&tag.clone(), |comm| {
            let lens = vec![len];
            let instruction = comm.by(Algorithm::Direct).begin(Operation::SendReceive, tag, pair, lens)?;
            comm.take(from, &instruction)
        })
    }
}

impl<'a, E: Element> Collectives<'_, 'a, E> {
    /// Gives every member's block to every member, in group order. `lens` holds the length of each block.
    pub fn all_gather_blocks(
        &mut self,
        group: &[usize],
        tag: Tag,
        own: Vec<E>,
        lens: &[usize],
    ) -> Result<Vec<Vec<E>>, ExecutorError> {
        let (mut post, team) = self.join(Operation::AllGather, tag, group, lens.to_vec())?;
        post.check_count("lengths", lens.len(), &team)?;
        post.check_len("its own block", own.len(), lens[team.position])?;
        match post.algorithm() {
            Algorithm::Recursive => recursive::all_gather(&mut post, &team, own),
            Algorithm::TwoLevel => hierarchy::all_gather(&mut post, &team, (own, lens), Outermost::Ring),
            Algorithm::InSwitch => hierarchy::all_gather(&mut post, &team, (own, lens), Outermost::Switch),
            Algorithm::Ring | Algorithm::Tree | Algorithm::Direct => ring::all_gather(&mut post, &team, own),
        }
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
        let (mut post, team) = self.join(Operation::ReduceScatter(reduce), tag, group, lens)?;
        post.check_count("parts", parts.len(), &team)?;
        match post.algorithm() {
            Algorithm::Recursive => recursive::reduce_scatter(&mut post, &team, parts, reduce),
            Algorithm::TwoLevel => {
                hierarchy::reduce_scatter(&mut post, &team, parts, (reduce, Outermost::Ring))
            }
            Algorithm::InSwitch => {
                hierarchy::reduce_scatter(&mut post, &team, parts, (reduce, Outermost::Switch))
            }
            Algorithm::Ring | Algorithm::Tree | Algorithm::Direct => {
                ring::reduce_scatter(&mut post, &team, parts, reduce)
            }
        }
    }

    /// Combines the data of all members; all get the same bits.
    pub fn all_reduce(
        &mut self,
        group: &[usize],
        tag: Tag,
        data: Vec<E>,
        reduce: Reduce,
    ) -> Result<Vec<E>, ExecutorError> {
        let (mut post, team) = self.join(Operation::AllReduce(reduce), tag, group, vec![data.len()])?;
        match post.algorithm() {
            Algorithm::Tree => tree::all_reduce(&mut post, &team, data, reduce),
            Algorithm::TwoLevel => hierarchy::all_reduce(&mut post, &team, data, (reduce, Outermost::Ring)),
            Algorithm::InSwitch => hierarchy::all_reduce(&mut post, &team, data, (reduce, Outermost::Switch)),
            Algorithm::Ring | Algorithm::Recursive | Algorithm::Direct => {
                ring::all_reduce(&mut post, &team, data, reduce)
            }
        }
    }

    /// Sends the i-th part to member i; returns what came from each member. Lengths are the senders' affair,
    /// as where routing decides them.
    pub fn all_to_all(
        &mut self,
        group: &[usize],
        tag: Tag,
        parts: Vec<Vec<E>>,
    ) -> Result<Vec<Vec<E>>, ExecutorError> {
        let (mut post, team) = self.join(Operation::AllToAll, tag, group, Vec::new())?;
        post.check_count("parts", parts.len(), &team)?;
        exchange(&mut post, &team, parts)
    }

    /// An all-to-all of known lengths: `lens[i]` elements come from member i, or it is an error.
    pub fn all_to_all_blocks(
        &mut self,
        group: &[usize],
        tag: Tag,
        parts: Vec<Vec<E>>,
        lens: &[usize],
    ) -> Result<Vec<Vec<E>>, ExecutorError> {
        let (mut post, team) = self.join(Operation::AllToAll, tag, group, Vec::new())?;
        post.check_count("parts", parts.len(), &team)?;
        post.check_count("lengths", lens.len(), &team)?;
        let blocks = exchange(&mut post, &team, parts)?;
        for (i, block) in blocks.iter().enumerate() {
            post.check_len(&format!("the block from rank {}", group[i]), block.len(), lens[i])?;
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
            Broadcast::Send(data) => (self.comm.rank(), data.len()),
            Broadcast::Receive { root, len } => (*root, *len),
        };
        let (mut post, team) = self.join(Operation::Broadcast { root }, tag, group, vec![len])?;
        let own = match data {
            Broadcast::Send(data) => Some(data),
            Broadcast::Receive { .. } if root == post.rank() => {
                return Err(post.bad_call("the root must send".to_owned()));
            }
            Broadcast::Receive { .. } => None,
        };
        let Some(root) = team.position_of(root) else {
            return Err(post.bad_call("the root is not in the group".to_owned()));
        };
        match post.algorithm() {
            Algorithm::Tree => tree::broadcast(&mut post, &team, (root, len), own),
            Algorithm::TwoLevel => hierarchy::broadcast(&mut post, &team, (root, Outermost::Ring), own),
            Algorithm::InSwitch => hierarchy::broadcast(&mut post, &team, (root, Outermost::Switch), own),
            Algorithm::Ring | Algorithm::Recursive | Algorithm::Direct => {
                ring::broadcast(&mut post, &team, root, own)
            }
        }
    }

    /// Enters an instruction as a member of its group.
    fn join(
        &mut self,
        operation: Operation,
        tag: Tag,
        group: &[usize],
        lens: Vec<usize>,
    ) -> Result<(Post<'_, 'a, E>, Team), ExecutorError> {
        let instruction = self.begin(operation, tag, group.to_vec(), lens)?;
        let post = Post::new(self.comm, instruction);
        match Team::of(group, post.rank()) {
            Some(team) => Ok((post, team)),
            None => Err(post.bad_call("it is not in the group".to_owned())),
        }
    }

    /// Enters an instruction, having checked its group and algorithm.
    fn begin(
        &mut self,
        operation: Operation,
        tag: Tag,
        group: Vec<usize>,
        lens: Vec<usize>,
    ) -> Result<Arc<Instruction>, ExecutorError> {
        let algorithm = self.algorithm;
        let instruction = Arc::new(Instruction { operation, algorithm, tag, group, lens });
        self.comm.enter(&instruction)?;
        let n_ranks = self.comm.n_ranks();
        let post = Post::new(self.comm, instruction);
        let mut members = post.instruction().group.clone();
        members.sort_unstable();
        if let Some(stranger) = members.last().filter(|&&member| member >= n_ranks) {
            return Err(post.bad_call(format!("rank {stranger} does not exist; there are {n_ranks} ranks")));
        }
        if let Some(pair) = members.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(post.bad_call(format!("rank {} takes part twice", pair[0])));
        }
        if !operation.kind().of_plan().algorithms().contains(&algorithm) {
            return Err(post.bad_call(format!("it does not run as `{}`", algorithm.name())));
        }
        Ok(Arc::clone(post.instruction()))
    }
}

fn exchange<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    parts: Vec<Vec<E>>,
) -> Result<Vec<Vec<E>>, ExecutorError> {
    match post.algorithm() {
        Algorithm::TwoLevel => hierarchy::all_to_all(post, team, parts),
        Algorithm::Ring
        | Algorithm::Tree
        | Algorithm::Recursive
        | Algorithm::InSwitch
        | Algorithm::Direct => ring::exchange(post, team, parts),
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod table_tests;
