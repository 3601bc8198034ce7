//! Values moved without arithmetic: forks, splits and the head part that all heads share.

use ndarray::{Axis, Slice};

use super::call::{Call, flat, row};
use super::embedding::add_row;
use super::{KernelError, Real, Tensor};

type Gradients<T> = Result<Vec<Option<Tensor<T>>>, KernelError>;

pub(super) fn fork<T: Real>(call: &Call<'_, T>) -> Result<Vec<Tensor<T>>, KernelError> {
    let x = call.float(0)?;
    Ok(vec![x.clone(); call.n_results()])
}

/// The sum of what arrived, in the readers' order.
pub(super) fn fork_backward<T: Real>(call: &Call<'_, T>, gradients: &[Option<&Tensor<T>>]) -> Gradients<T> {
    let mut total: Option<Tensor<T>> = None;
    for gradient in gradients.iter().flatten() {
        call.same_shape(gradient.shape(), call.operand_shape(0)?)?;
        match &mut total {
            Some(total) => total.zip_mut_with(gradient, |a, &b| *a += b),
            None => total = Some((*gradient).clone()),
        }
    }
    Ok(vec![total])
}

pub(super) fn split<T: Real>(call: &Call<'_, T>, sizes: &[u64]) -> Result<Vec<Tensor<T>>, KernelError> {
    let x = call.float(0)?;
    let (along, cuts) = cuts(call, sizes)?;
    let part = |(i, &(from, to)): (usize, &(usize, usize))| {
        let part = x.slice_axis(along, Slice::from(from..to));
        let keeps = call.result_shape(i)?.len() == x.ndim();
        Ok(if keeps || to - from != 1 { part.to_owned() } else { part.index_axis_move(along, 0).to_owned() })
    };
    cuts.iter().enumerate().map(part).collect()
}

/// The parts side by side; one that nobody differentiated is zero.
pub(super) fn split_backward<T: Real>(
    call: &Call<'_, T>,
    sizes: &[u64],
    gradients: &[Option<&Tensor<T>>],
) -> Gradients<T> {
    let shape = call.operand_shape(0)?;
    let mut dx = Tensor::zeros(shape);
    let (along, cuts) = cuts(call, sizes)?;
    for ((from, to), gradient) in cuts.into_iter().zip(gradients) {
        let Some(gradient) = gradient else { continue };
        let mut part = dx.slice_axis_mut(along, Slice::from(from..to));
        let gradient =
            if gradient.ndim() < shape.len() { gradient.view().insert_axis(along) } else { gradient.view() };
        call.same_shape(gradient.shape(), part.shape())?;
        part.assign(&gradient);
    }
    Ok(vec![Some(dx)])
}

/// The parts side by side, whole ones or rows.
pub(super) fn concat<T: Real>(call: &Call<'_, T>, sizes: &[u64]) -> Result<Tensor<T>, KernelError> {
    let along = call.ctx.signature.joined_dim().ok_or(call.unfit("its parts have all dims of the whole"))?;
    let shape = call.result_shape(0)?;
    let mut y = Tensor::zeros(shape);
    let (along, cuts) = bounds(call, (along, shape[along]), sizes)?;
    for (i, (from, to)) in cuts.into_iter().enumerate() {
        let given = call.float(i)?;
        let mut part = y.slice_axis_mut(along, Slice::from(from..to));
        let given = if given.ndim() < shape.len() { given.view().insert_axis(along) } else { given.view() };
        call.same_shape(given.shape(), part.shape())?;
        part.assign(&given);
    }
    Ok(y)
}

/// To every part its rows of the gradient.
pub(super) fn concat_backward<T: Real>(call: &Call<'_, T>, sizes: &[u64], g: &Tensor<T>) -> Gradients<T> {
    let along = call.ctx.signature.joined_dim().ok_or(call.unfit("its parts have all dims of the whole"))?;
    let (along, cuts) = bounds(call, (along, g.shape()[along]), sizes)?;
    let part = |(i, (from, to)): (usize, (usize, usize))| {
        let part = g.slice_axis(along, Slice::from(from..to));
        let keeps = call.operand_shape(i)?.len() == g.ndim();
        Ok(Some(if keeps { part.to_owned() } else { part.index_axis_move(along, 0).to_owned() }))
    };
    cuts.into_iter().enumerate().map(part).collect()
}

/// The dim that is cut, with the first and past-the-last element of each part.
fn cuts<T: Real>(call: &Call<'_, T>, sizes: &[u64]) -> Result<(Axis, Vec<(usize, usize)>), KernelError> {
    let along = call.ctx.signature.cut_dim().ok_or(call.unfit("its parts have all dims of the whole"))?;
    let (axis, cuts) = bounds(call, (along, call.operand_shape(0)?[along]), sizes)?;
    if sizes.len() == call.n_results() {
        Ok((axis, cuts))
    } else {
        Err(call.unfit("its parts are not its results"))
    }
}

/// A dim and its length, with the first and past-the-last element of each part.
fn bounds<T: Real>(
    call: &Call<'_, T>,
    (along, n): (usize, usize),
    sizes: &[u64],
) -> Result<(Axis, Vec<(usize, usize)>), KernelError> {
    let mut end = 0_usize;
    let mut cuts = Vec::with_capacity(sizes.len());
    for &size in sizes {
        let from = end;
        let next = usize::try_from(size).ok().and_then(|size| from.checked_add(size)).filter(|&to| to <= n);
        end = next.ok_or(call.unfit("its parts are longer than the dim"))?;
        cuts.push((from, end));
    }
    if end == n { Ok((Axis(along), cuts)) } else { Err(call.unfit("its parts do not fill the dim")) }
}

pub(super) fn append_shared<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    let Heads { b, s, k, m, p } = heads(call)?;
    let (x, shared) = (flat(call.float(0)?), flat(call.float(1)?));
    let mut y = Vec::with_capacity(b * s * k * (m + p));
    for i in 0..b * s * k {
        y.extend_from_slice(row(&x, i, m));
        y.extend_from_slice(row(&shared, i / k, p));
    }
    call.tensor(&[b, s, k, m + p], y)
}

pub(super) fn append_shared_backward<T: Real>(call: &Call<'_, T>, g: &Tensor<T>) -> Gradients<T> {
    let Heads { b, s, k, m, p } = heads(call)?;
    call.same_shape(g.shape(), &[b, s, k, m + p])?;
    let g = flat(g);
    let mut dx = Vec::with_capacity(b * s * k * m);
    let mut d_shared = vec![T::zero(); b * s * p];
    for i in 0..b * s * k {
        let (own, common) = row(&g, i, m + p).split_at(m);
        dx.extend_from_slice(own);
        add_row(&mut d_shared, i / k, common);
    }
    Ok(vec![Some(call.tensor(&[b, s, k, m], dx)?), Some(call.tensor(&[b, s, p], d_shared)?)])
}

/// Lengths of `x[b s k m]` and `shared[b s p]`.
struct Heads {
    b: usize,
    s: usize,
    k: usize,
    m: usize,
    p: usize,
}

fn heads<T: Real>(call: &Call<'_, T>) -> Result<Heads, KernelError> {
    let [b, s, k, m] = call.sizes(0)?;
    let [b2, s2, p] = call.sizes(1)?;
    call.same_shape(&[b2, s2], &[b, s])?;
    Ok(Heads { b, s, k, m, p })
}
