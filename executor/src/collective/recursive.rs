//! By doubling and halving distances, for any number of members.
//!
//! Gathering, a member holds the blocks of the `d` members from itself on and sends as many as are still missing to the
//! member `d` before it; d = 1, 2, 4, ... Scattering runs the same messages backwards.
//!
//! Bruck et al. 1997, "Efficient algorithms for all-to-all communications in multiport message-passing systems".

use super::team::{Post, Team, pieces};
use crate::element::{Element, Reduce};
use crate::error::ExecutorError;

/// Blocks travel alone, so that each may have its own length.
pub(super) fn all_gather<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    own: Vec<E>,
) -> Result<Vec<Vec<E>>, ExecutorError> {
    let n = team.n();
    // From this member on.
    let mut held = vec![own];
    while held.len() < n {
        let distance = held.len();
        let count = distance.min(n - distance);
        for block in &held[..count] {
            post.send(team.member_before(distance), block.clone())?;
        }
        for _ in 0..count {
            held.push(post.take(team.member_after(distance))?);
        }
    }
    held.rotate_right(team.position);
    Ok(held)
}

/// Parts for far members go first, half of the way each time.
pub(super) fn reduce_scatter<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    mut parts: Vec<Vec<E>>,
    reduce: Reduce,
) -> Result<Vec<E>, ExecutorError> {
    let n = team.n();
    parts.rotate_left(team.position);
    let mut distance = n.next_power_of_two() / 2;
    while distance > 0 && n > 1 {
        let outgoing = parts.split_off(distance.min(parts.len()));
        let count = outgoing.len();
        post.send(team.member_after(distance), outgoing.concat())?;
        let own = &parts[..count];
        let lens: Vec<usize> = own.iter().map(Vec::len).collect();
        let arrived = post.take_len(team.member_before(distance), lens.iter().sum())?;
        for (own, arrived) in parts.iter_mut().zip(pieces(&arrived, lens.into_iter())) {
            for (own, arrived) in own.iter_mut().zip(arrived) {
                *own = reduce.combine(arrived, *own);
            }
        }
        distance /= 2;
    }
    Ok(parts.into_iter().next().unwrap_or_default())
}
