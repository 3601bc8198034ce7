//! How long the states take that move from rank to rank when training goes over from one plan to another.
//!
//! All ranks send and receive at once, a device at its full rate into each tier and in both directions, what leaves a
//! domain at the rate that the tier above carries:
//!
//! ```text
//! t = max over ranks r and tiers k of  max(sent(r, k), received(r, k)) * oversubscription(k) / bandwidth(k)  +  latency(k)
//! ```
//! It is a lower bound: messages that meet on a link wait for each other.

use std::collections::BTreeMap;

use ir::cluster::{Cluster, Tier};
use ir::units::{Bytes, Seconds};

use crate::reshard::ReshardMap;

/// What moves, and how long it takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Moving {
    /// Bytes that move over each tier, innermost first.
    pub per_tier: Vec<u64>,
    /// Until the busiest rank is done.
    pub time: Seconds,
}

/// Time of a map over the links of a cluster that has all its ranks.
///
/// A rank that takes 8 GB over links of 50 GB/s from one that has nothing else to send: 0.16 s.
pub fn moving(map: &ReshardMap, cluster: &Cluster) -> Moving {
    let mut per_tier = vec![0; cluster.tiers.len()];
    let mut loads: BTreeMap<(u64, usize), (u64, u64)> = BTreeMap::new();
    for (&(from, to), &bytes) in map.pairs.iter().filter(|((from, to), _)| from != to) {
        let tier = cluster.tier_between(from, to);
        if let Some(all) = per_tier.get_mut(tier) {
            *all += bytes;
        }
        loads.entry((from, tier)).or_default().0 += bytes;
        loads.entry((to, tier)).or_default().1 += bytes;
    }
    let time = |((_, tier), (sent, received)): (&(u64, usize), &(u64, u64))| {
        let tier: &Tier = cluster.tiers.get(*tier)?;
        let crossing = Bytes((*sent).max(*received) as f64 * tier.oversubscription);
        Some(crossing / tier.bandwidth_bytes_per_s + tier.latency_s)
    };
    let longest = loads.iter().filter_map(time).max_by(|a, b| a.0.total_cmp(&b.0));
    Moving { per_tier, time: longest.unwrap_or(Seconds(0.0)) }
}

#[cfg(test)]
mod tests {
    use ir::units::BytesPerSecond;

    use super::*;

    #[test]
    fn the_busiest_rank_sets_the_time() {
        let text = frontends::shipped_cluster("dgx-h100").unwrap().text;
        let mut cluster = frontends::read_cluster("dgx-h100", text).unwrap();
        let pairs = [((0, 0), 900), ((0, 1), 8), ((0, 2), 8), ((3, 1), 4)].into_iter().collect();
        let map = ReshardMap { pairs, tensors: BTreeMap::new(), missing: 0 };
        let tier = &mut cluster.tiers[0];
        (tier.bandwidth_bytes_per_s, tier.latency_s, tier.oversubscription) =
            (BytesPerSecond(2.0), Seconds(1.0), 1.0);
        // Rank 0 sends 16 B, rank 1 receives 12 B; what stays takes nothing.
        let found = moving(&map, &cluster);
        assert_eq!((found.time, found.per_tier[0]), (Seconds(9.0), 20));
        let none = ReshardMap { pairs: [((2, 2), 5)].into_iter().collect(), ..map };
        assert_eq!(moving(&none, &cluster).time, Seconds(0.0));
    }
}
