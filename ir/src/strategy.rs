//! Strategies: one use per mesh axis and operator, and every placement that follows from it.
//!
//! This file is the one rule. On an axis that a strategy assigns to factor `f`, an operand or result that has `f` is
//! `Shard(dim of f)`; an operand that lacks it is `Replicate`, a result that lacks it an unfinished sum. Backward, the
//! gradient of an operand that has `f` is `Shard(dim of f)`, of one that lacks it an unfinished sum, and the arriving
//! gradient is the dual of the result. On an axis without a factor everything is `Replicate`; or the operator defers,
//! and then the arriving gradient and all it yields are unfinished sums; or, where it is linear, values are.
//!
//! A ring is a factor with company: the axis cuts the queries' loop, and the blocks of what walks the keys' loop travel
//! round it, so that every coordinate meets all keys one block at a time and the gradients of keys come home finished.

use crate::graph::{Layer, Op, Sizes};
use crate::mesh::{AxisId, MAX_AXES, Mesh};
use crate::op::{Linear, Missing};
use crate::sharding::{Placement, Sharding};
use crate::signature::{FactorId, RingLoops, Signature, Split};

/// What an operator does with one mesh axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AxisUse {
    /// Splits this loop over the axis.
    Factor(FactorId),
    /// Splits the queries' loop, and lets blocks of the keys' loop travel round the axis (Liu et al. 2023, arXiv
    /// 2310.01889).
    Ring(RingLoops),
    /// Computes the same on every coordinate.
    Same,
    /// Computes the same forward; the arriving gradient stays an unfinished sum.
    Defer,
    /// Operands and results stay unfinished sums.
    Through,
}

impl AxisUse {
    /// The loop whose work is divided, if any is.
    pub fn divides(self) -> Option<FactorId> {
        match self {
            Self::Factor(factor) | Self::Ring(RingLoops { queries: factor, .. }) => Some(factor),
            Self::Same | Self::Defer | Self::Through => None,
        }
    }

    /// Whether operands and results that walk this loop are cut along it.
    pub fn cuts(self, factor: FactorId) -> bool {
        match self {
            Self::Factor(own) => own == factor,
            Self::Ring(RingLoops { queries, keys }) => queries == factor || keys == factor,
            Self::Same | Self::Defer | Self::Through => false,
        }
    }
}

/// What an operator does with every axis of its mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Strategy(pub [AxisUse; MAX_AXES]);

impl Strategy {
    /// Computes everything on every device.
    pub const SAME: Self = Self([AxisUse::Same; MAX_AXES]);

    /// What it does with an axis.
    pub fn on(&self, axis: AxisId) -> AxisUse {
        self.0[axis.0]
    }

    /// Number of blocks into which what walks a factor is cut.
    pub fn parts(&self, mesh: &Mesh, factor: FactorId) -> u64 {
        mesh.axis_ids().filter(|&axis| self.on(axis).cuts(factor)).map(|axis| mesh.size(axis)).product()
    }

    /// Axes round which blocks of keys travel.
    pub fn ring_axes(&self) -> Vec<AxisId> {
        (0..MAX_AXES).map(AxisId).filter(|&axis| matches!(self.on(axis), AxisUse::Ring(_))).collect()
    }
}

/// Placements of an operator's tensors and of their gradients under a strategy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placements {
    /// Operands, as the kernel takes them.
    pub operands: Vec<Sharding>,
    /// Results, as the kernel leaves them.
    pub results: Vec<Sharding>,
    /// Gradients of the results, as backward takes them.
    pub result_gradients: Vec<Sharding>,
    /// Gradients of the operands, as backward leaves them.
    pub operand_gradients: Vec<Sharding>,
}

/// All placements that a strategy implies.
pub fn placements(signature: &Signature, strategy: Strategy) -> Placements {
    let mut all = Placements {
        operands: vec![Sharding::REPLICATED; signature.operands.len()],
        results: vec![Sharding::REPLICATED; signature.results.len()],
        result_gradients: vec![Sharding::REPLICATED; signature.results.len()],
        operand_gradients: vec![Sharding::REPLICATED; signature.operands.len()],
    };
    let unfinished = match signature.missing {
        Missing::Max => Placement::PartialMax,
        Missing::Sum | Missing::Whole => Placement::PartialSum,
    };
    for axis in (0..MAX_AXES).map(AxisId) {
        let place = |list: &mut Vec<Sharding>, value: &dyn Fn(usize) -> Placement| {
            list.iter_mut().enumerate().for_each(|(i, sharding)| *sharding = sharding.with(axis, value(i)));
        };
        match strategy.on(axis) {
            AxisUse::Same => {}
            AxisUse::Defer => {
                place(&mut all.result_gradients, &|_| Placement::PartialSum);
                place(&mut all.operand_gradients, &|_| Placement::PartialSum);
            }
            AxisUse::Through => {
                place(&mut all.operands, &|_| Placement::PartialSum);
                place(&mut all.results, &|_| Placement::PartialSum);
            }
            AxisUse::Factor(factor) => {
                let shard = |dim: Option<usize>, other| dim.map_or(other, |dim| Placement::Shard(dim as u8));
                let operand = |i| signature.operand_dim(i, factor);
                let result = |i| signature.result_dim(i, factor);
                place(&mut all.operands, &|i| shard(operand(i), Placement::Replicate));
                place(&mut all.results, &|i| shard(result(i), unfinished));
                place(&mut all.result_gradients, &|i| shard(result(i), Placement::Replicate));
                place(&mut all.operand_gradients, &|i| shard(operand(i), Placement::PartialSum));
            }
            AxisUse::Ring(RingLoops { queries, keys }) => {
                let shard = |dim: Option<usize>, other| dim.map_or(other, |dim| Placement::Shard(dim as u8));
                let operand =
                    |i| signature.operand_dim(i, queries).or_else(|| signature.operand_dim(i, keys));
                let result = |i| signature.result_dim(i, queries);
                place(&mut all.operands, &|i| shard(operand(i), Placement::Replicate));
                place(&mut all.results, &|i| shard(result(i), unfinished));
                place(&mut all.result_gradients, &|i| shard(result(i), Placement::Replicate));
                place(&mut all.operand_gradients, &|i| shard(operand(i), Placement::PartialSum));
            }
        }
    }
    all
}

/// Every strategy of an operator on a mesh, in a fixed order.
///
/// An axis of one device is left `Same`. A factor may take several axes where its length divides by their product, or,
/// if its blocks may be unequal, where every device still gets a block.
pub fn strategies(layer: &Layer, op: &Op, sig: &Signature, mesh: &Mesh, sizes: &Sizes) -> Vec<Strategy> {
    let mut uses: Vec<AxisUse> = (0..sig.factors.len())
        .filter(|&i| sig.factors[i].split != Split::Whole)
        .map(|i| AxisUse::Factor(FactorId(i as u8)))
        .collect();
    uses.extend(sig.ring.map(AxisUse::Ring));
    uses.push(AxisUse::Same);
    // Deferring pays only where a gradient leaves the operator.
    if op.operands.iter().enumerate().any(|(i, &t)| op.kind.differentiates(i) && !layer.is_data(t)) {
        uses.push(AxisUse::Defer);
    }
    if op.kind.line().linear == Linear::Yes {
        uses.push(AxisUse::Through);
    }
    let mut list = combinations(mesh, |_| uses.clone());
    list.retain(|strategy| is_legal(sig, *strategy, mesh, sizes));
    list
}

/// Every strategy that takes one of `uses` on each axis, in the order of the uses; an axis of one device is `Same`.
pub fn combinations(mesh: &Mesh, uses: impl Fn(AxisId) -> Vec<AxisUse>) -> Vec<Strategy> {
    let mut list = vec![Strategy::SAME];
    for axis in mesh.axis_ids().filter(|&axis| mesh.size(axis) > 1) {
        let uses = uses(axis);
        list = list
            .iter()
            .flat_map(|base| {
                uses.iter().map(|&one| {
                    let mut next = *base;
                    next.0[axis.0] = one;
                    next
                })
            })
            .collect();
    }
    list
}

/// Whether every factor can be cut into as many blocks as the strategy asks for.
pub fn is_legal(sig: &Signature, strategy: Strategy, mesh: &Mesh, sizes: &Sizes) -> bool {
    sig.factors.iter().enumerate().all(|(i, factor)| {
        let id = FactorId(i as u8);
        let parts = strategy.parts(mesh, id);
        let length = sizes.dims[factor.dim.0];
        let travels = sig.ring.is_some_and(|ring| ring.keys == id);
        match factor.split {
            Split::Whole if travels => {
                let alone = |axis: AxisId| strategy.on(axis) == AxisUse::Factor(id);
                !mesh.axis_ids().any(alone) && length.is_multiple_of(parts)
            }
            Split::Whole => parts == 1,
            Split::Even => length.is_multiple_of(parts),
            // Even the last block holds a row, whichever way axes nest.
            Split::Uneven => length >= parts * parts,
        }
    })
}
