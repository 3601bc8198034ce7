//! An edge of a layer's choice problem: what its ends see of a choice, and what every pair of them costs.
//!
//! A producer leaves a value in one sharding and wants its gradient in another; a reader wants the value and leaves the
//! gradient. The conversions both ways are paid every micro-batch; a value that backward needs is kept in the smaller
//! of its two shardings, converted again from there, or computed again.

use std::collections::BTreeMap;

use ir::graph::{Layer, Sizes, TensorId};
use ir::op::OpKind;
use ir::sharding::Sharding;

use crate::prices::Prices;
use crate::problem::Cost;

/// How often things happen, as the objective sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clock {
    /// Seconds of a micro-batch count this often: micro-batches and bubble.
    pub micro_batches: f64,
    /// Kept activations count this often: micro-batches in flight.
    pub in_flight: f64,
    /// Layers of a stage, which share the room for the parameters of the two that are gathered at once.
    pub layers: f64,
}

/// What an edge sees of a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Port {
    pub(crate) value: Sharding,
    pub(crate) gradient: Sharding,
    /// Producer: computed again, or a fork nobody may read in backward. Reader: backward needs the value.
    pub(crate) flag: bool,
}

/// Whether a gradient comes back over an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carries {
    /// Only the value there.
    Values,
    /// The value there and its gradient back.
    Both,
}

/// A tensor between its producer and its reader.
pub(crate) struct Meeting<'a> {
    pub(crate) layer: &'a Layer,
    pub(crate) tensor: TensorId,
    pub(crate) sizes: &'a Sizes,
    pub(crate) clock: Clock,
    pub(crate) carries: Carries,
}

impl Meeting<'_> {
    /// Price of every pair of a producer's and a reader's port, row by row; `None` where they cannot meet.
    pub(crate) fn table(&self, prices: &Prices<'_>, left: &[Port], right: &[Port]) -> Vec<Option<Cost>> {
        let shape = self.layer.shape(self.tensor, self.sizes);
        let dims = &self.layer.tensors[self.tensor.0].dims;
        let filled = dims.iter().map(|dim| self.sizes.filled[dim.0]).fold(1.0, f64::min);
        let price = |from: &[Sharding], to: &[Sharding]| prices.conversions((&shape, filled), from, to);
        let there = Matrix::new(left, right, |port| port.value, price);
        let back = match self.carries {
            Carries::Values => None,
            Carries::Both => Some(Matrix::new(right, left, |port| port.gradient, price)),
        };
        let element_bytes = prices.machine().kernels.element_bytes * filled;
        let bytes = |port: &Port| port.value.local_elements(prices.mesh(), &shape) as f64 * element_bytes;
        let before: Vec<f64> = left.iter().map(bytes).collect();
        let after: Vec<f64> = right.iter().map(bytes).collect();
        let producer = self.layer.producer(self.tensor);
        let is_fork = producer.is_some_and(|op| self.layer.ops[op.0].kind == OpKind::Fork);
        let pair = |i: usize, j: usize| {
            let there = there.at(i, j)?;
            let back = back.as_ref().map_or(Some(0.0), |back| back.at(j, i))?;
            let mut time = there + back;
            let mut saved = 0.0;
            if right[j].flag {
                match (is_fork, left[i].flag) {
                    // A fork's results are its operand; it must have been marked as needed.
                    (true, false) => return None,
                    (_, true) => time += there,
                    (false, false) => {
                        saved = before[i].min(after[j]);
                        if before[i] < after[j] {
                            time += there;
                        }
                    }
                }
            }
            Some(Cost { time: time * self.clock.micro_batches, memory: saved * self.clock.in_flight })
        };
        (0..left.len()).flat_map(|i| (0..right.len()).map(move |j| (i, j))).map(|(i, j)| pair(i, j)).collect()
    }
}

/// Seconds per pair of distinct shardings, and which of them a port has.
struct Matrix {
    rows: Vec<usize>,
    columns: Vec<usize>,
    n_columns: usize,
    values: Vec<Option<f64>>,
}

impl Matrix {
    fn new(
        from: &[Port],
        to: &[Port],
        side: impl Fn(&Port) -> Sharding,
        price: impl Fn(&[Sharding], &[Sharding]) -> Vec<Option<f64>>,
    ) -> Self {
        let (rows, from) = number(&from.iter().map(&side).collect::<Vec<_>>());
        let (columns, to) = number(&to.iter().map(&side).collect::<Vec<_>>());
        let place = |list: Vec<u32>| list.into_iter().map(|at| at as usize).collect();
        let values = price(&from, &to);
        Self { rows: place(rows), columns: place(columns), n_columns: to.len(), values }
    }

    fn at(&self, row: usize, column: usize) -> Option<f64> {
        self.values[self.rows[row] * self.n_columns + self.columns[column]]
    }
}

/// Numbers equal things alike: the number of each, and the distinct ones in the order in which they come.
pub(crate) fn number<T: Copy + Ord>(list: &[T]) -> (Vec<u32>, Vec<T>) {
    let mut numbers: BTreeMap<T, u32> = BTreeMap::new();
    let mut distinct = Vec::new();
    let number = |one: &T| {
        *numbers.entry(*one).or_insert_with(|| {
            distinct.push(*one);
            distinct.len() as u32 - 1
        })
    };
    (list.iter().map(number).collect(), distinct)
}
