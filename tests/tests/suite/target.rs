//! `--target`: the plan is one that the engine can run, and what it lacks is refused.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test that cannot read its own input or output has failed"
)]

use std::fs;

use serde_json::Value;
use tests::{done, json, planner, scratch};

const JOB: [&str; 5] = ["optimize", "llama-3-8b", "dgx-h100", "--nodes", "2"];

/// What all three are held to, and the step time.
fn obeys(target: &str, zeros: &[u64], more: &[&str]) -> f64 {
    let plan = json(&[&JOB[..], &["--target", target], more].concat());
    let roles = &plan["roles"];
    let zero = roles["zero"]["stage"].as_u64().unwrap();
    // What nothing could be cut over is stage 0 in name.
    assert!(zeros.contains(&zero) || zero == 0, "{target}: ZeRO-{zero}");
    assert!(roles["zero"].get("hybrid").is_none_or(Value::is_null), "{target}: {roles}");
    assert!(plan["search"]["proof"].as_str().unwrap().contains("spaces"), "{target}");
    let (time, bound) = (&plan["predicted"]["step_time_s"], &plan["search"]["lower_bound_s"]);
    assert!(bound.as_f64().unwrap() <= time.as_f64().unwrap());
    time.as_f64().unwrap()
}

#[test]
fn plans_stay_inside_what_the_engine_can_run() {
    let free = json(&JOB)["predicted"]["step_time_s"].as_f64().unwrap();
    for (target, zeros) in
        [("megatron", &[0, 1][..]), ("torchtitan", &[0, 2, 3]), ("deepspeed", &[0, 1, 2, 3])]
    {
        let time = obeys(target, zeros, &[]);
        assert!(time >= free * (1.0 - 1e-9), "{target}: {time} beats {free}");
    }
}

#[test]
fn questions_about_a_plan_are_asked_of_the_plans_that_it_was_chosen_from() {
    let file = scratch!("of-an-engine.json");
    done(&["optimize", "llama-3-8b", "dgx-h100", "--target", "megatron", "--forbid", "tp=8", "-o", &file]);
    let why = |choice: &str| json(&["explain", &file, "--why-not", choice]);
    let zero = why("zero=3");
    assert!(
        zero["answer"]["illegal"]["reason"].as_str().unwrap().contains("megatron cannot run zero=3"),
        "{zero}"
    );
    let tp = why("tp=8");
    assert!(
        tp["answer"]["illegal"]["reason"]
            .as_str()
            .unwrap()
            .contains("none of what the pins and prohibitions leave"),
        "{tp}"
    );
    // One of its own plans: no faster than its fastest.
    let priced = why("micro-batch=1");
    let times: Vec<f64> = priced["answer"]["priced"]["plans"]
        .as_array()
        .unwrap()
        .iter()
        .map(|plan| plan["step_time_s"].as_f64().unwrap())
        .collect();
    assert!(times.len() == 2 && times[1] >= times[0] * (1.0 - 1e-9), "{times:?}");
    let next = scratch!("of-an-engine-next.json");
    done(&["replan", &file, "--lost", "4", "-o", &next]);
    let next: Value = serde_json::from_str(&fs::read_to_string(&next).unwrap()).unwrap();
    assert_eq!(
        (&next["search"]["target"], &next["search"]["forbidden"]),
        (&"megatron".into(), &serde_json::json!(["tp=8"]))
    );
    assert!(
        ["none", "selective", "full"].contains(&next["roles"]["recompute"].as_str().unwrap()),
        "{}",
        next["roles"]
    );
}

#[test]
fn deepspeed_has_one_chunk_per_stage_and_small_stages_of_zero_in_a_pipeline() {
    let plan = json(&[&JOB[..], &["--target", "deepspeed", "--pin", "pp=2"]].concat());
    assert!(plan["roles"]["zero"]["stage"].as_u64().unwrap() <= 1);
    assert_eq!(plan["roles"]["vpp"], 1);
    assert_eq!(plan["roles"]["sequence_parallel"], false);
}

#[test]
fn devices_of_an_engine_have_equal_parts_of_heads_and_of_the_batch() {
    // 25 heads, and a single sequence for eight devices.
    for target in ["megatron", "torchtitan", "deepspeed"] {
        let job = [
            "optimize",
            "gpt2-xl",
            "dgx-h100",
            "--seq-len",
            "1024",
            "--global-batch",
            "1",
            "--target",
            target,
        ];
        let plan = json(&job);
        let runners = plan["runners_up"].as_array().unwrap().iter().map(|one| &one["roles"]);
        for roles in std::iter::once(&plan["roles"]).chain(runners) {
            // What is 1 may go without saying.
            let same = roles.get("same").unwrap_or(&Value::Null);
            assert!(roles["tp"] == 1 && (same.is_null() || *same == 1), "{target}: {roles}");
        }
    }
    let refused = |pins: &str, target: &str| {
        let job = ["optimize", "qwen2.5-7b", "dgx-h100", "--global-batch", "12"];
        let said = planner(&[&job[..], &["--pin", pins, "--target", target]].concat());
        assert_eq!(said.code, 2, "{said}");
        said.err
    };
    let of_batch =
        "error: deepspeed cannot run dp=8: 8 replicas do not divide a global batch of 12 sequences\n";
    assert_eq!(refused("dp=8", "deepspeed"), of_batch);
    let said = |target: &str| refused("tp=8", target);
    assert_eq!(
        said("megatron"),
        "error: megatron cannot run tp=8: the 28 heads of `qwen2.5-7b` do not divide so\n"
    );
    let of_keys = "error: torchtitan cannot run tp=8: the 4 heads of keys and values of `qwen2.5-7b` do not divide so\n";
    assert_eq!(said("torchtitan"), of_keys);
}

#[test]
fn a_pin_that_an_engine_lacks_is_refused_with_what_it_has() {
    let said = |words: &[&str]| {
        let found = planner(&[&JOB[..], words].concat());
        assert_eq!(found.code, 2, "{found}");
        found.err
    };
    let zero = said(&["--target", "megatron", "--pin", "zero=3"]);
    assert!(zero.contains("megatron cannot run zero=3: it has 0, 1"), "{zero}");
    let staged = said(&["--target", "deepspeed", "--pin", "zero=2,pp=4"]);
    assert!(staged.contains("only without a pipeline"), "{staged}");
    let order = said(&["--target", "torchtitan", "--pin", "schedule=chimera,pp=4"]);
    assert!(order.contains("it has 1f1b, interleaved, gpipe, zb-v, dualpipev"), "{order}");
}
