//! Time and memory of the search as devices and layers grow: `cargo bench -p tests --bench scaling`. Each question has
//! a process of its own, so that its memory is its own.

#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark reads the clock and the system's figures, prints, and fails where what it measures fails"
)]

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use mimalloc::MiMalloc;
use tests::planner;

/// That of the program, which is what is measured.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// What is asked, in words for people, and the words of the command; `DEEP` is a file of a model of 1,024 layers.
const JOBS: [(&str, &str); 9] = [
    ("llama-2-13b on 32 A100", "llama-2-13b dgx-a100-80 --nodes 4"),
    ("gpt3-175b on 1,024 A100", "gpt3-175b dgx-a100-80 --nodes 128 --global-batch 1536 --seq-len 2048"),
    ("llama-3.1-405b on 1,024 H100", "llama-3.1-405b dgx-h100 --nodes 128 --global-batch 2048"),
    ("llama-3.1-405b on 4,096 H100", "llama-3.1-405b dgx-h100 --nodes 512 --global-batch 2048"),
    ("llama-3.1-405b on 16,384 H100", "llama-3.1-405b dgx-h100 --nodes 2048 --global-batch 2048"),
    ("deepseek-v3 on 2,048 H800", "deepseek-v3 dgx-h800 --nodes 256 --global-batch 15360 --seq-len 4096"),
    ("deepseek-v3 on 16,384 H800", "deepseek-v3 dgx-h800 --nodes 2048 --global-batch 15360 --seq-len 4096"),
    ("1,024 layers of 4,096 on 4,096 H100", "DEEP dgx-h100 --nodes 512 --global-batch 2048"),
    ("llama-3.1-405b on 100,000 H100", "llama-3.1-405b dgx-h100 --nodes 12500 --global-batch 20000"),
];

fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.iter().position(|arg| arg == "--one") {
        Some(at) => one(&args[at + 1]),
        None => all(),
    }
}

/// Every question in a process of its own.
fn all() {
    println!("| question | wall | CPU | memory | candidates | gap |\n|---|--:|--:|--:|--:|--:|");
    for (name, words) in JOBS {
        let said = Command::new(std::env::current_exe().unwrap()).args(["--one", words]).output().unwrap();
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        println!("| {name} | {} |", String::from_utf8_lossy(&said.stdout).trim());
    }
}

/// One question, and what it took this process.
fn one(words: &str) {
    let deep = deep();
    let words: Vec<&str> =
        words.split(' ').map(|word| if word == "DEEP" { deep.as_str() } else { word }).collect();
    let start = Instant::now();
    let said = planner(&[&["optimize"], &words[..], &["--json"]].concat());
    let wall = start.elapsed().as_secs_f64();
    assert_eq!(said.code, 0, "{said}");
    let plan: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    let search = &plan["search"];
    let gap = 100.0 * search["gap"].as_f64().unwrap();
    println!("{wall:.2} s | {:.2} s | {:.0} MiB | {} | {gap:.2} %", cpu(), memory(), search["n_candidates"]);
}

/// A model of 1,024 layers, each as those of llama-3-8b.
fn deep() -> String {
    let text = frontends::shipped_model("llama-3-8b").unwrap().text;
    let mut config: serde_json::Value = serde_json::from_str(text).unwrap();
    config["num_hidden_layers"] = 1024.into();
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("deep.json");
    std::fs::write(&path, config.to_string()).unwrap();
    path.to_string_lossy().into_owned()
}

/// Seconds of processor time that this process has taken: fields 14 and 15 of its line, in hundredths (proc(5)).
fn cpu() -> f64 {
    let line = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = line.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

/// Most memory that this process has had, in MiB.
fn memory() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<f64>().unwrap() / 1024.0
}
