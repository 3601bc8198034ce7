//! Time to plan anew after devices are lost, near the plan that ran and among all plans:
//! `cargo bench -p tests --bench replan`.

#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark prints, and fails where what it measures fails"
)]

use std::time::Duration;

use serde_json::Value;
use tests::{scratch, timed};

/// A model, a cluster, and the words that size them.
const JOBS: [&[&str]; 7] = [
    &["llama-2-13b", "dgx-a100-80", "--nodes", "4", "--global-batch", "1024", "--seq-len", "2048"],
    &["llama-3-70b", "dgx-h100", "--nodes", "8"],
    &["mixtral-8x7b", "dgx-h100", "--nodes", "8"],
    &["gpt3-175b", "dgx-a100-80", "--nodes", "128", "--global-batch", "1536", "--seq-len", "2048"],
    &["llama-3.1-405b", "dgx-h100", "--nodes", "128", "--global-batch", "1024", "--seq-len", "4096"],
    &["llama-3.1-405b", "dgx-h100", "--nodes", "2048", "--seq-len", "8192"],
    &["deepseek-v3", "dgx-h800", "--nodes", "256", "--global-batch", "15360", "--seq-len", "4096"],
];

/// Devices that are lost.
const LOST: &str = "3";

/// What a command answered, and how long it took.
fn answered(words: &[&str]) -> (Value, Duration) {
    let (said, passed) = timed(words);
    (serde_json::from_str(&said.out).unwrap(), passed)
}

fn main() {
    let file = scratch!("bench-replan.json");
    let file = file.as_str();
    println!("| plan that ran | replan | `--anew` | ratio | devices | step | `--anew`: devices | step |");
    println!("|---|--:|--:|--:|--:|--:|--:|--:|");
    for job in JOBS {
        let (plan, _) = answered(&[&["optimize"], job, &["--json", "-o", file]].concat());
        let [(near, near_time), (anew, anew_time)] = [&[][..], &["--anew"]]
            .map(|more| answered(&[&["replan", file, "--lost", LOST, "--json"], more].concat()));
        let [near, anew] = [near, anew].map(|answer| {
            (answer["to"]["n_devices"].as_u64().unwrap(), answer["to"]["step_time_s"].as_f64().unwrap())
        });
        println!(
            "| {} on {}, {:.1} s | {:.2} s | {:.2} s | {:.0} | {} | {:.1} s | {} | {:.1} s |",
            job[0],
            plan["cluster"]["groups"][0]["count"],
            plan["predicted"]["step_time_s"].as_f64().unwrap(),
            near_time.as_secs_f64(),
            anew_time.as_secs_f64(),
            anew_time.as_secs_f64() / near_time.as_secs_f64(),
            near.0,
            near.1,
            anew.0,
            anew.1,
        );
    }
}
