//! Kernels against finite differences, the sharding rule, known identities and calls that make no sense.

mod audit;
mod ring_audit;
mod blocks;
mod cases;
mod gradients;
mod identities;
mod misuse;

use ndarray::{Axis, Slice};

use super::{Tensor, Value};

/// A sequence of numbers that is the same every time (Knuth's MMIX generator).
pub(super) struct Noise(u64);

impl Noise {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1))
    }

    /// The next of `0..n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % n as u64) as usize
    }

    /// The next number between -1 and 1.
    pub(super) fn unit(&mut self) -> f64 {
        self.below(1 << 24) as f64 / f64::from(1 << 23) - 1.0
    }

    pub(super) fn tensor(&mut self, shape: &[usize]) -> Tensor<f64> {
        Tensor::from_shape_simple_fn(shape, || self.unit())
    }
}

/// Some rows of a value along one dim.
pub(super) fn rows(value: &Value<f64>, dim: usize, range: std::ops::Range<u64>) -> Value<f64> {
    let slice = Slice::from(range.start as isize..range.end as isize);
    match value {
        Value::Float(tensor) => Value::Float(tensor.slice_axis(Axis(dim), slice).to_owned()),
        Value::Index(index) => Value::Index(index.slice_axis(Axis(dim), slice).to_owned()),
    }
}

/// Fails where two tensors differ by more than `tolerance` times the larger of one and the largest element.
pub(super) fn assert_close(found: &Tensor<f64>, expected: &Tensor<f64>, tolerance: f64, what: &str) {
    assert_eq!(found.shape(), expected.shape(), "{what}");
    let size = expected.iter().fold(1.0_f64, |max, x| max.max(x.abs()));
    for (at, (a, b)) in found.iter().zip(expected).enumerate() {
        // Also equal where both are infinite.
        assert!(a == b || (a - b).abs() <= tolerance * size, "{what}: element {at} is {a}, expected {b}");
    }
}
