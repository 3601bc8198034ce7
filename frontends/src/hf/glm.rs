//! GLM-4 and GLM-4.5: half of every head is rotated.

use ir::op::{GroupScore, Normalize, RouterScore};

use super::deepseek::{mixture, normalize, with_groups};
use super::fields::Fields;
use super::heads::{decoder, half_rotated_attention, sizes, tying};
use super::llama::{eps, gated_mlp};
use super::moe::plain_router;
use crate::arch::{
    Arch, AttentionArch, Block, HeadNorm, HeadsAttention, LayerArch, MlpArch, Norm, Router, Tying,
};
use crate::input_error::InputError;

/// GLM-4 of 2025: norms before and behind each branch.
pub(crate) fn glm4(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 131_072)?;
    let attention = HeadsAttention {
        qkv_bias: fields.flag("attention_bias")?.unwrap_or(true),
        ..half_rotated_attention(fields, &sizes)?
    };
    let mlp = gated_mlp(fields)?;
    let norm = Norm::Rms { eps: eps(fields, 1.5625e-7)?, shift: 0.0 };
    let parts = (AttentionArch::Heads(attention), MlpArch::Dense(mlp));
    let layer = LayerArch::new("decoder", Block::Sandwich, &norm, parts);
    Ok(decoder(&sizes, norm, tying(fields, Tying::Untied)?, |_| layer.clone()))
}

/// GLM-4.5: grouped queries before experts that are chosen as in DeepSeek-V3.
pub(crate) fn glm4_moe(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 131_072)?;
    let eps = eps(fields, 1e-5)?;
    let is_normed = fields.flag("use_qk_norm")?.unwrap_or(false);
    let attention = HeadsAttention {
        qkv_bias: fields.flag("attention_bias")?.unwrap_or(false),
        qk_norm: is_normed.then(|| HeadNorm::plain(eps)),
        ..half_rotated_attention(fields, &sizes)?
    };
    let base = Router {
        score: RouterScore::Sigmoid,
        normalize: normalize(fields, Normalize::Sum)?,
        scale: fields.number_or(&["routed_scaling_factor"], 1.0)?,
        correction: true,
        ..plain_router()
    };
    let router = with_groups(fields, base, GroupScore::TopTwo)?;
    mixture(fields, &sizes, (AttentionArch::Heads(attention), router), eps)
}
