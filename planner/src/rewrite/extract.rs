//! From classes of equal forms back to a layer: for every class one form is taken, operators stand in the order of the
//! original ones, and values with several readers get a fork.

use std::collections::{BTreeMap, BTreeSet};

use egg::Id;
use ir::graph::{Dim, DimId, Extent, Layer, Op, OpId, Role, Tensor, TensorId};
use ir::op::OpKind;

use super::form::{Classes, Form, Forms};
use super::siblings::Group;
use super::{FusedParameter, FusedPart, Variant};

/// The form of a layer in which exactly the given groups are fused.
pub(super) fn extract(
    layer: &Layer,
    (graph, classes): (&Forms, &Classes),
    groups: &[Group],
    chosen: &BTreeSet<usize>,
) -> Option<Variant> {
    let mut units = BTreeMap::new();
    let class_of = |tensor: &TensorId| Some(graph.find(*classes.get(tensor)?));
    let out: Vec<Id> = layer.out.iter().map(class_of).collect::<Option<_>>()?;
    let mut open = out.clone();
    let mut seen = BTreeSet::new();
    while let Some(class) = open.pop() {
        if !seen.insert(class) {
            continue;
        }
        let form = choose(graph, class, chosen)?;
        if let Some((key, unit)) = unit(layer, graph, groups, form)? {
            units.insert(key, unit);
        }
        open.extend(form.children_of().iter().map(|&id| graph.find(id)));
    }
    let mut emit = Emit::new(layer, groups, chosen);
    for &stream in &layer.stream_in {
        let id = emit.given(graph.find(classes[&stream]), stream);
        emit.layer.stream_in.push(id);
    }
    for unit in units.into_values() {
        emit.unit(layer, graph, unit)?;
    }
    emit.layer.out = out.iter().map(|out| emit.values.get(out).copied()).collect::<Option<_>>()?;
    emit.forks();
    let names: Vec<String> = chosen.iter().map(|&group| joined(layer, &groups[group].steps[0].ops)).collect();
    Some(Variant { name: names.join(" "), layer: emit.layer, fused: emit.fused, kept: emit.kept })
}

impl Form {
    /// Classes that must be there before this form; a pack's parts become one parameter.
    fn children_of(&self) -> &[Id] {
        match self {
            Self::Given(_) | Self::Pack { .. } => &[],
            Self::Apply { operands, .. } => operands,
            Self::Fused { operands, .. } => operands,
            Self::Part { whole, .. } => whole,
        }
    }
}

/// The form to take: a part of a chosen group, the later step first; else the original.
fn choose<'a>(graph: &'a Forms, class: Id, chosen: &BTreeSet<usize>) -> Option<&'a Form> {
    let rank = |form: &&Form| match form {
        Form::Part { group, .. } => u8::from(!chosen.contains(group)) * 2,
        Form::Given(_) | Form::Apply { .. } | Form::Pack { .. } | Form::Fused { .. } => 1,
    };
    let form = graph[class].nodes.iter().min_by_key(|form| (rank(form), (*form).clone()))?;
    (rank(&form) < 2).then_some(form)
}

/// Position of an operator: that of the first original one it stands for, then the order among those.
type Key = (usize, usize);

/// An operator to emit.
struct Unit {
    name: String,
    kind: OpKind,
    operands: Vec<Operand>,
    results: Vec<(Id, String, DimsOf)>,
}

enum Operand {
    Value(Id),
    Given(Id, TensorId),
    Pack { group: usize, step: usize },
}

enum DimsOf {
    Tensor(TensorId),
    Group(usize),
}

fn joined(layer: &Layer, ops: &[OpId]) -> String {
    ops.iter().map(|op| layer.ops[op.0].name.as_str()).collect::<Vec<_>>().join("+")
}

/// The operator that computes a form; the inner `None` where it is given.
#[expect(clippy::option_option, reason = "no operator and no such form are two things")]
fn unit(layer: &Layer, graph: &Forms, groups: &[Group], form: &Form) -> Option<Option<(Key, Unit)>> {
    let operand = |&id: &Id| {
        let class = graph.find(id);
        let given = graph[class].nodes.iter().find_map(|form| match form {
            Form::Given(tensor) => Some(Operand::Given(class, *tensor)),
            Form::Pack { group, step, .. } => Some(Operand::Pack { group: *group, step: *step }),
            Form::Apply { .. } | Form::Fused { .. } | Form::Part { .. } => None,
        });
        given.unwrap_or(Operand::Value(class))
    };
    let first = |group: usize| groups[group].steps[0].ops.iter().map(|op| op.0).min();
    Some(match form {
        Form::Given(_) | Form::Pack { .. } => None,
        Form::Apply { op, operands, .. } => {
            let it = &layer.ops[op.0];
            let result = |(result, &tensor): (usize, &TensorId)| {
                let form = Form::Apply { op: *op, result, operands: operands.clone() };
                let name = layer.tensors[tensor.0].name.clone();
                Some((graph.find(graph.lookup(form)?), name, DimsOf::Tensor(tensor)))
            };
            let results = it.results.iter().enumerate().map(result).collect::<Option<Vec<_>>>()?;
            let operands = operands.iter().map(operand).collect();
            Some(((op.0, 0), Unit { name: it.name.clone(), kind: it.kind.clone(), operands, results }))
        }
        Form::Fused { group, step, operands } => {
            let ops = &groups[*group].steps[*step].ops;
            let name = joined(layer, ops);
            let class = graph.find(graph.lookup(form.clone())?);
            let results = vec![(class, name.clone(), DimsOf::Group(*group))];
            let kind = layer.ops[ops[0].0].kind.clone();
            let operands = operands.iter().map(operand).collect();
            Some(((first(*group)?, *step), Unit { name, kind, operands, results }))
        }
        Form::Part { group, whole, .. } => {
            let it = &groups[*group];
            let last = it.steps.last()?;
            let result = |(member, op): (usize, &OpId)| {
                let form = Form::Part { group: *group, member, whole: *whole };
                let tensor = layer.ops[op.0].results[0];
                let name = layer.tensors[tensor.0].name.clone();
                Some((graph.find(graph.lookup(form)?), name, DimsOf::Tensor(tensor)))
            };
            let results = last.ops.iter().enumerate().map(result).collect::<Option<Vec<_>>>()?;
            let name = format!("{}.split", joined(layer, &last.ops));
            let kind = OpKind::Split { sizes: it.sizes.clone() };
            let operands = whole.iter().map(operand).collect();
            Some(((first(*group)?, it.steps.len()), Unit { name, kind, operands, results }))
        }
    })
}

/// A layer as far as it has been written.
struct Emit<'a> {
    original: &'a Layer,
    groups: &'a [Group],
    layer: Layer,
    values: BTreeMap<Id, TensorId>,
    part_dims: BTreeMap<usize, DimId>,
    fused: Vec<FusedParameter>,
    kept: Vec<(TensorId, TensorId)>,
}

impl<'a> Emit<'a> {
    fn new(original: &'a Layer, groups: &'a [Group], chosen: &BTreeSet<usize>) -> Self {
        let (name, dims) = (original.name.clone(), original.dims.clone());
        let layer = Layer {
            name,
            dims,
            tensors: Vec::new(),
            ops: Vec::new(),
            stream_in: Vec::new(),
            out: Vec::new(),
        };
        let mut emit = Self {
            original,
            groups,
            layer,
            values: BTreeMap::new(),
            part_dims: BTreeMap::new(),
            fused: Vec::new(),
            kept: Vec::new(),
        };
        for &group in chosen {
            let name = fresh("g", |name| emit.layer.dims.iter().any(|dim| dim.name == name));
            let extent = Extent::Fixed(groups[group].sizes.iter().sum());
            emit.layer.dims.push(Dim { name, extent });
            emit.part_dims.insert(group, DimId(emit.layer.dims.len() - 1));
        }
        emit
    }

    fn tensor(&mut self, name: &str, dims: Vec<DimId>, role: Role) -> TensorId {
        let name = fresh(name, |name| self.layer.tensors.iter().any(|tensor| tensor.name == name));
        self.layer.tensors.push(Tensor { name, dims, role });
        TensorId(self.layer.tensors.len() - 1)
    }

    /// The copy of a tensor that the layer is given.
    fn given(&mut self, class: Id, tensor: TensorId) -> TensorId {
        if let Some(&id) = self.values.get(&class) {
            return id;
        }
        let Tensor { name, dims, role } = self.original.tensors[tensor.0].clone();
        let id = self.tensor(&name, dims, role);
        self.values.insert(class, id);
        if self.original.is_parameter(tensor) {
            self.kept.push((tensor, id));
        }
        id
    }

    fn with_parts(&self, group: usize, dims: &[Option<DimId>]) -> Vec<DimId> {
        dims.iter().map(|dim| dim.unwrap_or(self.part_dims[&group])).collect()
    }

    /// The fused parameter of a step.
    fn pack(&mut self, group: usize, step: usize) -> TensorId {
        let it = &self.groups[group].steps[step];
        let parts: Vec<TensorId> = it.ops.iter().map(|op| self.original.ops[op.0].operands[1]).collect();
        let names: Vec<&str> = parts.iter().map(|part| self.original.tensors[part.0].name.as_str()).collect();
        let dims = self.with_parts(group, &it.parameter);
        let id = self.tensor(&names.join("+"), dims, self.original.tensors[parts[0].0].role);
        let mut from = 0;
        let part = |(&tensor, &length): (&TensorId, &u64)| {
            from += length;
            FusedPart { tensor, from: from - length, length }
        };
        let parts = parts.iter().zip(&self.groups[group].sizes).map(part).collect();
        let dim = it.parameter.iter().position(Option::is_none).unwrap_or(0);
        self.fused.push(FusedParameter { tensor: id, dim, parts });
        id
    }

    fn unit(&mut self, layer: &Layer, graph: &Forms, unit: Unit) -> Option<()> {
        let mut operands = Vec::new();
        for operand in unit.operands {
            operands.push(match operand {
                Operand::Value(class) => *self.values.get(&graph.find(class))?,
                Operand::Given(class, tensor) => self.given(class, tensor),
                Operand::Pack { group, step } => self.pack(group, step),
            });
        }
        let mut results = Vec::new();
        for (class, name, dims) in unit.results {
            let dims = match dims {
                DimsOf::Tensor(tensor) => layer.tensors[tensor.0].dims.clone(),
                DimsOf::Group(group) => self.with_parts(group, &self.groups[group].result),
            };
            let id = self.tensor(&name, dims, Role::Activation);
            self.values.insert(class, id);
            results.push(id);
        }
        self.layer.ops.push(Op { name: unit.name, kind: unit.kind, operands, results });
        Some(())
    }

    /// Puts a fork before the first of several readers of an activation, among which is whoever takes it from the
    /// layer.
    fn forks(&mut self) {
        let activations =
            self.layer.tensor_ids().filter(|t| self.layer.tensors[t.0].role == Role::Activation);
        for tensor in activations.collect::<Vec<_>>() {
            let ops = self.layer.ops.iter().enumerate();
            let reads = ops.flat_map(|(o, op)| op.operands.iter().enumerate().map(move |(i, &t)| (o, i, t)));
            let reads: Vec<(usize, usize)> =
                reads.filter(|&(.., t)| t == tensor).map(|(o, i, _)| (o, i)).collect();
            let leaves: Vec<usize> =
                (0..self.layer.out.len()).filter(|&at| self.layer.out[at] == tensor).collect();
            let passes = self.layer.stream_in.contains(&tensor) && !leaves.is_empty();
            if reads.len() + leaves.len() < 2 && !passes {
                continue;
            }
            let Tensor { name, dims, .. } = self.layer.tensors[tensor.0].clone();
            let mut results = Vec::new();
            for (n, &(o, i)) in reads.iter().enumerate() {
                let id = self.tensor(&format!("{name}.{}", n + 1), dims.clone(), Role::Activation);
                self.layer.ops[o].operands[i] = id;
                results.push(id);
            }
            for at in leaves {
                let id = self.tensor(&format!("{name}.out"), dims.clone(), Role::Activation);
                self.layer.out[at] = id;
                results.push(id);
            }
            let name = fresh(&format!("{name}.fork"), |name| self.layer.ops.iter().any(|op| op.name == name));
            let fork = Op { name, kind: OpKind::Fork, operands: vec![tensor], results };
            let made =
                self.layer.ops.iter().position(|op| op.results.contains(&tensor)).map_or(0, |op| op + 1);
            self.layer.ops.insert(reads.first().map_or(made, |read| read.0), fork);
        }
    }
}

/// A name that is not taken, as close to the wish as possible.
fn fresh(wish: &str, taken: impl Fn(&str) -> bool) -> String {
    let mut name = wish.to_string();
    while taken(&name) {
        name.push('\'');
    }
    name
}
