//! The literature's names for what a plan does: `dp`, `tp`, `ZeRO-3` and the rest, read off strategies and storage.
//!
//! Nothing else in the program uses these words to decide anything. A name is derived from which loop an axis cuts in
//! the products of most of a layer's weights, never from an operator: the batch (data), the sequence (context), the
//! sequence there and the heads inside attention (Ulysses), a loop of the weights (tensor); and the experts (expert).
//! Attention is the operator whose keys may travel; the experts are the dim before the slots; the vocabulary is the dim
//! of unequal blocks.

use crate::graph::Layer;
use crate::lower::LayerChoice;
use crate::mesh::{AxisId, Mesh};
use crate::schedule::Schedule;

pub mod axes;
mod storage;
#[cfg(test)]
mod tests;
mod votes;
mod words;

use storage::{offload, on_host, on_nvme, optimizer_homes, recompute, zero};
pub use votes::naming_products;
use votes::{
    DenseRole, Loop, attention_of, cut_loop, cuts_vocabulary, dense_role, expert_loop, speakers, stream_cut,
};
pub use words::{Context, Offload, OnHost, OnNvme, RecomputeRole, Roles, Zero};

/// One layer kind under one choice.
#[derive(Clone, Copy, Debug)]
pub struct PlacedLayer<'a> {
    /// The kind.
    pub layer: &'a Layer,
    /// What was chosen.
    pub choice: &'a LayerChoice,
    /// How many layers of the model are so.
    pub count: u64,
}

/// What the names are read off.
#[derive(Clone, Debug)]
pub struct Arrangement<'a> {
    /// Mesh of every stage.
    pub mesh: &'a Mesh,
    /// Layers of all stages.
    pub layers: Vec<PlacedLayer<'a>>,
    /// Pipeline stages.
    pub n_stages: u64,
    /// Order of the micro-batches.
    pub schedule: Schedule,
    /// Sequences of one micro-batch over the mesh of a stage.
    pub micro_batch: u64,
    /// Micro-batches of a step.
    pub n_micro_batches: u64,
}

/// Names an arrangement.
pub fn roles(arrangement: &Arrangement) -> Roles {
    let mesh = arrangement.mesh;
    let speakers = speakers(&arrangement.layers);
    let axes: Vec<(AxisId, DenseRole)> = mesh
        .axis_ids()
        .filter(|&axis| mesh.size(axis) > 1)
        .map(|axis| (axis, dense_role(&speakers, axis)))
        .collect();
    let degree = |role: DenseRole| {
        axes.iter().filter(|(_, own)| *own == role).map(|(axis, _)| mesh.size(*axis)).product::<u64>()
    };
    let dp = degree(DenseRole::Data);
    let (gather, ulysses) = (degree(DenseRole::Gather), degree(DenseRole::Ulysses));
    let ring = degree(DenseRole::Ring);
    let context = match (ring > 1, gather > 1, ulysses > 1) {
        (true, true, true) => Some(Context::RingGatherAndUlysses),
        (true, true, false) => Some(Context::RingAndGather),
        (true, false, true) => Some(Context::RingAndUlysses),
        (true, false, false) => Some(Context::Ring),
        (false, true, true) => Some(Context::GatherAndUlysses),
        (false, true, false) => Some(Context::Gather),
        (false, false, true) => Some(Context::Ulysses),
        (false, false, false) => None,
    };
    let product = |test: &dyn Fn(AxisId) -> bool| {
        mesh.axis_ids().filter(|&axis| test(axis)).map(|axis| mesh.size(axis)).product::<u64>()
    };
    let tensor_axes = axes.iter().filter(|(_, role)| *role == DenseRole::Tensor);
    let homes = optimizer_homes(&arrangement.layers);
    Roles {
        dp,
        tp: degree(DenseRole::Tensor),
        sequence_parallel: tensor_axes.clone().any(|(axis, _)| stream_cut(&arrangement.layers, *axis)),
        cp: gather * ring * ulysses,
        context,
        ep: product(&|axis| expert_loop(&arrangement.layers, axis) == Some(Loop::Expert)),
        etp: product(&|axis| expert_loop(&arrangement.layers, axis) == Some(Loop::Weight)),
        pp: arrangement.n_stages,
        vpp: u64::from(arrangement.schedule.n_virtual_stages()),
        zero: zero((mesh, dp), &arrangement.layers),
        offload: offload(&homes),
        optimizer_on_nvme: on_nvme(&homes),
        kept_on_host: on_host(&arrangement.layers, |choice| choice.kept),
        parameters_on_host: on_host(&arrangement.layers, |choice| choice.parameters),
        recompute: recompute(&arrangement.layers),
        micro_batch: arrangement.micro_batch.div_ceil(dp),
        accumulation: arrangement.n_micro_batches,
        shares: None,
        vocabulary_parallel: product(&|axis| cuts_vocabulary(&arrangement.layers, axis)),
        same: degree(DenseRole::Same),
    }
}

/// Devices over which a sequence is cut where the order of its tokens matters: those of context parallelism, and those
/// along whose axes attention of some layer cuts its queries, whatever these are called.
pub fn token_parts(arrangement: &Arrangement) -> u64 {
    let (mesh, layers) = (arrangement.mesh, &arrangement.layers);
    let cuts_queries = |axis: AxisId| {
        layers.iter().any(|&placed| {
            attention_of(placed.layer).is_some_and(|op| cut_loop(placed, op, axis) == Some(Loop::Sequence))
        })
    };
    let speakers = speakers(layers);
    let is_context = |axis: AxisId| {
        matches!(dense_role(&speakers, axis), DenseRole::Gather | DenseRole::Ring | DenseRole::Ulysses)
    };
    let axes = mesh.axis_ids().filter(|&axis| mesh.size(axis) > 1);
    axes.filter(|&axis| is_context(axis) || cuts_queries(axis)).map(|axis| mesh.size(axis)).product()
}
