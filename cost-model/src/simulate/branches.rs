//! When actions run where a model is no chain: a chunk waits for all that it reads, and for nothing else.

use std::collections::BTreeMap;

use ir::schedule::{Action, ChunkGraph, Section, Span, TableShape, in_graph_order};
use ir::units::Seconds;

use super::{PipelineTimes, RankTotals, SECTIONS, SimulateError};

/// Streams between any chunks, for one micro-batch or for each slice of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Branches {
    /// Which chunks hand streams to which.
    pub graph: ChunkGraph,
    /// Transfer from a chunk to a later one, either way, per slice.
    pub transfers: BTreeMap<(u32, u32), Vec<Seconds>>,
}

impl Branches {
    /// Of pairs of chunks and the transfer between them.
    pub fn new(n_chunks: usize, transfers: BTreeMap<(u32, u32), Vec<Seconds>>) -> Self {
        Self { graph: ChunkGraph::new(n_chunks, transfers.keys().copied()), transfers }
    }

    /// Transfer of a slice between two chunks.
    fn time(&self, pair: (u32, u32), slice: u32) -> Seconds {
        let times = self.transfers.get(&pair).and_then(|slices| slices.get(slice as usize));
        times.copied().unwrap_or(Seconds::ZERO)
    }

    /// Where an action's result goes, and how long that takes.
    fn sends(&self, section: Section, chunk: u32, slice: u32) -> impl Iterator<Item = (u32, Seconds)> {
        let (behind, before): (&[u32], &[u32]) = match section {
            Section::Forward => (self.graph.behind(chunk), &[]),
            Section::Backward | Section::BackwardInput => (&[], self.graph.before(chunk)),
            Section::BackwardWeight => (&[], &[]),
        };
        let there = behind.iter().map(move |&to| (to, self.time((chunk, to), slice)));
        there.chain(before.iter().map(move |&to| (to, self.time((to, chunk), slice))))
    }
}

/// What an action takes, whatever its micro-batch.
#[derive(Clone, Default)]
struct Lap {
    compute: Seconds,
    /// All that it sends to other ranks.
    sending: Seconds,
    /// From the end of each action that it needs until what that has sent is here, in the order of its needs.
    delays: Vec<Seconds>,
}

/// The laps of all actions, by copy of the chunk, chunk, slice and section.
struct Laps {
    shape: TableShape,
    of: Vec<Lap>,
}

impl Laps {
    fn new((shape, branches): (TableShape, &Branches), times: &PipelineTimes) -> Self {
        let copies = 0..shape.placement.n_copies();
        let places = copies.flat_map(|copy| (0..shape.n_chunks()).map(move |chunk| (copy, chunk)));
        let places =
            places.flat_map(|(copy, chunk)| (0..shape.n_slices).map(move |slice| (copy, chunk, slice)));
        let all = places.flat_map(|place| SECTIONS.map(|section| (place, section)));
        let of = all.map(|(place, section)| lap((shape, branches), times, place, section)).collect();
        Self { shape, of }
    }

    fn of(&self, action: Action, chunk: u32) -> &Lap {
        let copy = action.micro_batch % self.shape.placement.n_copies();
        let place = (copy * self.shape.n_chunks() + chunk) * self.shape.n_slices + action.slice;
        &self.of[place as usize * SECTIONS.len() + action.section as usize]
    }
}

fn lap(
    (shape, branches): (TableShape, &Branches),
    times: &PipelineTimes,
    (copy, chunk, slice): (u32, u32, u32),
    section: Section,
) -> Lap {
    let rank_of = |chunk: u32| shape.placement.seat(shape.n_stages, chunk, copy).rank;
    // What a chunk sends to others on other ranks goes one after the other.
    let sent = |from: u32| {
        let far = move |(to, _): &(u32, Seconds)| rank_of(*to) != rank_of(from);
        branches.sends(section, from, slice).filter(far)
    };
    let arrives = |from: &u32| -> Seconds {
        let all: Vec<(u32, Seconds)> = sent(*from).collect();
        let up_to = all.iter().position(|(to, _)| *to == chunk).map_or(0, |at| at + 1);
        all[..up_to].iter().map(|(_, time)| *time).sum()
    };
    let neighbours = match section {
        Section::Forward => branches.graph.before(chunk),
        Section::Backward | Section::BackwardInput => branches.graph.behind(chunk),
        Section::BackwardWeight => &[],
    };
    Lap {
        compute: times.compute(section, (chunk as usize, slice)),
        sending: sent(chunk).map(|(_, time)| time).sum(),
        delays: neighbours.iter().map(arrives).collect(),
    }
}

/// Visits each action once with its span and how its rank spends its time, where chunks take over from several others;
/// returns the makespan.
pub(super) fn walk(
    table: &[Vec<Action>],
    (shape, branches): (TableShape, &Branches),
    times: &PipelineTimes,
    mut visit: impl FnMut(Span, RankTotals),
) -> Result<Seconds, SimulateError> {
    let laps = Laps::new((shape, branches), times);
    let mut ends = vec![Seconds::ZERO; shape.n_events()];
    let mut free = vec![Seconds::ZERO; table.len()];
    let mut makespan = Seconds::ZERO;
    in_graph_order(table, shape, &branches.graph, |action, needs, yields| {
        let lap = laps.of(action, shape.chunk(action));
        // What is needed from the same chunk is there at its end.
        let delays = lap.delays.iter().copied().chain(std::iter::repeat(Seconds::ZERO));
        let ready = needs.iter().zip(delays).map(|(&needed, delay)| ends[needed] + delay);
        let start_s = ready.fold(free[action.rank as usize], Seconds::max);
        let end_s = start_s + lap.compute;
        let sending_s = times.exposed(lap.sending);
        ends[yields] = end_s;
        free[action.rank as usize] = end_s + sending_s;
        makespan = makespan.max(end_s);
        visit(Span { action, start_s, end_s }, RankTotals { busy_s: lap.compute, sending_s });
    })?;
    Ok(makespan)
}
