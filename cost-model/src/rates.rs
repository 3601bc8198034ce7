//! What one device sustains in one precision: peak figures times the constants' efficiencies.

use ir::cluster::{Device, Precision};
use ir::units::{Bytes, BytesPerSecond, FlopsPerSecond};

use crate::constants::Constants;
use crate::power::clock_fraction;

/// Sustained rates of a device, made once and used for many prices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Well-shaped matrix products, all compute units together.
    pub gemm: FlopsPerSecond,
    /// Attention core on long sequences; 16-bit where products are 8-bit.
    pub attention: FlopsPerSecond,
    /// Device memory.
    pub memory: BytesPerSecond,
    /// Units over which tiles are spread, at least 1.
    pub compute_units: f64,
    /// One element of an operand of a matrix product.
    pub operand: Bytes,
    /// One element of any other tensor.
    pub element: Bytes,
}

impl Rates {
    /// Rates of `device` in `precision`.
    ///
    /// An A100 in bf16: 312 TFLOP/s x 0.793 = 247 TFLOP/s for matrix products.
    pub fn new(device: &Device, precision: Precision, constants: &Constants) -> Self {
        let (peak, runs_as) = peak(device, precision, constants);
        let attention_precision = attention_precision(precision);
        let (attention_peak, _) = self::peak(device, attention_precision, constants);
        let gemm = constants.gemm_efficiency(device.architecture, runs_as);
        Self {
            gemm: peak * gemm * clock_fraction(device, constants),
            attention: attention_peak * constants.attention_efficiency(device.architecture),
            memory: device.memory_bandwidth_bytes_per_s * constants.memory_efficiency_fraction,
            compute_units: f64::from(device.compute_units.max(1)),
            operand: Bytes(if runs_as == Precision::Fp8 { 1.0 } else { element_bytes(precision).0 }),
            element: element_bytes(precision),
        }
    }
}

/// Bytes of one element of an activation: 8-bit products keep 16-bit tensors around them.
pub fn element_bytes(precision: Precision) -> Bytes {
    match precision {
        Precision::Fp32 => Bytes(4.0),
        Precision::Fp16 | Precision::Bf16 | Precision::Fp8 => Bytes(2.0),
    }
}

/// The precision of the attention core in a job of `precision`.
pub(crate) fn attention_precision(precision: Precision) -> Precision {
    match precision {
        Precision::Fp8 => Precision::Bf16,
        Precision::Fp32 => Precision::Fp32,
        Precision::Fp16 => Precision::Fp16,
        Precision::Bf16 => Precision::Bf16,
    }
}

/// Peak rate of a precision, and the precision in which the device in fact computes.
///
/// What a device does not list runs as frameworks run it: fp8 in 16 bits, fp16 and bf16 for each other (a job on V100
/// takes fp16), fp32 at the stated fraction of the 16-bit rate. A device that lists nothing has rate zero, so that its
/// times are infinite.
pub fn peak(device: &Device, precision: Precision, constants: &Constants) -> (FlopsPerSecond, Precision) {
    let listed = |precision| device.peak_flops_per_s.get(&precision).map(|rate| (*rate, precision));
    let half = || listed(Precision::Bf16).or_else(|| listed(Precision::Fp16));
    let found = match precision {
        Precision::Bf16 => half(),
        Precision::Fp16 => listed(Precision::Fp16).or_else(half),
        Precision::Fp8 => listed(Precision::Fp8).or_else(half),
        Precision::Fp32 => listed(Precision::Fp32).or_else(|| {
            half().map(|(rate, _)| (rate * constants.fp32_over_half_rate_fraction, Precision::Fp32))
        }),
    };
    found.or_else(|| listed(Precision::Fp32)).unwrap_or((FlopsPerSecond::ZERO, precision))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use ir::cluster::Architecture;

    use super::*;

    pub(crate) fn a100() -> Device {
        Device {
            name: "a100-sxm-80".into(),
            architecture: Architecture::Ampere,
            peak_flops_per_s: BTreeMap::from([
                (Precision::Bf16, FlopsPerSecond(312e12)),
                (Precision::Fp16, FlopsPerSecond(312e12)),
            ]),
            memory_bytes: Bytes(80e9),
            memory_bandwidth_bytes_per_s: BytesPerSecond(2039e9),
            compute_units: 108,
            host_link_bytes_per_s: BytesPerSecond(31e9),
            watts: Some(400.0),
        }
    }

    fn check_peak(precision: Precision, tera: f64, runs_as: Precision) {
        let (rate, precision) = peak(&a100(), precision, &Constants::load());
        assert_eq!((rate.0 / 1e12, precision), (tera, runs_as));
    }

    #[test]
    fn a_precision_that_is_not_listed_runs_in_the_nearest_one() {
        check_peak(Precision::Bf16, 312.0, Precision::Bf16);
        check_peak(Precision::Fp8, 312.0, Precision::Bf16);
        check_peak(Precision::Fp32, 19.5, Precision::Fp32);
    }

    #[test]
    fn a_device_without_figures_computes_nothing() {
        let device = Device { peak_flops_per_s: BTreeMap::new(), ..a100() };
        assert_eq!(Rates::new(&device, Precision::Bf16, &Constants::load()).gemm, FlopsPerSecond::ZERO);
    }
}
