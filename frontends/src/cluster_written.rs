//! A cluster as a file of its own, with every figure: what to change and plan for.

use std::collections::BTreeMap;

use ir::cluster::{CLUSTER_SCHEMA_VERSION, Cluster, Device, DeviceGroup, Link, Nvme, OwnLink, Tier};
use ir::units::{Bytes, GIB};
use serde_json::Value;

use crate::cluster_file::{
    ClusterFile, DeviceFile, GIGA, GroupFile, LinkFile, MICRO, NvmeFile, TERA, TierFile,
};

impl ClusterFile {
    /// The file that is read as a cluster. Where its figures come from no longer stands there, nor which nodes of
    /// another cluster it has.
    ///
    /// # Errors
    /// Where ranks share devices, which no file says.
    pub fn of(cluster: &Cluster) -> Result<Self, String> {
        if cluster.shares_devices() {
            return Err("its ranks share devices, which no file says".into());
        }
        Ok(Self {
            schema_version: CLUSTER_SCHEMA_VERSION,
            name: Some(cluster.name.clone()),
            about: None,
            groups: cluster.groups.iter().map(group).collect(),
            tiers: cluster.tiers.iter().map(tier).collect(),
            reserve_gib: Some(gib(cluster.reserve_bytes)),
        })
    }
}

/// A figure in a larger unit, without what division has added behind the digits that were given.
fn in_units(figure: f64, unit: f64) -> f64 {
    let scaled = figure / unit;
    format!("{scaled:.12e}").parse().unwrap_or(scaled)
}

/// Powers of two divide without a rest.
fn gib(bytes: Bytes) -> f64 {
    bytes.0 / GIB
}

fn group(group: &DeviceGroup) -> GroupFile {
    const PER_MILLION: f64 = 1e-6;
    GroupFile {
        device: serde_json::to_value(device(&group.device)).unwrap_or(Value::Null),
        count: group.count,
        devices_per_node: group.devices_per_node,
        host_memory_gib: gib(group.host_memory_bytes),
        nvme: group.nvme.as_ref().map(nvme),
        watts_per_device: None,
        price_per_device_hour: group.price_per_device_hour,
        failures_per_million_device_hours: group
            .failures_per_device_hour
            .map(|rate| in_units(rate, PER_MILLION)),
        links: group.links.iter().map(own_link).collect(),
        sources: BTreeMap::new(),
    }
}

fn device(device: &Device) -> DeviceFile {
    let peak = device.peak_flops_per_s.iter();
    DeviceFile {
        name: device.name.clone(),
        architecture: device.architecture,
        peak_tflops: peak.map(|(&precision, rate)| (precision, in_units(rate.0, TERA))).collect(),
        memory_gib: gib(device.memory_bytes),
        memory_bandwidth_gb_per_s: in_units(device.memory_bandwidth_bytes_per_s.0, GIGA),
        compute_units: device.compute_units,
        host_link_gb_per_s: in_units(device.host_link_bytes_per_s.0, GIGA),
        watts: device.watts,
        sources: BTreeMap::new(),
    }
}

fn nvme(nvme: &Nvme) -> NvmeFile {
    NvmeFile {
        capacity_tb: in_units(nvme.capacity_bytes.0, TERA),
        read_gb_per_s: in_units(nvme.read_bytes_per_s.0, GIGA),
        write_gb_per_s: in_units(nvme.write_bytes_per_s.0, GIGA),
    }
}

fn own_link(OwnLink { tier, link }: &OwnLink) -> LinkFile {
    let &Link { bandwidth_bytes_per_s, latency_s, wiring, oversubscription, routing, in_switch_reduction } =
        link;
    LinkFile {
        tier: tier.clone(),
        bandwidth_gb_per_s: in_units(bandwidth_bytes_per_s.0, GIGA),
        latency_us: in_units(latency_s.0, MICRO),
        wiring,
        oversubscription,
        routing,
        in_switch_reduction,
        sources: BTreeMap::new(),
    }
}

fn tier(tier: &Tier) -> TierFile {
    TierFile {
        name: tier.name.clone(),
        devices: tier.devices,
        bandwidth_gb_per_s: in_units(tier.bandwidth_bytes_per_s.0, GIGA),
        latency_us: in_units(tier.latency_s.0, MICRO),
        wiring: tier.wiring,
        oversubscription: tier.oversubscription,
        routing: tier.routing,
        in_switch_reduction: tier.in_switch_reduction,
        sources: BTreeMap::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{read_cluster, shipped_clusters};

    #[test]
    fn every_shipped_cluster_is_read_again_from_what_is_written() {
        for shipped in shipped_clusters() {
            let cluster = read_cluster(shipped.name, shipped.text).unwrap();
            let text = serde_json::to_string(&ClusterFile::of(&cluster).unwrap()).unwrap();
            assert_eq!(read_cluster("written", &text).unwrap(), cluster, "{}", shipped.name);
        }
    }
}
