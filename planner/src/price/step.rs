//! A step in time: the schedule simulated, and around it what a step has once.
//!
//! ```text
//! step = (pipeline + gradients reduced + optimizer + parameters gathered) * jitter + host
//! ```
//! What happens once is that of the stage where it takes longest, and of the parameters that stages share. The pipeline
//! is the simulation of the schedule, by recurrence where its ranks take turns, else of its table.

use std::borrow::Cow;
use std::collections::BTreeMap;

use cost_model::overlap::{gradient_reduction_exposed, jitter, parameter_gather_exposed};
use cost_model::{
    BackwardParts, Branches, PipelineTimes, SimulateError, Totals, Transfers, Turns, busiest, lower_bound,
    totals,
};
use ir::engine::{GradientOverlap, StageTransfers};
use ir::mesh::{Mesh, Meshes};
use ir::schedule::{Action, Schedule, ScheduleError, table};
use ir::units::Seconds;

use crate::price::crossing::taken_over;
use crate::price::held::{Held, held, held_in_turns};
use crate::price::setting::{Backward, Entry, Setting};
use crate::price::staged::{Staged, Takeover, Transfer};

/// A step in time.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Whole step.
    pub time: Seconds,
    /// Parts of it.
    pub parts: StepParts,
    /// What every stage holds at its peak.
    pub held: Vec<Held>,
    /// The pipeline of every replica, where they run unequal shares.
    pub pipelines: Vec<Seconds>,
}

/// Where the time of a step goes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepParts {
    /// The pipeline, fill and drain included.
    pub pipeline: Seconds,
    /// Idle time of the busiest stage in it.
    pub bubble: Seconds,
    /// What the busiest stage waits for its sends.
    pub sends: Seconds,
    /// What it spends on streams that arrive in another sharding than its own.
    pub takeover: Seconds,
    /// Stage that sets the pace.
    pub slowest_stage: usize,
    /// Replica that does, where they run unequal shares.
    pub slowest_replica: usize,
    /// Gradient reduction that shows.
    pub gradient_sync: Seconds,
    /// Parameter gather that shows.
    pub parameter_gather: Seconds,
    /// Optimizer on the devices.
    pub optimizer: Seconds,
    /// Optimizer on the hosts, and what moves to them and back.
    pub offload: Seconds,
    /// Host.
    pub host: Seconds,
    /// Stragglers.
    pub jitter: Seconds,
}

impl StepParts {
    /// What the devices of a step have once, and shows: no part of its pipeline.
    pub(crate) fn once(&self) -> Seconds {
        self.gradient_sync + self.parameter_gather + self.optimizer
    }
}

/// Simulates a step.
///
/// # Errors
/// Where the schedule has no table for so many stages and micro-batches.
pub fn step(setting: &Setting<'_>, staged: &Staged<'_>) -> Result<Step, SimulateError> {
    step_between(setting, staged, &Streams::of(setting, staged))
}

/// The same, between chunks of which it is known already what goes from one to the next.
pub(crate) fn step_between(
    setting: &Setting<'_>,
    staged: &Staged<'_>,
    streams: &Streams,
) -> Result<Step, SimulateError> {
    let order = Order::of(staged)?;
    let pipelines = pipelines(setting, staged, (&order, streams))?;
    let (time, parts) = around(setting, staged, slowest(&pipelines));
    let pipelines = match staged.replicas {
        [] => Vec::new(),
        _ => pipelines.iter().map(|parts| parts.pipeline).collect(),
    };
    Ok(Step { time, parts, held: all_held(staged, &order)?, pipelines })
}

/// What every stage holds at its peak.
///
/// # Errors
/// Where the schedule has no table for so many stages and micro-batches.
pub(crate) fn peaks(staged: &Staged<'_>) -> Result<Vec<Held>, SimulateError> {
    all_held(staged, &Order::of(staged)?)
}

fn all_held(staged: &Staged<'_>, order: &Order<'_>) -> Result<Vec<Held>, SimulateError> {
    Ok(match order {
        Order::Turns(turns) if !staged.slices.is_cut() => {
            (0..staged.n_stages).map(|stage| held_in_turns(staged, stage as usize, turns)).collect()
        }
        Order::Turns(_) | Order::Rows(_) => {
            let rows = order.rows(staged)?;
            rows.iter().enumerate().map(|(stage, row)| held(staged, stage, row)).collect()
        }
    })
}

/// The pipeline that takes longest, which all others wait for once per step; ties to the first.
fn slowest(pipelines: &[StepParts]) -> StepParts {
    let longer = |slowest: usize, at: usize| {
        if pipelines[at].pipeline > pipelines[slowest].pipeline { at } else { slowest }
    };
    let slowest_replica = (1..pipelines.len()).fold(0, longer);
    StepParts { slowest_replica, ..pipelines[slowest_replica] }
}

/// The pipeline of every replica; the one of all where they run equal shares.
fn pipelines(
    setting: &Setting<'_>,
    staged: &Staged<'_>,
    (order, streams): (&Order<'_>, &Streams),
) -> Result<Vec<StepParts>, SimulateError> {
    match staged.replicas {
        [] => Ok(vec![pipeline(setting, staged, (order, streams))?]),
        replicas => replicas.iter().map(|one| alone(setting, &staged.of(one), streams)).collect(),
    }
}

/// The pipeline of one replica.
///
/// # Errors
/// Where the schedule has no table for so many stages and micro-batches.
pub(crate) fn alone(
    setting: &Setting<'_>,
    replica: &Staged<'_>,
    streams: &Streams,
) -> Result<StepParts, SimulateError> {
    pipeline(setting, replica, (&Order::of(replica)?, streams))
}

/// The time of a step alone.
///
/// # Errors
/// Where the schedule has no table for so many stages and micro-batches, or the table cannot run.
pub fn timed(setting: &Setting<'_>, staged: &Staged<'_>) -> Result<(Seconds, StepParts), SimulateError> {
    let (order, streams) = (Order::of(staged)?, Streams::of(setting, staged));
    Ok(around(setting, staged, slowest(&pipelines(setting, staged, (&order, &streams))?)))
}

/// In which order stages run what they run: as a rule where there is one, since tables are long.
enum Order<'t> {
    Turns(Turns),
    Rows(Cow<'t, [Vec<Action>]>),
}

impl<'t> Order<'t> {
    fn of(staged: &Staged<'t>) -> Result<Self, SimulateError> {
        if let Some(rows) = staged.table {
            return Ok(Self::Rows(Cow::Borrowed(rows)));
        }
        let (p, m) = counts(staged)?;
        let turns = Turns::new(staged.schedule, p, m).filter(|_| staged.runs_in_turn());
        Ok(match turns {
            Some(turns) => Self::Turns(turns),
            None => Self::Rows(Cow::Owned(table(staged.schedule, p, m)?)),
        })
    }

    fn rows(&self, staged: &Staged<'_>) -> Result<Cow<'_, [Vec<Action>]>, SimulateError> {
        match self {
            Self::Rows(rows) => Ok(Cow::Borrowed(rows)),
            Self::Turns(_) => {
                let (p, m) = counts(staged)?;
                Ok(Cow::Owned(table(staged.schedule, p, m)?))
            }
        }
    }

    fn totals(&self, times: &PipelineTimes) -> Result<Totals, SimulateError> {
        match self {
            Self::Turns(turns) => turns.totals(times),
            Self::Rows(rows) => totals(rows, times),
        }
    }
}

/// Stages and micro-batches, as tables count them.
fn counts(staged: &Staged<'_>) -> Result<(u32, u32), ScheduleError> {
    let n = |count: u64| u32::try_from(count).map_err(|_| ScheduleError::TooLarge { n_actions: count });
    Ok((n(staged.n_stages)?, n(staged.n_micro_batches)?))
}

/// What goes from chunk to chunk of a step, and what is done with it there.
#[derive(Clone, Debug, Default)]
pub(crate) struct Streams {
    /// Every chunk's, for every slice of it.
    pub(crate) takeovers: Vec<Takeover>,
    /// Times between neighbours, for every slice.
    pub(crate) boundaries: Vec<Seconds>,
    /// What goes from which chunk to which, where chunks do not run in turn.
    pub(crate) branches: Option<Branches>,
}

impl Streams {
    pub(crate) fn of(setting: &Setting<'_>, staged: &Staged<'_>) -> Self {
        let takeovers = takeovers(setting, staged);
        if staged.runs_in_turn() {
            return Self { takeovers, boundaries: boundaries(setting, staged), branches: None };
        }
        let n_borders = staged.chunks.len().saturating_sub(1);
        let boundaries = vec![Seconds::ZERO; n_borders * staged.slices.n() as usize];
        Self { takeovers, boundaries, branches: Some(branches(setting, staged)) }
    }
}

/// A time that a step does not undercut, in whatever order its actions run: of schedules whose first stage begins and
/// ends the step, and does not split backward, 1F1B and its like, that of all that the first and the last micro-batch
/// pass; of others what a stage works.
pub fn least(setting: &Setting<'_>, staged: &Staged<'_>) -> Seconds {
    least_between(setting, staged, &Streams::of(setting, staged))
}

/// The same, between chunks of which it is known already what goes from one to the next.
pub(crate) fn least_between(setting: &Setting<'_>, staged: &Staged<'_>, streams: &Streams) -> Seconds {
    let n = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
    let times = pipeline_times(setting, staged, streams);
    let (n_stages, n_micro_batches) = (n(staged.n_stages), n(staged.n_micro_batches));
    let begins_and_ends = matches!(staged.schedule, Schedule::OneFOneB | Schedule::Interleaved { .. });
    let bound = if begins_and_ends { lower_bound } else { busiest };
    let pipeline = bound(n_stages, n_micro_batches, &times);
    around(setting, staged, StepParts { pipeline, ..StepParts::default() }).0
}

/// A pipeline with what a step has beside it.
fn around(setting: &Setting<'_>, staged: &Staged<'_>, mut parts: StepParts) -> (Seconds, StepParts) {
    once_per_step(setting, staged, &mut parts);
    let constants = setting.machine.constants;
    parts.host = constants.host_per_iteration_s;
    let work =
        parts.pipeline + parts.gradient_sync + parts.parameter_gather + parts.optimizer + parts.offload;
    parts.jitter = work * (stragglers(setting, staged.meshes) - 1.0);
    (work + parts.jitter + parts.host, parts)
}

/// Times that a step takes longer for stragglers. Devices of a stage wait for each other at every collective; stages
/// only for what they receive.
pub(crate) fn stragglers(setting: &Setting<'_>, meshes: Meshes<'_>) -> f64 {
    let node = setting.machine.cluster.groups.first().map_or(1, |group| group.devices_per_node.max(1));
    let widest = meshes.each.iter().map(Mesh::n_devices).max().unwrap_or(meshes.alike.n_devices());
    jitter(widest.div_ceil(node), setting.machine.constants)
}

/// The schedule's own time, from step to step, and how the busiest stage spends it.
fn pipeline(
    setting: &Setting<'_>,
    staged: &Staged<'_>,
    (order, streams): (&Order<'_>, &Streams),
) -> Result<StepParts, SimulateError> {
    let timeline = order.totals(&pipeline_times(setting, staged, streams))?;
    let busy = |stage: usize| timeline.ranks[stage].busy_s;
    let slowest_stage = (1..timeline.ranks.len())
        .fold(0, |slowest, stage| if busy(stage) > busy(slowest) { stage } else { slowest });
    let busiest = &timeline.ranks[slowest_stage];
    Ok(StepParts {
        pipeline: timeline.period_s,
        bubble: (timeline.period_s - busiest.busy_s - busiest.sending_s).max(Seconds::ZERO),
        sends: busiest.sending_s,
        takeover: of_stage(staged, &streams.takeovers, slowest_stage),
        slowest_stage,
        ..StepParts::default()
    })
}

/// What a stage spends on streams that arrive in another sharding than its own, in a step.
fn of_stage(staged: &Staged<'_>, takeovers: &[Takeover], stage: usize) -> Seconds {
    let n_slices = staged.slices.n() as usize;
    let chunks = staged.schedule.placement().chunks_of(staged.n_stages as u32, stage as u32);
    let of_chunk = |(virtual_stage, chunk): (u32, u32)| -> Seconds {
        let own = &takeovers[chunk as usize * n_slices..][..n_slices];
        let once: Seconds = own.iter().map(|one| one.forward + one.backward).sum();
        once * staged.micro_batches_in(virtual_stage)
    };
    (0..).zip(chunks).map(of_chunk).sum()
}

/// What every chunk does to take over the stream, for every slice of it.
pub(crate) fn takeovers(setting: &Setting<'_>, staged: &Staged<'_>) -> Vec<Takeover> {
    let (lengths, crossings) = (staged.slices.lengths(), staged.crossings());
    let places =
        (0..staged.chunks.len()).flat_map(|chunk| lengths.iter().map(move |&tokens| (chunk, tokens)));
    places.map(|(chunk, tokens)| staged.takeover(setting, taken_over(&crossings, chunk), tokens)).collect()
}

/// Times of its parts, of the streams that arrive in another sharding too.
fn pipeline_times(setting: &Setting<'_>, staged: &Staged<'_>, streams: &Streams) -> PipelineTimes {
    let takeovers = &streams.takeovers;
    let with = |mut times: Vec<Seconds>, of: &dyn Fn(&Takeover) -> Seconds| {
        times.iter_mut().zip(takeovers).for_each(|(time, takeover)| *time += of(takeover));
        times
    };
    let parts = (setting.backward == Backward::Parts).then(|| BackwardParts {
        input: with(staged.per_slice(|one| one.parts[0]), &|takeover| takeover.backward),
        weight: staged.per_slice(|one| one.parts[1]),
    });
    PipelineTimes {
        placement: staged.schedule.placement(),
        n_slices: staged.slices.n(),
        forward: with(staged.per_slice(|one| one.forward), &|takeover| takeover.forward),
        backward: with(staged.per_slice(|one| one.backward), &|takeover| takeover.backward),
        parts,
        boundary: streams.boundaries.clone(),
        branches: streams.branches.clone(),
        transfers: match setting.job.engine.stage_transfers {
            StageTransfers::Beside if staged.schedule.n_virtual_stages() > 1 => Transfers::Overlapped,
            StageTransfers::Beside | StageTransfers::Waited => Transfers::Exposed,
        },
    }
}

/// Time of every slice of all that goes from chunk to chunk of those that run in turn, over the slower way where there
/// are two.
fn boundaries(setting: &Setting<'_>, staged: &Staged<'_>) -> Vec<Seconds> {
    let n_borders = staged.chunks.len().saturating_sub(1);
    let of_slice = |tokens: &u64| -> Vec<Seconds> {
        let copies = 1..staged.schedule.placement().n_copies();
        let times = |copy: u32| {
            // Between the same two chunks one stream follows the other.
            let mut times = vec![Seconds::ZERO; n_borders];
            for (crossing, border) in staged.borders(setting, copy, *tokens) {
                times[crossing.to - 1] += border.time;
            }
            times
        };
        copies.fold(times(0), |most, copy| most.into_iter().zip(times(copy)).map(|(a, b)| a.max(b)).collect())
    };
    let slices: Vec<Vec<Seconds>> = staged.slices.lengths().iter().map(of_slice).collect();
    (0..n_borders).flat_map(|border| slices.iter().map(move |times| times[border])).collect()
}

/// Time of every slice of all that crosses between two chunks, over the slower way where there are two.
fn branches(setting: &Setting<'_>, staged: &Staged<'_>) -> Branches {
    let mut transfers: BTreeMap<(u32, u32), Vec<Seconds>> = BTreeMap::new();
    for (slice, tokens) in staged.slices.lengths().into_iter().enumerate() {
        for copy in 0..staged.schedule.placement().n_copies() {
            // Between the same two chunks one stream follows the other.
            let mut times: BTreeMap<(u32, u32), Seconds> = BTreeMap::new();
            for (crossing, border) in staged.borders(setting, copy, tokens) {
                *times.entry((crossing.from as u32, crossing.to as u32)).or_default() += border.time;
            }
            for (pair, time) in times {
                let slices =
                    transfers.entry(pair).or_insert_with(|| vec![Seconds::ZERO; staged.slices.n() as usize]);
                slices[slice] = slices[slice].max(time);
            }
        }
    }
    Branches::new(staged.chunks.len(), transfers)
}

/// Gradients, optimizer and parameters, where they take longest.
fn once_per_step(setting: &Setting<'_>, staged: &Staged<'_>, parts: &mut StepParts) {
    let (constants, overlap) = (setting.machine.constants, setting.job.engine.gradient_overlap);
    for stage in 0..staged.n_stages as usize {
        let once = |of: &dyn Fn(&Entry) -> Seconds| staged.sum(stage, of);
        let n_layers: u64 = staged.runs(stage).map(|(_, count)| count).sum();
        let buckets = u32::try_from(n_layers).unwrap_or(u32::MAX);
        let reduce = once(&|entry| entry.price.update.gradient_reduce);
        let sync = match overlap {
            GradientOverlap::Beside => {
                gradient_reduction_exposed(reduce, once(&Entry::backward_seconds), buckets, constants)
            }
            GradientOverlap::Absent => reduce,
        };
        let spread = once(&|entry| entry.price.update.parameter_gather);
        let gather = match overlap {
            GradientOverlap::Beside => {
                parameter_gather_exposed(spread, once(&Entry::forward_seconds), buckets, constants)
            }
            GradientOverlap::Absent => spread,
        };
        let optimizer = once(&|entry| entry.price.update.optimizer);
        let offload = once(&|entry| entry.price.update.host);
        let known = parts.once() + parts.offload;
        if sync + gather + optimizer + offload > known {
            (parts.gradient_sync, parts.parameter_gather) = (sync, gather);
            (parts.optimizer, parts.offload) = (optimizer, offload);
        }
    }
    let (gradients, values) = staged.shared_moves(setting);
    let total = |moves: &[Transfer]| moves.iter().map(|one| one.time).sum::<Seconds>();
    parts.gradient_sync += total(&gradients);
    parts.parameter_gather += total(&values);
    let (gradients, values) = staged.twin_moves(setting);
    let longest = |moves: &[Transfer]| moves.iter().map(|one| one.time).fold(Seconds::ZERO, Seconds::max);
    parts.gradient_sync += longest(&gradients);
    parts.parameter_gather += longest(&values);
}
