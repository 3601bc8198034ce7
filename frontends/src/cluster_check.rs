//! Whether the figures of a cluster make sense: each in its range, the counts dividing, the tiers nesting.
//!
//! The ranges are those of `ir::cluster_limits`, in the units of the file; a plan's cluster is held to the same.

use ir::cluster::{CLUSTER_SCHEMA_VERSION, Precision};
use ir::cluster_limits::{
    BYTES_PER_S, COMPUTE_UNITS, FAILURES_PER_HOUR, FLOPS_PER_S, HOST_MEMORY_BYTES, LATENCY_S, MAX_DEVICES,
    MAX_GROUPS, MAX_TIERS, MEMORY_BYTES, NVME_BYTES, OVERSUBSCRIPTION, PRICE_PER_HOUR, Range, WATTS,
};
use ir::units::GIB;

use crate::cluster_file::{ClusterFile, DeviceFile, GroupFile, LinkFile, TierFile, default_reserve_gib};
use crate::document::{Document, key};
use crate::input_error::InputError;
use crate::names;
use crate::scan::Step;

/// The units of a cluster file.
const TERA: f64 = 1e12;
const GIGA: f64 = 1e9;
const MICRO: f64 = 1e-6;
const MILLIONTH: f64 = 1e-6;

/// Figures between these are written without an exponent.
const PLAIN: (f64, f64) = (1e-6, 1e15);

/// A value in a document whose neighbours are checked together.
struct At<'d, 'a> {
    document: &'d Document<'a>,
    path: Vec<Step<'d>>,
}

impl<'d> At<'d, '_> {
    fn place(&self, name: &'d str) -> Vec<Step<'d>> {
        let mut path = self.path.clone();
        path.push(key(name));
        path
    }

    fn fail(&self, name: &'d str, what: String) -> InputError {
        self.document.error(&self.place(name), what)
    }

    fn range(&self, name: &'d str, value: f64, range: Range) -> Result<(), InputError> {
        if range.holds(value) {
            return Ok(());
        }
        // What is far out of it would be hundreds of zeros.
        let is_plain = value == 0.0 || (PLAIN.0..PLAIN.1).contains(&value.abs());
        let value = if is_plain { value.to_string() } else { format!("{value:e}") };
        Err(self.fail(name, format!("{value} is out of range, expected {} to {}", range.0, range.1)))
    }

    fn optional(&self, name: &'d str, value: Option<f64>, range: Range) -> Result<(), InputError> {
        value.map_or(Ok(()), |value| self.range(name, value, range))
    }
}

/// Checks the version of a file before the rest of it is read.
pub(crate) fn check_version(document: &Document<'_>) -> Result<(), InputError> {
    let expected = CLUSTER_SCHEMA_VERSION;
    match document.value.get("schema_version") {
        Some(found) if found.as_u64() == Some(u64::from(expected)) => Ok(()),
        Some(found) => {
            let found = crate::document::kind(found);
            Err(document
                .error_at("schema_version", format!("version {found} cannot be read, expected {expected}")))
        }
        None => Err(document.error(&[], "`schema_version` is missing".into()).with_hint(format!(
            "a cluster description starts with \"schema_version\": {expected}; see docs/cluster.md"
        ))),
    }
}

/// Checks one device, whose value stands at `path`.
pub(crate) fn check_device(
    document: &Document<'_>,
    path: &[Step<'_>],
    device: &DeviceFile,
) -> Result<(), InputError> {
    let at = At { document, path: path.to_vec() };
    check_name(&at, &device.name)?;
    if device.peak_tflops.is_empty() {
        return Err(at.fail(
            "peak_tflops",
            "no precision is given, expected at least one of fp32, fp16, bf16, fp8".into(),
        ));
    }
    if device.peak_tflops.keys().all(|precision| *precision == Precision::Fp8) {
        let what =
            "only fp8 is given, and what is no large product runs in fp32, fp16 or bf16: give one of them";
        return Err(at.fail("peak_tflops", what.into()));
    }
    for (precision, &rate) in &device.peak_tflops {
        let mut inner = At { document, path: at.path.clone() };
        inner.path.push(key("peak_tflops"));
        inner.range(precision.name(), rate, FLOPS_PER_S.per(TERA))?;
    }
    at.range("memory_gib", device.memory_gib, MEMORY_BYTES.per(GIB))?;
    at.range("memory_bandwidth_gb_per_s", device.memory_bandwidth_gb_per_s, BYTES_PER_S.per(GIGA))?;
    at.range("compute_units", f64::from(device.compute_units), COMPUTE_UNITS)?;
    at.range("host_link_gb_per_s", device.host_link_gb_per_s, BYTES_PER_S.per(GIGA))?;
    at.optional("watts", device.watts, WATTS)
}

/// Checks a cluster whose devices are resolved and checked.
pub(crate) fn check_cluster(
    document: &Document<'_>,
    file: &ClusterFile,
    devices: &[DeviceFile],
) -> Result<(), InputError> {
    for (index, group) in file.groups.iter().enumerate() {
        let path = vec![key("groups"), Step::Index(index)];
        check_group(&At { document, path: path.clone() }, group)?;
        for (at, link) in group.links.iter().enumerate() {
            let path = [path.as_slice(), &[key("links"), Step::Index(at)]].concat();
            check_link(&At { document, path }, (link, &group.links[..at]), &file.tiers)?;
        }
    }
    let at = At { document, path: Vec::new() };
    file.name.as_deref().map_or(Ok(()), |name| check_name(&at, name))?;
    let total = file.groups.iter().fold(0_u64, |sum, group| sum.saturating_add(group.count));
    if total > MAX_DEVICES {
        return Err(document
            .error_at("groups", format!("{total} devices in all, at most {MAX_DEVICES} are planned for")));
    }
    for (index, tier) in file.tiers.iter().enumerate() {
        check_tier(&At { document, path: vec![key("tiers"), Step::Index(index)] }, tier)?;
    }
    check_nesting(document, &file.tiers, total)?;
    check_reserve(document, file.reserve_gib, devices)
}

/// Checks the lengths of the lists, before what they hold is looked at.
pub(crate) fn check_lists(document: &Document<'_>, file: &ClusterFile) -> Result<(), InputError> {
    let lists = [("groups", file.groups.len(), MAX_GROUPS), ("tiers", file.tiers.len(), MAX_TIERS)];
    for (name, found, most) in lists {
        if found == 0 || found > most {
            return Err(document.error_at(name, format!("{found} entries, expected 1 to {most}")));
        }
    }
    Ok(())
}

fn check_group(at: &At<'_, '_>, group: &GroupFile) -> Result<(), InputError> {
    if group.count == 0 {
        return Err(at.fail("count", "a group of 0 devices".into()));
    }
    if group.devices_per_node == 0 || !group.count.is_multiple_of(group.devices_per_node) {
        let (count, per_node) = (group.count, group.devices_per_node);
        return Err(at
            .fail("devices_per_node", format!("{count} devices do not fill nodes of {per_node}"))
            .with_hint("`count` must be a multiple of `devices_per_node`"));
    }
    at.range("host_memory_gib", group.host_memory_gib, HOST_MEMORY_BYTES.per(GIB))?;
    if let Some(nvme) = &group.nvme {
        let mut path = at.path.clone();
        path.push(key("nvme"));
        let at = At { document: at.document, path };
        at.range("capacity_tb", nvme.capacity_tb, NVME_BYTES.per(TERA))?;
        at.range("read_gb_per_s", nvme.read_gb_per_s, BYTES_PER_S.per(GIGA))?;
        at.range("write_gb_per_s", nvme.write_gb_per_s, BYTES_PER_S.per(GIGA))?;
    }
    at.optional("watts_per_device", group.watts_per_device, WATTS)?;
    at.optional("price_per_device_hour", group.price_per_device_hour, PRICE_PER_HOUR)?;
    at.optional(
        "failures_per_million_device_hours",
        group.failures_per_million_device_hours,
        FAILURES_PER_HOUR.per(MILLIONTH),
    )
}

fn check_link(
    at: &At<'_, '_>,
    (link, before): (&LinkFile, &[LinkFile]),
    tiers: &[TierFile],
) -> Result<(), InputError> {
    at.range("bandwidth_gb_per_s", link.bandwidth_gb_per_s, BYTES_PER_S.per(GIGA))?;
    at.range("latency_us", link.latency_us, LATENCY_S.per(MICRO))?;
    at.range("oversubscription", link.oversubscription, OVERSUBSCRIPTION)?;
    let name = crate::scan::clip(&link.tier);
    if tiers.iter().all(|tier| tier.name != link.tier) {
        let known: Vec<String> = tiers.iter().map(|tier| crate::scan::clip(&tier.name)).collect();
        return Err(at
            .fail("tier", format!("no tier of the cluster is named `{name}`"))
            .with_hint(format!("its tiers: {}", known.join(", "))));
    }
    if before.iter().any(|other| other.tier == link.tier) {
        return Err(at.fail("tier", format!("the group has two links named `{name}`")));
    }
    Ok(())
}

fn check_tier(at: &At<'_, '_>, tier: &TierFile) -> Result<(), InputError> {
    at.range("bandwidth_gb_per_s", tier.bandwidth_gb_per_s, BYTES_PER_S.per(GIGA))?;
    at.range("latency_us", tier.latency_us, LATENCY_S.per(MICRO))?;
    at.range("oversubscription", tier.oversubscription, OVERSUBSCRIPTION)?;
    check_name(at, &tier.name)
}

fn check_name(at: &At<'_, '_>, name: &str) -> Result<(), InputError> {
    if name.is_empty() {
        return Err(at.fail("name", "the name is empty".into()));
    }
    names::check_name(at.document, &at.place("name"), name)
}

fn check_nesting(document: &Document<'_>, tiers: &[TierFile], total: u64) -> Result<(), InputError> {
    let at = |index: usize| [key("tiers"), Step::Index(index), key("devices")];
    for (index, tier) in tiers.iter().enumerate() {
        let inner = if index == 0 { 1 } else { tiers[index - 1].devices };
        if tier.devices == 0 || tier.devices % inner != 0 {
            let what =
                format!("domains of {} devices are not made of whole domains of {inner}", tier.devices);
            return Err(document
                .error(&at(index), what)
                .with_hint("tiers go from the innermost out; each holds a multiple of the one before"));
        }
        if tiers[..index].iter().any(|other| other.name == tier.name) {
            let path = [key("tiers"), Step::Index(index), key("name")];
            return Err(
                document.error(&path, format!("two tiers are named `{}`", crate::scan::clip(&tier.name)))
            );
        }
    }
    let last = tiers.len().saturating_sub(1);
    match tiers.last() {
        Some(tier) if tier.devices == total => Ok(()),
        Some(tier) => Err(document
            .error(&at(last), format!("the last tier joins {} devices of {total}", tier.devices))
            .with_hint("the last tier must span all devices of all groups")),
        None => Ok(()),
    }
}

fn check_reserve(
    document: &Document<'_>,
    reserve: Option<f64>,
    devices: &[DeviceFile],
) -> Result<(), InputError> {
    let smallest = devices.iter().map(|device| device.memory_gib).fold(f64::INFINITY, f64::min);
    let kept = reserve.unwrap_or_else(|| default_reserve_gib(smallest));
    if kept >= 0.0 && kept < smallest {
        return Ok(());
    }
    let what = format!("a reserve of {kept} GiB leaves nothing of a device of {smallest} GiB");
    let hint = "set `reserve_gib` from 0 to less than the memory of the smallest device";
    Err(document.error_at("reserve_gib", what).with_hint(hint))
}
