//! Tables whose rows are written down in order, each rank by itself: one function per schedule.

use std::collections::VecDeque;

use super::{Action, Section, TableShape};

/// Micro-batches of a rank's virtual stages, a rank's row under way.
struct Row {
    rank: u32,
    actions: Vec<Action>,
}

impl Row {
    fn new(rank: u32) -> Self {
        Self { rank, actions: Vec::new() }
    }

    fn push(&mut self, section: Section, virtual_stage: u32, micro_batch: u32) {
        self.actions.push(Action { rank: self.rank, section, virtual_stage, micro_batch, slice: 0 });
    }
}

/// All micro-batches forward through virtual stage 0, then 1, and so on; then backward through all, the last first.
/// With one virtual stage this is GPipe.
pub(super) fn breadth_first(rank: u32, shape: TableShape) -> Vec<Action> {
    let (v, m) = (shape.n_virtual_stages(), shape.n_micro_batches);
    let of = |section: Section, virtual_stage: u32| {
        (0..m).map(move |micro_batch| Action { rank, section, virtual_stage, micro_batch, slice: 0 })
    };
    let forward = (0..v).flat_map(|stage| of(Section::Forward, stage));
    forward.chain((0..v).rev().flat_map(|stage| of(Section::Backward, stage))).collect()
}

/// `p - r - 1` forwards of warm-up, then forward and backward in turn, then the remaining backwards.
pub(super) fn one_f_one_b(rank: u32, shape: TableShape) -> Vec<Action> {
    warmed_up(rank, shape.n_stages - rank - 1, shape)
}

/// Twice the warm-up of 1F1B, `2 (p - r - 1)`: a transfer may take as long as a forward and a backward together before
/// any rank waits for it.
pub(super) fn eager(rank: u32, shape: TableShape) -> Vec<Action> {
    warmed_up(rank, 2 * (shape.n_stages - rank - 1), shape)
}

/// `min(2 (p - r) - 1, K - r)` forwards before the first backward, at least one, then one of each in turn: `K = p` is
/// 1F1B, `K = 2 p - 1` eager 1F1B. A rank that took in more than one less than the rank before would wait for it.
pub(super) fn dapple(rank: u32, most: u32, shape: TableShape) -> Vec<Action> {
    warmed_up(rank, (2 * (shape.n_stages - rank - 1)).min((most - 1).saturating_sub(rank)), shape)
}

fn warmed_up(rank: u32, warm_up: u32, shape: TableShape) -> Vec<Action> {
    let of = |section, micro_batch| Action { rank, section, virtual_stage: 0, micro_batch, slice: 0 };
    let forward = |micro_batch| of(Section::Forward, micro_batch);
    let backward = |micro_batch| of(Section::Backward, micro_batch);
    warm_up_then_alternate(shape.n_micro_batches, warm_up, forward, backward)
}

/// Megatron's order: groups of `p` micro-batches run through virtual stage 0, then 1, and so on; backward from the
/// last virtual stage down. Warm-up is `2 (p - r - 1) + (v - 1) p` chunk forwards.
///
/// `megatron/core/pipeline_parallel/schedules.py` of NVIDIA/Megatron-LM, group size `p`.
pub(super) fn interleaved(rank: u32, shape: TableShape) -> Vec<Action> {
    let (p, v, m) = (shape.n_stages, shape.n_virtual_stages(), shape.n_micro_batches);
    let warm_up = 2 * (p - rank - 1) + (v - 1) * p;
    let micro_batch = |k: u32| k / (p * v) * p + k % p;
    let virtual_stage = |k: u32| k % (p * v) / p;
    let forward = |k| Action {
        rank,
        section: Section::Forward,
        virtual_stage: virtual_stage(k),
        micro_batch: micro_batch(k),
        slice: 0,
    };
    let backward = |k| Action {
        rank,
        section: Section::Backward,
        virtual_stage: v - 1 - virtual_stage(k),
        micro_batch: micro_batch(k),
        slice: 0,
    };
    warm_up_then_alternate(m * v, warm_up, forward, backward)
}

/// `warm_up` forwards, then one forward and one backward in turn, then the backwards that are left.
fn warm_up_then_alternate(
    n: u32,
    warm_up: u32,
    forward: impl Fn(u32) -> Action,
    backward: impl Fn(u32) -> Action,
) -> Vec<Action> {
    let warm_up = warm_up.min(n);
    let mut actions = Vec::with_capacity(2 * n as usize);
    actions.extend((0..warm_up).map(&forward));
    for k in warm_up..n {
        actions.push(forward(k));
        actions.push(backward(k - warm_up));
    }
    actions.extend((n - warm_up..n).map(backward));
    actions
}

/// 1F1B over slices: `p - r + k - 2` forwards of warm-up, so that the last rank has all `k` slices of a micro-batch
/// before the first backward, which is that of its last slice (arXiv 2406.03488, section 3.2).
///
/// In flight: `p - r + k - 1` slices, each a k-th of a micro-batch. Bubble: that of 1F1B by parts of a k-th,
/// `(p - 1)(F + B) / k`.
pub(super) fn seq_1f1b(rank: u32, shape: TableShape) -> Vec<Action> {
    let TableShape { n_stages: p, n_micro_batches: m, n_slices: k, .. } = shape;
    let of =
        |section, unit: u32, slice| Action { rank, section, virtual_stage: 0, micro_batch: unit / k, slice };
    let forward = |unit: u32| of(Section::Forward, unit, unit % k);
    let backward = |unit: u32| of(Section::Backward, unit, k - 1 - unit % k);
    warm_up_then_alternate(m * k, (p - rank - 1).saturating_add(k - 1), forward, backward)
}

/// GPipe over slices: every slice forward in order, then the same in reverse (arXiv 2102.07988, section 3.2).
pub(super) fn terapipe(rank: u32, shape: TableShape) -> Vec<Action> {
    let of = |section, unit: u32| Action {
        rank,
        section,
        virtual_stage: 0,
        micro_batch: unit / shape.n_slices,
        slice: unit % shape.n_slices,
    };
    let units = 0..shape.n_units();
    let forward = units.clone().map(|unit| of(Section::Forward, unit));
    forward.chain(units.rev().map(|unit| of(Section::Backward, unit))).collect()
}

/// ZB-H1: the warm-up of 1F1B; weights follow `r` micro-batches behind, so that every rank has `p` under way.
///
/// Bubble `(p - 1)(F + B - W)`, B being backward to the input: arXiv 2401.10241 table 2.
pub(super) fn zb_h1(rank: u32, shape: TableShape) -> Vec<Action> {
    weights_behind(rank, 1, shape)
}

/// ZB-H2: twice the warm-up and twice the delay, so that every rank has `2 p - 1` under way.
///
/// Bubble `(p - 1)(F + B - 2 W)` where ranks do not wait for each other between steps: arXiv 2401.10241 table 2.
pub(super) fn zb_h2(rank: u32, shape: TableShape) -> Vec<Action> {
    weights_behind(rank, 2, shape)
}

/// `n (p - r - 1)` forwards of warm-up, then one forward, one backward to the input and one to the weights in turn, the
/// weights of the micro-batch `n r` before.
fn weights_behind(rank: u32, n: u32, shape: TableShape) -> Vec<Action> {
    let m = shape.n_micro_batches;
    let (warm_up, behind) =
        (n.saturating_mul(shape.n_stages - rank - 1).min(m), n.saturating_mul(rank).min(m));
    let mut row = Row::new(rank);
    (0..warm_up).for_each(|k| row.push(Section::Forward, 0, k));
    for k in 0..m {
        if k < m - warm_up {
            row.push(Section::Forward, 0, warm_up + k);
        }
        row.push(Section::BackwardInput, 0, k);
        if k >= behind {
            row.push(Section::BackwardWeight, 0, k - behind);
        }
    }
    (m - behind..m).for_each(|k| row.push(Section::BackwardWeight, 0, k));
    row.actions
}

/// DualPipeV: in the steady state the forward of one chunk of the V stands beside the backward of the other; weights
/// fill the ends. Needs `2 p` micro-batches.
///
/// The phases are those of `dualpipe/dualpipev.py` of deepseek-ai/DualPipe; what runs at once there stands in turn
/// here.
pub(super) fn dualpipe_v(rank: u32, shape: TableShape) -> Vec<Action> {
    let (p, m) = (shape.n_stages, shape.n_micro_batches);
    let (after, own) = (p - rank - 1, rank + 1);
    let mut row =
        Waving { row: Row::new(rank), forwards: [0; 2], backwards: [0; 2], weights: VecDeque::new() };
    (0..2 * after).for_each(|_| row.forward(0));
    for _ in 0..own {
        row.forward(0);
        row.forward(1);
    }
    for _ in 0..after {
        row.input(1);
        row.weight();
        row.forward(1);
    }
    for _ in 0..m + own - 2 * p {
        row.forward(0);
        row.backward(1);
        row.forward(1);
        row.backward(0);
    }
    for _ in 0..after {
        row.backward(1);
        row.forward(1);
        row.backward(0);
    }
    // From the middle of the drain on weights wait, first of the other chunk than on the neighbours.
    for i in 0..own {
        let whole = |stage: u32| i < own / 2 || (i == own / 2 && stage == 1 && rank.is_multiple_of(2));
        for stage in [1, 0] {
            if whole(stage) { row.backward(stage) } else { row.input(stage) }
        }
    }
    for _ in 0..after {
        row.weight();
        row.input(0);
    }
    (0..own).for_each(|_| row.weight());
    row.row.actions
}

/// A row over two virtual stages that counts its micro-batches; weights wait in the order of their backwards.
struct Waving {
    row: Row,
    forwards: [u32; 2],
    backwards: [u32; 2],
    weights: VecDeque<(u32, u32)>,
}

impl Waving {
    fn forward(&mut self, stage: u32) {
        let next = next(&mut self.forwards, stage);
        self.row.push(Section::Forward, stage, next);
    }

    fn backward(&mut self, stage: u32) {
        let next = next(&mut self.backwards, stage);
        self.row.push(Section::Backward, stage, next);
    }

    fn input(&mut self, stage: u32) {
        let next = next(&mut self.backwards, stage);
        self.row.push(Section::BackwardInput, stage, next);
        self.weights.push_back((stage, next));
    }

    fn weight(&mut self) {
        if let Some((stage, micro_batch)) = self.weights.pop_front() {
            self.row.push(Section::BackwardWeight, stage, micro_batch);
        }
    }
}

fn next(counts: &mut [u32; 2], stage: u32) -> u32 {
    let count = &mut counts[stage as usize % 2];
    *count += 1;
    *count - 1
}
