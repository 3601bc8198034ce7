//! How far predictions are from measurements: per source, and over sources with equal weight.

use serde::Serialize;

/// A measured and a predicted time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// What was measured, in most tables the seconds of a step.
    pub measured: f64,
    /// What was predicted of it.
    pub predicted: f64,
}

impl Pair {
    /// `predicted / measured - 1`.
    pub fn error(self) -> f64 {
        self.predicted / self.measured - 1.0
    }
}

/// Errors of a list of rows, as fractions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Errors {
    /// Rows.
    pub rows: usize,
    /// Mean of the absolute error.
    pub mean: f64,
    /// Median of it.
    pub median: f64,
    /// Nine of ten rows are below.
    pub p90: f64,
    /// Largest.
    pub max: f64,
    /// Mean of the signed error.
    pub bias: f64,
    /// Share of rows within 5 %.
    pub within_5: f64,
    /// Share of rows within 8 %.
    pub within_8: f64,
}

impl Errors {
    /// Errors of some rows.
    pub fn of(pairs: &[Pair]) -> Self {
        if pairs.is_empty() {
            return Self::default();
        }
        let n = pairs.len() as f64;
        let mut sizes: Vec<f64> = pairs.iter().map(|pair| pair.error().abs()).collect();
        sizes.sort_by(f64::total_cmp);
        let within = |limit: f64| sizes.iter().filter(|size| **size <= limit).count() as f64 / n;
        Self {
            rows: pairs.len(),
            mean: sizes.iter().sum::<f64>() / n,
            median: quantile(&sizes, 0.5),
            p90: quantile(&sizes, 0.9),
            max: sizes.last().copied().unwrap_or(0.0),
            bias: pairs.iter().map(|pair| pair.error()).sum::<f64>() / n,
            within_5: within(0.05),
            within_8: within(0.08),
        }
    }
}

/// The quantile of sorted values, between neighbours where it falls there.
fn quantile(sorted: &[f64], at: f64) -> f64 {
    let place = at * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    low + (high - low) * place.fract()
}

/// Rank correlation of measured and predicted times (Spearman 1904), ties at their mean rank; nothing below three rows.
pub fn spearman(pairs: &[Pair]) -> Option<f64> {
    if pairs.len() < 3 {
        return None;
    }
    let measured = ranks(&pairs.iter().map(|pair| pair.measured).collect::<Vec<_>>());
    let predicted = ranks(&pairs.iter().map(|pair| pair.predicted).collect::<Vec<_>>());
    let mean = (pairs.len() as f64 + 1.0) / 2.0;
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - mean) * (b - mean)).sum::<f64>();
    let spread = (product(&measured, &measured) * product(&predicted, &predicted)).sqrt();
    (spread > 0.0).then(|| product(&measured, &predicted) / spread)
}

fn ranks(values: &[f64]) -> Vec<f64> {
    let rank = |value: &f64| {
        let below = values.iter().filter(|other| *other < value).count() as f64;
        let same = values.iter().filter(|other| *other == value).count() as f64;
        below + (same + 1.0) / 2.0
    };
    values.iter().map(rank).collect()
}

/// What is lost by taking the plan that is predicted to be fastest: its measured time over the least, less one.
pub fn regret(pairs: &[Pair]) -> Option<f64> {
    let picked = pairs.iter().min_by(|a, b| a.predicted.total_cmp(&b.predicted))?;
    let least = pairs.iter().map(|pair| pair.measured).min_by(f64::total_cmp)?;
    Some(picked.measured / least - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(list: &[(f64, f64)]) -> Vec<Pair> {
        list.iter().map(|&(measured, predicted)| Pair { measured, predicted }).collect()
    }

    #[test]
    fn errors_are_counted_in_size_and_sign() {
        let errors = Errors::of(&pairs(&[(1.0, 1.1), (1.0, 0.8), (2.0, 2.0), (1.0, 1.04)]));
        let rounded = |x: f64| (x * 1e6).round() / 1e6;
        assert_eq!((errors.rows, rounded(errors.mean), rounded(errors.bias)), (4, 0.085, -0.015));
        assert_eq!((rounded(errors.median), rounded(errors.max)), (0.07, 0.2));
        assert_eq!((errors.within_5, errors.within_8), (0.5, 0.5));
    }

    #[test]
    fn a_scale_leaves_ranks_and_regret_alone() {
        let scaled = pairs(&[(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]);
        assert_eq!((spearman(&scaled), regret(&scaled)), (Some(1.0), Some(0.0)));
        let turned = pairs(&[(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]);
        assert_eq!((spearman(&turned), regret(&turned)), (Some(-1.0), Some(2.0)));
        assert_eq!(spearman(&pairs(&[(1.0, 1.0), (2.0, 2.0)])), None);
    }
}
