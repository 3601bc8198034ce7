//! What a transformer is made of, in a few words: the common ground of all supported families.
//!
//! A configuration is read into this description (`hf/`), its parameters are counted from it by formula (`count.rs`)
//! and it is spelled out as a graph (`graph_*.rs`). The count and the graph share no code, so each checks the other.

use ir::op::{Activation, Gating, GroupScore, Normalize, RouterScore};

/// A decoder-only transformer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Arch {
    pub(crate) name: String,
    pub(crate) vocab: u64,
    pub(crate) hidden: u64,
    /// Sequence length a job gets without a word of the user.
    pub(crate) sequence: u64,
    pub(crate) embedding: EmbeddingArch,
    /// Kinds of decoder layers.
    pub(crate) kinds: Vec<LayerArch>,
    /// Their order: index of the kind and how often it repeats.
    pub(crate) runs: Vec<(usize, u64)>,
    pub(crate) head: HeadArch,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EmbeddingArch {
    pub(crate) positions: Option<LearnedPositions>,
    pub(crate) norm: Option<Norm>,
    /// Factor on the looked-up rows.
    pub(crate) scale: Option<f64>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LearnedPositions {
    pub(crate) rows: u64,
    /// Rows skipped at the start.
    pub(crate) offset: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HeadArch {
    pub(crate) norm: Norm,
    pub(crate) tying: Tying,
    /// Factor on the logits (Granite).
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
}

/// Whether the output matrix is the embedding table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tying {
    Tied,
    Untied,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Norm {
    Rms { eps: f64, shift: f64 },
    Layer { eps: f64 },
}

/// How a layer joins its attention and its MLP to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Block {
    /// `x += attention(norm(x)); x += mlp(norm(x))`.
    Sequential,
    /// As sequential, with a norm behind each branch too (Gemma 2).
    Sandwich,
    /// `x += attention(norm(x)) + mlp(norm(x))`, one norm for both.
    ParallelOneNorm,
    /// As before, a norm for each.
    ParallelTwoNorms,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LayerArch {
    pub(crate) name: &'static str,
    pub(crate) block: Block,
    /// Factor on what each branch adds to the stream (Granite).
    pub(crate) branch_scale: Option<f64>,
    pub(crate) norm: Norm,
    pub(crate) attention: AttentionArch,
    pub(crate) mlp: MlpArch,
}

impl LayerArch {
    /// A layer that adds its branches to the stream as they are.
    pub(crate) fn new(
        name: &'static str,
        block: Block,
        norm: &Norm,
        (attention, mlp): (AttentionArch, MlpArch),
    ) -> Self {
        Self { name, block, branch_scale: None, norm: norm.clone(), attention, mlp }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AttentionArch {
    Heads(HeadsAttention),
    Latent(LatentAttention),
}

/// Attention of the multi-head, grouped-query or multi-query kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HeadsAttention {
    pub(crate) heads: u64,
    pub(crate) kv_heads: u64,
    pub(crate) head_dim: u64,
    pub(crate) qkv_bias: bool,
    pub(crate) out_bias: bool,
    /// An RMS norm on every query and key head.
    pub(crate) qk_norm: Option<HeadNorm>,
    pub(crate) position: Positions,
    /// Learned logit per head that joins the softmax (gpt-oss).
    pub(crate) sinks: bool,
    pub(crate) window: Option<u64>,
    pub(crate) softcap: Option<f64>,
    /// Factor on the scores where it is not one over the root of the head dim.
    pub(crate) scale: Option<f64>,
}

/// An RMS norm of heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HeadNorm {
    pub(crate) eps: f64,
    /// What is added to its weight (one in Gemma 3).
    pub(crate) shift: f64,
}

impl HeadNorm {
    /// With its weight as it is.
    pub(crate) fn plain(eps: f64) -> Self {
        Self { eps, shift: 0.0 }
    }
}

/// How a layer knows where a token stands.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Positions {
    /// The embedding says so.
    Embedded,
    /// The first `dims` elements of every head are rotated.
    Rotary { theta: f64, dims: u64 },
    /// Linear bias per head.
    Alibi,
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LatentAttention {
    pub(crate) heads: u64,
    /// Rank of the queries' compression; `None` projects directly.
    pub(crate) q_rank: Option<u64>,
    pub(crate) kv_rank: u64,
    pub(crate) nope_dim: u64,
    pub(crate) rope_dim: u64,
    pub(crate) v_dim: u64,
    pub(crate) theta: f64,
    pub(crate) bias: bool,
    /// Epsilon of the norms on the compressed queries and keys.
    pub(crate) eps: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MlpArch {
    Dense(DenseMlp),
    Moe(MoeMlp),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DenseMlp {
    pub(crate) inner: u64,
    pub(crate) form: MlpForm,
    pub(crate) bias: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MlpForm {
    Gated(Gating),
    Plain(Activation),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MoeMlp {
    pub(crate) experts: u64,
    pub(crate) top_k: u64,
    pub(crate) inner: u64,
    pub(crate) gating: Gating,
    /// Biases in the router and in every expert.
    pub(crate) bias: bool,
    pub(crate) router: Router,
    pub(crate) shared: Option<SharedExpert>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Router {
    pub(crate) score: RouterScore,
    pub(crate) normalize: Normalize,
    pub(crate) scale: f64,
    pub(crate) groups: u64,
    pub(crate) top_groups: u64,
    pub(crate) group_score: GroupScore,
    /// Whether a correction bias, adjusted outside the gradient, joins the choice.
    pub(crate) correction: bool,
}

/// An expert that sees every token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SharedExpert {
    pub(crate) inner: u64,
    /// Whether a sigmoid of the token scales it (Qwen2-MoE).
    pub(crate) gated: bool,
}

/// Kinds and runs of `n_layers` layers, of which `layer_idx -> kind` tells the kind.
pub(crate) fn runs_of(
    n_layers: u64,
    kind_of: impl Fn(u64) -> LayerArch,
) -> (Vec<LayerArch>, Vec<(usize, u64)>) {
    let mut kinds: Vec<LayerArch> = Vec::new();
    let mut runs: Vec<(usize, u64)> = Vec::new();
    for layer_idx in 0..n_layers {
        let kind = kind_of(layer_idx);
        let index = kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        });
        match runs.last_mut() {
            Some((last, count)) if *last == index => *count += 1,
            _ => runs.push((index, 1)),
        }
    }
    (kinds, runs)
}
