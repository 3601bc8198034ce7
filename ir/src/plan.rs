//! The plan document: everything that fixes a run, and what was predicted for it, in a form people read and edit.
//!
//! A plan is self-contained: it embeds the model and the cluster it was made for. It is text where the program has
//! numbers: axes, dims, operators and parameters stand by name. [`check::open`] turns it back into a graph, choices
//! and programs, and says where it is wrong; whoever reads a plan from a file starts there.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cluster::{Cluster, Precision};
use crate::engine::Engine;
use crate::mesh::{Mesh, Meshes};
use crate::names::Roles;
use crate::native::{LayerDocument, ModelDocument};
use crate::schedule::{self, Action, Schedule, TableShape};
use crate::token_order::TokenOrder;
use crate::work::AttentionKernel;

pub mod prediction;
pub mod entry;
mod cluster_check;
mod mesh_check;
mod ties_check;
mod rules;
pub mod sliced;
pub mod shares;
pub mod check;
#[cfg(test)]
pub(crate) mod samples;
#[cfg(test)]
mod tests;

use entry::Entry;
use prediction::{Prediction, RunnerUp, SearchReport};

/// Version of the plan document that this build reads and writes.
pub const PLAN_SCHEMA_VERSION: u32 = 1;

/// A way to train a model on a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Version of this form: 1.
    pub schema_version: u32,
    /// Version of the planner that wrote it.
    pub tool_version: String,
    /// Digests of the two inputs.
    pub inputs: InputDigests,
    /// What to train with.
    pub job: Job,
    /// The plan in the literature's words. Derived from the rest, and never read back.
    pub roles: Roles,
    /// The devices of one stage as a grid.
    pub mesh: Mesh,
    /// The grid of every stage, where they have not all that one: the same axes, of other lengths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stage_meshes: Vec<Mesh>,
    /// From stage and mesh coordinates to ranks of the cluster.
    pub rank_map: RankMap,
    /// Pipeline ranks.
    pub n_stages: u64,
    /// Order of forwards and backwards.
    pub schedule: Schedule,
    /// The table of a `custom` schedule: per pipeline rank its actions in order, such as `F0 F1 B0 B1`. `F0.1` is the
    /// forward of micro-batch 0 on virtual stage 1, `F0/1` that of its slice 1; B is a full backward, I and W are its
    /// two parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<Vec<String>>,
    /// Tokens of every slice that sequences are cut into, in order; empty where they are not cut.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slices: Vec<u64>,
    /// Sequences of one micro-batch, over the whole mesh of a stage.
    pub micro_batch: u64,
    /// Micro-batches of a step; of the average coordinate of the outermost axis, where these run unequal shares.
    pub n_micro_batches: u64,
    /// Micro-batches of a step that each coordinate of the outermost axis of the mesh runs, where they run unequal
    /// shares.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<u64>,
    /// The choices that the chunks refer to by position.
    pub entries: Vec<Entry>,
    /// Layers in model order, cut into chunks; the schedule's placement says which ranks hold them.
    pub chunks: Vec<Vec<EntryRun>>,
    /// What the cost model says of it; absent in a plan made for a check of its numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Prediction>,
    /// How it was found; absent where nothing was searched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub search: Option<SearchReport>,
    /// The next best, and why they lost.
    #[serde(default)]
    pub runners_up: Vec<RunnerUp>,
    /// What the reader should know before trusting it.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Layers of `model` that stand for layers of the model that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forms: Vec<LayerForm>,
    /// The machines.
    pub cluster: Cluster,
    /// The model, in the forms that were chosen.
    pub model: ModelDocument,
}

/// A layer that computes the same as one of the model that was asked for, with some parameters side by side in one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LayerForm {
    /// Name of the layer in the plan's model.
    pub layer: String,
    /// Its parameters that hold several of the original's, by name: `q+k+v`.
    pub fused: Vec<String>,
    /// The layer as it was asked for.
    pub original: LayerDocument,
}

/// Digests of the inputs a plan was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InputDigests {
    /// Of the model description, as `algorithm:hex`.
    pub model: String,
    /// Of the cluster description, as `algorithm:hex`.
    pub cluster: String,
}

/// What to train with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Sequences of a step.
    pub global_batch: u64,
    /// Number format of the computation.
    pub precision: Precision,
    /// Update rule.
    pub optimizer: Optimizer,
    /// Implementation of the attention core.
    pub attention: AttentionKernel,
    /// Which tokens of a cut sequence a device holds.
    pub token_order: TokenOrder,
    /// The software that runs it, where it is not the default.
    #[serde(default, skip_serializing_if = "Engine::is_default")]
    pub engine: Engine,
}

/// Update rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101).
    AdamW,
}

/// From stage and mesh coordinates to ranks of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RankMap {
    /// `devices of the stages before + row-major position on the mesh`.
    StageMajor,
}

/// Neighbouring layers of equal choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EntryRun {
    /// Position in the plan's entries.
    pub entry: usize,
    /// Layers.
    pub count: u64,
}

/// What is wrong with a plan, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct PlanError {
    /// Path of the place: `entries[1].ops[3].axes[0]`.
    pub place: String,
    /// What is wrong there.
    pub what: String,
}

impl PlanError {
    /// An error at a place.
    pub(crate) fn new(place: impl Into<String>, what: impl Into<String>) -> Self {
        Self { place: place.into(), what: what.into() }
    }
}

impl Plan {
    /// The meshes of the stages.
    pub fn meshes(&self) -> Meshes<'_> {
        Meshes { alike: &self.mesh, each: &self.stage_meshes }
    }

    /// Rank of the cluster at a position on the mesh of a stage.
    ///
    /// On a mesh of 8, position 3 of stage 2 is rank 19.
    pub fn cluster_rank(&self, stage: u64, mesh_rank: u64) -> u64 {
        match self.rank_map {
            RankMap::StageMajor => self.meshes().first(stage) + mesh_rank,
        }
    }

    /// The stage that has a rank, and the rank's position on its mesh.
    pub fn seat(&self, rank: u64) -> (u64, u64) {
        match self.rank_map {
            RankMap::StageMajor => self.meshes().seat(rank),
        }
    }

    /// Devices that work; where ranks share devices, ranks.
    pub fn n_devices(&self) -> u64 {
        self.meshes().first(self.n_stages)
    }

    /// Devices that work, however many ranks they run.
    pub fn n_whole_devices(&self) -> u64 {
        let ranks = self.n_devices();
        match self.cluster.shares_devices() && ranks > 0 {
            true => self.cluster.device_of(ranks - 1).0 + 1,
            false => ranks,
        }
    }

    /// The devices of a stage.
    pub fn mesh_of(&self, stage: u64) -> &Mesh {
        self.meshes().of(stage)
    }

    /// The devices of the stages that hold a chunk.
    pub fn mesh_of_chunk(&self, chunk: usize) -> &Mesh {
        if self.stage_meshes.is_empty() {
            return &self.mesh;
        }
        self.stages_of_chunk(chunk).first().map_or(&self.mesh, |&stage| self.mesh_of(stage))
    }

    /// The devices on which an entry is run.
    pub fn mesh_of_entry(&self, entry: usize) -> &Mesh {
        if self.stage_meshes.is_empty() {
            return &self.mesh;
        }
        let has = |runs: &Vec<EntryRun>| runs.iter().any(|run| run.entry == entry);
        self.chunks.iter().position(has).map_or(&self.mesh, |chunk| self.mesh_of_chunk(chunk))
    }

    /// Pipeline ranks that hold a chunk; the first owns its parameters.
    pub fn stages_of_chunk(&self, chunk: usize) -> Vec<u64> {
        let n_stages = u32::try_from(self.n_stages).unwrap_or(u32::MAX).max(1);
        let ranks = self.schedule.placement().ranks(n_stages, u32::try_from(chunk).unwrap_or(u32::MAX));
        ranks.map(u64::from).collect()
    }

    /// Chunks of a pipeline rank, by virtual stage.
    pub fn chunks_of_stage(&self, stage: u64) -> Vec<usize> {
        let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let chunks = self.schedule.placement().chunks_of(narrow(self.n_stages).max(1), narrow(stage));
        chunks.map(|chunk| chunk as usize).collect()
    }

    /// Slices of every sequence, one where they are not cut.
    pub fn n_slices(&self) -> u64 {
        (self.slices.len() as u64).max(1)
    }

    /// What every pipeline rank runs, in order: the schedule's table, or the one that the plan brings. Where devices
    /// run unequal shares, that of those with most micro-batches.
    ///
    /// # Errors
    /// A schedule without a table for these counts, or a table that is wrong.
    pub fn actions(&self) -> Result<Vec<Vec<Action>>, PlanError> {
        self.actions_of(self.most_micro_batches())
    }

    /// The same of devices that run so many micro-batches.
    ///
    /// # Errors
    /// A schedule without a table for these counts, or a table that is wrong.
    pub fn actions_of(&self, n_micro_batches: u64) -> Result<Vec<Vec<Action>>, PlanError> {
        let (Ok(n_stages), Ok(n_micro_batches)) =
            (u32::try_from(self.n_stages), u32::try_from(n_micro_batches))
        else {
            return Err(PlanError::new("schedule", "too many stages or micro-batches for a schedule"));
        };
        let wrong = |place: &str| {
            let place = place.to_owned();
            move |error: schedule::ScheduleError| PlanError::new(place, error.to_string())
        };
        let Some(rows) = &self.table else {
            return schedule::table(self.schedule, n_stages, n_micro_batches).map_err(wrong("schedule"));
        };
        let Schedule::Custom(_) = self.schedule else {
            let what = format!("`{}` writes its own table; only `custom` takes one", self.schedule);
            return Err(PlanError::new("table", what));
        };
        if rows.len() as u64 != self.n_stages {
            let what = format!("expected a row for each of {n_stages} stages, found {}", rows.len());
            return Err(PlanError::new("table", what));
        }
        let read = |(rank, row): (usize, &String)| {
            schedule::parse_row(rank as u32, row)
                .map_err(|error| PlanError::new(format!("table[{rank}]"), error.to_string()))
        };
        let table: Vec<Vec<Action>> = rows.iter().enumerate().map(read).collect::<Result<_, _>>()?;
        schedule::check_table(&table, self.table_shape()).map_err(wrong("table"))?;
        Ok(table)
    }

    /// Micro-batches of the devices that run most.
    pub fn most_micro_batches(&self) -> u64 {
        self.shares.iter().copied().max().unwrap_or(self.n_micro_batches)
    }

    /// Micro-batches that a device of a stage runs.
    pub fn micro_batches_of(&self, stage: u64, device: u64) -> u64 {
        let mesh = self.mesh_of(stage);
        let at = mesh.axis_ids().next().map_or(0, |outermost| device / mesh.stride(outermost));
        self.shares.get(at as usize).copied().unwrap_or(self.n_micro_batches)
    }

    /// The counts that fix the table's actions.
    pub fn table_shape(&self) -> TableShape {
        let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        TableShape {
            n_stages: narrow(self.n_stages),
            placement: self.schedule.placement(),
            n_micro_batches: narrow(self.most_micro_batches()),
            n_slices: narrow(self.n_slices()),
        }
    }

    /// Layers of a chunk.
    pub fn chunk_layers(&self, chunk: usize) -> u64 {
        self.chunks.get(chunk).map_or(0, |runs| runs.iter().map(|run| run.count).sum())
    }

    /// How many layers of the model have each entry.
    pub fn entry_counts(&self) -> Vec<u64> {
        let mut counts = vec![0_u64; self.entries.len()];
        for run in self.chunks.iter().flatten() {
            if let Some(count) = counts.get_mut(run.entry) {
                *count = count.saturating_add(run.count);
            }
        }
        counts
    }
}
