//! The bytes that a collective should send by its formula, and those that its messages carry, per link tier.

use std::collections::BTreeMap;

use cost_model::collective_loads::{Moved, elements_per_tier};
use executor::collective::{Broadcast, Collectives};
use executor::element::Reduce;
use executor::error::ExecutorError;
use executor::fabric::run_ranks;
use executor::instruction::Tag;
use ir::collective::CollectiveKind;
use proptest::prelude::*;

const KINDS: [CollectiveKind; 5] = [
    CollectiveKind::AllGather,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllReduce,
    CollectiveKind::AllToAll,
    CollectiveKind::Broadcast,
];

fn run(
    kind: CollectiveKind,
    mut by: Collectives<'_, '_, f32>,
    (group, rank): (&[usize], usize),
    lens: &[usize],
) -> Result<(), ExecutorError> {
    let (n, tag, sum) = (group.len(), Tag::new("x", 0), Reduce::Sum);
    let block = |i: usize| vec![1.0; lens[i]];
    match kind {
        CollectiveKind::AllGather => by.all_gather_blocks(group, tag, block(rank), lens).map(drop),
        CollectiveKind::ReduceScatter => {
            by.reduce_scatter_blocks(group, tag, (0..n).map(block).collect(), sum).map(drop)
        }
        CollectiveKind::AllReduce => by.all_reduce(group, tag, vec![1.0; lens.iter().sum()], sum).map(drop),
        CollectiveKind::AllToAll => {
            let part = |to: usize| vec![1.0; lens[(rank + to) % n]];
            by.all_to_all(group, tag, (0..n).map(part).collect()).map(drop)
        }
        CollectiveKind::Broadcast if rank == n / 2 => {
            by.broadcast(group, tag, Broadcast::Send(block(0))).map(drop)
        }
        CollectiveKind::Broadcast => {
            by.broadcast(group, tag, Broadcast::Receive { root: n / 2, len: lens[0] }).map(drop)
        }
        CollectiveKind::SendRecv => Ok(()),
    }
}

fn moved(kind: CollectiveKind, lens: &[usize]) -> Moved {
    let n = lens.len();
    let all: Vec<u64> = lens.iter().map(|&len| len as u64).collect();
    match kind {
        CollectiveKind::AllGather => Moved::AllGather(all),
        CollectiveKind::ReduceScatter => Moved::ReduceScatter(all),
        CollectiveKind::AllReduce => Moved::AllReduce(all.iter().sum()),
        CollectiveKind::AllToAll => {
            Moved::AllToAll((0..n).map(|from| (0..n).map(|to| all[(from + to) % n]).collect()).collect())
        }
        CollectiveKind::Broadcast | CollectiveKind::SendRecv => Moved::Broadcast { root: n / 2, len: all[0] },
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(40) })]

    /// Nodes of `node` ranks, racks of `rack` nodes: the last ones may be smaller.
    #[test]
    fn every_algorithm_sends_what_its_formula_says_on_every_tier(
        lens in prop::collection::vec(0_usize..6, 1..10),
        node in 1_usize..5,
        rack in 1_usize..4,
    ) {
        let n = lens.len();
        let group: Vec<usize> = (0..n).collect();
        let tier = |a: usize, b: usize| {
            usize::from(a / node != b / node) + usize::from(a / node / rack != b / node / rack)
        };
        for kind in KINDS {
            for &algorithm in kind.algorithms() {
                let results = run_ranks(n, &tier, |comm| {
                    let rank = comm.rank();
                    run(kind, comm.by(algorithm), (&group, rank), &lens)
                });
                let mut counted: BTreeMap<usize, u64> = BTreeMap::new();
                for (_, counters) in results.unwrap() {
                    for (traffic, bytes) in counters.sent() {
                        prop_assert_eq!(traffic.algorithm, algorithm);
                        *counted.entry(traffic.tier).or_insert(0) += bytes / size_of::<f32>() as u64;
                    }
                }
                let mut predicted = elements_per_tier(algorithm, &moved(kind, &lens), &tier, n);
                predicted.retain(|_, elements| *elements > 0);
                prop_assert_eq!(predicted, counted, "{:?} by {:?}", kind, algorithm);
            }
        }
    }
}
