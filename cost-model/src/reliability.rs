//! What failures cost a training: checkpoints, the time between them, and the share of the time that trains.
//!
//! `M` is the mean time between failures of the job, `d` the stall of a checkpoint, `R` the time from a failure until
//! training goes on, `t` the training between two checkpoints; failures come at random (Poisson):
//! ```text
//! young    t = sqrt(2 d M)                                                     Young 1974           -> young()
//! daly     t = sqrt(2 d M) (1 + sqrt(d / 2 M) / 3 + d / 18 M) - d, at most M   Daly 2006, eq. 37    -> daly()
//! goodput  g = t / (M e^(R / M) (e^((t + d) / M) - 1))                         Daly 2006, eq. 20    -> goodput()
//! ```
//! `replay()` walks through failures one by one and uses none of these: a second witness.

use ir::cluster::{Cluster, DeviceGroup};
use ir::units::{Bytes, BytesPerSecond, Seconds};

use crate::constants::Constants;
use crate::memory::StateBytes;

/// What decides how well a job bears failures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Upkeep {
    /// Mean time between failures of the whole job.
    pub between_failures: Seconds,
    /// What training waits for a checkpoint.
    pub stall: Seconds,
    /// From a failure until training goes on from the last checkpoint.
    pub restart: Seconds,
}

impl Upkeep {
    /// Training between checkpoints, to first order.
    ///
    /// Failures every 3 h and 30 s of stall: sqrt(2 x 30 x 10800) = 805 s.
    pub fn young(self) -> Seconds {
        Seconds((2.0 * self.stall.0 * self.between_failures.0).sqrt())
    }

    /// Training between checkpoints that loses least.
    ///
    /// Failures every 3 h and 30 s of stall: 805 s x (1 + 0.0124 + 0.0002) - 30 s = 785 s.
    pub fn daly(self) -> Seconds {
        let (stall, between) = (self.stall.0, self.between_failures.0);
        if stall >= 2.0 * between {
            return self.between_failures;
        }
        let more = (stall / (2.0 * between)).sqrt() / 3.0 + stall / (18.0 * between);
        Seconds(self.young().0 * (1.0 + more) - stall)
    }

    /// Share of the time that is training which lasts, with so much training between checkpoints.
    ///
    /// Failures every 3 h, 30 s of stall, 600 s until training goes on, checkpoints every 785 s: 87.7 %.
    pub fn goodput(self, interval: Seconds) -> f64 {
        let mean = self.between_failures.0;
        if mean <= 0.0 {
            return 0.0;
        }
        let segment = ((interval.0 + self.stall.0) / mean).exp_m1();
        interval.0 / (mean * (self.restart.0 / mean).exp() * segment)
    }
}

/// A checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Checkpoint {
    /// Parameters, their fp32 copies and the optimizer's moments, each once.
    pub bytes: Bytes,
    /// What training waits for it.
    pub stall: Seconds,
    /// Until it is in storage; no two are under way at once.
    pub write: Seconds,
}

/// A checkpoint of so many trained parameters: every device copies an even share to its host, and what writes it from
/// there does not stop training (as CheckFreq, Mohan et al. 2021, and Gemini, Wang et al. 2023).
///
/// 405e9 parameters of 14 bytes on 16384 devices at 63 GB/s: 5.67 TB, 5.5 ms; at 0.12 GB/s each into storage: 2.9 s.
pub fn checkpoint(
    n_trained: f64,
    states: StateBytes,
    cluster: &Cluster,
    constants: &Constants,
) -> Checkpoint {
    let bytes = (states.parameter + states.optimizer()) * n_trained;
    let links = cluster.groups.iter().map(|group| group.device.host_link_bytes_per_s);
    let link = links.fold(BytesPerSecond(f64::INFINITY), BytesPerSecond::min);
    let share = bytes / cluster.n_devices().max(1) as f64;
    Checkpoint { bytes, stall: share / link, write: share / constants.storage_bytes_per_s_per_device }
}

/// Mean time between failures of a job on all devices; nothing where a group does not say how often its devices fail.
///
/// 16384 devices of 19.7 failures per million hours: 3.1 h.
pub fn between_failures(cluster: &Cluster) -> Option<Seconds> {
    let rate = |group: &DeviceGroup| Some(group.failures_per_device_hour? * group.count as f64);
    let per_hour: f64 = cluster.groups.iter().map(rate).sum::<Option<f64>>()?;
    (per_hour > 0.0).then(|| Seconds(3600.0 / per_hour))
}

/// A moment at which training stops.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Failure {
    /// Since training began.
    pub at: Seconds,
    /// How long devices are gone, before anything can be started again.
    pub gone: Seconds,
}

/// Where the time went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ledger {
    /// Training that lasts.
    pub useful: Seconds,
    /// Training that a failure undid.
    pub lost: Seconds,
    /// Waiting for checkpoints.
    pub checkpoints: Seconds,
    /// From failures until training went on.
    pub down: Seconds,
    /// Failures that stopped training or a start of it.
    pub n_failures: u64,
    /// Checkpoints that were finished.
    pub n_checkpoints: u64,
}

impl Ledger {
    /// All of it.
    pub fn total(&self) -> Seconds {
        self.useful + self.lost + self.checkpoints + self.down
    }

    /// Share of the time that is training which lasts.
    pub fn goodput(&self) -> f64 {
        if self.total() > Seconds::ZERO { self.useful / self.total() } else { 0.0 }
    }
}

/// Walks through `failures`, in the order of time, until `end`; a checkpoint follows every `interval` of training.
///
/// What is trained at the end is kept. A failure while devices are gone or while training starts begins that anew.
pub fn replay(upkeep: Upkeep, interval: Seconds, failures: &[Failure], end: Seconds) -> Ledger {
    let mut ledger = Ledger::default();
    let mut resumed = Seconds::ZERO;
    for failure in failures.iter().filter(|failure| failure.at < end) {
        ledger.n_failures += 1;
        if failure.at >= resumed {
            let unsaved = run(upkeep, interval, failure.at - resumed, &mut ledger);
            ledger.lost += unsaved;
            resumed = failure.at;
        }
        // What an earlier failure still had to wait for is not waited for twice.
        let again = (failure.at + failure.gone + upkeep.restart).max(resumed).min(end);
        ledger.down += again - resumed;
        resumed = again;
    }
    let kept = run(upkeep, interval, end - resumed, &mut ledger);
    ledger.useful += kept;
    ledger
}

/// Trains for so long without a failure; returns what no checkpoint holds at the end.
fn run(upkeep: Upkeep, interval: Seconds, length: Seconds, ledger: &mut Ledger) -> Seconds {
    let segment = interval + upkeep.stall;
    let whole = (length / segment).floor();
    ledger.n_checkpoints += whole as u64;
    ledger.useful += interval * whole;
    let rest = (length - segment * whole).max(Seconds::ZERO);
    let unsaved = rest.min(interval);
    ledger.checkpoints += upkeep.stall * whole + (rest - unsaved);
    unsaved
}

/// Failures at random until `end`, the same for the same seed.
pub fn at_random(between_failures: Seconds, end: Seconds, seed: u64) -> Vec<Failure> {
    let mut state = seed;
    let mut failures = Vec::new();
    let mut at = 0.0;
    loop {
        // An exponential gap; the uniform number is below one, so that its logarithm is finite.
        at -= between_failures.0 * (1.0 - uniform(&mut state)).ln();
        if at.is_nan() || at >= end.0 || failures.len() >= MOST_FAILURES {
            return failures;
        }
        failures.push(Failure { at: Seconds(at), gone: Seconds::ZERO });
    }
}

/// Failures that are made up at most: a job that fails more often does not train.
pub const MOST_FAILURES: usize = 10_000_000;

/// A number in zero to one; splitmix64 (Steele, Lea and Flood 2014).
fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    (mixed >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use ir::cluster::Precision;
    use ir::engine::GradientFormat;
    use proptest::prelude::*;

    use super::*;

    const JOB: Upkeep =
        Upkeep { between_failures: Seconds(10800.0), stall: Seconds(30.0), restart: Seconds(600.0) };

    fn failure(at: f64) -> Failure {
        Failure { at: Seconds(at), gone: Seconds::ZERO }
    }

    #[test]
    fn intervals_are_those_of_young_and_daly() {
        assert_eq!((JOB.young().0.round(), JOB.daly().0.round()), (805.0, 785.0));
        let hopeless = Upkeep { stall: Seconds(30_000.0), ..JOB };
        assert_eq!(hopeless.daly(), hopeless.between_failures);
    }

    #[test]
    fn no_other_interval_does_better_than_dalys_by_much() {
        let best = (1..2000).map(|at| JOB.goodput(Seconds(f64::from(at) * 5.0))).fold(0.0, f64::max);
        assert!(best - JOB.goodput(JOB.daly()) < 1e-5);
        assert!((best - 0.877).abs() < 1e-3, "{best}");
    }

    /// 419 unexpected interruptions in 54 days on 16384 H100, and "higher than 90 % effective training time" (arXiv
    /// 2407.21783 section 3.3.4): 1.6 % are planned stops, which no formula here has.
    #[test]
    fn the_published_training_of_405_billion_parameters_is_within_its_goodput() {
        let mut cluster = crate::group::tests::dgx_a100();
        let group = &mut cluster.groups[0];
        group.count = 16384;
        group.failures_per_device_hour = Some(419.0 / (54.0 * 24.0 * 16384.0));
        group.device.host_link_bytes_per_s = BytesPerSecond(63e9);
        let found = between_failures(&cluster).unwrap();
        assert!((found.0 / 3600.0 - 54.0 * 24.0 / 419.0).abs() < 1e-9);
        let states = StateBytes::adamw(Precision::Bf16, GradientFormat::Full);
        let checkpoint = checkpoint(405e9, states, &cluster, &Constants::load());
        assert!((checkpoint.bytes.0 / 5.67e12 - 1.0).abs() < 1e-9);
        let restart = Constants::load().restart_s;
        let job = Upkeep { between_failures: found, stall: checkpoint.stall, restart };
        let goodput = job.goodput(job.daly().max(checkpoint.write));
        assert!((0.90..0.96).contains(&goodput), "{goodput}");
    }

    #[test]
    fn a_failure_undoes_what_follows_the_last_checkpoint() {
        // 100 s of training and 10 s of checkpoint in turn; 250 s: two and 30 s more, which are lost; 60 s of waiting.
        let job = Upkeep { between_failures: Seconds(1.0), stall: Seconds(10.0), restart: Seconds(60.0) };
        let ledger = replay(job, Seconds(100.0), &[failure(250.0)], Seconds(400.0));
        let expected = Ledger {
            useful: Seconds(290.0),
            lost: Seconds(30.0),
            checkpoints: Seconds(20.0),
            down: Seconds(60.0),
            n_failures: 1,
            n_checkpoints: 2,
        };
        assert_eq!(ledger, expected);
    }

    #[test]
    fn a_failure_while_training_starts_begins_that_anew() {
        let job = Upkeep { between_failures: Seconds(1.0), stall: Seconds(10.0), restart: Seconds(60.0) };
        let ledger = replay(job, Seconds(100.0), &[failure(50.0), failure(80.0)], Seconds(200.0));
        assert_eq!((ledger.lost, ledger.down, ledger.useful), (Seconds(50.0), Seconds(90.0), Seconds(60.0)));
    }

    #[test]
    fn random_failures_lose_what_the_formula_says() {
        let end = Seconds(10800.0 * 20_000.0);
        for interval in [200.0, 785.0, 3000.0] {
            let ledger = replay(JOB, Seconds(interval), &at_random(JOB.between_failures, end, 7), end);
            let (walked, formula) = (ledger.goodput(), JOB.goodput(Seconds(interval)));
            assert!((walked / formula - 1.0).abs() < 0.01, "{interval}: {walked} {formula}");
        }
    }

    proptest! {
        #[test]
        fn every_second_is_somewhere(seed in 0_u64..1000, interval in 1.0..1e4_f64, mean in 100.0..1e5_f64) {
            let (job, end) = (Upkeep { between_failures: Seconds(mean), ..JOB }, Seconds(1e6));
            let ledger = replay(job, Seconds(interval), &at_random(job.between_failures, end, seed), end);
            prop_assert!((ledger.total().0 - 1e6).abs() < 1e-3, "{ledger:?}");
            let parts = [ledger.useful, ledger.lost, ledger.checkpoints, ledger.down];
            prop_assert!(parts.iter().all(|part| part.0 >= 0.0), "{ledger:?}");
        }
    }
}
