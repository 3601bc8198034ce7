//! Time of collectives: every algorithm that applies is priced, the fastest is chosen and named.
//!
//! `S` is the full tensor (all-gather: gathered; reduce-scatter: input; all-to-all: what a rank holds), `n` the
//! members, `L` the fixed time of a phase, `a` the latency of a step on a tier, `B` the rate of one member:
//! ```text
//! ring       all-gather, reduce-scatter   L + sum of a over n - 1 steps + S (n - 1) / (n B)      -> ring()
//!            all-reduce                   twice that
//!            broadcast                    L + sum of (a + slots / B of the tier) over n - 1 steps + S / B
//! recursive  all-gather, reduce-scatter   L + log2 n a + S (n - 1) / (n B), one member per node  -> recursive()
//! tree       all-reduce                   2 L + 2 log2 n a + 2 S / (0.9 B)                       -> tree()
//!            broadcast                    L + log2 n a + S / (0.9 B)
//! two-level  tier by tier, each member bringing the share that inner tiers leave it              -> two_level()
//! in-switch  all-reduce                   L + 2 a + S / B up and down at once                    -> in_switch()
//! direct     all-to-all                   L + sum over peers of a + per tier share / B           -> direct()
//! relayed    tokens to experts            L + sum of a + slowest of per tier share / B           -> relayed(), dispatch.rs
//!            send-receive                 L + a + S / B of the pair
//! ```
//! `L` = launch + sync log2(nodes). `B = min over tiers of (members below the tier x rate of one device)`: every member
//! of a node opens its own rail, so `B = min(e_n B_node, g e_i B_network / oversubscription)`.
//!
//! Sources: Thakur et al. 2005 (ring, recursive, tree); Sanders et al. 2009 (double tree); NVIDIA/nccl-tests
//! doc/PERFORMANCE.md; NVIDIA/nccl src/graph/tuning.cc (0.9 for trees, hop latencies).

use ir::cluster::{Cluster, Wiring};
pub use ir::collective::{Algorithm, CollectiveKind};
use ir::units::{Bytes, BytesPerSecond, Seconds};

use crate::constants::Constants;
use crate::group::Group;
use crate::links::{Level, Reach, levels};

/// The fastest algorithm and its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Which one.
    pub algorithm: Algorithm,
    /// What it takes.
    pub time: Seconds,
}

/// Time of a collective by the fastest algorithm; zero for one member or no bytes.
///
/// All-gather of 800 MB over 8 A100 (300 GB/s x 0.771, 7 steps of 2 us, launch 26 us): 700 MB / 231.3 GB/s + 40 us
/// = 3.07 ms.
pub fn price(
    kind: CollectiveKind,
    full: Bytes,
    group: &Group,
    cluster: &Cluster,
    constants: &Constants,
) -> Seconds {
    choose(kind, full, group, cluster, constants).time
}

/// The fastest algorithm for a collective: the first of the list below among equals.
pub fn choose(
    kind: CollectiveKind,
    full: Bytes,
    group: &Group,
    cluster: &Cluster,
    constants: &Constants,
) -> Choice {
    let candidates = candidates(kind);
    if group.n_members() <= 1 || full.0 <= 0.0 {
        return Choice { algorithm: candidates[0], time: Seconds::ZERO };
    }
    let levels = levels(group, cluster, constants);
    let route = Route { levels, n: group.n_members() as f64, constants };
    let mut best = Choice { algorithm: candidates[0], time: Seconds(f64::INFINITY) };
    for &algorithm in candidates.iter().filter(|algorithm| suits(**algorithm, group)) {
        if let Some(time) = route.time(kind, algorithm, full)
            && time < best.time
        {
            best = Choice { algorithm, time };
        }
    }
    best
}

/// Time by one algorithm, or nothing where it does not apply.
pub fn price_by(
    algorithm: Algorithm,
    (kind, full): (CollectiveKind, Bytes),
    group: &Group,
    cluster: &Cluster,
    constants: &Constants,
) -> Option<Seconds> {
    if !candidates(kind).contains(&algorithm) || !suits(algorithm, group) {
        return None;
    }
    let levels = levels(group, cluster, constants);
    Route { levels, n: group.n_members() as f64, constants }.time(kind, algorithm, full)
}

/// Time of `count` broadcasts of `each` by members in turn, as NCCL does them: round rings, whatever the size
/// (NVIDIA/nccl src/device/broadcast.h has no other algorithm).
pub fn broadcasts(
    count: u32,
    each: Bytes,
    group: &Group,
    cluster: &Cluster,
    constants: &Constants,
) -> Seconds {
    if group.n_members() <= 1 || count == 0 || each.0 <= 0.0 {
        return Seconds::ZERO;
    }
    let levels = levels(group, cluster, constants);
    Route { levels, n: group.n_members() as f64, constants }.broadcasts(f64::from(count), each)
}

/// Time of an exchange by way of one member per node, of which a share by the members below is sent at each level: what
/// arrives is forwarded while more does, so that the slowest level sets the time. Nothing for ranks that share devices.
///
/// 64 MB a rank over 16 of 2 nodes, of which 0.25 crosses and 0.5 is forwarded, at 347 and 42 GB/s: 8 MB / 42 GB/s =
/// 190 us.
pub(crate) fn relayed(
    full: Bytes,
    share: impl Fn(f64) -> f64,
    group: &Group,
    (cluster, constants): (&Cluster, &Constants),
) -> Option<Choice> {
    if group.n_members() <= 1 || full.0 <= 0.0 || group.shares_devices() {
        return None;
    }
    let levels = levels(group, cluster, constants);
    let route = Route { levels, n: group.n_members() as f64, constants };
    let sent =
        |level: Level| full * (share(level.below) * (level.ways - 1.0) / level.ways) / level.exchange_rate;
    let slowest = route.levels().map(sent).fold(Seconds::ZERO, Seconds::max);
    let latencies: Seconds = route.levels().map(|level| level.latency).sum();
    let algorithm = if route.levels().count() > 1 { Algorithm::TwoLevel } else { Algorithm::Direct };
    Some(Choice { algorithm, time: route.fixed() + latencies + slowest })
}

/// The algorithms of a collective; the first always applies.
fn candidates(kind: CollectiveKind) -> &'static [Algorithm] {
    use Algorithm::{Direct, InSwitch, Recursive, Ring, Tree, TwoLevel};
    match kind {
        CollectiveKind::AllReduce => &[Ring, Tree, TwoLevel, InSwitch],
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter => &[Ring, Recursive, TwoLevel],
        CollectiveKind::AllToAll => &[Direct, TwoLevel],
        CollectiveKind::SendRecv => &[Direct],
        CollectiveKind::Broadcast => &[Ring, Tree],
    }
}

/// Whether an algorithm is one for ranks that share devices: what rings and direct sends bring through the link of a
/// device is known ([`Group`]); other algorithms are planned for members with links of their own.
fn suits(algorithm: Algorithm, group: &Group) -> bool {
    !group.shares_devices() || matches!(algorithm, Algorithm::Ring | Algorithm::Direct)
}

/// The levels a group crosses, with what all algorithms share.
struct Route<'a, L> {
    levels: L,
    n: f64,
    constants: &'a Constants,
}

impl<L: Iterator<Item = Level> + Clone> Route<'_, L> {
    fn time(&self, kind: CollectiveKind, algorithm: Algorithm, full: Bytes) -> Option<Seconds> {
        match algorithm {
            Algorithm::Ring => Some(self.ring(kind, full)),
            Algorithm::Tree => self.tree(kind, full),
            Algorithm::Recursive => self.recursive(full),
            Algorithm::TwoLevel => self.two_level(kind, full),
            Algorithm::InSwitch => self.in_switch(full),
            Algorithm::Direct => Some(self.direct(kind, full)),
        }
    }

    fn ring(&self, kind: CollectiveKind, full: Bytes) -> Seconds {
        let fixed = self.fixed() + self.steps();
        match kind {
            CollectiveKind::AllReduce => (fixed + self.others(full) / self.rate()) * 2.0,
            CollectiveKind::Broadcast => fixed + self.relayed(full) + full / self.rate(),
            CollectiveKind::AllGather
            | CollectiveKind::ReduceScatter
            | CollectiveKind::AllToAll
            | CollectiveKind::SendRecv => fixed + self.others(full) / self.rate(),
        }
    }

    /// Latencies once around a ring.
    fn steps(&self) -> Seconds {
        self.levels().map(|level| level.latency * (level.ring_steps * self.n / level.inside)).sum()
    }

    /// What the last member of a ring waits beside latencies: every member hands a slot on when it has all of it. Each
    /// member of a node has a channel, so that the slots of a node's members pass a link together.
    ///
    /// 512 KiB over 16 nodes of one member at 25 GB/s: 15 x 21 us = 315 us.
    fn relayed(&self, full: Bytes) -> Seconds {
        let members =
            self.levels().find(|level| level.reach == Reach::Network).map_or(self.n, |net| net.below);
        let slots = full.min(self.constants.collective_slot_bytes * members);
        let hops =
            |level: Level| slots / (level.rate * level.below) * (level.ring_steps * self.n / level.inside);
        self.levels().map(hops).sum()
    }

    /// Broadcasts one after another, from members in no order of the ring: the next one begins when the last has passed
    /// it, so after half of the ring.
    fn broadcasts(&self, count: f64, each: Bytes) -> Seconds {
        let one = self.ring(CollectiveKind::Broadcast, each);
        let round = self.steps() + self.relayed(each);
        one * count - round * ((count - 1.0) / 2.0)
    }

    /// Needs any-to-any links: not on a torus.
    fn tree(&self, kind: CollectiveKind, full: Bytes) -> Option<Seconds> {
        let phase = self.fixed() + self.log_steps();
        let transfer = full / (self.rate() * self.constants.tree_bandwidth_fraction);
        let passes = if kind == CollectiveKind::AllReduce { 2.0 } else { 1.0 };
        self.any_to_any().then_some((phase + transfer) * passes)
    }

    /// As NCCL has it: only where each node holds one member.
    fn recursive(&self, full: Bytes) -> Option<Seconds> {
        let one_per_node = self.levels().all(|level| level.reach == Reach::Network) && self.any_to_any();
        one_per_node.then(|| self.fixed() + self.log_steps() + self.others(full) / self.rate())
    }

    /// Outermost tier on the shares that inner tiers leave, then inwards; an all-reduce goes there and back.
    fn two_level(&self, kind: CollectiveKind, full: Bytes) -> Option<Seconds> {
        (self.levels().count() > 1).then(|| {
            let phases: Seconds = self.levels().map(|level| self.phase(kind, full, level)).sum();
            let once = phases + self.sync();
            if kind == CollectiveKind::AllReduce { once * 2.0 } else { once }
        })
    }

    /// One tier's part of a gather, a scatter or an exchange.
    fn phase(&self, kind: CollectiveKind, full: Bytes, level: Level) -> Seconds {
        let moved = |held: Bytes| held * ((level.ways - 1.0) / level.ways);
        let steps = match level.reach {
            Reach::Node => level.ring_steps,
            Reach::Network => level.ways.log2().min(level.ring_steps),
        };
        let transfer = match kind {
            CollectiveKind::AllToAll => moved(full) / level.exchange_rate,
            CollectiveKind::AllReduce
            | CollectiveKind::AllGather
            | CollectiveKind::ReduceScatter
            | CollectiveKind::SendRecv
            | CollectiveKind::Broadcast => moved(full / level.below) / level.rate,
        };
        self.constants.collective_launch_s + level.latency * steps + transfer
    }

    /// The outermost tier's switches reduce the shares that a reduce-scatter of the inner tiers leaves.
    fn in_switch(&self, full: Bytes) -> Option<Seconds> {
        let outermost = self.levels().last()?;
        let rate = outermost.in_switch_rate?;
        let inner: Seconds = self
            .levels()
            .filter(|level| level.inside < outermost.inside)
            .map(|level| self.phase(CollectiveKind::AllReduce, full, level) * 2.0)
            .sum();
        Some(self.fixed() + inner + outermost.latency * 2.0 + full / outermost.below / rate)
    }

    /// Transfers on different tiers follow each other, as NCCL's send and receive do.
    fn direct(&self, kind: CollectiveKind, full: Bytes) -> Seconds {
        let transfers: Seconds = match kind {
            CollectiveKind::SendRecv => {
                self.levels().last().map_or(Seconds::ZERO, |level| level.latency + full / level.pair_rate)
            }
            CollectiveKind::AllReduce
            | CollectiveKind::AllGather
            | CollectiveKind::ReduceScatter
            | CollectiveKind::AllToAll
            | CollectiveKind::Broadcast => self
                .levels()
                .map(|level| {
                    let peers = level.inside - level.below;
                    level.latency * peers + full * (peers / self.n) / level.exchange_rate
                })
                .sum(),
        };
        self.fixed() + transfers
    }

    fn levels(&self) -> L {
        self.levels.clone()
    }

    /// The part of `full` that a member does not hold itself.
    fn others(&self, full: Bytes) -> Bytes {
        full * ((self.n - 1.0) / self.n)
    }

    /// Rate of a ring through all members.
    fn rate(&self) -> BytesPerSecond {
        let rate = |level: Level| level.rate * level.below;
        self.levels().map(rate).fold(BytesPerSecond(f64::INFINITY), BytesPerSecond::min)
    }

    fn log_steps(&self) -> Seconds {
        self.levels().map(|level| level.latency * level.ways.log2()).sum()
    }

    fn any_to_any(&self) -> bool {
        !self.levels().any(|level| matches!(level.wiring, Wiring::Torus | Wiring::Torus2d))
    }

    fn fixed(&self) -> Seconds {
        self.constants.collective_launch_s + self.sync()
    }

    fn sync(&self) -> Seconds {
        let doublings: f64 =
            self.levels().filter(|level| level.reach == Reach::Network).map(|level| level.ways.log2()).sum();
        self.constants.network_sync_s_per_log2_nodes * doublings
    }
}

#[cfg(test)]
#[path = "collective_tests.rs"]
mod tests;
