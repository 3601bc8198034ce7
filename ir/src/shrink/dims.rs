//! Dims that must keep one length wherever they occur, and how finely the plan cuts each.
//!
//! Two dims are one class where a stream or a shared parameter joins them, and where layers give them one name and
//! length. A class's cut is the largest product of axes on one loop or sharding, in the large mesh and in the small.

use crate::graph::{DimId, Extent, Layer, Model, Op, TensorId};
use crate::links::links as stream_links;
use crate::mesh::{AxisId, Mesh};
use crate::op::OpKind;
use crate::plan::check::OpenPlan;
use crate::signature::{FactorId, signature};

/// Position of a class of dims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ClassId(pub(super) usize);

/// Dims of all layers in classes of equal length.
#[derive(Clone, Debug)]
pub(super) struct Classes {
    /// Class of every dim of every layer.
    of: Vec<Vec<ClassId>>,
    /// Extent of every class.
    pub(super) extents: Vec<Extent>,
}

/// Into how many blocks something is cut, in the large plan and in the small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) large: u64,
    pub(super) small: u64,
}

impl Cut {
    pub(super) const NONE: Self = Self { large: 1, small: 1 };

    fn of(axes: &[AxisId], large: &Mesh, small: &Mesh) -> Self {
        let parts = |mesh: &Mesh| axes.iter().map(|&axis| mesh.size(axis)).product();
        Self { large: parts(large), small: parts(small) }
    }

    pub(super) fn max(self, other: Self) -> Self {
        Self { large: self.large.max(other.large), small: self.small.max(other.small) }
    }
}

impl Classes {
    /// The classes of a plan's model.
    pub(super) fn new(open: &OpenPlan, order: &[usize]) -> Self {
        let model = &open.model;
        let mut offsets = vec![0];
        for layer in &model.layers {
            offsets.push(offsets[offsets.len() - 1] + layer.dims.len());
        }
        let mut union = Union { parents: (0..offsets[model.layers.len()]).collect() };
        let at = |layer: usize, dim: DimId| offsets[layer] + dim.0;
        for (one, other) in links(model, order) {
            union.join(at(one.0, one.1), at(other.0, other.1));
        }
        let mut roots: Vec<usize> = Vec::new();
        let mut extents = Vec::new();
        let mut of = Vec::new();
        for (l, layer) in model.layers.iter().enumerate() {
            let mut ids = Vec::new();
            for (d, dim) in layer.dims.iter().enumerate() {
                let root = union.root(at(l, DimId(d)));
                let known = roots.iter().position(|&r| r == root);
                let class = known.unwrap_or_else(|| {
                    roots.push(root);
                    extents.push(dim.extent);
                    roots.len() - 1
                });
                ids.push(ClassId(class));
            }
            of.push(ids);
        }
        Self { of, extents }
    }

    /// Class of a dim.
    pub(super) fn class(&self, layer: usize, dim: DimId) -> ClassId {
        self.of[layer][dim.0]
    }

    /// Class of the last dim of a tensor.
    pub(super) fn last(&self, layer: (usize, &Layer), tensor: TensorId) -> Option<ClassId> {
        layer.1.tensors[tensor.0].dims.last().map(|&dim| self.class(layer.0, dim))
    }

    /// Class of the dim of which an operator's attributes name parts: that which a split cuts, or along which a
    /// concatenation puts them.
    pub(super) fn of_parts(&self, layer: (usize, &Layer), op: &Op) -> Option<ClassId> {
        let PartsOf { whole, along, .. } = parts_of(layer.1, op)?;
        layer.1.tensors[whole.0].dims.get(along).map(|&dim| self.class(layer.0, dim))
    }

    /// Length of a class that the model fixes.
    pub(super) fn length(&self, class: ClassId) -> Option<u64> {
        self.extents[class.0].fixed()
    }
}

/// A tensor and its parts along a dim.
pub(super) struct PartsOf<'a> {
    pub(super) whole: TensorId,
    /// Position of the dim that no part has.
    pub(super) along: usize,
    pub(super) parts: &'a [TensorId],
    /// Length of every part.
    pub(super) sizes: &'a [u64],
}

/// What an operator takes apart or puts together.
pub(super) fn parts_of<'a>(layer: &Layer, op: &'a Op) -> Option<PartsOf<'a>> {
    if let OpKind::Split { sizes } = &op.kind {
        let along = signature(layer, op).cut_dim()?;
        return Some(PartsOf { whole: *op.operands.first()?, along, parts: &op.results, sizes });
    }
    let OpKind::Concat { sizes } = &op.kind else { return None };
    let along = signature(layer, op).joined_dim()?;
    Some(PartsOf { whole: *op.results.first()?, along, parts: &op.operands, sizes })
}

type Place = (usize, DimId);

/// Pairs of dims that have one length.
fn links(model: &Model, order: &[usize]) -> Vec<(Place, Place)> {
    let mut links = Vec::new();
    let places: Vec<(usize, DimId)> = model
        .layers
        .iter()
        .enumerate()
        .flat_map(|(l, layer)| (0..layer.dims.len()).map(move |d| (l, DimId(d))))
        .collect();
    let dim = |place: &Place| &model.layers[place.0].dims[place.1.0];
    for (i, one) in places.iter().enumerate() {
        for other in &places[i + 1..] {
            let (a, b) = (dim(one), dim(other));
            let vocabulary = matches!(a.extent, Extent::Uneven(_));
            if a.extent == b.extent && (a.name == b.name || vocabulary) {
                links.push((*one, *other));
            }
        }
    }
    let positional = |one: (usize, TensorId), other: (usize, TensorId)| {
        let dims = |(layer, tensor): (usize, TensorId)| {
            model.layers[layer].tensors[tensor.0]
                .dims
                .iter()
                .map(move |&dim| (layer, dim))
                .collect::<Vec<_>>()
        };
        dims(one).into_iter().zip(dims(other)).collect::<Vec<_>>()
    };
    for link in stream_links(order.iter().map(|&kind| &model.layers[kind])) {
        let (from, to) = (order[link.from], order[link.to]);
        let (left, read) = (model.layers[from].out[link.left], model.layers[to].stream_in[link.read]);
        links.extend(positional((from, left), (to, read)));
    }
    for tie in &model.ties {
        links.extend(positional((tie.owner.layer, tie.owner.tensor), (tie.copy.layer, tie.copy.tensor)));
    }
    links
}

struct Union {
    parents: Vec<usize>,
}

impl Union {
    fn root(&self, mut at: usize) -> usize {
        while self.parents[at] != at {
            at = self.parents[at];
        }
        at
    }

    /// The smaller root stays, so that the result does not depend on the order of joins.
    fn join(&mut self, one: usize, other: usize) {
        let (one, other) = (self.root(one), self.root(other));
        self.parents[one.max(other)] = one.min(other);
    }
}

/// The cut of every class; per entry, its mesh in the large plan and in the small.
pub(super) fn cuts(open: &OpenPlan, classes: &Classes, meshes: &[(Mesh, Mesh)]) -> Vec<Cut> {
    let mut cuts = vec![Cut::NONE; classes.extents.len()];
    let mut note = |class: ClassId, cut: Cut| cuts[class.0] = cuts[class.0].max(cut);
    for (entry, (large, small)) in open.entries.iter().zip(meshes) {
        let layer = &open.model.layers[entry.layer];
        for (op, strategy) in layer.ops.iter().zip(&entry.choice.strategies) {
            for (i, factor) in signature(layer, op).factors.iter().enumerate() {
                let own = FactorId(i as u8);
                let axes: Vec<AxisId> =
                    large.axis_ids().filter(|&axis| strategy.on(axis).cuts(own)).collect();
                note(classes.class(entry.layer, factor.dim), Cut::of(&axes, large, small));
            }
        }
        let read = layer.stream_in.iter().map(|tensor| (tensor, entry.choice.stream));
        let left = layer.out.iter().map(|tensor| (tensor, entry.choice.out));
        for (tensor, sharding) in read.chain(left) {
            for (at, &dim) in layer.tensors[tensor.0].dims.iter().enumerate() {
                let axes: Vec<AxisId> = sharding.axes_of(at).filter(|axis| axis.0 < large.n_axes()).collect();
                note(classes.class(entry.layer, dim), Cut::of(&axes, large, small));
            }
        }
    }
    cuts
}
