//! Plans whose devices run unequal shares of the micro-batches, where the groups of a cluster differ.
//!
//! A stage that lies on several groups is as slow as the slowest where all its devices run the same. With shares as the
//! speeds are none waits (`shares::divided`). The search is that of equal shares on the slowest devices, held to meshes
//! whose outermost axis lies across the groups and to storages that send along it once per step; the first of what it
//! finds are divided, and the fastest of these counts. What is divided first was the fastest with equal shares: that
//! the two orders agree is not proven, so the plan's bound is that of the devices' rates alone.
//!
//! Of several stages each has a part of every group: its cluster is one of parts of groups, in that order.
//!
//! Left out: batches that do not divide into equal micro-batches over the axis; more than one axis with unequal shares;
//! gradients and parameters that are cut along it; orders that cut sequences, two copies of a chunk.

use cost_model::Constants;
use ir::cluster::Cluster;
use ir::cluster_part::{Piece, part};
use ir::plan::check::open;
use ir::plan::prediction::RunnerUp;
use ir::plan::{Plan, shares};
use ir::schedule::Schedule;
use ir::sharding::{Placement, Sharding};
use ir::units::Seconds;

use crate::arrange::Arranged;
use crate::candidate::Scope;
use crate::document::unpriced;
use crate::found::{Found, Start};
use crate::layouts::least_time;
use crate::optimize::search_from;
use crate::price::replicas::{Kinds, Replica};
use crate::price::staged::Staged;
use crate::price::step::{Streams, alone};
use crate::price::{price_with, stepped};
use crate::request::{OnProgress, Pins, Request, SharesKind, Stop};
use crate::shares::divided;

/// Arrangements that are divided, the fastest with equal shares first.
const MAX_DIVIDED: usize = 12;

/// Micro-batches of a replica that are enough to give some away.
const MANY: u64 = 8;

/// How many are tried by name, were all devices replicas.
const MICRO_BATCHES: [u64; 3] = [2, 4, MANY];

/// Stages that are tried beside one: a part of every group in each.
const STAGES: [u64; 3] = [1, 2, 4];

/// The fastest plan with unequal shares, if it is faster than one with equal shares, or there is none of these;
/// `request` is that on the cluster as it was asked about.
pub(crate) fn faster(
    request: &Request,
    constants: &Constants,
    watch: (Stop<'_>, OnProgress<'_>),
    equal: Option<&Plan>,
) -> Option<Plan> {
    if !may_be_unequal(request) {
        return None;
    }
    let mut best: Option<Plan> = None;
    let (mut work, mut n_candidates, mut n_divided) = (0, 0, 0);
    for n_stages in STAGES {
        let limit = time_of(best.as_ref()).min(time_of(equal));
        let Some(asked) = staged(request, n_stages) else { continue };
        if least_time(&asked, constants).0 >= limit {
            continue;
        }
        let mut stopped = false;
        for micro_batch in std::iter::once(asked.pins.micro_batch).chain(smaller(&asked).map(Some)) {
            let pins = Pins { micro_batch, ..asked.pins.clone() };
            let asked = Request { pins, ..asked.clone() };
            let start = Start { work, ..Start::default() };
            let (found, tally) = search_from(&asked, constants, start, watch);
            (work, n_candidates) = (tally.work, n_candidates + tally.n_candidates);
            // What does not fit here is not among those of other micro-batches either.
            let Ok(found) = found else { break };
            let found = Found { asked: &request.cluster, ..found };
            for arranged in found.ranking.iter().take(MAX_DIVIDED) {
                n_divided += 1;
                let plan = divided_plan(&found, arranged, constants);
                best = plan.filter(|plan| time_of(Some(plan)) < time_of(best.as_ref())).or(best);
            }
            stopped = tally.stopped;
            // Of many, shares are as the speeds are already.
            let are_many = |best: &Arranged| best.candidate.n_micro_batches >= MANY;
            if stopped || found.ranking.first().is_some_and(are_many) {
                break;
            }
        }
        if stopped {
            break;
        }
    }
    let best = best.filter(|best| time_of(Some(best)) < time_of(equal))?;
    let bound = least_time(request, constants);
    Some(reported(best, equal, (n_candidates, n_divided, bound)))
}

pub(crate) fn time_of(plan: Option<&Plan>) -> f64 {
    let predicted = plan.and_then(|plan| plan.predicted.as_ref());
    predicted.map_or(f64::INFINITY, |predicted| predicted.step_time_s.0)
}

/// Smaller micro-batches that are asked for by name: a replica that runs a single one when all run as many has nothing
/// to give away.
fn smaller(asked: &Request) -> impl Iterator<Item = u64> + use<> {
    let replicas = asked.cluster.n_devices() / asked.pins.pp.unwrap_or(1);
    let each = asked.job.global_batch / replicas.max(1);
    let is_free = asked.pins.micro_batch.is_none() && each > 0;
    MICRO_BATCHES.into_iter().filter(move |n| is_free && each.is_multiple_of(*n)).map(move |n| each / n)
}

/// Whether the groups differ and nothing that was asked for keeps shares equal.
fn may_be_unequal(request: &Request) -> bool {
    let pins = &request.pins;
    let once_per_step = pins.zero.is_none_or(|stage| stage <= 1);
    let whole = !pins.schedule.is_some_and(|kind| kind.cuts_sequences());
    request.cluster.is_mixed() && pins.shares != Some(SharesKind::Equal) && once_per_step && whole
}

/// The same request for a pipeline of so many stages, each on a part of every group.
fn staged(request: &Request, n_stages: u64) -> Option<Request> {
    let pins = &request.pins;
    if pins.pp.is_some_and(|pp| pp != n_stages) || !pins.forbid.pp.allows(n_stages) {
        return None;
    }
    let cluster = if n_stages == 1 { request.cluster.clone() } else { spread(&request.cluster, n_stages)? };
    let pins = Pins { pp: Some(n_stages), shares: Some(SharesKind::Unequal), ..pins.clone() };
    Some(Request { cluster, pins, ..request.clone() })
}

/// A cluster whose groups are cut into as many parts, first parts first; nothing where their nodes do not divide.
fn spread(cluster: &Cluster, n_parts: u64) -> Option<Cluster> {
    let nodes = |group: usize| cluster.groups[group].n_nodes();
    let groups = 0..cluster.groups.len();
    if groups.clone().any(|group| !nodes(group).is_multiple_of(n_parts)) {
        return None;
    }
    let piece = |at: u64, group: usize| {
        let each = nodes(group) / n_parts;
        Piece { group, nodes: (at * each..(at + 1) * each).collect() }
    };
    let pieces: Vec<Piece> =
        (0..n_parts).flat_map(|at| groups.clone().map(move |group| piece(at, group))).collect();
    part(cluster, &pieces).ok()
}

/// The arrangement with shares as the speeds of its devices are.
fn divided_plan(found: &Found<'_>, arranged: &Arranged, constants: &Constants) -> Option<Plan> {
    let arranged = with_own_loss(&found.scope, arranged);
    let size = arranged.candidate.shape.mesh.size(shares::AXIS);
    let equal = vec![arranged.candidate.n_micro_batches; size as usize];
    let mut plan = unpriced(found, &arranged, &equal);
    let opened = open(&plan).ok()?;
    let divided = stepped(&plan, &opened, constants, |setting, staged| {
        let streams = Streams::of(setting, staged);
        let mut classes = vec![0; size as usize];
        for (class, replica) in staged.replicas.iter().enumerate() {
            replica.coordinates.iter().for_each(|&at| classes[at as usize] = class);
        }
        let seconds = |class: usize, share: u64| {
            let own = Staged { n_micro_batches: share, ..staged.at(class) };
            Some(alone(setting, &own, &streams).ok()?.pipeline.0)
        };
        let is_alone = |one: &Replica| one.stages.iter().all(|stage| stage.kinds == Kinds::One);
        // Interleaved schedules take micro-batches in multiples of the stages.
        let in_groups = matches!(plan.schedule, Schedule::Interleaved { .. });
        let unit = if in_groups { plan.n_stages } else { 1 };
        let total = plan.n_micro_batches * size;
        Ok(staged.replicas.iter().all(is_alone).then(|| divided(&classes, (total, unit), &seconds)).flatten())
    });
    plan.shares = divided.ok()??;
    plan.roles = plan.roles.with_shares(&plan.shares);
    // As many for all is another plan.
    if plan.shares.iter().all(|share| *share == plan.n_micro_batches) {
        return None;
    }
    let predicted = price_with(&plan, &open(&plan).ok()?, constants).ok()?;
    let fits = predicted.stages.iter().all(|stage| stage.peak_memory_bytes <= stage.capacity_bytes);
    plan.predicted = Some(predicted);
    fits.then_some(plan)
}

/// The arrangement whose last layer leaves every coordinate the loss of its own sequences.
fn with_own_loss(scope: &Scope<'_>, arranged: &Arranged) -> Arranged {
    let mut arranged = arranged.clone();
    for entry in &mut arranged.entries {
        let layer = &scope.wide.layers[entry.kind];
        if layer.has_loss() && entry.choice.out == Sharding::REPLICATED {
            entry.choice.out = entry.choice.out.with(shares::AXIS, Placement::PartialSum);
        }
    }
    arranged
}

/// The plan with how it was found.
fn reported(
    plan: Plan,
    equal: Option<&Plan>,
    (n_candidates, n_divided, bound): (u64, usize, Seconds),
) -> Plan {
    let proof = format!(
        "{n_divided} arrangements of stages over several groups, the fastest with equal shares, were given shares of \
         the micro-batches as their devices are fast; the bound is the model's products at the rates of all devices"
    );
    let reason = "all devices of a stage run as many micro-batches";
    instead(plan, equal, (n_candidates, bound), (proof, reason))
}

/// A plan that was looked for beside others, with how it was found and by how much the best of these is slower, and
/// why.
pub(crate) fn instead(
    mut plan: Plan,
    other: Option<&Plan>,
    (n_candidates, bound): (u64, Seconds),
    (proof, reason): (String, &str),
) -> Plan {
    let time = time_of(Some(&plan));
    if let Some(report) = &mut plan.search {
        let before = other.and_then(|other| other.search.as_ref());
        report.n_candidates = n_candidates + before.map_or(0, |before| before.n_candidates);
        report.space_size = report.n_candidates as f64;
        report.n_bounded += before.map_or(0, |before| before.n_bounded);
        report.n_unfit += before.map_or(0, |before| before.n_unfit);
        report.n_simulated += before.map_or(0, |before| before.n_simulated);
        report.lower_bound_s = bound.min(Seconds(time));
        report.gap = (time / report.lower_bound_s.0 - 1.0).max(0.0);
        report.proof = proof;
    }
    plan.runners_up.clear();
    if let (Some(other), slower) = (other, (time_of(other) / time - 1.0) * 100.0) {
        plan.runners_up.push(RunnerUp {
            roles: other.roles.clone(),
            step_time_s: Seconds(time_of(Some(other))),
            reason: format!("{slower:.1} % slower: {reason}"),
        });
    }
    plan
}
