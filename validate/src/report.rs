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
    /// Each source, without mixtures of experts.
    pub sources: Vec<SourceReport>,
    /// Sources that came after the constants were fitted: they count in no mean above, and no fit has seen them.
    pub unseen: Vec<SourceReport>,
    /// The same of mixtures of experts.
    pub unseen_experts: Vec<SourceReport>,
    /// Mixtures of experts, which count in no mean above.
    pub experts: Experts,
    /// Rows that are not priced, by reason.
    pub omitted: BTreeMap<String, usize>,
}

/// Mixtures of experts, the same rows twice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Experts {
    /// By source and release of its software.
    pub by_release: Vec<SourceReport>,
    /// By model.
    pub by_model: Vec<SourceReport>,
}

impl Experts {
    /// All of them together.
    pub fn all(&self) -> Errors {
        all_of(&self.by_release)
    }

    /// Mean error of each source, whatever its release.
    pub fn by_source(&self) -> BTreeMap<&str, f64> {
        let mut pairs: BTreeMap<&str, Vec<Pair>> = BTreeMap::new();
        for release in &self.by_release {
            let source = release.name.split(' ').next().unwrap_or_default();
            pairs.entry(source).or_default().extend(release.rows.iter().map(RowReport::pair));
        }
        pairs.into_iter().map(|(source, pairs)| (source, Errors::of(&pairs).mean)).collect()
    }

    /// Errors after one factor per release, for every row the median of the others; releases of one row have none.
    pub fn by_others(&self) -> Errors {
        let scaled = |release: &SourceReport| -> Vec<Pair> {
            let pairs: Vec<Pair> = release.rows.iter().map(RowReport::pair).collect();
            let without = |at: usize| pairs.iter().enumerate().filter(move |(other, _)| *other != at);
            let one = |at: usize| {
                let factor = median_ratio(without(at).map(|(_, pair)| *pair))?;
                Some(Pair { predicted: pairs[at].predicted * factor, ..pairs[at] })
            };
            (0..pairs.len()).filter_map(one).collect()
        };
        Errors::of(&self.by_release.iter().flat_map(scaled).collect::<Vec<_>>())
    }
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
    /// Errors after every prediction is scaled by the median ratio of the source: what one scalar per stack would
    /// leave.
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
    let all: Vec<(&Case, f64)> = cases.iter().zip(predicted).collect();
    let (mixtures, dense): (Vec<_>, Vec<_>) = all.into_iter().partition(|(case, _)| case.row.is_mixture());
    let is_unseen = |(case, _): &(&Case, f64)| case.row.is_unseen();
    let (unseen, dense): (Vec<_>, Vec<_>) = dense.into_iter().partition(is_unseen);
    let (unseen_experts, mixtures): (Vec<_>, Vec<_>) = mixtures.into_iter().partition(is_unseen);
    let (later, omitted): (Vec<Omitted>, Vec<Omitted>) =
        omitted.iter().cloned().partition(|one| one.row.is_unseen());
    let [unseen, unseen_experts] =
        [unseen, unseen_experts].map(|list| grouped(&list, &later, |row| row.source.clone()));
    let sources = grouped(&dense, &omitted, |row| named(row, row.source.clone()));
    let experts = grouped(&mixtures, &omitted, |row| named(row, format!("{} {}", row.source, row.date)));
    let models = grouped(&mixtures, &[], |row| {
        format!("{} wide, {} experts, {} layers", row.hidden, row.experts.unwrap_or(0), row.layers)
    });
    let headline: Vec<&SourceReport> = sources.iter().filter(|source| source.headline).collect();
    let pairs: Vec<Pair> = headline.iter().flat_map(|source| &source.rows).map(RowReport::pair).collect();
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    for one in omitted.iter().chain(&later) {
        *reasons.entry(one.reason.to_string()).or_default() += 1;
    }
    Validation {
        mean_over_sources: mean_over(headline.iter().copied()),
        all_rows: Errors::of(&pairs),
        sources,
        unseen,
        unseen_experts,
        experts: Experts { by_release: experts, by_model: models },
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
        let unseen = self.unseen.iter_mut().chain(&mut self.unseen_experts);
        let all = self.sources.iter_mut().chain(unseen).chain(&mut self.experts.by_release);
        for row in all.flat_map(|source| &mut source.rows) {
            row.terms = terms.remove(&row.id);
        }
        self
    }

    /// The rows of the headline whose predictions are farthest off, worst first.
    pub fn worst(&self, n: usize) -> Vec<(&str, &RowReport)> {
        worst_of(self.sources.iter().filter(|source| source.headline), n)
    }
}

impl Validation {
    /// Equal-weight mean over the sources that no fit has seen, as a fraction.
    pub fn mean_over_unseen(&self) -> f64 {
        mean_over(self.unseen.iter())
    }

    /// Their rows together.
    pub fn all_unseen(&self) -> Errors {
        all_of(&self.unseen)
    }

    /// Mixtures of experts that no fit has seen.
    pub fn all_unseen_experts(&self) -> Errors {
        all_of(&self.unseen_experts)
    }

    /// The rows that no fit has seen whose predictions are farthest off, worst first.
    pub fn worst_unseen(&self, n: usize) -> Vec<(&str, &RowReport)> {
        worst_of(self.unseen.iter().chain(&self.unseen_experts), n)
    }
}

/// Rows of sources whose predictions are farthest off, worst first.
fn worst_of<'a>(sources: impl Iterator<Item = &'a SourceReport>, n: usize) -> Vec<(&'a str, &'a RowReport)> {
    let rows = |source: &'a SourceReport| source.rows.iter().map(|row| (source.name.as_str(), row));
    let mut all: Vec<_> = sources.flat_map(rows).collect();
    all.sort_by(|a, b| b.1.error.abs().total_cmp(&a.1.error.abs()).then(a.1.id.cmp(&b.1.id)));
    all.truncate(n);
    all
}

/// Rows of sources together.
fn all_of(sources: &[SourceReport]) -> Errors {
    let rows = sources.iter().flat_map(|source| &source.rows);
    Errors::of(&rows.map(RowReport::pair).collect::<Vec<_>>())
}

/// Equal-weight mean over sources; 0 where there are none.
fn mean_over<'a>(sources: impl Iterator<Item = &'a SourceReport>) -> f64 {
    let (total, n) = sources.fold((0.0, 0), |(total, n), source| (total + source.time.mean, n + 1));
    total / f64::from(n.max(1))
}

impl RowReport {
    fn pair(&self) -> Pair {
        Pair { measured: self.measured_s, predicted: self.predicted_s }
    }
}

/// Whether everything is stated of a row is a part of the name that it is listed under.
fn named(row: &Row, name: String) -> String {
    if row.complete == 2 { name } else { format!("{name} (in part stated)") }
}

fn grouped(
    cases: &[(&Case, f64)],
    omitted: &[Omitted],
    name_of: impl Fn(&Row) -> String,
) -> Vec<SourceReport> {
    let mut groups: BTreeMap<String, Vec<(&Case, f64)>> = BTreeMap::new();
    for (case, time) in cases {
        groups.entry(name_of(&case.row)).or_default().push((case, *time));
    }
    let is_mixture = cases.first().is_some_and(|(case, _)| case.row.is_mixture());
    let of_kind = || omitted.iter().filter(|one| one.row.is_mixture() == is_mixture);
    // A row whose group has none that is priced is listed with its source.
    let group_of = |row: &Row| Some(name_of(row)).filter(|name| groups.contains_key(name));
    let left_out = |name: &str| {
        of_kind().filter(|one| group_of(&one.row).as_deref().unwrap_or(&one.row.source) == name).count()
    };
    groups.iter().map(|(name, rows)| source(name, rows, left_out(name))).collect()
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

/// Whether a row counts: everything is stated, and it is neither of the bulk sweep nor a mixture of experts.
pub fn in_headline(row: &Row) -> bool {
    row.tier == "core" && row.complete == 2 && !row.is_mixture()
}

/// Predictions times the median of measured over predicted.
fn scaled(pairs: &[Pair]) -> Vec<Pair> {
    let median = median_ratio(pairs.iter().copied()).unwrap_or(1.0);
    pairs.iter().map(|pair| Pair { predicted: pair.predicted * median, ..*pair }).collect()
}

fn median_ratio(pairs: impl Iterator<Item = Pair>) -> Option<f64> {
    let mut ratios: Vec<f64> = pairs.map(|pair| pair.measured / pair.predicted).collect();
    ratios.sort_by(f64::total_cmp);
    ratios.get(ratios.len() / 2).copied()
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
