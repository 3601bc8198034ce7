//! One block of memory for everything a rank holds in a step: an offset for every buffer, decided before the run.
//!
//! ```text
//! minimise   peak = max of offset(i) + bytes(i)
//! such that  buffers whose lives overlap do not overlap in the arena                  -> Arena::claim()
//! at least   largest sum of bytes that live at one time                               -> lower_bound()
//! ```
//! Larger buffers are placed first, each in the smallest gap that holds it between those that live with it: Pisarchyk,
//! Lee 2020, "Efficient memory management for deep neural net inference", arXiv 2001.03288, section 5 (greedy by size).

use std::collections::BTreeMap;

/// One buffer: it lives from a moment up to but without another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Buffer {
    /// Size.
    pub bytes: u64,
    /// Moment at which it is made.
    pub from: usize,
    /// Moment at which it is gone.
    pub to: usize,
}

/// Where buffers lie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    /// Per buffer, its first byte.
    pub offsets: Vec<u64>,
    /// Bytes of the arena.
    pub peak: u64,
    /// Largest sum of bytes that live at one time: no arena is smaller.
    pub lower_bound: u64,
}

/// Gives every buffer an offset.
///
/// Buffers of 4, 3 and 3 bytes of which the last two follow each other take 7 bytes.
pub fn place(buffers: &[Buffer]) -> Placed {
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    // Larger first, then longer lives, then in order.
    order.sort_by_key(|&i| {
        let Buffer { bytes, from, to } = buffers[i];
        (std::cmp::Reverse(bytes), std::cmp::Reverse(to.saturating_sub(from)), i)
    });
    let mut offsets = vec![0; buffers.len()];
    // Placed so far, by rising offset.
    let mut placed: Vec<(u64, usize)> = Vec::with_capacity(buffers.len());
    for i in order {
        let own = buffers[i];
        let neighbours = placed.iter().filter(|(_, other)| live_together(own, buffers[*other]));
        offsets[i] = smallest_gap(own.bytes, neighbours.map(|&(start, other)| (start, buffers[other].bytes)));
        let at = placed.partition_point(|&(start, _)| start <= offsets[i]);
        placed.insert(at, (offsets[i], i));
    }
    let ends = offsets.iter().zip(buffers).map(|(offset, buffer)| offset + buffer.bytes);
    Placed { peak: ends.max().unwrap_or(0), lower_bound: lower_bound(buffers), offsets }
}

fn live_together(a: Buffer, b: Buffer) -> bool {
    a.from < b.to && b.from < a.to && a.bytes > 0 && b.bytes > 0
}

/// Start of the smallest gap that holds `bytes` between neighbours in rising offset; behind the last where none does.
fn smallest_gap(bytes: u64, neighbours: impl Iterator<Item = (u64, u64)>) -> u64 {
    let (mut end, mut best): (u64, Option<(u64, u64)>) = (0, None);
    for (start, len) in neighbours {
        let gap = start.saturating_sub(end);
        if start > end && gap >= bytes && best.is_none_or(|(smallest, _)| gap < smallest) {
            best = Some((gap, end));
        }
        end = end.max(start + len);
    }
    best.map_or(end, |(_, start)| start)
}

/// Largest sum of bytes that live at one time.
pub fn lower_bound(buffers: &[Buffer]) -> u64 {
    let mut changes: BTreeMap<usize, (u64, u64)> = BTreeMap::new();
    for buffer in buffers.iter().filter(|buffer| buffer.from < buffer.to) {
        changes.entry(buffer.from).or_default().0 += buffer.bytes;
        changes.entry(buffer.to).or_default().1 += buffer.bytes;
    }
    let mut live = 0;
    let sums = changes.values().map(|(made, gone)| {
        live = live + made - gone;
        live
    });
    sums.max().unwrap_or(0)
}

/// What a run has in its arena at one time.
#[derive(Clone, Debug, Default)]
pub struct Arena {
    /// By first byte, the byte behind the last.
    claimed: BTreeMap<u64, u64>,
    live: u64,
    /// Highest byte ever claimed.
    pub high_water: u64,
    /// Most bytes ever claimed at once.
    pub most_live: u64,
}

impl Arena {
    /// Takes bytes at an offset; says which byte is not free if one is not.
    pub fn claim(&mut self, offset: u64, bytes: u64) -> Result<(), u64> {
        if bytes == 0 {
            return Ok(());
        }
        let end = offset + bytes;
        if let Some((&start, &other)) = self.claimed.range(..end).next_back()
            && other > offset
        {
            return Err(start.max(offset));
        }
        self.claimed.insert(offset, end);
        self.live += bytes;
        self.high_water = self.high_water.max(end);
        self.most_live = self.most_live.max(self.live);
        Ok(())
    }

    /// Gives back what was claimed at an offset.
    pub fn release(&mut self, offset: u64, bytes: u64) {
        if bytes > 0 && self.claimed.remove(&offset).is_some() {
            self.live -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buffers_that_follow_each_other_share_a_place() {
        let buffer = |bytes, from, to| Buffer { bytes, from, to };
        let placed = place(&[buffer(4, 0, 3), buffer(3, 0, 1), buffer(3, 1, 3)]);
        assert_eq!(placed, Placed { offsets: vec![0, 4, 4], peak: 7, lower_bound: 7 });
    }

    #[test]
    fn the_smallest_gap_is_taken() {
        // Neighbours at 0..1, 4..5 and 7..8: 2 bytes fit between 1 and 4, and exactly between 5 and 7.
        assert_eq!(smallest_gap(2, [(0, 1), (4, 1), (7, 1)].into_iter()), 5);
        assert_eq!(smallest_gap(3, [(0, 1), (4, 1), (7, 1)].into_iter()), 1);
        assert_eq!(smallest_gap(4, [(0, 1), (4, 1), (7, 1)].into_iter()), 8);
    }

    #[test]
    fn a_byte_that_is_taken_is_named() {
        let mut arena = Arena::default();
        arena.claim(4, 4).unwrap();
        assert_eq!(arena.claim(6, 4), Err(6));
        assert_eq!(arena.claim(0, 5), Err(4));
        arena.claim(0, 4).unwrap();
        arena.release(4, 4);
        arena.claim(6, 4).unwrap();
        assert_eq!((arena.high_water, arena.most_live), (10, 8));
    }

    fn buffers() -> impl Strategy<Value = Vec<Buffer>> {
        let one = (0_u64..40, 0_usize..30, 1_usize..12);
        let one = one.prop_map(|(bytes, from, len)| Buffer { bytes, from, to: from + len });
        prop::collection::vec(one, 0..60)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

        /// Played moment by moment, no byte is claimed twice, and the arena is used to its end.
        #[test]
        fn no_two_live_buffers_overlap(buffers in buffers()) {
            let placed = place(&buffers);
            let mut arena = Arena::default();
            for moment in 0..50 {
                for (buffer, &offset) in buffers.iter().zip(&placed.offsets).filter(|(one, _)| one.to == moment) {
                    arena.release(offset, buffer.bytes);
                }
                for (buffer, &offset) in buffers.iter().zip(&placed.offsets).filter(|(one, _)| one.from == moment) {
                    prop_assert_eq!(arena.claim(offset, buffer.bytes), Ok(()));
                }
            }
            prop_assert_eq!(arena.high_water, placed.peak);
            prop_assert_eq!(arena.most_live, placed.lower_bound);
            prop_assert!(placed.peak >= placed.lower_bound);
            let all: u64 = buffers.iter().map(|buffer| buffer.bytes).sum();
            prop_assert!(placed.peak <= all);
        }

        #[test]
        fn buffers_without_overlap_in_time_take_the_largest(sizes in prop::collection::vec(1_u64..99, 1..20)) {
            let buffers: Vec<Buffer> =
                sizes.iter().enumerate().map(|(i, &bytes)| Buffer { bytes, from: i, to: i + 1 }).collect();
            prop_assert_eq!(place(&buffers).peak, sizes.into_iter().max().unwrap_or(0));
        }
    }
}
