//! Results in a file, a line of JSON each, written whole or not at all: what a stopped run has written, the next one
//! reads.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use frontends::{InputError, Position};

use crate::failure::Failure;
use crate::input;
use crate::sweep::{Figures, Row};

/// Largest file that is read: a million lines.
const MAX_BYTES: usize = 1 << 29;

/// How every line begins: what a stopped run has left of one is cut off, and nothing else.
const BEGINNING: &str = "{\"question\":";

/// A file of results, or none.
pub(crate) struct ResultFile {
    /// What was there.
    pub(crate) rows: Vec<Row>,
    to: Option<(PathBuf, File)>,
}

impl ResultFile {
    /// Reads what is there. The end of a line that was never finished is cut off.
    pub(crate) fn open(path: Option<&Path>) -> Result<Self, Failure> {
        let Some(path) = path else { return Ok(Self { rows: Vec::new(), to: None }) };
        let shown = path.display().to_string();
        // A device or a pipe gives nothing back, or no end of it.
        if path.as_os_str() == "-" || path.exists() && !path.is_file() {
            let hint = "give a file: what it holds is asked no second time";
            return Err(Failure::argument_with_hint(format!("{shown}: expected a regular file"), hint));
        }
        let text = if path.exists() { input::read_file(path, &shown, MAX_BYTES)? } else { String::new() };
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let rows = text[..whole].lines().enumerate().map(|(at, line)| row(&shown, at, line));
        let rows = rows.collect::<Result<Vec<Row>, InputError>>()?;
        let rest = &text[whole..];
        if !(BEGINNING.starts_with(rest) || rest.starts_with(BEGINNING)) {
            return Err(no_result(&shown, rows.len(), 1).into());
        }
        let fail = |error: std::io::Error| cannot(path, &error);
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(fail)?;
        if whole < text.len() {
            file.set_len(whole as u64).map_err(fail)?;
        }
        Ok(Self { rows, to: Some((path.to_owned(), file)) })
    }

    /// Adds a line, by one write, and waits until it is kept.
    pub(crate) fn append(&mut self, row: &Row) -> Result<(), Failure> {
        let Some((path, file)) = &mut self.to else { return Ok(()) };
        let line =
            serde_json::to_string(row).map_err(|error| Failure::bug(format!("no JSON form: {error}")))?;
        let written = file.write_all(format!("{line}\n").as_bytes()).and_then(|()| file.sync_data());
        written.map_err(|error| cannot(path, &error))
    }
}

fn row(file: &str, at: usize, line: &str) -> Result<Row, InputError> {
    let found: Row =
        serde_json::from_str(line).map_err(|error| no_result(file, at, error.column().max(1)))?;
    // A time that no search found, or neither a plan nor why there is none.
    let is_time = |plan: &Figures| plan.step_time_s.is_finite() && plan.step_time_s > 0.0;
    let is_outcome = found.plan.as_ref().map_or(found.no_plan.is_some(), is_time);
    if is_outcome { Ok(found) } else { Err(no_result(file, at, 1)) }
}

fn no_result(file: &str, at: usize, column: usize) -> InputError {
    InputError {
        file: file.into(),
        position: Some(Position { line: at + 1, column }),
        place: String::new(),
        what: "this is no result of `planner sweep`".into(),
        hint: Some("give a new file".into()),
    }
}

fn cannot(path: &Path, error: &std::io::Error) -> Failure {
    Failure::argument(format!("{}: cannot be written: {error}", path.display()))
}
