//! Arguments of the commands that ask about plans and about the search. As `args`, it knows names and limits.

use clap::Args;

use crate::args::JsonArgs;

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
