//! Constants fitted to measured steps: the same for all rows, each source with the same weight.
//!
//! ```text
//! minimise   sum over sources of (mean over its rows of huber(ln(predicted / measured)))
//!            + sum over constants of ((value - prior) / width)^2 / 2, where a prior is given     -> objective()
//! ```
//! By damped Gauss-Newton steps (Levenberg 1944, Marquardt 1963) on derivatives by differences; constants stay between
//! their bounds. Huber's loss (1964) counts errors beyond `KNEE` linearly, as they are judged: a few broken rows do not
//! decide, nor do the rows of one source that are far off.

use std::collections::BTreeMap;

use cost_model::{Constants, PARAMETERS, Parameter};
use ir::cluster::Architecture;
use rayon::prelude::*;

use crate::case::Case;

/// Error from which a row counts linearly: what rounding to two or three digits does to published times.
const KNEE: f64 = 0.005;

/// Gauss-Newton rounds that lead from a start to a fit.
const ROUNDS: usize = 25;

/// Steps that lead from one fit to the next where few rows or one effect change.
const STEPS_NEARBY: usize = 8;

/// Relative gain below which the search ends.
const ENOUGH: f64 = 1e-4;

/// The same where the question is only how well it holds elsewhere.
const ENOUGH_NEARBY: f64 = 2e-3;

/// Difference for derivatives, as a part of the range of a constant.
const DIFFERENCE: f64 = 2e-3;

/// What is fitted to what.
pub struct Problem<'a> {
    /// Measured runs, each with its weight.
    pub rows: Vec<(&'a Case, f64)>,
    /// Constants that move.
    pub parameters: Vec<Parameter>,
    /// Per constant, the value it is held to and how far it may stray; empty without.
    pub priors: Vec<(f64, f64)>,
}

/// A fit.
#[derive(Clone, Debug)]
pub struct Fit {
    /// The constants.
    pub constants: Constants,
    /// What is left of the objective.
    pub objective: f64,
    /// Per constant, the standard deviation that the scatter of the rows leaves it; infinite where they do not say.
    pub deviations: Vec<f64>,
}

/// Weight of a source of which something is not stated: it decides where nothing else does.
const IN_PART_STATED: f64 = 0.15;

/// Rows with the same total weight per source, those of which something is not stated apart and with less.
pub fn equal_per_source<'a>(cases: impl Iterator<Item = &'a Case> + Clone) -> Vec<(&'a Case, f64)> {
    let mut counts: BTreeMap<(&str, bool), f64> = BTreeMap::new();
    let key = |case: &'a Case| (case.row.source.as_str(), case.row.complete == 2);
    for case in cases.clone() {
        *counts.entry(key(case)).or_default() += 1.0;
    }
    let weight = |case: &'a Case| {
        let of_source = if case.row.complete == 2 { 1.0 } else { IN_PART_STATED };
        of_source / counts[&key(case)]
    };
    cases.map(|case| (case, weight(case))).collect()
}

/// A constant that may be moved, by name.
pub fn parameter(name: &str) -> Option<Parameter> {
    PARAMETERS.iter().copied().find(|parameter| parameter.name == name)
}

/// Derivatives of every row along every constant, in ranges of the constants.
pub struct Slopes(Vec<Vec<f64>>);

impl Slopes {
    /// Those of the rows and the constants at the given places.
    pub fn part(&self, rows: &[usize], constants: &[usize]) -> Self {
        let part = |column: &Vec<f64>| rows.iter().map(|&row| column[row]).collect();
        Self(constants.iter().map(|&constant| part(&self.0[constant])).collect())
    }
}

/// Derivatives at some constants.
pub fn slopes(problem: &Problem<'_>, at: &Constants) -> Slopes {
    Slopes(problem.columns(at, &problem.residuals(at)))
}

/// The constants of a problem that is near a solved one: steps along derivatives that were taken there.
///
/// Such steps (the chord method) end at the same place as fresh derivatives, later; each costs one price per row.
pub fn fit_nearby(problem: &Problem<'_>, start: &Constants, slopes: &Slopes) -> Constants {
    let mut constants = start.clone();
    let mut residuals = problem.residuals(&constants);
    let mut objective = problem.objective(&constants, &residuals);
    let mut damping = 1e-3;
    for _ in 0..STEPS_NEARBY {
        let weights = problem.weights(&residuals);
        let normal = problem.normal(&constants, (&residuals, &slopes.0), &weights);
        let moved = problem.moved(&constants, &normal.step(damping));
        let next = problem.residuals(&moved);
        let better = problem.objective(&moved, &next);
        if better < objective {
            let gain = (objective - better) / objective;
            (constants, residuals, objective) = (moved, next, better);
            if gain < ENOUGH_NEARBY {
                break;
            }
        } else {
            damping = damping.max(0.01) * 8.0;
        }
    }
    constants
}

/// Fits from a start.
pub fn fit(problem: &Problem<'_>, start: &Constants) -> Fit {
    let mut constants = start.clone();
    let mut residuals = problem.residuals(&constants);
    let mut objective = problem.objective(&constants, &residuals);
    let mut damping = 1e-3;
    let mut normal = problem.normal_at(&constants, &residuals);
    for _ in 0..ROUNDS {
        let moved = problem.moved(&constants, &normal.step(damping));
        let next = problem.residuals(&moved);
        let better = problem.objective(&moved, &next);
        if better < objective {
            let gain = (objective - better) / objective;
            (constants, residuals, objective) = (moved, next, better);
            damping = (damping * 0.2).max(1e-6);
            normal = problem.normal_at(&constants, &residuals);
            if gain < ENOUGH {
                break;
            }
        } else {
            damping *= 8.0;
            if damping > 1e6 {
                break;
            }
        }
    }
    let deviations = problem.deviations(&normal, &residuals);
    Fit { constants, objective, deviations }
}

/// What there is to say of constants that were found.
pub fn found(problem: &Problem<'_>, constants: Constants, slopes: &Slopes) -> Fit {
    let residuals = problem.residuals(&constants);
    let weights = problem.weights(&residuals);
    let normal = problem.normal(&constants, (&residuals, &slopes.0), &weights);
    let deviations = problem.deviations(&normal, &residuals);
    Fit { objective: problem.objective(&constants, &residuals), deviations, constants }
}

/// Whether a constant can matter to a row: those of a family of devices do not to another.
pub(crate) fn touches(name: &str, case: &Case) -> bool {
    let Some(named) = family(name) else { return true };
    let first = case.plan.cluster.groups.first();
    first.is_some_and(|group| family_name(group.device.architecture) == named)
}

/// A family as names of constants have it.
pub(crate) fn family_name(architecture: Architecture) -> String {
    format!("{architecture:?}").to_lowercase()
}

/// The family of devices whose constant it is, of one that a family has: `table.family`, `table.family.precision`.
pub(crate) fn family(name: &str) -> Option<&str> {
    match name.split_once('.') {
        Some((_, rest)) => rest.split('.').next(),
        None => name.contains("_hopper_").then_some("hopper"),
    }
}

fn huber_weight(residual: f64) -> f64 {
    if residual.abs() <= KNEE { 1.0 } else { KNEE / residual.abs() }
}

/// What an error counts in the objective, before its weight.
pub fn huber(residual: f64) -> f64 {
    if residual.abs() <= KNEE { residual * residual / 2.0 } else { KNEE * (residual.abs() - KNEE / 2.0) }
}

impl Problem<'_> {
    fn residuals(&self, constants: &Constants) -> Vec<f64> {
        self.rows.par_iter().map(|(case, _)| (case.predicted(constants) / case.measured).ln()).collect()
    }

    fn objective(&self, constants: &Constants, residuals: &[f64]) -> f64 {
        let rows: f64 = self.rows.iter().zip(residuals).map(|((_, weight), r)| weight * huber(*r)).sum();
        let held = self.parameters.iter().zip(&self.priors).map(|(parameter, (prior, width))| {
            let away = (constants.get(parameter.name).unwrap_or(*prior) - prior) / width;
            away * away / 2.0
        });
        rows + held.sum::<f64>()
    }

    fn values(&self, constants: &Constants) -> Vec<f64> {
        self.parameters.iter().filter_map(|parameter| constants.get(parameter.name)).collect()
    }

    /// Derivatives of the rows along each constant, in ranges of the constants.
    fn columns(&self, constants: &Constants, residuals: &[f64]) -> Vec<Vec<f64>> {
        let column = |(parameter, value): (&Parameter, f64)| {
            let range = parameter.most - parameter.least;
            // Away from the nearer bound.
            let middle = (parameter.most + parameter.least) / 2.0;
            let sign = if value > middle { -1.0 } else { 1.0 };
            let mut moved = constants.clone();
            let _ = moved.set(parameter.name, value + sign * DIFFERENCE * range);
            let slope = |((case, _), here): (&(&Case, f64), &f64)| {
                if !touches(parameter.name, case) {
                    return 0.0;
                }
                ((case.predicted(&moved) / case.measured).ln() - here) / (sign * DIFFERENCE)
            };
            self.rows.par_iter().zip(residuals).map(slope).collect()
        };
        self.parameters.iter().zip(self.values(constants)).map(column).collect()
    }

    fn weights(&self, residuals: &[f64]) -> Vec<f64> {
        self.rows.iter().zip(residuals).map(|((_, weight), r)| weight * huber_weight(*r)).collect()
    }

    fn normal_at(&self, constants: &Constants, residuals: &[f64]) -> Normal {
        let columns = self.columns(constants, residuals);
        self.normal(constants, (residuals, &columns), &self.weights(residuals))
    }

    /// The normal equations.
    fn normal(
        &self,
        constants: &Constants,
        (residuals, columns): (&[f64], &[Vec<f64>]),
        weights: &[f64],
    ) -> Normal {
        let n = self.parameters.len();
        let values = self.values(constants);
        let dot = |a: &[f64], b: &[f64]| -> f64 {
            a.iter().zip(b).zip(weights).map(|((a, b), weight)| a * b * weight).sum()
        };
        let mut matrix = vec![vec![0.0; n]; n];
        let mut gradient = vec![0.0; n];
        for i in 0..n {
            gradient[i] = dot(&columns[i], residuals);
            for j in 0..n {
                matrix[i][j] = dot(&columns[i], &columns[j]);
            }
            if let Some((prior, width)) = self.priors.get(i) {
                let range = self.parameters[i].most - self.parameters[i].least;
                matrix[i][i] += (range / width).powi(2);
                gradient[i] += (values[i] - prior) / width * (range / width);
            }
        }
        let at_bound = |i: usize| {
            let parameter = &self.parameters[i];
            (values[i] <= parameter.least && gradient[i] > 0.0)
                || (values[i] >= parameter.most && gradient[i] < 0.0)
        };
        let free = (0..n).map(|i| !at_bound(i)).collect();
        Normal { matrix, gradient, free }
    }

    fn moved(&self, constants: &Constants, step: &[f64]) -> Constants {
        let mut moved = constants.clone();
        for ((parameter, value), step) in self.parameters.iter().zip(self.values(constants)).zip(step) {
            let to = value + step * (parameter.most - parameter.least);
            let _ = moved.set(parameter.name, to.clamp(parameter.least, parameter.most));
        }
        moved
    }

    /// Square roots of the diagonal of the inverse, times the scatter that is left.
    fn deviations(&self, normal: &Normal, residuals: &[f64]) -> Vec<f64> {
        let n = self.parameters.len();
        let total: f64 = self.rows.iter().map(|(_, weight)| weight).sum();
        let left: f64 =
            self.rows.iter().zip(residuals).map(|((_, w), r)| w * huber_weight(*r) * r * r).sum::<f64>()
                / total;
        // Weights add up to the number of sources; rows are what is independent.
        let per_row = self.rows.len() as f64 / total;
        (0..n)
            .map(|i| {
                let mut unit = vec![0.0; n];
                unit[i] = 1.0;
                let range = self.parameters[i].most - self.parameters[i].least;
                let variance = solve(&normal.matrix, &unit, 1e-9).map_or(f64::INFINITY, |column| column[i]);
                (left * variance / per_row).max(0.0).sqrt() * range
            })
            .collect()
    }
}

/// Normal equations.
struct Normal {
    matrix: Vec<Vec<f64>>,
    gradient: Vec<f64>,
    /// Constants that do not press against a bound.
    free: Vec<bool>,
}

impl Normal {
    fn step(&self, damping: f64) -> Vec<f64> {
        let free: Vec<usize> = (0..self.free.len()).filter(|&i| self.free[i]).collect();
        let matrix: Vec<Vec<f64>> =
            free.iter().map(|&i| free.iter().map(|&j| self.matrix[i][j]).collect()).collect();
        let gradient: Vec<f64> = free.iter().map(|&i| -self.gradient[i]).collect();
        let mut step = vec![0.0; self.free.len()];
        if let Some(found) = solve(&matrix, &gradient, damping) {
            for (&i, value) in free.iter().zip(found) {
                step[i] = value;
            }
        }
        step
    }
}

/// `(matrix + damping (diagonal + small)) x = right`, by elimination with pivots.
fn solve(matrix: &[Vec<f64>], right: &[f64], damping: f64) -> Option<Vec<f64>> {
    let n = right.len();
    let mut rows: Vec<Vec<f64>> = (0..n)
        .map(|i| {
            let mut row = matrix[i].clone();
            row[i] += damping * (row[i] + 1e-6);
            row.push(right[i]);
            row
        })
        .collect();
    for i in 0..n {
        let pivot = (i..n).max_by(|&a, &b| rows[a][i].abs().total_cmp(&rows[b][i].abs()))?;
        rows.swap(i, pivot);
        if rows[i][i].abs() < 1e-300 {
            return None;
        }
        let lead = rows[i].clone();
        for row in rows.iter_mut().skip(i + 1) {
            let factor = row[i] / lead[i];
            row.iter_mut().zip(&lead).for_each(|(value, above)| *value -= factor * above);
        }
    }
    let mut found = vec![0.0; n];
    for i in (0..n).rev() {
        let known: f64 = (i + 1..n).map(|j| rows[i][j] * found[j]).sum();
        found[i] = (rows[i][n] - known) / rows[i][i];
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_system_is_solved() {
        let matrix = vec![vec![0.0, 2.0], vec![4.0, 1.0]];
        let found = solve(&matrix, &[2.0, 9.0], 0.0).unwrap();
        assert!((found[0] - 2.0).abs() < 1e-12 && (found[1] - 1.0).abs() < 1e-12, "{found:?}");
        assert_eq!(solve(&[vec![0.0]], &[1.0], 0.0), None);
    }

    #[test]
    fn large_errors_count_linearly() {
        assert!((huber(0.002) - 2e-6).abs() < 1e-15);
        assert!((huber(2.0 * KNEE) - huber(KNEE) - KNEE * KNEE).abs() < 1e-12);
    }
}
