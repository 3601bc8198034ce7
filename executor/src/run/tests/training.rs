//! Training over many steps, on from states, and what an observer is told.

use std::sync::Mutex;

use ir::collective::CollectiveKind as Kind;

use super::*;
use crate::fabric::TierOf;
use crate::job::{Recorded, Text, Training};
use crate::observe::{Activity, Moved, Nobody, Observer};
use crate::states::States;

const NEAR: &TierOf<'static> = &|_, _| 0;

/// A run of some steps on from states, told by what it carries on.
fn train(plan: &Execution<'_>, steps: u32, from: Option<&States>) -> Outcome {
    let training = Training { text: Text::Chain, from, record: Recorded::States };
    let plan = Execution { steps, training, ..plan.clone() };
    let programs = programs(&plan).unwrap();
    run_observed::<f64>(&plan, (&programs, &Routes::default()), (NEAR, &Nobody)).unwrap()
}

fn states(outcome: &Outcome) -> &States {
    outcome.states.as_ref().unwrap()
}

fn assert_close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (step, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= 1e-9 * b.abs(), "step {step}: {a} {b}");
    }
}

/// Data parallel with everything cut over replicas, two stages.
fn cut_over_replicas(model: &Model, mesh: &Mesh) -> Vec<LayerChoice> {
    let mut choices = choices(model, &[&["b"]], &[Placement::Shard(0)]);
    store(model, mesh, &mut choices, |all| Storage::on_device(all, all, all));
    choices
}

#[test]
fn a_model_learns_a_chain_of_words() {
    let (model, mesh) = (model(decoder(), 1), Mesh::of_sizes(&[]).unwrap());
    let plan = execution(&model, &mesh, choices(&model, &[], &[]), ONE_STAGE);
    let losses = train(&plan, 40, None).losses;
    let (first, last) = (losses[0], losses[39]);
    assert!(first > 2.4 && last < 0.7 * (model::VOCABULARY as f64).ln(), "{losses:?}");
}

#[test]
fn training_goes_on_from_states_as_if_it_had_not_stopped() {
    let (model, mesh) = (tied(model(decoder(), 2)), Mesh::of_sizes(&[2]).unwrap());
    let plan = execution(&model, &mesh, cut_over_replicas(&model, &mesh), (Schedule::OneFOneB, 2, 4));
    let whole = train(&plan, 6, None);
    let first = train(&plan, 2, None);
    let second = train(&plan, 4, Some(states(&first)));
    assert_eq!([&first.losses[..], &second.losses[..]].concat(), whole.losses);
    assert_eq!(states(&second), states(&whole));
    assert_eq!((states(&whole).steps, states(&whole).sequences), (6, 6 * 4 * model::MICRO_BATCH));
}

/// Six steps in one layout, six in another: the losses of twelve on one device, and of twelve in the first.
#[test]
fn training_goes_on_in_another_layout() {
    let model = model(experts(AttentionBias::None), 2);
    let (pair, square) = (Mesh::of_sizes(&[2]).unwrap(), Mesh::of_sizes(&[2, 2]).unwrap());
    let first = execution(&model, &pair, cut_over_replicas(&model, &pair), (Schedule::OneFOneB, 2, 4));
    let across = choices(&model, TENSOR, &[Placement::Shard(0), Placement::Shard(1)]);
    let second = execution(&model, &square, across, (Schedule::GPipe, 1, 4));
    let alone = Reference::of(&first);
    let expected = train(&alone.execution(&first), 12, None);
    assert_close(&train(&first, 12, None).losses, &expected.losses);
    let before = train(&first, 6, None);
    let after = train(&second, 6, Some(states(&before)));
    assert_close(&[before.losses.clone(), after.losses.clone()].concat(), &expected.losses);
}

#[test]
fn states_of_another_model_are_refused() {
    let (one, mesh) = (model(mlp(), 1), Mesh::of_sizes(&[]).unwrap());
    let plan = execution(&one, &mesh, choices(&one, &[], &[]), ONE_STAGE);
    let good = states(&train(&plan, 1, None)).clone();
    let refusal = |states: &States| {
        let training = Training { text: Text::Chain, from: Some(states), record: Recorded::States };
        run::<f64>(&Execution { training, ..plan.clone() }, NEAR).unwrap_err().to_string()
    };
    let mut bad = good.clone();
    bad.parameters.remove(&(1, "up".to_owned()));
    insta::assert_snapshot!(refusal(&bad), @"the states lack parameter `up` of layer 1");
    let mut bad = good.clone();
    bad.parameters.insert((1, "side".to_owned()), ArrayD::zeros(ndarray::IxDyn(&[1])));
    insta::assert_snapshot!(refusal(&bad), @"the states have `side` of layer 1, the model has not");
    let mut bad = good.clone();
    bad.parameters.insert((1, "up".to_owned()), ArrayD::zeros(ndarray::IxDyn(&[2, 2])));
    insta::assert_snapshot!(refusal(&bad), @"the given `up` has another shape");
    let mut bad = good;
    bad.moments.get_mut(&(1, "up".to_owned())).unwrap().second = ArrayD::zeros(ndarray::IxDyn(&[1]));
    insta::assert_snapshot!(refusal(&bad), @"the given moments of `up` have another shape");
}

/// What the ranks do, as told: the words of each, and the bytes that they moved.
#[derive(Default)]
struct Listener(Mutex<Vec<(usize, Vec<String>, Moved)>>);

impl Observer for Listener {
    fn begins(&self, rank: usize, activity: Activity<'_>) {
        let words = match activity {
            Activity::Action { step, action, chunk } => {
                format!("{:?} {} of chunk {chunk} in step {step}", action.section, action.micro_batch)
            }
            Activity::Update { step } => format!("update {step}"),
            Activity::Communication { kind, .. } => format!("{kind:?}"),
        };
        let mut all = self.0.lock().unwrap();
        let n = all.len().max(rank + 1);
        all.resize_with(n, Default::default);
        all[rank].1.push(words);
        all[rank].0 += 1;
    }

    fn ends(&self, rank: usize, moved: Moved) {
        let mut all = self.0.lock().unwrap();
        all[rank].0 -= 1;
        // Bytes of what holds nothing else are counted once: at its own end.
        if all[rank].0 == 0 {
            all[rank].2.sent += moved.sent;
            all[rank].2.received += moved.received;
        }
    }
}

#[test]
fn an_observer_hears_every_action_and_every_byte() {
    let (model, mesh) = (model(mlp(), 2), Mesh::of_sizes(&[2]).unwrap());
    let plan = execution(&model, &mesh, cut_over_replicas(&model, &mesh), (Schedule::GPipe, 2, 3));
    let heard = Listener::default();
    let programs = programs(&plan).unwrap();
    let outcome = run_observed::<f64>(&plan, (&programs, &Routes::default()), (NEAR, &heard)).unwrap();
    let heard = heard.0.into_inner().unwrap();
    assert!(heard.iter().all(|(open, ..)| *open == 0));
    let actions = |words: &[String]| words.iter().filter(|one| one.contains("of chunk")).count();
    assert!(heard.iter().all(|(_, words, _)| actions(words) == 2 * 6));
    assert!(heard[0].1.iter().any(|one| *one == format!("{:?}", Kind::AllGather)), "{:?}", heard[0].1);
    assert_eq!(heard[3].1.iter().filter(|one| *one == "update 1").count(), 1);
    let sent: u64 = outcome.counters.sent().values().sum();
    assert_eq!(heard.iter().map(|(.., moved)| moved.sent).sum::<u64>(), sent);
    assert_eq!(heard.iter().map(|(.., moved)| moved.received).sum::<u64>(), sent);
}
