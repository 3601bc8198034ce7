//! Lengths of slices, so that all take equally long though a later one attends more keys.
//!
//! A slice of tokens `a` to `b` costs a pass `c + l (b - a) + q (b^2 - a^2) / 2`: launches, what is done for every
//! token, and what is done for every pair of a query and a key that it sees (Li et al. 2021, arXiv 2102.07988, section
//! 3.3, whose model of a slice after a context is the same). Whatever the cuts, the costs of `k` slices have the same
//! sum, so the pipeline is fastest where the longest is shortest: where all are equal, at
//!
//! ```text
//! l b_i + q b_i^2 / 2 = i / k (l S + q S^2 / 2)                                    -> balanced_slices()
//! ```
//! which replaces the paper's dynamic program over cuts: that one also chooses `k`, which is asked for here.

/// What a slice costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SliceCost {
    /// For every token.
    pub linear: f64,
    /// For every pair of tokens, half of which a query sees.
    pub quadratic: f64,
}

impl SliceCost {
    /// From what the first half of a sequence, the second, and all of it cost in one slice. A window may leave no more
    /// pairs to the second half than to the first.
    pub fn fitted(sequence: f64, [first, second, all]: [f64; 3]) -> Self {
        let quadratic = (4.0 * (second - first) / (sequence * sequence)).max(0.0);
        let constant = first + second - all;
        let linear = (all - constant) / sequence - quadratic * sequence / 2.0;
        Self { linear: linear.max(0.0), quadratic }
    }

    fn up_to(self, token: f64) -> f64 {
        self.linear * token + self.quadratic * token * token / 2.0
    }

    /// The token up to which a share of the sequence's cost is spent.
    fn token_at(self, sequence: f64, share: f64) -> f64 {
        let spent = share * self.up_to(sequence);
        match (self.linear > 0.0, self.quadratic > 0.0) {
            (_, true) => {
                ((self.linear * self.linear + 2.0 * self.quadratic * spent).sqrt() - self.linear)
                    / self.quadratic
            }
            (true, false) => spent / self.linear,
            (false, false) => share * sequence,
        }
    }
}

/// `k` slices of equal cost, each a multiple of `granule`; `None` where the sequence has too few of those, or none.
///
/// Attention alone (`l = 0`), 16 tokens, 4 slices: 8, 3, 3 and 2, the cuts being `16 sqrt(i / 4)`, rounded.
pub fn balanced_slices(cost: SliceCost, sequence: u64, granule: u64, k: u64) -> Option<Vec<u64>> {
    let n = granules(sequence, granule, k)?;
    let cut = |i: u64| {
        let token = cost.token_at(sequence as f64, i as f64 / k as f64);
        // Every slice keeps a granule, before and behind.
        ((token / granule as f64).round() as u64).clamp(i, n - (k - i))
    };
    let mut before = 0;
    let mut lengths = Vec::new();
    for i in 1..=k {
        let end = if i == k { n } else { cut(i).max(before + 1) };
        lengths.push((end - before) * granule);
        before = end;
    }
    Some(lengths)
}

/// `k` slices as equal as multiples of `granule` can be, the first ones longer; `None` as for [`balanced_slices`].
pub fn equal_slices(sequence: u64, granule: u64, k: u64) -> Option<Vec<u64>> {
    let n = granules(sequence, granule, k)?;
    Some((0..k).map(|i| (n / k + u64::from(i < n % k)) * granule).collect())
}

fn granules(sequence: u64, granule: u64, k: u64) -> Option<u64> {
    let fits = granule > 0 && k > 0 && sequence.is_multiple_of(granule) && sequence / granule >= k;
    fits.then(|| sequence / granule)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn attention_alone_is_cut_at_square_roots() {
        let cost = SliceCost { linear: 0.0, quadratic: 1.0 };
        assert_eq!(balanced_slices(cost, 16, 1, 4), Some(vec![8, 3, 3, 2]));
        assert_eq!(balanced_slices(cost, 1600, 100, 4), Some(vec![800, 300, 300, 200]));
    }

    #[test]
    fn tokens_alone_are_cut_equally() {
        let cost = SliceCost { linear: 3.0, quadratic: 0.0 };
        assert_eq!(balanced_slices(cost, 4096, 128, 4), Some(vec![1024; 4]));
        assert_eq!(equal_slices(4096, 128, 3), Some(vec![1408, 1408, 1280]));
        assert_eq!(equal_slices(4096, 100, 3), None);
        assert_eq!(balanced_slices(cost, 4, 1, 5), None);
    }

    #[test]
    fn a_cost_is_found_again_from_three_slices() {
        let (cost, constant, s) = (SliceCost { linear: 2.0, quadratic: 0.5 }, 7.0, 64.0);
        let of = |a: f64, b: f64| constant + cost.up_to(b) - cost.up_to(a);
        assert_eq!(SliceCost::fitted(s, [of(0.0, 32.0), of(32.0, 64.0), of(0.0, 64.0)]), cost);
    }

    proptest! {
        /// The brute force is over every way to cut; balance may only miss it by the rounding of two cuts.
        #[test]
        fn no_other_cuts_have_a_much_shorter_longest_slice(
            linear in 0.0..4.0_f64, quadratic in 0.0..0.5_f64, n in 3..14_u64, k in 1..4_u64,
        ) {
            let cost = SliceCost { linear, quadratic };
            let longest = |lengths: &[u64]| {
                let mut at = 0;
                lengths.iter().fold(0.0_f64, |most, &length| {
                    let before = at;
                    at += length;
                    most.max(cost.up_to(at as f64) - cost.up_to(before as f64))
                })
            };
            let found = balanced_slices(cost, n, 1, k).unwrap();
            prop_assert_eq!(found.iter().sum::<u64>(), n);
            prop_assert!(found.len() as u64 == k && found.iter().all(|&length| length > 0));
            let best = all_cuts(n, k).iter().map(|lengths| longest(lengths)).fold(f64::INFINITY, f64::min);
            let token = cost.up_to(n as f64) - cost.up_to(n as f64 - 1.0);
            prop_assert!(longest(&found) <= best + token + 1e-9, "{found:?}");
        }
    }

    fn all_cuts(n: u64, k: u64) -> Vec<Vec<u64>> {
        if k == 1 {
            return vec![vec![n]];
        }
        let with =
            |first: u64| all_cuts(n - first, k - 1).into_iter().map(move |rest| [vec![first], rest].concat());
        (1..=n - (k - 1)).flat_map(with).collect()
    }
}
