//! What does not fit: how much it is said to need, what would make it fit, and how long that is said to take.

use std::path::PathBuf;

use serde_json::Value;
use tests::planner;

const GIB: f64 = (1_u64 << 30) as f64;

fn scratch(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

#[expect(clippy::disallowed_methods, reason = "a scratch file of this test")]
fn write(name: &str, text: &str) -> String {
    let path = scratch(name);
    std::fs::write(&path, text).expect("the folder of scratch files can be written to");
    path.to_string_lossy().into_owned()
}

fn json(words: &[&str], code: u8) -> Value {
    let said = planner(&[words, &["--json"]].concat());
    assert_eq!(said.code, code, "{said}");
    serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// A shipped cluster as a document to edit.
fn native(words: &[&str]) -> Value {
    let said = planner(&[&["clusters"], words, &["--native"]].concat());
    serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// What a named plan is said to need does not depend on how much too little there is, and is enough.
#[test]
fn what_the_closest_needs_is_what_it_fits_in() {
    let mut cluster = native(&["dgx-h100"]);
    let mut estimate = |memory_gib: f64, code: u8| {
        cluster["groups"][0]["device"]["memory_gib"] = memory_gib.into();
        let file = write("refusals-cluster.json", &cluster.to_string());
        json(&["estimate", "llama-2-70b", &file, "--tp", "8", "--offload", "none"], code)
    };
    let mut needs = |memory_gib: f64| {
        let overflow = estimate(memory_gib, 3)["no_plan"].clone();
        assert_eq!(overflow["need"], "closest", "{overflow}");
        overflow["needed_bytes"].as_f64().unwrap() / GIB
    };
    let (of_less, of_more) = (needs(80.0), needs(150.0));
    assert!((of_less / of_more - 1.0).abs() < 0.01, "{of_less} GiB, with more {of_more} GiB");
    let peak = estimate(of_more * 1.01, 0)["peak_memory_bytes"].as_f64().unwrap();
    assert!((peak / GIB / of_more - 1.0).abs() < 0.01, "{peak} bytes, said to need {of_more} GiB");
}

/// Where what has the degrees that are pinned nearly fits, other degrees that do fit are no reason to say that there
/// are none such.
#[test]
fn degrees_that_lack_memory_are_not_called_impossible() {
    let mut cluster = native(&["dgx-a100-40", "--devices", "4"]);
    cluster["groups"][0]["device"]["memory_gib"] = 48.9.into();
    let file = write("refusals-nearly.json", &cluster.to_string());
    let pins = "tp=4,recompute=none,offload=none";
    let refused = json(
        &["optimize", "llama-3-8b", &file, "--global-batch", "8", "--budget", "0.001", "--pin", pins],
        3,
    );
    let needed = refused["no_plan"]["needed_bytes"].as_f64().unwrap() / GIB;
    assert!((48.9..51.0).contains(&needed), "{refused}");
}

/// Of many candidates none is worked out where the states alone are too many: what is told is what none does without.
#[test]
fn what_none_does_without_is_called_so() {
    let refused = planner(&["optimize", "llama-2-70b", "dgx-a100-40", "--pin", "offload=none"]);
    assert_eq!(refused.code, 3, "{refused}");
    assert!(refused.err.contains("no plan fits: any needs at least 132."), "{refused}");
    assert!(
        refused.err.contains("of 40.0 GiB per device for parameters, gradients and optimizer state\n"),
        "{refused}"
    );
}

/// Of a host that is too small beside devices that are, both are told: with enough of one the other is still missing.
#[test]
fn what_a_host_lacks_is_told_beside_what_devices_do() {
    let mut cluster = native(&["dgx-h100", "--devices", "4"]);
    cluster["groups"][0]["host_memory_gib"] = 128.into();
    let file = write("refusals-host.json", &cluster.to_string());
    let refused = json(
        &["optimize", "llama-3-70b", &file, "--global-batch", "4", "--seq-len", "4096", "--budget", "0.001"],
        3,
    );
    let (overflow, also) = (&refused["no_plan"], &refused["no_plan"]["also"]);
    for one in [overflow, also] {
        assert!(one["needed_bytes"].as_f64() > one["capacity_bytes"].as_f64(), "{refused}");
    }
    assert!(also["term"].as_str().unwrap().contains("host"), "{refused}");
}

/// So does an answer why something was not chosen.
#[test]
fn what_a_host_lacks_is_told_of_other_choices_too() {
    let mut cluster = native(&["dgx-h100", "--nodes", "2"]);
    cluster["groups"][0]["host_memory_gib"] = 64.into();
    cluster["groups"][0]["device"]["memory_gib"] = 16.into();
    let file = write("refusals-hosts.json", &cluster.to_string());
    let plan = scratch("refusals-hosts-plan.json").to_string_lossy().into_owned();
    let job = ["--global-batch", "16", "--seq-len", "1024", "--pin", "tp=8,pp=2,offload=none", "-o", &plan];
    json(&[&["optimize", "llama-3-8b", &file], &job[..]].concat(), 0);
    let why = json(&["explain", &plan, "--why-not", "dp=16,zero=0,offload=optimizer"], 0);
    let overflow = &why["answer"]["does-not-fit"];
    for one in [overflow, &overflow["also"]] {
        assert!(one["needed_bytes"].as_f64() > one["capacity_bytes"].as_f64(), "{why}");
    }
    assert!(overflow["also"]["term"].as_str().unwrap().contains("host"), "{why}");
}

/// A schedule that needs more layers than there are says so, and not what others need.
#[test]
fn a_schedule_with_too_few_layers_says_how_many_it_needs() {
    let question =
        ["optimize", "gpt2", "dgx-h100", "--global-batch", "64", "--pin", "pp=8,schedule=zb-v", "--json"];
    let said = planner(&question);
    assert!(said.code == 2, "{said}");
    assert!(
        said.err.contains("8 stages of 2 virtual stages each are 16, where the model has 14 layers"),
        "{said}"
    );
}

/// The time beside a change is that of some plan that then fits, near the fastest.
#[test]
fn a_change_takes_about_as_long_as_it_is_said_to() {
    let pair = write("refusals-pair.json", &native(&["rtx4090-x8", "--devices", "2"]).to_string());
    let question =
        |more: &[&'static str]| [&["optimize", "llama-3-8b", &pair, "--global-batch", "64"], more].concat();
    let refused = json(&question(&[]), 3);
    let changes = refused["no_plan"]["relaxations"].as_array().unwrap();
    for (change, more) in [
        ("gradients=half", &["--engine", "gradients=half"][..]),
        ("4 times the nodes (8 devices)", &["--devices", "8", "--pin", "offload=none"]),
    ] {
        let told = changes.iter().find(|one| one["change"].as_str().unwrap().contains(change));
        let told = told.unwrap_or_else(|| panic!("{change}: {refused}"));
        let (time, speed) = (told["step_time_s"].as_f64().unwrap(), told["tokens_per_s"].as_f64().unwrap());
        assert!((time * speed / (64.0 * 8192.0) - 1.0).abs() < 1e-9, "{told}");
        let fastest = json(&question(more), 0)["predicted"]["step_time_s"].as_f64().unwrap();
        assert!((0.9999..1.1).contains(&(time / fastest)), "{change}: {time} s, the fastest {fastest} s");
    }
}

/// A search among so many would take minutes.
#[test]
fn more_devices_than_are_planned_for_are_refused_at_once() {
    let plan = scratch("refusals-plan.json").to_string_lossy().into_owned();
    let question = ["optimize", "gpt2", "dgx-h100", "--devices", "2", "--global-batch", "16"];
    let made = planner(&[&question[..], &["--pin", "dp=2", "-o", &plan]].concat());
    assert_eq!(made.code, 0, "{made}");
    for gained in ["9999999", "16777216"] {
        let refused = planner(&["replan", &plan, "--gained", gained]);
        assert_eq!(refused.code, 2, "{refused}");
        assert!(refused.err.contains("at most 10000000 in all are planned for"), "{refused}");
    }
}

/// Text of some editors begins with a mark that is no part of it.
#[test]
fn a_byte_order_mark_has_one_answer() {
    let file = write("refusals-mark.json", "\u{feff}{}");
    let question = ["optimize", "gpt2", "dgx-h100", "--global-batch", "8"];
    for words in [
        vec!["optimize", &file, "dgx-h100"],
        vec!["optimize", "gpt2", &file],
        vec!["check", &file],
        [&question[..], &["--constraints", &file]].concat(),
        [&question[..], &["--calibration", &file]].concat(),
    ] {
        let refused = planner(&words);
        assert_eq!(refused.code, 2, "{refused}");
        assert!(refused.err.contains("the file starts with a byte order mark\n"), "{refused}");
    }
}
