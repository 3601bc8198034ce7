//! What is forbidden is not in the plan, whatever the plan would be; what nobody would choose costs nothing to forbid.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use serde_json::Value;
use tests::{json, planner};

const LLAMA: &[&str] = &["llama-3-8b", "dgx-h100", "--global-batch", "64"];
const LLAMA_70B: &[&str] = &["llama-3-70b", "dgx-h100", "--nodes", "4", "--global-batch", "64"];
const MIXTRAL: &[&str] = &["mixtral-8x7b", "dgx-h100", "--nodes", "2", "--global-batch", "64"];

fn plan(question: &[&str], more: &[&str]) -> Value {
    json(&[&["optimize"], question, more].concat())
}

fn time(plan: &Value) -> f64 {
    plan["predicted"]["step_time_s"].as_f64().unwrap()
}

fn role(plan: &Value, name: &str) -> String {
    let roles = &plan["roles"];
    match name {
        "zero" => roles["zero"]["stage"].to_string(),
        "micro-batch" => roles["micro_batch"].to_string(),
        "sequence-parallel" => if roles["sequence_parallel"] == true { "on" } else { "off" }.into(),
        "recompute" => roles["recompute"].as_str().unwrap().into(),
        "cp-kind" => roles["context"].as_str().unwrap_or("none").into(),
        _ => roles[name].to_string(),
    }
}

/// Forbids what the best plan is, role by role; then the best of what is left, and so on.
#[test]
fn the_best_of_what_is_left_is_without_what_is_forbidden() {
    for (question, names) in [
        (LLAMA, &["pp", "vpp", "dp", "zero", "micro-batch"][..]),
        (LLAMA_70B, &["tp", "pp", "recompute"]),
        (MIXTRAL, &["ep", "zero"]),
    ] {
        let best = plan(question, &[]);
        for &name in names {
            let value = role(&best, name);
            // Selective recomputation alone cannot be forbidden.
            let word = if name == "recompute" { "recompute".into() } else { format!("{name}={value}") };
            let other = plan(question, &["--forbid", &word]);
            assert_ne!(role(&other, name), value, "{word}: {}", other["roles"]);
            assert!(time(&other) >= 0.97 * time(&best), "{word}: {} and {}", time(&other), time(&best));
        }
    }
}

#[test]
fn a_name_by_itself_forbids_every_degree_above_one() {
    for (question, name) in
        [(LLAMA_70B, "tp"), (LLAMA, "pp"), (LLAMA, "cp"), (LLAMA, "dp"), (MIXTRAL, "ep"), (LLAMA, "vpp")]
    {
        let found = plan(question, &["--forbid", name]);
        assert_eq!(role(&found, name), "1", "{name}: {}", found["roles"]);
    }
    let found = plan(LLAMA, &["--forbid", "zero", "--forbid", "recompute,vpp"]);
    let roles = ["zero", "recompute", "vpp"].map(|name| role(&found, name));
    assert_eq!(roles, ["0", "none", "1"]);
}

#[test]
fn forbidding_what_nobody_would_choose_changes_nothing() {
    let best = plan(LLAMA, &[]);
    for word in ["ep", "slices", "schedule=gpipe", "token-order=striped"] {
        let found = plan(LLAMA, &["--forbid", word]);
        assert_eq!((&found["roles"], time(&found)), (&best["roles"], time(&best)), "{word}");
    }
}

/// And where that is a degree no faster either: both may be what axes come to of which nobody said what they do.
#[test]
fn forbidding_all_but_one_takes_what_choosing_it_does() {
    let cases = [
        (LLAMA_70B, "tp=1,2,4,16", "tp=8"),
        (LLAMA_70B, "zero=0,zero=1,zero=2", "zero=3"),
        (MIXTRAL, "ep=1,2,4,16", "ep=8"),
        (LLAMA, "recompute=none,recompute=selective", "recompute=full"),
        (LLAMA, "sequence-parallel=on,tp=1", "sequence-parallel=off,tp=2"),
    ];
    for (question, forbidden, pinned) in cases {
        let (left, chosen) = (plan(question, &["--forbid", forbidden]), plan(question, &["--pin", pinned]));
        // Menus hold other choices off the same hull: a tenth of a per cent.
        assert!(time(&left) <= time(&chosen) * 1.001, "{forbidden}: {} and {}", time(&left), time(&chosen));
        if ["tp", "ep"].contains(&pinned.split('=').next().unwrap()) {
            assert!(time(&chosen) <= time(&left) * 1.001, "{pinned}: {} and {}", time(&chosen), time(&left));
        }
        let (name, value) = pinned.split(',').next().unwrap().split_once('=').unwrap();
        assert_eq!(role(&left, name), value, "{forbidden}: {}", left["roles"]);
    }
}

/// Layers take as long with either, stages do not: over virtual ones each part of the stream is sent hundreds of times.
#[test]
fn nobody_needs_to_say_that_what_stages_send_is_cut() {
    let question = &["llama-3.1-405b", "dgx-h100", "--nodes", "2048", "--global-batch", "512"];
    let pins = ["tp=4,cp=8,pp=32", "tp=4,cp=8,pp=32,sequence-parallel=on"];
    let [free, cut] = pins.map(|pins| time(&plan(question, &["--pin", pins])));
    let any = time(&plan(question, &[]));
    assert!(free <= cut * 1.001 && any <= cut * 1.001, "{any}, {free} and {cut}");
}

#[test]
fn pins_and_prohibitions_hold_together() {
    let found = plan(LLAMA_70B, &["--pin", "tp=8", "--forbid", "pp,zero=3"]);
    assert_eq!(["tp", "pp"].map(|name| role(&found, name)), ["8", "1"]);
    assert_ne!(role(&found, "zero"), "3");
    let long = &["llama-3-8b", "dgx-h100", "--seq-len", "131072", "--global-batch", "4"][..];
    for kind in ["gather", "ring", "ulysses"] {
        let found = plan(long, &["--pin", "recompute=full", "--forbid", &format!("cp-kind={kind}")]);
        assert!(!role(&found, "cp-kind").contains(kind), "{kind}: {}", found["roles"]);
    }
}

#[test]
fn what_contradicts_itself_is_refused_with_advice() {
    let wrong: &[&[&str]] = &[
        &["optimize", "gpt2", "dgx-h100", "--pin", "tp=4", "--forbid", "tp=4"],
        &["optimize", "gpt2", "dgx-h100", "--pin", "tp=4", "--forbid", "tp"],
        &["optimize", "gpt2", "dgx-h100", "--pin", "schedule=gpipe", "--forbid", "schedule=gpipe"],
        &["optimize", "gpt2", "dgx-h100", "--forbid", "zero=0,zero=1,zero=2,zero=3"],
        &["optimize", "gpt2", "dgx-h100", "--forbid", "recompute=selective"],
        &["optimize", "gpt2", "dgx-h100", "--forbid", "dp=1,2,4,8"],
        &["optimize", "gpt2", "dgx-h100", "--forbid", "ep=1"],
        &["optimize", "gpt2", "dgx-h100", "--forbid", "pp,pp=1"],
        &["optimize", "gpt2", "dgx-h100", "--forbid", "schedule"],
        &["optimize", "gpt2", "dgx-h100", "--forbid", "zero-3"],
        &["optimize", "gpt2", "dgx-h100", "--forbid", "layers-per-stage=6,6"],
        &["estimate", "gpt2", "dgx-h100", "--forbid", "zero=1"],
        &["estimate", "gpt2", "dgx-h100", "--tp", "2", "--forbid", "sequence-parallel"],
    ];
    let said = wrong.iter().map(|words| {
        let said = planner(words);
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
        said.to_string()
    });
    insta::assert_snapshot!(said.collect::<Vec<_>>().join("\n"));
}
