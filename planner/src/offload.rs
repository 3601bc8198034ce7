//! When the memory of hosts is searched too, though nobody said so; and which layers keep there what backward needs.
//!
//! Twice the storages are about twice the search, how fast a host updates is known of few, and many jobs need their
//! hosts for other things. So hosts come in where nothing fits without them, or where a step is a tenth shorter with
//! them: more than such prices may be off by against each other. That is looked into where memory makes a step so much
//! longer than bounds are without it. Where optimizer states, cut over all devices, take a good part of their memory
//! and that was not, a plan says that hosts could have them. Hosts' drives take what their memory cannot: of a choice
//! with optimizer states on the host that is weighed too, layer by layer.
//!
//! What a layer keeps is all on its device or all on its host. In the choice problem a byte there costs no memory but
//! time on the link, of which nobody knows yet how much shows: a few parts of it are tried, and the choices weighed by
//! the figures of their programs, which do.

use cost_model::memory::StateBytes;
use cost_model::offload::{OnNode, fullest_node};
use ir::graph::{ParameterRef, TensorId};
use ir::lower::LayerChoice;
use ir::names::{Offload, OnHost, OnNvme};
use ir::plan::Plan;
use ir::program::{Home, StateHome};
use ir::units::{Bytes, Seconds};

use crate::candidate::{Candidate, Scope};
use crate::clock::Clock;
use crate::evaluate::DEAREST;
use crate::found::{Found, Further};
use crate::given::{HomeRule, StateRule};
use crate::price::held::Held;
use crate::price::hosts::of_layers;
use crate::price::setting::Entry;
use crate::priced_choices::OfForm;
use crate::request::{OffloadKind, Pins, Request, Untried};
use crate::shelf::{Bench, Shelf};

/// Part of the devices' memory from which optimizer states crowd it: 8 billion parameters on two devices of 80 GB take
/// 0.6 of it, and planned with hosts their step is 15 % shorter; 70 billion on 64 devices of 40 GiB 0.31, and 18 %; on
/// 64 of 80 GB 0.16.
const CROWDED: f64 = 0.3;

/// A plan with hosts takes no more than this part of the fastest without.
const WORTH_HOSTS: f64 = 0.9;

/// It is looked for where bounds without memory are below this part of bounds in the memory that there is. Of 38
/// questions four were, and a plan with hosts was found that is worth it in each (llama-2-70b on 128 RTX 4090: 0.77
/// promised, 0.81 found; llama-3-70b and qwen2.5-72b on 16 H100 0.80 and 0.79, 0.76 and 0.74; deepseek-v2 on 64 H800
/// 0.81 and 0.82).
const PROMISING: f64 = 0.84;

/// Where states crowd memory, they need only be below this part of the best: what they leave room for is much faster,
/// though bounds in so little memory see it (llama-3-8b on two H100 0.83 and 0.84, qwen2.5-7b 0.85 and 0.87,
/// llama-2-70b on 16 A100 0.84 and 0.83). What would need much more memory than there is counts in no bound, and hosts
/// have room for that too (llama-3-70b on 64 devices of 40 GiB 0.89 and 0.82).
const PROMISING_CROWDED: f64 = 0.9;

/// Where the host holds what is kept: parts of the time on its link that a choice may count on to show. Nothing of it
/// where computation covers all, all where it covers nothing; between, the link takes as long as what it hides behind.
/// Where hosts cannot hold what such choices keep, it counts so much that as little as can be is kept.
const PARTS_SHOWN: [f64; 5] = [0.0, 0.1, 0.2, 0.4, 1.0];

/// The best choice of a layer kind at a price of its own for what is kept, or at one for all, of those with states on
/// the device or the host, or else on the device or drives.
type Best<'a> = &'a dyn Fn((Option<f64>, bool)) -> Option<OfForm>;

/// The time below which a plan with hosts would be worth it, where it is open and could be.
pub(crate) fn worth_asking(found: &Found<'_>, layouts: &[Request]) -> Option<Seconds> {
    let best = found.step_time()?;
    let is_done = !found.tally.stopped;
    let bounds = [found.tally.open_bound, found.tally.inside_bound].into_iter().flatten();
    let in_memory = bounds.fold(best, Seconds::min);
    let is_crowded = crowding(&layouts[0]) > CROWDED && !layouts[0].cluster.is_mixed();
    let promises =
        |least: Seconds| least < in_memory * PROMISING || (is_crowded && least < best * PROMISING_CROWDED);
    // Where nothing would do with a few times the memory, nobody knows.
    let promises = found.tally.roomy_bound.is_none_or(promises);
    (is_open(&layouts[0].pins) && is_done && promises).then(|| best * WORTH_HOSTS)
}

/// A plan with hosts that is so much faster than what was found without.
pub(crate) fn instead(mut plan: Plan, without: &Found<'_>) -> Plan {
    if let Some(best) = without.ranking.first() {
        plan.warnings.push(format!(
            "hosts hold {}: without them the fastest plan takes {:.3} s (--pin offload=none)",
            held(&plan),
            best.step_time().0
        ));
    }
    plan
}

/// Whether the user leaves it open whether hosts hold anything.
pub(crate) fn is_open(pins: &Pins) -> bool {
    pins.offload.is_none() && !pins.forbid.offload.contains(&OffloadKind::Allowed)
}

/// Whether the user leaves it open what hosts hold, but not that they do.
pub(crate) fn is_due(pins: &Pins) -> bool {
    is_open(pins) && pins.forbid.offload.contains(&OffloadKind::None)
}

/// Questions that are asked beside one that allows hosts, for a search of everything can miss their plans: choices
/// beside hosts are weighed by what programs take. The devices alone, and hosts that hold all optimizer states and
/// nothing else, which takes a fifth of the search of everything; where hosts must be used, also what layers keep and
/// nothing else.
pub(crate) fn narrower(request: &Request) -> impl Iterator<Item = OffloadKind> {
    let pins = &request.pins;
    let is_allowed = pins.offload == Some(OffloadKind::Allowed);
    let must_hold = pins.forbid.offload.contains(&OffloadKind::None);
    let kinds: &[OffloadKind] = match (is_allowed, must_hold) {
        (false, _) => &[],
        (true, false) => &[OffloadKind::None, OffloadKind::Optimizer],
        (true, true) => &[OffloadKind::Optimizer, OffloadKind::Activations],
    };
    let forbidden = pins.forbid.offload.clone();
    kinds.iter().copied().filter(move |kind| !forbidden.contains(kind))
}

/// Part of the devices' memory that optimizer states take, cut over all of them.
fn crowding(request: &Request) -> f64 {
    let states = StateBytes::adamw(request.job.precision, request.job.engine.gradients);
    states.optimizer() * request.model.n_trained() as f64 / request.cluster.device_memory()
}

/// The question with the hosts' memory in it.
pub(crate) fn allowed(request: &Request) -> Request {
    of_kind(request, OffloadKind::Allowed)
}

/// The question with what hosts may hold.
pub(crate) fn of_kind(request: &Request, kind: OffloadKind) -> Request {
    let pins = Pins { offload: Some(kind), ..request.pins.clone() };
    Request { pins, ..request.clone() }
}

/// A plan of the devices alone; where states crowd them it says that there are hosts.
pub(crate) fn without(mut plan: Plan, request: &Request) -> Plan {
    let crowding = crowding(request);
    let was_asked =
        plan.search.as_ref().is_some_and(|report| report.proof.contains(Further::HostsInVain.words()));
    if crowding > CROWDED && !was_asked && !is_used(&plan) {
        plan.warnings.push(format!(
            "optimizer states take {:.0} % of the devices' memory: in the hosts' (--pin offload=allowed) they may leave room for \
             a faster plan",
            crowding * 100.0
        ));
    }
    plan
}

/// A plan for which no other was left than one with hosts, or no time to find one.
pub(crate) fn with(mut plan: Plan, untried: Option<Untried>) -> Plan {
    let held = held(&plan);
    plan.warnings.push(match untried {
        None => format!("no plan fits in the devices' memory alone: hosts hold {held}"),
        Some(_) => format!(
            "no plan in the devices' memory alone was found in time: hosts hold {held} (--pin offload=none looks there on, \
             --pin offload=allowed finds this plan again)"
        ),
    });
    plan
}

/// Whether hosts hold anything in a plan.
pub(crate) fn is_used(plan: &Plan) -> bool {
    !held(plan).is_empty()
}

/// What hosts hold in a plan.
fn held(plan: &Plan) -> String {
    let roles = &plan.roles;
    let held = [
        (roles.offload != Offload::None, "optimizer states, which they update"),
        (roles.optimizer_on_nvme == OnNvme::All, "of these all on NVMe drives"),
        (roles.optimizer_on_nvme == OnNvme::Some, "of these some on NVMe drives"),
        (roles.kept_on_host != OnHost::None, "what layers keep for backward"),
        (roles.parameters_on_host != OnHost::None, "parameters between uses"),
    ];
    let held: Vec<&str> = held.into_iter().filter(|(is_there, _)| *is_there).map(|(_, what)| what).collect();
    held.join("; ")
}

impl Scope<'_> {
    /// Seconds of a step per byte that a choice problem counts as kept, where it goes to the host and back every
    /// micro-batch.
    fn moving_price(&self, bench: &Bench<'_>) -> f64 {
        let clock = self.plain_clock(bench);
        2.0 * clock.micro_batches * bench.prices.host_share().moves(Bytes(1.0)).0 / clock.in_flight
    }

    /// Puts the choice of a kind on the shelf that weighs least at a price of memory, by the figures of its program; of
    /// those that hosts could not hold for a whole stage, the one of which they lack least.
    fn put_lightest(
        &self,
        (shelf, level): (&mut Shelf, usize),
        bench: &Bench<'_>,
        (kind, choices): (usize, Vec<OfForm>),
        price: f64,
    ) -> Option<()> {
        let (clock, in_flight) = (self.plain_clock(bench), self.least_in_flight(bench.candidate));
        let mut lightest: Option<(f64, f64, usize)> = None;
        for (form, choice) in choices {
            let Some(at) = self.on_shelf(shelf, bench, (kind, form), choice) else { continue };
            let entry = &shelf.entries[kind][at];
            let lacking = self.lacking(bench, (entry, in_flight), &clock);
            let own = (lacking, weight(entry, &clock, price), at);
            if lightest.is_none_or(|known| (own.0, own.1) < (known.0, known.1)) {
                lightest = Some(own);
            }
        }
        shelf.levels[kind].insert(level, lightest?.2);
        Some(())
    }

    /// Whether hosts may hold what no choice problem knows: the choices that fit are then some of many, also where
    /// memory is not crowded.
    pub(crate) fn hosts_may_hold_more(&self) -> bool {
        let given = self.given();
        [given.kept, given.parameters] != [HomeRule::Device; 2]
    }

    /// Whether no host may hold anything of a layer kind but optimizer states that its choice problem knows.
    pub(crate) fn is_on_device(&self, kind: usize) -> bool {
        let (given, layer) = (self.given(), &self.forms[kind][0].layer);
        [given.kept, given.parameters].map(|rule| rule.on(layer)) == [HomeRule::Device; 2]
            && given.homes != StateRule::Anywhere
    }

    /// Puts the lightest choice of a kind on the shelf: of the best at a price of memory, those for what is kept on the
    /// host at prices of their own, the same with parameters there, and with optimizer states on its drives.
    pub(crate) fn put_with_hosts(
        &self,
        (shelf, level): (&mut Shelf, usize),
        bench: &Bench<'_>,
        (kind, best): (usize, Best<'_>),
        price: f64,
    ) -> Option<()> {
        let (given, layer) = (self.given(), &self.forms[kind][0].layer);
        let [kept, parameters] = [given.kept, given.parameters].map(|rule| rule.on(layer));
        let mut choices: Vec<OfForm> = Vec::new();
        for on_drives in [false, true] {
            let at = |part: f64| best((Some(part * self.moving_price(bench)), on_drives));
            if kept != HomeRule::Host {
                choices.extend(best((None, on_drives)));
            }
            if kept != HomeRule::Device {
                choices.extend(self.kept_on_host((&mut *shelf, bench), kind, &at));
            }
        }
        let in_both = |(form, choice): OfForm| {
            let homes = parameters.homes().iter();
            homes.map(move |&home| (form, LayerChoice { parameters: home, ..choice.clone() }))
        };
        let mut choices: Vec<OfForm> = choices.into_iter().flat_map(in_both).collect();
        if given.homes == StateRule::Anywhere {
            let ties = &self.model().ties;
            let is_tied = |tensor: TensorId| {
                let own = ParameterRef { layer: kind, tensor };
                ties.iter().any(|tie| tie.owner == own || tie.copy == own)
            };
            let on_nvme =
                choices.iter().filter_map(|(form, choice)| Some((*form, on_nvme(choice, &is_tied)?)));
            choices.extend(on_nvme.collect::<Vec<_>>());
        }
        self.put_lightest((shelf, level), bench, (kind, choices), price)
    }

    /// The best choices of a kind whose results the host keeps until backward, by how much of the way there shows.
    fn kept_on_host(
        &self,
        (shelf, bench): (&mut Shelf, &Bench<'_>),
        kind: usize,
        at: &dyn Fn(f64) -> Option<OfForm>,
    ) -> Vec<OfForm> {
        let there = |(form, choice)| (form, LayerChoice { kept: Home::Host, ..choice });
        let mut on_host: Vec<OfForm> = PARTS_SHOWN.into_iter().filter_map(at).map(there).collect();
        let (clock, in_flight) = (self.plain_clock(bench), self.least_in_flight(bench.candidate));
        let is_held = |(form, choice): &OfForm| {
            let at = self.on_shelf(shelf, bench, (kind, *form), choice.clone());
            let entry = at.map(|at| &shelf.entries[kind][at]);
            entry.is_some_and(|entry| self.lacking(bench, (entry, in_flight), &clock) <= 0.0)
        };
        let overflows = !on_host.iter().any(is_held);
        on_host.extend(at(DEAREST).filter(|_| overflows).map(there));
        on_host
    }

    fn plain_clock(&self, bench: &Bench<'_>) -> Clock {
        let given = self.given();
        self.clock(bench.candidate, given.covers)
    }

    /// Micro-batches in flight on the stage that keeps most, in the schedule that keeps least.
    fn least_in_flight(&self, candidate: &Candidate) -> f64 {
        let flights = |schedule| self.in_flight(candidate, schedule);
        let most = |schedule| flights(schedule).iter().map(|flight| flight.saved()).fold(0.0, f64::max);
        self.schedules(candidate).into_iter().map(most).fold(f64::INFINITY, f64::min)
    }

    /// Bytes that the fullest host, or its drives, lack for stages of such layers with so many micro-batches in flight.
    fn lacking(&self, bench: &Bench<'_>, (entry, in_flight): (&Entry, f64), clock: &Clock) -> f64 {
        let held = Held { kept: in_flight, ..Held::default() };
        let all = of_layers(std::iter::once((entry, clock.layers)), &held);
        let meshes = bench.candidate.meshes();
        let stage = |stage: u64| (all, meshes.of(stage).n_devices());
        let stages: Vec<(OnNode, u64)> = (0..bench.candidate.n_stages).map(stage).collect();
        let fullest = fullest_node((&self.request.cluster, self.constants), &stages);
        fullest.map_or(0.0, |node| (node.needed - node.capacity).0.max(0.0))
    }
}

/// Seconds of a step of a layer and its bytes on the device, at a price.
fn weight(entry: &Entry, clock: &Clock, price: f64) -> f64 {
    let (memory, update) = (&entry.memory, &entry.price.update);
    let every = (entry.forward_seconds() + entry.backward_seconds()) * clock.micro_batches;
    let once = update.gradient_reduce + update.optimizer + update.host + update.parameter_gather;
    let gathered = memory.gathered * (1.0 / clock.layers);
    let bytes = memory.states() + gathered + memory.saved_total() * clock.in_flight;
    (every + once).0 + price * bytes.0
}

/// A choice with the optimizer states that the host's memory holds on its drives, but for those of tied parameters,
/// which are decided for all their layers at once; nothing where it holds none.
fn on_nvme(choice: &LayerChoice, is_tied: &dyn Fn(TensorId) -> bool) -> Option<LayerChoice> {
    let mut there = choice.clone();
    let on_host = there
        .storage
        .iter_mut()
        .filter(|(tensor, storage)| storage.home == StateHome::Host && !is_tied(**tensor));
    let moved = on_host.map(|(_, storage)| *storage = storage.on_nvme()).count();
    (moved > 0).then_some(there)
}
