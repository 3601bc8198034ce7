//! Energy of devices: between what they draw waiting and their limit, by how long they compute.
//!
//! ```text
//! E = sum over devices of limit (idle T + (1 - idle) busy)      T the step, busy what a device computes of it
//! ```
//! Devices alone: neither hosts, switches nor cooling. Source of the idle share: `data/constants.json`.

use ir::units::Seconds;

use crate::constants::Constants;

/// Joules that devices of `watts` together draw in `time`, computing `busy` of it on average.
///
/// 8 devices of 700 W for a second, computing 0.9 s of it: 5600 x (0.15 + 0.85 x 0.9) = 5.12 kJ.
pub fn joules(watts: f64, time: Seconds, busy: Seconds, constants: &Constants) -> f64 {
    let idle = constants.idle_power_fraction;
    watts * (idle * time.0 + (1.0 - idle) * busy.min(time).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_draws_between_its_idle_power_and_its_limit() {
        let constants = Constants { idle_power_fraction: 0.15, ..Constants::load() };
        let of = |busy| joules(5600.0, Seconds(1.0), Seconds(busy), &constants);
        assert!((of(0.9) - 5124.0).abs() < 1e-9);
        assert_eq!((of(0.0), of(1.0), of(2.0)), (840.0, 5600.0, 5600.0));
    }
}
