//! The format of `cluster.json` and of the device library, as written in files: figures in the units of data sheets.
//!
//! It knows names, units and defaults. Whether the figures make sense together is `cluster_check.rs`.

use std::collections::BTreeMap;

use ir::cluster::{
    Architecture, Cluster, Device, DeviceGroup, InSwitchReduction, Link, Nvme, OwnLink, Precision, Routing,
    Tier, Wiring,
};
use ir::units::{Bytes, BytesPerSecond, FlopsPerSecond, GIB, Seconds};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(crate) const GIGA: f64 = 1e9;
pub(crate) const TERA: f64 = 1e12;
pub(crate) const MICRO: f64 = 1e-6;

/// A cluster, as a user writes it.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// Version of this format: 1.
    pub schema_version: u32,
    /// Name shown in reports; the file's name where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What the cluster is, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// Runs of equal nodes, in rank order.
    pub groups: Vec<GroupFile>,
    /// Link tiers, innermost and fastest first.
    pub tiers: Vec<TierFile>,
    /// GiB of every device kept for allocator, contexts and communication buffers; where absent, 6 % of the smallest
    /// device plus 2 GiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserve_gib: Option<f64>,
}

/// A run of equal nodes.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupFile {
    /// A name of the device library, or the figures themselves.
    #[schemars(with = "DeviceChoice")]
    pub device: serde_json::Value,
    /// Devices in the group.
    pub count: u64,
    /// Devices in one node.
    pub devices_per_node: u64,
    /// Host memory of one node in GiB.
    pub host_memory_gib: f64,
    /// NVMe drives of one node, where a run may use them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvme: Option<NvmeFile>,
    /// Power limit of one device in watts, where its operator set another than the device's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watts_per_device: Option<f64>,
    /// Price of one device for one hour, in any currency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_device_hour: Option<f64>,
    /// Mean failures of one device in a million hours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failures_per_million_device_hours: Option<f64>,
    /// Links that are others among the group's own devices than `tiers` says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<LinkFile>,
    /// Where each figure comes from.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, String>,
}

/// The NVMe drives of one node, all together.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NvmeFile {
    /// What a run may take of them in TB (10^12 bytes).
    pub capacity_tb: f64,
    /// What they read together in GB/s, sustained.
    pub read_gb_per_s: f64,
    /// What they write together in GB/s, sustained.
    pub write_gb_per_s: f64,
}

impl NvmeFile {
    fn to_nvme(self) -> Nvme {
        Nvme {
            capacity_bytes: Bytes((self.capacity_tb * TERA).floor()),
            read_bytes_per_s: BytesPerSecond(self.read_gb_per_s * GIGA),
            write_bytes_per_s: BytesPerSecond(self.write_gb_per_s * GIGA),
        }
    }
}

/// A tier as the devices of one group have it among themselves.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LinkFile {
    /// Name of one of the cluster's tiers, whose domains it has.
    pub tier: String,
    /// Bandwidth of one device into this tier, per direction, in GB/s.
    pub bandwidth_gb_per_s: f64,
    /// Latency of one step between neighbours in microseconds.
    pub latency_us: f64,
    /// Wiring inside a domain.
    pub wiring: Wiring,
    /// How many times the traffic that leaves a domain of the next inner tier exceeds what this tier carries.
    #[serde(default = "non_blocking")]
    pub oversubscription: f64,
    /// How flows find their way.
    #[serde(default)]
    pub routing: Routing,
    /// Whether switches reduce in flight (NVLS, SHARP).
    #[serde(default = "absent")]
    pub in_switch_reduction: InSwitchReduction,
    /// Where each figure comes from.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, String>,
}

/// The two ways to name a device, for the schema.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[expect(
    dead_code,
    reason = "only its schema is used: reading by hand gives errors that point into the figures"
)]
enum DeviceChoice {
    Name(String),
    Figures(DeviceFile),
}

/// A device.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceFile {
    /// Name shown in reports.
    pub name: String,
    /// Family whose efficiency constants apply; `other` where none fits.
    pub architecture: Architecture,
    /// Dense peak rate per precision in TFLOP/s, without sparsity.
    pub peak_tflops: BTreeMap<Precision, f64>,
    /// Device memory in GiB.
    pub memory_gib: f64,
    /// Device memory bandwidth in GB/s.
    pub memory_bandwidth_gb_per_s: f64,
    /// Streaming multiprocessors, compute units or matrix units.
    pub compute_units: u32,
    /// Link to the host, per direction, in GB/s.
    pub host_link_gb_per_s: f64,
    /// Power limit in watts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watts: Option<f64>,
    /// Where each figure comes from.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, String>,
}

/// One level of links.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TierFile {
    /// What engineers call it: `nvlink`, `infiniband`, `ici`.
    pub name: String,
    /// Devices inside one domain: a multiple of the next inner tier's; all devices for the last tier.
    pub devices: u64,
    /// Bandwidth of one device into this tier, per direction, in GB/s.
    pub bandwidth_gb_per_s: f64,
    /// Latency of one step between neighbours in microseconds.
    pub latency_us: f64,
    /// Wiring inside a domain.
    pub wiring: Wiring,
    /// How many times the traffic that leaves a domain of the next inner tier exceeds what this tier carries.
    #[serde(default = "non_blocking")]
    pub oversubscription: f64,
    /// How flows find their way: `balanced` (InfiniBand), or `hashed` where they meet by chance (Ethernet, Omni-Path).
    #[serde(default)]
    pub routing: Routing,
    /// Whether switches reduce in flight (NVLS, SHARP).
    #[serde(default = "absent")]
    pub in_switch_reduction: InSwitchReduction,
    /// Where each figure comes from.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, String>,
}

/// The device library.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceLibraryFile {
    /// Version of this format: 1.
    pub schema_version: u32,
    /// The devices.
    pub devices: Vec<DeviceFile>,
}

fn non_blocking() -> f64 {
    1.0
}

fn absent() -> InSwitchReduction {
    InSwitchReduction::Absent
}

impl DeviceFile {
    /// The device in the planner's units.
    pub(crate) fn to_device(&self) -> Device {
        Device {
            name: self.name.clone(),
            architecture: self.architecture,
            peak_flops_per_s: self.peak_tflops.iter().map(|(&p, &t)| (p, FlopsPerSecond(t * TERA))).collect(),
            memory_bytes: Bytes((self.memory_gib * GIB).floor()),
            memory_bandwidth_bytes_per_s: BytesPerSecond(self.memory_bandwidth_gb_per_s * GIGA),
            compute_units: self.compute_units,
            host_link_bytes_per_s: BytesPerSecond(self.host_link_gb_per_s * GIGA),
            watts: self.watts,
        }
    }
}

impl GroupFile {
    /// The group in the planner's units, of an already resolved device.
    pub(crate) fn to_group(&self, device: &DeviceFile) -> DeviceGroup {
        const MILLION: f64 = 1e6;
        DeviceGroup {
            device: Device { watts: self.watts_per_device.or(device.watts), ..device.to_device() },
            count: self.count,
            devices_per_node: self.devices_per_node,
            host_memory_bytes: Bytes((self.host_memory_gib * GIB).floor()),
            nvme: self.nvme.map(NvmeFile::to_nvme),
            price_per_device_hour: self.price_per_device_hour,
            failures_per_device_hour: self.failures_per_million_device_hours.map(|rate| rate / MILLION),
            links: self.links.iter().map(LinkFile::to_link).collect(),
            nodes: None,
            part_of: None,
        }
    }
}

impl LinkFile {
    fn to_link(&self) -> OwnLink {
        OwnLink {
            tier: self.tier.clone(),
            link: Link {
                bandwidth_bytes_per_s: BytesPerSecond(self.bandwidth_gb_per_s * GIGA),
                latency_s: Seconds(self.latency_us * MICRO),
                wiring: self.wiring,
                oversubscription: self.oversubscription,
                routing: self.routing,
                in_switch_reduction: self.in_switch_reduction,
            },
        }
    }
}

impl TierFile {
    fn to_tier(&self) -> Tier {
        Tier {
            name: self.name.clone(),
            devices: self.devices,
            bandwidth_bytes_per_s: BytesPerSecond(self.bandwidth_gb_per_s * GIGA),
            latency_s: Seconds(self.latency_us * MICRO),
            wiring: self.wiring,
            oversubscription: self.oversubscription,
            routing: self.routing,
            in_switch_reduction: self.in_switch_reduction,
        }
    }
}

impl ClusterFile {
    /// The cluster in the planner's units, of already resolved devices, one per group.
    pub(crate) fn to_cluster(&self, file_name: &str, devices: &[DeviceFile]) -> Cluster {
        let smallest = devices.iter().map(|device| device.memory_gib).fold(f64::INFINITY, f64::min);
        let reserve_gib = self.reserve_gib.unwrap_or_else(|| default_reserve_gib(smallest));
        Cluster {
            schema_version: self.schema_version,
            name: self.name.clone().unwrap_or_else(|| crate::document::file_stem(file_name)),
            groups: self.groups.iter().zip(devices).map(|(group, device)| group.to_group(device)).collect(),
            tiers: self.tiers.iter().map(TierFile::to_tier).collect(),
            reserve_bytes: Bytes((reserve_gib * GIB).floor()),
            calibration: None,
        }
    }
}

/// Memory kept free where the file does not say: 6 % of the device plus 2 GiB, the rule of SimuMax
/// (MooreThreads/SimuMax, `mem_factor` 0.94).
///
/// 80 GiB:  4.8 + 2 = 6.8 GiB.
pub(crate) fn default_reserve_gib(memory_gib: f64) -> f64 {
    0.06 * memory_gib + 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_allows_a_device_by_name_or_by_figures() {
        let schema = serde_json::to_string(&schemars::schema_for!(ClusterFile)).unwrap();
        assert!(schema.contains("DeviceChoice") && schema.contains("memory_bandwidth_gb_per_s"));
    }
}
