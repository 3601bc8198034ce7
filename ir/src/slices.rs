//! Sequences cut into slices that run one by one: where the cuts are, and what of a layer runs per slice.
//!
//! A slice is a shorter sequence, but for attention, whose queries see the keys of the slices before. So the sliced
//! form of a layer is the layer with one operator more in front of every set of keys and of values, [`OpKind::Extend`]:
//!
//! ```text
//! attention(q[s], k[s], v[s])   ->   attention(q[s], extend(k)[t], extend(v)[t])        t: tokens up to the slice's end
//! forward   of slice i   extend puts the rows that slices 0 .. i - 1 have kept before its own
//! backward  of slice i   extend adds what slices i + 1 .. owe to the gradient, keeps the rows before its own as what the
//!                        slices before are owed, and passes its own rows on: slices run from the last to the first
//! ```
//! All else of a layer must work token by token; [`sliced_layer`] says what does not. Parameters, tensors and the order
//! of operators stay as they are; programs of all slices are the same, only lengths differ.

use std::ops::Range;

use crate::graph::{Dim, DimId, Extent, Layer, Model, Op, OpId, Role, Sizes, Tensor, TensorId};
use crate::lower::{LayerChoice, Recompute, gradient_tensors, runs_backward};
use crate::op::{Missing, OpKind};
use crate::program::Home;
use crate::signature::{FactorId, Signature, Split, signature};
use crate::strategy::{AxisUse, Strategy};

/// The most slices of a sequence: far above any published, and few enough to list.
pub const MAX_SLICES: u64 = 1 << 10;

/// Where a sequence is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slices {
    /// One past the last token of every slice.
    ends: Vec<u64>,
}

/// What cannot be run slice by slice, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotSliceable {
    /// Which tokens an expert takes depends on all tokens of a sequence.
    #[error(
        "layer `{layer}`, operator `{op}`: experts have a capacity, and which tokens they drop depends on the whole \
         sequence: it cannot be run slice by slice"
    )]
    Capacity {
        /// The layer.
        layer: String,
        /// The operator.
        op: String,
    },
    /// An operator other than attention joins tokens.
    #[error("layer `{layer}`, operator `{op}` works on whole sequences: it cannot be run slice by slice")]
    Joins {
        /// The layer.
        layer: String,
        /// The operator.
        op: String,
    },
    /// Every query sees all keys, also those of slices that have not run.
    #[error(
        "layer `{layer}`, operator `{op}`: its mask is `full`, so that its first tokens see the last: it cannot be run \
         slice by slice"
    )]
    SeesAll {
        /// The layer.
        layer: String,
        /// The operator.
        op: String,
    },
    /// Something of the batch has no tokens of the sequence.
    #[error(
        "layer `{layer}`: `{tensor}` is of no token of the sequence, so that every slice would need all of it: the layer \
         cannot be run slice by slice"
    )]
    NoTokens {
        /// The layer.
        layer: String,
        /// The tensor.
        tensor: String,
    },
    /// Nothing learned leads to its keys, so that nothing keeps them.
    #[error("layer `{layer}`, operator `{op}` has no backward, so nothing keeps its keys for the next slice")]
    NoBackward {
        /// The layer.
        layer: String,
        /// The operator.
        op: String,
    },
    /// What a slice keeps is read by the slices after it, long before its backward.
    #[error(
        "layer `{layer}` keeps what backward needs in the host's memory, where later slices cannot read it: keep it on the device"
    )]
    Host {
        /// The layer.
        layer: String,
    },
    /// Blocks of keys would have to travel with all that was kept before them.
    #[error(
        "layer `{layer}`, operator `{op}`: keys on a ring cannot be carried from slice to slice; gather them"
    )]
    Ring {
        /// The layer.
        layer: String,
        /// The operator.
        op: String,
    },
}

impl Slices {
    /// A sequence in one piece.
    pub fn whole(sequence: u64) -> Self {
        Self { ends: vec![sequence] }
    }

    /// Slices of the given lengths; `None` where there is none or one is empty.
    pub fn of_lengths(lengths: &[u64]) -> Option<Self> {
        let mut end = 0_u64;
        let mut ends = Vec::with_capacity(lengths.len());
        for &length in lengths {
            end = end.checked_add(length).filter(|_| length > 0)?;
            ends.push(end);
        }
        (!ends.is_empty()).then_some(Self { ends })
    }

    /// How many there are.
    pub fn n(&self) -> u32 {
        self.ends.len() as u32
    }

    /// Whether there is more than one.
    pub fn is_cut(&self) -> bool {
        self.ends.len() > 1
    }

    /// Tokens of the sequence.
    pub fn sequence(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The tokens of a slice.
    pub fn range(&self, slice: u32) -> Range<u64> {
        let end = |i: usize| self.ends.get(i).copied().unwrap_or_else(|| self.sequence());
        let slice = slice as usize;
        slice.checked_sub(1).map_or(0, end)..end(slice)
    }

    /// Tokens of every slice.
    pub fn lengths(&self) -> Vec<u64> {
        (0..self.n()).map(|slice| self.range(slice)).map(|tokens| tokens.end - tokens.start).collect()
    }

    /// Lengths of a layer's dims for a slice of a micro-batch.
    pub fn sizes(&self, layer: &Layer, micro_batch: u64, slice: u32) -> Sizes {
        layer.sizes_of(micro_batch, self.range(slice))
    }
}

/// The model with every layer in its sliced form.
///
/// # Errors
/// The first operator that joins tokens otherwise than by attention.
pub fn sliced_model(model: &Model) -> Result<Model, NotSliceable> {
    let layers = model.layers.iter().map(sliced_layer).collect::<Result<_, _>>()?;
    Ok(Model { layers, ..model.clone() })
}

/// A layer in its sliced form.
///
/// # Errors
/// The first operator that joins tokens otherwise than by attention.
pub fn sliced_layer(layer: &Layer) -> Result<Layer, NotSliceable> {
    if let Some(tensor) = layer.tensors.iter().find(|tensor| is_beside_tokens(layer, tensor)) {
        return Err(NotSliceable::NoTokens { layer: layer.name.clone(), tensor: tensor.name.clone() });
    }
    layer.ops.iter().try_for_each(|op| works_by_tokens(layer, op))?;
    // What is kept of keys is what their backward reads, and goes with it.
    let gradients = gradient_tensors(layer);
    let no_backward =
        |op: &&Op| matches!(op.kind, OpKind::Attention { .. }) && !runs_backward(op, &gradients);
    if let Some(op) = layer.ops.iter().find(no_backward) {
        return Err(NotSliceable::NoBackward { layer: layer.name.clone(), op: op.name.clone() });
    }
    let mut sliced = Layer { ops: Vec::with_capacity(layer.ops.len() + 2), ..layer.clone() };
    let mut extended = Extended { layer: &mut sliced, dim: None, positions: None };
    for op in &layer.ops {
        let mut op = op.clone();
        if let OpKind::Attention { .. } = op.kind {
            extended.keys_of(&mut op);
        }
        extended.layer.ops.push(op);
    }
    Ok(sliced)
}

/// What was chosen for a layer, for its sliced form: what extends keys is cut as attention cuts them.
///
/// # Errors
/// Attention on a ring, and what is kept on the host.
pub fn sliced_choice(
    layer: &Layer,
    sliced: &Layer,
    choice: &LayerChoice,
) -> Result<LayerChoice, NotSliceable> {
    if choice.kept == Home::Host {
        return Err(NotSliceable::Host { layer: layer.name.clone() });
    }
    let mut given = choice.strategies.iter().zip(&choice.recompute);
    let mut found = LayerChoice { strategies: Vec::new(), recompute: Vec::new(), ..choice.clone() };
    for op in &sliced.ops {
        let (strategy, recompute) = if op.kind == OpKind::Extend {
            (of_reader(layer, sliced, (op, choice))?, Recompute::Again)
        } else {
            given.next().map_or((Strategy::SAME, Recompute::Keep), |(strategy, again)| (*strategy, *again))
        };
        found.strategies.push(strategy);
        found.recompute.push(recompute);
    }
    Ok(found)
}

/// The operator of a layer that computes the same tensors as one of its sliced form; none for what extends keys.
pub fn original_op(layer: &Layer, sliced: &Layer, op: OpId) -> Option<OpId> {
    layer.producer(*sliced.ops[op.0].results.first()?)
}

/// How attention cuts its keys, along the same loops; where it leaves their gradient an unfinished sum, that stays one.
fn of_reader(
    layer: &Layer,
    sliced: &Layer,
    (extend, choice): (&Op, &LayerChoice),
) -> Result<Strategy, NotSliceable> {
    let sig = signature(sliced, extend);
    let reader = sliced.reader(extend.results[0]).and_then(|reader| original_op(layer, sliced, reader));
    let Some(reader) = reader else { return Ok(Strategy::SAME) };
    let (attention, strategy) = (&layer.ops[reader.0], choice.strategies[reader.0]);
    let attention_sig = signature(layer, attention);
    let mut found = Strategy::SAME;
    for (own, axis_use) in found.0.iter_mut().zip(strategy.0) {
        *own = match axis_use {
            AxisUse::Factor(factor) => same_loop(&attention_sig, &sig, factor).unwrap_or(AxisUse::Defer),
            AxisUse::Same => AxisUse::Same,
            AxisUse::Defer | AxisUse::Through => AxisUse::Defer,
            AxisUse::Ring(_) => {
                return Err(NotSliceable::Ring { layer: layer.name.clone(), op: attention.name.clone() });
            }
        };
    }
    Ok(found)
}

/// A loop of attention, as the loop of the same dim of an operator; queries have none there.
fn same_loop(from: &Signature, to: &Signature, factor: FactorId) -> Option<AxisUse> {
    let dim = from.factors.get(factor.0 as usize)?.dim;
    let same = |other: &crate::signature::Factor| other.dim == dim && other.split != Split::Whole;
    to.factors.iter().position(same).map(|at| AxisUse::Factor(FactorId(at as u8)))
}

/// Adds what extends keys, with the tensors and the dim that it takes.
struct Extended<'a> {
    layer: &'a mut Layer,
    dim: Option<DimId>,
    positions: Option<TensorId>,
}

impl Extended<'_> {
    /// Puts an operator before attention for its keys and one for its values; their positions become those of all keys.
    fn keys_of(&mut self, attention: &mut Op) {
        for at in [1, 2] {
            let Some(&own) = attention.operands.get(at) else { continue };
            let mut tensor = self.layer.tensors[own.0].clone();
            let dim = self.prefix_dim();
            if let Some(sequence) = tensor.dims.get_mut(1) {
                *sequence = dim;
            }
            tensor.name = self.free_name(&format!("{}.so_far", tensor.name));
            let name =
                format!("{}.{}", attention.name, if at == 1 { "keys_so_far" } else { "values_so_far" });
            let result = self.tensor(tensor);
            let op = Op { name, kind: OpKind::Extend, operands: vec![own], results: vec![result] };
            self.layer.ops.push(op);
            attention.operands[at] = result;
        }
        if let Some(&own) = attention.operands.get(4) {
            attention.operands[4] = self.all_positions(own);
        }
    }

    fn prefix_dim(&mut self) -> DimId {
        *self.dim.get_or_insert_with(|| {
            let taken = |name: &str| self.layer.dims.iter().any(|dim| dim.name == name);
            let mut name = "t".to_owned();
            while taken(&name) {
                name.push('t');
            }
            self.layer.dims.push(Dim { name, extent: Extent::UpToSlice });
            DimId(self.layer.dims.len() - 1)
        })
    }

    fn all_positions(&mut self, own: TensorId) -> TensorId {
        if let Some(known) = self.positions {
            return known;
        }
        let Tensor { name, role, .. } = self.layer.tensors[own.0].clone();
        let dims = vec![self.prefix_dim()];
        let name = self.free_name(&format!("{name}.so_far"));
        let all = self.tensor(Tensor { name, dims, role });
        *self.positions.insert(all)
    }

    fn free_name(&self, name: &str) -> String {
        let taken = |name: &str| self.layer.tensors.iter().any(|tensor| tensor.name == name);
        let mut name = name.to_owned();
        while taken(&name) {
            name.push('_');
        }
        name
    }

    fn tensor(&mut self, tensor: Tensor) -> TensorId {
        self.layer.tensors.push(tensor);
        TensorId(self.layer.tensors.len() - 1)
    }
}

/// Whether a tensor is one per sequence of the batch, but none of its tokens.
fn is_beside_tokens(layer: &Layer, tensor: &Tensor) -> bool {
    let has = |test: &dyn Fn(Extent) -> bool| tensor.dims.iter().any(|dim| test(layer.dims[dim.0].extent));
    has(&|extent| extent == Extent::MicroBatch)
        && !has(&|extent| matches!(extent, Extent::Sequence | Extent::UpToSlice | Extent::Slots { .. }))
}

/// Whether an operator does for every token what it would do for a sequence of that token alone; attention may not.
fn works_by_tokens(layer: &Layer, op: &Op) -> Result<(), NotSliceable> {
    if let OpKind::Attention { mask, .. } = op.kind {
        let sees_all = || NotSliceable::SeesAll { layer: layer.name.clone(), op: op.name.clone() };
        return if mask.is_causal() { Ok(()) } else { Err(sees_all()) };
    }
    let sig = signature(layer, op);
    let is_limited =
        |dim: &DimId| matches!(layer.dims[dim.0].extent, Extent::Slots { capacity: Some(_), .. });
    let tensors = || op.operands.iter().chain(&op.results);
    if tensors().any(|tensor| layer.tensors[tensor.0].dims.iter().any(is_limited)) {
        return Err(NotSliceable::Capacity { layer: layer.name.clone(), op: op.name.clone() });
    }
    let of_tokens = |factor: &crate::signature::Factor| {
        let extent = layer.dims[factor.dim.0].extent;
        extent == Extent::Sequence || extent.is_one_slot_per_token()
    };
    let joins = sig.factors.iter().enumerate().filter(|(_, factor)| of_tokens(factor)).any(|(at, factor)| {
        let id = FactorId(at as u8);
        let is_computed = |tensor: &TensorId| layer.tensors[tensor.0].role == Role::Activation;
        let walked = |(tensor, dims): (&TensorId, &Vec<FactorId>)| !is_computed(tensor) || dims.contains(&id);
        let learned =
            |(tensor, dims): (&TensorId, &Vec<FactorId>)| layer.is_parameter(*tensor) && dims.contains(&id);
        let operands = || op.operands.iter().zip(&sig.operands);
        let by_tokens = operands().all(walked) && op.results.iter().zip(&sig.results).all(walked);
        // The loss is a sum over tokens: that over slices is added up like that over micro-batches.
        let is_sum = op.kind == OpKind::SumLoss && sig.missing == Missing::Sum;
        operands().any(learned) || !(is_sum || (by_tokens && factor.split != Split::Whole))
    });
    if joins {
        return Err(NotSliceable::Joins { layer: layer.name.clone(), op: op.name.clone() });
    }
    Ok(())
}
