//! What operators read and write: numbers, or the integers of the batch.

use ndarray::ArrayD;

/// Numbers: activations, parameters, gradients, and buffers such as slopes.
pub type Tensor<T> = ArrayD<T>;

/// Integers: tokens, labels, positions.
pub type Index = ArrayD<i64>;

/// An operand or a result of an operator.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<T> {
    /// Numbers.
    Float(Tensor<T>),
    /// Integers.
    Index(Index),
}

impl<T> Value<T> {
    /// Lengths of the dims.
    pub fn shape(&self) -> &[usize] {
        match self {
            Value::Float(tensor) => tensor.shape(),
            Value::Index(index) => index.shape(),
        }
    }

    /// The numbers, if it holds numbers.
    pub fn as_float(&self) -> Option<&Tensor<T>> {
        match self {
            Value::Float(tensor) => Some(tensor),
            Value::Index(_) => None,
        }
    }

    /// The integers, if it holds integers.
    pub fn as_index(&self) -> Option<&Index> {
        match self {
            Value::Float(_) => None,
            Value::Index(index) => Some(index),
        }
    }

    /// The numbers, if it holds numbers.
    pub fn into_float(self) -> Option<Tensor<T>> {
        match self {
            Value::Float(tensor) => Some(tensor),
            Value::Index(_) => None,
        }
    }
}

impl<T> From<Tensor<T>> for Value<T> {
    fn from(tensor: Tensor<T>) -> Self {
        Value::Float(tensor)
    }
}
