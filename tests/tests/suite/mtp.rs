//! Multi-token prediction from the command line: modules behind the decoder are planned, proven and verified wherever
//! their parts stand, and what they take is counted.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own output has failed")]

use std::path::PathBuf;

use serde_json::Value;
use tests::{Transcript, planner};

/// A model like DeepSeek-V3, of few and narrow layers.
const SMALL: &str = r#"{
    "model_type": "deepseek_v3", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 5,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4096, "max_position_embeddings": 2048,
    "moe_intermediate_size": 256, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"
}"#;

fn scratch(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    path.to_string_lossy().into_owned()
}

#[expect(clippy::disallowed_methods, reason = "a test of files")]
fn small() -> String {
    let file = scratch("mtp-small.json");
    std::fs::write(&file, SMALL).unwrap();
    file
}

#[expect(clippy::disallowed_methods, reason = "a test of files")]
fn read(file: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// Answers a question and verifies the plan; what the search said, and the plan.
#[track_caller]
fn found_and_verified(name: &str, words: &[&str]) -> (Transcript, Value) {
    let file = scratch(&format!("mtp-{name}.json"));
    let found = planner(&[&["optimize"], words, &["-o", &file]].concat());
    assert_eq!(found.code, 0, "{found}");
    assert!(found.out.contains("programs are proven equal"), "{found}");
    let verified = planner(&["verify", &file]);
    assert_eq!(verified.code, 0, "{verified}");
    assert!(verified.out.ends_with("verified\n") && !verified.out.contains("DIFFERENT"), "{verified}");
    (found, read(&file))
}

#[test]
fn a_module_runs_under_every_parallelism() {
    let model = small();
    let pins = [
        ("alone", "dp=8,zero=1"),
        ("stages", "pp=4,zero=1"),
        ("tensor", "tp=2,sequence-parallel=on,pp=2,zero=3"),
        ("context", "cp=2,cp-kind=ring,pp=2"),
        ("experts", "ep=4,zero=1,pp=2"),
        ("virtual", "pp=2,vpp=2,ep=2,zero=1"),
    ];
    for (name, pin) in pins {
        let job = ["--devices", "8", "--global-batch", "64", "--mtp", "1", "--pin", pin];
        found_and_verified(name, &[&[model.as_str(), "dgx-h100"], &job[..]].concat());
    }
}

#[test]
fn deepseek_v3_with_its_module_is_planned_on_2048_devices() {
    let question = ["deepseek-v3", "dgx-h100", "--devices", "2048", "--mtp", "1", "--pin", "pp=16,ep=64"];
    let (found, _) = found_and_verified("v3", &question);
    assert!(found.out.contains("deepseek-v3, 683 B parameters"), "{found}");
}

/// A second tied copy of the table: the head of a tied model is one already. And a second module behind the first.
#[test]
fn two_modules_of_a_tied_model_share_its_table() {
    let job = ["--devices", "4", "--global-batch", "16", "--seq-len", "1024", "--mtp", "2", "--pin"];
    for (name, pin) in [("tied-stages", "pp=4,zero=1"), ("tied-tensor", "tp=2,pp=2,zero=3")] {
        found_and_verified(name, &[&["qwen3-8b", "dgx-h100"], &job[..], &[pin]].concat());
    }
}

#[test]
fn the_scores_of_the_module_and_its_work_are_counted() {
    let model = small();
    let figures = |modules: &[&str]| {
        let file = scratch(&format!("mtp-counted-{}.json", modules.len()));
        let job = ["--devices", "1", "--global-batch", "8", "--pin", "micro-batch=1,recompute=none"];
        let found = planner(&[&["optimize", &model, "dgx-h100"], &job[..], modules, &["-o", &file]].concat());
        assert_eq!(found.code, 0, "{found}");
        let predicted = read(&file)["predicted"].clone();
        let memory = |name: &str| predicted["stages"][0]["memory"][name].as_f64().unwrap();
        let step = predicted["step_time_s"].as_f64().unwrap();
        (step * predicted["mfu"].as_f64().unwrap(), memory("activations: logits"), memory("logits"))
    };
    let (without, with) = (figures(&[]), figures(&["--mtp", "1"]));
    // What is kept of the scores of both; the peak of the loss beyond it is that of one at a time.
    assert_eq!((with.1, with.2), (2.0 * without.1, without.2));
    // Products by their weights: a layer of experts, the projection and the head, over those of the model.
    let (h, heads, tokens) = (512.0, 8.0, 2048.0);
    let attention = h * 96.0 + 96.0 * heads * 96.0 + h * 96.0 + 64.0 * heads * 128.0 + heads * 64.0 * h;
    let scores = heads * (96.0 + 64.0) * tokens;
    let moe = attention + scores + h * 8.0 + 3.0 * 3.0 * h * 256.0;
    let (dense, head) = (attention + scores + 3.0 * h * 1024.0, h * 4096.0);
    let expected = (moe + 2.0 * h * h + head) / (dense + 4.0 * moe + head);
    let found = with.0 / without.0 - 1.0;
    assert!((found - expected).abs() < 1e-9, "{found} {expected}");
}

#[test]
fn a_model_in_the_native_form_keeps_its_modules() {
    let model = small();
    let native = planner(&["models", &model, "--mtp", "1", "--native"]);
    assert_eq!(native.code, 0, "{native}");
    let file = scratch("mtp-native-model.json");
    #[expect(clippy::disallowed_methods, reason = "a test of files")]
    std::fs::write(&file, &native.out).unwrap();
    let again = planner(&["models", &file, "--native"]);
    assert_eq!((again.code, &again.out), (0, &native.out), "{again}");
    found_and_verified(
        "native",
        &[&file, "dgx-h100", "--devices", "4", "--global-batch", "16", "--pin", "pp=2"],
    );
}

#[test]
fn what_cannot_be_shared_is_named() {
    let found = planner(&["models", "gpt2", "--mtp", "1"]);
    assert_eq!(found.code, 2, "{found}");
    assert!(found.err.contains("--mtp: `add_position` of layer `embedding` is add-position"), "{found}");
    let question =
        ["optimize", "llama-3-8b", "dgx-h100", "--global-batch", "8", "--seq-len", "3", "--mtp", "3"];
    let found = planner(&question);
    assert_eq!(found.code, 2, "{found}");
    assert!(found.err.contains("module 3 has no token to predict in a sequence of 3 tokens"), "{found}");
}
