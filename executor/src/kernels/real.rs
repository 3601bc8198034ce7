//! The number types that kernels compute with, and the functions that the standard library lacks.

use std::f64::consts::PI;

use crate::element::Element;

/// A number type of the kernels: everything of [`Element`], conversion and a few functions.
pub trait Real: Element {
    /// The nearest number of this type.
    fn from_f64(value: f64) -> Self;

    /// The same number in double precision.
    fn wide(self) -> f64;

    /// The error function, to the last bits of the type.
    fn erf(self) -> Self {
        Self::from_f64(erf(self.wide()))
    }

    /// `1 / (1 + exp(-x))`.
    fn sigmoid(self) -> Self {
        Self::one() / (Self::one() + (-self).exp())
    }
}

impl Real for f32 {
    fn from_f64(value: f64) -> Self {
        value as f32
    }

    fn wide(self) -> f64 {
        f64::from(self)
    }
}

impl Real for f64 {
    fn from_f64(value: f64) -> Self {
        value
    }

    fn wide(self) -> f64 {
        self
    }
}

/// The error function, absolute error below 1e-15.
///
/// Below 2 the series `2/sqrt(pi) * exp(-x^2) * sum_n 2^n x^(2n+1) / (2n+1)!!`, whose terms are all positive
/// (DLMF 7.6.2); from 2 on one minus the continued fraction of `erfc` (DLMF 7.9.1), which is small there.
///
/// `erf(1) = 0.842700792949714869`
pub fn erf(x: f64) -> f64 {
    /// From here on `erfc` is below half the distance of one to the next smaller number.
    const ONE: f64 = 6.0;
    let size = x.abs();
    let value = if size < 2.0 {
        erf_series(size)
    } else if size < ONE {
        1.0 - erfc_fraction(size)
    } else if size.is_nan() {
        size
    } else {
        1.0
    };
    if x < 0.0 { -value } else { value }
}

fn erf_series(x: f64) -> f64 {
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term > sum * (0.1 * f64::EPSILON) {
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    2.0 / PI.sqrt() * (-x * x).exp() * sum
}

/// `exp(-x^2)/sqrt(pi) / (x + (1/2)/(x + (2/2)/(x + (3/2)/(x + ..))))`, evaluated from the inside.
fn erfc_fraction(x: f64) -> f64 {
    /// The rest is about `exp(-2 x sqrt(2 n))` of the value: 3e-16 of 0.005 at 2.
    const LEVELS: u32 = 40;
    let inner = (1..=LEVELS).rev().fold(x, |below, n| x + f64::from(n) / 2.0 / below);
    (-x * x).exp() / PI.sqrt() / inner
}

/// Sum in index order.
pub(super) fn sum<T: Real>(terms: impl IntoIterator<Item = T>) -> T {
    terms.into_iter().fold(T::zero(), |total, term| total + term)
}

/// Sum of products in index order.
pub(super) fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    sum(a.iter().zip(b).map(|(&x, &y)| x * y))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values by the series of DLMF 7.6.1 in 60 decimal digits, rounded to the nearest number.
    #[test]
    fn erf_is_right_to_1e_15() {
        let known = [
            (0.0, 0.0),
            (1e-8, 1.1283791670955126e-08),
            (0.1, 0.1124629160182849),
            (0.5, 0.5204998778130465),
            (1.0, 0.8427007929497149),
            (1.5, 0.9661051464753108),
            (1.999, 0.9953015566513705),
            (2.0, 0.9953222650189527),
            (2.5, 0.999593047982555),
            (3.0, 0.9999779095030014),
            (4.0, 0.9999999845827421),
            (5.5, 0.9999999999999927),
            (7.0, 1.0),
        ];
        for (x, value) in known {
            assert!((erf(x) - value).abs() < 1e-15, "erf({x}) = {:.20} is not {value:.20}", erf(x));
            assert_eq!(erf(-x), -erf(x));
        }
    }

    #[test]
    fn erf_keeps_what_is_not_a_number() {
        assert!(erf(f64::NAN).is_nan());
        assert_eq!(erf(f64::NEG_INFINITY), -1.0);
    }

    #[test]
    fn sigmoid_saturates_without_overflow() {
        assert_eq!((-1e4_f64).sigmoid(), 0.0);
        assert_eq!(1e4_f32.sigmoid(), 1.0);
        assert_eq!(0.0_f64.sigmoid(), 0.5);
    }
}
