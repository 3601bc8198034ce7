//! What storage and recomputation are called: ZeRO's stages, what hosts hold, how much is computed again.

use crate::graph::{Layer, OpId, TensorId};
use crate::lower::{LayerChoice, Recompute, backward_reads, gradient_tensors, whole_axes};
use crate::mesh::Mesh;
use crate::names::votes::{body, is_expert_op, majority};
use crate::names::{Offload, OnHost, OnNvme, PlacedLayer, RecomputeRole, Zero};
use crate::op::OpKind;
use crate::program::{AxisSet, Home, StateHome};
use crate::signature::signature;
use crate::strategy::placements;

/// The cut of most of the dense parameters, by elements. Frozen ones have one state, the parameter: where most of them
/// are cut that is stage 3, else the learned ones say what is cut. What its use cuts over all devices says nothing
/// beside replicas, or beside matrices that are whole: there is nothing left of it to cut.
pub(super) fn zero((mesh, dp): (&Mesh, u64), layers: &[PlacedLayer]) -> Zero {
    let votes = |held: fn(&Layer, TensorId) -> bool| {
        let of_layer = |placed: PlacedLayer| {
            let layer = placed.layer;
            let dense = layer.op_ids().filter(|op| !is_expert_op(layer, &layer.ops[op.0]));
            dense.flat_map(|op| parameter_cuts(mesh, placed, op, held)).collect::<Vec<_>>()
        };
        let all: Vec<Cut> = body(layers).into_iter().flat_map(of_layer).collect();
        let only_whole = dp > 1 || all.iter().any(|cut| cut.is_whole && cut.is_matrix);
        majority(all.iter().filter(|cut| cut.is_whole || !only_whole).map(|cut| (cut.stage, cut.elements)))
    };
    let frozen = votes(|layer, tensor| !layer.is_trained(tensor)).filter(|(stage, _)| *stage > 0);
    let (stage, hybrid) = frozen.or_else(|| votes(Layer::is_trained)).unwrap_or((0, None));
    Zero { stage, hybrid }
}

/// How a parameter is stored.
struct Cut {
    /// ZeRO stage, and the devices of its group where these are fewer than hold the same.
    stage: (u8, Option<u64>),
    /// In all layers of its kind.
    elements: u64,
    /// Whether several devices use the same of it.
    is_whole: bool,
    is_matrix: bool,
}

/// How those parameters of an operator are stored that are held so.
fn parameter_cuts(
    mesh: &Mesh,
    placed: PlacedLayer,
    op: OpId,
    held: fn(&Layer, TensorId) -> bool,
) -> Vec<Cut> {
    let (layer, choice) = (placed.layer, placed.choice);
    let used = placements(&signature(layer, &layer.ops[op.0]), choice.strategies[op.0]).operands;
    let operands = layer.ops[op.0].operands.iter().zip(used);
    let parameters = operands.filter(|(tensor, _)| layer.is_parameter(**tensor) && held(layer, **tensor));
    let size = |set: AxisSet| set.axes().into_iter().map(|axis| mesh.size(axis)).product::<u64>();
    parameters
        .filter_map(|(tensor, used)| {
            let storage = choice.storage.get(tensor)?;
            let whole = size(whole_axes(mesh, used));
            let cuts = [(3, storage.parameter), (2, storage.gradient), (1, storage.optimizer)];
            let (stage, cut) =
                cuts.into_iter().find(|(_, cut)| !cut.is_empty()).unwrap_or((0, AxisSet::EMPTY));
            let hybrid = (stage > 0 && size(cut) < whole).then(|| size(cut));
            Some(Cut {
                stage: (stage, hybrid),
                elements: layer.parameter_elements(*tensor).saturating_mul(placed.count),
                is_whole: whole > 1,
                is_matrix: layer.tensors[tensor.0].dims.len() >= 2,
            })
        })
        .collect()
}

/// Where the optimizer states of all learned parameters are.
pub(super) fn optimizer_homes(layers: &[PlacedLayer]) -> Vec<StateHome> {
    let homes = |placed: &PlacedLayer| {
        let (layer, choice) = (placed.layer, placed.choice);
        let learned = choice.storage.iter().filter(|(tensor, _)| layer.is_trained(**tensor));
        learned.map(|(_, storage)| storage.home).collect::<Vec<_>>()
    };
    layers.iter().flat_map(homes).collect()
}

pub(super) fn offload(homes: &[StateHome]) -> Offload {
    match (homes.iter().any(|home| home.is_updated_by_host()), homes.contains(&StateHome::Device)) {
        (false, _) => Offload::None,
        (true, true) => Offload::Some,
        (true, false) => Offload::Optimizer,
    }
}

pub(super) fn on_nvme(homes: &[StateHome]) -> OnNvme {
    match (homes.contains(&StateHome::Nvme), homes.contains(&StateHome::Host)) {
        (false, _) => OnNvme::None,
        (true, true) => OnNvme::Some,
        (true, false) => OnNvme::All,
    }
}

pub(super) fn on_host(layers: &[PlacedLayer], home: fn(&LayerChoice) -> Home) -> OnHost {
    let on_host = |placed: &PlacedLayer| home(placed.choice) == Home::Host;
    let body = body(layers);
    match (layers.iter().any(on_host), body.iter().all(on_host)) {
        (false, _) => OnHost::None,
        (true, false) => OnHost::Some,
        (true, true) => OnHost::All,
    }
}

pub(super) fn recompute(layers: &[PlacedLayer]) -> RecomputeRole {
    let mut kinds: Vec<RecomputeRole> = body(layers).into_iter().map(layer_recompute).collect();
    kinds.dedup();
    match kinds.as_slice() {
        [] => RecomputeRole::None,
        [one] => *one,
        _ => RecomputeRole::Selective,
    }
}

/// Full where every value that backward reads is computed again from the stream.
fn layer_recompute(placed: PlacedLayer) -> RecomputeRole {
    let layer = placed.layer;
    let again = |op: OpId| placed.choice.recompute.get(op.0) == Some(&Recompute::Again);
    let gradients = gradient_tensors(layer);
    let read_by_backward: Vec<OpId> = layer
        .ops
        .iter()
        .flat_map(|op| backward_reads(op, &gradients).into_iter().map(|i| op.operands[i]))
        .filter_map(|tensor| original_producer(layer, tensor))
        .collect();
    match (read_by_backward.iter().all(|&op| again(op)), layer.op_ids().any(again)) {
        (true, true) => RecomputeRole::Full,
        (false, true) => RecomputeRole::Selective,
        (_, false) => RecomputeRole::None,
    }
}

/// The operator that computes a tensor, seen through forks, whose results are their operand.
fn original_producer(layer: &Layer, mut tensor: TensorId) -> Option<OpId> {
    loop {
        let op = layer.producer(tensor)?;
        if layer.ops[op.0].kind != OpKind::Fork {
            return Some(op);
        }
        tensor = layer.ops[op.0].operands[0];
    }
}
