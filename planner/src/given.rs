//! What is settled before the choices inside a layer are made: the stream, ties, and rules on storage and
//! recomputation.

use std::collections::{BTreeMap, BTreeSet};

use ir::graph::{Layer, TensorId};
use ir::lower::Recompute;
use ir::op::OpKind;
use ir::program::{AxisSet, Home, StateHome, Storage};
use ir::sharding::Sharding;

use crate::clock::Covers;
use crate::constraints::Constraints;
use crate::request::{ContextKind, Forbid};

/// What the caller already knows of the choice.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// Sharding of the stream, where it is decided.
    pub stream: Option<Sharding>,
    /// Use and storage of parameters that are tied to others.
    pub tied: BTreeMap<TensorId, TiedUse>,
    /// Parameters that the owners of their ties hold, on the same stage: nothing of them is stored, updated or sent
    /// once per step for this layer.
    pub shared: BTreeSet<TensorId>,
    /// Whether results may be computed again, must be, or may not.
    pub recompute: RecomputeRule,
    /// Where states may be cut.
    pub storage: StorageRule,
    /// Which memory may hold optimizer states.
    pub homes: StateRule,
    /// Which memory may hold what layers keep for backward.
    pub kept: HomeRule,
    /// Which memory may hold parameters between uses.
    pub parameters: HomeRule,
    /// Whether it is a bound that is asked for: what a stage has once for all its layers is then shared by the most
    /// that a stage has, so that none counts more of it than it has.
    pub of_bound: bool,
    /// How attention may see keys that other devices hold.
    pub context: Option<ContextKind>,
    /// What of storages, recomputation and attention may not be.
    pub forbid: Forbid,
    /// What is said of single tensors and operators.
    pub constraints: Constraints,
    /// What compute covers of the communication that a step has once.
    pub covers: Covers,
    /// Whether sequences are cut into slices.
    pub cuts: bool,
}

/// How both sides of a tie must use and store a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TiedUse {
    /// Sharding of the use.
    pub used: Sharding,
    /// How backward leaves the gradient, where both sides add to one.
    pub summed: Option<Sharding>,
    /// Where the states live; nothing where that is open.
    pub storage: Option<Storage>,
}

impl TiedUse {
    pub(crate) fn admits(self, [used, gradient]: [Sharding; 2], storage: Storage) -> bool {
        used == self.used
            && self.storage.is_none_or(|own| own == storage)
            && self.summed.is_none_or(|summed| summed == gradient)
    }
}

/// Which memory may hold the optimizer state of a parameter.
///
/// That a layer's states lie on drives instead of in the host's memory is no choice of an operator: on a device nothing
/// is another for it. Where both may be, every choice is weighed with and without, and those beside them that are made
/// where nothing but drives may have states: fewer are worth the way there (`offload`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StateRule {
    /// The device's.
    #[default]
    Device,
    /// The device's or the host's, as it pays.
    Free,
    /// The same, and layer by layer the host's drives in place of its memory.
    Anywhere,
    /// The device's or the host's drives, as it pays.
    OrNvme,
    /// The host's.
    Host,
    /// The host's drives.
    Nvme,
}

impl StateRule {
    /// What is left to a parameter, the device first.
    pub(crate) fn homes(self) -> &'static [StateHome] {
        match self {
            Self::Device => &[StateHome::Device],
            Self::Free | Self::Anywhere => &[StateHome::Device, StateHome::Host],
            Self::OrNvme => &[StateHome::Device, StateHome::Nvme],
            Self::Host => &[StateHome::Host],
            Self::Nvme => &[StateHome::Nvme],
        }
    }

    /// Those to try for parameters that are one, which are stored in one way: off the device where they may be.
    pub(crate) fn tied_homes(self) -> &'static [StateHome] {
        match self {
            Self::Device => &[StateHome::Device],
            Self::Free | Self::Host => &[StateHome::Host],
            Self::Anywhere => &[StateHome::Host, StateHome::Nvme],
            Self::OrNvme | Self::Nvme => &[StateHome::Nvme],
        }
    }
}

/// Which memory may hold what a layer keeps for backward, or its parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HomeRule {
    /// The device's.
    #[default]
    Device,
    /// Either, as it pays.
    Free,
    /// The host's.
    Host,
}

impl HomeRule {
    /// What is left, the device first.
    pub(crate) fn homes(self) -> &'static [Home] {
        match self {
            Self::Device => &[Home::Device],
            Self::Free => &[Home::Device, Home::Host],
            Self::Host => &[Home::Host],
        }
    }

    /// Where it lies as far as nobody asked what pays.
    pub(crate) fn usual(self) -> Home {
        match self {
            Self::Device | Self::Free => Home::Device,
            Self::Host => Home::Host,
        }
    }

    /// The rule of what a layer keeps, or of its parameters, on one layer: engines move that of the layers between
    /// embedding and head.
    pub(crate) fn on(self, layer: &Layer) -> Self {
        if layer.is_end() { Self::Device } else { self }
    }
}

/// Which storages a parameter may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StorageRule {
    /// As it pays.
    #[default]
    Free,
    /// All states whole.
    Whole,
    /// Only the optimizer state cut.
    Optimizer,
    /// Optimizer state and gradient cut.
    Gradient,
    /// All cut.
    Parameter,
    /// Parameter and optimizer state cut; gradients are summed whole and reduced once per step.
    ButGradient,
}

impl StorageRule {
    /// The rule that a ZeRO stage names.
    pub(crate) fn of_stage(stage: u8) -> Self {
        match stage {
            0 => Self::Whole,
            1 => Self::Optimizer,
            2 => Self::Gradient,
            _ => Self::Parameter,
        }
    }

    /// What it cuts of a parameter that could be cut over `whole` axes, with states on the device; nothing where it
    /// leaves that open.
    pub(crate) fn cuts(self, whole: AxisSet) -> Option<Storage> {
        let cut = |[parameter, gradient, optimizer]: [bool; 3]| {
            let over = |yes: bool| if yes { whole } else { AxisSet::EMPTY };
            Some(Storage::on_device(over(parameter), over(gradient), over(optimizer)))
        };
        match self {
            Self::Free => None,
            Self::Whole => cut([false, false, false]),
            Self::Optimizer => cut([false, false, true]),
            Self::Gradient => cut([false, true, true]),
            Self::Parameter => cut([true, true, true]),
            Self::ButGradient => cut([true, false, true]),
        }
    }

    /// Whether the cuts of a storage obey, for a parameter that could be cut over `whole` axes.
    pub(crate) fn admits(self, storage: Storage, whole: AxisSet) -> bool {
        self.cuts(whole).is_none_or(|cuts| storage == Storage { home: storage.home, ..cuts })
    }

    /// The same of a parameter that is frozen: it has no gradient and no optimizer state to cut.
    pub(crate) fn admits_frozen(self, storage: Storage, whole: AxisSet) -> bool {
        match self {
            Self::Free => true,
            Self::Whole | Self::Optimizer | Self::Gradient => storage == Storage::default(),
            Self::Parameter | Self::ButGradient => storage == Storage::frozen(whole),
        }
    }
}

/// Which operators may be computed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecomputeRule {
    /// As it pays.
    #[default]
    Free,
    /// Nothing is.
    Never,
    /// Only the attention core.
    AttentionOnly,
    /// Everything is.
    Always,
    /// As it pays, but for products.
    ButProducts,
    /// As it pays, but the attention core is.
    AtLeastAttention,
}

impl RecomputeRule {
    /// The rule on one layer: engines compute the layers between embedding and head again, never these themselves.
    pub(crate) fn on(self, layer: &Layer) -> Self {
        match self {
            Self::Always if layer.is_end() => Self::Free,
            Self::Free
            | Self::Never
            | Self::AttentionOnly
            | Self::ButProducts
            | Self::AtLeastAttention
            | Self::Always => self,
        }
    }

    /// What it leaves of an operator of a kind. For a fork the two mean: nobody, or somebody, reads it in backward.
    pub(crate) fn options(self, kind: &OpKind) -> Vec<Recompute> {
        let both = vec![Recompute::Keep, Recompute::Again];
        if *kind == OpKind::Fork {
            return both;
        }
        match self {
            Self::Free => both,
            Self::Never => vec![Recompute::Keep],
            Self::Always => vec![Recompute::Again],
            Self::AttentionOnly if matches!(kind, OpKind::Attention { .. }) => vec![Recompute::Again],
            Self::AttentionOnly => vec![Recompute::Keep],
            Self::ButProducts if matches!(kind, OpKind::Linear) => vec![Recompute::Keep],
            Self::AtLeastAttention if matches!(kind, OpKind::Attention { .. }) => vec![Recompute::Again],
            Self::ButProducts | Self::AtLeastAttention => both,
        }
    }
}
