//! A plan and its prediction, for people.

use std::collections::{BTreeMap, BTreeSet};

use ir::cluster::{Calibration, DeviceGroup};
use ir::names::{Offload, OnHost, Roles};
use ir::numbers::Numbers;
use ir::plan::Plan;
use ir::plan::prediction::{Breakdown, Prediction, SharePrediction, StagePrediction};
use ir::units::{Bytes, Seconds};

use crate::clusters::{device_names, word};
use crate::figures;
use crate::proof::proof_words;
use crate::table::{Side, list, table};

/// Stages that are listed one by one; of a longer pipeline only those that say something.
const LISTED_STAGES: usize = 12;

/// What `optimize` and `estimate` print; `defaults` are the settings of the job that nobody gave.
pub(crate) fn report(plan: &Plan, defaults: &[&str]) -> String {
    let mut parts = vec![question(plan, defaults)];
    if let Some(predicted) = &plan.predicted {
        parts.push(plans(plan, predicted));
        parts.push(arrangement(plan));
        parts.push(time(predicted));
        parts.push(stages(plan, predicted));
        parts.push(memory(predicted) + &hosts(plan, predicted));
        parts.push(traffic(predicted));
    }
    parts.push(search(plan));
    parts.push(warnings(plan));
    parts.retain(|part| !part.is_empty());
    parts.join("\n")
}

/// What was asked.
pub(crate) fn question(plan: &Plan, defaults: &[&str]) -> String {
    let job = &plan.job;
    let tokens = job.sequence as f64 * job.global_batch as f64;
    let settings = [
        ("sequence", format!("sequence {}", job.sequence)),
        ("global batch", format!("global batch {} ({} tokens)", job.global_batch, figures::count(tokens))),
        ("precision", word(&job.precision)),
        ("optimizer", word(&job.optimizer)),
        ("attention", format!("{} attention", word(&job.attention))),
    ];
    let words: Vec<&str> = settings.iter().map(|(_, word)| word.as_str()).collect();
    let mut rows = vec![
        ("model", format!("{}, {}", plan.model.name, parameters(plan))),
        ("cluster", cluster(plan)),
        ("job", words.join(", ")),
    ];
    rows.extend(nodes(plan).map(|nodes| ("nodes", nodes)));
    if let Some(calibration) = &plan.cluster.calibration {
        rows.push(("calibration", measured(calibration)));
    }
    if !defaults.is_empty() {
        rows.push(("defaults", format!("{}: nothing was said of them", defaults.join(", "))));
    }
    list(&rows)
}

/// Parameters of the embedded model, and how many of them are learned if not all are; the plan was checked, so it can
/// be read.
fn parameters(plan: &Plan) -> String {
    let Ok(model) = ir::native::read(&plan.model) else { return String::new() };
    let count = |n: u64| figures::count(n as f64);
    let all = format!("{} parameters", count(model.n_parameters()));
    if model.n_trained() == model.n_parameters() {
        return all;
    }
    format!("{all}, {} of them trained", count(model.n_trained()))
}

/// What was measured, and how much it moves.
fn measured(calibration: &Calibration) -> String {
    let moved = figures::counted(calibration.constants.len() as u64, "constant");
    format!("{moved} from {}", calibration.provenance.join("; "))
}

fn cluster(plan: &Plan) -> String {
    let cluster = plan.cluster.whole_devices();
    let links: Vec<String> = cluster
        .tiers
        .iter()
        .enumerate()
        .map(|(at, tier)| {
            // Groups may have links of their own.
            let mut rates: Vec<String> = (0..cluster.groups.len())
                .map(|group| figures::bandwidth(cluster.link(at, Some(group)).bandwidth_bytes_per_s))
                .collect();
            rates.dedup();
            format!("{} {} within {}", tier.name, rates.join(" and "), figures::grouped(tier.devices))
        })
        .collect();
    let devices = figures::grouped(cluster.n_devices());
    format!("{}, {devices} x {}, {}", cluster.name, device_names(&cluster), links.join(", "))
}

/// Which nodes of another cluster the plan's ranks are, where it has a part of one, or its groups in another order.
fn nodes(plan: &Plan) -> Option<String> {
    let of_group =
        |group: &DeviceGroup| group.nodes.as_ref().map(|nodes| format!("{nodes} with {}", group.device.name));
    let all: Option<Vec<String>> = plan.cluster.groups.iter().map(of_group).collect();
    all.map(|all| all.join(", then "))
}

/// The winner and what it beat.
fn plans(plan: &Plan, predicted: &Prediction) -> String {
    let columns = [
        ("plan", Side::Left),
        ("step time", Side::Right),
        ("MFU", Side::Right),
        ("tokens/s/device", Side::Right),
        ("peak memory", Side::Right),
        ("remark", Side::Left),
    ];
    let remark = if plan.runners_up.is_empty() { "" } else { "fastest" };
    let mut rows = vec![vec![
        plan.roles.to_string(),
        figures::seconds(predicted.step_time_s),
        figures::percent(predicted.mfu),
        figures::three(predicted.tokens_per_s_per_device),
        figures::bytes(predicted.peak_memory_bytes),
        remark.into(),
    ]];
    for other in &plan.runners_up {
        // The model's work per step is the same, so the share of the peak follows from the time.
        let slower = predicted.step_time_s / other.step_time_s;
        rows.push(vec![
            other.roles.to_string(),
            figures::seconds(other.step_time_s),
            figures::percent(predicted.mfu * slower),
            figures::three(predicted.tokens_per_s_per_device * slower),
            "-".into(),
            other.reason.clone(),
        ]);
    }
    table(&columns, &rows)
}

/// The roles, one by one, and the mesh they are on.
pub(crate) fn arrangement(plan: &Plan) -> String {
    let axes: Vec<String> =
        plan.mesh.axes.iter().map(|axis| format!("{} {}", axis.name, axis.size)).collect();
    let mut on = if axes.is_empty() { "one device".into() } else { axes.join(" x ") };
    for alike in plan.stage_meshes.chunk_by(|a, b| a == b).skip(1) {
        let axes: Vec<String> =
            alike[0].axes.iter().map(|axis| format!("{} {}", axis.name, axis.size)).collect();
        on.push_str(&format!(", then of {}", axes.join(" x ")));
    }
    let micro_batches = match plan.shares.is_empty() {
        true => figures::counted(plan.n_micro_batches, "micro-batch").replace("batchs", "batches"),
        false => format!("{} micro-batches", accumulation(&plan.roles)),
    };
    let together = match plan.shares.len() as u64 {
        0 => plan.micro_batch,
        n => plan.micro_batch / n,
    };
    let proofs = plan.entries.iter().map(|entry| (entry.layer.as_str(), entry.proof.as_ref()));
    let mut rows = vec![
        ("roles", degrees(&plan.roles) + &recomputed_layers(plan)),
        ("mesh", format!("{}, each of {on}", figures::counted(plan.n_stages, "stage"))),
        ("schedule", format!("{}, {micro_batches} of {together} sequences{}", plan.schedule, slices(plan))),
        ("proof", proof_words(proofs)),
    ];
    rows.splice(3..3, shares(plan).map(|text| ("shares", text)));
    rows.splice(2..2, ranks_of_devices(plan).map(|text| ("ranks", text)));
    list(&rows)
}

/// `x0 0..2 on a100-sxm-40: 11 micro-batches each, 1.21 s; x0 2..4 on v100-sxm2-32: 5 each, 1.20 s`, where devices of a
/// stage run unequal shares.
fn shares(plan: &Plan) -> Option<String> {
    let axis = plan.mesh.axes.first()?;
    let sequences = plan.micro_batch / axis.size.max(1);
    let one = |share: &SharePrediction| {
        let at: Numbers = share.coordinates.iter().copied().collect();
        let n = figures::counted(share.n_micro_batches, "micro-batch").replace("batchs", "batches");
        format!(
            "{} {at} on {}: {n} of {sequences} each, {}",
            axis.name,
            share.devices.join(" and "),
            figures::seconds(share.pipeline_s)
        )
    };
    let predicted = plan.predicted.as_ref().filter(|predicted| !predicted.shares.is_empty())?;
    Some(predicted.shares.iter().map(one).collect::<Vec<_>>().join("; "))
}

/// `0-2 on a h100-pcie, 3 on a a100-pcie-80`, where ranks share devices.
fn ranks_of_devices(plan: &Plan) -> Option<String> {
    let cluster = &plan.cluster;
    let mut first = 0;
    let one = |group: &DeviceGroup| {
        let ranks: Numbers = (first..first + group.count).collect();
        first += group.count;
        let (whole, each) = (group.whole(), group.ranks_per_device());
        format!("{ranks} on {} x {}, {each} on each", whole.count, whole.device.name)
    };
    cluster.shares_devices().then(|| cluster.groups.iter().map(one).collect::<Vec<_>>().join("; "))
}

/// How many micro-batches a replica runs: as many as all, or between the least and the most.
pub(crate) fn accumulation(roles: &Roles) -> String {
    match roles.shares {
        None => roles.accumulation.to_string(),
        Some([least, most]) => format!("{least} to {most}"),
    }
}

/// `, each in slices of 1536, 1280 and 1280 tokens`, where sequences are cut.
fn slices(plan: &Plan) -> String {
    let lengths: Vec<String> = plan.slices.iter().map(ToString::to_string).collect();
    match lengths.as_slice() {
        [] => String::new(),
        [first, rest @ ..] if rest.iter().all(|length| length == first) => {
            format!(", each in {} slices of {first} tokens", lengths.len())
        }
        [rest @ .., last] => format!(", each in slices of {} and {last} tokens", rest.join(", ")),
    }
}

/// ` in 13 of 32 layers`, where not all layers compute something again; embedding and head apart.
fn recomputed_layers(plan: &Plan) -> String {
    let ends: Vec<&String> = [plan.model.sequence.first(), plan.model.sequence.last()]
        .into_iter()
        .flatten()
        .map(|run| &run.layer)
        .collect();
    let counts = plan.entry_counts();
    let inner = || plan.entries.iter().zip(&counts).filter(|(entry, _)| !ends.contains(&&entry.layer));
    let all: u64 = inner().map(|(_, n)| n).sum();
    let again: u64 =
        inner().filter(|(entry, _)| entry.ops.iter().any(|op| op.recompute)).map(|(_, n)| n).sum();
    if again == 0 || again == all { String::new() } else { format!(" in {again} of {all} layers") }
}

/// Every degree, also those of one.
fn degrees(roles: &Roles) -> String {
    let switch = if roles.sequence_parallel { "on" } else { "off" };
    let mut words = format!(
        "dp {}, tp {} (sp {switch}), cp {}, ep {}, etp {}, pp {}, vpp {}, vocabulary {}, ZeRO-{}",
        roles.dp,
        roles.tp,
        roles.cp,
        roles.ep,
        roles.etp,
        roles.pp,
        roles.vpp,
        roles.vocabulary_parallel,
        roles.zero.stage
    );
    if let Some(devices) = roles.zero.hybrid {
        words.push_str(&format!(" over {devices}"));
    }
    words + &roles.on_host() + &format!(", recompute {}", word(&roles.recompute))
}

/// Where the time goes.
pub(crate) fn time(predicted: &Prediction) -> String {
    let total = predicted.step_time_s;
    let row =
        |(name, part): (String, Seconds)| vec![name, figures::seconds(part), figures::percent(part / total)];
    let mut rows: Vec<Vec<String>> = parts(&predicted.breakdown).into_iter().map(row).collect();
    rows.push(row(("step".into(), total)));
    let columns = [("time of a step", Side::Left), ("seconds", Side::Right), ("share", Side::Right)];
    let figures = [
        format!("{} TFLOP/s per device", figures::three(predicted.model_tflops_per_device)),
        format!("MFU {}", figures::percent(predicted.mfu)),
        format!("{} counting attention as causal", figures::percent(predicted.mfu_causal)),
        format!("HFU {}", figures::percent(predicted.hfu)),
    ];
    let mut text = table(&columns, &rows);
    if let Some(interval) = &predicted.step_time_interval {
        let [least, most] = [interval.least_s, interval.most_s].map(figures::seconds);
        let step = figures::seconds(total);
        text.push_str(&format!("step {step} ({least} to {most}: {})\n", interval.basis));
    }
    text.push_str(&format!("model work: {}\n", figures.join(", ")));
    if let Some(joules) = predicted.energy_per_step_joules {
        text.push_str(&format!("energy of a step: {}\n", figures::energy(joules)));
    }
    if let Some(price) = predicted.cost_per_step {
        text.push_str(&format!("price of a step: {}\n", figures::price(price)));
    }
    if let Some(price) = predicted.cost_per_trillion_tokens {
        text.push_str(&format!("price of 10^12 tokens: {}\n", figures::count(price)));
    }
    if let Some(upkeep) = &predicted.upkeep {
        text.push_str(&format!(
            "goodput {}: a failure every {}, a checkpoint of {} after every {} of training\n",
            figures::percent(upkeep.goodput),
            figures::duration(upkeep.between_failures_s),
            figures::bytes(upkeep.checkpoint_bytes),
            figures::duration(upkeep.checkpoint_interval_s),
        ));
    }
    text
}

/// Parts of the step that take any time, largest first.
pub(crate) fn parts(breakdown: &Breakdown) -> Vec<(String, Seconds)> {
    let named = [
        ("forward", breakdown.compute_forward_s),
        ("backward", breakdown.compute_backward_s),
        ("recomputation", breakdown.recompute_s),
        ("bubble", breakdown.bubble_s),
        ("gradient reduction", breakdown.gradient_sync_s),
        ("parameter gather", breakdown.parameter_gather_s),
        ("optimizer", breakdown.optimizer_s),
        ("optimizer on the host", breakdown.offload_s),
        ("hosts' links, beyond layers", breakdown.host_links_s),
        ("host", breakdown.host_s),
        ("other", breakdown.other_s),
    ];
    let exposed =
        breakdown.exposed_communication_s.iter().map(|(kind, time)| (format!("exposed {kind}"), *time));
    let all = named.into_iter().map(|(name, time)| (name.to_owned(), time)).chain(exposed);
    let mut parts: Vec<(String, Seconds)> = all.filter(|(_, time)| time.0 != 0.0).collect();
    parts.sort_by(|a, b| b.1.0.total_cmp(&a.1.0).then_with(|| a.0.cmp(&b.0)));
    parts
}

/// What hosts and their drives hold, if anything: for a device of the stage where it is most.
pub(crate) fn hosts(plan: &Plan, predicted: &Prediction) -> String {
    let (roles, drives_hold) =
        (&plan.roles, predicted.stages.iter().any(|stage| stage.nvme_bytes > Bytes::ZERO));
    let of_hosts = [
        (roles.offload != Offload::None && !drives_hold, "optimizer states"),
        (roles.offload != Offload::None && drives_hold, "gradients and optimizer states on their way"),
        (roles.kept_on_host != OnHost::None, "activations"),
        (roles.parameters_on_host != OnHost::None, "parameters"),
    ];
    let of_hosts: Vec<&str> =
        of_hosts.into_iter().filter(|(is_there, _)| *is_there).map(|(_, what)| what).collect();
    let of_hosts = match of_hosts.as_slice() {
        [] => String::new(),
        [one] => format!("of {one}"),
        [rest @ .., last] => format!("of {} and {last}", rest.join(", ")),
    };
    let hosts = held_behind(predicted, ("hosts hold", &of_hosts), |stage| stage.host_memory_bytes);
    let drives =
        held_behind(predicted, ("NVMe drives hold", "of optimizer states"), |stage| stage.nvme_bytes);
    hosts + &drives
}

fn held_behind(
    predicted: &Prediction,
    (who, what): (&str, &str),
    of: fn(&StagePrediction) -> Bytes,
) -> String {
    let held = predicted.stages.iter().map(of).enumerate();
    let most = held.max_by(|a, b| a.1.0.total_cmp(&b.1.0).then(b.0.cmp(&a.0)));
    match most.filter(|(_, bytes)| *bytes > Bytes::ZERO) {
        Some((stage, bytes)) => {
            let bytes = figures::bytes(bytes);
            format!("{who} {bytes} {what} for a device of stage {stage}, where it is most\n")
        }
        None => String::new(),
    }
}

/// Time and memory per stage.
fn stages(plan: &Plan, predicted: &Prediction) -> String {
    let listed = listed(&predicted.stages);
    let columns = [
        ("stage", Side::Right),
        ("layers", Side::Right),
        ("forward", Side::Right),
        ("backward", Side::Right),
        ("peak memory", Side::Right),
        ("of", Side::Right),
        ("", Side::Left),
    ];
    let (slowest, fullest) = (slowest(&predicted.stages), fullest(&predicted.stages));
    let rows: Vec<Vec<String>> = listed
        .iter()
        .map(|&at| {
            let stage = &predicted.stages[at];
            let marks = [(slowest, "slowest"), (fullest, "fullest")];
            let marks = marks
                .iter()
                .filter(|(which, _)| plan.n_stages > 1 && *which == Some(at))
                .map(|(_, mark)| (*mark).to_owned());
            let remarks: Vec<String> = devices(plan, at as u64).into_iter().chain(marks).collect();
            vec![
                at.to_string(),
                stage.layers.to_string(),
                figures::seconds(stage.forward_s),
                figures::seconds(stage.backward_s),
                figures::bytes(stage.peak_memory_bytes),
                figures::bytes(stage.capacity_bytes),
                remarks.join(", "),
            ]
        })
        .collect();
    let mut text = table(&columns, &rows);
    let hidden = predicted.stages.len() - listed.len();
    if hidden > 0 {
        text.push_str(&format!(
            "{} between them not shown; --json has all\n",
            figures::counted(hidden as u64, "stage")
        ));
    }
    text.push_str(&own_roles(&predicted.stages));
    text
}

/// Stages in the literature's words where they differ in them, neighbours that are alike in one line.
fn own_roles(stages: &[StagePrediction]) -> String {
    let runs = stages.chunk_by(|a, b| a.roles == b.roles);
    let mut from = 0;
    let mut text = String::new();
    for run in runs {
        let last = from + run.len() - 1;
        if let Some(roles) = &run[0].roles {
            let place =
                if run.len() == 1 { format!("stage {from}") } else { format!("stages {from} to {last}") };
            text.push_str(&format!("{place}: {roles}\n"));
        }
        from = last + 1;
    }
    text
}

/// What a stage stands on, where the devices of the plan differ.
fn devices(plan: &Plan, stage: u64) -> Option<String> {
    let name = |group: &DeviceGroup| group.device.name.clone();
    let all: BTreeSet<String> = plan.cluster.groups.iter().map(name).collect();
    let ranks = plan.cluster_rank(stage, 0)..plan.cluster_rank(stage + 1, 0);
    let own: BTreeSet<String> = plan.cluster.groups_under(ranks).iter().map(name).collect();
    (all.len() > 1).then(|| own.into_iter().collect::<Vec<_>>().join(" + "))
}

/// Stages worth a line.
fn listed(stages: &[StagePrediction]) -> Vec<usize> {
    let n = stages.len();
    if n <= LISTED_STAGES {
        return (0..n).collect();
    }
    let mut listed = vec![0, 1, 2, n - 3, n - 2, n - 1];
    listed.extend(slowest(stages));
    listed.extend(fullest(stages));
    listed.sort_unstable();
    listed.dedup();
    listed
}

/// The stage with the longest forward and backward; the first of equals.
pub(crate) fn slowest(stages: &[StagePrediction]) -> Option<usize> {
    first_largest(stages, |stage| (stage.forward_s + stage.backward_s).0)
}

/// The stage whose devices are fullest for what they have; the first of equals.
pub(crate) fn fullest(stages: &[StagePrediction]) -> Option<usize> {
    first_largest(stages, filled)
}

/// How much of a device of the stage is filled: above one it overflows.
pub(crate) fn filled(stage: &StagePrediction) -> f64 {
    stage.peak_memory_bytes / stage.capacity_bytes
}

fn first_largest(stages: &[StagePrediction], of: impl Fn(&StagePrediction) -> f64) -> Option<usize> {
    (0..stages.len()).rev().max_by(|&a, &b| of(&stages[a]).total_cmp(&of(&stages[b])))
}

/// What the fullest stage's memory is full of.
pub(crate) fn memory(predicted: &Prediction) -> String {
    let Some(at) = fullest(&predicted.stages) else { return String::new() };
    let stage = &predicted.stages[at];
    let mut parts: Vec<(&String, Bytes)> = stage.memory.iter().map(|(name, bytes)| (name, *bytes)).collect();
    parts.retain(|(_, bytes)| bytes.0 != 0.0);
    parts.sort_by(|a, b| b.1.0.total_cmp(&a.1.0).then_with(|| a.0.cmp(b.0)));
    let capacity = stage.capacity_bytes;
    let row = |name: &str, bytes: Bytes| {
        vec![name.to_owned(), figures::bytes(bytes), figures::percent(bytes / capacity)]
    };
    let mut rows: Vec<Vec<String>> = parts.iter().map(|(name, bytes)| row(name, *bytes)).collect();
    rows.push(row("peak", stage.peak_memory_bytes));
    let title = format!("memory of a device of stage {at}");
    table(&[(&title, Side::Left), ("bytes", Side::Right), ("of capacity", Side::Right)], &rows)
}

fn traffic(predicted: &Prediction) -> String {
    let sent: &BTreeMap<String, Bytes> = &predicted.bytes_per_tier;
    let rows: Vec<Vec<String>> =
        sent.iter().map(|(tier, bytes)| vec![tier.clone(), figures::bytes(*bytes)]).collect();
    if rows.is_empty() {
        return String::new();
    }
    table(&[("link", Side::Left), ("sent by a device per step", Side::Right)], &rows)
}

/// How the search went.
pub(crate) fn search(plan: &Plan) -> String {
    let Some(search) = &plan.search else { return String::new() };
    list(&[
        (
            "search",
            format!(
                "{}: {} worked out, {} ruled out by their bound, {} do not fit",
                figures::counted(search.n_candidates, "candidate"),
                figures::grouped(search.n_simulated),
                figures::grouped(search.n_bounded),
                figures::grouped(search.n_unfit)
            ),
        ),
        (
            "bound",
            format!("{} (gap {})", figures::seconds(search.lower_bound_s), figures::percent(search.gap)),
        ),
        ("", search.proof.clone()),
    ])
}

fn warnings(plan: &Plan) -> String {
    plan.warnings.iter().map(|warning| format!("warning: {warning}\n")).collect()
}
