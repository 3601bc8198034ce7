//! `planner estimate`: time and memory of a plan that the user names. The same search, with everything decided.

use ir::names::Roles;
use ir::plan::Plan;
use ir::plan::prediction::Prediction;
use serde::Serialize;

use crate::args::EstimateArgs;
use crate::failure::Failure;
use crate::input;
use crate::pins;
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
    roles: &'a Roles,
    #[serde(flatten)]
    predicted: &'a Prediction,
    warnings: &'a [String],
}

/// Predicts the plan that the options name, or the one in a file.
pub(crate) fn run(args: &EstimateArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let (plan, defaults) = match (&args.question, &args.plan) {
        (_, Some(file)) => (predicted_plan(&file.to_string_lossy())?, Vec::new()),
        (Some(question), None) => {
            let mut question = Question::read(question)?;
            let n_devices = question.request.cluster.n_devices();
            question.request.pins = pins::complete(&pins::of(&args.pins), &question.request.model, n_devices)?;
            let found = search(&question.request, &args.threads, terminal)?;
            // What was pinned was not searched for: there is nothing to say of the search.
            (Plan { search: None, runners_up: Vec::new(), ..question.sign(found) }, question.defaults)
        }
        (None, None) => {
            let what = "give MODEL and CLUSTER, or --plan FILE";
            return Err(Failure::argument_with_hint(what, "see `planner estimate --help`"));
        }
    };
    let text = if args.json { json(&plan)? } else { report(&plan, &defaults) };
    write!(terminal.out, "{text}")?;
    Ok(())
}

/// The plan of a file with its prediction made anew.
fn predicted_plan(file: &str) -> Result<Plan, Failure> {
    let (plan, _) = input::plan(file)?;
    Ok(plan)
}

fn json(plan: &Plan) -> Result<String, Failure> {
    let predicted =
        plan.predicted.as_ref().ok_or_else(|| Failure::bug("the plan has no prediction"))?;
    let estimate = Estimate {
        tool_version: &plan.tool_version,
        model: &plan.model.name,
        cluster: &plan.cluster.name,
        n_devices: plan.cluster.n_devices(),
        job: &plan.job,
        roles: &plan.roles,
        predicted,
        warnings: &plan.warnings,
    };
    serde_json::to_string_pretty(&estimate)
        .map(|text| text + "\n")
        .map_err(|error| Failure::bug(format!("no JSON form: {error}")))
}
