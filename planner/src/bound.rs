//! How fast a candidate could be: the fastest choice of each layer kind, whatever memory it takes.

use ir::lower::LayerChoice;
use ir::schedule::Schedule;
use ir::sharding::Sharding;
use ir::units::Seconds;

use crate::candidate::{Candidate, Scope};
use crate::chooser::{Cheapest, too_large};
use crate::clock::{Clock, Covers, Spans};
use crate::fill::{Forward, Idle};
use crate::forms::Forms;
use crate::layer_problem::LayerProblem;
use crate::packing::Pieces;
use crate::price::step::stragglers;
use crate::schedules::{Family, FamilyKind};
use crate::sends::Sends;
use crate::shelf::{Asked, Bench};

/// What is known of a candidate before it is worked out.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// It is not faster than this in the forms that were asked.
    pub time: Seconds,
    /// Time of the layers alone.
    pub work: Work,
    /// At most so much of the step is saved by fused forms of layers, as far as they were asked.
    pub saving: Seconds,
    /// Bytes that the fastest choices take on a device, reserve and what a stage has once apart, over what there is.
    pub crowding: f64,
    /// Sharding of the stream in the kind of layer that takes most of the time.
    pub stream: Sharding,
    /// What memory is worth there.
    pub seconds_per_byte: f64,
    /// Per kind, its leading form and the fastest choice in it, whatever the stream of the others.
    pub fastest: Vec<(usize, LayerChoice)>,
    /// Per kind, least seconds that one layer of it keeps its stage busy in a step.
    pub layers: Vec<LayerTimes>,
    /// What compute covers of the communication that a step has once.
    pub covers: Covers,
    /// What it covers by lower bounds, where some of that communication shows: choices by any may be the fastest.
    pub other_covers: Vec<Covers>,
    /// Pairs of ports that were priced for it: how much work it was.
    pub n_pairs: usize,
    /// The same on every ground, where stages stand on several.
    pub grounds: Vec<Bound>,
    /// Its choices were found among those that compute again, of which some are as fast.
    pub computes_again: bool,
}

/// Least seconds that one layer keeps its stage busy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerTimes {
    /// In any of the forms that were asked.
    pub least: Busy,
    /// In the first of them.
    pub plain: Busy,
}

/// Least seconds that something keeps a stage busy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Busy {
    /// In a step.
    pub step: f64,
    /// In its micro-batches, without what a step has once: choices that have least of it may be others.
    pub repeated: f64,
    /// In the forward passes of its micro-batches, by whatever choices.
    pub forward: f64,
}

impl Busy {
    /// The less of each.
    fn min(self, other: Self) -> Self {
        Self {
            step: self.step.min(other.step),
            repeated: self.repeated.min(other.repeated),
            forward: self.forward.min(other.forward),
        }
    }
}

/// Least seconds that the layers of a stage keep it busy in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Of the average stage.
    pub average: f64,
    /// Of the slowest: layers are not cut (`packing.rs`).
    pub slowest: f64,
    /// At most so much of the average stage's a step has once: no part of a bubble.
    pub once: f64,
    /// What all stages take together, where some are faster than others.
    pub together: Option<Together>,
    /// What forward takes, where stages are alike.
    pub forward: Forward,
}

/// Least seconds that stages of unequal speed take together in the micro-batches of a step: the less, the longer the
/// slowest may take, for then the faster ones can take over more layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Together {
    /// Were none given any time.
    pub all: f64,
    /// So much less for every second that the slowest takes.
    pub falls: f64,
}

impl Together {
    /// Least seconds of a slowest stage that takes no less than is given, of the bubble beside the others, as in
    /// [`Work::filled`], and of what it waits for behind rounds: it may take longer where these become shorter by more.
    /// All of it is least where the stage takes no longer than it must, or one of the two has come to nothing.
    fn filled(
        self,
        (n_stages, bubble): (u64, f64),
        slowest: f64,
        (rounds, hidden): (impl Fn(f64) -> f64, f64),
    ) -> f64 {
        let others = (n_stages as f64 - 1.0).max(1.0);
        let (beside, falls) = (2.0 * self.all / others, 2.0 * (self.falls + 1.0) / others + 1.0);
        let at = |longest: f64| longest + bubble * (beside - falls * longest).max(0.0) + rounds(longest);
        [slowest, beside / falls, hidden]
            .into_iter()
            .map(|end| at(end.max(slowest)))
            .fold(f64::INFINITY, f64::min)
    }
}

impl Work {
    /// All of `n_stages` as long as the average, with a bubble that is so large a share of it; or the slowest, with the
    /// time in which nothing reaches it.
    ///
    /// A first stage that is the slowest has its `w` forwards to do until the first gradient returns, and as many
    /// backwards behind the last: in 1F1B it takes `m t + 2 (p - 1) o - w t`, `w = p - 1`, where others take `o`.
    /// Behind others it takes no less, were they as slow as itself.
    pub(crate) fn filled(self, n_stages: u64, bubble: f64) -> f64 {
        self.filled_beside(n_stages, bubble, Waits::default())
    }

    /// The same of stages that send when they have computed. What is sent on the way in and out is left out, and so is
    /// that the last send of a stage is no part of its work: it is less.
    fn filled_beside(self, n_stages: u64, bubble: f64, waits: Waits) -> f64 {
        let p = n_stages as f64;
        let others = (p * self.average - self.slowest) / (p - 1.0).max(1.0) - self.once;
        let even = self.average + bubble * (self.average - self.once).max(0.0);
        let slowest = self.slowest + bubble * (2.0 * others - self.slowest).max(0.0);
        let rounds = |longest: f64| (waits.rounds - waits.hides * (longest - self.average)).max(0.0);
        let hidden = if waits.hides > 0.0 { self.average + waits.rounds / waits.hides } else { self.slowest };
        let filled = |all: Together| all.filled((n_stages, bubble), self.slowest, (rounds, hidden));
        let together = self.together.map_or(0.0, filled);
        (even + waits.average).max((slowest + rounds(self.slowest)).max(together) + waits.least)
    }
}

/// Least seconds of a step that stages wait for what they send to their neighbours.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Waits {
    /// The average stage.
    pub(crate) average: f64,
    /// The stage that waits least, rounds apart.
    pub(crate) least: f64,
    /// What every stage waits behind rounds over virtual stages, were none longer than the average.
    pub(crate) rounds: f64,
    /// So much of its lead over the average hides of that.
    pub(crate) hides: f64,
}

impl Bound {
    /// What is known on one of the grounds of the candidate's stages.
    pub fn on(&self, ground: usize) -> &Self {
        self.grounds.get(ground).unwrap_or(self)
    }
}

/// A bound is taken at this fraction of itself: a stage of more layers than the average hides a little more of what it
/// sends once per step.
const FILLED: f64 = 0.999;

/// The same where stages wait for each other as long as they compute, or are of different devices: there, a stage may
/// be shorter than the others to more effect than `Work::filled` says.
const HARDLY_FILLED: f64 = 0.99;

/// Micro-batches from which on what a step has once is little of it.
const MANY: u64 = 8;

impl Scope<'_> {
    /// A time that the candidate cannot beat; infinite where no schedule that is allowed has a table for it.
    pub fn bound(&self, candidate: &Candidate, of: Forms<'_>) -> Option<Bound> {
        let grounds = self.grounds(candidate);
        let benches = self.benches(candidate, &grounds);
        match benches.as_slice() {
            [all] => self.bound_on(all, of),
            several => {
                let on = |bench| self.bound_on(bench, of);
                self.mixed(candidate, &grounds, several.iter().map(on).collect::<Option<Vec<_>>>()?)
            }
        }
    }

    /// The same with all stages on one ground: the larger of two bounds, either of which is too low where compute
    /// covers the communication of a step, or does not.
    fn bound_on(&self, bench: &Bench<'_>, of: Forms<'_>) -> Option<Bound> {
        let given = self.given_fastest();
        let kinds = 0..self.forms.len();
        let mut asked: Vec<Asked<'_>> = kinds.map(|kind| self.asked(bench, kind, &given, of)).collect();
        self.bound_by(bench, &mut asked, of)
    }

    /// The bound where compute covers what it does, and what all layers have once per step.
    pub(crate) fn bound_of(
        &self,
        bench: &Bench<'_>,
        asked: &[Asked<'_>],
        (of, covers): (Forms<'_>, Covers),
        repeated: &[Vec<f64>],
    ) -> Option<(Bound, Spans)> {
        let candidate = bench.candidate;
        let mut once = Spans::default();
        let mut bytes = 0.0;
        let mut main: Option<(f64, Sharding, f64)> = None;
        let p = candidate.n_stages as f64;
        let mut choices_made = Vec::with_capacity(self.forms.len());
        let mut layers = Vec::with_capacity(self.forms.len());
        for (kind, forms) in self.forms.iter().enumerate() {
            let asked = &asked[kind];
            let (form, problem) = asked.first().filter(|(form, _)| of != Forms::All || *form == 0)?;
            let Cheapest { bound: time, choices, .. } = self.chooser(problem).cheapest(0.0)?;
            let cost = problem.problem.total(&choices)?;
            let unit = cost.time / cost.memory.max(1.0);
            let count = self.counts[kind] as f64;
            bytes += (cost.memory - problem.once(&choices)) * count;
            let choice = problem.choice(&choices);
            once = once.plus(problem.spans(&choices), count);
            // The kind that takes most of the time decides in which sharding the stream passes everywhere.
            if !forms[0].layer.is_end() && main.is_none_or(|(most, ..)| time * count > most) {
                main = Some((time * count, choice.stream, unit));
            }
            choices_made.push((*form, choice));
            let busy = |(at, (_, form)): (usize, &(usize, LayerProblem<'_>))| {
                let step = self.chooser(form).cheapest(0.0)?.bound;
                Some(Busy { step, repeated: repeated[kind][at], forward: form.least_forward() })
            };
            let plain = Busy { step: time, repeated: repeated[kind][0], forward: problem.least_forward() };
            let least = asked.iter().enumerate().skip(1).filter_map(busy).fold(plain, Busy::min);
            layers.push(LayerTimes { least, plain });
        }
        let (_, stream, seconds_per_byte) = main?;
        let (work, time, saving) = self.of_layers(candidate, &layers);
        let crowding = bytes / p / bench.setting.capacity;
        let (fastest, grounds) = (choices_made, Vec::new());
        let edges = asked.iter().flatten().flat_map(|(_, form)| &form.problem.edges);
        let n_pairs = edges.map(|edge| edge.table.len()).sum();
        let found = Bound {
            time,
            work,
            saving,
            crowding,
            stream,
            seconds_per_byte,
            fastest,
            layers,
            covers,
            other_covers: Vec::new(),
            n_pairs,
            grounds,
            computes_again: false,
        };
        Some((found, once))
    }

    /// Least seconds that each form of each kind takes in the micro-batches of a step, where it is asked.
    ///
    /// Where there are far fewer of them than stages, the bubble is longer than the work: choices that send less in
    /// every micro-batch and more once per step are then faster than those that are where there is none. No choices
    /// take less than the least of a step, and as long a bubble as the least of micro-batches makes.
    pub(crate) fn repeated(&self, bench: &Bench<'_>, asked: &mut [Asked<'_>], clock: Clock) -> Vec<Vec<f64>> {
        let has_bubble = bench.candidate.n_stages > 1;
        let of_form = |(_, problem): &mut (usize, LayerProblem<'_>)| {
            if !has_bubble {
                return 0.0;
            }
            problem.set_clock(clock);
            self.chooser(problem).cheapest(0.0).map_or(0.0, |found| found.bound)
        };
        asked.iter_mut().map(|forms| forms.iter_mut().map(of_form).collect()).collect()
    }

    /// The work of layers of which each takes so long, the least time of a step, and how much of it forms save.
    fn of_layers(&self, candidate: &Candidate, layers: &[LayerTimes]) -> (Work, Seconds, Seconds) {
        let p = candidate.n_stages as f64;
        let ends = self.ends_in_place(candidate);
        let work = |of: fn(&LayerTimes) -> Busy| -> Work {
            let steps: Vec<f64> = layers.iter().map(|layer| of(layer).step).collect();
            let all = |of_layer: &dyn Fn(Busy) -> f64| -> f64 {
                layers
                    .iter()
                    .zip(&self.counts)
                    .map(|(layer, &count)| of_layer(of(layer)) * count as f64)
                    .sum()
            };
            let average = all(&|busy| busy.step) / p;
            let slowest = self.pieces(ends, &steps).least_slowest(candidate.n_stages).max(average);
            let once = average - all(&|busy| busy.repeated) / p;
            let frequent = || (0..layers.len()).filter(|&kind| !self.is_rare(kind));
            let share = |kind: usize| of(&layers[kind]).forward / of(&layers[kind]).step;
            let forward = Forward {
                all: all(&|busy| busy.forward),
                layers: frequent().map(|kind| self.counts[kind] as f64 * of(&layers[kind]).step).sum(),
                share: frequent().map(share).reduce(f64::min).unwrap_or(0.0),
            };
            Work { average, slowest, once, together: None, forward }
        };
        let (least, plain) = (work(|layer| layer.least), work(|layer| layer.plain));
        let time = self.time_free(candidate, least);
        if !time.0.is_finite() {
            return (least, time, Seconds::ZERO);
        }
        let mut saving = self.time_free(candidate, plain) - time;
        if !self.bends.is_empty() {
            // No bubble is promised there: a long layer that has no other form would hide what forms of the others
            // save.
            let even = |work: Work| self.time_free(candidate, Work { slowest: work.average, ..work });
            saving = saving.max(even(plain) - even(least));
        }
        (least, time, saving)
    }

    /// The same as [`Self::bound`], by what layers take in the bound that another search of the question found, if one
    /// did: it allowed other schedules.
    pub(crate) fn bound_by_known(&self, candidate: &Candidate, of: Forms<'_>) -> Option<Bound> {
        let Some(known) = self.bounds.of(candidate) else { return self.bound(candidate, of) };
        let (work, time, saving) = self.of_layers(candidate, &known.layers);
        Some(Bound { work, time, saving, ..known })
    }

    /// Kinds of the first and of the last layer of the model, where no other layer is of them.
    fn end_kinds(&self) -> [Option<usize>; 2] {
        let sequence = &self.model().sequence;
        let is_alone = |kind: &usize| self.counts[*kind] == 1 && sequence.len() > 2;
        [sequence.first(), sequence.last()].map(|run| run.map(|run| run.layer).filter(is_alone))
    }

    /// Whether a kind is that of the first or of the last layer alone.
    pub(crate) fn is_end(&self, kind: usize) -> bool {
        self.end_kinds().contains(&Some(kind))
    }

    /// The same where they stand on the first and on the last rank of a pipeline, whole, in every schedule that is
    /// tried.
    pub(crate) fn ends_in_place(&self, candidate: &Candidate) -> [Option<usize>; 2] {
        let known = |schedule: Schedule| FamilyKind::of(schedule).runs_forward_to_last();
        let in_place = self.schedules(candidate).into_iter().all(known);
        if in_place { self.end_kinds() } else { [None; 2] }
    }

    /// Layers by kind that take so long on a stage, of which such kinds are in place at the ends.
    pub(crate) fn pieces(&self, ends: [Option<usize>; 2], times: &[f64]) -> Pieces {
        let others = self.counts.iter().enumerate().filter(|(kind, _)| !self.is_end(*kind));
        Pieces {
            ends: ends.map(|kind| kind.map_or(0.0, |kind| times[kind])),
            layers: others.map(|(kind, &count)| (times[kind], count)).collect(),
        }
    }

    /// Per kind and form, the time of its fastest choice on a candidate; nothing where it has none.
    pub(crate) fn times_of_forms(&self, candidate: &Candidate) -> Vec<Vec<Option<f64>>> {
        let (bench, given) = (self.bench(candidate), self.given_fastest());
        let of_kind = |kind: usize| {
            let mut times = vec![None; self.forms[kind].len()];
            for (form, problem) in self.asked(&bench, kind, &given, Forms::All) {
                times[form] = self.chooser(&problem).cheapest(0.0).map(|found| found.bound);
            }
            times
        };
        (0..self.forms.len()).map(of_kind).collect()
    }

    /// What to say where the solver that is asked for cannot take the problem of some layer of a candidate.
    pub(crate) fn too_large(&self, candidate: &Candidate) -> Option<String> {
        let (bench, given) = (self.bench(candidate), self.given());
        (0..self.forms.len()).find_map(|kind| {
            let asked = self.asked(&bench, kind, &given, Forms::All);
            asked.iter().find_map(|(form, problem)| {
                let layer = &self.forms[kind][*form].layer;
                too_large(self.request.solver, problem, (&layer.name, &candidate.shape.mesh))
            })
        })
    }

    /// Sharding of the stream beside a layer with a choice: as it leaves where nothing enters.
    pub(crate) fn passes(&self, kind: usize, choice: &LayerChoice) -> Sharding {
        if self.forms[kind][0].layer.stream_in.is_empty() { choice.out } else { choice.stream }
    }

    /// Least time of a step whose layers take `work`: the slowest stage, and fill and drain of the other stages in the
    /// schedule that has the least; what stragglers cost, and the host.
    ///
    /// `None` where no schedule is allowed.
    pub fn with_bubble(&self, candidate: &Candidate, work: Work) -> Option<Seconds> {
        self.in_schedules(candidate, |_| work)
    }

    /// The same of the work in each schedule; where devices differ, beside what stages wait for their sends: over slow
    /// links that is more than a bubble.
    pub(crate) fn in_schedules(
        &self,
        candidate: &Candidate,
        work: impl Fn(FamilyKind) -> Work,
    ) -> Option<Seconds> {
        let borders = if self.request.cluster.is_mixed() { self.borders(candidate) } else { Vec::new() };
        let pipeline = |schedule: Schedule| {
            let waits = Sends::over(&borders, candidate, schedule).waits();
            least_filled(candidate, work(FamilyKind::of(schedule)), (self.idle(candidate, schedule), waits))
        };
        let least = self.schedules(candidate).into_iter().map(pipeline).min_by(f64::total_cmp)?;
        Some(self.around(candidate, least))
    }

    /// The fraction of itself at which a bound is taken.
    fn taken(&self, candidate: &Candidate) -> f64 {
        if self.request.cluster.is_mixed() {
            return HARDLY_FILLED;
        }
        let is_filled = candidate.n_micro_batches >= (candidate.n_stages + 2).max(MANY);
        match candidate.n_stages {
            // All layers are on one stage.
            1 => 1.0,
            _ if is_filled => FILLED,
            _ => HARDLY_FILLED,
        }
    }

    /// The least time in the schedules of a family, whose slowest stage takes that beside the least that a stage waits
    /// for its sends.
    pub(crate) fn in_family(&self, candidate: &Candidate, work: Work, family: &Family) -> Seconds {
        self.around(candidate, least_filled(candidate, work, (family.idle, family.sends.waits())))
    }

    fn around(&self, candidate: &Candidate, pipeline: f64) -> Seconds {
        let pipeline = Seconds(pipeline);
        let stragglers = stragglers(&self.setting, candidate.meshes());
        (pipeline * stragglers + self.constants.host_per_iteration_s) * self.taken(candidate)
    }
}

/// Least seconds of a step whose stages idle at least so, and wait so long for what they send.
fn least_filled(candidate: &Candidate, work: Work, (idle, waits): (Idle, Waits)) -> f64 {
    let counts = (candidate.n_stages as f64, candidate.n_micro_batches as f64);
    let passed = work.forward.least_step(work.average, counts, idle.passage);
    work.filled_beside(candidate.n_stages, idle.bubble, waits).max(passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bubble_is_as_long_as_the_least_of_its_micro_batches() {
        // In a step and in its micro-batches: where the bubble is four times as long, the second is the faster.
        let choices =
            [(11.0, 10.0), (12.0, 9.0)].map(|(step, repeated)| Busy { step, repeated, forward: 0.0 });
        let times = choices.map(|busy| busy.step + 4.0 * busy.repeated);
        assert_eq!(times, [51.0, 48.0]);
        let Busy { step, repeated, .. } = choices[0].min(choices[1]);
        let work = Work { average: step, slowest: step, once: step - repeated, ..Work::default() };
        assert_eq!(work.filled(5, 4.0), 47.0);
    }

    #[test]
    fn the_slowest_of_unequal_stages_takes_as_long_as_makes_the_step_shortest() {
        let waits = Waits { average: 0.0, least: 0.5, rounds: 3.0, hides: 0.6 };
        for (bubble, all) in [(0.1, 40.0), (0.3, 40.0), (0.5, 40.0), (0.3, 20.0), (0.9, 90.0)] {
            let together = Some(Together { all, falls: 0.2 });
            let work = Work { average: 8.0, slowest: 10.0, once: 8.0, together, ..Work::default() };
            let at = |longest: f64| {
                let beside = 2.0 * (all - 1.2 * longest) / 3.0 - longest;
                let rounds = 3.0 - 0.6 * (longest - 8.0);
                longest + bubble * beside.max(0.0) + rounds.max(0.0) + 0.5
            };
            let least = (0..4000).map(|step| at(10.0 + f64::from(step) * 0.01)).fold(f64::INFINITY, f64::min);
            let found = work.filled_beside(4, bubble, waits);
            assert!((found - least).abs() < 0.01, "{found} {least} {bubble} {all}");
        }
    }
}
