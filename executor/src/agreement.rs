//! Whether two trainings from one start agree: the loss of every step, and where the parameters end.
//!
//! Rounding in one step is carried into the next, and a tiny model may make a tenfold of it in every step: then no two
//! orders of addition agree for long, on however many devices. How far rounding carries is therefore measured, by a
//! third training: the one that judges, with every parameter of its start moved by one rounding (`States::shaken`).
//!
//! ```text
//! |found - expected| <= allowed(step)
//! allowed(step) = max(tolerance, margin * the largest |shaken - expected| / |expected| so far) * |expected|
//! ```
//! Steps are judged as long as that is no more than `LIMIT`, or twice the tolerance, of the loss; beyond, rounding
//! decides. The final parameters are judged likewise, by their distance in the Euclidean norm, where all steps are.

use crate::compare::Precision;
use crate::run::{Outcome, ParameterName};
use crate::states::States;

/// Every sum of every operator and step rounds, the start is moved once. Found sufficient for the most ill-conditioned
/// of the shipped models, latent attention over a few elements, which takes half of it.
const MARGIN: f64 = 64.0;

/// The same in bf16, where the start is moved by what every operator rounds, and more margin would judge nothing.
const COARSE_MARGIN: f64 = 4.0;

/// Share of the loss above which a difference that rounding may make says nothing.
const LIMIT: f64 = 0.05;

/// The loss of a step in two trainings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossPair {
    /// In the training that is judged.
    pub found: f64,
    /// In the one that judges.
    pub expected: f64,
    /// How far they may be apart.
    pub allowed: f64,
}

impl LossPair {
    /// Whether they are near enough; what is not a number is near nothing.
    pub fn holds(&self) -> bool {
        (self.found - self.expected).abs() <= self.allowed
    }
}

/// Where the parameters of two trainings end.
#[derive(Clone, Debug, PartialEq)]
pub struct Ends {
    /// Distance of all parameters together, over their norm.
    pub distance: f64,
    /// How far they may be apart.
    pub allowed: f64,
    /// The parameter that is farthest from where it should be, with the distance over its norm.
    pub farthest: Option<(ParameterName, f64)>,
}

impl Ends {
    /// Whether they are near enough.
    pub fn holds(&self) -> bool {
        self.distance <= self.allowed
    }
}

/// The outcome of the comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Agreement {
    /// Relative tolerance of the first step.
    pub tolerance: f64,
    /// Every step.
    pub losses: Vec<LossPair>,
    /// Steps that are judged; what comes after depends on rounding alone.
    pub n_judged: usize,
    /// Where the parameters end, if all steps are judged.
    pub ends: Option<Ends>,
}

impl Agreement {
    /// Whether the trainings agree as far as that can be judged.
    pub fn holds(&self) -> bool {
        self.first_failure().is_none() && self.ends.as_ref().is_none_or(Ends::holds)
    }

    /// The first step that is judged and differs.
    pub fn first_failure(&self) -> Option<(usize, LossPair)> {
        let judged = self.losses.iter().copied().enumerate().take(self.n_judged);
        judged.into_iter().find(|(_, pair)| !pair.holds())
    }
}

/// Compares a training with the one that judges it; `shaken` is the latter from a start moved by one rounding.
pub fn agreement(expected: &Outcome, shaken: &Outcome, found: &Outcome, precision: Precision) -> Agreement {
    let tolerance = tolerance(expected, precision);
    let limit = LIMIT.max(2.0 * tolerance);
    let margin = match precision {
        Precision::F64 | Precision::F32 => MARGIN,
        Precision::Bf16 => COARSE_MARGIN,
    };
    let mut losses = Vec::new();
    let mut carried: f64 = 0.0;
    let mut n_judged = 0;
    for ((&b, &moved), &a) in expected.losses.iter().zip(&shaken.losses).zip(&found.losses) {
        carried = carried.max((moved - b).abs() / b.abs());
        let relative = tolerance.max(margin * carried);
        if relative <= limit && n_judged == losses.len() {
            n_judged += 1;
        }
        losses.push(LossPair { found: a, expected: b, allowed: relative * b.abs() });
    }
    // A run that says less than the other has failed at the first step that it lacks.
    for &b in expected.losses.iter().skip(losses.len()) {
        losses.push(LossPair { found: f64::NAN, expected: b, allowed: 0.0 });
        n_judged = losses.len();
    }
    let all = n_judged == losses.len();
    let ends = [expected, shaken, found].map(|one| one.states.as_ref());
    let ends = match ends {
        [Some(expected), Some(shaken), Some(found)] if all => Some(Ends {
            distance: distance(expected, found),
            allowed: tolerance.max(margin * distance(expected, shaken)),
            farthest: farthest(expected, found),
        }),
        _ => None,
    };
    let ends = ends.filter(|ends| ends.allowed <= limit);
    Agreement { tolerance, losses, n_judged, ends }
}

/// As in `compare`: in bf16 a loss has been rounded by every operator before it.
fn tolerance(expected: &Outcome, precision: Precision) -> f64 {
    match precision {
        Precision::F64 | Precision::F32 => precision.tolerance(),
        Precision::Bf16 => {
            precision.tolerance() * (expected.n_ops.iter().sum::<usize>().max(1) as f64).sqrt()
        }
    }
}

/// Squares of a parameter's distance and norm; a parameter that is missing, or has another shape, is infinitely far.
fn squares(expected: &States, found: &States, name: &ParameterName) -> (f64, f64) {
    let (Some(b), Some(a)) = (expected.parameters.get(name), found.parameters.get(name)) else {
        return (f64::INFINITY, 1.0);
    };
    if a.shape() != b.shape() {
        return (f64::INFINITY, 1.0);
    }
    let apart: f64 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    (if apart.is_nan() { f64::INFINITY } else { apart }, b.iter().map(|b| b * b).sum())
}

fn names<'a>(expected: &'a States, found: &'a States) -> impl Iterator<Item = &'a ParameterName> {
    let extra = found.parameters.keys().filter(|name| !expected.parameters.contains_key(*name));
    expected.parameters.keys().chain(extra)
}

/// Distance of all parameters over their norm.
fn distance(expected: &States, found: &States) -> f64 {
    let (mut apart, mut norm) = (0.0, 0.0);
    for name in names(expected, found) {
        let (one, other) = squares(expected, found, name);
        apart += one;
        norm += other;
    }
    if apart == 0.0 { 0.0 } else { (apart / norm).sqrt() }
}

fn farthest(expected: &States, found: &States) -> Option<(ParameterName, f64)> {
    let of = |name: &ParameterName| {
        let (apart, norm) = squares(expected, found, name);
        (name.clone(), if apart == 0.0 { 0.0 } else { (apart / norm).sqrt() })
    };
    names(expected, found).map(of).max_by(|a, b| a.1.total_cmp(&b.1))
}

#[cfg(test)]
mod tests {
    use ndarray::{ArrayD, IxDyn};

    use super::*;

    /// One parameter of one element.
    fn outcome(losses: &[f64], parameter: f64) -> Outcome {
        let value = ArrayD::from_elem(IxDyn(&[1]), parameter);
        let parameters = [((0, "w".to_owned()), value)].into();
        let states = Some(States { parameters, ..States::default() });
        Outcome { losses: losses.to_vec(), states, ..Outcome::default() }
    }

    fn judged(shaken: &[f64], found: &[f64], end: f64) -> Agreement {
        let (expected, shaken) = (outcome(&[4.0, 2.0, 1.0], 1.0), outcome(shaken, 1.0));
        agreement(&expected, &shaken, &outcome(found, end), Precision::F64)
    }

    #[test]
    fn equal_trainings_agree_and_others_do_not() {
        let same = [4.0, 2.0, 1.0];
        assert!(judged(&same, &same, 1.0).holds());
        assert!(judged(&same, &[4.0, 2.0 + 1.9e-9, 1.0], 1.0).holds());
        let apart = judged(&same, &[4.0, 2.0 + 2.1e-9, 1.0], 1.0);
        assert_eq!(apart.first_failure().map(|(step, _)| step), Some(1));
        assert!(!judged(&same, &[4.0, f64::NAN, 1.0], 1.0).holds());
        assert!(!judged(&same, &[4.0, 2.0], 1.0).holds());
        assert!(!judged(&same, &same, 1.0 + 1e-8).holds());
        assert!(!judged(&same, &same, f64::NAN).holds());
    }

    #[test]
    fn what_rounding_makes_is_allowed_from_then_on() {
        let found = judged(&[4.0, 2.0 + 2e-6, 1.0], &[4.0, 2.0 + 1e-4, 1.0 + 5e-5], 1.0);
        assert!(found.holds() && found.n_judged == 3);
        assert!(!judged(&[4.0, 2.0 + 2e-6, 1.0], &[4.0 + 1e-6, 2.0, 1.0], 1.0).holds());
        assert!(!judged(&[4.0, 2.0 + 2e-6, 1.0], &[4.0, 2.0, 1.0 + 7e-5], 1.0).holds());
    }

    #[test]
    fn steps_that_rounding_decides_are_not_judged() {
        let found = judged(&[4.0, 2.03, 1.0], &[4.0, 3.0, 3.0], 7.0);
        assert!(found.holds());
        assert_eq!((found.n_judged, found.ends), (1, None));
    }
}
