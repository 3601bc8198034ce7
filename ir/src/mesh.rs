//! A mesh: an ordered list of device axes, outermost (slowest links) first, and the ranks' coordinates on it.
//!
//! Rank numbering is row-major: the last axis has stride one.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Longest list of axes a mesh may have. Four hold every combination that has been published for one operator
/// (data, context and two tensor axes); the search grows with the fourth power of it.
pub const MAX_AXES: usize = 4;

/// Position of an axis in its mesh, outermost zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AxisId(pub usize);

/// One axis of a mesh.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeshAxis {
    /// Name shown in plans: a letter, never a parallelism, for the search does not know one.
    pub name: String,
    /// Devices along the axis.
    pub size: u64,
}

/// The devices of one stage, seen as a grid.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Mesh {
    /// Axes, outermost first; at most [`MAX_AXES`].
    pub axes: Vec<MeshAxis>,
}

/// The meshes of the stages of a pipeline, of which each is the ranks behind those of the stages before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Meshes<'m> {
    /// That of all, or of the first.
    pub alike: &'m Mesh,
    /// That of each; nothing where all have the first.
    pub each: &'m [Mesh],
}

impl<'m> Meshes<'m> {
    /// Stages that all have one mesh.
    pub fn all(alike: &'m Mesh) -> Self {
        Self { alike, each: &[] }
    }

    /// Mesh of a stage.
    pub fn of(self, stage: u64) -> &'m Mesh {
        self.each.get(stage as usize).unwrap_or(self.alike)
    }

    /// The first rank of a stage, which is also the number of ranks before it.
    ///
    /// Of meshes of 4, 4 and 2 devices, the third begins with rank 8.
    pub fn first(self, stage: u64) -> u64 {
        match self.each {
            [] => stage * self.alike.n_devices(),
            each => each.iter().take(stage as usize).map(Mesh::n_devices).sum(),
        }
    }

    /// The ranks of a stage.
    pub fn ranks(self, stage: u64) -> Range<u64> {
        self.first(stage)..self.first(stage + 1)
    }

    /// The stage that has a rank, and the rank's position there.
    pub fn seat(self, rank: u64) -> (u64, u64) {
        let mut first = 0;
        for (stage, mesh) in (0..).zip(self.each) {
            let next = first + mesh.n_devices();
            if rank < next {
                return (stage, rank - first);
            }
            first = next;
        }
        let n = self.alike.n_devices().max(1);
        (self.each.len() as u64 + (rank - first) / n, (rank - first) % n)
    }
}

impl Mesh {
    /// A mesh of the given sizes with axes named `x0`, `x1`, … from the outermost.
    ///
    /// Returns `None` for more than [`MAX_AXES`] axes or a size of zero.
    pub fn of_sizes(sizes: &[u64]) -> Option<Self> {
        if sizes.len() > MAX_AXES || sizes.contains(&0) {
            return None;
        }
        let axes =
            sizes.iter().enumerate().map(|(i, &size)| MeshAxis { name: format!("x{i}"), size }).collect();
        Some(Self { axes })
    }

    /// Number of axes.
    pub fn n_axes(&self) -> usize {
        self.axes.len()
    }

    /// Devices of the mesh.
    pub fn n_devices(&self) -> u64 {
        self.axes.iter().map(|axis| axis.size).product()
    }

    /// Devices along an axis.
    pub fn size(&self, axis: AxisId) -> u64 {
        self.axes[axis.0].size
    }

    /// Distance in ranks between neighbours along an axis.
    pub fn stride(&self, axis: AxisId) -> u64 {
        self.axes[axis.0 + 1..].iter().map(|inner| inner.size).product()
    }

    /// Axis positions, outermost first.
    pub fn axis_ids(&self) -> impl DoubleEndedIterator<Item = AxisId> + use<> {
        (0..self.axes.len()).map(AxisId)
    }

    /// Coordinates of a rank, one per axis.
    pub fn coordinates(&self, rank: u64) -> Vec<u64> {
        self.axis_ids().map(|axis| rank / self.stride(axis) % self.size(axis)).collect()
    }

    /// Ranks that differ from `rank` only along `axes`, in row-major order of those axes.
    ///
    /// ```
    /// let mesh = ir::mesh::Mesh::of_sizes(&[2, 2, 2]).expect("three axes");
    /// assert_eq!(mesh.group(5, &[ir::mesh::AxisId(0), ir::mesh::AxisId(2)]), [0, 1, 4, 5]);
    /// ```
    pub fn group(&self, rank: u64, axes: &[AxisId]) -> Vec<u64> {
        let mut sorted = axes.to_vec();
        sorted.sort_unstable();
        let own: u64 = sorted.iter().map(|&a| rank / self.stride(a) % self.size(a) * self.stride(a)).sum();
        let mut group = vec![rank - own];
        for axis in sorted {
            group = group
                .iter()
                .flat_map(|&start| (0..self.size(axis)).map(move |i| (start, i)))
                .map(|(start, i)| start + i * self.stride(axis))
                .collect();
        }
        group
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_axis_has_stride_one() {
        let mesh = Mesh::of_sizes(&[2, 3, 4]).unwrap();
        assert_eq!(mesh.coordinates(23), [1, 2, 3]);
        assert_eq!(mesh.group(17, &[AxisId(2)]), [16, 17, 18, 19]);
        assert_eq!(mesh.group(17, &[AxisId(0)]), [5, 17]);
    }
}
