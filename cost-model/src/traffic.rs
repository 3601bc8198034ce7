//! Bytes that collectives send, counted by their ring definitions whatever algorithm is priced.
//!
//! The count is a property of the plan, so a run can be held to it to the byte.

use ir::cluster::Cluster;
use ir::units::Bytes;

use crate::collective::CollectiveKind;
use crate::group::Group;

/// Bytes that a rank of `n_members` sends.
///
/// All-gather, reduce-scatter and all-to-all send all parts but one, all-reduce twice that. A send-receive sends
/// everything; a broadcast around a ring does so on all ranks but the last, `(n - 1) / n` on average.
/// 1024 B over 4 ranks: all-gather 768 B, all-reduce 1536 B.
pub fn bytes_sent(kind: CollectiveKind, full: Bytes, n_members: u64) -> Bytes {
    if n_members <= 1 {
        return Bytes::ZERO;
    }
    let n = n_members as f64;
    let all_but_one = full * (n - 1.0) / n;
    match kind {
        CollectiveKind::AllReduce => all_but_one * 2.0,
        CollectiveKind::AllGather
        | CollectiveKind::ReduceScatter
        | CollectiveKind::AllToAll
        | CollectiveKind::Broadcast => all_but_one,
        CollectiveKind::SendRecv => full,
    }
}

/// Bytes that a rank sends on each tier of the cluster, averaged over the group; they add up to `bytes_sent`. Where
/// ranks share devices: that a device sends.
///
/// A ring crosses a tier once per part that the tier joins: 16 ranks on 2 nodes send 14/16 of their bytes inside and
/// 2/16 across. An all-to-all crosses it once per peer there: 7/15 inside and 8/15 across. A send-receive
/// takes the tier that joins the pair.
pub fn bytes_sent_per_tier(
    kind: CollectiveKind,
    full: Bytes,
    group: &Group,
    cluster: &Cluster,
) -> Vec<Bytes> {
    // Of ranks that share a device, the device sends what all of them do.
    let together = match kind {
        CollectiveKind::AllToAll => group.in_exchanges(),
        CollectiveKind::AllReduce
        | CollectiveKind::AllGather
        | CollectiveKind::ReduceScatter
        | CollectiveKind::Broadcast
        | CollectiveKind::SendRecv => group.in_rings(),
    };
    let total = bytes_sent(kind, full, group.n_members()) * together;
    let inside = group.members_per_domain();
    let n = group.n_members() as f64;
    (0..cluster.tiers.len().min(inside.len()))
        .map(|tier_idx| {
            let below = tier_idx.checked_sub(1).map_or(1, |inner| inside[inner]) as f64;
            let members = inside[tier_idx] as f64;
            if total == Bytes::ZERO {
                return Bytes::ZERO;
            }
            match kind {
                CollectiveKind::AllToAll => total * (members - below) / (n - 1.0),
                CollectiveKind::SendRecv if group.spanning_tier() == Some(tier_idx) => total,
                CollectiveKind::SendRecv => Bytes::ZERO,
                CollectiveKind::AllReduce
                | CollectiveKind::AllGather
                | CollectiveKind::ReduceScatter
                | CollectiveKind::Broadcast => total * (ring_links(n / below) - ring_links(n / members)) / n,
            }
        })
        .collect()
}

/// Links of a ring around `parts`; one part needs none.
fn ring_links(parts: f64) -> f64 {
    if parts > 1.0 { parts } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::tests::{dgx_a100, group};

    fn check(kind: CollectiveKind, full: f64, axes: &[(u64, u64)], expected: [f64; 2]) {
        let cluster = dgx_a100();
        let group = group(axes, &cluster);
        let sent = bytes_sent_per_tier(kind, Bytes(full), &group, &cluster);
        assert_eq!(sent.iter().map(|bytes| bytes.0).collect::<Vec<_>>(), expected);
        let total: Bytes = sent.into_iter().sum();
        assert_eq!(total, bytes_sent(kind, Bytes(full), group.n_members()));
    }

    #[test]
    fn inside_a_node_all_bytes_stay_on_its_tier() {
        check(CollectiveKind::AllGather, 1024.0, &[(4, 1)], [768.0, 0.0]);
        check(CollectiveKind::ReduceScatter, 1024.0, &[(4, 1)], [768.0, 0.0]);
        check(CollectiveKind::AllReduce, 1024.0, &[(4, 1)], [1536.0, 0.0]);
        check(CollectiveKind::AllToAll, 1024.0, &[(4, 1)], [768.0, 0.0]);
    }

    #[test]
    fn a_ring_over_two_nodes_crosses_twice() {
        check(CollectiveKind::AllGather, 4096.0, &[(16, 1)], [3360.0, 480.0]);
        check(CollectiveKind::AllGather, 4096.0, &[(16, 8)], [0.0, 3840.0]);
    }

    #[test]
    fn an_all_to_all_crosses_once_per_peer() {
        check(CollectiveKind::AllToAll, 4096.0, &[(16, 1)], [1792.0, 2048.0]);
    }

    #[test]
    fn a_send_takes_the_tier_that_joins_the_pair() {
        check(CollectiveKind::SendRecv, 64.0, &[(2, 1)], [64.0, 0.0]);
        check(CollectiveKind::SendRecv, 64.0, &[(2, 8)], [0.0, 64.0]);
    }

    #[test]
    fn one_member_sends_nothing() {
        check(CollectiveKind::AllReduce, 1024.0, &[], [0.0, 0.0]);
    }
}
