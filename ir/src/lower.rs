//! Lowering: a layer and the choices made for it become the program that every device of its mesh runs.
//!
//! Three rules beyond the operators' own:
//! - a conversion belongs to a tensor and a target: a second reader of the same target finds the value there;
//! - a value is kept for backward on the smaller side of its conversion, so a gathered one is gathered again;
//! - what is recomputed is recomputed where backward first asks for it, with all it needs, and nothing else.

use std::collections::{BTreeMap, BTreeSet};

use crate::conversion::{Step, steps};
use crate::graph::{Layer, Op, OpId, Role, Sizes, TensorId};
use crate::mesh::{AxisId, MAX_AXES, Mesh};
use crate::op::OpKind;
use crate::program::{AxisSet, Frozen, Home, Instruction, Program, Side, Storage, Update, Value, ValueId};
use crate::sharding::{Placement, Sharding};
use crate::signature::signature;
use crate::strategy::{Placements, Strategy, is_legal, placements};

pub(crate) use frees::{free_unread, insert_frees};

mod frees;

/// What was chosen for a layer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LayerChoice {
    /// Sharding of what it takes from the stack, each alike; `REPLICATED` for a layer that reads only data.
    pub stream: Sharding,
    /// Sharding of what it leaves there, each alike; `REPLICATED` for the loss.
    pub out: Sharding,
    /// Strategy of every operator.
    pub strategies: Vec<Strategy>,
    /// Operators whose results are computed again in backward instead of kept.
    pub recompute: Vec<Recompute>,
    /// Which memory holds what is kept from forward to backward.
    pub kept: Home,
    /// Which memory holds the parameters between uses, as they are stored.
    pub parameters: Home,
    /// Storage of every parameter.
    pub storage: BTreeMap<TensorId, Storage>,
    /// Parameters that the owners of their ties hold, on the same rank and in the same storage.
    pub shared: BTreeSet<TensorId>,
}

/// Whether an operator's results are kept for backward or computed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Recompute {
    /// Kept where backward needs them.
    Keep,
    /// Computed again where backward needs them.
    Again,
}

/// A choice that cannot be lowered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LowerError {
    /// The choice is of another layer.
    #[error("layer `{layer}` has {ops} operators and {parameters} parameters; the choice does not fit them")]
    Shape {
        /// The layer.
        layer: String,
        /// Its operators.
        ops: usize,
        /// Its parameters.
        parameters: usize,
    },
    /// A strategy cuts a dim that cannot be cut so.
    #[error("layer `{layer}`, operator `{op}`: its strategy cuts a loop that does not divide")]
    Strategy {
        /// The layer.
        layer: String,
        /// The operator.
        op: String,
    },
    /// No conversion leads from one sharding to the other.
    #[error("layer `{layer}`, tensor `{tensor}`: no conversion leads to the sharding its reader needs")]
    Conversion {
        /// The layer.
        layer: String,
        /// The tensor.
        tensor: String,
    },
    /// A parameter's storage is not a cut of what the operator uses.
    #[error(
        "layer `{layer}`, parameter `{tensor}`: its storage must cut axes that its use leaves whole, and the optimizer's cut must hold the others; a frozen one has only the parameter's, and no state on the host"
    )]
    Storage {
        /// The layer.
        layer: String,
        /// The parameter.
        tensor: String,
    },
}

/// Steps on a flattened local block from one cut to another; `partial` axes hold terms of a sum before.
pub fn flat_steps(partial: AxisSet, from: AxisSet, to: AxisSet) -> Option<Vec<Step>> {
    let cut = |set: AxisSet, partial: AxisSet| {
        let mut sharding = Sharding::REPLICATED;
        for axis in partial.axes() {
            sharding = sharding.with(axis, Placement::PartialSum);
        }
        for axis in set.axes() {
            sharding = sharding.with(axis, Placement::Shard(0));
        }
        sharding
    };
    steps(cut(from, partial), cut(to, AxisSet::EMPTY))
}

/// Steps on a flattened block whose sums over `partial` become a cut over `to`, but stay sums over `rest`.
pub fn partial_cut(partial: AxisSet, from: AxisSet, to: AxisSet, rest: AxisSet) -> Option<Vec<Step>> {
    let mut before = Sharding::REPLICATED;
    let mut after = Sharding::REPLICATED;
    for axis in (0..MAX_AXES).map(AxisId) {
        let bit = AxisSet::of(&[axis]);
        let side = |cut: AxisSet, sum: AxisSet| match (cut.contains(bit), sum.contains(bit)) {
            (true, _) => Placement::Shard(0),
            (false, true) => Placement::PartialSum,
            (false, false) => Placement::Replicate,
        };
        before = before.with(axis, side(from, partial));
        after = after.with(axis, side(to, rest));
    }
    steps(before, after)
}

/// Axes on which a sharding leaves a tensor whole: where storage may cut it.
pub fn whole_axes(mesh: &Mesh, used: Sharding) -> AxisSet {
    let whole = |axis: &AxisId| mesh.size(*axis) > 1 && used.on(*axis) == Placement::Replicate;
    AxisSet::of(&mesh.axis_ids().filter(whole).collect::<Vec<_>>())
}

/// Tensors of a layer that get a gradient in backward: the result depends on them, and the stream or a learned
/// parameter leads to them. (A result that nothing learned leads to has only the gradient that arrives.)
pub fn gradient_tensors(layer: &Layer) -> BTreeSet<TensorId> {
    let mut have: BTreeSet<TensorId> = layer.out.iter().copied().collect();
    for op in layer.ops.iter().rev() {
        if op.results.iter().any(|tensor| have.contains(tensor)) {
            let differentiated = op.operands.iter().enumerate().filter(|(i, _)| op.kind.differentiates(*i));
            have.extend(differentiated.map(|(_, &tensor)| tensor).filter(|&tensor| !layer.is_data(tensor)));
        }
    }
    let asked = asked_for(layer);
    have.retain(|tensor| asked.contains(tensor) || layer.out.contains(tensor));
    have
}

/// Tensors whose gradient somebody asks for: streams' layers before, learned parameters, and what they lead to.
fn asked_for(layer: &Layer) -> BTreeSet<TensorId> {
    let trained = layer.parameters().filter(|&tensor| layer.is_trained(tensor));
    let mut asked: BTreeSet<TensorId> = layer.stream_in.iter().copied().chain(trained).collect();
    for op in &layer.ops {
        let differentiated = op.operands.iter().enumerate().filter(|(i, _)| op.kind.differentiates(*i));
        if differentiated.into_iter().any(|(_, tensor)| asked.contains(tensor)) {
            asked.extend(&op.results);
        }
    }
    asked
}

/// Whether backward of an operator runs at all, for tensors that get a gradient.
pub fn runs_backward(op: &Op, gradients: &BTreeSet<TensorId>) -> bool {
    op.results.iter().any(|tensor| gradients.contains(tensor)) && gets(op, gradients).contains(&true)
}

/// Which operands of an operator get a gradient.
pub fn gets(op: &Op, gradients: &BTreeSet<TensorId>) -> Vec<bool> {
    let one = |(i, tensor): (usize, &TensorId)| op.kind.differentiates(i) && gradients.contains(tensor);
    op.operands.iter().enumerate().map(one).collect()
}

/// Operands that backward of an operator reads, in order: those that its line saves; of a product only what the
/// gradients that are asked for need, so that `x` of `x w` is not kept for a frozen `w`.
pub fn backward_reads(op: &Op, gradients: &BTreeSet<TensorId>) -> Vec<usize> {
    let asked = gets(op, gradients).into_iter().enumerate().filter(|(_, gets)| *gets);
    let needs: BTreeSet<usize> = asked.flat_map(|(i, _)| op.kind.gradient_needs(i)).collect();
    // A line lists operands that only some forms of its operator have.
    needs.into_iter().filter(|&i| i < op.operands.len()).collect()
}

/// Lowers a layer.
///
/// # Errors
/// Where the choice is not one that the search could have made.
pub fn lower(layer: &Layer, mesh: &Mesh, sizes: &Sizes, choice: &LayerChoice) -> Result<Program, LowerError> {
    check_shape(layer, choice)?;
    let placed = |(op, &strategy): (&Op, &Strategy)| {
        let sig = signature(layer, op);
        let legal = is_legal(&sig, strategy, mesh, sizes);
        let illegal = || LowerError::Strategy { layer: layer.name.clone(), op: op.name.clone() };
        legal.then(|| placements(&sig, strategy)).ok_or_else(illegal)
    };
    let ops = layer.ops.iter().zip(&choice.strategies).map(placed).collect::<Result<_, _>>()?;
    let mut lowering = Lowering {
        layer,
        mesh,
        sizes,
        choice,
        ops,
        producers: layer.producers(),
        readers: layer.readers(),
        values: Vec::new(),
        ids: BTreeMap::new(),
        gradients: gradient_tensors(layer),
    };
    lowering.run()
}

/// Whether a choice is of a layer.
fn check_shape(layer: &Layer, choice: &LayerChoice) -> Result<(), LowerError> {
    let parameters: Vec<TensorId> = layer.parameters().collect();
    let fits = choice.strategies.len() == layer.ops.len()
        && choice.recompute.len() == layer.ops.len()
        && choice.storage.keys().copied().eq(parameters.iter().copied())
        && choice.shared.iter().all(|tensor| parameters.contains(tensor));
    let (ops, parameters) = (layer.ops.len(), parameters.len());
    if fits { Ok(()) } else { Err(LowerError::Shape { layer: layer.name.clone(), ops, parameters }) }
}

struct Lowering<'a> {
    layer: &'a Layer,
    mesh: &'a Mesh,
    sizes: &'a Sizes,
    choice: &'a LayerChoice,
    /// Of every operator, what it takes and yields.
    ops: Vec<Placements>,
    /// Of every tensor, the operator that computes it.
    producers: Vec<Option<OpId>>,
    /// Of every tensor, the first operator that reads it.
    readers: Vec<Option<OpId>>,
    values: Vec<Value>,
    ids: BTreeMap<Value, ValueId>,
    gradients: BTreeSet<TensorId>,
}

/// What one section has in place, and what it has emitted.
#[derive(Default)]
struct Section {
    code: Vec<Instruction>,
    present: BTreeSet<ValueId>,
}

impl Lowering<'_> {
    fn run(&mut self) -> Result<Program, LowerError> {
        let (stream_in, out) = (self.layer.stream_in.clone(), self.layer.out.clone());
        let stream: Vec<ValueId> =
            stream_in.into_iter().map(|tensor| self.primal(tensor, self.choice.stream)).collect();
        let mut forward = Section::default();
        forward.present.extend(&stream);
        for op in self.layer.op_ids() {
            self.emit_forward(op, &mut forward)?;
        }
        let out = out
            .into_iter()
            .map(|tensor| self.bring(tensor, self.choice.out, &mut forward))
            .collect::<Result<Vec<_>, _>>()?;
        let saved = self.saved_values();
        let (mut backward, out_gradient, stream_gradient) = self.backward(&saved)?;
        let (updates, frozen) = self.parameters()?;
        let kept: BTreeSet<ValueId> = saved.iter().chain(&out).copied().collect();
        insert_frees(&mut forward.code, &kept);
        let leaves = stream_gradient.iter().copied().collect();
        insert_frees(&mut backward.code, &leaves);
        out_gradient.iter().for_each(|&value| free_unread(&mut backward.code, value, &leaves));
        Ok(Program {
            values: std::mem::take(&mut self.values),
            forward: forward.code,
            backward: backward.code,
            updates,
            frozen,
            shared: self.choice.shared.clone(),
            saved: saved.into_iter().collect(),
            kept: self.choice.kept,
            parameters: self.choice.parameters,
            stream,
            out,
            out_gradient,
            stream_gradient,
        })
    }

    fn op(&self, op: OpId) -> &Op {
        &self.layer.ops[op.0]
    }

    fn value(&mut self, value: Value) -> ValueId {
        if let Some(&id) = self.ids.get(&value) {
            return id;
        }
        let id = ValueId(self.values.len());
        self.values.push(value);
        self.ids.insert(value, id);
        id
    }

    fn primal(&mut self, tensor: TensorId, sharding: Sharding) -> ValueId {
        self.value(Value { tensor, side: Side::Primal, sharding })
    }

    fn gradient(&mut self, tensor: TensorId, sharding: Sharding) -> ValueId {
        self.value(Value { tensor, side: Side::Gradient, sharding })
    }

    /// Sharding in which a tensor is first there: as its operator leaves it, or as the stream arrives.
    fn produced(&self, tensor: TensorId) -> Sharding {
        let Some(op) = self.producers[tensor.0] else { return self.choice.stream };
        let result = self.op(op).results.iter().position(|&t| t == tensor);
        result.map_or(Sharding::REPLICATED, |i| self.ops[op.0].results[i])
    }

    fn conversion(&self, tensor: TensorId, from: Sharding, to: Sharding) -> Result<Vec<Step>, LowerError> {
        steps(from, to).ok_or_else(|| LowerError::Conversion {
            layer: self.layer.name.clone(),
            tensor: self.layer.tensors[tensor.0].name.clone(),
        })
    }

    /// Emits what is needed to have a tensor in a sharding, given that its producer has run or can run again.
    fn bring(
        &mut self,
        tensor: TensorId,
        sharding: Sharding,
        into: &mut Section,
    ) -> Result<ValueId, LowerError> {
        let wanted = self.primal(tensor, sharding);
        if into.present.contains(&wanted) {
            return Ok(wanted);
        }
        match self.layer.tensors[tensor.0].role {
            Role::Data(_) => into.code.push(Instruction::Load { output: wanted }),
            Role::Parameter(_) | Role::Frozen(_) => {
                let storage = self.choice.storage[&tensor];
                let gather =
                    flat_steps(AxisSet::EMPTY, storage.parameter, AxisSet::EMPTY).unwrap_or_default();
                into.code.push(Instruction::Parameter { output: wanted, gather });
            }
            Role::Activation => {
                let from = self.produced(tensor);
                let input = self.primal(tensor, from);
                if !into.present.contains(&input) {
                    match self.producers[tensor.0] {
                        Some(op) => self.emit_forward(op, into)?,
                        // Only the stream has no producer, and it is there or it was not needed.
                        None => return Ok(wanted),
                    }
                }
                if from != sharding {
                    let steps = self.conversion(tensor, from, sharding)?;
                    into.code.push(Instruction::Convert { input, output: wanted, steps });
                }
            }
        }
        into.present.insert(wanted);
        Ok(wanted)
    }

    fn emit_forward(&mut self, op: OpId, into: &mut Section) -> Result<(), LowerError> {
        let operands: Vec<(TensorId, Sharding)> =
            self.op(op).operands.iter().copied().zip(self.ops[op.0].operands.iter().copied()).collect();
        let operands =
            operands.into_iter().map(|(t, s)| self.bring(t, s, into)).collect::<Result<Vec<_>, _>>()?;
        let results: Vec<(TensorId, Sharding)> =
            self.op(op).results.iter().copied().zip(self.ops[op.0].results.iter().copied()).collect();
        let results: Vec<ValueId> = results.into_iter().map(|(t, s)| self.primal(t, s)).collect();
        into.present.extend(&results);
        into.code.push(Instruction::Forward { op, operands, results });
        Ok(())
    }

    /// Whether backward of an operator runs at all.
    fn runs_backward(&self, op: OpId) -> bool {
        runs_backward(self.op(op), &self.gradients)
    }

    /// Operands that backward of an operator reads, with their shardings.
    fn needs(&self, op: OpId) -> Vec<(usize, TensorId, Sharding)> {
        let reads = backward_reads(self.op(op), &self.gradients);
        let operands = self.op(op).operands.iter().zip(&self.ops[op.0].operands).enumerate();
        operands.filter(|(i, _)| reads.contains(i)).map(|(i, (&t, &s))| (i, t, s)).collect()
    }

    /// The values kept from forward to backward, in id order.
    fn saved_values(&mut self) -> BTreeSet<ValueId> {
        let mut open: Vec<(TensorId, Sharding)> = Vec::new();
        for op in self.layer.op_ids().filter(|&op| self.runs_backward(op)) {
            open.extend(self.needs(op).into_iter().map(|(_, tensor, sharding)| (tensor, sharding)));
        }
        let mut seen = BTreeSet::new();
        let mut saved = BTreeSet::new();
        while let Some((tensor, sharding)) = open.pop() {
            if self.layer.tensors[tensor.0].role != Role::Activation || !seen.insert((tensor, sharding)) {
                continue;
            }
            let producer = self.producers[tensor.0];
            // Later slices read what one slice has of keys, so it is kept as they take it.
            if self.readers[tensor.0].is_some_and(|op| self.op(op).kind == OpKind::Extend) {
                saved.insert(self.primal(tensor, sharding));
                continue;
            }
            match producer {
                Some(op) if self.is_again(op) => {
                    let operands = self.op(op).operands.iter().zip(&self.ops[op.0].operands);
                    open.extend(operands.map(|(&t, &s)| (t, s)));
                }
                _ => {
                    let kept = self.smaller_side(tensor, sharding);
                    saved.insert(self.primal(tensor, kept));
                }
            }
        }
        saved
    }

    /// A fork's results are its operand under other names, and what extends keys has them of other slices, so neither's
    /// results are ever kept themselves.
    fn is_again(&self, op: OpId) -> bool {
        self.choice.recompute[op.0] == Recompute::Again
            || matches!(self.op(op).kind, OpKind::Fork | OpKind::Extend)
    }

    /// The sharding, before or after its conversion, in which a value takes less room.
    fn smaller_side(&self, tensor: TensorId, sharding: Sharding) -> Sharding {
        let before = self.produced(tensor);
        let shape = self.layer.shape(tensor, self.sizes);
        let elements = |s: Sharding| s.local_elements(self.mesh, &shape);
        if elements(sharding) <= elements(before) { sharding } else { before }
    }

    fn backward(
        &mut self,
        saved: &BTreeSet<ValueId>,
    ) -> Result<(Section, Vec<ValueId>, Vec<ValueId>), LowerError> {
        let mut section = Section { code: Vec::new(), present: saved.clone() };
        let out = self.layer.out.clone();
        let arriving: Vec<ValueId> =
            out.iter().map(|&tensor| self.gradient(tensor, self.choice.out.dual())).collect();
        let mut have: BTreeMap<TensorId, ValueId> = out.into_iter().zip(arriving.iter().copied()).collect();
        for op in self.layer.op_ids().rev().filter(|&op| self.runs_backward(op)).collect::<Vec<_>>() {
            self.emit_backward(op, &mut have, &mut section)?;
        }
        let mut leaving = Vec::new();
        for tensor in self.layer.stream_in.clone() {
            // `graph::check` asks for the gradient of every stream.
            let Some(&id) = have.get(&tensor) else { continue };
            leaving.push(self.convert_gradient(tensor, id, self.choice.stream.dual(), &mut section)?);
        }
        Ok((section, arriving, leaving))
    }

    fn emit_backward(
        &mut self,
        op: OpId,
        have: &mut BTreeMap<TensorId, ValueId>,
        into: &mut Section,
    ) -> Result<(), LowerError> {
        let tensors = self.op(op).results.clone();
        let mut gradients = Vec::new();
        for (i, tensor) in tensors.into_iter().enumerate() {
            let wanted = self.ops[op.0].result_gradients[i];
            gradients.push(match have.get(&tensor).copied() {
                Some(id) => Some(self.convert_gradient(tensor, id, wanted, into)?),
                None => None,
            });
        }
        let mut operands = vec![None; self.op(op).operands.len()];
        let data = |this: &Self, i: usize| this.layer.is_data(this.op(op).operands[i]);
        for i in (0..operands.len()).filter(|&i| data(self, i)).collect::<Vec<_>>() {
            let (tensor, sharding) = (self.op(op).operands[i], self.ops[op.0].operands[i]);
            operands[i] = Some(self.bring(tensor, sharding, into)?);
        }
        for (i, tensor, sharding) in self.needs(op) {
            operands[i] = Some(self.bring(tensor, sharding, into)?);
        }
        let targets: Vec<TensorId> = self.op(op).operands.clone();
        let gets = gets(self.op(op), &self.gradients);
        let mut results = Vec::new();
        for (i, &tensor) in targets.iter().enumerate() {
            let sharding = self.ops[op.0].operand_gradients[i];
            results.push(gets[i].then(|| self.gradient(tensor, sharding)));
        }
        into.code.push(Instruction::Backward { op, operands, gradients, results: results.clone() });
        for (tensor, gradient) in targets.into_iter().zip(results) {
            let Some(gradient) = gradient else { continue };
            if self.layer.is_parameter(tensor) {
                let reduce = self.accumulate_steps(tensor, gradient)?;
                into.code.push(Instruction::Accumulate { gradient, reduce });
            } else {
                have.insert(tensor, gradient);
            }
        }
        Ok(())
    }

    fn convert_gradient(
        &mut self,
        tensor: TensorId,
        id: ValueId,
        to: Sharding,
        into: &mut Section,
    ) -> Result<ValueId, LowerError> {
        let from = self.values[id.0].sharding;
        if from == to {
            return Ok(id);
        }
        let steps = self.conversion(tensor, from, to)?;
        let output = self.gradient(tensor, to);
        into.code.push(Instruction::Convert { input: id, output, steps });
        Ok(output)
    }

    fn storage_error(&self, tensor: TensorId) -> LowerError {
        LowerError::Storage {
            layer: self.layer.name.clone(),
            tensor: self.layer.tensors[tensor.0].name.clone(),
        }
    }

    /// Axes on which backward leaves a parameter's gradient as an unfinished sum.
    fn unfinished(&self, gradient: ValueId) -> AxisSet {
        AxisSet::of(&self.values[gradient.0].sharding.partial_axes())
    }

    /// Steps of every micro-batch: none for a whole accumulator, else the reduction into its cut.
    fn accumulate_steps(&self, tensor: TensorId, gradient: ValueId) -> Result<Vec<Step>, LowerError> {
        let storage = self.choice.storage[&tensor];
        if storage.gradient.is_empty() {
            return Ok(Vec::new());
        }
        let unfinished = self.unfinished(gradient);
        let rest = AxisSet(unfinished.0 & !storage.gradient.0);
        partial_cut(unfinished, AxisSet::EMPTY, storage.gradient, rest)
            .ok_or_else(|| self.storage_error(tensor))
    }

    /// What happens to learned parameters at the end of a step, and how the others are held.
    fn parameters(&mut self) -> Result<(Vec<Update>, Vec<Frozen>), LowerError> {
        let (mut updates, mut frozen) = (Vec::new(), Vec::new());
        for op in self.layer.op_ids() {
            for i in 0..self.op(op).operands.len() {
                let tensor = self.op(op).operands[i];
                match self.layer.tensors[tensor.0].role {
                    Role::Parameter(_) => updates.push(self.update(tensor, op, i)?),
                    Role::Frozen(_) => frozen.push(self.frozen(tensor, op, i)?),
                    Role::Activation | Role::Data(_) => {}
                }
            }
        }
        Ok((updates, frozen))
    }

    fn frozen(&self, tensor: TensorId, op: OpId, operand: usize) -> Result<Frozen, LowerError> {
        let used = self.ops[op.0].operands[operand];
        let storage = self.choice.storage[&tensor];
        let cut = storage.parameter;
        let legal = storage == Storage::frozen(cut) && whole_axes(self.mesh, used).contains(cut);
        if legal { Ok(Frozen { tensor, used, cut }) } else { Err(self.storage_error(tensor)) }
    }

    fn update(&self, tensor: TensorId, op: OpId, operand: usize) -> Result<Update, LowerError> {
        let used = self.ops[op.0].operands[operand];
        let storage = self.choice.storage[&tensor];
        let legal = whole_axes(self.mesh, used).contains(storage.optimizer)
            && storage.optimizer.contains(storage.gradient)
            && storage.optimizer.contains(storage.parameter);
        if !legal {
            return Err(self.storage_error(tensor));
        }
        let unfinished = AxisSet::of(&self.ops[op.0].operand_gradients[operand].partial_axes());
        let rest = AxisSet(unfinished.0 & !storage.gradient.0);
        let reduce = flat_steps(rest, storage.gradient, storage.optimizer);
        let gather = flat_steps(AxisSet::EMPTY, storage.optimizer, storage.parameter);
        match (reduce, gather) {
            (Some(reduce), Some(gather)) => Ok(Update { tensor, used, storage, reduce, gather }),
            _ => Err(self.storage_error(tensor)),
        }
    }
}
