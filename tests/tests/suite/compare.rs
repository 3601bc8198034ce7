//! Plans side by side, and why a plan that somebody has in mind is not the one that was found.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use frontends::{read_cluster, read_model, shipped_cluster, shipped_model};
use ir::plan::check::open;
use planner::chosen::asked;
use planner::request::{Job, Pins, Request, Solver};
use serde_json::Value;
use tests::{done, json, planner as run, scratch};

const QUESTION: &[&str] = &["optimize", "llama-3-8b", "dgx-h100", "--global-batch", "64"];

fn plan(name: &str, more: &[&str]) -> String {
    let path = scratch!(name);
    done(&[QUESTION, more, &["-o", &path]].concat());
    path
}

fn sum(amounts: &Value) -> f64 {
    amounts.as_object().unwrap().values().map(|amount| amount.as_f64().unwrap()).sum()
}

#[test]
fn the_terms_of_every_plan_add_up_to_what_it_takes() {
    let files = [
        plan("compare-a.json", &[]),
        plan("compare-b.json", &["--pin", "tp=8"]),
        plan("compare-c.json", &["--forbid", "pp"]),
    ];
    let answer = json(&["compare", &files[0], &files[1], &files[2]]);
    let plans = answer["plans"].as_array().unwrap();
    for (column, file) in plans.iter().zip(&files) {
        let estimate = json(&["estimate", "--plan", file]);
        assert_eq!(column["step_time_s"], estimate["step_time_s"]);
        assert_eq!(column["bytes_per_tier"], estimate["bytes_per_tier"]);
        let (time, step) = (sum(&column["time"]), column["step_time_s"].as_f64().unwrap());
        assert!((time - step).abs() <= 1e-9 * step, "{time} {step}");
        let (memory, peak) = (sum(&column["memory"]), column["peak_memory_bytes"].as_f64().unwrap());
        assert!((memory - peak).abs() <= 1e-6 * peak, "{memory} {peak}");
    }
    let words: Vec<&str> =
        answer["differences"].as_array().unwrap().iter().map(|words| words.as_str().unwrap()).collect();
    assert!(words.iter().any(|words| words.contains("tp 8 instead of 1")), "{words:?}");
    assert!(words.iter().any(|words| words.contains("longer: +")), "{words:?}");
    let text = run(&["compare", &files[0], &files[1]]).out;
    assert!(text.contains("difference") && text.contains("memory of the fullest device"), "{text}");
}

#[test]
fn a_plan_has_no_difference_to_itself() {
    let file = plan("compare-same.json", &[]);
    let words = &json(&["compare", &file, &file])["differences"];
    assert_eq!(words.as_array().unwrap().len(), 2, "{words}");
    assert!(words[0].as_str().unwrap().contains("has the same roles"), "{words}");
    assert!(words[1].as_str().unwrap().starts_with("Both take"), "{words}");
    assert_eq!(run(&["compare", &file]).code, 2);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a test's own scratch file")]
fn plans_of_unlike_clusters_of_one_name_are_told_from_each_other() {
    let (file, other) = (plan("compare-like.json", &[]), scratch!("compare-unlike.json"));
    let mut faster: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let rate = faster.pointer_mut("/cluster/groups/0/device/memory_bandwidth_bytes_per_s").unwrap();
    *rate = Value::from(2.0 * rate.as_f64().unwrap());
    std::fs::write(&other, faster.to_string()).unwrap();
    let words = json(&["compare", &file, &other])["differences"][0].clone();
    assert_eq!(words, format!("The cluster of {other} bears the same name and is another one."));
}

#[test]
fn what_somebody_has_in_mind_is_priced_or_refused_for_a_reason() {
    let file = plan("why-not.json", &[]);
    let ask = |choices: &str| json(&["explain", &file, "--why-not", choices])["answer"].clone();
    let priced = ask("tp=8");
    let plans = priced["priced"]["plans"].as_array().unwrap();
    assert_eq!((&plans[1]["choices"]["tp"], plans.len()), (&Value::from("8"), 2), "{priced}");
    assert!(plans[1]["step_time_s"].as_f64() > plans[0]["step_time_s"].as_f64());
    // The same question with the same choice as a pin has the same answer: fused forms are chosen anew, and the order of
    // tokens, of which a plan that cuts no sequences says nothing.
    for choice in ["tp=8", "cp=2"] {
        let pinned = json(&[QUESTION, &["--pin", choice]].concat());
        let priced = ask(choice);
        assert_eq!(
            priced["priced"]["plans"][1]["step_time_s"], pinned["predicted"]["step_time_s"],
            "{choice}"
        );
    }
    let crowded = ask("micro-batch=64,dp=1,offload=none");
    assert!(
        crowded["does-not-fit"]["needed_bytes"].as_f64() > crowded["does-not-fit"]["capacity_bytes"].as_f64()
    );
    assert!(ask("tp=3")["illegal"]["reason"].as_str().unwrap().contains("does not divide the 8 devices"));
    for (choices, words) in [
        ("tp=8", "longer"),
        ("micro-batch=64,dp=1,offload=none", "does not fit: the closest needs"),
        ("tp=3", "is no plan"),
    ] {
        let said = run(&["explain", &file, "--why-not", choices]);
        assert!(said.code == 0 && said.out.contains(words), "{said}");
    }
    assert_eq!(run(&["explain", &file, "--why-not", "tpp=3"]).code, 2);
}

#[test]
fn the_model_that_was_asked_for_is_read_off_a_plan_of_fused_forms() {
    for name in ["llama-3-8b", "gpt2"] {
        let model = read_model(name, shipped_model(name).unwrap().text).unwrap();
        let cluster = read_cluster("dgx-h100", shipped_cluster("dgx-h100").unwrap().text).unwrap();
        let job = Job { global_batch: 64, ..Job::defaults(&model, &cluster) };
        let request = Request { model, cluster, job, pins: Pins::default(), solver: Solver::Structured };
        let plan = planner::optimize(&request, &|_| ()).unwrap();
        assert!(!plan.forms.is_empty(), "{name}");
        assert_eq!(asked(&open(&plan).unwrap()), request.model, "{name}");
    }
}
