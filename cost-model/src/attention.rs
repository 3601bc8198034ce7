//! Time of the attention core: scores, softmax, weighted sum.
//!
//! Flash (arXiv 2205.14135, 2307.08691) is bound by arithmetic; its rate falls with few queries. Eager is four
//! (backward: eight) passes over materialised scores and two (four) batched matrix products, without saving for the
//! mask.

use ir::engine::Dropout;
use ir::units::{Bytes, Flops, Seconds};
use ir::work::{AttentionKernel, GemmOutput, Pass};

use crate::constants::Constants;
use crate::gemm::{GemmShape, gemm_time};
use crate::rates::Rates;
use crate::stream::stream_time;

/// The sizes of an attention core; fields as in `ir::work::Work::Attention`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Sequences times query heads.
    pub batch_heads: f64,
    /// Queries per sequence.
    pub queries: f64,
    /// Keys per sequence.
    pub keys: f64,
    /// Length of a query and a key.
    pub dim_qk: f64,
    /// Length of a value.
    pub dim_v: f64,
    /// Fraction of the square that the mask leaves.
    pub unmasked: f64,
}

/// Time of one pass by one kernel.
pub fn attention_time(
    sizes: Attention,
    pass: Pass,
    kernel: AttentionKernel,
    rates: &Rates,
    constants: &Constants,
) -> Seconds {
    match kernel {
        AttentionKernel::Flash => flash_time(sizes, pass, rates, constants),
        AttentionKernel::Eager => eager_time(sizes, pass, rates, constants),
    }
}

/// Work of the tiled kernel: only unmasked blocks; backward computes the scores again.
///
/// Forward is two products, `2 (d_qk + d_v)` per pair of query and key; backward five, `2 (3 d_qk + 2 d_v)`: 2.5 times
/// as much where the two lengths are equal (arXiv 2205.14135 algorithm 4).
pub fn flash_flops(sizes: Attention, pass: Pass) -> Flops {
    let pairs = sizes.batch_heads * sizes.queries * sizes.keys * sizes.unmasked;
    let per_pair = match pass {
        Pass::Forward => sizes.dim_qk + sizes.dim_v,
        Pass::Backward => 3.0 * sizes.dim_qk + 2.0 * sizes.dim_v,
    };
    Flops(2.0 * pairs * per_pair)
}

/// `flops / (rate * q / (q + 256)) + 2 gaps`, backward at 0.85 of the rate.
///
/// One causal sequence of 2048 and 32 heads of 128 on an A100: 34.4 GFLOP at 108 TFLOP/s x 0.889 is 357 us, and 8 us.
fn flash_time(sizes: Attention, pass: Pass, rates: &Rates, constants: &Constants) -> Seconds {
    let saturation = sizes.queries / (sizes.queries + constants.attention_saturation_queries);
    let factor = match pass {
        Pass::Forward => saturation,
        Pass::Backward => saturation * constants.attention_backward_efficiency_factor,
    };
    flash_flops(sizes, pass) / (rates.attention * factor) + constants.kernel_gap_s * 2.0
}

/// Two (backward four) batched products over the full square, and the softmax's traffic: it reads and writes every
/// score, 2 elements forward and 3 backward; dropout 2 elements and a mask more each way.
fn eager_time(sizes: Attention, pass: Pass, rates: &Rates, constants: &Constants) -> Seconds {
    let Attention { batch_heads: batch, queries, keys, dim_qk, dim_v, .. } = sizes;
    let product = |m, n, k| gemm_time(GemmShape { batch, m, n, k }, GemmOutput::Operand, rates, constants);
    let (products, passes) = match pass {
        Pass::Forward => (product(queries, keys, dim_qk) + product(queries, dim_v, keys), 2.0),
        Pass::Backward => (
            product(keys, dim_v, queries)
                + product(queries, keys, dim_v)
                + product(queries, dim_qk, keys)
                + product(keys, dim_qk, queries),
            3.0,
        ),
    };
    // Dropout reads and writes the probabilities and writes or reads a mask of one byte.
    let (dropout, kernels) = match constants.engine.dropout {
        Dropout::On => (rates.element * 2.0 + Bytes(1.0), 2),
        Dropout::Off => (Bytes::ZERO, 1),
    };
    let softmax: Bytes = (rates.element * passes + dropout) * (batch * queries * keys);
    products + stream_time(softmax * constants.stream_factor(), kernels, rates, constants)
}

#[cfg(test)]
mod tests {
    use ir::cluster::Precision;

    use super::*;
    use crate::constants::tests::of_examples;
    use crate::rates::tests::a100;

    const LLAMA: Attention = Attention {
        batch_heads: 32.0,
        queries: 2048.0,
        keys: 2048.0,
        dim_qk: 128.0,
        dim_v: 128.0,
        unmasked: 0.5,
    };

    fn time(sizes: Attention, pass: Pass, kernel: AttentionKernel) -> f64 {
        let constants = of_examples();
        let rates = Rates::new(&a100(), Precision::Bf16, &constants);
        attention_time(sizes, pass, kernel, &rates, &constants).0
    }

    #[test]
    fn flash_forward_is_its_flops_at_the_saturated_rate() {
        let expected = 34.359738368e9 / (312e12 * 0.347 * 2048.0 / 2304.0) + 8e-6;
        assert!((time(LLAMA, Pass::Forward, AttentionKernel::Flash) - expected).abs() < 1e-12);
    }

    #[test]
    fn flash_backward_is_two_and_a_half_forwards_at_85_percent() {
        let forward = time(LLAMA, Pass::Forward, AttentionKernel::Flash) - 8e-6;
        let backward = time(LLAMA, Pass::Backward, AttentionKernel::Flash) - 8e-6;
        assert!((backward / forward - 2.5 / 0.85).abs() < 1e-9);
    }

    #[test]
    fn eager_attention_ignores_the_mask_and_pays_for_the_scores() {
        let eager = |unmasked| time(Attention { unmasked, ..LLAMA }, Pass::Forward, AttentionKernel::Eager);
        assert_eq!(eager(0.5), eager(1.0));
        let softmax = 4.0 * 32.0 * 2048.0 * 2048.0 / (2039e9 * 0.65);
        assert!(eager(0.5) > softmax + 2.0 * 34.359738368e9 / 312e12);
    }
}
