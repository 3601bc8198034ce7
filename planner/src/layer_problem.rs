//! A layer on a mesh as a choice problem: a node per operator, an edge per activation.
//!
//! A node's choice is (strategy, kept or computed again, storage per parameter). The stream is a node too: its choice
//! is the sharding in which it enters and leaves. An edge sees of its producer (sharding, gradient wanted, kept or
//! again) and of its reader (sharding wanted, gradient left, whether backward needs the value), and prices the
//! conversions both ways and the bytes that are kept. The rules are those of `ir::lower`, priced.

use std::collections::BTreeSet;
use std::sync::Arc;

use ir::graph::{Layer, TensorId};
use ir::lower::{LayerChoice, Recompute};
use ir::mesh::MAX_AXES;
use ir::op::OpKind;
use ir::program::{Home, Storage};
use ir::sharding::Sharding;
use ir::signature::signature;
use ir::strategy::{Placements, Strategy, placements};

use crate::clock::{Clock, Spans};
use crate::meeting::{Pace, Passages};
use crate::problem::{Cost, Problem};

pub(crate) use smaller::Shift;

mod build;
mod smaller;

/// How an operator runs: all that its neighbours see of a choice.
#[derive(Clone, Debug)]
struct Form {
    strategy: Strategy,
    recompute: Recompute,
    places: Arc<Placements>,
    /// Which of its operator's paces.
    pace: usize,
    /// What a micro-batch's passes compute.
    passes: Spans,
    /// Bytes of a device while it runs.
    beside: f64,
}

/// One choice of an operator: a form, and where its parameters live.
#[derive(Clone, Copy, Debug)]
struct Pick {
    /// Which of its operator's forms.
    form: u32,
    /// Which of its operator's storages.
    stored: u32,
}

/// Storages of an operator's parameters.
#[derive(Clone, Debug, Default)]
struct Stored {
    storage: Vec<(TensorId, Storage)>,
    cost: Cost,
    spans: Spans,
    /// The same where every parameter is sent by itself.
    alone: Spans,
    /// Bytes among those of the cost that a stage has once for all its layers: this one's share.
    once: f64,
    on_host: OnHost,
}

/// Bytes of an operator's states that its host has, or could have.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OnHost {
    /// Optimizer states there.
    pub states: f64,
    /// Parameters between uses, wherever they are.
    pub parameters: f64,
    /// What these leave free where the host has them: those of a layer or two are on the device while they are used.
    pub freed: f64,
}

impl OnHost {
    /// Seconds of bytes, at so many for each.
    pub(crate) fn at(self, seconds: Self) -> f64 {
        self.states * seconds.states + self.parameters * seconds.parameters - self.freed * seconds.freed
    }

    fn plus(self, other: Self) -> Self {
        Self {
            states: self.states + other.states,
            parameters: self.parameters + other.parameters,
            freed: self.freed + other.freed,
        }
    }
}

/// What the choices of an operator are made of.
#[derive(Clone, Default)]
struct Choices {
    forms: Vec<Form>,
    /// What its forms take for products: distinct ones.
    paces: Vec<Pace>,
    stored: Vec<Stored>,
    picks: Vec<Pick>,
}

impl Choices {
    fn form(&self, pick: Pick) -> &Form {
        &self.forms[pick.form as usize]
    }

    fn stored(&self, pick: Pick) -> &Stored {
        &self.stored[pick.stored as usize]
    }

    fn spans(&self, pick: Pick) -> Spans {
        self.stored(pick).spans.plus(self.form(pick).passes, 1.0)
    }
}

/// The problem and what its choices mean.
#[derive(Clone)]
pub struct LayerProblem<'a> {
    /// The choice problem; its nodes are the operators, then the stream.
    pub problem: Problem,
    layer: &'a Layer,
    clock: Clock,
    ops: Vec<Choices>,
    /// What the tables of the edges are made from.
    passages: Vec<Passages>,
    streams: Vec<Sharding>,
    /// Parameters that other layers hold.
    shared: BTreeSet<TensorId>,
}

impl<'a> LayerProblem<'a> {
    /// Prices it as another clock counts that differs in what compute covers.
    pub fn set_clock(&mut self, clock: Clock) {
        if clock == self.clock {
            return;
        }
        for (node, op) in self.problem.nodes.iter_mut().zip(&self.ops) {
            for (cost, &pick) in node.choices.iter_mut().zip(&op.picks) {
                cost.time = clock.seconds(op.spans(pick));
            }
        }
        let passes = |clock: Clock| (clock.forward, clock.backward, clock.in_flight);
        if passes(clock) != passes(self.clock) {
            for (edge, passages) in self.problem.edges.iter_mut().zip(&self.passages) {
                let costs = passages.iter().map(|passage| passage.map(|passage| passage.cost(&clock)));
                edge.table = costs.collect();
            }
        }
        self.clock = clock;
    }

    /// Says what it costs to pass the stream in each of its shardings.
    pub(crate) fn charge_streams(&mut self, seconds: impl Fn(Sharding) -> f64) {
        let streams = self.problem.nodes.last_mut().into_iter().flat_map(|node| &mut node.choices);
        streams.zip(&self.streams).for_each(|(cost, &stream)| cost.time = seconds(stream));
    }

    /// The choice that a solution means.
    pub fn choice(&self, choices: &[usize]) -> LayerChoice {
        let forms: Vec<&Form> = self.picked(choices).map(|(op, pick)| op.form(pick)).collect();
        let stream = self.streams[choices[self.ops.len()]];
        let has_loss = self.layer.has_loss();
        LayerChoice {
            stream: if self.layer.stream_in.is_empty() { Sharding::REPLICATED } else { stream },
            out: if has_loss { Sharding::REPLICATED } else { stream },
            strategies: forms.iter().map(|form| form.strategy).collect(),
            recompute: self
                .layer
                .ops
                .iter()
                .zip(&forms)
                .map(|(op, form)| told(&op.kind, form.recompute))
                .collect(),
            kept: Home::Device,
            parameters: Home::Device,
            storage: self
                .picked(choices)
                .flat_map(|(op, pick)| op.stored(pick).storage.iter().copied())
                .collect(),
            shared: self.shared.clone(),
        }
    }
}

impl LayerProblem<'_> {
    /// What a solution picks of every operator.
    fn picked<'s>(&'s self, choices: &'s [usize]) -> impl Iterator<Item = (&'s Choices, Pick)> {
        self.ops.iter().zip(choices).map(|(op, &choice)| (op, op.picks[choice]))
    }

    /// What a solution takes, between operators apart.
    pub fn spans(&self, choices: &[usize]) -> Spans {
        let picked = self.picked(choices).map(|(op, pick)| op.spans(pick));
        picked.fold(Spans::default(), |sum, one| sum.plus(one, 1.0))
    }

    /// Seconds that forward computes in the micro-batches of a step, at least.
    pub(crate) fn least_forward(&self) -> f64 {
        let of_op = |op: &Choices| op.forms.iter().map(|form| form.passes.forward).reduce(f64::min);
        self.ops.iter().filter_map(of_op).sum::<f64>() * self.clock.micro_batches
    }

    /// Seconds that forward and backward of a solution add to a step where they send for longer than they compute;
    /// negative where they compute for longer.
    pub(crate) fn excess(&self, choices: &[usize]) -> [f64; 2] {
        self.clock.excess(self.spans(choices))
    }

    /// So much of that of a choice of a node.
    pub(crate) fn part_of_excess(&self, (node, choice): (usize, usize), parts: [f64; 2]) -> f64 {
        self.ops.get(node).map_or(0.0, |op| {
            let [forward, backward] = self.clock.excess(op.spans(op.picks[choice]));
            forward * parts[0] + backward * parts[1]
        })
    }

    /// Bytes that a choice of a node needs beside what is kept.
    pub(crate) fn beside_of(&self, node: usize, choice: usize) -> f64 {
        self.ops.get(node).map_or(0.0, |op| op.form(op.picks[choice]).beside)
    }

    /// Bytes that a solution needs beside what is kept.
    pub fn beside(&self, choices: &[usize]) -> f64 {
        self.picked(choices).map(|(op, pick)| op.form(pick).beside).sum()
    }

    /// Bytes of a solution that a stage has once for all its layers: this one's share.
    pub(crate) fn once(&self, choices: &[usize]) -> f64 {
        self.picked(choices).map(|(op, pick)| op.stored(pick).once).sum()
    }

    /// What the host has, or could have, of a choice of a node.
    pub(crate) fn on_host_of(&self, node: usize, choice: usize) -> OnHost {
        self.ops.get(node).map_or_else(OnHost::default, |op| op.stored(op.picks[choice]).on_host)
    }

    /// What the host has, or could have, of a solution.
    pub fn on_host(&self, choices: &[usize]) -> OnHost {
        let picked = self.picked(choices).map(|(op, pick)| op.stored(pick).on_host);
        picked.fold(OnHost::default(), OnHost::plus)
    }

    /// How often things happen in it.
    pub(crate) fn clock(&self) -> Clock {
        self.clock
    }

    /// What every choice adds where parameters are sent one by one, and nothing but its own operator covers that.
    pub(crate) fn own_excess(&self) -> Vec<Vec<f64>> {
        self.of_picks(|op, pick| {
            let alone = op.stored(pick).alone.plus(op.form(pick).passes, 1.0);
            let [forward, backward] = self.clock.excess(alone);
            let more = self.clock.seconds(alone) - self.clock.seconds(op.spans(pick));
            more + forward.max(0.0) + backward.max(0.0)
        })
    }

    fn of_picks(&self, own: impl Fn(&Choices, Pick) -> f64) -> Vec<Vec<f64>> {
        let of_op = |op: &Choices| op.picks.iter().map(|&pick| own(op, pick)).collect();
        let streams = vec![0.0; self.streams.len()];
        self.ops.iter().map(of_op).chain([streams]).collect()
    }

    /// Shardings in which a choice uses a parameter and leaves its gradient; `None` for a tensor that no operator
    /// reads.
    pub fn used(&self, choice: &LayerChoice, tensor: TensorId) -> Option<[Sharding; 2]> {
        let op = self.layer.reader(tensor)?;
        let one = &self.layer.ops[op.0];
        let at = one.operands.iter().position(|&t| t == tensor)?;
        let placed = placements(&signature(self.layer, one), choice.strategies[op.0]);
        Some([placed.operands[at], placed.operand_gradients[at]])
    }

    /// The same of every strategy of the operator that reads it, each once.
    pub(crate) fn uses(&self, tensor: TensorId) -> BTreeSet<[Sharding; 2]> {
        let Some(op) = self.layer.reader(tensor) else { return BTreeSet::new() };
        let Some(at) = self.layer.ops[op.0].operands.iter().position(|&t| t == tensor) else {
            return BTreeSet::new();
        };
        let of = |form: &Form| [form.places.operands[at], form.places.operand_gradients[at]];
        self.ops[op.0].forms.iter().map(of).collect()
    }
}

/// What a choice says of an operator: a fork computes nothing, whoever reads it in backward.
fn told(kind: &OpKind, recompute: Recompute) -> Recompute {
    if *kind == OpKind::Fork { Recompute::Keep } else { recompute }
}

const _: () = assert!(MAX_AXES <= 8, "axis sets are one byte");
