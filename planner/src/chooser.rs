//! Who answers the choice problem of a layer at a price of memory: the structured solver, or the integer program.
//!
//! Both are exact, so plans differ by ties at most. The program is slower by orders of magnitude; it is there so that
//! whoever doubts the structured solver can plan without it.

use std::collections::BTreeSet;
use std::sync::Mutex;

use ir::mesh::Mesh;

use crate::ilp;
use crate::layer_problem::LayerProblem;
use crate::problem::Problem;
use crate::request::Solver;
use crate::solve::Prepared;

/// Variables of an integer program that are accepted: up to here microlp takes seconds for a layer, beyond it may take
/// hours.
pub const MAX_VARIABLES: usize = 20_000;

/// What kept a solver from an answer; empty where all went well.
#[derive(Debug, Default)]
pub struct Troubles(Mutex<BTreeSet<String>>);

impl Troubles {
    fn note(&self, what: String) {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(what);
    }

    /// The first in the order of their text, so that threads do not change it.
    pub fn first(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).first().cloned()
    }
}

/// One choice problem in the hands of a solver.
pub enum Chooser<'a> {
    /// The structured solver's.
    Structured(Prepared<'a>),
    /// The integer program's.
    Program(&'a Problem, &'a Troubles),
}

impl<'a> Chooser<'a> {
    /// Hands a problem over.
    pub fn new(solver: Solver, problem: &'a Problem, troubles: &'a Troubles) -> Self {
        match solver {
            Solver::Structured => Self::Structured(Prepared::new(problem)),
            Solver::Microlp => Self::Program(problem, troubles),
        }
    }

    /// Least `time + price * memory`, and the choices that reach it. `None` where every combination is forbidden, or
    /// where the program gave up, which is noted.
    pub fn cheapest(&self, price: f64) -> Option<(f64, Vec<usize>)> {
        match self {
            Self::Structured(prepared) => prepared.eliminate(price),
            Self::Program(problem, troubles) => {
                match ilp::cheapest(problem, price) {
                    Ok(answer) => answer,
                    Err(error) => {
                        troubles.note(format!("the integer program of a layer gave up ({error}); leave it to the structured solver"));
                        None
                    }
                }
            }
        }
    }

    /// The same with a price of its own for what is kept for backward.
    pub fn cheapest_apart(&self, price: f64, kept: f64) -> Option<(f64, Vec<usize>)> {
        match self {
            Self::Structured(prepared) => prepared.eliminate_apart(price, kept),
            Self::Program(problem, troubles) => {
                let paid = problem.with_edges_at(kept);
                Chooser::Program(&paid, troubles).cheapest(price)
            }
        }
    }

    /// Least seconds of a layer per step, whatever memory it takes, and the seconds that a byte is worth there.
    pub fn fastest(&self, problem: &Problem) -> Option<(f64, f64, Vec<usize>)> {
        let (time, choices) = self.cheapest(0.0)?;
        let cost = problem.total(&choices)?;
        Some((time, cost.time / cost.memory.max(1.0), choices))
    }
}

/// What to say of a problem that is too large for a solver, if it is.
pub(crate) fn too_large(
    solver: Solver,
    problem: &LayerProblem<'_>,
    (layer, mesh): (&str, &Mesh),
) -> Option<String> {
    let n = match solver {
        Solver::Structured => return None,
        Solver::Microlp => ilp::n_variables(&problem.problem),
    };
    let axes: Vec<String> = mesh.axis_ids().map(|axis| mesh.size(axis).to_string()).collect();
    (n > MAX_VARIABLES).then(|| {
        format!(
            "as an integer program the choices of layer `{layer}` on a mesh of {} devices have {n} variables, more than \
             the {MAX_VARIABLES} that microlp is asked to solve: take the structured solver, fewer devices, or pin \
             degrees",
            axes.join(" x ")
        )
    })
}
