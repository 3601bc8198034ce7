//! Every variant is a legal layer with the same parameters, and its programs are proven like any other's.

use std::collections::BTreeSet;

use ir::builder::LayerBuilder;
use ir::graph::{Init, Layer, Model, Segment, TensorId, check};
use ir::mesh::Mesh;
use ir::op::{AttentionBias, AttentionMask, OpKind};
use ir::signature::{Split, signature};

use super::variants;
use crate::prove::tests::{check_proven, layers};

/// The text form of a layer: one line per operator.
fn text(layer: &Layer) -> Vec<String> {
    layer.ops.iter().map(|op| signature(layer, op).display(layer, op)).collect()
}

fn fused_text(layer: &Layer, name: &str) -> Vec<String> {
    let variant = variants(layer).into_iter().find(|variant| variant.name == name);
    text(&variant.unwrap_or_else(|| panic!("no variant {name}")).layer)
}

fn names(layer: &Layer) -> Vec<String> {
    variants(layer).into_iter().map(|variant| variant.name).collect()
}

#[test]
fn queries_keys_and_values_fuse_by_key_value_head_and_gate_with_up_by_column() {
    let layer = layers::dense();
    assert_eq!(names(&layer), ["original", "q+k+v", "gate+up", "q+k+v gate+up"]);
    let text = fused_text(&layer, "q+k+v gate+up");
    let has = |line: &str| assert!(text.iter().any(|l| l == line), "no `{line}` in {text:#?}");
    has("linear: norm1[b s h] w_q+w_k+w_v[h k g d] -> q+k+v[b s k g d]");
    has("split: q+k+v[b s k g d] -> q[b s k r d] k[b s k d] v[b s k d]  whole g r");
    has("linear: norm2[b s h] w_gate+w_up[h f g'] -> gate+up[b s f g']");
    has("split: gate+up[b s f g'] -> gate[b s f] up[b s f]  whole g'");
    // The stream is still read twice; the normed streams no more.
    assert_eq!(text.iter().filter(|line| line.starts_with("fork")).count(), 2);
}

#[test]
fn biases_fuse_with_their_products() {
    let text = fused_text(&layers::opt(), "q+k+v");
    let has = |line: &str| assert!(text.iter().any(|l| l == line), "no `{line}` in {text:#?}");
    has("bias: q+k+v[b s k g d] c_q+c_k+c_v[k g d] -> q_bias+k_bias+v_bias[b s k g d]");
    has(
        "split: q_bias+k_bias+v_bias[b s k g d] -> q_bias[b s k r1 d] k_bias[b s k d] v_bias[b s k d]  whole g r1",
    );
}

#[test]
fn keys_and_values_of_a_latent_fuse_where_their_readers_keep_them_whole() {
    let text = fused_text(&layers::latent(), "k_up+v_up");
    let has = |line: &str| assert!(text.iter().any(|l| l == line), "no `{line}` in {text:#?}");
    has("linear: latent_norm[b s l] w_k_up+w_v_up[l k g] -> k_up+v_up[b s k g]");
    has("split: k_up+v_up[b s k g] -> k_up[b s k m] v_up[b s k n]  whole g m n");
}

#[test]
fn experts_fuse_gate_and_up_but_no_router_with_an_expert() {
    assert_eq!(names(&layers::experts()), ["original", "gate+up"]);
}

#[test]
fn what_no_sibling_fits_stays() {
    assert_eq!(names(&layers::head()), ["original"]);
    assert_eq!(names(&layers::embedding()), ["original"]);
}

/// A layer between an embedding and a head.
fn model(layer: Layer) -> Model {
    let layers = vec![layers::embedding(), layer, layers::head()];
    let sequence = (0..3).map(|layer| Segment { layer, count: 1 }).collect();
    Model { name: "model".into(), default_sequence: 16, layers, sequence, ties: Vec::new() }
}

fn inner_layers() -> Vec<Layer> {
    vec![layers::dense(), layers::experts(), layers::opt(), layers::latent(), layers::gemma()]
}

#[test]
fn every_variant_is_a_legal_layer() {
    for layer in inner_layers() {
        for variant in variants(&layer) {
            assert_eq!(check(&model(variant.layer)), Ok(()), "{} {}", layer.name, variant.name);
        }
    }
}

#[test]
fn every_variant_has_every_parameter_once() {
    for layer in inner_layers() {
        for variant in variants(&layer) {
            assert_eq!(variant.layer.n_parameters(), layer.n_parameters(), "{} {}", layer.name, variant.name);
            let mut seen: Vec<TensorId> = variant.kept.iter().map(|(original, _)| *original).collect();
            let mut held: BTreeSet<TensorId> = variant.kept.iter().map(|(_, tensor)| *tensor).collect();
            for fused in &variant.fused {
                let dim = variant.layer.tensors[fused.tensor.0].dims[fused.dim];
                let end = fused.parts.iter().fold(0, |from, part| {
                    assert_eq!(part.from, from);
                    from + part.length
                });
                assert_eq!(variant.layer.dims[dim.0].extent, ir::graph::Extent::Fixed(end));
                seen.extend(fused.parts.iter().map(|part| part.tensor));
                held.insert(fused.tensor);
            }
            seen.sort_unstable();
            assert_eq!(seen, layer.parameters().collect::<Vec<_>>());
            assert!(variant.layer.parameters().eq(held));
        }
    }
}

#[test]
fn a_fused_product_can_be_cut_wherever_all_its_parts_could() {
    let layer = layers::dense();
    let variant = variants(&layer).pop().unwrap().layer;
    let free = |layer: &Layer, op: &str| {
        let op = layer.ops.iter().find(|it| it.name == op).unwrap();
        let factors = signature(layer, op).factors.into_iter().filter(|f| f.split != Split::Whole);
        factors.map(|factor| factor.name).collect::<BTreeSet<_>>()
    };
    assert!(free(&variant, "q+k+v").is_superset(&free(&layer, "k")));
    assert!(free(&variant, "gate+up").is_superset(&free(&layer, "up")));
    assert_eq!(free(&variant, "q+k+v.split"), ["b", "d", "k", "s"].map(String::from).into());
}

#[test]
fn variants_are_the_same_every_time() {
    for layer in inner_layers() {
        assert_eq!(variants(&layer), variants(&layer));
    }
}

#[test]
fn programs_of_variants_are_proven() {
    for layer in inner_layers() {
        for variant in variants(&layer) {
            for seed in 0..4 {
                check_proven(&variant.layer, &Mesh::of_sizes(&[2, 2]).unwrap(), seed);
            }
        }
    }
}

/// Keys and values of what lies beside the stream fuse; who takes it from the layer reads it still.
#[test]
fn a_stream_that_is_read_and_left_gets_a_fork_in_every_variant() {
    let mut b = LayerBuilder::new("passing");
    [("h", 8), ("k", 2), ("d", 4), ("r", 1), ("m", 6)].into_iter().for_each(|(name, n)| b.fixed(name, n));
    let memory = b.stream_named("memory", "b m h");
    let x = b.stream();
    let product = |b: &mut LayerBuilder, name: &str, x, weight, dims| {
        let w = b.parameter(&format!("w_{name}"), weight, Init::Normal);
        b.op(name, OpKind::Linear, &[x, w], dims)
    };
    let q = product(&mut b, "q", x, "h k r d", "b s k r d");
    let k = product(&mut b, "k", memory, "h k d", "b m k d");
    let v = product(&mut b, "v", memory, "h k d", "b m k d");
    let (bias, mask) = (AttentionBias::None, AttentionMask::Full);
    let core = OpKind::Attention { scale: None, window: None, softcap: None, bias, mask };
    let o = b.op("core", core, &[q, k, v], "b s k r d");
    let o = product(&mut b, "o", o, "k r d h", "b s h");
    let y = b.op("add", OpKind::Add, &[x, o], "b s h");
    let layer = b.finish_with(&[memory, y]);
    assert_eq!(names(&layer), ["original", "k+v"]);
    let text = fused_text(&layer, "k+v");
    assert!(
        text.contains(&"fork: memory[b m h] -> memory.1[b m h] memory.out[b m h]".to_owned()),
        "{text:#?}"
    );
    for variant in variants(&layer) {
        for seed in 0..12 {
            check_proven(&variant.layer, &Mesh::of_sizes(&[2, 2]).unwrap(), seed);
        }
    }
}

#[test]
fn products_of_different_values_do_not_fuse() {
    let mut b = LayerBuilder::new("two");
    b.fixed("h", 4);
    b.fixed("f", 8);
    let x = b.stream();
    let mut product = |name: &str, x, weight, dims| {
        let w = b.parameter(&format!("w_{name}"), weight, Init::Normal);
        b.op(name, OpKind::Linear, &[x, w], dims)
    };
    let up = product("up", x, "h f", "b s f");
    let down = product("down", up, "f h", "b s h");
    let layer = b.finish(down);
    assert_eq!(names(&layer), ["original"]);
}
