//! One rank: it walks its row of the table, runs the sections of its layers' programs, and keeps what they save.
//!
//! The values of a micro-batch, or of a slice of one, live in an environment per layer. After forward exactly the program's saved values are
//! left in it, after backward nothing: both are checked, so that the bytes counted are the bytes held.

use std::collections::BTreeMap;

use ir::graph::{OpId, Role};
use ir::program::{Instruction, Side, ValueId};
use ir::schedule::{Action, Section};
use ir::sharding::Sharding;
use ndarray::{ArrayD, IxDyn};

use crate::audit::{Audit, Leaves, Witness};
use crate::block::Block;
use crate::convert::{Seat, Subject, convert, elements};
use crate::element::Edges;
use crate::error::ExecutorError;
use crate::extend::OwedKey;
use crate::fabric::RankComm;
use crate::initial::Slot;
use crate::job::{LayerIdx, Recorded};
use crate::kernels::ring::Attended;
use crate::kernels::{Real, Tensor, Value};
use crate::label::{Class, Phase, Place};
use crate::memory::{Direction, Held, MemoryPlan, RankMemory, Watch};
use crate::observe::Activity;
use crate::prepare::{Border, ParameterKey, Prepared, unfit};
use crate::ring::RingKey;
use crate::routing::Routes;
use crate::update::{Carried, FrozenState, State};

/// Values of one layer and micro-batch.
type Environment<E> = BTreeMap<ValueId, Value<E>>;

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
    /// Bytes of its arena.
    pub(crate) memory: RankMemory,
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
    /// States of its learned parameters.
    pub(crate) states: BTreeMap<ParameterKey, State<E>>,
    /// Its frozen parameters.
    pub(crate) frozen: BTreeMap<ParameterKey, FrozenState<E>>,
    pub(crate) record: Record,
    /// Its memory against the plan of it.
    pub(crate) watch: Watch<'a>,
    /// Saved values per layer and unit: a micro-batch, or a slice of one.
    pub(crate) saved: BTreeMap<(LayerIdx, u32), Environment<E>>,
    /// Carried values per layer and unit.
    carried: BTreeMap<(LayerIdx, u32), Environment<E>>,
    /// Bytes of both.
    saved_bytes: u64,
    /// What attention on rings keeps from forward to backward.
    pub(crate) attended: BTreeMap<RingKey, Attended<E>>,
    /// What the results of a ring that just ran are held to.
    pub(crate) witnesses: Option<Vec<Option<Witness>>>,
    /// Gradients of keys and values that later slices owe to earlier ones.
    pub(crate) owed: BTreeMap<OwedKey, Tensor<E>>,
    /// Streams between chunks of this rank, by receiving chunk.
    moved: BTreeMap<(u32, Direction, u32), Tensor<E>>,
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
        memory: Option<&'a MemoryPlan>,
    ) -> Result<Self, ExecutorError> {
        let seat = Seat::new(run.execution.mesh, rank);
        let (mut states, mut frozen, mut watch) = (BTreeMap::new(), BTreeMap::new(), Watch::new(memory));
        let initial = |key: ParameterKey| {
            run.initial.get(&key).ok_or_else(|| unfit("a tensor is held that is no parameter".into()))
        };
        for layer_idx in run.layers_on(seat.stage) {
            for update in &run.program(layer_idx).updates {
                let key = (layer_idx, update.tensor);
                let state = State::new(&seat, update, initial(key)?, run.moments(key, seat.stage))
                    .rounded(run.execution.edges);
                watch.make(Held::State(key), state.bytes(run.rounded_bytes(size_of::<E>() as u64)))?;
                states.insert(key, state);
            }
            for one in &run.program(layer_idx).frozen {
                let key = (layer_idx, one.tensor);
                let state = FrozenState::new(&seat, one, initial(key)?).rounded(run.execution.edges);
                watch.make(Held::State(key), state.bytes(run.rounded_bytes(size_of::<E>() as u64)))?;
                frozen.insert(key, state);
            }
        }
        Ok(Self {
            run,
            seat,
            states,
            frozen,
            record: Record::default(),
            watch,
            saved: BTreeMap::new(),
            carried: BTreeMap::new(),
            saved_bytes: 0,
            attended: BTreeMap::new(),
            witnesses: None,
            owed: BTreeMap::new(),
            moved: BTreeMap::new(),
        })
    }

    /// Runs every step.
    pub(crate) fn run(mut self, comm: &mut RankComm<'_, E>) -> Result<Record, ExecutorError> {
        comm.round_to(self.edges());
        let row = &self.run.execution.table[self.seat.stage as usize];
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
            self.watch.end_step();
        }
        match self.run.execution.training.record {
            Recorded::EveryStep => {}
            Recorded::States => self.record_states(),
        }
        self.record.memory = self.watch.report();
        Ok(self.record)
    }

    /// Whether this rank has a copy of the last layer.
    fn has_loss(&self) -> bool {
        let last = self.run.instances.len().checked_sub(1);
        last.is_some_and(|layer_idx| self.run.stages_of(layer_idx).contains(&self.seat.stage))
    }

    fn forward(&mut self, comm: &mut RankComm<'_, E>, action: Action, seq: u64) -> Result<(), ExecutorError> {
        let chunk = self.run.execution.shape().chunk(action);
        let mut stream = self.receive_stream(comm, chunk, action, seq)?;
        for layer_idx in self.run.layers_of(chunk) {
            let program = self.run.program(layer_idx);
            let at = At { layer_idx, place: self.run.place(layer_idx, Phase::Forward, seq) };
            let mut env = Environment::new();
            if let (Some(id), Some(stream)) = (program.stream, stream.take()) {
                env.insert(id, Value::Float(stream));
            }
            self.section(comm, at, &program.forward, &mut env)?;
            stream = Some(self.take(at, &mut env, program.out)?);
            self.watch_values(at, &env)?;
            self.expect_exactly(at, &env, &program.saved)?;
            self.keep((layer_idx, self.run.unit_of(seq)), seq, env);
        }
        let stream = stream.ok_or_else(|| unfit("a chunk has no layers".into()))?;
        self.send_stream(comm, chunk, action, (seq, stream))
    }

    fn backward(
        &mut self,
        comm: &mut RankComm<'_, E>,
        action: Action,
        seq: u64,
    ) -> Result<(), ExecutorError> {
        let chunk = self.run.execution.shape().chunk(action);
        let mut gradient = Some(self.receive_gradient(comm, chunk, action, seq)?);
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
            let mut env = self.saved.remove(&(layer_idx, self.run.unit_of(seq))).unwrap_or_default();
            let bytes = self.bytes_of(&env) + self.attended_bytes(layer_idx, seq);
            env.extend(gradient.take().map(|gradient| (program.out_gradient, Value::Float(gradient))));
            self.section(comm, at, code, &mut env)?;
            if let Some(id) = program.stream_gradient {
                gradient = Some(match carried.contains(&id) {
                    true => self.float(at, &env, id)?.clone(),
                    false => self.take(at, &mut env, id)?,
                });
            }
            self.watch_values(at, &env)?;
            self.expect_exactly(at, &env, carried)?;
            self.saved_bytes -= bytes;
            if action.section == Section::BackwardInput {
                self.carry((layer_idx, self.run.unit_of(seq)), env);
            }
        }
        match gradient {
            Some(gradient) => self.send_gradient(comm, chunk, action, (seq, gradient)),
            None => Ok(()),
        }
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
            let mut env = self.carried.remove(&(layer_idx, self.run.unit_of(seq))).unwrap_or_default();
            let bytes = self.bytes_of(&env);
            self.section(comm, at, &self.run.split(layer_idx)?.weight, &mut env)?;
            self.expect_exactly(at, &env, &[])?;
            self.saved_bytes -= bytes;
        }
        Ok(())
    }

    fn carry(&mut self, key: (LayerIdx, u32), env: Environment<E>) {
        let bytes = self.bytes_of(&env);
        self.saved_bytes += bytes;
        let most = self.record.carried.entry(key.0).or_insert(0);
        *most = bytes.max(*most);
        self.record.peak_saved = self.record.peak_saved.max(self.saved_bytes);
        self.carried.insert(key, env);
    }

    fn keep(&mut self, key: (LayerIdx, u32), seq: u64, env: Environment<E>) {
        let bytes = self.bytes_of(&env) + self.attended_bytes(key.0, seq);
        self.saved_bytes += bytes;
        let most = self.record.saved.entry(key.0).or_insert(0);
        *most = bytes.max(*most);
        self.record.peak_saved = self.record.peak_saved.max(self.saved_bytes);
        self.saved.insert(key, env);
    }

    fn section(
        &mut self,
        comm: &mut RankComm<'_, E>,
        at: At<'a>,
        code: &'a [Instruction],
        env: &mut Environment<E>,
    ) -> Result<(), ExecutorError> {
        self.watch_values(at, env)?;
        for instruction in code {
            self.instruction(comm, at, instruction, env)?;
            self.watch_values(at, env)?;
        }
        Ok(())
    }

    /// Tells the watch what is there now.
    fn watch_values(&mut self, at: At<'_>, env: &Environment<E>) -> Result<(), ExecutorError> {
        let unit = self.run.unit_of(at.place.seq);
        let run = self.run;
        let width = |id| run.width(at.layer_idx, run.program(at.layer_idx).value(id), size_of::<E>() as u64);
        let held =
            env.iter().map(|(&id, value)| (id, value.shape().iter().product::<usize>() as u64 * width(id)));
        self.watch.values((at.layer_idx, unit), held)
    }

    fn instruction(
        &mut self,
        comm: &mut RankComm<'_, E>,
        at: At<'a>,
        instruction: &'a Instruction,
        env: &mut Environment<E>,
    ) -> Result<(), ExecutorError> {
        match instruction {
            Instruction::Load { output } => {
                env.insert(*output, self.load(at, *output)?);
            }
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
                env.insert(*output, Value::Float(tensor));
            }
            Instruction::Forward { op, operands, results } => {
                let ids = operands;
                let operands = ids.iter().map(|&id| self.find(at, env, id)).collect::<Result<Vec<_>, _>>()?;
                let mut found = match self.ring(at, *op) {
                    _ if self.extends(at, *op) => self.extend_forward(at, *op, (ids[0], operands[0]))?,
                    Some(ring) => self.ring_forward(comm, (at, *op, &ring), ids, &operands)?,
                    None => self.run_forward(at, *op, &operands)?,
                };
                self.leave_forward(at, *op, &operands, &mut found)?;
                env.extend(results.iter().copied().zip(found));
            }
            Instruction::Backward { .. } => self.operator_backward(comm, at, instruction, env)?,
            Instruction::Convert { input, output, steps } => {
                let value = self.run.program(at.layer_idx).value(*input);
                let tensor = self.float(at, env, *input)?.clone();
                let class = match (value.side, at.place.phase) {
                    (Side::Gradient, _) => Class::Gradient,
                    (Side::Primal, Phase::Forward) => Class::Forward,
                    (Side::Primal, Phase::Backward | Phase::Update) => Class::Recompute,
                };
                let shape = self.run.shape_in(at, value.tensor);
                let tag = at.place.tag(class, self.run.tensor_name(at.layer_idx, value.tensor));
                let subject = Subject { tag, shape: &shape };
                env.insert(*output, Value::Float(convert(comm, &self.seat, steps, &subject, tensor)?));
            }
            Instruction::Accumulate { gradient, reduce } => {
                let value = self.run.program(at.layer_idx).value(*gradient);
                let block = self.float(at, env, *gradient)?.clone();
                let tag =
                    at.place.tag(Class::GradientAccumulate, self.run.tensor_name(at.layer_idx, value.tensor));
                let shape = [block.len() as u64];
                let subject = Subject { tag, shape: &shape };
                let term = convert(comm, &self.seat, reduce, &subject, flattened(block))?;
                self.state((at.layer_idx, value.tensor))?.accumulate(elements(term))?;
            }
            Instruction::Free { value } => {
                if env.remove(value).is_none() {
                    return Err(self.bad_value(at, *value, "is freed but not there".into()));
                }
            }
        }
        Ok(())
    }

    fn operator_backward(
        &mut self,
        comm: &mut RankComm<'_, E>,
        at: At<'a>,
        instruction: &'a Instruction,
        env: &mut Environment<E>,
    ) -> Result<(), ExecutorError> {
        let Instruction::Backward { op, operands, gradients, results } = instruction else { return Ok(()) };
        let find = |id: &Option<ValueId>| id.map(|id| self.find(at, env, id)).transpose();
        let float = |id: &Option<ValueId>| id.map(|id| self.float(at, env, id)).transpose();
        let ids = operands;
        let operands = ids.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        let gradients = gradients.iter().map(float).collect::<Result<Vec<_>, _>>()?;
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
                (Some(id), Some(gradient)) => env.insert(*id, Value::Float(gradient)),
                (Some(id), None) => return Err(self.bad_value(at, *id, "gets no gradient".into())),
                (None, _) => None,
            };
        }
        if self.extends(at, *op) {
            self.watch_values(at, env)?;
            self.drop_owed(at, *op);
        }
        Ok(())
    }

    fn bytes_of(&self, env: &Environment<E>) -> u64 {
        let bytes = |value: &Value<E>| match value {
            Value::Float(tensor) => tensor.len() as u64 * self.edges().element_bytes::<E>(),
            Value::Index(index) => (index.len() * size_of::<i64>()) as u64,
        };
        env.values().map(bytes).sum()
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
        let slot = Slot {
            tensor: value.tensor,
            seq: self.run.micro_batch_of(at.place.seq),
            tokens: self.run.tokens_of(at.place.seq),
        };
        let shape = self.run.shape_in(at, value.tensor);
        let all = self.seat.block(Sharding::REPLICATED, &shape);
        let own = Block::of(value.sharding, self.seat.mesh, &self.seat.mesh.coordinates(device), &shape);
        Ok(match self.run.batch().data::<E>(layer, at.layer_idx, data, slot) {
            Value::Float(whole) => Value::Float(all.cut(&whole, &own)),
            Value::Index(whole) => Value::Index(all.cut(&whole, &own)),
        })
    }

    fn find<'e>(
        &self,
        at: At<'_>,
        env: &'e Environment<E>,
        id: ValueId,
    ) -> Result<&'e Value<E>, ExecutorError> {
        env.get(&id).ok_or_else(|| self.bad_value(at, id, "is read but not there".into()))
    }

    fn float<'e>(
        &self,
        at: At<'_>,
        env: &'e Environment<E>,
        id: ValueId,
    ) -> Result<&'e Tensor<E>, ExecutorError> {
        let value = self.find(at, env, id)?.as_float();
        value.ok_or_else(|| self.bad_value(at, id, "is data where a number is needed".into()))
    }

    fn take(&self, at: At<'_>, env: &mut Environment<E>, id: ValueId) -> Result<Tensor<E>, ExecutorError> {
        let value = env.remove(&id).and_then(Value::into_float);
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
    fn expect_exactly(&self, at: At<'_>, env: &Environment<E>, ids: &[ValueId]) -> Result<(), ExecutorError> {
        if let Some(&id) = ids.iter().find(|id| !env.contains_key(id)) {
            return Err(self.bad_value(at, id, "should be there at the end".into()));
        }
        match env.keys().find(|id| !ids.contains(id)) {
            Some(&id) => Err(self.bad_value(at, id, "is left at the end".into())),
            None => Ok(()),
        }
    }

    fn receive_stream(
        &mut self,
        comm: &mut RankComm<'_, E>,
        chunk: u32,
        action: Action,
        seq: u64,
    ) -> Result<Option<Tensor<E>>, ExecutorError> {
        let Some(border) = &self.run.borders[chunk as usize] else { return Ok(None) };
        let from = self.run.stage_at(chunk - 1, action.micro_batch);
        let key = (chunk, Direction::Forward, self.run.unit_of(seq));
        let stream = self.receive(comm, (from, border, border.sent), key, seq)?;
        self.at_border(comm, border, (Phase::Forward, seq), stream).map(Some)
    }

    fn send_stream(
        &mut self,
        comm: &mut RankComm<'_, E>,
        chunk: u32,
        action: Action,
        (seq, stream): (u64, Tensor<E>),
    ) -> Result<(), ExecutorError> {
        let Some(Some(border)) = self.run.borders.get(chunk as usize + 1) else {
            let loss = stream.sum().wide();
            self.record.losses.last_mut().into_iter().for_each(|total| *total += loss);
            return Ok(());
        };
        let to = self.run.stage_at(chunk + 1, action.micro_batch);
        let key = (chunk + 1, Direction::Forward, self.run.unit_of(seq));
        self.send(comm, (to, border), key, (seq, stream))
    }

    fn receive_gradient(
        &mut self,
        comm: &mut RankComm<'_, E>,
        chunk: u32,
        action: Action,
        seq: u64,
    ) -> Result<Tensor<E>, ExecutorError> {
        let Some(Some(border)) = self.run.borders.get(chunk as usize + 1) else {
            let step = seq / u64::from(self.run.execution.shape().n_units());
            let share = (self.run.n_counted(step) as f64).recip();
            return Ok(ArrayD::from_elem(IxDyn(&[]), E::from_f64(share)));
        };
        let from = self.run.stage_at(chunk + 1, action.micro_batch);
        let key = (chunk + 1, Direction::Backward, self.run.unit_of(seq));
        self.receive(comm, (from, border, border.gradient), key, seq)
    }

    fn send_gradient(
        &mut self,
        comm: &mut RankComm<'_, E>,
        chunk: u32,
        action: Action,
        (seq, gradient): (u64, Tensor<E>),
    ) -> Result<(), ExecutorError> {
        let Some(border) = &self.run.borders[chunk as usize] else { return Ok(()) };
        let gradient = self.at_border(comm, border, (Phase::Backward, seq), gradient)?;
        let to = self.run.stage_at(chunk - 1, action.micro_batch);
        let key = (chunk, Direction::Backward, self.run.unit_of(seq));
        self.send(comm, (to, border), key, (seq, gradient))
    }

    /// Converts the stream, or its gradient, where two chunks have it in different shardings.
    fn at_border(
        &self,
        comm: &mut RankComm<'_, E>,
        border: &Border,
        (phase, seq): (Phase, u64),
        tensor: Tensor<E>,
    ) -> Result<Tensor<E>, ExecutorError> {
        let steps = if phase == Phase::Forward { &border.forward } else { &border.backward };
        let tag = self.run.place(border.layer_idx, phase, seq).tag(Class::Pipeline, "the stream, converted");
        convert(comm, &self.seat, steps, &Subject { tag, shape: self.run.border_shape(border, seq) }, tensor)
    }

    fn send(
        &mut self,
        comm: &mut RankComm<'_, E>,
        (to, border): (u32, &Border),
        key: (u32, Direction, u32),
        (seq, tensor): (u64, Tensor<E>),
    ) -> Result<(), ExecutorError> {
        if to == self.seat.stage {
            let bytes = tensor.len() as u64 * self.run.rounded_bytes(size_of::<E>() as u64);
            self.watch.make(Held::Stream(key.0, key.1, key.2), bytes)?;
            self.moved.insert(key, tensor);
            return Ok(());
        }
        comm.send(self.seat.peer(to), self.border_tag(border, key.1, seq), elements(tensor))
    }

    fn receive(
        &mut self,
        comm: &mut RankComm<'_, E>,
        (from, border, sharding): (u32, &Border, Sharding),
        key: (u32, Direction, u32),
        seq: u64,
    ) -> Result<Tensor<E>, ExecutorError> {
        let missing = || unfit(format!("chunk {} has not received its stream", key.0));
        if from == self.seat.stage {
            self.watch.drop(Held::Stream(key.0, key.1, key.2));
            return self.moved.remove(&key).ok_or_else(missing);
        }
        let block = self.seat.block(sharding, self.run.border_shape(border, seq));
        let data = comm.recv(self.seat.peer(from), self.border_tag(border, key.1, seq), block.len())?;
        ArrayD::from_shape_vec(IxDyn(&block.shape()), data).map_err(|_| missing())
    }

    fn border_tag(&self, border: &Border, direction: Direction, seq: u64) -> crate::instruction::Tag {
        let phase = match direction {
            Direction::Forward => Phase::Forward,
            Direction::Backward => Phase::Backward,
        };
        self.run.place(border.layer_idx, phase, seq).tag(Class::Pipeline, "the stream")
    }
}

/// A tensor as one dim, in index order.
pub(crate) fn flattened<E: Real>(tensor: Tensor<E>) -> Tensor<E> {
    ndarray::Array1::from(elements(tensor)).into_dyn()
}
