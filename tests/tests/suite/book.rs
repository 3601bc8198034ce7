//! What a book of section prices says of a sketch is what pricing the plan anew says: of many cuts, schedules and
//! numbers of micro-batches, and of tables that are walked action by action.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use cost_model::Constants;
use ir::plan::check::{OpenPlan, open};
use ir::plan::{EntryRun, Plan};
use ir::schedule::{Schedule, row_text, table};
use planner::price::book::{Book, BookError, SectionId, Sketch};
use planner::price::setting::{Backward, Setting};
use planner::price::{price_with, setting, world};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tests::planner;

/// Share of a figure by which two ways to sum up may differ.
const NEAR: f64 = 1e-9;

#[track_caller]
fn found(words: &[&str]) -> Plan {
    let said = planner(&[&["optimize"], words, &["--json"]].concat());
    serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// Every entry of a plan in a book, by its number.
fn sections(book: &mut Book<'_>, plan: &Plan, opened: &OpenPlan) -> Vec<SectionId> {
    let of = |own: &ir::plan::check::OpenEntry| {
        let place = (&plan.mesh, plan.micro_batch);
        book.section((own.layer, own.choice.clone()), place).unwrap()
    };
    opened.entries.iter().map(of).collect()
}

/// The plan's layers cut anew: `cuts` say where, as shares of what is left.
fn recut(plan: &Plan, n_chunks: usize, cuts: &[f64]) -> Vec<Vec<EntryRun>> {
    let layers: Vec<usize> = plan
        .chunks
        .iter()
        .flatten()
        .flat_map(|run| std::iter::repeat_n(run.entry, run.count as usize))
        .collect();
    let mut rest = &layers[..];
    let mut chunks = Vec::new();
    for at in 0..n_chunks {
        let behind = n_chunks - at - 1;
        let spare = rest.len() - behind - 1;
        // Near to even, so that plans are of a kind that a search may look at.
        let even = (rest.len() as f64 / (behind + 1) as f64 * (0.5 + cuts[at % cuts.len()])).round() as usize;
        let n = if behind == 0 { rest.len() } else { even.clamp(1, spare + 1) };
        let (own, others) = rest.split_at(n);
        rest = others;
        let mut runs: Vec<EntryRun> = Vec::new();
        for &entry in own {
            match runs.last_mut() {
                Some(last) if last.entry == entry => last.count += 1,
                _ => runs.push(EntryRun { entry, count: 1 }),
            }
        }
        chunks.push(runs);
    }
    chunks
}

/// A schedule of those that split backward, or of those that do not.
fn schedules(splits: Backward) -> BoxedStrategy<Schedule> {
    match splits {
        Backward::Whole => prop_oneof![
            Just(Schedule::OneFOneB),
            Just(Schedule::GPipe),
            Just(Schedule::Eager),
            (1..9_u32).prop_map(|warm_up| Schedule::Dapple { warm_up }),
            (2..4_u32).prop_map(|virtual_stages| Schedule::Interleaved { virtual_stages }),
            (1..4_u32).prop_map(|virtual_stages| Schedule::BreadthFirst { virtual_stages }),
            Just(Schedule::Hanayo { waves: 1 }),
            Just(Schedule::Chimera),
        ]
        .boxed(),
        Backward::Parts => prop_oneof![
            Just(Schedule::ZbH1),
            Just(Schedule::ZbH2),
            Just(Schedule::ZbV),
            Just(Schedule::VHalf),
            Just(Schedule::DualPipeV),
        ]
        .boxed(),
    }
}

/// The plan with other chunks, schedule and micro-batches.
fn edited(plan: &Plan, schedule: Schedule, m: u64, cuts: &[f64]) -> Plan {
    let n_chunks = schedule.placement().n_chunks(plan.n_stages as u32) as usize;
    let mut plan = plan.clone();
    plan.chunks = recut(&plan, n_chunks, cuts);
    plan.schedule = schedule;
    plan.n_micro_batches = m;
    plan.job.global_batch = m * plan.micro_batch;
    plan
}

/// The same with its table written down, so that every action of it is walked.
fn written(plan: &Plan) -> Plan {
    let rows = table(plan.schedule, plan.n_stages as u32, plan.n_micro_batches as u32).unwrap();
    Plan {
        schedule: Schedule::Custom(plan.schedule.placement()),
        table: Some(rows.iter().map(|row| row_text(row)).collect()),
        ..plan.clone()
    }
}

#[track_caller]
fn assert_near(found: f64, expected: f64, what: &str, plan: &Plan) {
    let place = (plan.schedule, plan.n_stages, plan.n_micro_batches);
    assert!((found - expected).abs() <= NEAR * expected, "{what}: {found} {expected} {place:?}");
}

/// Holds a book to the full prices of a plan and of many like it.
#[track_caller]
fn check(words: &[&str], backward: Backward, cases: u32) {
    let (plan, all) = (found(words), Constants::load());
    let (opened, constants) = (open(&plan).unwrap(), world(&plan, &all).unwrap());
    let setting = Setting { backward, ..setting(&plan, &constants).unwrap() };
    let mut book = Book::new(setting, &opened.model).unwrap();
    let sections = sections(&mut book, &plan, &opened);
    let n_sections = book.n_sections();
    let drawn =
        (schedules(backward), 1..40_u64, proptest::collection::vec(0.0..1.0_f64, 5), proptest::bool::ANY);
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let book = std::cell::RefCell::new(book);
    let n_priced = std::cell::Cell::new(0);
    let mut runner = TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    );
    let held = runner.run(&drawn, |(schedule, m, cuts, is_walked)| {
        let p = plan.n_stages as u32;
        let m = if matches!(schedule, Schedule::Interleaved { .. }) { m * u64::from(p) } else { m };
        let n_chunks = schedule.placement().n_chunks(p);
        let n_layers: u64 = plan.chunks.iter().flatten().map(|run| run.count).sum();
        prop_assume!(u64::from(n_chunks) <= n_layers && table(schedule, p, m as u32).is_ok());
        let plan = edited(&plan, schedule, m, &cuts);
        let chunks: Vec<Vec<(SectionId, u64)>> = plan
            .chunks
            .iter()
            .map(|runs| runs.iter().map(|run| (sections[run.entry], run.count)).collect())
            .collect();
        let sketch = Sketch {
            mesh: &plan.mesh,
            n_stages: plan.n_stages,
            micro_batch: plan.micro_batch,
            n_micro_batches: m,
            schedule,
            chunks: &chunks,
        };
        let found = book.borrow_mut().evaluate(&sketch).unwrap();
        let asked = if is_walked { written(&plan) } else { plan };
        let priced = price_with(&asked, &open(&asked).unwrap(), &all).unwrap();
        assert_near(found.step_time.0, priced.step_time_s.0, "step", &asked);
        for (peak, stage) in found.peaks.iter().zip(&priced.stages) {
            assert_near(peak.0, stage.peak_memory_bytes.0, "peak", &asked);
        }
        n_priced.set(n_priced.get() + 1);
        Ok(())
    });
    held.unwrap();
    assert!(n_priced.get() >= cases);
    assert_eq!(book.borrow().n_sections(), n_sections, "evaluating prices no program");
}

#[test]
fn a_tied_model_in_a_pipeline_is_evaluated_as_it_is_priced() {
    let pins = "tp=4,pp=4,dp=2,schedule=1f1b,micro-batch=2";
    let words = ["gpt2", "dgx-a100-80", "--nodes", "4", "--global-batch", "64", "--pin", pins];
    check(&words, Backward::Whole, 60);
    check(&words, Backward::Parts, 40);
}

#[test]
fn gathered_parameters_and_recomputation_are_evaluated_as_they_are_priced() {
    let pins = "tp=2,pp=2,dp=4,zero=3,recompute=full,schedule=1f1b,micro-batch=1";
    check(&["llama-3-8b", "dgx-h100", "--nodes", "2", "--pin", pins], Backward::Whole, 40);
}

#[test]
fn transfers_that_are_waited_for_are_evaluated_as_they_are_priced() {
    let pins = "tp=4,pp=8,dp=1,schedule=1f1b,micro-batch=1";
    let engine = "stage-transfers=waited";
    let words = ["llama-2-13b", "dgx-a100-80", "--nodes", "4", "--pin", pins, "--engine", engine];
    check(&words, Backward::Whole, 40);
}

#[test]
fn what_a_book_cannot_know_is_an_error() {
    let plan = found(&["gpt2", "dgx-a100-80", "--nodes", "1", "--pin", "tp=4,pp=2,dp=1,schedule=1f1b"]);
    let opened = open(&plan).unwrap();
    let constants = world(&plan, &Constants::load()).unwrap();
    let mut book = Book::new(setting(&plan, &constants).unwrap(), &opened.model).unwrap();
    let sections = sections(&mut book, &plan, &opened);
    let chunks = vec![vec![(sections[0], 1)]; 2];
    let sketch = Sketch {
        mesh: &plan.mesh,
        n_stages: 2,
        micro_batch: plan.micro_batch,
        n_micro_batches: 4,
        schedule: Schedule::OneFOneB,
        chunks: &chunks,
    };
    assert!(book.evaluate(&sketch).is_ok());
    let wrong = [
        Sketch { n_stages: 3, ..sketch },
        Sketch { micro_batch: plan.micro_batch + 1, ..sketch },
        Sketch { schedule: Schedule::ZbH1, ..sketch },
        Sketch { schedule: Schedule::TeraPipe { slices: 2 }, ..sketch },
        Sketch { n_micro_batches: 0, ..sketch },
    ];
    let said = wrong.map(|sketch| book.evaluate(&sketch).unwrap_err().to_string());
    insta::assert_snapshot!(said.join("\n"), @"
    expected 3 chunks, found 2
    section 0 of chunk 0 is of another mesh or micro-batch, or of another book
    the book's backward is priced otherwise than `zb-h1` runs it
    a book has no prices of slices, which `terapipe(2)` runs
    a pipeline needs at least one stage, one virtual stage, one micro-batch and one slice
    ");
    let choice = opened.entries[0].choice.clone();
    let kind = book.section((99, choice), (&plan.mesh, 1));
    assert!(matches!(kind, Err(BookError::Kind { kind: 99, .. })));
}
