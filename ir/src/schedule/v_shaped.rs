//! Schedules over a V with backward in parts: one building block, repeated for every micro-batch.
//!
//! Rank `r` holds chunks `r` and `2 p - 1 - r`. A micro-batch goes down the ranks, up, down and up again, and between
//! neighbouring ranks so many units pass on each of the four ways: the block's offsets. Every action takes a unit, so a
//! rank has six of them to do per micro-batch, and the block repeats every six units. A block is good where on every
//! rank no two actions fall on the same unit modulo six; turns wait a little where that needs it.
//!
//! The offsets fix how long activations are held, and so the memory (Qi et al. 2024, arXiv 2405.15362 section 3.2):
//! ```text
//! offsets 4 2 4 2   ZB-V     p       micro-batches of a whole stage
//! offsets 2 1 2 1   V-Half   p / 2   and a little
//! offsets 1 1 1 1   V-Min    p / 3   and a little
//! ```
//! Weights do not stand in the block: they fill what would be waiting, and make room where forward needs it.

use super::listed::{Backward, Offer, Progress, list, stuck};
use super::{Action, ScheduleError, Section, TableShape};

/// Units after which the block repeats: forward, backward to the input and to the weights of two chunks.
const PERIOD: u32 = 6;

/// Units that a turn may wait, at most.
const LONGEST_WAIT: u32 = 7;

/// The ways of a micro-batch: down and up forward, down and up backward.
const WAYS: [(Section, u32); 4] =
    [(Section::Forward, 0), (Section::Forward, 1), (Section::BackwardInput, 1), (Section::BackwardInput, 0)];

/// ZB-V, at most `2 p` chunks of micro-batches held.
pub(super) fn zb_v(shape: TableShape) -> Result<Vec<Vec<Action>>, ScheduleError> {
    v_shaped(shape, [4, 2, 4, 2], shape.n_stages.saturating_mul(2))
}

/// V-Half, at most `p + 2`.
pub(super) fn v_half(shape: TableShape) -> Result<Vec<Vec<Action>>, ScheduleError> {
    v_shaped(shape, [2, 1, 2, 1], shape.n_stages.saturating_add(2))
}

/// V-Min, at most `2 p / 3 + 2`.
pub(super) fn v_min(shape: TableShape) -> Result<Vec<Vec<Action>>, ScheduleError> {
    v_shaped(shape, [1, 1, 1, 1], (shape.n_stages.saturating_mul(2)).div_ceil(3) + 2)
}

fn v_shaped(shape: TableShape, offsets: [u32; 4], room: u32) -> Result<Vec<Vec<Action>>, ScheduleError> {
    let starts = block(shape.n_stages, offsets).ok_or_else(|| stuck(shape))?;
    let rows: Vec<Vec<Action>> =
        (0..shape.n_stages).map(|rank| repeated(rank, &starts, shape.n_micro_batches)).collect();
    let attempt = |room: u32| {
        let mut rule = |progress: &Progress, offers: &[Offer]| weights_between(progress, offers, &rows, room);
        list(shape, Backward::Parts, &mut rule)
    };
    let most = shape.n_micro_batches.saturating_mul(2);
    [room, room.saturating_add(2), most].into_iter().find_map(attempt).ok_or_else(|| stuck(shape))
}

/// The next of the row if it can run and there is room, else the oldest weights.
fn weights_between(progress: &Progress, offers: &[Offer], rows: &[Vec<Action>], room: u32) -> Option<Action> {
    let weights = offers.iter().map(|offer| offer.action).filter(|a| a.section == Section::BackwardWeight);
    let rank = offers.first()?.action.rank;
    let next = rows[rank as usize].get(progress.row.len() - progress.n_weights);
    let next = next.filter(|&next| offers.iter().any(|offer| offer.action == *next));
    let next = next.filter(|next| next.section != Section::Forward || progress.held < room);
    next.copied().or_else(|| weights.min_by_key(|action| (action.micro_batch, action.virtual_stage == 0)))
}

/// A rank's row without weights: the block's actions of every micro-batch by their units.
fn repeated(rank: u32, starts: &[Vec<u32>; 4], n_micro_batches: u32) -> Vec<Action> {
    let mut actions: Vec<(u64, Action)> = Vec::new();
    for micro_batch in 0..n_micro_batches {
        for (&(section, virtual_stage), ranks) in WAYS.iter().zip(starts) {
            let unit = u64::from(ranks[rank as usize]) + u64::from(PERIOD) * u64::from(micro_batch);
            actions.push((unit, Action { rank, section, virtual_stage, micro_batch, slice: 0 }));
        }
    }
    actions.sort_unstable();
    actions.into_iter().map(|(_, action)| action).collect()
}

/// Per way and rank, the unit on which the first micro-batch runs, with the shortest waits in all.
fn block(n_stages: u32, offsets: [u32; 4]) -> Option<[Vec<u32>; 4]> {
    let waits = |sum: u32| {
        let each = 0..=LONGEST_WAIT;
        let pairs = each.clone().flat_map(move |a| (0..=LONGEST_WAIT).map(move |b| (a, b)));
        pairs.filter_map(move |(a, b)| {
            let c = sum.checked_sub(a + b)?;
            (c <= LONGEST_WAIT).then_some([a, b, c])
        })
    };
    let all = (0..=3 * LONGEST_WAIT).flat_map(waits);
    all.map(|waits| starts(n_stages, offsets, waits)).find(is_good)
}

fn starts(p: u32, offsets: [u32; 4], waits: [u32; 3]) -> [Vec<u32>; 4] {
    let mut begin = 0;
    let mut way = |i: usize| -> Vec<u32> {
        if i > 0 {
            begin += 1 + waits[i - 1];
        }
        let along = |rank: u32| if i.is_multiple_of(2) { rank } else { p - 1 - rank };
        let units = (0..p).map(|rank| begin + offsets[i] * along(rank)).collect();
        begin += offsets[i] * (p - 1);
        units
    };
    [way(0), way(1), way(2), way(3)]
}

fn is_good(starts: &[Vec<u32>; 4]) -> bool {
    (0..starts[0].len()).all(|rank| {
        let units: Vec<u32> = starts.iter().map(|way| way[rank] % PERIOD).collect();
        (1..4).all(|i| !units[..i].contains(&units[i]))
    })
}
