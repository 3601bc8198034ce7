//! `planner validate`: published runs priced, and how far the prices are off.

use std::fmt::Write as _;
use std::path::Path;

use cost_model::Constants;
use serde::Serialize;
use validate::calibration::Calibration;
use validate::case::{Case, Omitted, cases};
use validate::global::global;
use validate::memory::memory_report;
use validate::report::{RowReport, SourceReport, Validation, validation};
use validate::row::{Row, shipped};

use crate::args::ValidateArgs;
use crate::failure::Failure;
use crate::figures;
use crate::input::read_file;
use crate::output::{json, write_whole};
use crate::table::{Side, table};
use crate::terminal::Terminal;
use crate::validate_memory;

/// Rows that are named as the worst.
const N_WORST: usize = 10;

#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    validation: &'a Validation,
    not_priced: Vec<NotPriced<'a>>,
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
        Some(file) => calibration(file)?.applied(shipped.clone()),
        None => shipped.clone(),
    };
    let rows = rows(args)?;
    if args.memory {
        let found = memory_report(&rows, &start);
        let text = if args.json.json { json(&found)? } else { validate_memory::text(&found, args) };
        write!(terminal.out, "{text}")?;
        return Ok(());
    }
    let (cases, omitted) = cases(&rows, &start);
    let constants = if args.fit { refit(args, (&shipped, &start), &cases, terminal)? } else { start };
    let found = validation(&cases, &omitted, &constants);
    let text = if args.json.json {
        let not_priced =
            omitted.iter().map(|one| NotPriced { id: &one.row.id, reason: one.reason.to_string() });
        json(&Document { validation: &found, not_priced: not_priced.collect() })?
    } else {
        text(&found, &omitted, args)
    };
    write!(terminal.out, "{text}")?;
    Ok(())
}

fn calibration(file: &str) -> Result<Calibration, Failure> {
    let text = read_file(Path::new(file), file, frontends::MAX_FILE_BYTES)?;
    Calibration::read(&text).map_err(|error| Failure::argument(format!("{file}: {error}")))
}

/// Fits the constants to the rows of the headline, and prints what they are and how they hold elsewhere.
fn refit(
    args: &ValidateArgs,
    (shipped, start): (&Constants, &Constants),
    cases: &[Case],
    terminal: &mut Terminal<'_>,
) -> Result<Constants, Failure> {
    let core: Vec<&Case> = cases.iter().filter(|case| case.row.tier == "core").collect();
    let all = global(&core, start);
    let fitted = all.fit.constants.clone();
    let rows: Vec<Vec<String>> = all
        .problem_parameters
        .iter()
        .zip(&all.fit.deviations)
        .map(|(parameter, deviation)| {
            let value = fitted.get(parameter.name).unwrap_or(f64::NAN);
            vec![parameter.name.into(), format!("{value:.4e}"), format!("{deviation:.1e}")]
        })
        .collect();
    let columns = [("constant", Side::Left), ("fitted", Side::Right), ("deviation", Side::Right)];
    writeln!(terminal.out, "{}", table(&columns, &rows))?;
    if let Some(file) = &args.write {
        let calibration = Calibration::between(shipped, &fitted, env!("CARGO_PKG_VERSION"));
        write_whole(file, &json(&calibration)?)?;
    }
    Ok(fitted)
}

fn rows(args: &ValidateArgs) -> Result<Vec<Row>, Failure> {
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
    let mut text = sources(found);
    let all = &found.all_rows;
    let _ = writeln!(
        text,
        "\nequal-weight mean over {} sources {}; of {} rows {} within 5 %, {} within 8 %",
        found.sources.iter().filter(|source| source.headline).count(),
        percent(found.mean_over_sources),
        all.rows,
        percent(all.within_5),
        percent(all.within_8),
    );
    if args.rows {
        let listed: Vec<(&str, &RowReport)> = found
            .sources
            .iter()
            .flat_map(|source| source.rows.iter().map(|row| (source.name.as_str(), row)))
            .collect();
        let _ = write!(text, "\n{}", errors_of(&listed));
    } else {
        let _ = write!(text, "\nfarthest off\n{}", errors_of(&found.worst(N_WORST)));
    }
    if !found.omitted.is_empty() {
        let rows: Vec<Vec<String>> =
            found.omitted.iter().map(|(reason, n)| vec![n.to_string(), reason.clone()]).collect();
        let _ = write!(text, "\n{}", table(&[("not priced", Side::Right), ("because", Side::Left)], &rows));
    }
    if args.omitted {
        let rows: Vec<Vec<String>> =
            omitted.iter().map(|one| vec![one.row.id.clone(), one.reason.to_string()]).collect();
        let _ = write!(text, "\n{}", table(&[("row", Side::Left), ("reason", Side::Left)], &rows));
    }
    text
}

fn sources(found: &Validation) -> String {
    let columns = [
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
    let rows: Vec<Vec<String>> = found.sources.iter().map(source).collect();
    table(&columns, &rows)
}

fn source(source: &SourceReport) -> Vec<String> {
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

fn errors_of(rows: &[(&str, &RowReport)]) -> String {
    let columns =
        [("row", Side::Left), ("measured", Side::Right), ("predicted", Side::Right), ("error", Side::Right)];
    let cells = |(_, row): &(&str, &RowReport)| {
        let time = |seconds: f64| figures::seconds(ir::units::Seconds(seconds));
        vec![row.id.clone(), time(row.measured_s), time(row.predicted_s), signed(row.error)]
    };
    table(&columns, &rows.iter().map(cells).collect::<Vec<_>>())
}

fn percent(fraction: f64) -> String {
    format!("{:.1} %", fraction * 100.0)
}

fn signed(fraction: f64) -> String {
    format!("{:+.1} %", fraction * 100.0)
}
