//! Searches after the plain one, each of a space of its own with what was found so far as the limit; and what a plan says of those that
//! came to nothing.

use std::sync::Arc;

use cost_model::Constants;
use ir::schedule::Schedule;
use ir::units::Seconds;

use crate::arrange::Arranged;
use crate::layouts::search_all;
use crate::offload;
use crate::optimize::{Found, Start, Tally};
use crate::request::{OnProgress, Request, ScheduleKind, Stop};
use crate::split_schedules::{self, Question};

/// How a search after the plain one ended without a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Further {
    /// `DualPipeV` was asked for a plan that is worth it.
    DualPipeInVain,
    /// All schedules that split backward were.
    SplitInVain,
    /// All of them were for any that is faster.
    NoSplitFaster,
    /// The search was stopped before all of them were.
    SplitUnasked,
    /// The memory of hosts was asked.
    HostsInVain,
}

impl Further {
    /// What a proof says of it.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::DualPipeInVain => "; by dualpipe-v no plan was found that takes a fortieth less",
            Self::SplitInVain => {
                "; of schedules that split backward no plan was found that takes a fortieth less"
            }
            Self::NoSplitFaster => "; of schedules that split backward no plan was found that is faster",
            Self::SplitUnasked => "; schedules that split backward were not all asked",
            Self::HostsInVain => "; with the memory of hosts no plan was found that takes a tenth less",
        }
    }
}

/// What was found, or what is so much faster under one of the schedules that split backward; then also what the fastest of the others
/// takes, and how it runs.
pub(crate) fn split<'a>(
    mut found: Found<'a>,
    questions: &'a [Question],
    constants: &'a Constants,
    watch: (Stop<'_>, OnProgress<'_>),
) -> (Found<'a>, Option<(Seconds, Schedule)>) {
    if found.tally.stopped && split_schedules::is_open(&found.scope.request.pins) {
        found.tally.further.insert(Further::SplitUnasked);
    }
    let whole = found.ranking.first().map(|best| (best.step_time(), best.schedule));
    let mut limit = split_schedules::limit(&found);
    let mut is_faster = false;
    for Question { layouts, reach, .. } in questions {
        let bounds = Some(Arc::clone(&found.scope.bounds));
        let start = Start { work: found.tally.work, limit, reach: *reach, bounds };
        let (other, own) = search_all(layouts, constants, start, watch);
        match other {
            Ok(other) => {
                // From now on it is the fastest that counts.
                limit = other.ranking.first().map(Arranged::step_time);
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
    if !is_faster && !questions.is_empty() && !found.tally.stopped {
        let is_any = found.scope.request.pins.splits_any();
        let is_dual_pipe = questions.iter().all(|question| question.kind == ScheduleKind::DualPipeV);
        found.tally.further.insert(match (is_any, is_dual_pipe) {
            (true, _) => Further::NoSplitFaster,
            (false, true) => Further::DualPipeInVain,
            (false, false) => Further::SplitInVain,
        });
    }
    (found, whole.filter(|_| is_faster))
}

/// What is so much faster with the memory of hosts, which `with_hosts` asks, if anything is; else what was found without says that it was
/// asked.
pub(crate) fn on_hosts<'a>(
    found: &mut Found<'_>,
    (layouts, with_hosts): (&[Request], &'a [Request]),
    constants: &'a Constants,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Option<Found<'a>> {
    let limit = offload::worth_asking(found, layouts)?;
    let start = Start { work: found.tally.work, limit: Some(limit), ..Start::default() };
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

impl Tally {
    /// How a search went together with one after it that found more.
    fn with(self, next: Self) -> Self {
        let n_layouts = self.n_layouts;
        Self { n_layouts, ..self.and(next) }
    }

    /// The same with one that came to nothing: only its work counts.
    fn go_on(&mut self, next: &Self) {
        (self.work, self.stopped) = (next.work, self.stopped || next.stopped);
    }
}
