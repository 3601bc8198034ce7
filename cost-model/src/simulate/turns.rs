//! The same totals without a table, for schedules whose ranks warm up and then run a forward and a backward in turn.
//!
//! Forward number `n` of a rank is that of the same number of the rank before, backward number `u` that of the rank
//! behind, and a rank runs `F(n), B(n - warm-up)` one after the other. So a step is a recurrence over a few times per
//! rank:
//!
//! ```text
//! f_r(n) = max(free_r, f_(r-1)(n)) + F + t        free_r after F, or after its send where that is waited for
//! b_r(u) = max(free_r, b_(r+1)(u)) + B + t
//! first rank:  f_(p-1)(n - p) of the virtual stage before          last rank:  b_0(u - p) likewise       -> Beat
//! ```
//! Such a system is linear in the algebra of maximum and sum, so that once all its times have moved on by the same,
//! they do so for ever (Baccelli, Cohen, Olsder and Quadrat 1992, Synchronization and Linearity, section 3.7): the
//! middle of a long step is skipped. Maximum and sum never widen a difference, so what they moved on unevenly bounds
//! the error, which stays below [`EXACT`] of the step.

use ir::schedule::{MAX_ACTIONS, Placement, Schedule, Section, TableShape, table};
use ir::units::Seconds;

use super::{Durations, Lengths, PipelineTimes, RankTotals, SimulateError, Totals, totals};

/// Share of a step by which the skipped middle may be wrong.
pub const EXACT: f64 = 1e-10;

/// Beats after which it is asked whether a step has become steady, at least.
const ASKED_AFTER: u32 = 8;

/// What a schedule takes in sums: by recurrence where it takes turns, else by its table.
///
/// # Errors
/// Where the schedule has no table for so many stages and micro-batches, or the times do not fit it.
pub fn schedule_totals(
    schedule: Schedule,
    (n_stages, n_micro_batches): (u32, u32),
    times: &PipelineTimes,
) -> Result<Totals, SimulateError> {
    match Turns::new(schedule, n_stages, n_micro_batches) {
        Some(turns) => turns.totals(times),
        None => totals(&table(schedule, n_stages, n_micro_batches)?, times),
    }
}

/// A schedule whose ranks take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turns {
    schedule: Schedule,
    shape: TableShape,
}

impl Turns {
    /// `None` where it does not, or has no table.
    pub fn new(schedule: Schedule, n_stages: u32, n_micro_batches: u32) -> Option<Self> {
        let (placement, n_slices) = (schedule.placement(), schedule.n_slices());
        let counts = [n_stages, n_micro_batches, n_slices, schedule.n_virtual_stages()];
        let n_actions = counts.iter().fold(2_u64, |all, &n| all.saturating_mul(u64::from(n)));
        let is_sound = counts.iter().all(|&n| n > 0) && n_actions <= MAX_ACTIONS;
        let shape = TableShape { n_stages, placement, n_micro_batches, n_slices };
        (is_sound && warm_up(schedule, shape, 0).is_some()).then_some(Self { schedule, shape })
    }

    /// Forwards of a rank before its first backward, less the one that stands right before it. Further than there are
    /// forwards is as far as there are.
    fn warm_up(&self, rank: u32) -> u32 {
        warm_up(self.schedule, self.shape, rank).unwrap_or_else(|| self.n_units())
    }

    /// Forwards of a rank.
    fn n_units(&self) -> u32 {
        n_units(self.shape)
    }

    /// Most chunks of micro-batches, or of their slices, that a rank has under way.
    pub fn most_in_flight(&self, rank: u32) -> u32 {
        self.n_units().min(self.warm_up(rank).saturating_add(1))
    }

    /// Shows what a rank has under way of each of its virtual stages, after forwards until that repeats: then it is
    /// most. As long as the same virtual stages take turns it grows or falls evenly, so the last of each turn are
    /// enough.
    ///
    /// Virtual stages take turns every `n_stages` forwards, from the first to the last, and the other way round
    /// backward. Sequences are cut on one of them alone.
    pub fn under_way(&self, rank: u32, mut see: impl FnMut(&[u32])) {
        let (p, v) = (self.shape.n_stages, self.shape.n_virtual_stages());
        let cycle = p.saturating_mul(v);
        let turn = |unit: u32| unit % cycle / p;
        let (n_units, ahead) = (self.n_units(), self.warm_up(rank));
        let repeats = ahead.saturating_add(cycle);
        let n_seen = n_units.min(repeats.saturating_add(1));
        let mut counts = vec![0; v as usize];
        for unit in 0..n_seen {
            counts[turn(unit) as usize] += 1;
            let ends_back = unit >= ahead && (unit - ahead).is_multiple_of(p);
            if (unit + 1).is_multiple_of(p) || ends_back || unit + 1 == n_seen {
                see(&counts);
            }
            if let Some(back) = unit.checked_sub(ahead) {
                counts[(v - 1 - turn(back)) as usize] -= 1;
            }
        }
    }

    /// The same as [`totals`] of the schedule's table, to [`EXACT`].
    ///
    /// # Errors
    /// Where the times do not fit the schedule.
    pub fn totals(&self, times: &PipelineTimes) -> Result<Totals, SimulateError> {
        times.check_lengths(self.shape)?;
        let lengths = Lengths::new(times, self.shape, [Section::Forward, Section::Backward]);
        let mut beat = Beat::new(self, times, &lengths);
        let n_beats = beat.n_units + beat.ranks.first().map_or(0, |rank| rank.warm_up);
        let every = beat.n_cycle() * ASKED_AFTER.div_ceil(beat.n_cycle());
        // From here to the last forward of the first rank every rank runs one of each in a beat.
        let steady = beat.ranks.first().map_or(0, |rank| rank.warm_up);
        let mut seen: Vec<Seconds> = Vec::new();
        let mut now = 0;
        while now < n_beats {
            if now >= steady && now < beat.n_units && (now - steady).is_multiple_of(every) {
                let left = (beat.n_units - now) / every;
                if left > 1 && beat.moved_on(&seen, left) {
                    now += left * every;
                    seen.clear();
                    continue;
                }
                beat.remember(&mut seen);
            }
            beat.once(now);
            now += 1;
        }
        Ok(Totals { period_s: beat.period(), ranks: self.spent(times, &lengths) })
    }

    /// Where each rank's time goes: every micro-batch costs it the same.
    fn spent(&self, times: &PipelineTimes, lengths: &Lengths<2>) -> Vec<RankTotals> {
        let places = self.shape.n_virtual_stages() * self.shape.n_slices;
        let m = f64::from(self.shape.n_micro_batches);
        let of_rank = |rank: u32| {
            let mut spent = RankTotals::default();
            for sections in &lengths.of[(rank * places) as usize..][..places as usize] {
                let [forward, backward] = sections;
                spent.busy_s += (forward.compute + backward.compute) * m;
                spent.sending_s += times.exposed(forward.send + backward.send) * m;
            }
            spent
        };
        (0..self.shape.n_stages).map(of_rank).collect()
    }
}

/// Forwards of a rank.
fn n_units(shape: TableShape) -> u32 {
    shape.n_units() * shape.n_virtual_stages()
}

/// How many forwards a rank is ahead of its first backward, the one right before it apart; `None` where ranks do not
/// take turns.
fn warm_up(schedule: Schedule, shape: TableShape, rank: u32) -> Option<u32> {
    let TableShape { n_stages, n_micro_batches, .. } = shape;
    let behind = n_stages - 1 - rank;
    match schedule {
        Schedule::GPipe => Some(n_units(shape)),
        Schedule::TeraPipe { slices } if slices > 1 => Some(n_units(shape)),
        Schedule::OneFOneB => Some(behind),
        Schedule::Eager => Some(2 * behind),
        Schedule::Dapple { warm_up } if warm_up > 0 => {
            Some((2 * behind).min((warm_up - 1).saturating_sub(rank)))
        }
        Schedule::Interleaved { virtual_stages }
            if virtual_stages > 1 && n_micro_batches.is_multiple_of(n_stages) =>
        {
            Some(2 * behind + (virtual_stages - 1) * n_stages)
        }
        Schedule::Seq1F1B { slices } if slices > 1 => Some(behind + slices - 1),
        Schedule::TeraPipe { .. }
        | Schedule::Dapple { .. }
        | Schedule::Interleaved { .. }
        | Schedule::Seq1F1B { .. }
        | Schedule::BreadthFirst { .. }
        | Schedule::ZbH1
        | Schedule::ZbH2
        | Schedule::ZbV
        | Schedule::VHalf
        | Schedule::VMin
        | Schedule::Hanayo { .. }
        | Schedule::DualPipeV
        | Schedule::Chimera
        | Schedule::Custom(_) => None,
    }
}

/// One rank in the recurrence: times that move, and where in the beats its laps stand.
#[derive(Clone, Copy, Debug)]
struct Rank {
    /// Forwards before the first backward.
    warm_up: u32,
    /// Beats that it is behind the first rank: as far as the way back allows.
    late: u32,
    /// Whether it is later than the rank before, so that what it takes over is of the beat before.
    takes_old: bool,
    /// Whether a gradient that it takes over is of the beat before.
    takes_old_gradient: bool,
    /// Where in the cycle its forward of the first beat of a cycle stands.
    forward_at: usize,
    /// Where its backward does.
    backward_at: usize,
    /// When it is free.
    free: Seconds,
    /// When its last stream arrives.
    stream: Seconds,
    /// When its last gradient arrives.
    gradient: Seconds,
    /// When it began.
    began: Seconds,
    /// When its last backward ended.
    ended: Seconds,
}

/// Durations of an action.
#[derive(Clone, Copy)]
struct Lap {
    compute: Seconds,
    /// Until its rank is free again, which may wait for the send.
    held: Seconds,
    /// Until its result has arrived.
    arrival: Seconds,
}

/// A beat under way.
struct Now<'b> {
    now: u32,
    n_units: u32,
    n_places: u32,
    /// The cycle from this beat on.
    cycle: &'b [u32],
}

impl Now<'_> {
    /// A rank's next forward, if it has one left; at the `head` of the pipeline the first place takes nothing over.
    fn forward(&self, rank: &mut Rank, laps: &[[Lap; 2]], (given, is_head): (Seconds, bool)) {
        let nth = self.now.wrapping_sub(rank.late);
        if nth < self.n_units {
            let place = self.cycle[rank.forward_at];
            let [lap, _] = laps[place as usize];
            let arrived = if is_head && place == 0 { Seconds::ZERO } else { given };
            let start = later(rank.free, arrived);
            if nth == 0 {
                rank.began = start;
            }
            rank.free = start + lap.held;
            rank.stream = start + lap.arrival;
        }
    }

    /// A rank's next backward likewise; at its tail the last place does.
    fn backward(&self, rank: &mut Rank, laps: &[[Lap; 2]], (given, is_tail): (Seconds, bool)) {
        if self.now.wrapping_sub(rank.late + rank.warm_up) < self.n_units {
            let place = self.n_places - 1 - self.cycle[rank.backward_at];
            let [_, lap] = laps[place as usize];
            let arrived = if is_tail && place + 1 == self.n_places { Seconds::ZERO } else { given };
            let start = later(rank.free, arrived);
            rank.ended = start + lap.compute;
            rank.free = start + lap.held;
            rank.gradient = start + lap.arrival;
        }
    }
}

/// The later of two times, by a plain comparison: the order of all numbers, `Seconds::max`, takes most of a beat.
fn later(a: Seconds, b: Seconds) -> Seconds {
    if b > a { b } else { a }
}

/// All ranks, each one forward and one backward at a time.
struct Beat {
    ranks: Vec<Rank>,
    /// By rank and place, forward and backward.
    laps: Vec<[Lap; 2]>,
    /// Places (virtual stages, slices within them) of a rank's forwards, twice, so that a cycle may be read from any
    /// beat on; a backward's is as far from the end.
    cycle: Vec<u32>,
    n_places: u32,
    n_units: u32,
    /// Whether the stream comes round from the last rank to the first.
    goes_round: bool,
    /// Whether every gradient that is taken over is of the beat before.
    only_old_gradients: bool,
}

impl Beat {
    fn new(turns: &Turns, times: &PipelineTimes, lengths: &Lengths<2>) -> Self {
        let TableShape { n_stages, n_slices, .. } = turns.shape;
        let v = turns.shape.n_virtual_stages();
        let once: Vec<u32> = match turns.shape.placement {
            Placement::Looped { virtual_stages: 2.. } => (0..n_stages * v).map(|k| k / n_stages).collect(),
            Placement::Looped { .. } | Placement::Waves { .. } | Placement::Bidirectional => {
                (0..n_slices).collect()
            }
        };
        // The place in the cycle, in the first beat of all, of what begins with its first place so many beats later.
        let at = |first: u32| once.len() - 1 - (first as usize + once.len() - 1) % once.len();
        let mut ranks: Vec<Rank> = Vec::with_capacity(n_stages as usize);
        for rank in 0..n_stages {
            let warm_up = turns.warm_up(rank);
            let (late, fewer) =
                ranks.last().map_or((0, 0), |before| (before.late, before.warm_up.saturating_sub(warm_up)));
            let later = fewer.saturating_sub(1).min(1);
            if let Some(before) = ranks.last_mut() {
                before.takes_old_gradient = fewer > later;
            }
            let late = late + later;
            ranks.push(Rank {
                warm_up,
                late,
                takes_old: later > 0,
                takes_old_gradient: false,
                forward_at: at(late),
                backward_at: at(late + warm_up),
                free: Seconds::ZERO,
                stream: Seconds::ZERO,
                gradient: Seconds::ZERO,
                began: Seconds::ZERO,
                ended: Seconds::ZERO,
            });
        }
        let lap = |&Durations { compute, send }: &Durations| Lap {
            compute,
            held: compute + times.exposed(send),
            arrival: compute + send,
        };
        let laps = lengths.of.iter().map(|both| both.each_ref().map(lap)).collect();
        let (n_places, n_units) = (v * n_slices, turns.n_units());
        let cycle = [once.as_slice(), &once].concat();
        let only_old_gradients = ranks.iter().rev().skip(1).all(|rank| rank.takes_old_gradient);
        Self { ranks, laps, cycle, n_places, n_units, goes_round: v > 1, only_old_gradients }
    }

    /// Beats of a cycle.
    fn n_cycle(&self) -> u32 {
        (self.cycle.len() / 2) as u32
    }

    /// One beat: every rank's next forward, in order, then every rank's next backward, from the last.
    fn once(&mut self, now: u32) {
        let cycle = &self.cycle[now as usize % (self.cycle.len() / 2)..];
        let at = Now { now, n_units: self.n_units, n_places: self.n_places, cycle };
        let laps = self.laps.chunks_exact(self.n_places as usize);
        let last = self.ranks.len() - 1;
        let (mut before, mut behind) = match self.goes_round {
            true => (self.ranks[last].stream, self.ranks[0].gradient),
            false => (Seconds::ZERO, Seconds::ZERO),
        };
        let mut old = before;
        if self.only_old_gradients {
            // A rank's backward needs nothing of this beat but its own forward.
            for (i, laps) in laps.enumerate() {
                let gradient = if i == last { behind } else { self.ranks[i + 1].gradient };
                let rank = &mut self.ranks[i];
                let was = rank.stream;
                let given = if rank.takes_old || i == 0 { old } else { before };
                at.forward(rank, laps, (given, i == 0));
                at.backward(rank, laps, (gradient, i == last));
                (old, before) = (was, rank.stream);
            }
            return;
        }
        for (i, (rank, laps)) in self.ranks.iter_mut().zip(laps.clone()).enumerate() {
            let was = rank.stream;
            let given = if rank.takes_old || i == 0 { old } else { before };
            at.forward(rank, laps, (given, i == 0));
            (old, before) = (was, rank.stream);
        }
        let mut old = behind;
        for (i, (rank, laps)) in self.ranks.iter_mut().zip(laps).enumerate().rev() {
            let was = rank.gradient;
            let given = if rank.takes_old_gradient || i == last { old } else { behind };
            at.backward(rank, laps, (given, i == last));
            (old, behind) = (was, rank.gradient);
        }
    }

    /// The times that the next beats depend on.
    fn remember(&self, seen: &mut Vec<Seconds>) {
        seen.clear();
        seen.extend(self.ranks.iter().flat_map(|rank| [rank.free, rank.stream, rank.gradient]));
    }

    /// Skips so many rounds, if all times have moved on by the same since they were seen, one round ago.
    fn moved_on(&mut self, seen: &[Seconds], rounds: u32) -> bool {
        if seen.is_empty() {
            return false;
        }
        let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
        let times = self.ranks.iter().flat_map(|rank| [rank.free, rank.stream, rank.gradient]);
        for (now, seen) in times.zip(seen) {
            let moved = (now - *seen).0;
            (least, most) = (least.min(moved), most.max(moved));
        }
        let latest = self.ranks.iter().map(|rank| rank.free.0).fold(0.0, f64::max);
        if (most - least) * f64::from(rounds) > EXACT * latest {
            return false;
        }
        let on = Seconds(most) * f64::from(rounds);
        for rank in &mut self.ranks {
            rank.free += on;
            rank.stream += on;
            rank.gradient += on;
            rank.ended += on;
        }
        true
    }

    /// The longest time from a rank's first action to its last.
    fn period(&self) -> Seconds {
        let length = |rank: &Rank| rank.ended - rank.began;
        self.ranks.iter().map(length).fold(Seconds::ZERO, Seconds::max)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::simulate::Transfers;
    use ir::schedule::peak_in_flight;

    fn schedules() -> impl Strategy<Value = Schedule> {
        prop_oneof![
            Just(Schedule::GPipe),
            Just(Schedule::OneFOneB),
            Just(Schedule::Eager),
            (1..12_u32).prop_map(|warm_up| Schedule::Dapple { warm_up }),
            (2..5_u32).prop_map(|virtual_stages| Schedule::Interleaved { virtual_stages }),
            (2..5_u32).prop_map(|slices| Schedule::Seq1F1B { slices }),
            (2..5_u32).prop_map(|slices| Schedule::TeraPipe { slices }),
        ]
    }

    proptest! {
        /// Whatever its chunks weigh, a rank has as much under way as along its row of the table.
        #[test]
        fn chunks_under_way_are_those_of_the_table(
            (v, p, groups) in (1..5_u32, 1..6_u32, 1..6_u32),
            weights in proptest::collection::vec(0..9_u32, 4),
        ) {
            let schedule = if v == 1 { Schedule::OneFOneB } else { Schedule::Interleaved { virtual_stages: v } };
            let m = p * groups;
            let turns = Turns::new(schedule, p, m).unwrap();
            let weigh = |counts: &[u32]| counts.iter().zip(&weights).map(|(n, weight)| n * weight).sum::<u32>();
            for (rank, row) in (0..).zip(table(schedule, p, m).unwrap()) {
                let (mut counts, mut most) = (vec![0; v as usize], 0);
                for action in row {
                    let own = &mut counts[action.virtual_stage as usize];
                    *own = if action.section == Section::Forward { *own + 1 } else { *own - 1 };
                    most = most.max(weigh(&counts));
                }
                let mut told = 0;
                turns.under_way(rank, |counts| told = told.max(weigh(counts)));
                prop_assert_eq!(told, most);
            }
        }
    }

    /// Chunks of which every `alike`-th has times of its own.
    fn times(
        schedule: Schedule,
        p: u32,
        (each, alike): (&[(f64, f64, f64)], usize),
        transfers: Transfers,
    ) -> PipelineTimes {
        let (placement, n_slices) = (schedule.placement(), schedule.n_slices());
        let n = (placement.n_chunks(p) * n_slices) as usize;
        let at = |i: usize| if i.is_multiple_of(alike) { each[i % each.len()] } else { each[0] };
        let list = |n: usize, of: fn((f64, f64, f64)) -> f64| (0..n).map(|i| Seconds(of(at(i)))).collect();
        PipelineTimes {
            placement,
            n_slices,
            forward: list(n, |one| one.0),
            backward: list(n, |one| one.1),
            parts: None,
            boundary: list(n - n_slices as usize, |one| one.2),
            branches: None,
            transfers,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

        #[test]
        fn the_recurrence_is_the_walk_over_the_table(
            p in 1..7_u32,
            groups in 1..40_u32,
            schedule in schedules(),
            each in proptest::collection::vec((0.1..3.0_f64, 0.1..3.0_f64, 0.0..2.0_f64), 5),
            alike in 1..7_usize,
            exposed in proptest::bool::ANY,
        ) {
            let m = if matches!(schedule, Schedule::Interleaved { .. }) { p * groups } else { groups };
            let transfers = if exposed { Transfers::Exposed } else { Transfers::Overlapped };
            let times = times(schedule, p, (&each, alike), transfers);
            let rows = table(schedule, p, m).unwrap();
            let walked = totals(&rows, &times).unwrap();
            let found = Turns::new(schedule, p, m).unwrap().totals(&times).unwrap();
            let near = |a: Seconds, b: Seconds| (a.0 - b.0).abs() <= 2.0 * EXACT * walked.period_s.0;
            prop_assert!(near(found.period_s, walked.period_s), "{schedule} p={p} m={m}: {found:?} {walked:?}");
            for (found, walked) in found.ranks.iter().zip(&walked.ranks) {
                prop_assert!(near(found.busy_s, walked.busy_s) && near(found.sending_s, walked.sending_s));
            }
        }

        #[test]
        fn as_many_are_under_way_as_in_the_table(p in 1..9_u32, groups in 1..9_u32, schedule in schedules()) {
            let m = if matches!(schedule, Schedule::Interleaved { .. }) { p * groups } else { groups };
            let turns = Turns::new(schedule, p, m).unwrap();
            let found: Vec<u32> = (0..p).map(|rank| turns.most_in_flight(rank)).collect();
            prop_assert_eq!(found, peak_in_flight(&table(schedule, p, m).unwrap()));
        }
    }

    #[test]
    fn a_long_step_of_equal_stages_is_its_closed_form() {
        let one = [(1.0, 2.0, 0.0)];
        let times = times(Schedule::OneFOneB, 512, (&one, 1), Transfers::Exposed);
        let found = schedule_totals(Schedule::OneFOneB, (512, 8192), &times).unwrap();
        assert!((found.period_s.0 - 3.0 * (8192.0 + 511.0)).abs() < 1e-5, "{found:?}");
    }

    #[test]
    fn what_has_no_table_is_its_error() {
        let times = times(
            Schedule::Interleaved { virtual_stages: 2 },
            4,
            (&[(1.0, 1.0, 0.0)], 1),
            Transfers::Exposed,
        );
        let of = |m| schedule_totals(Schedule::Interleaved { virtual_stages: 2 }, (4, m), &times);
        assert!(of(8).is_ok());
        assert!(matches!(of(6), Err(SimulateError::Table(_))));
        assert!(matches!(
            schedule_totals(Schedule::OneFOneB, (4, 8), &times),
            Err(SimulateError::Lengths { .. })
        ));
    }
}
