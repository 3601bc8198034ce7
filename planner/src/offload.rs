//! When the memory of hosts is searched too, though nobody said so.
//!
//! Twice the storages are about twice the search, how fast a host updates is known of few, and many jobs need their hosts
//! for other things. So hosts come in only where nothing fits without them; where optimizer states, cut over all devices,
//! take a good part of their memory, a plan says that hosts could have them.

use cost_model::memory::StateBytes;
use ir::plan::Plan;
use ir::units::Bytes;

use crate::request::{OffloadKind, Pins, Request};

/// Part of the devices' memory from which optimizer states crowd it: 8 billion parameters on two devices of 80 GB take 0.6
/// of it, and planned with hosts their step is 15 % shorter; 70 billion on 64 take 0.16.
const CROWDED: f64 = 1.0 / 3.0;

/// Why hosts hold states though nobody asked for it.
const NOTHING_ELSE: &str =
    "no plan fits in the devices' memory alone: hosts hold and update optimizer states";

/// Whether the user leaves it open which memory holds optimizer states.
pub(crate) fn is_open(pins: &Pins) -> bool {
    pins.offload.is_none() && pins.forbid.offload.is_empty()
}

/// Part of the devices' memory that optimizer states take, cut over all of them.
fn crowding(request: &Request) -> f64 {
    let states = StateBytes::adamw(request.job.precision, request.job.engine.gradients);
    let groups = request.cluster.groups.iter();
    let memory: Bytes = groups.map(|group| group.device.memory_bytes * group.count as f64).sum();
    states.optimizer() * request.model.n_trained() as f64 / memory
}

/// The question with the hosts' memory in it.
pub(crate) fn allowed(request: &Request) -> Request {
    let pins = Pins { offload: Some(OffloadKind::Allowed), ..request.pins.clone() };
    Request { pins, ..request.clone() }
}

/// A plan of the devices alone; where states crowd them it says that there are hosts.
pub(crate) fn without(mut plan: Plan, request: &Request) -> Plan {
    let crowding = crowding(request);
    if crowding > CROWDED {
        plan.warnings.push(format!(
            "optimizer states take {:.0} % of the devices' memory: in the hosts' (--pin offload=allowed) they may leave room for \
             a faster plan",
            crowding * 100.0
        ));
    }
    plan
}

/// A plan for which no other was left than one with hosts.
pub(crate) fn with(mut plan: Plan) -> Plan {
    plan.warnings.push(NOTHING_ELSE.into());
    plan
}
