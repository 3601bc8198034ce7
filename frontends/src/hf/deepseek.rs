//! DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention, shared and routed experts, dense first
//! layers; how many of each must be said, for defaults are those of one of the models and differ between versions.
//! Multi-token prediction modules are not part of the model that is planned.

use ir::op::{GroupScore, Normalize, RouterScore};

use super::NATIVE_HINT;
use super::fields::{Fields, HEADS, LAYERS, Limit, WIDTH};
use super::heads::{Sizes, decoder, sizes, tying};
use super::llama::{eps, gated_mlp};
use super::moe::{experts, gating, plain_router};
use crate::arch::{
    Arch, AttentionArch, Block, LatentAttention, LayerArch, MlpArch, MoeMlp, Norm, Router, SharedExpert,
    Tying,
};
use crate::input_error::InputError;
use crate::scan::clip;

/// DeepSeek-V2.
pub(crate) fn v2(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let grouped = match fields.text(&["topk_method"])?.unwrap_or("greedy") {
        "greedy" => false,
        "group_limited_greedy" => true,
        other => {
            let what = format!("method \"{}\" is not known", clip(other));
            return Err(fields
                .fail(&["topk_method"], what)
                .with_hint("known for deepseek_v2: greedy, group_limited_greedy"));
        }
    };
    let base = Router {
        score: score(fields, RouterScore::Softmax)?,
        normalize: normalize(fields, Normalize::No)?,
        scale: fields.number_or(&["routed_scaling_factor"], 1.0)?,
        ..plain_router()
    };
    let router = if grouped { with_groups(fields, base, GroupScore::Max)? } else { base };
    model(fields, router)
}

/// How DeepSeek-V3 chooses experts: by scores to which a correction is added (its `modeling_deepseek.py`).
const CORRECTED: &str = "noaux_tc";

/// Groups of experts, and how many of them a token visits.
const GROUPS: &str = "n_group";
const TOP_GROUPS: &str = "topk_group";

/// DeepSeek-V3.
pub(crate) fn v3(fields: &Fields<'_>) -> Result<Arch, InputError> {
    let method = fields.text(&["topk_method"])?.unwrap_or(CORRECTED);
    if method != CORRECTED {
        let what = format!("method \"{}\" is not known", clip(method));
        let known = format!("known for deepseek_v3: {CORRECTED}");
        return Err(fields.fail(&["topk_method"], what).with_hint(known));
    }
    for name in [GROUPS, TOP_GROUPS] {
        fields.count_or_null(name, Limit(1, u64::from(u32::MAX)))?;
    }
    let base = Router {
        score: score(fields, RouterScore::Sigmoid)?,
        normalize: normalize(fields, Normalize::Sum)?,
        scale: fields.number_or(&["routed_scaling_factor"], 2.5)?,
        correction: true,
        ..plain_router()
    };
    let router = with_groups(fields, base, GroupScore::TopTwo)?;
    model(fields, router)
}

fn score(fields: &Fields<'_>, default: RouterScore) -> Result<RouterScore, InputError> {
    match fields.text(&["scoring_func"])? {
        None => Ok(default),
        Some("softmax") => Ok(RouterScore::Softmax),
        Some("sigmoid") => Ok(RouterScore::Sigmoid),
        Some(other) => Err(fields
            .fail(&["scoring_func"], format!("function \"{}\" is not known", clip(other)))
            .with_hint("known: softmax, sigmoid")),
    }
}

/// Whether the weights of the chosen experts are divided by their sum.
pub(crate) fn normalize(fields: &Fields<'_>, default: Normalize) -> Result<Normalize, InputError> {
    Ok(match fields.flag("norm_topk_prob")? {
        Some(true) => Normalize::Sum,
        Some(false) => Normalize::No,
        None => default,
    })
}

/// Experts chosen from the groups that score best.
pub(crate) fn with_groups(
    fields: &Fields<'_>,
    router: Router,
    group_score: GroupScore,
) -> Result<Router, InputError> {
    let any = Limit(1, u64::from(u32::MAX));
    let (n_experts, top_k) = experts(fields, None)?;
    let groups = fields.count_or(&[GROUPS], any, 1)?;
    if n_experts % groups != 0 {
        return Err(fields.fail(&[GROUPS], format!("{groups} groups do not divide {n_experts} experts")));
    }
    let top_groups = fields.count_or(&[TOP_GROUPS], any, groups)?;
    if top_groups > groups {
        return Err(fields.fail(&[TOP_GROUPS], format!("{top_groups} of {groups} groups cannot be chosen")));
    }
    let within = top_groups * (n_experts / groups);
    if top_k > within {
        let what =
            format!("the best {top_groups} groups hold {within} experts, of which {top_k} cannot be chosen");
        return Err(fields.fail(&[TOP_GROUPS], what));
    }
    Ok(Router { groups, top_groups, group_score, ..router })
}

fn model(fields: &Fields<'_>, router: Router) -> Result<Arch, InputError> {
    let sizes = sizes(fields, 4096)?;
    let attention = AttentionArch::Latent(latent_attention(fields, &sizes)?);
    mixture(fields, &sizes, (attention, router), eps(fields, 1e-6)?)
}

/// Layers of one attention, the first of them dense and the others with experts, some of which see every token.
pub(crate) fn mixture(
    fields: &Fields<'_>,
    sizes: &Sizes,
    (attention, router): (AttentionArch, Router),
    eps: f64,
) -> Result<Arch, InputError> {
    if fields.count_or(&["moe_layer_freq"], LAYERS, 1)? != 1 {
        return Err(fields.fail(&["moe_layer_freq"], "only 1 is supported".into()).with_hint(NATIVE_HINT));
    }
    let (experts, top_k) = experts(fields, None)?;
    let inner = fields.count(&["moe_intermediate_size"], WIDTH)?;
    let n_shared = fields.count_or_null("n_shared_experts", Limit(0, 1024))?.unwrap_or(0);
    let moe = MoeMlp {
        experts,
        top_k,
        inner,
        gating: gating(fields)?,
        bias: false,
        router,
        shared: (n_shared > 0).then_some(SharedExpert { inner: inner * n_shared, gated: false }),
    };
    let dense = gated_mlp(fields)?;
    let n_dense = fields.count(&["first_k_dense_replace"], Limit(0, LAYERS.1))?;
    let norm = Norm::Rms { eps, shift: 0.0 };
    let tied = tying(fields, Tying::Untied)?;
    Ok(decoder(sizes, norm.clone(), tied, |i| {
        let (name, mlp) = match i < n_dense {
            true => ("dense", MlpArch::Dense(dense.clone())),
            false => ("moe", MlpArch::Moe(moe.clone())),
        };
        LayerArch::new(name, Block::Sequential, &norm, (attention.clone(), mlp))
    }))
}

fn latent_attention(fields: &Fields<'_>, sizes: &Sizes) -> Result<LatentAttention, InputError> {
    // The compressed keys and their rotated part are cut from one projection; each must have two elements or more.
    let wide = Limit(2, WIDTH.1);
    let kv_heads = fields.count_or(&["num_key_value_heads"], HEADS, sizes.heads)?;
    if kv_heads != sizes.heads {
        let what = format!(
            "latent attention has as many key/value heads as query heads, found {kv_heads} and {}",
            sizes.heads
        );
        return Err(fields.fail(&["num_key_value_heads"], what));
    }
    let rope_dim = fields.count(&["qk_rope_head_dim"], wide)?;
    if rope_dim % 2 != 0 {
        return Err(
            fields.fail(&["qk_rope_head_dim"], format!("{rope_dim} is odd, elements are rotated in pairs"))
        );
    }
    Ok(LatentAttention {
        heads: sizes.heads,
        q_rank: fields.count_or_null("q_lora_rank", WIDTH)?,
        kv_rank: fields.count(&["kv_lora_rank"], wide)?,
        nope_dim: fields.count(&["qk_nope_head_dim"], WIDTH)?,
        rope_dim,
        v_dim: fields.count(&["v_head_dim"], WIDTH)?,
        theta: fields.rope_number(&["rope_theta"], 1e4)?,
        bias: fields.flag("attention_bias")?.unwrap_or(false),
        eps: eps(fields, 1e-6)?,
    })
}
