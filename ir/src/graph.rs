//! The model as a graph: layer kinds stored once, each a list of operators over tensors with named dims, and the
//! sequence in which the kinds repeat.
//!
//! Layers hand values on by a stack: a layer takes as many from its top as it reads (`Layer::stream_in`) and puts there
//! what it leaves (`Layer::out`). In a decoder there is one, the residual stream. A layer that reads none begins a
//! branch of the graph, which a later one joins; what lies below waits. The last layer leaves the loss alone. Operators
//! stand in execution order. Every activation has exactly one reader: a tensor with several goes through an explicit
//! `fork`, which keeps the search pairwise. `check` is the invariant every front end must meet.

mod check;

use std::ops::Range;

use crate::op::OpKind;

pub use check::{GraphError, check};

/// Position of a dim in its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DimId(pub usize);

/// Position of a tensor in its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId(pub usize);

/// Position of an operator in its layer; also execution order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub usize);

/// Length of a dim: fixed by the model, or set by the job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Extent {
    /// Fixed by the model.
    Fixed(u64),
    /// Fixed by the model; blocks may be unequal (a vocabulary).
    Uneven(u64),
    /// Sequences of one micro-batch, over all devices of a stage.
    MicroBatch,
    /// Tokens of one sequence.
    Sequence,
    /// Tokens of one sequence up to the end of the slice at hand, where sequences are cut into slices (`slices`).
    UpToSlice,
    /// Slots of one expert for the tokens of one sequence. Without a capacity a slot exists for every token, and
    /// `filled` of them (on average `top_k / experts`) hold one; only those cost time and memory on a real engine.
    Slots {
        /// Expected fraction of a sequence's tokens that an expert is given.
        filled: f64,
        /// Slots are this many times what is expected; tokens beyond are dropped, later positions first. All slots
        /// then cost time and memory, filled or not (Fedus et al. 2022, arXiv 2101.03961, section 2.2).
        capacity: Option<f64>,
    },
}

impl Extent {
    /// Whether it counts slots of which every token of a sequence has one.
    pub fn is_one_slot_per_token(self) -> bool {
        matches!(self, Self::Slots { capacity: None, .. })
    }

    /// The length that the model fixes, if it does.
    pub fn fixed(self) -> Option<u64> {
        match self {
            Self::Fixed(n) | Self::Uneven(n) => Some(n),
            Self::MicroBatch | Self::Sequence | Self::UpToSlice | Self::Slots { .. } => None,
        }
    }
}

/// A named dim.
#[derive(Clone, Debug, PartialEq)]
pub struct Dim {
    /// Name, unique in the layer: `b`, `s`, `h`, …
    pub name: String,
    /// Length.
    pub extent: Extent,
}

/// What a tensor is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Role {
    /// Computed from the stream, once per micro-batch.
    Activation,
    /// Learned; the value is how it is initialised for a run.
    Parameter(Init),
    /// A parameter that stays as it is: it has no gradient and no optimizer state.
    Frozen(Init),
    /// Given with the batch or fixed: tokens, labels, positions.
    Data(Data),
}

impl Role {
    /// How a parameter begins, learned or frozen; nothing for what is no parameter.
    pub fn init(self) -> Option<Init> {
        match self {
            Self::Parameter(init) | Self::Frozen(init) => Some(init),
            Self::Activation | Self::Data(_) => None,
        }
    }
}

/// Initial value of a parameter when a plan is run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal, scaled by the square root of the contraction's length.
    Normal,
    /// One, with small noise so that an error in its gradient shows.
    One,
    /// Zero, with small noise.
    Zero,
}

/// What a data tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// Token numbers `[b s]`, or of a text of fixed length `[b t]`. Tensors of one name are one text in all layers.
    Tokens,
    /// The next token of each position `[b s]`; of `[b s a]`, those up to `a` tokens ahead.
    Labels,
    /// Of the text that labels continue, the token so many after each position `[b s]`.
    Ahead(u64),
    /// Index of each position in its sequence `[s]`, or along a dim of fixed length `[t]`.
    Positions,
    /// Numbers given with the batch `[b ..]`, such as patches of an image. Tensors of one name are the same in all
    /// layers.
    Features,
    /// Slopes of the linear position bias, per head.
    AlibiSlopes,
    /// A router's correction bias: a buffer adjusted outside the gradient.
    RouterBias,
}

/// A tensor of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Name, unique in the layer.
    pub name: String,
    /// Dims, outermost first.
    pub dims: Vec<DimId>,
    /// What it is.
    pub role: Role,
}

/// An operator of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// Name, unique in the layer.
    pub name: String,
    /// What it computes.
    pub kind: OpKind,
    /// Operands in the order of the kind.
    pub operands: Vec<TensorId>,
    /// Results in the order of the kind.
    pub results: Vec<TensorId>,
}

/// A kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Name, unique in the model.
    pub name: String,
    /// Dims.
    pub dims: Vec<Dim>,
    /// Tensors.
    pub tensors: Vec<Tensor>,
    /// Operators in execution order.
    pub ops: Vec<Op>,
    /// What it takes from the stack, topmost last: the residual stream, and what else layers before have left for it.
    /// Empty for a layer that reads only data.
    pub stream_in: Vec<TensorId>,
    /// What it puts there, topmost last: the residual stream, or the loss for the last layer.
    pub out: Vec<TensorId>,
}

/// A run of equal layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the kind.
    pub layer: usize,
    /// How often it repeats.
    pub count: u64,
}

/// One parameter of one layer kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterRef {
    /// Index of the kind.
    pub layer: usize,
    /// The tensor.
    pub tensor: TensorId,
}

/// Two parameters that are one: the copy's gradient is added to the owner's, the owner's new value goes to the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tie {
    /// The one that is updated and counted.
    pub owner: ParameterRef,
    /// The other place of use.
    pub copy: ParameterRef,
}

/// A model to train.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// Name shown in reports.
    pub name: String,
    /// Sequence length a job gets without a word of the user.
    pub default_sequence: u64,
    /// Layer kinds.
    pub layers: Vec<Layer>,
    /// Order and counts of the kinds; a kind with a tied parameter occurs once.
    pub sequence: Vec<Segment>,
    /// Parameters that are one.
    pub ties: Vec<Tie>,
}

/// Lengths of a layer's dims for one job.
#[derive(Clone, Debug, PartialEq)]
pub struct Sizes {
    /// Length of every dim, as run.
    pub dims: Vec<u64>,
    /// Expected fraction of every dim that holds something; 1 but for expert slots.
    pub filled: Vec<f64>,
}

/// Slots of an expert with a capacity: `factor` times what it expects, at most one per token.
///
/// 2 of 8 experts and a factor of 1.25: 4096 tokens expect 1024 and have 1280 slots.
fn slots(filled: f64, factor: f64, sequence: u64) -> u64 {
    ((factor * filled * sequence as f64).ceil() as u64).max(1).min(sequence)
}

impl Layer {
    /// Lengths of the dims for a micro-batch of `micro_batch` sequences of `sequence` tokens.
    pub fn sizes(&self, micro_batch: u64, sequence: u64) -> Sizes {
        self.sizes_of(micro_batch, 0..sequence)
    }

    /// The same for a slice of every sequence.
    pub fn sizes_of(&self, micro_batch: u64, tokens: Range<u64>) -> Sizes {
        let sequence = tokens.end.saturating_sub(tokens.start);
        let length = |dim: &Dim| match dim.extent {
            Extent::Fixed(n) | Extent::Uneven(n) => n,
            Extent::MicroBatch => micro_batch,
            Extent::Sequence | Extent::Slots { capacity: None, .. } => sequence,
            Extent::UpToSlice => tokens.end,
            Extent::Slots { filled, capacity: Some(factor) } => slots(filled, factor, sequence),
        };
        let filled = |dim: &Dim| match dim.extent {
            Extent::Slots { filled, capacity: None } => filled,
            Extent::Fixed(_)
            | Extent::Uneven(_)
            | Extent::MicroBatch
            | Extent::Sequence
            | Extent::UpToSlice
            | Extent::Slots { capacity: Some(_), .. } => 1.0,
        };
        Sizes { dims: self.dims.iter().map(length).collect(), filled: self.dims.iter().map(filled).collect() }
    }

    /// Lengths of a tensor's dims.
    pub fn shape(&self, tensor: TensorId, sizes: &Sizes) -> Vec<u64> {
        self.tensors[tensor.0].dims.iter().map(|dim| sizes.dims[dim.0]).collect()
    }

    /// Names and lengths of a tensor's dims, for text forms.
    pub fn labelled_shape(&self, tensor: TensorId, sizes: &Sizes) -> Vec<(&str, u64)> {
        let label = |dim: &DimId| (self.dims[dim.0].name.as_str(), sizes.dims[dim.0]);
        self.tensors[tensor.0].dims.iter().map(label).collect()
    }

    /// Extents of a tensor's dims.
    pub fn extents(&self, tensor: TensorId) -> Vec<Extent> {
        self.tensors[tensor.0].dims.iter().map(|dim| self.dims[dim.0].extent).collect()
    }

    /// Whether it leaves what it reads, so that it can follow itself.
    pub fn hands_on(&self) -> bool {
        let extents = |streams: &[TensorId]| streams.iter().map(|&t| self.extents(t)).collect::<Vec<_>>();
        extents(&self.stream_in) == extents(&self.out)
    }

    /// Tensor ids in order.
    pub fn tensor_ids(&self) -> impl Iterator<Item = TensorId> + use<> {
        (0..self.tensors.len()).map(TensorId)
    }

    /// Operator ids in execution order.
    pub fn op_ids(&self) -> impl DoubleEndedIterator<Item = OpId> + use<> {
        (0..self.ops.len()).map(OpId)
    }

    /// The operator that computes a tensor; `None` for parameters, data and the incoming streams.
    pub fn producer(&self, tensor: TensorId) -> Option<OpId> {
        self.op_ids().find(|op| self.ops[op.0].results.contains(&tensor))
    }

    /// The operator that reads an activation; `None` for the outgoing streams.
    pub fn reader(&self, tensor: TensorId) -> Option<OpId> {
        self.op_ids().find(|op| self.ops[op.0].operands.contains(&tensor))
    }

    /// [`Self::producer`] of every tensor, for who asks of many.
    pub fn producers(&self) -> Vec<Option<OpId>> {
        self.first_with(|op| &op.results)
    }

    /// [`Self::reader`] of every tensor, for who asks of many.
    pub fn readers(&self) -> Vec<Option<OpId>> {
        self.first_with(|op| &op.operands)
    }

    /// Of every tensor, the first operator that has it among some of its own.
    fn first_with(&self, of: impl Fn(&Op) -> &[TensorId]) -> Vec<Option<OpId>> {
        let mut first = vec![None; self.tensors.len()];
        for op in self.op_ids().rev() {
            of(&self.ops[op.0]).iter().for_each(|tensor| first[tensor.0] = Some(op));
        }
        first
    }

    /// True for a tensor that is kept from step to step, learned or frozen.
    pub fn is_parameter(&self, tensor: TensorId) -> bool {
        self.tensors[tensor.0].role.init().is_some()
    }

    /// Whether a dim counts tokens, or what an encoder has in their place: the tokens of a sequence, and of dims of
    /// fixed length those that data have between sequences and features, that queries or keys of attention walk, and
    /// that lie between the sequences and the last dim of the stream.
    pub fn counts_tokens(&self, dim: DimId) -> bool {
        match self.dims.get(dim.0).map(|dim| dim.extent) {
            Some(Extent::Sequence | Extent::UpToSlice) => return true,
            Some(Extent::Fixed(_)) => {}
            Some(Extent::Uneven(_) | Extent::MicroBatch | Extent::Slots { .. }) | None => return false,
        }
        let inner = |tensor: &TensorId| {
            let dims = self.tensors.get(tensor.0).map(|tensor| tensor.dims.as_slice()).unwrap_or_default();
            matches!(dims, [_, between @ .., _] if between.contains(&dim))
        };
        let given = |tensor: TensorId| match self.tensors[tensor.0].role {
            Role::Data(Data::Tokens | Data::Positions) => self.tensors[tensor.0].dims.contains(&dim),
            // Behind the tokens of labels are predictions, of which each token has several.
            Role::Data(Data::Labels | Data::Ahead(_)) => self.tensors[tensor.0].dims.get(1) == Some(&dim),
            Role::Data(Data::Features) => inner(&tensor),
            Role::Data(Data::AlibiSlopes | Data::RouterBias)
            | Role::Activation
            | Role::Parameter(_)
            | Role::Frozen(_) => false,
        };
        let attends = |op: &Op| {
            matches!(op.kind, OpKind::Attention { .. })
                && op.operands.iter().take(2).any(|operand| self.tensors[operand.0].dims.get(1) == Some(&dim))
        };
        self.stream_in.iter().chain(&self.out).any(inner)
            || self.tensor_ids().any(given)
            || self.ops.iter().any(attends)
    }

    /// True for the layers at the ends, which pass the stream on one side only: embedding, and the loss.
    pub fn is_end(&self) -> bool {
        self.stream_in.is_empty() || self.has_loss()
    }

    /// True for the layer that ends in the loss.
    pub fn has_loss(&self) -> bool {
        self.out.iter().any(|out| self.tensors[out.0].dims.is_empty())
    }

    /// True for a parameter that is learned.
    pub fn is_trained(&self, tensor: TensorId) -> bool {
        matches!(self.tensors[tensor.0].role, Role::Parameter(_))
    }

    /// True for a tensor of the batch.
    pub fn is_data(&self, tensor: TensorId) -> bool {
        matches!(self.tensors[tensor.0].role, Role::Data(_))
    }

    /// Learned and frozen tensors.
    pub fn parameters(&self) -> impl Iterator<Item = TensorId> + '_ {
        self.tensor_ids().filter(|&tensor| self.is_parameter(tensor))
    }

    /// Elements of a parameter, whose dims the model fixes.
    pub fn parameter_elements(&self, tensor: TensorId) -> u64 {
        let length = |dim: &DimId| self.dims[dim.0].extent.fixed().unwrap_or(0);
        self.tensors[tensor.0].dims.iter().map(length).product()
    }

    /// Elements of all parameters.
    pub fn n_parameters(&self) -> u64 {
        self.parameters().map(|tensor| self.parameter_elements(tensor)).sum()
    }

    /// Elements of those that are learned.
    pub fn n_trained(&self) -> u64 {
        let trained = self.parameters().filter(|&tensor| self.is_trained(tensor));
        trained.map(|tensor| self.parameter_elements(tensor)).sum()
    }
}

impl Model {
    /// Elements of all parameters; a tied one counts once.
    pub fn n_parameters(&self) -> u64 {
        let all: u64 =
            self.sequence.iter().map(|run| run.count * self.layers[run.layer].n_parameters()).sum();
        let copies: u64 = self.ties.iter().map(|tie| self.elements(tie.copy)).sum();
        all - copies
    }

    /// Elements of those that are learned.
    pub fn n_trained(&self) -> u64 {
        let all: u64 = self.sequence.iter().map(|run| run.count * self.layers[run.layer].n_trained()).sum();
        let is_trained = |tie: &&Tie| self.layers[tie.copy.layer].is_trained(tie.copy.tensor);
        let copies: u64 = self.ties.iter().filter(is_trained).map(|tie| self.elements(tie.copy)).sum();
        all - copies
    }

    /// Whether every layer hands one stream to the next.
    pub fn is_chain(&self) -> bool {
        let one = |(at, run): (usize, &Segment)| {
            let layer = &self.layers[run.layer];
            layer.out.len() == 1 && layer.stream_in.len() == usize::from(at > 0)
        };
        self.sequence.iter().enumerate().all(one)
    }

    fn elements(&self, side: ParameterRef) -> u64 {
        self.layers[side.layer].parameter_elements(side.tensor)
    }

    /// Layers in all runs, embedding and head included.
    pub fn n_layers(&self) -> u64 {
        self.sequence.iter().map(|run| run.count).sum()
    }

    /// Kind of every layer in order.
    pub fn kinds_in_order(&self) -> Vec<usize> {
        self.sequence.iter().flat_map(|run| std::iter::repeat_n(run.layer, run.count as usize)).collect()
    }
}
