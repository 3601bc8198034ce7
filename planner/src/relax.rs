//! Where nothing fits: changes of the request that would make a plan fit, each with the step time it then has.
//!
//! Every family of changes is tried from the least to the largest, and the first that fits is told. Each trial is a
//! search of its own, ended early: its price is that of some plan near the best after the change.

use cost_model::Constants;
use cost_model::tensor_bytes::is_logits;
use ir::cluster::Precision;
use ir::engine::{GradientFormat, LossKernel};
use ir::graph::{Layer, TensorId};
use ir::units::{GIB, Seconds};

use crate::found::{Again, Settles, Start};
use crate::offload;
use crate::optimize::search_from;
use crate::refusals::not_as_pinned;
use crate::request::{Forbid, NoPlan, OffloadKind, OnProgress, Pins, Progress, Relaxation, Request, Stop};
use crate::shapes::names_degrees;

/// Doublings of devices, and halvings of sequence and batch: from one node to a thousand, from a million tokens to one
/// thousand.
const DOUBLINGS: u32 = 10;

/// Memory per device, as multiples of what there is: up to the step from 16 to 1024 GiB.
const MEMORY: [f64; 18] =
    [1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0, 40.0, 48.0, 64.0];

/// When a trial has found what it is for: of 16 trials step times were up to 4.3 % longer than those of whole searches,
/// which took two to six times as long.
const BRIEFLY: Settles = Settles { batches: 16, plans: 4, in_vain: 24 };

/// The part of a device that scores of one sequence in single precision take where a fused loss may be what makes a
/// plan fit.
const MUCH_OF_A_DEVICE: f64 = 0.25;

/// A change in words, and the request after it.
type Change = (String, Request);

/// What was tried to make a plan fit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tried {
    /// Changes that do; the fastest first.
    pub relaxations: Vec<Relaxation>,
    /// Somebody wanted an answer before all of them were tried.
    pub ended_early: bool,
}

/// Whether plans with states on hosts were looked for where it is open what hosts hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// They were, and none fits.
    Asked,
    /// They were not.
    NotAsked,
}

/// Tries changes that would make a plan fit, until somebody says that it is enough.
pub fn relaxations(
    (request, hosts): (&Request, Hosts),
    constants: &Constants,
    (stop, on_progress): (Stop<'_>, OnProgress<'_>),
) -> Tried {
    let of = |order: Order, changes: Vec<Change>| Family { changes, order };
    let mut families = vec![
        of(Order::Rising, more_devices(request)),
        of(Order::Nested, more_memory(request)),
        of(Order::Nested, shorter_sequences(request)),
        of(Order::Nested, smaller_batches(request)),
        of(Order::Rising, lower_precision(request)),
        of(Order::Rising, fused_loss(request)),
        of(Order::Rising, half_gradients(request)),
        of(Order::Rising, on_hosts(request, hosts)),
        of(Order::Rising, nothing_forbidden(request)),
        of(Order::Covers, no_pins(request)),
    ];
    families.extend(
        (0..PINS.len()).map(|pin| of(Order::Rising, one_pin_less(request, pin).into_iter().collect())),
    );
    families.retain(|family| !family.changes.is_empty());
    let n_families = families.len();
    let stop = Stop { work: None, ..stop };
    let mut ended_early = false;
    let mut list: Vec<Relaxation> = Vec::new();
    for (at, family) in families.into_iter().enumerate() {
        let on_progress =
            |progress: Progress| on_progress(Progress { change: Some((at + 1, n_families)), ..progress });
        let mut trial = |relaxed: &Request, is_last: bool| {
            ended_early |= (stop.asked)();
            if ended_early {
                return Trial::Illegal;
            }
            // There may be no larger change to turn to.
            let in_vain = if is_last { u64::MAX } else { BRIEFLY.in_vain };
            let settles = Settles { in_vain, ..BRIEFLY };
            let tried = try_out(relaxed, settles, constants, (stop, &on_progress));
            ended_early |= (stop.asked)();
            tried
        };
        let covers = family.order == Order::Covers;
        match family.first_that_fits(&mut trial) {
            Ok((change, relaxed, step_time)) => {
                list.push(Relaxation { change, step_time, tokens: relaxed.job.tokens() });
            }
            Err(Trial::Overflows) if covers => break,
            Err(_) => {}
        }
    }
    list.sort_by(|a, b| a.step_time.0.total_cmp(&b.step_time.0));
    Tried { relaxations: list, ended_early }
}

/// Searches a changed request for a while.
fn try_out(
    relaxed: &Request,
    settles: Settles,
    constants: &Constants,
    watch: (Stop<'_>, OnProgress<'_>),
) -> Trial {
    // Degrees that are pinned may be met in a second look alone.
    let again = if names_degrees(&relaxed.pins) { Again::InMoreWays } else { Again::Never };
    let start = Start { waits: None, again, settles: Some(settles), ..Start::default() };
    let found = match search_from(relaxed, constants, start, watch).0 {
        Ok(found) => found,
        Err(NoPlan::NothingFits { .. }) => return Trial::Overflows,
        Err(_) => return Trial::Illegal,
    };
    let fastest = found.ranking.first();
    let named = fastest.filter(|one| not_as_pinned(relaxed, &found.scope.roles(one)).is_none());
    named.map_or(Trial::Illegal, |fastest| Trial::Fits(fastest.step_time()))
}

/// Changes of one kind, the least first.
struct Family<R> {
    changes: Vec<(String, R)>,
    order: Order,
}

/// What of a family of changes says what of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// A larger one may fit where a smaller one does not.
    Rising,
    /// The same, and where the largest does not fit none does.
    Nested,
    /// All families behind are less than this one.
    Covers,
}

/// What came of a trial.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trial {
    /// A plan that takes so long.
    Fits(Seconds),
    /// All that were tried need more memory than there is.
    Overflows,
    /// No plan, whatever memory there is.
    Illegal,
}

impl<R> Family<R> {
    /// The least change that makes a plan fit, the request after it and what its step takes, by trials that are told
    /// which change is the last.
    ///
    /// # Errors
    /// What came of the largest, where none does.
    fn first_that_fits(
        self,
        trial: &mut dyn FnMut(&R, bool) -> Trial,
    ) -> Result<(String, R, Seconds), Trial> {
        let n_changes = self.changes.len();
        let mut largest = None;
        if let (Order::Nested, [_, .., (_, last)]) = (self.order, self.changes.as_slice()) {
            largest = Some(trial(last, true));
        }
        let mut none = largest.unwrap_or(Trial::Illegal);
        if none == Trial::Overflows {
            return Err(none);
        }
        for ((change, relaxed), nth) in self.changes.into_iter().zip(1..) {
            let is_last = nth == n_changes;
            none = largest.filter(|_| is_last).unwrap_or_else(|| trial(&relaxed, is_last));
            if let Trial::Fits(step_time) = none {
                return Ok((change, relaxed, step_time));
            }
        }
        Err(none)
    }
}

fn more_devices(request: &Request) -> Vec<Change> {
    let times = |doublings: u32| {
        let factor = 1_u64 << doublings;
        let mut relaxed = request.clone();
        for group in &mut relaxed.cluster.groups {
            group.count *= factor;
        }
        if let Some(outer) = relaxed.cluster.tiers.last_mut() {
            outer.devices *= factor;
        }
        (format!("{factor} times the nodes ({} devices)", relaxed.cluster.n_devices()), relaxed)
    };
    (1..=DOUBLINGS).map(times).collect()
}

fn more_memory(request: &Request) -> Vec<Change> {
    let times = |factor: f64| {
        let mut relaxed = request.clone();
        let mut least = f64::INFINITY;
        for group in &mut relaxed.cluster.groups {
            group.device.memory_bytes = group.device.memory_bytes * factor;
            least = least.min(group.device.memory_bytes.0 / GIB);
        }
        (format!("devices with {factor} times the memory ({least:.0} GiB)"), relaxed)
    };
    MEMORY.into_iter().map(times).collect()
}

fn shorter_sequences(request: &Request) -> Vec<Change> {
    let halved = |halvings: u32| {
        let mut relaxed = request.clone();
        relaxed.job.sequence >>= halvings;
        (format!("sequences of {} tokens", relaxed.job.sequence), relaxed)
    };
    (1..=DOUBLINGS).map(halved).filter(|(_, relaxed)| relaxed.job.sequence > 0).collect()
}

fn smaller_batches(request: &Request) -> Vec<Change> {
    let halved = |halvings: u32| {
        let mut relaxed = request.clone();
        relaxed.job.global_batch >>= halvings;
        (format!("a global batch of {} sequences", relaxed.job.global_batch), relaxed)
    };
    (1..=DOUBLINGS).map(halved).filter(|(_, relaxed)| relaxed.job.global_batch > 0).collect()
}

fn lower_precision(request: &Request) -> Vec<Change> {
    if request.job.precision != Precision::Fp32 {
        return Vec::new();
    }
    let mut relaxed = request.clone();
    relaxed.job.precision = Precision::Bf16;
    vec![("parameters and activations in bf16".into(), relaxed)]
}

/// The request with gradients in the format of the computation.
fn half_gradients(request: &Request) -> Vec<Change> {
    let mut relaxed = request.clone();
    relaxed.job.engine.gradients = GradientFormat::Half;
    if relaxed == *request || request.job.precision == Precision::Fp32 {
        return Vec::new();
    }
    or_with_hosts(request, ("gradients in half precision", "(--engine gradients=half)"), relaxed)
}

/// A change, and the same with what pays in the memory of hosts, where that is open.
fn or_with_hosts(request: &Request, (change, option): (&str, &str), relaxed: Request) -> Vec<Change> {
    let mut with_hosts = relaxed.clone();
    with_hosts.pins.offload = Some(OffloadKind::Allowed);
    let with_hosts = (format!("{change}, and what pays on the hosts {option}"), with_hosts);
    let is_open = offload::is_open(&request.pins);
    std::iter::once((format!("{change} {option}"), relaxed)).chain(is_open.then_some(with_hosts)).collect()
}

/// The request with the loss in one kernel, where the scores of one sequence take much of a device.
fn fused_loss(request: &Request) -> Vec<Change> {
    let mut relaxed = request.clone();
    relaxed.job.engine.loss = LossKernel::Fused;
    let scores = |layer: &Layer| {
        let sizes = layer.sizes(1, request.job.sequence);
        let elements =
            |at: usize| layer.shape(TensorId(at), &sizes).iter().map(|&n| n as f64).product::<f64>();
        (0..layer.tensors.len())
            .filter(|&at| is_logits(layer, TensorId(at)))
            .map(elements)
            .fold(0.0, f64::max)
    };
    let bytes = 4.0 * request.model.layers.iter().map(scores).fold(0.0, f64::max);
    let memory = request.cluster.groups.iter().map(|group| group.device.memory_bytes.0);
    if relaxed == *request || bytes < MUCH_OF_A_DEVICE * memory.fold(f64::INFINITY, f64::min) {
        return Vec::new();
    }
    or_with_hosts(request, ("the loss in one kernel, in place", "(--engine loss=fused)"), relaxed)
}

/// The request with whatever pays in the memory of hosts, where it was not searched so.
fn on_hosts(request: &Request, hosts: Hosts) -> Vec<Change> {
    let mut relaxed = request.clone();
    relaxed.pins.offload = Some(OffloadKind::Allowed);
    relaxed.pins.forbid.offload.clear();
    let is_forbidden = !request.pins.forbid.offload.is_empty();
    let was_asked = hosts == Hosts::Asked && offload::is_open(&request.pins) && !is_forbidden;
    if was_asked || relaxed == *request {
        return Vec::new();
    }
    let without = if is_forbidden { ", nothing of it forbidden" } else { "" };
    vec![(format!("what pays on the hosts{without} (offload=allowed)"), relaxed)]
}

/// A pin by its name, and how it is taken back.
type Pin = (&'static str, fn(&mut Pins));

/// All pins.
const PINS: [Pin; 21] = [
    ("tp", |pins| pins.tp = None),
    ("pp", |pins| pins.pp = None),
    ("dp", |pins| pins.dp = None),
    ("cp", |pins| pins.cp = None),
    ("ep", |pins| pins.ep = None),
    ("etp", |pins| pins.etp = None),
    ("vpp", |pins| pins.vpp = None),
    ("micro-batch", |pins| pins.micro_batch = None),
    ("schedule", |pins| (pins.schedule, pins.slices) = (None, None)),
    ("slices", |pins| pins.slices = None),
    ("recompute", |pins| pins.recompute = None),
    ("zero", |pins| pins.zero = None),
    ("gradients", |pins| pins.gradients = None),
    ("split-backward", |pins| pins.split_backward = None),
    ("zero-group", |pins| pins.zero_group = None),
    ("offload", |pins| pins.offload = None),
    ("sequence-parallel", |pins| pins.sequence_parallel = None),
    ("cp-kind", |pins| pins.cp_kind = None),
    ("token-order", |pins| pins.token_order = None),
    ("axes", |pins| pins.axes = None),
    ("layers-per-stage", |pins| pins.layers_per_stage = None),
];

/// The request without one of its pins, where it has that one.
fn one_pin_less(request: &Request, pin: usize) -> Option<Change> {
    let (name, take_back) = PINS.get(pin)?;
    let mut relaxed = request.clone();
    take_back(&mut relaxed.pins);
    (relaxed != *request).then(|| (format!("no pinned {name}"), relaxed))
}

/// The request without any of its prohibitions, where it has some.
fn nothing_forbidden(request: &Request) -> Vec<Change> {
    let pins = Pins { forbid: Forbid::default(), ..request.pins.clone() };
    let relaxed = Request { pins, ..request.clone() };
    if relaxed == *request { Vec::new() } else { vec![("nothing forbidden".into(), relaxed)] }
}

/// The request without any of its pins, where it has several.
fn no_pins(request: &Request) -> Vec<Change> {
    let pins = Pins { forbid: request.pins.forbid.clone(), ..Pins::default() };
    let relaxed = Request { pins, ..request.clone() };
    let has_one =
        (0..PINS.len()).filter_map(|pin| one_pin_less(request, pin)).any(|(_, less)| less == relaxed);
    if has_one || relaxed == *request { Vec::new() } else { vec![("no pinned choices".into(), relaxed)] }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which of a family's changes fits, and which were tried, where so many of the largest do.
    fn tried(order: Order, n_changes: u64, n_fit: u64) -> (Option<u64>, Vec<u64>) {
        let changes = (1..=n_changes).map(|change| (change.to_string(), change)).collect();
        let mut asked = Vec::new();
        let mut trial = |&change: &u64, is_last: bool| {
            assert_eq!(is_last, change == n_changes);
            asked.push(change);
            if change > n_changes - n_fit { Trial::Fits(Seconds(1.0)) } else { Trial::Overflows }
        };
        let found = Family { changes, order }.first_that_fits(&mut trial).ok();
        (found.map(|found| found.1), asked)
    }

    #[test]
    fn nothing_less_is_tried_where_the_largest_change_does_not_fit() {
        assert_eq!(tried(Order::Nested, 5, 0), (None, vec![5]));
        assert_eq!(tried(Order::Nested, 5, 2), (Some(4), vec![5, 1, 2, 3, 4]));
        assert_eq!(tried(Order::Nested, 5, 1), (Some(5), vec![5, 1, 2, 3, 4]));
        assert_eq!(tried(Order::Rising, 5, 0), (None, vec![1, 2, 3, 4, 5]));
        assert_eq!(tried(Order::Rising, 5, 3), (Some(3), vec![1, 2, 3]));
    }
}
