//! Names from files: each stands in lines of tables and messages.

use serde_json::Value;

use crate::document::{Document, key};
use crate::input_error::InputError;
use crate::scan::{Step, clip};

/// Characters of a name, at most.
const LONGEST_NAME: usize = 200;

/// Refuses a name that is no part of one line, at its place.
pub(crate) fn check_name(document: &Document<'_>, place: &[Step<'_>], name: &str) -> Result<(), InputError> {
    if name.chars().any(char::is_control) {
        let what = format!("`{}` has characters that are no text", clip(name));
        return Err(document.error(place, what).with_hint("expected a name of one line"));
    }
    let length = name.chars().count();
    if length > LONGEST_NAME {
        let what =
            format!("`{}` has {length} characters, at most {LONGEST_NAME} are shown in reports", clip(name));
        return Err(document.error(place, what));
    }
    Ok(())
}

/// The same of whatever is called `name` in a value.
pub(crate) fn check_names<'d>(
    document: &'d Document<'_>,
    place: &mut Vec<Step<'d>>,
    value: &'d Value,
) -> Result<(), InputError> {
    let mut inside = |step: Step<'d>, value: &'d Value| {
        place.push(step);
        check_names(document, place, value)?;
        place.pop();
        Ok(())
    };
    match value {
        Value::Array(all) => all.iter().enumerate().try_for_each(|(at, one)| inside(Step::Index(at), one)),
        Value::Object(all) => all.iter().try_for_each(|(name, one)| inside(key(name), one)),
        Value::String(name) if place.last() == Some(&key("name")) => check_name(document, place, name),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Ok(()),
    }
}
