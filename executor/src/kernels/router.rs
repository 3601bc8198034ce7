//! Which experts a token goes to, and with which weight.
//!
//! The choice: experts are ranked by score plus correction bias; where experts come in groups only those of the best
//! groups may be chosen (DeepSeek-AI 2024, "DeepSeek-V3", §2.1.2). Equal ranks go to the smaller index, so that the
//! choice is a function of the numbers. The weight is the score without the bias, divided by the sum of the chosen
//! scores if so asked, times a constant. Backward keeps the choice fixed.

use ir::op::{GroupScore, Normalize, OpKind, RouterScore};

use super::call::{Call, flat, row};
use super::real::sum;
use super::{KernelError, Real, Tensor};

/// The attributes of a router.
pub(super) struct Routing {
    top_k: usize,
    score: RouterScore,
    normalize: Normalize,
    scale: f64,
    groups: usize,
    top_groups: usize,
    group_score: GroupScore,
}

impl Routing {
    pub(super) fn of(kind: &OpKind) -> Result<Self, KernelError> {
        let OpKind::Route { top_k, score, normalize, scale, groups, top_groups, group_score } = kind else {
            return Err(KernelError::Unfit { op: kind.line().name, what: "it is not a router" });
        };
        Ok(Self {
            top_k: usize::try_from(*top_k).unwrap_or(usize::MAX),
            score: *score,
            normalize: *normalize,
            scale: *scale,
            groups: usize::try_from(*groups).unwrap_or(usize::MAX),
            top_groups: usize::try_from(*top_groups).unwrap_or(usize::MAX),
            group_score: *group_score,
        })
    }
}

/// A token's choice and the scores that backward differentiates.
struct Choice<T> {
    /// Score of every expert; of the softmax over the chosen, zero elsewhere.
    scores: Vec<T>,
    /// Chosen experts in index order.
    chosen: Vec<usize>,
    /// What the scores are divided by.
    total: T,
}

pub(super) fn forward<T: Real>(call: &Call<'_, T>, routing: &Routing) -> Result<Tensor<T>, KernelError> {
    let (count, n) = call.rows(0)?;
    let bias = bias(call, routing)?;
    let logits = flat(call.float(0)?);
    let scale = T::from_f64(routing.scale);
    let mut weights = vec![T::zero(); count * n];
    for i in 0..count {
        let Choice { scores, chosen, total } = choose(routing, row(&logits, i, n), &bias);
        for expert in chosen {
            weights[i * n + expert] = scores[expert] / total * scale;
        }
    }
    call.tensor(call.operand_shape(0)?, weights)
}

pub(super) fn backward<T: Real>(
    call: &Call<'_, T>,
    routing: &Routing,
    g: &Tensor<T>,
) -> Result<Vec<Option<Tensor<T>>>, KernelError> {
    let (count, n) = call.rows(0)?;
    call.same_shape(g.shape(), call.operand_shape(0)?)?;
    let bias = bias(call, routing)?;
    let (logits, g) = (flat(call.float(0)?), flat(g));
    let mut d_logits = Vec::with_capacity(count * n);
    for i in 0..count {
        let choice = choose(routing, row(&logits, i, n), &bias);
        d_logits.extend(differentiate(routing, &choice, row(&g, i, n)));
    }
    Ok(vec![Some(call.tensor(call.operand_shape(0)?, d_logits)?)])
}

/// The correction bias, zero where there is none; also checks that groups divide the experts.
fn bias<T: Real>(call: &Call<'_, T>, routing: &Routing) -> Result<Vec<T>, KernelError> {
    let (_, n) = call.rows(0)?;
    if routing.groups == 0 || !n.is_multiple_of(routing.groups) {
        return Err(call.unfit("its groups do not divide the experts"));
    }
    if !call.takes(1) {
        return Ok(vec![T::zero(); n]);
    }
    call.same_shape(call.operand_shape(1)?, &[n])?;
    Ok(flat(call.float(1)?).into_owned())
}

fn choose<T: Real>(routing: &Routing, logits: &[T], bias: &[T]) -> Choice<T> {
    let mut scores = match routing.score {
        RouterScore::Softmax => softmax(logits),
        RouterScore::SoftmaxOfChosen => logits.to_vec(),
        RouterScore::Sigmoid => logits.iter().map(|&z| z.sigmoid()).collect(),
    };
    let ranked: Vec<T> = scores.iter().zip(bias).map(|(&score, &bias)| score + bias).collect();
    let mut chosen = best(&ranked, allowed(routing, &ranked), routing.top_k);
    chosen.sort_unstable();
    if routing.score == RouterScore::SoftmaxOfChosen {
        let of_chosen = softmax(&chosen.iter().map(|&expert| logits[expert]).collect::<Vec<_>>());
        scores = vec![T::zero(); logits.len()];
        chosen.iter().zip(of_chosen).for_each(|(&expert, score)| scores[expert] = score);
    }
    let total = match routing.normalize {
        Normalize::Sum => sum(chosen.iter().map(|&expert| scores[expert])),
        Normalize::No => T::one(),
    };
    Choice { scores, chosen, total }
}

/// Experts of the best groups.
fn allowed<T: Real>(routing: &Routing, ranked: &[T]) -> Vec<usize> {
    let size = ranked.len() / routing.groups;
    if routing.top_groups >= routing.groups || size == 0 {
        return (0..ranked.len()).collect();
    }
    let of_group = |group: &[T]| {
        let counted = match routing.group_score {
            GroupScore::Max => 1,
            GroupScore::TopTwo => 2,
        };
        sum(best(group, (0..group.len()).collect(), counted).into_iter().map(|i| group[i]))
    };
    let groups: Vec<T> = ranked.chunks_exact(size).map(of_group).collect();
    let best = best(&groups, (0..groups.len()).collect(), routing.top_groups);
    best.into_iter().flat_map(|group| group * size..(group + 1) * size).collect()
}

/// The `k` candidates of largest value, the smaller index first among equals.
fn best<T: Real>(values: &[T], mut candidates: Vec<usize>, k: usize) -> Vec<usize> {
    // Adding zero makes the two zeros equal.
    let key = |i: usize| values[i].wide() + 0.0;
    candidates.sort_by(|&a, &b| key(b).total_cmp(&key(a)).then(a.cmp(&b)));
    candidates.truncate(k);
    candidates
}

fn softmax<T: Real>(logits: &[T]) -> Vec<T> {
    let max = logits.iter().copied().fold(T::neg_infinity(), T::max);
    let powers: Vec<T> = logits.iter().map(|&z| (z - max).exp()).collect();
    let total = sum(powers.iter().copied());
    powers.into_iter().map(|power| power / total).collect()
}

fn differentiate<T: Real>(routing: &Routing, choice: &Choice<T>, g: &[T]) -> Vec<T> {
    let Choice { scores, chosen, total } = choice;
    let scale = T::from_f64(routing.scale);
    let shared = match routing.normalize {
        Normalize::Sum => sum(chosen.iter().map(|&i| scale * g[i] * scores[i] / *total)),
        Normalize::No => T::zero(),
    };
    let mut d_scores = vec![T::zero(); g.len()];
    chosen.iter().for_each(|&i| d_scores[i] = (scale * g[i] - shared) / *total);
    let pairs = scores.iter().zip(&d_scores);
    match routing.score {
        // Scores outside the chosen are zero in the second, so one formula serves both.
        RouterScore::Softmax | RouterScore::SoftmaxOfChosen => {
            let along = sum(pairs.clone().map(|(&p, &d)| p * d));
            pairs.map(|(&p, &d)| p * (d - along)).collect()
        }
        RouterScore::Sigmoid => pairs.map(|(&p, &d)| d * p * (T::one() - p)).collect(),
    }
}
