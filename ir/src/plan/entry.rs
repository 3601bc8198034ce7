//! One layer kind with one choice, in names, and the way there and back.
//!
//! Text forms: a sharding is `b@x0 s@x1,x2 sum@x3`, or `replicated`; what an operator does with an axis is the name of
//! the loop it cuts, `-` for computing the same, `ring`, `defer` or `through`. [`Entry::of`] and [`Entry::choice`] are
//! inverse.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::collective::{Algorithm, CollectiveKind, CommunicationClass};
use crate::graph::{Layer, Op, TensorId};
use crate::lower::{LayerChoice, Recompute};
use crate::mesh::{AxisId, MAX_AXES, Mesh};
use crate::op::Linear;
use crate::plan::PlanError;
use crate::program::{AxisSet, Home, StateHome, Storage};
use crate::sharding::{Placement, Sharding};
use crate::signature::{Signature, signature};
use crate::strategy::{AxisUse, Strategy};

/// Text of a sharding that is whole on every device.
const REPLICATED: &str = "replicated";
/// Text of an unfinished sum.
const SUM: &str = "sum";
/// Text of an unfinished maximum.
const MAX: &str = "max";
/// Text of an operator that computes the same along an axis.
const SAME: &str = "-";
/// Text of an operator that leaves the arriving gradient an unfinished sum.
const DEFER: &str = "defer";
/// Text of an operator that cuts queries and lets blocks of keys travel.
const RING: &str = "ring";
/// Text of an operator that lets an unfinished sum through.
const THROUGH: &str = "through";

/// A layer kind and what was chosen for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Name of the layer kind.
    pub layer: String,
    /// Sharding of the incoming stream; `replicated` for a layer that reads tokens.
    pub stream: String,
    /// Sharding of the outgoing stream; `replicated` for the loss.
    pub out: String,
    /// Which memory holds what is kept for backward; the device's own where it is not said.
    #[serde(default, skip_serializing_if = "Home::is_device")]
    pub kept_home: Home,
    /// Which memory holds the parameters between uses; the device's own where it is not said.
    #[serde(default, skip_serializing_if = "Home::is_device")]
    pub parameters_home: Home,
    /// Every operator, in the order of the layer.
    pub ops: Vec<OpEntry>,
    /// Every parameter, in the order of the layer.
    pub parameters: Vec<ParameterEntry>,
    /// By which algorithms its collectives run; what is not listed runs around a ring, exchanges directly.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub collectives: Vec<CollectiveEntry>,
    /// Whether the program was proven equal to the layer; absent where nobody tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof: Option<Proof>,
}

/// What one operator does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OpEntry {
    /// Name of the operator.
    pub op: String,
    /// One word per mesh axis: the loop it cuts, `-`, `ring`, `defer` or `through`.
    pub axes: Vec<String>,
    /// Its results are computed again in backward instead of kept.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recompute: bool,
}

/// Where one parameter lives between uses: axes that cut each of its states.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ParameterEntry {
    /// Name of the parameter.
    pub tensor: String,
    /// Cut of the parameter, gathered before each use.
    pub parameter: Vec<String>,
    /// Cut of the gradient accumulator, reduced into every micro-batch.
    pub gradient: Vec<String>,
    /// Cut of the optimizer state.
    pub optimizer: Vec<String>,
    /// Which memory holds the optimizer state; the device's own where it is not said.
    #[serde(default, skip_serializing_if = "StateHome::is_device")]
    pub optimizer_home: StateHome,
    /// The owner of its tie, on the same stage, holds it: one tensor, to which the gradients of both are added.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
}

/// How collectives of one purpose run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CollectiveEntry {
    /// What they are for.
    pub class: CommunicationClass,
    /// What they do.
    pub collective: CollectiveKind,
    /// Axes along which, in mesh order.
    pub axes: Vec<String>,
    /// How they run.
    pub algorithm: Algorithm,
    /// Of which tensors; of all where parameters and their gradients move in buckets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<String>,
}

/// Whether a program was proven equal to its layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Proof {
    /// It was.
    Proven,
    /// It was not.
    Open {
        /// Why.
        reason: String,
    },
}

impl Entry {
    /// Writes a choice for a layer.
    pub fn of(layer: &Layer, mesh: &Mesh, choice: &LayerChoice) -> Self {
        let ops = layer.ops.iter().zip(&choice.strategies).zip(&choice.recompute);
        let [stream, out] = stream_dims(layer);
        Self {
            layer: layer.name.clone(),
            stream: write_sharding(choice.stream, mesh, &stream),
            out: write_sharding(choice.out, mesh, &out),
            kept_home: choice.kept,
            parameters_home: choice.parameters,
            ops: ops
                .map(|((op, &strategy), &recompute)| OpEntry {
                    op: op.name.clone(),
                    axes: write_strategy(&signature(layer, op), strategy, mesh),
                    recompute: recompute == Recompute::Again,
                })
                .collect(),
            parameters: choice
                .storage
                .iter()
                .map(|(tensor, &storage)| ParameterEntry {
                    shared: choice.shared.contains(tensor),
                    ..write_storage(&layer.tensors[tensor.0].name, storage, mesh)
                })
                .collect(),
            collectives: Vec::new(),
            proof: None,
        }
    }

    /// Reads the choice back. Places in errors are relative to the entry.
    ///
    /// # Errors
    /// Where a name is unknown, missing or out of order.
    pub fn choice(&self, layer: &Layer, mesh: &Mesh) -> Result<LayerChoice, PlanError> {
        let [stream, out] = stream_dims(layer);
        let read = |text: &str, dims: &[&str], field: &str| {
            read_sharding(text, mesh, dims).map_err(|what| PlanError::new(field, what))
        };
        if self.ops.len() != layer.ops.len() {
            let what =
                format!("layer `{}` has {} operators, found {}", layer.name, layer.ops.len(), self.ops.len());
            return Err(PlanError::new("ops", what));
        }
        let mut strategies = Vec::new();
        for (i, (entry, op)) in self.ops.iter().zip(&layer.ops).enumerate() {
            if entry.op != op.name {
                let what = format!("expected operator `{}`, found `{}`", op.name, entry.op);
                return Err(PlanError::new(format!("ops[{i}].op"), what));
            }
            strategies.push(read_strategy((layer, op), &entry.axes, mesh, &format!("ops[{i}].axes"))?);
        }
        let shared = self.parameters.iter().zip(layer.parameters()).filter(|(entry, _)| entry.shared);
        let again = |op: &OpEntry| if op.recompute { Recompute::Again } else { Recompute::Keep };
        Ok(LayerChoice {
            stream: read(&self.stream, &stream, "stream")?,
            out: read(&self.out, &out, "out")?,
            strategies,
            recompute: self.ops.iter().map(again).collect(),
            kept: self.kept_home,
            parameters: self.parameters_home,
            storage: self.storage(layer, mesh)?,
            shared: shared.map(|(_, tensor)| tensor).collect(),
        })
    }

    fn storage(&self, layer: &Layer, mesh: &Mesh) -> Result<BTreeMap<TensorId, Storage>, PlanError> {
        let tensors: Vec<TensorId> = layer.parameters().collect();
        if self.parameters.len() != tensors.len() {
            let found = self.parameters.len();
            let what = format!("layer `{}` has {} parameters, found {found}", layer.name, tensors.len());
            return Err(PlanError::new("parameters", what));
        }
        let mut storage = BTreeMap::new();
        for (i, (entry, tensor)) in self.parameters.iter().zip(tensors).enumerate() {
            let name = &layer.tensors[tensor.0].name;
            if entry.tensor != *name {
                let what = format!("expected parameter `{name}`, found `{}`", entry.tensor);
                return Err(PlanError::new(format!("parameters[{i}].tensor"), what));
            }
            let read = |axes: &[String], field: &str| {
                read_axes(axes, mesh).map_err(|what| PlanError::new(format!("parameters[{i}].{field}"), what))
            };
            let states = Storage {
                parameter: read(&entry.parameter, "parameter")?,
                gradient: read(&entry.gradient, "gradient")?,
                optimizer: read(&entry.optimizer, "optimizer")?,
                home: entry.optimizer_home,
            };
            storage.insert(tensor, states);
        }
        Ok(storage)
    }
}

/// Names of the dims of the streams that a layer reads and leaves, for their one sharding: those of the topmost.
fn stream_dims(layer: &Layer) -> [Vec<&str>; 2] {
    [&layer.stream_in, &layer.out]
        .map(|streams| streams.last().map(|&tensor| dim_names(layer, tensor)).unwrap_or_default())
}

fn dim_names(layer: &Layer, tensor: TensorId) -> Vec<&str> {
    layer.tensors[tensor.0].dims.iter().map(|dim| layer.dims[dim.0].name.as_str()).collect()
}

/// Text of a sharding of a tensor with the given dims: `b@x0 s@x1,x2 sum@x3`, or `replicated`.
pub fn write_sharding(sharding: Sharding, mesh: &Mesh, dims: &[&str]) -> String {
    let mut words: Vec<String> = Vec::new();
    for (dim, name) in dims.iter().enumerate() {
        let axes: Vec<&str> = mesh
            .axis_ids()
            .filter(|&a| on(sharding, a) == Placement::Shard(dim as u8))
            .map(|a| axis_name(mesh, a))
            .collect();
        if !axes.is_empty() {
            words.push(format!("{name}@{}", axes.join(",")));
        }
    }
    for (placement, name) in [(Placement::PartialSum, SUM), (Placement::PartialMax, MAX)] {
        let axes: Vec<&str> =
            mesh.axis_ids().filter(|&a| on(sharding, a) == placement).map(|a| axis_name(mesh, a)).collect();
        if !axes.is_empty() {
            words.push(format!("{name}@{}", axes.join(",")));
        }
    }
    if words.is_empty() { REPLICATED.into() } else { words.join(" ") }
}

fn on(sharding: Sharding, axis: AxisId) -> Placement {
    sharding.0.get(axis.0).copied().unwrap_or(Placement::Replicate)
}

fn axis_name(mesh: &Mesh, axis: AxisId) -> &str {
    mesh.axes[axis.0].name.as_str()
}

/// Reads what [`write_sharding`] wrote.
///
/// # Errors
/// A sentence about the word that does not fit.
pub fn read_sharding(text: &str, mesh: &Mesh, dims: &[&str]) -> Result<Sharding, String> {
    let mut sharding = Sharding::REPLICATED;
    if text == REPLICATED {
        return Ok(sharding);
    }
    if text.trim().is_empty() {
        return Err(format!("expected `{REPLICATED}` or words such as `b@x0`, found nothing"));
    }
    for word in text.split_whitespace() {
        let Some((name, axes)) = word.rsplit_once('@') else {
            return Err(format!("expected `dim@axis`, found `{word}`"));
        };
        let placement = match (dims.iter().position(|dim| *dim == name), name) {
            (Some(dim), _) => Placement::Shard(dim as u8),
            (None, SUM) => Placement::PartialSum,
            (None, MAX) => Placement::PartialMax,
            (None, _) => return Err(format!("no dim is named `{name}`: the dims are `{}`", dims.join(" "))),
        };
        let names: Vec<String> = axes.split(',').map(str::to_owned).collect();
        for axis in read_axes(&names, mesh)?.axes() {
            if sharding.on(axis) != Placement::Replicate {
                return Err(format!("axis `{}` is used twice", axis_name(mesh, axis)));
            }
            sharding = sharding.with(axis, placement);
        }
    }
    Ok(sharding)
}

pub(super) fn write_axes(set: AxisSet, mesh: &Mesh) -> Vec<String> {
    set.axes().into_iter().filter_map(|axis| mesh.axes.get(axis.0)).map(|axis| axis.name.clone()).collect()
}

/// Reads a list of axes, which stand in mesh order: the outer one cuts first.
pub(super) fn read_axes(names: &[String], mesh: &Mesh) -> Result<AxisSet, String> {
    let mut axes: Vec<AxisId> = Vec::new();
    for name in names {
        let Some(at) = mesh.axes.iter().take(MAX_AXES).position(|axis| axis.name == *name) else {
            return Err(format!("no axis is named `{name}`"));
        };
        if mesh.axes[at].size < 2 {
            return Err(format!("axis `{name}` has one device: nothing can be cut along it"));
        }
        if axes.last().is_some_and(|last| last.0 >= at) {
            return Err(format!("axis `{name}` is out of order: axes stand in mesh order, each once"));
        }
        axes.push(AxisId(at));
    }
    Ok(AxisSet::of(&axes))
}

fn write_storage(tensor: &str, storage: Storage, mesh: &Mesh) -> ParameterEntry {
    ParameterEntry {
        tensor: tensor.into(),
        parameter: write_axes(storage.parameter, mesh),
        gradient: write_axes(storage.gradient, mesh),
        optimizer: write_axes(storage.optimizer, mesh),
        optimizer_home: storage.home,
        shared: false,
    }
}

fn write_strategy(sig: &Signature, strategy: Strategy, mesh: &Mesh) -> Vec<String> {
    let word = |axis: AxisId| match strategy.on(axis) {
        AxisUse::Factor(factor) => {
            sig.factors.get(factor.0 as usize).map_or(SAME, |factor| factor.name.as_str())
        }
        AxisUse::Ring(_) => RING,
        AxisUse::Same => SAME,
        AxisUse::Defer => DEFER,
        AxisUse::Through => THROUGH,
    };
    mesh.axis_ids().take(MAX_AXES).map(|axis| word(axis).to_owned()).collect()
}

fn read_strategy(
    (layer, op): (&Layer, &Op),
    words: &[String],
    mesh: &Mesh,
    place: &str,
) -> Result<Strategy, PlanError> {
    let sig = signature(layer, op);
    if words.len() != mesh.n_axes() {
        let what = format!("the mesh has {} axes, found {} words", mesh.n_axes(), words.len());
        return Err(PlanError::new(place, what));
    }
    let mut strategy = Strategy::SAME;
    for (i, word) in words.iter().take(MAX_AXES).enumerate() {
        let fail = |what: String| Err(PlanError::new(format!("{place}[{i}]"), what));
        let axis_use = match (word.as_str(), sig.factor(word)) {
            (SAME, _) => AxisUse::Same,
            (DEFER, _) => AxisUse::Defer,
            (RING, _) => match sig.ring {
                Some(ring) => AxisUse::Ring(ring),
                None => return fail(format!("`{}` meets no keys one by one: there is no ring", op.name)),
            },
            (THROUGH, _) if op.kind.line().linear == Linear::Yes => AxisUse::Through,
            (THROUGH, _) => {
                return fail(format!("`{}` is not linear: no unfinished sum passes through", op.name));
            }
            (_, Some(factor)) => AxisUse::Factor(factor),
            (_, None) => {
                let loops: Vec<&str> = sig.factors.iter().map(|factor| factor.name.as_str()).collect();
                return fail(format!(
                    "`{}` has no loop `{word}`: expected one of `{}`, `-`, `ring`, `defer`, `through`",
                    op.name,
                    loops.join("`, `")
                ));
            }
        };
        if mesh.axes[i].size < 2 && axis_use != AxisUse::Same {
            return fail(format!(
                "axis `{}` has one device: expected `-`, found `{word}`",
                mesh.axes[i].name
            ));
        }
        strategy.0[i] = axis_use;
    }
    Ok(strategy)
}

/// Words that no dim may be called, for they mean something else here.
pub(crate) const RESERVED: [&str; 7] = [REPLICATED, SUM, MAX, SAME, RING, DEFER, THROUGH];
