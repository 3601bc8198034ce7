//! Tables found by list scheduling: all ranks move in rounds of one action each, and a rule picks among what could run.
//!
//! Only the order matters, so every action takes one round. The rule sees one rank at a time, and in it one offer per
//! virtual stage and section: micro-batches of a virtual stage keep their order. A rule that holds back forwards for
//! want of room may stop everything; then it is tried again with more room.

use super::{Action, ScheduleError, Section, TableShape};

/// Whether backward is one action or two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backward {
    Whole,
    Parts,
}

/// What a rank has done so far.
#[derive(Clone, Debug)]
pub(super) struct Progress {
    /// Its row.
    pub(super) row: Vec<Action>,
    /// Forwards whose backward, weights included, has not run.
    pub(super) held: u32,
    /// Backwards to the weights that have run.
    pub(super) n_weights: usize,
    stages: Vec<Stage>,
}

/// A virtual stage of a rank.
#[derive(Clone, Debug)]
struct Stage {
    chunk: u32,
    /// Its micro-batches, in order.
    micro_batches: Vec<u32>,
    forwards: usize,
    backwards: usize,
    weights: usize,
}

/// An action that could run now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offer {
    pub(super) action: Action,
    pub(super) chunk: u32,
    /// Forwards of its virtual stage whose backward has not run.
    pub(super) ahead: u32,
}

/// Lists actions until none is left; `None` where the rule takes no offer on any rank while some are left.
pub(super) fn list(
    shape: TableShape,
    backward: Backward,
    pick: &mut dyn FnMut(&Progress, &[Offer]) -> Option<Action>,
) -> Option<Vec<Vec<Action>>> {
    let mut ranks: Vec<Progress> = (0..shape.n_stages).map(|rank| Progress::new(rank, shape)).collect();
    let mut done = vec![false; shape.n_events()];
    loop {
        let mut ended = Vec::new();
        for (rank, progress) in ranks.iter_mut().enumerate() {
            let offers = progress.offers(rank as u32, backward, &|action| {
                shape.needs(action).is_none_or(|needed| done[needed])
            });
            if let Some(action) = pick(progress, &offers) {
                progress.take(action);
                ended.push(shape.yields(action));
            }
        }
        if ended.is_empty() {
            let complete = ranks.iter().all(Progress::is_complete);
            return complete.then(|| ranks.into_iter().map(|progress| progress.row).collect());
        }
        ended.into_iter().for_each(|event| done[event] = true);
    }
}

impl Progress {
    fn new(rank: u32, shape: TableShape) -> Self {
        let stage = |(virtual_stage, chunk): (usize, u32)| {
            let here = |&micro_batch: &u32| {
                let seat = shape.placement.seat(shape.n_stages, chunk, micro_batch);
                (seat.rank, seat.virtual_stage as usize) == (rank, virtual_stage)
            };
            let micro_batches = (0..shape.n_micro_batches).filter(here).collect();
            Stage { chunk, micro_batches, forwards: 0, backwards: 0, weights: 0 }
        };
        let chunks = shape.placement.chunks_of(shape.n_stages, rank);
        Self { row: Vec::new(), held: 0, n_weights: 0, stages: chunks.enumerate().map(stage).collect() }
    }

    fn offers(&self, rank: u32, backward: Backward, ready: &dyn Fn(Action) -> bool) -> Vec<Offer> {
        let mut offers = Vec::new();
        for (virtual_stage, stage) in self.stages.iter().enumerate() {
            let backward_section = match backward {
                Backward::Whole => Section::Backward,
                Backward::Parts => Section::BackwardInput,
            };
            let next = [
                (Section::Forward, stage.forwards, stage.micro_batches.len()),
                (backward_section, stage.backwards, stage.forwards),
                (Section::BackwardWeight, stage.weights, stage.backwards),
            ];
            for (section, at, end) in next {
                let Some(&micro_batch) = stage.micro_batches.get(at).filter(|_| at < end) else { continue };
                let action =
                    Action { rank, section, virtual_stage: virtual_stage as u32, micro_batch, slice: 0 };
                if ready(action) {
                    let ahead = (stage.forwards - stage.backwards) as u32;
                    offers.push(Offer { action, chunk: stage.chunk, ahead });
                }
            }
        }
        offers
    }

    fn take(&mut self, action: Action) {
        self.row.push(action);
        let stage = &mut self.stages[action.virtual_stage as usize];
        match action.section {
            Section::Forward => {
                stage.forwards += 1;
                self.held += 1;
            }
            Section::BackwardInput => stage.backwards += 1,
            Section::Backward => {
                stage.backwards += 1;
                stage.weights += 1;
                self.held -= 1;
            }
            Section::BackwardWeight => {
                stage.weights += 1;
                self.held -= 1;
                self.n_weights += 1;
            }
        }
    }

    fn is_complete(&self) -> bool {
        self.stages.iter().all(|stage| stage.weights == stage.micro_batches.len())
    }
}

/// Chimera: two 1F1B pipelines in opposite directions, each holding back as 1F1B does; backwards first, then the
/// oldest.
///
/// Where forward and backward take equal time the bubble is `(p/2 - 1)(F + B)`: arXiv 2107.06925 table 2, with units of
/// `p` micro-batches one after the other as in its section 3.5.
pub(super) fn chimera(shape: TableShape) -> Result<Vec<Vec<Action>>, ScheduleError> {
    let p = shape.n_stages;
    let rule = |_: &Progress, offers: &[Offer]| {
        let backwards = offers.iter().filter(|offer| offer.action.section == Section::Backward);
        let oldest = backwards.min_by_key(|offer| (offer.action.micro_batch, offer.action.virtual_stage));
        let forwards = offers.iter().filter(|offer| offer.action.section == Section::Forward);
        let may = forwards.filter(|offer| offer.ahead < p - offer.chunk);
        // Micro-batches `2 k` and `2 k + 1` set out together; the one that is nearer to its end goes first.
        let next = may.min_by_key(|offer| (offer.action.micro_batch / 2, p - offer.chunk));
        oldest.or(next).map(|offer| offer.action)
    };
    list(shape, Backward::Whole, &mut { rule }).ok_or_else(|| stuck(shape))
}

/// Hanayo: forward and backward in turn, the deepest forward and the oldest backward first; no rank holds more than
/// 1F1B.
///
/// Where forward and backward take equal time the bubble is `(p - 1)(F + B) / (2 w)` of whole stages (arXiv 2308.15762
/// section 3): with one wave for any number of micro-batches, with more for as many micro-batches as ranks, as there.
pub(super) fn hanayo(shape: TableShape) -> Result<Vec<Vec<Action>>, ScheduleError> {
    let room = shape.n_chunks();
    let most = room.saturating_mul(shape.n_micro_batches);
    let rule = |room: u32| {
        move |progress: &Progress, offers: &[Offer]| {
            let backwards = offers.iter().filter(|offer| offer.action.section == Section::Backward);
            let backward = backwards.min_by_key(|offer| (offer.action.micro_batch, offer.chunk));
            let forwards = offers.iter().filter(|offer| offer.action.section == Section::Forward);
            let forward = forwards
                .filter(|offer| offer.chunk > 0 || progress.held < room)
                .max_by_key(|offer| offer.chunk);
            let after_forward = progress.row.last().is_some_and(|last| last.section == Section::Forward);
            let first = if after_forward { backward.or(forward) } else { forward.or(backward) };
            first.map(|offer| offer.action)
        }
    };
    let attempt = |room: u32| list(shape, Backward::Whole, &mut rule(room));
    [room, most].into_iter().find_map(attempt).ok_or_else(|| stuck(shape))
}

pub(super) fn stuck(shape: TableShape) -> ScheduleError {
    ScheduleError::Stuck { n_stages: shape.n_stages, n_micro_batches: shape.n_micro_batches }
}
