//! What `optimize` makes small: the time of a step, its price, or its energy.
//!
//! On given devices the fastest plan is the cheapest, and of the plans that compute nothing twice mostly the one that
//! draws least. What another objective changes is how many devices are worth having: it is asked for the cluster and
//! its halves, each time for the fastest plan, for energy also without recomputation. Prices and energies count what
//! failures undo, where the cluster says how often devices fail.

use frontends::{Size, rescale};
use ir::cluster::Cluster;
use ir::plan::Plan;
use ir::plan::prediction::Prediction;
use planner::request::{Pins, RecomputeKind};

use crate::args::{JobArgs, ObjectiveArg, SizeArgs};
use crate::failure::Failure;
use crate::figures;
use crate::question::Question;
use crate::table::{Side, table};

/// One number of devices that was asked for.
pub(crate) struct Tried {
    /// How many.
    n_devices: u64,
    /// What the plan is, or why there is none.
    plan: Result<(String, Prediction), String>,
}

/// What a search says of a question; nothing where it was not asked.
pub(crate) type Answer = Option<Result<Plan, Failure>>;

/// The best plan by an objective, the question that it answers, and all that was tried. Every question is asked with
/// how many are left, itself among them, and may be left without an answer.
///
/// # Errors
/// Why the whole cluster has no plan, where no part of it has one; or that nothing says what the objective is.
pub(crate) fn best(
    objective: ObjectiveArg,
    (model, cluster, job): (&str, &str, &JobArgs),
    pins: &Pins,
    ask: &mut dyn FnMut(&Question, usize) -> Answer,
) -> Result<(Question, Plan, Vec<Tried>), Failure> {
    let whole = Question::read(model, cluster, job)?.request.cluster;
    let has_price = whole.groups.iter().all(|group| group.price_per_device_hour.is_some());
    if objective == ObjectiveArg::Cost && !has_price {
        return Err(unsaid(objective));
    }
    let mut best: Option<(f64, Question, Plan)> = None;
    let mut first: Option<Failure> = None;
    let mut tried: Vec<Tried> = Vec::new();
    let sizes = halves(&whole);
    let mut n_left = sizes.len() * variants(objective, pins).len();
    for n_devices in sizes {
        let size = SizeArgs { devices: Some(n_devices), nodes: None, ..job.size.clone() };
        let sized = Question::read(model, cluster, &JobArgs { size, ..job.clone() })?;
        for pins in variants(objective, pins) {
            let mut question = sized.clone();
            question.request.pins = pins;
            let answer = ask(&question, n_left);
            n_left -= 1;
            match answer {
                None => tried.push(Tried { n_devices, plan: Err("not asked: the search was ended".into()) }),
                Some(Ok(plan)) => {
                    let predicted = plan.predicted.clone();
                    let predicted = predicted.ok_or_else(|| Failure::bug("the plan has no prediction"))?;
                    let figure = figure(objective, &predicted)?;
                    let same = |one: &Tried| {
                        one.n_devices == n_devices
                            && one.plan.as_ref().is_ok_and(|(_, own)| *own == predicted)
                    };
                    if tried.iter().any(same) {
                        continue;
                    }
                    tried.push(Tried { n_devices, plan: Ok((plan.roles.to_string(), predicted)) });
                    if best.as_ref().is_none_or(|(least, ..)| figure < *least) {
                        best = Some((figure, question, plan));
                    }
                }
                Some(Err(failure @ Failure::NoPlan(_))) => {
                    tried.push(Tried { n_devices, plan: Err(failure.to_string()) });
                    first = first.or(Some(failure));
                }
                Some(Err(other)) => return Err(other),
            }
        }
    }
    match (best, first) {
        (Some((_, question, plan)), _) => Ok((question, plan, tried)),
        (None, first) => Err(first.unwrap_or_else(|| Failure::bug("no size of the cluster was tried"))),
    }
}

/// Numbers of devices worth asking of a cluster: itself, and halves of it as far as they are clusters.
pub(crate) fn halves(whole: &Cluster) -> Vec<u64> {
    let mut list = Vec::new();
    let mut n = whole.n_devices();
    while n > 0 && rescale(whole, Size::Devices(n)).is_ok() {
        list.push(n);
        n = if n.is_multiple_of(2) { n / 2 } else { 0 };
    }
    list
}

/// The choices to ask with: what is computed twice is faster at times, and draws more.
pub(crate) fn variants(objective: ObjectiveArg, pins: &Pins) -> Vec<Pins> {
    let without = Pins { recompute: Some(RecomputeKind::None), ..pins.clone() };
    match objective {
        ObjectiveArg::Energy if pins.recompute.is_none() => vec![pins.clone(), without],
        ObjectiveArg::Energy | ObjectiveArg::Time | ObjectiveArg::Cost => vec![pins.clone()],
    }
}

/// What is to be small, of a step of training that lasts.
pub(crate) fn figure(objective: ObjectiveArg, predicted: &Prediction) -> Result<f64, Failure> {
    let goodput = predicted.upkeep.map_or(1.0, |upkeep| upkeep.goodput);
    let price_and_energy = (predicted.cost_per_step, predicted.energy_per_step_joules);
    let asked = of_step(objective, predicted.step_time_s.0, price_and_energy);
    Ok(asked.ok_or_else(|| unsaid(objective))? / goodput)
}

/// What to say where a cluster does not say what the objective is.
fn unsaid(objective: ObjectiveArg) -> Failure {
    let (what, field) = match objective {
        ObjectiveArg::Energy => ("draws", "`watts` to the device of every group"),
        ObjectiveArg::Cost | ObjectiveArg::Time => ("costs", "`price_per_device_hour` to every group"),
    };
    let hint = format!("give {field} in the cluster file");
    Failure::argument_with_hint(format!("--objective: nothing says what a device {what}"), hint)
}

/// Of the figures of a step, the one that is to be small; nothing where it is not known.
pub(crate) fn of_step(
    objective: ObjectiveArg,
    seconds: f64,
    (price, joules): (Option<f64>, Option<f64>),
) -> Option<f64> {
    match objective {
        ObjectiveArg::Time => Some(seconds),
        ObjectiveArg::Cost => price,
        ObjectiveArg::Energy => joules,
    }
}

/// A table of what was tried, in the order asked.
pub(crate) fn text(tried: &[Tried]) -> String {
    let columns = [
        ("devices", Side::Right),
        ("step time", Side::Right),
        ("price of a step", Side::Right),
        ("energy of a step", Side::Right),
        ("goodput", Side::Right),
        ("plan", Side::Left),
    ];
    let row = |one: &Tried| {
        let mut cells = vec![one.n_devices.to_string()];
        match &one.plan {
            Ok((roles, predicted)) => cells.extend([
                figures::seconds(predicted.step_time_s),
                predicted.cost_per_step.map_or("-".into(), figures::price),
                predicted.energy_per_step_joules.map_or("-".into(), figures::energy),
                predicted.upkeep.map_or("-".into(), |upkeep| figures::percent(upkeep.goodput)),
                roles.clone(),
            ]),
            Err(why) => {
                cells.extend(std::iter::repeat_n("-".to_owned(), 4));
                cells.push(why.clone());
            }
        }
        cells
    };
    table(&columns, &tried.iter().map(row).collect::<Vec<_>>())
}
