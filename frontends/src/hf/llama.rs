//! Llama and its kin: pre-norm decoders with rotary positions and a gated MLP.

use ir::op::{Activation, Gating};

use super::fields::{Fields, LAYERS, Limit, WIDTH};
use super::heads::{Sizes, attention_with_bias, decoder, grouped_attention, sizes, tying, uniform_window};
use crate::arch::{
    Arch, AttentionArch, Block, DenseMlp, HeadNorm, HeadsAttention, LayerArch, MlpArch, MlpForm, Norm,
    Positions, Tying,
};
use crate::input_error::InputError;

/// Llama 1 to 3.
pub(crate) fn llama(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 2048)?;
    let attention = attention_with_bias(fields, &sizes, 1e4)?;
    uniform(fields, &sizes, attention, biased_mlp(fields)?)
}

/// SwiGLU, with biases where the file says so.
fn biased_mlp(fields: &Fields<'_>) -> Result<DenseMlp, InputError> {
    Ok(DenseMlp { bias: fields.flag("mlp_bias")?.unwrap_or(false), ..gated_mlp(fields)? })
}

/// Mistral 7B and its successors of the same type: a window of 4,096 where the file does not say that there is none.
pub(crate) fn mistral(fields: &Fields<'_>) -> Result<Arch, InputError> {
    grouped(fields, fields.window_or(4096)?)
}

/// Granite: factors on what is embedded, on scores, on what branches add and on logits.
pub(crate) fn granite(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let factor = |name: &str| Ok(fields.optional_number(&[name])?.filter(|by| *by != 1.0));
    let scale = Some(fields.number_or(&["attention_multiplier"], 1.0)?);
    let sizes = sizes(fields, 2048)?;
    let attention = HeadsAttention { scale, ..attention_with_bias(fields, &sizes, 1e4)? };
    let mut arch = uniform(fields, &sizes, attention, biased_mlp(fields)?)?;
    let branch_scale = factor("residual_multiplier")?;
    arch.kinds.iter_mut().for_each(|kind| kind.branch_scale = branch_scale);
    arch.embedding.scale = factor("embedding_multiplier")?;
    arch.head.scale = factor("logits_scaling")?.map(f64::recip);
    Ok(arch)
}

/// Seed-OSS: biases on queries, keys and values, and on what comes out of attention where the file says so.
pub(crate) fn seed_oss(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 524_288)?;
    let attention = HeadsAttention {
        qkv_bias: fields.flag("attention_bias")?.unwrap_or(true),
        out_bias: fields.flag("attention_out_bias")?.unwrap_or(false),
        ..grouped_attention(fields, &sizes, 1e4)?
    };
    uniform(fields, &sizes, attention, biased_mlp(fields)?)
}

/// SmolLM3: every fourth layer rotates nothing.
pub(crate) fn smollm3(fields: &Fields<'_>) -> Result<Arch, InputError> {
    const ROTATES: &str = "no_rope_layers";
    fields.must_be_off("use_sliding_window")?;
    let sizes = sizes(fields, 32_768)?;
    let attention = attention_with_bias(fields, &sizes, 2e6)?;
    let mlp = biased_mlp(fields)?;
    let interval = fields.count_or(&["no_rope_layer_interval"], LAYERS, 4)?;
    let said = fields.list(ROTATES, Limit(0, 1))?;
    if !said.is_empty() && (said.len() as u64) < sizes.n_layers {
        let what = format!("{} entries for {} layers", said.len(), sizes.n_layers);
        return Err(fields.fail(&[ROTATES], what));
    }
    let rotates = |i: u64| match said.get(i as usize) {
        Some(&rotates) => rotates == 1,
        None => !(i + 1).is_multiple_of(interval),
    };
    let norm = Norm::Rms { eps: eps(fields, 1e-6)?, shift: 0.0 };
    let tied = tying(fields, Tying::Tied)?;
    Ok(decoder(&sizes, norm.clone(), tied, |i| {
        let position = if rotates(i) { attention.position.clone() } else { Positions::Embedded };
        let own = HeadsAttention { position, ..attention.clone() };
        let name = if rotates(i) { "rotary" } else { "unrotated" };
        sequential(name, &norm, &own, MlpArch::Dense(mlp.clone()))
    }))
}

/// Phi-3.
pub(crate) fn phi3(fields: &Fields<'_>) -> Result<Arch, InputError> {
    grouped(fields, uniform_window(fields)?)
}

fn grouped(fields: &Fields<'_>, window: Option<u64>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 131_072)?;
    let attention = HeadsAttention { window, ..grouped_attention(fields, &sizes, 1e4)? };
    uniform(fields, &sizes, attention, gated_mlp(fields)?)
}

/// Qwen 2 and 2.5: biases on queries, keys and values.
pub(crate) fn qwen2(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 32_768)?;
    let attention = HeadsAttention { qkv_bias: true, ..grouped_attention(fields, &sizes, 1e4)? };
    late_windows(fields, &sizes, attention, gated_mlp(fields)?)
}

/// Qwen 3: norms on query and key heads.
pub(crate) fn qwen3(fields: &Fields<'_>) -> Result<Arch, InputError> {
    fields.must_be_on("use_qk_norm")?;
    let sizes = sizes(fields, 32_768)?;
    let qk_norm = Some(HeadNorm::plain(eps(fields, 1e-6)?));
    let attention = HeadsAttention { qk_norm, ..attention_with_bias(fields, &sizes, 1e4)? };
    late_windows(fields, &sizes, attention, gated_mlp(fields)?)
}

/// Epsilon of the RMS norms.
pub(crate) fn eps(fields: &Fields<'_>, default: f64) -> Result<f64, InputError> {
    fields.number_or(&["rms_norm_eps"], default)
}

/// SwiGLU without biases.
pub(crate) fn gated_mlp(fields: &Fields<'_>) -> Result<DenseMlp, InputError> {
    let act = fields.activation(&["hidden_act"], Activation::Silu)?;
    let inner = fields.count(&["intermediate_size"], WIDTH)?;
    Ok(DenseMlp { inner, form: MlpForm::Gated(Gating::Product { act }), bias: false })
}

fn uniform(
    fields: &Fields<'_>,
    sizes: &Sizes,
    attention: HeadsAttention,
    mlp: DenseMlp,
) -> Result<Arch, InputError> {
    let norm = Norm::Rms { eps: eps(fields, 1e-6)?, shift: 0.0 };
    let tied = tying(fields, Tying::Untied)?;
    Ok(decoder(sizes, norm.clone(), tied, |_| {
        sequential("decoder", &norm, &attention, MlpArch::Dense(mlp.clone()))
    }))
}

/// Qwen: with `use_sliding_window`, layers from `max_window_layers` on see a window.
fn late_windows(
    fields: &Fields<'_>,
    sizes: &Sizes,
    attention: HeadsAttention,
    mlp: DenseMlp,
) -> Result<Arch, InputError> {
    let sliding = fields.sliding_layers(sizes.n_layers)?;
    let is_on = fields.flag("use_sliding_window")?.unwrap_or(false);
    let Some(window) = fields.window_or(4096)?.filter(|_| is_on) else {
        return uniform(fields, sizes, attention, mlp);
    };
    let first = fields.count_or(&["max_window_layers"], SEQUENCE_OR_ZERO, 28)?;
    let slides = |i: u64| sliding.as_ref().map_or(i >= first, |list| list[i as usize]);
    let norm = Norm::Rms { eps: eps(fields, 1e-6)?, shift: 0.0 };
    let tied = tying(fields, Tying::Untied)?;
    Ok(decoder(sizes, norm.clone(), tied, |i| {
        let own = HeadsAttention { window: slides(i).then_some(window), ..attention.clone() };
        let name = if slides(i) { "sliding" } else { "full" };
        sequential(name, &norm, &own, MlpArch::Dense(mlp.clone()))
    }))
}

const SEQUENCE_OR_ZERO: Limit = Limit(0, 1 << 28);

/// A pre-norm layer.
pub(crate) fn sequential(
    name: &'static str,
    norm: &Norm,
    attention: &HeadsAttention,
    mlp: MlpArch,
) -> LayerArch {
    LayerArch::new(name, Block::Sequential, norm, (AttentionArch::Heads(attention.clone()), mlp))
}
