//! A part of a cluster: some of its groups in an order, some of their nodes.
//!
//! Ranks follow the nodes that are left. Two that shared a domain of a link tier keep sharing one, and the domains of a
//! tier keep one size: a part for which that cannot be is none. Every group of a part says which nodes of the whole it
//! has.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::{Cluster, DeviceGroup, Tier};
use crate::numbers::Numbers;

/// Some nodes of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Position of the group.
    pub group: usize,
    /// Positions of the nodes in it.
    pub nodes: Numbers,
}

/// Why some nodes of a cluster are no cluster.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartError {
    /// There are none.
    #[error("no node is left")]
    Empty,
    /// An order of groups takes ranks apart that share a domain.
    #[error("a domain of tier `{tier}` is torn apart by the order of the groups")]
    Torn {
        /// Name of the tier.
        tier: String,
    },
    /// Domains of a tier differ in size.
    #[error(
        "domains of tier `{tier}` would have {} and {} devices: take as many nodes of each, or whole domains",
        sizes.0, sizes.1
    )]
    Unequal {
        /// Name of the tier.
        tier: String,
        /// Two of the sizes.
        sizes: (u64, u64),
    },
}

/// All nodes of a group.
pub fn whole(cluster: &Cluster, group: usize) -> Piece {
    Piece { group, nodes: (0..cluster.groups[group].n_nodes()).collect() }
}

/// The pieces of the nodes, counted through all groups, that somebody wants.
pub fn pieces(cluster: &Cluster, wanted: impl Fn(u64) -> bool) -> Vec<Piece> {
    let mut first = 0;
    let of_group = |(group, devices): (usize, &DeviceGroup)| {
        let (own, n_nodes) = (first, devices.n_nodes());
        first += n_nodes;
        Piece { group, nodes: (0..n_nodes).filter(|node| wanted(own + node)).collect() }
    };
    cluster.groups.iter().enumerate().map(of_group).filter(|piece| !piece.nodes.is_empty()).collect()
}

/// Some nodes of a cluster, in the order of the pieces.
///
/// Of tiers of 8 and 64 devices and five nodes of 8: tiers of 8 and 40.
///
/// # Errors
/// What would become of a tier.
pub fn part(cluster: &Cluster, pieces: &[Piece]) -> Result<Cluster, PartError> {
    let runs = runs(cluster, pieces);
    let total: u64 = runs.iter().map(|(_, count)| count).sum();
    let (Some((last, inner)), true) = (cluster.tiers.split_last(), total > 0) else {
        return Err(PartError::Empty);
    };
    let mut tiers = Vec::with_capacity(cluster.tiers.len());
    let mut below = 1;
    for tier in inner {
        let devices = domain(&runs, tier)?;
        check_nested(tier, (below, devices))?;
        below = devices;
        tiers.push(Tier { devices, ..tier.clone() });
    }
    check_nested(last, (below, total))?;
    tiers.push(Tier { devices: total, ..last.clone() });
    let names = cluster.nodes();
    let group = |piece: &Piece| {
        let group = &cluster.groups[piece.group];
        let name = |(at, name): (usize, u64)| piece.nodes.contains(at as u64).then_some(name);
        let nodes: Numbers = names[piece.group].iter().enumerate().filter_map(name).collect();
        let count = (nodes.count() * group.devices_per_node).min(group.count);
        let part_of = group.part_of.as_ref().map(|whole| {
            let count = count / group.ranks_per_device();
            Box::new(DeviceGroup { count, nodes: Some(nodes.clone()), ..(**whole).clone() })
        });
        DeviceGroup { count, nodes: Some(nodes), part_of, ..group.clone() }
    };
    Ok(Cluster { groups: pieces.iter().map(group).collect(), tiers, ..cluster.clone() })
}

/// Most of some nodes of a cluster, counted through all groups: where domains of a tier would have unequal sizes,
/// without those that are not whole, or with as many nodes of each as the smallest has, whichever leaves more devices.
///
/// # Errors
/// What would become of a tier by any of them.
pub fn largest_part(cluster: &Cluster, nodes: &BTreeSet<u64>) -> Result<Cluster, PartError> {
    let error = match part(cluster, &pieces(cluster, |node| nodes.contains(&node))) {
        Err(error @ PartError::Unequal { .. }) => error,
        other => return other,
    };
    let ranks = runs(cluster, &pieces(cluster, |_| true));
    let fewer = cluster.tiers.iter().flat_map(|tier| {
        let mut domains: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for &node in nodes {
            let (first, _) = ranks.get(node as usize).copied().unwrap_or_default();
            domains.entry(first / tier.devices.max(1)).or_default().push(node);
        }
        let most = domains.values().map(Vec::len).max().unwrap_or(0);
        let least = domains.values().map(Vec::len).min().unwrap_or(0);
        let whole = domains.values().filter(|own| own.len() == most).flatten().copied().collect();
        let alike = domains.values().flat_map(|own| own.iter().take(least)).copied().collect();
        [whole, alike]
    });
    let is_less = |some: &BTreeSet<u64>| !some.is_empty() && some.len() < nodes.len();
    let parts = fewer.filter(is_less).filter_map(|some| largest_part(cluster, &some).ok());
    // Of equals the first.
    parts.reduce(|best, other| if other.n_devices() > best.n_devices() { other } else { best }).ok_or(error)
}

/// Ranks of the whole cluster that the pieces have, in order: the first of a run, and how many.
fn runs(cluster: &Cluster, pieces: &[Piece]) -> Vec<(u64, u64)> {
    let mut first = vec![0];
    for group in &cluster.groups {
        first.push(first.last().unwrap_or(&0) + group.count);
    }
    let of_piece = |piece: &Piece| {
        let (from, per_node) = (first[piece.group], cluster.groups[piece.group].devices_per_node);
        let end = first[piece.group + 1];
        let run = |node: u64| (from + node * per_node, per_node.min(end - from - node * per_node));
        piece.nodes.iter().map(run).collect::<Vec<_>>()
    };
    pieces.iter().flat_map(of_piece).collect()
}

fn check_nested(tier: &Tier, (below, devices): (u64, u64)) -> Result<(), PartError> {
    if devices.is_multiple_of(below) {
        return Ok(());
    }
    Err(PartError::Unequal { tier: tier.name.clone(), sizes: (below, devices % below) })
}

/// Devices of every domain of a tier after some runs of ranks were put one behind the other.
fn domain(runs: &[(u64, u64)], tier: &Tier) -> Result<u64, PartError> {
    let devices = tier.devices.max(1);
    let (mut found, mut seen): (Vec<(u64, u64)>, BTreeSet<u64>) = (Vec::new(), BTreeSet::new());
    for &(first, count) in runs {
        let mut from = first;
        while from < first + count {
            let (own, end) = (from / devices, (from / devices + 1) * devices);
            let length = end.min(first + count) - from;
            match found.last_mut() {
                Some((last, size)) if *last == own => *size += length,
                _ if !seen.insert(own) => return Err(PartError::Torn { tier: tier.name.clone() }),
                _ => found.push((own, length)),
            }
            from += length;
        }
    }
    let size = found.first().map_or(0, |(_, size)| *size);
    match found.iter().find(|(_, other)| *other != size) {
        None => Ok(size),
        Some((_, other)) => {
            Err(PartError::Unequal { tier: tier.name.clone(), sizes: (size.max(*other), size.min(*other)) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::samples::cluster;

    /// A cluster of groups of so many nodes of 8, and of tiers of so many devices.
    fn grouped(counts: &[u64], tiers: &[u64]) -> Cluster {
        let flat = cluster(counts.iter().sum::<u64>() * 8);
        let group =
            |&nodes: &u64| DeviceGroup { count: nodes * 8, devices_per_node: 8, ..flat.groups[0].clone() };
        let tier = |(at, &devices): (usize, &u64)| Tier {
            name: format!("tier {at}"),
            devices,
            ..flat.tiers[0].clone()
        };
        Cluster {
            groups: counts.iter().map(group).collect(),
            tiers: tiers.iter().enumerate().map(tier).collect(),
            ..flat
        }
    }

    /// Nodes of the groups and sizes of the tiers of what comes out.
    fn check(whole: &Cluster, nodes: &str, expected: &str) {
        let wanted: Numbers = nodes.parse().unwrap();
        let found = part(whole, &pieces(whole, |node| wanted.contains(node)));
        let words = found.map(|part| {
            let nodes: Vec<String> = part.nodes().iter().map(Numbers::to_string).collect();
            let tiers: Vec<String> = part.tiers.iter().map(|tier| tier.devices.to_string()).collect();
            assert_eq!(part.n_devices(), part.tiers.last().unwrap().devices);
            format!("{} in tiers of {}", nodes.join(" | "), tiers.join(", "))
        });
        assert_eq!(words.unwrap_or_else(|error| error.to_string()), expected);
    }

    #[test]
    fn some_nodes_of_a_cluster_are_a_cluster() {
        let two = grouped(&[4, 4], &[8, 64]);
        check(&two, "0-3,7", "0-3 | 7 in tiers of 8, 40");
        check(&two, "5", "5 in tiers of 8, 8");
        check(&two, "9", "no node is left");
    }

    #[test]
    fn a_domain_that_is_not_whole_is_left_out_or_sets_the_size_of_the_others() {
        let left = |whole: &Cluster, lost: &[u64]| {
            let n_nodes: u64 = whole.groups.iter().map(DeviceGroup::n_nodes).sum();
            let nodes = (0..n_nodes).filter(|node| !lost.contains(node)).collect();
            let found = largest_part(whole, &nodes).unwrap();
            found.nodes().iter().map(Numbers::to_string).collect::<Vec<_>>().join(" | ")
        };
        let regions = grouped(&[2, 2, 2], &[8, 16, 48]);
        assert_eq!(left(&regions, &[0]), "2-3 | 4-5");
        assert_eq!(left(&regions, &[0, 3]), "1 | 2 | 4");
        assert_eq!(left(&grouped(&[8], &[8, 32, 64]), &[7]), "0-2,4-6");
        assert_eq!(left(&grouped(&[4, 4], &[8, 64]), &[7]), "0-3 | 4-6");
    }

    #[test]
    fn domains_keep_one_size() {
        let leaves = grouped(&[8], &[8, 32, 64]);
        check(&leaves, "0-1,4-5", "0-1,4-5 in tiers of 8, 16, 32");
        check(
            &leaves,
            "0-3,7",
            "domains of tier `tier 1` would have 32 and 8 devices: take as many nodes of each, or whole domains",
        );
        check(&leaves, "0-3", "0-3 in tiers of 8, 32, 32");
    }

    #[test]
    fn a_part_of_a_part_has_the_numbers_of_the_whole() {
        let whole = grouped(&[4, 4], &[8, 64]);
        let half = part(&whole, &pieces(&whole, |node| node % 2 == 1)).unwrap();
        assert_eq!(half.nodes().iter().map(Numbers::to_string).collect::<Vec<_>>(), ["1,3", "5,7"]);
        check(&half, "1-2", "3 | 5 in tiers of 8, 16");
        let seats = part(&half, &pieces(&half, |node| node == 2)).unwrap().seats();
        assert_eq!((seats.len(), seats[0], seats[7]), (8, (5, 0), (5, 7)));
    }
}
