//! The page of predictions against published runs is what the code says; a calibration moves prices as it should.
//!
//! `UPDATE_DOCS=1 cargo test -p tests validation::` writes the page anew.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own files has failed")]
#![expect(clippy::print_stdout, reason = "the worst rows are what its reader looks for")]
#![expect(clippy::disallowed_methods, reason = "the page, runs and calibrations are files")]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tests::{hold_current, planner};

fn done(words: &[&str]) -> String {
    let said = planner(words);
    assert_eq!(said.code, 0, "{said}");
    said.out
}

fn scratch(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

#[test]
fn the_page_is_current() {
    let now = done(&["validate", "--markdown"]);
    println!("farthest off{}", now.split("## Farthest off").nth(1).unwrap_or_default());
    hold_current("validation.md", &now);
}

#[test]
fn the_page_of_measurements_is_current() {
    hold_current("measured.md", &done(&["validate", "--measured", "--markdown"]));
}

#[test]
fn measurements_are_listed_where_they_are_asked_for() {
    let found: Value = serde_json::from_str(&done(&["validate", "--measured", "--json"])).unwrap();
    let all = |part: &str| found[part].as_array().unwrap().len();
    assert_eq!((all("steps"), all("layers")), (37, 35));
    let (short, long) = (done(&["validate", "--measured"]), done(&["validate", "--measured", "--rows"]));
    assert!(!short.contains("llama-7b") && long.contains("llama-7b eager flash-2 full 4096x2x8"), "{long}");
    let said = planner(&["validate", "--measured", "--memory"]);
    assert_eq!(said.code, 2, "{said}");
}

/// What libraries an engine has moves the price of Hopper alone.
#[test]
fn libraries_of_before_2025_are_slower_on_hopper() {
    let step = |cluster: &str, engine: &str| {
        let words =
            ["estimate", "llama-3-8b", cluster, "--devices", "8", "--tp", "8", "--engine", engine, "--json"];
        serde_json::from_str::<Value>(&done(&words)).unwrap()["step_time_s"].as_f64().unwrap()
    };
    for cluster in ["dgx-h100", "dgx-h200"] {
        let ratio = step(cluster, "generation=before-2025") / step(cluster, "default");
        assert!((1.1..1.3).contains(&ratio), "{cluster}: {ratio}");
    }
    for cluster in ["dgx-a100-80", "gb200-nvl72"] {
        assert_eq!(step(cluster, "generation=before-2025"), step(cluster, "default"), "{cluster}");
    }
}

const SOURCE: &str = "megatron-sc21";

/// Mean error of a source, with or without a calibration.
fn mean_error(calibration: Option<&str>) -> f64 {
    let mut words = vec!["validate", "--source", SOURCE, "--json"];
    words.extend(calibration.into_iter().flat_map(|file| ["--calibration", file]));
    let found: Value = serde_json::from_str(&done(&words)).unwrap();
    found["mean_over_sources"].as_f64().unwrap()
}

/// Runs of a source as a user would have them, every measured time 20 % longer than it was.
fn slow_runs(file: &Path) {
    let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/published/training.csv");
    let table = fs::read_to_string(table).unwrap();
    let mut reader = csv_lines(&table);
    let head = reader.next().unwrap();
    let time = head.iter().position(|name| name == "step_s").unwrap();
    let mut text = head.join(",") + "\n";
    for mut row in reader.filter(|row| row.iter().any(|cell| cell == SOURCE)).take(3) {
        row[time] = (row[time].parse::<f64>().unwrap() * 1.2).to_string();
        text += &(row.join(",") + "\n");
    }
    fs::write(file, text).unwrap();
}

fn csv_lines(text: &str) -> impl Iterator<Item = Vec<String>> + '_ {
    text.lines().map(|line| line.split(',').map(str::to_owned).collect())
}

#[test]
fn a_calibration_by_slow_runs_makes_every_price_longer() {
    let (runs, file) = (scratch("slow-runs.csv"), scratch("slow-calibration.json"));
    slow_runs(&runs);
    let (runs, file) = (runs.to_str().unwrap(), file.to_str().unwrap());
    done(&["calibrate", "--runs", runs, "-o", file]);
    let found: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    assert_eq!(found["provenance"].as_array().unwrap().len(), 3, "{found}");

    // Runs that took a fifth longer than the source's own rows: against those rows the calibrated prices are too long.
    let (shipped, slow) = (mean_error(None), mean_error(Some(file)));
    assert!(slow > shipped + 0.1 && slow < 0.3, "{shipped} {slow}");

    let question =
        ["gpt3-175b", "dgx-a100-80", "--nodes", "16", "--tp", "8", "--pp", "8", "--micro-batch", "1"];
    let estimate = |more: &[&str]| {
        let words: Vec<&str> = ["estimate"].iter().chain(&question).chain(more).copied().collect();
        serde_json::from_str::<Value>(&done(&words)).unwrap()
    };
    let before = estimate(&["--json"]);
    let after = estimate(&["--json", "--calibration", file]);
    let ratio = after["step_time_s"].as_f64().unwrap() / before["step_time_s"].as_f64().unwrap();
    assert!((1.1..1.3).contains(&ratio), "{ratio}");
    assert!(before.get("calibration").is_none(), "{before}");
    assert_eq!(after["calibration"]["provenance"], found["provenance"]);
}

#[test]
fn a_plan_keeps_the_calibration_it_was_found_with() {
    let (file, plan) = (scratch("half.json"), scratch("half-plan.json"));
    let calibration = json!({
        "schema_version": 1, "tool_version": "0", "provenance": ["a bench of ours"],
        "constants": {"gemm_efficiency_fraction_of_peak.hopper.bf16": 0.35},
    });
    fs::write(&file, calibration.to_string()).unwrap();
    let (file, plan) = (file.to_str().unwrap(), plan.to_str().unwrap());
    let question = ["optimize", "llama-3-8b", "dgx-h100", "--pin", "tp=1,pp=1,zero=3", "--json"];
    let time = |words: &[&str]| {
        let found: Value = serde_json::from_str(&done(words)).unwrap();
        let predicted = found.get("predicted").unwrap_or(&found);
        predicted["step_time_s"].as_f64().unwrap()
    };
    let shipped = time(&question);
    let words: Vec<&str> = question.iter().copied().chain(["--calibration", file, "-o", plan]).collect();
    let measured = time(&words);
    assert!(measured > 1.2 * shipped, "{shipped} {measured}");
    assert_eq!(time(&["estimate", "--plan", plan, "--json"]), measured);
    let text = done(&["estimate", "--plan", plan]);
    assert!(text.contains("1 constant from a bench of ours"), "{text}");
}

#[test]
fn a_broken_calibration_is_told() {
    let file = scratch("broken.json");
    let mut told = String::new();
    let whole = r#"{"schema_version": 1, "tool_version": "0", "provenance": [], "constants": {}}"#;
    for (from, to) in [
        ("{}", r#"{"speed": 1}"#),
        ("{}", r#"{"memory_efficiency_fraction": 7}"#),
        ("version\": 1", "version\": 9"),
        ("\"constants\"", "\"konstants\""),
        (whole, ""),
    ] {
        fs::write(&file, whole.replace(from, to)).unwrap();
        let file = file.to_str().unwrap();
        let said = planner(&["estimate", "llama-3-8b", "dgx-h100", "--calibration", file]);
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
        told += &said.err.replace(file, "broken.json");
    }
    insta::assert_snapshot!(told);
}

#[test]
fn runs_of_ones_own_are_priced_like_published_ones() {
    let runs = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/published/unseen.csv");
    let own: Value = serde_json::from_str(&done(&["validate", "--runs", runs, "--json"])).unwrap();
    let one = |of: &Value| {
        let sources = of["unseen"].as_array().unwrap().clone();
        sources.into_iter().find(|source| source["name"] == "tinyllama").unwrap()
    };
    let shipped = done(&["validate", "--source", "tinyllama", "--json"]);
    assert_eq!(one(&own), one(&serde_json::from_str(&shipped).unwrap()));
    let said = planner(&["validate", "--runs", "no-such-runs.csv"]);
    assert_eq!((said.code, said.err.contains("no-such-runs.csv")), (2, true), "{said}");
    // Of a device that nobody knows nothing can be priced.
    let text = fs::read_to_string(runs).unwrap();
    let tinyllama = text.lines().find(|line| line.contains("tinyllama")).unwrap();
    let unknown = Path::new(env!("CARGO_TARGET_TMPDIR")).join("unknown-device.csv");
    let device = tinyllama.split(',').find(|cell| cell.starts_with("a100")).unwrap();
    let header = text.lines().next().unwrap();
    fs::write(&unknown, format!("{header}\n{}\n", tinyllama.replace(device, "z100"))).unwrap();
    let said = planner(&["validate", "--runs", unknown.to_str().unwrap()]);
    assert_eq!((said.code, said.err.contains("no run could be priced: ")), (2, true), "{said}");
}

/// Step time and energy of one sequence per device on a node.
fn estimated(cluster: &str, engine: &str) -> (f64, f64) {
    let question = ["llama-3-8b", cluster, "--zero", "3", "--recompute", "full", "--global-batch", "16"];
    let words: Vec<&str> =
        ["estimate"].into_iter().chain(question).chain(["--engine", engine, "--json"]).collect();
    let found: Value = serde_json::from_str(&done(&words)).unwrap();
    (found["step_time_s"].as_f64().unwrap(), found["energy_per_step_joules"].as_f64().unwrap())
}

#[test]
fn an_operators_cap_on_power_costs_time_and_saves_energy() {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/clusters/dgx-h100.json");
    let mut capped: Value = serde_json::from_str(&fs::read_to_string(shipped).unwrap()).unwrap();
    capped["groups"][0]["watts_per_device"] = 500.into();
    let file = scratch("capped.json");
    fs::write(&file, capped.to_string()).unwrap();
    let (free, held) = (estimated("dgx-h100", "default"), estimated(file.to_str().unwrap(), "default"));
    assert!((1.05..1.15).contains(&(held.0 / free.0)), "{held:?} {free:?}");
    assert!(held.1 < free.1, "{held:?} {free:?}");
}

#[test]
fn what_is_put_together_from_several_kernels_takes_longer_than_one_that_is_fused() {
    let time = |kernels: &str| estimated("dgx-h100", &format!("fsdp,kernels={kernels}")).0;
    let (fused, libraries, eager) = (time("fused"), time("libraries"), time("eager"));
    assert!(fused < libraries && libraries < eager && eager < 1.4 * fused, "{fused} {libraries} {eager}");
}

/// What nccl-tests print of eight ranks of one node, at so many GB/s of bus bandwidth.
fn nccl_log(gb_per_s: f64) -> String {
    let mut text = "# Collective test starting: all_gather_perf\n# Using devices\n".to_owned();
    for rank in 0..8 {
        text += &format!(
            "#  Rank  {rank} Group  0 Pid   1887 on   worker-1 device  {rank} [0x8d] NVIDIA H100 80GB HBM3\n"
        );
    }
    text += "#       size         count      type   redop    root     time   algbw   busbw #wrong\n";
    for power in 20..34 {
        let bytes = 1_u64 << power;
        let us = 40.0 + bytes as f64 * 7.0 / 8.0 / (gb_per_s * 1e3);
        let rate = bytes as f64 / us * 1e-3;
        let rates = format!("{rate:.2} {:.2}", rate * 7.0 / 8.0);
        text += &format!("{bytes:12} {:12}  float    none      -1 {us:.2}  {rates}  0\n", bytes / 4);
    }
    text
}

#[test]
fn a_calibration_by_benchmarks_moves_the_rates_of_products_and_links() {
    let (gemm, log, file) = (scratch("gemm.csv"), scratch("gather.log"), scratch("bench-calibration.json"));
    // The published products of H100, at half of their speed; links at 315 of 450 GB/s.
    let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/published/components.csv");
    let table = fs::read_to_string(table).unwrap();
    let mut rows = csv_lines(&table);
    let head = rows.next().unwrap();
    let at = |name: &str| head.iter().position(|column| column == name).unwrap();
    let mut text = "precision,m,n,k,time_us\n".to_owned();
    for row in rows {
        let is_own = [("kind", "gemm"), ("device", "h100-sxm"), ("precision", "bf16")]
            .iter()
            .all(|(column, value)| row[at(column)] == *value);
        if is_own {
            let us = 2.0 * row[at("time_us")].parse::<f64>().unwrap();
            text += &format!("bf16,{},{},{},{us}\n", row[at("m")], row[at("n")], row[at("k")]);
        }
    }
    fs::write(&gemm, text).unwrap();
    fs::write(&log, nccl_log(315.0)).unwrap();
    let (gemm, log, file) = (gemm.to_str().unwrap(), log.to_str().unwrap(), file.to_str().unwrap());
    done(&["calibrate", "--gemm", gemm, "--nccl", log, "--cluster", "dgx-h100", "-o", file]);
    let found: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let constant = |name: &str| found["constants"][name].as_f64().unwrap();
    let rate = constant("gemm_efficiency_fraction_of_peak.hopper.bf16") / 0.7;
    assert!((0.45..0.55).contains(&rate), "{found}");
    let links = constant("node_link_efficiency_fraction");
    assert!((0.69..0.71).contains(&links), "{found}");
    assert_eq!(found["provenance"].as_array().unwrap().len(), 2, "{found}");

    let step = |more: &[&str]| {
        let words = [&["estimate", "llama-3-8b", "dgx-h100", "--tp", "8", "--json"], more].concat();
        serde_json::from_str::<Value>(&done(&words)).unwrap()["step_time_s"].as_f64().unwrap()
    };
    assert!(step(&["--calibration", file]) > 1.4 * step(&[]));

    // Links of 450 GB/s are no links of 25 GB/s.
    let other = planner(&["calibrate", "--nccl", log, "--cluster", "rtx4090-x8"]);
    assert_eq!(other.code, 2);
    assert!(
        other.err.contains("no value of node_link_efficiency_fraction comes near these times"),
        "{other}"
    );
    let wrong = planner(&["calibrate", "--nccl", gemm, "--cluster", "dgx-h100"]);
    assert_eq!(wrong.code, 2);
    assert!(wrong.err.contains("no line of nccl-tests with a size and times"), "{wrong}");
}

/// A column and what stands there instead.
type Cell<'a> = (&'a str, &'a str);

/// A table with the first row of a source, some of its cells replaced, as often as there are names for it.
fn first_run(file: &Path, cells: &[Cell<'_>], names: &[&str]) -> String {
    let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/published/training.csv");
    let table = fs::read_to_string(table).unwrap();
    let mut reader = csv_lines(&table);
    let head = reader.next().unwrap();
    let first = reader.find(|row| row.iter().any(|cell| cell == SOURCE)).unwrap();
    let mut text = head.join(",") + "\n";
    for name in names {
        let mut row = first.clone();
        for (column, cell) in cells.iter().chain(&[("id", *name)]) {
            let at = head.iter().position(|name| name == column).unwrap();
            (*cell).clone_into(&mut row[at]);
        }
        text += &(row.join(",") + "\n");
    }
    fs::write(file, text).unwrap();
    file.to_string_lossy().into_owned()
}

#[test]
fn runs_that_cannot_be_fitted_to_are_refused() {
    let one: &[&str] = &["one"];
    let cases: [(&[Cell<'_>], &[&str], &str); 8] = [
        (&[("step_s", "inf")], one, "step_s: expected seconds above 0, from 1e-9 to 1e9, found inf"),
        (&[("step_s", "")], one, "one: step_s: expected seconds above 0, found nothing"),
        (&[("step_s", "fast")], one, "column step_s: "),
        (&[("step_s", "0.001")], one, "no constants come near these runs"),
        (&[("oom", "1")], one, "one: column oom: 1 is a run that died of memory"),
        (&[("dp", "")], one, "one: column dp: expected a number, found nothing"),
        (&[], &[""], "row 1: column id: expected a name, found nothing"),
        (&[], &["one", "one"], "one: column id: two runs have this name"),
    ];
    for (cells, names, what) in cases {
        let file = first_run(&scratch("unfit-runs.csv"), cells, names);
        let said = planner(&["calibrate", "--runs", &file]);
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{cells:?}: {said}");
        assert!(said.err.contains(what), "{cells:?}: {said}");
    }
}

#[test]
fn a_run_alone_is_followed_in_part_and_repeats_of_it_nearly_whole() {
    let file = scratch("lone-run.csv");
    // Measured a tenth above what is predicted for it.
    let predicted = {
        let file = first_run(&file, &[], &["one"]);
        let found: Value =
            serde_json::from_str(&done(&["validate", "--runs", &file, "--rows", "--json"])).unwrap();
        found["sources"][0]["rows"][0]["predicted_s"].as_f64().unwrap()
    };
    let left = |names: &[&str]| {
        let time = (predicted * 1.1).to_string();
        let file = first_run(&file, &[("step_s", &time)], names);
        let said = planner(&["calibrate", "--runs", &file]);
        assert_eq!(said.code, 0, "{said}");
        let after = said.err.split("before, ").nth(1).unwrap().split(" %").next().unwrap();
        (after.parse::<f64>().unwrap(), said.err.contains("note: a run alone"))
    };
    let (alone, is_told) = left(&["one"]);
    assert!(alone > 2.0 && alone < 6.0 && is_told, "{alone}");
    let (three, is_told) = left(&["one", "two", "three"]);
    assert!(three < 1.5 && !is_told, "{three}");
}
