//! What shows of a tensor's conversion beside the matrix products that need it or yield it.
//!
//! - A gather before products, or a scatter after them, runs in chunks beside them where the engine cuts them so; what
//!   is left is a share of the communication, or what the products cannot hide.
//! - An operand that is gathered again for the gradient of a weight is fetched behind the product that yields the
//!   gradient of the operand (NVIDIA/Megatron-LM, megatron/core/tensor_parallel/layers.py, backward of
//!   `LinearWithGradAccumulationAndAsyncCommunication`).
//! - The gradient of an operand is finished behind the product that yields the gradient of the weight, where the engine
//!   launches them so.
//! - Everything else shows in full.
//!
//! Between a conversion and its product may stand forks and views, which take no time of their own.

use ir::engine::TensorOverlap;
use ir::graph::{Layer, OpId};
use ir::op::OpKind;
use ir::program::{Instruction, Side, ValueId};
use ir::units::Seconds;
use ir::work::{GemmOutput, Pass, Work};

use crate::collective::CollectiveKind;
use crate::constants::Constants;
use crate::overlap::tensor_gather_exposed;
use crate::tensor_bytes::{Buffers, backward_buffers, forward_buffers};

/// Times of one instruction's matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OpSeconds {
    /// Those that yield tensors or gradients of tensors.
    pub products: Seconds,
    /// Those that yield gradients of parameters.
    pub weight_products: Seconds,
}

impl OpSeconds {
    /// All of them.
    pub fn both(self) -> Seconds {
        self.products + self.weight_products
    }

    /// Those of two instructions.
    pub fn plus(self, other: Self) -> Self {
        Self {
            products: self.products + other.products,
            weight_products: self.weight_products + other.weight_products,
        }
    }

    /// Adds the time of one piece of work, if it is a product.
    pub fn add(&mut self, work: &Work, time: Seconds) {
        match work {
            Work::Gemm { output: GemmOutput::Accumulator, .. } => self.weight_products += time,
            Work::Gemm { .. } => self.products += time,
            Work::Attention { .. } | Work::Composed { .. } | Work::Stream { .. } => {}
        }
    }
}

/// Products on both sides of a conversion.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Beside {
    /// Those that yield what is converted.
    pub before: OpSeconds,
    /// Those that read what comes of it.
    pub after: OpSeconds,
}

/// What shows of a collective that converts a value or a gradient.
pub fn exposed(
    total: Seconds,
    (kind, side): (CollectiveKind, Side),
    Beside { before, after }: Beside,
    overlap: TensorOverlap,
    constants: &Constants,
) -> Seconds {
    let finishes = matches!(kind, CollectiveKind::AllReduce | CollectiveKind::ReduceScatter);
    if finishes && side == Side::Gradient {
        let behind = beside_weight_products(total, before, overlap, constants);
        // Chunks of a scatter run beside both products.
        let is_scatter = kind == CollectiveKind::ReduceScatter;
        let beside = is_scatter.then(|| beside_products(total, before, overlap, constants));
        return behind.min(beside.unwrap_or(total));
    }
    let products = match kind {
        CollectiveKind::AllGather => after,
        CollectiveKind::ReduceScatter => before,
        CollectiveKind::AllReduce
        | CollectiveKind::AllToAll
        | CollectiveKind::SendRecv
        | CollectiveKind::Broadcast => return total,
    };
    let gathers_again = side == Side::Primal && products.weight_products > Seconds::ZERO;
    if gathers_again && kind == CollectiveKind::AllGather {
        return behind(total, products.products, constants);
    }
    beside_products(total, products, overlap, constants)
}

/// Whether an operator only passes on what others have computed, so that products behind it stand next to what is
/// before.
pub fn is_view(kind: &OpKind, pass: Pass) -> bool {
    match pass {
        Pass::Forward => forward_buffers(kind) != Buffers::Own,
        Pass::Backward => backward_buffers(kind) != Buffers::Own,
    }
}

/// What shows of a gather before products or a scatter after them.
fn beside_products(
    total: Seconds,
    products: OpSeconds,
    overlap: TensorOverlap,
    constants: &Constants,
) -> Seconds {
    match overlap {
        TensorOverlap::Chunked if products.both() > Seconds::ZERO => {
            tensor_gather_exposed(total, products.both(), constants)
        }
        TensorOverlap::Chunked | TensorOverlap::Gradients | TensorOverlap::Absent => total,
    }
}

/// What shows of finishing the gradient of an operand, beside the product that yields the gradient of the weight: the
/// last of a backward's products, and one that does not need it.
fn beside_weight_products(
    total: Seconds,
    products: OpSeconds,
    overlap: TensorOverlap,
    constants: &Constants,
) -> Seconds {
    match overlap {
        TensorOverlap::Chunked | TensorOverlap::Gradients => {
            behind(total, products.weight_products, constants)
        }
        TensorOverlap::Absent => total,
    }
}

/// What compute does not cover, and what the rest slows it down by.
fn behind(total: Seconds, compute: Seconds, constants: &Constants) -> Seconds {
    let shows = (total - compute).max(Seconds::ZERO);
    shows + (total - shows) * constants.overlap_slowdown_fraction
}

/// Which products stand next to a value in one section.
pub(crate) struct Neighbours<'a> {
    layer: &'a Layer,
    code: &'a [Instruction],
    times: &'a [OpSeconds],
    /// Values in order, each with the place of an instruction that writes it.
    writers: Vec<(ValueId, usize)>,
    /// The same of those that read it.
    readers: Vec<(ValueId, usize)>,
}

impl<'a> Neighbours<'a> {
    pub(crate) fn new(layer: &'a Layer, code: &'a [Instruction], times: &'a [OpSeconds]) -> Self {
        let [mut writers, mut readers] = [Vec::new(), Vec::new()];
        for (i, instruction) in code.iter().enumerate() {
            writers.extend(instruction.written().into_iter().map(|value| (value, i)));
            readers.extend(instruction.read().into_iter().map(|value| (value, i)));
        }
        writers.sort_unstable();
        readers.sort_unstable();
        Self { layer, code, times, writers, readers }
    }

    /// Products that read a value, through forks and views.
    pub(crate) fn after(&self, value: ValueId) -> OpSeconds {
        let readers = of(&self.readers, value);
        let after = |sum: OpSeconds, &(_, i): &(ValueId, usize)| {
            sum.plus(self.at(i, Instruction::written, Self::after))
        };
        readers.iter().fold(OpSeconds::default(), after)
    }

    /// Products that yield a value, through forks and views.
    pub(crate) fn before(&self, value: ValueId) -> OpSeconds {
        let before = |&(_, i): &(ValueId, usize)| self.at(i, Instruction::read, Self::before);
        of(&self.writers, value).last().map_or_else(OpSeconds::default, before)
    }

    fn at(
        &self,
        i: usize,
        next: fn(&Instruction) -> Vec<ValueId>,
        go_on: fn(&Self, ValueId) -> OpSeconds,
    ) -> OpSeconds {
        if self.times[i].both() > Seconds::ZERO || !self.is_view(&self.code[i]) {
            return self.times[i];
        }
        next(&self.code[i]).into_iter().fold(OpSeconds::default(), |sum, value| sum.plus(go_on(self, value)))
    }

    fn is_view(&self, instruction: &Instruction) -> bool {
        let view = |op: &OpId, pass: Pass| is_view(&self.layer.ops[op.0].kind, pass);
        match instruction {
            Instruction::Forward { op, .. } => view(op, Pass::Forward),
            Instruction::Backward { op, .. } => view(op, Pass::Backward),
            Instruction::Load { .. }
            | Instruction::Parameter { .. }
            | Instruction::Convert { .. }
            | Instruction::Accumulate { .. }
            | Instruction::Free { .. } => false,
        }
    }
}

/// The entries of a value in a list that is sorted by them.
fn of(list: &[(ValueId, usize)], value: ValueId) -> &[(ValueId, usize)] {
    let start = list.partition_point(|(one, _)| *one < value);
    let n = list[start..].partition_point(|(one, _)| *one == value);
    &list[start..start + n]
}
