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
/// 200 (A100) or 400 Gb/s per device.
#[rustfmt::skip]
const USUAL: &[(&str, f64, f64, u64)] = &[
    // family   node   network  domain of the scale-up links, 0 for the node
    ("v100",    150.0,  12.5,    0),
    ("a100",    300.0,  25.0,    0),
    ("h100",    450.0,  50.0,    0),
    ("h200",    450.0,  50.0,    0),
    ("b200",    900.0,  50.0,    0),
    ("b300",    900.0, 100.0,    0),
    ("gb200",   900.0,  50.0,    72),
    ("gb300",   900.0, 100.0,    72),
];

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
    let usual = USUAL.iter().find(|(family, ..)| row.device.starts_with(family));
    let &(_, node, network, domain) = usual.ok_or_else(|| Reason::Cluster(row.device.clone()))?;
    let scale_up = if domain > 0 { domain } else { row.node }.min(row.devices);
    // In-switch reduction came with NVLink 4.
    let in_switch = if node >= 450.0 { "supported" } else { "absent" };
    let mut tiers = vec![json!({
        "name": "node", "devices": scale_up, "bandwidth_gb_per_s": row.node_gb_per_s.unwrap_or(node),
        "latency_us": 1.9, "wiring": "switch", "in_switch_reduction": in_switch,
    })];
    if row.devices > scale_up {
        tiers.push(json!({
            "name": "network", "devices": row.devices,
            "bandwidth_gb_per_s": row.network_gb_per_s.unwrap_or(network), "latency_us": 4.0, "wiring": "switch",
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
