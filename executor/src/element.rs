//! The numbers that ranks compute with and send, and how two of them are combined.

use std::fmt;

use ndarray::NdFloat;

/// An executed number type. One element moves `size_of::<Self>()` bytes, or two where numbers are rounded to bf16,
/// whatever the plan's own precision.
pub trait Element: NdFloat {
    /// The nearest number with the 8 significant bits of bf16; of two as near, the one whose last bit is zero.
    fn to_bf16(self) -> Self;
}

impl Element for f32 {
    fn to_bf16(self) -> Self {
        if self.is_nan() {
            return self;
        }
        // Half of the last kept bit, less one where that bit is zero already: ties go to even.
        let bits = self.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        Self::from_bits(rounded & 0xffff_0000)
    }
}

impl Element for f64 {
    fn to_bf16(self) -> Self {
        Self::from((self as f32).to_bf16())
    }
}

/// Bytes of a number in bf16.
pub(crate) const BF16_BYTES: u64 = 2;

/// How numbers are rounded where they leave an operator or a rank. Inside operators and in accumulators, master
/// weights and optimizer states they are not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Edges {
    /// They are not.
    #[default]
    Exact,
    /// To bf16, in two bytes.
    Bf16,
}

impl Edges {
    /// Bytes of an element that is kept or sent.
    pub fn element_bytes<E>(self) -> u64 {
        match self {
            Self::Exact => size_of::<E>() as u64,
            Self::Bf16 => BF16_BYTES,
        }
    }

    /// Numbers as they leave.
    pub(crate) fn round_all<'a, E: Element>(self, values: impl IntoIterator<Item = &'a mut E>) {
        match self {
            Self::Exact => {}
            Self::Bf16 => values.into_iter().for_each(|value| *value = value.to_bf16()),
        }
    }
}

/// How the contributions of several ranks become one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reduce {
    /// Addition, in ring order.
    Sum,
    /// The larger value; a NaN wins over every number, so that it is not lost.
    Max,
}

impl Reduce {
    /// Combines what arrived with what this rank holds, in that order.
    pub(crate) fn combine<E: Element>(self, arrived: E, own: E) -> E {
        match self {
            Reduce::Sum => arrived + own,
            Reduce::Max if arrived.is_nan() || arrived > own => arrived,
            Reduce::Max => own,
        }
    }
}

impl fmt::Display for Reduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reduce::Sum => "sum",
            Reduce::Max => "max",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight significant bits: neighbours of one are 2^-7 above and 2^-8 below.
    #[test]
    fn numbers_round_to_the_nearest_and_ties_to_even() {
        let ulp = 2.0_f32.powi(-7);
        let pairs = [
            (1.0, 1.0),
            (1.0 + 0.4 * ulp, 1.0),
            (1.0 + 0.5 * ulp, 1.0),
            (1.0 + 0.6 * ulp, 1.0 + ulp),
            (1.0 + 1.5 * ulp, 1.0 + 2.0 * ulp),
            (-1.0 - 1.5 * ulp, -1.0 - 2.0 * ulp),
            (f32::INFINITY, f32::INFINITY),
            (f32::MAX, f32::INFINITY),
        ];
        for (value, rounded) in pairs {
            assert_eq!(value.to_bf16(), rounded, "{value}");
        }
        assert!(f32::NAN.to_bf16().is_nan());
    }

    #[test]
    fn a_nan_survives_the_maximum_from_either_side() {
        assert!(Reduce::Max.combine(f64::NAN, 1.0).is_nan());
        assert!(Reduce::Max.combine(1.0, f64::NAN).is_nan());
        assert_eq!(Reduce::Max.combine(2.0_f32, 1.0), 2.0);
        assert_eq!(Reduce::Max.combine(1.0_f32, 2.0), 2.0);
    }
}
