//! What a step sends once and waits for: tables of two uses, blends of layers, and what is said of both.
//!
//! With one micro-batch on PCIe gradients and parameters take as long as the compute that they hide behind.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use serde_json::Value;
use tests::{done, json, scratch};

const GPT2: &[&str] = &["gpt2", "rtx4090-x8", "--devices", "6", "--global-batch", "12"];
const GPT2_XL: &[&str] = &["gpt2-xl", "rtx4090-x8", "--devices", "6", "--global-batch", "12"];

fn plan(question: &[&str], pins: &str) -> Value {
    let pins: &[&str] = if pins.is_empty() { &[] } else { &["--pin", pins] };
    json(&[&["optimize"], question, pins].concat())
}

fn time(plan: &Value) -> f64 {
    plan["predicted"]["step_time_s"].as_f64().unwrap()
}

fn bound(plan: &Value) -> f64 {
    plan["search"]["lower_bound_s"].as_f64().unwrap()
}

/// A table that is cut over the vocabulary costs the head more and spares the step its reduction: both sides are
/// weighed together, whatever is said of how it is stored.
#[test]
fn a_tied_table_is_used_as_suits_both_of_its_sides() {
    let [by_degree, by_stage] = ["dp=6", "dp=6,zero=1"].map(|pins| plan(GPT2, pins));
    assert_eq!(by_degree["roles"]["zero"]["stage"], 1, "{}", by_degree["roles"]);
    // Blended layers may mix stages: a fortieth is theirs. With the head alone asked it was a quarter.
    assert!(time(&by_stage) < 1.025 * time(&by_degree), "{} {}", time(&by_stage), time(&by_degree));
    assert!(by_stage["roles"]["vocabulary_parallel"].as_u64() > Some(1), "{}", by_stage["roles"]);
}

/// Whoever pins what the fastest has is told of nothing faster, and nothing that is found undercuts what is said of
/// all.
#[test]
fn no_pin_finds_what_is_faster_than_without_or_than_the_bound() {
    for (question, pins) in [(GPT2, ["dp=6", "pp=1", "zero=1"]), (GPT2_XL, ["pp=1", "pp=1,dp=3", "dp=6"])] {
        let free = plan(question, "");
        for pin in pins {
            let pinned = plan(question, pin);
            assert!(time(&free) < 1.005 * time(&pinned), "{pin}: {} {}", time(&free), time(&pinned));
            assert!(bound(&free) < time(&pinned), "{pin}: {} {}", bound(&free), time(&pinned));
            assert!(bound(&pinned) <= time(&pinned), "{pin}: {}", pinned["search"]);
        }
    }
}

/// Layers of one kind with two choices, some of which send less once: the step takes less than with either for all, and
/// runs.
#[test]
fn a_blend_of_layers_is_run_as_it_is_planned() {
    let blended = plan(GPT2, "pp=1");
    let of_decoder = |entry: &&Value| entry["layer"] == "decoder";
    let n_choices = blended["entries"].as_array().unwrap().iter().filter(of_decoder).count();
    assert!(n_choices > 1, "{}", blended["chunks"]);
    assert!(time(&blended) < 0.99 * time(&plan(GPT2, "pp=1,axes=named")));
    let path = scratch!("shown-once-plan.json");
    done(&[&["optimize"], GPT2, &["--pin", "pp=1", "-o", &path]].concat());
    done(&["verify", &path]);
}
