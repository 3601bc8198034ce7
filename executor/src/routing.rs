//! Which experts a reference run chose, so that another run can be made to choose the same.
//!
//! In single precision two experts may be so close that rounding decides between them; the choice of one device is then
//! fixed for all. The kernel keeps its rule: the fixed experts get a bias larger than any score, which decides the
//! choice and, like any correction bias, has no part in the weights.

use std::collections::BTreeMap;

use ir::graph::{Extent, Layer, TensorId};
use ir::op::OpKind;
use ir::signature::FactorId;
use ndarray::{ArrayD, Axis, IxDyn};

use crate::job::LayerIdx;
use crate::kernels::{self, Context, KernelError, Real, Tensor, Value};

/// Larger than any score or logit, small enough to leave scores their order in single precision.
const FIRST: f64 = 1e6;

/// A router at work: layer, the weights that it gives, and micro-batch counted from the first step.
pub(crate) type RouteKey = (LayerIdx, TensorId, u64);

/// Experts chosen by every router for every token; tokens in their natural order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routes {
    chosen: BTreeMap<RouteKey, ArrayD<bool>>,
}

impl Routes {
    /// Whether there is nothing to fix.
    pub fn is_empty(&self) -> bool {
        self.chosen.is_empty()
    }

    /// Notes a choice from the weights that a router gave all tokens.
    pub(crate) fn note<E: Real>(&mut self, key: RouteKey, weights: &Tensor<E>) {
        self.chosen.insert(key, weights.mapv(|weight| weight != E::zero()));
    }

    /// A choice, for the tokens at the given positions, in their order.
    pub(crate) fn of(&self, key: RouteKey, layer: &Layer, positions: &[u64]) -> Option<ArrayD<bool>> {
        let chosen = self.chosen.get(&key)?;
        let dims = &layer.tensors[key.1.0].dims;
        let order: Vec<usize> = positions.iter().map(|&position| position as usize).collect();
        let along = dims.iter().position(|dim| layer.dims[dim.0].extent == Extent::Sequence);
        Some(along.map_or_else(|| chosen.clone(), |dim| chosen.select(Axis(dim), &order)))
    }
}

/// What fixing a choice gave.
pub(crate) struct Fixed<E> {
    /// The weights.
    pub(crate) weights: Tensor<E>,
    /// Tokens that would have chosen otherwise.
    pub(crate) n_changed: u64,
}

/// Runs a router forward with a choice made for it.
pub(crate) fn forward<E: Real>(
    ctx: &Context<'_>,
    operands: &[&Value<E>],
    chosen: &ArrayD<bool>,
) -> Result<Fixed<E>, KernelError> {
    let own = kernels::forward(ctx, operands)?;
    let own = own
        .into_iter()
        .next()
        .and_then(Value::into_float)
        .ok_or(KernelError::Unfit { op: ctx.kind.line().name, what: "a router gives numbers" })?;
    let differs = |own: &E, chosen: &bool| (*own != E::zero()) != *chosen;
    let logits = operands.first().and_then(|value| value.as_float());
    let (mut weights, mut n_changed) = (own, 0);
    for (i, (mut row, chosen)) in weights.rows_mut().into_iter().zip(chosen.rows()).enumerate() {
        if !row.iter().zip(chosen).any(|(own, chosen)| differs(own, chosen)) {
            continue;
        }
        n_changed += 1;
        let Some(logits) = logits.and_then(|logits| logits.rows().into_iter().nth(i)) else { continue };
        let token = Token { logits: logits.to_vec(), chosen: chosen.to_vec() };
        let fixed = token.run(ctx, |ctx, operands| kernels::forward(ctx, operands))?;
        let fixed = fixed.into_iter().filter_map(Value::into_float).flatten();
        row.iter_mut().zip(fixed).for_each(|(weight, fixed)| *weight = fixed);
    }
    Ok(Fixed { weights, n_changed })
}

/// Runs a router backward with a choice made for it: the gradient of its logits.
pub(crate) fn backward<E: Real>(
    ctx: &Context<'_>,
    logits: &Tensor<E>,
    gradient: &Tensor<E>,
    chosen: &ArrayD<bool>,
) -> Result<Tensor<E>, KernelError> {
    let mut found = Vec::with_capacity(logits.len());
    let tokens = logits.rows().into_iter().zip(gradient.rows()).zip(chosen.rows());
    for ((logits, gradient), chosen) in tokens {
        let token = Token { logits: logits.to_vec(), chosen: chosen.to_vec() };
        let gradient = one_token(ctx, gradient.to_vec());
        let one = token.run(ctx, |ctx, operands| {
            let operands: Vec<Option<&Value<E>>> = operands.iter().map(|&operand| Some(operand)).collect();
            kernels::backward(ctx, &operands, &[Some(&gradient)])
        })?;
        found.extend(one.into_iter().next().flatten().into_iter().flatten());
    }
    ArrayD::from_shape_vec(logits.raw_dim(), found)
        .map_err(|_| KernelError::Unfit { op: ctx.kind.line().name, what: "its logits get no gradient" })
}

/// Whether an operator chooses experts.
pub(crate) fn is_router(kind: &OpKind) -> bool {
    matches!(kind, OpKind::Route { .. })
}

/// One token at a router.
struct Token<E> {
    logits: Vec<E>,
    chosen: Vec<bool>,
}

impl<E: Real> Token<E> {
    /// Calls a kernel for this token alone, with a bias that decides the choice.
    fn run<R>(&self, ctx: &Context<'_>, call: impl FnOnce(&Context<'_>, &[&Value<E>]) -> R) -> R {
        let mut signature = ctx.signature.clone();
        let experts: Vec<FactorId> = signature.operands[0].last().copied().into_iter().collect();
        signature.operands = vec![signature.operands[0].clone(), experts.clone()];
        let alone = |(i, rows): (usize, &std::ops::Range<u64>)| {
            if experts.contains(&FactorId(i as u8)) { rows.clone() } else { 0..1 }
        };
        let blocks: Vec<_> = ctx.blocks.iter().enumerate().map(alone).collect();
        let first = |&chosen: &bool| if chosen { E::from_f64(FIRST) } else { E::zero() };
        let bias: Tensor<E> = ndarray::Array1::from_iter(self.chosen.iter().map(first)).into_dyn();
        let operands = [Value::Float(one_token(ctx, self.logits.clone())), Value::Float(bias)];
        call(
            &Context { kind: ctx.kind, signature: &signature, blocks: &blocks },
            &[&operands[0], &operands[1]],
        )
    }
}

/// A row of experts as a tensor of one token.
fn one_token<E: Real>(ctx: &Context<'_>, row: Vec<E>) -> Tensor<E> {
    let mut shape = vec![1; ctx.signature.operands[0].len().max(1)];
    shape[ctx.signature.operands[0].len().max(1) - 1] = row.len();
    let empty = || ArrayD::zeros(IxDyn(&shape));
    ArrayD::from_shape_vec(IxDyn(&shape), row).unwrap_or_else(|_| empty())
}
