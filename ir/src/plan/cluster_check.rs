//! Whether the cluster that a plan embeds makes sense: what a cluster file is held to, in the units of the plan.

use std::collections::BTreeSet;

use crate::cluster::{CLUSTER_SCHEMA_VERSION, Cluster, Device, DeviceGroup, Link, Tier};
use crate::cluster_limits::{
    BYTES_PER_S, COMPUTE_UNITS, FAILURES_PER_HOUR, FLOPS_PER_S, HOST_MEMORY_BYTES, LATENCY_S, MAX_DEVICES,
    MAX_GROUPS, MAX_TIERS, MEMORY_BYTES, NVME_BYTES, OVERSUBSCRIPTION, PRICE_PER_HOUR, Range, WATTS,
};
use crate::plan::PlanError;

/// A file's figures are turned into other units and whole bytes on their way into a plan.
const ROUNDING: f64 = 1e-6;

/// Checks every figure of a cluster, and that groups and tiers fit together.
///
/// # Errors
/// The first figure that is wrong; its place is relative to the plan.
pub(crate) fn check_cluster(cluster: &Cluster) -> Result<(), PlanError> {
    let at = At("cluster".into());
    if cluster.schema_version != CLUSTER_SCHEMA_VERSION {
        let found = cluster.schema_version;
        return at
            .fail("schema_version", format!("expected version {CLUSTER_SCHEMA_VERSION}, found {found}"));
    }
    let lists = [("groups", cluster.groups.len(), MAX_GROUPS), ("tiers", cluster.tiers.len(), MAX_TIERS)];
    for (name, found, most) in lists {
        if found == 0 || found > most {
            return at.fail(name, format!("{found} entries, expected 1 to {most}"));
        }
    }
    for (i, group) in cluster.groups.iter().enumerate() {
        check_group(&at.inside(&format!("groups[{i}]")), group)?;
    }
    let total = cluster.groups.iter().fold(0_u64, |sum, group| sum.saturating_add(group.count));
    if total > MAX_DEVICES {
        return at.fail("groups", format!("{total} devices in all, at most {MAX_DEVICES} are planned for"));
    }
    check_parts(&at, cluster)?;
    check_nodes(&at, cluster)?;
    check_tiers(&at, &cluster.tiers, total)?;
    for (i, group) in cluster.groups.iter().enumerate() {
        for (j, own) in group.links.iter().enumerate() {
            let at = at.inside(&format!("groups[{i}].links[{j}]"));
            check_link(&at, &own.link)?;
            let is_own = |tier: &String| *tier == own.tier;
            let known = cluster.tiers.iter().any(|tier| is_own(&tier.name));
            if !known || group.links[..j].iter().any(|other| is_own(&other.tier)) {
                return at.fail("tier", format!("`{}`: expected a tier of the cluster, each once", own.tier));
            }
        }
    }
    let smallest =
        cluster.groups.iter().map(|group| group.device.memory_bytes.0).fold(f64::INFINITY, f64::min);
    let kept = cluster.reserve_bytes.0;
    if !(kept >= 0.0 && kept < smallest) {
        let what = format!("a reserve of {kept} bytes leaves nothing of a device of {smallest}");
        return at.fail("reserve_bytes", what);
    }
    Ok(())
}

/// A place in the plan.
struct At(String);

impl At {
    fn inside(&self, name: &str) -> Self {
        Self(format!("{}.{name}", self.0))
    }

    fn fail<T>(&self, name: &str, what: impl Into<String>) -> Result<T, PlanError> {
        Err(PlanError::new(format!("{}.{name}", self.0), what))
    }

    fn range(&self, name: &str, value: f64, range: Range) -> Result<(), PlanError> {
        if Range(range.0 * (1.0 - ROUNDING), range.1 * (1.0 + ROUNDING)).holds(value) {
            return Ok(());
        }
        self.fail(name, format!("{value:e} is out of range, expected {:e} to {:e}", range.0, range.1))
    }

    fn optional(&self, name: &str, value: Option<f64>, range: Range) -> Result<(), PlanError> {
        value.map_or(Ok(()), |value| self.range(name, value, range))
    }
}

fn check_group(at: &At, group: &DeviceGroup) -> Result<(), PlanError> {
    check_device(&at.inside("device"), &group.device)?;
    if group.count == 0 {
        return at.fail("count", "a group of 0 devices");
    }
    if group.devices_per_node == 0 || !group.count.is_multiple_of(group.devices_per_node) {
        let what = format!("{} devices do not fill nodes of {}", group.count, group.devices_per_node);
        return at.fail("devices_per_node", what);
    }
    at.range("host_memory_bytes", group.host_memory_bytes.0, HOST_MEMORY_BYTES)?;
    if let Some(nvme) = group.nvme {
        let at = at.inside("nvme");
        at.range("capacity_bytes", nvme.capacity_bytes.0, NVME_BYTES)?;
        at.range("read_bytes_per_s", nvme.read_bytes_per_s.0, BYTES_PER_S)?;
        at.range("write_bytes_per_s", nvme.write_bytes_per_s.0, BYTES_PER_S)?;
    }
    at.optional("price_per_device_hour", group.price_per_device_hour, PRICE_PER_HOUR)?;
    at.optional("failures_per_device_hour", group.failures_per_device_hour, FAILURES_PER_HOUR)
}

/// Ranks that share devices: what a rank has is its part of a device.
fn check_parts(at: &At, cluster: &Cluster) -> Result<(), PlanError> {
    if !cluster.shares_devices() {
        return Ok(());
    }
    let mut per_device = Vec::new();
    for (i, group) in cluster.groups.iter().enumerate() {
        let at = at.inside(&format!("groups[{i}]"));
        let Some(whole) = group.part_of.as_deref() else {
            return at.fail("part_of", "expected the group as it is, as in the other groups");
        };
        check_group(&at.inside("part_of"), whole)?;
        if whole.part_of.is_some() {
            return at.fail("part_of", "its devices are whole: leave out what they are part of");
        }
        if !group.count.is_multiple_of(whole.count) {
            let what = format!("{} ranks do not fill {} devices evenly", group.count, whole.count);
            return at.fail("part_of", what);
        }
        per_device.push(group.ranks_per_device());
    }
    let again = cluster.whole_devices().with_ranks(&per_device);
    let again = again.ok_or_else(|| {
        let what =
            format!("{per_device:?} ranks on each device leave domains of a tier unequal, or are too many");
        PlanError::new("cluster.groups", what)
    })?;
    for (i, (found, expected)) in cluster.groups.iter().zip(&again.groups).enumerate() {
        let is_near = |of: &dyn Fn(&DeviceGroup) -> f64| (of(found) / of(expected) - 1.0).abs() < ROUNDING;
        let same = found.devices_per_node == expected.devices_per_node
            && found.device.peak_flops_per_s.len() == expected.device.peak_flops_per_s.len()
            && found
                .device
                .peak_flops_per_s
                .iter()
                .zip(&expected.device.peak_flops_per_s)
                .all(|(a, b)| a.0 == b.0 && (a.1.0 / b.1.0 - 1.0).abs() < ROUNDING)
            && is_near(&|group| group.device.memory_bytes.0)
            && is_near(&|group| group.device.memory_bandwidth_bytes_per_s.0)
            && is_near(&|group| group.device.host_link_bytes_per_s.0);
        if !same {
            let n = per_device[i];
            let what = format!("expected what a rank has where {n} share a device of `part_of`");
            return at.fail(&format!("groups[{i}].device"), what);
        }
    }
    let differs = cluster.tiers.iter().zip(&again.tiers).position(|(a, b)| a.devices != b.devices);
    differs.map_or(Ok(()), |tier| {
        let what = format!("expected {} ranks in a domain", again.tiers[tier].devices);
        at.fail(&format!("tiers[{tier}].devices"), what)
    })
}

/// Nodes that are named: as many as a group has, each in one group.
fn check_nodes(at: &At, cluster: &Cluster) -> Result<(), PlanError> {
    for (i, group) in cluster.groups.iter().enumerate() {
        let Some(nodes) = &group.nodes else { continue };
        if nodes.count() != group.n_nodes() {
            let what = format!("expected {} nodes, found {} in `{nodes}`", group.n_nodes(), nodes.count());
            return at.fail(&format!("groups[{i}].nodes"), what);
        }
    }
    let all = cluster.groups.iter().any(|group| group.nodes.is_some()).then(|| cluster.nodes());
    let mut seen = BTreeSet::new();
    for (i, nodes) in all.iter().flatten().enumerate() {
        if let Some(twice) = nodes.iter().find(|node| !seen.insert(*node)) {
            return at
                .fail(&format!("groups[{i}].nodes"), format!("node {twice} is in an earlier group too"));
        }
    }
    Ok(())
}

fn check_device(at: &At, device: &Device) -> Result<(), PlanError> {
    if device.peak_flops_per_s.is_empty() {
        return at.fail("peak_flops_per_s", "no precision is given");
    }
    for rate in device.peak_flops_per_s.values() {
        at.range("peak_flops_per_s", rate.0, FLOPS_PER_S)?;
    }
    at.range("memory_bytes", device.memory_bytes.0, MEMORY_BYTES)?;
    at.range("memory_bandwidth_bytes_per_s", device.memory_bandwidth_bytes_per_s.0, BYTES_PER_S)?;
    at.range("compute_units", f64::from(device.compute_units), COMPUTE_UNITS)?;
    at.range("host_link_bytes_per_s", device.host_link_bytes_per_s.0, BYTES_PER_S)?;
    at.optional("watts", device.watts, WATTS)
}

fn check_link(at: &At, link: &Link) -> Result<(), PlanError> {
    at.range("bandwidth_bytes_per_s", link.bandwidth_bytes_per_s.0, BYTES_PER_S)?;
    at.range("latency_s", link.latency_s.0, LATENCY_S)?;
    at.range("oversubscription", link.oversubscription, OVERSUBSCRIPTION)
}

/// Tiers go from the innermost out, each of whole domains of the one before, the last over all devices.
fn check_tiers(at: &At, tiers: &[Tier], total: u64) -> Result<(), PlanError> {
    let mut inner = 1;
    for (i, tier) in tiers.iter().enumerate() {
        let at = at.inside(&format!("tiers[{i}]"));
        check_link(&at, &tier.link())?;
        if tier.name.is_empty() || tiers[..i].iter().any(|other| other.name == tier.name) {
            return at.fail("name", format!("`{}`: a tier needs a name of its own", tier.name));
        }
        if tier.devices == 0 || tier.devices % inner != 0 {
            let what =
                format!("domains of {} devices are not made of whole domains of {inner}", tier.devices);
            return at.fail("devices", what);
        }
        inner = tier.devices;
    }
    if inner != total {
        let what = format!("the last tier joins {inner} devices of {total}");
        return at.inside(&format!("tiers[{}]", tiers.len() - 1)).fail("devices", what);
    }
    Ok(())
}
