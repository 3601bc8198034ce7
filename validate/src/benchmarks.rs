//! What benchmarks of single products and collectives say of one cluster's constants.
//!
//! ```text
//! rate of products = where the median of ln(predicted / measured) is what it is for published benchmarks of the family   -> usual()
//! rate of links    = where that median is zero                                                                        -> settled()
//! over observations whose time follows the constant: d ln t / d ln c <= FOLLOWS
//! ```
//! Devices under load for hours have lower clocks and colder caches than in a benchmark: constants are those of whole
//! steps, in which the same products take, in 16 bits, 1.2 to 1.5 times as long. How much, published benchmarks say
//! (`components`): of a family's own devices, or of all families where it has none. What a cluster's benchmark adds is
//! how it differs from those.

use cost_model::{Constants, Group, GroupAxis, Parameter, choose, work_time};
use ir::cluster::{Architecture, Cluster, Device, Precision};
use ir::units::{Bytes, Seconds};
use ir::work::{GemmOutput, Work};
use serde::Deserialize;

use crate::components::published_products;
use crate::fit::{family_name, parameter};
use crate::nccl_log::CollectiveRun;

/// An observation says something of a constant if twice as much of it takes two thirds of the time or less.
const FOLLOWS: f64 = -0.6;

/// Part by which a constant is moved to see what follows it.
const NUDGE: f64 = 0.05;

/// Of a link, what its rate would be if it were what a collective waits for.
const SLOW: f64 = 0.5;

/// Halvings of the logarithm of a constant's range.
const HALVINGS: usize = 60;

/// What two medians may differ by and be the same.
const TINY: f64 = 1e-9;

/// One measured matrix product: `batch` times `m x k` by `k x n`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Product {
    /// Device, of a cluster that has several.
    #[serde(default)]
    pub device: Option<String>,
    /// Format of the operands: `bf16`, `fp16` or `fp8`.
    pub precision: Precision,
    /// Independent products; one if not said.
    #[serde(default)]
    pub batch: Option<f64>,
    /// Rows of the result.
    pub m: f64,
    /// Columns of the result.
    pub n: f64,
    /// Length of the contraction.
    pub k: f64,
    /// Microseconds, or else the rate.
    #[serde(default)]
    pub time_us: Option<f64>,
    /// 1e12 operations a second, or else the time.
    #[serde(default)]
    pub tflops: Option<f64>,
}

impl Product {
    /// Seconds that it took, from the time or from the rate.
    ///
    /// # Errors
    /// What its row lacks.
    pub fn seconds(&self) -> Result<f64, &'static str> {
        let sizes = self.sizes();
        // Larger operands than any device holds.
        if sizes.iter().any(|size| !(1.0..=1e9).contains(size)) {
            return Err("batch, m, n and k must be numbers from 1 to 1e9");
        }
        let seconds = match (self.time_us, self.tflops) {
            (Some(us), None) => us * 1e-6,
            (None, Some(tflops)) => self.operations() / (tflops * 1e12),
            _ => return Err("expected one of time_us and tflops"),
        };
        if seconds.is_finite() && seconds > 0.0 { Ok(seconds) } else { Err("the time must be above 0") }
    }

    /// Operations of it: an addition behind every multiplication.
    pub fn operations(&self) -> f64 {
        2.0 * self.sizes().iter().product::<f64>()
    }

    fn sizes(&self) -> [f64; 4] {
        [self.batch.unwrap_or(1.0), self.m, self.n, self.k]
    }

    /// What it computes.
    pub(crate) fn work(&self) -> Work {
        let batch = self.batch.unwrap_or(1.0);
        Work::Gemm { batch, m: self.m, n: self.n, k: self.k, output: GemmOutput::Operand }
    }
}

/// What benchmarks say of one constant.
#[derive(Clone, Debug, PartialEq)]
pub struct Settled {
    /// The constant.
    pub name: &'static str,
    /// What it was, and what it is.
    pub values: (f64, f64),
    /// Observations whose time follows it.
    pub n_observed: usize,
    /// How much longer than measured, as a part, predictions still are where the constant cannot follow; below zero if
    /// shorter.
    pub left: f64,
}

/// A measured time, and what predicts it.
struct Observed<'a> {
    measured: f64,
    predict: Box<dyn Fn(&Constants) -> Seconds + 'a>,
}

impl Observed<'_> {
    fn ratio(&self, constants: &Constants) -> f64 {
        ((self.predict)(constants).0 / self.measured).ln()
    }

    fn follows(&self, name: &str, constants: &Constants) -> bool {
        let Some(value) = constants.get(name) else { return false };
        let mut moved = constants.clone();
        let _ = moved.set(name, value * (1.0 + NUDGE));
        (self.ratio(&moved) - self.ratio(constants)) / NUDGE.ln_1p() <= FOLLOWS
    }
}

/// Constants with the rates of products as benchmarks of the cluster's devices have them. Products of which no constant
/// is the rate, and times that are none, say nothing.
pub fn from_products(
    products: &[Product],
    cluster: &Cluster,
    start: &Constants,
) -> (Constants, Vec<Settled>) {
    let mut constants = start.clone();
    let mut all = Vec::new();
    for (architecture, precision) in kinds(products, cluster) {
        let Some(rate) = rate_of(architecture, precision) else { continue };
        let is_own = |product: &&Product| {
            device(product, cluster).is_some_and(|device| device.architecture == architecture)
                && same_units(product.precision, precision)
        };
        let own = products.iter().filter(is_own);
        let observed: Vec<Observed<'_>> = own.filter_map(|product| observed(product, cluster)).collect();
        let usual = usual(architecture, precision, start);
        let followed = followed(&rate, &observed, (&constants, 1.0));
        all.extend(settled(&rate, &followed, usual, &mut constants));
    }
    (constants, all)
}

/// Families and formats of some products, each once; 16-bit formats run on the same units.
fn kinds(products: &[Product], cluster: &Cluster) -> Vec<(Architecture, Precision)> {
    let mut kinds: Vec<(Architecture, Precision)> = Vec::new();
    for product in products {
        let Some(device) = device(product, cluster) else { continue };
        if !kinds
            .iter()
            .any(|(family, format)| *family == device.architecture && same_units(*format, product.precision))
        {
            kinds.push((device.architecture, product.precision));
        }
    }
    kinds
}

/// The cluster's device on which a product was timed: the named one, or the only one.
pub fn device<'c>(product: &Product, cluster: &'c Cluster) -> Option<&'c Device> {
    let mut devices = cluster.groups.iter().map(|group| &group.device);
    match &product.device {
        Some(name) => devices.find(|device| device.name == *name),
        None => {
            let first = devices.next()?;
            devices.all(|other| other.name == first.name).then_some(first)
        }
    }
}

fn observed<'a>(product: &'a Product, cluster: &'a Cluster) -> Option<Observed<'a>> {
    let (device, measured) = (device(product, cluster)?, product.seconds().ok()?);
    let work = product.work();
    let predict = move |constants: &Constants| work_time(&work, device, product.precision, constants);
    Some(Observed { measured, predict: Box::new(predict) })
}

fn same_units(a: Precision, b: Precision) -> bool {
    let is_half = |format| matches!(format, Precision::Bf16 | Precision::Fp16);
    a == b || is_half(a) && is_half(b)
}

/// The constant that is the rate of a family's products in a format.
pub fn rate_of(architecture: Architecture, precision: Precision) -> Option<Parameter> {
    let family = family_name(architecture);
    let formats: &[&str] = match precision {
        Precision::Bf16 | Precision::Fp16 => &["bf16", "fp16"],
        Precision::Fp8 => &["fp8"],
        Precision::Fp32 => &[],
    };
    let named = |format: &&str| parameter(&format!("gemm_efficiency_fraction_of_peak.{family}.{format}"));
    formats.iter().find_map(named)
}

/// By how much prices of whole steps are above published benchmarks of a family's products, as the logarithm of a
/// ratio: by its own devices, or by those of all families in that format.
fn usual(architecture: Architecture, precision: Precision, constants: &Constants) -> f64 {
    let mut of_families = Vec::new();
    let format = if precision == Precision::Fp16 { Precision::Bf16 } else { precision };
    for (family, cluster, products) in published_products(format) {
        let Some(rate) = rate_of(family, precision) else { continue };
        let observed: Vec<Observed<'_>> = products.iter().filter_map(|one| observed(one, &cluster)).collect();
        let followed = followed(&rate, &observed, (constants, 1.0));
        if let Some(ratio) = median(followed.iter().map(|one| one.ratio(constants)).collect()) {
            of_families.push((family, ratio));
        }
    }
    let mean = |own: &dyn Fn(Architecture) -> bool| {
        let ratios: Vec<f64> =
            of_families.iter().filter(|(family, _)| own(*family)).map(|(_, ratio)| *ratio).collect();
        (!ratios.is_empty()).then(|| ratios.iter().sum::<f64>() / ratios.len() as f64)
    };
    mean(&|family| family == architecture).or_else(|| mean(&|_| true)).unwrap_or(0.0)
}

/// Constants with the rates of links as runs of single collectives on the cluster have them.
pub fn from_collectives(
    runs: &[CollectiveRun],
    cluster: &Cluster,
    start: &Constants,
) -> (Constants, Vec<Settled>) {
    // Name, whether runs between nodes say it, and the part of it at which it is asked what follows: switches that
    // reduce at half of their rate are slower than a ring.
    const RATES: [(&str, bool, f64); 4] = [
        ("node_link_efficiency_fraction", false, SLOW),
        ("in_switch_node_fraction", false, 1.0),
        ("network_efficiency_fraction", true, SLOW),
        ("in_switch_network_fraction", true, 1.0),
    ];
    let mut constants = start.clone();
    let mut all = Vec::new();
    for (name, is_between, asked_at) in RATES {
        let Some(rate) = parameter(name) else { continue };
        let own = runs.iter().filter(|run| (run.n_nodes > 1) == is_between);
        let observed: Vec<Observed<'_>> = own.flat_map(|run| timed(run, cluster)).collect();
        let followed = followed(&rate, &observed, (&constants, asked_at));
        all.extend(settled(&rate, &followed, 0.0, &mut constants));
    }
    (constants, all)
}

/// The times of a run, each with what predicts it.
fn timed<'a>(run: &'a CollectiveRun, cluster: &'a Cluster) -> impl Iterator<Item = Observed<'a>> {
    let group = group(run, cluster);
    run.times.iter().map(move |&(bytes, measured)| {
        let group = group.clone();
        let predict =
            move |constants: &Constants| choose(run.kind, Bytes(bytes), &group, cluster, constants).time;
        Observed { measured, predict: Box::new(predict) }
    })
}

/// The ranks of a run: neighbours in every node.
fn group(run: &CollectiveRun, cluster: &Cluster) -> Group {
    let node = cluster.groups.first().map_or(1, |group| group.devices_per_node);
    let axes =
        [GroupAxis { stride: 1, size: run.ranks_per_node }, GroupAxis { stride: node, size: run.n_nodes }];
    let wide: Vec<GroupAxis> = axes.into_iter().filter(|axis| axis.size > 1).collect();
    Group::from_axes(&wide, cluster)
}

/// The observations that say something of a rate where it is so much of what it is: a link that is faster than another
/// is said nothing of until it is slower.
fn followed<'o, 'a>(
    rate: &Parameter,
    all: &'o [Observed<'a>],
    (constants, of_it): (&Constants, f64),
) -> Vec<&'o Observed<'a>> {
    let mut at = constants.clone();
    if let Some(value) = constants.get(rate.name) {
        let _ = at.set(rate.name, value * of_it);
    }
    all.iter().filter(|one| one.follows(rate.name, &at)).collect()
}

/// Moves a rate to where half of the observations that follow it are predicted longer than `usual` says, and half
/// shorter; to where it is nearest to that if it cannot be so, and no further than it must.
fn settled(
    rate: &Parameter,
    followed: &[&Observed<'_>],
    usual: f64,
    constants: &mut Constants,
) -> Option<Settled> {
    let before = constants.get(rate.name)?;
    let off = |value: f64| {
        let mut moved = constants.clone();
        moved.set(rate.name, value)?;
        Some(median(followed.iter().map(|one| one.ratio(&moved)).collect())? - usual)
    };
    let ends = (rate.least, rate.most);
    let aim = off(ends.0)?.min(0.0).max(off(ends.1)?);
    // Predictions fall with the rate, and stand still where something else sets the time.
    let last = |is_before: &dyn Fn(f64) -> bool| {
        let (mut low, mut high) = ends;
        for _ in 0..HALVINGS {
            let middle = (low * high).sqrt();
            if is_before(off(middle)?) { low = middle } else { high = middle }
        }
        Some(if is_before(off(high)?) { high } else { low })
    };
    let range = (last(&|off| off > aim + TINY)?, last(&|off| off >= aim - TINY)?);
    let value = before.clamp(range.0, range.1.max(range.0));
    let (left, n_observed) = (off(value)?.exp_m1(), followed.len());
    constants.set(rate.name, value)?;
    Some(Settled { name: rate.name, values: (before, value), n_observed, left })
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    Some(if values.len() % 2 == 1 { upper } else { (values[values.len() / 2 - 1] + upper) / 2.0 })
}

#[cfg(test)]
mod tests {
    use cost_model::CollectiveKind;
    use frontends::{read_cluster, shipped_cluster};

    use super::*;
    use crate::calibration::Calibration;

    fn cluster(name: &str) -> Cluster {
        read_cluster(name, shipped_cluster(name).unwrap().text).unwrap()
    }

    /// The published products of H100, each with its time multiplied.
    fn products(slower: f64) -> Vec<Product> {
        let published = published_products(Precision::Bf16);
        let (.., products) =
            published.into_iter().find(|(_, cluster, _)| cluster.name == "h100-sxm").unwrap();
        let slowed = |product: Product| Product { time_us: product.time_us.map(|us| us * slower), ..product };
        products.into_iter().map(slowed).collect()
    }

    const RATE: &str = "gemm_efficiency_fraction_of_peak.hopper.bf16";

    #[test]
    fn products_as_slow_as_others_of_the_family_move_nothing_and_slower_ones_their_share() {
        let (cluster, shipped) = (cluster("dgx-h100"), Constants::load());
        let rate = |slower: f64| {
            let (constants, settled) = from_products(&products(slower), &cluster, &shipped);
            assert_eq!((settled.len(), settled[0].name), (1, RATE));
            assert!(settled[0].left.abs() < 1e-6, "{settled:?}");
            assert_eq!(moved(&shipped, &constants), [RATE]);
            constants.get(RATE).unwrap()
        };
        // H200 are the other published devices of the family: two per cent apart.
        let same = rate(1.0);
        assert!((same / shipped.get(RATE).unwrap() - 1.0).abs() < 0.02, "{same}");
        let slower = rate(1.2) / same;
        assert!((slower * 1.2 - 1.0).abs() < 0.03, "{slower}");
    }

    #[test]
    fn small_products_say_nothing_of_the_rate() {
        let small = Product { m: 16.0, n: 16.0, k: 16.0, time_us: Some(4.0), ..products(1.0)[0].clone() };
        let (constants, settled) = from_products(&[small], &cluster("dgx-h100"), &Constants::load());
        assert_eq!((settled, constants), (Vec::new(), Constants::load()));
    }

    #[test]
    fn a_rate_stands_for_a_time() {
        let timed =
            Product { m: 1000.0, n: 1000.0, k: 1000.0, time_us: Some(4.0), ..products(1.0)[0].clone() };
        let rated = Product { time_us: None, tflops: Some(500.0), ..timed.clone() };
        assert!((timed.seconds().unwrap() - rated.seconds().unwrap()).abs() < 1e-15);
        assert!(Product { tflops: Some(1.0), ..timed.clone() }.seconds().is_err());
        assert!(Product { time_us: Some(-1.0), ..timed.clone() }.seconds().is_err());
        assert!(Product { m: 0.5, ..timed }.seconds().is_err());
    }

    /// Names of the constants that differ.
    fn moved(a: &Constants, b: &Constants) -> Vec<String> {
        Calibration::between(a, b, "").constants.into_keys().collect()
    }

    /// Runs of a collective as some constants price them.
    fn run(kind: CollectiveKind, n_nodes: u64, cluster: &Cluster, constants: &Constants) -> CollectiveRun {
        let mut run = CollectiveRun { kind, n_nodes, ranks_per_node: 8, times: Vec::new() };
        let group = group(&run, cluster);
        let time = |bytes: f64| (bytes, choose(kind, Bytes(bytes), &group, cluster, constants).time.0);
        run.times = (10..33).map(|power| time(2_f64.powi(power))).collect();
        run
    }

    #[test]
    fn links_that_made_the_times_are_found_again() {
        let mut cluster = cluster("dgx-h100");
        cluster = frontends::rescale(&cluster, frontends::Size::Nodes(4)).unwrap();
        let shipped = Constants::load();
        let mut true_ones = shipped.clone();
        let truth = [
            ("node_link_efficiency_fraction", 0.7),
            ("in_switch_node_fraction", 0.55),
            ("network_efficiency_fraction", 0.6),
        ];
        for (name, value) in truth {
            true_ones.set(name, value).unwrap();
        }
        let kinds =
            [(CollectiveKind::AllGather, 1), (CollectiveKind::AllReduce, 1), (CollectiveKind::AllGather, 4)];
        let runs = kinds.map(|(kind, n_nodes)| run(kind, n_nodes, &cluster, &true_ones));
        let (found, settled) = from_collectives(&runs, &cluster, &shipped);
        for (name, value) in truth {
            let found = found.get(name).unwrap();
            assert!((found / value - 1.0).abs() < 1e-6, "{name}: {found} {settled:?}");
        }
        assert_eq!(settled.len(), truth.len());
    }

    #[test]
    fn reduction_in_switches_that_is_slower_than_a_ring_goes_as_far_as_it_helps() {
        let (cluster, shipped) = (cluster("dgx-h100"), Constants::load());
        let slow = Constants {
            in_switch_node_fraction: 0.05,
            node_link_efficiency_fraction: 0.6,
            ..shipped.clone()
        };
        let runs = [run(CollectiveKind::AllReduce, 1, &cluster, &slow)];
        let (found, settled) = from_collectives(&runs, &cluster, &shipped);
        let in_switch = &settled[0];
        assert_eq!(in_switch.name, "in_switch_node_fraction");
        assert!(in_switch.left < -0.1 && in_switch.values.1 > 0.2, "{in_switch:?}");
        assert_eq!(found.node_link_efficiency_fraction, shipped.node_link_efficiency_fraction);
    }
}
