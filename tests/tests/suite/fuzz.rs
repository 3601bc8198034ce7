//! The whole chain on plans drawn at random: opened, written and read as text, proven where that is possible, run on
//! all ranks in f64, and held to one device and to the predicted bytes.
//!
//! `PROPTEST_CASES=2000 PROPTEST_RNG_SEED=$RANDOM cargo test -p tests fuzz::` runs more and others: a seed gives the
//! same cases again, and the next one those of the second half. A failure prints its seed, the smallest case that fails
//! and the text of its plan; kept in `cases/`, that is run again for ever.

use std::fs;
use std::path::{Path, PathBuf};

use ir::text::{read_plan, write_plan};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use tests::fuzz::{MAX_RANKS, cases};
use tests::planner;

/// Cases of each half of a run, unless `PROPTEST_CASES` says another number.
const CASES: u32 = 50;

/// Seed of the first half of a run, the next is that of the second, unless `PROPTEST_RNG_SEED` says another: a change
/// is judged by the cases of the one before it.
const SEED: u64 = 1;

/// Verifies the plan in a file as it is, and says what was wrong.
fn verify(file: &Path) -> Result<(), String> {
    let (file, ranks) = (file.to_string_lossy(), MAX_RANKS.to_string());
    let said = planner(&["verify", &file, "--whole", "--precision", "f64", "--ranks", &ranks]);
    if said.code == 0 { Ok(()) } else { Err(said.to_string()) }
}

fn config(half: u64) -> ProptestConfig {
    let from_environment = ProptestConfig::default();
    let cases = if from_environment.cases == 256 { CASES } else { from_environment.cases };
    let rng_seed = match from_environment.rng_seed {
        RngSeed::Random => RngSeed::Fixed(SEED + half),
        RngSeed::Fixed(seed) => RngSeed::Fixed(seed.wrapping_add(half)),
    };
    let max_global_rejects = 20 * cases;
    ProptestConfig { cases, max_global_rejects, rng_seed, failure_persistence: None, ..from_environment }
}

/// The two halves run beside each other.
#[test]
fn any_legal_plan_computes_what_one_device_computes() {
    assert_plans_are_right(0);
}

#[test]
fn any_other_legal_plan_does() {
    assert_plans_are_right(1);
}

#[expect(clippy::disallowed_methods, reason = "plans are verified as files")]
#[expect(clippy::print_stdout, reason = "the seed of a run is part of what it says")]
#[expect(clippy::unwrap_used, reason = "a test that cannot write its own files has failed")]
fn assert_plans_are_right(half: u64) {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{half}.txt"));
    let config = config(half);
    let seed = config.rng_seed;
    println!("{} cases of PROPTEST_RNG_SEED={seed}", config.cases);
    proptest!(config, |(case in cases())| {
        let plan = case.plan();
        prop_assume!(plan.is_some());
        let text = write_plan(&plan.unwrap());
        prop_assert_eq!(&write_plan(&read_plan(&text).unwrap()), &text);
        fs::write(&file, &text).unwrap();
        let verified = verify(&file);
        prop_assert!(verified.is_ok(), "PROPTEST_RNG_SEED={seed}: {}\n{text}", verified.unwrap_err());
    });
}

#[test]
fn what_once_failed_holds() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("cases");
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for file in files.iter().filter(|file| file.extension().is_some_and(|end| end == "txt")) {
        let verified = verify(file);
        assert!(verified.is_ok(), "{}: {}", file.display(), verified.unwrap_err());
    }
}
