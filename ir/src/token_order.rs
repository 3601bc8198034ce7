//! In which order the tokens of a sequence are laid out before they are cut, and what each order leaves of the causal
//! mask on the device with most of it.
//!
//! Cutting stays plain blocks; positions, labels and masks go along with their tokens.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which tokens of a cut sequence a device holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TokenOrder {
    /// One run of neighbours.
    Natural,
    /// A run from the front and its mirror from the back, so that causal attention is equal work everywhere.
    ZigZag,
    /// Every n-th token (Brandon et al. 2023, arXiv 2311.09431).
    Striped,
}

impl TokenOrder {
    /// Position in its sequence of every token, in the order in which `parts` devices hold them; `None` where the
    /// sequence does not cut so.
    ///
    /// Eight tokens over two parts: zig-zag `0 1 6 7 | 2 3 4 5`, striped `0 2 4 6 | 1 3 5 7`.
    pub fn positions(self, sequence: u64, parts: u64) -> Option<Vec<u64>> {
        match self {
            Self::Natural => Some((0..sequence).collect()),
            _ if parts == 0 || !sequence.is_multiple_of(self.pieces(parts)) => None,
            Self::ZigZag => {
                let piece = sequence / (2 * parts);
                let rows = |i: u64| -> Range<u64> { i * piece..(i + 1) * piece };
                Some((0..parts).flat_map(|i| rows(i).chain(rows(2 * parts - 1 - i))).collect())
            }
            Self::Striped => {
                let steps = sequence / parts;
                Some((0..parts).flat_map(|i| (0..steps).map(move |j| i + j * parts)).collect())
            }
        }
    }

    /// The number that the length of a sequence must be a multiple of.
    pub fn pieces(self, parts: u64) -> u64 {
        match self {
            Self::Natural => 1,
            Self::ZigZag => 2 * parts,
            Self::Striped => parts,
        }
    }

    /// Fraction of its `queries x keys` rectangle that the causal mask leaves the busiest of `parts` devices, for long
    /// sequences of which a query sees at most `window` keys.
    ///
    /// A run from `a` to `b` of a sequence of length one sees the integral of `min(q, w)` from `a` to `b`. Without a
    /// window: one half in zig-zag and striped order, `1 - 1 / (2 parts)` in natural order. Two devices in natural
    /// order: the second sees three quarters.
    pub fn unmasked(self, parts: f64, sequence: f64, window: Option<u64>) -> f64 {
        let w = window.map_or(1.0, |window| (window as f64 / sequence).min(1.0));
        let seen = |q: f64| if q < w { q * q / 2.0 } else { w * q - w * w / 2.0 };
        let half = 0.5 / parts;
        let (from, to) = match self {
            Self::Natural => (1.0 - 2.0 * half, 1.0),
            // What a query sees grows ever slower, so the two pieces in the middle see most together.
            Self::ZigZag => (0.5 - half, 0.5 + half),
            Self::Striped => (0.0, 1.0),
        };
        (seen(to) - seen(from)) / (to - from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDERS: [TokenOrder; 3] = [TokenOrder::Natural, TokenOrder::ZigZag, TokenOrder::Striped];

    #[test]
    fn every_order_holds_every_token_once() {
        for order in ORDERS {
            let mut positions = order.positions(24, 4).unwrap();
            positions.sort_unstable();
            assert!(positions.into_iter().eq(0..24), "{order:?}");
        }
    }

    #[test]
    fn a_part_holds_a_run_and_its_mirror_or_every_nth_token() {
        assert_eq!(TokenOrder::ZigZag.positions(8, 2), Some(vec![0, 1, 6, 7, 2, 3, 4, 5]));
        assert_eq!(TokenOrder::Striped.positions(8, 2), Some(vec![0, 2, 4, 6, 1, 3, 5, 7]));
        assert_eq!(TokenOrder::ZigZag.positions(12, 4), None);
        assert_eq!(TokenOrder::Striped.positions(12, 5), None);
    }

    /// The formula against a count of every pair, the diagonal as half a pair.
    #[test]
    fn the_busiest_device_sees_what_the_formula_says() {
        let (sequence, parts) = (1024_u64, 4_usize);
        for (order, window) in ORDERS.into_iter().flat_map(|o| [None, Some(100), Some(700)].map(|w| (o, w))) {
            let positions = order.positions(sequence, parts as u64).unwrap();
            let own = |chunk: &[u64]| {
                let seen = |&q: &u64| (q as f64 + 0.5).min(window.unwrap_or(sequence) as f64);
                chunk.iter().map(seen).sum::<f64>()
            };
            let pairs = positions.chunks(positions.len() / parts).map(own).fold(0.0, f64::max);
            let counted = pairs / (sequence * sequence / parts as u64) as f64;
            let expected = order.unmasked(parts as f64, sequence as f64, window);
            assert!((counted - expected).abs() < 2e-3, "{order:?} {window:?}: {counted} is not {expected}");
        }
    }
}
