//! Cross-entropy in parts, so that the vocabulary may be cut: maximum, sum of exponentials, score at the label.
//!
//! `loss = log e + m - t` with `m = max z`, `e = sum exp(z - m)`, `t = z[label]`. A block of the vocabulary gives its
//! own maximum, its own term of the sum, and zero where the label is another block's.

use super::call::{Call, flat, row};
use super::embedding::local;
use super::real::sum;
use super::{KernelError, Real, Tensor};

type Gradients<T> = Result<Vec<Option<Tensor<T>>>, KernelError>;

pub(super) fn row_max<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    let (count, n) = call.rows(0)?;
    let shape = call.operand_shape(0)?;
    let z = flat(call.float(0)?);
    // What is not a number wins, so that it is not lost.
    let larger = |a: T, b: T| if b.is_nan() || b > a { b } else { a };
    let max = (0..count).map(|i| row(&z, i, n).iter().copied().fold(T::neg_infinity(), larger));
    call.tensor(&shape[..shape.len() - 1], max.collect())
}

pub(super) fn sum_exp<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    let (count, n) = scores(call)?;
    let (z, m) = (flat(call.float(0)?), flat(call.float(1)?));
    let one = |i: usize| sum(row(&z, i, n).iter().map(|&z| (z - m[i]).exp()));
    call.tensor(call.operand_shape(1)?, (0..count).map(one).collect())
}

pub(super) fn sum_exp_backward<T: Real>(call: &Call<'_, T>, g: &Tensor<T>) -> Gradients<T> {
    let (count, n) = scores(call)?;
    call.same_shape(&[g.len()], &[count])?;
    let (z, m, g) = (flat(call.float(0)?), flat(call.float(1)?), flat(g));
    let mut dz = Vec::with_capacity(z.len());
    for i in 0..count {
        dz.extend(row(&z, i, n).iter().map(|&z| g[i] * (z - m[i]).exp()));
    }
    Ok(vec![Some(call.tensor(call.operand_shape(0)?, dz)?)])
}

pub(super) fn pick<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    let (_, n) = scores(call)?;
    let first = call.start(0, call.operand_shape(0)?.len() - 1)?;
    let z = flat(call.float(0)?);
    let one = |(i, &label): (usize, &i64)| local(label, first, n).map_or(T::zero(), |at| z[i * n + at]);
    call.tensor(call.operand_shape(1)?, call.index(1)?.iter().enumerate().map(one).collect())
}

pub(super) fn pick_backward<T: Real>(call: &Call<'_, T>, g: &Tensor<T>) -> Gradients<T> {
    let (count, n) = scores(call)?;
    let first = call.start(0, call.operand_shape(0)?.len() - 1)?;
    call.same_shape(&[g.len()], &[count])?;
    let g = flat(g);
    let mut dz = vec![T::zero(); count * n];
    for (i, &label) in call.index(1)?.iter().enumerate() {
        if let Some(at) = local(label, first, n) {
            dz[i * n + at] = g[i];
        }
    }
    Ok(vec![Some(call.tensor(call.operand_shape(0)?, dz)?)])
}

pub(super) fn cross_entropy<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    for i in [1, 2] {
        call.same_shape(call.operand_shape(i)?, call.operand_shape(0)?)?;
    }
    let (e, m, t) = (flat(call.float(0)?), flat(call.float(1)?), flat(call.float(2)?));
    let l = e.iter().zip(m.iter()).zip(t.iter()).map(|((e, &m), &t)| e.ln() + m - t);
    call.tensor(call.operand_shape(0)?, l.collect())
}

pub(super) fn cross_entropy_backward<T: Real>(call: &Call<'_, T>, g: &Tensor<T>) -> Gradients<T> {
    call.same_shape(g.shape(), call.operand_shape(0)?)?;
    let e = flat(call.float(0)?);
    let de = flat(g).iter().zip(e.iter()).map(|(&g, &e)| g / e).collect();
    Ok(vec![Some(call.tensor(g.shape(), de)?), None, Some(g.mapv(|g| -g))])
}

/// Every row times the constants of its columns: losses, and backward their gradients.
pub(super) fn weighed<T: Real>(
    call: &Call<'_, T>,
    l: &Tensor<T>,
    by: &[f64],
) -> Result<Tensor<T>, KernelError> {
    let (_, n) = call.rows(0)?;
    call.same_shape(l.shape(), call.operand_shape(0)?)?;
    call.same_shape(&[by.len()], &[n])?;
    let weights = by.iter().map(|&by| T::from_f64(by)).cycle();
    call.tensor(l.shape(), flat(l).iter().zip(weights).map(|(&l, by)| l * by).collect())
}

pub(super) fn sum_loss<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    let losses = flat(call.float(0)?);
    let counted = counted(call, losses.len())?;
    let terms = losses.iter().zip(counted).filter(|(_, counted)| *counted).map(|(&loss, _)| loss);
    call.tensor(&[], vec![sum(terms)])
}

/// Whether each token counts: all do, or those with a label.
fn counted<T: Real>(call: &Call<'_, T>, n: usize) -> Result<Vec<bool>, KernelError> {
    if !call.takes(1) {
        return Ok(vec![true; n]);
    }
    call.same_shape(call.operand_shape(1)?, call.operand_shape(0)?)?;
    Ok(flat(call.index(1)?).iter().map(|&label| label >= 0).collect())
}

pub(super) fn sum_loss_backward<T: Real>(call: &Call<'_, T>, g: &Tensor<T>) -> Gradients<T> {
    let [g] = *flat(g) else {
        return Err(call.unfit("the loss is one number"));
    };
    let shape = call.operand_shape(0)?;
    let counted = counted(call, shape.iter().product())?;
    let gradient = counted.into_iter().map(|counted| if counted { g } else { T::zero() }).collect();
    Ok(vec![Some(call.tensor(shape, gradient)?)])
}

/// How many rows of scores there are, one per element of operand 1, and how long they are.
fn scores<T: Real>(call: &Call<'_, T>) -> Result<(usize, usize), KernelError> {
    let rows = call.rows(0)?;
    let shape = call.operand_shape(0)?;
    call.same_shape(call.operand_shape(1)?, &shape[..shape.len() - 1])?;
    Ok(rows)
}
