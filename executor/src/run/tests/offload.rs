//! Optimizer states, what layers keep, and parameters on the host: the same numbers, two arenas, and the bytes that
//! move between them.

use ir::program::{Home, StateHome};

use super::*;
use crate::job::{Recorded, Text, Training};
use crate::observe::Nobody;
use crate::{HostMoves, RankMemory};

/// Data parallel with optimizer states cut over replicas, in one of the memories.
fn cut_states(model: &Model, mesh: &Mesh, home: StateHome) -> Vec<LayerChoice> {
    let mut all = choices(model, &[&["b"]], &[Placement::Shard(0)]);
    store(model, mesh, &mut all, |cut| Storage { optimizer: cut, home, ..Storage::default() });
    all
}

fn sum(list: &[RankMemory], of: fn(&RankMemory) -> u64) -> u64 {
    list.iter().map(of).sum()
}

#[test]
fn the_host_updates_to_the_same_numbers_and_takes_its_states_from_the_device() {
    let (model, mesh) = (model(mlp(), 2), Mesh::of_sizes(&[2]).unwrap());
    let of = |home: StateHome| check(&execution(&model, &mesh, cut_states(&model, &mesh, home), ONE_STAGE));
    let (device, host) = (of(StateHome::Device), of(StateHome::Host));
    assert_eq!(host.parameters, device.parameters);
    assert_eq!(sum(&device.host, |arena| arena.planned_peak), 0);
    for arena in &host.host {
        assert_eq!((arena.high_water, arena.most_live), (arena.planned_peak, arena.lower_bound));
    }
    // Eight bytes each of fp32 value, two moments and a gradient, for every parameter once.
    let n_parameters: usize = host.parameters[0].values().map(|tensor| tensor.len()).sum();
    assert_eq!(sum(&host.host, |arena| arena.planned_peak), 4 * 8 * n_parameters as u64);
    assert!(sum(&host.memory, |arena| arena.lower_bound) < sum(&device.memory, |arena| arena.lower_bound));
    let moved = host.moved.iter().fold((0, 0), |(down, up), one| (down + one.down, up + one.up));
    let n_steps = host.losses.len() as u64;
    assert_eq!(moved, (n_steps * 8 * n_parameters as u64, n_steps * 8 * n_parameters as u64));
    assert!(device.moved.iter().all(|one| *one == HostMoves::default()));
}

/// On the drives lie the value and both moments, in the host's memory every gradient and the states of one parameter at
/// a time.
#[test]
fn drives_hold_what_the_host_updates_and_nothing_else_changes() {
    let (model, mesh) = (model(mlp(), 2), Mesh::of_sizes(&[2]).unwrap());
    let of = |home: StateHome| check(&execution(&model, &mesh, cut_states(&model, &mesh, home), ONE_STAGE));
    let (host, nvme) = (of(StateHome::Host), of(StateHome::Nvme));
    assert_eq!(
        (&nvme.parameters, &nvme.gradients, &nvme.losses),
        (&host.parameters, &host.gradients, &host.losses)
    );
    assert_eq!(nvme.memory, host.memory);
    assert_eq!(sum(&host.nvme, |arena| arena.planned_peak), 0);
    for arena in nvme.host.iter().chain(&nvme.nvme) {
        assert_eq!((arena.high_water, arena.most_live), (arena.planned_peak, arena.lower_bound));
    }
    let sizes: Vec<u64> = nvme.parameters[0].values().map(|tensor| tensor.len() as u64).collect();
    let (all, largest) = (sizes.iter().sum::<u64>(), sizes.iter().max().unwrap());
    assert_eq!(sum(&nvme.nvme, |arena| arena.planned_peak), 3 * 8 * all);
    let in_passing = sum(&nvme.host, |arena| arena.lower_bound);
    assert_eq!(in_passing, 8 * all + 3 * 8 * largest);
    let n_steps = nvme.losses.len() as u64;
    for (moved, other) in nvme.moved.iter().zip(&host.moved) {
        assert_eq!((moved.read, moved.written), (n_steps * 3 * 8 * all / 2, n_steps * 3 * 8 * all / 2));
        assert_eq!(HostMoves { read: 0, written: 0, ..*moved }, *other);
    }
}

/// Copies of a tied table have their owner's new value on the device, whichever memory the owner's states are in.
#[test]
fn tied_tables_and_copies_of_chunks_meet_on_the_device() {
    let tied = tied(model(decoder(), 4));
    let mesh = Mesh::of_sizes(&[2]).unwrap();
    for shape in [(Schedule::OneFOneB, 2, 4), (Schedule::Chimera, 2, 4), (Schedule::ZbV, 2, 4)] {
        for home in [StateHome::Host, StateHome::Nvme] {
            let all = cut_states(&tied, &mesh, home);
            let outcome = check(&execution(&tied, &mesh, all, shape));
            let sum = |of: fn(&HostMoves) -> u64| outcome.moved.iter().map(of).sum::<u64>();
            let down = sum(|one| one.down);
            assert!(down > 0 && down == sum(|one| one.up), "{}", shape.0);
            let states = if home == StateHome::Nvme { 3 * down } else { 0 };
            assert_eq!([sum(|one| one.read), sum(|one| one.written)], [states; 2], "{}", shape.0);
        }
    }
}

#[test]
fn what_comes_up_is_as_operators_take_it() {
    let (model, mesh) = (model(mlp(), 1), Mesh::of_sizes(&[2]).unwrap());
    let of = |home: StateHome| {
        let plan = execution(&model, &mesh, cut_states(&model, &mesh, home), ONE_STAGE);
        let plan = Execution { edges: Edges::Bf16, ..plan };
        run_programs::<f32>(&plan, &programs(&plan).unwrap(), &|_, _| 0).unwrap()
    };
    let (device, host) = (of(StateHome::Device), of(StateHome::Host));
    assert_eq!(host.parameters, device.parameters);
    // Gradients go down in four bytes, parameters come up in two.
    assert!(host.moved.iter().all(|one| one.down == 2 * one.up && one.up > 0), "{:?}", host.moved);
    // States are no narrower on the drives.
    let nvme = of(StateHome::Nvme);
    assert_eq!(nvme.parameters, device.parameters);
    assert!(nvme.moved.iter().all(|one| (one.read, one.written) == (3 * one.down, 3 * one.down)));
}

#[test]
fn training_goes_on_in_the_other_memory() {
    let (model, mesh) = (tied(model(decoder(), 2)), Mesh::of_sizes(&[2]).unwrap());
    let train = |home: StateHome, steps: u32, from: Option<&States>| {
        let training = Training { text: Text::Chain, from, record: Recorded::States };
        let plan = execution(&model, &mesh, cut_states(&model, &mesh, home), (Schedule::OneFOneB, 2, 4));
        let plan = Execution { steps, training, ..plan };
        let programs = programs(&plan).unwrap();
        let outcome =
            run_observed::<f64>(&plan, (&programs, &Routes::default()), (&|_, _| 0, &Nobody)).unwrap();
        (outcome.losses, outcome.states.unwrap())
    };
    let (losses, whole) = train(StateHome::Device, 4, None);
    let (first, before) = train(StateHome::Device, 2, None);
    for home in [StateHome::Host, StateHome::Nvme] {
        let (second, after) = train(home, 2, Some(&before));
        assert_eq!([first.clone(), second].concat(), losses);
        assert_eq!(after, whole);
    }
}

/// A decoder on two stages, what its layers keep for backward in one of the memories.
fn kept_in(home: Home, (schedule, recompute): (Schedule, Recompute)) -> Outcome {
    let (model, mesh) = (model(decoder(), 4), Mesh::of_sizes(&[2]).unwrap());
    let mut all = choices(&model, &[&["b"]], &[Placement::Shard(0)]);
    for choice in &mut all {
        choice.kept = home;
        choice.recompute.fill(recompute);
    }
    check(&execution(&model, &mesh, all, (schedule, 2, 4)))
}

#[test]
fn what_layers_keep_comes_back_as_it_went() {
    for schedule in [Schedule::OneFOneB, Schedule::ZbV, Schedule::Chimera] {
        for recompute in [Recompute::Keep, Recompute::Again] {
            let of = |home: Home| kept_in(home, (schedule, recompute));
            let (device, host) = (of(Home::Device), of(Home::Host));
            assert_eq!((&host.losses, &host.parameters), (&device.losses, &device.parameters), "{schedule}");
            for arena in host.host.iter().chain(&host.memory) {
                assert_eq!((arena.high_water, arena.most_live), (arena.planned_peak, arena.lower_bound));
            }
            // What is kept is the same; the hosts have all of it at its peak, the devices that much less.
            assert_eq!((&host.saved, &host.peak_saved), (&device.saved, &device.peak_saved), "{schedule}");
            for (moved, (arena, peak)) in host.moved.iter().zip(host.host.iter().zip(&host.peak_saved)) {
                assert!(moved.kept_down == moved.kept_up && moved.kept_down > 0, "{schedule}: {moved:?}");
                assert!(arena.lower_bound <= *peak && arena.lower_bound > 0, "{schedule}: {arena:?} {peak}");
            }
            assert!(device.moved.iter().all(|one| *one == HostMoves::default()));
            let most = |outcome: &Outcome| sum(&outcome.memory, |arena| arena.lower_bound);
            assert!(recompute == Recompute::Again || most(&host) < most(&device), "{schedule}");
        }
    }
}

/// A ring keeps its result and the logarithms of its sums beside values: they go along.
#[test]
fn what_a_ring_keeps_goes_to_the_host_too() {
    let (model, mesh) = (model(decoder(), 2), Mesh::of_sizes(&[2]).unwrap());
    let of = |home: Home| {
        let mut all = choices(&model, &[&["ring", "s"]], &[Placement::Shard(1)]);
        all.iter_mut().for_each(|choice| choice.kept = home);
        check(&execution(&model, &mesh, all, ONE_STAGE))
    };
    let (device, host) = (of(Home::Device), of(Home::Host));
    assert_eq!((&host.losses, &host.saved), (&device.losses, &device.saved));
    let n_steps = host.losses.len() as u64;
    for (rank, moved) in host.moved.iter().enumerate() {
        let kept: u64 = host.saved[rank].values().sum();
        assert_eq!((moved.kept_down, moved.kept_up), (n_steps * 2 * kept, n_steps * 2 * kept));
    }
}

/// Parameters come up for forward and for backward of every micro-batch, and go down once per step, in their storage's
/// cut.
#[test]
fn parameters_come_up_for_every_use() {
    let (model, mesh) = (model(mlp(), 2), Mesh::of_sizes(&[2]).unwrap());
    for cut in [AxisSet::EMPTY, AxisSet(1)] {
        for home in [Home::Device, Home::Host] {
            let of = |parameters: Home| {
                let mut all = choices(&model, &[&["b"]], &[Placement::Shard(0)]);
                store(&model, &mesh, &mut all, |whole| Storage {
                    parameter: AxisSet(cut.0 & whole.0),
                    gradient: AxisSet(cut.0 & whole.0),
                    optimizer: whole,
                    home: home.into(),
                });
                all.iter_mut().for_each(|choice| choice.parameters = parameters);
                check(&execution(&model, &mesh, all, ONE_STAGE))
            };
            let (device, host) = (of(Home::Device), of(Home::Host));
            assert_eq!((&host.losses, &host.parameters), (&device.losses, &device.parameters));
            for arena in host.host.iter().chain(&host.memory) {
                assert_eq!((arena.high_water, arena.most_live), (arena.planned_peak, arena.lower_bound));
            }
            let all: usize = host.parameters[0].values().map(|tensor| tensor.len()).sum();
            // Every rank has all of them, or each a half.
            let copies = if cut.is_empty() { 2 } else { 1 };
            let (n_steps, bytes) = (host.losses.len() as u64, (all * copies * 8) as u64);
            let sum = |of: fn(&HostMoves) -> u64| host.moved.iter().map(of).sum::<u64>();
            assert_eq!(sum(|moved| moved.stored_down), n_steps * bytes);
            let uses = sum(|moved| moved.stored_up) / (n_steps * 2);
            // Both micro-batches; backward does not read what only adds.
            assert!(bytes < uses && uses <= 2 * bytes, "{uses} of {bytes}");
            let lies = |outcome: &Outcome| outcome.host.iter().map(|arena| arena.planned_peak).sum::<u64>();
            assert_eq!(lies(&host), lies(&device) + bytes);
        }
    }
}
