//! A JSON file in memory: its value, and errors that point at a place in its text.

use std::borrow::Cow;

use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::Segment;

use crate::input_error::{InputError, Position};
use crate::scan::{Step, clip, first_double, locate, render};
use crate::sentence::plain_sentence;

/// Larger files are refused unread: no description of a model or a cluster comes near it.
pub const MAX_FILE_BYTES: usize = 16 << 20;

/// A parsed JSON object with its text.
pub(crate) struct Document<'a> {
    file: &'a str,
    text: &'a str,
    /// The object.
    pub(crate) value: Value,
}

impl<'a> Document<'a> {
    /// Parses a file that must hold one object.
    pub(crate) fn parse(file: &'a str, text: &'a str) -> Result<Self, InputError> {
        let whole = |what: String| InputError::whole(file, what);
        if text.len() > MAX_FILE_BYTES {
            return Err(whole(format!(
                "the file has {} bytes, at most {MAX_FILE_BYTES} are read",
                text.len()
            )));
        }
        if text.trim().is_empty() {
            return Err(whole("the file is empty, expected a JSON object".into()));
        }
        if text.starts_with('\u{feff}') {
            return Err(whole("the file starts with a byte order mark".into())
                .with_hint("save it as UTF-8 without byte order mark"));
        }
        let value: Value = serde_json::from_str(text).map_err(|error| syntax(file, text, &error))?;
        let document = Self { file, text, value };
        if !document.value.is_object() {
            let found = kind(&document.value);
            return Err(document.error(&[], format!("expected a JSON object, found {found}")));
        }
        key_twice(file, text)?;
        Ok(document)
    }

    /// A fault of the value at a path.
    pub(crate) fn error(&self, path: &[Step<'_>], what: String) -> InputError {
        InputError {
            file: self.file.into(),
            position: Some(locate(self.text, path)),
            place: render(path),
            what,
            hint: None,
        }
    }

    /// A fault of the value of a top-level key.
    pub(crate) fn error_at(&self, name: &str, what: String) -> InputError {
        self.error(&[key(name)], what)
    }

    /// Reads a part of the value into a type; errors name the place inside it.
    pub(crate) fn typed<T: DeserializeOwned>(&self, at: &[Step<'_>], value: &Value) -> Result<T, InputError> {
        serde_path_to_error::deserialize(value).map_err(|error| {
            let mut path: Vec<Step<'_>> = at.to_vec();
            path.extend(error.path().iter().filter_map(step));
            self.error(&path, clip_sentence(&plain_sentence(&error.inner().to_string())))
        })
    }
}

/// Name of what a file describes: its own name without folders and ending.
pub(crate) fn file_stem(file: &str) -> String {
    let name = file.rsplit(['/', '\\']).next().unwrap_or(file);
    clip(name.strip_suffix(".json").unwrap_or(name))
}

/// A step to the value of a key.
pub(crate) fn key(name: &str) -> Step<'_> {
    Step::Key(Cow::Borrowed(name))
}

/// Refuses a JSON text of which some object has a key twice: readers take one of the two, and do not say which.
///
/// # Errors
/// Where the second of them stands.
pub fn key_twice(file: &str, text: &str) -> Result<(), InputError> {
    let Some((path, position)) = first_double(text) else { return Ok(()) };
    let what = "this key is in its object twice".into();
    Err(InputError { file: file.into(), position: Some(position), place: render(&path), what, hint: None })
}

/// What a JSON value is, for errors.
pub(crate) fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(truth) => truth.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("\"{}\"", clip(text)),
        Value::Array(_) => "an array".into(),
        Value::Object(_) => "an object".into(),
    }
}

fn step(segment: &Segment) -> Option<Step<'_>> {
    match segment {
        Segment::Map { key } => Some(Step::Key(Cow::Borrowed(key))),
        Segment::Seq { index } => Some(Step::Index(*index)),
        Segment::Enum { .. } | Segment::Unknown => None,
    }
}

/// serde's sentences may quote a whole string of the file.
fn clip_sentence(text: &str) -> String {
    const SHOWN: usize = 400;
    let mut short: String = text.chars().take(SHOWN).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

fn syntax(file: &str, text: &str, error: &serde_json::Error) -> InputError {
    let full = error.to_string();
    let what = full.split(" at line ").next().unwrap_or(&full).to_lowercase();
    let lines = text.lines().count().max(1);
    let position = Position { line: error.line().clamp(1, lines), column: error.column().max(1) };
    let is_cut = error.is_eof();
    let is_deep = what.contains("recursion limit");
    let hint = if is_cut {
        Some("the file ends in the middle: is it truncated?".into())
    } else if is_deep {
        Some("values may be nested at most 127 deep".into())
    } else {
        Some("JSON has no comments, no trailing commas, no single quotes and no NaN or Infinity".into())
    };
    let what = if is_deep { "nested too deep".to_owned() } else { format!("not JSON: {what}") };
    InputError { file: file.into(), position: Some(position), place: String::new(), what, hint }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(text: &str) -> String {
        Document::parse("f.json", text).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn texts_that_are_no_object_are_refused() {
        assert!(fault("").contains("the file is empty"));
        assert!(fault(" \n").contains("the file is empty"));
        assert!(fault("\u{feff}{}").contains("byte order mark"));
        assert_eq!(fault("[1]"), "f.json:1:1: expected a JSON object, found an array");
        assert!(fault("{\"a\": NaN}").contains(": not JSON: expected value"), "{}", fault("{\"a\": NaN}"));
        assert!(fault("{\"a\": 1").contains("truncated"));
        assert!(fault("{\"a\": 1e999}").contains("not JSON: number out of range"));
        assert!(fault(&"[".repeat(100_000)).contains("nested too deep"));
        assert!(fault(&" ".repeat(MAX_FILE_BYTES + 1)).contains("at most"));
        assert_eq!(fault("{\"a\": 1,\n \"a\": 2}"), "f.json:2:7: a: this key is in its object twice");
    }

    #[test]
    fn a_type_error_names_its_place() {
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Inner {
            #[expect(dead_code, reason = "only read from JSON")]
            n: u64,
        }
        let document = Document::parse("f.json", "{\"a\": [{\"n\": 1},\n {\"n\": -2}]}").unwrap();
        let error = document.typed::<Vec<Inner>>(&[key("a")], &document.value["a"]).unwrap_err();
        assert_eq!(error.to_string(), "f.json:2:8: a[1].n: expected a whole number from 0, found `-2`");
        let document = Document::parse("f.json", "{\"a\": [{\"n\": 1},\n {\"m\": -2}]}").unwrap();
        let error = document.typed::<Vec<Inner>>(&[key("a")], &document.value["a"]).unwrap_err();
        assert_eq!(error.to_string(), "f.json:2:8: a[1].m: unknown field `m`, expected `n`");
    }
}
