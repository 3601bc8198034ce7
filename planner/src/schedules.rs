//! Which schedules a candidate may run, and how much each keeps in flight.
//!
//! Without a word of the user these are 1F1B and, where micro-batches come in groups of the pipeline's length, 1F1B
//! over virtual stages. Some that split backward are searched after these (`split_schedules.rs`). All others are tried
//! only by name: most of them hold more.

use std::collections::BTreeSet;
use std::sync::Arc;

use ir::schedule::Schedule;
use ir::token_order::TokenOrder;

use crate::candidate::{Candidate, Scope};
use crate::fill::{Idle, Passage};
use crate::flights::Flight;
use crate::request::{ContextKind, Pins, ScheduleKind};
use crate::sends::Sends;

/// Virtual stages that are tried where the user gives no number: what published runs use.
const VIRTUAL_STAGES: [u32; 6] = [2, 3, 4, 5, 6, 8];

/// Virtual stages of one layer each are tried up to so many.
const MAX_SINGLE_LAYERS: u64 = 24;

/// Schedules of one kind, as bounds see them.
#[derive(Clone, Debug)]
pub(crate) struct Family {
    pub(crate) kind: FamilyKind,
    /// What all of them leave idle.
    pub(crate) idle: Idle,
    /// Least micro-batches per stage, in whole stages, of which it holds all that forward keeps.
    pub(crate) in_flight: Vec<f64>,
    /// What its stages wait for their sends; nothing where that was not asked.
    pub(crate) sends: Sends,
}

/// How schedules go about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FamilyKind {
    /// Stages in one piece: 1F1B and `GPipe`.
    WholeStages,
    /// 1F1B over virtual stages.
    VirtualStages,
    /// Those that split backward.
    InParts,
    /// Any other.
    Others,
}

impl FamilyKind {
    /// Whether every micro-batch passes the ranks in turn, from the first to the last, and its backward runs at once.
    pub(crate) fn runs_forward_to_last(self) -> bool {
        matches!(self, Self::WholeStages | Self::VirtualStages)
    }

    pub(crate) fn of(schedule: Schedule) -> Self {
        if matches!(schedule, Schedule::GPipe | Schedule::OneFOneB) {
            Self::WholeStages
        } else if matches!(schedule, Schedule::Interleaved { .. }) {
            Self::VirtualStages
        } else if schedule.splits_backward() {
            Self::InParts
        } else {
            Self::Others
        }
    }
}

impl Family {
    /// Another of the family: the least of both.
    fn take(&mut self, other: &Self) {
        self.idle = self.idle.min(other.idle);
        let least = |all: &mut Vec<f64>, others: &[f64]| {
            all.iter_mut().zip(others).for_each(|(least, one)| *least = least.min(*one));
        };
        least(&mut self.in_flight, &other.in_flight);
        least(&mut self.sends.of_stages, &other.sends.of_stages);
        self.sends.rounds = self.sends.rounds.min(other.sends.rounds);
        self.sends.hides = self.sends.hides.max(other.sends.hides);
    }
}

impl Scope<'_> {
    /// Schedules worth trying for a candidate.
    pub(crate) fn schedules(&self, candidate: &Candidate) -> Vec<Schedule> {
        let forbid = &self.pins().forbid;
        let allows = |one: &Schedule| forbid.allows_schedule(*one, candidate.n_stages);
        // Both copies of a chunk are on meshes that are alike, and slices are worked out for one.
        let on_one = |one: &Schedule| one.placement().n_copies() == 1 && one.n_slices() == 1;
        let fits = |one: &Schedule| candidate.meshes.is_empty() || on_one(one);
        self.schedules_of_pins(candidate).into_iter().filter(allows).filter(fits).collect()
    }

    /// Whether there is one.
    pub(crate) fn has_schedule(&self, candidate: &Candidate) -> bool {
        !self.schedules(candidate).is_empty()
    }

    fn schedules_of_pins(&self, candidate: &Candidate) -> Vec<Schedule> {
        let Some(kind) = self.pins().schedule else {
            return self.one_f_one_b(candidate, &[&[1], &VIRTUAL_STAGES[..]].concat());
        };
        let v = self.pins().vpp;
        let p = u32::try_from(candidate.n_stages).unwrap_or(u32::MAX);
        let all: Vec<Schedule> = match kind {
            ScheduleKind::GPipe => {
                return self.one_f_one_b(candidate, &[1]).into_iter().map(all_forwards_first).collect();
            }
            ScheduleKind::OneFOneB => return self.one_f_one_b(candidate, &[1]),
            ScheduleKind::Interleaved => return self.one_f_one_b(candidate, &VIRTUAL_STAGES),
            ScheduleKind::Eager => vec![Schedule::Eager],
            // As far as memory allows: between eager 1F1B and 1F1B, then 1F1B, then less than that.
            ScheduleKind::Dapple => [p.saturating_add(p / 2), p, p.div_ceil(2)]
                .map(|warm_up| Schedule::Dapple { warm_up })
                .to_vec(),
            ScheduleKind::BreadthFirst => {
                let stages = v.map_or(VIRTUAL_STAGES.to_vec(), |v| vec![v.max(1)]);
                stages.into_iter().map(|virtual_stages| Schedule::BreadthFirst { virtual_stages }).collect()
            }
            ScheduleKind::ZbH1 => vec![Schedule::ZbH1],
            ScheduleKind::ZbH2 => vec![Schedule::ZbH2],
            ScheduleKind::ZbV => vec![Schedule::ZbV],
            ScheduleKind::VHalf => vec![Schedule::VHalf],
            ScheduleKind::VMin => vec![Schedule::VMin],
            ScheduleKind::Hanayo => {
                let waves = v.map_or(vec![1, 2, 3, 4], |v| vec![v / 2]);
                waves.into_iter().map(|waves| Schedule::Hanayo { waves }).collect()
            }
            ScheduleKind::DualPipeV => vec![Schedule::DualPipeV],
            ScheduleKind::Chimera => vec![Schedule::Chimera],
            ScheduleKind::Seq1F1B => self.slices().map(|slices| Schedule::Seq1F1B { slices }).collect(),
            ScheduleKind::TeraPipe => self.slices().map(|slices| Schedule::TeraPipe { slices }).collect(),
        };
        let fits = |schedule: &Schedule| {
            let n_chunks = schedule.placement().n_chunks(p);
            p > 1
                && u64::from(n_chunks) <= self.model().n_layers()
                && v.is_none_or(|v| v == schedule.n_virtual_stages())
                && self.flights.of(candidate, *schedule).is_some()
        };
        all.into_iter().filter(fits).collect()
    }

    /// Numbers of slices, or the one that the user says.
    fn slices(&self) -> impl Iterator<Item = u32> {
        self.pins().slices.map_or(SLICES.to_vec(), |slices| vec![slices]).into_iter()
    }

    /// 1F1B over numbers of virtual stages, or over as many as the user says.
    fn one_f_one_b(&self, candidate: &Candidate, options: &[u32]) -> Vec<Schedule> {
        let (p, m) = (candidate.n_stages, candidate.n_micro_batches);
        let interleaves = p > 1 && m.is_multiple_of(p);
        let all = self.model().n_layers();
        // Between embedding and head: chunks of one layer, where stages come out even.
        let inner = all.saturating_sub(2);
        let single =
            (inner.is_multiple_of(p) && inner / p <= MAX_SINGLE_LAYERS).then_some((inner / p) as u32);
        let n_counts = self.pins().layers_per_stage.as_ref().map_or(0, Vec::len) as u64;
        let counted = u32::try_from(n_counts / p).ok().filter(|_| n_counts.is_multiple_of(p));
        let least = options.iter().copied().min().unwrap_or(1);
        let is_more = |v: &u32| options.len() > 1 && *v >= least && !options.contains(v);
        let more: BTreeSet<u32> = single.into_iter().chain(counted).filter(is_more).collect();
        let options: Vec<u32> = options.iter().copied().chain(more).collect();
        let options = self.pins().vpp.map_or(options, |v| vec![v.max(1)]);
        let fits = |v: &u32| *v == 1 || (interleaves && p * u64::from(*v) <= all);
        let of = |v: u32| match v {
            1 => Schedule::OneFOneB,
            _ => Schedule::Interleaved { virtual_stages: v },
        };
        options.into_iter().filter(fits).map(of).collect()
    }

    /// What bounds promise of the schedules that a candidate may run, family by family: 1F1B keeps least in flight, and
    /// virtual stages leave the least idle, but no schedule does both.
    pub(crate) fn families(&self, candidate: &Candidate) -> Vec<Family> {
        self.families_of(candidate, |schedule| self.family(candidate, schedule))
    }

    /// The same, and what their stages wait for their sends.
    pub(crate) fn families_sending(&self, candidate: &Candidate) -> Vec<Family> {
        self.families_of(candidate, |schedule| self.sending(candidate, schedule))
    }

    fn families_of(&self, candidate: &Candidate, family: impl Fn(Schedule) -> Family) -> Vec<Family> {
        let mut families: Vec<Family> = Vec::new();
        for one in self.schedules(candidate).into_iter().map(family) {
            match families.iter_mut().find(|known| known.kind == one.kind) {
                Some(known) => known.take(&one),
                None => families.push(one),
            }
        }
        families
    }

    /// What bounds promise of one schedule.
    pub(crate) fn family(&self, candidate: &Candidate, schedule: Schedule) -> Family {
        let kind = FamilyKind::of(schedule);
        let p = candidate.n_stages as usize;
        // Chunks of a stage count alike: that those which are behind the others in forward, and hold fewer
        // micro-batches, may keep more of each is left out, which the proof takes for given.
        let in_flight = match kind {
            FamilyKind::WholeStages | FamilyKind::VirtualStages | FamilyKind::InParts => {
                self.in_flight(candidate, schedule).iter().take(p).map(|flight| flight.saved()).collect()
            }
            // Nothing runs backward before it ran forward.
            FamilyKind::Others => vec![1.0; p],
        };
        Family { kind, idle: self.idle(candidate, schedule), in_flight, sends: Sends::default() }
    }

    /// The same, and what its stages wait for their sends.
    pub(crate) fn sending(&self, candidate: &Candidate, schedule: Schedule) -> Family {
        Family { sends: self.least_sends(candidate, schedule), ..self.family(candidate, schedule) }
    }

    /// What the chunks of a schedule hold at most; all micro-batches, where it has no table.
    pub(crate) fn in_flight(&self, candidate: &Candidate, schedule: Schedule) -> Arc<[Flight]> {
        self.flights.of(candidate, schedule).unwrap_or_else(|| {
            let n_stages = u32::try_from(candidate.n_stages).unwrap_or(u32::MAX);
            let all = Flight::whole(candidate.n_micro_batches as f64);
            (0..schedule.placement().n_chunks(n_stages)).map(|_| all).collect()
        })
    }

    /// What a schedule leaves idle of a candidate at least; nothing is promised where branches run side by side, for
    /// what then fills the pipeline depends on where they are cut, and of its bubble nothing where the user cuts.
    pub(crate) fn idle(&self, candidate: &Candidate, schedule: Schedule) -> Idle {
        if !self.bends.is_empty() {
            return Idle::of(0.0);
        }
        let idle = least_idle(candidate, schedule);
        if self.pins().layers_per_stage.is_none() { idle } else { Idle { bubble: 0.0, ..idle } }
    }
}

/// What bounds count of the bubble of virtual stages: a pipeline is filled through its first chunks, and stages are no
/// longer for shorter ones there. Found to save a fifth, on two stages of six chunks.
const UNEQUAL_CHUNKS: f64 = 0.7;

/// What they count of the bubble of whole stages where micro-batches are too few to fill it: fewer than `p + 2`
/// (below). Found to save 5 % of it on four stages with half as many micro-batches, and 13 % where two stages run a
/// single one.
const UNFILLED: f64 = 0.85;

/// Bubble of a schedule that splits backward for every stage but one, as a share of what a chunk takes of a
/// micro-batch: in the memory of 1F1B that is a third where forward and both parts of backward take equally long, and
/// no less than this where the second takes a quarter more than the first, which has more to do (attention, and what is
/// computed again).
const SPLIT_WHOLE: f64 = 0.3;

/// The same in half that memory.
const SPLIT_HALF: f64 = 0.75;

/// The same in the least memory.
const SPLIT_LEAST: f64 = 1.0;

/// What a schedule leaves idle of a chain at least. Its bubble, as a share of the work: `(p - 1) / m` of those that do
/// not split backward and pass every chunk once, in turn, with `k` slices `(p - 1) / (m k)`, for the longest is no
/// shorter than a k-th, of `v` virtual stages most of `(p - 1) / (m v)`, and some of it where backward is split, of
/// which the way of the micro-batches says more; nothing is promised of others.
///
/// That is of stages that take equally long. Where micro-batches are few, a heavier stage computes while the first of
/// them is behind it, so that a lighter last stage can end earlier: with as many on four stages by 3.6 %
/// (`polish::shift`). Taken for given (`document::report`).
fn least_idle(candidate: &Candidate, schedule: Schedule) -> Idle {
    let (m, p) = (candidate.n_micro_batches as f64, candidate.n_stages as f64);
    let straight = |bubble: f64| Idle { bubble, passage: Passage::Straight };
    let through = |part: f64| {
        let bubble = UNEQUAL_CHUNKS * part * (p - 1.0) / (2.0 * m);
        Idle { bubble, passage: Passage::Through }
    };
    match schedule {
        Schedule::GPipe
        | Schedule::OneFOneB
        | Schedule::Eager
        | Schedule::Dapple { .. }
        | Schedule::Seq1F1B { .. }
        | Schedule::TeraPipe { .. } => {
            let counted = if m < p + 2.0 { UNFILLED } else { 1.0 };
            Idle::of(counted * (p - 1.0) / (m * f64::from(schedule.n_slices())))
        }
        Schedule::Interleaved { .. } | Schedule::BreadthFirst { .. } => {
            Idle::of(UNEQUAL_CHUNKS * (p - 1.0) / (m * f64::from(schedule.n_virtual_stages())))
        }
        Schedule::ZbH1 => straight(UNFILLED * SPLIT_WHOLE * (p - 1.0) / m),
        Schedule::ZbH2 => straight(0.0),
        Schedule::ZbV | Schedule::DualPipeV => through(SPLIT_WHOLE),
        Schedule::VHalf => through(SPLIT_HALF),
        Schedule::VMin => through(SPLIT_LEAST),
        Schedule::Hanayo { .. } | Schedule::Chimera | Schedule::Custom(_) => Idle::of(0.0),
    }
}

/// Slices that are tried where the user gives no number: what published runs use.
const SLICES: [u32; 3] = [2, 4, 8];

/// What contradicts a pinned schedule, if anything does: no search can meet it.
pub(crate) fn contradiction(pins: &Pins) -> Option<String> {
    if pins.schedule.is_some() && pins.split_backward.is_some() {
        return Some("split-backward is for a search of schedules, and one is pinned".into());
    }
    let Some(kind) = pins.schedule else {
        return pins.slices.map(|_| "slices are for the schedules seq1f1b and terapipe: name one".into());
    };
    let own = kind.default_virtual_stages();
    let takes_any = matches!(kind, ScheduleKind::Interleaved | ScheduleKind::BreadthFirst);
    let takes_even = kind == ScheduleKind::Hanayo;
    let needs_stages = !matches!(kind, ScheduleKind::GPipe | ScheduleKind::OneFOneB);
    if let Some(slices) = pins.slices {
        if !kind.cuts_sequences() {
            return Some("slices are for the schedules seq1f1b and terapipe".into());
        }
        if slices < 2 {
            return Some(format!("slices={slices}: a sequence is cut into at least 2"));
        }
    }
    if kind.cuts_sequences() {
        if pins.cp_kind == Some(ContextKind::Ring) {
            return Some("keys on a ring cannot be carried from slice to slice: use cp-kind gather".into());
        }
        if pins.token_order.is_some_and(|order| order != TokenOrder::Natural) {
            return Some("slices need tokens in their natural order".into());
        }
    }
    match (pins.pp, pins.vpp) {
        (_, Some(1)) if kind == ScheduleKind::Interleaved => {
            Some("the interleaved schedule needs at least two virtual stages, found vpp=1".into())
        }
        (Some(1), _) if needs_stages => Some("the pinned schedule needs a pipeline: pp of at least 2".into()),
        (Some(pp), _) if kind == ScheduleKind::Chimera && !pp.is_multiple_of(2) => {
            Some(format!("chimera needs an even number of stages, found pp={pp}"))
        }
        (_, Some(v)) if takes_even && (v == 0 || !v.is_multiple_of(2)) => {
            Some(format!("a wave is two virtual stages: hanayo needs an even vpp, found vpp={v}"))
        }
        (_, Some(v)) if !takes_any && !takes_even && v != own => {
            let stages = if own == 1 { "stage" } else { "stages" };
            Some(format!(
                "the pinned schedule has {own} virtual {stages} on every stage, found vpp={v}: interleaved and \
                 breadth-first have as many as are said"
            ))
        }
        (_, _) => None,
    }
}

/// GPipe for 1F1B; virtual stages have no such form here.
fn all_forwards_first(schedule: Schedule) -> Schedule {
    if schedule == Schedule::OneFOneB { Schedule::GPipe } else { schedule }
}
