//! Arguments of the commands that change plans and devices while training runs.

use std::path::PathBuf;

use clap::Args;
use ir::numbers::Numbers;

use crate::args::{ForbidArgs, JsonArgs, ThreadArgs};

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner reshard before.json after.json\n  \
    planner reshard before.json after.json --tensors --json\n\n\
    Both plans are of one model. A rank that already holds what it needs takes nothing; else it takes it from the nearest\n\
    rank that has it. Fused parameters are compared by their parts.")]
pub(crate) struct ReshardArgs {
    /// The plan that training leaves
    pub(crate) from: String,
    /// The plan with which it goes on
    pub(crate) to: String,
    /// Tell every parameter of every layer
    #[arg(long)]
    pub(crate) tensors: bool,
    /// Tell one parameter region by region, such as 3.attention.q.weight
    #[arg(long, value_name = "LAYER.NAME")]
    pub(crate) tensor: Option<String>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("change").required(true).args(["lost", "lost_nodes", "gained", "cluster", "failures"]))]
#[command(after_help = "Examples:\n  \
    planner replan plan.json --lost 3 -o next.json\n  \
    planner replan plan.json --lost-nodes 0,5 -o next.json\n  \
    planner replan plan.json --gained 8\n  \
    planner replan plan.json --failures 3 -o next.json\n  \
    planner replan plan.json --cluster new.json\n\n\
    Model, sequence and global batch stay. With --lost, devices that are lost are taken to be the last.")]
pub(crate) struct ReplanArgs {
    /// The plan under which training ran
    pub(crate) plan: String,
    /// Devices that are gone
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pub(crate) lost: Option<u64>,
    /// Nodes that are gone, by the numbers of `planner ranks`, such as 0-3,7
    #[arg(long, value_name = "NODES")]
    pub(crate) lost_nodes: Option<Numbers>,
    /// Devices that are new, of the same kind
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pub(crate) gained: Option<u64>,
    /// Plans for one, two, … so many lost nodes, before they are lost
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..=64))]
    pub(crate) failures: Option<u64>,
    /// File or name of another cluster
    #[arg(long, value_name = "CLUSTER")]
    pub(crate) cluster: Option<String>,
    /// Give the other cluster so many nodes
    #[arg(long, value_name = "N", requires = "cluster", conflicts_with_all = ["lost", "lost_nodes", "gained"], value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pub(crate) nodes: Option<u64>,
    /// Look at every plan, as `planner optimize` does, and not only near the one that ran
    #[arg(long)]
    pub(crate) anew: bool,
    /// Choices to keep, as for `planner optimize`
    #[arg(long, value_name = "NAME=VALUE,...", help_heading = "Choices")]
    pub(crate) pin: Vec<String>,
    #[command(flatten)]
    pub(crate) forbid: ForbidArgs,
    /// Write the new plan to a file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) threads: ThreadArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner goodput plan.json\n  \
    planner goodput plan.json --failures 50 --days 90 --seed 3\n  \
    planner goodput plan.json --trace preemptions.csv --interval 600\n\n\
    A trace is a CSV file with the columns at_s and, if wanted, gone_s: seconds since training began, in order, and seconds\n\
    for which devices are gone. Without one, failures come at random, the same for the same seed.")]
pub(crate) struct GoodputArgs {
    /// The plan
    pub(crate) plan: String,
    /// Failures or preemptions, one a line
    #[arg(long, value_name = "FILE", conflicts_with = "seed")]
    pub(crate) trace: Option<String>,
    /// Failures per million device hours [default: the cluster's, or the trace's]
    #[arg(long, value_name = "RATE", value_parser = positive)]
    pub(crate) failures: Option<f64>,
    /// Days of training [default: 30, or until training goes on behind the last failure of the trace]
    #[arg(long, value_parser = positive)]
    pub(crate) days: Option<f64>,
    /// Of failures at random
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Training between checkpoints [default: by Daly's formula]
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    pub(crate) interval: Option<f64>,
    /// What training waits for a checkpoint [default: for the copy to its hosts]
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    pub(crate) stall: Option<f64>,
    /// From a failure until training goes on [default: 600]
    #[arg(long, value_name = "SECONDS", value_parser = not_negative)]
    pub(crate) restart: Option<f64>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

/// A number above zero, and no larger than any of use.
fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 1e12 => Ok(number),
        Ok(_) | Err(_) => Err(format!("expected a number above 0, at most 1e12, found `{text}`")),
    }
}

/// The same, or zero.
fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(0.0) => Ok(0.0),
        Ok(_) | Err(_) => {
            positive(text).map_err(|_| format!("expected a number from 0 to 1e12, found `{text}`"))
        }
    }
}
