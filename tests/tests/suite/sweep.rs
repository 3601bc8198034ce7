//! Sweeps go on where they were stopped, and say what single questions say; fronts are what nothing beats.

#![expect(clippy::disallowed_methods, reason = "a test of files")]

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use planner_cli::{Interrupt, ProgressBar, Terminal, exit_code, run};
use serde_json::Value;
use tests::{done, json, planner};

const SWEEP: &[&str] = &[
    "sweep",
    "gpt2",
    "dgx-h100",
    "--global-batch",
    "64",
    "--over",
    "devices=2,4",
    "--over",
    "seq-len=512,1024",
];

fn scratch(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_file(&path);
    path.to_string_lossy().into_owned()
}

#[test]
fn a_point_of_a_sweep_is_the_question_asked_alone() {
    let rows = json(SWEEP);
    let rows = rows.as_array().unwrap();
    let points: Vec<(f64, f64)> = rows
        .iter()
        .map(|row| (row["point"]["devices"].as_f64().unwrap(), row["point"]["seq-len"].as_f64().unwrap()))
        .collect();
    assert_eq!(points, [(2.0, 512.0), (2.0, 1024.0), (4.0, 512.0), (4.0, 1024.0)]);
    for (row, (devices, sequence)) in rows.iter().zip(points) {
        let (devices, sequence) = (devices.to_string(), sequence.to_string());
        let alone = [
            "optimize",
            "gpt2",
            "dgx-h100",
            "--global-batch",
            "64",
            "--devices",
            &devices,
            "--seq-len",
            &sequence,
        ];
        let plan = json(&alone);
        assert_eq!(row["plan"]["step_time_s"], plan["predicted"]["step_time_s"]);
        assert_eq!(row["plan"]["peak_memory_bytes"], plan["predicted"]["peak_memory_bytes"]);
    }
}

#[test]
fn a_sweep_that_is_stopped_gives_the_points_that_it_has() {
    let file = scratch("stopped.jsonl");
    let batches = (1..400).map(|n| (8 * n).to_string()).collect::<Vec<_>>().join(",");
    let over = format!("global-batch={batches}");
    let words =
        ["planner", "sweep", "gpt2", "dgx-h100", "--devices", "2", "--over", &over, "--json", "-o", &file];
    let (mut out, mut err, interrupt) = (Vec::new(), Vec::new(), Interrupt::new());
    let mut terminal =
        Terminal { out: &mut out, err: &mut err, progress: ProgressBar::Hidden, interrupt: &interrupt };
    let is_done = AtomicBool::new(false);
    let code = std::thread::scope(|threads| {
        // It is heard only once the first point is asked.
        threads.spawn(|| while !interrupt.raise() && !is_done.load(Ordering::SeqCst) {});
        let code = run(words.map(OsString::from), &mut terminal);
        is_done.store(true, Ordering::SeqCst);
        code
    });
    assert_eq!(code, exit_code::INTERRUPTED);
    let err = String::from_utf8(err).unwrap();
    assert!(err.contains("of 399 points are worked out"), "{err}");
    let rows: Value = serde_json::from_slice(&out).unwrap();
    assert!(rows.as_array().unwrap().len() < 399);
    let kept = fs::read_to_string(&file).unwrap();
    assert_eq!(kept.lines().count(), rows.as_array().unwrap().len());
}

#[test]
fn a_point_that_cannot_be_asked_says_why_beside_the_others() {
    let rows = json(&["sweep", "gpt2", "dgx-h100", "--global-batch", "64", "--over", "devices=2,12"]);
    assert!(rows[0]["plan"]["step_time_s"].as_f64() > Some(0.0), "{rows}");
    let why = rows[1]["no_plan"].as_str().unwrap_or_default();
    assert!(why.contains("12") && rows[1]["plan"].is_null(), "{rows}");
}

#[test]
fn a_sweep_that_was_stopped_in_the_middle_of_a_line_goes_on() {
    let file = scratch("half-a-line.jsonl");
    let whole = done(&[SWEEP, &["-o", &file]].concat());
    let text = fs::read_to_string(&file).unwrap();
    assert_eq!(text.lines().count(), 4);
    // Stopped while the third line was written.
    let third = text.match_indices('\n').nth(1).unwrap().0 + 20;
    fs::write(&file, &text[..third]).unwrap();
    let again = done(&[SWEEP, &["-o", &file]].concat());
    assert!(again.err.contains("2 of 4 points are in the file already"), "{again}");
    assert_eq!((again.out, fs::read_to_string(&file).unwrap()), (whole.out, text.clone()));
    // What is there is not asked again, and another question has lines of its own.
    assert!(done(&[SWEEP, &["-o", &file]].concat()).err.contains("4 of 4 points"));
    assert_eq!(fs::read_to_string(&file).unwrap(), text);
    let other = done(&[SWEEP, &["-o", &file, "--pin", "zero=1"]].concat());
    assert!(!other.err.contains("already"), "{other}");
    assert_eq!(fs::read_to_string(&file).unwrap().lines().count(), 8);
}

#[test]
fn a_question_that_another_sweep_has_asked_by_other_numbers_is_shown_with_these() {
    let file = scratch("nodes-and-devices.jsonl");
    let sweep = ["sweep", "gpt2", "dgx-h100", "--global-batch", "32", "-o", &file, "--over"];
    let by_nodes = done(&[&sweep[..], &["nodes=1"]].concat());
    let by_devices = done(&[&sweep[..], &["devices=8"]].concat());
    assert!(by_devices.err.contains("1 of 1 points are in the file already"), "{by_devices}");
    let last = |said: &str| said.lines().last().unwrap().trim().to_owned();
    let (nodes, devices) = (last(&by_nodes.out), last(&by_devices.out));
    assert_eq!(nodes.strip_prefix('1'), devices.strip_prefix('8'), "{by_nodes}{by_devices}");
}

#[test]
fn faster_links_and_larger_devices_never_make_a_plan_slower() {
    let over = |what: &str| {
        let words = [
            "sweep",
            "llama-3-8b",
            "dgx-h100",
            "--devices",
            "8",
            "--global-batch",
            "32",
            "--pin",
            "dp=2",
            "--over",
            what,
        ];
        let rows = json(&words);
        let time = |row: &Value| row["plan"]["step_time_s"].as_f64().unwrap_or(f64::INFINITY);
        rows.as_array().unwrap().iter().map(time).collect::<Vec<f64>>()
    };
    for what in ["bandwidth.nvlink=100,200,450,900", "memory=20,40,80,141"] {
        let times = over(what);
        assert!(times[3].is_finite() && times.windows(2).all(|pair| pair[1] <= pair[0]), "{what}: {times:?}");
    }
}

#[test]
fn nothing_on_a_front_is_beaten_and_no_time_is_lost() {
    let words = [
        "pareto",
        "llama-3-8b",
        "dgx-h100",
        "--global-batch",
        "16",
        "--try-devices",
        "4,8",
        "--try-memory",
        "40,80",
    ];
    let answer = json(&words);
    let front = answer["front"].as_array().unwrap();
    let outcome = |row: &Value| {
        ["step_time_s", "peak_memory_bytes", "n_devices"].map(|name| row["plan"][name].as_f64().unwrap())
    };
    assert!(front.len() >= 2, "{answer}");
    for a in front {
        for b in front.iter().filter(|b| *b != a) {
            assert!(outcome(a).iter().zip(outcome(b)).any(|(a, b)| *a < b), "{a} and {b}");
        }
    }
    let best = json(&["optimize", "llama-3-8b", "dgx-h100", "--global-batch", "16"]);
    assert_eq!(front[0]["plan"]["step_time_s"], best["predicted"]["step_time_s"]);
    assert!(
        done(&words).out.contains("of 4 points worked out have no better in step time, peak memory, devices")
    );
}

#[test]
fn what_cannot_be_swept_over_is_named() {
    let sweep = ["sweep", "gpt2", "dgx-h100", "--over"];
    for (over, words) in [
        ("devices", "expected `name=number,...`"),
        ("devices=8,many", "expected a number above 0, at most 1e15, found `many`"),
        ("devices=2.5", "is no count"),
        ("seq-len=0", "expected a number above 0"),
        ("tp=2", "there is no `tp` to change"),
        ("bandwidth.ethernet=10", "it has nvlink, infiniband"),
        ("devices=12", "12 devices do not fill"),
    ] {
        let said = planner(&[&sweep[..], &[over]].concat());
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
        assert!(said.err.contains(words), "{said}");
    }
    let file = scratch("no-sweep.jsonl");
    // Without an end of the line it is no half line of a sweep either, and stays as it is.
    let figures = r#""roles":"","n_devices":1,"step_time_s":-1.0,"mfu":0.1,"tokens_per_s":1.0,"peak_memory_bytes":1.0,"gap":0.0"#;
    let impossible = format!("{{\"question\":\"q\",\"point\":{{}},\"plan\":{{{figures}}}}}\n");
    let nothing = "{\"question\":\"q\",\"point\":{}}\n";
    for content in ["{\"schema_version\": 1}\n", "{\"model_type\": \"llama\"}", &impossible, nothing] {
        fs::write(&file, content).unwrap();
        let said = planner(&[SWEEP, &["-o", &file]].concat());
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
        assert!(said.err.contains("no-sweep.jsonl:1:") && said.err.contains("no result"), "{said}");
        assert_eq!(fs::read_to_string(&file).unwrap(), content);
    }
}

#[test]
fn a_sweep_for_energy_asks_at_every_point_as_optimize_does() {
    let question = ["gpt2", "dgx-h100", "--global-batch", "64", "--devices", "4", "--objective", "energy"];
    let rows = json(&[&["sweep"], &question[..], &["--over", "seq-len=512,1024"]].concat());
    for (row, length) in rows.as_array().unwrap().iter().zip(["512", "1024"]) {
        let plan = json(&[&["optimize"], &question[..], &["--seq-len", length]].concat());
        let energy = &row["plan"]["energy_per_step_joules"];
        assert_eq!(*energy, plan["predicted"]["energy_per_step_joules"]);
        assert!(energy.as_f64().unwrap() > 0.0);
        let devices = plan["cluster"]["groups"][0]["count"].as_f64();
        assert_eq!(row["plan"]["n_devices"].as_f64(), devices);
    }
}

#[test]
fn a_front_for_energy_is_in_its_order_and_compares_it() {
    let question = ["pareto", "gpt2", "dgx-h100", "--global-batch", "64", "--objective", "energy"];
    let front = json(&[&question[..], &["--try-devices", "2,4", "--try-memory", "80"]].concat());
    assert_eq!(front["objectives"][3], "energy of a step");
    let energies = front["front"].as_array().unwrap().iter();
    let energies: Vec<f64> =
        energies.map(|row| row["plan"]["energy_per_step_joules"].as_f64().unwrap()).collect();
    assert!(energies.is_sorted() && energies.len() == 2, "{energies:?}");
}

#[test]
fn a_front_without_a_plan_is_no_answer() {
    let said = planner(&["pareto", "gpt3-175b", "dgx-h100", "--try-devices", "1", "--try-memory", "40"]);
    assert_eq!(said.code, 3, "{said}");
    assert!(said.err.contains("no plan fits at any of 1 points"), "{said}");
    assert!(said.out.contains("no plan with devices 1, memory 40: "), "{said}");
    assert!(!said.out.contains("price"), "{said}");
}

#[test]
fn less_memory_than_the_reserve_is_told_as_such() {
    let front = json(&["pareto", "gpt2", "dgx-h100", "--try-devices", "8", "--try-memory", "2,80"]);
    let without = &front["without_plan"];
    assert_eq!((&front["n_without_plan"], &without[0]["point"]["memory"]), (&1.into(), &2.0.into()));
    let why = "no plan fits: any needs at least 6.8 GiB of 2.0 GiB per device for the reserve alone";
    assert_eq!(without[0]["no_plan"], why);
}
