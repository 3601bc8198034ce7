//! Tests of `collective.rs`: each formula by hand, published plateaus, and the laws every price obeys.

use ir::cluster::{InSwitchReduction, Tier};
use proptest::prelude::*;

use super::*;
use crate::group::tests::{cluster_of, dgx_a100, group, tier};

const KINDS: [CollectiveKind; 6] = [
    CollectiveKind::AllReduce,
    CollectiveKind::AllGather,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllToAll,
    CollectiveKind::SendRecv,
    CollectiveKind::Broadcast,
];

/// Launch 1 us, no sync, full efficiency: what is left are the formulas.
fn plain() -> Constants {
    Constants {
        collective_launch_s: Seconds(1e-6),
        network_sync_s_per_log2_nodes: Seconds::ZERO,
        node_link_efficiency_fraction: 1.0,
        network_efficiency_fraction: 1.0,
        in_switch_node_fraction: 1.0,
        in_switch_network_fraction: 1.0,
        ..Constants::load()
    }
}

/// Nodes of 4 at 100 GB/s and 10 us; 16 of them at 10 GB/s and 100 us.
fn small() -> Cluster {
    cluster_of(vec![tier("inner", 4, 100.0, 10.0), tier("outer", 64, 10.0, 100.0)])
}

fn by(algorithm: Algorithm, kind: CollectiveKind, full: f64, axes: &[(u64, u64)]) -> Option<f64> {
    let cluster = small();
    let group = group(axes, &cluster);
    let time = price_by(algorithm, (kind, Bytes(full)), &group, &cluster, &plain())?;
    Some((time.0 * 1e7).round() / 10.0)
}

#[test]
fn a_ring_in_a_node_pays_each_step_and_moves_all_but_its_own_part() {
    // 1 us + 3 x 10 us + 3/4 x 1 MB / 100 GB/s
    assert_eq!(by(Algorithm::Ring, CollectiveKind::AllGather, 1e6, &[(4, 1)]), Some(38.5));
    assert_eq!(by(Algorithm::Ring, CollectiveKind::AllReduce, 1e6, &[(4, 1)]), Some(77.0));
    // And 10 us for each of the 3 that hand on all of it, less than 4 slots of 512 KiB.
    assert_eq!(by(Algorithm::Ring, CollectiveKind::Broadcast, 1e6, &[(4, 1)]), Some(71.0));
}

#[test]
fn a_ring_over_nodes_gets_a_rail_per_member_of_a_node() {
    // 8 ranks on 2 nodes: 6 steps of 10 us, 1 of 100 us; min(100, 4 x 10) GB/s.
    assert_eq!(by(Algorithm::Ring, CollectiveKind::ReduceScatter, 8e6, &[(8, 1)]), Some(161.0 + 175.0));
    // 2 ranks, one per node: one rail of 10 GB/s.
    assert_eq!(by(Algorithm::Ring, CollectiveKind::ReduceScatter, 8e6, &[(2, 4)]), Some(101.0 + 400.0));
}

#[test]
fn of_broadcasts_in_turn_the_next_begins_half_a_ring_after_the_last() {
    let (cluster, constants) = (small(), plain());
    let group = group(&[(4, 1)], &cluster);
    let time = |count| broadcasts(count, Bytes(1e6), &group, &cluster, &constants).0 * 1e6;
    let one = time(1);
    // Half of 3 x (10 us + 10 us).
    assert!((time(2) - (2.0 * one - 30.0)).abs() < 1e-6, "{}", time(2));
    assert_eq!(time(0), 0.0);
}

#[test]
fn a_tree_pays_logarithmic_steps_at_nine_tenths_of_the_rate() {
    // 2 x (1 us + 2 x 10 us + 9 MB / 90 GB/s)
    assert_eq!(by(Algorithm::Tree, CollectiveKind::AllReduce, 9e6, &[(4, 1)]), Some(242.0));
    assert_eq!(by(Algorithm::Tree, CollectiveKind::Broadcast, 9e6, &[(4, 1)]), Some(121.0));
}

#[test]
fn recursive_doubling_needs_one_member_per_node() {
    // 1 us + 4 x 100 us + 15/16 x 16 MB / 10 GB/s
    assert_eq!(by(Algorithm::Recursive, CollectiveKind::AllGather, 16e6, &[(16, 4)]), Some(1901.0));
    assert_eq!(by(Algorithm::Recursive, CollectiveKind::AllGather, 16e6, &[(8, 1)]), None);
}

#[test]
fn two_levels_move_the_node_share_across_and_the_whole_inside() {
    // Across: 1 + 100 us + 1/2 x 2 MB / 10 GB/s; inside: 1 + 30 us + 3/4 x 8 MB / 100 GB/s.
    assert_eq!(by(Algorithm::TwoLevel, CollectiveKind::AllGather, 8e6, &[(8, 1)]), Some(201.0 + 91.0));
    assert_eq!(by(Algorithm::TwoLevel, CollectiveKind::AllReduce, 8e6, &[(8, 1)]), Some(584.0));
    assert_eq!(by(Algorithm::TwoLevel, CollectiveKind::AllReduce, 8e6, &[(4, 1)]), None);
}

#[test]
fn all_to_all_sends_each_peer_its_part_on_the_tier_that_joins_them() {
    // 8 ranks on 2 nodes, 1 MB per peer: 3 peers inside at 10 us and 100 GB/s, 4 outside at 100 us and 10 GB/s.
    let inside = 3.0 * (10.0 + 10.0);
    let outside = 4.0 * (100.0 + 100.0);
    assert_eq!(by(Algorithm::Direct, CollectiveKind::AllToAll, 8e6, &[(8, 1)]), Some(1.0 + inside + outside));
}

#[test]
fn send_receive_runs_at_the_rate_of_the_tier_that_joins_the_pair() {
    assert_eq!(by(Algorithm::Direct, CollectiveKind::SendRecv, 1e6, &[(2, 1)]), Some(21.0));
    assert_eq!(by(Algorithm::Direct, CollectiveKind::SendRecv, 1e6, &[(2, 4)]), Some(201.0));
}

#[test]
fn switches_reduce_where_the_outermost_tier_can() {
    let mut cluster = small();
    cluster.tiers[1].in_switch_reduction = InSwitchReduction::Supported;
    let one_per_node = group(&[(16, 4)], &cluster);
    let choice = choose(CollectiveKind::AllReduce, Bytes(1e9), &one_per_node, &cluster, &plain());
    // 1 us + 2 x 100 us + 1 GB / 10 GB/s, half of a ring's bytes.
    assert_eq!(choice.algorithm, Algorithm::InSwitch);
    assert!((choice.time.0 - 0.100201).abs() < 1e-9, "{choice:?}");
    let both = group(&[(8, 1)], &cluster);
    let time =
        price_by(Algorithm::InSwitch, (CollectiveKind::AllReduce, Bytes(8e6)), &both, &cluster, &plain());
    // Inside there and back 2 x 91 us; across 2 x 100 us + 2 MB / 10 GB/s; launch 1 us.
    assert!((time.unwrap().0 - 583e-6).abs() < 1e-12, "{time:?}");
}

#[test]
fn oversubscription_divides_the_tier_above_it() {
    let mut cluster = small();
    cluster.tiers[1].oversubscription = 4.0;
    let pair = group(&[(2, 4)], &cluster);
    let time = price(CollectiveKind::SendRecv, Bytes(1e6), &pair, &cluster, &plain());
    assert!((time.0 - 501e-6).abs() < 1e-12, "{time:?}");
}

#[test]
fn a_torus_has_only_rings_and_direct_exchange() {
    let cluster = cluster_of(vec![Tier { wiring: Wiring::Torus, ..tier("ici", 4096, 300.0, 1.0) }]);
    let axis = group(&[(16, 1)], &cluster);
    let tree = price_by(Algorithm::Tree, (CollectiveKind::AllReduce, Bytes(1e6)), &axis, &cluster, &plain());
    assert_eq!(tree, None);
    // 1 us + 15 steps of 1 us + 15/16 x 16 MB / 100 GB/s (a third of 300).
    let time = price(CollectiveKind::AllGather, Bytes(16e6), &axis, &cluster, &plain());
    assert!((time.0 - 166e-6).abs() < 1e-12, "{time:?}");
}

#[test]
fn small_messages_take_few_steps_and_large_ones_all_rails() {
    let (cluster, constants) = (dgx_a100(), Constants::load());
    let all = group(&[(128, 1)], &cluster);
    let chosen = |full| choose(CollectiveKind::AllReduce, Bytes(full), &all, &cluster, &constants).algorithm;
    assert_eq!(chosen(1e3), Algorithm::Tree);
    assert_eq!(chosen(1e10), Algorithm::Ring);
}

#[test]
fn published_all_reduce_of_eight_a100_is_met_within_25_percent() {
    // github PKU-DAIR/Hetu-Galvatron sp_time_1nodes_8gpus_per_node.json: MiB, ms.
    let (cluster, constants) = (dgx_a100(), Constants::load());
    let node = group(&[(8, 1)], &cluster);
    for (mebibytes, milliseconds) in
        [(1.0, 0.079), (8.0, 0.183), (64.0, 0.652), (256.0, 2.36), (1024.0, 8.14)]
    {
        let full = Bytes(mebibytes * 1024.0 * 1024.0);
        let time = price(CollectiveKind::AllReduce, full, &node, &cluster, &constants);
        let ratio = time.0 * 1e3 / milliseconds;
        assert!((0.75..1.25).contains(&ratio), "{mebibytes} MiB: {ratio}");
    }
}

#[test]
fn eight_h100_with_switches_print_480_gigabytes_per_second() {
    // github NVIDIA/nccl-tests issue 212: bus bandwidth 480 GB/s for all-reduce, 370 for all-gather.
    let mut cluster = cluster_of(vec![tier("nvlink", 8, 450.0, 2.0)]);
    cluster.tiers[0].in_switch_reduction = InSwitchReduction::Supported;
    let (constants, full) = (Constants::load(), Bytes(8e9));
    let node = group(&[(8, 1)], &cluster);
    let bus = |kind, factor: f64| factor * full.0 / price(kind, full, &node, &cluster, &constants).0 / 1e9;
    assert!((bus(CollectiveKind::AllReduce, 1.75) / 480.0 - 1.0).abs() < 0.02);
    assert!((bus(CollectiveKind::AllGather, 0.875) / 370.0 - 1.0).abs() < 0.08);
}

proptest! {
    #[test]
    fn more_bytes_never_take_less_time(
        kind_idx in 0..6_usize,
        full in 0.0..1e10_f64,
        more in 0.0..1e9_f64,
        size_exponent in 0..7_u32,
        stride_exponent in 0..4_u32,
    ) {
        let (cluster, constants, kind) = (dgx_a100(), Constants::load(), KINDS[kind_idx]);
        let group = group(&[(1 << size_exponent, 1 << stride_exponent)], &cluster);
        let time = |full| price(kind, Bytes(full), &group, &cluster, &constants);
        prop_assert!(time(full + more) >= time(full));
        prop_assert!(time(full).0.is_finite());
        prop_assert_eq!(time(full) == Seconds::ZERO, size_exponent == 0 || full == 0.0);
    }
}
