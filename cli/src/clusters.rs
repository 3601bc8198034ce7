//! `planner clusters`: the shipped clusters, or one cluster in detail.

use std::collections::BTreeSet;

use frontends::{ClusterFile, shipped_clusters};
use ir::cluster::{Cluster, DeviceGroup, Link, Nvme, Precision};
use serde::Serialize;

use crate::args::ClustersArgs;
use crate::failure::Failure;
use crate::figures;
use crate::input;
use crate::output::{Form, json};
use crate::question::resized;
use crate::table::{Side, list, table};
use crate::terminal::Terminal;

/// A cluster in one line.
#[derive(Serialize)]
struct ClusterSummary {
    name: String,
    devices: u64,
    nodes: u64,
    device: String,
    memory_bytes_per_device: f64,
    tiers: Vec<String>,
}

/// Lists the shipped clusters, or describes the one that was asked for.
pub(crate) fn run(args: &ClustersArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let text = match &args.cluster {
        Some(argument) => {
            let cluster = resized(input::cluster(argument)?.value, &args.size)?;
            if args.native {
                json(&ClusterFile::of(&cluster).map_err(Failure::bug)?)?
            } else if args.json.json {
                json(&cluster)?
            } else {
                describe(&cluster)
            }
        }
        None if args.size.is_given() => {
            let what = "--nodes, --devices, --groups and --on-nodes need the name of a cluster";
            return Err(Failure::argument(what));
        }
        None => all(Form::of(&args.json))?,
    };
    write!(terminal.out, "{text}")?;
    Ok(())
}

fn all(form: Form) -> Result<String, Failure> {
    let mut summaries = Vec::new();
    for shipped in shipped_clusters() {
        summaries.push(summary(&input::cluster(shipped.name)?.value));
    }
    if form == Form::Json {
        return json(&summaries);
    }
    let columns = [
        ("cluster", Side::Left),
        ("devices", Side::Right),
        ("nodes", Side::Right),
        ("device", Side::Left),
        ("memory", Side::Right),
        ("links", Side::Left),
    ];
    let row = |cluster: &ClusterSummary| {
        vec![
            cluster.name.clone(),
            cluster.devices.to_string(),
            cluster.nodes.to_string(),
            cluster.device.clone(),
            figures::bytes(ir::units::Bytes(cluster.memory_bytes_per_device)),
            cluster.tiers.join(", "),
        ]
    };
    let rows: Vec<Vec<String>> = summaries.iter().map(row).collect();
    Ok(table(&columns, &rows))
}

fn summary(cluster: &Cluster) -> ClusterSummary {
    let memory = cluster.groups.iter().map(|group| group.device.memory_bytes.0).fold(f64::INFINITY, f64::min);
    ClusterSummary {
        name: cluster.name.clone(),
        devices: cluster.n_devices(),
        nodes: cluster.groups.iter().map(nodes).sum(),
        device: device_names(cluster),
        memory_bytes_per_device: memory,
        tiers: cluster.tiers.iter().map(|tier| tier.name.clone()).collect(),
    }
}

fn nodes(group: &DeviceGroup) -> u64 {
    group.count.div_ceil(group.devices_per_node.max(1))
}

/// Names of all kinds of device, each once: `a100-sxm-40 + v100-sxm`.
pub(crate) fn device_names(cluster: &Cluster) -> String {
    let mut seen = BTreeSet::new();
    let names = cluster.groups.iter().map(|group| group.device.name.as_str());
    names.filter(|name| seen.insert(*name)).collect::<Vec<_>>().join(" + ")
}

fn describe(cluster: &Cluster) -> String {
    let head = list(&[
        ("cluster", cluster.name.clone()),
        ("devices", figures::grouped(cluster.n_devices())),
        ("reserve", format!("{} of each device", figures::bytes(cluster.reserve_bytes))),
    ]);
    let columns = [
        ("device", Side::Left),
        ("count", Side::Right),
        ("per node", Side::Right),
        ("memory", Side::Right),
        ("bandwidth", Side::Right),
        ("peak", Side::Left),
        ("host memory", Side::Right),
    ];
    let rows: Vec<Vec<String>> = cluster.groups.iter().map(group_row).collect();
    let links = [
        ("link", Side::Left),
        ("devices", Side::Right),
        ("bandwidth", Side::Right),
        ("latency", Side::Right),
        ("wiring", Side::Left),
        ("oversubscription", Side::Right),
        ("reduces in switch", Side::Left),
    ];
    let mut tiers: Vec<Vec<String>> = Vec::new();
    for tier in &cluster.tiers {
        tiers.push(link_row(tier.name.clone(), tier.devices, &tier.link()));
        for group in &cluster.groups {
            let own = group.links.iter().filter(|own| own.tier == tier.name);
            let name = format!("{} of {}", tier.name, group.device.name);
            tiers.extend(own.map(|own| link_row(name.clone(), tier.devices, &own.link)));
        }
    }
    format!("{head}\n{}{}\n{}", table(&columns, &rows), drives(cluster), table(&links, &tiers))
}

/// The NVMe drives of the groups whose nodes have some.
fn drives(cluster: &Cluster) -> String {
    let columns = [
        ("nvme per node", Side::Left),
        ("capacity", Side::Right),
        ("read", Side::Right),
        ("written", Side::Right),
    ];
    let row = |(group, nvme): (&DeviceGroup, Nvme)| {
        let rates = [nvme.read_bytes_per_s, nvme.write_bytes_per_s].map(figures::bandwidth);
        let [read, written] = rates;
        vec![group.device.name.clone(), figures::bytes(nvme.capacity_bytes), read, written]
    };
    let have = cluster.groups.iter().filter_map(|group| Some((group, group.nvme?)));
    let rows: Vec<Vec<String>> = have.map(row).collect();
    if rows.is_empty() { String::new() } else { format!("\n{}", table(&columns, &rows)) }
}

fn link_row(name: String, devices: u64, link: &Link) -> Vec<String> {
    vec![
        name,
        devices.to_string(),
        figures::bandwidth(link.bandwidth_bytes_per_s),
        figures::seconds(link.latency_s),
        word(&link.wiring),
        figures::three(link.oversubscription),
        word(&link.in_switch_reduction),
    ]
}

fn group_row(group: &DeviceGroup) -> Vec<String> {
    let device = &group.device;
    let peak = |(precision, rate): (&Precision, &ir::units::FlopsPerSecond)| {
        format!("{} {}", word(precision), figures::three(rate.0 / 1e12))
    };
    vec![
        device.name.clone(),
        group.count.to_string(),
        group.devices_per_node.to_string(),
        figures::bytes(device.memory_bytes),
        figures::bandwidth(device.memory_bandwidth_bytes_per_s),
        device.peak_flops_per_s.iter().map(peak).collect::<Vec<_>>().join(", ") + " TFLOP/s",
        figures::bytes(group.host_memory_bytes),
    ]
}

/// The word that files use for a value.
pub(crate) fn word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        Ok(other) => other.to_string(),
        Err(_) => "?".into(),
    }
}
