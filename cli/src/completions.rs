//! `planner completions`: scripts that complete the command line.

use clap::CommandFactory;

use crate::args::{Cli, CompletionsArgs};
use crate::failure::Failure;
use crate::terminal::Terminal;

/// Prints the script of a shell.
pub(crate) fn run(args: &CompletionsArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "planner", &mut script);
    terminal.out.write_all(&script)?;
    Ok(())
}
