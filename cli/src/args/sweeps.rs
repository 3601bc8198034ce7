//! Arguments of the commands that ask one question with several numbers.

use std::path::PathBuf;

use clap::Args;

use crate::args::{ForbidArgs, JobArgs, JsonArgs, ObjectiveArg, ThreadArgs};

/// One question, to be asked with several numbers.
#[derive(Debug, Args)]
pub(crate) struct GridArgs {
    /// File or name of a model
    pub(crate) model: String,
    /// File or name of a cluster
    pub(crate) cluster: String,
    #[command(flatten)]
    pub(crate) job: JobArgs,
    /// Choices to keep, as for `planner optimize`
    #[arg(long, value_name = "NAME=VALUE,...", help_heading = "Choices")]
    pub(crate) pin: Vec<String>,
    #[command(flatten)]
    pub(crate) forbid: ForbidArgs,
    /// What is to be small at every point; price and energy are asked for the cluster, a half of it, a quarter, ...,
    /// unless its size is among what changes
    #[arg(long, value_enum, default_value = "time")]
    pub(crate) objective: ObjectiveArg,
    /// Write every result to this file as it comes, a line of JSON each, and take from it what is there already
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) threads: ThreadArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner sweep llama-3-8b dgx-h100 --over devices=8,16,32\n  \
    planner sweep llama-3-70b dgx-h100 --nodes 8 --over seq-len=4096,8192,16384 --over bandwidth.infiniband=25,50,100 -o sweep.jsonl\n\n\
    Every combination is planned for. Names are devices, nodes, seq-len, global-batch, memory (of a device, GiB) and\n\
    bandwidth.TIER (GB/s). A run that was stopped goes on where its file ends.")]
pub(crate) struct SweepArgs {
    #[command(flatten)]
    pub(crate) grid: GridArgs,
    /// What to change, and the numbers that it takes in turn; may be given several times
    #[arg(long, value_name = "NAME=NUMBER,...", required = true)]
    pub(crate) over: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  planner pareto llama-3-8b dgx-h100 --nodes 4\n\n\
    The best plan is found for every number of devices and every memory; what is left are the plans that no other beats\n\
    in step time, peak memory, devices and, where the cluster has prices, price of a step at once.")]
pub(crate) struct ParetoArgs {
    #[command(flatten)]
    pub(crate) grid: GridArgs,
    /// Numbers of devices [default: the cluster's, and its halves]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pub(crate) try_devices: Vec<u64>,
    /// Memory of a device that a plan may take, in GiB [default: all, 3/4, 1/2, 7/20 and 1/4 of it]
    #[arg(long, value_name = "GIB,...", value_delimiter = ',')]
    pub(crate) try_memory: Vec<f64>,
}
