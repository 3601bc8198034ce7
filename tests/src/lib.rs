//! What the tests that cross crates share: commands run in this process, and what they said.
//!
//! The tests themselves live in `tests/`, the files that they read in `good/` and `bad/`.

pub mod agreement;
pub mod baseline;
pub mod coverage;
pub mod flatten;
pub mod fuzz;
pub mod layers;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use planner_cli::{Interrupt, ProgressBar, Terminal, run};

/// Holds a page of `docs/` to what it should say; with `UPDATE_DOCS` set, writes it first.
///
/// # Panics
/// Where the page says something else.
#[expect(clippy::disallowed_methods, clippy::expect_used, reason = "a test's page is a file")]
#[track_caller]
pub fn hold_current(page: &str, should: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(page);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, should).expect("the page can be written");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = should.lines().zip(found.lines()).find(|(should, is)| should != is);
    assert!(
        found == should,
        "docs/{page} is not current (UPDATE_DOCS=1 writes it anew); first difference: {differs:?}"
    );
}

/// A command and what it said.
#[derive(Clone, Debug)]
pub struct Transcript {
    /// The words of the command, without the program.
    pub command: Vec<String>,
    /// Its exit code.
    pub code: u8,
    /// Its standard output.
    pub out: String,
    /// Its standard error.
    pub err: String,
}

/// Runs `planner` with these words in this process. Paths are seen from the folder of this crate.
pub fn planner(words: &[&str]) -> Transcript {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let interrupt = Interrupt::new();
    let mut terminal =
        Terminal { out: &mut out, err: &mut err, progress: ProgressBar::Hidden, interrupt: &interrupt };
    let code = run(std::iter::once(&"planner").chain(words), &mut terminal);
    Transcript {
        command: words.iter().map(|word| (*word).to_owned()).collect(),
        code,
        out: String::from_utf8_lossy(&out).into_owned(),
        err: String::from_utf8_lossy(&err).into_owned(),
    }
}

/// The same of a command that is to succeed.
///
/// # Panics
/// Where it does not.
#[track_caller]
pub fn done(words: &[&str]) -> Transcript {
    let said = planner(words);
    assert_eq!(said.code, 0, "{said}");
    said
}

/// The same of a command that is to succeed, and how long it took.
///
/// # Panics
/// Where it does not.
#[expect(clippy::disallowed_methods, reason = "benchmarks read the clock")]
#[track_caller]
pub fn timed(words: &[&str]) -> (Transcript, Duration) {
    let start = Instant::now();
    let said = done(words);
    (said, start.elapsed())
}

/// What a command answers with `--json`. Who asks for a plan by shipped names alone is told what others were told: its
/// answer depends on nothing else.
///
/// # Panics
/// Where it fails, or answers something else.
#[expect(clippy::expect_used, reason = "a test of what is said")]
#[track_caller]
pub fn json(words: &[&str]) -> Value {
    let words = [words, &["--json"]].concat();
    let names_files = || words.iter().any(|word| word.contains('/'));
    let out = match words.first() {
        Some(&"optimize") if !names_files() => asked_once(&words),
        _ => done(&words).out,
    };
    serde_json::from_str(&out).expect("one JSON value")
}

/// What a question is answered, which is asked once however many tests ask it.
#[track_caller]
fn asked_once(words: &[&str]) -> String {
    static KNOWN: Mutex<BTreeMap<Vec<String>, Arc<OnceLock<String>>>> = Mutex::new(BTreeMap::new());
    let question: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let answer = Arc::clone(known.entry(question).or_default());
    drop(known);
    answer.get_or_init(|| done(words).out).clone()
}

/// A number in an answer.
///
/// # Panics
/// Where it is none.
#[expect(clippy::expect_used, reason = "a test of what is said")]
#[track_caller]
pub fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

/// Path of a file that a test writes, in a folder of the build.
#[macro_export]
macro_rules! scratch {
    ($name:expr) => {
        std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join($name).to_string_lossy().into_owned()
    };
}

impl fmt::Display for Transcript {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "$ planner {}", self.command.join(" "))?;
        write!(f, "{}", self.out)?;
        for line in self.err.lines() {
            writeln!(f, "[stderr] {line}")?;
        }
        writeln!(f, "[exit code {}]", self.code)
    }
}
