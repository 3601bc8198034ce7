//! How often a step has what a layer's choice costs, and how much of it shows.
//!
//! A choice inside a layer is priced before anything is known of the stage that it will stand in. A clock says how
//! often its passes count, and which fraction of what is sent once per step is waited for.

use cost_model::Constants;

/// How often things happen, as the objective sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clock {
    /// Micro-batches.
    pub micro_batches: f64,
    /// Seconds of forward count this often.
    pub forward: f64,
    /// Seconds of backward count this often.
    pub backward: f64,
    /// So much shows of what a step has once.
    pub shown: Shown,
    /// So much of what a layer sends beside its compute, every micro-batch, shows where the compute is longer, and so
    /// much of the compute where it is not: 1 in an engine that sends when it has computed.
    pub slow: f64,
    /// Kept activations count this often: micro-batches in flight.
    pub in_flight: f64,
    /// Layers of a stage, which share the room for the parameters of the two that are gathered at once.
    pub layers: f64,
}

/// What shows of what parameters and gradients send.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shown {
    /// Fraction of the gradients reduced once per step.
    pub reduce: f64,
    /// Fraction of the parameters spread once per step.
    pub spread: f64,
    /// Fraction of the optimizer's step.
    pub update: f64,
}

/// Whether the compute of a stage covers what it sends beside it once per step.
///
/// At 1 it does: the slow-down and the bucket at the end show. At 0 it ends first: all of the communication shows, and
/// nothing of the compute but the slow-down and what is beside the bucket at the end. What lies between is so much of
/// the one and the rest of the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Covers {
    /// Gradients behind the last backward.
    pub reduce: f64,
    /// Parameters before the first forward.
    pub spread: f64,
}

impl Default for Covers {
    fn default() -> Self {
        Self { reduce: 1.0, spread: 1.0 }
    }
}

impl Covers {
    /// So much of the way to another.
    pub(crate) fn towards(self, other: Self, part: f64) -> Self {
        let between = |from: f64, to: f64| from + (to - from) * part;
        Self { reduce: between(self.reduce, other.reduce), spread: between(self.spread, other.spread) }
    }
}

impl Clock {
    /// Of a step of `micro_batches`, `in_flight` at a time, on stages of so many layers, in an engine that sends beside
    /// computation.
    ///
    /// What shows of communication `c` in `n` buckets beside compute `w` is `max(c / n, c - w (n - 1) / n)` and a
    /// slow-down (`cost_model::overlap::exposed_behind`): at least either of the two, whatever layers take their share
    /// of, and any mean of them. Each is a sum over layers, so that a bound may take the mean that says most.
    pub fn beside(
        (micro_batches, in_flight): (f64, f64),
        layers: f64,
        covers: Covers,
        constants: &Constants,
    ) -> Self {
        let (bucket, slow) = (1.0 / layers, constants.overlap_slowdown_fraction);
        let hidden = (1.0 - bucket) * (1.0 - slow);
        let of = |cover: f64| (1.0 - cover * hidden, micro_batches - (1.0 - cover) * hidden);
        let ((reduce, backward), (spread, forward)) = (of(covers.reduce), of(covers.spread));
        let (shown, slow) =
            (Shown { reduce, spread, update: 1.0 }, constants.gathered_overlap_slowdown_fraction);
        Self { micro_batches, forward, backward, shown, slow, in_flight, layers }
    }

    /// The same in an engine that sends when it has computed.
    pub fn after((micro_batches, in_flight): (f64, f64), layers: f64) -> Self {
        let (forward, backward) = (micro_batches, micro_batches);
        let (shown, slow) = (Shown { reduce: 1.0, spread: 1.0, update: 1.0 }, 1.0);
        Self { micro_batches, forward, backward, shown, slow, in_flight, layers }
    }

    /// The same without what a step has once.
    #[must_use]
    pub fn of_micro_batches(self) -> Self {
        let (forward, backward) = (self.micro_batches, self.micro_batches);
        Self { forward, backward, shown: Shown { reduce: 0.0, spread: 0.0, update: 0.0 }, ..self }
    }

    /// Seconds of a step that an operator's choice adds, if passes compute for longer than they send.
    pub(crate) fn seconds(&self, of: Spans) -> f64 {
        (of.forward + of.waits + of.gather * self.slow) * self.forward
            + (of.backward + of.every * self.slow) * self.backward
            + of.shown(self.shown)
    }

    /// Seconds that forward and backward add to it if they send for longer; less than nothing where they compute for
    /// longer.
    pub(crate) fn excess(&self, of: Spans) -> [f64; 2] {
        let hidden = 1.0 - self.slow;
        [(of.gather - of.forward) * hidden * self.forward, (of.every - of.backward) * hidden * self.backward]
    }
}

/// Seconds of a choice: what a step has once, were nothing hidden, and what a micro-batch computes and sends beside
/// that.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spans {
    /// Gradients reduced.
    pub reduce: f64,
    /// Parameters spread.
    pub spread: f64,
    /// Optimizer.
    pub update: f64,
    /// Forward.
    pub forward: f64,
    /// Backward.
    pub backward: f64,
    /// Parameters gathered beside forward.
    pub gather: f64,
    /// Parameters gathered and gradients reduced beside backward.
    pub every: f64,
    /// What forward waits for launches.
    pub waits: f64,
}

impl Spans {
    /// Of `count` layers more.
    pub fn plus(self, other: Self, count: f64) -> Self {
        Self {
            reduce: self.reduce + other.reduce * count,
            spread: self.spread + other.spread * count,
            update: self.update + other.update * count,
            forward: self.forward + other.forward * count,
            backward: self.backward + other.backward * count,
            gather: self.gather + other.gather * count,
            every: self.every + other.every * count,
            waits: self.waits + other.waits * count,
        }
    }

    /// Without what a step has once.
    pub fn of_micro_batches(self) -> Self {
        Self { reduce: 0.0, spread: 0.0, update: 0.0, ..self }
    }

    /// Seconds that it adds to a step, of which so much shows; the compute apart.
    pub fn shown(self, shown: Shown) -> f64 {
        self.reduce * shown.reduce + self.spread * shown.spread + self.update * shown.update
    }

    /// What shows at least beside the compute.
    pub fn uncovered(self) -> f64 {
        (self.reduce - self.backward).max(0.0) + (self.spread - self.forward).max(0.0)
    }

    /// What covers what.
    pub fn covers(self) -> Covers {
        let cover = |sent: f64, computed: f64| if sent > computed { 0.0 } else { 1.0 };
        Covers { reduce: cover(self.reduce, self.backward), spread: cover(self.spread, self.forward) }
    }
}
