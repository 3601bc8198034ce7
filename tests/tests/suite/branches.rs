//! Models with branches: two towers over the same tokens that are summed, as a document in layers. Stages of both run
//! side by side; found, priced, proven, verified, shown and trained.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]
#![expect(clippy::disallowed_methods, reason = "models and plans are files")]

use ir::plan::Plan;
use serde_json::{Value, json};
use tests::{done, json, planner, scratch};

/// What becomes of the left tower's result while the right tower is worked on.
#[derive(Clone, Copy, PartialEq)]
enum Left {
    /// It waits for the layer that reads it.
    Waits,
    /// Every layer of the right tower hands it on, so that layers are a chain.
    IsHandedOn,
}

/// Two towers of GPT-2's layers, their sum, and more such layers.
fn towers(file: &str, left: Left) -> String {
    let native = done(&["models", "gpt2", "--native"]).out;
    let mut model: Value = serde_json::from_str(&native).unwrap();
    let [embedding, body, head] = [0, 1, 2].map(|at| model["layers"][at].clone());
    let named = |name: &str, layer: &Value| {
        let mut layer = layer.clone();
        layer["name"] = name.into();
        layer
    };
    let stream = |name: &str| json!({ "name": name, "dims": "b s h" });
    let hidden = body["dims"].as_array().unwrap().iter().find(|dim| dim["name"] == "h").unwrap().clone();
    let dims =
        json!([{ "name": "b", "length": "micro_batch" }, { "name": "s", "length": "sequence" }, hidden]);
    let sum = json!({
        "name": "sum", "dims": dims, "tensors": [stream("left"), stream("right"), stream("both")],
        "ops": [{ "name": "add", "kind": { "op": "add" }, "operands": ["left", "right"], "results": ["both"] }],
        "stream_in": ["left", "right"], "out": "both",
    });
    let mut right = [named("right_embedding", &embedding), named("right", &body)];
    if left == Left::IsHandedOn {
        for layer in &mut right {
            layer["tensors"].as_array_mut().unwrap().extend([stream("waiting"), stream("handed_on")]);
            let fork = json!({
                "name": "hand_on", "kind": { "op": "fork" }, "operands": ["waiting"], "results": ["handed_on"],
            });
            layer["ops"].as_array_mut().unwrap().push(fork);
            let streams = |own: &Value, other: &str| {
                let own = own.as_str().map(str::to_owned);
                std::iter::once(other.to_owned()).chain(own).collect::<Vec<String>>()
            };
            layer["stream_in"] = streams(&layer["stream_in"], "waiting").into();
            layer["out"] = streams(&layer["out"], "handed_on").into();
        }
    }
    let [right_embedding, right] = right;
    let layers =
        [named("left_embedding", &embedding), named("left", &body), right_embedding, right, sum, body, head];
    let counts = [1, 4, 1, 4, 1, 4, 1];
    let run = |(layer, count): (&Value, u64)| json!({ "layer": layer["name"], "count": count });
    model["sequence"] = layers.iter().zip(counts).map(run).collect();
    model["layers"] = layers.into_iter().collect();
    model["name"] = "towers".into();
    model.as_object_mut().unwrap().remove("ties");
    std::fs::write(file, model.to_string()).unwrap();
    file.to_owned()
}

fn read(file: &str) -> Plan {
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

fn time(plan: &Plan) -> f64 {
    plan.predicted.as_ref().unwrap().step_time_s.0
}

#[test]
fn two_towers_are_planned_in_stages_and_run() {
    let (model, file) = (towers(&scratch!("towers.json"), Left::Waits), scratch!("towers-plan.json"));
    let questions = [
        ("3", "pp=3"),
        ("1", "pp=4,tp=2,schedule=1f1b"),
        ("1", "pp=2,vpp=3,zero=3"),
        ("1", "pp=8,schedule=zb-h1"),
    ];
    for (nodes, pins) in questions {
        let question = ["optimize", &model, "dgx-h100", "--nodes", nodes, "--global-batch", "24"];
        done(&[&question[..], &["--pin", pins, "-o", &file]].concat());
        let verified = done(&["verify", &file]);
        assert!(
            verified.out.ends_with("verified\n") && !verified.out.contains("DIFFERENT"),
            "{pins}: {verified}"
        );
        done(&["prove", &file]);
        let estimate: Value = json(&["estimate", "--plan", &file]);
        assert_eq!(estimate["step_time_s"].as_f64().unwrap(), time(&read(&file)), "{pins}");
    }
    done(&["show", &file]);
    done(&["explain", &file]);
    done(&["run", &file, "--steps", "2"]);
    done(&["replan", &file, "--cluster", "dgx-a100-80"]);
}

/// Six stages and six micro-batches of 1F1B: in a chain five stages fill before the last begins, here two towers of two
/// stages each fill side by side. Unequal stages of the chain make up for most of that.
#[test]
fn stages_of_two_branches_run_side_by_side() {
    let found = [Left::Waits, Left::IsHandedOn].map(|left| {
        let model = towers(&scratch!(&format!("towers-{}.json", left as u8)), left);
        let file = model.replace(".json", "-plan.json");
        let pins = "pp=6,tp=4,micro-batch=1,schedule=1f1b";
        done(&[
            "optimize",
            &model,
            "dgx-h100",
            "--nodes",
            "3",
            "--global-batch",
            "6",
            "--pin",
            pins,
            "-o",
            &file,
        ]);
        done(&["verify", &file]);
        read(&file)
    });
    let [branched, chained] = found.each_ref().map(time);
    assert!(branched < 0.99 * chained, "{branched} s in branches, {chained} s in a chain");
    // No chunk has layers of both towers.
    let layers = |runs: &Vec<ir::plan::EntryRun>| {
        let name = |run: &ir::plan::EntryRun| found[0].entries[run.entry].layer.clone();
        runs.iter().map(name).collect::<Vec<String>>()
    };
    for names in found[0].chunks.iter().map(layers) {
        let has = |side: &str| names.iter().any(|name| name.starts_with(side));
        assert!(!(has("left") && has("right")), "{names:?}");
    }
}

#[test]
fn streams_that_do_not_meet_are_refused_with_the_layer() {
    let model = towers(&scratch!("towers-wrong.json"), Left::Waits);
    let said = |change: &dyn Fn(&mut Value)| {
        let mut document: Value = serde_json::from_str(&std::fs::read_to_string(&model).unwrap()).unwrap();
        change(&mut document);
        let path = model.replace(".json", "-changed.json");
        std::fs::write(&path, document.to_string()).unwrap();
        let said = planner(&["models", &path]);
        assert_eq!(said.code, 2, "{said}");
        said.err
    };
    let removed = said(&|model| _ = model["sequence"].as_array_mut().unwrap().remove(4));
    assert!(removed.contains("`left` leaves a stream that no layer reads"), "{removed}");
    let early = said(&|model| model["sequence"].as_array_mut().unwrap().swap(1, 4));
    assert!(early.contains("layer `sum` reads 2 streams, but layers before leave 1 for it"), "{early}");
    let twice = said(&|model| model["layers"][4]["out"] = json!(["both", "both"]));
    assert!(twice.contains("layer `sum`: one tensor is two of the outgoing streams"), "{twice}");
    let number = said(&|model| model["layers"][4]["out"] = 3.into());
    assert!(number.contains("expected the name of a tensor, or a list of names"), "{number}");
}
