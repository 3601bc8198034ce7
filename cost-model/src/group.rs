//! The ranks of one collective, as far as prices need them: how many share a domain of each link tier.
//!
//! All groups along a mesh axis run at once and the slowest sets the time, so a group counts the members of its worst
//! domain: a group of 3 on nodes of 8 somewhere has a node that holds only one of them.

use std::collections::BTreeMap;

use ir::cluster::{Cluster, Tier};

/// One mesh axis of a group: `size` ranks, `stride` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupAxis {
    /// Distance between neighbours, in ranks.
    pub stride: u64,
    /// Ranks along the axis.
    pub size: u64,
}

/// The members of one collective over a cluster's tiers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    n_members: u64,
    /// Per tier, members that share one domain of it; never falls, and ends with `n_members`.
    inside: Vec<u64>,
    /// The group of the cluster that holds all members, where its links are asked for.
    home: Option<usize>,
    /// How ranks of one device share its link, on a cluster where they do.
    sharing: Option<Sharing>,
}

/// What goes through the link of one device that runs several ranks, beside what one rank alone would send: in the
/// device where that is most, all groups at once.
///
/// A ring passes the `c` members on a device of `r` ranks one after the other and leaves it once, so that `r / c` rings
/// leave it. In an exchange each of its ranks sends to the `n - c` members elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Sharing {
    /// Rings that leave a device.
    pub(crate) rings: u64,
    /// Pairs of a rank of a device and a member of its group elsewhere.
    pub(crate) pairs: u64,
}

impl Sharing {
    /// Of so many members in a group on a device with so many ranks.
    fn of(here: u64, ranks: u64, n_members: u64) -> Self {
        Self { rings: ranks.div_ceil(here.max(1)), pairs: ranks * n_members.saturating_sub(here) }
    }

    /// Of groups whose members are listed; nothing where every rank has a device of its own.
    fn among<'r>(groups: impl Iterator<Item = &'r Vec<u64>>, cluster: &Cluster) -> Option<Self> {
        if !cluster.shares_devices() {
            return None;
        }
        let of_group = |group: &'r Vec<u64>| {
            let devices: Vec<(u64, u64)> = group.iter().map(|&rank| cluster.device_of(rank)).collect();
            let own = devices.clone();
            own.into_iter().map(move |(device, ranks)| {
                let here = devices.iter().filter(|(other, _)| *other == device).count();
                Self::of(here as u64, ranks, devices.len() as u64)
            })
        };
        groups
            .flat_map(of_group)
            .reduce(|a, b| Self { rings: a.rings.max(b.rings), pairs: a.pairs.max(b.pairs) })
    }
}

impl Group {
    /// The ranks `sum of i_j * stride_j` of the axes, on a mesh that starts at a domain of every tier it fills.
    ///
    /// Neighbouring axes are merged (2 ranks 1 apart and 4 ranks 2 apart are 8 ranks 1 apart). An axis that spans
    /// `extent = size * stride` ranks keeps `gcd(extent, domain) / stride` members together in every domain.
    /// 16 ranks 1 apart on nodes of 8: 8 per node. 4 ranks 8 apart: 1 per node.
    pub fn from_axes(axes: &[GroupAxis], cluster: &Cluster) -> Self {
        let axes = merged(axes);
        let n_members = axes.iter().fold(1_u64, |n, axis| n.saturating_mul(axis.size));
        let together = |tier: &Tier| axes.iter().map(|axis| together(*axis, tier.devices)).product();
        let group = Self::new(n_members, cluster.tiers.iter().map(together));
        if !cluster.shares_devices() {
            return group;
        }
        let mut listed: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for rank in 0..cluster.n_devices() {
            let place = |axis: &GroupAxis| rank / axis.stride.max(1) % axis.size * axis.stride;
            listed.entry(rank - axes.iter().map(place).sum::<u64>()).or_default().push(rank);
        }
        Self { sharing: Sharing::among(listed.values(), cluster), ..group }
    }

    /// Ranks listed one by one, for groups that no axes describe; members are taken as spread evenly over domains.
    ///
    /// Ranks 7 and 8 on nodes of 8: 1 per node.
    pub fn from_ranks(ranks: &[u64], cluster: &Cluster) -> Self {
        let n_members = ranks.len() as u64;
        let together = |tier: &Tier| {
            let mut domains: Vec<u64> = ranks.iter().map(|rank| rank / tier.devices.max(1)).collect();
            domains.sort_unstable();
            domains.dedup();
            n_members / (domains.len() as u64).max(1)
        };
        let sharing = Sharing::among(std::iter::once(&ranks.to_vec()), cluster);
        Self { sharing, ..Self::new(n_members, cluster.tiers.iter().map(together)) }
    }

    /// A rank by itself, whose collectives are free.
    pub fn alone(cluster: &Cluster) -> Self {
        Self::from_axes(&[], cluster)
    }

    fn new(n_members: u64, together: impl Iterator<Item = u64>) -> Self {
        let mut below = 1;
        let mut inside: Vec<u64> = together
            .map(|members| {
                below = members.clamp(below, n_members.max(below));
                below
            })
            .collect();
        // The outermost tier joins whatever is left.
        if let Some(outermost) = inside.last_mut() {
            *outermost = n_members;
        }
        Self { n_members, inside, home: None, sharing: None }
    }

    /// The same on the links of one group of the cluster.
    #[must_use]
    pub fn at(self, home: Option<usize>) -> Self {
        Self { home, ..self }
    }

    /// The group of the cluster on whose links the members are.
    pub(crate) fn home(&self) -> Option<usize> {
        self.home
    }

    /// Whether ranks share devices.
    pub(crate) fn shares_devices(&self) -> bool {
        self.sharing.is_some()
    }

    /// How many times as much as one rank sends goes through a device's link in rings and between pairs.
    pub(crate) fn in_rings(&self) -> f64 {
        self.sharing.map_or(1.0, |sharing| sharing.rings as f64)
    }

    /// The same where every member sends something to every other.
    pub(crate) fn in_exchanges(&self) -> f64 {
        let others = self.n_members.saturating_sub(1).max(1);
        self.sharing.map_or(1.0, |sharing| (sharing.pairs as f64 / others as f64).max(1.0))
    }

    /// Ranks that take part.
    pub fn n_members(&self) -> u64 {
        self.n_members
    }

    /// Per tier, innermost first: members that share one domain of it.
    pub fn members_per_domain(&self) -> &[u64] {
        &self.inside
    }

    /// Index of the innermost tier that joins all members; nothing for one member.
    pub fn spanning_tier(&self) -> Option<usize> {
        match self.n_members {
            0 | 1 => None,
            n => self.inside.iter().position(|members| *members == n),
        }
    }
}

/// Axes in rising stride, those that continue each other joined, those of one rank dropped.
fn merged(axes: &[GroupAxis]) -> Vec<GroupAxis> {
    let mut sorted: Vec<GroupAxis> = axes.iter().copied().filter(|axis| axis.size > 1).collect();
    sorted.sort_unstable();
    let mut merged: Vec<GroupAxis> = Vec::with_capacity(sorted.len());
    for axis in sorted {
        match merged.last_mut() {
            Some(last) if last.stride.saturating_mul(last.size) == axis.stride => last.size *= axis.size,
            _ => merged.push(axis),
        }
    }
    merged
}

fn together(axis: GroupAxis, domain: u64) -> u64 {
    let stride = axis.stride.max(1);
    (gcd(axis.size.saturating_mul(stride), domain) / stride).max(1)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
pub(crate) mod tests {
    use ir::cluster::{CLUSTER_SCHEMA_VERSION, DeviceGroup, InSwitchReduction, Wiring};
    use ir::units::{Bytes, BytesPerSecond, Seconds};

    use super::*;
    use crate::rates::tests::a100;

    pub(crate) fn tier(name: &str, devices: u64, giga: f64, micro: f64) -> Tier {
        Tier {
            name: name.into(),
            devices,
            bandwidth_bytes_per_s: BytesPerSecond(giga * 1e9),
            latency_s: Seconds(micro * 1e-6),
            wiring: Wiring::Switch,
            oversubscription: 1.0,
            routing: Default::default(),
            in_switch_reduction: InSwitchReduction::Absent,
        }
    }

    pub(crate) fn cluster_of(tiers: Vec<Tier>) -> Cluster {
        let count = tiers.last().map_or(1, |tier| tier.devices);
        Cluster {
            schema_version: CLUSTER_SCHEMA_VERSION,
            name: "test".into(),
            groups: vec![DeviceGroup {
                device: a100(),
                count,
                devices_per_node: 8,
                host_memory_bytes: Bytes(2e12),
                nvme: None,
                price_per_device_hour: None,
                failures_per_device_hour: None,
                links: Vec::new(),
                nodes: None,
                part_of: None,
            }],
            tiers,
            reserve_bytes: Bytes(2e9),
            calibration: None,
        }
    }

    /// Sixteen nodes of eight A100: 300 GB/s and 2 us inside, 25 GB/s and 10 us between.
    pub(crate) fn dgx_a100() -> Cluster {
        cluster_of(vec![tier("nvlink", 8, 300.0, 2.0), tier("infiniband", 128, 25.0, 10.0)])
    }

    pub(crate) fn group(axes: &[(u64, u64)], cluster: &Cluster) -> Group {
        let axes: Vec<GroupAxis> = axes.iter().map(|&(size, stride)| GroupAxis { size, stride }).collect();
        Group::from_axes(&axes, cluster)
    }

    fn check(axes: &[(u64, u64)], inside: &[u64]) {
        assert_eq!(group(axes, &dgx_a100()).members_per_domain(), inside);
    }

    #[test]
    fn an_axis_inside_a_node_shares_it() {
        check(&[(8, 1)], &[8, 8]);
        check(&[(4, 2)], &[4, 4]);
        check(&[], &[1, 1]);
    }

    #[test]
    fn an_axis_over_nodes_has_the_members_that_its_stride_leaves() {
        check(&[(16, 1)], &[8, 16]);
        check(&[(8, 4)], &[2, 8]);
        check(&[(16, 8)], &[1, 16]);
    }

    #[test]
    fn axes_that_continue_each_other_are_one() {
        check(&[(2, 2), (2, 1), (8, 4)], &[8, 32]);
        check(&[(2, 1), (4, 16)], &[2, 8]);
    }

    #[test]
    fn a_group_that_straddles_nodes_counts_its_worst_node() {
        check(&[(3, 1)], &[1, 3]);
        check(&[(12, 1)], &[4, 12]);
    }

    #[test]
    fn listed_ranks_are_placed_one_by_one() {
        let inside = |ranks: &[u64]| Group::from_ranks(ranks, &dgx_a100()).members_per_domain().to_vec();
        assert_eq!(inside(&[6, 7]), [2, 2]);
        assert_eq!(inside(&[7, 8]), [1, 2]);
    }

    #[test]
    fn the_spanning_tier_is_the_innermost_that_joins_all() {
        let cluster = dgx_a100();
        assert_eq!(group(&[(8, 1)], &cluster).spanning_tier(), Some(0));
        assert_eq!(group(&[(2, 8)], &cluster).spanning_tier(), Some(1));
        assert_eq!(Group::alone(&cluster).spanning_tier(), None);
    }

    /// One device of each kind, of which the first runs so many ranks, three times over.
    fn sharing(ranks: u64) -> Cluster {
        let mut cluster = cluster_of(vec![tier("pcie", 6, 30.0, 2.0)]);
        let slow = DeviceGroup { count: 1, devices_per_node: 1, ..cluster.groups[0].clone() };
        let mut fast = slow.clone();
        fast.device.name = "fast".into();
        cluster.groups = [&fast, &slow, &fast, &slow, &fast, &slow].map(Clone::clone).to_vec();
        cluster.with_ranks(&[ranks, 1, ranks, 1, ranks, 1]).unwrap()
    }

    #[test]
    fn a_ring_leaves_a_device_once_for_all_its_members_there() {
        let cluster = sharing(3);
        let of = |axes: &[(u64, u64)]| {
            let group = group(axes, &cluster);
            (group.in_rings(), group.in_exchanges())
        };
        // All four ranks of two devices: three ranks send to one, or one to three.
        assert_eq!(of(&[(4, 1)]), (1.0, 1.0));
        // Rank i of every pair of devices: three rings through one link, each of three to two others.
        assert_eq!(of(&[(3, 4)]), (3.0, 3.0));
        assert_eq!(of(&[(12, 1)]), (1.0, 27.0 / 11.0));
        assert_eq!(Group::alone(&cluster).in_rings(), 3.0);
    }

    /// What leaves each device, message by message, is never more than is counted.
    #[test]
    fn no_device_sends_more_than_its_link_is_priced_for() {
        for (ranks, sizes) in [(3, [3, 2, 2]), (3, [2, 6, 1]), (2, [3, 3, 1]), (1, [3, 2, 1]), (5, [3, 3, 2])]
        {
            let cluster = sharing(ranks);
            let strides = [sizes[1] * sizes[2], sizes[2], 1];
            for chosen in 1..8_usize {
                let axes: Vec<(u64, u64)> =
                    (0..3).filter(|at| chosen >> at & 1 == 1).map(|at| (sizes[at], strides[at])).collect();
                let found = group(&axes, &cluster);
                let (mut rings, mut pairs) = (BTreeMap::new(), BTreeMap::new());
                let all: Vec<u64> = (0..cluster.n_devices()).collect();
                let base = |rank: u64| -> u64 {
                    rank - axes.iter().map(|(size, stride)| rank / stride % size * stride).sum::<u64>()
                };
                for &a in &all {
                    let members: Vec<u64> = all.iter().copied().filter(|&b| base(a) == base(b)).collect();
                    let at = members.iter().position(|&member| member == a).unwrap();
                    let leaves = |b: u64| cluster.device_of(a).0 != cluster.device_of(b).0;
                    let device = cluster.device_of(a).0;
                    *rings.entry(device).or_insert(0) += u64::from(leaves(members[(at + 1) % members.len()]));
                    *pairs.entry(device).or_insert(0) +=
                        members.iter().filter(|&&b| leaves(b)).count() as u64;
                }
                let most = |counts: &BTreeMap<u64, u64>| counts.values().copied().max().unwrap_or(0) as f64;
                let others = (found.n_members() - 1).max(1) as f64;
                assert!(most(&rings) <= found.in_rings(), "{ranks} {sizes:?} {axes:?}");
                assert!(most(&pairs) / others <= found.in_exchanges() + 1e-9, "{ranks} {sizes:?} {axes:?}");
            }
        }
    }
}
