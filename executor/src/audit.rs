//! Rounding, operator by operator: what each leaves in bf16 against the same kernel in double precision on the same
//! operands, with a tolerance of its own.
//!
//! ```text
//! |found - exact| <= u |exact| + MARGIN * max |moved - exact|                                       -> excess()
//! u     = 2^-8 where the result is rounded to bf16 (half the distance to the next number), 0 where it stays single
//! moved = the kernel in double precision, every operand moved by (n + STEPS) 2^-24 of itself, up or down; for a result of
//!         one element, where such moves may cancel, also all up, and the larger difference counts
//! n     = length of the sum that an element of the result is: the loops that the result lacks
//! ```
//! The second term is what single-precision arithmetic inside the operator may do: a backward-stable algorithm gives
//! the exact result of operands that are moved so little (Higham 2002, Accuracy and Stability of Numerical Algorithms,
//! section 1.5; n u for a sum of n terms, section 4.2). It is 2^16 times smaller than the first unless the operator
//! itself is ill-conditioned, so a kernel that accumulates in bf16, or rounds another way, is found out.
//!
//! Routers are judged with the choice that they were given, rings with the blocks that came by (`ring_audit`). The
//! operator that puts the keys of slices one behind the other is left to the comparison of whole runs (`compare`): it
//! rounds nothing.

use std::collections::BTreeMap;

use ir::op::OpKind;
use ir::work::Pass;
use ndarray::{Array, ArrayD, Dimension};

use crate::kernels::{self, Context, KernelError, Real, Tensor, Value};
use crate::routing;

/// Roundings inside an operator besides those of its sum: divisions, roots, exponentials.
const STEPS: f64 = 16.0;

/// Roundings of one sign in one element, where operands were moved at random.
const MARGIN: f64 = 8.0;

/// Half the distance from one to the next number of bf16.
const UNIT: f64 = 1.0 / 256.0;

/// Half the distance from one to the next number of single precision.
const SINGLE: f64 = 1.0 / (1 << 24) as f64;

/// Checks of one kind of operator, one way.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Audited {
    /// How often it ran, on all ranks.
    pub n_runs: u64,
    /// The largest difference from the exact result, in units of what is allowed: above one is a failure.
    pub excess: f64,
}

impl Audited {
    /// Both.
    pub(crate) fn add(&mut self, other: Self) {
        self.n_runs += other.n_runs;
        self.excess = self.excess.max(other.excess);
    }
}

/// Checks by operator and direction.
pub type Audit = BTreeMap<(&'static str, Pass), Audited>;

/// Whether a result is rounded where it leaves its operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaves {
    /// To bf16.
    Rounded,
    /// As it is.
    Single,
}

impl Leaves {
    /// How an operator's results leave: the loss of a token and what it is made of stay in single precision.
    pub(crate) fn of_results(kind: &OpKind) -> Self {
        use OpKind::{CrossEntropy, Pick, RowMax, SumExp, SumLoss, Weigh};
        let of_loss = matches!(kind, RowMax | SumExp | Pick | CrossEntropy | Weigh { .. } | SumLoss);
        if of_loss { Self::Single } else { Self::Rounded }
    }

    fn unit(self) -> f64 {
        match self {
            Self::Rounded => UNIT,
            Self::Single => SINGLE,
        }
    }
}

/// A result in double precision: from the operands as they are, and from all of them moved a little.
pub(crate) struct Witness {
    /// From the operands as they are.
    pub(crate) exact: Tensor<f64>,
    /// From the operands moved.
    pub(crate) moved: Tensor<f64>,
}

impl Witness {
    /// The largest difference of what was found, in units of what is allowed.
    pub(crate) fn excess<E: Real>(&self, found: &Tensor<E>, leaves: Leaves) -> f64 {
        excess(found, (&self.exact, &self.moved), leaves)
    }
}

/// An operator, and for a router the experts that it was told to choose.
pub(crate) type Judged<'a> = (&'a Context<'a>, Option<&'a ArrayD<bool>>);

/// The largest difference of forward's results from the exact ones, in units of what is allowed.
pub(crate) fn forward<E: Real>(
    (context, choice): Judged<'_>,
    operands: &[&Value<E>],
    found: &[(&Value<E>, Leaves)],
) -> Result<f64, KernelError> {
    let exact_operands: Vec<Value<f64>> = operands.iter().map(|&value| widened(value)).collect();
    let run = |operands: &[Value<f64>]| {
        let operands: Vec<_> = operands.iter().collect();
        match choice {
            None => kernels::forward(context, &operands),
            Some(chosen) => {
                routing::forward(context, &operands, chosen).map(|fixed| vec![Value::Float(fixed.weights)])
            }
        }
    };
    let exact = run(&exact_operands)?;
    let mut worst = 0.0_f64;
    for (result, (found, leaves)) in found.iter().enumerate() {
        let n = summed(context, &context.signature.results[result]);
        let moved = run(&exact_operands.iter().map(|value| moved(value, n)).collect::<Vec<_>>())?;
        let triple = (found.as_float(), exact[result].as_float(), moved[result].as_float());
        let (Some(found), Some(exact), Some(moved)) = triple else { continue };
        let mut own = excess(found, (exact, moved), *leaves);
        if exact.len() == 1 {
            // Of one element, moves up and down may cancel, and no other stands in for it.
            let raised = run(&exact_operands.iter().map(|value| raised(value, n)).collect::<Vec<_>>())?;
            let all = raised[result].as_float().map(|raised| excess(found, (exact, raised), *leaves));
            own = all.map_or(own, |all| own.min(all));
        }
        worst = worst.max(own);
    }
    Ok(worst)
}

/// The same of backward's gradients.
pub(crate) fn backward<E: Real>(
    (context, choice): Judged<'_>,
    operands: &[Option<&Value<E>>],
    gradients: &[Option<&Tensor<E>>],
    found: &[Option<(&Tensor<E>, Leaves)>],
) -> Result<f64, KernelError> {
    let operands: Vec<Option<Value<f64>>> = operands.iter().map(|value| value.map(widened)).collect();
    let gradients: Vec<Option<Value<f64>>> =
        gradients.iter().map(|value| value.map(|tensor| Value::Float(wide(tensor)))).collect();
    let run = |operands: &[Option<Value<f64>>], gradients: &[Option<Value<f64>>]| {
        let operands: Vec<_> = operands.iter().map(Option::as_ref).collect();
        let gradients: Vec<_> =
            gradients.iter().map(|value| value.as_ref().and_then(Value::as_float)).collect();
        let logits = operands.first().copied().flatten().and_then(Value::as_float);
        match (choice, logits, &gradients[..]) {
            (Some(chosen), Some(logits), [Some(gradient)]) => {
                let found = routing::backward(context, logits, gradient, chosen)?;
                Ok((0..operands.len()).map(|i| (i == 0).then(|| found.clone())).collect())
            }
            _ => kernels::backward(context, &operands, &gradients),
        }
    };
    let exact = run(&operands, &gradients)?;
    let mut worst = 0.0_f64;
    for (operand, found) in found.iter().enumerate() {
        let n = summed(context, &context.signature.operands[operand]);
        let all = |list: &[Option<Value<f64>>]| -> Vec<Option<Value<f64>>> {
            list.iter().map(|value| value.as_ref().map(|value| moved(value, n))).collect()
        };
        let moved = run(&all(&operands), &all(&gradients))?;
        if let (Some((found, leaves)), Some(exact), Some(moved)) = (found, &exact[operand], &moved[operand]) {
            worst = worst.max(excess(found, (exact, moved), *leaves));
        }
    }
    Ok(worst)
}

/// Terms of the sum that an element is: the local lengths of the loops that it lacks.
pub(crate) fn summed(context: &Context<'_>, dims: &[ir::signature::FactorId]) -> f64 {
    let lacks = |i: &usize| !dims.iter().any(|factor| factor.0 as usize == *i);
    let length = |i: usize| (context.blocks[i].end - context.blocks[i].start).max(1) as f64;
    (0..context.blocks.len()).filter(lacks).map(length).product()
}

fn excess<E: Real>(found: &Tensor<E>, (exact, moved): (&Tensor<f64>, &Tensor<f64>), leaves: Leaves) -> f64 {
    let apart = exact.iter().zip(moved).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    let one = |(found, exact): (&E, &f64)| {
        let difference = (found.wide() - exact).abs();
        let allowed = leaves.unit() * exact.abs() + MARGIN * apart + f64::from(f32::MIN_POSITIVE);
        if difference.is_nan() && !exact.is_nan() { f64::INFINITY } else { difference / allowed }
    };
    // What is infinite in both is the same.
    found.iter().zip(exact).map(one).filter(|excess| !excess.is_nan()).fold(0.0, f64::max)
}

pub(crate) fn wide<E: Real>(tensor: &Tensor<E>) -> ArrayD<f64> {
    tensor.mapv(|value| value.wide())
}

pub(crate) fn widened<E: Real>(value: &Value<E>) -> Value<f64> {
    match value {
        Value::Float(tensor) => Value::Float(wide(tensor)),
        Value::Index(index) => Value::Index(index.clone()),
    }
}

/// A value whose numbers are moved.
pub(crate) fn moved(value: &Value<f64>, n: f64) -> Value<f64> {
    with_numbers(value, |numbers| moved_numbers(numbers, n))
}

/// A value whose numbers are all moved up.
fn raised(value: &Value<f64>, n: f64) -> Value<f64> {
    with_numbers(value, |numbers| numbers.mapv(|value| value * (1.0 + (n + STEPS) * SINGLE)))
}

fn with_numbers(value: &Value<f64>, change: impl Fn(&ArrayD<f64>) -> ArrayD<f64>) -> Value<f64> {
    match value {
        Value::Float(tensor) => Value::Float(change(tensor)),
        Value::Index(index) => Value::Index(index.clone()),
    }
}

/// Every number moved by `(n + STEPS) 2^-24` of itself, up or down in an order without a period.
pub(crate) fn moved_numbers<D: Dimension>(numbers: &Array<f64, D>, n: f64) -> Array<f64, D> {
    let by = (n + STEPS) * SINGLE;
    let mut state = 1_u32;
    let mut sign = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        if state >> 31 == 0 { 1.0 } else { -1.0 }
    };
    numbers.mapv(|value| value * (1.0 + sign() * by))
}
