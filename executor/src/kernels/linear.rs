//! Products of two tensors by their dims' names: an einsum with two operands.
//!
//! Every loop is one of four: a batch (both operands and the result), free rows (first operand and result), free
//! columns (second operand and result) or the contraction (both operands). Both gradients are products of the same
//! form: of `y = x w`, `dx = dy w` and `dw = x dy`, each summed over what it lacks.
//! Backward gives the gradient whose other operand is there.

use ndarray::{Array2, Array3, ArrayView2, Axis, IxDyn};

use ir::signature::FactorId;

use super::call::Call;
use super::{KernelError, Real, Tensor};

pub(super) fn forward<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    let [x, w, y] = dims(call)?;
    contract(call, Named(call.float(0)?, x), Named(call.float(1)?, w), y)
}

pub(super) fn backward<T: Real>(
    call: &Call<'_, T>,
    g: &Tensor<T>,
) -> Result<Vec<Option<Tensor<T>>>, KernelError> {
    let [x, w, y] = dims(call)?;
    if !call.has(0) && !call.has(1) {
        call.float(0)?;
    }
    let dx = call.has(1).then(|| contract(call, Named(g, y), Named(call.float(1)?, w), x)).transpose()?;
    let dw = call.has(0).then(|| contract(call, Named(call.float(0)?, x), Named(g, y), w)).transpose()?;
    Ok(vec![dx, dw])
}

fn dims<'a, T>(call: &'a Call<'_, T>) -> Result<[&'a [FactorId]; 3], KernelError> {
    match (call.ctx.signature.operands.as_slice(), call.ctx.signature.results.as_slice()) {
        ([x, w], [y]) => Ok([x, w, y]),
        (_, _) => Err(KernelError::Unfit { op: call.op, what: "a product has two operands and one result" }),
    }
}

/// A tensor and the loops that walk its dims.
#[derive(Clone, Copy)]
struct Named<'a, T>(&'a Tensor<T>, &'a [FactorId]);

impl<T: Real> Named<'_, T> {
    /// The tensor as a batch of matrices; each list of dims is walked in its order.
    fn matrices(&self, batch: &[FactorId], rows: &[FactorId], columns: &[FactorId]) -> Option<Array3<T>> {
        let at = |factor: &FactorId| self.1.iter().position(|own| own == factor);
        let axes: Vec<usize> = batch.iter().chain(rows).chain(columns).map(at).collect::<Option<_>>()?;
        let length =
            |dims: &[FactorId]| dims.iter().filter_map(at).map(|axis| self.0.len_of(Axis(axis))).product();
        let shape: (usize, usize, usize) = (length(batch), length(rows), length(columns));
        let walked = self.0.view().permuted_axes(IxDyn(&axes));
        walked.as_standard_layout().into_owned().into_shape_with_order(shape).ok()
    }

    /// Lengths of some of its dims.
    fn lengths(&self, dims: &[FactorId]) -> Vec<usize> {
        let at = |factor: &FactorId| self.1.iter().position(|own| own == factor);
        dims.iter().filter_map(at).map(|axis| self.0.len_of(Axis(axis))).collect()
    }
}

fn contract<T: Real>(
    call: &Call<'_, T>,
    a: Named<'_, T>,
    b: Named<'_, T>,
    out: &[FactorId],
) -> Result<Tensor<T>, KernelError> {
    let unfit = || call.unfit("its dims are not those of a product");
    let pick = |dims: &[FactorId], keep: &dyn Fn(&FactorId) -> bool| -> Vec<FactorId> {
        dims.iter().copied().filter(|factor| keep(factor)).collect()
    };
    let batch = pick(out, &|f| a.1.contains(f) && b.1.contains(f));
    let rows = pick(out, &|f| a.1.contains(f) && !b.1.contains(f));
    let columns = pick(out, &|f| !a.1.contains(f) && b.1.contains(f));
    let summed = pick(a.1, &|f| b.1.contains(f) && !out.contains(f));
    let complete = batch.len() + rows.len() + summed.len() == a.1.len()
        && batch.len() + columns.len() + summed.len() == b.1.len()
        && batch.len() + rows.len() + columns.len() == out.len();
    if !complete || [a.1, b.1, out].into_iter().any(repeats) {
        return Err(unfit());
    }
    let left = a.matrices(&batch, &rows, &summed).ok_or_else(unfit)?;
    let right = b.matrices(&batch, &summed, &columns).ok_or_else(unfit)?;
    let mut product = Array3::zeros((left.dim().0, left.dim().1, right.dim().2));
    for ((mut to, x), y) in product.outer_iter_mut().zip(left.outer_iter()).zip(right.outer_iter()) {
        to.assign(&matmul(x, y));
    }
    let order: Vec<FactorId> = batch.iter().chain(&rows).chain(&columns).copied().collect();
    let shape = [a.lengths(&batch), a.lengths(&rows), b.lengths(&columns)].concat();
    let product = product.into_shape_with_order(IxDyn(&shape)).map_err(|_| unfit())?;
    let axes: Vec<usize> = out.iter().filter_map(|f| order.iter().position(|own| own == f)).collect();
    Ok(product.permuted_axes(IxDyn(&axes)))
}

fn repeats(dims: &[FactorId]) -> bool {
    dims.iter().enumerate().any(|(i, factor)| dims[..i].contains(factor))
}

/// A matrix product; zero where the contraction is empty.
pub(super) fn matmul<T: Real>(a: ArrayView2<'_, T>, b: ArrayView2<'_, T>) -> Array2<T> {
    let (m, k) = a.dim();
    let n = b.ncols();
    if m == 0 || n == 0 || k == 0 { Array2::zeros((m, n)) } else { a.dot(&b) }
}
