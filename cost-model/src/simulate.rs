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
    Action, RankTimeline, ScheduleError, Section, Span, TableShape, Timeline, dependency_order,
};
use ir::units::Seconds;
use thiserror::Error;

/// Whether a transfer between chunks holds up the rank that sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfers {
    /// The sender waits for it.
    Exposed,
    /// It runs beside computation and only delays the receiver.
    Overlapped,
}

/// Times of a pipeline's parts for one micro-batch. Chunk `c` runs on rank `c % n_stages`.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineTimes {
    /// Forward, per chunk.
    pub forward: Vec<Seconds>,
    /// Full backward, per chunk, recomputation included.
    pub backward: Vec<Seconds>,
    /// Transfer between chunk `c` and `c + 1`, either way; one less than chunks.
    pub boundary: Vec<Seconds>,
    /// Whether transfers are exposed.
    pub transfers: Transfers,
}

/// Why a table cannot be simulated.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SimulateError {
    /// The table itself is wrong.
    #[error(transparent)]
    Table(#[from] ScheduleError),
    /// The times do not fit the table.
    #[error(
        "{n_stages} ranks need times for a multiple of {n_stages} chunks and a transfer between neighbours, found \
         {forward} forward, {backward} backward and {boundary} transfers"
    )]
    Lengths {
        /// Pipeline ranks of the table.
        n_stages: usize,
        /// Forward times.
        forward: usize,
        /// Backward times.
        backward: usize,
        /// Transfer times.
        boundary: usize,
    },
}

impl PipelineTimes {
    fn shape(&self, table: &[Vec<Action>]) -> Result<TableShape, SimulateError> {
        let (n_stages, n_chunks) = (table.len(), self.forward.len());
        let fits = n_stages > 0
            && n_chunks > 0
            && n_chunks.is_multiple_of(n_stages)
            && self.backward.len() == n_chunks
            && self.boundary.len() == n_chunks - 1;
        if !fits {
            let (backward, boundary) = (self.backward.len(), self.boundary.len());
            return Err(SimulateError::Lengths { n_stages, forward: n_chunks, backward, boundary });
        }
        let n_virtual_stages = n_chunks / n_stages;
        let n_micro_batches = table[0].len() / (2 * n_virtual_stages);
        Ok(TableShape {
            n_stages: n_stages as u32,
            n_virtual_stages: n_virtual_stages as u32,
            n_micro_batches: n_micro_batches as u32,
        })
    }

    fn compute(&self, section: Section, chunk: usize) -> Seconds {
        match section {
            Section::Forward => self.forward[chunk],
            Section::Backward => self.backward[chunk],
        }
    }

    /// Transfer of an action's result to the chunk that needs it; zero at both ends of the model.
    fn send(&self, section: Section, chunk: usize) -> Seconds {
        let boundary = match section {
            Section::Forward => Some(chunk),
            Section::Backward => chunk.checked_sub(1),
        };
        boundary.and_then(|at| self.boundary.get(at)).copied().unwrap_or(Seconds::ZERO)
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
    let makespan_s = walk(table, shape, times, |span, sending| {
        let rank = &mut ranks[span.action.rank as usize];
        rank.busy_s += times.compute(span.action.section, span.action.chunk(shape.n_stages) as usize);
        rank.sending_s += sending;
        rank.spans.push(span);
    })?;
    for rank in &mut ranks {
        rank.bubble_s = (makespan_s - rank.busy_s - rank.sending_s).max(Seconds::ZERO);
    }
    Ok(Timeline { makespan_s, ranks })
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

/// Visits each action once with its span and the time its rank then spends sending; returns the makespan.
fn walk(
    table: &[Vec<Action>],
    shape: TableShape,
    times: &PipelineTimes,
    mut visit: impl FnMut(Span, Seconds),
) -> Result<Seconds, SimulateError> {
    let order = dependency_order(table, shape)?;
    let mut arrival = vec![Seconds::ZERO; order.len()];
    let mut free = vec![Seconds::ZERO; table.len()];
    let mut makespan = Seconds::ZERO;
    for action in order {
        let chunk = action.chunk(shape.n_stages) as usize;
        let ready = shape.needs(action).map_or(Seconds::ZERO, |needed| arrival[shape.index(needed)]);
        let start_s = free[action.rank as usize].max(ready);
        let end_s = start_s + times.compute(action.section, chunk);
        let send = times.send(action.section, chunk);
        let sending = times.exposed(send);
        // The last chunk's forward goes to its own backward: `send` is zero there.
        arrival[shape.index(action)] = end_s + send;
        free[action.rank as usize] = end_s + sending;
        makespan = makespan.max(end_s);
        visit(Span { action, start_s, end_s }, sending);
    }
    Ok(makespan)
}

/// A time below which no table of this shape can end, whatever its order. Takes time in proportion to the chunks.
///
/// For each rank `r`: the first micro-batch must come through the chunks before `r`; then the rank has `m` times its
/// chunks' work (and its own exposed transfers, but for the last); then the last backward must go back to chunk 0:
/// `sum_{c<r} (F + t) + m sum_{c on r} (F + B + sends) + sum_{c<r} (B + t)`. No shorter than one micro-batch alone.
/// Equal to the makespan of GPipe, 1F1B and the interleaved schedule where chunks are equal and transfers free.
///
/// Lowered by one part in 10^9, far more than rounding can add. Zero where the times do not fit the ranks.
pub fn lower_bound(n_stages: usize, n_micro_batches: u32, times: &PipelineTimes) -> Seconds {
    const ROUNDING: f64 = 1e-9;
    let n_chunks = times.forward.len();
    if n_stages == 0 || n_chunks < n_stages || times.backward.len() != n_chunks {
        return Seconds::ZERO;
    }
    let mut way_in = Seconds::ZERO;
    let mut way_out = Seconds::ZERO;
    let mut bound = Seconds::ZERO;
    for rank in 0..n_stages {
        let work = rank_work(rank, n_stages, f64::from(n_micro_batches), times);
        // The rank's last send is part of the way out.
        let last_send = times.exposed(times.send(Section::Backward, rank));
        bound = bound.max(way_in + work - last_send + way_out);
        way_in += times.forward[rank] + times.send(Section::Forward, rank);
        way_out += times.backward[rank] + times.send(Section::Backward, rank + 1);
    }
    let alone: Seconds = (0..n_chunks)
        .map(|chunk| {
            let both_ways = times.send(Section::Forward, chunk) * 2.0;
            times.forward[chunk] + times.backward[chunk] + both_ways
        })
        .sum();
    bound.max(alone) * (1.0 - ROUNDING)
}

/// Computation and exposed transfers of one rank's chunks.
fn rank_work(rank: usize, n_stages: usize, n_micro_batches: f64, times: &PipelineTimes) -> Seconds {
    let chunks = (rank..times.forward.len()).step_by(n_stages);
    let per_micro_batch: Seconds = chunks
        .map(|chunk| {
            let sends = times.send(Section::Forward, chunk) + times.send(Section::Backward, chunk);
            times.forward[chunk] + times.backward[chunk] + times.exposed(sends)
        })
        .sum();
    per_micro_batch * n_micro_batches
}

#[cfg(test)]
mod tests {
    use ir::schedule::{Schedule, table};
    use proptest::prelude::*;

    use super::*;

    fn schedule(virtual_stages: u32) -> Schedule {
        if virtual_stages == 1 { Schedule::OneFOneB } else { Schedule::Interleaved { virtual_stages } }
    }

    /// Every chunk F = 1, B = 2, every transfer `boundary`.
    fn unit(n_chunks: u32, boundary: f64, transfers: Transfers) -> PipelineTimes {
        let n_chunks = n_chunks as usize;
        PipelineTimes {
            forward: vec![Seconds(1.0); n_chunks],
            backward: vec![Seconds(2.0); n_chunks],
            boundary: vec![Seconds(boundary); n_chunks - 1],
            transfers,
        }
    }

    fn check_bubble(schedule: Schedule, p: u32, m: u32) {
        let v = schedule.n_virtual_stages();
        let times = unit(p * v, 0.0, Transfers::Overlapped);
        let timeline = simulate(&table(schedule, p, m).unwrap(), &times).unwrap();
        // A chunk's F + B is 3, so a stage's is 3 v and the bubble (p - 1) 3 v / v.
        let work = f64::from(m * 3 * v);
        assert_eq!(timeline.makespan_s.0, work + f64::from((p - 1) * 3), "{schedule} p={p} m={m}");
        for rank in &timeline.ranks {
            assert_eq!((rank.busy_s.0, rank.bubble_s.0), (work, f64::from((p - 1) * 3)));
        }
        let bound = lower_bound(p as usize, m, &times).0 / timeline.makespan_s.0;
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

    #[test]
    fn exposed_transfers_cost_a_rank_two_per_micro_batch() {
        let times = |transfers| unit(2, 0.25, transfers);
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
        let mut times = unit(3, 0.0, Transfers::Overlapped);
        times.forward[1] = Seconds(10.0);
        let makespan = makespan(&table(Schedule::OneFOneB, 3, 10).unwrap(), &times).unwrap();
        // One forward in, ten times 12 in the middle, one backward out, as the last rank's 3 hides between.
        assert!((123.0..126.5).contains(&makespan.0), "{makespan:?}");
    }

    #[test]
    fn times_that_do_not_fit_are_an_error() {
        let rows = table(Schedule::OneFOneB, 4, 8).unwrap();
        let error = simulate(&rows, &unit(6, 0.0, Transfers::Exposed)).unwrap_err();
        insta::assert_snapshot!(error, @"4 ranks need times for a multiple of 4 chunks and a transfer between neighbours, found 6 forward, 6 backward and 5 transfers");
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
            let (m, n_chunks) = (p * groups, (p * schedule.n_virtual_stages()) as usize);
            let times = PipelineTimes {
                forward: times[..n_chunks].iter().map(|time| Seconds(time.0)).collect(),
                backward: times[..n_chunks].iter().map(|time| Seconds(time.1)).collect(),
                boundary: times[1..n_chunks].iter().map(|time| Seconds(time.2)).collect(),
                transfers: if exposed { Transfers::Exposed } else { Transfers::Overlapped },
            };
            let rows = table(schedule, p, m).unwrap();
            let timeline = simulate(&rows, &times).unwrap();
            prop_assert!(lower_bound(p as usize, m, &times) <= timeline.makespan_s);
            prop_assert_eq!(makespan(&rows, &times).unwrap(), timeline.makespan_s);
            for rank in &timeline.ranks {
                let parts = rank.busy_s + rank.sending_s + rank.bubble_s;
                prop_assert!((parts.0 - timeline.makespan_s.0).abs() <= 1e-9 * timeline.makespan_s.0);
            }
        }
    }
}
