//! A row with its plan, ready to be priced again and again: the search runs once, the price follows the constants.

use cost_model::Constants;
use ir::plan::Plan;
use ir::plan::check::{OpenPlan, open};
use ir::plan::prediction::Prediction;
use planner::optimize_with;
use planner::price::{price_with, time_by_events, time_with};
use rayon::prelude::*;

use crate::express::{Reason, questions};
use crate::row::Row;

/// A row that the planner can express, and its plan.
pub struct Case {
    /// What was measured.
    pub row: Row,
    /// Seconds of a measured step.
    pub measured: f64,
    /// The plan that was run.
    pub plan: Plan,
    opened: OpenPlan,
}

/// A row that is not priced.
#[derive(Clone, Debug, PartialEq)]
pub struct Omitted {
    /// What was measured.
    pub row: Row,
    /// Why.
    pub reason: Reason,
}

impl Case {
    /// Makes a case of a row.
    ///
    /// # Errors
    /// Why it cannot be priced.
    pub fn new(row: &Row, constants: &Constants) -> Result<Self, Reason> {
        let measured = row.measured().ok_or(Reason::NoTime)?;
        let mut best: Option<(f64, Plan)> = None;
        let mut last = None;
        for list in questions(row)? {
            for question in list {
                match optimize_with(&question, constants, &|_| ()) {
                    Ok(plan) => {
                        let time = plan.predicted.as_ref().map_or(f64::INFINITY, |found| found.step_time_s.0);
                        if best.as_ref().is_none_or(|(least, _)| time < *least) {
                            best = Some((time, plan));
                        }
                    }
                    Err(error) => last = Some(error.to_string()),
                }
            }
            if best.is_some() {
                break;
            }
        }
        let (_, plan) = best.ok_or_else(|| Reason::Plan(last.unwrap_or_default()))?;
        let opened = open(&plan).map_err(|error| Reason::Plan(error.what))?;
        Ok(Self { row: row.clone(), measured, plan, opened })
    }

    /// The prediction in a world with given constants.
    pub fn price(&self, constants: &Constants) -> Option<Prediction> {
        price_with(&self.plan, &self.opened, constants).ok()
    }

    /// Predicted seconds of a step.
    pub fn predicted(&self, constants: &Constants) -> f64 {
        time_with(&self.plan, &self.opened, constants).map_or(f64::NAN, |time| time.0)
    }

    /// The same with layers timed as events.
    pub fn predicted_by_events(&self, constants: &Constants) -> f64 {
        time_by_events(&self.plan, &self.opened, constants).map_or(f64::NAN, |time| time.0)
    }
}

/// Cases of rows, and those that are none, each in the order of the rows.
pub fn cases(rows: &[Row], constants: &Constants) -> (Vec<Case>, Vec<Omitted>) {
    let made: Vec<Result<Case, Reason>> = rows.par_iter().map(|row| Case::new(row, constants)).collect();
    let (mut cases, mut omitted) = (Vec::new(), Vec::new());
    for (row, one) in rows.iter().zip(made) {
        match one {
            Ok(case) => cases.push(case),
            Err(reason) => omitted.push(Omitted { row: row.clone(), reason }),
        }
    }
    (cases, omitted)
}
