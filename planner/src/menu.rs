//! Menus: for a layer kind on a mesh, the choices worth having, each lowered and priced from its program.
//!
//! The choice problem is solved at a few prices of memory, from free to dear; every answer is optimal for its price, so
//! the menu is the lower hull of what is possible. What an entry costs is read off its program, not off the problem.

use ir::graph::{Layer, Sizes};
use ir::lower::{LayerChoice, lower};
use ir::program::Program;

use crate::layer_problem::{Clock, Given, LayerProblem};
use crate::prices::Prices;
use crate::solve::eliminate;

/// One choice for a layer kind.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The choice.
    pub choice: LayerChoice,
    /// Its program.
    pub program: Program,
    /// What the choice problem said: seconds per step and bytes, as its clock counts them.
    pub objective: f64,
}

/// Prices of memory tried, as multiples of (time of the fastest plan) / (memory of the fastest plan): from free to a
/// price at which memory is all that counts. Halving the spacing changes no plan of the shipped models.
const MEMORY_PRICES: [f64; 7] = [0.0, 0.02, 0.1, 0.4, 1.5, 10.0, 1000.0];

/// The choices of a layer at rising prices of memory, without repetition; empty where the mesh does not fit it.
pub fn candidates(
    layer: &Layer,
    sizes: &Sizes,
    prices: &Prices<'_>,
    clock: Clock,
    given: &Given,
    depth: Depth,
) -> Vec<Candidate> {
    let Some(problem) = LayerProblem::new(layer, sizes, prices, clock, given) else { return Vec::new() };
    let Some((_, free)) = eliminate(&problem.problem, 0.0) else { return Vec::new() };
    let Some(scale) = problem.problem.total(&free) else { return Vec::new() };
    let unit = scale.time / scale.memory.max(1.0);
    let steps = match depth {
        Depth::FastestOnly => &MEMORY_PRICES[..1],
        Depth::Full => &MEMORY_PRICES[..],
    };
    let mut list: Vec<Candidate> = Vec::new();
    for &multiple in steps {
        let Some((objective, choices)) = eliminate(&problem.problem, multiple * unit) else { continue };
        let choice = problem.choice(&choices);
        if list.iter().any(|known| known.choice == choice) {
            continue;
        }
        if let Ok(program) = lower(layer, prices.mesh(), sizes, &choice) {
            list.push(Candidate { choice, program, objective });
        }
    }
    list
}

/// How much of a menu is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// The fastest choice, whatever it takes.
    FastestOnly,
    /// The hull from fastest to smallest.
    Full,
}
