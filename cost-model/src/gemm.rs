//! Time of a matrix product: tiles of the result run in waves over the compute units.
//!
//! ```text
//! tiles  = ceil(m / Tm) * ceil(n / Tn) * batch
//! waves  = ceil(tiles * S / units)                               S = ways the contraction is split
//! t_math = waves * 2 Tm Tn (k' / S + k0) / (rate(tile) / units) + 8 m n batch S / memory   if S > 1
//! k'     = k in whole steps;  a = 1, or less where a row of an operand or of the result is no multiple of 16 bytes
//! t      = max(min over (tile, S) of t_math, bytes / memory) / a + kernel gap
//! ```
//! Wave quantisation as in NVIDIA's "Matrix Multiplication Background User's Guide"; constants: `data/constants.json`.

use ir::units::{Bytes, Flops, FlopsPerSecond, Seconds};
use ir::work::GemmOutput;

use crate::constants::{Constants, Tile};
use crate::rates::Rates;

/// `batch` products of `m x k` by `k x n`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GemmShape {
    /// Independent products.
    pub batch: f64,
    /// Rows of the result.
    pub m: f64,
    /// Columns of the result.
    pub n: f64,
    /// Length of the contraction.
    pub k: f64,
}

/// Time of one batched matrix product.
///
/// 8192 x 8192 x 8192 on an A100 (108 units, 247 TFLOP/s): 2048 tiles of 256 x 128 are 19 waves of 18.96, so
/// 1.1e12 FLOP / 247e12 x 19 / 18.96 x (8192 + 120) / 8192 = 4.53 ms.
pub fn gemm_time(shape: GemmShape, output: GemmOutput, rates: &Rates, constants: &Constants) -> Seconds {
    let traffic = gemm_bytes(shape, output, rates) / rates.memory;
    // Loads of rows that begin anywhere are narrow, so traffic suffers with arithmetic.
    let aligned = math_time(shape, rates, constants).max(traffic);
    aligned / alignment(shape, output, rates, constants) + constants.kernel_gap_s
}

/// Bytes read and written: both operands, and the result once, or an fp32 accumulator read and written.
pub fn gemm_bytes(shape: GemmShape, output: GemmOutput, rates: &Rates) -> Bytes {
    let GemmShape { batch, m, n, k } = shape;
    let result = match output {
        GemmOutput::Operand => rates.element,
        GemmOutput::Accumulator => Bytes(8.0),
    };
    (rates.operand * (m * k + k * n) + result * (m * n)) * batch
}

/// Rate against that of a product whose rows all begin at multiples of 16 bytes, as tensor cores load them.
///
/// Heads of 150 in 16 bits are no multiple of 8 elements; heads of 144 are. Batches of such products fall back further
/// than a single one, such as that of a head whose vocabulary is odd.
fn alignment(shape: GemmShape, output: GemmOutput, rates: &Rates, constants: &Constants) -> f64 {
    let elements = 16.0 / rates.operand.0;
    let whole = |length: f64| length % elements == 0.0;
    // The rows of a gradient of a weight are features on both sides; else `m` counts tokens.
    let rows = match output {
        GemmOutput::Operand => true,
        GemmOutput::Accumulator => whole(shape.m),
    };
    let columns = whole(shape.n) && (output == GemmOutput::Accumulator || whole(shape.k));
    match (rows && columns, shape.batch > 1.0) {
        (true, _) => 1.0,
        (false, true) => constants.gemm_misaligned_fraction,
        (false, false) => constants.gemm_single_misaligned_fraction,
    }
}

fn math_time(shape: GemmShape, rates: &Rates, constants: &Constants) -> Seconds {
    let mut best = Seconds(f64::INFINITY);
    for tile in &constants.gemm_tiles {
        for &split in &constants.gemm_splits {
            best = best.min(split_time(shape, tile, split, (rates, constants)));
        }
    }
    best
}

fn split_time(shape: GemmShape, tile: &Tile, split: f64, on: (&Rates, &Constants)) -> Seconds {
    let (rates, constants) = on;
    let tiles = (shape.m / tile.m).ceil() * (shape.n / tile.n).ceil() * shape.batch;
    let waves = (tiles * split / rates.compute_units).ceil();
    let k = (shape.k / constants.gemm_contraction_step).ceil() * constants.gemm_contraction_step;
    let per_wave = Flops(2.0 * tile.m * tile.n * (k / split + constants.gemm_prologue_k));
    let rate: FlopsPerSecond = rates.gemm * (tile.efficiency_fraction / rates.compute_units);
    let time = per_wave / rate * waves;
    if split > 1.0 {
        time + Bytes(8.0 * shape.m * shape.n * shape.batch * split) / rates.memory
    } else {
        time
    }
}

#[cfg(test)]
mod tests {
    use ir::cluster::Precision;
    use proptest::prelude::*;

    use super::*;
    use crate::constants::tests::of_examples;
    use crate::rates::tests::a100;

    fn time(m: f64, n: f64, k: f64) -> f64 {
        let constants = of_examples();
        let rates = Rates::new(&a100(), Precision::Bf16, &constants);
        gemm_time(GemmShape { batch: 1.0, m, n, k }, GemmOutput::Operand, &rates, &constants).0
    }

    #[test]
    fn a_large_product_runs_near_the_sustained_rate() {
        let expected = 2.0 * 8192.0_f64.powi(3) / (312e12 * 0.793);
        let ratio = time(8192.0, 8192.0, 8192.0) / expected;
        assert!((1.01..1.03).contains(&ratio), "{ratio}");
    }

    #[test]
    fn a_result_of_128_tiles_wastes_most_of_a_second_wave() {
        // 2048 x 2048 is 128 tiles of 256 x 128 on 108 units: 59 % of the large product's rate, less with the prologue.
        let work = 2.0 * 2048.0_f64.powi(3);
        let rate = work / (time(2048.0, 2048.0, 2048.0) - 4e-6) / (312e12 * 0.793);
        assert!((0.55..0.75).contains(&rate), "{rate}");
    }

    #[test]
    fn a_thin_product_is_bound_by_memory() {
        // 16 x 4096 x 4096 reads 33.7 MB of weights at 65 % of 2039 GB/s: 25.5 us and a kernel gap.
        let bytes = 2.0 * (16.0 * 4096.0 * 2.0 + 4096.0 * 4096.0);
        assert!((time(16.0, 4096.0, 4096.0) - (bytes / (2039e9 * 0.65) + 4e-6)).abs() < 1e-12);
    }

    #[test]
    fn a_misaligned_product_is_slower_and_a_batch_of_them_more_so() {
        let constants = of_examples();
        let rates = Rates::new(&a100(), Precision::Bf16, &constants);
        let slower = |batch: f64| {
            let of = |n| {
                gemm_time(
                    GemmShape { batch, m: 4096.0, n, k: 4096.0 },
                    GemmOutput::Operand,
                    &rates,
                    &constants,
                )
            };
            of(4095.0) / of(4096.0)
        };
        let (one, several) = (slower(1.0), slower(2.0));
        assert!((1.9..2.1).contains(&one), "{one}");
        assert!((15.0..17.0).contains(&several), "{several}");
    }

    proptest! {
        #[test]
        fn more_rows_never_take_less_time(m in 1.0..9000.0_f64, more in 0.0..500.0_f64, n in 1.0..9000.0_f64, k in 1.0..9000.0_f64) {
            prop_assert!(time(m + more, n, k) >= time(m, n, k));
            prop_assert!(time(n, m + more, k) >= time(n, m, k));
            prop_assert!(time(n, k, m + more) >= time(n, k, m));
        }
    }
}
