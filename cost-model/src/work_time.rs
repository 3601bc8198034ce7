//! Time of the work that an operator's line declares.

use ir::cluster::{Device, Precision};
use ir::units::Seconds;
use ir::work::{AttentionKernel, Pass, Work};

use crate::attention::{Attention, attention_time};
use crate::constants::Constants;
use crate::gemm::{GemmShape, gemm_time};
use crate::rates::{Rates, attention_precision};
use crate::stream::stream_time;

/// Time of `work` on one `device`; allocates nothing.
///
/// In an fp8 job the attention core and memory-bound operators stay in 16 bits.
pub fn work_time(work: &Work, device: &Device, precision: Precision, constants: &Constants) -> Seconds {
    match *work {
        Work::Gemm { batch, m, n, k, output } => {
            let rates = Rates::new(device, precision, constants);
            gemm_time(GemmShape { batch, m, n, k }, output, &rates, constants)
        }
        Work::Attention { batch_heads, queries, keys, dim_qk, dim_v, unmasked, pass, kernel } => {
            let rates = Rates::new(device, attention_precision(precision), constants);
            let sizes = Attention { batch_heads, queries, keys, dim_qk, dim_v, unmasked };
            attention_time(sizes, pass, kernel, &rates, constants)
        }
        // All that an interpreter adds is in the count.
        Work::Composed { bytes, kernels } => {
            let rates = Rates::new(device, precision, constants);
            stream_time(bytes, kernels, &rates, constants)
        }
        Work::Stream { bytes, kernels } => {
            let rates = Rates::new(device, precision, constants);
            stream_time(bytes * constants.stream_factor(), kernels, &rates, constants)
        }
    }
}

/// Kernels that `work` launches: scores, mask, softmax and sum of attention apart where they are materialised.
pub fn n_kernels(work: &Work) -> f64 {
    match work {
        // Modules, of which this is one, take more of the host's time than launches.
        Work::Gemm { .. } | Work::Composed { .. } => 1.0,
        Work::Attention { kernel: AttentionKernel::Flash, .. } => 2.0,
        Work::Attention { kernel: AttentionKernel::Eager, pass: Pass::Forward, .. } => 4.0,
        Work::Attention { kernel: AttentionKernel::Eager, pass: Pass::Backward, .. } => 8.0,
        Work::Stream { kernels, .. } => f64::from(*kernels),
    }
}

#[cfg(test)]
mod tests {
    use ir::units::Bytes;
    use ir::work::GemmOutput;

    use super::*;
    use crate::rates::tests::a100;

    fn gemm(m: f64, n: f64, k: f64) -> Work {
        Work::Gemm { batch: 1.0, m, n, k, output: GemmOutput::Operand }
    }

    #[test]
    fn published_forward_of_a_22b_layer_is_reproduced_within_10_percent() {
        // 22B model, 4 sequences of 2048 on 8 A100: 7.7 ms forward (arXiv 2205.05198 table 4), of which the two
        // all-reduces of 100 MB take about 1.7 ms. Attention is eager, with dropout.
        let (tokens, h, pairs) = (8192.0, 6144.0, 4.0 * 8.0 * 2048.0 * 2048.0);
        let stream = |bytes: f64, kernels| Work::Stream { bytes: Bytes(bytes), kernels };
        let layer = [
            gemm(tokens, 3.0 * h / 8.0, h),
            Work::Attention {
                batch_heads: 32.0,
                queries: 2048.0,
                keys: 2048.0,
                dim_qk: 96.0,
                dim_v: 96.0,
                unmasked: 0.5,
                pass: Pass::Forward,
                kernel: AttentionKernel::Eager,
            },
            stream(5.0 * pairs, 1),
            gemm(tokens, h, h / 8.0),
            gemm(tokens, 4.0 * h / 8.0, h),
            gemm(tokens, h, 4.0 * h / 8.0),
            stream(tokens * h * (2.0 * 4.0 + 2.0 * 7.0) + tokens * 4.0 * h / 8.0 * 4.0, 5),
        ];
        let constants = Constants::load();
        let sum: Seconds =
            layer.iter().map(|work| work_time(work, &a100(), Precision::Fp16, &constants)).sum();
        let milliseconds = sum.0 * 1e3 + 1.7;
        assert!((milliseconds / 7.7 - 1.0).abs() < 0.1, "{milliseconds}");
    }

    #[test]
    fn published_layers_on_one_a100_are_reproduced_within_10_percent() {
        // Four GPT layers, h 3072, 24 heads, one sequence of 2048 in bf16 with flash attention: 10.48 to 10.62 ms
        // forward in four runs (github sail-sg/VocabularyParallelism artifact/exp_one_host.csv, middle stages).
        let (tokens, h) = (2048.0, 3072.0);
        let layer = [
            gemm(tokens, 3.0 * h, h),
            Work::Attention {
                batch_heads: 24.0,
                queries: tokens,
                keys: tokens,
                dim_qk: 128.0,
                dim_v: 128.0,
                unmasked: 0.5,
                pass: Pass::Forward,
                kernel: AttentionKernel::Flash,
            },
            gemm(tokens, h, h),
            gemm(tokens, 4.0 * h, h),
            gemm(tokens, h, 4.0 * h),
            // Two norms at 4 bytes, two residual adds at 6, GELU at 4 on the inner width.
            Work::Stream { bytes: Bytes(tokens * h * (2.0 * 4.0 + 2.0 * 6.0 + 4.0 * 4.0)), kernels: 5 },
        ];
        let constants = Constants::load();
        let sum: Seconds =
            layer.iter().map(|work| work_time(work, &a100(), Precision::Bf16, &constants)).sum();
        let milliseconds = sum.0 * 4e3;
        assert!((milliseconds / 10.55 - 1.0).abs() < 0.1, "{milliseconds}");
    }

    #[test]
    fn attention_of_an_fp8_job_runs_in_16_bits() {
        let work = Work::Attention {
            batch_heads: 1.0,
            queries: 256.0,
            keys: 256.0,
            dim_qk: 64.0,
            dim_v: 64.0,
            unmasked: 1.0,
            pass: Pass::Forward,
            kernel: AttentionKernel::Eager,
        };
        let constants = Constants::load();
        let in_precision = |precision| work_time(&work, &a100(), precision, &constants);
        assert_eq!(in_precision(Precision::Fp8), in_precision(Precision::Bf16));
    }
}
