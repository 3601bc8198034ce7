//! Runs an execution: every rank on a thread of its own, then what they hold joined into whole tensors.

use std::collections::BTreeMap;

use ir::graph::{Model, TensorId};
use ir::lower::lower;
use ir::program::{AxisSet, HeldParameter, Program};
use ndarray::ArrayD;

use crate::assemble::{Layout, assemble};
use crate::audit::Audit;
use crate::convert::Seat;
use crate::counters::Counters;
use crate::error::ExecutorError;
use crate::fabric::{RankComm, TierOf, run_observed_ranks};
use crate::initial;
use crate::instruction::CollectiveKind;
use crate::job::{Execution, LayerIdx, Recorded};
use crate::kernels::Real;
use crate::label::Class;
use crate::lifetimes::{self, RankPlan};
use crate::memory::RankMemory;
use crate::observe::{Nobody, Observer};
use crate::offload::HostMoves;
use crate::prepare::{ParameterKey, Prepared};
use crate::rank::{Rank, Record};
use crate::routing::Routes;
use crate::states::{Moments, Shard, States};
use crate::update::{Carried, flat_cut};

/// A parameter by the layer that has it and its name there.
pub type ParameterName = (LayerIdx, String);

/// Whole tensors of every parameter.
pub type Tensors = BTreeMap<ParameterName, ArrayD<f64>>;

/// What a run gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Per step, the mean loss over all tokens that count.
    pub losses: Vec<f64>,
    /// Per step, the gradient of every parameter, whole and summed over ranks, micro-batches and tied copies, which
    /// have none of their own.
    pub gradients: Vec<Tensors>,
    /// Per step, every parameter after its update.
    pub parameters: Vec<Tensors>,
    /// After the last step, what training needs to go on, where it was asked for.
    pub states: Option<States>,
    /// The same as every rank holds it.
    pub shards: Vec<Vec<Shard>>,
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
    /// Per rank, its arena in the host's memory, likewise.
    pub host: Vec<RankMemory>,
    /// Per rank, its arena on the host's drives, likewise.
    pub nvme: Vec<RankMemory>,
    /// Per rank, what it moved between device, host and drives.
    pub moved: Vec<HostMoves>,
    /// Experts chosen by every router: noted by a run on one device, for [`run_routed`].
    pub routes: Routes,
    /// Per layer, choices of experts that found no slot, and all choices: noted by a run on one device.
    pub dropped: BTreeMap<LayerIdx, (u64, u64)>,
    /// What operators rounded in the first step, over all ranks, where numbers are rounded; empty elsewhere.
    pub audit: Audit,
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
    let one = |(at, (kind, choice)): (usize, &(usize, _))| {
        let layer = execution.model.layers.get(*kind);
        let layer = layer.ok_or_else(|| ExecutorError::Unfit(format!("layer kind {kind} does not exist")))?;
        let sizes = execution.slices.sizes(layer, execution.micro_batch, 0);
        Ok(lower(layer, execution.mesh_of_choice(at), &sizes, choice)?)
    };
    execution.choices.iter().enumerate().map(one).collect()
}

/// Lowers and runs an execution in numbers of type `E`; `tier_of` names the link between two ranks.
///
/// # Errors
/// Parts that do not fit together, whatever goes wrong while ranks run, and ranks that end with different numbers for
/// the same element.
pub fn run<E: Real>(execution: &Execution<'_>, tier_of: &TierOf<'_>) -> Result<Outcome, ExecutorError> {
    let (programs, routes) = (programs(execution)?, Routes::default());
    run_prepared::<E>(&Prepared::new(execution, &programs, &routes)?, &[], (tier_of, &Nobody))
}

/// Like [`run_programs`], but routers choose the experts that a reference run chose: in single precision rounding may
/// decide between two that are close. What was fixed is in [`Outcome::rerouted`].
///
/// # Errors
/// As for [`run`], and for a reference of another batch.
pub fn run_routed<E: Real>(
    execution: &Execution<'_>,
    programs: &[Program],
    reference: &Outcome,
    tier_of: &TierOf<'_>,
) -> Result<Outcome, ExecutorError> {
    run_observed::<E>(execution, (programs, &reference.routes), (tier_of, &Nobody))
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
    run_observed::<E>(execution, (programs, &Routes::default()), (tier_of, &Nobody))
}

/// Like [`run_programs`], telling an observer what every rank does; routers choose the experts that `routes` names.
///
/// # Errors
/// As for [`run_routed`].
pub fn run_observed<E: Real>(
    execution: &Execution<'_>,
    (programs, routes): (&[Program], &Routes),
    (tier_of, observer): (&TierOf<'_>, &dyn Observer),
) -> Result<Outcome, ExecutorError> {
    let prepared = Prepared::new(execution, programs, routes)?;
    run_prepared::<E>(&prepared, &lifetimes::plans(&prepared, size_of::<E>() as u64), (tier_of, observer))
}

/// Words of a model: rows of the smallest table that its labels and the tokens before them point into.
pub fn vocabulary(model: &Model) -> Option<u64> {
    initial::Texts::of(model).and_then(|texts| texts.vocabulary())
}

/// The states with which a run begins.
///
/// # Errors
/// As for [`run`].
pub fn start(execution: &Execution<'_>) -> Result<States, ExecutorError> {
    let (programs, routes) = (programs(execution)?, Routes::default());
    let prepared = Prepared::new(execution, &programs, &routes)?;
    let own = prepared.initial.iter().filter(|(key, _)| !prepared.is_copy(**key));
    let parameters = own.map(|(&key, value)| ((key.0, name(&prepared, key)), value.clone())).collect();
    let before = execution.training.from;
    Ok(States {
        steps: before.map_or(0, |before| before.steps),
        sequences: before.map_or(0, |before| before.sequences),
        parameters,
        moments: before.map_or(BTreeMap::new(), |before| before.moments.clone()),
    })
}

fn run_prepared<E: Real>(
    prepared: &Prepared<'_>,
    plans: &[RankPlan],
    listening: (&TierOf<'_>, &dyn Observer),
) -> Result<Outcome, ExecutorError> {
    let execution = prepared.execution;
    let n_ranks = execution.n_ranks() as usize;
    let body =
        |comm: &mut RankComm<'_, E>| Rank::new(prepared, comm.rank(), plans.get(comm.rank()))?.run(comm);
    let (records, counts): (Vec<Record>, Vec<Counters>) =
        run_observed_ranks::<E, Record, _>(n_ranks, listening, body)?.into_iter().unzip();
    let mut counters = Counters::default();
    counts.iter().for_each(|one| counters.merge(one));
    let joined = Joined { prepared, records: &records, seats: seats(execution) };
    Ok(Outcome {
        losses: joined.losses()?,
        gradients: joined.tensors(|record| &record.gradients, Of::Gradients)?,
        parameters: joined.tensors(|record| &record.parameters, Of::Parameters)?,
        states: joined.states()?,
        shards: joined.shards()?,
        counters,
        n_ops: (0..prepared.instances.len()).map(|layer_idx| prepared.layer(layer_idx).ops.len()).collect(),
        saved: records.iter().map(|record| record.saved.clone()).collect(),
        carried: records.iter().map(|record| record.carried.clone()).collect(),
        peak_saved: records.iter().map(|record| record.peak_saved).collect(),
        memory: records.iter().map(|record| record.memory).filter(|_| !plans.is_empty()).collect(),
        host: records.iter().map(|record| record.host).filter(|_| !plans.is_empty()).collect(),
        nvme: records.iter().map(|record| record.nvme).filter(|_| !plans.is_empty()).collect(),
        moved: records.iter().map(|record| record.moved).collect(),
        routes: records.first().map(|record| record.routes.clone()).unwrap_or_default(),
        dropped: records.first().map(|record| record.dropped.clone()).unwrap_or_default(),
        audit: audit(&records),
        rerouted: rerouted(&records),
    })
}

fn audit(records: &[Record]) -> Audit {
    let mut all = Audit::new();
    for (&key, &one) in records.iter().flat_map(|record| &record.audit) {
        all.entry(key).or_default().add(one);
    }
    all
}

fn rerouted(records: &[Record]) -> BTreeMap<LayerIdx, u64> {
    let mut sums = BTreeMap::new();
    for (&layer_idx, &n) in records.iter().flat_map(|record| &record.rerouted) {
        *sums.entry(layer_idx).or_insert(0) += n;
    }
    sums
}

fn seats<'a>(execution: &Execution<'a>) -> Vec<Seat<'a>> {
    (0..execution.n_ranks() as usize).map(|rank| Seat::new(execution.meshes, rank)).collect()
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
    /// The sum over the pipeline ranks that have the last layer, and over coordinates that run unequal shares: of each
    /// all ranks have the same.
    fn losses(&self) -> Result<Vec<f64>, ExecutorError> {
        let execution = self.prepared.execution;
        let mut totals = vec![0.0; execution.steps as usize];
        let last = self.prepared.instances.len().saturating_sub(1);
        for stage in self.prepared.stages_of(last) {
            let first = execution.meshes.first(u64::from(stage)) as usize;
            let n = execution.mesh_of(stage).n_devices() as usize;
            let n_alike = n / execution.shares.len().max(1);
            for ranks in (first..first + n).collect::<Vec<_>>().chunks(n_alike.max(1)) {
                let losses = self.alike(ranks)?;
                totals.iter_mut().zip(losses).for_each(|(total, loss)| *total += loss);
            }
        }
        let mean = |(step, total): (usize, &f64)| total / self.prepared.n_counted(step as u64) as f64;
        Ok(totals.iter().enumerate().map(mean).collect())
    }

    /// The losses of ranks that must have the same.
    fn alike(&self, ranks: &[usize]) -> Result<&[f64], ExecutorError> {
        let Some((&first, others)) = ranks.split_first() else { return Ok(&[]) };
        let losses = &self.records[first].losses;
        for &rank in others {
            let pairs = self.records[rank].losses.iter().zip(losses).enumerate();
            if let Some((step, (&other, &own))) = pairs.into_iter().find(|(_, (other, own))| other != own) {
                let what = format!("the loss of step {step}");
                let (ranks, values) = ((first, rank), (own, other));
                return Err(ExecutorError::Disagreement { what, element: 0, ranks, values });
            }
        }
        Ok(losses)
    }

    fn tensors(
        &self,
        parts: impl Fn(&Record) -> &Vec<BTreeMap<ParameterKey, Vec<f64>>>,
        of: Of,
    ) -> Result<Vec<Tensors>, ExecutorError> {
        let run = self.prepared;
        let mut steps = Vec::new();
        let n_recorded = self.records.iter().map(|record| parts(record).len()).min().unwrap_or(0);
        for step in 0..n_recorded {
            let parts: Vec<_> = self.records.iter().map(|record| &parts(record)[step]).collect();
            let mut tensors = Tensors::new();
            for layer_idx in 0..run.instances.len() {
                for held in run.program(layer_idx).used() {
                    let key = (layer_idx, held.tensor);
                    if of == Of::Gradients && (!held.trained || run.is_copy(key)) {
                        continue;
                    }
                    let layout = self.layout(key, &held, (of, step));
                    let whole = assemble(&self.seats, &parts, run.holder(key), &layout)?;
                    tensors.insert((layer_idx, name(run, key)), whole);
                }
            }
            steps.push(tensors);
        }
        Ok(steps)
    }

    /// What every rank carries on.
    fn shards(&self) -> Result<Vec<Vec<Shard>>, ExecutorError> {
        let run = self.prepared;
        let of_rank = |(seat, record): (&Seat<'_>, &Record)| {
            let one = |(&key, Carried { values, moments }): (&ParameterKey, &Carried)| {
                let (held, shape) = (run.held(key)?, run.shape(key.0, key.1));
                let block = seat.block(held.used, &shape);
                let cut = flat_cut(seat, block.len() as u64, carried_cut(&held));
                let start = cut.start() as u64;
                Ok(Shard {
                    name: (key.0, name(run, key)),
                    shape,
                    block: block.rows(),
                    elements: start..start + values.len() as u64,
                    values: values.clone(),
                    moments: moments.clone(),
                })
            };
            record.states.iter().map(one).collect()
        };
        self.seats.iter().zip(self.records).map(of_rank).collect()
    }

    /// What they carry on, whole.
    fn states(&self) -> Result<Option<States>, ExecutorError> {
        let run = self.prepared;
        let execution = run.execution;
        match execution.training.record {
            Recorded::EveryStep => return Ok(None),
            Recorded::States => {}
        }
        let (before, steps) = (execution.training.from, u64::from(execution.steps));
        let per_step = u64::from(execution.n_micro_batches) * execution.micro_batch;
        let mut states = States {
            steps: before.map_or(0, |before| before.steps) + steps,
            sequences: before.map_or(0, |before| before.sequences) + steps * per_step,
            ..States::default()
        };
        for layer_idx in 0..run.instances.len() {
            for held in run.program(layer_idx).held() {
                let key = (layer_idx, held.tensor);
                let name = (layer_idx, name(run, key));
                if let Some(whole) = self.state((key, &held), &|carried| Some(&carried.values))? {
                    states.parameters.insert(name.clone(), whole);
                }
                let moment = |i: usize| {
                    self.state((key, &held), &move |carried| carried.moments.as_ref().map(|both| &both[i]))
                };
                if let (Some(first), Some(second)) = (moment(0)?, moment(1)?) {
                    states.moments.insert(name, Moments { first, second });
                }
            }
        }
        Ok(Some(states))
    }

    /// One of the states of a parameter, whole; nothing where no rank has it.
    fn state(
        &self,
        (key, held): (ParameterKey, &HeldParameter),
        of: &dyn Fn(&Carried) -> Option<&Vec<f64>>,
    ) -> Result<Option<ArrayD<f64>>, ExecutorError> {
        let part = |record: &Record| {
            let values = record.states.get(&key).and_then(of).cloned();
            values.map(|values| (key, values)).into_iter().collect::<BTreeMap<_, _>>()
        };
        let parts: Vec<_> = self.records.iter().map(part).collect();
        if parts.iter().all(BTreeMap::is_empty) {
            return Ok(None);
        }
        let parts: Vec<_> = parts.iter().collect();
        let layout = Layout {
            what: format!("a state of `{}` of layer {}", name(self.prepared, key), key.0),
            shape: self.prepared.shape(key.0, key.1),
            used: held.used,
            cut: carried_cut(held),
        };
        assemble(&self.seats, &parts, key, &layout).map(Some)
    }

    fn layout(&self, key: ParameterKey, held: &HeldParameter, (of, step): (Of, usize)) -> Layout {
        let (what, cut) = match of {
            Of::Gradients => ("the gradient of ", held.storage.optimizer),
            Of::Parameters => ("", held.storage.parameter),
        };
        Layout {
            what: format!("{what}`{}` of layer {} in step {step}", name(self.prepared, key), key.0),
            shape: self.prepared.shape(key.0, key.1),
            used: held.used,
            cut,
        }
    }
}

/// Cut of what a rank carries from step to step: the update's, or that of a parameter that is never updated.
fn carried_cut(held: &HeldParameter) -> AxisSet {
    if held.trained { held.storage.optimizer } else { held.storage.parameter }
}

fn name(run: &Prepared<'_>, (layer_idx, tensor): (LayerIdx, TensorId)) -> String {
    run.tensor_name(layer_idx, tensor).to_owned()
}

#[cfg(test)]
mod tests;
