//! The model of a row, in the form that any model is read from.

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
        _ => return Err(Reason::Experts),
    };
    read_model(&row.id, &config.to_string()).map_err(|error| Reason::Model(error.to_string()))
}

fn gpt(row: &Row) -> Result<Value, Reason> {
    if row.kv_heads.is_some_and(|heads| heads != row.heads) || row.activation != "gelu" {
        return Err(Reason::Model(format!("{} with grouped heads, without a gate", row.activation)));
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
    }))
}

fn llama(row: &Row) -> Result<Value, Reason> {
    Ok(json!({
        "model_type": "llama",
        "hidden_size": row.hidden,
        "intermediate_size": row.ffn.ok_or_else(|| Reason::Model("the width of the MLP".into()))?,
        "num_hidden_layers": row.layers,
        "num_attention_heads": row.heads,
        "num_key_value_heads": row.kv_heads.unwrap_or(row.heads),
        "head_dim": row.head_dim.unwrap_or(row.hidden / row.heads.max(1)),
        "vocab_size": vocabulary(row)?,
        "max_position_embeddings": row.seq,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": false,
        "hidden_act": "silu",
    }))
}

/// Megatron and its forks pad the vocabulary to a multiple of 128 per tensor parallel rank, so that its products are
/// aligned (NVIDIA/Megatron-LM, `make_vocab_size_divisible_by`).
fn vocabulary(row: &Row) -> Result<u64, Reason> {
    let stated = row.vocab.ok_or_else(|| Reason::Model("the vocabulary".into()))?;
    let step = if row.stack.starts_with("megatron") { 128 * row.tp.unwrap_or(1) } else { 1 };
    Ok(stated.next_multiple_of(step))
}
