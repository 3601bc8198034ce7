//! The tiers that a group crosses, with the rate that one device gets on each.
//!
//! Efficiencies are those of collectives in whole training steps; wiring decides how much of a device's bandwidth a
//! group can use.

use ir::cluster::{Cluster, InSwitchReduction, Link, Routing, Wiring};
use ir::units::{BytesPerSecond, Seconds};

use crate::constants::Constants;
use crate::group::Group;

/// Whether a tier lies inside a node or scale-up domain, or is a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    Node,
    Network,
}

/// One tier that joins members of a group which no inner tier joins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Level {
    pub(crate) reach: Reach,
    pub(crate) wiring: Wiring,
    /// Parts of a domain that this tier joins, as far as the group has members there; above 1.
    pub(crate) ways: f64,
    /// Members inside one such part.
    pub(crate) below: f64,
    /// Members inside one domain: `ways * below`.
    pub(crate) inside: f64,
    /// Steps of a ring around one domain's parts.
    pub(crate) ring_steps: f64,
    pub(crate) latency: Seconds,
    /// One device's rate in rings.
    pub(crate) rate: BytesPerSecond,
    /// One device's rate where each pair exchanges its own data.
    pub(crate) exchange_rate: BytesPerSecond,
    /// Rate between two devices.
    pub(crate) pair_rate: BytesPerSecond,
    /// Rate of in-switch reduction, where there is one.
    pub(crate) in_switch_rate: Option<BytesPerSecond>,
}

/// The levels of a group, innermost first. Allocates nothing.
pub(crate) fn levels(
    group: &Group,
    cluster: &Cluster,
    constants: &Constants,
) -> impl Iterator<Item = Level> + Clone {
    let (inside, home) = (group.members_per_domain(), group.home());
    let (in_rings, in_exchanges) = (group.in_rings(), group.in_exchanges());
    cluster.tiers.iter().zip(inside).enumerate().filter_map(move |(tier_idx, (tier, &members))| {
        let inner = tier_idx.checked_sub(1);
        let below = inner.map_or(1, |inner| inside[inner]);
        let part = inner.map_or(1, |inner| cluster.tiers[inner].devices).max(1);
        (members > below).then(|| {
            let parts = tier.devices as f64 / part as f64;
            let link = cluster.link(tier_idx, home);
            let of_device =
                level(&link, (below as f64, members as f64, parts), reach(tier_idx, cluster), constants);
            Level {
                rate: of_device.rate / in_rings,
                pair_rate: of_device.pair_rate / in_rings,
                exchange_rate: of_device.exchange_rate / in_exchanges,
                ..of_device
            }
        })
    })
}

/// A tier is inside the node if it is the innermost, or no larger than a node.
pub(crate) fn reach(tier_idx: usize, cluster: &Cluster) -> Reach {
    let node = cluster.groups.iter().map(|group| group.devices_per_node).max().unwrap_or(1);
    match tier_idx {
        0 => Reach::Node,
        _ if cluster.tiers[tier_idx].devices <= node => Reach::Node,
        _ => Reach::Network,
    }
}

fn level(tier: &Link, (below, inside, parts): (f64, f64, f64), reach: Reach, constants: &Constants) -> Level {
    let ways = inside / below;
    let (efficiency, in_switch) = match reach {
        Reach::Node => (constants.node_link_efficiency_fraction, constants.in_switch_node_fraction),
        Reach::Network => (constants.network_efficiency_fraction, constants.in_switch_network_fraction),
    };
    // Flows of many nodes meet on links that hashing gave to several of them.
    let contention = match tier.routing {
        Routing::Balanced => 1.0,
        Routing::Hashed => 1.0 + constants.network_contention_per_log2_nodes * ways.log2(),
    };
    let listed = tier.bandwidth_bytes_per_s / (tier.oversubscription.max(1.0) * contention);
    let share = Share::of(tier.wiring, ways, parts, constants);
    Level {
        reach,
        wiring: tier.wiring,
        ways,
        below,
        inside,
        ring_steps: share.ring_steps,
        latency: tier.latency_s,
        rate: listed * efficiency * share.ring,
        exchange_rate: listed * efficiency * share.exchange,
        pair_rate: listed * efficiency * share.pair,
        in_switch_rate: match tier.in_switch_reduction {
            InSwitchReduction::Supported => Some(listed * in_switch),
            InSwitchReduction::Absent => None,
        },
    }
}

/// How much of a device's bandwidth a group of `ways` out of `parts` can use.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Share {
    ring: f64,
    exchange: f64,
    pair: f64,
    ring_steps: f64,
}

impl Share {
    fn of(wiring: Wiring, ways: f64, parts: f64, constants: &Constants) -> Self {
        let same = |share| Self { ring: share, exchange: share, pair: share, ring_steps: ways - 1.0 };
        match wiring {
            Wiring::Switch => same(1.0),
            Wiring::Bus => same(1.0 / constants.bus_devices_per_uplink),
            // A link to each of the other parts: a group uses those to its own members.
            Wiring::Mesh => {
                let link = 1.0 / (parts - 1.0).max(1.0);
                Self { pair: link, ..same((link * (ways - 1.0)).min(1.0)) }
            }
            Wiring::Torus => Self::of_torus(ways, parts, 3.0),
            Wiring::Torus2d => Self::of_torus(ways, parts, 2.0),
        }
    }

    /// A torus of `parts` devices on `n_axes` axes, `parts^(1/n_axes)` long each; two links of a device lie on each
    /// axis.
    ///
    /// The group takes as few axes `j` as hold it, each `ways^(1/j)` long. Rings use `j / n_axes` of the bandwidth,
    /// half of it where the group does not close the axis. Exchanges are bound by the bisection: the mean distance on a
    /// closed axis of `n` is `n / 4`, so `t = S n / (8 link)`, twice that on an open one.
    fn of_torus(ways: f64, parts: f64, n_axes: f64) -> Self {
        const ROUNDING: f64 = 1e-9;
        let side = parts.max(ways).powf(1.0 / n_axes);
        let axes = (ways.ln() / side.ln() - ROUNDING).ceil().clamp(1.0, n_axes);
        let length = ways.powf(1.0 / axes);
        let closed = if length + ROUNDING >= side { 1.0 } else { 0.5 };
        let link = 0.5 / n_axes;
        Self {
            ring: closed * axes / n_axes,
            exchange: closed * 8.0 * link / length * (ways - 1.0) / ways,
            pair: link,
            ring_steps: axes * (length - 1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use ir::cluster::{OwnLink, Tier};

    use super::*;
    use crate::group::tests::{cluster_of, dgx_a100, group, tier};

    fn rates(wiring: Wiring, devices: u64, members: u64) -> (f64, f64, f64) {
        let cluster = cluster_of(vec![Tier { wiring, ..tier("link", devices, 100.0, 1.0) }]);
        let constants = Constants { node_link_efficiency_fraction: 1.0, ..Constants::load() };
        let group = group(&[(members, 1)], &cluster);
        let level = levels(&group, &cluster, &constants).next().unwrap();
        let giga = |rate: BytesPerSecond| (rate.0 / 1e7).round() / 100.0;
        (giga(level.rate), giga(level.exchange_rate), giga(level.pair_rate))
    }

    #[test]
    fn a_switch_gives_each_group_all_of_it() {
        assert_eq!(rates(Wiring::Switch, 8, 2), (100.0, 100.0, 100.0));
    }

    #[test]
    fn a_mesh_gives_a_group_the_links_among_its_members() {
        // Two of eight MI300X reach 48 GB/s of 448, all eight 313 (github stas00/ml-engineering network/README.md).
        assert_eq!(rates(Wiring::Mesh, 8, 2), (14.29, 14.29, 14.29));
        assert_eq!(rates(Wiring::Mesh, 8, 8), (100.0, 100.0, 14.29));
    }

    #[test]
    fn hashed_flows_meet_the_more_the_farther_they_go() {
        let constants = Constants {
            network_contention_per_log2_nodes: 0.25,
            node_link_efficiency_fraction: 1.0,
            ..Constants::load()
        };
        let cluster = cluster_of(vec![Tier { routing: Routing::Hashed, ..tier("link", 16, 100.0, 1.0) }]);
        let rate = |members: u64| {
            levels(&group(&[(members, 1)], &cluster), &cluster, &constants).next().unwrap().rate.0 / 1e9
        };
        assert_eq!((rate(2), rate(16)), (80.0, 50.0));
    }

    #[test]
    fn a_group_of_the_cluster_may_have_links_of_its_own() {
        let mut cluster = cluster_of(vec![tier("nvlink", 8, 100.0, 1.0), tier("fabric", 16, 10.0, 1.0)]);
        let link = tier("nvlink", 8, 300.0, 1.0).link();
        cluster.groups[0].links = vec![OwnLink { tier: "nvlink".into(), link }];
        let constants = Constants { node_link_efficiency_fraction: 1.0, ..Constants::load() };
        let rates = |home: Option<usize>| -> Vec<f64> {
            let group = group(&[(16, 1)], &cluster).at(home);
            levels(&group, &cluster, &constants).map(|level| level.rate.0 / 1e9).collect()
        };
        assert_eq!(rates(Some(0))[0], 300.0);
        assert_eq!(rates(None)[0], 100.0);
        assert_eq!(rates(Some(0))[1], rates(None)[1]);
    }

    #[test]
    fn devices_on_a_bus_share_their_uplink() {
        assert_eq!(rates(Wiring::Bus, 8, 8), (50.0, 50.0, 50.0));
    }

    #[test]
    fn a_torus_gives_a_group_the_axes_it_lies_on() {
        // 16 x 16 x 16: one closed axis has a third; an open one of 4 half of that.
        assert_eq!(rates(Wiring::Torus, 4096, 16).0, 33.33);
        assert_eq!(rates(Wiring::Torus, 4096, 4).0, 16.67);
        assert_eq!(rates(Wiring::Torus, 4096, 4096).0, 100.0);
        // Exchange on a closed axis of 16: S * 16 / (8 * 16.67 GB/s) = S * 15/16 / 7.81 GB/s.
        assert_eq!(rates(Wiring::Torus, 4096, 16).1, 7.81);
        // 16 x 16: one closed axis has half.
        assert_eq!(rates(Wiring::Torus2d, 256, 16).0, 50.0);
        assert_eq!(rates(Wiring::Torus2d, 256, 256).0, 100.0);
    }

    #[test]
    fn a_group_crosses_only_the_tiers_that_join_its_members() {
        let (cluster, constants) = (dgx_a100(), Constants::load());
        let ways = |axes: &[(u64, u64)]| {
            levels(&group(axes, &cluster), &cluster, &constants).map(|level| level.ways).collect::<Vec<_>>()
        };
        assert_eq!(ways(&[(8, 1)]), [8.0]);
        assert_eq!(ways(&[(16, 1)]), [8.0, 2.0]);
        assert_eq!(ways(&[(16, 8)]), [16.0]);
        assert_eq!(ways(&[]), [0.0; 0]);
    }
}
