//! `planner estimate`: time and memory of a plan that the user names. The same search, with everything decided.

use ir::cluster::Calibration;
use ir::names::Roles;
use ir::plan::Plan;
use ir::plan::prediction::Prediction;
use planner::request::Pins;
use serde::Serialize;

use crate::args::{EstimateArgs, MeasuredArgs};
use crate::failure::Failure;
use crate::forbid;
use crate::memory;
use crate::output::json;
use crate::pins;
use crate::priced;
use crate::proof::proven;
use crate::question::Question;
use crate::report::report;
use crate::search::search;
use crate::terminal::Terminal;

/// What `estimate --json` prints: the prediction, and of what it is.
#[derive(Serialize)]
struct Estimate<'a> {
    tool_version: &'a str,
    model: &'a str,
    cluster: &'a str,
    n_devices: u64,
    job: &'a ir::plan::Job,
    #[serde(skip_serializing_if = "Option::is_none")]
    calibration: Option<&'a Calibration>,
    roles: &'a Roles,
    #[serde(flatten)]
    predicted: &'a Prediction,
    warnings: &'a [String],
}

/// Predicts the plan that the options name, or the one in a file.
pub(crate) fn run(args: &EstimateArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let (plan, defaults) = match (&args.model, &args.cluster, &args.plan) {
        (_, _, Some(file)) => (of_file(file, &args.job.measured, terminal)?, Vec::new()),
        (Some(model), Some(cluster), None) => {
            of_options(Question::read(model, cluster, &args.job)?, args, terminal)?
        }
        (None, _, None) | (_, None, None) => {
            return Err(Failure::bug("neither a question nor a plan was asked for"));
        }
    };
    let text = if args.json.json { document(&plan)? } else { report(&plan, &defaults) };
    write!(terminal.out, "{text}")?;
    Ok(())
}

/// The plan that the options name, and the settings that they left open.
fn of_options(
    mut question: Question,
    args: &EstimateArgs,
    terminal: &mut Terminal<'_>,
) -> Result<(Plan, Vec<&'static str>), Failure> {
    let n_devices = question.request.cluster.n_devices();
    let chosen = Pins { forbid: forbid::read(&args.forbid.forbid)?, ..pins::of(&args.pins) };
    question.request.pins =
        pins::complete(&chosen, &question.request.model, (n_devices, question.request.job.sequence))?;
    forbid::check(
        &question.request.pins,
        "what is not said has the defaults that `planner estimate --help` tells",
    )?;
    let found = proven(search(&question.request, &args.threads, terminal)?)?;
    // What was pinned was not searched for: there is nothing to say of the search.
    Ok((Plan { search: None, runners_up: Vec::new(), ..question.sign(found, &chosen) }, question.defaults))
}

/// The plan of a file, priced by what it now says. Nothing was searched for.
fn of_file(file: &str, measured: &MeasuredArgs, terminal: &mut Terminal<'_>) -> Result<Plan, Failure> {
    let (plan, opened) = priced::plan_measured(file, measured, terminal)?;
    memory::fits(&plan, &opened)?;
    Ok(Plan { search: None, runners_up: Vec::new(), ..plan })
}

fn document(plan: &Plan) -> Result<String, Failure> {
    let predicted = plan.predicted.as_ref().ok_or_else(|| Failure::bug("the plan has no prediction"))?;
    let estimate = Estimate {
        tool_version: &plan.tool_version,
        model: &plan.model.name,
        cluster: &plan.cluster.name,
        n_devices: plan.cluster.n_whole_devices(),
        job: &plan.job,
        calibration: plan.cluster.calibration.as_ref(),
        roles: &plan.roles,
        predicted,
        warnings: &plan.warnings,
    };
    json(&estimate)
}
