//! Conversions: the collectives that turn one sharding of a tensor into another.
//!
//! A dim's blocks are in mesh order, so an axis may join or leave a dim only while it is the minor-most axis there.
//! `steps` finds the sequence: reductions first, then free slices, exchanges, and gathers last, so that every step
//! moves as little as it can. Equal steps along several axes become one collective over their product.

use crate::collective::{Algorithm, CollectiveKind};
use crate::mesh::{AxisId, MAX_AXES};
use crate::program::AxisSet;
use crate::sharding::{Placement, Sharding};

/// What one step of a conversion does along its axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StepKind {
    /// `Partial -> Replicate`.
    AllReduce,
    /// `PartialMax -> Replicate`.
    AllReduceMax,
    /// `Partial -> Shard(dim)`.
    ReduceScatter {
        /// Dim that is cut.
        dim: u8,
    },
    /// `Shard(dim) -> Replicate`.
    AllGather {
        /// Dim that becomes whole.
        dim: u8,
    },
    /// `Shard(from) -> Shard(to)`.
    AllToAll {
        /// Dim that becomes whole.
        from: u8,
        /// Dim that is cut.
        to: u8,
    },
    /// `Replicate -> Shard(dim)`: every device keeps its block; free.
    Slice {
        /// Dim that is cut.
        dim: u8,
    },
    /// `Replicate -> Partial`: coordinate zero keeps the value, the others hold zeros; free.
    Zero,
}

impl StepKind {
    /// True where bytes cross a link.
    pub fn is_collective(self) -> bool {
        self.collective().is_some()
    }

    /// The collective that it is, if it is one.
    pub fn collective(self) -> Option<CollectiveKind> {
        match self {
            Self::AllReduce | Self::AllReduceMax => Some(CollectiveKind::AllReduce),
            Self::ReduceScatter { .. } => Some(CollectiveKind::ReduceScatter),
            Self::AllGather { .. } => Some(CollectiveKind::AllGather),
            Self::AllToAll { .. } => Some(CollectiveKind::AllToAll),
            Self::Slice { .. } | Self::Zero => None,
        }
    }

    /// How it runs unless a plan says otherwise.
    pub(crate) fn plainest(self) -> Algorithm {
        let algorithms = self.collective().map_or(&[][..], CollectiveKind::algorithms);
        algorithms.first().copied().unwrap_or(Algorithm::Direct)
    }

    /// The field's name of the collective.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce | Self::AllReduceMax => "all-reduce",
            Self::ReduceScatter { .. } => "reduce-scatter",
            Self::AllGather { .. } => "all-gather",
            Self::AllToAll { .. } => "all-to-all",
            Self::Slice { .. } => "slice",
            Self::Zero => "zero",
        }
    }
}

/// One step: a collective, or a free local change, along one or more axes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Step {
    /// What happens.
    pub kind: StepKind,
    /// Axes over whose product it happens, in mesh order.
    pub axes: Vec<AxisId>,
    /// Sharding before the step.
    pub before: Sharding,
    /// Sharding after the step.
    pub after: Sharding,
    /// How a collective runs: a plan's rules decide (`Program::run_by`); it changes bytes and time, never the result.
    pub algorithm: Algorithm,
}

/// A step as long as nobody says how it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// What happens.
    pub kind: StepKind,
    /// Axes over whose product it happens.
    pub axes: AxisSet,
    /// Sharding before.
    pub before: Sharding,
    /// Sharding after.
    pub after: Sharding,
}

/// The steps from one sharding of a tensor to another; empty where they are equal.
///
/// Returns `None` where there is no way: only a maximum that would have to become a sum has none.
pub fn steps(from: Sharding, to: Sharding) -> Option<Vec<Step>> {
    let mut list = Vec::new();
    changes(from, to, |Change { kind, axes, before, after }| {
        list.push(Step { kind, axes: axes.axes(), before, after, algorithm: kind.plainest() });
    })?;
    Some(list)
}

/// The same, one after the other, without a list: searches price millions of them. Where there is no way, some may have
/// been told before that shows.
pub fn changes(from: Sharding, to: Sharding, mut tell: impl FnMut(Change)) -> Option<()> {
    let mut current = from;
    let mut held: Option<Change> = None;
    // Each round settles an axis or gathers one that stands in the way; two rounds an axis suffice.
    for _ in 0..=4 * MAX_AXES {
        if current == to {
            held.into_iter().for_each(tell);
            return Some(());
        }
        let (kind, axis, placement) = next(current, to)?;
        let (own, after) = (AxisSet::of(&[axis]), current.with(axis, placement));
        held = Some(match held {
            // Neighbours of one kind are one collective over the product of their axes.
            Some(last) if last.kind == kind && mergeable(kind) => {
                Change { axes: AxisSet(last.axes.0 | own.0), after, ..last }
            }
            last => {
                last.into_iter().for_each(&mut tell);
                Change { kind, axes: own, before: current, after }
            }
        });
        current = after;
    }
    None
}

/// The next single-axis step, cheapest kind first.
fn next(current: Sharding, to: Sharding) -> Option<(StepKind, AxisId, Placement)> {
    use Placement::{PartialMax, PartialSum, Replicate, Shard};
    let open = (0..MAX_AXES).map(AxisId).filter(|&a| current.on(a) != to.on(a));
    let joins = |axis: AxisId, dim: u8| minor_most(current, axis, dim) && !blocked(current, to, axis, dim);
    let leaves = |axis: AxisId, dim: u8| minor_most(current, axis, dim);
    let pick = |test: &dyn Fn(AxisId) -> Option<(StepKind, Placement)>| {
        open.clone().find_map(|axis| test(axis).map(|(kind, placement)| (kind, axis, placement)))
    };
    let backwards = |test: &dyn Fn(AxisId) -> Option<(StepKind, Placement)>| {
        open.clone().rev().find_map(|axis| test(axis).map(|(kind, placement)| (kind, axis, placement)))
    };
    pick(&|a| match (current.on(a), to.on(a)) {
        (PartialSum, Shard(dim)) if joins(a, dim) => Some((StepKind::ReduceScatter { dim }, Shard(dim))),
        _ => None,
    })
    .or_else(|| {
        pick(&|a| match (current.on(a), to.on(a)) {
            (Replicate, Shard(dim)) if joins(a, dim) => Some((StepKind::Slice { dim }, Shard(dim))),
            _ => None,
        })
    })
    .or_else(|| {
        pick(&|a| match (current.on(a), to.on(a)) {
            (PartialSum, Replicate) => Some((StepKind::AllReduce, Replicate)),
            (PartialMax, Replicate | Shard(_)) => Some((StepKind::AllReduceMax, Replicate)),
            (Replicate, PartialSum) => Some((StepKind::Zero, PartialSum)),
            _ => None,
        })
    })
    .or_else(|| {
        backwards(&|a| match (current.on(a), to.on(a)) {
            (Shard(from), Shard(dim)) if leaves(a, from) && joins(a, dim) => {
                Some((StepKind::AllToAll { from, to: dim }, Shard(dim)))
            }
            _ => None,
        })
    })
    .or_else(|| {
        backwards(&|a| match (current.on(a), to.on(a)) {
            (Shard(dim), Replicate | PartialSum) if leaves(a, dim) => {
                Some((StepKind::AllGather { dim }, Replicate))
            }
            _ => None,
        })
    })
    // What is left is blocked: an axis that must pass another on the same dim. Gather the minor-most first.
    .or_else(|| {
        (0..MAX_AXES).rev().map(AxisId).find_map(|a| match current.on(a) {
            Shard(dim) if leaves(a, dim) && obstructs(current, to, a, dim) => {
                Some((StepKind::AllGather { dim }, a, Replicate))
            }
            PartialSum if to.on(a) != PartialSum => Some((StepKind::AllReduce, a, Replicate)),
            Shard(_) | PartialSum | Replicate | PartialMax => None,
        })
    })
}

/// No axis inside `axis` cuts the dim.
fn minor_most(current: Sharding, axis: AxisId, dim: u8) -> bool {
    (axis.0 + 1..MAX_AXES).all(|inner| current.0[inner] != Placement::Shard(dim))
}

/// An outer axis still has to join or leave the dim: it must come first, for it can do neither once this axis is
/// inside.
fn blocked(current: Sharding, to: Sharding, axis: AxisId, dim: u8) -> bool {
    (0..axis.0).any(|outer| moves(current, to, outer, dim))
}

/// The axis sits on a dim that an outer axis still has to join or leave, or it has to leave itself.
fn obstructs(current: Sharding, to: Sharding, axis: AxisId, dim: u8) -> bool {
    (0..=axis.0).any(|outer| moves(current, to, outer, dim))
}

/// The axis still has to join or leave the dim.
fn moves(current: Sharding, to: Sharding, axis: usize, dim: u8) -> bool {
    (current.0[axis] == Placement::Shard(dim)) != (to.0[axis] == Placement::Shard(dim))
}

/// An exchange along two axes is not one exchange over their product in general, so those stay apart.
fn mergeable(kind: StepKind) -> bool {
    !matches!(kind, StepKind::AllToAll { .. })
}

#[cfg(test)]
mod tests {
    use super::*;
    use Placement::{PartialSum, Replicate, Shard};

    fn sharding(placements: &[Placement]) -> Sharding {
        let mut value = Sharding::REPLICATED;
        value.0[..placements.len()].copy_from_slice(placements);
        value
    }

    #[track_caller]
    fn check(from: &[Placement], to: &[Placement], expected: &str) {
        let list = steps(sharding(from), sharding(to)).unwrap();
        let text: Vec<String> = list
            .iter()
            .map(|s| {
                let axes: Vec<String> = s.axes.iter().map(|a| a.0.to_string()).collect();
                format!("{}@{}", s.kind.name(), axes.join(","))
            })
            .collect();
        assert_eq!(text.join(" "), expected);
    }

    #[test]
    fn a_sum_becomes_whole_by_all_reduce() {
        check(&[PartialSum], &[Replicate], "all-reduce@0");
    }

    #[test]
    fn a_sum_becomes_blocks_by_reduce_scatter() {
        check(&[PartialSum], &[Shard(1)], "reduce-scatter@0");
    }

    #[test]
    fn blocks_of_one_dim_become_blocks_of_another_by_all_to_all() {
        check(&[Shard(0)], &[Shard(1)], "all-to-all@0");
    }

    #[test]
    fn two_axes_of_one_dim_gather_in_one_collective() {
        check(&[Shard(0), Shard(0)], &[Replicate, Replicate], "all-gather@0,1");
    }

    #[test]
    fn an_outer_axis_cannot_leave_before_the_inner() {
        check(&[Shard(0), Shard(0)], &[Replicate, Shard(0)], "all-gather@0,1 slice@1");
    }

    #[test]
    fn an_outer_axis_cannot_join_after_the_inner() {
        check(&[Replicate, Shard(0)], &[Shard(0), Shard(0)], "all-gather@1 slice@0,1");
    }

    #[test]
    fn an_inner_axis_does_not_join_before_an_outer_has_left() {
        check(&[Shard(0), Replicate], &[Replicate, Shard(0)], "all-gather@0 slice@1");
        check(&[Shard(0), PartialSum], &[Replicate, Shard(0)], "all-gather@0 reduce-scatter@1");
        check(&[Shard(0), Shard(1)], &[Shard(1), Shard(0)], "all-gather@1 all-to-all@0 slice@1");
    }

    #[test]
    fn every_pair_of_sum_shardings_has_a_conversion() {
        let options = [Replicate, Shard(0), Shard(1), PartialSum];
        let all: Vec<Sharding> =
            (0..64).map(|i| sharding(&[options[i % 4], options[i / 4 % 4], options[i / 16]])).collect();
        for &from in &all {
            for &to in &all {
                let list = steps(from, to).unwrap_or_else(|| panic!("{from:?} to {to:?}"));
                assert!(list.windows(2).all(|pair| pair[0].after == pair[1].before));
                assert_eq!(list.last().map_or(from, |last| last.after), to);
            }
        }
    }
}
