//! Adapters from the command line: found, proven, verified; frozen weights change what fits and what is kept.

use std::path::PathBuf;

use tests::{Transcript, planner};

/// Answers a question and verifies the plan; what the search said.
#[track_caller]
fn found_and_verified(name: &str, words: &[&str]) -> Transcript {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("lora-{name}.json"));
    let file = path.to_string_lossy().into_owned();
    let found = planner(&[&["optimize"], words, &["-o", &file]].concat());
    assert_eq!(found.code, 0, "{found}");
    assert!(found.out.contains("programs are proven equal"), "{found}");
    let verified = planner(&["verify", &file, "--precision", "both"]);
    assert_eq!(verified.code, 0, "{verified}");
    assert!(verified.out.ends_with("verified\n") && !verified.out.contains("DIFFERENT"), "{verified}");
    found
}

#[test]
fn llama_3_8b_learns_42_million_parameters_on_one_node() {
    let found = found_and_verified("8b", &["llama-3-8b", "dgx-h100", "--lora", "16"]);
    assert!(found.out.contains("8.07 B parameters, 41.9 M of them trained"), "{found}");
}

#[test]
fn llama_3_70b_fits_one_node_only_with_adapters() {
    let whole = planner(&["estimate", "llama-3-70b", "dgx-h100", "--tp", "8"]);
    assert_eq!(whole.code, 3, "{whole}");
    found_and_verified("70b", &["llama-3-70b", "dgx-h100", "--lora", "16"]);
}

#[test]
fn adapters_run_beside_tensor_expert_and_pipeline_parallel_products() {
    let tensor = ["--pin", "tp=4,pp=2,zero=1", "--lora-alpha", "32"];
    found_and_verified("tp", &[&["llama-3-8b", "dgx-h100", "--lora", "16"], &tensor[..]].concat());
    let experts = ["--pin", "ep=8", "--lora-targets", "attention,down_proj"];
    found_and_verified("ep", &[&["mixtral-8x7b", "dgx-h100", "--lora", "8"], &experts[..]].concat());
    let tied = ["--pin", "pp=2,zero=3"];
    found_and_verified("tied", &[&["gpt2", "dgx-h100", "--devices", "4", "--lora", "4"], &tied[..]].concat());
}

#[test]
fn a_target_that_is_no_product_is_named() {
    let found = planner(&["models", "gpt2", "--lora", "4", "--lora-targets", "query"]);
    assert_eq!(found.code, 2, "{found}");
    assert!(found.err.contains("no product is called `query`: the model has attention.k"), "{found}");
}
