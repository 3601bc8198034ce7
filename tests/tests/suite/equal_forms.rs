//! Equal forms of layers of shipped models, run: the same loss and the same gradients in double precision, with the
//! weights of the original side by side in the fused ones.
//!
//! Models are the shipped ones with small numbers in place of their large ones; every operator stays.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use std::collections::BTreeSet;

use executor::job::{AdamW, Execution, Reference, TokenLayout};
use executor::run::{Outcome, Tensors, run};
use frontends::{read_model, shipped_model};
use ir::graph::{Layer, Model, TensorId};
use ir::mesh::{Mesh, Meshes};
use ir::schedule::Placement;
use ndarray::{ArrayD, Axis, IxDyn};
use planner::rewrite::{Variant, variants};
use serde_json::{Value, json};

/// Rounding of sums of a few dozen terms of size one.
const TOLERANCE: f64 = 1e-11;

/// A shipped model with some of its numbers replaced.
fn small(name: &str, numbers: &Value) -> Model {
    let mut config: Value = serde_json::from_str(shipped_model(name).unwrap().text).unwrap();
    for (key, value) in numbers.as_object().unwrap() {
        assert!(config.get(key).is_some(), "{name} has no {key}");
        config[key] = value.clone();
    }
    read_model(name, &config.to_string()).unwrap()
}

/// Two steps on one device.
fn outcome(model: &Model, given: Tensors) -> Outcome {
    let mesh = Mesh { axes: Vec::new() };
    let base = Execution {
        model,
        meshes: Meshes::all(&mesh),
        n_stages: 1,
        placement: Placement::Looped { virtual_stages: 1 },
        chunks: Vec::new(),
        choices: Vec::new(),
        micro_batch: 2,
        n_micro_batches: 2,
        shares: Vec::new(),
        sequence: 8,
        tokens: TokenLayout::NATURAL,
        slices: ir::slices::Slices::whole(8),
        table: Vec::new(),
        seed: 11,
        given,
        steps: 1,
        optimizer: AdamW { lr: 1e-2, eps: 1e-3, beta1: 0.9, beta2: 0.95, weight_decay: 0.1 },
        edges: executor::element::Edges::Exact,
        training: executor::job::Training::CHECK,
    };
    run::<f64>(&Reference::of(&base).execution(&base), &|_, _| 0).unwrap()
}

fn shape(layer: &Layer, tensor: TensorId) -> Vec<usize> {
    layer.shape(tensor, &layer.sizes(0, 0)).into_iter().map(|n| n as usize).collect()
}

/// Numbers for every parameter of a layer, as large as what they are summed with.
fn numbers(layer: &Layer, layer_idx: usize) -> Tensors {
    let mut state = 1_u64;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1_u64 << 24) as f64 - 0.5
    };
    let one = |tensor: TensorId| {
        let values = ArrayD::from_shape_simple_fn(IxDyn(&shape(layer, tensor)), &mut draw);
        ((layer_idx, layer.tensors[tensor.0].name.clone()), values)
    };
    layer.parameters().map(one).collect()
}

/// Tensors named for a layer as those of its variant: fused ones hold theirs side by side.
fn moved(layer: &Layer, variant: &Variant, layer_idx: usize, from: &Tensors) -> Tensors {
    let of = |tensor: TensorId| from[&(layer_idx, layer.tensors[tensor.0].name.clone())].clone();
    let name = |tensor: TensorId| (layer_idx, variant.layer.tensors[tensor.0].name.clone());
    let mut list: Tensors = variant.kept.iter().map(|&(old, new)| (name(new), of(old))).collect();
    for fused in &variant.fused {
        let ndim = variant.layer.tensors[fused.tensor.0].dims.len();
        let along = Axis(fused.dim);
        let parts: Vec<ArrayD<f64>> = fused
            .parts
            .iter()
            .map(|part| of(part.tensor))
            .map(|part| if part.ndim() < ndim { part.insert_axis(along) } else { part })
            .collect();
        let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
        list.insert(name(fused.tensor), ndarray::concatenate(along, &views).unwrap());
    }
    list
}

/// Runs a model with every form of every layer kind in turn; gives the names of the forms.
fn check_forms(model: &Model) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let kinds = model.kinds_in_order();
    for (kind, layer) in model.layers.iter().enumerate() {
        let Some(layer_idx) = kinds.iter().position(|&k| k == kind) else { continue };
        let others = |key: &(usize, String)| kinds[key.0] != kind;
        let given = numbers(layer, layer_idx);
        let plain = outcome(model, given.clone());
        for variant in variants(layer).into_iter().skip(1) {
            let what = format!("{} {}: {}", model.name, layer.name, variant.name);
            let mut changed = model.clone();
            changed.layers[kind] = variant.layer.clone();
            let fused = outcome(&changed, moved(layer, &variant, layer_idx, &given));
            let apart = (plain.losses[0] - fused.losses[0]).abs();
            assert!(apart <= TOLERANCE * plain.losses[0].abs(), "{what}: losses {apart:e} apart");
            let mut expected = moved(layer, &variant, layer_idx, &plain.gradients[0]);
            expected.extend(plain.gradients[0].clone().into_iter().filter(|(key, _)| others(key)));
            assert!(expected.keys().eq(fused.gradients[0].keys()), "{what}");
            let largest = |all: &Tensors| all.values().flatten().fold(0.0_f64, |most, x| most.max(x.abs()));
            let scale = largest(&expected);
            assert!(scale > 1e-3, "{what}: gradients vanish");
            for (key, gradient) in &fused.gradients[0] {
                let apart = (gradient - &expected[key]).iter().fold(0.0_f64, |most, x| most.max(x.abs()));
                assert!(apart <= TOLERANCE * scale, "{what}: gradients of {} are {apart:e} apart", key.1);
            }
            names.insert(variant.name);
        }
    }
    names
}

#[test]
fn forms_of_llama_compute_the_same() {
    let numbers = json!({
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 24
    });
    let names = check_forms(&small("llama-3-8b", &numbers));
    assert!(names.contains("attention.q+attention.k+attention.v mlp.gate+mlp.up"), "{names:?}");
}

#[test]
fn forms_of_one_head_per_group_compute_the_same() {
    let numbers = json!({
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 24
    });
    assert!(check_forms(&small("llama-3-8b", &numbers)).contains("attention.q+attention.k+attention.v"));
}

#[test]
fn forms_of_qwen_with_its_biases_compute_the_same() {
    let numbers = json!({
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 24
    });
    assert!(check_forms(&small("qwen2.5-7b", &numbers)).contains("attention.q+attention.k+attention.v"));
}

#[test]
fn forms_of_gpt2_compute_the_same() {
    let numbers =
        json!({ "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16, "n_ctx": 16, "vocab_size": 24 });
    assert!(check_forms(&small("gpt2", &numbers)).contains("attention.q+attention.k+attention.v"));
}

#[test]
fn forms_of_mixtral_compute_the_same() {
    let numbers = json!({
        "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 24, "num_local_experts": 4
    });
    let names = check_forms(&small("mixtral-8x7b", &numbers));
    assert!(names.contains("attention.q+attention.k+attention.v mlp.gate+mlp.up"), "{names:?}");
}

#[test]
fn forms_of_deepseek_compute_the_same() {
    let numbers = json!({
        "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 24
    });
    let names = check_forms(&small("deepseek-v3", &numbers));
    let all = "attention.q_down+attention.kv_down attention.k+attention.v mlp.gate+mlp.up mlp.shared_gate+mlp.shared_up";
    assert!(names.contains(all), "{names:?}");
}
