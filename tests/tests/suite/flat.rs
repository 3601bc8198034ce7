//! Models given operator by operator: clustered into layers, they are the models that they were made from.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test writes and reads files, and fails if it cannot"
)]

use frontends::{read_model, shipped_model, shipped_models};
use ir::graph::Model;
use tests::flatten::{content, flatten};
use tests::{done, json, number, scratch};

fn clustered(model: &Model) -> Model {
    let text = serde_json::to_string(&flatten(model)).unwrap();
    read_model("flat.json", &text).unwrap_or_else(|error| panic!("{}: {error}", model.name))
}

/// Kinds in order with their counts, names, parameters and contents.
fn told(model: &Model) -> Vec<(String, u64, u64, Vec<String>)> {
    let run = |run: &ir::graph::Segment| {
        let layer = &model.layers[run.layer];
        (layer.name.clone(), run.count, layer.n_parameters(), content(layer))
    };
    model.sequence.iter().map(run).collect()
}

#[test]
fn every_shipped_model_is_found_again_in_its_operators() {
    for shipped in shipped_models() {
        let model = read_model(shipped.name, shipped.text).unwrap();
        let found = clustered(&model);
        assert_eq!(found.name, model.name);
        let runs = |model: &Model| {
            let names =
                model.sequence.iter().map(|run| format!("{} x {}", model.layers[run.layer].name, run.count));
            names.collect::<Vec<_>>().join(", ")
        };
        assert_eq!(runs(&found), runs(&model), "{}", shipped.name);
        assert_eq!(told(&found), told(&model), "{}", shipped.name);
        assert_eq!(found.ties.len(), model.ties.len(), "{}", shipped.name);
        assert_eq!(found.n_parameters(), model.n_parameters(), "{}", shipped.name);
    }
}

/// Predicted step time of a named plan, of the model and of its operators.
#[track_caller]
fn step_times(name: &str, words: &[&str]) -> (f64, f64) {
    let model = read_model(name, shipped_model(name).unwrap().text).unwrap();
    let file = scratch!(format!("flat-{name}.json"));
    std::fs::write(&file, serde_json::to_string(&flatten(&model)).unwrap()).unwrap();
    let time = |model: &str| {
        let plan = json(&[&["estimate", model, "dgx-h100"], words].concat());
        number(&plan["step_time_s"])
    };
    (time(name), time(&file))
}

#[test]
fn a_named_plan_takes_as_long_whether_layers_are_given_or_found() {
    for (name, words) in [
        ("gpt2", ["--tp", "4", "--pp", "2"]),
        ("llama-3-8b", ["--tp", "4", "--pp", "2"]),
        ("gemma-2-9b", ["--tp", "4", "--pp", "2"]),
        ("gpt-oss-20b", ["--tp", "4", "--pp", "2"]),
    ] {
        let (given, found) = step_times(name, &words);
        assert_eq!(found, given, "{name}");
    }
}

/// Plans for a graph and runs the plan beside one device; what was found.
#[track_caller]
fn planned_and_run(model: &str, cluster: &str, pins: &str) -> String {
    let plan =
        scratch!(format!("flat-{model}-{cluster}-{}.json", pins.replace(['=', ','], "-")).replace('/', "-"));
    let file = format!("good/{model}.json");
    let found = done(&["optimize", &file, cluster, "--pin", pins, "-o", &plan]);
    assert!(found.out.contains("programs are proven equal"), "{found}");
    let run = done(&["verify", &plan]);
    assert!(run.out.ends_with("verified\n") && !run.out.contains("DIFFERENT"), "{run}");
    found.out
}

#[test]
fn unequal_layers_are_planned_and_compute_what_one_device_does() {
    planned_and_run("unequal-layers", "good/cluster.json", "pp=2");
}

#[test]
fn two_branches_that_meet_are_planned_and_compute_what_one_device_does() {
    planned_and_run("two-towers", "dgx-h100", "pp=2");
    planned_and_run("two-towers", "dgx-h100", "tp=4");
}

#[test]
fn an_encoder_that_all_layers_of_a_decoder_read_is_planned_and_computes_what_one_device_does() {
    planned_and_run("encoder-decoder", "dgx-h100", "pp=2");
    planned_and_run("encoder-decoder", "dgx-h100", "tp=2,pp=2");
}

#[test]
fn a_tower_of_patches_that_a_decoder_sees_is_planned_and_computes_what_one_device_does() {
    planned_and_run("vision-decoder", "dgx-h100", "dp=4,pp=2");
}

#[test]
fn the_layers_of_a_graph_of_operators_are_described() {
    insta::assert_snapshot!(done(&["models", "good/encoder-decoder.json"]).out);
    let native = scratch!("flat-native.json");
    std::fs::write(&native, done(&["models", "good/encoder-decoder.json", "--native"]).out).unwrap();
    let described = |file: &str| done(&["models", file]).out;
    assert_eq!(described(&native), described("good/encoder-decoder.json"));
}

/// The modules are no layers of the decoder's own when operators are all that is known, but what they compute is the
/// same.
#[test]
fn modules_that_predict_ahead_are_planned_from_operators_alone() {
    let mut model = read_model("qwen3-8b", shipped_model("qwen3-8b").unwrap().text).unwrap();
    frontends::mtp::predict_ahead(&mut model, 1).unwrap();
    let found = clustered(&model);
    assert_eq!(found.n_parameters(), model.n_parameters());
    let file = scratch!("flat-mtp.json");
    std::fs::write(&file, serde_json::to_string(&flatten(&model)).unwrap()).unwrap();
    let plan = scratch!("flat-mtp-plan.json");
    let pins = ["--seq-len", "2048", "--global-batch", "16", "--pin", "tp=4,pp=2"];
    done(&[&["optimize", &file, "dgx-h100"], &pins[..], &["-o", &plan]].concat());
    let run = done(&["verify", &plan]);
    assert!(run.out.ends_with("verified\n") && !run.out.contains("DIFFERENT"), "{run}");
}
