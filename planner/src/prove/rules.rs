//! The rules: what may be concluded about equal terms. Every rule has a name, a guard and a reason in `docs/rules.md`.
//!
//! A rule looks at one term and its class and adds equations that hold at every mesh coordinate. The guards speak of
//! axes along which a class is known to be the same on every device; with shapes alone several rules would be wrong.
//! Nothing here knows an operator: all that is used is which loops it walks, whether a loop that the result lacks
//! leaves a sum or a maximum, and whether it is linear.

use egg::{Id, Language};
use ir::mesh::AxisId;
use ir::op::{Linear, Missing, OpKind};
use ir::program::AxisSet;

use super::term::{Child, FLAT, Graph, Term, roles};

/// A rule: its name, and what it concludes from one term of a class.
pub(super) struct Rule {
    /// Name, as in the rule book.
    #[cfg_attr(not(test), expect(dead_code, reason = "the tests hold the rule book against it"))]
    pub(super) name: &'static str,
    /// Adds its conclusions; true where something new was learnt.
    pub(super) apply: fn(&mut Graph<'_>, Id, &Term) -> bool,
}

/// All rules, in the order in which they are tried.
pub(super) const RULES: [Rule; 16] = [
    Rule { name: "reduce-scatter", apply: reduce_scatter },
    Rule { name: "all-to-all", apply: all_to_all },
    Rule { name: "gather-of-slice", apply: gather_of_slice },
    Rule { name: "equal-slices", apply: equal_slices },
    Rule { name: "reduce-of-zero", apply: reduce_of_zero },
    Rule { name: "slices-commute", apply: slices_commute },
    Rule { name: "slice-out-of-reduce", apply: slice_out_of_reduce },
    Rule { name: "slice-out-of-zero", apply: slice_out_of_zero },
    Rule { name: "zero-out-of-reduce", apply: zero_out_of_reduce },
    Rule { name: "reduces-commute", apply: reduces_commute },
    Rule { name: "fork", apply: fork },
    Rule { name: "split-kernel", apply: split_kernel },
    Rule { name: "linear-kernel", apply: linear_kernel },
    Rule { name: "linear-pullback", apply: linear_pullback },
    Rule { name: "split-update", apply: split_update },
    Rule { name: "slice-of-gather", apply: slice_of_gather },
];

/// Joins two classes, if both make sense.
fn unify(graph: &mut Graph<'_>, a: Id, b: Id) -> bool {
    let sound = graph[a].data.shape.is_some() && graph[b].data.shape.is_some();
    sound && graph.union(a, b)
}

fn same_along(graph: &Graph<'_>, id: Id, axis: AxisId) -> bool {
    !graph[id].data.varying.contains(AxisSet::of(&[axis]))
}

/// Every `(axis, dim, whole)` such that the class holds the slice of `whole`.
fn slices(graph: &Graph<'_>, id: Id) -> Vec<(AxisId, u8, Id)> {
    let slice = |term: &Term| {
        if let Term::Slice(axis, dim, [x]) = term { Some((*axis, *dim, graph.find(*x))) } else { None }
    };
    let mut list: Vec<_> = graph[id].nodes.iter().filter_map(slice).collect();
    list.dedup();
    list
}

/// What the class is the slice of, along an axis and a dim, if that is the same along the axis.
fn unsliced(graph: &Graph<'_>, id: Id, axis: AxisId, dim: u8) -> Option<Id> {
    slices(graph, id)
        .into_iter()
        .find(|&(a, d, x)| a == axis && d == dim && same_along(graph, x, axis))
        .map(|(_, _, x)| x)
}

/// `reduce-scatter(a, d, x) = slice(a, d, all-reduce(a, x))`.
fn reduce_scatter(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let Term::ReduceScatter(axis, dim, x) = *term else { return false };
    let sum = graph.add(Term::AllReduce(axis, x));
    let block = graph.add(Term::Slice(axis, dim, [sum]));
    unify(graph, class, block)
}

/// `all-to-all(a, i, j, x) = slice(a, j, all-gather(a, i, x))`.
fn all_to_all(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let Term::AllToAll(axis, from, to, x) = *term else { return false };
    let whole = graph.add(Term::AllGather(axis, from, x));
    let block = graph.add(Term::Slice(axis, to, [whole]));
    unify(graph, class, block)
}

/// `all-gather(a, d, slice(a, d, x)) = x` where `x` is the same along `a`.
fn gather_of_slice(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let Term::AllGather(axis, dim, [x]) = *term else { return false };
    let Some(whole) = unsliced(graph, x, axis, dim) else { return false };
    unify(graph, class, whole)
}

/// If `slice(a, d, x) = slice(a, d, y)` then `x = y`, where both are the same along `a`: gather both sides.
fn equal_slices(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let Term::Slice(axis, dim, [x]) = *term else { return false };
    if !same_along(graph, x, axis) {
        return false;
    }
    let Some(other) = unsliced(graph, class, axis, dim) else { return false };
    unify(graph, x, other)
}

/// `slice(a, d, all-gather(a, d, x)) = x`.
fn slice_of_gather(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let Term::Slice(axis, dim, [x]) = *term else { return false };
    let gather = |term: &Term| {
        if let Term::AllGather(a, d, [y]) = *term { (a == axis && d == dim).then_some(y) } else { None }
    };
    let Some(block) = graph[x].nodes.iter().find_map(gather) else { return false };
    unify(graph, class, block)
}

/// `all-reduce(a, zero(a, x)) = x` where `x` is the same along `a`.
fn reduce_of_zero(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let Term::Zero(axis, [x]) = *term else { return false };
    if !same_along(graph, x, axis) {
        return false;
    }
    let sum = graph.add(Term::AllReduce(axis, [class]));
    unify(graph, sum, x)
}

/// `slice(a, i, slice(b, j, x)) = slice(b, j, slice(a, i, x))` for different axes and dims.
fn slices_commute(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let Term::Slice(axis, dim, [x]) = *term else { return false };
    let mut news = false;
    for (other, other_dim, y) in slices(graph, x) {
        if other == axis || other_dim == dim || dim == FLAT || other_dim == FLAT {
            continue;
        }
        let inner = graph.add(Term::Slice(axis, dim, [y]));
        let outer = graph.add(Term::Slice(other, other_dim, [inner]));
        news |= unify(graph, class, outer);
    }
    news
}

/// `all-reduce(a, slice(b, d, x)) = slice(b, d, all-reduce(a, x))` for different axes; of sums and of maxima.
fn slice_out_of_reduce(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let (Term::AllReduce(axis, [x]) | Term::AllReduceMax(axis, [x])) = *term else { return false };
    let mut news = false;
    for (other, dim, y) in slices(graph, x).into_iter().filter(|&(other, _, _)| other != axis) {
        let inner = graph.add(term.clone().map_children(|_| y));
        let outer = graph.add(Term::Slice(other, dim, [inner]));
        news |= unify(graph, class, outer);
    }
    news
}

/// `zero(a, slice(b, d, x)) = slice(b, d, zero(a, x))` for different axes.
fn slice_out_of_zero(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let Term::Zero(axis, [x]) = *term else { return false };
    let mut news = false;
    for (other, dim, y) in slices(graph, x).into_iter().filter(|&(other, _, _)| other != axis) {
        let inner = graph.add(Term::Zero(axis, [y]));
        let outer = graph.add(Term::Slice(other, dim, [inner]));
        news |= unify(graph, class, outer);
    }
    news
}

/// `all-reduce(a, zero(b, x)) = zero(b, all-reduce(a, x))` for different axes; of sums and of maxima, since the sum and
/// the maximum of zeros are zero.
fn zero_out_of_reduce(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let (Term::AllReduce(axis, [x]) | Term::AllReduceMax(axis, [x])) = *term else { return false };
    let zero = |term: &Term| if let Term::Zero(other, [y]) = *term { Some((other, y)) } else { None };
    let zeros: Vec<(AxisId, Id)> = graph[x].nodes.iter().filter_map(zero).collect();
    let mut news = false;
    for (other, y) in zeros.into_iter().filter(|&(other, _)| other != axis) {
        let inner = graph.add(term.clone().map_children(|_| y));
        let outer = graph.add(Term::Zero(other, [inner]));
        news |= unify(graph, class, outer);
    }
    news
}

/// `all-reduce(a, all-reduce(b, x)) = all-reduce(b, all-reduce(a, x))`; of sums and of maxima, not mixed.
fn reduces_commute(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let (Term::AllReduce(_, [x]) | Term::AllReduceMax(_, [x])) = *term else { return false };
    let same_kind = |other: &&Term| other.discriminant() == term.discriminant();
    let inner: Vec<Term> = graph[x].nodes.iter().filter(same_kind).cloned().collect();
    let mut news = false;
    for other in inner {
        let y = other.children()[0];
        let first = graph.add(term.clone().map_children(|_| y));
        let second = graph.add(other.map_children(|_| first));
        news |= unify(graph, class, second);
    }
    news
}

/// The results of a fork are its operand.
fn fork(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let Term::Apply { op, operands, .. } = term else { return false };
    graph.analysis.layer.ops[op.0].kind == OpKind::Fork && unify(graph, class, operands[0])
}

/// A kernel on slices along one loop `f` and one axis `a`, all else being the same along `a`, is the slice of the
/// kernel on the whole where the outcome walks `f`; else its sum (or maximum) over `a` is the kernel on the whole.
fn split_kernel(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let Some((op, children, outcome)) = roles(graph.analysis.layer, term) else { return false };
    let mut news = false;
    for axis in graph.analysis.mesh.axis_ids() {
        news |= split_along(graph, class, term, &Kernel { op, children: &children, outcome }, axis);
    }
    news
}

struct Kernel<'a> {
    op: ir::graph::OpId,
    children: &'a [Child],
    outcome: Child,
}

fn split_along(graph: &mut Graph<'_>, class: Id, term: &Term, kernel: &Kernel<'_>, axis: AxisId) -> bool {
    let sig = &graph.analysis.signatures[kernel.op.0];
    let dims = |child: Child| match child {
        Child::Operand(k) => &sig.operands[k],
        Child::Result(i) => &sig.results[i],
    };
    // The loop that the axis cuts minor-most.
    let cut = kernel.children.iter().zip(term.children()).find_map(|(&child, &id)| {
        let shape = graph[id].data.shape.as_ref()?;
        let at = shape.dims.iter().position(|(_, axes)| axes.last() == Some(&axis))?;
        dims(child).get(at).copied()
    });
    let Some(factor) = cut else { return false };
    let dim_of = |child: Child| dims(child).iter().position(|&f| f == factor).map(|dim| dim as u8);
    let whole: Option<Vec<Id>> = kernel
        .children
        .iter()
        .zip(term.children())
        .map(|(&child, &id)| match dim_of(child) {
            Some(dim) => unsliced(graph, id, axis, dim),
            None => same_along(graph, id, axis).then_some(id),
        })
        .collect();
    let Some(whole) = whole else { return false };
    let result_dim = dim_of(kernel.outcome);
    let missing = match kernel.outcome {
        Child::Result(_) => sig.missing,
        Child::Operand(_) => Missing::Sum,
    };
    let mut next = whole.into_iter();
    let on_whole = graph.add(term.clone().map_children(|id| next.next().unwrap_or(id)));
    match (result_dim, missing) {
        (Some(dim), _) => {
            let block = graph.add(Term::Slice(axis, dim, [on_whole]));
            unify(graph, class, block)
        }
        (None, Missing::Sum) => {
            let sum = graph.add(Term::AllReduce(axis, [class]));
            unify(graph, sum, on_whole)
        }
        (None, Missing::Max) => {
            let max = graph.add(Term::AllReduceMax(axis, [class]));
            unify(graph, max, on_whole)
        }
        (None, Missing::Whole) => false,
    }
}

/// The class of the sum over an axis, if anything spoke of it.
fn sum_of(graph: &Graph<'_>, id: Id, axis: AxisId) -> Option<Id> {
    graph.lookup(Term::AllReduce(axis, [graph.find(id)]))
}

/// `all-reduce(a, op(x, ..)) = op(all-reduce(a, x), ..)` for operators that are linear in all operands together.
fn linear_kernel(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let Term::Apply { op, operands, .. } = term else { return false };
    if graph.analysis.layer.ops[op.0].kind.line().linear != Linear::Yes {
        return false;
    }
    let mut news = false;
    for axis in graph.analysis.mesh.axis_ids() {
        let sums: Option<Vec<Id>> = operands.iter().map(|&x| sum_of(graph, x, axis)).collect();
        let Some(sums) = sums else { continue };
        let mut next = sums.into_iter();
        let of_sums = graph.add(term.clone().map_children(|id| next.next().unwrap_or(id)));
        let sum = graph.add(Term::AllReduce(axis, [class]));
        news |= unify(graph, sum, of_sums);
    }
    news
}

/// `all-reduce(a, pullback(x, .., g)) = pullback(x, .., all-reduce(a, g))` where the operands are the same along `a`:
/// backward is linear in the gradients that arrive.
fn linear_pullback(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let Some((_, children, Child::Operand(_))) = roles(graph.analysis.layer, term) else { return false };
    // Without an arriving gradient there is nothing to be linear in.
    if !children.iter().any(|child| matches!(child, Child::Result(_))) {
        return false;
    }
    let mut news = false;
    for axis in graph.analysis.mesh.axis_ids() {
        let sums: Option<Vec<Id>> = children
            .iter()
            .zip(term.children())
            .map(|(&child, &id)| match child {
                Child::Operand(_) => same_along(graph, id, axis).then_some(id),
                Child::Result(_) => sum_of(graph, id, axis),
            })
            .collect();
        let Some(sums) = sums else { continue };
        let mut next = sums.into_iter();
        let of_sums = graph.add(term.clone().map_children(|id| next.next().unwrap_or(id)));
        let sum = graph.add(Term::AllReduce(axis, [class]));
        news |= unify(graph, sum, of_sums);
    }
    news
}

/// `update(slice(a, d, p), slice(a, d, g)) = slice(a, d, update(p, g))`: the update works element by element.
fn split_update(graph: &mut Graph<'_>, class: Id, term: &Term) -> bool {
    let Term::Update(tensor, [old, gradient]) = *term else { return false };
    let mut news = false;
    for (axis, dim, whole) in slices(graph, old) {
        if !same_along(graph, whole, axis) {
            continue;
        }
        let Some(whole_gradient) = unsliced(graph, gradient, axis, dim) else { continue };
        let on_whole = graph.add(Term::Update(tensor, [whole, whole_gradient]));
        let block = graph.add(Term::Slice(axis, dim, [on_whole]));
        news |= unify(graph, class, block);
    }
    news
}
