//! What a calibration by a few runs is worth: one row of a source, or three, move the constants, the others are predicted.

use cost_model::Constants;
use rayon::prelude::*;
use serde::Serialize;

use crate::case::Case;
use crate::report::in_headline;
use crate::row::Row;
use crate::score::{Errors, Pair};
use crate::stack::calibrated;

/// The most runs that are measured.
const N_MEASURED: usize = 3;

/// Rows that must be left to be predicted.
const N_LEFT: usize = 4;

/// Times that rows are drawn: which rows somebody happens to measure decides more than how the constants follow.
pub const N_DRAWS: usize = 8;

/// A source before and after calibrations by some of its rows; all errors are of the other rows, of all draws together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FewRuns {
    /// The source.
    pub source: String,
    /// Whether no fit has seen it: then it is what a user's own cluster is.
    pub is_unseen: bool,
    /// Rows that it has.
    pub n_rows: usize,
    /// Errors with the constants that everybody has, where three rows are drawn.
    pub before: Errors,
    /// Errors with those of a calibration by one row.
    pub by_one: Errors,
    /// Errors with those of a calibration by three.
    pub by_three: Errors,
}

/// Every source of the headline, and of those that no fit has seen, that has rows enough; mixtures of experts left out.
pub fn few_runs(cases: &[Case], constants: &Constants) -> Vec<FewRuns> {
    let mut sources: Vec<&str> = cases.iter().map(|case| case.row.source.as_str()).collect();
    sources.sort_unstable();
    sources.dedup();
    let one = |source: &&str| {
        let counts = |row: &Row| in_headline(row) || row.is_unseen() && !row.is_mixture();
        let is_own = |case: &&Case| case.row.source == *source && counts(&case.row);
        let own: Vec<&Case> = cases.iter().filter(is_own).collect();
        (own.len() >= N_MEASURED + N_LEFT).then(|| FewRuns {
            source: (*source).into(),
            is_unseen: own[0].row.is_unseen(),
            n_rows: own.len(),
            before: of_others(&own, N_MEASURED, |_| constants.clone()),
            by_one: of_others(&own, 1, |measured| calibrated(measured, constants).fit.constants),
            by_three: of_others(&own, N_MEASURED, |measured| calibrated(measured, constants).fit.constants),
        })
    };
    sources.par_iter().filter_map(one).collect()
}

/// Errors of the rows that were not drawn, by the constants that those that were lead to. Drawn rows lie evenly in the
/// table, each time a little further down.
fn of_others(own: &[&Case], n_measured: usize, constants: impl Fn(&[&Case]) -> Constants + Sync) -> Errors {
    let draw = |draw: usize| {
        let place = |k: usize| own.len() * (2 * (k * N_DRAWS + draw) + 1) / (2 * n_measured * N_DRAWS);
        let places: Vec<usize> = (0..n_measured).map(place).collect();
        let measured: Vec<&Case> = places.iter().map(|&at| own[at]).collect();
        let found = constants(&measured);
        let others = own.iter().enumerate().filter(|(at, _)| !places.contains(at));
        let pair =
            |(_, case): (usize, &&Case)| Pair { measured: case.measured, predicted: case.predicted(&found) };
        others.map(pair).collect::<Vec<_>>()
    };
    Errors::of(&(0..N_DRAWS).into_par_iter().flat_map(draw).collect::<Vec<_>>())
}
