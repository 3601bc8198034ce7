//! `planner optimize`: the fastest plan for a model on a cluster.

use ir::plan::Plan;

use crate::args::OptimizeArgs;
use crate::failure::Failure;
use crate::output::write_whole;
use crate::pins;
use crate::question::Question;
use crate::report::report;
use crate::search::search;
use crate::terminal::Terminal;

/// Searches, writes the plan where asked, and reports it.
pub(crate) fn run(args: &OptimizeArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let mut question = Question::read(&args.model, &args.cluster, &args.job)?;
    question.request.pins = pins::read(&args.pin)?;
    let plan = question.sign(search(&question.request, &args.threads, terminal)?);
    let text = json(&plan)?;
    if let Some(path) = &args.output {
        write_whole(path, &text)?;
        writeln!(terminal.err, "wrote {}", path.display())?;
    }
    if args.json {
        write!(terminal.out, "{text}")?;
    } else {
        write!(terminal.out, "{}", report(&plan, &question.defaults))?;
    }
    Ok(())
}

/// Text of a plan file.
pub(crate) fn json(plan: &Plan) -> Result<String, Failure> {
    serde_json::to_string_pretty(plan)
        .map(|text| text + "\n")
        .map_err(|error| Failure::bug(format!("the plan has no JSON form: {error}")))
}
