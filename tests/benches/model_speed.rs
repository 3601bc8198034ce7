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

use cost_model::{BackwardParts, Constants, PipelineTimes, Transfers, Turns, lower_bound, simulate, totals};
use ir::plan::check::{OpenPlan, open};
use ir::plan::{EntryRun, Plan};
use ir::schedule::{Schedule, table};
use ir::units::Seconds;
use planner::price::book::{Book, SectionId, Sketch};
use planner::price::{setting, time_with, world};

/// How long one thing is repeated.
const LONG_ENOUGH: Duration = Duration::from_secs(2);

/// Prints how many there are in a second.
fn per_second(name: &str, mut once: impl FnMut()) {
    let (start, mut n) = (Instant::now(), 0_u32);
    while start.elapsed() < LONG_ENOUGH {
        once();
        n += 1;
    }
    println!("{name:<92} {:>10.0} /s", f64::from(n) / start.elapsed().as_secs_f64());
}

/// A plan that is found once.
fn plan(words: &[&str]) -> Plan {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("model-speed.json");
    let said = tests::planner(&[&["optimize"], words, &["-o", file.to_str().unwrap()]].concat());
    assert_eq!(said.code, 0, "{said}");
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// Every entry of a plan in a book, at the plan's micro-batch and at twice it.
fn sections(book: &mut Book<'_>, plan: &Plan, opened: &OpenPlan) -> Vec<(u64, Vec<SectionId>)> {
    let at = |micro_batch: u64, book: &mut Book<'_>| {
        let own = opened.entries.iter();
        own.map(|own| book.section((own.layer, own.choice.clone()), (&plan.mesh, micro_batch)).unwrap())
            .collect()
    };
    [plan.micro_batch, 2 * plan.micro_batch].map(|micro_batch| (micro_batch, at(micro_batch, book))).to_vec()
}

/// The plan's layers in so many chunks, the `nth` time moved a little between neighbours.
fn cut(plan: &Plan, sections: &[SectionId], n_chunks: usize, nth: usize) -> Vec<Vec<(SectionId, u64)>> {
    let run = |run: &EntryRun| std::iter::repeat_n(sections[run.entry], run.count as usize);
    let layers: Vec<SectionId> = plan.chunks.iter().flatten().flat_map(run).collect();
    let end = |chunk: usize| match chunk {
        0 => 0,
        _ if chunk == n_chunks => layers.len(),
        _ => layers.len() * chunk / n_chunks + (nth * 7 + chunk * (nth % 5)) % 3,
    };
    let chunk = |at: usize| {
        let mut runs: Vec<(SectionId, u64)> = Vec::new();
        for &section in &layers[end(at)..end(at + 1)] {
            match runs.last_mut() {
                Some((last, count)) if *last == section => *count += 1,
                _ => runs.push((section, 1)),
            }
        }
        runs
    };
    (0..n_chunks).map(chunk).collect()
}

/// Schedules, numbers of micro-batches, micro-batches and cuts of a plan's layers, all different.
fn sketches(plan: &Plan, sections: &[(u64, Vec<SectionId>)]) -> Vec<(Schedule, u64, u64, Chunks)> {
    let schedules = [Schedule::OneFOneB, Schedule::GPipe, Schedule::Interleaved { virtual_stages: 2 }];
    let of = |nth: usize| {
        let schedule = schedules[nth % schedules.len()];
        let (micro_batch, own) = &sections[nth % sections.len()];
        let m = plan.n_stages * (1 + nth as u64 % 16);
        let n_chunks = schedule.placement().n_chunks(plan.n_stages as u32) as usize;
        (schedule, m, *micro_batch, cut(plan, own, n_chunks, nth))
    };
    (0..960).map(of).collect()
}

/// Per chunk, how many layers of which section.
type Chunks = Vec<Vec<(SectionId, u64)>>;

/// Plans that are made of a few priced sections, evaluated one after another.
fn evaluations(plan: &Plan, all: &Constants, name: &str) {
    let (opened, constants) = (open(plan).unwrap(), world(plan, all).unwrap());
    let mut book = Book::new(setting(plan, &constants).unwrap(), &opened.model).unwrap();
    let sections = sections(&mut book, plan, &opened);
    let plans = sketches(plan, &sections);
    for only in [None, Some(Schedule::OneFOneB), Some(Schedule::Interleaved { virtual_stages: 2 })] {
        let asked: Vec<_> = plans.iter().filter(|own| only.is_none_or(|one| one == own.0)).collect();
        let mut nth = 0;
        let which = only.map_or("three schedules".to_owned(), |one| one.to_string());
        let p = plan.n_stages;
        per_second(&format!("plans evaluated from priced sections: {name}, {p} stages, {which}"), || {
            let (schedule, n_micro_batches, micro_batch, chunks) = asked[nth % asked.len()];
            nth += 1;
            let (mesh, n_stages) = (&plan.mesh, plan.n_stages);
            let (schedule, n_micro_batches, micro_batch) = (*schedule, *n_micro_batches, *micro_batch);
            let sketch = Sketch { mesh, n_stages, micro_batch, n_micro_batches, schedule, chunks };
            black_box(book.evaluate(black_box(&sketch)).unwrap());
        });
    }
}

fn main() {
    let constants = Constants::load();
    for words in [
        &["llama-3-8b", "dgx-h100", "--pin", "pp=1,zero=3"][..],
        &["llama-3-70b", "dgx-h100", "--nodes", "8", "--pin", "tp=8,pp=8,dp=1,schedule=1f1b"],
        &["gpt3-175b", "dgx-a100-80", "--nodes", "64", "--global-batch", "1024", "--pin", "tp=8,pp=16,dp=4"],
    ] {
        let plan = plan(words);
        let opened = open(&plan).unwrap();
        per_second(&format!("a plan's programs priced and its step worked out: {}", words[0]), || {
            black_box(time_with(&plan, &opened, &constants).unwrap());
        });
        if plan.n_stages > 1 {
            evaluations(&plan, &constants, words[0]);
        }
    }
    pipelines(Schedule::OneFOneB);
    pipelines(Schedule::Interleaved { virtual_stages: 4 });
    pipelines(Schedule::ZbV);
}

/// One pipeline of stages that all differ.
fn pipelines(schedule: Schedule) {
    const STAGES: u32 = 16;
    const MICRO_BATCHES: u32 = 256;
    let n = schedule.placement().n_chunks(STAGES) as usize;
    let each =
        |time: f64| (0..n).map(|at| Seconds(time * (1.0 + 0.01 * (at % 7) as f64))).collect::<Vec<_>>();
    let times = PipelineTimes {
        placement: schedule.placement(),
        n_slices: 1,
        forward: each(1.0),
        backward: each(2.0),
        parts: Some(BackwardParts { input: each(1.0), weight: each(1.0) }),
        boundary: vec![Seconds(0.1); n - 1],
        branches: None,
        transfers: Transfers::Exposed,
    };
    let name = |what: &str| format!("{what}, {schedule}, {STAGES} stages, {MICRO_BATCHES} micro-batches");
    per_second(&name("bound of a step"), || {
        black_box(lower_bound(STAGES, MICRO_BATCHES, black_box(&times)));
    });
    if let Some(turns) = Turns::new(schedule, STAGES, MICRO_BATCHES) {
        per_second(&name("a step by recurrence"), || {
            black_box(turns.totals(black_box(&times)).unwrap());
        });
    }
    let rows = table(schedule, STAGES, MICRO_BATCHES).unwrap();
    per_second(&name("event simulation of a step"), || {
        black_box(totals(&rows, black_box(&times)).unwrap());
    });
    per_second(&name("the same with every span"), || {
        black_box(simulate(&rows, black_box(&times)).unwrap());
    });
}
