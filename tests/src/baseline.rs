//! A rule-of-thumb planner: what Megatron-LM's authors advise to people who choose by hand, priced by our model.
//!
//! Narayanan et al. 2021 (SC21, arXiv 2104.04473, takeaways 1-3) and Korthikanti et al. 2022 (arXiv 2205.05198):
//! - as much model parallelism as the model needs to fit, and no more; the rest of the devices is data parallel;
//! - tensor parallelism first, up to the devices of a node, with sequence parallelism; then pipeline stages;
//! - interleaved stages where there is a pipeline;
//! - selective recomputation; full only where nothing else fits;
//! - the optimizer's states cut over replicas; experts over replicas as far as they divide;
//! - the micro-batch is found by trying a few.
//!
//! It is generous to the rule: of the micro-batches and virtual stages that it tries, the fastest by our model counts.

use cost_model::Constants;
use frontends::{Size, read_cluster, read_model, rescale, shipped_cluster, shipped_model};
use ir::units::Seconds;
use ir::vocabulary::{MULTIPLE, pad};
use planner::request::{
    AxesKind, Job, OffloadKind, Pins, RecomputeKind, Request, ScheduleKind, SequenceParallel, Solver,
};
use planner::shapes::{Facts, divisors};

/// Sequences of a micro-batch that are tried.
const MICRO_BATCHES: [u64; 4] = [1, 2, 4, 8];

/// Stages that are tried at most; published runs have fewer.
const MAX_STAGES: u64 = 64;

/// The question of a shipped model on so many devices of a shipped cluster.
pub fn question(model: &str, cluster: &str, devices: u64) -> Option<Request> {
    let mut model = read_model(model, shipped_model(model)?.text).ok()?;
    pad(&mut model, MULTIPLE);
    let cluster = read_cluster(cluster, shipped_cluster(cluster)?.text).ok()?;
    let cluster = rescale(&cluster, Size::Devices(devices)).ok()?;
    let job = Job::defaults(&model, &cluster);
    Some(Request { model, cluster, job, pins: Pins::default(), solver: Solver::Structured })
}

/// Step time of the plan that is found.
pub fn found(request: &Request) -> Option<Seconds> {
    let plan = planner::optimize_with(request, &Constants::load(), &|_| ()).ok()?;
    Some(plan.predicted?.step_time_s)
}

/// Step time of the plan that the rule makes, and its choices; nothing where no size of the rule fits.
pub fn by_rule(request: &Request) -> Option<(Seconds, Pins)> {
    let recomputes = [RecomputeKind::Selective, RecomputeKind::Full];
    recomputes.into_iter().find_map(|recompute| {
        let sizes = model_parallel(request).into_iter();
        sizes.filter_map(|(tp, pp)| fastest(request, (tp, pp), recompute)).next()
    })
}

/// Tensor and pipeline degrees in the order in which the rule tries them.
fn model_parallel(request: &Request) -> Vec<(u64, u64)> {
    let n = request.cluster.n_devices();
    let node = request.cluster.n_close().min(n);
    let inner = request.model.n_layers().saturating_sub(2);
    let tensor = divisors(node).into_iter().filter(|tp| tp.is_power_of_two());
    let widest = tensor.clone().max().unwrap_or(1);
    let stages = divisors(n / widest).into_iter().filter(|pp| *pp > 1 && *pp <= MAX_STAGES.min(inner));
    tensor.map(|tp| (tp, 1)).chain(stages.map(|pp| (widest, pp))).collect()
}

/// The fastest of the micro-batches and virtual stages that fit.
fn fastest(request: &Request, (tp, pp): (u64, u64), recompute: RecomputeKind) -> Option<(Seconds, Pins)> {
    let dp = request.cluster.n_devices() / (tp * pp);
    let facts = Facts::new(&request.model, request.job.sequence, request.cluster.n_close());
    let ep = divisors(dp).into_iter().filter(|ep| facts.experts.is_multiple_of(*ep)).max().unwrap_or(1);
    let stages: &[u32] = if pp > 1 { &[1, 2] } else { &[1] };
    let all = MICRO_BATCHES.iter().flat_map(|&micro_batch| stages.iter().map(move |&vpp| (micro_batch, vpp)));
    let priced = all.filter_map(|(micro_batch, vpp)| {
        let pins = Pins {
            tp: Some(tp),
            pp: Some(pp),
            dp: Some(dp),
            cp: Some(1),
            ep: Some(ep),
            etp: Some(if facts.experts > 1 && ep == 1 { tp } else { 1 }),
            vpp: Some(vpp),
            micro_batch: Some(micro_batch),
            schedule: Some(if vpp > 1 { ScheduleKind::Interleaved } else { ScheduleKind::OneFOneB }),
            recompute: Some(recompute),
            zero: Some(1),
            offload: Some(OffloadKind::None),
            axes: Some(AxesKind::Named),
            sequence_parallel: (tp > 1).then_some(SequenceParallel::On),
            ..Pins::default()
        };
        let time = found(&Request { pins: pins.clone(), ..request.clone() })?;
        Some((time, pins))
    });
    priced.min_by(|a, b| a.0.0.total_cmp(&b.0.0))
}
