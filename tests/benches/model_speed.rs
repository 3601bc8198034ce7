//! Speed of the cost model itself, on one core: `cargo bench -p tests --bench model_speed`.

#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark reads the clock, prints, and fails where what it measures fails"
)]

use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cost_model::{Constants, PipelineTimes, Transfers, lower_bound, simulate, totals};
use ir::plan::Plan;
use ir::plan::check::open;
use ir::schedule::{Schedule, table};
use ir::units::Seconds;
use planner::price::time_with;

/// How long one thing is repeated.
const LONG_ENOUGH: Duration = Duration::from_secs(2);

/// Prints how many there are in a second.
fn per_second(name: &str, mut once: impl FnMut()) {
    let (start, mut n) = (Instant::now(), 0_u32);
    while start.elapsed() < LONG_ENOUGH {
        once();
        n += 1;
    }
    println!("{name:<64} {:>12.0} /s", f64::from(n) / start.elapsed().as_secs_f64());
}

/// A plan that is found once.
fn plan(words: &[&str]) -> Plan {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("model-speed.json");
    let said = tests::planner(&[&["optimize"], words, &["-o", file.to_str().unwrap()]].concat());
    assert_eq!(said.code, 0, "{said}");
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

fn main() {
    const STAGES: u32 = 16;
    const MICRO_BATCHES: u32 = 256;
    let constants = Constants::load();
    for words in [
        &["llama-3-8b", "dgx-h100", "--pin", "pp=1,zero=3"][..],
        &["gpt3-175b", "dgx-a100-80", "--nodes", "64", "--global-batch", "1024", "--pin", "tp=8,pp=16,dp=4"],
    ] {
        let plan = plan(words);
        let opened = open(&plan).unwrap();
        per_second(&format!("a plan's programs priced and its step simulated: {}", words[0]), || {
            black_box(time_with(&plan, &opened, &constants).unwrap());
        });
    }
    let n = STAGES as usize;
    let times = PipelineTimes {
        placement: Schedule::OneFOneB.placement(),
        n_slices: 1,
        forward: vec![Seconds(1.0); n],
        backward: vec![Seconds(2.0); n],
        parts: None,
        boundary: vec![Seconds(0.1); n - 1],
        transfers: Transfers::Exposed,
    };
    let name = |what: &str| format!("{what}, {STAGES} stages, {MICRO_BATCHES} micro-batches");
    per_second(&name("bound of a step from its sections"), || {
        black_box(lower_bound(STAGES, MICRO_BATCHES, black_box(&times)));
    });
    let rows = table(Schedule::OneFOneB, STAGES, MICRO_BATCHES).unwrap();
    per_second(&name("simulation of a step's time"), || {
        black_box(totals(&rows, black_box(&times)).unwrap());
    });
    per_second(&name("simulation with every span"), || {
        black_box(simulate(&rows, black_box(&times)).unwrap());
    });
}
