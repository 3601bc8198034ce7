//! Number of parameters of a transformer, by formula.
//!
//! Written from the tables of the published architectures and not from the graph: the two counts check each other.
//! In 128 bits, so that no configuration overflows before it is refused.

use crate::arch::{
    Arch, AttentionArch, Block, DenseMlp, HeadsAttention, LatentAttention, LayerArch, MlpArch, MlpForm,
    MoeMlp, Norm, Tying,
};

/// Learned elements of the whole model; a tied head counts with the embedding.
///
/// Llama-3-8B: 2 * 128256 * 4096 + 32 * 218,112,000 + 4096 = 8,030,261,248.
pub(crate) fn n_parameters(arch: &Arch) -> u128 {
    let hidden = u128::from(arch.hidden);
    let table = u128::from(arch.vocab) * hidden;
    let positions = arch.embedding.positions.as_ref().map_or(0, |p| u128::from(p.rows) * hidden);
    let embedding_norm = arch.embedding.norm.as_ref().map_or(0, |n| norm(n, hidden));
    let head = match arch.head.tying {
        Tying::Tied => 0,
        Tying::Untied => table,
    };
    let layers: u128 =
        arch.runs.iter().map(|&(kind, count)| u128::from(count) * layer(&arch.kinds[kind], hidden)).sum();
    table + positions + embedding_norm + layers + norm(&arch.head.norm, hidden) + head
}

fn norm(norm: &Norm, width: u128) -> u128 {
    match norm {
        Norm::Rms { .. } => width,
        Norm::Layer { .. } => 2 * width,
    }
}

fn layer(layer: &LayerArch, hidden: u128) -> u128 {
    let n_norms = match layer.block {
        Block::Sequential | Block::ParallelTwoNorms => 2,
        Block::Sandwich => 4,
        Block::ParallelOneNorm => 1,
    };
    let attention = match &layer.attention {
        AttentionArch::Heads(attention) => heads_attention(attention, hidden),
        AttentionArch::Latent(attention) => latent_attention(attention, hidden),
    };
    let mlp = match &layer.mlp {
        MlpArch::Dense(mlp) => dense(mlp, hidden),
        MlpArch::Moe(mlp) => moe(mlp, hidden),
    };
    n_norms * norm(&layer.norm, hidden) + attention + mlp
}

/// `h d (2a + 2k)`, biases `d (a + 2k)` and `h`, two norms of `d`, one sink per head.
fn heads_attention(attention: &HeadsAttention, hidden: u128) -> u128 {
    let (a, k, d) =
        (u128::from(attention.heads), u128::from(attention.kv_heads), u128::from(attention.head_dim));
    let qkv_bias = if attention.qkv_bias { d * (a + 2 * k) } else { 0 };
    let out_bias = if attention.out_bias { hidden } else { 0 };
    let qk_norm = if attention.qk_norm.is_some() { 2 * d } else { 0 };
    let sinks = if attention.sinks { a } else { 0 };
    hidden * d * (2 * a + 2 * k) + qkv_bias + out_bias + qk_norm + sinks
}

/// `h r_q + r_q + r_q a (d_n + d_r) + h (r_kv + d_r) + r_kv + r_kv a (d_n + d_v) + a d_v h`; without compression of the
/// queries the first three terms are `h a (d_n + d_r)`.
fn latent_attention(attention: &LatentAttention, hidden: u128) -> u128 {
    let wide = |n: u64| u128::from(n);
    let (a, r_kv) = (wide(attention.heads), wide(attention.kv_rank));
    let (d_n, d_r, d_v) = (wide(attention.nope_dim), wide(attention.rope_dim), wide(attention.v_dim));
    let on = u128::from(attention.bias);
    let queries = attention.q_rank.map_or(hidden * a * (d_n + d_r), |rank| {
        let r_q = wide(rank);
        hidden * r_q + on * r_q + r_q + r_q * a * (d_n + d_r)
    });
    let keys = hidden * (r_kv + d_r) + on * (r_kv + d_r) + r_kv + r_kv * a * (d_n + d_v);
    queries + keys + a * d_v * hidden + on * hidden
}

fn dense(mlp: &DenseMlp, hidden: u128) -> u128 {
    let inner = u128::from(mlp.inner);
    let n_up = match mlp.form {
        MlpForm::Gated(_) => 2,
        MlpForm::Plain(_) => 1,
    };
    let bias = if mlp.bias { n_up * inner + hidden } else { 0 };
    (n_up + 1) * hidden * inner + bias
}

fn moe(mlp: &MoeMlp, hidden: u128) -> u128 {
    let (experts, inner) = (u128::from(mlp.experts), u128::from(mlp.inner));
    let bias = if mlp.bias { experts + experts * (2 * inner + hidden) } else { 0 };
    let shared = mlp
        .shared
        .as_ref()
        .map_or(0, |shared| 3 * hidden * u128::from(shared.inner) + if shared.gated { hidden } else { 0 });
    experts * hidden + 3 * experts * hidden * inner + bias + shared
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::Document;
    use crate::hf::read_arch;
    use crate::shipped_models::shipped_model;

    fn count(text: &str) -> u128 {
        n_parameters(&read_arch(&Document::parse("model.json", text).unwrap()).unwrap())
    }

    #[test]
    fn counts_are_the_published_ones() {
        for (name, published) in crate::shipped_models::PUBLISHED_COUNTS {
            assert_eq!(count(shipped_model(name).unwrap().text), u128::from(*published), "{name}");
        }
    }
}
