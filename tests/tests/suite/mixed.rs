//! Clusters of several kinds of devices: each stage is priced on its own, and the result runs.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]
#![expect(clippy::disallowed_methods, reason = "plans are files")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use cost_model::Constants;
use frontends::{read_cluster, read_model, shipped_cluster, shipped_model};
use ir::cluster::{Cluster, Precision};
use ir::engine::{Engine, Generation};
use ir::plan::check::open;
use ir::plan::{EntryRun, Plan};
use planner::request::{AxesKind, Job, Pins, Progress, RecomputeKind, Request, Solver, SplitKind};
use tests::planner;

/// Two nodes of A100 and two of V100.
fn question() -> Request {
    let model = read_model("llama-2-7b", shipped_model("llama-2-7b").unwrap().text).unwrap();
    let cluster = read_cluster("mixed", shipped_cluster("mixed-a100-v100").unwrap().text).unwrap();
    let job = Job { global_batch: 256, ..Job::defaults(&model, &cluster) };
    let pins = Pins { cp: Some(1), tp: Some(1), micro_batch: Some(1), ..Pins::default() };
    Request { model, cluster, job, pins, solver: Solver::Structured }
}

fn found(request: &Request) -> Plan {
    planner::optimize(request, &|_: Progress| ()).unwrap()
}

/// The plan for a cluster that differs.
fn on(change: impl Fn(&mut Cluster)) -> Plan {
    let mut request = question();
    change(&mut request.cluster);
    found(&request)
}

fn seconds(plan: &Plan) -> f64 {
    plan.predicted.as_ref().unwrap().step_time_s.0
}

fn only(group: usize) -> Plan {
    on(|cluster| {
        cluster.groups = vec![cluster.groups[group].clone()];
        cluster.tiers.last_mut().unwrap().devices = cluster.groups[0].count;
    })
}

#[test]
fn two_kinds_of_devices_together_are_faster_than_either_and_than_twice_the_slower() {
    let (mixed, fast, slow) = (found(&question()), only(0), only(1));
    let all_slow = on(|cluster| cluster.groups[0].device = cluster.groups[1].device.clone());
    let others = [seconds(&fast), seconds(&slow), seconds(&all_slow)];
    assert!(others.iter().all(|other| seconds(&mixed) < 0.9 * other), "{} of {others:?}", seconds(&mixed));
    // Never faster than the devices together.
    let together = 1.0 / (1.0 / seconds(&fast) + 1.0 / seconds(&slow));
    assert!(seconds(&mixed) > 0.9 * together, "{} of {together}", seconds(&mixed));
}

#[test]
fn every_stage_has_the_time_and_the_memory_of_its_own_devices() {
    let plan = found(&question());
    let stages = &plan.predicted.as_ref().unwrap().stages;
    let n = plan.mesh.n_devices();
    for (at, stage) in (0_u64..).zip(stages) {
        let groups = plan.cluster.groups_under(at * n..(at + 1) * n);
        assert_eq!(groups.len(), 1, "a stage lies on one group");
        assert_eq!(stage.capacity_bytes, groups[0].device.memory_bytes);
        assert!(stage.peak_memory_bytes <= stage.capacity_bytes);
    }
    let layers = |name: &str| -> u64 {
        let on = |at: u64| plan.cluster.groups_under(at * n..at * n + 1)[0].device.name == name;
        (0_u64..).zip(stages).filter(|(at, _)| on(*at)).map(|(_, stage)| stage.layers).sum()
    };
    // 312 TFLOP/s against 125.
    let ratio = layers("a100-sxm-40") as f64 / layers("v100-sxm2-32") as f64;
    assert!((2.0..3.0).contains(&ratio), "{ratio}");
    assert!(plan.warnings.iter().all(|warning| !warning.contains("priced as if")), "{:?}", plan.warnings);
    assert_eq!(planner::price::price(&plan).unwrap(), plan.predicted.unwrap());
}

#[test]
fn a_stage_on_several_kinds_of_devices_waits_for_the_slowest_and_the_plan_says_so() {
    let pins = Pins { pp: Some(1), ..question().pins };
    let mut request = Request { pins, ..question() };
    // So many A100 that they are worth their memory.
    request.cluster.groups[1].count = 8;
    request.cluster.tiers[1].devices = 24;
    request.cluster.groups[0].device.memory_bytes = request.cluster.groups[1].device.memory_bytes;
    request.job.global_batch = 240;
    let devices = request.cluster.groups.clone();
    request.cluster.groups[0].device = devices[1].device.clone();
    request.cluster.groups[0].device.name = "the same by another name".into();
    let plan = found(&request);
    insta::assert_debug_snapshot!(plan.warnings);
}

#[test]
fn a_plan_over_two_kinds_of_devices_runs_and_computes_what_one_device_does() {
    let plan = found(&question());
    open(&plan).unwrap();
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("mixed.json");
    std::fs::write(&path, serde_json::to_string(&plan).unwrap()).unwrap();
    let file = path.to_string_lossy();
    let verified = planner(&["verify", &file]);
    assert_eq!(verified.code, 0, "{verified}");
    let estimated = planner(&["estimate", "--plan", &file, "--json"]);
    assert_eq!(estimated.code, 0, "{estimated}");
}

#[test]
fn schedules_that_split_backward_are_asked_of_unlike_devices_too() {
    let of = |pins: Pins| {
        let mut request = Request { pins, ..question() };
        request.model = read_model("llama-2-13b", shipped_model("llama-2-13b").unwrap().text).unwrap();
        request.job = Job { sequence: 256, global_batch: 1, precision: Precision::Fp32, ..request.job };
        found(&request)
    };
    let free = of(Pins::default());
    let whole = of(Pins { split_backward: Some(SplitKind::None), ..Pins::default() });
    assert!(free.schedule.splits_backward(), "{}", free.schedule);
    assert!(seconds(&free) < 0.9 * seconds(&whole), "{} {}", seconds(&free), seconds(&whole));
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("mixed-split.json");
    std::fs::write(&path, serde_json::to_string(&free).unwrap()).unwrap();
    let verified = planner(&["verify", &path.to_string_lossy()]);
    assert_eq!(verified.code, 0, "{verified}");
}

#[test]
fn devices_that_would_only_be_waited_for_are_left_out() {
    let plan = on(|cluster| {
        let slow = &mut cluster.groups[1].device;
        slow.peak_flops_per_s.values_mut().for_each(|rate| *rate = *rate / 100.0);
        slow.memory_bandwidth_bytes_per_s = slow.memory_bandwidth_bytes_per_s / 100.0;
    });
    assert_eq!(seconds(&plan), seconds(&only(0)));
    insta::assert_debug_snapshot!(plan.warnings);
}

/// A plan whose first stages are tensor parallel over all devices of a node, and the others data parallel.
fn spliced() -> Plan {
    let of = |pins: Pins| {
        // A model whose ends share no parameter, and whose layers have the same form in both plans.
        let model = read_model("gpt-neox-20b", shipped_model("gpt-neox-20b").unwrap().text).unwrap();
        let cluster = read_cluster("dgx-a100-80", shipped_cluster("dgx-a100-80").unwrap().text).unwrap();
        let mut request = Request { model, cluster, pins, ..question() };
        request.cluster.groups[0].count = 16;
        request.cluster.tiers[1].devices = 16;
        found(&request)
    };
    // Both lie on one mesh, whatever other meshes their degrees could have.
    let axes = Some(AxesKind::Named);
    let pins =
        Pins { pp: Some(2), vpp: Some(1), recompute: Some(RecomputeKind::Full), axes, ..Pins::default() };
    let narrow = of(Pins { tp: Some(8), cp: Some(1), micro_batch: Some(8), ..pins.clone() });
    let mut wide = of(Pins { dp: Some(8), cp: Some(1), micro_batch: Some(1), ..pins });
    assert_eq!((&narrow.mesh, narrow.micro_batch), (&wide.mesh, wide.micro_batch));
    let first = wide.entries.len();
    let mut front = narrow.chunks[0].clone();
    front.iter_mut().for_each(|run| run.entry += first);
    wide.entries.extend(narrow.entries);
    let layers = |runs: &[EntryRun]| runs.iter().map(|run| run.count).sum::<u64>();
    let missing = layers(&front).abs_diff(layers(&wide.chunks[0]));
    assert_eq!(missing, 0, "both cut the layers alike");
    wide.chunks[0] = front;
    used_alone(wide)
}

/// The plan without entries that no chunk has, and without figures.
fn used_alone(mut plan: Plan) -> Plan {
    let used: BTreeSet<usize> = plan.chunks.iter().flatten().map(|run| run.entry).collect();
    let number: BTreeMap<usize, usize> = used.iter().copied().zip(0..).collect();
    plan.entries = used.iter().map(|&at| plan.entries[at].clone()).collect();
    plan.chunks.iter_mut().flatten().for_each(|run| run.entry = number[&run.entry]);
    (plan.predicted, plan.search) = (None, None);
    plan.runners_up.clear();
    plan
}

#[test]
fn stages_may_cut_their_work_in_different_ways_and_convert_the_stream_between_them() {
    let mut plan = spliced();
    let predicted = planner::price::price(&plan).unwrap();
    let roles = |stage: usize| predicted.stages[stage].roles.clone().unwrap();
    assert_eq!((roles(0).tp, roles(0).dp), (8, 1));
    assert_eq!((roles(1).tp, roles(1).dp), (1, 8));
    // Tokens of all sequences arrive, and all tokens of some are wanted.
    assert!(predicted.stages[1].bytes_per_tier["nvlink"].0 > 0.0);
    plan.predicted = Some(predicted);
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("spliced.json");
    std::fs::write(&path, serde_json::to_string(&plan).unwrap()).unwrap();
    let file = path.to_string_lossy();
    let verified = planner(&["verify", &file]);
    assert_eq!(verified.code, 0, "{verified}");
    assert!(verified.out.contains("pipeline, all-to-all"), "{verified}");
    let estimated = planner(&["estimate", "--plan", &file]);
    let said: Vec<&str> = estimated.out.lines().filter(|line| line.starts_with("stage ")).collect();
    insta::assert_snapshot!(said.join("\n"));
}

#[test]
fn a_stage_has_the_links_of_its_group() {
    let mut request = question();
    request.pins = Pins { tp: Some(8), cp: Some(1), pp: Some(2), ..Pins::default() };
    let with = found(&request);
    request.cluster.groups.iter_mut().for_each(|group| group.links.clear());
    let without = found(&request);
    // The A100 have NVLink of 300 GB/s instead of 150, and four times the network.
    assert!(seconds(&with) < seconds(&without), "{} of {}", seconds(&with), seconds(&without));
    assert_eq!(planner::price::price(&with).unwrap(), with.predicted.unwrap());
}

#[test]
fn a_new_plan_keeps_the_devices_where_the_old_one_has_them() {
    let mut plan = found(&question());
    plan.cluster.groups.reverse();
    let request = Request { cluster: plan.cluster.clone(), ..question() };
    let again = planner::optimize_in_order(&request, &Constants::load(), &|_| ()).unwrap();
    assert_eq!(again.cluster, plan.cluster);
}

#[test]
fn the_pipeline_lies_over_the_link_between_regions_and_nothing_else_does() {
    let cluster = read_cluster("regions", shipped_cluster("three-regions").unwrap().text).unwrap();
    let job = Job { global_batch: 192, ..Job::defaults(&question().model, &cluster) };
    let pins = Pins { cp: Some(1), tp: Some(1), micro_batch: Some(1), ..Pins::default() };
    let plan = found(&Request { cluster, job, pins, ..question() });
    let n = plan.mesh.n_devices();
    assert!(plan.n_stages > 1 && plan.n_devices() == 48);
    let region = |rank: u64| rank / plan.cluster.tiers[1].devices;
    assert!((0..plan.n_stages).all(|stage| region(stage * n) == region((stage + 1) * n - 1)));
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("regions.json");
    std::fs::write(&path, serde_json::to_string(&plan).unwrap()).unwrap();
    let verified = planner(&["verify", &path.to_string_lossy()]);
    assert_eq!(verified.code, 0, "{verified}");
    let far: Vec<&str> = verified.out.lines().filter(|line| line.contains("wide-area")).collect();
    assert!(!far.is_empty() && far.iter().all(|line| line.starts_with("pipeline, send-receive")), "{far:?}");
}

/// Fast devices without room for the layers that they have time for: the slower ones hold them, and the bound says so.
#[test]
fn a_bound_counts_what_the_devices_of_every_stage_have_room_for() {
    let with = |memory: f64, axes: Option<AxesKind>| {
        let model = read_model("gpt3-175b", shipped_model("gpt3-175b").unwrap().text).unwrap();
        let mut cluster = read_cluster("regions", shipped_cluster("three-regions").unwrap().text).unwrap();
        for group in &mut cluster.groups {
            group.device.memory_bytes = group.device.memory_bytes * memory;
        }
        let defaults = Job::defaults(&model, &cluster);
        // With the libraries of its H100 that it was written for: stages that are faster leave a gap of 0.18.
        let engine = Engine { generation: Generation::Before2025, ..defaults.engine };
        let job = Job { global_batch: 256, engine, ..defaults };
        let pins = Pins { pp: Some(6), tp: Some(8), micro_batch: Some(4), axes, ..Pins::default() };
        let plan = found(&Request { model, cluster, job, pins, ..question() });
        let time = seconds(&plan);
        let search = plan.search.unwrap();
        (time, search.lower_bound_s.0, search.gap)
    };
    let named = Some(AxesKind::Named);
    let ((time, bound, gap), (_, roomy, _)) = (with(1.0, named), with(8.0, named));
    assert!(bound > 1.1 * roomy, "{bound} s, {roomy} s with more memory");
    assert!(gap < 0.15, "{gap}");
    // Where axes need not do the same in all of a layer the degrees are the same, and the bound is that of all which
    // have them.
    let (free, of_all, gap) = with(1.0, None);
    assert!(free < 0.8 * time && of_all < bound && gap < 0.16, "{free} s of {time} s, {of_all} s, {gap}");
}

/// A pipeline over a wide-area network: its stages wait for what they send, and bounds say so.
#[test]
fn a_bound_counts_what_stages_wait_for_over_slow_links() {
    let with = |bandwidth: f64| {
        let model = read_model("llama-2-13b", shipped_model("llama-2-13b").unwrap().text).unwrap();
        let mut cluster = read_cluster("regions", shipped_cluster("three-regions").unwrap().text).unwrap();
        let wide_area = cluster.tiers.last_mut().unwrap();
        wide_area.bandwidth_bytes_per_s = wide_area.bandwidth_bytes_per_s * bandwidth;
        let job = Job { global_batch: 64, ..Job::defaults(&model, &cluster) };
        let pins = Pins { pp: Some(6), tp: Some(2), vpp: Some(1), ..Pins::default() };
        let plan = found(&Request { model, cluster, job, pins, ..question() });
        (plan.search.as_ref().unwrap().lower_bound_s.0, seconds(&plan))
    };
    let ((bound, time), (near, _)) = (with(1.0), with(100.0));
    assert!(bound > 1.1 * near && bound <= time, "{bound} of {time} s, {near} s over a fast network");
}
