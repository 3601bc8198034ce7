//! The native model document to a graph: limits first, so that nothing in it can exhaust memory or overflow a count.

use ir::flat::FlatDocument;
use ir::graph::Model;
use ir::native::{DocumentError, LayerDocument, Length, ModelDocument, TensorRole, read, read_layer};
use ir::op_limits::{self, MAX_LENGTH, MAX_PARTS};

use crate::document::{Document, key, kind};
use crate::flat::{Heading, cluster};
use crate::hf::MAX_PARAMETERS;
use crate::input_error::InputError;
use crate::names::check_names;
use crate::native_roles::check_roles;
use crate::scan::{Step, clip};

/// Longest default sequence.
const MAX_SEQUENCE: u64 = 1 << 28;
/// Layers in all runs.
const MAX_LAYERS: u64 = 10_000;
/// Layer kinds: the search looks at each.
const MAX_KINDS: usize = 64;

/// The most that a list of operators may hold.
#[derive(Clone, Copy, Debug)]
struct Limits {
    ops: usize,
    tensors: usize,
    dims: usize,
    whose: &'static str,
}

/// Of a layer: twenty times the operators of the largest known one.
const LAYER: Limits = Limits { ops: 1024, tensors: 8192, dims: 64, whose: "one layer" };
/// Of a whole model: four times the operators of the deepest known one.
const FLAT: Limits = Limits { ops: 16_384, tensors: 65_536, dims: 1024, whose: "one model" };

/// Reads a native document, whose version is already known to be present.
pub(crate) fn read_native(document: &Document<'_>) -> Result<Model, InputError> {
    let version = &document.value["planner_model"];
    if version.as_u64() != Some(u64::from(ir::native::MODEL_SCHEMA_VERSION)) {
        let expected = ir::native::MODEL_SCHEMA_VERSION;
        let what = format!("version {} cannot be read, expected {expected}", kind(version));
        return Err(document.error_at("planner_model", what));
    }
    check_names(document, &mut Vec::new(), &document.value)?;
    if document.value.get("ops").is_some() {
        return read_flat(document);
    }
    let native: ModelDocument = document.typed(&[], &document.value)?;
    for (i, layer) in native.layers.iter().enumerate() {
        check_attributes(document, &[key("layers"), Step::Index(i)], layer)?;
    }
    check_sizes(document, &native)?;
    let model = read(&native).map_err(|error| told(document, &error))?;
    check_trained(document, "layers", &model)?;
    Ok(model)
}

/// Refuses a model of which nothing is trained.
fn check_trained(document: &Document<'_>, at: &str, model: &Model) -> Result<(), InputError> {
    if model.n_trained() > 0 {
        return Ok(());
    }
    Err(document
        .error_at(at, "no parameter is trained: all say \"trainable\": false, or there is none".into()))
}

/// An error of the graph, at its place in the file.
fn told(document: &Document<'_>, error: &DocumentError) -> InputError {
    document.error(&parse_place(&error.place), clip_names(&error.what))
}

/// Reads a document that has operators and no layers.
fn read_flat(document: &Document<'_>) -> Result<Model, InputError> {
    if document.value.get("layers").is_some() {
        let what = "a model has either `layers` or `ops`, this one has both".into();
        return Err(document.error_at("ops", what));
    }
    let flat: FlatDocument = document.typed(&[], &document.value)?;
    check_sequence(document, flat.default_sequence)?;
    let heading = Heading { name: flat.name.clone(), default_sequence: flat.default_sequence };
    let whole = flat.into_layer();
    check_attributes(document, &[], &whole)?;
    check_layer_size(document, &[], &whole, FLAT)?;
    check_roles(document, &[], &whole)?;
    check_parameters(document, "tensors", parameters_of(&whole))?;
    let model = read_layer(&whole, "").and_then(|whole| cluster(&whole, heading, LAYER.ops));
    let model = model.map_err(|error| told(document, &error))?;
    if model.layers.len() > MAX_KINDS {
        let what = format!(
            "its {} layers are of {} kinds, at most {MAX_KINDS} are planned for",
            model.n_layers(),
            model.layers.len()
        );
        return Err(document.error_at("ops", what));
    }
    check_count(document, "ops", model.n_layers())?;
    check_trained(document, "tensors", &model)?;
    Ok(model)
}

/// Names from the file may be long; the sentence around them is not.
fn clip_names(what: &str) -> String {
    what.split('`').map(clip_if_long).collect::<Vec<_>>().join("`")
}

fn clip_if_long(part: &str) -> String {
    const LONGEST_SENTENCE: usize = 200;
    if part.chars().count() > LONGEST_SENTENCE { clip(part) } else { part.to_owned() }
}

/// Refuses attributes that are out of all bounds.
fn check_attributes(
    document: &Document<'_>,
    at: &[Step<'_>],
    layer: &LayerDocument,
) -> Result<(), InputError> {
    for (j, op) in layer.ops.iter().enumerate() {
        let path = [at, &[key("ops"), Step::Index(j), key("kind")]].concat();
        op_limits::check(&op.kind).map_err(|what| document.error(&path, what))?;
    }
    Ok(())
}

fn check_sizes(document: &Document<'_>, native: &ModelDocument) -> Result<(), InputError> {
    check_sequence(document, native.default_sequence)?;
    if native.layers.len() > MAX_KINDS {
        let what = format!("{} layer kinds, at most {MAX_KINDS} are planned for", native.layers.len());
        return Err(document.error_at("layers", what));
    }
    let mut per_kind: Vec<(&str, u128)> = Vec::new();
    for (i, layer) in native.layers.iter().enumerate() {
        let at = [key("layers"), Step::Index(i)];
        // The sequence would mean the first of two.
        if per_kind.iter().any(|(name, _)| *name == layer.name) {
            let what = format!("two layer kinds are named `{}`", clip(&layer.name));
            return Err(document.error(&[key("layers"), Step::Index(i), key("name")], what));
        }
        check_layer_size(document, &at, layer, LAYER)?;
        check_roles(document, &at, layer)?;
        per_kind.push((layer.name.as_str(), parameters_of(layer)));
    }
    let n_layers = native.sequence.iter().fold(0_u64, |sum, run| sum.saturating_add(run.count));
    check_count(document, "sequence", n_layers)?;
    let of_kind = |name: &str| per_kind.iter().find(|(kind, _)| *kind == name).map_or(0, |(_, n)| *n);
    let each = per_kind.iter().map(|(_, n)| *n).max().unwrap_or(0);
    let in_order =
        native.sequence.iter().map(|run| u128::from(run.count).saturating_mul(of_kind(&run.layer)));
    let total = in_order.fold(0_u128, u128::saturating_add).max(each);
    check_parameters(document, "layers", total)?;
    check_ties(document, native)
}

fn check_sequence(document: &Document<'_>, tokens: u64) -> Result<(), InputError> {
    if tokens <= MAX_SEQUENCE {
        return Ok(());
    }
    let what = format!("{tokens} tokens, at most {MAX_SEQUENCE} are planned for");
    Err(document.error_at("default_sequence", what))
}

fn check_count(document: &Document<'_>, at: &str, n_layers: u64) -> Result<(), InputError> {
    if n_layers <= MAX_LAYERS {
        return Ok(());
    }
    Err(document.error_at(at, format!("{n_layers} layers, at most {MAX_LAYERS} are planned for")))
}

fn check_parameters(document: &Document<'_>, at: &str, total: u128) -> Result<(), InputError> {
    if total <= MAX_PARAMETERS {
        return Ok(());
    }
    let what = format!("the model has {total} parameters, at most {MAX_PARAMETERS} are planned for");
    Err(document.error_at(at, what))
}

/// The owner and its copy are two places; a copy has one owner.
fn check_ties(document: &Document<'_>, native: &ModelDocument) -> Result<(), InputError> {
    for (i, tie) in native.ties.iter().enumerate() {
        let again = native.ties[..i].iter().any(|other| other.copy == tie.copy || other.copy == tie.owner);
        if tie.owner == tie.copy || again || native.ties[..i].iter().any(|other| other.owner == tie.copy) {
            let what = format!("`{}` is already tied", clip(&tie.copy));
            return Err(document.error(&[key("ties"), Step::Index(i), key("copy")], what));
        }
    }
    Ok(())
}

fn check_layer_size(
    document: &Document<'_>,
    at: &[Step<'_>],
    layer: &LayerDocument,
    limits: Limits,
) -> Result<(), InputError> {
    let lists = [
        ("dims", layer.dims.len(), limits.dims),
        ("tensors", layer.tensors.len(), limits.tensors),
        ("ops", layer.ops.len(), limits.ops),
    ];
    for (name, found, most) in lists {
        if found > most {
            let what = format!("{found} {name} in {}, at most {most} are planned for", limits.whose);
            return Err(document.error(&[at, &[key(name)]].concat(), what));
        }
    }
    for (j, dim) in layer.dims.iter().enumerate() {
        let length = fixed(&dim.length);
        if length > MAX_LENGTH || length == 0 {
            let path = [at, &[key("dims"), Step::Index(j), key("length")]].concat();
            return Err(
                document.error(&path, format!("{length} is out of range, expected 1 to {MAX_LENGTH}"))
            );
        }
    }
    for (j, tensor) in layer.tensors.iter().enumerate() {
        let path = [at, &[key("tensors"), Step::Index(j), key("dims")]].concat();
        let names: Vec<&str> = tensor.dims.split_whitespace().take(MAX_PARTS + 1).collect();
        let double = (1..names.len()).find(|&k| names[..k].contains(&names[k]));
        if let Some(k) = double {
            return Err(document.error(&path, format!("dim `{}` twice in one tensor", clip(names[k]))));
        }
        let is_set_by_job =
            |name: &&str| layer.dims.iter().any(|dim| dim.name == **name && !is_fixed(&dim.length));
        if is_learned(tensor.role) && names.iter().any(is_set_by_job) {
            return Err(document.error(&path, "a parameter may only have dims of fixed length".into()));
        }
    }
    Ok(())
}

fn parameters_of(layer: &LayerDocument) -> u128 {
    let length = |name: &str| {
        layer.dims.iter().find(|dim| dim.name == name).map_or(0, |dim| u128::from(fixed(&dim.length)))
    };
    let elements = |dims: &str| dims.split_whitespace().map(length).fold(1, u128::saturating_mul);
    let learned = layer.tensors.iter().filter(|tensor| is_learned(tensor.role));
    learned.map(|tensor| elements(&tensor.dims)).fold(0, u128::saturating_add)
}

fn is_learned(role: TensorRole) -> bool {
    match role {
        TensorRole::Parameter | TensorRole::ParameterOne | TensorRole::ParameterZero => true,
        TensorRole::Activation
        | TensorRole::Tokens
        | TensorRole::Labels
        | TensorRole::Ahead
        | TensorRole::Positions
        | TensorRole::AlibiSlopes
        | TensorRole::RouterBias
        | TensorRole::Features => false,
    }
}

fn is_fixed(length: &Length) -> bool {
    match length {
        Length::Fixed(_) | Length::Uneven(_) => true,
        Length::MicroBatch | Length::Sequence | Length::Slots(_) | Length::Capacity { .. } => false,
    }
}

/// Length of a dim that the model fixes, 1 for the others.
fn fixed(length: &Length) -> u64 {
    match length {
        Length::Fixed(n) | Length::Uneven(n) => *n,
        Length::MicroBatch | Length::Sequence | Length::Slots(_) | Length::Capacity { .. } => 1,
    }
}

/// `layers[1].ops[3]` as steps.
fn parse_place(place: &str) -> Vec<Step<'_>> {
    let mut steps = Vec::new();
    for part in place.split('.') {
        let mut pieces = part.split('[');
        steps.extend(pieces.next().filter(|name| !name.is_empty()).map(key));
        let indices = pieces.filter_map(|piece| piece.trim_end_matches(']').parse().ok());
        steps.extend(indices.map(Step::Index));
    }
    steps
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use crate::model::read_model;
    use crate::shipped_models::{shipped_model, shipped_models};

    /// The native text of a shipped model.
    fn native(name: &str) -> Value {
        let model = read_model(name, shipped_model(name).unwrap().text).unwrap();
        serde_json::to_value(ir::native::write(&model)).unwrap()
    }

    fn fault(value: &Value) -> String {
        read_model("m.json", &value.to_string()).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn every_shipped_model_survives_its_native_form() {
        for shipped in shipped_models() {
            let model = read_model(shipped.name, shipped.text).unwrap();
            let text = serde_json::to_string_pretty(&ir::native::write(&model)).unwrap();
            assert_eq!(read_model("native.json", &text).unwrap(), model, "{}", shipped.name);
        }
    }

    #[test]
    fn faults_of_a_native_document_name_their_place() {
        let mut value = native("gpt2");
        value["layers"][1]["ops"][2]["operands"][0] = "nothing".into();
        assert!(
            fault(&value).contains("layers[1].ops[2].operands[0]: no tensor is named `nothing`"),
            "{}",
            fault(&value)
        );
        let mut value = native("gpt2");
        value["layers"][1]["ops"][0]["kind"]["color"] = "red".into();
        assert!(fault(&value).contains("`color` is no attribute of operator fork"), "{}", fault(&value));
        let mut value = native("gpt2");
        value["sequence"][1]["count"] = 1_000_000.into();
        assert!(fault(&value).contains("sequence: 1000002 layers"), "{}", fault(&value));
        let mut value = native("gpt2");
        value["layers"][1]["dims"][2]["length"] = serde_json::json!({"fixed": 1_099_511_627_776_u64});
        assert!(fault(&value).contains("parameters, at most"), "{}", fault(&value));
        let mut value = native("gpt2");
        value["layers"][0]["tensors"][0]["role"] = "labels".into();
        assert!(fault(&value).contains("operand 0 of embed must have role tokens"), "{}", fault(&value));
        let mut value = native("gpt2");
        value["planner_model"] = 2.into();
        assert!(
            fault(&value).contains("planner_model: version 2 cannot be read, expected 1"),
            "{}",
            fault(&value)
        );
    }

    #[test]
    fn what_is_learned_is_read_has_one_meaning_and_is_trained_in_part() {
        let mut value = native("gpt2");
        let spare = serde_json::json!({"name": "spare", "dims": "h", "role": "parameter"});
        value["layers"][1]["tensors"].as_array_mut().unwrap().push(spare);
        assert!(
            fault(&value).contains("layers: layer `decoder`: `spare` is never read"),
            "{}",
            fault(&value)
        );
        let mut value = native("gpt2");
        let again = value["layers"][1].clone();
        value["layers"].as_array_mut().unwrap().push(again);
        let said = fault(&value);
        assert!(said.contains("].name: two layer kinds are named `decoder`"), "{said}");
        let mut value = native("gpt2");
        for layer in value["layers"].as_array_mut().unwrap() {
            for tensor in layer["tensors"].as_array_mut().unwrap() {
                let role = tensor.get("role").and_then(Value::as_str).unwrap_or_default();
                if role.starts_with("parameter") {
                    tensor["trainable"] = false.into();
                }
            }
        }
        assert!(fault(&value).contains("layers: no parameter is trained"), "{}", fault(&value));
    }

    #[test]
    fn data_have_the_dims_of_their_role_and_features_are_read_by_any_operator() {
        let with = |dims: &str, role: &str, operand: Option<&str>| {
            let mut value = native("gpt2");
            let layer = &mut value["layers"][1];
            let mut add = |list: &str, item: Value| layer[list].as_array_mut().unwrap().push(item);
            add("dims", serde_json::json!({"name": "places", "length": {"fixed": 7}}));
            add("tensors", serde_json::json!({"name": "given", "dims": dims, "role": role}));
            let products = layer["ops"].as_array_mut().unwrap();
            let product = products.iter_mut().find(|op| op["kind"]["op"] == "linear").unwrap();
            if let Some(name) = operand {
                product["operands"][1] = name.into();
            }
            value
        };
        for (dims, role) in [("b places", "tokens"), ("places", "positions"), ("b s places", "features")] {
            let text = with(dims, role, None).to_string();
            assert!(read_model("m.json", &text).is_ok(), "{role}");
        }
        let said = |dims, role| fault(&with(dims, role, None));
        let expected = "`given` has the wrong dims for its role: expected a micro-batch dim, then others";
        assert!(said("places b", "features").contains(expected), "{}", said("places b", "features"));
        let expected = "expected one dim, a sequence or of fixed length";
        assert!(said("b places", "positions").contains(expected), "{}", said("b places", "positions"));
        let expected = "must have role activation, parameter or features";
        let misread = fault(&with("b s", "tokens", Some("given")));
        assert!(misread.contains(expected), "{misread}");
        let read = fault(&with("b places", "features", Some("given")));
        assert!(!read.contains("must have role"), "{read}");
    }

    #[test]
    fn a_mask_may_be_named_and_is_left_out_where_it_is_causal() {
        let masked = |mask: &str| {
            let mut value = native("gpt2");
            let ops = value["layers"][1]["ops"].as_array_mut().unwrap();
            let core = ops.iter_mut().find(|op| op["kind"]["op"] == "attention").unwrap();
            core["kind"]["mask"] = mask.into();
            if mask == "full" {
                core["operands"].as_array_mut().unwrap().truncate(3);
            }
            value
        };
        let written = |value: &Value| {
            let model = read_model("m.json", &value.to_string()).unwrap_or_else(|error| panic!("{error}"));
            serde_json::to_value(ir::native::write(&model)).unwrap()
        };
        assert_eq!(written(&masked("causal")), native("gpt2"));
        assert_eq!(written(&masked("full")), masked("full"));
    }

    #[test]
    fn the_example_of_the_documentation_can_be_read() {
        let page = include_str!("../../docs/models.md");
        let example = page.split("```json").nth(1).unwrap().split("```").next().unwrap();
        let model = read_model("tiny.json", example).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(model.n_parameters(), 50_000 * 512 + 12 * 2 * 512 * 2048);
        let example = page.split("```json").nth(2).unwrap().split("```").next().unwrap();
        let model = read_model("flat.json", example).unwrap_or_else(|error| panic!("{error}"));
        let runs: Vec<(&str, u64)> =
            model.sequence.iter().map(|run| (model.layers[run.layer].name.as_str(), run.count)).collect();
        assert_eq!(runs, [("embedding", 1), ("mlp", 2), ("head", 1)]);
        assert_eq!(model.n_parameters(), 50_000 * 512 + 2 * 2 * 512 * 2048);
    }
}
