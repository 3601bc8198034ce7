//! What two trainings gave, for people and for programs.

use executor::agreement::LossPair;
use executor::checkpoint::TrainingFacts;
use ir::shrink::Shrunk;
use serde::Serialize;

use crate::figures;
use crate::table::{Side, list, table};

use super::{Pair, clueless};

/// Most steps that a table shows: the first, the last, and some between at equal distances.
const ROWS: usize = 51;

/// The command's answer.
#[derive(Serialize)]
pub(super) struct Trained {
    equal: bool,
    model: String,
    roles: String,
    shrunk: Vec<String>,
    n_ranks: u64,
    precision: String,
    seed: u64,
    learning_rate: f64,
    n_steps: usize,
    /// Steps before the first of these.
    steps_before: u64,
    /// Sequences of a step.
    sequences_per_step: u64,
    /// Tokens of a sequence.
    sequence: u64,
    /// Loss of a guess that knows nothing: the logarithm of the vocabulary.
    #[serde(skip_serializing_if = "Option::is_none")]
    clueless_loss: Option<f64>,
    /// Of the first step, relative to the loss.
    tolerance: f64,
    /// Steps from the first that are compared; in those after, rounding alone moves one device as far.
    n_judged: usize,
    losses: Vec<Loss>,
    /// Where the parameters end; nothing where not all steps are compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<Parameters>,
    /// How often the experts of a token were fixed to those that one device chose, its own choice being another.
    n_experts_fixed: u64,
}

#[derive(Serialize)]
struct Loss {
    step: u64,
    plan: f64,
    one_device: f64,
    difference: f64,
    allowed: f64,
}

/// Distances over the norm of the parameters.
#[derive(Serialize)]
struct Parameters {
    distance: f64,
    allowed: f64,
    farthest: String,
    farthest_distance: f64,
}

impl Trained {
    /// The answer of a run.
    pub(super) fn of(small: &Shrunk, facts: &TrainingFacts, pair: &Pair) -> Self {
        let agreement = &pair.agreement;
        let steps_before =
            pair.plan.states.as_ref().map_or(0, |states| states.steps - agreement.losses.len() as u64);
        let loss = |(i, pair): (usize, &LossPair)| Loss {
            step: steps_before + i as u64 + 1,
            plan: pair.found,
            one_device: pair.expected,
            difference: (pair.found - pair.expected).abs(),
            allowed: pair.allowed,
        };
        Self {
            equal: agreement.holds(),
            model: small.plan.model.name.clone(),
            roles: small.plan.roles.to_string(),
            shrunk: small.changes.clone(),
            n_ranks: small.plan.n_devices(),
            precision: facts.precision.clone(),
            seed: facts.seed,
            learning_rate: facts.learning_rate,
            n_steps: agreement.losses.len(),
            steps_before,
            sequences_per_step: small.plan.job.global_batch,
            sequence: small.plan.job.sequence,
            clueless_loss: clueless(small),
            tolerance: agreement.tolerance,
            n_judged: agreement.n_judged,
            losses: agreement.losses.iter().enumerate().map(loss).collect(),
            parameters: agreement.ends.as_ref().map(|ends| {
                let (farthest, distance) = ends.farthest.clone().unwrap_or_default();
                Parameters {
                    distance: ends.distance,
                    allowed: ends.allowed,
                    farthest: format!("`{}` of layer {}", farthest.1, farthest.0),
                    farthest_distance: distance,
                }
            }),
            n_experts_fixed: pair.plan.rerouted.values().sum(),
        }
    }

    /// What differs first, in a sentence.
    pub(super) fn failure(&self) -> Option<String> {
        let differs = |loss: &&Loss| loss.difference.is_nan() || loss.difference > loss.allowed;
        if let Some(loss) = self.losses.iter().take(self.n_judged).find(differs) {
            return Some(format!(
                "in {} the loss of step {} differs by {:.2e}, {:.2e} is allowed",
                self.precision, loss.step, loss.difference, loss.allowed
            ));
        }
        let ends =
            self.parameters.as_ref().filter(|ends| ends.distance.is_nan() || ends.distance > ends.allowed)?;
        Some(format!(
            "in {} the final parameters are {:.2e} of their norm apart, {:.2e} is allowed; {} most, by {:.2e}",
            self.precision, ends.distance, ends.allowed, ends.farthest, ends.farthest_distance
        ))
    }

    /// The answer for people.
    pub(super) fn text(&self) -> String {
        let shrunk = if self.shrunk.is_empty() { "nothing".into() } else { self.shrunk.join(", ") };
        let run = format!(
            "{} on threads for {} of {} of {} tokens, in {}, beside one device",
            figures::counted(self.n_ranks, "rank"),
            figures::counted(self.n_steps as u64, "step"),
            figures::counted(self.sequences_per_step, "sequence"),
            self.sequence,
            self.precision
        );
        let head =
            list(&[("plan", format!("{}, {}", self.model, self.roles)), ("shrunk", shrunk), ("run", run)]);
        let verdict = if self.equal { "trained alike\n" } else { "NOT trained alike\n" };
        format!("{head}\n{}\n{}{verdict}", self.table(), self.remarks())
    }

    fn table(&self) -> String {
        let columns = [
            ("step", Side::Right),
            ("plan", Side::Right),
            ("one device", Side::Right),
            ("difference", Side::Right),
            ("of what is allowed", Side::Right),
        ];
        let n = self.losses.len();
        let every = n.div_ceil(ROWS).max(1);
        let shown = |i: &usize| i.is_multiple_of(every) || i + 1 == n;
        let row = |i: usize| {
            let loss = &self.losses[i];
            let share = match loss.difference {
                _ if i >= self.n_judged => "not judged".into(),
                0.0 => figures::percent(0.0),
                difference => figures::percent(difference / loss.allowed),
            };
            vec![
                loss.step.to_string(),
                format!("{:.6}", loss.plan),
                format!("{:.6}", loss.one_device),
                format!("{:.1e}", loss.difference),
                share,
            ]
        };
        let rows: Vec<Vec<String>> = (0..n).filter(shown).map(row).collect();
        let left_out = n - rows.len();
        let note =
            if left_out == 0 { String::new() } else { format!("{left_out} steps between; --json has all\n") };
        table(&columns, &rows) + &note
    }

    fn remarks(&self) -> String {
        let mut lines = Vec::new();
        if let (Some(first), Some(last)) = (self.losses.first(), self.losses.last()) {
            let clueless =
                self.clueless_loss.map(|loss| format!("; a guess that knows nothing has {loss:.3}"));
            lines.push(format!(
                "the loss went from {:.3} to {:.3}{}",
                first.plan,
                last.plan,
                clueless.unwrap_or_default()
            ));
        }
        if self.n_judged < self.losses.len() {
            lines.push(format!(
                "compared up to step {}: from there on rounding alone moves one device by as much, so small is the copy",
                self.steps_before + self.n_judged as u64
            ));
        }
        if let Some(ends) = &self.parameters {
            lines.push(format!(
                "final parameters: {:.1e} of their norm apart, {:.1e} allowed; {} most, by {:.1e}",
                ends.distance, ends.allowed, ends.farthest, ends.farthest_distance
            ));
        }
        if self.n_experts_fixed > 0 {
            let times = figures::counted(self.n_experts_fixed, "choice");
            lines.push(format!("{times} of experts, too close to call, taken from the one device"));
        }
        lines.into_iter().map(|line| line + "\n").collect()
    }
}
