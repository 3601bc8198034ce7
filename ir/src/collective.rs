//! What collectives are called: what they do, what they are for, and by which messages they run.
//!
//! Names only. What an algorithm costs is the cost model's business, what messages it consists of the executor's; a
//! plan says which one runs ([`Rule`]).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::graph::TensorId;
use crate::mesh::AxisId;
use crate::program::Side;
use crate::work::Pass;

/// What a collective does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CollectiveKind {
    /// Every rank gets the sum.
    AllReduce,
    /// Every rank gets all shards.
    AllGather,
    /// Every rank gets its shard of the sum.
    ReduceScatter,
    /// Every rank gives each other one a part of what it holds.
    AllToAll,
    /// One rank gives another what it holds.
    SendRecv,
    /// One rank gives all others what it holds.
    Broadcast,
}

/// How a collective runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// Neighbour to neighbour around all members.
    Ring,
    /// Up and down two complementary binary trees.
    Tree,
    /// Doubling or halving distances: a binomial tree per block, all at once.
    Recursive,
    /// Tier by tier.
    TwoLevel,
    /// Reduced or copied by the switches of the outermost tier, tier by tier below.
    InSwitch,
    /// Each pair by itself.
    Direct,
}

impl CollectiveKind {
    /// The algorithms that can run it, the plainest first: that one runs where a plan names none.
    pub fn algorithms(self) -> &'static [Algorithm] {
        use Algorithm::{Direct, InSwitch, Recursive, Ring, Tree, TwoLevel};
        match self {
            Self::AllReduce => &[Ring, Tree, TwoLevel, InSwitch],
            Self::AllGather | Self::ReduceScatter => &[Ring, Recursive, TwoLevel, InSwitch],
            Self::AllToAll => &[Direct, TwoLevel],
            Self::SendRecv => &[Direct],
            Self::Broadcast => &[Ring, Tree, TwoLevel, InSwitch],
        }
    }

    /// The field's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllToAll => "all-to-all",
            Self::SendRecv => "send-receive",
            Self::Broadcast => "broadcast",
        }
    }
}

impl Algorithm {
    /// The name in plans and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Tree => "tree",
            Self::Recursive => "recursive",
            Self::TwoLevel => "two-level",
            Self::InSwitch => "in-switch",
            Self::Direct => "direct",
        }
    }
}

/// What a communication of a layer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CommunicationClass {
    /// Conversion of a tensor of the layer in forward.
    Forward,
    /// The same, once more in backward, because its result was not kept.
    Recompute,
    /// Conversion of a tensor's gradient.
    Gradient,
    /// Parameters brought from their storage to their use.
    ParameterGather,
    /// A micro-batch's parameter gradients into accumulators that are stored in parts.
    GradientAccumulate,
    /// Accumulated gradients to the optimizer, once per step.
    GradientReduce,
    /// New parameters from the optimizer to their storage, once per step.
    Update,
}

impl CommunicationClass {
    /// The name under which reports show it and a run counts it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward tensor",
            Self::Recompute => "recomputed tensor",
            Self::Gradient => "gradient",
            Self::ParameterGather => "parameter gather",
            Self::GradientAccumulate => "gradient accumulation",
            Self::GradientReduce => "gradient reduce",
            Self::Update => "update",
        }
    }

    /// The class of a value's conversion in a section.
    pub fn of_conversion(side: Side, section: Pass) -> Self {
        match (side, section) {
            (Side::Primal, Pass::Forward) => Self::Forward,
            (Side::Primal, Pass::Backward) => Self::Recompute,
            (Side::Gradient, _) => Self::Gradient,
        }
    }
}

/// By which algorithm some collectives of a program run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rule {
    /// What they are for.
    pub class: CommunicationClass,
    /// What they do.
    pub kind: CollectiveKind,
    /// Along which axes, in mesh order.
    pub axes: Vec<AxisId>,
    /// Of which tensor; of all where parameters move in buckets.
    pub tensor: Option<TensorId>,
    /// How they run.
    pub algorithm: Algorithm,
}

impl Rule {
    /// Whether it speaks of this collective.
    pub(crate) fn covers(
        &self,
        class: CommunicationClass,
        tensor: TensorId,
        (kind, axes): (CollectiveKind, &[AxisId]),
    ) -> bool {
        self.class == class
            && self.kind == kind
            && self.axes == axes
            && self.tensor.is_none_or(|own| own == tensor)
    }
}
