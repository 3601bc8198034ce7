//! Runs the search: threads, a progress bar, the clock, and the words for a question without an answer.

use std::time::{Duration, Instant};

use cost_model::offload::NodeMemory;
use indicatif::{ProgressBar as Bar, ProgressDrawTarget, ProgressStyle};
use ir::plan::Plan;
use planner::request::{Need, NoPlan, OnProgress, Progress, Request, Stop, Untried, Wait};
use planner::target::{Target, optimize_for};
use serde::Serialize;

use crate::args::{EffortArgs, ThreadArgs};
use crate::failure::Failure;
use crate::figures;
use crate::table::{Side, table};
use crate::terminal::{ProgressBar, Terminal};

/// Searches for the plan that answers a request, and says on standard error how long that took.
pub(crate) fn search(
    request: &Request,
    threads: &ThreadArgs,
    terminal: &mut Terminal<'_>,
) -> Result<Plan, Failure> {
    search_within((request, Changes::Tried), &EffortArgs::default(), threads, terminal)
}

/// Whether changes are tried that would make a plan fit where none does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Changes {
    /// They are.
    Tried,
    /// They are not: it is one of several questions.
    Untried,
}

/// A first plan is worth waiting for beyond the budget: for so many times as long,
const PATIENCE: f64 = 1.0;

/// and so many seconds.
const PATIENCE_S: f64 = 20.0;

/// The same within a budget. Ctrl-C ends the search with the best plan so far.
pub(crate) fn search_within(
    (request, changes): (&Request, Changes),
    effort: &EffortArgs,
    threads: &ThreadArgs,
    terminal: &mut Terminal<'_>,
) -> Result<Plan, Failure> {
    watched(effort, threads, terminal, &|stop, on_progress| match changes {
        Changes::Tried => planner::optimize_until(request, stop, on_progress),
        Changes::Untried => planner::optimize_alone(request, stop, on_progress),
    })
}

/// The same among the plans that an engine can run.
pub(crate) fn search_for(
    (request, target): (&Request, Target),
    effort: &EffortArgs,
    threads: &ThreadArgs,
    terminal: &mut Terminal<'_>,
) -> Result<Plan, Failure> {
    watched(effort, threads, terminal, &|stop, on_progress| {
        optimize_for(request, target, (stop, on_progress))
    })
}

/// In place of why there is no plan for a request, the same with changes that would make one fit, those tried within a
/// budget.
pub(crate) fn with_changes(
    request: &Request,
    why: NoPlan,
    effort: &EffortArgs,
    threads: &ThreadArgs,
    terminal: &mut Terminal<'_>,
) -> Result<Plan, Failure> {
    watched(effort, threads, terminal, &|stop, on_progress| {
        Err(planner::with_changes(request, why.clone(), (stop, on_progress)))
    })
}

/// Searches with a bar, the clock and Ctrl-C.
fn watched(
    effort: &EffortArgs,
    threads: &ThreadArgs,
    terminal: &mut Terminal<'_>,
    search: &(dyn Fn(Stop<'_>, OnProgress<'_>) -> Result<Plan, NoPlan> + Sync),
) -> Result<Plan, Failure> {
    let pool = pool(threads)?;
    #[expect(
        clippy::disallowed_methods,
        reason = "people want to know how long they waited; no plan depends on it"
    )]
    let start = Instant::now();
    let bar = bar(terminal.progress, "candidates");
    let interrupt = terminal.interrupt;
    let spent = |most: f64| start.elapsed().as_secs_f64() >= most;
    let is_over = || interrupt.is_raised() || effort.budget.is_some_and(spent);
    let is_overdue = |wait: Wait| {
        let part = match wait {
            Wait::Half => 0.5,
            Wait::All => 1.0,
        };
        effort.budget.is_some_and(|most| spent(most + part * (most * PATIENCE + PATIENCE_S)))
    };
    let answer = interrupt.heard_by(|| {
        pool.install(|| {
            // Who gives it time wants it used.
            let work = effort.work.or(effort.budget.map(|_| u64::MAX));
            let stop = Stop { work, asked: &is_over, overdue: &is_overdue };
            search(stop, &|progress| show(&bar, progress))
        })
    });
    bar.finish_and_clear();
    if !matches!(answer, Err(NoPlan::Impossible { .. })) {
        let memory =
            peak_memory().map_or(String::new(), |bytes| format!(", peak memory {}", figures::bytes(bytes)));
        writeln!(terminal.err, "searched for {:.2} s{memory}", start.elapsed().as_secs_f64())?;
    }
    Ok(answer?)
}

/// Threads to search on.
pub(crate) fn pool(threads: &ThreadArgs) -> Result<rayon::ThreadPool, Failure> {
    let mut pool = rayon::ThreadPoolBuilder::new();
    if let Some(threads) = threads.threads {
        pool = pool.num_threads(usize::from(threads));
    }
    pool.build().map_err(|error| Failure::argument(format!("--threads: {error}")))
}

/// A bar that counts what `unit` says.
pub(crate) fn bar(progress: ProgressBar, unit: &str) -> Bar {
    /// Redraws per second: enough to look alive.
    const REDRAWS: u8 = 10;
    let target = match progress {
        ProgressBar::Shown => ProgressDrawTarget::stderr_with_hz(REDRAWS),
        ProgressBar::Hidden => ProgressDrawTarget::hidden(),
    };
    let bar = Bar::with_draw_target(Some(0), target);
    let style =
        ProgressStyle::with_template(&format!("{{elapsed:>4}} [{{bar:30}}] {{pos}}/{{len}} {unit} {{msg}}"));
    if let Ok(style) = style {
        bar.set_style(style.progress_chars("=> "));
    }
    if progress == ProgressBar::Shown {
        bar.enable_steady_tick(Duration::from_millis(500));
    }
    bar
}

fn show(bar: &Bar, progress: Progress) {
    bar.set_length(progress.total);
    bar.set_position(progress.done);
    let change = progress.change.map(|(at, of)| format!("no plan fits: change {at} of {of}"));
    let best = progress.best.map(|best| format!("best {}", figures::seconds(best)));
    let message: Vec<String> = change.into_iter().chain(best).collect();
    if !message.is_empty() {
        bar.set_message(message.join(", "));
    }
}

/// Most memory this process has had, where the system tells.
fn peak_memory() -> Option<ir::units::Bytes> {
    #[expect(
        clippy::disallowed_methods,
        reason = "the kernel's figures of this process are a file; no plan depends on it"
    )]
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(ir::units::Bytes(kib * 1024.0))
}

/// What there is instead of a plan, as data.
#[derive(Serialize)]
struct NoPlanDocument<'a> {
    no_plan: Overflow<'a>,
}

#[derive(Serialize)]
struct Overflow<'a> {
    /// Whose memory it is: of the candidate that overflows least, or what no plan does without.
    need: Need,
    stage: usize,
    term: &'a str,
    needed_bytes: f64,
    capacity_bytes: f64,
    /// What a node lacks besides.
    #[serde(skip_serializing_if = "Option::is_none")]
    also: Option<AlsoDocument>,
    relaxations: Vec<RelaxationDocument<'a>>,
    /// What was not tried when time was over.
    #[serde(skip_serializing_if = "Option::is_none")]
    untried: Option<&'static str>,
}

/// What a node lacks besides, as data.
#[derive(Serialize)]
pub(crate) struct AlsoDocument {
    term: &'static str,
    needed_bytes: f64,
    capacity_bytes: f64,
}

impl AlsoDocument {
    pub(crate) fn of(node: &NodeMemory) -> Self {
        let (needed_bytes, capacity_bytes) = (node.needed.0, node.capacity.0);
        Self { term: node.store.term(), needed_bytes, capacity_bytes }
    }
}

#[derive(Serialize)]
struct RelaxationDocument<'a> {
    change: &'a str,
    step_time_s: f64,
    tokens_per_s: f64,
}

/// JSON of an answer that is no plan, if it is one of memory.
pub(crate) fn no_plan_json(no_plan: &NoPlan) -> Option<String> {
    let (NoPlan::NothingFits { stage, term, needed, capacity, relaxations, .. }
    | NoPlan::Overflows { stage, term, needed, capacity, relaxations }) = no_plan
    else {
        return None;
    };
    let (need, also) = match no_plan {
        NoPlan::NothingFits { need, also, .. } => (*need, also.as_deref()),
        NoPlan::Overflows { .. } | NoPlan::Impossible { .. } | NoPlan::Broken { .. } => (Need::Closest, None),
    };
    let relaxations = relaxations.iter().map(|one| RelaxationDocument {
        change: &one.change,
        step_time_s: one.step_time.0,
        tokens_per_s: one.tokens_per_second(),
    });
    let document = NoPlanDocument {
        no_plan: Overflow {
            need,
            stage: *stage,
            term,
            needed_bytes: needed.0,
            capacity_bytes: capacity.0,
            also: also.map(AlsoDocument::of),
            relaxations: relaxations.collect(),
            untried: untried(no_plan),
        },
    };
    serde_json::to_string_pretty(&document).ok()
}

/// The changes that would make a plan fit, for people.
pub(crate) fn relaxations(no_plan: &NoPlan) -> String {
    let (NoPlan::NothingFits { relaxations, .. } | NoPlan::Overflows { relaxations, .. }) = no_plan else {
        return String::new();
    };
    let more = untried(no_plan).map(|what| format!("hint: time was over before all {what} were tried\n"));
    if relaxations.is_empty() {
        let none = "hint: no small change makes it fit: take more or larger devices, or a smaller model\n";
        return more.unwrap_or_else(|| none.into());
    }
    let rows: Vec<Vec<String>> = relaxations
        .iter()
        .map(|one| {
            let speed = figures::three(one.tokens_per_second());
            vec![one.change.clone(), figures::seconds(one.step_time), speed]
        })
        .collect();
    let columns = [("a plan fits with", Side::Left), ("step time", Side::Right), ("tokens/s", Side::Right)];
    let rows = table(&columns, &rows);
    let hosts = match no_plan {
        // Changes are tried for the devices alone: with hosts each search takes many times as long.
        NoPlan::NothingFits { .. } => "; with the memory of hosts besides, a smaller one may do",
        NoPlan::Overflows { .. } | NoPlan::Impossible { .. } | NoPlan::Broken { .. } => "",
    };
    format!(
        "hint: each of these changes makes a plan fit (by a short search: a whole one may find faster plans{hosts})\n{rows}{}",
        more.unwrap_or_default()
    )
}

/// What was not tried when time was over, if it was.
fn untried(no_plan: &NoPlan) -> Option<&'static str> {
    let NoPlan::NothingFits { untried, .. } = no_plan else { return None };
    untried.map(|untried| match untried {
        Untried::Plans => "plans",
        Untried::Changes => "changes",
    })
}

#[cfg(test)]
mod tests {
    use ir::units::Bytes;

    use super::*;

    #[test]
    fn plans_that_were_not_tried_are_told_in_words_and_as_data() {
        let (stage, term, relaxations) = (0, "parameters".into(), Vec::new());
        let (needed, capacity, untried) = (Bytes(2e9), Bytes(1e9), Some(Untried::Plans));
        let no_plan = NoPlan::NothingFits {
            need: Need::Closest,
            stage,
            term,
            needed,
            capacity,
            also: None,
            relaxations,
            untried,
        };
        assert!(no_plan.to_string().starts_with("no plan was found in time"), "{no_plan}");
        assert_eq!(super::relaxations(&no_plan), "hint: time was over before all plans were tried\n");
        let document: serde_json::Value = serde_json::from_str(&no_plan_json(&no_plan).unwrap()).unwrap();
        assert_eq!(document["no_plan"]["untried"], "plans");
    }
}
