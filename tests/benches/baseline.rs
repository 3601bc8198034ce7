//! Our plans against a rule of thumb, over shipped models and clusters: `cargo bench -p tests --bench baseline`, with
//! names of clusters behind `--` for those alone.

#![expect(clippy::print_stdout, reason = "a benchmark prints")]
#![expect(clippy::disallowed_methods, reason = "a benchmark has a command line of its own")]

use frontends::shipped_models;
use tests::baseline::{by_rule, found, question};

/// Clusters and how many of their devices.
const CLUSTERS: [(&str, u64); 4] =
    [("dgx-h100", 64), ("dgx-a100-80", 32), ("tpu-v5p", 64), ("rtx4090-x8", 16)];

fn main() {
    let (mut all, mut all_without_rule) = (Vec::new(), 0);
    let named: Vec<String> = std::env::args().skip(1).filter(|name| !name.starts_with('-')).collect();
    let is_asked = |(name, _): &(&str, u64)| named.is_empty() || named.iter().any(|own| own == name);
    for (cluster, devices) in CLUSTERS.into_iter().filter(is_asked) {
        let mut ratios = Vec::new();
        let mut n_without_rule = 0;
        for model in shipped_models() {
            let Some(request) = question(model.name, cluster, devices) else { continue };
            let Some(ours) = found(&request) else { continue };
            let Some((rule, _)) = by_rule(&request) else {
                println!(
                    "{:<18} {cluster:<12} {:>9.3} s         -  no size of the rule fits",
                    model.name, ours.0
                );
                n_without_rule += 1;
                continue;
            };
            println!(
                "{:<18} {cluster:<12} {:>9.3} s {:>9.3} s {:>6.3}",
                model.name,
                ours.0,
                rule.0,
                rule / ours
            );
            ratios.push(rule / ours);
        }
        summary(&format!("{devices} of {cluster}"), &ratios, n_without_rule);
        all.extend(ratios);
        all_without_rule += n_without_rule;
    }
    summary("all", &all, all_without_rule);
}

/// Geometric mean, least and largest of the ratios.
fn summary(name: &str, ratios: &[f64], n_without_rule: usize) {
    let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len().max(1) as f64).exp();
    let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let most = ratios.iter().copied().fold(0.0, f64::max);
    println!("| {name} | {} | {mean:.3} | {least:.3} | {most:.3} | {n_without_rule} |", ratios.len());
}
