//! `planner show`: a plan, or the program of a layer kind, as text for eyes, diffs and one-file tests.

use ir::text::{write_plan, write_program};
use serde::Serialize;

use crate::args::ShowArgs;
use crate::failure::Failure;
use crate::input;
use crate::output::json;
use crate::terminal::Terminal;

/// What `show --json` prints.
#[derive(Serialize)]
struct Shown {
    text: String,
}

/// Prints a plan or a program.
pub(crate) fn run(args: &ShowArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let (plan, opened) = input::plan_of_forms(&args.plan)?;
    let text = match &args.program {
        None => write_plan(&plan),
        Some(name) => {
            let of = (0..opened.entries.len()).filter(|&entry| opened.layer(entry).name == *name);
            let write = |entry: usize| {
                write_program(opened.layer(entry), plan.mesh_of_entry(entry), &opened.entries[entry].program)
            };
            let texts: Vec<String> = of.map(write).collect();
            if texts.is_empty() {
                let kinds: Vec<&str> = opened.model.layers.iter().map(|layer| layer.name.as_str()).collect();
                return Err(Failure::argument_with_hint(
                    format!("{} has no layer kind `{name}`", args.plan),
                    format!("it has {}", kinds.join(", ")),
                ));
            }
            texts.join("\n")
        }
    };
    let text = if args.json.json { json(&Shown { text })? } else { text };
    Ok(write!(terminal.out, "{text}")?)
}
