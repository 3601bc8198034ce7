//! Whether parameters that are one are treated as one: in use, in storage, and where their gradient is summed.

use std::collections::BTreeSet;

use crate::graph::{ParameterRef, TensorId};
use crate::mesh::Mesh;
use crate::plan::check::{OpenPlan, fail};
use crate::plan::{Plan, PlanError};
use crate::program::Home;
use crate::sharding::Sharding;
use crate::signature::signature;
use crate::strategy::placements;

/// Checks that both sides of every tie are used and stored alike, and that nothing else is held by another layer.
pub(super) fn check_ties(plan: &Plan, open: &OpenPlan) -> Result<(), PlanError> {
    for (i, tie) in open.model.ties.iter().enumerate() {
        let place = format!("model.ties[{i}]");
        let (Some(owner), Some(copy)) = (tied(plan, open, tie.owner), tied(plan, open, tie.copy)) else {
            return fail(place, "no entry holds this parameter");
        };
        if owner.shape != copy.shape {
            return fail(place, "parameters that are one must have the same dims in the same order");
        }
        if owner.mesh != copy.mesh {
            return fail(place, "parameters that are one must be on stages of one mesh");
        }
        if owner.used != copy.used {
            return fail(place, "parameters that are one must be used in the same sharding");
        }
        if owner.storage != copy.storage {
            return fail(place, "parameters that are one must be stored in the same way");
        }
        if copy.is_shared && owner.stages != copy.stages {
            return fail(place, "the copy is `shared`, but its owner is on another stage");
        }
        if copy.is_shared && owner.home != copy.home {
            return fail(
                place,
                "the copy is `shared`, but its layer and its owner's hold parameters in different memories",
            );
        }
        if copy.is_shared && owner.gradient != copy.gradient {
            return fail(
                place,
                "the copy is `shared`, but its gradient is summed along other axes than its owner's",
            );
        }
    }
    check_shared(open)
}

/// Only the copy of a tie is held by another.
fn check_shared(open: &OpenPlan) -> Result<(), PlanError> {
    let is_copy = |layer: usize, tensor: TensorId| {
        open.model.ties.iter().any(|tie| tie.copy == ParameterRef { layer, tensor })
    };
    for (i, entry) in open.entries.iter().enumerate() {
        if let Some(tensor) = entry.choice.shared.iter().find(|&&tensor| !is_copy(entry.layer, tensor)) {
            let name = &open.layer(i).tensors[tensor.0].name;
            return fail(
                format!("entries[{i}].parameters"),
                format!("`{name}` is `shared`, but it is not the copy of a tie"),
            );
        }
    }
    Ok(())
}

/// What must be equal of two parameters that are one.
struct Tied {
    mesh: Mesh,
    shape: Vec<u64>,
    used: Option<Sharding>,
    storage: Option<crate::program::Storage>,
    /// How backward leaves its gradient.
    gradient: Option<Sharding>,
    /// Pipeline ranks that have the layer.
    stages: BTreeSet<u64>,
    /// Where the layer's parameters are between uses.
    home: Home,
    is_shared: bool,
}

fn tied(plan: &Plan, open: &OpenPlan, side: ParameterRef) -> Option<Tied> {
    let entry = open.entries.iter().position(|entry| entry.layer == side.layer)?;
    let (layer, choice) = (open.layer(entry), &open.entries[entry].choice);
    let reader = layer.reader(side.tensor);
    let placed = reader.and_then(|op| {
        let at = layer.ops[op.0].operands.iter().position(|&tensor| tensor == side.tensor)?;
        let placed = placements(&signature(layer, &layer.ops[op.0]), choice.strategies[op.0]);
        Some((*placed.operands.get(at)?, *placed.operand_gradients.get(at)?))
    });
    let chunks =
        (0..plan.chunks.len()).filter(|&chunk| plan.chunks[chunk].iter().any(|run| run.entry == entry));
    Some(Tied {
        mesh: plan.mesh_of_entry(entry).clone(),
        shape: layer.shape(side.tensor, &open.sizes(plan, entry)),
        used: placed.map(|(used, _)| used),
        storage: choice.storage.get(&side.tensor).copied(),
        gradient: placed.map(|(_, gradient)| gradient),
        stages: chunks.flat_map(|chunk| plan.stages_of_chunk(chunk)).collect(),
        home: choice.parameters,
        is_shared: choice.shared.contains(&side.tensor),
    })
}
