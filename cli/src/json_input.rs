//! Files of JSON that have one type: what is wrong with them, and where.

use frontends::{InputError, Position, plain_sentence};
use serde::de::{DeserializeOwned, IgnoredAny};

/// Reads a file's text; `hint` says where such files come from.
pub(crate) fn parse<T: DeserializeOwned>(file: &str, text: &str, hint: &str) -> Result<T, InputError> {
    if text.trim().is_empty() {
        let what = "the file is empty, expected a JSON object".to_owned();
        return Err(InputError::whole(file, what).with_hint(hint));
    }
    frontends::key_twice(file, text)?;
    let mut reader = serde_json::Deserializer::from_str(text);
    let read: T = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let place = error.path().to_string();
        // `?` stands for a key that was not read to its end, `.` for the whole.
        let place = place.trim_end_matches(['?', '.']).to_owned();
        fault((file, text, hint), place, error.inner())
    })?;
    reader.end().map_err(|error| fault((file, text, hint), String::new(), &error))?;
    Ok(read)
}

/// Whether a text is JSON, whatever it says: of names of which one is expected the reader takes anything else but an
/// object for a mistake in writing.
fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

/// What the JSON reader says of a number like 1e400, which is JSON all the same.
const TOO_LARGE: &str = "number out of range";

/// A fault that the JSON reader found.
fn fault((file, text, hint): (&str, &str, &str), place: String, error: &serde_json::Error) -> InputError {
    /// serde quotes whole strings of the file.
    const SHOWN: usize = 300;
    let full = error.to_string();
    let sentence = full.rsplit_once(" at line ").map_or(full.as_str(), |(sentence, _)| sentence);
    let plain = plain_sentence(sentence);
    let mut what: String = plain.chars().take(SHOWN).collect();
    if what.len() < plain.len() {
        what.push('…');
    }
    let (what, hint) = if error.is_data() || what == TOO_LARGE {
        (what, hint)
    } else if error.is_syntax() && is_json(text) {
        ("expected a name in quotes, found something else".to_owned(), hint)
    } else {
        let hint = match error.is_eof() {
            true => "the file ends in the middle: is it truncated?",
            false => "JSON has no comments, no trailing commas, no single quotes and no NaN or Infinity",
        };
        (format!("not JSON: {}", what.to_lowercase()), hint)
    };
    InputError {
        file: file.into(),
        position: Some(Position { line: error.line().max(1), column: error.column().max(1) }),
        place,
        what,
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
        assert!(fault("{\"schema_version\": 1e400}").contains("number out of range"));
        let twice = "{\"order\": 1, \"order\": 2}";
        let twice = parse::<serde_json::Value>("p.json", twice, "hint").unwrap_err().to_string();
        assert_eq!(twice, "p.json:1:23: order: this key is in its object twice");
    }

    #[test]
    fn what_is_no_name_is_json_all_the_same() {
        #[derive(Debug, serde::Deserialize)]
        #[serde(rename_all = "kebab-case")]
        enum Order {
            Natural,
        }
        #[derive(Debug, serde::Deserialize)]
        struct One {
            order: Order,
        }
        let fault =
            |text: &str| parse::<One>("p.json", text, "hint").map(|one| one.order).unwrap_err().to_string();
        let wrong = "p.json:1:11: order: expected a name in quotes, found something else\nhint: hint";
        assert_eq!(fault("{\"order\": [0]}"), wrong);
        assert!(fault("{\"order\": [0}").contains("not JSON"));
        assert!(matches!(
            parse::<One>("p.json", "{\"order\": \"natural\"}", "hint"),
            Ok(One { order: Order::Natural })
        ));
    }
}
