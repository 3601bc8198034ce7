//! Normalisation over the last dim, which is never cut.
//!
//! With `r` the inverse root of the mean square (of the deviations for layer norm), `u` the normalised row and
//! `h = g * weight`:  `dx = r * (h - [mean(h)] - u * mean(h * u))`, the bracket for layer norm only
//! (Ba et al. 2016; Zhang and Sennrich 2019).

use super::call::{Call, flat, row};
use super::real::{dot, sum};
use super::{KernelError, Real, Tensor};

/// A row without its mean and scale.
struct Normalised<T> {
    u: Vec<T>,
    r: T,
}

pub(super) fn rms<T: Real>(call: &Call<'_, T>, eps: f64, shift: f64) -> Result<Tensor<T>, KernelError> {
    let shift = T::from_f64(shift);
    let weight: Vec<T> = vector(call, 1)?.into_iter().map(|g| g + shift).collect();
    let zero = vec![T::zero(); weight.len()];
    normalise(call, &weight, &zero, |x| rms_row(x, eps))
}

pub(super) fn layer<T: Real>(call: &Call<'_, T>, eps: f64) -> Result<Tensor<T>, KernelError> {
    normalise(call, &vector(call, 1)?, &vector(call, 2)?, |x| layer_row(x, eps))
}

pub(super) fn rms_backward<T: Real>(
    call: &Call<'_, T>,
    eps: f64,
    shift: f64,
    g: &Tensor<T>,
) -> Result<Vec<Option<Tensor<T>>>, KernelError> {
    let shift = T::from_f64(shift);
    let weight: Vec<T> = vector(call, 1)?.into_iter().map(|g| g + shift).collect();
    let [dx, dweight, _] = differentiate(call, &weight, g, |x| (rms_row(x, eps), T::zero()))?;
    Ok(vec![Some(dx), Some(dweight)])
}

pub(super) fn layer_backward<T: Real>(
    call: &Call<'_, T>,
    eps: f64,
    g: &Tensor<T>,
) -> Result<Vec<Option<Tensor<T>>>, KernelError> {
    let all = differentiate(call, &vector(call, 1)?, g, |x| (layer_row(x, eps), T::one()))?;
    Ok(all.into_iter().map(Some).collect())
}

/// A weight or bias, as long as a row.
fn vector<T: Real>(call: &Call<'_, T>, operand: usize) -> Result<Vec<T>, KernelError> {
    let (_, n) = call.rows(0)?;
    call.same_shape(call.operand_shape(operand)?, &[n])?;
    Ok(flat(call.float(operand)?).into_owned())
}

fn normalise<T: Real>(
    call: &Call<'_, T>,
    weight: &[T],
    bias: &[T],
    normal: impl Fn(&[T]) -> Normalised<T>,
) -> Result<Tensor<T>, KernelError> {
    let (count, n) = call.rows(0)?;
    let x = flat(call.float(0)?);
    let mut y = Vec::with_capacity(x.len());
    for i in 0..count {
        let Normalised { u, .. } = normal(row(&x, i, n));
        y.extend(u.iter().zip(weight).zip(bias).map(|((&u, &w), &c)| u * w + c));
    }
    call.tensor(call.operand_shape(0)?, y)
}

/// Gradients of the tensor, the weight and the bias. `normal` also gives one where the mean was taken off.
fn differentiate<T: Real>(
    call: &Call<'_, T>,
    weight: &[T],
    g: &Tensor<T>,
    normal: impl Fn(&[T]) -> (Normalised<T>, T),
) -> Result<[Tensor<T>; 3], KernelError> {
    let (count, n) = call.rows(0)?;
    call.same_shape(g.shape(), call.operand_shape(0)?)?;
    let (x, g) = (flat(call.float(0)?), flat(g));
    let mut dx = Vec::with_capacity(x.len());
    let (mut d_weight, mut d_bias) = (vec![T::zero(); n], vec![T::zero(); n]);
    let length = T::from_f64(n as f64);
    for i in 0..count {
        let (Normalised { u, r }, centred) = normal(row(&x, i, n));
        let g = row(&g, i, n);
        let h: Vec<T> = g.iter().zip(weight).map(|(&g, &w)| g * w).collect();
        let mean = centred * sum(h.iter().copied()) / length;
        let along = dot(&h, &u) / length;
        dx.extend(h.iter().zip(&u).map(|(&h, &u)| r * (h - mean - u * along)));
        for j in 0..n {
            d_weight[j] += g[j] * u[j];
            d_bias[j] += g[j];
        }
    }
    Ok([call.tensor(call.operand_shape(0)?, dx)?, call.tensor(&[n], d_weight)?, call.tensor(&[n], d_bias)?])
}

fn rms_row<T: Real>(x: &[T], eps: f64) -> Normalised<T> {
    let mean_square = dot(x, x) / T::from_f64(x.len() as f64);
    let r = (mean_square + T::from_f64(eps)).sqrt().recip();
    Normalised { u: x.iter().map(|&x| x * r).collect(), r }
}

fn layer_row<T: Real>(x: &[T], eps: f64) -> Normalised<T> {
    let mean = sum(x.iter().copied()) / T::from_f64(x.len() as f64);
    let centred: Vec<T> = x.iter().map(|&x| x - mean).collect();
    rms_row(&centred, eps)
}
