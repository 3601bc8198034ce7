//! Bytes that a small run should send and keep, and those that it did.
//!
//! The prediction puts together what the cost model says of each layer's program; the counts are the executor's own.
//! The two share no code.

use std::collections::BTreeMap;
use std::fmt;

use cost_model::{
    Algorithm, BytesByCollective, CollectiveKind, Links, program_bytes, saved_bytes, step_bytes, stream_bytes,
};
use executor::run::Outcome;
use executor::{Class, RankMemory};
use ir::conversion::steps;
use ir::graph::{ParameterRef, TensorId};
use ir::program::{Program, Update};
use ir::schedule::Section;
use ir::sharding::{Placement, Sharding};
use serde::Serialize;

use super::copy::{STEPS, SmallRun};

/// Bytes by name.
type Bytes = BTreeMap<String, u64>;

/// Bytes of a run.
#[derive(Debug, Default)]
pub(crate) struct Counted {
    /// Sent by all ranks, by purpose and collective.
    pub(crate) sent: Bytes,
    /// Kept for backward of one micro-batch, by rank and layer.
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
        outcome: &Outcome,
        of: impl Fn(&RankMemory) -> (u64, u64),
    ) -> Vec<Self> {
        let check = |(rank, memory): (usize, &RankMemory)| {
            let (predicted, counted) = of(memory);
            Self { what: format!("{what} of rank {rank}"), predicted, counted }
        };
        outcome.memory.iter().enumerate().map(check).collect()
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
    for (rank, layers) in outcome.saved.iter().enumerate() {
        for (layer_idx, &bytes) in layers {
            add(&mut found.saved, saved_name(rank, *layer_idx), bytes);
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
    let tier = small.plan.cluster.tiers.get(tier).map_or("no link", |tier| tier.name.as_str());
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

/// What the cost model says of the same run with elements of so many bytes.
pub(crate) fn predicted(small: &SmallRun<'_>, element_bytes: u64) -> Counted {
    let count = Prediction { small, element_bytes };
    let mut found = Counted::default();
    count.programs(&mut found.sent);
    count.borders(&mut found.sent);
    count.ties(&mut found.sent);
    count.saved(&mut found);
    found
}

struct Prediction<'a> {
    small: &'a SmallRun<'a>,
    element_bytes: u64,
}

impl Prediction<'_> {
    fn micro_batches(&self) -> u64 {
        self.small.plan.n_micro_batches * u64::from(STEPS)
    }

    fn n_chunks(&self) -> usize {
        self.small.plan.chunks.len()
    }

    /// Position of the tier between two devices of stages.
    fn tier(&self, (stage, device): (u64, u64), (other_stage, other_device): (u64, u64)) -> usize {
        let n = self.small.plan.mesh.n_devices();
        self.small.tier_between((stage * n + device) as usize, (other_stage * n + other_device) as usize)
    }

    /// What layers send for themselves.
    fn programs(&self, sent: &mut Bytes) {
        let plan = self.small.plan;
        for chunk in 0..self.n_chunks() {
            let stage = plan.stage_of_chunk(chunk);
            let tier_of = |a: u64, b: u64| self.tier((stage, a), (stage, b));
            let links = Links { element_bytes: self.element_bytes, tier_of: &tier_of };
            for (layer, program, entry) in self.small.chunk(chunk) {
                let sizes = self.small.opened.sizes(plan, entry);
                let bytes = program_bytes(layer, &plan.mesh, &sizes, program, &links);
                let mut put = |section: &BytesByCollective, times: u64| {
                    for (one, bytes) in section {
                        let name =
                            sent_name(self.small, one.class.name(), (one.kind, one.algorithm), one.tier);
                        add(sent, name, bytes * times);
                    }
                };
                put(&bytes.forward, self.micro_batches());
                put(&bytes.backward, self.micro_batches());
                put(&bytes.update, u64::from(STEPS));
            }
        }
    }

    /// The stream and its gradient from chunk to chunk: sent in the sharding of the chunk before, converted after.
    fn borders(&self, sent: &mut Bytes) {
        for chunk in 1..self.n_chunks() {
            let (before, after) = (self.small.chunk(chunk - 1), self.small.chunk(chunk));
            let (Some((_, left, _)), Some((layer, right, entry))) = (before.last(), after.first()) else {
                continue;
            };
            let stages = (self.small.plan.stage_of_chunk(chunk - 1), self.small.plan.stage_of_chunk(chunk));
            let shape = |tensor| layer.shape(tensor, &self.small.opened.sizes(self.small.plan, *entry));
            self.border(sent, (left, right), stages, &shape);
        }
    }

    fn border(
        &self,
        sent: &mut Bytes,
        (left, right): (&Program, &Program),
        (before, after): (u64, u64),
        shape: &dyn Fn(TensorId) -> Vec<u64>,
    ) {
        let mesh = &self.small.plan.mesh;
        let (Some(stream), Some(gradient)) = (right.stream, right.stream_gradient) else { return };
        let (read, leaves) = (right.value(stream), right.value(gradient).sharding);
        let (given, wanted) = (left.value(left.out).sharding, left.value(left.out_gradient).sharding);
        let shape = shape(read.tensor);
        if before != after {
            for sharding in [given, wanted] {
                let bytes = stream_bytes(mesh, &shape, sharding, self.element_bytes);
                self.send(sent, Class::Pipeline, (before, after), (&bytes, self.micro_batches()));
            }
        }
        let tier_of = |a: u64, b: u64| self.tier((after, a), (after, b));
        let links = Links { element_bytes: self.element_bytes, tier_of: &tier_of };
        for step in [steps(given, read.sharding), steps(leaves, wanted)].into_iter().flatten().flatten() {
            let Some(kind) = step.kind.collective() else { continue };
            for (tier, bytes) in step_bytes(&step, mesh, &shape, &links) {
                let name = sent_name(self.small, Class::Pipeline.name(), (kind, step.algorithm), tier);
                add(sent, name, bytes * self.micro_batches());
            }
        }
    }

    /// Every device of a stage sends so many bytes to its peer in another, or gets them from there.
    fn send(&self, sent: &mut Bytes, class: Class, (from, to): (u64, u64), (bytes, times): (&[u64], u64)) {
        for (device, bytes) in bytes.iter().enumerate() {
            let tier = self.tier((from, device as u64), (to, device as u64));
            let how = (CollectiveKind::SendRecv, Algorithm::Direct);
            add(sent, sent_name(self.small, class.name(), how, tier), bytes * times);
        }
    }

    /// Shared parameters on different stages: the gradient to the owner, the new value back, in the update's cut.
    fn ties(&self, sent: &mut Bytes) {
        for tie in &self.small.opened.model.ties {
            let (Some(owner), Some(copy)) = (self.stage_of(tie.owner), self.stage_of(tie.copy)) else {
                continue;
            };
            if owner != copy {
                let bytes = self.update_cut(tie.owner);
                self.send(sent, Class::Tie, (copy, owner), (&bytes, u64::from(STEPS)));
                self.send(sent, Class::Tie, (owner, copy), (&bytes, u64::from(STEPS)));
            }
        }
    }

    fn stage_of(&self, side: ParameterRef) -> Option<u64> {
        let has = |chunk: &usize| {
            let mut runs = self.small.plan.chunks[*chunk].iter();
            runs.any(|run| self.small.opened.entries[run.entry].layer == side.layer)
        };
        (0..self.n_chunks()).find(has).map(|chunk| self.small.plan.stage_of_chunk(chunk))
    }

    /// Bytes of a parameter in the cut of its update, by device of a stage.
    fn update_cut(&self, side: ParameterRef) -> Vec<u64> {
        let opened = self.small.opened;
        let Some(entry) = opened.entries.iter().position(|entry| entry.layer == side.layer) else {
            return Vec::new();
        };
        let shape = opened.layer(entry).shape(side.tensor, &opened.sizes(self.small.plan, entry));
        let updates = &opened.entries[entry].program.updates;
        let update = updates.iter().find(|update| update.tensor == side.tensor);
        update.map_or(Vec::new(), |update| self.cut_bytes(update, &shape))
    }

    fn cut_bytes(&self, update: &Update, shape: &[u64]) -> Vec<u64> {
        let mesh = &self.small.plan.mesh;
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

    /// What ranks keep: per layer for one micro-batch, and at most along the schedule.
    fn saved(&self, found: &mut Counted) {
        let n = self.small.plan.mesh.n_devices() as usize;
        let per_chunk = self.saved_per_chunk(found);
        for (stage, row) in self.small.table.iter().enumerate() {
            for (device, name) in (0..n).map(|device| (device, peak_name(stage * n + device))) {
                let (mut now, mut most) = (0_u64, 0_u64);
                for action in row {
                    let bytes = per_chunk[action.chunk(self.small.table.len() as u32) as usize][device];
                    match action.section {
                        Section::Forward => now += bytes,
                        Section::Backward => now = now.saturating_sub(bytes),
                    }
                    most = most.max(now);
                }
                add(&mut found.peak_saved, name, most);
            }
        }
    }

    /// By chunk and device of its stage.
    fn saved_per_chunk(&self, found: &mut Counted) -> Vec<Vec<u64>> {
        let plan = self.small.plan;
        let n = plan.mesh.n_devices() as usize;
        let mut layer_idx = 0;
        let mut chunks = Vec::new();
        for chunk in 0..self.n_chunks() {
            let mut sums = vec![0_u64; n];
            for (layer, program, entry) in self.small.chunk(chunk) {
                let sizes = self.small.opened.sizes(plan, entry);
                let bytes = saved_bytes(layer, &plan.mesh, &sizes, program, self.element_bytes);
                for (device, bytes) in bytes.into_iter().enumerate() {
                    let rank = plan.stage_of_chunk(chunk) as usize * n + device;
                    add(&mut found.saved, saved_name(rank, layer_idx), bytes);
                    sums[device] += bytes;
                }
                layer_idx += 1;
            }
            chunks.push(sums);
        }
        chunks
    }
}
