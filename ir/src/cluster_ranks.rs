//! Clusters on which several ranks share a device: how unlike devices take unequal parts of one tensor.
//!
//! Every rank of a mesh has an equal block of what an axis cuts. Where a fast device runs three ranks and a slow one
//! runs one, an axis of four cuts tensors between the two as 3 : 1 (AccPar, Song et al. 2020, HPCA; HAP, Zhang et al.
//! 2024, arXiv 2401.05965). Programs, proofs and runs stay those of ranks; only the cluster knows of devices:
//!
//! ```text
//! group of n devices, r ranks on each  ->  group of n r ranks, each an r-th of a device               -> with_ranks()
//! domain of d devices of a tier        ->  domain of the ranks on them, as many in every domain
//! ```
//! The ranks of a device run in turn, so a rank has an r-th of its rates and of its memory. Ranks wait for each other
//! in collectives, so each is taken for no better than any other, figure by figure: a third of a device may have more
//! FLOP/s than a whole slow one and less memory bandwidth. What goes between ranks of a device crosses no link.

use crate::cluster::{Cluster, Device, DeviceGroup};
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond};

/// Most ranks of a cluster whose ranks share devices.
pub const MAX_SHARING_RANKS: u64 = 32;

impl DeviceGroup {
    /// The group as it is, its devices whole.
    pub fn whole(&self) -> &DeviceGroup {
        self.part_of.as_deref().unwrap_or(self)
    }

    /// Ranks that each of its devices runs.
    pub fn ranks_per_device(&self) -> u64 {
        (self.count / self.whole().count.max(1)).max(1)
    }
}

impl Cluster {
    /// Whether some device runs several ranks.
    pub fn shares_devices(&self) -> bool {
        self.groups.iter().any(|group| group.part_of.is_some())
    }

    /// Devices, however many ranks they run.
    pub fn n_whole_devices(&self) -> u64 {
        self.groups.iter().map(|group| group.whole().count).sum()
    }

    /// The device that runs a rank, counted through all groups, and how many ranks it runs.
    ///
    /// Of one device with three ranks and one with one, rank 3 is on device 1, alone.
    pub fn device_of(&self, rank: u64) -> (u64, u64) {
        let (mut first, mut devices) = (0, 0);
        for group in &self.groups {
            let each = group.ranks_per_device();
            if rank < first + group.count {
                return (devices + (rank - first) / each, each);
            }
            (first, devices) = (first + group.count, devices + group.whole().count);
        }
        (devices + (rank - first), 1)
    }

    /// What joins two ranks, by its place in [`Cluster::levels`].
    pub fn level_between(&self, a: u64, b: u64) -> usize {
        let tier = self.tier_between(a, b);
        match self.shares_devices() {
            false => tier,
            true if self.device_of(a).0 == self.device_of(b).0 => 0,
            true => tier + 1,
        }
    }

    /// Names of what may join two ranks, innermost first: a device that both are on, where ranks share devices, then
    /// the link tiers.
    pub fn levels(&self) -> Vec<&str> {
        let device = self.shares_devices().then_some("no link (one device)");
        device.into_iter().chain(self.tiers.iter().map(|tier| tier.name.as_str())).collect()
    }

    /// The same devices with so many ranks on each, group by group; nothing where domains of a tier would differ in
    /// ranks, a number is zero, or there would be too many ranks.
    #[must_use]
    pub fn with_ranks(&self, per_device: &[u64]) -> Option<Self> {
        let each: Vec<u64> = self
            .groups
            .iter()
            .zip(per_device)
            .flat_map(|(g, &n)| vec![n; g.count.min(MAX_SHARING_RANKS) as usize])
            .collect();
        let all: u64 = self
            .groups
            .iter()
            .zip(per_device)
            .map(|(group, &n)| group.count.saturating_mul(n))
            .fold(0, u64::saturating_add);
        if self.shares_devices()
            || per_device.len() != self.groups.len()
            || per_device.contains(&0)
            || all > MAX_SHARING_RANKS
        {
            return None;
        }
        let mut tiers = self.tiers.clone();
        for tier in &mut tiers {
            let mut domains =
                each.chunks(tier.devices.max(1) as usize).map(|domain| domain.iter().sum::<u64>());
            let ranks = domains.next()?;
            if domains.any(|other| other != ranks) {
                return None;
            }
            tier.devices = ranks;
        }
        let parts: Vec<Device> =
            self.groups.iter().zip(per_device).map(|(group, &n)| part(&group.device, n)).collect();
        let groups = self.groups.iter().zip(per_device).zip(&parts).map(|((group, &n), own)| {
            let per_rank = |figure: Option<f64>| figure.map(|figure| figure / n as f64);
            DeviceGroup {
                device: no_better(own, &parts),
                count: group.count * n,
                devices_per_node: group.devices_per_node * n,
                price_per_device_hour: per_rank(group.price_per_device_hour),
                failures_per_device_hour: per_rank(group.failures_per_device_hour),
                part_of: Some(Box::new(group.clone())),
                ..group.clone()
            }
        });
        Some(Self { groups: groups.collect(), tiers, ..self.clone() })
    }

    /// The same with its devices whole, a rank on each.
    #[must_use]
    pub fn whole_devices(&self) -> Self {
        if !self.shares_devices() {
            return self.clone();
        }
        let (ranks, devices) = (self.n_devices().max(1), self.n_whole_devices());
        let groups = self.groups.iter().map(|group| group.whole().clone()).collect();
        let mut tiers = self.tiers.clone();
        tiers
            .iter_mut()
            .for_each(|tier| tier.devices = (tier.devices.saturating_mul(devices) / ranks).max(1));
        Self { groups, tiers, ..self.clone() }
    }
}

/// One of `n` equal parts of a device's time and memory; all its units work for the part whose turn it is.
fn part(device: &Device, n: u64) -> Device {
    let of = n as f64;
    Device {
        name: if n == 1 { device.name.clone() } else { format!("{}/{n}", device.name) },
        peak_flops_per_s: device.peak_flops_per_s.iter().map(|(&p, &rate)| (p, rate / of)).collect(),
        memory_bytes: device.memory_bytes / of,
        memory_bandwidth_bytes_per_s: device.memory_bandwidth_bytes_per_s / of,
        host_link_bytes_per_s: device.host_link_bytes_per_s / of,
        watts: device.watts.map(|watts| watts / of),
        ..device.clone()
    }
}

/// A part that is in nothing better than any of several.
fn no_better(own: &Device, all: &[Device]) -> Device {
    let least = |of: &dyn Fn(&Device) -> f64| all.iter().map(of).fold(f64::INFINITY, f64::min);
    let peak = |(&precision, &rate): (&_, &FlopsPerSecond)| {
        let others = all.iter().filter_map(|device| device.peak_flops_per_s.get(&precision).copied());
        (precision, others.fold(rate, FlopsPerSecond::min))
    };
    Device {
        peak_flops_per_s: own.peak_flops_per_s.iter().map(peak).collect(),
        memory_bytes: Bytes(least(&|device| device.memory_bytes.0)),
        memory_bandwidth_bytes_per_s: BytesPerSecond(least(&|device| device.memory_bandwidth_bytes_per_s.0)),
        host_link_bytes_per_s: BytesPerSecond(least(&|device| device.host_link_bytes_per_s.0)),
        ..own.clone()
    }
}

#[cfg(test)]
mod tests {
    use crate::cluster::{Cluster, Precision};
    use crate::plan::samples;
    use crate::units::{BytesPerSecond, FlopsPerSecond};

    /// A device three times as fast as its neighbour, with twice the memory bandwidth.
    fn mixed() -> Cluster {
        let mut cluster = samples::cluster(1);
        let mut fast = cluster.groups[0].clone();
        fast.device.name = "fast".into();
        fast.device.peak_flops_per_s.insert(Precision::Bf16, FlopsPerSecond(3e12));
        fast.device.memory_bandwidth_bytes_per_s = BytesPerSecond(2e10);
        cluster.groups.insert(0, fast);
        cluster.tiers[0].devices = 2;
        cluster
    }

    #[test]
    fn ranks_of_a_device_share_it_and_wait_for_the_others() {
        let ranks = mixed().with_ranks(&[2, 1]).unwrap();
        let counts: Vec<u64> = ranks.groups.iter().map(|group| group.count).collect();
        assert_eq!((counts, ranks.tiers[0].devices, ranks.n_whole_devices()), (vec![2, 1], 3, 2));
        let half = &ranks.groups[0].device;
        assert_eq!(half.name, "fast/2");
        // Half of the fast one would be one and a half times as fast as the other, which it waits for.
        assert_eq!(half.peak_flops_per_s[&Precision::Bf16], FlopsPerSecond(1e12));
        assert_eq!(half.memory_bytes.0, 0.5e9);
        let third = &mixed().with_ranks(&[3, 1]).unwrap().groups[1].device;
        assert!(
            (third.memory_bandwidth_bytes_per_s.0 - 2e10 / 3.0).abs() < 1.0,
            "that of a third of the other"
        );
        assert_eq!((0..3).map(|rank| ranks.device_of(rank)).collect::<Vec<_>>(), [(0, 2), (0, 2), (1, 1)]);
    }

    #[test]
    fn what_goes_between_ranks_of_a_device_crosses_no_link() {
        let (whole, ranks) = (mixed(), mixed().with_ranks(&[2, 1]).unwrap());
        assert_eq!((ranks.level_between(0, 1), ranks.level_between(1, 2)), (0, 1));
        assert_eq!(ranks.levels(), ["no link (one device)", "link"]);
        assert_eq!((whole.level_between(0, 1), whole.levels()), (0, vec!["link"]));
    }

    #[test]
    fn devices_become_whole_again() {
        for per_device in [[2, 1], [3, 2], [1, 1]] {
            assert_eq!(mixed().with_ranks(&per_device).unwrap().whole_devices(), mixed());
        }
        assert_eq!(mixed().whole_devices(), mixed());
    }

    #[test]
    fn domains_of_a_tier_have_as_many_ranks() {
        let mut apart = mixed();
        apart.groups.iter_mut().for_each(|group| group.count = 4);
        apart.tiers[0].devices = 8;
        assert_eq!(apart.with_ranks(&[2, 1]).unwrap().tiers[0].devices, 12);
        let network = crate::cluster::Tier { name: "network".into(), ..apart.tiers[0].clone() };
        apart.tiers[0].devices = 4;
        apart.tiers.push(network);
        assert_eq!(apart.with_ranks(&[2, 1]), None);
        assert_eq!(mixed().with_ranks(&[40, 1]), None);
        assert_eq!(mixed().with_ranks(&[0, 1]), None);
        assert_eq!(mixed().with_ranks(&[2]), None);
    }
}
