//! When schedules that split backward are searched too, though nobody said so.
//!
//! Backward in two parts fills the bubble with gradients of weights, and keeps for them what the first part leaves. Where a step
//! has many micro-batches that costs more than the bubble of 1F1B over virtual stages: of five questions with less than a
//! twelfth of bubble one is faster so, by a thirtieth; of four with more three are, by a seventeenth to a seventh. So these schedules
//! are asked where the fastest plan idles for long, each with the fastest so far as the limit, and where candidates are few: every one of them
//! is a search of its own, with other prices.

use ir::plan::Plan;
use ir::schedule::Schedule;
use ir::units::Seconds;

use crate::optimize::Found;
use crate::request::{Pins, Request, ScheduleKind};

/// Schedules that are asked: over whole stages in the memory of 1F1B and in twice that, over two chunks in a V, and with passes of
/// both chunks side by side.
pub const KINDS: [ScheduleKind; 4] =
    [ScheduleKind::ZbH1, ScheduleKind::ZbH2, ScheduleKind::ZbV, ScheduleKind::DualPipeV];

/// What a proof says where they were asked in vain.
pub(crate) const IN_VAIN: &str =
    "; of schedules that split backward no plan was found that takes a thirtieth less";

/// What it says where the search was stopped before all of them were.
pub(crate) const UNASKED: &str = "; schedules that split backward were not all asked";

/// Part of the step from which the fastest plan idles for long.
const BUBBLE: f64 = 0.08;

/// Candidates up to which they are asked.
const FEW_CANDIDATES: u64 = 400;

/// Micro-batches times stages of the fastest plan, up to which they are asked: orders of as many actions are looked for one action at a time.
const FEW_ACTIONS: u64 = 128;

/// A plan of such a schedule takes no more than this part of the fastest of others: fewer engines run it.
const WORTH: f64 = 29.0 / 30.0;

/// The question with each of these schedules, where it is open and could be worth it.
pub(crate) fn questions(found: &Found<'_>, layouts: &[Request]) -> Vec<Vec<Request>> {
    let request = &layouts[0];
    if !is_open(&request.pins) || request.cluster.is_mixed() || !found.scope.bends.is_empty() {
        return Vec::new();
    }
    let Some(best) = found.ranking.first() else { return Vec::new() };
    let idles = best.step.parts.bubble > best.step_time() * BUBBLE;
    let few_actions = best.candidate.n_stages * best.candidate.n_micro_batches <= FEW_ACTIONS;
    if !idles || !few_actions || found.tally.stopped || found.tally.n_candidates > FEW_CANDIDATES {
        return Vec::new();
    }
    let allowed = KINDS.into_iter().filter(|kind| !request.pins.forbid.schedule.contains(kind));
    allowed.map(|kind| layouts.iter().map(|layout| of_kind(layout, kind)).collect()).collect()
}

/// A plan that may be of such a schedule; then it says what the fastest of the others takes, and how to have it.
pub(crate) fn beside(mut plan: Plan, other: Option<(Seconds, Schedule)>) -> Plan {
    if let (true, Some((time, schedule))) = (plan.schedule.splits_backward(), other) {
        let name = if schedule.n_virtual_stages() > 1 { "interleaved" } else { "1f1b" };
        plan.warnings.push(format!(
            "backward runs in two parts: without that the fastest plan takes {:.3} s (--pin schedule={name})",
            time.0
        ));
    }
    plan
}

/// The time below which a plan of such a schedule is worth it.
pub(crate) fn limit(found: &Found<'_>) -> Option<Seconds> {
    found.ranking.first().map(|best| best.step_time() * WORTH)
}

/// Whether the user leaves the order of micro-batches open.
pub(crate) fn is_open(pins: &Pins) -> bool {
    pins.schedule.is_none() && pins.vpp.is_none() && pins.layers_per_stage.is_none() && pins.pp != Some(1)
}

fn of_kind(request: &Request, kind: ScheduleKind) -> Request {
    Request { pins: Pins { schedule: Some(kind), ..request.pins.clone() }, ..request.clone() }
}
