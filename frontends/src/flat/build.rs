//! Operators of one layer as a layer of the graph, with a fork where a value has several readers.
//!
//! A value that is taken from the stack and not read by any operator of the layer passes by a fork with one result; one
//! that is read here and later too leaves by one more result of its fork. Dims and tensors stand in the order in which
//! they are met, so that layers that do the same differ in names alone.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use ir::graph::{DimId, Layer, Op, Tensor, TensorId};
use ir::op::OpKind;

use super::flow::Flow;

/// A layer of a flat graph.
#[derive(Clone, Debug)]
pub(crate) struct Built {
    /// The layer, its tensors and operators named as in the whole graph.
    pub(crate) layer: Layer,
    /// Its parameters: the tensor of the whole graph and its own.
    pub(crate) parameters: Vec<(TensorId, TensorId)>,
}

/// Builds the layer of some operators that takes some values and leaves others.
pub(crate) fn build(flow: &Flow<'_>, ops: Range<usize>, stream: &[TensorId], out: &[TensorId]) -> Built {
    let mut uses: BTreeMap<TensorId, usize> = BTreeMap::new();
    for value in ops.clone().flat_map(|at| flow.reads(at)).chain(out.iter().copied()) {
        *uses.entry(value).or_insert(0) += 1;
    }
    let layer = Layer {
        name: String::new(),
        dims: Vec::new(),
        tensors: Vec::new(),
        ops: Vec::new(),
        stream_in: Vec::new(),
        out: Vec::new(),
    };
    let mut builder = Builder {
        flow,
        layer,
        tensors: BTreeMap::new(),
        dims: BTreeMap::new(),
        uses,
        copies: BTreeMap::new(),
    };
    for (slot, &value) in stream.iter().enumerate() {
        let name = if stream.len() == 1 { "stream".to_owned() } else { format!("stream.{}", slot + 1) };
        builder.add(value, name);
    }
    for at in ops {
        builder.op(at);
    }
    builder.layer.out = out.iter().map(|&value| builder.leave(value, stream)).collect();
    builder.layer.stream_in = stream.iter().map(|value| builder.tensors[value]).collect();
    let is_parameter = |(whole, _): &(TensorId, TensorId)| flow.whole.is_parameter(*whole);
    let parameters = builder.tensors.iter().map(|(&whole, &own)| (whole, own)).filter(is_parameter).collect();
    Built { layer: builder.layer, parameters }
}

struct Builder<'a> {
    flow: &'a Flow<'a>,
    layer: Layer,
    /// Own tensors by those of the whole graph.
    tensors: BTreeMap<TensorId, TensorId>,
    dims: BTreeMap<DimId, DimId>,
    /// How often a value is read or leaves.
    uses: BTreeMap<TensorId, usize>,
    /// Results of forks that are still to be read.
    copies: BTreeMap<TensorId, VecDeque<TensorId>>,
}

impl Builder<'_> {
    fn add(&mut self, whole: TensorId, name: String) -> TensorId {
        let Tensor { dims, role, .. } = &self.flow.whole.tensors[whole.0];
        let dims = dims.iter().map(|&dim| self.dim(dim)).collect();
        let own = self.push(Tensor { name, dims, role: *role });
        self.tensors.insert(whole, own);
        own
    }

    fn push(&mut self, tensor: Tensor) -> TensorId {
        self.layer.tensors.push(tensor);
        TensorId(self.layer.tensors.len() - 1)
    }

    fn dim(&mut self, whole: DimId) -> DimId {
        let next = DimId(self.dims.len());
        let own = *self.dims.entry(whole).or_insert(next);
        if own == next {
            self.layer.dims.push(self.flow.whole.dims[whole.0].clone());
        }
        own
    }

    fn own(&mut self, whole: TensorId) -> TensorId {
        let name = &self.flow.whole.tensors[whole.0].name;
        self.tensors.get(&whole).copied().unwrap_or_else(|| self.add(whole, name.clone()))
    }

    fn op(&mut self, at: usize) {
        let op = self.flow.op(at);
        let operands = self.flow.operands[at].iter().map(|&operand| self.read(operand)).collect();
        let results = op.results.iter().map(|&result| self.own(result)).collect();
        self.layer.ops.push(Op { name: op.name.clone(), kind: op.kind.clone(), operands, results });
    }

    /// The tensor by which the next reader reads a value.
    fn read(&mut self, value: TensorId) -> TensorId {
        if let Some(copy) = self.copies.get_mut(&value).and_then(VecDeque::pop_front) {
            return copy;
        }
        match self.uses.get(&value) {
            Some(&uses) if uses > 1 => self.fork(value, uses),
            Some(_) | None => self.own(value),
        }
    }

    /// Puts a fork, and gives its first result.
    fn fork(&mut self, value: TensorId, uses: usize) -> TensorId {
        let operand = self.own(value);
        let Tensor { name, dims, role } = self.layer.tensors[operand.0].clone();
        let copy = |n: usize| Tensor { name: format!("{name}.{}", n + 1), dims: dims.clone(), role };
        let results: Vec<TensorId> = (0..uses).map(|n| self.push(copy(n))).collect();
        self.copies.insert(value, results.iter().copied().skip(1).collect());
        let first = results[0];
        self.layer.ops.push(Op {
            name: format!("{name}.fork"),
            kind: OpKind::Fork,
            operands: vec![operand],
            results,
        });
        first
    }

    /// The tensor by which a value leaves the layer.
    fn leave(&mut self, value: TensorId, stream: &[TensorId]) -> TensorId {
        let only_waits = stream.contains(&value) && self.uses.get(&value) == Some(&1);
        if only_waits { self.fork(value, 1) } else { self.read(value) }
    }
}
