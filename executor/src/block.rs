//! Blocks: which part of a tensor a device holds, and cutting and joining such parts.
//!
//! A block is one range of rows per dim. Whatever axes a tensor is cut by, in whatever order, unevenly or not, the
//! parts that a collective moves are intersections of two blocks; nothing here knows about axes.

use std::ops::Range;

use ndarray::{ArrayD, IxDyn, Slice};

use ir::mesh::Mesh;
use ir::sharding::Sharding;

/// A part of a tensor: one range of rows per dim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block(Vec<Range<usize>>);

impl Block {
    /// What the device at `coordinates` holds of a tensor.
    pub(crate) fn of(sharding: Sharding, mesh: &Mesh, coordinates: &[u64], shape: &[u64]) -> Self {
        let range = |(dim, &size): (usize, &u64)| {
            let rows = sharding.local_range(mesh, coordinates, dim, size);
            rows.start as usize..rows.end as usize
        };
        Self(shape.iter().enumerate().map(range).collect())
    }

    /// Lengths of the dims.
    pub(crate) fn shape(&self) -> Vec<usize> {
        self.0.iter().map(Range::len).collect()
    }

    /// Rows of every dim.
    pub(crate) fn rows(&self) -> Vec<Range<u64>> {
        self.0.iter().map(|rows| rows.start as u64..rows.end as u64).collect()
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(Range::len).product()
    }

    /// First row of the first dim; of a flattened block, its first element.
    pub(crate) fn start(&self) -> usize {
        self.0.first().map_or(0, |rows| rows.start)
    }

    /// Rows that both hold; where they have none in common, an empty block within `self`.
    pub(crate) fn intersection(&self, other: &Self) -> Self {
        let both = |(a, b): (&Range<usize>, &Range<usize>)| {
            let start = a.start.max(b.start).min(a.end);
            start..a.end.min(b.end).max(start)
        };
        Self(self.0.iter().zip(&other.0).map(both).collect())
    }

    /// The part of `tensor`, which is this block, that is `part`.
    pub(crate) fn cut<A: Clone>(&self, tensor: &ArrayD<A>, part: &Self) -> ArrayD<A> {
        tensor.slice_each_axis(|axis| self.slice(axis.axis.index(), part)).as_standard_layout().into_owned()
    }

    /// Writes `values`, which are `part` in index order, into `tensor`, which is this block.
    ///
    /// The number of values must be that of the part; the collectives check it.
    pub(crate) fn paste<A: Clone>(&self, tensor: &mut ArrayD<A>, part: &Self, values: Vec<A>) {
        let mut target = tensor.slice_each_axis_mut(|axis| self.slice(axis.axis.index(), part));
        if let Ok(values) = ArrayD::from_shape_vec(IxDyn(&part.shape()), values) {
            target.assign(&values);
        }
    }

    /// Positions in the whole tensor, in index order, of the elements of this block.
    pub(crate) fn positions(&self, shape: &[u64]) -> Vec<usize> {
        let extend = |starts: Vec<usize>, (rows, &size): (&Range<usize>, &u64)| {
            starts.iter().flat_map(|start| rows.clone().map(move |row| start * size as usize + row)).collect()
        };
        self.0.iter().zip(shape).fold(vec![0], extend)
    }

    fn slice(&self, dim: usize, part: &Self) -> Slice {
        let offset = self.0[dim].start;
        Slice::from(part.0[dim].start - offset..part.0[dim].end - offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_cut_from_one_block_fits_into_another() {
        let (left, right) = (Block(vec![0..2, 2..5]), Block(vec![1..3, 0..4]));
        let tensor = ArrayD::from_shape_fn(IxDyn(&[2, 3]), |i| 10 * i[0] + i[1] + 2);
        let part = left.intersection(&right);
        assert_eq!(part, Block(vec![1..2, 2..4]));
        let values = left.cut(&tensor, &part);
        assert_eq!(values.iter().copied().collect::<Vec<_>>(), [12, 13]);
        let mut target = ArrayD::zeros(IxDyn(&[2, 4]));
        right.paste(&mut target, &part, values.into_iter().collect());
        assert_eq!(target.iter().copied().collect::<Vec<_>>(), [0, 0, 12, 13, 0, 0, 0, 0]);
        assert_eq!(part.positions(&[3, 5]), [7, 8]);
    }

    #[test]
    fn blocks_apart_have_an_empty_intersection() {
        let (first, last) = (Block(vec![0..2, 0..1]), Block(vec![4..6, 0..1]));
        assert_eq!(first.intersection(&last), Block(vec![2..2, 0..1]));
        assert_eq!(last.intersection(&first), Block(vec![4..4, 0..1]));
    }
}
