//! Frozen parameters beside learned ones: the learned get the right gradients, the frozen stay as they are, and no plan
//! sees a difference.

use ir::graph::{Layer, Role};
use ir::op::{Activation, OpKind};

use super::*;
use model::layer;

/// An MLP whose products have adapters of two columns, everything else frozen.
fn adapted() -> Layer {
    layer(
        "mlp",
        &[
            (OpKind::Fork, "x[b s h] -> x1[b s h] x2[b s h]"),
            (OpKind::RmsNorm { eps: 1e-5, shift: 0.0 }, "x1[b s h] +norm[h] -> n[b s h]"),
            (OpKind::Fork, "n[b s h] -> n1[b s h] n2[b s h]"),
            (OpKind::Linear, "n1[b s h] *up[h g] -> u1[b s g]"),
            (OpKind::Linear, "n2[b s h] *up_a[h k] -> l1[b s k]"),
            (OpKind::Scale { by: 0.5 }, "l1[b s k] -> l2[b s k]"),
            (OpKind::Linear, "l2[b s k] *up_b[k g] -> u2[b s g]"),
            (OpKind::Add, "u1[b s g] u2[b s g] -> u[b s g]"),
            (OpKind::Act { act: Activation::Gelu }, "u[b s g] -> a[b s g]"),
            (OpKind::Fork, "a[b s g] -> a1[b s g] a2[b s g]"),
            (OpKind::Linear, "a1[b s g] *down[g h] -> d1[b s h]"),
            (OpKind::Linear, "a2[b s g] *down_a[g k] -> m[b s k]"),
            (OpKind::Linear, "m[b s k] *down_b[k h] -> d2[b s h]"),
            (OpKind::Add, "d1[b s h] d2[b s h] -> d[b s h]"),
            (OpKind::Add, "d[b s h] x2[b s h] -> out[b s h]"),
        ],
    )
}

fn is_adapter(name: &str) -> bool {
    name.ends_with("_a") || name.ends_with("_b")
}

/// The model with nothing learned but adapters.
fn frozen(n_layers: u64) -> Model {
    let mut model = model(adapted(), n_layers);
    for tensor in model.layers.iter_mut().flat_map(|layer| &mut layer.tensors) {
        if let Role::Parameter(init) = tensor.role
            && !is_adapter(&tensor.name)
        {
            tensor.role = Role::Frozen(init);
        }
    }
    assert_eq!(ir::graph::check(&model), Ok(()));
    model
}

/// Like `store`, with nothing but the parameter's own cut for what is frozen.
fn store_frozen(
    model: &Model,
    mesh: &Mesh,
    choices: &mut [LayerChoice],
    storage: impl Fn(AxisSet) -> Storage,
) {
    store(model, mesh, choices, storage);
    for (layer, choice) in model.layers.iter().zip(choices) {
        for (&tensor, entry) in &mut choice.storage {
            if !layer.is_trained(tensor) {
                *entry = Storage::frozen(entry.parameter);
            }
        }
    }
}

fn zero(level: u8) -> impl Fn(AxisSet) -> Storage {
    let cut = move |from: u8, all: AxisSet| if level >= from { all } else { AxisSet::EMPTY };
    move |all| Storage::on_device(cut(3, all), cut(2, all), cut(1, all))
}

/// Runs a plan of the model, and wants what is frozen to end, bit by bit, as it began.
#[track_caller]
fn check_frozen(execution: &Execution<'_>) -> Outcome {
    let outcome = check(execution);
    let programs = programs(execution).unwrap();
    let routes = Routes::default();
    let initial = Prepared::new(execution, &programs, &routes).unwrap();
    for parameters in &outcome.parameters {
        for ((layer_idx, name), value) in parameters {
            let layer = initial.layer(*layer_idx);
            let tensor = layer.tensors.iter().position(|tensor| tensor.name == *name).map(TensorId).unwrap();
            let same = initial.initial[&(*layer_idx, tensor)] == *value;
            assert_eq!(same, !is_adapter(name), "`{name}` of layer {layer_idx}");
        }
    }
    let names = outcome.gradients[0].keys().map(|(_, name)| name);
    assert!(names.clone().count() > 0 && names.clone().all(|name| is_adapter(name)));
    outcome
}

#[test]
fn the_frozen_stay_and_the_learned_move_under_every_storage() {
    let (model, mesh) = (frozen(2), Mesh::of_sizes(&[4]).unwrap());
    for level in 0..4 {
        let mut choices = choices(&model, &[&["b"]], &[Placement::Shard(0)]);
        store_frozen(&model, &mesh, &mut choices, zero(level));
        let outcome = check_frozen(&execution(&model, &mesh, choices, ONE_STAGE));
        let gathers = outcome.traffic().contains_key(&(Class::ParameterGather, CollectiveKind::AllGather, 0));
        assert_eq!(gathers, level == 3);
    }
}

#[test]
fn adapters_beside_split_products_on_two_axes() {
    let (model, mesh) = (frozen(2), Mesh::of_sizes(&[2, 2]).unwrap());
    for inner in [&["g"] as &[&str], &["k", "g"], &["g", "k"]] {
        for level in [0, 1, 3] {
            let mut choices = choices(&model, &[&["b"], inner], &[Placement::Shard(0), Placement::Replicate]);
            store_frozen(&model, &mesh, &mut choices, zero(level));
            check_frozen(&execution(&model, &mesh, choices, ONE_STAGE));
        }
    }
}

#[test]
fn pipelines_begin_with_a_frozen_embedding() {
    let (model, mesh) = (frozen(4), Mesh::of_sizes(&[2]).unwrap());
    for schedule in [Schedule::OneFOneB, Schedule::ZbH1, Schedule::ZbV, Schedule::Chimera] {
        let mut choices = choices(&model, &[&["b"]], &[Placement::Shard(0)]);
        store_frozen(&model, &mesh, &mut choices, zero(3));
        check_frozen(&execution(&model, &mesh, choices, (schedule, 2, 4)));
    }
}

#[test]
fn a_frozen_table_may_be_tied() {
    let (model, mesh) = (tied(frozen(2)), Mesh::of_sizes(&[2]).unwrap());
    let choices = choices(&model, &[&["b"]], &[Placement::Shard(0)]);
    let outcome = check_frozen(&execution(&model, &mesh, choices, (Schedule::OneFOneB, 2, 2)));
    assert!(outcome.traffic().keys().all(|(class, ..)| *class != Class::Tie));
}

#[test]
fn a_frozen_weight_keeps_no_operand_for_its_gradient() {
    let (learned, frozen, mesh) = (model(adapted(), 1), frozen(1), Mesh::of_sizes(&[]).unwrap());
    let saved = |model: &Model, name: &str| {
        let layer = &model.layers[2];
        let program = lower(layer, &mesh, &layer.sizes(4, 8), &plain(layer)).unwrap();
        let is_it = |id: &ir::program::ValueId| layer.tensors[program.value(*id).tensor.0].name == name;
        program.saved.iter().any(is_it)
    };
    let operand = |model: &Model| {
        let layer = &model.layers[2];
        let product = layer.ops.iter().find(|op| op.kind == OpKind::Linear).unwrap();
        layer.tensors[product.operands[0].0].name.clone()
    };
    assert!(saved(&learned, &operand(&learned)));
    assert!(!saved(&frozen, &operand(&frozen)));
}

#[test]
fn a_storage_with_states_is_refused_for_what_is_frozen() {
    let (model, mesh) = (frozen(1), Mesh::of_sizes(&[2]).unwrap());
    let mut choices = choices(&model, &[&["b"]], &[Placement::Shard(0)]);
    store(&model, &mesh, &mut choices, zero(1));
    let error = run::<f64>(&execution(&model, &mesh, choices, ONE_STAGE), &|_, _| 0).unwrap_err();
    assert!(error.to_string().contains("a frozen one has only the parameter's"), "{error}");
}

/// The gradient of the loss of a whole model, by central differences of every element of every adapter.
#[test]
fn gradients_of_adapters_are_the_slopes_of_the_loss() {
    let (model, mesh) = (frozen(1), Mesh::of_sizes(&[]).unwrap());
    let execution = execution(&model, &mesh, choices(&model, &[], &[]), ONE_STAGE);
    let (programs, routes) = (programs(&execution).unwrap(), Routes::default());
    let initial = Prepared::new(&execution, &programs, &routes).unwrap().initial;
    let layer = &model.layers[1];
    let found = run::<f64>(&execution, &|_, _| 0).unwrap().gradients.swap_remove(0);
    for ((layer_idx, name), gradient) in found {
        let tensor = layer.tensors.iter().position(|tensor| tensor.name == name).map(TensorId).unwrap();
        for at in 0..gradient.len() {
            let loss = |by: f64| {
                let mut value = initial[&(layer_idx, tensor)].clone();
                *value.iter_mut().nth(at).unwrap() += by;
                let given = Tensors::from([((layer_idx, name.clone()), value)]);
                run::<f64>(&Execution { given, steps: 1, ..execution.clone() }, &|_, _| 0).unwrap().losses[0]
            };
            let slope = (loss(1e-5) - loss(-1e-5)) / 2e-5;
            let own = gradient.iter().nth(at).unwrap();
            assert!((slope - own).abs() < 1e-8, "{name}[{at}]: {slope} by differences, {own} found");
        }
    }
}
