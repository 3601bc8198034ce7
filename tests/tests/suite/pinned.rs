//! What a pin finds the free search finds too: where memory is tight, and prices of it alone do not lead there.

use tests::{done, json, number, planner, scratch};

/// Seconds of a step of the plan that is found.
#[track_caller]
fn time(question: &[&str], pins: &[&str]) -> f64 {
    let plan = json(&[&["optimize"], question, pins].concat());
    number(&plan["predicted"]["step_time_s"])
}

/// Fails where what is found with some pins takes longer than with others.
#[track_caller]
fn is_no_slower(question: &[&str], pins: &[&str], than: &[&str]) {
    let found = time(question, pins) / time(question, than);
    assert!(found < 1.0005, "{question:?} with {pins:?} takes {found} of what it does with {than:?}");
}

/// Where a step waits for what it sends once, layers are blended from what was found with other pins, and blends differ
/// by a fiftieth or two: what is found is faster than before, and nothing undercuts what is told of all.
fn is_hardly_slower(question: &[&str], pins: &[&str], than: &[&str]) {
    let [found, other] = [pins, than].map(|pins| json(&[&["optimize"], question, pins].concat()));
    let [took, takes] = [&found, &other].map(|plan| number(&plan["predicted"]["step_time_s"]));
    assert!(took < 1.03 * takes, "{question:?} with {pins:?} takes {took} s and with {than:?} {takes} s");
    let bound = number(&found["search"]["lower_bound_s"]);
    assert!(bound < takes, "{question:?} with {pins:?}: {bound} s, but with {than:?} {takes} s");
}

/// Some of a plan's degrees, as pins.
fn degrees(plan: &serde_json::Value, names: &[&str]) -> String {
    names.iter().map(|name| format!("{name}={}", plan["roles"][name])).collect::<Vec<_>>().join(",")
}

#[test]
fn a_degree_by_name_finds_no_faster_plan() {
    let shown_once = ["megatron-1.7b", "rtx4090-x8", "--devices", "4", "--global-batch", "2"];
    is_hardly_slower(&shown_once, &[], &["--pin", "tp=2"]);
    let questions: [(&[&str], &str); 5] = [
        // Nodes of several tiers.
        (&["megatron-7.5b", "frontier", "--devices", "16", "--global-batch", "36"], "tp=2"),
        (&["mixtral-8x7b", "frontier", "--devices", "32", "--global-batch", "4", "--seq-len", "128"], "tp=8"),
        // So little work that launches decide, or that no pipeline can be filled.
        (&["gemma-2-9b", "dgx-h100", "--nodes", "2", "--global-batch", "2", "--seq-len", "1000"], "pp=2"),
        (
            &["megatron-1.7b", "dgx-a100-40", "--nodes", "2", "--global-batch", "1", "--seq-len", "128"],
            "tp=8",
        ),
        (&["llama-2-7b", "dgx-h200", "--nodes", "4", "--global-batch", "1", "--seq-len", "1000"], "pp=4"),
    ];
    for (question, pin) in questions {
        is_no_slower(question, &[], &["--pin", pin]);
    }
}

/// Products with most of the weights are cut as pinned, and attention or the rest along tokens: what one more pin leads
/// to is found without it.
#[test]
fn one_more_pin_finds_no_faster_plan() {
    let questions: [(&[&str], [&str; 2]); 4] = [
        // Four devices do not divide 25 heads.
        (
            &["gpt2-xl", "tpu-v4", "--devices", "16", "--global-batch", "64"],
            ["tp=4,micro-batch=2", "tp=4,micro-batch=2,sequence-parallel=on"],
        ),
        (&["llama-2-7b", "rtx4090-x8", "--global-batch", "8", "--lora", "16"], ["tp=4", "tp=4,zero=3"]),
        (
            &["qwen3-8b", "dgx-h100", "--devices", "4", "--global-batch", "6", "--seq-len", "4096"],
            ["tp=4", "tp=4,zero=1"],
        ),
        (&["llama-3-8b", "dgx-h100", "--devices", "8", "--global-batch", "9"], ["tp=4", "tp=4,pp=2"]),
    ];
    for (question, [pins, more]) in questions {
        is_no_slower(question, &["--pin", pins], &["--pin", more]);
    }
}

/// One micro-batch on slow links: whether gradients are reduced in every layer's backward or all behind one another
/// decides the step.
#[test]
fn one_storage_for_all_parameters_needs_no_pin() {
    let large = ["gpt2-xl", "rtx4090-x8", "--devices", "6", "--global-batch", "12"];
    let small = ["gpt2", "rtx4090-x8", "--devices", "6", "--global-batch", "12"];
    is_no_slower(&large, &["--pin", "pp=1"], &["--pin", "pp=1,dp=3"]);
    is_no_slower(&small, &["--pin", "pp=1,dp=3"], &["--pin", "pp=1,dp=3,tp=2"]);
    is_hardly_slower(&small, &["--forbid", "pp"], &["--pin", "pp=1"]);
}

/// Where attention exchanges sequences for heads and every weight is whole, nothing is tensor parallel; and the gap is
/// to all that is.
#[test]
fn a_pinned_tensor_degree_cuts_most_of_the_weights() {
    let question = ["phi-3-mini", "dgx-h100", "--devices", "4", "--global-batch", "8"];
    let plan = json(&[&["optimize"], &question[..], &["--pin", "tp=4"]].concat());
    assert!(number(&plan["search"]["gap"]) < 0.01, "{}", plan["search"]);
    let text = plan["search"]["proof"].as_str().unwrap();
    assert!(text.contains("more than half of a layer's weights"), "{text}");
    let entries = plan["entries"].as_array().unwrap();
    let ops = entries.iter().flat_map(|entry| entry["ops"].as_array().unwrap());
    let axes =
        |op: &serde_json::Value| op["axes"].as_array().unwrap().iter().map(|axis| axis == "f").collect();
    // The largest product, alone or fused.
    let largest = ops.filter(|op| ["mlp.gate", "mlp.gate+mlp.up"].contains(&op["op"].as_str().unwrap()));
    let cut: Vec<Vec<bool>> = largest.map(axes).collect();
    assert!(!cut.is_empty() && cut.iter().all(|axes| axes.contains(&true)), "{entries:?}");
}

/// Twelve heads, and a batch and a sequence of odd lengths: eight devices cut nothing alike, and some do the same in
/// attention.
#[test]
fn what_divides_nothing_by_itself_is_cut_by_a_part_of_the_devices() {
    for (nodes, pins) in [("2", ["pp=2", "tp=8,pp=2", "tp=16"]), ("4", ["pp=4", "pp=4,tp=8", "tp=32"])] {
        let question = ["gpt2", "dgx-a100-40", "--nodes", nodes, "--global-batch", "127", "--seq-len", "777"];
        let found = time(&question, &[]);
        let [least, more, most] = pins.map(|pin| time(&question, &["--pin", pin]));
        assert!(
            found < 1.0005 * least.min(more).min(most),
            "{found} and {least}, {more}, {most} of {pins:?}"
        );
        assert!(least < 1.0005 * more, "{least} of {} and {more} of {}", pins[0], pins[1]);
    }
}

#[test]
fn a_schedule_by_name_finds_no_faster_plan_on_hosts() {
    let question = ["llama-2-7b", "dgx1-v100", "--devices", "2", "--global-batch", "2", "--seq-len", "500"];
    let found = time(&question, &[]) / time(&question, &["--pin", "schedule=1f1b"]);
    assert!(found < 1.0005, "takes {found} of what 1F1B takes");
}

/// Thirty sequences come in no groups of a pipeline's length, and 1F1B idles for a third of the step.
#[test]
fn a_schedule_by_name_finds_no_faster_plan_of_an_odd_batch() {
    let question =
        ["gpt3-175b", "dgx-a100-80", "--devices", "128", "--global-batch", "30", "--seq-len", "2048"];
    let found = time(&question, &[]) / time(&question, &["--pin", "schedule=zb-h2"]);
    assert!(found < 1.0005, "takes {found} of what ZB-H2 takes");
}

/// Chunks in a V need no micro-batches in groups of the pipeline's length.
#[test]
fn two_chunks_on_a_stage_may_stand_in_a_v() {
    let question = ["bloom-176b", "dgx-a100-80", "--devices", "384", "--global-batch", "2048"];
    let plan = json(&[&["optimize"], &question[..]].concat());
    assert_eq!(plan["schedule"], "dualpipe-v");
    let pins = degrees(&plan, &["tp", "cp", "dp", "pp", "vpp"]);
    let again = time(&question, &["--pin", &pins]) / number(&plan["predicted"]["step_time_s"]);
    assert!(again < 1.0005, "{pins} takes {again} of the time");
}

/// Attention is cut along its heads by all-to-alls, and with it only the bias of queries, keys and values.
#[test]
fn a_plan_has_the_name_by_which_it_is_found_again() {
    let question = ["megatron-7.5b", "dgx-h100", "--nodes", "2", "--global-batch", "36"];
    let plan = json(&[&["optimize"], &question[..]].concat());
    let pins = degrees(&plan, &["tp", "cp", "dp", "pp"]);
    let named = time(&question, &["--pin", &pins]) / number(&plan["predicted"]["step_time_s"]);
    // By its name all of the bias is added before the all-to-all.
    assert!((named - 1.0).abs() < 0.02, "{pins} takes {named} of the time");
}

/// Replicas of whole layers cut the vocabulary of the loss among them, as no axis does that is one of replicas alone.
#[test]
fn degrees_of_a_plan_find_it_again() {
    let question = ["llama-3-8b", "dgx-a100-40", "--devices", "64", "--seq-len", "32768"];
    let plan = json(&[&["optimize"], &question[..]].concat());
    let pins = degrees(&plan, &["tp", "cp", "dp", "pp"]);
    let again = json(&[&["optimize"], &question[..], &["--pin", &pins]].concat());
    for name in ["tp", "cp", "dp", "pp", "micro_batch", "vocabulary_parallel"] {
        assert_eq!(again["roles"][name], plan["roles"][name], "{name}");
    }
    let time = |plan: &serde_json::Value| number(&plan["predicted"]["step_time_s"]);
    assert!(time(&again) < time(&plan) * 1.0005, "{pins} takes {} of it", time(&again) / time(&plan));
    let named = json(&[&["optimize"], &question[..], &["--pin", &pins, "--pin", "axes=named"]].concat());
    assert_eq!(named["roles"]["vocabulary_parallel"], 1);
    assert!(time(&named) > time(&plan) * 1.002, "named axes take {} of it", time(&named) / time(&plan));
}

/// By sums every layer of eighty chunks has its share of the memory; what is sent between them, and chunks that are not
/// alike, need a fiftieth more.
#[test]
fn what_a_cut_did_not_see_of_memory_is_left_out_for_another() {
    let question = ["qwen2.5-72b", "dgx-a100-80", "--devices", "64"];
    let found = |micro_batch: u64| {
        let pins = format!("dp=4,cp=1,tp=4,pp=4,vpp=20,micro-batch={micro_batch},offload=none");
        json(&[&["optimize"], &question[..], &["--pin", &pins]].concat())
    };
    assert_eq!(found(1)["roles"]["vpp"], 20);
    // No cut of one chunk after the other leaves enough for the last.
    assert_eq!(found(2)["roles"]["vpp"], 20);
}

/// One count is of a pipeline without stages; of those with some nobody says how layers lie.
#[test]
fn layers_of_one_stage_leave_no_pipeline() {
    let plan = json(&["optimize", "llama-3-8b", "dgx-h100", "--pin", "layers-per-stage=32"]);
    assert_eq!(plan["roles"]["pp"], 1);
}

/// Attention is cut along heads and all else along tokens; its plain form is of another name.
#[test]
fn degrees_that_a_plan_has_in_fused_forms_alone_find_it() {
    let question =
        ["gpt-neox-20b", "dgx-a100-80", "--nodes", "5", "--global-batch", "30", "--seq-len", "8192"];
    let plan = json(&[&["optimize"], &question[..], &["--pin", "pp=2"]].concat());
    let degrees = degrees(&plan, &["pp", "tp"]);
    let found = time(&question, &["--pin", &degrees]) / number(&plan["predicted"]["step_time_s"]);
    assert!(found < 1.0005, "{degrees} takes {found} of what pp=2 takes");
}

#[test]
fn counts_of_layers_that_are_none_of_the_model_are_refused() {
    let counts = [
        ("24,25", "expected counts that add up to 48, found 2 that add up to 49"),
        ("24,23", "expected counts that add up to 48, found 2 that add up to 47"),
        ("16,16,16", "no number of stages that divides the 8 devices has 3 chunks"),
        ("8,8,8,8,8,8,vpp=2", "no number of stages that divides the 8 devices has 6 chunks at 2 a stage"),
        ("12,12,24,pp=2", "expected as many counts for each of 2 stages, found 3 in all"),
        ("12,0,24,12", "count 2 is 0; only the first and the last chunk"),
    ];
    for (counts, why) in counts {
        let pin = format!("layers-per-stage={counts}");
        let said = planner(&["optimize", "gpt2-xl", "dgx-h100", "--global-batch", "8", "--pin", &pin]);
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{said}");
        assert!(said.err.contains(why), "{said}");
    }
}

/// Who counts layers says nothing of the order in which they run, nor, without a word of `vpp`, of how many chunks a
/// stage has.
#[test]
fn layers_that_are_counted_leave_schedules_open() {
    let found = |pins: &str| {
        let question = ["optimize", "gpt2-xl", "dgx-h100", "--global-batch", "8", "--pin"];
        let plan = json(&[&question[..], &[&format!("layers-per-stage={pins}")]].concat());
        (number(&plan["predicted"]["step_time_s"]), plan["roles"]["vpp"].as_u64())
    };
    let quarters = "12,12,12,12";
    let (four_stages, _) = found(&format!("{quarters},pp=4"));
    let (in_order, _) = found(&format!("{quarters},pp=4,split-backward=none"));
    assert!(four_stages < in_order * 0.95, "takes {} of what 1F1B takes", four_stages / in_order);
    let (two_stages, chunks) = found(&format!("{quarters},pp=2"));
    assert_eq!(chunks, Some(2));
    assert_eq!(found(&format!("{quarters},pp=2,vpp=2")).0, two_stages);
    let (any, _) = found(quarters);
    assert!(any <= four_stages.min(two_stages) * 1.0005, "{any} s");
    // Seven chunks on a stage are among no numbers that are tried.
    assert_eq!(found("4,4,4,3,3,3,3,3,3,3,3,3,3,6,pp=2").1, Some(7));
}

/// Seven micro-batches come in no groups of two: only orders over chunks in a V run four chunks on two stages of three
/// devices.
#[test]
fn layers_that_are_counted_may_lie_in_a_v() {
    let question = ["gpt2", "dgx1-v100", "--devices", "6", "--global-batch", "7", "--seq-len", "509"];
    let found = |pins: &str| time(&question, &["--pin", &format!("layers-per-stage=3,3,3,3{pins}")]);
    let named = found(",schedule=zb-v");
    assert!(found("") <= named * 1.0005 && found(",pp=2") <= named * 1.0005, "{named} s");
}

/// A list says how many stages there are, so that as few micro-batches may run on them as nobody would try.
#[test]
fn layers_that_are_counted_leave_micro_batches_open() {
    let question = ["gpt2", "dgx-a100-40", "--devices", "8", "--global-batch", "7", "--seq-len", "384"];
    let found = |pins: &str| time(&question, &["--pin", &format!("layers-per-stage=1,6,1,1,1,1,1,0{pins}")]);
    let (any, named) = (found(""), found(",pp=8"));
    assert!(any <= named * 1.0005, "takes {} of what pp=8 takes", any / named);
}

/// Layers do not all do what their axes are called by. Which do depends on the axes that they may choose from, and
/// where launches are most of a step so does how many there are.
#[test]
fn degrees_of_a_plan_on_free_axes_find_it() {
    let questions = [
        (["gpt2", "dgx1-v100", "--devices", "8", "--global-batch", "7", "--seq-len", "384"], "cp"),
        (["gpt2", "dgx-a100-40", "--devices", "8", "--global-batch", "9", "--seq-len", "500"], "tp"),
        (["llama-2-7b", "dgx-h100", "--devices", "8", "--global-batch", "5", "--seq-len", "2048"], "cp"),
        (["mistral-7b", "dgx-a100-80", "--devices", "8", "--global-batch", "7", "--seq-len", "1000"], "cp"),
    ];
    for (question, name) in questions {
        let plan = json(&[&["optimize"], &question[..]].concat());
        let degrees = degrees(&plan, &[name]);
        let found = time(&question, &["--pin", &degrees]) / number(&plan["predicted"]["step_time_s"]);
        assert!(found < 1.0005, "{degrees} takes {found} of what nothing pinned takes");
    }
}

/// Twenty-five heads: where tokens are cut beside products, most of a layer comes to other degrees than its axes are
/// called by.
#[test]
fn a_tensor_degree_that_divides_no_heads_finds_products_that_are_cut() {
    let questions = [
        (["gpt2-xl", "dgx-a100-80", "--devices", "8", "--global-batch", "12", "--seq-len", "500"], "tp=2"),
        (["gpt2-xl", "dgx1-v100", "--devices", "4", "--global-batch", "3", "--seq-len", "1000"], "tp=4"),
    ];
    for (question, pin) in questions {
        is_no_slower(&question, &["--pin", pin], &["--pin", &format!("{pin},sequence-parallel=off")]);
    }
}

/// No named axis cuts sequences into 64 tokens unless somebody asks for it, and what of a pipeline is left is a quarter
/// slower.
#[test]
fn degrees_of_one_leave_all_that_free_axes_come_to() {
    let question = ["gpt2", "dgx-a100-80", "--devices", "8", "--global-batch", "7", "--seq-len", "512"];
    let none = "split-backward=none";
    let found = time(&question, &["--pin", &format!("{none},dp=1,tp=1")]);
    let found = found / time(&question, &["--pin", none]);
    assert!(found < 1.0005, "dp=1,tp=1 takes {found} of what nothing pinned takes");
    // One number of stages that is left is one that is chosen.
    let left = time(&question, &["--pin", none, "--forbid", "pp=1,2,4"]);
    let left = left / time(&question, &["--pin", &format!("{none},pp=8")]);
    assert!((left - 1.0).abs() < 0.0005, "all but pp=8 ruled out takes {left} of what that takes");
}

#[test]
fn whole_stages_are_not_called_interleaved() {
    let question = ["optimize", "llama-3-8b", "tpu-v4", "--devices", "32", "--global-batch", "64"];
    let refused = planner(&[&question[..], &["--pin", "schedule=interleaved,pp=32"]].concat());
    assert_eq!((refused.code, refused.err.contains("every virtual stage a layer")), (2, true), "{refused}");
}

/// What one layer needs while it runs, a device needs once, however many chunks it has.
#[test]
fn what_does_not_fit_needs_about_as_much_in_many_chunks() {
    let needed = |vpp: u32| {
        let pins = format!("tp=4,pp=4,dp=1,vpp={vpp},offload=none");
        let question = ["llama-3-70b", "dgx-h100", "--devices", "16", "--global-batch", "16"];
        let refused = planner(&[&["optimize"], &question[..], &["--pin", &pins]].concat());
        let said = refused.err;
        let needed = said.split("the closest needs ").nth(1).and_then(|rest| rest.split(' ').next());
        needed.and_then(|number| number.parse::<f64>().ok()).unwrap_or_else(|| panic!("{said}"))
    };
    let (whole, cut) = (needed(1), needed(20));
    assert!(cut > 80.0 && (cut / whole - 1.0).abs() < 0.2, "{cut} GiB, in one chunk {whole}");
}

/// Products are cut along the axis of the replicas, so that nothing of them is left for ZeRO: they do not say what the
/// others have.
#[test]
fn a_storage_has_its_name_where_only_some_parameters_are_whole() {
    let question =
        ["qwen2.5-7b", "rtx4090-x8", "--devices", "2", "--seq-len", "1000", "--global-batch", "12"];
    let plan = json(&[&["optimize"], &question[..], &["--pin", "zero=3"]].concat());
    assert_eq!(plan["roles"]["zero"]["stage"], 3, "{}", plan["roles"]);
}

#[test]
fn recomputation_by_name_finds_no_faster_plan() {
    // Scores in memory: what attention needs while it runs is more than a layer keeps.
    let question = ["mistral-7b", "tpu-v4", "--devices", "8", "--global-batch", "24", "--attention", "eager"];
    let named = time(&question, &["--pin", "pp=2,recompute=selective"]);
    let found = time(&question, &["--pin", "pp=2"]) / named;
    assert!(found < 1.005, "takes {found} of what recompute=selective takes");
}

#[test]
fn a_plan_says_how_much_other_choices_could_gain() {
    let said = done(&["optimize", "llama-3-8b", "dgx-h100", "--devices", "2", "--pin", "pp=1"]).out;
    let least = said.split("could come to ").nth(1).and_then(|rest| rest.split(' ').next());
    let least: f64 = least.and_then(|number| number.parse().ok()).unwrap_or(1.0);
    assert!(least > 0.87, "0.849 where memory is free: {said}");
}

/// A long head and a short chunk stand beside each other; by a chunk each, the head would decide.
#[test]
fn virtual_stages_by_name_find_no_faster_plan() {
    let gpt2 =
        (["gpt2", "dgx-a100-40", "--devices", "8"], "pp=2,vpp=2,micro-batch=16", &["4,3,5,0", "6,5,1,0"][..]);
    let llama = (["llama-3-8b", "dgx-h100", "--devices", "8"], "pp=4,vpp=2", &["5,5,4,4,4,4,4,2"][..]);
    for (question, pins, all) in [gpt2, llama] {
        let found = time(&question, &["--pin", pins]);
        for counts in all {
            let named = time(&question, &["--pin", &format!("{pins},layers-per-stage={counts}")]);
            assert!(found < named * 1.0025, "takes {} of what {counts} takes", found / named);
        }
    }
}

/// With few micro-batches a lighter last stage is worth a longer one before it.
#[test]
fn layers_by_name_find_no_faster_plan() {
    let question = ["llama-3-8b", "dgx-h100", "--global-batch", "8"];
    let pins = "pp=4,dp=2,micro-batch=1,schedule=1f1b";
    let found = time(&question, &["--pin", pins]);
    for counts in ["8,8,8,8", "8,9,9,6", "9,9,9,5", "10,9,8,5", "10,9,7,6", "11,9,8,4"] {
        let named = time(&question, &["--pin", &format!("{pins},layers-per-stage={counts}")]);
        assert!(found < named * 1.0005, "takes {} of what {counts} takes", found / named);
    }
}

/// Forms of layers are chosen before layers move, and the plan is put on fewer axes in between: what moves then are the
/// layers in these forms.
#[test]
fn layers_in_fused_forms_move_as_well() {
    let question = ["gpt2-xl", "dgx-a100-80", "--devices", "16", "--global-batch", "9", "--seq-len", "1000"];
    for counts in ["12,13,13,10", "15,15,10,8", "16,14,10,8"] {
        let named = format!("split-backward=none,pp=4,layers-per-stage={counts}");
        is_no_slower(&question, &["--pin", "split-backward=none"], &["--pin", &named]);
    }
}

/// Gradients take about as long to reduce as a step of one micro-batch computes: by prices of either alone, the stream
/// is cut so that the other takes longest.
#[test]
fn what_is_reduced_as_long_as_it_is_computed_has_a_stream_of_its_own() {
    let question = ["gpt2", "rtx4090-x8", "--devices", "8", "--global-batch", "9", "--seq-len", "512"];
    let whole = ["--pin", "split-backward=none"];
    for pin in ["zero=2", "zero=1", "pp=2", "tp=2,cp=4"] {
        is_no_slower(&question, &whole, &["--pin", &format!("split-backward=none,{pin}")]);
    }
    let found = time(&question, &whole);
    let by_storage = time(&question, &["--pin", "split-backward=none,zero=2"]);
    assert!(found < by_storage * 0.9, "takes {} of what one storage takes", found / by_storage);
}

/// Three sequences are cut into no two parts: two devices of each stage do the same, and the degrees of the plan come
/// to half of them.
#[test]
fn degrees_of_devices_that_do_the_same_find_their_plan() {
    let question = ["gpt2", "dgx-h100", "--devices", "4", "--global-batch", "3", "--seq-len", "640"];
    let pins = ["--pin", "split-backward=none,cp=1,pp=2"];
    let plan = json(&[&["optimize"], &question[..], &pins].concat());
    let own = degrees(&plan, &["dp", "tp", "cp", "pp"]);
    assert_eq!((own.as_str(), &plan["roles"]["same"]), ("dp=1,tp=1,cp=1,pp=2", &2.into()));
    let pins = format!("split-backward=none,{own}");
    let named = json(&[&["optimize"], &question[..], &["--pin", &pins]].concat());
    assert_eq!(degrees(&named, &["dp", "tp", "cp", "pp"]), own);
    let times = [&named, &plan].map(|plan| number(&plan["predicted"]["step_time_s"]));
    assert!(times[0] < times[1] * 1.0005, "{own} takes {} of what it is", times[0] / times[1]);
    let warning = "2 devices at a time compute the same in most layers: the pinned degrees leave them nothing to divide";
    assert!(named["warnings"].as_array().is_some_and(|all| all.iter().any(|one| one == warning)), "{named}");
}

/// Eight devices cut 1,500 tokens into no eight parts, but into four twice.
#[test]
fn pinned_degrees_leave_devices_that_do_the_same() {
    let questions = [
        (["llama-2-7b", "dgx-h200", "--devices", "8", "--global-batch", "16", "--seq-len", "1500"], "cp=4"),
        (["gpt2", "dgx-a100-80", "--devices", "8", "--global-batch", "8", "--seq-len", "256"], "cp=1"),
    ];
    for (question, more) in questions {
        let named = format!("dp=1,tp=1,pp=1,{more}");
        is_no_slower(&question, &["--pin", "dp=1,tp=1,pp=1"], &["--pin", &named]);
    }
    // Two degrees beside them.
    let question = ["gpt2", "dgx-a100-80", "--devices", "8", "--global-batch", "8", "--seq-len", "1024"];
    let plan = json(&[&["optimize"], &question[..], &["--pin", "dp=2,tp=2,cp=1,pp=1"]].concat());
    assert_eq!(degrees(&plan, &["dp", "tp", "cp", "pp", "same"]), "dp=2,tp=2,cp=1,pp=1,same=2");
}

/// Where nothing divides the devices the fastest pipeline may have fewer micro-batches than half its stages.
#[test]
fn stages_that_idle_are_asked_where_little_else_is() {
    let questions = [
        (["gpt2-xl", "dgx-a100-80", "--devices", "7", "--global-batch", "9", "--seq-len", "200"], "pp=7"),
        (["gpt2-xl", "dgx-h100", "--devices", "3", "--global-batch", "11", "--seq-len", "500"], "pp=3"),
        (
            ["megatron-1.7b", "dgx-h100", "--devices", "7", "--global-batch", "12", "--seq-len", "200"],
            "micro-batch=6",
        ),
        (["qwen2.5-7b", "dgx-h200", "--devices", "8", "--global-batch", "33", "--seq-len", "255"], "pp=8"),
    ];
    for (question, pin) in questions {
        is_no_slower(&question, &[], &["--pin", pin]);
    }
}

/// Nothing answers with layers that pass whole sequences where these are to be cut.
#[test]
fn sequence_parallelism_that_no_length_allows_is_refused() {
    let question = ["optimize", "gpt2-xl", "h100-a100-pcie", "--global-batch", "25", "--seq-len", "511"];
    let refused = planner(&[&question[..], &["--pin", "sequence-parallel=on,tp=2"]].concat());
    let cause = "sequence-parallel=on: 2 devices of a layer cut no tokens beside its products";
    assert!(refused.code == 2 && refused.err.contains(cause), "{refused}");
}

/// So short sequences are cut into eight only where somebody asks for it, or where nothing else is left.
#[test]
fn short_sequences_are_cut_where_nothing_else_is_left() {
    let question = ["gpt2", "dgx-a100-80", "--devices", "8", "--global-batch", "8", "--seq-len", "512"];
    let by_name = time(&question, &["--pin", "cp=8"]);
    for others in [["--pin", "dp=1,tp=1,pp=1"], ["--forbid", "cp=1,2,4"]] {
        let found = time(&question, &others) / by_name;
        assert!((found - 1.0).abs() < 1e-6, "{others:?} takes {found} of what cp=8 takes");
    }
}

#[test]
fn gradients_that_stay_whole_are_reduced_once_and_take_room() {
    let question = ["llama-2-7b", "dgx-a100-80", "--nodes", "4", "--global-batch", "512", "--zero", "3"];
    let estimated = |gradients: &str| {
        let found = json(&[&["estimate"], &question[..], &["--gradients", gradients]].concat());
        (number(&found["step_time_s"]), number(&found["peak_memory_bytes"]))
    };
    let ((cut, cut_bytes), (whole, whole_bytes)) = (estimated("cut"), estimated("whole"));
    assert!(whole < cut, "{whole} s whole, {cut} s cut");
    // 6.74 billion of four bytes, of which a device had the 32nd part.
    let more = (whole_bytes - cut_bytes) / (6.74e9 * 4.0 * 31.0 / 32.0);
    assert!((more - 1.0).abs() < 0.06, "{more} of what gradients take");
    let plan = ["optimize", "llama-2-7b", "dgx-h100", "--pin", "zero=1,gradients=whole"];
    let said = planner(&plan);
    assert_eq!((said.code, said.err.contains("gradients=whole is a way of zero=3")), (2, true), "{said}");
}

#[test]
fn schedules_that_split_backward_are_asked_where_a_pipeline_idles() {
    let question = ["gpt2-xl", "dgx-a100-80", "--devices", "16", "--global-batch", "3", "--seq-len", "8192"];
    let plan = json(&[&["optimize"], &question[..]].concat());
    let found = number(&plan["predicted"]["step_time_s"]);
    let kinds = ["zb-h1", "zb-h2", "zb-v", "dualpipe-v"];
    assert!(kinds.iter().any(|kind| plan["schedule"] == *kind), "{}", plan["schedule"]);
    for kind in &kinds[..3] {
        let named = time(&question, &["--pin", &format!("schedule={kind}")]);
        assert!(found < named * 1.0005, "takes {} of what {kind} takes", found / named);
    }
    let forbidden = kinds.map(|kind| format!("schedule={kind}")).join(",");
    let plain = time(&question, &["--forbid", &forbidden]);
    assert!(found < plain * 29.0 / 30.0, "takes {} of what 1F1B takes", found / plain);
    let warned = plan["warnings"].to_string();
    assert!(warned.contains(&format!("the fastest plan takes {plain:.3} s")), "{warned}");
    let said = |what: &str| time(&question, &["--pin", &format!("split-backward={what}")]);
    let (none, any) = (said("none"), said("any"));
    assert_eq!(none, plain);
    assert!(any <= found * 1.0005, "takes {} of what is worth it without a word", any / found);
    let pinned =
        planner(&[&["optimize"], &question[..], &["--pin", "schedule=1f1b,split-backward=any"]].concat());
    assert_eq!((pinned.code, pinned.err.contains("and one is pinned")), (2, true), "{pinned}");
    let one_stage = planner(&["optimize", "gpt2", "dgx-h100", "--pin", "pp=1,split-backward=any"]);
    assert_eq!((one_stage.code, one_stage.err.contains("name a schedule instead")), (2, true), "{one_stage}");
    let mixed = ["gpt2", "mixed-a100-v100", "--on-nodes", "1-2", "--global-batch", "8"];
    assert!(time(&mixed, &["--pin", "split-backward=any"]) <= time(&mixed, &[]) * 1.0005);
    // An engine that has no such schedule gets none.
    let megatron = json(&[&["optimize"], &question[..], &["--target", "megatron"]].concat());
    assert!(kinds.iter().all(|kind| megatron["schedule"] != *kind), "{}", megatron["schedule"]);
}

/// Virtual stages idle for a twentieth of the step, whole ones for a third; and a pipeline that only a short
/// micro-batch fills.
#[test]
fn schedules_that_split_backward_are_asked_where_another_pipeline_idles() {
    let few = ["gpt2-xl", "rtx4090-x8", "--devices", "8", "--global-batch", "2", "--seq-len", "512"];
    let found = time(&few, &[]) / time(&few, &["--pin", "split-backward=none"]);
    assert!(found < 0.8, "takes {found} of what is found without");
    let short = ["gpt2", "rtx4090-x8", "--devices", "8", "--global-batch", "5", "--seq-len", "100"];
    for pin in ["micro-batch=1", "pp=8", "split-backward=any"] {
        let found = time(&short, &[]) / time(&short, &["--pin", pin]);
        assert!(found < 1.026, "takes {found} of what {pin} takes");
    }
    // Few degrees divide these, and orders of actions are the larger part of what there is to choose.
    let odd = ["falcon-7b", "dgx-a100-80", "--devices", "16", "--global-batch", "17", "--seq-len", "2047"];
    let long = ["gpt2-xl", "dgx-a100-80", "--devices", "8", "--global-batch", "31", "--seq-len", "1001"];
    for (question, least) in [(odd, 0.92), (long, 0.95)] {
        let found = time(&question, &[]);
        let of_whole = found / time(&question, &["--pin", "split-backward=none"]);
        assert!(of_whole < least, "takes {of_whole} of what is found without");
        let of_any = found / time(&question, &["--pin", "split-backward=any"]);
        assert!(of_any < 1.0005, "takes {of_any} of what any takes");
    }
    // So where degrees are named.
    let named = ["qwen2.5-7b", "dgx-a100-80", "--devices", "16", "--global-batch", "51", "--seq-len", "4095"];
    let found = time(&named, &["--pin", "tp=1,pp=16,cp=1,dp=1"]) / time(&named, &[]);
    assert!(found < 1.0005, "its own degrees take {found} of what is found without them");
}

/// Every device computes the one key head, or gathers it, beside its own query heads.
#[test]
#[expect(clippy::disallowed_methods, reason = "a model is a file")]
fn queries_of_one_key_head_are_cut() {
    let config = serde_json::json!({
        "model_type": "starcoder2", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 4,
        "num_attention_heads": 48, "num_key_value_heads": 1, "vocab_size": 49152, "max_position_embeddings": 2048,
        "use_bias": true,
    });
    let file = scratch!("one-key-head.json");
    std::fs::write(&file, config.to_string()).unwrap();
    for (nodes, degree) in [("1", "2"), ("1", "4"), ("1", "8"), ("2", "2"), ("2", "8")] {
        for sequence_parallel in ["on", "off"] {
            let pins = format!("tp={degree},pp=1,sequence-parallel={sequence_parallel}");
            let question =
                ["optimize", &file, "dgx-h100", "--nodes", nodes, "--global-batch", "16", "--pin", &pins];
            assert_eq!(json(&question)["roles"]["tp"].to_string(), degree, "{question:?}");
        }
    }
}

#[test]
fn a_search_that_is_stopped_says_which_schedules_it_did_not_ask() {
    let question = ["gpt2-xl", "dgx-a100-80", "--devices", "16", "--global-batch", "3", "--seq-len", "8192"];
    let proof = |work: &str| {
        let plan = json(&[&["optimize"], &question[..], &["--work", work]].concat());
        plan["search"]["proof"].as_str().unwrap().to_owned()
    };
    let unasked = "schedules that split backward were not all asked";
    assert!(proof("1").contains(unasked), "{}", proof("1"));
    assert!(!proof("1000").contains(unasked), "{}", proof("1000"));
}

/// Tied tables are cut within the groups as well, whichever ZeRO stage is the fastest.
#[test]
fn groups_of_replicas_need_no_stage_by_name() {
    let question = ["gpt2", "dgx-h100", "--nodes", "2"];
    let found = time(&question, &["--pin", "zero-group=8"]);
    let named =
        ["0", "1", "3"].map(|stage| time(&question, &["--pin", &format!("zero-group=8,dp=16,zero={stage}")]));
    assert!(named.iter().all(|named| found < 1.0005 * named), "{found} of {named:?}");
}

/// With one key head, an axis that should split heads can only split tokens: what has other degrees than those pinned
/// stands in nobody's way.
#[test]
fn plans_of_other_degrees_do_not_hide_those_that_were_asked_for() {
    let question = ["falcon-7b", "dgx-h100", "--devices", "16", "--global-batch", "6", "--seq-len", "1024"];
    let whole = time(&question, &["--pin", "cp=4"]);
    let narrower = time(&question, &["--pin", "cp=4,tp=1"]);
    assert!(whole <= narrower * 1.0005, "{whole} {narrower}");
    // Degrees of which there is no plan are still told with what is nearest.
    let said = planner(&["optimize", "gpt2", "dgx-h100", "--pin", "ep=2"]);
    assert_eq!(said.code, 2, "{said}");
    assert!(said.err.contains("ep=2: `gpt2` has no experts; the nearest plan is dp 8"), "{said}");
}
