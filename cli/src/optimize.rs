//! `planner optimize`: the fastest plan for a model on a cluster.

use planner::constraints::Constraints;
use planner::request::{Pins, Request, Solver};
use planner::target::Target;

use crate::args::{OptimizeArgs, SolverArg, TargetArg};
use crate::constraints;
use crate::failure::Failure;
use crate::forbid;
use crate::output::{json, write_and_say};
use crate::proof::proven;
use crate::question::Question;
use crate::report::report;
use crate::search::{search_for, search_within};
use crate::terminal::Terminal;

/// Searches, writes the plan where asked, and reports it.
pub(crate) fn run(args: &OptimizeArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let mut question = Question::read(&args.model, &args.cluster, &args.job)?;
    question.request.pins = forbid::choices(&args.pin, &args.forbid)?;
    forbid::check(&question.request.pins, "take back one of --pin and --forbid")?;
    if let Some(file) = &args.constraints {
        question.request.pins.constraints = constraints::read(file)?;
    }
    question.request.solver = match args.solver {
        SolverArg::Structured => Solver::Structured,
        SolverArg::Microlp => Solver::Microlp,
    };
    let request = &question.request;
    let mut ask = |request: &Request| match args.target.map(target) {
        Some(target) => search_for((request, target), &args.effort, &args.threads, terminal),
        None => search_within(request, &args.effort, &args.threads, terminal),
    };
    let found = match (ask(request), &args.constraints) {
        (Err(Failure::NoPlan(no_plan)), Some(file)) if !request.pins.constraints.is_empty() => {
            let pins = Pins { constraints: Constraints::default(), ..request.pins.clone() };
            // Names are right, or the question would not stand without them either.
            let without = ask(&Request { pins, ..request.clone() });
            return Err(
                without.map_or(Failure::NoPlan(no_plan.clone()), |_| constraints::refused(file, &no_plan))
            );
        }
        (answer, _) => answer?,
    };
    let plan = proven(question.sign(found))?;
    let text = json(&plan)?;
    if let Some(path) = &args.output {
        write_and_say(path, &text, terminal)?;
    }
    if args.json.json {
        write!(terminal.out, "{text}")?;
    } else {
        write!(terminal.out, "{}", report(&plan, &question.defaults))?;
    }
    Ok(())
}

fn target(arg: TargetArg) -> Target {
    match arg {
        TargetArg::Megatron => Target::Megatron,
        TargetArg::TorchTitan => Target::TorchTitan,
        TargetArg::DeepSpeed => Target::DeepSpeed,
    }
}
