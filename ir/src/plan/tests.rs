//! Plans there and back, and what is said of wrong ones.

use proptest::prelude::*;

use crate::cluster::Nvme;
use crate::collective::{Algorithm, CollectiveKind, CommunicationClass};
use crate::lower::Recompute;
use crate::op::OpKind;
use crate::plan::Plan;
use crate::plan::check::{check_plan, open};
use crate::plan::entry::{CollectiveEntry, Entry, read_sharding, write_sharding};
use crate::plan::samples::{Family, Policy, Sample};
use crate::program::{Home, StateHome};
use crate::schedule::Schedule;
use crate::sharding::{Placement, Sharding};
use crate::signature::signature;
use crate::strategy::strategies;
use crate::units::BytesPerSecond;

fn sample() -> Sample {
    Sample {
        zero: 1,
        n_stages: 2,
        n_micro_batches: 4,
        ..Sample::new(Family::Dense, &[(2, Policy::Data), (2, Policy::TensorSequence)])
    }
}

#[test]
fn a_plan_survives_json() {
    let plan = sample().plan();
    let text = serde_json::to_string_pretty(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
    check_plan(&plan).unwrap();
}

#[test]
fn an_entry_reads_as_a_person_would_write_it() {
    let plan = sample().plan();
    let entry = &plan.entries[1];
    let op = |name: &str| entry.ops.iter().find(|op| op.op == name).unwrap().axes.join(" ");
    assert_eq!((entry.stream.as_str(), entry.out.as_str()), ("b@x0 s@x1", "b@x0 s@x1"));
    assert_eq!([op("norm1"), op("q"), op("core"), op("down")], ["b s", "b k", "b k", "b f"]);
    let norm = &entry.parameters[0];
    assert_eq!((norm.tensor.as_str(), norm.optimizer.join(" ")), ("norm1.weight", "x0 x1".into()));
}

#[test]
fn a_sharding_names_dims_sums_and_axes() {
    let mesh = crate::mesh::Mesh::of_sizes(&[2, 2, 2, 2]).unwrap();
    let [s, p, m] = [Placement::Shard(1), Placement::PartialSum, Placement::PartialMax];
    let check = |placements, text| {
        assert_eq!(write_sharding(Sharding(placements), &mesh, &["b", "s"]), text);
        assert_eq!(read_sharding(text, &mesh, &["b", "s"]), Ok(Sharding(placements)));
    };
    check([s, p, s, m], "s@x0,x2 sum@x1 max@x3");
    check([Placement::Replicate; 4], "replicated");
    let broken = |text| read_sharding(text, &mesh, &["b", "s"]).unwrap_err();
    insta::assert_snapshot!(broken("h@x0"), @"no dim is named `h`: the dims are `b s`");
    insta::assert_snapshot!(broken("b@x9"), @"no axis is named `x9`");
    insta::assert_snapshot!(broken("b@x0 s@x0"), @"axis `x0` is used twice");
    insta::assert_snapshot!(broken("b@x1,x0"), @"axis `x0` is out of order: axes stand in mesh order, each once");
    insta::assert_snapshot!(broken("b"), @"expected `dim@axis`, found `b`");
    insta::assert_snapshot!(broken(""), @"expected `replicated` or words such as `b@x0`, found nothing");
}

#[test]
fn ranks_count_stages_first() {
    let plan = sample().plan();
    assert_eq!((plan.cluster_rank(1, 3), plan.n_devices()), (7, 8));
}

/// The place and the sentence of what is wrong after an edit.
#[track_caller]
fn broken(edit: impl FnOnce(&mut Plan)) -> String {
    let mut plan = sample().plan();
    edit(&mut plan);
    let error = check_plan(&plan).unwrap_err();
    format!("{}: {error}", error.place)
}

/// Sums of gradients along some axes, by a tree.
fn by_tree(axes: &[&str]) -> CollectiveEntry {
    CollectiveEntry {
        class: CommunicationClass::GradientReduce,
        collective: CollectiveKind::AllReduce,
        axes: axes.iter().map(|&axis| axis.into()).collect(),
        algorithm: Algorithm::Tree,
        tensors: Vec::new(),
    }
}

#[test]
fn a_broken_invariant_is_named_with_its_place() {
    let cases = [
        broken(|p| p.schema_version = 9),
        broken(|p| p.mesh.axes[0].size = 0),
        broken(|p| p.mesh.axes[1].name = "x0".into()),
        broken(|p| p.mesh.axes[0].size = u64::MAX),
        broken(|p| p.n_stages = 0),
        broken(|p| p.n_stages = 1 << 40),
        broken(|p| p.micro_batch = 3),
        broken(|p| p.job.sequence = u64::MAX),
        broken(|p| p.job.sequence = 63),
        broken(|p| p.schedule = Schedule::Interleaved { virtual_stages: 2 }),
        broken(|p| p.schedule = Schedule::Interleaved { virtual_stages: u32::MAX }),
        broken(|p| p.entries[1].layer = "no".into()),
        broken(|p| p.entries[1].ops[2].axes[0] = "z".into()),
        broken(|p| p.entries[1].ops[3].axes[0] = "through".into()),
        broken(|p| p.entries[1].ops[2].axes.push("-".into())),
        broken(|p| p.entries[1].ops.swap(1, 2)),
        broken(|p| p.entries[1].ops.truncate(3)),
        broken(|p| p.entries[1].parameters[0] = p.entries[1].parameters[1].clone()),
        broken(|p| {
            let norm = &mut p.entries[1].parameters[0];
            norm.parameter = std::mem::take(&mut norm.optimizer);
        }),
        broken(|p| p.entries[1].parameters[0].gradient = vec!["x1".into(), "x0".into()]),
        broken(|p| p.entries[1].parameters[1].optimizer = vec!["x1".into()]),
        broken(|p| p.entries[1].stream = "b@x0".into()),
        broken(|p| p.entries[2].out = "sum@x0".into()),
        broken(|p| p.chunks[0][1].count -= 1),
        broken(|p| p.chunks[0][1].count = u64::MAX),
        broken(|p| p.chunks[0][1].count = 0),
        broken(|p| p.chunks[0][1].entry = 7),
        broken(|p| p.chunks[1].truncate(1)),
        broken(|p| p.chunks[1].clear()),
        broken(|p| p.chunks.push(Vec::new())),
        broken(|p| p.entries.push(p.entries[1].clone())),
        broken(|p| p.entries[0].parameters[0].optimizer.clear()),
        broken(|p| p.model.sequence[1].count = u64::MAX),
        broken(|p| p.model.layers[1].dims[2].length = crate::native::Length::Fixed(u64::MAX)),
        broken(|p| p.model.layers[1].dims[2].name = "defer".into()),
        broken(|p| p.model.layers[1].out = crate::native::Streams::One("norm1".into())),
        broken(|p| p.cluster.groups.clear()),
        broken(|p| p.entries[1].collectives = vec![by_tree(&[])]),
        broken(|p| p.entries[1].collectives = vec![by_tree(&["x0"]), by_tree(&["x0"])]),
    ];
    insta::assert_snapshot!(cases.join("\n"));
}

#[test]
fn a_copy_is_its_owners_tensor_only_where_it_can_be() {
    let one_stage = || Sample::new(Family::Dense, &[(2, Policy::Data)]).plan();
    assert!(one_stage().entries[2].parameters.iter().any(|one| one.shared));
    check_plan(&one_stage()).unwrap();
    let broken = |mut plan: Plan, edit: fn(&mut Plan)| {
        edit(&mut plan);
        let error = check_plan(&plan).unwrap_err();
        format!("{}: {error}", error.place)
    };
    let share = |plan: &mut Plan| {
        let copy = plan.entries[2].parameters.iter_mut().find(|one| one.tensor == "w_logits");
        copy.unwrap().shared = true;
    };
    let cases = [
        broken(sample().plan(), share),
        broken(one_stage(), |p| p.entries[0].parameters[0].shared = true),
        broken(one_stage(), |p| p.entries[2].parameters_home = Home::Host),
        broken(one_stage(), |p| p.entries[2].ops.iter_mut().for_each(|op| op.axes[0] = "-".into())),
    ];
    insta::assert_snapshot!(cases.join("\n"), @r"
    model.ties[0]: the copy is `shared`, but its owner is on another stage
    entries[0].parameters: `table` is `shared`, but it is not the copy of a tie
    model.ties[0]: the copy is `shared`, but its layer and its owner's hold parameters in different memories
    model.ties[0]: the copy is `shared`, but its gradient is summed along other axes than its owner's
    ");
}

#[test]
fn interleaved_micro_batches_come_in_multiples_of_the_stages() {
    let sample = Sample { schedule: Schedule::Interleaved { virtual_stages: 2 }, ..sample() };
    check_plan(&sample.plan()).unwrap();
    let error = check_plan(&Sample { n_micro_batches: 3, ..sample }.plan()).unwrap_err();
    assert_eq!(error.place, "schedule");
}

#[test]
fn a_plan_may_bring_its_own_table() {
    use crate::schedule::Placement;
    let looped = Placement::Looped { virtual_stages: 1 };
    let rows = |rows: &[&str]| Some(rows.iter().map(ToString::to_string).collect());
    let mut plan = Sample { n_micro_batches: 2, ..sample() }.plan();
    plan.schedule = Schedule::Custom(looped);
    plan.table = rows(&["F0 F1 I0 W0 B1", "F0 B0 F1 I1 W1"]);
    check_plan(&plan).unwrap();
    let text = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
    assert_eq!(crate::text::read_plan(&crate::text::write_plan(&plan)).unwrap().table, plan.table);
    let error = |table: Option<Vec<String>>| {
        let error = check_plan(&Plan { table, ..plan.clone() }).unwrap_err();
        format!("{}: {}", error.place, error.what)
    };
    let cases = [
        error(None),
        error(rows(&["F0 F1 B0 B1"])),
        error(rows(&["F0 F1 B0 B1", "F0 B0 F1 B"])),
        error(rows(&["F0 F1 B0 B1", "F0 B0 F1"])),
        error(rows(&["F0 F1 B0 B1", "B0 F0 F1 B1"])),
        error(rows(&["F0 F1 B0 B1", "F0 B0 F1 B1.1"])),
    ];
    insta::assert_snapshot!(cases.join("\n"), @r"
    schedule: a `custom` schedule needs a `table`
    table: expected a row for each of 2 stages, found 1
    table[1]: rank 1, action 3: expected a letter of F, B, I and W and a micro-batch, and perhaps a slice or a virtual stage, such as `F0`, `F0/2` or `B3.1`; found `B`
    table: rank 1: backward of micro-batch 1 on virtual stage 0 is missing
    table: rank 1: backward of micro-batch 0 on virtual stage 0 waits for ever on forward of micro-batch 0 on virtual stage 0 of rank 1
    table: rank 1: backward of micro-batch 1 on virtual stage 1 (marked rank 1) does not belong in this table
    ");
    plan.schedule = Schedule::OneFOneB;
    insta::assert_snapshot!(check_plan(&plan).unwrap_err(), @"`1f1b` writes its own table; only `custom` takes one");
}

proptest! {
    #[test]
    fn every_choice_survives_its_text(
        family in prop::sample::select(vec![Family::Dense, Family::Experts, Family::Latent]),
        picks in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 40),
    ) {
        let sample = Sample::new(family, &[(2, Policy::Data), (1, Policy::Data), (4, Policy::Tensor)]);
        let (model, mesh) = (sample.model(), sample.mesh());
        for layer in &model.layers {
            let sizes = layer.sizes(8, 64);
            let mut choice = sample.choice(layer, &mesh);
            for (i, op) in layer.ops.iter().enumerate() {
                let (pick, again) = &picks[i % picks.len()];
                let all = strategies(layer, op, &signature(layer, op), &mesh, &sizes);
                choice.strategies[i] = all[pick.index(all.len())];
                choice.recompute[i] = if *again { Recompute::Again } else { Recompute::Keep };
            }
            let entry = Entry::of(layer, &mesh, &choice);
            prop_assert_eq!(entry.choice(layer, &mesh).unwrap(), choice);
        }
    }

    #[test]
    fn no_edit_of_a_number_or_word_panics(at in any::<prop::sample::Index>(), with in 0..6_usize) {
        let value = serde_json::to_value(sample().plan()).unwrap();
        let mut places = Vec::new();
        leaves(&value, String::new(), &mut places);
        let mut edited = value.clone();
        let replacement = [
            serde_json::json!(0), serde_json::json!(u64::MAX), serde_json::json!(3),
            serde_json::json!("-"), serde_json::json!("x0"), serde_json::json!([]),
        ];
        *edited.pointer_mut(&places[at.index(places.len())]).unwrap() = replacement[with].clone();
        if let Ok(plan) = serde_json::from_value::<Plan>(edited) {
            let _ = open(&plan).map(|opened| opened.roles(&plan));
        }
    }
}

/// JSON pointers of all leaves.
fn leaves(value: &serde_json::Value, at: String, places: &mut Vec<String>) {
    match value {
        serde_json::Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, v)| leaves(v, format!("{at}/{i}"), places));
        }
        serde_json::Value::Object(map) => {
            map.iter().for_each(|(k, v)| leaves(v, format!("{at}/{k}"), places));
        }
        serde_json::Value::Null
        | serde_json::Value::Bool(_)
        | serde_json::Value::Number(_)
        | serde_json::Value::String(_) => places.push(at),
    }
}

fn of_slices(family: Family, slices: &[u64]) -> Plan {
    let axes = [(2, Policy::Data), (2, Policy::TensorSequence)];
    let n = slices.len() as u32;
    let schedule = Schedule::Seq1F1B { slices: n };
    let sample = Sample { schedule, slices: slices.to_vec(), n_stages: 2, ..Sample::new(family, &axes) };
    Sample { n_micro_batches: 4, ..sample }.plan()
}

#[test]
fn a_plan_of_slices_runs_the_same_program_for_each() {
    for family in [Family::Dense, Family::Experts, Family::Latent] {
        let plan = of_slices(family, &[32, 24, 8]);
        let opened = open(&plan).unwrap();
        let sliced = opened.sliced.as_ref().unwrap();
        for (whole, own) in opened.entries.iter().zip(&sliced.entries) {
            let (layer, kept) = (&sliced.model.layers[own.layer], own.program.saved.len());
            let count = |test: fn(&OpKind) -> bool| layer.ops.iter().filter(|op| test(&op.kind)).count();
            let extends = count(|kind| *kind == OpKind::Extend);
            assert_eq!(extends, 2 * count(|kind| matches!(kind, OpKind::Attention { .. })));
            // What attention saved of keys and values is saved before they are extended.
            assert_eq!(kept, whole.program.saved.len(), "{}", layer.name);
            assert_eq!(crate::graph::check(&sliced.model), Ok(()));
        }
        let text = crate::text::write_plan(&plan);
        assert_eq!(crate::text::read_plan(&text).unwrap().slices, [32, 24, 8]);
        let small =
            crate::shrink::shrink(&plan, &crate::shrink::ShrinkLimits { max_ranks: 64 }).unwrap().plan;
        assert_eq!(small.slices.len(), 3);
        assert_eq!(small.slices.iter().sum::<u64>(), small.job.sequence);
        assert!(small.slices[0] > small.slices[2], "{:?}", small.slices);
    }
}

#[test]
fn slices_that_cannot_be_run_are_named() {
    let plan = of_slices(Family::Dense, &[32, 32]);
    let error = |change: &dyn Fn(&mut Plan)| {
        let mut plan = plan.clone();
        change(&mut plan);
        let error = check_plan(&plan).unwrap_err();
        format!("{}: {}", error.place, error.what)
    };
    let cases = [
        error(&|plan| plan.slices = vec![32, 31]),
        error(&|plan| plan.slices = vec![64]),
        error(&|plan| plan.slices = vec![64, 0]),
        error(&|plan| plan.slices = vec![33, 31]),
        error(&|plan| plan.schedule = Schedule::OneFOneB),
        error(&|plan| {
            plan.schedule = Schedule::Custom(crate::schedule::Placement::Looped { virtual_stages: 1 });
            plan.table = Some(vec!["F0/0 F0/1 B0/1 B0/0".into(), "F0/1 F0/0 B0/1 B0/0".into()]);
            (plan.n_micro_batches, plan.job.global_batch) = (1, plan.micro_batch);
        }),
    ];
    insta::assert_snapshot!(cases.join("\n"), @r"
    slices: slices of 63 tokens in all are not a sequence of 64
    slices: `seq1f1b(2)` needs the lengths of 2 slices, found 1
    slices: a slice has at least one token
    slices: slice 0 of 0..33: layer `embedding`, operator `add_position`: its strategy cuts a loop that does not divide
    slices: `1f1b` runs whole sequences: leave `slices` out
    table: rank 1: forward of slice 1 of micro-batch 0 on virtual stage 0 stands where slice 0 is due: forwards take the slices of a micro-batch in order, backwards from the last to the first
    ");
}

/// Two stages, the second twice as wide along the axis that cuts sequences of the batch.
fn widened() -> Plan {
    let mut sample = Sample::new(Family::Experts, &[(2, Policy::Data), (2, Policy::TensorSequence)]);
    (sample.n_stages, sample.per_replica) = (2, 2);
    let mut plan = sample.plan();
    let mut wider = plan.mesh.clone();
    wider.axes[0].size = 4;
    plan.stage_meshes = vec![plan.mesh.clone(), wider];
    plan.cluster = super::samples::cluster(12);
    // Layers of both stages have an entry on each mesh.
    plan.entries.push(plan.entries[1].clone());
    let repeated = plan.chunks[1].iter_mut().filter(|run| run.entry == 1);
    repeated.for_each(|run| run.entry = 3);
    plan
}

#[test]
fn stages_on_unequal_meshes_are_counted_one_after_the_other() {
    let plan = widened();
    assert_eq!(check_plan(&plan), Ok(()));
    assert_eq!(
        (plan.cluster_rank(1, 5), plan.seat(9), plan.seat(3), plan.n_devices()),
        (9, (1, 5), (0, 3), 12)
    );
    let text = crate::text::write_plan(&plan);
    assert_eq!(crate::text::read_plan(&text).unwrap().stage_meshes, plan.stage_meshes);
    // Small, the second stage is still the wider one, and its ranks stand for ranks of its own.
    let small = crate::shrink::shrink(&plan, &crate::shrink::ShrinkLimits { max_ranks: 64 }).unwrap();
    assert_eq!(small.plan.stage_meshes, plan.stage_meshes);
    assert_eq!(small.stands_for, (0..12).collect::<Vec<_>>());
}

#[test]
fn unequal_meshes_that_do_not_fit_are_refused() {
    let broken = |edit: &dyn Fn(&mut Plan)| {
        let mut plan = widened();
        edit(&mut plan);
        let error = check_plan(&plan).unwrap_err();
        format!("{}: {error}", error.place)
    };
    insta::assert_snapshot!(broken(&|plan| plan.stage_meshes.truncate(1)), @"stage_meshes: expected a mesh for each of 2 stages, found 1");
    insta::assert_snapshot!(broken(&|plan| plan.stage_meshes.swap(0, 1)), @"stage_meshes[0]: the first stage has the plan's `mesh`");
    insta::assert_snapshot!(broken(&|plan| plan.stage_meshes[1].axes[0].name = "y".into()), @"stage_meshes[1].axes: expected the axes of `mesh`, x0 x1");
    insta::assert_snapshot!(broken(&|plan| plan.cluster = super::samples::cluster(11)), @"n_stages: 2 stages of 4 devices exceed the cluster's 11 devices");
    insta::assert_snapshot!(broken(&|plan| plan.chunks[1][0].entry = 1), @"chunks[1][0].entry: entry 1 is on a stage of another mesh too: it needs one of its own");
}

#[test]
fn states_lie_on_drives_only_where_every_node_has_some() {
    let mut plan = sample().plan();
    plan.entries[1].parameters[1].optimizer_home = StateHome::Nvme;
    let error = check_plan(&plan).unwrap_err();
    insta::assert_snapshot!(format!("{}: {error}", error.place), @"entries[1].parameters[1].optimizer_home: `nvme`, but nodes of `cluster.groups[0]` have no drives: expected `nvme` there, or `host` or `device` here");
    plan.cluster.groups[0].nvme = Some(super::samples::drives());
    let opened = open(&plan).unwrap();
    assert!(opened.roles(&plan).to_string().contains("some optimizer states on nvme"));
    plan.cluster.groups[0].nvme =
        Some(Nvme { write_bytes_per_s: BytesPerSecond(0.0), ..super::samples::drives() });
    let error = check_plan(&plan).unwrap_err();
    assert_eq!(error.place, "cluster.groups[0].nvme.write_bytes_per_s");
}
