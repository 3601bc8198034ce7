//! What is trained and on how much of a cluster: job, adapters, sizes.

use clap::{Args, ValueEnum};
use ir::numbers::Numbers;
use ir::vocabulary::MULTIPLE;

use crate::args::counts;

/// No engine pads a vocabulary to multiples of more.
const MOST_ENTRIES: u64 = 1 << 16;

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
    /// Pad the vocabulary to a multiple of so many entries, as engines do; 1 keeps it
    #[arg(long, value_name = "ENTRIES", default_value_t = MULTIPLE, value_parser = clap::value_parser!(u64).range(1..=MOST_ENTRIES))]
    pub(crate) vocabulary_multiple: u64,
    /// Software that runs the plan: default, megatron-lm, megatron-deepspeed or fsdp, then features that
    /// differ, such as `fsdp,flash=current`
    #[arg(long, value_name = "NAME,FEATURE=VALUE,...")]
    pub(crate) engine: Option<String>,
    /// Update rule [default: adamw]
    #[arg(long, value_enum)]
    pub(crate) optimizer: Option<OptimizerArg>,
    #[command(flatten)]
    pub(crate) added: AddedArgs,
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

/// What is trained beside or in place of the model's own parameters: low-rank adapters, modules that predict ahead.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Job")]
pub(crate) struct AddedArgs {
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
    /// Put so many modules for multi-token prediction behind the decoder, each with a layer of its last kind
    #[arg(long, value_name = "MODULES", value_parser = counts())]
    pub(crate) mtp: Option<u64>,
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
