//! The search: variants of layers, strategies inside them, stages across them, and the proof that the result is right.
//!
//! Modules in reading order; each uses only those above it.
#![warn(missing_docs)]

pub mod rewrite;
pub mod prove;
pub mod request;
pub mod problem;
pub mod solve;
pub mod ilp;
pub mod space;
pub mod prices;
pub mod meeting;
mod stream;
pub mod layer_problem;
pub mod menu;
pub mod shapes;
pub mod partition;
pub mod candidate;
pub mod bound;
pub mod shelf;
pub mod arrange;
pub mod stage_memory;
pub mod evaluate;
pub mod optimize;
pub mod document;

use cost_model::Constants;
use ir::plan::Plan;
use request::{NoPlan, OnProgress, Request};

/// Finds the fastest plan for a request. Digests and the tool's version in it are left for the caller to fill.
///
/// # Errors
/// Where the request contradicts itself, or no plan fits; then with changes that would make one fit.
pub fn optimize(request: &Request, on_progress: OnProgress<'_>) -> Result<Plan, NoPlan> {
    let constants = Constants::load();
    match optimize::search(request, &constants, on_progress) {
        Ok(found) => document::plan(&found)
            .ok_or_else(|| NoPlan::Impossible { what: "the search came back without a plan".into() }),
        Err(NoPlan::NothingFits { stage, term, needed, capacity, .. }) => {
            let relaxations = optimize::relaxations(request, &constants);
            Err(NoPlan::NothingFits { stage, term, needed, capacity, relaxations })
        }
        Err(other) => Err(other),
    }
}

#[cfg(test)]
mod solver_tests;
#[cfg(test)]
mod test_models;
#[cfg(test)]
mod discovery_tests;
