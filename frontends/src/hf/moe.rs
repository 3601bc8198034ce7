//! Decoders with a mixture of experts behind ordinary attention.

use ir::op::{Activation, Gating, GroupScore, Normalize, RouterScore};

use super::fields::{EXPERTS, Fields, LAYERS, Limit, WIDTH};
use super::heads::{
    Sizes, attention_with_bias, decoder, grouped_attention, layer_windows, sizes, tying, uniform_window,
};
use super::llama::{eps, gated_mlp, sequential};
use crate::arch::{Arch, HeadNorm, HeadsAttention, MlpArch, MoeMlp, Norm, Router, SharedExpert, Tying};
use crate::input_error::InputError;

/// Names of the number of experts.
pub(crate) const N_EXPERTS: &[&str] = &["num_local_experts", "num_experts", "n_routed_experts"];
const TOP_K: &[&str] = &["num_experts_per_tok", "num_experts_per_token", "experts_per_token"];

/// Mixtral.
pub(crate) fn mixtral(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 131_072)?;
    let attention =
        HeadsAttention { window: uniform_window(fields)?, ..grouped_attention(fields, &sizes, 1e6)? };
    let (experts, top_k) = experts(fields, Some(2))?;
    let moe = MoeMlp {
        experts,
        top_k,
        inner: fields.count(&["intermediate_size"], WIDTH)?,
        gating: gating(fields)?,
        bias: false,
        router: Router { normalize: Normalize::Sum, ..plain_router() },
        shared: None,
    };
    let norm = Norm::Rms { eps: eps(fields, 1e-5)?, shift: 0.0 };
    let tied = tying(fields, Tying::Untied)?;
    Ok(decoder(&sizes, norm.clone(), tied, |_| {
        sequential("moe", &norm, &attention, MlpArch::Moe(moe.clone()))
    }))
}

/// Qwen2-MoE: many small experts and one that sees every token.
pub(crate) fn qwen2_moe(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 32_768)?;
    let bias = fields.flag("qkv_bias")?.unwrap_or(true);
    let attention = HeadsAttention { qkv_bias: bias, ..grouped_attention(fields, &sizes, 1e4)? };
    let inner = fields.count(&["shared_expert_intermediate_size"], WIDTH)?;
    qwen_moe(fields, &sizes, attention, Some(SharedExpert { inner, gated: true }))
}

/// Qwen3-MoE.
pub(crate) fn qwen3_moe(fields: &Fields<'_>) -> Result<Arch, InputError> {
    fields.must_be_on("use_qk_norm")?;
    let sizes = sizes(fields, 32_768)?;
    let qk_norm = Some(HeadNorm::plain(eps(fields, 1e-6)?));
    let attention = HeadsAttention { qk_norm, ..attention_with_bias(fields, &sizes, 1e4)? };
    qwen_moe(fields, &sizes, attention, None)
}

fn qwen_moe(
    fields: &Fields<'_>,
    sizes: &Sizes,
    attention: HeadsAttention,
    shared: Option<SharedExpert>,
) -> Result<Arch, InputError> {
    fields.must_be_off("use_sliding_window")?;
    let (experts, top_k) = experts(fields, None)?;
    let normalize =
        if fields.flag("norm_topk_prob")?.unwrap_or(false) { Normalize::Sum } else { Normalize::No };
    let moe = MoeMlp {
        experts,
        top_k,
        inner: fields.count(&["moe_intermediate_size"], WIDTH)?,
        gating: gating(fields)?,
        bias: false,
        router: Router { normalize, ..plain_router() },
        shared,
    };
    let dense_only = fields.list("mlp_only_layers", LAYERS)?;
    let step = fields.count_or(&["decoder_sparse_step"], LAYERS, 1)?;
    let is_dense = |i: u64| dense_only.contains(&i) || !(i + 1).is_multiple_of(step);
    let dense = if (0..sizes.n_layers).any(is_dense) { Some(gated_mlp(fields)?) } else { None };
    let norm = Norm::Rms { eps: eps(fields, 1e-6)?, shift: 0.0 };
    let tied = tying(fields, Tying::Untied)?;
    Ok(decoder(sizes, norm.clone(), tied, |i| match &dense {
        Some(dense) if is_dense(i) => sequential("dense", &norm, &attention, MlpArch::Dense(dense.clone())),
        Some(_) | None => sequential("moe", &norm, &attention, MlpArch::Moe(moe.clone())),
    }))
}

/// gpt-oss: biases everywhere, attention sinks, a clamped gate, windows in every other layer.
pub(crate) fn gpt_oss(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 131_072)?;
    let bias = fields.flag("attention_bias")?.unwrap_or(true);
    let attention = HeadsAttention {
        qkv_bias: bias,
        out_bias: bias,
        sinks: true,
        ..grouped_attention(fields, &sizes, 150_000.0)?
    };
    let (experts, top_k) = experts(fields, Some(4))?;
    let moe = MoeMlp {
        experts,
        top_k,
        inner: fields.count(&["intermediate_size"], WIDTH)?,
        gating: Gating::ClampedProduct { limit: fields.number_or(&["swiglu_limit"], 7.0)? },
        bias: true,
        router: Router { score: RouterScore::SoftmaxOfChosen, ..plain_router() },
        shared: None,
    };
    let windows = layer_windows(fields, (sizes.n_layers, 128), |i| i.is_multiple_of(2))?;
    let norm = Norm::Rms { eps: eps(fields, 1e-5)?, shift: 0.0 };
    let tied = tying(fields, Tying::Untied)?;
    Ok(decoder(&sizes, norm.clone(), tied, |i| {
        let own = HeadsAttention { window: windows[i as usize], ..attention.clone() };
        let name = if own.window.is_some() { "sliding-moe" } else { "full-moe" };
        sequential(name, &norm, &own, MlpArch::Moe(moe.clone()))
    }))
}

/// Number of experts and how many of them a token visits.
pub(crate) fn experts(fields: &Fields<'_>, default_top_k: Option<u64>) -> Result<(u64, u64), InputError> {
    let experts = fields.count(N_EXPERTS, EXPERTS)?;
    let any = Limit(1, EXPERTS.1);
    let top_k = match default_top_k {
        Some(default) => fields.count_or(TOP_K, any, default)?,
        None => fields.count(TOP_K, any)?,
    };
    if top_k > experts {
        return Err(fields
            .fail(TOP_K, format!("{top_k} of {experts} experts cannot be chosen"))
            .with_hint(format!("{} must be at most the number of experts", TOP_K[0])));
    }
    Ok((experts, top_k))
}

/// Softmax over all experts, no groups, weights as they are.
pub(crate) fn plain_router() -> Router {
    Router {
        score: RouterScore::Softmax,
        normalize: Normalize::No,
        scale: 1.0,
        groups: 1,
        top_groups: 1,
        group_score: GroupScore::Max,
        correction: false,
    }
}

/// The gate of every expert.
pub(crate) fn gating(fields: &Fields<'_>) -> Result<Gating, InputError> {
    Ok(Gating::Product { act: fields.activation(&["hidden_act"], Activation::Silu)? })
}
