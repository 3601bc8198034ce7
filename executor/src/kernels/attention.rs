//! The core of attention: scores, softmax, weighted sum, with grouped query heads.
//!
//! Query head `(k, r)` reads key-value head `k`. What a query sees under a causal mask follows from positions, which
//! are operands, so that queries may be any block of the sequence; without one it sees all keys. Backward recomputes
//! the probabilities `P`: `dV = P' dY`, `dP = dY V'`, `dS = P * (dP - rowsum(P * dP))`, `dQ = dS K`, `dK = dS' Q` (Dao
//! et al. 2022, app. B). `ring` uses the scores and heads of this file where keys come block by block.

use ndarray::{
    Array2, Array4, Array5, ArrayBase, ArrayView2, ArrayView4, ArrayView5, Axis, Ix2, Ix4, Ix5, RawData,
};

use ir::op::{AttentionBias, AttentionMask, OpKind};

use super::call::{Call, flat};
use super::linear::matmul;
use super::{KernelError, Real, Tensor};

/// How a score is made of a product.
#[derive(Clone, Copy)]
pub(super) struct Scoring {
    scale: Option<f64>,
    window: Option<u64>,
    softcap: Option<f64>,
    bias: AttentionBias,
    mask: AttentionMask,
}

impl Scoring {
    pub(super) fn of(kind: &OpKind) -> Result<Self, KernelError> {
        if let OpKind::Attention { scale, window, softcap, bias, mask } = *kind {
            return Ok(Self { scale, window, softcap, bias, mask });
        }
        Err(KernelError::Unfit { op: kind.line().name, what: "it has no queries and keys" })
    }

    /// How far back a query looks to a key under a causal mask; `None` where it does not see it.
    fn behind(&self, query: i64, key: i64) -> Option<i64> {
        let behind = query.saturating_sub(key);
        let near = |window| u64::try_from(behind).is_ok_and(|behind| behind < window);
        (behind >= 0 && self.window.is_none_or(near)).then_some(behind)
    }
}

/// The operands, by their names.
pub(super) struct Operands<'a, T> {
    scoring: Scoring,
    pub(super) q: ArrayView5<'a, T>,
    pub(super) k: ArrayView4<'a, T>,
    pub(super) v: ArrayView4<'a, T>,
    /// Of queries and of keys, where the mask asks for them.
    positions: Option<[Vec<i64>; 2]>,
    /// Slope or sink of every head.
    extra: Option<ArrayView2<'a, T>>,
}

/// A query head.
#[derive(Clone, Copy)]
pub(super) struct Head {
    pub(super) b: usize,
    pub(super) k: usize,
    pub(super) r: usize,
}

impl Head {
    /// Its matrix of a tensor `[b s k r d]`.
    pub(super) fn of_queries<S: RawData>(self, all: ArrayBase<S, Ix5>) -> ArrayBase<S, Ix2> {
        all.index_axis_move(Axis(3), self.r).index_axis_move(Axis(2), self.k).index_axis_move(Axis(0), self.b)
    }

    /// Its key-value head's matrix of a tensor `[b t k d]`.
    pub(super) fn of_keys<S: RawData>(self, all: ArrayBase<S, Ix4>) -> ArrayBase<S, Ix2> {
        all.index_axis_move(Axis(2), self.k).index_axis_move(Axis(0), self.b)
    }
}

/// Scores of a head.
pub(super) struct Scores<T> {
    pub(super) scores: Array2<T>,
    /// Derivative of a score by its product; zero where the key is not seen.
    pub(super) slope: Array2<T>,
}

/// What backward needs of a head's softmax.
struct Softmax<T> {
    /// Probabilities, queries by keys.
    p: Array2<T>,
    /// Derivative of a score by its product; zero where the key is not seen.
    slope: Array2<T>,
    /// Probability of the sink, per query.
    sink: Vec<T>,
}

pub(super) fn forward<T: Real>(call: &Call<'_, T>, scoring: Scoring) -> Result<Tensor<T>, KernelError> {
    let operands = Operands::of(call, scoring)?;
    let mut y = Array5::zeros(operands.result_shape());
    for head in operands.heads() {
        let Softmax { p, .. } = operands.softmax(head);
        head.of_queries(y.view_mut()).assign(&matmul(p.view(), operands.value(head)));
    }
    Ok(y.into_dyn())
}

pub(super) fn backward<T: Real>(
    call: &Call<'_, T>,
    scoring: Scoring,
    g: &Tensor<T>,
) -> Result<Vec<Option<Tensor<T>>>, KernelError> {
    let operands = Operands::of(call, scoring)?;
    call.same_shape(g.shape(), &operands.result_shape())?;
    let g = g.view().into_dimensionality::<Ix5>().map_err(|_| call.unfit("a gradient has the wrong dims"))?;
    let (mut dq, mut dk) = (Array5::zeros(operands.q.dim()), Array4::zeros(operands.k.dim()));
    let mut dv = Array4::zeros(operands.v.dim());
    let (_, _, kv_heads, group, _) = operands.q.dim();
    let mut d_sink = Array2::zeros((kv_heads, group));
    for head in operands.heads() {
        let Softmax { p, slope, sink } = operands.softmax(head);
        let g = head.of_queries(g);
        let mut dv = head.of_keys(dv.view_mut());
        dv += &matmul(p.t(), g);
        let mut ds = matmul(g, operands.value(head).t());
        for (i, mut row) in ds.outer_iter_mut().enumerate() {
            let along = row.iter().zip(p.row(i)).fold(T::zero(), |total, (&d, &p)| total + d * p);
            row.iter_mut()
                .zip(p.row(i))
                .zip(slope.row(i))
                .for_each(|((d, &p), &slope)| *d = p * (*d - along) * slope);
            d_sink[[head.k, head.r]] -= sink[i] * along;
        }
        head.of_queries(dq.view_mut()).assign(&matmul(ds.view(), operands.key(head)));
        let mut dk = head.of_keys(dk.view_mut());
        dk += &matmul(ds.t(), operands.query(head));
    }
    let mut gradients = vec![Some(dq.into_dyn()), Some(dk.into_dyn()), Some(dv.into_dyn())];
    gradients.resize(scoring.mask.n_operands(), None);
    if scoring.bias == AttentionBias::Sinks {
        gradients.push(Some(d_sink.into_dyn()));
    }
    Ok(gradients)
}

impl<'a, T: Real> Operands<'a, T> {
    pub(super) fn of(call: &Call<'a, T>, scoring: Scoring) -> Result<Self, KernelError> {
        let unfit = || call.unfit("an operand of its signature has the wrong number of dims");
        let q = call.float(0)?.view().into_dimensionality::<Ix5>().map_err(|_| unfit())?;
        let k = call.float(1)?.view().into_dimensionality::<Ix4>().map_err(|_| unfit())?;
        let v = call.float(2)?.view().into_dimensionality::<Ix4>().map_err(|_| unfit())?;
        let extra = match scoring.bias {
            AttentionBias::None => None,
            AttentionBias::Slopes | AttentionBias::Sinks => {
                let at = scoring.mask.n_operands();
                Some(call.float(at)?.view().into_dimensionality::<Ix2>().map_err(|_| unfit())?)
            }
        };
        let ((b, s, heads, r, d), (_, t, _, _), (_, _, _, n)) = (q.dim(), k.dim(), v.dim());
        call.same_shape(k.shape(), &[b, t, heads, d])?;
        call.same_shape(v.shape(), &[b, t, heads, n])?;
        extra.map_or(Ok(()), |extra| call.same_shape(extra.shape(), &[heads, r]))?;
        let positions = match scoring.mask {
            AttentionMask::Full => None,
            AttentionMask::Causal => {
                call.same_shape(call.operand_shape(3)?, &[s])?;
                call.same_shape(call.operand_shape(4)?, &[t])?;
                Some([flat(call.index(3)?).into_owned(), flat(call.index(4)?).into_owned()])
            }
        };
        Ok(Self { scoring, q, k, v, positions, extra })
    }

    pub(super) fn result_shape(&self) -> [usize; 5] {
        let (b, s, k, r, _) = self.q.dim();
        [b, s, k, r, self.v.dim().3]
    }

    pub(super) fn heads(&self) -> impl Iterator<Item = Head> + use<T> {
        let (b, _, k, r, _) = self.q.dim();
        (0..b * k * r).map(move |i| Head { b: i / (k * r), k: i / r % k, r: i % r })
    }

    pub(super) fn query(&self, head: Head) -> ArrayView2<'_, T> {
        head.of_queries(self.q.view())
    }

    pub(super) fn key(&self, head: Head) -> ArrayView2<'_, T> {
        head.of_keys(self.k.view())
    }

    pub(super) fn value(&self, head: Head) -> ArrayView2<'_, T> {
        head.of_keys(self.v.view())
    }

    fn softmax(&self, head: Head) -> Softmax<T> {
        let Scores { scores: mut p, slope } = self.scores(head);
        let sink = self.sink(head);
        let sink = p.outer_iter_mut().map(|mut row| soften(row.iter_mut(), sink)).collect();
        Softmax { p, slope, sink }
    }

    /// The logit that joins the softmax of a head and is dropped.
    pub(super) fn sink(&self, head: Head) -> T {
        match (self.scoring.bias, &self.extra) {
            (AttentionBias::Sinks, Some(sinks)) => sinks[[head.k, head.r]],
            (AttentionBias::None | AttentionBias::Slopes | AttentionBias::Sinks, _) => T::neg_infinity(),
        }
    }

    pub(super) fn has_sinks(&self) -> bool {
        self.scoring.bias == AttentionBias::Sinks
    }

    /// Whether some query sees some key.
    pub(super) fn sees_anything(&self) -> bool {
        let Some([queries, keys]) = &self.positions else { return true };
        let sees = |&query: &i64| keys.iter().any(|&key| self.scoring.behind(query, key).is_some());
        queries.iter().any(sees)
    }

    /// Queries by keys; what is not seen is minus infinity.
    pub(super) fn scores(&self, head: Head) -> Scores<T> {
        let mut scores = matmul(self.query(head), self.key(head).t());
        let mut slope = Array2::zeros(scores.dim());
        for ((i, j), score) in scores.indexed_iter_mut() {
            let behind = match &self.positions {
                Some([queries, keys]) => self.scoring.behind(queries[i], keys[j]),
                // Nothing of a score follows from how far a key is.
                None => Some(0),
            };
            match behind {
                Some(behind) => (*score, slope[[i, j]]) = self.score(head, *score, behind),
                None => *score = T::neg_infinity(),
            }
        }
        Scores { scores, slope }
    }

    /// The score and its derivative by the product.
    fn score(&self, head: Head, product: T, behind: i64) -> (T, T) {
        let scale = self.scoring.scale.unwrap_or_else(|| (self.q.dim().4 as f64).sqrt().recip());
        let scale = T::from_f64(scale);
        let (mut score, mut slope) = (product * scale, scale);
        if let Some(cap) = self.scoring.softcap {
            let cap = T::from_f64(cap);
            let t = (score / cap).tanh();
            (score, slope) = (cap * t, slope * (T::one() - t * t));
        }
        if let (AttentionBias::Slopes, Some(slopes)) = (self.scoring.bias, &self.extra) {
            // The softmax is the same whether positions are counted from the start or from the query.
            score -= slopes[[head.k, head.r]] * T::from_f64(behind as f64);
        }
        (score, slope)
    }
}

/// Turns a row of scores into probabilities beside a sink; gives the sink's. A query that sees nothing gets zeros.
fn soften<'a, T: Real>(row: impl Iterator<Item = &'a mut T>, sink: T) -> T {
    let mut row: Vec<&mut T> = row.collect();
    let max = row.iter().fold(sink, |max, score| max.max(**score));
    if max == T::neg_infinity() {
        row.into_iter().for_each(|score| *score = T::zero());
        return T::zero();
    }
    let sink = (sink - max).exp();
    let mut total = sink;
    for score in &mut row {
        **score = (**score - max).exp();
        total += **score;
    }
    row.into_iter().for_each(|score| *score /= total);
    sink / total
}
