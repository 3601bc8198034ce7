//! `planner validate`: published runs priced, and how far the prices are off.

use std::fmt::Write as _;

use cost_model::Constants;
use serde::Serialize;
use validate::calibration::Calibration;
use validate::case::{Case, Omitted, cases};
use validate::components::{ComponentReport, components};
use validate::few_runs::{FewRuns, few_runs};
use validate::memory::memory_report;
use validate::report::{RowReport, SourceReport, Validation, validation, validation_by_events};
use validate::row::{Row, shipped};

use crate::args::ValidateArgs;
use crate::calibrate::runs;
use crate::failure::Failure;
use crate::figures;
use crate::input;
use crate::output::{json, write_whole};
use crate::table::{Side, table};
use crate::terminal::Terminal;
use crate::{validate_against, validate_fit, validate_measured, validate_memory, validate_page};

/// Rows that are named as the worst.
pub(crate) const N_WORST: usize = 10;

#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    validation: &'a Validation,
    not_priced: Vec<NotPriced<'a>>,
    /// The same with layers timed as events.
    #[serde(skip_serializing_if = "Option::is_none")]
    events: Option<&'a Validation>,
}

#[derive(Serialize)]
struct NotPriced<'a> {
    id: &'a str,
    reason: String,
}

/// Prices published rows and prints the errors.
pub(crate) fn run(args: &ValidateArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let shipped = Constants::load();
    let start = match &args.calibration {
        Some(file) => {
            let wrong = |error| Failure::argument(format!("{file}: {error}"));
            input::calibration(file)?.applied(shipped.clone()).map_err(wrong)?
        }
        None => shipped.clone(),
    };
    if args.components {
        return of_components(args, &start, terminal);
    }
    if args.measured {
        return validate_measured::run(args, &start, terminal);
    }
    let rows = rows(args)?;
    if args.memory {
        let found = memory_report(&rows, &start);
        let text = if args.json.json { json(&found)? } else { validate_memory::text(&found, args) };
        write!(terminal.out, "{text}")?;
        return Ok(());
    }
    if args.against_search {
        return validate_against::run(args, (&rows, &start), terminal);
    }
    let (cases, omitted) = cases(&rows, &start);
    let constants = if args.fit { refit(args, (&shipped, &start), &cases, terminal)? } else { start };
    if args.fit && args.markdown {
        return Ok(());
    }
    let mut found = validation(&cases, &omitted, &constants);
    if args.rows && args.json.json {
        found = found.with_terms(&cases, &constants);
    }
    let events = args.events.then(|| validation_by_events(&cases, &omitted, &constants));
    let text = if args.json.json {
        let not_priced =
            omitted.iter().map(|one| NotPriced { id: &one.row.id, reason: one.reason.to_string() });
        json(&Document { validation: &found, not_priced: not_priced.collect(), events: events.as_ref() })?
    } else if let Some(events) = &events {
        both_witnesses(&found, events)
    } else if args.markdown {
        validate_page::page(&found, &few_runs(&cases, &constants), &memory_report(&rows, &constants))
    } else {
        text(&found, &omitted, args)
    };
    write!(terminal.out, "{text}")?;
    match &args.runs {
        Some(file) if cases.is_empty() => Err(none_priced(file, &omitted)),
        Some(_) | None => Ok(()),
    }
}

/// What to say where no run of a file could be priced.
fn none_priced(file: &str, omitted: &[Omitted]) -> Failure {
    let why = omitted.first().map_or(String::new(), |one| format!(": {}: {}", one.row.id, one.reason));
    Failure::argument_with_hint(
        format!("{file}: no run could be priced{why}"),
        "--omitted lists the reason of every run; docs/validation.md names the columns",
    )
}

fn of_components(
    args: &ValidateArgs,
    constants: &Constants,
    terminal: &mut Terminal<'_>,
) -> Result<(), Failure> {
    let found = components(constants);
    let rows: Vec<Vec<String>> = found.iter().map(component).collect();
    let text = if args.json.json { json(&found)? } else { table(&COMPONENT_COLUMNS, &rows) };
    write!(terminal.out, "{text}")?;
    Ok(())
}

/// Columns of the table of components.
pub(crate) const COMPONENT_COLUMNS: [(&str, Side); 8] = [
    ("component", Side::Left),
    ("device", Side::Left),
    ("source", Side::Left),
    ("rows", Side::Right),
    ("mean", Side::Right),
    ("median", Side::Right),
    ("p90", Side::Right),
    ("bias", Side::Right),
];

/// A row of it.
pub(crate) fn component(one: &ComponentReport) -> Vec<String> {
    let errors = &one.time;
    let [mean, median, p90] = [errors.mean, errors.median, errors.p90].map(percent);
    let n = errors.rows.to_string();
    vec![one.kind.clone(), one.device.clone(), one.source.clone(), n, mean, median, p90, signed(errors.bias)]
}

/// Fits the constants, and prints what they are and how they hold elsewhere.
fn refit(
    args: &ValidateArgs,
    worlds: (&Constants, &Constants),
    cases: &[Case],
    terminal: &mut Terminal<'_>,
) -> Result<Constants, Failure> {
    let found = validate_fit::report(cases, worlds, args);
    if let Some(file) = &args.write {
        let calibration = Calibration::between(worlds.0, &found.fitted, env!("CARGO_PKG_VERSION"));
        write_whole(file, &json(&calibration)?)?;
    }
    let text = if args.markdown { found.page() } else { found.text() };
    write!(terminal.out, "{text}")?;
    terminal.out.flush()?;
    Ok(found.fitted)
}

fn rows(args: &ValidateArgs) -> Result<Vec<Row>, Failure> {
    if let Some(file) = &args.runs {
        return runs(file);
    }
    let all = shipped();
    let Some(name) = &args.source else { return Ok(all) };
    let rows: Vec<Row> = all.iter().filter(|row| row.source == *name).cloned().collect();
    if rows.is_empty() {
        let mut known: Vec<&str> = all.iter().map(|row| row.source.as_str()).collect();
        known.sort_unstable();
        known.dedup();
        return Err(Failure::argument_with_hint(
            format!("--source: there is no source `{name}`"),
            format!("the sources are {}", known.join(", ")),
        ));
    }
    Ok(rows)
}

fn text(found: &Validation, omitted: &[Omitted], args: &ValidateArgs) -> String {
    let mut text = table(&SOURCE_COLUMNS, &found.sources.iter().map(source).collect::<Vec<_>>());
    let _ = writeln!(text, "\n{}", headline(found));
    if !found.unseen.is_empty() {
        let unseen: Vec<Vec<String>> = found.unseen.iter().map(source).collect();
        let _ = write!(text, "\n{}\n{}\n", table(&SOURCE_COLUMNS, &unseen), of_unseen(found));
    }
    if !found.unseen_experts.is_empty() {
        let unseen: Vec<Vec<String>> = found.unseen_experts.iter().map(source).collect();
        let _ = write!(text, "\n{}\n{}\n", table(&SOURCE_COLUMNS, &unseen), of_unseen_experts(found));
    }
    let releases = &found.experts.by_release;
    if !releases.is_empty() {
        let experts: Vec<Vec<String>> = releases.iter().map(source).collect();
        let _ = write!(text, "\n{}\n{}", table(&SOURCE_COLUMNS, &experts), of_experts(found));
    }
    if args.rows {
        let lists = [&found.sources, &found.unseen, &found.unseen_experts, releases];
        let listed: Vec<_> = lists.into_iter().flat_map(|sources| rows_of(sources)).collect();
        let _ = write!(text, "\n{}", table(&ROW_COLUMNS, &errors_of(&listed)));
    } else {
        let worst = errors_of(&found.worst(N_WORST));
        let _ = write!(text, "\nfarthest off\n{}", table(&ROW_COLUMNS, &worst));
    }
    if !found.omitted.is_empty() {
        let _ = write!(text, "\n{}", table(&OMITTED_COLUMNS, &reasons(found)));
    }
    if args.omitted {
        let rows: Vec<Vec<String>> =
            omitted.iter().map(|one| vec![one.row.id.clone(), one.reason.to_string()]).collect();
        let _ = write!(text, "\n{}", table(&[("row", Side::Left), ("reason", Side::Left)], &rows));
    }
    text
}

/// Errors of every source by closed forms and by events.
fn both_witnesses(closed: &Validation, events: &Validation) -> String {
    let columns = [
        ("source", Side::Left),
        ("rows", Side::Right),
        ("mean", Side::Right),
        ("by events", Side::Right),
        ("within 8 %", Side::Right),
        ("by events", Side::Right),
    ];
    let row = |(closed, events): (&SourceReport, &SourceReport)| {
        let shares = [closed.time.mean, events.time.mean, closed.time.within_8, events.time.within_8];
        let mut cells = vec![closed.name.clone(), closed.time.rows.to_string()];
        cells.extend(shares.map(percent));
        cells
    };
    let rows: Vec<Vec<String>> = closed.sources.iter().zip(&events.sources).map(row).collect();
    format!("{}\n{}\nby events: {}\n", table(&columns, &rows), headline(closed), headline(events))
}

/// Mean error of mixtures of experts that may be claimed, if rows keep to it.
const CLAIM_OF_EXPERTS: f64 = 0.15;

/// What mixtures of experts come to together, and what is claimed of them.
pub(crate) fn of_experts(found: &Validation) -> String {
    let (all, scaled) = (found.experts.all(), found.experts.by_others());
    let by_source = found.experts.by_source();
    let sources: Vec<String> =
        by_source.iter().map(|(name, mean)| format!("{name} {}", percent(*mean))).collect();
    let claim = if all.mean <= CLAIM_OF_EXPERTS {
        format!(
            "claimed is a mean over these rows of at most {}, with the dispatchers above; nothing of one row or release",
            percent(CLAIM_OF_EXPERTS)
        )
    } else {
        "no claim is made of them".into()
    };
    format!(
        "{} mixtures of experts: mean {} ({}), median {}, bias {}; {} with one factor per release, for each row the median of its other rows; {claim}",
        all.rows,
        percent(all.mean),
        sources.join(", "),
        percent(all.median),
        signed(all.bias),
        percent(scaled.mean),
    )
}

pub(crate) const FEW_RUNS_COLUMNS: [(&str, Side); 7] = [
    ("source", Side::Left),
    ("rows", Side::Right),
    ("before", Side::Right),
    ("by one", Side::Right),
    ("by three", Side::Right),
    ("p90 by three", Side::Right),
    ("bias by three", Side::Right),
];

/// What calibrations are worth over the sources that a fit has seen, and over the others.
pub(crate) fn few_runs_headline(few: &[FewRuns]) -> String {
    let of = |is_unseen: bool| {
        let few: Vec<&FewRuns> = few.iter().filter(|one| one.is_unseen == is_unseen).collect();
        let mean =
            |of: fn(&FewRuns) -> f64| few.iter().map(|one| of(one)).sum::<f64>() / few.len().max(1) as f64;
        format!(
            "{} before, {} by one run, {} by three (nine of ten rows within {})",
            percent(mean(|one| one.before.mean)),
            percent(mean(|one| one.by_one.mean)),
            percent(mean(|one| one.by_three.mean)),
            percent(mean(|one| one.by_three.p90)),
        )
    };
    let n_unseen = few.iter().filter(|one| one.is_unseen).count();
    format!(
        "equal-weight mean over {} sources {}; over {n_unseen} that no fit has seen {}",
        few.len() - n_unseen,
        of(false),
        of(true)
    )
}

pub(crate) fn few_runs_row(one: &FewRuns) -> Vec<String> {
    let unseen = if one.is_unseen { " (unseen)" } else { "" };
    vec![
        format!("{}{unseen}", one.source),
        one.n_rows.to_string(),
        percent(one.before.mean),
        percent(one.by_one.mean),
        percent(one.by_three.mean),
        percent(one.by_three.p90),
        signed(one.by_three.bias),
    ]
}

pub(crate) const ROW_COLUMNS: [(&str, Side); 4] =
    [("row", Side::Left), ("measured", Side::Right), ("predicted", Side::Right), ("error", Side::Right)];

pub(crate) const OMITTED_COLUMNS: [(&str, Side); 2] =
    [("rows", Side::Right), ("not priced because", Side::Left)];

pub(crate) const SOURCE_COLUMNS: [(&str, Side); 12] = [
    ("source", Side::Left),
    ("rows", Side::Right),
    ("of", Side::Right),
    ("mean", Side::Right),
    ("median", Side::Right),
    ("p90", Side::Right),
    ("max", Side::Right),
    ("bias", Side::Right),
    ("scaled", Side::Right),
    ("sweeps", Side::Right),
    ("Spearman", Side::Right),
    ("regret", Side::Right),
];

pub(crate) fn headline(found: &Validation) -> String {
    let all = &found.all_rows;
    format!(
        "equal-weight mean over {} sources {}; of {} rows {} within 5 %, {} within 8 %",
        found.sources.iter().filter(|source| source.headline).count(),
        percent(found.mean_over_sources),
        all.rows,
        percent(all.within_5),
        percent(all.within_8),
    )
}

/// What sources that no fit has seen come to together.
pub(crate) fn of_unseen(found: &Validation) -> String {
    let all = found.all_unseen();
    format!(
        "{} sources that no fit has seen: equal-weight mean {}; of {} rows {} within 5 %, {} within 8 %, median {}, bias {}",
        found.unseen.len(),
        percent(found.mean_over_unseen()),
        all.rows,
        percent(all.within_5),
        percent(all.within_8),
        percent(all.median),
        signed(all.bias),
    )
}

/// What mixtures of experts among them come to.
pub(crate) fn of_unseen_experts(found: &Validation) -> String {
    let all = found.all_unseen_experts();
    format!(
        "{} mixtures of experts that no fit has seen: mean {}, median {}, bias {}",
        all.rows,
        percent(all.mean),
        percent(all.median),
        signed(all.bias),
    )
}

pub(crate) fn reasons(found: &Validation) -> Vec<Vec<String>> {
    let first = |reason: &str| reason.lines().next().unwrap_or_default().to_owned();
    found.omitted.iter().map(|(reason, n)| vec![n.to_string(), first(reason)]).collect()
}

pub(crate) fn source(source: &SourceReport) -> Vec<String> {
    let errors = &source.time;
    let (groups, correlation, regret) = source.sweeps.map_or_else(Default::default, |sweeps| {
        (sweeps.groups.to_string(), format!("{:.2}", sweeps.spearman), percent(sweeps.mean_regret))
    });
    vec![
        source.name.clone(),
        errors.rows.to_string(),
        source.rows_in_table.to_string(),
        percent(errors.mean),
        percent(errors.median),
        percent(errors.p90),
        percent(errors.max),
        signed(errors.bias),
        percent(source.scaled.mean),
        groups,
        correlation,
        regret,
    ]
}

pub(crate) fn rows_of(sources: &[SourceReport]) -> Vec<(&str, &RowReport)> {
    sources.iter().flat_map(|source| source.rows.iter().map(|row| (source.name.as_str(), row))).collect()
}

pub(crate) fn errors_of(rows: &[(&str, &RowReport)]) -> Vec<Vec<String>> {
    let cells = |(_, row): &(&str, &RowReport)| {
        let time = |seconds: f64| figures::seconds(ir::units::Seconds(seconds));
        vec![row.id.clone(), time(row.measured_s), time(row.predicted_s), signed(row.error)]
    };
    rows.iter().map(cells).collect()
}

pub(crate) fn percent(fraction: f64) -> String {
    format!("{:.1} %", fraction * 100.0)
}

pub(crate) fn signed(fraction: f64) -> String {
    format!("{:+.1} %", fraction * 100.0)
}
