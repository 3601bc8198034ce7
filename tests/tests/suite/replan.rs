//! Plans for what is left: the batch stays, what moves is counted, and what only a lost rank had is told.

#![expect(clippy::disallowed_methods, reason = "plans are written to files and read again")]

use tests::{done, json, number, planner, scratch};

/// A plan on two nodes, each optimizer state on one rank of sixteen, parameters on all.
fn plan(name: &str) -> String {
    let path = scratch!(name);
    let question = ["optimize", "llama-3-8b", "dgx-h100", "--nodes", "2", "--global-batch", "64"];
    done(&[&question[..], &["--pin", "dp=16,zero=1,recompute=full", "-o", &path]].concat());
    path
}

#[test]
fn lost_devices_take_their_node_and_their_states_with_them() {
    let (file, next) = (plan("replan-lost.json"), scratch!("replan-lost-next.json"));
    let pins = ["--pin", "dp=8,zero=2,recompute=full"];
    let answer = json(&[&["replan", &file, "--lost", "8", "-o", &next][..], &pins].concat());
    assert_eq!((&answer["to"]["n_devices"], &answer["n_spare"]), (&8.into(), &0.into()));
    assert_eq!(answer["global_batch"], 64);
    // Twelve bytes per parameter of optimizer state, cut over sixteen ranks of which half are gone; eight others need
    // all.
    let model = json(&["models", "llama-3-8b"]);
    let (lost, parameters) = (number(&answer["from_checkpoint_bytes"]), number(&model["parameters"]));
    assert!((lost / (6.0 * parameters) - 1.0).abs() < 1e-3, "{lost} of {parameters}");
    // All bytes that the new plan holds come from somewhere.
    let needed = 12.0 * parameters + 8.0 * 2.0 * parameters;
    let all = ["stays_bytes", "moves_bytes", "from_checkpoint_bytes"].map(|name| number(&answer[name]));
    assert!((all.iter().sum::<f64>() / needed - 1.0).abs() < 1e-3, "{all:?} {needed}");
    let over: f64 = answer["moves_per_tier"].as_object().unwrap().values().map(number).sum();
    assert_eq!(over, all[1]);
    assert!(number(&answer["moving_s"]) > 0.0);
    assert_eq!(json(&["prove", &next])["proven"], true);
    // With three lost, five of the same node are spare, and still give what they have.
    let fewer = json(&[&["replan", &file, "--lost", "3"][..], &pins].concat());
    assert_eq!((&fewer["to"]["n_devices"], &fewer["n_spare"]), (&8.into(), &5.into()));
    let ratio = number(&fewer["from_checkpoint_bytes"]) / lost;
    assert!((ratio - 3.0 / 8.0).abs() < 1e-3, "{ratio}");
}

#[test]
fn gained_devices_are_used_and_nothing_is_lost() {
    let (file, next) = (plan("replan-gained.json"), scratch!("replan-gained-next.json"));
    let answer = json(&["replan", &file, "--gained", "16", "--pin", "recompute=full", "-o", &next]);
    assert_eq!((&answer["to"]["n_devices"], &answer["from_checkpoint_bytes"]), (&32.into(), &0.into()));
    assert!(number(&answer["to"]["step_time_s"]) < number(&answer["from"]["step_time_s"]));
    // The map is that of `reshard` between the two files.
    let map = json(&["reshard", &file, &next]);
    let moves = number(&map["parameters"]["moves_bytes"]) + number(&map["optimizer_states"]["moves_bytes"]);
    assert_eq!(number(&answer["moves_bytes"]), moves);
    assert_eq!(answer["moves_per_tier"], map["moves_per_tier"]);
}

#[test]
fn where_nothing_changes_nothing_moves() {
    let file = plan("replan-same.json");
    let same = ["--cluster", "dgx-h100", "--nodes", "2", "--pin", "dp=16,zero=1,recompute=full"];
    let answer = json(&[&["replan", &file][..], &same].concat());
    assert_eq!(answer["from"], answer["to"]);
    let all = ["moves_bytes", "from_checkpoint_bytes", "moving_s"].map(|name| number(&answer[name]));
    assert_eq!(all, [0.0; 3]);
}

/// The search near a plan looks at fewer schedules than the one that found it.
#[test]
fn a_plan_that_still_runs_is_kept_where_nothing_near_is_faster() {
    let (file, next) = (scratch!("replan-kept.json"), scratch!("replan-kept-next.json"));
    let plan = json(&["optimize", "gpt2-xl", "dgx-h100", "--global-batch", "8", "-o", &file]);
    assert_eq!(plan["schedule"], "zb-v");
    let answer = json(&["replan", &file, "--cluster", "dgx-h100", "-o", &next]);
    assert_eq!((&answer["from"], &answer["moves_bytes"]), (&answer["to"], &0.into()));
    let tried = answer["tried"].as_array().unwrap();
    assert_eq!(tried.len(), 1);
    assert_eq!(tried[0]["step_time_s"], answer["to"]["step_time_s"]);
    let report = done(&["check", &next]).out;
    assert!(report.contains("zb-v"), "{report}");
    // It is kept on a part of the devices that are there, too, however small.
    let question = ["gpt2", "three-regions", "--global-batch", "99", "--seq-len", "1023"];
    let plan = json(&[&["optimize"], &question[..], &["-o", &file]].concat());
    let kept = json(&["replan", &file, "--cluster", "three-regions"]);
    assert_eq!(kept["from"], kept["to"]);
    assert_eq!(kept["to"]["step_time_s"], plan["predicted"]["step_time_s"]);
    // Who wants something else has it.
    let other = json(&["replan", &next, "--cluster", "dgx-h100", "--forbid", "schedule=zb-v"]);
    assert!(number(&other["to"]["step_time_s"]) > number(&answer["to"]["step_time_s"]));
}

#[test]
fn a_batch_that_does_not_divide_leaves_devices_spare_and_says_why() {
    let file = plan("replan-divide.json");
    let words = ["replan", &file, "--gained", "8", "--pin", "tp=8,pp=1,cp=1,micro-batch=1"];
    let answer = json(&words);
    let tried = answer["tried"].as_array().unwrap();
    assert!(tried[0]["no_plan"].as_str().unwrap().contains("must divide the global batch"), "{answer}");
    assert_eq!((&answer["to"]["n_devices"], &answer["n_spare"]), (&16.into(), &8.into()));
    let text = done(&words).out;
    assert!(text.contains("64 sequences a step, as before") && text.contains("8 devices"), "{text}");
}

#[test]
fn a_change_that_is_none_is_refused() {
    let file = plan("replan-refused.json");
    let replan = ["replan", file.as_str()];
    for more in [
        &[][..],
        &["--lost", "16"],
        &["--lost", "0"],
        &["--lost", "1", "--gained", "1"],
        &["--lost", "1", "--nodes", "2"],
    ] {
        let said = planner(&[&replan[..], more].concat());
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
    }
}

#[test]
fn plans_for_lost_nodes_are_made_before_they_are_lost() {
    let (file, next) = (plan("replan-failures.json"), scratch!("replan-failures-next.json"));
    let pins = ["--pin", "dp=8,zero=2,recompute=full"];
    let found = json(&[&["replan", &file, "--failures", "1", "-o", &next][..], &pins].concat());
    let lost = json(&[&["replan", &file, "--lost", "8"][..], &pins].concat());
    let one = &found["failures"][0];
    assert_eq!((&one["n_lost_nodes"], &one["n_devices"]), (&1.into(), &8.into()));
    assert_eq!(one["answer"]["to"], lost["to"]);
    assert_eq!(one["answer"]["moves_bytes"], lost["moves_bytes"]);
    // Half of the devices are left.
    let share = number(&found["step_time_s"]) / number(&lost["to"]["step_time_s"]);
    assert!((number(&one["share"]) - share).abs() < 1e-12);
    assert!((number(&found["resilience"]) - 2.0 * share).abs() < 1e-12);
    assert_eq!(json(&["prove", &next.replace(".json", "-1.json")])["proven"], true);
    let all = planner(&["replan", &file, "--failures", "2"]);
    assert_eq!(all.code, 2, "{all}");
    assert!(all.err.contains("2 of 2 nodes leave none"), "{all}");
    // What fits on no fewer devices keeps nothing.
    let none = json(&["replan", &file, "--failures", "1", "--pin", "dp=16"]);
    assert_eq!((number(&none["resilience"]), number(&none["failures"][0]["share"])), (0.0, 0.0));
    assert!(none["failures"][0]["no_plan"].as_str().unwrap().contains("dp=16"), "{none}");
}

/// Near the plan that ran is found what all plans together have, or about: on more devices, on half as many, and where
/// five of sixteen make no whole node, whatever the plan was pinned to.
#[test]
fn what_is_near_is_about_as_fast_as_what_is_found_anew() {
    let file = plan("replan-near.json");
    let next = scratch!("replan-near-next.json");
    for change in [&["--gained", "16"][..], &["--gained", "24"], &["--lost", "8"], &["--lost", "11"]] {
        let asked = [&["replan", file.as_str()][..], change].concat();
        let near = json(&[&asked[..], &["-o", &next]].concat());
        let anew = json(&[&asked[..], &["--anew"]].concat());
        let [near_s, anew_s] = [&near, &anew].map(|answer| number(&answer["to"]["step_time_s"]));
        // On forty devices the fastest is a pipeline of five stages that splits backward, and on five one of five with
        // two virtual stages each, which is not near: no plan in between is faster.
        let most = match change[1] {
            "24" => 1.13,
            "11" => 1.08,
            _ => 1.03,
        };
        assert!(near_s < most * anew_s, "{near_s} {anew_s} {change:?}");
        let plan: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&next).unwrap()).unwrap();
        let proof = plan["search"]["proof"].as_str().unwrap();
        assert!(proof.contains("others near a plan that ran"), "{proof}");
    }
    assert_eq!(done(&["verify", &next]).code, 0);
}

/// Twelve layers over five stages are three in the longest, as over four; but beside the head of a small model three
/// are too many.
#[test]
fn where_the_head_is_a_stage_of_its_own_fewer_devices_are_said_to_be_faster() {
    let mut cluster: serde_json::Value =
        serde_json::from_str(frontends::shipped_cluster("dgx-h100").unwrap().text).unwrap();
    cluster["groups"][0]["count"] = 5.into();
    cluster["groups"][0]["devices_per_node"] = 5.into();
    cluster["tiers"] = serde_json::json!([cluster["tiers"][0]]);
    cluster["tiers"][0]["devices"] = 5.into();
    let file = scratch!("five.json");
    std::fs::write(&file, cluster.to_string()).unwrap();
    let warnings = json(&["optimize", "gpt2", &file, "--global-batch", "4096"])["warnings"].to_string();
    assert!(warnings.contains("fewer devices are faster: 4 of the 5"), "{warnings}");
}

/// 136 devices and 128 sequences share no more than eight; on 128 of the devices every one has its own.
#[test]
fn where_devices_divide_badly_fewer_are_said_to_be_faster() {
    let question = ["optimize", "gpt2-xl", "dgx-a100-80", "--global-batch", "128", "--nodes"];
    let all = json(&[&question[..], &["17"]].concat());
    let warnings: Vec<&str> =
        all["warnings"].as_array().unwrap().iter().filter_map(serde_json::Value::as_str).collect();
    let said = warnings.iter().find(|said| said.starts_with("fewer devices are faster")).unwrap();
    assert!(said.contains("128 of the 136") && said.contains("--devices 128"), "{said}");
    let fewer = json(&[&question[..], &["16"]].concat());
    let [all_s, fewer_s] = [&all, &fewer].map(|plan| number(&plan["predicted"]["step_time_s"]));
    assert!(fewer_s < 0.95 * all_s, "{fewer_s} {all_s}");
    let words = fewer["warnings"].to_string();
    assert!(!words.contains("fewer devices are faster"), "{words}");
}

/// Sixty-one sequences on five or seven devices: all do the same, or each has a stage; four or six cut products.
#[test]
fn where_devices_do_the_same_fewer_that_cut_products_are_said_to_be_faster() {
    for devices in ["5", "7"] {
        let question = ["optimize", "gpt2", "dgx-h100", "--global-batch", "61", "--devices", devices];
        let warnings = json(&question)["warnings"].to_string();
        assert!(warnings.contains("fewer devices are faster"), "{devices}: {warnings}");
    }
}

/// What must move is said in the parameters of the layer that a fused one stands for: a plan whose own does not is bad
/// input.
#[test]
fn a_form_that_is_none_of_its_layers_is_refused_with_its_place() {
    let file = scratch!("replan-form.json");
    done(&["optimize", "llama-3-8b", "dgx-h100", "--devices", "32", "--global-batch", "64", "-o", &file]);
    let mut plan: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let dims = plan["forms"][0]["original"]["dims"].as_array_mut().unwrap();
    let inner = dims.iter_mut().find(|dim| dim["name"] == "f").unwrap();
    inner["length"] = serde_json::json!({ "fixed": 28_672 });
    std::fs::write(&file, plan.to_string()).unwrap();
    let expected = "forms[0].original: layer `decoder` is no form of this layer";
    let asked: [&[&str]; 7] = [
        &["replan", &file, "--lost", "8"],
        &["show", &file],
        &["ranks", &file],
        &["check", &file],
        &["verify", &file],
        &["estimate", "--plan", &file],
        &["explain", &file],
    ];
    for words in asked {
        let said = planner(words);
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
        assert!(said.err.contains(expected), "{said}");
    }
}

/// A region that has lost a node is no region like the others: it is left out, and told as spare.
#[test]
fn a_node_that_is_lost_takes_its_domain_where_domains_must_be_alike() {
    let file = scratch!("replan-regions.json");
    let pins = "split-backward=none";
    done(&["optimize", "llama-3-8b", "three-regions", "--global-batch", "96", "--pin", pins, "-o", &file]);
    let answer = json(&["replan", &file, "--lost-nodes", "0"]);
    assert_eq!((&answer["to"]["n_devices"], &answer["n_spare"]), (&32.into(), &8.into()));
    let said = planner(&["replan", &file, "--gained", "8"]);
    assert_eq!(said.code, 2, "{said}");
    assert!(said.err.contains("several groups") && said.err.contains("--cluster FILE"), "{said}");
}

#[test]
fn nothing_stays_on_devices_that_are_others() {
    let file = plan("replan-others.json");
    let answer = json(&["replan", &file, "--cluster", "dgx-a100-80", "--nodes", "2"]);
    let [stays, moves, read] =
        ["stays_bytes", "moves_bytes", "from_checkpoint_bytes"].map(|name| number(&answer[name]));
    assert!(stays == 0.0 && moves == 0.0 && read > 0.0, "{answer}");
}

/// Of 32 sequences few numbers of replicas and stages divide 48 devices: what is near stays on 32.
#[test]
fn everything_is_looked_at_where_what_is_near_leaves_many_devices_idle() {
    let file = scratch!("replan-idle.json");
    let question = ["optimize", "llama-3-8b", "dgx-h100", "--nodes", "4", "--global-batch", "32"];
    done(&[&question[..], &["--seq-len", "8192", "--pin", "split-backward=none", "-o", &file]].concat());
    let answer = json(&["replan", &file, "--gained", "16", "--pin", "split-backward=none"]);
    assert_eq!(number(&answer["to"]["n_devices"]), 48.0, "{answer}");
    assert!(number(&answer["to"]["step_time_s"]) < 0.95 * number(&answer["from"]["step_time_s"]), "{answer}");
}
