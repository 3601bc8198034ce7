//! `planner sweep`: one question asked many times with other numbers, into a file that a second run goes on with.

use std::collections::BTreeMap;

use frontends::{Size, rescale};
use indicatif::ProgressBar as Bar;
use ir::cluster_limits::{BYTES_PER_S, MEMORY_BYTES, Range};
use ir::plan::Plan;
use ir::units::{BytesPerSecond, GIB, Seconds};
use planner::request::{Job, NoPlan, Request, Stop};
use serde::{Deserialize, Serialize};

use crate::args::{GridArgs, JobArgs, ObjectiveArg, SizeArgs, SweepArgs};
use crate::failure::Failure;
use crate::figures;
use crate::forbid;
use crate::input;
use crate::interrupt::Interrupt;
use crate::objective;
use crate::output::json;
use crate::question::Question;
use crate::search::{bar, pool};
use crate::sweep_file::ResultFile;
use crate::table::{Side, table};
use crate::terminal::Terminal;

/// Most points of a sweep: what a patient user might wait for.
const MAX_POINTS: usize = 10_000;

/// The numbers of one point, by name.
pub(crate) type Point = BTreeMap<String, f64>;

/// A name and the numbers that it takes in turn.
pub(crate) type Over = (String, Vec<f64>);

/// What came of one point: a line of the result file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Digest of everything that was asked.
    pub(crate) question: String,
    /// The numbers that were put in.
    pub(crate) point: Point,
    /// The best plan's figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) plan: Option<Figures>,
    /// Why there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) no_plan: Option<String>,
}

/// Figures of the best plan at a point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figures {
    pub(crate) roles: String,
    pub(crate) n_devices: u64,
    pub(crate) step_time_s: f64,
    pub(crate) mfu: f64,
    pub(crate) tokens_per_s: f64,
    pub(crate) peak_memory_bytes: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cost_per_step: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) energy_per_step_joules: Option<f64>,
    pub(crate) gap: f64,
}

/// Sweeps.
pub(crate) fn run(args: &SweepArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let over = args.over.iter().map(|text| read_over(text)).collect::<Result<Vec<Over>, _>>()?;
    if over.iter().any(|(name, _)| name == "devices" || name == "nodes") {
        sized_once(&args.grid, "--over")?;
    }
    told_once(&args.grid, &over)?;
    let Rows { rows, stopped } = rows(&args.grid, &over, terminal)?;
    let text = if args.grid.json.json { json(&rows)? } else { text(&over, &rows, args.grid.objective) };
    write!(terminal.out, "{text}")?;
    stopped.map_or(Ok(()), Err)
}

/// Refuses a size of the cluster beside one that an option gives.
pub(crate) fn sized_once(grid: &GridArgs, option: &str) -> Result<(), Failure> {
    let size = &grid.job.size;
    match (size.nodes, size.devices, &size.on_nodes) {
        (None, None, None) => Ok(()),
        _ => {
            let hint = "leave out --nodes, --devices and --on-nodes";
            Err(Failure::argument_with_hint(
                format!("{option}: the size of the cluster is given twice"),
                hint,
            ))
        }
    }
}

/// Refuses a number of the job beside several that are swept over.
fn told_once(grid: &GridArgs, over: &[Over]) -> Result<(), Failure> {
    let job = &grid.job;
    let is_told = |(name, _): &&Over| match name.as_str() {
        "seq-len" => job.seq_len.is_some(),
        "global-batch" => job.global_batch.is_some(),
        _ => false,
    };
    over.iter().find(is_told).map_or(Ok(()), |(name, _)| {
        let what = format!("--over: {name} is given twice");
        Err(Failure::argument_with_hint(what, format!("leave out --{name}")))
    })
}

/// `devices=8,16,32`.
fn read_over(text: &str) -> Result<Over, Failure> {
    let wrong = |what: String| {
        let hint = "for example `--over devices=8,16,32` or `--over bandwidth.infiniband=25,50,100`";
        Failure::argument_with_hint(format!("--over: {what}"), hint)
    };
    let (name, list) =
        text.split_once('=').ok_or_else(|| wrong(format!("expected `name=number,...`, found `{text}`")))?;
    let number = |word: &str| match word.trim().parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 1e15 => Ok(number),
        Ok(_) | Err(_) => {
            Err(wrong(format!("{name}: expected a number above 0, at most 1e15, found `{word}`")))
        }
    };
    let numbers = list.split(',').map(number).collect::<Result<Vec<f64>, _>>()?;
    let again = numbers.iter().enumerate().find(|(at, one)| numbers[..*at].contains(one));
    match again {
        Some((_, twice)) => Err(wrong(format!("{name}: {twice} is given twice"))),
        None => Ok((name.trim().to_owned(), numbers)),
    }
}

/// Every combination of the numbers; the last name changes fastest.
fn points(over: &[Over]) -> Result<Vec<Point>, Failure> {
    let n = over.iter().try_fold(1_usize, |n, (_, list)| n.checked_mul(list.len()));
    if n.is_none_or(|n| n > MAX_POINTS) {
        return Err(Failure::argument(format!(
            "--over: more than the {MAX_POINTS} points that are swept over"
        )));
    }
    let mut points = vec![Point::new()];
    for (name, list) in over {
        if points.iter().any(|point| point.contains_key(name)) {
            return Err(Failure::argument(format!("--over: {name} is given twice")));
        }
        let with = |point: &Point, number: f64| {
            let mut point = point.clone();
            point.insert(name.clone(), number);
            point
        };
        points =
            points.iter().flat_map(|point| list.iter().map(move |&number| with(point, number))).collect();
    }
    Ok(points)
}

/// What came of the points.
pub(crate) struct Rows {
    /// A line each, in the order asked.
    pub(crate) rows: Vec<Row>,
    /// What to say where Ctrl-C came before the last of them; there are those before it then.
    pub(crate) stopped: Option<Failure>,
}

/// The outcome of every point: of the file where it is there, else searched for and written to it. A point that cannot
/// be asked has the reason for an outcome, unless none can.
pub(crate) fn rows(grid: &GridArgs, over: &[Over], terminal: &mut Terminal<'_>) -> Result<Rows, Failure> {
    let mut asked: Vec<Asked> = Vec::new();
    for point in points(over)? {
        let question = question(grid, &point);
        asked.push((question.map(|question| (digest(&question, grid.objective), question)), point));
    }
    if asked.iter().all(|(question, _)| question.is_err())
        && let Some((Err(wrong), _)) = asked.pop()
    {
        return Err(wrong);
    }
    let mut file = ResultFile::open(grid.output.as_deref())?;
    let is_there = |(digest, _): &(String, Question)| file.rows.iter().any(|row| row.question == *digest);
    let n_there = asked.iter().filter(|(question, _)| question.as_ref().is_ok_and(is_there)).count();
    if n_there > 0 {
        writeln!(terminal.err, "{n_there} of {} points are in the file already", asked.len())?;
    }
    let bar = bar(terminal.progress, "points");
    let (n_points, interrupt) = (asked.len(), terminal.interrupt);
    bar.set_length(n_points as u64);
    let rows = interrupt.heard_by(|| answered(asked, grid, &mut file, (interrupt, &bar)))?;
    bar.finish_and_clear();
    let n_done = rows.len();
    let hint = match &grid.output {
        Some(_) => "the same command asks the others",
        None => "-o FILE keeps them for the next time",
    };
    let stopped = (n_done < n_points).then_some(Failure::Stopped { n_done, n_points, hint });
    Ok(Rows { rows, stopped })
}

/// A question with its digest, or why it cannot be asked; and the point that it is of.
type Asked = (Result<(String, Question), Failure>, Point);

/// What came of the points until somebody says to end.
fn answered(
    asked: Vec<Asked>,
    grid: &GridArgs,
    file: &mut ResultFile,
    (interrupt, bar): (&Interrupt, &Bar),
) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::with_capacity(asked.len());
    for (question, point) in asked {
        if interrupt.is_raised() {
            break;
        }
        let row = match question {
            Err(wrong) => Row {
                question: String::new(),
                point,
                plan: None,
                no_plan: wrong.to_string().lines().next().map(str::to_owned),
            },
            Ok((digest, question)) => match file.rows.iter().find(|row| row.question == digest) {
                // The same question may have been asked by other numbers: nodes instead of devices.
                Some(row) => Row { point, ..row.clone() },
                None => {
                    let row = worked_out((digest, &question), point, grid, interrupt)?;
                    // A search that was stopped has not the best plan.
                    if interrupt.is_raised() {
                        break;
                    }
                    file.append(&row)?;
                    row
                }
            },
        };
        advance(bar, &row);
        rows.push(row);
    }
    Ok(rows)
}

fn advance(bar: &Bar, row: &Row) {
    bar.inc(1);
    if let Some(plan) = &row.plan {
        bar.set_message(figures::seconds(Seconds(plan.step_time_s)));
    }
}

/// The question at a point.
fn question(grid: &GridArgs, point: &Point) -> Result<Question, Failure> {
    let mut job: JobArgs = grid.job.clone();
    if point.contains_key("devices") && point.contains_key("nodes") {
        return Err(Failure::argument(
            "--over: the size of the cluster is given twice, as devices and as nodes",
        ));
    }
    for (name, &number) in point {
        let whole = || {
            let count = (number.fract() == 0.0 && number < 4e9).then_some(number as u64);
            count.ok_or_else(|| Failure::argument(format!("--over: {name}={number} is no count")))
        };
        match name.as_str() {
            "devices" => job.size = SizeArgs { devices: Some(whole()?), nodes: None, ..job.size.clone() },
            "nodes" => job.size = SizeArgs { devices: None, nodes: Some(whole()?), ..job.size.clone() },
            "seq-len" => job.seq_len = Some(whole()?),
            "global-batch" => job.global_batch = Some(whole()?),
            _ => {}
        }
    }
    let mut question = Question::read(&grid.model, &grid.cluster, &job)?;
    // Numbers of devices are compared by one batch, not each by what suits it.
    if job.global_batch.is_none() && ["devices", "nodes"].iter().any(|name| point.contains_key(*name)) {
        let own = &mut question.request.job;
        own.global_batch = Job::default_batch(own.sequence, 1);
    }
    for (name, &number) in point {
        change_cluster(&mut question, name, number)?;
    }
    let request = &mut question.request;
    request.pins = forbid::choices(&grid.pin, &grid.forbid)?;
    forbid::check(&request.pins, "take back one of --pin and --forbid")?;
    Ok(question)
}

/// Another bandwidth of a tier, or another memory of the devices.
fn change_cluster(question: &mut Question, name: &str, number: f64) -> Result<(), Failure> {
    let cluster = &mut question.request.cluster;
    match (name, name.strip_prefix("bandwidth.")) {
        ("devices" | "nodes" | "seq-len" | "global-batch", _) => {}
        ("memory", _) => {
            within(name, number, MEMORY_BYTES.per(GIB))?;
            for group in &mut cluster.groups {
                group.device.memory_bytes = ir::units::Bytes(number * GIB);
            }
        }
        (_, Some(tier)) => {
            within(name, number, BYTES_PER_S.per(1e9))?;
            let names: Vec<String> = cluster.tiers.iter().map(|tier| tier.name.clone()).collect();
            let known = cluster.tiers.iter_mut().find(|known| known.name == tier).ok_or_else(|| {
                let what = format!("--over: the cluster has no tier `{tier}`");
                Failure::argument_with_hint(what, format!("it has {}", names.join(", ")))
            })?;
            known.bandwidth_bytes_per_s = BytesPerSecond(number * 1e9);
            let own = cluster.groups.iter_mut().flat_map(|group| &mut group.links);
            for own in own.filter(|own| own.tier == tier) {
                own.link.bandwidth_bytes_per_s = BytesPerSecond(number * 1e9);
            }
        }
        (_, None) => {
            let hint =
                "names are devices, nodes, seq-len, global-batch, memory (GiB) and bandwidth.TIER (GB/s)";
            return Err(Failure::argument_with_hint(format!("--over: there is no `{name}` to change"), hint));
        }
    }
    Ok(())
}

fn within(name: &str, number: f64, range: Range) -> Result<(), Failure> {
    if range.holds(number) {
        return Ok(());
    }
    Err(Failure::argument(format!(
        "--over: {name}={number} is out of range, expected {} to {}",
        range.0, range.1
    )))
}

/// Everything that decides the answer, in one word.
fn digest(question: &Question, objective: ObjectiveArg) -> String {
    let text = format!("{} {:?}", env!("CARGO_PKG_VERSION"), question.request);
    let text = match objective {
        ObjectiveArg::Time => text,
        ObjectiveArg::Cost | ObjectiveArg::Energy => format!("{text} {objective:?}"),
    };
    input::digest(&text)
}

/// The best plan by the objective among those that are asked for at a point; without one, why the first has none.
fn worked_out(
    (digest, question): (String, &Question),
    point: Point,
    grid: &GridArgs,
    interrupt: &Interrupt,
) -> Result<Row, Failure> {
    let threads = pool(&grid.threads)?;
    let asked = |request: &Request| {
        let is_over = || interrupt.is_raised();
        planner::optimize_alone(
            request,
            Stop { work: None, asked: &is_over, overdue: &|_| is_over() },
            &|_| (),
        )
    };
    let mut best: Option<(f64, Plan)> = None;
    let mut no_plan: Option<String> = None;
    for request in requests(grid.objective, question, &point)? {
        match threads.install(|| asked(&request)) {
            Ok(plan) => {
                let predicted = plan.predicted.as_ref();
                let predicted = predicted.ok_or_else(|| Failure::bug("the plan has no prediction"))?;
                let figure = objective::figure(grid.objective, predicted)?;
                if best.as_ref().is_none_or(|(least, _)| figure < *least) {
                    best = Some((figure, plan));
                }
            }
            Err(broken @ NoPlan::Broken { .. }) => return Err(broken.into()),
            Err(other) => no_plan = no_plan.or(Some(other.to_string())),
        }
    }
    let plan = best.map(|(_, plan)| Figures::of(&plan)).transpose()?;
    let no_plan = no_plan.filter(|_| plan.is_none());
    Ok(Row { question: digest, point, plan, no_plan })
}

/// What is asked at a point: one question for time, and as `optimize` does for price and energy, of which a size of the
/// cluster that is swept over is the only one.
fn requests(objective: ObjectiveArg, question: &Question, point: &Point) -> Result<Vec<Request>, Failure> {
    let request = &question.request;
    let is_sized = point.contains_key("devices") || point.contains_key("nodes");
    let sizes = match objective {
        ObjectiveArg::Cost | ObjectiveArg::Energy if !is_sized => objective::halves(&request.cluster),
        ObjectiveArg::Cost | ObjectiveArg::Energy | ObjectiveArg::Time => vec![request.cluster.n_devices()],
    };
    let mut list = Vec::new();
    for n_devices in sizes {
        let cluster = match n_devices == request.cluster.n_devices() {
            true => request.cluster.clone(),
            false => rescale(&request.cluster, Size::Devices(n_devices))?,
        };
        let pins = objective::variants(objective, &request.pins).into_iter();
        list.extend(pins.map(|pins| Request { cluster: cluster.clone(), pins, ..request.clone() }));
    }
    Ok(list)
}

impl Figures {
    fn of(plan: &Plan) -> Result<Self, Failure> {
        let predicted = plan.predicted.as_ref().ok_or_else(|| Failure::bug("the plan has no prediction"))?;
        Ok(Self {
            roles: plan.roles.to_string(),
            n_devices: plan.n_whole_devices(),
            step_time_s: predicted.step_time_s.0,
            mfu: predicted.mfu,
            tokens_per_s: predicted.tokens_per_s_per_device * plan.n_whole_devices() as f64,
            peak_memory_bytes: predicted.peak_memory_bytes.0,
            cost_per_step: predicted.cost_per_step,
            energy_per_step_joules: predicted.energy_per_step_joules,
            gap: plan.search.as_ref().map_or(0.0, |search| search.gap),
        })
    }
}

/// A table: the numbers that change, then what came of them, in the order asked.
pub(crate) fn text(over: &[Over], rows: &[Row], objective: ObjectiveArg) -> String {
    let has_price = rows.iter().filter_map(|row| row.plan.as_ref()).any(|plan| plan.cost_per_step.is_some());
    let mut columns: Vec<(&str, Side)> = over.iter().map(|(name, _)| (name.as_str(), Side::Right)).collect();
    columns.extend([
        ("step time", Side::Right),
        ("MFU", Side::Right),
        ("tokens/s", Side::Right),
        ("peak memory", Side::Right),
    ]);
    columns.extend(has_price.then_some(("price of a step", Side::Right)));
    let is_asked = objective == ObjectiveArg::Energy;
    columns.extend(is_asked.then_some(("energy of a step", Side::Right)));
    // Which number of devices is best is then part of the answer.
    let is_sized = over.iter().any(|(name, _)| ["devices", "nodes"].contains(&name.as_str()));
    let has_size = objective != ObjectiveArg::Time && !is_sized;
    columns.extend(has_size.then_some(("devices", Side::Right)));
    columns.push(("plan", Side::Left));
    let row = |row: &Row| {
        let mut cells: Vec<String> = over.iter().map(|(name, _)| row.point[name].to_string()).collect();
        match &row.plan {
            Some(plan) => cells.extend([
                figures::seconds(Seconds(plan.step_time_s)),
                figures::percent(plan.mfu),
                figures::count(plan.tokens_per_s),
                figures::bytes(ir::units::Bytes(plan.peak_memory_bytes)),
            ]),
            None => cells.extend(std::iter::repeat_n("-".to_owned(), 4)),
        }
        let price = row.plan.as_ref().and_then(|plan| plan.cost_per_step);
        cells.extend(has_price.then(|| price.map_or("-".into(), figures::price)));
        let energy = row.plan.as_ref().and_then(|plan| plan.energy_per_step_joules);
        cells.extend(is_asked.then(|| energy.map_or("-".into(), figures::energy)));
        let devices = row.plan.as_ref().map_or("-".into(), |plan| plan.n_devices.to_string());
        cells.extend(has_size.then_some(devices));
        let words = row.plan.as_ref().map(|plan| plan.roles.clone()).or(row.no_plan.clone());
        cells.push(words.unwrap_or_default());
        cells
    };
    table(&columns, &rows.iter().map(row).collect::<Vec<_>>())
}

/// Numbers of devices worth asking of a cluster: itself, and halves of it as far as they are clusters.
pub(crate) fn halves(grid: &GridArgs) -> Result<Vec<f64>, Failure> {
    let whole = Question::read(&grid.model, &grid.cluster, &grid.job)?.request.cluster;
    Ok(objective::halves(&whole).into_iter().map(|n| n as f64).collect())
}
