//! An edge of a layer's choice problem: what its ends see of a choice, and what every pair of them costs.
//!
//! A producer leaves a value in one sharding and wants its gradient in another; a reader wants the value and leaves the
//! gradient. The conversions both ways are paid every micro-batch; a value that backward needs is kept in the smaller
//! of its two shardings, converted again from there, or computed again.

use std::sync::Arc;

use cost_model::dispatch::Routing;
use cost_model::exposure::{Beside, OpSeconds};
use ir::graph::{Layer, Sizes, TensorId};
use ir::op::OpKind;
use ir::program::Side;
use ir::sharding::Sharding;
use ir::units::Seconds;

use crate::clock::Clock;
use crate::memos::lock;
use crate::prices::{Conversion, Conversions, Prices};
use crate::problem::Cost;

/// What an edge sees of a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Port {
    pub(crate) value: Sharding,
    pub(crate) gradient: Sharding,
    /// Producer: computed again, or a fork nobody may read in backward. Reader: backward needs the value.
    pub(crate) flag: bool,
    /// Which of the paces of its operator, behind whose products conversions hide.
    pub(crate) pace: usize,
}

impl Port {
    /// Equal where the ports are.
    pub(crate) fn code(self) -> (u32, u32, bool, usize) {
        (self.value.code(), self.gradient.code(), self.flag, self.pace)
    }
}

/// Matrix products of an operator, or of those beyond it where it only passes on what they compute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Pace {
    pub(crate) forward: OpSeconds,
    pub(crate) backward: OpSeconds,
    /// What reads in backward a value that forward read: its backward, and its forward where that always runs again.
    pub(crate) again: OpSeconds,
}

/// What a pair of ports costs: seconds of a micro-batch's passes, bytes that it keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Passage {
    pub(crate) forward: f64,
    pub(crate) backward: f64,
    pub(crate) saved: f64,
}

impl Passage {
    /// Its price as a clock counts.
    pub(crate) fn cost(self, clock: &Clock) -> Cost {
        Cost {
            time: self.forward * clock.forward + self.backward * clock.backward,
            memory: self.saved * clock.in_flight,
        }
    }
}

/// The ports of one end of an edge and the paces that they number.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct End {
    pub(crate) ports: Vec<Port>,
    pub(crate) paces: Vec<Pace>,
}

/// Prices of every pair of a producer's and a reader's port, row by row; `None` where they cannot meet.
pub(crate) type Passages = Arc<Vec<Option<Passage>>>;

/// A table that was made already, and all that it depends on: layers of other kinds, and other forms of a layer, have
/// the same edges.
#[derive(Debug)]
pub(crate) struct Known {
    from: End,
    to: End,
    moved: Moved,
    table: Passages,
}

/// What is moved over an edge, and how.
#[derive(Clone, Debug, PartialEq)]
struct Moved {
    shape: Vec<u64>,
    /// The fraction of it that holds something.
    filled: f64,
    routing: Option<Routing>,
    cover: Seconds,
    carries: Carries,
    is_fork: bool,
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
    pub(crate) carries: Carries,
}

impl Meeting<'_> {
    /// The table of its ends, whose ports are distinct.
    pub(crate) fn table(&self, prices: &Prices<'_>, from: &End, to: &End) -> Passages {
        let moved = self.moved(prices);
        let is_same = |known: &&Known| known.moved == moved && known.from == *from && known.to == *to;
        if let Some(known) = lock(&prices.tables).iter().find(is_same) {
            return Arc::clone(&known.table);
        }
        let table = Arc::new(moved.table(prices, from, to));
        let known = Known { from: from.clone(), to: to.clone(), moved, table: Arc::clone(&table) };
        lock(&prices.tables).push(known);
        table
    }

    fn moved(&self, prices: &Prices<'_>) -> Moved {
        let dims = &self.layer.tensors[self.tensor.0].dims;
        let routing = Routing::of(self.layer, self.tensor);
        let producer = self.layer.producer(self.tensor);
        Moved {
            shape: self.layer.shape(self.tensor, self.sizes),
            filled: dims.iter().map(|dim| self.sizes.filled[dim.0]).fold(1.0, f64::min),
            routing,
            cover: prices.cover((self.layer, self.sizes), routing),
            carries: self.carries,
            is_fork: producer.is_some_and(|op| self.layer.ops[op.0].kind == OpKind::Fork),
        }
    }
}

impl Moved {
    fn table(&self, prices: &Prices<'_>, from: &End, to: &End) -> Vec<Option<Passage>> {
        let Self { shape, filled, routing, cover, carries, is_fork } = self;
        let (left, right) = (&from.ports, &to.ports);
        let price =
            |from: &[Sharding], to: &[Sharding]| prices.conversions((shape, *filled, *routing), from, to);
        let there = Matrix::new(left, right, |port| port.value, price);
        let back = match carries {
            Carries::Values => None,
            Carries::Both => Some(Matrix::new(right, left, |port| port.gradient, price)),
        };
        let element_bytes = prices.machine().kernels.element_bytes * filled;
        let bytes = |port: &Port| port.value.local_elements(prices.mesh(), shape) as f64 * element_bytes;
        let before: Vec<f64> = left.iter().map(bytes).collect();
        let after: Vec<f64> = right.iter().map(bytes).collect();
        let n_paces = [from.paces.len(), to.paces.len()];
        let mut forwards = Shown::new(&there.conversions, n_paces);
        let mut backwards = back.as_ref().map(|back| Shown::new(&back.conversions, n_paces));
        // Those that send what is yielded again, and those that send what was kept, beside no product before them.
        let mut agains = [0, 1].map(|_| Shown::new(&there.conversions, n_paces));
        let mut pair = |i: usize, j: usize| {
            let sent = there.which(i, j)?;
            let sent_back = match &back {
                None => None,
                Some(back) => Some(back.which(j, i)?),
            };
            let paces = [left[i].pace, right[j].pace];
            let (from, to) = (from.paces[paces[0]], to.paces[paces[1]]);
            let shows = |side: Side, before: OpSeconds, after: OpSeconds| {
                move |one| prices.shows(one, side, Beside { before, after }, *cover)
            };
            let mut pair = Passage {
                forward: forwards.of(sent, paces, shows(Side::Primal, from.forward, to.forward)),
                // A gradient is yielded by its reader's backward and read by its producer's.
                backward: backwards.as_mut().zip(sent_back).map_or(0.0, |(all, sent)| {
                    all.of(sent, paces, shows(Side::Gradient, to.backward, from.backward))
                }),
                saved: 0.0,
            };
            let [yielded, kept] = &mut agains;
            if right[j].flag {
                match (*is_fork, left[i].flag) {
                    // A fork's results are its operand; it must have been marked as needed.
                    (true, false) => return None,
                    (_, true) => {
                        pair.backward += yielded.of(sent, paces, shows(Side::Primal, from.forward, to.again));
                    }
                    (false, false) => {
                        pair.saved = before[i].min(after[j]);
                        if before[i] < after[j] {
                            let nothing = OpSeconds::default();
                            pair.backward += kept.of(sent, paces, shows(Side::Primal, nothing, to.again));
                        }
                    }
                }
            }
            Some(pair)
        };
        let mut table = Vec::with_capacity(left.len() * right.len());
        for i in 0..left.len() {
            table.extend((0..right.len()).map(|j| pair(i, j)));
        }
        table
    }
}

/// What shows of distinct conversions by the paces of both ends, as far as it was asked.
struct Shown<'c> {
    conversions: &'c Conversions,
    n_paces: [usize; 2],
    /// No number where it was not asked.
    values: Vec<f64>,
}

impl<'c> Shown<'c> {
    fn new(conversions: &'c Conversions, n_paces: [usize; 2]) -> Self {
        let n = conversions.distinct().len() * n_paces[0] * n_paces[1];
        Self { conversions, n_paces, values: vec![f64::NAN; n] }
    }

    /// Of one of them, with which of the paces of both ends.
    fn of(&mut self, which: usize, paces: [usize; 2], shows: impl Fn(Conversion) -> f64) -> f64 {
        let known = &mut self.values[(which * self.n_paces[0] + paces[0]) * self.n_paces[1] + paces[1]];
        if known.is_nan() {
            *known = shows(self.conversions.distinct()[which]);
        }
        *known
    }
}

/// Conversions per pair of distinct shardings, and which of them a port has.
struct Matrix {
    rows: Vec<u32>,
    columns: Vec<u32>,
    conversions: Conversions,
}

impl Matrix {
    fn new(
        from: &[Port],
        to: &[Port],
        side: impl Fn(&Port) -> Sharding,
        price: impl Fn(&[Sharding], &[Sharding]) -> Conversions,
    ) -> Self {
        let (rows, from) = number(&from.iter().map(&side).collect::<Vec<_>>(), Sharding::code);
        let (columns, to) = number(&to.iter().map(&side).collect::<Vec<_>>(), Sharding::code);
        Self { rows, columns, conversions: price(&from, &to) }
    }

    /// Which of the conversions a pair of ports needs; `None` where there is no way.
    fn which(&self, row: usize, column: usize) -> Option<usize> {
        self.conversions.which(self.rows[row] as usize, self.columns[column] as usize)
    }
}

/// Numbers things of one key alike: the number of each, and the first of every key in the order in which they come.
/// Keys are few, and what comes next mostly has that of what came last.
pub(crate) fn number<T: Copy, K: PartialEq>(list: &[T], key: impl Fn(T) -> K) -> (Vec<u32>, Vec<T>) {
    let (mut keys, mut distinct): (Vec<K>, Vec<T>) = (Vec::new(), Vec::new());
    let number = |one: &T| {
        let own = key(*one);
        let at = keys.iter().rposition(|known| *known == own).unwrap_or_else(|| {
            keys.push(own);
            distinct.push(*one);
            keys.len() - 1
        });
        at as u32
    };
    (list.iter().map(number).collect(), distinct)
}
