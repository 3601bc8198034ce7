//! The literature's names for what a plan does: `dp`, `tp`, `ZeRO-3` and the rest, read off strategies and storage.
//!
//! Nothing else in the program uses these words to decide anything. A name is derived from which loop an axis cuts in
//! the products of most of a layer's weights, never from an operator: the batch (data), the sequence (context), the
//! sequence there and the heads inside attention (Ulysses), a loop of the weights (tensor); and the experts (expert).
//! Attention is the operator whose keys may travel; the experts are the dim before the slots; the vocabulary is the dim
//! of unequal blocks.

use std::collections::BTreeMap;
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::graph::{DimId, Extent, Layer, Op, OpId, TensorId};
use crate::lower::{LayerChoice, Recompute, backward_reads, gradient_tensors, whole_axes};
use crate::mesh::{AxisId, Mesh};
use crate::op::OpKind;
use crate::program::{AxisSet, Home, StateHome};
use crate::schedule::Schedule;
use crate::signature::{FactorId, signature};
use crate::strategy::{AxisUse, placements};

pub mod axes;
#[cfg(test)]
mod tests;

/// A plan in the literature's words. The degrees of the dense layers multiply to the devices of a stage:
/// `dp * cp * tp * same`; `ep` and `etp` cut the experts over the same devices once more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Roles {
    /// Data parallel: axes on the batch.
    pub dp: u64,
    /// Tensor parallel: axes on a loop of the weights (Shoeybi et al. 2019, arXiv 1909.08053).
    pub tp: u64,
    /// Megatron's sequence parallel: the stream is cut along the sequence on a tensor axis (Korthikanti et al. 2022,
    /// arXiv 2205.05198).
    pub sequence_parallel: bool,
    /// Context parallel: axes on the sequence of everything outside attention.
    pub cp: u64,
    /// How attention sees the whole sequence; absent without context parallelism.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<Context>,
    /// Expert parallel: axes on the experts.
    pub ep: u64,
    /// Expert tensor parallel: axes on the other loops of the experts' weights.
    pub etp: u64,
    /// Pipeline stages.
    pub pp: u64,
    /// Virtual stages of each pipeline rank.
    pub vpp: u64,
    /// Where the states of the parameters are cut.
    pub zero: Zero,
    /// Whether the host holds, in its memory or on its drives, and updates optimizer states.
    #[serde(default, skip_serializing_if = "Offload::is_none")]
    pub offload: Offload,
    /// Whether those states lie on the drives of the host.
    #[serde(default, skip_serializing_if = "OnNvme::is_none")]
    pub optimizer_on_nvme: OnNvme,
    /// Whether the host holds what layers keep for backward.
    #[serde(default, skip_serializing_if = "OnHost::is_none")]
    pub kept_on_host: OnHost,
    /// Whether the host holds parameters between uses.
    #[serde(default, skip_serializing_if = "OnHost::is_none")]
    pub parameters_on_host: OnHost,
    /// What is computed again in backward.
    pub recompute: RecomputeRole,
    /// Sequences of one micro-batch on one data-parallel replica.
    pub micro_batch: u64,
    /// Micro-batches of a step; of the average replica, where they run unequal shares.
    pub accumulation: u64,
    /// Least and most micro-batches of a replica, where they run unequal shares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<[u64; 2]>,
    /// Devices over which the vocabulary of the loss is cut.
    pub vocabulary_parallel: u64,
    /// Devices that compute the same in the dense layers.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub same: u64,
}

fn one() -> u64 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn is_one(degree: &u64) -> bool {
    *degree == 1
}

/// How attention sees keys that other devices hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Context {
    /// Keys and values are gathered (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2).
    Gather,
    /// Sequence and heads are exchanged (Jacobs et al. 2023, arXiv 2309.14509).
    Ulysses,
    /// Blocks of keys and values travel round a ring (Liu et al. 2023, arXiv 2310.01889).
    Ring,
    /// Gathered keys and exchanged heads, on different axes.
    GatherAndUlysses,
    /// A ring and exchanged heads, on different axes (Fang and Zhao 2024, arXiv 2405.07719).
    RingAndUlysses,
    /// A ring, and keys gathered over another axis.
    RingAndGather,
    /// All three.
    RingGatherAndUlysses,
}

/// Where the states of the parameters are cut (Rajbhandari et al. 2020, arXiv 1910.02054).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Zero {
    /// 0 nothing, 1 the optimizer state, 2 the gradient too, 3 the parameter too.
    pub stage: u8,
    /// Devices over which they are cut, where these are fewer than hold the same weights (HSDP, MiCS).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hybrid: Option<u64>,
}

/// What the host's memory holds of the states (Ren et al. 2021, arXiv 2101.06840).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Offload {
    /// Nothing.
    #[default]
    None,
    /// Optimizer states of some parameters.
    Some,
    /// Optimizer states of all parameters.
    Optimizer,
}

/// What the drives of nodes hold of the states (Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnNvme {
    /// Nothing.
    #[default]
    None,
    /// Some of the optimizer states that hosts update.
    Some,
    /// All of these.
    All,
}

impl OnNvme {
    /// True where drives hold nothing.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }
}

/// Of which layers the host's memory holds what backward needs (Rhu et al. 2016, arXiv 1602.08124), or the parameters
/// between uses (Rajbhandari et al. 2021, arXiv 2104.07857).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnHost {
    /// None.
    #[default]
    None,
    /// Some of those between embedding and head.
    Some,
    /// All of those.
    All,
}

impl OnHost {
    /// True where the host holds nothing.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }
}

impl Offload {
    /// True where the host holds nothing.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }
}

/// What is computed again in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RecomputeRole {
    /// Nothing.
    None,
    /// Some operators, or some layers.
    Selective,
    /// Every layer from its input.
    Full,
}

/// One layer kind under one choice.
#[derive(Clone, Copy, Debug)]
pub struct PlacedLayer<'a> {
    /// The kind.
    pub layer: &'a Layer,
    /// What was chosen.
    pub choice: &'a LayerChoice,
    /// How many layers of the model are so.
    pub count: u64,
}

/// What the names are read off.
#[derive(Clone, Debug)]
pub struct Arrangement<'a> {
    /// Mesh of every stage.
    pub mesh: &'a Mesh,
    /// Layers of all stages.
    pub layers: Vec<PlacedLayer<'a>>,
    /// Pipeline stages.
    pub n_stages: u64,
    /// Order of the micro-batches.
    pub schedule: Schedule,
    /// Sequences of one micro-batch over the mesh of a stage.
    pub micro_batch: u64,
    /// Micro-batches of a step.
    pub n_micro_batches: u64,
}

/// Names an arrangement.
pub fn roles(arrangement: &Arrangement) -> Roles {
    let mesh = arrangement.mesh;
    let speakers = speakers(&arrangement.layers);
    let axes: Vec<(AxisId, DenseRole)> = mesh
        .axis_ids()
        .filter(|&axis| mesh.size(axis) > 1)
        .map(|axis| (axis, dense_role(&speakers, axis)))
        .collect();
    let degree = |role: DenseRole| {
        axes.iter().filter(|(_, own)| *own == role).map(|(axis, _)| mesh.size(*axis)).product::<u64>()
    };
    let dp = degree(DenseRole::Data);
    let (gather, ulysses) = (degree(DenseRole::Gather), degree(DenseRole::Ulysses));
    let ring = degree(DenseRole::Ring);
    let context = match (ring > 1, gather > 1, ulysses > 1) {
        (true, true, true) => Some(Context::RingGatherAndUlysses),
        (true, true, false) => Some(Context::RingAndGather),
        (true, false, true) => Some(Context::RingAndUlysses),
        (true, false, false) => Some(Context::Ring),
        (false, true, true) => Some(Context::GatherAndUlysses),
        (false, true, false) => Some(Context::Gather),
        (false, false, true) => Some(Context::Ulysses),
        (false, false, false) => None,
    };
    let product = |test: &dyn Fn(AxisId) -> bool| {
        mesh.axis_ids().filter(|&axis| test(axis)).map(|axis| mesh.size(axis)).product::<u64>()
    };
    let tensor_axes = axes.iter().filter(|(_, role)| *role == DenseRole::Tensor);
    let homes = optimizer_homes(&arrangement.layers);
    Roles {
        dp,
        tp: degree(DenseRole::Tensor),
        sequence_parallel: tensor_axes.clone().any(|(axis, _)| stream_cut(&arrangement.layers, *axis)),
        cp: gather * ring * ulysses,
        context,
        ep: product(&|axis| expert_loop(&arrangement.layers, axis) == Some(Loop::Expert)),
        etp: product(&|axis| expert_loop(&arrangement.layers, axis) == Some(Loop::Weight)),
        pp: arrangement.n_stages,
        vpp: u64::from(arrangement.schedule.n_virtual_stages()),
        zero: zero((mesh, dp), &arrangement.layers),
        offload: offload(&homes),
        optimizer_on_nvme: on_nvme(&homes),
        kept_on_host: on_host(&arrangement.layers, |choice| choice.kept),
        parameters_on_host: on_host(&arrangement.layers, |choice| choice.parameters),
        recompute: recompute(&arrangement.layers),
        micro_batch: arrangement.micro_batch.div_ceil(dp),
        accumulation: arrangement.n_micro_batches,
        shares: None,
        vocabulary_parallel: product(&|axis| cuts_vocabulary(&arrangement.layers, axis)),
        same: degree(DenseRole::Same),
    }
}

/// Devices over which a sequence is cut where the order of its tokens matters: those of context parallelism, and those
/// along whose axes attention of some layer cuts its queries, whatever these are called.
pub fn token_parts(arrangement: &Arrangement) -> u64 {
    let (mesh, layers) = (arrangement.mesh, &arrangement.layers);
    let cuts_queries = |axis: AxisId| {
        layers.iter().any(|&placed| {
            attention_of(placed.layer).is_some_and(|op| cut_loop(placed, op, axis) == Some(Loop::Sequence))
        })
    };
    let speakers = speakers(layers);
    let is_context = |axis: AxisId| {
        matches!(dense_role(&speakers, axis), DenseRole::Gather | DenseRole::Ring | DenseRole::Ulysses)
    };
    let axes = mesh.axis_ids().filter(|&axis| mesh.size(axis) > 1);
    axes.filter(|&axis| is_context(axis) || cuts_queries(axis)).map(|axis| mesh.size(axis)).product()
}

impl Roles {
    /// The same where replicas run such shares of the micro-batches; none where all run as many.
    #[must_use]
    pub fn with_shares(self, shares: &[u64]) -> Self {
        let ends = shares.iter().min().zip(shares.iter().max());
        Self { shares: ends.map(|(&least, &most)| [least, most]), ..self }
    }

    /// What the host's memory and drives hold, in words that follow the degrees; nothing where it holds nothing.
    pub fn on_host(&self) -> String {
        let optimizer = match (self.offload, self.optimizer_on_nvme) {
            (Offload::None, _) => "",
            (Offload::Some, OnNvme::None) => ", some optimizer states on the host",
            (Offload::Some, OnNvme::Some) => ", some optimizer states on the host and on nvme",
            (Offload::Some, OnNvme::All) => ", some optimizer states on nvme",
            (Offload::Optimizer, OnNvme::None) => ", optimizer on the host",
            (Offload::Optimizer, OnNvme::Some) => ", optimizer on the host and on nvme",
            (Offload::Optimizer, OnNvme::All) => ", optimizer on nvme",
        };
        let of_layers = |what: &str, held: OnHost| match held {
            OnHost::None => String::new(),
            OnHost::Some => format!(", {what} of some layers on the host"),
            OnHost::All => format!(", {what} on the host"),
        };
        let activations = of_layers("activations", self.kept_on_host);
        let parameters = of_layers("parameters", self.parameters_on_host);
        format!("{optimizer}{activations}{parameters}")
    }
}

impl fmt::Display for Roles {
    /// One line: degrees above one, then what is always said.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let degrees = [
            ("dp", self.dp),
            ("cp", self.cp),
            ("tp", self.tp),
            ("ep", self.ep),
            ("etp", self.etp),
            ("pp", self.pp),
            ("vpp", self.vpp),
            ("same", self.same),
        ];
        for (name, degree) in degrees.into_iter().filter(|(_, degree)| *degree > 1) {
            write!(f, "{name} {degree}")?;
            match (name, self.context) {
                ("tp", _) if self.sequence_parallel => write!(f, " sp")?,
                ("cp", Some(Context::Gather)) => write!(f, " gather")?,
                ("cp", Some(Context::Ulysses)) => write!(f, " ulysses")?,
                ("cp", Some(Context::Ring)) => write!(f, " ring")?,
                ("cp", Some(Context::GatherAndUlysses)) => write!(f, " gather and ulysses")?,
                ("cp", Some(Context::RingAndUlysses)) => write!(f, " ring and ulysses")?,
                ("cp", Some(Context::RingAndGather)) => write!(f, " ring and gather")?,
                ("cp", Some(Context::RingGatherAndUlysses)) => write!(f, " ring, gather and ulysses")?,
                _ => {}
            }
            write!(f, ", ")?;
        }
        write!(f, "ZeRO-{}", self.zero.stage)?;
        if let Some(devices) = self.zero.hybrid {
            write!(f, " over {devices}")?;
        }
        f.write_str(&self.on_host())?;
        let recompute = match self.recompute {
            RecomputeRole::None => "none",
            RecomputeRole::Selective => "selective",
            RecomputeRole::Full => "full",
        };
        write!(f, ", recompute {recompute}, micro-batch {} x ", self.micro_batch)?;
        match self.shares {
            None => write!(f, "{}", self.accumulation),
            Some([least, most]) => write!(f, "{least} to {most}"),
        }
    }
}

/// What an axis does in the dense part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum DenseRole {
    Data,
    Gather,
    Ring,
    Ulysses,
    Tensor,
    Same,
}

/// What kind of loop an operator cuts along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Loop {
    Batch,
    Sequence,
    Slots,
    Expert,
    Weight,
}

/// The loop that operator `op` cuts along `axis`, if it cuts one.
fn cut_loop(placed: PlacedLayer, op: OpId, axis: AxisId) -> Option<Loop> {
    let layer = placed.layer;
    let factor = placed.choice.strategies.get(op.0)?.on(axis).divides()?;
    let sig = signature(layer, &layer.ops[op.0]);
    let dim = sig.factors.get(factor.0 as usize)?.dim;
    Some(match layer.dims[dim.0].extent {
        Extent::MicroBatch => Loop::Batch,
        Extent::Sequence | Extent::UpToSlice => Loop::Sequence,
        Extent::Slots { .. } => Loop::Slots,
        Extent::Fixed(_) | Extent::Uneven(_) if layer.counts_tokens(dim) => Loop::Sequence,
        Extent::Fixed(_) | Extent::Uneven(_) if is_expert_dim(layer, dim) => Loop::Expert,
        Extent::Fixed(_) | Extent::Uneven(_) => Loop::Weight,
    })
}

fn is_slots(layer: &Layer, dim: DimId) -> bool {
    matches!(layer.dims[dim.0].extent, Extent::Slots { .. })
}

/// The experts' dim stands before the slots' in whatever was dispatched.
fn is_expert_dim(layer: &Layer, dim: DimId) -> bool {
    layer
        .tensors
        .iter()
        .any(|tensor| tensor.dims.windows(2).any(|pair| pair[0] == dim && is_slots(layer, pair[1])))
}

fn tensors_of(op: &Op) -> impl Iterator<Item = TensorId> + '_ {
    op.operands.iter().chain(&op.results).copied()
}

/// Works on what was dispatched to experts.
fn is_expert_op(layer: &Layer, op: &Op) -> bool {
    tensors_of(op).any(|tensor| layer.tensors[tensor.0].dims.iter().any(|&dim| is_slots(layer, dim)))
}

/// Looks up or multiplies by a weight matrix: a parameter of two or more dims. A bias of heads has as many, but who
/// adds it need not have the heads of the product.
fn has_weights(layer: &Layer, op: &Op) -> bool {
    let is_product = matches!(op.kind, OpKind::Linear | OpKind::Embed);
    is_product && op.operands.iter().any(|&t| layer.is_parameter(t) && layer.tensors[t.0].dims.len() >= 2)
}

/// The operator that meets keys in a loop of their own: first one whose queries are tokens of the sequence, then one
/// whose keys are of the same dim as its queries.
fn attention_of(layer: &Layer) -> Option<OpId> {
    let rank = |op: OpId| {
        let sig = signature(layer, &layer.ops[op.0]);
        let ring = sig.ring?;
        let dim = |factor: FactorId| sig.factors.get(factor.0 as usize).map(|factor| factor.dim);
        let (queries, keys) = (dim(ring.queries)?, dim(ring.keys)?);
        Some((layer.dims[queries.0].extent != Extent::Sequence, queries != keys, op))
    };
    layer.op_ids().filter_map(rank).min().map(|(.., op)| op)
}

/// The layers that speak for the model: those with attention, else those with weights, else all.
fn body<'a>(layers: &[PlacedLayer<'a>]) -> Vec<PlacedLayer<'a>> {
    let with = |test: &dyn Fn(&Layer) -> bool| {
        layers.iter().copied().filter(|placed| test(placed.layer)).collect::<Vec<_>>()
    };
    let attention = with(&|layer| attention_of(layer).is_some());
    if !attention.is_empty() {
        return attention;
    }
    let inner = with(&|layer| !layer.is_end());
    if inner.is_empty() { layers.to_vec() } else { inner }
}

/// The key with the most votes; the smallest of equals.
fn majority<K: Ord + Copy>(votes: impl Iterator<Item = (K, u64)>) -> Option<K> {
    let mut counts: BTreeMap<K, u64> = BTreeMap::new();
    for (key, weight) in votes {
        let count = counts.entry(key).or_default();
        *count = count.saturating_add(weight);
    }
    let mut best: Option<(K, u64)> = None;
    for (key, count) in counts {
        if best.is_none_or(|(_, most)| count > most) {
            best = Some((key, count));
        }
    }
    best.map(|(key, _)| key)
}

/// A layer that speaks for the model, and its operators that do.
struct Speaker<'a> {
    placed: PlacedLayer<'a>,
    products: Vec<(OpId, u64)>,
    attention: Option<OpId>,
}

fn speakers<'a>(layers: &[PlacedLayer<'a>]) -> Vec<Speaker<'a>> {
    let speaker = |placed: PlacedLayer<'a>| Speaker {
        placed,
        products: naming_products(placed.layer),
        attention: attention_of(placed.layer),
    };
    body(layers).into_iter().map(speaker).collect()
}

fn dense_role(speakers: &[Speaker], axis: AxisId) -> DenseRole {
    let votes = speakers.iter().map(|speaker| (layer_role(speaker, axis), speaker.placed.count));
    majority(votes).unwrap_or(DenseRole::Same)
}

/// What an axis does in one layer, experts aside: what most of its matrices see, by elements, names it, and attention
/// says by which kind of context parallelism tokens meet. Of heads that are exchanged for sequences or tokens only
/// inside attention no weight knows.
fn layer_role(speaker: &Speaker, axis: AxisId) -> DenseRole {
    let Speaker { placed, products, attention } = speaker;
    let cut = |op: OpId| cut_loop(*placed, op, axis);
    let most = majority(products.iter().map(|&(op, elements)| (cut(op), elements))).flatten();
    let weights_cut = products.iter().any(|&(op, _)| cut(op) == Some(Loop::Weight));
    let inside = attention.and_then(cut);
    let is_ring = attention.is_some_and(|op| placed.choice.strategies[op.0].ring_axes().contains(&axis));
    let keys = if is_ring { DenseRole::Ring } else { DenseRole::Gather };
    match (most, inside) {
        (Some(Loop::Weight | Loop::Slots | Loop::Expert), _) => DenseRole::Tensor,
        (Some(Loop::Batch), _) => DenseRole::Data,
        (Some(Loop::Sequence), Some(Loop::Weight | Loop::Slots | Loop::Expert)) => DenseRole::Ulysses,
        (Some(Loop::Sequence), Some(Loop::Batch | Loop::Sequence) | None) => keys,
        (None, _) if weights_cut => DenseRole::Tensor,
        (None, Some(Loop::Batch)) => DenseRole::Data,
        (None, Some(Loop::Sequence)) => keys,
        (None, Some(Loop::Weight | Loop::Slots | Loop::Expert)) => DenseRole::Tensor,
        (None, None) => DenseRole::Same,
    }
}

/// The products of a layer that say what an axis is called, with the elements of their matrices: those of its tokens,
/// experts aside. A layer without any speaks by all its operators alike.
pub fn naming_products(layer: &Layer) -> Vec<(OpId, u64)> {
    let dense = || layer.op_ids().filter(|op| !is_expert_op(layer, &layer.ops[op.0]));
    // What makes keys of another length says nothing of the queries' tokens.
    let queries = attention_of(layer).and_then(|op| layer.tensors[layer.ops[op.0].operands[0].0].dims.get(1));
    let beside = |op: &OpId| {
        queries
            .is_some_and(|dim| tensors_of(&layer.ops[op.0]).all(|t| !layer.tensors[t.0].dims.contains(dim)))
    };
    let elements = |op: OpId| {
        let matrices = layer.ops[op.0].operands.iter().filter(|t| layer.is_parameter(**t));
        matrices.fold(0_u64, |all, t| all.saturating_add(layer.parameter_elements(*t)))
    };
    let weighty = dense().filter(|op| has_weights(layer, &layer.ops[op.0]));
    let products: Vec<(OpId, u64)> = weighty.filter(|op| !beside(op)).map(|op| (op, elements(op))).collect();
    if products.is_empty() { dense().map(|op| (op, 1)).collect() } else { products }
}

/// Whether most of the body's streams are cut along the sequence on an axis.
fn stream_cut(layers: &[PlacedLayer], axis: AxisId) -> bool {
    let cut = |placed: PlacedLayer| {
        placed.layer.stream_in.last().is_some_and(|stream| {
            let dims = &placed.layer.tensors[stream.0].dims;
            let is_sequence = |dim: &DimId| placed.layer.counts_tokens(*dim);
            let at = dims.iter().position(is_sequence);
            at.is_some_and(|at| placed.choice.stream.axes_of(at).any(|own| own == axis))
        })
    };
    majority(body(layers).into_iter().map(|placed| (cut(placed), placed.count))) == Some(true)
}

/// The loop of the experts' products that an axis cuts, if most cut one.
fn expert_loop(layers: &[PlacedLayer], axis: AxisId) -> Option<Loop> {
    let votes = layers.iter().flat_map(|&placed| {
        let layer = placed.layer;
        let expert = layer
            .op_ids()
            .filter(move |op| is_expert_op(layer, &layer.ops[op.0]) && has_weights(layer, &layer.ops[op.0]));
        expert.map(move |op| (cut_loop(placed, op, axis), placed.count))
    });
    majority(votes).flatten()
}

/// Whether the layer that ends in the loss cuts the vocabulary along an axis.
fn cuts_vocabulary(layers: &[PlacedLayer], axis: AxisId) -> bool {
    let last = layers.iter().filter(|placed| placed.layer.has_loss());
    last.copied().any(|placed| {
        placed.layer.op_ids().any(|op| {
            let layer = placed.layer;
            let AxisUse::Factor(factor) = placed.choice.strategies[op.0].on(axis) else { return false };
            let sig = signature(layer, &layer.ops[op.0]);
            sig.factors
                .get(factor.0 as usize)
                .is_some_and(|factor| matches!(layer.dims[factor.dim.0].extent, Extent::Uneven(_)))
        })
    })
}

/// The cut of most of the dense parameters, by elements. Frozen ones have one state, the parameter: where most of them
/// are cut that is stage 3, else the learned ones say what is cut. What its use cuts over all devices says nothing
/// beside replicas, or beside matrices that are whole: there is nothing left of it to cut.
fn zero((mesh, dp): (&Mesh, u64), layers: &[PlacedLayer]) -> Zero {
    let votes = |held: fn(&Layer, TensorId) -> bool| {
        let of_layer = |placed: PlacedLayer| {
            let layer = placed.layer;
            let dense = layer.op_ids().filter(|op| !is_expert_op(layer, &layer.ops[op.0]));
            dense.flat_map(|op| parameter_cuts(mesh, placed, op, held)).collect::<Vec<_>>()
        };
        let all: Vec<Cut> = body(layers).into_iter().flat_map(of_layer).collect();
        let only_whole = dp > 1 || all.iter().any(|cut| cut.is_whole && cut.is_matrix);
        majority(all.iter().filter(|cut| cut.is_whole || !only_whole).map(|cut| (cut.stage, cut.elements)))
    };
    let frozen = votes(|layer, tensor| !layer.is_trained(tensor)).filter(|(stage, _)| *stage > 0);
    let (stage, hybrid) = frozen.or_else(|| votes(Layer::is_trained)).unwrap_or((0, None));
    Zero { stage, hybrid }
}

/// How a parameter is stored.
struct Cut {
    /// ZeRO stage, and the devices of its group where these are fewer than hold the same.
    stage: (u8, Option<u64>),
    /// In all layers of its kind.
    elements: u64,
    /// Whether several devices use the same of it.
    is_whole: bool,
    is_matrix: bool,
}

/// How those parameters of an operator are stored that are held so.
fn parameter_cuts(
    mesh: &Mesh,
    placed: PlacedLayer,
    op: OpId,
    held: fn(&Layer, TensorId) -> bool,
) -> Vec<Cut> {
    let (layer, choice) = (placed.layer, placed.choice);
    let used = placements(&signature(layer, &layer.ops[op.0]), choice.strategies[op.0]).operands;
    let operands = layer.ops[op.0].operands.iter().zip(used);
    let parameters = operands.filter(|(tensor, _)| layer.is_parameter(**tensor) && held(layer, **tensor));
    let size = |set: AxisSet| set.axes().into_iter().map(|axis| mesh.size(axis)).product::<u64>();
    parameters
        .filter_map(|(tensor, used)| {
            let storage = choice.storage.get(tensor)?;
            let whole = size(whole_axes(mesh, used));
            let cuts = [(3, storage.parameter), (2, storage.gradient), (1, storage.optimizer)];
            let (stage, cut) =
                cuts.into_iter().find(|(_, cut)| !cut.is_empty()).unwrap_or((0, AxisSet::EMPTY));
            let hybrid = (stage > 0 && size(cut) < whole).then(|| size(cut));
            Some(Cut {
                stage: (stage, hybrid),
                elements: layer.parameter_elements(*tensor).saturating_mul(placed.count),
                is_whole: whole > 1,
                is_matrix: layer.tensors[tensor.0].dims.len() >= 2,
            })
        })
        .collect()
}

/// Where the optimizer states of all learned parameters are.
fn optimizer_homes(layers: &[PlacedLayer]) -> Vec<StateHome> {
    let homes = |placed: &PlacedLayer| {
        let (layer, choice) = (placed.layer, placed.choice);
        let learned = choice.storage.iter().filter(|(tensor, _)| layer.is_trained(**tensor));
        learned.map(|(_, storage)| storage.home).collect::<Vec<_>>()
    };
    layers.iter().flat_map(homes).collect()
}

fn offload(homes: &[StateHome]) -> Offload {
    match (homes.iter().any(|home| home.is_updated_by_host()), homes.contains(&StateHome::Device)) {
        (false, _) => Offload::None,
        (true, true) => Offload::Some,
        (true, false) => Offload::Optimizer,
    }
}

fn on_nvme(homes: &[StateHome]) -> OnNvme {
    match (homes.contains(&StateHome::Nvme), homes.contains(&StateHome::Host)) {
        (false, _) => OnNvme::None,
        (true, true) => OnNvme::Some,
        (true, false) => OnNvme::All,
    }
}

fn on_host(layers: &[PlacedLayer], home: fn(&LayerChoice) -> Home) -> OnHost {
    let on_host = |placed: &PlacedLayer| home(placed.choice) == Home::Host;
    let body = body(layers);
    match (layers.iter().any(on_host), body.iter().all(on_host)) {
        (false, _) => OnHost::None,
        (true, false) => OnHost::Some,
        (true, true) => OnHost::All,
    }
}

fn recompute(layers: &[PlacedLayer]) -> RecomputeRole {
    let mut kinds: Vec<RecomputeRole> = body(layers).into_iter().map(layer_recompute).collect();
    kinds.dedup();
    match kinds.as_slice() {
        [] => RecomputeRole::None,
        [one] => *one,
        _ => RecomputeRole::Selective,
    }
}

/// Full where every value that backward reads is computed again from the stream.
fn layer_recompute(placed: PlacedLayer) -> RecomputeRole {
    let layer = placed.layer;
    let again = |op: OpId| placed.choice.recompute.get(op.0) == Some(&Recompute::Again);
    let gradients = gradient_tensors(layer);
    let read_by_backward: Vec<OpId> = layer
        .ops
        .iter()
        .flat_map(|op| backward_reads(op, &gradients).into_iter().map(|i| op.operands[i]))
        .filter_map(|tensor| original_producer(layer, tensor))
        .collect();
    match (read_by_backward.iter().all(|&op| again(op)), layer.op_ids().any(again)) {
        (true, true) => RecomputeRole::Full,
        (false, true) => RecomputeRole::Selective,
        (_, false) => RecomputeRole::None,
    }
}

/// The operator that computes a tensor, seen through forks, whose results are their operand.
fn original_producer(layer: &Layer, mut tensor: TensorId) -> Option<OpId> {
    loop {
        let op = layer.producer(tensor)?;
        if layer.ops[op.0].kind != OpKind::Fork {
            return Some(op);
        }
        tensor = layer.ops[op.0].operands[0];
    }
}
