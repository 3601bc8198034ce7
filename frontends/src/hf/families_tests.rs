//! Families of which no model is shipped, by what was published with their weights.

use ir::op::OpKind;
use serde_json::{Value, json};

use super::read_arch;
use crate::count::n_parameters;
use crate::document::Document;
use crate::graph_model::graph_of;
use crate::input_error::InputError;
use crate::model::read_model;

/// A configuration with the fields that count, and the learned elements of its checkpoint.
fn published() -> Vec<(&'static str, Value, u64)> {
    vec![
        ("gemma-2b", gemma(2048, [18, 8, 1], 16_384), 2_506_172_416),
        ("gemma-7b", gemma(3072, [28, 16, 16], 24_576), 8_537_680_896),
        ("gemma-3-1b", gemma3(), 999_885_952),
        ("glm-4-9b-0414", glm4(4096, [40, 32, 2], 13_696), 9_400_279_040),
        (
            "glm-4-32b-0414",
            changed(glm4(6144, [61, 48, 2], 23_040), "attention_bias", json!(false)),
            32_566_081_536,
        ),
        // 110,468,824,832 of its files, without the module that predicts ahead and the 45 x 128 corrections.
        ("glm-4.5-air", glm45_air(), 106_852_245_504),
        ("granite-3.0-8b", granite(), 8_170_848_256),
        ("seed-oss-36b", seed_oss(), 36_151_104_512),
        ("smollm3-3b", smollm3(), 3_075_098_624),
    ]
}

fn config(
    family: &str,
    (vocab, hidden): (u64, u64),
    [layers, heads, kv_heads]: [u64; 3],
    inner: u64,
    own: Value,
) -> Value {
    let mut all = json!({
        "model_type": family, "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner,
    });
    if let (Some(all), Value::Object(own)) = (all.as_object_mut(), own) {
        all.extend(own);
    }
    all
}

fn gemma(hidden: u64, counts: [u64; 3], inner: u64) -> Value {
    let own = json!({ "architectures": ["GemmaForCausalLM"], "head_dim": 256, "hidden_act": "gelu" });
    config("gemma", (256_000, hidden), counts, inner, own)
}

fn gemma3() -> Value {
    let own = json!({
        "architectures": ["Gemma3ForCausalLM"], "head_dim": 256, "sliding_window": 512,
        "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": null, "final_logit_softcapping": null,
    });
    config("gemma3_text", (262_144, 1152), [26, 4, 1], 6912, own)
}

fn glm4(hidden: u64, counts: [u64; 3], inner: u64) -> Value {
    let own = json!({
        "architectures": ["Glm4ForCausalLM"], "head_dim": 128, "attention_bias": true, "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    });
    config("glm4", (151_552, hidden), counts, inner, own)
}

fn glm45_air() -> Value {
    let own = json!({
        "architectures": ["Glm4MoeForCausalLM"], "head_dim": 128, "attention_bias": true, "use_qk_norm": false,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
        "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
    });
    config("glm4_moe", (151_552, 4096), [46, 96, 8], 10_944, own)
}

fn granite() -> Value {
    let own = json!({
        "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
        "logits_scaling": 16.0, "residual_multiplier": 0.22, "tie_word_embeddings": true,
    });
    config("granite", (49_155, 4096), [40, 32, 8], 12_800, own)
}

fn seed_oss() -> Value {
    let own = json!({
        "architectures": ["SeedOssForCausalLM"], "head_dim": 128, "attention_bias": true,
        "attention_out_bias": false, "mlp_bias": false,
    });
    config("seed_oss", (155_136, 5120), [64, 80, 8], 27_648, own)
}

fn smollm3() -> Value {
    let own = json!({ "architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 4 });
    config("smollm3", (128_256, 2048), [36, 16, 4], 11_008, own)
}

fn changed(mut config: Value, name: &str, value: Value) -> Value {
    config[name] = value;
    config
}

fn refused(config: &Value) -> InputError {
    read_model("model.json", &config.to_string()).unwrap_err()
}

#[test]
fn counts_are_the_published_ones() {
    for (name, config, published) in published() {
        let text = config.to_string();
        let arch = read_arch(&Document::parse(name, &text).unwrap()).unwrap();
        assert_eq!(n_parameters(&arch), u128::from(published), "{name}");
        assert_eq!(graph_of(&arch).n_parameters(), published, "{name}");
    }
}

/// Operators of a kind of layer.
fn ops(config: &Value, layer: &str) -> Vec<OpKind> {
    let model = read_model("model.json", &config.to_string()).unwrap();
    let layer = model.layers.into_iter().find(|one| one.name == layer).unwrap();
    layer.ops.into_iter().map(|op| op.kind).collect()
}

#[test]
fn gemma_3_rotates_by_another_base_where_it_sees_a_window() {
    let thetas = |config: &Value, layer: &str| -> Vec<f64> {
        let theta = |op| if let OpKind::Rope { theta, .. } = op { Some(theta) } else { None };
        ops(config, layer).into_iter().filter_map(theta).collect()
    };
    let windows = |op: &OpKind| matches!(op, OpKind::Attention { window: Some(512), .. });
    assert_eq!(thetas(&gemma3(), "sliding"), [1e4; 2]);
    assert_eq!(thetas(&gemma3(), "full"), [1e6; 2]);
    assert!(ops(&gemma3(), "sliding").iter().any(windows) && !ops(&gemma3(), "full").iter().any(windows));
    // Newer files say so by type.
    let by_type =
        json!({ "full_attention": { "rope_theta": 5e5 }, "sliding_attention": { "rope_theta": 2e4 } });
    let newer = changed(gemma3(), "rope_parameters", by_type);
    assert_eq!((thetas(&newer, "sliding")[0], thetas(&newer, "full")[0]), (2e4, 5e5));
    // Five of six layers see a window: of 26 the sixth, twelfth, eighteenth and twenty-fourth do not.
    let model = read_model("model.json", &gemma3().to_string()).unwrap();
    let full = model.layers.iter().position(|layer| layer.name == "full").unwrap();
    assert_eq!(model.sequence.iter().filter(|run| run.layer == full).count(), 4);
}

#[test]
fn granite_has_its_factors() {
    let scales = |layer: &str| -> Vec<f64> {
        let by = |op| if let OpKind::Scale { by } = op { Some(by) } else { None };
        ops(&granite(), layer).into_iter().filter_map(by).collect()
    };
    assert_eq!(scales("embedding"), [12.0]);
    assert_eq!(scales("decoder"), [0.22; 2]);
    assert_eq!(scales("head"), [1.0 / 16.0]);
    let is_scaled = |op: &OpKind| matches!(op, OpKind::Attention { scale: Some(by), .. } if *by == 0.0078125);
    assert!(ops(&granite(), "decoder").iter().any(is_scaled));
}

#[test]
fn every_fourth_layer_of_smollm3_rotates_nothing() {
    let rotates = |layer: &str| ops(&smollm3(), layer).iter().any(|op| matches!(op, OpKind::Rope { .. }));
    assert!(rotates("rotary") && !rotates("unrotated"));
    let model = read_model("model.json", &smollm3().to_string()).unwrap();
    let rests: Vec<u64> = model.sequence.iter().skip(1).step_by(2).map(|run| run.count).take(9).collect();
    assert_eq!(rests, [3; 9]);
    let short = changed(smollm3(), "no_rope_layers", json!([1, 1, 1, 0]));
    assert!(refused(&short).to_string().contains("no_rope_layers: 4 entries for 36 layers"));
}

#[test]
fn what_a_family_must_say_is_asked_for() {
    for (config, field) in [
        (gemma3(), "head_dim"),
        (glm4(4096, [40, 32, 2], 13_696), "num_key_value_heads"),
        (glm45_air(), "first_k_dense_replace"),
        (glm45_air(), "n_shared_experts"),
    ] {
        let mut config = config;
        config.as_object_mut().unwrap().remove(field);
        let fault = refused(&config).to_string();
        assert!(fault.contains(&format!("`{field}` is missing")), "{fault}");
    }
    let two_ways = changed(gemma3(), "use_bidirectional_attention", json!(true));
    assert!(refused(&two_ways).to_string().contains("use_bidirectional_attention"), "{}", refused(&two_ways));
    let sees = changed(gemma(2048, [18, 8, 1], 16_384), "attn_logit_softcapping", json!(50.0));
    assert!(refused(&sees).to_string().contains("attn_logit_softcapping"), "{}", refused(&sees));
}
