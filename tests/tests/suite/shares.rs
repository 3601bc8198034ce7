//! Stages over devices of several kinds, whose replicas run unequal shares of the micro-batches.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]
#![expect(clippy::disallowed_methods, reason = "plans are files")]

use std::path::PathBuf;

use frontends::{read_cluster, read_model, shipped_cluster, shipped_model};
use ir::plan::Plan;
use ir::plan::check::open;
use planner::request::{Job, NoPlan, Pins, Progress, Request, SharesKind, Solver, SplitKind, Stop};
use planner::target::{Target, optimize_for};
use tests::planner;

/// GPT-2 on two nodes of A100 and two of V100.
fn question(pins: Pins) -> Request {
    let model = read_model("gpt2", shipped_model("gpt2").unwrap().text).unwrap();
    let cluster = read_cluster("mixed", shipped_cluster("mixed-a100-v100").unwrap().text).unwrap();
    let job = Job { global_batch: 512, ..Job::defaults(&model, &cluster) };
    // In 1F1B: schedules that split backward fill what equal shares leave idle, and take most of what unequal ones
    // save.
    let pins = Pins {
        cp: Some(1),
        tp: Some(1),
        micro_batch: Some(4),
        split_backward: Some(SplitKind::None),
        ..pins
    };
    Request { model, cluster, job, pins, solver: Solver::Structured }
}

/// Where all run as many micro-batches, one large one each is the fastest, of which none can be given away.
#[test]
fn shares_are_found_where_equal_ones_are_of_one_micro_batch() {
    let asked = question(Pins::default());
    let whole = Pins { split_backward: Some(SplitKind::None), ..Pins::default() };
    let equal = Request { pins: Pins { shares: Some(SharesKind::Equal), ..whole.clone() }, ..asked.clone() };
    let free = Request { pins: whole, ..asked };
    let [plan, equal] = [free, equal].map(|request| answer(&request).unwrap());
    assert!(seconds(&plan) < 0.9 * seconds(&equal), "{} of {}", seconds(&plan), seconds(&equal));
    assert!(!plan.shares.is_empty());
}

fn answer(request: &Request) -> Result<Plan, NoPlan> {
    planner::optimize(request, &|_: Progress| ())
}

fn found(pins: Pins) -> Plan {
    answer(&question(pins)).unwrap()
}

fn seconds(plan: &Plan) -> f64 {
    plan.predicted.as_ref().unwrap().step_time_s.0
}

fn file(plan: &Plan, name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, serde_json::to_string(plan).unwrap()).unwrap();
    path.to_string_lossy().into_owned()
}

#[test]
fn replicas_with_shares_as_they_are_fast_beat_equal_shares_and_compute_what_one_device_does() {
    let (plan, equal) =
        (found(Pins::default()), found(Pins { shares: Some(SharesKind::Equal), ..Pins::default() }));
    assert!(equal.shares.is_empty(), "{:?}", equal.shares);
    assert!(seconds(&plan) < 0.93 * seconds(&equal), "{} {}", seconds(&plan), seconds(&equal));
    // A100 are the first two nodes.
    assert!(plan.shares[..16].iter().all(|share| *share == plan.shares[0]));
    assert!(plan.shares[0] > plan.shares[16]);
    assert_eq!(plan.shares.iter().sum::<u64>(), 32 * plan.n_micro_batches);
    assert_eq!(planner::price::price(&plan).unwrap(), *plan.predicted.as_ref().unwrap());
    let breakdown = &plan.predicted.as_ref().unwrap().breakdown;
    assert!((breakdown.total().0 / seconds(&plan) - 1.0).abs() < 1e-9, "{breakdown:?}");
    let plan = file(&plan, "shares.json");
    for command in [vec!["verify", &plan], vec!["check", &plan], vec!["ranks", &plan], vec!["prove", &plan]] {
        let said = planner(&command);
        assert_eq!(said.code, 0, "{said}");
    }
    let said = planner(&["explain", &plan]).out;
    let lines = said.lines().filter(|line| ["schedule", "shares"].iter().any(|name| line.starts_with(name)));
    insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"));
}

#[test]
fn no_other_shares_of_the_two_kinds_are_faster() {
    let plan = found(Pins::default());
    for fast in 1..2 * plan.n_micro_batches {
        let of = |at: usize| if at < 16 { fast } else { 2 * plan.n_micro_batches - fast };
        let other = Plan { shares: (0..32).map(of).collect(), ..plan.clone() };
        let time = planner::price::price(&other).unwrap().step_time_s.0;
        assert!(time >= seconds(&plan), "{fast} micro-batches on each A100 take {time}");
    }
}

#[test]
fn equal_shares_cost_what_a_plan_without_shares_costs_on_the_slowest_devices() {
    let pins = Pins { pp: Some(1), shares: Some(SharesKind::Unequal), ..Pins::default() };
    let mut plan = found(pins);
    plan.shares.fill(plan.n_micro_batches);
    let with = planner::price::price(&plan).unwrap();
    let last = plan.entries.iter_mut().find(|entry| entry.out == "sum@x0").unwrap();
    last.out = "replicated".into();
    plan.shares.clear();
    let without = planner::price::price(&plan).unwrap();
    // But for the loss, whose terms nobody adds up before the end of a step.
    let ratio = with.step_time_s / without.step_time_s;
    assert!((0.99..=1.0).contains(&ratio), "{ratio}");
}

#[test]
fn a_pipeline_of_stages_on_parts_of_all_groups_runs_with_unequal_shares() {
    let pins = Pins { pp: Some(2), shares: Some(SharesKind::Unequal), ..Pins::default() };
    let plan = found(pins);
    assert_eq!((plan.n_stages, plan.shares.len()), (2, 16));
    let device = |rank: u64| plan.cluster.groups_under(rank..rank + 1)[0].device.name.clone();
    // Both stages have A100 where the axis begins and V100 where it ends.
    let ends = [0, 15, 16, 31].map(device);
    assert_eq!(ends, ["a100-sxm-40", "v100-sxm2-32", "a100-sxm-40", "v100-sxm2-32"]);
    insta::assert_debug_snapshot!(plan.warnings);
    let verified = planner(&["verify", &file(&plan, "staged-shares.json")]);
    assert_eq!(verified.code, 0, "{verified}");
}

#[test]
fn memory_is_that_of_the_share_in_flight() {
    let pins = Pins { pp: Some(2), vpp: Some(1), shares: Some(SharesKind::Unequal), ..Pins::default() };
    let mut plan = found(pins);
    let peak = |plan: &Plan| planner::price::price(plan).unwrap().stages[0].peak_memory_bytes;
    let both_in_flight = peak(&plan);
    // One micro-batch everywhere holds one in flight, on the first of two stages too.
    plan.job.global_batch = plan.micro_batch;
    plan.n_micro_batches = 1;
    plan.shares.fill(1);
    open(&plan).unwrap();
    assert!(peak(&plan) < both_in_flight);
}

#[test]
fn engines_and_clusters_without_unequal_shares_do_not_get_them() {
    let request = question(Pins::default());
    let plan = optimize_for(&request, Target::Megatron, (Stop::never(), &|_| ())).unwrap();
    assert!(plan.shares.is_empty());
    let unequal = Pins { shares: Some(SharesKind::Unequal), ..Pins::default() };
    let said = [
        optimize_for(&question(unequal.clone()), Target::Megatron, (Stop::never(), &|_| ())),
        answer(&question(Pins { zero: Some(3), ..unequal.clone() })),
        {
            let mut alike = question(unequal);
            alike.cluster.groups[1].device = alike.cluster.groups[0].device.clone();
            alike.cluster.groups[1].links = alike.cluster.groups[0].links.clone();
            answer(&alike)
        },
    ];
    let said: Vec<String> = said.into_iter().map(|one| format!("{:?}", one.unwrap_err())).collect();
    insta::assert_snapshot!(said.join("\n"));
}
