//! Which buffers a rank's step has and when, and where in its arena each lies.
//!
//! Planned from programs, shardings and the table alone, in elements of the executed type; every value of a micro-batch
//! (or of a slice of one) is a buffer of its own from the instruction that makes it to the one that frees it, saved
//! values up to backward. What a layer keeps on the host leaves the device when its forward is over, and comes back
//! before its backward. States of parameters live all the time, finished gradients during the update. Where the host
//! updates a parameter, its optimizer state and its finished gradient are buffers of a second arena, the rank's share
//! of the host's memory, and the new value is a buffer of the device until it is stored. States on the host's drives
//! are buffers of a third, and of the second while they are updated. A stream that waits on its rank for the next chunk
//! is a buffer, and so is what attention on a ring keeps. What an instruction has in hand is none: operands as it reads
//! them, results before it writes them, and messages on their way.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use ir::graph::OpId;
use ir::op::OpKind;
use ir::program::{AxisSet, HeldParameter, Home, Instruction, StateHome, Storage, ValueId};
use ir::schedule::{Action, Section};
use ir::work::Pass;

use crate::arena::{Buffer, Placed, place};
use crate::convert::Seat;
use crate::job::LayerIdx;
use crate::prepare::{ParameterKey, Prepared};
use crate::update::flat_cut;
use crate::ways::Way;

/// What a buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Held {
    /// One of the states of a parameter.
    State(ParameterKey, State),
    /// A value of a layer and unit: a micro-batch, or a slice of one.
    Value(LayerIdx, u32, ValueId),
    /// The result that attention on a ring keeps of a unit.
    Attended(LayerIdx, u32, OpId),
    /// The logarithms of its sums.
    LogSums(LayerIdx, u32, OpId),
    /// Gradients of keys that a unit leaves for the slices before it.
    Owed(LayerIdx, u32, OpId),
    /// A stream over this one of the borders, or its gradient back, between two layers of one rank; of a unit.
    Stream(usize, Direction, u32),
    /// A finished gradient.
    Gradient(ParameterKey),
    /// A new value that the host has worked out, on the device until it is stored.
    Updated(ParameterKey),
}

/// The states of a parameter; a frozen one has the first alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum State {
    /// As it is stored between uses.
    Stored,
    /// Where it is updated.
    Master,
    /// Moments of the update.
    First,
    Second,
    /// Sum of the micro-batches' gradients.
    Accumulator,
}

/// Direction of the stream between chunks; both may be under way between the same two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

impl State {
    /// What the update holds: where the parameter's storage has its home.
    pub(crate) const UPDATED: [Self; 3] = [Self::Master, Self::First, Self::Second];
}

/// The buffers of a rank's step, placed.
#[derive(Debug)]
pub(crate) struct MemoryPlan {
    pub(crate) buffers: Vec<Buffer>,
    /// In the order in which they appear, by what they hold; a value that appears twice in a step is listed twice.
    pub(crate) of: BTreeMap<Held, Vec<usize>>,
    pub(crate) placed: Arc<Placed>,
}

/// What a rank has in its device's memory, in its share of the host's and on its share of the host's drives.
#[derive(Debug)]
pub(crate) struct RankPlan {
    pub(crate) device: MemoryPlan,
    pub(crate) host: MemoryPlan,
    /// On its drives.
    pub(crate) nvme: MemoryPlan,
}

/// The plans of all ranks of a run; ranks with equal buffers share the work.
pub(crate) fn plans(run: &Prepared<'_>, element_bytes: u64) -> Vec<RankPlan> {
    let mut known: BTreeMap<Vec<Buffer>, Arc<Placed>> = BTreeMap::new();
    let mut placed = |Lives { buffers, of, .. }: Lives| {
        let placed = known.entry(buffers.clone()).or_insert_with_key(|buffers| Arc::new(place(buffers)));
        MemoryPlan { placed: Arc::clone(placed), buffers, of }
    };
    let one = |rank: usize| {
        let Walk { device, host, nvme, .. } = Walk::of_rank(run, rank, element_bytes);
        RankPlan { device: placed(device), host: placed(host), nvme: placed(nvme) }
    };
    (0..run.execution.n_ranks() as usize).map(one).collect()
}

/// Buffers of one memory as they come and go.
#[derive(Default)]
struct Lives {
    buffers: Vec<Buffer>,
    of: BTreeMap<Held, Vec<usize>>,
    live: BTreeMap<Held, usize>,
}

impl Lives {
    /// A buffer appears. One that is there already, as a kept value whose operator runs again for another result,
    /// stays.
    fn make(&mut self, held: Held, bytes: u64, moment: usize) {
        if self.live.contains_key(&held) {
            return;
        }
        let at = self.buffers.len();
        self.live.insert(held, at);
        self.buffers.push(Buffer { bytes, from: moment, to: usize::MAX });
        self.of.entry(held).or_default().push(at);
    }

    fn drop(&mut self, held: Held, moment: usize) {
        if let Some(at) = self.live.remove(&held) {
            self.buffers[at].to = moment;
        }
    }
}

/// What a layer keeps of a unit: ranges of all that it may hold then.
pub(crate) fn held_of((layer_idx, unit): (LayerIdx, u32)) -> [RangeInclusive<Held>; 3] {
    let (first, last) = (OpId(0), OpId(usize::MAX));
    [
        Held::Value(layer_idx, unit, ValueId(0))..=Held::Value(layer_idx, unit, ValueId(usize::MAX)),
        Held::Attended(layer_idx, unit, first)..=Held::Attended(layer_idx, unit, last),
        Held::LogSums(layer_idx, unit, first)..=Held::LogSums(layer_idx, unit, last),
    ]
}

/// What the update of a parameter holds.
pub(crate) fn updated_states(key: ParameterKey) -> RangeInclusive<Held> {
    let [first, .., last] = State::UPDATED;
    Held::State(key, first)..=Held::State(key, last)
}

/// Buffers go from one memory to another, all at once.
fn move_all((from, to): (&mut Lives, &mut Lives), ranges: &[RangeInclusive<Held>], moment: usize) {
    let of = |range: &RangeInclusive<Held>| from.live.range(range.clone()).map(|(held, at)| (*held, *at));
    let all: Vec<(Held, usize)> = ranges.iter().flat_map(of).collect();
    for (held, at) in all {
        to.make(held, from.buffers[at].bytes, moment);
        from.drop(held, moment);
    }
}

/// Walks one step of a rank, a moment per instruction.
struct Walk<'a> {
    run: &'a Prepared<'a>,
    seat: Seat<'a>,
    element_bytes: u64,
    moment: usize,
    device: Lives,
    host: Lives,
    nvme: Lives,
}

impl<'a> Walk<'a> {
    fn of_rank(run: &'a Prepared<'a>, rank: usize, element_bytes: u64) -> Self {
        let seat = Seat::new(run.execution.meshes, rank);
        let stage = seat.stage;
        let [device, host, nvme] = [Lives::default(), Lives::default(), Lives::default()];
        let mut walk = Self { run, seat, element_bytes, moment: 0, device, host, nvme };
        for (key, held) in walk.parameters(stage) {
            walk.states(key, &held);
        }
        for action in run.execution.row(stage, walk.seat.device) {
            let (shape, action) = (run.execution.shape(), *action);
            let (chunk, unit) = (shape.chunk(action), shape.unit(action));
            // What the action before made is not of the moment in which this one takes something away.
            walk.moment += 1;
            let layers = run.layers_of(chunk);
            match action.section {
                Section::Forward => layers.into_iter().for_each(|layer| walk.forward(layer, (action, unit))),
                Section::Backward | Section::BackwardInput | Section::BackwardWeight => {
                    layers.into_iter().rev().for_each(|layer| walk.backward(layer, (action, unit)));
                }
            }
        }
        walk.update(stage);
        walk.moment += 1;
        for lives in [&mut walk.device, &mut walk.host, &mut walk.nvme] {
            let live: Vec<Held> = lives.live.keys().copied().collect();
            live.into_iter().for_each(|held| lives.drop(held, walk.moment));
        }
        walk
    }

    /// A stream that a layer takes over from another than its neighbour no longer waits.
    fn take_over(&mut self, way: Way, direction: Direction, unit: u32) {
        if let Way::Border(border) = way {
            self.drop(Held::Stream(border, direction, unit));
        }
    }

    /// A stream of a border waits here where the chunk it goes to is on this rank too.
    fn pass_on(&mut self, way: Way, direction: Direction, (action, unit): (Action, u32)) {
        let run = self.run;
        let Way::Border(border) = way else { return };
        let between = &run.ways.borders[border];
        let (to, sharding) = match direction {
            Direction::Forward => (between.chunks[1], between.sent),
            Direction::Backward => (between.chunks[0], between.gradient),
        };
        if run.stage_at(to, action.micro_batch) == self.seat.stage {
            let elements = self.seat.block(sharding, run.border_shape(between, u64::from(unit))).len() as u64;
            let bytes = elements * run.rounded().bytes(self.element_bytes);
            self.make(Held::Stream(border, direction, unit), bytes);
        }
    }

    fn parameters(&self, stage: u32) -> Vec<(ParameterKey, HeldParameter)> {
        let of_layer = |layer_idx: LayerIdx| {
            self.run.program(layer_idx).held().map(move |held| ((layer_idx, held.tensor), held))
        };
        self.run.layers_on(stage).into_iter().flat_map(of_layer).collect()
    }

    fn forward(&mut self, layer_idx: LayerIdx, (action, unit): (Action, u32)) {
        let run = self.run;
        let program = run.program(layer_idx);
        let held = |value: ValueId| Held::Value(layer_idx, unit, value);
        run.ways.reads[layer_idx].iter().for_each(|&way| self.take_over(way, Direction::Forward, unit));
        for &stream in &program.stream {
            self.make(held(stream), self.value_bytes((layer_idx, unit), stream));
        }
        self.section((layer_idx, unit), &program.forward, Pass::Forward);
        program.out.iter().for_each(|&out| self.drop(held(out)));
        if program.kept == Home::Host {
            self.moment += 1;
            move_all((&mut self.device, &mut self.host), &held_of((layer_idx, unit)), self.moment);
        }
        for &way in run.ways.leaves[layer_idx].iter().flatten() {
            self.pass_on(way, Direction::Forward, (action, unit));
        }
    }

    fn backward(&mut self, layer_idx: LayerIdx, (action, unit): (Action, u32)) {
        let run = self.run;
        let program = run.program(layer_idx);
        let split = run.split(layer_idx).ok();
        let (code, carried): (&[Instruction], &[ValueId]) = match (action.section, split) {
            (Section::BackwardWeight, Some(split)) => {
                return self.section((layer_idx, unit), &split.weight, Pass::Backward);
            }
            (Section::BackwardInput, Some(split)) => (&split.input, &split.carried),
            (_, _) => (&program.backward, &[]),
        };
        for &way in run.ways.leaves[layer_idx].iter().flatten() {
            self.take_over(way, Direction::Backward, unit);
        }
        if program.kept == Home::Host {
            self.moment += 1;
            move_all((&mut self.host, &mut self.device), &held_of((layer_idx, unit)), self.moment);
        }
        let held = |value: ValueId| Held::Value(layer_idx, unit, value);
        for &gradient in &program.out_gradient {
            self.make(held(gradient), self.value_bytes((layer_idx, unit), gradient));
        }
        self.section((layer_idx, unit), code, Pass::Backward);
        let leaves = program.stream_gradient.iter().filter(|id| !carried.contains(id));
        leaves.for_each(|&value| self.drop(held(value)));
        for &way in &run.ways.reads[layer_idx] {
            self.pass_on(way, Direction::Backward, (action, unit));
        }
    }

    fn section(&mut self, (layer_idx, unit): (LayerIdx, u32), code: &[Instruction], pass: Pass) {
        for instruction in code {
            self.moment += 1;
            match instruction {
                Instruction::Forward { op, results, .. } => {
                    self.attend((layer_idx, unit), *op, (results[0], pass));
                }
                Instruction::Backward { op, gradients, .. } => {
                    self.owe((layer_idx, unit), *op, gradients);
                    self.drop(Held::Attended(layer_idx, unit, *op));
                    self.drop(Held::LogSums(layer_idx, unit, *op));
                }
                Instruction::Load { .. }
                | Instruction::Parameter { .. }
                | Instruction::Convert { .. }
                | Instruction::Accumulate { .. }
                | Instruction::Free { .. } => {}
            }
            for value in instruction.written() {
                let bytes = self.value_bytes((layer_idx, unit), value);
                self.make(Held::Value(layer_idx, unit, value), bytes);
            }
            match instruction {
                Instruction::Free { value } => self.drop(Held::Value(layer_idx, unit, *value)),
                Instruction::Backward { op, .. }
                    if self.device.live.contains_key(&Held::Owed(layer_idx, unit + 1, *op)) =>
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

    /// What attention on a ring keeps for backward: its result, and the logarithm of every query's sum.
    fn attend(&mut self, (layer_idx, unit): (LayerIdx, u32), op: OpId, (result, pass): (ValueId, Pass)) {
        let run = self.run;
        if run.ring_axes(layer_idx, op).is_empty() || !run.keeps_attended(layer_idx, op, pass) {
            return;
        }
        let value = run.program(layer_idx).value(result);
        let shape = run.shape_of(layer_idx, value.tensor, unit % run.execution.slices.n());
        let lengths = self.seat.block(value.sharding, &shape).shape();
        let queries = lengths[..lengths.len() - 1].iter().product::<usize>() as u64;
        let bytes = lengths.iter().product::<usize>() as u64 * run.rounded().bytes(self.element_bytes);
        self.make(Held::Attended(layer_idx, unit, op), bytes);
        self.make(Held::LogSums(layer_idx, unit, op), queries * self.element_bytes);
    }

    /// What backward of an operator that extends keys leaves for the slices before: all rows of its gradient but its
    /// own.
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

    fn make(&mut self, held: Held, bytes: u64) {
        self.device.make(held, bytes, self.moment);
    }

    fn make_in(&mut self, home: StateHome, held: Held, bytes: u64) {
        match home {
            StateHome::Device => self.device.make(held, bytes, self.moment),
            StateHome::Host => self.host.make(held, bytes, self.moment),
            StateHome::Nvme => self.nvme.make(held, bytes, self.moment),
        }
    }

    /// A buffer of the device goes.
    fn drop(&mut self, held: Held) {
        self.device.drop(held, self.moment);
    }

    fn value_elements(&self, (layer_idx, unit): (LayerIdx, u32), value: ValueId) -> u64 {
        let value = self.run.program(layer_idx).value(value);
        let shape = self.run.shape_of(layer_idx, value.tensor, unit % self.run.execution.slices.n());
        self.seat.block(value.sharding, &shape).len() as u64
    }

    fn value_bytes(&self, (layer_idx, unit): (LayerIdx, u32), value: ValueId) -> u64 {
        let width = self.run.width(layer_idx, self.run.program(layer_idx).value(value));
        self.value_elements((layer_idx, unit), value) * width.bytes(self.element_bytes)
    }

    /// Elements of the flattened local block of a parameter that a cut leaves to this rank.
    fn cut_elements(&self, (layer_idx, tensor): ParameterKey, held: &HeldParameter, cut: AxisSet) -> u64 {
        let flat = self.seat.block(held.used, &self.run.shape(layer_idx, tensor)).len() as u64;
        flat_cut(&self.seat, flat, cut).len() as u64
    }

    fn states(&mut self, key: ParameterKey, held: &HeldParameter) {
        let Storage { parameter, gradient, optimizer, home } = held.storage;
        let stored = self.run.rounded().bytes(self.element_bytes);
        let parameters = self.run.program(key.0).parameters;
        let n = self.cut_elements(key, held, parameter);
        self.make_in(parameters.into(), Held::State(key, State::Stored), n * stored);
        if held.trained {
            let updated = self.cut_elements(key, held, optimizer) * self.element_bytes;
            for state in State::UPDATED {
                self.make_in(home, Held::State(key, state), updated);
            }
            let summed = self.cut_elements(key, held, gradient) * self.element_bytes;
            self.make(Held::State(key, State::Accumulator), summed);
        }
    }

    /// Finished gradients, and what moves between device and host to update states there.
    fn update(&mut self, stage: u32) {
        let run = self.run;
        let all = self.parameters(stage);
        let learned: Vec<_> = all.into_iter().filter(|(_, held)| held.trained).collect();
        for (key, held) in &learned {
            let bytes = self.cut_elements(*key, held, held.storage.optimizer) * self.element_bytes;
            self.make(Held::Gradient(*key), bytes);
        }
        let is_owned = |key: ParameterKey| run.stage_of(key.0) == stage && !run.is_copy(key);
        let on_host = learned.into_iter().filter(|(_, held)| held.storage.home.is_updated_by_host());
        let (owned, copies): (Vec<_>, Vec<_>) = on_host.partition(|(key, _)| is_owned(*key));
        for (key, held) in &owned {
            self.moment += 1;
            let n = self.cut_elements(*key, held, held.storage.optimizer);
            self.drop(Held::Gradient(*key));
            self.make_in(StateHome::Host, Held::Gradient(*key), n * self.element_bytes);
            if held.storage.home == StateHome::Nvme {
                let states = State::UPDATED.map(|state| Held::State(*key, state));
                let bytes = n * self.element_bytes;
                states.into_iter().for_each(|state| self.make_in(StateHome::Host, state, bytes));
                self.moment += 1;
                states.into_iter().for_each(|state| self.host.drop(state, self.moment));
            }
            self.make(Held::Updated(*key), n * run.rounded().bytes(self.element_bytes));
        }
        for (key, held) in &copies {
            let n = self.cut_elements(*key, held, held.storage.optimizer);
            self.make(Held::Updated(*key), n * run.rounded().bytes(self.element_bytes));
        }
    }
}
