//! What is left of the clock where a device may draw less than its family does at the rates that its data sheet lists.
//!
//! ```text
//! P = idle + dynamic,  dynamic ~ V^2 f,  V ~ f   =>   f / f0 = ((P / P0 - idle) / (1 - idle))^(1/3)
//! ```
//! (Mudge 2001, Power: a first-class architectural design constraint, IEEE Computer 34(4).) `P0` is what devices of the
//! family draw per listed rate where efficiencies were measured, so a module with a lower limit and the same rate on
//! its data sheet (PCI Express cards, a cap set by the operator) computes more slowly than its data sheet says. None
//! computes faster.

use ir::cluster::{Device, Precision};

use crate::constants::Constants;
use crate::rates::peak;

/// Clock under matrix products over that of the family's devices at their full power, at most 1; 1 where no limit is
/// known.
///
/// An H100 of 700 W held to 500 W: `((5 / 7 - 0.15) / 0.85)^(1/3)` = 0.872.
pub(crate) fn clock_fraction(device: &Device, constants: &Constants) -> f64 {
    let (rate, _) = peak(device, Precision::Bf16, constants);
    let full =
        constants.full_power_watts_per_tflops.of(device.architecture).map(|watts| watts * rate.0 / 1e12);
    let (Some(watts), Some(full)) = (device.watts, full) else { return 1.0 };
    if watts >= full {
        return 1.0;
    }
    let idle = constants.idle_power_fraction;
    ((watts / full - idle) / (1.0 - idle)).max(LEAST_DYNAMIC_FRACTION).cbrt()
}

/// Limits near idle power are those of no device that computes: a wrong figure must not make times infinite.
const LEAST_DYNAMIC_FRACTION: f64 = 0.01;

#[cfg(test)]
mod tests {
    use ir::cluster::Architecture;
    use ir::units::FlopsPerSecond;

    use super::*;
    use crate::rates::tests::a100;

    fn with(watts: Option<f64>) -> f64 {
        clock_fraction(
            &Device { watts, ..a100() },
            &Constants { idle_power_fraction: 0.15, ..Constants::load() },
        )
    }

    #[test]
    fn a_card_with_three_quarters_of_the_power_keeps_nine_tenths_of_the_clock() {
        assert!((with(Some(300.0)) - (0.6_f64 / 0.85).cbrt()).abs() < 1e-4);
        assert_eq!((with(Some(400.0)), with(Some(500.0)), with(None)), (1.0, 1.0, 1.0));
        assert!(with(Some(1.0)) > 0.2);
    }

    #[test]
    fn a_family_without_a_figure_is_not_slowed_down() {
        let device = Device { watts: Some(10.0), architecture: Architecture::Tpu, ..a100() };
        assert_eq!(clock_fraction(&device, &Constants::load()), 1.0);
    }

    #[test]
    fn half_a_device_with_half_the_power_has_the_same_clock() {
        let whole = Device { watts: Some(300.0), ..a100() };
        let halves = |rate: &FlopsPerSecond| FlopsPerSecond(rate.0 / 2.0);
        let peak_flops_per_s = whole.peak_flops_per_s.iter().map(|(at, rate)| (*at, halves(rate))).collect();
        let half = Device { watts: Some(150.0), peak_flops_per_s, ..a100() };
        let constants = Constants::load();
        assert_eq!(clock_fraction(&half, &constants), clock_fraction(&whole, &constants));
    }
}
