//! `planner calibrate`: constants of a cluster of one's own, from a few runs measured on it.

use std::path::Path;

use cost_model::Constants;
use validate::calibration::Calibration;
use validate::case::{Case, cases};
use validate::row::{Row, read};
use validate::score::{Errors, Pair};
use validate::stack::calibrated;

use crate::args::CalibrateArgs;
use crate::failure::Failure;
use crate::figures;
use crate::input::read_file;
use crate::output::{json, write_whole};
use crate::table::{Side, table};
use crate::terminal::Terminal;

/// Fits constants to runs and writes them with their provenance.
pub(crate) fn run(args: &CalibrateArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let rows = runs(&args.runs)?;
    let shipped = Constants::load();
    let (cases, omitted) = cases(&rows, &shipped);
    if let Some(row) = omitted.first() {
        return Err(Failure::argument(format!("{}: {}: {}", args.runs, row.row.id, row.reason)));
    }
    let all: Vec<&Case> = cases.iter().collect();
    let found = calibrated(&all, &shipped);
    let mut calibration = Calibration::between(&shipped, &found.fit.constants, env!("CARGO_PKG_VERSION"));
    calibration.provenance = cases
        .iter()
        .map(|case| {
            let time = figures::seconds(ir::units::Seconds(case.measured));
            format!("{}: {} on {} {}, {time}", args.runs, case.row.id, case.row.devices, case.row.device)
        })
        .collect();
    let error = |constants: &Constants| {
        let pair = |case: &Case| Pair { measured: case.measured, predicted: case.predicted(constants) };
        Errors::of(&cases.iter().map(pair).collect::<Vec<_>>()).mean
    };
    let rows: Vec<Vec<String>> = calibration
        .constants
        .iter()
        .filter_map(|(name, value)| {
            Some(vec![name.clone(), format!("{:.4e}", shipped.get(name)?), format!("{value:.4e}")])
        })
        .collect();
    let columns = [("constant", Side::Left), ("shipped", Side::Right), ("calibrated", Side::Right)];
    writeln!(
        terminal.err,
        "{}mean error of {} runs: {:.1} % before, {:.1} % after",
        table(&columns, &rows),
        cases.len(),
        error(&shipped) * 100.0,
        error(&found.fit.constants) * 100.0,
    )?;
    let text = json(&calibration)?;
    match &args.output {
        Some(file) => write_whole(file, &text)?,
        None => write!(terminal.out, "{text}")?,
    }
    Ok(())
}

/// Measured runs of a file.
pub(crate) fn runs(file: &str) -> Result<Vec<Row>, Failure> {
    let text = read_file(Path::new(file), file, frontends::MAX_FILE_BYTES)?;
    let rows = read(&text).map_err(|error| {
        let hint = "the columns are those of fixtures/published/training.csv";
        Failure::argument_with_hint(format!("{file}: {error}"), hint)
    })?;
    if rows.is_empty() {
        return Err(Failure::argument(format!("{file}: no run")));
    }
    Ok(rows)
}
