//! The table of docs/coverage.md is what runs.
//!
//! `UPDATE_DOCS=1 cargo test -p tests coverage::` writes it anew.

#![expect(clippy::unwrap_used, reason = "a test that cannot write its own files has failed")]
#![expect(clippy::disallowed_methods, reason = "plans are verified as files, and the table is one")]

use std::fs;
use std::path::{Path, PathBuf};

use ir::text::write_plan;
use rayon::prelude::*;
use tests::coverage::{Feature, Recipe, features, show};
use tests::hold_current;

const HEAD: &str = "\
# What runs

Every strategy and every schedule, on a dense model and on one with experts. Each cell is a plan of a small model that
was run with real numbers on all its ranks and held to one device: loss, gradients and updated weights within the
tolerance of the format, the bytes of every purpose and tier as predicted, the arena of every rank as planned. *Sent* is what all ranks sent in two steps and *peak* the largest arena, in f64, predicted and counted
alike; *roles* is what the planner calls the plan when it looks at its shardings alone.

Written by `UPDATE_DOCS=1 cargo test -p tests coverage::`; the same test fails where the table is not current.

| strategy or schedule | model | verified in | ranks | sent, bytes | peak, bytes | roles |
|---|---|---|--:|--:|--:|---|
";

fn row(name: &str, kind: &str, recipe: &Result<Recipe, &'static str>, file: &Path) -> String {
    let recipe = match recipe {
        Ok(recipe) => recipe,
        Err(reason) => return format!("| {name} | {kind} | impossible: {reason} | | | | |\n"),
    };
    let plan = recipe.plan().unwrap_or_else(|| panic!("{name}, {kind}: what is wished is not legal"));
    fs::write(file, write_plan(&plan)).unwrap();
    let shown = show(file).unwrap_or_else(|error| panic!("{name}, {kind}: {error}"));
    let (ranks, sent, peak, formats) = (shown.n_ranks, shown.sent, shown.peak, shown.formats.join(", "));
    format!("| {name} | {kind} | {formats} | {ranks} | {sent} | {peak} | {} |\n", shown.roles)
}

#[test]
fn the_table_of_what_runs_is_current() {
    let features = features();
    let rows = |(at, feature): (usize, &Feature)| {
        let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("coverage-{at}.txt"));
        let dense = row(&feature.name, "dense", &feature.dense, &file);
        let routed = row(&feature.name, "experts", &feature.routed, &file);
        dense + &routed
    };
    let rows: Vec<String> = features.par_iter().with_max_len(1).enumerate().map(rows).collect();
    hold_current("coverage.md", &(HEAD.to_owned() + &rows.concat()));
}
