//! One call of a kernel, checked: every operand has the shape its blocks imply before a kernel sees it.
//!
//! Kernels index freely after that. What remains for them to check is the number of dims, which `sizes` does, and
//! that two operands which walk together have the same shape, which `same_shape` does.

use std::borrow::Cow;

use ndarray::{ArrayD, IxDyn};

use ir::op::{AttentionBias, OpKind};
use ir::signature::FactorId;

use super::{Context, Index, KernelError, Real, Tensor, Value};

pub(super) struct Call<'a, T> {
    pub(super) ctx: &'a Context<'a>,
    pub(super) op: &'static str,
    values: &'a [Option<&'a Value<T>>],
    operand_shapes: Vec<Vec<usize>>,
    result_shapes: Vec<Vec<usize>>,
}

impl<'a, T: Real> Call<'a, T> {
    pub(super) fn new(ctx: &'a Context<'a>, values: &'a [Option<&'a Value<T>>]) -> Result<Self, KernelError> {
        let op = ctx.kind.line().name;
        let count = |what, found, expected| {
            if found == expected { Ok(()) } else { Err(KernelError::Count { op, what, found, expected }) }
        };
        count("blocks", ctx.blocks.len(), ctx.signature.factors.len())?;
        count("operands", values.len(), ctx.signature.operands.len())?;
        let shape = |dims: &Vec<FactorId>| -> Result<Vec<usize>, KernelError> {
            let length = |factor: &FactorId| {
                ctx.blocks.get(factor.0 as usize).map(|rows| rows.end.saturating_sub(rows.start))
            };
            let unknown = KernelError::Unfit { op, what: "a dim of its signature names no loop" };
            dims.iter().map(|factor| length(factor).map(|n| n as usize).ok_or(unknown.clone())).collect()
        };
        let operand_shapes: Vec<_> = ctx.signature.operands.iter().map(shape).collect::<Result<_, _>>()?;
        let result_shapes: Vec<_> = ctx.signature.results.iter().map(shape).collect::<Result<_, _>>()?;
        for (position, (value, expected)) in values.iter().zip(&operand_shapes).enumerate() {
            if let Some(value) = value {
                check_shape(Place { op, what: "operand", position }, value.shape(), expected)?;
            }
        }
        Ok(Self { ctx, op, values, operand_shapes, result_shapes })
    }

    /// Whether the signature has an operand at this position.
    pub(super) fn takes(&self, operand: usize) -> bool {
        operand < self.operand_shapes.len()
    }

    /// Whether an operand was given.
    pub(super) fn has(&self, operand: usize) -> bool {
        self.values.get(operand).is_some_and(Option::is_some)
    }

    pub(super) fn float(&self, operand: usize) -> Result<&'a Tensor<T>, KernelError> {
        let wrong = KernelError::Type { op: self.op, operand, expected: "numbers" };
        self.value(operand)?.as_float().ok_or(wrong)
    }

    pub(super) fn index(&self, operand: usize) -> Result<&'a Index, KernelError> {
        let wrong = KernelError::Type { op: self.op, operand, expected: "integers" };
        self.value(operand)?.as_index().ok_or(wrong)
    }

    fn value(&self, operand: usize) -> Result<&'a Value<T>, KernelError> {
        let given = self.values.get(operand).copied().flatten();
        given.ok_or(KernelError::Missing { op: self.op, operand })
    }

    /// Local shape of an operand, given or not.
    pub(super) fn operand_shape(&self, operand: usize) -> Result<&[usize], KernelError> {
        let shape = self.operand_shapes.get(operand);
        shape.map(Vec::as_slice).ok_or(KernelError::Missing { op: self.op, operand })
    }

    /// Local shape of a result.
    pub(super) fn result_shape(&self, result: usize) -> Result<&[usize], KernelError> {
        self.result_shapes
            .get(result)
            .map(Vec::as_slice)
            .ok_or(self.unfit("its signature has too few results"))
    }

    pub(super) fn n_results(&self) -> usize {
        self.result_shapes.len()
    }

    /// Local lengths of the dims of an operand of `N` dims.
    pub(super) fn sizes<const N: usize>(&self, operand: usize) -> Result<[usize; N], KernelError> {
        let shape = self.operand_shape(operand)?;
        shape.try_into().map_err(|_| self.unfit("an operand of its signature has the wrong number of dims"))
    }

    /// Local lengths of an operand as rows of its last dim: how many, and how long.
    pub(super) fn rows(&self, operand: usize) -> Result<(usize, usize), KernelError> {
        let shape = self.operand_shape(operand)?;
        let (&n, outer) = shape.split_last().ok_or(self.unfit("an operand of its signature has no dims"))?;
        Ok((outer.iter().product(), n))
    }

    /// First global row of a dim of an operand.
    pub(super) fn start(&self, operand: usize, dim: usize) -> Result<i64, KernelError> {
        let factor = self.ctx.signature.operands.get(operand).and_then(|dims| dims.get(dim));
        let rows = factor.and_then(|factor| self.ctx.blocks.get(factor.0 as usize));
        let start = rows.and_then(|rows| i64::try_from(rows.start).ok());
        start.ok_or(self.unfit("an operand of its signature has too few dims"))
    }

    /// Refuses a signature in which a shape that a kernel takes for granted differs.
    pub(super) fn same_shape(&self, found: &[usize], expected: &[usize]) -> Result<(), KernelError> {
        if found == expected {
            Ok(())
        } else {
            Err(self.unfit("dims of its signature that walk together differ"))
        }
    }

    pub(super) fn unfit(&self, what: &'static str) -> KernelError {
        KernelError::Unfit { op: self.op, what }
    }

    /// A tensor from its elements in index order.
    pub(super) fn tensor(&self, shape: &[usize], elements: Vec<T>) -> Result<Tensor<T>, KernelError> {
        ArrayD::from_shape_vec(IxDyn(shape), elements)
            .map_err(|_| self.unfit("dims of its signature do not fit"))
    }

    pub(super) fn check_gradients(&self, gradients: &[Option<&Tensor<T>>]) -> Result<(), KernelError> {
        let (found, expected) = (gradients.len(), self.result_shapes.len());
        if found != expected {
            return Err(KernelError::Count { op: self.op, what: "gradients", found, expected });
        }
        for (position, (gradient, expected)) in gradients.iter().zip(&self.result_shapes).enumerate() {
            if let Some(gradient) = gradient {
                check_shape(Place { op: self.op, what: "gradient", position }, gradient.shape(), expected)?;
            }
        }
        Ok(())
    }

    /// Checks what a kernel computed against the signature.
    pub(super) fn finish_results(&self, results: Vec<Tensor<T>>) -> Result<Vec<Value<T>>, KernelError> {
        let (found, expected) = (results.len(), self.result_shapes.len());
        if found != expected {
            return Err(KernelError::Count { op: self.op, what: "results", found, expected });
        }
        for (position, (result, expected)) in results.iter().zip(&self.result_shapes).enumerate() {
            check_shape(Place { op: self.op, what: "result", position }, result.shape(), expected)?;
        }
        Ok(results.into_iter().map(|result| Value::Float(row_major(result))).collect())
    }

    /// Checks gradients against the signature; operands that a kernel left out at the end have none.
    pub(super) fn finish_gradients(
        &self,
        mut gradients: Vec<Option<Tensor<T>>>,
    ) -> Result<Vec<Option<Tensor<T>>>, KernelError> {
        gradients.resize(self.operand_shapes.len(), None);
        for (position, (gradient, expected)) in gradients.iter().zip(&self.operand_shapes).enumerate() {
            if let Some(gradient) = gradient {
                check_shape(
                    Place { op: self.op, what: "operand gradient", position },
                    gradient.shape(),
                    expected,
                )?;
                debug_assert!(may_differentiate(self.ctx.kind, position), "{} {position}", self.op);
            }
        }
        Ok(gradients.into_iter().map(|gradient| gradient.map(row_major)).collect())
    }
}

/// Slopes are a buffer, whatever the attention's line says of its last operand.
fn may_differentiate(kind: &OpKind, operand: usize) -> bool {
    let slopes = matches!(kind, OpKind::Attention { bias: AttentionBias::Slopes, .. }) && operand == 5;
    kind.differentiates(operand) && !slopes
}

#[derive(Clone, Copy)]
struct Place {
    op: &'static str,
    what: &'static str,
    position: usize,
}

fn check_shape(place: Place, found: &[usize], expected: &[usize]) -> Result<(), KernelError> {
    if found == expected {
        return Ok(());
    }
    let Place { op, what, position } = place;
    Err(KernelError::Shape { op, what, position, found: found.to_vec(), expected: expected.to_vec() })
}

/// Elements in index order, copied only where they are stored in another.
pub(super) fn flat<A: Copy>(tensor: &ArrayD<A>) -> Cow<'_, [A]> {
    tensor.as_slice().map_or_else(|| Cow::Owned(tensor.iter().copied().collect()), Cow::Borrowed)
}

/// The `i`-th row of rows of length `n`.
pub(super) fn row<A>(elements: &[A], i: usize, n: usize) -> &[A] {
    &elements[i * n..(i + 1) * n]
}

fn row_major<T: Real>(tensor: Tensor<T>) -> Tensor<T> {
    if tensor.is_standard_layout() { tensor } else { tensor.as_standard_layout().into_owned() }
}
