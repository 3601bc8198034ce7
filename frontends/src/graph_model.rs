//! The description of a transformer, spelled out as a graph: embedding, kinds of decoder layers, head with loss.

use ir::builder::LayerBuilder;
use ir::graph::{Data, Extent, Init, Layer, Model, ParameterRef, Role, Segment, TensorId, Tie};
use ir::op::OpKind;

use crate::arch::{Arch, Block, LayerArch, Norm, Tying};
use crate::graph_attention::{attention, attention_dims};
use crate::graph_mlp::{mlp, mlp_dims};
use crate::graph_parts::{linear, rms_init};

const STREAM: &str = "b s h";
const TABLE: &str = "table";
const HEAD_WEIGHT: &str = "logits.weight";

/// The graph of a transformer.
pub(crate) fn graph_of(arch: &Arch) -> Model {
    let mut layers = vec![embedding(arch)];
    layers.extend(arch.kinds.iter().map(|kind| decoder_layer(kind, arch.hidden)));
    layers.push(head(arch));
    let last = layers.len() - 1;
    let mut sequence = vec![Segment { layer: 0, count: 1 }];
    sequence.extend(arch.runs.iter().map(|&(kind, count)| Segment { layer: kind + 1, count }));
    sequence.push(Segment { layer: last, count: 1 });
    let ties = match arch.head.tying {
        Tying::Tied => vec![Tie { owner: named(&layers, 0, TABLE), copy: named(&layers, last, HEAD_WEIGHT) }],
        Tying::Untied => Vec::new(),
    };
    Model { name: arch.name.clone(), default_sequence: arch.sequence, layers, sequence, ties }
}

fn named(layers: &[Layer], layer: usize, name: &str) -> ParameterRef {
    let at = layers[layer].tensors.iter().position(|tensor| tensor.name == name);
    ParameterRef { layer, tensor: TensorId(at.expect("embedding and head name their tables so")) }
}

fn embedding(arch: &Arch) -> Layer {
    let mut b = LayerBuilder::new("embedding");
    b.dim("v", Extent::Uneven(arch.vocab));
    b.fixed("h", arch.hidden);
    let tokens = b.tensor("tokens", "b s", Role::Data(Data::Tokens));
    let table = b.parameter(TABLE, "v h", Init::Normal);
    let mut x = b.op("lookup", OpKind::Embed, &[tokens, table], STREAM);
    if let Some(by) = arch.embedding.scale {
        x = b.op("scale", OpKind::Scale { by }, &[x], STREAM);
    }
    if let Some(learned) = &arch.embedding.positions {
        b.fixed("p", learned.rows);
        let positions = b.tensor("positions", "s", Role::Data(Data::Positions));
        let rows = b.parameter("position_table", "p h", Init::Normal);
        let kind = OpKind::AddPosition { offset: learned.offset };
        x = b.op("add_position", kind, &[x, positions, rows], STREAM);
    }
    if let Some(own) = &arch.embedding.norm {
        x = norm(&mut b, "norm", own, x);
    }
    b.finish(x)
}

fn decoder_layer(arch: &LayerArch, hidden: u64) -> Layer {
    let mut b = LayerBuilder::new(arch.name);
    b.fixed("h", hidden);
    for (name, length) in attention_dims(&arch.attention) {
        b.fixed(name, length);
    }
    for (name, extent) in mlp_dims(&arch.mlp) {
        b.dim(name, extent);
    }
    let x = b.stream();
    let out = match arch.block {
        Block::Sequential | Block::Sandwich => sequential(&mut b, arch, x),
        Block::ParallelOneNorm => {
            let normed = norm(&mut b, "norm", &arch.norm, x);
            parallel(&mut b, arch, x, [normed, normed])
        }
        Block::ParallelTwoNorms => {
            let first = norm(&mut b, "attention.norm", &arch.norm, x);
            let second = norm(&mut b, "mlp.norm", &arch.norm, x);
            parallel(&mut b, arch, x, [first, second])
        }
    };
    b.finish(out)
}

/// What a branch adds to the stream, with its factor.
fn scaled(b: &mut LayerBuilder, name: &str, arch: &LayerArch, branch: TensorId) -> TensorId {
    match arch.branch_scale {
        Some(by) => b.op(name, OpKind::Scale { by }, &[branch], STREAM),
        None => branch,
    }
}

/// `x += attention(norm(x)); x += mlp(norm(x))`, with a norm behind each part in a sandwich.
fn sequential(b: &mut LayerBuilder, arch: &LayerArch, x: TensorId) -> TensorId {
    let behind = |b: &mut LayerBuilder, name: &str, y: TensorId| {
        if arch.block == Block::Sandwich { norm(b, name, &arch.norm, y) } else { y }
    };
    let normed = norm(b, "attention.norm", &arch.norm, x);
    let attended = attention(b, &arch.attention, normed);
    let attended = behind(b, "attention.post_norm", attended);
    let attended = scaled(b, "attention.scale", arch, attended);
    let x = b.op("attention.add", OpKind::Add, &[x, attended], STREAM);
    let normed = norm(b, "mlp.norm", &arch.norm, x);
    let fed = mlp(b, &arch.mlp, normed);
    let fed = behind(b, "mlp.post_norm", fed);
    let fed = scaled(b, "mlp.scale", arch, fed);
    b.op("mlp.add", OpKind::Add, &[x, fed], STREAM)
}

/// `x + (attention(first) + mlp(second))`: where both parts are unfinished sums, they are reduced once.
fn parallel(b: &mut LayerBuilder, arch: &LayerArch, x: TensorId, normed: [TensorId; 2]) -> TensorId {
    let attended = attention(b, &arch.attention, normed[0]);
    let fed = mlp(b, &arch.mlp, normed[1]);
    let both = b.op("branch_add", OpKind::Add, &[attended, fed], STREAM);
    let both = scaled(b, "branch_scale", arch, both);
    b.op("stream_add", OpKind::Add, &[x, both], STREAM)
}

fn norm(b: &mut LayerBuilder, name: &str, norm: &Norm, x: TensorId) -> TensorId {
    let weight_name = format!("{name}.weight");
    match *norm {
        Norm::Rms { eps, shift } => {
            let weight = b.parameter(&weight_name, "h", rms_init(shift));
            b.op(name, OpKind::RmsNorm { eps, shift }, &[x, weight], STREAM)
        }
        Norm::Layer { eps } => {
            let weight = b.parameter(&weight_name, "h", Init::One);
            let bias = b.parameter(&format!("{name}.bias"), "h", Init::Zero);
            b.op(name, OpKind::LayerNorm { eps }, &[x, weight, bias], STREAM)
        }
    }
}

/// Final norm, logits, and the loss in the form that allows a sharded vocabulary:
/// `m = max z, e = sum exp(z - m), t = z[label], loss = log e + m - t`.
fn head(arch: &Arch) -> Layer {
    const LOGITS: &str = "b s v";
    const TOKENS: &str = "b s";
    let mut b = LayerBuilder::new("head");
    b.dim("v", Extent::Uneven(arch.vocab));
    b.fixed("h", arch.hidden);
    let x = b.stream();
    let normed = norm(&mut b, "norm", &arch.head.norm, x);
    // The dims of the embedding table, so that a tied head is the same tensor.
    let mut z = linear(&mut b, "logits", normed, ["v h", LOGITS]);
    if let Some(by) = arch.head.scale {
        z = b.op("scale", OpKind::Scale { by }, &[z], LOGITS);
    }
    if let Some(cap) = arch.head.softcap {
        z = b.op("softcap", OpKind::Softcap { cap }, &[z], LOGITS);
    }
    let labels = b.tensor("labels", TOKENS, Role::Data(Data::Labels));
    let max = b.op("row_max", OpKind::RowMax, &[z], TOKENS);
    let sum = b.op("sum_exp", OpKind::SumExp, &[z, max], TOKENS);
    let picked = b.op("pick", OpKind::Pick, &[z, labels], TOKENS);
    let per_token = b.op("cross_entropy", OpKind::CrossEntropy, &[sum, max, picked], TOKENS);
    let loss = b.op("loss", OpKind::SumLoss, &[per_token, labels], "");
    b.finish(loss)
}
