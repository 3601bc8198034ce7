//! The names of arrangements made by hand.

use crate::plan::check::open;
use crate::plan::samples::{Family, Policy, Sample};
use crate::schedule::Schedule;

#[track_caller]
fn named(sample: &Sample) -> String {
    let plan = sample.plan();
    let opened = open(&plan).unwrap_or_else(|error| panic!("{}: {error}", error.place));
    opened.roles(&plan).to_string()
}

fn dense(axes: &[(u64, Policy)]) -> Sample {
    Sample::new(Family::Dense, axes)
}

#[test]
fn an_axis_on_the_batch_is_data_parallel() {
    let name = named(&dense(&[(8, Policy::Data)]));
    assert_eq!(name, "dp 8, ZeRO-0, recompute none, micro-batch 1 x 2");
}

#[test]
fn storage_cut_along_the_batch_axes_is_zero() {
    let stage = |zero| named(&Sample { zero, ..dense(&[(4, Policy::Data)]) });
    assert!((1..=3).all(|zero| stage(zero).contains(&format!("ZeRO-{zero},"))));
}

#[test]
fn storage_cut_along_some_of_the_batch_axes_is_hybrid() {
    let mut plan = Sample { zero: 3, ..dense(&[(2, Policy::Data), (4, Policy::Data)]) }.plan();
    for entry in &mut plan.entries {
        for parameter in &mut entry.parameters {
            for cut in [&mut parameter.parameter, &mut parameter.gradient, &mut parameter.optimizer] {
                cut.retain(|axis| axis == "x1");
            }
        }
    }
    let opened = open(&plan).unwrap();
    assert_eq!(opened.roles(&plan).to_string(), "dp 8, ZeRO-3 over 4, recompute none, micro-batch 1 x 2");
}

#[test]
fn an_axis_on_weights_and_heads_is_tensor_parallel() {
    let sample = dense(&[(2, Policy::Data), (4, Policy::Tensor)]);
    assert_eq!(named(&sample), "dp 2, tp 4, ZeRO-0, recompute none, micro-batch 1 x 2");
    let plan = sample.plan();
    assert_eq!((plan.roles.vocabulary_parallel, plan.roles.sequence_parallel), (4, false));
}

#[test]
fn a_stream_cut_on_a_tensor_axis_is_sequence_parallel() {
    let name = named(&dense(&[(2, Policy::Data), (4, Policy::TensorSequence)]));
    assert_eq!(name, "dp 2, tp 4 sp, ZeRO-0, recompute none, micro-batch 1 x 2");
}

#[test]
fn latent_attention_under_sequence_parallel_is_still_tensor_parallel() {
    let name = named(&Sample::new(Family::Latent, &[(2, Policy::Data), (4, Policy::TensorSequence)]));
    assert_eq!(name, "dp 2, tp 4 sp, etp 4, ZeRO-0, recompute none, micro-batch 1 x 2");
}

#[test]
fn an_axis_on_the_sequence_of_everything_is_context_parallel() {
    let name = named(&dense(&[(2, Policy::Data), (4, Policy::Gather)]));
    assert_eq!(name, "dp 2, cp 4 gather, ZeRO-0, recompute none, micro-batch 1 x 2");
}

#[test]
fn sequence_outside_and_heads_inside_attention_is_ulysses() {
    assert!(named(&dense(&[(4, Policy::Ulysses)])).starts_with("cp 4 ulysses, "));
    let both = named(&dense(&[(2, Policy::Gather), (4, Policy::Ulysses)]));
    assert!(both.starts_with("cp 8 gather and ulysses, "), "{both}");
}

#[test]
fn keys_that_travel_are_ring_attention() {
    assert!(named(&dense(&[(4, Policy::Ring)])).starts_with("cp 4 ring, "));
    let both = named(&dense(&[(2, Policy::Ring), (4, Policy::Ulysses)]));
    assert!(both.starts_with("cp 8 ring and ulysses, "), "{both}");
}

#[test]
fn keys_of_another_length_leave_an_axis_its_name() {
    let name = |policy| named(&Sample::new(Family::Crossing, &[(2, Policy::Data), (4, policy)]));
    assert!(name(Policy::Gather).starts_with("dp 2, cp 4 gather, "));
    assert!(name(Policy::Ring).starts_with("dp 2, cp 4 ring, "));
    assert!(name(Policy::Ulysses).starts_with("dp 2, cp 4 ulysses, "));
    assert!(name(Policy::TensorSequence).starts_with("dp 2, tp 4 sp, "));
}

/// A plan of one policy, of which some operators of the decoder keep to another.
#[track_caller]
fn mixed(most: Policy, (some, of): (&[&str], Policy)) -> String {
    let of_policy = |policy| dense(&[(4, policy)]).plan();
    let (mut plan, other) = (of_policy(most), of_policy(of));
    for (entry, other) in plan.entries.iter_mut().zip(&other.entries) {
        for (op, other) in entry.ops.iter_mut().zip(&other.ops) {
            if some.contains(&op.op.as_str()) {
                op.axes.clone_from(&other.axes);
            }
        }
    }
    open(&plan).unwrap().roles(&plan).to_string()
}

#[test]
fn what_most_of_the_weights_see_names_an_axis() {
    let attention = ["q", "k", "v", "q_rope", "k_rope", "core", "o"];
    let products = ["gate", "up", "glu", "down"];
    // Heads that are exchanged for sequences inside attention leave weights whole.
    assert!(mixed(Policy::Data, (&["core"], Policy::Tensor)).starts_with("dp 4, "));
    assert!(mixed(Policy::Gather, (&attention, Policy::Tensor)).starts_with("cp 4 ulysses, "));
    assert!(mixed(Policy::Data, (&products, Policy::Tensor)).starts_with("tp 4, "));
    assert!(mixed(Policy::Tensor, (&attention, Policy::Gather)).starts_with("tp 4, "));
}

#[test]
fn an_axis_on_the_experts_is_expert_parallel_and_data_parallel_outside() {
    let name = named(&Sample::new(Family::Experts, &[(2, Policy::Data), (8, Policy::Expert)]));
    assert_eq!(name, "dp 16, ep 8, ZeRO-0, recompute none, micro-batch 1 x 2");
}

#[test]
fn stages_and_virtual_stages_are_pp_and_vpp() {
    let sample = Sample {
        n_stages: 2,
        schedule: Schedule::Interleaved { virtual_stages: 3 },
        n_micro_batches: 4,
        n_layers: 10,
        per_replica: 2,
        ..dense(&[(2, Policy::Data)])
    };
    assert_eq!(named(&sample), "dp 2, pp 2, vpp 3, ZeRO-0, recompute none, micro-batch 2 x 4");
}

#[test]
fn recompute_is_full_where_backward_reads_only_what_is_computed_again() {
    let recompute = |recompute| named(&Sample { recompute, ..dense(&[(2, Policy::Data)]) });
    assert!(recompute(|_| true).contains("recompute full"));
    assert!(recompute(|op| op == "core").contains("recompute selective"));
}

#[test]
fn an_axis_that_nothing_cuts_computes_the_same() {
    let mut plan = dense(&[(2, Policy::Data), (4, Policy::Tensor)]).plan();
    for op in plan.entries.iter_mut().flat_map(|entry| &mut entry.ops) {
        op.axes[1] = "-".into();
    }
    let opened = open(&plan).unwrap();
    assert_eq!(opened.roles(&plan).same, 4);
}
