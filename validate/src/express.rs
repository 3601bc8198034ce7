//! From a row to the question that `estimate` would be asked, with the engine that the source describes.
//!
//! What a source leaves open (recomputation, micro-batch, virtual stages) becomes several questions; the fastest plan
//! that fits in the devices' memory stands for the row. Nothing is chosen by its error.

use std::collections::BTreeMap;

use ir::cluster::Precision;
use ir::engine::{
    Accumulation, Copies, Dispatch, Engine, ExchangeOverlap, Experts, FlashKernel, Generation,
    GradientFormat, GradientOverlap, GradientReduction, Kernels, Launches, LossKernel, ParameterSpread,
    Recomputation, StageOutputs, TensorOverlap,
};
use ir::work::AttentionKernel;
use planner::constraints::{Constraints, Kept, LayerConstraints};
use planner::request::{
    AxesKind, Forbid, GradientsKind, Job, OffloadKind, Pins, RecomputeKind, Request, ScheduleKind,
    SequenceParallel, Solver,
};
use planner::single_layers::single_layers;

use crate::express_cluster::{Memory, cluster};
use crate::express_model::model;
use crate::row::Row;

/// Why a row is not priced.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Reason {
    /// The model cannot be written.
    #[error("model: {0}")]
    Model(String),
    /// The machines are not known.
    #[error("machines: {0}")]
    Cluster(String),
    /// A number format without rates.
    #[error("precision {0}")]
    Precision(String),
    /// More than one thing that a price needs is not stated.
    #[error("the source states too little of the run (column complete: 0)")]
    Incomplete,
    /// A cell that every price needs is empty.
    #[error("column {0}: expected a number, found nothing")]
    Unstated(&'static str),
    /// No time was measured.
    #[error("no time was measured")]
    NoTime,
    /// The planner finds no such plan.
    #[error("plan: {0}")]
    Plan(String),
}

/// Software whose kernels are chosen to give the same result every time.
pub(crate) const DETERMINISTIC: &str = "megatron-core-deterministic";

/// Operators of Megatron's recompute module `mla_up_proj`: projections up from the ranks, rotated and put together
/// (NVIDIA/Megatron-LM megatron/core/transformer/moe/README.md).
const MLA_UP: [&str; 6] = [
    "attention.q",
    "attention.q_rope",
    "attention.k",
    "attention.v",
    "attention.k_rope",
    "attention.k_append",
];

/// Of its module `mlp`.
const MLP: [&str; 3] = ["mlp.gate", "mlp.up", "mlp.glu"];

/// What torchtitan keeps of a layer where it checkpoints by operator: the attention core and every second product, in
/// the order in which a layer runs them, from the first on (pytorch/torchtitan
/// torchtitan/parallelisms/parallelize_llama.py at 9dec370, `_save_list` and `_get_custom_policy`).
const SECOND_PRODUCTS: [&str; 5] = ["attention.q", "attention.v", "attention.core", "mlp.gate", "mlp.down"];

/// What MaxText keeps under `remat_policy=minimal`: products with weights (`checkpoint_dots_with_no_batch_dims`).
const PRODUCTS: [&str; 7] =
    ["attention.q", "attention.k", "attention.v", "attention.out", "mlp.up", "mlp.down", "mlp.gate"];

/// Virtual stages that are tried where a source leaves them open.
const VIRTUAL_STAGES: [u32; 6] = [1, 2, 3, 4, 6, 8];

/// Micro-batches that are tried where a source leaves them open.
const MICRO_BATCHES: [u64; 4] = [1, 2, 4, 8];

/// The questions of a row: one where everything is stated. The first list that has a plan counts: recomputing less is
/// faster where it fits.
///
///
/// # Errors
/// Why there is none.
pub fn questions(row: &Row) -> Result<Vec<Vec<Request>>, Reason> {
    if row.complete == 0 {
        return Err(Reason::Incomplete);
    }
    let (recompute, micro_batches, virtual_stages) = open_choices(row);
    // What fits decides what is open; what is stated has fit.
    let stated = recompute.len() == 1 && micro_batches.len() == 1;
    let memory = if stated { Memory::Unlimited } else { Memory::Listed };
    let constraints = Constraints { layers: again(row) };
    let model = single_layers(&model(row)?, &constraints).map_err(Reason::Model)?;
    let cluster = cluster(row, memory)?;
    let job = job(row)?;
    let mut lists = Vec::new();
    for &recompute in &recompute {
        let mut list = Vec::new();
        for &micro_batch in &micro_batches {
            for &vpp in &virtual_stages {
                let pins = pins(row, recompute, (micro_batch, vpp))?;
                let (model, cluster) = (model.clone(), cluster.clone());
                list.push(Request { model, cluster, job, pins, solver: Solver::Structured });
            }
        }
        lists.push(list);
    }
    Ok(lists)
}

/// Recomputation, where nothing is the search's own choice, micro-batches and virtual stages.
type OpenChoices = (Vec<Option<RecomputeKind>>, Vec<u64>, Vec<u32>);

fn open_choices(row: &Row) -> OpenChoices {
    let recompute = match row.recompute.as_str() {
        "none" => vec![Some(RecomputeKind::None)],
        "selective" => vec![Some(RecomputeKind::Selective)],
        "full" => vec![Some(RecomputeKind::Full)],
        // By constraints, which leave nothing open.
        _ if !again(row).is_empty() => vec![None],
        // A tiled attention kernel keeps nothing that recomputing it would save.
        _ if row.attention == "flash" => vec![Some(RecomputeKind::None), None, Some(RecomputeKind::Full)],
        _ => vec![Some(RecomputeKind::None), Some(RecomputeKind::Selective), None, Some(RecomputeKind::Full)],
    };
    let micro_batches = row.micro_batch.map_or(MICRO_BATCHES.to_vec(), |one| vec![one]);
    let virtual_stages = match (row.vpp, row.pp.unwrap_or(1)) {
        (Some(one), _) => vec![one],
        (None, 1) => vec![1],
        (None, pp) => {
            VIRTUAL_STAGES.into_iter().filter(|&v| even(row.layers, pp * u64::from(v)).is_some()).collect()
        }
    };
    (recompute, micro_batches, virtual_stages)
}

fn job(row: &Row) -> Result<Job, Reason> {
    let precision = match row.precision.as_str() {
        "bf16" => Precision::Bf16,
        "fp16" => Precision::Fp16,
        "fp8" | "mxfp8" => Precision::Fp8,
        other => return Err(Reason::Precision(other.into())),
    };
    let attention = if row.attention == "eager" { AttentionKernel::Eager } else { AttentionKernel::Flash };
    Ok(Job {
        sequence: row.seq,
        global_batch: stated("global_batch", row.global_batch)?,
        precision,
        attention,
        token_order: Job::default_order(row.seq, row.devices),
        engine: engine(row),
    })
}

/// The engine of a row's software, with what the row says of it.
fn engine(row: &Row) -> Engine {
    let beside = |what: &str| row.overlap.split(';').any(|one| one == what);
    let known = match row.stack.as_str() {
        // From then on weight gradients are added inside their products, and operands' gradients reduced beside them.
        "megatron-lm" if row.date.as_str() >= "2022" => Engine {
            tensor_overlap: TensorOverlap::Gradients,
            accumulation: Accumulation::Fused,
            stage_outputs: StageOutputs::Freed,
            ..Engine::MEGATRON_LM
        },
        "megatron-lm" => Engine::MEGATRON_LM,
        // `Copies` says what changed then.
        "megatron-deepspeed" => Engine {
            copies: if row.date.as_str() < "2022-03" { Copies::WholeMaster } else { Copies::Buckets },
            ..Engine::MEGATRON_DEEPSPEED
        },
        // Its other kernels are whatever is deterministic.
        DETERMINISTIC => Engine { accumulation: Accumulation::Separate, ..Engine::default() },
        "fsdp" => Engine::FSDP,
        // With fused norms.
        "fsdp-libraries" => Engine { kernels: Kernels::Libraries, ..Engine::FSDP },
        // Compiled layer by layer.
        "fsdp-compiled" => {
            Engine { kernels: Kernels::Fused, loss: compiled_loss(generation(row)), ..Engine::FSDP }
        }
        "internevo" => Engine {
            flash: FlashKernel::Second,
            // Norms of Apex, rotations of flash-attention (InternLM/InternEvo internlm/model/ops at c628a8c).
            kernels: Kernels::Libraries,
            recomputation: Recomputation::Whole,
            parameter_spread: ParameterSpread::Broadcast,
            ..Engine::default()
        },
        "alpa" => Engine { gradient_reduction: GradientReduction::AtOnce, ..Engine::default() },
        _ => Engine::default(),
    };
    // Megatron-LM reduced the gradients of fp16 parameters in fp16, those of bf16 ones in fp32; Alpa takes them of its
    // fp16 parameters, beside which it has fp32 ones (alpa-projects/alpa alpa/model/model_util.py, `use_master_copy`).
    let in_halves = row.stack.starts_with("megatron-") || row.stack == "alpa";
    let halves = row.reduce == "half" || (in_halves && row.precision == "fp16");
    Engine {
        flash: match row.attention.as_str() {
            "flash-2" => FlashKernel::Second,
            "flash-3" => FlashKernel::Current,
            _ => known.flash,
        },
        tensor_overlap: if beside("tensor") { TensorOverlap::Chunked } else { known.tensor_overlap },
        gradient_overlap: if beside("gradients") { GradientOverlap::Beside } else { GradientOverlap::Absent },
        gradients: if halves { GradientFormat::Half } else { known.gradients },
        loss: match row.loss.as_str() {
            "plain" => LossKernel::Plain,
            "unfused" => LossKernel::Unfused,
            "fused" => LossKernel::Fused,
            _ => known.loss,
        },
        experts: match (row.expert_kernels.as_str(), row.stack.as_str()) {
            ("together", _) => Experts::Together,
            // With Transformer Engine's `GroupedLinear`.
            (_, "megatron-core") => Experts::Each,
            _ => known.experts,
        },
        dispatch: if row.dispatch == "per-node" { Dispatch::PerNode } else { known.dispatch },
        exchange_overlap: if beside("experts") { ExchangeOverlap::Beside } else { known.exchange_overlap },
        launches: if row.launches == "graph" { Launches::Graph } else { known.launches },
        generation: generation(row),
        ..known
    }
}

/// When the row's libraries are from.
fn generation(row: &Row) -> Generation {
    if row.date.as_str() < "2025" { Generation::Before2025 } else { Generation::Current }
}

/// The loss beside compiled layers: compiled too from 2025 on (pytorch/torchtitan torchtitan/components/loss.py), when
/// PyTorch began to read scores once for it and to write their gradient in their own format (pytorch/pytorch pull
/// request 127011).
fn compiled_loss(generation: Generation) -> LossKernel {
    match generation {
        Generation::Before2025 => LossKernel::Plain,
        Generation::Current => LossKernel::Fused,
    }
}

/// A cell that every price needs.
fn stated(column: &'static str, cell: Option<u64>) -> Result<u64, Reason> {
    cell.ok_or(Reason::Unstated(column))
}

fn pins(row: &Row, recompute: Option<RecomputeKind>, (micro_batch, vpp): (u64, u32)) -> Result<Pins, Reason> {
    let (tp, pp) = (stated("tp", row.tp)?, stated("pp", row.pp)?);
    Ok(Pins {
        tp: Some(tp),
        pp: Some(pp),
        dp: Some(stated("dp", row.dp)?),
        cp: Some(row.cp.unwrap_or(1)),
        ep: Some(row.ep.unwrap_or(1)),
        etp: Some(1),
        vpp: Some(vpp),
        micro_batch: Some(micro_batch),
        slices: None,
        schedule: Some(match row.schedule.as_str() {
            "zb-h1" => ScheduleKind::ZbH1,
            "zb-h2" => ScheduleKind::ZbH2,
            _ if vpp > 1 => ScheduleKind::Interleaved,
            _ => ScheduleKind::OneFOneB,
        }),
        recompute,
        zero: row.zero.split('-').next().and_then(|stage| stage.parse().ok()).filter(|stage| *stage <= 3),
        gradients: (row.zero == "3-whole-gradients").then_some(GradientsKind::Whole),
        split_backward: None,
        zero_group: row.zero_group,
        offload: Some(OffloadKind::None),
        sequence_parallel: (tp > 1).then_some(match row.sequence_parallel.as_str() {
            "1" => SequenceParallel::On,
            _ => SequenceParallel::Off,
        }),
        cp_kind: None,
        token_order: None,
        shares: None,
        tensor_shares: None,
        forbid: Forbid::default(),
        constraints: Constraints { layers: again(row) },
        axes: Some(AxesKind::Named),
        layers_per_stage: layers_per_stage(row, pp * u64::from(vpp))?,
    })
}

/// What a source says is computed again where that is neither all nor nothing.
fn again(row: &Row) -> BTreeMap<String, LayerConstraints> {
    match row.recompute.as_str() {
        "every-second-product" => all_but(&SECOND_PRODUCTS),
        "products-kept" => all_but(if row.arch == "gpt" { &PRODUCTS[..6] } else { &PRODUCTS }),
        "qkv-kept" => all_but(&PRODUCTS[..3]),
        "every-second-layer" => {
            let all = |kept| LayerConstraints {
                recompute: [("*".into(), kept)].into(),
                ..LayerConstraints::default()
            };
            let even: Vec<String> = (0..row.layers).step_by(2).map(|layer| layer.to_string()).collect();
            [("*".into(), all(Kept::Keep)), (format!("decoder[{}]", even.join(",")), all(Kept::Again))].into()
        }
        _ => modules_again(row),
    }
}

/// All that decoder layers compute, but for what these operators yield.
fn all_but(kept: &[&str]) -> BTreeMap<String, LayerConstraints> {
    let kept = kept.iter().map(|op| ((*op).into(), Kept::Keep));
    let recompute = kept.chain([("*".into(), Kept::Again)]).collect();
    [("decoder".into(), LayerConstraints { recompute, ..LayerConstraints::default() })].into()
}

/// The same by Megatron's names of modules.
fn modules_again(row: &Row) -> BTreeMap<String, LayerConstraints> {
    let said = |part: &str| row.recompute.split('+').any(|one| one == part);
    let but = |ops: &[&str]| {
        let kept = [("*".into(), Kept::Keep)].into_iter();
        let recompute = kept.chain(ops.iter().map(|op| ((*op).into(), Kept::Again))).collect();
        LayerConstraints { recompute, ..LayerConstraints::default() }
    };
    let up: &[&str] = if said("mla-up") { &MLA_UP } else { &[] };
    let dense: Vec<&str> = up.iter().chain(if said("mlp") { &MLP[..] } else { &[] }).copied().collect();
    if dense.is_empty() {
        return BTreeMap::new();
    }
    [("*".into(), but(up)), ("dense".into(), but(&dense))].into()
}

/// As Megatron cuts: evenly, or so that embedding and head count as a layer each; what neither fits is left to the
/// planner, as is a cut that the source made by hand and does not tell. Modules that predict ahead, each two layers
/// here, stand with the head.
fn layers_per_stage(row: &Row, n_chunks: u64) -> Result<Option<Vec<u64>>, Reason> {
    let stated = row.layers_per_stage.split_whitespace().map(|count| {
        count.parse().map_err(|_| Reason::Plan(format!("layers per stage: expected counts, found `{count}`")))
    });
    let stated: Vec<u64> = stated.collect::<Result<_, _>>()?;
    let mut counts = match (stated.is_empty(), n_chunks, row.schedule.as_str()) {
        (false, ..) => Some(stated),
        (true, 0..=1, _) | (true, _, "balanced") => None,
        (true, ..) => even(row.layers, n_chunks),
    };
    if let Some(last) = counts.as_mut().and_then(|counts| counts.last_mut()) {
        *last += 2 * row.mtp_modules.unwrap_or(0);
    }
    Ok(counts)
}

fn even(layers: u64, n_chunks: u64) -> Option<Vec<u64>> {
    if layers.is_multiple_of(n_chunks) {
        return Some(vec![layers / n_chunks; n_chunks as usize]);
    }
    if !(layers + 2).is_multiple_of(n_chunks) {
        return None;
    }
    let each = (layers + 2) / n_chunks;
    let mut counts = vec![each; n_chunks as usize];
    counts[0] -= 1;
    counts[n_chunks as usize - 1] -= 1;
    Some(counts)
}
