//! The figures of a plan, from the plan alone: its programs lowered and priced again, its schedule simulated again.
//!
//! The search writes what comes out here, so that a plan that is read, edited or not, is priced as one that was found:
//! `found plan -> price == edited plan -> price`. Nothing is taken from the figures that a plan already holds.

use std::collections::{BTreeMap, BTreeSet};

use cost_model::uncertainty::Basis;
use cost_model::{Constants, RowPrice, SectionPrice, SimulateError};
use ir::plan::check::{OpenPlan, open};
use ir::plan::prediction::{Interval, Prediction};
use ir::plan::{Plan, PlanError};
use ir::schedule::{Action, Schedule, Section};
use ir::slices::Slices;
use ir::units::Seconds;

use crate::prices::Machine;
use crate::request::Job;

pub mod setting;
pub mod grounds;
pub mod crossing;
pub mod staged;
pub mod held;
pub mod step;
pub mod stage_memory;
pub mod replicas;
pub mod sent;
pub mod hosts;
pub mod prediction;
pub mod book;

use grounds::Grounds;
use setting::{Backward, Entry, Setting, Witness};
use staged::{Layers, Staged};
use step::{step, timed};

/// Prices a plan.
///
/// # Errors
/// What is wrong with the plan, and where.
pub fn price(plan: &Plan) -> Result<Prediction, PlanError> {
    price_open(plan, &open(plan)?)
}

/// Prices a plan that has been opened.
///
/// # Errors
/// What cannot be priced, and where it stands.
pub fn price_open(plan: &Plan, opened: &OpenPlan) -> Result<Prediction, PlanError> {
    price_with(plan, opened, &Constants::load())
}

/// Prices a plan that has been opened in a world with given constants.
///
/// # Errors
/// What cannot be priced, and where it stands.
pub fn price_with(plan: &Plan, opened: &OpenPlan, constants: &Constants) -> Result<Prediction, PlanError> {
    let found = stepped(plan, opened, constants, |setting, staged| {
        let step = step(setting, staged)?;
        let of_ground = |ground: &Setting<'_>| {
            let Machine { cluster, device, precision, .. } = &ground.machine;
            let basis = Basis::of(cluster, device, *precision);
            (basis, basis.worlds(constants, device, *precision))
        };
        let grounds = Grounds::new(setting, staged.n_stages, staged.meshes);
        let worlds: Vec<_> = grounds.settings.iter().map(of_ground).collect();
        Ok((prediction::prediction(setting, staged, &step), worlds))
    });
    let (mut predicted, worlds) = found?;
    for (basis, [fast, slow]) in &worlds {
        let [least_s, most_s] = basis.interval(
            predicted.step_time_s,
            in_world(&predicted, (plan, opened), (constants, fast))?,
            in_world(&predicted, (plan, opened), (constants, slow))?,
        );
        let own = Interval { least_s, most_s, basis: basis.to_string() };
        // Where devices differ, that of which least is known says how wide it is.
        let width = |one: &Interval| (one.most_s - one.least_s).0;
        if predicted.step_time_interval.as_ref().is_none_or(|known| width(&own) > width(known)) {
            predicted.step_time_interval = Some(own);
        }
    }
    Ok(predicted)
}

/// Time of the plan in another world; that of this one is known.
fn in_world(
    predicted: &Prediction,
    (plan, opened): (&Plan, &OpenPlan),
    (this, other): (&Constants, &Constants),
) -> Result<Seconds, PlanError> {
    if this == other { Ok(predicted.step_time_s) } else { time_with(plan, opened, other) }
}

/// The time of a step alone, for whoever asks again and again.
///
/// # Errors
/// What cannot be priced, and where it stands.
pub fn time_with(plan: &Plan, opened: &OpenPlan, constants: &Constants) -> Result<Seconds, PlanError> {
    stepped(plan, opened, constants, |setting, staged| Ok(timed(setting, staged)?.0))
}

/// The same with its layers timed by events, where backward runs as one and sequences are whole.
///
/// # Errors
/// What cannot be priced, and where it stands.
pub fn time_by_events(plan: &Plan, opened: &OpenPlan, constants: &Constants) -> Result<Seconds, PlanError> {
    witnessed((plan, opened), Witness::Events, constants, |setting, staged| Ok(timed(setting, staged)?.0))
}

/// A layer of a plan by both witnesses.
#[derive(Clone, Debug, PartialEq)]
pub struct Witnessed {
    /// The layer kind, by its place in the model.
    pub kind: usize,
    /// How many layers run so.
    pub n_layers: u64,
    /// Forward and backward by closed forms.
    pub closed: [Seconds; 2],
    /// The same as events.
    pub events: [RowPrice; 2],
}

/// Every choice of a plan by both witnesses, in the order of its entries; nothing where backward runs in parts or
/// sequences are cut.
///
/// # Errors
/// What cannot be priced, and where it stands.
pub fn both_witnesses(
    plan: &Plan,
    opened: &OpenPlan,
    constants: &Constants,
) -> Result<Vec<Witnessed>, PlanError> {
    witnessed((plan, opened), Witness::Events, constants, |_, staged| {
        let of = |(entry, n_layers): (&Entry, u64)| {
            let closed = [&entry.price.forward, &entry.price.backward].map(SectionPrice::seconds);
            entry.events.map(|events| Witnessed { kind: entry.kind, n_layers, closed, events })
        };
        Ok(staged.entries.iter().zip(staged.counts()).filter_map(of).collect())
    })
}

/// What is said of a step in a world with given constants.
pub(crate) fn stepped<T>(
    plan: &Plan,
    opened: &OpenPlan,
    constants: &Constants,
    say: impl FnOnce(&Setting<'_>, &Staged<'_>) -> Result<T, SimulateError>,
) -> Result<T, PlanError> {
    witnessed((plan, opened), Witness::ClosedForms, constants, say)
}

fn witnessed<T>(
    (plan, opened): (&Plan, &OpenPlan),
    witness: Witness,
    constants: &Constants,
    say: impl FnOnce(&Setting<'_>, &Staged<'_>) -> Result<T, SimulateError>,
) -> Result<T, PlanError> {
    let constants = world(plan, constants)?;
    let table = matches!(plan.schedule, Schedule::Custom(_)).then(|| plan.actions()).transpose()?;
    let is_part = |action: &Action| action.section == Section::BackwardWeight;
    let has_parts = |table: &Vec<Vec<Action>>| table.iter().flatten().any(is_part);
    let splits = plan.schedule.splits_backward() || table.as_ref().is_some_and(has_parts);
    let backward = if splits { Backward::Parts } else { Backward::Whole };
    let setting = Setting { backward, witness, ..setting(plan, &constants)? };
    let grounds = Grounds::new(&setting, plan.n_stages, plan.meshes());
    let (entries, chunks) = parts(plan, opened, &grounds);
    let whole = Slices::whole(plan.job.sequence);
    let slices = opened.sliced.as_ref().map_or(&whole, |sliced| &sliced.slices);
    let replicas = replicas::replicas(plan, opened, &setting);
    let base = staged(plan, opened, (&entries, &chunks), &whole);
    let staged = Staged { table: table.as_deref(), slices, replicas: &replicas, ..base };
    let wrong = |error: SimulateError| PlanError { place: "schedule".into(), what: error.to_string() };
    say(&setting, &staged).map_err(wrong)
}

/// Constants as they hold on the plan's machines with its engine.
///
/// # Errors
/// What is wrong with the calibration that the plan's cluster brings.
pub fn world(plan: &Plan, constants: &Constants) -> Result<Constants, PlanError> {
    constants
        .clone()
        .on(&plan.cluster, plan.job.engine)
        .map_err(|error| PlanError { place: "cluster.calibration.constants".into(), what: error.to_string() })
}

/// What the prices of a plan stand on, in its own [`world`], with backward run as one.
///
/// # Errors
/// Where its cluster has no devices.
pub fn setting<'a>(plan: &'a Plan, constants: &'a Constants) -> Result<Setting<'a>, PlanError> {
    let job = Job {
        sequence: plan.job.sequence,
        global_batch: plan.job.global_batch,
        precision: plan.job.precision,
        attention: plan.job.attention,
        token_order: plan.job.token_order,
        engine: plan.job.engine,
    };
    let none = || PlanError { place: "cluster.groups".into(), what: "the cluster has no devices".into() };
    Setting::new(&plan.cluster, job, constants).ok_or_else(none)
}

/// Runs of (entry, count), per chunk.
type Chunks = Vec<Vec<(usize, u64)>>;

/// Every entry priced on each ground where a chunk has it, and the chunks in these.
fn parts(plan: &Plan, opened: &OpenPlan, grounds: &Grounds<'_>) -> (Vec<Entry>, Chunks) {
    let entry = |at: usize, setting: &Setting<'_>| {
        let (own, sizes) = (&opened.entries[at], opened.sizes(plan, at));
        let chosen = (own.layer, own.choice.clone());
        let mesh = plan.mesh_of_entry(at);
        let whole = setting.entry(&opened.model, chosen, (mesh, &sizes), &own.program);
        let Some(sliced) = &opened.sliced else { return whole };
        let (layer, program) = (&sliced.model.layers[own.layer], &sliced.entries[at].program);
        setting.sliced(&whole, (layer, program), (mesh, plan.micro_batch), &sliced.slices)
    };
    let placement = plan.schedule.placement();
    let of_chunk: Vec<usize> = (0..plan.chunks.len()).map(|at| grounds.of_chunk(placement, at)).collect();
    let mut places: BTreeSet<(usize, usize)> = BTreeSet::new();
    for (runs, &ground) in plan.chunks.iter().zip(&of_chunk) {
        places.extend(runs.iter().map(|run| (run.entry, ground)));
    }
    let numbers: BTreeMap<(usize, usize), usize> = places.iter().copied().zip(0..).collect();
    let entries = places.iter().map(|&(at, ground)| entry(at, &grounds.settings[ground])).collect();
    let chunks = plan.chunks.iter().zip(&of_chunk);
    let chunks = chunks
        .map(|(runs, &ground)| runs.iter().map(|run| (numbers[&(run.entry, ground)], run.count)).collect());
    (entries, chunks.collect())
}

fn staged<'a>(
    plan: &'a Plan,
    opened: &'a OpenPlan,
    (entries, chunks): Layers<'a>,
    slices: &'a Slices,
) -> Staged<'a> {
    Staged {
        model: &opened.model,
        meshes: plan.meshes(),
        n_stages: plan.n_stages,
        micro_batch: plan.micro_batch,
        n_micro_batches: plan.n_micro_batches,
        schedule: plan.schedule,
        table: None,
        slices,
        entries,
        chunks,
        replicas: &[],
    }
}
