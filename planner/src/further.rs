//! Searches after the plain one, each of a space of its own with what was found so far as the limit.

use std::sync::Arc;

use cost_model::Constants;
use ir::schedule::Schedule;
use ir::units::Seconds;

use crate::found::{Found, Further, Start, Tally};
use crate::layouts::search_all;
use crate::offload;
use crate::request::{NoPlan, OnProgress, Request, Stop};
use crate::split_schedules::{self, Kinds, Orders, Question};

/// A plan with hosts takes no less than so many times its bound, which counts nothing of the way there: of the
/// questions in which they made a step a tenth shorter none came closer than 1.025 (llama-3-8b and qwen2.5-7b on two
/// H100).
const OVER_BOUND_ON_HOSTS: f64 = 1.02;

/// What is slower than so many times what a plan with hosts must undercut does not come to that by other choices: of
/// eleven questions that came near none came closer by more than a fortieth.
const REACH_ON_HOSTS: f64 = 1.05;

/// Candidates that a search with hosts works out while nothing comes closer to what it must undercut: each takes
/// several times as long as without, and of ten that found something none needed more than six.
const PATIENCE_ON_HOSTS: u64 = 16;

/// A plan of a narrower question takes no more than this part of what is known: runners-up are of one question.
const CLEARLY: f64 = 0.998;

/// The fastest so far.
pub(crate) struct Best<'a> {
    pub(crate) found: Found<'a>,
    /// Where that splits backward, what the fastest takes that does not, and how it runs.
    pub(crate) in_order: Option<(Seconds, Schedule)>,
    /// Which schedules that split backward could be worth it.
    kinds: Kinds,
}

/// The fastest of a question, the first, and of narrower ones that it may miss: these are asked once it has been looked
/// at whole.
///
/// # Errors
/// Where none has a plan: what the first says.
pub(crate) fn fastest<'a>(
    all: &'a [Orders],
    constants: &'a Constants,
    start: Start,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Result<Best<'a>, NoPlan> {
    let mut best: Option<Best<'a>> = None;
    let mut refused: Option<NoPlan> = None;
    let mut work = start.work;
    for orders in all {
        if let Some(known) = best {
            best = Some(beside(known, orders, constants, watch));
            continue;
        }
        let (found, tally) = first(orders, constants, Start { work, ..start.clone() }, watch);
        work = tally.work;
        match found {
            Ok(found) => best = Some(found),
            // A narrower one may have a plan that it came upon none of.
            Err(why @ NoPlan::Impossible { .. }) if !tally.stopped => refused = refused.or(Some(why)),
            Err(why) => return Err(refused.unwrap_or(why)),
        }
    }
    best.ok_or_else(|| refused.unwrap_or_else(|| NoPlan::Impossible { what: "nothing was asked".into() }))
}

/// What is found for a question, schedules that split backward included where they are worth asking.
fn first<'a>(
    orders: &'a Orders,
    constants: &'a Constants,
    start: Start,
    watch: (Stop<'_>, OnProgress<'_>),
) -> (Result<Best<'a>, NoPlan>, Tally) {
    let (found, tally) = whole(orders, constants, start, watch);
    let best = found.map(|found| {
        let kinds = split_schedules::kinds(&found, &orders.plain[0]);
        let (found, in_order) = split(found, &orders.questions(&kinds), constants, watch);
        Best { found, in_order, kinds }
    });
    (best, tally)
}

/// What was found, or what is faster for a narrower question; all that is said of what could be faster is of both.
fn beside<'a>(
    best: Best<'a>,
    orders: &'a Orders,
    constants: &'a Constants,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Best<'a> {
    let Best { found, in_order, kinds } = best;
    if found.tally.stopped {
        return Best { found, in_order, kinds };
    }
    // Nothing is out of reach: who asks more is told what else there could be.
    let limit = found.step_time().map(|time| time * CLEARLY);
    let (work, reach) = (found.tally.work, f64::INFINITY);
    let start = Start { work, limit, reach, ..Start::default() };
    let (other, own) = whole(orders, constants, start, watch);
    let tally = found.tally.clone().with(own);
    let (found, in_order, kinds) = match other {
        Ok(other) => {
            let kinds = split_schedules::kinds(&other, &orders.plain[0]);
            (Found { tally, ..other }, None, kinds)
        }
        Err(_) => (Found { tally, ..found }, in_order, kinds),
    };
    let (found, before) = split(found, &orders.questions(&kinds), constants, watch);
    Best { found, in_order: in_order.or(before), kinds }
}

/// What is found before schedules that split backward are asked; where there is nothing, by those over two chunks in a
/// V, one after the other.
fn whole<'a>(
    orders: &'a Orders,
    constants: &'a Constants,
    start: Start,
    watch: (Stop<'_>, OnProgress<'_>),
) -> (Result<Found<'a>, NoPlan>, Tally) {
    let (found, mut tally) = search_all(&orders.plain, constants, start.clone(), watch);
    if tally.stopped || !matches!(found, Err(NoPlan::Impossible { .. })) {
        return (found, tally);
    }
    let mut fastest = found;
    for layouts in orders.in_v() {
        let limit = fastest.as_ref().ok().and_then(Found::step_time).or(start.limit);
        let start = Start { work: tally.work, limit, ..start.clone() };
        let (found, own) = search_all(layouts, constants, start, watch);
        tally = tally.with(own);
        fastest = found.or(fastest);
    }
    (fastest.map(|found| Found { tally: tally.clone(), ..found }), tally)
}

/// What was found, or what is so much faster under one of the schedules that split backward; then also what the fastest
/// of the others takes, and how it runs.
fn split<'a>(
    mut found: Found<'a>,
    questions: &[Question<'a>],
    constants: &'a Constants,
    watch: (Stop<'_>, OnProgress<'_>),
) -> (Found<'a>, Option<(Seconds, Schedule)>) {
    if found.tally.stopped && split_schedules::is_open(&found.scope.request.pins) {
        found.tally.further.insert(Further::SplitUnasked);
    }
    let whole = found.ranking.first().map(|best| (best.step_time(), best.schedule));
    let mut limit = split_schedules::limit(&found);
    let mut is_faster = false;
    let mut asked = Vec::new();
    for question in questions {
        if question.is_not_worth_it(limit) {
            continue;
        }
        let Question { kind, layouts, reach, .. } = question;
        asked.push(*kind);
        let is_aside = layouts.len() == 1;
        let is_of_schedules = differs_in_schedules(&found, &layouts[0]);
        // With as many devices, other machines of a cluster have other bounds.
        let has_bounds = is_of_schedules && is_aside;
        let bounds = has_bounds.then(|| Arc::clone(&found.scope.bounds));
        let rooms = has_bounds.then(|| Arc::clone(&found.scope.rooms));
        let (work, reach) = (found.tally.work, *reach);
        let start =
            Start { work, limit, reach, bounds, rooms, is_of_schedules, is_aside, ..Start::default() };
        let (other, own) = search_all(layouts, constants, start, watch);
        match other {
            Ok(other) => {
                // From now on it is the fastest that counts.
                limit = other.step_time();
                found = Found { tally: found.tally.with(own), ..other };
                is_faster = true;
            }
            Err(_) => found.tally.go_on(&own),
        }
        if found.tally.stopped {
            found.tally.further.insert(Further::SplitUnasked);
            break;
        }
    }
    if asked.is_empty() && !found.tally.stopped && split_schedules::could_be_asked(&found) {
        found.tally.further.insert(Further::NoSplitAsked);
    }
    if !asked.is_empty() && !found.tally.stopped {
        let pins = &found.scope.request.pins;
        let is_one = found.ranking.first().is_some_and(|best| best.schedule.splits_backward());
        // Where not all are asked, `DualPipeV` alone is.
        let words = match (is_one, pins.splits_any(), split_schedules::leaves_some(pins, &asked)) {
            (true, false, true) => Some(Further::DualPipeAlone),
            (true, ..) => None,
            (false, true, _) => Some(Further::NoSplitFaster),
            (false, false, true) => Some(Further::DualPipeInVain),
            (false, false, false) => Some(Further::SplitInVain),
        };
        found.tally.further.extend(words);
    }
    (found, whole.filter(|_| is_faster))
}

/// Whether a question differs from that of what was found in nothing but schedules: hosts may hold as much.
fn differs_in_schedules(found: &Found<'_>, request: &Request) -> bool {
    found.scope.request.pins.offload == request.pins.offload
}

/// What is so much faster with the memory of hosts, which `with_hosts` asks, if anything is; else what was found
/// without says that it was asked.
pub(crate) fn on_hosts<'a>(
    found: &mut Found<'_>,
    (layouts, with_hosts): (&[Request], &'a [Request]),
    constants: &'a Constants,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Option<Found<'a>> {
    let limit = offload::worth_asking(found, layouts)?;
    let is_aside = with_hosts.len() == 1;
    let start = Start {
        work: found.tally.work,
        limit: Some(limit),
        reach: REACH_ON_HOSTS,
        over_bound: OVER_BOUND_ON_HOSTS,
        // Where memory is free nothing is on hosts that need not be.
        bounds: is_aside.then(|| Arc::clone(&found.scope.bounds)),
        is_aside,
        patience: PATIENCE_ON_HOSTS,
        ..Start::default()
    };
    let (other, own) = search_all(with_hosts, constants, start, watch);
    let without = found.tally.clone();
    found.tally.go_on(&own);
    match other {
        Ok(other) => Some(Found { tally: without.with(own), ..other }),
        Err(_) => {
            if !own.stopped {
                found.tally.further.insert(Further::HostsInVain);
            }
            None
        }
    }
}
