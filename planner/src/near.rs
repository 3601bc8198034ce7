//! Plans near one that ran, on other numbers of devices: its degrees, or one of them twice or half as large.
//!
//! Training that lost devices waits for the answer. What was fastest mostly is so still, with other numbers of replicas
//! and of stages. So here the degrees inside a replica, the number of stages and the micro-batch are named, which
//! leaves one candidate; the most promising come first, and what was found by one is the limit of the next, so that
//! bounds end most questions at once:
//!
//! ```text
//! devices x stages, with the degrees as they were          -> places(), by promise()
//! devices x stages, with one degree of the best changed    -> neighbours(), again until none is faster
//! all of it by schedules that split backward               where `optimize` asks for them
//! all of it with the memory of hosts                       where nothing fits without
//! ```
//! What is found is a plan like any other, with its own price and proof. That it was looked for here alone, its proof
//! says.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};

use cost_model::Constants;
use ir::cluster::Cluster;
use ir::names::Roles;
use ir::plan::Plan;
use ir::units::Seconds;
use rayon::prelude::*;

use crate::forbid::kind_of;
use crate::found::{Again, Found, Further, Start};
use crate::optimize::search_from;
use crate::request::{
    AxesKind, Forbid, NoPlan, OnProgress, Pins, Request, ScheduleKind, SequenceParallel, SharesKind, Stop,
};
use crate::shapes::divisors;
use crate::{offload, on_cluster, split_schedules, written};

/// Questions of a round at most.
const MOST_ASKED: usize = 10;

/// Questions that are asked at a time: a fixed number, so that threads do not change the answer.
const TOGETHER: usize = 4;

/// Rounds over neighbours at most.
const ROUNDS: usize = 3;

/// What promises to take more than so many times as long as the most promising is not asked.
const PROMISING: f64 = 1.2;

/// Tensor degrees that are looked at where devices do the same or each has a stage.
const TENSOR_DEGREES: [u64; 3] = [2, 4, 8];

/// Fewer devices are worth telling of where they take no more than this part of the time of all.
const WORTH_TELLING: f64 = 0.95;

/// Twice or half as many stages as before promise to take so much longer.
const FURTHER: f64 = 0.05;

/// Why some number of devices has no plan.
const UNDIVIDED: &str = "no numbers of replicas and stages that are allowed divide the devices and the batch";

/// All of it takes about as long as others take between two reports.
const UNWATCHED: (Stop<'_>, OnProgress<'_>) = (Stop::never(), &|_| ());

/// What came of one number of devices.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// A plan that takes so long: the fastest of them.
    Found(Seconds),
    /// None that is faster than what was found before, or that promises to be.
    NoFaster,
    /// None at all, and why.
    NoPlan(String),
}

/// The fastest plan near one that ran.
pub struct Near {
    /// The plan.
    pub plan: Plan,
    /// What came of the first of the clusters, and of those that were asked about, by their places among them.
    pub outcomes: BTreeMap<usize, Outcome>,
}

/// Degrees inside a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Degrees {
    tp: u64,
    cp: u64,
    ep: u64,
    /// Whether experts are cut as products are.
    cuts_experts: bool,
    /// Sequences of a replica's micro-batch, or fewer where these do not divide its part of the batch.
    micro_batch: u64,
    /// As layers of the plan are cut by tokens beside their products, or not; nothing where it cuts no products.
    sequence_parallel: Option<SequenceParallel>,
}

impl Degrees {
    /// Those of a plan, but for what the user pinned.
    fn of(roles: &Roles, pins: &Pins) -> Self {
        Self {
            tp: pins.tp.unwrap_or(roles.tp),
            cp: pins.cp.unwrap_or(roles.cp),
            ep: pins.ep.unwrap_or(roles.ep),
            cuts_experts: pins.etp.unwrap_or(roles.etp) > 1,
            micro_batch: pins.micro_batch.unwrap_or(roles.micro_batch),
            sequence_parallel: (roles.tp > 1).then_some(match roles.sequence_parallel {
                true => SequenceParallel::On,
                false => SequenceParallel::Off,
            }),
        }
    }

    /// Whether none of them is forbidden.
    fn are_allowed(self, forbid: &Forbid) -> bool {
        forbid.tp.allows(self.tp)
            && forbid.cp.allows(self.cp)
            && forbid.ep.allows(self.ep)
            && forbid.micro_batch.allows(self.micro_batch)
    }

    /// One of them twice or half as large, as far as the user leaves it open. A micro-batch goes as far as the next that
    /// divides the batch, where twice as many or half of its sequences do not.
    fn neighbours(self, pins: &Pins, global_batch: u64) -> Vec<Self> {
        let other = |degree: u64, is_open: bool| {
            let both = [degree.is_multiple_of(2).then_some(degree / 2), degree.checked_mul(2)];
            both.into_iter().flatten().filter(move |_| is_open)
        };
        let tp = other(self.tp, pins.tp.is_none()).map(|tp| Self { tp, ..self });
        let cp = other(self.cp, pins.cp.is_none()).map(|cp| Self { cp, ..self });
        let ep = other(self.ep, pins.ep.is_none() && self.ep > 1).map(|ep| Self { ep, ..self });
        let own = self.micro_batch;
        let sizes = divisors(global_batch);
        let next = sizes.iter().copied().find(|size| *size > own).map(|next| next.max(own.saturating_mul(2)));
        let before = match own.is_multiple_of(2) {
            true => Some(own / 2),
            false => sizes.iter().copied().rev().find(|size| *size < own),
        };
        let micro_batch = before.into_iter().chain(next).filter(|_| pins.micro_batch.is_none());
        let micro_batch = micro_batch.map(|micro_batch| Self { micro_batch, ..self });
        tp.chain(cp).chain(ep).chain(micro_batch).collect()
    }
}

/// Where a plan is looked for.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Place {
    /// Which of the clusters.
    at: usize,
    /// With the micro-batch that divides the batch.
    degrees: Degrees,
    n_stages: u64,
    /// Its least time by the shape of its pipeline alone, in that of one device.
    promise: f64,
}

/// The numbers of stages and replicas that divide the devices of a cluster and the batch of a question.
fn places(
    request: &Request,
    (at, n_devices): (usize, u64),
    (degrees, before): (Degrees, &Roles),
) -> Vec<Place> {
    let pins = &request.pins;
    let Some(inside) = degrees.tp.checked_mul(degrees.cp).filter(|inside| *inside > 0) else {
        return Vec::new();
    };
    let numbers = match pins.pp {
        Some(pp) => pp..=pp,
        None => 1..=request.model.n_layers(),
    };
    let place = |n_stages: u64| {
        let stage = n_devices.checked_div(n_stages).filter(|stage| stage * n_stages == n_devices)?;
        let dp = (stage / inside).max(1);
        let divides = dp * inside == stage
            && request.job.global_batch.is_multiple_of(dp)
            && stage.checked_rem(degrees.ep) == Some(0)
            && pins.dp.is_none_or(|wanted| wanted == dp);
        let sequences = request.job.global_batch / dp;
        let micro_batch = divisors(sequences).into_iter().rev().find(|b| *b <= degrees.micro_batch)?;
        let divides = divides && pins.micro_batch.is_none_or(|wanted| wanted == micro_batch);
        let (forbid, degrees) = (&pins.forbid, Degrees { micro_batch, ..degrees });
        let is_allowed = forbid.pp.allows(n_stages) && forbid.dp.allows(dp) && degrees.are_allowed(forbid);
        let pipeline = (n_stages, sequences / micro_batch, n_devices);
        let promise = promise(request.model.n_layers(), pipeline, (before.pp, before.vpp));
        (divides && is_allowed).then_some(Place { at, degrees, n_stages, promise })
    };
    numbers.filter_map(place).collect()
}

/// How long a step takes at best for its bubble and its longest stage, in the time of one device, and more the further
/// the number of stages is from what it was:
///
/// ```text
/// (1 + (p - 1) / (m v)) (ceil(L / p) p / L) / n        m micro-batches, v virtual stages
/// ```
/// where a rank has no more virtual stages than before, nor than layers (Narayanan et al. 2021, arXiv 2104.04473,
/// section 2.2).
fn promise(n_layers: u64, (p, m, n_devices): (u64, u64, u64), (pp, vpp): (u64, u64)) -> f64 {
    let longest = longest_of(n_layers, p);
    let (m, p) = (m.max(1) as f64, p as f64);
    let v = (inner(n_layers) / p).floor().clamp(1.0, vpp.max(1) as f64);
    let further = 1.0 + FURTHER * (p / pp.max(1) as f64).log2().abs();
    further * (1.0 + (p - 1.0) / (m * v)) * longest / n_devices as f64
}

/// Layers but embedding and head, which stand beside others, or are stages of their own.
fn inner(n_layers: u64) -> f64 {
    n_layers.saturating_sub(2).max(1) as f64
}

/// How long the longest of so many stages is, in that of the average: layers are not cut.
fn longest_of(n_layers: u64, p: u64) -> f64 {
    let (n_layers, p) = (inner(n_layers), p as f64);
    ((n_layers / p).ceil() * p / n_layers).max(1.0)
}

/// The question at a place; with what is pinned, which is what the place has.
fn question(request: &Request, cluster: &Cluster, place: &Place, schedule: Option<ScheduleKind>) -> Request {
    let (pins, Degrees { tp, cp, ep, cuts_experts, micro_batch, sequence_parallel }) =
        (&request.pins, place.degrees);
    let is_mixture = ep > 1 || cuts_experts;
    let etp = if cuts_experts { tp } else { 1 };
    let pins = Pins {
        tp: Some(tp),
        cp: Some(cp),
        pp: Some(place.n_stages),
        micro_batch: Some(micro_batch),
        ep: pins.ep.or(is_mixture.then_some(ep)),
        etp: pins.etp.or((is_mixture && tp > 1).then_some(etp)),
        shares: Some(SharesKind::Equal),
        axes: Some(AxesKind::Named),
        sequence_parallel: pins.sequence_parallel.or(sequence_parallel),
        schedule: schedule.or(pins.schedule),
        split_backward: pins.split_backward.filter(|_| schedule.is_none()),
        ..pins.clone()
    };
    Request { pins, cluster: cluster.clone(), ..request.clone() }
}

/// The most promising of some places, as far as they could be the fastest.
fn most_promising(mut places: Vec<Place>) -> Vec<Place> {
    places.sort_by(|a, b| a.promise.total_cmp(&b.promise));
    let least = places.first().map_or(0.0, |place| place.promise);
    places.retain(|place| place.promise <= least * PROMISING);
    places.truncate(MOST_ASKED);
    places
}

/// The fastest plan near one that ran for a question on any of several clusters in place of its own. `None` where
/// nothing near it fits on any, or where devices are not all alike.
///
/// # Errors
/// Where a plan that was found contradicts itself.
pub fn optimize_near(request: &Request, clusters: &[Cluster], before: &Plan) -> Result<Option<Near>, NoPlan> {
    if clusters.is_empty() || clusters.iter().any(Cluster::is_mixed) {
        return Ok(None);
    }
    if !offload::is_open(&request.pins) {
        return near(request, clusters, before);
    }
    let with_hosts = offload::allowed(request);
    if offload::is_used(before) {
        return near(&with_hosts, clusters, before);
    }
    if let Some(Near { plan, outcomes }) = near(request, clusters, before)? {
        let crowded = Request { cluster: plan.cluster.clone(), ..request.clone() };
        return Ok(Some(Near { plan: offload::without(plan, &crowded), outcomes }));
    }
    let found = near(&with_hosts, clusters, before)?;
    Ok(found.map(|Near { plan, outcomes }| Near { plan: offload::with(plan, None), outcomes }))
}

/// On which of some smaller clusters a plan near one takes so much less than it that it is worth telling, and how long:
/// where its devices divide badly, some do the same, or stages are of unequal length. `None` where nothing promises
/// that, or nothing was found.
///
/// # Errors
/// What is wrong with the cluster's calibration.
pub fn faster_on_fewer(
    request: &Request,
    clusters: &[Cluster],
    plan: &Plan,
) -> Result<Option<(u64, Seconds)>, NoPlan> {
    let (roles, n_devices) = (&plan.roles, plan.n_devices());
    let Some(time) = plan.predicted.as_ref().map(|predicted| predicted.step_time_s) else { return Ok(None) };
    let at_work = roles.dp * roles.tp * roles.cp * roles.pp;
    let pipeline = (roles.pp, roles.accumulation, at_work);
    let own = promise(request.model.n_layers(), pipeline, (roles.pp, roles.vpp)) * unevenness(request, plan);
    let degrees = Degrees::of(roles, &request.pins);
    // Where devices do the same, or each has a stage, fewer may cut products.
    let divides_badly = at_work < n_devices || roles.pp == n_devices;
    let others = TENSOR_DEGREES.into_iter().filter(|_| divides_badly && request.pins.tp.is_none());
    let others: Vec<Degrees> = others.map(|tp| Degrees { tp, ..degrees }).collect();
    let is_promising = |cluster: &Cluster| {
        let n = cluster.n_devices();
        let places = |&degrees: &Degrees| places(request, (0, n), (degrees, roles));
        let mut all = std::iter::once(&degrees).chain(&others).flat_map(places);
        n < n_devices && all.any(|place| place.promise < own * WORTH_TELLING)
    };
    let clusters: Vec<Cluster> = clusters.iter().filter(|cluster| is_promising(cluster)).cloned().collect();
    let world = on_cluster(request, Constants::load())?;
    let questions: Vec<OnceCell<Request>> = vec![OnceCell::new(); 2 * MOST_ASKED * (ROUNDS + 1)];
    let climb = Climb::new((request, &clusters), (&world, &questions), roles);
    let mut climb = Climb { limit: Some(time * WORTH_TELLING), ..climb };
    climb.from(&[degrees], (None, 1.0));
    if !others.is_empty() {
        climb.from(&others, (None, 1.0));
    }
    let Some((place, found)) = climb.best else { return Ok(None) };
    Ok(found.step_time().map(|time| (clusters[place.at].n_devices(), time)))
}

/// So many times as long as its number of layers says the longest stage of a plan is, beside the others: it may have a
/// heavy head.
fn unevenness(request: &Request, plan: &Plan) -> f64 {
    let Some(predicted) = &plan.predicted else { return 1.0 };
    let times = || predicted.stages.iter().map(|stage| (stage.forward_s + stage.backward_s).0);
    let longest = times().fold(0.0, f64::max) * plan.n_stages as f64 / times().sum::<f64>();
    let by_layers = longest_of(request.model.n_layers(), plan.n_stages);
    if longest > by_layers { longest / by_layers } else { 1.0 }
}

fn near(request: &Request, clusters: &[Cluster], before: &Plan) -> Result<Option<Near>, NoPlan> {
    let most = MOST_ASKED * (ROUNDS + 1) * (1 + split_schedules::KINDS.len());
    let world = on_cluster(request, Constants::load())?;
    let questions: Vec<OnceCell<Request>> = vec![OnceCell::new(); most];
    let degrees = Degrees::of(&before.roles, &request.pins);
    let mut climb = Climb::new((request, clusters), (&world, &questions), &before.roles);
    let of_first = places(request, (0, clusters[0].n_devices()), (degrees, &before.roles));
    let first = if of_first.is_empty() { Outcome::NoPlan(UNDIVIDED.into()) } else { Outcome::NoFaster };
    climb.outcomes.insert(0, first);
    climb.from(&[degrees], (None, 1.0));
    let Some((_, found)) = &climb.best else { return Ok(None) };
    let whole = found.ranking.first().map(|best| (best.step_time(), best.schedule));
    // Schedules that split backward: the one that is a rule, as `optimize` asks for it, and that of the plan.
    let asked = split_schedules::kinds(found, found.scope.request).asked;
    let is_wanted =
        |kind: &ScheduleKind| *kind == ScheduleKind::DualPipeV || kind_of(before.schedule) == Some(*kind);
    for kind in asked.into_iter().filter(is_wanted) {
        let Some((place, _)) = &climb.best else { break };
        climb.from(&[place.degrees, degrees], (Some(kind), split_schedules::WORTH));
    }
    let Climb { best, mut outcomes, .. } = climb;
    let Some((place, found)) = best else { return Ok(None) };
    // Of all that are compared as they are, the fastest is looked at once more.
    let again = Start { again: Again::InForms, ..Start::default() };
    let (looked_at, _) = search_from(found.scope.request, &world, again, UNWATCHED);
    let mut found = looked_at.unwrap_or(found);
    found.tally.further.insert(Further::NearAlone);
    let plan = split_schedules::instead(written(&found, &world)?, whole);
    if let Some(predicted) = &plan.predicted {
        outcomes.insert(place.at, Outcome::Found(predicted.step_time_s));
    }
    Ok(Some(Near { plan, outcomes }))
}

/// A search that goes from one degree to its neighbours.
struct Climb<'s> {
    request: &'s Request,
    clusters: &'s [Cluster],
    /// The same on all clusters.
    world: &'s Constants,
    /// Room for questions, on which what is found stands.
    questions: std::slice::Iter<'s, OnceCell<Request>>,
    before: &'s Roles,
    /// What is slower is of no interest, whatever is found.
    limit: Option<Seconds>,
    outcomes: BTreeMap<usize, Outcome>,
    best: Option<(Place, Found<'s>)>,
}

impl<'s> Climb<'s> {
    /// Before anything was asked.
    fn new(
        (request, clusters): (&'s Request, &'s [Cluster]),
        (world, questions): (&'s Constants, &'s [OnceCell<Request>]),
        before: &'s Roles,
    ) -> Self {
        let (questions, outcomes) = (questions.iter(), BTreeMap::new());
        Self { request, clusters, world, questions, before, limit: None, outcomes, best: None }
    }

    /// Looks for what is faster than the best so far from some degrees on, until no neighbour is, by one schedule, or
    /// by all that do not split backward; the first that is found takes no more than a part of the best.
    fn from(&mut self, starts: &[Degrees], (schedule, mut worth): (Option<ScheduleKind>, f64)) {
        let pins = &self.request.pins;
        let mut known: BTreeSet<(usize, Degrees, u64)> = BTreeSet::new();
        let mut next: Vec<Place> = starts.iter().flat_map(|&degrees| self.places(degrees)).collect();
        for _ in 0..=ROUNDS {
            next.retain(|place| known.insert((place.at, place.degrees, place.n_stages)));
            let (places, mut last) = (most_promising(next), None);
            let mut left = places.as_slice();
            while !left.is_empty() {
                // Without a limit a question takes long.
                let n =
                    if self.best.is_some() || self.limit.is_some() { TOGETHER.min(left.len()) } else { 1 };
                let some;
                (some, left) = left.split_at(n);
                if let Some(place) = self.faster(some, (schedule, worth)) {
                    (last, worth) = (Some(place), 1.0);
                }
            }
            // Where nothing fits, it may with other degrees.
            let around = match (last, &self.best) {
                (Some(place), _) => place.degrees,
                (None, None) if self.limit.is_none() => starts[0],
                (None, _) => break,
            };
            next = around
                .neighbours(pins, self.request.job.global_batch)
                .into_iter()
                .flat_map(|degrees| self.places(degrees))
                .collect();
        }
    }

    fn places(&self, degrees: Degrees) -> Vec<Place> {
        let of = |(at, cluster): (usize, &Cluster)| {
            places(self.request, (at, cluster.n_devices()), (degrees, self.before))
        };
        self.clusters.iter().enumerate().flat_map(of).collect()
    }

    /// The fastest of some places if it takes less than a part of the best; then it is the best. All have one limit, so
    /// that threads do not change what is found.
    fn faster(&mut self, some: &[Place], (schedule, worth): (Option<ScheduleKind>, f64)) -> Option<Place> {
        let best = self.best.as_ref().and_then(|(_, found)| found.step_time());
        let limit = best.map_or(self.limit, |best| Some(best * worth));
        let asked = some.iter().zip(&mut self.questions).map(|(place, slot)| {
            let asked = || question(self.request, &self.clusters[place.at], place, schedule);
            (*place, slot.get_or_init(asked))
        });
        let asked: Vec<(Place, &'s Request)> = asked.collect();
        let world = self.world;
        let ask = |&(_, request): &(Place, &'s Request)| {
            let start = Start { limit, reach: 1.0, again: Again::Never, ..Start::default() };
            search_from(request, world, start, UNWATCHED)
        };
        let all: Vec<_> = asked.par_iter().with_max_len(1).map(ask).collect();
        let mut least = limit;
        let mut faster = None;
        for ((place, _), (found, tally)) in asked.into_iter().zip(all) {
            let time = found.as_ref().ok().and_then(Found::step_time);
            let outcome = match (found, time) {
                (Ok(found), Some(time)) if least.is_none_or(|least| time < least) => {
                    (least, faster) = (Some(time), Some(place));
                    self.best = Some((place, found));
                    Outcome::Found(time)
                }
                (Err(why), _) if limit.is_none() || tally.n_bounded + tally.n_simulated == 0 => {
                    Outcome::NoPlan(why.to_string())
                }
                (Ok(_) | Err(_), _) => Outcome::NoFaster,
            };
            self.outcomes.entry(place.at).or_insert(Outcome::NoPlan(String::new())).learn(outcome);
        }
        faster
    }
}

impl Outcome {
    /// Takes in what came of another question about as many devices.
    fn learn(&mut self, next: Self) {
        match (&self, &next) {
            (_, Self::Found(_)) | (Self::NoPlan(_), _) => *self = next,
            (Self::Found(_) | Self::NoFaster, Self::NoFaster | Self::NoPlan(_)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEGREES: Degrees =
        Degrees { tp: 4, cp: 1, ep: 1, cuts_experts: false, micro_batch: 2, sequence_parallel: None };

    #[test]
    fn micro_batches_go_as_far_as_the_next_that_divides_the_batch() {
        let of = |micro_batch: u64, global_batch: u64| -> Vec<u64> {
            let all = Degrees { micro_batch, ..DEGREES }.neighbours(&Pins::default(), global_batch);
            let others = all.into_iter().map(|one| one.micro_batch).filter(|&size| size != micro_batch);
            others.collect()
        };
        assert_eq!(of(15, 45), [9, 45]);
        assert_eq!(of(45, 45), [15]);
        assert_eq!(of(8, 15_360), [4, 16]);
        assert_eq!(of(1, 7), [7]);
    }

    #[test]
    fn neighbours_differ_in_one_degree_that_is_open() {
        let of = |pins: &Pins| -> Vec<[u64; 4]> {
            let all = DEGREES.neighbours(pins, 64).into_iter();
            all.map(|Degrees { tp, cp, ep, micro_batch, .. }| [tp, cp, ep, micro_batch]).collect()
        };
        assert_eq!(
            of(&Pins::default()),
            [[2, 1, 1, 2], [8, 1, 1, 2], [4, 2, 1, 2], [4, 1, 1, 1], [4, 1, 1, 4]]
        );
        let pins = Pins { tp: Some(4), micro_batch: Some(2), ..Pins::default() };
        assert_eq!(of(&pins), [[4, 2, 1, 2]]);
    }

    /// 96 layers, an embedding and a head.
    fn time(pipeline: (u64, u64, u64)) -> f64 {
        promise(98, pipeline, (8, 4))
    }

    #[test]
    fn a_promise_counts_devices_bubble_and_the_longest_stage() {
        // Twelve layers of a stage in four virtual stages: a quarter of seven in 28.
        assert!((time((8, 28, 1024)) * 1024.0 - 1.0625).abs() < 1e-12);
        // As many stages, fewer devices or micro-batches.
        assert!(time((8, 28, 1016)) > time((8, 28, 1024)) && time((8, 7, 1024)) > time((8, 28, 1024)));
        // On 21 stages one has five of 96 layers, which is 105 for all, and no more than four virtual stages.
        let of_21 = (1.0 + FURTHER * (21.0_f64 / 8.0).log2()) * (1.0 + 20.0 / (128.0 * 4.0)) * (105.0 / 96.0);
        assert!((time((21, 128, 1008)) * 1008.0 - of_21).abs() < 1e-12);
        // The head may be a stage of its own.
        assert!(
            (time((98, 1 << 40, 98)) * 98.0 / (1.0 + FURTHER * (98.0_f64 / 8.0).log2()) - 98.0 / 96.0).abs()
                < 1e-6
        );
    }

    #[test]
    fn what_was_found_is_not_forgotten() {
        let mut outcome = Outcome::NoPlan("too large".into());
        for (next, then) in [
            (Outcome::NoPlan("larger".into()), Outcome::NoPlan("larger".into())),
            (Outcome::NoFaster, Outcome::NoFaster),
            (Outcome::NoPlan("too large".into()), Outcome::NoFaster),
            (Outcome::Found(Seconds(2.0)), Outcome::Found(Seconds(2.0))),
            (Outcome::NoFaster, Outcome::Found(Seconds(2.0))),
            (Outcome::Found(Seconds(1.0)), Outcome::Found(Seconds(1.0))),
        ] {
            outcome.learn(next);
            assert_eq!(outcome, then);
        }
    }
}
