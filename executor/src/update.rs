//! The end of a step: gradients are finished, shared parameters meet, every owner updates its cut, and the new values
//! go to where they are stored.
//!
//! All of it works on the flattened local block, cut by the storage's axes. A tied copy sends its gradient to the
//! owner's stage, to the rank with the same coordinates, and gets the new value back; it has no optimizer state. So does
//! the second of two pipeline ranks that have a copy of the same layer.

use std::collections::BTreeMap;

use ir::conversion::Step;
use ir::program::{AxisSet, Frozen, Update};
use ir::sharding::{Placement, Sharding};
use ndarray::{Array1, ArrayD};

use crate::block::Block;
use crate::convert::{Seat, Subject, convert, elements};
use crate::element::Edges;
use crate::error::ExecutorError;
use crate::fabric::RankComm;
use crate::instruction::Tag;
use crate::job::Recorded;
use crate::kernels::optimizer::{Moments, adamw_step};
use crate::kernels::{Real, Tensor};
use crate::label::{Class, Phase};
use crate::memory::Held;
use crate::prepare::{ParameterKey, TiedPair, unfit};
use crate::rank::{Rank, flattened};
use crate::states;

/// What a rank holds of a parameter.
pub(crate) struct State<E> {
    /// Elements of the local block in use, all cuts together.
    n_flat: u64,
    /// As it is stored between uses.
    stored: Vec<E>,
    /// Where it is updated.
    master: Vec<E>,
    /// Moments of the update; none before the first and none of a tied copy.
    moments: Option<(Vec<E>, Vec<E>)>,
    /// Sum of the micro-batches' gradients, zero before the first.
    accumulator: Vec<E>,
}

/// What a rank carries of a parameter from step to step.
#[derive(Clone, Debug)]
pub(crate) struct Carried {
    /// The values as they are updated.
    pub(crate) values: Vec<f64>,
    /// First and second moments, where there are any.
    pub(crate) moments: Option<[Vec<f64>; 2]>,
}

/// What a rank holds of a frozen parameter: nothing but its cut of the value.
pub(crate) struct FrozenState<E> {
    /// Elements of the local block in use, all cuts together.
    n_flat: u64,
    stored: Vec<E>,
}

impl<E: Real> FrozenState<E> {
    pub(crate) fn new(seat: &Seat<'_>, frozen: &Frozen, whole: &ArrayD<f64>) -> Self {
        let flat = own_block(seat, frozen.used, whole);
        let n_flat = flat.len() as u64;
        let all = seat.block(Sharding::REPLICATED, &[n_flat]);
        Self { n_flat, stored: elements(all.cut(&flat, &flat_cut(seat, n_flat, frozen.cut))) }
    }

    pub(crate) fn carried(&self) -> Carried {
        Carried { values: wide(&self.stored), moments: None }
    }

    pub(crate) fn bytes(&self, stored_width: u64) -> u64 {
        self.stored.len() as u64 * stored_width
    }

    /// The value as operators take it.
    pub(crate) fn rounded(mut self, edges: Edges) -> Self {
        edges.round_all(&mut self.stored);
        self
    }
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

impl<E: Real> State<E> {
    pub(crate) fn new(
        seat: &Seat<'_>,
        update: &Update,
        whole: &ArrayD<f64>,
        moments: Option<&states::Moments>,
    ) -> Self {
        let shape: Vec<u64> = whole.shape().iter().map(|&n| n as u64).collect();
        let n_flat = seat.block(update.used, &shape).len() as u64;
        let all = seat.block(Sharding::REPLICATED, &[n_flat]);
        let cut = |whole: &ArrayD<f64>, axes| {
            let own = own_block(seat, update.used, whole);
            elements(all.cut(&own, &flat_cut(seat, n_flat, axes)))
        };
        let state = |whole| cut(whole, update.storage.optimizer);
        Self {
            n_flat,
            stored: cut(whole, update.storage.parameter),
            master: state(whole),
            moments: moments.map(|moments| (state(&moments.first), state(&moments.second))),
            accumulator: vec![E::zero(); flat_cut(seat, n_flat, update.storage.gradient).len()],
        }
    }

    /// What is carried to the next step: the values as they are updated, and their moments.
    pub(crate) fn carried(&self) -> Carried {
        let moments = self.moments.as_ref().map(|(first, second)| [wide(first), wide(second)]);
        Carried { values: wide(&self.master), moments }
    }

    /// Bytes of all of it, moments included from the beginning; the stored value has elements of `stored_width`.
    pub(crate) fn bytes(&self, stored_width: u64) -> u64 {
        let full = 3 * self.master.len() + self.accumulator.len();
        self.stored.len() as u64 * stored_width + (full * size_of::<E>()) as u64
    }

    /// The stored value as operators take it.
    pub(crate) fn rounded(mut self, edges: Edges) -> Self {
        edges.round_all(&mut self.stored);
        self
    }

    pub(crate) fn accumulate(&mut self, term: Vec<E>) -> Result<(), ExecutorError> {
        if term.len() != self.accumulator.len() {
            let (found, expected) = (term.len(), self.accumulator.len());
            return Err(unfit(format!("a gradient of {found} elements for an accumulator of {expected}")));
        }
        self.accumulator.iter_mut().zip(term).for_each(|(total, term)| *total += term);
        Ok(())
    }
}

impl<E: Real> Rank<'_, E> {
    pub(crate) fn state(&mut self, key: ParameterKey) -> Result<&mut State<E>, ExecutorError> {
        self.states.get_mut(&key).ok_or_else(|| unfit(format!("layer {}: a gradient of no parameter", key.0)))
    }

    /// The flattened block of a parameter, all cuts together.
    pub(crate) fn gathered(
        &self,
        comm: &mut RankComm<'_, E>,
        key: ParameterKey,
        gather: &[Step],
        tag: Tag,
    ) -> Result<Tensor<E>, ExecutorError> {
        let learned = self.states.get(&key).map(|state| (state.n_flat, &state.stored));
        let held = learned.or_else(|| self.frozen.get(&key).map(|state| (state.n_flat, &state.stored)));
        let (n_flat, stored) =
            held.ok_or_else(|| unfit(format!("layer {}: a parameter that is not held", key.0)))?;
        convert(comm, &self.seat, gather, &Subject { tag, shape: &[n_flat] }, one_dim(stored.clone()))
    }

    pub(crate) fn update(&mut self, comm: &mut RankComm<'_, E>, step: u64) -> Result<(), ExecutorError> {
        let keys: Vec<ParameterKey> = self.states.keys().copied().collect();
        let mut gradients = BTreeMap::new();
        for &key in &keys {
            let gradient = self.finish_gradient(comm, key, step)?;
            self.watch.make(Held::Gradient(key), size_of_val(gradient.as_slice()) as u64)?;
            gradients.insert(key, gradient);
        }
        self.join_twins(comm, &mut gradients, step)?;
        self.join_ties(comm, &mut gradients, step)?;
        for (&key, gradient) in &gradients {
            self.step(key, gradient, step)?;
        }
        self.return_ties(comm, step)?;
        self.return_twins(comm, step)?;
        let mut parameters: BTreeMap<ParameterKey, Vec<f64>> =
            self.frozen.iter().map(|(&key, state)| (key, wide(&state.stored))).collect();
        for &key in &keys {
            parameters.insert(key, self.store(comm, key, step)?);
        }
        match self.run.execution.training.record {
            Recorded::EveryStep => {
                let gradients = gradients.into_iter().map(|(key, values)| (key, wide(&values)));
                self.record.gradients.push(gradients.collect());
                self.record.parameters.push(parameters);
            }
            Recorded::States => {}
        }
        Ok(())
    }

    /// What this rank carries on, of parameters that it owns.
    pub(crate) fn record_states(&mut self) {
        let learned = self.states.iter().map(|(&key, state)| (key, state.carried()));
        let frozen = self.frozen.iter().map(|(&key, state)| (key, state.carried()));
        let run = self.run;
        let owned = |key: ParameterKey| run.stage_of(key.0) == self.seat.stage && !run.is_copy(key);
        self.record.states.extend(learned.chain(frozen).filter(|(key, _)| owned(*key)));
    }

    fn finish_gradient(
        &mut self,
        comm: &mut RankComm<'_, E>,
        key: ParameterKey,
        step: u64,
    ) -> Result<Vec<E>, ExecutorError> {
        let update = self.run.update(key)?;
        let tag = self.parameter_tag(key, Class::GradientReduce, step);
        let state = self.state(key)?;
        let n_flat = state.n_flat;
        let empty = vec![E::zero(); state.accumulator.len()];
        let total = one_dim(std::mem::replace(&mut state.accumulator, empty));
        let subject = Subject { tag, shape: &[n_flat] };
        let finished = elements(convert(comm, &self.seat, &update.reduce, &subject, total)?);
        if finished.len() != self.state(key)?.master.len() {
            let name = self.run.tensor_name(key.0, key.1);
            return Err(unfit(format!(
                "layer {}: the gradient of `{name}` does not end in the update's cut",
                key.0
            )));
        }
        Ok(finished)
    }

    /// Where a layer is on two pipeline ranks, adds what the second has of its gradients to the first's, and takes it out.
    fn join_twins(
        &self,
        comm: &mut RankComm<'_, E>,
        gradients: &mut BTreeMap<ParameterKey, Vec<E>>,
        step: u64,
    ) -> Result<(), ExecutorError> {
        let keys: Vec<ParameterKey> = gradients.keys().copied().collect();
        for &key in keys.iter().filter(|key| self.run.stage_of(key.0) != self.seat.stage) {
            if let Some(gradient) = gradients.remove(&key) {
                let owner = self.seat.peer(self.run.stage_of(key.0));
                comm.send(owner, self.twin_tag(key, "gradient", step), gradient)?;
            }
        }
        for (&key, own) in gradients.iter_mut() {
            for twin in self.run.stages_of(key.0).into_iter().skip(1) {
                let tag = self.twin_tag(key, "gradient", step);
                let terms = comm.recv(self.seat.peer(twin), tag, own.len())?;
                own.iter_mut().zip(terms).for_each(|(total, term)| *total += term);
            }
        }
        Ok(())
    }

    /// Brings new values from the first pipeline rank that has a layer to the second.
    fn return_twins(&mut self, comm: &mut RankComm<'_, E>, step: u64) -> Result<(), ExecutorError> {
        let run = self.run;
        let (own, others): (Vec<ParameterKey>, Vec<ParameterKey>) =
            self.states.keys().copied().partition(|key| run.stage_of(key.0) == self.seat.stage);
        for key in own {
            for twin in run.stages_of(key.0).into_iter().skip(1) {
                let new = self.state(key)?.master.clone();
                comm.send(self.seat.peer(twin), self.twin_tag(key, "value", step), new)?;
            }
        }
        for key in others {
            let (owner, tag) = (self.seat.peer(run.stage_of(key.0)), self.twin_tag(key, "value", step));
            let state = self.state(key)?;
            state.master = comm.recv(owner, tag, state.master.len())?;
        }
        Ok(())
    }

    fn twin_tag(&self, (layer_idx, tensor): ParameterKey, what: &str, step: u64) -> Tag {
        let name = format!("{} of the other copy of {}", what, self.run.tensor_name(layer_idx, tensor));
        self.run.place(layer_idx, Phase::Update, step).tag(Class::Tie, &name)
    }

    /// Adds the gradients of copies to those of their owners, and takes them out.
    fn join_ties(
        &self,
        comm: &mut RankComm<'_, E>,
        gradients: &mut BTreeMap<ParameterKey, Vec<E>>,
        step: u64,
    ) -> Result<(), ExecutorError> {
        let mut arrived = Vec::new();
        for tie in &self.run.ties {
            let Some(gradient) = gradients.remove(&tie.copy) else { continue };
            match self.elsewhere(tie.owner) {
                Some(owner) => comm.send(owner, self.tie_tag(tie, "gradient", step), gradient)?,
                None => arrived.push((tie.owner, gradient)),
            }
        }
        for tie in &self.run.ties {
            let (Some(own), Some(copy)) = (gradients.get(&tie.owner), self.elsewhere(tie.copy)) else {
                continue;
            };
            let gradient = comm.recv(copy, self.tie_tag(tie, "gradient", step), own.len())?;
            arrived.push((tie.owner, gradient));
        }
        for (owner, gradient) in arrived {
            let own = gradients.get_mut(&owner).into_iter().flatten();
            own.zip(gradient).for_each(|(total, term)| *total += term);
        }
        Ok(())
    }

    fn step(&mut self, key: ParameterKey, gradient: &[E], step: u64) -> Result<(), ExecutorError> {
        let hyper = self.run.execution.optimizer;
        let before = self.run.execution.training.from.map_or(0, |from| from.steps);
        let state = self.state(key)?;
        let n = state.master.len();
        let (m, v) = state.moments.get_or_insert_with(|| (vec![E::zero(); n], vec![E::zero(); n]));
        adamw_step(&mut state.master, gradient, Moments { m, v }, &hyper, before + step + 1)
            .map_err(|source| ExecutorError::Kernel { place: format!("layer {}, update", key.0), source })
    }

    /// Brings the owners' new values to the copies.
    fn return_ties(&mut self, comm: &mut RankComm<'_, E>, step: u64) -> Result<(), ExecutorError> {
        let run = self.run;
        let stage = self.seat.stage;
        for tie in run.ties.iter().filter(|tie| run.stage_of(tie.owner.0) == stage) {
            let Some(new) = self.states.get(&tie.owner).map(|state| state.master.clone()) else { continue };
            match self.elsewhere(tie.copy) {
                Some(copy) => comm.send(copy, self.tie_tag(tie, "value", step), new)?,
                None => self.state(tie.copy)?.master = new,
            }
        }
        for tie in run.ties.iter().filter(|tie| run.stage_of(tie.copy.0) == stage) {
            let Some(owner) = self.elsewhere(tie.owner) else { continue };
            let tag = self.tie_tag(tie, "value", step);
            if let Some(state) = self.states.get_mut(&tie.copy) {
                state.master = comm.recv(owner, tag, state.master.len())?;
            }
        }
        Ok(())
    }

    fn store(
        &mut self,
        comm: &mut RankComm<'_, E>,
        key: ParameterKey,
        step: u64,
    ) -> Result<Vec<f64>, ExecutorError> {
        let update = self.run.update(key)?;
        let tag = self.parameter_tag(key, Class::Update, step);
        let state = self.state(key)?;
        let (n_flat, new) = (state.n_flat, one_dim(state.master.clone()));
        let mut stored =
            elements(convert(comm, &self.seat, &update.gather, &Subject { tag, shape: &[n_flat] }, new)?);
        // What is sent is rounded on its way; what stays is rounded here, so that all copies are the same.
        self.edges().round_all(&mut stored);
        let state = self.state(key)?;
        if stored.len() != state.stored.len() {
            return Err(unfit(format!("layer {}: an update does not end in the parameter's storage", key.0)));
        }
        state.stored = stored;
        Ok(wide(&state.stored))
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

fn one_dim<E: Real>(values: Vec<E>) -> Tensor<E> {
    Array1::from(values).into_dyn()
}

fn wide<E: Real>(values: &[E]) -> Vec<f64> {
    values.iter().map(|value| value.wide()).collect()
}
