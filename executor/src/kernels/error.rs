//! Why a kernel refuses a call: it names the operator and what does not fit.

use thiserror::Error;

/// A call that no kernel can run. Only an error in the program that made the call leads here, never a model.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum KernelError {
    /// The wrong number of operands, results, gradients or blocks.
    #[error("operator `{op}`: {found} {what}, expected {expected}")]
    Count {
        /// Operator.
        op: &'static str,
        /// Of what.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: usize,
    },
    /// An operand that the kernel reads was not given.
    #[error("operator `{op}`: operand {operand} is needed and was not given")]
    Missing {
        /// Operator.
        op: &'static str,
        /// Position of the operand.
        operand: usize,
    },
    /// Integers in the place of numbers, or the reverse.
    #[error("operator `{op}`: operand {operand} must hold {expected}")]
    Type {
        /// Operator.
        op: &'static str,
        /// Position of the operand.
        operand: usize,
        /// What it should hold.
        expected: &'static str,
    },
    /// A shape that the blocks do not imply.
    #[error("operator `{op}`: {what} {position} has shape {found:?}, expected {expected:?}")]
    Shape {
        /// Operator.
        op: &'static str,
        /// Operand, result or gradient.
        what: &'static str,
        /// Position of it.
        position: usize,
        /// Shape it has.
        found: Vec<usize>,
        /// Shape it should have.
        expected: Vec<usize>,
    },
    /// An integer that points outside its table.
    #[error("operator `{op}`: row {row} of a table of {rows} rows")]
    OutOfTable {
        /// Operator.
        op: &'static str,
        /// The row asked for.
        row: i64,
        /// Rows of the table.
        rows: usize,
    },
    /// A signature or an attribute that does not fit the kind.
    #[error("operator `{op}`: {what}")]
    Unfit {
        /// Operator.
        op: &'static str,
        /// What does not fit.
        what: &'static str,
    },
}
