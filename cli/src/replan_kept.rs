//! The plan that ran, where it runs on what there is now: nothing moves, and a search near it may miss what it does.

use ir::cluster::{Cluster, DeviceGroup};
use ir::plan::Plan;
use ir::plan::check::open;
use ir::units::Seconds;
use planner::price::price_open;

use crate::memory::Memory;

/// The plan on another cluster, with what it takes there; `None` where that is not made as its own is, or it does not
/// fit.
pub(crate) fn kept(plan: &Plan, cluster: &Cluster) -> Option<Plan> {
    if !is_alike(&plan.cluster, cluster) {
        return None;
    }
    let mut kept = Plan { cluster: cluster.clone(), ..plan.clone() };
    let opened = open(&kept).ok()?;
    let predicted = price_open(&kept, &opened).ok()?;
    let fits = Memory::of(&kept, &opened, &predicted).is_none_or(|memory| memory.fits());
    kept.predicted = Some(predicted);
    fits.then_some(kept)
}

/// Whether every rank has a device of the same kind in both, on nodes of the same size.
fn is_alike(one: &Cluster, other: &Cluster) -> bool {
    let shape = |group: &DeviceGroup| (group.count, group.devices_per_node, group.device.name.clone());
    one.groups.iter().map(shape).eq(other.groups.iter().map(shape))
}

/// The kept plan in place of what was found, if it takes no longer: what was looked at beside it is what its search
/// says.
pub(crate) fn faster(mut kept: Plan, found: &Plan) -> Option<Plan> {
    let [own, other] = [&kept, found].map(time);
    if own? > other? {
        return None;
    }
    kept.search = found.search.clone();
    kept.runners_up.clone_from(&found.runners_up);
    if let (Some(report), Some(own)) = (&mut kept.search, own) {
        report.lower_bound_s = report.lower_bound_s.min(own);
        report.gap = own / report.lower_bound_s - 1.0;
        report.proof = format!("the plan that ran is no slower than what was looked at: {}", report.proof);
    }
    Some(kept)
}

/// Seconds of a step.
pub(crate) fn time(plan: &Plan) -> Option<Seconds> {
    plan.predicted.as_ref().map(|predicted| predicted.step_time_s)
}
