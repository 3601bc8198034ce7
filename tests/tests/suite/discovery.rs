//! What whole plans turn out to be in the literature's words, with nothing named in the question.
//!
//! Layers by themselves are looked at beside the search (`planner/src/discovery_tests.rs`).

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use ir::names::{Roles, Zero};
use ir::plan::Plan;
use tests::planner;

/// Roles of the fastest plan.
#[track_caller]
fn roles(words: &[&str]) -> Roles {
    let said = planner(&[&["optimize"], words, &["--json"]].concat());
    assert_eq!(said.code, 0, "{said}");
    let plan: Plan = serde_json::from_str(&said.out).unwrap();
    plan.roles
}

#[test]
fn a_small_model_and_many_sequences_are_data_parallel() {
    let found = roles(&["gpt2", "dgx-h100"]);
    assert_eq!((found.dp, found.tp, found.cp, found.pp), (8, 1, 1, 1), "{found}");
    assert_eq!(found.zero, Zero { stage: 1, hybrid: None });
}

#[test]
fn one_short_sequence_is_tensor_parallel() {
    // Among schedules that run backward at once: a pipeline that splits it is a twentieth faster.
    let whole = ["--pin", "schedule=1f1b"];
    let job = ["megatron-1.7b", "dgx-a100-80", "--seq-len", "1024", "--global-batch", "1"];
    let found = roles(&[&job[..], &whole].concat());
    assert_eq!((found.dp, found.tp, found.cp, found.pp), (1, 8, 1, 1), "{found}");
    assert_eq!(found.vocabulary_parallel, 8, "{found}");
}

#[test]
fn one_long_sequence_is_context_parallel() {
    let found = roles(&["llama-2-7b", "dgx-h200", "--seq-len", "131072", "--global-batch", "1"]);
    assert_eq!((found.dp, found.tp, found.cp, found.pp), (1, 1, 8, 1), "{found}");
    assert!(found.context.is_some(), "{found}");
}

#[test]
fn experts_are_expert_parallel() {
    let found = roles(&["mixtral-8x7b", "dgx-h100", "--nodes", "8"]);
    assert!(found.ep > 1 && found.etp == 1, "{found}");
}

#[test]
fn a_model_too_large_for_a_node_is_cut_into_stages() {
    let found = roles(&["bloom-176b", "dgx-a100-80", "--nodes", "8"]);
    assert!(found.pp > 1, "{found}");
}
