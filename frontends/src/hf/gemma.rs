//! Gemma: embeddings scaled by the root of their width, norms whose weights count from one, a tied head.

use ir::op::{Activation, Gating};

use super::fields::{Fields, LAYERS};
use super::heads::{Sizes, attention_with_bias, decoder, layer_windows, sizes, tying};
use super::llama::{eps, gated_mlp};
use crate::arch::{
    Arch, AttentionArch, Block, DenseMlp, HeadNorm, HeadsAttention, LayerArch, MlpArch, MlpForm, Norm,
    Positions, Tying,
};
use crate::input_error::InputError;

/// What is added to the weight of every norm.
const SHIFT: f64 = 1.0;

/// Gemma: pre-norm layers that are all alike.
pub(crate) fn gemma(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 8192)?;
    let attention = attention_with_bias(fields, &sizes, 1e4)?;
    stack(fields, &sizes, Block::Sequential, |_| ("decoder", attention.clone()))
}

/// Gemma 2: norms before and behind each branch, windows in every other layer, capped scores and logits.
pub(crate) fn gemma2(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 8192)?;
    let attention = HeadsAttention {
        scale: Some(scale(fields)?),
        softcap: fields.number_or_null("attn_logit_softcapping", 50.0)?,
        ..attention_with_bias(fields, &sizes, 1e4)?
    };
    let mut arch = with_windows(fields, &sizes, |i| i.is_multiple_of(2), |_| attention.clone())?;
    arch.head.softcap = fields.number_or_null("final_logit_softcapping", 30.0)?;
    Ok(arch)
}

/// The language model of Gemma 3: as Gemma 2, with norms of heads in place of caps, and windows in five layers of six,
/// which rotate by a base of their own.
pub(crate) fn gemma3(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 131_072)?;
    let attention = HeadsAttention {
        scale: Some(scale(fields)?),
        softcap: fields.optional_number(&["attn_logit_softcapping"])?,
        qk_norm: Some(HeadNorm { eps: eps(fields, 1e-6)?, shift: SHIFT }),
        ..attention_with_bias(fields, &sizes, 1e4)?
    };
    let full = fields.rope_theta_of("full_attention", "rope_theta", 1e6)?;
    let local = fields.rope_theta_of("sliding_attention", "rope_local_base_freq", 1e4)?;
    let every = fields.count_or(&["sliding_window_pattern"], LAYERS, 6)?;
    let own = |slides: bool| {
        let theta = if slides { local } else { full };
        HeadsAttention {
            position: Positions::Rotary { theta, dims: attention.head_dim },
            ..attention.clone()
        }
    };
    let mut arch = with_windows(fields, &sizes, |i| !(i + 1).is_multiple_of(every), own)?;
    arch.head.softcap = fields.optional_number(&["final_logit_softcapping"])?;
    Ok(arch)
}

/// Factor on the scores.
fn scale(fields: &Fields<'_>) -> Result<f64, InputError> {
    Ok(fields.number_or(&["query_pre_attn_scalar"], 256.0)?.sqrt().recip())
}

/// Layers with norms around each branch, of which some see a window.
fn with_windows(
    fields: &Fields<'_>,
    sizes: &Sizes,
    slides: impl Fn(u64) -> bool,
    own: impl Fn(bool) -> HeadsAttention,
) -> Result<Arch, InputError> {
    let windows = layer_windows(fields, (sizes.n_layers, 4096), slides)?;
    stack(fields, sizes, Block::Sandwich, |i| {
        let window = windows[i as usize];
        let name = if window.is_some() { "sliding" } else { "full" };
        (name, HeadsAttention { window, ..own(window.is_some()) })
    })
}

/// A model of layers that have each a name and an attention.
fn stack(
    fields: &Fields<'_>,
    sizes: &Sizes,
    block: Block,
    own: impl Fn(u64) -> (&'static str, HeadsAttention),
) -> Result<Arch, InputError> {
    let act = fields.activation(&["hidden_activation", "hidden_act"], Activation::GeluTanh)?;
    let mlp = DenseMlp { form: MlpForm::Gated(Gating::Product { act }), ..gated_mlp(fields)? };
    let norm = Norm::Rms { eps: eps(fields, 1e-6)?, shift: SHIFT };
    let mut arch = decoder(sizes, norm.clone(), tying(fields, Tying::Tied)?, |i| {
        let (name, attention) = own(i);
        LayerArch::new(name, block, &norm, (AttentionArch::Heads(attention), MlpArch::Dense(mlp.clone())))
    });
    arch.embedding.scale = Some((sizes.hidden as f64).sqrt());
    Ok(arch)
}
