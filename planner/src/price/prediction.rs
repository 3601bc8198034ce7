//! The figures as a plan holds them: read off prices and the simulation, rounded nowhere.

use std::collections::BTreeMap;

use cost_model::memory::StateBytes;
use cost_model::program_bytes::CommunicationClass;
use cost_model::{CollectiveKind, energy, reliability};
use ir::cluster::{Device, DeviceGroup};
use ir::lower::{gets, gradient_tensors};
use ir::names::{Arrangement, PlacedLayer, Roles, roles};
use ir::op::OpKind;
use ir::op_work::{Counted, model_flops, useful};
use ir::plan::prediction::{Breakdown, Prediction, StagePrediction, Upkeep};
use ir::plan::shares;
use ir::signature::signature;
use ir::units::{Bytes, Seconds};

use crate::price::grounds::Grounds;
use crate::price::replicas::{self, Replica};
use crate::price::sent::bytes_sent;
use crate::price::setting::{Entry, Setting};
use crate::price::stage_memory::stage_memory;
use crate::price::staged::Staged;
use crate::price::step::Step;
use crate::prices::Machine;

/// All figures of a step.
pub fn prediction(setting: &Setting<'_>, staged: &Staged<'_>, step: &Step) -> Prediction {
    let cluster = setting.machine.cluster;
    let n = cluster.n_whole_devices() as f64;
    let time = step.time.0;
    let flops = StepFlops::of(setting, staged);
    let peak = mean_peak(setting);
    let stages = stages(setting, staged, step);
    let tokens = setting.job.sequence as f64 * setting.job.global_batch as f64;
    let all = |of: &dyn Fn(&DeviceGroup) -> Option<f64>| -> Option<f64> {
        cluster.groups.iter().map(|group| of(group).map(|one| one * group.count as f64)).sum()
    };
    let cost_per_step = all(&|group| group.price_per_device_hour).map(|price| price * time / 3600.0);
    let upkeep = upkeep(setting, staged, step);
    let goodput = upkeep.map_or(1.0, |upkeep| upkeep.goodput);
    Prediction {
        step_time_s: step.time,
        step_time_interval: None,
        breakdown: breakdown(staged, step),
        model_tflops_per_device: flops.model / time / n / 1e12,
        mfu: flops.model / time / n / peak,
        mfu_causal: flops.causal / time / n / peak,
        hfu: flops.run / time / n / peak,
        tokens_per_s_per_device: tokens / time / n,
        peak_memory_bytes: stages.iter().map(|stage| stage.peak_memory_bytes).fold(Bytes::ZERO, Bytes::max),
        bytes_per_tier: bytes_per_tier(&stages),
        stages,
        energy_per_step_joules: energy_of(setting, staged, step),
        cost_per_step,
        cost_per_trillion_tokens: cost_per_step.map(|cost| cost / tokens * 1e12 / goodput),
        upkeep,
        shares: replicas::reported(staged, &step.pipelines),
    }
}

/// Peak FLOP/s of a device; of the average one where they differ.
fn mean_peak(setting: &Setting<'_>) -> f64 {
    let Machine { cluster, device, precision, constants, .. } = &setting.machine;
    let peak = |device: &Device| cost_model::rates::peak(device, *precision, constants).0.0;
    if !cluster.shares_devices() && cluster.groups.iter().all(|group| group.device == **device) {
        return peak(device);
    }
    let whole = cluster.groups.iter().map(DeviceGroup::whole);
    let all: f64 = whole.map(|group| peak(&group.device) * group.count as f64).sum();
    all / cluster.n_whole_devices() as f64
}

/// Energy of a step, where all devices have a power limit: by stage, on the device that it is priced on.
fn energy_of(setting: &Setting<'_>, staged: &Staged<'_>, step: &Step) -> Option<f64> {
    if !staged.replicas.is_empty() {
        return staged
            .replicas
            .iter()
            .map(|replica| energy_of_replica(setting, staged, (step, replica)))
            .sum();
    }
    let grounds = Grounds::new(setting, staged.n_stages, staged.meshes);
    let of_stage = |stage: usize| {
        let n_devices = staged.meshes.of(stage as u64).n_devices();
        let cluster = setting.machine.cluster;
        let watts = match cluster.shares_devices() {
            false => grounds.at(stage).machine.device.watts? * n_devices as f64,
            true => {
                let own = |rank: u64| cluster.group_of(rank).and_then(|group| group.device.watts);
                staged.meshes.ranks(stage as u64).map(own).sum::<Option<f64>>()?
            }
        };
        let busy = busy(staged, stage) + step.parts.optimizer;
        Some(energy::joules(watts, step.time, busy, setting.machine.constants))
    };
    (0..staged.n_stages as usize).map(of_stage).sum()
}

/// The same of the devices of one replica.
fn energy_of_replica(
    setting: &Setting<'_>,
    staged: &Staged<'_>,
    (step, replica): (&Step, &Replica),
) -> Option<f64> {
    let own = staged.of(replica);
    let of_stage = |stage: usize| {
        let each = staged.meshes.of(stage as u64).stride(shares::AXIS);
        let watts = replica.stages[stage].watts? * (each * replica.coordinates.len() as u64) as f64;
        let busy = busy(&own, stage) + step.parts.optimizer;
        Some(energy::joules(watts, step.time, busy, setting.machine.constants))
    };
    (0..staged.n_stages as usize).map(of_stage).sum()
}

/// What a device of a stage computes of a step, the update apart.
fn busy(staged: &Staged<'_>, stage: usize) -> Seconds {
    let of_run = |(entry, count, times): (&Entry, u64, f64)| {
        let sections = std::iter::once(&entry.price.forward).chain(entry.backward());
        let once: Seconds = sections.map(|section| section.compute.total()).sum();
        once * (count as f64 * times)
    };
    staged.passes(stage).map(of_run).sum()
}

/// Checkpoints and failures of a long training, where the cluster says how often devices fail.
fn upkeep(setting: &Setting<'_>, staged: &Staged<'_>, step: &Step) -> Option<Upkeep> {
    let (cluster, job) = (setting.machine.cluster, &setting.job);
    let between_failures = reliability::between_failures(cluster)?;
    let states = StateBytes::adamw(job.precision, job.engine.gradients);
    let constants = setting.machine.constants;
    let checkpoint = reliability::checkpoint(staged.model.n_trained() as f64, states, cluster, constants);
    let restart = constants.restart_s;
    let job = reliability::Upkeep { between_failures, stall: checkpoint.stall, restart };
    // There is nothing new to save within a step.
    let interval = job.daly().max(checkpoint.write).max(step.time);
    Some(Upkeep {
        between_failures_s: between_failures,
        checkpoint_bytes: checkpoint.bytes,
        checkpoint_stall_s: checkpoint.stall,
        checkpoint_interval_s: interval,
        goodput: job.goodput(interval),
    })
}

/// FLOPs of a step on all devices.
struct StepFlops {
    /// The model's, attention counted twice as often as its mask asks: as the full square, where no window is shorter.
    model: f64,
    /// The model's, attention counted as its causal half.
    causal: f64,
    /// Those that are run, recomputation included.
    run: f64,
}

impl StepFlops {
    /// Forward once and backward twice, as Megatron counts: 6 per active parameter and token without the input
    /// embedding, head once, plus attention (Narayanan et al. 2021, arXiv 2104.04473, appendix). Of a product with a
    /// frozen weight backward is once: that weight's gradient is no work of the model.
    fn of(setting: &Setting<'_>, staged: &Staged<'_>) -> Self {
        let mut flops = Self { model: 0.0, causal: 0.0, run: 0.0 };
        for (entry, count) in staged.entries.iter().zip(staged.counts()) {
            let layer = &staged.model.layers[entry.kind];
            let sizes = layer.sizes(staged.micro_batch, setting.job.sequence);
            let times = count as f64 * staged.n_micro_batches as f64;
            let gradients = gradient_tensors(layer);
            for id in layer.op_ids() {
                let op = &layer.ops[id.0];
                if !matches!(op.kind, OpKind::Linear | OpKind::Attention { .. }) {
                    continue;
                }
                let sig = signature(layer, op);
                let of = |counted| model_flops(layer, op, &sig, &sizes, counted) * times;
                let useful = useful(layer, &sig, &sizes);
                let n_gradients = gets(op, &gradients).into_iter().filter(|gets| *gets).count().min(2);
                let passes = 1.0 + n_gradients as f64;
                flops.model += passes * useful * of(Counted::Twice);
                flops.causal += passes * useful * of(Counted::Once);
                let again = if entry.again.contains(&id) { 1.0 } else { 0.0 };
                flops.run += (passes + again) * of(Counted::Twice);
            }
        }
        flops
    }
}

/// Seconds of the stage that sets the pace, by what they are spent on; adds up to the step.
pub fn breakdown(staged: &Staged<'_>, step: &Step) -> Breakdown {
    let parts = &step.parts;
    let mut found = Breakdown {
        bubble_s: parts.bubble,
        gradient_sync_s: parts.gradient_sync,
        parameter_gather_s: parts.parameter_gather,
        optimizer_s: parts.optimizer,
        offload_s: parts.offload,
        host_s: parts.host,
        other_s: parts.jitter,
        ..Breakdown::default()
    };
    let staged = &staged.at(parts.slowest_replica);
    for (entry, count, times) in staged.passes(parts.slowest_stage) {
        let times = count as f64 * times;
        let (forward, backward) = (&entry.price.forward, entry.backward());
        found.compute_forward_s += (forward.compute.total() - forward.compute.recompute) * times;
        for section in &backward {
            found.compute_backward_s += (section.compute.total() - section.compute.recompute) * times;
        }
        let again: Seconds = backward.iter().map(|section| section.compute.recompute).sum();
        found.recompute_s += (forward.compute.recompute + again) * times;
        for section in std::iter::once(forward).chain(backward) {
            for ((class, kind), one) in &section.communication {
                *found.exposed_communication_s.entry(communication_name(*class, *kind)).or_default() +=
                    one.exposed * times;
            }
            found.host_s += section.waiting() * times;
            found.host_links_s += section.waiting_for_host() * times;
        }
    }
    found.exposed_communication_s.insert("pipeline send/receive".into(), parts.sends);
    found.exposed_communication_s.insert("pipeline conversion".into(), parts.takeover);
    found.exposed_communication_s.retain(|_, time| time.0 > 0.0);
    found
}

fn communication_name(class: CommunicationClass, kind: CollectiveKind) -> String {
    let kind = match kind {
        CollectiveKind::AllReduce => "all-reduce",
        CollectiveKind::AllGather => "all-gather",
        CollectiveKind::ReduceScatter => "reduce-scatter",
        CollectiveKind::AllToAll => "all-to-all",
        CollectiveKind::SendRecv => "send/receive",
        CollectiveKind::Broadcast => "broadcast",
    };
    format!("{} {kind}", class.name())
}

fn stages(setting: &Setting<'_>, staged: &Staged<'_>, step: &Step) -> Vec<StagePrediction> {
    let most = staged.replicas.iter().map(|replica| replica.n_micro_batches).max();
    let busiest = Staged { n_micro_batches: most.unwrap_or(staged.n_micro_batches), ..*staged };
    let sent = bytes_sent(setting, &busiest);
    let slowest = &staged.at(step.parts.slowest_replica);
    let tiers = &setting.machine.cluster.tiers;
    let grounds = Grounds::new(setting, staged.n_stages, staged.meshes);
    let differ = differ(staged);
    let one = |stage: usize| {
        let of_all = || (stage_memory(setting, staged, stage, &step.held[stage]), grounds.at(stage).memory);
        let (memory, capacity) = replicas::fullest(setting, staged, stage).unwrap_or_else(of_all);
        let time = |of: &dyn Fn(&Entry) -> Seconds| slowest.sum(stage, of);
        StagePrediction {
            layers: staged.runs(stage).map(|(_, count)| count).sum(),
            forward_s: time(&Entry::forward_seconds),
            backward_s: time(&Entry::backward_seconds),
            peak_memory_bytes: memory.total(),
            capacity_bytes: Bytes(capacity),
            host_memory_bytes: memory.on_node.host,
            nvme_bytes: memory.on_node.nvme,
            memory: categories(memory),
            bytes_per_tier: tiers.iter().map(|tier| tier.name.clone()).zip(sent[stage].clone()).collect(),
            roles: differ.then(|| stage_roles(staged, stage)),
        }
    };
    (0..staged.n_stages as usize).map(one).collect()
}

/// Whether some chunk takes the stream over in another sharding than that in which it arrives: only there may stages
/// cut their work in different ways.
fn differ(staged: &Staged<'_>) -> bool {
    staged.crossings().iter().any(|crossing| staged.is_converted(crossing))
}

/// A stage in the literature's words.
fn stage_roles(staged: &Staged<'_>, stage: usize) -> Roles {
    roles(&Arrangement {
        mesh: staged.meshes.of(stage as u64),
        layers: staged
            .runs(stage)
            .map(|(entry, count)| PlacedLayer {
                layer: &staged.model.layers[entry.kind],
                choice: &entry.choice,
                count,
            })
            .collect(),
        n_stages: staged.n_stages,
        schedule: staged.schedule,
        micro_batch: staged.micro_batch,
        n_micro_batches: staged.n_micro_batches,
    })
}

fn categories(memory: cost_model::MemoryBreakdown) -> BTreeMap<String, Bytes> {
    let activations =
        memory.activations.into_iter().map(|(kind, bytes)| (format!("activations: {kind}"), bytes));
    let others = [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("logits", memory.logits),
        ("gathered units", memory.gathered_units),
        ("buffers", memory.buffers),
        ("reserve", memory.reserve),
    ];
    activations.chain(others.map(|(name, bytes)| (name.to_owned(), bytes))).collect()
}

/// Bytes that a device sends in a step, per tier: those of the stage whose devices send most there.
fn bytes_per_tier(stages: &[StagePrediction]) -> BTreeMap<String, Bytes> {
    let mut most: BTreeMap<String, Bytes> = BTreeMap::new();
    for (tier, bytes) in stages.iter().flat_map(|stage| &stage.bytes_per_tier) {
        let known = most.entry(tier.clone()).or_default();
        *known = known.max(*bytes);
    }
    most
}
