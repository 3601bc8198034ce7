//! Every schedule by its name, the whole way: planned for a real model, checked, verified; and tables of a user's own.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]
#![expect(clippy::disallowed_methods, reason = "tables and plans are made up in files of this test run")]

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};
use tests::planner;

/// By the name of its option: the schedule, and the kind of model that is verified with it.
const SCHEDULES: [(&str, &str); 16] = [
    ("gpipe", "llama-3-8b"),
    ("1f1b", "llama-3-8b"),
    ("eager-1f1b", "llama-3-8b"),
    ("dapple", "llama-3-8b"),
    ("interleaved", "llama-3-8b"),
    ("breadth-first", "llama-3-8b"),
    ("zb-h1", "mixtral-8x7b"),
    ("zb-h2", "llama-3-8b"),
    ("zb-v", "mixtral-8x7b"),
    ("v-half", "llama-3-8b"),
    ("v-min", "llama-3-8b"),
    ("hanayo", "llama-3-8b"),
    ("dualpipe-v", "llama-3-8b"),
    ("chimera", "gpt2"),
    ("seq1f1b", "llama-3-8b"),
    ("terapipe", "mixtral-8x7b"),
];

fn scratch(name: &str) -> String {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name).to_string_lossy().into_owned()
}

/// Four stages of a model on a cluster that holds every schedule.
fn plan(schedule: &str, model: &str) -> String {
    let file = scratch(&format!("{schedule}.json"));
    let pins = format!("pp=4,tp=2,micro-batch=1,recompute=full,schedule={schedule}");
    let nodes = if model == "mixtral-8x7b" { "4" } else { "1" };
    let batch = if model == "mixtral-8x7b" { "64" } else { "16" };
    let words = ["--nodes", nodes, "--global-batch", batch, "--seq-len", "1024", "--pin", &pins, "-o", &file];
    let made = planner(&[&["optimize", model, "dgx-h100"], &words[..]].concat());
    assert_eq!(made.code, 0, "{made}");
    file
}

#[test]
fn every_schedule_is_planned_checked_and_verified_by_its_name() {
    for (schedule, model) in SCHEDULES {
        let file = plan(schedule, model);
        let checked = planner(&["check", &file, "--json"]);
        assert_eq!(checked.code, 0, "{checked}");
        let report: Value = serde_json::from_str(&checked.out).unwrap();
        let name = report["schedule"].as_str().unwrap();
        assert!(name.starts_with(schedule), "{schedule}: {name}");
        assert!(report["bubble_fraction"].as_f64().is_some_and(|share| (0.0..0.5).contains(&share)));
        assert_eq!(report["stages"].as_array().map(Vec::len), Some(4));
        let verified = planner(&["verify", &file, "--precision", "f64", "--json"]);
        assert_eq!(verified.code, 0, "{schedule}: {verified}");
        let verdict: Value = serde_json::from_str(&verified.out).unwrap();
        for proof in verdict["proofs"].as_array().unwrap() {
            assert_eq!(proof["proof"], "proven", "{schedule}: {proof}");
        }
    }
}

#[test]
fn pins_that_contradict_a_schedule_are_named() {
    let refused = |pins: &str| {
        let said = planner(&["optimize", "gpt2", "dgx-h100", "--devices", "8", "--pin", pins]);
        assert_ne!(said.code, 0, "{said}");
        said.err.lines().next().unwrap_or_default().to_owned()
    };
    let said = [
        refused("schedule=zb-h1,pp=1"),
        refused("schedule=chimera,pp=1"),
        refused("schedule=hanayo,pp=2,vpp=3"),
        refused("schedule=zb-v,pp=2,vpp=4"),
        refused("schedule=gpipe,pp=2,vpp=2"),
        refused("schedule=interleaved,pp=2,vpp=1"),
        refused("schedule=seq1f1b,pp=1"),
        refused("schedule=1f1b,slices=4"),
        refused("slices=4"),
        refused("schedule=terapipe,cp=2,cp-kind=ring"),
        refused("schedule=terapipe,token-order=zigzag"),
    ];
    insta::assert_snapshot!(said.join("\n"));
}

/// A plan with a table in place of its schedule, its steps made of as many micro-batches.
fn with_table(name: &str, rows: &[&str]) -> String {
    let mut plan: Value = serde_json::from_str(&fs::read_to_string(plan("gpipe", "gpt2")).unwrap()).unwrap();
    plan["schedule"] = json!({"custom": {"looped": {"virtual_stages": 1}}});
    plan["table"] = json!(rows);
    plan["n_micro_batches"] = json!(3);
    plan["job"]["global_batch"] = json!(3 * plan["micro_batch"].as_u64().unwrap());
    let file = scratch(name);
    fs::write(&file, plan.to_string()).unwrap();
    file
}

/// Whole and split backwards in one table, weights in an order of their own.
const ROWS: [&str; 4] =
    ["F0 F1 F2 I0 B1 I2 W2 W0", "F0 F1 I0 F2 B1 W0 B2", "F0 I0 F1 B1 F2 I2 W0 W2", "F0 B0 F1 I1 F2 I2 W2 W1"];

#[test]
fn a_table_of_a_users_own_runs_and_is_right() {
    let file = with_table("own-table.json", &ROWS);
    assert_eq!(planner(&["check", &file]).code, 0);
    let verified = planner(&["verify", &file]);
    assert_eq!(verified.code, 0, "{verified}");
}

#[test]
fn a_table_that_cannot_run_names_stage_action_and_cause() {
    let mut rows = ROWS;
    rows[1] = "F0 B1 F1 I0 F2 W0 B2";
    let file = with_table("stuck-table.json", &rows);
    for command in ["check", "verify"] {
        let refused = planner(&[command, &file]);
        assert_eq!(refused.code, 2, "{refused}");
        assert!(refused.err.contains("table: rank 1: backward of micro-batch 1"), "{refused}");
    }
}

#[test]
fn a_table_in_a_file_is_checked_by_itself() {
    let file = scratch("table.txt");
    fs::write(&file, "F0 F1 F0.1 I0.1 F1.1 W0.1 B1.1 B0 B1\nF0 F0.1 F1 B0.1 F1.1 B0 B1.1 B1\n").unwrap();
    let said = planner(&["check", "--table", &file, "--placement", "v", "--rows"]);
    insta::assert_snapshot!(said.out);
    assert_eq!(said.code, 0, "{said}");
    fs::write(&file, "F0 B0\nF0 X0\n").unwrap();
    let refused = planner(&["check", "--table", &file]);
    assert_eq!((refused.code, refused.err.contains("rank 1, action 1")), (2, true), "{refused}");
}

/// Learned positions and tied tables, in slices that two devices cut again or not.
#[test]
fn slices_are_planned_checked_priced_and_verified() {
    for (model, pins) in [
        ("gpt2", "pp=2,tp=2,micro-batch=2,schedule=seq1f1b,slices=3"),
        ("gpt2", "pp=2,cp=2,micro-batch=2,schedule=terapipe,slices=2"),
    ] {
        let file = scratch("slices.json");
        let words =
            ["--devices", "4", "--global-batch", "16", "--seq-len", "1024", "--pin", pins, "-o", &file];
        let made = planner(&[&["optimize", model, "dgx-h100"], &words[..]].concat());
        assert_eq!(made.code, 0, "{made}");
        let plan: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        let slices: Vec<u64> =
            plan["slices"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        assert_eq!(slices.iter().sum::<u64>(), 1024, "{model} {pins}");
        // A later slice attends more keys, so it is no longer.
        assert!(slices.is_sorted_by(|a, b| a >= b), "{model} {pins}: {slices:?}");
        let checked = planner(&["check", &file]);
        assert_eq!(checked.code, 0, "{checked}");
        assert!(checked.out.contains(&format!("micro-batches of {} slices", slices.len())), "{checked}");
        let verified = planner(&["verify", &file]);
        assert_eq!(verified.code, 0, "{model} {pins}: {verified}");
    }
}

#[test]
fn slices_that_do_not_make_up_the_sequence_are_refused() {
    let file = plan("seq1f1b", "llama-3-8b");
    let text = fs::read_to_string(&file).unwrap();
    let refused = |change: &dyn Fn(&mut Value)| {
        let mut plan: Value = serde_json::from_str(&text).unwrap();
        change(&mut plan);
        let file = scratch("bad-slices.json");
        fs::write(&file, plan.to_string()).unwrap();
        let said = planner(&["check", &file]);
        assert_eq!(said.code, 2, "{said}");
        said.err
            .lines()
            .next()
            .unwrap_or_default()
            .split_once("slices: ")
            .map(|(_, what)| what.to_owned())
            .unwrap()
    };
    let n = serde_json::from_str::<Value>(&text).unwrap()["slices"].as_array().unwrap().len();
    let said = [
        refused(&|plan| plan["slices"] = json!(vec![500; n])),
        refused(&|plan| plan["slices"] = json!([1024])),
        refused(&|plan| plan["slices"][0] = json!(0)),
    ];
    assert!(said[0].contains("are not a sequence of 1024"), "{said:?}");
    assert!(said[1].contains("found 1"), "{said:?}");
    assert!(said[2].contains("at least one token"), "{said:?}");
}

#[test]
fn slices_need_less_memory_than_sequences() {
    // The scores of 65,536 tokens take more than a device has; those of a quarter of them do not.
    let job =
        ["estimate", "llama-3-8b", "dgx-h100", "--seq-len", "65536", "--global-batch", "2", "--pp", "8"];
    let estimate = |more: &[&str]| planner(&[&job[..], &["--recompute", "full", "--json"], more].concat());
    let whole = estimate(&["--schedule", "1f1b", "--offload", "none"]);
    assert_eq!(whole.code, 3, "{whole}");
    let sliced = estimate(&["--schedule", "seq1f1b", "--slices", "4"]);
    assert_eq!(sliced.code, 0, "{sliced}");
    let found: Value = serde_json::from_str(&sliced.out).unwrap();
    let peak = found["peak_memory_bytes"].as_f64().unwrap();
    assert!(peak > 40e9 && peak < 80.0 * 1024_f64.powi(3), "{peak}");
}

/// Of an odd number of micro-batches one of the two copies of a model has one more: time and bytes of a stage count
/// them as they are.
#[test]
fn times_of_two_copies_add_up_where_micro_batches_are_odd() {
    let job = ["optimize", "gpt2-xl", "dgx-h100", "--global-batch", "24", "--seq-len", "1024", "--json"];
    let said = planner(&[&job[..], &["--pin", "schedule=chimera,micro-batch=2,pp=2"]].concat());
    assert_eq!(said.code, 0, "{said}");
    let plan: Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!(plan["n_micro_batches"], 3);
    let sum = |parts: &Value| parts.as_object().unwrap().values().filter_map(Value::as_f64).sum::<f64>();
    let predicted = &plan["predicted"];
    let breakdown = &predicted["breakdown"];
    let parts = sum(breakdown) + sum(&breakdown["exposed_communication_s"]);
    let step = predicted["step_time_s"].as_f64().unwrap();
    assert!((parts / step - 1.0).abs() < 1e-9, "{parts} {step}");
}
