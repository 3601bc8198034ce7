//! The order of a flat graph's operators. It depends on how they hang together alone, not on where they stand in the
//! file, and it is the same in every copy of a layer.
//!
//! An operator *owns* what reaches the loss through it alone (its dominator tree, seen from the loss). What it owns
//! falls into regions, each with one operator that all the others of the region go through; a region is worked off
//! without a break. Thus a branch is finished before the next one begins, and what several layers read, an encoder,
//! is ready before the first of them. Among regions that do not wait for each other the larger comes first, then the
//! one that is met first when operands are followed in their order.

use std::cmp::Reverse;

use petgraph::algo::dominators::simple_fast;
use petgraph::graph::{DiGraph, NodeIndex};

/// Operators in order. `before` lists the operators that make the operands of each, in their order; `loss` is behind
/// all others, and operators that it does not need are left out.
pub(crate) fn order(before: &[Vec<usize>], loss: usize) -> Vec<usize> {
    let met = in_preorder(before, loss);
    let owner = owners(before, loss);
    let mut rank = vec![usize::MAX; before.len()];
    met.iter().enumerate().for_each(|(at, &op)| rank[op] = at);
    let mut owned: Vec<Vec<usize>> = vec![Vec::new(); before.len()];
    let mut level = vec![0_usize; before.len()];
    // An owner is met before what it owns.
    for &op in &met {
        if let Some(owner) = owner[op] {
            owned[owner].push(op);
            level[op] = level[owner] + 1;
        }
    }
    let mut size = vec![1_usize; before.len()];
    for &op in met.iter().rev() {
        if let Some(owner) = owner[op] {
            size[owner] += size[op];
        }
    }
    // Regions that a region waits for, all of one owner.
    let mut waits: Vec<Vec<usize>> = vec![Vec::new(); before.len()];
    for &reader in &met {
        for &maker in before[reader].iter().filter(|&&maker| owner[maker] != Some(reader)) {
            let mut region = reader;
            while level[region] > level[maker] {
                let Some(up) = owner[region] else { break };
                region = up;
            }
            waits[region].push(maker);
        }
    }
    let turn = |op: &usize| (Reverse(size[*op]), rank[*op]);
    for list in owned.iter_mut().chain(&mut waits) {
        list.sort_by_key(turn);
        list.dedup();
    }
    worked_off(&owned, &waits, loss)
}

/// Every operator behind the regions that it owns, every region behind those that it waits for.
fn worked_off(owned: &[Vec<usize>], waits: &[Vec<usize>], loss: usize) -> Vec<usize> {
    #[derive(Clone, Copy)]
    enum Step {
        Region(usize),
        Owned(usize),
        Operator(usize),
    }
    let mut order = Vec::new();
    let mut is_met = vec![false; owned.len()];
    let mut open = vec![Step::Region(loss)];
    while let Some(step) = open.pop() {
        match step {
            Step::Region(op) if !is_met[op] => {
                is_met[op] = true;
                open.push(Step::Owned(op));
                open.extend(waits[op].iter().rev().copied().map(Step::Region));
            }
            Step::Region(_) => {}
            Step::Owned(op) => {
                open.push(Step::Operator(op));
                open.extend(owned[op].iter().rev().copied().map(Step::Region));
            }
            Step::Operator(op) => order.push(op),
        }
    }
    order
}

/// Operators that the loss needs, each before what is only met through it.
fn in_preorder(before: &[Vec<usize>], loss: usize) -> Vec<usize> {
    let mut met = Vec::new();
    let mut is_met = vec![false; before.len()];
    let mut open = vec![loss];
    while let Some(op) = open.pop() {
        if !is_met[op] {
            is_met[op] = true;
            met.push(op);
            open.extend(before[op].iter().rev());
        }
    }
    met
}

/// The nearest operator through which all ways from an operator to the loss go.
fn owners(before: &[Vec<usize>], loss: usize) -> Vec<Option<usize>> {
    let mut graph: DiGraph<(), ()> = DiGraph::with_capacity(before.len(), 2 * before.len());
    for _ in before {
        graph.add_node(());
    }
    for (reader, makers) in before.iter().enumerate() {
        for &maker in makers {
            graph.add_edge(NodeIndex::new(reader), NodeIndex::new(maker), ());
        }
    }
    let dominators = simple_fast(&graph, NodeIndex::new(loss));
    let owner = |op| dominators.immediate_dominator(NodeIndex::new(op)).map(NodeIndex::index);
    (0..before.len()).map(owner).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longer_branch_comes_first_and_stays_together() {
        // 0 joins 1 and 4; 1 <- 2 <- 3 and 4 <- 5 <- 6 <- 7.
        let before = [vec![1, 4], vec![2], vec![3], vec![], vec![5], vec![6], vec![7], vec![]];
        assert_eq!(order(&before.map(|list| list.to_vec()), 0), [7, 6, 5, 4, 3, 2, 1, 0]);
    }

    #[test]
    fn what_several_read_is_made_first_and_what_one_reads_right_before_it() {
        // Layers 1 and 4 read the stream and, by an operator of their own (2, 5), the memory 7.
        let before = [vec![1], vec![4, 2], vec![7], vec![], vec![6, 5], vec![7], vec![], vec![8], vec![]];
        assert_eq!(order(&before.map(|list| list.to_vec()), 0), [8, 7, 6, 5, 4, 2, 1, 0]);
    }

    #[test]
    fn a_skipped_branch_is_behind_what_it_skips() {
        // 0 adds 2 and 1, 1 reads 2.
        assert_eq!(order(&[vec![2, 1], vec![2], vec![]], 0), [2, 1, 0]);
    }
}
