//! A plan of a file with figures of its own: computed again from what the plan says, whatever figures it holds.

use ir::plan::check::OpenPlan;
use ir::plan::prediction::Prediction;
use ir::plan::{Plan, PlanError};
use ir::units::Seconds;
use planner::chosen::asked;
use planner::price::price_open;
use planner::request::{Job, Pins, Request, Solver};

use crate::args::MeasuredArgs;
use crate::failure::Failure;
use crate::figures;
use crate::input;
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
    let (mut plan, opened) = input::plan_of_forms(file)?;
    if let Some(calibration) = &measured.calibration {
        plan.cluster.calibration = Some(input::calibration(calibration)?.of_cluster());
    }
    let predicted = prediction(file, &plan, &opened)?;
    let held = plan.predicted.as_ref().map(|held| held.step_time_s);
    if let Some(note) = held.and_then(|held| note(held, predicted.step_time_s)) {
        writeln!(terminal.err, "{note}")?;
    }
    plan.roles = opened.roles(&plan);
    plan.predicted = Some(predicted);
    Ok((plan, opened))
}

/// What a plan that was read from a file costs by what it says.
pub(crate) fn prediction(file: &str, plan: &Plan, opened: &OpenPlan) -> Result<Prediction, Failure> {
    price_open(plan, opened).map_err(|PlanError { place, what }| input::fault_of_plan(file, place, what))
}

fn note(held: Seconds, priced: Seconds) -> Option<String> {
    let (held_words, words) = (figures::seconds(held), figures::seconds(priced));
    (held != priced)
        .then(|| format!("the file's own figure is a step of {held_words}; its plan now takes {words}"))
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
