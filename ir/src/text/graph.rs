//! A graph as text: the native model document, a line per dim, tensor and operator.

use serde_json::{Map, Value, json};

use super::TextError;
use super::words::{Line, lines, read_field, read_name, write_fields, write_name};
use crate::native::ModelDocument;

/// Between the operands and the results of an operator.
const ARROW: &str = "->";

/// Writes a model.
pub fn write_model(model: &ModelDocument) -> String {
    let Ok(Value::Object(mut fields)) = serde_json::to_value(model) else { return String::new() };
    let name = fields.remove("name");
    let (layers, sequence, ties) =
        (list(fields.remove("layers")), list(fields.remove("sequence")), list(fields.remove("ties")));
    let mut text = format!("model {}{}\n", write_name(string(name.as_ref())), write_fields(&fields));
    layers.iter().for_each(|layer| write_layer(&mut text, layer));
    let run = |one: &Value| format!(" {}*{}", write_name(string(one.get("layer"))), number(one.get("count")));
    text.push_str(&format!("sequence{}\n", sequence.iter().map(run).collect::<String>()));
    for tie in &ties {
        let side = |field: &str| write_name(string(tie.get(field)));
        text.push_str(&format!("tie {} {}\n", side("owner"), side("copy")));
    }
    text
}

fn list(value: Option<Value>) -> Vec<Value> {
    match value {
        Some(Value::Array(list)) => list,
        _ => Vec::new(),
    }
}

fn string(value: Option<&Value>) -> &str {
    value.and_then(Value::as_str).unwrap_or_default()
}

fn number(value: Option<&Value>) -> u64 {
    value.and_then(Value::as_u64).unwrap_or_default()
}

fn names(value: Option<&Value>) -> String {
    let list = value.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    list.iter().map(|name| format!(" {}", write_name(name.as_str().unwrap_or_default()))).collect()
}

fn write_layer(text: &mut String, layer: &Value) {
    text.push_str(&format!("layer {}\n", write_name(string(layer.get("name")))));
    for dim in list(layer.get("dims").cloned()) {
        let length = dim.get("length").cloned().unwrap_or_default();
        text.push_str(&format!("  dim {} {length}\n", write_name(string(dim.get("name")))));
    }
    for tensor in list(layer.get("tensors").cloned()) {
        let dims: String = string(tensor.get("dims"))
            .split_whitespace()
            .map(|dim| format!(" {}", write_name(dim)))
            .collect();
        let role = tensor.get("role").and_then(Value::as_str);
        let role = role.map_or(String::new(), |role| format!(" : {role}"));
        let rest = others(&tensor, &["name", "dims", "role"]);
        text.push_str(&format!("  tensor {}{dims}{role}{rest}\n", write_name(string(tensor.get("name")))));
    }
    for op in list(layer.get("ops").cloned()) {
        let kind = op.get("kind").cloned().unwrap_or_default();
        let attributes = others(&kind, &["op"]);
        text.push_str(&format!(
            "  op {} {}{} {ARROW}{}{attributes}{}\n",
            write_name(string(op.get("name"))),
            string(kind.get("op")),
            names(op.get("operands")),
            names(op.get("results")),
            others(&op, &["name", "kind", "operands", "results"]).replace(' ', " op_"),
        ));
    }
    for (word, field) in STREAMS {
        if let Some(streams) = layer.get(field) {
            text.push_str(&format!("  {word}{}\n", one_or_more(streams)));
        }
    }
}

/// Words of the lines that name a layer's streams, and the fields that they stand for.
const STREAMS: [(&str, &str); 2] = [("stream", "stream_in"), ("out", "out")];

fn one_or_more(streams: &Value) -> String {
    streams.as_str().map_or_else(|| names(Some(streams)), |one| format!(" {}", write_name(one)))
}

/// The fields of an object that have no place of their own on its line.
fn others(value: &Value, placed: &[&str]) -> String {
    let fields = value.as_object().into_iter().flatten();
    write_fields(fields.filter(|(key, _)| !placed.contains(&key.as_str())))
}

/// Reads a model.
///
/// # Errors
/// The first line that does not fit. Whether the graph is sound is for [`crate::native::read`] to say.
pub fn read_model(text: &str) -> Result<ModelDocument, TextError> {
    read_lines(&lines(text)?)
}

/// Reads the lines of a model.
pub(crate) fn read_lines(lines: &[Line<'_>]) -> Result<ModelDocument, TextError> {
    let Some(first) = lines.first() else {
        return Err(TextError { line: 1, what: "expected `model NAME`, found nothing".into() });
    };
    let mut reader = Reader::default();
    for line in lines {
        reader.line(line)?;
    }
    let mut model = reader.model;
    model.insert("layers".into(), reader.layers.into_iter().map(Value::Object).collect());
    model.insert("sequence".into(), reader.sequence.into());
    model.insert("ties".into(), reader.ties.into());
    serde_json::from_value(Value::Object(model)).map_err(|error| first.error(format!("the model: {error}")))
}

#[derive(Default)]
struct Reader {
    model: Map<String, Value>,
    layers: Vec<Map<String, Value>>,
    sequence: Vec<Value>,
    ties: Vec<Value>,
}

impl Reader {
    fn line(&mut self, line: &Line<'_>) -> Result<(), TextError> {
        match line.words[0] {
            "model" => {
                self.model.insert("name".into(), line.name(1, "the model's name")?.into());
                self.model.extend(fields(line, 2)?);
            }
            "layer" => {
                let name = line.name(1, "the layer's name")?;
                let empty = |field: &str| (field.to_owned(), Value::Array(Vec::new()));
                let mut layer: Map<String, Value> =
                    ["dims", "tensors", "ops"].map(empty).into_iter().collect();
                layer.insert("name".into(), name.into());
                self.layers.push(layer);
            }
            "sequence" => {
                self.sequence =
                    line.words[1..].iter().map(|word| run(line, word)).collect::<Result<_, _>>()?;
            }
            "tie" => {
                let (owner, copy) = (line.name(1, "the owner")?, line.name(2, "the copy")?);
                self.ties.push(json!({ "owner": owner, "copy": copy }));
            }
            "dim" => push(self.layer(line)?, "dims", dim(line)?),
            "tensor" => push(self.layer(line)?, "tensors", tensor(line)?),
            "op" => push(self.layer(line)?, "ops", op(line)?),
            word => {
                let Some((_, field)) = STREAMS.into_iter().find(|(own, _)| *own == word) else {
                    return Err(line.error(format!("a model has no `{word}`")));
                };
                let first = line.name(1, "a stream, or the loss")?;
                let more = (2..line.words.len())
                    .map(|at| line.name(at, "a stream"))
                    .collect::<Result<Vec<_>, _>>()?;
                let value = if more.is_empty() {
                    Value::from(first)
                } else {
                    std::iter::once(first).chain(more).collect()
                };
                self.layer(line)?.insert(field.into(), value);
            }
        }
        Ok(())
    }

    fn layer(&mut self, line: &Line<'_>) -> Result<&mut Map<String, Value>, TextError> {
        self.layers.last_mut().ok_or_else(|| line.error("expected `layer NAME` before it"))
    }
}

fn push(layer: &mut Map<String, Value>, field: &str, value: Value) {
    if let Some(Value::Array(list)) = layer.get_mut(field) {
        list.push(value);
    }
}

/// All words from a position on, each a field.
pub(crate) fn fields(line: &Line<'_>, from: usize) -> Result<Vec<(String, Value)>, TextError> {
    let field = |word: &&str| {
        read_field(word).ok_or_else(|| line.error(format!("expected `key=json`, found `{word}`")))
    };
    line.words.iter().skip(from).map(field).collect()
}

fn run(line: &Line<'_>, word: &str) -> Result<Value, TextError> {
    let parts = word.rsplit_once('*').and_then(|(name, count)| Some((read_name(name)?, count.parse().ok()?)));
    let (layer, count): (String, u64) =
        parts.ok_or_else(|| line.error(format!("expected `layer*count`, found `{word}`")))?;
    Ok(json!({ "layer": layer, "count": count }))
}

fn dim(line: &Line<'_>) -> Result<Value, TextError> {
    let name = line.name(1, "the dim's name")?;
    let length = line.words.get(2).and_then(|word| serde_json::from_str::<Value>(word).ok());
    let length = length.ok_or_else(|| line.error("expected a length, such as {\"fixed\":64}"))?;
    Ok(json!({ "name": name, "length": length }))
}

fn tensor(line: &Line<'_>) -> Result<Value, TextError> {
    let mut all = Map::from_iter([("name".to_owned(), line.name(1, "the tensor's name")?.into())]);
    let rest = line.words.get(2..).unwrap_or_default();
    let n_dims =
        rest.iter().position(|word| *word == ":" || read_field(word).is_some()).unwrap_or(rest.len());
    let dims: Option<Vec<String>> = rest[..n_dims].iter().map(|word| read_name(word)).collect();
    let dims = dims.ok_or_else(|| line.error("expected the names of dims"))?;
    all.insert("dims".into(), dims.join(" ").into());
    let mut at = 2 + n_dims;
    if line.words.get(at) == Some(&":") {
        all.insert("role".into(), line.name(at + 1, "what the tensor is")?.into());
        at += 2;
    }
    all.extend(fields(line, at)?);
    Ok(Value::Object(all))
}

fn op(line: &Line<'_>) -> Result<Value, TextError> {
    let name = line.name(1, "the operator's name")?;
    let mut kind = Map::from_iter([("op".to_owned(), line.name(2, "what the operator computes")?.into())]);
    let rest = line.words.get(3..).unwrap_or_default();
    let arrow = rest.iter().position(|word| *word == ARROW);
    let arrow = arrow.ok_or_else(|| line.error("expected `->` between operands and results"))?;
    let after = &rest[arrow + 1..];
    let n_results = after.iter().position(|word| read_field(word).is_some()).unwrap_or(after.len());
    let list = |words: &[&str]| words.iter().map(|word| read_name(word)).collect::<Option<Vec<String>>>();
    let (Some(operands), Some(results)) = (list(&rest[..arrow]), list(&after[..n_results])) else {
        return Err(line.error("expected the names of operands and results"));
    };
    let mut all = Map::new();
    for (key, value) in fields(line, 3 + arrow + 1 + n_results)? {
        match key.strip_prefix("op_") {
            Some(key) => all.insert(key.to_owned(), value),
            None => kind.insert(key, value),
        };
    }
    all.insert("name".into(), name.into());
    all.insert("kind".into(), Value::Object(kind));
    all.insert("operands".into(), operands.into());
    all.insert("results".into(), results.into());
    Ok(Value::Object(all))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::native;
    use crate::plan::samples::{Family, Sample};

    #[test]
    fn models_survive() {
        for family in [Family::Dense, Family::Experts, Family::Latent] {
            let document = native::write(&Sample::new(family, &[]).model());
            let text = write_model(&document);
            assert_eq!(read_model(&text).as_ref(), Ok(&document), "{text}");
            assert_eq!(write_model(&read_model(&text).unwrap()), text);
        }
    }

    #[test]
    fn the_text_of_a_model() {
        let document = native::write(&Sample::new(Family::Dense, &[]).model());
        insta::assert_snapshot!(write_model(&document));
    }

    #[test]
    fn errors_name_the_line() {
        let text = |line: &str| format!("model m planner_model=1 default_sequence=8\nlayer a\n{line}\n");
        let error = |line: &str| read_model(&text(line)).unwrap_err().to_string();
        assert_eq!(error("  op x linear a b c"), "line 3: expected `->` between operands and results");
        assert_eq!(error("  dim x"), "line 3: expected a length, such as {\"fixed\":64}");
        assert_eq!(error("  what"), "line 3: a model has no `what`");
        assert_eq!(read_model("dim x 1").unwrap_err().to_string(), "line 1: expected `layer NAME` before it");
    }
}
