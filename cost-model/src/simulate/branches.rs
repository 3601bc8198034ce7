//! When actions run where a model is no chain: a chunk waits for all that it reads, and for nothing else.

use std::collections::BTreeMap;

use ir::schedule::{Action, ChunkGraph, Section, Span, TableShape, in_graph_order};
use ir::units::Seconds;

use super::{PipelineTimes, RankTotals, SimulateError};

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

/// Visits each action once with its span and how its rank spends its time, where chunks take over from several others; returns
/// the makespan. What a chunk sends goes one after the other.
pub(super) fn walk(
    table: &[Vec<Action>],
    (shape, branches): (TableShape, &Branches),
    times: &PipelineTimes,
    mut visit: impl FnMut(Span, RankTotals),
) -> Result<Seconds, SimulateError> {
    let mut ends = vec![Seconds::ZERO; shape.n_events()];
    let mut free = vec![Seconds::ZERO; table.len()];
    let mut makespan = Seconds::ZERO;
    let rank_of =
        |chunk: u32, micro_batch: u32| shape.placement.seat(shape.n_stages, chunk, micro_batch).rank;
    // What a chunk sends to others on other ranks, and when each of it has arrived after its end.
    let sent = |action: Action, section: Section, chunk: u32| {
        let far = move |to: &(u32, Seconds)| {
            rank_of(to.0, action.micro_batch) != rank_of(chunk, action.micro_batch)
        };
        branches.sends(section, chunk, action.slice).filter(far)
    };
    let arrives = |action: Action, section: Section, from: u32, to: u32| -> Seconds {
        let all: Vec<(u32, Seconds)> = sent(action, section, from).collect();
        let up_to = all.iter().position(|(other, _)| *other == to).map_or(0, |at| at + 1);
        all[..up_to].iter().map(|(_, time)| *time).sum()
    };
    in_graph_order(table, shape, &branches.graph, |action, needs, yields| {
        let chunk = shape.chunk(action);
        let (section, neighbours) = match action.section {
            Section::Forward => (Section::Forward, branches.graph.before(chunk)),
            Section::Backward | Section::BackwardInput => (Section::Backward, branches.graph.behind(chunk)),
            Section::BackwardWeight => (Section::BackwardWeight, [].as_slice()),
        };
        let delays = neighbours.iter().map(|&other| arrives(action, section, other, chunk));
        let delays = delays.chain(std::iter::repeat(Seconds::ZERO));
        let ready = needs.iter().zip(delays).map(|(&needed, delay)| ends[needed] + delay);
        let start_s = ready.fold(free[action.rank as usize], Seconds::max);
        let compute = times.compute(action.section, (chunk as usize, action.slice));
        let end_s = start_s + compute;
        let sending_s = times.exposed(sent(action, action.section, chunk).map(|(_, time)| time).sum());
        ends[yields] = end_s;
        free[action.rank as usize] = end_s + sending_s;
        makespan = makespan.max(end_s);
        visit(Span { action, start_s, end_s }, RankTotals { busy_s: compute, sending_s });
    })?;
    Ok(makespan)
}
