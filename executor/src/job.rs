//! What is run: the model, the choices made for its layers, the pipeline's table of actions, and the batch.
//!
//! Plain data, all of `ir`: who made the choices and how they were shrunk is of no concern here.

use std::collections::{BTreeMap, BTreeSet};

use ir::graph::{Layer, Model, TensorId};
use ir::lower::{LayerChoice, Recompute};
use ir::mesh::{Mesh, Meshes};
use ir::plan::shares::AXIS;
use ir::program::{Home, Storage};
use ir::schedule::{Action, Placement, Section, TableShape};
use ir::sharding::Sharding;
use ir::slices::Slices;
use ir::strategy::Strategy;
use ir::token_order::TokenOrder;

use crate::element::Edges;

use crate::run::Tensors;
use crate::states::States;

pub use crate::kernels::optimizer::AdamW;

/// One training run of a few steps.
#[derive(Clone, Debug)]
pub struct Execution<'a> {
    /// The model.
    pub model: &'a Model,
    /// The meshes of the stages; where they are not alike, of other lengths along the same axes.
    pub meshes: Meshes<'a>,
    /// Pipeline ranks. The run's ranks are the devices of the first, in order, then those of the next.
    pub n_stages: u32,
    /// Which pipeline rank holds which chunk.
    pub placement: Placement,
    /// The model's layers, cut.
    pub chunks: Vec<Chunk>,
    /// What the chunks refer to: a kind of layer (its index in the model) and what was chosen for it.
    pub choices: Vec<(usize, LayerChoice)>,
    /// Sequences of one micro-batch, over the whole mesh.
    pub micro_batch: u64,
    /// Micro-batches of a step; of the average coordinate of the outermost axis, where these run unequal shares.
    pub n_micro_batches: u32,
    /// What each coordinate of the outermost axis of the mesh runs, where they run unequal shares; else nothing.
    pub shares: Vec<Share>,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// How a sequence's tokens are laid out before they are cut.
    pub tokens: TokenLayout,
    /// Where a sequence is cut into slices that run one by one. The model's layers and choices are then the sliced
    /// ones.
    pub slices: Slices,
    /// What every pipeline rank runs, in order; where shares are unequal, with most micro-batches.
    pub table: Vec<Vec<Action>>,
    /// Of parameters and tokens.
    pub seed: u64,
    /// Parameters that begin with these numbers instead of drawn ones.
    pub given: Tensors,
    /// Updates to run.
    pub steps: u32,
    /// Settings of the update.
    pub optimizer: AdamW,
    /// How numbers are rounded where they leave an operator or a rank.
    pub edges: Edges,
    /// What a run of more than a few steps asks for.
    pub training: Training<'a>,
}

/// What one coordinate of the outermost axis of the mesh runs of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Micro-batches.
    pub n_micro_batches: u32,
    /// Its devices' actions, by pipeline rank.
    pub table: Vec<Vec<Action>>,
}

/// What a run of more than a few steps asks for.
#[derive(Clone, Copy, Debug)]
pub struct Training<'a> {
    /// What the tokens are.
    pub text: Text,
    /// States with which the run begins, behind the steps and sequences that they have seen; nothing for a fresh start.
    pub from: Option<&'a States>,
    /// What the outcome tells.
    pub record: Recorded,
}

impl Training<'_> {
    /// A check of a few steps: tokens that have nothing in them to learn, every gradient and parameter told.
    pub const CHECK: Self = Self { text: Text::Noise, from: None, record: Recorded::EveryStep };
}

/// What the tokens of a run are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Text {
    /// Each token is drawn alone.
    Noise,
    /// Each token but a few follows from the one before by one rule: a model can learn to predict it.
    Chain,
}

/// What the outcome of a run tells of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recorded {
    /// Gradients and parameters of every step.
    EveryStep,
    /// The states after the last step, whole and as the ranks hold them.
    States,
}

/// Consecutive layers that run as one action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Per layer, the index of its entry in `Execution::choices`.
    pub layers: Vec<usize>,
}

/// How the tokens of a sequence are laid out before they are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenLayout {
    /// Which tokens a part holds.
    pub order: TokenOrder,
    /// Parts.
    pub parts: u64,
}

impl TokenLayout {
    /// As tokens come.
    pub const NATURAL: Self = Self { order: TokenOrder::Natural, parts: 1 };
}

/// A layer of the model: its place in the order of all layers, embedding and head included.
pub type LayerIdx = usize;

/// A layer as the run sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Instance {
    /// Index of its kind in the model.
    pub(crate) kind: usize,
    /// Index of its entry in `Execution::choices`.
    pub(crate) choice: usize,
    /// Its chunk.
    pub(crate) chunk: u32,
}

impl<'a> Execution<'a> {
    /// Ranks of the run.
    pub fn n_ranks(&self) -> u64 {
        self.meshes.first(u64::from(self.n_stages))
    }

    /// Mesh of a stage.
    pub(crate) fn mesh_of(&self, stage: u32) -> &'a Mesh {
        self.meshes.of(u64::from(stage))
    }

    /// Mesh of the stages with a chunk.
    pub(crate) fn mesh_of_chunk(&self, chunk: usize) -> &'a Mesh {
        let mut stages = self.placement.ranks(self.n_stages, chunk as u32);
        stages.next().map_or(self.meshes.alike, |stage| self.mesh_of(stage))
    }

    /// Mesh on which a choice is run.
    pub(crate) fn mesh_of_choice(&self, choice: usize) -> &'a Mesh {
        let has = |chunk: &Chunk| chunk.layers.contains(&choice);
        let chunk = if self.meshes.each.is_empty() { None } else { self.chunks.iter().position(has) };
        chunk.map_or(self.meshes.alike, |chunk| self.mesh_of_chunk(chunk))
    }

    /// The counts that fix the table's actions.
    pub fn shape(&self) -> TableShape {
        let most = self.shares.iter().map(|share| share.n_micro_batches).max();
        self.shape_of(most.unwrap_or(self.n_micro_batches))
    }

    /// The same of devices that run so many micro-batches.
    pub(crate) fn shape_of(&self, n_micro_batches: u32) -> TableShape {
        let (n_stages, placement) = (self.n_stages, self.placement);
        TableShape { n_stages, placement, n_micro_batches, n_slices: self.slices.n() }
    }

    /// What a device of a stage runs, in order.
    pub(crate) fn row(&self, stage: u32, device: u64) -> &[Action] {
        let share = self.coordinate(device).and_then(|at| self.shares.get(at as usize));
        &share.map_or(&self.table, |share| &share.table)[stage as usize]
    }

    /// Coordinate of a device along the outermost axis, where shares are unequal.
    pub(crate) fn coordinate(&self, device: u64) -> Option<u64> {
        (!self.shares.is_empty()).then(|| device / self.meshes.alike.stride(AXIS))
    }

    /// The micro-batch of the whole mesh, and the device on it, of whose sequences a device has its next micro-batch,
    /// the `at`-th of a step. Coordinates of the outermost axis take their sequences one after the other:
    ///
    /// `block = sum of the shares before + at; micro-batch = block / coordinates, coordinate = block mod coordinates`
    pub(crate) fn source(&self, device: u64, at: u64) -> (u64, u64) {
        let Some(own) = self.coordinate(device) else { return (at, device) };
        let before = self.shares.iter().take(own as usize);
        let block = before.map(|share| u64::from(share.n_micro_batches)).sum::<u64>() + at;
        let (stride, size) = (self.meshes.alike.stride(AXIS), self.meshes.alike.size(AXIS));
        (block / size, block % size * stride + device % stride)
    }

    /// All layers in the model's order.
    pub(crate) fn instances(&self) -> Vec<Instance> {
        let of_chunk = |(chunk, layers): (usize, &Chunk)| {
            let instance = move |choice: &usize| Instance {
                kind: self.choices[*choice].0,
                choice: *choice,
                chunk: chunk as u32,
            };
            layers.layers.iter().map(instance).collect::<Vec<_>>()
        };
        self.chunks.iter().enumerate().flat_map(of_chunk).collect()
    }
}

/// What one device computes with everything on it: the owned parts of the run that judges another.
#[derive(Clone, Debug)]
pub struct Reference {
    mesh: Mesh,
    chunk: Chunk,
    choices: Vec<(usize, LayerChoice)>,
    table: Vec<Vec<Action>>,
}

impl Reference {
    /// The one-device counterpart of an execution: same model, parameters, tokens and updates.
    pub fn of(execution: &Execution<'_>) -> Self {
        let kinds = execution.model.kinds_in_order();
        let used: BTreeMap<usize, usize> = {
            let mut sorted = kinds.clone();
            sorted.sort_unstable();
            sorted.dedup();
            sorted.into_iter().enumerate().map(|(entry, kind)| (kind, entry)).collect()
        };
        let choices = used.keys().map(|&kind| (kind, whole_choice(&execution.model.layers[kind]))).collect();
        let action =
            |section, micro_batch| Action { rank: 0, section, virtual_stage: 0, micro_batch, slice: 0 };
        let micro_batches = 0..execution.n_micro_batches;
        let row =
            micro_batches.flat_map(|m| [action(Section::Forward, m), action(Section::Backward, m)]).collect();
        Self {
            mesh: Mesh { axes: Vec::new() },
            chunk: Chunk { layers: kinds.iter().map(|kind| used[kind]).collect() },
            choices,
            table: vec![row],
        }
    }

    /// The run itself.
    pub fn execution<'a>(&'a self, of: &Execution<'a>) -> Execution<'a> {
        Execution {
            meshes: Meshes::all(&self.mesh),
            n_stages: 1,
            shares: Vec::new(),
            placement: Placement::Looped { virtual_stages: 1 },
            chunks: vec![self.chunk.clone()],
            choices: self.choices.clone(),
            tokens: TokenLayout::NATURAL,
            slices: Slices::whole(of.sequence),
            table: self.table.clone(),
            ..of.clone()
        }
    }
}

/// Everything whole, kept, and stored as used.
fn whole_choice(layer: &Layer) -> LayerChoice {
    let storage = |tensor: TensorId| (tensor, Storage::default());
    LayerChoice {
        stream: Sharding::REPLICATED,
        out: Sharding::REPLICATED,
        strategies: vec![Strategy::SAME; layer.ops.len()],
        recompute: vec![Recompute::Keep; layer.ops.len()],
        kept: Home::Device,
        parameters: Home::Device,
        storage: layer.parameters().map(storage).collect(),
        shared: BTreeSet::new(),
    }
}
