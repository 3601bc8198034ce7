//! `planner calibrate --gemm CSV --nccl LOG`: constants from benchmarks of single products and collectives.

use std::path::Path;

use cost_model::Constants;
use cost_model::rates::peak;
use ir::cluster::Cluster;
use validate::benchmarks::{Product, Settled, device, from_collectives, from_products, rate_of};
use validate::nccl_log::{self, CollectiveRun, kind_of};
use validate::row::read_as;

use crate::args::{CalibrateArgs, SizeArgs};
use crate::calibrate::TOO_FAR;
use crate::clusters::{device_names, word};
use crate::failure::Failure;
use crate::figures;
use crate::input::{self, read_lines};
use crate::question::resized;

/// What a constant leaves unexplained is told from here on, as a part.
const TOLD: f64 = 0.01;

/// Products are no faster than the peak of their device, but for rounding.
const OVER_PEAK: f64 = 1.01;

/// What the benchmarks say.
pub(crate) struct Benchmarked {
    pub(crate) constants: Constants,
    /// What was measured, file by file.
    pub(crate) provenance: Vec<String>,
    /// For people: what moved and by how much of what was measured.
    pub(crate) text: String,
}

/// Reads the benchmarks that were given, and settles the constants that they measure.
pub(crate) fn benchmarked(args: &CalibrateArgs, start: &Constants) -> Result<Benchmarked, Failure> {
    let mut found = Benchmarked { constants: start.clone(), provenance: Vec::new(), text: String::new() };
    let Some(cluster) = &args.cluster else { return Ok(found) };
    if args.gemm.is_none() && args.nccl.is_empty() {
        let what = "--cluster says where benchmarks ran, and none is given: add --gemm or --nccl";
        return Err(Failure::argument(what));
    }
    let size = SizeArgs { nodes: args.nodes, ..SizeArgs::default() };
    let cluster = resized(input::cluster(cluster)?.value, &size)?;
    if let Some(file) = &args.gemm {
        let products = products(file, (&cluster, start))?;
        let (constants, settled) = from_products(&products, &cluster, &found.constants);
        found.constants = constants;
        let what = figures::counted(products.len() as u64, "matrix product");
        found.provenance.push(format!("{file}: {what} on {}", device_names(&cluster)));
        found.text.push_str(&said(file, &settled, "no product is bound by arithmetic: take larger ones")?);
    }
    let mut runs = Vec::new();
    for argument in &args.nccl {
        let (file, own) = logged(argument, &cluster)?;
        found.provenance.extend(own.iter().map(|run| format!("{file}: {}", ran(run))));
        runs.extend(own);
    }
    if !runs.is_empty() {
        let (constants, settled) = from_collectives(&runs, &cluster, &found.constants);
        found.constants = constants;
        let none = "no message is so large that its time follows the links' rate: go up to 1 GB or more";
        let logs = figures::counted(args.nccl.len() as u64, "log");
        found.text.push_str(&said(&format!("--nccl, {logs}"), &settled, none)?);
    }
    Ok(found)
}

/// A table of products, each of a device of the cluster and with a time.
fn products(file: &str, (cluster, start): (&Cluster, &Constants)) -> Result<Vec<Product>, Failure> {
    let text = read_lines(file, frontends::MAX_FILE_BYTES)?;
    let hint = "columns are precision, m, n, k, and time_us or tflops; batch and device may be added";
    let fault = |what: String| Failure::argument_with_hint(format!("{file}: {what}"), hint);
    let products: Vec<Product> = read_as(&text).map_err(|error| fault(error.to_string()))?;
    if products.is_empty() {
        return Err(fault("no product".into()));
    }
    for (at, product) in products.iter().enumerate() {
        let row = at + 1;
        let seconds = product.seconds().map_err(|what| fault(format!("row {row}: {what}")))?;
        let Some(device) = device(product, cluster) else {
            let devices = device_names(cluster);
            return Err(fault(match &product.device {
                Some(name) => format!("row {row}: `{name}` is no device of the cluster, which has {devices}"),
                None => format!("row {row}: column device must say which of {devices}"),
            }));
        };
        let (rate, _) = peak(device, product.precision, start);
        let reached = product.operations() / seconds;
        if reached > rate.0 * OVER_PEAK {
            return Err(fault(format!(
                "row {row}: {:.0} TFLOP/s, and {} has no more than {:.0} in {}: rates of sparse matrices are twice as high",
                reached * 1e-12,
                device.name,
                rate.0 * 1e-12,
                product.precision.name()
            )));
        }
        if rate_of(device.architecture, product.precision).is_none() {
            let format = product.precision.name();
            let what = format!("row {row}: no constant is the rate of {format} products of {}", device.name);
            return Err(fault(what));
        }
    }
    Ok(products)
}

/// The runs of a log, each of which the cluster has room for.
fn logged<'a>(argument: &'a str, cluster: &Cluster) -> Result<(&'a str, Vec<CollectiveRun>), Failure> {
    let (file, named) = match argument.split_once('=').map(|(name, file)| (kind_of(name), file)) {
        Some((Some(kind), file)) => (file, Some(kind)),
        Some((None, file)) if !Path::new(argument).exists() && Path::new(file).exists() => {
            let name = argument.strip_suffix(file).unwrap_or_default().trim_end_matches('=');
            let hint = "names are all-reduce, all-gather, reduce-scatter and all-to-all";
            return Err(Failure::argument_with_hint(
                format!("--nccl: `{name}` is no collective that is read"),
                hint,
            ));
        }
        _ => (argument, None),
    };
    let text = read_lines(file, frontends::MAX_FILE_BYTES)?;
    let runs = nccl_log::read(&text, named).map_err(|error| {
        let hint = "expected what nccl-tests print, such as `all_reduce_perf -b 8 -e 8G -f 2`; \
                    `--nccl all-reduce=LOG` says which collective it is";
        Failure::argument_with_hint(format!("{file}: {error}"), hint)
    })?;
    let n_nodes: u64 = cluster.groups.iter().map(ir::cluster::DeviceGroup::n_nodes).sum();
    let node = cluster.groups.iter().map(|group| group.devices_per_node).min().unwrap_or(1);
    for run in &runs {
        if run.n_nodes > n_nodes || run.ranks_per_node > node {
            let nodes = figures::counted(n_nodes, "node");
            return Err(Failure::argument_with_hint(
                format!("{file}: {}, and the cluster has {nodes} of {node}", ran(run)),
                "name the cluster that was measured; --nodes gives it more nodes",
            ));
        }
    }
    Ok((file, runs))
}

/// `all-reduce of 16 ranks on 2 nodes, 12 sizes`.
fn ran(run: &CollectiveRun) -> String {
    let ranks = figures::counted(run.n_nodes * run.ranks_per_node, "rank");
    let nodes = figures::counted(run.n_nodes, "node");
    format!("{} of {ranks} on {nodes}, {}", word(&run.kind), figures::counted(run.times.len() as u64, "size"))
}

/// What was settled by how many observations.
fn said(file: &str, settled: &[Settled], none: &str) -> Result<String, Failure> {
    let line = |one: &Settled| {
        let n = figures::counted(one.n_observed as u64, "time");
        let way = if one.left > 0.0 { "longer" } else { "shorter" };
        let left = (one.left.abs() > TOLD)
            .then(|| format!("; predictions stay {:.0} % {way} than measured", one.left.abs() * 100.0));
        let left = left.unwrap_or_default();
        let follow = if one.n_observed == 1 { "follows" } else { "follow" };
        format!("{file}: {n} {follow} {}: {:.3}, was {:.3}{left}\n", one.name, one.values.1, one.values.0)
    };
    if settled.is_empty() {
        return Err(Failure::argument(format!("{file}: {none}")));
    }
    if let Some(far) = settled.iter().find(|one| one.left.abs() > TOO_FAR) {
        return Err(Failure::argument_with_hint(
            format!("{file}: no value of {} comes near these times", far.name),
            "times are in microseconds, rates in 1e12 operations a second; was it this cluster?",
        ));
    }
    Ok(settled.iter().map(line).collect())
}
