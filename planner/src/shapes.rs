//! The meshes of a stage that are worth trying, and what each axis may do on them.
//!
//! Without pins every ordered factorisation into at most one axis inside the node (two where KV heads are fewer than
//! its devices) and at most two around it is tried, with free axes: the search finds what they are good for. Pins name
//! degrees in the literature's words; they become axes with rules, in the usual order (data, context, tensor).

use ir::graph::{Extent, Model};
use ir::mesh::{AxisId, MAX_AXES, Mesh};
use ir::op::OpKind;
use ir::sharding::Sharding;

use crate::forbid::Barred;
use crate::request::{AxesKind, Degrees, Pins, Request, SequenceParallel};
use crate::space::{AxisRule, Between};

/// Fewest tokens of a sequence that a device may be left with: below, kernels run far from their peak.
const MIN_TOKENS_PER_SPLIT: u64 = 256;

/// Sequences from which on an axis of their own is tried around nodes, unless somebody asks for one.
const LONG_SEQUENCE: u64 = 4096;

/// Longest second axis that is tried for experts alone: published runs stop at 64.
const MAX_EXPERT_AXIS: u64 = 64;

/// A mesh and its axes' rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The mesh.
    pub mesh: Mesh,
    /// What each axis may do.
    pub rules: Vec<AxisRule>,
    /// Product of the axes that pins make data parallel; 1 without pins.
    pub data_degree: u64,
    /// What each axis may not do in spite of its rule; empty where nothing is barred.
    pub barred: Vec<Barred>,
}

/// What of a model decides which meshes make sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Greatest common divisor of the numbers of query heads; 0 where there is no attention.
    pub heads: u64,
    /// Greatest common divisor of the numbers of KV heads.
    pub kv_heads: u64,
    /// Experts of a layer, or 1.
    pub experts: u64,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Devices of a node.
    pub node: u64,
}

impl Facts {
    /// Those of a question.
    pub(crate) fn of(request: &Request) -> Self {
        Self::new(&request.model, request.job.sequence, request.cluster.n_close())
    }

    /// Reads the facts off a model.
    pub fn new(model: &Model, sequence: u64, node: u64) -> Self {
        let length = |extent: Extent| extent.fixed().unwrap_or(1);
        let (mut heads, mut kv_heads, mut experts) = (0, 0, 1);
        for layer in &model.layers {
            for op in &layer.ops {
                let dim = |tensor: usize, at: usize| {
                    let dims = &layer.tensors[op.operands[tensor].0].dims;
                    dims.get(at).map_or(1, |d| length(layer.dims[d.0].extent))
                };
                if matches!(op.kind, OpKind::Attention { .. }) {
                    heads = gcd(heads, dim(0, 2) * dim(0, 3));
                    kv_heads = gcd(kv_heads, dim(1, 2));
                } else if matches!(op.kind, OpKind::Route { .. }) {
                    experts = experts.max(dim(0, 2));
                }
            }
        }
        Self { heads, kv_heads: kv_heads.max(1), experts, sequence, node }
    }
}

pub(crate) fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Divisors in rising order.
pub fn divisors(n: u64) -> Vec<u64> {
    let mut list: Vec<u64> = (1..).take_while(|d| d * d <= n).filter(|d| n.is_multiple_of(*d)).collect();
    let large: Vec<u64> = list.iter().rev().map(|d| n / d).filter(|d| !list.contains(d)).collect();
    list.extend(large);
    list
}

/// The shapes of a stage of `n` devices, in a fixed order.
pub fn shapes(n: u64, facts: Facts, pins: &Pins) -> Vec<Shape> {
    let pins = &with_switch(pins);
    if names_degrees(pins) {
        return pinned(n, facts, pins);
    }
    let mut list = if pins.forbid.micro_batch == Degrees::default() { free(n, facts) } else { Vec::new() };
    if !pins.forbid.leaves_layers() {
        list = list.iter().flat_map(|shape| barred(shape, facts, pins)).collect();
    }
    if pins.forbid.names_degrees() {
        // What free axes cannot be held to exactly, named ones can.
        list.extend(pinned(n, facts, pins));
    }
    list
}

/// Shapes of axes by name that are rarely any good: those that leave a device few tokens, and those of a part of the
/// devices, each of which is there several times.
pub(crate) fn rare(n: u64, facts: Facts, pins: &Pins) -> Vec<Shape> {
    let pins = &with_switch(pins);
    // Engines have no word for devices that do the same.
    let is_named = names_degrees(pins) || pins.forbid.names_degrees();
    if !is_named || pins.axes == Some(AxesKind::Named) {
        return Vec::new();
    }
    let common = shapes(n, facts, pins);
    let of = |same: u64| {
        let all = pinned_within(n / same, facts, pins, facts.sequence).into_iter();
        all.filter_map(move |shape| if same == 1 { Some(shape) } else { shape.copied(same) })
    };
    divisors(n).into_iter().flat_map(of).filter(|shape| !common.contains(shape)).collect()
}

/// Of some shapes those that no other covers: what a mesh does with one axis, another does with two that it uses alike.
/// But tokens are not sent to their experts along two (`ir::conversion`), so a mesh stays that has a longer axis for
/// experts inside the node. Were those that are longer around it kept as well, the space of deepseek-v3 would be a
/// third larger.
pub(crate) fn finest(list: Vec<Shape>, facts: Facts) -> Vec<Shape> {
    let for_experts = |shape: &Shape| {
        let mesh = &shape.mesh;
        let inside = mesh.axis_ids().filter(|&axis| mesh.stride(axis) * mesh.size(axis) <= facts.node);
        inside
            .map(|axis| mesh.size(axis))
            .filter(|&size| facts.experts.is_multiple_of(size))
            .max()
            .unwrap_or(1)
    };
    let covers = |other: &Shape, one: &Shape| {
        other.covers(one, facts.node) && (facts.experts == 1 || for_experts(one) <= for_experts(other))
    };
    let is_covered = |one: &Shape| list.iter().any(|other| covers(other, one));
    let covered: Vec<bool> = list.iter().map(is_covered).collect();
    list.into_iter().zip(covered).filter(|(_, covered)| !covered).map(|(shape, _)| shape).collect()
}

impl Shape {
    /// Whether every axis of another shape is one or several neighbouring axes of this one, which together are as long
    /// and may each do what it may. A shape does not cover itself.
    pub(crate) fn covers(&self, other: &Shape, node: u64) -> bool {
        if self == other || self.joined_bars(other).as_ref() != Some(&other.barred) {
            return false;
        }
        let mut own = self.mesh.axis_ids();
        other.mesh.axis_ids().all(|axis| {
            let (mut left, may) = (other.mesh.size(axis), other.freedom(axis, node));
            while left > 1 {
                let part = own.next().filter(|part| may.is_some() && self.freedom(*part, node) >= may);
                match part.map(|part| self.mesh.size(part)) {
                    Some(size) if left.is_multiple_of(size) => left /= size,
                    Some(_) | None => return false,
                }
            }
            true
        })
    }

    /// Its devices so many times, on an axis around all others along which nothing is computed apart.
    fn copied(self, same: u64) -> Option<Self> {
        let sizes: Vec<u64> =
            std::iter::once(same).chain(self.mesh.axes.iter().map(|axis| axis.size)).collect();
        let mesh = Mesh::of_sizes(&sizes).filter(|_| sizes.len() <= MAX_AXES && self.barred.is_empty())?;
        let mut barred = vec![Barred::default(); sizes.len()];
        barred[0].sequences = true;
        let rules = std::iter::once(AxisRule::Sequences).chain(self.rules).collect();
        Some(Self { mesh, rules, data_degree: self.data_degree, barred })
    }

    /// Whether axes inside products are to leave the tokens beside these whole.
    pub(crate) fn cuts_no_tokens(&self) -> bool {
        self.is_said(Between::Same)
    }

    /// Whether it is said of axes inside products what they do to the tokens beside these.
    pub(crate) fn says_of_tokens(&self) -> bool {
        self.is_said(Between::Same) || self.is_said(Between::Tokens)
    }

    fn is_said(&self, between: Between) -> bool {
        let rules = [AxisRule::Inside(between), AxisRule::InsideAndExperts(between)];
        self.rules.iter().any(|rule| rules.contains(rule))
    }

    /// What a sharding along its axes comes to on a shape that it covers; `None` where those that are one axis there
    /// are not used alike.
    pub(crate) fn joined(&self, covered: &Shape, sharding: Sharding) -> Option<Sharding> {
        let on_axes = self.joined_on_axes(covered, |part| sharding.on(part))?;
        let all = covered.mesh.axis_ids().zip(on_axes);
        Some(all.fold(Sharding::REPLICATED, |joined, (axis, alike)| match alike {
            Some(placement) => joined.with(axis, placement),
            None => joined,
        }))
    }

    /// What the axes of a coarser shape are barred from as its own are; `None` where those that are one axis there are
    /// not barred alike.
    pub(crate) fn joined_bars(&self, coarser: &Shape) -> Option<Vec<Barred>> {
        if self.barred.is_empty() {
            return Some(Vec::new());
        }
        let on_axes = self.joined_on_axes(coarser, |part| self.barred[part.0])?;
        Some(on_axes.into_iter().map(Option::unwrap_or_default).collect())
    }

    /// What is alike on all axes that are one on a coarser shape, per axis of that; nothing on an axis of one device.
    fn joined_on_axes<T: PartialEq>(
        &self,
        coarser: &Shape,
        on: impl Fn(AxisId) -> T,
    ) -> Option<Vec<Option<T>>> {
        let mut own = self.mesh.axis_ids();
        let joined = |axis: AxisId| {
            let (mut left, mut parts) = (coarser.mesh.size(axis), Vec::new());
            while left > 1 {
                let part = own.next()?;
                left /= self.mesh.size(part);
                parts.push(on(part));
            }
            parts.dedup();
            (parts.len() <= 1).then(|| parts.pop())
        };
        coarser.mesh.axis_ids().map(joined).collect()
    }

    fn freedom(&self, axis: AxisId, node: u64) -> Option<Freedom> {
        let in_node = self.mesh.stride(axis) * self.mesh.size(axis) <= node;
        match self.rules[axis.0] {
            AxisRule::Free if in_node => Some(Freedom::Inside),
            AxisRule::Free | AxisRule::Around => Some(Freedom::Around),
            AxisRule::Sequences
            | AxisRule::Replicas
            | AxisRule::Shares
            | AxisRule::Experts
            | AxisRule::Tokens
            | AxisRule::TokensAndExperts
            | AxisRule::Inside(_)
            | AxisRule::InsideAndExperts(_) => None,
        }
    }
}

/// What an axis of which nobody said anything may do: the later may all that the earlier may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Freedom {
    /// Sequences, tokens, experts.
    Around,
    /// The inside of products as well.
    Inside,
}

/// Whether pins name what an axis of a mesh does, so that none is free.
pub(crate) fn names_degrees(pins: &Pins) -> bool {
    pins.tp.is_some()
        || pins.dp.is_some()
        || pins.cp.is_some()
        || pins.ep.is_some()
        || pins.etp.is_some()
        || pins.micro_batch.is_some()
        || pins.zero_group.is_some()
        || pins.sequence_parallel.is_some()
        || pins.axes == Some(AxesKind::Named)
}

/// The pins without the degrees that they name or rule out by name, if axes may do whatever comes to what is left.
pub(crate) fn without_names(pins: &Pins) -> Option<Pins> {
    let (tp, dp, cp, ep, etp, micro_batch) = (None, None, None, None, None, None);
    let forbid = pins.forbid.without_degrees();
    let freed = Pins { tp, dp, cp, ep, etp, micro_batch, forbid, ..pins.clone() };
    let has_names = names_degrees(pins) || pins.forbid.names_degrees();
    (has_names && !names_degrees(&with_switch(&freed))).then_some(freed)
}

/// A switch of which one side is forbidden is chosen.
fn with_switch(pins: &Pins) -> Pins {
    let forbids = |one: SequenceParallel| pins.forbid.sequence_parallel.contains(&one);
    let left = [(SequenceParallel::On, SequenceParallel::Off), (SequenceParallel::Off, SequenceParallel::On)];
    let left = left.into_iter().find(|(_, other)| forbids(*other)).map(|(one, _)| one);
    Pins { sequence_parallel: pins.sequence_parallel.or(left), ..pins.clone() }
}

/// The shapes that bar a mesh of free axes from what is forbidden, each as little as can be.
fn barred(shape: &Shape, facts: Facts, pins: &Pins) -> Vec<Shape> {
    let mesh = &shape.mesh;
    let sizes: Vec<u64> = mesh.axes.iter().map(|axis| axis.size).collect();
    let in_node = |axis: &usize| {
        let id = AxisId(*axis);
        shape.rules[*axis] == AxisRule::Free && mesh.stride(id) * mesh.size(id) <= facts.node
    };
    let inside: Vec<usize> = (0..sizes.len()).filter(in_node).collect();
    let bars = pins.forbid.bars(&sizes, &inside).into_iter();
    bars.map(|barred| Shape { barred, ..shape.clone() }).collect()
}

fn free(n: u64, facts: Facts) -> Vec<Shape> {
    let mut list = Vec::new();
    for inner in divisors(n).into_iter().filter(|&t| t <= facts.node) {
        let outer = n / inner;
        let mut outers = vec![vec![outer]];
        for second in divisors(outer).into_iter().filter(|&c| c > 1 && c < outer) {
            let for_experts = facts.experts > 1 && second <= facts.experts.min(MAX_EXPERT_AXIS);
            let for_tokens =
                facts.sequence >= LONG_SEQUENCE && facts.sequence / second >= MIN_TOKENS_PER_SPLIT * 4;
            if for_experts || for_tokens {
                outers.push(vec![outer / second, second]);
            }
        }
        for outer in outers {
            let around = outer.iter().map(|&size| (size, AxisRule::Around));
            let inside = split_heads(inner, facts.kv_heads).into_iter().map(|size| (size, AxisRule::Free));
            let axes: Vec<(u64, AxisRule)> = around.chain(inside).filter(|(size, _)| *size > 1).collect();
            let sizes: Vec<u64> = axes.iter().map(|(size, _)| *size).collect();
            // Two axes are few enough to leave both free.
            let rule = |rule: AxisRule| if axes.len() <= 2 { AxisRule::Free } else { rule };
            push(&mut list, &sizes, axes.iter().map(|(_, r)| rule(*r)).collect(), 1);
        }
    }
    list
}

/// An axis longer than the KV heads is two: one that they divide, one that they do not see.
fn split_heads(tensor: u64, kv_heads: u64) -> Vec<u64> {
    let heads = gcd(tensor, kv_heads);
    vec![tensor / heads, heads]
}

fn push(list: &mut Vec<Shape>, sizes: &[u64], rules: Vec<AxisRule>, data_degree: u64) {
    if let Some(mesh) = Mesh::of_sizes(sizes)
        && sizes.len() <= MAX_AXES
    {
        let shape = Shape { mesh, rules, data_degree, barred: Vec::new() };
        if !list.contains(&shape) {
            list.push(shape);
        }
    }
}

/// Shapes of axes by name; where nothing that is asked leaves a device so many tokens, with fewer.
fn pinned(n: u64, facts: Facts, pins: &Pins) -> Vec<Shape> {
    let most = facts.sequence / MIN_TOKENS_PER_SPLIT.min(facts.sequence);
    let list = pinned_within(n, facts, pins, most);
    if list.is_empty() { pinned_within(n, facts, pins, facts.sequence) } else { list }
}

/// The same with tokens cut into so many parts at most, unless somebody says how many.
fn pinned_within(n: u64, facts: Facts, pins: &Pins, most_tokens: u64) -> Vec<Shape> {
    let mut list = Vec::new();
    let forbid = &pins.forbid;
    let options = |pin: Option<u64>, limit: u64, not: &Degrees| match pin {
        Some(degree) => vec![degree],
        None => divisors(n).into_iter().filter(|&d| d <= limit && not.allows(d)).collect(),
    };
    for tp in options(pins.tp, facts.node, &forbid.tp) {
        for cp in options(pins.cp, most_tokens, &forbid.cp) {
            if tp * cp == 0 || !n.is_multiple_of(tp * cp) {
                continue;
            }
            let dp = n / (tp * cp);
            if pins.dp.is_some_and(|wanted| wanted != dp) || !forbid.dp.allows(dp) {
                continue;
            }
            let degrees =
                if facts.experts == 1 { vec![1] } else { options(pins.ep, facts.experts, &forbid.ep) };
            let either = either(pins, facts, tp);
            for ep in degrees {
                let of = |pins: &Pins| named_axes((dp, cp, tp), ep, facts, pins);
                list.extend(either.iter().filter_map(of));
            }
        }
    }
    list
}

/// Pins with what tensor parallel devices may do of which nobody says anything: hold whole experts, or cut no tokens
/// beside products. Layers that do cut tokens come to another degree where heads do not divide, unless they do so
/// everywhere: of a mesh that leaves it open the fastest may be one that does here and there.
fn either(pins: &Pins, facts: Facts, tp: u64) -> Vec<Pins> {
    let mut list = vec![pins.clone()];
    if pins.etp.is_none() && facts.experts > 1 && tp > 1 && pins.forbid.etp.allows(tp) {
        list.push(Pins { etp: Some(1), ..pins.clone() });
    }
    if pins.sequence_parallel.is_none() && tp > 1 {
        let as_said = |one| move |pins: &Pins| Pins { sequence_parallel: Some(one), ..pins.clone() };
        let divide = facts.heads.is_multiple_of(tp);
        let on = (!divide).then_some(SequenceParallel::On);
        let said = [SequenceParallel::Off].into_iter().chain(on);
        list.extend(said.flat_map(|one| list.iter().map(as_said(one))).collect::<Vec<_>>());
    }
    list
}

/// Axes for given degrees. Experts take whole axes: part of data, part of context where that does not go, or context
/// with part of data; or all with tensor.
fn named_axes((dp, cp, tp): (u64, u64, u64), ep: u64, facts: Facts, pins: &Pins) -> Option<Shape> {
    let between = match pins.sequence_parallel {
        Some(SequenceParallel::On) => Between::Tokens,
        Some(SequenceParallel::Off) => Between::Same,
        None => Between::Free,
    };
    let inside = AxisRule::Inside(between);
    let etp_is_one = tp > 1 && (pins.etp == Some(1) || pins.etp.is_none() && !pins.forbid.etp.allows(tp));
    // Whole experts on tensor parallel devices are a part of the degree.
    let ep = if etp_is_one && ep.is_multiple_of(tp) { ep / tp } else { ep };
    let (mut sizes, mut rules): (Vec<u64>, Vec<AxisRule>) = match ep {
        1 if pins.zero_group.is_some_and(|group| group < dp) => {
            let group = pins.zero_group.filter(|group| *group > 0 && dp.is_multiple_of(*group))?;
            (vec![dp / group, group, cp], vec![AxisRule::Replicas, AxisRule::Sequences, AxisRule::Tokens])
        }
        // Experts are groups of their own.
        _ if pins.zero_group.is_some_and(|group| group < dp) => return None,
        1 => (vec![dp, cp], vec![AxisRule::Sequences, AxisRule::Tokens]),
        _ if dp.is_multiple_of(ep) => {
            (vec![dp / ep, ep, cp], vec![AxisRule::Sequences, AxisRule::Experts, AxisRule::Tokens])
        }
        _ if cp.is_multiple_of(ep) => {
            (vec![dp, cp / ep, ep], vec![AxisRule::Sequences, AxisRule::Tokens, AxisRule::TokensAndExperts])
        }
        _ if ep.is_multiple_of(cp) && dp.is_multiple_of(ep / cp) => {
            let beside = ep / cp;
            (
                vec![dp / beside, beside, cp],
                vec![AxisRule::Sequences, AxisRule::Experts, AxisRule::TokensAndExperts],
            )
        }
        _ => return None,
    };
    let tensor_rule = if etp_is_one { AxisRule::InsideAndExperts(between) } else { inside };
    for size in split_heads(tp, facts.kv_heads) {
        sizes.push(size);
        rules.push(tensor_rule);
    }
    let kept: Vec<usize> = (0..sizes.len()).filter(|&i| sizes[i] > 1).collect();
    let sizes: Vec<u64> = kept.iter().map(|&i| sizes[i]).collect();
    let rules: Vec<AxisRule> = kept.iter().map(|&i| rules[i]).collect();
    let mut list = Vec::new();
    push(&mut list, &sizes, rules, dp);
    list.pop()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Forbid;

    const FACTS: Facts = Facts { heads: 32, kv_heads: 8, experts: 1, sequence: 4096, node: 8 };

    #[test]
    fn a_node_of_eight_is_seen_in_every_factorisation() {
        let sizes: Vec<Vec<u64>> = shapes(8, FACTS, &Pins::default())
            .iter()
            .map(|shape| shape.mesh.axes.iter().map(|axis| axis.size).collect())
            .collect();
        assert!(
            sizes.contains(&vec![8]) && sizes.contains(&vec![4, 2]) && sizes.contains(&vec![2, 4]),
            "{sizes:?}"
        );
    }

    #[test]
    fn axes_used_alike_stand_for_one() {
        let sizes = |shapes: Vec<Shape>| -> Vec<Vec<u64>> {
            let sizes = |shape: Shape| shape.mesh.axes.iter().map(|axis| axis.size).collect();
            shapes.into_iter().map(sizes).collect()
        };
        // Around the node no product is cut, so of the two axes of eight only the outer may be two.
        let all = shapes(16, FACTS, &Pins::default());
        let left = sizes(finest(all.clone(), FACTS));
        assert_eq!(left, [vec![4, 2, 2], vec![2, 4, 2], vec![2, 2, 4], vec![2, 8]]);
        for one in sizes(all) {
            let is_product = |fine: &Vec<u64>| {
                let ends = |sizes: &[u64]| -> Vec<u64> {
                    sizes
                        .iter()
                        .scan(1, |all, size| {
                            *all *= size;
                            Some(*all)
                        })
                        .collect()
                };
                ends(&one).iter().all(|end| ends(fine).contains(end))
            };
            assert!(left.iter().any(is_product), "{one:?}");
        }
        // What pins name is what they name.
        let pinned = shapes(16, FACTS, &Pins { tp: Some(2), ..Pins::default() });
        assert_eq!(finest(pinned.clone(), FACTS), pinned);
    }

    #[test]
    fn a_mesh_with_a_longer_axis_for_experts_stays() {
        let has_whole_node = |experts: u64| {
            let facts = Facts { experts, ..FACTS };
            let left = finest(shapes(8, facts, &Pins::default()), facts);
            left.iter().any(|shape| shape.mesh.axes.len() == 1)
        };
        // Four experts are cut by an axis of four no worse than by eight devices.
        assert_eq!([1, 4, 8, 64].map(has_whole_node), [false, false, true, true]);
    }

    #[test]
    fn an_axis_longer_than_the_heads_is_split() {
        let facts = Facts { kv_heads: 2, ..FACTS };
        let pins = Pins { tp: Some(8), ..Pins::default() };
        let found = shapes(8, facts, &pins);
        assert_eq!(found[0].mesh, Mesh::of_sizes(&[4, 2]).unwrap());
    }

    #[test]
    fn groups_that_share_states_are_an_axis_of_their_own() {
        let pins = Pins { dp: Some(8), zero_group: Some(2), ..Pins::default() };
        let found = shapes(8, FACTS, &pins);
        assert_eq!(found[0].mesh, Mesh::of_sizes(&[4, 2]).unwrap());
        assert_eq!(found[0].rules, [AxisRule::Replicas, AxisRule::Sequences]);
        assert_eq!(shapes(8, FACTS, &Pins { zero_group: Some(3), ..pins.clone() }), []);
        assert_eq!(shapes(8, FACTS, &Pins { zero_group: Some(8), ..pins })[0].mesh.axes.len(), 1);
    }

    /// DeepSeek-V3 on 1,024 H100: 64-fold expert parallel, two of it tensor parallel elsewhere.
    #[test]
    fn whole_experts_on_tensor_parallel_devices_count_as_expert_parallel() {
        let facts = Facts { kv_heads: 128, experts: 256, ..FACTS };
        let pins = Pins { dp: Some(64), tp: Some(2), ep: Some(64), etp: Some(1), ..Pins::default() };
        let found = shapes(128, facts, &pins);
        assert_eq!(found[0].mesh, Mesh::of_sizes(&[2, 32, 2]).unwrap());
        assert_eq!(found[0].rules[1], AxisRule::Experts);
    }

    /// Eight experts on two tensor parallel devices in four parts of a sequence: whole ones lie along both.
    #[test]
    fn experts_of_which_nobody_says_more_may_be_whole() {
        let facts = Facts { experts: 8, ..FACTS };
        let pins = Pins { dp: Some(1), cp: Some(4), tp: Some(2), ep: Some(8), ..Pins::default() };
        let pins = Pins { sequence_parallel: Some(SequenceParallel::On), ..pins };
        let rules =
            |pins: &Pins| shapes(8, facts, pins).into_iter().map(|shape| shape.rules).collect::<Vec<_>>();
        let whole = vec![AxisRule::TokensAndExperts, AxisRule::InsideAndExperts(Between::Tokens)];
        assert_eq!(rules(&pins), [whole]);
        assert_eq!(rules(&Pins { etp: Some(2), ..pins.clone() }), [[]; 0]);
        // Four of them go either way.
        let some = Pins { ep: Some(4), ..pins };
        assert_eq!(rules(&some).len(), 2);
        // So do tokens beside products of which nobody says anything.
        assert_eq!(rules(&Pins { sequence_parallel: None, ..some }).len(), 4);
    }

    #[test]
    fn experts_lie_along_context_where_data_cannot_be_cut_so() {
        let facts = Facts { experts: 32, ..FACTS };
        let of = |dp: u64, cp: u64, ep: u64| {
            let pins = Pins { dp: Some(dp), cp: Some(cp), ep: Some(ep), ..Pins::default() };
            let found = shapes(dp * cp, facts, &pins).into_iter().next()?;
            let sizes: Vec<u64> = found.mesh.axes.iter().map(|axis| axis.size).collect();
            Some((sizes, found.rules))
        };
        use AxisRule::{Experts, Sequences, Tokens, TokensAndExperts};
        assert_eq!(of(5, 8, 8), Some((vec![5, 8], vec![Sequences, TokensAndExperts])));
        assert_eq!(of(5, 8, 4), Some((vec![5, 2, 4], vec![Sequences, Tokens, TokensAndExperts])));
        assert_eq!(of(4, 8, 16), Some((vec![2, 2, 8], vec![Sequences, Experts, TokensAndExperts])));
        assert_eq!(of(4, 8, 32), Some((vec![4, 8], vec![Experts, TokensAndExperts])));
        assert_eq!(of(8, 4, 8), Some((vec![8, 4], vec![Experts, Tokens])));
        assert_eq!(of(4, 6, 16), None);
    }

    #[test]
    fn names_are_taken_back_where_axes_may_do_anything() {
        let pins = Pins { tp: Some(2), micro_batch: Some(1), pp: Some(4), ..Pins::default() };
        assert_eq!(without_names(&pins), Some(Pins { pp: Some(4), ..Pins::default() }));
        assert_eq!(without_names(&Pins { axes: Some(AxesKind::Named), ..pins.clone() }), None);
        // Nobody named a degree, or something that only a named axis has.
        assert_eq!(without_names(&Pins { pp: Some(4), ..Pins::default() }), None);
        assert_eq!(without_names(&Pins { zero_group: Some(2), ..pins }), None);
        // Degrees that are ruled out one by one are names, all above one are not; and a switch names axes too.
        let forbids = |tp: Degrees, sequence_parallel: &[SequenceParallel]| Pins {
            forbid: Forbid { tp, sequence_parallel: sequence_parallel.to_vec(), ..Forbid::default() },
            ..Pins::default()
        };
        let single = Degrees { single: [1, 2].into(), above_one: false };
        assert_eq!(without_names(&forbids(single.clone(), &[])), Some(Pins::default()));
        assert_eq!(without_names(&forbids(Degrees { above_one: true, ..Degrees::default() }, &[])), None);
        assert_eq!(without_names(&forbids(single, &[SequenceParallel::On])), None);
        // All axes are named where these are asked for.
        let named = Pins { axes: Some(AxesKind::Named), ..Pins::default() };
        assert!(shapes(8, FACTS, &named).iter().all(|shape| !shape.rules.contains(&AxisRule::Free)));
    }

    #[test]
    fn pinned_degrees_that_do_not_divide_have_no_shape() {
        let pins = Pins { tp: Some(3), ..Pins::default() };
        assert_eq!(shapes(8, FACTS, &pins), []);
    }
}
