//! Plans on a part of a cluster, and what becomes of a training when a part of it is lost: every rank is known by its
//! node.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use std::collections::BTreeSet;

use serde_json::Value;
use tests::{done, json, number, planner, scratch};

/// A plan on a part of two nodes of A100 (0 and 1) and two of V100 (2 and 3).
fn plan(name: &str, more: &[&str]) -> String {
    let path = scratch!(name);
    let question = ["optimize", "gpt2-xl", "mixed-a100-v100", "--global-batch", "64", "-o", &path];
    done(&[&question[..], more].concat());
    path
}

/// Node and kind of device of every rank.
fn nodes(plan: &str) -> Vec<(u64, String)> {
    let ranks = json(&["ranks", plan]);
    let of = |rank: &Value| {
        let device = rank["device"].as_str().unwrap();
        (rank["node"].as_u64().unwrap(), device.split('-').next().unwrap().to_owned())
    };
    ranks.as_array().unwrap().iter().map(of).collect()
}

fn all(nodes: &[(u64, &str)]) -> BTreeSet<(u64, String)> {
    nodes.iter().map(|(node, device)| (*node, (*device).to_owned())).collect()
}

#[test]
fn a_plan_on_some_nodes_says_which() {
    let file = plan("parts-nodes.json", &["--on-nodes", "1,3", "--pin", "pp=2"]);
    let ranks = nodes(&file);
    assert_eq!(ranks.len(), 16);
    assert_eq!(ranks.into_iter().collect::<BTreeSet<_>>(), all(&[(1, "a100"), (3, "v100")]));
    let text = done(&["optimize", "gpt2-xl", "mixed-a100-v100", "--on-nodes", "1"]).out;
    assert!(text.contains("1 with a100-sxm-40"), "{text}");
    done(&["verify", &file]);
}

#[test]
fn a_plan_on_some_groups_has_their_devices() {
    let file = plan("parts-groups.json", &["--groups", "v100"]);
    assert_eq!(nodes(&file).into_iter().collect::<BTreeSet<_>>(), all(&[(2, "v100"), (3, "v100")]));
    // Groups in another order keep the numbers of their nodes.
    let turned = plan("parts-turned.json", &["--pin", "pp=2"]);
    let ranks: BTreeSet<(u64, String)> = nodes(&turned).into_iter().collect();
    let known = all(&[(0, "a100"), (1, "a100"), (2, "v100"), (3, "v100")]);
    assert!(ranks.is_subset(&known), "{ranks:?}");
}

#[test]
fn parts_that_are_none_are_refused_with_what_there_is() {
    let cases = [
        (&["mixed-a100-v100", "--groups", "h100"][..], "has no group of `h100`"),
        (&["mixed-a100-v100", "--on-nodes", "2-4"], "has no node 4"),
        (&["mixed-a100-v100", "--on-nodes", "3-2"], "`3-2` ends before it begins"),
        (&["mixed-a100-v100", "--on-nodes", "1", "--nodes", "2"], "cannot be used with"),
        (&["three-regions", "--on-nodes", "0-2"], "domains of tier"),
    ];
    for (words, what) in cases {
        let said = planner(&[&["clusters"], words].concat());
        assert_eq!(said.code, 2, "{said}");
        assert!(said.err.contains(what), "{what}: {said}");
    }
}

#[test]
fn lost_devices_of_a_mixed_cluster_are_those_of_its_last_group() {
    let (file, next) = (plan("parts-lost.json", &["--on-nodes", "0,2-3"]), scratch!("parts-lost-next.json"));
    let before = nodes(&file);
    let answer = json(&["replan", &file, "--lost", "8", "-o", &next]);
    let after = nodes(&next);
    // All that is left is used or spare, and stands where it stood.
    assert_eq!(number(&answer["to"]["n_devices"]) + number(&answer["n_spare"]), before.len() as f64 - 8.0);
    let left: BTreeSet<(u64, String)> = before[..before.len() - 8].iter().cloned().collect();
    assert!(after.iter().all(|node| left.contains(node)), "{after:?} of {left:?}");
    assert!(number(&answer["stays_bytes"]) > 0.0, "{answer}");
}

#[test]
fn lost_nodes_are_the_ones_that_are_named() {
    let pins = ["--pin", "pp=1,dp=16,zero=1,recompute=full"];
    let question = ["--groups", "a100", "--nodes", "2"];
    let (file, next) =
        (plan("parts-named.json", &[&question[..], &pins].concat()), scratch!("parts-named-next.json"));
    let pins = ["--pin", "dp=8,zero=1,recompute=full"];
    let lost =
        |node: &str| json(&[&["replan", &file, "--lost-nodes", node, "-o", &next][..], &pins].concat());
    let answer = lost("0");
    assert_eq!(nodes(&next).into_iter().collect::<BTreeSet<_>>(), all(&[(1, "a100")]));
    // Node 1 has all parameters and half of the optimizer states, of which every rank keeps its part.
    let parameters = number(&json(&["models", "gpt2-xl"])["parameters"]);
    let missing = number(&answer["from_checkpoint_bytes"]) / (6.0 * parameters);
    assert!((missing - 1.0).abs() < 1e-3, "{answer}");
    let stays = number(&answer["stays_bytes"]);
    assert!(stays > 8.0 * 2.0 * parameters, "{answer}");
    // The first node or the last: it is the same loss.
    assert_eq!(lost("1")["from_checkpoint_bytes"], answer["from_checkpoint_bytes"]);
    // From where it went, it grows again: its node keeps its number, the new one has another.
    let grown = scratch!("parts-named-grown.json");
    let answer = json(&["replan", &next, "--gained", "8", "-o", &grown]);
    assert_eq!(answer["from_checkpoint_bytes"], 0);
    assert_eq!(nodes(&grown).into_iter().collect::<BTreeSet<_>>(), all(&[(0, "a100"), (1, "a100")]));
    let refused = planner(&["replan", &file, "--lost-nodes", "5"]);
    assert_eq!(refused.code, 2, "{refused}");
    assert!(refused.err.contains("expected nodes of the plan, 0-1, found 5"), "{refused}");
}
