//! Transcripts of the command line: what it prints, where, and with which exit code.
//!
//! Figures of the cost model stand as `#`: they are judged elsewhere.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;
use tests::planner;

/// A small question whose answer is pinned, so that only its figures can change.
const PINNED: &[&str] = &[
    "optimize",
    "good/tiny.json",
    "good/cluster.json",
    "--devices",
    "8",
    "--global-batch",
    "64",
    "--pin",
    "dp=4,pp=2,micro-batch=4,zero=1,recompute=none,schedule=interleaved",
];

/// A file of this test run, by a name of its own.
fn scratch(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// A plan file made by the command line.
fn plan(name: &str) -> String {
    let path = scratch(name).to_string_lossy().into_owned();
    let made = planner(&[PINNED, &["-o", &path]].concat());
    assert_eq!(made.code, 0, "{made}");
    path
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// A transcript in which figures with a unit stand as `#`, runs of spaces as one, and scratch files without folders.
fn shape(words: &[&str]) -> String {
    let said = planner(words).to_string().replace(&*scratch("").to_string_lossy(), "");
    said.lines().map(|line| hidden(line) + "\n").collect()
}

/// Hides what the cost model decides: figures with a unit, and those that stand behind one in a table. So too powers of
/// ten: differences of rounding.
fn hidden(line: &str) -> String {
    const UNITS: &[&str] =
        &["s", "ms", "us", "%", "B", "KiB", "MiB", "GiB", "TiB", "J", "kJ", "MJ", "TFLOP/s"];
    if line.contains("searched for") {
        return "[stderr] searched".into();
    }
    let is_figure =
        |word: &str| word.starts_with(|c: char| c.is_ascii_digit()) && word.parse::<f64>().is_ok();
    let words: Vec<&str> = line.split_whitespace().collect();
    let is_unit = |word: &str| UNITS.contains(&word.trim_end_matches([',', ';', '.', ':', ')']));
    let mut shown: Vec<String> = Vec::new();
    for (i, word) in words.iter().enumerate() {
        let unit = words.get(i + 1).is_some_and(|next| is_unit(next));
        let behind = i >= 2 && shown[i - 2] == "#" && is_unit(words[i - 1]);
        shown.push(if is_figure(word) && (unit || behind || word.contains('e')) {
            "#".into()
        } else {
            (*word).to_owned()
        });
    }
    shown.join(" ")
}

#[test]
fn a_plan_is_reported_with_its_roles_time_and_memory() {
    insta::assert_snapshot!(shape(PINNED));
}

#[test]
fn a_plan_is_explained() {
    insta::assert_snapshot!(shape(&["explain", &plan("explained.json")]));
}

#[test]
fn the_ranks_of_a_plan_are_listed() {
    let file = plan("ranked.json");
    let list = planner(&["ranks", &file]).out;
    assert!(list.starts_with("rank,node,slot,group,device,stage"), "{list}");
    let ranks = json(&planner(&["ranks", &file, "--json"]).out);
    let ranks = ranks.as_array().unwrap();
    #[expect(clippy::disallowed_methods, reason = "a test of files")]
    let read = json(&fs::read_to_string(&file).unwrap());
    let of_mesh = read["mesh"]["axes"].as_array().unwrap().iter().map(|axis| axis["size"].as_u64().unwrap());
    let (n_mesh, n_stages) = (of_mesh.product::<u64>(), read["n_stages"].as_u64().unwrap());
    assert_eq!(ranks.len() as u64, n_mesh * n_stages);
    assert_eq!(list.lines().count(), ranks.len() + 1);
    for (i, rank) in (0..).zip(ranks) {
        assert_eq!((rank["rank"].as_u64(), rank["stage"].as_u64()), (Some(i), Some(i / n_mesh)), "{rank}");
        assert_eq!(rank["node"].as_u64().unwrap() * 8 + rank["slot"].as_u64().unwrap(), i, "{rank}");
    }
}

#[test]
fn the_text_of_a_plan_is_read_like_the_plan() {
    let file = plan("shown.json");
    let text = planner(&["show", &file]).out;
    let text_file = scratch("shown.txt");
    #[expect(clippy::disallowed_methods, reason = "a test of files")]
    fs::write(&text_file, &text).unwrap();
    assert_eq!(planner(&["show", &text_file.to_string_lossy()]).out, text);
    let program = planner(&["show", &file, "--program", "head"]).out;
    assert!(program.starts_with("program\n") && program.contains("  differentiate "), "{program}");
    assert_eq!(planner(&["show", &file, "--program", "nothing"]).code, 2);
}

#[test]
fn a_plan_is_verified_in_both_precisions() {
    insta::assert_snapshot!(shape(&["verify", &plan("verified.json")]));
}

#[test]
fn a_plan_is_trained_beside_one_device() {
    insta::assert_snapshot!(shape(&["run", &plan("trained.json"), "--steps", "4"]));
}

#[test]
fn a_trace_has_every_action_of_every_rank() {
    let (file, trace) = (plan("traced.json"), scratch("trace.json"));
    let words = ["run", &file, "--steps", "2", "--trace", &trace.to_string_lossy(), "--json"];
    let said = planner(&words);
    assert_eq!(said.code, 0, "{said}");
    let trained = json(&said.out);
    #[expect(clippy::disallowed_methods, reason = "a test of files")]
    let trace = json(&fs::read_to_string(&trace).unwrap());
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |what: &str| events.iter().filter(|event| event["cat"] == what).count() as u64;
    let n_ranks = trained["n_ranks"].as_u64().unwrap();
    // Two steps of four micro-batches, each forward and backward once per rank and virtual stage.
    let passes = 8 * 2 * n_ranks;
    assert_eq!((of("forward"), of("backward"), of("update")), (passes, passes, 2 * n_ranks));
    let threads: std::collections::BTreeSet<u64> =
        events.iter().filter(|event| event["ph"] == "X").filter_map(|event| event["tid"].as_u64()).collect();
    assert_eq!(threads.len() as u64, n_ranks);
    let sent = |event: &&Value| event["cat"] == "communication" && event["args"]["sent_bytes"] != 0;
    assert!(events.iter().any(|event| sent(&event)));
    assert!(events.iter().filter(|event| event["ph"] == "X").all(|event| event["dur"].as_f64() >= Some(0.0)));
}

#[test]
fn losses_of_a_training_fall_and_are_those_of_one_device() {
    for precision in ["f64", "f32", "bf16"] {
        let said =
            planner(&["run", &plan("learning.json"), "--steps", "24", "--precision", precision, "--json"]);
        assert_eq!(said.code, 0, "{said}");
        let trained = json(&said.out);
        let losses: Vec<f64> =
            trained["losses"].as_array().unwrap().iter().map(|loss| loss["plan"].as_f64().unwrap()).collect();
        assert_eq!(losses.len(), 24);
        assert!(losses[23] < 0.9 * losses[0], "{precision}: {losses:?}");
        assert!(trained["n_judged"].as_u64() >= Some(6), "{precision}: {trained}");
        assert_eq!(trained["equal"], true);
    }
}

#[test]
fn a_named_plan_is_estimated() {
    insta::assert_snapshot!(shape(&[
        "estimate",
        "gpt2",
        "dgx-h100",
        "--devices",
        "4",
        "--tp",
        "2",
        "--zero",
        "2",
        "--global-batch",
        "64"
    ]));
}

#[test]
fn what_does_not_fit_names_stage_term_and_changes_that_help() {
    insta::assert_snapshot!(shape(&[
        "estimate",
        "llama-3-8b",
        "dgx-h100",
        "--devices",
        "1",
        "--global-batch",
        "8"
    ]));
}

#[test]
fn shipped_models_and_clusters_are_listed() {
    insta::assert_snapshot!(planner(&["models"]));
    insta::assert_snapshot!(planner(&["clusters"]));
}

#[test]
fn a_model_and_a_cluster_are_described() {
    insta::assert_snapshot!(planner(&["models", "mixtral-8x7b"]));
    insta::assert_snapshot!(planner(&["clusters", "dgx-h100", "--nodes", "16"]));
}

#[test]
fn a_model_as_data_has_its_parameters_and_layers() {
    let model = json(&planner(&["models", "llama-3-8b", "--json"]).out);
    assert_eq!(model["parameters"], 8_030_261_248_u64);
    assert_eq!(model["layers"].as_array().unwrap().len(), 3);
    assert_eq!(model["n_layers"], 34);
    assert_eq!(
        json(&planner(&["models", "--json"]).out).as_array().unwrap().len(),
        frontends::shipped_models().len()
    );
}

#[test]
fn the_native_form_of_a_model_is_the_same_model() {
    let path = scratch("native.json");
    let native = planner(&["models", "deepseek-v3", "--native"]);
    #[expect(clippy::disallowed_methods, reason = "a test of files")]
    std::fs::write(&path, native.out).unwrap();
    let again = json(&planner(&["models", &path.to_string_lossy(), "--json"]).out);
    assert_eq!(again, json(&planner(&["models", "deepseek-v3", "--json"]).out));
}

#[test]
fn tokens_that_cannot_be_cut_are_whole_between_products_without_a_word() {
    let three = ["estimate", "gpt2", "dgx-h100", "--devices", "3", "--tp", "3", "--global-batch", "8"];
    let found = planner(&[&three[..], &["--json"]].concat());
    assert_eq!(found.code, 0, "{found}");
    let found: Value = serde_json::from_str(&found.out).unwrap();
    assert_eq!(found["roles"]["sequence_parallel"], false, "{found}");
    let asked = planner(&[&three[..], &["--sequence-parallel", "on"]].concat());
    assert!(asked.code == 2 && asked.err.contains("sequence-parallel=on"), "{asked}");
}

#[test]
fn an_estimate_as_data_has_every_promised_figure() {
    let said =
        planner(&["estimate", "gpt2", "dgx-h100", "--devices", "4", "--pp", "2", "--tp", "2", "--json"]);
    let estimate = json(&said.out);
    for figure in
        ["step_time_s", "model_tflops_per_device", "mfu", "tokens_per_s_per_device", "peak_memory_bytes"]
    {
        assert!(estimate[figure].as_f64().is_some_and(|figure| figure > 0.0), "{figure}: {said}");
    }
    assert_eq!(estimate["stages"].as_array().unwrap().len(), 2);
    assert!(estimate["stages"][0]["memory"]["parameters"].as_f64().unwrap() > 0.0);
    assert!(estimate["breakdown"]["compute_forward_s"].as_f64().unwrap() > 0.0);
    assert!(estimate["bytes_per_tier"]["nvlink"].as_f64().unwrap() > 0.0);
    assert_eq!(estimate["roles"]["pp"], 2);
}

#[test]
fn degrees_that_are_asked_for_are_those_of_the_plan() {
    let asked = [
        ("qwen3-30b-a3b", "--tp 8 --ep 8 --etp 1", (8, 8, 1)),
        ("mixtral-8x7b", "--tp 2 --ep 4", (2, 4, 2)),
        ("llama-3-8b", "--tp 8 --sequence-parallel off", (8, 1, 1)),
    ];
    for (model, options, (tp, ep, etp)) in asked {
        let words: Vec<&str> = options.split(' ').collect();
        let rest = ["--devices", "8", "--global-batch", "8", "--recompute", "full", "--zero", "3", "--json"];
        let said = planner(&[&["estimate", model, "dgx-h200"], &words[..], &rest].concat());
        let roles = &json(&said.out)["roles"];
        let found = ["tp", "ep", "etp"].map(|name| roles[name].as_u64().unwrap());
        assert_eq!(found, [tp, ep, etp], "{model} {options}: {roles}");
        assert_eq!(roles["sequence_parallel"], !options.contains("off"), "{roles}");
    }
}

#[test]
fn the_figures_of_a_plan_file_are_shown_again() {
    let path = plan("shown.json");
    let said = planner(&["estimate", "--plan", &path, "--json"]);
    assert_eq!(said.code, 0, "{said}");
    #[expect(clippy::disallowed_methods, reason = "a test of files")]
    let plan = json(&std::fs::read_to_string(&path).unwrap());
    assert_eq!(json(&said.out)["step_time_s"], plan["predicted"]["step_time_s"]);
}

#[test]
fn the_plan_on_standard_output_is_the_plan_in_the_file() {
    let path = scratch("printed.json");
    let said = planner(&[PINNED, &["--json", "-o", &path.to_string_lossy()]].concat());
    #[expect(clippy::disallowed_methods, reason = "a test of files")]
    let written = std::fs::read_to_string(&path).unwrap();
    assert_eq!(said.out, written);
    let plan = json(&written);
    assert!(plan["inputs"]["model"].as_str().unwrap().starts_with("sha256:"));
    assert_eq!(plan["tool_version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn the_plan_does_not_depend_on_the_number_of_threads() {
    let question =
        ["optimize", "gpt2", "dgx-h100", "--devices", "4", "--global-batch", "64", "--json", "--threads"];
    let with = |threads| planner(&[&question[..], &[threads]].concat()).out;
    let one = with("1");
    assert!(one.len() > 1000);
    assert_eq!(one, with("2"));
    assert_eq!(one, with("8"));
}

#[test]
fn the_integer_program_plans_as_fast_a_step_as_the_structured_solver() {
    for offload in ["none", "activations"] {
        let with = |solver: &str| {
            // With one micro-batch of a step, cutting gradients costs as much as not: a tie, which may fall either way.
            let question =
                ["optimize", "gpt2", "dgx-h100", "--devices", "2", "--global-batch", "512", "--json"];
            let offload = format!("offload={offload}");
            let said = planner(&[&question[..], &["--solver", solver, "--pin", &offload]].concat());
            assert_eq!(said.code, 0, "{said}");
            json(&said.out)["predicted"]["step_time_s"].as_f64().unwrap()
        };
        let (structured, program) = (with("structured"), with("microlp"));
        assert!((structured - program).abs() <= 1e-9 * structured, "{structured:e} and {program:e}");
    }
}

#[test]
fn what_is_too_large_for_the_integer_program_is_refused_with_advice() {
    let said =
        planner(&["optimize", "mixtral-8x7b", "dgx-h100", "--global-batch", "64", "--solver", "microlp"]);
    assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
    assert!(said.err.contains("layer `moe`") && said.err.contains("take the structured solver"), "{said}");
}

#[test]
fn no_plan_as_data_has_the_changes_that_help() {
    let said =
        planner(&["estimate", "llama-3-8b", "dgx-h100", "--devices", "1", "--global-batch", "8", "--json"]);
    assert_eq!(said.code, 3, "{said}");
    let overflow = &json(&said.out)["no_plan"];
    assert!(overflow["needed_bytes"].as_f64() > overflow["capacity_bytes"].as_f64());
    assert!(!overflow["relaxations"].as_array().unwrap().is_empty());
}

/// Where time is over before there is a plan, hosts are still asked for a first one; changes are left, and the answer
/// says so.
#[test]
fn no_plan_within_a_budget_says_what_was_not_tried() {
    // It must end in a part of the time that a first plan is waited for, on slow machines too.
    let question = ["optimize", "llama-3-8b", "rtx4090-x8", "--devices", "2", "--budget", "0.001"];
    let said = planner(&question);
    assert_eq!((said.code, said.out.as_str()), (3, ""), "{said}");
    assert!(said.err.contains("error: no plan fits"), "{said}");
    assert!(said.err.contains("hint: time was over before all changes were tried"), "{said}");
    let said = planner(&[&question[..], &["--json"]].concat());
    assert_eq!(json(&said.out)["no_plan"]["untried"], "changes", "{said}");
    // With what hosts hold looked at too there is none, whatever is changed.
    let said = planner(&["optimize", "deepseek-v3", "rtx4090-x8", "--budget", "0.001"]);
    assert_eq!(said.code, 3, "{said}");
    assert!(said.err.contains("error: no plan fits"), "{said}");
    assert!(said.err.contains("hint: time was over before all changes were tried"), "{said}");
}

/// Questions of an objective have one budget, and changes are tried for the whole cluster alone.
#[test]
fn no_plan_by_any_objective_has_the_same_changes() {
    let question = ["optimize", "llama-3-8b", "rtx4090-x8", "--devices", "2", "--global-batch", "6"];
    let question = [&question[..], &["--seq-len", "512", "--pin", "offload=none", "--json"]].concat();
    let of = |objective: &str| {
        let said = planner(&[&question[..], &["--objective", objective]].concat());
        assert_eq!(said.code, 3, "{said}");
        json(&said.out)["no_plan"].clone()
    };
    let changes = of("time");
    assert!(!changes["relaxations"].as_array().unwrap().is_empty(), "{changes}");
    assert_eq!(of("energy"), changes);
}

#[test]
fn the_only_pin_is_taken_back_once() {
    let said = planner(&["optimize", "llama-3-8b", "dgx-h100", "--pin", "micro-batch=512", "--json"]);
    assert_eq!(said.code, 3, "{said}");
    let overflow = &json(&said.out)["no_plan"]["relaxations"];
    let pins: Vec<&str> = overflow
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|one| one["change"].as_str().filter(|change| change.starts_with("no pinned")))
        .collect();
    assert_eq!(pins, ["no pinned micro-batch"], "{said}");
}

#[test]
fn every_command_has_help_with_an_example() {
    for command in [
        "optimize",
        "estimate",
        "prove",
        "compare",
        "ranks",
        "sweep",
        "replan",
        "pareto",
        "verify",
        "run",
        "explain",
        "models",
        "clusters",
        "schema",
        "completions",
    ] {
        let help = planner(&[command, "--help"]);
        assert_eq!((help.code, help.err.as_str()), (0, ""), "{help}");
        assert!(help.out.contains(&format!("planner {command}")) && help.out.contains("Example"), "{help}");
    }
    assert!(planner(&["--help"]).out.contains("Exit codes"));
    assert_eq!(planner(&["--version"]).out, concat!("planner ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn schemas_and_completions_are_printed() {
    for document in ["plan", "cluster", "model"] {
        let out = planner(&["schema", document]).out;
        let schema = json(&out);
        // Descriptions come from comments, whose lines are no lines of a text.
        let broken = out.lines().find(|line| line.replace("\\n\\n", "").contains("\\n"));
        assert_eq!(broken, None, "{document}");
        // A model is one of two documents.
        assert!(schema["properties"].is_object() != schema["anyOf"].is_array(), "{document}");
    }
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        assert!(planner(&["completions", shell]).out.contains("optimize"), "{shell}");
    }
}

#[test]
fn arguments_that_are_wrong_are_named() {
    let wrong: &[&[&str]] = &[
        &["optimise", "gpt2", "dgx-h100"],
        &["optimize", "gpt2"],
        &["optimize", "gpt-2", "dgx-h100"],
        &["optimize", "gpt2", "dgx-h1000000"],
        &["optimize", "no/such/model.json", "dgx-h100"],
        &["optimize", "bad", "dgx-h100"],
        &["optimize", "gpt2", "dgx-h100", "--nodes", "0"],
        &["optimize", "gpt2", "dgx-h100", "--nodes", "2", "--devices", "16"],
        &["optimize", "gpt2", "dgx-h100", "--nodes", "4000000"],
        &["optimize", "gpt2", "dgx-h100", "--devices", "12"],
        &["optimize", "gpt2", "dgx-h100", "--seq-len", "many"],
        &["optimize", "gpt2", "dgx-h100", "--precision", "int8"],
        &["optimize", "gpt2", "dgx-h100", "--pin", "tp"],
        &["optimize", "gpt2", "dgx-h100", "--pin", "tp=3"],
        &["optimize", "gpt2", "dgx-h100", "--pin", "xp=2"],
        &["optimize", "gpt2", "dgx-h100", "--pin", "schedule=2f2b"],
        &["optimize", "gpt2", "dgx-h100", "--pin", "schedule=1f1b,vpp=2"],
        &["optimize", "gpt2", "dgx-h100", "--pin", "pp=16"],
        &["optimize", "gpt2", "dgx-h100", "--pin", "etp=2"],
        &["optimize", "gpt2", "dgx-h100", "--pin", "cp=8,cp-kind=ulysses", "--global-batch", "64"],
        &["optimize", "gpt2", "dgx-h100", "--forbid", "xp"],
        &["optimize", "gpt2", "dgx-h100", "--engine", "flesh=current"],
        &["optimize", "gpt2", "dgx-h100", "--budget", "-1"],
        &["optimize", "gpt2", "dgx-h100", "-o", "."],
        &["sweep", "gpt2", "dgx-h100", "--over", "devices=2", "--nodes", "2"],
        &["sweep", "gpt2", "dgx-h100", "--over", "seq-len=256", "--seq-len", "512"],
        &["models", "src"],
        &["pareto", "gpt2", "dgx-h100", "--try-memory", "1000"],
        &["compare", "no-plan.json"],
        &["check", "no-plan.json", "--placement", "v"],
        &["optimize", "gpt2", "dgx-h100", "--pin", "dp=8,tp=8"],
        &["estimate", "gpt2", "dgx-h100", "--tp", "3"],
        &["estimate", "gpt2", "dgx-h100", "--tp", "2", "--dp", "2"],
        &["estimate", "gpt2", "dgx-h100", "--devices", "5", "--tp", "5", "--global-batch", "5"],
        &["estimate", "gpt2", "dgx-h100", "--cp", "8", "--seq-len", "1020", "--global-batch", "8"],
        &["estimate", "gpt2", "dgx-h100", "--ep", "4", "--global-batch", "8"],
        &["estimate", "gpt2", "dgx-h100", "--zero", "4"],
        &["estimate", "llama-3-8b", "dgx-h100", "--ep", "2"],
        &["estimate", "gpt2", "dgx-h100", "--engine", "megatron-lm,kernels=eager,kernels=fused"],
        &["estimate", "gpt2", "dgx-h100", "--pp", "2", "--layers-per-stage", "5,5"],
        &["estimate", "gpt2", "dgx-h100", "--micro-batch", "3", "--global-batch", "8"],
        &["estimate"],
        &["estimate", "--plan", "no-plan.json", "--tp", "2"],
        &["estimate", "--plan", "no-plan.json", "--engine", "fsdp"],
        &["verify", "no-plan.json"],
        &["run", "no-plan.json"],
        &["run", "no-plan.json", "--steps", "0"],
        &["run", "no-plan.json", "--lr", "nan"],
        &["run", "no-plan.json", "--precision", "both"],
        &["clusters", "--nodes", "2"],
        &["schema", "graph"],
    ];
    let said: Vec<String> = wrong
        .iter()
        .map(|words| {
            let said = planner(words);
            assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
            said.to_string()
        })
        .collect();
    insta::assert_snapshot!(said.join("\n"));
}

#[test]
fn a_plan_that_cannot_be_written_leaves_nothing() {
    let said = planner(&[PINNED, &["-o", "no/such/folder/plan.json"]].concat());
    assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
    assert!(said.err.contains("no/such/folder/plan.json: cannot be written"), "{said}");
}
