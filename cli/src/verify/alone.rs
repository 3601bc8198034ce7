//! The one device that a copy is held to: its run, the seed that it is sound with, and what rounding alone makes of it.

use std::collections::BTreeMap;
use std::rc::Rc;

use executor::compare::{Precision, compare};
use executor::error::ExecutorError;
use executor::job::{Execution, Reference, Training};
use executor::kernels::Real;
use executor::run::{Outcome, run, run_routed, start};

use crate::copy::{SEED, SmallRun};
use crate::failure::Failure;

/// Seeds that are tried in single precision.
const SEEDS: u64 = 4;

/// Share of the tolerance that rounding on one device may take for a seed to be of use. In bf16 that is all of it: the
/// tolerance is of rounding, and each operator has its own beside it.
fn sound(precision: Precision) -> f64 {
    match precision {
        Precision::F32 | Precision::F64 => 0.25,
        Precision::Bf16 => 1.0,
    }
}

/// The run of one device.
pub(super) fn alone<E: Real>(
    small: &SmallRun<'_>,
    (precision, seed): (Precision, u64),
) -> Result<Outcome, Failure> {
    let execution = small.in_whole(precision, seed);
    run::<E>(&Reference::of(&execution).execution(&execution), &|_, _| 0)
        .map_err(|error| Failure::NotVerified(format!("one device: {error}")))
}

/// Runs of one device in double precision from the starts of single precision, by their seeds: whichever is judged,
/// they are the same.
pub(super) type Exact = BTreeMap<u64, Rc<Outcome>>;

/// One device with a seed.
pub(super) struct Sound {
    pub(super) seed: u64,
    pub(super) alone: Outcome,
    /// The same in double precision.
    pub(super) exact: Rc<Outcome>,
    /// The largest difference between both, in units of what is allowed.
    pub(super) excess: f64,
}

/// The first seed with which one device alone gives nearly the same numbers as in double precision; where none does,
/// the nearest, and then what rounding carries on one device is allowed to the plan too (`compare`).
///
/// A model of a few elements may be so ill-conditioned that rounding alone exceeds the tolerance, however it is split.
pub(super) fn sound_seed<E: Real>(
    small: &SmallRun<'_>,
    precision: Precision,
    known: &mut Exact,
) -> Result<Sound, Failure> {
    let mut nearest: Option<Sound> = None;
    for seed in SEED..SEED + SEEDS {
        let is_known = known.contains_key(&seed);
        let in_double = || (!is_known).then(|| alone::<f64>(small, (Precision::F32, seed))).transpose();
        let (exact, alone) = rayon::join(in_double, || alone::<E>(small, (precision, seed)));
        if let Some(exact) = exact? {
            known.insert(seed, Rc::new(exact));
        }
        let exact = Rc::clone(&known[&seed]);
        let alone = alone?;
        let excess = compare(&exact, &alone, precision).worst.first().map_or(0.0, |worst| worst.excess);
        if nearest.as_ref().is_none_or(|known| excess < known.excess) {
            nearest = Some(Sound { seed, alone, exact, excess });
        }
        if excess <= sound(precision) {
            break;
        }
    }
    nearest.ok_or_else(|| Failure::bug("no seed was tried"))
}

/// The one device with every parameter moved by one rounding, and how far that takes it, in units of what is allowed: a
/// model of a few elements may be so ill-conditioned that rounding exceeds the tolerance in one order of its sums or
/// another.
pub(super) fn shaken<E: Real>(
    small: &SmallRun<'_>,
    (precision, seed): (Precision, u64),
    expected: &Outcome,
) -> Result<(Outcome, f64), Failure> {
    let of_one = |error: ExecutorError| Failure::NotVerified(format!("one device: {error}"));
    let execution = small.in_whole(precision, seed);
    let reference = Reference::of(&execution);
    let alone = reference.execution(&execution);
    let moved = start(&alone).map_err(of_one)?.shaken(precision.unit());
    let training = Training { from: Some(&moved), ..alone.training };
    let shaken = Execution { training, ..alone };
    let programs = executor::run::programs(&shaken).map_err(of_one)?;
    let shaken = run_routed::<E>(&shaken, &programs, expected, &|_, _| 0).map_err(of_one)?;
    let far = compare(expected, &shaken, precision).worst.first().map_or(0.0, |worst| worst.excess);
    Ok((shaken, far))
}
