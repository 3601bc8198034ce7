//! `planner pareto`: of the best plans for several sizes and memories of a cluster, those that nothing beats.

use ir::cluster_limits::MEMORY_BYTES;
use ir::units::GIB;
use planner::pareto::non_dominated;
use serde::Serialize;

use crate::args::{ObjectiveArg, ParetoArgs};
use crate::failure::Failure;
use crate::figures;
use crate::objective::of_step;
use crate::output::json;
use crate::question::Question;
use crate::sweep::{self, Figures, Over, Row};
use crate::terminal::Terminal;

/// Shares of a device's memory that a plan may take, tried in turn: so the search gives up time for memory.
const SHARES: [f64; 5] = [1.0, 0.75, 0.5, 0.35, 0.25];

/// The command's answer.
#[derive(Serialize)]
struct Front<'a> {
    /// What is small where it is good.
    objectives: Vec<&'static str>,
    /// Plans that no other is at least as good as in everything and better in one.
    front: Vec<&'a Row>,
    n_points: usize,
    n_without_plan: usize,
    /// Points without a plan, and why.
    without_plan: Vec<&'a Row>,
}

/// Finds the plans that nothing beats.
pub(crate) fn run(args: &ParetoArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let numbers = |list: &[u64]| list.iter().map(|&n| n as f64).collect::<Vec<f64>>();
    let devices = if args.try_devices.is_empty() {
        sweep::halves(&args.grid)?
    } else {
        sweep::sized_once(&args.grid, "--try-devices")?;
        numbers(&args.try_devices)
    };
    let most = smallest(args)?;
    let memory = if args.try_memory.is_empty() { shares(most) } else { args.try_memory.clone() };
    let range = MEMORY_BYTES.per(GIB);
    if let Some(wrong) = memory.iter().find(|gib| !(range.holds(**gib) && **gib <= most)) {
        let least = range.0;
        let what = format!("--try-memory: expected GiB from {least} to the device's {most}, found {wrong}");
        return Err(Failure::argument(what));
    }
    let over: Vec<Over> = vec![("devices".into(), devices), ("memory".into(), memory)];
    let sweep::Rows { rows, stopped } = sweep::rows(&args.grid, &over, terminal)?;
    let planned: Vec<&Row> = rows.iter().filter(|row| row.plan.is_some()).collect();
    let has_price = !planned.is_empty()
        && planned.iter().all(|row| row.plan.as_ref().is_some_and(|plan| plan.cost_per_step.is_some()));
    let objective = args.grid.objective;
    let outcomes: Vec<Vec<f64>> = planned.iter().map(|row| outcome(row, objective)).collect();
    let mut front: Vec<&Row> = non_dominated(&outcomes).into_iter().map(|at| planned[at]).collect();
    let least = |row: &Row| row.plan.as_ref().map_or(f64::INFINITY, |plan| asked(plan, objective));
    front.sort_by(|a, b| least(a).total_cmp(&least(b)));
    let has_energy = objective == ObjectiveArg::Energy;
    let objectives = ["step time", "peak memory", "devices"]
        .into_iter()
        .chain(has_price.then_some("price of a step"))
        .chain(has_energy.then_some("energy of a step"));
    let answer = Front {
        objectives: objectives.collect(),
        n_points: rows.len(),
        n_without_plan: rows.len() - planned.len(),
        without_plan: rows.iter().filter(|row| row.plan.is_none()).collect(),
        front,
    };
    let text = if args.grid.json.json { json(&answer)? } else { answer.text(&over[..1], objective) };
    write!(terminal.out, "{text}")?;
    if let Some(stopped) = stopped {
        return Err(stopped);
    }
    if planned.is_empty() { Err(Failure::NoPoint { n_points: rows.len() }) } else { Ok(()) }
}

/// Memories to try, in GiB: shares of that of the smallest device.
fn shares(most: f64) -> Vec<f64> {
    SHARES.iter().map(|share| (share * most * 10.0).round() / 10.0).collect()
}

/// Memory of the smallest device in GiB, to a tenth.
fn smallest(args: &ParetoArgs) -> Result<f64, Failure> {
    let cluster = Question::read(&args.grid.model, &args.grid.cluster, &args.grid.job)?.request.cluster;
    let least = cluster.groups.iter().map(|group| group.device.memory_bytes.0).fold(f64::INFINITY, f64::min);
    Ok((least / GIB * 10.0).round() / 10.0)
}

/// The figure by which the front is ordered.
fn asked(plan: &Figures, objective: ObjectiveArg) -> f64 {
    let price_and_energy = (plan.cost_per_step, plan.energy_per_step_joules);
    of_step(objective, plan.step_time_s, price_and_energy).unwrap_or(f64::INFINITY)
}

/// What is compared: time, memory, devices, the price where there is one, and the energy where it is asked for.
fn outcome(row: &Row, objective: ObjectiveArg) -> Vec<f64> {
    let Some(plan) = &row.plan else { return Vec::new() };
    let mut outcome = vec![plan.step_time_s, plan.peak_memory_bytes, plan.n_devices as f64];
    outcome.extend(plan.cost_per_step);
    outcome.extend(plan.energy_per_step_joules.filter(|_| objective == ObjectiveArg::Energy));
    outcome
}

impl Front<'_> {
    fn text(&self, over: &[Over], objective: ObjectiveArg) -> String {
        let rows: Vec<Row> = self.front.iter().map(|row| (*row).clone()).collect();
        let table = if rows.is_empty() { String::new() } else { sweep::text(over, &rows, objective) + "\n" };
        let mut text = table
            + &format!(
                "{} of {} worked out have no better in {} at once",
                rows.len(),
                figures::counted(self.n_points as u64, "point"),
                self.objectives.join(", ")
            );
        if self.n_without_plan > 0 {
            text.push_str(&format!("; {} of them have no plan", self.n_without_plan));
        }
        text.push('\n');
        for row in &self.without_plan {
            let numbers = row.point.iter().map(|(name, number)| format!("{name} {number}"));
            let point = numbers.collect::<Vec<_>>().join(", ");
            text.push_str(&format!("no plan with {point}: {}\n", row.no_plan.as_deref().unwrap_or_default()));
        }
        text
    }
}
