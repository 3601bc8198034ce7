//! The one set of constants for everybody: which are fitted, to what, how it holds on sources that were left out, and
//! what the error becomes without each.

use std::collections::BTreeSet;

use cost_model::{Constants, PARAMETERS, Parameter};

use crate::case::Case;
use crate::fit::{Fit, Problem, equal_per_source, fit};
use crate::score::{Errors, Pair};

/// The fit to all rows.
pub struct Global {
    /// Constants that the rows can move.
    pub problem_parameters: Vec<Parameter>,
    /// Their values.
    pub fit: Fit,
}

/// Fits the constants that some row depends on, with equal weight per source.
pub fn global(cases: &[&Case], start: &Constants) -> Global {
    let rows = equal_per_source(cases.iter().copied());
    let problem = Problem { rows, parameters: movable(cases, start), priors: Vec::new() };
    let fit = fit(&problem, start);
    Global { problem_parameters: problem.parameters, fit }
}

/// Constants without which some prediction would be another.
fn movable(cases: &[&Case], start: &Constants) -> Vec<Parameter> {
    let before: Vec<f64> = cases.iter().map(|case| case.predicted(start)).collect();
    let moves = |parameter: &&Parameter| {
        let mut moved = start.clone();
        let _ = moved.set(parameter.name, (parameter.least + parameter.most) / 2.0 * 1.01);
        cases.iter().zip(&before).any(|(case, before)| case.predicted(&moved) != *before)
    };
    PARAMETERS.iter().filter(moves).copied().collect()
}

/// Errors of one source with constants fitted to all others.
pub fn left_out(cases: &[&Case], source: &str, fitted: &Constants) -> Errors {
    let (own, others): (Vec<&Case>, Vec<&Case>) = cases.iter().partition(|case| case.row.source == source);
    let constants = global(&others, fitted).fit.constants;
    let pair = |case: &&Case| Pair { measured: case.measured, predicted: case.predicted(&constants) };
    Errors::of(&own.iter().map(pair).collect::<Vec<_>>())
}

/// Sources whose devices and formats other sources have too.
pub fn covered(cases: &[&Case]) -> BTreeSet<String> {
    let worlds = |source: &str| -> BTreeSet<String> {
        let own = cases.iter().filter(|case| case.row.source == source);
        own.map(|case| world(case)).collect()
    };
    let sources: BTreeSet<&str> = cases.iter().map(|case| case.row.source.as_str()).collect();
    let is_covered = |source: &&&str| {
        let others: BTreeSet<String> =
            sources.iter().filter(|other| *other != *source).flat_map(|other| worlds(other)).collect();
        worlds(source).is_subset(&others)
    };
    sources.iter().filter(is_covered).map(|source| (*source).to_owned()).collect()
}

/// Family of the device and width of the format: what an efficiency is fitted for.
fn world(case: &Case) -> String {
    let family = case.plan.cluster.groups.first().map(|group| group.device.architecture);
    let width = if case.row.precision.contains("fp8") { 8 } else { 16 };
    format!("{family:?} {width}")
}
