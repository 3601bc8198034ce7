//! The floors of the architecture: what each crate may use, and what nothing below the command line may do.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A crate and the crates it may use outside its tests: its own floors below, then those of others.
const FLOORS: [(&str, &[&str]); 7] = [
    ("ir", &["serde", "serde_json", "schemars", "thiserror"]),
    ("cost-model", &["ir", "serde", "serde_json", "thiserror"]),
    ("frontends", &["ir", "petgraph", "serde", "serde_json", "serde_path_to_error", "schemars", "thiserror"]),
    (
        "planner",
        &["ir", "cost-model", "serde", "serde_json", "thiserror", "egg", "good_lp", "rayon", "smallvec"],
    ),
    ("executor", &["ir", "ndarray", "safetensors", "serde", "serde_json", "sha2", "thiserror"]),
    (
        "validate",
        &["ir", "frontends", "cost-model", "planner", "csv", "rayon", "serde", "serde_json", "thiserror"],
    ),
    (
        "cli",
        &[
            "ir",
            "frontends",
            "cost-model",
            "planner",
            "executor",
            "validate",
            "clap",
            "clap_complete",
            "comfy-table",
            "ctrlc",
            "indicatif",
            "mimalloc",
            "rayon",
            "schemars",
            "serde",
            "serde_json",
            "serde_path_to_error",
            "thiserror",
        ],
    ),
];

/// What only the command line may do, by the words it takes: clocks, files, the environment, printing, leaving.
const FORBIDDEN: [&str; 13] = [
    "std::fs",
    "std::env",
    "std::net",
    "std::time",
    "std::process",
    "Instant",
    "SystemTime",
    "println!",
    "print!",
    "eprint",
    "dbg!",
    "HashMap",
    "HashSet",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[expect(clippy::disallowed_methods, reason = "the subject of the test is the files of this workspace")]
fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Names under `[dependencies]` of a manifest, and under its target-specific and build sections.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut inside = false;
    for line in manifest.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            inside = section.contains("dependencies") && !section.contains("dev-dependencies");
        } else if inside && let Some((name, _)) = line.split_once('=').filter(|_| !line.starts_with('#')) {
            names.insert(name.split('.').next().unwrap_or_default().trim().to_owned());
        }
    }
    names
}

/// Every source file of a crate, but those of tests.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files = Vec::new();
    for path in entries.map(|entry| entry.unwrap().path()) {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let is_test = name == "tests" || name.ends_with("_tests");
        if path.is_dir() && !is_test {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") && !is_test {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// The code of a file: without comments, and without the tests at its end.
fn code(text: &str) -> Vec<(usize, &str)> {
    let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    text[..end]
        .lines()
        .enumerate()
        .map(|(at, line)| (at + 1, line.split("//").next().unwrap_or_default()))
        .collect()
}

#[test]
fn every_crate_uses_only_what_its_floor_allows() {
    for (name, allowed) in FLOORS {
        let found = dependencies(&read(&root().join(name).join("Cargo.toml")));
        let allowed: BTreeSet<String> = allowed.iter().map(|one| (*one).to_owned()).collect();
        let extra: Vec<_> = found.difference(&allowed).collect();
        assert!(extra.is_empty(), "`{name}` must not use {extra:?}");
    }
}

#[test]
fn nothing_below_the_command_line_prints_or_reads_clocks_files_and_the_environment() {
    let mut offences = Vec::new();
    for (name, _) in FLOORS.iter().filter(|(name, _)| *name != "cli") {
        let files = sources(&root().join(name).join("src"));
        assert!(files.len() > 5, "`{name}` has its sources elsewhere");
        for file in files {
            for (line, text) in code(&read(&file)) {
                let found = FORBIDDEN.iter().filter(|word| text.contains(*word));
                offences.extend(found.map(|word| format!("{}:{line}: {word}", file.display())));
            }
        }
    }
    assert!(offences.is_empty(), "{offences:#?}");
}

#[test]
fn every_member_of_the_workspace_stands_on_a_floor() {
    let manifest = read(&root().join("Cargo.toml"));
    let members = manifest.lines().find_map(|line| line.strip_prefix("members = ")).unwrap();
    let names: BTreeSet<&str> = members.split('"').skip(1).step_by(2).collect();
    let known: BTreeSet<&str> = FLOORS.iter().map(|floor| floor.0).chain(["tests"]).collect();
    assert_eq!(names, known);
}
