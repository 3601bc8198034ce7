//! The same kind of cluster with another number of devices.
//!
//! Groups keep their proportions. A tier's domain keeps its size where the cluster still fills it and shrinks to the
//! cluster where it does not; the last tier always spans everything.

use ir::cluster::{Cluster, DeviceGroup};
use ir::cluster_limits::MAX_DEVICES;

use crate::input_error::InputError;

/// How large a cluster shall be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// So many nodes.
    Nodes(u64),
    /// So many devices: whole nodes, or a part of one.
    Devices(u64),
}

/// Gives a cluster another size.
///
/// # Errors
/// Where the size does not fill nodes, tiers or the proportions of a mixed cluster.
pub fn rescale(cluster: &Cluster, size: Size) -> Result<Cluster, InputError> {
    let counts = match size {
        Size::Nodes(nodes) => counts_of_nodes(cluster, nodes)?,
        Size::Devices(devices) => counts_of_devices(cluster, devices)?,
    };
    let groups: Vec<DeviceGroup> =
        cluster.groups.iter().zip(counts).map(|(g, count)| resized(g, count)).collect();
    let total: u64 = groups.iter().map(|group| group.count).sum();
    if total > MAX_DEVICES {
        return Err(fail(cluster, format!("{total} devices, at most {MAX_DEVICES} are planned for")));
    }
    let groups = numbered(groups, cluster);
    let mut tiers = cluster.tiers.clone();
    let last = tiers.len().saturating_sub(1);
    for (index, tier) in tiers.iter_mut().enumerate() {
        tier.devices = if index == last { total } else { tier.devices.min(total) };
        if !total.is_multiple_of(tier.devices) {
            let (domain, name) = (tier.devices, &tier.name);
            return Err(fail(
                cluster,
                format!("{total} devices do not fill the domains of {domain} of tier `{name}`"),
            )
            .with_hint(format!("take fewer than {domain} devices or a multiple of {domain}")));
        }
    }
    Ok(Cluster { groups, tiers, ..cluster.clone() })
}

fn fail(cluster: &Cluster, what: String) -> InputError {
    InputError::whole(&cluster.name, what)
}

/// A group of another size; a part of a node is a smaller node.
fn resized(group: &DeviceGroup, count: u64) -> DeviceGroup {
    DeviceGroup { count, devices_per_node: group.devices_per_node.min(count), ..group.clone() }
}

/// Groups of which some have numbers of nodes: the first of them, where they have become fewer; where there are more,
/// nobody knows the numbers of the others, and none are kept.
fn numbered(groups: Vec<DeviceGroup>, before: &Cluster) -> Vec<DeviceGroup> {
    let shrank = groups.iter().zip(&before.groups).all(|(group, old)| group.n_nodes() <= old.n_nodes());
    let nodes = |group: &DeviceGroup| {
        let known = group.nodes.as_ref().filter(|_| shrank)?;
        Some(known.iter().take(group.n_nodes() as usize).collect())
    };
    groups.into_iter().map(|group| DeviceGroup { nodes: nodes(&group), ..group }).collect()
}

fn counts_of_nodes(cluster: &Cluster, nodes: u64) -> Result<Vec<u64>, InputError> {
    if nodes == 0 {
        return Err(fail(cluster, "0 nodes".into()));
    }
    let own: Vec<u64> = cluster.groups.iter().map(|group| group.count / group.devices_per_node).collect();
    let all: u64 = own.iter().sum();
    let too_many = || fail(cluster, format!("{nodes} nodes are more than can be planned for"));
    let mut counts = Vec::new();
    for (group, &share) in cluster.groups.iter().zip(&own) {
        let scaled = nodes.checked_mul(share).ok_or_else(too_many)?;
        if scaled % all != 0 {
            let unit = least_nodes(cluster);
            return Err(fail(cluster, format!("{nodes} nodes cannot keep the proportions of the groups"))
                .with_hint(format!(
                    "take a multiple of {unit} nodes, or write the counts in a file of your own"
                )));
        }
        counts.push((scaled / all).checked_mul(group.devices_per_node).ok_or_else(too_many)?);
    }
    counts.iter().try_fold(0_u64, |sum, &count| sum.checked_add(count)).ok_or_else(too_many)?;
    Ok(counts)
}

fn counts_of_devices(cluster: &Cluster, devices: u64) -> Result<Vec<u64>, InputError> {
    if devices == 0 {
        return Err(fail(cluster, "0 devices".into()));
    }
    let per_node = cluster.groups[0].devices_per_node;
    if cluster.groups.len() == 1 && devices < per_node {
        return Ok(vec![devices]);
    }
    if cluster.groups.iter().any(|group| group.devices_per_node != per_node) {
        return Err(fail(cluster, "its groups have nodes of different size".into())
            .with_hint("give a number of nodes"));
    }
    if !devices.is_multiple_of(per_node) {
        return Err(fail(cluster, format!("{devices} devices do not fill nodes of {per_node}")).with_hint(
            match cluster.groups.len() {
                1 => format!("take a multiple of {per_node}, or a part of one node"),
                _ => {
                    let least = per_node.saturating_mul(least_nodes(cluster));
                    format!("take a multiple of {least}, which keeps the proportions of the groups")
                }
            },
        ));
    }
    counts_of_nodes(cluster, devices / per_node)
}

/// The fewest nodes that keep the proportions of the groups.
fn least_nodes(cluster: &Cluster) -> u64 {
    let nodes = cluster.groups.iter().map(DeviceGroup::n_nodes);
    nodes.clone().sum::<u64>() / nodes.fold(0, gcd).max(1)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use ir::cluster_part::{part, pieces};

    use super::*;
    use crate::cluster::read_cluster;
    use crate::shipped_clusters::shipped_cluster;

    /// `counts | tier sizes`, or the error.
    fn check(name: &str, size: Size, expected: &str) {
        let cluster = read_cluster(name, shipped_cluster(name).unwrap().text).unwrap();
        let found = match rescale(&cluster, size) {
            Ok(cluster) => {
                let counts: Vec<u64> = cluster.groups.iter().map(|group| group.count).collect();
                let tiers: Vec<u64> = cluster.tiers.iter().map(|tier| tier.devices).collect();
                format!("{counts:?} {tiers:?}")
            }
            Err(error) => error.to_string().split('\n').next().unwrap_or_default().to_owned(),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn the_last_tier_grows_with_the_cluster() {
        check("dgx-h100", Size::Nodes(2048), "[16384] [8, 16384]");
        check("dgx-h100", Size::Devices(16), "[16] [8, 16]");
        check("frontier", Size::Nodes(1), "[8] [2, 8, 8]");
        check("tpu-v4", Size::Devices(64), "[64] [64, 64]");
        check("gb200-nvl72", Size::Nodes(36), "[144] [72, 144]");
    }

    #[test]
    fn a_part_of_one_node_is_a_smaller_node() {
        check("dgx-h100", Size::Devices(2), "[2] [2, 2]");
        check("dgx-h100", Size::Devices(12), "dgx-h100: 12 devices do not fill nodes of 8");
        check(
            "gb200-nvl72",
            Size::Devices(80),
            "gb200-nvl72: 80 devices do not fill the domains of 72 of tier `nvlink`",
        );
    }

    #[test]
    fn a_mixed_cluster_keeps_its_proportions() {
        check("mixed-a100-v100", Size::Nodes(2), "[8, 8] [8, 16]");
        check(
            "mixed-a100-v100",
            Size::Nodes(3),
            "mixed-a100-v100: 3 nodes cannot keep the proportions of the groups",
        );
        check("mixed-a100-v100", Size::Devices(64), "[32, 32] [8, 64]");
        let mixed =
            read_cluster("mixed-a100-v100", shipped_cluster("mixed-a100-v100").unwrap().text).unwrap();
        let said = rescale(&mixed, Size::Devices(3)).unwrap_err().to_string();
        assert!(said.contains("take a multiple of 16,"), "{said}");
        assert!(rescale(&mixed, Size::Devices(16)).is_ok());
    }

    #[test]
    fn numbers_of_nodes_stay_where_nodes_go() {
        let whole = read_cluster("dgx-h100", shipped_cluster("dgx-h100").unwrap().text).unwrap();
        let four = rescale(&whole, Size::Nodes(4)).unwrap();
        let part = part(&four, &pieces(&four, |node| node != 1)).unwrap();
        let nodes = |size: Size| rescale(&part, size).unwrap().groups[0].nodes.clone();
        assert_eq!(nodes(Size::Nodes(2)), Some("0,2".parse().unwrap()));
        assert_eq!(nodes(Size::Devices(4)), Some("0".parse().unwrap()));
        assert_eq!((nodes(Size::Nodes(4)), four.groups[0].nodes.clone()), (None, None));
    }

    #[test]
    fn absurd_sizes_are_refused() {
        check("dgx-h100", Size::Nodes(0), "dgx-h100: 0 nodes");
        check("dgx-h100", Size::Devices(0), "dgx-h100: 0 devices");
        check(
            "dgx-h100",
            Size::Nodes(u64::MAX),
            "dgx-h100: 18446744073709551615 nodes are more than can be planned for",
        );
        check(
            "dgx-h100",
            Size::Nodes(2_000_000),
            "dgx-h100: 16000000 devices, at most 10000000 are planned for",
        );
    }
}
