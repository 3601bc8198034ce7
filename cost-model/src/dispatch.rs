//! Tokens on their way to experts on other devices and back, where an engine sends each once to a node and once to a
//! device, or sends them while another micro-batch computes.
//!
//! A token has `k` of `E` experts. Programs exchange a copy per expert; of the copies for a block of `B` consecutive
//! experts, those of a device or of a node, an engine that dispatches by node sends one:
//! ```text
//! P(B)     = 1 - C(E - B, k) / C(E, k)                                  a token has any of them          -> Routing::hit()
//! share(B) = P(B) E / (k B)                                             sent over copies                 -> Routing::share()
//! time     = L + sum of a + max over tiers of  S share(B below) (w - 1) / w / rate                       -> exchange()
//! ```
//! with `S`, `L`, `a`, `w` as in `collective.rs`: what arrives at a node is forwarded inside it while more arrives, so
//! that the slowest tier sets the time. Where a router first chooses `T` of `G` groups of experts, `P` is taken within
//! the groups that are chosen: DeepSeek-V3's tokens reach four nodes of eight at most (arXiv 2412.19437 section 2.1.2).
//! Every expert is as likely as any other.
//!
//! Beside another micro-batch an exchange hides behind a quarter of the layer's products, forward and backward, shared
//! evenly by the mesh: it is one of four ([`cover`]). What is hidden slows down what it hides behind, as gathered
//! parameters do: its kernels take some of the device's processors.

use ir::conversion::StepKind;
use ir::engine::{Dispatch, ExchangeOverlap};
use ir::graph::{Extent, Layer, Sizes, TensorId};
use ir::mesh::Mesh;
use ir::op::OpKind;
use ir::op_work::{KernelChoice, op_work};
use ir::sharding::Sharding;
use ir::signature::signature;
use ir::units::{Bytes, Seconds};
use ir::work::{Pass, Work};

use crate::collective::{Choice, relayed};
use crate::constants::Constants;
use crate::group::Group;
use crate::overlap::side_by_side;

/// Exchanges of a layer: to experts and back, forward and backward.
const EXCHANGES: f64 = 4.0;

/// Which experts the tokens in a tensor of expert slots may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Routing {
    /// The tensor's dim of experts.
    dim: usize,
    experts: u64,
    top_k: u64,
    groups: u64,
    top_groups: u64,
    /// Whether experts have a capacity: then all their slots are sent, by whatever engine (Megatron-Core's `flex`
    /// dispatcher has none).
    limited: bool,
}

impl Routing {
    /// Of a tensor; nothing where it has no slots of experts.
    pub fn of(layer: &Layer, tensor: TensorId) -> Option<Self> {
        let dims = &layer.tensors[tensor.0].dims;
        let capacity = dims.iter().find_map(|dim| match layer.dims[dim.0].extent {
            Extent::Slots { capacity, .. } => Some(capacity),
            Extent::Fixed(_)
            | Extent::Uneven(_)
            | Extent::MicroBatch
            | Extent::Sequence
            | Extent::UpToSlice => None,
        })?;
        layer.ops.iter().find_map(|op| {
            let OpKind::Route { top_k, groups, top_groups, .. } = op.kind else { return None };
            let experts = *layer.tensors[op.results.first()?.0].dims.last()?;
            let dim = dims.iter().position(|dim| *dim == experts)?;
            let Extent::Fixed(experts) = layer.dims[experts.0].extent else { return None };
            Some(Self { dim, experts, top_k, groups, top_groups, limited: capacity.is_some() })
        })
    }

    /// Chance that a token has any of a block of so many experts.
    fn hit(&self, block: f64) -> f64 {
        let (experts, groups, top_groups) =
            (self.experts as f64, self.groups.max(1) as f64, self.top_groups.max(1) as f64);
        let group = experts / groups;
        let within = group * top_groups;
        if block <= group {
            return top_groups / groups * (1.0 - self.missed(within, block));
        }
        // So many of the block's groups may be among those that are chosen.
        let own = (block / group).round().min(groups);
        let chosen = 0..=self.top_groups.min(own as u64);
        chosen
            .map(|n| n as f64)
            .map(|n| drawn(groups, own, top_groups, n) * (1.0 - self.missed(within, n * group)))
            .sum()
    }

    /// Chance that none of `block` experts is among those that a token has, of `within`.
    fn missed(&self, within: f64, block: f64) -> f64 {
        (0..self.top_k).map(|i| ((within - block - i as f64) / (within - i as f64)).max(0.0)).product()
    }

    /// What is sent, over what would be with a copy per expert, where a block of so many experts gets a token once.
    pub fn share(&self, block: f64) -> f64 {
        let copies = self.top_k as f64 * block / self.experts as f64;
        (self.hit(block) / copies).min(1.0)
    }
}

/// Chance that `n` of `own` are among `top` that are drawn of `all`.
fn drawn(all: f64, own: f64, top: f64, n: f64) -> f64 {
    choices(own, n) * choices(all - own, top - n) / choices(all, top)
}

fn choices(of: f64, n: f64) -> f64 {
    if n < 0.0 || n > of {
        return 0.0;
    }
    (0..n as u64).map(|i| (of - i as f64) / (n - i as f64)).product()
}

/// Time of one exchange of a tensor's conversion, where the engine sends a token once to a node and to a device: `full`
/// is what a rank holds, a copy per expert. Nothing where it is no exchange of tokens, or the engine sends every copy.
pub fn exchange(
    routing: Routing,
    (kind, before, after): (StepKind, Sharding, Sharding),
    (full, mesh): (Bytes, &Mesh),
    group: impl FnOnce() -> Group,
    (cluster, constants): (&ir::cluster::Cluster, &Constants),
) -> Option<Choice> {
    let StepKind::AllToAll { from, to } = kind else { return None };
    let dim = routing.dim;
    let cuts = (usize::from(from) == dim, usize::from(to) == dim);
    if constants.engine.dispatch == Dispatch::AllToAll || routing.limited || cuts == (false, false) {
        return None;
    }
    // The experts of a device: on the side where they are cut.
    let cut = if cuts.1 { after } else { before };
    let parts: f64 = cut.axes_of(dim).map(|axis| mesh.size(axis) as f64).product();
    let of_device = routing.experts as f64 / parts;
    relayed(full, |members| routing.share(of_device * members), &group(), (cluster, constants))
}

/// What one exchange of a layer may hide behind where it runs beside another micro-batch.
pub fn cover(
    (layer, sizes): (&Layer, &Sizes),
    mesh: &Mesh,
    kernels: &KernelChoice,
    seconds: impl Fn(&Work) -> Seconds,
) -> Seconds {
    let of_op = |op| {
        let sig = signature(layer, op);
        let whole: Vec<f64> = sig.factors.iter().map(|factor| sizes.dims[factor.dim.0] as f64).collect();
        let both = [Pass::Forward, Pass::Backward];
        let works =
            both.into_iter().flat_map(|pass| op_work((layer, op, &sig), &whole, sizes, pass, kernels));
        works
            .filter(|work| !matches!(work, Work::Composed { .. } | Work::Stream { .. }))
            .map(|work| seconds(&work))
            .sum::<Seconds>()
    };
    layer.ops.iter().map(of_op).sum::<Seconds>() / (EXCHANGES * mesh.n_devices() as f64)
}

/// What shows of an exchange that has so much to hide behind, and what is left of that for the next one of the same
/// conversion.
pub fn shown(total: Seconds, cover: Seconds, constants: &Constants) -> (Seconds, Seconds) {
    match constants.engine.exchange_overlap {
        ExchangeOverlap::Absent => (total, Seconds::ZERO),
        ExchangeOverlap::Beside => {
            let both = side_by_side(cover, total, constants.gathered_overlap_slowdown_fraction);
            (both - cover, (cover - total).max(Seconds::ZERO))
        }
    }
}

#[cfg(test)]
#[path = "dispatch_tests.rs"]
mod tests;
