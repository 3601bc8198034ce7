//! Where the parts of a tensor live: per mesh axis `Shard(dim)`, `Replicate` or `Partial`.
//!
//! A dim sharded by several axes is cut in mesh order, the outer axis first (major), and each block again by the next.
//! Blocks may be unequal: with `n` rows over `p` coordinates, coordinate `i` holds rows `i*ceil(n/p)` up to the end or
//! the next block.

use std::ops::Range;

use crate::mesh::{AxisId, MAX_AXES, Mesh};

/// Placement of a tensor along one mesh axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Placement {
    /// Every coordinate holds the same.
    Replicate,
    /// Every coordinate holds its block of this dim.
    Shard(u8),
    /// Every coordinate holds a term; the tensor is their sum.
    PartialSum,
    /// Every coordinate holds a candidate; the tensor is their elementwise maximum.
    PartialMax,
}

impl Placement {
    /// True for an unfinished reduction.
    pub fn is_partial(self) -> bool {
        matches!(self, Self::PartialSum | Self::PartialMax)
    }

    /// The placement in which the gradient of a value of this placement must arrive.
    ///
    /// Shard keeps its blocks; a replicated value's gradient is whole; each term of a sum has the gradient of the sum.
    #[must_use]
    pub fn dual(self) -> Self {
        match self {
            Self::Shard(dim) => Self::Shard(dim),
            Self::Replicate | Self::PartialSum | Self::PartialMax => Self::Replicate,
        }
    }
}

/// Placement of one tensor on every axis of a mesh; axes past the mesh's last are `Replicate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sharding(pub [Placement; MAX_AXES]);

impl Sharding {
    /// Whole on every device.
    pub const REPLICATED: Self = Self([Placement::Replicate; MAX_AXES]);

    /// A number of its own for every sharding of up to 253 dims: a byte an axis. Cheap to compare, and to look up by.
    pub fn code(self) -> u32 {
        let byte = |placement: Placement| match placement {
            Placement::Replicate => 0,
            Placement::PartialSum => 1,
            Placement::PartialMax => 2,
            Placement::Shard(dim) => u32::from(dim) + 3,
        };
        self.0.into_iter().fold(0, |code, placement| code << 8 | byte(placement))
    }

    /// Placement along an axis.
    pub fn on(&self, axis: AxisId) -> Placement {
        self.0[axis.0]
    }

    /// The same sharding with another placement along one axis.
    #[must_use]
    pub fn with(mut self, axis: AxisId, placement: Placement) -> Self {
        self.0[axis.0] = placement;
        self
    }

    /// Axes that cut a dim, major first.
    pub fn axes_of(&self, dim: usize) -> impl Iterator<Item = AxisId> + '_ {
        (0..MAX_AXES).map(AxisId).filter(move |&axis| self.on(axis) == Placement::Shard(dim as u8))
    }

    /// Axes on which the tensor is an unfinished sum.
    pub fn partial_axes(&self) -> Vec<AxisId> {
        (0..MAX_AXES).map(AxisId).filter(|&axis| self.on(axis).is_partial()).collect()
    }

    /// Sharding in which the gradient must arrive.
    #[must_use]
    pub fn dual(self) -> Self {
        Self(self.0.map(Placement::dual))
    }

    /// Largest local size of a dim of `size`: the first block's.
    pub fn local_size(&self, mesh: &Mesh, dim: usize, size: u64) -> u64 {
        self.axes_of(dim).fold(size, |rows, axis| rows.div_ceil(mesh.size(axis)))
    }

    /// Largest number of elements one device holds.
    pub fn local_elements(&self, mesh: &Mesh, shape: &[u64]) -> u64 {
        shape.iter().enumerate().map(|(dim, &size)| self.local_size(mesh, dim, size)).product()
    }

    /// Rows of a dim that the device at `coordinates` holds.
    pub fn local_range(&self, mesh: &Mesh, coordinates: &[u64], dim: usize, size: u64) -> Range<u64> {
        let mut range = 0..size;
        let mut nominal = size;
        for axis in self.axes_of(dim) {
            nominal = nominal.div_ceil(mesh.size(axis));
            let start = (range.start + coordinates[axis.0] * nominal).min(range.end);
            range = start..(start + nominal).min(range.end);
        }
        range
    }

    /// Text form: the dims with their sizes and axes, then the partial axes: `[b:8@x0 s:16 h:4] sum@x1`.
    pub fn display(&self, mesh: &Mesh, dims: &[(&str, u64)]) -> String {
        let name = |axis: AxisId| mesh.axes[axis.0].name.as_str();
        let list: Vec<String> = dims
            .iter()
            .enumerate()
            .map(|(dim, (label, size))| {
                let axes: Vec<&str> = self.axes_of(dim).map(name).collect();
                let at = if axes.is_empty() { String::new() } else { format!("@{}", axes.join(",")) };
                format!("{label}:{size}{at}")
            })
            .collect();
        let mut text = format!("[{}]", list.join(" "));
        for axis in mesh.axis_ids() {
            match self.on(axis) {
                Placement::PartialSum => text += &format!(" sum@{}", name(axis)),
                Placement::PartialMax => text += &format!(" max@{}", name(axis)),
                Placement::Replicate | Placement::Shard(_) => {}
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(dim: u8) -> Placement {
        Placement::Shard(dim)
    }

    #[test]
    fn every_sharding_has_a_code_of_its_own() {
        let options =
            [Placement::Replicate, Placement::PartialSum, Placement::PartialMax, shard(0), shard(1)];
        let of = |at: usize| Sharding([0, 1, 2, 3].map(|axis| options[at / 5_usize.pow(axis) % 5]));
        let codes: std::collections::BTreeSet<u32> = (0..625).map(|at| of(at).code()).collect();
        assert_eq!(codes.len(), 625);
    }

    #[test]
    fn unequal_blocks_cover_every_row_once() {
        let mesh = Mesh::of_sizes(&[2, 3]).unwrap();
        let sharding = Sharding::REPLICATED.with(AxisId(0), shard(0)).with(AxisId(1), shard(0));
        let ranges: Vec<_> =
            (0..6).map(|rank| sharding.local_range(&mesh, &mesh.coordinates(rank), 0, 11)).collect();
        assert_eq!(ranges, [0..2, 2..4, 4..6, 6..8, 8..10, 10..11]);
    }

    #[test]
    fn the_dual_of_a_sum_is_whole() {
        let value = Sharding::REPLICATED.with(AxisId(0), shard(1)).with(AxisId(1), Placement::PartialSum);
        assert_eq!(value.dual(), Sharding::REPLICATED.with(AxisId(0), shard(1)));
    }

    #[test]
    fn the_text_form_names_axes_and_unfinished_sums() {
        let mesh = Mesh::of_sizes(&[2, 2]).unwrap();
        let value = Sharding::REPLICATED.with(AxisId(0), shard(0)).with(AxisId(1), Placement::PartialSum);
        assert_eq!(value.display(&mesh, &[("b", 8), ("s", 16)]), "[b:8@x0 s:16] sum@x1");
    }
}
