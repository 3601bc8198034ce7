//! Rows of tables: tokens and learned positions.
//!
//! A token outside the local block of the vocabulary gives a zero row and no gradient: another rank holds its row.

use super::call::{Call, flat, row};
use super::{KernelError, Real, Tensor};

type Gradients<T> = Result<Vec<Option<Tensor<T>>>, KernelError>;

pub(super) fn embed<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    let ids = call.index(0)?;
    let [rows, h] = call.sizes(1)?;
    let first = call.start(1, 0)?;
    let table = flat(call.float(1)?);
    let mut y = Vec::with_capacity(ids.len() * h);
    for &id in ids {
        match local(id, first, rows) {
            Some(at) => y.extend_from_slice(row(&table, at, h)),
            None => y.resize(y.len() + h, T::zero()),
        }
    }
    call.tensor(&[ids.shape(), &[h]].concat(), y)
}

pub(super) fn embed_backward<T: Real>(call: &Call<'_, T>, g: &Tensor<T>) -> Gradients<T> {
    let ids = call.index(0)?;
    let [rows, h] = call.sizes(1)?;
    let first = call.start(1, 0)?;
    call.same_shape(&[g.len()], &[ids.len() * h])?;
    let g = flat(g);
    let mut table = vec![T::zero(); rows * h];
    for (i, &id) in ids.iter().enumerate() {
        if let Some(at) = local(id, first, rows) {
            add_row(&mut table, at, row(&g, i, h));
        }
    }
    Ok(vec![None, Some(call.tensor(&[rows, h], table)?)])
}

pub(super) fn add_position<T: Real>(call: &Call<'_, T>, offset: u64) -> Result<Tensor<T>, KernelError> {
    let [b, s, h] = call.sizes(0)?;
    let at = position_rows(call, offset)?;
    let table = flat(call.float(2)?);
    let mut y = flat(call.float(0)?).into_owned();
    for i in 0..b * s {
        add_row(&mut y, i, row(&table, at[i % s], h));
    }
    call.tensor(&[b, s, h], y)
}

pub(super) fn add_position_backward<T: Real>(call: &Call<'_, T>, offset: u64, g: &Tensor<T>) -> Gradients<T> {
    let [b, s, h] = call.sizes(0)?;
    let [rows, _] = call.sizes(2)?;
    call.same_shape(g.shape(), &[b, s, h])?;
    let at = position_rows(call, offset)?;
    let elements = flat(g);
    let mut table = vec![T::zero(); rows * h];
    for i in 0..b * s {
        add_row(&mut table, at[i % s], row(&elements, i, h));
    }
    Ok(vec![Some(g.clone()), None, Some(call.tensor(&[rows, h], table)?)])
}

/// Row of the table for every position; the table is whole.
fn position_rows<T: Real>(call: &Call<'_, T>, offset: u64) -> Result<Vec<usize>, KernelError> {
    let [_, s, h] = call.sizes(0)?;
    let [rows, width] = call.sizes(2)?;
    let positions = call.index(1)?;
    call.same_shape(positions.shape(), &[s])?;
    call.same_shape(&[width], &[h])?;
    let offset = i64::try_from(offset).map_err(|_| call.unfit("the offset is beyond every table"))?;
    let find = |&position: &i64| {
        let row = position.saturating_add(offset);
        local(row, 0, rows).ok_or(KernelError::OutOfTable { op: call.op, row, rows })
    };
    positions.iter().map(find).collect()
}

/// Position of a global row in a block of `rows` rows that begins at `first`.
pub(super) fn local(row: i64, first: i64, rows: usize) -> Option<usize> {
    row.checked_sub(first).and_then(|at| usize::try_from(at).ok()).filter(|&at| at < rows)
}

/// Adds to the `i`-th row.
pub(super) fn add_row<T: Real>(rows: &mut [T], i: usize, terms: &[T]) {
    let n = terms.len();
    rows[i * n..(i + 1) * n].iter_mut().zip(terms).for_each(|(to, &term)| *to += term);
}
