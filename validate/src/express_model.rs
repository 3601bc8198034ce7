//! The model of a row, in the form that any model is read from.

use frontends::capacity::limit_experts;
use frontends::mtp::predict_ahead;
use frontends::read_model;
use ir::graph::Model;
use serde_json::{Value, json};

use crate::express::Reason;
use crate::row::Row;

/// The model that a row trained.
pub(crate) fn model(row: &Row) -> Result<Model, Reason> {
    let config = match row.arch.as_str() {
        "gpt" => gpt(row)?,
        "llama" => llama(row)?,
        "moe" => experts(row)?,
        "moe-mla" => latent_experts(row)?,
        other => return Err(Reason::Model(format!("architecture {other}"))),
    };
    let mut model =
        read_model(&row.id, &config.to_string()).map_err(|error| Reason::Model(error.to_string()))?;
    if let Some(factor) = row.capacity {
        limit_experts(&mut model, factor);
    }
    if let Some(n_modules) = row.mtp_modules {
        predict_ahead(&mut model, n_modules).map_err(Reason::Model)?;
    }
    Ok(model)
}

fn gpt(row: &Row) -> Result<Value, Reason> {
    if row.kv_heads.is_some_and(|heads| heads != row.heads) || row.activation != "gelu" {
        return grouped(row);
    }
    if row.head_dim.is_some_and(|length| length * row.heads != row.hidden) {
        return Err(Reason::Model("heads that do not add up to the stream".into()));
    }
    Ok(json!({
        "model_type": "gpt2",
        "n_embd": row.hidden,
        "n_layer": row.layers,
        "n_head": row.heads,
        "n_positions": row.seq,
        "n_inner": row.ffn.unwrap_or(4 * row.hidden),
        "vocab_size": vocabulary(row)?,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        // Megatron's one table is head too; Alpa was run with a head of its own (alpa-projects/alpa
        // benchmark/alpa/benchmark_one_case_gpt_bert.py, `tie_word_embeddings`).
        "tie_word_embeddings": row.stack != "alpa",
    }))
}

/// Grouped heads, or another function than GELU: rotated heads and a head of its own, as such models have them.
fn grouped(row: &Row) -> Result<Value, Reason> {
    let (family, activation) = match row.activation.as_str() {
        "gelu" => ("starcoder2", "gelu_pytorch_tanh"),
        "relu2" => ("nemotron", "relu2"),
        other => return Err(Reason::Model(format!("activation {other} without a gate"))),
    };
    let mut config = llama(row)?;
    config["model_type"] = family.into();
    config["hidden_act"] = activation.into();
    config["norm_epsilon"] = 1e-5.into();
    Ok(config)
}

fn llama(row: &Row) -> Result<Value, Reason> {
    Ok(json!({
        "model_type": "llama",
        "hidden_size": row.hidden,
        "intermediate_size": stated(row.ffn, "the width of the MLP")?,
        "num_hidden_layers": row.layers,
        "num_attention_heads": row.heads,
        "num_key_value_heads": row.kv_heads.unwrap_or(row.heads),
        "head_dim": row.head_dim.unwrap_or(row.hidden / row.heads.max(1)),
        "vocab_size": vocabulary(row)?,
        "max_position_embeddings": row.seq,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": row.tied == Some(1),
        "hidden_act": "silu",
    }))
}

/// Experts behind ordinary attention, those of every token as one.
fn experts(row: &Row) -> Result<Value, Reason> {
    let inner = stated(row.expert_ffn, "the width of an expert")?;
    let shared = row.shared_experts.unwrap_or(0) * inner;
    let mut config = llama(row)?;
    config["model_type"] = if shared > 0 { "qwen2_moe" } else { "qwen3_moe" }.into();
    config["qkv_bias"] = false.into();
    config["num_experts"] = stated(row.experts, "the number of experts")?.into();
    config["num_experts_per_tok"] = stated(row.topk, "the experts of a token")?.into();
    config["moe_intermediate_size"] = inner.into();
    config["shared_expert_intermediate_size"] = shared.into();
    config["mlp_only_layers"] = (0..row.dense_layers.unwrap_or(0)).collect::<Vec<_>>().into();
    config["norm_topk_prob"] = true.into();
    Ok(config)
}

/// Experts behind latent attention, with the ranks and head parts of DeepSeek-V2 and V3, which the table's `moe-mla`
/// means, and with their groups: three of eight may be chosen from in V2, four in V3 (arXiv 2405.04434 section 2.2.2,
/// 2412.19437 section 4.2).
fn latent_experts(row: &Row) -> Result<Value, Reason> {
    let mut config = llama(row)?;
    config["model_type"] = "deepseek_v3".into();
    for (name, value) in [
        ("q_lora_rank", 1536),
        ("kv_lora_rank", 512),
        ("qk_nope_head_dim", 128),
        ("qk_rope_head_dim", 64),
        ("v_head_dim", 128),
        ("num_key_value_heads", row.heads),
        ("n_routed_experts", stated(row.experts, "the number of experts")?),
        ("num_experts_per_tok", stated(row.topk, "the experts of a token")?),
        ("n_group", 8),
        ("topk_group", if row.experts == Some(256) { 4 } else { 3 }),
        ("moe_intermediate_size", stated(row.expert_ffn, "the width of an expert")?),
        ("n_shared_experts", row.shared_experts.unwrap_or(0)),
        ("first_k_dense_replace", row.dense_layers.unwrap_or(0)),
    ] {
        config[name] = value.into();
    }
    Ok(config)
}

fn stated(cell: Option<u64>, what: &str) -> Result<u64, Reason> {
    cell.ok_or_else(|| Reason::Model(what.into()))
}

/// Megatron and its forks pad the vocabulary to a multiple of 128 per tensor parallel rank, so that its products are
/// aligned (NVIDIA/Megatron-LM, `make_vocab_size_divisible_by`).
fn vocabulary(row: &Row) -> Result<u64, Reason> {
    let step = if row.stack.starts_with("megatron") { 128 * row.tp.unwrap_or(1) } else { 1 };
    Ok(stated(row.vocab, "the vocabulary")?.next_multiple_of(step))
}
