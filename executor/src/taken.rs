//! How much every rank takes from the files of which rank when it begins with the states of a checkpoint.
//!
//! Counted element by element in the blocks that a run cuts for its ranks; the planner's map (`planner::reshard`)
//! counts regions of whole tensors, and shares no code with this.

use std::collections::BTreeMap;

use ir::program::{AxisSet, Program};

use crate::checkpoint::Writers;
use crate::convert::Seat;
use crate::error::ExecutorError;
use crate::job::Execution;
use crate::prepare::{Prepared, unfit};
use crate::routing::Routes;
use crate::update::flat_cut;

/// Elements that a rank takes from the file of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elements {
    /// Of parameters, as they are stored.
    pub parameter: u64,
    /// Of parameters with their moments, as they are updated.
    pub optimizer: u64,
}

/// Elements by the rank that wrote them and the rank that takes them.
///
/// # Errors
/// An execution that does not fit, and writers of another model.
pub fn taken(
    execution: &Execution<'_>,
    programs: &[Program],
    writers: &Writers,
) -> Result<BTreeMap<(u64, u64), Elements>, ExecutorError> {
    let routes = Routes::default();
    let run = Prepared::new(execution, programs, &routes)?;
    let mut all: BTreeMap<(u64, u64), Elements> = BTreeMap::new();
    for rank in 0..execution.n_ranks() as usize {
        let seat = Seat::new(execution.meshes, rank);
        for layer_idx in run.layers_on(seat.stage) {
            for held in run.program(layer_idx).held() {
                let key = (layer_idx, held.tensor);
                // A copy begins with what its owner has.
                let tie = run.ties.iter().find(|tie| tie.copy == key);
                let owner = tie.map_or(key, |tie| tie.owner);
                let name = (owner.0, run.tensor_name(owner.0, owner.1).to_owned());
                let by = writers.get(&name);
                let by = by.ok_or_else(|| unfit(format!("nobody wrote `{}` of layer {}", name.1, name.0)))?;
                let by: Vec<u32> = by.iter().copied().collect();
                let shape = run.shape(layer_idx, held.tensor);
                let places = seat.block(held.used, &shape).positions(&shape);
                let writers_of = |cut: AxisSet| {
                    let cut = flat_cut(&seat, places.len() as u64, cut);
                    let own = places[cut.start()..cut.start() + cut.len()].iter();
                    own.filter_map(|&place| by.get(place))
                        .map(|&writer| u64::from(writer))
                        .collect::<Vec<_>>()
                };
                for writer in writers_of(held.storage.parameter) {
                    all.entry((writer, rank as u64)).or_default().parameter += 1;
                }
                if !held.trained || tie.is_some() || run.stage_of(layer_idx) != seat.stage {
                    continue;
                }
                for writer in writers_of(held.storage.optimizer) {
                    all.entry((writer, rank as u64)).or_default().optimizer += 1;
                }
            }
        }
    }
    Ok(all)
}
