//! What a reader of JSON says of a value, in words of JSON: it knows the types of this program, and its user does not.

/// serde's sentence in other words: `invalid type: string "16", expected u64` is
/// `expected a whole number from 0, found "16"`.
pub fn plain_sentence(serde: &str) -> String {
    let parts = ["invalid type: ", "invalid value: "].iter().find_map(|start| serde.strip_prefix(start));
    match parts.and_then(|rest| rest.rsplit_once(", expected ")) {
        Some((found, expected)) => format!("expected {}, found {}", type_name(expected), value(found)),
        None => serde.replacen("unknown variant", "unknown value", 1),
    }
}

/// What a type is in a file.
fn type_name(expected: &str) -> &str {
    match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number from 0",
        "i32" | "i64" => "a whole number",
        "f32" | "f64" => "a number",
        "a map" => "an object",
        "a sequence" => "an array",
        _ if expected.starts_with("struct ") => "an object",
        _ => expected,
    }
}

/// What was found, as it stands in the file where that is short.
fn value(found: &str) -> &str {
    match found {
        "map" => "an object",
        "sequence" => "an array",
        "unit value" | "null" => "null",
        _ => {
            let kinds = ["integer ", "floating point ", "boolean ", "string "];
            kinds.iter().find_map(|kind| found.strip_prefix(kind)).unwrap_or(found)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_said_in_words_of_json() {
        for (serde, plain) in [
            ("invalid type: string \"16\", expected u64", "expected a whole number from 0, found \"16\""),
            ("invalid value: integer `-2`, expected u32", "expected a whole number from 0, found `-2`"),
            ("invalid type: sequence, expected a map", "expected an object, found an array"),
            ("invalid type: null, expected struct NvmeFile", "expected an object, found null"),
            (
                "invalid type: string \"a, expected b\", expected f64",
                "expected a number, found \"a, expected b\"",
            ),
            ("unknown variant `int3`, expected `fp8`", "unknown value `int3`, expected `fp8`"),
            ("missing field `count`", "missing field `count`"),
        ] {
            assert_eq!(plain_sentence(serde), plain);
        }
    }
}
