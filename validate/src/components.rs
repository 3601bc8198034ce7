//! Single operators and collectives against the operator models: where an error of whole steps comes from.
//!
//! Whole steps run hotter and with colder caches than a benchmark of one kernel: constants are fitted to steps, so that
//! bias here is expected where devices lower their clocks under load. Nothing is fitted to these rows.

use std::collections::BTreeMap;

use cost_model::{CollectiveKind, Constants, Group, GroupAxis, price, work_time};
use frontends::read_cluster;
use ir::cluster::{Architecture, Cluster, Device, Precision};
use ir::engine::{Engine, FlashKernel};
use ir::units::{Bytes, Seconds};
use ir::work::{AttentionKernel, Pass, Work};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::benchmarks::Product;
use crate::express_cluster::usual;
use crate::row::read_as;
use crate::score::{Errors, Pair};

/// One measured operator or collective.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Component {
    #[serde(rename = "id")]
    _id: String,
    source: String,
    kind: String,
    device: String,
    precision: String,
    passes: String,
    m: Option<f64>,
    n: Option<f64>,
    k: Option<f64>,
    batch: Option<f64>,
    heads: Option<f64>,
    #[serde(rename = "kv_heads")]
    _kv_heads: Option<f64>,
    head_dim: Option<f64>,
    seq: Option<f64>,
    causal: Option<u8>,
    operation: String,
    kernel: String,
    message_bytes: Option<f64>,
    ranks: Option<u64>,
    time_us: f64,
}

/// Errors of one kind of component on one device in one format.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComponentReport {
    /// What: `gemm`, `attention forward current`, `all-gather`.
    pub kind: String,
    /// Device and format.
    pub device: String,
    /// Source.
    pub source: String,
    /// Errors of time.
    pub time: Errors,
}

/// Prices all published components and counts errors by kind, device and source.
pub fn components(constants: &Constants) -> Vec<ComponentReport> {
    reports(&table(), constants)
}

/// The same of those that the project's own script measured.
pub(crate) fn measured_components(constants: &Constants) -> Vec<ComponentReport> {
    reports(&read(include_str!("../../fixtures/measured/operators.csv")), constants)
}

fn reports(rows: &[Component], constants: &Constants) -> Vec<ComponentReport> {
    let mut nodes: BTreeMap<&str, Option<Cluster>> = BTreeMap::new();
    for row in rows {
        nodes.entry(&row.device).or_insert_with(|| node(&row.device));
    }
    let mut groups: BTreeMap<(String, String, String), Vec<Pair>> = BTreeMap::new();
    for row in rows {
        let Some(cluster) = nodes.get(row.device.as_str()).and_then(Option::as_ref) else { continue };
        let Some(predicted) = predicted(row, cluster, constants) else { continue };
        let kind = match row.kind.as_str() {
            "attention" => format!("attention {}, {}", row.passes, row.kernel),
            "collective" => row.operation.clone(),
            // Published products do not say what they are of.
            other => {
                let words = [other, &row.passes, &row.operation];
                words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
            }
        };
        let device = match row.kind.as_str() {
            "collective" => row.device.clone(),
            _ => format!("{} {}", row.device, row.precision),
        };
        let pair = Pair { measured: row.time_us * 1e-6, predicted: predicted.0 };
        groups.entry((kind, device, row.source.clone())).or_default().push(pair);
    }
    let report = |((kind, device, source), pairs): ((String, String, String), Vec<Pair>)| ComponentReport {
        kind,
        device,
        source,
        time: Errors::of(&pairs),
    };
    groups.into_iter().map(report).collect()
}

/// The rows that are shipped.
fn table() -> Vec<Component> {
    read(include_str!("../../fixtures/published/components.csv"))
}

fn read(table: &str) -> Vec<Component> {
    read_as(table).expect("a test reads the embedded tables")
}

/// Published products in a format: per device, its family and a node of it.
pub(crate) fn published_products(precision: Precision) -> Vec<(Architecture, Cluster, Vec<Product>)> {
    let mut devices: BTreeMap<String, Vec<Product>> = BTreeMap::new();
    for row in table() {
        if let Some(product) = product(&row).filter(|product| product.precision == precision) {
            devices.entry(row.device).or_default().push(product);
        }
    }
    let of_device = |(device, products): (String, Vec<Product>)| {
        let cluster = node(&device)?;
        Some((cluster.groups.first()?.device.architecture, cluster, products))
    };
    devices.into_iter().filter_map(of_device).collect()
}

fn product(row: &Component) -> Option<Product> {
    let precision = match row.precision.as_str() {
        "fp8" => Precision::Fp8,
        "fp16" => Precision::Fp16,
        "fp32" => Precision::Fp32,
        // On the tensor cores, from fp32: no format of a job.
        "tf32" => return None,
        _ => Precision::Bf16,
    };
    let (m, n, k) = (row.m?, row.n?, row.k?);
    let time_us = Some(row.time_us);
    Some(Product { device: None, precision, batch: row.batch, m, n, k, time_us, tflops: None })
        .filter(|_| row.kind.ends_with("gemm"))
}

fn predicted(row: &Component, cluster: &Cluster, constants: &Constants) -> Option<Seconds> {
    let device = &cluster.groups.first()?.device;
    match row.kind.as_str() {
        "gemm" | "batched-gemm" | "grouped-gemm" | "sustained-gemm" => gemm(row, device, constants),
        "attention" => attention(row, device, constants),
        "stream" | "optimizer" => stream(row, device, constants),
        "host-link" => {
            let rate = device.host_link_bytes_per_s * constants.host_link_efficiency_fraction;
            (row.operation != "both-ways").then_some(Bytes(row.message_bytes?) / rate)
        }
        _ => collective(row, cluster, constants),
    }
}

fn gemm(row: &Component, device: &Device, constants: &Constants) -> Option<Seconds> {
    let product = product(row)?;
    Some(work_time(&product.work(), device, product.precision, constants))
}

/// What is nothing but a number of bytes per element, in one kernel. Norms, gates and the loss are priced in the layers
/// that have them.
fn stream(row: &Component, device: &Device, constants: &Constants) -> Option<Seconds> {
    let per_element = match (row.operation.as_str(), row.kernel.as_str()) {
        ("copy-bf16" | "zero-fp32", _) => 4.0,
        ("cast-down" | "cast-up", _) => 6.0,
        ("add", "eager") if row.passes == "forward" => 6.0,
        ("copy-fp32", _) => 8.0,
        // Norm, and scaled by what clips it.
        ("clip", _) => 12.0,
        ("accumulate", _) => 10.0,
        // Value, gradient and moments read, all but the gradient written.
        ("adamw", "fused") => 28.0,
        _ => return None,
    };
    let bytes = Bytes(per_element * row.m? * row.n.unwrap_or(1.0));
    Some(work_time(&Work::Stream { bytes, kernels: 1 }, device, Precision::Bf16, constants))
}

fn attention(row: &Component, device: &Device, constants: &Constants) -> Option<Seconds> {
    let (flash, kernel) = match row.kernel.as_str() {
        "eager" => (FlashKernel::Current, AttentionKernel::Eager),
        "second" => (FlashKernel::Second, AttentionKernel::Flash),
        _ => (FlashKernel::Current, AttentionKernel::Flash),
    };
    let constants = constants.clone().under(Engine { flash, ..Engine::default() });
    let (length, seq) = (row.head_dim?, row.seq?);
    let work = |pass| Work::Attention {
        batch_heads: row.batch.unwrap_or(1.0) * row.heads.unwrap_or(1.0),
        queries: seq,
        keys: seq,
        dim_qk: length,
        dim_v: length,
        unmasked: if row.causal == Some(1) { 0.5 } else { 1.0 },
        pass,
        kernel,
    };
    let time = |pass| work_time(&work(pass), device, Precision::Bf16, &constants);
    Some(match row.passes.as_str() {
        "forward" => time(Pass::Forward),
        _ => time(Pass::Forward) + time(Pass::Backward),
    })
}

fn collective(row: &Component, cluster: &Cluster, constants: &Constants) -> Option<Seconds> {
    let kind = match row.operation.as_str() {
        "all-reduce" => CollectiveKind::AllReduce,
        "all-gather" => CollectiveKind::AllGather,
        "reduce-scatter" => CollectiveKind::ReduceScatter,
        "all-to-all" => CollectiveKind::AllToAll,
        _ => return None,
    };
    let ranks = row.ranks?;
    let group = Group::from_axes(&[GroupAxis { stride: 1, size: ranks }], cluster);
    Some(price(kind, Bytes(row.message_bytes?), &group, cluster, constants))
}

/// One node of a device.
fn node(device: &str) -> Option<Cluster> {
    const NODE: u64 = 8;
    let usual = usual(device)?;
    let file = json!({
        "schema_version": 1, "name": device, "reserve_gib": 0,
        "groups": [{ "device": device, "count": NODE, "devices_per_node": NODE, "host_memory_gib": 1024 }],
        "tiers": [{
            "name": "node", "devices": NODE, "bandwidth_gb_per_s": usual.node, "latency_us": 1.9,
            "wiring": "switch", "in_switch_reduction": usual.in_switch(),
        }],
    });
    read_cluster(device, &file.to_string()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_component_is_priced() {
        let found = components(&Constants::load());
        let rows: usize = found.iter().map(|one| one.time.rows).sum();
        assert!(rows > 3500, "{rows}");
        assert!(found.iter().all(|one| one.time.mean.is_finite()), "{found:?}");
        for kind in ["gemm", "attention forward, current", "all-reduce", "all-to-all"] {
            assert!(found.iter().any(|one| one.kind == kind), "{kind}");
        }
    }
}
