//! Where a search starts, what it finds, and how it went.

use std::collections::BTreeSet;
use std::sync::Arc;

use ir::cluster::Cluster;
use ir::units::Seconds;

use crate::arrange::Arranged;
use crate::candidate::{Dropped, Scope};
use crate::known_bounds::KnownBounds;
use crate::known_rooms::KnownRooms;
use crate::refusals::not_as_pinned;
use crate::request::{Stop, Wait};
use crate::shapes::names_degrees;

/// Candidates that are slower than so many times the best are not simulated: nobody asks for them.
pub(crate) const WORTH_SHOWING: f64 = 1.3;

/// Candidates that a search aside works out while nothing comes closer to what must be undercut: of 55 that split
/// backward those that found something came closer after 18 at the most.
const PATIENCE: u64 = 32;

/// The best candidate, those behind it, and how the search went.
pub struct Found<'a> {
    /// The cluster that was asked about; that of the scope may have its groups in another order, or not all of them.
    pub asked: &'a Cluster,
    /// What all candidates share.
    pub scope: Scope<'a>,
    /// Fastest first.
    pub ranking: Vec<Arranged>,
    /// How the search went.
    pub tally: Tally,
}

/// Where a search starts.
#[derive(Clone)]
pub(crate) struct Start {
    /// Batches of work done before.
    pub(crate) work: u64,
    /// What is not faster than this is of no interest.
    pub(crate) limit: Option<Seconds>,
    /// What is slower than so many times that is not looked at in more ways.
    pub(crate) reach: f64,
    /// Whose bound, so many times, is not below that is not worked out while nothing else is.
    pub(crate) over_bound: f64,
    /// Bounds where memory is free that a search of the same question left, under other schedules or without hosts.
    pub(crate) bounds: Option<Arc<KnownBounds>>,
    /// What layers take in memory by a search of the same question under other schedules.
    pub(crate) rooms: Option<Arc<KnownRooms>>,
    /// Whether it asks for other schedules of what a search found: most of what would fit is then too slow to be worked
    /// out.
    pub(crate) is_of_schedules: bool,
    /// How what was found is looked at again.
    pub(crate) again: Again,
    /// Whether it is of interest only where it undercuts the limit: it then ends where long nothing comes closer to
    /// that, and nobody asks what else there could be.
    pub(crate) is_aside: bool,
    /// So many candidates that it then works out before it ends.
    pub(crate) patience: u64,
    /// When any plan will do, nobody asks what else there could be; where nothing is said, the fastest is looked for.
    pub(crate) settles: Option<Settles>,
    /// For how long a first plan is waited for; where it is not, the search ends when somebody says so, though there is
    /// none yet.
    pub(crate) waits: Option<Wait>,
}

/// How much is done before any plan will do.
#[derive(Clone, Copy)]
pub(crate) struct Settles {
    /// Batches of work.
    pub(crate) batches: u64,
    /// Candidates that fit: where memory is short the first may be three times as slow as the next.
    pub(crate) plans: u64,
    /// Batches of work after which it ends without any.
    pub(crate) in_vain: u64,
}

/// How what was found is looked at again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Again {
    /// Not at all.
    Never,
    /// In fused forms of layers.
    InForms,
    /// And in more ways, with tensor degrees by name, where that may say more.
    InMoreWays,
}

impl Found<'_> {
    /// Time of the fastest, if there is any.
    pub(crate) fn step_time(&self) -> Option<Seconds> {
        self.ranking.first().map(Arranged::step_time)
    }
}

impl Default for Start {
    fn default() -> Self {
        let (reach, again) = (WORTH_SHOWING, Again::InMoreWays);
        let waits = Some(Wait::All);
        let (is_of_schedules, is_aside) = (false, false);
        Self {
            work: 0,
            limit: None,
            reach,
            over_bound: 1.0,
            bounds: None,
            rooms: None,
            is_of_schedules,
            again,
            is_aside,
            patience: PATIENCE,
            settles: None,
            waits,
        }
    }
}

impl Start {
    /// Whether it ends without a plan: somebody says so, who can be told what came closest.
    pub(crate) fn ends(&self, work: u64, stop: Stop<'_>, closest: Option<&Dropped>) -> bool {
        if self.settles.is_some_and(|settles| work >= settles.in_vain) {
            return true;
        }
        match self.waits {
            None => (stop.asked)(),
            Some(wait) => closest.is_some() && (stop.overdue)(wait),
        }
    }

    /// Whether what was found will do.
    pub(crate) fn is_settled(&self, tally: &Tally) -> bool {
        self.settles
            .is_some_and(|Settles { batches, plans, .. }| tally.work >= batches && tally.n_simulated >= plans)
    }

    /// Whether a candidate could come to what must be undercut if it is looked at in more ways: what it waits for
    /// launches, fused forms may save.
    pub(crate) fn is_within_reach(&self, one: &Arranged) -> bool {
        let busy = one.step_time() - one.waiting();
        self.limit.is_none_or(|limit| busy <= limit * self.reach)
    }

    /// The time of what was found, or what must be undercut where that is less; nothing where there is neither.
    pub(crate) fn least(&self, best: Option<&Arranged>) -> Option<Seconds> {
        lesser(self.limit, best.map(Arranged::step_time))
    }

    /// A time, or what must be undercut where that is less.
    pub(crate) fn at_most(&self, time: Seconds) -> Seconds {
        self.limit.map_or(time, |limit| limit.min(time))
    }

    /// Whether something must be undercut, and what was found does not.
    pub(crate) fn is_unmet(&self, best: Option<&Arranged>) -> bool {
        let undercuts = |limit: Seconds| best.is_some_and(|best| best.step_time() < limit);
        self.limit.is_some_and(|limit| !undercuts(limit))
    }

    /// Whether what is found is of no interest, though it could still come to what must be undercut.
    pub(crate) fn is_in_vain(&self, best: Option<&Arranged>) -> bool {
        self.is_aside && self.is_unmet(best)
    }

    /// What must be undercut by anything that is to be of interest, as long as nothing does.
    pub(crate) fn must_undercut(&self, best: Option<&Arranged>) -> Option<Seconds> {
        self.limit.filter(|_| self.is_in_vain(best))
    }
}

/// How the search went.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    /// Candidates in the space.
    pub n_candidates: u64,
    /// Of these, candidates that no strategy fits.
    pub n_illegal: u64,
    /// Candidates that their bound ruled out.
    pub n_bounded: u64,
    /// Candidates that do not fit in memory.
    pub n_unfit: u64,
    /// Candidates worked out to a simulated time.
    pub n_simulated: u64,
    /// Of these, candidates worked out again with every form of their layers.
    pub n_forms_chosen: u64,
    /// Candidates that forms could still make the best when the limit was reached.
    pub n_forms_open: u64,
    /// Bounds are those of the leading form of every kind: others could be faster.
    pub bounds_leading: bool,
    /// Candidates left when the limit was reached.
    pub n_open: u64,
    /// Least bound among them, and among those that forms could still make the best when the search was stopped.
    pub open_bound: Option<Seconds>,
    /// Least bound of those that fit and crowd memory, in the memory that there is: what other choices inside them
    /// could come to, or what these candidates take were memory free, whichever is more.
    pub inside_bound: Option<Seconds>,
    /// The same by their bounds alone.
    pub by_sums: Option<Seconds>,
    /// Least bound where memory is free of those whose fastest choices would need no more than `ROOMY` memories: what
    /// much more memory could make of a step.
    pub roomy_bound: Option<Seconds>,
    /// Of plans whose degrees are not those that were pinned, the fastest.
    pub misnamed: Option<Misnamed>,
    /// Searches after the plain one that came to nothing.
    pub further: BTreeSet<Further>,
    /// Batches of candidates worked out, forms included.
    pub work: u64,
    /// Whether somebody stopped it.
    pub stopped: bool,
    /// Selections and orders of the groups of the cluster that were searched.
    pub n_layouts: u64,
}

impl Tally {
    /// How two searches went, one after the other.
    pub(crate) fn and(self, next: Self) -> Self {
        Self {
            n_candidates: self.n_candidates + next.n_candidates,
            n_illegal: self.n_illegal + next.n_illegal,
            n_bounded: self.n_bounded + next.n_bounded,
            n_unfit: self.n_unfit + next.n_unfit,
            n_simulated: self.n_simulated + next.n_simulated,
            n_forms_chosen: self.n_forms_chosen + next.n_forms_chosen,
            n_forms_open: self.n_forms_open + next.n_forms_open,
            bounds_leading: self.bounds_leading || next.bounds_leading,
            n_open: self.n_open + next.n_open,
            open_bound: lesser(self.open_bound, next.open_bound),
            inside_bound: lesser(self.inside_bound, next.inside_bound),
            by_sums: lesser(self.by_sums, next.by_sums),
            roomy_bound: lesser(self.roomy_bound, next.roomy_bound),
            misnamed: self.misnamed.into_iter().chain(next.misnamed).reduce(Misnamed::faster),
            further: self.further.into_iter().chain(next.further).collect(),
            work: next.work,
            stopped: self.stopped || next.stopped,
            n_layouts: self.n_layouts + next.n_layouts,
        }
    }

    /// How a search went together with one after it that found more.
    pub(crate) fn with(self, next: Self) -> Self {
        let n_layouts = self.n_layouts;
        Self { n_layouts, ..self.and(next) }
    }

    /// The same with one that came to nothing: only its work counts.
    pub(crate) fn go_on(&mut self, next: &Self) {
        (self.work, self.stopped) = (next.work, self.stopped || next.stopped);
    }
}

/// A plan that has not the degrees that were pinned: where a model has one key head, say, an axis that should split
/// heads can only split tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Misnamed {
    /// What it takes.
    pub step_time: Seconds,
    /// The degree that it has not, and what it is.
    pub what: String,
}

impl Misnamed {
    /// What of the pins a plan has not, if anything.
    pub(crate) fn of(scope: &Scope<'_>, arranged: &Arranged) -> Option<Self> {
        let pins = scope.pins();
        // Of most questions nobody says anything, and words for a plan are as long as its layers.
        if !names_degrees(pins) && pins.pp.is_none() && pins.cp_kind.is_none() {
            return None;
        }
        let what = not_as_pinned(scope.request, &scope.roles(arranged))?;
        Some(Self { step_time: arranged.step_time(), what })
    }

    /// The faster of two, the first of equals.
    pub(crate) fn faster(self, other: Self) -> Self {
        if other.step_time < self.step_time { other } else { self }
    }
}

/// The lesser of two bounds, as far as they are known.
pub(crate) fn lesser(a: Option<Seconds>, b: Option<Seconds>) -> Option<Seconds> {
    [a, b].into_iter().flatten().reduce(Seconds::min)
}

/// How a search after the plain one ended without a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Further {
    /// `DualPipeV` was asked for a plan that is worth it.
    DualPipeInVain,
    /// A plan of it was found, and others were not asked.
    DualPipeAlone,
    /// All schedules that split backward were.
    SplitInVain,
    /// All of them were for any that is faster.
    NoSplitFaster,
    /// The search was stopped before all of them were.
    SplitUnasked,
    /// None of them was, for nothing promises that they are worth it.
    NoSplitAsked,
    /// The memory of hosts was asked.
    HostsInVain,
    /// Degrees are pinned or ruled out one by one, and axes that are free were held to them by most of the weights.
    HeldAxes,
    /// Nothing was but what is near a plan that ran.
    NearAlone,
}

impl Further {
    /// What a proof says of it.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::DualPipeInVain => {
                "; by dualpipe-v no plan was found that takes a fortieth less, and others that split backward were not asked \
                 (--pin split-backward=any)"
            }
            Self::DualPipeAlone => {
                "; schedules that split backward but dualpipe-v were not asked (--pin split-backward=any)"
            }
            Self::SplitInVain => {
                "; of schedules that split backward no plan was found that takes a fortieth less"
            }
            Self::NoSplitFaster => "; of schedules that split backward no plan was found that is faster",
            Self::SplitUnasked => "; schedules that split backward were not all asked",
            Self::NoSplitAsked => "; schedules that split backward were not asked (--pin split-backward=any)",
            Self::HostsInVain => "; with the memory of hosts no plan was found that takes a tenth less",
            Self::HeldAxes => {
                "; an axis has a degree that is pinned or ruled out where the products with more than half of a layer's \
                 weights have it"
            }
            Self::NearAlone => {
                "; the space is that of these degrees and this number of stages: others near a plan that ran were \
                 searched too, and none further away"
            }
        }
    }
}
