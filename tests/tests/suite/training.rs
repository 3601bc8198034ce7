//! Training of small copies, step by step beside one device, where the copy has more than layers that repeat: slices of
//! sequences, and routers whose choices rounding may decide.

use std::path::PathBuf;

use serde_json::Value;
use tests::planner;

/// Plans, trains a few steps, and holds the losses to those of one device.
#[track_caller]
fn assert_trained(name: &str, words: &[&str]) {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("training-{name}.json"));
    let file = path.to_string_lossy().into_owned();
    let found = planner(&[&["optimize"], words, &["-o", &file]].concat());
    assert_eq!(found.code, 0, "{found}");
    let trained = planner(&["run", &file, "--steps", "4", "--json"]);
    assert_eq!(trained.code, 0, "{trained}");
    let answer: Value = serde_json::from_str(&trained.out).expect("an answer in JSON");
    assert_eq!(answer["losses"].as_array().map(Vec::len), Some(4), "{trained}");
}

#[test]
fn slices_of_sequences_train_like_whole_sequences_on_one_device() {
    assert_trained("seq1f1b", &["llama-3-8b", "dgx-h100", "--pin", "pp=4,schedule=seq1f1b,slices=4"]);
    assert_trained(
        "terapipe",
        &["llama-3-8b", "dgx-h100", "--global-batch", "16", "--pin", "pp=4,schedule=terapipe,slices=2"],
    );
}

#[test]
fn latent_attention_and_routed_experts_train_like_one_device() {
    assert_trained("deepseek-v2", &["deepseek-v2", "dgx-h800", "--nodes", "16"]);
}
