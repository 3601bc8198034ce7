//! Parts that most families share: the stream, the heads, the windows.

use super::fields::{Fields, HEADS, LAYERS, SEQUENCE, VOCABULARY, WIDTH};
use crate::arch::{
    Arch, EmbeddingArch, HeadArch, HeadsAttention, LayerArch, Norm, Positions, Tying, runs_of,
};
use crate::input_error::InputError;

/// Names of the fields that differ between families.
pub(crate) const HIDDEN: &[&str] = &["hidden_size", "n_embd", "n_embed"];
pub(crate) const N_LAYERS: &[&str] = &["num_hidden_layers", "n_layer"];
pub(crate) const N_HEADS: &[&str] = &["num_attention_heads", "n_head"];
pub(crate) const MAX_POSITIONS: &[&str] = &["max_position_embeddings", "n_positions", "seq_length", "n_ctx"];

/// Sizes that every family has.
pub(crate) struct Sizes {
    pub(crate) vocab: u64,
    pub(crate) hidden: u64,
    pub(crate) n_layers: u64,
    pub(crate) heads: u64,
    pub(crate) sequence: u64,
}

/// Reads the sizes that every family has; `sequence` is the family's default length.
pub(crate) fn sizes(fields: &Fields<'_>, sequence: u64) -> Result<Sizes, InputError> {
    // Limits of a sequence may be several; the first is the model's.
    let limit = fields.find(MAX_POSITIONS).map_or(MAX_POSITIONS[0], |(name, _)| name);
    Ok(Sizes {
        vocab: fields.count(&["vocab_size"], VOCABULARY)?,
        hidden: fields.count(HIDDEN, WIDTH)?,
        n_layers: fields.count(N_LAYERS, LAYERS)?,
        heads: fields.count(N_HEADS, HEADS)?,
        sequence: fields.count_or(&[limit], SEQUENCE, sequence)?,
    })
}

/// Families whose key and value heads are as many as those of one of their models where the file does not say: a guess
/// for any other.
#[rustfmt::skip]
const SAY_KV_HEADS: [&str; 15] = [
    "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "mistral", "mixtral", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
];

/// The same of the length of a head.
const SAY_HEAD_DIM: [&str; 7] = ["gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss", "qwen3", "seed_oss"];

/// Length of a head: its own field, or the hidden size divided by the heads.
pub(crate) fn head_dim(fields: &Fields<'_>, sizes: &Sizes) -> Result<u64, InputError> {
    const HEAD_DIM: &[&str] = &["head_dim"];
    match fields.optional(HEAD_DIM, WIDTH)? {
        Some(dim) => Ok(dim),
        None if SAY_HEAD_DIM.contains(&fields.family) => fields.count(HEAD_DIM, WIDTH),
        None => divided_head_dim(fields, sizes),
    }
}

/// Length of a head where no field gives it.
pub(crate) fn divided_head_dim(fields: &Fields<'_>, sizes: &Sizes) -> Result<u64, InputError> {
    let (hidden, heads) = (sizes.hidden, sizes.heads);
    if hidden % heads != 0 {
        return Err(fields
            .fail(N_HEADS, format!("{heads} heads do not divide a hidden size of {hidden}"))
            .with_hint(
                "the hidden size must be a multiple of the number of heads, unless `head_dim` is given",
            ));
    }
    Ok(hidden / heads)
}

/// Attention with grouped queries and full rotation: the base that families vary.
pub(crate) fn grouped_attention(
    fields: &Fields<'_>,
    sizes: &Sizes,
    theta: f64,
) -> Result<HeadsAttention, InputError> {
    const KV_HEADS: &[&str] = &["num_key_value_heads"];
    let kv_heads = match SAY_KV_HEADS.contains(&fields.family) {
        true => fields.count(KV_HEADS, HEADS)?,
        false => fields.count_or(KV_HEADS, HEADS, sizes.heads)?,
    };
    if !sizes.heads.is_multiple_of(kv_heads) {
        let what = format!("{} query heads cannot share {kv_heads} key/value heads evenly", sizes.heads);
        return Err(fields
            .fail(KV_HEADS, what)
            .with_hint("num_attention_heads must be a multiple of num_key_value_heads"));
    }
    let head_dim = head_dim(fields, sizes)?;
    Ok(HeadsAttention {
        position: rotary(fields, head_dim, RotaryDefaults { theta, share: 1.0 })?,
        ..plain_attention(sizes.heads, kv_heads, head_dim)
    })
}

/// The same, whose projections all have biases where the file says so.
pub(crate) fn attention_with_bias(
    fields: &Fields<'_>,
    sizes: &Sizes,
    theta: f64,
) -> Result<HeadsAttention, InputError> {
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    Ok(HeadsAttention { qkv_bias: bias, out_bias: bias, ..grouped_attention(fields, sizes, theta)? })
}

/// Attention with grouped queries of which, where the file does not say, half of every head is rotated.
pub(crate) fn half_rotated_attention(
    fields: &Fields<'_>,
    sizes: &Sizes,
) -> Result<HeadsAttention, InputError> {
    let base = grouped_attention(fields, sizes, 1e4)?;
    let position = rotary(fields, base.head_dim, RotaryDefaults { theta: 1e4, share: 0.5 })?;
    Ok(HeadsAttention { position, ..base })
}

/// Attention without biases, norms, windows or positions.
pub(crate) fn plain_attention(heads: u64, kv_heads: u64, head_dim: u64) -> HeadsAttention {
    HeadsAttention {
        heads,
        kv_heads,
        head_dim,
        qkv_bias: false,
        out_bias: false,
        qk_norm: None,
        position: Positions::Embedded,
        sinks: false,
        window: None,
        softcap: None,
        scale: None,
    }
}

/// What a family rotates where the file does not say.
pub(crate) struct RotaryDefaults {
    pub(crate) theta: f64,
    /// Share of a head that is rotated.
    pub(crate) share: f64,
}

/// Rotation of the first part of every head.
pub(crate) fn rotary(
    fields: &Fields<'_>,
    head_dim: u64,
    defaults: RotaryDefaults,
) -> Result<Positions, InputError> {
    const SHARE: &[&str] = &["partial_rotary_factor", "rotary_pct"];
    let theta = fields.rope_number(&["rope_theta", "rotary_emb_base"], defaults.theta)?;
    let share = fields.rope_number(SHARE, defaults.share)?;
    let dims = (head_dim as f64 * share) as u64;
    if share == 1.0 && !dims.is_multiple_of(2) {
        let what = format!("a head of {head_dim} elements cannot be rotated, which takes pairs of them");
        return Err(fields
            .fail(&["head_dim", "hidden_size", "n_embd", "n_embed"], what)
            .with_hint("expected an even number"));
    }
    if dims == 0 || dims > head_dim || !dims.is_multiple_of(2) {
        let what = format!(
            "{share} of a head of {head_dim} is {dims} rotated elements, expected an even part of it"
        );
        return Err(fields.fail(SHARE, what));
    }
    Ok(Positions::Rotary { theta, dims })
}

/// Window of every layer where the family has one for all or for none.
pub(crate) fn uniform_window(fields: &Fields<'_>) -> Result<Option<u64>, InputError> {
    fields.optional(&["sliding_window"], SEQUENCE)
}

/// For every layer its window: of those that the file names, or else those of `slides`, and of none where it says that
/// there is no window.
pub(crate) fn layer_windows(
    fields: &Fields<'_>,
    (n_layers, default): (u64, u64),
    slides: impl Fn(u64) -> bool,
) -> Result<Vec<Option<u64>>, InputError> {
    let window = fields.window_or(default)?;
    let sliding = match fields.sliding_layers(n_layers)? {
        Some(said) => said,
        None => (0..n_layers).map(slides).collect(),
    };
    Ok(sliding.into_iter().map(|slides| window.filter(|_| slides)).collect())
}

/// Whether the head uses the embedding table.
pub(crate) fn tying(fields: &Fields<'_>, default: Tying) -> Result<Tying, InputError> {
    Ok(match fields.flag("tie_word_embeddings")? {
        Some(true) => Tying::Tied,
        Some(false) => Tying::Untied,
        None => default,
    })
}

/// A decoder whose layers `kind_of` describes, with nothing beside the table in the embedding.
pub(crate) fn decoder(sizes: &Sizes, norm: Norm, tying: Tying, kind_of: impl Fn(u64) -> LayerArch) -> Arch {
    let (kinds, runs) = runs_of(sizes.n_layers, kind_of);
    Arch {
        name: String::new(),
        vocab: sizes.vocab,
        hidden: sizes.hidden,
        sequence: sizes.sequence,
        embedding: EmbeddingArch { positions: None, norm: None, scale: None },
        kinds,
        runs,
        head: HeadArch { norm, tying, scale: None, softcap: None },
    }
}
