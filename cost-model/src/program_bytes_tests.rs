use std::collections::BTreeSet;

use ir::conversion::steps;
use ir::mesh::AxisId;
use ir::program::{AxisSet, Storage};
use ir::sharding::Placement::{self, PartialSum, Replicate, Shard};

use super::*;
use crate::program_fixture::{
    DATA, Extra, Lowered, PLAIN, Shape, TENSOR, TENSOR_AND_SEQUENCE, gpt, lowered, mlp,
};

/// All links on one tier.
fn on_one_tier(element_bytes: u64) -> Links<'static> {
    Links { element_bytes, tier_of: &|_, _| 0 }
}

/// All bytes of a step.
fn total(step: &Step, mesh: &Mesh, shape: &[u64], element_bytes: u64) -> u64 {
    step_bytes(step, mesh, shape, &on_one_tier(element_bytes)).values().sum()
}

fn sharding(placements: &[Placement]) -> Sharding {
    let mut value = Sharding::REPLICATED;
    value.0[..placements.len()].copy_from_slice(placements);
    value
}

/// The elements of a rank's block, by number.
fn elements(sharding: Sharding, mesh: &Mesh, rank: u64, shape: &[u64]) -> BTreeSet<u64> {
    let ranges: Vec<_> = shape
        .iter()
        .enumerate()
        .map(|(dim, &size)| sharding.local_range(mesh, &mesh.coordinates(rank), dim, size))
        .collect();
    (0..shape.iter().product())
        .filter(|number| {
            let mut rest = *number;
            ranges.iter().zip(shape).rev().all(|(range, size)| {
                let at = rest % size;
                rest /= size;
                range.contains(&at)
            })
        })
        .collect()
}

/// Plays the messages of one step and counts what they carry.
fn played(step: &Step, mesh: &Mesh, shape: &[u64]) -> u64 {
    let before = |rank: u64| elements(step.before, mesh, rank, shape);
    let after = |rank: u64| elements(step.after, mesh, rank, shape);
    let mut sent = 0;
    for rank in 0..mesh.n_devices() {
        let group = mesh.group(rank, &step.axes);
        let n = group.len();
        let position = group.iter().position(|&member| member == rank).unwrap();
        // Parts of an all-reduce: chunks of equal length but the last.
        let chunk_len = before(rank).len().div_ceil(n);
        let chunk = |i: usize| before(rank).into_iter().skip(i * chunk_len).take(chunk_len).count();
        for hop in 1..n {
            let passed = (position + n - hop) % n;
            sent += match step.kind {
                StepKind::AllGather { .. } => before(group[(passed + 1) % n]).len(),
                StepKind::ReduceScatter { .. } => after(group[passed]).len(),
                StepKind::AllReduce | StepKind::AllReduceMax => chunk(passed) + chunk((passed + 1) % n),
                StepKind::AllToAll { .. } => before(rank).intersection(&after(group[passed])).count(),
                StepKind::Slice { .. } | StepKind::Zero => 0,
            } as u64;
        }
    }
    sent
}

#[test]
fn every_step_sends_what_its_messages_carry_even_in_unequal_blocks() {
    let mesh = Mesh::of_sizes(&[2, 3]).unwrap();
    let options = [Replicate, Shard(0), Shard(1), PartialSum];
    let all = (0..16).map(|i| sharding(&[options[i % 4], options[i / 4]])).collect::<Vec<_>>();
    let mut seen = BTreeSet::new();
    for &from in &all {
        for &to in &all {
            for step in steps(from, to).unwrap() {
                for shape in [[11, 6], [6, 12], [7, 10]] {
                    let expected = played(&step, &mesh, &shape);
                    assert_eq!(total(&step, &mesh, &shape, 1), expected, "{step:?} of {shape:?}");
                }
                seen.insert(step.kind.name());
            }
        }
    }
    assert_eq!(seen.len(), 6);
}

#[test]
fn a_gather_of_two_halves_sends_each_half_once() {
    let mesh = Mesh::of_sizes(&[2]).unwrap();
    let step = &steps(sharding(&[Shard(0)]), sharding(&[Replicate])).unwrap()[0];
    assert_eq!(total(step, &mesh, &[8, 4], 2), 64);
}

#[test]
fn flat_steps_cut_the_block_that_is_used() {
    // 5 x 3 elements used in rows over 2 ranks are blocks of 9 and 6; over 2 more ranks 9 is 5 + 4 and 6 is 3 + 3.
    let mesh = Mesh::of_sizes(&[2, 2]).unwrap();
    let used = sharding(&[Shard(0), Replicate]);
    let cut = AxisSet::of(&[AxisId(1)]);
    let gather = &ir::lower::flat_steps(AxisSet::EMPTY, cut, AxisSet::EMPTY).unwrap()[0];
    let bytes = flat_step_bytes(gather, &mesh, (used, &[5, 3]), &on_one_tier(1));
    assert_eq!(bytes, BTreeMap::from([(0, 9 + 6)]));
}

const SHAPE: Shape = Shape { b: 2, s: 8, h: 12, heads: 4, f: 16 };

fn count(lowered: &Lowered, element_bytes: u64) -> ProgramBytes {
    program_bytes(
        &lowered.layer,
        &lowered.mesh,
        &lowered.sizes,
        &lowered.program,
        &on_one_tier(element_bytes),
    )
}

fn text(bytes: &BytesByCollective) -> String {
    let one = |(sent, bytes): (&Sent, &u64)| format!("{} {} {bytes}", sent.class.name(), sent.kind.name());
    bytes.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[test]
fn tensor_parallelism_reduces_the_stream_twice_each_way() {
    // One all-reduce of 2 x 8 x 12 elements over 2 ranks: 2 x 1 x 192 elements of 8 bytes.
    let bytes = count(&lowered(gpt(SHAPE), SHAPE, &[2], &[TENSOR], &PLAIN), 8);
    assert_eq!(text(&bytes.forward), format!("forward tensor all-reduce {}", 2 * 3072));
    assert_eq!(text(&bytes.backward), format!("gradient all-reduce {}", 2 * 3072));
    assert_eq!(text(&bytes.update), "");
}

#[test]
fn with_cut_norms_it_gathers_and_scatters_the_same_bytes_and_gathers_again() {
    let bytes = count(&lowered(gpt(SHAPE), SHAPE, &[2], &[TENSOR_AND_SEQUENCE], &PLAIN), 8);
    assert_eq!(text(&bytes.forward), "forward tensor all-gather 3072, forward tensor reduce-scatter 3072");
    assert_eq!(
        text(&bytes.backward),
        "recomputed tensor all-gather 3072, gradient all-gather 3072, gradient reduce-scatter 3072"
    );
    // The norms' four vectors of 12 are sums over the ranks' tokens: an all-reduce each, once per step.
    assert_eq!(text(&bytes.update), format!("gradient reduce all-reduce {}", 4 * 2 * 12 * 8));
}

fn data_parallel(storage: Storage) -> ProgramBytes {
    count(&lowered(mlp(SHAPE), SHAPE, &[2], &[DATA], &Extra { storage, recompute: &[] }), 1)
}

#[test]
fn a_gradient_of_384_elements_is_reduced_by_what_its_storage_asks() {
    let cut = AxisSet::of(&[AxisId(0)]);
    let plain = data_parallel(Storage::default());
    assert_eq!(text(&plain.update), "gradient reduce all-reduce 768");
    assert_eq!(text(&plain.backward), "");
    let optimizer = data_parallel(Storage { optimizer: cut, ..Storage::default() });
    assert_eq!(text(&optimizer.update), "gradient reduce reduce-scatter 384, update all-gather 384");
    let all = data_parallel(Storage::on_device(cut, cut, cut));
    assert_eq!(text(&all.forward), "parameter gather all-gather 384");
    assert_eq!(
        text(&all.backward),
        "parameter gather all-gather 384, gradient accumulation reduce-scatter 384"
    );
    assert_eq!(text(&all.update), "");
}

#[test]
fn every_parameter_that_the_host_updates_moves_once_for_every_rank_that_updates_it() {
    let cut = AxisSet::of(&[AxisId(0)]);
    let moved = |storage: Storage| {
        let lowered = lowered(mlp(SHAPE), SHAPE, &[2], &[DATA], &Extra { storage, recompute: &[] });
        let shape = |update: &Update| lowered.layer.shape(update.tensor, &lowered.sizes);
        let one = |update: &Update| host_elements((&lowered.mesh, &shape(update)), update);
        lowered.program.updates.iter().map(one).sum::<u64>()
    };
    let whole = Storage::default();
    assert_eq!(moved(whole), 0);
    assert_eq!(moved(whole.on_host()), 2 * 384);
    assert_eq!(moved(Storage { optimizer: cut, ..whole }.on_host()), 384);
    assert_eq!(moved(Storage { optimizer: cut, ..whole }.on_nvme()), 384);
}

#[test]
fn saved_bytes_are_those_of_each_ranks_blocks() {
    // x and u, a of the up and down products: (12 + 16 + 16) x 3 and x 0 of 3 rows.
    let shape = Shape { b: 3, ..SHAPE };
    let lowered = lowered(mlp(shape), shape, &[1], &[], &PLAIN);
    let saved = saved_bytes(&lowered.layer, &lowered.mesh, &lowered.sizes, &lowered.program, 4);
    assert_eq!(saved, [(12 + 16 + 16) * 24 * 4]);
}

#[test]
fn a_stream_of_unequal_blocks_is_passed_on_rank_by_rank() {
    let mesh = Mesh::of_sizes(&[3]).unwrap();
    assert_eq!(stream_bytes(&mesh, &[7, 2], sharding(&[Shard(0)]), 2), [12, 12, 4]);
}
