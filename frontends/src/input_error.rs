//! What is wrong with a file of the user: where, what was found and expected, and what to do.

use std::fmt;

/// Line and column in a text, from 1; columns count characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

/// A fault in an input file.
///
/// Shown as `model.json:14:25: num_experts_per_tok: 9 of 8 experts cannot be chosen`, and the hint on a line of its
/// own.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", Text(self))]
pub struct InputError {
    /// File, as the caller named it.
    pub file: String,
    /// Where in its text, if one place is at fault.
    pub position: Option<Position>,
    /// Path of the value at fault, `groups[0].count`; empty for the file as a whole.
    pub place: String,
    /// What was found and what was expected.
    pub what: String,
    /// What to do.
    pub hint: Option<String>,
}

impl InputError {
    /// A fault of a file as a whole.
    pub fn whole(file: &str, what: impl Into<String>) -> Self {
        Self { file: file.into(), position: None, place: String::new(), what: what.into(), hint: None }
    }

    /// The same fault with advice.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

struct Text<'a>(&'a InputError);

impl fmt::Display for Text<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = self.0;
        write!(out, "{}", error.file)?;
        if let Some(position) = error.position {
            write!(out, ":{}:{}", position.line, position.column)?;
        }
        if !error.place.is_empty() {
            write!(out, ": {}", error.place)?;
        }
        write!(out, ": {}", error.what)?;
        error.hint.as_ref().map_or(Ok(()), |hint| write!(out, "\nhint: {hint}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_file_place_fault_and_remedy() {
        let error = InputError {
            file: "model.json".into(),
            position: Some(Position { line: 14, column: 25 }),
            place: "num_experts_per_tok".into(),
            what: "9 of 8 experts cannot be chosen".into(),
            hint: Some("num_experts_per_tok must be at most num_local_experts".into()),
        };
        assert_eq!(
            error.to_string(),
            "model.json:14:25: num_experts_per_tok: 9 of 8 experts cannot be chosen\n\
             hint: num_experts_per_tok must be at most num_local_experts"
        );
    }
}
