//! Words of the text form: how a line is cut into words, and how a word is written so that it is read back.
//!
//! Words are separated by spaces. A name that would not survive that is written as a JSON string; a JSON value may
//! stand after `key=`; brackets and quotes hold together what they enclose.

use serde_json::Value;

use super::TextError;
use crate::program::StateHome;

/// A line with its number, for errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line<'a> {
    /// Number in the text, from 1.
    pub(crate) number: usize,
    /// Its words.
    pub(crate) words: Vec<&'a str>,
}

impl Line<'_> {
    /// An error at this line.
    pub(crate) fn error(&self, what: impl Into<String>) -> TextError {
        TextError { line: self.number, what: what.into() }
    }

    /// The word at a position, read as a name.
    pub(crate) fn name(&self, at: usize, what: &str) -> Result<String, TextError> {
        let word = self.words.get(at).ok_or_else(|| self.error(format!("expected {what}, found the end")))?;
        read_name(word).ok_or_else(|| self.error(format!("expected {what}, found `{word}`")))
    }
}

/// The word of a home behind others; nothing for the device's.
pub(crate) fn home_text(home: StateHome) -> String {
    if home.is_device() { String::new() } else { format!(" {}", home.word()) }
}

/// Cuts a text into lines of words; empty lines and what follows `#` at the start of a word are left out.
pub(crate) fn lines(text: &str) -> Result<Vec<Line<'_>>, TextError> {
    let numbered = text.lines().enumerate().map(|(i, line)| (i + 1, line));
    let cut = numbered.map(|(number, line)| Ok(Line { number, words: words(line, number)? }));
    let all: Result<Vec<Line<'_>>, TextError> = cut.collect();
    Ok(all?.into_iter().filter(|line| !line.words.is_empty()).collect())
}

fn words(line: &str, number: usize) -> Result<Vec<&str>, TextError> {
    let mut list = Vec::new();
    let mut start: Option<usize> = None;
    let (mut depth, mut quoted, mut escaped) = (0_u32, false, false);
    for (at, c) in line.char_indices() {
        if quoted {
            (quoted, escaped) = (escaped || c != '"', !escaped && c == '\\');
            continue;
        }
        if start.is_none() && c == '#' {
            return Ok(list);
        }
        if depth == 0 && c.is_whitespace() {
            list.extend(start.take().map(|from| &line[from..at]));
            continue;
        }
        start.get_or_insert(at);
        match c {
            '"' => quoted = true,
            '{' | '[' => depth += 1,
            '}' | ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    if quoted || depth > 0 {
        return Err(TextError { line: number, what: "a quote or a bracket is not closed".into() });
    }
    list.extend(start.map(|from| &line[from..]));
    Ok(list)
}

/// Writes a name as one word.
pub(crate) fn write_name(name: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '/');
    let taken = name == "->" || name == "-";
    if !name.is_empty() && !taken && name.chars().all(plain) {
        return name.to_owned();
    }
    Value::from(name).to_string()
}

/// Reads what [`write_name`] wrote.
pub(crate) fn read_name(word: &str) -> Option<String> {
    if !word.starts_with('"') {
        return Some(word.to_owned());
    }
    serde_json::from_str(word).ok()
}

/// Writes fields as `key=json` words, each after a space.
pub(crate) fn write_fields<'a>(fields: impl IntoIterator<Item = (&'a String, &'a Value)>) -> String {
    fields.into_iter().map(|(key, value)| format!(" {key}={value}")).collect()
}

/// Reads a `key=json` word; `None` for another word.
pub(crate) fn read_field(word: &str) -> Option<(String, Value)> {
    let (key, text) = word.split_once('=')?;
    let tidy = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let value = serde_json::from_str(text).ok()?;
    tidy.then(|| (key.to_owned(), value))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quotes_and_brackets_hold_together() {
        let line = lines("op \"a b\" rope{\"x\":[1, 2]} -> y # remark\n\n").unwrap();
        assert_eq!(line.len(), 1);
        assert_eq!(line[0].words, ["op", "\"a b\"", "rope{\"x\":[1, 2]}", "->", "y"]);
        assert_eq!(lines("a\nb \"c").unwrap_err().line, 2);
    }

    proptest! {
        #[test]
        fn any_name_survives(name in ".*") {
            let word = write_name(&name);
            let text = format!("op {word} end");
            if !name.contains(['\n', '\r']) {
                let line = lines(&text).unwrap();
                prop_assert_eq!(line[0].words.len(), 3);
                prop_assert_eq!(read_name(line[0].words[1]), Some(name));
            }
        }
    }
}
