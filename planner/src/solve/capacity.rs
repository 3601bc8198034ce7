//! A plan that fits and a bound on all that do, from one price of memory.
//!
//! ```text
//! L(price) = min over plans of time + price * (memory - capacity)  <=  time of every plan that fits   (Everett 1963)
//! ```
//! `L` is concave in the price; each plan is a line above it. Where the line of a plan that does not fit crosses that
//! of one that does is the next price to try; when no plan lies below the crossing, it is the best bound there is
//! (Handler and Zang 1980). The gap between the bound and the best plan found is closed by `branch`.

use super::{Certified, Prepared, Weights};
use crate::problem::{Problem, Solution};

/// Prices of memory that are tried at most. Layers take fewer than ten.
const MAX_PRICES: usize = 60;

/// Times closer than this part of each other are the same.
pub(super) const TOLERANCE: f64 = 1e-12;

/// A plan that fits, a bound on all that do, and how they were found.
pub(super) struct Relaxed {
    /// The plan and the bound.
    pub(super) certified: Certified,
    /// The price of memory that gave the bound.
    pub(super) price: f64,
    /// The cheapest plans at that price between which the capacity lies: one that does not fit and one that does.
    pub(super) ends: [Vec<usize>; 2],
}

/// A plan that fits and a bound on all that do. `None` where no plan fits.
pub fn relax(problem: &Problem, capacity: f64) -> Option<Certified> {
    Prepared::new(problem).relax(capacity).map(|relaxed| relaxed.certified)
}

impl Prepared<'_> {
    pub(super) fn relax(&self, capacity: f64) -> Option<Relaxed> {
        let solution = |weights: Weights| -> Option<(f64, Solution)> {
            let (value, choices) = self.least(weights, weights)?;
            let cost = self.problem.total(&choices)?;
            Some((value, Solution { choices, cost }))
        };
        let (mut bound, mut over) = solution(Weights::priced(0.0))?;
        if over.cost.memory <= capacity {
            let ends = [over.choices.clone(), over.choices.clone()];
            return Some(Relaxed { certified: Certified { solution: over, bound }, price: 0.0, ends });
        }
        let (_, mut under) = solution(Weights { time: 0.0, memory: 1.0 })?;
        if under.cost.memory > capacity {
            return None;
        }
        let mut best = under.clone();
        let mut best_price = 0.0;
        for _ in 0..MAX_PRICES {
            let price = (under.cost.time - over.cost.time) / (over.cost.memory - under.cost.memory);
            if price <= 0.0 {
                break;
            }
            let (value, next) = solution(Weights::priced(price))?;
            if value - price * capacity > bound {
                bound = value - price * capacity;
                best_price = price;
            }
            let crossing = over.cost.weighed(price);
            let fits = next.cost.memory <= capacity;
            if fits && next.cost.time < best.cost.time {
                best = next.clone();
            }
            if crossing - value <= TOLERANCE * crossing.abs() {
                break;
            }
            if fits {
                under = next;
            } else {
                over = next;
            }
        }
        let ends = [over.choices, under.choices];
        Some(Relaxed { certified: Certified { solution: best, bound }, price: best_price, ends })
    }
}
