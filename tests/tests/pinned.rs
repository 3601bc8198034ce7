//! What a pin finds the free search finds too: where memory is tight, and prices of it alone do not lead there.

use tests::{done, json, number};

/// Seconds of a step of the plan that is found.
#[track_caller]
fn time(question: &[&str], pins: &[&str]) -> f64 {
    let plan = json(&[&["optimize"], question, pins].concat());
    number(&plan["predicted"]["step_time_s"])
}

#[test]
fn a_tensor_degree_by_name_finds_no_faster_plan() {
    let small = ["megatron-1.7b", "rtx4090-x8", "--devices", "4", "--global-batch", "2"];
    let tiers = ["megatron-7.5b", "frontier", "--devices", "16", "--global-batch", "36"];
    for question in [small, tiers] {
        let found = time(&question, &[]) / time(&question, &["--pin", "tp=2"]);
        assert!(found < 1.0005, "{question:?} takes {found} of what tp=2 takes");
    }
}

#[test]
fn recomputation_by_name_finds_no_faster_plan() {
    // Scores in memory: what attention needs while it runs is more than a layer keeps.
    let question = ["mistral-7b", "tpu-v4", "--devices", "8", "--global-batch", "24", "--attention", "eager"];
    let named = time(&question, &["--pin", "pp=2,recompute=selective"]);
    let found = time(&question, &["--pin", "pp=2"]) / named;
    assert!(found < 1.005, "takes {found} of what recompute=selective takes");
}

#[test]
fn a_plan_says_how_much_other_choices_could_gain() {
    let said = done(&["optimize", "llama-3-8b", "dgx-h100", "--devices", "2", "--pin", "pp=1"]).out;
    let least = said.split("could come to ").nth(1).and_then(|rest| rest.split(' ').next());
    let least: f64 = least.and_then(|number| number.parse().ok()).unwrap_or(1.0);
    assert!(least > 0.87, "0.849 where memory is free: {said}");
}
