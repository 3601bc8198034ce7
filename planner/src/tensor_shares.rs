//! Plans whose unlike devices take unequal parts of tensors: several ranks on a fast device, one on a slow one.
//!
//! An axis cuts what it cuts into equal blocks, one a rank. So a device that runs three ranks has three blocks where
//! its neighbour has one, of whatever the axis cuts: columns of products, heads, tokens, sequences. With ranks on
//! devices given (`ir::cluster_ranks`), all else is a search as any other: ranks are what meshes, programs and prices
//! are made of. What a device has beyond one rank costs nothing on its links.
//!
//! Left out: clusters of more than two kinds of devices, or whose link tiers would have domains of unequal ranks; more
//! ranks than [`MAX_SHARING_RANKS`]; other ratios than [`RATIOS`]; groups in another order, or not all of them.

use cost_model::{Constants, Rates};
use ir::cluster::{Cluster, DeviceGroup};
use ir::cluster_ranks::MAX_SHARING_RANKS;
use ir::plan::Plan;

use crate::document;
use crate::found::{Found, Start};
use crate::layouts::least_time;
use crate::optimize::search_from;
use crate::request::{Job, OnProgress, Pins, Request, SharesKind, Stop};
use crate::share_plans::{instead, time_of};

/// Ranks on a fast device and on a slow one.
const RATIOS: [(u64, u64); 3] = [(2, 1), (3, 1), (3, 2)];

/// The fastest plan with unequal numbers of ranks on unlike devices, if it is faster than another, or there is no
/// other.
pub(crate) fn faster(
    request: &Request,
    constants: &Constants,
    watch: (Stop<'_>, OnProgress<'_>),
    other: Option<&Plan>,
) -> Option<Plan> {
    if request.pins.tensor_shares == Some(SharesKind::Equal)
        || request.cluster.n_devices() > MAX_SHARING_RANKS
    {
        return None;
    }
    let (mut best, mut work, mut n_candidates, mut n_ratios): (Option<Plan>, _, _, _) = (None, 0, 0, 0);
    for cluster in clusters(&request.cluster, &request.job, constants) {
        let limit = time_of(best.as_ref()).min(time_of(other));
        let equal = Some(SharesKind::Equal);
        let pins = Pins { shares: equal, tensor_shares: equal, ..request.pins.clone() };
        let asked = Request { cluster, pins, ..request.clone() };
        n_ratios += 1;
        if least_time(&asked, constants).0 >= limit {
            continue;
        }
        let limit_of = Some(ir::units::Seconds(limit)).filter(|limit| limit.0.is_finite());
        let start = Start { work, limit: limit_of, ..Start::default() };
        let (found, tally) = search_from(&asked, constants, start, watch);
        (work, n_candidates) = (tally.work, n_candidates + tally.n_candidates);
        let Ok(found) = found else { continue };
        let found = Found { asked: &request.cluster, tally, ..found };
        let is_stopped = found.tally.stopped;
        let plan = document::plan(&found, constants).and_then(Result::ok);
        best = plan.filter(|plan| time_of(Some(plan)) < limit).or(best);
        if is_stopped {
            break;
        }
    }
    let proof = format!(
        "{n_ratios} ratios of ranks on unlike devices were searched, each as a cluster of its own; the bound is the model's \
         products at the rates of all devices"
    );
    let bound = least_time(request, constants);
    let reason = "all devices run one rank";
    best.map(|best| instead(best, other, (n_candidates, bound), (proof, reason)))
}

/// The cluster with more ranks on its faster devices, of two kinds.
fn clusters(cluster: &Cluster, job: &Job, constants: &Constants) -> Vec<Cluster> {
    let rate = |group: &DeviceGroup| Rates::new(&group.device, job.precision, constants).gemm.0;
    let least = cluster.groups.iter().map(rate).fold(f64::INFINITY, f64::min);
    let is_fast = |group: &DeviceGroup| rate(group) > least;
    let kinds = |fast: bool| {
        let own = cluster.groups.iter().filter(move |group| is_fast(group) == fast);
        own.clone().zip(own.skip(1)).all(|(a, b)| a.device == b.device)
    };
    if !cluster.groups.iter().any(is_fast) || !kinds(true) || !kinds(false) {
        return Vec::new();
    }
    let with = |(fast, slow): (u64, u64)| {
        let each = cluster.groups.iter().map(|group| if is_fast(group) { fast } else { slow });
        cluster.with_ranks(&each.collect::<Vec<_>>())
    };
    RATIOS.into_iter().filter_map(with).collect()
}
