//! Small layers that together use every operator.

use ir::builder::LayerBuilder;
use ir::graph::{Data, Extent, Init, Layer, Role, TensorId};
use ir::op::{
    Activation, AttentionBias, AttentionMask, Gating, GroupScore, Normalize, OpKind, RotarySide, RouterScore,
};

/// Number of layers in [`all`].
pub(crate) const COUNT: usize = 10;

/// Every layer.
pub(crate) fn all() -> [Layer; COUNT] {
    [dense(), experts(), embedding(), head(), opt(), latent(), gemma(), crossing(), joining(), ahead()]
}

fn linear(b: &mut LayerBuilder, name: &str, x: TensorId, weight: &str, result: &str) -> TensorId {
    let w = b.parameter(&format!("w_{name}"), weight, Init::Normal);
    b.op(name, OpKind::Linear, &[x, w], result)
}

fn biased(b: &mut LayerBuilder, name: &str, x: TensorId, dims: [&str; 3]) -> TensorId {
    let y = linear(b, name, x, dims[0], dims[1]);
    let c = b.parameter(&format!("c_{name}"), dims[2], Init::Zero);
    b.op(&format!("{name}_bias"), OpKind::Bias, &[y, c], dims[1])
}

fn rms_norm(b: &mut LayerBuilder, name: &str, x: TensorId) -> TensorId {
    let g = b.parameter(&format!("g_{name}"), "h", Init::One);
    b.op(name, OpKind::RmsNorm { eps: 1e-5, shift: 0.0 }, &[x, g], "b s h")
}

fn start(name: &str) -> LayerBuilder {
    let mut b = LayerBuilder::new(name);
    for (dim, length) in [("h", 16), ("k", 4), ("r", 2), ("d", 8), ("f", 32), ("e", 8)] {
        b.fixed(dim, length);
    }
    b
}

fn rope(dims: u64) -> OpKind {
    OpKind::Rope { theta: 1e4, dims, side: RotarySide::First }
}

fn core(bias: AttentionBias) -> OpKind {
    OpKind::Attention { scale: None, window: None, softcap: None, bias, mask: AttentionMask::Causal }
}

fn positions(b: &mut LayerBuilder) -> TensorId {
    b.tensor("positions", "s", Role::Data(Data::Positions))
}

/// Query, key and value of grouped heads with rotary positions, core and output.
fn attention(b: &mut LayerBuilder, x: TensorId) -> TensorId {
    let at = positions(b);
    let q = linear(b, "q", x, "h k r d", "b s k r d");
    let q = b.op("q_rope", rope(8), &[q, at], "b s k r d");
    let k = linear(b, "k", x, "h k d", "b s k d");
    let k = b.op("k_rope", rope(8), &[k, at], "b s k d");
    let v = linear(b, "v", x, "h k d", "b s k d");
    let o = b.op("core", core(AttentionBias::None), &[q, k, v, at, at], "b s k r d");
    linear(b, "o", o, "k r d h", "b s h")
}

fn glu() -> OpKind {
    OpKind::Glu { gating: Gating::Product { act: Activation::Silu } }
}

/// As in Llama.
pub(crate) fn dense() -> Layer {
    let mut b = start("dense");
    let x = b.stream();
    let n = rms_norm(&mut b, "norm1", x);
    let a = attention(&mut b, n);
    let x = b.op("add1", OpKind::Add, &[x, a], "b s h");
    let n = rms_norm(&mut b, "norm2", x);
    let gate = linear(&mut b, "gate", n, "h f", "b s f");
    let up = linear(&mut b, "up", n, "h f", "b s f");
    let act = b.op("glu", glu(), &[gate, up], "b s f");
    let down = linear(&mut b, "down", act, "f h", "b s h");
    let out = b.op("add2", OpKind::Add, &[x, down], "b s h");
    b.finish(out)
}

/// As in Mixtral and DeepSeek: routed experts and a gated shared one.
pub(crate) fn experts() -> Layer {
    let mut b = start("experts");
    b.dim("c", Extent::Slots { filled: 0.25, capacity: None });
    let x = b.stream();
    let n = rms_norm(&mut b, "norm", x);
    let logits = linear(&mut b, "router", n, "h e", "b s e");
    let correction = b.tensor("correction", "e", Role::Data(Data::RouterBias));
    let route = OpKind::Route {
        top_k: 2,
        score: RouterScore::Sigmoid,
        normalize: Normalize::Sum,
        scale: 2.5,
        groups: 2,
        top_groups: 1,
        group_score: GroupScore::TopTwo,
    };
    let weight = b.op("route", route, &[logits, correction], "b s e");
    let slots = b.op("dispatch", OpKind::Dispatch, &[n, weight], "b e c h");
    let gate = linear(&mut b, "gate", slots, "e h f", "b e c f");
    let up = linear(&mut b, "up", slots, "e h f", "b e c f");
    let act = b.op("glu", glu(), &[gate, up], "b e c f");
    let down = linear(&mut b, "down", act, "e f h", "b e c h");
    let routed = b.op("combine", OpKind::Combine, &[down, weight], "b s h");
    let shared = linear(&mut b, "shared_up", n, "h f", "b s f");
    let shared = b.op("act", OpKind::Act { act: Activation::Silu }, &[shared], "b s f");
    let shared = linear(&mut b, "shared_down", shared, "f h", "b s h");
    let z = linear(&mut b, "shared_gate", n, "h", "b s");
    let shared = b.op("gated", OpKind::Gate, &[shared, z], "b s h");
    let m = b.op("add_shared", OpKind::Add, &[routed, shared], "b s h");
    let out = b.op("add", OpKind::Add, &[x, m], "b s h");
    b.finish(out)
}

/// Tokens and learned positions.
pub(crate) fn embedding() -> Layer {
    let mut b = start("embedding");
    b.dim("v", Extent::Uneven(101));
    b.fixed("p", 64);
    let ids = b.tensor("ids", "b s", Role::Data(Data::Tokens));
    let table = b.parameter("table", "v h", Init::Normal);
    let x = b.op("embed", OpKind::Embed, &[ids, table], "b s h");
    let at = positions(&mut b);
    let places = b.parameter("places", "p h", Init::Normal);
    let x = b.op("place", OpKind::AddPosition { offset: 2 }, &[x, at, places], "b s h");
    let out = b.op("scaled", OpKind::Scale { by: 4.0 }, &[x], "b s h");
    b.finish(out)
}

/// Norm, scores, loss.
pub(crate) fn head() -> Layer {
    let mut b = start("head");
    b.dim("v", Extent::Uneven(101));
    let x = b.stream();
    let n = rms_norm(&mut b, "norm", x);
    let z = linear(&mut b, "scores", n, "v h", "b s v");
    let z = b.op("capped", OpKind::Softcap { cap: 30.0 }, &[z], "b s v");
    let labels = b.tensor("labels", "b s", Role::Data(Data::Labels));
    let m = b.op("max", OpKind::RowMax, &[z], "b s");
    let e = b.op("sum_exp", OpKind::SumExp, &[z, m], "b s");
    let t = b.op("pick", OpKind::Pick, &[z, labels], "b s");
    let l = b.op("entropy", OpKind::CrossEntropy, &[e, m, t], "b s");
    let out = b.op("loss", OpKind::SumLoss, &[l], "");
    b.finish(out)
}

/// What stands before the decoder layer of a module that predicts ahead: it leaves the stream and what it joins.
pub(crate) fn joining() -> Layer {
    let mut b = start("joining");
    b.dim("v", Extent::Uneven(101));
    b.fixed("h2", 32);
    let x = b.stream();
    let n = rms_norm(&mut b, "norm", x);
    let ids = b.tensor("ids", "b s", Role::Data(Data::Ahead(1)));
    let table = b.parameter("table", "v h", Init::Normal);
    let e = b.op("embed", OpKind::Embed, &[ids, table], "b s h");
    let joined = b.op("joined", OpKind::Concat { sizes: vec![16, 16] }, &[e, n], "b s h2");
    let y = linear(&mut b, "project", joined, "h2 h", "b s h");
    b.finish_with(&[n, y])
}

/// Scores of two streams by one matrix, and the sum of their losses.
pub(crate) fn ahead() -> Layer {
    let mut b = start("ahead");
    b.dim("v", Extent::Uneven(101));
    b.fixed("a", 2);
    let [main, x] = ["main", "x"].map(|name| b.stream_named(name, "b s h"));
    let n = rms_norm(&mut b, "norm", x);
    let both = b.op("both", OpKind::Concat { sizes: vec![1, 1] }, &[main, n], "b s a h");
    let z = linear(&mut b, "scores", both, "v h", "b s a v");
    let labels = b.tensor("labels", "b s a", Role::Data(Data::Labels));
    let m = b.op("max", OpKind::RowMax, &[z], "b s a");
    let e = b.op("sum_exp", OpKind::SumExp, &[z, m], "b s a");
    let t = b.op("pick", OpKind::Pick, &[z, labels], "b s a");
    let l = b.op("entropy", OpKind::CrossEntropy, &[e, m, t], "b s a");
    let l = b.op("weighed", OpKind::Weigh { by: vec![1.0, 0.1] }, &[l], "b s a");
    let out = b.op("loss", OpKind::SumLoss, &[l, labels], "");
    b.finish(out)
}

/// As in BLOOM and OPT: layer norms, biases, slopes, no gate.
pub(crate) fn opt() -> Layer {
    let mut b = start("opt");
    b.fixed("r1", 1);
    let x = b.stream();
    let (g, c) = (b.parameter("g", "h", Init::One), b.parameter("c", "h", Init::Zero));
    let n = b.op("norm", OpKind::LayerNorm { eps: 1e-5 }, &[x, g, c], "b s h");
    let at = positions(&mut b);
    let slopes = b.tensor("slopes", "k r1", Role::Data(Data::AlibiSlopes));
    let q = biased(&mut b, "q", n, ["h k r1 d", "b s k r1 d", "k r1 d"]);
    let k = biased(&mut b, "k", n, ["h k d", "b s k d", "k d"]);
    let v = biased(&mut b, "v", n, ["h k d", "b s k d", "k d"]);
    let o = b.op("core", core(AttentionBias::Slopes), &[q, k, v, at, at, slopes], "b s k r1 d");
    let o = biased(&mut b, "o", o, ["k r1 d h", "b s h", "h"]);
    let x = b.op("add1", OpKind::Add, &[x, o], "b s h");
    let m = biased(&mut b, "up", x, ["h f", "b s f", "f"]);
    let m = b.op("relu", OpKind::Act { act: Activation::Relu }, &[m], "b s f");
    let m = biased(&mut b, "down", m, ["f h", "b s h", "h"]);
    let out = b.op("add2", OpKind::Add, &[x, m], "b s h");
    b.finish(out)
}

/// As in DeepSeek-V2: keys and values from a shared latent, and a shared rotary part.
pub(crate) fn latent() -> Layer {
    let mut b = start("latent");
    for (dim, length) in [("one", 1), ("z", 20), ("l", 12), ("p", 8), ("m", 8), ("u", 16), ("n", 4)] {
        b.fixed(dim, length);
    }
    let x = b.stream();
    let at = positions(&mut b);
    let norm = rms_norm(&mut b, "norm", x);
    let q = linear(&mut b, "q", norm, "h k one u", "b s k one u");
    let q =
        b.op("q_rope", OpKind::Rope { theta: 1e4, dims: 8, side: RotarySide::Last }, &[q, at], "b s k one u");
    let both = linear(&mut b, "kv_down", norm, "h z", "b s z");
    let parts = b.op_many(
        "cut",
        OpKind::Split { sizes: vec![12, 8] },
        &[both],
        &[("lat", "b s l"), ("rot", "b s p")],
    );
    let g = b.parameter("g_latent", "l", Init::One);
    let lat = b.op("latent_norm", OpKind::RmsNorm { eps: 1e-6, shift: 0.0 }, &[parts[0], g], "b s l");
    let rot = b.op("k_rope", rope(8), &[parts[1], at], "b s p");
    let k = linear(&mut b, "k_up", lat, "l k m", "b s k m");
    let k = b.op("joined", OpKind::AppendShared, &[k, rot], "b s k u");
    let v = linear(&mut b, "v_up", lat, "l k n", "b s k n");
    let o = b.op("core", core(AttentionBias::None), &[q, k, v, at, at], "b s k one n");
    let o = linear(&mut b, "o", o, "k one n h", "b s h");
    let out = b.op("add", OpKind::Add, &[x, o], "b s h");
    b.finish(out)
}

/// Keys of another length, made of numbers of the batch that see each other without a mask.
pub(crate) fn crossing() -> Layer {
    let mut b = start("crossing");
    [("m", 4), ("c", 12)].into_iter().for_each(|(name, length)| b.fixed(name, length));
    let full = |bias| OpKind::Attention {
        scale: None,
        window: None,
        softcap: None,
        bias,
        mask: AttentionMask::Full,
    };
    let x = b.stream();
    let patches = b.tensor("patches", "b m c", Role::Data(Data::Features));
    let e = linear(&mut b, "patch", patches, "c h", "b m h");
    let (q, k) =
        (linear(&mut b, "eq", e, "h k r d", "b m k r d"), linear(&mut b, "ek", e, "h k d", "b m k d"));
    let v = linear(&mut b, "ev", e, "h k d", "b m k d");
    let o = b.op("seen", full(AttentionBias::None), &[q, k, v], "b m k r d");
    let o = linear(&mut b, "eo", o, "k r d h", "b m h");
    let e = b.op("encoded", OpKind::Add, &[e, o], "b m h");
    let n = rms_norm(&mut b, "norm", x);
    let q = linear(&mut b, "q", n, "h k r d", "b s k r d");
    let (k, v) = (linear(&mut b, "k", e, "h k d", "b m k d"), linear(&mut b, "v", e, "h k d", "b m k d"));
    let sinks = b.parameter("sinks", "k r", Init::Zero);
    let o = b.op("core", full(AttentionBias::Sinks), &[q, k, v, sinks], "b s k r d");
    let o = linear(&mut b, "o", o, "k r d h", "b s h");
    let out = b.op("add", OpKind::Add, &[x, o], "b s h");
    b.finish(out)
}

/// As in Gemma and gpt-oss: norms behind the branches, a scaled residual, sinks.
pub(crate) fn gemma() -> Layer {
    let mut b = start("gemma");
    let x = b.stream();
    let n = rms_norm(&mut b, "norm", x);
    let at = positions(&mut b);
    let sinks = b.parameter("sinks", "k r", Init::Zero);
    let q = linear(&mut b, "q", n, "h k r d", "b s k r d");
    let k = linear(&mut b, "k", n, "h k d", "b s k d");
    let v = linear(&mut b, "v", n, "h k d", "b s k d");
    let o = b.op("core", core(AttentionBias::Sinks), &[q, k, v, at, at, sinks], "b s k r d");
    let o = linear(&mut b, "o", o, "k r d h", "b s h");
    let n = rms_norm(&mut b, "norm_behind", o);
    let half = b.op("half", OpKind::Scale { by: 0.5 }, &[n], "b s h");
    let out = b.op("add", OpKind::Add, &[x, half], "b s h");
    b.finish(out)
}
