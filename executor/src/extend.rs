//! Keys and values from slice to slice: what a rank's earlier slices have kept, and what its later ones owe.
//!
//! The keys of earlier slices are among the values that these have saved, and stay there until their own backward,
//! which comes after that of every slice behind them. The gradients that a slice gives the keys before its own are kept
//! here, one tensor of all rows before the slice, which the slice before takes over.

use ir::graph::OpId;
use ir::op::OpKind;
use ir::program::ValueId;

use crate::element::Width;
use crate::error::ExecutorError;
use crate::kernels::extend::{extend, extend_backward};
use crate::kernels::{Real, Tensor, Value};
use crate::lifetimes::Held;
use crate::prepare::unfit;
use crate::rank::{At, Rank};

impl<'a, E: Real> Rank<'a, E> {
    /// Whether an operator puts the rows of earlier slices before its own.
    pub(crate) fn extends(&self, at: At<'a>, op: OpId) -> bool {
        self.run.layer(at.layer_idx).ops[op.0].kind == OpKind::Extend
    }

    pub(crate) fn extend_forward(
        &self,
        at: At<'a>,
        op: OpId,
        (id, own): (ValueId, &Value<E>),
    ) -> Result<Vec<Value<E>>, ExecutorError> {
        let ((layer_idx, unit), slice) = (self.unit(at), self.run.slice_of(at.place.seq));
        let missing = || unfit(format!("{}: the keys of an earlier slice are gone", at.place));
        let kept = |earlier: u32| {
            self.memory.tensor(Held::Value(layer_idx, unit - slice + earlier, id)).ok_or_else(missing)
        };
        let earlier = (0..slice).map(kept).collect::<Result<Vec<_>, _>>()?;
        let earlier: Vec<&Tensor<E>> = earlier.iter().collect();
        let context = self.context(at, op);
        let all = extend(&context, &earlier, own).map_err(|source| self.refused(at, op, source))?;
        Ok(vec![Value::Float(all)])
    }

    /// The gradient of the own rows; that of the rows before is kept for the slices that have them.
    pub(crate) fn extend_backward(
        &mut self,
        at: At<'a>,
        op: OpId,
        gradient: &Tensor<E>,
    ) -> Result<Vec<Option<Tensor<E>>>, ExecutorError> {
        let ((layer_idx, unit), slice) = (self.unit(at), self.run.slice_of(at.place.seq));
        let owed = self.memory.tensor(Held::Owed(layer_idx, unit + 1, op));
        if owed.is_none() && slice + 1 < self.run.execution.slices.n() {
            return Err(unfit(format!("{}: a later slice has not run backward", at.place)));
        }
        let (before, own) = extend_backward(&self.context(at, op), owed, gradient)
            .map_err(|source| self.refused(at, op, source))?;
        if slice > 0 {
            self.memory.put_tensor(Held::Owed(layer_idx, unit, op), &before, Width::Full)?;
        }
        Ok(vec![Some(own)])
    }

    /// What the slice behind had owed is passed on.
    pub(crate) fn drop_owed(&mut self, at: At<'a>, op: OpId) {
        let (layer_idx, unit) = self.unit(at);
        self.memory.drop(Held::Owed(layer_idx, unit + 1, op));
    }
}
