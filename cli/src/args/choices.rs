//! Choices in the literature's words: what may be pinned, and what forbidden.

use clap::{Args, ValueEnum};

use crate::args::counts;

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
    /// Whether gradients of parameters that are cut (--zero 3) are too, or summed whole and reduced once per step
    /// [default: cut]
    #[arg(long, value_enum)]
    pub(crate) gradients: Option<GradientsArg>,
    /// Whether a search tries schedules that split backward: `none` none, `any` all that it knows, each taken where it
    /// is faster at all [default: some, taken where they save a fortieth]
    #[arg(long, value_enum)]
    pub(crate) split_backward: Option<SplitArg>,
    /// Replicas over which ZeRO cuts; groups of so many hold all states [default: all replicas]
    #[arg(long, value_name = "N", value_parser = counts())]
    pub(crate) zero_group: Option<u64>,
    /// What lies in the hosts' memory: `none` nothing, `optimizer` optimizer states, which hosts update, `activations`
    /// what layers keep for backward, `both` these two, `states` optimizer states and parameters, `all` all three,
    /// `nvme` optimizer states on the hosts' drives, `allowed` whatever is faster for each parameter and layer
    /// [default: something only where nothing fits without]
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
    /// Whether every device runs one rank, where their kinds differ: with more on faster ones, axes cut tensors as
    /// unequally [default: what is fastest]
    #[arg(long, value_enum)]
    pub(crate) tensor_shares: Option<TensorSharesArg>,
    /// Whether axes do in every layer what they are named for, as frameworks lay them out, or whatever has the degrees
    /// in most of the weights [default: named to price a plan, any to search]
    #[arg(long, value_enum)]
    pub(crate) axes: Option<AxesArg>,
    /// Decoder layers of every stage (of every chunk with --vpp), first first, comma-separated
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(0..=65_536))]
    pub(crate) layers_per_stage: Option<Vec<u64>>,
}

/// Choices that the search leaves out.
#[derive(Debug, Default, Args)]
pub(crate) struct ForbidArgs {
    /// Choices to leave out of the space, comma-separated: names of --pin, by themselves for all above 1 (pp, ep,
    /// zero), or with values (zero=3, recompute=full, tp=4,8)
    #[arg(long, value_name = "NAME[=VALUE],...", help_heading = "Choices")]
    pub(crate) forbid: Vec<String>,
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

/// Which memory holds optimizer states, what layers keep for backward, and parameters between uses.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum OffloadArg {
    /// The devices'
    None,
    /// The devices', the hosts' or for optimizer states their drives', parameter by parameter and layer by layer
    Allowed,
    /// Optimizer states the hosts'
    Optimizer,
    /// What layers keep for backward the hosts'
    Activations,
    /// Both the hosts'
    Both,
    /// Optimizer states and parameters the hosts'
    States,
    /// All three the hosts'
    All,
    /// Optimizer states on the hosts' NVMe drives
    Nvme,
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
pub(crate) enum GradientsArg {
    /// Reduced every micro-batch, into parts
    Cut,
    /// Summed whole over micro-batches (FSDP's no_sync)
    Whole,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SplitArg {
    /// None is tried
    None,
    /// All are
    Any,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SharesArg {
    /// All as many
    Equal,
    /// As many as they are fast
    Unequal,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum TensorSharesArg {
    /// A rank on every device
    Equal,
    /// More ranks on faster devices
    Unequal,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum AxesArg {
    /// One thing each, in every layer
    Named,
    /// What has the degrees in most of the weights
    Any,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SwitchArg {
    On,
    Off,
}
