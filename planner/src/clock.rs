//! How often a step has what a layer's choice costs, and how much of it shows.
//!
//! A choice inside a layer is priced before anything is known of the stage that it will stand in. A clock says how often
//! its passes count, and which fraction of what is sent once per step, or beside compute, is waited for: it is what makes
//! a choice problem either the search's (what layers hide by themselves) or a bound's (what a whole stage may hide).

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
    /// What is sent every micro-batch.
    pub every: Every,
}

/// Behind what parameters are gathered and gradients reduced that move every micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Every {
    /// Behind the compute of their own operator: what layers take their choices by where memory is tight.
    #[default]
    Own,
    /// Behind whatever the layer computes, as if there were always enough of it: what a bound may count on.
    Layer,
    /// Behind nothing.
    Alone,
}

/// Whether the compute of a stage covers what it sends beside it once per step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cover {
    /// The slow-down and the bucket at the end show.
    #[default]
    Whole,
    /// The compute ends first: all of the communication shows, and nothing of the compute but the slow-down and what
    /// is beside the bucket at the end.
    Part,
}

/// The same of the gradients behind the last backward, and of the parameters before the first forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Covers {
    /// Gradients.
    pub reduce: Cover,
    /// Parameters.
    pub spread: Cover,
}

impl Clock {
    /// Of a step of `micro_batches`, `in_flight` at a time, on stages of so many layers, in an engine that sends beside
    /// computation.
    ///
    /// What shows of communication `c` in `n` buckets beside compute `w` is `max(c / n, c - w (n - 1) / n)` and a slow-down
    /// (`cost_model::overlap::exposed_behind`): at least either of the two, whatever layers take their share of. Each is a
    /// sum over layers; a bound may take the larger one.
    pub fn beside(
        (micro_batches, in_flight): (f64, f64),
        layers: f64,
        (covers, every): (Covers, Every),
        constants: &Constants,
    ) -> Self {
        let (bucket, slow) = (1.0 / layers, constants.overlap_slowdown_fraction);
        let hidden = (1.0 - bucket) * (1.0 - slow);
        let of = |cover: Cover| match cover {
            Cover::Whole => (1.0 - hidden, micro_batches),
            Cover::Part => (1.0, micro_batches - hidden),
        };
        let ((reduce, backward), (spread, forward)) = (of(covers.reduce), of(covers.spread));
        Self { micro_batches, forward, backward, shown: Shown { reduce, spread, every }, in_flight, layers }
    }

    /// The same in an engine that sends when it has computed.
    pub fn after((micro_batches, in_flight): (f64, f64), layers: f64) -> Self {
        let (forward, backward) = (micro_batches, micro_batches);
        let shown = Shown { reduce: 1.0, spread: 1.0, every: Every::Alone };
        Self { micro_batches, forward, backward, shown, in_flight, layers }
    }
}

/// Seconds of a choice that a step has once, were nothing hidden, and of the compute of a micro-batch, behind which they
/// may hide.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Once {
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
}

impl Once {
    /// Of `count` layers more.
    pub fn plus(self, other: Self, count: f64) -> Self {
        Self {
            reduce: self.reduce + other.reduce * count,
            spread: self.spread + other.spread * count,
            update: self.update + other.update * count,
            forward: self.forward + other.forward * count,
            backward: self.backward + other.backward * count,
        }
    }

    /// Seconds that it adds to a step, of which so much shows; the compute apart.
    pub fn shown(self, shown: Shown) -> f64 {
        self.reduce * shown.reduce + self.spread * shown.spread + self.update
    }

    /// What shows at least beside the compute.
    pub fn uncovered(self) -> f64 {
        (self.reduce - self.backward).max(0.0) + (self.spread - self.forward).max(0.0)
    }

    /// What covers what.
    pub fn covers(self) -> Covers {
        let cover = |sent: f64, computed: f64| if sent > computed { Cover::Part } else { Cover::Whole };
        Covers { reduce: cover(self.reduce, self.backward), spread: cover(self.spread, self.forward) }
    }
}
