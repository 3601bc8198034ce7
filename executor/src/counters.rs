//! Bytes that one rank sent, counted message by message as they left.
//!
//! Knows nothing of formulas: what a ring *should* send is the cost model's business, and the two are compared.

use std::collections::BTreeMap;
use std::sync::Arc;

use ir::collective::Algorithm;

use crate::instruction::CollectiveKind;

/// Where a byte belongs. The tier is whatever the function given to `run_ranks` says of the two ranks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Traffic {
    /// Kind of communication.
    pub kind: CollectiveKind,
    /// How it ran.
    pub algorithm: Algorithm,
    /// Label of the tag.
    pub label: Arc<str>,
    /// Index of the link tier between sender and receiver.
    pub tier: usize,
}

/// Bytes sent by one rank. Traffic of zero bytes has no entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    sent: BTreeMap<Traffic, u64>,
}

impl Counters {
    /// Counts one message.
    pub(crate) fn add(&mut self, traffic: Traffic, bytes: u64) {
        if bytes > 0 {
            *self.sent.entry(traffic).or_insert(0) += bytes;
        }
    }

    /// Everything, at the finest grain.
    pub fn sent(&self) -> &BTreeMap<Traffic, u64> {
        &self.sent
    }

    /// Bytes per kind and link tier.
    pub fn by_kind_and_tier(&self) -> BTreeMap<(CollectiveKind, usize), u64> {
        self.sum_by(|traffic| (traffic.kind, traffic.tier))
    }

    /// Bytes per collective of the program: kind and label, over all tiers and repetitions.
    pub fn by_label(&self) -> BTreeMap<(CollectiveKind, Arc<str>), u64> {
        self.sum_by(|traffic| (traffic.kind, Arc::clone(&traffic.label)))
    }

    /// Bytes per kind.
    pub fn by_kind(&self) -> BTreeMap<CollectiveKind, u64> {
        self.sum_by(|traffic| traffic.kind)
    }

    /// All bytes.
    pub fn total(&self) -> u64 {
        self.sent.values().sum()
    }

    /// Adds the counts of another rank, for totals over ranks.
    pub fn merge(&mut self, other: &Counters) {
        for (traffic, bytes) in &other.sent {
            self.add(traffic.clone(), *bytes);
        }
    }

    fn sum_by<K: Ord>(&self, key: impl Fn(&Traffic) -> K) -> BTreeMap<K, u64> {
        let mut sums = BTreeMap::new();
        for (traffic, bytes) in &self.sent {
            *sums.entry(key(traffic)).or_insert(0) += bytes;
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_add_up_along_every_grain() {
        let traffic = |label: &str, tier| {
            let (kind, algorithm) = (CollectiveKind::AllGather, Algorithm::Ring);
            Traffic { kind, algorithm, label: label.into(), tier }
        };
        let mut counters = Counters::default();
        counters.add(traffic("a", 0), 1);
        counters.add(traffic("a", 1), 10);
        counters.add(traffic("b", 1), 100);
        counters.add(traffic("c", 1), 0);
        let mut twice = counters.clone();
        twice.merge(&counters);
        let kind = CollectiveKind::AllGather;
        assert_eq!(counters.by_kind_and_tier(), BTreeMap::from([((kind, 0), 1), ((kind, 1), 110)]));
        assert_eq!(
            counters.by_label(),
            BTreeMap::from([((kind, "a".into()), 11), ((kind, "b".into()), 100)])
        );
        assert_eq!(counters.by_kind(), BTreeMap::from([(kind, 111)]));
        assert_eq!(twice.total(), 222);
    }
}
