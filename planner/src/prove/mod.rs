//! Proof that a program computes its layer: forward, backward, and the update of every parameter.
//!
//! The layer on whole tensors and the program on every device's blocks are written in one language (`term`), side by
//! side in one e-graph (`translate`); sound rules (`rules`) are applied until nothing new follows, and what the program
//! leaves must then be equal to what the layer says. Operators are uninterpreted: what is used of them is what their
//! lines in `ir::op` claim, and those claims are tested by running kernels. A program that is proven may still be slow,
//! but it cannot be wrong in what it sends, keeps, sums or forgets. Not being proven is an answer about the program,
//! never an error.
//!
//! The update is taken to work element by element, and accumulation over micro-batches to be a sum, so that one
//! micro-batch stands for all.

mod term;
mod rules;
mod reference;
mod steps;
mod translate;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeSet;

use egg::{Id, Language};
use ir::graph::{Layer, Sizes};
use ir::mesh::Mesh;
use ir::program::Program;
use ir::split::SplitBackward;

use reference::{Reference, reference};
use rules::RULES;
use term::{Facts, Graph};
use translate::{Claims, claims, first_astray};

/// Rounds after which a proof is given up. Each round follows a program from begin to end, so the axes of the mesh
/// bound how many are needed; twice as many as ever seen.
const MAX_ROUNDS: usize = 200;

/// Terms after which a proof is given up: about fifty times those of the largest layer seen on two axes.
const MAX_TERMS: usize = 400_000;

/// Whether a program was proven to compute its layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proof {
    /// It was.
    Proven {
        /// Terms in the e-graph at the end.
        nodes: usize,
        /// Rounds of rules.
        iterations: usize,
    },
    /// It was not.
    NotProven {
        /// The first claim that does not follow, or the instruction that makes no sense.
        reason: String,
    },
}

/// Tries to prove that a program computes its layer on a mesh.
pub fn prove(layer: &Layer, mesh: &Mesh, sizes: &Sizes, program: &Program) -> Proof {
    prove_sections((layer, mesh, sizes), program, None)
}

/// Tries to prove the same of a program that runs backward in two parts, the second with nothing but what is carried.
pub fn prove_split(of: (&Layer, &Mesh, &Sizes), program: &Program, split: &SplitBackward) -> Proof {
    prove_sections(of, program, Some(split))
}

fn prove_sections(
    (layer, mesh, sizes): (&Layer, &Mesh, &Sizes),
    program: &Program,
    split: Option<&SplitBackward>,
) -> Proof {
    let mut graph = Graph::new(Facts::new(layer, mesh, sizes));
    let reference = reference(&mut graph);
    match claims(&mut graph, (program, split), &reference) {
        Ok(claims) => saturate(&mut graph, &claims, &reference),
        Err(reason) => Proof::NotProven { reason },
    }
}

/// Applies all rules to all terms, round by round, until every claim holds or nothing new follows.
fn saturate(graph: &mut Graph<'_>, claims: &Claims, reference: &Reference) -> Proof {
    let refuse = |reason: String| Proof::NotProven { reason };
    graph.rebuild();
    for round in 0..=MAX_ROUNDS {
        if graph.analysis.clash {
            return refuse("two terms of different shape were found equal: a rule is wrong".into());
        }
        let open =
            claims.obligations.iter().find(|claim| graph.find(claim.found) != graph.find(claim.expected));
        let Some(open) = open else {
            return Proof::Proven { nodes: graph.total_number_of_nodes(), iterations: round };
        };
        if !apply_rules(graph) {
            let astray = first_astray(graph, claims, reference);
            let astray = astray.map(|name| format!("; the first value that parts from it is {name}"));
            return refuse(format!("{} is not what the layer says{}", open.what, astray.unwrap_or_default()));
        }
        if graph.nodes().len() > MAX_TERMS {
            return refuse(format!("no proof of {} within {MAX_TERMS} terms", open.what));
        }
        graph.rebuild();
    }
    refuse(format!("no proof within {MAX_ROUNDS} rounds"))
}

/// One round: every term in the order in which it was added, those added in this round included. True if anything new
/// was learnt.
fn apply_rules(graph: &mut Graph<'_>) -> bool {
    let before = graph.nodes().len();
    let mut seen = BTreeSet::new();
    let mut news = false;
    let mut at = 0;
    while at < graph.nodes().len() && graph.nodes().len() <= MAX_TERMS {
        let id = Id::from(at);
        let term = graph.id_to_node(id).clone().map_children(|child| graph.find(child));
        at += 1;
        if at <= before && !seen.insert(term.clone()) {
            continue;
        }
        let class = graph.find(id);
        for rule in &RULES {
            news |= (rule.apply)(graph, class, &term);
        }
    }
    news || graph.nodes().len() > before
}
