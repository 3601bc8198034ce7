//! From the winner to the plan document: every figure read off programs, prices and the simulation.

use std::collections::{BTreeMap, BTreeSet};

use cost_model::Constants;
use cost_model::rates::peak;
use ir::cluster::{Cluster, DeviceGroup, Precision};
use ir::collective::Rule;
use ir::graph::{Layer, Sizes};
use ir::lower::{LayerChoice, lower};
use ir::op::{AttentionMask, OpKind};
use ir::plan::check::open;
use ir::plan::entry::Entry as EntryDocument;
use ir::plan::prediction::{Breakdown, RunnerUp, SearchReport};
use ir::plan::{
    EntryRun, InputDigests, Job as JobDocument, Optimizer, PLAN_SCHEMA_VERSION, Plan, PlanError, RankMap,
};
use ir::signature::signature;
use ir::slices::{sliced_choice, sliced_layer};
use ir::token_order::TokenOrder;
use ir::units::Seconds;

use crate::arrange::Arranged;
use crate::candidate::Scope;
use crate::chosen::chosen;
use crate::found::{Found, Tally};
use crate::layouts::least_time;
use crate::price::prediction::breakdown;
use crate::price::price_with;
use crate::price::setting::Entry;
use crate::request::{Pins, Request};

/// How many runners-up a plan names.
const N_RUNNERS_UP: usize = 5;

/// Writes the plan of the fastest arrangement, priced as any plan is. Digests and the tool's version are the caller's
/// to fill.
///
/// # Errors
/// Where what was found cannot be opened again: a fault of the search. `None` where nothing was found.
pub fn plan(found: &Found<'_>, constants: &Constants) -> Option<Result<Plan, PlanError>> {
    let best = found.ranking.first()?;
    let mut plan = unpriced(found, best, &[]);
    let priced = open(&plan).and_then(|opened| price_with(&plan, &opened, constants));
    Some(priced.and_then(|predicted| {
        if predicted.step_time_s != best.step_time() {
            let (found, priced) = (best.step_time().0, predicted.step_time_s.0);
            let what = format!("the search found a step of {found} s, the plan's own price is {priced} s");
            return Err(PlanError { place: "predicted.step_time_s".into(), what });
        }
        plan.predicted = Some(predicted);
        Ok(plan)
    }))
}

/// The plan of an arrangement whose coordinates of the outermost axis run so many micro-batches each, or all the same.
pub(crate) fn unpriced(found: &Found<'_>, best: &Arranged, shares: &[u64]) -> Plan {
    let scope = &found.scope;
    let request = scope.request;
    let chosen = chosen(scope, best);
    let named = scope.roles(best);
    let order = scope.setting.job.token_order;
    Plan {
        schema_version: PLAN_SCHEMA_VERSION,
        tool_version: String::new(),
        inputs: InputDigests { model: String::new(), cluster: String::new() },
        job: JobDocument {
            sequence: request.job.sequence,
            global_batch: request.job.global_batch,
            precision: request.job.precision,
            optimizer: Optimizer::AdamW,
            attention: request.job.attention,
            token_order: if cuts_queries(scope, best) { order } else { TokenOrder::Natural },
            engine: request.job.engine,
        },
        roles: named.with_shares(shares),
        mesh: best.candidate.shape.mesh.clone(),
        stage_meshes: best.candidate.meshes.clone(),
        rank_map: RankMap::StageMajor,
        n_stages: best.candidate.n_stages,
        schedule: best.schedule,
        table: None,
        slices: if best.slices.is_cut() { best.slices.lengths() } else { Vec::new() },
        micro_batch: best.candidate.micro_batch,
        n_micro_batches: best.candidate.n_micro_batches,
        shares: shares.to_vec(),
        entries: best
            .entries
            .iter()
            .zip(&chosen.kinds)
            .map(|(entry, &kind)| {
                let (layer, mesh) =
                    (&chosen.model.layers[kind], scope.mesh_on(&best.candidate, entry.ground));
                let rules = algorithms(scope, best, (layer, entry));
                EntryDocument::of(layer, mesh, &entry.choice).with_rules(layer, mesh, &rules)
            })
            .collect(),
        chunks: best
            .chunks
            .iter()
            .map(|runs| runs.iter().map(|&(entry, count)| EntryRun { entry, count }).collect())
            .collect(),
        predicted: None,
        search: Some(report(found, best)),
        runners_up: runners_up(scope, &found.ranking),
        warnings: warnings(found, best, shares),
        forms: chosen.forms,
        cluster: request.cluster.clone(),
        model: ir::native::write(&chosen.model),
    }
}

/// The algorithms of an entry's collectives, for as many tokens as one takes at a time: of slices, the longest.
fn algorithms(scope: &Scope<'_>, best: &Arranged, (layer, entry): (&Layer, &Entry)) -> Vec<Rule> {
    let (mesh, micro_batch) = (scope.mesh_on(&best.candidate, entry.ground), best.candidate.micro_batch);
    let setting = &scope.grounds(&best.candidate).settings[entry.ground];
    // An entry has been lowered before, so none of this can fail; without rules the plainest algorithms run.
    let lowered = |layer: &Layer, choice: &LayerChoice, sizes: &Sizes| {
        let program = lower(layer, mesh, sizes, choice);
        program.map_or(Vec::new(), |program| setting.algorithms(layer, (mesh, sizes), &program))
    };
    if !best.slices.is_cut() {
        return lowered(layer, &entry.choice, &layer.sizes(micro_batch, scope.request.job.sequence));
    }
    let length = |slice: &u32| best.slices.range(*slice).count();
    let longest = (0..best.slices.n()).max_by_key(length).unwrap_or(0);
    let sliced = sliced_layer(layer).and_then(|own| {
        let choice = sliced_choice(layer, &own, &entry.choice)?;
        Ok(lowered(&own, &choice, &best.slices.sizes(&own, micro_batch, longest)))
    });
    // What extends keys has tensors that the entry's layer lacks.
    let known = |rule: &Rule| rule.tensor.is_none_or(|tensor| tensor.0 < layer.tensors.len());
    sliced.unwrap_or_default().into_iter().filter(known).collect()
}

/// Whether some layer cuts the queries of attention, so that the order of tokens matters.
fn cuts_queries(scope: &Scope<'_>, arranged: &Arranged) -> bool {
    let of_entry = |entry: &Entry| {
        let layer = &scope.wide.layers[entry.kind];
        layer.ops.iter().zip(&entry.choice.strategies).any(|(op, strategy)| {
            let is_causal = matches!(op.kind, OpKind::Attention { mask: AttentionMask::Causal, .. });
            let ring = signature(layer, op).ring.filter(|_| is_causal);
            let cuts = |axis| ring.is_some_and(|ring| strategy.on(axis).divides() == Some(ring.queries));
            arranged.candidate.shape.mesh.axis_ids().any(cuts)
        })
    };
    arranged.entries.iter().any(of_entry)
}

/// Where somebody stopped a search there may be spaces that it had not come to: meshes of more axes, other orders of
/// devices, unequal shares, schedules that split backward. The products alone are what bounds those.
fn of_all(found: &Found<'_>) -> Option<Seconds> {
    let all = || Request { cluster: found.asked.clone(), ..found.scope.request.clone() };
    found.tally.stopped.then(|| least_time(&all(), found.scope.constants))
}

/// What other choices of layers could come to, in parts of the plan's time.
fn inside_words(tally: &Tally, best: Seconds) -> String {
    let Some(least) = tally.by_sums.map(|least| least / best).filter(|least| *least < 1.0) else {
        return String::new();
    };
    let freely = match tally.inside_bound.map_or(1.0, |freely| freely / best) {
        same if same <= least => String::new(),
        freely => format!(
            ", but by what these take were memory free to no less than {:.3} of it, which is taken for given",
            freely.min(1.0)
        ),
    };
    format!(
        "; by their own bounds, other choices of layers in the candidates that just fit, or wait for what a step sends once, could come to {least:.3} of it{freely}"
    )
}

fn report(found: &Found<'_>, arranged: &Arranged) -> SearchReport {
    let (tally, best) = (&found.tally, arranged.step_time());
    let bound = tally.open_bound.map_or(best, |bound| bound.min(best));
    let of_all = of_all(found);
    let least = [tally.inside_bound, of_all].into_iter().flatten().fold(bound, Seconds::min);
    let forms = match tally.n_forms_open {
        0 => String::new(),
        n => format!(
            "; {n} were not asked again for fused forms of their layers, which could make them the fastest"
        ),
    };
    let forms_given = match tally.bounds_leading {
        true => "forms of layers that are the fastest on a few meshes are so on all",
        false => "a fused form saves no more than where memory is free",
    };
    let cluster = &found.scope.request.cluster;
    let products =
        if cluster.n_close() < cluster.n_devices() { " products no faster cut across nodes," } else { "" };
    let given = format!(
        "taken for given: micro-batches are no faster than multiples of them on their mesh, a pipeline no faster for unequal \
         stages, a device's virtual stages no smaller together where their layers differ,{products} one axis no faster than two that are used alike, what saves less than 0.2 % of a step is not worth more programs, and {forms_given}"
    );
    let slices = if arranged.slices.is_cut() {
        "; slices take together no less than whole sequences, are cut equally or so that all take equally long, and \
         layers and choices are those for whole sequences"
    } else {
        ""
    };
    let parts = if arranged.schedule.splits_backward() {
        "; gradients of inputs take no less than 0.85 of forward"
    } else {
        ""
    };
    let layouts = match tally.n_layouts {
        1 => String::new(),
        n => format!("; {n} selections and orders of the groups of the cluster were searched"),
    };
    let inside = inside_words(tally, best);
    let further: String = tally.further.iter().map(|further| further.words()).collect();
    let forms = format!("{layouts}{inside}{forms}{further}");
    let proof = match tally.open_bound {
        _ if tally.stopped => format!(
            "the search was stopped after {} batches of work (--work {} finds the same plan); {} candidates were left \
             open, and none of them can be faster than {:.3} of the plan's time ({given}{slices}{parts}); what it \
             had not come to takes {:.3} of it for the products alone{forms}",
            tally.work,
            tally.work,
            tally.n_open,
            bound / best,
            of_all.map_or(1.0, |all| all / best)
        ),
        None => format!(
            "every candidate of the space was worked out, or has a bound above the plan's time ({given}{slices}{parts}){forms}"
        ),
        Some(_) => format!(
            "{} candidates were left open when the limit on work was reached; none of them can be faster than {:.3} of \
             the plan's time ({given}{slices}{parts}){forms}",
            tally.n_open,
            bound / best
        ),
    };
    SearchReport {
        space_size: tally.n_candidates as f64,
        n_candidates: tally.n_candidates,
        n_bounded: tally.n_bounded,
        n_unfit: tally.n_unfit + tally.n_illegal,
        n_simulated: tally.n_simulated,
        lower_bound_s: least,
        gap: (best / least - 1.0).max(0.0),
        stopped_after: tally.stopped.then_some(tally.work),
        proof,
        target: None,
        forbidden: Vec::new(),
    }
}

/// The fastest of every other plan in the literature's words: what reads like a better one is the same plan to a
/// reader.
fn runners_up(scope: &Scope<'_>, ranking: &[Arranged]) -> Vec<RunnerUp> {
    let Some(best) = ranking.first() else { return Vec::new() };
    let mut known = vec![scope.roles(best).to_string()];
    let mut list = Vec::new();
    for other in &ranking[1..] {
        let roles = scope.roles(other).to_string();
        if list.len() < N_RUNNERS_UP && !known.contains(&roles) {
            known.push(roles);
            list.push(runner_up(scope, best, other));
        }
    }
    list
}

fn runner_up(scope: &Scope<'_>, best: &Arranged, other: &Arranged) -> RunnerUp {
    let model = &scope.wide;
    let parts = |one: &Arranged| breakdown(&one.staged(model), &one.step);
    let (mine, its) = (parts(best), parts(other));
    let communication = |b: &Breakdown| b.exposed_communication_s.values().copied().sum::<Seconds>();
    let terms = [
        (
            "compute per device",
            its.compute_forward_s + its.compute_backward_s,
            mine.compute_forward_s + mine.compute_backward_s,
        ),
        ("recomputation", its.recompute_s, mine.recompute_s),
        ("exposed communication", communication(&its), communication(&mine)),
        ("pipeline bubble", its.bubble_s, mine.bubble_s),
        (
            "gradient reduction",
            its.gradient_sync_s + its.parameter_gather_s,
            mine.gradient_sync_s + mine.parameter_gather_s,
        ),
        ("waiting for links to hosts", its.host_links_s, mine.host_links_s),
        ("the optimizer", its.optimizer_s + its.offload_s, mine.optimizer_s + mine.offload_s),
        ("waiting for launches", its.host_s, mine.host_s),
    ];
    let worst = terms.iter().max_by(|a, b| (a.1 - a.2).0.total_cmp(&(b.1 - b.2).0));
    let slower = (other.step_time() / best.step_time() - 1.0) * 100.0;
    let reason = match worst {
        Some((name, its, mine)) if its > mine => {
            let more = (*its - *mine).0;
            let more = if more < 0.01 { format!("{:.2} ms", more * 1e3) } else { format!("{more:.3} s") };
            format!("{slower:.1} % slower: {more} more of {name}")
        }
        _ => format!("{slower:.1} % slower"),
    };
    RunnerUp { roles: scope.roles(other), step_time_s: other.step_time(), reason }
}

/// What to know of a stage that lies on devices of several kinds.
fn crowd(scope: &Scope<'_>, best: &Arranged, stage: u64) -> Option<String> {
    let meshes = best.candidate.meshes();
    let groups = scope.machine.cluster.groups_under(meshes.ranks(stage));
    let slowest = scope.grounds(&best.candidate).at(stage as usize).machine.device;
    let others: BTreeSet<&str> =
        groups.iter().map(|group| group.device.name.as_str()).filter(|name| *name != slowest.name).collect();
    let names: Vec<String> = others.into_iter().map(|name| format!("`{name}`")).collect();
    (!names.is_empty()).then(|| {
        format!(
            "stage {stage} has devices `{}` beside {}: it is priced as if all were the slowest, with the memory of the \
             smallest",
            slowest.name,
            names.join(" and ")
        )
    })
}

/// What to know where the plan's cluster has not the groups of the one that was asked about, in their order.
fn rearranged(asked: &Cluster, used: &Cluster) -> Vec<String> {
    let names = |groups: &[DeviceGroup]| {
        let name = |group: &DeviceGroup| format!("{} x {}", group.count, group.device.name);
        groups.iter().map(name).collect::<Vec<_>>().join(", ")
    };
    let (asked, used) = (asked.unnumbered(), used.whole_devices().unnumbered());
    let left = left(&asked.groups, &used.groups);
    let mut list = Vec::new();
    if !left.is_empty() {
        list.push(format!(
            "{} of the cluster have nothing to do: no plan with them was faster",
            names(&left)
        ));
    }
    let mut asked = asked.groups.iter();
    if !used.groups.iter().all(|group| asked.any(|other| other == group)) {
        list.push(format!(
            "ranks are counted with the groups of the cluster in this order, that of the stages: {}",
            names(&used.groups)
        ));
    }
    list
}

/// `3 on each h100-pcie, 1 on each a100-pcie-80`.
fn ranks(cluster: &Cluster) -> String {
    let of_group =
        |group: &DeviceGroup| format!("{} on each {}", group.ranks_per_device(), group.whole().device.name);
    let mut list: Vec<String> = cluster.groups.iter().map(of_group).collect();
    list.dedup();
    list.join(", ")
}

/// Groups that are not used, or so many of their devices; a group may be used in parts.
fn left(asked: &[DeviceGroup], used: &[DeviceGroup]) -> Vec<DeviceGroup> {
    let mut used = used.to_vec();
    let mut list = Vec::new();
    for group in asked {
        let mut missing = group.count;
        for part in
            used.iter_mut().filter(|part| DeviceGroup { count: group.count, ..(**part).clone() } == *group)
        {
            let taken = missing.min(part.count);
            missing -= taken;
            part.count -= taken;
        }
        if missing > 0 {
            list.push(DeviceGroup { count: missing, ..group.clone() });
        }
    }
    list
}

fn warnings(found: &Found<'_>, best: &Arranged, shares: &[u64]) -> Vec<String> {
    let (scope, request) = (&found.scope, found.scope.request);
    let mut list = rearranged(found.asked, &request.cluster);
    list.extend(computes_otherwise(scope));
    list.extend(copies(&request.pins, scope.roles(best).same));
    if request.cluster.shares_devices() {
        list.push(format!(
            "several ranks run on a device in turn: {}; each has its part of the device's time and memory, is priced as the \
             slowest, and memory is told by rank",
            ranks(&request.cluster)
        ));
    } else if shares.is_empty() {
        (0..best.candidate.n_stages).for_each(|stage| list.extend(crowd(scope, best, stage)));
    }
    if request.job.sequence > request.model.default_sequence {
        list.push(format!(
            "the sequence of {} tokens is longer than the {} the model was made for",
            request.job.sequence, request.model.default_sequence
        ));
    }
    list
}

/// Devices that compute what others do.
fn copies(pins: &Pins, same: u64) -> Option<String> {
    let why = match [pins.dp, pins.tp, pins.cp].iter().any(Option::is_some) {
        true => "the pinned degrees leave them nothing to divide",
        false => "dividing their work would take longer, or nothing there divides so",
    };
    (same > 1).then(|| format!("{same} devices at a time compute the same in most layers: {why}"))
}

/// Devices whose products run in another precision than the job's.
fn computes_otherwise(scope: &Scope<'_>) -> Vec<String> {
    let asked = scope.request.job.precision;
    let devices: BTreeMap<&str, Precision> = scope
        .request
        .cluster
        .groups
        .iter()
        .map(|group| (group.device.name.as_str(), peak(&group.device, asked, scope.constants).1))
        .collect();
    let others = devices.into_iter().filter(|(_, runs_as)| *runs_as != asked);
    let told = |(device, runs_as): (&str, Precision)| {
        format!("{device} lists no rate in {}: its products are priced in {}", asked.name(), runs_as.name())
    };
    others.map(told).collect()
}
