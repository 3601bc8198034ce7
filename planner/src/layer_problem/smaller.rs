//! A layer's choices with a smaller micro-batch, by the tables of a multiple of it.
//!
//! Nearly all of a table's work is in its edges. Those of a micro-batch stand for all that divide it: per step,
//! conversions of smaller tensors take no less. What every choice of an operator takes by itself is cheap to price
//! anew: its kernels are shorter, parameters are gathered more often, and some strategies do not divide any more.

use std::collections::BTreeSet;

use ir::graph::Sizes;
use ir::strategy::Strategy;

use super::build::Builder;
use super::{LayerProblem, Pick};
use crate::clock::{Clock, Spans};
use crate::given::Given;
use crate::prices::Prices;
use crate::space::Space;
use crate::stream;

/// What choices cost more than the tables say.
#[derive(Clone, Debug)]
pub(crate) struct Shift {
    /// Seconds, per node and choice; infinite where a choice is not legal.
    more: Vec<Vec<f64>>,
    /// Seconds that forward and backward add where they send for longer than they compute.
    excess: Vec<Vec<[f64; 2]>>,
}

impl Shift {
    /// Seconds of a choice of a node, with so large parts of the excess.
    pub(crate) fn more(&self, node: usize, choice: usize, parts: [f64; 2]) -> f64 {
        let excess = self.excess[node][choice];
        self.more[node][choice] + excess[0] * parts[0] + excess[1] * parts[1]
    }

    /// The excess of a solution.
    pub(crate) fn excess(&self, choices: &[usize]) -> [f64; 2] {
        let picked = self.excess.iter().zip(choices).map(|(excess, &choice)| excess[choice]);
        picked.fold([0.0; 2], |sum, one| [sum[0] + one[0], sum[1] + one[1]])
    }
}

impl LayerProblem<'_> {
    /// What choices cost where lengths are those of a micro-batch that divides the problem's, and steps have more of
    /// them.
    pub(crate) fn shift(&self, sizes: &Sizes, prices: &Prices<'_>, clock: Clock, given: &Given) -> Shift {
        let builder = Builder::new(self.layer, (sizes, prices), clock);
        let space = Space::new(self.layer, given.context).without(&given.forbid.cp_kind);
        let (mut more, mut excess) = (Vec::new(), Vec::new());
        for (op, own) in self.layer.op_ids().zip(&self.ops) {
            let legal: BTreeSet<Strategy> = builder.strategies(op, &space).into_iter().collect();
            let known: BTreeSet<Strategy> = own.forms.iter().map(|form| form.strategy).collect();
            // Where axes that cut the operator no longer divide, all of it may be computed everywhere instead, which
            // the tables do not know: it is no faster than what they know.
            let may_close = legal.is_subset(&known);
            let passes = |strategy, recompute| builder.passes(op, recompute, builder.timed(op, strategy));
            let passes: Vec<Option<Spans>> = own
                .forms
                .iter()
                .map(|form| legal.contains(&form.strategy).then(|| passes(form.strategy, form.recompute)))
                .collect();
            let cost = |pick: &Pick| match passes[pick.form as usize] {
                Some(passes) => {
                    let spans = own.stored(*pick).spans.plus(passes, 1.0);
                    (clock.seconds(spans) - self.clock.seconds(own.spans(*pick)), clock.excess(spans))
                }
                None if may_close => (f64::INFINITY, [0.0; 2]),
                None => (0.0, self.clock.excess(own.spans(*pick))),
            };
            let (of_op, excess_of_op): (Vec<f64>, Vec<[f64; 2]>) = own.picks.iter().map(cost).unzip();
            more.push(of_op);
            excess.push(excess_of_op);
        }
        let legal = stream::shardings(self.layer, sizes, prices);
        let may_close = legal.iter().all(|stream| self.streams.contains(stream));
        let stream = |stream| if may_close && !legal.contains(stream) { f64::INFINITY } else { 0.0 };
        more.push(self.streams.iter().map(stream).collect());
        excess.push(vec![[0.0; 2]; self.streams.len()]);
        Shift { more, excess }
    }
}

#[cfg(test)]
#[path = "smaller_tests.rs"]
mod tests;
