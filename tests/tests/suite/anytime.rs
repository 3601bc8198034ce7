//! A search that is ended early has a plan, says what is left to gain, and is found again by the work it took.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use ir::plan::Plan;
use planner::optimize_until;
use planner::request::{NoPlan, OffloadKind, Stop, Untried, Wait};
use serde_json::Value;
use tests::{json, planner};

use crate::exhaustive::question;

const QUESTION: &[&str] =
    &["optimize", "llama-3-70b", "dgx-h100", "--nodes", "4", "--global-batch", "64", "--json"];

fn asked(more: &[&str]) -> String {
    let said = planner(&[QUESTION, more].concat());
    assert_eq!(said.code, 0, "{said}");
    said.out
}

fn plan(more: &[&str]) -> Value {
    serde_json::from_str(&asked(more)).unwrap()
}

fn time(plan: &Value) -> f64 {
    plan["predicted"]["step_time_s"].as_f64().unwrap()
}

#[test]
fn no_time_at_all_gives_the_plan_of_the_least_work() {
    let hurried = asked(&["--budget", "0"]);
    let plan: Value = serde_json::from_str(&hurried).unwrap();
    let work = plan["search"]["stopped_after"].as_u64().unwrap();
    assert_eq!(asked(&["--work", &work.to_string(), "--threads", "1"]), hurried);
    let proof = plan["search"]["proof"].as_str().unwrap();
    assert!(proof.contains(&format!("--work {work} finds the same plan")), "{proof}");
}

#[test]
fn more_work_finds_no_worse_a_plan_and_bounds_hold() {
    let answer = asked(&[]);
    let whole: Value = serde_json::from_str(&answer).unwrap();
    assert!(whole["search"]["stopped_after"].is_null());
    let mut before = f64::INFINITY;
    for work in ["1", "2", "4", "8", "16"] {
        let some = plan(&["--work", work]);
        let search = &some["search"];
        assert!(time(&some) <= before && time(&some) >= time(&whole), "{work}: {}", time(&some));
        // What was promised not to be undercut is not.
        assert!(search["lower_bound_s"].as_f64().unwrap() <= time(&whole), "{work}: {search}");
        let gap = time(&some) / search["lower_bound_s"].as_f64().unwrap() - 1.0;
        assert!((gap - search["gap"].as_f64().unwrap()).abs() < 1e-12, "{work}: {search}");
        before = time(&some);
    }
    assert!(plan(&["--work", "1"])["search"]["gap"].as_f64() > Some(0.0));
    // A limit that is not reached leaves no trace.
    assert_eq!(asked(&["--work", "100000"]), answer);
}

/// A first plan is looked for beyond the time that was given; who then waits no longer is told that plans were left.
#[test]
fn a_first_plan_is_waited_for_until_it_is_overdue() {
    let mut request = question("llama-3-8b", "rtx4090-x8", 6, 512);
    request.pins.offload = Some(OffloadKind::None);
    let untried = |overdue: &dyn Fn(Wait) -> bool| {
        let stop = Stop { work: None, asked: &|| true, overdue };
        match optimize_until(&request, stop, &|_| ()) {
            Err(NoPlan::NothingFits { untried, .. }) => untried,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(untried(&|_| true), Some(Untried::Plans));
    assert_eq!(untried(&|_| false), Some(Untried::Changes));
}

/// Hosts are asked while half of the time is left in which a first plan is waited for, and the plan says how it is
/// found again.
#[test]
fn hosts_have_a_share_of_the_time_for_a_first_plan() {
    let mut request = question("llama-3-8b", "rtx4090-x8", 6, 512);
    let stop = Stop { work: None, asked: &|| true, overdue: &|wait| wait == Wait::Half };
    let plan = optimize_until(&request, stop, &|_| ()).unwrap();
    assert!(plan.warnings.iter().any(|what| what.contains("--pin offload=allowed")), "{:?}", plan.warnings);
    request.pins.offload = Some(OffloadKind::Allowed);
    let search = plan.search.as_ref().unwrap();
    let again =
        optimize_until(&request, Stop { work: search.stopped_after, ..Stop::never() }, &|_| ()).unwrap();
    assert_eq!(Plan { warnings: Vec::new(), ..again }, Plan { warnings: Vec::new(), ..plan.clone() });
}

#[test]
fn budgets_that_are_none_are_refused() {
    for more in [
        &["--budget", "-1"][..],
        &["--budget", "soon"],
        &["--budget", "nan"],
        &["--work", "0"],
        &["--budget", "1", "--work", "1"],
    ] {
        let said = planner(&[QUESTION, more].concat());
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
    }
}

/// Where a search is stopped before it comes to wider spaces, its bound holds for these too.
#[test]
fn a_stopped_search_bounds_what_it_had_not_come_to() {
    for (cluster, works) in [("rtx4090-x8", ["1", "2", "3"]), ("h100-a100-pcie", ["2", "4", "6"])] {
        let ask =
            |more: &[&str]| json(&[&["optimize", "gpt2", cluster, "--global-batch", "8"], more].concat());
        let best = time(&ask(&[]));
        for work in works {
            let some = ask(&["--work", work]);
            let least = some["search"]["lower_bound_s"].as_f64().unwrap();
            assert!(least <= best, "{cluster} --work {work}: {least} {best}");
        }
    }
}
