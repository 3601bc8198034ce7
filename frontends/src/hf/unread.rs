//! Fields that change a model and that no reader of its family knows: refused, for the model that is planned would be
//! another.

use serde_json::{Map, Value};

use super::NATIVE_HINT;
use super::fields::{Fields, LAYERS, Limit};
use super::heads::N_LAYERS;
use super::moe::N_EXPERTS;
use crate::document::kind;
use crate::input_error::InputError;
use crate::scan::clip;

/// What a field may say without changing the model.
#[derive(Clone, Copy)]
enum Harmless {
    /// Nothing.
    Absent,
    /// That a switch is off.
    Off,
    /// That a switch is on.
    On,
    /// That there is no more than one.
    One,
    /// None: zero, or a list or an object without anything.
    Zero,
}

/// A field, what it may say, and the families whose readers know it.
type Unread = (&'static str, Harmless, &'static [&'static str]);

/// Families whose readers know compressed keys and values.
const COMPRESSED: [&str; 2] = ["deepseek_v2", "deepseek_v3"];

/// Families whose readers know dense first layers, and experts that every token visits.
const SHARING: [&str; 3] = ["deepseek_v2", "deepseek_v3", "glm4_moe"];

/// Families whose readers know which layers have experts.
const QWEN_MIXTURES: [&str; 2] = ["qwen2_moe", "qwen3_moe"];

/// Families whose readers know how many experts there are, by any of the names.
const MIXTURES: [&str; 7] =
    ["deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"];

#[rustfmt::skip]
const UNREAD: [Unread; 45] = [
    ("add_cross_attention",     Harmless::Off,    &[]),
    ("alibi",                   Harmless::Off,    &["falcon"]),
    ("attention_chunk_size",    Harmless::Absent, &[]),
    ("attention_multiplier",    Harmless::One,    &["granite"]),
    ("attn_layer_period",       Harmless::Absent, &[]),
    ("attn_logit_softcapping",  Harmless::Absent, &["gemma2", "gemma3_text"]),
    ("audio_config",            Harmless::Absent, &[]),
    ("block_configs",           Harmless::Absent, &[]),
    ("clip_qkv",                Harmless::Absent, &[]),
    ("cross_attention_layers",  Harmless::Absent, &[]),
    ("decoder_sparse_step",     Harmless::One,    &QWEN_MIXTURES),
    ("draft_vocab_size",        Harmless::Absent, &[]),
    ("embedding_multiplier",    Harmless::One,    &["granite"]),
    ("final_logit_softcapping", Harmless::Absent, &["gemma2", "gemma3_text"]),
    ("first_k_dense_replace",   Harmless::Zero,   &SHARING),
    ("hybrid_override_pattern", Harmless::Absent, &[]),
    ("index_head_dim",          Harmless::Absent, &[]),
    ("index_n_heads",           Harmless::Absent, &[]),
    ("index_topk",              Harmless::Absent, &[]),
    ("interleave_moe_layer_step", Harmless::One,  &[]),
    ("is_causal",               Harmless::On,     &[]),
    ("is_encoder_decoder",      Harmless::Off,    &[]),
    ("kv_lora_rank",            Harmless::Absent, &COMPRESSED),
    ("lm_head_bias",            Harmless::Off,    &[]),
    ("logits_scaling",          Harmless::One,    &["granite"]),
    ("mlp_layer_types",         Harmless::Absent, &[]),
    ("mlp_only_layers",         Harmless::Zero,   &QWEN_MIXTURES),
    ("mm_vision_tower",         Harmless::Absent, &[]),
    ("moe_layer_freq",          Harmless::One,    &SHARING),
    ("n_routed_experts",        Harmless::One,    &MIXTURES),
    ("n_shared_experts",        Harmless::Absent, &SHARING),
    ("no_rope_layers",          Harmless::Absent, &["smollm3"]),
    ("num_experts",             Harmless::One,    &MIXTURES),
    ("num_kv_heads",            Harmless::Absent, &["falcon"]),
    ("num_kv_shared_layers",    Harmless::Absent, &[]),
    ("num_local_experts",       Harmless::One,    &MIXTURES),
    ("pruned_heads",            Harmless::Zero,   &[]),
    ("qk_layernorm",            Harmless::Off,    &[]),
    ("residual_multiplier",     Harmless::One,    &["granite"]),
    ("shared_expert_intermediate_size", Harmless::Zero, &["qwen2_moe"]),
    ("ssm_cfg",                 Harmless::Absent, &[]),
    ("text_config",             Harmless::Absent, &[]),
    ("use_bidirectional_attention", Harmless::Off, &[]),
    ("use_qk_norm",             Harmless::Off,    &["glm4_moe", "qwen3", "qwen3_moe"]),
    ("vision_config",           Harmless::Absent, &[]),
];

/// How the name of an architecture with the head of a language model ends.
const LANGUAGE_HEADS: [&str; 2] = ["ForCausalLM", "LMHeadModel"];

/// How the name of a family ends that is the language model of one with other models beside it.
const LANGUAGE_PART: &str = "_text";

/// An architecture that once had another name than its family, in lower case.
const FORMER_NAME: (&str, &str) = ("rw", "falcon");

/// Families whose readers know which layers see a window.
const KNOW_LAYER_TYPES: [&str; 5] = ["gemma2", "gemma3_text", "gpt_oss", "qwen2", "qwen3"];

/// Families of whose layers all see a window, or none.
const ALL_ALIKE: [&str; 4] = ["mistral", "mixtral", "phi3", "starcoder2"];

/// Refuses what would change the model unseen.
pub(super) fn refuse(fields: &Fields<'_>) -> Result<(), InputError> {
    for (name, harmless, families) in UNREAD {
        let Some((_, value)) = fields.find(&[name]) else { continue };
        let is_harmless = match harmless {
            Harmless::Absent => false,
            Harmless::Off => value.as_bool() == Some(false),
            Harmless::On => value.as_bool() == Some(true),
            Harmless::One => value.as_f64().is_some_and(|value| value == 1.0 || value == 0.0),
            Harmless::Zero => {
                value.as_f64() == Some(0.0)
                    || value.as_array().is_some_and(Vec::is_empty)
                    || value.as_object().is_some_and(Map::is_empty)
            }
        };
        if !is_harmless && !families.contains(&fields.family) {
            return Err(unread(fields, name, kind(value)));
        }
    }
    let architectures = fields.document.value.get("architectures");
    let list = architectures.and_then(Value::as_array).into_iter().flatten();
    let names = list.chain(architectures.filter(|one| one.is_string())).filter_map(Value::as_str);
    let is_other = |name: &&str| !is_of_family(name, fields.family);
    if let Some(other) = names.into_iter().find(is_other) {
        return Err(unread(fields, "architectures", format!("\"{}\"", clip(other))));
    }
    // Other formats of numbers keep the layers as they are; this one has layers of its own.
    let quantized = fields.document.value.get("quantization_config");
    let method = quantized.and_then(|config| config.get("quant_method")).and_then(Value::as_str);
    if method == Some("bitnet") {
        return Err(unread(fields, "quantization_config", "\"bitnet\"".into()));
    }
    fields.optional(N_EXPERTS, Limit(0, u64::MAX))?;
    layer_types(fields)
}

/// Whether an architecture is the language model of a family, whose name it has in capitals of some kind.
fn is_of_family(architecture: &str, family: &str) -> bool {
    let body = LANGUAGE_HEADS.iter().find_map(|end| architecture.strip_suffix(end));
    let own = family.strip_suffix(LANGUAGE_PART).unwrap_or(family).replace('_', "");
    body.map(str::to_ascii_lowercase).is_some_and(|body| body == own || (&*body, family) == FORMER_NAME)
}

/// Refuses layers that are none of the family's.
fn layer_types(fields: &Fields<'_>) -> Result<(), InputError> {
    let list = fields.document.value.get("layer_types").and_then(Value::as_array);
    let Some(list) = list.filter(|_| !KNOW_LAYER_TYPES.contains(&fields.family)) else { return Ok(()) };
    let is_usual = |item: &&Value| item.as_str() == Some("full_attention");
    let windows = |item: &&Value| item.as_str() == Some("sliding_attention");
    let all_windows = ALL_ALIKE.contains(&fields.family) && list.iter().all(|item| windows(&item));
    if let Some(other) = list.iter().find(|item| !is_usual(item)).filter(|_| !all_windows) {
        return Err(unread(fields, "layer_types", kind(other)));
    }
    let n_layers = fields.optional(N_LAYERS, LAYERS)?;
    n_layers.filter(|n_layers| *n_layers != list.len() as u64).map_or(Ok(()), |n_layers| {
        Err(fields.fail(&["layer_types"], format!("{} entries for {n_layers} layers", list.len())))
    })
}

fn unread(fields: &Fields<'_>, name: &str, found: String) -> InputError {
    fields
        .fail(
            &[name],
            format!("{found} changes the model, and is not supported for family `{}`", fields.family),
        )
        .with_hint(NATIVE_HINT)
}
