//! From arguments to a command, and from its end to an exit code.

use std::ffi::OsString;

use clap::Parser;

use crate::args::{Cli, Command};
use crate::failure::{Failure, exit_code};
use crate::output::Form;
use crate::search::{no_plan_json, relaxations};
use crate::terminal::Terminal;
use crate::{
    calibrate, check, clusters, compare, completions, estimate, explain, goodput, models, optimize, pareto,
    prove, ranks, replan, reshard, schema, show, sweep, train, validate, verify,
};

/// Runs one command line, program name included, and returns the exit code.
pub fn run(args: impl IntoIterator<Item = impl Into<OsString> + Clone>, terminal: &mut Terminal<'_>) -> u8 {
    let code = match Cli::try_parse_from(args) {
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
    let text = error.render().to_string();
    if error.use_stderr() {
        let _ = write!(terminal.err, "{text}");
        return exit_code::BAD_INPUT;
    }
    let _ = write!(terminal.out, "{text}");
    exit_code::DONE
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
