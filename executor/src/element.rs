//! The numbers that ranks compute with and send, and how two of them are combined.

use std::fmt;

use ndarray::NdFloat;

/// An executed number type. One element moves `size_of::<Self>()` bytes, whatever the plan's own precision.
pub trait Element: NdFloat {}

impl Element for f32 {}
impl Element for f64 {}

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

    #[test]
    fn a_nan_survives_the_maximum_from_either_side() {
        assert!(Reduce::Max.combine(f64::NAN, 1.0).is_nan());
        assert!(Reduce::Max.combine(1.0, f64::NAN).is_nan());
        assert_eq!(Reduce::Max.combine(2.0_f32, 1.0), 2.0);
        assert_eq!(Reduce::Max.combine(1.0_f32, 2.0), 2.0);
    }
}
