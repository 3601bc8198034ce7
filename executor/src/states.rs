//! What training carries from one step to the next: parameters, the moments of their updates, and how far it has come.
//!
//! [`States`] are whole tensors, the same whatever plan made them; a [`Shard`] is what one rank holds of one parameter.
//! A parameter may have no moments: the copy of a tie has none, and one that is never updated needs none.

use std::collections::BTreeMap;
use std::ops::Range;

use ndarray::ArrayD;

use crate::run::{ParameterName, Tensors};

/// Everything that training needs to go on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct States {
    /// Updates so far.
    pub steps: u64,
    /// Sequences so far: the data goes on behind them.
    pub sequences: u64,
    /// Parameters as they are updated, in full precision.
    pub parameters: Tensors,
    /// First and second moments of the update.
    pub moments: BTreeMap<ParameterName, Moments>,
}

impl States {
    /// The same with every parameter moved by this share of itself, up or down as its place in the tensor has it.
    ///
    /// Not all one way: norms would not feel it.
    #[must_use]
    pub fn shaken(&self, share: f64) -> Self {
        let mut shaken = self.clone();
        for tensor in shaken.parameters.values_mut() {
            for (i, value) in tensor.iter_mut().enumerate() {
                // Ones in the binary form of a number, odd or even: the Thue-Morse sequence, which has no period.
                let sign = if i.count_ones() % 2 == 0 { 1.0 } else { -1.0 };
                *value *= 1.0 + sign * share;
            }
        }
        shaken
    }
}

/// Running moments of a parameter's gradient, whole.
#[derive(Clone, Debug, PartialEq)]
pub struct Moments {
    /// Of the gradient.
    pub first: ArrayD<f64>,
    /// Of its square.
    pub second: ArrayD<f64>,
}

/// What a rank holds of a parameter where that is updated: a run of the flattened block that it uses.
#[derive(Clone, Debug, PartialEq)]
pub struct Shard {
    /// The parameter.
    pub name: ParameterName,
    /// Lengths of its dims.
    pub shape: Vec<u64>,
    /// Rows of every dim that the rank uses.
    pub block: Vec<Range<u64>>,
    /// Elements of the flattened block that it updates.
    pub elements: Range<u64>,
    /// Their values.
    pub values: Vec<f64>,
    /// Their first and second moments, where it has any.
    pub moments: Option<[Vec<f64>; 2]>,
}
