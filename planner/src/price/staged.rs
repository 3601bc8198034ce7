//! Layers on stages, and what goes from stage to stage: the streams of the pipeline and the parameters they share.
//!
//! ```text
//! streams between two chunks             once forward and once backward per micro-batch  -> Crossing, Transfer
//! stream in another sharding             converted by the chunk that takes over, its gradient back -> Takeover
//! parameter of two stages                gradient to the owner, value back, once per step -> shared_moves()
//! ```
//! A stage's ranks follow those of the stage before, so a transfer goes `n` ranks on, or back to the first stage; the
//! pair whose link is slowest counts.

use std::collections::BTreeMap;

use cost_model::{CollectiveKind, Group, GroupAxis, bytes_sent_per_tier, price};
use ir::cluster::{Cluster, Tier};
use ir::conversion::steps;
use ir::engine::{StageOutputs, StageTransfers};
use ir::graph::{Model, ParameterRef, TensorId};
use ir::lower::whole_axes;
use ir::mesh::{AxisId, Mesh, Meshes};
use ir::schedule::{Action, Schedule, Seat};
use ir::sharding::Sharding;
use ir::slices::Slices;
use ir::units::{Bytes, Seconds};

use crate::price::crossing::Crossing;
use crate::price::replicas::Replica;
use crate::price::setting::{Entry, Setting, SliceFigures};

/// Priced choices, and per chunk runs of (entry, count).
pub type Layers<'a> = (&'a [Entry], &'a [Vec<(usize, u64)>]);

/// Layers on stages in the order of a schedule: all that a step's figures are made of.
#[derive(Clone, Copy, Debug)]
pub struct Staged<'a> {
    /// The model.
    pub model: &'a Model,
    /// Meshes of the stages.
    pub meshes: Meshes<'a>,
    /// Pipeline stages.
    pub n_stages: u64,
    /// Sequences of a micro-batch over the mesh.
    pub micro_batch: u64,
    /// Micro-batches of a step.
    pub n_micro_batches: u64,
    /// Their order.
    pub schedule: Schedule,
    /// What every stage runs, where no schedule says it.
    pub table: Option<&'a [Vec<Action>]>,
    /// Where sequences are cut into slices.
    pub slices: &'a Slices,
    /// Priced choices.
    pub entries: &'a [Entry],
    /// Per chunk, runs of (entry, count).
    pub chunks: &'a [Vec<(usize, u64)>],
    /// Coordinates of the outermost axis with their own devices and shares, where shares are unequal. All else is then
    /// on the slowest devices, with the share of the average.
    pub replicas: &'a [Replica],
}

/// A transfer between two stages, for the device that takes longest.
#[derive(Clone, Debug, PartialEq)]
pub struct Transfer {
    /// The stage that sends.
    pub from: u64,
    /// Bytes per tier of the cluster.
    pub bytes_per_tier: Vec<Bytes>,
    /// Bytes that a device of the other stage sends for what comes back, if anything does.
    pub back_per_tier: Vec<Bytes>,
    /// How long it takes.
    pub time: Seconds,
}

/// What a chunk does with a stream that arrives in another sharding than its own, for one micro-batch or slice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Takeover {
    /// Before its forward.
    pub forward: Seconds,
    /// After its backward.
    pub backward: Seconds,
    /// Bytes that a device sends for both per tier of the cluster; empty where it sends nothing.
    pub bytes_per_tier: Vec<Bytes>,
}

impl<'a> Staged<'a> {
    /// What one replica runs.
    #[must_use]
    pub fn of(&self, replica: &'a Replica) -> Self {
        Self {
            n_micro_batches: replica.n_micro_batches,
            entries: &replica.entries,
            chunks: &replica.chunks,
            replicas: &[],
            ..*self
        }
    }

    /// What the replica at a place runs; all where there are none.
    #[must_use]
    pub fn at(&self, place: usize) -> Self {
        self.replicas.get(place).map_or(*self, |replica| self.of(replica))
    }
}

impl Staged<'_> {
    /// The runs of a stage, over all its chunks.
    pub fn runs(&self, stage: usize) -> impl Iterator<Item = (&Entry, u64)> {
        self.chunks_of(stage).flatten().map(|&(entry, count)| (&self.entries[entry], count))
    }

    /// The chunks of a stage, each as runs of (entry, count).
    pub fn chunks_of(&self, stage: usize) -> impl Iterator<Item = &Vec<(usize, u64)>> {
        let (placement, rank, n_stages) = (self.schedule.placement(), stage as u32, self.n_stages as u32);
        let own = (0..placement.n_virtual_stages())
            .map(move |virtual_stage| placement.chunk(n_stages, Seat { rank, virtual_stage }));
        own.filter_map(|chunk| self.chunks.get(chunk as usize))
    }

    /// A sum over the layers of a stage.
    pub fn sum(&self, stage: usize, of: impl Fn(&Entry) -> Seconds) -> Seconds {
        self.runs(stage).map(|(entry, count)| of(entry) * count as f64).sum()
    }

    /// A sum over the layers of every chunk, for every slice of it.
    pub fn per_slice(&self, of: impl Fn(&SliceFigures) -> Seconds) -> Vec<Seconds> {
        let one = |(runs, slice): (&Vec<(usize, u64)>, u32)| {
            let time = |&(entry, count): &(usize, u64)| {
                of(&self.entries[entry].slice(slice as usize)) * count as f64
            };
            runs.iter().map(time).sum()
        };
        let places = self.chunks.iter().flat_map(|runs| (0..self.slices.n()).map(move |slice| (runs, slice)));
        places.map(one).collect()
    }

    /// How many layers have each entry.
    pub fn counts(&self) -> Vec<u64> {
        let mut counts = vec![0; self.entries.len()];
        for &(entry, count) in self.chunks.iter().flatten() {
            counts[entry] += count;
        }
        counts
    }

    /// The stage with a copy of a chunk; the first copy owns its parameters.
    pub fn stage_at(&self, chunk: usize, copy: u32) -> u64 {
        u64::from(self.schedule.placement().seat(self.n_stages as u32, chunk as u32, copy).rank)
    }

    /// Micro-batches that run on a copy of the model: every other one where there are two, so that of an odd number the
    /// first has one more.
    pub fn micro_batches_of(&self, copy: u32) -> f64 {
        let copies = u64::from(self.schedule.placement().n_copies());
        self.n_micro_batches.saturating_sub(u64::from(copy)).div_ceil(copies) as f64
    }

    /// The same of the chunk that a stage holds in a virtual stage: with two copies each is one.
    pub fn micro_batches_in(&self, virtual_stage: u32) -> f64 {
        self.micro_batches_of(if self.schedule.placement().n_copies() > 1 { virtual_stage } else { 0 })
    }

    /// The runs of a stage, over all its chunks, each with the micro-batches that pass it.
    pub fn passes(&self, stage: usize) -> impl Iterator<Item = (&Entry, u64, f64)> {
        (0..).zip(self.chunks_of(stage)).flat_map(move |(virtual_stage, chunk)| {
            let times = self.micro_batches_in(virtual_stage);
            chunk.iter().map(move |&(entry, count)| (&self.entries[entry], count, times))
        })
    }

    /// What crosses from chunk to chunk, of so many tokens of a copy, once forward.
    pub fn borders(&self, setting: &Setting<'_>, copy: u32, tokens: u64) -> Vec<(Crossing, Transfer)> {
        // Every virtual stage leaves its stage by the same links.
        let mut links: BTreeMap<_, Transfer> = BTreeMap::new();
        let mut over = |crossing: Crossing| {
            let pair = [crossing.from, crossing.to].map(|chunk| self.stage_at(chunk, copy));
            let (reader, streams) = crossing.what();
            let key = (pair, crossing.sent, reader, streams.to_vec());
            let transfer = || self.border(setting, copy, (&crossing, tokens));
            let transfer = links.entry(key).or_insert_with(transfer).clone();
            (crossing, transfer)
        };
        self.crossings().into_iter().map(&mut over).collect()
    }

    /// The transfer of what crosses.
    pub fn border(&self, setting: &Setting<'_>, copy: u32, (crossing, tokens): (&Crossing, u64)) -> Transfer {
        let pair = (self.stage_at(crossing.from, copy), self.stage_at(crossing.to, copy));
        let shapes = self.shapes(crossing, tokens);
        if self.meshes.of(pair.0) != self.meshes.of(pair.1) {
            return self.handover(setting, pair, (crossing, &shapes));
        }
        self.hand_on(setting, pair, (crossing.sent, &shapes))
    }

    /// The transfer of streams between stages whose meshes are of one length.
    pub(crate) fn hand_on(
        &self,
        setting: &Setting<'_>,
        pair: (u64, u64),
        (sent, shapes): (Sharding, &[Vec<u64>]),
    ) -> Transfer {
        let bytes = setting.activation(elements_of(sent, self.meshes.of(pair.0), shapes));
        match setting.job.engine.stage_transfers {
            StageTransfers::Beside => self.transfer(setting, pair, bytes),
            StageTransfers::Waited => self.scattered(setting, pair, (sent, bytes)),
        }
    }

    /// A transfer of what several devices of a stage hold alike: each sends its part, and the parts are gathered where
    /// they arrive (scatter and gather of arXiv 2104.04473 section 4.1).
    fn scattered(
        &self,
        setting: &Setting<'_>,
        pair: (u64, u64),
        (stream, bytes): (Sharding, Bytes),
    ) -> Transfer {
        let mesh = self.meshes.of(pair.1);
        let axes = whole_axes(mesh, stream).axes();
        let parts: u64 = axes.iter().map(|&axis| mesh.size(axis)).product();
        let mut sent = self.transfer(setting, pair, bytes / parts as f64);
        if parts > 1 && pair.0 != pair.1 {
            let cluster = setting.machine.cluster;
            let group = group(setting, mesh, &axes).at(self.home(setting, (pair.1, pair.1)));
            let gather = CollectiveKind::AllGather;
            sent.time += price(gather, bytes, &group, cluster, setting.machine.constants);
            let gathered = bytes_sent_per_tier(gather, bytes, &group, cluster);
            sent.bytes_per_tier.iter_mut().zip(gathered).for_each(|(all, more)| *all += more);
            sent.back_per_tier.clone_from(&sent.bytes_per_tier);
        }
        sent
    }

    /// A transfer between stages on meshes of other lengths: every device that takes over wants one block, which those
    /// that give share evenly; its gradient goes back in the same way. The link is the slowest between the two.
    fn handover(
        &self,
        setting: &Setting<'_>,
        pair: (u64, u64),
        (crossing, shapes): (&Crossing, &[Vec<u64>]),
    ) -> Transfer {
        let bytes = |stage: u64, sharding: Sharding| {
            setting.activation(elements_of(sharding, self.meshes.of(stage), shapes))
        };
        let both_ways = (bytes(pair.1, crossing.read), bytes(pair.0, crossing.sent.dual()));
        self.handed_over(setting, pair, both_ways)
    }

    /// The same of so many bytes for a device that takes over, and back for one that gives.
    fn handed_over(
        &self,
        setting: &Setting<'_>,
        (from, to): (u64, u64),
        (wanted, back): (Bytes, Bytes),
    ) -> Transfer {
        let cluster = setting.machine.cluster;
        let n_devices = |stage: u64| self.meshes.of(stage).n_devices() as f64;
        let (n, m) = (n_devices(from), n_devices(to));
        let (given, returned) = (wanted * (m / n), back * (n / m));
        let (low, high) = (from.min(to), from.max(to));
        let ends = [self.meshes.first(low), self.meshes.first(high + 1) - 1];
        let group = Group::from_ranks(&ends, cluster).at(self.home(setting, (from, to)));
        let kind = CollectiveKind::SendRecv;
        let most = [wanted, back, given, returned].into_iter().fold(Bytes::ZERO, Bytes::max);
        Transfer {
            from,
            bytes_per_tier: bytes_sent_per_tier(kind, given, &group, cluster),
            back_per_tier: bytes_sent_per_tier(kind, returned, &group, cluster),
            time: price(kind, most, &group, cluster, setting.machine.constants),
        }
    }

    /// Least seconds in which so many elements of a stream go from one stage to another: every device has an equal
    /// part.
    pub(crate) fn least_transfer(&self, setting: &Setting<'_>, pair: (u64, u64), elements: f64) -> Seconds {
        let part = |stage: u64| setting.activation(elements / self.meshes.of(stage).n_devices() as f64);
        match self.meshes.of(pair.0) == self.meshes.of(pair.1) {
            true => self.transfer(setting, pair, part(pair.0)).time,
            false => self.handed_over(setting, pair, (part(pair.1), part(pair.0))).time,
        }
    }

    /// Bytes that a device of a stage holds of streams which its engine does not free once they are sent, with so many
    /// micro-batches in flight of all its chunks.
    pub fn held_outputs(&self, setting: &Setting<'_>, stage: usize, in_flight: f64) -> Bytes {
        let in_parts = match setting.job.engine.stage_outputs {
            StageOutputs::Freed => return Bytes::ZERO,
            StageOutputs::Held => false,
            StageOutputs::HeldInParts => true,
        };
        let mesh = self.meshes.of(stage as u64);
        let bytes = |crossing: &Crossing| {
            let sent = crossing.sent;
            let elements = elements_of(sent, mesh, &self.shapes(crossing, setting.job.sequence));
            let alike = whole_axes(mesh, sent).axes();
            let parts: u64 = alike.into_iter().map(|axis| mesh.size(axis)).product();
            (setting.activation(elements), parts as f64)
        };
        let crossings = self.crossings();
        let outputs = crossings.iter().filter(|crossing| self.is_at(crossing.from, stage)).map(bytes);
        let outputs: Bytes = outputs.map(|(whole, parts)| if in_parts { whole / parts } else { whole }).sum();
        if !in_parts {
            return outputs * in_flight;
        }
        let inputs = crossings.iter().filter(|crossing| self.is_at(crossing.to, stage));
        let alone = inputs.map(bytes).filter(|(_, parts)| *parts <= 1.0);
        (outputs + alone.map(|(whole, _)| whole).sum()) * in_flight
    }

    /// Whether a stage runs a chunk, or a copy of it.
    pub(super) fn is_at(&self, chunk: usize, stage: usize) -> bool {
        self.schedule.placement().ranks(self.n_stages as u32, chunk as u32).any(|rank| rank as usize == stage)
    }

    /// Whether what crosses is read in another sharding than that in which it arrives, or on another mesh.
    pub fn is_converted(&self, crossing: &Crossing) -> bool {
        self.is_handed_over(crossing) || crossing.sent != crossing.read
    }

    /// Whether what crosses comes from another mesh.
    fn is_handed_over(&self, crossing: &Crossing) -> bool {
        let mesh = |chunk: usize| self.meshes.of(self.stage_at(chunk, 0));
        mesh(crossing.from) != mesh(crossing.to)
    }

    /// What a chunk does to take streams of so many tokens over in its own sharding, and to give their gradients back
    /// in that of the chunks before; nothing where both have the same.
    pub fn takeover(&self, setting: &Setting<'_>, into: &[Crossing], tokens: u64) -> Takeover {
        let mut found = Takeover::default();
        for crossing in into {
            if crossing.sent != crossing.read && !self.is_handed_over(crossing) {
                self.convert(setting, (crossing, tokens), &mut found);
            }
        }
        found
    }

    fn convert(&self, setting: &Setting<'_>, (crossing, tokens): (&Crossing, u64), found: &mut Takeover) {
        let (given, wanted) = (crossing.sent, crossing.read);
        let (shapes, stage) = (self.shapes(crossing, tokens), self.stage_at(crossing.to, 0));
        let mesh = self.meshes.of(stage);
        let both_ways = [(given, wanted), (wanted.dual(), given.dual())];
        let times = [&mut found.forward, &mut found.backward];
        for ((from, to), time) in both_ways.into_iter().zip(times) {
            for step in steps(from, to).unwrap_or_default() {
                let Some(kind) = step.kind.collective() else { continue };
                // What is gathered is whole afterwards; all else is at its largest before.
                let full = if kind == CollectiveKind::AllGather { step.after } else { step.before };
                let cluster = setting.machine.cluster;
                let group = group(setting, mesh, &step.axes).at(self.home(setting, (stage, stage)));
                for shape in &shapes {
                    let bytes = setting.activation(full.local_elements(mesh, shape) as f64);
                    *time += price(kind, bytes, &group, cluster, setting.machine.constants);
                    let sent = bytes_sent_per_tier(kind, bytes, &group, cluster);
                    found.bytes_per_tier.resize(sent.len(), Bytes::ZERO);
                    found.bytes_per_tier.iter_mut().zip(sent).for_each(|(all, more)| *all += more);
                }
            }
        }
    }

    /// The group of the cluster on whose own links some stages are, with all that lie between them.
    fn home(&self, setting: &Setting<'_>, (from, to): (u64, u64)) -> Option<usize> {
        let ranks = self.meshes.first(from.min(to))..self.meshes.first(from.max(to) + 1);
        setting.home_of(setting.machine.cluster.groups_under(ranks))
    }

    /// What parameters shared by two stages send in a step: first all gradients, then all values.
    pub fn shared_moves(&self, setting: &Setting<'_>) -> (Vec<Transfer>, Vec<Transfer>) {
        let states = setting.states();
        let (mut gradients, mut values) = (Vec::new(), Vec::new());
        for tie in &self.model.ties {
            let places = (self.place(tie.owner), self.place(tie.copy));
            let (Some((owner, elements)), Some((copy, _))) = places else { continue };
            if owner != copy {
                gradients.push(self.transfer(setting, (copy, owner), states.gradient * elements));
                values.push(self.transfer(setting, (owner, copy), states.parameter * elements));
            }
        }
        (gradients, values)
    }

    /// The same of two copies of a chunk, which all pairs of stages send at once.
    pub fn twin_moves(&self, setting: &Setting<'_>) -> (Vec<Transfer>, Vec<Transfer>) {
        let states = setting.states();
        let (mut gradients, mut values) = (Vec::new(), Vec::new());
        for (chunk, runs) in self.chunks.iter().enumerate() {
            for copy in 1..self.schedule.placement().n_copies() {
                let (owner, twin) = (self.stage_at(chunk, 0), self.stage_at(chunk, copy));
                let elements: f64 =
                    runs.iter().map(|&(entry, count)| self.entries[entry].updated * count as f64).sum();
                gradients.push(self.transfer(setting, (twin, owner), states.gradient * elements));
                values.push(self.transfer(setting, (owner, twin), states.parameter * elements));
            }
        }
        (gradients, values)
    }

    /// Stage of a shared parameter, and the elements of it that a device updates.
    fn place(&self, side: ParameterRef) -> Option<(u64, f64)> {
        let holds = |entry: &Entry| entry.kind == side.layer;
        let chunk = |runs: &Vec<(usize, u64)>| runs.iter().find(|run| holds(&self.entries[run.0])).copied();
        let found = self.chunks.iter().enumerate().find_map(|(at, runs)| Some((at, chunk(runs)?)));
        let (at, (entry, _)) = found?;
        Some((self.stage_at(at, 0), elements(&self.entries[entry], side.tensor)?))
    }

    /// From each device of a stage to the one at its place on another.
    pub(crate) fn transfer(&self, setting: &Setting<'_>, (from, to): (u64, u64), bytes: Bytes) -> Transfer {
        let cluster = setting.machine.cluster;
        if from == to {
            return Transfer {
                from,
                bytes_per_tier: vec![Bytes::ZERO; cluster.tiers.len()],
                back_per_tier: vec![Bytes::ZERO; cluster.tiers.len()],
                time: Seconds::ZERO,
            };
        }
        let group = |pair: [u64; 2]| Group::from_ranks(&pair, cluster);
        let firsts = (self.meshes.first(from), self.meshes.first(to));
        let pairs = pairs(self.meshes.of(from).n_devices(), firsts, cluster);
        let slowest = pairs.into_iter().map(group).max_by_key(Group::spanning_tier);
        let group = slowest.unwrap_or_else(|| Group::alone(cluster)).at(self.home(setting, (from, to)));
        let sent = bytes_sent_per_tier(CollectiveKind::SendRecv, bytes, &group, cluster);
        Transfer {
            from,
            back_per_tier: sent.clone(),
            bytes_per_tier: sent,
            time: price(CollectiveKind::SendRecv, bytes, &group, cluster, setting.machine.constants),
        }
    }
}

/// Elements that a device has of several tensors in one sharding.
pub(super) fn elements_of(sharding: Sharding, mesh: &Mesh, shapes: &[Vec<u64>]) -> f64 {
    shapes.iter().map(|shape| sharding.local_elements(mesh, shape)).sum::<u64>() as f64
}

/// The group of a device along some axes of a mesh.
fn group(setting: &Setting<'_>, mesh: &Mesh, axes: &[AxisId]) -> Group {
    let axis = |&axis: &AxisId| GroupAxis { stride: mesh.stride(axis), size: mesh.size(axis) };
    Group::from_axes(&axes.iter().map(axis).collect::<Vec<_>>(), setting.machine.cluster)
}

/// The first ranks of two stages of `n` devices, and for each tier those of a pair that its domains part, if there is
/// one.
fn pairs(n: u64, (from, to): (u64, u64), cluster: &Cluster) -> Vec<[u64; 2]> {
    let (low, distance) = (from.min(to), from.abs_diff(to));
    let parted = |tier: &Tier| {
        let domain = tier.devices.max(1);
        let border = (low / domain + 1) * domain;
        let place = border.saturating_sub(low + distance);
        (place < n).then_some(place)
    };
    let places = std::iter::once(0).chain(cluster.tiers.iter().filter_map(parted));
    places.map(|place| [low + place, low + distance + place]).collect()
}

fn elements(entry: &Entry, tensor: TensorId) -> Option<f64> {
    entry.shared.iter().find(|(own, _)| *own == tensor).map(|(_, elements)| *elements)
}

#[cfg(test)]
mod tests {
    use ir::cluster::{Cluster, InSwitchReduction, Tier, Wiring};
    use ir::units::{Bytes, BytesPerSecond, Seconds};

    use super::pairs;

    fn cluster(domains: &[u64]) -> Cluster {
        let tier = |&devices: &u64| Tier {
            name: format!("of {devices}"),
            devices,
            bandwidth_bytes_per_s: BytesPerSecond(1e9),
            latency_s: Seconds(1e-6),
            wiring: Wiring::Switch,
            oversubscription: 1.0,
            routing: Default::default(),
            in_switch_reduction: InSwitchReduction::Absent,
        };
        let tiers = domains.iter().map(tier).collect();
        Cluster {
            schema_version: 1,
            name: "test".into(),
            groups: Vec::new(),
            tiers,
            reserve_bytes: Bytes(0.0),
            calibration: None,
        }
    }

    /// True where some pair looked at is parted by domains of so many devices; by looking at every pair, and by
    /// `pairs`.
    #[test]
    fn a_pair_that_a_domain_parts_is_found_if_there_is_one() {
        for domain in 1..=12_u64 {
            for (n, from, to) in
                (1..=9).flat_map(|n| (0..5).flat_map(move |a| (0..5).map(move |b| (n, a, b))))
            {
                if from == to {
                    continue;
                }
                let parted = |pair: &[u64; 2]| pair[0] / domain != pair[1] / domain;
                let (low, high) = (from.min(to) * n, from.max(to) * n);
                let brute = (0..n).map(|i| [low + i, high + i]).any(|pair| parted(&pair));
                let found = pairs(n, (from * n, to * n), &cluster(&[domain, 1000]));
                assert_eq!(
                    found.iter().any(parted),
                    brute,
                    "{n} devices, {from} to {to}, domains of {domain}"
                );
                assert!(
                    found
                        .iter()
                        .all(|pair| pair[0] >= low && pair[0] < low + n && pair[1] - pair[0] == high - low)
                );
            }
        }
    }
}
