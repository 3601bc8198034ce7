//! Models in which layers hand on more than one stream: a branch that waits, and layers that read both.

use super::*;
use crate::job::Chunk;
use model::{branched, tower_and_decoder};

/// The model with one choice per kind that cuts along these axes.
fn check_branched(
    sizes: &[u64],
    axes: &[&[&str]],
    stream: &[Placement],
    pipeline: (Schedule, u32, u32),
) -> Outcome {
    let (model, mesh) = (branched(), Mesh::of_sizes(sizes).unwrap());
    check(&execution(&model, &mesh, choices(&model, axes, stream), pipeline))
}

#[test]
fn branches_compute_on_a_grid_what_one_device_does() {
    check_branched(&[], &[], &[], ONE_STAGE);
    check_branched(&[4], &[&["b"]], &[Placement::Shard(0)], ONE_STAGE);
    for stream in [Placement::Replicate, Placement::Shard(1)] {
        check_branched(&[2, 2], TENSOR, &[Placement::Shard(0), stream], ONE_STAGE);
    }
    check_branched(
        &[2, 2],
        &[&["b"], &["ring", "s"]],
        &[Placement::Shard(0), Placement::Shard(1)],
        ONE_STAGE,
    );
}

/// Six places beside eight tokens: both are cut by two, gathered or travelling, in every order of the tokens.
#[test]
fn a_tower_of_another_length_computes_on_a_grid_what_one_device_does() {
    let model = tower_and_decoder();
    let mesh = Mesh::of_sizes(&[2, 2, 2]).unwrap();
    let stream = [Placement::Shard(0), Placement::Shard(1), Placement::Replicate];
    for context in [&["s", "m"] as &[&str], &["ring", "s", "m"]] {
        let choices = choices(&model, &[&["b"], context, &["k", "v", "g", "h"]], &stream);
        for order in [TokenOrder::Natural, TokenOrder::ZigZag] {
            let execution = execution(&model, &mesh, choices.clone(), (Schedule::OneFOneB, 3, 4));
            check(&Execution { tokens: TokenLayout { order, parts: 2 }, ..execution });
        }
    }
}

/// Both streams of one layer come from one other rank, which gets their gradients in the reverse order.
#[test]
fn streams_between_the_same_two_ranks_are_not_taken_for_each_other() {
    let (model, mesh) = (branched(), Mesh::of_sizes(&[]).unwrap());
    let mut execution = execution(&model, &mesh, choices(&model, &[], &[]), (Schedule::GPipe, 2, 2));
    let kinds = model.kinds_in_order();
    let joined = kinds.iter().position(|&kind| model.layers[kind].stream_in.len() == 2).unwrap();
    execution.chunks =
        [&kinds[..joined], &kinds[joined..]].map(|layers| Chunk { layers: layers.to_vec() }).to_vec();
    check(&execution);
}

/// Nine layers: what the left branch has left passes one, two and three stages by.
#[test]
fn streams_pass_stages_by_in_every_kind_of_schedule() {
    let schedules = [
        (Schedule::GPipe, 2, 3),
        (Schedule::OneFOneB, 3, 4),
        (Schedule::OneFOneB, 9, 4),
        (Schedule::Interleaved { virtual_stages: 2 }, 3, 6),
        (Schedule::ZbH1, 4, 5),
        (Schedule::ZbV, 3, 6),
        (Schedule::Chimera, 4, 4),
    ];
    for pipeline in schedules {
        check_branched(&[2], &[&["b"]], &[Placement::Shard(0)], pipeline);
    }
}
