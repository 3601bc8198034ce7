//! Unlike devices that take unequal parts of tensors, by running unequal numbers of ranks.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]
#![expect(clippy::disallowed_methods, reason = "plans are files")]

use ir::plan::Plan;
use ir::plan::check::check_plan;
use serde_json::Value;
use tests::{done, json, number, planner, scratch};

/// One long sequence, of which no batch, no pipeline and no share of micro-batches makes work for two devices.
const QUESTION: [&str; 9] =
    ["optimize", "llama-3-8b", "h100-a100-pcie", "--lora", "16", "--global-batch", "1", "--seq-len", "32768"];

/// The plan that is found with a pin, written to a file.
fn found(name: &str, pin: &[&str]) -> (Plan, String) {
    let file = scratch!(name);
    done(&[&QUESTION, pin, &["-o", &file]].concat());
    (serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap(), file)
}

fn seconds(plan: &Plan) -> f64 {
    plan.predicted.as_ref().unwrap().step_time_s.0
}

#[test]
fn a_device_with_more_ranks_beside_a_slower_one_beats_all_plans_of_a_rank_each() {
    let (plan, file) = found("tensor-shares.json", &[]);
    let (equal, _) = found("tensor-shares-equal.json", &["--pin", "tensor-shares=equal"]);
    assert!(!equal.cluster.shares_devices() && plan.cluster.shares_devices());
    assert!(seconds(&plan) < 0.85 * seconds(&equal), "{} and {}", seconds(&plan), seconds(&equal));
    let ranks: Vec<u64> =
        plan.cluster.groups.iter().map(ir::cluster::DeviceGroup::ranks_per_device).collect();
    assert_eq!((ranks, plan.n_devices(), plan.n_whole_devices()), (vec![3, 1], 4, 2));
    // A price of the document is the price of the search.
    assert_eq!(planner::price::price(&plan).unwrap(), *plan.predicted.as_ref().unwrap());
    // Programs are proven and run as ranks; of what they send, nothing between ranks of a device is on a link.
    done(&["prove", &file]);
    let verdict = json(&["verify", &file, "--precision", "all"]);
    let rows: Vec<&Value> =
        verdict["runs"].as_array().unwrap().iter().flat_map(|run| run["bytes"].as_array().unwrap()).collect();
    assert!(rows.iter().all(|row| row["predicted"] == row["counted"]));
    let sent = |place: &str| -> f64 {
        let here = rows.iter().filter(|row| row["what"].as_str().unwrap_or_default().ends_with(place));
        here.map(|row| number(&row["counted"])).sum()
    };
    assert!(sent("over pcie") > 0.0 && sent("over no link (one device)") > 0.0, "{rows:?}");
    let listed = done(&["ranks", &file]).out;
    let shown = done(&["explain", &file]).out;
    let lines = shown
        .lines()
        .filter(|line| ["cluster", "mesh", "ranks", "roles"].iter().any(|name| line.starts_with(name)));
    let warned = plan.warnings.iter().filter(|warning| warning.contains("rank"));
    let lines: Vec<&str> = lines.chain(warned.map(String::as_str)).collect();
    insta::assert_snapshot!(format!("{}\n\n{listed}", lines.join("\n")));
}

#[test]
fn products_are_cut_as_unequally_where_that_is_asked_for() {
    let (plan, file) = found("tensor-shares-tp.json", &["--pin", "tp=4,tensor-shares=unequal"]);
    assert_eq!((plan.roles.tp, plan.n_whole_devices()), (4, 2));
    done(&["verify", &file, "--precision", "f64"]);
}

#[test]
fn what_has_no_such_plan_is_told() {
    let unequal = ["--pin", "tensor-shares=unequal"];
    let said = [
        planner(&[&["optimize", "gpt2", "dgx-h100"][..], &unequal].concat()),
        planner(&[&["optimize", "gpt2", "mixed-a100-v100"][..], &unequal].concat()),
        planner(&[&["optimize", "gpt2", "h100-a100-pcie", "--target", "megatron"][..], &unequal].concat()),
        planner(&["estimate", "gpt2", "h100-a100-pcie", "--tensor-shares", "unequal"]),
    ];
    insta::assert_snapshot!(said.map(|one| one.err).join("\n"));
}

#[test]
fn a_document_says_of_ranks_what_they_are() {
    let (plan, file) = found("tensor-shares-broken.json", &["--pin", "tensor-shares=unequal"]);
    let said = |change: &dyn Fn(&mut Plan)| {
        let mut plan = plan.clone();
        change(&mut plan);
        let error = check_plan(&plan).unwrap_err();
        format!("{}: {}", error.place, error.what)
    };
    let all = [
        said(&|plan| plan.cluster.groups[1].part_of = None),
        said(&|plan| plan.cluster.groups[0].part_of.as_mut().unwrap().count = 2),
        said(&|plan| plan.cluster.groups[0].device.memory_bytes.0 *= 3.0),
        said(&|plan| {
            let whole = plan.cluster.groups[0].part_of.clone();
            plan.cluster.groups[0].part_of.as_mut().unwrap().part_of = whole;
        }),
    ];
    insta::assert_snapshot!(all.join("\n"));
    // Which ranks a lost device takes is no question for replan.
    assert_eq!(planner(&["replan", &file, "--lost", "1"]).code, 2);
}
