//! How many micro-batches schedules hold something of at once, counted once for every number of stages and
//! micro-batches.
//!
//! Of 1F1B and its interleaved form a closed form says it. All others are counted off their tables, some of which are
//! looked for one action at a time, so a search keeps what it has counted.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use cost_model::Turns;
use ir::schedule::{Action, InFlight, Schedule, TableShape, in_flight, table};

use crate::candidate::Candidate;
use crate::memos::lock;

/// What a chunk of a stage holds something of at one time, in micro-batches of whole stages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Kept {
    /// That ran forward and not backward: all that forward keeps.
    pub saved: f64,
    /// That wait for the second part of backward: what that needs.
    pub carried: f64,
}

/// What a chunk holds when it holds most: of what forward keeps, of anything, and of what waits for the second part of
/// backward. These are corners of the hull of all that it ever holds; where backward runs at once they are one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Flight([Kept; 3]);

impl Flight {
    /// Of a schedule whose backward runs at once.
    pub fn whole(saved: f64) -> Self {
        Self([Kept { saved, carried: 0.0 }; 3])
    }

    fn of(row: &[Action], parts: f64) -> Self {
        let held = in_flight(row);
        let most = |weights: [u32; 2]| {
            let weight = |now: &InFlight| now.saved * weights[0] + now.carried * weights[1];
            let now = held.iter().copied().max_by_key(weight).unwrap_or_default();
            Kept { saved: f64::from(now.saved) / parts, carried: f64::from(now.carried) / parts }
        };
        Self([[1, 0], [1, 1], [0, 1]].map(most))
    }

    /// The most bytes, of so many for each.
    pub(crate) fn bytes(self, saved: f64, carried: f64) -> f64 {
        let [first, _, last] = self.0;
        // Cuts ask this for every layer.
        if last.carried == 0.0 {
            return first.saved * saved;
        }
        self.0.iter().map(|held| held.saved * saved + held.carried * carried).fold(0.0, f64::max)
    }

    /// The most micro-batches of which it holds all that forward keeps.
    pub(crate) fn saved(self) -> f64 {
        self.bytes(1.0, 0.0)
    }

    /// The more of both.
    fn or(self, other: Self) -> Self {
        let total = |one: Self| one.bytes(1.0, 1.0);
        if total(other) > total(self) { other } else { self }
    }
}

/// A schedule, its stages and its micro-batches.
type Order = (Schedule, u64, u64);

/// What every chunk holds at most, by the order of actions; nothing where there is none.
type Counted = BTreeMap<Order, Option<Arc<[Flight]>>>;

/// What was counted so far. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Flights(Arc<Mutex<Counted>>);

impl Flights {
    /// What every chunk of a candidate holds at most; `None` where the schedule has no table for so many stages and
    /// micro-batches.
    pub(crate) fn of(&self, candidate: &Candidate, schedule: Schedule) -> Option<Arc<[Flight]>> {
        let order = (schedule, candidate.n_stages, candidate.n_micro_batches);
        if let Some(known) = lock(&self.0).get(&order) {
            return known.clone();
        }
        let counted = counted(order);
        lock(&self.0).insert(order, counted.clone());
        counted
    }
}

fn counted((schedule, n_stages, n_micro_batches): Order) -> Option<Arc<[Flight]>> {
    let (p, m) = (u32::try_from(n_stages).ok()?, u32::try_from(n_micro_batches).ok()?);
    let parts = f64::from(schedule.n_virtual_stages() * schedule.n_slices());
    let of_ranks: Vec<Flight> = match Turns::new(schedule, p, m) {
        Some(turns) => {
            (0..p).map(|rank| Flight::whole(f64::from(turns.most_in_flight(rank)) / parts)).collect()
        }
        None => {
            let (placement, n_slices) = (schedule.placement(), schedule.n_slices());
            TableShape { n_stages: p, placement, n_micro_batches: m, n_slices }.check().ok()?;
            let counted = schedule.steady_from(p).map_or(m, |enough| m.min(enough));
            table(schedule, p, counted).ok()?.iter().map(|row| Flight::of(row, parts)).collect()
        }
    };
    let placement = schedule.placement();
    let of_chunk = |chunk: u32| {
        let ranks = placement.ranks(p, chunk);
        ranks.filter_map(|rank| of_ranks.get(rank as usize).copied()).fold(Flight::default(), Flight::or)
    };
    Some((0..placement.n_chunks(p)).map(of_chunk).collect())
}
