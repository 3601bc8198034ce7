//! The one set of constants for everybody: which are fitted, to what, how it holds on sources that were left out, and
//! what the error becomes without each.

use std::collections::BTreeSet;

use cost_model::{Constants, PARAMETERS, Parameter};
use rayon::prelude::*;

use crate::case::Case;
use crate::express::DETERMINISTIC;
use crate::fit::{Fit, Problem, Slopes, equal_per_source, fit, fit_nearby, huber, slopes};
use crate::report::in_headline;
use crate::score::{Errors, Pair};

/// The fit to all rows.
pub struct Global {
    /// Constants that the rows can move.
    pub problem_parameters: Vec<Parameter>,
    /// Their values.
    pub fit: Fit,
}

impl Global {
    /// The same constants, or some of them, to be fitted to other rows.
    fn problem<'a>(&self, cases: &[&'a Case], constants: &[usize]) -> Problem<'a> {
        posed(cases, constants.iter().map(|&at| self.problem_parameters[at]).collect())
    }

    fn slopes(&self, cases: &[&Case]) -> Slopes {
        let all: Vec<usize> = (0..self.problem_parameters.len()).collect();
        slopes(&self.problem(cases, &all), &self.fit.constants)
    }
}

/// Fits the constants that some row depends on, with equal weight per source.
pub fn global(cases: &[&Case], start: &Constants) -> Global {
    let problem = problem(cases, start);
    let fit = fit(&problem, start);
    Global { problem_parameters: problem.parameters, fit }
}

fn problem<'a>(cases: &[&'a Case], start: &Constants) -> Problem<'a> {
    posed(cases, movable(cases, start))
}

/// What a constant is known to be beforehand counts as little as one source that is off by so much, about the error of
/// all: rows decide, and where no row does (a source was left out) a constant stays where it may be expected.
const SOURCE_OFF: f64 = 0.035;

/// Rows of equal weight per source, and constants with what is known of them.
pub(crate) fn posed<'a>(cases: &[&'a Case], parameters: Vec<Parameter>) -> Problem<'a> {
    let known = |parameter: &Parameter| {
        let (value, width) = parameter.known.unwrap_or((parameter.least, f64::INFINITY));
        (value, width / (2.0 * huber(SOURCE_OFF)).sqrt())
    };
    let priors = parameters.iter().map(known).collect();
    Problem { rows: equal_per_source(cases.iter().copied()), parameters, priors }
}

/// Constants without which some prediction would be another.
fn movable(cases: &[&Case], start: &Constants) -> Vec<Parameter> {
    let before: Vec<f64> = cases.iter().map(|case| case.predicted(start)).collect();
    let moves = |parameter: &&Parameter| {
        let mut moved = start.clone();
        let _ = moved.set(parameter.name, (parameter.least + parameter.most) / 2.0 * 1.01);
        cases.iter().zip(&before).any(|(case, before)| case.predicted(&moved) != *before)
    };
    PARAMETERS.iter().filter(|parameter| parameter.known.is_some()).filter(moves).copied().collect()
}

/// A source predicted by constants that its own rows did and did not help to fit.
#[derive(Clone, Debug, PartialEq)]
pub struct LeftOut {
    /// The source.
    pub source: String,
    /// Whether it counts: everything is stated, and it is not the bulk sweep.
    pub in_headline: bool,
    /// Whether other sources have its devices and number format.
    pub covered: bool,
    /// Errors with its rows in the fit.
    pub with: Errors,
    /// Errors with constants refitted to all others, from the joint fit on.
    pub without: Errors,
}

/// Every source with and without its own rows in the fit.
pub fn left_out(cases: &[&Case], found: &Global) -> Vec<LeftOut> {
    let sources: BTreeSet<&str> = cases.iter().map(|case| case.row.source.as_str()).collect();
    let covered = covered(cases);
    let fitted = &found.fit.constants;
    let slopes = found.slopes(cases);
    let all: Vec<usize> = (0..found.problem_parameters.len()).collect();
    let one = |source: &str| {
        let rows: Vec<usize> = (0..cases.len()).filter(|&at| cases[at].row.source != source).collect();
        let others: Vec<&Case> = rows.iter().map(|&at| cases[at]).collect();
        let problem = found.problem(&others, &all);
        let constants = fit_nearby(&problem, fitted, &slopes.part(&rows, &all));
        LeftOut {
            source: source.to_owned(),
            in_headline: judged(cases, source).iter().all(|case| in_headline(&case.row)),
            covered: covered.contains(source),
            with: errors_of(cases, source, fitted),
            without: errors_of(cases, source, &constants),
        }
    };
    sources.into_iter().map(one).collect()
}

/// The rows by which a source is judged: those of which everything is stated, where it has some.
fn judged<'a>(cases: &[&'a Case], source: &str) -> Vec<&'a Case> {
    let own: Vec<&Case> = cases.iter().filter(|case| case.row.source == source).copied().collect();
    let whole: Vec<&Case> = own.iter().filter(|case| in_headline(&case.row)).copied().collect();
    if whole.is_empty() { own } else { whole }
}

fn errors_of(cases: &[&Case], source: &str, constants: &Constants) -> Errors {
    let pair = |case: &&Case| Pair { measured: case.measured, predicted: case.predicted(constants) };
    Errors::of(&judged(cases, source).par_iter().map(pair).collect::<Vec<_>>())
}

/// Equal-weight mean error without each effect, the rates of products refitted.
pub fn ablated(cases: &[&Case], found: &Global) -> Vec<(&'static str, f64)> {
    let counted = cases.iter().filter(|case| in_headline(&case.row));
    let sources: BTreeSet<&str> = counted.map(|case| case.row.source.as_str()).collect();
    let mean = |constants: &Constants| {
        let all: f64 = sources.iter().map(|source| errors_of(cases, source, constants).mean).sum();
        all / sources.len() as f64
    };
    let parameters = &found.problem_parameters;
    let is_rate = |at: &usize| parameters[*at].name.starts_with("gemm_efficiency");
    let rates: Vec<usize> = (0..parameters.len()).filter(is_rate).collect();
    let rows: Vec<usize> = (0..cases.len()).collect();
    let slopes = found.slopes(cases).part(&rows, &rates);
    let problem = found.problem(cases, &rates);
    let without = |parameter: &Parameter| {
        let mut constants = found.fit.constants.clone();
        constants.set(parameter.name, parameter.without?)?;
        Some((parameter.name, mean(&fit_nearby(&problem, &constants, &slopes))))
    };
    PARAMETERS.iter().filter(|parameter| parameter.known.is_some()).filter_map(without).collect()
}

/// Sources whose devices and formats other sources have too; runs in deterministic mode say little of other kernels.
pub fn covered(cases: &[&Case]) -> BTreeSet<String> {
    let worlds =
        |source: &str| -> BTreeSet<String> { judged(cases, source).into_iter().map(world).collect() };
    let said = |source: &str| -> BTreeSet<String> {
        let own = judged(cases, source).into_iter().filter(|case| case.row.stack != DETERMINISTIC);
        own.map(world).collect()
    };
    let sources: BTreeSet<&str> = cases.iter().map(|case| case.row.source.as_str()).collect();
    let is_covered = |source: &&&str| {
        let others: BTreeSet<String> =
            sources.iter().filter(|other| *other != *source).flat_map(|other| said(other)).collect();
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
