//! Rings held to double precision: the same blocks through the same kernels, beside the run, as its own numbers are.
//!
//! A rank answers for what it computes: the result over all blocks that came by, the gradient of its queries, and what
//! it adds to the gradients of every block before it passes them on. What it was sent is taken as given.

use crate::audit::{Leaves, Witness, moved, moved_numbers, summed, wide, widened};
use crate::kernels::ring::{Attended, BlockGradients, Turn, attend, block_backward};
use crate::kernels::{Context, KernelError, Real, Tensor, Value};

/// A thing twice: from the operands as they are, and from all of them moved a little.
struct Twice<T> {
    exact: T,
    moved: T,
}

fn given<E: Real>(operands: &[&Value<E>], moves: Option<f64>) -> Vec<Value<f64>> {
    let one = |value: &&Value<E>| {
        let wide = widened(value);
        moves.map(|n| moved(&wide, n)).unwrap_or(wide)
    };
    operands.iter().map(one).collect()
}

/// Attention over the blocks so far.
pub(crate) struct ForwardWitness {
    so_far: Twice<Attended<f64>>,
    n: f64,
}

impl ForwardWitness {
    /// Attends the own block, on a ring of so many ranks.
    pub(crate) fn new<E: Real>(
        context: &Context<'_>,
        operands: &[&Value<E>],
        n_ranks: usize,
    ) -> Result<Self, KernelError> {
        let n = summed(context, &context.signature.results[0]) * n_ranks as f64;
        Ok(Self { so_far: attended(context, operands, (Turn::First, n))?, n })
    }

    /// Attends a block that came by.
    pub(crate) fn meet<E: Real>(
        &mut self,
        context: &Context<'_>,
        operands: &[&Value<E>],
    ) -> Result<(), KernelError> {
        let next = attended(context, operands, (Turn::Later, self.n))?;
        self.so_far.exact.merge(&next.exact);
        self.so_far.moved.merge(&next.moved);
        Ok(())
    }

    /// What the operator's result is held to.
    pub(crate) fn result(self) -> Witness {
        Witness { exact: self.so_far.exact.y.into_dyn(), moved: self.so_far.moved.y.into_dyn() }
    }
}

fn attended<E: Real>(
    context: &Context<'_>,
    operands: &[&Value<E>],
    (turn, n): (Turn, f64),
) -> Result<Twice<Attended<f64>>, KernelError> {
    let run = |operands: Vec<Value<f64>>| attend(context, &operands.iter().collect::<Vec<_>>(), turn);
    Ok(Twice { exact: run(given(operands, None))?, moved: run(given(operands, Some(n)))? })
}

/// Sums of the gradients of a block's keys and values.
type Sums<E> = (Tensor<E>, Tensor<E>);

/// Gradients by the blocks so far.
pub(crate) struct BackwardWitness {
    all: Twice<Attended<f64>>,
    gradient: Twice<Tensor<f64>>,
    own: Twice<BlockGradients<f64>>,
    n: f64,
    n_operands: usize,
    /// The largest difference of what was passed on, in units of what is allowed.
    pub(crate) worst: f64,
}

impl BackwardWitness {
    /// Gradients by the own block, from what forward kept and the gradient that arrived.
    pub(crate) fn new<E: Real>(
        context: &Context<'_>,
        operands: &[&Value<E>],
        (all, gradient): (&Attended<E>, &Tensor<E>),
        n_ranks: usize,
    ) -> Result<Self, KernelError> {
        let n = summed(context, &context.signature.operands[0]) * n_ranks as f64;
        let exact = Attended { y: all.y.mapv(|y| y.wide()), log_sum: all.log_sum.mapv(|log| log.wide()) };
        let shifted = Attended { y: moved_numbers(&exact.y, n), log_sum: moved_numbers(&exact.log_sum, n) };
        let all = Twice { exact, moved: shifted };
        let gradient = Twice { exact: wide(gradient), moved: moved_numbers(&wide(gradient), n) };
        let own = gradients(context, operands, (&all, &gradient), (Turn::First, n))?;
        Ok(Self { all, gradient, own, n, n_operands: operands.len(), worst: 0.0 })
    }

    /// Gradients by a block that came by, which the rank adds to the sums that came with it, if any, and passes on.
    pub(crate) fn meet<E: Real>(
        &mut self,
        context: &Context<'_>,
        operands: &[&Value<E>],
        (came, passed): (Option<&Sums<E>>, &Sums<E>),
    ) -> Result<(), KernelError> {
        let next = gradients(context, operands, (&self.all, &self.gradient), (Turn::Later, self.n))?;
        self.own.exact.dq += &next.exact.dq;
        self.own.moved.dq += &next.moved.dq;
        let keys = self.sum(came.map(|(keys, _)| keys), (&next.exact.dk, &next.moved.dk));
        let values = self.sum(came.map(|(_, values)| values), (&next.exact.dv, &next.moved.dv));
        for (witness, passed) in [(keys, &passed.0), (values, &passed.1)] {
            self.worst = self.worst.max(witness.excess(passed, Leaves::Single));
        }
        Ok(())
    }

    /// What the gradients of queries, keys, values and sinks are held to, where the sums of the own block came home so.
    pub(crate) fn results<E: Real>(self, home: Option<&Sums<E>>) -> Vec<Option<Witness>> {
        let keys = self.sum(home.map(|(keys, _)| keys), (&self.own.exact.dk, &self.own.moved.dk));
        let values = self.sum(home.map(|(_, values)| values), (&self.own.exact.dv, &self.own.moved.dv));
        let Twice { exact, moved } = self.own;
        let sinks = exact.d_sinks.zip(moved.d_sinks).map(|(exact, moved)| Witness { exact, moved });
        let mut all = vec![Some(Witness { exact: exact.dq, moved: moved.dq }), Some(keys), Some(values)];
        // Positions lie between, and sinks are last.
        all.resize_with(self.n_operands - usize::from(sinks.is_some()), || None);
        all.extend(sinks.map(Some));
        all
    }

    fn sum<E: Real>(
        &self,
        came: Option<&Tensor<E>>,
        (exact, shifted): (&Tensor<f64>, &Tensor<f64>),
    ) -> Witness {
        match came {
            Some(came) => {
                let came = wide(came);
                Witness { moved: moved_numbers(&came, self.n) + shifted, exact: came + exact }
            }
            None => Witness { exact: exact.clone(), moved: shifted.clone() },
        }
    }
}

fn gradients<E: Real>(
    context: &Context<'_>,
    operands: &[&Value<E>],
    (all, gradient): (&Twice<Attended<f64>>, &Twice<Tensor<f64>>),
    (turn, n): (Turn, f64),
) -> Result<Twice<BlockGradients<f64>>, KernelError> {
    let exact = given(operands, None);
    let shifted = given(operands, Some(n));
    let run = |operands: &[Value<f64>], all: &Attended<f64>, gradient: &Tensor<f64>| {
        block_backward(context, &operands.iter().collect::<Vec<_>>(), (all, gradient), turn)
    };
    Ok(Twice {
        exact: run(&exact, &all.exact, &gradient.exact)?,
        moved: run(&shifted, &all.moved, &gradient.moved)?,
    })
}
