//! The space of strategies inside a layer: which loops of an operator an axis may split.
//!
//! The one rule (`ir::strategy`) allows more; what is left out here is left out for a reason, and named in the plan:
//! - a dim that some operator must keep whole (the stream's hidden dim, head dims) is cut by none, a router's experts
//!   excepted: cutting it before would have to be undone at that operator;
//! - an axis that leaves the node splits sequences, tokens or experts, never the inside of a product: those loops put
//!   a reduction of activations on the slow link in every layer;
//! - computing the same on every device of an axis is offered where nothing inside the operator can be cut;
//! - deferring a gradient is offered where it can pay: at forks and on the way from the stream to them.

use std::collections::BTreeSet;

use ir::graph::{DimId, Extent, Layer, Op, Role, Sizes};
use ir::mesh::Mesh;
use ir::op::{Linear, OpKind};
use ir::signature::{Factor, FactorId, Signature, Split, signature};
use ir::strategy::{AxisUse, Strategy, combinations, is_legal};

/// How fast the links along an axis are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// All its members share a node.
    Node,
    /// It crosses nodes.
    Network,
}

/// What the user lets an axis do. `Free` is the search's own; the others come from pins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AxisRule {
    /// Whatever its reach allows.
    Free,
    /// Sequences, tokens or experts, as if it crossed nodes: the outer axes of a mesh of three and more.
    Around,
    /// Splits sequences.
    Sequences,
    /// Splits sequences, and experts where tokens are routed.
    Experts,
    /// Splits the tokens of a sequence.
    Tokens,
    /// Splits tokens, and experts where tokens are routed.
    TokensAndExperts,
    /// Splits the inside of products; between them tokens or nothing.
    Inside(Between),
    /// Splits the inside of products, but experts where tokens are routed.
    InsideAndExperts(Between),
}

/// What an axis that splits products does between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// Splits tokens.
    Tokens,
    /// Computes the same on every device.
    Same,
    /// Either.
    Free,
}

/// An axis as the space sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisView {
    /// How fast its links are.
    pub reach: Reach,
    /// What it may do.
    pub rule: AxisRule,
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
        // The stream passes whole in its hidden dim.
        whole.extend(
            layer
                .stream_in
                .into_iter()
                .chain([layer.out])
                .filter_map(|t| layer.tensors[t.0].dims.last().copied()),
        );
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
    pub fn strategies(
        &self,
        op: &Op,
        sig: &Signature,
        (mesh, views): (&Mesh, &[AxisView]),
        sizes: &Sizes,
    ) -> Vec<Strategy> {
        let mut list = combinations(mesh, |axis| self.uses(op, sig, views[axis.0], (mesh.size(axis), sizes)));
        list.retain(|strategy| is_legal(sig, *strategy, mesh, sizes));
        list
    }

    /// What a factor of an operator is, or nothing where no axis may cut it.
    fn class(&self, factor: &Factor) -> Option<Class> {
        if factor.split == Split::Whole || self.whole.contains(&factor.dim) {
            return None;
        }
        Some(match self.layer.dims[factor.dim.0].extent {
            Extent::MicroBatch => Class::Sequences,
            Extent::Sequence | Extent::Slots { .. } => Class::Tokens,
            Extent::Fixed(_) | Extent::Uneven(_) if self.experts.contains(&factor.dim) => Class::Experts,
            Extent::Fixed(_) | Extent::Uneven(_) => Class::Inside,
        })
    }

    fn uses(&self, op: &Op, sig: &Signature, view: AxisView, (size, sizes): (u64, &Sizes)) -> Vec<AxisUse> {
        let classes: Vec<(FactorId, Class, bool)> = sig
            .factors
            .iter()
            .enumerate()
            .filter(|(_, factor)| sizes.dims[factor.dim.0] >= size)
            .filter_map(|(i, factor)| {
                let divides = sizes.dims[factor.dim.0].is_multiple_of(size) || factor.split == Split::Uneven;
                self.class(factor).map(|class| (FactorId(i as u8), class, divides))
            })
            .collect();
        let has = |wanted: Class| classes.iter().any(|(_, class, divides)| *class == wanted && *divides);
        let routed = has(Class::Experts) && self.on_slots(op);
        let tokens = if routed { TokensAre::Routed } else { TokensAre::InOrder };
        let (allowed, same) = allowed(view, tokens, &has);
        // Where the inside of an operator can be cut, computing all of it everywhere never pays.
        let moves_tokens =
            matches!(op.kind, OpKind::Dispatch | OpKind::Combine | OpKind::Fork | OpKind::Route { .. });
        let same = same && (moves_tokens || !(has(Class::Inside) || routed));
        // Of several loops inside a product (KV heads, heads of a group) the first that divides stands for all.
        let first_inside = classes.iter().find(|(_, class, divides)| *class == Class::Inside && *divides);
        let stands =
            |id: FactorId, class: Class| class != Class::Inside || first_inside.is_some_and(|f| f.0 == id);
        let mut uses: Vec<AxisUse> = classes
            .iter()
            .filter(|(id, class, divides)| *divides && allowed.contains(class) && stands(*id, *class))
            .map(|(id, ..)| AxisUse::Factor(*id))
            .collect();
        if same || uses.is_empty() {
            uses.push(AxisUse::Same);
            if defers(&op.kind) {
                uses.push(AxisUse::Defer);
            }
            // A sum that passes a fork meets a norm, which must finish it; only additions gain by waiting.
            if op.kind.line().linear == Linear::Yes && matches!(op.kind, OpKind::Add | OpKind::Scale { .. }) {
                uses.push(AxisUse::Through);
            }
        }
        uses
    }

    /// Whether an operator works on expert slots.
    fn on_slots(&self, op: &Op) -> bool {
        let slots = |dim: &DimId| matches!(self.layer.dims[dim.0].extent, Extent::Slots { .. });
        op.operands.iter().chain(&op.results).any(|t| self.layer.tensors[t.0].dims.iter().any(slots))
    }
}

/// What a loop is to an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Sequences,
    Tokens,
    Experts,
    Inside,
}

/// Whether an operator sees tokens in their sequence or in the slots of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokensAre {
    InOrder,
    Routed,
}

/// Classes of loops that an axis may split, and whether it may compute the same instead.
fn allowed(view: AxisView, tokens: TokensAre, has: &dyn Fn(Class) -> bool) -> (Vec<Class>, bool) {
    use Class::{Experts, Inside, Sequences, Tokens};
    let routed = tokens == TokensAre::Routed;
    let between = |between: Between| match between {
        _ if has(Inside) => (vec![Inside], true),
        Between::Tokens | Between::Free => (vec![Tokens], true),
        Between::Same => (Vec::new(), true),
    };
    match view.rule {
        AxisRule::Free if view.reach == Reach::Node => (vec![Sequences, Tokens, Experts, Inside], true),
        AxisRule::Free | AxisRule::Around => {
            let experts_only = routed && !has(Sequences) && !has(Tokens);
            (vec![Sequences, Tokens, Experts], !(has(Sequences) || has(Tokens) || experts_only))
        }
        AxisRule::Experts if routed => (vec![Sequences, Experts], false),
        AxisRule::TokensAndExperts if routed => (vec![Tokens, Experts], false),
        AxisRule::InsideAndExperts(_) if routed => (vec![Tokens, Experts], false),
        AxisRule::Sequences | AxisRule::Experts => (vec![Sequences], false),
        AxisRule::Tokens | AxisRule::TokensAndExperts => (vec![Tokens], false),
        AxisRule::Inside(inner) | AxisRule::InsideAndExperts(inner) => between(inner),
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
