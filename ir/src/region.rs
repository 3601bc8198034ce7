//! Regions of a tensor: one range of rows per dim, and the regions that a run of a flattened block is made of.
//!
//! States are cut along the flattened local block of a parameter. Such a run of elements, seen in the whole tensor, is
//! a few regions: at most two per dim but the last, so that sizes of any magnitude are counted without a list of
//! elements.

use std::ops::Range;

use crate::mesh::Mesh;
use crate::program::AxisSet;
use crate::sharding::{Placement, Sharding};

/// A part of a tensor: one range of rows per dim.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Region(pub Vec<(u64, u64)>);

impl Region {
    /// All of a tensor.
    pub fn whole(shape: &[u64]) -> Self {
        Self(shape.iter().map(|&n| (0, n)).collect())
    }

    /// The block that the device at `coordinates` holds of a tensor.
    pub fn of(sharding: Sharding, mesh: &Mesh, coordinates: &[u64], shape: &[u64]) -> Self {
        let rows = |(dim, &size): (usize, &u64)| {
            let range = sharding.local_range(mesh, coordinates, dim, size);
            (range.start, range.end)
        };
        Self(shape.iter().enumerate().map(rows).collect())
    }

    /// Elements.
    pub fn volume(&self) -> u64 {
        self.0.iter().map(|(start, end)| end.saturating_sub(*start)).product()
    }

    /// Elements that both have, without a region of them: 0 as soon as one dim says so.
    pub fn common(&self, other: &Self) -> u64 {
        let mut volume = 1;
        for (a, b) in self.0.iter().zip(&other.0) {
            let rows = a.1.min(b.1).saturating_sub(a.0.max(b.0));
            if rows == 0 {
                return 0;
            }
            volume *= rows;
        }
        volume
    }

    /// What both have, if anything.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let rows = |(a, b): (&(u64, u64), &(u64, u64))| (a.0.max(b.0), a.1.min(b.1));
        let both = Self(self.0.iter().zip(&other.0).map(rows).collect());
        (self.common(other) > 0).then_some(both)
    }

    /// The regions of a run of this block's elements in index order.
    ///
    /// Elements 2 to 7 of a 3 x 3 block: the end of row 0, row 1, and the start of row 2.
    pub fn run(&self, elements: Range<u64>) -> Vec<Self> {
        let mut regions = Vec::new();
        let end = elements.end.min(self.volume());
        if elements.start < end {
            self.add_run(&mut Vec::new(), elements.start..end, &mut regions);
        }
        regions
    }

    /// Adds the regions of a run within the rows already fixed.
    fn add_run(&self, fixed: &mut Vec<(u64, u64)>, elements: Range<u64>, regions: &mut Vec<Self>) {
        let dim = fixed.len();
        let Some(&(first, _)) = self.0.get(dim) else {
            regions.push(Self(fixed.clone()));
            return;
        };
        let stride: u64 = self.0[dim + 1..].iter().map(|(start, end)| end - start).product::<u64>().max(1);
        let mut within = |row: u64, part: Range<u64>| {
            fixed.push((first + row, first + row + 1));
            self.add_run(fixed, part, regions);
            fixed.pop();
        };
        let (head, tail) = (elements.start.div_ceil(stride), elements.end / stride);
        if head > tail {
            let row = elements.start / stride;
            return within(row, elements.start - row * stride..elements.end - row * stride);
        }
        if elements.start < head * stride {
            within(head - 1, elements.start - (head - 1) * stride..stride);
        }
        if tail * stride < elements.end {
            within(tail, 0..elements.end - tail * stride);
        }
        if head < tail {
            let mut rows = fixed.clone();
            rows.push((first + head, first + tail));
            rows.extend_from_slice(&self.0[dim + 1..]);
            regions.push(Self(rows));
        }
    }
}

/// The run of a flattened block of `elements` that a cut by axes leaves to the device at `coordinates`.
pub fn cut_run(mesh: &Mesh, coordinates: &[u64], elements: u64, cut: AxisSet) -> Range<u64> {
    let axes = cut.axes().into_iter();
    let cut = axes.fold(Sharding::REPLICATED, |sharding, axis| sharding.with(axis, Placement::Shard(0)));
    cut.local_range(mesh, coordinates, 0, elements)
}

/// A parameter of the model that was asked for, inside one of a plan's: all of it, or some rows of one dim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its name.
    pub name: String,
    /// Lengths of its dims.
    pub shape: Vec<u64>,
    /// Where it lies, if it is not all.
    pub within: Option<Within>,
}

/// Rows that hold a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Within {
    /// The dim along which parts lie side by side.
    pub dim: usize,
    /// The part's rows.
    pub rows: (u64, u64),
    /// Whether the part has that dim itself; else it is one row.
    pub keeps_dim: bool,
}

impl Part {
    /// What a region of the plan's parameter holds of the part, in the part's own rows.
    pub fn region(&self, of_plan: &Region) -> Option<Region> {
        let Some(Within { dim, rows, keeps_dim }) = &self.within else { return Some(of_plan.clone()) };
        let mut region = of_plan.clone();
        let own = region.0.get_mut(*dim)?;
        let (start, end) = (own.0.max(rows.0), own.1.min(rows.1));
        if start >= end {
            return None;
        }
        *own = (start - rows.0, end - rows.0);
        if !keeps_dim {
            region.0.remove(*dim);
        }
        Some(region)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Places of a region's elements in a tensor of this shape.
    fn places(region: &Region, shape: &[u64]) -> Vec<u64> {
        let extend = |starts: Vec<u64>, (rows, size): (&(u64, u64), &u64)| {
            starts.iter().flat_map(|start| (rows.0..rows.1).map(move |row| start * size + row)).collect()
        };
        region.0.iter().zip(shape).fold(vec![0], extend)
    }

    #[test]
    fn a_run_is_the_end_of_a_row_whole_rows_and_the_start_of_one() {
        let block = Region(vec![(10, 13), (20, 23)]);
        let rows = |list: Vec<Region>| list.into_iter().map(|region| region.0).collect::<Vec<_>>();
        let found = rows(block.run(2..7));
        assert_eq!(found, [vec![(10, 11), (22, 23)], vec![(12, 13), (20, 21)], vec![(11, 12), (20, 23)]]);
        assert_eq!(rows(block.run(1..2)), [vec![(10, 11), (21, 22)]]);
        assert_eq!(rows(block.run(0..9)), vec![block.0.clone()]);
        assert!(block.run(4..4).is_empty() && block.run(9..12).is_empty());
        assert_eq!(Region(Vec::new()).run(0..1), [Region(Vec::new())]);
    }

    #[test]
    fn a_part_sees_its_own_rows() {
        let part = |keeps_dim| Part {
            name: "k".into(),
            shape: Vec::new(),
            within: Some(Within { dim: 1, rows: (4, 5), keeps_dim }),
        };
        let region = Region(vec![(0, 2), (3, 9)]);
        assert_eq!(part(true).region(&region), Some(Region(vec![(0, 2), (0, 1)])));
        assert_eq!(part(false).region(&region), Some(Region(vec![(0, 2)])));
        assert_eq!(part(true).region(&Region(vec![(0, 2), (5, 9)])), None);
    }

    proptest! {
        /// Against a list of elements: the regions of a run hold its elements, each once.
        #[test]
        fn the_regions_of_a_run_hold_its_elements(
            rows in prop::collection::vec((0_u64..3, 1_u64..5, 0_u64..2), 0..4),
            cuts in (0_u64..130, 0_u64..130),
        ) {
            let block = Region(rows.iter().map(|(start, n, _)| (*start, start + n)).collect());
            let shape: Vec<u64> = rows.iter().map(|(start, n, more)| start + n + more).collect();
            let (start, end) = (cuts.0.min(cuts.1), cuts.0.max(cuts.1));
            let regions = block.run(start..end);
            let mut found: Vec<u64> = regions.iter().flat_map(|region| places(region, &shape)).collect();
            found.sort_unstable();
            let all = places(&block, &shape);
            let (start, end) = ((start as usize).min(all.len()), (end as usize).min(all.len()));
            prop_assert_eq!(found, all[start..end].to_vec());
            prop_assert!(regions.len() <= (2 * rows.len()).max(1));
        }

        #[test]
        fn regions_meet_where_their_elements_do(a in prop::collection::vec((0_u64..4, 1_u64..4), 3), b in prop::collection::vec((0_u64..4, 1_u64..4), 3)) {
            let region = |list: &[(u64, u64)]| Region(list.iter().map(|(start, n)| (*start, start + n)).collect());
            let (a, b) = (region(&a), region(&b));
            let inside = places(&a, &[8, 8, 8]).into_iter().filter(|at| places(&b, &[8, 8, 8]).contains(at)).count();
            prop_assert_eq!(a.common(&b), inside as u64);
            prop_assert_eq!(a.intersection(&b).map_or(0, |both| both.volume()), inside as u64);
        }
    }
}
