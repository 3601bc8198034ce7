//! Operators on one rank: the kernel that runs, with the rows that are this rank's own, and routers whose choice is
//! fixed.

use ir::graph::OpId;
use ir::op::OpKind;
use ir::program::ValueId;
use ir::work::Pass;
use ndarray::{ArrayD, Slice};

use crate::audit::{self, Audited, Leaves, Witness};
use crate::element::Edges;
use crate::error::ExecutorError;
use crate::kernels::{self, Context, KernelError, Real, Tensor, Value};
use crate::label::Phase;
use crate::prepare::unfit;
use crate::rank::{At, Rank};
use crate::routing::{self, RouteKey};

/// Operands and arriving gradients of a backward.
type Given<'v, E> = (&'v [Option<&'v Value<E>>], &'v [Option<&'v Tensor<E>>]);

impl<'a, E: Real> Rank<'a, E> {
    pub(crate) fn run_forward(
        &mut self,
        at: At<'a>,
        op: OpId,
        operands: &[&Value<E>],
    ) -> Result<Vec<Value<E>>, ExecutorError> {
        let context = self.context(at, op);
        self.note_drops(at, op, operands)?;
        if !routing::is_router(context.kind) {
            return kernels::forward(&context, operands).map_err(|source| self.refused(at, op, source));
        }
        let Some(chosen) = self.fixed_choice(at, op)? else {
            let results =
                kernels::forward(&context, operands).map_err(|source| self.refused(at, op, source))?;
            self.note_choice(at, op, &results);
            return Ok(results);
        };
        let fixed = routing::forward(&context, operands, &chosen);
        let fixed = fixed.map_err(|source| self.refused(at, op, source))?;
        if fixed.n_changed > 0 {
            *self.record.rerouted.entry(at.layer_idx).or_insert(0) += fixed.n_changed;
        }
        Ok(vec![Value::Float(fixed.weights)])
    }

    pub(crate) fn run_backward(
        &self,
        at: At<'a>,
        op: OpId,
        operands: &[Option<&Value<E>>],
        gradients: &[Option<&Tensor<E>>],
    ) -> Result<Vec<Option<Tensor<E>>>, ExecutorError> {
        let context = self.context(at, op);
        let refused = |source| self.refused(at, op, source);
        let choice = self.choice(at, op)?;
        let logits = operands.first().copied().flatten().and_then(Value::as_float);
        match (choice, logits, gradients) {
            (Some(chosen), Some(logits), [Some(gradient)]) => {
                let found = routing::backward(&context, logits, gradient, &chosen).map_err(refused)?;
                let mut all = vec![None; operands.len()];
                all[0] = Some(found);
                Ok(all)
            }
            (_, _, gradients) => kernels::backward(&context, operands, gradients).map_err(refused),
        }
    }

    /// Rounds what leaves an operator, and in the first step of a run that rounds holds it to its own tolerance.
    pub(crate) fn leave_forward(
        &mut self,
        at: At<'a>,
        op: OpId,
        operands: &[&Value<E>],
        found: &mut [Value<E>],
    ) -> Result<(), ExecutorError> {
        self.round_results(at, op, found);
        let context = self.context(at, op);
        if !self.audits(at, op) {
            return Ok(());
        }
        let leaves = Leaves::of_results(context.kind);
        let excess = match self.witnesses.take() {
            Some(witnesses) => {
                let found = found.iter().map(|value| Some((value.as_float()?, leaves)));
                against(&witnesses, found)
            }
            None => {
                let found: Vec<_> = found.iter().map(|value| (value, leaves)).collect();
                let choice = self.choice(at, op)?;
                let excess = audit::forward((&context, choice.as_ref()), operands, &found);
                excess.map_err(|source| self.refused(at, op, source))?
            }
        };
        self.note_audit((context.kind, Pass::Forward), excess);
        Ok(())
    }

    /// The same of gradients; those of parameters are added as they are.
    pub(crate) fn leave_backward(
        &mut self,
        at: At<'a>,
        (op, ids): (OpId, &[Option<ValueId>]),
        (operands, gradients): Given<'_, E>,
        mut gradients_found: Vec<Option<Tensor<E>>>,
    ) -> Result<Vec<Option<Tensor<E>>>, ExecutorError> {
        for (id, gradient) in ids.iter().zip(&mut gradients_found) {
            if let (Some(id), Some(gradient)) = (id, gradient) {
                self.round_gradient(at, *id, gradient);
            }
        }
        let context = self.context(at, op);
        if !self.audits(at, op) {
            return Ok(gradients_found);
        }
        let leaves = |id: ValueId| {
            let tensor = self.run.program(at.layer_idx).value(id).tensor;
            if self.run.layer(at.layer_idx).is_parameter(tensor) { Leaves::Single } else { Leaves::Rounded }
        };
        let found: Vec<_> = ids
            .iter()
            .zip(&gradients_found)
            .map(|(id, found)| Some((found.as_ref()?, leaves((*id)?))))
            .collect();
        let excess = match self.witnesses.take() {
            Some(witnesses) => against(&witnesses, found.into_iter()),
            None => {
                let choice = self.choice(at, op)?;
                let excess = audit::backward((&context, choice.as_ref()), operands, gradients, &found);
                excess.map_err(|source| self.refused(at, op, source))?
            }
        };
        self.note_audit((context.kind, Pass::Backward), excess);
        Ok(gradients_found)
    }

    /// The experts that a router is told to choose; nothing for other operators, and where it chooses itself.
    fn choice(&self, at: At<'a>, op: OpId) -> Result<Option<ArrayD<bool>>, ExecutorError> {
        let is_router = routing::is_router(&self.run.layer(at.layer_idx).ops[op.0].kind);
        if is_router { self.fixed_choice(at, op) } else { Ok(None) }
    }

    /// Whether an operator is held to its own tolerance.
    pub(crate) fn audits(&self, at: At<'a>, op: OpId) -> bool {
        let first_step = at.place.seq < u64::from(self.run.execution.shape().n_units());
        let kind = &self.run.layer(at.layer_idx).ops[op.0].kind;
        self.edges() == Edges::Bf16
            && first_step
            && !self.extends(at, op)
            && (!routing::is_router(kind) || !self.run.routes.is_empty())
    }

    fn note_audit(&mut self, what: (&OpKind, Pass), excess: f64) {
        self.note(what, Audited { n_runs: 1, excess });
    }

    /// Notes how far what a ring passed on is off; the operator's results are noted when they leave.
    pub(crate) fn note_passed(&mut self, kind: &OpKind, excess: f64) {
        self.note((kind, Pass::Backward), Audited { n_runs: 0, excess });
    }

    fn note(&mut self, (kind, pass): (&OpKind, Pass), one: Audited) {
        self.record.audit.entry((kind.line().name, pass)).or_default().add(one);
    }

    pub(crate) fn context(&self, at: At<'a>, op: OpId) -> Context<'a> {
        let run = self.run;
        let instance = run.instances[at.layer_idx];
        let (_, device) = run.source(at.place.seq, self.seat.device);
        Context {
            kind: &run.layer(at.layer_idx).ops[op.0].kind,
            signature: &run.signatures[instance.kind][op.0],
            blocks: &run.rows[self.run.slice_of(at.place.seq) as usize][device as usize][instance.choice]
                [op.0],
        }
    }

    /// What the reference chose for the tokens of this rank, if it is to be chosen again.
    fn fixed_choice(&self, at: At<'a>, op: OpId) -> Result<Option<ArrayD<bool>>, ExecutorError> {
        let run = self.run;
        let layer = run.layer(at.layer_idx);
        let tokens = run.tokens_of(at.place.seq);
        let positions = &run.positions()[tokens.start as usize..tokens.end as usize];
        let Some(whole) = run.routes.of(self.route_key(at, op), layer, positions) else {
            return Ok(None);
        };
        let shape = run.shape_in(at, layer.ops[op.0].operands[0]);
        if !whole.shape().iter().map(|&n| n as u64).eq(shape.iter().copied()) {
            return Err(unfit(format!("{}: the fixed choice of experts is of another batch", at.place)));
        }
        let context = self.context(at, op);
        let own = whole.slice_each_axis(|axis| {
            let rows = &context.blocks[context.signature.operands[0][axis.axis.index()].0 as usize];
            Slice::from(rows.start as usize..rows.end as usize)
        });
        Ok(Some(own.to_owned()))
    }

    /// A router by what it gives: slices have operators that the whole layer lacks, but the same tensors.
    fn route_key(&self, at: At<'a>, op: OpId) -> RouteKey {
        let weights = self.run.layer(at.layer_idx).ops[op.0].results[0];
        (at.layer_idx, weights, self.run.source(at.place.seq, self.seat.device).0)
    }

    /// A rank that has all tokens counts those that experts have no slot for.
    fn note_drops(&mut self, at: At<'a>, op: OpId, operands: &[&Value<E>]) -> Result<(), ExecutorError> {
        let context = self.context(at, op);
        let limited = *context.kind == OpKind::Dispatch && operands.len() > 2;
        if limited && self.is_alone() && at.place.phase == Phase::Forward {
            let dropped = kernels::dropped(&context, operands);
            let (dropped, chosen) = dropped.map_err(|source| self.refused(at, op, source))?;
            let sums = self.record.dropped.entry(at.layer_idx).or_insert((0, 0));
            *sums = (sums.0 + dropped, sums.1 + chosen);
        }
        Ok(())
    }

    fn is_alone(&self) -> bool {
        self.run.execution.n_ranks() == 1
    }

    /// A rank that has all tokens of a micro-batch in their order notes what it chose.
    fn note_choice(&mut self, at: At<'a>, op: OpId, results: &[Value<E>]) {
        let all = self.run.positions().is_sorted() && !self.run.execution.slices.is_cut();
        if let (true, Some(Value::Float(weights))) = (self.is_alone() && all, results.first()) {
            self.record.routes.note(self.route_key(at, op), weights);
        }
    }

    pub(crate) fn refused(&self, at: At<'_>, op: OpId, source: KernelError) -> ExecutorError {
        let name = &self.run.layer(at.layer_idx).ops[op.0].name;
        ExecutorError::Kernel { place: format!("{}, operator `{name}`", at.place), source }
    }
}

/// The largest difference of results from their witnesses, in units of what is allowed.
fn against<'v, E: Real>(
    witnesses: &[Option<Witness>],
    found: impl Iterator<Item = Option<(&'v Tensor<E>, Leaves)>>,
) -> f64 {
    let one = |(witness, found): (&Option<Witness>, Option<(&Tensor<E>, Leaves)>)| {
        let (found, leaves) = found?;
        Some(witness.as_ref()?.excess(found, leaves))
    };
    witnesses.iter().zip(found).filter_map(one).fold(0.0, f64::max)
}
