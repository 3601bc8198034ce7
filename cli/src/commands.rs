//! From arguments to a command, and from its end to an exit code.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches};

use crate::args::{Cli, Command};
use crate::failure::{Failure, exit_code, plain};
use crate::output::Form;
use crate::search::{no_plan_json, relaxations};
use crate::terminal::Terminal;
use crate::{
    calibrate, check, clusters, compare, completions, estimate, explain, goodput, models, optimize, pareto,
    pins, prove, ranks, replan, reshard, schema, show, sweep, train, validate, verify,
};

/// Runs one command line, program name included, and returns the exit code.
pub fn run(args: impl IntoIterator<Item = impl Into<OsString> + Clone>, terminal: &mut Terminal<'_>) -> u8 {
    let code = match parse(args) {
        Ok(cli) => match dispatch(&cli.command, terminal) {
            Ok(()) => exit_code::DONE,
            Err(failure) => tell(&failure, form(&cli.command), terminal),
        },
        Err(error) => usage(&error, terminal),
    };
    let code = match terminal.out.flush().map_err(Failure::from) {
        Err(failure) if code == exit_code::DONE => tell(&failure, Form::Text, terminal),
        Ok(()) | Err(_) => code,
    };
    // A stream that is gone cannot be told so.
    let _ = terminal.err.flush();
    code
}

/// Reads a command line. A number below zero is the value of the option before it, which says what it takes.
fn parse(args: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Cli, clap::Error> {
    let command = Cli::command().mut_subcommands(|one| one.allow_negative_numbers(true));
    Cli::from_arg_matches(&command.try_get_matches_from(args)?)
}

fn dispatch(command: &Command, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    match command {
        Command::Optimize(args) => optimize::run(args, terminal),
        Command::Estimate(args) => estimate::run(args, terminal),
        Command::Prove(args) => prove::run(args, terminal),
        Command::Verify(args) => verify::run_command(args, terminal),
        Command::Run(args) => train::run(args, terminal),
        Command::Reshard(args) => reshard::run(args, terminal),
        Command::Replan(args) => replan::run(args, terminal),
        Command::Check(args) => check::run(args, terminal),
        Command::Explain(args) => explain::run(args, terminal),
        Command::Sweep(args) => sweep::run(args, terminal),
        Command::Pareto(args) => pareto::run(args, terminal),
        Command::Compare(args) => compare::run(args, terminal),
        Command::Goodput(args) => goodput::run(args, terminal),
        Command::Ranks(args) => ranks::run(args, terminal),
        Command::Show(args) => show::run(args, terminal),
        Command::Validate(args) => validate::run(args, terminal),
        Command::Calibrate(args) => calibrate::run(args, terminal),
        Command::Models(args) => models::run(args, terminal),
        Command::Clusters(args) => clusters::run(args, terminal),
        Command::Schema(args) => schema::run(args, terminal),
        Command::Completions(args) => completions::run(args, terminal),
    }
}

fn form(command: &Command) -> Form {
    match command {
        Command::Optimize(args) => Form::of(&args.json),
        Command::Estimate(args) => Form::of(&args.json),
        Command::Prove(args) => Form::of(&args.json),
        Command::Verify(args) => Form::of(&args.json),
        Command::Run(args) => Form::of(&args.json),
        Command::Reshard(args) => Form::of(&args.json),
        Command::Replan(args) => Form::of(&args.json),
        Command::Check(args) => Form::of(&args.json),
        Command::Explain(args) => Form::of(&args.json),
        Command::Sweep(args) => Form::of(&args.grid.json),
        Command::Pareto(args) => Form::of(&args.grid.json),
        Command::Compare(args) => Form::of(&args.json),
        Command::Goodput(args) => Form::of(&args.json),
        Command::Ranks(args) => Form::of(&args.json),
        Command::Show(args) => Form::of(&args.json),
        Command::Validate(args) => Form::of(&args.json),
        Command::Models(args) => Form::of(&args.json),
        Command::Clusters(args) => Form::of(&args.json),
        Command::Calibrate(_) | Command::Schema(_) | Command::Completions(_) => Form::Text,
    }
}

/// Says why a command stopped.
fn tell(failure: &Failure, form: Form, terminal: &mut Terminal<'_>) -> u8 {
    if failure.is_silent() {
        return failure.exit_code();
    }
    // A stream that is gone cannot be told so.
    let _ = writeln!(terminal.err, "error: {failure}");
    if let Failure::NoPlan(no_plan) = failure {
        let _ = write!(terminal.err, "{}", relaxations(no_plan));
        if let Some(text) = no_plan_json(no_plan).filter(|_| form == Form::Json) {
            let _ = writeln!(terminal.out, "{text}");
        }
    }
    failure.exit_code()
}

/// Help goes to standard output, complaints to standard error.
fn usage(error: &clap::Error, terminal: &mut Terminal<'_>) -> u8 {
    let text = plain(&error.render().to_string());
    if error.use_stderr() {
        let _ = write!(terminal.err, "{text}");
        if let Some(name) = choice(error) {
            let _ = writeln!(terminal.err, "hint: `--pin {name}=VALUE` keeps a choice of a search");
        }
        return exit_code::BAD_INPUT;
    }
    let _ = write!(terminal.out, "{text}");
    exit_code::DONE
}

/// The choice that was given as an option, to a command that takes choices with `--pin`.
fn choice(error: &clap::Error) -> Option<&str> {
    let given = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(given)) if error.kind() == ErrorKind::UnknownArgument => given,
        _ => return None,
    };
    given.strip_prefix("--").filter(|name| pins::is_name(name))
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind, Write};

    use super::*;
    use crate::interrupt::Interrupt;
    use crate::terminal::ProgressBar;

    /// A stream with no room.
    struct Full(ErrorKind);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Err(Error::from(self.0))
        }
    }

    /// What a command line without a command's work says on standard error.
    fn complaint(words: &[&str]) -> String {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let interrupt = Interrupt::new();
        let mut terminal =
            Terminal { out: &mut out, err: &mut err, progress: ProgressBar::Hidden, interrupt: &interrupt };
        assert_eq!(run(words, &mut terminal), exit_code::BAD_INPUT);
        String::from_utf8_lossy(&err).into_owned()
    }

    #[test]
    fn numbers_below_zero_and_choices_as_options_are_told_what_to_be() {
        let below = complaint(&["planner", "optimize", "gpt2", "dgx-h100", "--global-batch", "-1"]);
        assert!(
            below.starts_with(
                "error: invalid value '-1' for '--global-batch <SEQUENCES>': expected a whole number"
            ),
            "{below}"
        );
        let choice = complaint(&["planner", "optimize", "gpt2", "dgx-h100", "--micro-batch", "4"]);
        assert!(choice.ends_with("hint: `--pin micro-batch=VALUE` keeps a choice of a search\n"), "{choice}");
        let other = complaint(&["planner", "optimize", "gpt2", "dgx-h100", "--colour", "red"]);
        assert!(!other.contains("--pin"), "{other}");
    }

    /// The exit code and the talk of a command whose output cannot be written.
    fn said(why: ErrorKind) -> (u8, String) {
        let (mut out, mut err) = (Full(why), Vec::new());
        let interrupt = Interrupt::new();
        let mut terminal =
            Terminal { out: &mut out, err: &mut err, progress: ProgressBar::Hidden, interrupt: &interrupt };
        let code = run(["planner", "models"], &mut terminal);
        (code, String::from_utf8_lossy(&err).into_owned())
    }

    #[test]
    fn output_that_cannot_be_written_is_told_where_somebody_reads() {
        let (code, err) = said(ErrorKind::StorageFull);
        assert_eq!(code, exit_code::BAD_INPUT);
        assert!(err.starts_with("error: standard output: "), "{err}");
        assert_eq!(said(ErrorKind::BrokenPipe), (exit_code::DONE, String::new()));
    }
}
