//! Arguments of the commands that show, check or prove what a plan says.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::args::{JsonArgs, ThreadArgs};

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

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner check plan.json\n  \
    planner check --table my-table.txt --placement v\n\n\
    A table is a line for each stage with its actions in order, such as `F0 F1 B0 B1`: F forward, B backward, I and W its\n\
    two parts (to the input, to the weights), then the micro-batch, then `.1` for virtual stage 1. Every dependency must be\n\
    met, every action listed once, and no stage may wait for ever. Bubbles of a bare table are for F = I = W, B = I + W.\n\n\
    A plan is also priced: its devices, hosts and drives must hold what it puts there. A bare table has no memory to judge.\n\
    Exit code 2: the table is wrong. Exit code 3: the plan does not fit in memory.")]
pub(crate) struct CheckArgs {
    /// The plan
    #[arg(required_unless_present = "table")]
    pub(crate) plan: Option<String>,
    /// Check this table instead of a plan's
    #[arg(long, value_name = "FILE", conflicts_with = "plan")]
    pub(crate) table: Option<String>,
    /// Which stage holds which chunk, of a table
    #[arg(long, value_enum, default_value = "looped", requires = "table", conflicts_with = "plan")]
    pub(crate) placement: PlacementArg,
    /// Print what every stage runs, in order
    #[arg(long)]
    pub(crate) rows: bool,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

/// What becomes of a plan that needs more memory than its cluster has.
#[derive(Debug, Args)]
pub(crate) struct MemoryArgs {
    /// Say what overflows the memory of the plan's cluster, but do not fail for it
    #[arg(long)]
    pub(crate) ignore_memory: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum PlacementArg {
    /// Virtual stage i of stage r is chunk i p + r
    Looped,
    /// Every other loop runs back
    V,
    /// Two copies of every chunk, in opposite directions
    Bidirectional,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  planner explain plan.json\n  planner explain plan.json --why-not tp=4,pp=8\n\n\
    Forward and backward of each kind of layer are also timed as events on a stream of computation and two links,\n\
    beside the closed forms that prices are made of."
)]
pub(crate) struct ExplainArgs {
    /// The plan
    pub(crate) plan: String,
    /// Say instead what the best plan with these choices would cost, term by term, or why there is none
    #[arg(long, value_name = "NAME=VALUE,...")]
    pub(crate) why_not: Option<String>,
    #[command(flatten)]
    pub(crate) threads: ThreadArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  planner compare plan.json other.json\n\n\
    Every plan is priced by what it says; the others are told against the first.")]
pub(crate) struct CompareArgs {
    /// The plans, two or more
    #[arg(required = true, value_name = "PLAN")]
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
    planner show plan.json > plan.txt\n  \
    planner show plan.json --program decoder\n\n\
    The text is read wherever a plan is: planner verify plan.txt.")]
pub(crate) struct ShowArgs {
    /// The plan
    pub(crate) plan: String,
    /// Print what every device runs for this layer kind instead
    #[arg(long, value_name = "LAYER")]
    pub(crate) program: Option<String>,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}
