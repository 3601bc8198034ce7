//! The description of the hardware: devices, how many, and the link tiers that join them.
//!
//! It knows figures, not prices: what a transfer or a product costs is the cost model's business. Every figure here
//! comes from a file (`cluster.json` or the device library); reading and checking it is the front ends' business.

use std::collections::BTreeMap;
use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::numbers::Numbers;
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond, Seconds};

/// Number format of a computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// IEEE single precision.
    Fp32,
    /// IEEE half precision with loss scaling.
    Fp16,
    /// bfloat16.
    Bf16,
    /// 8-bit floating point for matrix products, bfloat16 elsewhere.
    Fp8,
}

impl Precision {
    /// What documents and options call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        }
    }
}

/// Family of devices that share the efficiency constants of the cost model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Architecture {
    /// NVIDIA V100.
    Volta,
    /// NVIDIA A100.
    Ampere,
    /// NVIDIA L40S, RTX 4090.
    Ada,
    /// NVIDIA H100, H800, H200.
    Hopper,
    /// NVIDIA B200, GB200.
    Blackwell,
    /// AMD MI250X.
    Cdna2,
    /// AMD MI300X.
    Cdna3,
    /// Google TPU.
    Tpu,
    /// Intel Gaudi.
    Gaudi,
    /// Anything else: the cost model uses its most cautious constants.
    Other,
}

/// One kind of accelerator. A chip that appears as two devices (MI250X) is described per device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Name in the device library, or the user's own.
    pub name: String,
    /// Family whose efficiency constants apply.
    pub architecture: Architecture,
    /// Dense peak rate per precision, without sparsity, in FLOP/s.
    pub peak_flops_per_s: BTreeMap<Precision, FlopsPerSecond>,
    /// Device memory in bytes.
    pub memory_bytes: Bytes,
    /// Device memory bandwidth in bytes/s.
    pub memory_bandwidth_bytes_per_s: BytesPerSecond,
    /// Units over which the tiles of a matrix product are spread (streaming multiprocessors, compute units).
    pub compute_units: u32,
    /// Link to the host's memory, per direction, in bytes/s.
    pub host_link_bytes_per_s: BytesPerSecond,
    /// Power limit in watts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watts: Option<f64>,
}

/// A run of equal nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceGroup {
    /// The device.
    pub device: Device,
    /// Devices in the group.
    pub count: u64,
    /// Devices in one node.
    pub devices_per_node: u64,
    /// Host memory of one node in bytes.
    pub host_memory_bytes: Bytes,
    /// Its NVMe drives, where it has any that a run may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvme: Option<Nvme>,
    /// Price of one device for one hour, in the cluster's currency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_device_hour: Option<f64>,
    /// Mean failures of one device per hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failures_per_device_hour: Option<f64>,
    /// Links that are others among the group's own devices than the cluster's tiers say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<OwnLink>,
    /// Its nodes by their numbers in the cluster that this one is a part of, or has the groups of in another order;
    /// absent where nodes are counted through all groups from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<Numbers>,
    /// The group as it is, where several ranks run on each of its devices: `count` is then one of ranks, and `device`
    /// the part of a device that a rank has. See [`crate::cluster_ranks`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part_of: Option<Box<DeviceGroup>>,
}

/// The NVMe drives of one node, all together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Nvme {
    /// Bytes that a run may take.
    pub capacity_bytes: Bytes,
    /// What they read into the host's memory, in bytes/s.
    pub read_bytes_per_s: BytesPerSecond,
    /// What they write from there, in bytes/s.
    pub write_bytes_per_s: BytesPerSecond,
}

impl DeviceGroup {
    /// Nodes, the last of them maybe not full.
    pub fn n_nodes(&self) -> u64 {
        self.count.div_ceil(self.devices_per_node.max(1))
    }
}

/// A tier as the devices of one group have it among themselves: its domains are those of the cluster's tier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "OwnLinkFields")]
pub struct OwnLink {
    /// Name of the cluster's tier.
    pub tier: String,
    /// Its figures.
    #[serde(flatten)]
    pub link: Link,
}

/// The same, field by field: what is flattened cannot refuse fields that it does not know.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct OwnLinkFields {
    tier: String,
    bandwidth_bytes_per_s: BytesPerSecond,
    latency_s: Seconds,
    wiring: Wiring,
    oversubscription: f64,
    #[serde(default)]
    routing: Routing,
    in_switch_reduction: InSwitchReduction,
}

impl From<OwnLinkFields> for OwnLink {
    fn from(fields: OwnLinkFields) -> Self {
        let OwnLinkFields {
            tier,
            bandwidth_bytes_per_s,
            latency_s,
            wiring,
            oversubscription,
            routing,
            in_switch_reduction,
        } = fields;
        let link =
            Link { bandwidth_bytes_per_s, latency_s, wiring, oversubscription, routing, in_switch_reduction };
        Self { tier, link }
    }
}

/// Figures of a link.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Link {
    /// Bandwidth of one device into this tier, per direction, in bytes/s.
    pub bandwidth_bytes_per_s: BytesPerSecond,
    /// Latency of one step between neighbours, in seconds.
    pub latency_s: Seconds,
    /// Wiring inside a domain.
    pub wiring: Wiring,
    /// How many times the traffic that leaves a domain of the next inner tier exceeds what this tier carries.
    pub oversubscription: f64,
    /// How flows that cross the tier find their way.
    #[serde(default, skip_serializing_if = "Routing::is_balanced")]
    pub routing: Routing,
    /// Whether its switches can reduce in flight.
    pub in_switch_reduction: InSwitchReduction,
}

/// How the members of one domain of a tier are wired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Wiring {
    /// Every pair at full rate (NVSwitch, a non-blocking fat tree).
    Switch,
    /// Direct links between all pairs, each a share of the bandwidth (xGMI, NVLink cube mesh).
    Mesh,
    /// A wrapped torus of three axes; the bandwidth is that of all links of a device together.
    Torus,
    /// The same of two axes.
    #[serde(rename = "torus-2d")]
    Torus2d,
    /// A shared bus or tree of bridges (PCIe).
    Bus,
}

/// One level of the link hierarchy. Tier 0 is the innermost and fastest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tier {
    /// What engineers call it: `nvlink`, `infiniband`, `ici`.
    pub name: String,
    /// Devices inside one domain of this tier: a multiple of the next inner tier's.
    pub devices: u64,
    /// Bandwidth of one device into this tier, per direction, in bytes/s.
    pub bandwidth_bytes_per_s: BytesPerSecond,
    /// Latency of one step between neighbours, in seconds.
    pub latency_s: Seconds,
    /// Wiring inside a domain.
    pub wiring: Wiring,
    /// How many times the traffic that leaves a domain of the next inner tier exceeds what this tier carries; 1 is
    /// non-blocking.
    pub oversubscription: f64,
    /// How flows that cross the tier find their way.
    #[serde(default, skip_serializing_if = "Routing::is_balanced")]
    pub routing: Routing,
    /// True where switches reduce in flight (NVLS, SHARP).
    pub in_switch_reduction: InSwitchReduction,
}

impl Tier {
    /// Its figures, without name and domains.
    pub fn link(&self) -> Link {
        Link {
            bandwidth_bytes_per_s: self.bandwidth_bytes_per_s,
            latency_s: self.latency_s,
            wiring: self.wiring,
            oversubscription: self.oversubscription,
            routing: self.routing,
            in_switch_reduction: self.in_switch_reduction,
        }
    }
}

/// How flows that cross a tier find their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Routing {
    /// Spread over all paths: adaptive routing of InfiniBand, switches inside a node.
    #[default]
    Balanced,
    /// By a table or a hash of the flow, so that flows meet on one path while others idle: Ethernet, Omni-Path.
    Hashed,
}

impl Routing {
    fn is_balanced(&self) -> bool {
        *self == Self::Balanced
    }
}

/// Whether a tier's switches can reduce in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum InSwitchReduction {
    /// All-reduce may run in the switch.
    Supported,
    /// Only the devices reduce.
    Absent,
}

/// The machines a job runs on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Version of this description's schema.
    pub schema_version: u32,
    /// Name shown in reports.
    pub name: String,
    /// Runs of equal nodes, in rank order.
    pub groups: Vec<DeviceGroup>,
    /// Link tiers, innermost first; the last one spans the whole cluster.
    pub tiers: Vec<Tier>,
    /// Bytes of every device kept for allocator, contexts and communication buffers.
    pub reserve_bytes: Bytes,
    /// What was measured on it, if anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Calibration>,
}

/// What measurements on a cluster say of the constants of the cost model, which knows their names and ranges.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// What was measured, in words.
    pub provenance: Vec<String>,
    /// Constants that differ from the shipped ones, by name.
    pub constants: BTreeMap<String, f64>,
    /// What whole steps that were measured are still off by on average, as a part of their time; absent where none
    /// were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runs_off: Option<f64>,
}

/// The schema version this build reads and writes.
pub const CLUSTER_SCHEMA_VERSION: u32 = 1;

impl Cluster {
    /// Devices in all groups.
    pub fn n_devices(&self) -> u64 {
        self.groups.iter().map(|group| group.count).sum()
    }

    /// Memory of all devices.
    pub fn device_memory(&self) -> Bytes {
        self.groups.iter().map(|group| group.device.memory_bytes * group.count as f64).sum()
    }

    /// Devices that are close: those of a node, or of the first tier where it is larger. Products are split among them.
    pub fn n_close(&self) -> u64 {
        let in_node = self.groups.iter().map(|group| group.devices_per_node).min().unwrap_or(1);
        self.tiers.first().map_or(1, |tier| tier.devices).max(in_node)
    }

    /// Numbers of the nodes of every group.
    pub fn nodes(&self) -> Vec<Numbers> {
        let mut first = 0;
        let of_group = |group: &DeviceGroup| {
            let counted = first..first + group.n_nodes();
            first = counted.end;
            group.nodes.clone().unwrap_or_else(|| counted.collect())
        };
        self.groups.iter().map(of_group).collect()
    }

    /// The same cluster, whichever nodes of another it has.
    pub fn unnumbered(&self) -> Self {
        let group = |group: &DeviceGroup| DeviceGroup { nodes: None, ..group.clone() };
        Self { groups: self.groups.iter().map(group).collect(), ..self.clone() }
    }

    /// Where every rank is: the number of its node, and its place there.
    pub fn seats(&self) -> Vec<(u64, u64)> {
        let of_group = |(group, nodes): (&DeviceGroup, Numbers)| {
            let per_node = group.devices_per_node.max(1);
            let seats = nodes.iter().flat_map(|node| (0..per_node).map(move |slot| (node, slot)));
            seats.take(group.count as usize).collect::<Vec<_>>()
        };
        self.groups.iter().zip(self.nodes()).flat_map(of_group).collect()
    }

    /// Position of the innermost tier that joins two ranks; the outermost joins all.
    ///
    /// Ranks 7 and 8 of nodes of 8 meet on the second tier.
    pub fn tier_between(&self, a: u64, b: u64) -> usize {
        let together = |tier: &Tier| a / tier.devices.max(1) == b / tier.devices.max(1);
        self.tiers.iter().position(together).unwrap_or(self.tiers.len().saturating_sub(1))
    }

    /// Whether every node has NVMe drives that a run may use.
    pub fn has_nvme(&self) -> bool {
        self.groups.iter().all(|group| group.nvme.is_some())
    }

    /// Whether some group has other devices or links than another.
    pub fn is_mixed(&self) -> bool {
        let differs = |group: &DeviceGroup| {
            let first = &self.groups[0];
            group.device != first.device || group.links != first.links
        };
        self.groups.iter().any(differs)
    }

    /// Figures of a tier, among the devices of one group where a position is given.
    pub fn link(&self, tier_idx: usize, home: Option<usize>) -> Link {
        let tier = &self.tiers[tier_idx];
        let group = home.and_then(|home| self.groups.get(home));
        let own = group.and_then(|group| group.links.iter().find(|own| own.tier == tier.name));
        own.map_or_else(|| tier.link(), |own| own.link)
    }

    /// The groups that hold some of these ranks: neighbours, in rank order.
    ///
    /// Of two groups of 16 devices, ranks 8 to 23 lie in both.
    pub fn groups_under(&self, ranks: Range<u64>) -> &[DeviceGroup] {
        let mut from = 0;
        let touched: Vec<bool> = self
            .groups
            .iter()
            .map(|group| {
                let own = from..from + group.count;
                from = own.end;
                own.start < ranks.end && ranks.start < own.end
            })
            .collect();
        let first = touched.iter().position(|touched| *touched).unwrap_or(0);
        let end = touched.iter().rposition(|touched| *touched).map_or(first, |last| last + 1);
        &self.groups[first..end]
    }

    /// The group that holds a rank.
    ///
    /// Returns `None` where `rank` is not in the cluster.
    pub fn group_of(&self, rank: u64) -> Option<&DeviceGroup> {
        let mut end = 0;
        self.groups.iter().find(|group| {
            end += group.count;
            rank < end
        })
    }
}
