//! The space of strategies inside a layer: which loops of an operator an axis may split.
//!
//! The one rule (`ir::strategy`) allows more; what is left out here is left out for a reason, and named in the plan:
//! - a dim that some operator must keep whole (the stream's hidden dim, head dims) is cut by none, a router's experts
//!   excepted: cutting it before would have to be undone at that operator;
//! - an axis that leaves the node splits sequences, tokens or experts, never the inside of a product: those loops put
//!   a reduction of activations on the slow link in every layer;
//! - computing the same on every device of an axis is offered where nothing inside the operator can be cut;
//! - deferring a gradient is offered where it can pay: at forks and on the way from the stream to them.

use std::cell::OnceCell;
use std::cmp::Reverse;
use std::collections::BTreeSet;

use ir::graph::{DimId, Extent, Layer, Op, OpId, Role, Sizes, TensorId};
use ir::mesh::{AxisId, Mesh};
use ir::names::naming_products;
use ir::op::{Linear, OpKind};
use ir::signature::{Factor, FactorId, RingLoops, Signature, Split, signature};
use ir::strategy::{AxisUse, Strategy, combinations, is_legal};

use crate::forbid::{Barred, NameBars};
use crate::request::ContextKind;

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
    /// Splits sequences, between groups that each hold all states.
    Replicas,
    /// Splits sequences, of which its coordinates run unequal numbers: nothing crosses it but once per step.
    Shares,
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
    /// What it may not do in spite of that.
    pub barred: Barred,
}

impl AxisView {
    /// Whether it may split the inside of products.
    fn may_split_products(self) -> bool {
        match self.rule {
            AxisRule::Inside(_) | AxisRule::InsideAndExperts(_) => true,
            AxisRule::Free => self.reach == Reach::Node && !self.barred.inside,
            AxisRule::Around
            | AxisRule::Sequences
            | AxisRule::Replicas
            | AxisRule::Shares
            | AxisRule::Experts
            | AxisRule::Tokens
            | AxisRule::TokensAndExperts => false,
        }
    }
}

/// The loops an axis may split, per operator of a layer.
pub struct Space<'a> {
    layer: &'a Layer,
    /// Dims that some operator keeps whole.
    whole: BTreeSet<DimId>,
    /// Dims of experts.
    experts: BTreeSet<DimId>,
    /// Dims of tokens, or of what an encoder has in their place.
    tokens: BTreeSet<DimId>,
    /// How attention may see keys that other devices hold, if it is decided.
    context: Option<ContextKind>,
    /// How it may not.
    no_context: &'a [ContextKind],
    /// First results of the products that hold more than half of the weights, once somebody asks for them.
    leading: OnceCell<BTreeSet<TensorId>>,
}

impl<'a> Space<'a> {
    /// The space of a layer.
    pub fn new(layer: &'a Layer, context: Option<ContextKind>) -> Self {
        let mut whole = BTreeSet::new();
        let mut experts = BTreeSet::new();
        let tokens: BTreeSet<DimId> =
            (0..layer.dims.len()).map(DimId).filter(|&dim| layer.counts_tokens(dim)).collect();
        // The stream passes whole in its hidden dim.
        whole.extend(
            layer.stream_in.iter().chain(&layer.out).filter_map(|t| layer.tensors[t.0].dims.last().copied()),
        );
        for op in &layer.ops {
            if matches!(op.kind, OpKind::Route { .. }) {
                experts.extend(layer.tensors[op.results[0].0].dims.last().copied());
                continue;
            }
            let sig = signature(layer, op);
            // Attention keeps the keys' loop whole; the sequence itself can be cut everywhere else.
            let closed =
                |f: &&Factor| f.split == Split::Whole && fixed(layer, f.dim) && !tokens.contains(&f.dim);
            whole.extend(sig.factors.iter().filter(closed).map(|factor| factor.dim));
        }
        Self { layer, whole, experts, tokens, context, no_context: &[], leading: OnceCell::new() }
    }

    /// The space without some ways to see keys that other devices hold.
    pub fn without(self, no_context: &'a [ContextKind]) -> Self {
        Self { no_context, ..self }
    }

    /// Every strategy of an operator, in a fixed order.
    pub fn strategies(
        &self,
        op: &Op,
        sig: &Signature,
        (mesh, views): (&Mesh, &[AxisView]),
        sizes: &Sizes,
    ) -> Vec<Strategy> {
        let inside = |axis: &AxisId| views[axis.0].may_split_products();
        let together: u64 = mesh.axis_ids().filter(inside).map(|axis| mesh.size(axis)).product();
        let mut list =
            combinations(mesh, |axis| self.uses(op, sig, views[axis.0], (mesh.size(axis), together, sizes)));
        list.retain(|strategy| is_legal(sig, *strategy, mesh, sizes));
        list
    }

    /// Parts in which the inside of an operator can be cut.
    pub(crate) fn most_parts(&self, op: &Op) -> u64 {
        let sig = signature(self.layer, op);
        let inside = sig.factors.iter().filter(|factor| self.class(factor) == Some(Class::Inside));
        inside.filter_map(|factor| self.layer.dims[factor.dim.0].extent.fixed()).product()
    }

    /// What a factor of an operator is, or nothing where no axis may cut it.
    fn class(&self, factor: &Factor) -> Option<Class> {
        if factor.split == Split::Whole || self.whole.contains(&factor.dim) {
            return None;
        }
        Some(match self.layer.dims[factor.dim.0].extent {
            Extent::MicroBatch => Class::Sequences,
            Extent::Sequence | Extent::UpToSlice | Extent::Slots { .. } => Class::Tokens,
            Extent::Fixed(_) | Extent::Uneven(_) if self.tokens.contains(&factor.dim) => Class::Tokens,
            Extent::Fixed(_) | Extent::Uneven(_) if self.experts.contains(&factor.dim) => Class::Experts,
            Extent::Fixed(_) | Extent::Uneven(_) => Class::Inside,
        })
    }

    /// What an axis of `size` devices may do; `together` are those of all axes that split the inside of products.
    fn uses(
        &self,
        op: &Op,
        sig: &Signature,
        view: AxisView,
        (size, together, sizes): (u64, u64, &Sizes),
    ) -> Vec<AxisUse> {
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
        let on_slots = self.on_slots(op);
        let routed =
            on_slots && classes.iter().any(|(_, class, divides)| *class == Class::Experts && *divides);
        let tokens = match (routed, matches!(op.kind, OpKind::Linear | OpKind::Bias)) {
            (true, true) => TokensAre::Computed,
            (true, false) => TokensAre::Routed,
            (false, _) => TokensAre::InOrder,
        };
        let classes: Vec<(FactorId, Class, bool)> =
            classes.into_iter().filter(|(_, class, _)| !self.bars(view.barred, op, *class)).collect();
        let has = |wanted: Class| classes.iter().any(|(_, class, divides)| *class == wanted && *divides);
        let routed = has(Class::Experts) && on_slots;
        let (allowed, same) = allowed(view, tokens, &has);
        // Where the inside of an operator can be cut, computing all of it everywhere never pays.
        let moves_tokens =
            matches!(op.kind, OpKind::Dispatch | OpKind::Combine | OpKind::Fork | OpKind::Route { .. });
        // Unless several axes share loops that are too short for all of them, as KV heads are.
        let length = |id: FactorId| sizes.dims[sig.factors[id.0 as usize].dim.0];
        let inside = || classes.iter().filter(|(_, class, _)| *class == Class::Inside);
        let short = !inside().map(|(id, ..)| length(*id)).product::<u64>().is_multiple_of(together);
        let same = same && (moves_tokens || short || !(has(Class::Inside) || routed));
        // Who splits tokens between products does so wherever there are tokens to split; a fork is where they are
        // gathered once for several products.
        let shares_tokens =
            splits_tokens(view.rule) && has(Class::Tokens) && !has(Class::Inside) && !moves_tokens;
        let same = same && !shares_tokens;
        // Of several loops inside a product (KV heads, heads of a group) the first that divides stands for all, if it
        // is long enough for all axes.
        let first_inside = inside().find(|(_, _, divides)| *divides);
        let stands = |id: FactorId, class: Class| {
            let first = |(first, ..): &(FactorId, Class, bool)| {
                *first == id || !length(*first).is_multiple_of(together)
            };
            class != Class::Inside || first_inside.is_some_and(first)
        };
        let mut uses: Vec<AxisUse> = classes
            .iter()
            .filter(|(id, class, divides)| *divides && allowed.contains(class) && stands(*id, *class))
            .map(|(id, ..)| AxisUse::Factor(*id))
            .collect();
        if let Some(ring) = sig.ring {
            self.see_keys(&mut uses, ring, (first_inside.map(|inside| inside.0), view.rule));
        }
        let same = same || uses.is_empty();
        if same {
            uses.push(AxisUse::Same);
            if defers(&op.kind) {
                uses.push(AxisUse::Defer);
            }
        }
        // A sum that passes a fork meets a norm, which must finish it; only additions gain by waiting.
        let adds =
            op.kind.line().linear == Linear::Yes && matches!(op.kind, OpKind::Add | OpKind::Scale { .. });
        if adds && (same || shares_tokens) {
            uses.push(AxisUse::Through);
        }
        uses
    }

    /// Where an axis may split the queries of attention, keys that other devices hold are gathered, or their blocks
    /// travel, or heads are split instead.
    fn see_keys(
        &self,
        uses: &mut Vec<AxisUse>,
        ring: RingLoops,
        (heads, rule): (Option<FactorId>, AxisRule),
    ) {
        let gather = AxisUse::Factor(ring.queries);
        let Some(at) = uses.iter().position(|one| *one == gather) else { return };
        let may = |kind: ContextKind| match self.context {
            Some(chosen) => kind == chosen,
            // An axis of which nobody said anything splits heads as the inside of any operator.
            None if kind == ContextKind::Ulysses && !is_context(rule) => false,
            None => !self.no_context.contains(&kind),
        };
        let ways = [
            may(ContextKind::Gather).then_some(gather),
            may(ContextKind::Ring).then_some(AxisUse::Ring(ring)),
        ];
        uses.splice(at..=at, ways.into_iter().flatten());
        let heads =
            heads.map(AxisUse::Factor).filter(|heads| may(ContextKind::Ulysses) && !uses.contains(heads));
        uses.extend(heads);
    }

    /// Whether an axis with these bars may not split a loop of an operator.
    fn bars(&self, barred: Barred, op: &Op, class: Class) -> bool {
        let names = if self.names_axes(barred, op) { barred.names } else { NameBars::default() };
        let slots = || self.on_slots(op);
        let of_experts = || barred.tokens_of_experts && matches!(op.kind, OpKind::Linear) && slots();
        match class {
            Class::Sequences => barred.sequences || names.sequences || of_experts(),
            Class::Tokens => {
                names.tokens || of_experts() || barred.context && !slots() && self.has_keys_or_weights(op)
            }
            Class::Experts => barred.experts,
            Class::Inside => barred.inside || names.inside || barred.inside_experts && slots(),
        }
    }

    /// Whether an operator is one of the products that an axis may be barred from something in for its name.
    fn names_axes(&self, barred: Barred, op: &Op) -> bool {
        let leading = || leading(self.layer).into_iter().map(|op| self.layer.ops[op.0].results[0]).collect();
        barred.names != NameBars::default() && self.leading.get_or_init(leading).contains(&op.results[0])
    }

    /// Whether an operator of an inner layer is attention or has a matrix of parameters: what it cuts has the names of
    /// context and tensor parallelism.
    fn has_keys_or_weights(&self, op: &Op) -> bool {
        let layer = self.layer;
        let has_matrix = |t: &TensorId| layer.is_parameter(*t) && layer.tensors[t.0].dims.len() >= 2;
        !layer.is_end() && (matches!(op.kind, OpKind::Attention { .. }) || op.operands.iter().any(has_matrix))
    }

    /// Whether an operator works on expert slots.
    fn on_slots(&self, op: &Op) -> bool {
        let slots = |dim: &DimId| matches!(self.layer.dims[dim.0].extent, Extent::Slots { .. });
        op.operands.iter().chain(&op.results).any(|t| self.layer.tensors[t.0].dims.iter().any(slots))
    }
}

/// The largest products of an inner layer's weights, as many as together hold more than half of them.
fn leading(layer: &Layer) -> Vec<OpId> {
    if layer.is_end() {
        return Vec::new();
    }
    let mut products = naming_products(layer);
    products.sort_by_key(|&(_, elements)| Reverse(elements));
    let all: u64 = products.iter().map(|(_, elements)| elements).sum();
    let held = products.iter().scan(0, |held, (_, elements)| {
        let before = *held;
        *held += elements;
        Some(before)
    });
    let n = held.take_while(|before| before * 2 <= all).count();
    products[..n].iter().map(|(op, _)| *op).collect()
}

/// What a loop is to an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Sequences,
    Tokens,
    Experts,
    Inside,
}

/// How an operator sees tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokensAre {
    /// In their sequence.
    InOrder,
    /// In the slots of experts, or on the way there or back.
    Routed,
    /// In the slots of experts, by a product of the experts' parameters.
    Computed,
}

/// Classes of loops that an axis may split, and whether it may compute the same instead.
fn allowed(view: AxisView, tokens: TokensAre, has: &dyn Fn(Class) -> bool) -> (Vec<Class>, bool) {
    use Class::{Experts, Inside, Sequences, Tokens};
    let routed = tokens != TokensAre::InOrder;
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
        AxisRule::Experts | AxisRule::TokensAndExperts | AxisRule::InsideAndExperts(_)
            if tokens == TokensAre::Computed =>
        {
            (vec![Experts], false)
        }
        AxisRule::Experts if routed => (vec![Sequences, Experts], false),
        AxisRule::TokensAndExperts if routed => (vec![Tokens, Experts], false),
        AxisRule::InsideAndExperts(_) if routed => (vec![Tokens, Experts], false),
        AxisRule::Sequences | AxisRule::Replicas | AxisRule::Shares | AxisRule::Experts => {
            (vec![Sequences], false)
        }
        AxisRule::Tokens | AxisRule::TokensAndExperts => (vec![Tokens], false),
        AxisRule::Inside(inner) | AxisRule::InsideAndExperts(inner) => between(inner),
    }
}

/// Whether an axis that splits products must split tokens between them.
fn splits_tokens(rule: AxisRule) -> bool {
    matches!(rule, AxisRule::Inside(Between::Tokens) | AxisRule::InsideAndExperts(Between::Tokens))
}

/// Whether an axis is one of context parallelism by name.
fn is_context(rule: AxisRule) -> bool {
    matches!(rule, AxisRule::Tokens | AxisRule::TokensAndExperts)
}

fn fixed(layer: &Layer, dim: DimId) -> bool {
    layer.dims[dim.0].extent.fixed().is_some()
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
            | OpKind::Extend
            | OpKind::AppendShared
    )
}

/// True for a tensor that is computed.
pub fn is_activation(layer: &Layer, tensor: TensorId) -> bool {
    layer.tensors[tensor.0].role == Role::Activation
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prove::tests::layers::crossing;

    /// What a rule lets an axis of four do to an operator.
    fn uses(rule: AxisRule, name: &str) -> Vec<String> {
        let (layer, mesh) = (crossing(), Mesh::of_sizes(&[4]).unwrap_or(Mesh { axes: Vec::new() }));
        let op = layer.ops.iter().find(|op| op.name == name).unwrap();
        let sig = signature(&layer, op);
        let view = AxisView { reach: Reach::Node, rule, barred: Barred::default() };
        let sizes = layer.sizes(4, 8);
        let all = Space::new(&layer, None).strategies(op, &sig, (&mesh, &[view]), &sizes);
        let word = |strategy: &Strategy| match strategy.on(AxisId(0)) {
            AxisUse::Factor(factor) => sig.factors[factor.0 as usize].name.clone(),
            AxisUse::Ring(_) => "ring".into(),
            AxisUse::Same | AxisUse::Defer | AxisUse::Through => "-".into(),
        };
        all.iter().map(word).collect()
    }

    /// Places of fixed length are cut where tokens are, and where products are cut they are not; keys are gathered,
    /// passed on, or exchanged for heads.
    #[test]
    fn places_of_an_encoder_are_its_tokens() {
        let inside = AxisRule::Inside(Between::Same);
        assert_eq!([uses(inside, "eq"), uses(AxisRule::Tokens, "eq")], [["k"], ["m"]]);
        assert_eq!([uses(inside, "seen"), uses(inside, "core")], [["k"], ["k"]]);
        assert_eq!(uses(AxisRule::Tokens, "seen"), ["m", "ring", "k"]);
        assert_eq!(uses(AxisRule::Tokens, "core"), ["s", "ring", "k"]);
    }
}
