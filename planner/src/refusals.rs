//! What to say of a request that contradicts itself, or of which nothing fits.

use cost_model::memory::StateBytes;
use cost_model::offload::NodeStore;
use ir::cluster::DeviceGroup;
use ir::names::Roles;
use ir::positions::too_short;
use ir::slices::sliced_model;
use ir::units::Bytes;

use crate::candidate::{Dropped, Scope};
use crate::forbid;
use crate::request::{
    ContextKind, Degrees, GradientsKind, Need, NoPlan, OffloadKind, Pins, Request, ScheduleKind,
    SequenceParallel, Untried,
};
use crate::schedules::contradiction;
use crate::shapes::{Facts, divisors, names_degrees};

/// Of two refusals the one that says more: what needs less memory, then what is only impossible.
pub(crate) fn closer(known: Option<NoPlan>, next: NoPlan) -> NoPlan {
    let need = |one: &NoPlan| match one {
        NoPlan::NothingFits { needed, .. } | NoPlan::Overflows { needed, .. } => needed.0,
        NoPlan::Impossible { .. } | NoPlan::Broken { .. } => f64::INFINITY,
    };
    match known {
        Some(known) if need(&known) <= need(&next) => known,
        _ => next,
    }
}

/// A refusal after a search that was stopped before all of its plans were tried.
pub(crate) fn stopped(why: NoPlan) -> NoPlan {
    match why {
        NoPlan::NothingFits { need, stage, term, needed, capacity, also, relaxations, .. } => {
            let untried = Some(Untried::Plans);
            NoPlan::NothingFits { need, stage, term, needed, capacity, also, relaxations, untried }
        }
        other @ (NoPlan::Impossible { .. } | NoPlan::Broken { .. } | NoPlan::Overflows { .. }) => other,
    }
}

/// What of the degrees that were pinned a plan with such roles has not, and what it is.
pub(crate) fn not_as_pinned(request: &Request, roles: &Roles) -> Option<String> {
    let pins = &request.pins;
    let degrees = [
        ("tp", pins.tp, roles.tp),
        ("pp", pins.pp, roles.pp),
        ("dp", pins.dp, roles.dp),
        ("cp", pins.cp, roles.cp),
        ("ep", pins.ep, roles.ep),
        ("etp", pins.etp, roles.etp),
        ("micro-batch", pins.micro_batch, roles.micro_batch),
    ];
    let missed = degrees.iter().find_map(|(name, pin, found)| {
        let pin = pin.filter(|pin| pin != found)?;
        let is_dense = Facts::of(request).experts == 1;
        let batch = request.job.global_batch;
        Some(match *name {
            "dp" if !batch.is_multiple_of(pin) => {
                format!("dp={pin}: {pin} replicas do not divide a global batch of {batch} sequences")
            }
            "cp" if !request.job.sequence.is_multiple_of(pin) => {
                format!(
                    "cp={pin}: sequences of {} tokens are not cut into so many parts",
                    request.job.sequence
                )
            }
            "micro-batch" => {
                format!("micro-batch={pin}: no plan has replicas that run so many sequences at a time")
            }
            "ep" | "etp" if is_dense => format!("{name}={pin}: `{}` has no experts", request.model.name),
            _ => format!("{name}={pin}: `{}` has no loops that divide so", request.model.name),
        })
    });
    let others = |kind: &ContextKind| forbid::context_kinds(roles.context).iter().any(|one| one != kind);
    let tokens = || {
        let is_off = pins.sequence_parallel == Some(SequenceParallel::On) && !roles.sequence_parallel;
        let why = || {
            format!("sequence-parallel=on: {} devices of a layer cut no tokens beside its products", roles.tp)
        };
        (is_off && roles.tp > 1).then(why)
    };
    let what = missed.or_else(tokens).or_else(|| {
        let kind = pins.cp_kind.filter(others)?;
        let why = if kind == ContextKind::Ulysses { ": its heads do not divide so" } else { "" };
        Some(format!("cp-kind: some axes see keys of `{}` in another way{why}", request.model.name))
    });
    Some(format!("{}; the nearest plan is {roles}", what?))
}

/// What a request contradicts itself in, if it does.
pub(crate) fn check_request(request: &Request) -> Result<(), NoPlan> {
    let fail = |what: String| Err(NoPlan::Impossible { what });
    let (job, n) = (&request.job, request.cluster.n_devices());
    if job.sequence == 0 || job.global_batch == 0 {
        return fail("the sequence length and the global batch must be at least 1".into());
    }
    if let Some(short) = request.model.layers.iter().find_map(|layer| too_short(layer, job.sequence)) {
        return fail(format!("a sequence of {} tokens: {short}", job.sequence));
    }
    let pins = &request.pins;
    for (name, pin) in [("tp", pins.tp), ("pp", pins.pp), ("dp", pins.dp), ("cp", pins.cp)] {
        if pin.is_some_and(|degree| degree == 0 || !n.is_multiple_of(degree)) {
            return fail(format!("{name}={} does not divide the {n} devices", pin.unwrap_or(0)));
        }
    }
    let product: u64 = [pins.tp, pins.pp, pins.dp, pins.cp].iter().flatten().product();
    if !n.is_multiple_of(product) {
        return fail(format!(
            "the pinned degrees multiply to {product}, which does not divide the {n} devices"
        ));
    }
    if let Some(zero) = pins.zero.filter(|&zero| zero > 3) {
        return fail(format!("zero={zero}: expected 0, 1, 2 or 3"));
    }
    if let Err(what) = pins.constraints.check(&request.model, n) {
        return fail(format!("constraints: {what}"));
    }
    if pins.gradients == Some(GradientsKind::Whole) && pins.zero != Some(3) {
        return fail(
            "gradients=whole is a way of zero=3: with others they are whole (0, 1) or cut (2)".into(),
        );
    }
    let experts = Facts::of(request).experts;
    if let Some(ep) = pins.ep.filter(|&ep| experts > 1 && ep > experts) {
        return fail(format!("ep={ep}: expected no more than the {experts} experts of a layer"));
    }
    let replicas = pins.dp.unwrap_or(n);
    if let Some(group) = pins.zero_group.filter(|&group| group == 0 || !replicas.is_multiple_of(group)) {
        return fail(format!("zero-group={group} does not divide the {replicas} replicas"));
    }
    if let Some(what) =
        contradiction(pins).or_else(|| forbid::contradiction(pins)).or_else(|| no_degree_left(request))
    {
        return fail(what);
    }
    if pins.offload == Some(OffloadKind::Nvme)
        && let Some(group) = request.cluster.groups.iter().position(|group| group.nvme.is_none())
    {
        return fail(format!(
            "offload=nvme: nodes of groups[{group}] of the cluster have no NVMe drives; say what they have in `nvme` there"
        ));
    }
    if pins.schedule.is_some_and(ScheduleKind::cuts_sequences)
        && let Err(error) = sliced_model(&request.model)
    {
        return fail(error.to_string());
    }
    match miscounted(request) {
        Some(what) => fail(what),
        None => Ok(()),
    }
}

/// The kind of parallelism of which every degree that the model and the devices have is forbidden, if there is one.
fn no_degree_left(request: &Request) -> Option<String> {
    let (forbid, n_devices) = (&request.pins.forbid, request.cluster.n_devices());
    let experts = Facts::of(request).experts;
    let kinds = [
        ("tp", &forbid.tp, n_devices),
        ("pp", &forbid.pp, request.model.n_layers()),
        ("dp", &forbid.dp, n_devices),
        ("cp", &forbid.cp, n_devices),
        ("ep", &forbid.ep, experts),
        ("etp", &forbid.etp, if experts == 1 { 1 } else { n_devices }),
    ];
    // Groups of devices have stages of their own, whose degrees need not divide all devices.
    let is_degree = |degree: &u64| request.cluster.groups.len() > 1 || n_devices.is_multiple_of(*degree);
    let left =
        |degrees: &Degrees, most: u64| (1..=most.min(n_devices)).filter(is_degree).any(|d| degrees.allows(d));
    let (name, _, most) = kinds.into_iter().find(|&(_, degrees, most)| !left(degrees, most))?;
    Some(match name {
        "ep" | "etp" if most == 1 => {
            format!("{name}=1 is forbidden, and `{}` has no experts to spread", request.model.name)
        }
        _ => format!("every {name} that {n_devices} devices have is forbidden"),
    })
}

/// Chunks of a stage, where what the user says leaves no choice.
fn chunks_of_a_stage(pins: &Pins) -> Option<u64> {
    let chunks = match pins.schedule {
        // Both copies of a chunk are the same layers.
        Some(ScheduleKind::Chimera) => Some(1),
        None | Some(ScheduleKind::Interleaved | ScheduleKind::BreadthFirst | ScheduleKind::Hanayo) => {
            pins.vpp
        }
        Some(other) => Some(other.default_virtual_stages()),
    };
    chunks.map(u64::from)
}

/// Why the layers that the user counts are no chunks of the model's, if they are not.
fn miscounted(request: &Request) -> Option<String> {
    let pins = &request.pins;
    let counts = pins.layers_per_stage.as_ref()?;
    let (n_counts, inner) = (counts.len() as u64, request.model.n_layers().saturating_sub(2));
    let all = counts.iter().fold(0, |all: u64, &count| all.saturating_add(count));
    let idle = counts.iter().take(counts.len().saturating_sub(1)).skip(1).position(|&count| count == 0);
    if let Some(at) = idle {
        return Some(format!(
            "layers per stage: count {} is 0; only the first and the last chunk have anything but decoder layers",
            at + 2
        ));
    }
    let of_stage = chunks_of_a_stage(pins);
    let n_chunks = pins.pp.zip(of_stage).map(|(pp, chunks)| pp.saturating_mul(chunks));
    if all != inner || n_chunks.is_some_and(|chunks| chunks != n_counts) {
        let expected = n_chunks.map_or_else(String::new, |chunks| format!("{chunks} "));
        return Some(format!(
            "layers per stage: expected {expected}counts that add up to {inner}, found {n_counts} that add up to {all}"
        ));
    }
    if let Some(pp) = pins.pp.filter(|&pp| !n_counts.is_multiple_of(pp)) {
        return Some(format!(
            "layers per stage: expected as many counts for each of {pp} stages, found {n_counts} in all"
        ));
    }
    let n_devices = request.cluster.n_devices();
    let divides = |&stages: &u64| match of_stage {
        Some(chunks) => stages > 1 && chunks.saturating_mul(stages) == n_counts,
        None => stages > 1 && n_counts.is_multiple_of(stages),
    };
    let is_possible = n_counts == 1 || divisors(n_devices).iter().any(divides);
    let each = of_stage.map_or_else(String::new, |chunks| format!(" at {chunks} a stage"));
    (!is_possible).then(|| {
        format!("layers per stage: no number of stages that divides the {n_devices} devices has {n_counts} chunks{each}")
    })
}

/// What to say where no schedule that is allowed has a table for any candidate.
pub(crate) fn no_schedule(request: &Request) -> String {
    let (pins, n_layers) = (&request.pins, request.model.n_layers());
    // Two copies of a stage are no virtual stages.
    let kind = pins.schedule.filter(|kind| *kind != ScheduleKind::Chimera);
    let usual = kind.map_or(1, ScheduleKind::default_virtual_stages);
    let each = u64::from(pins.vpp.unwrap_or(usual));
    match pins.pp.map(|pp| (pp, pp.saturating_mul(each))) {
        Some((pp, n_chunks)) if each > 1 && n_chunks > n_layers => format!(
            "such a schedule gives every virtual stage a layer, but {pp} stages of {each} virtual stages each are \
             {n_chunks}, where the model has {n_layers} layers, its ends among them: name fewer stages or virtual \
             stages, or another schedule"
        ),
        Some(_) | None => NO_SCHEDULE.into(),
    }
}

const NO_SCHEDULE: &str = "no pipeline can run the schedules that are allowed: interleaved needs micro-batches in multiples of the \
    stages, dualpipe-v two per stage, every virtual stage a layer, and all but 1f1b and gpipe two stages at least; vpp above 1 is \
    interleaved unless a schedule is named";

/// Why a request has no candidate.
pub(crate) fn no_candidate(request: &Request) -> String {
    let (pins, n_devices) = (&request.pins, request.cluster.n_devices());
    let (n_layers, close) = (request.model.n_layers(), request.cluster.n_close());
    let degrees = [("tp", pins.tp), ("pp", pins.pp), ("dp", pins.dp), ("cp", pins.cp), ("ep", pins.ep)];
    let pinned = degrees.into_iter().filter_map(|(name, pin)| Some((name, pin?)));
    let experts = Facts::of(request).experts;
    let why = |(name, degree): (&str, u64)| match name {
        _ if !n_devices.is_multiple_of(degree) => {
            Some(format!("{name}={degree} does not divide {n_devices} devices"))
        }
        "pp" if degree > n_layers => Some(format!("pp={degree}: the model has {n_layers} layers")),
        "tp" if degree > close => {
            Some(format!("tp={degree}: products are split among the {close} devices of a node"))
        }
        "ep" if degree > 1 && experts == 1 => Some(format!("ep={degree}: the model has no experts")),
        "ep" if degree > experts => Some(format!("ep={degree}: a layer has {experts} experts")),
        _ => None,
    };
    if let Some(why) = pinned.clone().find_map(why) {
        return why;
    }
    let forbidden =
        if pins.forbid.is_empty() { "" } else { ", and something of every mesh may be forbidden" };
    format!(
        "no mesh of the {n_devices} devices meets the pinned degrees for a global batch of {} sequences: the micro-batch of all \
         replicas must divide the global batch, and the degrees must multiply to the devices, or to a part of them that the others repeat\
         {forbidden}",
        request.job.global_batch
    )
}

/// What to say where the states of the model, however they are cut, are more than all devices hold; where hosts may
/// hold some, than these have room for as well. The gradients stay on devices.
pub(crate) fn states_overflow(scope: &Scope<'_>, request: &Request) -> Option<NoPlan> {
    let (cluster, model) = (&request.cluster, &request.model);
    let states = StateBytes::adamw(request.job.precision, request.job.engine.gradients);
    let (n_trained, n_parameters) = (model.n_trained() as f64, model.n_parameters() as f64);
    let gradients = states.gradient * n_trained;
    let others = states.cut_alike() * n_trained + states.parameter * (n_parameters - n_trained);
    let devices = cluster.device_memory();
    let n_devices = cluster.n_devices() as f64;
    let room = devices - Bytes(scope.reserve() * n_devices);
    let on_node = |group: &DeviceGroup| {
        let stores = [NodeStore::Host, NodeStore::Nvme].map(|store| store.capacity(group, scope.constants));
        stores.into_iter().sum::<Bytes>() * group.n_nodes() as f64
    };
    let elsewhere = match request.pins.offload {
        None | Some(OffloadKind::None) => Bytes::ZERO,
        Some(_) => cluster.groups.iter().map(on_node).sum(),
    };
    let needed = gradients + (others - elsewhere).max(Bytes::ZERO);
    let rest = if elsewhere > Bytes::ZERO { " that hosts have no room for" } else { "" };
    let (term, states) = match room > Bytes::ZERO {
        true => (format!("parameters, gradients and optimizer state{rest}"), needed),
        false => ("the reserve alone".to_owned(), Bytes::ZERO),
    };
    (needed > room).then(|| match without_experts(request) {
        Some(what) => NoPlan::Impossible { what },
        None => NoPlan::NothingFits {
            need: Need::Any,
            stage: 0,
            term,
            needed: states * (1.0 / n_devices) + Bytes(scope.reserve()),
            capacity: devices * (1.0 / n_devices),
            also: None,
            relaxations: Vec::new(),
            untried: None,
        },
    })
}

/// What to say of experts that are pinned to be spread in a model that has none, whatever its plans need.
pub(crate) fn without_experts(request: &Request) -> Option<String> {
    let degrees = [("ep", request.pins.ep), ("etp", request.pins.etp)];
    let (name, degree) = degrees.into_iter().find_map(|(name, pin)| Some((name, pin.filter(|&n| n > 1)?)))?;
    let is_dense = Facts::of(request).experts == 1;
    is_dense.then(|| format!("{name}={degree}: `{}` has no experts", request.model.name))
}

/// What the closest of the candidates would need that do not fit, all of them or those that there was time for.
pub(crate) fn nothing_fits(
    scope: &Scope<'_>,
    request: &Request,
    closest: Option<Dropped>,
    untried: Option<Untried>,
) -> NoPlan {
    if let Some(what) = without_experts(request) {
        return NoPlan::Impossible { what };
    }
    match closest {
        Some(Dropped::Memory { stage, term, needed, capacity, also }) if needed > capacity => {
            NoPlan::NothingFits {
                need: Need::Closest,
                stage,
                term: term.into(),
                needed: Bytes(needed + scope.reserve()),
                capacity: Bytes(capacity + scope.reserve()),
                also: also.map(Box::new),
                relaxations: Vec::new(),
                untried,
            }
        }
        Some(Dropped::Host { store, stage, needed, capacity }) => NoPlan::NothingFits {
            need: Need::Closest,
            stage,
            term: store.term().into(),
            needed: Bytes(needed),
            capacity: Bytes(capacity),
            also: None,
            relaxations: Vec::new(),
            untried,
        },
        Some(Dropped::Memory { .. } | Dropped::NoStrategy | Dropped::Slower) | None => {
            let pins = &request.pins;
            let is_asked = names_degrees(pins) || pins.pp.is_some() || !pins.forbid.is_empty();
            let way = match (&pins.layers_per_stage, is_asked) {
                (Some(counts), _) => &format!(
                    " with so many layers in each of {} chunks; interleaved needs micro-batches in multiples of the stages, and \
                     schedules other than 1f1b, interleaved, zb-v and dualpipe-v are asked for layers that are counted only if \
                     they are named",
                    counts.len()
                ),
                (None, true) => " as asked; try other degrees",
                (None, false) => "; try another number of devices",
            };
            let what =
                format!("no strategy divides the model over {} devices{way}", request.cluster.n_devices());
            NoPlan::Impossible { what }
        }
    }
}
