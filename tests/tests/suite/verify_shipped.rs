//! More plans of real models, each shrunk, run with real numbers in f64, f32 and bf16, and held to one device and to
//! its prediction.
//!
//! The plans of `golden_plans` are run there. Here are the kinds of layer that those lack: tied and learned embeddings,
//! windows, soft caps, sinks, shared and one-headed keys, ALiBi, latent attention, and clusters of old devices.

use std::path::PathBuf;

use tests::planner;

/// Answers a question and verifies the plan.
#[track_caller]
fn assert_verified(name: &str, words: &[&str]) {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("verify-{name}.json"));
    let file = path.to_string_lossy().into_owned();
    let found = planner(&[&["optimize"], words, &["-o", &file]].concat());
    assert_eq!(found.code, 0, "{found}");
    let verified = planner(&["verify", &file, "--precision", "all"]);
    assert_eq!(verified.code, 0, "{verified}");
    assert!(verified.out.ends_with("verified\n") && !verified.out.contains("DIFFERENT"), "{verified}");
}

macro_rules! verified {
    ($($name:ident: $words:expr;)*) => {
        $(#[test]
        fn $name() {
            assert_verified(stringify!($name), &$words);
        })*
    };
}

verified! {
    gpt2_ties_its_embedding_to_its_head: ["gpt2", "dgx-h100", "--devices", "4"];
    gpt2_ties_across_stages: ["gpt2", "dgx-h100", "--devices", "4", "--pin", "pp=2"];
    gemma_2_has_windows_and_soft_caps: ["gemma-2-9b", "dgx-h100"];
    falcon_has_one_key_head: ["falcon-7b", "dgx-a100-40"];
    opt_has_learned_positions: ["opt-13b", "dgx1-v100", "--nodes", "4"];
    bloom_has_alibi: [
        "bloom-176b", "dgx-a100-80", "--nodes", "48", "--global-batch", "2048", "--seq-len", "2048"
    ];
    gpt_oss_has_sinks_and_experts: ["gpt-oss-20b", "dgx-h100", "--nodes", "2", "--pin", "pp=2"];
    deepseek_v2_has_latent_attention_and_shared_experts: [
        "deepseek-v2", "dgx-h800", "--nodes", "16", "--pin", "pp=8,ep=8"
    ];
    qwen_has_biases: ["qwen2.5-7b", "tpu-v5p", "--devices", "16"];
    phi_3_has_fused_products: ["phi-3-mini", "rtx4090-x8"];
}

#[test]
fn slopes_and_biases_that_are_data_fit_their_arena_in_single_precision() {
    for (name, words) in [
        ("alibi-f32", ["bloom-176b", "dgx-a100-80", "--pin", "pp=8,tp=8", "--nodes", "48"]),
        ("router-f32", ["deepseek-v3", "dgx-h800", "--pin", "pp=16,ep=8,tp=1", "--nodes", "32"]),
    ] {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("verify-{name}.json"));
        let file = path.to_string_lossy().into_owned();
        // Any plan with these degrees has them, so that nobody waits for the best.
        let batch = ["--global-batch", "2048", "--seq-len", "2048", "--work", "20", "-o", &file];
        let found = planner(&[&["optimize"], &words[..], &batch].concat());
        assert_eq!(found.code, 0, "{found}");
        let verified = planner(&["verify", &file, "--precision", "f32"]);
        assert_eq!(verified.code, 0, "{verified}");
    }
}
