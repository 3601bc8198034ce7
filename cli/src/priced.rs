//! A plan of a file with figures of its own: computed again from what the plan says, whatever figures it holds.

use cost_model::Constants;
use cost_model::offload::{NodeMemory, OnNode, fullest_node};
use ir::plan::check::OpenPlan;
use ir::plan::prediction::{Prediction, StagePrediction};
use ir::plan::{Plan, PlanError};
use ir::units::{Bytes, Seconds};
use planner::chosen::asked;
use planner::price::price_open;
use planner::request::{Job, NoPlan, Pins, Request, Solver};

use crate::args::MeasuredArgs;
use crate::failure::Failure;
use crate::figures;
use crate::input;
use crate::report;
use crate::terminal::Terminal;

/// Reads a plan and prices it; the names of what it does are read off again too. Says so where the file told otherwise.
pub(crate) fn plan(file: &str, terminal: &mut Terminal<'_>) -> Result<(Plan, OpenPlan), Failure> {
    plan_measured(file, &MeasuredArgs { calibration: None }, terminal)
}

/// The same on a cluster that was measured since.
pub(crate) fn plan_measured(
    file: &str,
    measured: &MeasuredArgs,
    terminal: &mut Terminal<'_>,
) -> Result<(Plan, OpenPlan), Failure> {
    let (mut plan, opened) = input::plan(file)?;
    if let Some(calibration) = &measured.calibration {
        plan.cluster.calibration = Some(input::calibration(calibration)?.of_cluster());
    }
    let predicted = price_open(&plan, &opened)
        .map_err(|PlanError { place, what }| input::fault_of_plan(file, place, what))?;
    let held = plan.predicted.as_ref().map(|held| held.step_time_s);
    if let Some(note) = held.and_then(|held| note(held, predicted.step_time_s)) {
        writeln!(terminal.err, "{note}")?;
    }
    plan.roles = opened.roles(&plan);
    plan.predicted = Some(predicted);
    Ok((plan, opened))
}

fn note(held: Seconds, priced: Seconds) -> Option<String> {
    let (held_words, words) = (figures::seconds(held), figures::seconds(priced));
    (held != priced)
        .then(|| format!("the file's own figure is a step of {held_words}; its plan now takes {words}"))
}

/// Refuses a priced plan that overflows a device, with changes that would help.
pub(crate) fn fits(plan: &Plan, opened: &OpenPlan) -> Result<(), Failure> {
    let Some(predicted) = &plan.predicted else { return Ok(()) };
    hosts_fit(plan, opened, predicted)?;
    let Some(stage) = report::fullest(&predicted.stages) else { return Ok(()) };
    let fullest = &predicted.stages[stage];
    if fullest.peak_memory_bytes.0 <= fullest.capacity_bytes.0 {
        return Ok(());
    }
    // What is kept free is nobody's choice.
    let chosen = fullest.memory.iter().filter(|(name, _)| *name != "reserve");
    let largest = chosen.max_by(|a, b| a.1.0.total_cmp(&b.1.0));
    Err(Failure::NoPlan(NoPlan::Overflows {
        stage,
        term: largest.map_or(String::new(), |(name, _): (&String, &Bytes)| name.clone()),
        needed: fullest.peak_memory_bytes,
        capacity: fullest.capacity_bytes,
        relaxations: planner::relaxations(&request(plan, opened)),
    }))
}

/// The node whose host or drives are fullest; nothing where none hold anything.
pub(crate) fn fullest_host(plan: &Plan, opened: &OpenPlan, predicted: &Prediction) -> Option<NodeMemory> {
    let constants = Constants::load().on(&plan.cluster, request(plan, opened).job.engine).ok()?;
    let stages = (0..).zip(&predicted.stages);
    let of_stage = |(at, stage): (u64, &StagePrediction)| {
        let held = OnNode { host: stage.host_memory_bytes, nvme: stage.nvme_bytes };
        (held, plan.mesh_of(at).n_devices())
    };
    let stages: Vec<(OnNode, u64)> = stages.map(of_stage).collect();
    fullest_node((&plan.cluster, &constants), &stages)
}

/// Refuses a plan whose hosts or their drives lack the memory for what they shall hold.
fn hosts_fit(plan: &Plan, opened: &OpenPlan, predicted: &Prediction) -> Result<(), Failure> {
    match fullest_host(plan, opened, predicted).filter(|node| !node.fits()) {
        None => Ok(()),
        Some(NodeMemory { store, stage, needed, capacity }) => Err(Failure::NoPlan(NoPlan::Overflows {
            stage,
            term: store.term().into(),
            needed,
            capacity,
            relaxations: planner::relaxations(&request(plan, opened)),
        })),
    }
}

/// The question that the plan answers, on whole devices.
pub(crate) fn request(plan: &Plan, opened: &OpenPlan) -> Request {
    let job = Job {
        sequence: plan.job.sequence,
        global_batch: plan.job.global_batch,
        precision: plan.job.precision,
        attention: plan.job.attention,
        token_order: plan.job.token_order,
        engine: plan.job.engine,
    };
    Request {
        model: asked(opened),
        cluster: plan.cluster.whole_devices(),
        job,
        pins: Pins::default(),
        solver: Solver::Structured,
    }
}
