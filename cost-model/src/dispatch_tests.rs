//! Shares of copies against counting, and times on two tiers.

use super::*;
use crate::collective::CollectiveKind;
use crate::constants::tests::of_examples;
use crate::group::GroupAxis;
use crate::group::tests::{cluster_of, tier};
use crate::{choose, links::levels};
use ir::engine::Engine;
use ir::sharding::Placement;

fn routing(experts: u64, top_k: u64, (groups, top_groups): (u64, u64)) -> Routing {
    Routing { dim: 1, experts, top_k, groups, top_groups, limited: false }
}

/// All ways to choose: first the groups, then the experts among theirs.
fn counted(routing: Routing, block: u64) -> f64 {
    let subsets = |of: u64, n: u64| (0..1_u64 << of).filter(move |set| u64::from(set.count_ones()) == n);
    let group = routing.experts / routing.groups;
    let (mut all, mut hit) = (0.0, 0.0);
    for groups in subsets(routing.groups, routing.top_groups) {
        let within = |expert: u64| groups >> (expert / group) & 1 == 1;
        for chosen in subsets(routing.experts, routing.top_k) {
            let mut experts = (0..routing.experts).filter(|expert| chosen >> expert & 1 == 1);
            if experts.clone().all(within) {
                all += 1.0;
                hit += f64::from(u8::from(experts.any(|expert| expert < block)));
            }
        }
    }
    hit / all
}

#[test]
fn chances_are_those_of_counting_all_ways_to_choose() {
    for (routing, blocks) in [
        (routing(8, 2, (1, 1)), vec![1, 2, 4, 8]),
        (routing(12, 3, (1, 1)), vec![1, 3, 6]),
        (routing(8, 2, (4, 2)), vec![1, 2, 4, 8]),
        (routing(12, 2, (6, 3)), vec![1, 2, 4, 6, 12]),
    ] {
        for block in blocks {
            let (found, expected) = (routing.hit(block as f64), counted(routing, block));
            assert!((found - expected).abs() < 1e-12, "{routing:?} {block}: {found} for {expected}");
        }
    }
}

#[test]
fn a_device_with_one_expert_gets_every_copy_and_one_with_all_gets_a_token_once() {
    let plain = routing(64, 8, (1, 1));
    assert!((plain.share(1.0) - 1.0).abs() < 1e-12);
    assert!((plain.share(64.0) - 1.0 / 8.0).abs() < 1e-12);
    // DeepSeek-V3 on nodes of 32 experts: 8 copies go to 3.6 nodes, of which a router without groups would reach 5.3.
    let nodes = |routing: Routing| routing.share(32.0) * 8.0;
    assert!((nodes(routing(256, 8, (8, 4))) - 3.62).abs() < 0.01);
    assert!((nodes(routing(256, 8, (1, 1))) - 5.29).abs() < 0.01);
}

/// Of a token's copies the ones for a node cross once; nothing is gained where a program's every copy has a device to
/// itself.
#[test]
fn the_slowest_tier_sets_the_time_of_an_exchange_by_nodes() {
    let mut constants = of_examples();
    let cluster = cluster_of(vec![tier("node", 8, 450.0, 1.9), tier("network", 64, 50.0, 4.0)]);
    let (routing, mesh) = (routing(256, 8, (8, 4)), Mesh::of_sizes(&[64]).unwrap());
    let group = Group::from_axes(&[GroupAxis { stride: 1, size: 64 }], &cluster);
    let cut = |dim: u8| Sharding::REPLICATED.with(ir::mesh::AxisId(0), Placement::Shard(dim));
    let change = (StepKind::AllToAll { from: 0, to: 1 }, cut(0), cut(1));
    let full = Bytes(1e9);
    let ask = |constants: &Constants, routing: Routing| {
        exchange(routing, change, (full, &mesh), || group.clone(), (&cluster, constants))
    };
    assert_eq!(ask(&constants, routing), None, "every copy by itself");
    constants.engine = Engine { dispatch: Dispatch::PerNode, ..Engine::default() };
    let found = ask(&constants, routing).unwrap();
    let network = levels(&group, &cluster, &constants).last().unwrap();
    let crossing = full * (routing.share(32.0) * 7.0 / 8.0) / network.exchange_rate;
    assert!(found.time > crossing && found.time < crossing * 1.05, "{found:?} for {crossing:?}");
    let plain = choose(CollectiveKind::AllToAll, full, &group, &cluster, &constants);
    assert!(found.time < plain.time * 0.55);
    assert_eq!(ask(&constants, Routing { limited: true, ..routing }), None, "slots of a capacity");
}

#[test]
fn an_exchange_shows_beyond_what_covers_it_and_slows_that_down() {
    let mut constants = of_examples();
    let (total, cover) = (Seconds(3.0), Seconds(2.0));
    assert_eq!(shown(total, cover, &constants), (total, Seconds::ZERO));
    constants.engine = Engine { exchange_overlap: ExchangeOverlap::Beside, ..Engine::default() };
    let slow = constants.gathered_overlap_slowdown_fraction;
    let (shows, left) = shown(total, cover, &constants);
    assert!((shows.0 - (1.0 + 2.0 * slow)).abs() < 1e-12 && left == Seconds::ZERO);
    let (shows, left) = shown(Seconds(0.5), cover, &constants);
    assert!((shows.0 - 0.5 * slow).abs() < 1e-12 && (left.0 - 1.5).abs() < 1e-12);
}

/// Bandwidths that DeepEP reports for H800 (200 GB/s inside a node and 50 GB/s across, 4,096 tokens of 7,168 bytes, top
/// 8 in 4 groups at most; docs/legacy.md at 0297fc8): what tokens for a node, or a device, of which some stay, take
/// over the time. Nothing is fitted to them.
#[test]
fn deepep_is_within_a_quarter_of_its_published_bandwidths() {
    let mut constants = Constants::load();
    constants.engine = Engine { dispatch: Dispatch::PerNode, ..Engine::default() };
    for (ranks, published) in [(8_u64, 155.5), (16, 43.0), (32, 57.5), (64, 50.5)] {
        let mut tiers = vec![tier("node", 8, 200.0, 1.9)];
        if ranks > 8 {
            tiers.push(tier("network", ranks, 50.0, 4.0));
        }
        let (cluster, nodes) = (cluster_of(tiers), ranks / 8);
        let routing = routing(256, 8, if nodes > 1 { (nodes, nodes.min(4)) } else { (1, 1) });
        let group = Group::from_axes(&[GroupAxis { stride: 1, size: ranks }], &cluster);
        let mesh = Mesh::of_sizes(&[ranks]).unwrap();
        let cut = |dim: u8| Sharding::REPLICATED.with(ir::mesh::AxisId(0), Placement::Shard(dim));
        let change = (StepKind::AllToAll { from: 0, to: 1 }, cut(0), cut(1));
        let tokens = Bytes(4096.0 * 7168.0);
        let found =
            exchange(routing, change, (tokens * 8.0, &mesh), || group.clone(), (&cluster, &constants))
                .unwrap();
        let block = if nodes > 1 { 256.0 / nodes as f64 } else { 32.0 };
        let logical = tokens.0 * routing.share(block) * 8.0 / found.time.0 / 1e9;
        let error = logical / published - 1.0;
        assert!(error.abs() < 0.27, "{ranks} ranks: {logical:.0} for {published} GB/s");
    }
}
