//! Fields that change a model and that no reader of its family knows: refused, for the model that is planned would be another.

use serde_json::Value;

use super::NATIVE_HINT;
use super::fields::Fields;
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
}

/// A field, what it may say, and the families whose readers know it.
type Unread = (&'static str, Harmless, &'static [&'static str]);

/// Families whose readers know compressed keys and values, and experts that every token visits.
const COMPRESSED: [&str; 2] = ["deepseek_v2", "deepseek_v3"];

/// Families whose readers know how many experts there are, by any of the names.
const MIXTURES: [&str; 6] = ["deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"];

#[rustfmt::skip]
const UNREAD: [Unread; 31] = [
    ("add_cross_attention",     Harmless::Off,    &[]),
    ("alibi",                   Harmless::Off,    &["falcon"]),
    ("attention_chunk_size",    Harmless::Absent, &[]),
    ("attention_multiplier",    Harmless::One,    &[]),
    ("attn_logit_softcapping",  Harmless::Absent, &["gemma2"]),
    ("audio_config",            Harmless::Absent, &[]),
    ("block_configs",           Harmless::Absent, &[]),
    ("clip_qkv",                Harmless::Absent, &[]),
    ("cross_attention_layers",  Harmless::Absent, &[]),
    ("draft_vocab_size",        Harmless::Absent, &[]),
    ("embedding_multiplier",    Harmless::One,    &[]),
    ("final_logit_softcapping", Harmless::Absent, &["gemma2"]),
    ("index_head_dim",          Harmless::Absent, &[]),
    ("index_n_heads",           Harmless::Absent, &[]),
    ("index_topk",              Harmless::Absent, &[]),
    ("is_causal",               Harmless::On,     &[]),
    ("is_encoder_decoder",      Harmless::Off,    &[]),
    ("kv_lora_rank",            Harmless::Absent, &COMPRESSED),
    ("lm_head_bias",            Harmless::Off,    &[]),
    ("logits_scaling",          Harmless::One,    &[]),
    ("mm_vision_tower",         Harmless::Absent, &[]),
    ("n_routed_experts",        Harmless::One,    &MIXTURES),
    ("n_shared_experts",        Harmless::Absent, &COMPRESSED),
    ("no_rope_layers",          Harmless::Absent, &[]),
    ("num_experts",             Harmless::One,    &MIXTURES),
    ("num_kv_shared_layers",    Harmless::Absent, &[]),
    ("num_local_experts",       Harmless::One,    &MIXTURES),
    ("residual_multiplier",     Harmless::One,    &[]),
    ("text_config",             Harmless::Absent, &[]),
    ("use_qk_norm",             Harmless::Off,    &[]),
    ("vision_config",           Harmless::Absent, &[]),
];

/// How the name of an architecture with the head of a language model ends.
const LANGUAGE_HEADS: [&str; 2] = ["ForCausalLM", "LMHeadModel"];

/// Families whose readers know which layers see a window.
const KNOW_LAYER_TYPES: [&str; 4] = ["gemma2", "gpt_oss", "qwen2", "qwen3"];

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
        };
        if !is_harmless && !families.contains(&fields.family) {
            return Err(unread(fields, name, kind(value)));
        }
    }
    let architectures = fields.document.value.get("architectures").and_then(Value::as_array);
    let names = architectures.into_iter().flatten().filter_map(Value::as_str);
    let is_other = |name: &&str| !LANGUAGE_HEADS.iter().any(|end| name.ends_with(end));
    if let Some(other) = names.into_iter().find(is_other) {
        return Err(unread(fields, "architectures", format!("\"{}\"", clip(other))));
    }
    layer_types(fields)
}

/// Refuses layers that are none of the family's.
fn layer_types(fields: &Fields<'_>) -> Result<(), InputError> {
    let list = fields.document.value.get("layer_types").and_then(Value::as_array);
    let Some(list) = list.filter(|_| !KNOW_LAYER_TYPES.contains(&fields.family)) else { return Ok(()) };
    let is_usual = |item: &&Value| item.as_str() == Some("full_attention");
    let windows = |item: &&Value| item.as_str() == Some("sliding_attention");
    let all_windows = ALL_ALIKE.contains(&fields.family) && list.iter().all(|item| windows(&item));
    match list.iter().find(|item| !is_usual(item)) {
        Some(other) if !all_windows => Err(unread(fields, "layer_types", kind(other))),
        Some(_) | None => Ok(()),
    }
}

fn unread(fields: &Fields<'_>, name: &str, found: String) -> InputError {
    fields
        .fail(
            &[name],
            format!("{found} changes the model, and is not supported for family `{}`", fields.family),
        )
        .with_hint(NATIVE_HINT)
}
