//! What choosing the form of a layer and its shardings together gains, in predicted time, over choosing the form first
//! and over no rewriting. The table of docs/joint.md is what is found.
//!
//! Every form is solved to optimality with all its strategies, so that the least of them is the optimum of the joint
//! space: where nothing is gained, no form would have gained anything.
//!
//! `UPDATE_DOCS=1 cargo test -p tests joint_forms::` writes the table anew.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use std::fmt::Write as _;

use cost_model::Constants;
use frontends::lora::{Lora, adapt};
use frontends::{read_cluster, read_model, shipped_cluster, shipped_model};
use ir::engine::TensorOverlap;
use ir::graph::{Layer, Model};
use ir::mesh::Mesh;
use ir::token_order::TokenOrder;
use planner::clock::Clock;
use planner::given::{Given, StorageRule};
use planner::layer_problem::LayerProblem;
use planner::prices::{Machine, Prices};
use planner::rewrite::{Variant, variants};
use planner::solve;
use planner::space::{AxisRule, Between};
use tests::hold_current;
use tests::layers::machine;

/// Memory that nothing needs.
const PLENTY: f64 = 1e30;

/// Relative difference of two times that are equal but for the order of additions.
const ROUNDING: f64 = 1e-9;

const HEAD: &str = "\
# Forms and shardings chosen together

A layer can be written in several equal forms ([rules](rules.md), part 2), and each can be cut in several ways. The planner
chooses both at once. This table says what that gains for one layer in a step of eight micro-batches of eight sequences of
4,096 tokens, gradients and update included, by the prices of the choice problem on H100s with eight to a node:

- *unwritten*: the best shardings of the layer as it was read;
- *form first*: the form that is fastest on one device, then the best shardings of it;
- *joint*: the best shardings of every form, and the best of those.

Each of these is the optimum, with a certificate, over every strategy of every operator that the mesh allows. So where the
joint optimum gains nothing, that is shown by exhaustion: every other form, however it is cut, is no faster.

A product may also run in chunks beside the collective that brings an operand or takes the result (collective matmul: Wang et
al. 2023, ASPLOS): a fifth of the collective then shows (`tensor_overlap_residual_fraction`), or what the product cannot hide.
Rows *in chunks* have every form both ways, with whole products and in chunks. On one device nothing travels, so that chunks gain
nothing there and the form that is fastest is whole: what these rows gain is what one device cannot show.

*inside* is an axis that cuts products (tensor parallel) with tokens cut between them; *data* one that cuts sequences. Absorbing
a projection of latent attention into its neighbour is no row: it would train other parameters.

Written by `UPDATE_DOCS=1 cargo test -p tests joint_forms::`; the same test fails where the table is not current.

| layer | devices | forms | unwritten | form first | joint | gains over unwritten | gains over form first | joint form |
|---|---|--:|--:|--:|--:|--:|--:|---|
";

const INSIDE: AxisRule = AxisRule::Inside(Between::Tokens);
const DATA: AxisRule = AxisRule::Sequences;
const EXPERTS: AxisRule = AxisRule::Experts;

/// A layer, and the axes of its mesh.
struct Case {
    title: &'static str,
    model: Model,
    layer: &'static str,
    axes: &'static [(u64, AxisRule)],
    devices: &'static str,
    products: &'static [TensorOverlap],
}

/// Products that begin when their operands are there.
const WHOLE: &[TensorOverlap] = &[TensorOverlap::Absent];

/// The same, or in chunks beside their collectives.
const IN_CHUNKS: &[TensorOverlap] = &[TensorOverlap::Absent, TensorOverlap::Chunked];

fn model(name: &str) -> Model {
    read_model(name, shipped_model(name).unwrap().text).unwrap()
}

fn adapted(name: &str) -> Model {
    let mut model = model(name);
    adapt(&mut model, &Lora { rank: 16, alpha: None, targets: Vec::new() }).unwrap();
    model
}

fn cases() -> Vec<Case> {
    let of =
        |title, model, layer, devices, axes| Case { title, model, layer, axes, devices, products: WHOLE };
    let in_chunks = |title, model, layer, devices, axes| Case {
        products: IN_CHUNKS,
        ..of(title, model, layer, devices, axes)
    };
    vec![
        of(
            "queries, keys and values of llama-3-8b: 8 KV heads",
            model("llama-3-8b"),
            "decoder",
            "4 inside",
            &[(4, INSIDE)],
        ),
        of("the same", model("llama-3-8b"), "decoder", "8 inside", &[(8, INSIDE)]),
        of(
            "the same, KV heads held twice",
            model("llama-3-8b"),
            "decoder",
            "2 x 8 inside",
            &[(2, INSIDE), (8, INSIDE)],
        ),
        of(
            "the same, KV heads held four times",
            model("llama-3-8b"),
            "decoder",
            "4 x 8 inside",
            &[(4, INSIDE), (8, INSIDE)],
        ),
        of("4 KV heads of qwen2.5-7b", model("qwen2.5-7b"), "decoder", "4 inside", &[(4, INSIDE)]),
        of("gate and up of mixtral-8x7b", model("mixtral-8x7b"), "moe", "8 experts", &[(8, EXPERTS)]),
        of("the same", model("mixtral-8x7b"), "moe", "8 data", &[(8, DATA)]),
        of("latent attention of deepseek-v3", model("deepseek-v3"), "dense", "8 inside", &[(8, INSIDE)]),
        of("the same", model("deepseek-v3"), "dense", "8 data", &[(8, DATA)]),
        of(
            "adapters of rank 16 beside llama-3-8b",
            adapted("llama-3-8b"),
            "decoder",
            "8 inside",
            &[(8, INSIDE)],
        ),
        of("the same", adapted("llama-3-8b"), "decoder", "8 data", &[(8, DATA)]),
        in_chunks("llama-3-8b, in chunks", model("llama-3-8b"), "decoder", "8 inside", &[(8, INSIDE)]),
        in_chunks(
            "the same, KV heads held twice",
            model("llama-3-8b"),
            "decoder",
            "2 x 8 inside",
            &[(2, INSIDE), (8, INSIDE)],
        ),
        in_chunks("deepseek-v3, in chunks", model("deepseek-v3"), "dense", "8 inside", &[(8, INSIDE)]),
        in_chunks("llama-3-8b, in chunks", model("llama-3-8b"), "decoder", "8 data", &[(8, DATA)]),
    ]
}

/// Least time of a form on a mesh; nothing where no strategy divides it.
fn least(layer: &Layer, axes: &[(u64, AxisRule)], tensor_overlap: TensorOverlap) -> Option<f64> {
    let cluster = read_cluster("dgx-h100", shipped_cluster("dgx-h100").unwrap().text).unwrap();
    let cluster = frontends::rescale(&cluster, frontends::Size::Nodes(4)).unwrap();
    let constants = Constants::load();
    let sizes: Vec<u64> = axes.iter().map(|axis| axis.0).collect();
    let mesh = Mesh::of_sizes(&sizes).unwrap();
    let machine = Machine { tensor_overlap, ..machine(&cluster, &constants, TokenOrder::Natural) };
    let rules: Vec<AxisRule> = axes.iter().map(|axis| axis.1).collect();
    let prices = Prices::new(machine, &mesh, &rules);
    let clock = Clock::after((8.0, 1.0), 32.0);
    let given = Given { storage: StorageRule::Optimizer, ..Given::default() };
    let problem = LayerProblem::new(layer, &layer.sizes(8, 4096), &prices, clock, &given)?.problem;
    let found = solve::solve(&problem, PLENTY)?;
    let time = found.solution.cost.time;
    assert!(time - found.bound <= ROUNDING * time, "no certificate: {found:?}");
    Some(time)
}

/// `mlp.gate+mlp.up, in chunks`.
fn name((form, products): (&Variant, TensorOverlap)) -> String {
    match products {
        TensorOverlap::Chunked => format!("{}, in chunks", form.name),
        TensorOverlap::Gradients | TensorOverlap::Absent => form.name.clone(),
    }
}

/// What one layer gains, as a row.
fn row(case: &Case) -> (String, [f64; 3]) {
    let kind = case.model.layers.iter().find(|layer| layer.name.contains(case.layer));
    let kind = kind.unwrap_or_else(|| panic!("{}: no layer `{}`", case.model.name, case.layer));
    let written: Vec<Variant> = variants(kind);
    let forms: Vec<(&Variant, TensorOverlap)> =
        case.products.iter().flat_map(|&products| written.iter().map(move |form| (form, products))).collect();
    let on = |axes: &[(u64, AxisRule)]| -> Vec<Option<f64>> {
        forms.iter().map(|(form, products)| least(&form.layer, axes, *products)).collect()
    };
    let (alone, times) = (on(&[]), on(case.axes));
    // Ties to the first: as it was read, products whole.
    let fastest = |times: &[Option<f64>]| {
        let legal = times.iter().enumerate().filter_map(|(at, time)| Some((at, (*time)?)));
        legal.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap()
    };
    let (first, (best, joint)) = (fastest(&alone).0, fastest(&times));
    let unwritten = times[0].unwrap();
    let form_first = times[first].unwrap_or(f64::INFINITY);
    let milliseconds = |time: f64| format!("{:.3} ms", time * 1e3);
    let gain = |time: f64| format!("{:.2} %", 100.0 * (time / joint - 1.0).max(0.0));
    let text = format!(
        "| {} | {} | {} | {} | {} | {} | {} | {} | {} |\n",
        case.title,
        case.devices,
        forms.len(),
        milliseconds(unwritten),
        milliseconds(form_first),
        milliseconds(joint),
        gain(unwritten),
        gain(form_first),
        name(forms[best]),
    );
    (text, [unwritten, form_first, joint])
}

#[test]
fn the_table_of_joint_choices_is_current() {
    let mut table = HEAD.to_owned();
    let mut all = Vec::new();
    for case in cases() {
        let (text, times) = row(&case);
        write!(table, "{text}").unwrap();
        all.push(times);
    }
    for [unwritten, form_first, joint] in &all {
        assert!(joint <= unwritten && joint <= form_first);
    }
    let over = |at: usize| all.iter().filter(|times| times[at] > times[2] * 1.001).count();
    assert!(over(0) >= 3 && over(1) >= 1, "{all:?}");
    hold_current("joint.md", &table);
}
