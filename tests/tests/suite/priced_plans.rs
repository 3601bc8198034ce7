//! Figures of plans in files: what is written is what the plan costs, what is edited is priced as edited, and the bytes
//! that are priced are those that a run sends over each tier.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use std::path::PathBuf;

use executor::job::{AdamW, Chunk, Execution, TokenLayout};
use executor::run::run;
use ir::cluster::{Cluster, Precision};
use ir::plan::check::open;
use ir::plan::{EntryRun, Plan};
use ir::schedule::table;
use planner::price::price;
use serde_json::{Value, json};
use tests::coverage::features;
use tests::planner;

/// Updates that are run.
const STEPS: u32 = 2;

/// The plan of a tiny tied model on two nodes of eight, in single precision, so that all formats have one width.
#[track_caller]
fn plan(pins: &str) -> Plan {
    let said = planner(&[
        "optimize",
        "good/tiny.json",
        "good/cluster.json",
        "--devices",
        "16",
        "--global-batch",
        "64",
        "--precision",
        "fp32",
        "--pin",
        pins,
        "--json",
    ]);
    serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// The innermost tier that joins two ranks.
fn tier_of(cluster: &Cluster, a: usize, b: usize) -> usize {
    let joins = |devices: u64| a as u64 / devices == b as u64 / devices;
    cluster.tiers.iter().position(|tier| joins(tier.devices)).unwrap()
}

/// Bytes that a run of the whole plan sends in a step, per tier.
fn counted(plan: &Plan) -> Vec<u64> {
    let opened = open(plan).unwrap();
    let layers = |run: &EntryRun| std::iter::repeat_n(run.entry, run.count as usize);
    let chunk = |runs: &Vec<EntryRun>| Chunk { layers: runs.iter().flat_map(layers).collect() };
    let (n_stages, n_micro_batches) = (plan.n_stages as u32, plan.n_micro_batches as u32);
    let execution = Execution {
        model: &opened.model,
        meshes: plan.meshes(),
        n_stages,
        placement: plan.schedule.placement(),
        chunks: plan.chunks.iter().map(chunk).collect(),
        choices: opened.entries.iter().map(|entry| (entry.layer, entry.choice.clone())).collect(),
        micro_batch: plan.micro_batch,
        n_micro_batches,
        shares: Vec::new(),
        sequence: plan.job.sequence,
        given: executor::run::Tensors::new(),
        tokens: TokenLayout::NATURAL,
        slices: ir::slices::Slices::whole(plan.job.sequence),
        table: table(plan.schedule, n_stages, n_micro_batches).unwrap(),
        seed: 1,
        steps: STEPS,
        optimizer: AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0 },
        edges: executor::element::Edges::Exact,
        training: executor::job::Training::CHECK,
    };
    let outcome = run::<f32>(&execution, &|a, b| tier_of(&plan.cluster, a, b)).unwrap();
    let mut sums = vec![0; plan.cluster.tiers.len()];
    for (traffic, bytes) in outcome.counters.sent() {
        sums[traffic.tier] += bytes / u64::from(STEPS);
    }
    sums
}

/// The same, as the plan's figures have it.
fn predicted(plan: &Plan) -> Vec<u64> {
    let stages = price(plan).unwrap().stages;
    let devices = |stage: usize| plan.mesh_of(stage as u64).n_devices() as f64;
    let of_stage = |name: &str, at: usize| stages[at].bytes_per_tier[name].0 * devices(at);
    let all = |name: &str| (0..stages.len()).map(|at| of_stage(name, at)).sum::<f64>().round() as u64;
    plan.cluster.tiers.iter().map(|tier| all(&tier.name)).collect()
}

#[track_caller]
fn assert_sends_what_is_priced(pins: &str, roles: &str) {
    let plan = plan(pins);
    assert!(plan.roles.to_string().starts_with(roles), "{}", plan.roles);
    assert_is_sent_as_priced(&plan);
}

#[track_caller]
fn assert_is_sent_as_priced(plan: &Plan) {
    let (predicted, counted) = (predicted(plan), counted(plan));
    assert_eq!(predicted.iter().sum::<u64>(), counted.iter().sum::<u64>(), "{}", plan.roles);
    // The price spreads every ring evenly; an all-reduce of the one number of the loss has but one part to send.
    let loss = 2 * size_of::<f32>() as u64 * plan.n_devices() * plan.n_micro_batches;
    for (predicted, counted) in predicted.iter().zip(&counted) {
        assert!(predicted.abs_diff(*counted) <= loss, "{predicted} {counted} {}", plan.roles);
    }
}

#[test]
fn replicas_send_the_bytes_that_are_priced() {
    assert_sends_what_is_priced("dp=16,pp=1,micro-batch=1,zero=0", "dp 16, ZeRO-0");
    assert_sends_what_is_priced("dp=16,pp=1,micro-batch=1,zero=3", "dp 16, ZeRO-3");
}

#[test]
fn tensor_parallel_devices_send_the_bytes_that_are_priced() {
    assert_sends_what_is_priced("dp=4,tp=4,pp=1,micro-batch=4,zero=1,sequence-parallel=on", "dp 4, tp 4 sp");
    assert_sends_what_is_priced(
        "dp=4,tp=4,pp=1,micro-batch=4,zero=2,sequence-parallel=off",
        "dp 4, tp 4, ZeRO",
    );
}

#[test]
fn stages_send_their_stream_and_their_shared_embedding() {
    assert_sends_what_is_priced("dp=8,pp=2,micro-batch=1,zero=1,schedule=1f1b", "dp 8, pp 2, ZeRO-1");
    assert_sends_what_is_priced("dp=2,tp=2,pp=4,micro-batch=4,zero=2,schedule=1f1b", "dp 2, tp 2, pp 4");
}

#[test]
fn virtual_stages_send_their_stream_around() {
    assert_sends_what_is_priced(
        "dp=8,pp=2,vpp=3,micro-batch=1,zero=1,schedule=interleaved",
        "dp 8, pp 2, vpp 3",
    );
}

#[test]
fn schedules_that_split_backward_wave_or_copy_send_the_bytes_that_are_priced() {
    for schedule in ["zb-h1", "zb-v", "hanayo", "chimera"] {
        let vpp = if schedule == "zb-h1" { "" } else { ", vpp 2" };
        assert_sends_what_is_priced(
            &format!("dp=4,tp=2,pp=2,micro-batch=2,zero=2,schedule={schedule}"),
            &format!("dp 4, tp 2, pp 2{vpp}"),
        );
    }
}

#[test]
fn stages_of_unequal_width_send_the_bytes_that_are_priced() {
    let mut found = 0;
    for feature in features().into_iter().filter(|feature| feature.name.starts_with("stages of unequal")) {
        let mut plan = feature.dense.unwrap().plan().unwrap();
        plan.job.precision = Precision::Fp32;
        assert!(!plan.stage_meshes.is_empty());
        assert_is_sent_as_priced(&plan);
        found += 1;
    }
    assert_eq!(found, 2);
}

#[test]
fn a_stage_that_crosses_nodes_pays_for_the_network() {
    let plan = plan("dp=2,tp=2,pp=4,micro-batch=4,zero=1");
    let stages = price(&plan).unwrap().stages;
    let network = |stage: usize| stages[stage].bytes_per_tier["infiniband"].0;
    // Stages of four devices: 0 and 1 are one node, 2 and 3 the other; the embedding is shared by 0 and 3.
    assert!(network(1) > 0.0 && network(2) == network(1), "{stages:?}");
    assert!(network(0) > 0.0 && network(0) < network(1), "{stages:?}");
}

/// A plan file of the tiny model, after edits: keys and their new values.
fn edited(name: &str, edits: &[(&str, Value)]) -> String {
    let mut plan =
        serde_json::to_value(plan("dp=8,pp=2,micro-batch=1,zero=1,recompute=none,schedule=1f1b")).unwrap();
    for (place, value) in edits {
        *plan.pointer_mut(place).unwrap_or_else(|| panic!("no {place}")) = value.clone();
    }
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    #[expect(clippy::disallowed_methods, reason = "a test of files")]
    std::fs::write(&path, serde_json::to_string(&plan).unwrap()).unwrap();
    path.to_string_lossy().into_owned()
}

#[track_caller]
fn estimated(name: &str, edits: &[(&str, Value)]) -> Value {
    let said = planner(&["estimate", "--plan", &edited(name, edits), "--json"]);
    assert_eq!(said.code, 0, "{said}");
    assert_eq!(said.err.contains("the file's own figure is a step of"), !edits.is_empty(), "{said}");
    serde_json::from_str(&said.out).unwrap()
}

#[test]
fn an_edited_plan_is_priced_by_what_it_now_says() {
    let step = |estimate: &Value| estimate["step_time_s"].as_f64().unwrap();
    let plain = estimated("plain.json", &[]);
    let slow = estimated("slow.json", &[("/cluster/tiers/0/bandwidth_bytes_per_s", json!(1e9))]);
    assert!(step(&slow) > step(&plain), "{slow}");
    let [m, b] = ["/n_micro_batches", "/micro_batch"];
    let fewer = estimated("fewer.json", &[(m, json!(4)), (b, json!(16))]);
    assert_eq!(
        (fewer["roles"]["accumulation"].as_u64(), plain["roles"]["accumulation"].as_u64()),
        (Some(4), Some(8))
    );
    let bubble = |estimate: &Value| estimate["breakdown"]["bubble_s"].as_f64().unwrap() / step(estimate);
    assert!(bubble(&fewer) > bubble(&plain), "{fewer}");
    let mut kept = plan("dp=8,pp=2,micro-batch=1,zero=1,recompute=none");
    let saved = |plan: &Plan| price(plan).unwrap().stages[0].peak_memory_bytes.0;
    let before = saved(&kept);
    kept.entries[1].ops[2].recompute = true;
    assert!(saved(&kept) < before);
}

#[test]
fn a_plan_edited_to_overflow_names_stage_term_and_changes_that_help() {
    let file = edited(
        "overflow.json",
        &[
            ("/job/sequence", json!(1 << 18)),
            ("/micro_batch", json!(32)),
            ("/n_micro_batches", json!(2)),
            ("/cluster/groups/0/device/memory_bytes", json!(8e9)),
        ],
    );
    let said = planner(&["estimate", "--plan", &file]);
    assert_eq!(said.code, 3, "{said}");
    assert!(said.err.contains("error: the plan does not fit: it needs"), "{said}");
    assert!(said.err.contains("on stage 0, most of it activations: linear"), "{said}");
    let changes = said.err.lines().skip_while(|line| !line.starts_with("a plan fits with")).skip(2).count();
    assert!(changes >= 2 && said.err.contains("another plan for the same job"), "{said}");
}

#[test]
fn an_edit_that_makes_no_sense_names_its_place() {
    let cases = [
        ("/cluster/tiers/0/bandwidth_bytes_per_s", json!(-1.0)),
        ("/cluster/tiers/0/bandwidth_bytes_per_s", json!(0)),
        ("/cluster/tiers/1/devices", json!(12)),
        ("/cluster/tiers/1/name", json!("nvlink")),
        ("/cluster/tiers", json!([])),
        ("/cluster/groups", json!([])),
        ("/cluster/groups/0/count", json!(0)),
        ("/cluster/groups/0/devices_per_node", json!(3)),
        ("/cluster/groups/0/device/memory_bytes", json!(1.0)),
        ("/cluster/groups/0/device/compute_units", json!(0)),
        ("/cluster/groups/0/device/peak_flops_per_s", json!({})),
        ("/cluster/reserve_bytes", json!(1e12)),
        ("/cluster/schema_version", json!(2)),
    ];
    let complain = |(place, value): &(&str, Value)| {
        let file = edited("senseless.json", &[(place, value.clone())]);
        let said = planner(&["estimate", "--plan", &file]);
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
        format!("{place} {value}\n{}", said.err.replace(&file, "plan.json"))
    };
    insta::assert_snapshot!(cases.iter().map(complain).collect::<String>());
}
