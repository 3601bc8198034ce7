//! `--constraints`: every plan honours what is said of layers and tensors, and what cannot be honoured is refused.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]
#![expect(clippy::disallowed_methods, reason = "constraints are files")]

use std::path::PathBuf;

use ir::graph::{Layer, TensorId};
use ir::lower::{LayerChoice, Recompute, whole_axes};
use ir::mesh::Mesh;
use ir::op::OpKind;
use ir::plan::Plan;
use ir::plan::check::open;
use ir::program::Storage;
use ir::sharding::Sharding;
use ir::signature::signature;
use ir::strategy::placements;
use serde_json::{Value, json};
use tests::{Transcript, planner};

fn file(name: &str, value: &Value) -> String {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("constraints-{name}.json"));
    std::fs::write(&path, value.to_string()).unwrap();
    path.to_string_lossy().into_owned()
}

fn asked(name: &str, words: &[&str], said: &Value) -> Transcript {
    let file = file(name, said);
    planner(&[&["optimize"], words, &["--constraints", &file, "--json"]].concat())
}

fn plan(name: &str, words: &[&str], said: &Value) -> Plan {
    let found = asked(name, words, said);
    assert_eq!(found.code, 0, "{found}");
    serde_json::from_str(&found.out).unwrap()
}

/// Calls `check` with every choice of a layer kind, and says how many there are.
fn each_choice(plan: &Plan, kind: &str, check: impl Fn(&Layer, &LayerChoice, &Mesh)) -> usize {
    let opened = open(plan).unwrap();
    let of_kind = opened.entries.iter().filter(|entry| opened.model.layers[entry.layer].name == kind);
    of_kind.map(|entry| check(&opened.model.layers[entry.layer], &entry.choice, &plan.mesh)).count()
}

/// Shardings in which a tensor is made and read.
fn uses(layer: &Layer, choice: &LayerChoice, name: &str) -> Vec<(TensorId, Sharding)> {
    let mut list = Vec::new();
    for (op, &strategy) in layer.ops.iter().zip(&choice.strategies) {
        let places = placements(&signature(layer, op), strategy);
        let all = op.operands.iter().zip(places.operands).chain(op.results.iter().zip(places.results));
        list.extend(all.map(|(&tensor, sharding)| (tensor, sharding)));
    }
    list.retain(|(tensor, _)| layer.tensors[tensor.0].name == name);
    assert!(!list.is_empty(), "{name}");
    list
}

fn parts(layer: &Layer, (tensor, sharding): (TensorId, Sharding), mesh: &Mesh, dim: &str) -> u64 {
    let dims = &layer.tensors[tensor.0].dims;
    let at = dims.iter().position(|id| layer.dims[id.0].name == dim).unwrap();
    sharding.axes_of(at).map(|axis| mesh.size(axis)).product()
}

const JOB: [&str; 2] = ["llama-3-8b", "dgx-h100"];

#[test]
fn tensors_are_cut_as_it_says_and_the_rest_follows() {
    let said = json!({ "layers": { "decoder": { "parts": {
        "mlp.up.weight": { "f": 4 }, "attention.q.weight": { "k": 1, "h": 1 }
    } } } });
    let n = each_choice(&plan("parts", &JOB, &said), "decoder", |layer, choice, mesh| {
        for one in uses(layer, choice, "mlp.up.weight") {
            assert_eq!(parts(layer, one, mesh, "f"), 4);
        }
        for one in uses(layer, choice, "attention.q.weight") {
            assert_eq!((parts(layer, one, mesh, "k"), parts(layer, one, mesh, "h")), (1, 1));
        }
        // What is not named follows: the product's result is made as its weight is cut.
        let made = uses(layer, choice, "mlp.up")[0];
        assert_eq!(parts(layer, made, mesh, "f"), 4);
    });
    assert!(n > 0);
}

#[test]
fn results_are_kept_and_computed_again_as_it_says() {
    let said = json!({ "layers": { "decoder": { "recompute": { "*": "keep", "mlp.up": "again", "mlp.glu": "again" } } } });
    let n = each_choice(&plan("recompute", &JOB, &said), "decoder", |layer, choice, _| {
        for (op, recompute) in layer.ops.iter().zip(&choice.recompute) {
            let again = ["mlp.up", "mlp.glu"].contains(&op.name.as_str());
            let wanted = if again { Recompute::Again } else { Recompute::Keep };
            assert!(op.kind == OpKind::Fork || *recompute == wanted, "{}", op.name);
        }
    });
    assert!(n > 0);
}

#[test]
fn states_of_a_parameter_live_where_it_says() {
    let said =
        json!({ "layers": { "decoder": { "storage": { "mlp.up.weight": 3, "mlp.down.weight": 1 } } } });
    let n = each_choice(&plan("storage", &JOB, &said), "decoder", |layer, choice, mesh| {
        for (name, stage) in [("mlp.up.weight", 3), ("mlp.down.weight", 1)] {
            let (tensor, sharding) = uses(layer, choice, name)[0];
            let all = whole_axes(mesh, sharding);
            let none = ir::program::AxisSet::EMPTY;
            let wanted = match stage {
                3 => Storage::on_device(all, all, all),
                _ => Storage::on_device(none, none, all),
            };
            assert_eq!(choice.storage[&tensor], wanted, "{name}");
        }
    });
    assert!(n > 0);
}

/// Per layer of the model in order: whether every result is computed again, every one kept, or neither.
fn kept(plan: &Plan) -> Vec<(String, &'static str)> {
    let opened = open(plan).unwrap();
    let word = |entry: usize| {
        let layer = &opened.model.layers[opened.entries[entry].layer];
        let pairs = layer.ops.iter().zip(&opened.entries[entry].choice.recompute);
        let all: Vec<Recompute> =
            pairs.filter(|(op, _)| op.kind != OpKind::Fork).map(|(_, recompute)| *recompute).collect();
        let are = |wanted: Recompute| all.iter().all(|one| *one == wanted);
        let word = if are(Recompute::Keep) {
            "kept"
        } else if are(Recompute::Again) {
            "again"
        } else {
            "mixed"
        };
        (layer.name.clone(), word)
    };
    let runs = plan.chunks.iter().flatten();
    runs.flat_map(|run| std::iter::repeat_n(word(run.entry), run.count as usize)).collect()
}

#[test]
fn single_layers_are_as_it_says() {
    let said = json!({ "layers": {
        "decoder": { "recompute": { "*": "keep" } },
        "decoder[0-3]": { "recompute": { "*": "again" } },
        "decoder[17]": { "recompute": { "*": "keep", "mlp.glu": "again" }, "parts": { "mlp.up.weight": { "f": 2 } } }
    } });
    let path = file("single", &said);
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("constraints-single-plan.json");
    let out = out.to_string_lossy().into_owned();
    let words = ["--nodes", "2", "--pin", "pp=2", "--constraints", &path, "-o", &out];
    let found = planner(&[&["optimize"], &JOB[..], &words].concat());
    assert_eq!(found.code, 0, "{found}");
    let plan: Plan = serde_json::from_str(&std::fs::read_to_string(&out).unwrap()).unwrap();
    let layers = kept(&plan);
    assert_eq!(layers.len(), 34);
    for (at, (name, word)) in layers.iter().enumerate().filter(|(at, _)| (1..33).contains(at)) {
        let expected = match at - 1 {
            0..=3 => ("decoder[0-3]", "again"),
            17 => ("decoder[17]", "mixed"),
            _ => ("decoder", "kept"),
        };
        assert_eq!((name.as_str(), *word), expected, "layer {at}");
    }
    each_choice(&plan, "decoder[17]", |layer, choice, mesh| {
        for one in uses(layer, choice, "mlp.up.weight") {
            assert_eq!(parts(layer, one, mesh, "f"), 2);
        }
    });
    let verified = planner(&["verify", &out]);
    assert_eq!(verified.code, 0, "{verified}");
    // Layers keep their numbers: states go over to a plan that knows nothing of the names.
    let other = out.replace(".json", "-other.json");
    let plain = planner(&[&["optimize"], &JOB[..], &["--nodes", "2", "-o", &other]].concat());
    assert_eq!(plain.code, 0, "{plain}");
    let map = planner(&["reshard", &out, &other]);
    assert_eq!(map.code, 0, "{map}");
}

#[test]
fn a_plan_under_constraints_is_right() {
    let said = json!({ "layers": { "*": { "recompute": { "attention.core": "again" } }, "decoder": { "parts": {
        "mlp.up.weight": { "f": 2 } } } } });
    let path = file("verified", &said);
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("constraints-plan.json");
    let out = out.to_string_lossy().into_owned();
    let found = planner(&[&["optimize"], &JOB[..], &["--constraints", &path, "-o", &out]].concat());
    assert_eq!(found.code, 0, "{found}");
    assert!(found.out.contains("programs are proven equal"), "{found}");
    let verified = planner(&["verify", &out]);
    assert_eq!(verified.code, 0, "{verified}");
}

#[test]
fn what_cannot_be_honoured_is_refused() {
    let said = |name: &str, layers: Value| {
        let found = asked(name, &JOB, &json!({ "layers": layers }));
        assert_eq!(found.code, 2, "{found}");
        found.err
    };
    let cases = [
        (json!({ "decodr": {} }), "no layer is called `decodr`: the model has embedding, decoder, head"),
        (json!({ "decoder": { "parts": { "mlp.upp": { "f": 2 } } } }), "no tensor is called `mlp.upp`"),
        (json!({ "decoder": { "parts": { "mlp.up.weight": { "g": 2 } } } }), "has no dim `g`: it has h, f"),
        (
            json!({ "decoder": { "parts": { "mlp.up.weight": { "f": 3 } } } }),
            "3 parts of `f` do not divide the 8 devices",
        ),
        (json!({ "decoder": { "recompute": { "mlp.upp": "again" } } }), "no operator is called `mlp.upp`"),
        (json!({ "decoder": { "recompute": { "mlp.up": "maybe" } } }), "unknown value `maybe`"),
        (json!({ "decoder": { "storage": { "mlp.up": 1 } } }), "`mlp.up` is no parameter"),
        (json!({ "decoder": { "storage": { "mlp.up.weight": 4 } } }), "expected 0, 1, 2 or 3"),
        (
            json!({ "decoder[32]": {} }),
            "layer `decoder[32]`: there is no layer 32: `decoder` has layers 0 to 31",
        ),
        (json!({ "decoder[3-0]": {} }), "layer `decoder[3-0]`: `3-0` ends before it begins"),
        (
            json!({ "decoder[1]": { "storage": { "mlp.up": 1 } } }),
            "layer `decoder[1]`: `mlp.up` is no parameter",
        ),
        (json!({}), "nothing is said of any layer"),
        // The norm over `h` needs it whole.
        (json!({ "decoder": { "parts": { "mlp.norm": { "h": 2 } } } }), "no plan honours all"),
    ];
    for (at, (layers, what)) in cases.into_iter().enumerate() {
        let err = said(&format!("bad-{at}"), layers);
        assert!(err.contains(what), "{what}: {err}");
    }
}

#[test]
fn a_key_that_stands_twice_is_refused() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("constraints-twice.json");
    let text = r#"{"layers":{"decoder":{"recompute":{"*":"again"}},"decoder":{"recompute":{"*":"keep"}}}}"#;
    std::fs::write(&path, text).unwrap();
    let said = planner(&["optimize", "llama-3-8b", "dgx-h100", "--constraints", path.to_str().unwrap()]);
    assert_eq!(said.code, 2, "{said}");
    assert!(said.err.contains("twice.json:1:60: layers.decoder: this key is in its object twice"), "{said}");
}
