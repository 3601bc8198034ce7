//! What can be asked on the command line. It knows names and limits of arguments, not what they mean.
//!
//! The program and its commands are here; the arguments of each are with those of its kind.

use clap::builder::RangedU64ValueParser;
use clap::{Args, Parser, Subcommand};

mod job;
mod choices;
mod search;
mod sweeps;
mod copies;
mod plans;
mod changes;
mod constants;
mod documents;

pub(crate) use changes::{GoodputArgs, ReplanArgs, ReshardArgs};
pub(crate) use choices::{
    AxesArg, ContextArg, ForbidArgs, GradientsArg, OffloadArg, PinArgs, RecomputeArg, ScheduleArg, SharesArg,
    SplitArg, SwitchArg, TensorSharesArg, TokenOrderArg,
};
pub(crate) use constants::{CalibrateArgs, ValidateArgs};
pub(crate) use copies::{CopyArgs, ElementArg, NumbersArg, RunArgs, VerifyArgs};
pub(crate) use documents::{ClustersArgs, CompletionsArgs, DocumentArg, ModelsArgs, SchemaArgs};
pub(crate) use job::{AddedArgs, AttentionArg, JobArgs, MeasuredArgs, OptimizerArg, PrecisionArg, SizeArgs};
pub(crate) use plans::{
    CheckArgs, CompareArgs, ExplainArgs, MemoryArgs, PlacementArg, ProveArgs, RanksArgs, ShowArgs,
};
pub(crate) use search::{
    EffortArgs, EstimateArgs, ObjectiveArg, OptimizeArgs, SolverArg, TargetArg, ThreadArgs,
};
pub(crate) use sweeps::{GridArgs, ParetoArgs, SweepArgs};

/// Largest count that is accepted anywhere: far above any cluster or batch, and safe to multiply once.
const MAX_COUNT: u64 = 1 << 32;

fn counts() -> RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=MAX_COUNT)
}

/// The program.
#[derive(Debug, Parser)]
#[command(
    name = "planner",
    version,
    about = "Find the fastest way to split the training of a model over a cluster, and prove that it is right",
    max_term_width = 100,
    after_help = "Examples:\n  \
        planner optimize llama-3-8b dgx-h100 -o plan.json\n  \
        planner verify plan.json\n  \
        planner explain plan.json\n\n\
        Exit codes: 0 done, 1 fault of the program, 2 bad input, 3 no plan fits, or the plan does not, 4 verification failed"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Find the fastest plan for a model on a cluster
    Optimize(OptimizeArgs),
    /// Predict time and memory of a plan that you name
    Estimate(EstimateArgs),
    /// Prove every program of a plan equal to its layer
    Prove(ProveArgs),
    /// Run a small copy of a plan with real numbers and compare it with one device
    Verify(VerifyArgs),
    /// Train a small copy of a plan for some steps beside one device, and show the losses of both
    Run(RunArgs),
    /// Say which bytes move between which ranks when training goes over from one plan to another
    Reshard(ReshardArgs),
    /// Plan anew when devices are lost or gained, and say what must move and how long that takes
    Replan(ReplanArgs),
    /// Check that a plan's schedule can run and that it fits in memory, and say what every stage does and holds
    Check(CheckArgs),
    /// Say where the time and the memory of a plan go, and why it won
    Explain(ExplainArgs),
    /// Ask one question with many numbers: devices, bandwidth, memory, sequence, batch
    Sweep(SweepArgs),
    /// Find the plans that nothing beats in time, memory, devices and price at once
    Pareto(ParetoArgs),
    /// Put plans side by side: roles, time by term, memory by category, bytes by link
    Compare(CompareArgs),
    /// Say what is left of a plan's speed when devices fail: by formula, and failure by failure
    Goodput(GoodputArgs),
    /// List which rank is which device, and its place in the pipeline and on the mesh
    Ranks(RanksArgs),
    /// Print a plan, or the program of one of its layers, in a form for eyes and diffs
    Show(ShowArgs),
    /// Price published training runs and say how far the predictions are off
    Validate(ValidateArgs),
    /// Fit constants to runs of your own cluster
    Calibrate(CalibrateArgs),
    /// List the shipped models, or describe one
    Models(ModelsArgs),
    /// List the shipped clusters, or describe one
    Clusters(ClustersArgs),
    /// Print the JSON Schema of a document
    Schema(SchemaArgs),
    /// Print a completion script for a shell
    Completions(CompletionsArgs),
}

#[derive(Debug, Args)]
pub(crate) struct JsonArgs {
    /// Print JSON instead of text
    #[arg(long)]
    pub(crate) json: bool,
}
