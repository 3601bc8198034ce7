//! What the host holds in its memory and on its drives: updates there, what layers keep there for backward, how long it
//! takes and how many bytes it needs.
//!
//! ```text
//! an update on the host
//! down    = gradient bytes / link           link      = listed rate x efficiency / devices that share an uplink
//! update  = parameters / rate               rate      = the host's AdamW / devices of a node
//! up      = parameter bytes / link          per step, one after the other, nothing of it hidden
//! memory  = fp32 parameter, moments and the gradient that came down            -> host_bytes()
//!
//! the same of states on the drives: besides, before the update and after it
//! read    = (fp32 parameter + moments) / read rate        rate = that of the node's drives / devices of a node
//! write   = the same / write rate
//! drives  = fp32 parameter and moments                    -> nvme_bytes()
//! memory  = the gradient that came down                   -> gradient_bytes(), and the states of the largest parameter of a device in passing
//!
//! what a layer keeps there, and parameters that it has from there, beside its work on the link, which carries both ways at once
//! forward  = max(bytes kept, parameters as stored) / link                        -> HostShare::moves()
//! backward = (bytes kept + parameters as stored) / link        a layer takes the longer of this and its own work
//! step     = new parameters / link, nothing of it hidden
//! memory  = bytes kept per micro-batch in flight; on the device a layer's own and its neighbour's on the way
//! ```
//! Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840: section 4.1 for what moves, table 4 for the rate. Engines that
//! copy gradients beside backward, or parameters beside the update, are faster than this; Megatron-Core is not unless
//! told to. Rajbhandari et al. 2021, "ZeRO-Infinity", arXiv 2104.07857, sections 5.1.1 and 5.2.2, for the drives.
//! DeepSpeed reads, updates and writes a parameter one after the other unless told to overlap them
//! (deepspeed/runtime/zero/offload_config.py, `pipeline_read` and `pipeline_write`), and may put gradients there too,
//! which stay in memory here. Rhu et al. 2016, "vDNN", arXiv 1602.08124, section 3, for what is kept: it leaves beside
//! the next layer's forward and is fetched beside the backward of the layer behind. Other traffic of the link (network
//! cards on the same bridges) is not seen.

use ir::cluster::{Cluster, Device, DeviceGroup, Wiring};
use ir::program::StateHome;
use ir::units::{Bytes, BytesPerSecond, Seconds};
use serde::{Deserialize, Serialize};

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
    /// Rates of the drives, where every node has some.
    pub nvme: Option<NvmeShare>,
}

/// What one device gets of its node's drives while all devices of the node use them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NvmeShare {
    /// Into the host's memory.
    pub read: BytesPerSecond,
    /// From there.
    pub write: BytesPerSecond,
}

impl HostShare {
    /// The share of a device of a cluster.
    ///
    /// Eight devices on links of 31.5 GB/s: each 25.2 GB/s, or half of it below shared bridges, and 0.49e9
    /// parameters/s.
    pub fn of(device: &Device, cluster: &Cluster, constants: &Constants) -> Self {
        let own: Vec<&DeviceGroup> = cluster.groups.iter().filter(|group| group.device == *device).collect();
        let per_node = own.iter().map(|group| group.devices_per_node).max().unwrap_or(1).max(1);
        let shared = match cluster.tiers.first().map(|tier| tier.link().wiring) {
            Some(Wiring::Bus) if per_node > 1 => constants.bus_devices_per_uplink,
            Some(Wiring::Bus | Wiring::Switch | Wiring::Mesh | Wiring::Torus | Wiring::Torus2d) | None => 1.0,
        };
        Self {
            link: device.host_link_bytes_per_s * (constants.host_link_efficiency_fraction / shared),
            parameters_per_s: constants.host_update_parameters_per_s / per_node as f64,
            nvme: NvmeShare::of(&own),
        }
    }

    /// Time that bytes take over the link, one way.
    pub fn moves(self, bytes: Bytes) -> Seconds {
        bytes / self.link
    }
}

impl NvmeShare {
    /// That of the slowest of some groups; `None` where one has no drives.
    ///
    /// Eight devices on drives that read 50 GB/s and write 25: each 6.25 and 3.125 GB/s.
    fn of(groups: &[&DeviceGroup]) -> Option<Self> {
        let of_group = |group: &&DeviceGroup| {
            let (nvme, devices) = (group.nvme?, group.devices_per_node.max(1) as f64);
            Some(Self { read: nvme.read_bytes_per_s / devices, write: nvme.write_bytes_per_s / devices })
        };
        let all = groups.iter().map(of_group).collect::<Option<Vec<Self>>>()?;
        let slower = |a: Self, b: Self| Self { read: a.read.min(b.read), write: a.write.min(b.write) };
        all.into_iter().reduce(slower)
    }
}

/// Where the time of an update on the host goes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostUpdate {
    /// Gradients on their way to the host.
    pub down: Seconds,
    /// States on their way from the drives, where these hold them.
    pub read: Seconds,
    /// The same on their way back.
    pub write: Seconds,
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
            ..Self::default()
        }
    }

    /// The same of states that lie on the drives; endless where there are none.
    ///
    /// 1e9 parameters of 12 bytes at 6 and 3 GB/s: 2 s more to read and 4 s more to write.
    pub fn of_nvme(n_parameters: f64, states: StateBytes, share: HostShare) -> Self {
        let bytes = nvme_bytes(states) * n_parameters;
        let never = BytesPerSecond(f64::MIN_POSITIVE);
        let NvmeShare { read, write } = share.nvme.unwrap_or(NvmeShare { read: never, write: never });
        Self { read: bytes / read, write: bytes / write, ..Self::of(n_parameters, states, share) }
    }

    /// The update of states that lie in a memory; none where the device's own holds them.
    pub fn at(home: StateHome, n_parameters: f64, states: StateBytes, share: HostShare) -> Self {
        match home {
            StateHome::Host if n_parameters > 0.0 => Self::of(n_parameters, states, share),
            StateHome::Nvme if n_parameters > 0.0 => Self::of_nvme(n_parameters, states, share),
            StateHome::Device | StateHome::Host | StateHome::Nvme => Self::default(),
        }
    }

    /// All of it: one after the other.
    pub fn total(self) -> Seconds {
        self.down + self.read + self.update + self.write + self.up
    }
}

/// Bytes of one parameter in the host's memory: its fp32 value, the moments, and the gradient while it is updated.
pub fn host_bytes(states: StateBytes) -> Bytes {
    nvme_bytes(states) + gradient_bytes(states)
}

/// Bytes of one parameter on the drives: its fp32 value and the moments.
pub fn nvme_bytes(states: StateBytes) -> Bytes {
    FULL + states.moments
}

/// Bytes of one parameter whose states are on the drives in the host's memory: the gradient that waits for its update.
pub fn gradient_bytes(states: StateBytes) -> Bytes {
    states.gradient
}

/// A memory of a node, besides those of its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeStore {
    /// The host's.
    Host,
    /// Its drives.
    Nvme,
}

impl NodeStore {
    /// What it is full of, for a sentence on what does not fit.
    pub fn term(self) -> &'static str {
        match self {
            Self::Host => "states and activations in the memory of its node's host",
            Self::Nvme => "optimizer states on its node's NVMe drives",
        }
    }

    /// Bytes of a node that a run may take.
    pub fn capacity(self, group: &DeviceGroup, constants: &Constants) -> Bytes {
        match self {
            Self::Host => group.host_memory_bytes * constants.host_memory_usable_fraction,
            Self::Nvme => group.nvme.map_or(Bytes::ZERO, |nvme| nvme.capacity_bytes),
        }
    }
}

/// What one device has in the memories of its node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OnNode {
    /// In the host's.
    pub host: Bytes,
    /// On its drives.
    pub nvme: Bytes,
}

impl OnNode {
    fn of(&self, store: NodeStore) -> Bytes {
        match store {
            NodeStore::Host => self.host,
            NodeStore::Nvme => self.nvme,
        }
    }
}

/// A node whose host holds states.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeMemory {
    /// Which of its memories it is.
    pub store: NodeStore,
    /// The stage of its first device.
    pub stage: usize,
    /// What its devices need together.
    pub needed: Bytes,
    /// What it has for them.
    pub capacity: Bytes,
}

impl NodeMemory {
    /// Whether it is enough.
    pub fn fits(&self) -> bool {
        self.needed <= self.capacity
    }

    /// Whether a larger part of it is needed than of another.
    fn is_fuller(&self, other: &Self) -> bool {
        self.needed.0 * other.capacity.0 > other.needed.0 * self.capacity.0
    }
}

/// The node whose host or drives are fullest, where each of so many devices of a stage has so many bytes there; nothing
/// where none has any.
///
/// Stages fill ranks in order, nodes too, so a host may serve devices of several stages. Three stages of four devices
/// with 1, 2 and 3 bytes on nodes of eight: 12 bytes on the first node, and 12 on the half of the second.
pub fn fullest_node(machine: (&Cluster, &Constants), stages: &[(OnNode, u64)]) -> Option<NodeMemory> {
    let of = |store: NodeStore| fullest((machine, store), stages);
    let fuller = |a: NodeMemory, b: NodeMemory| if b.is_fuller(&a) { b } else { a };
    [of(NodeStore::Host), of(NodeStore::Nvme)].into_iter().flatten().reduce(fuller)
}

/// The same of one of the memories.
fn fullest(
    ((cluster, constants), store): ((&Cluster, &Constants), NodeStore),
    stages: &[(OnNode, u64)],
) -> Option<NodeMemory> {
    if stages.iter().all(|(held, _)| held.of(store) <= Bytes::ZERO) {
        return None;
    }
    let sum = |end: &mut u64, (_, devices): &(OnNode, u64)| {
        *end += devices;
        Some(*end)
    };
    let ends: Vec<u64> = stages.iter().scan(0, sum).collect();
    let stage_of = |rank: u64| ends.partition_point(|end| *end <= rank);
    let last = ends.last().copied().unwrap_or(0);
    let (mut first, mut fullest): (u64, Option<NodeMemory>) = (0, None);
    for group in &cluster.groups {
        let capacity = store.capacity(group, constants);
        let end = (first + group.count).min(last);
        while first < end {
            let next = (first + group.devices_per_node.max(1)).min(end);
            let stage = stage_of(first);
            let needed = (first..next).map(|rank| stages[stage_of(rank)].0.of(store)).sum();
            let node = NodeMemory { store, stage, needed, capacity };
            if fullest.is_none_or(|known| node.is_fuller(&known)) {
                fullest = Some(node);
            }
            first = next;
        }
    }
    fullest
}

#[cfg(test)]
mod tests {
    use ir::cluster::{Nvme, Precision};
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
            let share = HostShare { link: BytesPerSecond(12e9), parameters_per_s: rate, nvme: None };
            let found = HostUpdate::of(billions * 1e9, half(), share).update.0;
            assert!((found / seconds - 1.0).abs() < 0.2, "{billions}: {found}");
        }
    }

    /// The same paper's section 4.1: in half precision 4 bytes of traffic per parameter, and 16 of states, of which the
    /// device keeps two.
    #[test]
    fn half_precision_moves_four_bytes_and_keeps_fourteen_on_the_host() {
        let share = HostShare { link: BytesPerSecond(1.0), parameters_per_s: 1.0, nvme: None };
        let HostUpdate { down, update, up, .. } = HostUpdate::of(1.0, half(), share);
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
        let on_host = |bytes: f64| OnNode { host: Bytes(bytes), ..OnNode::default() };
        let host = |stages: &[f64], devices| {
            let stages: Vec<_> = stages.iter().map(|&bytes| (on_host(bytes), devices)).collect();
            fullest_node((&cluster, &constants), &stages)
        };
        assert_eq!(host(&[0.0, 0.0], 8), None);
        let found = host(&[1.0, 2.0, 3.0], 4).unwrap();
        assert_eq!((found.stage, found.needed, found.capacity), (0, Bytes(12.0), Bytes(18.0)));
        assert!(found.fits());
        let found = host(&[1.0, 3.0], 8).unwrap();
        assert_eq!((found.stage, found.needed, found.fits()), (1, Bytes(24.0), false));
        // Of stages of twelve and four devices the first has half of the second node.
        let unequal = [(on_host(1.0), 12), (on_host(2.0), 4)];
        let found = fullest_node((&cluster, &constants), &unequal).unwrap();
        assert_eq!((found.store, found.stage, found.needed), (NodeStore::Host, 0, Bytes(12.0)));
    }

    /// Of host and drives the one of which a larger part is needed is told; a node without drives has no room there.
    #[test]
    fn a_node_has_drives_behind_its_memory() {
        let mut cluster = crate::group::tests::dgx_a100();
        (cluster.groups[0].count, cluster.groups[0].devices_per_node) = (16, 8);
        cluster.groups[0].host_memory_bytes = Bytes(20.0);
        let (constants, held) = (Constants::load(), OnNode { host: Bytes(1.0), nvme: Bytes(2.0) });
        let of = |cluster: &Cluster| {
            let found = fullest_node((cluster, &constants), &[(held, 8)]).unwrap();
            (found.store, found.needed, found.capacity, found.fits())
        };
        assert_eq!(of(&cluster), (NodeStore::Nvme, Bytes(16.0), Bytes::ZERO, false));
        cluster.groups[0].nvme = Some(drives(15.0, 1.0, 1.0));
        assert_eq!(of(&cluster), (NodeStore::Nvme, Bytes(16.0), Bytes(15.0), false));
        cluster.groups[0].nvme = Some(drives(1000.0, 1.0, 1.0));
        assert_eq!(of(&cluster), (NodeStore::Host, Bytes(8.0), Bytes(18.0), true));
    }

    fn drives(capacity: f64, read: f64, write: f64) -> Nvme {
        Nvme {
            capacity_bytes: Bytes(capacity),
            read_bytes_per_s: BytesPerSecond(read),
            write_bytes_per_s: BytesPerSecond(write),
        }
    }

    /// States of 12 bytes are read and written once per step, by all devices of a node at once; of memory only the
    /// gradient stays.
    #[test]
    fn drives_are_shared_and_carry_states_both_ways() {
        let mut cluster = crate::group::tests::dgx_a100();
        let device = cluster.groups[0].device.clone();
        let of = |cluster: &Cluster| HostShare::of(&device, cluster, &Constants::load());
        assert_eq!(of(&cluster).nvme, None);
        assert!(HostUpdate::of_nvme(1.0, half(), of(&cluster)).total().0.is_infinite());
        cluster.groups[0].devices_per_node = 8;
        cluster.groups[0].nvme = Some(drives(1e13, 48e9, 24e9));
        let share = of(&cluster);
        let (host, nvme) = (HostUpdate::of(1e9, half(), share), HostUpdate::of_nvme(1e9, half(), share));
        assert_eq!((nvme.read, nvme.write), (Seconds(2.0), Seconds(4.0)));
        assert!((nvme.total().0 - host.total().0 - 6.0).abs() < 1e-9);
        assert_eq!((nvme_bytes(half()), gradient_bytes(half())), (Bytes(12.0), Bytes(2.0)));
        // The slowest of two groups of such devices.
        cluster.groups.push(cluster.groups[0].clone());
        cluster.groups[1].nvme = Some(drives(1e13, 8e9, 80e9));
        let slowest = NvmeShare { read: BytesPerSecond(1e9), write: BytesPerSecond(3e9) };
        assert_eq!(of(&cluster).nvme, Some(slowest));
        cluster.groups[1].nvme = None;
        assert_eq!(of(&cluster).nvme, None);
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
