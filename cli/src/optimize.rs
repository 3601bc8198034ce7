//! `planner optimize`: the fastest plan for a model on a cluster.

use std::time::Instant;

use ir::plan::Plan;
use planner::constraints::Constraints;
use planner::request::{Pins, Request, Solver};
use planner::single_layers::single_layers;
use planner::target::Target;

use crate::args::{EffortArgs, ObjectiveArg, OptimizeArgs, SolverArg};
use crate::constraints;
use crate::failure::Failure;
use crate::fewer;
use crate::forbid;
use crate::objective::{self, Tried};
use crate::output::{check_other, check_writable, json, write_and_say};
use crate::proof::proven;
use crate::question::Question;
use crate::report::report;
use crate::restricted::recorded;
use crate::search::{Changes, pool, search_for, search_within, with_changes};
use crate::terminal::Terminal;

/// Searches, writes the plan where asked, and reports it.
pub(crate) fn run(args: &OptimizeArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    if let Some(path) = &args.output {
        check_writable(path)?;
        let files = [&args.constraints, &args.job.measured.calibration].into_iter().flatten();
        let read: Vec<&str> =
            [&args.model, &args.cluster].into_iter().chain(files).map(String::as_str).collect();
        check_other(path, &read)?;
    }
    let mut pins = forbid::choices(&args.pin, &args.forbid)?;
    forbid::check(&pins, "take back one of --pin and --forbid")?;
    if let Some(file) = &args.constraints {
        pins.constraints = constraints::read(file)?;
    }
    let (question, found, tried) = match args.objective {
        ObjectiveArg::Time => {
            let mut question = Question::read(&args.model, &args.cluster, &args.job)?;
            question.request.pins = pins;
            let mut found = found((args, &args.effort, Changes::Tried), &mut question, terminal)?;
            if args.target.is_none() && matches!(args.solver, SolverArg::Structured) {
                let request = &question.request;
                let warning = pool(&args.threads)?.install(|| fewer::warning(request, &found))?;
                found.warnings.extend(warning);
            }
            (question, found, Vec::new())
        }
        other @ (ObjectiveArg::Cost | ObjectiveArg::Energy) => best(other, args, pins, terminal)?,
    };
    let found = recorded(found, args.target, &args.forbid.forbid);
    let plan = proven(question.sign(found, &question.request.pins))?;
    let text = json(&plan)?;
    if let Some(path) = &args.output {
        write_and_say(path, &text, terminal)?;
    }
    let tried = if tried.is_empty() { String::new() } else { objective::text(&tried) };
    if args.json.json {
        write!(terminal.err, "{tried}")?;
        write!(terminal.out, "{text}")?;
    } else {
        let gap = if tried.is_empty() { "" } else { "\n" };
        write!(terminal.out, "{tried}{gap}{}", report(&plan, &question.defaults))?;
    }
    Ok(())
}

/// The best plan by another objective than time, and all that was tried. All questions together have the budget, each
/// an equal share of what is left; after Ctrl-C none is asked any more.
fn best(
    objective: ObjectiveArg,
    args: &OptimizeArgs,
    pins: Pins,
    terminal: &mut Terminal<'_>,
) -> Result<(Question, Plan, Vec<Tried>), Failure> {
    #[expect(clippy::disallowed_methods, reason = "a budget is of the clock")]
    let start = Instant::now();
    let share = |n_left: usize| {
        let left = |budget: f64| (budget - start.elapsed().as_secs_f64()).max(0.0);
        EffortArgs { budget: args.effort.budget.map(|budget| left(budget) / n_left as f64), ..args.effort }
    };
    let asked = (args.model.as_str(), args.cluster.as_str(), &args.job);
    let mut is_over = false;
    let answer = objective::best(objective, asked, &pins, &mut |question, n_left| {
        if is_over {
            return None;
        }
        let answer = found((args, &share(n_left), Changes::Untried), &mut question.clone(), terminal);
        is_over = terminal.interrupt.is_raised();
        Some(answer)
    });
    match answer {
        Err(Failure::NoPlan(why)) if args.target.is_none() && !is_over => {
            let mut question = Question::read(&args.model, &args.cluster, &args.job)?;
            question.request.pins = pins;
            prepare(args, &mut question)?;
            let plan = with_changes(&question.request, why, &share(1), &args.threads, terminal)?;
            Ok((question, plan, Vec::new()))
        }
        answer => answer,
    }
}

/// The fastest plan for a question.
fn found(
    (args, effort, changes): (&OptimizeArgs, &EffortArgs, Changes),
    question: &mut Question,
    terminal: &mut Terminal<'_>,
) -> Result<Plan, Failure> {
    prepare(args, question)?;
    let request = &question.request;
    let mut ask = |request: &Request| match args.target.map(Target::from) {
        Some(target) => search_for((request, target), effort, &args.threads, terminal),
        None => search_within((request, changes), effort, &args.threads, terminal),
    };
    match (ask(request), &args.constraints) {
        (Err(Failure::NoPlan(no_plan)), Some(file)) if !request.pins.constraints.is_empty() => {
            if let Some(wrong) = constraints::wrong(file, &no_plan) {
                return Err(wrong);
            }
            let pins = Pins { constraints: Constraints::default(), ..request.pins.clone() };
            // Names are right, or the question would not stand without them either.
            let without = ask(&Request { pins, ..request.clone() });
            Err(without.map_or(Failure::NoPlan(no_plan.clone()), |_| constraints::refused(file, &no_plan)))
        }
        (answer, _) => answer,
    }
}

/// Gives a question the solver and the single layers that are asked for.
fn prepare(args: &OptimizeArgs, question: &mut Question) -> Result<(), Failure> {
    question.request.solver = match args.solver {
        SolverArg::Structured => Solver::Structured,
        SolverArg::Microlp => Solver::Microlp,
    };
    if let Some(file) = &args.constraints {
        let request = &mut question.request;
        let model = single_layers(&request.model, &request.pins.constraints);
        request.model = model.map_err(|what| Failure::argument(format!("{file}: {what}")))?;
    }
    Ok(())
}
