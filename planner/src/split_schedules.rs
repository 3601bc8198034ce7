//! Which schedules that split backward are searched too, though nobody said so.
//!
//! Backward in two parts fills the bubble with gradients of weights, and keeps for them what the first part leaves.
//! Each of these schedules is a search of its own, with the fastest so far as the limit, so that of most questions
//! bounds say at once that it cannot be faster. `DualPipeV` has its order by a rule and as much in flight on every
//! rank: it is asked wherever the fastest plan has a pipeline and some plan would be that much faster if it did not
//! idle. It is the fastest where a step has some dozen micro-batches for as many stages (llama-3.1-405b on 1,024 H100
//! 0.97 of the time of 1F1B, on 100,000 0.86; deepseek-v3 on 16,384 H800 0.90). The orders of the others are looked for
//! one action at a time: they are asked where actions and candidates are few, and the plan that idles has few of both,
//! or the fastest has no pipeline and few sequences, or leaves devices idle (gpt2-xl on 16 A100 beside 8 V100 with 64
//! sequences 0.96); and where idling is most of what makes it slow, which no dozen micro-batches fill that come in no
//! groups of the pipeline's length (gpt3-175b on 128 A100 with 30 sequences 0.79, on 256 with 60 0.84 of the time of
//! `DualPipeV`).

use ir::links::bends;
use ir::plan::Plan;
use ir::schedule::Schedule;
use ir::units::Seconds;

use crate::arrange::Arranged;
use crate::found::Found;
use crate::request::{Pins, Request, ScheduleKind, SplitKind};

/// Schedules that are asked: over two chunks in a V with passes of both side by side, over whole stages in the memory
/// of 1F1B and in twice that, and over two chunks in a V.
pub const KINDS: [ScheduleKind; 4] =
    [ScheduleKind::DualPipeV, ScheduleKind::ZbH1, ScheduleKind::ZbH2, ScheduleKind::ZbV];

/// Sequences of a step up to which a pipeline is worth another look where the fastest plan has none.
const FEW_SEQUENCES: u64 = 16;

/// Candidates up to which any is asked: of more, bounds alone take seconds.
const MOST_CANDIDATES: u64 = 4000;

/// Candidates up to which all are asked.
const FEW_CANDIDATES: u64 = 1000;

/// Micro-batches times stages of a plan, up to which all are asked: orders of as many actions are looked for one action
/// at a time.
const FEW_ACTIONS: u64 = 128;

/// Candidates, and candidates times micro-batches times stages of the fastest plan, up to which all are asked wherever
/// a plan idles: of batches and lengths that few degrees divide a fifth of the time is at stake (gpt2-xl on 16 A100
/// with 31 sequences of 1,001 tokens 0.81), and the search takes a second or two.
const SCANT_CANDIDATES: u64 = 200;
const SCANT_ACTIONS: u64 = 150_000;

/// Where some plan would take less than this part of the fastest if it did not idle, all are asked however long that
/// takes.
const MUCH: f64 = 0.75;

/// As long as that is less than this part of the fastest so far.
const PROMISING: f64 = 0.95;

/// A plan of such a schedule takes no more than this part of the fastest of others: fewer engines run it.
pub(crate) const WORTH: f64 = 39.0 / 40.0;

/// What is slower than so many times what must be undercut does not come to that by other choices: of 40 questions none
/// did.
const REACH: f64 = 1.03;

/// The same where kernels are short, of which prices know least.
const REACH_OF_SHORT: f64 = 1.3;

/// A question on every selection and order of the groups of the cluster, and the same with each of these schedules that
/// the user leaves open.
pub(crate) struct Orders {
    pub(crate) plain: Vec<Request>,
    split: Vec<(ScheduleKind, Vec<Request>)>,
}

/// The question with one of these schedules.
pub(crate) struct Question<'a> {
    pub(crate) kind: ScheduleKind,
    pub(crate) layouts: &'a [Request],
    /// What is slower than so many times what must be undercut is not looked at in more ways.
    pub(crate) reach: f64,
    /// It is asked only while this is well below the fastest, if at all.
    promise: Option<Seconds>,
}

impl Question<'_> {
    /// Whether there is nothing in it below a limit that is worth the search.
    pub(crate) fn is_not_worth_it(&self, limit: Option<Seconds>) -> bool {
        self.promise.zip(limit).is_some_and(|(promise, limit)| promise > limit * PROMISING)
    }
}

impl Orders {
    pub(crate) fn new(plain: Vec<Request>) -> Self {
        let pins = &plain[0].pins;
        let of = |kind| (kind, plain.iter().map(|layout| of_kind(layout, kind)).collect());
        let split = allowed(pins).filter(|_| is_open(pins)).map(of).collect();
        Self { plain, split }
    }

    /// The question with each of these schedules that could be worth it.
    pub(crate) fn questions(&self, kinds: &Kinds) -> Vec<Question<'_>> {
        let are_asked = self.split.iter().filter(|(kind, _)| kinds.asked.contains(kind));
        are_asked
            .map(|(kind, layouts)| {
                let promise = kinds.promise.filter(|_| *kind != ScheduleKind::DualPipeV);
                Question { kind: *kind, layouts, reach: kinds.reach, promise }
            })
            .collect()
    }

    /// The question with each schedule over two chunks in a V, where somebody wants two chunks or counts the layers of
    /// as many: they need no micro-batches in groups of the pipeline's length, and may be the only ones that there are.
    pub(crate) fn in_v(&self) -> impl Iterator<Item = &[Request]> {
        let pins = &self.plain[0].pins;
        let is_wanted = pins.vpp == Some(IN_V) || pins.vpp.is_none() && could_count_in_v(pins);
        let are_in_v = self.split.iter().filter(|(kind, _)| kind.default_virtual_stages() == IN_V);
        are_in_v.filter(move |_| is_wanted).map(|(_, layouts)| layouts.as_slice())
    }
}

/// Schedules that are asked.
pub(crate) struct Kinds {
    pub(crate) asked: Vec<ScheduleKind>,
    /// What is slower than so many times what they must undercut is not looked at in more ways.
    reach: f64,
    /// What the plan that idles most would take if it did not, where that is why all are asked.
    promise: Option<Seconds>,
}

/// The schedules that are open for what was found and could be worth it.
pub(crate) fn kinds(found: &Found<'_>, request: &Request) -> Kinds {
    let none = Kinds { asked: Vec::new(), reach: REACH, promise: None };
    if !are_open(found, &request.pins) {
        return none;
    }
    let n_candidates = found.tally.n_candidates;
    let Some(best) = found.ranking.first() else { return none };
    // Where it runs one of them, others ran nothing.
    if found.tally.stopped || best.schedule.splits_backward() {
        return none;
    }
    let n_actions = |one: &Arranged| one.candidate.n_stages * one.candidate.n_micro_batches;
    let are_few = |one: &Arranged| n_actions(one) <= FEW_ACTIONS;
    let busy = |one: &Arranged| one.step_time() - one.step.parts.bubble;
    let idles = |one: &Arranged| busy(one) < best.step_time() * WORTH;
    let idle: Vec<&Arranged> = found.ranking.iter().filter(|one| idles(one)).collect();
    let has_few = best.candidate.n_stages == 1 && request.job.global_batch <= FEW_SEQUENCES && are_few(best);
    let are_scant = n_candidates <= SCANT_CANDIDATES && n_candidates * n_actions(best) <= SCANT_ACTIONS;
    // Where the fastest plan has nothing to do for some machines, stages are a way to use them that takes no groups of
    // micro-batches.
    let leaves_devices = found.scope.request.cluster.n_devices() < found.asked.n_devices();
    let all = request.pins.splits_any()
        || are_scant && !idle.is_empty()
        || (has_few || leaves_devices || idle.iter().any(|one| are_few(one)))
            && n_candidates <= FEW_CANDIDATES;
    // Of two chunks on a stage the others want micro-batches in groups, and the fastest may be long for that instead of
    // idle.
    let may_gain = !idle.is_empty() || request.pins.vpp.is_some() || could_count_in_v(&request.pins);
    let is_long = best.candidate.n_stages > 1 && n_candidates <= MOST_CANDIDATES && may_gain;
    // Who wants two chunks and forbids that order is asked about the other.
    let is_left = allowed(&request.pins).any(|kind| kind == ScheduleKind::DualPipeV);
    let ruled =
        if is_left || request.pins.vpp.is_none() { ScheduleKind::DualPipeV } else { ScheduleKind::ZbV };
    let by_rule = |kind: &ScheduleKind| *kind == ruled && is_long;
    let promise = idle.iter().map(|one| busy(one)).reduce(Seconds::min);
    let idles_much = |promise: &Seconds| *promise < best.step_time() * MUCH && n_candidates <= FEW_CANDIDATES;
    let promise = promise.filter(idles_much).filter(|_| !all);
    let is_asked = |kind: &ScheduleKind| all || promise.is_some() || by_rule(kind);
    let reach = if all { REACH_OF_SHORT } else { REACH };
    Kinds { asked: allowed(&request.pins).filter(is_asked).collect(), reach, promise }
}

/// Whether they are left open, and there may be stages to order.
pub(crate) fn could_be_asked(found: &Found<'_>) -> bool {
    let has_stages = found.asked.n_devices() > 1 && found.scope.model().n_layers() > 1;
    are_open(found, &found.scope.request.pins) && has_stages
}

/// Whether neither the user nor the model rules them out.
fn are_open(found: &Found<'_>, pins: &Pins) -> bool {
    is_open(pins) && found.scope.bends.is_empty()
}

/// Whether some that nobody forbids are not among those that are asked.
pub(crate) fn leaves_some(pins: &Pins, asked: &[ScheduleKind]) -> bool {
    allowed(pins).any(|kind| !asked.contains(&kind))
}

/// Why all of them cannot be asked, where somebody wants that.
pub(crate) fn contradiction(request: &Request) -> Option<String> {
    let (pins, model) = (&request.pins, &request.model);
    if !pins.splits_any() || pins.schedule.is_some() {
        return None;
    }
    let why = if !is_open(pins) {
        let all = [(pins.pp == Some(1), "pp=1"), (!KINDS.iter().any(|kind| has_chunks(pins, *kind)), "vpp")];
        let said: Vec<&str> = all.into_iter().filter(|(is_said, _)| *is_said).map(|(_, name)| name).collect();
        format!("what is said of {} leaves no choice of schedules", said.join(" and "))
    } else if !bends(model.kinds_in_order().iter().map(|&kind| &model.layers[kind])).is_empty() {
        "they are not asked together for a model with branches".into()
    } else {
        return None;
    };
    Some(format!("split-backward=any: {why}; name a schedule instead"))
}

/// A plan that may be of such a schedule; then it says what the fastest of the others takes, and how to have it.
pub(crate) fn instead(mut plan: Plan, other: Option<(Seconds, Schedule)>) -> Plan {
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
    let worth = if found.scope.request.pins.splits_any() { 1.0 } else { WORTH };
    found.step_time().map(|time| time * worth)
}

/// Chunks of a stage in a V.
const IN_V: u32 = 2;

/// Whether the layers that somebody counts may be of as many chunks on every stage.
fn could_count_in_v(pins: &Pins) -> bool {
    let are_of = |n_stages: usize| pins.pp.is_none_or(|pp| pp == n_stages as u64);
    let counts = pins.layers_per_stage.as_ref().map_or(0, Vec::len);
    counts > 2 && counts.is_multiple_of(IN_V as usize) && are_of(counts / IN_V as usize)
}

/// Schedules that nobody rules out.
fn allowed(pins: &Pins) -> impl Iterator<Item = ScheduleKind> {
    let is_allowed = |kind: &ScheduleKind| has_chunks(pins, *kind) && !pins.forbid.schedule.contains(kind);
    KINDS.into_iter().filter(is_allowed)
}

/// Whether a schedule has as many chunks on a stage as somebody wants.
fn has_chunks(pins: &Pins, kind: ScheduleKind) -> bool {
    pins.vpp.is_none_or(|vpp| vpp == kind.default_virtual_stages())
}

/// Whether the user leaves the order of micro-batches open.
pub(crate) fn is_open(pins: &Pins) -> bool {
    pins.schedule.is_none()
        && pins.split_backward != Some(SplitKind::None)
        && KINDS.iter().any(|kind| has_chunks(pins, *kind))
        && pins.pp != Some(1)
}

fn of_kind(request: &Request, kind: ScheduleKind) -> Request {
    let pins = Pins { schedule: Some(kind), split_backward: None, ..request.pins.clone() };
    Request { pins, ..request.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Forbid;

    #[test]
    fn what_is_forbidden_is_not_left_unasked() {
        let by_rule = [ScheduleKind::DualPipeV];
        assert!(leaves_some(&Pins::default(), &by_rule));
        let others = KINDS.into_iter().filter(|kind| *kind != ScheduleKind::DualPipeV).collect();
        let pins = Pins { forbid: Forbid { schedule: others, ..Forbid::default() }, ..Pins::default() };
        assert!(!leaves_some(&pins, &by_rule));
    }
}
