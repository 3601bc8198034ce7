//! Where fewer devices are faster: those that are asked for divide badly.

use ir::plan::Plan;
use planner::near::faster_on_fewer;
use planner::request::Request;

use crate::failure::Failure;
use crate::figures;
use crate::replan::{Now, sizes};

/// What to say of a plan that uses all devices, where one on fewer of them takes less time.
pub(crate) fn warning(request: &Request, plan: &Plan) -> Result<Option<String>, Failure> {
    let cluster = &request.cluster;
    let is_stopped = plan.search.as_ref().is_some_and(|report| report.stopped_after.is_some());
    if is_stopped || cluster.is_mixed() || cluster.shares_devices() {
        return Ok(None);
    }
    let clusters = sizes(&Now::first(cluster, cluster.n_devices()));
    let found = faster_on_fewer(request, &clusters, plan)?;
    Ok(found.map(|(n_devices, time)| {
        format!(
            "fewer devices are faster: {} of the {} take {} a step in a plan near this one (--devices {n_devices})",
            figures::grouped(n_devices),
            figures::grouped(cluster.n_devices()),
            figures::seconds(time)
        )
    }))
}
