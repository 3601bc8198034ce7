//! Arguments of the commands that look for one plan, and of how it is looked for.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::args::{ForbidArgs, JobArgs, JsonArgs, PinArgs};

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner optimize llama-3-8b dgx-h100\n  \
    planner optimize gpt3-175b dgx-a100-80 --nodes 128 --global-batch 1536 --seq-len 2048 -o plan.json\n  \
    planner optimize ./config.json ./cluster.json --pin tp=8,recompute=none\n  \
    planner optimize llama-3-70b dgx-h100 --nodes 4 --forbid zero=3,pp\n\n\
    MODEL is a Hugging Face config.json (or its folder), a native model, or a name of `planner models`.\n\
    CLUSTER is a cluster.json or a name of `planner clusters`.")]
pub(crate) struct OptimizeArgs {
    /// File or name of a model
    pub(crate) model: String,
    /// File or name of a cluster
    pub(crate) cluster: String,
    #[command(flatten)]
    pub(crate) job: JobArgs,
    /// Choices to keep, comma-separated: any option of `planner estimate --help` from --tp to --layers-per-stage,
    /// without its dashes, such as tp=8,pp=4
    #[arg(long, value_name = "NAME=VALUE,...")]
    pub(crate) pin: Vec<String>,
    #[command(flatten)]
    pub(crate) forbid: ForbidArgs,
    /// A file with what must hold of single layers and tensors: parts of dims, recomputation, storage
    #[arg(long, value_name = "FILE")]
    pub(crate) constraints: Option<String>,
    /// Only plans that this engine can run
    #[arg(long, value_enum, conflicts_with = "work")]
    pub(crate) target: Option<TargetArg>,
    /// What is to be small; price and energy are asked for the cluster, a half of it, a quarter, ...
    #[arg(long, value_enum, default_value = "time")]
    pub(crate) objective: ObjectiveArg,
    /// Who chooses strategies inside layers: elimination, or an integer program (slow; small meshes only)
    #[arg(long, value_enum, default_value = "structured")]
    pub(crate) solver: SolverArg,
    #[command(flatten)]
    pub(crate) effort: EffortArgs,
    /// Write the plan to a file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) threads: ThreadArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner estimate gpt3-175b dgx-a100-80 --nodes 128 --tp 8 --pp 16 --global-batch 1536 --seq-len 2048\n  \
    planner estimate llama-3-8b dgx-h100 --zero 3 --micro-batch 2 --json\n  \
    planner estimate --plan plan.json\n\n\
    Without a word, degrees are 1, --dp takes the remaining devices, the schedule is 1f1b\n\
    (interleaved with --vpp), nothing is recomputed, ZeRO is 1, and sequence parallelism is on\n\
    where --tp is above 1.")]
pub(crate) struct EstimateArgs {
    /// File or name of a model
    #[arg(required_unless_present = "plan")]
    pub(crate) model: Option<String>,
    /// File or name of a cluster
    #[arg(required_unless_present = "plan")]
    pub(crate) cluster: Option<String>,
    #[command(flatten)]
    pub(crate) job: JobArgs,
    /// Predict this plan instead of one that the options name
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "SizeArgs", "AddedArgs", "PinArgs", "ForbidArgs"])]
    #[arg(conflicts_with_all = ["seq_len", "global_batch", "precision", "attention", "capacity_factor", "vocabulary_multiple", "engine", "optimizer"])]
    pub(crate) plan: Option<String>,
    #[command(flatten)]
    pub(crate) pins: PinArgs,
    #[command(flatten)]
    pub(crate) forbid: ForbidArgs,
    #[command(flatten)]
    pub(crate) threads: ThreadArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

/// How much is searched.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Effort")]
pub(crate) struct EffortArgs {
    /// Take the best plan that is found in so many seconds; the plan says how much work that was and what is left to
    /// gain
    #[arg(long, value_name = "SECONDS", conflicts_with = "work", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) budget: Option<f64>,
    /// End after so many batches of work, fewer or more than the search does of itself: a plan that was found within a
    /// budget is found again, and with twice the work less is left open
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) work: Option<u64>,
}

fn seconds(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "expected seconds, such as 2.5".into())
}

#[derive(Debug, Args)]
pub(crate) struct ThreadArgs {
    /// Threads of the search; the plan does not depend on it [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum TargetArg {
    /// Megatron-Core: ZeRO 0 and 1, 1F1B and interleaved
    Megatron,
    /// TorchTitan: ZeRO 0, 2 and 3, tokens cut between products
    #[value(name = "torchtitan")]
    TorchTitan,
    /// DeepSpeed: ZeRO 2 and 3 only without a pipeline, Ulysses, 1F1B
    #[value(name = "deepspeed")]
    DeepSpeed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ObjectiveArg {
    /// The time of a step, on all devices
    Time,
    /// The price of a step
    Cost,
    /// The energy of a step
    Energy,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SolverArg {
    Structured,
    Microlp,
}
