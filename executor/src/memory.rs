//! The memory of a rank: which buffers its step has and when, and whether the run keeps to it.
//!
//! Planned from programs, shardings and the table alone, in elements of the executed type; every value of a micro-batch
//! (or of a slice of one) is a buffer of its own from the instruction that makes it to the one that frees it, saved values up to backward.
//! States of parameters live all the time, finished gradients during the update. Run, every buffer is registered at its
//! planned offset as it appears, with the bytes it really has. What messages hold on their way is not counted; a stream
//! that waits on its rank for the next chunk there is.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ir::graph::OpId;
use ir::op::OpKind;
use ir::program::{AxisSet, HeldParameter, Instruction, Storage, ValueId};
use ir::schedule::{Action, Section};

use crate::arena::{Arena, Buffer, Placed, place};
use crate::convert::Seat;
use crate::error::ExecutorError;
use crate::job::LayerIdx;
use crate::prepare::{ParameterKey, Prepared, unfit};
use crate::update::flat_cut;

/// What a buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Held {
    /// The states of a parameter: stored, to be updated, both moments, accumulator.
    State(ParameterKey),
    /// A value of a layer and unit: a micro-batch, or a slice of one.
    Value(LayerIdx, u32, ValueId),
    /// Gradients of keys that a unit leaves for the slices before it.
    Owed(LayerIdx, u32, OpId),
    /// The stream into a chunk, or its gradient out of it, between two chunks of one rank; of a unit.
    Stream(u32, Direction, u32),
    /// A finished gradient.
    Gradient(ParameterKey),
}

/// Direction of the stream between chunks; both may be under way between the same two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

/// Bytes of a rank's arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankMemory {
    /// Size of the arena as planned.
    pub planned_peak: u64,
    /// Most bytes that live at once as planned: no arena is smaller.
    pub lower_bound: u64,
    /// Highest byte that the run used.
    pub high_water: u64,
    /// Most bytes that the run held at once.
    pub most_live: u64,
}

/// The buffers of a rank's step, placed.
#[derive(Debug)]
pub(crate) struct MemoryPlan {
    buffers: Vec<Buffer>,
    /// In the order in which they appear, by what they hold; a value that appears twice in a step is listed twice.
    of: BTreeMap<Held, Vec<usize>>,
    placed: Arc<Placed>,
}

/// The plans of all ranks of a run; ranks with equal buffers share the work.
pub(crate) fn plans(run: &Prepared<'_>, element_bytes: u64) -> Vec<MemoryPlan> {
    let mut known: BTreeMap<Vec<Buffer>, Arc<Placed>> = BTreeMap::new();
    let one = |rank: usize| {
        let Walk { buffers, of, .. } = Walk::of_rank(run, rank, element_bytes);
        let placed = known.entry(buffers.clone()).or_insert_with_key(|buffers| Arc::new(place(buffers)));
        MemoryPlan { buffers, of, placed: Arc::clone(placed) }
    };
    (0..run.execution.n_ranks() as usize).map(one).collect()
}

/// Walks one step of a rank, a moment per instruction.
struct Walk<'a> {
    run: &'a Prepared<'a>,
    seat: Seat<'a>,
    element_bytes: u64,
    moment: usize,
    buffers: Vec<Buffer>,
    of: BTreeMap<Held, Vec<usize>>,
    live: BTreeMap<Held, usize>,
}

impl<'a> Walk<'a> {
    fn of_rank(run: &'a Prepared<'a>, rank: usize, element_bytes: u64) -> Self {
        let seat = Seat::new(run.execution.mesh, rank);
        let stage = seat.stage;
        let (buffers, of, live) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        let mut walk = Self { run, seat, element_bytes, moment: 0, buffers, of, live };
        for (key, held) in walk.parameters(stage) {
            walk.make(Held::State(key), walk.state_bytes(key, &held));
        }
        for action in &run.execution.table[stage as usize] {
            let (shape, action) = (run.execution.shape(), *action);
            let (chunk, unit) = (shape.chunk(action), shape.unit(action));
            // What the action before made is not of the moment in which this one takes something away.
            walk.moment += 1;
            let layers = run.layers_of(chunk);
            match action.section {
                Section::Forward => {
                    walk.drop(Held::Stream(chunk, Direction::Forward, unit));
                    layers.into_iter().for_each(|layer| walk.forward(layer, unit));
                    walk.pass_on((chunk + 1, Direction::Forward, unit), (action, chunk + 1));
                }
                Section::Backward | Section::BackwardInput | Section::BackwardWeight => {
                    let at = |layer| (layer, unit);
                    walk.drop(Held::Stream(chunk + 1, Direction::Backward, unit));
                    layers.into_iter().rev().for_each(|layer| walk.backward(at(layer), action.section));
                    let first = run.layers_of(chunk).first().map(|&layer| run.program(layer));
                    let sends = action.section != Section::BackwardWeight
                        && first.is_some_and(|program| program.stream_gradient.is_some());
                    if let Some(before) = chunk.checked_sub(1).filter(|_| sends) {
                        walk.pass_on((chunk, Direction::Backward, unit), (action, before));
                    }
                }
            }
        }
        for (key, held) in walk.parameters(stage).into_iter().filter(|(_, held)| held.trained) {
            walk.make(
                Held::Gradient(key),
                walk.cut_elements(key, &held, held.storage.optimizer) * element_bytes,
            );
        }
        walk.moment += 1;
        walk.live.keys().copied().collect::<Vec<_>>().into_iter().for_each(|held| walk.drop(held));
        walk
    }

    /// The stream of a border waits here where the chunk it goes to is on this rank too.
    fn pass_on(&mut self, (border, direction, unit): (u32, Direction, u32), (action, to): (Action, u32)) {
        let run = self.run;
        let Some(Some(between)) = run.borders.get(border as usize) else { return };
        if run.stage_at(to, action.micro_batch) == self.seat.stage {
            let sharding = match direction {
                Direction::Forward => between.sent,
                Direction::Backward => between.gradient,
            };
            let elements = self.seat.block(sharding, run.border_shape(between, u64::from(unit))).len() as u64;
            let bytes = elements * run.rounded_bytes(self.element_bytes);
            self.make(Held::Stream(border, direction, unit), bytes);
        }
    }

    fn parameters(&self, stage: u32) -> Vec<(ParameterKey, HeldParameter)> {
        let of_layer = |layer_idx: LayerIdx| {
            self.run.program(layer_idx).held().map(move |held| ((layer_idx, held.tensor), held))
        };
        self.run.layers_on(stage).into_iter().flat_map(of_layer).collect()
    }

    fn forward(&mut self, layer_idx: LayerIdx, unit: u32) {
        let program = self.run.program(layer_idx);
        let held = |value: ValueId| Held::Value(layer_idx, unit, value);
        if let Some(stream) = program.stream {
            self.make(held(stream), self.value_bytes((layer_idx, unit), stream));
        }
        self.section((layer_idx, unit), &program.forward);
        self.drop(held(program.out));
    }

    fn backward(&mut self, (layer_idx, unit): (LayerIdx, u32), section: Section) {
        let run = self.run;
        let program = run.program(layer_idx);
        let split = run.split(layer_idx).ok();
        let (code, carried): (&[Instruction], &[ValueId]) = match (section, split) {
            (Section::BackwardWeight, Some(split)) => {
                return self.section((layer_idx, unit), &split.weight);
            }
            (Section::BackwardInput, Some(split)) => (&split.input, &split.carried),
            (_, _) => (&program.backward, &[]),
        };
        let held = |value: ValueId| Held::Value(layer_idx, unit, value);
        self.make(held(program.out_gradient), self.value_bytes((layer_idx, unit), program.out_gradient));
        self.section((layer_idx, unit), code);
        let leaves = program.stream_gradient.iter().filter(|id| !carried.contains(id));
        leaves.for_each(|&value| self.drop(held(value)));
    }

    fn section(&mut self, (layer_idx, unit): (LayerIdx, u32), code: &[Instruction]) {
        for instruction in code {
            self.moment += 1;
            if let Instruction::Backward { op, gradients, .. } = instruction {
                self.owe((layer_idx, unit), *op, gradients);
            }
            for value in instruction.written() {
                let bytes = self.value_bytes((layer_idx, unit), value);
                self.make(Held::Value(layer_idx, unit, value), bytes);
            }
            match instruction {
                Instruction::Free { value } => self.drop(Held::Value(layer_idx, unit, *value)),
                Instruction::Backward { op, .. }
                    if self.live.contains_key(&Held::Owed(layer_idx, unit + 1, *op)) =>
                {
                    self.moment += 1;
                    self.drop(Held::Owed(layer_idx, unit + 1, *op));
                }
                Instruction::Load { .. }
                | Instruction::Parameter { .. }
                | Instruction::Forward { .. }
                | Instruction::Backward { .. }
                | Instruction::Convert { .. }
                | Instruction::Accumulate { .. } => {}
            }
        }
        self.moment += 1;
    }

    /// What backward of an operator that extends keys leaves for the slices before: all rows of its gradient but its own.
    fn owe(&mut self, (layer_idx, unit): (LayerIdx, u32), op: OpId, gradients: &[Option<ValueId>]) {
        let slices = &self.run.execution.slices;
        let tokens = slices.range(unit % slices.n());
        let extends = self.run.layer(layer_idx).ops[op.0].kind == OpKind::Extend;
        if let (true, 1.., [Some(gradient)]) = (extends, tokens.start, gradients) {
            // It is added to before it is rounded.
            let all = self.value_elements((layer_idx, unit), *gradient) * self.element_bytes;
            self.make(Held::Owed(layer_idx, unit, op), all / tokens.end * tokens.start);
        }
    }

    /// A buffer appears. One that is there already, as a kept value whose operator runs again for another result, stays.
    fn make(&mut self, held: Held, bytes: u64) {
        if self.live.contains_key(&held) {
            return;
        }
        let at = self.buffers.len();
        self.live.insert(held, at);
        self.buffers.push(Buffer { bytes, from: self.moment, to: usize::MAX });
        self.of.entry(held).or_default().push(at);
    }

    fn drop(&mut self, held: Held) {
        if let Some(at) = self.live.remove(&held) {
            self.buffers[at].to = self.moment;
        }
    }

    fn value_elements(&self, (layer_idx, unit): (LayerIdx, u32), value: ValueId) -> u64 {
        let value = self.run.program(layer_idx).value(value);
        let shape = self.run.shape_of(layer_idx, value.tensor, unit % self.run.execution.slices.n());
        self.seat.block(value.sharding, &shape).len() as u64
    }

    fn value_bytes(&self, (layer_idx, unit): (LayerIdx, u32), value: ValueId) -> u64 {
        let width = self.run.width(layer_idx, self.run.program(layer_idx).value(value), self.element_bytes);
        self.value_elements((layer_idx, unit), value) * width
    }

    /// Elements of the flattened local block of a parameter that a cut leaves to this rank.
    fn cut_elements(&self, (layer_idx, tensor): ParameterKey, held: &HeldParameter, cut: AxisSet) -> u64 {
        let flat = self.seat.block(held.used, &self.run.shape(layer_idx, tensor)).len() as u64;
        flat_cut(&self.seat, flat, cut).len() as u64
    }

    fn state_bytes(&self, key: ParameterKey, held: &HeldParameter) -> u64 {
        let cut = |axes| self.cut_elements(key, held, axes);
        let Storage { parameter, gradient, optimizer } = held.storage;
        let learned = if held.trained { cut(gradient) + 3 * cut(optimizer) } else { 0 };
        cut(parameter) * self.run.rounded_bytes(self.element_bytes) + learned * self.element_bytes
    }
}

/// A rank's memory as it runs. Without a plan nothing is watched.
#[derive(Debug, Default)]
pub(crate) struct Watch<'a> {
    plan: Option<&'a MemoryPlan>,
    arena: Arena,
    /// Where and how large what is held now is.
    now: BTreeMap<Held, (u64, u64)>,
    /// How often each buffer has appeared in this step.
    seen: BTreeMap<Held, usize>,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(plan: Option<&'a MemoryPlan>) -> Self {
        Self { plan, ..Self::default() }
    }

    /// What the rank holds of a layer and unit now, with its bytes; what it held before and lacks now is gone.
    pub(crate) fn values(
        &mut self,
        (layer_idx, unit): (LayerIdx, u32),
        held: impl Iterator<Item = (ValueId, u64)>,
    ) -> Result<(), ExecutorError> {
        if self.plan.is_none() {
            return Ok(());
        }
        let held: BTreeMap<Held, u64> =
            held.map(|(value, bytes)| (Held::Value(layer_idx, unit, value), bytes)).collect();
        let first = Held::Value(layer_idx, unit, ValueId(0));
        let last = Held::Value(layer_idx, unit, ValueId(usize::MAX));
        let gone: BTreeSet<Held> = self
            .now
            .range(first..=last)
            .map(|(held, _)| *held)
            .filter(|one| !held.contains_key(one))
            .collect();
        gone.into_iter().for_each(|held| self.drop(held));
        held.into_iter().try_for_each(|(held, bytes)| self.make(held, bytes))
    }

    /// A buffer that appears, with the bytes it has.
    pub(crate) fn make(&mut self, held: Held, bytes: u64) -> Result<(), ExecutorError> {
        let Some(plan) = self.plan.filter(|_| !self.now.contains_key(&held)) else { return Ok(()) };
        let nth = self.seen.entry(held).or_insert(0);
        let at = plan.of.get(&held).and_then(|list| list.get(*nth));
        *nth += 1;
        let at = *at.ok_or_else(|| unfit(format!("{held:?} is held but was not planned")))?;
        let planned = plan.buffers[at].bytes;
        if planned != bytes {
            return Err(unfit(format!("{held:?} has {bytes} B, planned were {planned} B")));
        }
        let offset = plan.placed.offsets[at];
        let taken = |byte| unfit(format!("{held:?} at {offset}: byte {byte} of the arena is not free"));
        self.arena.claim(offset, bytes).map_err(taken)?;
        self.now.insert(held, (offset, bytes));
        Ok(())
    }

    /// A buffer that is gone.
    pub(crate) fn drop(&mut self, held: Held) {
        if let Some((offset, bytes)) = self.now.remove(&held) {
            self.arena.release(offset, bytes);
        }
    }

    /// The next step begins: only states are left.
    pub(crate) fn end_step(&mut self) {
        let over: Vec<Held> =
            self.now.keys().copied().filter(|held| !matches!(held, Held::State(_))).collect();
        over.into_iter().for_each(|held| self.drop(held));
        self.seen.retain(|held, _| matches!(held, Held::State(_)));
    }

    pub(crate) fn report(&self) -> RankMemory {
        let placed = self.plan.map(|plan| plan.placed.as_ref());
        RankMemory {
            planned_peak: placed.map_or(0, |placed| placed.peak),
            lower_bound: placed.map_or(0, |placed| placed.lower_bound),
            high_water: self.arena.high_water,
            most_live: self.arena.most_live,
        }
    }
}
