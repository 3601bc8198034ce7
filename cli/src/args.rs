//! What can be asked on the command line. It knows names and limits of arguments, not what they mean.

use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use ir::numbers::Numbers;

use crate::question_args::{
    CompareArgs, EffortArgs, ForbidArgs, GoodputArgs, ParetoArgs, ProveArgs, RanksArgs, ReplanArgs, SweepArgs,
};

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
        Exit codes: 0 done, 1 fault of the program, 2 bad input, 3 no plan fits, 4 verification failed"
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
    /// Check that a plan's schedule can run, and say what every stage does and holds
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
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "JobArgs", "SizeArgs", "LoraArgs", "PinArgs", "ForbidArgs"])]
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

/// How much is trained, and how.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Job")]
pub(crate) struct JobArgs {
    #[command(flatten)]
    pub(crate) size: SizeArgs,
    /// Tokens of a sequence [default: the model's, at most 8192]
    #[arg(long, value_name = "TOKENS", value_parser = counts())]
    pub(crate) seq_len: Option<u64>,
    /// Sequences of a step [default: near 4 Mi tokens]
    #[arg(long, value_name = "SEQUENCES", value_parser = counts())]
    pub(crate) global_batch: Option<u64>,
    /// Number format [default: bf16, or what the devices have]
    #[arg(long, value_enum)]
    pub(crate) precision: Option<PrecisionArg>,
    /// Kernel of the attention core [default: flash]
    #[arg(long, value_enum)]
    pub(crate) attention: Option<AttentionArg>,
    /// Slots of an expert per token that it expects; tokens beyond are dropped [default: nothing is dropped]
    #[arg(long, value_name = "FACTOR")]
    pub(crate) capacity_factor: Option<f64>,
    /// Software that runs the plan: default, megatron-lm or fsdp, then features that differ, such as `fsdp,flash=current`
    #[arg(long, value_name = "NAME,FEATURE=VALUE,...")]
    pub(crate) engine: Option<String>,
    /// Update rule [default: adamw]
    #[arg(long, value_enum)]
    pub(crate) optimizer: Option<OptimizerArg>,
    #[command(flatten)]
    pub(crate) lora: LoraArgs,
    #[command(flatten)]
    pub(crate) measured: MeasuredArgs,
}

/// What was measured on the cluster.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Job")]
pub(crate) struct MeasuredArgs {
    /// Constants of the cluster and its software, as `planner calibrate` writes them
    #[arg(long, value_name = "FILE")]
    pub(crate) calibration: Option<String>,
}

/// Low-rank adapters in place of training all of a model.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Job")]
pub(crate) struct LoraArgs {
    /// Freeze the model and train low-rank adapters of this rank beside its products
    #[arg(long, value_name = "RANK", value_parser = counts())]
    pub(crate) lora: Option<u64>,
    /// An adapter's result counts ALPHA / RANK times [default: the rank, so once]
    #[arg(long, value_name = "ALPHA", requires = "lora")]
    pub(crate) lora_alpha: Option<f64>,
    /// Products to adapt, comma-separated: attention.q, all of `attention` or `mlp`, or q_proj and its like
    /// [default: those of attention and MLP]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', requires = "lora")]
    pub(crate) lora_targets: Vec<String>,
}

/// A part of the cluster, or another size of it.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct SizeArgs {
    /// Only groups with these devices, comma-separated: h100-sxm, or h100 for all that begin so
    #[arg(long, value_name = "DEVICE,...", value_delimiter = ',')]
    pub(crate) groups: Vec<String>,
    /// Only these nodes, counted through all groups from 0, such as 0-3,7
    #[arg(long, value_name = "NODES", conflicts_with_all = ["groups", "nodes", "devices"])]
    pub(crate) on_nodes: Option<Numbers>,
    /// Give the cluster so many nodes
    #[arg(long, value_name = "N", value_parser = counts())]
    pub(crate) nodes: Option<u64>,
    /// Give the cluster so many devices
    #[arg(long, value_name = "N", value_parser = counts(), conflicts_with = "nodes")]
    pub(crate) devices: Option<u64>,
}

impl SizeArgs {
    /// Whether anything is asked.
    pub(crate) fn is_given(&self) -> bool {
        let size = self.nodes.is_some() || self.devices.is_some();
        size || self.on_nodes.is_some() || !self.groups.is_empty()
    }
}

/// Choices in the literature's words.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Choices")]
pub(crate) struct PinArgs {
    /// Tensor-parallel degree
    #[arg(long, value_name = "N", value_parser = counts())]
    pub(crate) tp: Option<u64>,
    /// Pipeline stages
    #[arg(long, value_name = "N", value_parser = counts())]
    pub(crate) pp: Option<u64>,
    /// Data-parallel degree
    #[arg(long, value_name = "N", value_parser = counts())]
    pub(crate) dp: Option<u64>,
    /// Context-parallel degree
    #[arg(long, value_name = "N", value_parser = counts())]
    pub(crate) cp: Option<u64>,
    /// Expert-parallel degree
    #[arg(long, value_name = "N", value_parser = counts())]
    pub(crate) ep: Option<u64>,
    /// Tensor-parallel degree inside experts
    #[arg(long, value_name = "N", value_parser = counts())]
    pub(crate) etp: Option<u64>,
    /// Virtual stages of each pipeline rank
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) vpp: Option<u32>,
    /// Sequences of one micro-batch on one data-parallel replica
    #[arg(long, value_name = "SEQUENCES", value_parser = counts())]
    pub(crate) micro_batch: Option<u64>,
    /// Order of the micro-batches
    #[arg(long, value_enum)]
    pub(crate) schedule: Option<ScheduleArg>,
    /// Slices of every sequence, for seq1f1b and terapipe; cut so that all take equally long
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1024))]
    pub(crate) slices: Option<u32>,
    /// What backward computes again
    #[arg(long, value_enum)]
    pub(crate) recompute: Option<RecomputeArg>,
    /// What is cut over data-parallel replicas: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters
    #[arg(long, value_name = "0..3", value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) zero: Option<u8>,
    /// Replicas over which ZeRO cuts; groups of so many hold all states [default: all replicas]
    #[arg(long, value_name = "N", value_parser = counts())]
    pub(crate) zero_group: Option<u64>,
    /// Which memory holds optimizer states, and who updates: `none` the devices, `optimizer` the hosts, `allowed` whichever
    /// is faster for each parameter [default: the hosts only where nothing fits without]
    #[arg(long, value_enum)]
    pub(crate) offload: Option<OffloadArg>,
    /// Whether the stream is cut along the sequence between tensor-parallel products
    #[arg(long, value_enum)]
    pub(crate) sequence_parallel: Option<SwitchArg>,
    /// How attention sees keys that other devices hold [default: what is fastest]
    #[arg(long, value_enum)]
    pub(crate) cp_kind: Option<ContextArg>,
    /// Which tokens of a cut sequence a device holds [default: zigzag]
    #[arg(long, value_enum)]
    pub(crate) token_order: Option<TokenOrderArg>,
    /// Whether devices of one stage run as many micro-batches each, where their kinds differ [default: what is fastest]
    #[arg(long, value_enum)]
    pub(crate) shares: Option<SharesArg>,
    /// Decoder layers of every stage (of every chunk with --vpp), first first, comma-separated
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(0..=65_536))]
    pub(crate) layers_per_stage: Option<Vec<u64>>,
}

#[derive(Debug, Args)]
pub(crate) struct JsonArgs {
    /// Print JSON instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ThreadArgs {
    /// Threads of the search; the plan does not depend on it [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner verify plan.json\n  \
    planner verify plan.json --precision f64 --ranks 128\n\n\
    The plan is shrunk; its structure, schedule and storage are kept. Every rank of the copy runs\n\
    on threads of this machine for two steps. Its loss, gradients and parameters are compared with\n\
    one device, the bytes that it sends and keeps with what the planner predicts for the copy.\n\
    Exit code 4: something differs.")]
pub(crate) struct VerifyArgs {
    /// The plan
    pub(crate) plan: String,
    #[command(flatten)]
    pub(crate) copy: CopyArgs,
    /// Number formats to run in
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) precision: ElementArg,
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

/// A learning rate.
fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate <= 1.0 => Ok(rate),
        Ok(_) | Err(_) => Err("expected a number above 0 and at most 1, such as 0.01".into()),
    }
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner check plan.json\n  \
    planner check --table my-table.txt --placement v\n\n\
    A table is a line for each stage with its actions in order, such as `F0 F1 B0 B1`: F forward, B backward, I and W its\n\
    two parts (to the input, to the weights), then the micro-batch, then `.1` for virtual stage 1. Every dependency must be\n\
    met, every action listed once, and no stage may wait for ever. Bubbles of a bare table are for F = I = W, B = I + W.")]
pub(crate) struct CheckArgs {
    /// The plan
    #[arg(required_unless_present = "table")]
    pub(crate) plan: Option<String>,
    /// Check this table instead of a plan's
    #[arg(long, value_name = "FILE", conflicts_with = "plan")]
    pub(crate) table: Option<String>,
    /// Which stage holds which chunk, of a table
    #[arg(long, value_enum, default_value = "looped", requires = "table")]
    pub(crate) placement: PlacementArg,
    /// Print what every stage runs, in order
    #[arg(long)]
    pub(crate) rows: bool,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
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
    after_help = "Examples:\n  planner explain plan.json\n  planner explain plan.json --why-not tp=4,pp=8"
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

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner validate\n  \
    planner validate --source megatron-sc21 --rows\n\n\
    Every row of fixtures/published that the planner can express is priced as `planner estimate` would.\n\
    Constants are the same for all rows.")]
pub(crate) struct ValidateArgs {
    /// Only this source
    #[arg(long, value_name = "NAME")]
    pub(crate) source: Option<String>,
    /// List every row
    #[arg(long)]
    pub(crate) rows: bool,
    /// Price single operators and collectives instead of runs
    #[arg(long, conflicts_with_all = ["rows", "omitted", "fit", "source", "markdown"])]
    pub(crate) components: bool,
    /// Print the page of the documentation
    #[arg(long, conflicts_with_all = ["json", "rows", "omitted"])]
    pub(crate) markdown: bool,
    /// List every row that is not priced, with its reason
    #[arg(long)]
    pub(crate) omitted: bool,
    /// Peak memory instead of time
    #[arg(long, conflicts_with_all = ["fit", "omitted"])]
    pub(crate) memory: bool,
    /// The published plans against those that are found for the same jobs, both by prediction
    #[arg(long, conflicts_with_all = ["fit", "omitted", "memory", "components"])]
    pub(crate) against_search: bool,
    /// Constants of a cluster of your own
    #[arg(long, value_name = "FILE")]
    pub(crate) calibration: Option<String>,
    /// Fit the constants to the rows first, and say how far a source is off whose rows were left out
    #[arg(long)]
    pub(crate) fit: bool,
    /// With --fit: also what the error becomes without each constant
    #[arg(long, requires = "fit")]
    pub(crate) ablate: bool,
    /// With --fit: write the fitted constants as a calibration
    #[arg(long, value_name = "FILE", requires = "fit")]
    pub(crate) write: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) threads: ThreadArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  planner calibrate --runs my-runs.csv -o my-cluster.json\n\n\
    The columns are those of fixtures/published/training.csv; one to three runs are enough.\n\
    `planner optimize`, `estimate`, `sweep`, `pareto` and `validate` take the file with --calibration; plans keep it.")]
pub(crate) struct CalibrateArgs {
    /// Measured runs, comma-separated values under a header
    #[arg(long, value_name = "CSV")]
    pub(crate) runs: String,
    /// Write the calibration to a file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner models\n  \
    planner models llama-3-8b --json\n  \
    planner models llama-3-8b --native > my-model.json\n  \
    planner models llama-3-8b --lora 16")]
pub(crate) struct ModelsArgs {
    /// File or name of a model
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) lora: LoraArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
    /// Print the model in the native form, to be changed and planned for
    #[arg(long, requires = "model", conflicts_with = "json")]
    pub(crate) native: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    planner clusters\n  \
    planner clusters dgx-h100 --nodes 16 --json")]
pub(crate) struct ClustersArgs {
    /// File or name of a cluster
    pub(crate) cluster: Option<String>,
    #[command(flatten)]
    pub(crate) size: SizeArgs,
    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  planner schema plan > plan.schema.json")]
pub(crate) struct SchemaArgs {
    /// The document
    #[arg(value_enum)]
    pub(crate) document: DocumentArg,
    /// Accepted for uniformity: a schema is JSON
    #[arg(long, hide = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  planner completions bash > ~/.local/share/bash-completion/completions/planner"
)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
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

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum PrecisionArg {
    Bf16,
    Fp16,
    Fp32,
    Fp8,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum AttentionArg {
    /// Tiled with online softmax
    Flash,
    /// Scores in memory
    Eager,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum OptimizerArg {
    #[value(name = "adamw")]
    AdamW,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ScheduleArg {
    /// All forwards, then all backwards
    #[value(name = "gpipe")]
    GPipe,
    /// One forward, one backward
    #[value(name = "1f1b")]
    OneFOneB,
    /// 1F1B with twice the warm-up, to hide transfers
    #[value(name = "eager-1f1b")]
    Eager,
    /// 1F1B with as much warm-up as fits
    Dapple,
    /// 1F1B over virtual stages
    Interleaved,
    /// All micro-batches through each virtual stage in turn
    BreadthFirst,
    /// Backward in two parts, in the memory of 1F1B
    ZbH1,
    /// Backward in two parts, in twice that memory
    ZbH2,
    /// Backward in two parts, two chunks per stage in a V
    ZbV,
    /// The V in half the memory of 1F1B
    VHalf,
    /// The V in a third of it
    VMin,
    /// Waves back and forth; --vpp is twice their number
    Hanayo,
    /// A V whose chunks run forward and backward side by side
    #[value(name = "dualpipe-v")]
    DualPipeV,
    /// Two pipelines in opposite directions, two copies of every parameter
    Chimera,
    /// 1F1B over slices of sequences (--slices), the backward of a micro-batch from its last slice to its first
    #[value(name = "seq1f1b")]
    Seq1F1B,
    /// All forwards, then all backwards, over slices of sequences (--slices)
    #[value(name = "terapipe")]
    TeraPipe,
}

/// Which memory holds optimizer states.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum OffloadArg {
    /// The devices'
    None,
    /// The devices' or the hosts', parameter by parameter
    Allowed,
    /// The hosts'
    Optimizer,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum RecomputeArg {
    /// Nothing
    None,
    /// The attention core
    Selective,
    /// Every layer
    Full,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ContextArg {
    /// They are gathered
    Gather,
    /// Their blocks travel round a ring
    Ring,
    /// Sequence and heads are exchanged
    Ulysses,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum TokenOrderArg {
    /// One run of neighbours
    Natural,
    /// A run from the front and its mirror from the back
    #[value(name = "zigzag")]
    ZigZag,
    /// Every n-th token
    Striped,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SharesArg {
    /// All as many
    Equal,
    /// As many as they are fast
    Unequal,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SwitchArg {
    On,
    Off,
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

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum DocumentArg {
    /// plan.json
    Plan,
    /// cluster.json
    Cluster,
    /// The native form of a model
    Model,
}
