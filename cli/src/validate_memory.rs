//! `planner validate --memory`: peaks of device memory, predicted against measured.

use std::fmt::Write as _;

use validate::memory::{Measure, MemorySource};

use crate::args::ValidateArgs;
use crate::table::{Side, table};

fn percent(fraction: f64) -> String {
    format!("{:.1} %", 100.0 * fraction)
}

/// Columns of the table of sources.
pub(crate) const COLUMNS: [(&str, Side); 9] = [
    ("peak memory", Side::Left),
    ("measured", Side::Left),
    ("rows", Side::Right),
    ("mean", Side::Right),
    ("median", Side::Right),
    ("max", Side::Right),
    ("bias", Side::Right),
    ("most below", Side::Right),
    ("died of memory, as predicted", Side::Right),
];

/// A source in that table.
pub(crate) fn row(source: &MemorySource) -> Vec<String> {
    let errors = &source.errors;
    let measure = match source.measure {
        Measure::Allocated => "allocated",
        Measure::Reserved => "reserved",
        Measure::Taken => "taken, reserve included",
    };
    vec![
        source.name.clone(),
        measure.into(),
        errors.rows.to_string(),
        percent(errors.mean),
        percent(errors.median),
        percent(errors.max),
        percent(errors.bias),
        percent(source.most_below),
        if source.died > 0 {
            format!("{} of {}", source.died_as_predicted, source.died)
        } else {
            String::new()
        },
    ]
}

/// Sources as a table, and every row where they are asked for.
pub(crate) fn text(found: &[MemorySource], args: &ValidateArgs) -> String {
    let mut text = table(&COLUMNS, &found.iter().map(row).collect::<Vec<_>>());
    if args.rows {
        let columns = [
            ("row", Side::Left),
            ("measured GiB", Side::Right),
            ("predicted GiB", Side::Right),
            ("error", Side::Right),
            ("", Side::Left),
        ];
        let rows = found.iter().flat_map(|source| &source.rows).map(|row| {
            vec![
                row.id.clone(),
                format!("{:.2}", row.measured_gib),
                format!("{:.2}", row.predicted_gib),
                format!("{:+.1} %", 100.0 * row.error),
                if row.died { "died of memory".into() } else { String::new() },
            ]
        });
        let _ = write!(text, "\n{}", table(&columns, &rows.collect::<Vec<_>>()));
    }
    text
}
