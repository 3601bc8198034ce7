//! The fastest plan whose memory fits.
//!
//! ```text
//! L(price) = min over plans of time + price * (memory - capacity)  <=  time of every plan that fits   (Everett 1963)
//! ```
//! `L` is concave in the price; each plan is a line above it. Where the line of a plan that does not fit crosses that
//! of one that does is the next price to try; when no plan lies below the crossing, it is the best bound there is
//! (Handler and Zang 1980). The gap between the bound and the best plan found is closed by `labels`.

use super::labels::{self, Labelled};
use super::narrow::{Aim, Moved};
use super::{Certified, Prepared, Weights};
use crate::problem::{Problem, Solution};

/// Prices of memory that are tried at most. Layers take fewer than ten.
const MAX_PRICES: usize = 60;

/// Times closer than this part of each other are the same.
const TOLERANCE: f64 = 1e-12;

/// Part of the best cost by which a plan that is sought may seem to exceed it, for rounding.
const ROUNDING: f64 = 1e-9;

/// A plan that fits, a bound on all that do, and the price of memory that gave it.
struct Relaxed {
    certified: Certified,
    price: f64,
}

/// A plan that fits and a bound on all that do. `None` where no plan fits.
pub fn relax(problem: &Problem, capacity: f64) -> Option<Certified> {
    Prepared::new(problem).relax(capacity).map(|relaxed| relaxed.certified)
}

/// The fastest plan that fits, with a bound that equals its time unless the labels were too many. `None` where no plan
/// fits.
pub fn solve(problem: &Problem, capacity: f64) -> Option<Certified> {
    Prepared::new(problem).fastest_within(capacity)
}

impl Prepared<'_> {
    /// The fastest plan whose memory is at most `capacity`, with a bound that equals its time unless the labels were
    /// too many. `None` where no plan fits.
    pub fn fastest_within(&self, capacity: f64) -> Option<Certified> {
        let Relaxed { certified, price } = self.relax(capacity)?;
        let Certified { mut solution, bound } = certified;
        if solution.cost.time - bound <= TOLERANCE * solution.cost.time.abs() {
            let bound = solution.cost.time;
            return Some(Certified { solution, bound });
        }
        let weights = Weights::priced(price);
        let best = solution.cost.time + price * capacity;
        let limit = best + ROUNDING * best.abs();
        let Some(moved) = Moved::new(self.weighed_apart(weights)).narrow(Aim::Below(limit)) else {
            let bound = solution.cost.time;
            return Some(Certified { solution, bound });
        };
        match labels::fastest(self.problem, &moved, (capacity, limit)) {
            Labelled::TooMany => Some(Certified { solution, bound }),
            Labelled::Nothing => {
                let bound = solution.cost.time;
                Some(Certified { solution, bound })
            }
            Labelled::Fastest(choices) => {
                let cost = self.problem.total(&choices)?;
                if cost.memory <= capacity && cost.time < solution.cost.time {
                    solution = Solution { choices, cost };
                }
                let bound = solution.cost.time;
                Some(Certified { solution, bound })
            }
        }
    }

    fn relax(&self, capacity: f64) -> Option<Relaxed> {
        let solution = |weights: Weights| -> Option<(f64, Solution)> {
            let (value, choices) = self.least(weights)?;
            let cost = self.problem.total(&choices)?;
            Some((value, Solution { choices, cost }))
        };
        let (mut bound, mut over) = solution(Weights::priced(0.0))?;
        if over.cost.memory <= capacity {
            return Some(Relaxed { certified: Certified { solution: over, bound }, price: 0.0 });
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
        Some(Relaxed { certified: Certified { solution: best, bound }, price: best_price })
    }
}
