//! Pipeline schedules as tables of actions: what each pipeline rank runs, in which order.
//!
//! A schedule knows order, not time: pricing and simulating a table is the cost model's business. One small function
//! per schedule writes its table; `check_table` judges any table without knowing which schedule wrote it.
//!
//! Rank `r` of `p` holds `v` virtual stages; virtual stage `c` of rank `r` is chunk `c * p + r` of the model, so that
//! micro-batches pass chunks in rising order forward and in falling order backward.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::units::Seconds;

/// The most actions a table may have: 128 MiB of them. The largest published run has well below a million.
pub const MAX_ACTIONS: u64 = 1 << 23;

/// A rule that orders the micro-batches of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward after a warm-up (Narayanan et al. 2019, PipeDream-Flush: arXiv 2006.09503).
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B over several virtual stages per rank (Narayanan et al. 2021, arXiv 2104.04473).
    Interleaved {
        /// Virtual stages of each rank, at least 2.
        virtual_stages: u32,
    },
}

impl Schedule {
    /// Virtual stages that each rank holds.
    pub fn n_virtual_stages(self) -> u32 {
        match self {
            Self::GPipe | Self::OneFOneB => 1,
            Self::Interleaved { virtual_stages } => virtual_stages,
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GPipe => write!(f, "gpipe"),
            Self::OneFOneB => write!(f, "1f1b"),
            Self::Interleaved { virtual_stages } => write!(f, "interleaved({virtual_stages})"),
        }
    }
}

/// The part of a stage's program that an action runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Section {
    /// Forward of one micro-batch.
    Forward,
    /// Full backward of one micro-batch: input and weight gradients.
    Backward,
}

/// One entry of a schedule's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct Action {
    /// Pipeline rank that runs it.
    pub rank: u32,
    /// Forward or backward.
    pub section: Section,
    /// Which of the rank's virtual stages.
    pub virtual_stage: u32,
    /// Which micro-batch of the step.
    pub micro_batch: u32,
}

impl Action {
    /// Position of the action's layers in the model: chunk `virtual_stage * n_stages + rank`.
    pub fn chunk(self, n_stages: u32) -> u32 {
        self.virtual_stage * n_stages + self.rank
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let section = match self.section {
            Section::Forward => "forward",
            Section::Backward => "backward",
        };
        write!(f, "{section} of micro-batch {} on virtual stage {}", self.micro_batch, self.virtual_stage)
    }
}

/// Why a schedule has no table, or why a table is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ScheduleError {
    /// A count is zero.
    #[error("a pipeline needs at least one stage, one virtual stage and one micro-batch")]
    Empty,
    /// Interleaving over one virtual stage is another schedule.
    #[error("`interleaved` needs at least 2 virtual stages; with 1, use `1f1b`")]
    NotInterleaved,
    /// Megatron's interleaved order takes micro-batches in groups of the pipeline's length.
    #[error("`interleaved` needs micro-batches in multiples of {n_stages} stages, found {n_micro_batches}")]
    NotAMultiple {
        /// Micro-batches asked for.
        n_micro_batches: u32,
        /// Pipeline ranks.
        n_stages: u32,
    },
    /// More actions than `MAX_ACTIONS`.
    #[error("a table of {n_actions} actions is above the limit of {MAX_ACTIONS}")]
    TooLarge {
        /// Actions the table would have.
        n_actions: u64,
    },
    /// An action names another rank, or a virtual stage or micro-batch that does not exist.
    #[error("rank {rank}: {action} (marked rank {}) does not belong in this table", action.rank)]
    OutOfPlace {
        /// Row of the table.
        rank: u32,
        /// The stray action.
        action: Action,
    },
    /// An action is listed twice.
    #[error("rank {rank}: {action} is listed twice")]
    Twice {
        /// Row of the table.
        rank: u32,
        /// The repeated action.
        action: Action,
    },
    /// An action is not listed.
    #[error("rank {rank}: {action} is missing")]
    Missing {
        /// Row of the table.
        rank: u32,
        /// The absent action.
        action: Action,
    },
    /// A rank waits for something that never comes.
    #[error("rank {rank}: {action} waits for ever on {needs} of rank {}", needs.rank)]
    Deadlock {
        /// The first rank that cannot go on.
        rank: u32,
        /// What it tries to run.
        action: Action,
        /// What it needs first.
        needs: Action,
    },
}

/// What every rank runs, in order.
///
/// `n_stages` pipeline ranks, `n_micro_batches` per step. Each rank has `2 * m * v` actions:
/// 1F1B with 2 stages and 2 micro-batches gives rank 0 `F0 F1 B0 B1` and rank 1 `F0 B0 F1 B1`.
pub fn table(
    schedule: Schedule,
    n_stages: u32,
    n_micro_batches: u32,
) -> Result<Vec<Vec<Action>>, ScheduleError> {
    let shape = TableShape { n_stages, n_virtual_stages: schedule.n_virtual_stages(), n_micro_batches };
    shape.check()?;
    match schedule {
        Schedule::GPipe => Ok((0..n_stages).map(|rank| gpipe(rank, shape)).collect()),
        Schedule::OneFOneB => Ok((0..n_stages).map(|rank| one_f_one_b(rank, shape)).collect()),
        Schedule::Interleaved { virtual_stages } if virtual_stages < 2 => Err(ScheduleError::NotInterleaved),
        Schedule::Interleaved { .. } if !n_micro_batches.is_multiple_of(n_stages) => {
            Err(ScheduleError::NotAMultiple { n_micro_batches, n_stages })
        }
        Schedule::Interleaved { .. } => Ok((0..n_stages).map(|rank| interleaved(rank, shape)).collect()),
    }
}

/// The counts that fix a table's actions, whatever their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableShape {
    /// Pipeline ranks.
    pub n_stages: u32,
    /// Virtual stages per rank.
    pub n_virtual_stages: u32,
    /// Micro-batches per step.
    pub n_micro_batches: u32,
}

impl TableShape {
    /// Chunks the model is cut into.
    pub fn n_chunks(self) -> u32 {
        self.n_stages.saturating_mul(self.n_virtual_stages)
    }

    /// Actions of all ranks.
    pub fn n_actions(self) -> u64 {
        (2 * u64::from(self.n_stages) * u64::from(self.n_virtual_stages))
            .saturating_mul(u64::from(self.n_micro_batches))
    }

    fn check(self) -> Result<(), ScheduleError> {
        if self.n_stages == 0 || self.n_virtual_stages == 0 || self.n_micro_batches == 0 {
            return Err(ScheduleError::Empty);
        }
        match self.n_actions() {
            n_actions if n_actions > MAX_ACTIONS => Err(ScheduleError::TooLarge { n_actions }),
            _ => Ok(()),
        }
    }

    /// A place for every action of the shape, dense from 0; `check_table` vouches that an action belongs to it.
    pub fn index(self, action: Action) -> usize {
        let section = match action.section {
            Section::Forward => 0,
            Section::Backward => 1,
        };
        let chunk = (section * self.n_chunks() + action.chunk(self.n_stages)) as usize;
        chunk * self.n_micro_batches as usize + action.micro_batch as usize
    }

    fn holds(self, action: Action) -> bool {
        action.rank < self.n_stages
            && action.virtual_stage < self.n_virtual_stages
            && action.micro_batch < self.n_micro_batches
    }

    fn action(self, section: Section, chunk: u32, micro_batch: u32) -> Action {
        let (rank, virtual_stage) = (chunk % self.n_stages, chunk / self.n_stages);
        Action { rank, section, virtual_stage, micro_batch }
    }

    /// What must end before `action` may start; nothing for the first chunk's forward.
    ///
    /// A forward needs the forward of the chunk before; a backward the backward of the chunk after; the last chunk's
    /// backward its own forward. (Any other backward needs its own forward too, which these imply.)
    pub fn needs(self, action: Action) -> Option<Action> {
        let chunk = action.chunk(self.n_stages);
        let last = self.n_chunks() - 1;
        match action.section {
            Section::Forward if chunk == 0 => None,
            Section::Forward => Some(self.action(Section::Forward, chunk - 1, action.micro_batch)),
            Section::Backward if chunk == last => Some(Action { section: Section::Forward, ..action }),
            Section::Backward => Some(self.action(Section::Backward, chunk + 1, action.micro_batch)),
        }
    }

    /// What may start once `action` has ended, as far as other ranks and this one wait for it.
    fn allows(self, action: Action) -> Option<Action> {
        let chunk = action.chunk(self.n_stages);
        let last = self.n_chunks() - 1;
        match action.section {
            Section::Forward if chunk == last => Some(Action { section: Section::Backward, ..action }),
            Section::Forward => Some(self.action(Section::Forward, chunk + 1, action.micro_batch)),
            Section::Backward if chunk == 0 => None,
            Section::Backward => Some(self.action(Section::Backward, chunk - 1, action.micro_batch)),
        }
    }
}

/// All forwards, then all backwards in the same order of micro-batches.
fn gpipe(rank: u32, shape: TableShape) -> Vec<Action> {
    let m = shape.n_micro_batches;
    let of = |section| move |micro_batch| Action { rank, section, virtual_stage: 0, micro_batch };
    (0..m).map(of(Section::Forward)).chain((0..m).map(of(Section::Backward))).collect()
}

/// `p - r - 1` forwards of warm-up, then forward and backward in turn, then the remaining backwards.
fn one_f_one_b(rank: u32, shape: TableShape) -> Vec<Action> {
    let warm_up = shape.n_stages - rank - 1;
    let forward = |micro_batch| Action { rank, section: Section::Forward, virtual_stage: 0, micro_batch };
    let backward = |micro_batch| Action { rank, section: Section::Backward, virtual_stage: 0, micro_batch };
    warm_up_then_alternate(shape.n_micro_batches, warm_up, forward, backward)
}

/// Megatron's order: groups of `p` micro-batches run through virtual stage 0, then 1, and so on; backward from the
/// last virtual stage down. Warm-up is `2 (p - r - 1) + (v - 1) p` chunk forwards.
///
/// `megatron/core/pipeline_parallel/schedules.py` of NVIDIA/Megatron-LM, group size `p`.
fn interleaved(rank: u32, shape: TableShape) -> Vec<Action> {
    let TableShape { n_stages: p, n_virtual_stages: v, n_micro_batches: m } = shape;
    let warm_up = 2 * (p - rank - 1) + (v - 1) * p;
    let micro_batch = |k: u32| k / (p * v) * p + k % p;
    let virtual_stage = |k: u32| k % (p * v) / p;
    let forward = |k| Action {
        rank,
        section: Section::Forward,
        virtual_stage: virtual_stage(k),
        micro_batch: micro_batch(k),
    };
    let backward = |k| Action {
        rank,
        section: Section::Backward,
        virtual_stage: v - 1 - virtual_stage(k),
        micro_batch: micro_batch(k),
    };
    warm_up_then_alternate(m * v, warm_up, forward, backward)
}

/// `warm_up` forwards, then one forward and one backward in turn, then the backwards that are left.
fn warm_up_then_alternate(
    n: u32,
    warm_up: u32,
    forward: impl Fn(u32) -> Action,
    backward: impl Fn(u32) -> Action,
) -> Vec<Action> {
    let warm_up = warm_up.min(n);
    let mut actions = Vec::with_capacity(2 * n as usize);
    actions.extend((0..warm_up).map(&forward));
    for k in warm_up..n {
        actions.push(forward(k));
        actions.push(backward(k - warm_up));
    }
    actions.extend((n - warm_up..n).map(backward));
    actions
}

/// Judges a table: every action of the shape exactly once, on its own rank, and no rank ever waits in vain.
pub fn check_table(
    table: &[Vec<Action>],
    n_virtual_stages: u32,
    n_micro_batches: u32,
) -> Result<(), ScheduleError> {
    let shape = TableShape { n_stages: table.len() as u32, n_virtual_stages, n_micro_batches };
    dependency_order(table, shape).map(|_| ())
}

/// The table's actions in an order in which each follows all that it needs, ranks keeping their own order.
///
/// The order depends on nothing but the table, so a simulation that walks it is deterministic. It takes time in
/// proportion to the number of actions. Fails where `check_table` does.
pub fn dependency_order(table: &[Vec<Action>], shape: TableShape) -> Result<Vec<Action>, ScheduleError> {
    every_action_once(table, shape)?;
    let mut done = vec![false; shape.n_actions() as usize];
    let mut next = vec![0_usize; table.len()];
    let mut order = Vec::with_capacity(done.len());
    let mut runnable: Vec<u32> = (0..shape.n_stages).rev().collect();
    while let Some(rank) = runnable.pop() {
        while let Some(&action) = table[rank as usize].get(next[rank as usize]) {
            if shape.needs(action).is_some_and(|needed| !done[shape.index(needed)]) {
                break;
            }
            done[shape.index(action)] = true;
            next[rank as usize] += 1;
            order.push(action);
            // Wake the rank that stands exactly at what this action allows; any other will get there by itself.
            if let Some(allowed) = shape.allows(action).filter(|allowed| allowed.rank != rank)
                && table[allowed.rank as usize].get(next[allowed.rank as usize]) == Some(&allowed)
            {
                runnable.push(allowed.rank);
            }
        }
    }
    match first_stuck(table, &next, shape) {
        Some(deadlock) => Err(deadlock),
        None => Ok(order),
    }
}

fn first_stuck(table: &[Vec<Action>], next: &[usize], shape: TableShape) -> Option<ScheduleError> {
    table.iter().zip(next).enumerate().find_map(|(rank, (row, &at))| {
        let action = *row.get(at)?;
        Some(ScheduleError::Deadlock { rank: rank as u32, action, needs: shape.needs(action)? })
    })
}

fn every_action_once(table: &[Vec<Action>], shape: TableShape) -> Result<(), ScheduleError> {
    shape.check()?;
    let mut seen = vec![false; shape.n_actions() as usize];
    for (rank, row) in table.iter().enumerate() {
        let rank = rank as u32;
        for &action in row {
            if action.rank != rank || !shape.holds(action) {
                return Err(ScheduleError::OutOfPlace { rank, action });
            }
            if std::mem::replace(&mut seen[shape.index(action)], true) {
                return Err(ScheduleError::Twice { rank, action });
            }
        }
    }
    let sections = [Section::Forward, Section::Backward].into_iter();
    let all = sections.flat_map(|section| {
        (0..shape.n_chunks())
            .flat_map(move |chunk| (0..shape.n_micro_batches).map(move |m| shape.action(section, chunk, m)))
    });
    match all.zip(&seen).find(|(_, seen)| !**seen) {
        Some((action, _)) => Err(ScheduleError::Missing { rank: action.rank, action }),
        None => Ok(()),
    }
}

/// For each rank, the most chunk forwards whose backward has not yet run, in chunks of micro-batches.
///
/// Divide by the number of virtual stages to get micro-batches of a whole stage's activations.
pub fn peak_in_flight(table: &[Vec<Action>]) -> Vec<u32> {
    table
        .iter()
        .map(|row| {
            let (_, peak) = row.iter().fold((0_u32, 0_u32), |(live, peak), action| match action.section {
                Section::Forward => (live + 1, peak.max(live + 1)),
                Section::Backward => (live.saturating_sub(1), peak),
            });
            peak
        })
        .collect()
}

/// One action with its time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Span {
    /// What ran.
    pub action: Action,
    /// When it started.
    pub start_s: Seconds,
    /// When its computation ended.
    pub end_s: Seconds,
}

/// When every action of a table ran.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Timeline {
    /// End of the last action of any rank.
    pub makespan_s: Seconds,
    /// The actions of each rank, in order.
    pub ranks: Vec<RankTimeline>,
}

/// When every action of one rank ran, and where its time went: computing, sending and bubble add up to the makespan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RankTimeline {
    /// Its actions, in order.
    pub spans: Vec<Span>,
    /// Time in forwards and backwards.
    pub busy_s: Seconds,
    /// Time held up by its own transfers where these do not overlap.
    pub sending_s: Seconds,
    /// The rest: waiting for other ranks.
    pub bubble_s: Seconds,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `F3` is the forward of micro-batch 3; with virtual stages, `F3.1` on virtual stage 1.
    fn print(table: &[Vec<Action>]) -> String {
        let several = table.iter().flatten().any(|action| action.virtual_stage > 0);
        let name = |action: &Action| {
            let letter = if action.section == Section::Forward { 'F' } else { 'B' };
            match several {
                true => format!("{letter}{}.{}", action.micro_batch, action.virtual_stage),
                false => format!("{letter}{}", action.micro_batch),
            }
        };
        let rows = table.iter().map(|row| row.iter().map(name).collect::<Vec<_>>().join(" "));
        rows.collect::<Vec<_>>().join("\n")
    }

    fn interleaved(virtual_stages: u32) -> Schedule {
        Schedule::Interleaved { virtual_stages }
    }

    /// The (p, m, v) on which the closed forms are tested here and in the simulator.
    const CASES: [(u32, u32, u32); 8] =
        [(4, 8, 1), (8, 8, 1), (8, 32, 1), (8, 16, 2), (8, 32, 4), (4, 8, 3), (35, 280, 3), (16, 64, 4)];

    #[test]
    fn gpipe_runs_all_forwards_first() {
        insta::assert_snapshot!(print(&table(Schedule::GPipe, 2, 3).unwrap()), @r"
        F0 F1 F2 B0 B1 B2
        F0 F1 F2 B0 B1 B2
        ");
    }

    #[test]
    fn one_f_one_b_warms_up_by_the_distance_to_the_last_rank() {
        insta::assert_snapshot!(print(&table(Schedule::OneFOneB, 3, 4).unwrap()), @r"
        F0 F1 F2 B0 F3 B1 B2 B3
        F0 F1 B0 F2 B1 F3 B2 B3
        F0 B0 F1 B1 F2 B2 F3 B3
        ");
    }

    #[test]
    fn interleaved_takes_groups_of_p_micro_batches_through_each_virtual_stage() {
        insta::assert_snapshot!(print(&table(interleaved(2), 2, 4).unwrap()), @r"
        F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0
        F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0
        ");
    }

    #[test]
    fn every_table_passes_the_check() {
        for (p, m, v) in CASES {
            let schedules: &[Schedule] =
                if v == 1 { &[Schedule::GPipe, Schedule::OneFOneB] } else { &[interleaved(v)] };
            for &schedule in schedules {
                let table = table(schedule, p, m).unwrap();
                assert_eq!(check_table(&table, v, m), Ok(()), "{schedule} p={p} m={m}");
            }
        }
    }

    #[test]
    fn gpipe_keeps_every_micro_batch_in_flight() {
        assert_eq!(peak_in_flight(&table(Schedule::GPipe, 3, 5).unwrap()), [5, 5, 5]);
    }

    #[test]
    fn one_f_one_b_keeps_as_many_in_flight_as_ranks_follow() {
        for (p, m, _) in CASES {
            let peaks = peak_in_flight(&table(Schedule::OneFOneB, p, m).unwrap());
            assert_eq!(peaks, (0..p).map(|rank| m.min(p - rank)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn interleaved_in_flight_has_its_closed_form() {
        for (p, m, v) in CASES.into_iter().filter(|(_, _, v)| *v > 1) {
            let peaks = peak_in_flight(&table(interleaved(v), p, m).unwrap());
            let closed = (0..p).map(|rank| (m * v).min(2 * (p - rank - 1) + (v - 1) * p + 1));
            assert_eq!(peaks, closed.collect::<Vec<_>>(), "p={p} m={m} v={v}");
        }
        let peaks = peak_in_flight(&table(interleaved(3), 35, 280).unwrap());
        assert_eq!(format!("{:.2}", f64::from(peaks[0]) / 3.0), "46.33");
    }

    #[test]
    fn counts_that_no_table_can_have_are_errors() {
        assert_eq!(table(Schedule::GPipe, 0, 1), Err(ScheduleError::Empty));
        assert_eq!(table(interleaved(0), 4, 4), Err(ScheduleError::Empty));
        assert_eq!(table(interleaved(1), 4, 4), Err(ScheduleError::NotInterleaved));
        let error = table(interleaved(2), 4, 6).unwrap_err();
        assert_eq!(error.to_string(), "`interleaved` needs micro-batches in multiples of 4 stages, found 6");
        assert!(matches!(table(Schedule::GPipe, u32::MAX, u32::MAX), Err(ScheduleError::TooLarge { .. })));
    }

    #[test]
    fn a_backward_before_its_forward_is_a_deadlock() {
        let mut rows = table(Schedule::OneFOneB, 2, 2).unwrap();
        rows[1].swap(0, 1);
        let error = check_table(&rows, 1, 2).unwrap_err();
        insta::assert_snapshot!(error, @"rank 0: backward of micro-batch 0 on virtual stage 0 waits for ever on backward of micro-batch 0 on virtual stage 0 of rank 1");
    }

    #[test]
    fn a_missing_a_repeated_and_a_stray_action_are_named() {
        let good = table(Schedule::OneFOneB, 2, 2).unwrap();
        let mut rows = good.clone();
        let removed = rows[0].remove(1);
        assert_eq!(check_table(&rows, 1, 2), Err(ScheduleError::Missing { rank: 0, action: removed }));
        let first = rows[0][0];
        rows[0].push(first);
        insta::assert_snapshot!(check_table(&rows, 1, 2).unwrap_err(), @"rank 0: forward of micro-batch 0 on virtual stage 0 is listed twice");
        let mut rows = good;
        rows[0][0].rank = 1;
        insta::assert_snapshot!(check_table(&rows, 1, 2).unwrap_err(), @"rank 0: forward of micro-batch 0 on virtual stage 0 (marked rank 1) does not belong in this table");
    }

    #[test]
    fn names_in_documents_are_those_of_the_literature() {
        let json = |schedule| serde_json::to_string::<Schedule>(&schedule).unwrap();
        assert_eq!(json(Schedule::GPipe), r#""gpipe""#);
        assert_eq!(json(Schedule::OneFOneB), r#""1f1b""#);
        assert_eq!(json(interleaved(4)), r#"{"interleaved":{"virtual_stages":4}}"#);
    }
}
