//! A model that does not fit without its host: planned, proven, run, explained and refused where it may not use it.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own files has failed")]
#![expect(clippy::disallowed_methods, reason = "plans and clusters are files")]

use std::path::{Path, PathBuf};

use serde_json::Value;
use tests::{Transcript, planner};

fn asked(words: &str) -> Transcript {
    planner(&words.split_whitespace().collect::<Vec<_>>())
}

#[track_caller]
fn done(words: &str) -> String {
    let transcript = asked(words);
    assert_eq!(transcript.code, 0, "{transcript}");
    transcript.out
}

#[track_caller]
fn refused(words: &str) -> String {
    let transcript = asked(words);
    assert_eq!(transcript.code, 3, "{transcript}");
    transcript.err
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// A file of this run of the tests.
fn fresh(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("offload-{name}"))
}

const JOB: &str = "llama-3-8b dgx-h100 --devices 1";

#[test]
fn eight_billion_parameters_train_on_one_device_whose_host_updates() {
    let path = fresh("one.json");
    let plan = path.display();
    let report = done(&format!("optimize {JOB} -o {plan}"));
    assert!(report.contains("optimizer on the host"), "{report}");
    assert!(report.contains("no plan fits in the devices' memory alone"), "{report}");
    let found = read(&path);
    let stage = &found["predicted"]["stages"][0];
    // An fp32 value, two moments and an fp32 gradient of every parameter.
    let n = 8_030_261_248.0;
    assert_eq!(stage["host_memory_bytes"].as_f64(), Some(16.0 * n));
    assert_eq!(stage["memory"]["optimizer"].as_f64(), Some(0.0));
    // At 0.8 of 63 GB/s down and up, and 4e9 parameters a second between.
    let expected = n * (4.0 + 2.0) / (0.8 * 63e9) + n / 4e9;
    let offload = found["predicted"]["breakdown"]["offload_s"].as_f64().unwrap();
    assert!((offload / expected - 1.0).abs() < 1e-9, "{offload} {expected}");

    let verified = done(&format!("verify {plan} --precision all"));
    for line in ["gradients to the host", "parameters from the host", "arenas on the hosts"] {
        let row = verified.lines().find(|row| row.starts_with(line)).unwrap_or_default();
        assert!(row.ends_with("equal") && !row.contains(" 0  "), "{verified}");
    }
    assert!(done(&format!("prove {plan}")).contains("proven"));
    let explained = done(&format!("explain {plan} --why-not offload=none"));
    assert!(explained.contains("offload=none does not fit"), "{explained}");
}

#[test]
fn a_host_that_is_forbidden_or_too_small_is_said_to_be_what_lacks() {
    let said = refused(&format!("optimize {JOB} --forbid offload"));
    assert!(said.contains("optimizer states on the hosts (offload=allowed)"), "{said}");

    let (cluster, node) = (fresh("small-host.json"), "fixtures/clusters/dgx-h100.json");
    let mut file = read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(node));
    file["groups"][0]["host_memory_gib"] = 64.into();
    std::fs::write(&cluster, file.to_string()).unwrap();
    let said = refused(&format!("optimize llama-3-8b {} --devices 1", cluster.display()));
    assert!(
        said.contains(
            "119.7 GiB of 57.6 GiB on stage 0, most of it optimizer states in the memory of its node's host"
        ),
        "{said}"
    );
}

#[test]
fn engines_that_cannot_update_on_hosts_are_not_planned_so() {
    refused(&format!("optimize {JOB} --target torchtitan"));
    let pinned = asked(&format!("optimize {JOB} --target torchtitan --pin offload=optimizer"));
    assert!(pinned.err.contains("torchtitan cannot run offload=optimizer"), "{pinned}");
}

/// Hosts are not asked where a plan fits, but named where states crowd the devices; asked, they make this one faster.
#[test]
fn hosts_that_may_help_are_named_and_asked_on_request() {
    let plain = done("optimize llama-3-8b dgx-h100 --devices 2 --json");
    let asked = done("optimize llama-3-8b dgx-h100 --devices 2 --pin offload=allowed --json");
    let [plain, asked]: [Value; 2] = [&plain, &asked].map(|text| serde_json::from_str(text).unwrap());
    assert_eq!(plain["roles"].get("offload"), None);
    assert!(plain["warnings"].to_string().contains("--pin offload=allowed"), "{}", plain["warnings"]);
    let time = |plan: &Value| plan["predicted"]["step_time_s"].as_f64().unwrap();
    assert!(asked["roles"]["offload"].is_string());
    assert!(time(&asked) < 0.9 * time(&plain), "{} {}", time(&asked), time(&plain));
    let roomy = done("optimize llama-3-8b dgx-h100 --devices 16");
    assert!(!roomy.contains("offload") && !roomy.contains("on the host"), "{roomy}");
}
