//! Elements that the members of one group send per link tier, by the formula of each algorithm.
//!
//! `n` members, `b(i)` the block that member i brings or keeps, `S` all of them together (of an all-reduce the whole
//! tensor); chunks are of `ceil(S / n)`, the last ones short or empty. What crosses the link from i to the member
//! named:
//! ```text
//! ring       all-gather      i -> i + 1            S - b(i + 1)      all but what i + 1 began with
//!            reduce-scatter  i -> i + 1            S - b(i)          all but what ends at i
//!            all-reduce      both, on chunks
//! recursive  all-gather      i -> i - 2^k          b(i) + ... of the min(2^k, n - 2^k) blocks from i on
//!            reduce-scatter  i -> i + 2^k          the same of those from i + 2^k on
//! tree       all-reduce      child <-> parent      half of S on each of two trees, each way
//!            broadcast       root -> both trees' roots, parent -> child: half of S each
//! two-level  inside a node   as a ring there; across, each lane as a group of its own, by the same rule
//! in-switch  all-reduce S, all-gather b(i), reduce-scatter S per member; broadcast S by the root
//! direct     all-to-all      i -> j                what i has for j
//! ```
//! Lanes of a node are as many as its smallest sibling has members; a member beyond them works through a lane's. What a
//! switch sends is not counted: counts are of what ranks send.
//!
//! Thakur, Rabenseifner, Gropp 2005 (ring, halving); Bruck et al. 1997 (any number of members); Sanders, Speck, Träff
//! 2009 (two trees); Graham et al. 2016 (reduction in switches). The executor counts the same on its own.

use std::collections::BTreeMap;

use ir::collective::Algorithm;

/// Amounts by position of a link tier; none where there is nothing.
pub type PerTier = BTreeMap<usize, u64>;

/// What a collective moves, with the lengths of blocks by position in the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Moved {
    /// Blocks that members bring.
    AllGather(Vec<u64>),
    /// Blocks that members end with.
    ReduceScatter(Vec<u64>),
    /// The whole.
    AllReduce(u64),
    /// `[i][j]`: what i has for j.
    AllToAll(Vec<Vec<u64>>),
    /// The whole, from the member at `root`.
    Broadcast {
        /// Position of the sender.
        root: usize,
        /// Elements.
        len: u64,
    },
}

/// The tier that joins two positions of the group.
type TierOf<'a> = dyn Fn(usize, usize) -> usize + 'a;

/// Elements sent by all of `n` members.
pub fn elements_per_tier(algorithm: Algorithm, moved: &Moved, tier_of: &TierOf<'_>, n: usize) -> PerTier {
    let members: Vec<usize> = (0..n).collect();
    let mut count = Count { tier_of, sums: PerTier::new() };
    match moved {
        Moved::AllGather(blocks) => count.all_gather(algorithm, &members, blocks),
        Moved::ReduceScatter(blocks) => count.reduce_scatter(algorithm, &members, blocks),
        Moved::AllReduce(len) => count.all_reduce(algorithm, &members, *len),
        Moved::AllToAll(pieces) => count.all_to_all(algorithm, &members, pieces),
        Moved::Broadcast { root, len } => count.broadcast(algorithm, (&members, *root), *len),
    }
    count.sums
}

struct Count<'a> {
    tier_of: &'a TierOf<'a>,
    sums: PerTier,
}

impl Count<'_> {
    fn all_gather(&mut self, algorithm: Algorithm, members: &[usize], blocks: &[u64]) {
        let (n, all) = (members.len(), blocks.iter().sum::<u64>());
        match algorithm {
            Algorithm::Recursive => {
                for (distance, count) in doublings(n) {
                    for i in 0..n {
                        let sent = (i..i + count).map(|j| blocks[j % n]).sum();
                        self.add(members[i], members[(i + n - distance) % n], sent);
                    }
                }
            }
            Algorithm::TwoLevel | Algorithm::InSwitch => match self.nodes(members) {
                Some(nodes) => {
                    self.inside(&nodes, all, blocks);
                    for (lane, blocks) in nodes.lanes(members, blocks) {
                        self.all_gather(algorithm, &lane, &blocks);
                    }
                }
                None if algorithm == Algorithm::InSwitch => self.send_up(members, all),
                None => self.all_gather(Algorithm::Ring, members, blocks),
            },
            Algorithm::Ring | Algorithm::Tree | Algorithm::Direct => {
                for i in 0..n {
                    self.add(members[i], members[(i + 1) % n], all - blocks[(i + 1) % n]);
                }
            }
        }
    }

    fn reduce_scatter(&mut self, algorithm: Algorithm, members: &[usize], blocks: &[u64]) {
        let (n, all) = (members.len(), blocks.iter().sum::<u64>());
        match algorithm {
            Algorithm::Recursive => {
                for (distance, count) in doublings(n) {
                    for i in 0..n {
                        let first = i + distance;
                        let sent = (first..first + count).map(|j| blocks[j % n]).sum();
                        self.add(members[i], members[first % n], sent);
                    }
                }
            }
            Algorithm::TwoLevel | Algorithm::InSwitch => match self.nodes(members) {
                Some(nodes) => {
                    self.inside(&nodes, all, blocks);
                    for (lane, blocks) in nodes.lanes(members, blocks) {
                        self.reduce_scatter(algorithm, &lane, &blocks);
                    }
                }
                None if algorithm == Algorithm::InSwitch => self.send_up(members, all * n as u64),
                None => self.reduce_scatter(Algorithm::Ring, members, blocks),
            },
            Algorithm::Ring | Algorithm::Tree | Algorithm::Direct => {
                for i in 0..n {
                    self.add(members[i], members[(i + 1) % n], all - blocks[i]);
                }
            }
        }
    }

    fn all_reduce(&mut self, algorithm: Algorithm, members: &[usize], len: u64) {
        let n = members.len();
        match algorithm {
            Algorithm::Tree => {
                for (half, shift) in halves(len, n) {
                    for (child, parent) in tree_links(n) {
                        let (child, parent) = (members[shift(child)], members[shift(parent)]);
                        self.add(child, parent, half);
                        self.add(parent, child, half);
                    }
                }
            }
            Algorithm::TwoLevel | Algorithm::InSwitch => match self.nodes(members) {
                Some(nodes) => {
                    let chunks = chunks(len, nodes.n_lanes);
                    // Two rings inside each node, and one group across per lane.
                    nodes.nodes.iter().for_each(|node| {
                        *self.sums.entry(nodes.tier).or_insert(0) += 2 * (node.len() as u64 - 1) * len;
                    });
                    for (lane, chunk) in chunks.into_iter().enumerate() {
                        let across: Vec<usize> = nodes.nodes.iter().map(|node| members[node[lane]]).collect();
                        self.all_reduce(algorithm, &across, chunk);
                    }
                }
                None if algorithm == Algorithm::InSwitch => self.send_up(members, len * n as u64),
                None => self.all_reduce(Algorithm::Ring, members, len),
            },
            Algorithm::Ring | Algorithm::Recursive | Algorithm::Direct => {
                let chunks = chunks(len, n);
                self.reduce_scatter(Algorithm::Ring, members, &chunks);
                self.all_gather(Algorithm::Ring, members, &chunks);
            }
        }
    }

    fn all_to_all(&mut self, algorithm: Algorithm, members: &[usize], pieces: &[Vec<u64>]) {
        let nodes = if algorithm == Algorithm::TwoLevel { self.nodes(members) } else { None };
        let pairs = (0..members.len()).flat_map(|i| (0..members.len()).map(move |j| (i, j)));
        for (i, j) in pairs {
            let path = nodes.as_ref().map_or(vec![i, j], |nodes| nodes.path(i, j));
            for hop in path.windows(2) {
                self.add(members[hop[0]], members[hop[1]], pieces[i][j]);
            }
        }
    }

    fn broadcast(&mut self, algorithm: Algorithm, (members, root): (&[usize], usize), len: u64) {
        let n = members.len();
        match algorithm {
            Algorithm::Tree => {
                // The others in group order from the root on, as two trees below it.
                let other = |i: usize| members[(root + 1 + i) % n];
                for (half, shift) in halves(len, n - 1) {
                    if let Some(top) = tree_root(n - 1) {
                        self.add(members[root], other(shift(top)), half);
                    }
                    for (child, parent) in tree_links(n - 1) {
                        self.add(other(shift(parent)), other(shift(child)), half);
                    }
                }
            }
            Algorithm::TwoLevel | Algorithm::InSwitch => match self.nodes(members) {
                Some(nodes) => {
                    let leader = |node: &Vec<usize>| if node.contains(&root) { root } else { node[0] };
                    let leaders: Vec<usize> = nodes.nodes.iter().map(leader).collect();
                    let at = leaders.iter().position(|&one| one == root).unwrap_or(0);
                    let across: Vec<usize> = leaders.iter().map(|&one| members[one]).collect();
                    self.broadcast(algorithm, (&across, at), len);
                    *self.sums.entry(nodes.tier).or_insert(0) += (n - leaders.len()) as u64 * len;
                }
                None if algorithm == Algorithm::InSwitch => self.send_up(members, len),
                None => self.broadcast(Algorithm::Ring, (members, root), len),
            },
            Algorithm::Ring | Algorithm::Recursive | Algorithm::Direct => {
                for i in root..root + n - 1 {
                    self.add(members[i % n], members[(i + 1) % n], len);
                }
            }
        }
    }

    /// What every node moves within itself so that its lanes hold all of it, or after they do: the ring around the
    /// node, and the blocks of members beyond the lanes.
    fn inside(&mut self, nodes: &Nodes, all: u64, blocks: &[u64]) {
        let sum = self.sums.entry(nodes.tier).or_insert(0);
        for node in &nodes.nodes {
            *sum += (node.len() as u64 - 1) * all;
            *sum += node[nodes.n_lanes..].iter().map(|&i| blocks[i]).sum::<u64>();
        }
    }

    fn send_up(&mut self, members: &[usize], sent: u64) {
        if let [first, second, ..] = members {
            self.add(*first, *second, sent);
        }
    }

    fn add(&mut self, from: usize, to: usize, elements: u64) {
        if from != to && elements > 0 {
            *self.sums.entry((self.tier_of)(from, to)).or_insert(0) += elements;
        }
    }

    /// The members by node, if they are on several: a node is what the innermost tier between any two of them joins.
    fn nodes(&self, members: &[usize]) -> Option<Nodes> {
        let pairs = members.iter().enumerate().flat_map(|(i, &a)| members[..i].iter().map(move |&b| (a, b)));
        let tier = pairs.map(|(a, b)| (self.tier_of)(a, b)).min()?;
        let mut nodes: Vec<Vec<usize>> = Vec::new();
        for (i, &member) in members.iter().enumerate() {
            let near = |node: &&mut Vec<usize>| (self.tier_of)(members[node[0]], member) == tier;
            match nodes.iter_mut().find(near) {
                Some(node) => node.push(i),
                None => nodes.push(vec![i]),
            }
        }
        let n_lanes = nodes.iter().map(Vec::len).min()?;
        (nodes.len() > 1).then_some(Nodes { tier, nodes, n_lanes })
    }
}

/// Positions by node.
struct Nodes {
    tier: usize,
    nodes: Vec<Vec<usize>>,
    n_lanes: usize,
}

impl Nodes {
    /// The groups across nodes, with what each of their members brings.
    fn lanes(&self, members: &[usize], blocks: &[u64]) -> Vec<(Vec<usize>, Vec<u64>)> {
        let lane = |lane: usize| {
            let across = self.nodes.iter().map(|node| members[node[lane]]).collect();
            let of_node =
                |node: &Vec<usize>| node[lane..].iter().step_by(self.n_lanes).map(|&i| blocks[i]).sum();
            (across, self.nodes.iter().map(of_node).collect())
        };
        (0..self.n_lanes).map(lane).collect()
    }

    /// From i to j: to the own node's member of j's lane, across, and on to j.
    fn path(&self, i: usize, j: usize) -> Vec<usize> {
        let place = |position: usize| {
            let node = self.nodes.iter().position(|node| node.contains(&position)).unwrap_or(0);
            (node, self.nodes[node].iter().position(|&one| one == position).unwrap_or(0))
        };
        let ((from, _), (to, at)) = (place(i), place(j));
        if from == to {
            return vec![i, j];
        }
        let lane = at % self.n_lanes;
        vec![i, self.nodes[from][lane], self.nodes[to][lane], j]
    }
}

fn chunks(len: u64, n: usize) -> Vec<u64> {
    let chunk = len.div_ceil(n as u64);
    (0..n as u64).map(|i| chunk.min(len.saturating_sub(i * chunk))).collect()
}

/// Distances of 1, 2, 4, ... below n, each with the blocks that are sent that far.
fn doublings(n: usize) -> impl Iterator<Item = (usize, usize)> {
    std::iter::successors(Some(1), |d| Some(d * 2))
        .take_while(move |d| *d < n)
        .map(move |d| (d, d.min(n - d)))
}

/// From positions in the first tree to those in another.
type Shift = Box<dyn Fn(usize) -> usize>;

/// The halves of a tensor, each with the positions of its tree: the second tree is the first mirrored, or shifted by
/// one where mirroring would put inner positions on inner ones.
fn halves(len: u64, n: usize) -> [(u64, Shift); 2] {
    let other: Shift =
        if n.is_multiple_of(2) { Box::new(move |i| n - 1 - i) } else { Box::new(move |i| (i + 1) % n) };
    [(len.div_ceil(2), Box::new(|i| i)), (len / 2, other)]
}

/// Child and parent in the in-order binary tree of positions, counted from 1: the parent of `2^k * odd` is the other
/// neighbour of its `2^(k+1)` block, or the position below where that is beyond n.
fn tree_links(n: usize) -> Vec<(usize, usize)> {
    let parent = |position: usize| {
        let bit = position & position.wrapping_neg();
        let up = (position ^ bit) | (bit << 1);
        let down = position ^ bit;
        if up <= n { up } else { down }
    };
    let top = tree_root(n).map_or(0, |top| top + 1);
    (1..=n).filter(|&i| i != top).map(|i| (i - 1, parent(i) - 1)).collect()
}

/// The largest power of two, counted from 1.
fn tree_root(n: usize) -> Option<usize> {
    (n > 0).then(|| (1 << n.ilog2()) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes of so many positions.
    fn check(algorithm: Algorithm, moved: &Moved, (n, node): (usize, usize), expected: &[(usize, u64)]) {
        let found = elements_per_tier(algorithm, moved, &|a, b| usize::from(a / node != b / node), n);
        let expected: PerTier = expected.iter().copied().collect();
        assert_eq!(found, expected, "{algorithm:?} {moved:?} on {n} by {node}");
    }

    #[test]
    fn a_ring_over_two_nodes_crosses_twice_and_two_levels_send_one_share_across() {
        // 8 blocks of 1: each of 8 links carries 7; two levels: 7 x 8 in all, of which 4 lanes x 2 send one each
        // across.
        check(Algorithm::Ring, &Moved::AllGather(vec![1; 8]), (8, 4), &[(0, 42), (1, 14)]);
        check(Algorithm::TwoLevel, &Moved::AllGather(vec![1; 8]), (8, 4), &[(0, 48), (1, 8)]);
        check(Algorithm::TwoLevel, &Moved::ReduceScatter(vec![1; 8]), (8, 4), &[(0, 48), (1, 8)]);
        check(Algorithm::TwoLevel, &Moved::AllReduce(8), (8, 4), &[(0, 96), (1, 16)]);
    }

    #[test]
    fn a_switch_gets_every_block_once() {
        check(Algorithm::InSwitch, &Moved::AllReduce(10), (4, 4), &[(0, 40)]);
        check(Algorithm::InSwitch, &Moved::AllReduce(10), (4, 2), &[(0, 2 * 2 * 10), (1, 2 * 10)]);
        check(Algorithm::InSwitch, &Moved::AllGather(vec![1, 2, 3]), (3, 3), &[(0, 6)]);
        check(Algorithm::InSwitch, &Moved::ReduceScatter(vec![1, 2, 3]), (3, 3), &[(0, 18)]);
    }

    #[test]
    fn trees_and_doublings_send_as_much_as_rings() {
        for n in 1..10 {
            let (blocks, sum) = ((1..=n as u64).collect::<Vec<_>>(), n as u64 * (n as u64 + 1) / 2);
            let sent = |elements: u64| if elements == 0 { Vec::new() } else { vec![(0, elements)] };
            let others = n as u64 - 1;
            for algorithm in [Algorithm::Ring, Algorithm::Recursive] {
                check(algorithm, &Moved::AllGather(blocks.clone()), (n, n), &sent(others * sum));
                check(algorithm, &Moved::ReduceScatter(blocks.clone()), (n, n), &sent(others * sum));
            }
            for algorithm in [Algorithm::Ring, Algorithm::Tree] {
                check(algorithm, &Moved::AllReduce(11), (n, n), &sent(2 * others * 11));
                check(algorithm, &Moved::Broadcast { root: n / 2, len: 11 }, (n, n), &sent(others * 11));
            }
        }
    }

    #[test]
    fn inner_positions_of_one_tree_are_leaves_of_the_other() {
        for n in 2..20_usize {
            let inner = |shift: &dyn Fn(usize) -> usize| {
                let mut inner: Vec<usize> = tree_links(n).iter().map(|link| shift(link.1)).collect();
                inner.sort_unstable();
                inner.dedup();
                inner
            };
            let [(_, first), (_, second)] = halves(2, n);
            let (first, second) = (inner(&first), inner(&second));
            assert!(first.iter().all(|one| !second.contains(one)), "{n}: {first:?} {second:?}");
        }
    }

    #[test]
    fn an_exchange_by_two_levels_crosses_once_and_relays_inside() {
        let ones = vec![vec![1; 4]; 4];
        check(Algorithm::Direct, &Moved::AllToAll(ones.clone()), (4, 2), &[(0, 4), (1, 8)]);
        check(Algorithm::TwoLevel, &Moved::AllToAll(ones), (4, 2), &[(0, 8), (1, 8)]);
    }
}
