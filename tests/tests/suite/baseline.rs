//! What is found is never slower, by our model, than what a rule of thumb makes.

use tests::baseline::{by_rule, found, question};

#[test]
fn no_rule_of_thumb_makes_a_faster_plan() {
    let questions = [
        ("llama-3-8b", "dgx-h100", 8),
        ("llama-2-13b", "dgx-a100-40", 32),
        ("gpt-neox-20b", "dgx-a100-80", 16),
        ("mixtral-8x7b", "dgx-h100", 16),
        ("llama-3-70b", "dgx-h100", 64),
        ("qwen3-30b-a3b", "dgx-h200", 16),
    ];
    let mut ratios = Vec::new();
    for (model, cluster, devices) in questions {
        let request = question(model, cluster, devices).unwrap();
        let (rule, pins) = by_rule(&request).unwrap();
        let ratio = rule / found(&request).unwrap();
        assert!(ratio >= 1.0 - 1e-9, "{model} on {devices} of {cluster}: {ratio} with {pins:?}");
        ratios.push(ratio);
    }
    // The rule is no straw man: nowhere is it worse than by a factor of three.
    assert!(ratios.iter().all(|ratio| *ratio < 3.0), "{ratios:?}");
}
