//! Small models in text form, and executions of them.
//!
//! An operator is a line of tensors: `x[b s h] *w[h f] -> y[b s f]`. A mark before a tensor's first mention says what
//! it is: `*` a parameter (normal), `+` one around one, `~` one around zero, `@` data by its name.

use std::collections::BTreeSet;

use ir::graph::{
    Data, Dim, DimId, Extent, Init, Layer, Model, Op, ParameterRef, Role, Segment, Tensor, TensorId, Tie,
};
use ir::lower::{LayerChoice, Recompute};
use ir::mesh::{Mesh, Meshes};
use ir::op::{
    Activation, AttentionBias, AttentionMask, Gating, GroupScore, Normalize, OpKind, RotarySide, RouterScore,
};
use ir::program::{Home, Storage};
use ir::schedule::{Schedule, table};
use ir::sharding::Sharding;
use ir::slices::Slices;
use ir::strategy::Strategy;

use crate::element::Edges;
use crate::job::{AdamW, Chunk, Execution, TokenLayout, Training};

pub(super) const MICRO_BATCH: u64 = 8;
pub(super) const SEQUENCE: u64 = 8;
/// No power of two divides it: blocks of the vocabulary are unequal.
pub(super) const VOCABULARY: u64 = 19;

struct Builder {
    layer: Layer,
}

impl Builder {
    fn dim(&mut self, name: &str) -> DimId {
        if let Some(at) = self.layer.dims.iter().position(|dim| dim.name == name) {
            return DimId(at);
        }
        let extent = match name {
            "b" => Extent::MicroBatch,
            "s" | "t" => Extent::Sequence,
            "v" => Extent::Uneven(VOCABULARY),
            "c" => Extent::Slots { filled: 0.5, capacity: None },
            "p" => Extent::Fixed(SEQUENCE + 2),
            "h" | "h2" | "f" => Extent::Fixed(8),
            "g" => Extent::Fixed(16),
            "m" => Extent::Fixed(6),
            "e" | "d" => Extent::Fixed(4),
            "k" | "r" => Extent::Fixed(2),
            other => panic!("no dim {other}"),
        };
        self.layer.dims.push(Dim { name: name.into(), extent });
        DimId(self.layer.dims.len() - 1)
    }

    fn tensor(&mut self, text: &str) -> TensorId {
        let (head, dims) = text.trim_end_matches(']').split_once('[').unwrap();
        let name = head.trim_start_matches(['*', '+', '~', '@']);
        if let Some(at) = self.layer.tensors.iter().position(|tensor| tensor.name == name) {
            return TensorId(at);
        }
        let role = match head.chars().next() {
            Some('*') => Role::Parameter(Init::Normal),
            Some('+') => Role::Parameter(Init::One),
            Some('~') => Role::Parameter(Init::Zero),
            Some('@') => Role::Data(match name {
                "tokens" | "codes" => Data::Tokens,
                "pixels" => Data::Features,
                "labels" => Data::Labels,
                "positions" | "keys" | "places" => Data::Positions,
                "slopes" => Data::AlibiSlopes,
                "router" => Data::RouterBias,
                other => panic!("no data {other}"),
            }),
            _ => Role::Activation,
        };
        let dims = dims.split(' ').filter(|dim| !dim.is_empty()).map(|dim| self.dim(dim)).collect();
        self.layer.tensors.push(Tensor { name: name.into(), dims, role });
        TensorId(self.layer.tensors.len() - 1)
    }

    fn side(&mut self, text: &str) -> Vec<TensorId> {
        text.split_inclusive(']').map(str::trim).filter(|t| !t.is_empty()).map(|t| self.tensor(t)).collect()
    }
}

/// A layer; its streams are the tensors `w` and `x`, where it has them, and what nothing reads leaves it.
pub(super) fn layer(name: &str, lines: &[(OpKind, &str)]) -> Layer {
    let empty = Layer {
        name: name.into(),
        dims: Vec::new(),
        tensors: Vec::new(),
        ops: Vec::new(),
        stream_in: Vec::new(),
        out: Vec::new(),
    };
    let mut builder = Builder { layer: empty };
    for (i, (kind, text)) in lines.iter().enumerate() {
        let (operands, results) = text.split_once("->").unwrap();
        let (operands, results) = (builder.side(operands), builder.side(results));
        builder.layer.ops.push(Op {
            name: format!("{} {i}", kind.line().name),
            kind: kind.clone(),
            operands,
            results,
        });
    }
    let mut layer = builder.layer;
    let find = |name: &str| layer.tensors.iter().position(|tensor| tensor.name == name).map(TensorId);
    let is_given = |tensor: &TensorId| {
        layer.tensors[tensor.0].role == Role::Activation && layer.producer(*tensor).is_none()
    };
    layer.stream_in = ["w", "x"].into_iter().filter_map(find).filter(is_given).collect();
    let is_read = |tensor: &TensorId| layer.ops.iter().any(|op| op.operands.contains(tensor));
    layer.out =
        layer.ops.iter().flat_map(|op| op.results.clone()).filter(|tensor| !is_read(tensor)).collect();
    layer
}

pub(super) fn embedding() -> Layer {
    layer("embedding", &[(OpKind::Embed, "@tokens[b s] *table[v h] -> y[b s h]")])
}

pub(super) fn embedding_with_positions() -> Layer {
    layer(
        "embedding",
        &[
            (OpKind::Embed, "@tokens[b s] *table[v h] -> y[b s h]"),
            (OpKind::AddPosition { offset: 2 }, "y[b s h] @positions[s] *places[p h] -> z[b s h]"),
        ],
    )
}

pub(super) fn mlp() -> Layer {
    layer(
        "mlp",
        &[
            (OpKind::Fork, "x[b s h] -> x1[b s h] x2[b s h]"),
            (OpKind::RmsNorm { eps: 1e-5, shift: 0.0 }, "x1[b s h] +norm[h] -> n[b s h]"),
            (OpKind::Linear, "n[b s h] *up[h g] -> u[b s g]"),
            (OpKind::Act { act: Activation::Gelu }, "u[b s g] -> a[b s g]"),
            (OpKind::Linear, "a[b s g] *down[g h] -> d[b s h]"),
            (OpKind::Add, "d[b s h] x2[b s h] -> out[b s h]"),
        ],
    )
}

/// Attends to what another branch has left, `w1` and `w2` of its copies; a third is left for the next layer.
fn joined(name: &str, copies: &str) -> Layer {
    layer(
        name,
        &[
            (OpKind::Fork, copies),
            (OpKind::Fork, "x[b s h] -> x1[b s h] x2[b s h]"),
            (OpKind::RmsNorm { eps: 1e-5, shift: 0.0 }, "x1[b s h] +norm[h] -> n[b s h]"),
            (OpKind::Linear, "n[b s h] *wq[h k r d] -> q[b s k r d]"),
            (OpKind::Linear, "w1[b s h] *wk[h k d] -> kk[b s k d]"),
            (OpKind::Linear, "w2[b s h] *wv[h k d] -> vv[b s k d]"),
            (
                attention_kind(AttentionBias::None),
                "q[b s k r d] kk[b s k d] vv[b s k d] @positions[s] @keys[s] -> o[b s k r d]",
            ),
            (OpKind::Linear, "o[b s k r d] *wo[k r d h] -> oo[b s h]"),
            (OpKind::Add, "oo[b s h] x2[b s h] -> out[b s h]"),
        ],
    )
}

/// Two branches over the same tokens: one waits while the other is worked on, then layers read both.
pub(super) fn branched() -> Model {
    let named = |name: &str, layer: Layer| Layer { name: name.into(), ..layer };
    let segment = |layer, count| Segment { layer, count };
    let model = Model {
        name: "branched".into(),
        default_sequence: SEQUENCE,
        layers: vec![
            named("left", embedding()),
            mlp(),
            named("right", embedding_with_positions()),
            joined("joined", "w[b s h] -> w1[b s h] w2[b s h] w3[b s h]"),
            joined("last", "w[b s h] -> w1[b s h] w2[b s h]"),
            head(),
        ],
        sequence: [(0, 1), (1, 2), (2, 1), (1, 1), (3, 2), (4, 1), (5, 1)]
            .map(|(layer, count)| segment(layer, count))
            .to_vec(),
        ties: Vec::new(),
    };
    assert_eq!(ir::graph::check(&model), Ok(()));
    model
}

pub(super) fn attention_kind(bias: AttentionBias) -> OpKind {
    OpKind::Attention { scale: None, window: Some(5), softcap: Some(20.0), bias, mask: AttentionMask::Causal }
}

/// Bias, window, cap and mask of an attention.
pub(super) type Attending = (AttentionBias, Option<u64>, Option<f64>, AttentionMask);

/// Attention as models vary it.
pub(super) const ATTENTIONS: [Attending; 7] = [
    (AttentionBias::None, None, None, AttentionMask::Causal),
    (AttentionBias::None, Some(3), None, AttentionMask::Causal),
    (AttentionBias::None, Some(5), Some(2.0), AttentionMask::Causal),
    (AttentionBias::Slopes, None, None, AttentionMask::Causal),
    (AttentionBias::Sinks, Some(6), None, AttentionMask::Causal),
    (AttentionBias::None, None, None, AttentionMask::Full),
    (AttentionBias::Sinks, None, Some(2.0), AttentionMask::Full),
];

/// Attention alone: grouped queries, and values of another length than keys, as latent attention has them.
pub(super) fn attending((bias, window, softcap, mask): Attending) -> Layer {
    let extra = match bias {
        AttentionBias::None => "",
        AttentionBias::Slopes => "@slopes[k r]",
        AttentionBias::Sinks => "*sinks[k r]",
    };
    let positions = if mask.is_causal() { "@positions[s] @keys[s]" } else { "" };
    let attention = format!("q[b s k r d] kk[b s k d] vv[b s k f] {positions} {extra} -> o[b s k r f]");
    layer(
        "attending",
        &[
            (OpKind::Fork, "x[b s h] -> x1[b s h] x2[b s h]"),
            (OpKind::RmsNorm { eps: 1e-5, shift: 0.0 }, "x1[b s h] +norm[h] -> n[b s h]"),
            (OpKind::Fork, "n[b s h] -> n1[b s h] n2[b s h] n3[b s h]"),
            (OpKind::Linear, "n1[b s h] *wq[h k r d] -> q[b s k r d]"),
            (OpKind::Linear, "n2[b s h] *wk[h k d] -> kk[b s k d]"),
            (OpKind::Linear, "n3[b s h] *wv[h k f] -> vv[b s k f]"),
            (OpKind::Attention { scale: Some(1.5), window, softcap, bias, mask }, &attention),
            (OpKind::Linear, "o[b s k r f] *wo[k r f h] -> oo[b s h]"),
            (OpKind::Add, "oo[b s h] x2[b s h] -> out[b s h]"),
        ],
    )
}

/// Queries of the stream over keys of six places, which the layer makes of numbers and tokens of the batch and whose
/// own attention has no mask.
pub(super) fn crossing() -> Layer {
    let full = |bias| OpKind::Attention {
        scale: None,
        window: None,
        softcap: None,
        bias,
        mask: AttentionMask::Full,
    };
    layer(
        "crossing",
        &[
            (OpKind::Linear, "@pixels[b m g] *patch[g h] -> e0[b m h]"),
            (OpKind::AddPosition { offset: 2 }, "e0[b m h] @places[m] *rows[p h] -> e1[b m h]"),
            (OpKind::Embed, "@codes[b m] *book[v h] -> e2[b m h]"),
            (OpKind::Add, "e1[b m h] e2[b m h] -> e3[b m h]"),
            (OpKind::Fork, "e3[b m h] -> e4[b m h] e5[b m h] e6[b m h] e7[b m h]"),
            (OpKind::Linear, "e4[b m h] *eq[h k r d] -> oq[b m k r d]"),
            (OpKind::Linear, "e5[b m h] *ek[h k d] -> ok[b m k d]"),
            (OpKind::Linear, "e6[b m h] *ev[h k d] -> ov[b m k d]"),
            (full(AttentionBias::None), "oq[b m k r d] ok[b m k d] ov[b m k d] -> oo[b m k r d]"),
            (OpKind::Linear, "oo[b m k r d] *eo[k r d h] -> e8[b m h]"),
            (OpKind::Add, "e8[b m h] e7[b m h] -> e9[b m h]"),
            (OpKind::RmsNorm { eps: 1e-5, shift: 0.0 }, "e9[b m h] +enorm[h] -> e[b m h]"),
            (OpKind::Fork, "e[b m h] -> ea[b m h] eb[b m h]"),
            (OpKind::Linear, "ea[b m h] *wk[h k d] -> kk[b m k d]"),
            (OpKind::Linear, "eb[b m h] *wv[h k f] -> vv[b m k f]"),
            (OpKind::Fork, "x[b s h] -> x1[b s h] x2[b s h]"),
            (OpKind::RmsNorm { eps: 1e-5, shift: 0.0 }, "x1[b s h] +norm[h] -> n[b s h]"),
            (OpKind::Linear, "n[b s h] *wq[h k r d] -> q[b s k r d]"),
            (full(AttentionBias::Sinks), "q[b s k r d] kk[b m k d] vv[b m k f] *sinks[k r] -> o[b s k r f]"),
            (OpKind::Linear, "o[b s k r f] *wo[k r f h] -> out0[b s h]"),
            (OpKind::Add, "out0[b s h] x2[b s h] -> out[b s h]"),
        ],
    )
}

/// Reads what an encoder has left beside the stream; it leaves that for the next layer too where it forks it into
/// three.
fn attending_memory(name: &str, fork: &str) -> Layer {
    let bias = AttentionBias::None;
    let full =
        OpKind::Attention { scale: None, window: None, softcap: None, bias, mask: AttentionMask::Full };
    layer(
        name,
        &[
            (OpKind::Fork, fork),
            (OpKind::Fork, "x[b s h] -> x1[b s h] x2[b s h]"),
            (OpKind::RmsNorm { eps: 1e-5, shift: 0.0 }, "x1[b s h] +norm[h] -> n[b s h]"),
            (OpKind::Linear, "n[b s h] *wq[h k r d] -> q[b s k r d]"),
            (OpKind::Linear, "w1[b m h] *wk[h k d] -> kk[b m k d]"),
            (OpKind::Linear, "w2[b m h] *wv[h k d] -> vv[b m k d]"),
            (full, "q[b s k r d] kk[b m k d] vv[b m k d] -> o[b s k r d]"),
            (OpKind::Linear, "o[b s k r d] *wo[k r d h] -> oo[b s h]"),
            (OpKind::Add, "oo[b s h] x2[b s h] -> out[b s h]"),
        ],
    )
}

/// A tower over numbers of six places, which waits below a decoder; some layers of the decoder attend to it, others
/// pass it by.
pub(super) fn tower_and_decoder() -> Model {
    let bias = AttentionBias::None;
    let full =
        OpKind::Attention { scale: None, window: None, softcap: None, bias, mask: AttentionMask::Full };
    let patches = layer("patches", &[(OpKind::Linear, "@pixels[b m g] *patch[g h] -> e[b m h]")]);
    let tower = layer(
        "tower",
        &[
            (OpKind::Fork, "x[b m h] -> x1[b m h] x2[b m h]"),
            (OpKind::RmsNorm { eps: 1e-5, shift: 0.0 }, "x1[b m h] +norm[h] -> n[b m h]"),
            (OpKind::Fork, "n[b m h] -> n1[b m h] n2[b m h] n3[b m h]"),
            (OpKind::Linear, "n1[b m h] *wq[h k r d] -> q[b m k r d]"),
            (OpKind::Linear, "n2[b m h] *wk[h k d] -> kk[b m k d]"),
            (OpKind::Linear, "n3[b m h] *wv[h k d] -> vv[b m k d]"),
            (full, "q[b m k r d] kk[b m k d] vv[b m k d] -> o[b m k r d]"),
            (OpKind::Linear, "o[b m k r d] *wo[k r d h] -> oo[b m h]"),
            (OpKind::Add, "oo[b m h] x2[b m h] -> out[b m h]"),
        ],
    );
    let cross = attending_memory("cross", "w[b m h] -> w1[b m h] w2[b m h] w3[b m h]");
    let last = attending_memory("last", "w[b m h] -> w1[b m h] w2[b m h]");
    let segment = |(layer, count)| Segment { layer, count };
    let model = Model {
        name: "tower".into(),
        default_sequence: SEQUENCE,
        layers: vec![patches, tower, embedding(), decoder(), cross, last, head()],
        sequence: [(0, 1), (1, 2), (2, 1), (3, 1), (4, 2), (3, 1), (5, 1), (6, 1)].map(segment).to_vec(),
        ties: Vec::new(),
    };
    assert_eq!(ir::graph::check(&model), Ok(()));
    model
}

/// Grouped queries, rotary positions, a gated feed-forward.
pub(super) fn decoder() -> Layer {
    let rope = || OpKind::Rope { theta: 100.0, dims: 4, side: RotarySide::First };
    layer(
        "decoder",
        &[
            (OpKind::Fork, "x[b s h] -> x1[b s h] x2[b s h]"),
            (OpKind::RmsNorm { eps: 1e-5, shift: 1.0 }, "x1[b s h] ~norm[h] -> n[b s h]"),
            (OpKind::Fork, "n[b s h] -> n1[b s h] n2[b s h] n3[b s h]"),
            (OpKind::Linear, "n1[b s h] *wq[h k r d] -> q[b s k r d]"),
            (OpKind::Linear, "n2[b s h] *wk[h k d] -> kk[b s k d]"),
            (OpKind::Linear, "n3[b s h] *wv[h k d] -> vv[b s k d]"),
            (rope(), "q[b s k r d] @positions[s] -> qr[b s k r d]"),
            (rope(), "kk[b s k d] @positions[s] -> kr[b s k d]"),
            (
                attention_kind(AttentionBias::None),
                "qr[b s k r d] kr[b s k d] vv[b s k d] @positions[s] @keys[s] -> o[b s k r d]",
            ),
            (OpKind::Linear, "o[b s k r d] *wo[k r d h] -> oo[b s h]"),
            (OpKind::Add, "oo[b s h] x2[b s h] -> m[b s h]"),
            (OpKind::Fork, "m[b s h] -> m1[b s h] m2[b s h]"),
            (OpKind::LayerNorm { eps: 1e-5 }, "m1[b s h] +norm2[h] ~shift2[h] -> l[b s h]"),
            (OpKind::Fork, "l[b s h] -> l1[b s h] l2[b s h]"),
            (OpKind::Linear, "l1[b s h] *gate[h g] -> ga[b s g]"),
            (OpKind::Linear, "l2[b s h] *up[h g] -> up1[b s g]"),
            (OpKind::Bias, "up1[b s g] ~bias[g] -> up2[b s g]"),
            (
                OpKind::Glu { gating: Gating::Product { act: Activation::Silu } },
                "ga[b s g] up2[b s g] -> gl[b s g]",
            ),
            (OpKind::Linear, "gl[b s g] *down[g h] -> d1[b s h]"),
            (OpKind::Scale { by: 0.7 }, "d1[b s h] -> d2[b s h]"),
            (OpKind::Add, "d2[b s h] m2[b s h] -> out[b s h]"),
        ],
    )
}

/// Attention with sinks or slopes, then routed experts beside a gated shared one.
pub(super) fn experts(bias: AttentionBias) -> Layer {
    let extra = match bias {
        AttentionBias::None => "",
        AttentionBias::Slopes => "@slopes[k r]",
        AttentionBias::Sinks => "*sinks[k r]",
    };
    let attention =
        format!("q[b s k r d] kk[b s k d] vv[b s k d] @positions[s] @keys[s] {extra} -> o[b s k r d]");
    let route = OpKind::Route {
        top_k: 2,
        score: RouterScore::Sigmoid,
        normalize: Normalize::Sum,
        scale: 1.5,
        groups: 2,
        top_groups: 1,
        group_score: GroupScore::TopTwo,
    };
    layer(
        "experts",
        &[
            (OpKind::Fork, "x[b s h] -> x1[b s h] x2[b s h]"),
            (OpKind::RmsNorm { eps: 1e-5, shift: 0.0 }, "x1[b s h] +norm[h] -> n[b s h]"),
            (OpKind::Fork, "n[b s h] -> n1[b s h] n2[b s h]"),
            (OpKind::Linear, "n1[b s h] *wq[h k r d] -> q[b s k r d]"),
            (OpKind::Linear, "n2[b s h] *wkv[h k f] -> kv[b s k f]"),
            (OpKind::Split { sizes: vec![4, 4] }, "kv[b s k f] -> kk[b s k d] vv[b s k d]"),
            (attention_kind(bias), &attention),
            (OpKind::Linear, "o[b s k r d] *wo[k r d h] -> oo[b s h]"),
            (OpKind::Add, "oo[b s h] x2[b s h] -> m[b s h]"),
            (OpKind::Fork, "m[b s h] -> m1[b s h] m2[b s h]"),
            (OpKind::RmsNorm { eps: 1e-5, shift: 0.0 }, "m1[b s h] +norm2[h] -> l[b s h]"),
            (OpKind::Fork, "l[b s h] -> l1[b s h] l2[b s h] l3[b s h] l4[b s h]"),
            (OpKind::Linear, "l1[b s h] *router_weight[h e] -> score[b s e]"),
            (route, "score[b s e] @router[e] -> weight[b s e]"),
            (OpKind::Fork, "weight[b s e] -> w1[b s e] w2[b s e]"),
            (OpKind::Dispatch, "l2[b s h] w1[b s e] -> in[b e c h]"),
            (OpKind::Linear, "in[b e c h] *up[e h g] -> u[b e c g]"),
            (OpKind::Act { act: Activation::Silu }, "u[b e c g] -> a[b e c g]"),
            (OpKind::Linear, "a[b e c g] *down[e g h] -> d[b e c h]"),
            (OpKind::Combine, "d[b e c h] w2[b s e] -> routed[b s h]"),
            (OpKind::Linear, "l3[b s h] *shared[h h2] -> sh[b s h2]"),
            (OpKind::Linear, "l4[b s h] *gate[h] -> z[b s]"),
            (OpKind::Gate, "sh[b s h2] z[b s] -> gated[b s h2]"),
            (OpKind::Linear, "gated[b s h2] *back[h2 h] -> own[b s h]"),
            (OpKind::Add, "routed[b s h] own[b s h] -> both[b s h]"),
            (OpKind::Add, "both[b s h] m2[b s h] -> out[b s h]"),
        ],
    )
}

/// The same experts with slots for three quarters of what they expect.
pub(super) fn limited_experts() -> Layer {
    let mut layer = experts(AttentionBias::None);
    let find = |layer: &Layer, name: &str| layer.tensors.iter().position(|t| t.name == name).map(TensorId);
    let positions = find(&layer, "positions").unwrap();
    for dim in &mut layer.dims {
        if let Extent::Slots { capacity, .. } = &mut dim.extent {
            *capacity = Some(0.75);
        }
    }
    for op in &mut layer.ops {
        if matches!(op.kind, OpKind::Dispatch | OpKind::Combine) {
            op.operands.push(positions);
        }
    }
    layer
}

pub(super) fn head() -> Layer {
    layer(
        "head",
        &[
            (OpKind::RmsNorm { eps: 1e-5, shift: 0.0 }, "x[b s h] +norm[h] -> n[b s h]"),
            (OpKind::Linear, "n[b s h] *table[v h] -> z[b s v]"),
            (OpKind::Softcap { cap: 5.0 }, "z[b s v] -> y[b s v]"),
            (OpKind::Fork, "y[b s v] -> y1[b s v] y2[b s v] y3[b s v]"),
            (OpKind::RowMax, "y1[b s v] -> m[b s]"),
            (OpKind::Fork, "m[b s] -> m1[b s] m2[b s]"),
            (OpKind::SumExp, "y2[b s v] m1[b s] -> e[b s]"),
            (OpKind::Pick, "y3[b s v] @labels[b s] -> t[b s]"),
            (OpKind::CrossEntropy, "e[b s] m2[b s] t[b s] -> l[b s]"),
            (OpKind::SumLoss, "l[b s] labels[b s] -> loss[]"),
        ],
    )
}

/// Embedding, `count` times the body, head.
pub(super) fn model(body: Layer, count: u64) -> Model {
    let segment = |layer, count| Segment { layer, count };
    let model = Model {
        name: "toy".into(),
        default_sequence: SEQUENCE,
        layers: vec![embedding(), body, head()],
        sequence: vec![segment(0, 1), segment(1, count), segment(2, 1)],
        ties: Vec::new(),
    };
    assert_eq!(ir::graph::check(&model), Ok(()));
    model
}

/// The same with the head's table tied to the embedding's.
pub(super) fn tied(mut model: Model) -> Model {
    let find = |layer: usize| {
        let tensor = model.layers[layer].tensors.iter().position(|tensor| tensor.name == "table").unwrap();
        ParameterRef { layer, tensor: TensorId(tensor) }
    };
    model.ties = vec![Tie { owner: find(0), copy: find(2) }];
    assert_eq!(ir::graph::check(&model), Ok(()));
    model
}

/// A choice with everything whole, to be changed.
pub(super) fn plain(layer: &Layer) -> LayerChoice {
    LayerChoice {
        stream: Sharding::REPLICATED,
        out: Sharding::REPLICATED,
        strategies: vec![Strategy::SAME; layer.ops.len()],
        recompute: vec![Recompute::Keep; layer.ops.len()],
        kept: Home::Device,
        parameters: Home::Device,
        storage: layer.parameters().map(|tensor| (tensor, Storage::default())).collect(),
        shared: BTreeSet::new(),
    }
}

/// Steps so small that their own rounding is the larger.
pub(super) const GENTLE: AdamW = AdamW { lr: 1e-3, eps: 1e-1, ..ADAMW };

pub(super) const ADAMW: AdamW = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-3, weight_decay: 0.1 };

/// One choice per kind, layers spread evenly over the schedule's chunks.
pub(super) fn execution<'a>(
    model: &'a Model,
    mesh: &'a Mesh,
    choices: Vec<LayerChoice>,
    pipeline: (Schedule, u32, u32),
) -> Execution<'a> {
    let (schedule, n_stages, n_micro_batches) = pipeline;
    let kinds = model.kinds_in_order();
    let n_chunks = schedule.placement().n_chunks(n_stages) as usize;
    let cut = |chunk: usize| chunk * kinds.len() / n_chunks;
    Execution {
        model,
        meshes: Meshes::all(mesh),
        n_stages,
        placement: schedule.placement(),
        chunks: (0..n_chunks).map(|c| Chunk { layers: kinds[cut(c)..cut(c + 1)].to_vec() }).collect(),
        choices: choices.into_iter().enumerate().collect(),
        micro_batch: MICRO_BATCH,
        n_micro_batches,
        shares: Vec::new(),
        sequence: SEQUENCE,
        tokens: TokenLayout::NATURAL,
        slices: Slices::whole(SEQUENCE),
        table: table(schedule, n_stages, n_micro_batches).unwrap(),
        seed: 7,
        given: crate::run::Tensors::new(),
        steps: 2,
        optimizer: ADAMW,
        edges: Edges::Exact,
        training: Training::CHECK,
    }
}
