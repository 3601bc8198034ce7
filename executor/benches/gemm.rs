//! Speed of the executor's matrix products: `cargo bench -p executor --bench gemm`.
//!
//! Prints the best of several products of two square matrices on one thread, in 10⁹ floating-point operations per
//! second. docs/benchmarks.md says how to get the same figure of another library on the same machine.

#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a benchmark reads the clock and prints"
)]

use std::hint::black_box;
use std::time::Instant;

use ndarray::{Array2, LinalgScalar};

/// Length of each side.
const N: usize = 1024;

/// Products; the best counts, for other work on the machine only slows.
const REPEATS: usize = 20;

/// Best speed of a product, 10⁹ operations per second.
fn best<E: LinalgScalar + From<f32>>() -> f64 {
    let fill = |(i, j): (usize, usize)| E::from(((i * 7 + j * 13) % 17) as f32 - 8.0);
    let (a, b) = (Array2::from_shape_fn((N, N), fill), Array2::from_shape_fn((N, N), fill));
    let seconds = (0..REPEATS).map(|_| {
        let start = Instant::now();
        black_box(black_box(&a).dot(black_box(&b)));
        start.elapsed().as_secs_f64()
    });
    2.0 * (N as f64).powi(3) / seconds.fold(f64::INFINITY, f64::min) / 1e9
}

fn main() {
    println!("product of two {N} x {N} matrices on one thread");
    println!("f32  {:6.1} Gflop/s", best::<f32>());
    println!("f64  {:6.1} Gflop/s", best::<f64>());
}
