//! Menus: for a layer kind on a mesh, the choices worth having, each lowered and priced from its program.
//!
//! The choice problem is solved at a few prices of memory, from free to dear; every answer is optimal for its price, so
//! the menu is the lower hull of what is possible. What an entry costs is read off its program, not off the problem.

use ir::graph::{Layer, Sizes};
use ir::lower::{LayerChoice, lower};
use ir::program::Program;

use crate::layer_problem::LayerProblem;
use crate::prices::Prices;
use crate::solve::{Prepared, eliminate};

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
/// price at which memory is all that counts. Between two of them a stage mixes layers of both.
pub const MEMORY_PRICES: [f64; 6] = [0.0, 0.03, 0.15, 0.6, 3.0, 1000.0];

/// The choices of one layer kind.
#[derive(Clone, Debug)]
pub struct Menu {
    /// Distinct choices.
    pub entries: Vec<Candidate>,
    /// The choice at each price of memory.
    pub levels: Vec<usize>,
}

/// Least seconds of a layer per step, whatever memory it takes, and the seconds that a byte is worth there.
pub fn fastest(problem: &LayerProblem<'_>) -> Option<(f64, f64, Vec<usize>)> {
    let (time, choices) = eliminate(&problem.problem, 0.0)?;
    let cost = problem.problem.total(&choices)?;
    Some((time, cost.time / cost.memory.max(1.0), choices))
}

/// The choices of a layer at the given prices of memory, in multiples of `unit` seconds per byte; `None` where the mesh
/// does not fit the layer.
pub fn menu(
    layer: &Layer,
    sizes: &Sizes,
    prices: &Prices<'_>,
    problem: &LayerProblem<'_>,
    (unit, levels): (f64, &[f64]),
) -> Option<Menu> {
    let mut menu = Menu { entries: Vec::new(), levels: Vec::new() };
    let prepared = Prepared::new(&problem.problem);
    for multiple in levels {
        let (objective, choices) = prepared.eliminate(multiple * unit)?;
        let choice = problem.choice(&choices);
        let known = menu.entries.iter().position(|entry| entry.choice == choice);
        let at = match known {
            Some(at) => at,
            None => {
                let program = lower(layer, prices.mesh(), sizes, &choice).ok()?;
                menu.entries.push(Candidate { choice, program, objective });
                menu.entries.len() - 1
            }
        };
        menu.levels.push(at);
    }
    Some(menu)
}
