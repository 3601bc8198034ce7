//! Physical quantities as types: seconds, bytes, floating-point operations and their rates.
//!
//! Only products and quotients that mean something exist: `Bytes / BytesPerSecond = Seconds`. A byte count is
//! exact up to 2^53 (9 PB), so counts made in two ways can be compared with `==`.

use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Bytes of a GiB.
pub const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize, JsonSchema)]
        #[serde(transparent)]
        pub struct $name(pub f64);

        impl $name {
            /// Nothing of this quantity.
            pub const ZERO: Self = Self(0.0);

            /// The larger of the two; total order, so never NaN-dependent.
            #[must_use]
            pub fn max(self, other: Self) -> Self {
                if self.0.total_cmp(&other.0).is_ge() { self } else { other }
            }

            /// The smaller of the two.
            #[must_use]
            pub fn min(self, other: Self) -> Self {
                if self.0.total_cmp(&other.0).is_le() { self } else { other }
            }
        }

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self { Self(self.0 + other.0) }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) { self.0 += other.0; }
        }

        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self { Self(self.0 - other.0) }
        }

        impl Mul<f64> for $name {
            type Output = Self;
            fn mul(self, factor: f64) -> Self { Self(self.0 * factor) }
        }

        impl Div<f64> for $name {
            type Output = Self;
            fn div(self, divisor: f64) -> Self { Self(self.0 / divisor) }
        }

        impl Div for $name {
            type Output = f64;
            fn div(self, other: Self) -> f64 { self.0 / other.0 }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                iter.fold(Self::ZERO, |total, item| total + item)
            }
        }
    };
}

quantity!(
    /// A duration in seconds.
    Seconds
);
quantity!(
    /// An amount of data in bytes.
    Bytes
);
quantity!(
    /// Floating-point operations; one multiply-add counts two.
    Flops
);
quantity!(
    /// A bandwidth, per direction unless its field says otherwise.
    BytesPerSecond
);
quantity!(
    /// A rate of computation.
    FlopsPerSecond
);

impl Div<BytesPerSecond> for Bytes {
    type Output = Seconds;
    fn div(self, rate: BytesPerSecond) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}

impl Div<FlopsPerSecond> for Flops {
    type Output = Seconds;
    fn div(self, rate: FlopsPerSecond) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}

impl Div<Seconds> for Flops {
    type Output = FlopsPerSecond;
    fn div(self, time: Seconds) -> FlopsPerSecond {
        FlopsPerSecond(self.0 / time.0)
    }
}

impl Mul<Seconds> for BytesPerSecond {
    type Output = Bytes;
    fn mul(self, time: Seconds) -> Bytes {
        Bytes(self.0 * time.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_over_bandwidth_is_a_time() {
        assert_eq!(Bytes(8.0) / BytesPerSecond(2.0), Seconds(4.0));
    }
}
