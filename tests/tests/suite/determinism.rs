//! Same question, same bytes: the plan document does not depend on threads, nor on what ran before.

use tests::planner;

/// The plan of a question, as written.
fn plan(words: &[&str], threads: &str) -> String {
    let said = planner(&[&["optimize"], words, &["--json", "--threads", threads]].concat());
    assert_eq!(said.code, 0, "{said}");
    said.out
}

#[track_caller]
fn assert_same_with_any_threads(words: &[&str]) {
    let one = plan(words, "1");
    assert!(one.len() > 1000, "{one}");
    assert!(one == plan(words, "2"), "two threads give another plan");
    assert!(one == plan(words, "1"), "the second run gives another plan");
}

#[test]
fn a_dense_model_has_one_plan_with_any_number_of_threads() {
    assert_same_with_any_threads(&["llama-3-8b", "dgx-h100"]);
}

#[test]
fn a_model_with_experts_has_one_plan_with_any_number_of_threads() {
    let pins = "split-backward=none";
    assert_same_with_any_threads(&["gpt-oss-20b", "dgx-h100", "--global-batch", "16", "--pin", pins]);
}
