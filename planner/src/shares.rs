//! Unequal shares of the micro-batches along the outermost axis of a mesh: which meshes take them, and how many each
//! coordinate runs.
//!
//! ```text
//! minimise    max over coordinates r of  P_r(m_r)          P_r(m): seconds of m micro-batches on the devices of r
//! such that   sum over r of m_r = M,   m_r a positive multiple of `unit`                       -> divided()
//! ```
//! `P_r` never falls with `m`. From equal shares, a unit at a time goes from the slowest coordinate to the one that is
//! done first with one more, as long as that one then is done sooner than the slowest was. Where it ends, another
//! allocation either leaves the slowest as many, or gives some coordinate at least one more: it takes no less.

use std::collections::BTreeMap;

use ir::plan::shares::AXIS;

use crate::request::{Request, SharesKind};
use crate::shapes::Shape;
use crate::space::AxisRule;

/// A shape for stages whose devices run unequal shares along the outermost axis, where they are asked for: as it is
/// where not, and nothing where that axis does not lie across the groups of the cluster, or cannot have sequences
/// alone.
pub(crate) fn shape(request: &Request, shape: Shape, n_stages: u64) -> Option<Shape> {
    match request.pins.shares {
        Some(SharesKind::Unequal) => {}
        Some(SharesKind::Equal) | None => return Some(shape),
    }
    let first = *shape.rules.first()?;
    let is_barred = shape.barred.get(AXIS.0).is_some_and(|barred| barred.sequences);
    let rule = match first {
        AxisRule::Free | AxisRule::Around | AxisRule::Sequences | AxisRule::Shares => AxisRule::Shares,
        // States are whole there, so that nothing crosses it within a micro-batch either.
        AxisRule::Replicas => AxisRule::Replicas,
        AxisRule::Experts
        | AxisRule::Tokens
        | AxisRule::TokensAndExperts
        | AxisRule::Inside(_)
        | AxisRule::InsideAndExperts(_) => return None,
    };
    let each = shape.mesh.stride(AXIS);
    let n_coordinates = n_stages * shape.mesh.size(AXIS);
    let mut alone = (0..n_coordinates).map(|at| request.cluster.groups_under(at * each..(at + 1) * each));
    if is_barred || !alone.all(|groups| groups.len() == 1) {
        return None;
    }
    let mut rules = shape.rules.clone();
    rules[AXIS.0] = rule;
    Some(Shape { rules, ..shape })
}

/// How many micro-batches every coordinate runs of `total` together: `seconds` says how long so many take it, if it can
/// run so many at all, and of coordinates of one class the same. Shares are multiples of `unit`; ties go to the first.
pub(crate) fn divided(
    classes: &[usize],
    (total, unit): (u64, u64),
    seconds: &dyn Fn(usize, u64) -> Option<f64>,
) -> Option<Vec<u64>> {
    let n = classes.len() as u64;
    if n == 0 || unit == 0 || !total.is_multiple_of(n * unit) {
        return None;
    }
    let mut known: BTreeMap<(usize, u64), f64> = BTreeMap::new();
    let mut time = |at: usize, share: u64| {
        let class = classes[at];
        *known.entry((class, share)).or_insert_with(|| seconds(class, share).unwrap_or(f64::INFINITY))
    };
    let mut shares = vec![total / n; classes.len()];
    loop {
        let times: Vec<f64> = (0..classes.len()).map(|at| time(at, shares[at])).collect();
        let slowest = (0..classes.len()).rev().max_by(|&a, &b| times[a].total_cmp(&times[b]))?;
        if shares[slowest] <= unit || !times[slowest].is_finite() {
            break;
        }
        let more: Vec<f64> = (0..classes.len()).map(|at| time(at, shares[at] + unit)).collect();
        let soonest = (0..classes.len()).min_by(|&a, &b| more[a].total_cmp(&more[b]))?;
        if more[soonest] >= times[slowest] {
            break;
        }
        shares[slowest] -= unit;
        shares[soonest] += unit;
    }
    Some(shares)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Time of the slowest coordinate at best, by trying every allocation.
    fn brute(tables: &[Vec<f64>], classes: &[usize], left: u64) -> f64 {
        let Some((&class, rest)) = classes.split_first() else {
            return if left == 0 { 0.0 } else { f64::INFINITY };
        };
        let of = |share: u64| tables[class][share as usize].max(brute(tables, rest, left - share));
        (1..=left).map(of).fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn shares_follow_speeds_down_to_whole_micro_batches() {
        // 2.5 times as fast: 16 micro-batches of two devices are 11 and 5, since 12 and 4 take 12 of 2.5.
        let seconds = |class: usize, share: u64| Some(share as f64 * [1.0, 2.5][class]);
        assert_eq!(divided(&[0, 1], (16, 1), &seconds), Some(vec![12, 4]));
        assert_eq!(divided(&[0, 1], (8, 1), &seconds), Some(vec![6, 2]));
        // In pairs, as interleaved schedules of two stages take them.
        assert_eq!(divided(&[1, 0], (12, 2), &seconds), Some(vec![4, 8]));
        assert_eq!(divided(&[0, 1], (7, 1), &seconds), None);
    }

    proptest! {
        #[test]
        fn no_other_allocation_is_faster(
            steps in proptest::collection::vec(proptest::collection::vec(0.0..3.0_f64, 13), 3),
            classes in proptest::collection::vec(0..3_usize, 1..5),
            each in 1..4_u64,
        ) {
            let rising = |steps: &Vec<f64>| -> Vec<f64> {
                steps.iter().scan(0.0, |sum, step| { *sum += step; Some(*sum) }).collect()
            };
            let tables: Vec<Vec<f64>> = steps.iter().map(rising).collect();
            let total = each * classes.len() as u64;
            let seconds = |class: usize, share: u64| tables[class].get(share as usize).copied();
            let shares = divided(&classes, (total, 1), &seconds).unwrap();
            prop_assert_eq!(shares.iter().sum::<u64>(), total);
            prop_assert!(shares.iter().all(|share| *share > 0));
            let found = classes.iter().zip(&shares).map(|(&class, &share)| tables[class][share as usize]);
            let found = found.fold(0.0, f64::max);
            prop_assert!(found <= brute(&tables, &classes, total) + 1e-12, "{shares:?} take {found}");
        }
    }
}
