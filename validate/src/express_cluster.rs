//! The cluster of a row: its devices, nodes and links, with the usual link of its kind where the source states none.

use frontends::read_cluster;
use ir::cluster::Cluster;
use ir::units::Bytes;
use serde_json::json;

use crate::express::Reason;
use crate::row::Row;

/// Links of a device family where a source states none: in the node and network, GB/s per device and direction.
///
/// DGX-1 V100: 6 NVLink 2 links of 25 GB/s and four 100 Gb/s adapters per 8; A100 and later: NVSwitch, one adapter of
/// 200 (A100), 400 or, on B300 and GB300, 800 Gb/s per device.
#[rustfmt::skip]
const USUAL: &[Usual] = &[
    Usual { family: "v100",  node: 150.0, network: 12.5, in_switch: false, domain: None },
    Usual { family: "a100",  node: 300.0, network: 25.0, in_switch: false, domain: None },
    Usual { family: "h100",  node: 450.0, network: 50.0, in_switch: true,  domain: None },
    Usual { family: "h200",  node: 450.0, network: 50.0, in_switch: true,  domain: None },
    Usual { family: "b200",  node: 900.0, network: 50.0, in_switch: true,  domain: None },
    Usual { family: "b300",  node: 900.0, network: 100.0, in_switch: true,  domain: None },
    // Of the 72 devices of a rack, runs in powers of two use 64.
    Usual { family: "gb200", node: 900.0, network: 50.0, in_switch: true,  domain: Some(64) },
    Usual { family: "gb300", node: 900.0, network: 100.0, in_switch: true,  domain: Some(64) },
    // All links of a chip, along three axes, two of v5e (docs.cloud.google.com/tpu/docs/v4, v5e, v5p).
    Usual { family: "tpu-v4", node: 300.0, network: 6.25, in_switch: false, domain: None },
    Usual { family: "tpu-v5e", node: 200.0, network: 6.25, in_switch: false, domain: None },
    Usual { family: "tpu-v5p", node: 600.0, network: 6.25, in_switch: false, domain: None },
];

/// Links of a device family.
pub(crate) struct Usual {
    family: &'static str,
    /// In the node.
    pub(crate) node: f64,
    network: f64,
    /// Whether its switches reduce: since `NVLink` 4.
    in_switch: bool,
    /// Devices that scale-up links join, where these are not the node's.
    domain: Option<u64>,
}

impl Usual {
    /// What a cluster file says of reduction in the node's switches.
    pub(crate) fn in_switch(&self) -> &'static str {
        if self.in_switch { "supported" } else { "absent" }
    }
}

/// The usual links of a device.
pub(crate) fn usual(device: &str) -> Option<&'static Usual> {
    USUAL.iter().find(|usual| device.starts_with(usual.family))
}

fn wiring(row: &Row) -> &str {
    if row.node_wiring.is_empty() { "switch" } else { &row.node_wiring }
}

/// Memory that no run exceeds: what was measured has fit.
const UNLIMITED_BYTES: f64 = 1e14;

/// How much memory the devices of a row have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// As much as is listed.
    Listed,
    /// More than anything needs.
    Unlimited,
}

pub(crate) fn cluster(row: &Row, memory: Memory) -> Result<Cluster, Reason> {
    let usual =
        usual(&row.device).ok_or_else(|| Reason::Cluster(format!("device `{}` is not known", row.device)))?;
    let scale_up = usual.domain.unwrap_or(row.node).min(row.devices);
    let mut tiers = vec![json!({
        "name": "node", "devices": scale_up, "bandwidth_gb_per_s": row.node_gb_per_s.unwrap_or(usual.node),
        "latency_us": 1.9, "wiring": wiring(row), "in_switch_reduction": usual.in_switch(),
    })];
    if row.devices > scale_up {
        tiers.push(json!({
            "name": "network", "devices": row.devices,
            "bandwidth_gb_per_s": row.network_gb_per_s.unwrap_or(usual.network), "latency_us": 4.0, "wiring": "switch",
            "routing": if row.network_routing.is_empty() { "balanced" } else { &row.network_routing },
        }));
    }
    let file = json!({
        "schema_version": 1, "name": row.id, "reserve_gib": 0, "tiers": tiers,
        "groups": [{
            "device": row.device, "count": row.devices, "devices_per_node": row.node.min(row.devices),
            "host_memory_gib": 1024,
        }],
    });
    let mut cluster = read_cluster(&row.id, &file.to_string()).map_err(|e| Reason::Cluster(e.to_string()))?;
    if memory == Memory::Unlimited {
        for group in &mut cluster.groups {
            group.device.memory_bytes = Bytes(UNLIMITED_BYTES);
        }
    }
    Ok(cluster)
}
