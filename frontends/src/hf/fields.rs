//! Typed reading of a configuration's fields, each under any of the names it has had, each in a sane range.

use ir::op::Activation;
use serde_json::Value;

use crate::document::{Document, kind};
use crate::input_error::InputError;
use crate::scan::clip;

/// Lowest and highest value of a whole number, both allowed.
#[derive(Clone, Copy)]
pub(crate) struct Limit(pub(crate) u64, pub(crate) u64);

/// Width of a stream, of an inner layer, of a head: the largest models have 53,248.
pub(crate) const WIDTH: Limit = Limit(1, 1 << 20);
/// Heads of one layer.
pub(crate) const HEADS: Limit = Limit(1, 1 << 14);
/// Layers.
pub(crate) const LAYERS: Limit = Limit(1, 10_000);
/// Words of a vocabulary.
pub(crate) const VOCABULARY: Limit = Limit(2, 1 << 24);
/// Experts of one layer.
pub(crate) const EXPERTS: Limit = Limit(1, 1 << 14);
/// Tokens of a sequence.
pub(crate) const SEQUENCE: Limit = Limit(1, 1 << 28);

/// The fields of one configuration.
pub(crate) struct Fields<'a> {
    pub(crate) document: &'a Document<'a>,
    pub(crate) family: &'a str,
}

/// The names of one field, the preferred one first.
type Names<'n> = &'n [&'n str];

impl<'a> Fields<'a> {
    /// The first of the names that is present and not null.
    pub(super) fn find<'n>(&self, names: Names<'n>) -> Option<(&'n str, &'a Value)> {
        let present = |name: &&'n str| self.document.value.get(*name).filter(|value| !value.is_null());
        names.iter().find_map(|name| present(name).map(|value| (*name, value)))
    }

    /// A fault of a field, under the name it has in this file.
    pub(crate) fn fail(&self, names: Names<'_>, what: String) -> InputError {
        let name = self.find(names).map_or(names[0], |(name, _)| name);
        self.document.error_at(name, what)
    }

    fn missing(&self, names: Names<'_>) -> InputError {
        let known = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" or ");
        self.document
            .error(&[], format!("{known} is missing"))
            .with_hint(format!("a configuration of family `{}` must have it", self.family))
    }

    /// A whole number that may be absent; under two names it is the same.
    pub(crate) fn optional(&self, names: Names<'_>, limit: Limit) -> Result<Option<u64>, InputError> {
        let Some((name, value)) = self.find(names) else { return Ok(None) };
        let others = names.chunks(1).filter_map(|other| self.find(other));
        if let Some((other, its)) = others.into_iter().find(|(_, its)| *its != value) {
            let what = format!("{}, and `{name}`, which is the same, is {}", kind(its), kind(value));
            return Err(self.document.error_at(other, what));
        }
        let Limit(low, high) = limit;
        match value.as_u64() {
            Some(n) if n >= low && n <= high => Ok(Some(n)),
            _ => {
                let found = kind(value);
                Err(self.fail(names, format!("expected a whole number from {low} to {high}, found {found}")))
            }
        }
    }

    /// A whole number that must be there.
    pub(crate) fn count(&self, names: Names<'_>, limit: Limit) -> Result<u64, InputError> {
        self.optional(names, limit)?.ok_or_else(|| self.missing(names))
    }

    /// A whole number, or `null` where the model has none; which of the two must be said.
    pub(crate) fn count_or_null(&self, name: &str, limit: Limit) -> Result<Option<u64>, InputError> {
        match self.document.value.get(name) {
            None => {
                let hint =
                    format!("a configuration of family `{}` must say it, `null` for none", self.family);
                Err(self.document.error(&[], format!("`{name}` is missing")).with_hint(hint))
            }
            Some(_) => self.optional(&[name], limit),
        }
    }

    /// A window of attention: without a word the family's own, and none where it is `null`.
    pub(crate) fn window_or(&self, default: u64) -> Result<Option<u64>, InputError> {
        match self.document.value.get("sliding_window") {
            None => Ok(Some(default)),
            Some(_) => self.optional(&["sliding_window"], SEQUENCE),
        }
    }

    /// A positive number: without a word the family's own, and none where it is `null`.
    pub(crate) fn number_or_null(&self, name: &str, default: f64) -> Result<Option<f64>, InputError> {
        match self.document.value.get(name) {
            None => Ok(Some(default)),
            Some(_) => self.optional_number(&[name]),
        }
    }

    /// A whole number or its default.
    pub(crate) fn count_or(&self, names: Names<'_>, limit: Limit, default: u64) -> Result<u64, InputError> {
        Ok(self.optional(names, limit)?.unwrap_or(default))
    }

    /// A positive number that may be absent.
    pub(crate) fn optional_number(&self, names: Names<'_>) -> Result<Option<f64>, InputError> {
        let Some((_, value)) = self.find(names) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x > 0.0 && x < 1e12 => Ok(Some(x)),
            _ => Err(self.fail(names, format!("expected a positive number, found {}", kind(value)))),
        }
    }

    /// A positive number or its default.
    pub(crate) fn number_or(&self, names: Names<'_>, default: f64) -> Result<f64, InputError> {
        Ok(self.optional_number(names)?.unwrap_or(default))
    }

    /// True or false, where the field is present.
    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, InputError> {
        match self.find(&[name]) {
            None => Ok(None),
            Some((_, Value::Bool(flag))) => Ok(Some(*flag)),
            Some((_, other)) => {
                Err(self.fail(&[name], format!("expected true or false, found {}", kind(other))))
            }
        }
    }

    /// Refuses a switch that is on and would change the model in a way that is not supported.
    pub(crate) fn must_be_off(&self, name: &str) -> Result<(), InputError> {
        if self.flag(name)? == Some(true) { Err(self.unsupported(name, "false")) } else { Ok(()) }
    }

    /// Refuses a switch that is off and would change the model in a way that is not supported.
    pub(crate) fn must_be_on(&self, name: &str) -> Result<(), InputError> {
        if self.flag(name)? == Some(false) { Err(self.unsupported(name, "true")) } else { Ok(()) }
    }

    fn unsupported(&self, name: &str, expected: &str) -> InputError {
        self.fail(&[name], format!("only {expected} is supported for family `{}`", self.family))
            .with_hint(super::NATIVE_HINT)
    }

    /// A text that may be absent.
    pub(crate) fn text(&self, names: Names<'_>) -> Result<Option<&'a str>, InputError> {
        match self.find(names) {
            None => Ok(None),
            Some((_, Value::String(text))) => Ok(Some(text)),
            Some((_, other)) => Err(self.fail(names, format!("expected a string, found {}", kind(other)))),
        }
    }

    /// The name of an activation function, or its default.
    pub(crate) fn activation(&self, names: Names<'_>, default: Activation) -> Result<Activation, InputError> {
        let Some(text) = self.text(names)? else { return Ok(default) };
        match text {
            "silu" | "swish" | "swiglu" => Ok(Activation::Silu),
            "gelu" => Ok(Activation::Gelu),
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
            "relu" => Ok(Activation::Relu),
            "relu2" => Ok(Activation::ReluSquared),
            other => Err(self
                .fail(names, format!("activation \"{}\" is not known", clip(other)))
                .with_hint("known: silu, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, relu, relu2")),
        }
    }

    /// A list of whole numbers, empty where absent.
    pub(crate) fn list(&self, name: &str, limit: Limit) -> Result<Vec<u64>, InputError> {
        let Some((_, value)) = self.find(&[name]) else { return Ok(Vec::new()) };
        let fault = || self.fail(&[name], format!("expected a list of whole numbers up to {}", limit.1));
        let items = value.as_array().ok_or_else(fault)?;
        items.iter().map(|item| item.as_u64().filter(|&n| n <= limit.1).ok_or_else(fault)).collect()
    }

    /// For every layer whether it sees only a window, from `layer_types`; `None` where the field is absent.
    pub(crate) fn sliding_layers(&self, n_layers: u64) -> Result<Option<Vec<bool>>, InputError> {
        let names = &["layer_types"];
        let Some((_, value)) = self.find(names) else { return Ok(None) };
        let items = value
            .as_array()
            .ok_or_else(|| self.fail(names, format!("expected a list, found {}", kind(value))))?;
        if items.len() as u64 != n_layers {
            let what = format!("{} entries for {n_layers} layers", items.len());
            return Err(self.fail(names, what));
        }
        let sliding = |item: &Value| match item.as_str() {
            Some("sliding_attention") => Ok(true),
            Some("full_attention") => Ok(false),
            _ => Err(self
                .fail(names, format!("layer type {} is not supported", kind(item)))
                .with_hint("known: full_attention, sliding_attention")),
        };
        items.iter().map(sliding).collect::<Result<_, _>>().map(Some)
    }

    /// The base of the rotation in layers of a type: under its name, or, in newer files, inside the type's own
    /// `rope_parameters`.
    pub(crate) fn rope_theta_of(
        &self,
        layer_type: &str,
        name: &str,
        default: f64,
    ) -> Result<f64, InputError> {
        let all = self.document.value.get("rope_parameters").and_then(|all| all.get(layer_type));
        let Some(value) = all.and_then(|own| own.get("rope_theta")).filter(|value| !value.is_null()) else {
            return self.rope_number(&[name], default);
        };
        self.rope_value("rope_theta", value)
    }

    /// A number that stands alone or, in newer files, inside `rope_parameters`.
    pub(crate) fn rope_number(&self, names: Names<'_>, default: f64) -> Result<f64, InputError> {
        if let Some(found) = self.optional_number(names)? {
            return Ok(found);
        }
        let within = |outer: &str| {
            let parameters = self.document.value.get(outer)?;
            names.iter().find_map(|name| parameters.get(*name)).filter(|value| !value.is_null())
        };
        match within("rope_parameters").or_else(|| within("rope_scaling")) {
            Some(value) => self.rope_value(names[0], value),
            None => Ok(default),
        }
    }

    fn rope_value(&self, name: &str, value: &Value) -> Result<f64, InputError> {
        let what = || format!("expected a positive `{name}`, found {}", kind(value));
        let is_sane = |x: &f64| *x > 0.0 && *x < 1e12;
        value.as_f64().filter(is_sane).ok_or_else(|| self.fail(&["rope_parameters"], what()))
    }
}
