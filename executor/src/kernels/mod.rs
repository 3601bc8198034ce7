//! What every operator computes, forward and backward, on the blocks that one rank holds.
//!
//! A kernel knows its operator's kind and signature and the rows of every loop that are its own; it does not know
//! meshes, ranks or collectives. Run on blocks it gives exactly the block, or the term of the unfinished sum, that the
//! rule of `ir::strategy` implies; the tests drive that rule over every operator and every loop that may be cut.
//!
//! Sums are taken in index order, products by the same routine whatever the block, so that splitting a loop that
//! every result has leaves forward values the same to the bit.

pub mod optimizer;
pub mod real;

mod attention;
mod call;
mod elementwise;
mod embedding;
mod error;
pub(crate) mod extend;
mod linear;
mod loss;
mod moe;
mod norm;
pub(crate) mod ring;
mod rope;
mod router;
mod structure;
#[cfg(test)]
mod tests;
mod value;

use std::ops::Range;

use ir::graph::Sizes;
use ir::mesh::Mesh;
use ir::op::OpKind;
use ir::sharding::{Placement, Sharding};
use ir::signature::{FactorId, Signature};
use ir::strategy::Strategy;

use call::Call;
pub use error::KernelError;
pub use real::Real;
pub use value::{Index, Tensor, Value};

/// One operator as one rank runs it.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// What it computes.
    pub kind: &'a OpKind,
    /// Its loops.
    pub signature: &'a Signature,
    /// Per loop, the rows of it that this rank walks; all of them where the loop is not cut. Shapes of all operands
    /// and results follow.
    pub blocks: &'a [Range<u64>],
}

/// The rows of every loop that the rank at `coordinates` walks under a strategy.
pub fn blocks(
    signature: &Signature,
    sizes: &Sizes,
    strategy: Strategy,
    mesh: &Mesh,
    coordinates: &[u64],
) -> Vec<Range<u64>> {
    let rows = |(i, factor): (usize, &ir::signature::Factor)| {
        let own = |axis: &ir::mesh::AxisId| strategy.on(*axis).cuts(FactorId(i as u8));
        let cut = mesh
            .axis_ids()
            .filter(own)
            .fold(Sharding::REPLICATED, |s, axis| s.with(axis, Placement::Shard(0)));
        cut.local_range(mesh, coordinates, 0, sizes.dims[factor.dim.0])
    };
    signature.factors.iter().enumerate().map(rows).collect()
}

/// Results of an operator.
///
/// # Errors
/// An operand that is missing, of another shape than the blocks imply or of the wrong type; a position outside its
/// table; a signature that does not fit the kind.
pub fn forward<T: Real>(ctx: &Context<'_>, operands: &[&Value<T>]) -> Result<Vec<Value<T>>, KernelError> {
    let given: Vec<Option<&Value<T>>> = operands.iter().map(|&value| Some(value)).collect();
    let call = Call::new(ctx, &given)?;
    let one = |result: Result<Tensor<T>, KernelError>| result.map(|tensor| vec![tensor]);
    let results = match ctx.kind {
        OpKind::Embed => one(embedding::embed(&call)),
        OpKind::AddPosition { offset } => one(embedding::add_position(&call, *offset)),
        OpKind::Linear => one(linear::forward(&call)),
        OpKind::Bias => one(elementwise::bias(&call)),
        OpKind::RmsNorm { eps, shift } => one(norm::rms(&call, *eps, *shift)),
        OpKind::LayerNorm { eps } => one(norm::layer(&call, *eps)),
        OpKind::Rope { theta, dims, side } => {
            one(rope::forward(&call, rope::Rotary::new(*theta, *dims, *side)))
        }
        OpKind::Attention { .. } => one(attention::forward(&call, attention::Scoring::of(ctx.kind)?)),
        OpKind::Glu { gating } => one(elementwise::glu(&call, *gating)),
        OpKind::Act { act } => one(elementwise::act(&call, *act)),
        OpKind::Gate => one(elementwise::gate(&call)),
        OpKind::Add => one(elementwise::add(&call)),
        OpKind::Scale { by } => one(elementwise::scale(&call, *by)),
        OpKind::Softcap { cap } => one(elementwise::softcap(&call, *cap)),
        OpKind::Fork => structure::fork(&call),
        OpKind::Split { sizes } => structure::split(&call, sizes),
        OpKind::Concat { sizes } => one(structure::concat(&call, sizes)),
        OpKind::Extend => one(extend::extend(ctx, &[], operands[0])),
        OpKind::AppendShared => one(structure::append_shared(&call)),
        OpKind::Route { .. } => one(router::forward(&call, &router::Routing::of(ctx.kind)?)),
        OpKind::Dispatch => one(moe::dispatch(&call)),
        OpKind::Combine => one(moe::combine(&call)),
        OpKind::RowMax => one(loss::row_max(&call)),
        OpKind::SumExp => one(loss::sum_exp(&call)),
        OpKind::Pick => one(loss::pick(&call)),
        OpKind::CrossEntropy => one(loss::cross_entropy(&call)),
        OpKind::Weigh { by } => one(loss::weighed(&call, call.float(0)?, by)),
        OpKind::SumLoss => one(loss::sum_loss(&call)),
    }?;
    call.finish_results(results)
}

/// Choices of experts that a dispatch finds no slot for, and all choices.
///
/// # Errors
/// As for [`forward`].
pub(crate) fn dropped<T: Real>(ctx: &Context<'_>, operands: &[&Value<T>]) -> Result<(u64, u64), KernelError> {
    let given: Vec<Option<&Value<T>>> = operands.iter().map(|&value| Some(value)).collect();
    moe::dropped(&Call::new(ctx, &given)?)
}

/// Gradients of an operator's operands, from those of its results.
///
/// Of the operands only those that the operator's line saves are read; the others may be `None`. A product needs only
/// one of its two, and then gives only the other's gradient. A result that nobody
/// differentiated has no gradient: `None`, and where no result has one no operand gets one. Integer data, buffers and
/// operands that the kind does not differentiate get `None`.
///
/// # Errors
/// As for [`forward`], and a gradient of another shape than its result.
pub fn backward<T: Real>(
    ctx: &Context<'_>,
    operands: &[Option<&Value<T>>],
    gradients: &[Option<&Tensor<T>>],
) -> Result<Vec<Option<Tensor<T>>>, KernelError> {
    let call = Call::new(ctx, operands)?;
    call.check_gradients(gradients)?;
    let Some(g) = gradients.iter().flatten().next() else {
        return Ok(vec![None; operands.len()]);
    };
    let found = match ctx.kind {
        OpKind::Embed => embedding::embed_backward(&call, g),
        OpKind::AddPosition { offset } => embedding::add_position_backward(&call, *offset, g),
        OpKind::Linear => linear::backward(&call, g),
        OpKind::Bias => elementwise::bias_backward(&call, g),
        OpKind::RmsNorm { eps, shift } => norm::rms_backward(&call, *eps, *shift, g),
        OpKind::LayerNorm { eps } => norm::layer_backward(&call, *eps, g),
        OpKind::Rope { theta, dims, side } => {
            rope::backward(&call, rope::Rotary::new(*theta, *dims, *side), g)
        }
        OpKind::Attention { .. } => attention::backward(&call, attention::Scoring::of(ctx.kind)?, g),
        OpKind::Glu { gating } => elementwise::glu_backward(&call, *gating, g),
        OpKind::Act { act } => elementwise::act_backward(&call, *act, g),
        OpKind::Gate => elementwise::gate_backward(&call, g),
        OpKind::Add => Ok(vec![Some((*g).clone()), Some((*g).clone())]),
        OpKind::Scale { by } => Ok(vec![Some(elementwise::scaled(g, *by))]),
        OpKind::Softcap { cap } => elementwise::softcap_backward(&call, *cap, g),
        OpKind::Fork => structure::fork_backward(&call, gradients),
        OpKind::Split { sizes } => structure::split_backward(&call, sizes, gradients),
        OpKind::Concat { sizes } => structure::concat_backward(&call, sizes, g),
        OpKind::Extend => extend::extend_backward(ctx, None, g).map(|(_, own)| vec![Some(own)]),
        OpKind::AppendShared => structure::append_shared_backward(&call, g),
        OpKind::Route { .. } => router::backward(&call, &router::Routing::of(ctx.kind)?, g),
        OpKind::Dispatch => moe::dispatch_backward(&call, g),
        OpKind::Combine => moe::combine_backward(&call, g),
        OpKind::RowMax => Ok(vec![None]),
        OpKind::SumExp => loss::sum_exp_backward(&call, g),
        OpKind::Pick => loss::pick_backward(&call, g),
        OpKind::CrossEntropy => loss::cross_entropy_backward(&call, g),
        OpKind::Weigh { by } => loss::weighed(&call, g, by).map(|dl| vec![Some(dl)]),
        OpKind::SumLoss => loss::sum_loss_backward(&call, g),
    }?;
    call.finish_gradients(found)
}
