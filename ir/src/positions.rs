//! Tables of learned positions: a sequence is no longer than what they have rows for.

use std::fmt;

use crate::graph::{Extent, Layer, Model};
use crate::op::OpKind;

/// A table that is too short for a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TooShort {
    /// Name of the layer.
    pub layer: String,
    /// Name of the table.
    pub table: String,
    /// Rows it has.
    pub rows: u64,
    /// Rows it needs: one for every token of the sequence or place of a fixed length, and those that are skipped.
    pub needed: u64,
}

impl fmt::Display for TooShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layer, table, rows, needed } = self;
        write!(f, "the learned positions `{table}` of layer `{layer}` need {needed} rows and have {rows}")
    }
}

/// The first table of a layer that a sequence of so many tokens does not fit.
pub fn too_short(layer: &Layer, sequence: u64) -> Option<TooShort> {
    layer.ops.iter().find_map(|op| {
        let OpKind::AddPosition { offset } = op.kind else { return None };
        let table = &layer.tensors[op.operands.get(2)?.0];
        let Extent::Fixed(rows) = layer.dims[table.dims.first()?.0].extent else { return None };
        let along = layer.tensors[op.operands.get(1)?.0].dims.first()?;
        let places = match layer.dims[along.0].extent {
            Extent::Fixed(length) => length,
            Extent::Sequence
            | Extent::UpToSlice
            | Extent::Uneven(_)
            | Extent::MicroBatch
            | Extent::Slots { .. } => sequence,
        };
        let needed = places.saturating_add(offset);
        let short = TooShort { layer: layer.name.clone(), table: table.name.clone(), rows, needed };
        (rows < needed).then_some(short)
    })
}

/// Gives every table of learned positions the rows that a sequence needs, as training with longer sequences from the
/// start does; the tables that were too short are told.
pub fn lengthen(model: &mut Model, sequence: u64) -> Vec<TooShort> {
    let mut lengthened = Vec::new();
    for layer in &mut model.layers {
        while let Some(short) = too_short(layer, sequence) {
            let table = layer.tensors.iter().find(|tensor| tensor.name == short.table);
            let Some(&rows) = table.and_then(|table| table.dims.first()) else { break };
            layer.dims[rows.0].extent = Extent::Fixed(short.needed);
            lengthened.push(short);
        }
    }
    lengthened
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::samples::{Family, Sample};

    #[test]
    fn a_table_grows_to_the_sequence_and_no_further() {
        let mut model = Sample::new(Family::Dense, &[]).model();
        assert_eq!(lengthen(&mut model, 128), []);
        let short = lengthen(&mut model, 200);
        assert_eq!((short.len(), short[0].needed), (1, 202));
        assert!(model.layers.iter().all(|layer| too_short(layer, 200).is_none()));
        assert!(model.layers.iter().any(|layer| too_short(layer, 201).is_some()));
    }
}
