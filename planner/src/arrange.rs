//! Layers cut into chunks, the schedule simulated, and what a step has once: a candidate's figures.

use std::collections::BTreeMap;

use cost_model::overlap::{gradient_reduction_exposed, jitter, parameter_gather_exposed};
use cost_model::{PipelineTimes, Transfers, simulate};
use ir::schedule::{Schedule, peak_in_flight, table};
use ir::units::Seconds;

use crate::candidate::{Candidate, Scope};
use crate::partition::{Chunk, Levels};
use crate::prices::Prices;
use crate::request::ScheduleKind;
use crate::shelf::{Entry, Shelf};

/// A candidate worked out: stages, schedule, figures.
#[derive(Clone, Debug)]
pub struct Arranged {
    /// What it was made from.
    pub candidate: Candidate,
    /// Order of micro-batches.
    pub schedule: Schedule,
    /// Entries in use.
    pub entries: Vec<Entry>,
    /// Per chunk, runs of (entry, count).
    pub chunks: Vec<Vec<(usize, u64)>>,
    /// Whole step.
    pub step_time: Seconds,
    /// Parts of the step.
    pub parts: StepParts,
    /// Micro-batches in flight at the peak, per stage, in whole stages.
    pub in_flight: Vec<f64>,
}

/// Where the time of a step goes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepParts {
    /// The pipeline, fill and drain included.
    pub pipeline: Seconds,
    /// Idle time of the busiest stage in it.
    pub bubble: Seconds,
    /// Stage that sets the pace.
    pub slowest_stage: usize,
    /// Gradient reduction that shows.
    pub gradient_sync: Seconds,
    /// Parameter gather that shows.
    pub parameter_gather: Seconds,
    /// Optimizer.
    pub optimizer: Seconds,
    /// Host.
    pub host: Seconds,
    /// Stragglers.
    pub jitter: Seconds,
}

impl Scope<'_> {
    pub(crate) fn schedule(&self, v: u32) -> Schedule {
        match (v, self.pins().schedule) {
            (1, Some(ScheduleKind::GPipe)) => Schedule::GPipe,
            (1, _) => Schedule::OneFOneB,
            _ => Schedule::Interleaved { virtual_stages: v },
        }
    }

    /// Upper bounds on the micro-batches in flight per chunk: closed forms of the schedules.
    pub(crate) fn in_flight(candidate: &Candidate, schedule: Schedule) -> Vec<f64> {
        let (p, m) = (candidate.n_stages as f64, candidate.n_micro_batches as f64);
        let v = f64::from(schedule.n_virtual_stages());
        let of_rank = |rank: f64| match schedule {
            Schedule::GPipe => m,
            Schedule::OneFOneB => m.min(p - rank),
            Schedule::Interleaved { .. } => (m * v).min(2.0 * (p - rank - 1.0) + (v - 1.0) * p + 1.0) / v,
        };
        let chunks = candidate.n_stages * u64::from(schedule.n_virtual_stages());
        (0..chunks).map(|chunk| of_rank((chunk % candidate.n_stages) as f64)).collect()
    }

    pub(crate) fn arrange(
        &self,
        candidate: &Candidate,
        v: u32,
        (levels, shelf): (&Levels, &Shelf),
        prices: &Prices<'_>,
    ) -> Option<Arranged> {
        let schedule = self.schedule(v);
        let in_flight = Self::in_flight(candidate, schedule);
        let capacity = self.capacity / f64::from(v);
        let cuts = match &self.pins().layers_per_stage {
            // The user counts decoder layers; embedding and head stand at the ends.
            Some(counts) if counts.len() == in_flight.len() => {
                let mut counts: Vec<usize> = counts.iter().map(|&n| n as usize).collect();
                *counts.first_mut()? += 1;
                *counts.last_mut()? += 1;
                levels.as_given(&counts, &in_flight, capacity)?
            }
            Some(_) => return None,
            None => levels.partition(&in_flight, capacity)?,
        };
        let mut names: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        let mut entries: Vec<Entry> = Vec::new();
        let chunks: Vec<Vec<(usize, u64)>> = cuts
            .iter()
            .map(|cut| {
                runs(cut, levels, shelf, &mut |kind, at| {
                    *names.entry((kind, at)).or_insert_with(|| {
                        entries.push(shelf.entries[kind][at].clone());
                        entries.len() - 1
                    })
                })
            })
            .collect();
        self.finish(candidate, schedule, (entries, chunks), prices)
    }

    /// Simulates the schedule and adds what a step has once.
    fn finish(
        &self,
        candidate: &Candidate,
        schedule: Schedule,
        (entries, chunks): (Vec<Entry>, Vec<Vec<(usize, u64)>>),
        prices: &Prices<'_>,
    ) -> Option<Arranged> {
        let p = candidate.n_stages as usize;
        let sum = |chunk: &[(usize, u64)], of: &dyn Fn(&Entry) -> Seconds| -> Seconds {
            chunk.iter().map(|&(entry, count)| of(&entries[entry]) * count as f64).sum()
        };
        let forward = |entry: &Entry| entry.price.forward.seconds();
        let backward = |entry: &Entry| entry.price.backward.seconds();
        let times = PipelineTimes {
            forward: chunks.iter().map(|chunk| sum(chunk, &forward)).collect(),
            backward: chunks.iter().map(|chunk| sum(chunk, &backward)).collect(),
            boundary: vec![self.boundary(candidate, &entries, prices); chunks.len() - 1],
            transfers: if schedule.n_virtual_stages() > 1 {
                Transfers::Overlapped
            } else {
                Transfers::Exposed
            },
        };
        let actions = table(schedule, candidate.n_stages as u32, candidate.n_micro_batches as u32).ok()?;
        let timeline = simulate(&actions, &times).ok()?;
        let v = f64::from(schedule.n_virtual_stages());
        let in_flight: Vec<f64> = peak_in_flight(&actions).iter().map(|&n| f64::from(n) / v).collect();
        let mut parts = StepParts { pipeline: timeline.makespan_s, ..StepParts::default() };
        for stage in 0..p {
            let once = |of: &dyn Fn(&Entry) -> Seconds| -> Seconds {
                chunks.iter().skip(stage).step_by(p).map(|chunk| sum(chunk, of)).sum()
            };
            let n_layers: u64 = chunks.iter().skip(stage).step_by(p).flatten().map(|run| run.1).sum();
            let buckets = u32::try_from(n_layers).unwrap_or(u32::MAX);
            let sync = gradient_reduction_exposed(
                once(&|e| e.price.update.gradient_reduce),
                once(&backward),
                buckets,
                self.constants,
            );
            let gather = parameter_gather_exposed(
                once(&|e| e.price.update.parameter_gather),
                once(&forward),
                buckets,
                self.constants,
            );
            let optimizer = once(&|e| e.price.update.optimizer);
            if sync + gather + optimizer > parts.gradient_sync + parts.parameter_gather + parts.optimizer {
                (parts.gradient_sync, parts.parameter_gather, parts.optimizer) = (sync, gather, optimizer);
            }
            if timeline.ranks[stage].busy_s > timeline.ranks[parts.slowest_stage].busy_s {
                parts.slowest_stage = stage;
            }
        }
        let busiest = &timeline.ranks[parts.slowest_stage];
        parts.bubble = timeline.makespan_s - busiest.busy_s;
        parts.host = self.constants.host_per_iteration_s;
        let work = parts.pipeline + parts.gradient_sync + parts.parameter_gather + parts.optimizer;
        let node = self.machine.cluster.groups.first().map_or(1, |group| group.devices_per_node.max(1));
        let n_nodes = self.machine.cluster.n_devices().div_ceil(node);
        parts.jitter = work * (jitter(n_nodes, self.constants) - 1.0);
        let step_time = work + parts.jitter + parts.host;
        let arranged =
            Arranged { candidate: candidate.clone(), schedule, entries, chunks, step_time, parts, in_flight };
        let fits = (0..p)
            .all(|stage| self.stage_memory(&arranged, stage).total().0 <= self.capacity + self.reserve());
        fits.then_some(arranged)
    }

    /// Transfer of the stream between neighbouring stages.
    fn boundary(&self, candidate: &Candidate, entries: &[Entry], prices: &Prices<'_>) -> Seconds {
        let mesh = &candidate.shape.mesh;
        let stream = entries.iter().find_map(|entry| {
            let layer = &self.model().layers[entry.kind];
            let tensor = layer.stream_in?;
            let sizes = layer.sizes(candidate.micro_batch, self.request.job.sequence);
            Some(entry.choice.stream.local_elements(mesh, &layer.shape(tensor, &sizes)))
        });
        stream.map_or(Seconds::ZERO, |elements| prices.transfer(elements as f64, mesh.n_devices()))
    }
}

/// The runs of equal entries of a chunk.
fn runs(
    cut: &Chunk,
    levels: &Levels,
    shelf: &Shelf,
    name: &mut dyn FnMut(usize, usize) -> usize,
) -> Vec<(usize, u64)> {
    let range = &levels.kinds[cut.from..cut.to];
    let mut counts: BTreeMap<usize, u64> = BTreeMap::new();
    for &kind in range {
        *counts.entry(kind).or_default() += 1;
    }
    let main = counts.iter().max_by(|a, b| a.1.cmp(b.1).then(b.0.cmp(a.0))).map_or(0, |(&kind, _)| kind);
    let mut smaller = cut.smaller;
    let mut list: Vec<(usize, u64)> = Vec::new();
    for &kind in range {
        let down = kind == main && smaller > 0;
        if down {
            smaller -= 1;
        }
        let level = if down { cut.level + 1 } else { cut.level };
        let entry = name(kind, shelf.levels[kind][level]);
        match list.last_mut() {
            Some((last, count)) if *last == entry => *count += 1,
            _ => list.push((entry, 1)),
        }
    }
    list
}
