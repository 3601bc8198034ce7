//! What stages wait for their sends at least, and the sharding of the stream that is sent soonest.
//!
//! ```text
//! waits(s) = m (c(s - 1, s) + c(s, s + 1))        whole stages     c: what a device has at least of the stream, over the link between the two
//! waits(s) = 2 sum_{i < s} c(i, i + 1)            virtual stages, and behind a round over all of them  rounds = 2 (v - 1) sum_i c(i, i + 1)
//! ```
//! In 1F1B and GPipe a stage goes on when it has sent (`cost_model::Transfers::Exposed`): the stream forward to the one
//! behind it, its gradient back to the one before. No sharding leaves a device less of the stream than an equal part.
//!
//! Over virtual stages it goes on at once, but the first micro-batch comes to the last chunk of a stage no sooner than
//! it has been sent through all before it, `v - 1` times over all stages, and the last gradient goes back on the same
//! way. Before that chunk a stage computes `p` micro-batches of each of its others, in as long as one takes over all
//! stages, where they take equally long: the sum over stages is the same for any stages. One that takes longer than the
//! average hides its lead of what is sent.

use ir::graph::Layer;
use ir::schedule::Schedule;
use ir::sharding::Sharding;
use ir::slices::Slices;

use crate::arrange::staged;
use crate::bound::{Bound, Waits};
use crate::candidate::{Candidate, Scope};
use crate::forms::Forms;
use crate::given::Given;
use crate::schedules::FamilyKind;
use crate::shelf::Bench;

/// Another sharding of the stream is looked for where the smallest would save at least so much of the bound.
const WORTH_SENDING: f64 = 0.002;

impl Scope<'_> {
    /// The sharding of the stream that suits layers where they pay for what stages send, if that is another than the
    /// bound's.
    pub(crate) fn stream_of_stages(&self, bench: &Bench<'_>, bound: &Bound) -> Option<Sharding> {
        let candidate = bench.candidate;
        let p = candidate.n_stages;
        if p == 1 {
            return None;
        }
        let kind = self.most_frequent();
        let layer = &self.forms[kind][self.leading[kind]].layer;
        let sizes = &bench.sizes[kind][self.leading[kind]];
        let shapes: Vec<Vec<u64>> =
            layer.stream_in.iter().map(|&stream| layer.shape(stream, sizes)).collect();
        let slices = Slices::whole(self.request.job.sequence);
        let staged = staged(self.model(), candidate, Schedule::OneFOneB, (&[], &[]), &slices);
        let seconds = |stream: Sharding| {
            let border =
                |from: u64| staged.hand_on(&bench.setting, (from, from + 1), (stream, &shapes)).time.0;
            (0..p - 1).map(border).sum::<f64>() / (p - 1) as f64
        };
        let own = seconds(bound.stream);
        // Of the schedule that leaves least idle, its sends counted.
        let work = bound.work.average;
        let idle = |schedule: Schedule| {
            let n_sends = n_sends(candidate, schedule);
            (self.idle(candidate, schedule).bubble * work + n_sends * own, n_sends)
        };
        let least = self.schedules(candidate).into_iter().map(idle).min_by(|a, b| a.0.total_cmp(&b.0));
        let (_, n_sends) = least?;
        let elements: u64 = shapes.iter().map(|shape| shape.iter().product::<u64>()).sum();
        let smallest = bench.setting.activation(elements as f64 / candidate.shape.mesh.n_devices() as f64);
        let smallest = staged.transfer(&bench.setting, (0, 1), smallest).time.0;
        if n_sends * (own - smallest) < WORTH_SENDING * bound.time.0 {
            return None;
        }
        let given = Given { covers: bound.covers, ..self.given_fastest() };
        let (_, mut problem) = self.asked(bench, kind, &given, Forms::Leading).into_iter().next()?;
        let layers_of_stage = self.counts[kind] as f64 / p as f64;
        problem.charge_streams(|stream| n_sends * seconds(stream) / layers_of_stage);
        self.passed_at(0.0, kind, &self.chooser(&problem)).filter(|stream| *stream != bound.stream)
    }

    /// What the stages of a candidate wait at least for their sends in a schedule.
    pub(crate) fn least_sends(&self, candidate: &Candidate, schedule: Schedule) -> Sends {
        Sends::over(&self.borders(candidate), candidate, schedule)
    }

    /// Least seconds over the border from each stage of a candidate to the one behind it, from the last to the first;
    /// none of models that branch, for what then crosses depends on where they are cut.
    pub(crate) fn borders(&self, candidate: &Candidate) -> Vec<f64> {
        let p = candidate.n_stages;
        if p == 1 || !self.bends.is_empty() {
            return Vec::new();
        }
        let sequence = self.request.job.sequence;
        let elements = |layer: &Layer| -> u64 {
            let sizes = layer.sizes(candidate.micro_batch, sequence);
            let of_stream = |&stream| layer.shape(stream, &sizes).iter().product::<u64>();
            layer.stream_in.iter().map(of_stream).sum()
        };
        let layers = self.model().layers.iter().filter(|layer| !layer.stream_in.is_empty());
        let least = layers.map(elements).min().unwrap_or(0) as f64;
        let slices = Slices::whole(sequence);
        let staged = staged(self.model(), candidate, Schedule::OneFOneB, (&[], &[]), &slices);
        let border = |from: u64| staged.least_transfer(&self.setting, (from, (from + 1) % p), least).0;
        (0..p).map(border).collect()
    }
}

/// What stages wait for their sends at least.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Sends {
    /// Seconds of a step, per stage.
    pub(crate) of_stages: Vec<f64>,
    /// Seconds that micro-batches are sent for behind a round of their way over virtual stages.
    pub(crate) rounds: f64,
    /// So much of what a stage computes for longer than the average hides of that: it has others to do meanwhile.
    pub(crate) hides: f64,
}

impl Sends {
    /// Of the stages of a candidate in a schedule, over their borders; nothing where there are none, or micro-batches
    /// do not pass the ranks in turn.
    pub(crate) fn over(borders: &[f64], candidate: &Candidate, schedule: Schedule) -> Self {
        if borders.is_empty() || !FamilyKind::of(schedule).runs_forward_to_last() {
            return Self::default();
        }
        Self::new(borders, schedule, candidate.n_micro_batches as f64)
    }

    /// What that makes a step longer.
    pub(crate) fn waits(&self) -> Waits {
        let Self { of_stages, rounds, hides } = self;
        let n = of_stages.len().max(1) as f64;
        let least = of_stages.iter().copied().reduce(f64::min).unwrap_or(0.0);
        Waits { average: of_stages.iter().sum::<f64>() / n + rounds, least, rounds: *rounds, hides: *hides }
    }

    /// Of stages that are whole or virtual, over borders each to the stage behind, the last to the first.
    fn new(borders: &[f64], schedule: Schedule, m: f64) -> Self {
        let (p, v) = (borders.len(), f64::from(schedule.n_virtual_stages()));
        if FamilyKind::of(schedule) == FamilyKind::WholeStages {
            let at = |border: Option<usize>| border.filter(|at| at + 1 < p).map_or(0.0, |at| borders[at]);
            let of_stage = |stage: usize| m * (at(stage.checked_sub(1)) + at(Some(stage)));
            return Self { of_stages: (0..p).map(of_stage).collect(), ..Self::default() };
        }
        let of_stage = |stage: usize| 2.0 * borders[..stage].iter().sum::<f64>();
        Self {
            of_stages: (0..p).map(of_stage).collect(),
            rounds: 2.0 * (v - 1.0) * borders.iter().sum::<f64>(),
            hides: (v - 1.0) * p as f64 / (v * m),
        }
    }
}

/// Sends that a step waits for in a schedule: those of the average stage, which goes on when it has sent; over virtual
/// stages, which go on at once, those that the first micro-batch has behind it when it comes to the last chunk of the
/// average stage, and those of the last on its way back.
fn n_sends(candidate: &Candidate, schedule: Schedule) -> f64 {
    let (m, p) = (candidate.n_micro_batches as f64, candidate.n_stages as f64);
    match f64::from(schedule.n_virtual_stages()) {
        1.0 => 2.0 * m * (p - 1.0) / p,
        v => 2.0 * (v - 1.0) * p + (p - 1.0),
    }
}

#[cfg(test)]
#[path = "sends_tests.rs"]
mod tests;
