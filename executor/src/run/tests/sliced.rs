//! Sequences run slice by slice: whatever is cut where, the numbers are those of one device with whole sequences.

use ir::graph::{Layer, Model};
use ir::lower::Recompute;
use ir::op::{AttentionBias, OpKind};
use ir::schedule::{Section, parse_row};
use ir::slices::{NotSliceable, Slices, sliced_choice, sliced_model};

use super::model::{
    ATTENTIONS, MICRO_BATCH, SEQUENCE, attending, attention_kind, crossing, embedding_with_positions, layer,
    limited_experts,
};
use super::*;

/// The sliced form of a model and of choices for it.
fn sliced(model: &Model, choices: &[LayerChoice]) -> Result<(Model, Vec<LayerChoice>), NotSliceable> {
    let sliced = sliced_model(model)?;
    let pairs = model.layers.iter().zip(&sliced.layers).zip(choices);
    let choices = pairs.map(|((whole, own), choice)| sliced_choice(whole, own, choice));
    let choices = choices.collect::<Result<Vec<_>, _>>()?;
    Ok((sliced, choices))
}

/// Runs slices of the given lengths, compares with the reference on whole sequences, and gives the outcome.
#[track_caller]
fn check_slices(
    model: &Model,
    (mesh, choices): (&Mesh, Vec<LayerChoice>),
    pipeline: (Schedule, u32, u32),
    lengths: &[u64],
) -> Outcome {
    let whole = execution(model, mesh, choices.clone(), (Schedule::GPipe, pipeline.1, pipeline.2));
    let (model, choices) = sliced(model, &choices).unwrap();
    let slices = Slices::of_lengths(lengths).unwrap();
    let run = Execution { slices, ..execution(&model, mesh, choices, pipeline) };
    check_against(&whole, &run)
}

#[track_caller]
fn check_against(whole: &Execution<'_>, execution: &Execution<'_>) -> Outcome {
    let reference = Reference::of(whole);
    let expected = run::<f64>(&reference.execution(whole), &|_, _| 0).unwrap();
    let programs = programs(execution).unwrap();
    let found = run_programs::<f64>(execution, &programs, &|_, _| 0).unwrap_or_else(|e| panic!("{e}"));
    for memory in &found.memory {
        assert_eq!((memory.high_water, memory.most_live), (memory.planned_peak, memory.lower_bound));
    }
    let comparison = compare(&expected, &found, Precision::F64);
    assert!(comparison.is_equal(), "{:#?}", comparison.failures().take(4).collect::<Vec<_>>());
    found
}

fn seq_1f1b(slices: u32) -> Schedule {
    Schedule::Seq1F1B { slices }
}

fn bodies() -> [Layer; 4] {
    [decoder(), experts(AttentionBias::None), experts(AttentionBias::Sinks), experts(AttentionBias::Slopes)]
}

#[test]
fn slices_of_any_length_give_the_numbers_of_whole_sequences() {
    for body in bodies() {
        let (model, mesh) = (model(body, 2), Mesh::of_sizes(&[]).unwrap());
        for lengths in [&[4, 4][..], &[5, 2, 1], &[1; 8]] {
            let n = lengths.len() as u32;
            for schedule in [seq_1f1b(n), Schedule::TeraPipe { slices: n }] {
                let choices = choices(&model, &[], &[]);
                check_slices(&model, (&mesh, choices), (schedule, 2, 3), lengths);
            }
        }
    }
}

#[test]
fn learned_positions_are_those_of_the_sequence() {
    let mut model = tied(model(decoder(), 2));
    model.layers[0] = embedding_with_positions();
    let model = Model { ties: Vec::new(), ..model };
    let mesh = Mesh::of_sizes(&[]).unwrap();
    check_slices(&model, (&mesh, choices(&model, &[], &[])), (seq_1f1b(3), 3, 4), &[3, 3, 2]);
}

#[test]
fn slices_run_on_meshes_that_cut_all_else() {
    for body in bodies() {
        let (model, mesh) = (model(body, 2), Mesh::of_sizes(&[2, 2]).unwrap());
        for stream in [Placement::Replicate, Placement::Shard(1)] {
            let choices = choices(&model, TENSOR, &[Placement::Shard(0), stream]);
            check_slices(&model, (&mesh, choices), (seq_1f1b(2), 2, 4), &[6, 2]);
        }
    }
}

/// Queries of a slice are cut, its keys gathered: their gradients are unfinished sums until they are at home.
#[test]
fn slices_are_cut_by_context_parallelism() {
    let (model, mesh) = (model(decoder(), 2), Mesh::of_sizes(&[2]).unwrap());
    let choices = choices(&model, &[&["s", "b"]], &[Placement::Shard(1)]);
    check_slices(&model, (&mesh, choices), (seq_1f1b(3), 2, 3), &[4, 2, 2]);
}

#[test]
fn slices_compute_again_all_but_keys_and_values() {
    for body in bodies() {
        let (model, mesh) = (model(body, 2), Mesh::of_sizes(&[2, 2]).unwrap());
        let kept = choices(&model, TENSOR, &[Placement::Shard(0), Placement::Shard(1)]);
        let mut again = kept.clone();
        again.iter_mut().for_each(|choice| choice.recompute.fill(Recompute::Again));
        let run = |choices| check_slices(&model, (&mesh, choices), (seq_1f1b(2), 2, 3), &[6, 2]);
        let (kept, again) = (run(kept), run(again));
        assert!(again.peak_saved.iter().zip(&kept.peak_saved).all(|(again, kept)| again < kept));
    }
}

/// Queries, keys and values of one product: for the queries its split runs again while the values are still there.
#[test]
fn slices_of_fused_products_compute_again() {
    let joint = layer(
        "joint",
        &[
            (OpKind::Fork, "x[b s h] -> x1[b s h] x2[b s h]"),
            (OpKind::Linear, "x1[b s h] *w[h k g] -> j[b s k g]"),
            (OpKind::Split { sizes: vec![8, 4, 4] }, "j[b s k g] -> qq[b s k h2] kk[b s k d] vv[b s k d]"),
            (OpKind::Linear, "qq[b s k h2] *wq[h2 r d] -> q[b s k r d]"),
            (
                attention_kind(AttentionBias::None),
                "q[b s k r d] kk[b s k d] vv[b s k d] @positions[s] positions[s] -> o[b s k r d]",
            ),
            (OpKind::Linear, "o[b s k r d] *wo[k r d h] -> oo[b s h]"),
            (OpKind::Add, "oo[b s h] x2[b s h] -> out[b s h]"),
        ],
    );
    let (model, mesh) = (model(joint, 2), Mesh::of_sizes(&[2]).unwrap());
    let mut choices = choices(&model, &[&["k", "v"]], &[Placement::Replicate]);
    choices.iter_mut().for_each(|choice| choice.recompute.fill(Recompute::Again));
    check_slices(&model, (&mesh, choices), (seq_1f1b(2), 2, 3), &[6, 2]);
}

/// Weights may wait, for their slice and any other: keys have their gradients before.
#[test]
fn a_table_of_a_users_own_splits_backward_of_slices() {
    let (model, mesh) = (model(decoder(), 2), Mesh::of_sizes(&[]).unwrap());
    let choices = choices(&model, &[], &[]);
    let whole = execution(&model, &mesh, choices.clone(), (Schedule::GPipe, 2, 2));
    let (model, choices) = sliced(&model, &choices).unwrap();
    let rows = [
        "F0/0 F0/1 F1/0 B0/1 F1/1 I0/0 I1/1 W0/0 I1/0 W1/0 W1/1",
        "F0/0 F0/1 I0/1 F1/0 I0/0 F1/1 W0/0 W0/1 B1/1 B1/0",
    ];
    let table: Vec<_> = (0..2).map(|rank| parse_row(rank, rows[rank as usize]).unwrap()).collect();
    assert!(table.iter().flatten().any(|action| action.section == Section::BackwardWeight));
    let slices = Slices::of_lengths(&[5, 3]).unwrap();
    let base = execution(&model, &mesh, choices, (Schedule::GPipe, 2, 2));
    check_against(&whole, &Execution { slices, table, ..base });
}

/// Of a micro-batch `1 / k` each, `p - r + k - 1` at a time: arXiv 2406.03488.
#[test]
fn slices_keep_less_than_whole_sequences() {
    let (model, mesh) = (model(mlp(), 4), Mesh::of_sizes(&[]).unwrap());
    let whole = check(&execution(&model, &mesh, choices(&model, &[], &[]), (Schedule::OneFOneB, 3, 6)));
    let cut = check_slices(&model, (&mesh, choices(&model, &[], &[])), (seq_1f1b(4), 3, 6), &[2; 4]);
    for rank in [0, 1] {
        let (p, k) = (3.0, 4.0);
        let share = (p - rank as f64 + k - 1.0) / k / (p - rank as f64);
        let expected = whole.peak_saved[rank] as f64 * share;
        assert_eq!(cut.peak_saved[rank] as f64, expected, "rank {rank}");
    }
}

#[test]
fn what_joins_tokens_is_refused() {
    let said = |model: &Model, choices: &[LayerChoice]| sliced(model, choices).unwrap_err().to_string();
    let limited = model(limited_experts(), 1);
    insta::assert_snapshot!(said(&limited, &choices(&limited, &[], &[])), @"layer `experts`, operator `dispatch 15`: experts have a capacity, and which tokens they drop depends on the whole sequence: it cannot be run slice by slice");
    let ring = model(decoder(), 1);
    insta::assert_snapshot!(said(&ring, &choices(&ring, &[&["ring", "s"]], &[Placement::Shard(1)])), @"layer `decoder`, operator `attention 8`: keys on a ring cannot be carried from slice to slice; gather them");
    let mut mixed = model(mlp(), 1);
    let sequence = mixed.layers[1].dims.iter().position(|dim| dim.name == "s").unwrap();
    let wide = mixed.layers[1].ops.iter().position(|op| op.kind == ir::op::OpKind::Linear).unwrap();
    let weight = mixed.layers[1].ops[wide].operands[1];
    mixed.layers[1].tensors[weight.0].dims.push(ir::graph::DimId(sequence));
    insta::assert_snapshot!(said(&mixed, &choices(&mixed, &[], &[])), @"layer `mlp`, operator `linear 2` works on whole sequences: it cannot be run slice by slice");
    let full = model(attending(ATTENTIONS[5]), 1);
    insta::assert_snapshot!(said(&full, &choices(&full, &[], &[])), @"layer `attending`, operator `attention 6`: its mask is `full`, so that its first tokens see the last: it cannot be run slice by slice");
    let crossing = model(crossing(), 1);
    insta::assert_snapshot!(said(&crossing, &choices(&crossing, &[], &[])), @"layer `crossing`: `pixels` is of no token of the sequence, so that every slice would need all of it: the layer cannot be run slice by slice");
    assert_eq!((SEQUENCE, MICRO_BATCH), (8, 8));
}
