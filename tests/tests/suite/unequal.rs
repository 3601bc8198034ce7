//! Stages as wide as the groups of a mixed cluster are large: found, priced, proven, verified, listed and left again.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]
#![expect(clippy::disallowed_methods, reason = "plans are files")]

use std::sync::Once;

use ir::mesh::Mesh;
use ir::plan::Plan;
use serde_json::{Value, json};
use tests::{done, json, planner, scratch};

/// A plan in two stages on two nodes of A100 and one of V100.
fn plan() -> (String, Plan) {
    static ASKED: Once = Once::new();
    let path = scratch!("unequal.json");
    ASKED.call_once(|| {
        let question =
            ["optimize", "llama-2-7b", "mixed-a100-v100", "--on-nodes", "0-2", "--global-batch", "96"];
        done(&[&question[..], &["--pin", "pp=2,vpp=1", "-o", &path]].concat());
    });
    let plan: Plan = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    (path, plan)
}

#[test]
fn a_stage_on_the_larger_group_is_wider() {
    let (file, plan) = plan();
    let mut devices: Vec<u64> = plan.stage_meshes.iter().map(Mesh::n_devices).collect();
    devices.sort_unstable();
    assert_eq!(devices, [8, 16]);
    let verified = done(&["verify", &file]);
    assert!(verified.out.contains("pipeline, send-receive (direct)"), "{verified}");
    done(&["prove", &file]);
    // Priced from the file alone it is what the search said.
    let estimate: Value = json(&["estimate", "--plan", &file]);
    let time = plan.predicted.as_ref().unwrap().step_time_s.0;
    assert_eq!(estimate["step_time_s"].as_f64().unwrap(), time);
    let ranks: Value = json(&["ranks", &file]);
    let ranks = ranks.as_array().unwrap();
    assert_eq!(ranks.len(), 24);
    for rank in ranks {
        // Each stage is on one kind of device.
        let first = ranks.iter().find(|other| other["stage"] == rank["stage"]).unwrap();
        assert_eq!(first["device"], rank["device"]);
    }
    // What is shown can be read again, and training can go over to a plan for what is left.
    done(&["show", &file]);
    done(&["replan", &file, "--lost-nodes", "2"]);
    done(&["run", &file, "--steps", "3"]);
}

#[test]
fn meshes_that_are_none_are_refused_with_their_place() {
    let (file, plan) = plan();
    let said = |change: &dyn Fn(&mut Value)| {
        let mut document = serde_json::to_value(&plan).unwrap();
        change(&mut document);
        let path = file.replace(".json", "-changed.json");
        std::fs::write(&path, document.to_string()).unwrap();
        let said = planner(&["estimate", "--plan", &path]);
        assert_eq!(said.code, 2, "{said}");
        said.err
    };
    let few = said(&|plan| _ = plan["stage_meshes"].as_array_mut().unwrap().pop());
    assert!(few.contains("stage_meshes: expected a mesh for each of 2 stages, found 1"), "{few}");
    let other = said(&|plan| plan["stage_meshes"][1]["axes"][0]["name"] = json!("other"));
    assert!(other.contains("stage_meshes[1].axes: expected the axes of `mesh`"), "{other}");
    let large = said(&|plan| plan["stage_meshes"][1]["axes"][0]["size"] = json!(1000));
    assert!(large.contains("exceed the cluster's 24 devices"), "{large}");
    let shared = said(&|plan| {
        let first = plan["chunks"][0].as_array().unwrap().last().unwrap()["entry"].clone();
        for run in plan["chunks"][1].as_array_mut().unwrap() {
            run["entry"] = first.clone();
        }
    });
    assert!(shared.contains("is on a stage of another mesh too"), "{shared}");
}
