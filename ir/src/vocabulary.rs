//! A vocabulary of a round number of entries, as engines pad it: products with aligned rows, and equal blocks of them.

use std::fmt;

use crate::graph::{DimId, Extent, Layer, Model};
use crate::op::OpKind;

/// What Megatron-LM pads to where nobody says otherwise (`make_vocab_size_divisible_by`): up to 16 blocks of it have rows
/// of whole 16 bytes in 16 bits.
pub const MULTIPLE: u64 = 128;

/// A vocabulary that was padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Padded {
    /// Entries of the model.
    pub entries: u64,
    /// Rows of its tables now.
    pub rows: u64,
}

impl fmt::Display for Padded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the vocabulary of {} is padded to {}", self.entries, self.rows)
    }
}

/// Pads every vocabulary of a model to a multiple of so many entries, as a model of that size: the added entries are never
/// asked for, and training drives their scores down. Those that were none are told, each once.
pub fn pad(model: &mut Model, multiple: u64) -> Vec<Padded> {
    let mut padded = Vec::new();
    for layer in &mut model.layers {
        for dim in vocabularies(layer) {
            let Extent::Uneven(entries) = layer.dims[dim.0].extent else { continue };
            let Some(rows) = entries.checked_next_multiple_of(multiple).filter(|&rows| rows > entries) else {
                continue;
            };
            layer.dims[dim.0].extent = Extent::Uneven(rows);
            let one = Padded { entries, rows };
            if !padded.contains(&one) {
                padded.push(one);
            }
        }
    }
    padded
}

/// Dims that count the rows of an embedding table or the scores of a token.
fn vocabularies(layer: &Layer) -> Vec<DimId> {
    let of_op = |(kind, operand): (&OpKind, usize), dims: fn(&[DimId]) -> Option<&DimId>| {
        let ops = layer.ops.iter().filter(move |op| op.kind == *kind);
        let found = ops.filter_map(move |op| dims(&layer.tensors[op.operands.get(operand)?.0].dims).copied());
        found.collect::<Vec<_>>()
    };
    [of_op((&OpKind::Embed, 1), <[DimId]>::first), of_op((&OpKind::Pick, 0), <[DimId]>::last)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::samples::{Family, Sample};

    fn model(vocabulary: u64) -> Model {
        Sample { vocabulary, ..Sample::new(Family::Dense, &[]) }.model()
    }

    #[test]
    fn a_vocabulary_is_padded_wherever_it_stands() {
        let mut odd = model(1001);
        assert_eq!(pad(&mut odd, 128), [Padded { entries: 1001, rows: 1024 }]);
        assert_eq!(odd, model(1024));
        assert_eq!(pad(&mut odd, 128), []);
    }

    #[test]
    fn a_multiple_of_one_keeps_it() {
        let mut odd = model(1001);
        assert_eq!(pad(&mut odd, 1), []);
        assert_eq!(odd, model(1001));
    }
}
