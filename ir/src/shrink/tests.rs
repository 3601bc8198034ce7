//! Shrunk plans: what is kept, how small they get.

use proptest::prelude::*;

use crate::graph::{Extent, Layer};
use crate::op::OpKind;
use crate::plan::check::{OpenPlan, open};
use crate::plan::samples::{Family, Policy, Sample};
use crate::plan::{EntryRun, Plan, check::check_plan};
use crate::program::{Instruction, Program};
use crate::schedule::Schedule;
use crate::shrink::{DEFAULT_MAX_RANKS, ShrinkError, ShrinkLimits, Shrunk, shrink};

const LIMITS: ShrinkLimits = ShrinkLimits { max_ranks: DEFAULT_MAX_RANKS };

#[track_caller]
fn shrunk(plan: &Plan) -> (Shrunk, OpenPlan) {
    let small = shrink(plan, &LIMITS).unwrap_or_else(|error| panic!("{error}"));
    let opened = open(&small.plan).unwrap();
    (small, opened)
}

fn length(layer: &Layer, dim: &str) -> u64 {
    layer.dims.iter().find(|d| d.name == dim).unwrap().extent.fixed().unwrap_or(0)
}

fn layer<'a>(open: &'a OpenPlan, name: &str) -> &'a Layer {
    open.model.layers.iter().find(|layer| layer.name == name).unwrap()
}

#[test]
fn a_pipeline_of_sixteen_keeps_four_stages_and_says_so() {
    let sample = Sample {
        zero: 1,
        n_stages: 16,
        n_micro_batches: 64,
        n_layers: 34,
        ..Sample::new(Family::Dense, &[(16, Policy::Data), (8, Policy::TensorSequence)])
    };
    let (small, _) = shrunk(&sample.plan());
    insta::assert_snapshot!(small.changes.join("\n"));
    assert_eq!(
        small.plan.roles.to_string(),
        "dp 2, tp 2 sp, pp 4, ZeRO-1, recompute none, micro-batch 1 x 6"
    );
}

#[test]
fn experts_keep_their_router_and_fill_their_slots() {
    let (small, opened) =
        shrunk(&Sample::new(Family::Latent, &[(4, Policy::Data), (8, Policy::Expert)]).plan());
    let moe = layer(&opened, "moe");
    let route = moe.ops.iter().find(|op| op.name == "route").unwrap();
    let OpKind::Route { top_k, groups, top_groups, .. } = route.kind else { panic!("not a router") };
    assert_eq!((top_k, groups, top_groups, length(moe, "e")), (2, 2, 1, 4));
    let slots = moe.dims.iter().find(|dim| dim.name == "c").unwrap();
    assert_eq!(slots.extent, Extent::Slots { filled: 0.5, capacity: None });
    assert_eq!(small.plan.roles.ep, 2);
}

#[test]
fn a_latent_head_is_the_sum_of_its_parts() {
    let (_, opened) = shrunk(&Sample::new(Family::Latent, &[(2, Policy::Data), (16, Policy::Tensor)]).plan());
    let moe = layer(&opened, "moe");
    let [d, m, p, j, l] = ["d", "m", "p", "j", "l"].map(|dim| length(moe, dim));
    assert_eq!((d, j), (m + p, l + p));
    let op = |name: &str| moe.ops.iter().find(|op| op.name == name).unwrap().kind.clone();
    assert_eq!(op("kv_split"), OpKind::Split { sizes: vec![l, p] });
    let OpKind::Rope { dims, .. } = op("q_rope") else { panic!("not a rotation") };
    assert_eq!(dims, p);
}

#[test]
fn an_uneven_vocabulary_stays_uneven_and_an_even_one_even() {
    let size = |vocabulary| {
        let sample = Sample { vocabulary, ..Sample::new(Family::Dense, &[(4, Policy::Tensor)]) };
        length(layer(&shrunk(&sample.plan()).1, "head"), "v")
    };
    assert_eq!((size(1001), size(1024)), (17, 16));
}

#[test]
fn windows_and_position_tables_go_with_the_sequence() {
    let (small, opened) = shrunk(&Sample::new(Family::Experts, &[(4, Policy::Gather)]).plan());
    assert_eq!((small.plan.job.sequence, length(layer(&opened, "embedding"), "p")), (8, 10));
    let windows = layer(&opened, "moe").ops.iter().filter_map(|op| {
        let OpKind::Attention { window, .. } = op.kind else { return None };
        window
    });
    assert_eq!(windows.collect::<Vec<_>>(), [4]);
}

/// A table of places, a window and a cut go with the length that they are of, not with the sequence.
#[test]
fn what_has_no_tokens_of_the_sequence_shrinks_by_itself() {
    for (policy, places) in [(Policy::TensorSequence, 4), (Policy::Gather, 4), (Policy::Ring, 4)] {
        let sample = Sample::new(Family::Crossing, &[(4, Policy::Data), (8, policy)]);
        let (small, opened) = shrunk(&sample.plan());
        let body = layer(&opened, "decoder");
        assert_eq!([length(body, "m"), length(body, "q")], [places, places + 2], "{policy:?}");
        let seen = body.ops.iter().find(|op| op.name == "seen").unwrap();
        let OpKind::Attention { window, .. } = seen.kind else { panic!("not attention") };
        assert_eq!((window, small.plan.job.sequence), (Some(places / 2), 8));
    }
}

#[test]
fn uneven_stages_stay_uneven() {
    let sample = Sample { n_stages: 8, n_layers: 12, ..Sample::new(Family::Dense, &[(2, Policy::Data)]) };
    let mut plan = sample.plan();
    let middle =
        |c: usize| plan.chunks[c].iter().filter(|run| run.entry == 1).map(|run| run.count).sum::<u64>();
    assert_eq!((0..8).map(middle).collect::<Vec<_>>(), [1, 2, 2, 2, 2, 2, 1, 0]);
    let lengths = |plan: &Plan| {
        let body =
            |c: usize| plan.chunks[c].iter().filter(|run| run.entry == 1).map(|run| run.count).sum::<u64>();
        (0..plan.chunks.len()).map(body).collect::<Vec<_>>()
    };
    assert_eq!(lengths(&shrunk(&plan).0.plan), [2, 1, 1, 1]);
    plan = Sample { n_layers: 8, ..sample }.plan();
    plan.chunks = (0..8_usize)
        .map(|c| {
            let mut runs = vec![EntryRun { entry: 1, count: 1 }];
            if c == 0 {
                runs.insert(0, EntryRun { entry: 0, count: 1 });
            }
            if c == 7 {
                runs.push(EntryRun { entry: 2, count: 1 });
            }
            runs
        })
        .collect();
    assert_eq!(lengths(&shrunk(&plan).0.plan), [1, 1, 1, 1]);
}

#[test]
fn interleaving_keeps_whole_groups_of_micro_batches() {
    let sample = Sample {
        n_stages: 8,
        schedule: Schedule::Interleaved { virtual_stages: 4 },
        n_micro_batches: 32,
        n_layers: 62,
        ..Sample::new(Family::Dense, &[(2, Policy::Data)])
    };
    let (small, _) = shrunk(&sample.plan());
    assert_eq!((small.plan.n_stages, small.plan.n_micro_batches), (4, 8));
    assert_eq!(small.plan.schedule, Schedule::Interleaved { virtual_stages: 2 });
    let (small, _) = shrunk(&Sample { n_micro_batches: 8, ..sample }.plan());
    assert_eq!(small.plan.n_micro_batches, 8);
}

#[test]
fn fewer_ranks_mean_two_stages_and_then_an_error() {
    let sample =
        Sample { n_stages: 4, ..Sample::new(Family::Dense, &[(4, Policy::Data), (4, Policy::Tensor)]) };
    let small = shrink(&sample.plan(), &ShrinkLimits { max_ranks: 8 }).unwrap();
    assert_eq!((small.plan.n_stages, small.plan.n_devices()), (2, 8));
    let error = shrink(&sample.plan(), &ShrinkLimits { max_ranks: 7 }).unwrap_err();
    assert_eq!(error, ShrinkError::TooManyRanks { needed: 8, limit: 7 });
}

/// In the second stage a layer reads its stream otherwise than the one before leaves it: these two do not become one.
#[test]
fn stages_that_convert_their_streams_stay_apart() {
    let sample = |policy| Sample { n_stages: 6, n_layers: 12, ..Sample::new(Family::Dense, &[(2, policy)]) };
    let (mut plan, mut other) = (sample(Policy::TensorSequence).plan(), sample(Policy::Tensor).plan());
    // Of six stages the second and the third become one of four.
    let [EntryRun { entry, .. }] = plan.chunks[1][..] else { panic!("{:?}", plan.chunks[1]) };
    plan.chunks[1][0].entry = plan.entries.len();
    plan.entries.push(other.entries.swap_remove(entry));
    check_plan(&plan).unwrap();
    let (small, _) = shrunk(&plan);
    assert_eq!((small.plan.n_stages, small.plan.n_devices()), (6, 12));
}

/// What a program does, without how much of it.
fn outline(program: &Program) -> Vec<String> {
    let instructions = program.forward.iter().chain(&program.backward);
    let kinds = instructions.map(|instruction| match instruction {
        Instruction::Convert { steps, .. } => format!("{steps:?}"),
        Instruction::Parameter { gather, .. } => format!("{gather:?}"),
        Instruction::Accumulate { reduce, .. } => format!("{reduce:?}"),
        Instruction::Load { .. } => "load".into(),
        Instruction::Forward { op, .. } => format!("forward {op:?}"),
        Instruction::Backward { op, .. } => format!("backward {op:?}"),
        Instruction::Free { value } => format!("free {value:?}"),
    });
    kinds
        .chain(program.updates.iter().map(|update| format!("{:?} {:?}", update.reduce, update.gather)))
        .collect()
}

fn policy(family: Family) -> impl Strategy<Value = Policy> {
    let mut all = vec![
        Policy::Data,
        Policy::Tensor,
        Policy::TensorSequence,
        Policy::Gather,
        Policy::Ring,
        Policy::Ulysses,
    ];
    if family != Family::Dense {
        all.push(Policy::Expert);
    }
    prop::sample::select(all)
}

fn any_sample() -> impl Strategy<Value = Sample> {
    let family = prop::sample::select(vec![Family::Dense, Family::Experts, Family::Latent]);
    let size = || prop::sample::select(vec![1_u64, 2, 2, 4]);
    family.prop_flat_map(move |family| {
        let axes = prop::collection::vec((size(), policy(family)), 0..=3);
        let vocabulary = prop::sample::select(vec![5000_u64, 5001, 5119, 8192]);
        (axes, 0..4_u8, 1..7_u64, 1..4_u32, 1..4_u64, vocabulary, 0..8_u64).prop_map(
            move |(axes, zero, n_stages, v, groups, vocabulary, more)| Sample {
                zero,
                n_stages,
                schedule: if v > 1 {
                    Schedule::Interleaved { virtual_stages: v }
                } else {
                    Schedule::OneFOneB
                },
                n_micro_batches: groups * n_stages,
                n_layers: n_stages * u64::from(v) + more,
                vocabulary,
                recompute: if more % 2 == 0 { |op| op == "core" || op == "glu" } else { |_| false },
                ..Sample::new(family, &axes)
            },
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn what_a_small_plan_runs_is_what_the_large_one_runs(sample in any_sample()) {
        let plan = sample.plan();
        // Some mixes of axes cut what does not divide; those are not plans.
        prop_assume!(check_plan(&plan).is_ok());
        let (large, small) = (open(&plan).unwrap(), shrink(&plan, &LIMITS).unwrap());
        prop_assert!(small.plan.n_devices() <= DEFAULT_MAX_RANKS);
        let mut expected = plan.roles.clone();
        let found = &small.plan.roles;
        prop_assert_eq!(found.zero.stage, expected.zero.stage);
        for (a, b) in [(found.dp, expected.dp), (found.tp, expected.tp), (found.cp, expected.cp), (found.ep, expected.ep)] {
            prop_assert_eq!(a > 1, b > 1);
        }
        expected.context = found.context;
        prop_assert_eq!(expected.context, plan.roles.context);
        let opened = open(&small.plan).unwrap();
        for (big, little) in large.entries.iter().zip(&opened.entries) {
            prop_assert_eq!(&big.choice, &little.choice);
            prop_assert_eq!(outline(&big.program), outline(&little.program));
        }
        let widest = opened.model.layers.iter().flat_map(|l| &l.dims).filter_map(|d| d.extent.fixed());
        prop_assert!(widest.max().unwrap() <= 257);
    }
}
