//! The few groups of operators that every part of a transformer is made of.

use ir::builder::LayerBuilder;
use ir::graph::{Init, TensorId};
use ir::op::OpKind;

use crate::arch::HeadNorm;

/// `x w -> y` with a weight of its own: the dims of the weight, those of the result.
pub(crate) fn linear(b: &mut LayerBuilder, name: &str, x: TensorId, dims: [&str; 2]) -> TensorId {
    let [weight_dims, result_dims] = dims;
    let weight = b.parameter(&format!("{name}.weight"), weight_dims, Init::Normal);
    b.op(name, OpKind::Linear, &[x, weight], result_dims)
}

/// `x c -> y` with a vector of its own: the dims of the vector, those of the result.
pub(crate) fn bias(b: &mut LayerBuilder, name: &str, x: TensorId, dims: [&str; 2]) -> TensorId {
    let [bias_dims, result_dims] = dims;
    let vector = b.parameter(&format!("{name}.bias"), bias_dims, Init::Zero);
    b.op(&format!("{name}_bias"), OpKind::Bias, &[x, vector], result_dims)
}

/// RMS norm over the last dim, with a weight of its own: the dim of the weight, those of the result.
pub(crate) fn rms_norm(
    b: &mut LayerBuilder,
    name: &str,
    x: TensorId,
    HeadNorm { eps, shift }: HeadNorm,
    dims: [&str; 2],
) -> TensorId {
    let [weight_dims, result_dims] = dims;
    let weight = b.parameter(&format!("{name}.weight"), weight_dims, rms_init(shift));
    b.op(name, OpKind::RmsNorm { eps, shift }, &[x, weight], result_dims)
}

/// What the weight of an RMS norm begins as, to which so much is added: the two are one together.
pub(crate) fn rms_init(shift: f64) -> Init {
    if shift == 0.0 { Init::One } else { Init::Zero }
}
