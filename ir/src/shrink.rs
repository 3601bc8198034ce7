//! Shrinks a plan to what runs on CPU threads: structure, schedule, strategies and storage kept, sizes reduced.
//!
//! Every mesh axis longer than one gets two devices: the smallest degree at which each of its collectives still moves
//! something. Blocks that were unequal stay so, for the length of what is cut is free (an odd vocabulary over two).
//! Stages go to at most four, micro-batches to two more than stages, and a chunk keeps one layer of every entry.
//! Entries are text by name, so they are kept word for word: what the small plan runs is what the large one runs.

use crate::mesh::{Mesh, MeshAxis};
use crate::native;
use crate::plan::check::{OpenPlan, check_plan, open};
use crate::plan::{Job, Plan, PlanError};
use crate::schedule::Schedule;

mod structure;
mod dims;
mod lengths;
mod attributes;
#[cfg(test)]
mod tests;

use structure::Structure;

/// Most ranks of a shrunk plan unless the user asks for more: threads of one machine.
pub const DEFAULT_MAX_RANKS: u64 = 64;

/// Devices of an axis of more than one device, once shrunk.
const AXIS_DEVICES: u64 = 2;

/// How small is small enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShrinkLimits {
    /// Most ranks: devices of the mesh times stages.
    pub max_ranks: u64,
}

/// A shrunk plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Shrunk {
    /// The plan; it passes [`check_plan`].
    pub plan: Plan,
    /// What was shrunk, one line each: `axis x0: 64 -> 2`.
    pub changes: Vec<String>,
    /// For every rank of the small plan, the rank of the cluster for which it stands: the links between two ranks are
    /// those between the two for which they stand.
    pub stands_for: Vec<u64>,
}

impl Shrunk {
    /// A plan that is small enough as it is.
    pub fn whole(plan: &Plan) -> Self {
        Self { plan: plan.clone(), changes: Vec::new(), stands_for: stands_for(plan, plan) }
    }
}

/// Why a plan cannot be shrunk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShrinkError {
    /// Even two stages are too many ranks.
    #[error("the smallest form of this plan has {needed} ranks, which exceeds the limit of {limit}")]
    TooManyRanks {
        /// Ranks of the smallest form.
        needed: u64,
        /// Ranks allowed.
        limit: u64,
    },
    /// The plan is wrong before anything is shrunk.
    #[error("{}: {}", .0.place, .0.what)]
    Plan(PlanError),
    /// The model has a relation between its sizes that shrinking does not know.
    #[error("the shrunk plan would be wrong at {}: {}", .0.place, .0.what)]
    Broken(PlanError),
}

/// Shrinks a plan.
///
/// # Errors
/// Where the plan is wrong, or its smallest form is above the limit or would be wrong.
pub fn shrink(plan: &Plan, limits: &ShrinkLimits) -> Result<Shrunk, ShrinkError> {
    let opened = open(plan).map_err(ShrinkError::Plan)?;
    let small = |mesh: &Mesh| small_mesh(plan, mesh);
    let structure = structure::reduce(plan, &opened, &|mesh| small(mesh).n_devices(), limits)?;
    let mut stage_meshes: Vec<Mesh> = structure.meshes.iter().map(small).collect();
    let mesh = stage_meshes.first().cloned().unwrap_or_else(|| small(&plan.mesh));
    if stage_meshes.iter().all(|own| *own == mesh) {
        stage_meshes.clear();
    }
    let own_table = matches!(structure.schedule, Schedule::Custom(_));
    let n_slices = if own_table { plan.slices.len() } else { structure.schedule.n_slices() as usize };
    let of_entry = |entry: usize| (plan.mesh_of_entry(entry).clone(), small(plan.mesh_of_entry(entry)));
    let meshes: Vec<(Mesh, Mesh)> = (0..opened.entries.len()).map(of_entry).collect();
    let sizes = lengths::reduce(plan, &opened, &meshes, n_slices);
    let mut model = attributes::adapt(plan, &opened, &sizes);
    model.sequence = structure::sequence(&structure.chunks, &opened);
    model.default_sequence = sizes.sequence;
    let mut small = Plan {
        mesh,
        stage_meshes,
        n_stages: structure.n_stages,
        schedule: structure.schedule,
        n_micro_batches: structure.n_micro_batches,
        shares: Vec::new(),
        micro_batch: sizes.micro_batch,
        slices: sizes.slices.clone(),
        job: Job {
            sequence: sizes.sequence,
            global_batch: sizes.micro_batch * structure.n_micro_batches,
            ..plan.job
        },
        chunks: structure.chunks.clone(),
        model: native::write(&model),
        predicted: None,
        search: None,
        runners_up: Vec::new(),
        warnings: Vec::new(),
        forms: Vec::new(),
        ..plan.clone()
    };
    small.shares = small_shares(plan, &small);
    check_plan(&small).map_err(ShrinkError::Broken)?;
    let reopened = open(&small).map_err(ShrinkError::Broken)?;
    small.roles = reopened.roles(&small);
    let changes = changes(plan, &small, &structure, (&opened, &reopened));
    let stands_for = stands_for(plan, &small);
    Ok(Shrunk { plan: small, changes, stands_for })
}

/// Coordinates are spread evenly over the large axis or stages: the second of two stands at the middle, so that an axis
/// that leaves the node in the large plan leaves it in the small one.
fn stands_for(plan: &Plan, small: &Plan) -> Vec<u64> {
    let spread = |at: u64, few: u64, many: u64| at * (many / few.max(1));
    let stage_of = |stage: u64| match plan.stage_meshes.as_slice() {
        [] => spread(stage, small.n_stages, plan.n_stages),
        // The first of those that it was made of, whose mesh is like its own.
        _ => {
            let chunk = small.chunks_of_stage(stage).first().copied().unwrap_or(0);
            let first = structure::group(plan, chunk, small.chunks.len()).start;
            plan.stages_of_chunk(first).first().copied().unwrap_or(0)
        }
    };
    let rank = |rank: u64| {
        let (stage, device) = small.seat(rank);
        let (own, large) = (small.mesh_of(stage), stage_of(stage));
        let (mesh, at) = (plan.mesh_of(large), own.coordinates(device));
        let device: u64 = own
            .axis_ids()
            .map(|axis| spread(at[axis.0], own.size(axis), mesh.size(axis)) * mesh.stride(axis))
            .sum();
        plan.cluster_rank(large, device)
    };
    (0..small.n_devices()).map(rank).collect()
}

/// A mesh of a plan with two devices along every axis that has several; where stages have an axis of several lengths,
/// the longer are twice as long as the shortest.
fn small_mesh(plan: &Plan, mesh: &Mesh) -> Mesh {
    // Which ranks share a device shows only where all are there; such clusters are small.
    if plan.cluster.shares_devices() {
        return mesh.clone();
    }
    let small = |(at, axis): (usize, &MeshAxis)| {
        let all = plan.stage_meshes.iter().filter_map(|mesh| mesh.axes.get(at));
        let least = all.map(|axis| axis.size).fold(axis.size, u64::min);
        let shortest = least.min(AXIS_DEVICES);
        let size = if axis.size == least { shortest } else { 2 * shortest };
        MeshAxis { name: axis.name.clone(), size }
    };
    Mesh { axes: mesh.axes.iter().enumerate().map(small).collect() }
}

/// Unequal shares of the small axis: which coordinate runs more stays so, by as little as the schedule has tables for.
fn small_shares(plan: &Plan, small: &Plan) -> Vec<u64> {
    let n = small.n_micro_batches;
    let size = small.mesh.axes.first().map_or(1, |axis| axis.size);
    let (first, second) = plan.shares.split_at(plan.shares.len() / 2);
    if plan.shares.is_empty() || size < AXIS_DEVICES {
        return Vec::new();
    }
    let has_tables = |more: &u64| [n - more, n + more].iter().all(|&share| small.actions_of(share).is_ok());
    let more = (1..n).find(has_tables).unwrap_or(0);
    match first.iter().sum::<u64>() < second.iter().sum() {
        true => vec![n - more, n + more],
        false => vec![n + more, n - more],
    }
}

fn changes(plan: &Plan, small: &Plan, structure: &Structure, models: (&OpenPlan, &OpenPlan)) -> Vec<String> {
    let layers = |plan: &Plan| plan.chunks.iter().flatten().map(|run| run.count).sum::<u64>();
    let mut pairs: Vec<(String, u64, u64)> = Vec::new();
    for (old, new) in plan.mesh.axes.iter().zip(&small.mesh.axes) {
        pairs.push((format!("axis {}", old.name), old.size, new.size));
    }
    let wider = plan.stage_meshes.iter().filter(|mesh| **mesh != plan.mesh);
    for (old, new) in wider.flat_map(|mesh| mesh.axes.iter().zip(small_mesh(plan, mesh).axes)) {
        let pair = (format!("axis {}", old.name), old.size, new.size);
        if !pairs.contains(&pair) {
            pairs.push(pair);
        }
    }
    let virtual_stages = |plan: &Plan| u64::from(plan.schedule.n_virtual_stages());
    pairs.extend([
        ("stages".into(), plan.n_stages, structure.n_stages),
        ("virtual stages".into(), virtual_stages(plan), virtual_stages(small)),
        ("ranks".into(), plan.n_devices(), small.n_devices()),
        ("layers".into(), layers(plan), layers(small)),
        ("micro-batches".into(), plan.n_micro_batches, small.n_micro_batches),
        ("sequences of a micro-batch".into(), plan.micro_batch, small.micro_batch),
        ("slices of a sequence".into(), plan.n_slices(), small.n_slices()),
        ("tokens of a sequence".into(), plan.job.sequence, small.job.sequence),
    ]);
    let mut lines: Vec<String> = pairs
        .into_iter()
        .filter(|(_, old, new)| old != new)
        .map(|(name, old, new)| format!("{name}: {old} -> {new}"))
        .collect();
    let text = |shares: &[u64]| shares.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
    if !plan.shares.is_empty() {
        lines.push(format!("shares: {} -> {}", text(&plan.shares), text(&small.shares)));
    }
    lines.extend(attributes::changes(&models.0.model, &models.1.model));
    lines
}
