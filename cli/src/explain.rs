//! `planner explain`: where the time and the memory of a plan go, what each axis does, and why the others lost.

use std::collections::BTreeMap;

use cost_model::offload::NodeMemory;
use ir::mesh::AxisId;
use ir::names::axes::axis_names;
use ir::names::{Offload, OnHost, OnNvme};
use ir::native::{LayerDocument, Length};
use ir::plan::Plan;
use ir::plan::check::OpenPlan;
use ir::plan::entry::Entry;
use ir::plan::prediction::{Prediction, RunnerUp};
use serde::Serialize;

use crate::args::ExplainArgs;
use crate::explain_overlap::{self, Overlap, overlaps};
use crate::failure::Failure;
use crate::figures;
use crate::memory::{fullest_host, overflows};
use crate::output::json;
use crate::priced;
use crate::report;
use crate::table::{Side, list, table};
use crate::terminal::Terminal;
use crate::why_not::WhyNot;

/// What `explain --json` prints.
#[derive(Serialize)]
struct Explanation<'a> {
    model: &'a str,
    cluster: &'a str,
    roles: &'a ir::names::Roles,
    #[serde(skip_serializing_if = "Option::is_none")]
    bottleneck: Option<Bottleneck>,
    time: Vec<Share>,
    memory: Vec<Share>,
    names: Vec<AxisNames>,
    axes: Vec<AxisUseSummary>,
    recomputed: Vec<Recomputed>,
    overlap: &'a [Overlap],
    runners_up: &'a [RunnerUp],
    #[serde(skip_serializing_if = "Option::is_none")]
    proof: Option<&'a str>,
    warnings: &'a [String],
}

/// The stage that sets the pace, and the one that is fullest.
#[derive(Serialize)]
struct Bottleneck {
    slowest_stage: usize,
    fullest_stage: usize,
    /// Of its capacity.
    fullest_share: f64,
    /// The same of the memory of a host, or its drives, where they hold anything: of the fullest.
    #[serde(skip_serializing_if = "Option::is_none")]
    fullest_host_share: Option<f64>,
}

/// A part of a whole: seconds of the step, or bytes of the fullest device.
#[derive(Serialize)]
struct Share {
    part: String,
    amount: f64,
    share: f64,
}

/// What the literature calls what an axis does.
#[derive(Serialize)]
struct AxisNames {
    axis: String,
    devices: u64,
    link: String,
    /// Name and source.
    names: Vec<(&'static str, &'static str)>,
}

/// What the operators of one layer kind do along one axis.
#[derive(Serialize)]
struct AxisUseSummary {
    axis: String,
    devices: u64,
    link: String,
    layer: String,
    /// Loop and how many operators cut it, most first; `-` is no loop.
    cuts: Vec<(String, usize)>,
    /// Parameters whose parameter, gradient and optimizer state are cut along the axis between uses.
    stored_cut: [usize; 3],
    n_parameters: usize,
}

/// Operators of a layer kind that backward runs again.
#[derive(Serialize)]
struct Recomputed {
    layer: String,
    /// Layers in which they are, of so many of the kind.
    n_layers: u64,
    of_layers: u64,
    operators: Vec<String>,
}

/// Explains a plan.
pub(crate) fn run(args: &ExplainArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let (plan, opened) = priced::plan(&args.plan, terminal)?;
    if let Some(choices) = &args.why_not {
        let answer = WhyNot::of((&args.plan, &plan, &opened), choices, &args.threads)?;
        let text = if args.json.json { json(&answer)? } else { answer.text() };
        return Ok(write!(terminal.out, "{text}")?);
    }
    let names = names(&plan, &opened);
    let overlaps = overlaps(&args.plan, (&plan, &opened))?;
    let text = match args.json.json {
        true => json(&explanation((&plan, &opened), names, &overlaps))?,
        false => describe((&plan, &opened), &names, &overlaps),
    };
    write!(terminal.out, "{text}")?;
    Ok(())
}

fn explanation<'a>(
    (plan, opened): (&'a Plan, &OpenPlan),
    names: Vec<AxisNames>,
    overlap: &'a [Overlap],
) -> Explanation<'a> {
    let predicted = plan.predicted.as_ref();
    Explanation {
        model: &plan.model.name,
        cluster: &plan.cluster.name,
        roles: &plan.roles,
        bottleneck: predicted
            .and_then(|predicted| bottleneck(predicted, fullest_host(plan, opened, predicted).as_ref())),
        time: predicted.map(time_shares).unwrap_or_default(),
        memory: predicted.map(memory_shares).unwrap_or_default(),
        names,
        axes: axes(plan),
        recomputed: recomputed(plan),
        overlap,
        runners_up: &plan.runners_up,
        proof: plan.search.as_ref().map(|search| search.proof.as_str()),
        warnings: &plan.warnings,
    }
}

/// The literature's names of every axis of more than one device.
fn names(plan: &Plan, opened: &OpenPlan) -> Vec<AxisNames> {
    let arrangement = opened.arrangement(plan);
    let of = |axis: AxisId| AxisNames {
        axis: plan.mesh.axes[axis.0].name.clone(),
        devices: plan.mesh.size(axis),
        link: link(plan, axis),
        names: axis_names(&arrangement, axis).iter().map(|named| (named.name, named.source)).collect(),
    };
    plan.mesh.axis_ids().filter(|&axis| plan.mesh.size(axis) > 1).map(of).collect()
}

fn bottleneck(predicted: &Prediction, host: Option<&NodeMemory>) -> Option<Bottleneck> {
    let fullest_stage = report::fullest(&predicted.stages)?;
    let stage = &predicted.stages[fullest_stage];
    Some(Bottleneck {
        slowest_stage: report::slowest(&predicted.stages)?,
        fullest_stage,
        fullest_share: stage.peak_memory_bytes / stage.capacity_bytes,
        fullest_host_share: host.map(|host| host.needed / host.capacity),
    })
}

fn time_shares(predicted: &Prediction) -> Vec<Share> {
    let share = |(part, time): (String, ir::units::Seconds)| Share {
        part,
        amount: time.0,
        share: time / predicted.step_time_s,
    };
    report::parts(&predicted.breakdown).into_iter().map(share).collect()
}

fn memory_shares(predicted: &Prediction) -> Vec<Share> {
    let Some(stage) = report::fullest(&predicted.stages).map(|at| &predicted.stages[at]) else {
        return Vec::new();
    };
    let mut shares: Vec<Share> = stage
        .memory
        .iter()
        .filter(|(_, bytes)| bytes.0 != 0.0)
        .map(|(part, bytes)| Share {
            part: part.clone(),
            amount: bytes.0,
            share: *bytes / stage.capacity_bytes,
        })
        .collect();
    shares.sort_by(|a, b| b.amount.total_cmp(&a.amount).then_with(|| a.part.cmp(&b.part)));
    shares
}

/// What every axis does in every entry; entries that say the same of one layer kind are told once.
fn axes(plan: &Plan) -> Vec<AxisUseSummary> {
    let mut list: Vec<AxisUseSummary> = Vec::new();
    for (at, axis) in plan.mesh.axes.iter().enumerate().filter(|(_, axis)| axis.size > 1) {
        for (number, entry) in plan.entries.iter().enumerate() {
            let summary = AxisUseSummary {
                axis: axis.name.clone(),
                devices: plan.mesh_of_entry(number).axes[at].size,
                link: link(plan, AxisId(at)),
                layer: entry.layer.clone(),
                cuts: cuts(entry, at),
                stored_cut: stored(entry, &axis.name),
                n_parameters: entry.parameters.len(),
            };
            let same = |other: &AxisUseSummary| {
                (&other.axis, other.devices, &other.layer, &other.cuts, other.stored_cut)
                    == (&summary.axis, summary.devices, &summary.layer, &summary.cuts, summary.stored_cut)
            };
            if !list.iter().any(same) {
                list.push(summary);
            }
        }
    }
    list
}

/// Name of the innermost links that join all devices along an axis.
fn link(plan: &Plan, axis: AxisId) -> String {
    let reach = plan.mesh.stride(axis).saturating_mul(plan.mesh.size(axis));
    let tiers = &plan.cluster.tiers;
    let found = tiers.iter().find(|tier| tier.devices >= reach).or(tiers.last());
    found.map_or("-".into(), |tier| tier.name.clone())
}

fn cuts(entry: &Entry, axis: usize) -> Vec<(String, usize)> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for word in entry.ops.iter().filter_map(|op| op.axes.get(axis)) {
        *counts.entry(word).or_insert(0) += 1;
    }
    let mut cuts: Vec<(String, usize)> = counts.into_iter().map(|(word, n)| (word.to_owned(), n)).collect();
    // Loops before the operators that cut none; a stable sort keeps equal counts in the order of names.
    cuts.sort_by_key(|(word, n)| (word == "-", std::cmp::Reverse(*n)));
    cuts
}

fn stored(entry: &Entry, axis: &str) -> [usize; 3] {
    let count = |axes: &dyn Fn(&ir::plan::entry::ParameterEntry) -> &Vec<String>| {
        entry.parameters.iter().filter(|parameter| axes(parameter).iter().any(|name| name == axis)).count()
    };
    [count(&|p| &p.parameter), count(&|p| &p.gradient), count(&|p| &p.optimizer)]
}

fn recomputed(plan: &Plan) -> Vec<Recomputed> {
    let counts = plan.entry_counts();
    let placed = || plan.entries.iter().zip(&counts);
    let mut list: Vec<Recomputed> = Vec::new();
    for (entry, &n_layers) in placed() {
        let operators: Vec<String> =
            entry.ops.iter().filter(|op| op.recompute).map(|op| op.op.clone()).collect();
        let known = list.iter_mut().find(|other| other.layer == entry.layer && other.operators == operators);
        match known {
            Some(known) => known.n_layers += n_layers,
            None if operators.is_empty() => {}
            None => {
                let of_layers =
                    placed().filter(|(other, _)| other.layer == entry.layer).map(|(_, n)| n).sum();
                list.push(Recomputed { layer: entry.layer.clone(), n_layers, of_layers, operators });
            }
        }
    }
    list
}

fn describe((plan, opened): (&Plan, &OpenPlan), names: &[AxisNames], overlaps: &[Overlap]) -> String {
    let mut parts = vec![report::question(plan, &[])];
    if let Some(predicted) = &plan.predicted {
        parts.push(verdict(plan, predicted, fullest_host(plan, opened, predicted).as_ref()));
    }
    parts.push(report::arrangement(plan));
    parts.push(names_table(names));
    parts.push(axes_table(plan));
    parts.push(recompute_lines(plan));
    if let Some(predicted) = &plan.predicted {
        parts.push(report::time(predicted));
        parts.push(explain_overlap::text(overlaps));
        parts.push(report::memory(predicted) + &report::hosts(plan, predicted));
    }
    parts.push(runners_up(plan));
    parts.push(report::search(plan));
    parts.push(glossary(plan));
    parts.retain(|part| !part.is_empty());
    parts.join("\n")
}

/// The plan in two sentences.
fn verdict(plan: &Plan, predicted: &Prediction, host: Option<&NodeMemory>) -> String {
    let Some(found) = bottleneck(predicted, host) else { return String::new() };
    let mut text = format!(
        "A step takes {}; {} of the peak rate goes into the model.\n",
        figures::seconds(predicted.step_time_s),
        figures::percent(predicted.mfu)
    );
    if let Some(largest) = time_shares(predicted).iter().find(|share| !is_work(&share.part)) {
        text.push_str(&format!(
            "What costs most besides the model's own work is {}: {}.\n",
            largest.part,
            figures::percent(largest.share)
        ));
    }
    if plan.n_stages > 1 {
        text.push_str(&format!("Stage {} sets the pace. ", found.slowest_stage));
    }
    text.push_str(&format!(
        "Memory is fullest on stage {}: {} of what a device has",
        found.fullest_stage,
        figures::percent(found.fullest_share)
    ));
    if let Some(largest) = memory_shares(predicted).first() {
        text.push_str(&format!(", {} of it {}", figures::percent(largest.share), largest.part));
    }
    text.push_str(".\n");
    if let (Some(host), Some(share)) = (host, found.fullest_host_share) {
        text.push_str(&format!(
            "A node of stage {} has {} of what it may in {}.\n",
            host.stage,
            figures::percent(share),
            host.store.term()
        ));
    }
    if predicted.stages.iter().any(overflows) || host.is_some_and(|host| !host.fits()) {
        text.push_str("It does not fit.\n");
    }
    text
}

fn is_work(part: &str) -> bool {
    part == "forward" || part == "backward"
}

fn names_table(names: &[AxisNames]) -> String {
    let columns = [
        ("axis", Side::Left),
        ("devices", Side::Right),
        ("link", Side::Left),
        ("in the literature", Side::Left),
        ("described by", Side::Left),
    ];
    let mut rows = Vec::new();
    for axis in names {
        for (i, (name, source)) in axis.names.iter().enumerate() {
            let once = |text: &str| if i == 0 { text.to_owned() } else { String::new() };
            rows.push(vec![
                once(&axis.axis),
                once(&axis.devices.to_string()),
                once(&axis.link),
                (*name).to_owned(),
                (*source).to_owned(),
            ]);
        }
    }
    if rows.is_empty() { String::new() } else { table(&columns, &rows) }
}

fn axes_table(plan: &Plan) -> String {
    let columns = [
        ("axis", Side::Left),
        ("devices", Side::Right),
        ("link", Side::Left),
        ("layer", Side::Left),
        ("operators that cut each loop", Side::Left),
        ("parameters cut in storage", Side::Left),
    ];
    let rows: Vec<Vec<String>> = axes(plan)
        .iter()
        .map(|axis| {
            let document = plan.model.layers.iter().find(|layer| layer.name == axis.layer);
            let words = axis.cuts.iter().map(|(word, n)| format!("{n} {}", loop_name(document, word)));
            vec![
                axis.axis.clone(),
                axis.devices.to_string(),
                axis.link.clone(),
                axis.layer.clone(),
                words.collect::<Vec<_>>().join(", "),
                storage_words(axis),
            ]
        })
        .collect();
    if rows.is_empty() { String::new() } else { table(&columns, &rows) }
}

fn storage_words(axis: &AxisUseSummary) -> String {
    let names = ["parameter", "gradient", "optimizer state"];
    let cut = names.iter().zip(axis.stored_cut).filter(|(_, n)| *n > 0);
    let words: Vec<String> = cut.map(|(name, n)| format!("{name} {n}")).collect();
    if words.is_empty() { "none".into() } else { format!("{} of {}", words.join(", "), axis.n_parameters) }
}

/// `b (batch)`, `s (sequence)`, `f (14336)`: a loop with what its length is.
fn loop_name(layer: Option<&LayerDocument>, word: &str) -> String {
    match word {
        "-" => return "none".into(),
        "defer" | "through" | "ring" => return word.into(),
        _ => {}
    }
    let length =
        layer.and_then(|layer| layer.dims.iter().find(|dim| dim.name == word)).map(|dim| &dim.length);
    match length {
        Some(Length::MicroBatch) => format!("{word} (batch)"),
        Some(Length::Sequence) => format!("{word} (sequence)"),
        Some(Length::Slots(_) | Length::Capacity { .. }) => format!("{word} (slots of an expert)"),
        Some(Length::Fixed(n) | Length::Uneven(n)) => format!("{word} ({n})"),
        None => word.into(),
    }
}

fn recompute_lines(plan: &Plan) -> String {
    let line = |one: &Recomputed| {
        format!(
            "computed again in backward of {} of {} `{}`: {}\n",
            one.n_layers,
            one.of_layers,
            one.layer,
            one.operators.join(" ")
        )
    };
    recomputed(plan).iter().map(line).collect()
}

fn runners_up(plan: &Plan) -> String {
    if plan.runners_up.is_empty() {
        return String::new();
    }
    let columns = [("runner-up", Side::Left), ("step time", Side::Right), ("why it lost", Side::Left)];
    let row = |other: &RunnerUp| {
        vec![other.roles.to_string(), figures::seconds(other.step_time_s), other.reason.clone()]
    };
    let rows: Vec<Vec<String>> = plan.runners_up.iter().map(row).collect();
    table(&columns, &rows)
}

/// How to read the words above, as far as they occur.
fn glossary(plan: &Plan) -> String {
    let roles = &plan.roles;
    let words = [
        (roles.dp > 1, "dp", "replicas that share the batch"),
        (roles.tp > 1, "tp", "devices that share every matrix product; sp: they share the tokens in between"),
        (roles.cp > 1, "cp", "devices that share the tokens of a sequence"),
        (roles.ep > 1, "ep", "devices that share the experts; etp: that share one expert's products"),
        (roles.pp > 1, "pp", "stages that hold consecutive layers; vpp: pieces of a stage, taken in turn"),
        (
            roles.zero.stage > 0,
            "ZeRO",
            "between uses cut over replicas: 1 optimizer state, 2 also gradients, 3 also parameters",
        ),
        (
            roles.offload != Offload::None && roles.optimizer_on_nvme != OnNvme::All,
            "on the host",
            "states of the optimizer in the memory of the node's host, whose processors update",
        ),
        (
            roles.optimizer_on_nvme != OnNvme::None,
            "on nvme",
            "states of the optimizer on the NVMe drives of the node: read into its host's memory, updated there and written back, once per step",
        ),
        (
            roles.kept_on_host != OnHost::None,
            "activations on the host",
            "what a layer keeps for backward leaves for the memory of the node's host behind its forward, and is fetched before its backward",
        ),
        (
            roles.parameters_on_host != OnHost::None,
            "parameters on the host",
            "a layer's parameters lie in the memory of the node's host and are fetched for every use",
        ),
        (true, "micro-batch", "sequences of one replica at a time x how often per step"),
        (
            plan.n_slices() > 1,
            "slice",
            "part of every sequence that a stage runs at a time, after those before it",
        ),
        (roles.pp > 1, "bubble", "time in which a stage waits for others at the beginning and end of a step"),
        (true, "MFU", "the model's FLOPs over what the devices could do; HFU counts recomputed ones too"),
        (true, "exposed", "communication that computation does not hide"),
    ];
    let rows: Vec<(&str, String)> = words
        .into_iter()
        .filter(|(occurs, _, _)| *occurs)
        .map(|(_, word, text)| (word, text.to_owned()))
        .collect();
    list(&rows)
}
