//! Attention as operators.
//!
//! Dims: `k` key/value heads, `r` query heads that share one, `d` length of a head. Latent attention has values of
//! length `n`, and besides `i` and `l`, the ranks of the compressed queries and keys, `p` and `m`, the rotated and the
//! other part of a key, and `j = l + p`.

use ir::builder::LayerBuilder;
use ir::graph::{Data, Init, Role, TensorId};
use ir::op::{AttentionBias, AttentionMask, OpKind, RotarySide};

use crate::arch::{AttentionArch, HeadNorm, HeadsAttention, LatentAttention, Positions};
use crate::graph_parts::{bias, linear, rms_norm};

const Q: &str = "b s k r d";
const K: &str = "b s k d";
const STREAM: &str = "b s h";

/// Dims that attention adds to a layer.
pub(crate) fn attention_dims(attention: &AttentionArch) -> Vec<(&'static str, u64)> {
    match attention {
        AttentionArch::Heads(a) => {
            vec![("k", a.kv_heads), ("r", a.heads / a.kv_heads), ("d", a.head_dim)]
        }
        AttentionArch::Latent(a) => {
            let mut dims = vec![
                ("k", a.heads),
                ("r", 1),
                ("d", a.nope_dim + a.rope_dim),
                ("n", a.v_dim),
                ("l", a.kv_rank),
                ("p", a.rope_dim),
                ("m", a.nope_dim),
                ("j", a.kv_rank + a.rope_dim),
            ];
            dims.extend(a.q_rank.map(|rank| ("i", rank)));
            dims
        }
    }
}

/// From the normed stream `x[b s h]` to what is added to it.
pub(crate) fn attention(b: &mut LayerBuilder, arch: &AttentionArch, x: TensorId) -> TensorId {
    let positions = b.tensor("positions", "s", Role::Data(Data::Positions));
    match arch {
        AttentionArch::Heads(arch) => heads(b, arch, x, positions),
        AttentionArch::Latent(arch) => latent(b, arch, x, positions),
    }
}

fn heads(b: &mut LayerBuilder, arch: &HeadsAttention, x: TensorId, positions: TensorId) -> TensorId {
    let mut q = linear(b, "attention.q", x, ["h k r d", Q]);
    let mut k = linear(b, "attention.k", x, ["h k d", K]);
    let mut v = linear(b, "attention.v", x, ["h k d", K]);
    if arch.qkv_bias {
        q = bias(b, "attention.q", q, ["k r d", Q]);
        k = bias(b, "attention.k", k, ["k d", K]);
        v = bias(b, "attention.v", v, ["k d", K]);
    }
    if let Some(norm) = arch.qk_norm {
        q = rms_norm(b, "attention.q_norm", q, norm, ["d", Q]);
        k = rms_norm(b, "attention.k_norm", k, norm, ["d", K]);
    }
    if let Positions::Rotary { theta, dims } = arch.position {
        let kind = OpKind::Rope { theta, dims, side: RotarySide::First };
        q = b.op("attention.q_rope", kind.clone(), &[q, positions], Q);
        k = b.op("attention.k_rope", kind, &[k, positions], K);
    }
    let (score_bias, extra) = score_bias(b, arch);
    let kind = OpKind::Attention {
        scale: arch.scale,
        window: arch.window,
        softcap: arch.softcap,
        bias: score_bias,
        mask: AttentionMask::Causal,
    };
    let mut operands = vec![q, k, v, positions, positions];
    operands.extend(extra);
    let core = b.op("attention.core", kind, &operands, Q);
    let out = linear(b, "attention.out", core, ["k r d h", STREAM]);
    if arch.out_bias { bias(b, "attention.out", out, ["h", STREAM]) } else { out }
}

/// The extra operand of the core: ALiBi slopes or sinks.
fn score_bias(b: &mut LayerBuilder, arch: &HeadsAttention) -> (AttentionBias, Option<TensorId>) {
    if arch.sinks {
        return (AttentionBias::Sinks, Some(b.parameter("attention.sinks", "k r", Init::Zero)));
    }
    match arch.position {
        Positions::Alibi => {
            let slopes = b.tensor("attention.slopes", "k r", Role::Data(Data::AlibiSlopes));
            (AttentionBias::Slopes, Some(slopes))
        }
        Positions::Embedded | Positions::Rotary { .. } => (AttentionBias::None, None),
    }
}

fn latent(b: &mut LayerBuilder, arch: &LatentAttention, x: TensorId, positions: TensorId) -> TensorId {
    let q = latent_queries(b, arch, x);
    let rope = |side| OpKind::Rope { theta: arch.theta, dims: arch.rope_dim, side };
    let q = b.op("attention.q_rope", rope(RotarySide::Last), &[q, positions], Q);
    let mut joint = linear(b, "attention.kv_down", x, ["h j", "b s j"]);
    if arch.bias {
        joint = bias(b, "attention.kv_down", joint, ["j", "b s j"]);
    }
    let parts = [("attention.kv_compressed", "b s l"), ("attention.k_rotated", "b s p")];
    let split = OpKind::Split { sizes: vec![arch.kv_rank, arch.rope_dim] };
    let parts = b.op_many("attention.kv_split", split, &[joint], &parts);
    let normed = rms_norm(b, "attention.kv_norm", parts[0], HeadNorm::plain(arch.eps), ["l", "b s l"]);
    let rotated = b.op("attention.k_rope", rope(RotarySide::First), &[parts[1], positions], "b s p");
    let k = linear(b, "attention.k", normed, ["l k m", "b s k m"]);
    let v = linear(b, "attention.v", normed, ["l k n", "b s k n"]);
    let k = b.op("attention.k_append", OpKind::AppendShared, &[k, rotated], K);
    let kind = OpKind::CAUSAL_ATTENTION;
    let core = b.op("attention.core", kind, &[q, k, v, positions, positions], "b s k r n");
    let out = linear(b, "attention.out", core, ["k r n h", STREAM]);
    if arch.bias { bias(b, "attention.out", out, ["h", STREAM]) } else { out }
}

fn latent_queries(b: &mut LayerBuilder, arch: &LatentAttention, x: TensorId) -> TensorId {
    if arch.q_rank.is_none() {
        return linear(b, "attention.q", x, ["h k r d", Q]);
    }
    let mut compressed = linear(b, "attention.q_down", x, ["h i", "b s i"]);
    if arch.bias {
        compressed = bias(b, "attention.q_down", compressed, ["i", "b s i"]);
    }
    let normed = rms_norm(b, "attention.q_norm", compressed, HeadNorm::plain(arch.eps), ["i", "b s i"]);
    linear(b, "attention.q", normed, ["i k r d", Q])
}
