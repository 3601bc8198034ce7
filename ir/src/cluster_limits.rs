//! The ranges in which the figures of a cluster make sense, in the units of the [`crate::cluster`] types.
//!
//! Wide enough for hardware of the next decade, and narrow enough to catch a wrong unit.

use crate::units::GIB;

/// A lower and an upper end, both allowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range(pub f64, pub f64);

impl Range {
    /// Whether a value is inside; nothing that is not a number is.
    pub fn holds(self, value: f64) -> bool {
        value >= self.0 && value <= self.1
    }

    /// The same range in units of so much.
    pub fn per(self, unit: f64) -> Self {
        Self(self.0 / unit, self.1 / unit)
    }
}

/// Peak rate in FLOP/s.
pub const FLOPS_PER_S: Range = Range(1e10, 1e18);
/// Memory of a device in bytes.
pub const MEMORY_BYTES: Range = Range(0.1 * GIB, 1e5 * GIB);
/// Memory of a host in bytes.
pub const HOST_MEMORY_BYTES: Range = Range(0.1 * GIB, 1e7 * GIB);
/// Drives of a host in bytes.
pub const NVME_BYTES: Range = Range(1e9, 1e18);
/// Bandwidth in bytes/s.
pub const BYTES_PER_S: Range = Range(1e7, 1e15);
/// Latency in seconds.
pub const LATENCY_S: Range = Range(1e-9, 1.0);
/// Oversubscription; 1 is non-blocking.
pub const OVERSUBSCRIPTION: Range = Range(1.0, 1000.0);
/// Compute units of a device.
pub const COMPUTE_UNITS: Range = Range(1.0, 1e5);
/// Power of a device in watts.
pub const WATTS: Range = Range(0.1, 1e5);
/// Price of a device and hour, in any currency.
pub const PRICE_PER_HOUR: Range = Range(0.0, 1e6);
/// Failures of a device per hour.
pub const FAILURES_PER_HOUR: Range = Range(0.0, 1.0);
/// Largest cluster: a hundred times what has been built.
pub const MAX_DEVICES: u64 = 10_000_000;
/// More tiers than any network has.
pub const MAX_TIERS: usize = 8;
/// More groups than anyone mixes; the search looks at every one.
pub const MAX_GROUPS: usize = 16;
