//! The proof that every entry's program computes its layer, put into the plan.

use ir::plan::Plan;
use ir::plan::check::{OpenPlan, open};
use ir::plan::entry::Proof;
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

/// The outcome for every entry, in order.
pub(crate) fn outcomes(plan: &Plan, opened: &OpenPlan) -> Vec<Proof> {
    let splits = splits_backward(plan);
    let one = |at: usize| {
        let (layer, sizes) = (opened.layer(at), opened.sizes(plan, at));
        let program = &opened.entries[at].program;
        let whole = match prove::prove(layer, &plan.mesh, &sizes, program) {
            prove::Proof::Proven { .. } if opened.sliced.is_some() => one_slice(plan, opened, at),
            other @ (prove::Proof::Proven { .. } | prove::Proof::NotProven { .. }) => other,
        };
        let proof = match whole {
            // What is proven of the whole must hold of the parts as well.
            prove::Proof::Proven { .. } if splits => {
                let ((layer, program), sizes) = (opened.run(at), opened.run_sizes(plan, at, 0));
                let split = split_backward(layer, program);
                prove::prove_split((layer, &plan.mesh, &sizes), program, &split)
            }
            other @ (prove::Proof::Proven { .. } | prove::Proof::NotProven { .. }) => other,
        };
        match proof {
            prove::Proof::Proven { .. } => form_proof(opened, at),
            prove::Proof::NotProven { reason } => Proof::Open { reason },
        }
    };
    (0..opened.entries.len()).into_par_iter().map(one).collect()
}

/// Whether what runs for the last slice of a sequence computes its layer, given what earlier slices have kept. That slices
/// together compute their sequence is no part of it: only a run shows that.
fn one_slice(plan: &Plan, opened: &OpenPlan, at: usize) -> prove::Proof {
    let ((layer, program), last) = (opened.run(at), plan.table_shape().n_slices - 1);
    prove::prove(layer, &plan.mesh, &opened.run_sizes(plan, at, last), program)
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
fn splits_backward(plan: &Plan) -> bool {
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
