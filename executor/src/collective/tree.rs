//! Up and down two complementary binary trees, half of the data on each.
//!
//! Both trees are in-order: the members left of a node in the group are in its left branch, those right of it in its
//! right one, so that sums are in group order. The second tree is the first seen from the other end of the group, or
//! shifted by one for an odd number of members: who passes data on in one is a leaf of the other, and nobody sends more
//! than two halves.
//!
//! Sanders, Speck, Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".

use std::ops::Range;

use super::team::{Post, Team};
use crate::element::{Element, Reduce};
use crate::error::ExecutorError;

/// One member's place in a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Node {
    /// Nothing for the root.
    parent: Option<usize>,
    left: Option<usize>,
    right: Option<usize>,
}

/// Both sums up to the roots, then both results down.
pub(super) fn all_reduce<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    data: Vec<E>,
    reduce: Reduce,
) -> Result<Vec<E>, ExecutorError> {
    let mut halves = split(data);
    let nodes = two_trees(&team.members, team.position);
    for (half, node) in halves.iter_mut().zip(&nodes) {
        reduce_up(post, node, half, reduce)?;
    }
    let mut whole = Vec::new();
    for (half, node) in halves.into_iter().zip(&nodes) {
        whole.extend(pass_down(post, node, half)?);
    }
    Ok(whole)
}

/// The root hands a half to the root of each tree of the others.
pub(super) fn broadcast<E: Element>(
    post: &mut Post<'_, '_, E>,
    team: &Team,
    (root, len): (usize, usize),
    own: Option<Vec<E>>,
) -> Result<Vec<E>, ExecutorError> {
    let others: Vec<usize> = (1..team.n()).map(|i| team.members[(root + i) % team.n()]).collect();
    let Some(data) = own else {
        let position = others.iter().position(|&member| member == post.rank()).unwrap_or(0);
        let mut whole = Vec::with_capacity(len);
        for (half, node) in [len.div_ceil(2), len / 2].into_iter().zip(two_trees(&others, position)) {
            let half = post.take_len(node.parent.unwrap_or(team.members[root]), half)?;
            send_down(post, &node, &half)?;
            whole.extend(half);
        }
        return Ok(whole);
    };
    for (half, top) in split(data.clone()).into_iter().zip(tops(&others)) {
        if let Some(top) = top {
            post.send(top, half)?;
        }
    }
    Ok(data)
}

fn split<E: Element>(mut data: Vec<E>) -> [Vec<E>; 2] {
    let second = data.split_off(data.len().div_ceil(2));
    [data, second]
}

fn reduce_up<E: Element>(
    post: &mut Post<'_, '_, E>,
    node: &Node,
    half: &mut Vec<E>,
    reduce: Reduce,
) -> Result<(), ExecutorError> {
    if let Some(left) = node.left {
        post.take_into(left, half, reduce)?;
    }
    if let Some(right) = node.right {
        let arrived = post.take_len(right, half.len())?;
        for (own, arrived) in half.iter_mut().zip(arrived) {
            *own = reduce.combine(*own, arrived);
        }
    }
    match node.parent {
        Some(parent) => post.send(parent, std::mem::take(half)),
        None => Ok(()),
    }
}

fn pass_down<E: Element>(
    post: &mut Post<'_, '_, E>,
    node: &Node,
    own: Vec<E>,
) -> Result<Vec<E>, ExecutorError> {
    let half = match node.parent {
        Some(parent) => post.take(parent)?,
        None => own,
    };
    send_down(post, node, &half)?;
    Ok(half)
}

fn send_down<E: Element>(post: &mut Post<'_, '_, E>, node: &Node, half: &[E]) -> Result<(), ExecutorError> {
    [node.left, node.right].into_iter().flatten().try_for_each(|child| post.send(child, half.to_vec()))
}

/// This member's place in both trees.
fn two_trees(members: &[usize], position: usize) -> [Node; 2] {
    let n = members.len();
    let other = other_end(members);
    let elsewhere = other.iter().position(|&member| member == members[position]).unwrap_or(0);
    let mut nodes = [Node::default(), Node::default()];
    grow(members, 0..n, None, &mut |at, node| {
        if at == position {
            nodes[0] = node;
        }
    });
    grow(&other, 0..n, None, &mut |at, node| {
        if at == elsewhere {
            nodes[1] = node;
        }
    });
    nodes
}

fn tops(members: &[usize]) -> [Option<usize>; 2] {
    let top = |members: &[usize]| summit(&(0..members.len())).map(|at| members[at]);
    [top(members), top(&other_end(members))]
}

/// The order of the second tree: reversed, or begun with the last.
fn other_end(members: &[usize]) -> Vec<usize> {
    let mut other = members.to_vec();
    if members.len().is_multiple_of(2) {
        other.reverse();
    } else {
        other.rotate_left(usize::from(!members.is_empty()));
    }
    other
}

/// The top of a branch: so far into it as the largest power of two that it holds, counted from one.
fn summit(branch: &Range<usize>) -> Option<usize> {
    let len = branch.len();
    (len > 0).then(|| branch.start + (1 << len.ilog2()) - 1)
}

/// Tells every position of a branch its place.
fn grow(members: &[usize], branch: Range<usize>, parent: Option<usize>, tell: &mut impl FnMut(usize, Node)) {
    let Some(top) = summit(&branch) else { return };
    let (left, right) = (branch.start..top, top + 1..branch.end);
    let child = |branch: &Range<usize>| summit(branch).map(|at| members[at]);
    tell(top, Node { parent, left: child(&left), right: child(&right) });
    grow(members, left, Some(members[top]), tell);
    grow(members, right, Some(members[top]), tell);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_passes_on_in_one_tree_is_a_leaf_of_the_other() {
        for n in 2..20 {
            let members: Vec<usize> = (0..n).collect();
            for position in 0..n {
                let inner = two_trees(&members, position).map(|node| node.left.or(node.right).is_some());
                assert_ne!(inner, [true, true], "member {position} of {n}");
            }
        }
    }
}
