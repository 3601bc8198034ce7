//! Arguments of the commands that ask about plans and about the search. As `args`, it knows names and limits.

use std::path::PathBuf;

use clap::Args;
use ir::numbers::Numbers;

use crate::args::{JobArgs, JsonArgs, ObjectiveArg, ThreadArgs};

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner prove plan.json\n  \
    planner show plan.json --program decoder > decoder.txt   # edit it, then\n  \
    planner prove plan.json --layer decoder --program decoder.txt\n\n\
    Every program of the plan is lowered again from what the plan says and proven equal to its layer, forward, backward\n\
    and update, on all devices. What the file says of proofs is not read.\n\
    Exit code 4: something is not proven.")]
pub(crate) struct ProveArgs {
    /// The plan
    pub(crate) plan: String,
    /// Only this layer kind
    #[arg(long, value_name = "LAYER")]
    pub(crate) layer: Option<String>,
    /// Try to prove this program, as `planner show --program` writes it, in place of the plan's own
    #[arg(long, value_name = "FILE", requires = "layer")]
    pub(crate) program: Option<String>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

/// Choices that the search leaves out.
#[derive(Debug, Default, Args)]
pub(crate) struct ForbidArgs {
    /// Choices to leave out of the space, comma-separated: names of --pin, by themselves for all above 1 (pp, ep, zero), or
    /// with values (zero=3, recompute=full, tp=4,8)
    #[arg(long, value_name = "NAME[=VALUE],...", help_heading = "Choices")]
    pub(crate) forbid: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  planner compare plan.json other.json\n\n\
    Every plan is priced by what it says; the others are told against the first.")]
pub(crate) struct CompareArgs {
    /// The plans, two or more
    #[arg(required = true, num_args = 2.., value_name = "PLAN")]
    pub(crate) plans: Vec<String>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner ranks plan.json -o ranks.csv\n  \
    planner ranks plan.json --json\n\n\
    Prices stand on this placement: a launcher that numbers nodes or devices otherwise runs another plan.")]
pub(crate) struct RanksArgs {
    /// The plan
    pub(crate) plan: String,
    /// Write the list to a file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
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
    /// Days of training [default: 30, or to the last failure of the trace]
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
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    pub(crate) restart: Option<f64>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

/// A number above zero, and no larger than any of use.
fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 1e12 => Ok(number),
        Ok(_) | Err(_) => Err(format!("expected a number above 0, found `{text}`")),
    }
}

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
    /// What is to be small at every point; price and energy are asked for the cluster, a half of it, a quarter, ..., unless
    /// its size is among what changes
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

/// How much is searched.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Effort")]
pub(crate) struct EffortArgs {
    /// Take the best plan that is found in so many seconds; the plan says how much work that was and what is left to gain
    #[arg(long, value_name = "SECONDS", conflicts_with = "work", value_parser = seconds)]
    pub(crate) budget: Option<f64>,
    /// End after so many batches of work: a plan that was found within a budget is found again
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) work: Option<u64>,
}

fn seconds(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "expected seconds, such as 2.5".into())
}
