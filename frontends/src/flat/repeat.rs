//! Structure that repeats: runs of words, alike stretches of operators that follow each other.
//!
//! Words are alike where their operators are of the same kinds, read each other in the same way and leave the same of
//! what they make. Lengths, attributes and names may differ, and values that only wait are not looked at: layers with
//! a window and without, or the last that reads an encoder, are words of one run. Whether they are one *kind* of layer
//! is asked when they are built.
//!
//! Of all runs the one that says most at once is taken first, (n - 1) * operators of a word; of equals the shorter
//! word, then the narrower cuts, then the first. What lies before and behind is looked at again.

use std::cmp::Reverse;
use std::ops::Range;

use ir::graph::{Role, TensorId};

use super::cut::Cuts;
use super::flow::{Flow, Numbering};

/// Words that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Position of the first operator.
    pub(crate) start: usize,
    /// Operators of a word.
    pub(crate) length: usize,
    /// Words, two or more.
    pub(crate) count: usize,
}

impl Run {
    /// Position behind the last operator.
    pub(crate) fn end(&self) -> usize {
        self.start + self.length * self.count
    }

    fn saved(&self) -> usize {
        self.length * (self.count - 1)
    }
}

/// What is compared.
#[derive(Debug)]
pub(crate) struct Words<'a> {
    flow: &'a Flow<'a>,
    cuts: &'a Cuts,
    /// What an operator is by itself, as a number.
    codes: Vec<usize>,
    /// How many parameters the operators before a position read.
    n_parameters: Vec<usize>,
    /// Whether a position is a narrow place.
    narrow: Vec<bool>,
    /// Longest word.
    longest: usize,
}

impl<'a> Words<'a> {
    /// Makes a graph ready for comparisons; no word is longer than `longest`.
    pub(crate) fn new(flow: &'a Flow<'a>, cuts: &'a Cuts, longest: usize) -> Self {
        let mut numbers = Numbering::new();
        let codes = (0..flow.len()).map(|position| numbers.of(code(flow, position))).collect();
        let mut narrow = vec![false; cuts.at.len()];
        cuts.plateaus().into_iter().flatten().for_each(|position| narrow[position] = true);
        let mut n_parameters = vec![0];
        for operands in &flow.operands {
            let own = operands.iter().filter(|&&operand| flow.whole.is_parameter(operand)).count();
            n_parameters.push(n_parameters[n_parameters.len() - 1] + own);
        }
        Self { flow, cuts, codes, n_parameters, narrow, longest }
    }

    /// All runs of a graph, in order.
    pub(crate) fn runs(&self) -> Vec<Run> {
        let mut runs = Vec::new();
        for run in self.runs_in(0..self.flow.len()) {
            self.refine(run, &mut runs);
        }
        runs
    }

    /// Whether the words at two positions are alike.
    pub(crate) fn alike(&self, a: usize, b: usize, length: usize) -> bool {
        if a.max(b) + length > self.codes.len() || self.codes[a..a + length] != self.codes[b..b + length] {
            return false;
        }
        let (mut outside_a, mut outside_b) = (Numbering::new(), Numbering::new());
        (0..length).all(|at| {
            let mut pairs = self.flow.reads(a + at).zip(self.flow.reads(b + at));
            let leaves = |start: usize| {
                let results = &self.flow.op(start + at).results;
                results.iter().map(move |result| self.cuts.last_read[result.0] >= Some(start + length))
            };
            pairs.all(|(x, y)| self.place(x, a, &mut outside_a) == self.place(y, b, &mut outside_b))
                && leaves(a).eq(leaves(b))
        })
    }

    /// Where a value comes from, seen from the start of a word: which result of which operator, or which of the
    /// values from outside.
    fn place(
        &self,
        value: TensorId,
        start: usize,
        outside: &mut Numbering<TensorId>,
    ) -> (Option<usize>, usize) {
        match self.flow.made[value.0].and_then(|made| made.checked_sub(start)) {
            Some(at) => {
                let results = &self.flow.op(start + at).results;
                (Some(at), results.iter().position(|result| *result == value).unwrap_or(0))
            }
            None => (None, outside.of(value)),
        }
    }

    fn runs_in(&self, range: Range<usize>) -> Vec<Run> {
        let (mut open, mut runs) = (vec![range], Vec::new());
        while let Some(range) = open.pop() {
            if let Some(run) = self.best(&range) {
                open.push(run.end()..range.end);
                open.push(range.start..run.start);
                runs.push(run);
            }
        }
        runs.sort_by_key(|run| run.start);
        runs
    }

    /// A word that is itself mostly repetition is told by its parts, if these are half of it or less.
    fn refine(&self, run: Run, found: &mut Vec<Run>) {
        let inner = self.runs_in(run.start..run.start + run.length);
        let repeated: usize = inner.iter().map(Run::saved).sum();
        if 2 * repeated < run.length {
            found.push(run);
            return;
        }
        for word in 0..run.count {
            for part in &inner {
                self.refine(Run { start: part.start + word * run.length, ..*part }, found);
            }
        }
    }

    fn best(&self, range: &Range<usize>) -> Option<Run> {
        let mut best: Option<(Run, u128)> = None;
        for length in 1..=self.longest.min(range.len() / 2) {
            let mut start = range.start;
            while start + 2 * length <= range.end {
                let same = self.codes[start..range.end - length]
                    .iter()
                    .zip(&self.codes[start + length..range.end])
                    .take_while(|(a, b)| a == b)
                    .count();
                let most = (same / length) * length;
                if most > 0 && best.is_none_or(|(run, _)| most > run.saved()) {
                    let better = self.best_from(start..start + same + length, length, best);
                    best = better.or(best);
                }
                start += same + 1;
            }
        }
        best.map(|(run, _)| run)
    }

    /// The best run in a stretch whose operators are those one word later, where it is better than the best so far.
    fn best_from(
        &self,
        range: Range<usize>,
        length: usize,
        best: Option<(Run, u128)>,
    ) -> Option<(Run, u128)> {
        let mut better: Option<(Run, u128)> = None;
        // Starts a word apart are of one run, which is looked at once.
        for first in range.start..(range.start + length).min(range.end) {
            let mut start = first;
            while start + 2 * length <= range.end {
                let count =
                    if self.is_layer(start, length) { self.count(start, length, range.end) } else { 0 };
                let run = Run { start, length, count };
                if count > 1 && best.is_none_or(|(best, _)| run.saved() > best.saved()) {
                    let borders = (0..=count).map(|word| self.cuts.at[start + word * length].width);
                    let width = borders.max().unwrap_or(0);
                    // Of equals the one that starts first, which is not met first here.
                    let key = |run: &Run, width| (run.saved(), Reverse((width, run.start)));
                    if better.is_none_or(|(other, wider)| key(&run, width) > key(&other, wider)) {
                        better = Some((run, width));
                    }
                }
                start += count.max(1) * length;
            }
        }
        better
    }

    /// How many words from `start` are alike, with narrow places between them. There and behind the last no more
    /// values cross than before the first.
    fn count(&self, start: usize, length: usize, end: usize) -> usize {
        let can_meet =
            |at: usize| self.cuts.is_valid(at) && self.cuts.at[at].n_values <= self.cuts.at[start].n_values;
        let mut count = 0;
        while start + (count + 1) * length <= end
            && can_meet(start + (count + 1) * length)
            && match count {
                0 => self.cuts.is_valid(start),
                _ => {
                    let at = start + count * length;
                    self.narrow[at] && self.alike(at - length, at, length)
                }
            }
        {
            count += 1;
        }
        count
    }

    /// What has no parameter is no layer.
    fn is_layer(&self, start: usize, length: usize) -> bool {
        self.n_parameters[start + length] > self.n_parameters[start]
    }
}

/// What an operator is by itself: its kind, what its operands are and how many dims they and its results have.
fn code(flow: &Flow<'_>, position: usize) -> (&'static str, Vec<(u8, usize)>) {
    let op = flow.op(position);
    let sort = |tensor: &TensorId| {
        let tensor = &flow.whole.tensors[tensor.0];
        let role = match tensor.role {
            Role::Activation => 0,
            Role::Parameter(_) | Role::Frozen(_) => 1,
            Role::Data(_) => 2,
        };
        (role, tensor.dims.len())
    };
    (op.kind.line().name, flow.operands[position].iter().chain(&op.results).map(sort).collect())
}
