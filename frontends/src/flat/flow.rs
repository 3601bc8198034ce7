//! What flows in a flat graph: which operator makes a value and which read it, checked and in order. Forks are left
//! out: where they belong is known when layers are.

use std::collections::{BTreeMap, BTreeSet};

use ir::graph::{Layer, Op, Role, TensorId};
use ir::native::DocumentError;
use ir::op::OpKind;
use ir::signature::check_operands;
use petgraph::algo::{astar, kosaraju_scc, toposort};
use petgraph::graph::{DiGraph, NodeIndex};

use super::order::order;

/// Operators of a cycle that an error names.
const SHOWN_OPERATORS: usize = 6;

/// A flat graph in order.
#[derive(Debug)]
pub(crate) struct Flow<'a> {
    /// All dims, tensors and operators, as in the file.
    pub(crate) whole: &'a Layer,
    /// Operators in order, as positions in the file; there are no forks among them.
    pub(crate) order: Vec<usize>,
    /// Their operands; results of forks are what was forked.
    pub(crate) operands: Vec<Vec<TensorId>>,
    /// Position in the order at which a tensor is made; `None` for what is given and for results of forks.
    pub(crate) made: Vec<Option<usize>>,
}

impl<'a> Flow<'a> {
    /// Checks a graph and puts it in order.
    ///
    /// # Errors
    /// What is named, made or read wrongly, or the operators of a cycle.
    pub(crate) fn new(whole: &'a Layer) -> Result<Self, DocumentError> {
        unique(whole)?;
        let makers = makers(whole)?;
        check_reads(whole, &makers)?;
        let in_turn = in_turn(whole, &makers)?;
        for (i, op) in whole.ops.iter().enumerate() {
            check_operands(whole, op).map_err(|what| fault(format!("ops[{i}]"), what))?;
        }
        let sources = sources(whole, &in_turn);
        let order = in_order(whole, &makers, &sources);
        let operands: Vec<Vec<TensorId>> =
            order.iter().map(|&op| whole.ops[op].operands.iter().map(|t| sources[t.0]).collect()).collect();
        let mut made = vec![None; whole.tensors.len()];
        for (position, &op) in order.iter().enumerate() {
            for result in &whole.ops[op].results {
                made[result.0] = Some(position);
            }
        }
        Ok(Self { whole, order, operands, made })
    }

    /// The operator at a position.
    pub(crate) fn op(&self, position: usize) -> &Op {
        &self.whole.ops[self.order[position]]
    }

    /// The tensor that is the loss.
    pub(crate) fn loss(&self) -> TensorId {
        loss(self.whole)
    }

    /// Number of operators.
    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether a tensor is computed.
    pub(crate) fn is_activation(&self, tensor: TensorId) -> bool {
        self.whole.tensors[tensor.0].role == Role::Activation
    }

    /// Activations that the operator at a position reads.
    pub(crate) fn reads(&self, position: usize) -> impl Iterator<Item = TensorId> + '_ {
        self.operands[position].iter().copied().filter(|&tensor| self.is_activation(tensor))
    }

    /// Whether the operator at a position begins a branch: it reads no activation.
    pub(crate) fn begins(&self, position: usize) -> bool {
        self.reads(position).next().is_none()
    }
}

/// A flat document has one tensor that leaves it.
fn loss(whole: &Layer) -> TensorId {
    whole.out[0]
}

pub(crate) fn fault(place: String, what: String) -> DocumentError {
    DocumentError { place, what }
}

fn unique(whole: &Layer) -> Result<(), DocumentError> {
    let lists: [(&str, Vec<&str>); 3] = [
        ("dims", whole.dims.iter().map(|dim| dim.name.as_str()).collect()),
        ("tensors", whole.tensors.iter().map(|tensor| tensor.name.as_str()).collect()),
        ("ops", whole.ops.iter().map(|op| op.name.as_str()).collect()),
    ];
    for (list, names) in lists {
        let mut seen = BTreeSet::new();
        if let Some(at) = names.iter().position(|name| !seen.insert(*name)) {
            return Err(fault(format!("{list}[{at}].name"), format!("`{}` is already taken", names[at])));
        }
    }
    Ok(())
}

/// The operator that makes each tensor.
fn makers(whole: &Layer) -> Result<Vec<Option<usize>>, DocumentError> {
    let mut makers: Vec<Option<usize>> = vec![None; whole.tensors.len()];
    for (i, op) in whole.ops.iter().enumerate() {
        for (k, result) in op.results.iter().enumerate() {
            let tensor = &whole.tensors[result.0];
            let place = || format!("ops[{i}].results[{k}]");
            if tensor.role != Role::Activation {
                let what = format!("`{}` is given, no operator can compute it", tensor.name);
                return Err(fault(place(), what));
            }
            if let Some(other) = makers[result.0].replace(i) {
                let what = format!("`{}` is already computed by `{}`", tensor.name, whole.ops[other].name);
                return Err(fault(place(), what));
            }
        }
    }
    Ok(makers)
}

fn check_reads(whole: &Layer, makers: &[Option<usize>]) -> Result<(), DocumentError> {
    let mut is_read = vec![false; whole.tensors.len()];
    for (i, op) in whole.ops.iter().enumerate() {
        for (k, operand) in op.operands.iter().enumerate() {
            let tensor = &whole.tensors[operand.0];
            is_read[operand.0] = true;
            if tensor.role == Role::Activation && makers[operand.0].is_none() {
                let what =
                    format!("no operator computes `{}`; a parameter or data needs its role", tensor.name);
                return Err(fault(format!("ops[{i}].operands[{k}]"), what));
            }
        }
    }
    let out = &whole.tensors[loss(whole).0];
    if makers[loss(whole).0].is_none() || is_read[loss(whole).0] || !out.dims.is_empty() {
        let what =
            format!("`{}` is not the loss: it must be computed, not be read, and have no dims", out.name);
        return Err(fault("out".into(), what));
    }
    let unread =
        |&at: &usize| !is_read[at] && at != loss(whole).0 && !matches!(whole.tensors[at].role, Role::Data(_));
    match (0..whole.tensors.len()).find(unread) {
        Some(at) => {
            Err(fault(format!("tensors[{at}]"), format!("`{}` is never read", whole.tensors[at].name)))
        }
        None => Ok(()),
    }
}

/// All operators, forks among them, every one behind those whose results it reads.
fn in_turn(whole: &Layer, makers: &[Option<usize>]) -> Result<Vec<usize>, DocumentError> {
    let mut graph: DiGraph<(), ()> = DiGraph::with_capacity(whole.ops.len(), 2 * whole.ops.len());
    for _ in &whole.ops {
        graph.add_node(());
    }
    for (reader, op) in whole.ops.iter().enumerate() {
        for maker in op.operands.iter().filter_map(|operand| makers[operand.0]) {
            graph.add_edge(NodeIndex::new(maker), NodeIndex::new(reader), ());
        }
    }
    match toposort(&graph, None) {
        Ok(order) => Ok(order.into_iter().map(NodeIndex::index).collect()),
        Err(_) => Err(cycle(whole, &graph)),
    }
}

/// The error that names a shortest cycle through one of the operators that are in one.
fn cycle(whole: &Layer, graph: &DiGraph<(), ()>) -> DocumentError {
    let is_cyclic = |part: &Vec<NodeIndex>| part.len() > 1 || graph.contains_edge(part[0], part[0]);
    let parts = kosaraju_scc(graph);
    let members = parts.iter().filter(|part| is_cyclic(part)).flatten();
    let first = members.copied().min().unwrap_or_default();
    let back = |next| astar(graph, next, |node| node == first, |_| 1, |_| 0);
    let shortest = graph.neighbors(first).filter_map(back).min_by_key(|(steps, _)| *steps);
    let names: Vec<String> = std::iter::once(first)
        .chain(shortest.map(|(_, path)| path).unwrap_or_default())
        .map(|node| format!("`{}`", whole.ops[node.index()].name))
        .collect();
    let shown = if names.len() > SHOWN_OPERATORS {
        format!("{} ... {}", names[..SHOWN_OPERATORS - 1].join(" "), names[names.len() - 1])
    } else {
        names.join(" ")
    };
    let what = format!("operators wait for each other in a cycle of {}: {shown}", names.len() - 1);
    fault(format!("ops[{}]", first.index()), what)
}

fn in_order(whole: &Layer, makers: &[Option<usize>], sources: &[TensorId]) -> Vec<usize> {
    let before = |op: &Op| op.operands.iter().filter_map(|operand| makers[sources[operand.0].0]).collect();
    let before: Vec<Vec<usize>> = whole.ops.iter().map(before).collect();
    makers[loss(whole).0].map_or_else(Vec::new, |loss| order(&before, loss))
}

/// What each tensor is a copy of: of results of forks what was forked, of all else itself.
fn sources(whole: &Layer, in_turn: &[usize]) -> Vec<TensorId> {
    let mut sources: Vec<TensorId> = whole.tensor_ids().collect();
    for op in in_turn.iter().map(|&op| &whole.ops[op]).filter(|op| op.kind == OpKind::Fork) {
        for result in &op.results {
            sources[result.0] = sources[op.operands[0].0];
        }
    }
    sources
}

/// Numbers for equal things, in the order in which they are met.
#[derive(Debug)]
pub(crate) struct Numbering<K>(BTreeMap<K, usize>);

impl<K: Ord> Numbering<K> {
    pub(crate) fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// The number of a thing.
    pub(crate) fn of(&mut self, thing: K) -> usize {
        let next = self.0.len();
        *self.0.entry(thing).or_insert(next)
    }
}
