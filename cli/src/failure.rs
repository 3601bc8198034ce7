//! Why a command stops, and the exit code that says so.

use frontends::InputError;
use planner::request::NoPlan;

/// Exit codes of the program.
pub mod exit_code {
    /// Done.
    pub const DONE: u8 = 0;
    /// The program is at fault.
    pub const BUG: u8 = 1;
    /// A file or an argument is at fault.
    pub const BAD_INPUT: u8 = 2;
    /// No plan fits, or the one that was given does not.
    pub const NO_PLAN: u8 = 3;
    /// A plan computes or moves something else than it should.
    pub const NOT_VERIFIED: u8 = 4;
    /// Ctrl-C ended it before it was done, as shells have it: 128 and the number of the signal.
    pub const INTERRUPTED: u8 = 130;
}

/// What to do about a fault of the program.
const REPORT_IT: &str =
    "this is a fault of the planner, please report it with the command and its input files";

/// Why a command stops.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A file of the user.
    #[error("{0}")]
    Input(InputError),
    /// An argument of the user.
    #[error("{what}{}", hint_line(.hint.as_deref()))]
    Argument {
        /// What is wrong with it.
        what: String,
        /// What to do.
        hint: Option<String>,
    },
    /// The question has no answer.
    #[error(transparent)]
    NoPlan(#[from] NoPlan),
    /// None of many questions has an answer; the table has been printed.
    #[error("no plan fits at any of {n_points} points\nhint: what was printed says of each what is missing")]
    NoPoint {
        /// How many were asked.
        n_points: usize,
    },
    /// Ctrl-C, before all of many questions were asked; what came of the others has been printed.
    #[error("stopped: {n_done} of {n_points} points are worked out\nhint: {hint}")]
    Stopped {
        /// How many were asked.
        n_done: usize,
        /// How many there are.
        n_points: usize,
        /// How to go on.
        hint: &'static str,
    },
    /// A plan overflows the memory of its cluster; all that does has been reported.
    #[error("{file}: {what}\nhint: `planner estimate --plan {file}` names changes that make a plan fit")]
    Overflows {
        /// The plan's.
        file: String,
        /// What is fullest.
        what: NoPlan,
    },
    /// The plan is not what it should be; what differs has been reported.
    #[error("{0}")]
    NotVerified(String),
    /// What should never happen.
    #[error("internal error: {what}{}", hint_line(Some(REPORT_IT)))]
    Bug {
        /// What happened.
        what: String,
    },
    /// Standard output is gone.
    #[error("standard output: {0}")]
    Output(std::io::Error),
}

fn hint_line(hint: Option<&str>) -> String {
    hint.map_or(String::new(), |hint| format!("\nhint: {hint}"))
}

impl From<std::io::Error> for Failure {
    /// Files have failures of their own; what is left is the terminal.
    fn from(error: std::io::Error) -> Self {
        Self::Output(error)
    }
}

impl From<InputError> for Failure {
    fn from(error: InputError) -> Self {
        Self::Input(error)
    }
}

/// The parser's complaint, without what Rust calls a word that is no number, and without its notation for ranges.
pub(crate) fn plain(complaint: &str) -> String {
    let complaint = complaint.replace("invalid digit found in string", "expected a whole number");
    let Some((before, after)) = complaint.split_once(" is not in ") else { return complaint };
    let (range, rest) = after.split_at(after.find('\n').unwrap_or(after.len()));
    let before = before.rsplit_once(": ").map_or(before, |(before, _)| before);
    let Some((low, high)) = range.split_once("..") else { return complaint };
    let expected = match high.strip_prefix('=') {
        Some(high) => format!("a number from {low} to {high}"),
        None => format!("a number from {low}"),
    };
    format!("{before}: expected {expected}{rest}")
}

impl Failure {
    /// An argument that is wrong.
    pub(crate) fn argument(what: impl Into<String>) -> Self {
        Self::Argument { what: what.into(), hint: None }
    }

    /// An argument that is wrong, with advice.
    pub(crate) fn argument_with_hint(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Argument { what: what.into(), hint: Some(hint.into()) }
    }

    /// A fault of the program.
    pub(crate) fn bug(what: impl Into<String>) -> Self {
        Self::Bug { what: what.into() }
    }

    /// The exit code that says so.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Input(_) | Self::Argument { .. } | Self::NoPlan(NoPlan::Impossible { .. }) => {
                exit_code::BAD_INPUT
            }
            Self::NoPlan(NoPlan::NothingFits { .. } | NoPlan::Overflows { .. }) => exit_code::NO_PLAN,
            Self::Overflows { .. } | Self::NoPoint { .. } => exit_code::NO_PLAN,
            Self::NotVerified(_) => exit_code::NOT_VERIFIED,
            Self::Stopped { .. } => exit_code::INTERRUPTED,
            Self::Bug { .. } | Self::NoPlan(NoPlan::Broken { .. }) => exit_code::BUG,
            // Whoever closed the pipe has what they wanted: `planner models | head`.
            Self::Output(error) if error.kind() == std::io::ErrorKind::BrokenPipe => exit_code::DONE,
            Self::Output(_) => exit_code::BAD_INPUT,
        }
    }

    /// True where there is nobody left to tell.
    pub(crate) fn is_silent(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == std::io::ErrorKind::BrokenPipe)
    }
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn ranges_are_told_in_words() {
        let said = plain("error: invalid value '4' for '--zero <0..3>': 4 is not in 0..=3\n\nFor more");
        assert_eq!(
            said,
            "error: invalid value '4' for '--zero <0..3>': expected a number from 0 to 3\n\nFor more"
        );
        let said = plain("error: invalid value '0' for '--work <N>': 0 is not in 1..18446744073709551615");
        assert_eq!(said, "error: invalid value '0' for '--work <N>': expected a number from 1");
        assert_eq!(plain("a word is not in the list"), "a word is not in the list");
    }
}
