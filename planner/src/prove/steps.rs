//! Terms of blocks and of the steps of a conversion.

use egg::Id;
use ir::conversion::{Step, StepKind};
use ir::mesh::AxisId;
use ir::program::AxisSet;
use ir::sharding::{Placement, Sharding};

use super::term::{FLAT, Graph, Term};

/// Axes on which a value is an unfinished sum.
pub(super) fn unfinished(sharding: Sharding) -> Result<Vec<AxisId>, String> {
    if sharding.0.contains(&Placement::PartialMax) {
        return Err("an unfinished maximum crosses a layer's edge".into());
    }
    Ok(sharding.partial_axes())
}

/// The block of a whole tensor: outer axes first.
pub(super) fn sliced(graph: &mut Graph<'_>, whole: Id, sharding: Sharding) -> Id {
    let mut term = whole;
    for (i, placement) in sharding.0.into_iter().enumerate() {
        if let Placement::Shard(dim) = placement {
            term = graph.add(Term::Slice(AxisId(i), dim, [term]));
        }
    }
    term
}

/// The sum, or maximum, of a value's terms.
pub(super) fn summed(graph: &mut Graph<'_>, term: Id, sharding: Sharding) -> Id {
    let mut sum = term;
    for (i, placement) in sharding.0.into_iter().enumerate().rev() {
        sum = match placement {
            Placement::PartialSum => graph.add(Term::AllReduce(AxisId(i), [sum])),
            Placement::PartialMax => graph.add(Term::AllReduceMax(AxisId(i), [sum])),
            Placement::Replicate | Placement::Shard(_) => sum,
        };
    }
    sum
}

pub(super) fn flat_slices(graph: &mut Graph<'_>, term: Id, cut: AxisSet) -> Id {
    cut.axes().into_iter().fold(term, |x, axis| graph.add(Term::Slice(axis, FLAT, [x])))
}

/// Whether steps speak of a tensor's dims, or of the flattened block.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    Dims,
    Flat,
}

/// What every device holds after the steps of a conversion. Over several axes, cuts go from the outer axis inwards and
/// gathers from the inner outwards.
pub(super) fn convert(
    graph: &mut Graph<'_>,
    input: Id,
    steps: &[Step],
    layout: Layout,
) -> Result<Id, String> {
    let mut term = input;
    for step in steps {
        let place = |dim: u8| match layout {
            Layout::Dims => dim,
            Layout::Flat => FLAT,
        };
        if layout == Layout::Flat && step_dims(step.kind).iter().any(|&dim| dim != 0) {
            return Err("a step on a flattened block names a dim".into());
        }
        let mut axes = step.axes.clone();
        axes.sort_unstable();
        if matches!(step.kind, StepKind::AllGather { .. }) {
            axes.reverse();
        }
        if matches!(step.kind, StepKind::AllToAll { .. }) && axes.len() > 1 {
            return Err("an exchange goes along one axis at a time".into());
        }
        for axis in axes {
            let x = [term];
            term = graph.add(match step.kind {
                StepKind::AllReduce => Term::AllReduce(axis, x),
                StepKind::AllReduceMax => Term::AllReduceMax(axis, x),
                StepKind::ReduceScatter { dim } => Term::ReduceScatter(axis, place(dim), x),
                StepKind::AllGather { dim } => Term::AllGather(axis, place(dim), x),
                StepKind::AllToAll { from, to } => Term::AllToAll(axis, place(from), place(to), x),
                StepKind::Slice { dim } => Term::Slice(axis, place(dim), x),
                StepKind::Zero => Term::Zero(axis, x),
            });
        }
    }
    Ok(term)
}

fn step_dims(kind: StepKind) -> Vec<u8> {
    match kind {
        StepKind::AllReduce | StepKind::AllReduceMax | StepKind::Zero => Vec::new(),
        StepKind::ReduceScatter { dim } | StepKind::AllGather { dim } | StepKind::Slice { dim } => vec![dim],
        StepKind::AllToAll { from, to } => vec![from, to],
    }
}
