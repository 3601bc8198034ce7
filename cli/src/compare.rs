//! `planner compare`: plans side by side, term by term, and in words what one has that another lacks.

use std::collections::BTreeMap;

use ir::graph::Model;
use ir::plan::Plan;
use ir::plan::check::OpenPlan;
use ir::units::{Bytes, Seconds};
use planner::chosen::asked;
use serde::Serialize;

use crate::args::CompareArgs;
use crate::failure::Failure;
use crate::figures;
use crate::memory::Memory;
use crate::output::json;
use crate::priced;
use crate::report;
use crate::table::{Side, table};
use crate::terminal::Terminal;

/// Terms that are told in a sentence: more would not be read.
const TOLD: usize = 3;

/// What hosts hold: told only where some plan has it.
const OFFLOAD: &str = "offload";
const NVME: &str = "of these on NVMe drives";
const KEPT: &str = "activations on the host";
const PARAMETERS: &str = "parameters on the host";

/// What is chosen, in the order in which it is told.
const CHOICES: [&str; 18] = [
    "devices",
    "dp",
    "tp",
    "sequence parallel",
    "cp",
    "ep",
    "etp",
    "pp",
    "vpp",
    "ZeRO",
    OFFLOAD,
    NVME,
    KEPT,
    PARAMETERS,
    "recompute",
    "micro-batch",
    "schedule",
    "mesh",
];

/// Plans side by side.
#[derive(Serialize)]
pub(crate) struct Comparison {
    plans: Vec<Column>,
    /// What the others have that the first lacks, in words.
    differences: Vec<String>,
}

/// A plan that is compared, with a prediction.
pub(crate) struct Named<'p> {
    pub(crate) name: &'p str,
    pub(crate) plan: &'p Plan,
    pub(crate) opened: &'p OpenPlan,
}

/// One plan.
#[derive(Serialize)]
struct Column {
    plan: String,
    model: String,
    cluster: String,
    sequence: u64,
    global_batch: u64,
    choices: BTreeMap<&'static str, String>,
    step_time_s: f64,
    mfu: f64,
    tokens_per_s_per_device: f64,
    /// Seconds of the step by what they go into.
    time: BTreeMap<String, f64>,
    fullest_stage: usize,
    peak_memory_bytes: f64,
    capacity_bytes: f64,
    /// What overflows, if anything does.
    #[serde(skip_serializing_if = "Option::is_none")]
    overflow: Option<String>,
    /// Bytes of the fullest device by category.
    memory: BTreeMap<String, f64>,
    /// Bytes that a device sends per step.
    bytes_per_tier: BTreeMap<String, f64>,
}

/// Compares plan files, each priced by what it says.
pub(crate) fn run(args: &CompareArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    if args.plans.len() < 2 {
        let hint = "for example `planner compare plan.json other.json`";
        return Err(Failure::argument_with_hint("there is nothing to compare one plan with", hint));
    }
    let mut plans = Vec::new();
    for file in &args.plans {
        plans.push((file, priced::plan(file, terminal)?));
    }
    let named: Vec<Named<'_>> =
        plans.iter().map(|(name, (plan, opened))| Named { name, plan, opened }).collect();
    let comparison = Comparison::of(&named)?;
    let text = if args.json.json { json(&comparison)? } else { comparison.text() };
    write!(terminal.out, "{text}")?;
    Ok(())
}

impl Comparison {
    /// Of several plans.
    pub(crate) fn of(plans: &[Named<'_>]) -> Result<Self, Failure> {
        let columns: Vec<Column> = plans.iter().map(Column::of).collect::<Result<_, _>>()?;
        let unfit = columns
            .first()
            .and_then(|first| Some(format!("{} does not fit: {}.", first.plan, first.overflow.as_ref()?)));
        let others = columns.iter().skip(1).flat_map(|other| differences(&columns[0], other));
        let differences = unlike(plans).into_iter().chain(unfit).chain(others).collect();
        Ok(Self { plans: columns, differences })
    }

    /// Tables and words.
    pub(crate) fn text(&self) -> String {
        let mut parts = vec![
            self.table("", |column, name| column.words(name), &self.rows_of_choices()),
            self.amounts("time of a step", "step", |column| (&column.time, column.step_time_s), seconds),
            self.amounts("memory of the fullest device", "peak", |c| (&c.memory, c.peak_memory_bytes), bytes),
        ];
        if self.plans.iter().any(|column| !column.bytes_per_tier.is_empty()) {
            let all = |column: &Column| column.bytes_per_tier.values().sum();
            parts.push(self.amounts(
                "sent by a device per step",
                "all",
                |c| (&c.bytes_per_tier, all(c)),
                bytes,
            ));
        }
        parts.push(self.differences.iter().map(|words| format!("{words}\n")).collect());
        parts.retain(|part| !part.is_empty());
        parts.join("\n")
    }

    fn rows_of_choices(&self) -> Vec<&'static str> {
        let is_told =
            |name: &str, word: &String| word != "none" || ![OFFLOAD, NVME, KEPT, PARAMETERS].contains(&name);
        let says = |name: &&str| {
            self.plans.iter().any(|column| column.choices.get(name).is_some_and(|word| is_told(name, word)))
        };
        ["model", "cluster", "job"].into_iter().chain(CHOICES.into_iter().filter(says)).collect()
    }

    fn table(&self, title: &str, cell: impl Fn(&Column, &str) -> String, rows: &[&str]) -> String {
        let mut columns = vec![(title, Side::Left)];
        columns.extend(self.plans.iter().map(|column| (column.plan.as_str(), Side::Left)));
        let row = |name: &&str| {
            let cells = self.plans.iter().map(|column| cell(column, name));
            std::iter::once((*name).to_owned()).chain(cells).collect()
        };
        table(&columns, &rows.iter().map(row).collect::<Vec<Vec<String>>>())
    }

    /// Amounts by name, the largest first, their sum, and of two plans the difference.
    fn amounts<'a>(
        &'a self,
        title: &str,
        sum: &str,
        of: impl Fn(&'a Column) -> (&'a BTreeMap<String, f64>, f64),
        word: fn(f64) -> String,
    ) -> String {
        let mut largest: BTreeMap<&str, f64> = BTreeMap::new();
        for (name, amount) in self.plans.iter().flat_map(|column| of(column).0) {
            let most = largest.entry(name).or_insert(0.0);
            *most = most.max(*amount);
        }
        let mut names: Vec<(&str, f64)> = largest.into_iter().filter(|(_, most)| *most > 0.0).collect();
        names.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(b.0)));
        let two = self.plans.len() == 2;
        let row = |name: &str, amounts: Vec<f64>| {
            let mut cells = vec![name.to_owned()];
            cells.extend(amounts.iter().map(|amount| word(*amount)));
            cells.extend(two.then(|| signed(apart(amounts[0], amounts[1]), word)));
            cells
        };
        let named = |(name, _): &(&str, f64)| {
            let amount = |column: &'a Column| of(column).0.get(*name).copied().unwrap_or(0.0);
            row(name, self.plans.iter().map(amount).collect())
        };
        let mut rows: Vec<Vec<String>> = names.iter().map(named).collect();
        rows.push(row(sum, self.plans.iter().map(|column| of(column).1).collect()));
        let mut columns = vec![(title, Side::Left)];
        columns.extend(self.plans.iter().map(|column| (column.plan.as_str(), Side::Right)));
        columns.extend(two.then_some(("difference", Side::Right)));
        table(&columns, &rows)
    }
}

impl Column {
    fn of(&Named { name, plan, opened }: &Named<'_>) -> Result<Self, Failure> {
        let none = || Failure::bug("a plan that is compared has no prediction");
        let predicted = plan.predicted.as_ref().ok_or_else(none)?;
        let fullest = report::fullest(&predicted.stages).ok_or_else(none)?;
        let stage = &predicted.stages[fullest];
        let amounts =
            |map: &BTreeMap<String, Bytes>| map.iter().map(|(name, n)| (name.clone(), n.0)).collect();
        let time = report::parts(&predicted.breakdown);
        Ok(Self {
            plan: name.to_owned(),
            model: plan.model.name.clone(),
            cluster: plan.cluster.name.clone(),
            sequence: plan.job.sequence,
            global_batch: plan.job.global_batch,
            choices: choices(plan),
            step_time_s: predicted.step_time_s.0,
            mfu: predicted.mfu,
            tokens_per_s_per_device: predicted.tokens_per_s_per_device,
            time: time.into_iter().map(|(name, time)| (name, time.0)).collect(),
            fullest_stage: fullest,
            peak_memory_bytes: stage.peak_memory_bytes.0,
            capacity_bytes: stage.capacity_bytes.0,
            overflow: Memory::of(plan, opened, predicted).and_then(|memory| memory.overflow()),
            memory: amounts(&stage.memory),
            bytes_per_tier: amounts(&predicted.bytes_per_tier),
        })
    }

    fn words(&self, name: &str) -> String {
        match name {
            "model" => self.model.clone(),
            "cluster" => self.cluster.clone(),
            "job" => format!("sequence {}, global batch {}", self.sequence, self.global_batch),
            _ => self.choices.get(name).cloned().unwrap_or_else(|| "-".into()),
        }
    }
}

/// What a plan chooses, in the literature's words; degrees that are one where nobody asks are left out.
fn choices(plan: &Plan) -> BTreeMap<&'static str, String> {
    let roles = &plan.roles;
    let axes: Vec<String> = plan.mesh.axes.iter().map(|axis| axis.size.to_string()).collect();
    let hybrid = roles.zero.hybrid.map_or(String::new(), |devices| format!(" over {devices}"));
    let switch = if roles.sequence_parallel { "on" } else { "off" };
    let all = [
        ("devices", plan.n_whole_devices().to_string()),
        ("dp", roles.dp.to_string()),
        ("tp", roles.tp.to_string()),
        ("sequence parallel", switch.into()),
        ("cp", roles.cp.to_string()),
        ("ep", roles.ep.to_string()),
        ("etp", roles.etp.to_string()),
        ("pp", roles.pp.to_string()),
        ("vpp", roles.vpp.to_string()),
        ("ZeRO", format!("{}{hybrid}", roles.zero.stage)),
        (OFFLOAD, crate::clusters::word(&roles.offload)),
        (NVME, crate::clusters::word(&roles.optimizer_on_nvme)),
        (KEPT, crate::clusters::word(&roles.kept_on_host)),
        (PARAMETERS, crate::clusters::word(&roles.parameters_on_host)),
        ("recompute", crate::clusters::word(&roles.recompute)),
        ("micro-batch", format!("{} x {}", roles.micro_batch, report::accumulation(roles))),
        ("schedule", plan.schedule.to_string()),
        ("mesh", if axes.is_empty() { "1".into() } else { axes.join(" x ") }),
    ];
    all.into_iter().collect()
}

/// Which plans are for a model or a cluster that bears the name of the first plan's and is another.
fn unlike(plans: &[Named<'_>]) -> Vec<String> {
    let models: Vec<Model> = plans.iter().map(|named| asked(named.opened)).collect();
    let told = |what: &str, is_other: &dyn Fn(usize) -> bool| {
        let names: Vec<&str> = (1..plans.len()).filter(|&at| is_other(at)).map(|at| plans[at].name).collect();
        let list = names.join(", ");
        (!names.is_empty()).then(|| format!("The {what} of {list} bears the same name and is another one."))
    };
    let other_model = |at: usize| models[at].name == models[0].name && models[at] != models[0];
    let cluster = |at: usize| &plans[at].plan.cluster;
    let other_cluster = |at| cluster(at).name == cluster(0).name && cluster(at) != cluster(0);
    told("model", &other_model).into_iter().chain(told("cluster", &other_cluster)).collect()
}

/// What another plan has that the first lacks, in sentences.
fn differences(first: &Column, other: &Column) -> Vec<String> {
    let mut list = Vec::new();
    let changed = |name: &&str| first.words(name) != other.words(name);
    let told = |name: &str| format!("{name} {} instead of {}", other.words(name), first.words(name));
    let asked: Vec<String> =
        ["model", "cluster", "job"].iter().filter(|name| changed(name)).map(|n| told(n)).collect();
    if !asked.is_empty() {
        list.push(format!("{} answers another question: {}.", other.plan, asked.join("; ")));
    }
    let chosen: Vec<String> = CHOICES.iter().filter(|name| changed(name)).map(|name| told(name)).collect();
    list.push(match chosen.as_slice() {
        [] => format!("{} has the same roles as {}.", other.plan, first.plan),
        _ => format!("{} has {}.", other.plan, chosen.join(", ")),
    });
    let (mine, its) = (first.step_time_s, other.step_time_s);
    let slower = if its >= mine { "longer" } else { "less" };
    let by = format!("{} ({})", seconds((its - mine).abs()), figures::percent((its / mine - 1.0).abs()));
    let time = largest(&first.time, &other.time, seconds);
    list.push(if apart(mine, its) == 0.0 {
        format!("Both take {}.", seconds(mine))
    } else {
        format!("A step of it takes {by} {slower}{time}.")
    });
    let (mine, its) = (first.peak_memory_bytes, other.peak_memory_bytes);
    let more = if its >= mine { "more" } else { "less" };
    if apart(mine, its) != 0.0 {
        let by = bytes((its - mine).abs());
        list.push(format!(
            "Its fullest device holds {by} {more}{}.",
            largest(&first.memory, &other.memory, bytes)
        ));
    }
    list.extend(other.overflow.iter().map(|what| format!("It does not fit: {what}.")));
    list
}

/// `: +1.38 s bubble, -202 ms backward`: where a difference comes from.
fn largest(first: &BTreeMap<String, f64>, other: &BTreeMap<String, f64>, word: fn(f64) -> String) -> String {
    let names: std::collections::BTreeSet<&String> = first.keys().chain(other.keys()).collect();
    let amount = |map: &BTreeMap<String, f64>, name: &String| map.get(name).copied().unwrap_or(0.0);
    let mut terms: Vec<(&String, f64)> =
        names.into_iter().map(|name| (name, apart(amount(first, name), amount(other, name)))).collect();
    terms.retain(|(_, difference)| *difference != 0.0);
    terms.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()).then(a.0.cmp(b.0)));
    let words =
        terms.iter().take(TOLD).map(|(name, difference)| format!("{} {name}", signed(*difference, word)));
    let words: Vec<String> = words.collect();
    if words.is_empty() { String::new() } else { format!(": {}", words.join(", ")) }
}

/// How much more the second amount is; nothing where they are sums of the same in another order.
fn apart(first: f64, second: f64) -> f64 {
    const SAME: f64 = 1e-9;
    let apart = second - first;
    if apart.abs() <= SAME * first.abs().max(second.abs()) { 0.0 } else { apart }
}

fn signed(amount: f64, word: fn(f64) -> String) -> String {
    match amount {
        0.0 => "-".into(),
        more if more > 0.0 => format!("+{}", word(more)),
        less => format!("-{}", word(-less)),
    }
}

fn seconds(amount: f64) -> String {
    figures::seconds(Seconds(amount))
}

fn bytes(amount: f64) -> String {
    figures::bytes(Bytes(amount))
}
