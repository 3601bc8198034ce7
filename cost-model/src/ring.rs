//! Time of attention on a ring: blocks of keys travel while the device attends the block it has (Liu et al. 2023, arXiv
//! 2310.01889, section 3).
//!
//! ```text
//! compute   = attention over all keys + (n - 1) (launches of a block + merging it)
//! hop       = sending a block: keys and values forward; these and their gradients backward
//! exposed   = (n - 1) (step beside hop - step),  step = compute / n         -> overlap::side_by_side()
//! ```
//! Of the `n` steps the last has no hop beside it. What the mask leaves to the busiest device is in the attention's
//! work.

use ir::cluster::Cluster;
use ir::signature::{FactorId, Signature};
use ir::units::{Bytes, Seconds};
use ir::work::{Pass, Work};

use crate::collective::{CollectiveKind, price};
use crate::constants::Constants;
use crate::group::Group;
use crate::overlap::side_by_side;

/// Local elements of attention on a ring.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RingSizes {
    /// Of the queries.
    pub queries: f64,
    /// Of a block of keys and a block of values together.
    pub block: f64,
    /// Of the result.
    pub result: f64,
    /// Bytes of one.
    pub element_bytes: f64,
}

/// Time of one pass.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RingTime {
    /// What meeting the keys block by block adds to attention over all of them.
    pub merging: Seconds,
    /// Hops.
    pub n_hops: u32,
    /// All hops.
    pub communication: Seconds,
    /// The part of it that adds to the step.
    pub exposed: Seconds,
    /// Bytes of one hop.
    pub hop: Bytes,
}

impl RingSizes {
    /// Sizes of an operator on a ring of `n`, from local lengths of its loops of which that of the keys is whole.
    pub fn new(sig: &Signature, local: &[f64], n: u64, element_bytes: f64) -> Self {
        let elements = |dims: &[FactorId]| dims.iter().map(|f| local[f.0 as usize]).product::<f64>();
        let walks_keys =
            |dims: &&Vec<FactorId>| dims.len() > 1 && sig.ring.is_some_and(|ring| dims.contains(&ring.keys));
        let blocks = sig.operands.iter().filter(walks_keys);
        Self {
            queries: sig.operands.first().map_or(0.0, |dims| elements(dims)),
            block: blocks.map(|dims| elements(dims)).sum::<f64>() / n.max(1) as f64,
            result: sig.results.first().map_or(0.0, |dims| elements(dims)),
            element_bytes,
        }
    }

    /// Bytes that a hop sends.
    pub fn hop(self, pass: Pass) -> Bytes {
        let passengers = match pass {
            Pass::Forward => 1.0,
            // The gradient of a block travels with it.
            Pass::Backward => 2.0,
        };
        Bytes(passengers * self.block * self.element_bytes)
    }

    /// What a block adds to: the result forward, gradients of queries and block backward; a term is read beside an fp32
    /// sum that is read and written, ten bytes for two-byte elements.
    pub fn merge(self, pass: Pass) -> Work {
        let elements = match pass {
            Pass::Forward => self.result,
            Pass::Backward => self.queries + self.block,
        };
        Work::Stream { bytes: Bytes(5.0 * elements * self.element_bytes), kernels: 3 }
    }

    /// Buffers of blocks on their way: one that is attended, one that arrives.
    pub fn buffers(self, pass: Pass, n: u64) -> Bytes {
        self.hop(pass) * n.saturating_sub(1).min(2) as f64
    }
}

/// Time of a pass over a ring of `group`, where attention over all keys takes `attention` and merging one block
/// `merge`.
///
/// Four devices, 8 ms of attention, hops of 1 ms, free merging and a slow-down of nothing: 2 ms a step hide each hop.
pub fn ring_time(
    sizes: RingSizes,
    pass: Pass,
    (attention, merge): (Seconds, Seconds),
    group: &Group,
    (cluster, constants): (&Cluster, &Constants),
) -> RingTime {
    let n = group.n_members();
    let n_hops = n.saturating_sub(1) as f64;
    let hop = sizes.hop(pass);
    let merging = merge * n_hops;
    let step = (attention + merging) / n.max(1) as f64;
    let one = price(CollectiveKind::SendRecv, hop, group, cluster, constants);
    let beside = side_by_side(step, one, constants.gathered_overlap_slowdown_fraction);
    RingTime {
        merging,
        n_hops: n_hops as u32,
        communication: one * n_hops,
        exposed: (beside - step) * n_hops,
        hop,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::tests::{dgx_a100, group};

    fn time(n: u64, attention: f64, block: f64) -> RingTime {
        let constants = Constants { gathered_overlap_slowdown_fraction: 0.0, ..Constants::load() };
        let sizes = RingSizes { queries: 0.0, block, result: 0.0, element_bytes: 2.0 };
        let (cluster, compute) = (dgx_a100(), (Seconds(attention), Seconds(0.0)));
        ring_time(sizes, Pass::Forward, compute, &group(&[(n, 1)], &cluster), (&cluster, &constants))
    }

    /// 256 MiB over NVLink of 300 GB/s take more than 0.9 ms: long steps hide them, short ones show the rest.
    #[test]
    fn a_step_takes_the_longer_of_attention_and_hop() {
        let (long, short) = (time(4, 40e-3, 1.28e8), time(4, 0.4e-3, 1.28e8));
        assert_eq!((long.exposed, long.n_hops), (Seconds(0.0), 3));
        assert_eq!(long.communication, short.communication);
        let rest = short.communication.0 - 3.0 * 0.1e-3;
        assert!((short.exposed.0 - rest).abs() < 1e-9 && rest > 2.4e-3, "{short:?}");
    }

    #[test]
    fn gradients_travel_with_their_block() {
        let sizes = RingSizes { queries: 8.0, block: 6.0, result: 4.0, element_bytes: 2.0 };
        assert_eq!((sizes.hop(Pass::Forward), sizes.hop(Pass::Backward)), (Bytes(12.0), Bytes(24.0)));
        assert_eq!(
            (sizes.buffers(Pass::Forward, 2), sizes.buffers(Pass::Forward, 8)),
            (Bytes(12.0), Bytes(24.0))
        );
    }
}
