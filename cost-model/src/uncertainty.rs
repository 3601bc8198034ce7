//! How far a predicted step may be off, and why: the scatter of measured runs, and what was never measured.
//!
//! ```text
//! least = t - sqrt((t - t_fast)^2 + (scatter t)^2)      most = t + sqrt((t_slow - t)^2 + (scatter t)^2)
//! ```
//! `t_fast` and `t_slow` are the same plan's times in worlds whose efficiencies are as far off as those of a family of
//! devices, or of a number format, that no published run has told anything of. Where runs have, both are `t`.

use std::fmt;

use ir::cluster::{Architecture, Cluster, Device, Precision};
use ir::units::Seconds;

use crate::constants::Constants;

/// Nine of ten runs of a source that had no part in the fit are as near: the mean over such sources of `docs/fit.md`,
/// 9.8 %.
const SCATTER: f64 = 0.1;

/// The same after a calibration by three runs of the source: 8.0 % in `docs/validation.md`, of sources that the fit
/// knew.
const SCATTER_CALIBRATED: f64 = 0.1;

/// Factor by which an efficiency is off that was taken from datasheets and benchmarks: runs on B200 are off by 20 to 30
/// % where no run on its family has a part in the fit (`docs/fit.md`).
const UNKNOWN: f64 = 1.3;

/// What a family that nothing is known of may reach in products; its constants are the most cautious.
const USUAL_EFFICIENCY: f64 = 0.65;

/// Nothing sustains more of its peak.
const MOST_EFFICIENCY: f64 = 0.9;

/// Runs of a cluster are as far from each other as those of any source: what nine of ten are off by, over what they are
/// off by on average.
const TAIL: f64 = 2.0;

/// What a prediction rests on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Basis {
    /// Runs on this very cluster, which its calibration leaves off by this part of their time on average.
    Calibrated(f64),
    /// Published runs on the same family of devices, in the same width of numbers.
    Runs,
    /// Published runs on the family, in another width.
    OtherFormat,
    /// Figures of the datasheet.
    Datasheet,
}

impl fmt::Display for Basis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Calibrated(_) => "after a calibration",
            Self::Runs => "as far as published runs scatter",
            Self::OtherFormat => "no measurement of this number format on this device family",
            Self::Datasheet => "no measurement of this device family",
        })
    }
}

impl Basis {
    /// What the prediction for a device rests on. The families and formats are those of `fixtures/published`.
    pub fn of(cluster: &Cluster, device: &Device, precision: Precision) -> Self {
        // Benchmarks of single operators say nothing of how far whole steps are off.
        if let Some(off) = cluster.calibration.as_ref().and_then(|calibration| calibration.runs_off) {
            return Self::Calibrated(off);
        }
        let eight = precision == Precision::Fp8;
        match device.architecture {
            Architecture::Volta | Architecture::Ampere | Architecture::Hopper | Architecture::Blackwell
                if precision == Precision::Fp32 =>
            {
                Self::OtherFormat
            }
            Architecture::Hopper | Architecture::Blackwell => Self::Runs,
            // Without units of eight bits, such a job runs in sixteen.
            Architecture::Volta | Architecture::Ampere => {
                if eight && device.peak_flops_per_s.contains_key(&Precision::Fp8) {
                    Self::OtherFormat
                } else {
                    Self::Runs
                }
            }
            Architecture::Ada
            | Architecture::Cdna2
            | Architecture::Cdna3
            | Architecture::Tpu
            | Architecture::Gaudi
            | Architecture::Other => Self::Datasheet,
        }
    }

    /// A world in which the device is as fast as it may be, and one in which it is as slow.
    pub fn worlds(self, constants: &Constants, device: &Device, precision: Precision) -> [Constants; 2] {
        match self {
            Self::Calibrated(_) | Self::Runs => [constants.clone(), constants.clone()],
            Self::OtherFormat | Self::Datasheet => {
                let usual = if self == Self::Datasheet { USUAL_EFFICIENCY } else { 0.0 };
                [UNKNOWN, 1.0 / UNKNOWN].map(|factor| {
                    let least = if factor > 1.0 { usual } else { 0.0 };
                    moved(constants, (device.architecture, precision), (factor, least))
                })
            }
        }
    }

    /// The interval around a time, from those in both worlds.
    pub fn interval(self, time: Seconds, fast: Seconds, slow: Seconds) -> [Seconds; 2] {
        let scatter = match self {
            Self::Calibrated(off) => SCATTER_CALIBRATED.max(TAIL * off),
            Self::Runs | Self::OtherFormat | Self::Datasheet => SCATTER,
        };
        let wide = |away: Seconds| Seconds(away.0.hypot(scatter * time.0));
        [(time - wide(time - fast)).max(Seconds::ZERO), time + wide(slow - time)]
    }
}

/// A world where products and attention reach `factor` of what they do, and products at least `least`.
fn moved(
    constants: &Constants,
    (architecture, precision): (Architecture, Precision),
    (factor, least): (f64, f64),
) -> Constants {
    let mut moved = constants.clone();
    for precision in [precision, Precision::Bf16, Precision::Fp16] {
        let own = constants.gemm_efficiency_fraction_of_peak.of(architecture, precision);
        let other = (own * factor).max(least).min(MOST_EFFICIENCY.max(own));
        moved.gemm_efficiency_fraction_of_peak.set(architecture, precision, other);
    }
    let own = constants.attention_efficiency_fraction_of_peak.of(architecture);
    let other = (own * factor).min(MOST_EFFICIENCY.max(own));
    moved.attention_efficiency_fraction_of_peak.set(architecture, other);
    moved
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rates::tests::a100;

    fn widths(architecture: Architecture, precision: Precision) -> (Basis, [f64; 2]) {
        let device = Device { architecture, ..a100() };
        let cluster = crate::group::tests::dgx_a100();
        let basis = Basis::of(&cluster, &device, precision);
        let constants = Constants::load();
        let rate = |world: &Constants| world.gemm_efficiency_fraction_of_peak.of(architecture, precision);
        // A step of products alone, of one second.
        let [fast, slow] = basis
            .worlds(&constants, &device, precision)
            .map(|world| Seconds(rate(&constants) / rate(&world)));
        (basis, basis.interval(Seconds(1.0), fast, slow).map(|time| (time.0 * 100.0).round() / 100.0))
    }

    #[test]
    fn runs_narrow_what_a_datasheet_leaves_open() {
        assert_eq!(widths(Architecture::Ampere, Precision::Bf16), (Basis::Runs, [0.9, 1.1]));
        assert_eq!(widths(Architecture::Tpu, Precision::Bf16), (Basis::Datasheet, [0.85, 1.32]));
        assert_eq!(widths(Architecture::Cdna2, Precision::Bf16), (Basis::Datasheet, [0.75, 1.32]));
        assert_eq!(widths(Architecture::Hopper, Precision::Fp32).0, Basis::OtherFormat);
    }

    #[test]
    fn runs_that_a_calibration_does_not_meet_leave_a_wide_interval() {
        let wide = |off: f64| Basis::Calibrated(off).interval(Seconds(1.0), Seconds(1.0), Seconds(1.0))[1].0;
        assert_eq!([wide(0.01), wide(0.3)], [1.1, 1.6]);
    }

    #[test]
    fn a_device_that_nothing_is_known_of_may_be_far_faster_than_its_cautious_constants() {
        let (basis, [least, most]) = widths(Architecture::Other, Precision::Bf16);
        assert_eq!(basis, Basis::Datasheet);
        assert!(least < 0.65 && most > 1.3, "{least} {most}");
    }
}
