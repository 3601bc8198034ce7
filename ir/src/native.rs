//! The native model document: the JSON form of a graph that any framework can write, and that a plan embeds.
//!
//! Layers are lists of operators over tensors with named dims; everything is named, nothing is numbered. The form
//! holds exactly what `graph::Model` holds, so reading and writing are inverse.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::graph::{
    Data, Dim, DimId, Extent, Init, Layer, Model, Op, ParameterRef, Role, Segment, Tensor, TensorId, Tie,
    check,
};
use crate::op::OpKind;

/// Version of the native document that this build reads and writes.
pub const MODEL_SCHEMA_VERSION: u32 = 1;

/// A model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelDocument {
    /// Version of this form: 1.
    pub planner_model: u32,
    /// Name shown in reports.
    pub name: String,
    /// Sequence length a job gets without a word of the user.
    pub default_sequence: u64,
    /// Layer kinds.
    pub layers: Vec<LayerDocument>,
    /// Order and counts of the kinds: the first reads tokens, the last gives the loss.
    pub sequence: Vec<SegmentDocument>,
    /// Pairs of parameters that are one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ties: Vec<TieDocument>,
}

/// A run of equal layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SegmentDocument {
    /// Name of the kind.
    pub layer: String,
    /// How often it repeats.
    pub count: u64,
}

/// Two parameters that are one, each as `layer.tensor`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TieDocument {
    /// The one that is updated.
    pub owner: String,
    /// The other place of use.
    pub copy: String,
}

/// A layer kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LayerDocument {
    /// Name, unique in the model.
    pub name: String,
    /// Dims.
    pub dims: Vec<DimDocument>,
    /// Tensors.
    pub tensors: Vec<TensorDocument>,
    /// Operators in execution order.
    pub ops: Vec<OpDocument>,
    /// What the layer takes from those before it: the stream, or several, of which the last was left last. Absent in a
    /// layer that reads only data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_in: Option<Streams>,
    /// What it leaves: the stream, several, or the loss.
    pub out: Streams,
}

/// One tensor or several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected the name of a tensor, or a list of names")]
pub enum Streams {
    /// One.
    One(String),
    /// Several, the topmost last.
    Several(Vec<String>),
}

impl Streams {
    /// Their names.
    pub fn names(&self) -> &[String] {
        match self {
            Self::One(name) => std::slice::from_ref(name),
            Self::Several(names) => names,
        }
    }

    /// None where there is none.
    fn of(mut names: Vec<String>) -> Option<Self> {
        match names.len() {
            0 => None,
            1 => names.pop().map(Self::One),
            _ => Some(Self::Several(names)),
        }
    }
}

/// A named dim.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DimDocument {
    /// Name, unique in the layer.
    pub name: String,
    /// Length.
    pub length: Length,
}

/// Length of a dim.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Length {
    /// Fixed by the model; cut only into equal blocks.
    Fixed(u64),
    /// Fixed by the model; blocks may be unequal.
    Uneven(u64),
    /// Sequences of one micro-batch.
    MicroBatch,
    /// Tokens of a sequence.
    Sequence,
    /// One slot per token of a sequence for one expert, of which this fraction holds a token.
    Slots(f64),
    /// Slots of one expert for the tokens of a sequence, fewer than tokens: those beyond are dropped.
    Capacity {
        /// Fraction of the tokens that the expert expects.
        expected: f64,
        /// Slots per expected token.
        factor: f64,
    },
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TensorDocument {
    /// Name, unique in the layer.
    pub name: String,
    /// Names of its dims, separated by spaces, outermost first.
    pub dims: String,
    /// What it is.
    #[serde(default, skip_serializing_if = "TensorRole::is_activation")]
    pub role: TensorRole,
    /// Whether a parameter is learned; one that is not stays as it is, without gradient and optimizer state.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub trainable: bool,
    /// Of tokens `ahead`, how far; else nothing but 1.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub by: u64,
}

/// Furthest that data may look ahead.
const MAX_AHEAD: u64 = 64;

fn one() -> u64 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn is_one(by: &u64) -> bool {
    *by == 1
}

fn yes() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn is_yes(flag: &bool) -> bool {
    *flag
}

/// What a tensor is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TensorRole {
    /// Computed once per micro-batch.
    #[default]
    Activation,
    /// Learned, starts as scaled normal noise.
    Parameter,
    /// Learned, starts near one.
    ParameterOne,
    /// Learned, starts near zero.
    ParameterZero,
    /// Token numbers `[b s]`, `s` a sequence or of fixed length.
    Tokens,
    /// Next tokens `[b s]`; of `[b s a]` with `a` of fixed length, those up to `a` tokens ahead.
    Labels,
    /// Tokens further ahead `[b s]`, of the text that labels continue: as many as `by` says.
    Ahead,
    /// Positions `[s]`, `s` a sequence or of fixed length.
    Positions,
    /// Per-head slopes of a linear position bias.
    AlibiSlopes,
    /// A router's correction bias.
    RouterBias,
    /// Numbers given with the batch `[b ..]`.
    Features,
}

impl TensorRole {
    fn is_activation(&self) -> bool {
        *self == Self::Activation
    }
}

/// An operator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OpDocument {
    /// Name, unique in the layer.
    pub name: String,
    /// What it computes, with its attributes.
    #[serde(deserialize_with = "kind_of_its_attributes")]
    pub kind: OpKind,
    /// Names of its operands in the order of the kind.
    pub operands: Vec<String>,
    /// Names of its results in the order of the kind.
    pub results: Vec<String>,
}

/// Reads an operator and refuses attributes that it does not have: serde cannot, for a tagged enum.
fn kind_of_its_attributes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<OpKind, D::Error> {
    let given = Value::deserialize(deserializer)?;
    let kind = OpKind::deserialize(&given).map_err(D::Error::custom)?;
    let known = serde_json::to_value(&kind).map_err(D::Error::custom)?;
    // What is left out where it is the usual is known all the same.
    let is_left_out = |name: &str| name == "mask" && matches!(kind, OpKind::Attention { .. });
    let names = given.as_object().into_iter().flat_map(|map| map.keys());
    let unknown = names.into_iter().find(|name| known.get(name).is_none() && !is_left_out(name));
    match unknown {
        Some(name) => {
            let shown: String = name.chars().take(LONGEST_NAME).collect();
            Err(D::Error::custom(format!("`{shown}` is no attribute of operator {}", kind.line().name)))
        }
        None => Ok(kind),
    }
}

/// Characters of a name from a file that are shown.
const LONGEST_NAME: usize = 60;

/// What is wrong with a document, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct DocumentError {
    /// Path of the place: `layers[1].ops[3].operands[0]`.
    pub place: String,
    /// What is wrong there.
    pub what: String,
}

fn error(place: impl Into<String>, what: impl Into<String>) -> DocumentError {
    DocumentError { place: place.into(), what: what.into() }
}

/// Reads a document into a checked graph.
///
/// # Errors
/// Where a name is unknown, or an invariant of the graph is broken.
pub fn read(document: &ModelDocument) -> Result<Model, DocumentError> {
    if document.planner_model != MODEL_SCHEMA_VERSION {
        return Err(error("planner_model", format!("expected version {MODEL_SCHEMA_VERSION}")));
    }
    if document.default_sequence == 0 {
        return Err(error("default_sequence", "a sequence must have at least one token"));
    }
    let layers = document
        .layers
        .iter()
        .enumerate()
        .map(|(i, layer)| read_layer(layer, &format!("layers[{i}]")))
        .collect::<Result<Vec<_>, _>>()?;
    let mut sequence = Vec::new();
    for (i, run) in document.sequence.iter().enumerate() {
        let place = format!("sequence[{i}].layer");
        let layer = document.layers.iter().position(|layer| layer.name == run.layer);
        let layer = layer.ok_or_else(|| error(place, format!("no layer is named `{}`", run.layer)))?;
        sequence.push(Segment { layer, count: run.count });
    }
    let mut ties = Vec::new();
    for (i, tie) in document.ties.iter().enumerate() {
        let side = |name: &str, field: &str| parameter(&layers, name, &format!("ties[{i}].{field}"));
        ties.push(Tie { owner: side(&tie.owner, "owner")?, copy: side(&tie.copy, "copy")? });
    }
    let model = Model {
        name: document.name.clone(),
        default_sequence: document.default_sequence,
        layers,
        sequence,
        ties,
    };
    check(&model).map_err(|broken| error("layers", broken.to_string()))?;
    Ok(model)
}

fn parameter(layers: &[Layer], name: &str, place: &str) -> Result<ParameterRef, DocumentError> {
    let found = name.split_once('.').and_then(|(layer, tensor)| {
        let layer_idx = layers.iter().position(|l| l.name == layer)?;
        let tensor = layers[layer_idx].tensors.iter().position(|t| t.name == tensor)?;
        Some(ParameterRef { layer: layer_idx, tensor: TensorId(tensor) })
    });
    found.ok_or_else(|| error(place, format!("`{name}` is not the `layer.tensor` of a parameter")))
}

/// Reads dims, tensors and operators of a layer by name; `place` is the layer's own path. Nothing is said of how
/// its operators fit together: `graph::check` does that.
///
/// # Errors
/// Where a name is unknown, or a length or a role cannot be.
pub fn read_layer(document: &LayerDocument, place: &str) -> Result<Layer, DocumentError> {
    let dims: Vec<Dim> =
        document.dims.iter().map(|dim| Dim { name: dim.name.clone(), extent: extent(&dim.length) }).collect();
    if let Some(i) =
        document.dims.iter().position(|dim| matches!(dim.length, Length::Slots(f) if !(f > 0.0 && f <= 1.0)))
    {
        return Err(error(
            format!("{place}.dims[{i}].length"),
            "the filled fraction of slots must be in (0, 1]",
        ));
    }
    let no_capacity = |dim: &DimDocument| {
        let Length::Capacity { expected, factor } = dim.length else { return false };
        !(expected > 0.0 && expected <= 1.0 && factor > 0.0 && factor.is_finite())
    };
    if let Some(i) = document.dims.iter().position(no_capacity) {
        let what = "a capacity needs an expected fraction in (0, 1] and a factor above 0";
        return Err(error(format!("{place}.dims[{i}].length"), what));
    }
    let (named_dims, named_tensors) = (
        first_of_each(document.dims.iter().map(|dim| dim.name.as_str())),
        first_of_each(document.tensors.iter().map(|tensor| tensor.name.as_str())),
    );
    let mut tensors = Vec::new();
    for (i, tensor) in document.tensors.iter().enumerate() {
        let dim = |name: &str| {
            let at = named_dims.get(name).copied().map(DimId);
            at.ok_or_else(|| error(format!("{place}.tensors[{i}].dims"), format!("no dim is named `{name}`")))
        };
        let ids = tensor.dims.split_whitespace().map(dim).collect::<Result<Vec<_>, _>>()?;
        let most = if tensor.role == TensorRole::Ahead { MAX_AHEAD } else { 1 };
        if !(1..=most).contains(&tensor.by) {
            let what = format!("`{}` is {} ahead, expected 1 to {most}", tensor.name, tensor.by);
            return Err(error(format!("{place}.tensors[{i}].by"), what));
        }
        let role = match (role(tensor.role, tensor.by), tensor.trainable) {
            (role, true) => role,
            (Role::Parameter(init), false) => Role::Frozen(init),
            (_, false) => {
                let what = format!("`{}` is no parameter: only those can be left untrained", tensor.name);
                return Err(error(format!("{place}.tensors[{i}].trainable"), what));
            }
        };
        tensors.push(Tensor { name: tensor.name.clone(), dims: ids, role });
    }
    let find = |name: &str, place: String| {
        let at = named_tensors.get(name).copied().map(TensorId);
        at.ok_or_else(|| error(place, format!("no tensor is named `{name}`")))
    };
    let mut ops = Vec::new();
    for (i, op) in document.ops.iter().enumerate() {
        let side = |names: &[String], field: &str| {
            let one = |(k, name): (usize, &String)| find(name, format!("{place}.ops[{i}].{field}[{k}]"));
            names.iter().enumerate().map(one).collect::<Result<Vec<_>, _>>()
        };
        let (operands, results) = (side(&op.operands, "operands")?, side(&op.results, "results")?);
        ops.push(Op { name: op.name.clone(), kind: op.kind.clone(), operands, results });
    }
    let streams = |streams: &Streams, field: &str| {
        let one = |(k, name): (usize, &String)| match streams {
            Streams::One(_) => find(name, format!("{place}.{field}")),
            Streams::Several(_) => find(name, format!("{place}.{field}[{k}]")),
        };
        streams.names().iter().enumerate().map(one).collect::<Result<Vec<_>, _>>()
    };
    let stream_in =
        document.stream_in.as_ref().map_or(Ok(Vec::new()), |names| streams(names, "stream_in"))?;
    let out = streams(&document.out, "out")?;
    Ok(Layer { name: document.name.clone(), dims, tensors, ops, stream_in, out })
}

/// Position of the first that has each name.
fn first_of_each<'a>(
    names: impl DoubleEndedIterator<Item = &'a str> + ExactSizeIterator,
) -> BTreeMap<&'a str, usize> {
    // Later ones are overwritten by those before them.
    names.enumerate().rev().map(|(at, name)| (name, at)).collect()
}

fn extent(length: &Length) -> Extent {
    match *length {
        Length::Fixed(n) => Extent::Fixed(n),
        Length::Uneven(n) => Extent::Uneven(n),
        Length::MicroBatch => Extent::MicroBatch,
        Length::Sequence => Extent::Sequence,
        Length::Slots(filled) => Extent::Slots { filled, capacity: None },
        Length::Capacity { expected, factor } => Extent::Slots { filled: expected, capacity: Some(factor) },
    }
}

fn role(role: TensorRole, by: u64) -> Role {
    match role {
        TensorRole::Activation => Role::Activation,
        TensorRole::Parameter => Role::Parameter(Init::Normal),
        TensorRole::ParameterOne => Role::Parameter(Init::One),
        TensorRole::ParameterZero => Role::Parameter(Init::Zero),
        TensorRole::Tokens => Role::Data(Data::Tokens),
        TensorRole::Labels => Role::Data(Data::Labels),
        TensorRole::Ahead => Role::Data(Data::Ahead(by)),
        TensorRole::Positions => Role::Data(Data::Positions),
        TensorRole::AlibiSlopes => Role::Data(Data::AlibiSlopes),
        TensorRole::RouterBias => Role::Data(Data::RouterBias),
        TensorRole::Features => Role::Data(Data::Features),
    }
}

/// Writes a graph as a document.
pub fn write(model: &Model) -> ModelDocument {
    let name = |side: ParameterRef| {
        let layer = &model.layers[side.layer];
        format!("{}.{}", layer.name, layer.tensors[side.tensor.0].name)
    };
    ModelDocument {
        planner_model: MODEL_SCHEMA_VERSION,
        name: model.name.clone(),
        default_sequence: model.default_sequence,
        layers: model.layers.iter().map(write_layer).collect(),
        sequence: model
            .sequence
            .iter()
            .map(|run| SegmentDocument { layer: model.layers[run.layer].name.clone(), count: run.count })
            .collect(),
        ties: model
            .ties
            .iter()
            .map(|tie| TieDocument { owner: name(tie.owner), copy: name(tie.copy) })
            .collect(),
    }
}

fn write_layer(layer: &Layer) -> LayerDocument {
    let tensor_name = |tensor: &TensorId| layer.tensors[tensor.0].name.clone();
    let dims_text = |tensor: &Tensor| {
        tensor.dims.iter().map(|dim| layer.dims[dim.0].name.as_str()).collect::<Vec<_>>().join(" ")
    };
    LayerDocument {
        name: layer.name.clone(),
        dims: layer
            .dims
            .iter()
            .map(|dim| DimDocument { name: dim.name.clone(), length: write_extent(dim.extent) })
            .collect(),
        tensors: layer
            .tensors
            .iter()
            .map(|t| TensorDocument {
                name: t.name.clone(),
                dims: dims_text(t),
                role: write_role(t.role),
                trainable: !matches!(t.role, Role::Frozen(_)),
                by: if let Role::Data(Data::Ahead(by)) = t.role { by } else { 1 },
            })
            .collect(),
        ops: layer
            .ops
            .iter()
            .map(|op| OpDocument {
                name: op.name.clone(),
                kind: op.kind.clone(),
                operands: op.operands.iter().map(tensor_name).collect(),
                results: op.results.iter().map(tensor_name).collect(),
            })
            .collect(),
        stream_in: Streams::of(layer.stream_in.iter().map(tensor_name).collect()),
        // A layer without one is refused when it is read.
        out: Streams::of(layer.out.iter().map(tensor_name).collect()).unwrap_or(Streams::Several(Vec::new())),
    }
}

fn write_extent(extent: Extent) -> Length {
    match extent {
        Extent::Fixed(n) => Length::Fixed(n),
        Extent::Uneven(n) => Length::Uneven(n),
        Extent::MicroBatch => Length::MicroBatch,
        // A slice's dim is made for a run; a document has whole sequences.
        Extent::Sequence | Extent::UpToSlice => Length::Sequence,
        Extent::Slots { filled, capacity: None } => Length::Slots(filled),
        Extent::Slots { filled, capacity: Some(factor) } => Length::Capacity { expected: filled, factor },
    }
}

fn write_role(role: Role) -> TensorRole {
    match role {
        Role::Activation => TensorRole::Activation,
        Role::Parameter(Init::Normal) | Role::Frozen(Init::Normal) => TensorRole::Parameter,
        Role::Parameter(Init::One) | Role::Frozen(Init::One) => TensorRole::ParameterOne,
        Role::Parameter(Init::Zero) | Role::Frozen(Init::Zero) => TensorRole::ParameterZero,
        Role::Data(Data::Tokens) => TensorRole::Tokens,
        Role::Data(Data::Labels) => TensorRole::Labels,
        Role::Data(Data::Ahead(_)) => TensorRole::Ahead,
        Role::Data(Data::Positions) => TensorRole::Positions,
        Role::Data(Data::AlibiSlopes) => TensorRole::AlibiSlopes,
        Role::Data(Data::RouterBias) => TensorRole::RouterBias,
        Role::Data(Data::Features) => TensorRole::Features,
    }
}
