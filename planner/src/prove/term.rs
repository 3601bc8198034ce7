//! The language in which programs are proven: what every device computes, as terms.
//!
//! A term stands for a function from mesh coordinates to local blocks. A block carries the rows it covers, so a lookup
//! in a cut table knows which rows it holds. A tensor of the layer is a term too: the whole tensor, the same on every
//! device. Two terms are equal if they yield equal blocks at every coordinate; no other notion of equality is used, so
//! an unfinished sum is never "equal" to the sum: its all-reduce is.
//!
//! The analysis gives every class of equal terms its shape (which axes cut which dim, in order) and the axes on which
//! it may vary. A term whose parts do not fit has no shape, and no rule touches it. Merging two shapes that differ
//! would mean that a rule is wrong; it is recorded and voids the proof.

use egg::{Analysis, DidMerge, EGraph, Id, Language};
use ir::graph::{DimId, Extent, Layer, OpId, Sizes, TensorId};
use ir::mesh::{AxisId, Mesh};
use ir::program::AxisSet;
use ir::signature::{FactorId, Signature, Split, signature};

/// The dim of a flattened block, along which stored parameters are cut. No tensor has so many dims.
pub(super) const FLAT: u8 = u8::MAX;

/// What every device computes. Children are classes of equal terms.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Term {
    /// A tensor of the layer that it is given: stream, parameter or data; whole.
    Whole(TensorId),
    /// The gradient of a result of the layer, whole.
    OutGradient(TensorId),
    /// Terms of the incoming stream, whose sum over the axes is the stream.
    Terms(TensorId, AxisSet),
    /// A result of an operator on local operands.
    Apply { op: OpId, result: usize, operands: Box<[Id]> },
    /// The gradient of an operand, from those of `given` that are set: operands first, then gradients of results.
    Pullback { op: OpId, operand: usize, given: u128, children: Box<[Id]> },
    /// A parameter's new value from the old and the gradient, element by element.
    Update(TensorId, [Id; 2]),
    /// The device's block of a dim.
    Slice(AxisId, u8, [Id; 1]),
    /// Blocks of all devices, joined in order.
    AllGather(AxisId, u8, [Id; 1]),
    /// Sum over the devices.
    AllReduce(AxisId, [Id; 1]),
    /// Maximum over the devices.
    AllReduceMax(AxisId, [Id; 1]),
    /// The device's block of the sum.
    ReduceScatter(AxisId, u8, [Id; 1]),
    /// Blocks of the first dim become blocks of the second.
    AllToAll(AxisId, u8, u8, [Id; 1]),
    /// The value at coordinate zero, zeros elsewhere.
    Zero(AxisId, [Id; 1]),
}

impl Language for Term {
    type Discriminant = std::mem::Discriminant<Self>;

    fn discriminant(&self) -> Self::Discriminant {
        std::mem::discriminant(self)
    }

    fn matches(&self, other: &Self) -> bool {
        let blank = |term: &Self| term.clone().map_children(|_| Id::from(0));
        blank(self) == blank(other)
    }

    fn children(&self) -> &[Id] {
        match self {
            Self::Whole(_) | Self::OutGradient(_) | Self::Terms(..) => &[],
            Self::Apply { operands: children, .. } | Self::Pullback { children, .. } => children,
            Self::Update(_, children) => children,
            Self::Slice(_, _, child) | Self::AllGather(_, _, child) | Self::ReduceScatter(_, _, child) => {
                child
            }
            Self::AllReduce(_, child) | Self::AllReduceMax(_, child) | Self::Zero(_, child) => child,
            Self::AllToAll(_, _, _, child) => child,
        }
    }

    fn children_mut(&mut self) -> &mut [Id] {
        match self {
            Self::Whole(_) | Self::OutGradient(_) | Self::Terms(..) => &mut [],
            Self::Apply { operands: children, .. } | Self::Pullback { children, .. } => children,
            Self::Update(_, children) => children,
            Self::Slice(_, _, child) | Self::AllGather(_, _, child) | Self::ReduceScatter(_, _, child) => {
                child
            }
            Self::AllReduce(_, child) | Self::AllReduceMax(_, child) | Self::Zero(_, child) => child,
            Self::AllToAll(_, _, _, child) => child,
        }
    }
}

/// Which axes cut which dim, major first; then those that cut the flattened block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) dims: Vec<(DimId, Vec<AxisId>)>,
    pub(super) flat: Vec<AxisId>,
}

impl Shape {
    /// The shape of a whole tensor.
    fn whole(dims: &[DimId]) -> Self {
        Self { dims: dims.iter().map(|&dim| (dim, Vec::new())).collect(), flat: Vec::new() }
    }

    fn cuts_mut(&mut self, dim: u8) -> Option<&mut Vec<AxisId>> {
        if dim == FLAT { Some(&mut self.flat) } else { self.dims.get_mut(dim as usize).map(|(_, axes)| axes) }
    }

    fn is_cut_by(&self, axis: AxisId) -> bool {
        self.flat.contains(&axis) || self.dims.iter().any(|(_, axes)| axes.contains(&axis))
    }
}

/// What is known of a class of equal terms.
#[derive(Clone, Debug)]
pub(super) struct Block {
    /// Its shape; `None` where the term makes no sense.
    pub(super) shape: Option<Shape>,
    /// Axes along which devices may hold different blocks.
    pub(super) varying: AxisSet,
}

/// The analysis: facts of the layer and the mesh, and whether two shapes ever clashed.
pub(super) struct Facts<'a> {
    pub(super) layer: &'a Layer,
    pub(super) mesh: &'a Mesh,
    pub(super) sizes: &'a Sizes,
    pub(super) signatures: Vec<Signature>,
    pub(super) clash: bool,
}

/// The e-graph of a proof.
pub(super) type Graph<'a> = EGraph<Term, Facts<'a>>;

impl<'a> Facts<'a> {
    pub(super) fn new(layer: &'a Layer, mesh: &'a Mesh, sizes: &'a Sizes) -> Self {
        let signatures = layer.ops.iter().map(|op| signature(layer, op)).collect();
        Self { layer, mesh, sizes, signatures, clash: false }
    }

    /// Factors and dims of an operator's operands or results.
    fn side(&self, op: OpId, child: Child) -> (&[FactorId], &[DimId]) {
        let (layer_op, sig) = (&self.layer.ops[op.0], &self.signatures[op.0]);
        let dims = |tensor: TensorId| self.layer.tensors[tensor.0].dims.as_slice();
        match child {
            Child::Operand(k) => (&sig.operands[k], dims(layer_op.operands[k])),
            Child::Result(i) => (&sig.results[i], dims(layer_op.results[i])),
        }
    }

    /// Whether a dim may be cut along these axes: evenly, or so that every block holds a row.
    fn divides(&self, dim: DimId, axes: &[AxisId]) -> bool {
        let parts: u64 = axes.iter().map(|&axis| self.mesh.size(axis)).product();
        match self.layer.dims[dim.0].extent {
            Extent::Uneven(n) => n >= parts * parts,
            Extent::Fixed(_)
            | Extent::MicroBatch
            | Extent::Sequence
            | Extent::UpToSlice
            | Extent::Slots { .. } => self.sizes.dims[dim.0].is_multiple_of(parts),
        }
    }

    /// Shape of the outcome of a kernel whose arguments have the given shapes: every loop must be cut the same way in
    /// all arguments that walk it, no axis may cut two loops, and loops that must be whole are.
    fn kernel_shape(&self, op: OpId, arguments: &[(Child, &Shape)], outcome: Child) -> Option<Shape> {
        let sig = &self.signatures[op.0];
        let mut cuts: Vec<Option<&Vec<AxisId>>> = vec![None; sig.factors.len()];
        for &(child, shape) in arguments {
            let (factors, dims) = self.side(op, child);
            if !shape.flat.is_empty() || !shape.dims.iter().map(|(dim, _)| dim).eq(dims) {
                return None;
            }
            for (factor, (_, axes)) in factors.iter().zip(&shape.dims) {
                let slot = &mut cuts[factor.0 as usize];
                if slot.is_some_and(|known| known != axes) {
                    return None;
                }
                *slot = Some(axes);
            }
        }
        let whole = |i: usize| sig.factors[i].split == Split::Whole;
        if cuts.iter().enumerate().any(|(i, axes)| whole(i) && axes.is_some_and(|axes| !axes.is_empty())) {
            return None;
        }
        let mut used: Vec<AxisId> = cuts.iter().flatten().flat_map(|axes| axes.iter().copied()).collect();
        let n_used = used.len();
        used.sort_unstable();
        used.dedup();
        if used.len() != n_used {
            return None;
        }
        let (factors, dims) = self.side(op, outcome);
        let axes = |factor: &FactorId| cuts[factor.0 as usize].cloned().unwrap_or_default();
        Some(Shape { dims: dims.iter().copied().zip(factors.iter().map(axes)).collect(), flat: Vec::new() })
    }

    fn sliced(&self, shape: &Shape, axis: AxisId, dim: u8) -> Option<Shape> {
        if axis.0 >= self.mesh.n_axes() || shape.is_cut_by(axis) || (dim != FLAT && !shape.flat.is_empty()) {
            return None;
        }
        let mut next = shape.clone();
        next.cuts_mut(dim)?.push(axis);
        let fits =
            dim == FLAT || next.dims.get(dim as usize).is_some_and(|(dim, axes)| self.divides(*dim, axes));
        fits.then_some(next)
    }
}

/// A gather undoes the minor-most cut of its dim.
fn gathered(shape: &Shape, axis: AxisId, dim: u8) -> Option<Shape> {
    if dim != FLAT && !shape.flat.is_empty() {
        return None;
    }
    let mut next = shape.clone();
    let cuts = next.cuts_mut(dim)?;
    (cuts.pop() == Some(axis)).then_some(next)
}

/// An operand or a result of an operator, as the argument or outcome of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Child {
    /// An operand, or its gradient.
    Operand(usize),
    /// A result, or its gradient.
    Result(usize),
}

/// What the children of a kernel's term are, and its outcome.
pub(super) fn roles(layer: &Layer, term: &Term) -> Option<(OpId, Vec<Child>, Child)> {
    match term {
        Term::Apply { op, result, operands } => {
            Some((*op, (0..operands.len()).map(Child::Operand).collect(), Child::Result(*result)))
        }
        Term::Pullback { op, operand, given, .. } => {
            let n_operands = layer.ops[op.0].operands.len();
            let child = |bit: usize| {
                if bit < n_operands { Child::Operand(bit) } else { Child::Result(bit - n_operands) }
            };
            let children = (0..128).filter(|bit| given >> bit & 1 == 1).map(child).collect();
            Some((*op, children, Child::Operand(*operand)))
        }
        Term::Whole(_) | Term::OutGradient(_) | Term::Terms(..) | Term::Update(..) | Term::Slice(..) => None,
        Term::AllGather(..) | Term::AllReduce(..) | Term::AllReduceMax(..) => None,
        Term::ReduceScatter(..) | Term::AllToAll(..) | Term::Zero(..) => None,
    }
}

fn shape_of(graph: &Graph<'_>, term: &Term) -> Option<Shape> {
    let facts = &graph.analysis;
    let tensor = |id: &TensorId| Shape::whole(&facts.layer.tensors[id.0].dims);
    let shape = |id: &Id| graph[*id].data.shape.as_ref();
    match term {
        Term::Whole(id) | Term::Terms(id, _) => Some(tensor(id)),
        Term::OutGradient(out) => Some(tensor(out)),
        Term::Apply { .. } | Term::Pullback { .. } => {
            let (op, roles, outcome) = roles(facts.layer, term)?;
            let shapes: Option<Vec<&Shape>> = term.children().iter().map(shape).collect();
            let arguments: Vec<(Child, &Shape)> = roles.into_iter().zip(shapes?).collect();
            facts.kernel_shape(op, &arguments, outcome)
        }
        Term::Update(_, [old, gradient]) => {
            let (old, gradient) = (shape(old)?, shape(gradient)?);
            (old == gradient).then(|| old.clone())
        }
        Term::Slice(axis, dim, [x]) => facts.sliced(shape(x)?, *axis, *dim),
        Term::AllGather(axis, dim, [x]) => gathered(shape(x)?, *axis, *dim),
        Term::ReduceScatter(axis, dim, [x]) => facts.sliced(shape(x)?, *axis, *dim),
        Term::AllToAll(axis, from, to, [x]) => facts.sliced(&gathered(shape(x)?, *axis, *from)?, *axis, *to),
        Term::AllReduce(axis, [x]) | Term::AllReduceMax(axis, [x]) | Term::Zero(axis, [x]) => {
            let shape = shape(x)?;
            (!shape.is_cut_by(*axis)).then(|| shape.clone())
        }
    }
}

fn varying_of(graph: &Graph<'_>, term: &Term) -> AxisSet {
    let children = term.children().iter().fold(0, |bits, id| bits | graph[*id].data.varying.0);
    let bit = |axis: &AxisId| AxisSet::of(&[*axis]).0;
    AxisSet(match term {
        Term::Terms(_, axes) => axes.0,
        Term::Whole(_) | Term::OutGradient(_) => 0,
        Term::Apply { .. } | Term::Pullback { .. } | Term::Update(..) => children,
        Term::Slice(axis, ..) | Term::ReduceScatter(axis, ..) => children | bit(axis),
        Term::AllToAll(axis, ..) | Term::Zero(axis, _) => children | bit(axis),
        Term::AllGather(axis, ..) | Term::AllReduce(axis, _) | Term::AllReduceMax(axis, _) => {
            children & !bit(axis)
        }
    })
}

impl Analysis<Term> for Facts<'_> {
    type Data = Block;

    fn make(graph: &mut Graph<'_>, term: &Term, _id: Id) -> Block {
        Block { shape: shape_of(graph, term), varying: varying_of(graph, term) }
    }

    /// Equal terms vary only where both may.
    fn merge(&mut self, a: &mut Block, b: Block) -> DidMerge {
        let varying = AxisSet(a.varying.0 & b.varying.0);
        let mut did = DidMerge(varying != a.varying, varying != b.varying);
        a.varying = varying;
        match (&a.shape, b.shape) {
            (None, Some(shape)) => {
                a.shape = Some(shape);
                did.0 = true;
            }
            (Some(_), None) => did.1 = true,
            (Some(one), Some(other)) => self.clash |= *one != other,
            (None, None) => {}
        }
        did
    }
}
