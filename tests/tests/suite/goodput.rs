//! What failures leave of a plan: by formula and failure by failure; and plans that are cheap instead of fast.

#![expect(clippy::disallowed_methods, reason = "a test of files")]

use std::fs;

use serde_json::Value;
use tests::{done, json, number, planner, scratch};

/// A plan of two devices in a file of its own.
fn plan(name: &str) -> String {
    let file = scratch!(name);
    done(&["optimize", "gpt2", "dgx-h100", "--devices", "2", "--global-batch", "16", "-o", &file]);
    file
}

#[test]
fn walking_through_many_failures_finds_the_goodput_of_the_formula() {
    let plan = plan("goodput-random.json");
    let rare =
        ["goodput", &plan, "--failures", "200000", "--days", "20000", "--stall", "20", "--restart", "300"];
    let found = json(&rare);
    let (walked, formula) =
        (found["walked"]["goodput"].as_f64().unwrap(), found["goodput"].as_f64().unwrap());
    assert!((walked / formula - 1.0).abs() < 0.01 && formula < 0.95, "{walked} {formula}");
    // Two devices of 0.2 failures an hour: 2.5 hours.
    assert!((found["mean_time_between_failures_s"].as_f64().unwrap() - 9000.0).abs() < 1e-6);
    assert_eq!(json(&rare), found, "the same seed, the same failures");
}

#[test]
fn every_second_of_a_trace_is_accounted_for() {
    let (plan, trace) = (plan("goodput-trace.json"), scratch!("preemptions.csv"));
    fs::write(&trace, "at_s,gone_s\n1000,500\n50000,\n").unwrap();
    let words =
        ["goodput", &plan, "--trace", &trace, "--interval", "300", "--stall", "10", "--restart", "60"];
    let found = json(&words);
    let walked = &found["walked"];
    let seconds = |name: &str| walked[name].as_f64().unwrap();
    // Three checkpoints of 310 s, 70 s lost; 560 s gone. The second failure is 48440 s later: 156 checkpoints and 80 s.
    assert_eq!((seconds("lost_s"), seconds("down_s")), (150.0, 620.0));
    let all = seconds("useful_s") + seconds("lost_s") + seconds("checkpoints_s") + seconds("down_s");
    // Until training goes on behind the second.
    assert!(
        (all - 50060.0).abs() < 1e-6 && (walked["days"].as_f64().unwrap() * 86400.0 - 50060.0).abs() < 1e-6
    );
    // Two failures in 50000 seconds; one in the first 17280, whatever comes later.
    assert_eq!(found["mean_time_between_failures_s"], 25000.0);
    let of_days = json(&[&words[..], &["--days", "0.2"]].concat());
    assert_eq!(
        (of_days["mean_time_between_failures_s"].as_f64(), &of_days["walked"]["n_failures"]),
        (Some(17280.0), &1.into())
    );
    let said = planner(&[&words[..], &["--days", "0.01"]].concat());
    assert!(
        said.code == 2 && said.err.contains("no failure of the trace is in the days asked for"),
        "{said}"
    );
    // As spreadsheets write it.
    fs::write(&trace, "\u{feff}at_s,gone_s\n1000,500\n50000,\n").unwrap();
    assert_eq!(json(&words), found);
    fs::write(&trace, "at_s\n5\n4\n").unwrap();
    let said = planner(&["goodput", &plan, "--trace", &trace]);
    assert_eq!(said.code, 2);
    assert!(said.err.contains("line 3: times are in order"), "{said}");
}

#[test]
fn the_cheapest_number_of_devices_costs_no_more_than_any_that_was_tried() {
    let file = scratch!("priced-cluster.json");
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/clusters/dgx-h100.json");
    let mut priced: Value = serde_json::from_str(&fs::read_to_string(shipped).unwrap()).unwrap();
    priced["groups"][0]["price_per_device_hour"] = 2.5.into();
    fs::write(&file, priced.to_string()).unwrap();
    let job = ["--devices", "8", "--global-batch", "16"];
    let ask = |more: &[&str]| json(&[&["optimize", "gpt2", &file], &job[..], more].concat());
    let figure = |plan: &Value, name: &str| plan["predicted"][name].as_f64().unwrap();
    let (fast, cheap, frugal) = (ask(&[]), ask(&["--objective", "cost"]), ask(&["--objective", "energy"]));
    assert!(figure(&cheap, "cost_per_step") <= figure(&fast, "cost_per_step"));
    assert!(figure(&frugal, "energy_per_step_joules") <= figure(&fast, "energy_per_step_joules"));
    assert!(figure(&fast, "step_time_s") <= figure(&cheap, "step_time_s"));
    for devices in ["4", "2", "1"] {
        let half = json(&["optimize", "gpt2", &file, "--devices", devices, "--global-batch", "16"]);
        assert!(
            figure(&cheap, "cost_per_step") <= figure(&half, "cost_per_step") * (1.0 + 1e-9),
            "{devices}"
        );
    }
}

#[test]
fn more_failures_than_are_walked_through_are_refused() {
    let plan = plan("goodput-many.json");
    let said = planner(&["goodput", &plan, "--failures", "200000", "--days", "1e9"]);
    assert_eq!(said.code, 2, "{said}");
    assert!(said.err.contains("take fewer --days"), "{said}");
}

#[test]
fn where_nothing_lasts_no_token_has_a_price() {
    let plan = plan("goodput-none.json");
    let job = ["goodput", &plan, "--days", "1", "--interval", "100"];
    let found = json(&[&job[..], &["--failures", "100000000"]].concat());
    assert_eq!((number(&found["walked"]["goodput"]), number(&found["tokens_per_day"])), (0.0, 0.0));
    assert!(found.get("joules_per_token").is_none_or(Value::is_null), "{found}");
    // Who starts again at once loses no more than what follows the last checkpoint.
    let at_once = json(&[&job[..], &["--failures", "10000", "--restart", "0"]].concat());
    assert_eq!(number(&at_once["walked"]["down_s"]), 0.0);
}
