//! Time of memory-bound operators: norms, activations, residuals, loss, optimizer.

use ir::units::{Bytes, Seconds};

use crate::constants::Constants;
use crate::memory::{StateBytes, update_traffic};
use crate::rates::Rates;

/// Time to move `bytes` through device memory in `kernels` launches: `bytes / memory + kernels * gap`.
///
/// 1.325 GB in one kernel on an A100 (65 % of 2039 GB/s): 1 ms + 4 us.
pub fn stream_time(bytes: Bytes, kernels: u32, rates: &Rates, constants: &Constants) -> Seconds {
    bytes / rates.memory + constants.kernel_gap_s * f64::from(kernels)
}

/// Seconds of AdamW's update of so many local parameters: one fused pass over all their states.
pub fn update_time(n_parameters: f64, states: StateBytes, rates: &Rates, constants: &Constants) -> Seconds {
    stream_time(update_traffic(n_parameters, states), 1, rates, constants)
}

#[cfg(test)]
mod tests {
    use ir::cluster::Precision;

    use super::*;
    use crate::constants::tests::of_examples;
    use crate::rates::tests::a100;

    #[test]
    fn a_stream_takes_its_bytes_at_the_reached_bandwidth_and_a_gap_per_kernel() {
        let constants = of_examples();
        let rates = Rates::new(&a100(), Precision::Bf16, &constants);
        let time = stream_time(Bytes(1.32535e9), 3, &rates, &constants);
        assert!((time.0 - 1.012e-3).abs() < 1e-9, "{time:?}");
    }
}
