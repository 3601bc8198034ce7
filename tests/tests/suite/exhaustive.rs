//! The whole search against brute force: every candidate worked out, none ruled out by its bound.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use cost_model::Constants;
use frontends::{Size, read_cluster, read_model, rescale, shipped_cluster, shipped_model};
use ir::cluster::Nvme;
use ir::engine::{Dispatch, Engine, ExchangeOverlap, ParameterSpread, TensorOverlap};
use ir::units::{Bytes, BytesPerSecond, Seconds};
use planner::bound::Bound;
use planner::candidate::{Candidate, Scope, micro_batches};
use planner::forms::Forms;
use planner::given::StorageRule;
use planner::request::{
    AxesKind, Job, OffloadKind, Pins, Progress, RecomputeKind, Request, ScheduleKind, SharesKind, Solver,
    SplitKind,
};
use planner::room::{Effort, Together};
use planner::shapes::{Facts, divisors, shapes};
use planner::split_schedules::KINDS;

pub(crate) fn question(model: &str, cluster: &str, devices: u64, global_batch: u64) -> Request {
    let model = read_model(model, shipped_model(model).unwrap().text).unwrap();
    let cluster = read_cluster(cluster, shipped_cluster(cluster).unwrap().text).unwrap();
    let cluster = rescale(&cluster, Size::Devices(devices)).unwrap();
    let job = Job { global_batch, ..Job::defaults(&model, &cluster) };
    Request { model, cluster, job, pins: Pins::default(), solver: Solver::Structured }
}

/// The question under one schedule.
fn under(asked: &Request, schedule: ScheduleKind) -> Request {
    let pins = Pins { schedule: Some(schedule), ..asked.pins.clone() };
    Request { pins, ..asked.clone() }
}

/// The question in the plain space: what splits backward is a space of its own for every schedule.
fn unsplit(mut asked: Request) -> Request {
    if asked.pins.schedule.is_none() {
        asked.pins.split_backward = Some(SplitKind::None);
    }
    asked
}

/// All candidates, however few micro-batches they have.
fn candidates(request: &Request) -> Vec<Candidate> {
    let n_devices = request.cluster.n_devices();
    let facts = Facts::new(&request.model, request.job.sequence, request.cluster.tiers[0].devices);
    let mut list = Vec::new();
    for n_stages in divisors(n_devices).into_iter().filter(|p| request.pins.pp.is_none_or(|pin| pin == *p)) {
        for shape in shapes(n_devices / n_stages, facts, &request.pins) {
            for micro_batch in micro_batches(request, &shape, n_stages) {
                let n_micro_batches = request.job.global_batch / micro_batch;
                list.push(Candidate {
                    shape: shape.clone(),
                    meshes: Vec::new(),
                    n_stages,
                    micro_batch,
                    n_micro_batches,
                });
            }
        }
    }
    list
}

/// Choices for short memory are rarely faster than the fastest by their prices, which miss some of what programs hide:
/// of 451 candidates that crowd memory five took less than where it is free, 5 % at most, and 8 % with one storage for
/// all parameters.
const MISSED: f64 = 1.1;

/// What every candidate comes to.
struct Brute {
    /// What none of them is faster than.
    bound: f64,
    /// The fastest.
    best: f64,
    /// The fastest with one storage for all parameters.
    stored: f64,
    /// Candidates that fit.
    n_worked_out: usize,
    /// Of these, candidates whose bound is higher in the memory that there is.
    n_crowded: usize,
}

/// Works out every candidate and holds each to its bound.
fn brute(request: &Request) -> Brute {
    let constants = Constants::load().under(request.job.engine);
    let scope = Scope::new(request, &constants).unwrap();
    let mut all = Brute {
        bound: f64::INFINITY,
        best: f64::INFINITY,
        stored: f64::INFINITY,
        n_worked_out: 0,
        n_crowded: 0,
    };
    let (free, mut n_missed) = (scope.with_free_memory(), 0);
    let mut bounded: Vec<(Candidate, Bound)> = Vec::new();
    // The largest micro-batch of a mesh first.
    for candidate in candidates(request).into_iter().rev() {
        let Some(of) = scope.bound(&candidate, Forms::All) else { continue };
        let Ok(arranged) = scope.evaluate(&candidate, &of, Forms::All) else { continue };
        let (bound, time) = (of.time.0, arranged.step_time().0);
        assert!(bound <= time, "bound {bound} above {time} of {candidate:?}");
        if !arranged.schedule.splits_backward() {
            let least = planner::price::step::least(&scope.setting, &arranged.staged(&scope.wide)).0;
            assert!(least <= time * (1.0 + 1e-9), "{least} above {time} of {candidate:?}");
        }
        // In its own memory, and as one of those that divide the micro-batch of another on its mesh.
        let limit = |together| ((Forms::All, together, Effort::Thorough), Seconds(time * 1.05));
        let apart = limit(Together::Schedule);
        let in_room = scope.bound_in_room((&candidate, &of), &candidate, apart).unwrap_or(of.time);
        assert!(in_room.0 <= time, "{in_room:?} in room above {time} of {candidate:?}");
        all.n_crowded += usize::from(in_room > of.time);
        let freely = free
            .as_ref()
            .filter(|_| of.crowding > 0.6)
            .map_or(0.0, |free| free.time_freely(&candidate, &of, (Forms::All, Seconds(f64::INFINITY))).0);
        assert!(freely <= time * MISSED, "{freely} where memory is free, above {time} of {candidate:?}");
        n_missed += usize::from(freely > time * 1.001);
        let larger = bounded.iter().filter(|(other, _): &&(Candidate, Bound)| {
            let on_one = other.shape == candidate.shape && other.n_stages == candidate.n_stages;
            on_one && other.stands_for(&candidate, request.job.sequence)
        });
        for (other, of) in larger {
            let Some(in_room) = scope.bound_in_room((other, of), &candidate, limit(Together::Family)) else {
                continue;
            };
            assert!(in_room.0 <= time, "{in_room:?} by {other:?} above {time} of {candidate:?}");
        }
        bounded.push((candidate.clone(), of.clone()));
        all.bound = all.bound.min(in_room.0);
        all.best = all.best.min(time);
        all.n_worked_out += 1;
        let all_storages = [StorageRule::Optimizer, StorageRule::Gradient, StorageRule::Parameter];
        for storage in all_storages.into_iter().filter(|_| request.pins.zero.is_none()) {
            let stored = scope.evaluate_stored(&candidate, &of, (Forms::All, storage));
            let Ok(time) = stored.map(|arranged| arranged.step_time().0) else { continue };
            assert!(bound <= time, "bound {bound} above {time} of {candidate:?}, {storage:?}");
            assert!(in_room.0 <= time, "{in_room:?} above {time} of {candidate:?}, {storage:?}");
            assert!(freely <= time * MISSED, "{freely} where memory is free, above {time} of {candidate:?}");
            all.stored = all.stored.min(time);
        }
    }
    assert!(n_missed * 20 <= all.n_worked_out + 20, "{n_missed} of {}", all.n_worked_out);
    all
}

/// Holds the search for the first request to the fastest of all candidates of all requests, which is never below all
/// their bounds; how many times the fastest of these, storages tried, it takes, and how many crowd memory.
#[track_caller]
fn assert_search_is_exhaustive_over(requests: &[Request]) -> (f64, usize) {
    let requests: Vec<Request> = requests.iter().cloned().map(unsplit).collect();
    let all: Vec<Brute> = requests.iter().map(brute).collect();
    assert!(all.iter().map(|one| one.n_worked_out).sum::<usize>() > 1);
    let least = |of: fn(&Brute) -> f64| all.iter().map(of).fold(f64::INFINITY, f64::min);
    let (best, stored, bound) = (least(|one| one.best), least(|one| one.stored), least(|one| one.bound));
    let plan = planner::optimize(&requests[0], &|_: Progress| ()).unwrap();
    let time = plan.predicted.unwrap().step_time_s.0;
    assert!(bound <= time && time <= best, "{time} of {best}, not below {bound}");
    let search = plan.search.unwrap();
    assert!(search.lower_bound_s.0 <= time, "{search:?}");
    assert_eq!(search.n_bounded + search.n_unfit + search.n_simulated, search.n_candidates, "{search:?}");
    (time / best.min(stored), all.iter().map(|one| one.n_crowded).sum())
}

/// The same for one request; how many of its candidates crowd memory.
#[track_caller]
fn assert_search_is_exhaustive(request: &Request) -> usize {
    let (part, n_crowded) = assert_search_is_exhaustive_over(std::slice::from_ref(request));
    assert!(part >= 1.0, "{part} of the fastest that is worked out");
    n_crowded
}

#[test]
fn a_tied_model_on_two_devices() {
    assert_search_is_exhaustive(&question("gpt2", "dgx-h100", 2, 16));
}

#[test]
fn a_tied_model_on_four_devices() {
    assert_search_is_exhaustive(&question("gpt2", "dgx-a100-40", 4, 64));
}

/// Micro-batches that some axes cut where the next larger one cannot be.
#[test]
fn a_batch_of_many_divisors() {
    assert_search_is_exhaustive(&question("llama-2-7b", "dgx-h100", 8, 40));
}

#[test]
fn a_model_that_barely_fits() {
    assert_search_is_exhaustive(&question("llama-3-8b", "dgx-h100", 8, 64));
}

#[test]
fn a_model_whose_every_byte_has_a_price() {
    let asked = question("llama-2-13b", "dgx-a100-40", 8, 16);
    assert!(assert_search_is_exhaustive(&asked) > 1);
}

/// What hosts may hold of optimizer states and of what layers keep, and where they must hold the latter.
#[test]
fn a_model_whose_hosts_have_room() {
    let asked = question("llama-2-7b", "dgx-a100-40", 4, 8);
    for offload in [OffloadKind::Allowed, OffloadKind::Activations] {
        let pins = Pins { offload: Some(offload), ..Pins::default() };
        assert_search_is_exhaustive(&Request { pins, ..asked.clone() });
    }
}

/// Hosts too small for the states that devices cannot hold, and drives behind them.
#[test]
fn a_model_whose_hosts_have_drives() {
    let mut asked = question("llama-2-7b", "dgx-a100-40", 2, 4);
    let rate = BytesPerSecond(50e9);
    asked.cluster.groups[0].host_memory_bytes = Bytes(40e9);
    asked.cluster.groups[0].nvme =
        Some(Nvme { capacity_bytes: Bytes(1e13), read_bytes_per_s: rate, write_bytes_per_s: rate });
    for offload in [OffloadKind::Allowed, OffloadKind::Nvme] {
        let pins = Pins { offload: Some(offload), ..Pins::default() };
        let request = Request { pins, ..asked.clone() };
        let plan = planner::optimize(&request, &|_: Progress| ()).unwrap();
        assert!(!plan.roles.optimizer_on_nvme.is_none(), "{}", plan.roles);
        let (part, _) = assert_search_is_exhaustive_over(std::slice::from_ref(&request));
        // The search looks at the best in more ways.
        assert!((0.99..=1.0).contains(&part), "{part} of the fastest that is worked out");
    }
}

#[test]
fn a_model_on_two_nodes() {
    assert_search_is_exhaustive(&question("gemma-2-9b", "dgx-h100", 16, 32));
}

/// Micro-batches of fewer sequences than devices that are to split them: all compute the same, which is faster than
/// slow links, and larger ones say nothing of it.
#[test]
fn micro_batches_that_devices_cannot_split() {
    let mut asked = question("megatron-3.6b", "tpu-v4", 1, 16);
    asked.cluster.groups[0].count *= 4;
    asked.cluster.tiers.last_mut().unwrap().devices *= 4;
    let pins = Pins {
        tp: Some(1),
        pp: Some(1),
        zero: Some(2),
        recompute: Some(RecomputeKind::None),
        offload: Some(OffloadKind::None),
        ..Pins::default()
    };
    assert_search_is_exhaustive(&Request { pins, ..asked });
}

/// Stages go on when they have sent, over a link on which that takes long.
#[test]
fn stages_that_wait_for_what_they_send() {
    let (part, _) = assert_search_is_exhaustive_over(&[question("gpt2", "rtx4090-x8", 16, 16)]);
    // The best chooses as if some part of all that a step sends once showed, which nobody tries above.
    assert!((0.8..=1.0).contains(&part), "{part} of the fastest that is worked out");
}

/// Every schedule that splits backward, where memory is free and where it is crowded.
#[test]
fn pipelines_whose_backward_is_split() {
    for kind in KINDS.into_iter().chain([ScheduleKind::VHalf, ScheduleKind::VMin]) {
        assert_search_is_exhaustive_over(&[under(&question("gpt2", "rtx4090-x8", 8, 16), kind)]);
        let crowded = under(&question("llama-2-7b", "dgx-a100-40", 8, 16), kind);
        let (_, n_crowded) = assert_search_is_exhaustive_over(&[crowded]);
        assert!(n_crowded > 0, "{kind:?}");
    }
}

#[test]
fn a_model_with_experts() {
    assert_search_is_exhaustive(&question("qwen3-30b-a3b", "dgx-h200", 8, 16));
}

/// A token crosses to a node once, and experts of one micro-batch compute while tokens of another travel.
#[test]
fn tokens_sent_once_to_a_node_beside_another_micro_batch() {
    let asked = question("qwen3-30b-a3b", "dgx-h100", 16, 16);
    let by_node = Engine { dispatch: Dispatch::PerNode, ..asked.job.engine };
    let engine = Engine { exchange_overlap: ExchangeOverlap::Beside, ..by_node };
    assert_search_is_exhaustive(&Request { job: Job { engine, ..asked.job }, ..asked });
}

#[test]
fn gradients_that_hide_behind_other_layers() {
    // One micro-batch on slow links: what a step reduces once is as long as its backward, but not of every layer.
    let asked = question("llama-2-7b", "dgx1-v100", 16, 16);
    assert_search_is_exhaustive(&Request { job: Job { sequence: 1024, ..asked.job }, ..asked });
}

/// Few tokens, so that a step takes what sending parameters and gradients takes, and in an engine that puts norms
/// together from kernels.
#[test]
fn parameters_that_take_longer_to_gather_than_to_use() {
    let asked = question("llama-3-8b", "dgx-h100", 8, 64);
    let pins = Pins { zero: Some(3), ..Pins::default() };
    for engine in [asked.job.engine, Engine::FSDP] {
        let job = Job { sequence: 256, engine, ..asked.job };
        assert_search_is_exhaustive(&Request { job, pins: pins.clone(), ..asked.clone() });
    }
}

#[test]
fn products_in_chunks_beside_their_gathers() {
    let asked = question("gpt2", "dgx-a100-40", 8, 16);
    let engine = Engine { tensor_overlap: TensorOverlap::Chunked, ..asked.job.engine };
    assert_search_is_exhaustive(&Request { job: Job { engine, ..asked.job }, ..asked });
}

#[test]
fn parameters_broadcast_by_those_who_update_them() {
    let asked = question("gpt2", "dgx-a100-40", 16, 64);
    let engine = Engine { parameter_spread: ParameterSpread::Broadcast, ..asked.job.engine };
    assert_search_is_exhaustive(&Request { job: Job { engine, ..asked.job }, ..asked });
}

#[test]
fn gradients_reduced_when_all_is_computed() {
    let asked = question("gpt2", "dgx-a100-40", 4, 64);
    assert_search_is_exhaustive(&Request { job: Job { engine: Engine::MEGATRON_LM, ..asked.job }, ..asked });
}

/// The request on some of the groups of its cluster, in an order.
fn on_groups(request: &Request, order: &[usize]) -> Request {
    let mut other = request.clone();
    other.cluster.groups = order.iter().map(|&at| request.cluster.groups[at].clone()).collect();
    let n = other.cluster.n_devices();
    other.cluster.tiers.last_mut().unwrap().devices = n;
    other
}

#[test]
fn a_model_on_two_kinds_of_devices() {
    let mut asked = question("gpt2", "mixed-a100-v100", 16, 32);
    // Unequal shares have no bound of their own (`share_plans`).
    asked.pins.shares = Some(SharesKind::Equal);
    let others = [&[1, 0][..], &[0], &[1]].map(|order| on_groups(&asked, order));
    let (part, _) = assert_search_is_exhaustive_over(&[&[asked], &others[..]].concat());
    // What is reduced over slow links shows: the search is faster by choices of the lower bound, which brute force
    // leaves out.
    assert!(part > 0.99, "{part} of the fastest that is worked out");
}

#[test]
fn replicas_whose_gradients_are_cut_where_memory_is_short() {
    let mut asked = on_groups(&question("llama-2-7b", "mixed-a100-v100", 32, 256), &[0]);
    // Named axes alone are candidates here: free ones that come to the same degrees are asked after them.
    let axes = Some(AxesKind::Named);
    asked.pins = Pins { cp: Some(1), tp: Some(1), micro_batch: Some(1), axes, ..Pins::default() };
    assert_search_is_exhaustive(&asked);
}
