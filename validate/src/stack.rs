//! What a few runs say of one cluster and its software: first how fast all of it is, then its constants.
//!
//! ```text
//! pace      = the s to expect: a run's ln(measured / predicted) is t(s, RUN, 4), s itself Cauchy(0, STACK)             -> pace()
//! constants = rates over e^pace, times by it, moved as far as the runs ask and STRAY lets them                     -> calibrated()
//! ```
//! A run may be far off by itself, and a stack may be far off as a whole: software generations differ by 10 to 25 %.
//! Both distributions have long tails, so runs that agree are believed, and one that stands alone among others is not.
//! A single run may be either: what is expected goes from one to the other as it is farther off, where what is most
//! likely jumps.

use cost_model::{Constants, PARAMETERS, Parameter};

use crate::case::Case;
use crate::fit::{family, fit_nearby, found, slopes, touches};
use crate::global::{Global, posed};

/// Scale of what a run is off by for reasons that no constant has: half of those of sources that no fit has seen are
/// within three quarters of it once their source's own pace is taken out (3.2 % by rows, 4.2 % by sources).
const RUN: f64 = 0.05;

/// Degrees of freedom of Student's t of runs: one in ten is twice as far off.
const RUN_TAIL: f64 = 4.0;

/// Half of the sources are as near as this: the median of what those that no fit has seen are off by as a whole, 3.3 %
/// (`docs/validation.md`).
const STACK: f64 = 0.03;

/// A constant strays by so much of itself from what is shipped.
const STRAY: f64 = 0.08;

/// The same of times of the host: processors and frameworks differ by more than devices do (`docs/measured.md` has one
/// that launches in half the time).
const HOST_STRAY: f64 = 0.6;

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

/// The logarithm by which all times are to be expected longer than predicted, given those of some runs: the mean of what
/// it may be by Bayes' rule, in steps.
fn pace(runs: &[f64]) -> f64 {
    const STEP: f64 = 1e-3;
    const STEPS: i32 = 700;
    let tail = |away: f64, width: f64, freedom: f64| {
        (freedom + 1.0) / 2.0 * (away * away / (freedom * width * width)).ln_1p()
    };
    let unlikely = |at: f64| -> f64 {
        runs.iter().map(|run| tail(run - at, RUN, RUN_TAIL)).sum::<f64>() + tail(at, STACK, 1.0)
    };
    let all: Vec<(f64, f64)> =
        (-STEPS..=STEPS).map(|step| f64::from(step) * STEP).map(|at| (at, unlikely(at))).collect();
    // Far runs are so unlikely at all of them that nothing would be left to divide by.
    let least = all.iter().map(|(_, unlikely)| *unlikely).fold(f64::INFINITY, f64::min);
    let likely = |unlikely: f64| (least - unlikely).exp();
    let total: f64 = all.iter().map(|(_, unlikely)| likely(*unlikely)).sum();
    all.iter().map(|(at, unlikely)| at * likely(*unlikely)).sum::<f64>() / total
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
        near(pace(&[-0.1, -0.1, -0.1]), -0.08);
        near(pace(&[0.0, 0.01, 0.3]), 0.0);
        near(pace(&[0.03]), 0.011);
        near(pace(&[]), 0.0);
    }

    #[test]
    fn a_run_alone_is_believed_the_more_the_farther_it_is_off_and_without_a_jump() {
        let of_one: Vec<f64> = (0..=60).map(|at| pace(&[f64::from(at) * 0.01])).collect();
        for (at, pair) in of_one.windows(2).enumerate() {
            let grown = pair[1] - pair[0];
            assert!(grown > 0.002 && grown < 0.015, "{at}: {pair:?}");
        }
        let part = |run: f64| pace(&[run]) / run;
        assert!(part(0.05) < 0.5 && part(0.2) > 0.6 && part(0.5) > 0.9);
        // As far to the other side.
        assert!((pace(&[-0.13]) + pace(&[0.13])).abs() < 1e-9);
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
