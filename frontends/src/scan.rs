//! Places in a JSON text: where the value of a path stands, and whether an object has a key twice.
//!
//! The text is already known to be valid JSON, so the scanner only has to find the borders of values. It keeps no
//! tree: memory is the path it stands at and, to find doubles, the keys of the objects that are open.

use std::borrow::Cow;
use std::collections::BTreeSet;

use crate::input_error::Position;

/// One step of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step<'a> {
    /// Value of a key.
    Key(Cow<'a, str>),
    /// Element of an array.
    Index(usize),
}

/// Text form of a path: `groups[0].count`.
pub(crate) fn render(path: &[Step<'_>]) -> String {
    let mut text = String::new();
    for step in path {
        match step {
            Step::Key(key) => {
                let dot = if text.is_empty() { "" } else { "." };
                text.push_str(&format!("{dot}{}", clip(key)));
            }
            Step::Index(index) => text.push_str(&format!("[{index}]")),
        }
    }
    text
}

/// At most this many characters of the user's own text are shown in an error.
const SHOWN_CHARACTERS: usize = 60;

/// A text short enough to be shown.
pub(crate) fn clip(text: &str) -> String {
    let (mut short, mut rest) = (String::new(), text.chars());
    for one in rest.by_ref().take(SHOWN_CHARACTERS) {
        // What would move a terminal's cursor, or colour what follows.
        if one.is_control() { short.extend(one.escape_default()) } else { short.push(one) }
    }
    if rest.next().is_some() {
        short.push('…');
    }
    short
}

/// Position of the value at `path`, or of the deepest value on the way to it that exists.
pub(crate) fn locate(text: &str, path: &[Step<'_>]) -> Position {
    let mut best = (0, 0);
    let mut scanner = Scanner::new(text);
    scanner.scan(&mut |here, byte| {
        if path.starts_with(here) && (here.len() > best.0 || here.is_empty()) {
            best = (here.len(), byte);
        }
        Go::On
    });
    position(text, best.1)
}

/// Path of the first key that its object already has.
pub(crate) fn first_double<'a>(text: &'a str) -> Option<(Vec<Step<'a>>, Position)> {
    let mut open: Vec<(usize, BTreeSet<Cow<'a, str>>)> = Vec::new();
    let mut found = None;
    let mut scanner = Scanner::new(text);
    scanner.scan(&mut |here: &[Step<'a>], byte| {
        open.retain(|(depth, _)| *depth <= here.len());
        if let Some(Step::Key(key)) = here.last() {
            let new_object = open.last().is_none_or(|(depth, _)| *depth != here.len());
            if new_object {
                open.push((here.len(), BTreeSet::new()));
            }
            if open.last_mut().is_some_and(|(_, keys)| !keys.insert(key.clone())) {
                found = Some((here.to_vec(), byte));
                return Go::Stop;
            }
        }
        Go::On
    });
    found.map(|(path, byte)| (path, position(text, byte)))
}

fn position(text: &str, byte: usize) -> Position {
    let before = text.get(..byte).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    Position { line: before.matches('\n').count() + 1, column: before[line_start..].chars().count() + 1 }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Go {
    On,
    Stop,
}

/// An object or array that is open, and whether its next string is a key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Open {
    ObjectKey,
    ObjectValue,
    Array,
}

struct Scanner<'a> {
    text: &'a str,
    at: usize,
    open: Vec<Open>,
    path: Vec<Step<'a>>,
}

impl<'a> Scanner<'a> {
    fn new(text: &'a str) -> Self {
        Self { text, at: 0, open: Vec::new(), path: Vec::new() }
    }

    /// Calls `visit` with path and byte offset of every value, a container before its contents.
    fn scan(&mut self, visit: &mut impl FnMut(&[Step<'a>], usize) -> Go) {
        while let Some(&byte) = self.text.as_bytes().get(self.at) {
            match byte {
                b' ' | b'\t' | b'\r' | b'\n' => self.at += 1,
                b':' => {
                    self.replace_top(Open::ObjectValue);
                    self.at += 1;
                }
                b',' => self.next_member(),
                b'}' | b']' => self.close(),
                b'"' if self.open.last() == Some(&Open::ObjectKey) => {
                    let raw = self.string();
                    self.path.push(Step::Key(unescape(raw)));
                }
                _ => {
                    if visit(&self.path, self.at) == Go::Stop {
                        return;
                    }
                    self.value(byte);
                }
            }
        }
    }

    fn replace_top(&mut self, state: Open) {
        if let Some(top) = self.open.last_mut() {
            *top = state;
        }
    }

    fn next_member(&mut self) {
        self.at += 1;
        match self.open.last() {
            Some(Open::Array) => {
                if let Some(Step::Index(index)) = self.path.last_mut() {
                    *index += 1;
                }
            }
            Some(Open::ObjectKey | Open::ObjectValue) => {
                self.path.pop();
                self.replace_top(Open::ObjectKey);
            }
            None => {}
        }
    }

    fn close(&mut self) {
        self.at += 1;
        // An empty object has no step of its own.
        if matches!(self.open.pop(), Some(Open::Array | Open::ObjectValue)) {
            self.path.pop();
        }
    }

    fn value(&mut self, first: u8) {
        match first {
            b'{' => {
                self.open.push(Open::ObjectKey);
                self.at += 1;
            }
            b'[' => {
                self.open.push(Open::Array);
                self.path.push(Step::Index(0));
                self.at += 1;
            }
            b'"' => {
                self.string();
            }
            _ => {
                let rest = &self.text.as_bytes()[self.at..];
                let ends = |byte: &u8| matches!(byte, b',' | b'}' | b']' | b' ' | b'\t' | b'\r' | b'\n');
                self.at += rest.iter().position(ends).unwrap_or(rest.len()).max(1);
            }
        }
    }

    /// Steps over a string and gives it with its quotes.
    fn string(&mut self) -> &'a str {
        let start = self.at;
        self.at += 1;
        while let Some(&byte) = self.text.as_bytes().get(self.at) {
            self.at += if byte == b'\\' { 2 } else { 1 };
            if byte == b'"' {
                break;
            }
        }
        self.text.get(start..self.at).unwrap_or("")
    }
}

fn unescape(quoted: &str) -> Cow<'_, str> {
    let inner = quoted.trim_start_matches('"');
    let inner = inner.strip_suffix('"').unwrap_or(inner);
    if inner.contains('\\') {
        serde_json::from_str::<String>(quoted).map_or(Cow::Borrowed(inner), Cow::Owned)
    } else {
        Cow::Borrowed(inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Step<'_> {
        Step::Key(Cow::Borrowed(name))
    }

    #[test]
    fn the_place_of_a_nested_value_is_found() {
        let text = "{\n  \"a\": [1, {\"b\\u0041\": [], \"c\": {}}, 3],\n  \"d\": \"é\", \"e\": 4\n}";
        let at = |path: &[Step<'_>]| {
            let found = locate(text, path);
            (found.line, found.column)
        };
        assert_eq!(at(&[]), (1, 1));
        assert_eq!(at(&[key("a"), Step::Index(1), key("bA")]), (2, 24));
        assert_eq!(at(&[key("a"), Step::Index(1), key("c")]), (2, 33));
        assert_eq!(at(&[key("a"), Step::Index(2)]), (2, 38));
        assert_eq!(at(&[key("e")]), (3, 18));
        assert_eq!(at(&[key("a"), Step::Index(7)]), (2, 8));
    }

    #[test]
    fn a_double_key_is_found_in_its_own_object_only() {
        assert_eq!(first_double(r#"[{"a": {"a": 1}, "b": 2}, {"a": 1}]"#), None);
        let (path, place) = first_double(r#"{"x": [{"k": 1, "m": {"k": 2}, "k": 3}]}"#).unwrap();
        assert_eq!((render(&path).as_str(), place.column), ("x[0].k", 37));
        assert!(first_double(r#"{"A": 1, "\u0041": 2}"#).is_some());
        assert_eq!(first_double(r#"{"a": {}, "b": {}, "c": []}"#), None);
    }

    #[test]
    fn long_names_are_cut() {
        assert_eq!(clip(&"x".repeat(100)).chars().count(), SHOWN_CHARACTERS + 1);
    }
}
