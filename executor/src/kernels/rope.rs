//! Rotary position embedding (Su et al. 2021), in the half-split pairing of GPT-NeoX and Llama.
//!
//! Of the `dims` rotated elements, element `i` of the first half and `i` of the second are a pair, turned by
//! `position * theta^(-2 i / dims)`. Backward turns back.

use ir::op::RotarySide;

use super::call::{Call, flat};
use super::{KernelError, Real, Tensor};

/// What is rotated, and how fast.
#[derive(Clone, Copy)]
pub(super) struct Rotary {
    theta: f64,
    dims: u64,
    side: RotarySide,
}

#[derive(Clone, Copy)]
enum Sense {
    Forward,
    Back,
}

impl Rotary {
    pub(super) fn new(theta: f64, dims: u64, side: RotarySide) -> Self {
        Self { theta, dims, side }
    }
}

pub(super) fn forward<T: Real>(call: &Call<'_, T>, rotary: Rotary) -> Result<Tensor<T>, KernelError> {
    rotate(call, rotary, call.float(0)?, Sense::Forward)
}

pub(super) fn backward<T: Real>(
    call: &Call<'_, T>,
    rotary: Rotary,
    g: &Tensor<T>,
) -> Result<Vec<Option<Tensor<T>>>, KernelError> {
    Ok(vec![Some(rotate(call, rotary, g, Sense::Back)?)])
}

fn rotate<T: Real>(
    call: &Call<'_, T>,
    rotary: Rotary,
    x: &Tensor<T>,
    sense: Sense,
) -> Result<Tensor<T>, KernelError> {
    let (count, n) = call.rows(0)?;
    call.same_shape(x.shape(), call.operand_shape(0)?)?;
    let turned = usize::try_from(rotary.dims).ok().filter(|&dims| dims <= n && dims % 2 == 0);
    let turned =
        turned.ok_or(call.unfit("the rotated elements must be even in number and at most the last dim"))?;
    let first = match rotary.side {
        RotarySide::First => 0,
        RotarySide::Last => n - turned,
    };
    // Rows advance the position every `stride` rows.
    let (stride, length) = sequence(call)?;
    let tables: Vec<Vec<(T, T)>> =
        call.index(1)?.iter().map(|&position| turns(rotary, turned, position, sense)).collect();
    let mut y = flat(x).into_owned();
    for i in 0..count {
        let row = &mut y[i * n + first..i * n + first + turned];
        let (low, high) = row.split_at_mut(turned / 2);
        for ((a, b), &(cos, sin)) in low.iter_mut().zip(high).zip(&tables[i / stride % length]) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
    call.tensor(call.operand_shape(0)?, y)
}

/// How many rows share a position, and how many positions there are; at least one each, as there may be no rows.
fn sequence<T: Real>(call: &Call<'_, T>) -> Result<(usize, usize), KernelError> {
    let signature = call.ctx.signature;
    let at = match signature.operands.as_slice() {
        [_, position] if position.len() == 1 => signature.operand_dim(0, position[0]),
        _ => None,
    };
    let shape = call.operand_shape(0)?;
    match at {
        Some(at) if at + 1 < shape.len() => {
            let stride: usize = shape[at + 1..shape.len() - 1].iter().product();
            Ok((stride.max(1), shape[at].max(1)))
        }
        Some(_) | None => Err(call.unfit("positions must walk a dim before the last")),
    }
}

/// Cosine and sine of every pair at a position.
fn turns<T: Real>(rotary: Rotary, dims: usize, position: i64, sense: Sense) -> Vec<(T, T)> {
    let sign = match sense {
        Sense::Forward => 1.0,
        Sense::Back => -1.0,
    };
    let angle = |pair: usize| position as f64 * rotary.theta.powf(-2.0 * pair as f64 / dims as f64);
    (0..dims / 2).map(angle).map(|a| (T::from_f64(a.cos()), T::from_f64(sign * a.sin()))).collect()
}
