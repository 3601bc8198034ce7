//! Broken files: each gives one error that names file, place and remedy, and exit code 2, quickly.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use std::path::PathBuf;

use serde_json::{Value, json};
use tests::planner;

/// What a command says of every file of a folder.
#[track_caller]
fn complaints(command: &str, folder: &str) -> String {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let complaints: Vec<String> =
        files.iter().map(|file| complaint(&[command, &file.to_string_lossy()])).collect();
    format!("{} files\n\n{}", files.len(), complaints.join("\n"))
}

#[track_caller]
fn complaint(words: &[&str]) -> String {
    let said = planner(words);
    assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
    assert!(said.err.starts_with("error: ") && said.err.lines().count() <= 2, "{said}");
    said.err
}

#[test]
fn broken_models_are_refused() {
    insta::assert_snapshot!(complaints("models", "bad/models"));
}

#[test]
fn broken_clusters_are_refused() {
    insta::assert_snapshot!(complaints("clusters", "bad/clusters"));
}

#[test]
fn broken_plans_are_refused() {
    insta::assert_snapshot!(complaints("explain", "bad/plans"));
}

/// A good plan to be spoilt.
fn good_plan() -> Value {
    let said = planner(&[
        "optimize",
        "good/tiny.json",
        "good/cluster.json",
        "--devices",
        "8",
        "--global-batch",
        "64",
        "--pin",
        "dp=4,pp=2,micro-batch=4,zero=1,recompute=none,schedule=1f1b",
        "--json",
    ]);
    serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// Edits of a good plan: a name, the places and their new values.
fn edits() -> Vec<(&'static str, Vec<(&'static str, Value)>)> {
    vec![
        ("another version", vec![("/schema_version", json!(2))]),
        ("too many devices on an axis", vec![("/mesh/axes/0/size", json!(64))]),
        ("an axis of no devices", vec![("/mesh/axes/0/size", json!(0))]),
        ("absurd axis", vec![("/mesh/axes/0/size", json!(1_u64 << 62))]),
        ("a degree that divides nothing", vec![("/mesh/axes/0/size", json!(3))]),
        ("an axis without a name", vec![("/mesh/axes/0/name", json!(""))]),
        ("too many stages", vec![("/n_stages", json!(1000))]),
        ("no stages", vec![("/n_stages", json!(0))]),
        ("another number of stages than of chunks", vec![("/n_stages", json!(1))]),
        ("micro-batches that do not make up the batch", vec![("/n_micro_batches", json!(3))]),
        ("no micro-batches", vec![("/n_micro_batches", json!(0))]),
        ("a batch of nothing", vec![("/job/global_batch", json!(0))]),
        ("an absurd sequence", vec![("/job/sequence", json!(u64::MAX))]),
        ("a negative sequence", vec![("/job/sequence", json!(-1))]),
        ("an unknown precision", vec![("/job/precision", json!("int3"))]),
        ("an unknown schedule", vec![("/schedule", json!("zigzag"))]),
        (
            "micro-batches that the interleaved schedule cannot order",
            vec![
                ("/schedule", json!({"interleaved": {"virtual_stages": 1}})),
                ("/n_micro_batches", json!(1)),
                ("/micro_batch", json!(64)),
            ],
        ),
        ("an entry of an unknown layer", vec![("/entries/0/layer", json!("attention"))]),
        ("an unknown operator", vec![("/entries/1/ops/1/op", json!("sideways"))]),
        ("a loop that the operator lacks", vec![("/entries/1/ops/1/axes/0", json!("q"))]),
        (
            "an operator that is not linear lets a sum through",
            vec![("/entries/1/ops/2/axes/0", json!("through"))],
        ),
        ("too many words for the axes", vec![("/entries/1/ops/1/axes", json!(["b", "b", "b", "b", "b"]))]),
        ("a stream in an unknown dim", vec![("/entries/1/stream", json!("q@x0"))]),
        ("a stream that arrives otherwise", vec![("/entries/1/stream", json!("replicated"))]),
        ("a loss in parts", vec![("/entries/2/out", json!("sum@x0"))]),
        (
            "storage on an axis that does not exist",
            vec![("/entries/1/parameters/0/optimizer", json!(["x9"]))],
        ),
        (
            "storage on an axis that the operator cuts already",
            vec![
                ("/entries/1/ops/1/axes/0", json!("f")),
                ("/entries/1/parameters/0/parameter", json!(["x0"])),
            ],
        ),
        (
            "an optimizer state that does not hold the gradient",
            vec![
                ("/entries/1/parameters/0/optimizer", json!([])),
                ("/entries/1/parameters/0/gradient", json!(["x0"])),
            ],
        ),
        ("a parameter that is not there", vec![("/entries/1/parameters/0/tensor", json!("w9"))]),
        ("a chunk of an unknown entry", vec![("/chunks/0/0/entry", json!(9))]),
        ("layers out of order", vec![("/chunks/0/0/entry", json!(1))]),
        ("a layer too many", vec![("/chunks/0/1/count", json!(40))]),
        ("no layers in a run", vec![("/chunks/0/1/count", json!(0))]),
        ("an empty chunk", vec![("/chunks/0", json!([]))]),
        ("figures of other stages", vec![("/predicted/stages", json!([]))]),
        ("a model with an unknown tensor", vec![("/model/layers/1/out", json!("nothing"))]),
        ("a model with absurd layers", vec![("/model/sequence/1/count", json!(u64::MAX))]),
        ("a tie to nowhere", vec![("/model/ties/0/owner", json!("nowhere.w"))]),
        ("tied parameters in different storage", vec![("/entries/0/parameters/0/optimizer", json!([]))]),
        ("an unknown key", vec![("/colour", json!("red"))]),
        ("an unknown key of a link", vec![("/cluster/tiers/0/colour", json!("red"))]),
        ("an unknown key of a device", vec![("/cluster/groups/0/device/colour", json!("red"))]),
        ("an unknown key of an axis", vec![("/mesh/axes/0/colour", json!("red"))]),
        ("an unknown key of an operator", vec![("/model/layers/1/ops/0/kind/colour", json!("red"))]),
        (
            "an unknown key of a group's own link",
            vec![("/cluster/groups/0/links", json!([{ "colour": "red" }]))],
        ),
    ]
}

/// Puts a value where a path of keys and indices leads; the last key may be new.
fn put(document: &mut Value, path: &str, value: Value) {
    let (parent, key) = path.rsplit_once('/').unwrap();
    match document.pointer_mut(parent).unwrap_or_else(|| panic!("no {parent}")) {
        Value::Object(map) => _ = map.insert(key.into(), value),
        Value::Array(list) => list[key.parse::<usize>().unwrap()] = value,
        other @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) => {
            panic!("{path}: {other}")
        }
    }
}

/// Line and column depend on all that the search put before them.
fn without_position(text: &str) -> String {
    let Some((before, after)) = text.split_once("plan.json:") else { return text.to_owned() };
    let place = after.trim_start_matches(|c: char| c.is_ascii_digit() || c == ':');
    format!("{before}plan.json:{place}")
}

#[test]
fn plans_that_were_edited_wrongly_are_refused() {
    let good = good_plan();
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("plan.json");
    let file = path.to_string_lossy();
    let mut said = Vec::new();
    for (name, changes) in edits() {
        let mut bad = good.clone();
        for (place, value) in changes {
            put(&mut bad, place, value);
        }
        #[expect(clippy::disallowed_methods, reason = "a test of files")]
        std::fs::write(&path, serde_json::to_string_pretty(&bad).unwrap()).unwrap();
        for command in ["explain", "verify"] {
            let text = without_position(&complaint(&[command, &file]).replace(&*file, "plan.json"));
            if command == "explain" {
                said.push(format!("# {name}\n{text}"));
            }
        }
    }
    insta::assert_snapshot!(said.join("\n"));
}
