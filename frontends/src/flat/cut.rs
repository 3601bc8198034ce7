//! Where a flat graph can be cut in two: what is alive between two operators, and whether it can be streams.
//!
//! Position `p` lies before the operator `p` of the order. Alive there are the activations that were made before and
//! are read at `p` or later. They can be streams where they have one rank of three or more, begin with the sequences of
//! the micro-batch and their tokens, and each gets a gradient from behind the cut.

use ir::graph::{Extent, TensorId};

use super::flow::Flow;

/// A place between two operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Values alive.
    pub(crate) n_values: usize,
    /// Their elements for one sequence of the usual length.
    pub(crate) width: u128,
    /// Why they cannot be a stream.
    pub(crate) fault: Option<CutFault>,
}

/// Why values cannot be a stream, with one that is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CutFault {
    /// It does not begin with sequences and their tokens, or has nothing else.
    Dims(TensorId),
    /// Two of different rank.
    Ranks(TensorId, TensorId),
    /// Nothing behind the cut gives it a gradient.
    NoGradient(TensorId),
    /// What lies behind has no parameter: the loss alone is no layer.
    OnlyLoss,
}

/// All places, from before the first operator to behind the last, and how long values live.
#[derive(Debug)]
pub(crate) struct Cuts {
    /// By position.
    pub(crate) at: Vec<Cut>,
    /// Position of the last operator that reads a tensor.
    pub(crate) last_read: Vec<Option<usize>>,
}

impl Cuts {
    /// Looks at every place of a graph; widths are those of sequences of so many tokens.
    pub(crate) fn new(flow: &Flow<'_>, sequence: u64) -> Self {
        let last_read = last(flow, |_, _| true);
        let last_gradient = last_gradient(flow);
        let last_parameter = (0..flow.len()).rev().find(|&at| reads_parameter(flow, at)).unwrap_or(0);
        let mut alive: Vec<TensorId> = Vec::new();
        let mut at = vec![Cut { n_values: 0, width: 0, fault: Some(CutFault::OnlyLoss) }];
        for position in 0..flow.len() {
            alive.extend(&flow.op(position).results);
            alive.retain(|tensor| last_read[tensor.0] > Some(position));
            let has_gradient = |tensor: &TensorId| last_gradient[tensor.0] > Some(position);
            let mut cut = cut(flow, sequence, &alive, has_gradient);
            if position + 1 > last_parameter {
                cut.fault = Some(CutFault::OnlyLoss);
            }
            at.push(cut);
        }
        Self { at, last_read }
    }

    /// Whether layers can meet at a position.
    pub(crate) fn is_valid(&self, position: usize) -> bool {
        self.at[position].fault.is_none()
    }

    /// Whether a value that is made before a position is read there or later.
    pub(crate) fn is_alive(&self, value: TensorId, position: usize) -> bool {
        self.last_read[value.0] >= Some(position)
    }

    /// Narrow places: fewer elements cross here than at the places around, runs of equally many counted as one.
    pub(crate) fn plateaus(&self) -> Vec<std::ops::Range<usize>> {
        let width = |position: usize| match &self.at[position] {
            Cut { width, fault: None, .. } => *width,
            Cut { fault: Some(_), .. } => u128::MAX,
        };
        let mut plateaus = Vec::new();
        let mut start = 1;
        while start + 1 < self.at.len() {
            let same = (start..self.at.len()).find(|&p| width(p) != width(start)).unwrap_or(self.at.len());
            let is_low = |p: usize| self.at.get(p).is_none_or(|_| width(p) > width(start));
            if self.is_valid(start) && is_low(start - 1) && is_low(same) {
                plateaus.push(start..same);
            }
            start = same;
        }
        plateaus
    }
}

fn cut(flow: &Flow<'_>, sequence: u64, alive: &[TensorId], has_gradient: impl Fn(&TensorId) -> bool) -> Cut {
    let ndim = |tensor: &TensorId| flow.whole.tensors[tensor.0].dims.len();
    let other = alive.iter().find(|tensor| ndim(tensor) != ndim(&alive[0]));
    let dims = alive.iter().find(|tensor| !can_stream(flow, **tensor)).map(|&tensor| CutFault::Dims(tensor));
    let ranks = other.map(|&tensor| CutFault::Ranks(alive[0], tensor));
    let gradient = alive.iter().find(|tensor| !has_gradient(tensor)).map(|&t| CutFault::NoGradient(t));
    let elements = |&tensor: &TensorId| elements(flow, sequence, tensor);
    let width = alive.iter().map(elements).fold(0, u128::saturating_add);
    Cut { n_values: alive.len(), width, fault: dims.or(ranks).or(gradient) }
}

/// Sequences, then tokens or what an encoder has in their place, at last something of fixed length; nothing by experts.
fn can_stream(flow: &Flow<'_>, tensor: TensorId) -> bool {
    let extents = flow.whole.extents(tensor);
    matches!(
        extents[..],
        [Extent::MicroBatch, Extent::Sequence | Extent::Fixed(_), .., Extent::Fixed(_) | Extent::Uneven(_)]
    ) && !extents.iter().any(|extent| matches!(extent, Extent::Slots { .. }))
}

/// Elements of a tensor for one sequence.
fn elements(flow: &Flow<'_>, sequence: u64, tensor: TensorId) -> u128 {
    let length = |dim: &ir::graph::DimId| match flow.whole.dims[dim.0].extent {
        Extent::Fixed(n) | Extent::Uneven(n) => u128::from(n),
        Extent::MicroBatch => 1,
        Extent::Sequence | Extent::UpToSlice | Extent::Slots { .. } => u128::from(sequence),
    };
    flow.whole.tensors[tensor.0].dims.iter().map(length).fold(1, u128::saturating_mul)
}

/// The last operator that reads each tensor in a way that counts.
fn last(flow: &Flow<'_>, counts: impl Fn(usize, usize) -> bool) -> Vec<Option<usize>> {
    let mut last = vec![None; flow.whole.tensors.len()];
    for (position, operands) in flow.operands.iter().enumerate() {
        for (_, operand) in operands.iter().enumerate().filter(|(index, _)| counts(position, *index)) {
            last[operand.0] = Some(position);
        }
    }
    last
}

/// The last operator from which each activation gets a gradient.
fn last_gradient(flow: &Flow<'_>) -> Vec<Option<usize>> {
    let mut has_gradient = vec![false; flow.whole.tensors.len()];
    has_gradient[flow.loss().0] = true;
    let mut gives = vec![false; flow.len()];
    for position in (0..flow.len()).rev() {
        let op = flow.op(position);
        gives[position] = op.results.iter().any(|result| has_gradient[result.0]);
        for (index, operand) in flow.operands[position].iter().enumerate() {
            has_gradient[operand.0] |= gives[position] && op.kind.differentiates(index);
        }
    }
    last(flow, |position, index| gives[position] && flow.op(position).kind.differentiates(index))
}

fn reads_parameter(flow: &Flow<'_>, position: usize) -> bool {
    flow.operands[position].iter().any(|&operand| flow.whole.is_parameter(operand))
}
