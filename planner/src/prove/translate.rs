//! From a layer and from a program to terms, and to the pairs of terms that must turn out equal.
//!
//! The layer's side runs every operator once, forward and backward, on whole tensors. The program's side follows the
//! instructions one by one and gives each value the term of what every device then holds; backward begins with nothing
//! but the saved values and the arriving gradient. What a value is declared to be must fit what its term is, since
//! kernels learn from the declaration which rows they hold.

use std::collections::{BTreeMap, BTreeSet};

use egg::Id;
use ir::conversion::{Step, StepKind};
use ir::graph::{Layer, Op, OpId, TensorId};
use ir::lower::gradient_tensors;
use ir::mesh::AxisId;
use ir::program::{AxisSet, Instruction, Program, Side, Storage, Update, Value, ValueId};
use ir::sharding::{Placement, Sharding};

use super::term::{FLAT, Graph, Term};

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

/// The layer on whole tensors.
pub(super) struct Reference {
    values: BTreeMap<TensorId, Id>,
    gradients: BTreeMap<TensorId, Id>,
}

/// Adds the layer itself: forward, then backward from the gradient of its result.
pub(super) fn reference(graph: &mut Graph<'_>) -> Reference {
    let layer = graph.analysis.layer;
    let mut values: BTreeMap<TensorId, Id> = BTreeMap::new();
    let given = |t: &TensorId| layer.is_data(*t) || layer.is_parameter(*t) || layer.stream_in == Some(*t);
    for tensor in layer.tensor_ids().filter(given) {
        values.insert(tensor, graph.add(Term::Whole(tensor)));
    }
    for (i, op) in layer.ops.iter().enumerate() {
        let operands: Vec<Id> = op.operands.iter().filter_map(|tensor| values.get(tensor).copied()).collect();
        for (result, &tensor) in op.results.iter().enumerate() {
            let term = Term::Apply { op: OpId(i), result, operands: operands.clone().into() };
            values.insert(tensor, graph.add(term));
        }
    }
    let have = gradient_tensors(layer);
    let mut gradients = BTreeMap::from([(layer.out, graph.add(Term::OutGradient))]);
    for id in layer.op_ids().rev() {
        let op = &layer.ops[id.0];
        if !op.results.iter().any(|tensor| gradients.contains_key(tensor)) {
            continue;
        }
        let read = |(k, tensor): (usize, &TensorId)| {
            let read = layer.is_data(*tensor) || op.kind.line().saves.contains(&k);
            read.then(|| values.get(tensor).copied()).flatten()
        };
        let operands: Vec<Option<Id>> = op.operands.iter().enumerate().map(read).collect();
        let arriving: Vec<Option<Id>> = op.results.iter().map(|tensor| gradients.get(tensor).copied()).collect();
        for (operand, &tensor) in op.operands.iter().enumerate() {
            if op.kind.differentiates(operand) && have.contains(&tensor) {
                gradients.insert(tensor, graph.add(pullback(id, operand, &operands, &arriving)));
            }
        }
    }
    Reference { values, gradients }
}

fn pullback(op: OpId, operand: usize, operands: &[Option<Id>], gradients: &[Option<Id>]) -> Term {
    let all = || operands.iter().chain(gradients);
    let given = all().enumerate().filter(|(_, id)| id.is_some()).fold(0, |bits, (i, _)| bits | 1u128 << i);
    Term::Pullback { op, operand, given, children: all().flatten().copied().collect() }
}

/// Adds the program, and says what must hold of it.
///
/// # Errors
/// Where an instruction makes no sense: a sentence that names it.
pub(super) fn claims(graph: &mut Graph<'_>, program: &Program, reference: &Reference) -> Result<Claims, String> {
    let layer = graph.analysis.layer;
    let mut run = Run {
        layer,
        program,
        reference,
        present: BTreeMap::new(),
        accumulated: BTreeMap::new(),
        trace: Vec::new(),
    };
    if let Some(id) = program.stream {
        run.stream(graph, id)?;
    } else if layer.stream_in.is_some() {
        return Err("the program does not take the stream".into());
    }
    for instruction in &program.forward {
        run.step(graph, instruction)?;
    }
    let mut obligations = vec![run.out(graph)?];
    let saved: BTreeSet<ValueId> = program.saved.iter().copied().collect();
    run.present.retain(|id, _| saved.contains(id));
    run.arriving(graph)?;
    for instruction in &program.backward {
        run.step(graph, instruction)?;
    }
    obligations.extend(run.stream_gradient(graph)?);
    for tensor in layer.parameters().collect::<Vec<_>>() {
        obligations.push(run.updated(graph, tensor)?);
    }
    Ok(Claims { obligations, trace: run.trace })
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

    fn stream(&mut self, graph: &mut Graph<'_>, id: ValueId) -> Result<(), String> {
        let value = self.program.value(id);
        if self.layer.stream_in != Some(value.tensor) || value.side != Side::Primal {
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
                let (operands, gradients) = (read(self, operands)?, read(self, gradients)?);
                self.backward(graph, *op, (&operands, &gradients), results)
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

    fn parameter(&mut self, graph: &mut Graph<'_>, id: ValueId, gather: &[Step]) -> Result<(), String> {
        let value = self.program.value(id);
        if !self.layer.is_parameter(value.tensor) || value.side != Side::Primal {
            return Err(format!("{} is not a parameter", self.name(id)));
        }
        let update = self.storage(value.tensor)?;
        if update.used != value.sharding {
            return Err(format!("{} is stored for another use", self.name(id)));
        }
        let cut = update.storage.parameter;
        let used = self.given(graph, value)?;
        let stored = flat_slices(graph, used, cut);
        let block = convert(graph, stored, gather, Layout::Flat)?;
        self.set(graph, id, block)
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
        let operands: Vec<Id> = operands.iter().map(|&id| self.get(id)).collect::<Result<_, _>>()?;
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
        results: &[Option<ValueId>],
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
                return Err(format!("backward of `{}` does not compute {}", self.op(op)?.name, self.name(id)));
            }
            let mut term = graph.add(pullback(op, operand, operands, gradients));
            let sig = &graph.analysis.signatures[op.0];
            let side = |ids: &[Option<Id>], walks: &[Vec<ir::signature::FactorId>]| {
                ids.iter().zip(walks).filter(|(id, _)| id.is_some()).flat_map(|(_, w)| w.clone()).collect::<Vec<_>>()
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

    fn out(&self, graph: &mut Graph<'_>) -> Result<Obligation, String> {
        let value = self.program.value(self.program.out);
        unfinished(value.sharding)?;
        if (value.tensor, value.side) != (self.layer.out, Side::Primal) {
            return Err("the program ends with another tensor than the layer".into());
        }
        let found = self.get(self.program.out)?;
        let whole = self.reference.values[&value.tensor];
        Ok(Obligation {
            what: format!("the layer's result {}", self.name(self.program.out)),
            found: summed(graph, found, value.sharding),
            expected: sliced(graph, whole, value.sharding),
        })
    }

    fn arriving(&mut self, graph: &mut Graph<'_>) -> Result<(), String> {
        let (id, out) = (self.program.out_gradient, self.program.value(self.program.out));
        let value = self.program.value(id);
        let expected = Value { tensor: self.layer.out, side: Side::Gradient, sharding: out.sharding.dual() };
        if value != expected {
            return Err("the arriving gradient is not in the dual of the result's sharding".into());
        }
        let whole = self.reference.gradients[&value.tensor];
        let block = sliced(graph, whole, value.sharding);
        self.set(graph, id, block)
    }

    fn stream_gradient(&self, graph: &mut Graph<'_>) -> Result<Option<Obligation>, String> {
        let whole = self.layer.stream_in.and_then(|tensor| self.reference.gradients.get(&tensor));
        let (whole, id) = match (whole, self.program.stream_gradient) {
            (Some(&whole), Some(id)) => (whole, id),
            (None, None) => return Ok(None),
            (Some(_), None) | (None, Some(_)) => return Err("the stream's gradient is missing".into()),
        };
        let value = self.program.value(id);
        let dual = self.program.stream.map(|stream| self.program.value(stream).sharding.dual());
        if Some(value.tensor) != self.layer.stream_in || value.side != Side::Gradient || Some(value.sharding) != dual {
            return Err("the stream's gradient is not in the dual of the stream's sharding".into());
        }
        Ok(Some(Obligation {
            what: format!("the stream's gradient, that of `{}`", self.layer.tensors[value.tensor.0].name),
            found: self.get(id)?,
            expected: sliced(graph, whole, value.sharding),
        }))
    }

    /// The stored block after a step: that of the new value of the whole parameter.
    fn updated(&self, graph: &mut Graph<'_>, tensor: TensorId) -> Result<Obligation, String> {
        let Update { used, storage: Storage { parameter, optimizer, .. }, reduce, gather, .. } = self.storage(tensor)?;
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

/// Axes on which a value is an unfinished sum.
fn unfinished(sharding: Sharding) -> Result<Vec<AxisId>, String> {
    if sharding.0.contains(&Placement::PartialMax) {
        return Err("an unfinished maximum crosses a layer's edge".into());
    }
    Ok(sharding.partial_axes())
}

/// The block of a whole tensor: outer axes first.
fn sliced(graph: &mut Graph<'_>, whole: Id, sharding: Sharding) -> Id {
    let mut term = whole;
    for (i, placement) in sharding.0.into_iter().enumerate() {
        if let Placement::Shard(dim) = placement {
            term = graph.add(Term::Slice(AxisId(i), dim, [term]));
        }
    }
    term
}

/// The sum, or maximum, of a value's terms.
fn summed(graph: &mut Graph<'_>, term: Id, sharding: Sharding) -> Id {
    let mut sum = term;
    for (i, placement) in sharding.0.into_iter().enumerate().rev() {
        sum = match placement {
            Placement::PartialSum => graph.add(Term::AllReduce(AxisId(i), [sum])),
            Placement::PartialMax => graph.add(Term::AllReduceMax(AxisId(i), [sum])),
            Placement::Replicate | Placement::Shard(_) => sum,
        };
    }
    sum
}

fn flat_slices(graph: &mut Graph<'_>, term: Id, cut: AxisSet) -> Id {
    cut.axes().into_iter().fold(term, |x, axis| graph.add(Term::Slice(axis, FLAT, [x])))
}

/// Whether steps speak of a tensor's dims, or of the flattened block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    Dims,
    Flat,
}

/// What every device holds after the steps of a conversion. Over several axes, cuts go from the outer axis inwards and
/// gathers from the inner outwards.
fn convert(graph: &mut Graph<'_>, input: Id, steps: &[Step], layout: Layout) -> Result<Id, String> {
    let mut term = input;
    for step in steps {
        let place = |dim: u8| match layout {
            Layout::Dims => dim,
            Layout::Flat => FLAT,
        };
        if layout == Layout::Flat && step_dims(step.kind).iter().any(|&dim| dim != 0) {
            return Err("a step on a flattened block names a dim".into());
        }
        let mut axes = step.axes.clone();
        axes.sort_unstable();
        if matches!(step.kind, StepKind::AllGather { .. }) {
            axes.reverse();
        }
        if matches!(step.kind, StepKind::AllToAll { .. }) && axes.len() > 1 {
            return Err("an exchange goes along one axis at a time".into());
        }
        for axis in axes {
            let x = [term];
            term = graph.add(match step.kind {
                StepKind::AllReduce => Term::AllReduce(axis, x),
                StepKind::AllReduceMax => Term::AllReduceMax(axis, x),
                StepKind::ReduceScatter { dim } => Term::ReduceScatter(axis, place(dim), x),
                StepKind::AllGather { dim } => Term::AllGather(axis, place(dim), x),
                StepKind::AllToAll { from, to } => Term::AllToAll(axis, place(from), place(to), x),
                StepKind::Slice { dim } => Term::Slice(axis, place(dim), x),
                StepKind::Zero => Term::Zero(axis, x),
            });
        }
    }
    Ok(term)
}

fn step_dims(kind: StepKind) -> Vec<u8> {
    match kind {
        StepKind::AllReduce | StepKind::AllReduceMax | StepKind::Zero => Vec::new(),
        StepKind::ReduceScatter { dim } | StepKind::AllGather { dim } | StepKind::Slice { dim } => vec![dim],
        StepKind::AllToAll { from, to } => vec![from, to],
    }
}
