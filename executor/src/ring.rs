//! Attention on a ring of ranks: blocks of keys and values travel, queries stay (Liu et al. 2023, arXiv 2310.01889).
//!
//! ```text
//! forward   rank r attends block r, then r - 1, .., r + 1 (mod n), as each arrives from rank r - 1:   n - 1 hops
//! backward  the same once more; the gradients of a block start at the first rank that does not own it and travel
//!           along until the owner adds its own term:                                                  n - 1 hops each
//! ```
//! Where a program computes attention again in backward, nothing is kept; else the result and its log-sums are. Both
//! are counted as kept.

use ir::graph::OpId;
use ir::op::{AttentionMask, OpKind};
use ir::program::ValueId;
use ir::work::Pass;
use ndarray::{ArrayD, IxDyn};

use crate::convert::elements;
use crate::element::Width;
use crate::error::ExecutorError;
use crate::fabric::RankComm;
use crate::instruction::Tag;
use crate::kernels::ring::{Attended, Turn, attend, block_backward};
use crate::kernels::{Real, Tensor, Value};
use crate::label::{Class, Phase};
use crate::lifetimes::Held;
use crate::prepare::unfit;
use crate::rank::{At, Rank};
use crate::ring_audit::{BackwardWitness, ForwardWitness};

/// A rank's place among those that exchange blocks of keys.
pub(crate) struct Ring {
    /// Ranks of the run.
    group: Vec<usize>,
    /// Their devices in the mesh.
    devices: Vec<u64>,
    position: usize,
}

impl Ring {
    fn n(&self) -> usize {
        self.group.len()
    }

    fn before(&self, steps: usize) -> usize {
        (self.position + self.n() - steps) % self.n()
    }

    /// Passes a tensor on to the next rank and takes what comes from the one before.
    fn hop<E: Real>(
        &self,
        comm: &mut RankComm<'_, E>,
        tag: Tag,
        tensor: Tensor<E>,
    ) -> Result<Tensor<E>, ExecutorError> {
        let (shape, len) = (tensor.shape().to_vec(), tensor.len());
        comm.send(self.group[(self.position + 1) % self.n()], tag.clone(), elements(tensor))?;
        let data = comm.recv(self.group[self.before(1)], tag, len)?;
        ArrayD::from_shape_vec(IxDyn(&shape), data).map_err(|_| unfit("a block changed its shape".into()))
    }
}

/// Keys, values and, under a causal mask, their positions: operands 1, 2 and 4 of attention.
struct Block<E> {
    keys: Value<E>,
    values: Value<E>,
    positions: Option<Value<E>>,
}

impl<'a, E: Real> Rank<'a, E> {
    /// The ring of an operator, if it is on one.
    pub(crate) fn ring(&self, at: At<'a>, op: OpId) -> Option<Ring> {
        let axes = self.run.ring_axes(at.layer_idx, op);
        if axes.is_empty() {
            return None;
        }
        let devices = self.seat.mesh.group(self.seat.device, &axes);
        let first = self.seat.first(self.seat.stage);
        Some(Ring {
            group: devices.iter().map(|device| (first + device) as usize).collect(),
            position: devices.iter().position(|&device| device == self.seat.device)?,
            devices,
        })
    }

    /// Attends all blocks of keys, the own one first.
    pub(crate) fn ring_forward(
        &mut self,
        comm: &mut RankComm<'_, E>,
        (at, op, ring): (At<'a>, OpId, &Ring),
        ids: &[ValueId],
        operands: &[&Value<E>],
    ) -> Result<Vec<Value<E>>, ExecutorError> {
        let context = self.context(at, op);
        let class = if at.place.phase == Phase::Forward { Class::Forward } else { Class::Recompute };
        let refused = |this: &Self, source| this.refused(at, op, source);
        let mut block = own_block(context.kind, operands)?;
        let mut all = attend(&context, operands, Turn::First).map_err(|source| refused(self, source))?;
        let witness = self.audits(at, op).then(|| ForwardWitness::new(&context, operands, ring.n()));
        let mut witness = witness.transpose().map_err(|source| refused(self, source))?;
        for step in 1..ring.n() {
            block = self.next_block(comm, (at, ring, class), ids, (block, step))?;
            let operands = with_block(operands, &block);
            let one = attend(&context, &operands, Turn::Later).map_err(|source| refused(self, source))?;
            all.merge(&one);
            if let Some(witness) = &mut witness {
                witness.meet(&context, &operands).map_err(|source| refused(self, source))?;
            }
        }
        self.witnesses = witness.map(|witness| vec![Some(witness.result())]);
        let result = all.y.clone().into_dyn();
        let pass = if at.place.phase == Phase::Forward { Pass::Forward } else { Pass::Backward };
        if self.run.keeps_attended(at.layer_idx, op, pass) {
            self.keep_attended((at, op), all)?;
        }
        Ok(vec![Value::Float(result)])
    }

    /// Keeps a result, as it leaves the operator, and the logarithms of its sums in full.
    fn keep_attended(
        &mut self,
        (at, op): (At<'a>, OpId),
        Attended { y, log_sum }: Attended<E>,
    ) -> Result<(), ExecutorError> {
        let ((layer_idx, unit), mut y) = (self.unit(at), y.into_dyn());
        self.edges().round_all(&mut y);
        self.memory.put_tensor(Held::Attended(layer_idx, unit, op), &y, self.run.rounded())?;
        self.memory.put_tensor(Held::LogSums(layer_idx, unit, op), &log_sum.into_dyn(), Width::Full)
    }

    fn take_attended(&mut self, (at, op): (At<'a>, OpId)) -> Option<Attended<E>> {
        let (layer_idx, unit) = self.unit(at);
        let y = self.memory.take(Held::Attended(layer_idx, unit, op))?;
        let log_sum = self.memory.take(Held::LogSums(layer_idx, unit, op))?;
        Some(Attended { y: y.into_dimensionality().ok()?, log_sum: log_sum.into_dimensionality().ok()? })
    }

    /// Gradients of queries, keys and values (and sinks), those of keys and values at home and finished.
    pub(crate) fn ring_backward(
        &mut self,
        comm: &mut RankComm<'_, E>,
        (at, op, ring): (At<'a>, OpId, &Ring),
        ids: &[Option<ValueId>],
        (operands, gradient): (&[Option<&Value<E>>], &Tensor<E>),
    ) -> Result<Vec<Option<Tensor<E>>>, ExecutorError> {
        let missing = || unfit(format!("{}: attention on a ring lacks what forward kept", at.place));
        let all = self.take_attended((at, op)).ok_or_else(missing)?;
        let operands = operands.iter().copied().collect::<Option<Vec<_>>>().ok_or_else(missing)?;
        let ids = ids.iter().copied().collect::<Option<Vec<_>>>().ok_or_else(missing)?;
        let context = self.context(at, op);
        let refused = |this: &Self, source| this.refused(at, op, source);
        let mut block = own_block(context.kind, &operands)?;
        let own = block_backward(&context, &operands, (&all, gradient), Turn::First)
            .map_err(|source| refused(self, source))?;
        let witness = self
            .audits(at, op)
            .then(|| BackwardWitness::new(&context, &operands, (&all, gradient), ring.n()));
        let mut witness = witness.transpose().map_err(|source| refused(self, source))?;
        let (mut dq, mut travelling) = (own.dq, None::<(Tensor<E>, Tensor<E>)>);
        for step in 1..ring.n() {
            block = self.next_block(comm, (at, ring, Class::Recompute), &ids, (block, step))?;
            let operands = with_block(&operands, &block);
            let one = block_backward(&context, &operands, (&all, gradient), Turn::Later)
                .map_err(|source| refused(self, source))?;
            dq += &one.dq;
            let came = travelling.take();
            let sums = match &came {
                Some((dk, dv)) => (dk + &one.dk, dv + &one.dv),
                None => (one.dk, one.dv),
            };
            if let Some(witness) = &mut witness {
                let passed = (came.as_ref(), &sums);
                witness.meet(&context, &operands, passed).map_err(|source| refused(self, source))?;
            }
            let (k, v) = (self.gradient_tag(at, ids[1]), self.gradient_tag(at, ids[2]));
            travelling = Some((ring.hop(comm, k, sums.0)?, ring.hop(comm, v, sums.1)?));
        }
        if let Some(witness) = witness {
            self.note_passed(context.kind, witness.worst);
            self.witnesses = Some(witness.results(travelling.as_ref()));
        }
        let (dk, dv) = match travelling {
            Some((dk, dv)) => (dk + &own.dk, dv + &own.dv),
            None => (own.dk, own.dv),
        };
        let mut gradients = vec![Some(dq), Some(dk), Some(dv)];
        // Positions lie between, and sinks are last.
        gradients.resize(operands.len() - usize::from(own.d_sinks.is_some()), None);
        gradients.extend(own.d_sinks.map(Some));
        Ok(gradients)
    }

    /// Passes a block of keys on; what arrives is the block of the rank `step` places before.
    fn next_block(
        &self,
        comm: &mut RankComm<'_, E>,
        (at, ring, class): (At<'a>, &Ring, Class),
        ids: &[ValueId],
        (block, step): (Block<E>, usize),
    ) -> Result<Block<E>, ExecutorError> {
        let tag = |id: ValueId| {
            let value = self.run.program(at.layer_idx).value(id);
            at.place.tag(class, self.run.tensor_name(at.layer_idx, value.tensor))
        };
        let numbers = |value: Value<E>| {
            value.into_float().ok_or_else(|| unfit("keys and values are not numbers".into()))
        };
        Ok(Block {
            keys: Value::Float(ring.hop(comm, tag(ids[1]), numbers(block.keys)?)?),
            values: Value::Float(ring.hop(comm, tag(ids[2]), numbers(block.values)?)?),
            // Positions are known to all.
            positions: match block.positions {
                Some(_) => Some(self.load_at(at, ids[4], ring.devices[ring.before(step)])?),
                None => None,
            },
        })
    }

    fn gradient_tag(&self, at: At<'_>, id: ValueId) -> Tag {
        let value = self.run.program(at.layer_idx).value(id);
        at.place.tag(Class::Gradient, self.run.tensor_name(at.layer_idx, value.tensor))
    }
}

fn own_block<E: Real>(kind: &OpKind, operands: &[&Value<E>]) -> Result<Block<E>, ExecutorError> {
    let mut block = match operands {
        [_, keys, values, ..] => Block { keys: (*keys).clone(), values: (*values).clone(), positions: None },
        _ => return Err(unfit("attention has fewer than three operands".into())),
    };
    if let OpKind::Attention { mask: AttentionMask::Causal, .. } = kind {
        let positions = operands.get(4).ok_or_else(|| unfit("causal attention has no positions".into()))?;
        block.positions = Some((*positions).clone());
    }
    Ok(block)
}

fn with_block<'v, E>(operands: &[&'v Value<E>], block: &'v Block<E>) -> Vec<&'v Value<E>> {
    let mut list = operands.to_vec();
    (list[1], list[2]) = (&block.keys, &block.values);
    if let Some(positions) = &block.positions {
        list[4] = positions;
    }
    list
}
