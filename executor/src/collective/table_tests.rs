//! Every algorithm of every collective, for groups of several sizes on nodes of several sizes, with uneven blocks,
//! against what the collective is by definition.

use std::fmt::Debug;

use super::*;
use crate::fabric::run_ranks;
use ir::collective::CollectiveKind;

const GROUP_SIZES: [usize; 6] = [1, 2, 3, 4, 5, 8];

/// Ranks of a node: 2 and 3 leave the last node smaller, 8 holds all.
const NODE_SIZES: [usize; 4] = [1, 2, 3, 8];

/// Nodes in one rack: a third tier.
const RACK: usize = 2;

/// Integers, so that sums are exact in any order.
fn block(rank: usize, part: usize, len: usize) -> Vec<f64> {
    (0..len).map(|k| (rank * 31 + part * 7 + k * 3 + 1) as f64).collect()
}

fn uneven(n: usize) -> Vec<usize> {
    (0..n).map(|i| (i * 5) % 4).collect()
}

fn total(n: usize, part: usize, len: usize) -> Vec<f64> {
    (0..len).map(|k| (0..n).map(|rank| block(rank, part, len)[k]).sum()).collect()
}

/// Runs a collective by every algorithm it has, on every group, and holds each member's result to its definition.
fn check<T: PartialEq + Debug + Send>(
    kind: CollectiveKind,
    body: impl Fn(Collectives<'_, '_, f64>, (&[usize], usize)) -> Result<T, ExecutorError> + Sync,
    expected: impl Fn(usize, usize) -> T,
) {
    for &algorithm in kind.algorithms() {
        for n in GROUP_SIZES {
            for node in NODE_SIZES {
                let group: Vec<usize> = (0..n).collect();
                let tier = |a: usize, b: usize| {
                    usize::from(a / node != b / node) + usize::from(a / node / RACK != b / node / RACK)
                };
                let place = format!("{} of {n} by {} on nodes of {node}", kind.name(), algorithm.name());
                let run = || {
                    run_ranks(n, &tier, |comm| {
                        let rank = comm.rank();
                        body(comm.by(algorithm), (&group, rank))
                    })
                };
                let results = run().unwrap_or_else(|error| panic!("{place}: {error}"));
                for (rank, (value, _)) in results.iter().enumerate() {
                    assert_eq!(*value, expected(rank, n), "{place}: rank {rank}");
                }
            }
        }
    }
}

fn tag() -> Tag {
    Tag::new("x", 0)
}

#[test]
fn all_gather() {
    check(
        CollectiveKind::AllGather,
        |mut by, (group, rank)| {
            let lens = uneven(group.len());
            by.all_gather_blocks(group, tag(), block(rank, 0, lens[rank]), &lens)
        },
        |_, n| (0..n).map(|rank| block(rank, 0, uneven(n)[rank])).collect::<Vec<_>>(),
    );
}

#[test]
fn reduce_scatter() {
    check(
        CollectiveKind::ReduceScatter,
        |mut by, (group, rank)| {
            let lens = uneven(group.len());
            let parts = lens.iter().enumerate().map(|(part, &len)| block(rank, part, len)).collect();
            by.reduce_scatter_blocks(group, tag(), parts, Reduce::Sum)
        },
        |rank, n| total(n, rank, uneven(n)[rank]),
    );
}

/// 11 elements are in no group's chunks of equal length, 1 leaves most chunks empty, 0 all of them.
#[test]
fn all_reduce() {
    for len in [0, 1, 11] {
        check(
            CollectiveKind::AllReduce,
            |mut by, (group, rank)| by.all_reduce(group, tag(), block(rank, 0, len), Reduce::Sum),
            |_, n| total(n, 0, len),
        );
    }
    check(
        CollectiveKind::AllReduce,
        |mut by, (group, rank)| {
            by.all_reduce(group, tag(), vec![rank as f64, -(rank as f64), 3.0], Reduce::Max)
        },
        |_, n| vec![(n - 1) as f64, 0.0, 3.0],
    );
}

#[test]
fn all_to_all() {
    let len = |from: usize, to: usize| (from + 3 * to) % 4;
    check(
        CollectiveKind::AllToAll,
        |mut by, (group, rank)| {
            let parts = (0..group.len()).map(|to| block(rank, to, len(rank, to))).collect();
            let lens: Vec<usize> = (0..group.len()).map(|from| len(from, rank)).collect();
            by.all_to_all_blocks(group, tag(), parts, &lens)
        },
        |rank, n| (0..n).map(|from| block(from, rank, len(from, rank))).collect::<Vec<_>>(),
    );
}

#[test]
fn broadcast() {
    let len = 5;
    for root in [0, 1, 4] {
        check(
            CollectiveKind::Broadcast,
            |mut by, (group, rank)| {
                let root = root % group.len();
                let data = if rank == root {
                    Broadcast::Send(block(rank, 0, len))
                } else {
                    Broadcast::Receive { root, len }
                };
                by.broadcast(group, tag(), data)
            },
            |_, n| block(root % n, 0, len),
        );
    }
}

#[test]
fn send_and_receive() {
    check(
        CollectiveKind::SendRecv,
        |by, (group, rank)| {
            let n = group.len();
            if n == 1 {
                return Ok(Vec::new());
            }
            by.comm.send((rank + 1) % n, tag(), block(rank, 0, 3))?;
            by.comm.recv((rank + n - 1) % n, tag(), 3)
        },
        |rank, n| if n == 1 { Vec::new() } else { block((rank + n - 1) % n, 0, 3) },
    );
}

/// Numbers of which every order of additions gives other last bits.
#[test]
fn all_members_end_with_the_same_bits_in_every_run() {
    for &algorithm in CollectiveKind::AllReduce.algorithms() {
        let sums = || {
            let body = |comm: &mut RankComm<'_, f64>| {
                let own = (0..7).map(|k| ((comm.rank() * 7 + k) as f64 + 0.1).sin()).collect();
                comm.by(algorithm).all_reduce(&[0, 1, 2, 3, 4, 5, 6, 7], tag(), own, Reduce::Sum)
            };
            let results = run_ranks(8, &|a, b| usize::from(a / 4 != b / 4), body).unwrap();
            results.into_iter().map(|(sum, _)| sum).collect::<Vec<_>>()
        };
        let first = sums();
        assert!(first.iter().all(|sum| *sum == first[0]), "{algorithm:?}");
        assert_eq!(sums(), first, "{algorithm:?}");
    }
}

#[test]
fn an_algorithm_that_the_collective_lacks_is_an_error() {
    let error = run_ranks::<f64, _, _>(2, &|_, _| 0, |comm| {
        comm.by(Algorithm::Tree).all_gather_blocks(&[0, 1], tag(), vec![], &[0, 0]).map(drop)
    });
    let text = error.unwrap_err().to_string();
    assert!(text.contains("it does not run as `tree`"), "{text}");
}
