//! Price of one collective step of a program on the mesh's place in the cluster.

use ir::cluster::{Cluster, Device, Precision};
use ir::conversion::{Step, StepKind};
use ir::engine::{GradientFormat, TensorOverlap};
use ir::mesh::{AxisId, Mesh};
use ir::op_work::KernelChoice;
use ir::units::Bytes;

use crate::collective::{Algorithm, Choice, CollectiveKind, broadcasts, choose};
use crate::constants::Constants;
use crate::dispatch::{Routing, exchange};
use crate::group::{Group, GroupAxis};
use crate::traffic::bytes_sent_per_tier;

/// Where and how a program runs.
#[derive(Clone, Copy, Debug)]
pub struct PriceContext<'a> {
    /// The machines.
    pub cluster: &'a Cluster,
    /// The device of this mesh.
    pub device: &'a Device,
    /// Precision of the job.
    pub precision: Precision,
    /// Format in which gradients are accumulated and reduced.
    pub gradients: GradientFormat,
    /// Constants of the world.
    pub constants: &'a Constants,
    /// Kernels of the engine.
    pub kernels: KernelChoice,
    /// Whether the engine cuts tensor parallel products to overlap them.
    pub tensor_overlap: TensorOverlap,
    /// Cluster rank of the mesh's first device.
    pub rank_offset: u64,
    /// The group of the cluster that holds the mesh, where its links are others.
    pub home: Option<usize>,
}

/// Price of one collective.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPrice {
    /// What it is.
    pub kind: CollectiveKind,
    /// Algorithm and time.
    pub choice: Choice,
    /// Bytes a device sends per tier of the cluster.
    pub bytes_per_tier: Vec<Bytes>,
}

/// Price of one step of a conversion of a tensor of `shape`, with the routing of its tokens where it has some for
/// experts; nothing for a local one. Bytes are those of the program, which sends every copy of a token.
pub fn price_step(
    context: &PriceContext<'_>,
    mesh: &Mesh,
    step: &Step,
    (shape, element): (&[u64], Bytes),
    routing: Option<Routing>,
) -> Option<StepPrice> {
    let kind = collective_kind(step.kind)?;
    let full = element * full_elements(step, mesh, shape);
    let price = price_full(context, mesh, (kind, &step.axes), full);
    let group = || group_of(context, mesh, &step.axes);
    let change = (step.kind, step.before, step.after);
    let worlds = (context.cluster, context.constants);
    let choice = routing.and_then(|routing| exchange(routing, change, (full, mesh), group, worlds));
    Some(StepPrice { choice: choice.unwrap_or(price.choice), ..price })
}

/// The tensor that a step's price is about: what a rank holds before, or gathers.
fn full_elements(step: &Step, mesh: &Mesh, shape: &[u64]) -> f64 {
    let side = if matches!(step.kind, StepKind::AllGather { .. }) { step.after } else { step.before };
    side.local_elements(mesh, shape) as f64
}

/// Price of a collective along mesh axes, `full` as `collective` defines it.
pub fn price_full(
    context: &PriceContext<'_>,
    mesh: &Mesh,
    (kind, axes): (CollectiveKind, &[AxisId]),
    full: Bytes,
) -> StepPrice {
    let group = group_of(context, mesh, axes);
    let choice = choose(kind, full, &group, context.cluster, context.constants);
    let bytes_per_tier = bytes_sent_per_tier(kind, full, &group, context.cluster);
    StepPrice { kind, choice, bytes_per_tier }
}

/// Price of broadcasts along mesh axes, one after another and `full` all together.
pub fn price_broadcasts(
    context: &PriceContext<'_>,
    mesh: &Mesh,
    axes: &[AxisId],
    (count, full): (u32, Bytes),
) -> StepPrice {
    let group = group_of(context, mesh, axes);
    let each = full / f64::from(count.max(1));
    let time = broadcasts(count, each, &group, context.cluster, context.constants);
    let kind = CollectiveKind::Broadcast;
    let bytes_per_tier = bytes_sent_per_tier(kind, full, &group, context.cluster);
    StepPrice { kind, choice: Choice { algorithm: Algorithm::Ring, time }, bytes_per_tier }
}

/// The collective of a step, if it is one.
pub fn collective_kind(kind: StepKind) -> Option<CollectiveKind> {
    kind.collective()
}

/// The group of a collective along mesh axes; where the mesh lies across domains of a tier, its worst group.
pub fn group_of(context: &PriceContext<'_>, mesh: &Mesh, axes: &[AxisId]) -> Group {
    let n = mesh.n_devices();
    let offset = context.rank_offset;
    let fits = |domain: u64| domain == 0 || offset.is_multiple_of(domain) || offset % domain + n <= domain;
    if context.cluster.tiers.iter().all(|tier| fits(tier.devices)) {
        let axis = |&axis: &AxisId| GroupAxis { stride: mesh.stride(axis), size: mesh.size(axis) };
        let axes: Vec<GroupAxis> = axes.iter().map(axis).collect();
        return Group::from_axes(&axes, context.cluster).at(context.home);
    }
    let groups = (0..n).map(|rank| mesh.group(rank, axes)).enumerate();
    let firsts = groups.filter(|(rank, group)| group.first() == Some(&(*rank as u64)));
    let placed = firsts.map(|(_, group)| {
        let ranks: Vec<u64> = group.into_iter().map(|rank| rank + offset).collect();
        Group::from_ranks(&ranks, context.cluster)
    });
    placed
        .min_by(|a, b| a.members_per_domain().cmp(b.members_per_domain()))
        .unwrap_or_else(|| Group::alone(context.cluster))
        .at(context.home)
}
