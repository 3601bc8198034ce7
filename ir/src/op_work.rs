//! The work of every operator, forward and backward, as kernels the cost model can price.
//!
//! A matrix product's backward is one product per operand; what is bound by memory is counted in bytes per element of
//! its largest tensor (cost tables of fused kernels: Korthikanti et al. 2022, arXiv 2205.05198, section 4; Dao 2023,
//! arXiv 2307.08691 for attention). Sizes are local to a device and expected, so expert slots count as filled.

use crate::engine::{Dropout, Engine, Experts, Kernels, LossKernel};
use crate::graph::{DimId, Extent, Layer, Op, Sizes};
use crate::mesh::{AxisId, Mesh};
use crate::op::{AttentionMask, OpKind};
use crate::signature::{FactorId, Signature};
use crate::strategy::Strategy;
use crate::token_order::TokenOrder;
use crate::units::Bytes;
use crate::work::{AttentionKernel, GemmOutput, Pass, Work};

/// Which kernels an engine runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelChoice {
    /// Implementation of the attention core.
    pub attention: AttentionKernel,
    /// Which tokens of a cut sequence a device holds.
    pub token_order: TokenOrder,
    /// Bytes of one activation element.
    pub element_bytes: f64,
    /// Kernels of operators that are bound by memory.
    pub streams: Kernels,
    /// Dropout on what enters the residual stream.
    pub dropout: Dropout,
    /// How rows are put in order of their experts: as experts that are run so ask for.
    pub experts: Experts,
    /// How the loss over the vocabulary is computed.
    pub loss: LossKernel,
}

impl KernelChoice {
    /// The kernels of an engine, for activations of so many bytes an element.
    pub fn of(
        engine: &Engine,
        (attention, token_order): (AttentionKernel, TokenOrder),
        element_bytes: f64,
    ) -> Self {
        Self {
            attention,
            token_order,
            element_bytes,
            streams: engine.kernels,
            dropout: engine.dropout,
            experts: engine.sorting(),
            loss: engine.loss,
        }
    }

    /// Whether norms, rotations and gates are put together from simpler operators, in fp32 where they compute so.
    pub fn composes(&self) -> bool {
        self.streams == Kernels::Eager && self.element_bytes == 2.0
    }
}

/// Expected local length of every factor of an operator under a strategy: of travelling blocks, all are walked.
pub fn local_lengths(sig: &Signature, strategy: Strategy, mesh: &Mesh, sizes: &Sizes) -> Vec<f64> {
    let length = |(i, factor): (usize, &crate::signature::Factor)| {
        let own = |axis: &AxisId| strategy.on(*axis).divides() == Some(FactorId(i as u8));
        let parts = mesh.axis_ids().filter(own).map(|axis| mesh.size(axis)).product();
        sizes.dims[factor.dim.0].div_ceil(parts) as f64
    };
    sig.factors.iter().enumerate().map(length).collect()
}

/// Expected local elements of operand or result dims.
fn elements(dims: &[FactorId], local: &[f64]) -> f64 {
    dims.iter().map(|f| local[f.0 as usize]).product()
}

/// Fraction of an operator's expert slots that hold a token: 1 without slots.
fn filled(layer: &Layer, op: &Op, sizes: &Sizes) -> f64 {
    let tensors = op.operands.iter().chain(&op.results);
    let dims = tensors.flat_map(|tensor| &layer.tensors[tensor.0].dims);
    dims.map(|dim| sizes.filled[dim.0]).fold(1.0, f64::min)
}

/// The kernels an operator runs in one pass, for local factor lengths as [`local_lengths`] gives them.
pub fn op_work(
    (layer, op, sig): (&Layer, &Op, &Signature),
    local: &[f64],
    sizes: &Sizes,
    pass: Pass,
    kernels: &KernelChoice,
) -> Vec<Work> {
    let fill = filled(layer, op, sizes);
    let operand = |i: usize| elements(&sig.operands[i], local);
    let result = |i: usize| elements(&sig.results[i], local);
    let stream = |elements: f64, forward: f64, backward: f64| {
        let per_element = if pass == Pass::Forward { forward } else { backward };
        // The table is in bytes for two-byte elements; of expert slots, those that stay empty are not touched.
        let bytes = elements * fill * per_element * kernels.element_bytes / 2.0;
        if bytes > 0.0 { vec![Work::Stream { bytes: Bytes(bytes), kernels: 1 }] } else { Vec::new() }
    };
    // Forward and backward each: bytes per element, and the kernels that move them.
    let composed = |elements: f64, forward: (f64, u32), backward: (f64, u32)| {
        let (per_element, kernels) = if pass == Pass::Forward { forward } else { backward };
        let bytes = Bytes(elements * fill * per_element);
        if kernels > 0 { vec![Work::Composed { bytes, kernels }] } else { Vec::new() }
    };
    let one_by_one = kernels.composes();
    let sorted = match kernels.experts {
        Experts::Together => 0.0,
        Experts::Each => 4.0,
    };
    match &op.kind {
        OpKind::Linear => linear(sig, local, fill, pass),
        OpKind::Attention { window, mask, .. } => {
            attention((layer, sig), local, (*mask, *window), pass, kernels)
        }
        // Traced by hand through PyTorch 2.5: `rms_norm` casts to fp32, squares, averages, scales, casts back and
        // weighs, and backward undoes each; rotations are complex products in fp32; a gate is `silu` and a product.
        OpKind::RmsNorm { .. } if one_by_one => composed(result(0), (36.0, 7), (92.0, 13)),
        OpKind::Rope { .. } if one_by_one => composed(result(0), (20.0, 3), (20.0, 3)),
        OpKind::Glu { .. } if one_by_one => composed(result(0), (10.0, 2), (18.0, 3)),
        //                                    elements            forward  backward   bytes per element
        OpKind::Embed => stream(result(0), 6.0, 6.0),
        OpKind::AddPosition { .. } => stream(result(0), 6.0, 4.0),
        // Fused into the product before it; backward sums over the tokens.
        OpKind::Bias => stream(result(0), 0.0, 2.0),
        OpKind::RmsNorm { .. } | OpKind::LayerNorm { .. } => stream(result(0), 4.0, 6.0),
        OpKind::Rope { .. } => stream(result(0), 4.0, 4.0),
        OpKind::Glu { .. } => stream(result(0), 6.0, 10.0),
        OpKind::Act { .. } => stream(result(0), 4.0, 6.0),
        OpKind::Gate => stream(result(0), 4.0, 8.0),
        // With dropout a mask of one byte is written, and backward scales the gradient of one operand by it.
        OpKind::Add => match kernels.dropout {
            Dropout::Off => stream(result(0), 6.0, 0.0),
            Dropout::On => stream(result(0), 7.0, 5.0),
        },
        OpKind::Scale { .. } | OpKind::Weigh { .. } => stream(result(0), 0.0, 0.0),
        OpKind::Softcap { .. } => stream(result(0), 4.0, 6.0),
        // Forward it is the same tensor; backward it adds the gradients of all readers but the first.
        OpKind::Fork => stream(operand(0), 0.0, 6.0 * (op.results.len() as f64 - 1.0)),
        // A view of the product's result; backward writes the parts side by side.
        OpKind::Split { .. } => stream(operand(0), 0.0, 4.0),
        // Writes the parts side by side; backward takes views of the gradient.
        OpKind::Concat { .. } => stream(result(0), 4.0, 0.0),
        // Reads the rows so far and writes them side by side; backward reads two gradients and writes one.
        OpKind::Extend => stream(result(0), 4.0, 6.0),
        OpKind::AppendShared => stream(result(0), 4.0, 4.0),
        OpKind::Route { .. } => stream(operand(0), 8.0, 8.0),
        // Reads and writes one row per routed token; once more where rows are sorted on both sides of the exchange.
        OpKind::Dispatch => stream(result(0), 4.0 + sorted, 4.0 + sorted),
        OpKind::Combine => stream(operand(0), 4.0 + sorted, 6.0 + sorted),
        // The three of the loss together. Plain: cast to fp32, log-softmax and its gradient, each a tensor of its own,
        // as measured, in bytes at the rate of a copy (`fixtures/measured/operators.csv`, cross-entropy); unfused:
        // read, cast and exponentiate in fp32, write the gradient; fused: read once forward and once backward, and
        // written in place, as measured of a compiled one.
        OpKind::RowMax => match kernels.loss {
            LossKernel::Plain => composed(operand(0), (8.0, 1), (0.0, 0)),
            LossKernel::Unfused => stream(operand(0), 4.0, 0.0),
            LossKernel::Fused => Vec::new(),
        },
        OpKind::SumExp => match kernels.loss {
            LossKernel::Plain => composed(operand(0), (18.0, 2), (26.0, 4)),
            LossKernel::Unfused => stream(operand(0), 4.0, 10.0),
            LossKernel::Fused => stream(operand(0), 5.0, 5.0),
        },
        OpKind::Pick => stream(result(0), 4.0, 4.0),
        OpKind::CrossEntropy | OpKind::SumLoss => stream(result(0).max(operand(0)), 8.0, 8.0),
    }
}

/// The kernels of a backward that yields the gradients of some operands only. A product runs one for each; where only a
/// learned table or vector could get one and does not, nothing runs; all else runs whole.
pub fn backward_work(
    (layer, op, sig): (&Layer, &Op, &Signature),
    local: &[f64],
    sizes: &Sizes,
    kernels: &KernelChoice,
    gets: &[bool],
) -> Vec<Work> {
    let all = || op_work((layer, op, sig), local, sizes, Pass::Backward, kernels);
    let sums_a_table = matches!(op.kind, OpKind::Embed | OpKind::Bias | OpKind::AddPosition { .. });
    if !gets.contains(&true) || (sums_a_table && gets.last() != Some(&true)) {
        return Vec::new();
    }
    if !op.kind.is_product() {
        return all();
    }
    all().into_iter().zip(gets).filter(|(_, gets)| **gets).map(|(work, _)| work).collect()
}

/// Forward one product; backward one per operand: `dx = dy w'` and, into the accumulator, `dw = x' dy`.
fn linear(sig: &Signature, local: &[f64], fill: f64, pass: Pass) -> Vec<Work> {
    let mut sizes = [1.0_f64; 4];
    for (i, &length) in local.iter().enumerate() {
        let factor = FactorId(i as u8);
        let (x, w, y) = (
            sig.operands[0].contains(&factor),
            sig.operands[1].contains(&factor),
            sig.results[0].contains(&factor),
        );
        let slot = match (x, w, y) {
            (true, true, true) => 0,
            (true, false, _) => 1,
            (false, true, _) => 2,
            _ => 3,
        };
        sizes[slot] *= length;
    }
    let [batch, m, n, k] = sizes;
    let m = (m * fill).max(1.0);
    match pass {
        Pass::Forward => vec![Work::Gemm { batch, m, n, k, output: GemmOutput::Operand }],
        Pass::Backward => vec![
            Work::Gemm { batch, m, n: k, k: n, output: GemmOutput::Operand },
            Work::Gemm { batch, m: k, n, k: m, output: GemmOutput::Accumulator },
        ],
    }
}

fn attention(
    (layer, sig): (&Layer, &Signature),
    local: &[f64],
    (mask, window): (AttentionMask, Option<u64>),
    pass: Pass,
    kernels: &KernelChoice,
) -> Vec<Work> {
    let at = |dims: &[FactorId], i: usize| dims.get(i).map_or(1.0, |f| local[f.0 as usize]);
    let (q, k, v) = (&sig.operands[0], &sig.operands[1], &sig.operands[2]);
    let keys = at(k, 1);
    // Only the tokens of a sequence are put in another order.
    let is_sequence = q.get(1).is_some_and(|f| {
        matches!(layer.dims[sig.factors[f.0 as usize].dim.0].extent, Extent::Sequence | Extent::UpToSlice)
    });
    let order = if is_sequence { kernels.token_order } else { TokenOrder::Natural };
    let unmasked = match mask {
        // The device with most work is waited for.
        AttentionMask::Causal => order.unmasked(keys / at(q, 1), keys, window),
        AttentionMask::Full => 1.0,
    };
    vec![Work::Attention {
        batch_heads: at(q, 0) * at(q, 2) * at(q, 3),
        queries: at(q, 1),
        keys,
        dim_qk: at(q, 4),
        dim_v: at(v, 3),
        unmasked,
        pass,
        kernel: kernels.attention,
    }]
}

/// Kernels whose arithmetic is the model's alone.
const PLAIN: KernelChoice = KernelChoice {
    attention: AttentionKernel::Flash,
    token_order: TokenOrder::Natural,
    element_bytes: 2.0,
    streams: Kernels::Fused,
    dropout: Dropout::Off,
    experts: Experts::Together,
    loss: LossKernel::Unfused,
};

/// How pairs of a query and a key are counted of which a causal mask leaves out some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Those that are left.
    Once,
    /// Twice as many, and no more than there are: the full square where no window is shorter, as published utilisations
    /// count.
    Twice,
}

/// Model FLOPs of one forward pass of an operator on the whole micro-batch: products, and attention.
pub fn model_flops(layer: &Layer, op: &Op, sig: &Signature, sizes: &Sizes, counted: Counted) -> f64 {
    let whole: Vec<f64> = sig.factors.iter().map(|factor| sizes.dims[factor.dim.0] as f64).collect();
    if op.kind == OpKind::Linear {
        return 2.0 * filled(layer, op, sizes) * whole.iter().product::<f64>();
    }
    let OpKind::Attention { window, mask, .. } = &op.kind else { return 0.0 };
    attention((layer, sig), &whole, (*mask, *window), Pass::Forward, &PLAIN)
        .iter()
        .map(|work| match work {
            Work::Attention { batch_heads, queries, keys, dim_qk, dim_v, unmasked: seen, .. } => {
                let pairs = match (counted, *mask) {
                    (Counted::Twice, AttentionMask::Causal) => (2.0 * seen).min(1.0),
                    (Counted::Once, _) | (Counted::Twice, AttentionMask::Full) => *seen,
                };
                2.0 * batch_heads * queries * keys * (dim_qk + dim_v) * pairs
            }
            Work::Gemm { .. } | Work::Composed { .. } | Work::Stream { .. } => 0.0,
        })
        .sum()
}

/// Fraction of what an operator computes that is the model's: not the slots of experts that their capacity leaves empty
/// where tokens spread evenly.
pub fn useful(layer: &Layer, sig: &Signature, sizes: &Sizes) -> f64 {
    let sequence = layer.dims.iter().position(|dim| dim.extent == Extent::Sequence);
    let of_dim = |dim: DimId| match (layer.dims[dim.0].extent, sequence) {
        (Extent::Slots { filled, capacity: Some(_) }, Some(sequence)) => {
            (filled * sizes.dims[sequence] as f64 / sizes.dims[dim.0] as f64).min(1.0)
        }
        _ => 1.0,
    };
    sig.factors.iter().map(|factor| of_dim(factor.dim)).product()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builder::LayerBuilder;
    use crate::graph::{Data, Role};
    use crate::op::AttentionBias;
    use crate::signature::signature;

    /// A layer with attention alone: eight queries per sequence, keys of the same or of `m`, five of them.
    fn attending(mask: AttentionMask, keys: &str) -> Layer {
        let mut b = LayerBuilder::new("attending");
        [("k", 2), ("r", 3), ("d", 4), ("m", 5)].into_iter().for_each(|(name, length)| b.fixed(name, length));
        let q = b.tensor("q", "b s k r d", Role::Activation);
        let [k, v] = ["key", "value"].map(|name| b.tensor(name, &format!("b {keys} k d"), Role::Activation));
        let positions = b.tensor("positions", "s", Role::Data(Data::Positions));
        let mut operands = vec![q, k, v];
        operands.resize(mask.n_operands(), positions);
        let bias = AttentionBias::None;
        let kind = OpKind::Attention { scale: None, window: None, softcap: None, bias, mask };
        let y = b.op("core", kind, &operands, "b s k r d");
        b.finish(y)
    }

    fn flops(mask: AttentionMask, keys: &str) -> f64 {
        let layer = attending(mask, keys);
        let op = &layer.ops[0];
        model_flops(&layer, op, &signature(&layer, op), &layer.sizes(7, 8), Counted::Once)
    }

    /// Two products of length four for each of 7 x 6 heads and each pair of query and key.
    #[test]
    fn without_a_mask_every_pair_of_query_and_key_is_counted() {
        let heads = 2.0 * 7.0 * 6.0 * (4.0 + 4.0);
        assert_eq!(flops(AttentionMask::Causal, "s"), heads * 8.0 * 8.0 / 2.0);
        assert_eq!(flops(AttentionMask::Full, "s"), heads * 8.0 * 8.0);
        assert_eq!(flops(AttentionMask::Full, "m"), heads * 8.0 * 5.0);
    }

    /// A window of two tokens of eight leaves `1/4 - 1/32` of the pairs.
    #[test]
    fn no_more_pairs_are_counted_twice_than_a_window_leaves() {
        let counted = |window, counted| {
            let mut layer = attending(AttentionMask::Causal, "s");
            if let OpKind::Attention { window: own, .. } = &mut layer.ops[0].kind {
                *own = window;
            }
            let op = &layer.ops[0];
            model_flops(&layer, op, &signature(&layer, op), &layer.sizes(7, 8), counted)
        };
        let all = flops(AttentionMask::Full, "s");
        assert_eq!(
            [None, Some(8), Some(2)].map(|window| counted(window, Counted::Twice) / all),
            [1.0, 1.0, 0.4375]
        );
        assert_eq!(counted(Some(2), Counted::Once) / all, 0.21875);
    }

    /// Of causal attention the device with the last tokens has most; without a mask all devices have as much.
    #[test]
    fn cutting_queries_halves_the_work_of_attention_without_a_mask() {
        let work = |mask, queries: f64| {
            let layer = attending(mask, "s");
            let (op, sig) = (&layer.ops[0], signature(&layer, &layer.ops[0]));
            let mut local: Vec<f64> = vec![1.0; sig.factors.len()];
            let at = |name: &str| sig.factor(name).map_or(0, |factor| factor.0 as usize);
            (local[at("s")], local[at("t")]) = (queries, 8.0);
            match op_work((&layer, op, &sig), &local, &layer.sizes(1, 8), Pass::Forward, &PLAIN)[..] {
                [Work::Attention { queries, keys, unmasked, .. }] => queries * keys * unmasked,
                ref other => panic!("{other:?}"),
            }
        };
        assert_eq!([8.0, 4.0].map(|queries| work(AttentionMask::Full, queries)), [64.0, 32.0]);
        assert_eq!([8.0, 4.0].map(|queries| work(AttentionMask::Causal, queries)), [32.0, 24.0]);
    }
}
