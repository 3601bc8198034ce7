//! Tensor parallelism over grids of two, three and cubes of three axes, with the volumes that the literature gives;
//! then states cut over parts of the axes, and experts over parts of them.
//!
//! One feed-forward `Y = act(X A) B` with `X[m h]`, `A[h g]`, `B[g h]`, `m` tokens. A group of n that passes blocks of
//! together S elements around sends `(n - 1) S`, which is what a pipelined ring broadcast of the same blocks sends too;
//! so gathers stand for the broadcasts of SUMMA.

use super::*;
use ir::graph::Layer;
use ir::op::{Activation, OpKind};
use model::{MICRO_BATCH, SEQUENCE, layer, limited_experts};

const M: u64 = MICRO_BATCH * SEQUENCE;
const H: u64 = 8;
const G: u64 = 16;

/// One micro-batch, one step.
const ONCE: (Schedule, u32, u32) = (Schedule::GPipe, 1, 1);

fn feed_forward() -> Layer {
    layer(
        "grid",
        &[
            (OpKind::Fork, "x[b s h] -> x1[b s h] x2[b s h]"),
            (OpKind::Linear, "x1[b s h] *up[h g] -> u[b s g]"),
            (OpKind::Act { act: Activation::Gelu }, "u[b s g] -> a[b s g]"),
            (OpKind::Linear, "a[b s g] *down[g h] -> d[b s h]"),
            (OpKind::Add, "d[b s h] x2[b s h] -> out[b s h]"),
        ],
    )
}

/// The loop that each operator, by its first result, cuts along each axis; `*` stands for all others.
fn by_result(layer: &Layer, uses: &[(&str, &[&str])], stream: &[Placement]) -> LayerChoice {
    let mut choice = along(layer, &[], stream);
    for (op, strategy) in layer.ops.iter().zip(&mut choice.strategies) {
        let result = &layer.tensors[op.results[0].0].name;
        let own = uses.iter().find(|(name, _)| name == result || *name == "*").unwrap();
        for (axis, name) in own.1.iter().enumerate() {
            strategy.0[axis] = signature(layer, op).factor(name).map_or(AxisUse::Same, AxisUse::Factor);
        }
    }
    choice
}

/// A model of one feed-forward under `uses`; embedding and head take the stream as it comes.
fn grid(uses: &[(&str, &[&str])], stream: &[Placement]) -> (Model, Vec<LayerChoice>) {
    let model = model(feed_forward(), 1);
    let cut = |placement: &Placement, hidden| if *placement == ROWS { "b" } else { hidden };
    let whole: Vec<&str> = stream.iter().map(|p| cut(p, "h")).collect();
    let tokens: Vec<&str> = stream.iter().map(|p| cut(p, "s")).collect();
    let choices = vec![
        by_result(&model.layers[0], &[("*", &whole)], stream),
        by_result(&model.layers[1], uses, stream),
        by_result(&model.layers[2], &[("*", &tokens)], stream),
    ];
    (model, choices)
}

/// Elements that all ranks sent for the feed-forward.
fn sent(outcome: &Outcome, class: Class, kind: CollectiveKind) -> u64 {
    let own = outcome.counters.sent().iter().filter(|(traffic, _)| {
        traffic.kind == kind
            && Class::of_label(&traffic.label) == Some(class)
            && traffic.label.contains("layer 1 ")
    });
    own.map(|(_, bytes)| bytes).sum::<u64>() / 8
}

fn over(axes: &[usize]) -> AxisSet {
    AxisSet::of(&axes.iter().map(|&axis| AxisId(axis)).collect::<Vec<_>>())
}

fn stored(choices: &mut [LayerChoice], cut: AxisSet) {
    let storage = Storage::on_device(cut, cut, cut);
    choices[1].storage.values_mut().for_each(|own| *own = storage);
}

fn run_once(model: &Model, sizes: &[u64], choices: Vec<LayerChoice>) -> Outcome {
    let mesh = Mesh::of_sizes(sizes).unwrap();
    let mut execution = execution(model, &mesh, choices, ONCE);
    execution.steps = 1;
    check(&execution)
}

const ROWS: Placement = Placement::Shard(0);
const HIDDEN: Placement = Placement::Shard(2);

/// Xu et al. 2021, arXiv 2104.05343 (Optimus): on q x q devices, forward passes the blocks of X along rows and those of
/// the weights along columns: `(q - 1) (m h + m g + 2 h g)`. Backward passes both again and reduces both gradients.
#[test]
fn two_dimensional_products_send_what_summa_sends() {
    let uses: &[(&str, &[&str])] =
        &[("u", &["b", "g"]), ("a", &["b", "g"]), ("d", &["b", "h"]), ("*", &["b", "h"])];
    let (model, mut choices) = grid(uses, &[ROWS, HIDDEN]);
    stored(&mut choices, over(&[0]));
    let outcome = run_once(&model, &[2, 2], choices);
    let (tokens, weights) = (M * H + M * G, 2 * H * G);
    assert_eq!(sent(&outcome, Class::Forward, CollectiveKind::AllGather), tokens);
    assert_eq!(sent(&outcome, Class::ParameterGather, CollectiveKind::AllGather), 2 * weights);
    assert_eq!(sent(&outcome, Class::Recompute, CollectiveKind::AllGather), tokens);
    assert_eq!(sent(&outcome, Class::Gradient, CollectiveKind::ReduceScatter), tokens);
    assert_eq!(sent(&outcome, Class::GradientAccumulate, CollectiveKind::ReduceScatter), weights);
}

/// Wang et al. 2021, arXiv 2105.14500 (Tesseract): d layers of q x q devices, each with its tokens; weights are passed
/// within every layer, their gradients summed over the layers once a step.
#[test]
fn products_of_two_and_a_half_dimensions_sum_gradients_over_depth() {
    let uses: &[(&str, &[&str])] =
        &[("u", &["b", "b", "g"]), ("a", &["b", "b", "g"]), ("d", &["b", "b", "h"]), ("*", &["b", "b", "h"])];
    let (model, mut choices) = grid(uses, &[ROWS, ROWS, HIDDEN]);
    stored(&mut choices, over(&[1]));
    let outcome = run_once(&model, &[2, 2, 2], choices);
    let (depth, tokens, weights) = (2, M * H + M * G, 2 * H * G);
    assert_eq!(sent(&outcome, Class::Forward, CollectiveKind::AllGather), tokens);
    assert_eq!(sent(&outcome, Class::ParameterGather, CollectiveKind::AllGather), 2 * depth * weights);
    assert_eq!(sent(&outcome, Class::Gradient, CollectiveKind::ReduceScatter), tokens);
    assert_eq!(sent(&outcome, Class::GradientAccumulate, CollectiveKind::ReduceScatter), depth * weights);
    assert_eq!(sent(&outcome, Class::GradientReduce, CollectiveKind::AllReduce), 2 * (depth - 1) * weights);
}

/// Bian et al. 2021, arXiv 2105.14450: on a cube of side l every product gathers its operands along two axes and
/// reduce-scatters its result along the third: `(l - 1)` times the elements of each of the three matrices.
#[test]
fn products_on_a_cube_move_each_matrix_along_its_own_axis() {
    let uses: &[(&str, &[&str])] =
        &[("u", &["b", "g", "h"]), ("a", &["b", "g", "b"]), ("d", &["b", "g", "h"]), ("*", &["b", "b", "h"])];
    let (model, mut choices) = grid(uses, &[ROWS, ROWS, HIDDEN]);
    stored(&mut choices, over(&[0]));
    let outcome = run_once(&model, &[2, 2, 2], choices);
    let (operands, results, weights) = (M * H + M * G, M * G + M * H, 2 * H * G);
    assert_eq!(sent(&outcome, Class::Forward, CollectiveKind::AllGather), operands);
    assert_eq!(sent(&outcome, Class::Forward, CollectiveKind::ReduceScatter), results);
    assert_eq!(sent(&outcome, Class::ParameterGather, CollectiveKind::AllGather), 2 * weights);
    assert_eq!(sent(&outcome, Class::Gradient, CollectiveKind::AllGather), results);
    assert_eq!(sent(&outcome, Class::Gradient, CollectiveKind::ReduceScatter), operands);
    assert_eq!(sent(&outcome, Class::GradientAccumulate, CollectiveKind::ReduceScatter), weights);
}

/// States cut over the inner of two data-parallel axes: gathers stay inside, and each gradient's part is summed across
/// (Zhang et al. 2022, arXiv 2205.00119, MiCS; Zhao et al. 2023, arXiv 2304.11277, HSDP).
#[test]
fn hybrid_sharding_gathers_inside_and_sums_across() {
    let uses: &[(&str, &[&str])] = &[("*", &["b", "b"])];
    let (model, mut choices) = grid(uses, &[ROWS, ROWS]);
    stored(&mut choices, over(&[1]));
    let outcome = run_once(&model, &[2, 4], choices);
    let weights = 2 * H * G;
    assert_eq!(sent(&outcome, Class::ParameterGather, CollectiveKind::AllGather), 2 * 2 * 3 * weights);
    assert_eq!(sent(&outcome, Class::GradientAccumulate, CollectiveKind::ReduceScatter), 2 * 3 * weights);
    assert_eq!(sent(&outcome, Class::GradientReduce, CollectiveKind::AllReduce), 2 * weights);
}

/// Parameters over 2, gradients over 2 others, optimizer over all 8 (Chen et al. 2023, arXiv 2311.00257, AMSP).
#[test]
fn parameters_gradients_and_optimizer_are_cut_by_factors_of_their_own() {
    let uses: &[(&str, &[&str])] = &[("*", &["b", "b", "b"])];
    for (parameter, gradient) in [(&[2][..], &[1][..]), (&[1, 2], &[2]), (&[], &[0, 2])] {
        let (model, mut choices) = grid(uses, &[ROWS; 3]);
        let storage = Storage::on_device(over(parameter), over(gradient), over(&[0, 1, 2]));
        choices[1].storage.values_mut().for_each(|own| *own = storage);
        let mesh = Mesh::of_sizes(&[2, 2, 2]).unwrap();
        check(&execution(&model, &mesh, choices, ONE_STAGE));
    }
}

/// Two KV heads over four devices: queries are cut along both axes, keys and values along one (Shoeybi et al. 2019 with
/// Ainslie et al. 2023, arXiv 2305.13245).
#[test]
fn key_value_heads_are_the_same_where_the_axis_is_longer() {
    let mesh = Mesh::of_sizes(&[2, 2]).unwrap();
    let model = model(decoder(), 2);
    let axes: &[&[&str]] = &[&["k", "g", "v"], &["r", "g", "v"]];
    check(&execution(&model, &mesh, choices(&model, axes, &[]), ONE_STAGE));
}

/// A layer with experts: tokens are cut along every axis, experts along the loops given.
fn routed(axes: &[&str]) -> (Model, Vec<LayerChoice>) {
    let model = model(experts(AttentionBias::None), 2);
    let dense: Vec<&[&str]> = axes.iter().map(|_| &["b"] as &[&str]).collect();
    let mut choices = choices(&model, &dense, &vec![ROWS; axes.len()]);
    let layer = &model.layers[1];
    for (op, strategy) in layer.ops.iter().zip(&mut choices[1].strategies) {
        let inside = ["u", "a", "d"].contains(&layer.tensors[op.results[0].0].name.as_str());
        for (axis, expert) in axes.iter().enumerate().filter(|_| inside) {
            strategy.0[axis] = signature(layer, op).factor(expert).map_or(AxisUse::Same, AxisUse::Factor);
        }
    }
    (model, choices)
}

/// Experts over one axis, their inside over another, each copy with its own share of the tokens over the third.
#[test]
fn experts_fold_over_the_dense_mesh() {
    let mesh = Mesh::of_sizes(&[2, 2, 2]).unwrap();
    let (model, mut choices) = routed(&["b", "e", "g"]);
    store(&model, &mesh, &mut choices, |all| Storage { optimizer: all, ..Storage::default() });
    let outcome = check(&execution(&model, &mesh, choices, ONE_STAGE));
    assert!(outcome.traffic().contains_key(&(Class::Forward, CollectiveKind::AllToAll, 0)));
}

/// Experts with fewer slots than tokens want: who is dropped does not depend on the plan, whatever the order of tokens.
#[test]
fn tokens_beyond_the_capacity_of_an_expert_are_dropped() {
    let mesh = Mesh::of_sizes(&[2, 2]).unwrap();
    let model = model(limited_experts(), 2);
    let layer = &model.layers[1];
    let inside = |op: &ir::graph::Op| ["u", "a", "d"].contains(&layer.tensors[op.results[0].0].name.as_str());
    for (first, stream) in [("b", ROWS), ("s", Placement::Shard(1))] {
        let mut choices = choices(&model, &[&[first], &["b"]], &[stream, ROWS]);
        for (op, strategy) in layer.ops.iter().zip(&mut choices[1].strategies).filter(|(op, _)| inside(op)) {
            strategy.0[1] = AxisUse::Factor(signature(layer, op).factor("e").unwrap());
        }
        for order in [TokenOrder::Natural, TokenOrder::Striped] {
            let execution = execution(&model, &mesh, choices.clone(), ONE_STAGE);
            let execution = Execution { tokens: TokenLayout { order, parts: 2 }, ..execution };
            check(&execution);
            let alone = Reference::of(&execution);
            let alone = run::<f64>(&alone.execution(&execution), &|_, _| 0).unwrap();
            let (dropped, chosen) = alone.dropped[&1];
            assert!(dropped > 0 && dropped < chosen / 2, "{dropped} of {chosen}");
        }
    }
}

/// Four experts over two of four devices: two copies of each, whose gradients are summed.
#[test]
fn experts_have_copies() {
    let mesh = Mesh::of_sizes(&[2, 2]).unwrap();
    let (model, choices) = routed(&["b", "e"]);
    let outcome = check(&execution(&model, &mesh, choices, ONE_STAGE));
    let label = |text: &str| {
        outcome.counters.sent().keys().any(|traffic| {
            Class::of_label(&traffic.label) == Some(Class::GradientReduce) && traffic.label.contains(text)
        })
    };
    assert!(label("`up`") && label("`down`"));
}
