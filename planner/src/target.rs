//! What an engine can run, as restrictions of the space: `--target megatron`.
//!
//! The search is free to cut every operator in its own way; engines offer degrees, one ZeRO stage for all parameters
//! and one of a few kinds of recomputation for all layers. So the space of an engine is a union of spaces with these
//! pinned:
//!
//! ```text
//! space(engine) = union over its storages z and recomputations r of   { plans with zero = z, recompute = r, .. }
//! ```
//! with everything else ruled out that it lacks. Hosts hold the optimizer states of all parameters or of none: of all
//! only where nothing fits without, or where the user says so. Each space is searched, the fastest plan counts, and
//! nothing in the union is faster than the least of their bounds.
//!
//! None of them has replicas without sequences of their own, or heads that tensor parallel devices share: the degree
//! divides the heads (`transformer_config.py` of Megatron-Core), in TorchTitan those of keys and values too, whose
//! `Attention` takes as many of both for its own as the device has columns.
//!
//! | engine | ZeRO | optimizer on hosts | recompute | schedules | keys of other devices | between products of tp | tokens to experts |
//! |---|---|---|---|---|---|---|---|
//! | Megatron-Core `arguments.py` | 0, 1 | with 1 (`--optimizer-cpu-offload`) | none, selective, full | 1F1B, interleaved | all | tokens cut | every copy, or once to a node (`flex`), beside another micro-batch |
//! | TorchTitan `job_config.py` | 0 where sequences are whole, 2, 3 | no: it moves parameters too | none, selective, full | GPipe, 1F1B, interleaved, ZB-V, DualPipeV | gathered, ring | tokens cut | every copy, or once to a node (`expert_parallel_comm_backend`) |
//! | DeepSpeed `runtime/config.py`, `pipe/engine.py` | 0, 1; 2, 3 without a pipeline | with 1, 2, 3 (`offload_optimizer`) | none, full | 1F1B | Ulysses, with data parallelism alone | whole | every copy |

use cost_model::Constants;
use ir::engine::{Dispatch, Engine, ExchangeOverlap, Launches};
use ir::plan::Plan;
use ir::units::Seconds;

use crate::constraints::Constraints;
use crate::forbid::contradiction;
use crate::found;
use crate::given::HomeRule;
use crate::refusals::closer;
use crate::request::{
    AxesKind, ContextKind, GradientsKind, NoPlan, OffloadKind, OnProgress, Pins, RecomputeKind, Request,
    ScheduleKind, SequenceParallel, SharesKind, Stop,
};
use crate::shapes::{Facts, divisors};
use crate::split_schedules;

/// An engine whose space is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Megatron-Core.
    Megatron,
    /// TorchTitan.
    TorchTitan,
    /// DeepSpeed.
    DeepSpeed,
}

/// What a ZeRO stage does not go with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lacks {
    Nothing,
    Pipeline,
    /// Sequences that are cut over devices: these then hold parts of the parameters too (`fsdp_enabled` of TorchTitan's
    /// `parallel_dims.py`).
    Context,
}

impl Target {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Megatron, Self::TorchTitan, Self::DeepSpeed];

    /// The engine of a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|target| target.name() == name)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Megatron => "megatron",
            Self::TorchTitan => "torchtitan",
            Self::DeepSpeed => "deepspeed",
        }
    }

    fn storages(self) -> &'static [(u8, Lacks)] {
        match self {
            Self::Megatron => &[(1, Lacks::Nothing), (0, Lacks::Nothing)],
            Self::TorchTitan => &[(2, Lacks::Nothing), (3, Lacks::Nothing), (0, Lacks::Context)],
            Self::DeepSpeed => {
                &[(1, Lacks::Nothing), (2, Lacks::Pipeline), (3, Lacks::Pipeline), (0, Lacks::Nothing)]
            }
        }
    }

    /// Whether its hosts may hold optimizer states that are cut over replicas.
    fn offloads(self) -> bool {
        match self {
            Self::Megatron | Self::DeepSpeed => true,
            Self::TorchTitan => false,
        }
    }

    /// Which memories hold optimizer states, one after the other: the next where nothing fits in those before.
    fn homes(self, pins: &Pins) -> Vec<OffloadKind> {
        let wanted = match pins.offload {
            Some(
                one @ (OffloadKind::None
                | OffloadKind::Optimizer
                | OffloadKind::Activations
                | OffloadKind::Both
                | OffloadKind::States
                | OffloadKind::All
                | OffloadKind::Nvme),
            ) => vec![one],
            Some(OffloadKind::Allowed) | None => vec![OffloadKind::None, OffloadKind::Optimizer],
        };
        let is_left = |kind: &OffloadKind| {
            (self.offloads() || *kind == OffloadKind::None) && !pins.forbid.offload.contains(kind)
        };
        wanted.into_iter().filter(is_left).collect()
    }

    fn recomputations(self) -> &'static [(&'static str, RecomputeKind)] {
        match self {
            Self::Megatron | Self::TorchTitan => &[
                ("none", RecomputeKind::None),
                ("selective", RecomputeKind::Selective),
                ("full", RecomputeKind::Full),
            ],
            Self::DeepSpeed => &[("none", RecomputeKind::None), ("full", RecomputeKind::Full)],
        }
    }

    fn schedules(self) -> &'static [(&'static str, ScheduleKind)] {
        match self {
            Self::Megatron => &[("1f1b", ScheduleKind::OneFOneB), ("interleaved", ScheduleKind::Interleaved)],
            Self::TorchTitan => &[
                ("1f1b", ScheduleKind::OneFOneB),
                ("interleaved", ScheduleKind::Interleaved),
                ("gpipe", ScheduleKind::GPipe),
                ("zb-v", ScheduleKind::ZbV),
                ("dualpipev", ScheduleKind::DualPipeV),
            ],
            Self::DeepSpeed => &[("1f1b", ScheduleKind::OneFOneB)],
        }
    }

    fn contexts(self) -> &'static [(&'static str, ContextKind)] {
        match self {
            Self::Megatron => &[
                ("gather", ContextKind::Gather),
                ("ring", ContextKind::Ring),
                ("ulysses", ContextKind::Ulysses),
            ],
            Self::TorchTitan => &[("gather", ContextKind::Gather), ("ring", ContextKind::Ring)],
            Self::DeepSpeed => &[("ulysses", ContextKind::Ulysses)],
        }
    }

    /// Whether sequences are cut only where there are no tensor parallelism and no pipeline: Megatron-DeepSpeed refuses
    /// the others (`parallel_state.py`, `groups.py` of DeepSpeed).
    fn cuts_sequences_alone(self) -> bool {
        self == Self::DeepSpeed
    }

    fn between_products(self) -> SequenceParallel {
        match self {
            Self::Megatron | Self::TorchTitan => SequenceParallel::On,
            Self::DeepSpeed => SequenceParallel::Off,
        }
    }

    /// Refuses features of `--engine` that it has not.
    ///
    /// # Errors
    /// The feature, and what the engine does in its place.
    pub fn check_features(self, engine: &Engine) -> Result<(), String> {
        let name = self.name();
        let (by_node, beside, graph) = match self {
            Self::Megatron => (true, true, true),
            Self::TorchTitan => (true, false, false),
            Self::DeepSpeed => (false, false, false),
        };
        if engine.dispatch == Dispatch::PerNode && !by_node {
            return Err(format!(
                "{name} cannot run dispatch=per-node: it sends a copy of a token per expert"
            ));
        }
        if engine.exchange_overlap == ExchangeOverlap::Beside && !beside {
            return Err(format!("{name} cannot run exchange-overlap=beside: experts wait for their tokens"));
        }
        if engine.launches == Launches::Graph && !graph {
            return Err(format!("{name} cannot run launches=graph: its host launches kernels"));
        }
        Ok(())
    }

    /// What the user has chosen without degrees of which the model, or the batch, has no equal parts for all devices.
    ///
    /// # Errors
    /// The choice that leaves some device without one.
    fn in_equal_parts(self, request: &Request) -> Result<Pins, String> {
        let (name, mut pins) = (self.name(), request.pins.clone());
        let (facts, batch) = (Facts::of(request), request.job.global_batch);
        let heads = if self == Self::TorchTitan && facts.heads > 0 { facts.kv_heads } else { facts.heads };
        if let Some(tp) = pins.tp.filter(|&tp| tp > 0 && !heads.is_multiple_of(tp)) {
            let of = if heads == facts.heads { "heads" } else { "heads of keys and values" };
            return Err(format!(
                "{name} cannot run tp={tp}: the {heads} {of} of `{}` do not divide so",
                request.model.name
            ));
        }
        if let Some(dp) = pins.dp.filter(|&dp| dp > 0 && !batch.is_multiple_of(dp)) {
            return Err(format!(
                "{name} cannot run dp={dp}: {dp} replicas do not divide a global batch of {batch} sequences"
            ));
        }
        let all = divisors(request.cluster.n_devices());
        pins.forbid.tp.single.extend(all.iter().filter(|&&tp| !heads.is_multiple_of(tp)));
        pins.forbid.dp.single.extend(all.iter().filter(|&&dp| !batch.is_multiple_of(dp)));
        pins.forbid.copies = true;
        Ok(pins)
    }

    /// The spaces of the engine within what the user has chosen, as far as it can run that; none is empty by
    /// contradiction.
    ///
    /// # Errors
    /// Where none is left.
    fn spaces(self, pins: &Pins) -> Result<Vec<Pins>, String> {
        let of_home = |home: OffloadKind| self.spaces_in(home, pins);
        let list: Vec<Pins> = self.homes(pins).into_iter().flat_map(of_home).collect();
        if list.is_empty() {
            return Err(format!("{} can run none of what the pins and prohibitions leave", self.name()));
        }
        Ok(list)
    }

    /// Those with optimizer states in one of the memories.
    fn spaces_in(self, home: OffloadKind, pins: &Pins) -> Vec<Pins> {
        let common = Pins { offload: Some(home), ..self.common(pins) };
        let mut list = Vec::new();
        for &(zero, lacks) in self.storages() {
            if home == OffloadKind::Optimizer && zero == 0 {
                continue;
            }
            for &(_, recompute) in self.recomputations() {
                let mut space = Pins { zero: Some(zero), recompute: Some(recompute), ..common.clone() };
                space.forbid.pp.above_one |= lacks == Lacks::Pipeline;
                space.forbid.cp.above_one |= lacks == Lacks::Context;
                let chosen = pins.zero.is_none_or(|one| one == zero)
                    && pins.recompute.is_none_or(|one| one == recompute);
                if chosen {
                    let parts = self.by_context(space).into_iter();
                    list.extend(parts.filter(|one| contradiction(one).is_none()));
                }
            }
        }
        list
    }

    /// A space, or that with whole sequences and that with neither tensor parallelism nor a pipeline.
    fn by_context(self, space: Pins) -> Vec<Pins> {
        if !self.cuts_sequences_alone() {
            return vec![space];
        }
        let (mut whole, mut cut) = (space.clone(), space);
        whole.forbid.cp.above_one = true;
        (cut.forbid.tp.above_one, cut.forbid.pp.above_one) = (true, true);
        vec![whole, cut]
    }

    /// What all spaces have in common.
    fn common(self, pins: &Pins) -> Pins {
        let mut common = pins.clone();
        common.sequence_parallel = Some(self.between_products());
        common.axes = Some(AxesKind::Named);
        // None of them lets replicas run different numbers of micro-batches, or devices of ranks.
        (common.shares, common.tensor_shares) = (Some(SharesKind::Equal), Some(SharesKind::Equal));
        // Without a word the search tries 1F1B and its interleaved form.
        common.forbid.vpp.above_one |= !self.schedules().iter().any(|one| one.1 == ScheduleKind::Interleaved);
        let kinds = [ContextKind::Gather, ContextKind::Ring, ContextKind::Ulysses];
        let lacks = |kind: &ContextKind| !self.contexts().iter().any(|one| one.1 == *kind);
        common.forbid.cp_kind.extend(kinds.into_iter().filter(lacks));
        let lacks = |kind: &ScheduleKind| !self.schedules().iter().any(|one| one.1 == *kind);
        common.forbid.schedule.extend(split_schedules::KINDS.into_iter().filter(lacks));
        common
    }

    /// Refuses what is said of single layers and no engine has: storage of one parameter, recomputation of one operator.
    fn check_layers(self, constraints: &Constraints) -> Result<(), String> {
        let name = self.name();
        let wrong = constraints.layers.iter().find_map(|(layer, said)| {
            if let Some(tensor) = said.storage.keys().next() {
                let what = format!("constraints on the storage of `{tensor}` in layer `{layer}`");
                return Some(format!(
                    "{name} cannot run {what}: it has one ZeRO stage for all parameters (zero)"
                ));
            }
            let op = said.recompute.keys().next()?;
            let what = format!("constraints on the recomputation of `{op}` in layer `{layer}`");
            Some(format!("{name} cannot run {what}: it has one kind for all layers (recompute)"))
        });
        wrong.map_or(Ok(()), Err)
    }

    /// Refuses pins that the engine lacks.
    fn check(self, pins: &Pins) -> Result<(), String> {
        let name = self.name();
        self.check_layers(&pins.constraints)?;
        if let Some(zero) = pins.zero {
            let mut stages: Vec<u8> = self.storages().iter().map(|one| one.0).collect();
            stages.sort_unstable();
            let has: Vec<String> = stages.iter().map(ToString::to_string).collect();
            let Some((_, lacks)) = self.storages().iter().find(|one| one.0 == zero) else {
                return Err(format!("{name} cannot run zero={zero}: it has {}", has.join(", ")));
            };
            if let Some(pp) = pins.pp.filter(|pp| *pp > 1 && *lacks == Lacks::Pipeline) {
                return Err(format!("{name} cannot run zero={zero} with pp={pp}: only without a pipeline"));
            }
            if let Some(cp) = pins.cp.filter(|cp| *cp > 1 && *lacks == Lacks::Context) {
                return Err(format!(
                    "{name} cannot run zero={zero} with cp={cp}: it cuts states over the same devices"
                ));
            }
        }
        let mut beside = [("tp", pins.tp), ("pp", pins.pp)].into_iter();
        if let Some(cp) = pins.cp.filter(|cp| *cp > 1 && self.cuts_sequences_alone())
            && let Some((other, degree)) =
                beside.find_map(|(name, one)| Some((name, one.filter(|one| *one > 1)?)))
        {
            return Err(format!(
                "{name} cannot run cp={cp} with {other}={degree}: it cuts sequences beside data parallelism alone"
            ));
        }
        if pins.offload == Some(OffloadKind::Optimizer) && !self.offloads() {
            return Err(format!(
                "{name} cannot run offload=optimizer: its hosts hold parameters too, or nothing"
            ));
        }
        if pins.offload == Some(OffloadKind::Nvme) {
            return Err(format!(
                "{name} is planned with optimizer states in memory: of hosts it has offload=optimizer at most"
            ));
        }
        if pins.offload.is_some_and(|kind| kind.rules().1.contains(&HomeRule::Host)) {
            return Err(format!(
                "{name} is planned with activations and parameters on the devices: of hosts it has offload=optimizer at most"
            ));
        }
        if pins.gradients == Some(GradientsKind::Whole) {
            return Err(format!("{name} is planned with gradients that are cut as parameters are"));
        }
        if pins.shares == Some(SharesKind::Unequal) {
            return Err(format!("{name} cannot run shares=unequal: all replicas run as many micro-batches"));
        }
        if pins.tensor_shares == Some(SharesKind::Unequal) {
            return Err(format!("{name} cannot run tensor-shares=unequal: every device runs one rank"));
        }
        lacks(name, "the schedule", pins.schedule, self.schedules())?;
        lacks(name, "the recomputation", pins.recompute, self.recomputations())?;
        lacks(name, "the cp-kind", pins.cp_kind, self.contexts())?;
        match (pins.sequence_parallel, self.between_products()) {
            (Some(SequenceParallel::Off), SequenceParallel::On) => {
                Err(format!("{name} is planned with sequence-parallel=on"))
            }
            (Some(SequenceParallel::On), SequenceParallel::Off) => {
                Err(format!("{name} cannot run sequence-parallel=on"))
            }
            _ => Ok(()),
        }
    }
}

/// Refuses a choice that is not in a list of an engine.
fn lacks<T: Copy + PartialEq>(
    name: &str,
    what: &str,
    chosen: Option<T>,
    list: &[(&'static str, T)],
) -> Result<(), String> {
    if chosen.is_none_or(|one| list.iter().any(|(_, known)| *known == one)) {
        return Ok(());
    }
    let has: Vec<&str> = list.iter().map(|one| one.0).collect();
    Err(format!("{name} cannot run {what} that is chosen: it has {}", has.join(", ")))
}

/// Finds the fastest plan of those that an engine can run. Digests and the tool's version are left for the caller.
///
/// # Errors
/// Where the engine cannot run what was chosen, or none of its spaces has a plan.
pub fn optimize_for(
    request: &Request,
    target: Target,
    (stop, on_progress): (Stop<'_>, OnProgress<'_>),
) -> Result<Plan, NoPlan> {
    let impossible = |what| NoPlan::Impossible { what };
    target.check_features(&request.job.engine).map_err(impossible)?;
    target.check(&request.pins).map_err(impossible)?;
    let pins = target.in_equal_parts(request).map_err(impossible)?;
    let spaces = target.spaces(&pins).map_err(impossible)?;
    let constants = Constants::load();
    let (mut plans, mut refused): (Vec<Plan>, Option<NoPlan>) = (Vec::new(), None);
    for pins in spaces {
        // The hosts come in only where nothing fits without them unless the user lets them.
        let is_enough = !plans.is_empty() && request.pins.offload.is_none();
        if pins.offload == Some(OffloadKind::Optimizer) && is_enough {
            break;
        }
        match found(&Request { pins, ..request.clone() }, &constants, (stop, on_progress)) {
            Ok(plan) => plans.push(plan),
            Err(broken @ NoPlan::Broken { .. }) => return Err(broken),
            Err(other) => refused = Some(closer(refused, other)),
        }
    }
    match (fastest(plans, target), refused) {
        (Some(plan), _) => Ok(plan),
        (None, Some(refused)) => Err(refused),
        (None, None) => Err(NoPlan::Impossible { what: format!("{} has no space", target.name()) }),
    }
}

/// The fastest plan, the first of equals, with the report of all searches.
fn fastest(mut plans: Vec<Plan>, target: Target) -> Option<Plan> {
    let time =
        |plan: &Plan| plan.predicted.as_ref().map_or(Seconds(f64::INFINITY), |found| found.step_time_s);
    let least =
        plans.iter().filter_map(|plan| Some(plan.search.as_ref()?.lower_bound_s)).reduce(Seconds::min)?;
    let n_spaces = plans.len();
    let at =
        (0..n_spaces).reduce(|best, at| if time(&plans[at]) < time(&plans[best]) { at } else { best })?;
    let sum = |of: fn(&ir::plan::prediction::SearchReport) -> u64| -> u64 {
        plans.iter().filter_map(|plan| plan.search.as_ref().map(of)).sum()
    };
    let (n_candidates, n_bounded) = (sum(|one| one.n_candidates), sum(|one| one.n_bounded));
    let (n_unfit, n_simulated) = (sum(|one| one.n_unfit), sum(|one| one.n_simulated));
    let mut plan = plans.swap_remove(at);
    let step = time(&plan);
    if let Some(report) = &mut plan.search {
        report.lower_bound_s = least.min(step);
        report.gap = (step / report.lower_bound_s - 1.0).max(0.0);
        report.space_size = n_candidates as f64;
        (report.n_candidates, report.n_bounded) = (n_candidates, n_bounded);
        (report.n_unfit, report.n_simulated) = (n_unfit, n_simulated);
        report.proof = format!(
            "the fastest of {n_spaces} spaces that together are what {} can run, bounded by the least of their bounds; \
             of its own: {}",
            target.name(),
            report.proof
        );
    }
    Some(plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constraints::{Kept, LayerConstraints};

    const ALL: [Target; 3] = [Target::Megatron, Target::TorchTitan, Target::DeepSpeed];

    #[test]
    fn every_space_names_one_storage_and_one_recomputation() {
        for target in ALL {
            let pins = Pins { offload: Some(OffloadKind::None), ..Pins::default() };
            let spaces = target.spaces(&pins).unwrap();
            let parts = if target.cuts_sequences_alone() { 2 } else { 1 };
            assert_eq!(spaces.len(), target.storages().len() * target.recomputations().len() * parts);
            assert!(spaces.iter().all(|one| one.zero.is_some() && one.recompute.is_some()));
            assert!(spaces.iter().all(|one| contradiction(one).is_none()));
        }
    }

    #[test]
    fn choices_of_the_user_leave_fewer_spaces() {
        let pins = Pins { zero: Some(1), recompute: Some(RecomputeKind::Full), ..Pins::default() };
        // In the devices' memory and in the hosts'.
        assert_eq!(Target::Megatron.spaces(&pins).unwrap().len(), 2);
        let none = Some(OffloadKind::None);
        let mut pins = Pins { pp: Some(4), offload: none, ..Pins::default() };
        // Stages 2 and 3 have no pipeline.
        assert_eq!(Target::DeepSpeed.spaces(&pins).unwrap().len(), 4);
        pins.forbid.zero = vec![0, 1];
        assert!(Target::DeepSpeed.spaces(&pins).unwrap_err().contains("none of what"));
    }

    #[test]
    fn features_that_an_engine_lacks_are_refused() {
        let by_node = Engine { dispatch: Dispatch::PerNode, ..Engine::default() };
        let beside = Engine { exchange_overlap: ExchangeOverlap::Beside, ..by_node };
        assert!(ALL.iter().all(|target| target.check_features(&Engine::default()).is_ok()));
        let graph = Engine { launches: Launches::Graph, ..beside };
        assert_eq!(Target::Megatron.check_features(&graph), Ok(()));
        assert_eq!(Target::TorchTitan.check_features(&by_node), Ok(()));
        let said = |target: Target, engine: &Engine| target.check_features(engine).unwrap_err();
        assert!(said(Target::TorchTitan, &beside).contains("exchange-overlap=beside"));
        assert!(said(Target::DeepSpeed, &beside).contains("dispatch=per-node"));
        let only = Engine { launches: Launches::Graph, ..Engine::default() };
        assert!(said(Target::DeepSpeed, &only).contains("its host launches kernels"));
    }

    #[test]
    fn what_an_engine_lacks_is_refused_with_what_it_has() {
        let spaces = |target: Target, pins: &Pins| target.check(pins).and_then(|()| target.spaces(pins));
        let said = |target: Target, pins: &Pins| spaces(target, pins).unwrap_err();
        let zero = Pins { zero: Some(3), ..Pins::default() };
        assert_eq!(said(Target::Megatron, &zero), "megatron cannot run zero=3: it has 0, 1");
        let staged = Pins { pp: Some(2), ..zero };
        assert_eq!(
            said(Target::DeepSpeed, &staged),
            "deepspeed cannot run zero=3 with pp=2: only without a pipeline"
        );
        let long = Pins { cp: Some(4), pp: Some(2), ..Pins::default() };
        assert_eq!(
            said(Target::DeepSpeed, &long),
            "deepspeed cannot run cp=4 with pp=2: it cuts sequences beside data parallelism alone"
        );
        let copied = Pins { zero: Some(0), cp: Some(4), ..Pins::default() };
        assert_eq!(
            said(Target::TorchTitan, &copied),
            "torchtitan cannot run zero=0 with cp=4: it cuts states over the same devices"
        );
        let order = Pins { schedule: Some(ScheduleKind::Chimera), ..Pins::default() };
        assert_eq!(
            said(Target::Megatron, &order),
            "megatron cannot run the schedule that is chosen: it has 1f1b, interleaved"
        );
        let offload = Pins { offload: Some(OffloadKind::Optimizer), ..Pins::default() };
        assert_eq!(
            said(Target::TorchTitan, &offload),
            "torchtitan cannot run offload=optimizer: its hosts hold parameters too, or nothing"
        );
        // Neither engine's hosts update what every replica holds whole.
        let whole = Pins { zero: Some(0), ..offload };
        assert!(said(Target::DeepSpeed, &whole).contains("none of what"));
        let switch = Pins { sequence_parallel: Some(SequenceParallel::On), ..Pins::default() };
        assert_eq!(said(Target::DeepSpeed, &switch), "deepspeed cannot run sequence-parallel=on");
    }

    #[test]
    fn single_parameters_and_operators_are_no_choice_of_an_engine() {
        let of_layer = |said: LayerConstraints| Constraints { layers: [("decoder".into(), said)].into() };
        let pins = |said| Pins { constraints: of_layer(said), ..Pins::default() };
        let storage = LayerConstraints { storage: [("w".into(), 3)].into(), ..LayerConstraints::default() };
        assert_eq!(
            Target::Megatron.check(&pins(storage)).unwrap_err(),
            "megatron cannot run constraints on the storage of `w` in layer `decoder`: it has one ZeRO stage for all parameters (zero)"
        );
        let again = [("*".into(), Kept::Again)].into();
        let again = LayerConstraints { recompute: again, ..LayerConstraints::default() };
        assert!(Target::TorchTitan.check(&pins(again)).unwrap_err().contains("one kind for all layers"));
        // How a tensor is cut may be what a degree gives.
        let parts = [("w".into(), [("f".into(), 8)].into())].into();
        let parts = LayerConstraints { parts, ..LayerConstraints::default() };
        assert_eq!(Target::Megatron.check(&pins(parts)), Ok(()));
    }
}
