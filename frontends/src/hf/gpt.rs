//! GPT-2 and the decoders of its time: layer norms, biases, a plain MLP.

use ir::op::Activation;

use super::NATIVE_HINT;
use super::fields::{Fields, HEADS, WIDTH};
use super::heads::{
    RotaryDefaults, Sizes, decoder, divided_head_dim, grouped_attention, half_rotated_attention,
    plain_attention, rotary, sizes, tying, uniform_window,
};
use crate::arch::{
    Arch, AttentionArch, Block, DenseMlp, HeadsAttention, LayerArch, LearnedPositions, MlpArch, MlpForm,
    Norm, Positions, Tying,
};
use crate::input_error::InputError;

const LAYER_NORM_EPS: &[&str] = &["layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"];

/// GPT-2, GPT-3 and the Megatron family.
pub(crate) fn gpt2(fields: &Fields<'_>) -> Result<Arch, InputError> {
    fields.must_be_off("add_cross_attention")?;
    fields.must_be_off("scale_attn_by_inverse_layer_idx")?;
    let sizes = sizes(fields, 1024)?;
    let scaled = fields.flag("scale_attn_weights")?.unwrap_or(true);
    let attention = HeadsAttention { scale: (!scaled).then_some(1.0), ..biased_attention(fields, &sizes)? };
    let mlp = DenseMlp {
        inner: fields.count_or(&["n_inner"], WIDTH, 4 * sizes.hidden)?,
        form: MlpForm::Plain(fields.activation(&["activation_function"], Activation::GeluTanh)?),
        bias: true,
    };
    let norm = layer_norm(fields)?;
    let tied = tying(fields, Tying::Tied)?;
    let layer = layer(Block::Sequential, &norm, attention, mlp);
    let mut arch = decoder(&sizes, norm, tied, |_| layer.clone());
    arch.embedding.positions = Some(LearnedPositions { rows: sizes.sequence, offset: 0 });
    Ok(arch)
}

/// GPT-NeoX and Pythia: a quarter of each head rotated, attention and MLP in parallel.
pub(crate) fn gpt_neox(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 2048)?;
    let bias = fields.flag("attention_bias")?.unwrap_or(true);
    let base = biased_attention(fields, &sizes)?;
    let position = rotary(fields, base.head_dim, RotaryDefaults { theta: 1e4, share: 0.25 })?;
    let attention = HeadsAttention { position, qkv_bias: bias, out_bias: bias, ..base };
    let mlp = DenseMlp {
        inner: fields.count(&["intermediate_size"], WIDTH)?,
        form: MlpForm::Plain(fields.activation(&["hidden_act"], Activation::Gelu)?),
        bias: true,
    };
    let norm = layer_norm(fields)?;
    let parallel = fields.flag("use_parallel_residual")?.unwrap_or(true);
    let block = if parallel { Block::ParallelTwoNorms } else { Block::Sequential };
    let tied = tying(fields, Tying::Untied)?;
    let layer = layer(block, &norm, attention, mlp);
    Ok(decoder(&sizes, norm, tied, |_| layer.clone()))
}

/// OPT: a position table whose first two rows are unused.
pub(crate) fn opt(fields: &Fields<'_>) -> Result<Arch, InputError> {
    const OFFSET: u64 = 2;
    fields.must_be_on("do_layer_norm_before")?;
    fields.must_be_off("_remove_final_layer_norm")?;
    fields.must_be_on("layer_norm_elementwise_affine")?;
    let sizes = sizes(fields, 2048)?;
    let projected = fields.count_or(&["word_embed_proj_dim"], WIDTH, sizes.hidden)?;
    if projected != sizes.hidden {
        let what =
            format!("{projected} differs from a hidden size of {}, which is not supported", sizes.hidden);
        return Err(fields.fail(&["word_embed_proj_dim"], what).with_hint(NATIVE_HINT));
    }
    let bias = fields.flag("enable_bias")?.unwrap_or(true);
    let attention = HeadsAttention { qkv_bias: bias, out_bias: bias, ..biased_attention(fields, &sizes)? };
    let mlp = DenseMlp {
        inner: fields.count(&["ffn_dim"], WIDTH)?,
        form: MlpForm::Plain(fields.activation(&["activation_function"], Activation::Relu)?),
        bias,
    };
    let norm = layer_norm(fields)?;
    let tied = tying(fields, Tying::Tied)?;
    let layer = layer(Block::Sequential, &norm, attention, mlp);
    let mut arch = decoder(&sizes, norm, tied, |_| layer.clone());
    arch.embedding.positions = Some(LearnedPositions { rows: sizes.sequence + OFFSET, offset: OFFSET });
    Ok(arch)
}

/// BLOOM: a linear position bias and a norm behind the embedding.
pub(crate) fn bloom(fields: &Fields<'_>) -> Result<Arch, InputError> {
    fields.must_be_off("apply_residual_connection_post_layernorm")?;
    let sizes = sizes(fields, 2048)?;
    let attention = HeadsAttention { position: Positions::Alibi, ..biased_attention(fields, &sizes)? };
    let form = MlpForm::Plain(Activation::GeluTanh);
    let mlp = DenseMlp { inner: 4 * sizes.hidden, form, bias: true };
    let norm = layer_norm(fields)?;
    let tied = tying(fields, Tying::Tied)?;
    let layer = layer(Block::Sequential, &norm, attention, mlp);
    let mut arch = decoder(&sizes, norm.clone(), tied, |_| layer.clone());
    arch.embedding.norm = Some(norm);
    Ok(arch)
}

/// Falcon: one key/value head or a few, attention and MLP in parallel.
pub(crate) fn falcon(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 2048)?;
    let bias = fields.flag("bias")?.unwrap_or(false);
    let head_dim = divided_head_dim(fields, &sizes)?;
    let kv_heads = falcon_kv_heads(fields, &sizes)?;
    let position = if fields.flag("alibi")?.unwrap_or(false) {
        Positions::Alibi
    } else {
        rotary(fields, head_dim, RotaryDefaults { theta: 1e4, share: 1.0 })?
    };
    let attention = HeadsAttention {
        qkv_bias: bias,
        out_bias: bias,
        position,
        ..plain_attention(sizes.heads, kv_heads, head_dim)
    };
    let mlp = DenseMlp {
        inner: fields.count_or(&["ffn_hidden_size"], WIDTH, 4 * sizes.hidden)?,
        form: MlpForm::Plain(fields.activation(&["activation"], Activation::Gelu)?),
        bias,
    };
    let norm = layer_norm(fields)?;
    let tied = tying(fields, Tying::Tied)?;
    let layer = layer(falcon_block(fields)?, &norm, attention, mlp);
    Ok(decoder(&sizes, norm, tied, |_| layer.clone()))
}

/// StarCoder2: grouped heads, rotated whole, and biases everywhere.
pub(crate) fn starcoder2(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 4096)?;
    let bias = fields.flag("use_bias")?.unwrap_or(true);
    let attention = HeadsAttention {
        qkv_bias: bias,
        out_bias: bias,
        window: uniform_window(fields)?,
        ..grouped_attention(fields, &sizes, 1e4)?
    };
    let form = MlpForm::Plain(fields.activation(&["hidden_act"], Activation::GeluTanh)?);
    let mlp = DenseMlp { inner: fields.count(&["intermediate_size"], WIDTH)?, form, bias };
    grouped(fields, &sizes, attention, mlp, Tying::Tied)
}

/// Nemotron (arXiv 2402.16819): grouped heads, half of each rotated, the square of a ReLU. Its norms store the gain
/// less one, which is the same norm; here the gain itself is the parameter.
pub(crate) fn nemotron(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 4096)?;
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let attention =
        HeadsAttention { qkv_bias: bias, out_bias: bias, ..half_rotated_attention(fields, &sizes)? };
    let mlp = DenseMlp {
        inner: fields.count(&["intermediate_size"], WIDTH)?,
        form: MlpForm::Plain(fields.activation(&["hidden_act"], Activation::ReluSquared)?),
        bias: fields.flag("mlp_bias")?.unwrap_or(false),
    };
    grouped(fields, &sizes, attention, mlp, Tying::Untied)
}

fn grouped(
    fields: &Fields<'_>,
    sizes: &Sizes,
    attention: HeadsAttention,
    mlp: DenseMlp,
    default: Tying,
) -> Result<Arch, InputError> {
    let norm = layer_norm(fields)?;
    let tied = tying(fields, default)?;
    let layer = layer(Block::Sequential, &norm, attention, mlp);
    Ok(decoder(sizes, norm, tied, |_| layer.clone()))
}

fn falcon_kv_heads(fields: &Fields<'_>, sizes: &Sizes) -> Result<u64, InputError> {
    const KV_HEADS: &[&str] = &["num_kv_heads", "n_head_kv"];
    let given = fields.count_or(KV_HEADS, HEADS, sizes.heads)?;
    let is_new = fields.flag("new_decoder_architecture")?.unwrap_or(false);
    let kv_heads = match (is_new, fields.flag("multi_query")?.unwrap_or(true)) {
        (true, _) => given,
        (false, true) => 1,
        (false, false) => sizes.heads,
    };
    if !sizes.heads.is_multiple_of(kv_heads) {
        let what = format!("{} query heads cannot share {kv_heads} key/value heads evenly", sizes.heads);
        return Err(fields.fail(KV_HEADS, what));
    }
    Ok(kv_heads)
}

fn falcon_block(fields: &Fields<'_>) -> Result<Block, InputError> {
    if fields.flag("new_decoder_architecture")?.unwrap_or(false) {
        let n_norms = fields.count_or(&["num_ln_in_parallel_attn"], super::fields::Limit(1, 2), 2)?;
        return Ok(if n_norms == 2 { Block::ParallelTwoNorms } else { Block::ParallelOneNorm });
    }
    let parallel = fields.flag("parallel_attn")?.unwrap_or(true);
    Ok(if parallel { Block::ParallelOneNorm } else { Block::Sequential })
}

fn layer_norm(fields: &Fields<'_>) -> Result<Norm, InputError> {
    Ok(Norm::Layer { eps: fields.number_or(LAYER_NORM_EPS, 1e-5)? })
}

/// As many key/value heads as query heads, biases everywhere.
fn biased_attention(fields: &Fields<'_>, sizes: &Sizes) -> Result<HeadsAttention, InputError> {
    let head_dim = divided_head_dim(fields, sizes)?;
    Ok(HeadsAttention {
        qkv_bias: true,
        out_bias: true,
        ..plain_attention(sizes.heads, sizes.heads, head_dim)
    })
}

fn layer(block: Block, norm: &Norm, attention: HeadsAttention, mlp: DenseMlp) -> LayerArch {
    LayerArch::new("decoder", block, norm, (AttentionArch::Heads(attention), MlpArch::Dense(mlp)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::read_model;

    fn count(config: &serde_json::Value) -> u64 {
        read_model("config.json", &config.to_string()).unwrap().n_parameters()
    }

    /// StarCoder2-15B: 15,957,889,024 in its safetensors index.
    #[test]
    fn starcoder2_has_the_published_count() {
        let config = json!({
            "model_type": "starcoder2", "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 40,
            "num_attention_heads": 48, "num_key_value_heads": 4, "vocab_size": 49152, "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh", "use_bias": true, "sliding_window": 4096,
            "tie_word_embeddings": false,
        });
        assert_eq!(count(&config), 15_957_889_024);
    }

    /// Nemotron-4 340B: 9.4 billion in embeddings, 331.6 billion elsewhere (arXiv 2406.11704, section 2.1).
    #[test]
    fn nemotron_has_the_published_count() {
        let config = json!({
            "model_type": "nemotron", "hidden_size": 18432, "intermediate_size": 73728, "num_hidden_layers": 96,
            "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 192, "vocab_size": 256_000,
            "norm_eps": 1e-5,
        });
        let embeddings = 2 * 256_000 * 18432;
        let tenths = |n: u64| (n as f64 / 1e8).round();
        assert_eq!((tenths(embeddings), tenths(count(&config) - embeddings)), (94.0, 3316.0));
    }
}
