//! From the winner to the plan document: every figure read off programs, prices and the simulation.

use std::collections::BTreeMap;

use cost_model::CollectiveKind;
use ir::graph::Model;
use ir::names::{Arrangement, PlacedLayer, Roles, roles};
use ir::op::OpKind;
use ir::op_work::model_flops;
use ir::plan::entry::Entry as EntryDocument;
use ir::plan::prediction::{Breakdown, Prediction, RunnerUp, SearchReport, StagePrediction};
use ir::plan::{
    EntryRun, InputDigests, Job as JobDocument, Optimizer, PLAN_SCHEMA_VERSION, Plan, RankMap, TokenOrder,
};
use ir::signature::signature;
use ir::units::{Bytes, Seconds};

use crate::arrange::Arranged;
use crate::candidate::Scope;
use crate::optimize::{Found, Tally};
use crate::request::Request;
use crate::shelf::Entry;

/// Writes the plan of the fastest arrangement. Digests and the tool's version are the caller's to fill.
pub fn plan(found: &Found<'_>) -> Option<Plan> {
    let scope = &found.scope;
    let request = scope.request;
    let best = found.ranking.first()?;
    let named = roles_of(&request.model, best);
    let cuts_sequence = named.cp > 1;
    Some(Plan {
        schema_version: PLAN_SCHEMA_VERSION,
        tool_version: String::new(),
        inputs: InputDigests { model: String::new(), cluster: String::new() },
        job: JobDocument {
            sequence: request.job.sequence,
            global_batch: request.job.global_batch,
            precision: request.job.precision,
            optimizer: Optimizer::AdamW,
            attention: request.job.attention,
            token_order: if cuts_sequence { TokenOrder::ZigZag } else { TokenOrder::Natural },
        },
        roles: named,
        mesh: best.candidate.shape.mesh.clone(),
        rank_map: RankMap::StageMajor,
        n_stages: best.candidate.n_stages,
        schedule: best.schedule,
        micro_batch: best.candidate.micro_batch,
        n_micro_batches: best.candidate.n_micro_batches,
        entries: best
            .entries
            .iter()
            .map(|e| EntryDocument::of(&request.model.layers[e.kind], &best.candidate.shape.mesh, &e.choice))
            .collect(),
        chunks: best
            .chunks
            .iter()
            .map(|runs| runs.iter().map(|&(entry, count)| EntryRun { entry, count }).collect())
            .collect(),
        predicted: Some(prediction(scope, best)),
        search: Some(report(&found.tally, best.step_time)),
        runners_up: found.ranking[1..].iter().map(|other| runner_up(scope, best, other)).collect(),
        warnings: warnings(request, scope),
        cluster: request.cluster.clone(),
        model: ir::native::write(&request.model),
    })
}

fn roles_of(model: &Model, arranged: &Arranged) -> Roles {
    let mut counts = vec![0; arranged.entries.len()];
    for &(entry, count) in arranged.chunks.iter().flatten() {
        counts[entry] += count;
    }
    let placed = |(entry, count): (&'_ Entry, u64)| (entry.kind, count);
    let layers = arranged
        .entries
        .iter()
        .zip(counts)
        .map(|(entry, count)| {
            let (kind, count) = placed((entry, count));
            PlacedLayer { layer: &model.layers[kind], choice: &entry.choice, count }
        })
        .collect();
    roles(&Arrangement {
        mesh: &arranged.candidate.shape.mesh,
        layers,
        n_stages: arranged.candidate.n_stages,
        schedule: arranged.schedule,
        micro_batch: arranged.candidate.micro_batch,
        n_micro_batches: arranged.candidate.n_micro_batches,
    })
}

/// FLOPs of a step: the model's (full square), the model's (causal), and those run, recomputation included.
///
/// Forward once and backward twice, as Megatron counts: 6 per active parameter and token without the input embedding,
/// head once, plus attention (Narayanan et al. 2021, arXiv 2104.04473, appendix).
fn flops(scope: &Scope<'_>, arranged: &Arranged) -> (f64, f64, f64) {
    let (mut full, mut causal, mut run) = (0.0, 0.0, 0.0);
    let mut counts = vec![0; arranged.entries.len()];
    for &(entry, count) in arranged.chunks.iter().flatten() {
        counts[entry] += count;
    }
    for (entry, count) in arranged.entries.iter().zip(counts) {
        let layer = &scope.request.model.layers[entry.kind];
        let sizes = layer.sizes(arranged.candidate.micro_batch, scope.request.job.sequence);
        let times = (count * arranged.candidate.n_micro_batches) as f64;
        for (op, recompute) in layer.ops.iter().zip(&entry.choice.recompute) {
            if !matches!(op.kind, OpKind::Linear | OpKind::Attention { .. }) {
                continue;
            }
            let sig = signature(layer, op);
            let of = |unmasked| model_flops(layer, op, &sig, &sizes, unmasked) * times;
            full += 3.0 * of(Some(1.0));
            causal += 3.0 * of(None);
            let again = if *recompute == ir::lower::Recompute::Again { 1.0 } else { 0.0 };
            run += (3.0 + again) * of(Some(1.0));
        }
    }
    (full, causal, run)
}

fn prediction(scope: &Scope<'_>, best: &Arranged) -> Prediction {
    let request = scope.request;
    let n = request.cluster.n_devices() as f64;
    let step = best.step_time.0;
    let (full, causal, run) = flops(scope, best);
    let peak = scope
        .machine
        .device
        .peak_flops_per_s
        .get(&request.job.precision)
        .map_or(f64::INFINITY, |peak| peak.0);
    let stages = stages(scope, best);
    let tokens = (request.job.sequence * request.job.global_batch) as f64;
    let watts: Option<f64> =
        request.cluster.groups.iter().map(|group| group.device.watts.map(|w| w * group.count as f64)).sum();
    let price: Option<f64> = request
        .cluster
        .groups
        .iter()
        .map(|group| group.price_per_device_hour.map(|price| price * group.count as f64))
        .sum();
    Prediction {
        step_time_s: best.step_time,
        breakdown: breakdown(best),
        model_tflops_per_device: full / step / n / 1e12,
        mfu: full / step / n / peak,
        mfu_causal: causal / step / n / peak,
        hfu: run / step / n / peak,
        tokens_per_s_per_device: tokens / step / n,
        peak_memory_bytes: stages.iter().map(|stage| stage.peak_memory_bytes).fold(Bytes::ZERO, Bytes::max),
        stages,
        bytes_per_tier: bytes_per_tier(scope, best),
        energy_per_step_joules: watts.map(|watts| watts * step),
        cost_per_step: price.map(|price| price * step / 3600.0),
    }
}

/// Seconds of the stage that sets the pace, by what they are spent on; adds up to the step.
fn breakdown(best: &Arranged) -> Breakdown {
    let m = best.candidate.n_micro_batches as f64;
    let p = best.candidate.n_stages as usize;
    let mut parts = Breakdown {
        bubble_s: best.parts.bubble,
        gradient_sync_s: best.parts.gradient_sync,
        parameter_gather_s: best.parts.parameter_gather,
        optimizer_s: best.parts.optimizer,
        host_s: best.parts.host,
        other_s: best.parts.jitter,
        ..Breakdown::default()
    };
    for &(entry, count) in best.chunks.iter().skip(best.parts.slowest_stage).step_by(p).flatten() {
        let price = &best.entries[entry].price;
        let times = count as f64 * m;
        let without =
            |section: &cost_model::SectionPrice| section.compute.total() - section.compute.recompute;
        parts.compute_forward_s += without(&price.forward) * times;
        parts.compute_backward_s += without(&price.backward) * times;
        parts.recompute_s += (price.forward.compute.recompute + price.backward.compute.recompute) * times;
        for section in [&price.forward, &price.backward] {
            for ((class, kind), one) in &section.communication {
                let name = format!("{} {}", class.name(), collective_name(*kind));
                *parts.exposed_communication_s.entry(name).or_default() += one.exposed * times;
            }
        }
    }
    parts.exposed_communication_s.retain(|_, time| time.0 > 0.0);
    parts
}

fn collective_name(kind: CollectiveKind) -> &'static str {
    match kind {
        CollectiveKind::AllReduce => "all-reduce",
        CollectiveKind::AllGather => "all-gather",
        CollectiveKind::ReduceScatter => "reduce-scatter",
        CollectiveKind::AllToAll => "all-to-all",
        CollectiveKind::SendRecv => "send/receive",
        CollectiveKind::Broadcast => "broadcast",
    }
}

fn stages(scope: &Scope<'_>, best: &Arranged) -> Vec<StagePrediction> {
    let p = best.candidate.n_stages as usize;
    let capacity = Bytes(scope.capacity + scope.reserve());
    (0..p)
        .map(|stage| {
            let memory = scope.stage_memory(best, stage);
            let own: Vec<(usize, u64)> =
                best.chunks.iter().skip(stage).step_by(p).flatten().copied().collect();
            let sum = |of: &dyn Fn(&Entry) -> Seconds| -> Seconds {
                own.iter().map(|&(entry, count)| of(&best.entries[entry]) * count as f64).sum()
            };
            let mut categories: BTreeMap<String, Bytes> = [
                ("parameters", memory.parameters),
                ("gradients", memory.gradients),
                ("optimizer", memory.optimizer),
                ("logits", memory.logits),
                ("gathered units", memory.gathered_units),
                ("buffers", memory.buffers),
                ("reserve", memory.reserve),
            ]
            .into_iter()
            .map(|(name, bytes)| (name.to_string(), bytes))
            .collect();
            for (kind, bytes) in &memory.activations {
                categories.insert(format!("activations: {kind}"), *bytes);
            }
            StagePrediction {
                layers: own.iter().map(|run| run.1).sum(),
                forward_s: sum(&|entry| entry.price.forward.seconds()),
                backward_s: sum(&|entry| entry.price.backward.seconds()),
                memory: categories,
                peak_memory_bytes: memory.total(),
                capacity_bytes: capacity,
            }
        })
        .collect()
}

/// Bytes that a device of the busiest stage sends in a step, per tier.
fn bytes_per_tier(scope: &Scope<'_>, best: &Arranged) -> BTreeMap<String, Bytes> {
    let p = best.candidate.n_stages as usize;
    let m = best.candidate.n_micro_batches as f64;
    let tiers = &scope.request.cluster.tiers;
    let mut most = vec![Bytes::ZERO; tiers.len()];
    for stage in 0..p {
        let mut own = vec![Bytes::ZERO; tiers.len()];
        for &(entry, count) in best.chunks.iter().skip(stage).step_by(p).flatten() {
            let price = &best.entries[entry].price;
            let sides = [
                (&price.forward.bytes_per_tier, m),
                (&price.backward.bytes_per_tier, m),
                (&price.update.bytes_per_tier, 1.0),
            ];
            for (bytes, times) in sides {
                for (sum, one) in own.iter_mut().zip(bytes) {
                    *sum += *one * (times * count as f64);
                }
            }
        }
        for (most, own) in most.iter_mut().zip(own) {
            *most = most.max(own);
        }
    }
    tiers.iter().zip(most).map(|(tier, bytes)| (tier.name.clone(), bytes)).collect()
}

fn report(tally: &Tally, best: Seconds) -> SearchReport {
    let bound = tally.open_bound.map_or(best, |bound| bound.min(best));
    let proof = match tally.open_bound {
        None => {
            "every candidate of the space was worked out, or has a bound above the plan's time".to_string()
        }
        Some(_) => format!(
            "{} candidates were left open when the limit on work was reached; none of them can be faster than {:.3} of \
             the plan's time",
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
        lower_bound_s: bound,
        gap: (best / bound - 1.0).max(0.0),
        proof,
    }
}

fn runner_up(scope: &Scope<'_>, best: &Arranged, other: &Arranged) -> RunnerUp {
    let (mine, its) = (breakdown(best), breakdown(other));
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
        ("the optimizer", its.optimizer_s, mine.optimizer_s),
    ];
    let worst = terms.iter().max_by(|a, b| (a.1 - a.2).0.total_cmp(&(b.1 - b.2).0));
    let slower = (other.step_time / best.step_time - 1.0) * 100.0;
    let reason = match worst {
        Some((name, its, mine)) if its > mine => {
            format!("{slower:.1} % slower: {:.3} s more of {name}", (*its - *mine).0)
        }
        _ => format!("{slower:.1} % slower"),
    };
    RunnerUp { roles: roles_of(&scope.request.model, other), step_time_s: other.step_time, reason }
}

fn warnings(request: &Request, scope: &Scope<'_>) -> Vec<String> {
    let mut list = Vec::new();
    if request.cluster.groups.iter().any(|group| group.device != *scope.machine.device) {
        list.push(format!(
            "the cluster mixes devices; every stage is priced as if it ran on `{}`, the slowest, with the memory of the \
             smallest",
            scope.machine.device.name
        ));
    }
    if request.job.sequence > request.model.default_sequence {
        list.push(format!(
            "the sequence of {} tokens is longer than the {} the model was made for",
            request.job.sequence, request.model.default_sequence
        ));
    }
    list
}
