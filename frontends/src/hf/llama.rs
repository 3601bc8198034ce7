//! Llama and its kin: pre-norm decoders with rotary positions and a gated MLP.

use ir::op::{Activation, Gating};

use super::fields::{Fields, WIDTH};
use super::heads::{Sizes, decoder, grouped_attention, sizes, tying, uniform_window};
use crate::arch::{
    Arch, AttentionArch, Block, DenseMlp, HeadsAttention, LayerArch, MlpArch, MlpForm, Norm, Tying,
};
use crate::input_error::InputError;

/// Llama 1 to 3.
pub(crate) fn llama(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 2048)?;
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let attention =
        HeadsAttention { qkv_bias: bias, out_bias: bias, ..grouped_attention(fields, &sizes, 1e4)? };
    let mlp = DenseMlp { bias: fields.flag("mlp_bias")?.unwrap_or(false), ..gated_mlp(fields)? };
    uniform(fields, &sizes, attention, mlp)
}

/// Mistral 7B and its successors of the same type: a window of 4,096 where the file does not say that there is none.
pub(crate) fn mistral(fields: &Fields<'_>) -> Result<Arch, InputError> {
    grouped(fields, fields.window_or(4096)?)
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
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let qk_norm = Some(eps(fields, 1e-6)?);
    let attention =
        HeadsAttention { qkv_bias: bias, out_bias: bias, qk_norm, ..grouped_attention(fields, &sizes, 1e4)? };
    late_windows(fields, &sizes, attention, gated_mlp(fields)?)
}

/// Gemma 2: norms before and behind each branch, windows in every other layer, capped scores and logits.
pub(crate) fn gemma2(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 8192)?;
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    let scalar = fields.number_or(&["query_pre_attn_scalar"], 256.0)?;
    let attention = HeadsAttention {
        qkv_bias: bias,
        out_bias: bias,
        scale: Some(scalar.sqrt().recip()),
        softcap: fields.number_or_null("attn_logit_softcapping", 50.0)?,
        ..grouped_attention(fields, &sizes, 1e4)?
    };
    let act = fields.activation(&["hidden_activation", "hidden_act"], Activation::GeluTanh)?;
    let mlp = DenseMlp { form: MlpForm::Gated(Gating::Product { act }), ..gated_mlp(fields)? };
    let norm = Norm::Rms { eps: eps(fields, 1e-6)?, shift: 1.0 };
    let window = fields.window_or(4096)?;
    let sliding = fields.sliding_layers(sizes.n_layers)?;
    let is_said = |i: u64| sliding.as_ref().map_or(i.is_multiple_of(2), |list| list[i as usize]);
    let slides = |i: u64| window.is_some() && is_said(i);
    let mut arch = decoder(&sizes, norm.clone(), tying(fields, Tying::Tied)?, |i| LayerArch {
        name: if slides(i) { "sliding" } else { "full" },
        block: Block::Sandwich,
        norm: norm.clone(),
        attention: AttentionArch::Heads(HeadsAttention {
            window: window.filter(|_| slides(i)),
            ..attention.clone()
        }),
        mlp: MlpArch::Dense(mlp.clone()),
    });
    arch.embedding.scale = Some((sizes.hidden as f64).sqrt());
    arch.head.softcap = fields.number_or_null("final_logit_softcapping", 30.0)?;
    Ok(arch)
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

const SEQUENCE_OR_ZERO: super::fields::Limit = super::fields::Limit(0, 1 << 28);

/// A pre-norm layer.
pub(crate) fn sequential(
    name: &'static str,
    norm: &Norm,
    attention: &HeadsAttention,
    mlp: MlpArch,
) -> LayerArch {
    LayerArch {
        name,
        block: Block::Sequential,
        norm: norm.clone(),
        attention: AttentionArch::Heads(attention.clone()),
        mlp,
    }
}
