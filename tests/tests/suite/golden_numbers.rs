//! The one device that judges every plan, itself judged: losses, gradients and AdamW steps of four tiny models against
//! numbers that PyTorch computed once in double precision (`fixtures/golden/make.py` says how).
//!
//! Models come in by their Hugging Face configurations, so the front end's graphs are held to the same numbers. The
//! script and this test share a rule for weights and tokens, and no arithmetic.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use executor::job::{AdamW, Execution, Reference, TokenLayout};
use executor::run::{Outcome, Tensors, run};
use frontends::mtp::predict_ahead;
use frontends::read_model;
use ir::graph::Model;
use ir::mesh::{Mesh, Meshes};
use ir::op::OpKind;
use ndarray::{ArrayD, IxDyn};
use serde_json::Value;

/// Of what is compared, against the larger of its own size and a thousandth of the largest of its kind.
const TOLERANCE: f64 = 1e-9;

/// Number of a name: 32-bit FNV-1a.
fn fnv1a(text: &str) -> u32 {
    text.bytes().fold(2_166_136_261, |state, byte| (state ^ u32::from(byte)).wrapping_mul(16_777_619))
}

/// Numbers in [-1, 1) that belong to a name.
fn uniform(text: &str, shape: &[usize]) -> ArrayD<f64> {
    let mut x = fnv1a(text);
    ArrayD::from_shape_simple_fn(IxDyn(shape), || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(x) / f64::from(1_u32 << 31) - 1.0
    })
}

/// Every parameter of every layer, by the rule of the script.
fn weights(model: &Model) -> Tensors {
    let mut all = Tensors::new();
    for (layer_idx, kind) in model.kinds_in_order().into_iter().enumerate() {
        let layer = &model.layers[kind];
        for tensor in layer.parameters() {
            let name = &layer.tensors[tensor.0].name;
            let shape: Vec<usize> =
                layer.shape(tensor, &layer.sizes(0, 0)).into_iter().map(|n| n as usize).collect();
            let (base, size) = match name {
                name if name.ends_with("norm.weight") => (1.0, 0.2),
                name if name.ends_with(".bias") => (0.0, 0.2),
                _ => (0.0, 0.5),
            };
            // A tied head is the embedding's table, and so is that of a module that predicts ahead.
            let tie = model.ties.iter().find(|tie| tie.copy.layer == kind && tie.copy.tensor == tensor);
            let place = tie.map_or(format!("{layer_idx}/{name}"), |_| "0/table".into());
            all.insert((layer_idx, name.clone()), uniform(&place, &shape).mapv(|u| base + size * u));
        }
    }
    all
}

fn model(name: &str) -> Model {
    let file = format!("../fixtures/golden/{name}.config.json");
    #[expect(clippy::disallowed_methods, reason = "a test of files")]
    let text = std::fs::read_to_string(&file).unwrap();
    let mut model = read_model(&file, &text).unwrap_or_else(|error| panic!("{error}"));
    if name == "mtp" {
        predict_ahead(&mut model, 2).unwrap();
    }
    // Every token counts in the golden losses: the loss does not read labels that leave some out.
    for op in model.layers.iter_mut().flat_map(|layer| &mut layer.ops).filter(|op| op.kind == OpKind::SumLoss)
    {
        op.operands.truncate(1);
    }
    model
}

fn golden(name: &str) -> Value {
    #[expect(clippy::disallowed_methods, reason = "a test of files")]
    let text = std::fs::read_to_string(format!("../fixtures/golden/{name}.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The run on one device.
fn outcome(model: &Model, golden: &Value) -> Outcome {
    let count = |key: &str| golden[key].as_u64().unwrap();
    let setting = |key: &str| golden["adamw"][key].as_f64().unwrap();
    let mesh = Mesh { axes: Vec::new() };
    let question = Execution {
        model,
        meshes: Meshes::all(&mesh),
        n_stages: 1,
        placement: ir::schedule::Placement::Looped { virtual_stages: 1 },
        chunks: Vec::new(),
        choices: Vec::new(),
        micro_batch: count("micro_batch"),
        n_micro_batches: count("n_micro_batches") as u32,
        shares: Vec::new(),
        sequence: count("sequence"),
        tokens: TokenLayout::NATURAL,
        slices: ir::slices::Slices::whole(count("sequence")),
        table: Vec::new(),
        seed: count("seed"),
        given: weights(model),
        steps: golden["steps"].as_array().unwrap().len() as u32,
        optimizer: AdamW {
            lr: setting("lr"),
            beta1: setting("beta1"),
            beta2: setting("beta2"),
            eps: setting("eps"),
            weight_decay: setting("weight_decay"),
        },
        edges: executor::element::Edges::Exact,
        training: executor::job::Training::CHECK,
    };
    let alone = Reference::of(&question);
    run::<f64>(&alone.execution(&question), &|_, _| 0).unwrap_or_else(|error| panic!("{error}"))
}

/// Norm and weighted sum of every tensor against the golden ones; every tensor on either side has a partner.
#[track_caller]
fn assert_equal(found: &Tensors, expected: &Value, model: &Model, what: &str) {
    let expected = expected.as_object().unwrap();
    let largest = expected.values().map(|one| one["norm"].as_f64().unwrap()).fold(0.0, f64::max);
    let mut n_compared = 0;
    for ((layer_idx, name), tensor) in found {
        let place = format!("{layer_idx}/{name}");
        let Some(golden) = expected.get(&place) else {
            let is_tied = model.ties.iter().any(|tie| {
                let copy = &model.layers[tie.copy.layer];
                model.kinds_in_order()[*layer_idx] == tie.copy.layer
                    && copy.tensors[tie.copy.tensor.0].name == *name
            });
            assert!(is_tied, "{what}: no golden {place}");
            continue;
        };
        let (norm, weighted) = (golden["norm"].as_f64().unwrap(), golden["weighted"].as_f64().unwrap());
        let allowed = TOLERANCE * norm.max(1e-3 * largest);
        let own = tensor.iter().map(|x| x * x).sum::<f64>().sqrt();
        assert!((own - norm).abs() <= allowed, "{what} {place}: norm {own}, expected {norm}");
        let own = (tensor * &uniform(&format!("check/{place}"), tensor.shape())).sum();
        assert!((own - weighted).abs() <= allowed, "{what} {place}: weighted sum {own}, expected {weighted}");
        n_compared += 1;
    }
    assert_eq!(n_compared, expected.len(), "{what}");
}

#[track_caller]
fn assert_golden(name: &str) {
    let (model, golden) = (model(name), golden(name));
    let outcome = outcome(&model, &golden);
    for (i, step) in golden["steps"].as_array().unwrap().iter().enumerate() {
        let loss = step["loss"].as_f64().unwrap();
        assert!((outcome.losses[i] - loss).abs() <= TOLERANCE * loss, "{} {loss}", outcome.losses[i]);
        assert_equal(&outcome.gradients[i], &step["gradients"], &model, &format!("gradient of step {i}"));
        assert_equal(&outcome.parameters[i], &step["parameters"], &model, &format!("parameter of step {i}"));
    }
    assert_eq!(outcome.losses.len(), 3);
}

#[test]
fn a_llama_trains_as_in_pytorch() {
    assert_golden("llama");
}

#[test]
fn a_gpt_trains_as_in_pytorch() {
    assert_golden("gpt");
}

#[test]
fn a_mixture_of_experts_trains_as_in_pytorch() {
    assert_golden("moe");
}

#[test]
fn modules_for_multi_token_prediction_train_as_in_pytorch() {
    assert_golden("mtp");
}

#[test]
fn numbers_belong_to_names() {
    // By hand: x1 = 1664525 * fnv1a("") + 1013904223 modulo 2^32.
    assert_eq!(fnv1a(""), 0x811c_9dc5);
    assert_eq!(fnv1a("a"), 0xe40c_292c);
    let x1 = (1_664_525_u64 * 0x811c_9dc5 + 1_013_904_223) % (1 << 32);
    assert_eq!(uniform("", &[1])[0], x1 as f64 / f64::from(1_u32 << 31) - 1.0);
}
