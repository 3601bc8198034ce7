//! The numbers that ranks compute with and send, and how two of them are combined.

use std::fmt;

use ndarray::NdFloat;

/// An executed number type. One element moves `size_of::<Self>()` bytes, or two where numbers are rounded to bf16,
/// whatever the plan's own precision.
pub trait Element: NdFloat {
    /// The nearest number with the 8 significant bits of bf16; of two as near, the one whose last bit is zero.
    fn to_bf16(self) -> Self;

    /// The two bytes of a number of bf16; nothing for a number that bf16 does not have.
    fn bf16_bits(self) -> Option<u16>;

    /// The number of bf16 that two bytes are.
    fn from_bf16_bits(bits: u16) -> Self;

    /// Writes numbers in full into memory of as many times their size.
    fn write_all(values: &[Self], memory: &mut [u8]);

    /// Reads as many numbers as memory holds in full.
    fn read_all(memory: &[u8]) -> Vec<Self>;
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

    fn bf16_bits(self) -> Option<u16> {
        if self.is_nan() {
            return Some(BF16_NAN);
        }
        let bits = self.to_bits();
        (bits & 0xffff == 0).then_some((bits >> 16) as u16)
    }

    fn from_bf16_bits(bits: u16) -> Self {
        Self::from_bits(u32::from(bits) << 16)
    }

    fn write_all(values: &[Self], memory: &mut [u8]) {
        let places = memory.as_chunks_mut::<{ size_of::<Self>() }>().0;
        places.iter_mut().zip(values).for_each(|(place, value)| *place = value.to_le_bytes());
    }

    fn read_all(memory: &[u8]) -> Vec<Self> {
        memory.as_chunks().0.iter().map(|&place| Self::from_le_bytes(place)).collect()
    }
}

impl Element for f64 {
    fn to_bf16(self) -> Self {
        Self::from((self as f32).to_bf16())
    }

    fn bf16_bits(self) -> Option<u16> {
        let single = self as f32;
        (self.is_nan() || Self::from(single) == self).then(|| single.bf16_bits()).flatten()
    }

    fn from_bf16_bits(bits: u16) -> Self {
        Self::from(f32::from_bf16_bits(bits))
    }

    fn write_all(values: &[Self], memory: &mut [u8]) {
        let places = memory.as_chunks_mut::<{ size_of::<Self>() }>().0;
        places.iter_mut().zip(values).for_each(|(place, value)| *place = value.to_le_bytes());
    }

    fn read_all(memory: &[u8]) -> Vec<Self> {
        memory.as_chunks().0.iter().map(|&place| Self::from_le_bytes(place)).collect()
    }
}

/// Bytes of a number in bf16.
pub(crate) const BF16_BYTES: u64 = 2;

/// No number, quietly.
const BF16_NAN: u16 = 0x7fc0;

/// How what a rank holds lies in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    /// Integers of the batch, of eight bytes.
    Integer,
    /// Numbers as they are computed with.
    Full,
    /// Numbers in two bytes.
    Bf16,
}

impl Width {
    /// Bytes of one element, where numbers are computed with in `full` bytes.
    pub(crate) fn bytes(self, full: u64) -> u64 {
        match self {
            Self::Integer => size_of::<i64>() as u64,
            Self::Full => full,
            Self::Bf16 => BF16_BYTES,
        }
    }
}

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
    fn two_bytes_hold_what_bf16_has_and_nothing_else() {
        for value in [0.0, -0.0, 1.0, -1.0078125, f32::INFINITY, 1e-40_f32.to_bf16()] {
            let bits = value.bf16_bits().unwrap();
            assert_eq!(f32::from_bf16_bits(bits).to_bits(), value.to_bits(), "{value}");
            assert_eq!(f64::from(value).bf16_bits(), Some(bits), "{value}");
        }
        assert!(f64::from_bf16_bits(f64::NAN.bf16_bits().unwrap()).is_nan());
        assert_eq!(1.001_f32.bf16_bits(), None);
        assert_eq!((1.0 + f64::EPSILON).bf16_bits(), None);
    }

    #[test]
    fn a_nan_survives_the_maximum_from_either_side() {
        assert!(Reduce::Max.combine(f64::NAN, 1.0).is_nan());
        assert!(Reduce::Max.combine(1.0, f64::NAN).is_nan());
        assert_eq!(Reduce::Max.combine(2.0_f32, 1.0), 2.0);
        assert_eq!(Reduce::Max.combine(1.0_f32, 2.0), 2.0);
    }
}
