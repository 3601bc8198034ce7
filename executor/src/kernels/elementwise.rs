//! Element by element: activations, gated units, additions and scalings, and the two that broadcast (bias, gate).

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use ndarray::{ArrayViewD, Axis, Zip};

use ir::op::{Activation, Gating};
use ir::signature::FactorId;

use super::call::Call;
use super::{KernelError, Real, Tensor};

type Gradients<T> = Result<Vec<Option<Tensor<T>>>, KernelError>;

pub(super) fn act<T: Real>(call: &Call<'_, T>, act: Activation) -> Result<Tensor<T>, KernelError> {
    Ok(call.float(0)?.mapv(|x| activate(act, x)))
}

pub(super) fn act_backward<T: Real>(call: &Call<'_, T>, act: Activation, g: &Tensor<T>) -> Gradients<T> {
    Ok(vec![Some(zip(call, call.float(0)?, g, |x, g| g * slope(act, x))?)])
}

pub(super) fn add<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    zip(call, call.float(0)?, call.float(1)?, |a, c| a + c)
}

pub(super) fn scale<T: Real>(call: &Call<'_, T>, by: f64) -> Result<Tensor<T>, KernelError> {
    Ok(scaled(call.float(0)?, by))
}

pub(super) fn scaled<T: Real>(x: &Tensor<T>, by: f64) -> Tensor<T> {
    let by = T::from_f64(by);
    x.mapv(|x| x * by)
}

pub(super) fn softcap<T: Real>(call: &Call<'_, T>, cap: f64) -> Result<Tensor<T>, KernelError> {
    let cap = T::from_f64(cap);
    Ok(call.float(0)?.mapv(|x| cap * (x / cap).tanh()))
}

pub(super) fn softcap_backward<T: Real>(call: &Call<'_, T>, cap: f64, g: &Tensor<T>) -> Gradients<T> {
    let cap = T::from_f64(cap);
    let one = |x: T, g: T| g * (T::one() - (x / cap).tanh().powi(2));
    Ok(vec![Some(zip(call, call.float(0)?, g, one)?)])
}

pub(super) fn glu<T: Real>(call: &Call<'_, T>, gating: Gating) -> Result<Tensor<T>, KernelError> {
    zip(call, call.float(0)?, call.float(1)?, |gate, up| gated(gating, gate, up).y)
}

pub(super) fn glu_backward<T: Real>(call: &Call<'_, T>, gating: Gating, g: &Tensor<T>) -> Gradients<T> {
    let (gate, up) = (call.float(0)?, call.float(1)?);
    let d_gate = zip(call, gate, up, |gate, up| gated(gating, gate, up).d_gate)?;
    let d_up = zip(call, gate, up, |gate, up| gated(gating, gate, up).d_up)?;
    Ok(vec![Some(zip(call, &d_gate, g, |d, g| d * g)?), Some(zip(call, &d_up, g, |d, g| d * g)?)])
}

/// `x + c`, `c` broadcast along the dims it lacks.
pub(super) fn bias<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    let x = call.float(0)?;
    let c = spread(call, call.float(1)?)?;
    let c = c.broadcast(x.shape()).ok_or(call.unfit("the vector has a dim that the tensor lacks"))?;
    Ok(Zip::from(x).and(&c).map_collect(|&x, &c| x + c))
}

pub(super) fn bias_backward<T: Real>(call: &Call<'_, T>, g: &Tensor<T>) -> Gradients<T> {
    let [x, c] = bias_dims(call)?;
    call.same_shape(g.shape(), call.operand_shape(0)?)?;
    let mut dc = g.clone();
    for axis in (0..x.len()).rev().filter(|&axis| !c.contains(&x[axis])) {
        dc = dc.sum_axis(Axis(axis));
    }
    // What is left walks in the order of `x`.
    let left: Vec<FactorId> = x.iter().copied().filter(|factor| c.contains(factor)).collect();
    let axes: Vec<usize> = c.iter().filter_map(|factor| left.iter().position(|own| own == factor)).collect();
    if axes.len() != dc.ndim() {
        return Err(call.unfit("the vector has a dim that the tensor lacks"));
    }
    Ok(vec![Some(g.clone()), Some(dc.permuted_axes(axes))])
}

/// The vector with its dims in the tensor's order and one row along those it lacks.
fn spread<'a, T: Real>(call: &Call<'_, T>, c: &'a Tensor<T>) -> Result<ArrayViewD<'a, T>, KernelError> {
    let [x, dims] = bias_dims(call)?;
    let axes: Vec<usize> = x.iter().filter_map(|factor| dims.iter().position(|own| own == factor)).collect();
    if axes.len() != c.ndim() {
        return Err(call.unfit("the vector has a dim that the tensor lacks"));
    }
    let mut view = c.view().permuted_axes(axes);
    for (axis, _) in x.iter().enumerate().filter(|(_, factor)| !dims.contains(factor)) {
        view = view.insert_axis(Axis(axis));
    }
    Ok(view)
}

fn bias_dims<'a, T>(call: &'a Call<'_, T>) -> Result<[&'a [FactorId]; 2], KernelError> {
    let repeats = |dims: &[FactorId]| dims.iter().enumerate().any(|(i, factor)| dims[..i].contains(factor));
    match call.ctx.signature.operands.as_slice() {
        [x, c] if !repeats(x) && !repeats(c) => Ok([x, c]),
        _ => Err(KernelError::Unfit { op: call.op, what: "a bias has two operands, each dim once" }),
    }
}

/// `x * sigmoid(z)`, `z` one number per row.
pub(super) fn gate<T: Real>(call: &Call<'_, T>) -> Result<Tensor<T>, KernelError> {
    let (x, z) = gate_operands(call)?;
    let z = z.insert_axis(Axis(x.ndim() - 1));
    let z = z.broadcast(x.shape()).ok_or(call.unfit("the gate's dims are not the rows'"))?;
    Ok(Zip::from(x).and(&z).map_collect(|&x, &z| x * z.sigmoid()))
}

pub(super) fn gate_backward<T: Real>(call: &Call<'_, T>, g: &Tensor<T>) -> Gradients<T> {
    let (x, z) = gate_operands(call)?;
    let last = Axis(x.ndim() - 1);
    let wide = z.clone().insert_axis(last);
    let wide = wide.broadcast(x.shape()).ok_or(call.unfit("the gate's dims are not the rows'"))?;
    call.same_shape(g.shape(), x.shape())?;
    let dx = Zip::from(g).and(&wide).map_collect(|&g, &z| g * z.sigmoid());
    let slopes = z.mapv(|z| z.sigmoid() * (T::one() - z.sigmoid()));
    let dz = zip(call, &zip(call, x, g, |x, g| x * g)?.sum_axis(last), &slopes, |sum, slope| sum * slope)?;
    Ok(vec![Some(dx), Some(dz)])
}

fn gate_operands<'a, T: Real>(call: &Call<'a, T>) -> Result<(&'a Tensor<T>, ArrayViewD<'a, T>), KernelError> {
    let (x, z) = (call.float(0)?, call.float(1)?);
    let rows = x.shape().split_last().map(|(_, rows)| rows);
    call.same_shape(z.shape(), rows.ok_or(call.unfit("a gated tensor has dims"))?)?;
    Ok((x, z.view()))
}

fn zip<T: Real>(
    call: &Call<'_, T>,
    a: &Tensor<T>,
    b: &Tensor<T>,
    f: impl Fn(T, T) -> T,
) -> Result<Tensor<T>, KernelError> {
    call.same_shape(a.shape(), b.shape())?;
    Ok(Zip::from(a).and(b).map_collect(|&a, &b| f(a, b)))
}

fn activate<T: Real>(act: Activation, x: T) -> T {
    let half = T::from_f64(0.5);
    match act {
        Activation::Silu => x * x.sigmoid(),
        Activation::Gelu => half * x * (T::one() + (x * T::from_f64(FRAC_1_SQRT_2)).erf()),
        Activation::GeluTanh => half * x * (T::one() + inner(x).tanh()),
        Activation::Relu => relu(x),
        Activation::ReluSquared => relu(x).powi(2),
        Activation::Sigmoid => x.sigmoid(),
    }
}

/// Derivative of an activation.
fn slope<T: Real>(act: Activation, x: T) -> T {
    let (one, half) = (T::one(), T::from_f64(0.5));
    match act {
        Activation::Silu => x.sigmoid() * (one + x * (one - x.sigmoid())),
        Activation::Gelu => {
            let density = (-half * x * x).exp() * T::from_f64((2.0 * PI).sqrt().recip());
            half * (one + (x * T::from_f64(FRAC_1_SQRT_2)).erf()) + x * density
        }
        Activation::GeluTanh => {
            let t = inner(x).tanh();
            let d_inner = T::from_f64((2.0 / PI).sqrt()) * (one + T::from_f64(3.0 * CUBIC) * x * x);
            half * (one + t) + half * x * (one - t * t) * d_inner
        }
        Activation::Relu => {
            if x > T::zero() {
                one
            } else {
                T::zero()
            }
        }
        Activation::ReluSquared => relu(x) + relu(x),
        Activation::Sigmoid => x.sigmoid() * (one - x.sigmoid()),
    }
}

/// Keeps what is not a number, which `max` would hide.
fn relu<T: Real>(x: T) -> T {
    if x < T::zero() { T::zero() } else { x }
}

/// Weight of the cubic term of the tanh form of GELU (Hendrycks and Gimpel 2016).
const CUBIC: f64 = 0.044715;

/// `sqrt(2/pi) * (x + 0.044715 x^3)`.
fn inner<T: Real>(x: T) -> T {
    T::from_f64((2.0 / PI).sqrt()) * (x + T::from_f64(CUBIC) * x * x * x)
}

/// A gated unit and its slopes.
struct Gated<T> {
    y: T,
    d_gate: T,
    d_up: T,
}

/// Steepness of the sigmoid in gpt-oss's unit (its published `alpha`).
const ALPHA: f64 = 1.702;

fn gated<T: Real>(gating: Gating, gate: T, up: T) -> Gated<T> {
    match gating {
        Gating::Product { act } => {
            let a = activate(act, gate);
            Gated { y: a * up, d_gate: slope(act, gate) * up, d_up: a }
        }
        Gating::ClampedProduct { limit } => {
            let (limit, alpha, one) = (T::from_f64(limit), T::from_f64(ALPHA), T::one());
            let (g, d_g) = clamp(gate, T::neg_infinity(), limit);
            let (u, d_u) = clamp(up, -limit, limit);
            let s = (alpha * g).sigmoid();
            let d_swish = s * (one + alpha * g * (one - s));
            Gated { y: g * s * (u + one), d_gate: d_g * d_swish * (u + one), d_up: d_u * g * s }
        }
    }
}

/// The clamped value and its slope; what is not a number stays.
fn clamp<T: Real>(x: T, low: T, high: T) -> (T, T) {
    if x > high {
        (high, T::zero())
    } else if x < low {
        (low, T::zero())
    } else {
        (x, T::one())
    }
}
