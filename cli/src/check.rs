//! `planner check`: whether a schedule's table can run and a plan fits in memory, and what every stage then does, waits
//! for and holds.
//!
//! A plan that is read has passed the same check of its table; here it is told. Bubbles are those of equal chunks, a
//! forward, a backward to the input and one to the weights taking equal time; what the cost model expects of a plan
//! stands beside them.

use cost_model::program_memory::{MemoryContext, carried_bytes, program_memory};
use cost_model::{BackwardParts, Constants, PipelineTimes, Transfers, simulate};
use ir::op_work::KernelChoice;
use ir::plan::Plan;
use ir::plan::check::OpenPlan;
use ir::schedule::{
    Action, Placement, Section, TableShape, check_table, in_flight, overtaken, parse_row, row_text,
};
use ir::split::split_backward;
use ir::units::{Bytes, Seconds};
use serde::Serialize;

use crate::args::{CheckArgs, PlacementArg};
use crate::failure::Failure;
use crate::figures;
use crate::input;
use crate::memory::Memory;
use crate::output::json;
use crate::priced;
use crate::table::{Side, list, table};
use crate::terminal::Terminal;

/// What `check --json` prints.
#[derive(Serialize)]
struct Checked {
    schedule: String,
    placement: Placement,
    n_stages: u32,
    n_virtual_stages: u32,
    n_micro_batches: u32,
    n_slices: u32,
    n_actions: usize,
    /// Streams and gradients sent from stage to stage in a step.
    n_messages: usize,
    /// Of these, received after one that was sent later between the same two stages.
    n_overtaken: u64,
    /// Share of the step in which the busiest stage waits, with equal chunks.
    bubble_fraction: f64,
    /// The same of a plan by the cost model, by what its file now says.
    #[serde(skip_serializing_if = "Option::is_none")]
    predicted_bubble_fraction: Option<f64>,
    /// Whether the plan's cluster has the memory; a table alone says nothing of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Memory>,
    stages: Vec<Stage>,
}

/// One stage of it.
#[derive(Serialize)]
struct Stage {
    /// Chunks, by virtual stage.
    chunks: Vec<u32>,
    /// Most micro-batches of a chunk at once, forward done and backward not complete.
    peak_in_flight: u32,
    /// Of those, backward done as far as the stage before waits for it.
    carried_at_peak: u32,
    /// Most bytes kept for them on one device.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_activation_bytes: Option<Bytes>,
    /// All that one device holds at its peak, by the cost model, and what it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_memory_bytes: Option<Bytes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity_bytes: Option<Bytes>,
    bubble_fraction: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    row: Option<String>,
}

/// Checks a plan or a table.
pub(crate) fn run(args: &CheckArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let mut checked = match (&args.plan, &args.table) {
        (_, Some(file)) => of_table(file, args.placement)?,
        (Some(file), None) => of_plan(file)?,
        (None, None) => return Err(Failure::bug("neither a plan nor a table was asked for")),
    };
    if !args.rows {
        checked.stages.iter_mut().for_each(|stage| stage.row = None);
    }
    let text = if args.json.json { json(&checked)? } else { report(&checked) };
    write!(terminal.out, "{text}")?;
    match (&args.plan, &checked.memory) {
        (Some(file), Some(memory)) => memory.judge(file, &args.memory),
        (_, None) | (None, _) => Ok(()),
    }
}

fn of_plan(file: &str) -> Result<Checked, Failure> {
    let (plan, opened) = input::plan_of_forms(file)?;
    let rows = plan.actions().map_err(|error| Failure::bug(format!("{}: {}", error.place, error.what)))?;
    let mut checked = checked(plan.schedule.to_string(), &rows, plan.table_shape())?;
    let bytes = peak_bytes(&plan, &opened, &rows);
    checked.stages.iter_mut().zip(bytes).for_each(|(stage, bytes)| stage.peak_activation_bytes = Some(bytes));
    let predicted = priced::prediction(file, &plan, &opened)?;
    checked.predicted_bubble_fraction = Some(predicted.breakdown.bubble_s / predicted.step_time_s);
    for (stage, priced) in checked.stages.iter_mut().zip(&predicted.stages) {
        stage.peak_memory_bytes = Some(priced.peak_memory_bytes);
        stage.capacity_bytes = Some(priced.capacity_bytes);
    }
    checked.memory = Memory::of(&plan, &opened, &predicted);
    Ok(checked)
}

/// A table from a file: a line for every stage.
fn of_table(file: &str, placement: PlacementArg) -> Result<Checked, Failure> {
    let text = input::read_lines(file, input::MAX_PLAN_BYTES)?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let wrong = |what: String| Failure::argument(format!("{file}: {what}"));
    let mut rows: Vec<Vec<Action>> = Vec::new();
    for (rank, line) in (0_u32..).zip(lines) {
        rows.push(parse_row(rank, line).map_err(|error| wrong(error.to_string()))?);
    }
    let counts =
        |of: fn(&Action) -> u32| rows.iter().flatten().map(of).max().map_or(0, |n| n.saturating_add(1));
    let virtual_stages = counts(|action| action.virtual_stage);
    let placement = match placement {
        PlacementArg::Looped => Placement::Looped { virtual_stages },
        PlacementArg::V => Placement::Waves { virtual_stages },
        PlacementArg::Bidirectional => Placement::Bidirectional,
    };
    let shape = TableShape {
        n_stages: rows.len() as u32,
        placement,
        n_micro_batches: counts(|action| action.micro_batch),
        n_slices: counts(|action| action.slice),
    };
    check_table(&rows, shape).map_err(|error| wrong(error.to_string()))?;
    checked("custom".into(), &rows, shape)
}

/// Figures of a table that has passed the check.
fn checked(schedule: String, rows: &[Vec<Action>], shape: TableShape) -> Result<Checked, Failure> {
    let n_places = shape.n_chunks() as usize * shape.n_slices as usize;
    let each = |seconds: f64| vec![Seconds(seconds); n_places];
    let times = PipelineTimes {
        placement: shape.placement,
        n_slices: shape.n_slices,
        forward: each(1.0),
        backward: each(2.0),
        parts: Some(BackwardParts { input: each(1.0), weight: each(1.0) }),
        boundary: vec![Seconds::ZERO; n_places - shape.n_slices as usize],
        branches: None,
        transfers: Transfers::Overlapped,
    };
    let timeline = simulate(rows, &times).map_err(|error| Failure::bug(error.to_string()))?;
    let bubble = |busy: Seconds| ((timeline.period_s - busy) / timeline.period_s).max(0.0);
    let busiest = timeline.ranks.iter().map(|rank| rank.busy_s).fold(Seconds::ZERO, Seconds::max);
    let stage = |(rank, row): (usize, &Vec<Action>)| {
        let most = in_flight(row).into_iter().max_by_key(|now| now.total()).unwrap_or_default();
        Stage {
            chunks: shape.placement.chunks_of(shape.n_stages, rank as u32).collect(),
            peak_in_flight: most.total(),
            carried_at_peak: most.carried,
            peak_activation_bytes: None,
            peak_memory_bytes: None,
            capacity_bytes: None,
            bubble_fraction: bubble(timeline.ranks[rank].busy_s),
            row: Some(row_text(row)),
        }
    };
    Ok(Checked {
        schedule,
        placement: shape.placement,
        n_stages: shape.n_stages,
        n_virtual_stages: shape.n_virtual_stages(),
        n_micro_batches: shape.n_micro_batches,
        n_slices: shape.n_slices,
        n_actions: rows.iter().map(Vec::len).sum(),
        n_messages: messages(rows, shape),
        n_overtaken: overtaken(rows, shape),
        bubble_fraction: bubble(busiest),
        predicted_bubble_fraction: None,
        memory: None,
        stages: rows.iter().enumerate().map(stage).collect(),
    })
}

/// Streams and gradients that arrive from another stage.
fn messages(rows: &[Vec<Action>], shape: TableShape) -> usize {
    let from = |action: &Action| {
        let chunk = shape.chunk(*action);
        let sender = match action.section {
            Section::Forward => chunk.checked_sub(1),
            Section::Backward | Section::BackwardInput => Some(chunk + 1).filter(|&c| c < shape.n_chunks()),
            Section::BackwardWeight => None,
        };
        sender.map(|chunk| shape.placement.seat(shape.n_stages, chunk, action.micro_batch).rank)
    };
    rows.iter().flatten().filter(|action| from(action).is_some_and(|rank| rank != action.rank)).count()
}

/// Most bytes that one device of each stage keeps for micro-batches under way, chunk by chunk.
fn peak_bytes(plan: &Plan, opened: &OpenPlan, rows: &[Vec<Action>]) -> Vec<Bytes> {
    let constants = Constants::load();
    let precision = plan.job.precision;
    let element_bytes = cost_model::rates::element_bytes(precision).0;
    let context = MemoryContext {
        precision,
        engine: plan.job.engine,
        kernels: KernelChoice::of(
            &plan.job.engine,
            (plan.job.attention, plan.job.token_order),
            element_bytes,
        ),
        constants: &constants,
    };
    let shape = plan.table_shape();
    let of_entry = |at: usize, slice: u32| {
        let ((layer, program), sizes) = (opened.run(at), opened.run_sizes(plan, at, slice));
        let mesh = plan.mesh_of_entry(at);
        let saved = program_memory(&context, layer, mesh, &sizes, program).saved_total();
        let split = split_backward(layer, program);
        (saved, carried_bytes((&context, layer, mesh, &sizes), program, &split))
    };
    let of_slice = |slice: u32| (0..plan.entries.len()).map(|at| of_entry(at, slice)).collect();
    let slices: Vec<Vec<(Bytes, Bytes)>> = (0..shape.n_slices).map(of_slice).collect();
    let sum = |(chunk, slice): (u32, u32), of: fn(&(Bytes, Bytes)) -> Bytes| -> Bytes {
        let runs = plan.chunks[chunk as usize].iter();
        runs.map(|run| of(&slices[slice as usize][run.entry]) * run.count as f64).sum()
    };
    let peak = |row: &Vec<Action>| {
        let (mut now, mut most) = (Bytes::ZERO, Bytes::ZERO);
        for action in row {
            let place = (shape.chunk(*action), action.slice);
            let (saved, carried) = (sum(place, |bytes| bytes.0), sum(place, |bytes| bytes.1));
            now = match action.section {
                Section::Forward => now + saved,
                Section::Backward => now - saved,
                Section::BackwardInput => now - saved + carried,
                Section::BackwardWeight => now - carried,
            };
            most = most.max(now);
        }
        most
    };
    rows.iter().map(peak).collect()
}

fn report(checked: &Checked) -> String {
    let slices =
        if checked.n_slices > 1 { format!(" of {} slices", checked.n_slices) } else { String::new() };
    let micro_batches = figures::counted(u64::from(checked.n_micro_batches), "micro-batch");
    let order = match checked.n_overtaken {
        0 => "received in the order sent".to_owned(),
        n => format!("{n} of them received after a later one"),
    };
    let mut lines = vec![
        (
            "schedule",
            format!(
                "{}, {}, {} of each, {micro_batches}{slices}",
                checked.schedule,
                figures::counted(u64::from(checked.n_stages), "stage"),
                figures::counted(u64::from(checked.n_virtual_stages), "virtual stage")
            ),
        ),
        (
            "table",
            format!(
                "{} actions, each once; every dependency is met and no stage waits for ever",
                checked.n_actions
            ),
        ),
        ("messages", format!("{} between stages, {order}", checked.n_messages)),
        ("bubble", format!("{} of a step with equal chunks", figures::percent(checked.bubble_fraction))),
    ];
    if let Some(share) = checked.predicted_bubble_fraction {
        lines.push(("", format!("{} as predicted", figures::percent(share))));
    }
    lines.extend(checked.memory.iter().flat_map(Memory::lines));
    let mut text = list(&lines);
    text.push('\n');
    text.push_str(&stages(checked));
    for (rank, stage) in checked.stages.iter().enumerate() {
        if let Some(row) = &stage.row {
            text.push_str(&format!("{}stage {rank}: {row}\n", if rank == 0 { "\n" } else { "" }));
        }
    }
    text
}

fn stages(checked: &Checked) -> String {
    let has_bytes = checked.stages.iter().any(|stage| stage.peak_activation_bytes.is_some());
    let mut columns = vec![
        ("stage", Side::Right),
        ("chunks", Side::Left),
        ("most in flight", Side::Right),
        ("of them waiting for weights", Side::Right),
        ("bubble", Side::Right),
    ];
    if has_bytes {
        columns.extend([
            ("activations per device", Side::Right),
            ("all memory", Side::Right),
            ("of", Side::Right),
        ]);
    }
    let row = |(rank, stage): (usize, &Stage)| {
        let chunks: Vec<String> = stage.chunks.iter().map(ToString::to_string).collect();
        let mut cells = vec![
            rank.to_string(),
            chunks.join(" "),
            stage.peak_in_flight.to_string(),
            stage.carried_at_peak.to_string(),
            figures::percent(stage.bubble_fraction),
        ];
        if has_bytes {
            let bytes = [stage.peak_activation_bytes, stage.peak_memory_bytes, stage.capacity_bytes];
            cells.extend(bytes.map(|bytes| bytes.map_or("-".into(), figures::bytes)));
        }
        cells
    };
    table(&columns, &checked.stages.iter().enumerate().map(row).collect::<Vec<_>>())
}
