//! The space of strategies inside a layer: which loops of an operator an axis may split.
//!
//! The one rule (`ir::strategy`) allows more; what is left out here is left out for a reason, and named in the plan:
//! - a dim that some operator must keep whole (the stream's hidden dim, head dims) is cut by none, a router's experts
//!   excepted: cutting it before would have to be undone at that operator;
//! - an axis that leaves the node splits sequences, tokens or experts, never the inside of a product: those loops put
//!   a reduction of activations on the slow link in every layer;
//! - deferring a gradient is offered where it can pay: at forks and on the way from the stream to them.

use std::collections::BTreeSet;

use ir::graph::{DimId, Extent, Layer, Op, Role, Sizes};
use ir::mesh::{AxisId, Mesh};
use ir::op::{Linear, OpKind};
use ir::signature::{FactorId, Signature, Split, signature};
use ir::strategy::{AxisUse, Strategy, is_legal};

/// How fast the links along an axis are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// All its members share a node.
    Node,
    /// It crosses nodes.
    Network,
}

/// The loops an axis may split, per operator of a layer.
pub struct Space<'a> {
    layer: &'a Layer,
    /// Dims that some operator keeps whole.
    whole: BTreeSet<DimId>,
    /// Dims of experts.
    experts: BTreeSet<DimId>,
}

impl<'a> Space<'a> {
    /// The space of a layer.
    pub fn new(layer: &'a Layer) -> Self {
        let mut whole = BTreeSet::new();
        let mut experts = BTreeSet::new();
        for op in &layer.ops {
            if matches!(op.kind, OpKind::Route { .. }) {
                experts.extend(layer.tensors[op.results[0].0].dims.last().copied());
                continue;
            }
            let sig = signature(layer, op);
            // Attention keeps the keys' loop whole; the sequence itself can be cut everywhere else.
            let closed = sig.factors.iter().filter(|f| f.split == Split::Whole && fixed(layer, f.dim));
            whole.extend(closed.map(|factor| factor.dim));
        }
        Self { layer, whole, experts }
    }

    /// Every strategy of an operator, in a fixed order.
    pub fn strategies(&self, op: &Op, sig: &Signature, mesh: &Mesh, reach: &[Reach], sizes: &Sizes) -> Vec<Strategy> {
        let mut list = vec![Strategy::SAME];
        for axis in mesh.axis_ids().filter(|&axis| mesh.size(axis) > 1) {
            let uses = self.uses(op, sig, mesh, (axis, reach[axis.0]), sizes);
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
        list.retain(|strategy| is_legal(sig, *strategy, mesh, sizes));
        list
    }

    fn uses(&self, op: &Op, sig: &Signature, mesh: &Mesh, axis: (AxisId, Reach), sizes: &Sizes) -> Vec<AxisUse> {
        let (axis, reach) = axis;
        let open = |(i, factor): (usize, &ir::signature::Factor)| {
            let extent = self.layer.dims[factor.dim.0].extent;
            let crossing = matches!(extent, Extent::MicroBatch | Extent::Sequence | Extent::Slots { .. })
                || self.experts.contains(&factor.dim);
            let cuttable = factor.split != Split::Whole && !self.whole.contains(&factor.dim);
            let long_enough = sizes.dims[factor.dim.0] >= mesh.size(axis);
            let allowed = cuttable && long_enough && (crossing || reach == Reach::Node);
            allowed.then_some(AxisUse::Factor(FactorId(i as u8)))
        };
        let mut uses: Vec<AxisUse> = sig.factors.iter().enumerate().filter_map(open).collect();
        let splits_tokens = uses.iter().any(|one| {
            let AxisUse::Factor(id) = one else { return false };
            let dim = sig.factors[id.0 as usize].dim;
            matches!(self.layer.dims[dim.0].extent, Extent::MicroBatch | Extent::Sequence)
                && sizes.dims[dim.0].is_multiple_of(mesh.size(axis))
        });
        if reach == Reach::Node || !splits_tokens {
            uses.push(AxisUse::Same);
            if defers(&op.kind) {
                uses.push(AxisUse::Defer);
            }
            if op.kind.line().linear == Linear::Yes {
                uses.push(AxisUse::Through);
            }
        }
        uses
    }
}

fn fixed(layer: &Layer, dim: DimId) -> bool {
    matches!(layer.dims[dim.0].extent, Extent::Fixed(_) | Extent::Uneven(_))
}

/// Operators at which an unfinished gradient may pay: forks, and what lies between them and a product whose loop is
/// too short for the axis.
fn defers(kind: &OpKind) -> bool {
    matches!(
        kind,
        OpKind::Fork
            | OpKind::Linear
            | OpKind::Bias
            | OpKind::Rope { .. }
            | OpKind::RmsNorm { .. }
            | OpKind::Split { .. }
            | OpKind::AppendShared
    )
}

/// True for a tensor that is computed.
pub fn is_activation(layer: &Layer, tensor: ir::graph::TensorId) -> bool {
    layer.tensors[tensor.0].role == Role::Activation
}
