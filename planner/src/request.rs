//! What is asked of the search.

use std::collections::BTreeSet;

use ir::cluster::{Cluster, Precision};
use ir::engine::Engine;
use ir::graph::Model;
use ir::token_order::TokenOrder;
use ir::units::Seconds;
use ir::work::AttentionKernel;

use crate::constraints::Constraints;
use crate::given::{HomeRule, StateRule};

mod no_plan;

pub use no_plan::{Need, NoPlan, Relaxation, Untried, lack};

/// The training job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Job {
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Sequences of a step.
    pub global_batch: u64,
    /// Number format.
    pub precision: Precision,
    /// Attention kernel of the engine.
    pub attention: AttentionKernel,
    /// Which tokens of a cut sequence a device holds.
    pub token_order: TokenOrder,
    /// The software that runs the plan.
    pub engine: Engine,
}

impl Job {
    /// Tokens of a step.
    pub fn tokens(&self) -> f64 {
        self.global_batch as f64 * self.sequence as f64
    }
}

/// Tokens of a step that a job gets without a word of the user: what runs of today's large models use.
pub const DEFAULT_TOKENS_PER_STEP: u64 = 4 << 20;

/// Longest sequence a job gets without a word of the user.
pub const DEFAULT_LONGEST_SEQUENCE: u64 = 8192;

impl Job {
    /// Sensible defaults: the model's sequence up to [`DEFAULT_LONGEST_SEQUENCE`], a batch near
    /// [`DEFAULT_TOKENS_PER_STEP`] tokens that the devices can share out, the best 16-bit format the devices list.
    pub fn defaults(model: &Model, cluster: &Cluster) -> Self {
        let sequence = model.default_sequence.clamp(1, DEFAULT_LONGEST_SEQUENCE);
        let lists = |precision: Precision| {
            cluster.groups.iter().all(|group| group.device.peak_flops_per_s.contains_key(&precision))
        };
        let precision =
            [Precision::Bf16, Precision::Fp16].into_iter().find(|&p| lists(p)).unwrap_or(Precision::Fp32);
        Self {
            sequence,
            global_batch: Self::default_batch(sequence, cluster.n_devices()),
            precision,
            attention: AttentionKernel::Flash,
            token_order: Self::default_order(sequence, cluster.n_devices()),
            engine: Engine::default(),
        }
    }

    /// Zig-zag where a sequence can be cut so over any devices that can cut it, else striped.
    pub fn default_order(sequence: u64, n_devices: u64) -> TokenOrder {
        let fits = |parts: &u64| {
            n_devices.is_multiple_of(*parts)
                && sequence.is_multiple_of(*parts)
                && !sequence.is_multiple_of(TokenOrder::ZigZag.pieces(*parts))
        };
        if (1..=n_devices.min(sequence)).any(|parts| fits(&parts)) {
            TokenOrder::Striped
        } else {
            TokenOrder::ZigZag
        }
    }

    /// A batch near [`DEFAULT_TOKENS_PER_STEP`] tokens: a power of two of sequences, or as many times the odd part of the
    /// number of devices, which share no power of two out evenly; where that part is large, the power of two again.
    pub fn default_batch(sequence: u64, n_devices: u64) -> u64 {
        /// Beyond so many parts in a batch of sequences the nearest multiple is no longer near.
        const LEAST_MULTIPLES: f64 = 8.0;
        let sequences = (DEFAULT_TOKENS_PER_STEP as f64 / sequence.max(1) as f64).max(1.0);
        let odd = n_devices.max(1) >> n_devices.max(1).trailing_zeros();
        let odd = if odd as f64 * LEAST_MULTIPLES <= sequences { odd } else { 1 };
        odd << ((sequences / odd as f64).log2().round() as u32)
    }
}

/// A schedule by name; its numbers follow from other pins, or are searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScheduleKind {
    /// All forwards, then all backwards.
    GPipe,
    /// One forward, one backward.
    OneFOneB,
    /// 1F1B with twice the warm-up.
    Eager,
    /// 1F1B with as much warm-up as fits.
    Dapple,
    /// 1F1B over virtual stages.
    Interleaved,
    /// All micro-batches through each virtual stage in turn.
    BreadthFirst,
    /// Backward in two parts, in the memory of 1F1B.
    ZbH1,
    /// Backward in two parts, in twice that memory.
    ZbH2,
    /// Backward in two parts over a V.
    ZbV,
    /// The V in half the memory.
    VHalf,
    /// The V in a third of the memory.
    VMin,
    /// Waves back and forth.
    Hanayo,
    /// Forward of one chunk beside backward of the other, over a V.
    DualPipeV,
    /// Two pipelines in opposite directions.
    Chimera,
    /// 1F1B over slices of sequences.
    Seq1F1B,
    /// All forwards, then all backwards, over slices of sequences.
    TeraPipe,
}

impl ScheduleKind {
    /// Whether it runs backward in two parts.
    pub fn splits_backward(self) -> bool {
        match self {
            Self::ZbH1 | Self::ZbH2 | Self::ZbV | Self::VHalf | Self::VMin | Self::DualPipeV => true,
            Self::GPipe
            | Self::OneFOneB
            | Self::Eager
            | Self::Dapple
            | Self::Interleaved
            | Self::BreadthFirst
            | Self::Hanayo
            | Self::Chimera
            | Self::Seq1F1B
            | Self::TeraPipe => false,
        }
    }

    /// Whether it cuts sequences into slices.
    pub fn cuts_sequences(self) -> bool {
        matches!(self, Self::Seq1F1B | Self::TeraPipe)
    }

    /// Virtual stages of a rank where the user does not say.
    pub fn default_virtual_stages(self) -> u32 {
        match self {
            Self::GPipe
            | Self::OneFOneB
            | Self::Eager
            | Self::Dapple
            | Self::ZbH1
            | Self::ZbH2
            | Self::Seq1F1B
            | Self::TeraPipe => 1,
            Self::Interleaved
            | Self::BreadthFirst
            | Self::Hanayo
            | Self::ZbV
            | Self::VHalf
            | Self::VMin
            | Self::DualPipeV
            | Self::Chimera => 2,
        }
    }
}

/// What the user wants computed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecomputeKind {
    /// Nothing.
    None,
    /// The attention core.
    Selective,
    /// Every layer.
    Full,
}

/// Which memory may hold optimizer states, what layers keep for backward, and parameters between uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadKind {
    /// The devices' alone.
    None,
    /// The devices', the hosts' or for optimizer states their drives', parameter by parameter and layer by layer, as it
    /// pays.
    Allowed,
    /// Optimizer states the hosts' alone, all else the devices'.
    Optimizer,
    /// What layers keep the hosts' alone, all else the devices'.
    Activations,
    /// Optimizer states and what layers keep the hosts' alone, parameters the devices'.
    Both,
    /// Optimizer states and parameters the hosts' alone, what layers keep the devices'.
    States,
    /// All three the hosts' alone.
    All,
    /// Optimizer states the hosts' drives alone, all else the devices'.
    Nvme,
}

impl OffloadKind {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::None,
        Self::Allowed,
        Self::Optimizer,
        Self::Activations,
        Self::Both,
        Self::States,
        Self::All,
        Self::Nvme,
    ];

    /// Which memory may hold optimizer states; and what layers keep, and parameters.
    pub fn rules(self) -> (StateRule, [HomeRule; 2]) {
        use HomeRule::{Device, Free, Host};
        match self {
            Self::None => (StateRule::Device, [Device; 2]),
            Self::Allowed => (StateRule::Anywhere, [Free; 2]),
            Self::Optimizer => (StateRule::Host, [Device; 2]),
            Self::Activations => (StateRule::Device, [Host, Device]),
            Self::Both => (StateRule::Host, [Host, Device]),
            Self::States => (StateRule::Host, [Device, Host]),
            Self::All => (StateRule::Host, [Host; 2]),
            Self::Nvme => (StateRule::Nvme, [Device; 2]),
        }
    }

    /// Whether the hosts hold what every layer keeps.
    pub fn keeps_on_host(self) -> bool {
        self.rules().1[0] == HomeRule::Host
    }
}

/// Choices the user makes, in the literature's words; what is not pinned is searched.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pins {
    /// Tensor-parallel degree.
    pub tp: Option<u64>,
    /// Pipeline stages.
    pub pp: Option<u64>,
    /// Data-parallel degree.
    pub dp: Option<u64>,
    /// Context-parallel degree.
    pub cp: Option<u64>,
    /// Expert-parallel degree.
    pub ep: Option<u64>,
    /// Tensor-parallel degree inside experts: 1, or the tensor-parallel degree.
    pub etp: Option<u64>,
    /// Virtual stages per pipeline rank.
    pub vpp: Option<u32>,
    /// Sequences of one micro-batch per data-parallel replica.
    pub micro_batch: Option<u64>,
    /// Order of micro-batches.
    pub schedule: Option<ScheduleKind>,
    /// Slices of every sequence, for schedules that cut them.
    pub slices: Option<u32>,
    /// What is computed again.
    pub recompute: Option<RecomputeKind>,
    /// 0, 1, 2 or 3.
    pub zero: Option<u8>,
    /// Whether gradients are cut as parameters are, where these are (stage 3); they are without a word.
    pub gradients: Option<GradientsKind>,
    /// Whether schedules that split backward are searched where none is pinned; some of them without a word, where they
    /// save a fortieth.
    pub split_backward: Option<SplitKind>,
    /// Data-parallel replicas that share one set of states; all without a word.
    pub zero_group: Option<u64>,
    /// Which memory may hold optimizer states and what layers keep; without a word the hosts' only where nothing fits
    /// without them.
    pub offload: Option<OffloadKind>,
    /// Whether tensor parallel axes split tokens between products.
    pub sequence_parallel: Option<SequenceParallel>,
    /// How attention sees keys that other devices hold.
    pub cp_kind: Option<ContextKind>,
    /// Which tokens of a cut sequence a device holds; zig-zag without a word.
    pub token_order: Option<TokenOrder>,
    /// Whether devices of a stage may run unequal shares of the micro-batches; without a word where that is faster.
    pub shares: Option<SharesKind>,
    /// Whether unlike devices may run unequal numbers of ranks; without a word where that is faster.
    pub tensor_shares: Option<SharesKind>,
    /// Whether degrees are those of axes that do what they are named for and nothing else; without a word whatever
    /// comes to them, where that is faster.
    pub axes: Option<AxesKind>,
    /// Decoder layers of every chunk, first chunk first.
    pub layers_per_stage: Option<Vec<u64>>,
    /// What may not be.
    pub forbid: Forbid,
    /// What is said of single layers and tensors.
    pub constraints: Constraints,
}

/// Choices that the user rules out, in the same words; what is not ruled out is searched.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Forbid {
    /// Tensor-parallel degrees.
    pub tp: Degrees,
    /// Pipeline stages.
    pub pp: Degrees,
    /// Data-parallel degrees.
    pub dp: Degrees,
    /// Context-parallel degrees.
    pub cp: Degrees,
    /// Expert-parallel degrees.
    pub ep: Degrees,
    /// Tensor-parallel degrees inside experts.
    pub etp: Degrees,
    /// Virtual stages per pipeline rank.
    pub vpp: Degrees,
    /// Sequences of one micro-batch per data-parallel replica.
    pub micro_batch: Degrees,
    /// Slices of every sequence.
    pub slices: Degrees,
    /// Orders of micro-batches.
    pub schedule: Vec<ScheduleKind>,
    /// What is computed again.
    pub recompute: Vec<RecomputeKind>,
    /// ZeRO stages.
    pub zero: Vec<u8>,
    /// Which memory may hold optimizer states and what layers keep.
    pub offload: Vec<OffloadKind>,
    /// Whether tensor parallel axes split tokens between products.
    pub sequence_parallel: Vec<SequenceParallel>,
    /// How attention sees keys that other devices hold.
    pub cp_kind: Vec<ContextKind>,
    /// Orders of tokens.
    pub token_order: Vec<TokenOrder>,
    /// Replicas that have no sequences of their own, and compute what others do: engines run none.
    pub copies: bool,
}

/// Degrees that are ruled out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Degrees {
    /// All but one.
    pub above_one: bool,
    /// These.
    pub single: BTreeSet<u64>,
}

/// How attention sees keys that other devices hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContextKind {
    /// They are gathered.
    Gather,
    /// Their blocks travel round a ring.
    Ring,
    /// Sequence and heads are exchanged.
    Ulysses,
}

/// How the gradients of parameters that are cut wait for the end of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientsKind {
    /// Reduced every micro-batch, into parts.
    Cut,
    /// Summed whole, and reduced once per step (PyTorch FSDP's `no_sync`).
    Whole,
}

impl Pins {
    /// Whether all schedules that split backward are asked, and the fastest plan is taken.
    pub(crate) fn splits_any(&self) -> bool {
        self.split_backward == Some(SplitKind::Any)
    }

    /// Whether nobody says if layers cut tokens beside products.
    pub(crate) fn leaves_tokens(&self) -> bool {
        self.sequence_parallel.is_none() && self.forbid.sequence_parallel.is_empty()
    }
}

/// Which schedules that split backward are searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitKind {
    /// None.
    None,
    /// All that are asked at all (`split_schedules::KINDS`), however long that takes; the fastest plan is taken.
    Any,
}

/// How many micro-batches the coordinates of the outermost axis run, or how many ranks devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharesKind {
    /// As many each.
    Equal,
    /// As many as their devices are fast.
    Unequal,
}

/// What has the degrees that are pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AxesKind {
    /// Axes that do in every layer what they are named for, as frameworks lay them out.
    Named,
    /// Whatever comes to them in most layers.
    Any,
}

/// A switch, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SequenceParallel {
    /// Tokens are split between products.
    On,
    /// They are not.
    Off,
}

/// Who solves the choice problems of layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Solver {
    /// Elimination: exact and fast.
    #[default]
    Structured,
    /// The integer program, by microlp: exact, slow, only for small meshes.
    Microlp,
}

/// A complete question.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// What is trained.
    pub model: Model,
    /// On which machines; all of them.
    pub cluster: Cluster,
    /// The job.
    pub job: Job,
    /// What the user decided.
    pub pins: Pins,
    /// Who solves the choice problems.
    pub solver: Solver,
}

/// How far the search is, for a progress bar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Work done, in candidates.
    pub done: u64,
    /// Work known so far.
    pub total: u64,
    /// Best step time so far.
    pub best: Option<Seconds>,
    /// Where nothing fits and changes of the question are tried: which kind of change it is that is searched, and of
    /// how many.
    pub change: Option<(usize, usize)>,
}

/// Where progress goes. Called from one thread.
pub type OnProgress<'a> = &'a dyn Fn(Progress);

/// When a search ends before it is done: looked at between batches of work, once there is a plan, or once nothing fits
/// on devices.
#[derive(Clone, Copy)]
pub struct Stop<'a> {
    /// After so many batches, which may be more than a search does of itself.
    pub work: Option<u64>,
    /// When somebody says so; who did must not take it back.
    pub asked: &'a dyn Fn() -> bool,
    /// When a first plan is waited for no longer, should there be none by then.
    pub overdue: &'a dyn Fn(Wait) -> bool,
}

/// For how long a first plan is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Half of the time, where another search can have the other half.
    Half,
    /// All of it.
    All,
}

impl Stop<'_> {
    /// Only when it is done.
    pub const fn never() -> Self {
        Self { work: None, asked: &|| false, overdue: &|_| false }
    }

    /// Whether to end after so many batches.
    pub(crate) fn now(&self, work: u64) -> bool {
        self.work.is_some_and(|limit| work >= limit) || (self.asked)()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_without_a_word_is_near_four_mebi_tokens_and_shared_out_evenly() {
        assert_eq!(Job::default_batch(1024, 8), 4096);
        assert_eq!(Job::default_batch(1024, 7), 7 * 512);
        assert_eq!(Job::default_batch(8192, 17 * 8), 17 * 32);
        // Of so many devices no multiple is near.
        assert_eq!(Job::default_batch(8192, 101), 512);
        assert_eq!(Job::default_batch(1 << 28, 3), 1);
        for n_devices in 1..400_u64 {
            let tokens = (Job::default_batch(2048, n_devices) * 2048) as f64;
            let off = (tokens / DEFAULT_TOKENS_PER_STEP as f64).log2().abs();
            assert!(off <= 0.5 + 1e-9, "{n_devices}: {tokens}");
        }
    }
}
