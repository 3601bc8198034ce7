//! The lengths of a shrunk model: for every class of dims the smallest that the small mesh cuts as the large one does.
//!
//! A fixed length becomes `blocks * min(2, length of a block)`, a little more where an operator asks for it: heads
//! are rotated in pairs, routing groups hold enough experts, totals are the sums of their parts, and what storage cut
//! into equal blocks it still does. Growing doubles, and the small mesh cuts by powers of two, so what divides once
//! divides ever after.

use crate::graph::{Extent, Layer, TensorId};
use crate::mesh::Mesh;
use crate::op::{GroupScore, OpKind};
use crate::plan::Plan;
use crate::plan::check::OpenPlan;
use crate::program::AxisSet;
use crate::sharding::Sharding;
use crate::shrink::dims::{ClassId, Classes, Cut, PartsOf, cuts, parts_of};
use crate::signature::signature;
use crate::strategy::placements;

/// Fewest elements of a dim that nothing cuts, so that sums over it have several terms.
const FEW: u64 = 4;
/// Fewest tokens of a sequence.
const TOKENS_FEW: u64 = 8;
/// Fewest elements of a dim that a norm scales to unit size: of few elements the norm is now and then near zero, and
/// each layer then carries rounding tenfold.
const NORMED_FEW: u64 = 16;
/// Fewest rows of a vocabulary, so that tokens differ.
const VOCABULARY: u64 = 16;
/// Rounds in which lengths may grow: more than all of them can double.
const ROUNDS: usize = 512;

/// Lengths of a shrunk plan.
#[derive(Clone, Debug)]
pub(super) struct SmallSizes {
    pub(super) classes: Classes,
    /// New length of every class that the model fixes; 0 elsewhere.
    pub(super) lengths: Vec<u64>,
    /// Sums that hold between classes.
    pub(super) sums: Vec<SumOf>,
    pub(super) sequence: u64,
    /// Tokens of every slice; empty where sequences are not cut.
    pub(super) slices: Vec<u64>,
    pub(super) micro_batch: u64,
}

/// One length that is the sum of others: what a split cuts, what two parts are appended to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SumOf {
    pub(super) total: ClassId,
    pub(super) parts: Vec<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Class(ClassId),
    Constant(u64),
}

/// What a class must meet beyond being cut.
#[derive(Clone, Copy, Debug)]
struct Demand {
    cut: Cut,
    multiple: u64,
    at_least: u64,
}

/// Lengths for a plan on small meshes; per entry, the large one and the small.
pub(super) fn reduce(plan: &Plan, open: &OpenPlan, meshes: &[(Mesh, Mesh)], n_slices: usize) -> SmallSizes {
    let runs = plan.chunks.iter().flatten();
    let order: Vec<usize> = runs
        .flat_map(|run| std::iter::repeat_n(open.entries[run.entry].layer, run.count.min(2) as usize))
        .collect();
    let classes = Classes::new(open, &order);
    let cuts = cuts(open, &classes, meshes);
    let of_job = |test: &dyn Fn(Extent) -> bool| {
        let mine = classes.extents.iter().zip(&cuts).filter(|(extent, _)| test(**extent));
        mine.fold(Cut::NONE, |all, (_, cut)| all.max(*cut))
    };
    let batch = of_job(&|extent| extent == Extent::MicroBatch);
    let tokens = of_job(&|extent| matches!(extent, Extent::Sequence | Extent::Slots { .. }));
    let slices = slices(plan, n_slices, tokens);
    let sequence = match slices.iter().sum() {
        0 => grown(blocks(plan.job.sequence, tokens), TOKENS_FEW, plan.job.sequence),
        sum => sum,
    };
    let sums = sums(open, &classes);
    let demands = demands(open, &classes, &cuts, &sums);
    let lengths = (0..demands.len()).map(|i| length(classes.extents[i], demands[i])).collect();
    let mut sizes =
        SmallSizes { classes, lengths, sums, sequence, slices, micro_batch: blocks(plan.micro_batch, batch) };
    fit_positions(open, &mut sizes);
    add_up(&mut sizes, &demands);
    for _ in 0..ROUNDS {
        let Some(class) = too_small_to_store(open, meshes, &sizes) else { break };
        sizes.lengths[class.0] *= 2;
        add_up(&mut sizes, &demands);
    }
    sizes
}

/// As many blocks as the small mesh cuts, of up to two elements.
fn blocks(length: u64, cut: Cut) -> u64 {
    cut.small * (length / cut.large.max(1)).clamp(1, 2)
}

/// A slice for each of `n` that lie as far apart: one block long, twice that where the large one is longer than
/// another.
fn slices(plan: &Plan, n: usize, cut: Cut) -> Vec<u64> {
    let shortest = plan.slices.iter().copied().min().unwrap_or(0);
    if n < 2 || plan.slices.len() < n {
        return Vec::new();
    }
    let large = (0..n).map(|i| plan.slices[i * plan.slices.len() / n]);
    let small: Vec<u64> =
        large.map(|length| if length > shortest { 2 * cut.small } else { cut.small }).collect();
    let times = grown(small.iter().sum(), TOKENS_FEW, plan.job.sequence) / small.iter().sum::<u64>().max(1);
    small.into_iter().map(|length| length * times.max(1)).collect()
}

/// Doubled to `at_least` as far as `limit` allows.
fn grown(mut length: u64, at_least: u64, limit: u64) -> u64 {
    while length < at_least && length * 2 <= limit {
        length *= 2;
    }
    length
}

fn length(extent: Extent, demand: Demand) -> u64 {
    let parts = demand.cut.small;
    match extent {
        Extent::MicroBatch | Extent::Sequence | Extent::UpToSlice | Extent::Slots { .. } => 0,
        Extent::Uneven(n) => {
            let equal = (parts * parts).max(VOCABULARY);
            let small = if n.is_multiple_of(demand.cut.large) { equal } else { equal + 1 };
            small.min(n)
        }
        Extent::Fixed(n) => {
            let step = lcm(parts, demand.multiple);
            let small = grown(blocks(n, demand.cut).next_multiple_of(step), demand.at_least, n);
            // A power of two may stop short of what the operator needs; the model's own length never does.
            if (small > n || small < demand.at_least) && n.is_multiple_of(step) { n } else { small }
        }
    }
}

fn lcm(a: u64, b: u64) -> u64 {
    let gcd = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    a / gcd(a, b).max(1) * b
}

/// Layers with their index and operators.
fn layers(open: &OpenPlan) -> impl Iterator<Item = (usize, &Layer)> {
    open.model.layers.iter().enumerate()
}

fn sums(open: &OpenPlan, classes: &Classes) -> Vec<SumOf> {
    let mut sums: Vec<SumOf> = Vec::new();
    for (l, layer) in layers(open) {
        let last = |tensor: TensorId| classes.last((l, layer), tensor);
        for op in &layer.ops {
            let (total, parts) = if let Some(PartsOf { whole, along, parts, sizes }) = parts_of(layer, op) {
                // A part that has a dim in the place of the one that is cut is as long as that dim.
                let ndim = |tensor: TensorId| layer.tensors[tensor.0].dims.len();
                let part = |(&tensor, &size): (&TensorId, &u64)| {
                    let same = Some(along).filter(|_| ndim(tensor) == ndim(whole));
                    let dim = same.and_then(|at| layer.tensors[tensor.0].dims.get(at));
                    let class = dim.map(|&dim| classes.class(l, dim));
                    match class.filter(|&class| classes.length(class) == Some(size)) {
                        Some(class) => Part::Class(class),
                        None => Part::Constant(size),
                    }
                };
                (classes.of_parts((l, layer), op), parts.iter().zip(sizes).map(part).collect::<Vec<_>>())
            } else if op.kind == OpKind::AppendShared {
                let parts = op.operands.iter().filter_map(|&tensor| last(tensor)).map(Part::Class);
                (last(op.results[0]), parts.collect())
            } else {
                continue;
            };
            let known = |class| sums.iter().any(|sum: &SumOf| sum.total == class && sum.parts == parts);
            if let Some(total) = total.filter(|&class| !known(class)) {
                sums.push(SumOf { total, parts });
            }
        }
    }
    sums
}

fn demands(open: &OpenPlan, classes: &Classes, cuts: &[Cut], sums: &[SumOf]) -> Vec<Demand> {
    let mut demands: Vec<Demand> =
        cuts.iter().map(|&cut| Demand { cut, multiple: 1, at_least: FEW }).collect();
    let mut ask = |class: Option<ClassId>, multiple: u64, at_least: u64| {
        if let Some(class) = class {
            let demand = &mut demands[class.0];
            demand.multiple = lcm(demand.multiple, multiple);
            demand.at_least = demand.at_least.max(at_least);
        }
    };
    for (l, layer) in layers(open) {
        for &tensor in layer.stream_in.iter().chain(&layer.out) {
            ask(classes.last((l, layer), tensor), 1, NORMED_FEW);
        }
        for op in &layer.ops {
            let class = op.operands.first().and_then(|&tensor| classes.last((l, layer), tensor));
            let length = class.and_then(|class| classes.length(class)).unwrap_or(0);
            if let OpKind::RmsNorm { .. } | OpKind::LayerNorm { .. } = op.kind {
                ask(class, 1, NORMED_FEW);
            }
            if let OpKind::Rope { .. } = op.kind {
                ask(class, 2, FEW);
            }
            if let OpKind::Route { top_k, groups, top_groups, group_score, .. } = op.kind {
                let small = small_route(top_k, groups, top_groups);
                let pair = if group_score == GroupScore::TopTwo { 2 } else { 1 };
                let in_group = small.top_k.div_ceil(small.top_groups).max(pair);
                let some_left = if top_k < length { small.top_k + 1 } else { small.top_k };
                ask(class, small.groups, (small.groups * in_group).max(some_left));
            }
        }
    }
    // A total that is cut or rotated in pairs asks the same of its parts, innermost last.
    for _ in sums {
        for sum in sums {
            let total = demands[sum.total.0];
            let multiple = lcm(total.multiple, total.cut.small);
            for part in &sum.parts {
                if let Part::Class(class) = part {
                    demands[class.0].multiple = lcm(demands[class.0].multiple, multiple);
                }
            }
        }
    }
    demands
}

/// Attributes of a router in the small model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SmallRoute {
    pub(super) top_k: u64,
    pub(super) groups: u64,
    pub(super) top_groups: u64,
}

/// One of several stays one of several, some stay some, all stay all.
pub(super) fn small_route(top_k: u64, groups: u64, top_groups: u64) -> SmallRoute {
    let small_groups = groups.clamp(1, 2);
    let top_groups = if top_groups >= groups { small_groups } else { 1 };
    SmallRoute { top_k: top_k.clamp(1, 2), groups: small_groups, top_groups }
}

/// A table of positions has a row for every token or place, and those that are skipped.
fn fit_positions(open: &OpenPlan, sizes: &mut SmallSizes) {
    for (l, layer) in layers(open) {
        for op in &layer.ops {
            let OpKind::AddPosition { offset } = op.kind else { continue };
            let rows = layer.tensors[op.operands[2].0].dims.first().map(|&dim| sizes.classes.class(l, dim));
            let Some(class) = rows else { continue };
            let along = layer.tensors[op.operands[1].0].dims.first().map(|&dim| sizes.classes.class(l, dim));
            let fixed = along.filter(|&along| sizes.classes.length(along).is_some());
            let places = fixed.map_or(sizes.sequence, |along| sizes.lengths[along.0]);
            if let Some(large) = sizes.classes.length(class) {
                sizes.lengths[class.0] = places.saturating_add(offset).min(large);
            }
        }
    }
}

/// Makes every total the sum of its parts; a chain of totals settles in as many rounds as there are.
fn add_up(sizes: &mut SmallSizes, demands: &[Demand]) {
    for _ in 0..sizes.sums.len() {
        for sum in sizes.sums.clone() {
            let step = demands[sum.total.0].cut.small.max(1);
            let mut total = total_of(&sum, &sizes.lengths);
            let grows = sum.parts.iter().rev().find_map(|part| match part {
                Part::Class(class) => Some(*class),
                Part::Constant(_) => None,
            });
            if let Some(class) = grows {
                let by = lcm(demands[class.0].cut.small, demands[class.0].multiple);
                let mut tries = step;
                while !total.is_multiple_of(step) && tries > 0 {
                    sizes.lengths[class.0] += by;
                    total = total_of(&sum, &sizes.lengths);
                    tries -= 1;
                }
            }
            sizes.lengths[sum.total.0] = total;
        }
    }
}

fn total_of(sum: &SumOf, lengths: &[u64]) -> u64 {
    let length = |part: &Part| match part {
        Part::Class(class) => lengths[class.0],
        Part::Constant(n) => *n,
    };
    sum.parts.iter().map(length).sum()
}

/// A class to double because some parameter's states no longer divide among the devices that store them.
fn too_small_to_store(open: &OpenPlan, meshes: &[(Mesh, Mesh)], sizes: &SmallSizes) -> Option<ClassId> {
    for (entry, (large_mesh, mesh)) in open.entries.iter().zip(meshes) {
        let layer = &open.model.layers[entry.layer];
        for (op, &strategy) in layer.ops.iter().zip(&entry.choice.strategies) {
            let used = placements(&signature(layer, op), strategy).operands;
            for (&tensor, used) in op.operands.iter().zip(used).filter(|(t, _)| layer.is_parameter(**t)) {
                let Some(storage) = entry.choice.storage.get(&tensor) else { continue };
                let classes: Vec<ClassId> = layer.tensors[tensor.0]
                    .dims
                    .iter()
                    .map(|&dim| sizes.classes.class(entry.layer, dim))
                    .collect();
                let large: Vec<u64> =
                    classes.iter().filter_map(|&class| sizes.classes.length(class)).collect();
                let small: Vec<u64> = classes.iter().map(|class| sizes.lengths[class.0]).collect();
                let before = Stored::of(large_mesh, used, storage.widest(), &large);
                let after = Stored::of(mesh, used, storage.widest(), &small);
                if after.fits_as(before) {
                    continue;
                }
                let growable = classes.iter().rev().find_map(|&class| growable(class, sizes));
                if growable.is_some() {
                    return growable;
                }
            }
        }
    }
    None
}

/// A parameter's local block and the devices among which its states are cut.
#[derive(Clone, Copy)]
struct Stored {
    elements: u64,
    devices: u64,
}

impl Stored {
    fn of(mesh: &Mesh, used: Sharding, cut: AxisSet, shape: &[u64]) -> Self {
        let devices = cut.axes().into_iter().map(|axis| mesh.size(axis)).product();
        Self { elements: used.local_elements(mesh, shape), devices }
    }

    fn divides(self) -> bool {
        self.elements.is_multiple_of(self.devices.max(1))
    }

    /// Whether it divides where the larger one did, and leaves no device empty where that left none.
    fn fits_as(self, large: Self) -> bool {
        let some_for_all = |stored: Self| stored.elements >= stored.devices;
        (self.divides() || !large.divides()) && (some_for_all(self) || !some_for_all(large))
    }
}

/// The class to double to make `class` longer: itself, or the largest part of a total.
fn growable(class: ClassId, sizes: &SmallSizes) -> Option<ClassId> {
    if let Some(sum) = sizes.sums.iter().find(|sum| sum.total == class) {
        return sum.parts.iter().find_map(|part| match part {
            Part::Class(part) if *part != class => growable(*part, sizes),
            Part::Class(_) | Part::Constant(_) => None,
        });
    }
    match sizes.classes.extents[class.0] {
        Extent::Fixed(n) => (sizes.lengths[class.0] * 2 <= n).then_some(class),
        Extent::Uneven(_)
        | Extent::MicroBatch
        | Extent::Sequence
        | Extent::UpToSlice
        | Extent::Slots { .. } => None,
    }
}
