//! Through the switch of a tier, which adds up what comes in and copies it to where it is wanted (NVLS, SHARP).
//!
//! Every member sends its data once and receives once. The first member's thread plays the switch beside its own part;
//! what the switch sends is counted by nobody, for counts are of what ranks send. It adds in group order.
//!
//! Graham et al. 2016, "Scalable Hierarchical Aggregation Protocol (SHArP)".

use super::team::{Post, Team};
use crate::element::{Element, Reduce};
use crate::error::ExecutorError;

/// All members get the sum.
pub(super) fn all_reduce<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    data: Vec<E>,
    reduce: Reduce,
) -> Result<Vec<E>, ExecutorError> {
    if team.n() == 1 {
        return Ok(data);
    }
    let len = data.len();
    send_up(post, team, data)?;
    if team.position == 0 {
        let total = gather_sum(post, team, len, reduce)?;
        team.members.iter().try_for_each(|&member| post.send_down(member, total.clone()))?;
    }
    post.take_len(team.members[0], len)
}

/// Member i gets the sum of the i-th parts.
pub(super) fn reduce_scatter<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    mut parts: Vec<Vec<E>>,
    reduce: Reduce,
) -> Result<Vec<E>, ExecutorError> {
    if team.n() == 1 {
        return Ok(std::mem::take(&mut parts[0]));
    }
    let lens: Vec<usize> = parts.iter().map(Vec::len).collect();
    send_up(post, team, parts.concat())?;
    if team.position == 0 {
        let total = gather_sum(post, team, lens.iter().sum(), reduce)?;
        let sums = super::team::pieces(&total, lens.iter().copied());
        team.members.iter().zip(sums).try_for_each(|(&member, sum)| post.send_down(member, sum))?;
    }
    post.take_len(team.members[0], lens[team.position])
}

/// Each block is copied to every member; blocks come down in group order.
pub(super) fn all_gather<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    own: Vec<E>,
) -> Result<Vec<Vec<E>>, ExecutorError> {
    if team.n() == 1 {
        return Ok(vec![own]);
    }
    send_up(post, team, own)?;
    if team.position == 0 {
        let blocks = team.members.iter().map(|&member| post.take(member)).collect::<Result<Vec<_>, _>>()?;
        for &member in &team.members {
            blocks.iter().try_for_each(|block| post.send_down(member, block.clone()))?;
        }
    }
    (0..team.n()).map(|_| post.take(team.members[0])).collect()
}

/// The root's data is copied to every other member.
pub(super) fn broadcast<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    root: usize,
    own: Option<Vec<E>>,
) -> Result<Vec<E>, ExecutorError> {
    if let Some(data) = own.as_ref().filter(|_| team.n() > 1) {
        send_up(post, team, data.clone())?;
    }
    if team.position == 0 && team.n() > 1 {
        let data = post.take(team.members[root])?;
        let others = team.members.iter().enumerate().filter(|(at, _)| *at != root);
        others.into_iter().try_for_each(|(_, &member)| post.send_down(member, data.clone()))?;
    }
    match own {
        Some(data) => Ok(data),
        None => post.take(team.members[0]),
    }
}

/// A switch joins its members over one tier: the one between any two.
fn send_up<E: Element>(post: &mut Post<'_, '_, E>, team: &Team, data: Vec<E>) -> Result<(), ExecutorError> {
    let tier = post.tier_of(team.members[0], team.members[1]);
    post.send_up(tier, team.members[0], data)
}

fn gather_sum<E: Element>(
    post: &Post<'_, '_, E>,
    team: &Team,
    len: usize,
    reduce: Reduce,
) -> Result<Vec<E>, ExecutorError> {
    let mut total = post.take_len(team.members[0], len)?;
    for &member in &team.members[1..] {
        for (total, arrived) in total.iter_mut().zip(post.take_len(member, len)?) {
            *total = reduce.combine(*total, arrived);
        }
    }
    Ok(total)
}
