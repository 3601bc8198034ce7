//! Runs an execution: every rank on a thread of its own, then what they hold joined into whole tensors.

use std::collections::BTreeMap;

use ir::graph::TensorId;
use ir::lower::lower;
use ir::program::{Program, Update};
use ndarray::ArrayD;

use crate::assemble::{Layout, assemble};
use crate::convert::Seat;
use crate::counters::Counters;
use crate::error::ExecutorError;
use crate::fabric::{RankComm, TierOf, run_ranks};
use crate::instruction::CollectiveKind;
use crate::job::{Execution, LayerIdx};
use crate::kernels::Real;
use crate::label::Class;
use crate::memory::{self, MemoryPlan, RankMemory};
use crate::prepare::{ParameterKey, Prepared};
use crate::rank::{Rank, Record};
use crate::routing::Routes;

/// A parameter by the layer that has it and its name there.
pub type ParameterName = (LayerIdx, String);

/// Whole tensors of every parameter.
pub type Tensors = BTreeMap<ParameterName, ArrayD<f64>>;

/// What a run gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Per step, the mean loss over all tokens that count.
    pub losses: Vec<f64>,
    /// Per step, the gradient of every parameter, whole and summed over ranks, micro-batches and tied copies, which
    /// have none of their own.
    pub gradients: Vec<Tensors>,
    /// Per step, every parameter after its update.
    pub parameters: Vec<Tensors>,
    /// Bytes sent by all ranks, by label, kind and link tier.
    pub counters: Counters,
    /// Operators of every layer.
    pub n_ops: Vec<usize>,
    /// Per rank and layer, bytes kept from forward to backward of one micro-batch.
    pub saved: Vec<BTreeMap<LayerIdx, u64>>,
    /// Per rank and layer, bytes carried from one part of backward to the other of one micro-batch.
    pub carried: Vec<BTreeMap<LayerIdx, u64>>,
    /// Per rank, the most bytes so kept at one time.
    pub peak_saved: Vec<u64>,
    /// Per rank, its arena, planned and as it was used; empty where only numbers were wanted.
    pub memory: Vec<RankMemory>,
    /// Experts chosen by every router: noted by a run on one device, for [`run_routed`].
    pub routes: Routes,
    /// Per layer, choices of experts that found no slot, and all choices: noted by a run on one device.
    pub dropped: BTreeMap<LayerIdx, (u64, u64)>,
    /// Per layer, how often a router's choice was fixed against its own, over all ranks, micro-batches and steps.
    pub rerouted: BTreeMap<LayerIdx, u64>,
}

impl Outcome {
    /// Bytes sent by all ranks, by what they were for, kind of collective and link tier.
    pub fn traffic(&self) -> BTreeMap<(Class, CollectiveKind, usize), u64> {
        let mut sums = BTreeMap::new();
        for (traffic, bytes) in self.counters.sent() {
            if let Some(class) = Class::of_label(&traffic.label) {
                *sums.entry((class, traffic.kind, traffic.tier)).or_insert(0) += bytes;
            }
        }
        sums
    }
}

/// The program of every entry of `Execution::choices`.
///
/// # Errors
/// A choice that cannot be lowered, or one of a layer that the model lacks.
pub fn programs(execution: &Execution<'_>) -> Result<Vec<Program>, ExecutorError> {
    let one = |(kind, choice): &(usize, _)| {
        let layer = execution.model.layers.get(*kind);
        let layer = layer.ok_or_else(|| ExecutorError::Unfit(format!("layer kind {kind} does not exist")))?;
        let sizes = layer.sizes(execution.micro_batch, execution.sequence);
        Ok(lower(layer, execution.mesh, &sizes, choice)?)
    };
    execution.choices.iter().map(one).collect()
}

/// Lowers and runs an execution in numbers of type `E`; `tier_of` names the link between two ranks.
///
/// # Errors
/// Parts that do not fit together, whatever goes wrong while ranks run, and ranks that end with different numbers for
/// the same element.
pub fn run<E: Real>(execution: &Execution<'_>, tier_of: &TierOf<'_>) -> Result<Outcome, ExecutorError> {
    let (programs, routes) = (programs(execution)?, Routes::default());
    run_prepared::<E>(&Prepared::new(execution, &programs, &routes)?, &[], tier_of)
}

/// Like [`run_programs`], but routers choose the experts that a reference run chose: in single precision rounding may decide
/// between two that are close. What was fixed is in [`Outcome::rerouted`].
///
/// # Errors
/// As for [`run`], and for a reference of another batch.
pub fn run_routed<E: Real>(
    execution: &Execution<'_>,
    programs: &[Program],
    reference: &Outcome,
    tier_of: &TierOf<'_>,
) -> Result<Outcome, ExecutorError> {
    run_in_arenas::<E>(&Prepared::new(execution, programs, &reference.routes)?, tier_of)
}

/// Runs an execution with given programs, one per entry of its choices, each rank in an arena that was planned before.
///
/// # Errors
/// As for [`run`].
pub fn run_programs<E: Real>(
    execution: &Execution<'_>,
    programs: &[Program],
    tier_of: &TierOf<'_>,
) -> Result<Outcome, ExecutorError> {
    run_in_arenas::<E>(&Prepared::new(execution, programs, &Routes::default())?, tier_of)
}

/// Plans the memory of every rank and holds the run to it.
fn run_in_arenas<E: Real>(prepared: &Prepared<'_>, tier_of: &TierOf<'_>) -> Result<Outcome, ExecutorError> {
    run_prepared::<E>(prepared, &memory::plans(prepared, size_of::<E>() as u64), tier_of)
}

fn run_prepared<E: Real>(
    prepared: &Prepared<'_>,
    plans: &[MemoryPlan],
    tier_of: &TierOf<'_>,
) -> Result<Outcome, ExecutorError> {
    let execution = prepared.execution;
    let n_ranks = execution.n_ranks() as usize;
    let body =
        |comm: &mut RankComm<'_, E>| Rank::new(prepared, comm.rank(), plans.get(comm.rank()))?.run(comm);
    let (records, counts): (Vec<Record>, Vec<Counters>) =
        run_ranks::<E, Record, _>(n_ranks, tier_of, body)?.into_iter().unzip();
    let mut counters = Counters::default();
    counts.iter().for_each(|one| counters.merge(one));
    let joined = Joined { prepared, records: &records, seats: seats(execution) };
    Ok(Outcome {
        losses: joined.losses()?,
        gradients: joined.tensors(|record| &record.gradients, Of::Gradients)?,
        parameters: joined.tensors(|record| &record.parameters, Of::Parameters)?,
        counters,
        n_ops: (0..prepared.instances.len()).map(|layer_idx| prepared.layer(layer_idx).ops.len()).collect(),
        saved: records.iter().map(|record| record.saved.clone()).collect(),
        carried: records.iter().map(|record| record.carried.clone()).collect(),
        peak_saved: records.iter().map(|record| record.peak_saved).collect(),
        memory: records.iter().map(|record| record.memory).filter(|_| !plans.is_empty()).collect(),
        routes: records.first().map(|record| record.routes.clone()).unwrap_or_default(),
        dropped: records.first().map(|record| record.dropped.clone()).unwrap_or_default(),
        rerouted: rerouted(&records),
    })
}

fn rerouted(records: &[Record]) -> BTreeMap<LayerIdx, u64> {
    let mut sums = BTreeMap::new();
    for (&layer_idx, &n) in records.iter().flat_map(|record| &record.rerouted) {
        *sums.entry(layer_idx).or_insert(0) += n;
    }
    sums
}

fn seats<'a>(execution: &Execution<'a>) -> Vec<Seat<'a>> {
    (0..execution.n_ranks() as usize).map(|rank| Seat::new(execution.mesh, rank)).collect()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Gradients,
    Parameters,
}

struct Joined<'a> {
    prepared: &'a Prepared<'a>,
    records: &'a [Record],
    seats: Vec<Seat<'a>>,
}

impl Joined<'_> {
    /// The sum over the pipeline ranks that have the last layer; every rank of one of them has its part.
    fn losses(&self) -> Result<Vec<f64>, ExecutorError> {
        let execution = self.prepared.execution;
        let n = execution.mesh.n_devices() as usize;
        let mut totals = vec![0.0; execution.steps as usize];
        let last = self.prepared.instances.len().saturating_sub(1);
        for stage in self.prepared.stages_of(last) {
            let first = stage as usize * n;
            let losses = &self.records[first].losses;
            for (rank, record) in self.records.iter().enumerate().skip(first + 1).take(n - 1) {
                let pairs = record.losses.iter().zip(losses).enumerate();
                if let Some((step, (&other, &own))) = pairs.into_iter().find(|(_, (other, own))| other != own)
                {
                    let what = format!("the loss of step {step}");
                    return Err(ExecutorError::Disagreement {
                        what,
                        element: 0,
                        ranks: (first, rank),
                        values: (own, other),
                    });
                }
            }
            totals.iter_mut().zip(losses).for_each(|(total, loss)| *total += loss);
        }
        let mean = |(step, total): (usize, &f64)| total / self.prepared.n_counted(step as u64) as f64;
        Ok(totals.iter().enumerate().map(mean).collect())
    }

    fn tensors(
        &self,
        parts: impl Fn(&Record) -> &Vec<BTreeMap<ParameterKey, Vec<f64>>>,
        of: Of,
    ) -> Result<Vec<Tensors>, ExecutorError> {
        let run = self.prepared;
        let mut steps = Vec::new();
        for step in 0..run.execution.steps as usize {
            let parts: Vec<_> = self.records.iter().map(|record| &parts(record)[step]).collect();
            let mut tensors = Tensors::new();
            for layer_idx in 0..run.instances.len() {
                for update in &run.program(layer_idx).updates {
                    let key = (layer_idx, update.tensor);
                    if of == Of::Gradients && run.is_copy(key) {
                        continue;
                    }
                    let whole = assemble(&self.seats, &parts, key, &self.layout(key, update, (of, step)))?;
                    tensors.insert((layer_idx, name(run, key)), whole);
                }
            }
            steps.push(tensors);
        }
        Ok(steps)
    }

    fn layout(&self, key: ParameterKey, update: &Update, (of, step): (Of, usize)) -> Layout {
        let (what, cut) = match of {
            Of::Gradients => ("the gradient of ", update.storage.optimizer),
            Of::Parameters => ("", update.storage.parameter),
        };
        Layout {
            what: format!("{what}`{}` of layer {} in step {step}", name(self.prepared, key), key.0),
            shape: self.prepared.shape(key.0, key.1),
            used: update.used,
            cut,
        }
    }
}

fn name(run: &Prepared<'_>, (layer_idx, tensor): (LayerIdx, TensorId)) -> String {
    run.tensor_name(layer_idx, tensor).to_owned()
}

#[cfg(test)]
mod tests;
