//! Hugging Face `config.json` to the description of a transformer.
//!
//! One function per family; the names and defaults are those of the `transformers` library, old and new
//! (github.com/huggingface/transformers, `src/transformers/models/*/configuration_*.py`).

mod fields;
mod unread;
mod heads;
mod llama;
mod gemma;
mod glm;
mod gpt;
mod moe;
mod deepseek;
#[cfg(test)]
mod families_tests;

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
    ("gemma",       gemma::gemma),
    ("gemma2",      gemma::gemma2),
    ("gemma3_text", gemma::gemma3),
    ("glm4",        glm::glm4),
    ("glm4_moe",    glm::glm4_moe),
    ("gpt2",        gpt::gpt2),
    ("gpt_neox",    gpt::gpt_neox),
    ("gpt_oss",     moe::gpt_oss),
    ("granite",     llama::granite),
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
    ("seed_oss",    llama::seed_oss),
    ("smollm3",     llama::smollm3),
    ("starcoder2",  gpt::starcoder2),
];

/// Families whose models are those of another.
const SAME_AS: [(&str, &str); 1] = [("kimi_k2", "deepseek_v3")];

/// Names of the supported families.
pub fn families() -> Vec<&'static str> {
    let mut names: Vec<_> = FAMILIES.iter().map(|(name, _)| *name).collect();
    names.extend(SAME_AS.iter().map(|(name, _)| *name));
    names.sort_unstable();
    names
}

/// A family and who reads it, by its name or that of one whose models are the same.
fn family(name: &str) -> Option<(&'static str, Reader)> {
    let same = SAME_AS.iter().find(|(other, _)| *other == name).map_or(name, |(_, same)| same);
    FAMILIES.iter().copied().find(|(family, _)| *family == same)
}

/// What to do where a model beside others in one file would be read.
fn within(document: &Document<'_>) -> String {
    let inner = document.value.get("text_config").and_then(|inner| inner.get("model_type"));
    inner.and_then(Value::as_str).and_then(family).map_or_else(String::new, |(family, _)| {
        format!(
            "its `text_config` is of family `{family}`: as a file of its own it is read, and planned alone; "
        )
    })
}

/// Reads a configuration.
pub(crate) fn read_arch(document: &Document<'_>) -> Result<Arch, InputError> {
    let model_type = document.value.get("model_type").unwrap_or(&Value::Null);
    let Some((family, reader)) = model_type.as_str().and_then(family) else {
        let found = model_type.as_str().map_or_else(|| kind(model_type), |name| format!("`{}`", clip(name)));
        return Err(document
            .error_at("model_type", format!("family {found} is not supported"))
            .with_hint(format!("{}supported: {}; {NATIVE_HINT}", within(document), families().join(", "))));
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
