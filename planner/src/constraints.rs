//! What a user says of single layers and tensors: partial annotations, from which the choice problem fills in the rest.
//!
//! ```text
//! parts       so many blocks of a dim of a tensor, wherever it is made or read; 1 is whole; other dims are free
//! recompute   whether an operator's results are kept for backward or computed again
//! storage     the ZeRO stage of one parameter: which of its states are cut between uses
//! ```
//! Annotations are of layer kinds, by the names of `planner models MODEL --native`, or of single layers of a kind,
//! which are made kinds of their own (`single_layers`). They strike choices off the nodes of the choice problem, so
//! bounds, gap and proof are those of what is left. A kind with annotations keeps the form in which it was read: a
//! fused form has other operators and tensors.

use std::collections::BTreeMap;

use ir::graph::{Extent, Layer, Model, Op, TensorId};
use ir::mesh::Mesh;
use ir::op::OpKind;
use ir::sharding::Sharding;
use ir::strategy::Placements;
use serde::Deserialize;

/// The name that stands for all layer kinds, or all operators of one.
pub(crate) const ALL: &str = "*";

/// Annotations by layer kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constraints {
    /// By the name of a layer kind, or `*`, or single layers of a kind, counted from 0: `decoder[0-3,17]`.
    pub layers: BTreeMap<String, LayerConstraints>,
}

/// Annotations of a layer kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LayerConstraints {
    /// By tensor, then by dim: into how many parts it is cut.
    pub parts: BTreeMap<String, BTreeMap<String, u64>>,
    /// By operator, or `*`.
    pub recompute: BTreeMap<String, Kept>,
    /// By parameter: 0 to 3.
    pub storage: BTreeMap<String, u8>,
}

/// Whether results are kept for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kept {
    /// They are.
    Keep,
    /// They are computed again.
    Again,
}

impl Constraints {
    /// Whether nothing is annotated.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Whether a layer kind is annotated.
    pub(crate) fn names(&self, layer: &Layer) -> bool {
        self.of(layer).next().is_some()
    }

    /// What is said of a layer kind: by its name, then of the kind that its layers were taken from, then of all.
    fn of<'a>(&'a self, layer: &Layer) -> impl Iterator<Item = &'a LayerConstraints> {
        let (own, whole) = (layer.name.as_str(), kind_name(&layer.name));
        let names = [Some(own), (whole != own).then_some(whole), Some(ALL)];
        names.into_iter().flatten().filter_map(|name| self.layers.get(name))
    }

    /// Whether placements of an operator's tensors are what is said of them.
    pub(crate) fn allow(&self, layer: &Layer, op: &Op, places: &Placements, mesh: &Mesh) -> bool {
        let all = op.operands.iter().zip(&places.operands).chain(op.results.iter().zip(&places.results));
        let mut all = all.map(|(tensor, sharding)| (*tensor, *sharding));
        self.is_empty() || all.all(|(tensor, sharding)| self.allow_use(layer, tensor, sharding, mesh))
    }

    fn allow_use(&self, layer: &Layer, tensor: TensorId, sharding: Sharding, mesh: &Mesh) -> bool {
        let it = &layer.tensors[tensor.0];
        self.of(layer).filter_map(|said| said.parts.get(&it.name)).all(|dims| {
            it.dims.iter().enumerate().all(|(at, dim)| {
                let wanted = dims.get(&layer.dims[dim.0].name);
                let parts: u64 = sharding.axes_of(at).map(|axis| mesh.size(axis)).product();
                wanted.is_none_or(|wanted| *wanted == parts)
            })
        })
    }

    /// What is said of an operator's results: by its name, then of all of its layer; of the layer, then of its kind,
    /// then of all kinds.
    pub(crate) fn kept(&self, layer: &Layer, op: &Op) -> Option<Kept> {
        if op.kind == OpKind::Fork {
            return None;
        }
        let said =
            |layer: &LayerConstraints| layer.recompute.get(&op.name).or(layer.recompute.get(ALL)).copied();
        self.of(layer).find_map(said)
    }

    /// ZeRO stage that a parameter must have.
    pub(crate) fn storage(&self, layer: &Layer, tensor: TensorId) -> Option<u8> {
        self.of(layer).find_map(|said| said.storage.get(&layer.tensors[tensor.0].name)).copied()
    }

    /// Refuses what no plan on so many devices can honour: names that the model lacks, parts that do not divide.
    ///
    /// # Errors
    /// The annotation, and what there is instead.
    pub fn check(&self, model: &Model, n_devices: u64) -> Result<(), String> {
        for (name, said) in &self.layers {
            let kinds: Vec<&Layer> =
                model.layers.iter().filter(|layer| name == ALL || is_called(layer, name)).collect();
            if kinds.is_empty() {
                let known: Vec<&str> = model.layers.iter().map(|layer| layer.name.as_str()).collect();
                return Err(format!("no layer is called `{name}`: the model has {}", known.join(", ")));
            }
            said.check(&format!("layer `{name}`"), &kinds, n_devices)?;
        }
        Ok(())
    }
}

/// The name of a kind, also of layers that were taken from it.
pub(crate) fn kind_name(name: &str) -> &str {
    named(name).map_or(name, |(kind, _)| kind)
}

/// The kind and the positions in `decoder[0-3,17]`.
pub(crate) fn named(name: &str) -> Option<(&str, &str)> {
    let (kind, numbers) = name.strip_suffix(']')?.rsplit_once('[')?;
    (!kind.is_empty()).then_some((kind, numbers))
}

fn is_called(layer: &Layer, name: &str) -> bool {
    layer.name == name || kind_name(&layer.name) == name
}

impl LayerConstraints {
    fn check(&self, place: &str, kinds: &[&Layer], n_devices: u64) -> Result<(), String> {
        for (tensor, dims) in &self.parts {
            let found = find(kinds, tensor).ok_or_else(|| no_tensor(place, kinds, tensor))?;
            for (dim, &parts) in dims {
                check_dim(&format!("{place}: `{tensor}`"), found, (dim, parts), n_devices)?;
            }
        }
        for op in self.recompute.keys().filter(|op| op.as_str() != ALL) {
            if !kinds.iter().any(|layer| layer.ops.iter().any(|one| one.name == *op)) {
                let known = kinds.iter().flat_map(|layer| &layer.ops);
                let known: Vec<&str> =
                    known.filter(|op| op.kind != OpKind::Fork).map(|op| op.name.as_str()).collect();
                return Err(format!("{place}: no operator is called `{op}`: there are {}", known.join(", ")));
            }
        }
        for (tensor, stage) in &self.storage {
            let (layer, found) = find(kinds, tensor).ok_or_else(|| no_tensor(place, kinds, tensor))?;
            if !layer.is_parameter(found) {
                return Err(format!("{place}: `{tensor}` is no parameter, and has no storage"));
            }
            if *stage > 3 {
                return Err(format!("{place}: storage of `{tensor}` is {stage}, expected 0, 1, 2 or 3"));
            }
        }
        Ok(())
    }
}

fn find<'a>(kinds: &[&'a Layer], name: &str) -> Option<(&'a Layer, TensorId)> {
    kinds.iter().find_map(|layer| {
        let at = layer.tensors.iter().position(|tensor| tensor.name == name)?;
        Some((*layer, TensorId(at)))
    })
}

fn no_tensor(place: &str, kinds: &[&Layer], name: &str) -> String {
    let parameters = kinds.iter().flat_map(|layer| {
        layer.parameters().map(|tensor| layer.tensors[tensor.0].name.as_str()).collect::<Vec<_>>()
    });
    let known: Vec<&str> = parameters.collect();
    format!("{place}: no tensor is called `{name}`: its parameters are {}", known.join(", "))
}

fn check_dim(
    place: &str,
    (layer, tensor): (&Layer, TensorId),
    (name, parts): (&str, u64),
    n_devices: u64,
) -> Result<(), String> {
    let dims = &layer.tensors[tensor.0].dims;
    let Some(dim) = dims.iter().find(|dim| layer.dims[dim.0].name == name) else {
        let known: Vec<&str> = dims.iter().map(|dim| layer.dims[dim.0].name.as_str()).collect();
        return Err(format!("{place} has no dim `{name}`: it has {}", known.join(", ")));
    };
    if parts == 0 || !n_devices.is_multiple_of(parts) {
        return Err(format!("{place}: {parts} parts of `{name}` do not divide the {n_devices} devices"));
    }
    match layer.dims[dim.0].extent {
        Extent::Fixed(length) if !length.is_multiple_of(parts) => {
            Err(format!("{place}: {length} of `{name}` cannot be cut into {parts} equal parts"))
        }
        Extent::Fixed(_)
        | Extent::Uneven(_)
        | Extent::MicroBatch
        | Extent::Sequence
        | Extent::UpToSlice
        | Extent::Slots { .. } => Ok(()),
    }
}
