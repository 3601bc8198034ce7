//! Arguments of the commands that run a small copy of a plan.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::args::{JsonArgs, MemoryArgs};

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner verify plan.json\n  \
    planner verify plan.json --precision f64 --ranks 128\n\n\
    The plan is shrunk; its structure, schedule and storage are kept. Every rank of the copy runs\n\
    on threads of this machine for two steps. Its loss, gradients and parameters are compared with\n\
    one device, the bytes that it sends and keeps with what the planner predicts for the copy.\n\
    The plan itself is priced: its cluster must have the memory. The copy is run whether or not it has.\n\
    Exit code 4: something differs. Exit code 3: nothing does, but the plan does not fit in memory.")]
pub(crate) struct VerifyArgs {
    /// The plan
    pub(crate) plan: String,
    #[command(flatten)]
    pub(crate) copy: CopyArgs,
    /// Number formats to run in
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) precision: ElementArg,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    /// Most ranks of the copy
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub(crate) ranks: u64,
    /// Run the plan itself, not a small copy: for plans of toy size
    #[arg(long)]
    pub(crate) whole: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner run plan.json --steps 50\n  \
    planner run plan.json --precision bf16 --trace trace.json\n  \
    planner run toy-a.json --whole --save weights && planner run toy-b.json --whole --load weights\n\n\
    The plan is shrunk as `planner verify` does it. Its ranks, threads of this machine, learn to predict the next word of\n\
    a text that mostly follows a rule, fresh text in every step; so does one device. Losses of every step and the final\n\
    parameters are compared. A trace opens in https://ui.perfetto.dev or chrome://tracing.\n\
    Exit code 4: something differs.")]
pub(crate) struct RunArgs {
    /// The plan
    pub(crate) plan: String,
    /// Steps to train
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) steps: u32,
    /// Number format to train in
    #[arg(long, value_enum, default_value = "f64")]
    pub(crate) precision: NumbersArg,
    /// Of the parameters to begin with, and of the text [default: 7, or that of the checkpoint]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Learning rate [default: 0.01; in bf16, whose rounding grows with it, 0.003; or that of the checkpoint]
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub(crate) lr: Option<f64>,
    #[command(flatten)]
    pub(crate) copy: CopyArgs,
    /// Go on from a checkpoint, written under this plan or any other of the model
    #[arg(long, value_name = "DIR")]
    pub(crate) load: Option<PathBuf>,
    /// Write parameters and optimizer states to a new folder: a safetensors file of each rank, and an index
    #[arg(long, value_name = "DIR")]
    pub(crate) save: Option<PathBuf>,
    /// Write what every rank did, and when, to a file
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

/// A learning rate.
fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate <= 1.0 => Ok(rate),
        Ok(_) | Err(_) => Err("expected a number above 0 and at most 1, such as 0.01".into()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ElementArg {
    F64,
    F32,
    /// Single, rounded to bf16 between operators and ranks
    Bf16,
    /// f64 and f32
    Both,
    /// f64, f32 and bf16
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum NumbersArg {
    F64,
    F32,
    /// Single, rounded to bf16 between operators and ranks
    Bf16,
}

impl NumbersArg {
    /// Its name, as on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}
