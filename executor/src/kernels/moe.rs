//! Tokens to experts and back. Experts may be a block of all.
//!
//! Where an expert has a slot for every token of the sequence, the token at row `s` goes to slot `s` of every expert
//! that gives it a weight, and nothing is dropped. Where it has fewer, tokens take its slots in the order of their
//! positions, whatever the order in which they are laid out; who comes when all are taken is dropped. All other slots
//! are zero.

use super::call::{Call, flat, row};
use super::embedding::add_row;
use super::real::dot;
use super::{KernelError, Real, Tensor};

type Gradients<T> = Result<Vec<Option<Tensor<T>>>, KernelError>;

/// Lengths of `x[b s h]`, `weight[b s e]` and `z[b e c h]`.
#[derive(Clone, Copy)]
struct Routed {
    b: usize,
    s: usize,
    e: usize,
    c: usize,
    h: usize,
}

/// A token and an expert that has it, with the positions of its weight and of its slot.
struct Pair {
    token: usize,
    weight: usize,
    slot: usize,
}

impl Routed {
    /// Every (token, expert) that has a slot.
    fn pairs<T: Real>(self, call: &Call<'_, T>, weight: &[T]) -> Result<Vec<Pair>, KernelError> {
        if call.takes(2) {
            call.same_shape(call.operand_shape(2)?, &[self.s])?;
            return Ok(self.seated(weight, &flat(call.index(2)?)));
        }
        call.same_shape(&[self.c], &[self.s])?;
        let Self { b, s, e, .. } = self;
        let pair = |(token, expert): (usize, usize)| Pair {
            token,
            weight: token * e + expert,
            slot: (token / s * e + expert) * s + token % s,
        };
        let all = (0..b * s).flat_map(move |token| (0..e).map(move |expert| (token, expert)));
        Ok(all.map(pair).collect())
    }

    /// Slots in the order of positions, until an expert has no more.
    fn seated<T: Real>(self, weight: &[T], positions: &[i64]) -> Vec<Pair> {
        let Self { b, s, e, c, .. } = self;
        let mut order: Vec<usize> = (0..s).collect();
        order.sort_by_key(|&row| positions[row]);
        let mut pairs = Vec::new();
        for (sequence, expert) in (0..b).flat_map(|sequence| (0..e).map(move |expert| (sequence, expert))) {
            let tokens = order.iter().map(|row| sequence * s + row);
            let chosen = tokens.filter(|token| weight[token * e + expert] != T::zero());
            let first = (sequence * e + expert) * c;
            pairs.extend(chosen.take(c).enumerate().map(|(seat, token)| Pair {
                token,
                weight: token * e + expert,
                slot: first + seat,
            }));
        }
        pairs
    }
}

pub(super) fn dispatch<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    let sizes = dispatch_sizes(call)?;
    let (x, weight) = (flat(call.float(0)?), flat(call.float(1)?));
    let Routed { b, e, c, h, .. } = sizes;
    let mut y = vec![T::zero(); b * e * c * h];
    let pairs = sizes.pairs(call, &weight)?.into_iter();
    for pair in pairs.filter(|pair| weight[pair.weight] != T::zero()) {
        y[pair.slot * h..(pair.slot + 1) * h].copy_from_slice(row(&x, pair.token, h));
    }
    call.tensor(&[b, e, c, h], y)
}

/// Choices of experts that find no slot, and all choices.
pub(super) fn dropped<T: Real>(call: &Call<'_, T>) -> Result<(u64, u64), KernelError> {
    let weight = flat(call.float(1)?);
    let chosen = weight.iter().filter(|weight| **weight != T::zero()).count() as u64;
    let pairs = dispatch_sizes(call)?.pairs(call, &weight)?;
    let seated = pairs.iter().filter(|pair| weight[pair.weight] != T::zero()).count() as u64;
    Ok((chosen - seated, chosen))
}

pub(super) fn dispatch_backward<T: Real>(call: &Call<'_, T>, g: &Tensor<T>) -> Gradients<T> {
    let sizes = dispatch_sizes(call)?;
    let Routed { b, s, e, c, h } = sizes;
    call.same_shape(g.shape(), &[b, e, c, h])?;
    let (g, weight) = (flat(g), flat(call.float(1)?));
    let mut dx = vec![T::zero(); b * s * h];
    let pairs = sizes.pairs(call, &weight)?.into_iter();
    for pair in pairs.filter(|pair| weight[pair.weight] != T::zero()) {
        add_row(&mut dx, pair.token, row(&g, pair.slot, h));
    }
    Ok(vec![Some(call.tensor(&[b, s, h], dx)?)])
}

pub(super) fn combine<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    let sizes = combine_sizes(call)?;
    let Routed { b, s, h, .. } = sizes;
    let (z, weight) = (flat(call.float(0)?), flat(call.float(1)?));
    let mut y = vec![T::zero(); b * s * h];
    for pair in sizes.pairs(call, &weight)? {
        let w = weight[pair.weight];
        let to = &mut y[pair.token * h..(pair.token + 1) * h];
        to.iter_mut().zip(row(&z, pair.slot, h)).for_each(|(y, &z)| *y += w * z);
    }
    call.tensor(&[b, s, h], y)
}

pub(super) fn combine_backward<T: Real>(call: &Call<'_, T>, g: &Tensor<T>) -> Gradients<T> {
    let sizes = combine_sizes(call)?;
    let Routed { b, s, e, c, h } = sizes;
    call.same_shape(g.shape(), &[b, s, h])?;
    let (z, weight, g) = (flat(call.float(0)?), flat(call.float(1)?), flat(g));
    let (mut dz, mut d_weight) = (vec![T::zero(); b * e * c * h], vec![T::zero(); b * s * e]);
    for pair in sizes.pairs(call, &weight)? {
        let (w, g) = (weight[pair.weight], row(&g, pair.token, h));
        dz[pair.slot * h..(pair.slot + 1) * h].iter_mut().zip(g).for_each(|(dz, &g)| *dz = w * g);
        d_weight[pair.weight] = dot(row(&z, pair.slot, h), g);
    }
    Ok(vec![Some(call.tensor(&[b, e, c, h], dz)?), Some(call.tensor(&[b, s, e], d_weight)?)])
}

fn dispatch_sizes<T: Real>(call: &Call<'_, T>) -> Result<Routed, KernelError> {
    let [b, s, h] = call.sizes(0)?;
    let [b2, s2, e] = call.sizes(1)?;
    call.same_shape(&[b2, s2], &[b, s])?;
    let c = call.result_shape(0)?.get(2).copied().unwrap_or(s);
    Ok(Routed { b, s, e, c, h })
}

fn combine_sizes<T: Real>(call: &Call<'_, T>) -> Result<Routed, KernelError> {
    let [b, e, c, h] = call.sizes(0)?;
    let s = call.result_shape(0)?.get(1).copied().unwrap_or(c);
    call.same_shape(call.operand_shape(1)?, &[b, s, e])?;
    Ok(Routed { b, s, e, c, h })
}
