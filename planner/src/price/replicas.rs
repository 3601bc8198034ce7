//! Coordinates of the outermost axis that run unequal shares of the micro-batches, each a pipeline on its own devices.
//!
//! ```text
//! pipeline = max over coordinates of the pipeline of their micro-batches on their devices   -> step::timed()
//! memory   = of each coordinate, with as many micro-batches in flight as its table holds     -> fullest()
//! ```
//! Coordinates on the same devices with the same share are priced once. What a step sends once goes along the axis too:
//! it is priced on the slowest device and the links of the cluster, as for a stage on several kinds of devices.

use cost_model::MemoryBreakdown;
use ir::plan::check::OpenPlan;
use ir::plan::prediction::SharePrediction;
use ir::plan::{Plan, shares};

use crate::price::grounds::Grounds;
use crate::price::parts;
use crate::price::setting::{Entry, Setting};
use crate::price::stage_memory::stage_memory;
use crate::price::staged::Staged;
use crate::price::step::peaks;

/// Coordinates on the same devices with the same share.
#[derive(Clone, Debug)]
pub struct Replica {
    /// Along the outermost axis, in rising order.
    pub coordinates: Vec<u64>,
    /// Micro-batches that each of them runs.
    pub n_micro_batches: u64,
    /// Priced choices.
    pub entries: Vec<Entry>,
    /// Per chunk, runs of (entry, count).
    pub chunks: Vec<Vec<(usize, u64)>>,
    /// Devices under each stage.
    pub stages: Vec<StageDevices>,
}

/// The devices of one coordinate under a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct StageDevices {
    /// Name of the slowest.
    pub device: String,
    /// Bytes of the smallest.
    pub memory: f64,
    /// Power limit of the slowest, where it is known.
    pub watts: Option<f64>,
    /// Whether the coordinate lies on devices of one kind.
    pub kinds: Kinds,
}

/// Whether devices are of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kinds {
    /// All alike.
    One,
    /// They differ.
    Several,
}

/// The replicas of a plan whose coordinates run unequal shares; none where all run the same.
pub(crate) fn replicas(plan: &Plan, opened: &OpenPlan, setting: &Setting<'_>) -> Vec<Replica> {
    let mut list: Vec<Replica> = Vec::new();
    for (coordinate, &share) in (0..).zip(&plan.shares) {
        let along = |stage: u64| {
            let each = plan.mesh.stride(shares::AXIS);
            let first = plan.meshes().first(stage) + coordinate * each;
            first..first + each
        };
        let grounds = Grounds::over(setting, plan.n_stages, (plan.meshes(), &along));
        let stages: Vec<StageDevices> =
            (0..plan.n_stages).map(|stage| devices(&grounds, stage, along(stage))).collect();
        let same = |one: &&mut Replica| one.n_micro_batches == share && one.stages == stages;
        if let Some(known) = list.iter_mut().find(same) {
            known.coordinates.push(coordinate);
            continue;
        }
        let (entries, chunks) = parts(plan, opened, &grounds);
        let coordinates = vec![coordinate];
        list.push(Replica { coordinates, n_micro_batches: share, entries, chunks, stages });
    }
    list
}

fn devices(grounds: &Grounds<'_>, stage: u64, ranks: std::ops::Range<u64>) -> StageDevices {
    let setting = grounds.at(stage as usize);
    let device = setting.machine.device;
    let groups = setting.machine.cluster.groups_under(ranks);
    let kinds = if groups.iter().all(|group| group.device == *device) { Kinds::One } else { Kinds::Several };
    StageDevices { device: device.name.clone(), memory: setting.memory, watts: device.watts, kinds }
}

impl Replica {
    /// Peak memory of its devices of a stage.
    pub fn memory(&self, setting: &Setting<'_>, staged: &Staged<'_>, stage: usize) -> MemoryBreakdown {
        let own = staged.of(self);
        let held = peaks(&own).ok().and_then(|held| held.get(stage).cloned());
        stage_memory(setting, &own, stage, &held.unwrap_or_default())
    }
}

/// Of replicas, the one whose devices of a stage are fullest: what they hold, and what they have; nothing without
/// replicas.
pub fn fullest(setting: &Setting<'_>, staged: &Staged<'_>, stage: usize) -> Option<(MemoryBreakdown, f64)> {
    let of_one = |one: &Replica| (one.memory(setting, staged, stage), one.stages[stage].memory);
    let share = |(memory, has): &(MemoryBreakdown, f64)| memory.total().0 / has;
    staged.replicas.iter().map(of_one).max_by(|a, b| share(a).total_cmp(&share(b)))
}

/// Every replica as a plan reports it; `times` are those of their pipelines, in order.
pub(crate) fn reported(staged: &Staged<'_>, times: &[ir::units::Seconds]) -> Vec<SharePrediction> {
    let one = |(replica, &pipeline_s): (&Replica, &ir::units::Seconds)| {
        let mut devices: Vec<String> = replica.stages.iter().map(|stage| stage.device.clone()).collect();
        devices.dedup();
        SharePrediction {
            coordinates: replica.coordinates.clone(),
            devices,
            n_micro_batches: replica.n_micro_batches,
            pipeline_s,
        }
    };
    staged.replicas.iter().zip(times).map(one).collect()
}
