//! A vocabulary of a round number of entries, as engines pad it: products with aligned rows, and equal blocks of them.

use std::collections::BTreeSet;
use std::fmt;

use crate::graph::{DimId, Extent, Layer, Model, Op};
use crate::op::OpKind;

/// What Megatron-LM pads to where nobody says otherwise (`make_vocab_size_divisible_by`): up to 16 blocks of it have
/// rows of whole 16 bytes in 16 bits.
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

/// Pads every vocabulary of a model to a multiple of so many entries, as a model of that size: the added entries are
/// never asked for, and training drives their scores down. Those that were none are told, each once.
///
/// Scores may be handed on from layer to layer, so every `uneven` dim as long as a vocabulary is one.
pub fn pad(model: &mut Model, multiple: u64) -> Vec<Padded> {
    let to_pad = |entries: u64| {
        let rows = entries.checked_next_multiple_of(multiple)?;
        (rows > entries).then_some(Padded { entries, rows })
    };
    let all: BTreeSet<u64> = model.layers.iter().flat_map(vocabularies).collect();
    let padded: Vec<Padded> = all.into_iter().filter_map(to_pad).collect();
    for dim in model.layers.iter_mut().flat_map(|layer| &mut layer.dims) {
        let found = padded.iter().find(|one| dim.extent == Extent::Uneven(one.entries));
        if let Some(found) = found {
            dim.extent = Extent::Uneven(found.rows);
        }
    }
    padded
}

/// Lengths of the `uneven` dims that count the rows of an embedding table or the scores of a token.
fn vocabularies(layer: &Layer) -> Vec<u64> {
    let length = |dim: Option<&DimId>| match layer.dims[dim?.0].extent {
        Extent::Uneven(entries) => Some(entries),
        Extent::Fixed(_)
        | Extent::Sequence
        | Extent::UpToSlice
        | Extent::MicroBatch
        | Extent::Slots { .. } => None,
    };
    let of_op = |op: &Op| {
        let dims = |operand: usize| Some(&layer.tensors[op.operands.get(operand)?.0].dims);
        let rows = (op.kind == OpKind::Embed).then(|| length(dims(1)?.first()));
        let scores = (op.kind == OpKind::Pick).then(|| length(dims(0)?.last()));
        rows.or(scores).flatten()
    };
    layer.ops.iter().filter_map(of_op).collect()
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
