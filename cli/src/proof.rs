//! The proof that every entry's program computes its layer, put into the plan.

use std::time::{Duration, Instant};

use ir::graph::{Layer, Sizes};
use ir::mesh::Mesh;
use ir::plan::Plan;
use ir::plan::check::{OpenPlan, open};
use ir::plan::entry::Proof;
use ir::program::Program;
use ir::schedule::Section;
use ir::split::split_backward;
use planner::prove;
use planner::rewrite::is_form_of;
use rayon::prelude::*;

use crate::failure::Failure;

/// The plan, with the outcome of a proof in every entry.
pub(crate) fn proven(mut plan: Plan) -> Result<Plan, Failure> {
    let opened = open(&plan)
        .map_err(|error| Failure::bug(format!("the plan is wrong at {}: {}", error.place, error.what)))?;
    let outcomes = outcomes(&plan, &opened);
    for (entry, outcome) in plan.entries.iter_mut().zip(outcomes) {
        entry.proof = Some(outcome);
    }
    Ok(plan)
}

/// A proof that was tried, and what it took.
#[derive(Clone, Debug)]
pub(crate) struct Attempt {
    /// The outcome.
    pub(crate) outcome: Proof,
    /// Terms in the largest e-graph of it, if all was proven.
    pub(crate) terms: usize,
    /// Most rounds of rules that one part of it took.
    pub(crate) rounds: usize,
    /// How long it took; nothing depends on it.
    pub(crate) time: Duration,
}

/// The outcome for every entry, in order.
pub(crate) fn outcomes(plan: &Plan, opened: &OpenPlan) -> Vec<Proof> {
    attempts(plan, opened).into_iter().map(|attempt| attempt.outcome).collect()
}

/// A proof of every entry, in order.
pub(crate) fn attempts(plan: &Plan, opened: &OpenPlan) -> Vec<Attempt> {
    let splits = splits_backward(plan);
    let one = |at: usize| {
        timed(|| {
            let (layer, sizes) = (opened.layer(at), opened.sizes(plan, at));
            let mesh = plan.mesh_of_entry(at);
            let mut parts = vec![prove::prove(layer, mesh, &sizes, &opened.entries[at].program)];
            // What is proven of the whole must hold of the parts as well.
            if opened.sliced.is_some() && all_proven(&parts) {
                parts.push(one_slice(plan, opened, at));
            }
            if splits && all_proven(&parts) {
                let ((layer, program), sizes) = (opened.run(at), opened.run_sizes(plan, at, 0));
                let split = split_backward(layer, program);
                parts.push(prove::prove_split((layer, mesh, &sizes), program, &split));
            }
            (parts, form_proof(opened, at))
        })
    };
    (0..opened.entries.len()).into_par_iter().map(one).collect()
}

/// A proof of one program of a layer, whatever plan it is of.
pub(crate) fn attempt(layer: &Layer, (mesh, sizes): (&Mesh, &Sizes), program: &Program) -> Attempt {
    timed(|| (vec![prove::prove(layer, mesh, sizes, program)], Proof::Proven))
}

/// Runs a proof in parts; what stands in the second place counts if all parts are proven.
fn timed(run: impl FnOnce() -> (Vec<prove::Proof>, Proof)) -> Attempt {
    #[expect(
        clippy::disallowed_methods,
        reason = "people want to know how long a proof takes; none depends on it"
    )]
    let start = Instant::now();
    let (parts, last) = run();
    let mut attempt = Attempt { outcome: last, terms: 0, rounds: 0, time: start.elapsed() };
    for part in parts {
        match part {
            prove::Proof::Proven { nodes, iterations } => {
                (attempt.terms, attempt.rounds) = (attempt.terms.max(nodes), attempt.rounds.max(iterations));
            }
            prove::Proof::NotProven { reason } => attempt.outcome = Proof::Open { reason },
        }
    }
    attempt
}

fn all_proven(parts: &[prove::Proof]) -> bool {
    parts.iter().all(|part| matches!(part, prove::Proof::Proven { .. }))
}

/// Whether what runs for the last slice of a sequence computes its layer, given what earlier slices have kept. That
/// slices together compute their sequence is no part of it: only a run shows that.
fn one_slice(plan: &Plan, opened: &OpenPlan, at: usize) -> prove::Proof {
    let ((layer, program), last) = (opened.run(at), plan.table_shape().n_slices - 1);
    prove::prove(layer, plan.mesh_of_entry(at), &opened.run_sizes(plan, at, last), program)
}

/// Whether the layer of an entry, where it stands for another, is proven equal to that one: found by the rules that
/// fuse, from the original alone.
fn form_proof(opened: &OpenPlan, at: usize) -> Proof {
    match opened.originals.get(&opened.entries[at].layer) {
        Some(original) if !is_form_of(opened.layer(at), original) => Proof::Open {
            reason: "its program equals the fused layer, which no rule derives from the original".into(),
        },
        Some(_) | None => Proof::Proven,
    }
}

/// Whether a plan's table runs backward in two parts.
pub(crate) fn splits_backward(plan: &Plan) -> bool {
    let rows = plan.actions().unwrap_or_default();
    rows.iter().flatten().any(|action| action.section == Section::BackwardWeight)
}

/// `all 4 programs are proven equal to their layers`, or which are not.
pub(crate) fn proof_words<'a>(proofs: impl Iterator<Item = (&'a str, Option<&'a Proof>)>) -> String {
    let mut n = 0;
    let mut open = Vec::new();
    for (layer, proof) in proofs {
        n += 1;
        match proof {
            Some(Proof::Proven) => {}
            Some(Proof::Open { reason }) => open.push(format!("`{layer}`: {reason}")),
            None => open.push(format!("`{layer}`: not tried")),
        }
    }
    match open.first() {
        None => format!("all {n} programs are proven equal to their layers"),
        Some(first) => {
            format!("{} of {n} programs are proven equal to their layers; not {first}", n - open.len())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_proven_is_named() {
        let open = Proof::Open { reason: "no proof".into() };
        let all = [("a", Some(&Proof::Proven)), ("b", Some(&open))];
        assert_eq!(proof_words(all[..1].iter().copied()), "all 1 programs are proven equal to their layers");
        assert_eq!(
            proof_words(all.into_iter()),
            "1 of 2 programs are proven equal to their layers; not `b`: no proof"
        );
    }
}
