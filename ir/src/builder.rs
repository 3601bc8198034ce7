//! Building a layer operator by operator; tensors with several readers get their `fork` by themselves.

use crate::graph::{Dim, DimId, Extent, Init, Layer, Op, Role, Tensor, TensorId};
use crate::op::OpKind;

/// A layer under construction. Names of dims, tensors and operators must be unique; `graph::check` says so otherwise.
#[derive(Clone, Debug)]
pub struct LayerBuilder {
    layer: Layer,
}

impl LayerBuilder {
    /// An empty layer with the dims `b` (sequences of a micro-batch) and `s` (tokens of a sequence).
    pub fn new(name: &str) -> Self {
        let layer = Layer {
            name: name.into(),
            dims: Vec::new(),
            tensors: Vec::new(),
            ops: Vec::new(),
            stream_in: Vec::new(),
            out: Vec::new(),
        };
        let mut builder = Self { layer };
        builder.dim("b", Extent::MicroBatch);
        builder.dim("s", Extent::Sequence);
        builder
    }

    /// Adds a dim.
    pub fn dim(&mut self, name: &str, extent: Extent) {
        self.layer.dims.push(Dim { name: name.into(), extent });
    }

    /// Adds a dim whose length the model fixes.
    pub fn fixed(&mut self, name: &str, length: u64) {
        self.dim(name, Extent::Fixed(length));
    }

    /// Adds the incoming stream `[b s h]`.
    pub fn stream(&mut self) -> TensorId {
        self.stream_named("stream", "b s h")
    }

    /// Adds an incoming stream; the last to be added is topmost.
    pub fn stream_named(&mut self, name: &str, dims: &str) -> TensorId {
        let stream = self.tensor(name, dims, Role::Activation);
        self.layer.stream_in.push(stream);
        stream
    }

    /// Adds a tensor; `dims` are names separated by spaces.
    pub fn tensor(&mut self, name: &str, dims: &str, role: Role) -> TensorId {
        let find = |dim: &str| self.layer.dims.iter().position(|d| d.name == dim).unwrap_or(usize::MAX);
        let dims = dims.split_whitespace().map(|dim| DimId(find(dim))).collect();
        self.layer.tensors.push(Tensor { name: name.into(), dims, role });
        TensorId(self.layer.tensors.len() - 1)
    }

    /// Adds a learned tensor.
    pub fn parameter(&mut self, name: &str, dims: &str, init: Init) -> TensorId {
        self.tensor(name, dims, Role::Parameter(init))
    }

    /// Adds an operator with one result, which is named like it.
    pub fn op(&mut self, name: &str, kind: OpKind, operands: &[TensorId], dims: &str) -> TensorId {
        self.op_many(name, kind, operands, &[(name, dims)])[0]
    }

    /// Adds an operator with several results, each a name and dims.
    pub fn op_many(
        &mut self,
        name: &str,
        kind: OpKind,
        operands: &[TensorId],
        results: &[(&str, &str)],
    ) -> Vec<TensorId> {
        let results: Vec<TensorId> =
            results.iter().map(|(name, dims)| self.tensor(name, dims, Role::Activation)).collect();
        self.layer.ops.push(Op {
            name: name.into(),
            kind,
            operands: operands.to_vec(),
            results: results.clone(),
        });
        results
    }

    /// Ends the layer with its outgoing stream or loss, and puts forks where an activation has several readers.
    pub fn finish(self, out: TensorId) -> Layer {
        self.finish_with(&[out])
    }

    /// Ends a layer that leaves several streams, the topmost last; one that it reads and leaves as it is goes through a
    /// fork.
    pub fn finish_with(mut self, out: &[TensorId]) -> Layer {
        self.layer.out = out.to_vec();
        let activations: Vec<TensorId> =
            self.layer.tensor_ids().filter(|t| self.layer.tensors[t.0].role == Role::Activation).collect();
        for tensor in activations {
            self.fork(tensor);
        }
        self.layer
    }

    fn fork(&mut self, tensor: TensorId) {
        let reads: Vec<(usize, usize)> = self
            .layer
            .ops
            .iter()
            .enumerate()
            .flat_map(|(o, op)| op.operands.iter().enumerate().map(move |(i, t)| (o, i, *t)))
            .filter(|(.., t)| *t == tensor)
            .map(|(o, i, _)| (o, i))
            .collect();
        let leaves: Vec<usize> =
            (0..self.layer.out.len()).filter(|&at| self.layer.out[at] == tensor).collect();
        let passes = self.layer.stream_in.contains(&tensor) && !leaves.is_empty();
        if reads.len() + leaves.len() < 2 && !passes {
            return;
        }
        let Tensor { name, dims, .. } = self.layer.tensors[tensor.0].clone();
        let mut results = Vec::new();
        for (n, &(o, i)) in reads.iter().enumerate() {
            let copy =
                Tensor { name: format!("{name}.{}", n + 1), dims: dims.clone(), role: Role::Activation };
            self.layer.tensors.push(copy);
            let id = TensorId(self.layer.tensors.len() - 1);
            self.layer.ops[o].operands[i] = id;
            results.push(id);
        }
        for at in leaves {
            let copy = Tensor { name: format!("{name}.out"), dims: dims.clone(), role: Role::Activation };
            self.layer.tensors.push(copy);
            let id = TensorId(self.layer.tensors.len() - 1);
            self.layer.out[at] = id;
            results.push(id);
        }
        let made = self.layer.producer(tensor).map_or(0, |op| op.0 + 1);
        let at = reads.first().map_or(made, |&(first, _)| first);
        let fork = Op { name: format!("{name}.fork"), kind: OpKind::Fork, operands: vec![tensor], results };
        self.layer.ops.insert(at, fork);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_with_two_readers_gets_a_fork_before_the_first() {
        let mut builder = LayerBuilder::new("residual");
        builder.fixed("h", 4);
        let x = builder.stream();
        let doubled = builder.op("doubled", OpKind::Scale { by: 2.0 }, &[x], "b s h");
        let sum = builder.op("sum", OpKind::Add, &[x, doubled], "b s h");
        let layer = builder.finish(sum);
        let names: Vec<&str> = layer.ops.iter().map(|op| op.name.as_str()).collect();
        assert_eq!(names, ["stream.fork", "doubled", "sum"]);
    }

    #[test]
    fn a_stream_that_is_read_and_left_gets_a_fork_and_so_does_one_that_is_only_left() {
        let mut builder = LayerBuilder::new("passing");
        builder.fixed("h", 4);
        let [below, memory] = ["below", "memory"].map(|name| builder.stream_named(name, "b s h"));
        let x = builder.stream();
        let sum = builder.op("sum", OpKind::Add, &[x, memory], "b s h");
        let layer = builder.finish_with(&[below, memory, sum]);
        let names: Vec<&str> = layer.ops.iter().map(|op| op.name.as_str()).collect();
        assert_eq!(names, ["below.fork", "memory.fork", "sum"]);
        let left: Vec<&str> = layer.out.iter().map(|out| layer.tensors[out.0].name.as_str()).collect();
        assert_eq!(left, ["below.out", "memory.out", "sum"]);
    }
}
