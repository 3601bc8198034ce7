//! Every layer of every shipped model: its forms, and proofs of programs for them at full width.

use frontends::{read_model, shipped_models};
use ir::graph::{Model, check};
use ir::mesh::Mesh;

use super::variants;
use crate::prove::tests::check_proven_for;

fn models() -> Vec<Model> {
    shipped_models().iter().map(|shipped| read_model(shipped.name, shipped.text).unwrap()).collect()
}

/// Layers of all shipped models.
pub(super) fn shipped_layers() -> Vec<ir::graph::Layer> {
    models().into_iter().flat_map(|model| model.layers).collect()
}

#[test]
fn the_forms_of_every_shipped_model_are_legal_and_hold_its_parameters() {
    for model in models() {
        for (i, layer) in model.layers.iter().enumerate() {
            for variant in variants(layer) {
                assert_eq!(
                    variant.layer.n_parameters(),
                    layer.n_parameters(),
                    "{} {}",
                    model.name,
                    variant.name
                );
                let mut changed = model.clone();
                changed.ties.clear();
                changed.layers[i] = variant.layer;
                assert_eq!(check(&changed), Ok(()), "{} {} {}", model.name, layer.name, variant.name);
            }
        }
    }
}

#[test]
fn attention_and_mlp_of_the_shipped_models_have_fused_forms() {
    let mut names: Vec<String> = models()
        .iter()
        .flat_map(|model| model.layers.iter())
        .flat_map(|layer| variants(layer).into_iter().map(|variant| variant.name))
        .collect();
    names.sort_unstable();
    names.dedup();
    insta::assert_debug_snapshot!(names);
}

#[test]
fn programs_for_every_shipped_layer_are_proven() {
    let mesh = Mesh::of_sizes(&[2, 4]).unwrap();
    for model in models() {
        for layer in &model.layers {
            for (seed, variant) in variants(layer).into_iter().enumerate() {
                check_proven_for(&variant.layer, &mesh, (64, 256), seed as u64);
            }
        }
    }
}
