//! True programs are proven, false ones are refused.

pub(crate) mod layers;
mod mutants;
mod numbers;

use std::collections::{BTreeMap, BTreeSet};

use egg::{Id, Language};
use ir::graph::{Layer, Role, Sizes, TensorId};
use ir::lower::{LayerChoice, Recompute, lower, whole_axes};
use ir::mesh::{AxisId, Mesh};
use ir::program::{AxisSet, Home, Instruction, Program, Storage, ValueId};
use ir::sharding::{Placement, Sharding};
use ir::signature::signature;
use ir::split::{SplitBackward, split_backward};
use ir::strategy::{Strategy, placements, strategies};
use proptest::prelude::*;

use super::reference::reference;
use super::rules::RULES;
use super::term::{Facts, Graph};
use super::translate::claims;
use super::{MAX_ROUNDS, Proof, prove, prove_split};

/// Picks by numbers of a fixed stream: the same numbers, the same choice.
struct Picker(u64);

impl Picker {
    /// The next number below `n`, by a linear congruential step (Knuth's MMIX constants).
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % n as u64) as usize
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    fn subset(&mut self, set: AxisSet) -> AxisSet {
        AxisSet(set.0 & self.below(16) as u8)
    }
}

/// A sharding that cuts dims evenly.
fn stream_sharding(pick: &mut Picker, shape: &[u64], mesh: &Mesh) -> Sharding {
    let mut sharding = Sharding::REPLICATED;
    for axis in mesh.axis_ids() {
        let placement = match pick.below(shape.len() + 2) {
            0 => Placement::Replicate,
            1 => Placement::PartialSum,
            dim => Placement::Shard(dim as u8 - 2),
        };
        let next = sharding.with(axis, placement);
        let even = |(dim, size): (usize, &u64)| {
            let parts: u64 = next.axes_of(dim).map(|axis: AxisId| mesh.size(axis)).product();
            size % parts == 0
        };
        if shape.iter().enumerate().all(even) {
            sharding = next;
        }
    }
    sharding
}

/// Any choice the search could make, and many it would not.
fn choose(layer: &Layer, mesh: &Mesh, sizes: &Sizes, pick: &mut Picker) -> LayerChoice {
    let sharding = |tensor, pick: &mut Picker| stream_sharding(pick, &layer.shape(tensor, sizes), mesh);
    let stream = layer.stream_in.first().map_or(Sharding::REPLICATED, |&tensor| sharding(tensor, pick));
    let out = sharding(layer.out[0], pick);
    let chosen: Vec<Strategy> = layer
        .ops
        .iter()
        .map(|op| pick.of(&strategies(layer, op, &signature(layer, op), mesh, sizes)))
        .collect();
    let recompute = layer.ops.iter().map(|_| pick.of(&[Recompute::Keep, Recompute::Again])).collect();
    let mut storage = BTreeMap::new();
    for (op, &strategy) in layer.ops.iter().zip(&chosen) {
        let placed = placements(&signature(layer, op), strategy);
        for (i, &tensor) in op.operands.iter().enumerate().filter(|(_, t)| layer.is_parameter(**t)) {
            let optimizer = pick.subset(whole_axes(mesh, placed.operands[i]));
            let (parameter, gradient) = (pick.subset(optimizer), pick.subset(optimizer));
            let states = Storage::on_device(parameter, gradient, optimizer);
            storage
                .insert(tensor, if layer.is_trained(tensor) { states } else { Storage::frozen(parameter) });
        }
    }
    LayerChoice {
        stream,
        out,
        strategies: chosen,
        recompute,
        kept: Home::Device,
        parameters: Home::Device,
        storage,
        shared: BTreeSet::new(),
    }
}

/// Lowers a random choice; `None` where there is no program (an unfinished maximum that would have to be a sum).
fn random_program(layer: &Layer, mesh: &Mesh, seed: u64) -> Option<(Sizes, Program)> {
    random_program_for(layer, mesh, (8, 16), seed)
}

fn random_program_for(
    layer: &Layer,
    mesh: &Mesh,
    (micro_batch, sequence): (u64, u64),
    seed: u64,
) -> Option<(Sizes, Program)> {
    let sizes = layer.sizes(micro_batch, sequence);
    let choice = choose(layer, mesh, &sizes, &mut Picker(seed));
    let program = lower(layer, mesh, &sizes, &choice).ok()?;
    Some((sizes, program))
}

#[track_caller]
pub(crate) fn check_proven(layer: &Layer, mesh: &Mesh, seed: u64) {
    check_proven_for(layer, mesh, (8, 16), seed);
}

#[track_caller]
pub(crate) fn check_proven_for(layer: &Layer, mesh: &Mesh, lengths: (u64, u64), seed: u64) {
    if let Some((sizes, program)) = random_program_for(layer, mesh, lengths, seed) {
        let proof = prove(layer, mesh, &sizes, &program);
        assert!(matches!(proof, Proof::Proven { .. }), "layer {} seed {seed}: {proof:?}", layer.name);
        let proof = prove_split((layer, mesh, &sizes), &program, &split_backward(layer, &program));
        assert!(matches!(proof, Proof::Proven { .. }), "layer {} seed {seed}, split: {proof:?}", layer.name);
    }
}

#[test]
fn one_device_runs_the_layer_itself() {
    let mesh = Mesh::of_sizes(&[]).unwrap();
    for layer in layers::all() {
        check_proven(&layer, &mesh, 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_legal_choice_on_one_axis_is_proven(seed: u64, which in 0..layers::COUNT) {
        check_proven(&layers::all()[which], &Mesh::of_sizes(&[2]).unwrap(), seed);
    }

    #[test]
    fn every_legal_choice_on_two_axes_is_proven(seed: u64, which in 0..layers::COUNT) {
        check_proven(&layers::all()[which], &Mesh::of_sizes(&[2, 2]).unwrap(), seed);
    }

    #[test]
    fn every_legal_choice_on_three_axes_is_proven(seed: u64, which in 0..layers::COUNT) {
        check_proven(&layers::all()[which], &Mesh::of_sizes(&[2, 1, 2, 2]).unwrap(), seed);
    }

    #[test]
    fn what_is_frozen_needs_no_update(seed: u64, which in 0..layers::COUNT, frozen: u64) {
        let layer = with_frozen(layers::all()[which].clone(), frozen);
        check_proven(&layer, &Mesh::of_sizes(&[2, 2]).unwrap(), seed);
    }

    #[test]
    fn blocks_may_be_unequal(seed: u64, which in 2..4usize) {
        check_proven(&layers::all()[which], &Mesh::of_sizes(&[3, 2]).unwrap(), seed);
    }
}

/// A layer with those parameters frozen whose bit is set.
fn with_frozen(mut layer: Layer, bits: u64) -> Layer {
    let parameters: Vec<TensorId> = layer.parameters().collect();
    for (_, tensor) in parameters.into_iter().enumerate().filter(|(i, _)| bits >> (i % 64) & 1 == 1) {
        if let Role::Parameter(init) = layer.tensors[tensor.0].role {
            layer.tensors[tensor.0].role = Role::Frozen(init);
        }
    }
    layer
}

/// A program of the layer in which everything is learned does not fit the layer in which something is frozen, nor the
/// other way round, and no parameter may be missing.
#[test]
fn what_is_frozen_must_be_held_and_not_learned() {
    let (learned, mesh) = (layers::dense(), Mesh::of_sizes(&[2]).unwrap());
    let frozen = with_frozen(learned.clone(), 0b100);
    let of = |layer: &Layer| random_program(layer, &mesh, 1).unwrap();
    let ((sizes, all), (_, some)) = (of(&learned), of(&frozen));
    let reason = |layer: &Layer, program: &Program| match prove(layer, &mesh, &sizes, program) {
        Proof::Proven { .. } => String::from("proven"),
        Proof::NotProven { reason } => reason,
    };
    assert_eq!(reason(&frozen, &some), "proven");
    assert!(reason(&frozen, &all).contains("is updated though it is frozen"));
    assert!(reason(&learned, &some).contains("the other way round"));
    let mut missing = some.clone();
    missing.frozen.clear();
    assert!(reason(&frozen, &missing).contains("is not held once"));
    let mut accumulated = some.clone();
    let tensor = some.frozen[0].tensor;
    let is_it = |one: &&Instruction| matches!(one, Instruction::Accumulate { gradient, .. } if all.value(*gradient).tensor == tensor);
    let gradient = all.backward.iter().find(is_it);
    let Some(Instruction::Accumulate { gradient, reduce }) = gradient else { panic!("no gradient") };
    accumulated.values.push(all.value(*gradient));
    let gradient = ValueId(accumulated.values.len() - 1);
    accumulated.backward.push(Instruction::Accumulate { gradient, reduce: reduce.clone() });
    assert!(reason(&frozen, &accumulated).contains("is read but not there"));
}

/// Whatever is left out of a split, its order or what it carries, is noticed.
#[test]
fn a_split_that_lost_something_is_not_proven() {
    let (layer, mesh) = (layers::dense(), Mesh::of_sizes(&[2]).unwrap());
    let (sizes, program) = random_program(&layer, &mesh, 1).unwrap();
    let split = split_backward(&layer, &program);
    let refused = |split: SplitBackward| {
        let proof = prove_split((&layer, &mesh, &sizes), &program, &split);
        assert!(matches!(proof, Proof::NotProven { .. }));
    };
    for i in 0..split.carried.len() {
        let mut less = split.clone();
        less.carried.remove(i);
        refused(less);
    }
    let accumulates = |one: &Instruction| matches!(one, Instruction::Accumulate { .. });
    for i in (0..split.weight.len()).filter(|&i| accumulates(&split.weight[i])) {
        let mut less = split.clone();
        less.weight.remove(i);
        refused(less);
        let mut twice = split.clone();
        twice.input.push(split.weight[i].clone());
        refused(twice);
    }
}

#[test]
fn the_same_program_has_the_same_proof() {
    let (layer, mesh) = (layers::dense(), Mesh::of_sizes(&[2, 2]).unwrap());
    let run = || {
        let (sizes, program) = random_program(&layer, &mesh, 1).unwrap();
        prove(&layer, &mesh, &sizes, &program)
    };
    assert_eq!(run(), run());
}

/// The rows of the rule book: name, and the most terms that one application adds.
fn rule_book() -> BTreeMap<String, usize> {
    let book = include_str!("../../../../docs/rules.md");
    let rules = book.split("### Rules").nth(1).unwrap().split("### ").next().unwrap();
    let row = |line: &str| {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        (cells[0].trim_matches('`').to_owned(), cells.last().unwrap().parse().unwrap())
    };
    rules.lines().filter(|line| line.starts_with("| `")).map(row).collect()
}

/// Applies rules until nothing new follows, and counts what one application of each adds at most.
fn count_growth(layer: &Layer, mesh: &Mesh, seed: u64, most: &mut BTreeMap<String, usize>) {
    let Some((sizes, program)) = random_program(layer, mesh, seed) else { return };
    let mut graph = Graph::new(Facts::new(layer, mesh, &sizes));
    let whole = reference(&mut graph);
    claims(&mut graph, (&program, None), &whole).unwrap();
    for _ in 0..MAX_ROUNDS {
        graph.rebuild();
        let before = graph.nodes().len();
        let mut news = false;
        for at in 0..before {
            let id = Id::from(at);
            let term = graph.id_to_node(id).clone().map_children(|child| graph.find(child));
            let class = graph.find(id);
            for rule in &RULES {
                let n = graph.nodes().len();
                news |= (rule.apply)(&mut graph, class, &term);
                let added = graph.nodes().len() - n;
                let known = most.entry(rule.name.to_owned()).or_default();
                *known = added.max(*known);
            }
        }
        if !news && graph.nodes().len() == before {
            return;
        }
    }
}

#[test]
fn the_rule_book_is_the_list_of_rules_and_says_how_far_each_grows() {
    let mut most: BTreeMap<String, usize> = BTreeMap::new();
    for layer in layers::all() {
        for sizes in [&[2][..], &[2, 2], &[2, 2, 2]] {
            let mesh = Mesh::of_sizes(sizes).unwrap();
            (0..12).for_each(|seed| count_growth(&layer, &mesh, seed, &mut most));
        }
    }
    assert_eq!(most.len(), RULES.len());
    assert_eq!(rule_book(), most);
}
