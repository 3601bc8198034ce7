use std::collections::BTreeMap;

use ir::conversion::{Step, StepKind};
use ir::graph::Model;
use ir::lower::{LayerChoice, Recompute, whole_axes};
use ir::mesh::{AxisId, Mesh};
use ir::op::AttentionBias;
use ir::program::{AxisSet, Instruction, Storage};
use ir::schedule::Schedule;
use ir::sharding::{Placement, Sharding};
use ir::signature::signature;
use ir::strategy::{AxisUse, placements};
use ir::token_order::TokenOrder;

use super::*;
use crate::compare::{Precision, compare};
use crate::element::Edges;
use crate::job::{Reference, TokenLayout};
use model::{decoder, execution, experts, mlp, model, plain, tied};

mod branches;
mod drawn;
mod frozen;
mod grids;
mod model;
mod offload;
mod sliced;
mod training;
mod unequal;

const ONE_STAGE: (Schedule, u32, u32) = (Schedule::GPipe, 1, 2);

fn zig_zag(parts: u64) -> TokenLayout {
    TokenLayout { order: TokenOrder::ZigZag, parts }
}

/// Runs an execution and its reference, and wants the same numbers.
#[track_caller]
fn check(execution: &Execution<'_>) -> Outcome {
    let reference = Reference::of(execution);
    let expected = run::<f64>(&reference.execution(execution), &|_, _| 0).unwrap();
    let programs = programs(execution).unwrap();
    let found =
        run_programs::<f64>(execution, &programs, &|_, _| 0).unwrap_or_else(|error| panic!("{error}"));
    for memory in &found.memory {
        assert_eq!((memory.high_water, memory.most_live), (memory.planned_peak, memory.lower_bound));
        assert!(memory.lower_bound > 0 && memory.planned_peak >= memory.lower_bound);
    }
    let comparison = compare(&expected, &found, Precision::F64);
    assert!(comparison.is_equal(), "{:#?}", comparison.failures().take(4).collect::<Vec<_>>());
    found
}

/// A choice in which every operator cuts the first of these factors that it has.
fn along(layer: &ir::graph::Layer, axes: &[&[&str]], stream: &[Placement]) -> LayerChoice {
    let mut choice = plain(layer);
    let put = |placements: &[Placement]| {
        let pairs = placements.iter().enumerate();
        pairs.fold(Sharding::REPLICATED, |s, (axis, &placement)| s.with(AxisId(axis), placement))
    };
    if !layer.stream_in.is_empty() {
        choice.stream = put(stream);
    }
    if !layer.has_loss() {
        choice.out = put(stream);
    }
    for (op, strategy) in layer.ops.iter().zip(&mut choice.strategies) {
        let sig = signature(layer, op);
        for (axis, names) in axes.iter().enumerate() {
            let usable = |name: &&&str| {
                sig.factor(name).filter(|f| sig.factors[f.0 as usize].split != ir::signature::Split::Whole)
            };
            if let (Some(ring), Some(&"ring")) = (sig.ring, names.first()) {
                strategy.0[axis] = AxisUse::Ring(ring);
                continue;
            }
            if let Some(factor) = names.iter().find_map(|name| usable(&name)) {
                strategy.0[axis] = AxisUse::Factor(factor);
            }
        }
    }
    choice
}

fn choices(model: &Model, axes: &[&[&str]], stream: &[Placement]) -> Vec<LayerChoice> {
    model.layers.iter().map(|layer| along(layer, axes, stream)).collect()
}

fn store(model: &Model, mesh: &Mesh, choices: &mut [LayerChoice], storage: impl Fn(AxisSet) -> Storage) {
    for (layer, choice) in model.layers.iter().zip(choices) {
        for (op, &strategy) in layer.ops.iter().zip(&choice.strategies) {
            let used = placements(&signature(layer, op), strategy).operands;
            for (tensor, used) in op.operands.iter().zip(used) {
                if let Some(entry) = choice.storage.get_mut(tensor) {
                    *entry = storage(whole_axes(mesh, used));
                }
            }
        }
    }
}

#[test]
fn a_model_on_one_device_runs_and_its_loss_falls() {
    let (model, mesh) = (model(mlp(), 2), Mesh::of_sizes(&[]).unwrap());
    let mut execution = execution(&model, &mesh, choices(&model, &[], &[]), ONE_STAGE);
    execution.steps = 2;
    let outcome = check(&execution);
    assert!((outcome.losses[0] - (model::VOCABULARY as f64).ln()).abs() < 1.5, "{:?}", outcome.losses);
    assert!(outcome.counters.sent().is_empty());
}

#[test]
fn data_parallel_with_every_storage_gives_the_same_numbers() {
    let (model, mesh) = (model(mlp(), 2), Mesh::of_sizes(&[4]).unwrap());
    let none = AxisSet::EMPTY;
    for level in 0..4 {
        let mut choices = choices(&model, &[&["b"]], &[Placement::Shard(0)]);
        let cut = |above: u8, all: AxisSet| if level > above { all } else { none };
        store(&model, &mesh, &mut choices, |all| Storage::on_device(cut(2, all), cut(1, all), cut(0, all)));
        check(&execution(&model, &mesh, choices, ONE_STAGE));
    }
}

/// Tensor axis on the model's wide dims, sequence between them.
const TENSOR: &[&[&str]] = &[&["b"], &["g", "v", "k", "e", "s", "h"]];

fn hybrid(stream: Placement) -> (Model, Mesh, Vec<LayerChoice>) {
    let (model, mesh) = (model(decoder(), 2), Mesh::of_sizes(&[2, 2]).unwrap());
    let choices = choices(&model, TENSOR, &[Placement::Shard(0), stream]);
    (model, mesh, choices)
}

#[test]
fn columns_then_rows_with_a_stream_cut_along_the_sequence() {
    let (model, mesh, choices) = hybrid(Placement::Shard(1));
    let outcome = check(&execution(&model, &mesh, choices, ONE_STAGE));
    let kinds: Vec<CollectiveKind> =
        outcome.traffic().keys().filter(|k| k.0 == Class::Forward).map(|k| k.1).collect();
    assert!(
        kinds.contains(&CollectiveKind::AllGather) && kinds.contains(&CollectiveKind::ReduceScatter),
        "{kinds:?}"
    );
}

#[test]
fn a_vocabulary_in_unequal_blocks() {
    let (model, mesh) = (model(mlp(), 1), Mesh::of_sizes(&[4]).unwrap());
    check(&execution(&model, &mesh, choices(&model, &[&["v"]], &[]), ONE_STAGE));
}

#[test]
fn experts_apart_and_tokens_exchanged() {
    for bias in [AttentionBias::None, AttentionBias::Slopes, AttentionBias::Sinks] {
        let (model, mesh) = (model(experts(bias), 2), Mesh::of_sizes(&[4]).unwrap());
        let mut choices = choices(&model, &[&["b"]], &[Placement::Shard(0)]);
        for (op, strategy) in model.layers[1].ops.iter().zip(&mut choices[1].strategies) {
            if let Some(expert) =
                signature(&model.layers[1], op).factor("e").filter(|_| op.name != "route 13")
            {
                let routed = ["in", "u", "a", "d"]
                    .iter()
                    .any(|name| op.results.iter().any(|t| model.layers[1].tensors[t.0].name == *name));
                if routed && op.name != "dispatch 15" {
                    strategy.0[0] = AxisUse::Factor(expert);
                }
            }
        }
        let outcome = check(&execution(&model, &mesh, choices, ONE_STAGE));
        assert!(outcome.traffic().contains_key(&(Class::Forward, CollectiveKind::AllToAll, 0)));
    }
}

#[test]
fn queries_cut_in_every_order() {
    let (mut model, mesh) = (model(decoder(), 2), Mesh::of_sizes(&[2]).unwrap());
    model.layers[0] = model::embedding_with_positions();
    let choices = choices(&model, &[&["s"]], &[Placement::Shard(1)]);
    let execution = execution(&model, &mesh, choices, ONE_STAGE);
    for order in [TokenOrder::Natural, TokenOrder::ZigZag, TokenOrder::Striped] {
        check(&Execution { tokens: TokenLayout { order, parts: 2 }, ..execution.clone() });
    }
}

/// Attention of every kind on one ring and on two, in every order of tokens, kept or computed again.
#[test]
fn keys_travel_round_a_ring() {
    for kind in model::ATTENTIONS {
        for (sizes, again) in [(&[4_u64] as &[u64], false), (&[4], true), (&[2, 2], false)] {
            let (model, mesh) = (model(model::attending(kind), 2), Mesh::of_sizes(sizes).unwrap());
            let axes = vec![&["ring", "s"] as &[&str]; sizes.len()];
            let mut choices = choices(&model, &axes, &vec![Placement::Shard(1); sizes.len()]);
            if again {
                choices.iter_mut().for_each(|choice| choice.recompute.fill(Recompute::Again));
            }
            for tokens in
                [TokenLayout::NATURAL, zig_zag(4), TokenLayout { order: TokenOrder::Striped, parts: 4 }]
            {
                let execution = execution(&model, &mesh, choices.clone(), ONE_STAGE);
                let outcome = check(&Execution { tokens, ..execution });
                let hop = |class| outcome.traffic().get(&(class, CollectiveKind::SendReceive, 0)).copied();
                assert!(hop(Class::Forward).is_some() && hop(Class::Recompute) >= hop(Class::Gradient));
                assert!(!outcome.traffic().contains_key(&(Class::Forward, CollectiveKind::AllGather, 0)));
            }
        }
    }
}

/// Two sequences of micro-batches, two blocks of tokens and two of heads: what sees all keys is the same on all of
/// them, the tokens in every order, keys gathered or travelling.
#[test]
fn attention_without_a_mask_on_a_grid_of_data_context_and_heads() {
    let mesh = Mesh::of_sizes(&[2, 2, 2]).unwrap();
    let full = model::attending(model::ATTENTIONS[6]);
    for (body, tokens) in [(full, ["s", "s"]), (model::crossing(), ["s", "m"])] {
        let model = model(body, 2);
        let stream = [Placement::Shard(0), Placement::Shard(1), Placement::Replicate];
        for ring in [false, true] {
            let mut context = if ring { vec!["ring"] } else { Vec::new() };
            context.extend(tokens);
            let choices = choices(&model, &[&["b"], &context, &["k", "v", "h"]], &stream);
            for order in [TokenOrder::Natural, TokenOrder::ZigZag, TokenOrder::Striped] {
                let execution = execution(&model, &mesh, choices.clone(), ONE_STAGE);
                let outcome = check(&Execution { tokens: TokenLayout { order, parts: 2 }, ..execution });
                let hops = outcome.traffic().contains_key(&(Class::Forward, CollectiveKind::SendReceive, 0));
                assert_eq!(hops, ring);
            }
        }
    }
}

#[test]
fn pipelines_of_every_schedule() {
    let interleaved = Schedule::Interleaved { virtual_stages: 2 };
    let shapes =
        [(Schedule::GPipe, 2, 3), (Schedule::OneFOneB, 4, 6), (interleaved, 2, 4), (interleaved, 4, 8)];
    for shape in shapes {
        let (model, mesh) = (model(mlp(), 7), Mesh::of_sizes(&[2]).unwrap());
        let choices = choices(&model, &[&["b"]], &[Placement::Shard(0)]);
        let outcome = check(&execution(&model, &mesh, choices, shape));
        assert!(outcome.traffic().contains_key(&(Class::Pipeline, CollectiveKind::SendReceive, 0)));
    }
}

/// Every schedule runs the same step: split backward, copies of chunks and all.
fn check_schedules(schedules: &[(Schedule, u32, u32)]) {
    for &shape in schedules {
        let (model, mesh) = (model(mlp(), 10), Mesh::of_sizes(&[2]).unwrap());
        let mut choices = choices(&model, &[&["b"]], &[Placement::Shard(0)]);
        store(&model, &mesh, &mut choices, |all| Storage { optimizer: all, ..Storage::default() });
        let outcome = check(&execution(&model, &mesh, choices, shape));
        let splits = shape.0.splits_backward();
        assert_eq!(outcome.carried.iter().all(|layers| !layers.is_empty()), splits, "{}", shape.0);
    }
}

#[test]
fn one_chunk_per_rank_under_eager_dapple_and_breadth_first() {
    let breadth_first = Schedule::BreadthFirst { virtual_stages: 2 };
    check_schedules(&[
        (Schedule::Eager, 4, 6),
        (Schedule::Dapple { warm_up: 5 }, 4, 6),
        (breadth_first, 4, 5),
    ]);
}

#[test]
fn backward_in_two_parts_under_zb_h1_and_zb_h2() {
    check_schedules(&[(Schedule::ZbH1, 4, 6), (Schedule::ZbH2, 4, 10), (Schedule::ZbH1, 3, 2)]);
}

#[test]
fn two_chunks_in_a_v_under_zb_v_v_half_v_min_and_dualpipe_v() {
    check_schedules(&[
        (Schedule::ZbV, 4, 6),
        (Schedule::VHalf, 4, 6),
        (Schedule::VMin, 4, 6),
        (Schedule::VMin, 3, 7),
        (Schedule::DualPipeV, 4, 9),
    ]);
}

#[test]
fn waves_under_hanayo() {
    check_schedules(&[(Schedule::Hanayo { waves: 1 }, 4, 6), (Schedule::Hanayo { waves: 2 }, 3, 4)]);
}

#[test]
fn two_copies_of_every_chunk_under_chimera() {
    check_schedules(&[(Schedule::Chimera, 4, 6), (Schedule::Chimera, 2, 3)]);
}

#[test]
fn the_last_rank_of_zb_h1_carries_what_1f1b_never_keeps() {
    let (model, mesh) = (model(mlp(), 4), Mesh::of_sizes(&[]).unwrap());
    let run = |schedule| check(&execution(&model, &mesh, choices(&model, &[], &[]), (schedule, 4, 8)));
    let (whole, parts) = (run(Schedule::OneFOneB), run(Schedule::ZbH1));
    assert_eq!(whole.saved, parts.saved);
    assert!(parts.peak_saved[3] > 3 * whole.peak_saved[3], "{:?} {:?}", parts.peak_saved, whole.peak_saved);
}

#[test]
fn stages_that_disagree_on_the_stream_convert_between_them() {
    let (model, mesh) = (model(mlp(), 2), Mesh::of_sizes(&[2]).unwrap());
    let mut choices = choices(&model, &[&["b"]], &[Placement::Shard(0)]);
    choices[1].stream = Sharding::REPLICATED.with(AxisId(0), Placement::Shard(1));
    choices[1].out = Sharding::REPLICATED.with(AxisId(0), Placement::PartialSum);
    choices[2].stream = Sharding::REPLICATED.with(AxisId(0), Placement::Shard(2));
    let execution = execution(&model, &mesh, choices, (Schedule::OneFOneB, 4, 4));
    check(&execution);
    let together =
        Execution { chunks: vec![crate::job::Chunk { layers: vec![0, 1, 1, 2] }], n_stages: 1, ..execution };
    let together = Execution { table: ir::schedule::table(Schedule::GPipe, 1, 4).unwrap(), ..together };
    insta::assert_snapshot!(run::<f64>(&together, &|_, _| 0).unwrap_err(), @"layer 1 `mlp`: the layer before gives the stream in another sharding");
}

#[test]
fn everything_computed_again_in_backward() {
    for body in [mlp(), decoder(), experts(AttentionBias::Sinks)] {
        let (model, mesh) = (model(body, 2), Mesh::of_sizes(&[2, 2]).unwrap());
        let kept = choices(&model, TENSOR, &[Placement::Shard(0), Placement::Shard(1)]);
        let mut again = kept.clone();
        again.iter_mut().for_each(|choice| choice.recompute.fill(Recompute::Again));
        let kept = check(&execution(&model, &mesh, kept, (Schedule::OneFOneB, 2, 4)));
        let again = check(&execution(&model, &mesh, again, (Schedule::OneFOneB, 2, 4)));
        assert!(again.peak_saved.iter().zip(&kept.peak_saved).all(|(again, kept)| again < kept));
    }
}

#[test]
fn a_tied_table_is_updated_once_and_known_to_both_stages() {
    for n_stages in [1, 2] {
        let (model, mesh) = (tied(model(mlp(), 2)), Mesh::of_sizes(&[2, 2]).unwrap());
        let mut choices = choices(&model, &[&["b"], &["v"]], &[Placement::Shard(0)]);
        store(&model, &mesh, &mut choices, |all| Storage {
            parameter: all,
            optimizer: all,
            ..Storage::default()
        });
        let outcome = check(&execution(&model, &mesh, choices, (Schedule::GPipe, n_stages, 3)));
        let table = |layer| &outcome.parameters[1][&(layer, "table".to_owned())];
        assert_eq!(table(0), table(3));
        assert_eq!(outcome.traffic().keys().any(|key| key.0 == Class::Tie), n_stages == 2);
    }
}

#[test]
fn tied_parameters_must_lie_alike() {
    let (model, mesh) = (tied(model(mlp(), 2)), Mesh::of_sizes(&[2]).unwrap());
    let mut choices = choices(&model, &[&["v"]], &[]);
    choices[0] = plain(&model.layers[0]);
    let error = run::<f64>(&execution(&model, &mesh, choices, ONE_STAGE), &|_, _| 0).unwrap_err();
    insta::assert_snapshot!(error, @"`table` of layer 3 is tied to `table` of layer 0 but differs in shape, sharding or storage");
}

/// Every all-reduce between operators, left out one at a time.
#[test]
fn a_program_without_one_of_its_reductions_is_found_out() {
    let (model, mesh) = (model(decoder(), 2), Mesh::of_sizes(&[2, 2]).unwrap());
    let mut choices = choices(&model, &[&["b"], &["g", "v", "k"]], &[Placement::Shard(0)]);
    store(&model, &mesh, &mut choices, |all| Storage { optimizer: all, ..Storage::default() });
    let execution = execution(&model, &mesh, choices, ONE_STAGE);
    let good = programs(&execution).unwrap();
    let reference = Reference::of(&execution);
    let expected = run::<f64>(&reference.execution(&execution), &|_, _| 0).unwrap();
    let mut tried = 0;
    for (i, program) in good.iter().enumerate() {
        let sections = program.forward.iter().chain(&program.backward).enumerate();
        let converts = sections.filter_map(|(at, code)| {
            if let Instruction::Convert { steps, .. } = code { Some((at, steps)) } else { None }
        });
        let reduces = |step: &Step| matches!(step.kind, StepKind::AllReduce | StepKind::AllReduceMax);
        for (at, _) in converts.filter(|(_, steps)| steps.iter().any(reduces)) {
            let mut broken = good.clone();
            let n = broken[i].forward.len();
            let code = if at < n { &mut broken[i].forward[at] } else { &mut broken[i].backward[at - n] };
            if let Instruction::Convert { steps, .. } = code {
                steps.retain(|step| !reduces(step));
            }
            let found = run_programs::<f64>(&execution, &broken, &|_, _| 0);
            let is_equal = found.is_ok_and(|found| compare(&expected, &found, Precision::F64).is_equal());
            assert!(!is_equal, "layer {i}, instruction {at}");
            tried += 1;
        }
    }
    assert!(tried > 4, "{tried}");
}

#[test]
fn a_gradient_that_is_not_reduced_is_a_disagreement_of_two_ranks() {
    let (model, mesh) = (model(mlp(), 1), Mesh::of_sizes(&[2]).unwrap());
    let execution = execution(&model, &mesh, choices(&model, &[&["b"]], &[Placement::Shard(0)]), ONE_STAGE);
    let mut broken = programs(&execution).unwrap();
    broken[1].updates[0].reduce.clear();
    let error = run_programs::<f64>(&execution, &broken, &|_, _| 0).unwrap_err();
    assert!(matches!(&error, ExecutorError::Disagreement { ranks: (0, 1), .. }), "{error}");
}

#[test]
fn two_runs_give_the_same_bits() {
    let (model, mesh, choices) = hybrid(Placement::Shard(1));
    let execution = execution(&model, &mesh, choices, (Schedule::OneFOneB, 2, 4));
    let tier = |a: usize, b: usize| usize::from(a / 2 != b / 2);
    let both = [(); 2].map(|()| run::<f32>(&execution, &tier).unwrap());
    assert_eq!(both[0], both[1]);
}

/// Two bytes an element, and no more rounding than one device has.
#[test]
fn bf16_agrees_within_its_rounding_and_sends_half_the_bytes() {
    let (model, mesh, choices) = hybrid(Placement::Shard(1));
    let exact = Execution {
        optimizer: model::GENTLE,
        ..execution(&model, &mesh, choices, (Schedule::OneFOneB, 2, 4))
    };
    let rounded = Execution { edges: Edges::Bf16, ..exact.clone() };
    let reference = Reference::of(&rounded);
    let expected = run::<f32>(&reference.execution(&rounded), &|_, _| 0).unwrap();
    let found = run::<f32>(&rounded, &|_, _| 0).unwrap();
    let comparison = compare(&expected, &found, Precision::Bf16);
    assert!(comparison.is_equal(), "{:#?}", comparison.failures().take(4).collect::<Vec<_>>());
    let single = run::<f32>(&exact, &|_, _| 0).unwrap();
    assert!(!compare(&single, &found, Precision::F32).is_equal());
    assert_eq!(2 * found.counters.total(), single.counters.total());
    assert_eq!(2 * found.peak_saved[0], single.peak_saved[0]);
}

#[test]
fn single_precision_agrees_within_its_tolerance() {
    let (model, mesh, choices) = hybrid(Placement::Shard(1));
    let execution = execution(&model, &mesh, choices, ONE_STAGE);
    let reference = Reference::of(&execution);
    let expected = run::<f32>(&reference.execution(&execution), &|_, _| 0).unwrap();
    let comparison = compare(&expected, &run::<f32>(&execution, &|_, _| 0).unwrap(), Precision::F32);
    assert!(comparison.is_equal(), "{:#?}", comparison.failures().take(4).collect::<Vec<_>>());
}

/// Two ranks, batch cut: the norm's and the two products' operands and the activation's: 4 * 8 tokens of 8, 8, 16
/// and 16 elements of 8 bytes.
#[test]
fn saved_bytes_are_those_of_the_operands_that_backward_reads() {
    let (model, mesh) = (model(mlp(), 1), Mesh::of_sizes(&[2]).unwrap());
    let outcome =
        check(&execution(&model, &mesh, choices(&model, &[&["b"]], &[Placement::Shard(0)]), ONE_STAGE));
    assert_eq!(outcome.saved[0][&1], 4 * 8 * (8 + 8 + 16 + 16) * 8);
    let one: u64 = outcome.saved[0].values().sum();
    assert_eq!(outcome.peak_saved, [2 * one, 2 * one]);
}

/// All-reduce of one step: `2 (n-1)/n * n = 2` times the parameter's bytes for two ranks.
#[test]
fn bytes_are_counted_by_what_they_are_for() {
    let (model, mesh) = (model(mlp(), 1), Mesh::of_sizes(&[2]).unwrap());
    let execution = execution(&model, &mesh, choices(&model, &[&["b"]], &[Placement::Shard(0)]), ONE_STAGE);
    let outcome = run::<f32>(&execution, &|_, _| 3).unwrap();
    let parameters = model.n_parameters();
    let loss = 2 * 2 * 2 * 4;
    let expected = BTreeMap::from([
        ((Class::Forward, CollectiveKind::AllReduce, 3), loss),
        ((Class::GradientReduce, CollectiveKind::AllReduce, 3), 2 * 2 * parameters * 4),
    ]);
    assert_eq!(outcome.traffic(), expected);
}

#[test]
fn counts_that_do_not_fit_are_errors() {
    let (model, mesh) = (model(mlp(), 1), Mesh::of_sizes(&[]).unwrap());
    let good = execution(&model, &mesh, choices(&model, &[], &[]), ONE_STAGE);
    let fails = |execution: Execution<'_>| run::<f64>(&execution, &|_, _| 0).unwrap_err().to_string();
    insta::assert_snapshot!(fails(Execution { n_stages: 2, ..good.clone() }), @"1 chunks and a table of 1 rows do not fit 2 stages");
    insta::assert_snapshot!(fails(Execution { chunks: vec![crate::job::Chunk { layers: vec![0, 2] }], ..good.clone() }), @"the chunks do not hold the model's layers in order");
    insta::assert_snapshot!(fails(Execution { tokens: zig_zag(3), ..good.clone() }), @"a sequence of 8 tokens cannot be laid out TokenLayout { order: ZigZag, parts: 3 }");
    insta::assert_snapshot!(fails(Execution { table: vec![Vec::new()], ..good }), @"rank 0: forward of micro-batch 0 on virtual stage 0 is missing");
}

/// In double precision nothing has to be fixed, and fixing changes no bit; a reference of other tokens is refused or
/// fixes much.
#[test]
fn experts_can_be_fixed_to_those_of_the_reference() {
    let (model, mesh) = (model(experts(AttentionBias::None), 2), Mesh::of_sizes(&[2]).unwrap());
    let choices = choices(&model, &[&["s"]], &[Placement::Shard(1)]);
    let plan = execution(&model, &mesh, choices, ONE_STAGE);
    let plan = Execution { tokens: zig_zag(2), ..plan };
    let reference = Reference::of(&plan);
    let one = reference.execution(&plan);
    let expected = run::<f64>(&one, &|_, _| 0).unwrap();
    let free = run_programs::<f64>(&plan, &programs(&plan).unwrap(), &|_, _| 0).unwrap();
    let fixed = run_routed::<f64>(&plan, &programs(&plan).unwrap(), &expected, &|_, _| 0).unwrap();
    assert_eq!(free, fixed);
    assert!(!expected.routes.is_empty() && free.routes.is_empty());
    let other = run::<f64>(&Execution { seed: 8, ..one.clone() }, &|_, _| 0).unwrap();
    let forced = run_routed::<f64>(&plan, &programs(&plan).unwrap(), &other, &|_, _| 0).unwrap();
    assert!(forced.rerouted.keys().eq(&[1, 2]), "{:?}", forced.rerouted);
    let same = run_routed::<f64>(&one, &programs(&one).unwrap(), &other, &|_, _| 0).unwrap();
    let comparison = compare(&same, &forced, Precision::F64);
    assert!(comparison.is_equal(), "{:#?}", comparison.failures().take(4).collect::<Vec<_>>());
}
