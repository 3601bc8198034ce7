//! Rows of earlier slices before those of a slice, and back: what the rank keeps between slices comes in as it is.

use ndarray::{Axis, Slice, concatenate};

use super::call::Call;
use super::{Context, KernelError, Real, Tensor, Value};

/// The dim along which slices follow one another.
const TOKENS: Axis = Axis(1);

/// The rows that earlier slices have kept, then the operand's.
///
/// # Errors
/// An operand or rows of another shape than the blocks imply, or not as many rows as the result has.
pub(crate) fn extend<T: Real>(
    ctx: &Context<'_>,
    earlier: &[&Tensor<T>],
    own: &Value<T>,
) -> Result<Tensor<T>, KernelError> {
    let given = [Some(own)];
    let call = Call::new(ctx, &given)?;
    if call.operand_shape(0)?.len() < 2 {
        return Err(call.unfit("it has no dim of tokens"));
    }
    let views: Vec<_> = earlier.iter().copied().chain([call.float(0)?]).map(|rows| rows.view()).collect();
    let all = concatenate(TOKENS, &views).map_err(|_| call.unfit("slices before have other dims"))?;
    call.finish_results(vec![all])?
        .pop()
        .and_then(Value::into_float)
        .ok_or_else(|| call.unfit("it has one result"))
}

/// Gradients of the rows of earlier slices and of the own ones, from that of all rows and what later slices owe.
///
/// # Errors
/// A gradient of another shape than its result.
pub(crate) fn extend_backward<T: Real>(
    ctx: &Context<'_>,
    owed: Option<Tensor<T>>,
    gradient: &Tensor<T>,
) -> Result<(Tensor<T>, Tensor<T>), KernelError> {
    let call = Call::new(ctx, &[None])?;
    call.check_gradients(&[Some(gradient)])?;
    let all = match owed {
        Some(owed) if owed.shape() != gradient.shape() => {
            return Err(call.unfit("later slices owe gradients of other rows"));
        }
        Some(owed) => owed + gradient,
        None => gradient.clone(),
    };
    let (own, rows) = (call.operand_shape(0)?.get(1).copied(), all.shape().get(1).copied());
    let (Some(own), Some(rows)) = (own, rows) else { return Err(call.unfit("it has no dim of tokens")) };
    let first = rows.checked_sub(own).ok_or_else(|| call.unfit("its result has fewer rows than it adds"))?;
    let part = |from: usize, to: usize| all.slice_axis(TOKENS, Slice::from(from..to)).to_owned();
    Ok((part(0, first), part(first, rows)))
}
