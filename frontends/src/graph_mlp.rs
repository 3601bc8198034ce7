//! Dense MLP and mixture of experts as operators.
//!
//! Dims: `f` inner width (of an expert in a mixture), `e` experts, `c` slots of an expert, `u` inner width of the
//! shared expert.

use ir::builder::LayerBuilder;
use ir::graph::{Data, Extent, Role, TensorId};
use ir::op::OpKind;

use crate::arch::{DenseMlp, MlpArch, MlpForm, MoeMlp, SharedExpert};
use crate::graph_parts::{bias, linear};

const STREAM: &str = "b s h";
const INNER: &str = "b s f";
const SCORES: &str = "b s e";
const EXPERT_IN: &str = "b e c h";
const EXPERT_INNER: &str = "b e c f";

/// Dims that the MLP adds to a layer.
pub(crate) fn mlp_dims(mlp: &MlpArch) -> Vec<(&'static str, Extent)> {
    match mlp {
        MlpArch::Dense(mlp) => vec![("f", Extent::Fixed(mlp.inner))],
        MlpArch::Moe(mlp) => {
            // Without dropping a token always finds a slot; on average this fraction is in use.
            let filled = mlp.top_k as f64 / mlp.experts as f64;
            let mut dims = vec![
                ("e", Extent::Fixed(mlp.experts)),
                ("c", Extent::Slots { filled, capacity: None }),
                ("f", Extent::Fixed(mlp.inner)),
            ];
            dims.extend(mlp.shared.as_ref().map(|shared| ("u", Extent::Fixed(shared.inner))));
            dims
        }
    }
}

/// From the normed stream `x[b s h]` to what is added to it.
pub(crate) fn mlp(b: &mut LayerBuilder, arch: &MlpArch, x: TensorId) -> TensorId {
    match arch {
        MlpArch::Dense(arch) => dense(b, arch, x),
        MlpArch::Moe(arch) => moe(b, arch, x),
    }
}

fn dense(b: &mut LayerBuilder, arch: &DenseMlp, x: TensorId) -> TensorId {
    let project = |b: &mut LayerBuilder, name: &str, x: TensorId| {
        let y = linear(b, name, x, ["h f", INNER]);
        if arch.bias { bias(b, name, y, ["f", INNER]) } else { y }
    };
    let inner = match &arch.form {
        MlpForm::Gated(gating) => {
            let gate = project(b, "mlp.gate", x);
            let up = project(b, "mlp.up", x);
            b.op("mlp.glu", OpKind::Glu { gating: *gating }, &[gate, up], INNER)
        }
        MlpForm::Plain(act) => {
            let up = project(b, "mlp.up", x);
            b.op("mlp.act", OpKind::Act { act: *act }, &[up], INNER)
        }
    };
    let down = linear(b, "mlp.down", inner, ["f h", STREAM]);
    if arch.bias { bias(b, "mlp.down", down, ["h", STREAM]) } else { down }
}

fn moe(b: &mut LayerBuilder, arch: &MoeMlp, x: TensorId) -> TensorId {
    let weight = route(b, arch, x);
    let tokens = b.op("mlp.dispatch", OpKind::Dispatch, &[x, weight], EXPERT_IN);
    let outputs = experts(b, arch, tokens);
    let routed = b.op("mlp.combine", OpKind::Combine, &[outputs, weight], STREAM);
    let Some(shared_arch) = &arch.shared else { return routed };
    let shared = shared(b, arch, shared_arch, x);
    b.op("mlp.expert_add", OpKind::Add, &[routed, shared], STREAM)
}

/// Weight of every expert for every token.
fn route(b: &mut LayerBuilder, arch: &MoeMlp, x: TensorId) -> TensorId {
    let mut logits = linear(b, "mlp.router", x, ["h e", SCORES]);
    if arch.bias {
        logits = bias(b, "mlp.router", logits, ["e", SCORES]);
    }
    let mut operands = vec![logits];
    let router = &arch.router;
    if router.correction {
        operands.push(b.tensor("mlp.router_correction", "e", Role::Data(Data::RouterBias)));
    }
    let kind = OpKind::Route {
        top_k: arch.top_k,
        score: router.score,
        normalize: router.normalize,
        scale: router.scale,
        groups: router.groups,
        top_groups: router.top_groups,
        group_score: router.group_score,
    };
    b.op("mlp.route", kind, &operands, SCORES)
}

fn experts(b: &mut LayerBuilder, arch: &MoeMlp, tokens: TensorId) -> TensorId {
    let project = |b: &mut LayerBuilder, name: &str| {
        let y = linear(b, name, tokens, ["e h f", EXPERT_INNER]);
        if arch.bias { bias(b, name, y, ["e f", EXPERT_INNER]) } else { y }
    };
    let gate = project(b, "mlp.gate");
    let up = project(b, "mlp.up");
    let inner = b.op("mlp.glu", OpKind::Glu { gating: arch.gating }, &[gate, up], EXPERT_INNER);
    let down = linear(b, "mlp.down", inner, ["e f h", EXPERT_IN]);
    if arch.bias { bias(b, "mlp.down", down, ["e h", EXPERT_IN]) } else { down }
}

fn shared(b: &mut LayerBuilder, arch: &MoeMlp, shared: &SharedExpert, x: TensorId) -> TensorId {
    let gate = linear(b, "mlp.shared_gate", x, ["h u", "b s u"]);
    let up = linear(b, "mlp.shared_up", x, ["h u", "b s u"]);
    let inner = b.op("mlp.shared_glu", OpKind::Glu { gating: arch.gating }, &[gate, up], "b s u");
    let out = linear(b, "mlp.shared_down", inner, ["u h", STREAM]);
    if !shared.gated {
        return out;
    }
    let score = linear(b, "mlp.shared_score", x, ["h", "b s"]);
    b.op("mlp.shared_scaled", OpKind::Gate, &[out, score], STREAM)
}
