//! What the host holds: updates there, what layers keep there for backward, how long it takes and how many bytes it needs.
//!
//! ```text
//! an update on the host
//! down    = gradient bytes / link           link      = listed rate x efficiency / devices that share an uplink
//! update  = parameters / rate               rate      = the host's AdamW / devices of a node
//! up      = parameter bytes / link          per step, one after the other, nothing of it hidden
//! memory  = fp32 parameter, moments and the gradient that came down            -> host_bytes()
//!
//! what a layer keeps there, and parameters that it has from there, beside its work on the link, which carries both ways at once
//! forward  = max(bytes kept, parameters as stored) / link                        -> HostShare::moves()
//! backward = (bytes kept + parameters as stored) / link        a layer takes the longer of this and its own work
//! step     = new parameters / link, nothing of it hidden
//! memory  = bytes kept per micro-batch in flight; on the device a layer's own and its neighbour's on the way
//! ```
//! Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840: section 4.1 for what moves, table 4 for the rate. Engines that copy
//! gradients beside backward, or parameters beside the update, are faster than this; Megatron-Core is not unless told to.
//! Rhu et al. 2016, "vDNN", arXiv 1602.08124, section 3, for what is kept: it leaves beside the next layer's forward and is
//! fetched beside the backward of the layer behind. Other traffic of the link (network cards on the same bridges) is not seen.

use ir::cluster::{Cluster, Device, DeviceGroup, Wiring};
use ir::units::{Bytes, BytesPerSecond, Seconds};

use crate::constants::Constants;
use crate::memory::StateBytes;

/// Bytes of an fp32 number: what hosts compute with.
const FULL: Bytes = Bytes(4.0);

/// What one device gets of its host while all devices of the node use it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostShare {
    /// Rate of the link, each way.
    pub link: BytesPerSecond,
    /// Parameters that the host updates for it in a second.
    pub parameters_per_s: f64,
}

impl HostShare {
    /// The share of a device of a cluster.
    ///
    /// Eight devices on links of 31.5 GB/s: each 25.2 GB/s, or half of it below shared bridges, and 0.49e9 parameters/s.
    pub fn of(device: &Device, cluster: &Cluster, constants: &Constants) -> Self {
        let own = cluster.groups.iter().filter(|group| group.device == *device);
        let per_node = own.map(|group| group.devices_per_node).max().unwrap_or(1).max(1);
        let shared = match cluster.tiers.first().map(|tier| tier.link().wiring) {
            Some(Wiring::Bus) if per_node > 1 => constants.bus_devices_per_uplink,
            Some(Wiring::Bus | Wiring::Switch | Wiring::Mesh | Wiring::Torus) | None => 1.0,
        };
        Self {
            link: device.host_link_bytes_per_s * (constants.host_link_efficiency_fraction / shared),
            parameters_per_s: constants.host_update_parameters_per_s / per_node as f64,
        }
    }

    /// Time that bytes take over the link, one way.
    pub fn moves(self, bytes: Bytes) -> Seconds {
        bytes / self.link
    }
}

/// Where the time of an update on the host goes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostUpdate {
    /// Gradients on their way to the host.
    pub down: Seconds,
    /// The update.
    pub update: Seconds,
    /// New parameters on their way to the device.
    pub up: Seconds,
}

impl HostUpdate {
    /// The update of so many parameters of one device.
    ///
    /// 1e9 parameters with fp32 gradients at 25 GB/s and 0.5e9 a second: 0.16 s, 2 s and 0.08 s.
    pub fn of(n_parameters: f64, states: StateBytes, share: HostShare) -> Self {
        Self {
            down: states.gradient * n_parameters / share.link,
            update: Seconds(n_parameters / share.parameters_per_s),
            up: states.parameter * n_parameters / share.link,
        }
    }

    /// All of it: one after the other.
    pub fn total(self) -> Seconds {
        self.down + self.update + self.up
    }
}

/// Bytes of one parameter in the host's memory: its fp32 value, the moments, and the gradient while it is updated.
pub fn host_bytes(states: StateBytes) -> Bytes {
    FULL + states.moments + states.gradient
}

/// Bytes of a node's host memory that states may take.
fn host_capacity(group: &DeviceGroup, constants: &Constants) -> Bytes {
    group.host_memory_bytes * constants.host_memory_usable_fraction
}

/// A node whose host holds states.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostMemory {
    /// The stage of its first device.
    pub stage: usize,
    /// What its devices need together.
    pub needed: Bytes,
    /// What it has for them.
    pub capacity: Bytes,
}

impl HostMemory {
    /// Whether it is enough.
    pub fn fits(&self) -> bool {
        self.needed <= self.capacity
    }
}

/// The node whose host is fullest, where each of so many devices of a stage has so many bytes there; nothing where none has
/// any.
///
/// Stages fill ranks in order, nodes too, so a host may serve devices of several stages. Three stages of four devices with
/// 1, 2 and 3 bytes on nodes of eight: 12 bytes on the first node, and 12 on the half of the second.
pub fn fullest_host(
    (cluster, constants): (&Cluster, &Constants),
    stages: &[(Bytes, u64)],
) -> Option<HostMemory> {
    if stages.iter().all(|(bytes, _)| *bytes <= Bytes::ZERO) {
        return None;
    }
    let sum = |end: &mut u64, (_, devices): &(Bytes, u64)| {
        *end += devices;
        Some(*end)
    };
    let ends: Vec<u64> = stages.iter().scan(0, sum).collect();
    let stage_of = |rank: u64| ends.partition_point(|end| *end <= rank);
    let last = ends.last().copied().unwrap_or(0);
    let (mut first, mut fullest): (u64, Option<HostMemory>) = (0, None);
    for group in &cluster.groups {
        let capacity = host_capacity(group, constants);
        let end = (first + group.count).min(last);
        while first < end {
            let next = (first + group.devices_per_node.max(1)).min(end);
            let stage = stage_of(first);
            let needed = (first..next).map(|rank| stages[stage_of(rank)].0).sum();
            let node = HostMemory { stage, needed, capacity };
            let fuller = |known: HostMemory| node.needed / known.needed > node.capacity / known.capacity;
            if fullest.is_none_or(fuller) {
                fullest = Some(node);
            }
            first = next;
        }
    }
    fullest
}

#[cfg(test)]
mod tests {
    use ir::cluster::Precision;
    use ir::engine::GradientFormat;

    use super::*;

    fn half() -> StateBytes {
        StateBytes::adamw(Precision::Fp16, GradientFormat::Half)
    }

    /// Ren et al. 2021, table 4: CPU-Adam on the host of a DGX-2 takes 0.22, 0.51, 1.03, 2.41 and 2.57 s for 1, 2, 4, 8
    /// and 10 billion parameters.
    #[test]
    fn the_published_updates_are_within_a_fifth() {
        let rate = Constants::load().host_update_parameters_per_s;
        for (billions, seconds) in [(1.0, 0.22), (2.0, 0.51), (4.0, 1.03), (8.0, 2.41), (10.0, 2.57)] {
            let share = HostShare { link: BytesPerSecond(12e9), parameters_per_s: rate };
            let found = HostUpdate::of(billions * 1e9, half(), share).update.0;
            assert!((found / seconds - 1.0).abs() < 0.2, "{billions}: {found}");
        }
    }

    /// The same paper's section 4.1: in half precision 4 bytes of traffic per parameter, and 16 of states, of which the
    /// device keeps two.
    #[test]
    fn half_precision_moves_four_bytes_and_keeps_fourteen_on_the_host() {
        let share = HostShare { link: BytesPerSecond(1.0), parameters_per_s: 1.0 };
        let HostUpdate { down, update, up } = HostUpdate::of(1.0, half(), share);
        assert_eq!((down + up, update), (Seconds(4.0), Seconds(1.0)));
        assert_eq!(host_bytes(half()), Bytes(14.0));
        assert_eq!(host_bytes(StateBytes::adamw(Precision::Fp32, GradientFormat::Full)), Bytes(16.0));
    }

    #[test]
    fn a_host_holds_what_all_devices_of_its_node_have_there() {
        let mut cluster = crate::group::tests::dgx_a100();
        (cluster.groups[0].count, cluster.groups[0].devices_per_node) = (16, 8);
        cluster.groups[0].host_memory_bytes = Bytes(20.0);
        let constants = Constants::load();
        let host = |stages: &[f64], devices| {
            let stages: Vec<_> = stages.iter().map(|&bytes| (Bytes(bytes), devices)).collect();
            fullest_host((&cluster, &constants), &stages)
        };
        assert_eq!(host(&[0.0, 0.0], 8), None);
        let found = host(&[1.0, 2.0, 3.0], 4).unwrap();
        assert_eq!((found.stage, found.needed, found.capacity), (0, Bytes(12.0), Bytes(18.0)));
        assert!(found.fits());
        let found = host(&[1.0, 3.0], 8).unwrap();
        assert_eq!((found.stage, found.needed, found.fits()), (1, Bytes(24.0), false));
        // Of stages of twelve and four devices the first has half of the second node.
        let unequal = [(Bytes(1.0), 12), (Bytes(2.0), 4)];
        let found = fullest_host((&cluster, &constants), &unequal).unwrap();
        assert_eq!((found.stage, found.needed), (0, Bytes(12.0)));
    }

    #[test]
    fn devices_of_a_node_share_its_host_and_those_on_a_bus_their_links() {
        let mut cluster = crate::group::tests::dgx_a100();
        let device = cluster.groups[0].device.clone();
        let constants = Constants::load();
        let switched = HostShare::of(&device, &cluster, &constants);
        cluster.tiers[0].wiring = Wiring::Bus;
        let on_a_bus = HostShare::of(&device, &cluster, &constants);
        assert_eq!(on_a_bus.link.0 * 2.0, switched.link.0);
        cluster.groups[0].devices_per_node = 4;
        let fewer = HostShare::of(&device, &cluster, &constants);
        assert_eq!(fewer.parameters_per_s, switched.parameters_per_s * 2.0);
    }
}
