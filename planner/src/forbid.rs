//! What the user rules out, as restrictions of the space: which degrees, loops, storages and orders are left.
//!
//! A mesh whose axes have names (`shapes`) keeps or loses its degrees as a whole. On a mesh of free axes the search
//! decides what an axis does; there a degree is ruled out by barring axes from a class of loops, so that no barred
//! product of axes can take that role. What may be barred differs from mesh to mesh, so one mesh becomes several
//! shapes, each with as few bars as possible. Roles are read off an arrangement by majority; one that still bears a
//! forbidden name is no plan (`broken`).

use std::collections::BTreeSet;

use ir::names::{Context, Offload, OnHost, OnNvme, RecomputeRole, Roles};
use ir::program::{AxisSet, Storage};
use ir::schedule::Schedule;
use ir::token_order::TokenOrder;

use crate::given::{HomeRule, StateRule};
use crate::request::{
    ContextKind, Degrees, Forbid, OffloadKind, Pins, RecomputeKind, ScheduleKind, SequenceParallel,
};

/// Classes of loops that an axis may not split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Barred {
    /// Sequences of the batch.
    pub sequences: bool,
    /// Tokens, where parameters or attention are: context parallelism.
    pub context: bool,
    /// Experts.
    pub experts: bool,
    /// The inside of products.
    pub inside: bool,
    /// The inside of experts' products.
    pub inside_experts: bool,
    /// Sequences and tokens, in the products of experts.
    pub tokens_of_experts: bool,
    /// Loops of the products that name it.
    pub names: NameBars,
}

/// Classes of loops that an axis may not split in the products of a layer that hold more than half of its weights: what
/// it splits there says what it is called (`ir::names`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NameBars {
    /// Sequences of the batch: data parallelism.
    pub sequences: bool,
    /// Tokens: context parallelism.
    pub tokens: bool,
    /// Their inside: tensor parallelism.
    pub inside: bool,
}

impl Degrees {
    /// Whether a degree is left.
    pub fn allows(&self, degree: u64) -> bool {
        !(self.above_one && degree > 1 || self.single.contains(&degree))
    }

    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Forbid {
    /// Whether nothing is ruled out.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether nothing is ruled out that a mesh or a layer's choice could have: schedules stand on any.
    pub(crate) fn leaves_layers(&self) -> bool {
        Self { schedule: Vec::new(), ..self.clone() }.is_empty()
    }

    /// Whether some degree is ruled out that only a mesh with names can be held to exactly.
    pub(crate) fn names_degrees(&self) -> bool {
        [&self.tp, &self.dp, &self.cp, &self.ep, &self.etp].iter().any(|degrees| !degrees.single.is_empty())
            || !self.micro_batch.is_empty()
    }

    /// The same without these.
    pub(crate) fn without_degrees(&self) -> Self {
        let left = |degrees: &Degrees| Degrees { single: BTreeSet::new(), above_one: degrees.above_one };
        let [tp, dp, cp, ep, etp] = [&self.tp, &self.dp, &self.cp, &self.ep, &self.etp].map(left);
        Self { tp, dp, cp, ep, etp, micro_batch: Degrees::default(), ..self.clone() }
    }

    /// The sets of bars for the axes of a mesh of free axes: each bars as little as can be. `inside` are the axes that
    /// may split the inside of products.
    pub(crate) fn bars(&self, sizes: &[u64], inside: &[usize]) -> Vec<Vec<Barred>> {
        let all: Vec<usize> = (0..sizes.len()).collect();
        let mut list = vec![vec![Barred::default(); sizes.len()]];
        let mut bar = |degrees: &Degrees, axes: &[usize], set: fn(&mut Barred)| {
            let kept = kept_sets(degrees, sizes, axes);
            list = list
                .iter()
                .flat_map(|bars| kept.iter().map(move |kept| with_bars(bars, kept, set)))
                .collect();
        };
        bar(&self.dp, &all, |barred| barred.sequences = true);
        bar(&self.cp, &all, |barred| barred.context = true);
        bar(&self.ep, &all, |barred| barred.experts = true);
        bar(&self.tp, inside, |barred| barred.inside = true);
        bar(&self.etp, inside, |barred| barred.inside_experts = true);
        if self.cp_kind.contains(&ContextKind::Ulysses) {
            // Heads inside attention and tokens outside are what is ruled out: an axis may have one of the two.
            for &axis in inside {
                let either = |bars: &Vec<Barred>| {
                    let one = |set: fn(&mut Barred)| {
                        let mut bars = bars.clone();
                        set(&mut bars[axis]);
                        bars
                    };
                    [one(|barred| barred.inside = true), one(|barred| barred.context = true)]
                };
                list = list.iter().flat_map(either).collect();
            }
        }
        list.dedup();
        list
    }

    /// Whether a storage of a parameter is left that could be cut over `whole` axes.
    pub(crate) fn admits(&self, storage: Storage, whole: AxisSet) -> bool {
        let stage = match storage {
            Storage { parameter, .. } if !parameter.is_empty() => 3,
            Storage { gradient, .. } if !gradient.is_empty() => 2,
            Storage { optimizer, .. } if !optimizer.is_empty() => 1,
            Storage { .. } => 0,
        };
        // What no axis holds whole cannot be cut.
        !self.zero.contains(&stage) || stage == 0 && whole.is_empty()
    }

    /// Whether a schedule is left on so many stages. One stage has no order to speak of.
    pub(crate) fn allows_schedule(&self, schedule: Schedule, n_stages: u64) -> bool {
        let kind = kind_of(schedule);
        self.vpp.allows(u64::from(schedule.n_virtual_stages()))
            && self.slices.allows(u64::from(schedule.n_slices()))
            && (n_stages == 1 || kind.is_none_or(|kind| !self.schedule.contains(&kind)))
    }

    /// The first order of tokens that is left, beginning with the usual one.
    pub(crate) fn token_order(&self, usual: TokenOrder) -> TokenOrder {
        let all = [usual, TokenOrder::ZigZag, TokenOrder::Striped, TokenOrder::Natural];
        all.into_iter().find(|order| !self.token_order.contains(order)).unwrap_or(usual)
    }
}

/// The largest sets of axes of which no subset multiplies to a degree that is ruled out.
fn kept_sets(degrees: &Degrees, sizes: &[u64], axes: &[usize]) -> Vec<AxisSet> {
    if degrees.is_empty() {
        return vec![all_axes()];
    }
    let set_of = |bits: u32| -> Vec<usize> {
        axes.iter().enumerate().filter(|(i, _)| bits & (1 << i) != 0).map(|(_, &axis)| axis).collect()
    };
    let product = |set: &[usize]| set.iter().map(|&axis| sizes[axis]).product::<u64>();
    // No axis at all is a degree of one, which cannot be ruled out by barring.
    let is_left = |part: u32| part == 0 || degrees.allows(product(&set_of(part)));
    let keeps = |bits: &u32| (0..=*bits).filter(|part| part & !bits == 0).all(is_left);
    let ok: Vec<u32> = (0..1_u32 << axes.len()).filter(keeps).collect();
    let largest = |bits: &&u32| !ok.iter().any(|other| *other != **bits && *other & **bits == **bits);
    let others = all_axes().0 & !axes.iter().fold(0, |set, axis| set | 1 << axis);
    let kept = |bits: &u32| AxisSet(set_of(*bits).iter().fold(others, |set, axis| set | 1 << axis));
    ok.iter().filter(largest).map(kept).collect()
}

fn all_axes() -> AxisSet {
    AxisSet(u8::MAX)
}

/// The bars, and one more for every axis that is not kept.
fn with_bars(bars: &[Barred], kept: &AxisSet, set: fn(&mut Barred)) -> Vec<Barred> {
    let mut bars = bars.to_vec();
    for (axis, barred) in bars.iter_mut().enumerate() {
        if kept.0 & (1 << axis) == 0 {
            set(barred);
        }
    }
    bars
}

/// What pins and prohibitions leave nothing of, in words.
pub fn contradiction(pins: &Pins) -> Option<String> {
    let forbid = &pins.forbid;
    let degrees = [
        ("tp", pins.tp, &forbid.tp),
        ("pp", pins.pp, &forbid.pp),
        ("dp", pins.dp, &forbid.dp),
        ("cp", pins.cp, &forbid.cp),
        ("ep", pins.ep, &forbid.ep),
        ("etp", pins.etp, &forbid.etp),
        ("vpp", pins.vpp.map(u64::from), &forbid.vpp),
        ("micro-batch", pins.micro_batch, &forbid.micro_batch),
        ("slices", pins.slices.map(u64::from), &forbid.slices),
    ];
    for (name, pin, degrees) in degrees {
        if let Some(pin) = pin.filter(|pin| !degrees.allows(*pin)) {
            return Some(format!("{name}={pin} is both chosen and forbidden"));
        }
    }
    let both = [
        ("the schedule", pins.schedule.is_some_and(|kind| forbid.schedule.contains(&kind))),
        ("the recomputation", pins.recompute.is_some_and(|kind| forbid.recompute.contains(&kind))),
        ("the ZeRO stage", pins.zero.is_some_and(|stage| forbid.zero.contains(&stage))),
        ("offload", pins.offload.is_some_and(|kind| holds_forbidden(kind, &forbid.offload))),
        (
            "sequence-parallel",
            pins.sequence_parallel.is_some_and(|one| forbid.sequence_parallel.contains(&one)),
        ),
        ("cp-kind", pins.cp_kind.is_some_and(|kind| forbid.cp_kind.contains(&kind))),
        ("token-order", pins.token_order.is_some_and(|order| forbid.token_order.contains(&order))),
    ];
    let both = both
        .into_iter()
        .find(|(_, both)| *both)
        .map(|(name, _)| format!("{name} is both chosen and forbidden"));
    both.or_else(|| slices_keep_on_device(pins)).or_else(|| nothing_left(forbid))
}

/// Whether hosts hold all of something that they may not.
fn holds_forbidden(kind: OffloadKind, forbidden: &[OffloadKind]) -> bool {
    let (states, [kept, _]) = kind.rules();
    forbidden.iter().any(|one| match one {
        OffloadKind::Optimizer => states == StateRule::Host,
        OffloadKind::Activations => kept == HomeRule::Host,
        OffloadKind::None
        | OffloadKind::Allowed
        | OffloadKind::Both
        | OffloadKind::States
        | OffloadKind::All
        | OffloadKind::Nvme => *one == kind,
    })
}

/// Slices read what those before them keep, long before its backward.
fn slices_keep_on_device(pins: &Pins) -> Option<String> {
    let is_both = pins.schedule.is_some_and(ScheduleKind::cuts_sequences)
        && pins.offload.is_some_and(OffloadKind::keeps_on_host);
    is_both.then(|| {
        "slices of a sequence read what those before them keep: a schedule that cuts sequences cannot keep it on the hosts".into()
    })
}

/// What the prohibitions by themselves leave nothing of, or cannot be kept to.
fn nothing_left(forbid: &Forbid) -> Option<String> {
    let all = [
        ("zero", (0..=3).all(|stage| forbid.zero.contains(&stage))),
        ("offload", OffloadKind::ALL.iter().all(|kind| forbid.offload.contains(kind))),
        ("recompute", RECOMPUTE.iter().all(|kind| forbid.recompute.contains(kind))),
        ("sequence-parallel", SWITCH.iter().all(|one| forbid.sequence_parallel.contains(one))),
        ("cp-kind (forbid cp instead)", KINDS.iter().all(|kind| forbid.cp_kind.contains(kind))),
        ("token-order", ORDERS.iter().all(|order| forbid.token_order.contains(order))),
    ];
    if let Some((name, _)) = all.into_iter().find(|(_, all)| *all) {
        return Some(format!("every {name} is forbidden"));
    }
    let degrees = [
        ("tp", &forbid.tp),
        ("dp", &forbid.dp),
        ("cp", &forbid.cp),
        ("ep", &forbid.ep),
        ("pp", &forbid.pp),
        ("vpp", &forbid.vpp),
    ];
    if let Some((name, _)) = degrees.into_iter().find(|(_, one)| one.above_one && !one.allows(1)) {
        return Some(format!("every {name} is forbidden"));
    }
    let only_selective = forbid.recompute == [RecomputeKind::Selective];
    only_selective.then(|| {
        "selective recomputation lies between none and full, which layers may mix: choose recompute=none or recompute=full instead".into()
    })
}

const RECOMPUTE: [RecomputeKind; 3] = [RecomputeKind::None, RecomputeKind::Selective, RecomputeKind::Full];
const SWITCH: [SequenceParallel; 2] = [SequenceParallel::On, SequenceParallel::Off];
const KINDS: [ContextKind; 3] = [ContextKind::Gather, ContextKind::Ring, ContextKind::Ulysses];
const ORDERS: [TokenOrder; 3] = [TokenOrder::Natural, TokenOrder::ZigZag, TokenOrder::Striped];

/// Whether an arrangement bears a name that is ruled out.
pub(crate) fn broken(forbid: &Forbid, roles: &Roles) -> bool {
    let degrees = [
        (&forbid.tp, roles.tp),
        (&forbid.pp, roles.pp),
        (&forbid.dp, roles.dp),
        (&forbid.cp, roles.cp),
        (&forbid.ep, roles.ep),
        (&forbid.etp, roles.etp),
        (&forbid.vpp, roles.vpp),
        (&forbid.micro_batch, roles.micro_batch),
    ];
    let recompute = match roles.recompute {
        RecomputeRole::None => RecomputeKind::None,
        RecomputeRole::Selective => RecomputeKind::Selective,
        RecomputeRole::Full => RecomputeKind::Full,
    };
    let sequence_parallel =
        if roles.sequence_parallel { SequenceParallel::On } else { SequenceParallel::Off };
    let offload = match (roles.offload, roles.kept_on_host, roles.parameters_on_host) {
        (Offload::Optimizer, OnHost::None, OnHost::None) if roles.optimizer_on_nvme == OnNvme::All => {
            OffloadKind::Nvme
        }
        _ if !roles.optimizer_on_nvme.is_none() => OffloadKind::Allowed,
        (Offload::None, OnHost::None, OnHost::None) => OffloadKind::None,
        (Offload::Optimizer, OnHost::None, OnHost::None) => OffloadKind::Optimizer,
        (Offload::None, OnHost::All, OnHost::None) => OffloadKind::Activations,
        (Offload::Optimizer, OnHost::All, OnHost::None) => OffloadKind::Both,
        (Offload::Optimizer, OnHost::None, OnHost::All) => OffloadKind::States,
        (Offload::Optimizer, OnHost::All, OnHost::All) => OffloadKind::All,
        (Offload::Some, ..) | (_, OnHost::Some, _) | (.., OnHost::Some) | (Offload::None, _, OnHost::All) => {
            OffloadKind::Allowed
        }
    };
    degrees.into_iter().any(|(degrees, degree)| !degrees.allows(degree))
        || forbid.offload.contains(&offload)
        || forbid.recompute.contains(&recompute)
        || forbid.zero.contains(&roles.zero.stage)
        || roles.tp > 1 && forbid.sequence_parallel.contains(&sequence_parallel)
        || context_kinds(roles.context).iter().any(|kind| forbid.cp_kind.contains(kind))
}

pub(crate) fn context_kinds(context: Option<Context>) -> &'static [ContextKind] {
    use ContextKind::{Gather, Ring, Ulysses};
    match context {
        None => &[],
        Some(Context::Gather) => &[Gather],
        Some(Context::Ring) => &[Ring],
        Some(Context::Ulysses) => &[Ulysses],
        Some(Context::GatherAndUlysses) => &[Gather, Ulysses],
        Some(Context::RingAndUlysses) => &[Ring, Ulysses],
        Some(Context::RingAndGather) => &[Ring, Gather],
        Some(Context::RingGatherAndUlysses) => &[Ring, Gather, Ulysses],
    }
}

/// What a schedule is called; a table of the user's own has no name.
pub(crate) fn kind_of(schedule: Schedule) -> Option<ScheduleKind> {
    Some(match schedule {
        Schedule::GPipe => ScheduleKind::GPipe,
        Schedule::OneFOneB => ScheduleKind::OneFOneB,
        Schedule::Eager => ScheduleKind::Eager,
        Schedule::Dapple { .. } => ScheduleKind::Dapple,
        Schedule::Interleaved { .. } => ScheduleKind::Interleaved,
        Schedule::BreadthFirst { .. } => ScheduleKind::BreadthFirst,
        Schedule::ZbH1 => ScheduleKind::ZbH1,
        Schedule::ZbH2 => ScheduleKind::ZbH2,
        Schedule::ZbV => ScheduleKind::ZbV,
        Schedule::VHalf => ScheduleKind::VHalf,
        Schedule::VMin => ScheduleKind::VMin,
        Schedule::Hanayo { .. } => ScheduleKind::Hanayo,
        Schedule::DualPipeV => ScheduleKind::DualPipeV,
        Schedule::Chimera => ScheduleKind::Chimera,
        Schedule::Seq1F1B { .. } => ScheduleKind::Seq1F1B,
        Schedule::TeraPipe { .. } => ScheduleKind::TeraPipe,
        Schedule::Custom(_) => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn single(degrees: &[u64]) -> Degrees {
        Degrees { above_one: false, single: degrees.iter().copied().collect() }
    }

    #[test]
    fn of_two_axes_whose_product_is_forbidden_each_may_be_kept() {
        let forbid = Forbid { tp: single(&[4]), ..Forbid::default() };
        let bars = forbid.bars(&[8, 2, 2], &[1, 2]);
        let inside: Vec<Vec<bool>> =
            bars.iter().map(|bars| bars.iter().map(|barred| barred.inside).collect()).collect();
        assert_eq!(inside, [[false, false, true], [false, true, false]]);
        // Neither may be kept where both sizes are forbidden, and both where nothing of theirs is.
        let two = Forbid { tp: single(&[2]), ..Forbid::default() };
        assert!(two.bars(&[8, 2, 2], &[1, 2])[0][1..].iter().all(|barred| barred.inside));
        assert_eq!(
            Forbid { tp: single(&[8]), ..Forbid::default() }.bars(&[2, 2], &[0, 1])[0],
            [Barred::default(); 2]
        );
    }

    #[test]
    fn a_storage_is_of_the_highest_stage_that_it_cuts() {
        let (cut, none) = (AxisSet(1), AxisSet::EMPTY);
        let forbid = Forbid { zero: vec![2], ..Forbid::default() };
        assert!(!forbid.admits(Storage::on_device(none, cut, cut), cut));
        assert!(forbid.admits(Storage::on_device(cut, cut, cut), cut));
        let none_whole = Forbid { zero: vec![0], ..Forbid::default() };
        assert!(!none_whole.admits(Storage::default(), cut));
        assert!(none_whole.admits(Storage::default(), none));
    }

    #[test]
    fn what_is_chosen_and_forbidden_is_named() {
        let forbid = Forbid { tp: Degrees { above_one: true, ..Degrees::default() }, ..Forbid::default() };
        let pins = Pins { tp: Some(8), forbid: forbid.clone(), ..Pins::default() };
        assert_eq!(contradiction(&pins), Some("tp=8 is both chosen and forbidden".into()));
        assert_eq!(contradiction(&Pins { tp: Some(1), forbid, ..Pins::default() }), None);
        let all = Forbid { zero: vec![0, 1, 2, 3], ..Forbid::default() };
        assert_eq!(
            contradiction(&Pins { forbid: all, ..Pins::default() }),
            Some("every zero is forbidden".into())
        );
    }
}
