//! From what the ranks hold to whole tensors; where several hold the same element, they must hold the same number.

use std::collections::BTreeMap;

use ir::program::AxisSet;
use ir::sharding::Sharding;
use ndarray::{ArrayD, IxDyn};

use crate::convert::Seat;
use crate::error::ExecutorError;
use crate::prepare::ParameterKey;
use crate::update::flat_cut;

/// How a parameter, or its gradient, lies on the ranks of its stage.
pub(crate) struct Layout {
    /// In words, for errors.
    pub(crate) what: String,
    /// Lengths of the whole tensor's dims.
    pub(crate) shape: Vec<u64>,
    /// Block in use.
    pub(crate) used: Sharding,
    /// Cut of the flattened block.
    pub(crate) cut: AxisSet,
}

/// Joins the parts that ranks hold; `parts` are a rank with its map of parts.
pub(crate) fn assemble(
    seats: &[Seat<'_>],
    parts: &[&BTreeMap<ParameterKey, Vec<f64>>],
    key: ParameterKey,
    layout: &Layout,
) -> Result<ArrayD<f64>, ExecutorError> {
    let shape: Vec<usize> = layout.shape.iter().map(|&n| n as usize).collect();
    let mut whole: Vec<Option<(usize, f64)>> = vec![None; shape.iter().product()];
    for (rank, (seat, parts)) in seats.iter().zip(parts).enumerate() {
        let Some(values) = parts.get(&key) else { continue };
        let block = seat.block(layout.used, &layout.shape);
        let positions = block.positions(&layout.shape);
        let cut = flat_cut(seat, positions.len() as u64, layout.cut);
        for (&element, &value) in positions[cut.start()..].iter().zip(values) {
            match whole[element] {
                Some((other, held)) if held != value && !(held.is_nan() && value.is_nan()) => {
                    let (ranks, values) = ((other, rank), (held, value));
                    return Err(ExecutorError::Disagreement {
                        what: layout.what.clone(),
                        element,
                        ranks,
                        values,
                    });
                }
                Some(_) => {}
                None => whole[element] = Some((rank, value)),
            }
        }
    }
    let hole = |element| ExecutorError::Hole { what: layout.what.clone(), element };
    let values =
        whole.into_iter().enumerate().map(|(i, held)| held.map(|(_, value)| value).ok_or_else(|| hole(i)));
    let values = values.collect::<Result<Vec<f64>, _>>()?;
    ArrayD::from_shape_vec(IxDyn(&shape), values).map_err(|_| hole(0))
}
