//! When every action of a schedule runs: an event simulator over action tables, and a bound it never undercuts.
//!
//! An action starts when its rank is free and what it needs has arrived; it takes its chunk's time, and its result
//! arrives at the next chunk one transfer later. Where transfers are exposed the sender is busy until then too: in a
//! schedule without overlap each micro-batch costs a rank one transfer forward and one backward.
//!
//! Actions are visited in the table's dependency order, so one pass suffices and no queue is needed. Reproduces the
//! closed forms of GPipe and 1F1B, bubble `(p - 1)(F + B)`, and of the interleaved schedule, `(p - 1)(F + B) / v`
//! (arXiv 2104.04473 section 2.2), exactly.

use ir::schedule::{
    Action, Placement, RankTimeline, ScheduleError, Seat, Section, Span, TableShape, Timeline,
    in_dependency_order,
};
use ir::units::Seconds;
use thiserror::Error;

mod branches;
#[cfg(test)]
mod tests;
mod turns;

pub use branches::Branches;
pub use turns::{EXACT, Turns, schedule_totals};

/// Whether a transfer between chunks holds up the rank that sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfers {
    /// The sender waits for it.
    Exposed,
    /// It runs beside computation and only delays the receiver.
    Overlapped,
}

/// Times of a pipeline's parts for one micro-batch, or for each slice of it.
///
/// Where sequences are cut, every list has the slices of a chunk one behind the other in place of the chunk: attention
/// of a later slice takes longer.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineTimes {
    /// Which rank holds which chunk.
    pub placement: Placement,
    /// Slices of every sequence; 1 where they are not cut.
    pub n_slices: u32,
    /// Forward, per chunk.
    pub forward: Vec<Seconds>,
    /// Full backward, per chunk, recomputation included.
    pub backward: Vec<Seconds>,
    /// The two parts of backward, per chunk; nothing for schedules that do not split it.
    pub parts: Option<BackwardParts>,
    /// Transfer between chunk `c` and `c + 1`, either way; one less than chunks.
    pub boundary: Vec<Seconds>,
    /// What is handed on where a model is no chain, in place of all boundaries, which are zero then.
    pub branches: Option<Branches>,
    /// Whether transfers are exposed.
    pub transfers: Transfers,
}

/// Times of the two parts of backward for one micro-batch, per chunk.
#[derive(Clone, Debug, PartialEq)]
pub struct BackwardParts {
    /// As far as the chunk before waits for it.
    pub input: Vec<Seconds>,
    /// The rest.
    pub weight: Vec<Seconds>,
}

/// Why a table cannot be simulated.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SimulateError {
    /// The table itself is wrong.
    #[error(transparent)]
    Table(#[from] ScheduleError),
    /// The times do not fit the table.
    #[error(
        "{n_stages} ranks need times for {n_chunks} chunks of {n_slices} slices and a transfer between neighbours, found \
         {forward} forward, {backward} backward and {boundary} transfers"
    )]
    Lengths {
        /// Pipeline ranks of the table.
        n_stages: usize,
        /// Chunks of the table.
        n_chunks: usize,
        /// Slices of every sequence.
        n_slices: u32,
        /// Forward times.
        forward: usize,
        /// Backward times.
        backward: usize,
        /// Transfer times.
        boundary: usize,
    },
    /// The table splits backward, and the times do not.
    #[error("the table splits backward, but its two parts have no times for every chunk")]
    NoParts,
}

impl PipelineTimes {
    /// Whether there are times for every chunk and slice of a shape; how many there are.
    fn check_lengths(&self, shape: TableShape) -> Result<usize, SimulateError> {
        let TableShape { n_stages, placement, n_slices, .. } = shape;
        let (n_stages, n_chunks) = (n_stages as usize, shape.n_chunks() as usize);
        let n_places = n_chunks * n_slices as usize;
        let fits = n_places > 0
            && (self.placement, self.n_slices) == (placement, n_slices)
            && self.forward.len() == n_places
            && self.backward.len() == n_places
            && self.boundary.len() == n_places - n_slices as usize;
        if !fits {
            let (forward, backward, boundary) =
                (self.forward.len(), self.backward.len(), self.boundary.len());
            return Err(SimulateError::Lengths { n_stages, n_chunks, n_slices, forward, backward, boundary });
        }
        Ok(n_places)
    }

    fn shape(&self, table: &[Vec<Action>]) -> Result<TableShape, SimulateError> {
        let n_micro_batches = table.iter().flatten().map(|action| action.micro_batch + 1).max().unwrap_or(0);
        let n_stages = table.len() as u32;
        let shape =
            TableShape { n_stages, placement: self.placement, n_micro_batches, n_slices: self.n_slices };
        let n_places = self.check_lengths(shape)?;
        let parts = |parts: &BackwardParts| parts.input.len() == n_places && parts.weight.len() == n_places;
        let is_part = |action: &Action| match action.section {
            Section::Forward | Section::Backward => false,
            Section::BackwardInput | Section::BackwardWeight => true,
        };
        if !self.parts.as_ref().is_some_and(parts) && table.iter().flatten().any(is_part) {
            return Err(SimulateError::NoParts);
        }
        Ok(shape)
    }

    /// Place of a slice of a chunk in the lists.
    fn at(&self, (chunk, slice): (usize, u32)) -> usize {
        chunk * self.n_slices as usize + slice as usize
    }

    fn compute(&self, section: Section, place: (usize, u32)) -> Seconds {
        let at = self.at(place);
        let part = |of: fn(&BackwardParts) -> &Vec<Seconds>| {
            self.parts.as_ref().map_or(self.backward[at], |parts| of(parts)[at])
        };
        match section {
            Section::Forward => self.forward[at],
            Section::Backward => self.backward[at],
            Section::BackwardInput => part(|parts| &parts.input),
            Section::BackwardWeight => part(|parts| &parts.weight),
        }
    }

    /// Transfer of an action's result to the chunk that needs it; zero at both ends of the model and where the next
    /// chunk is on the same rank.
    fn send(&self, section: Section, (chunk, slice): (usize, u32), n_stages: u32) -> Seconds {
        let boundary = match section {
            Section::Forward => Some(chunk),
            Section::Backward | Section::BackwardInput => chunk.checked_sub(1),
            Section::BackwardWeight => None,
        };
        let sent = boundary.filter(|&at| {
            let rank = |chunk: usize| self.placement.seat(n_stages, chunk as u32, 0).rank;
            rank(at) != rank(at + 1)
        });
        let time = sent.and_then(|before| self.boundary.get(self.at((before, slice))));
        time.copied().unwrap_or(Seconds::ZERO)
    }

    fn exposed(&self, send: Seconds) -> Seconds {
        match self.transfers {
            Transfers::Exposed => send,
            Transfers::Overlapped => Seconds::ZERO,
        }
    }
}

/// Start and end of every action, makespan, and where each rank's time went.
///
/// Two ranks, two micro-batches, F = 1, B = 2, free transfers, 1F1B: makespan 2 x 3 + 1 x 3 = 9, bubble 3 per rank.
pub fn simulate(table: &[Vec<Action>], times: &PipelineTimes) -> Result<Timeline, SimulateError> {
    let shape = times.shape(table)?;
    let mut ranks: Vec<RankTimeline> = table.iter().map(|row| empty_rank(row.len())).collect();
    let makespan_s = walk(table, shape, times, |span, spent| {
        let rank = &mut ranks[span.action.rank as usize];
        rank.busy_s += spent.busy_s;
        rank.sending_s += spent.sending_s;
        rank.spans.push(span);
    })?;
    for rank in &mut ranks {
        rank.bubble_s = (makespan_s - rank.busy_s - rank.sending_s).max(Seconds::ZERO);
    }
    let extent = |rank: &RankTimeline| match (rank.spans.first(), rank.spans.last()) {
        (Some(first), Some(last)) => last.end_s - first.start_s,
        _ => Seconds::ZERO,
    };
    let period_s = ranks.iter().map(extent).fold(Seconds::ZERO, Seconds::max);
    Ok(Timeline { makespan_s, period_s, ranks })
}

/// What a step's price needs of a timeline, without the spans of a million actions.
#[derive(Clone, Debug, PartialEq)]
pub struct Totals {
    /// Time until every rank can begin the next step by itself.
    pub period_s: Seconds,
    /// Computation and exposed transfers of every rank.
    pub ranks: Vec<RankTotals>,
}

/// Where a rank's time goes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankTotals {
    /// Computation.
    pub busy_s: Seconds,
    /// Exposed transfers.
    pub sending_s: Seconds,
}

/// The same as [`simulate`] says in sums.
///
/// # Errors
/// Where [`simulate`] fails.
pub fn totals(table: &[Vec<Action>], times: &PipelineTimes) -> Result<Totals, SimulateError> {
    let shape = times.shape(table)?;
    let mut ranks = vec![RankTotals::default(); table.len()];
    let mut extents: Vec<Option<(Seconds, Seconds)>> = vec![None; table.len()];
    walk(table, shape, times, |span, spent| {
        let rank = &mut ranks[span.action.rank as usize];
        rank.busy_s += spent.busy_s;
        rank.sending_s += spent.sending_s;
        let extent = extents[span.action.rank as usize].get_or_insert((span.start_s, span.end_s));
        extent.1 = span.end_s;
    })?;
    let length = |(first, last): (Seconds, Seconds)| last - first;
    let period_s = extents.into_iter().flatten().map(length).fold(Seconds::ZERO, Seconds::max);
    Ok(Totals { period_s, ranks })
}

/// The makespan alone, for comparing many candidates.
pub fn makespan(table: &[Vec<Action>], times: &PipelineTimes) -> Result<Seconds, SimulateError> {
    walk(table, times.shape(table)?, times, |_, _| ())
}

fn empty_rank(n_actions: usize) -> RankTimeline {
    RankTimeline {
        spans: Vec::with_capacity(n_actions),
        busy_s: Seconds::ZERO,
        sending_s: Seconds::ZERO,
        bubble_s: Seconds::ZERO,
    }
}

/// Computation of an action, and the transfer of its result.
#[derive(Clone, Copy, Default)]
struct Durations {
    compute: Seconds,
    send: Seconds,
}

/// Durations of every action of some sections, whatever its micro-batch: by rank, virtual stage and slice, then by
/// section.
struct Lengths<const N: usize> {
    shape: TableShape,
    of: Vec<[Durations; N]>,
}

impl<const N: usize> Lengths<N> {
    fn new(times: &PipelineTimes, shape: TableShape, sections: [Section; N]) -> Self {
        let seats =
            (0..shape.n_stages).flat_map(|rank| (0..shape.n_virtual_stages()).map(move |v| (rank, v)));
        let places = seats.flat_map(|(rank, virtual_stage)| {
            let chunk = shape.placement.chunk(shape.n_stages, Seat { rank, virtual_stage }) as usize;
            (0..shape.n_slices).map(move |slice| (chunk, slice))
        });
        let of = |place: (usize, u32)| {
            sections.map(|section| Durations {
                compute: times.compute(section, place),
                send: times.send(section, place, shape.n_stages),
            })
        };
        Self { shape, of: places.map(of).collect() }
    }
}

impl Lengths<4> {
    fn of(&self, action: Action) -> Durations {
        let seat = action.rank * self.shape.n_virtual_stages() + action.virtual_stage;
        self.of[(seat * self.shape.n_slices + action.slice) as usize][action.section as usize]
    }
}

/// In the order of their declaration.
const SECTIONS: [Section; 4] =
    [Section::Forward, Section::Backward, Section::BackwardInput, Section::BackwardWeight];

/// Visits each action once with its span and how its rank spends its time; returns the makespan.
fn walk(
    table: &[Vec<Action>],
    shape: TableShape,
    times: &PipelineTimes,
    mut visit: impl FnMut(Span, RankTotals),
) -> Result<Seconds, SimulateError> {
    if let Some(branches) = &times.branches {
        return branches::walk(table, (shape, branches), times, visit);
    }
    let mut arrival = vec![Seconds::ZERO; shape.n_events()];
    let mut free = vec![Seconds::ZERO; table.len()];
    let mut makespan = Seconds::ZERO;
    let lengths = Lengths::new(times, shape, SECTIONS);
    in_dependency_order(table, shape, |action, needs, yields| {
        // The second part of backward follows the first on its own rank: it does not wait until that has been sent.
        let sent = needs.filter(|_| action.section != Section::BackwardWeight);
        let ready = sent.map_or(Seconds::ZERO, |needed| arrival[needed]);
        let start_s = free[action.rank as usize].max(ready);
        let Durations { compute, send } = lengths.of(action);
        let end_s = start_s + compute;
        let sending_s = times.exposed(send);
        // The last chunk's forward goes to its own backward: `send` is zero there.
        arrival[yields] = end_s + send;
        free[action.rank as usize] = end_s + sending_s;
        makespan = makespan.max(end_s);
        visit(Span { action, start_s, end_s }, RankTotals { busy_s: compute, sending_s });
    })?;
    Ok(makespan)
}

/// Bounds are lowered by this part.
const ROUNDING: f64 = 1e-9;

/// A time below which no table of this placement can end, whatever its order. Takes time in proportion to the chunks.
///
/// For each rank: the first micro-batch must come through the chunks before its first one, `c`; then the rank has its
/// chunks' work (and its own exposed transfers, but for the last); then the last gradient must go back to chunk 0:
/// `sum_{i<c} (F + t) + m sum_{i on rank} (F + B + sends) + sum_{i<c} (B + t)`. No shorter than one micro-batch alone.
/// Equal to the makespan of GPipe, 1F1B and the interleaved schedule where chunks are equal and transfers free. Where
/// backward is split, weights may come after the last gradient, so the way back does not count. Of slices, the first is
/// the first on the way in and the last on the way back.
///
/// Lowered by one part in 10^9, far more than rounding can add. Zero where the times do not fit the ranks.
pub fn lower_bound(n_stages: u32, n_micro_batches: u32, times: &PipelineTimes) -> Seconds {
    let n_chunks = times.placement.n_chunks(n_stages) as usize;
    let n_places = n_chunks * times.n_slices as usize;
    if n_places == 0 || times.forward.len() != n_places || times.backward.len() != n_places {
        return Seconds::ZERO;
    }
    let gradient = if times.parts.is_some() { Section::BackwardInput } else { Section::Backward };
    let send = |section, chunk| times.send(section, (chunk, 0), n_stages);
    let compute = |section, chunk| times.compute(section, (chunk, 0));
    let mut bound = Seconds::ZERO;
    let ways_in =
        summed_before(n_chunks, |chunk| compute(Section::Forward, chunk) + send(Section::Forward, chunk));
    let ways_out = summed_before(n_chunks, |chunk| {
        compute(Section::Backward, chunk) + send(Section::Backward, chunk + 1)
    });
    for rank in 0..n_stages {
        let work = rank_work(n_stages, rank, n_micro_batches, times);
        if times.branches.is_some() {
            // Which way in and out is the longest is not looked for.
            bound = bound.max(work);
            continue;
        }
        let first = times.placement.chunks_of(n_stages, rank).min().unwrap_or(0) as usize;
        let (way_in, way_out) = (ways_in[first], ways_out[first]);
        let (last_send, way_out) = match times.parts {
            // The rank's last send is part of the way out.
            None => (times.exposed(send(Section::Backward, first)), way_out),
            Some(_) => (
                times.exposed(send(Section::Forward, 0)).max(times.exposed(send(gradient, first))),
                Seconds::ZERO,
            ),
        };
        bound = bound.max(way_in + work - last_send + way_out);
    }
    if times.branches.is_some() {
        return bound * (1.0 - ROUNDING);
    }
    let alone: Seconds = (0..n_chunks)
        .map(|chunk| {
            let both_ways = send(Section::Forward, chunk) * 2.0;
            compute(Section::Forward, chunk) + compute(gradient, chunk) + both_ways
        })
        .sum();
    bound.max(alone) * (1.0 - ROUNDING)
}

/// A time below which no table of this placement repeats ([`Totals::period_s`]), whatever its order, whichever rank
/// begins or ends it: what the busiest rank computes and waits for its transfers, but for the last. Lowered as
/// [`lower_bound`] is; zero where the times do not fit the ranks.
pub fn busiest(n_stages: u32, n_micro_batches: u32, times: &PipelineTimes) -> Seconds {
    let n_places = times.placement.n_chunks(n_stages) as usize * times.n_slices as usize;
    if n_places == 0 || times.forward.len() != n_places || times.backward.len() != n_places {
        return Seconds::ZERO;
    }
    let last_send = times.boundary.iter().map(|&send| times.exposed(send)).fold(Seconds::ZERO, Seconds::max);
    let of_rank = |rank| rank_work(n_stages, rank, n_micro_batches, times) - last_send;
    (0..n_stages).map(of_rank).fold(Seconds::ZERO, Seconds::max) * (1.0 - ROUNDING)
}

/// Per chunk, the sum of what those before it take.
fn summed_before(n_chunks: usize, of: impl Fn(usize) -> Seconds) -> Vec<Seconds> {
    let add = |sum: &mut Seconds, chunk| {
        let before = *sum;
        *sum += of(chunk);
        Some(before)
    };
    (0..n_chunks).scan(Seconds::ZERO, add).collect()
}

/// Computation and exposed transfers of one rank's chunks; computation alone where these are branched.
fn rank_work(n_stages: u32, rank: u32, n_micro_batches: u32, times: &PipelineTimes) -> Seconds {
    let share = f64::from(n_micro_batches / times.placement.n_copies());
    let chunks = times.placement.chunks_of(n_stages, rank);
    let places = chunks.flat_map(|chunk| (0..times.n_slices).map(move |slice| (chunk as usize, slice)));
    let work = |place: (usize, u32)| {
        let sends =
            times.send(Section::Forward, place, n_stages) + times.send(Section::Backward, place, n_stages);
        let at = times.at(place);
        let backward = match &times.parts {
            None => times.backward[at],
            Some(parts) => times.backward[at].min(parts.input[at] + parts.weight[at]),
        };
        times.forward[at] + backward + times.exposed(sends)
    };
    let per_micro_batch: Seconds = places.map(work).sum();
    per_micro_batch * share
}
