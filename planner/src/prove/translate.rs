//! From a program to terms, and to the pairs of terms that must turn out equal.
//!
//! The instructions are followed one by one, and each value gets the term of what every device then holds; backward
//! begins with nothing but the saved values and the arriving gradient. What a value is declared to be must fit what its
//! term is, since kernels learn from the declaration which rows they hold.

use std::collections::{BTreeMap, BTreeSet};

use egg::Id;
use ir::conversion::Step;
use ir::graph::{Layer, Op, OpId, TensorId};
use ir::mesh::AxisId;
use ir::program::{AxisSet, HeldParameter, Instruction, Program, Side, Storage, Update, Value, ValueId};
use ir::signature::signature;
use ir::split::SplitBackward;

use super::reference::{Reference, pullback};
use super::steps::{Layout, convert, flat_slices, sliced, summed, unfinished};
use super::term::{Graph, Term};

/// Two terms that must be equal, and what they are.
pub(super) struct Obligation {
    /// What is claimed: `the stream gradient`.
    pub(super) what: String,
    /// What the program computes.
    pub(super) found: Id,
    /// What the layer says.
    pub(super) expected: Id,
}

/// What a program must fulfil, and what it computed on the way.
pub(super) struct Claims {
    /// All of these must hold.
    pub(super) obligations: Vec<Obligation>,
    /// Every value in the order of the program, with what it is called: where these part from the layer is where a
    /// program went wrong.
    pub(super) trace: Vec<(String, Value, Id)>,
}

/// Adds the program, and says what must hold of it.
///
/// # Errors
/// Where an instruction makes no sense: a sentence that names it.
pub(super) fn claims(
    graph: &mut Graph<'_>,
    (program, split): (&Program, Option<&SplitBackward>),
    reference: &Reference,
) -> Result<Claims, String> {
    let layer = graph.analysis.layer;
    check_ids(layer, program, split)?;
    let mut run = Run {
        layer,
        program,
        reference,
        present: BTreeMap::new(),
        accumulated: BTreeMap::new(),
        trace: Vec::new(),
    };
    if program.stream.len() != layer.stream_in.len() {
        return Err("the program does not take the stream".into());
    }
    for (&id, &tensor) in program.stream.iter().zip(&layer.stream_in) {
        run.stream(graph, id, tensor)?;
    }
    for instruction in &program.forward {
        run.step(graph, instruction)?;
    }
    let mut obligations = run.out(graph)?;
    let saved: BTreeSet<ValueId> = program.saved.iter().copied().collect();
    run.present.retain(|id, _| saved.contains(id));
    run.arriving(graph)?;
    for instruction in split.map_or(&program.backward, |split| &split.input) {
        run.step(graph, instruction)?;
    }
    obligations.extend(run.stream_gradients(graph)?);
    if let Some(split) = split {
        let carried: BTreeSet<ValueId> = split.carried.iter().copied().collect();
        run.present.retain(|id, _| carried.contains(id));
        for instruction in &split.weight {
            run.step(graph, instruction)?;
        }
    }
    for tensor in layer.parameters().collect::<Vec<_>>() {
        obligations.push(match layer.is_trained(tensor) {
            true => run.updated(graph, tensor)?,
            false => run.kept(graph, tensor)?,
        });
    }
    Ok(Claims { obligations, trace: run.trace })
}

/// Every value that is named exists, and is of a tensor that exists.
fn check_ids(layer: &Layer, program: &Program, split: Option<&SplitBackward>) -> Result<(), String> {
    let mut ids: Vec<ValueId> =
        [&program.stream, &program.out, &program.out_gradient, &program.stream_gradient]
            .into_iter()
            .flatten()
            .copied()
            .collect();
    let parts = split.into_iter().flat_map(|split| split.input.iter().chain(&split.weight));
    for instruction in program.forward.iter().chain(&program.backward).chain(parts) {
        match instruction {
            Instruction::Load { output } | Instruction::Parameter { output, .. } => ids.push(*output),
            Instruction::Forward { operands, results, .. } => ids.extend(operands.iter().chain(results)),
            Instruction::Backward { operands, gradients, results, .. } => {
                ids.extend(operands.iter().chain(gradients).chain(results).flatten());
            }
            Instruction::Convert { input, output, .. } => ids.extend([input, output]),
            Instruction::Accumulate { gradient: value, .. } | Instruction::Free { value } => ids.push(*value),
        }
    }
    let known = ids.iter().all(|id| id.0 < program.values.len());
    let tensors = program.values.iter().all(|value| value.tensor.0 < layer.tensors.len());
    if known && tensors { Ok(()) } else { Err("the program names a value that does not exist".into()) }
}

/// The first value of a program that is not known to be what the layer says it is.
pub(super) fn first_astray(graph: &mut Graph<'_>, claims: &Claims, reference: &Reference) -> Option<String> {
    let mut pairs = Vec::new();
    for (name, value, term) in &claims.trace {
        let whole = match value.side {
            Side::Primal => reference.values.get(&value.tensor),
            Side::Gradient => reference.gradients.get(&value.tensor),
        };
        let expected = sliced(graph, *whole?, value.sharding);
        pairs.push((name, summed(graph, *term, value.sharding), expected));
    }
    graph.rebuild();
    let astray = pairs.into_iter().find(|&(_, found, expected)| graph.find(found) != graph.find(expected));
    astray.map(|(name, _, _)| name.clone())
}

/// Attention on a ring is taken to be attention over gathered keys, whose gradients are reduced to their owners: what
/// the executor's tests hold its kernels to.
struct Ring {
    axes: Vec<AxisId>,
    /// Per operand, the dim whose blocks travel.
    dims: Vec<Option<usize>>,
}

impl Ring {
    fn gathered(&self, graph: &mut Graph<'_>, operands: Vec<Id>) -> Vec<Id> {
        operands.into_iter().enumerate().map(|(i, id)| self.gathered_one(graph, i, id)).collect()
    }

    fn gathered_one(&self, graph: &mut Graph<'_>, operand: usize, id: Id) -> Id {
        let Some(Some(dim)) = self.dims.get(operand) else { return id };
        self.axes.iter().rev().fold(id, |x, &axis| graph.add(Term::AllGather(axis, *dim as u8, [x])))
    }

    /// The gradient of an operand whose blocks travel, each block with its owner.
    fn scattered(&self, graph: &mut Graph<'_>, operand: usize, id: Id) -> Id {
        let Some(Some(dim)) = self.dims.get(operand) else { return id };
        self.axes.iter().fold(id, |x, &axis| graph.add(Term::ReduceScatter(axis, *dim as u8, [x])))
    }
}

/// The program as far as it has been followed.
struct Run<'a> {
    layer: &'a Layer,
    program: &'a Program,
    reference: &'a Reference,
    present: BTreeMap<ValueId, Id>,
    accumulated: BTreeMap<TensorId, Id>,
    trace: Vec<(String, Value, Id)>,
}

impl Run<'_> {
    fn name(&self, id: ValueId) -> String {
        let Value { tensor, side, .. } = self.program.value(id);
        let name = &self.layer.tensors[tensor.0].name;
        match side {
            Side::Primal => format!("`{name}`"),
            Side::Gradient => format!("the gradient of `{name}`"),
        }
    }

    fn get(&self, id: ValueId) -> Result<Id, String> {
        self.present.get(&id).copied().ok_or_else(|| format!("{} is read but not there", self.name(id)))
    }

    /// Gives a value its term, which must be cut as declared.
    fn set(&mut self, graph: &Graph<'_>, id: ValueId, term: Id) -> Result<(), String> {
        let Value { sharding, .. } = self.program.value(id);
        let Some(shape) = &graph[term].data.shape else {
            return Err(format!("{} comes from parts that do not fit", self.name(id)));
        };
        let declared = |dim: usize| sharding.axes_of(dim).collect::<Vec<AxisId>>();
        let dims = &self.layer.tensors[self.program.value(id).tensor.0].dims;
        let same_dims = shape.dims.iter().map(|(dim, _)| dim).eq(dims);
        let same_cuts = shape.dims.iter().enumerate().all(|(i, (_, axes))| *axes == declared(i));
        if !same_dims || !same_cuts || !shape.flat.is_empty() {
            return Err(format!("{} is not cut as it is declared", self.name(id)));
        }
        self.present.insert(id, term);
        self.trace.push((self.name(id), self.program.value(id), term));
        Ok(())
    }

    fn stream(&mut self, graph: &mut Graph<'_>, id: ValueId, tensor: TensorId) -> Result<(), String> {
        let value = self.program.value(id);
        if (value.tensor, value.side) != (tensor, Side::Primal) {
            return Err(format!("{} is not the stream", self.name(id)));
        }
        let whole = self.reference.values[&value.tensor];
        let axes = unfinished(value.sharding)?;
        let start = if axes.is_empty() {
            whole
        } else {
            let terms = graph.add(Term::Terms(value.tensor, AxisSet::of(&axes)));
            let sum = axes.iter().rev().fold(terms, |x, &axis| graph.add(Term::AllReduce(axis, [x])));
            graph.union(sum, whole);
            terms
        };
        let block = sliced(graph, start, value.sharding);
        self.set(graph, id, block)
    }

    fn step(&mut self, graph: &mut Graph<'_>, instruction: &Instruction) -> Result<(), String> {
        match instruction {
            Instruction::Load { output } => self.load(graph, *output),
            Instruction::Parameter { output, gather } => self.parameter(graph, *output, gather),
            Instruction::Forward { op, operands, results } => self.forward(graph, *op, operands, results),
            Instruction::Backward { op, operands, gradients, results } => {
                let read = |run: &Self, ids: &[Option<ValueId>]| {
                    ids.iter().map(|id| id.map(|id| run.get(id)).transpose()).collect::<Result<Vec<_>, _>>()
                };
                let ring = self.ring(*op, operands.get(1).copied().flatten())?;
                let (operands, gradients) = (read(self, operands)?, read(self, gradients)?);
                let operands = operands.into_iter().enumerate();
                let operands: Vec<Option<Id>> =
                    operands.map(|(i, id)| id.map(|id| ring.gathered_one(graph, i, id))).collect();
                self.backward(graph, *op, (&operands, &gradients), (results, &ring))
            }
            Instruction::Convert { input, output, steps } => {
                let before = self.get(*input)?;
                let (from, to) = (self.program.value(*input), self.program.value(*output));
                if (from.tensor, from.side) != (to.tensor, to.side) {
                    return Err(format!("{} is converted into {}", self.name(*input), self.name(*output)));
                }
                let after = convert(graph, before, steps, Layout::Dims)?;
                self.set(graph, *output, after)
            }
            Instruction::Accumulate { gradient, reduce } => self.accumulate(graph, *gradient, reduce),
            Instruction::Free { value } => {
                let gone = self.present.remove(value);
                gone.map(|_| ()).ok_or_else(|| format!("{} is freed but not there", self.name(*value)))
            }
        }
    }

    fn load(&mut self, graph: &mut Graph<'_>, id: ValueId) -> Result<(), String> {
        let value = self.program.value(id);
        if !self.layer.is_data(value.tensor) || value.side != Side::Primal {
            return Err(format!("{} cannot be loaded", self.name(id)));
        }
        let block = self.given(graph, value)?;
        self.set(graph, id, block)
    }

    /// The declared block of a tensor that is whole somewhere; it cannot be a term of a sum.
    fn given(&self, graph: &mut Graph<'_>, value: Value) -> Result<Id, String> {
        let name = &self.layer.tensors[value.tensor.0].name;
        if unfinished(value.sharding)?.is_empty() {
            Ok(sliced(graph, self.reference.values[&value.tensor], value.sharding))
        } else {
            Err(format!("`{name}` is given whole, not as terms of a sum"))
        }
    }

    fn storage(&self, tensor: TensorId) -> Result<&Update, String> {
        let mut updates = self.program.updates.iter().filter(|update| update.tensor == tensor);
        match (updates.next(), updates.next()) {
            (Some(update), None) => Ok(update),
            _ => Err(format!("`{}` does not have one update", self.layer.tensors[tensor.0].name)),
        }
    }

    /// How a parameter is held, here or by the owner of its tie: once, and learned if the layer says so.
    fn held(&self, tensor: TensorId) -> Result<HeldParameter, String> {
        let name = &self.layer.tensors[tensor.0].name;
        let mut all = self.program.used().filter(|used| used.tensor == tensor);
        match (all.next(), all.next()) {
            (Some(held), None) if held.trained == self.layer.is_trained(tensor) => Ok(held),
            (Some(_), None) => {
                Err(format!("`{name}` is updated though it is frozen, or the other way round"))
            }
            _ => Err(format!("`{name}` is not held once")),
        }
    }

    fn parameter(&mut self, graph: &mut Graph<'_>, id: ValueId, gather: &[Step]) -> Result<(), String> {
        let value = self.program.value(id);
        if !self.layer.is_parameter(value.tensor) || value.side != Side::Primal {
            return Err(format!("{} is not a parameter", self.name(id)));
        }
        let held = self.held(value.tensor)?;
        if held.used != value.sharding {
            return Err(format!("{} is stored for another use", self.name(id)));
        }
        let cut = held.storage.parameter;
        let used = self.given(graph, value)?;
        let stored = flat_slices(graph, used, cut);
        let block = convert(graph, stored, gather, Layout::Flat)?;
        self.set(graph, id, block)
    }

    /// The ring of an operator, from how its keys are cut.
    fn ring(&self, op: OpId, keys: Option<ValueId>) -> Result<Ring, String> {
        let sig = signature(self.layer, self.op(op)?);
        let axes = keys.map_or(Vec::new(), |keys| self.program.ring_axes(&sig, keys));
        let travels =
            |dims: &Vec<_>| dims.iter().position(|factor| sig.ring.map(|ring| ring.keys) == Some(*factor));
        Ok(Ring { axes, dims: sig.operands.iter().map(travels).collect() })
    }

    fn op(&self, op: OpId) -> Result<&Op, String> {
        self.layer.ops.get(op.0).ok_or_else(|| "an instruction names an operator that does not exist".into())
    }

    fn forward(
        &mut self,
        graph: &mut Graph<'_>,
        op: OpId,
        operands: &[ValueId],
        results: &[ValueId],
    ) -> Result<(), String> {
        let tensors = self.op(op)?.results.clone();
        if operands.len() != self.op(op)?.operands.len() || results.len() != tensors.len() {
            return Err(format!("operator `{}` runs with too few tensors", self.op(op)?.name));
        }
        let ring = self.ring(op, operands.get(1).copied())?;
        let operands: Vec<Id> = operands.iter().map(|&id| self.get(id)).collect::<Result<_, _>>()?;
        let operands = ring.gathered(graph, operands);
        for (result, (&id, tensor)) in results.iter().zip(tensors).enumerate() {
            let value = self.program.value(id);
            if (value.tensor, value.side) != (tensor, Side::Primal) {
                return Err(format!("operator `{}` does not compute {}", self.op(op)?.name, self.name(id)));
            }
            let term = graph.add(Term::Apply { op, result, operands: operands.clone().into() });
            self.set(graph, id, term)?;
        }
        Ok(())
    }

    /// A loop that no argument walks (the rows of a table) is cut as the gradient is declared: its kernel computes
    /// only those rows.
    fn backward(
        &mut self,
        graph: &mut Graph<'_>,
        op: OpId,
        (operands, gradients): (&[Option<Id>], &[Option<Id>]),
        (results, ring): (&[Option<ValueId>], &Ring),
    ) -> Result<(), String> {
        let tensors = self.op(op)?.operands.clone();
        let fits = operands.len() == tensors.len()
            && results.len() == tensors.len()
            && gradients.len() == self.op(op)?.results.len()
            && operands.len() + gradients.len() <= 128;
        if !fits {
            return Err(format!("backward of operator `{}` runs with too few tensors", self.op(op)?.name));
        }
        for (operand, (&id, tensor)) in results.iter().zip(tensors).enumerate() {
            let Some(id) = id else { continue };
            let value = self.program.value(id);
            if (value.tensor, value.side) != (tensor, Side::Gradient) {
                return Err(format!(
                    "backward of `{}` does not compute {}",
                    self.op(op)?.name,
                    self.name(id)
                ));
            }
            let line = self.op(op)?;
            let mut term = graph.add(pullback((op, line), operand, operands, gradients));
            term = ring.scattered(graph, operand, term);
            let sig = &graph.analysis.signatures[op.0];
            let side = |ids: &[Option<Id>], walks: &[Vec<ir::signature::FactorId>]| {
                ids.iter()
                    .zip(walks)
                    .filter(|(id, _)| id.is_some())
                    .flat_map(|(_, w)| w.clone())
                    .collect::<Vec<_>>()
            };
            let walked = [side(operands, &sig.operands), side(gradients, &sig.results)].concat();
            let loops = sig.operands[operand].clone();
            for (dim, _) in loops.iter().enumerate().filter(|(_, factor)| !walked.contains(factor)) {
                for axis in value.sharding.axes_of(dim) {
                    term = graph.add(Term::Slice(axis, dim as u8, [term]));
                }
            }
            self.set(graph, id, term)?;
        }
        Ok(())
    }

    fn accumulate(&mut self, graph: &mut Graph<'_>, id: ValueId, reduce: &[Step]) -> Result<(), String> {
        let value = self.program.value(id);
        if !self.layer.is_parameter(value.tensor) || value.side != Side::Gradient {
            return Err(format!("{} is accumulated", self.name(id)));
        }
        let gradient = self.get(id)?;
        let sum = convert(graph, gradient, reduce, Layout::Flat)?;
        match self.accumulated.insert(value.tensor, sum) {
            None => Ok(()),
            Some(_) => Err(format!("{} is accumulated twice", self.name(id))),
        }
    }

    fn out(&self, graph: &mut Graph<'_>) -> Result<Vec<Obligation>, String> {
        let ends = self.program.out.iter().map(|&id| self.program.value(id));
        if !ends.map(|value| (value.tensor, value.side)).eq(self.layer.out.iter().map(|&t| (t, Side::Primal)))
        {
            return Err("the program ends with another tensor than the layer".into());
        }
        let one = |&id: &ValueId| {
            let value = self.program.value(id);
            unfinished(value.sharding)?;
            let found = self.get(id)?;
            let whole = self.reference.values[&value.tensor];
            Ok(Obligation {
                what: format!("the layer's result {}", self.name(id)),
                found: summed(graph, found, value.sharding),
                expected: sliced(graph, whole, value.sharding),
            })
        };
        self.program.out.iter().map(one).collect()
    }

    fn arriving(&mut self, graph: &mut Graph<'_>) -> Result<(), String> {
        let dual = |&id: &ValueId| {
            let out = self.program.value(id);
            Value { side: Side::Gradient, sharding: out.sharding.dual(), ..out }
        };
        let arriving = self.program.out_gradient.iter().map(|&id| self.program.value(id));
        if !arriving.eq(self.program.out.iter().map(dual)) {
            return Err("the arriving gradient is not in the dual of the result's sharding".into());
        }
        for &id in &self.program.out_gradient {
            let value = self.program.value(id);
            let whole = self.reference.gradients[&value.tensor];
            let block = sliced(graph, whole, value.sharding);
            self.set(graph, id, block)?;
        }
        Ok(())
    }

    fn stream_gradients(&self, graph: &mut Graph<'_>) -> Result<Vec<Obligation>, String> {
        if self.program.stream_gradient.len() != self.program.stream.len() {
            return Err("the stream's gradient is missing".into());
        }
        let one = |(&stream, &id): (&ValueId, &ValueId)| {
            let (stream, value) = (self.program.value(stream), self.program.value(id));
            if value != (Value { side: Side::Gradient, sharding: stream.sharding.dual(), ..stream }) {
                return Err("the stream's gradient is not in the dual of the stream's sharding".into());
            }
            let whole = self.reference.gradients.get(&value.tensor).ok_or("the stream has no gradient")?;
            Ok(Obligation {
                what: format!("the stream's gradient, that of `{}`", self.layer.tensors[value.tensor.0].name),
                found: self.get(id)?,
                expected: sliced(graph, *whole, value.sharding),
            })
        };
        self.program.stream.iter().zip(&self.program.stream_gradient).map(one).collect()
    }

    /// A frozen parameter has no gradient to be updated with; its stored block stays that of the whole one.
    fn kept(&self, graph: &mut Graph<'_>, tensor: TensorId) -> Result<Obligation, String> {
        let held = self.held(tensor)?;
        let name = &self.layer.tensors[tensor.0].name;
        if self.accumulated.contains_key(&tensor) || self.reference.gradients.contains_key(&tensor) {
            return Err(format!("`{name}` is frozen but gets a gradient"));
        }
        let block = sliced(graph, self.reference.values[&tensor], held.used);
        let stored = flat_slices(graph, block, held.storage.parameter);
        Ok(Obligation { what: format!("`{name}` after a step"), found: stored, expected: stored })
    }

    /// The stored block after a step: that of the new value of the whole parameter.
    fn updated(&self, graph: &mut Graph<'_>, tensor: TensorId) -> Result<Obligation, String> {
        let Update { used, storage: Storage { parameter, optimizer, .. }, reduce, gather, .. } =
            self.storage(tensor)?;
        let whole = self.reference.values[&tensor];
        let block = sliced(graph, whole, *used);
        let old = flat_slices(graph, block, *optimizer);
        let name = &self.layer.tensors[tensor.0].name;
        let (new, new_whole) = match (self.accumulated.get(&tensor), self.reference.gradients.get(&tensor)) {
            (None, None) => (old, whole),
            (Some(&sum), Some(&gradient)) => {
                let reduced = convert(graph, sum, reduce, Layout::Flat)?;
                let new = graph.add(Term::Update(tensor, [old, reduced]));
                (new, graph.add(Term::Update(tensor, [whole, gradient])))
            }
            (Some(_), None) => return Err(format!("`{name}` gets a gradient that the layer does not give")),
            (None, Some(_)) => return Err(format!("the gradient of `{name}` is never accumulated")),
        };
        let found = convert(graph, new, gather, Layout::Flat)?;
        let new_block = sliced(graph, new_whole, *used);
        let expected = flat_slices(graph, new_block, *parameter);
        Ok(Obligation { what: format!("the update of `{name}`"), found, expected })
    }
}
