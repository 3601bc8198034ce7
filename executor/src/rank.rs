//! One rank: it walks its row of the table, runs the sections of its layers' programs, and keeps what they save.
//!
//! All that it keeps from one instruction to the next lies in its arena. After forward exactly the program's saved
//! values of a layer and micro-batch, or of a slice of one, are left there, after backward nothing: both are checked,
//! so that the bytes counted are the bytes held.

use std::collections::{BTreeMap, BTreeSet};

use ir::graph::{OpId, Role};
use ir::program::{Instruction, Side, ValueId};
use ir::schedule::{Action, Section};
use ir::sharding::Sharding;
use ndarray::IxDyn;

use crate::audit::{Audit, Leaves, Witness};
use crate::block::Block;
use crate::convert::{Seat, Subject, convert, elements};
use crate::element::{Edges, Width};
use crate::error::ExecutorError;
use crate::fabric::RankComm;
use crate::initial::Slot;
use crate::job::{LayerIdx, Recorded};
use crate::kernels::{Real, Tensor, Value};
use crate::label::{Class, Phase, Place};
use crate::lifetimes::{Held, RankPlan};
use crate::memory::{Memory, RankMemory};
use crate::observe::Activity;
use crate::offload::HostMoves;
use crate::prepare::{ParameterKey, Prepared, unfit};
use crate::routing::Routes;
use crate::update::{Carried, Parameter};
use crate::ways::Way;

/// A layer, and a micro-batch of a step or a slice of one.
pub(crate) type Unit = (LayerIdx, u32);

/// What a rank reports when it is done.
#[derive(Clone, Debug, Default)]
pub(crate) struct Record {
    /// Per step, the sum of the micro-batches' losses; nothing on a rank without the last layer.
    pub(crate) losses: Vec<f64>,
    /// Per step and parameter, the finished gradient, as the update cuts it.
    pub(crate) gradients: Vec<BTreeMap<ParameterKey, Vec<f64>>>,
    /// Per step and parameter, the new value, as it is stored.
    pub(crate) parameters: Vec<BTreeMap<ParameterKey, Vec<f64>>>,
    /// Values and moments of owned parameters after the last step, where they are asked for.
    pub(crate) states: BTreeMap<ParameterKey, Carried>,
    /// Per layer, bytes kept from forward to backward of one micro-batch.
    pub(crate) saved: BTreeMap<LayerIdx, u64>,
    /// Per layer, bytes carried from one part of backward to the other of one micro-batch.
    pub(crate) carried: BTreeMap<LayerIdx, u64>,
    /// Most bytes kept at one time, saved and carried.
    pub(crate) peak_saved: u64,
    /// Bytes of its device's arena.
    pub(crate) memory: RankMemory,
    /// Bytes of its arena in the host's memory.
    pub(crate) host: RankMemory,
    /// Bytes of its arena on the host's drives.
    pub(crate) nvme: RankMemory,
    /// What it moved between them.
    pub(crate) moved: HostMoves,
    /// Per layer, choices of experts that found no slot, and all choices, if this rank saw all tokens.
    pub(crate) dropped: BTreeMap<LayerIdx, (u64, u64)>,
    /// Experts chosen, if this rank saw all tokens.
    pub(crate) routes: Routes,
    /// What its operators rounded, where numbers are.
    pub(crate) audit: Audit,
    /// Per layer, expert choices that were fixed against the rank's own.
    pub(crate) rerouted: BTreeMap<LayerIdx, u64>,
}

/// A rank and all it holds.
pub(crate) struct Rank<'a, E> {
    pub(crate) run: &'a Prepared<'a>,
    pub(crate) seat: Seat<'a>,
    /// Its parameters; their states are in memory.
    pub(crate) parameters: BTreeMap<ParameterKey, Parameter>,
    pub(crate) record: Record,
    /// Its device's memory.
    pub(crate) memory: Memory<'a, E>,
    /// Its share of the host's.
    pub(crate) host: Memory<'a, E>,
    /// Its share of the host's drives.
    pub(crate) nvme: Memory<'a, E>,
    /// Bytes of what is saved and carried.
    saved_bytes: u64,
    /// What the results of a ring that just ran are held to.
    pub(crate) witnesses: Option<Vec<Option<Witness>>>,
}

/// Where in the run a section is.
#[derive(Clone, Copy)]
pub(crate) struct At<'a> {
    pub(crate) layer_idx: LayerIdx,
    pub(crate) place: Place<'a>,
}

impl<'a, E: Real> Rank<'a, E> {
    pub(crate) fn new(
        run: &'a Prepared<'a>,
        rank: usize,
        plan: Option<&'a RankPlan>,
    ) -> Result<Self, ExecutorError> {
        let seat = Seat::new(run.execution.meshes, rank);
        let initial = |key: ParameterKey| {
            run.initial.get(&key).ok_or_else(|| unfit("a tensor is held that is no parameter".into()))
        };
        let mut own = Self {
            run,
            seat,
            parameters: BTreeMap::new(),
            record: Record::default(),
            memory: Memory::new(plan.map(|plan| &plan.device)),
            host: Memory::new(plan.map(|plan| &plan.host)),
            nvme: Memory::new(plan.map(|plan| &plan.nvme)),
            saved_bytes: 0,
            witnesses: None,
        };
        for layer_idx in run.layers_on(own.seat.stage) {
            let program = run.program(layer_idx);
            for update in program.own_updates() {
                let key = (layer_idx, update.tensor);
                own.begin_learned(key, update, initial(key)?)?;
            }
            for frozen in program.frozen.iter().filter(|frozen| !program.shared.contains(&frozen.tensor)) {
                let key = (layer_idx, frozen.tensor);
                own.begin_frozen(key, frozen, initial(key)?)?;
            }
        }
        Ok(own)
    }

    /// Runs every step.
    pub(crate) fn run(mut self, comm: &mut RankComm<'_, E>) -> Result<Record, ExecutorError> {
        comm.round_to(self.edges());
        let row = self.run.execution.row(self.seat.stage, self.seat.device);
        for step in 0..self.run.execution.steps {
            self.record.losses.extend(self.has_loss().then_some(0.0));
            for &action in row {
                let shape = self.run.execution.shape();
                let (unit, chunk) = (u64::from(shape.unit(action)), shape.chunk(action));
                let seq = u64::from(step) * u64::from(shape.n_units()) + unit;
                comm.during(Activity::Action { step, action, chunk }, |comm| match action.section {
                    Section::Forward => self.forward(comm, action, seq),
                    Section::Backward | Section::BackwardInput => self.backward(comm, action, seq),
                    Section::BackwardWeight => self.backward_weight(comm, action, seq),
                })?;
            }
            comm.during(Activity::Update { step }, |comm| self.update(comm, u64::from(step)))?;
            self.memory.end_step();
            self.host.end_step();
            self.nvme.end_step();
        }
        match self.run.execution.training.record {
            Recorded::EveryStep => {}
            Recorded::States => self.record_states()?,
        }
        self.record.memory = self.memory.report();
        self.record.host = self.host.report();
        self.record.nvme = self.nvme.report();
        Ok(self.record)
    }

    /// Whether this rank has a copy of the last layer.
    fn has_loss(&self) -> bool {
        let last = self.run.instances.len().checked_sub(1);
        last.is_some_and(|layer_idx| self.run.stages_of(layer_idx).contains(&self.seat.stage))
    }

    fn forward(&mut self, comm: &mut RankComm<'_, E>, action: Action, seq: u64) -> Result<(), ExecutorError> {
        let chunk = self.run.execution.shape().chunk(action);
        // What the layer before has left for this one.
        let mut near: Vec<Option<Tensor<E>>> = Vec::new();
        for layer_idx in self.run.layers_of(chunk) {
            let program = self.run.program(layer_idx);
            let at = At { layer_idx, place: self.run.place(layer_idx, Phase::Forward, seq) };
            // All are taken from where they wait before the first has its place in the layer.
            let mut streams = Vec::new();
            for &way in &self.run.ways.reads[layer_idx] {
                streams.push(match way {
                    Way::Near(left) => handed(&mut near, left)?,
                    Way::Border(border) => self.receive_stream(comm, (border, action), seq)?,
                });
            }
            for (&id, stream) in program.stream.iter().zip(streams) {
                self.hold(at, id, &Value::Float(stream))?;
            }
            self.section(comm, at, &program.forward)?;
            let left = program.out.iter().map(|&id| self.take(at, id)).collect::<Result<Vec<_>, _>>()?;
            self.expect_exactly(at, &program.saved)?;
            self.keep(self.unit(at));
            self.stow(self.unit(at))?;
            near.clear();
            for (stream, way) in left.into_iter().zip(&self.run.ways.leaves[layer_idx]) {
                near.push(match *way {
                    Some(Way::Near(_)) => Some(stream),
                    Some(Way::Border(border)) => {
                        self.send_stream(comm, (border, action), (seq, stream))?;
                        None
                    }
                    None => {
                        self.add_loss(&stream);
                        None
                    }
                });
            }
        }
        Ok(())
    }

    fn backward(
        &mut self,
        comm: &mut RankComm<'_, E>,
        action: Action,
        seq: u64,
    ) -> Result<(), ExecutorError> {
        let chunk = self.run.execution.shape().chunk(action);
        // Gradients that the layer behind has given of what this one left for it.
        let mut near: Vec<Option<Tensor<E>>> = Vec::new();
        for layer_idx in self.run.layers_of(chunk).into_iter().rev() {
            let program = self.run.program(layer_idx);
            let (code, carried): (&[Instruction], &[ValueId]) = match action.section {
                Section::BackwardInput => {
                    let split = self.run.split(layer_idx)?;
                    (&split.input, &split.carried)
                }
                Section::Forward | Section::Backward | Section::BackwardWeight => (&program.backward, &[]),
            };
            let at = At { layer_idx, place: self.run.place(layer_idx, Phase::Backward, seq) };
            let mut gradients = Vec::new();
            for &way in &self.run.ways.leaves[layer_idx] {
                gradients.push(match way {
                    Some(Way::Near(read)) => handed(&mut near, read)?,
                    Some(Way::Border(border)) => self.receive_gradient(comm, (border, action), seq)?,
                    None => self.loss_gradient(seq),
                });
            }
            self.fetch(self.unit(at))?;
            let bytes = self.kept_bytes(self.unit(at));
            for (&id, gradient) in program.out_gradient.iter().zip(gradients) {
                self.hold(at, id, &Value::Float(gradient))?;
            }
            self.section(comm, at, code)?;
            let taken = |this: &mut Self, id: ValueId| match carried.contains(&id) {
                true => this.float(at, id),
                false => this.take(at, id),
            };
            let left: Vec<Tensor<E>> =
                program.stream_gradient.iter().map(|&id| taken(self, id)).collect::<Result<_, _>>()?;
            near.clear();
            for (gradient, &way) in left.into_iter().zip(&self.run.ways.reads[layer_idx]) {
                near.push(match way {
                    Way::Near(_) => Some(gradient),
                    Way::Border(border) => {
                        self.send_gradient(comm, (border, action), (seq, gradient))?;
                        None
                    }
                });
            }
            self.expect_exactly(at, carried)?;
            self.saved_bytes -= bytes;
            if action.section == Section::BackwardInput {
                self.carry(self.unit(at));
            }
        }
        Ok(())
    }

    fn backward_weight(
        &mut self,
        comm: &mut RankComm<'_, E>,
        action: Action,
        seq: u64,
    ) -> Result<(), ExecutorError> {
        let chunk = self.run.execution.shape().chunk(action);
        for layer_idx in self.run.layers_of(chunk).into_iter().rev() {
            let at = At { layer_idx, place: self.run.place(layer_idx, Phase::Backward, seq) };
            let bytes = self.kept_bytes(self.unit(at));
            self.section(comm, at, &self.run.split(layer_idx)?.weight)?;
            self.expect_exactly(at, &[])?;
            self.saved_bytes -= bytes;
        }
        Ok(())
    }

    fn carry(&mut self, unit: Unit) {
        let bytes = self.kept_bytes(unit);
        self.saved_bytes += bytes;
        let most = self.record.carried.entry(unit.0).or_insert(0);
        *most = bytes.max(*most);
        self.record.peak_saved = self.record.peak_saved.max(self.saved_bytes);
    }

    fn keep(&mut self, unit: Unit) {
        let bytes = self.kept_bytes(unit);
        self.saved_bytes += bytes;
        let most = self.record.saved.entry(unit.0).or_insert(0);
        *most = bytes.max(*most);
        self.record.peak_saved = self.record.peak_saved.max(self.saved_bytes);
    }

    /// Bytes of a layer and unit as a plan counts them: every number in the width of the executed type.
    fn kept_bytes(&self, unit: Unit) -> u64 {
        let width = self.edges().element_bytes::<E>();
        let bytes = |(_, n, kind): (ValueId, u64, Width)| self.planned_bytes(n, kind);
        self.memory.values(unit).map(bytes).sum::<u64>() + self.memory.attended(unit) * width
    }

    /// Bytes of so many elements as a plan counts them.
    pub(crate) fn planned_bytes(&self, n: u64, kind: Width) -> u64 {
        let width = self.edges().element_bytes::<E>();
        match kind {
            Width::Integer => n * kind.bytes(width),
            Width::Full | Width::Bf16 => n * width,
        }
    }

    fn section(
        &mut self,
        comm: &mut RankComm<'_, E>,
        at: At<'a>,
        code: &'a [Instruction],
    ) -> Result<(), ExecutorError> {
        code.iter().try_for_each(|instruction| self.instruction(comm, at, instruction))
    }

    /// The layer and unit that are at work.
    pub(crate) fn unit(&self, at: At<'_>) -> Unit {
        (at.layer_idx, self.run.unit_of(at.place.seq))
    }

    fn held(&self, at: At<'_>, id: ValueId) -> Held {
        let (layer_idx, unit) = self.unit(at);
        Held::Value(layer_idx, unit, id)
    }

    /// Writes a value into the arena.
    fn hold(&mut self, at: At<'_>, id: ValueId, value: &Value<E>) -> Result<(), ExecutorError> {
        let width = self.run.width(at.layer_idx, self.run.program(at.layer_idx).value(id));
        self.memory.put(self.held(at, id), value, width)
    }

    fn instruction(
        &mut self,
        comm: &mut RankComm<'_, E>,
        at: At<'a>,
        instruction: &'a Instruction,
    ) -> Result<(), ExecutorError> {
        match instruction {
            Instruction::Load { output } => self.hold(at, *output, &self.load(at, *output)?),
            Instruction::Parameter { output, gather } => {
                let class = Class::ParameterGather;
                let value = self.run.program(at.layer_idx).value(*output);
                let subject = at.place.tag(class, self.run.tensor_name(at.layer_idx, value.tensor));
                let flat = self.gathered(comm, (at.layer_idx, value.tensor), gather, subject)?;
                let shape = self.local_shape(at, *output);
                let tensor = flat.into_shape_with_order(IxDyn(&shape));
                let wrong = |_| self.bad_value(at, *output, format!("has another shape than {shape:?}"));
                let mut tensor = tensor.map_err(wrong)?;
                self.edges().round_all(&mut tensor);
                self.hold(at, *output, &Value::Float(tensor))
            }
            Instruction::Forward { .. } => self.operator_forward(comm, at, instruction),
            Instruction::Backward { .. } => self.operator_backward(comm, at, instruction),
            Instruction::Convert { input, output, steps } => {
                let value = self.run.program(at.layer_idx).value(*input);
                let tensor = self.float(at, *input)?;
                let class = match (value.side, at.place.phase) {
                    (Side::Gradient, _) => Class::Gradient,
                    (Side::Primal, Phase::Forward) => Class::Forward,
                    (Side::Primal, Phase::Backward | Phase::Update) => Class::Recompute,
                };
                let shape = self.run.shape_in(at, value.tensor);
                let tag = at.place.tag(class, self.run.tensor_name(at.layer_idx, value.tensor));
                let subject = Subject { tag, shape: &shape };
                let converted = convert(comm, &self.seat, steps, &subject, tensor)?;
                self.hold(at, *output, &Value::Float(converted))
            }
            Instruction::Accumulate { gradient, reduce } => {
                let value = self.run.program(at.layer_idx).value(*gradient);
                let block = self.float(at, *gradient)?;
                let tag =
                    at.place.tag(Class::GradientAccumulate, self.run.tensor_name(at.layer_idx, value.tensor));
                let shape = [block.len() as u64];
                let subject = Subject { tag, shape: &shape };
                let term = convert(comm, &self.seat, reduce, &subject, flattened(block))?;
                self.accumulate((at.layer_idx, value.tensor), &elements(term))
            }
            Instruction::Free { value } => match self.memory.drop(self.held(at, *value)) {
                true => Ok(()),
                false => Err(self.bad_value(at, *value, "is freed but not there".into())),
            },
        }
    }

    fn operator_forward(
        &mut self,
        comm: &mut RankComm<'_, E>,
        at: At<'a>,
        instruction: &'a Instruction,
    ) -> Result<(), ExecutorError> {
        let Instruction::Forward { op, operands: ids, results } = instruction else { return Ok(()) };
        let operands = ids.iter().map(|&id| self.find(at, id)).collect::<Result<Vec<_>, _>>()?;
        let operands: Vec<&Value<E>> = operands.iter().collect();
        let mut found = match self.ring(at, *op) {
            _ if self.extends(at, *op) => self.extend_forward(at, *op, (ids[0], operands[0]))?,
            Some(ring) => self.ring_forward(comm, (at, *op, &ring), ids, &operands)?,
            None => self.run_forward(at, *op, &operands)?,
        };
        self.leave_forward(at, *op, &operands, &mut found)?;
        results.iter().zip(&found).try_for_each(|(&id, value)| self.hold(at, id, value))
    }

    fn operator_backward(
        &mut self,
        comm: &mut RankComm<'_, E>,
        at: At<'a>,
        instruction: &'a Instruction,
    ) -> Result<(), ExecutorError> {
        let Instruction::Backward { op, operands: ids, gradients, results } = instruction else {
            return Ok(());
        };
        let find = |id: &Option<ValueId>| id.map(|id| self.find(at, id)).transpose();
        let operands = ids.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        let operands: Vec<Option<&Value<E>>> = operands.iter().map(Option::as_ref).collect();
        let float = |id: &Option<ValueId>| id.map(|id| self.float(at, id)).transpose();
        let gradients = gradients.iter().map(float).collect::<Result<Vec<_>, _>>()?;
        let gradients: Vec<Option<&Tensor<E>>> = gradients.iter().map(Option::as_ref).collect();
        let found = match (self.ring(at, *op), gradients.as_slice()) {
            (_, [Some(gradient)]) if self.extends(at, *op) => self.extend_backward(at, *op, gradient)?,
            (Some(ring), [Some(gradient)]) => {
                self.ring_backward(comm, (at, *op, &ring), ids, (&operands, gradient))?
            }
            _ => self.run_backward(at, *op, &operands, &gradients)?,
        };
        let found = self.leave_backward(at, (*op, results), (&operands, &gradients), found)?;
        for (id, gradient) in results.iter().zip(found) {
            match (id, gradient) {
                (Some(id), Some(gradient)) => self.hold(at, *id, &Value::Float(gradient))?,
                (Some(id), None) => return Err(self.bad_value(at, *id, "gets no gradient".into())),
                (None, _) => {}
            }
        }
        if self.extends(at, *op) {
            self.drop_owed(at, *op);
        }
        Ok(())
    }

    /// How numbers of this run are rounded.
    pub(crate) fn edges(&self) -> Edges {
        self.run.execution.edges
    }

    /// Rounds what leaves an operator; the loss of a token and what it is made of stay in single precision.
    pub(crate) fn round_results(&self, at: At<'_>, op: OpId, results: &mut [Value<E>]) {
        let leaves = Leaves::of_results(&self.run.layer(at.layer_idx).ops[op.0].kind);
        for value in results.iter_mut().filter(|_| leaves == Leaves::Rounded) {
            if let Value::Float(tensor) = value {
                self.edges().round_all(tensor);
            }
        }
    }

    /// Rounds a gradient that goes to another operator; that of a parameter goes to its accumulator as it is.
    pub(crate) fn round_gradient(&self, at: At<'_>, id: ValueId, gradient: &mut Tensor<E>) {
        let tensor = self.run.program(at.layer_idx).value(id).tensor;
        if !self.run.layer(at.layer_idx).is_parameter(tensor) {
            self.edges().round_all(gradient);
        }
    }

    fn load(&self, at: At<'_>, output: ValueId) -> Result<Value<E>, ExecutorError> {
        self.load_at(at, output, self.seat.device)
    }

    /// The block of a data tensor that a device of this rank's mesh holds.
    pub(crate) fn load_at(
        &self,
        at: At<'_>,
        output: ValueId,
        device: u64,
    ) -> Result<Value<E>, ExecutorError> {
        let value = self.run.program(at.layer_idx).value(output);
        let layer = self.run.layer(at.layer_idx);
        let Role::Data(data) = layer.tensors[value.tensor.0].role else {
            return Err(self.bad_value(at, output, "is loaded but no data".into()));
        };
        if !value.sharding.partial_axes().is_empty() {
            return Err(self.bad_value(at, output, "is data and cannot be an unfinished sum".into()));
        }
        let (micro_batch, device) = self.run.source(at.place.seq, device);
        let slot = Slot { tensor: value.tensor, seq: micro_batch, tokens: self.run.tokens_of(at.place.seq) };
        let shape = self.run.shape_in(at, value.tensor);
        let all = self.seat.block(Sharding::REPLICATED, &shape);
        let own = Block::of(value.sharding, self.seat.mesh, &self.seat.mesh.coordinates(device), &shape);
        Ok(match self.run.batch().data::<E>(layer, at.layer_idx, data, slot) {
            Value::Float(whole) => Value::Float(all.cut(&whole, &own)),
            Value::Index(whole) => Value::Index(all.cut(&whole, &own)),
        })
    }

    fn find(&self, at: At<'_>, id: ValueId) -> Result<Value<E>, ExecutorError> {
        let value = self.memory.get(self.held(at, id));
        value.ok_or_else(|| self.bad_value(at, id, "is read but not there".into()))
    }

    fn float(&self, at: At<'_>, id: ValueId) -> Result<Tensor<E>, ExecutorError> {
        let value = self.find(at, id)?.into_float();
        value.ok_or_else(|| self.bad_value(at, id, "is data where a number is needed".into()))
    }

    fn take(&mut self, at: At<'_>, id: ValueId) -> Result<Tensor<E>, ExecutorError> {
        let value = self.memory.take(self.held(at, id));
        value.ok_or_else(|| self.bad_value(at, id, "is read but not there".into()))
    }

    fn local_shape(&self, at: At<'_>, id: ValueId) -> Vec<usize> {
        let value = self.run.program(at.layer_idx).value(id);
        self.seat.block(value.sharding, &self.run.shape_in(at, value.tensor)).shape()
    }

    fn bad_value(&self, at: At<'_>, id: ValueId, what: String) -> ExecutorError {
        let value = self.run.program(at.layer_idx).value(id);
        let side = match value.side {
            Side::Primal => "",
            Side::Gradient => "gradient of ",
        };
        let tensor = format!("{side}{}", self.run.tensor_name(at.layer_idx, value.tensor));
        ExecutorError::Value { place: at.place.to_string(), tensor, what }
    }

    /// After a section nothing may be left but what it leaves on purpose.
    fn expect_exactly(&self, at: At<'_>, ids: &[ValueId]) -> Result<(), ExecutorError> {
        let there: BTreeSet<ValueId> = self.memory.values(self.unit(at)).map(|(id, ..)| id).collect();
        if let Some(&id) = ids.iter().find(|id| !there.contains(id)) {
            return Err(self.bad_value(at, id, "should be there at the end".into()));
        }
        match there.into_iter().find(|id| !ids.contains(id)) {
            Some(id) => Err(self.bad_value(at, id, "is left at the end".into())),
            None => Ok(()),
        }
    }
}

/// A tensor as one dim, in index order.
pub(crate) fn flattened<E: Real>(tensor: Tensor<E>) -> Tensor<E> {
    ndarray::Array1::from(elements(tensor)).into_dyn()
}

/// What a neighbour has handed on at a position.
fn handed<E: Real>(near: &mut [Option<Tensor<E>>], at: usize) -> Result<Tensor<E>, ExecutorError> {
    near.get_mut(at).and_then(Option::take).ok_or_else(|| unfit("a neighbour has not left a stream".into()))
}
