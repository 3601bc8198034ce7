//! `planner validate --fit`: the constants fitted to published runs, and how they hold on sources that were left out.

use std::collections::BTreeMap;

use cost_model::{CONSTANTS_JSON, Constants};
use serde_json::Value;
use validate::case::Case;
use validate::global::{Global, LeftOut, ablated, global, left_out};

use crate::args::ValidateArgs;
use crate::table::{Side, markdown, table};
use crate::validate::{percent, signed};

/// One constant of a fit.
struct Row {
    name: &'static str,
    meaning: String,
    known: Option<(f64, f64)>,
    shipped: f64,
    fitted: f64,
    deviation: f64,
    without: Option<f64>,
}

/// What a fit found, ready to be printed.
pub(crate) struct Report {
    /// The constants.
    pub(crate) fitted: Constants,
    constants: Vec<Row>,
    left_out: Vec<LeftOut>,
    ablated: bool,
}

/// Fits the constants to all core rows but mixtures of experts, and a part of the bulk sweep.
pub(crate) fn report(
    cases: &[Case],
    (shipped, start): (&Constants, &Constants),
    args: &ValidateArgs,
) -> Report {
    // Rows of the bulk sweep are much alike.
    const BULK_STEP: usize = 12;
    let dense = cases.iter().filter(|case| !case.row.is_mixture());
    let bulk = dense.clone().filter(|case| case.row.tier == "bulk").step_by(BULK_STEP);
    let core: Vec<&Case> = dense.clone().filter(|case| case.row.tier == "core").chain(bulk).collect();
    let found = global(&core, start);
    let fitted = found.fit.constants.clone();
    let without: BTreeMap<&str, f64> =
        if args.ablate { ablated(&core, &found).into_iter().collect() } else { BTreeMap::new() };
    let constants = rows(&found, shipped, &without);
    let left_out = left_out(&core, &found);
    Report { fitted, constants, left_out, ablated: args.ablate }
}

fn rows(found: &Global, shipped: &Constants, without: &BTreeMap<&str, f64>) -> Vec<Row> {
    let row = |(parameter, &deviation): (&cost_model::Parameter, &f64)| Row {
        name: parameter.name,
        meaning: meaning(parameter.name),
        known: parameter.known,
        shipped: shipped.get(parameter.name).unwrap_or(f64::NAN),
        fitted: found.fit.constants.get(parameter.name).unwrap_or(f64::NAN),
        deviation,
        without: without.get(parameter.name).copied(),
    };
    found.problem_parameters.iter().zip(&found.fit.deviations).map(row).collect()
}

/// What the data file says of a constant.
fn meaning(name: &str) -> String {
    let file: Value = serde_json::from_str(CONSTANTS_JSON).unwrap_or_default();
    let entry = name.split('.').fold(&file, |at, part| &at[part]);
    entry["meaning"].as_str().unwrap_or_default().to_owned()
}

impl Report {
    /// For a terminal.
    pub(crate) fn text(&self) -> String {
        let columns = self.columns();
        let plain = |row: &Row| self.cells(row, row.name.to_owned());
        let constants: Vec<Vec<String>> = self.constants.iter().map(plain).collect();
        format!(
            "{}\n{}\n{}\n\n",
            table(&columns, &constants),
            table(&LEFT_OUT_COLUMNS, &self.left_out_rows()),
            self.headline(),
        )
    }

    /// A page of the documentation.
    pub(crate) fn page(&self) -> String {
        let cells = |row: &Row| self.cells(row, format!("`{}`: {}", row.name, row.meaning));
        let constants: Vec<Vec<String>> = self.constants.iter().map(cells).collect();
        let (constants, left_out) =
            (markdown(&self.columns(), &constants), markdown(&LEFT_OUT_COLUMNS, &self.left_out_rows()));
        format!("{PAGE_START}\n{constants}\n{PAGE_LEFT_OUT}\n{}.\n\n{left_out}", self.headline())
    }

    fn columns(&self) -> Vec<(&'static str, Side)> {
        let mut columns = vec![
            ("constant", Side::Left),
            ("beforehand", Side::Right),
            ("shipped", Side::Right),
            ("fitted", Side::Right),
            ("deviation", Side::Right),
        ];
        columns.extend(self.ablated.then_some(("error without", Side::Right)));
        columns
    }

    fn cells(&self, row: &Row, name: String) -> Vec<String> {
        let known = row.known.map_or(String::new(), |(value, width)| format!("{value} ± {width}"));
        let mut cells =
            vec![name, known, figure(row.shipped), figure(row.fitted), format!("{:.1e}", row.deviation)];
        cells.extend(self.ablated.then(|| row.without.map(percent).unwrap_or_default()));
        cells
    }

    fn left_out_rows(&self) -> Vec<Vec<String>> {
        let row = |one: &LeftOut| {
            let apart = match (one.in_headline, one.covered) {
                (true, true) => "",
                (true, false) => "apart: no other source has its devices and format",
                (false, _) => "apart: not in the headline",
            };
            vec![
                one.source.clone(),
                percent(one.with.mean),
                percent(one.without.mean),
                percent(one.without.p90),
                percent(one.without.max),
                signed(one.without.bias),
                apart.to_owned(),
            ]
        };
        self.left_out.iter().map(row).collect()
    }

    fn headline(&self) -> String {
        let counted: Vec<&LeftOut> =
            self.left_out.iter().filter(|one| one.in_headline && one.covered).collect();
        let mean = |of: fn(&LeftOut) -> f64| {
            counted.iter().map(|one| of(one)).sum::<f64>() / counted.len().max(1) as f64
        };
        format!(
            "equal-weight mean over {} sources {} with their rows in the fit, {} without, where nine of ten rows are within {}",
            counted.len(),
            percent(mean(|one| one.with.mean)),
            percent(mean(|one| one.without.mean)),
            percent(mean(|one| one.without.p90)),
        )
    }
}

fn figure(value: f64) -> String {
    format!("{value:.3e}")
}

const LEFT_OUT_COLUMNS: [(&str, Side); 7] = [
    ("source", Side::Left),
    ("in the fit", Side::Right),
    ("left out", Side::Right),
    ("p90", Side::Right),
    ("max", Side::Right),
    ("bias", Side::Right),
    ("", Side::Left),
];

const PAGE_START: &str = "# The fitted constants

Written by `planner validate --fit --ablate --markdown`, which takes a minute or two in a release build. All constants are
fitted together, to all sources with equal weight; no constant belongs to a row or a source. Those that are shipped come from
such a fit, rounded to three digits. `beforehand` is what was known of a constant before any run, and how much it counts: as
little as one source that is 3.5 % off. A deviation is one standard deviation as the scatter of the rows leaves it. `error
without`: the equal-weight mean over the sources of the headline if the effect is taken away and the rates of products are
fitted again.
";

const PAGE_LEFT_OUT: &str = "## Sources left out

Every source predicted by constants that were fitted to all others. A source whose devices and number format no other
source has says nothing of constants that were never fitted to them, and is listed apart.
";
