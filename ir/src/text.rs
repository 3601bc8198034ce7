//! The text form of a graph, a plan and a program: what a person reads in a failure, and what a test reads back.
//!
//! The JSON document is for programs; this form is for eyes, diffs and one-file tests. It holds the same: each line is
//! one thing (a dim, a tensor, an operator, a choice), whatever has no short form stands as `key=json`. Writing and
//! reading are inverse, but for what a plan only reports (predictions, search, names), which is left out.
//!
//! ```text
//! layer mlp
//!   dim b "micro_batch"
//!   dim h {"fixed":64}
//!   tensor x b s h
//!   tensor w h n : parameter
//!   op up linear x w -> y
//!   stream x
//!   out y
//! ```

mod graph;
mod plan;
mod program;
mod words;

pub use graph::{read_model, write_model};
pub use plan::{read_plan, write_plan};
pub use program::{read_program, write_program};

/// What is wrong with a text, and in which line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct TextError {
    /// Line, from 1.
    pub line: usize,
    /// What is wrong there.
    pub what: String,
}
