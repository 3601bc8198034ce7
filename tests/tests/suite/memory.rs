//! Plans that need more memory than their cluster has: `check` and `verify` say what lacks, with the exit code and by
//! the figures of `estimate`; and plans that were found, however little memory there is, pass both.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]
#![expect(clippy::disallowed_methods, reason = "plans and clusters are files")]

use ir::cluster::Precision;
use ir::units::{Bytes, GIB};
use planner::request::{Job, NoPlan, OffloadKind, Pins, Request, Stop};
use serde_json::{Value, json};
use tests::{Transcript, done, number, planner, scratch};

use super::exhaustive::question;

/// Where a plan says how much memory a device of its first group has.
const DEVICE: &str = "/cluster/groups/0/device/memory_bytes";

/// A plan that is found, and its file.
#[track_caller]
fn found(file: &str, words: &str) -> Value {
    let words: Vec<&str> = words.split_whitespace().collect();
    done(&[&["optimize"], &words[..], &["-o", file]].concat());
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// Two stages of a tiny model.
#[track_caller]
fn tiny(file: &str) -> Value {
    let pins = "dp=8,pp=2,micro-batch=1,zero=1,recompute=none,schedule=1f1b";
    found(file, &format!("good/tiny.json good/cluster.json --devices 16 --global-batch 64 --pin {pins}"))
}

fn edit(file: &str, plan: &mut Value, edits: &[(&str, Value)]) {
    for (place, value) in edits {
        *plan.pointer_mut(place).unwrap_or_else(|| panic!("no {place}")) = value.clone();
    }
    std::fs::write(file, plan.to_string()).unwrap();
}

/// What `check` and `verify` say of a plan's memory: the same.
#[track_caller]
fn memory(file: &str, code: u8) -> Value {
    let of = |said: Transcript| -> Value {
        assert_eq!(said.code, code, "{said}");
        serde_json::from_str::<Value>(&said.out).unwrap_or_else(|error| panic!("{error}: {said}"))["memory"]
            .clone()
    };
    let checked = of(planner(&["check", file, "--json"]));
    assert_eq!(of(planner(&["verify", file, "--precision", "f64", "--json"])), checked);
    assert_eq!(checked["fits"], code == 0, "{checked}");
    assert_eq!(checked["overflows"].as_array().unwrap().is_empty(), code == 0, "{checked}");
    checked
}

/// The most bytes that a device of any stage needs.
fn most(plan: &Value) -> f64 {
    let stages = plan["predicted"]["stages"].as_array().unwrap();
    stages.iter().map(|stage| number(&stage["peak_memory_bytes"])).fold(0.0, f64::max)
}

/// Chunks of a stage that hold more layers than others, or the head, count as they are under way: as the bytes that a
/// walk along the order of actions counts.
#[test]
fn chunks_of_a_stage_hold_what_is_under_way_of_each() {
    let questions = [
        "phi-3-mini rtx4090-x8 --devices 8 --global-batch 24",
        "qwen3-8b rtx4090-x8 --devices 24 --global-batch 8",
        "llama-2-7b dgx-a100-40 --devices 8 --global-batch 64 --pin schedule=v-half,pp=2",
        "llama-2-7b dgx-a100-40 --devices 8 --global-batch 64 --pin schedule=hanayo,pp=2",
    ];
    let file = scratch!("memory-chunks.json");
    for question in questions {
        let plan = found(&file, question);
        let checked: Value = serde_json::from_str(&done(&["check", &file, "--json"]).out).unwrap();
        let stages = plan["predicted"]["stages"].as_array().unwrap();
        for (priced, walked) in stages.iter().zip(checked["stages"].as_array().unwrap()) {
            let categories = priced["memory"].as_object().unwrap().iter();
            let kept = categories.filter(|(name, _)| name.starts_with("activations"));
            let kept: f64 = kept.map(|(_, bytes)| number(bytes)).sum();
            let walked = number(&walked["peak_activation_bytes"]);
            assert!((kept / walked - 1.0).abs() < 1e-6, "{question}: {kept} {walked}");
        }
    }
}

/// Models on clusters that they just fit on, some by what hosts, drives or other devices hold.
#[test]
fn plans_that_are_found_where_memory_is_scarce_pass() {
    let questions = [
        "llama-3-8b dgx-h100 --devices 1",
        "llama-3-8b dgx-h100 --devices 2",
        "gpt2-xl rtx4090-x8 --devices 1 --pin offload=allowed",
        "llama-2-7b dgx-a100-40",
        "mistral-7b tpu-v4 --devices 16",
        "gpt2 mixed-a100-v100 --global-batch 512 --pin tp=1,cp=1",
    ];
    let file = scratch!("memory-found.json");
    let mut fullest = Vec::new();
    for question in questions {
        let plan = found(&file, question);
        let memory = memory(&file, 0);
        let [needed, capacity] =
            ["needed_bytes", "capacity_bytes"].map(|key| number(&memory["fullest"][key]));
        fullest.push(needed / capacity);
        // The bytes by which the search let it pass.
        let stages = plan["predicted"]["stages"].as_array().unwrap();
        let stage = &stages[memory["fullest"]["stage"].as_u64().unwrap() as usize];
        assert_eq!(number(&stage["peak_memory_bytes"]), needed, "{question}");
        let hosts = stages.iter().any(|stage| stage.get("host_memory_bytes").is_some());
        assert_eq!(memory.get("fullest_node").is_some(), hosts, "{question}: {memory}");
    }
    assert!(fullest.iter().filter(|share| **share > 0.97).count() >= 4, "{fullest:?}");
}

/// On devices that have what it needs a plan passes, on devices with two bytes less it does not; everything else is
/// said of it as before.
#[test]
fn devices_with_too_little_memory_are_told_beside_the_rest() {
    let file = scratch!("memory-device.json");
    let mut plan = tiny(&file);
    let (plain, need) = (planner(&["check", &file, "--json"]), most(&plan).ceil());
    edit(&file, &mut plan, &[(DEVICE, json!(need))]);
    assert_eq!(memory(&file, 0)["fullest"]["capacity_bytes"], json!(need));

    edit(&file, &mut plan, &[(DEVICE, json!(need - 2.0))]);
    let overflow = memory(&file, 3)["overflows"][0].clone();
    assert_eq!(
        (number(&overflow["needed_bytes"]).ceil(), &overflow["capacity_bytes"]),
        (need, &json!(need - 2.0))
    );
    // What `check` says besides is what it said of the plan where it fits.
    let parts = |said: &str| {
        let mut report: Value = serde_json::from_str(said).unwrap();
        report.as_object_mut().unwrap().remove("memory").unwrap();
        report["stages"]
            .as_array_mut()
            .unwrap()
            .iter_mut()
            .for_each(|stage| stage["capacity_bytes"] = json!(0));
        report
    };
    assert_eq!(parts(&planner(&["check", &file, "--json"]).out), parts(&plain.out));
    // And `estimate` refuses it by the same figures.
    let estimated: Value =
        serde_json::from_str(&planner(&["estimate", "--plan", &file, "--json"]).out).unwrap();
    for key in ["stage", "term", "needed_bytes", "capacity_bytes"] {
        assert_eq!(estimated["no_plan"][key], overflow[key], "{estimated}");
    }
}

/// What is said to people, of the fullest stage first.
#[test]
fn what_lacks_and_what_to_do_is_said() {
    let file = scratch!("memory-said.json");
    let mut plan = tiny(&file);
    let need: Vec<f64> =
        [0, 1].map(|at| number(&plan["predicted"]["stages"][at]["peak_memory_bytes"])).to_vec();
    let [first, second] = if need[0] > need[1] { [0, 1] } else { [1, 0] };
    edit(&file, &mut plan, &[(DEVICE, json!(need[second].floor() - 1024.0))]);
    for (command, last) in [("check", "of"), ("verify", "verified, but the plan does not fit in memory")] {
        let said = planner(&[command, &file]);
        assert_eq!(said.code, 3, "{said}");
        let lines: Vec<&str> = said.out.lines().filter(|line| line.contains("DOES NOT FIT: ")).collect();
        assert_eq!(lines.len(), 2, "{said}");
        assert!(
            lines[0].starts_with("memory ") && lines[0].contains(&format!(" on stage {first}, ")),
            "{said}"
        );
        assert!(lines[1].contains(&format!(" on stage {second}, 1.00 KiB too many, most of it ")), "{said}");
        assert!(said.out.lines().any(|line| line.ends_with(last)), "{said}");
        let errors: Vec<&str> = said.err.lines().filter(|line| !line.starts_with("running")).collect();
        assert!(errors[0].starts_with(&format!("error: {file}: the plan does not fit: it needs ")), "{said}");
        assert!(errors[0].contains(&format!(" on stage {first}, most of it ")), "{said}");
        let hint = format!("hint: `planner estimate --plan {file}` names changes that make a plan fit");
        assert_eq!(errors[1..], [hint], "{said}");
        // Who does not mind is told, and the command succeeds.
        let ignored = planner(&[command, &file, "--ignore-memory"]);
        assert_eq!((ignored.code, &ignored.out), (0, &said.out), "{ignored}");
        assert!(!ignored.err.contains("error"), "{ignored}");
    }
}

/// Larger micro-batches keep more for backward.
#[test]
fn a_larger_micro_batch_overflows() {
    let file = scratch!("memory-micro-batch.json");
    let pins = "dp=4,tp=1,cp=1,pp=2,micro-batch=1,zero=1,schedule=1f1b";
    let mut plan = found(&file, &format!("llama-3-8b dgx-h100 --pin {pins}"));
    let (fits, plain) = (memory(&file, 0)["fullest"].clone(), done(&["check", &file, "--json"]).out);
    let larger = json!(4 * plan["micro_batch"].as_u64().unwrap());
    let fewer = json!(plan["n_micro_batches"].as_u64().unwrap() / 4);
    edit(&file, &mut plan, &[("/micro_batch", larger), ("/n_micro_batches", fewer)]);
    let overflow = memory(&file, 3)["overflows"][0].clone();
    let bubble =
        |said: &str| number(&serde_json::from_str::<Value>(said).unwrap()["predicted_bubble_fraction"]);
    assert!(
        bubble(&planner(&["check", &file, "--json"]).out) > 2.0 * bubble(&plain),
        "the figure of the file"
    );
    assert_eq!(overflow["capacity_bytes"], fits["capacity_bytes"]);
    assert!(number(&overflow["needed_bytes"]) > 1.5 * number(&fits["needed_bytes"]), "{overflow}");
    assert!(overflow["term"].as_str().unwrap().starts_with("activations: "), "{overflow}");
}

/// Stages on different devices: the one that needs most bytes is not the one that lacks them.
#[test]
fn the_smaller_devices_of_a_mixed_cluster_overflow() {
    let file = scratch!("memory-mixed.json");
    let pins = "pp=2,dp=16,tp=1,cp=1,micro-batch=4,shares=equal,recompute=none,split-backward=none";
    let mut plan = found(&file, &format!("gpt2 mixed-a100-v100 --global-batch 512 --pin {pins}"));
    let of_stages = |what: &str| [0, 1].map(|at| number(&plan["predicted"]["stages"][at][what]));
    let (need, capacity) = (of_stages("peak_memory_bytes"), of_stages("capacity_bytes"));
    let small = usize::from(capacity[1] < capacity[0]);
    assert!(need[small] < need[1 - small]);
    let groups = plan["cluster"]["groups"].as_array().unwrap();
    let least = |at: &usize| groups[*at]["device"]["memory_bytes"].as_u64();
    let group = (0..groups.len()).min_by_key(least).unwrap();
    let memory_of = format!("/cluster/groups/{group}/device/memory_bytes");
    edit(&file, &mut plan, &[(memory_of.as_str(), json!(0.9 * need[small]))]);
    let overflows = memory(&file, 3)["overflows"].clone();
    let stages: Vec<u64> =
        overflows.as_array().unwrap().iter().map(|one| one["stage"].as_u64().unwrap()).collect();
    assert_eq!(stages, [small as u64], "{overflows}");
    let fullest = format!("Memory is fullest on stage {small}: 111 % of what");
    assert!(done(&["explain", &file]).out.contains(&fullest));
}

/// Hosts and their drives, of plans that put something there.
#[test]
fn hosts_and_drives_with_too_little_memory_are_told() {
    let file = scratch!("memory-host.json");
    let mut plan = found(&file, "llama-3-8b dgx-h100 --devices 1 --pin offload=optimizer");
    let node = memory(&file, 0)["fullest_node"].clone();
    // Of a host's memory a run may take a part.
    let memory_bytes = number(&plan["cluster"]["groups"][0]["host_memory_bytes"]);
    let usable = number(&node["capacity_bytes"]) / memory_bytes;
    assert!((0.5..1.0).contains(&usable), "{node}");
    let scarce = json!((number(&node["needed_bytes"]) / usable).floor() - 2.0);
    edit(&file, &mut plan, &[("/cluster/groups/0/host_memory_bytes", scarce)]);
    let overflows = memory(&file, 3)["overflows"].clone();
    assert_eq!(overflows.as_array().map(Vec::len), Some(1), "{overflows}");
    assert_eq!(overflows[0]["needed_bytes"], node["needed_bytes"]);
    assert_eq!(overflows[0]["term"], "states and activations in the memory of its node's host");

    let cluster = scratch!("memory-drives-cluster.json");
    let node = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/clusters/dgx-h100.json");
    let mut with_drives: Value = serde_json::from_str(&std::fs::read_to_string(node).unwrap()).unwrap();
    with_drives["groups"][0]["nvme"] = json!({"capacity_tb": 30, "read_gb_per_s": 50, "write_gb_per_s": 25});
    edit(&cluster, &mut with_drives, &[]);
    let mut plan = found(&file, &format!("llama-3-8b {cluster} --devices 1 --pin offload=nvme"));
    memory(&file, 0);
    edit(&file, &mut plan, &[("/cluster/groups/0/nvme/capacity_bytes", json!(9e10))]);
    let overflow = memory(&file, 3)["overflows"][0].clone();
    // An fp32 value and two moments of every parameter.
    assert_eq!(number(&overflow["needed_bytes"]), 12.0 * 8_030_261_248.0);
    assert_eq!(overflow["term"], "optimizer states on its node's NVMe drives");
    let said = planner(&["check", &file]);
    assert!(said.err.contains("most of it optimizer states on its node's NVMe drives"), "{said}");
}

/// A bare table has no model and no cluster.
#[test]
fn a_table_alone_is_not_judged() {
    let file = scratch!("memory-table.txt");
    std::fs::write(&file, "F0 F1 B0 B1\nF0 B0 F1 B1\n").unwrap();
    let said: Value = serde_json::from_str(&done(&["check", "--table", &file, "--json"]).out).unwrap();
    assert_eq!(said.get("memory"), None);
}

/// A tied head is the embedding's table where both are on one stage: 18 bytes for each parameter of the model, none
/// twice.
#[test]
fn tied_parameters_are_held_once() {
    let held = |pins: &str| -> Vec<f64> {
        let words = format!("gpt2 dgx-h100 --devices 2 --global-batch 64 --pin tp=1,cp=1,zero=0,{pins}");
        let plan = found(&scratch!("memory-tied.json"), &words);
        let stages = plan["predicted"]["stages"].as_array().unwrap().clone();
        let of = |stage: &Value| -> f64 {
            ["parameters", "gradients", "optimizer"].iter().map(|name| number(&stage["memory"][name])).sum()
        };
        stages.iter().map(of).collect()
    };
    // The table has rows for 50,257 tokens and 47 more, so that it divides.
    let (table, all) = (18.0 * 50_304.0 * 768.0, 18.0 * (124_439_808.0 + 47.0 * 768.0));
    assert_eq!(held("pp=1"), [all]);
    let apart: f64 = held("pp=2,schedule=1f1b").iter().sum();
    assert_eq!(apart, all + table);
}

/// What the closest plan needs, where nothing fits; nobody looks for changes that would make one fit.
#[track_caller]
fn least_needed(request: &Request) -> f64 {
    match planner::optimize_alone(request, Stop::never(), &|_| ()) {
        Err(NoPlan::NothingFits { needed, .. }) => needed.0,
        other => panic!("{other:?}"),
    }
}

/// Where a micro-batch overflows by far, multiples of it that devices split no further are not worked out: they need
/// more. What is told of all is no more than of any.
#[test]
fn multiples_of_a_micro_batch_that_overflows_need_more() {
    let mut asked = question("llama-3-8b", "dgx-h100", 8, 64);
    asked.cluster.groups[0].device.memory_bytes = Bytes(16.0 * GIB);
    let (one, offload) = (Some(1), Some(OffloadKind::None));
    for pp in [1, 2] {
        let of = |micro_batch: Option<u64>| {
            let pins = Pins { tp: one, cp: one, pp: Some(pp), micro_batch, offload, ..Pins::default() };
            least_needed(&Request { pins, ..asked.clone() })
        };
        let each = [1, 2, 4, 8].map(|micro_batch| of(Some(micro_batch)));
        assert!(each.windows(2).all(|two| two[1] > 0.96 * two[0]), "{each:?}");
        let least = of(None);
        assert!(each.iter().all(|needed| least <= *needed), "{least} and {each:?}");
    }
}

/// Where the states of a model alone are more than all devices hold, that is said of what they take, cut over all: what
/// a plan holds that cuts them so. Where there is room for them, of the candidate that comes closest, which holds more.
#[test]
fn what_states_alone_take_is_what_a_plan_holds_that_cuts_them_over_all_devices() {
    let needed = |model: &str, precision: Precision, memory_bytes: f64| {
        let mut asked = question(model, "dgx-h100", 8, 64);
        asked.cluster.groups[0].device.memory_bytes = Bytes(memory_bytes);
        let (one, zero, offload) = (Some(1), Some(3), Some(OffloadKind::None));
        let pins = Pins { offload, zero, pp: one, tp: one, cp: one, ..Pins::default() };
        least_needed(&Request { job: Job { precision, ..asked.job }, pins, ..asked })
    };
    // What is not states is on all devices alike.
    let mut reserved: Vec<f64> = Vec::new();
    for (model, precision) in
        [("llama-3-8b", Precision::Bf16), ("llama-2-7b", Precision::Bf16), ("llama-3-8b", Precision::Fp32)]
    {
        let pins = "offload=none,zero=3,pp=1,tp=1,cp=1";
        let job = format!("{model} dgx-h100 --global-batch 64 --precision {} --pin {pins}", precision.name());
        let plan = found(&scratch!("memory-cut.json"), &job);
        let memory = &plan["predicted"]["stages"][0]["memory"];
        let states: f64 =
            ["parameters", "gradients", "optimizer"].iter().map(|name| number(&memory[name])).sum();
        let needed = |memory_bytes: f64| needed(model, precision, memory_bytes);
        let least = needed(12.0 * GIB);
        reserved.push(least - states);
        assert_eq!(needed(0.999 * least), least, "{job}");
        assert!(needed(1.01 * least) > 1.01 * least, "{job}");
    }
    let differs = |one: &f64| (one - reserved[0]).abs() > 1e6;
    assert!(reserved[0] > 1e9 && !reserved.iter().any(differs), "{reserved:?}");
}
