//! Around a ring, and directly: Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations
//! in MPICH".

use super::team::{Post, Team, chunks};
use crate::element::{Element, Reduce};
use crate::error::ExecutorError;

/// Hop by hop, passes on the block that came last, beginning with the own one.
pub(super) fn all_gather<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    own: Vec<E>,
) -> Result<Vec<Vec<E>>, ExecutorError> {
    let mut blocks = vec![Vec::new(); team.n()];
    blocks[team.position] = own;
    for hop in 0..team.n() - 1 {
        post.send(team.member_after(1), blocks[team.before(hop)].clone())?;
        blocks[team.before(hop + 1)] = post.take(team.member_before(1))?;
    }
    Ok(blocks)
}

/// Hop by hop, adds the own part to the sum that came in and passes it on; the last one is this member's own.
pub(super) fn reduce_scatter<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    mut parts: Vec<Vec<E>>,
    reduce: Reduce,
) -> Result<Vec<E>, ExecutorError> {
    for hop in 1..team.n() {
        let outgoing = std::mem::take(&mut parts[team.before(hop)]);
        post.send(team.member_after(1), outgoing)?;
        post.take_into(team.member_before(1), &mut parts[team.before(hop + 1)], reduce)?;
    }
    Ok(std::mem::take(&mut parts[team.position]))
}

/// A reduce-scatter of chunks, then their all-gather.
pub(super) fn all_reduce<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    data: Vec<E>,
    reduce: Reduce,
) -> Result<Vec<E>, ExecutorError> {
    let own = reduce_scatter(post, team, chunks(&data, team.n()), reduce)?;
    Ok(all_gather(post, team, own)?.concat())
}

/// From member to member, starting at the root, which alone has something.
pub(super) fn broadcast<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    root: usize,
    own: Option<Vec<E>>,
) -> Result<Vec<E>, ExecutorError> {
    let data = match own {
        Some(data) => data,
        None => post.take(team.member_before(1))?,
    };
    if team.after(1) != root {
        post.send(team.member_after(1), data.clone())?;
    }
    Ok(data)
}

/// In step s, sends to the s-th member after this one and receives from the s-th before it.
pub(super) fn exchange<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    mut parts: Vec<Vec<E>>,
) -> Result<Vec<Vec<E>>, ExecutorError> {
    let mut blocks = vec![Vec::new(); team.n()];
    blocks[team.position] = std::mem::take(&mut parts[team.position]);
    for step in 1..team.n() {
        let outgoing = std::mem::take(&mut parts[team.after(step)]);
        post.send(team.member_after(step), outgoing)?;
        blocks[team.before(step)] = post.take(team.member_before(step))?;
    }
    Ok(blocks)
}
