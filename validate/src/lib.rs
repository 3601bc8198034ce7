//! Published measurements against predictions: rows of tables become questions, are priced as any question is, and the
//! error is counted.
//!
//! Modules in reading order; each uses only those above it.
#![warn(missing_docs)]

pub mod row;
mod row_check;
mod express_model;
mod express_cluster;
pub mod express;
pub mod case;
pub mod score;
pub mod fit;
pub mod nccl_log;
pub mod benchmarks;
pub mod components;
pub mod report;
pub mod calibration;
pub mod global;
pub mod stack;
pub mod few_runs;
pub mod memory;
pub mod measured;
pub mod against;
