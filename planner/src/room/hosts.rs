//! What a layer costs at least whose results or parameters its host may hold.
//!
//! ```text
//! forward  = max(own, kept / link, parameters / link)  >=  (1 - w) own + w (u kept + (1 - u) parameters) / link     for all w, u from 0 to 1
//! device   : of layers that keep on the device  S  per micro-batch, of those that keep on the host  K  at most,
//!            flight S + max(scores, 2 K - S)            >=  (flight - b) S + b 2 K + (1 - b) scores                  for all b from 0 to 1
//! host     : device + r host  <=  C + r H                                                                           for all r from 0 on
//! ```
//! (`cost_model::offload`, `price::stage_memory`). A layer has one of three prices, and a bound is the least of them:
//! all of it on the device; what it keeps on the host; or its parameters there, and what it keeps wherever that costs
//! less. `2 K` is shared by all layers of a stage, as what a stage has once. What backward waits for the link is left
//! out. So are hosts' bytes where stages share a node, or where drives may have what hosts have not.
//!
//! By any `w`, `u`, `b` and `r` it is a bound. They are set once for a candidate, where an average stage costs most:
//! with others from stage to stage, what a layer costs would be no concave function of its micro-batches in flight any
//! more.

use std::cell::OnceCell;

use cost_model::memory::StateBytes;
use cost_model::offload::{HostUpdate, NodeStore, host_bytes};
use ir::cluster::DeviceGroup;

use super::dual::{By, Stage};
use super::tables::{Hand, Tables};
use crate::candidate::Scope;
use crate::chooser::{Chooser, Question};
use crate::clock::Clock;
use crate::given::{HomeRule, StateRule};
use crate::layer_problem::{LayerProblem, OnHost, Shift};
use crate::shelf::Asked;

/// Parts `w` of forward that are tried.
const PARTS: [f64; 5] = [0.0, 0.1, 0.2, 0.4, 0.7];

/// Which of them comes first.
const FIRST_PART: f64 = 0.2;

/// What of them is of what is kept, and what of parameters, where both may be there: `u` and the rest.
const SHARES: [[f64; 2]; 3] = [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]];

/// Values of `b`.
const BESIDES: [f64; 3] = [0.0, 0.5, 1.0];

/// Values of `r`.
const WORTHS: [f64; 5] = [0.0, 0.1, 0.2, 0.35, 0.5];

/// How often each of them is set, given the others.
const ROUNDS: usize = 2;

/// However much hosts' bytes are worth, those of a device are so much less than what optimizer states on the host take.
const LEAST_LEFT: f64 = 0.1;

/// So often a device has what one layer keeps on its host: that of the layer that runs, and its neighbour's on the way.
const BESIDE: f64 = 2.0;

/// How a bound counts hosts.
#[derive(Clone, Debug)]
pub(super) struct Hosts {
    /// By which part of the link, for everything that a layer may have there.
    parts: Vec<Part>,
    /// Seconds of a step for a byte that goes there in every forward.
    moving: f64,
    /// Bytes of a host for each of its devices; nothing where they are not counted.
    room: f64,
    /// `b`.
    beside: f64,
    /// `r`: so much of a byte of a device is a byte of a host worth.
    worth: f64,
}

/// Part of the time on the link by which a layer is priced that has something on its host.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Part {
    what: What,
    part: f64,
    shares: [f64; 2],
}

/// What a layer may have on its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// What it keeps for backward.
    Kept,
    /// Its parameters between uses, and perhaps what it keeps.
    Parameters,
}

/// A form whose forward counts for the rest of a part.
pub(super) struct Slowed<'s> {
    part: Part,
    /// Nothing where all of it counts: the form as it is.
    problem: Option<LayerProblem<'s>>,
}

/// A form in the hands of the solver whose layer has something on its host.
pub(super) struct Away<'t> {
    part: Part,
    by: Option<(Chooser<'t>, Option<Shift>)>,
}

/// A form in the hands of the solver, and where its layer has what.
#[derive(Clone, Copy)]
pub(super) struct Way<'h, 't> {
    pub(super) chooser: &'h Chooser<'t>,
    shift: Option<&'h Shift>,
    away: Option<Part>,
}

/// Bytes of a layer's choices on a stage.
pub(super) struct Held {
    /// All, those on the host for what they are worth.
    pub(super) all: f64,
    /// Of states on the device.
    pub(super) states: f64,
    /// What the device has of every micro-batch in flight.
    pub(super) saved: f64,
}

/// What a layer keeps, on its device or its host.
struct Kept {
    /// Micro-batches of the tables of which the device holds it, or the host, for what its bytes are worth.
    micro_batches: f64,
    /// Seconds of a byte on its way.
    moved: f64,
    /// Whether it is on the device.
    stays: bool,
}

/// Of numbers in order one where a concave function is most, from one of them on, and what that gives.
fn most<T>(numbers: &[f64], first: f64, of: impl Fn(f64) -> (f64, T)) -> (f64, T) {
    let first = numbers.iter().position(|&one| one == first).unwrap_or(0);
    let (above, below) = (&numbers[first + 1..], &numbers[..first]);
    let own = of(numbers[first]);
    let climbed = |from: (f64, T), numbers: &mut dyn Iterator<Item = &f64>| {
        let mut best = from;
        for found in numbers.map(|&number| of(number)) {
            if found.0 <= best.0 {
                break;
            }
            best = found;
        }
        best
    };
    let least = own.0;
    let up = climbed(own, &mut above.iter());
    if up.0 > least { up } else { climbed(up, &mut below.iter().rev()) }
}

impl Hosts {
    /// As if there were none.
    pub(super) const NONE: Self = Self { parts: Vec::new(), moving: 0.0, room: 0.0, beside: 0.0, worth: 0.0 };

    /// How much counts of what a device has beside others of a layer that keeps its own on the host: of a micro-batch
    /// that runs slice by slice, it has what a slice keeps.
    fn counts_beside(&self, tables: &Tables<'_>) -> f64 {
        let may_be_away = tables.given.kept != HomeRule::Device && !tables.given.cuts;
        if may_be_away { self.beside } else { 0.0 }
    }

    /// How much counts of the loss's scores on a stage, in those of the tables.
    fn scores(&self, tables: &Tables<'_>, stage: &Stage) -> f64 {
        stage.part * (1.0 - self.counts_beside(tables))
    }

    /// Bytes of a device's memory that a host's share for it is worth.
    pub(super) fn capacity(&self) -> f64 {
        self.worth * self.room
    }
}

impl<'t> Hand<'t> {
    /// Where a layer of this form may have what. Where memory is free it has all on its device, or is no faster.
    pub(super) fn ways<'h>(&'h self, price: f64) -> impl Iterator<Item = Way<'h, 't>> {
        let stays = self.stays || price == 0.0;
        let own = Way { chooser: &self.chooser, shift: self.shift.as_ref(), away: None };
        let away = self.away.iter().filter(move |_| price > 0.0).map(move |away| match &away.by {
            Some((chooser, shift)) => Way { chooser, shift: shift.as_ref(), away: Some(away.part) },
            None => Way { away: Some(away.part), ..own },
        });
        stays.then_some(own).into_iter().chain(away)
    }

    /// Prices what operators take by themselves anew, as another clock counts.
    pub(super) fn shift(&mut self, clock: Clock, shift: impl Fn(&LayerProblem<'_>, Clock) -> Shift) {
        self.shift = Some(shift(self.chooser.problem(), clock));
        for Away { part, by } in &mut self.away {
            if let Some((chooser, own)) = by {
                *own = Some(shift(chooser.problem(), counts(clock, part.part)));
            }
        }
    }
}

impl Way<'_, '_> {
    /// What is asked at a price of a byte on a stage.
    pub(super) fn question<'q>(
        &'q self,
        (tables, hosts): (&Tables<'_>, &Hosts),
        (stage, price): (&Stage, f64),
    ) -> Question<'q> {
        let kept = self.kept((tables, hosts), (stage, price));
        let there = price * hosts.worth;
        let (parameters, freed) = match self.away {
            Some(Part { what: What::Parameters, part, shares: [_, of_parameters] }) => {
                (there + part * of_parameters * hosts.moving, price)
            }
            Some(Part { what: What::Kept, .. }) | None => (0.0, 0.0),
        };
        let on_host = OnHost { states: there, parameters, freed };
        let asked = Question::apart(price, kept.at(price) / tables.in_flight);
        Question { part: hosts.scores(tables, stage), shift: self.shift, on_host, ..asked }
    }

    /// Bytes of choices on a stage, at the price at which they were asked.
    pub(super) fn held(
        &self,
        (tables, hosts): (&Tables<'_>, &Hosts),
        (stage, price): (&Stage, f64),
        choices: &[usize],
    ) -> Option<Held> {
        let problem = self.chooser.problem();
        let (nodes, edges) = problem.problem.parts(choices)?;
        let (one, own) = (edges.memory / tables.in_flight, problem.on_host(choices));
        let (freed, parameters) = match self.away {
            Some(Part { what: What::Parameters, .. }) => (own.freed, own.parameters),
            Some(Part { what: What::Kept, .. }) | None => (0.0, 0.0),
        };
        let states = nodes.memory - problem.beside(choices) * (1.0 - hosts.scores(tables, stage)) - freed;
        let there = (own.states + parameters) * hosts.worth;
        let kept = self.kept((tables, hosts), (stage, price));
        let saved = if kept.stays { one } else { 0.0 };
        Some(Held { all: states + there + one * kept.micro_batches, states, saved })
    }

    /// What is kept, where that costs least at a price of a byte.
    fn kept(&self, (tables, hosts): (&Tables<'_>, &Hosts), (stage, price): (&Stage, f64)) -> Kept {
        if tables.given.kept == HomeRule::Device {
            return Kept { micro_batches: stage.flight, moved: 0.0, stays: true };
        }
        let slack = tables.bench.setting.machine.constants.fragmentation_factor;
        let beside = (stage.part * slack * hosts.counts_beside(tables)).min(stage.flight);
        let stays = Kept { micro_batches: stage.flight - beside, moved: 0.0, stays: true };
        let Some(Part { what, part, shares: [of_kept, _] }) = self.away else { return stays };
        let shared = BESIDE / self.chooser.problem().clock().layers.ceil();
        let away = Kept {
            micro_batches: beside * shared + stage.flight / slack * hosts.worth,
            moved: part * of_kept * hosts.moving,
            stays: false,
        };
        match what {
            What::Parameters if stays.at(price) < away.at(price) => stays,
            What::Parameters | What::Kept => away,
        }
    }
}

impl Kept {
    /// What it costs at a price of a byte.
    fn at(&self, price: f64) -> f64 {
        self.micro_batches * price + self.moved
    }
}

/// What is asked to set how hosts are counted: an average stage of layers of one form.
struct Asking<'q, 's> {
    scope: &'q Scope<'q>,
    tables: &'q Tables<'s>,
    form: &'q LayerProblem<'s>,
    /// The form where its forward counts for the rest of each of [`PARTS`], as far as that was asked.
    problems: &'q [OnceCell<LayerProblem<'s>>],
    /// The same in the hands of the solver.
    choosers: Vec<OnceCell<Chooser<'q>>>,
    stage: Stage,
    layers: f64,
    /// Seconds for a byte of a device, where those of hosts are worth nothing.
    price: f64,
    /// Bytes of a host for the optimizer states that a byte of a device would hold.
    there: f64,
}

impl<'q> Asking<'q, '_> {
    /// Seconds for a byte of a device beside hosts whose bytes are worth something.
    fn price(&self, hosts: &Hosts) -> f64 {
        self.price / (1.0 - self.there * hosts.worth).max(LEAST_LEFT)
    }

    /// What a layer costs that has something on its host, or nothing.
    fn layer(&self, hosts: &Hosts, away: Option<Part>) -> f64 {
        let part = away.map_or(0.0, |away| away.part);
        let at = PARTS.iter().position(|&one| one == part).unwrap_or(0);
        let slowed = || self.problems[at].get_or_init(|| slowed(self.form, part));
        let chooser = self.choosers[at].get_or_init(|| self.scope.chooser(slowed()));
        let way = Way { chooser, shift: None, away };
        let question = way.question((self.tables, hosts), (&self.stage, self.price(hosts)));
        chooser.bound_apart(question).map_or(f64::INFINITY, |found| found.bound)
    }

    /// What the stage takes, beyond what its memory is worth.
    fn stage(&self, hosts: &Hosts) -> f64 {
        let away = hosts.parts.iter().map(|&part| self.layer(hosts, Some(part)));
        let layer = away.fold(self.layer(hosts, None), f64::min);
        let capacity = self.tables.bench.setting.capacity + hosts.capacity();
        layer * self.layers - self.price(hosts) * capacity
    }
}

impl Scope<'_> {
    /// How hosts are counted beside the devices of a candidate, where a price of a byte is known.
    pub(super) fn hosts(&self, tables: &Tables<'_>, price: f64) -> Hosts {
        let given = &tables.given;
        let open = [(What::Kept, given.kept), (What::Parameters, given.parameters)];
        let open = open.into_iter().filter(|(_, rule)| *rule != HomeRule::Device);
        let parts: Vec<Part> =
            open.map(|(what, _)| Part { what, part: FIRST_PART, shares: SHARES[0] }).collect();
        let form = tables.kinds[self.most_frequent()].first();
        let Some((_, form)) = form.filter(|_| !parts.is_empty()) else { return Hosts::NONE };
        let share = tables.bench.prices.host_share();
        let moving = self.clock(tables.bench.candidate, given.covers).forward / share.link.0;
        let room = self.host_room(tables);
        let hosts = Hosts { parts, moving, room, beside: BESIDES[BESIDES.len() - 1], worth: 0.0 };
        let problems: Vec<OnceCell<LayerProblem<'_>>> = PARTS.iter().map(|_| OnceCell::new()).collect();
        let asking = self.asking((tables, form, &problems), price);
        (0..ROUNDS).fold(hosts, |hosts, _| set_anew(&asking, hosts))
    }

    fn asking<'q, 's>(
        &'q self,
        (tables, form, problems): (&'q Tables<'s>, &'q LayerProblem<'s>, &'q [OnceCell<LayerProblem<'s>>]),
        price: f64,
    ) -> Asking<'q, 's> {
        let machine = &tables.bench.setting.machine;
        let bytes = StateBytes::adamw(machine.precision, machine.gradients);
        // What states take on the host is what a byte of a device is worth that could hold them.
        let price = match tables.given.homes {
            StateRule::Device => price,
            StateRule::Free | StateRule::Anywhere | StateRule::OrNvme | StateRule::Host | StateRule::Nvme => {
                HostUpdate::of(1.0, bytes, tables.bench.prices.host_share()).total().0 / bytes.optimizer().0
            }
        };
        let flight = f64::midpoint(tables.in_flight, 1.0) * machine.constants.fragmentation_factor;
        Asking {
            scope: self,
            tables,
            form,
            problems,
            choosers: PARTS.iter().map(|_| OnceCell::new()).collect(),
            stage: Stage { flight, weight: 1.0, part: 1.0, by: By::Most },
            layers: self.model().n_layers() as f64 / tables.bench.candidate.n_stages as f64,
            price,
            there: host_bytes(bytes).0 / bytes.optimizer().0,
        }
    }

    /// Bytes of a host for each of its devices, where all of a node are of one stage; nothing where drives may have
    /// what it has not.
    fn host_room(&self, tables: &Tables<'_>) -> f64 {
        let candidate = tables.bench.candidate;
        let n_devices = candidate.meshes().of(0).n_devices();
        let groups = &self.request.cluster.groups;
        let is_alone = groups.iter().all(|group| n_devices.is_multiple_of(group.devices_per_node.max(1)));
        if !is_alone || tables.given.homes == StateRule::Anywhere || !self.knows_room(candidate) {
            return 0.0;
        }
        let share = |group: &DeviceGroup| {
            NodeStore::Host.capacity(group, self.constants).0 / group.devices_per_node.max(1) as f64
        };
        groups.iter().map(share).fold(0.0, f64::max)
    }

    /// Per kind, its forms as hosts may hold what is theirs: nothing of the first and the last layer.
    pub(super) fn all_slowed<'s>(
        &self,
        kinds: &[Asked<'s>],
        Hosts { parts, .. }: &Hosts,
    ) -> Vec<Vec<Vec<Slowed<'s>>>> {
        let of_kind = |(kind, forms): (usize, &Asked<'s>)| {
            let parts: &[Part] = if self.forms[kind][0].layer.is_end() { &[] } else { parts };
            let of_form =
                |problem: &LayerProblem<'s>| parts.iter().map(|part| part.slowed(problem)).collect();
            forms.iter().map(|(_, problem)| of_form(problem)).collect()
        };
        kinds.iter().enumerate().map(of_kind).collect()
    }

    /// Such forms in the hands of the solver.
    pub(super) fn away<'t>(&'t self, slowed: &'t [Slowed<'t>]) -> Vec<Away<'t>> {
        let in_hand = |problem: &'t LayerProblem<'t>| (self.chooser(problem), None);
        slowed.iter().map(|one| Away { part: one.part, by: one.problem.as_ref().map(in_hand) }).collect()
    }
}

/// Each of the numbers, given the others, where the stage costs most.
fn set_anew(asking: &Asking<'_, '_>, mut hosts: Hosts) -> Hosts {
    for nth in 0..hosts.parts.len() {
        let known = hosts.parts[nth];
        let with = |shares: [f64; 2]| {
            let of = |part: f64| {
                let part = Part { part, shares, ..known };
                (asking.layer(&hosts, Some(part)), part)
            };
            most(&PARTS, known.part, of)
        };
        let shares = match known.what {
            What::Kept => &SHARES[..1],
            What::Parameters => &SHARES[..],
        };
        let best = shares.iter().map(|&shares| with(shares)).max_by(|a, b| a.0.total_cmp(&b.0));
        hosts.parts[nth] = best.map_or(known, |(_, part)| part);
    }
    let with = |hosts: Hosts| (asking.stage(&hosts), hosts);
    let (_, hosts) = most(&BESIDES, hosts.beside, |beside| with(Hosts { beside, ..hosts.clone() }));
    if hosts.room > 0.0 {
        most(&WORTHS, hosts.worth, |worth| with(Hosts { worth, ..hosts.clone() })).1
    } else {
        hosts
    }
}

impl Part {
    fn slowed<'s>(self, problem: &LayerProblem<'s>) -> Slowed<'s> {
        Slowed { part: self, problem: (self.part > 0.0).then(|| slowed(problem, self.part)) }
    }
}

/// A form whose forward counts for the rest of a part.
fn slowed<'s>(problem: &LayerProblem<'s>, part: f64) -> LayerProblem<'s> {
    let mut slowed = problem.clone();
    slowed.set_clock(counts(problem.clock(), part));
    slowed
}

/// A clock by which forward counts for the rest of a part.
fn counts(clock: Clock, part: f64) -> Clock {
    Clock { forward: clock.forward * (1.0 - part), ..clock }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_is_found_on_either_side_of_the_first() {
        let at = |peak: f64, first: f64| most(&PARTS, first, |part| (-(part - peak).abs(), part)).1;
        for first in PARTS {
            for peak in PARTS {
                assert_eq!(at(peak, first), peak, "{first}");
            }
        }
        assert_eq!(at(1.0, FIRST_PART), 0.7);
    }
}
