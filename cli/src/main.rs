//! The process: standard streams, the exit code, and what is said when the program itself is at fault.

use std::io::{BufWriter, IsTerminal, Write};
use std::panic::{PanicHookInfo, catch_unwind, set_hook};
use std::process::ExitCode;

use mimalloc::MiMalloc;
use planner_cli::{Interrupt, ProgressBar, Terminal, exit_code, run};

/// The search makes and drops many small lists on several threads.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Ctrl-C comes from outside: who hears it can only leave a note.
static INTERRUPT: Interrupt = Interrupt::new();

fn main() -> ExitCode {
    set_hook(Box::new(confess));
    // Without a handler Ctrl-C ends the program, which then loses the plan that a search has so far, and nothing else.
    let _ = ctrlc::set_handler(|| {
        if !INTERRUPT.raise() {
            std::process::exit(exit_code::INTERRUPTED.into());
        }
    });
    let code = catch_unwind(|| {
        let (stdout, stderr) = (std::io::stdout(), std::io::stderr());
        let progress = if stderr.is_terminal() { ProgressBar::Shown } else { ProgressBar::Hidden };
        let mut out = BufWriter::new(stdout.lock());
        let mut err = stderr;
        let mut terminal = Terminal { out: &mut out, err: &mut err, progress, interrupt: &INTERRUPT };
        run(std::env::args_os(), &mut terminal)
    });
    ExitCode::from(code.unwrap_or(exit_code::BUG))
}

/// A panic is our fault: says so, and where.
fn confess(panic: &PanicHookInfo<'_>) {
    let place = panic.location().map(|at| format!(" at {}:{}", at.file(), at.line())).unwrap_or_default();
    let words = panic.payload_as_str().unwrap_or("a panic without words");
    let text = format!(
        "internal error{place}: {words}\n\
         hint: this is a fault of the planner, please report it with the command and its input files\n"
    );
    // Nothing can be done if standard error is gone.
    let _ = std::io::stderr().write_all(text.as_bytes());
}
