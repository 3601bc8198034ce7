//! Hugging Face `config.json` to the description of a transformer.
//!
//! One function per family; the names and defaults are those of the `transformers` library, old and new
//! (github.com/huggingface/transformers, `src/transformers/models/*/configuration_*.py`).

mod fields;
mod unread;
mod heads;
mod llama;
mod gpt;
mod moe;
mod deepseek;

use serde_json::Value;

use crate::arch::Arch;
use crate::count::n_parameters;
use crate::document::{Document, kind};
use crate::input_error::InputError;
use crate::scan::clip;
use fields::Fields;

/// What to do with a model that no family describes.
pub(crate) const NATIVE_HINT: &str =
    "describe the model natively instead: layers of operators with named dims, see docs/models.md";

/// No model comes near so many parameters; a count above it is a slip of the pen.
pub(crate) const MAX_PARAMETERS: u128 = 1_000_000_000_000_000;

type Reader = fn(&Fields<'_>) -> Result<Arch, InputError>;

/// Families and who reads them.
#[rustfmt::skip]
const FAMILIES: &[(&str, Reader)] = &[
    ("bloom",       gpt::bloom),
    ("deepseek_v2", deepseek::v2),
    ("deepseek_v3", deepseek::v3),
    ("falcon",      gpt::falcon),
    ("gemma2",      llama::gemma2),
    ("gpt2",        gpt::gpt2),
    ("gpt_neox",    gpt::gpt_neox),
    ("gpt_oss",     moe::gpt_oss),
    ("llama",       llama::llama),
    ("mistral",     llama::mistral),
    ("mixtral",     moe::mixtral),
    ("nemotron",    gpt::nemotron),
    ("opt",         gpt::opt),
    ("phi3",        llama::phi3),
    ("qwen2",       llama::qwen2),
    ("qwen2_moe",   moe::qwen2_moe),
    ("qwen3",       llama::qwen3),
    ("qwen3_moe",   moe::qwen3_moe),
    ("starcoder2",  gpt::starcoder2),
];

/// Names of the supported families.
pub fn families() -> Vec<&'static str> {
    FAMILIES.iter().map(|(name, _)| *name).collect()
}

/// Reads a configuration.
pub(crate) fn read_arch(document: &Document<'_>) -> Result<Arch, InputError> {
    let model_type = document.value.get("model_type").unwrap_or(&Value::Null);
    let known = model_type.as_str().and_then(|name| FAMILIES.iter().find(|(family, _)| *family == name));
    let Some((family, reader)) = known else {
        let found = model_type.as_str().map_or_else(|| kind(model_type), |name| format!("`{}`", clip(name)));
        return Err(document
            .error_at("model_type", format!("family {found} is not supported"))
            .with_hint(format!("supported: {}; {NATIVE_HINT}", families().join(", "))));
    };
    let fields = Fields { document, family };
    unread::refuse(&fields)?;
    let arch = reader(&fields)?;
    let n = n_parameters(&arch);
    if n > MAX_PARAMETERS {
        return Err(document
            .error(&[], format!("the model has {n} parameters, at most {MAX_PARAMETERS} are planned for")));
    }
    Ok(arch)
}
