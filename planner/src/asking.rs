//! What is asked of a candidate: in which forms, below which time, with what all its layers have in common.

use ir::sharding::Sharding;

use crate::clock::Covers;
use crate::forms::Forms;
use crate::given::{RecomputeRule, StorageRule};
use crate::request::Pins;

/// What all layers have in common, in place of what the request says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Way {
    /// What all parameters keep to.
    pub(crate) storage: Option<StorageRule>,
    /// What all layers compute again.
    pub(crate) recompute: Option<RecomputeRule>,
    /// What compute covers of what a step sends once, in place of what the bound says.
    pub(crate) covers: Option<Covers>,
    /// How the stream passes between all of them, in place of what suits the bound.
    pub(crate) stream: Option<Sharding>,
}

impl Way {
    /// Parameters that all keep to a storage.
    pub(crate) fn stored(storage: StorageRule) -> Self {
        Self { storage: Some(storage), ..Self::default() }
    }

    /// Layers that all compute as much again.
    pub(crate) fn again(recompute: RecomputeRule) -> Self {
        Self { recompute: Some(recompute), ..Self::default() }
    }
}

/// What is tried for all layers: nothing, then the ZeRO stages that cut something and are left open.
pub(crate) fn ways(pins: &Pins) -> impl Iterator<Item = Way> + use<> {
    let storages = open_storages(pins).into_iter().filter(|rule| *rule != StorageRule::Whole);
    std::iter::once(Way::default()).chain(storages.map(Way::stored))
}

/// The ZeRO stages that all parameters may have; none where somebody says how they are stored.
pub(crate) fn open_storages(pins: &Pins) -> Vec<StorageRule> {
    if pins.zero.is_some() || !pins.constraints.is_empty() {
        return Vec::new();
    }
    let stages = (0..=3).filter(|stage| !pins.forbid.zero.contains(stage));
    stages.map(StorageRule::of_stage).collect()
}

/// How a candidate is worked out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asking<'f> {
    /// Forms of its layers.
    pub(crate) forms: Forms<'f>,
    /// What takes no less is of no interest.
    pub(crate) limit: f64,
    /// What takes so many times less is known: choices by other sums do not make that up.
    pub(crate) known: f64,
    /// What all layers have in common.
    pub(crate) way: Way,
    /// Times that prices of memory between those in use are tried, at most.
    pub(crate) rounds: usize,
    /// Whether layers of the fastest move between its stages as long as that makes it faster.
    pub(crate) shifts: bool,
}

impl<'f> Asking<'f> {
    /// In some forms, whatever it takes, at the first prices of memory alone.
    pub(crate) fn of(forms: Forms<'f>) -> Self {
        let (limit, known) = (f64::INFINITY, f64::INFINITY);
        Self { forms, limit, known, way: Way::default(), rounds: 0, shifts: false }
    }
}
