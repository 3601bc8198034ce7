//! The end of a step: gradients are finished, shared parameters meet, every owner updates its cut, and the new values
//! go to where they are stored.
//!
//! All of it works on the flattened local block, cut by the storage's axes. A tied copy sends its gradient to the
//! owner's stage, to the rank with the same coordinates, and gets the new value back; it has no optimizer state. So
//! does the second of two pipeline ranks that have a copy of the same layer. A copy that its owner holds is the owner's
//! tensor.
//!
//! Where the host updates a parameter, the states of the update are in the rank's second arena: the finished gradient
//! goes down to them, and the new value comes up, rounded as operators take it, before anybody else gets it. States on
//! the host's drives are in the second arena only while they are updated.

use std::collections::BTreeSet;

use ir::conversion::Step;
use ir::program::{AxisSet, Frozen, StateHome, Storage, Update};
use ir::sharding::{Placement, Sharding};
use ndarray::{Array1, ArrayD};

use crate::block::Block;
use crate::convert::{Seat, Subject, convert, elements};
use crate::element::Width;
use crate::error::ExecutorError;
use crate::fabric::RankComm;
use crate::instruction::Tag;
use crate::job::Recorded;
use crate::kernels::optimizer::{Moments, adamw_step};
use crate::kernels::{Real, Tensor};
use crate::label::{Class, Phase};
use crate::lifetimes::{Held, State};
use crate::prepare::{ParameterKey, TiedPair, unfit};
use crate::rank::{Rank, flattened};

/// What a rank has of a parameter; its states are in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parameter {
    /// Elements of the local block in use, all cuts together.
    n_flat: u64,
    kind: Kind,
    /// Which memory holds what the update holds.
    pub(crate) home: StateHome,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Only used: nothing but its cut of the value.
    Frozen,
    /// Learned but not updated here yet: the moments are zero, and a copy's stay so.
    Fresh,
    /// Updated here before.
    Moved,
}

/// What a rank carries of a parameter from step to step.
#[derive(Clone, Debug)]
pub(crate) struct Carried {
    /// The values as they are updated.
    pub(crate) values: Vec<f64>,
    /// First and second moments, where there are any.
    pub(crate) moments: Option<[Vec<f64>; 2]>,
}

/// The block of a whole parameter that a rank uses, flattened.
fn own_block<E: Real>(seat: &Seat<'_>, used: Sharding, whole: &ArrayD<f64>) -> Tensor<E> {
    let shape: Vec<u64> = whole.shape().iter().map(|&n| n as u64).collect();
    let own = seat.block(Sharding::REPLICATED, &shape).cut(whole, &seat.block(used, &shape));
    flattened(own.mapv(E::from_f64))
}

/// Part of a flattened block of `n_flat` elements that a cut leaves to this rank.
pub(crate) fn flat_cut(seat: &Seat<'_>, n_flat: u64, cut: AxisSet) -> Block {
    let axes = cut.axes().into_iter();
    let sharding = axes.fold(Sharding::REPLICATED, |sharding, axis| sharding.with(axis, Placement::Shard(0)));
    seat.block(sharding, &[n_flat])
}

impl<E: Real> Rank<'_, E> {
    /// The states with which a learned parameter begins.
    pub(crate) fn begin_learned(
        &mut self,
        key: ParameterKey,
        update: &Update,
        whole: &ArrayD<f64>,
    ) -> Result<(), ExecutorError> {
        let Storage { parameter, gradient, optimizer, home } = update.storage;
        let own = own_block::<E>(&self.seat, update.used, whole);
        let n_flat = own.len() as u64;
        let kind = if self.run.moments(key, self.seat.stage).is_some() { Kind::Moved } else { Kind::Fresh };
        self.parameters.insert(key, Parameter { n_flat, kind, home });
        self.write_stored(key, self.cut(&own, parameter))?;
        let master = self.cut(&own, optimizer);
        self.write(key, State::Master, &master)?;
        let moments = self.run.moments(key, self.seat.stage);
        let of = |whole: Option<&ArrayD<f64>>| match whole {
            Some(whole) => self.cut(&own_block(&self.seat, update.used, whole), optimizer),
            None => vec![E::zero(); master.len()],
        };
        let (first, second) =
            (of(moments.map(|moments| &moments.first)), of(moments.map(|moments| &moments.second)));
        self.write(key, State::First, &first)?;
        self.write(key, State::Second, &second)?;
        let n = flat_cut(&self.seat, n_flat, gradient).len();
        self.write(key, State::Accumulator, &vec![E::zero(); n])
    }

    /// What is held of a frozen parameter.
    pub(crate) fn begin_frozen(
        &mut self,
        key: ParameterKey,
        frozen: &Frozen,
        whole: &ArrayD<f64>,
    ) -> Result<(), ExecutorError> {
        let own = own_block::<E>(&self.seat, frozen.used, whole);
        self.write_stored(key, self.cut(&own, frozen.cut))?;
        self.parameters
            .insert(key, Parameter { n_flat: own.len() as u64, kind: Kind::Frozen, home: StateHome::Device });
        Ok(())
    }

    /// This rank's part of a flattened block.
    fn cut(&self, own: &Tensor<E>, axes: AxisSet) -> Vec<E> {
        let n_flat = own.len() as u64;
        let all = self.seat.block(Sharding::REPLICATED, &[n_flat]);
        elements(all.cut(own, &flat_cut(&self.seat, n_flat, axes)))
    }

    /// A state of a parameter, as it lies in memory.
    pub(crate) fn read(&self, key: ParameterKey, state: State) -> Result<Vec<E>, ExecutorError> {
        let held = Held::State(key, state);
        let values = self.memory_of(key, state).tensor(held).map(elements);
        values.ok_or_else(|| unfit(format!("layer {}: a parameter that is not held", key.0)))
    }

    fn n_elements(&self, held: Held) -> Result<usize, ExecutorError> {
        let all = [&self.memory, &self.host, &self.nvme];
        let found = all.into_iter().find_map(|memory| memory.n_elements(held));
        found.ok_or_else(|| unfit(format!("{held:?} is not held")))
    }

    pub(crate) fn write(
        &mut self,
        key: ParameterKey,
        state: State,
        values: &[E],
    ) -> Result<(), ExecutorError> {
        let held = Held::State(key, state);
        self.memory_of_mut(key, state).put_numbers(held, values, Width::Full)
    }

    /// Stores a value as operators take it.
    fn write_stored(&mut self, key: ParameterKey, mut values: Vec<E>) -> Result<(), ExecutorError> {
        self.edges().round_all(&mut values);
        let (held, width) = (Held::State(key, State::Stored), self.run.rounded());
        self.memory_of_mut(key, State::Stored).put_numbers(held, &values, width)
    }

    /// Adds a micro-batch's gradient.
    pub(crate) fn accumulate(&mut self, key: ParameterKey, term: &[E]) -> Result<(), ExecutorError> {
        let key = self.run.holder(key);
        let mut sum = self.read(key, State::Accumulator)?;
        add(&mut sum, term, key)?;
        self.write(key, State::Accumulator, &sum)
    }

    fn is_learned(&self, key: ParameterKey) -> bool {
        self.parameters.get(&key).is_some_and(|parameter| parameter.kind != Kind::Frozen)
    }

    fn learned(&self) -> Vec<ParameterKey> {
        self.parameters.keys().copied().filter(|&key| self.is_learned(key)).collect()
    }

    fn n_flat(&self, key: ParameterKey) -> Result<u64, ExecutorError> {
        let held = self.parameters.get(&key).map(|parameter| parameter.n_flat);
        held.ok_or_else(|| unfit(format!("layer {}: a parameter that is not held", key.0)))
    }

    /// The flattened block of a parameter, all cuts together.
    pub(crate) fn gathered(
        &mut self,
        comm: &mut RankComm<'_, E>,
        key: ParameterKey,
        gather: &[Step],
        tag: Tag,
    ) -> Result<Tensor<E>, ExecutorError> {
        let key = self.run.holder(key);
        let (n_flat, stored) = (self.n_flat(key)?, self.read(key, State::Stored)?);
        self.count_fetched(key, stored.len());
        convert(comm, &self.seat, gather, &Subject { tag, shape: &[n_flat] }, one_dim(stored))
    }

    pub(crate) fn update(&mut self, comm: &mut RankComm<'_, E>, step: u64) -> Result<(), ExecutorError> {
        let keys = self.learned();
        for &key in &keys {
            let gradient = self.finish_gradient(comm, key, step)?;
            self.memory.put_numbers(Held::Gradient(key), &gradient, Width::Full)?;
        }
        let mut own: BTreeSet<ParameterKey> = keys.iter().copied().collect();
        self.join_twins(comm, &mut own, step)?;
        self.join_ties(comm, &mut own, step)?;
        for &key in &own {
            self.step(key, step)?;
        }
        self.return_ties(comm, step)?;
        self.return_twins(comm, step)?;
        for &key in &keys {
            self.store(comm, key, step)?;
        }
        match self.run.execution.training.record {
            Recorded::EveryStep => self.record_step(&own),
            Recorded::States => Ok(()),
        }
    }

    /// Gradients that this rank finished, and every parameter as it is stored now.
    fn record_step(&mut self, own: &BTreeSet<ParameterKey>) -> Result<(), ExecutorError> {
        let gradient = |&key: &ParameterKey| Ok((key, wide(&self.gradient(key)?)));
        let gradients = own.iter().map(gradient).collect::<Result<_, ExecutorError>>()?;
        let stored = |&key: &ParameterKey| Ok((key, wide(&self.read(key, State::Stored)?)));
        let parameters = self.parameters.keys().map(stored).collect::<Result<_, ExecutorError>>()?;
        self.record.gradients.push(gradients);
        self.record.parameters.push(parameters);
        Ok(())
    }

    /// What this rank carries on, of parameters that it owns.
    pub(crate) fn record_states(&mut self) -> Result<(), ExecutorError> {
        let (run, stage) = (self.run, self.seat.stage);
        for (&key, parameter) in &self.parameters {
            if run.stage_of(key.0) != stage || run.is_copy(key) {
                continue;
            }
            let state = |state| self.read(key, state).map(|values| wide(&values));
            let carried = match parameter.kind {
                Kind::Frozen => Carried { values: state(State::Stored)?, moments: None },
                Kind::Fresh => Carried { values: state(State::Master)?, moments: None },
                Kind::Moved => {
                    let moments = [state(State::First)?, state(State::Second)?];
                    Carried { values: state(State::Master)?, moments: Some(moments) }
                }
            };
            self.record.states.insert(key, carried);
        }
        Ok(())
    }

    pub(crate) fn gradient(&self, key: ParameterKey) -> Result<Vec<E>, ExecutorError> {
        let held = Held::Gradient(key);
        let values = self.memory.tensor(held).or_else(|| self.host.tensor(held)).map(elements);
        values.ok_or_else(|| unfit(format!("layer {}: a gradient of no parameter", key.0)))
    }

    /// Adds what others have of a gradient.
    fn add_to_gradient(&mut self, key: ParameterKey, terms: &[E]) -> Result<(), ExecutorError> {
        let mut sum = self.gradient(key)?;
        add(&mut sum, terms, key)?;
        self.memory.put_numbers(Held::Gradient(key), &sum, Width::Full)
    }

    fn finish_gradient(
        &mut self,
        comm: &mut RankComm<'_, E>,
        key: ParameterKey,
        step: u64,
    ) -> Result<Vec<E>, ExecutorError> {
        let update = self.run.update(key)?;
        let tag = self.parameter_tag(key, Class::GradientReduce, step);
        let total = self.read(key, State::Accumulator)?;
        self.write(key, State::Accumulator, &vec![E::zero(); total.len()])?;
        let subject = Subject { tag, shape: &[self.n_flat(key)?] };
        let finished = elements(convert(comm, &self.seat, &update.reduce, &subject, one_dim(total))?);
        if finished.len() != self.n_elements(Held::State(key, State::Master))? {
            let name = self.run.tensor_name(key.0, key.1);
            return Err(unfit(format!(
                "layer {}: the gradient of `{name}` does not end in the update's cut",
                key.0
            )));
        }
        Ok(finished)
    }

    /// Where a layer is on two pipeline ranks, adds what the second has of its gradients to the first's, and takes it
    /// out.
    fn join_twins(
        &mut self,
        comm: &mut RankComm<'_, E>,
        own: &mut BTreeSet<ParameterKey>,
        step: u64,
    ) -> Result<(), ExecutorError> {
        let (run, stage) = (self.run, self.seat.stage);
        let (firsts, seconds) = own.iter().copied().partition(|key| run.stage_of(key.0) == stage);
        *own = firsts;
        let seconds: BTreeSet<ParameterKey> = seconds;
        for key in seconds {
            let owner = self.seat.peer(run.stage_of(key.0));
            comm.send(owner, self.twin_tag(key, "gradient", step), self.gradient(key)?)?;
        }
        for &key in own.iter() {
            for twin in run.stages_of(key.0).into_iter().skip(1) {
                let tag = self.twin_tag(key, "gradient", step);
                let n = self.n_elements(Held::Gradient(key))?;
                let terms = comm.recv(self.seat.peer(twin), tag, n)?;
                self.add_to_gradient(key, &terms)?;
            }
        }
        Ok(())
    }

    /// Brings new values from the first pipeline rank that has a layer to the second.
    fn return_twins(&mut self, comm: &mut RankComm<'_, E>, step: u64) -> Result<(), ExecutorError> {
        let run = self.run;
        let (own, others): (Vec<ParameterKey>, Vec<ParameterKey>) =
            self.learned().into_iter().partition(|key| run.stage_of(key.0) == self.seat.stage);
        for key in own {
            for twin in run.stages_of(key.0).into_iter().skip(1) {
                let new = self.updated(key)?;
                comm.send(self.seat.peer(twin), self.twin_tag(key, "value", step), new)?;
            }
        }
        for key in others {
            let (owner, tag) = (self.seat.peer(run.stage_of(key.0)), self.twin_tag(key, "value", step));
            let new = comm.recv(owner, tag, self.n_elements(Held::State(key, State::Master))?)?;
            self.write_updated(key, new)?;
        }
        Ok(())
    }

    fn twin_tag(&self, (layer_idx, tensor): ParameterKey, what: &str, step: u64) -> Tag {
        let name = format!("{} of the other copy of {}", what, self.run.tensor_name(layer_idx, tensor));
        self.run.place(layer_idx, Phase::Update, step).tag(Class::Tie, &name)
    }

    /// Adds the gradients of copies to those of their owners, and takes them out.
    fn join_ties(
        &mut self,
        comm: &mut RankComm<'_, E>,
        own: &mut BTreeSet<ParameterKey>,
        step: u64,
    ) -> Result<(), ExecutorError> {
        let run = self.run;
        let mut arrived = Vec::new();
        for tie in run.ties.iter().filter(|tie| own.remove(&tie.copy)) {
            let gradient = self.gradient(tie.copy)?;
            match self.elsewhere(tie.owner) {
                Some(owner) => comm.send(owner, self.tie_tag(tie, "gradient", step), gradient)?,
                None => arrived.push((tie.owner, gradient)),
            }
        }
        for tie in run.ties.iter().filter(|tie| !tie.is_shared && own.contains(&tie.owner)) {
            let Some(copy) = self.elsewhere(tie.copy) else { continue };
            let n = self.n_elements(Held::Gradient(tie.owner))?;
            arrived.push((tie.owner, comm.recv(copy, self.tie_tag(tie, "gradient", step), n)?));
        }
        arrived.into_iter().try_for_each(|(owner, gradient)| self.add_to_gradient(owner, &gradient))
    }

    fn step(&mut self, key: ParameterKey, step: u64) -> Result<(), ExecutorError> {
        let hyper = self.run.execution.optimizer;
        let before = self.run.execution.training.from.map_or(0, |from| from.steps);
        self.bring_down(key)?;
        self.read_in(key)?;
        let gradient = self.gradient(key)?;
        let [mut master, mut m, mut v] =
            [self.read(key, State::Master)?, self.read(key, State::First)?, self.read(key, State::Second)?];
        let moments = Moments { m: &mut m, v: &mut v };
        adamw_step(&mut master, &gradient, moments, &hyper, before + step + 1)
            .map_err(|source| ExecutorError::Kernel { place: format!("layer {}, update", key.0), source })?;
        self.write(key, State::Master, &master)?;
        self.write(key, State::First, &m)?;
        self.write(key, State::Second, &v)?;
        if let Some(parameter) = self.parameters.get_mut(&key) {
            parameter.kind = Kind::Moved;
        }
        self.bring_up(key)?;
        self.write_out(key)
    }

    /// Brings the owners' new values to the copies.
    fn return_ties(&mut self, comm: &mut RankComm<'_, E>, step: u64) -> Result<(), ExecutorError> {
        let run = self.run;
        let stage = self.seat.stage;
        let ties = || run.ties.iter().filter(|tie| !tie.is_shared);
        for tie in ties().filter(|tie| run.stage_of(tie.owner.0) == stage) {
            if !self.is_learned(tie.owner) {
                continue;
            }
            let new = self.updated(tie.owner)?;
            match self.elsewhere(tie.copy) {
                Some(copy) => comm.send(copy, self.tie_tag(tie, "value", step), new)?,
                None => self.write_updated(tie.copy, new)?,
            }
        }
        for tie in ties().filter(|tie| run.stage_of(tie.copy.0) == stage) {
            let Some(owner) = self.elsewhere(tie.owner) else { continue };
            let tag = self.tie_tag(tie, "value", step);
            if self.is_learned(tie.copy) {
                let n = self.n_elements(Held::State(tie.copy, State::Master))?;
                let new = comm.recv(owner, tag, n)?;
                self.write_updated(tie.copy, new)?;
            }
        }
        Ok(())
    }

    fn store(
        &mut self,
        comm: &mut RankComm<'_, E>,
        key: ParameterKey,
        step: u64,
    ) -> Result<(), ExecutorError> {
        let update = self.run.update(key)?;
        let tag = self.parameter_tag(key, Class::Update, step);
        let (n_flat, new) = (self.n_flat(key)?, one_dim(self.updated(key)?));
        let stored =
            elements(convert(comm, &self.seat, &update.gather, &Subject { tag, shape: &[n_flat] }, new)?);
        if stored.len() != self.n_elements(Held::State(key, State::Stored))? {
            return Err(unfit(format!("layer {}: an update does not end in the parameter's storage", key.0)));
        }
        self.memory.drop(Held::Updated(key));
        self.count_stored(key, stored.len());
        // What is sent is rounded on its way; what stays is rounded here, so that all copies are the same.
        self.write_stored(key, stored)
    }

    fn parameter_tag(&self, key: ParameterKey, class: Class, step: u64) -> Tag {
        self.run.place(key.0, Phase::Update, step).tag(class, self.run.tensor_name(key.0, key.1))
    }

    fn tie_tag(&self, tie: &TiedPair, what: &str, step: u64) -> Tag {
        let (layer_idx, tensor) = tie.copy;
        let name = format!("{} of {}", what, self.run.tensor_name(layer_idx, tensor));
        self.run.place(layer_idx, Phase::Update, step).tag(Class::Tie, &name)
    }

    /// The rank that owns this rank's part of a parameter, where that is another one.
    fn elsewhere(&self, key: ParameterKey) -> Option<usize> {
        let stage = self.run.stage_of(key.0);
        (stage != self.seat.stage).then(|| self.seat.peer(stage))
    }
}

/// Adds terms of a gradient to its sum.
fn add<E: Real>(sum: &mut [E], terms: &[E], key: ParameterKey) -> Result<(), ExecutorError> {
    if terms.len() != sum.len() {
        let (found, expected) = (terms.len(), sum.len());
        return Err(unfit(format!("layer {}: {found} elements of a gradient of {expected}", key.0)));
    }
    sum.iter_mut().zip(terms).for_each(|(total, &term)| *total += term);
    Ok(())
}

fn one_dim<E: Real>(values: Vec<E>) -> Tensor<E> {
    Array1::from(values).into_dyn()
}

fn wide<E: Real>(values: &[E]) -> Vec<f64> {
    values.iter().map(|value| value.wide()).collect()
}
