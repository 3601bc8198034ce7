//! Time to a plan and time to verify it, for the jobs that the README names: `cargo bench -p tests --bench jobs`.

#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark prints, and fails where what it measures fails"
)]

use std::time::Duration;

use tests::{scratch, timed};

/// A model, a cluster, and the words that size them.
const JOBS: [&[&str]; 7] = [
    &["llama-3-8b", "dgx-h100"],
    &["llama-3-70b", "dgx-h100", "--nodes", "2"],
    &["gpt3-175b", "dgx-a100-80", "--nodes", "128", "--global-batch", "1536", "--seq-len", "2048"],
    &["mixtral-8x7b", "dgx-h100", "--nodes", "8"],
    &["deepseek-v3", "dgx-h800", "--nodes", "256", "--global-batch", "15360", "--seq-len", "4096"],
    &["llama-3.1-405b", "dgx-h100", "--nodes", "2048", "--seq-len", "8192"],
    &["llama-3.1-405b", "dgx-h100", "--nodes", "2048", "--seq-len", "131072"],
];

fn main() {
    let file = scratch!("bench-plan.json");
    let file = file.as_str();
    println!("{:<44} {:>10} {:>8} {:>8} {:>8}", "job", "step", "gap", "plan", "verify");
    let mut total = Duration::ZERO;
    for job in JOBS {
        let (said, search) = timed(&[&["optimize"], job, &["--json", "-o", file]].concat());
        let plan: serde_json::Value = serde_json::from_str(&said.out).unwrap();
        let (_, verify) = timed(&["verify", file]);
        total += verify;
        let step = plan["predicted"]["step_time_s"].as_f64().unwrap();
        let gap = 100.0 * plan["search"]["gap"].as_f64().unwrap_or(f64::NAN);
        let name =
            [&job[..2], &job[2..].iter().filter(|word| !word.starts_with("--")).copied().collect::<Vec<_>>()];
        let name = name.concat().join(" ");
        println!(
            "{name:<44} {step:>8.2} s {gap:>6.2} % {:>6.2} s {:>6.2} s",
            search.as_secs_f64(),
            verify.as_secs_f64()
        );
    }
    println!("verify of all: {:.2} s", total.as_secs_f64());
}
