//! Stages on meshes of other lengths: the stream is handed over, forward and back, and the numbers stay those of one
//! device.

use ir::mesh::{Mesh, Meshes};
use ir::schedule::Schedule;
use ir::sharding::Placement;

use super::model::{decoder, execution, mlp, model};
use super::{TENSOR, check, choices};
use crate::job::{Chunk, Execution};
use crate::label::Class;
use crate::run::run;

/// Runs a model of two layers on two stages of such meshes, along such axes, against one device.
fn on(
    sizes: [&[u64]; 2],
    (axes, streams): (&[&[&str]], [&[Placement]; 2]),
    schedule: Schedule,
    body: impl Fn() -> ir::graph::Layer,
) {
    let model = model(body(), 2);
    let meshes = sizes.map(|sizes| Mesh::of_sizes(sizes).unwrap());
    let [first, second] = streams.map(|stream| choices(&model, axes, stream));
    let base = execution(&model, &meshes[0], first.clone(), (schedule, 2, 4));
    let choices =
        vec![(0, first[0].clone()), (1, first[1].clone()), (1, second[1].clone()), (2, second[2].clone())];
    let chunks = vec![Chunk { layers: vec![0, 1] }, Chunk { layers: vec![2, 3] }];
    let execution =
        Execution { meshes: Meshes { alike: &meshes[0], each: &meshes }, choices, chunks, ..base };
    check(&execution);
    let sent = run::<f64>(&execution, &|_, _| 0).unwrap().traffic();
    let of_stream: u64 =
        sent.iter().filter(|((class, ..), _)| *class == Class::Pipeline).map(|(_, n)| n).sum();
    // Every device of a stage gets its block, forward and back, of two steps of four micro-batches.
    assert!(of_stream > 0);
}

#[test]
fn data_parallel_stages_may_be_wider_or_narrower() {
    let batch: (&[&[&str]], [&[Placement]; 2]) = (&[&["b"]], [&[Placement::Shard(0)]; 2]);
    for sizes in [[&[4], &[2]], [&[2], &[4]], [&[8], &[2]], [&[2], &[1]]] as [[&[u64]; 2]; 4] {
        on(sizes, batch, Schedule::OneFOneB, mlp);
    }
    on([&[4], &[2]], batch, Schedule::GPipe, decoder);
}

#[test]
fn stages_may_be_wider_along_either_of_two_axes_and_cut_the_stream_otherwise() {
    let kept: &[Placement] = &[Placement::Shard(0), Placement::Replicate];
    let cut: &[Placement] = &[Placement::Shard(0), Placement::Shard(1)];
    for streams in [[kept, kept], [cut, cut], [kept, cut], [cut, kept]] {
        on([&[4, 2], &[2, 2]], (TENSOR, streams), Schedule::OneFOneB, decoder);
        on([&[2, 1], &[2, 2]], (TENSOR, streams), Schedule::OneFOneB, decoder);
    }
}
