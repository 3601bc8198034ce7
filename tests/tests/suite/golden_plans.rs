//! The plans of real models on real clusters, each as a page of text, and each run with numbers.
//!
//! A change of the search or of a price shows here as a change of text: read the difference before accepting it.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use std::fmt::Write;
use std::path::PathBuf;

use ir::plan::entry::Entry;
use ir::plan::{EntryRun, Plan};
use tests::planner as command;

/// Answers a question, holds the plan to its page, and runs a small copy of it.
macro_rules! golden {
    ($($name:ident: $words:expr;)*) => {
        $(#[test]
        fn $name() {
            let (plan, file) = optimized(stringify!($name), &$words);
            assert_priced(&plan);
            insta::with_settings!({ omit_expression => true }, {
                insta::assert_snapshot!(stringify!($name), page(&plan));
            });
            let verified = command(&["verify", &file, "--precision", "f64"]);
            assert_eq!(verified.code, 0, "{verified}");
        })*
    };
}

golden! {
    llama_3_8b: ["llama-3-8b", "dgx-h100"];
    llama_3_70b: ["llama-3-70b", "dgx-h100", "--nodes", "2"];
    gpt3_175b: [
        "gpt3-175b", "dgx-a100-80", "--nodes", "128", "--global-batch", "1536", "--seq-len", "2048"
    ];
    mixtral_8x7b: ["mixtral-8x7b", "dgx-h100", "--nodes", "8"];
    llama_3_1_405b: ["llama-3.1-405b", "dgx-h100", "--nodes", "2048", "--seq-len", "8192"];
    llama_3_1_405b_long: ["llama-3.1-405b", "dgx-h100", "--nodes", "2048", "--seq-len", "131072"];
    deepseek_v3: [
        "deepseek-v3", "dgx-h800", "--nodes", "256", "--global-batch", "15360", "--seq-len", "4096"
    ];
}

/// The figures in the file are those of the plan in the file, and the parts of the step are the step.
#[track_caller]
fn assert_priced(plan: &Plan) {
    let held = plan.predicted.as_ref().unwrap();
    assert_eq!(planner::price::price(plan).as_ref(), Ok(held));
    let (parts, step) = (held.breakdown.total().0, held.step_time_s.0);
    assert!((parts / step - 1.0).abs() < 1e-9, "parts of {parts} s in a step of {step} s");
}

/// The plan that answers a question, and the file in which it stands.
fn optimized(name: &str, words: &[&str]) -> (Plan, String) {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("golden-{name}.json"));
    let file = path.to_string_lossy().into_owned();
    let said = command(&[&["optimize"], words, &["--json", "-o", &file]].concat());
    assert_eq!(said.code, 0, "{said}");
    let plan = serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}: {said}"));
    (plan, file)
}

/// A plan on a page: figures with three digits, everything else as it is.
fn page(plan: &Plan) -> String {
    let mut page = String::new();
    let axes: Vec<String> =
        plan.mesh.axes.iter().map(|axis| format!("{} {}", axis.name, axis.size)).collect();
    let mut line = |name: &str, text: String| writeln!(page, "{name:10}{text}").unwrap();
    line("roles", plan.roles.to_string());
    line("mesh", format!("{} stages of {}", plan.n_stages, axes.join(" x ")));
    line(
        "schedule",
        format!("{}, {} micro-batches of {}", plan.schedule, plan.n_micro_batches, plan.micro_batch),
    );
    line("chunks", chunks(plan));
    figures(plan, &mut line);
    for (at, entry) in plan.entries.iter().enumerate() {
        page.push_str(&choice(at, entry));
    }
    page
}

/// `0x1 1x16 | 1x16 2x1`: per chunk, entries and how many layers have each; equal neighbours are counted.
fn chunks(plan: &Plan) -> String {
    let text = |runs: &Vec<EntryRun>| {
        runs.iter().map(|run| format!("{}x{}", run.entry, run.count)).collect::<Vec<_>>().join(" ")
    };
    let all: Vec<String> = plan.chunks.iter().map(text).collect();
    let runs = all.chunk_by(|a, b| a == b);
    let counted = runs.map(|run| match run.len() {
        1 => run[0].clone(),
        n => format!("{n} times ({})", run[0]),
    });
    counted.collect::<Vec<_>>().join(" | ")
}

fn figures(plan: &Plan, line: &mut impl FnMut(&str, String)) {
    let predicted = plan.predicted.as_ref().expect("a searched plan has figures");
    line("step", format!("{} s", three(predicted.step_time_s.0)));
    line("mfu", format!("{}, hardware {}", three(predicted.mfu), three(predicted.hfu)));
    line("peak", format!("{} GiB", three(predicted.peak_memory_bytes.0 / f64::from(1 << 30))));
    let parts = &predicted.breakdown;
    line(
        "compute",
        format!(
            "forward {} s, backward {} s, again {} s",
            three(parts.compute_forward_s.0),
            three(parts.compute_backward_s.0),
            three(parts.recompute_s.0)
        ),
    );
    line("bubble", format!("{} s", three(parts.bubble_s.0)));
    for (kind, time) in &parts.exposed_communication_s {
        line("exposed", format!("{kind} {} s", three(time.0)));
    }
    let search = plan.search.as_ref().expect("a searched plan says how");
    line("bound", format!("{} s of {} candidates", three(search.lower_bound_s.0), search.n_candidates));
}

/// One entry: neighbouring operators that do the same share a line, and so do parameters that live alike.
fn choice(at: usize, entry: &Entry) -> String {
    let mut text = format!("\n{at} {}: {} -> {}\n", entry.layer, entry.stream, entry.out);
    let words = |op: &ir::plan::entry::OpEntry| {
        format!("{}{}", op.axes.join(" "), if op.recompute { ", again" } else { "" })
    };
    for run in entry.ops.chunk_by(|a, b| words(a) == words(b)) {
        let names: Vec<&str> = run.iter().map(|op| op.op.as_str()).collect();
        writeln!(text, "  [{}] {}", words(&run[0]), names.join(" ")).unwrap();
    }
    let storage = |one: &ir::plan::entry::ParameterEntry| {
        let cut = |axes: &[String]| if axes.is_empty() { "-".to_owned() } else { axes.join(",") };
        format!("p {} g {} o {}", cut(&one.parameter), cut(&one.gradient), cut(&one.optimizer))
    };
    for run in entry.parameters.chunk_by(|a, b| storage(a) == storage(b)) {
        let names: Vec<&str> = run.iter().map(|one| one.tensor.as_str()).collect();
        writeln!(text, "  ({}) {}", storage(&run[0]), names.join(" ")).unwrap();
    }
    text
}

/// Three significant digits, so that an equal plan reads equal whatever the last bits of a sum are.
fn three(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let digits = (2 - value.abs().log10().floor() as i32).max(0);
    if value.abs() >= 1e-3 { format!("{value:.*}", digits as usize) } else { format!("{value:.2e}") }
}

#[test]
fn figures_have_three_digits() {
    assert_eq!(
        [0.0, 1234.5, 12.345, 0.56321, 0.0123456, 1.2345e-5].map(three),
        ["0", "1234", "12.3", "0.563", "0.0123", "1.23e-5"]
    );
}
