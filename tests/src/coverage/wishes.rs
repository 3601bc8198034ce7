//! Plans by wish: for each mesh axis, the loops that operators shall cut along it, in order of preference.
//!
//! An operator takes, of its legal strategies, the one that comes nearest to the wishes of all axes; so a wish names a
//! strategy of the literature by what tells it from the others and leaves the rest to what is legal.

use ir::collective::Algorithm;
use ir::graph::{Layer, Op, OpId};
use ir::mesh::AxisId;
use ir::op::OpKind;
use ir::program::{AxisSet, Home, StateHome, Storage};
use ir::sharding::Placement;
use ir::signature::signature;
use ir::strategy::{AxisUse, Placements, Strategy};
use ir::token_order::TokenOrder;

use crate::fuzz::Chooser;

/// What is wished of one axis.
#[derive(Clone, Debug)]
pub(super) struct AxisWish {
    /// Devices along it.
    pub(super) size: u64,
    /// The dim of the stream that it cuts, if any: batch 0, sequence 1, hidden 2.
    pub(super) stream: Option<u8>,
    /// By the end of an operator's name (empty: every other operator), loops from most to least wished; `ring` for a
    /// ring over keys. An operator that can have none of them does the same on every device.
    pub(super) cuts: &'static [(&'static str, &'static [&'static str])],
}

/// What backward computes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// Nothing.
    Nothing,
    /// Everything.
    Everything,
    /// What the attention core and the activations leave.
    Cheap,
    /// Every other operator: a set that nobody has a name for.
    EveryOther,
}

/// Everything that is wished of a plan.
#[derive(Clone, Debug)]
pub(super) struct Wishes {
    /// Of its mesh.
    pub(super) axes: Vec<AxisWish>,
    /// Axes over which parameters, gradients and optimizer states are cut, where the parameter is whole on them.
    pub(super) storage: [&'static [usize]; 3],
    /// Which memory holds optimizer states.
    pub(super) home: StateHome,
    /// Which memory holds what layers keep.
    pub(super) kept: Home,
    /// Which memory holds parameters between uses.
    pub(super) parameters: Home,
    /// What backward computes again.
    pub(super) again: Again,
    /// The order of tokens.
    pub(super) order: TokenOrder,
    /// The algorithm of every collective that has it.
    pub(super) algorithm: Option<Algorithm>,
    /// Operators met so far.
    pub(super) met: usize,
}

impl Wishes {
    /// These axes, and nothing else.
    pub(super) fn of(axes: &[AxisWish]) -> Self {
        Self {
            axes: axes.to_vec(),
            storage: [&[]; 3],
            home: StateHome::Device,
            kept: Home::Device,
            parameters: Home::Device,
            again: Again::Nothing,
            order: TokenOrder::Natural,
            algorithm: None,
            met: 0,
        }
    }

    /// How far a strategy is from what is wished, axis by axis.
    fn distance(&self, layer: &Layer, op: &Op, strategy: &Strategy) -> Vec<usize> {
        self.axes.iter().enumerate().map(|(axis, wish)| wish.distance(layer, op, strategy.0[axis])).collect()
    }
}

impl AxisWish {
    fn distance(&self, layer: &Layer, op: &Op, found: AxisUse) -> usize {
        let own = self.cuts.iter().find(|(end, _)| !end.is_empty() && op.name.ends_with(end));
        let list =
            own.or_else(|| self.cuts.iter().find(|(end, _)| end.is_empty())).map_or(&[][..], |one| one.1);
        let sig = signature(layer, op);
        let is = |word: &&str| match found {
            AxisUse::Factor(factor) => sig.factor(word) == Some(factor),
            AxisUse::Ring(_) => **word == *"ring",
            AxisUse::Same | AxisUse::Defer | AxisUse::Through => false,
        };
        let same = usize::from(found != AxisUse::Same);
        list.iter().position(is).unwrap_or(list.len() + same)
    }
}

impl Chooser for Wishes {
    fn stream(&mut self, axis: AxisId, options: &[Placement]) -> usize {
        let wished = self.axes[axis.0].stream.map_or(Placement::Replicate, Placement::Shard);
        // Past the end: no plan, rather than another plan.
        options.iter().position(|&option| option == wished).unwrap_or(options.len())
    }

    fn strategy(&mut self, layer: &Layer, op: OpId, options: &[(Strategy, Placements)]) -> usize {
        let distance = |at: &usize| self.distance(layer, &layer.ops[op.0], &options[*at].0);
        (0..options.len()).min_by_key(distance).unwrap_or(0)
    }

    fn again(&mut self, op: &Op) -> bool {
        self.met += 1;
        match self.again {
            Again::Nothing => false,
            Again::Everything => true,
            Again::Cheap => {
                matches!(op.kind, OpKind::Attention { .. } | OpKind::Act { .. } | OpKind::Glu { .. })
            }
            Again::EveryOther => self.met.is_multiple_of(2),
        }
    }

    fn homes(&mut self) -> [Home; 2] {
        [self.kept, self.parameters]
    }

    fn storage(&mut self, whole: AxisSet) -> Storage {
        let cut = |axes: &[usize]| {
            let wished = |axis: &AxisId| axes.contains(&axis.0);
            AxisSet::of(&whole.axes().into_iter().filter(wished).collect::<Vec<_>>())
        };
        let [parameter, gradient, optimizer] = self.storage.map(cut);
        Storage { parameter, gradient, optimizer, home: self.home }
    }

    fn layers(&mut self, even: usize, _: usize) -> usize {
        even
    }

    fn slice(&mut self, slice: u32) -> usize {
        usize::from(slice == 0)
    }

    fn given_away(&mut self, most: usize) -> usize {
        most
    }

    fn token_order(&mut self, options: &[TokenOrder]) -> usize {
        options.iter().position(|order| *order == self.order).unwrap_or(0)
    }

    fn shared(&mut self) -> bool {
        true
    }

    fn algorithm(&mut self, options: &[Algorithm]) -> usize {
        options.iter().position(|option| Some(*option) == self.algorithm).unwrap_or(0)
    }
}
