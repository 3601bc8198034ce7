//! What of a communication shows when it runs beside computation, and what stragglers add.
//!
//! Constants are fitted to whole steps; sources in `data/constants.json`.

use ir::units::Seconds;

use crate::constants::Constants;

/// Wall time of two streams that share a device: `max(a, b) + slowdown * min(a, b)`.
///
/// 10 ms beside 4 ms with a slow-down of 0.25: 11 ms.
pub fn side_by_side(compute: Seconds, communication: Seconds, slowdown: f64) -> Seconds {
    compute.max(communication) + compute.min(communication) * slowdown
}

/// Wall time of a layer whose parameters are gathered one layer ahead (FSDP).
///
/// The first gather and the last scatter of a pass show in full; they are the caller's to add.
pub fn gathered_layer(compute: Seconds, communication: Seconds, constants: &Constants) -> Seconds {
    side_by_side(compute, communication, constants.gathered_overlap_slowdown_fraction)
}

/// What shows of a communication in equal buckets behind a computation, such as gradients behind the last backward or
/// parameters before the first forward.
///
/// The bucket at the end has nothing to hide behind, and the others only the computation that remains:
/// `max(communication / n, communication - computation (n - 1) / n)`, and the slow-down of what is hidden.
/// 8 ms in 4 buckets behind 20 ms: 2 ms; behind 4 ms: 5 ms.
pub fn exposed_behind(
    communication: Seconds,
    computation: Seconds,
    n_buckets: u32,
    constants: &Constants,
) -> Seconds {
    exposed_with(communication, computation, f64::from(n_buckets), constants.overlap_slowdown_fraction)
}

/// The same with a slow-down of what is hidden.
pub fn exposed_with(communication: Seconds, computation: Seconds, n_buckets: f64, slowdown: f64) -> Seconds {
    let n = n_buckets.max(1.0);
    let bucket = communication / n;
    let exposed = bucket.max(communication - computation * ((n - 1.0) / n));
    let hidden = (communication - exposed).max(Seconds::ZERO);
    exposed + hidden * slowdown
}

/// What shows of the gradient reduction behind the backward of the last micro-batch.
pub fn gradient_reduction_exposed(
    reduction: Seconds,
    last_backward: Seconds,
    n_buckets: u32,
    constants: &Constants,
) -> Seconds {
    exposed_behind(reduction, last_backward, n_buckets, constants)
}

/// What shows of gathering updated parameters before the forward of the next step's first micro-batch.
pub fn parameter_gather_exposed(
    gather: Seconds,
    first_forward: Seconds,
    n_buckets: u32,
    constants: &Constants,
) -> Seconds {
    exposed_behind(gather, first_forward, n_buckets, constants)
}

/// What shows of gathers and scatters around tensor parallel products when these run in chunks beside them.
///
/// A quarter of 4 ms is 1 ms; never less than what the products cannot hide.
pub fn tensor_gather_exposed(communication: Seconds, products: Seconds, constants: &Constants) -> Seconds {
    let residual = communication * constants.tensor_overlap_residual_fraction;
    residual.max(communication - products)
}

/// Factor on the time of an iteration over `n_nodes`: `1 + jitter * log2(nodes)`.
///
/// 1024 nodes: 1 + 0.0061 x 10 = 1.061.
pub fn jitter(n_nodes: u64, constants: &Constants) -> f64 {
    1.0 + constants.jitter_fraction_per_log2_nodes * (n_nodes.max(1) as f64).log2()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constants::tests::of_examples;

    #[test]
    fn two_streams_take_the_longer_and_a_share_of_the_shorter() {
        assert_eq!(side_by_side(Seconds(10.0), Seconds(4.0), 0.25), Seconds(11.0));
        assert_eq!(gathered_layer(Seconds(1.0), Seconds(2.0), &of_examples()), Seconds(2.29));
    }

    #[test]
    fn at_least_one_bucket_shows() {
        let constants = of_examples();
        let exposed =
            |computation| gradient_reduction_exposed(Seconds(8.0), Seconds(computation), 4, &constants);
        assert_eq!(exposed(20.0), Seconds(2.0));
        assert_eq!(exposed(4.0), Seconds(5.0));
        assert_eq!(exposed(0.0), Seconds(8.0));
        assert_eq!(parameter_gather_exposed(Seconds(8.0), Seconds(20.0), 1, &constants), Seconds(8.0));
    }

    #[test]
    fn chunked_gathers_leave_a_quarter_or_what_products_cannot_hide() {
        let constants = of_examples();
        let exposed = |products| tensor_gather_exposed(Seconds(4.0), Seconds(products), &constants);
        assert_eq!((exposed(10.0), exposed(1.0)), (Seconds(1.0), Seconds(3.0)));
    }

    #[test]
    fn stragglers_add_a_little_per_doubling_of_nodes() {
        let constants = of_examples();
        assert_eq!(jitter(1, &constants), 1.0);
        assert!((jitter(1024, &constants) - 1.061).abs() < 1e-12);
    }
}
