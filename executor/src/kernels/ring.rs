//! Attention over keys that come block by block: each block's own softmax, merged by the logarithms of their sums.
//!
//! ```text
//! forward   l = log(exp(l1) + exp(l2)),  y = y1 exp(l1 - l) + y2 exp(l2 - l)
//! backward  P = exp(S - l),  dS = P * (dP - rowsum(dY * Y))      with l and Y over all blocks
//! ```
//! Dao 2023, arXiv 2307.08691, section 3.1; Liu et al. 2023, arXiv 2310.01889. What a query does not see has score
//! minus infinity; a query that sees nothing has `l` of minus infinity and `y` of zero, which merging keeps.

use ndarray::{Array2, Array4, Array5, Axis, Ix5};

use super::attention::{Head, Operands, Scores, Scoring};
use super::call::Call;
use super::linear::matmul;
use super::{Context, KernelError, Real, Tensor, Value};

/// What a kernel of a ring keeps for backward: the result, and per query the logarithm of its sum of exponentials.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Attended<T> {
    /// `[b s k r n]`.
    pub(crate) y: Array5<T>,
    /// `[b s k r]`.
    pub(crate) log_sum: Array4<T>,
}

/// Whether a block of keys is the first that a query meets: sinks join the softmax there, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    First,
    Later,
}

/// Gradients that one block of keys gives.
pub(crate) struct BlockGradients<T> {
    /// Of the queries: a term.
    pub(crate) dq: Tensor<T>,
    /// Of the block's keys: a term.
    pub(crate) dk: Tensor<T>,
    /// Of the block's values: a term.
    pub(crate) dv: Tensor<T>,
    /// Of the sinks, at the first turn.
    pub(crate) d_sinks: Option<Tensor<T>>,
}

impl<T: Real> Attended<T> {
    /// Adds what another block of keys gave.
    pub(crate) fn merge(&mut self, other: &Self) {
        let rows = self.y.lanes_mut(Axis(4)).into_iter().zip(other.y.lanes(Axis(4)));
        for ((mut mine, theirs), (log, other_log)) in rows.zip(self.log_sum.iter_mut().zip(&other.log_sum)) {
            let most = log.max(*other_log);
            if most == T::neg_infinity() {
                continue;
            }
            let sum = most + ((*log - most).exp() + (*other_log - most).exp()).ln();
            let (own, others) = ((*log - sum).exp(), (*other_log - sum).exp());
            mine.zip_mut_with(&theirs, |y, &z| *y = *y * own + z * others);
            *log = sum;
        }
    }
}

/// Attention over one block of keys.
pub(crate) fn attend<T: Real>(
    ctx: &Context<'_>,
    operands: &[&Value<T>],
    turn: Turn,
) -> Result<Attended<T>, KernelError> {
    let given: Vec<Option<&Value<T>>> = operands.iter().map(|&value| Some(value)).collect();
    let call = Call::new(ctx, &given)?;
    let operands = Operands::of(&call, Scoring::of(ctx.kind)?)?;
    let shape = operands.result_shape();
    let mut found = Attended {
        y: Array5::zeros(shape),
        log_sum: Array4::from_elem([shape[0], shape[1], shape[2], shape[3]], T::neg_infinity()),
    };
    if turn == Turn::Later && !operands.sees_anything() {
        return Ok(found);
    }
    for head in operands.heads() {
        let Scores { scores: mut p, .. } = operands.scores(head);
        let sink = if turn == Turn::First { operands.sink(head) } else { T::neg_infinity() };
        for (i, mut row) in p.outer_iter_mut().enumerate() {
            let log = log_sum_exp(row.iter().copied().chain([sink]));
            row.mapv_inplace(|score| probability(score, log));
            found.log_sum[[head.b, i, head.k, head.r]] = log;
        }
        head.of_queries(found.y.view_mut()).assign(&matmul(p.view(), operands.value(head)));
    }
    Ok(found)
}

/// Gradients by one block of keys, from what attention over all of them gave.
pub(crate) fn block_backward<T: Real>(
    ctx: &Context<'_>,
    operands: &[&Value<T>],
    (all, gradient): (&Attended<T>, &Tensor<T>),
    turn: Turn,
) -> Result<BlockGradients<T>, KernelError> {
    let given: Vec<Option<&Value<T>>> = operands.iter().map(|&value| Some(value)).collect();
    let call = Call::new(ctx, &given)?;
    let operands = Operands::of(&call, Scoring::of(ctx.kind)?)?;
    call.same_shape(gradient.shape(), &operands.result_shape())?;
    call.same_shape(all.y.shape(), &operands.result_shape())?;
    let wrong = |_| call.unfit("a gradient has the wrong dims");
    let g = gradient.view().into_dimensionality::<Ix5>().map_err(wrong)?;
    let (mut dq, mut dk) = (Array5::zeros(operands.q.dim()), Array4::zeros(operands.k.dim()));
    let mut dv = Array4::zeros(operands.v.dim());
    let (_, _, kv_heads, group, _) = operands.q.dim();
    let mut d_sinks = Array2::zeros((kv_heads, group));
    let idle = turn == Turn::Later && !operands.sees_anything();
    for head in operands.heads().filter(|_| !idle) {
        let log = |i: usize| all.log_sum[[head.b, i, head.k, head.r]];
        let along = along(head, all, &g.view());
        let (g, Scores { scores: mut p, slope }) = (head.of_queries(g.view()), operands.scores(head));
        p.indexed_iter_mut().for_each(|((i, _), score)| *score = probability(*score, log(i)));
        let mut dv = head.of_keys(dv.view_mut());
        dv += &matmul(p.t(), g);
        let mut ds = matmul(g, operands.value(head).t());
        ds.indexed_iter_mut().for_each(|((i, j), d)| *d = p[[i, j]] * (*d - along[i]) * slope[[i, j]]);
        head.of_queries(dq.view_mut()).assign(&matmul(ds.view(), operands.key(head)));
        let mut dk = head.of_keys(dk.view_mut());
        dk += &matmul(ds.t(), operands.query(head));
        for (i, &along) in along.iter().enumerate() {
            d_sinks[[head.k, head.r]] -= probability(operands.sink(head), log(i)) * along;
        }
    }
    let d_sinks = (turn == Turn::First && operands.has_sinks()).then(|| d_sinks.into_dyn());
    Ok(BlockGradients { dq: dq.into_dyn(), dk: dk.into_dyn(), dv: dv.into_dyn(), d_sinks })
}

/// `rowsum(dY * Y)` of every query of a head.
fn along<T: Real>(head: Head, all: &Attended<T>, g: &ndarray::ArrayView5<'_, T>) -> Vec<T> {
    let (y, g) = (head.of_queries(all.y.view()), head.of_queries(g.view()));
    let one = |(y, g): (ndarray::ArrayView1<'_, T>, ndarray::ArrayView1<'_, T>)| {
        y.iter().zip(g).fold(T::zero(), |total, (&y, &g)| total + y * g)
    };
    y.outer_iter().zip(g.outer_iter()).map(one).collect()
}

fn log_sum_exp<T: Real>(row: impl Iterator<Item = T> + Clone) -> T {
    let most = row.clone().fold(T::neg_infinity(), |most, score| most.max(score));
    if most == T::neg_infinity() {
        return most;
    }
    most + row.fold(T::zero(), |total, score| total + (score - most).exp()).ln()
}

/// `exp(score - log)`; nothing is seen where the sum is zero.
fn probability<T: Real>(score: T, log: T) -> T {
    if log == T::neg_infinity() { T::zero() } else { (score - log).exp() }
}
