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
/// Where sequences are cut, every list has the slices of a chunk one behind the other in place of the chunk: attention of
/// a later slice takes longer.
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
    /// What is handed on where a model is no chain, in place of all boundaries.
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

    /// Transfer of an action's result to the chunk that needs it; zero at both ends of the model and where the next chunk
    /// is on the same rank.
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

/// Durations of every action of some sections, whatever its micro-batch: by rank, virtual stage and slice, then by section.
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
    const ROUNDING: f64 = 1e-9;
    let n_chunks = times.placement.n_chunks(n_stages) as usize;
    let n_places = n_chunks * times.n_slices as usize;
    if n_places == 0 || times.forward.len() != n_places || times.backward.len() != n_places {
        return Seconds::ZERO;
    }
    let gradient = if times.parts.is_some() { Section::BackwardInput } else { Section::Backward };
    let send = |section, chunk| times.send(section, (chunk, 0), n_stages);
    let compute = |section, chunk| times.compute(section, (chunk, 0));
    let mut bound = Seconds::ZERO;
    if times.branches.is_some() {
        // Which way is the longest is not looked for: what a rank works alone.
        for rank in 0..n_stages {
            let chunks = times.placement.chunks_of(n_stages, rank);
            bound = bound.max(computed(&chunks, n_micro_batches, times));
        }
        return bound * (1.0 - ROUNDING);
    }
    for rank in 0..n_stages {
        let chunks = times.placement.chunks_of(n_stages, rank);
        let first = chunks.iter().copied().min().unwrap_or(0) as usize;
        let way_in: Seconds =
            (0..first).map(|c| compute(Section::Forward, c) + send(Section::Forward, c)).sum();
        let way_out: Seconds =
            (0..first).map(|c| compute(Section::Backward, c) + send(Section::Backward, c + 1)).sum();
        let work = rank_work(&chunks, n_stages, n_micro_batches, times);
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
    let alone: Seconds = (0..n_chunks)
        .map(|chunk| {
            let both_ways = send(Section::Forward, chunk) * 2.0;
            compute(Section::Forward, chunk) + compute(gradient, chunk) + both_ways
        })
        .sum();
    bound.max(alone) * (1.0 - ROUNDING)
}

/// Computation of one rank's chunks.
fn computed(chunks: &[u32], n_micro_batches: u32, times: &PipelineTimes) -> Seconds {
    let free = PipelineTimes { transfers: Transfers::Overlapped, ..times.clone() };
    rank_work(chunks, 1, n_micro_batches, &free)
}

/// Computation and exposed transfers of one rank's chunks.
fn rank_work(chunks: &[u32], n_stages: u32, n_micro_batches: u32, times: &PipelineTimes) -> Seconds {
    let share = f64::from(n_micro_batches / times.placement.n_copies());
    let places =
        chunks.iter().flat_map(|&chunk| (0..times.n_slices).map(move |slice| (chunk as usize, slice)));
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

#[cfg(test)]
mod tests {
    use ir::schedule::{Schedule, table};
    use proptest::prelude::*;

    use super::*;

    fn schedule(virtual_stages: u32) -> Schedule {
        if virtual_stages == 1 { Schedule::OneFOneB } else { Schedule::Interleaved { virtual_stages } }
    }

    const ONE: Placement = Placement::Looped { virtual_stages: 1 };

    /// Every chunk F = 1, B = 2, every transfer `boundary`.
    fn unit(p: u32, placement: Placement, boundary: f64, transfers: Transfers) -> PipelineTimes {
        let n_chunks = placement.n_chunks(p) as usize;
        PipelineTimes {
            placement,
            n_slices: 1,
            forward: vec![Seconds(1.0); n_chunks],
            backward: vec![Seconds(2.0); n_chunks],
            parts: None,
            boundary: vec![Seconds(boundary); n_chunks - 1],
            branches: None,
            transfers,
        }
    }

    /// The same chunks as a graph.
    fn graph(times: &PipelineTimes, pairs: &[(u32, u32)], transfer: f64) -> PipelineTimes {
        let transfers = pairs.iter().map(|&pair| (pair, vec![Seconds(transfer)])).collect();
        PipelineTimes {
            boundary: vec![Seconds::ZERO; times.boundary.len()],
            branches: Some(Branches::new(times.forward.len(), transfers)),
            ..times.clone()
        }
    }

    /// A chain is a graph too.
    #[test]
    fn a_chain_as_a_graph_takes_as_long() {
        for schedule in
            [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1, Schedule::ZbV, Schedule::Chimera]
        {
            for transfers in [Transfers::Exposed, Transfers::Overlapped] {
                let table = table(schedule, 4, 6).unwrap();
                let mut chain = unit(4, schedule.placement(), 0.25, transfers);
                let n = chain.forward.len();
                chain.parts =
                    Some(BackwardParts { input: vec![Seconds(1.0); n], weight: vec![Seconds(1.0); n] });
                let pairs: Vec<(u32, u32)> = (1..n as u32).map(|to| (to - 1, to)).collect();
                let spans = |times: &PipelineTimes| {
                    let ranks = simulate(&table, times).unwrap().ranks;
                    ranks.iter().map(|rank| (rank.sending_s, rank.spans.clone())).collect::<Vec<_>>()
                };
                assert!(spans(&chain) == spans(&graph(&chain, &pairs, 0.25)), "{schedule} {transfers:?}");
            }
        }
    }

    /// Chunks 0 and 1, and 2 and 3 beside them, meet in 4: three chunks fill the pipeline instead of five.
    #[test]
    fn branches_fill_a_pipeline_side_by_side() {
        let times = unit(5, ONE, 0.0, Transfers::Overlapped);
        let joined = graph(&times, &[(0, 1), (1, 4), (2, 3), (3, 4)], 0.0);
        for schedule in [Schedule::GPipe, Schedule::OneFOneB] {
            let table = table(schedule, 5, 8).unwrap();
            let [chain, branched] = [&times, &joined].map(|times| makespan(&table, times).unwrap().0);
            assert_eq!((chain, branched), (8.0 * 3.0 + 4.0 * 3.0, 8.0 * 3.0 + 2.0 * 3.0), "{schedule}");
            let bound = lower_bound(5, 8, &joined).0;
            assert!(bound <= branched && bound > 0.9 * 8.0 * 3.0, "{bound}");
        }
    }

    fn check_bubble(schedule: Schedule, p: u32, m: u32) {
        let v = schedule.n_virtual_stages();
        let times = unit(p, schedule.placement(), 0.0, Transfers::Overlapped);
        let timeline = simulate(&table(schedule, p, m).unwrap(), &times).unwrap();
        // A chunk's F + B is 3, so a stage's is 3 v and the bubble (p - 1) 3 v / v.
        let work = f64::from(m * 3 * v);
        assert_eq!(timeline.makespan_s.0, work + f64::from((p - 1) * 3), "{schedule} p={p} m={m}");
        for rank in &timeline.ranks {
            assert_eq!((rank.busy_s.0, rank.bubble_s.0), (work, f64::from((p - 1) * 3)));
        }
        let bound = lower_bound(p, m, &times).0 / timeline.makespan_s.0;
        assert!((1.0 - 1e-8..1.0).contains(&bound), "{schedule} p={p} m={m}: {bound}");
    }

    #[test]
    fn closed_forms_of_the_bubble_are_exact() {
        for (p, m, v) in
            [(4, 8, 1), (8, 8, 1), (8, 32, 1), (8, 16, 2), (8, 32, 4), (4, 8, 3), (35, 280, 3), (16, 64, 4)]
        {
            check_bubble(schedule(v), p, m);
            check_bubble(Schedule::GPipe, p, m);
        }
    }

    /// Free transfers, and every chunk takes F forward, I back to its input, W back to its weights, I + W in one.
    fn costs(p: u32, schedule: Schedule, [forward, input, weight]: [f64; 3]) -> PipelineTimes {
        let placement = schedule.placement();
        let each = |cost| vec![Seconds(cost); placement.n_chunks(p) as usize];
        let parts = BackwardParts { input: each(input), weight: each(weight) };
        PipelineTimes {
            placement,
            n_slices: 1,
            forward: each(forward),
            backward: each(input + weight),
            parts: Some(parts),
            boundary: vec![Seconds::ZERO; placement.n_chunks(p) as usize - 1],
            branches: None,
            transfers: Transfers::Overlapped,
        }
    }

    /// Idle time of every rank in a step where ranks go on by themselves, and where all wait for the slowest.
    fn bubbles(schedule: Schedule, (p, m): (u32, u32), costs_of: [f64; 3]) -> (f64, f64) {
        let times = costs(p, schedule, costs_of);
        let timeline = simulate(&table(schedule, p, m).unwrap(), &times).unwrap();
        assert!(lower_bound(p, m, &times) <= timeline.makespan_s, "{schedule} p={p} m={m}");
        let busy = timeline.ranks[0].busy_s;
        timeline.ranks.iter().for_each(|rank| assert!((rank.busy_s.0 - busy.0).abs() < 1e-9));
        ((timeline.period_s - busy).0, (timeline.makespan_s - busy).0)
    }

    const SHAPES: [(u32, u32); 8] = [(2, 4), (2, 8), (3, 9), (4, 8), (4, 16), (6, 24), (8, 16), (8, 32)];
    const EQUAL: [f64; 3] = [1.0, 1.0, 1.0];

    /// arXiv 2401.10241 table 2: ZB-H1 `(p - 1)(F + B - W)`, ZB-H2 `(p - 1)(F + B - 2 W)`, the latter where ranks go on
    /// to the next step by themselves.
    #[test]
    fn closed_forms_of_zb_h1_and_zb_h2_are_exact() {
        for (p, m) in SHAPES {
            for [f, b, w] in [EQUAL, [3.0, 3.5, 2.5], [1.0, 1.25, 0.75]] {
                let times = f64::from(p - 1);
                assert_eq!(bubbles(Schedule::ZbH1, (p, m), [f, b, w]).1, times * (f + b - w), "p={p} m={m}");
                assert_eq!(
                    bubbles(Schedule::ZbH2, (p, m), [f, b, w]).0,
                    times * (f + b - 2.0 * w),
                    "p={p} m={m}"
                );
            }
        }
    }

    /// arXiv 2405.15362 table 1 in units of equal chunk actions, 1F1B having `6 (p - 1)`: ZB-V close to none, V-Half half
    /// and V-Min two thirds of it. ZB-V's `p - 1` is what a V cannot avoid where all ranks end together: the last rank
    /// begins `p - 1` forwards late.
    #[test]
    fn bubbles_of_the_v_shaped_schedules_are_those_published() {
        for (p, m) in SHAPES {
            let whole = 6.0 * f64::from(p - 1);
            let of = |schedule| bubbles(schedule, (p, m), EQUAL).1;
            assert_eq!(of(Schedule::ZbV), f64::from(p - 1), "p={p} m={m}");
            assert!(of(Schedule::VHalf) <= 0.5 * whole, "p={p} m={m}: {}", of(Schedule::VHalf));
            let reorder = if p.is_multiple_of(3) { 2.0 } else { 0.0 };
            assert!(of(Schedule::VMin) <= 2.0 / 3.0 * whole + reorder, "p={p} m={m}: {}", of(Schedule::VMin));
        }
    }

    /// `deepseek-ai/DualPipe` README without overlap, so that F&B = F + B: `(p - 1)(F + 2 B - 3 W)` for chunks; here less,
    /// `(p - 1)(F + B - 2 W)` for equal parts, B being both parts.
    #[test]
    fn the_bubble_of_dualpipe_v_is_below_the_one_published() {
        for (p, m) in SHAPES {
            let times = f64::from(p - 1);
            assert_eq!(bubbles(Schedule::DualPipeV, (p, m), EQUAL).1, times * 1.0, "p={p} m={m}");
            for [f, i, w] in [[3.0, 4.0, 2.0], [1.0, 1.5, 0.5]] {
                let published = times * (f + 2.0 * (i + w) - 3.0 * w);
                assert!(bubbles(Schedule::DualPipeV, (p, m), [f, i, w]).1 <= published, "p={p} m={m}");
            }
        }
    }

    /// arXiv 2107.06925 table 2, ratio `(p - 2) / (2 m + p - 2)` where forward and backward take equal time; and arXiv
    /// 2308.15762: `(p - 1)(F + B) / (2 w)` of whole stages.
    #[test]
    fn closed_forms_of_chimera_and_hanayo_are_exact() {
        let even = [1.0, 0.5, 0.5];
        for (p, m) in SHAPES {
            if p.is_multiple_of(2) {
                let (bubble, m, p) = (bubbles(Schedule::Chimera, (p, m), even).1, f64::from(m), f64::from(p));
                assert_eq!(bubble / (2.0 * m + bubble), (p - 2.0) / (2.0 * m + p - 2.0), "p={p} m={m}");
            }
            let waves = |waves| Schedule::Hanayo { waves };
            assert_eq!(bubbles(waves(1), (p, m), even).1, f64::from(2 * (p - 1)), "p={p} m={m}");
            for n in 1..=3 {
                assert_eq!(bubbles(waves(n), (p, p), even).1, f64::from(2 * (p - 1)), "p={p} w={n}");
            }
        }
    }

    /// DAPPLE (arXiv 2007.01045 section 5): more warm-up changes nothing while transfers are free. Breadth-first (arXiv
    /// 2211.05953 section 4.1): `(p - 1)(F + B) / v` of whole stages, for any number of micro-batches.
    #[test]
    fn closed_forms_of_eager_dapple_and_breadth_first_are_exact() {
        for (p, m) in SHAPES {
            let whole = f64::from(p - 1) * 3.0;
            assert_eq!(bubbles(Schedule::Eager, (p, m), EQUAL).1, whole, "p={p} m={m}");
            assert_eq!(bubbles(Schedule::Dapple { warm_up: p }, (p, m), EQUAL).1, whole, "p={p} m={m}");
            for virtual_stages in 1..=3 {
                let schedule = Schedule::BreadthFirst { virtual_stages };
                assert_eq!(bubbles(schedule, (p, m), EQUAL).1, whole, "p={p} m={m} v={virtual_stages}");
            }
        }
    }

    /// Every slice of a chunk takes its share of F = 1 and B = 2; transfers are free.
    fn sliced(p: u32, shares: &[f64]) -> PipelineTimes {
        let each =
            |whole: f64| (0..p).flat_map(|_| shares.iter().map(|share| Seconds(whole * share))).collect();
        PipelineTimes {
            n_slices: shares.len() as u32,
            forward: each(1.0),
            backward: each(2.0),
            boundary: vec![Seconds::ZERO; (p as usize - 1) * shares.len()],
            branches: None,
            ..unit(p, ONE, 0.0, Transfers::Overlapped)
        }
    }

    fn makespan_of(schedule: Schedule, (p, m): (u32, u32), shares: &[f64]) -> f64 {
        let (rows, times) = (table(schedule, p, m).unwrap(), sliced(p, shares));
        let timeline = simulate(&rows, &times).unwrap();
        assert!(lower_bound(p, m, &times) <= timeline.makespan_s, "{schedule} p={p} m={m}");
        timeline.makespan_s.0
    }

    /// arXiv 2406.03488 section 3.2 and 2102.07988 equation 1, equal slices: 1F1B's and GPipe's bubble, with m k units of a
    /// k-th: `(p - 1)(F + B) / k`.
    #[test]
    fn closed_forms_of_slices_are_exact() {
        for (p, m) in SHAPES.into_iter().chain([(4, 1), (8, 3)]) {
            for k in [2, 4, 8] {
                let shares = vec![1.0 / f64::from(k); k as usize];
                let expected = 3.0 * f64::from(m) + 3.0 * f64::from(p - 1) / f64::from(k);
                for schedule in [Schedule::Seq1F1B { slices: k }, Schedule::TeraPipe { slices: k }] {
                    assert_eq!(makespan_of(schedule, (p, m), &shares), expected, "{schedule} p={p} m={m}");
                }
            }
        }
    }

    /// arXiv 2102.07988 equation 5: the forward of unequal slices takes their sum, and the longest `p - 1` times again; and
    /// as much backward.
    #[test]
    fn terapipe_waits_for_the_longest_slice() {
        for (p, m) in SHAPES {
            let shares = [0.5, 0.25, 0.25];
            let time = makespan_of(Schedule::TeraPipe { slices: 3 }, (p, m), &shares);
            assert_eq!(time, 3.0 * f64::from(m) + 3.0 * 0.5 * f64::from(p - 1), "p={p} m={m}");
        }
    }

    #[test]
    fn eager_1f1b_hides_transfers_that_1f1b_waits_for() {
        let time = |schedule: Schedule| {
            let times = unit(4, schedule.placement(), 1.0, Transfers::Overlapped);
            makespan(&table(schedule, 4, 16).unwrap(), &times).unwrap()
        };
        assert!(time(Schedule::Eager) < time(Schedule::OneFOneB));
    }

    #[test]
    fn a_split_backward_without_times_of_its_parts_is_an_error() {
        let rows = table(Schedule::ZbH1, 2, 4).unwrap();
        let times = unit(2, ONE, 0.0, Transfers::Exposed);
        assert_eq!(simulate(&rows, &times), Err(SimulateError::NoParts));
    }

    #[test]
    fn exposed_transfers_cost_a_rank_two_per_micro_batch() {
        let times = |transfers| unit(2, ONE, 0.25, transfers);
        let rows = table(Schedule::OneFOneB, 2, 8).unwrap();
        let exposed = simulate(&rows, &times(Transfers::Exposed)).unwrap();
        assert_eq!(exposed.ranks[0].sending_s.0, 8.0 * 0.25);
        assert_eq!(exposed.ranks[1].sending_s.0, 8.0 * 0.25);
        let overlapped = simulate(&rows, &times(Transfers::Overlapped)).unwrap();
        assert_eq!(overlapped.ranks[0].sending_s.0, 0.0);
        assert!(overlapped.makespan_s < exposed.makespan_s);
        for rank in &exposed.ranks {
            assert_eq!(rank.busy_s + rank.sending_s + rank.bubble_s, exposed.makespan_s);
        }
    }

    #[test]
    fn the_slowest_stage_sets_the_pace() {
        let mut times = unit(3, ONE, 0.0, Transfers::Overlapped);
        times.forward[1] = Seconds(10.0);
        let makespan = makespan(&table(Schedule::OneFOneB, 3, 10).unwrap(), &times).unwrap();
        // One forward in, ten times 12 in the middle, one backward out, as the last rank's 3 hides between.
        assert!((123.0..126.5).contains(&makespan.0), "{makespan:?}");
    }

    #[test]
    fn times_that_do_not_fit_are_an_error() {
        let rows = table(Schedule::OneFOneB, 4, 8).unwrap();
        let error = simulate(&rows, &unit(6, ONE, 0.0, Transfers::Exposed)).unwrap_err();
        insta::assert_snapshot!(error, @"4 ranks need times for 4 chunks of 1 slices and a transfer between neighbours, found 6 forward, 6 backward and 5 transfers");
    }

    proptest! {
        #[test]
        fn the_bound_never_exceeds_the_simulated_time(
            p in 1..6_u32,
            groups in 1..5_u32,
            v in 1..4_u32,
            times in proptest::collection::vec((0.0..3.0_f64, 0.0..3.0_f64, 0.0..1.0_f64), 18),
            exposed in proptest::bool::ANY,
            gpipe in proptest::bool::ANY,
        ) {
            let schedule = if gpipe { Schedule::GPipe } else { schedule(v) };
            let (m, n_chunks) = (p * groups, schedule.placement().n_chunks(p) as usize);
            let times = PipelineTimes {
                placement: schedule.placement(),
                n_slices: 1,
                parts: None,
                forward: times[..n_chunks].iter().map(|time| Seconds(time.0)).collect(),
                backward: times[..n_chunks].iter().map(|time| Seconds(time.1)).collect(),
                boundary: times[1..n_chunks].iter().map(|time| Seconds(time.2)).collect(),
                branches: None,
                transfers: if exposed { Transfers::Exposed } else { Transfers::Overlapped },
            };
            let rows = table(schedule, p, m).unwrap();
            let timeline = simulate(&rows, &times).unwrap();
            prop_assert!(lower_bound(p, m, &times) <= timeline.makespan_s);
            prop_assert_eq!(makespan(&rows, &times).unwrap(), timeline.makespan_s);
            let sums = |rank: &RankTimeline| RankTotals { busy_s: rank.busy_s, sending_s: rank.sending_s };
            let summed = Totals {
                period_s: timeline.period_s,
                ranks: timeline.ranks.iter().map(sums).collect(),
            };
            prop_assert_eq!(totals(&rows, &times).unwrap(), summed);
            for rank in &timeline.ranks {
                let parts = rank.busy_s + rank.sending_s + rank.bubble_s;
                prop_assert!((parts.0 - timeline.makespan_s.0).abs() <= 1e-9 * timeline.makespan_s.0);
            }
        }
    }
}
