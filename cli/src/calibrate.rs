//! `planner calibrate`: constants of a cluster of one's own, from a few runs measured on it.

use std::path::Path;

use cost_model::Constants;
use validate::calibration::Calibration;
use validate::case::{Case, cases};
use validate::row::{Row, read};
use validate::score::{Errors, Pair};
use validate::stack::calibrated;

use crate::args::CalibrateArgs;
use crate::calibrate_benchmarks::benchmarked;
use crate::failure::Failure;
use crate::figures;
use crate::input::read_file;
use crate::output::{json, write_whole};
use crate::table::{Side, table};
use crate::terminal::Terminal;

/// Mean error that a fit to a few runs may leave before it is told: four times what is left for most sources.
const FAR: f64 = 0.1;

/// Error that is told where there is one run: more than repeats of a run differ by.
const TOLD: f64 = 0.03;

/// Error from which on there is something else wrong: software, at its slowest, takes twice as long.
pub(crate) const TOO_FAR: f64 = 0.5;

/// Fits constants to benchmarks and runs and writes them with their provenance.
pub(crate) fn run(args: &CalibrateArgs, terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    let shipped = Constants::load();
    let measured = benchmarked(args, &shipped)?;
    write!(terminal.err, "{}", measured.text)?;
    let mut constants = measured.constants;
    let mut provenance = measured.provenance;
    let mut runs_off = None;
    if let Some(file) = &args.runs {
        let fitted = fitted(file, &constants)?;
        let pace = |error: f64| format!("{:.1} %", error * 100.0);
        let n_runs = figures::counted(fitted.provenance.len() as u64, "run");
        let (before, after) = (pace(fitted.before), pace(fitted.after));
        writeln!(terminal.err, "mean error of {n_runs}: {before} before, {after} after")?;
        if fitted.after > TOO_FAR {
            return Err(Failure::argument_with_hint(
                format!("{file}: no constants come near these runs"),
                "step_s is the time of one step in seconds; do model, devices and degrees belong to it?",
            ));
        }
        if fitted.after > FAR {
            writeln!(
                terminal.err,
                "warning: the runs stay far from what is predicted, or from each other: predictions say so by their intervals"
            )?;
        } else if fitted.provenance.len() == 1 && fitted.after > TOLD {
            writeln!(
                terminal.err,
                "note: a run alone may be off by chance and is followed in part; a second one that agrees is followed nearly whole"
            )?;
        }
        (constants, provenance) = (fitted.constants, [provenance, fitted.provenance].concat());
        runs_off = Some(fitted.after);
    }
    let calibration = Calibration {
        provenance,
        runs_off,
        ..Calibration::between(&shipped, &constants, env!("CARGO_PKG_VERSION"))
    };
    write!(terminal.err, "{}", moved(&calibration, &shipped))?;
    let text = json(&calibration)?;
    match &args.output {
        Some(file) => write_whole(file, &text)?,
        None => write!(terminal.out, "{text}")?,
    }
    Ok(())
}

/// What runs of whole steps say.
struct Fitted {
    constants: Constants,
    provenance: Vec<String>,
    /// Mean errors of the runs by the constants that were given, and by those that were found.
    before: f64,
    after: f64,
}

fn fitted(file: &str, start: &Constants) -> Result<Fitted, Failure> {
    let rows = runs(file)?;
    rows.iter().enumerate().try_for_each(|(at, row)| is_run(row, &rows[..at])).map_err(|(what, hint)| {
        let fault = format!("{file}: {what}");
        Failure::argument_with_hint(fault, hint)
    })?;
    let (cases, omitted) = cases(&rows, start);
    if let Some(row) = omitted.first() {
        return Err(Failure::argument(format!("{file}: {}: {}", row.row.id, row.reason)));
    }
    let all: Vec<&Case> = cases.iter().collect();
    let constants = calibrated(&all, start).fit.constants;
    let error = |constants: &Constants| {
        let pair = |case: &Case| Pair { measured: case.measured, predicted: case.predicted(constants) };
        Errors::of(&cases.iter().map(pair).collect::<Vec<_>>()).mean
    };
    let said = |case: &Case| {
        let time = figures::seconds(ir::units::Seconds(case.measured));
        format!("{file}: {} on {} {}, {time}", case.row.id, case.row.devices, case.row.device)
    };
    let provenance = cases.iter().map(said).collect();
    Ok(Fitted { before: error(start), after: error(&constants), constants, provenance })
}

/// Whether a row is a run to be fitted to, beside those above it.
///
/// # Errors
/// What is wrong with it, and what to do.
fn is_run(row: &Row, above: &[Row]) -> Result<(), (String, &'static str)> {
    let id = &row.id;
    if id.is_empty() {
        let what = format!("row {}: column id: expected a name, found nothing", above.len() + 1);
        return Err((what, "every run has a name of its own"));
    }
    if above.iter().any(|one| one.id == *id) {
        return Err((
            format!("{id}: column id: two runs have this name"),
            "repeats of a run have names of their own",
        ));
    }
    if row.oom == 1 {
        let what =
            format!("{id}: column oom: 1 is a run that died of memory, which has no step to be fitted to");
        return Err((what, "leave the run out, or write 0 where it went through"));
    }
    if row.measured().is_none() {
        let found = row.step_s.map_or("nothing".to_owned(), |time| time.to_string());
        let what = format!("{id}: step_s: expected seconds above 0, found {found}");
        return Err((what, "every run has the time of a step, in the column step_s"));
    }
    Ok(())
}

/// The constants of a calibration beside the shipped ones.
fn moved(calibration: &Calibration, shipped: &Constants) -> String {
    let row = |(name, value): (&String, &f64)| {
        Some(vec![name.clone(), format!("{:.4e}", shipped.get(name)?), format!("{value:.4e}")])
    };
    let rows: Vec<Vec<String>> = calibration.constants.iter().filter_map(row).collect();
    if rows.is_empty() {
        return "no constant moves\n".into();
    }
    table(&[("constant", Side::Left), ("shipped", Side::Right), ("calibrated", Side::Right)], &rows)
}

/// Measured runs of a file.
pub(crate) fn runs(file: &str) -> Result<Vec<Row>, Failure> {
    let text = read_file(Path::new(file), file, frontends::MAX_FILE_BYTES)?;
    let rows = read(&text).map_err(|error| {
        let hint = "the columns are those of fixtures/published/training.csv";
        Failure::argument_with_hint(format!("{file}: {error}"), hint)
    })?;
    if rows.is_empty() {
        let hint =
            "a line under the header is a run; the columns are those of fixtures/published/training.csv";
        return Err(Failure::argument_with_hint(format!("{file}: no run"), hint));
    }
    Ok(rows)
}
