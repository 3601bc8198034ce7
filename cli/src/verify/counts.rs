//! Bytes that a small run should send and keep, and those that it did.
//!
//! The prediction puts together what the cost model says of each layer's program; the counts are the executor's own.
//! The two share no code.

use std::collections::BTreeMap;
use std::fmt;

use cost_model::{
    Algorithm, BytesByCollective, CollectiveKind, Links, fetched_bytes, handover_bytes, host_elements,
    kept_bytes, program_bytes, saved_bytes, split_bytes, step_bytes, stored_bytes, stream_bytes,
};
use executor::run::Outcome;
use executor::{Class, RankMemory};
use ir::conversion::steps;
use ir::graph::{ParameterRef, TensorId};
use ir::links::{Link, links};
use ir::mesh::Mesh;
use ir::program::{Home, Program, StateHome, Update, ValueId};
use ir::schedule::{Action, Section};
use ir::sharding::{Placement, Sharding};
use ir::split::split_backward;
use serde::Serialize;

use crate::copy::{STEPS, SmallRun};

/// What gradients on their way to the host are called.
const TO_HOST: &str = "gradients to the host";

/// What new parameters on their way to the device are called.
const FROM_HOST: &str = "parameters from the host";

/// Optimizer states on their way off the drives for their update.
const READ: &str = "optimizer states read off the drives";

/// The same on their way back.
const WRITTEN: &str = "optimizer states written to the drives";

/// What layers keep for backward is called on its way to the host, and on its way back.
const KEPT_DOWN: &str = "activations to the host";
const KEPT_UP: &str = "activations from the host";

/// What parameters that hosts hold between uses are called on their way for a use, and when they are new.
const STORED_UP: &str = "parameters from the host, for a use";
const STORED_DOWN: &str = "new parameters to the host";

/// Bytes by name.
type Bytes = BTreeMap<String, u64>;

/// Bytes of a run.
#[derive(Debug, Default)]
pub(crate) struct Counted {
    /// Sent by all ranks, by purpose and collective.
    pub(crate) sent: Bytes,
    /// Kept for backward of one micro-batch, or carried between its parts, by rank and layer.
    pub(crate) saved: Bytes,
    /// Most kept at once, by rank.
    pub(crate) peak_saved: Bytes,
}

/// One count against its prediction.
#[derive(Debug, Serialize)]
pub(crate) struct BytesCheck {
    pub(crate) what: String,
    pub(crate) predicted: u64,
    pub(crate) counted: u64,
}

impl BytesCheck {
    /// Every name that either side has.
    pub(crate) fn all(predicted: &Bytes, counted: &Bytes) -> Vec<Self> {
        let mut names: Vec<&String> = predicted.keys().chain(counted.keys()).collect();
        names.sort_unstable();
        names.dedup();
        let of = |bytes: &Bytes, name: &str| bytes.get(name).copied().unwrap_or(0);
        let check = |name: &String| Self {
            what: name.clone(),
            predicted: of(predicted, name),
            counted: of(counted, name),
        };
        names.into_iter().map(check).collect()
    }

    /// What was planned of every rank's memory, and what its run used.
    pub(crate) fn of_ranks(
        what: &str,
        ranks: &[RankMemory],
        of: impl Fn(&RankMemory) -> (u64, u64),
    ) -> Vec<Self> {
        let check = |(rank, memory): (usize, &RankMemory)| {
            let (predicted, counted) = of(memory);
            Self { what: format!("{what} of rank {rank}"), predicted, counted }
        };
        ranks.iter().enumerate().map(check).collect()
    }

    /// The sum of many; different where any of them is, so that errors cannot cancel.
    pub(crate) fn sum(what: &str, checks: &[Self]) -> Self {
        let predicted: u64 = checks.iter().map(|check| check.predicted).sum();
        let apart: u64 = checks.iter().map(|check| check.counted.abs_diff(check.predicted)).sum();
        Self { what: what.into(), predicted, counted: predicted + apart }
    }

    /// Whether the two are equal.
    pub(crate) fn holds(&self) -> bool {
        self.predicted == self.counted
    }
}

impl fmt::Display for BytesCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} B predicted, {} B counted", self.what, self.predicted, self.counted)
    }
}

/// What the executor counted.
pub(crate) fn counted(small: &SmallRun<'_>, outcome: &Outcome) -> Counted {
    let mut found = Counted::default();
    for (traffic, &bytes) in outcome.counters.sent() {
        let class = Class::of_label(&traffic.label).map_or("unknown", Class::name);
        let how = (traffic.kind.of_plan(), traffic.algorithm);
        add(&mut found.sent, sent_name(small, class, how, traffic.tier), bytes);
    }
    for moved in &outcome.moved {
        add(&mut found.sent, TO_HOST.into(), moved.down);
        add(&mut found.sent, FROM_HOST.into(), moved.up);
        add(&mut found.sent, READ.into(), moved.read);
        add(&mut found.sent, WRITTEN.into(), moved.written);
        add(&mut found.sent, KEPT_DOWN.into(), moved.kept_down);
        add(&mut found.sent, KEPT_UP.into(), moved.kept_up);
        add(&mut found.sent, STORED_UP.into(), moved.stored_up);
        add(&mut found.sent, STORED_DOWN.into(), moved.stored_down);
    }
    for (rank, layers) in outcome.saved.iter().enumerate() {
        for (layer_idx, &bytes) in layers {
            add(&mut found.saved, saved_name(rank, *layer_idx), bytes);
        }
    }
    for (rank, layers) in outcome.carried.iter().enumerate() {
        for (layer_idx, &bytes) in layers {
            add(&mut found.saved, carried_name(rank, *layer_idx), bytes);
        }
    }
    for (rank, &bytes) in outcome.peak_saved.iter().enumerate() {
        add(&mut found.peak_saved, peak_name(rank), bytes);
    }
    found
}

/// `gradient reduce, all-reduce (two-level) over infiniband`.
fn sent_name(
    small: &SmallRun<'_>,
    class: &str,
    (kind, algorithm): (CollectiveKind, Algorithm),
    tier: usize,
) -> String {
    let tier = small.plan.cluster.levels().get(tier).copied().unwrap_or("no link");
    format!("{class}, {} ({}) over {tier}", kind.name(), algorithm.name())
}

fn saved_name(rank: usize, layer_idx: usize) -> String {
    format!("saved by rank {rank} for layer {layer_idx}")
}

fn peak_name(rank: usize) -> String {
    format!("most saved at once by rank {rank}")
}

fn add(bytes: &mut Bytes, name: String, count: u64) {
    if count > 0 {
        *bytes.entry(name).or_insert(0) += count;
    }
}

/// What the cost model says of the same run with elements of so many bytes, and of others where nothing is rounded.
pub(crate) fn predicted(small: &SmallRun<'_>, (element_bytes, full_bytes): (u64, u64)) -> Counted {
    let count = Prediction { small, element_bytes };
    let mut found = Counted::default();
    count.programs(&mut found.sent);
    count.borders(&mut found.sent);
    count.ties(&mut found.sent);
    count.twins(&mut found.sent);
    count.hosts(&mut found.sent, full_bytes);
    count.saved(&mut found);
    found
}

struct Prediction<'a> {
    small: &'a SmallRun<'a>,
    element_bytes: u64,
}

impl Prediction<'_> {
    fn n_chunks(&self) -> usize {
        self.small.plan.chunks.len()
    }

    /// Position of the tier between two devices of stages.
    fn tier(&self, (stage, device): (u64, u64), (other_stage, other_device): (u64, u64)) -> usize {
        let rank = |stage, device| self.small.plan.cluster_rank(stage, device) as usize;
        self.small.tier_between(rank(stage, device), rank(other_stage, other_device))
    }

    fn n_slices(&self) -> u32 {
        self.small.plan.table_shape().n_slices
    }

    /// What a device of a stage runs; of devices with unequal shares, by their coordinate along the outermost axis.
    fn row(&self, stage: u64, share: usize) -> &[Action] {
        let own = self.small.shares.get(share);
        &own.map_or(&self.small.table, |share| &share.table)[stage as usize]
    }

    /// Tiers of the cluster, and one place for ranks that no link joins.
    fn n_tiers(&self) -> usize {
        self.small.plan.cluster.levels().len() + 1
    }

    /// Coordinate of a device that tells which share it runs; zero where all run the same.
    fn share_of(&self, device: u64) -> usize {
        let (plan, n) = (self.small.plan, self.small.shares.len() as u64);
        let each = plan.mesh.n_devices().checked_div(n);
        each.map_or(0, |each| (device / each.max(1)) as usize)
    }

    /// How often a stage runs a section of a slice of a chunk in all steps, with a share.
    fn runs(&self, (stage, chunk, share): (u64, usize, usize), section: Section, slice: u32) -> u64 {
        let shape = self.small.plan.table_shape();
        let is_one = |action: &&Action| {
            action.section == section && action.slice == slice && shape.chunk(**action) as usize == chunk
        };
        self.row(stage, share).iter().filter(is_one).count() as u64 * u64::from(STEPS)
    }

    /// What layers send for themselves.
    fn programs(&self, sent: &mut Bytes) {
        let plan = self.small.plan;
        for chunk in 0..self.n_chunks() {
            for stage in plan.stages_of_chunk(chunk) {
                self.programs_on(sent, (stage, chunk));
            }
        }
    }

    /// What one copy of a chunk's layers sends.
    fn programs_on(&self, sent: &mut Bytes, place: (u64, usize)) {
        (0..self.n_slices()).for_each(|slice| self.slice_on(sent, place, slice));
    }

    /// What it sends for one slice of every sequence; with the first, what it sends once per step.
    fn slice_on(&self, sent: &mut Bytes, (stage, chunk): (u64, usize), slice: u32) {
        let plan = self.small.plan;
        // Within a micro-batch nothing passes between devices with unequal shares: the count is kept apart by share.
        let n_tiers = self.n_tiers();
        let tier_of = |a: u64, b: u64| self.tier((stage, a), (stage, b));
        let apart = |a: u64, b: u64| tier_of(a, b) + n_tiers * self.share_of(a);
        let links = |tier_of| Links { element_bytes: self.element_bytes, tier_of };
        let runs = |section: Section| move |share: usize| self.runs((stage, chunk, share), section, slice);
        for (layer, program, entry) in self.small.chunk(chunk) {
            let sizes = self.small.opened.run_sizes(plan, entry, slice);
            let mesh = plan.mesh_of(stage);
            let of_micro_batch = Program { updates: Vec::new(), ..program.clone() };
            let bytes = program_bytes(layer, mesh, &sizes, &of_micro_batch, &links(&apart));
            let split = split_backward(layer, program);
            let [input, weight] = split_bytes((layer, mesh, &sizes), program, &split, &links(&apart));
            if program.kept == Home::Host {
                let kept = saved_bytes(layer, mesh, &sizes, program, self.element_bytes);
                let again = |share| runs(Section::Backward)(share) + runs(Section::BackwardInput)(share);
                for (device, bytes) in (0..).zip(kept) {
                    let share = self.share_of(device);
                    add(sent, KEPT_DOWN.into(), bytes * runs(Section::Forward)(share));
                    add(sent, KEPT_UP.into(), bytes * again(share));
                }
            }
            if program.parameters == Home::Host {
                let layer = (layer, mesh, &sizes);
                let sections = [
                    (Section::Forward, &program.forward),
                    (Section::Backward, &program.backward),
                    (Section::BackwardInput, &split.input),
                    (Section::BackwardWeight, &split.weight),
                ];
                for (section, code) in sections {
                    let fetched = fetched_bytes(layer, (program, code), self.element_bytes);
                    for (device, bytes) in (0..).zip(fetched) {
                        add(sent, STORED_UP.into(), bytes * runs(section)(self.share_of(device)));
                    }
                }
                let learned: Vec<TensorId> = program.own_updates().map(|update| update.tensor).collect();
                let stored = stored_bytes(layer, program, &learned, self.element_bytes);
                let steps = if slice == 0 { u64::from(STEPS) } else { 0 };
                add(sent, STORED_DOWN.into(), stored.iter().sum::<u64>() * steps);
            }
            let mut put = |section: &BytesByCollective, times: &dyn Fn(usize) -> u64| {
                for (one, bytes) in section {
                    let (tier, share) = (one.tier % n_tiers, one.tier / n_tiers);
                    let name = sent_name(self.small, one.class.name(), (one.kind, one.algorithm), tier);
                    add(sent, name, bytes * times(share));
                }
            };
            put(&bytes.forward, &runs(Section::Forward));
            put(&bytes.backward, &runs(Section::Backward));
            put(&input, &runs(Section::BackwardInput));
            put(&weight, &runs(Section::BackwardWeight));
            if slice == 0 {
                let once = program_bytes(layer, mesh, &sizes, program, &links(&tier_of)).update;
                put(&once, &|_| u64::from(STEPS));
            }
        }
    }

    /// Streams and their gradients from chunk to chunk: sent in the sharding of the chunk before, converted after.
    fn borders(&self, sent: &mut Bytes) {
        let of_chunk = |chunk: usize| {
            self.small
                .chunk(chunk)
                .into_iter()
                .map(move |(layer, program, entry)| (chunk, layer, program, entry))
        };
        let all: Vec<_> = (0..self.n_chunks()).flat_map(of_chunk).collect();
        for link in links(all.iter().map(|(_, layer, ..)| *layer)) {
            let ((before, _, left, _), (after, layer, right, entry)) = (all[link.from], all[link.to]);
            if before == after {
                continue;
            }
            for slice in 0..self.n_slices() {
                let sizes = self.small.opened.run_sizes(self.small.plan, entry, slice);
                let shape = |tensor| layer.shape(tensor, &sizes);
                for hops in self.hops((before, after)) {
                    self.border(sent, (left, right, link), hops, &shape);
                }
            }
        }
    }

    fn border(
        &self,
        sent: &mut Bytes,
        (left, right, link): (&Program, &Program, Link),
        (before, after, copy): (u64, u64, u32),
        shape: &dyn Fn(TensorId) -> Vec<u64>,
    ) {
        let (first, mesh) = (self.small.plan.mesh_of(before), self.small.plan.mesh_of(after));
        let (read, leaves) =
            (right.value(right.stream[link.read]), right.value(right.stream_gradient[link.read]).sharding);
        let given = left.value(left.out[link.left]).sharding;
        let wanted = left.value(left.out_gradient[link.left]).sharding;
        let shape = shape(read.tensor);
        if first != mesh {
            let there = handover_bytes((first, given), (mesh, read.sharding), &shape, self.element_bytes);
            let back = handover_bytes((mesh, leaves), (first, wanted), &shape, self.element_bytes);
            for (stages, bytes) in [((before, after), there), ((after, before), back)] {
                for ((from, to), bytes) in bytes {
                    let tier = self.tier((stages.0, from), (stages.1, to));
                    let how = (CollectiveKind::SendRecv, Algorithm::Direct);
                    add(
                        sent,
                        sent_name(self.small, Class::Pipeline.name(), how, tier),
                        bytes * self.passes(copy, 0),
                    );
                }
            }
            return;
        }
        if before != after {
            for sharding in [given, wanted] {
                let bytes = stream_bytes(mesh, &shape, sharding, self.element_bytes);
                let passes = |device: u64| self.passes(copy, self.share_of(device));
                self.send(sent, Class::Pipeline, (before, after), (&bytes, &passes));
            }
        }
        let n_tiers = self.n_tiers();
        let tier_of = |a: u64, b: u64| self.tier((after, a), (after, b)) + n_tiers * self.share_of(a);
        let links = Links { element_bytes: self.element_bytes, tier_of: &tier_of };
        for step in [steps(given, read.sharding), steps(leaves, wanted)].into_iter().flatten().flatten() {
            let Some(kind) = step.kind.collective() else { continue };
            for (tier, bytes) in step_bytes(&step, mesh, &shape, &links) {
                let (tier, share) = (tier % n_tiers, tier / n_tiers);
                let name = sent_name(self.small, Class::Pipeline.name(), (kind, step.algorithm), tier);
                add(sent, name, bytes * self.passes(copy, share));
            }
        }
    }

    /// Every device of a stage sends so many bytes to its peer in another, or gets them from there.
    fn send(
        &self,
        sent: &mut Bytes,
        class: Class,
        (from, to): (u64, u64),
        (bytes, times): (&[u64], &dyn Fn(u64) -> u64),
    ) {
        for (device, bytes) in bytes.iter().enumerate() {
            let tier = self.tier((from, device as u64), (to, device as u64));
            let how = (CollectiveKind::SendRecv, Algorithm::Direct);
            add(sent, sent_name(self.small, class.name(), how, tier), bytes * times(device as u64));
        }
    }

    /// From which stage to which a stream of a copy passes between two chunks.
    fn hops(&self, (before, after): (usize, usize)) -> Vec<(u64, u64, u32)> {
        let shape = self.small.plan.table_shape();
        let rank =
            |chunk: usize, m: u32| u64::from(shape.placement.seat(shape.n_stages, chunk as u32, m).rank);
        (0..shape.placement.n_copies()).map(|copy| (rank(before, copy), rank(after, copy), copy)).collect()
    }

    /// How often a stream of a copy passes in all steps, with a share.
    fn passes(&self, copy: u32, share: usize) -> u64 {
        let shape = self.small.plan.table_shape();
        let own = self.small.shares.get(share).map_or(shape.n_micro_batches, |share| share.n_micro_batches);
        let n = (0..own).filter(|m| m % shape.placement.n_copies() == copy).count() as u64;
        n * u64::from(STEPS)
    }

    /// Layers on two stages: the gradients of the second copy to the first, the new values back.
    fn twins(&self, sent: &mut Bytes) {
        for chunk in 0..self.n_chunks() {
            let stages = self.small.plan.stages_of_chunk(chunk);
            let mesh = self.small.plan.mesh_of_chunk(chunk);
            for (layer, program, entry) in self.small.chunk(chunk) {
                let sizes = self.small.opened.sizes(self.small.plan, entry);
                for update in program.own_updates() {
                    let bytes = self.cut_bytes(mesh, update, &layer.shape(update.tensor, &sizes));
                    for &twin in &stages[1..] {
                        self.send(sent, Class::Tie, (twin, stages[0]), (&bytes, &every_step));
                        self.send(sent, Class::Tie, (stages[0], twin), (&bytes, &every_step));
                    }
                }
            }
        }
    }

    /// What hosts update, once each: gradients as they were summed go down, values as operators take them come up.
    fn hosts(&self, sent: &mut Bytes, full_bytes: u64) {
        let opened = self.small.opened;
        let is_copy = |layer: usize, tensor: TensorId| {
            opened.model.ties.iter().any(|tie| tie.copy == ParameterRef { layer, tensor })
        };
        for chunk in 0..self.n_chunks() {
            for (layer, program, entry) in self.small.chunk(chunk) {
                let sizes = opened.sizes(self.small.plan, entry);
                let kind = opened.entries[entry].layer;
                for update in program.updates.iter().filter(|update| !is_copy(kind, update.tensor)) {
                    let shape = layer.shape(update.tensor, &sizes);
                    let n = host_elements((self.small.plan.mesh_of_chunk(chunk), &shape), update)
                        * u64::from(STEPS);
                    add(sent, TO_HOST.into(), n * full_bytes);
                    add(sent, FROM_HOST.into(), n * self.element_bytes);
                    if update.storage.home == StateHome::Nvme {
                        // The value that is updated and both moments.
                        add(sent, READ.into(), 3 * n * full_bytes);
                        add(sent, WRITTEN.into(), 3 * n * full_bytes);
                    }
                }
            }
        }
    }

    /// Shared parameters on different stages: the gradient to the owner, the new value back, in the update's cut.
    fn ties(&self, sent: &mut Bytes) {
        for tie in &self.small.opened.model.ties {
            let (Some(owner), Some(copy)) = (self.stage_of(tie.owner), self.stage_of(tie.copy)) else {
                continue;
            };
            if owner != copy {
                let bytes = self.update_cut(tie.copy);
                self.send(sent, Class::Tie, (copy, owner), (&bytes, &every_step));
                self.send(sent, Class::Tie, (owner, copy), (&bytes, &every_step));
            }
        }
    }

    fn stage_of(&self, side: ParameterRef) -> Option<u64> {
        let has = |chunk: &usize| {
            let mut runs = self.small.plan.chunks[*chunk].iter();
            runs.any(|run| self.small.opened.entries[run.entry].layer == side.layer)
        };
        (0..self.n_chunks()).find(has).map(|chunk| self.small.plan.stages_of_chunk(chunk)[0])
    }

    /// Bytes of a parameter in the cut of its update, by device of a stage; nothing of one that the owner of its tie
    /// holds.
    fn update_cut(&self, side: ParameterRef) -> Vec<u64> {
        let opened = self.small.opened;
        let Some(entry) = opened.entries.iter().position(|entry| entry.layer == side.layer) else {
            return Vec::new();
        };
        let shape = opened.layer(entry).shape(side.tensor, &opened.sizes(self.small.plan, entry));
        let mut updates = opened.entries[entry].program.own_updates();
        let update = updates.find(|update| update.tensor == side.tensor);
        let mesh = self.small.plan.mesh_of_entry(entry);
        update.map_or(Vec::new(), |update| self.cut_bytes(mesh, update, &shape))
    }

    fn cut_bytes(&self, mesh: &Mesh, update: &Update, shape: &[u64]) -> Vec<u64> {
        let cut = update.storage.optimizer.axes().into_iter();
        let cut = cut.fold(Sharding::REPLICATED, |sharding, axis| sharding.with(axis, Placement::Shard(0)));
        let of_rank = |rank: u64| {
            let at = mesh.coordinates(rank);
            let length = |(dim, &size): (usize, &u64)| {
                let range = update.used.local_range(mesh, &at, dim, size);
                range.end - range.start
            };
            let flat: u64 = shape.iter().enumerate().map(length).product();
            let range = cut.local_range(mesh, &at, 0, flat);
            (range.end - range.start) * self.element_bytes
        };
        (0..mesh.n_devices()).map(of_rank).collect()
    }

    /// What ranks keep: per layer for one micro-batch, or its largest slice, and at most along the schedule.
    fn saved(&self, found: &mut Counted) {
        let (plan, shape) = (self.small.plan, self.small.plan.table_shape());
        let slices: Vec<_> = (0..self.n_slices()).map(|slice| self.kept_per_chunk(slice)).collect();
        let at_most = |known: &mut Bytes, name: String, bytes: u64| {
            let most = known.entry(name).or_insert(0);
            *most = bytes.max(*most);
        };
        for stage in 0..self.small.table.len() {
            for device in 0..plan.mesh_of(stage as u64).n_devices() as usize {
                let row = self.row(stage as u64, self.share_of(device as u64));
                let rank = plan.cluster_rank(stage as u64, device as u64) as usize;
                let (mut now, mut most) = (0_u64, 0_u64);
                for action in row {
                    let layers = &slices[action.slice as usize][shape.chunk(*action) as usize];
                    for kept in layers {
                        let (saved, carried) = (kept.saved[device], kept.carried[device]);
                        match action.section {
                            Section::Forward => {
                                now += saved;
                                at_most(&mut found.saved, saved_name(rank, kept.layer_idx), saved);
                            }
                            Section::Backward => now -= saved,
                            Section::BackwardInput => {
                                now = now + carried - saved;
                                at_most(&mut found.saved, carried_name(rank, kept.layer_idx), carried);
                            }
                            Section::BackwardWeight => now -= carried,
                        }
                        most = most.max(now);
                    }
                }
                add(&mut found.peak_saved, peak_name(rank), most);
            }
        }
        found.saved.retain(|_, bytes| *bytes > 0);
    }

    /// Of a slice, by chunk, its layers in the order in which a rank comes by them: backward, since only there bytes
    /// may fall.
    fn kept_per_chunk(&self, slice: u32) -> Vec<Vec<Kept>> {
        let plan = self.small.plan;
        let mut layer_idx = 0;
        let mut chunks = Vec::new();
        for chunk in 0..self.n_chunks() {
            let mut layers = Vec::new();
            let mesh = plan.mesh_of_chunk(chunk);
            for (layer, program, entry) in self.small.chunk(chunk) {
                let sizes = self.small.opened.run_sizes(plan, entry, slice);
                let carried = split_backward(layer, program).carried;
                let bytes = |values: &[ValueId]| {
                    kept_bytes((layer, mesh, &sizes), program, values, self.element_bytes)
                };
                let saved = saved_bytes(layer, mesh, &sizes, program, self.element_bytes);
                layers.push(Kept { layer_idx, saved, carried: bytes(&carried) });
                layer_idx += 1;
            }
            layers.reverse();
            chunks.push(layers);
        }
        chunks
    }
}

/// What is sent once per step.
fn every_step(_: u64) -> u64 {
    u64::from(STEPS)
}

/// What a layer keeps for one micro-batch, by device of its stage.
struct Kept {
    layer_idx: usize,
    saved: Vec<u64>,
    carried: Vec<u64>,
}

fn carried_name(rank: usize, layer_idx: usize) -> String {
    format!("carried by rank {rank} for layer {layer_idx}")
}
