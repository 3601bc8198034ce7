//! Tokens to experts and back.
//!
//! Nothing is dropped: an expert has a slot for every token of the sequence, and the token at position `s` goes to
//! slot `s` of every expert that gives it a weight. All other slots are zero. Experts may be a block of all.

use super::call::{Call, flat, row};
use super::embedding::add_row;
use super::real::dot;
use super::{KernelError, Real, Tensor};

type Gradients<T> = Result<Vec<Option<Tensor<T>>>, KernelError>;

/// Lengths of `x[b s h]`, `weight[b s e]` and `z[b e s h]`.
#[derive(Clone, Copy)]
struct Routed {
    b: usize,
    s: usize,
    e: usize,
    h: usize,
}

impl Routed {
    /// Every (token, expert) with the positions of its weight and of its slot.
    fn pairs(self) -> impl Iterator<Item = Pair> {
        let Self { b, s, e, .. } = self;
        let pair = move |(token, expert): (usize, usize)| Pair {
            token,
            weight: token * e + expert,
            slot: (token / s * e + expert) * s + token % s,
        };
        (0..b * s).flat_map(move |token| (0..e).map(move |expert| (token, expert))).map(pair)
    }
}

struct Pair {
    token: usize,
    weight: usize,
    slot: usize,
}

pub(super) fn dispatch<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    let sizes = dispatch_sizes(call)?;
    let (x, weight) = (flat(call.float(0)?), flat(call.float(1)?));
    let Routed { b, s, e, h } = sizes;
    let mut y = vec![T::zero(); b * e * s * h];
    for pair in sizes.pairs().filter(|pair| weight[pair.weight] != T::zero()) {
        y[pair.slot * h..(pair.slot + 1) * h].copy_from_slice(row(&x, pair.token, h));
    }
    call.tensor(&[b, e, s, h], y)
}

pub(super) fn dispatch_backward<T: Real>(call: &Call<'_, T>, g: &Tensor<T>) -> Gradients<T> {
    let sizes = dispatch_sizes(call)?;
    let Routed { b, s, e, h } = sizes;
    call.same_shape(g.shape(), &[b, e, s, h])?;
    let (g, weight) = (flat(g), flat(call.float(1)?));
    let mut dx = vec![T::zero(); b * s * h];
    for pair in sizes.pairs().filter(|pair| weight[pair.weight] != T::zero()) {
        add_row(&mut dx, pair.token, row(&g, pair.slot, h));
    }
    Ok(vec![Some(call.tensor(&[b, s, h], dx)?)])
}

pub(super) fn combine<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    let sizes = combine_sizes(call)?;
    let Routed { b, s, h, .. } = sizes;
    let (z, weight) = (flat(call.float(0)?), flat(call.float(1)?));
    let mut y = vec![T::zero(); b * s * h];
    for pair in sizes.pairs() {
        let w = weight[pair.weight];
        let to = &mut y[pair.token * h..(pair.token + 1) * h];
        to.iter_mut().zip(row(&z, pair.slot, h)).for_each(|(y, &z)| *y += w * z);
    }
    call.tensor(&[b, s, h], y)
}

pub(super) fn combine_backward<T: Real>(call: &Call<'_, T>, g: &Tensor<T>) -> Gradients<T> {
    let sizes = combine_sizes(call)?;
    let Routed { b, s, e, h } = sizes;
    call.same_shape(g.shape(), &[b, s, h])?;
    let (z, weight, g) = (flat(call.float(0)?), flat(call.float(1)?), flat(g));
    let (mut dz, mut d_weight) = (vec![T::zero(); b * e * s * h], vec![T::zero(); b * s * e]);
    for pair in sizes.pairs() {
        let (w, g) = (weight[pair.weight], row(&g, pair.token, h));
        dz[pair.slot * h..(pair.slot + 1) * h].iter_mut().zip(g).for_each(|(dz, &g)| *dz = w * g);
        d_weight[pair.weight] = dot(row(&z, pair.slot, h), g);
    }
    Ok(vec![Some(call.tensor(&[b, e, s, h], dz)?), Some(call.tensor(&[b, s, e], d_weight)?)])
}

fn dispatch_sizes<T: Real>(call: &Call<'_, T>) -> Result<Routed, KernelError> {
    let [b, s, h] = call.sizes(0)?;
    let [b2, s2, e] = call.sizes(1)?;
    call.same_shape(&[b2, s2], &[b, s])?;
    Ok(Routed { b, s, e, h })
}

fn combine_sizes<T: Real>(call: &Call<'_, T>) -> Result<Routed, KernelError> {
    let [b, e, s, h] = call.sizes(0)?;
    call.same_shape(call.operand_shape(1)?, &[b, s, e])?;
    Ok(Routed { b, s, e, h })
}
