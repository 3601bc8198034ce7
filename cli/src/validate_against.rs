//! `planner validate --against-search`: plans that people tuned by hand against those that are found for the same jobs.

use std::fmt::Write as _;

use cost_model::Constants;
use ir::units::Seconds;
use validate::against::{Against, Ratios, against, ratios};
use validate::case::cases;
use validate::row::Row;

use crate::args::ValidateArgs;
use crate::failure::Failure;
use crate::figures;
use crate::output::json;
use crate::table::{Side, markdown, table};
use crate::terminal::Terminal;

const SOURCE_COLUMNS: [(&str, Side); 7] = [
    ("source", Side::Left),
    ("rows", Side::Right),
    ("mean", Side::Right),
    ("least", Side::Right),
    ("most", Side::Right),
    ("worse", Side::Right),
    ("memory raised", Side::Right),
];

const ROW_COLUMNS: [(&str, Side); 6] = [
    ("row", Side::Left),
    ("published", Side::Right),
    ("found", Side::Right),
    ("ratio", Side::Right),
    ("published plan", Side::Left),
    ("plan that is found", Side::Left),
];

/// Searches for the jobs of all rows, but for the bulk sweep, and prints how the published plans compare.
pub(crate) fn run(
    args: &ValidateArgs,
    (rows, constants): (&[Row], &Constants),
    terminal: &mut Terminal<'_>,
) -> Result<(), Failure> {
    let rows: Vec<Row> = rows.iter().filter(|row| row.tier != "bulk").cloned().collect();
    let (cases, _) = cases(&rows, constants);
    let found = against(&cases, constants);
    let text = if args.json.json {
        json(&found)?
    } else if args.markdown {
        page(&found)
    } else {
        text(&found, args)
    };
    write!(terminal.out, "{text}")?;
    Ok(())
}

fn text(found: &[Against], args: &ValidateArgs) -> String {
    let mut text = table(&SOURCE_COLUMNS, &sources(found));
    let listed: Vec<&Against> = found.iter().filter(|row| args.rows || row.is_worse()).collect();
    if !listed.is_empty() {
        let _ = write!(text, "\n{}", table(&ROW_COLUMNS, &cells(&listed)));
    }
    text
}

/// The page of the documentation.
fn page(found: &[Against]) -> String {
    let worse: Vec<&Against> = found.iter().filter(|row| row.is_worse()).collect();
    let beaten = if worse.is_empty() {
        "No published plan is faster than the one that is found.\n".to_owned()
    } else {
        markdown(&ROW_COLUMNS, &cells(&worse))
    };
    format!(
        "{PAGE_START}\n{}\n## Where the search is worse\n\n{beaten}",
        markdown(&SOURCE_COLUMNS, &sources(found)),
    )
}

const PAGE_START: &str = "# Published plans against plans that are found

Written by `planner validate --against-search --markdown`. Every row of `training.csv` and `unseen.csv` in `fixtures/published` that can be expressed
is a plan that people chose, mostly by measuring. For the same model, devices, links, sequences, batch, number format and
engine the planner searches with everything else free. Both times are predictions, so that what is compared is the choice.

`ratio` is the published plan's time over that of the plan that is found: above one, what is found is faster. `mean` is
geometric. A row is `worse` where the published plan is faster: a defect of the search. Where a published plan is predicted
to need more memory than its devices list, the search was given as much (`memory raised`): the run did fit. `--rows` lists
every row, with both plans.
";

fn sources(found: &[Against]) -> Vec<Vec<String>> {
    let row = |one: &Ratios| {
        vec![
            one.source.clone(),
            one.rows.to_string(),
            ratio(one.mean),
            ratio(one.least),
            ratio(one.most),
            one.worse.to_string(),
            one.raised.to_string(),
        ]
    };
    ratios(found).iter().map(row).collect()
}

fn cells(rows: &[&Against]) -> Vec<Vec<String>> {
    let time = |seconds: f64| figures::seconds(Seconds(seconds));
    let none = || "-".to_owned();
    let row = |one: &&Against| {
        vec![
            one.id.clone(),
            time(one.published_s),
            one.found_s.map_or_else(none, time),
            one.ratio.map_or_else(none, ratio),
            one.published.to_string(),
            one.found.as_ref().map_or_else(none, ToString::to_string),
        ]
    };
    rows.iter().map(row).collect()
}

fn ratio(value: f64) -> String {
    format!("{value:.3}")
}
