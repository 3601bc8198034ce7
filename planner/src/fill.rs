//! How long a pipeline that splits backward takes to fill and to drain, at least.
//!
//! Gradients of weights fill what is left of a bubble, but nothing runs on a stage before the first micro-batch has
//! come to it, and the way of a micro-batch there and back is as long as it is. Of stages that take `x(s)` in a step
//! and `f(s)` in the forward of a micro-batch, which takes no less than the part `r` of `x(s)`, and
//! `z(s) = m (f(s) + b(s))` up to the gradients of inputs:
//!
//! ```text
//! T >= x(s) + sum_{i < s} f(i)           its first micro-batch comes through all before it:  T >= r sum x / (1 - (1 - r)^p)
//! T >= z(s) + sum_{i < s} z(i) / m       and the gradients of its last go back there:        T >= sum z / (m (1 - (1 - 1 / m)^p))
//! T >= sum z / m                         whatever chunks a micro-batch passes
//! ```
//! The right sides are least where layers are so on the stages that all of the left ones are as long: the first stages
//! hold most. A layer whose forward is a smaller part counts the less the closer to the front it is, by
//! `(1 - r)^(p - 1)` at least.

/// Gradients of inputs take no less than this part of what forward computes: each product has one of the same size, of
/// other shapes.
const BACK: f64 = 0.85;

/// Least seconds of forward passes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Forward {
    /// Of all layers, in all micro-batches of a step.
    pub all: f64,
    /// What layers of frequent kinds take in a step, were they all on one stage.
    pub layers: f64,
    /// The least part of that, of any of these kinds, that forward takes.
    pub share: f64,
}

/// How a micro-batch passes the stages in a schedule, the least that is said of it first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Passage {
    /// Nothing is said of it: what is idle is said by the bubble.
    Unknown,
    /// Through all chunks, wherever they are.
    Through,
    /// From the first stage to the last and back, each in one piece.
    Straight,
}

/// How much of its stages' time a schedule leaves idle, at least.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Idle {
    /// Share of the work that it adds as bubble.
    pub(crate) bubble: f64,
    /// How micro-batches pass the stages.
    pub(crate) passage: Passage,
}

impl Idle {
    /// A bubble alone.
    pub(crate) fn of(bubble: f64) -> Self {
        Self { bubble, passage: Passage::Unknown }
    }

    /// The least of both.
    pub(crate) fn min(self, other: Self) -> Self {
        Self { bubble: self.bubble.min(other.bubble), passage: self.passage.min(other.passage) }
    }
}

impl Forward {
    /// Least seconds of a step whose stages take so long on the average, of so many stages and micro-batches.
    pub(crate) fn least_step(&self, average: f64, (p, m): (f64, f64), passage: Passage) -> f64 {
        let there_and_back = self.all * (1.0 + BACK);
        match passage {
            Passage::Unknown => 0.0,
            Passage::Through => there_and_back / m,
            Passage::Straight => {
                let drained = there_and_back * spread(1.0 / m, p);
                let (part, others) = (self.share / m, (p * average - self.layers).max(0.0));
                let all = self.layers + others * (1.0 - part).powf(p - 1.0);
                drained.max(all * spread(part, p))
            }
        }
    }
}

/// What the first of `p` stages holds of all that they hold, each of which holds as much less as a part of all before
/// it is.
fn spread(part: f64, p: f64) -> f64 {
    if part > 0.0 { part / (1.0 - (1.0 - part).powf(p)) } else { 1.0 / p }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_single_micro_batch_goes_through_all_stages_and_back() {
        // Two stages, each of whose passes takes a second: forward, gradients of inputs and of weights.
        let forward = Forward { all: 2.0, layers: 6.0, share: 1.0 / 3.0 };
        let straight = forward.least_step(3.0, (2.0, 1.0), Passage::Straight);
        assert_eq!(straight, 2.0 * (1.0 + BACK));
        assert_eq!(forward.least_step(3.0, (2.0, 1.0), Passage::Through), straight);
        assert_eq!(forward.least_step(3.0, (2.0, 1.0), Passage::Unknown), 0.0);
    }

    #[test]
    fn where_micro_batches_are_many_nothing_is_left_of_it() {
        let forward = Forward { all: 2e3, layers: 6e3, share: 1.0 / 3.0 };
        let straight = forward.least_step(3e3, (2.0, 1e3), Passage::Straight);
        assert!(straight > 3e3 && straight < 3e3 + 1.0, "{straight}");
    }

    proptest! {
        /// Against stages of any length, each of which is given its least end by the two chains.
        #[test]
        fn no_stages_end_sooner(
            lengths in proptest::collection::vec(0.0..5.0_f64, 2..9),
            rare in proptest::collection::vec(0.0..2.0_f64, 8),
            m in 1..20_u32,
        ) {
            let (p, m) = (lengths.len() as f64, f64::from(m));
            let layers: f64 = lengths.iter().sum();
            prop_assume!(layers > 0.1);
            let rare = &rare[..lengths.len()];
            let average = (layers + rare.iter().sum::<f64>()) / p;
            let forward = Forward { all: layers / 3.0, layers, share: 1.0 / 3.0 };
            let ends = (0..lengths.len()).map(|at| {
                let before: f64 = lengths[..at].iter().sum();
                let filled = lengths[at] + rare[at] + before / (3.0 * m);
                let drained = (lengths[at] + before / m) * (1.0 + BACK) / 3.0;
                filled.max(drained)
            });
            let step = ends.fold(0.0, f64::max);
            prop_assert!(forward.least_step(average, (p, m), Passage::Straight) <= step * (1.0 + 1e-9));
        }
    }
}
