//! The machines that a pipeline may stand on, where the groups of a cluster differ: which of them, and in which order.
//!
//! Stages follow the ranks of a cluster, so the order of its groups says which stages are on which devices. A group may
//! be left out: with slow devices, or few of them, a plan for the others can be faster. Each selection in each order is
//! a cluster of its own and is searched as one; what is found on one rules out what cannot be faster on the next, and
//! machines that could not be faster at the rate that they sustain are not looked at at all.
//!
//! Ranks that share a domain of a link tier keep sharing it: an order that would tear one apart is none.

use std::cmp::Reverse;

use cost_model::{Constants, Rates};
use ir::cluster::{Cluster, DeviceGroup};
use ir::cluster_part::{Piece, part, whole};
use ir::graph::{Layer, Op};
use ir::lower::{gets, gradient_tensors};
use ir::op::OpKind;
use ir::op_work::{Counted, model_flops};
use ir::signature::signature;
use ir::units::Seconds;

use crate::found::{Found, Start, Tally};
use crate::optimize::search_from;
use crate::refusals::{closer, stopped};
use crate::request::{Job, NoPlan, OnProgress, Request, Stop};

/// Groups up to which all selections in all orders are tried: of three there are fifteen.
const MAX_GROUPS_IN_ALL_ORDERS: usize = 3;

/// The request on every selection and order of its cluster's groups: first on all as they are. Where no groups differ
/// there is nothing else.
pub(crate) fn layouts(request: &Request, constants: &Constants) -> Vec<Request> {
    let cluster = &request.cluster;
    let mut list = vec![request.clone()];
    if !cluster.is_mixed() {
        return list;
    }
    for order in orders(cluster, &request.job, constants) {
        let Some(cluster) = ordered(cluster, &order) else { continue };
        if list.iter().all(|known| known.cluster.unnumbered() != cluster.unnumbered()) {
            list.push(Request { cluster, ..request.clone() });
        }
    }
    list
}

/// The fastest plan on any of several machines for one job, after other searches; and how it went, whatever came of it.
///
/// # Errors
/// Where none has a plan: why the one has none that comes closest.
pub(crate) fn search_all<'a>(
    layouts: &'a [Request],
    constants: &'a Constants,
    start: Start,
    watch: (Stop<'_>, OnProgress<'_>),
) -> (Result<Found<'a>, NoPlan>, Tally) {
    let mut tally = Tally { work: start.work, ..Tally::default() };
    let mut best: Option<Found<'a>> = None;
    let mut refused: Option<NoPlan> = None;
    for layout in in_turn(layouts, constants) {
        let limit = best.as_ref().and_then(Found::step_time).or(start.limit);
        if limit.is_some_and(|limit| least_time(layout, constants) >= limit) {
            tally.n_layouts += 1;
            continue;
        }
        let start = Start { work: tally.work, limit, ..start.clone() };
        let (found, own) = search_from(layout, constants, start, watch);
        tally = tally.and(own);
        match found {
            Ok(found) if is_faster(&found, limit) => best = Some(found),
            Ok(_) => {}
            Err(why) => refused = Some(closer(refused, why)),
        }
        if tally.stopped {
            break;
        }
    }
    let none = || NoPlan::Impossible { what: "the cluster has no devices".into() };
    let found = best.ok_or_else(|| {
        let why = refused.unwrap_or_else(none);
        if tally.stopped { stopped(why) } else { why }
    });
    let asked = &layouts[0].cluster;
    (found.map(|found| Found { tally: tally.clone(), asked, ..found }), tally)
}

/// The machines in the order in which they are searched, for what is found first rules out most.
fn in_turn<'l>(layouts: &'l [Request], constants: &Constants) -> Vec<&'l Request> {
    let mut turns: Vec<&Request> = layouts.iter().collect();
    turns.sort_by_key(|layout| turn(&layout.cluster, |group| rate(group, &layout.job, constants)));
    turns
}

/// How fast products are on a device of a group.
fn rate(group: &DeviceGroup, job: &Job, constants: &Constants) -> f64 {
    Rates::new(&group.device, job.precision, constants).gemm.0
}

/// When machines are searched: all groups before parts of them, and first where devices become faster from stage to
/// stage, for the last has the head of the model. Of seven questions about two kinds of devices all had their fastest
/// plan in that order.
fn turn(cluster: &Cluster, rate: impl Fn(&DeviceGroup) -> f64) -> (Reverse<usize>, bool) {
    let rises = cluster.groups.is_sorted_by(|before, after| rate(before) <= rate(after));
    (Reverse(cluster.groups.len()), !rises)
}

/// Seconds that no plan on these machines undercuts: the model's products forward and backward, at the rate that all
/// devices together sustain.
pub(crate) fn least_time(request: &Request, constants: &Constants) -> Seconds {
    let (model, job) = (&request.model, &request.job);
    let of_layer = |layer: &Layer| -> f64 {
        let (sizes, gradients) = (layer.sizes(job.global_batch, job.sequence), gradient_tensors(layer));
        let flops = |op: &Op| {
            let passes = 1 + gets(op, &gradients).into_iter().filter(|gets| *gets).count().min(2);
            passes as f64 * model_flops(layer, op, &signature(layer, op), &sizes, Counted::Once)
        };
        let counts = |op: &&Op| matches!(op.kind, OpKind::Linear | OpKind::Attention { .. });
        layer.ops.iter().filter(counts).map(flops).sum()
    };
    let flops: f64 =
        model.sequence.iter().map(|run| of_layer(&model.layers[run.layer]) * run.count as f64).sum();
    let speed = |group: &DeviceGroup| {
        let rates = Rates::new(&group.device, job.precision, constants);
        rates.gemm.0.max(rates.attention.0) * group.count as f64
    };
    Seconds(flops / request.cluster.groups.iter().map(speed).sum::<f64>())
}

fn is_faster(found: &Found<'_>, limit: Option<Seconds>) -> bool {
    found.step_time().is_some_and(|time| limit.is_none_or(|limit| time < limit))
}

/// Selections of groups in an order.
fn orders(cluster: &Cluster, job: &Job, constants: &Constants) -> Vec<Vec<usize>> {
    let n = cluster.groups.len();
    if n <= MAX_GROUPS_IN_ALL_ORDERS {
        every_order(n)
    } else {
        let rate = |at: usize| rate(&cluster.groups[at], job, constants);
        let mut fastest: Vec<usize> = (0..n).collect();
        fastest.sort_by(|&a, &b| rate(b).total_cmp(&rate(a)).then(a.cmp(&b)));
        let of_fastest = |k: usize| {
            let mut slowest_first = fastest[..k].to_vec();
            slowest_first.reverse();
            [fastest[..k].to_vec(), slowest_first]
        };
        let both_ways = [(0..n).collect(), (0..n).rev().collect()];
        both_ways.into_iter().chain((1..=n).flat_map(of_fastest)).collect()
    }
}

/// Every selection of `n` things in every order, the empty one left out.
fn every_order(n: usize) -> Vec<Vec<usize>> {
    let mut list: Vec<Vec<usize>> = vec![Vec::new()];
    let mut from = 0;
    while from < list.len() {
        let known = list[from].clone();
        let more = (0..n).filter(|at| !known.contains(at));
        list.extend(more.map(|at| [known.as_slice(), &[at]].concat()));
        from += 1;
    }
    list.split_off(1)
}

/// The cluster with some of its groups in an order; `None` where tiers would be torn apart or left with domains of
/// unequal size.
fn ordered(cluster: &Cluster, order: &[usize]) -> Option<Cluster> {
    let in_place = order.iter().copied().eq(0..cluster.groups.len());
    let pieces: Vec<Piece> = order.iter().map(|&group| whole(cluster, group)).collect();
    if in_place { Some(cluster.clone()) } else { part(cluster, &pieces).ok() }
}

#[cfg(test)]
mod tests {
    use ir::cluster::Precision;

    use super::*;
    use crate::test_models::mixed;

    #[test]
    fn all_groups_come_first_and_of_these_the_slowest_in_front() {
        let cluster = mixed(&[16, 32], &[8, 48]);
        let mut orders = vec![vec![0], vec![0, 1], vec![1], vec![1, 0]];
        let rate = |group: &DeviceGroup| group.device.peak_flops_per_s[&Precision::Bf16].0;
        orders.sort_by_key(|order| turn(&ordered(&cluster, order).unwrap(), rate));
        assert_eq!(orders, [vec![1, 0], vec![0, 1], vec![0], vec![1]]);
    }

    #[test]
    fn three_things_have_fifteen_selections_in_order() {
        assert_eq!(every_order(2), [vec![0], vec![1], vec![0, 1], vec![1, 0]]);
        assert_eq!(every_order(3).len(), 15);
    }

    /// Counts of the groups and sizes of the tiers of what comes out.
    fn check(counts: &[u64], tiers: &[u64], order: &[usize], expected: Option<(&[u64], &[u64])>) {
        let found = ordered(&mixed(counts, tiers), order);
        let found = found.map(|cluster| {
            let counts: Vec<u64> = cluster.groups.iter().map(|group| group.count).collect();
            let tiers: Vec<u64> = cluster.tiers.iter().map(|tier| tier.devices).collect();
            (counts, tiers)
        });
        assert_eq!(found, expected.map(|(counts, tiers)| (counts.to_vec(), tiers.to_vec())));
    }

    #[test]
    fn groups_of_whole_domains_may_stand_in_any_order() {
        check(&[16, 32], &[8, 48], &[1, 0], Some((&[32, 16], &[8, 48])));
        check(&[16, 32], &[8, 48], &[0], Some((&[16], &[8, 16])));
    }

    #[test]
    fn groups_of_one_region_stay_together() {
        let regions = [8, 32, 64];
        check(&[16, 16, 32], &regions, &[1, 0, 2], Some((&[16, 16, 32], &regions)));
        check(&[16, 16, 32], &regions, &[2, 0, 1], Some((&[32, 16, 16], &regions)));
        check(&[16, 16, 32], &regions, &[0, 2, 1], None);
        // A region of 16 and one of 32: tiers have domains of one size.
        check(&[16, 16, 32], &regions, &[0, 2], None);
        check(&[16, 16, 32], &regions, &[0, 1], Some((&[16, 16], &[8, 32, 32])));
    }
}
