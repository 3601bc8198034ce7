//! What a calibration by a few runs is worth: three rows of a source move the constants, the others are predicted.

use cost_model::Constants;
use rayon::prelude::*;
use serde::Serialize;

use crate::case::Case;
use crate::report::in_headline;
use crate::score::{Errors, Pair};
use crate::stack::calibrated;

/// Runs that are measured, as `planner calibrate` is given.
pub const N_MEASURED: usize = 3;

/// Rows that must be left to be predicted.
const N_LEFT: usize = 4;

/// A source before and after a calibration by some of its rows; both errors are of the other rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FewRuns {
    /// The source.
    pub source: String,
    /// Rows that were used.
    pub measured: Vec<String>,
    /// Errors with the constants that everybody has.
    pub before: Errors,
    /// Errors with those of the calibration.
    pub after: Errors,
}

/// Every source of the headline that has rows enough.
pub fn few_runs(cases: &[Case], constants: &Constants) -> Vec<FewRuns> {
    let mut sources: Vec<&str> = cases.iter().map(|case| case.row.source.as_str()).collect();
    sources.sort_unstable();
    sources.dedup();
    let one = |source: &&str| {
        let is_own = |case: &&Case| case.row.source == *source && in_headline(&case.row);
        let own: Vec<&Case> = cases.iter().filter(is_own).collect();
        (own.len() >= N_MEASURED + N_LEFT).then(|| of_source(source, &own, constants))
    };
    sources.par_iter().filter_map(one).collect()
}

/// The runs lie evenly among the rows of the table: at a sixth, a half and five sixths.
fn of_source(source: &str, own: &[&Case], constants: &Constants) -> FewRuns {
    let places: Vec<usize> = (0..N_MEASURED).map(|k| own.len() * (2 * k + 1) / (2 * N_MEASURED)).collect();
    let measured: Vec<&Case> = places.iter().map(|&at| own[at]).collect();
    let others: Vec<&Case> =
        own.iter().enumerate().filter(|(at, _)| !places.contains(at)).map(|(_, case)| *case).collect();
    let found = calibrated(&measured, constants).fit.constants;
    let errors = |constants: &Constants| {
        let pair = |case: &&Case| Pair { measured: case.measured, predicted: case.predicted(constants) };
        Errors::of(&others.iter().map(pair).collect::<Vec<_>>())
    };
    FewRuns {
        source: source.into(),
        measured: measured.iter().map(|case| case.row.id.clone()).collect(),
        before: errors(constants),
        after: errors(&found),
    }
}
