//! Files of JSON that have one type: what is wrong with them, and where.

use frontends::{InputError, Position, plain_sentence};
use serde::de::DeserializeOwned;

/// Reads a file's text; `hint` says where such files come from.
pub(crate) fn parse<T: DeserializeOwned>(file: &str, text: &str, hint: &str) -> Result<T, InputError> {
    if text.trim().is_empty() {
        let what = "the file is empty, expected a JSON object".to_owned();
        return Err(InputError::whole(file, what).with_hint(hint));
    }
    let mut reader = serde_json::Deserializer::from_str(text);
    let read: T = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let place = error.path().to_string();
        // `?` stands for a key that was not read to its end, `.` for the whole.
        let place = place.trim_end_matches(['?', '.']).to_owned();
        fault((file, hint), place, error.inner())
    })?;
    reader.end().map_err(|error| fault((file, hint), String::new(), &error))?;
    Ok(read)
}

/// A fault that the JSON reader found.
fn fault((file, hint): (&str, &str), place: String, error: &serde_json::Error) -> InputError {
    /// serde quotes whole strings of the file.
    const SHOWN: usize = 300;
    let full = error.to_string();
    let sentence = full.rsplit_once(" at line ").map_or(full.as_str(), |(sentence, _)| sentence);
    let plain = plain_sentence(sentence);
    let mut what: String = plain.chars().take(SHOWN).collect();
    if what.len() < plain.len() {
        what.push('…');
    }
    let hint = if error.is_eof() {
        "the file ends in the middle: is it truncated?"
    } else if error.is_syntax() {
        "JSON has no comments, no trailing commas, no single quotes and no NaN or Infinity"
    } else {
        hint
    };
    InputError {
        file: file.into(),
        position: Some(Position { line: error.line().max(1), column: error.column().max(1) }),
        place,
        what: if error.is_data() { what } else { format!("not JSON: {}", what.to_lowercase()) },
        hint: Some(hint.into()),
    }
}

#[cfg(test)]
mod tests {
    use ir::plan::Plan;

    use super::*;

    #[test]
    fn an_empty_file_is_called_so() {
        let fault = parse::<Plan>("p.json", " \n", "hint").unwrap_err().to_string();
        assert_eq!(fault, "p.json: the file is empty, expected a JSON object\nhint: hint");
    }

    #[test]
    fn faults_of_a_plan_file_have_a_place() {
        let fault =
            |text: &str| parse::<Plan>("p.json", text, "hint").unwrap_err().to_string().replace('\n', " | ");
        assert!(
            fault("{\"schema_version\": 1").starts_with("p.json:1:20: not JSON: eof"),
            "{}",
            fault("{\"a\": 1")
        );
        assert!(
            fault("{\"schema_version\": \"a\"}")
                .starts_with("p.json:1:22: schema_version: expected a whole number from 0, found \"a\"")
        );
        assert!(fault("{\"schema_version\": NaN}").contains("no NaN"));
    }
}
