//! Predictions of many rows against their measurements, as data for tables.

use std::collections::BTreeMap;

use cost_model::Constants;
use ir::plan::prediction::Breakdown;
use ir::units::Bytes;
use rayon::prelude::*;
use serde::Serialize;

use crate::case::{Case, Omitted};
use crate::row::Row;
use crate::score::{Errors, Pair, regret, spearman};

/// Fewest plans of one job that make a sweep.
const SWEEP: usize = 3;

/// All sources.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Validation {
    /// Equal-weight mean over the sources of the headline, as a fraction.
    pub mean_over_sources: f64,
    /// Their rows together.
    pub all_rows: Errors,
    /// Each source.
    pub sources: Vec<SourceReport>,
    /// Rows that are not priced, by reason.
    pub omitted: BTreeMap<String, usize>,
}

/// One source.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SourceReport {
    /// Its name.
    pub name: String,
    /// Whether it counts in the headline: everything is stated, and it is not the bulk sweep.
    pub headline: bool,
    /// Rows of it in the tables.
    pub rows_in_table: usize,
    /// Errors of step time.
    pub time: Errors,
    /// Errors after every prediction is scaled by the median ratio of the source: what one scalar per stack would leave.
    pub scaled: Errors,
    /// Plans of one job against each other.
    pub sweeps: Option<Sweeps>,
    /// Each row.
    pub rows: Vec<RowReport>,
}

/// Groups of rows with the same job and different plans.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sweeps {
    /// Groups.
    pub groups: usize,
    /// Mean rank correlation inside them.
    pub spearman: f64,
    /// Mean loss by taking the plan predicted to be fastest, as a fraction.
    pub mean_regret: f64,
    /// Largest.
    pub max_regret: f64,
}

/// One row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RowReport {
    /// Its name.
    pub id: String,
    /// Seconds of a measured step.
    pub measured_s: f64,
    /// Seconds of a predicted one.
    pub predicted_s: f64,
    /// `predicted / measured - 1`.
    pub error: f64,
    /// What the prediction is made of, where that was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terms: Option<Terms>,
}

/// What a predicted step is made of.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Terms {
    /// Seconds by term, as a plan has them.
    pub time: Breakdown,
    /// Bytes of the device with most.
    pub peak_memory_bytes: Bytes,
    /// Sequences of a micro-batch over the mesh of a stage.
    pub micro_batch: u64,
    /// Micro-batches of a step.
    pub n_micro_batches: u64,
}

/// Prices all cases and counts errors.
pub fn validation(cases: &[Case], omitted: &[Omitted], constants: &Constants) -> Validation {
    validation_of(cases, omitted, |case| case.predicted(constants))
}

/// The same with layers timed as events.
pub fn validation_by_events(cases: &[Case], omitted: &[Omitted], constants: &Constants) -> Validation {
    validation_of(cases, omitted, |case| case.predicted_by_events(constants))
}

fn validation_of(
    cases: &[Case],
    omitted: &[Omitted],
    predict: impl Fn(&Case) -> f64 + Send + Sync,
) -> Validation {
    let predicted: Vec<f64> = cases.par_iter().map(predict).collect();
    let mut by_source: BTreeMap<String, Vec<(&Case, f64)>> = BTreeMap::new();
    for (case, time) in cases.iter().zip(predicted) {
        let name = match case.row.complete {
            2 => case.row.source.clone(),
            _ => format!("{} (in part stated)", case.row.source),
        };
        by_source.entry(name).or_default().push((case, time));
    }
    let in_table = |name: &str| omitted.iter().filter(|one| one.row.source == name).count();
    let sources: Vec<SourceReport> =
        by_source.iter().map(|(name, rows)| source(name, rows, in_table(name))).collect();
    let headline: Vec<&SourceReport> = sources.iter().filter(|source| source.headline).collect();
    let pairs: Vec<Pair> = headline.iter().flat_map(|source| &source.rows).map(RowReport::pair).collect();
    let total: f64 = headline.iter().map(|source| source.time.mean).sum();
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    for one in omitted {
        *reasons.entry(one.reason.to_string()).or_default() += 1;
    }
    Validation {
        mean_over_sources: total / headline.len().max(1) as f64,
        all_rows: Errors::of(&pairs),
        sources,
        omitted: reasons,
    }
}

impl Validation {
    /// Adds to every row what its prediction is made of.
    #[must_use]
    pub fn with_terms(mut self, cases: &[Case], constants: &Constants) -> Self {
        let of = |case: &Case| {
            let found = case.price(constants)?;
            let terms = Terms {
                time: found.breakdown,
                peak_memory_bytes: found.peak_memory_bytes,
                micro_batch: case.plan.micro_batch,
                n_micro_batches: case.plan.n_micro_batches,
            };
            Some((case.row.id.clone(), terms))
        };
        let mut terms: BTreeMap<String, Terms> = cases.par_iter().filter_map(of).collect();
        for row in self.sources.iter_mut().flat_map(|source| &mut source.rows) {
            row.terms = terms.remove(&row.id);
        }
        self
    }

    /// The rows of the headline whose predictions are farthest off, worst first.
    pub fn worst(&self, n: usize) -> Vec<(&str, &RowReport)> {
        let rows = self.sources.iter().filter(|source| source.headline);
        let mut all: Vec<_> =
            rows.flat_map(|source| source.rows.iter().map(|row| (source.name.as_str(), row))).collect();
        all.sort_by(|a, b| b.1.error.abs().total_cmp(&a.1.error.abs()).then(a.1.id.cmp(&b.1.id)));
        all.truncate(n);
        all
    }
}

impl RowReport {
    fn pair(&self) -> Pair {
        Pair { measured: self.measured_s, predicted: self.predicted_s }
    }
}

fn source(name: &str, rows: &[(&Case, f64)], n_omitted: usize) -> SourceReport {
    let reports: Vec<RowReport> = rows
        .iter()
        .map(|(case, predicted)| RowReport {
            id: case.row.id.clone(),
            measured_s: case.measured,
            predicted_s: *predicted,
            error: predicted / case.measured - 1.0,
            terms: None,
        })
        .collect();
    let pairs: Vec<Pair> = reports.iter().map(RowReport::pair).collect();
    SourceReport {
        name: name.into(),
        headline: rows.iter().all(|(case, _)| in_headline(&case.row)),
        rows_in_table: rows.len() + n_omitted,
        time: Errors::of(&pairs),
        scaled: Errors::of(&scaled(&pairs)),
        sweeps: sweeps(rows),
        rows: reports,
    }
}

/// Whether a row counts: everything is stated, and it is not of the bulk sweep.
pub fn in_headline(row: &Row) -> bool {
    row.tier == "core" && row.complete == 2
}

/// Predictions times the median of measured over predicted.
fn scaled(pairs: &[Pair]) -> Vec<Pair> {
    let mut ratios: Vec<f64> = pairs.iter().map(|pair| pair.measured / pair.predicted).collect();
    ratios.sort_by(f64::total_cmp);
    let median = ratios.get(ratios.len() / 2).copied().unwrap_or(1.0);
    pairs.iter().map(|pair| Pair { predicted: pair.predicted * median, ..*pair }).collect()
}

fn sweeps(rows: &[(&Case, f64)]) -> Option<Sweeps> {
    let mut groups: BTreeMap<String, Vec<Pair>> = BTreeMap::new();
    for (case, predicted) in rows {
        groups
            .entry(job_of(&case.row))
            .or_default()
            .push(Pair { measured: case.measured, predicted: *predicted });
    }
    let groups: Vec<&Vec<Pair>> = groups.values().filter(|group| group.len() >= SWEEP).collect();
    let n = groups.len();
    let correlations: Vec<f64> = groups.iter().filter_map(|group| spearman(group)).collect();
    let regrets: Vec<f64> = groups.iter().filter_map(|group| regret(group)).collect();
    (n > 0).then(|| Sweeps {
        groups: n,
        spearman: correlations.iter().sum::<f64>() / correlations.len().max(1) as f64,
        mean_regret: regrets.iter().sum::<f64>() / n as f64,
        max_regret: regrets.iter().copied().fold(0.0, f64::max),
    })
}

/// What a row trained, on what: rows alike in this differ in their plan.
fn job_of(row: &Row) -> String {
    format!(
        "{} {} {} {:?} {:?} {} {} {:?} {}",
        row.layers,
        row.hidden,
        row.heads,
        row.ffn,
        row.vocab,
        row.seq,
        row.device,
        row.global_batch,
        row.devices
    )
}
