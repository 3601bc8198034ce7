//! Checkpoints move between plans: saved under one, loaded under another, bit for bit, and training goes on as if
//! nothing had happened; what moves is what the resharding map says.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use executor::Routes;
use executor::checkpoint::{PartsOf, TrainingFacts, load, save};
use executor::element::Edges;
use executor::job::{AdamW, Chunk, Execution, Recorded, Text, TokenLayout, Training};
use executor::observe::Nobody;
use executor::run::{Outcome, Tensors, programs, run_observed};
use executor::states::States;
use executor::taken::taken;
use frontends::shipped_model;
use ir::lower::{LayerChoice, Recompute};
use ir::plan::Plan;
use ir::plan::check::{OpenPlan, open};
use ir::plan::entry::Entry;
use ir::program::{AxisSet, Home, Storage};
use ir::signature::signature;
use ir::strategy::{AxisUse, Strategy};
use planner::reshard::{Givers, Reshard, StateSizes};
use planner::rewrite::parts::{Stands, parts};
use serde_json::Value;
use tests::{done, planner};

/// Layouts of eight devices for a mixture of experts, as pins.
const OF_EXPERTS: [&str; 5] = [
    "dp=8,zero=1",
    "ep=4,dp=8,zero=2",
    "tp=2,dp=4,zero=0",
    "tp=2,pp=2,dp=2,zero=3",
    "pp=2,dp=4,zero=3,micro-batch=2",
];

/// Layouts for a dense model.
const DENSE: [&str; 6] = [
    "dp=8,zero=1",
    "tp=4,dp=2,zero=2",
    "tp=2,pp=2,dp=2,zero=3",
    "pp=2,dp=4,zero=3,micro-batch=2",
    "tp=2,dp=4,zero=0",
    "dp=8,zero=3",
];

fn scratch(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("checkpoints-{name}"))
}

/// A toy plan in a file, small enough to run whole.
fn plan_file(test: &str, model: &str, pins: &str) -> String {
    let name: String = pins.chars().filter(|c| c.is_alphanumeric()).collect();
    let path = scratch(&format!("{test}-{model}-{name}.json")).to_string_lossy().into_owned();
    let config = format!("../fixtures/golden/{}.config.json", model.trim_end_matches("-lora"));
    let adapters: &[&str] = if model.ends_with("-lora") { &["--lora", "2"] } else { &[] };
    let job = ["--devices", "8", "--global-batch", "16", "--seq-len", "16", "--precision", "fp32"];
    let made = planner(
        &[&["optimize", &config, "dgx-h100"], &job[..], &["--pin", pins, "-o", &path], adapters].concat(),
    );
    assert_eq!(made.code, 0, "{made}");
    path
}

fn plan(file: &str) -> (Plan, OpenPlan) {
    #[expect(clippy::disallowed_methods, reason = "a test of files")]
    let plan: Plan = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let opened = open(&plan).unwrap();
    (plan, opened)
}

/// The same plan with layers as they were asked for: every operator along the sequences of the batch, as in data
/// parallel, and optimizer states cut over all devices. The search fuses the products of every model of this size.
fn separate(plan: &Plan, opened: &OpenPlan) -> Plan {
    let mut separate = Plan { forms: Vec::new(), predicted: None, search: None, ..plan.clone() };
    let mut model = opened.model.clone();
    let all = AxisSet::of(&plan.mesh.axis_ids().collect::<Vec<_>>());
    for (entry, known) in separate.entries.iter_mut().zip(&opened.entries) {
        let Some(layer) = opened.originals.get(&known.layer) else { continue };
        let along = |op: &ir::graph::Op| {
            let factor = signature(layer, op).factor("b");
            let mut strategy = Strategy::SAME;
            for axis in plan.mesh.axis_ids() {
                strategy.0[axis.0] = factor.map_or(strategy.0[axis.0], AxisUse::Factor);
            }
            strategy
        };
        let storage = |tensor| match layer.is_trained(tensor) {
            true => Storage { optimizer: all, ..Storage::default() },
            false => Storage::frozen(AxisSet::EMPTY),
        };
        let choice = LayerChoice {
            stream: known.choice.stream,
            out: known.choice.out,
            strategies: layer.ops.iter().map(along).collect(),
            recompute: vec![Recompute::Keep; layer.ops.len()],
            kept: Home::Device,
            parameters: Home::Device,
            storage: layer.parameters().map(|tensor| (tensor, storage(tensor))).collect(),
            shared: BTreeSet::new(),
        };
        model.layers[known.layer] = layer.clone();
        *entry = Entry::of(layer, &plan.mesh, &choice);
    }
    separate.model = ir::native::write(&model);
    separate
}

fn execution<'a>(plan: &'a Plan, opened: &'a OpenPlan) -> Execution<'a> {
    let layers = |run: &ir::plan::EntryRun| std::iter::repeat_n(run.entry, run.count as usize);
    let chunk = |runs: &Vec<ir::plan::EntryRun>| Chunk { layers: runs.iter().flat_map(layers).collect() };
    Execution {
        model: &opened.model,
        meshes: plan.meshes(),
        n_stages: plan.n_stages as u32,
        placement: plan.schedule.placement(),
        chunks: plan.chunks.iter().map(chunk).collect(),
        choices: opened.entries.iter().map(|entry| (entry.layer, entry.choice.clone())).collect(),
        micro_batch: plan.micro_batch,
        n_micro_batches: plan.n_micro_batches as u32,
        shares: Vec::new(),
        sequence: plan.job.sequence,
        tokens: TokenLayout { order: plan.job.token_order, parts: opened.token_parts(plan) },
        table: plan.actions().unwrap(),
        slices: ir::slices::Slices::whole(plan.job.sequence),
        seed: 3,
        given: Tensors::new(),
        steps: 2,
        optimizer: AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-3, weight_decay: 0.1 },
        edges: Edges::Exact,
        training: Training { text: Text::Chain, from: None, record: Recorded::States },
    }
}

fn train(execution: &Execution<'_>, steps: u32, from: Option<&States>) -> Outcome {
    let training = Training { from, ..execution.training };
    let execution = Execution { steps, training, ..execution.clone() };
    let programs = programs(&execution).unwrap();
    run_observed::<f64>(&execution, (&programs, &Routes::default()), (&|_, _| 0, &Nobody)).unwrap()
}

fn parts_of(plan: &Plan, opened: &OpenPlan) -> PartsOf {
    let runs = plan.chunks.iter().flatten();
    let mut all = PartsOf::new();
    for (layer_idx, entry) in
        runs.flat_map(|run| std::iter::repeat_n(run.entry, run.count as usize)).enumerate()
    {
        let (kind, layer) = (opened.entries[entry].layer, opened.layer(entry));
        let stands = opened.originals.get(&kind).map(|original| Stands { form: layer, original });
        for (tensor, parts) in parts(layer, stands).unwrap() {
            let is_copy = |tie: &ir::graph::Tie| tie.copy.layer == kind && tie.copy.tensor == tensor;
            if !opened.model.ties.iter().any(is_copy) {
                all.insert((layer_idx, layer.tensors[tensor.0].name.clone()), parts);
            }
        }
    }
    all
}

fn facts() -> TrainingFacts {
    TrainingFacts {
        model: "toy".into(),
        precision: "f64".into(),
        seed: 3,
        learning_rate: 1e-2,
        sequences_per_step: 16,
        sequence: 16,
    }
}

fn saved(outcome: &Outcome, parts: &PartsOf) -> Vec<(String, Vec<u8>)> {
    save(outcome.states.as_ref().unwrap(), &outcome.shards, parts, facts()).unwrap()
}

fn read(files: &[(String, Vec<u8>)]) -> executor::checkpoint::Checkpoint {
    let mut find = |name: &str| Ok(files.iter().find(|(file, _)| file == name).unwrap().1.clone());
    load(&mut find).unwrap()
}

/// From each layout to each other: what arrives is what left, to the bit, and who gives how much is as the map says.
fn check_every_pair(model: &str, layouts: &[&str]) -> Vec<Plan> {
    let mut plans: Vec<(Plan, OpenPlan)> =
        layouts.iter().map(|pins| plan(&plan_file("pairs", model, pins))).collect();
    let apart = separate(&plans[0].0, &plans[0].1);
    let opened = open(&apart).unwrap();
    plans.push((apart, opened));
    let fused: BTreeSet<Vec<String>> = plans
        .iter()
        .map(|(plan, _)| plan.forms.iter().flat_map(|form| form.fused.clone()).collect())
        .collect();
    assert!(fused.len() > 1 && fused.contains(&Vec::new()), "{fused:?}");
    for (first, opened) in &plans {
        let before = execution(first, opened);
        let own = parts_of(first, opened);
        let outcome = train(&before, 2, None);
        let files = saved(&outcome, &own);
        let checkpoint = read(&files);
        assert_eq!(Some(&checkpoint.states(&own).unwrap().0), outcome.states.as_ref());
        for (second, opened_second) in &plans {
            let after = execution(second, opened_second);
            let parts = parts_of(second, opened_second);
            let (states, writers) = checkpoint.states(&parts).unwrap();
            // Loaded under the second plan, saved by it without a step, and read as the first has it.
            let there = train(&after, 0, Some(&states));
            let back = read(&saved(&there, &parts)).states(&own).unwrap().0;
            assert_eq!(Some(&back), outcome.states.as_ref());
            // Who gives how much: counted by elements, and by regions.
            let programs = programs(&after).unwrap();
            let counted: BTreeMap<(u64, u64), u64> = taken(&after, &programs, &writers)
                .unwrap()
                .into_iter()
                .map(|(pair, n)| (pair, 8 * n.parameter + 24 * n.optimizer))
                .filter(|(_, bytes)| *bytes > 0)
                .collect();
            let sizes = StateSizes { parameter: 8, optimizer: 24 };
            let map =
                |givers| Reshard::new((first, opened), (second, opened_second), givers).unwrap().map(sizes);
            assert_eq!(map(Givers::Writers).pairs, counted, "{} to {}", first.roles, second.roles);
            // Whoever gives, every rank takes as much.
            let per_taker = |pairs: &BTreeMap<(u64, u64), u64>| {
                let mut sums = BTreeMap::new();
                pairs.iter().for_each(|((_, to), bytes)| *sums.entry(*to).or_insert(0) += bytes);
                sums
            };
            let direct = map(Givers::Ranks);
            assert_eq!(per_taker(&direct.pairs), per_taker(&counted));
            if std::ptr::eq(first, second) {
                assert_eq!(direct.total().moves, 0);
            }
            assert!(direct.total().moves <= map(Givers::Writers).total().moves);
        }
    }
    plans.into_iter().map(|(plan, _)| plan).collect()
}

#[test]
fn every_layout_of_a_dense_model_loads_what_any_other_saved() {
    check_every_pair("llama", &DENSE);
}

/// Frozen weights have no moments, and are written as they are stored.
#[test]
fn every_layout_of_adapters_loads_what_any_other_saved() {
    check_every_pair("llama-lora", &["dp=8,zero=1", "dp=8,zero=3", "tp=2,pp=2,dp=2,zero=3"]);
}

/// On one stage a tied head is the embedding's table; on several it is another tensor.
#[test]
fn every_layout_of_a_tied_model_loads_what_any_other_saved() {
    let plans =
        check_every_pair("gpt", &["dp=8,pp=1,zero=1", "tp=2,dp=4,pp=1,zero=3", "tp=2,pp=2,dp=2,zero=1"]);
    let shared = |plan: &Plan| plan.entries.iter().flat_map(|entry| &entry.parameters).any(|one| one.shared);
    assert_eq!(plans.iter().map(shared).collect::<Vec<bool>>(), [true, true, false, true]);
}

#[test]
fn every_layout_of_a_mixture_of_experts_loads_what_any_other_saved() {
    check_every_pair("moe", &OF_EXPERTS);
}

fn losses(words: &[&str]) -> Vec<f64> {
    let said = planner(words);
    assert_eq!(said.code, 0, "{said}");
    let trained: Value = serde_json::from_str(&said.out).unwrap();
    trained["losses"].as_array().unwrap().iter().map(|loss| loss["plan"].as_f64().unwrap()).collect()
}

/// An empty place for a folder.
fn folder(name: &str) -> String {
    let path = scratch(name);
    let _ = fs::remove_dir_all(&path);
    path.to_string_lossy().into_owned()
}

#[test]
fn training_goes_on_under_another_plan_as_if_it_had_not_stopped() {
    let first = plan_file("on", "llama", "pp=2,dp=4,zero=3,micro-batch=2");
    let (fused, opened) = plan(&plan_file("on", "llama", "dp=8,zero=1"));
    let second = scratch("on-separate.json").to_string_lossy().into_owned();
    #[expect(clippy::disallowed_methods, reason = "a test of files")]
    fs::write(&second, serde_json::to_string(&separate(&fused, &opened)).unwrap()).unwrap();
    let at = folder("on");
    let run = |plan: &str, steps: &str, more: &[&str]| {
        losses(&[&["run", plan, "--whole", "--json", "--steps", steps], more].concat())
    };
    let whole = run(&first, "12", &[]);
    let before = run(&first, "6", &["--save", &at]);
    let after = run(&second, "6", &["--load", &at]);
    for (a, b) in before.iter().chain(&after).zip(&whole) {
        assert!((a - b).abs() <= 1e-9 * b, "{a} {b}");
    }
    assert_eq!(before.len() + after.len(), whole.len());
}

/// What `run` says of a checkpoint that was changed.
fn complaint(plan: &str, at: &Path, change: impl Fn(&Path), more: &[&str]) -> String {
    let spoilt = PathBuf::from(folder("spoilt"));
    fs::create_dir(&spoilt).unwrap();
    for entry in fs::read_dir(at).unwrap() {
        let entry = entry.unwrap().path();
        fs::copy(&entry, spoilt.join(entry.file_name().unwrap())).unwrap();
    }
    change(&spoilt);
    let words = ["run", plan, "--whole", "--steps", "1", "--load", &spoilt.to_string_lossy()];
    let said = planner(&[&words[..], more].concat());
    assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
    said.err
        .replace(&*spoilt.to_string_lossy(), "DIR")
        .lines()
        .filter(|line| !line.starts_with("training "))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// Makes the last value of a file in f64 one that is no number.
fn end_in_no_number(bytes: &mut [u8]) {
    let from = bytes.len() - 8;
    bytes[from..].copy_from_slice(&f64::NAN.to_le_bytes());
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a test of files")]
fn broken_checkpoints_are_refused() {
    let plan = plan_file("broken", "llama", "dp=8,zero=1");
    let at = folder("broken");
    assert_eq!(planner(&["run", &plan, "--whole", "--steps", "1", "--save", &at]).code, 0);
    let again = planner(&["run", &plan, "--whole", "--steps", "1", "--save", &at]);
    assert_eq!(again.code, 2, "{again}");
    assert!(again.err.contains("there is something already"), "{again}");
    let index = |change: fn(&mut Value)| {
        move |folder: &Path| {
            let file = folder.join("checkpoint.json");
            let mut value: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
            change(&mut value);
            fs::write(&file, serde_json::to_string(&value).unwrap()).unwrap();
        }
    };
    let rank = "rank-00001.safetensors";
    let spoil = |change: fn(&mut Vec<u8>)| {
        move |folder: &Path| {
            let mut bytes = fs::read(folder.join(rank)).unwrap();
            change(&mut bytes);
            fs::write(folder.join(rank), bytes).unwrap();
        }
    };
    // Somebody who changes a file may also write its digest anew.
    let signed = |change: &dyn Fn(&Path), folder: &Path| {
        change(folder);
        let digest = executor::checkpoint::digest(&fs::read(folder.join(rank)).unwrap());
        let file = folder.join("checkpoint.json");
        let mut value: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        value["files"][1]["sha256"] = digest.into();
        fs::write(&file, value.to_string()).unwrap();
    };
    let another =
        |folder: &Path| _ = fs::copy(folder.join("rank-00002.safetensors"), folder.join(rank)).unwrap();
    let nothing = |_: &Path| ();
    let at = Path::new(&at);
    let said = [
        complaint(&plan, at, |folder| fs::remove_file(folder.join("checkpoint.json")).unwrap(), &[]),
        complaint(&plan, at, |folder| fs::remove_file(folder.join(rank)).unwrap(), &[]),
        complaint(&plan, at, spoil(|bytes| bytes.truncate(100)), &[]),
        complaint(&plan, at, |folder| signed(&spoil(|bytes| bytes[0] ^= 0xff), folder), &[]),
        complaint(&plan, at, |folder| signed(&another, folder), &[]),
        complaint(&plan, at, spoil(|bytes| *bytes.last_mut().unwrap() ^= 1), &[]),
        complaint(&plan, at, |folder| fs::write(folder.join("checkpoint.json"), "{").unwrap(), &[]),
        complaint(&plan, at, index(|index| index["planner_checkpoint"] = 9.into()), &[]),
        complaint(&plan, at, index(|index| index["colour"] = "red".into()), &[]),
        complaint(&plan, at, index(|index| index["steps"] = u64::MAX.into()), &[]),
        complaint(&plan, at, index(|index| index["training"]["learning_rate"] = (-0.01).into()), &[]),
        complaint(&plan, at, |folder| signed(&spoil(|bytes| end_in_no_number(bytes)), folder), &[]),
        complaint(&plan, at, index(|index| index["files"][1]["name"] = "../../etc/passwd".into()), &[]),
        complaint(&plan, at, index(|index| _ = index["files"].as_array_mut().unwrap().pop()), &[]),
        complaint(
            &plan,
            at,
            index(|index| index["parameters"]["0.table"]["shape"] = serde_json::json!([u64::MAX, 16])),
            &[],
        ),
        complaint(
            &plan,
            at,
            index(|index| index["parameters"]["0.table"]["shape"] = serde_json::json!([16, 29])),
            &[],
        ),
        complaint(
            &plan,
            at,
            index(|index| index["parameters"]["7.w"] = serde_json::json!({"shape": [0], "moments": false})),
            &[],
        ),
        complaint(&plan, at, nothing, &["--precision", "f32"]),
        complaint(&plan, at, nothing, &["--seed", "8"]),
        complaint(&plan_file("broken", "gpt", "dp=8,zero=1"), at, nothing, &[]),
    ];
    insta::assert_snapshot!(said.join("\n"));
}

/// Of two models whose layers are alike one has a table for embedding and head: the other's head has states of its own.
#[test]
#[expect(clippy::disallowed_methods, reason = "a model is written to a file of its own")]
fn a_tied_head_is_no_head_of_its_own() {
    let plan = |is_tied: bool| {
        let mut config: Value = serde_json::from_str(shipped_model("gpt2").unwrap().text).unwrap();
        config["tie_word_embeddings"] = is_tied.into();
        let files = ["model", "plan"].map(|what| scratch(&format!("tied-{is_tied}-{what}.json")));
        let [model, plan] = files.map(|file| file.to_string_lossy().into_owned());
        fs::write(&model, config.to_string()).unwrap();
        done(&["optimize", &model, "dgx-h100", "--devices", "1", "--global-batch", "8", "-o", &plan]);
        plan
    };
    let (tied, untied) = (plan(true), plan(false));
    for (from, to, which) in [(&tied, &untied, "first"), (&untied, &tied, "second")] {
        let said = planner(&["reshard", from, to]);
        let why = format!("is one with that of another layer in the {which} plan's model only");
        assert!(said.code == 2 && said.err.contains(&why) && said.err.contains("of one model"), "{said}");
    }
}

#[test]
fn the_map_between_two_plans_is_told() {
    let first = plan_file("told", "llama", "pp=2,dp=4,zero=3,micro-batch=2");
    let second = plan_file("told", "llama", "tp=4,dp=2,zero=2");
    let other = plan_file("told", "gpt", "dp=8,zero=1");
    let shown = |words: &[&str]| planner(words).to_string().replace(&*scratch("told-").to_string_lossy(), "");
    insta::assert_snapshot!(
        [
            shown(&["reshard", &first, &second, "--tensor", "1.attention.k.weight"]),
            shown(&["reshard", &first, &first]),
            shown(&["reshard", &first, &other]),
            shown(&["reshard", &first, &second, "--tensor", "1.attention"]),
        ]
        .join("\n")
    );
    let said = planner(&["reshard", &first, &second, "--tensors", "--json"]);
    let answer: Value = serde_json::from_str(&said.out).unwrap();
    let sum = |key: &str| {
        let all = answer["tensors"].as_array().unwrap().iter();
        all.map(|tensor| tensor[key].as_u64().unwrap()).sum::<u64>()
    };
    let pairs: u64 =
        answer["pairs"].as_array().unwrap().iter().map(|pair| pair["bytes"].as_u64().unwrap()).sum();
    assert_eq!(sum("moves_bytes"), pairs);
    assert!(sum("stays_bytes") > 0);
}
