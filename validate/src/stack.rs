//! What a few runs say of one cluster and its software: first how fast all of it is, then its constants.
//!
//! ```text
//! pace      = the s that is most likely: a run's ln(measured / predicted) is t(s, RUN, 4), s itself Cauchy(0, STACK)   -> pace()
//! constants = rates over e^pace, times by it, moved as far as the runs ask and STRAY lets them                     -> calibrated()
//! ```
//! A run may be far off by itself, and a stack may be far off as a whole: software generations differ by 10 to 25 %.
//! Both distributions have long tails, so runs that agree are believed, and one that stands alone among others is not.

use cost_model::{Constants, PARAMETERS, Parameter};

use crate::case::Case;
use crate::fit::{family, fit_nearby, found, slopes, touches};
use crate::global::{Global, posed};

/// Scale of what a run is off by for reasons that no constant has: half of the published ones are within three quarters
/// of it (`docs/validation.md`).
const RUN: f64 = 0.04;

/// Degrees of freedom of Student's t of runs: one in ten is twice as far off.
const RUN_TAIL: f64 = 4.0;

/// Half of the sources are as near as this on average: the median of their bias in `docs/validation.md`.
const STACK: f64 = 0.02;

/// A constant strays by so much of itself from what is shipped.
const STRAY: f64 = 0.08;

/// The same of times of the host: processors and frameworks differ by more than devices do (`docs/measured.md` has one
/// that launches in half the time).
const HOST_STRAY: f64 = 0.5;

/// The constants of one cluster and its software, from a few runs on it: as near to the given ones as the runs allow.
pub fn calibrated(cases: &[&Case], start: &Constants) -> Global {
    let ratio = |case: &&Case| (case.measured / case.predicted(start)).ln();
    let start = paced(start, cases, pace(&cases.iter().map(ratio).collect::<Vec<_>>()));
    let is_moved = |one: &&Parameter| {
        let is_own = family(one.name).is_some() && cases.iter().any(|case| touches(one.name, case));
        one.known.is_some() || is_own
    };
    let mut problem = posed(cases, PARAMETERS.iter().filter(is_moved).copied().collect());
    for (_, weight) in &mut problem.rows {
        *weight = 1.0 / (RUN * RUN);
    }
    let prior = |parameter: &Parameter| {
        let value = start.get(parameter.name).unwrap_or(parameter.least);
        let range = parameter.most - parameter.least;
        match kind(parameter.name) {
            Kind::Time => (value, HOST_STRAY * value),
            Kind::Rate | Kind::Other => (value, STRAY * value.max(range / 10.0)),
        }
    };
    problem.priors = problem.parameters.iter().map(prior).collect();
    let slopes = slopes(&problem, &start);
    let constants = fit_nearby(&problem, &start, &slopes);
    Global { fit: found(&problem, constants, &slopes), problem_parameters: problem.parameters }
}

/// The logarithm by which all times are most likely longer than predicted, given those of some runs.
fn pace(runs: &[f64]) -> f64 {
    const STEP: f64 = 1e-3;
    const STEPS: i32 = 700;
    let unlikely = |at: f64| -> f64 {
        let tail = |away: f64, width: f64, freedom: f64| {
            (freedom + 1.0) / 2.0 * (away * away / (freedom * width * width)).ln_1p()
        };
        runs.iter().map(|run| tail(run - at, RUN, RUN_TAIL)).sum::<f64>() + tail(at, STACK, 1.0)
    };
    // There may be several peaks: near no change, and near the runs.
    let all = (-STEPS..=STEPS).map(|step| f64::from(step) * STEP);
    all.min_by(|a, b| unlikely(*a).total_cmp(&unlikely(*b))).unwrap_or(0.0)
}

/// The same world where all that these runs tell of takes `e^pace` as long, as far as constants may be moved.
fn paced(constants: &Constants, cases: &[&Case], pace: f64) -> Constants {
    let mut paced = constants.clone();
    let told = |one: &&Parameter| cases.is_empty() || cases.iter().any(|case| touches(one.name, case));
    for parameter in PARAMETERS.iter().filter(told) {
        let factor = match kind(parameter.name) {
            Kind::Rate => (-pace).exp(),
            Kind::Time => pace.exp(),
            Kind::Other => continue,
        };
        if let Some(value) = constants.get(parameter.name) {
            let _ = paced.set(parameter.name, (value * factor).clamp(parameter.least, parameter.most));
        }
    }
    paced
}

/// What a constant is, of all that may be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Twice as much takes half as long.
    Rate,
    /// Twice as much takes twice as long.
    Time,
    /// A part of something, or bytes.
    Other,
}

fn kind(name: &str) -> Kind {
    if name.contains("efficiency") || name == "host_update_parameters_per_s" {
        Kind::Rate
    } else if name.ends_with("_s") {
        Kind::Time
    } else {
        Kind::Other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_agree_are_believed_and_one_alone_among_others_is_not() {
        let near = |found: f64, at: f64| assert!((found - at).abs() < 0.015, "{found} for {at}");
        near(pace(&[0.2, 0.2, 0.2]), 0.2);
        near(pace(&[0.19, 0.2, 0.22]), 0.2);
        near(pace(&[-0.1, -0.1, -0.1]), -0.09);
        near(pace(&[0.0, 0.01, 0.3]), 0.0);
        near(pace(&[0.03]), 0.005);
        near(pace(&[]), 0.0);
    }

    #[test]
    fn rates_and_times_are_told_apart() {
        let of = |wanted: Kind| PARAMETERS.iter().filter(|one| kind(one.name) == wanted).count();
        assert_eq!((of(Kind::Rate), of(Kind::Time), of(Kind::Other)), (35, 2, PARAMETERS.len() - 37));
        let shipped = Constants::load();
        let slow = paced(&shipped, &[], 0.1);
        let grown = |name: &str| slow.get(name).unwrap_or(0.0) / shipped.get(name).unwrap_or(1.0);
        assert!((grown("launch_s").ln() - 0.1).abs() < 1e-9);
        assert!((grown("memory_efficiency_fraction").ln() + 0.1).abs() < 1e-9);
        assert_eq!(grown("gemm_misaligned_fraction"), 1.0);
    }
}
