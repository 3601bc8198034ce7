//! Small models of real families, with odd sizes.

use frontends::lora::{Lora, adapt};
use frontends::mtp::predict_ahead;
use ir::builder::LayerBuilder;
use ir::graph::{Layer, Model, Segment};
use ir::op::OpKind;
use proptest::prelude::*;
use serde_json::{Value, json};

/// A family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Grouped queries, gated MLP.
    Llama,
    /// Layer norms with biases, learned positions, tied embedding.
    Gpt2,
    /// Windows, soft caps, norms after the blocks, tied embedding.
    Gemma2,
    /// The same with norms of heads in place of caps, and another rotation where there is a window.
    Gemma3,
    /// Factors on embeddings, branches and logits.
    Granite,
    /// Grouped queries before experts that are chosen by sigmoid scores.
    Glm4Moe,
    /// Attention and MLP in parallel.
    Falcon,
    /// Position bias by head.
    Bloom,
    /// Routed experts.
    Mixtral,
    /// Attention sinks and experts with biases.
    GptOss,
    /// Latent attention, a dense first layer, shared experts, groups of experts.
    DeepSeekV2,
    /// The same with sigmoid scores and a latent query.
    DeepSeekV3,
}

/// Every family.
const ALL: [Family; 12] = [
    Family::Llama,
    Family::Gpt2,
    Family::Gemma2,
    Family::Gemma3,
    Family::Granite,
    Family::Glm4Moe,
    Family::Falcon,
    Family::Bloom,
    Family::Mixtral,
    Family::GptOss,
    Family::DeepSeekV2,
    Family::DeepSeekV3,
];

/// Sizes of a model; what they mean where a family has no such size is explained beside its description.
#[derive(Clone, Debug)]
pub struct ModelSizes {
    /// Decoder layers.
    pub n_layers: u64,
    /// Key heads.
    pub kv_heads: u64,
    /// Query heads per key head.
    pub group: u64,
    /// Half of a head's dim, which is even for the rotary embedding.
    pub half_dim: u64,
    /// Columns of the MLP.
    pub mlp: u64,
    /// Experts, in pairs.
    pub expert_pairs: u64,
    /// Experts of a token.
    pub top_k: u64,
    /// Rows of the vocabulary.
    pub vocabulary: u64,
    /// Whether embedding and head are one, where the family leaves the choice.
    pub tied: bool,
    /// Rank of the adapters that alone are learned; 0 learns everything.
    pub lora: u64,
    /// Modules that predict ahead, where the family's embedding allows some.
    pub mtp: u64,
    /// Layers of a tower beside the first layers, whose result is added to theirs; 0 for none.
    pub tower: u64,
}

/// Any family.
pub(super) fn families() -> impl Strategy<Value = Family> {
    prop::sample::select(ALL.to_vec())
}

/// Any sizes.
pub(super) fn sizes() -> impl Strategy<Value = ModelSizes> {
    let attention = (prop_oneof![Just(1_u64), Just(2), Just(3), Just(4)], 1_u64..=3, 1_u64..=3);
    let mlp = (prop_oneof![Just(6_u64), Just(8), Just(12), Just(15)], 1_u64..=3, 1_u64..=2);
    let lora = prop_oneof![3 => Just(0_u64), 1 => 1_u64..=4];
    let mtp = prop_oneof![5 => Just(0_u64), 1 => 1_u64..=2];
    let tower = prop_oneof![4 => Just(0_u64), 1 => 1_u64..=2];
    let ends = (prop_oneof![Just(17_u64), Just(24), Just(35), Just(48)], any::<bool>(), lora, mtp, tower);
    (1_u64..=4, attention, mlp, ends).prop_map(|(n_layers, attention, mlp, ends)| ModelSizes {
        n_layers,
        kv_heads: attention.0,
        group: attention.1,
        half_dim: attention.2,
        mlp: mlp.0,
        expert_pairs: mlp.1,
        top_k: mlp.2,
        vocabulary: ends.0,
        tied: ends.1,
        lora: ends.2,
        mtp: ends.3,
        tower: ends.4,
    })
}

/// The model by way of its Hugging Face description; `None` where the family does not allow the sizes.
pub(crate) fn model(family: Family, sizes: &ModelSizes) -> Option<Model> {
    let text = description(family, sizes).to_string();
    let mut model = frontends::read_model("fuzz.json", &text).ok()?;
    if sizes.mtp > 0 {
        predict_ahead(&mut model, sizes.mtp).ok()?;
    }
    if sizes.tower > 0 {
        add_tower(&mut model, sizes.tower)?;
    }
    if sizes.lora > 0 {
        let lora = Lora { rank: sizes.lora, alpha: Some(2.0), targets: Vec::new() };
        adapt(&mut model, &lora).ok()?;
    }
    Some(model)
}

/// Puts a second embedding and so many layers beside the first ones, all with parameters of their own, and adds the
/// results: stages of the two run side by side.
fn add_tower(model: &mut Model, n_layers: u64) -> Option<()> {
    let &[embedding, body, ..] = model.sequence.as_slice() else { return None };
    let out = *model.layers[embedding.layer].out.first()?;
    let width = {
        let layer = &model.layers[embedding.layer];
        layer.dims[layer.tensors[out.0].dims.last()?.0].extent.fixed()?
    };
    let mut copy = |of: usize, count: u64| {
        let layer = &model.layers[of];
        model.layers.push(Layer { name: format!("tower-{}", layer.name), ..layer.clone() });
        Segment { layer: model.layers.len() - 1, count }
    };
    let tower = [copy(embedding.layer, 1), copy(body.layer, n_layers)];
    let mut b = LayerBuilder::new("sum");
    b.fixed("h", width);
    let both = ["left", "right"].map(|name| b.stream_named(name, "b s h"));
    let sum = b.op("add", OpKind::Add, &both, "b s h");
    model.layers.push(b.finish(sum));
    let sum = Segment { layer: model.layers.len() - 1, count: 1 };
    model.sequence.splice(2..2, tower.into_iter().chain([sum]));
    Some(())
}

fn description(family: Family, sizes: &ModelSizes) -> Value {
    let heads = sizes.kv_heads * sizes.group;
    let hidden = heads * 2 * sizes.half_dim;
    let mut all = json!({
        "hidden_size": hidden,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": sizes.kv_heads,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": sizes.tied,
        "hidden_act": "silu",
    });
    let own = match family {
        Family::Llama => json!({ "model_type": "llama" }),
        Family::Gpt2 => json!({
            "model_type": "gpt2", "n_embd": hidden, "n_layer": sizes.n_layers, "n_head": heads,
            "n_positions": 160, "n_ctx": 160, "vocab_size": sizes.vocabulary,
            "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        }),
        Family::Gemma2 => json!({
            "model_type": "gemma2", "head_dim": 2 * sizes.half_dim, "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 2 * sizes.half_dim, "sliding_window": 4, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "tie_word_embeddings": true,
        }),
        Family::Gemma3 => json!({
            "model_type": "gemma3_text", "head_dim": 2 * sizes.half_dim, "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 2 * sizes.half_dim, "sliding_window": 4, "sliding_window_pattern": 2,
            "rope_local_base_freq": 100.0, "tie_word_embeddings": true,
        }),
        Family::Granite => json!({
            "model_type": "granite", "embedding_multiplier": 3.0, "attention_multiplier": 0.4,
            "residual_multiplier": 0.7, "logits_scaling": 2.0,
        }),
        Family::Glm4Moe => json!({
            "model_type": "glm4_moe", "attention_bias": true, "use_qk_norm": true,
            "moe_intermediate_size": sizes.mlp, "n_routed_experts": 4 * sizes.expert_pairs, "n_shared_experts": 1,
            "num_experts_per_tok": sizes.top_k, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        }),
        Family::Falcon => json!({
            "model_type": "falcon", "multi_query": true, "new_decoder_architecture": false, "parallel_attn": true,
            "alibi": false, "bias": false, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": sizes.tied,
        }),
        Family::Bloom => json!({
            "model_type": "bloom", "n_embed": hidden, "hidden_size": hidden, "n_layer": sizes.n_layers,
            "n_head": heads, "vocab_size": sizes.vocabulary, "layer_norm_epsilon": 1e-5,
        }),
        Family::Mixtral => json!({
            "model_type": "mixtral", "num_local_experts": 2 * sizes.expert_pairs, "num_experts_per_tok": sizes.top_k,
            "sliding_window": null,
        }),
        Family::GptOss => json!({
            "model_type": "gpt_oss", "head_dim": 2 * sizes.half_dim, "num_local_experts": 2 * sizes.expert_pairs,
            "num_experts_per_tok": sizes.top_k, "sliding_window": 4, "swiglu_limit": 7.0, "attention_bias": true,
        }),
        Family::DeepSeekV2 | Family::DeepSeekV3 => deepseek(family, sizes, heads),
    };
    if let (Some(all), Value::Object(own)) = (all.as_object_mut(), own) {
        all.extend(own);
    }
    all
}

/// Heads share nothing here, so that key heads and groups only multiply.
fn deepseek(family: Family, sizes: &ModelSizes, heads: u64) -> Value {
    let (version, scores, method) = if family == Family::DeepSeekV2 {
        ("deepseek_v2", "softmax", "group_limited_greedy")
    } else {
        ("deepseek_v3", "sigmoid", "noaux_tc")
    };
    json!({
        "model_type": version,
        "num_key_value_heads": heads,
        "moe_intermediate_size": sizes.mlp,
        "q_lora_rank": if family == Family::DeepSeekV2 { Value::Null } else { 6.into() },
        "kv_lora_rank": 4,
        "qk_nope_head_dim": 2 * sizes.half_dim,
        "qk_rope_head_dim": 2,
        "v_head_dim": sizes.half_dim + 1,
        "attention_bias": false,
        "n_routed_experts": 4 * sizes.expert_pairs,
        "n_shared_experts": 1,
        "num_experts_per_tok": sizes.top_k,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": method,
        "scoring_func": scores,
        "norm_topk_prob": family == Family::DeepSeekV3,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_small_models() {
        let sizes = ModelSizes {
            n_layers: 2,
            kv_heads: 2,
            group: 2,
            half_dim: 2,
            mlp: 8,
            expert_pairs: 1,
            top_k: 2,
            vocabulary: 17,
            tied: false,
            lora: 0,
            mtp: 0,
            tower: 0,
        };
        for family in ALL {
            let text = description(family, &sizes).to_string();
            let read = frontends::read_model("fuzz.json", &text);
            assert!(read.is_ok(), "{family:?}: {}", read.unwrap_err());
        }
    }
}
