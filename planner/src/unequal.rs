//! Pipelines whose stages are as wide as the groups of a mixed cluster are large.
//!
//! Stages of one mesh need a number of devices that divides every group. Here each group has the same number of stages,
//! `k`, and its stages have a `k`-th of its devices each: the same axes in the same roles, the outermost of them longer
//! where the group is larger. That is one of the axes that a stage of the smallest group has, or one of which it has a
//! single device.
//!
//! What that is good for is fewer stages: of narrow ones there are always as many alike, since every group is a
//! multiple of the smallest. So stages are whole nodes, or the smallest group.
//!
//! Left out: stages of less than a node, groups of which one is no multiple of the smallest, numbers of stages that
//! differ from group to group, other axes than the outermost, models with tied parameters, pinned numbers of replicas
//! and of sequences of each.

use ir::mesh::Mesh;

use crate::candidate::{Candidate, batches};
use crate::request::Request;
use crate::shapes::{Facts, Shape, divisors, shapes};
use crate::space::AxisRule;

/// Candidates whose stages have unequal meshes; none where all groups are alike in number.
pub(crate) fn candidates(request: &Request, facts: Facts, wanted: &dyn Fn(&u64) -> bool) -> Vec<Candidate> {
    let counts: Vec<u64> = request.cluster.groups.iter().map(|group| group.count).collect();
    let least = counts.iter().copied().min().unwrap_or(0);
    let times: Vec<u64> = counts.iter().map(|count| count / least.max(1)).collect();
    let is_multiple = counts.iter().all(|count| count.is_multiple_of(least));
    let pins = &request.pins;
    if !request.cluster.is_mixed()
        || !is_multiple
        || times.iter().all(|times| *times == 1)
        || !request.model.ties.is_empty()
        || pins.dp.is_some()
        || pins.zero_group.is_some()
        || pins.gradients.is_some()
        || pins.micro_batch.is_some()
    {
        return Vec::new();
    }
    let mut list = Vec::new();
    let node = facts.node.min(least).max(1);
    for k in divisors(least).into_iter().filter(|k| (least / k).is_multiple_of(node)) {
        let n_stages = k * counts.len() as u64;
        if !wanted(&n_stages) {
            continue;
        }
        for shape in shapes(least / k, facts, pins) {
            for base in [Some(shape.clone()), one_more(&shape)].into_iter().flatten() {
                list.extend(stretched(request, &base, (&times, k)));
            }
        }
    }
    list
}

/// Candidates of `k` stages for every group, on the mesh of a shape so many times as long.
fn stretched(request: &Request, shape: &Shape, (times, k): (&[u64], u64)) -> Vec<Candidate> {
    if !may_be_longer(shape) {
        return Vec::new();
    }
    let each: Vec<Mesh> = times.iter().map(|&times| widened(&shape.mesh, times)).collect();
    let stages = each.iter().flat_map(|mesh| std::iter::repeat_n(mesh, k as usize));
    let meshes: Vec<Mesh> = stages.cloned().collect();
    let n_stages = meshes.len() as u64;
    let of = |(micro_batch, n_micro_batches)| {
        let shape = Shape { mesh: meshes[0].clone(), ..shape.clone() };
        Candidate { shape, meshes: meshes.clone(), n_stages, micro_batch, n_micro_batches }
    };
    batches(request, shape, n_stages).into_iter().map(of).collect()
}

/// Whether the outermost axis of a shape is one whose length nobody has named.
fn may_be_longer(shape: &Shape) -> bool {
    match shape.rules.first() {
        Some(AxisRule::Free | AxisRule::Around | AxisRule::Sequences | AxisRule::Replicas) => true,
        Some(
            AxisRule::Tokens
            | AxisRule::Experts
            | AxisRule::TokensAndExperts
            | AxisRule::Shares
            | AxisRule::Inside(_)
            | AxisRule::InsideAndExperts(_),
        )
        | None => false,
    }
}

/// The shape with an axis of one device around all others, which splits sequences where it is longer.
fn one_more(shape: &Shape) -> Option<Shape> {
    let sizes: Vec<u64> = std::iter::once(1).chain(shape.mesh.axes.iter().map(|axis| axis.size)).collect();
    let mesh = Mesh::of_sizes(&sizes).filter(|_| shape.barred.is_empty())?;
    let rules = std::iter::once(AxisRule::Sequences).chain(shape.rules.iter().copied()).collect();
    Some(Shape { mesh, rules, ..shape.clone() })
}

/// A mesh with its outermost axis so many times as long.
fn widened(mesh: &Mesh, times: u64) -> Mesh {
    let mut wider = mesh.clone();
    wider.axes.iter_mut().take(1).for_each(|axis| axis.size *= times);
    wider
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outermost_axis_is_as_long_as_the_group_is_large() {
        let sizes = |mesh: &Mesh| mesh.axes.iter().map(|axis| axis.size).collect::<Vec<_>>();
        assert_eq!(sizes(&widened(&Mesh::of_sizes(&[2, 4]).unwrap(), 3)), [6, 4]);
        let mesh = Mesh::of_sizes(&[4]).unwrap();
        let shape = Shape { mesh, rules: vec![AxisRule::Free], data_degree: 1, barred: Vec::new() };
        let more = one_more(&shape).unwrap();
        assert_eq!((sizes(&more.mesh), more.rules.len()), (vec![1, 4], 2));
        assert_eq!(sizes(&widened(&more.mesh, 2)), [2, 4]);
        let four = Shape { mesh: Mesh::of_sizes(&[2; 4]).unwrap(), ..shape };
        assert_eq!(one_more(&four), None);
    }
}
