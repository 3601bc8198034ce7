//! Plans that people tuned by hand against those that are found for the same job: both by prediction, so that what is
//! compared is the choice and not the cost model.
//!
//! The same job is the same model, devices, links, sequences, batch, number format and engine, without the memory of
//! hosts; everything else is free. A published plan has fit, so where it is predicted to need more memory than the
//! devices list, the search has as much.

use std::collections::BTreeMap;

use cost_model::Constants;
use ir::cluster::Cluster;
use ir::names::Roles;
use ir::plan::Plan;
use ir::units::Bytes;
use planner::optimize_with;
use planner::request::{OffloadKind, Pins, Request, Solver, SplitKind};
use rayon::prelude::*;
use serde::Serialize;

use crate::case::Case;
use crate::express::questions;
use crate::express_cluster::{Memory, cluster};
use crate::row::Row;

/// A ratio below one by less than this is rounding.
const ROUNDING: f64 = 1e-9;

/// One published plan and the one that is found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Against {
    /// Name of the row.
    pub id: String,
    /// Its source.
    pub source: String,
    /// Predicted step time of the published plan.
    pub published_s: f64,
    /// Predicted step time of the plan that is found; nothing where none is.
    pub found_s: Option<f64>,
    /// Published over found.
    pub ratio: Option<f64>,
    /// Whether the search had more memory than the devices list.
    pub raised: bool,
    /// The published plan in words.
    pub published: Roles,
    /// The one that is found.
    pub found: Option<Roles>,
}

impl Against {
    /// Whether the published plan is the faster one: a defect of the search.
    pub fn is_worse(&self) -> bool {
        self.ratio.is_none_or(|ratio| ratio < 1.0 - ROUNDING)
    }
}

/// Ratios of one source.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ratios {
    /// Its name.
    pub source: String,
    /// Rows.
    pub rows: usize,
    /// Rows whose published plan is predicted to need more memory than there is.
    pub raised: usize,
    /// Rows whose published plan is faster than what is found.
    pub worse: usize,
    /// Geometric mean of published over found.
    pub mean: f64,
    /// Least.
    pub least: f64,
    /// Largest.
    pub most: f64,
}

/// Searches for every case; jobs that several cases share are searched once.
pub fn against(cases: &[Case], constants: &Constants) -> Vec<Against> {
    let mut jobs: Vec<Request> = Vec::new();
    let mut of_case = Vec::with_capacity(cases.len());
    for case in cases {
        let asked = free(case);
        let job = asked.as_ref().map(|(request, _)| position(&mut jobs, request));
        of_case.push((job, asked.is_some_and(|(_, raised)| raised)));
    }
    let plans: Vec<Option<Plan>> =
        jobs.par_iter().map(|job| optimize_with(job, constants, &|_| ()).ok()).collect();
    let one = |(case, (job, raised)): (&Case, (Option<usize>, bool))| {
        let plan = job.and_then(|job| plans[job].as_ref());
        Against { raised, ..compare(case, plan, constants) }
    };
    cases.iter().zip(of_case).map(one).collect()
}

/// Ratios by source, and of all together as the last.
pub fn ratios(rows: &[Against]) -> Vec<Ratios> {
    let mut by_source: BTreeMap<&str, Vec<&Against>> = BTreeMap::new();
    rows.iter().for_each(|row| by_source.entry(&row.source).or_default().push(row));
    let all = std::iter::once(("all", rows.iter().collect::<Vec<_>>()));
    by_source.into_iter().chain(all).map(|(source, rows)| ratios_of(source, &rows)).collect()
}

fn ratios_of(source: &str, rows: &[&Against]) -> Ratios {
    let known: Vec<f64> = rows.iter().filter_map(|row| row.ratio).collect();
    let logs: f64 = known.iter().map(|ratio| ratio.ln()).sum();
    Ratios {
        source: source.into(),
        rows: rows.len(),
        raised: rows.iter().filter(|row| row.raised).count(),
        worse: rows.iter().filter(|row| row.is_worse()).count(),
        mean: (logs / known.len().max(1) as f64).exp(),
        least: known.iter().copied().fold(f64::INFINITY, f64::min),
        most: known.iter().copied().fold(0.0, f64::max),
    }
}

fn position(jobs: &mut Vec<Request>, request: &Request) -> usize {
    jobs.iter().position(|job| job == request).unwrap_or_else(|| {
        jobs.push(request.clone());
        jobs.len() - 1
    })
}

/// The job of a case with nothing pinned, and whether its devices had to be given more memory than they list.
fn free(case: &Case) -> Option<(Request, bool)> {
    let question = questions(&case.row).ok()?.into_iter().flatten().next()?;
    let mut machines = cluster(&case.row, Memory::Listed).ok()?;
    // Rows of a sweep are one job, whatever their names.
    machines.name.clone_from(&case.row.source);
    let need = case.plan.predicted.as_ref()?.peak_memory_bytes;
    let raised = raise(&mut machines, need);
    let Request { model, job, .. } = question;
    Some((
        Request {
            model,
            cluster: machines,
            job,
            pins: Pins {
                offload: Some(OffloadKind::None),
                split_backward: Some(split_backward(&case.row)),
                ..Pins::default()
            },
            solver: Solver::Structured,
        },
        raised,
    ))
}

/// Schedules that split backward are left to software that has run one.
fn split_backward(row: &Row) -> SplitKind {
    if row.schedule.starts_with("zb") { SplitKind::Any } else { SplitKind::None }
}

/// Gives every device at least so much memory, and a byte for sums in another order.
fn raise(machines: &mut Cluster, need: Bytes) -> bool {
    let need = Bytes(need.0.ceil() + 1.0);
    let mut raised = false;
    for group in &mut machines.groups {
        raised |= group.device.memory_bytes < need;
        group.device.memory_bytes = group.device.memory_bytes.max(need);
    }
    raised
}

fn compare(case: &Case, plan: Option<&Plan>, constants: &Constants) -> Against {
    let published_s = case.predicted(constants);
    let found_s = plan.and_then(|plan| plan.predicted.as_ref()).map(|found| found.step_time_s.0);
    Against {
        id: case.row.id.clone(),
        source: case.row.source.clone(),
        published_s,
        found_s,
        ratio: found_s.map(|found| published_s / found),
        raised: false,
        published: case.plan.roles.clone(),
        found: plan.map(|plan| plan.roles.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::cases;
    use crate::row::shipped;

    fn rows_of(names: &[&str]) -> Vec<Against> {
        let rows: Vec<_> = shipped().into_iter().filter(|row| names.contains(&row.id.as_str())).collect();
        assert_eq!(rows.len(), names.len());
        let constants = Constants::load();
        let (cases, omitted) = cases(&rows, &constants);
        assert_eq!(omitted, Vec::new());
        against(&cases, &constants)
    }

    #[test]
    fn plans_that_are_found_are_no_slower_than_those_that_people_made() {
        let found = rows_of(&["megatron-sc21-1.7B", "megatron-sc21-3.6B"]);
        for row in &found {
            assert!(!row.is_worse(), "{row:?}");
        }
        let sums = ratios(&found);
        assert_eq!(sums.iter().map(|one| one.source.as_str()).collect::<Vec<_>>(), ["megatron-sc21", "all"]);
        let product = found.iter().filter_map(|row| row.ratio).product::<f64>();
        assert!((sums[1].mean.powi(2) / product - 1.0).abs() < 1e-12);
        assert!(sums[1].least <= sums[1].mean && sums[1].mean <= sums[1].most);
    }

    /// The first by one storage for all parameters, which pays in the fused form alone; the second by micro-batches of
    /// 81,920 tokens a device.
    #[test]
    fn plans_of_small_models_with_all_parameters_cut_are_found_too() {
        for row in rows_of(&["llm-foundry-108", "llm-foundry-135"]) {
            assert!(!row.is_worse(), "{row:?}");
        }
    }

    #[test]
    fn a_row_without_a_plan_counts_as_worse() {
        let mut row = rows_of(&["megatron-sc21-1.7B"]).remove(0);
        assert!(!row.is_worse());
        row.ratio = Some(0.99);
        assert!(row.is_worse());
        row.ratio = None;
        assert!(row.is_worse());
        assert_eq!(ratios(&[row])[0].worse, 1);
    }
}
