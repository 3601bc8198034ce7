//! The command line: arguments, files, progress, tables and exit codes around the planner.
//!
//! [`run`] is the whole program but for the process itself, so that tests can run commands and read what they say.
//! Standard output gets data, standard error gets talk.
#![warn(missing_docs)]

mod failure;
mod fewer;
mod figures;
mod table;
mod interrupt;
mod json_input;
mod terminal;
mod args;
mod output;
mod input;
mod question;
mod pins;
mod forbid;
mod goodput;
mod constraints;
mod search;
mod proof;
mod report;
mod priced;
mod memory;
mod objective;
mod optimize;
mod estimate;
mod copy;
mod prove;
mod ranks;
mod verify;
mod train;
mod reshard;
mod replan;
mod replan_failures;
mod replan_kept;
mod restricted;
mod check;
mod validate;
mod validate_against;
mod validate_fit;
mod validate_measured;
mod validate_memory;
mod validate_page;
mod calibrate;
mod calibrate_benchmarks;
mod sweep;
mod sweep_file;
mod pareto;
mod compare;
mod why_not;
mod explain;
mod explain_overlap;
mod show;
mod models;
mod clusters;
mod schema;
mod completions;
mod commands;

pub use commands::run;
pub use failure::exit_code;
pub use interrupt::Interrupt;
pub use terminal::{ProgressBar, Terminal};
