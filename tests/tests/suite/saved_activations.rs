//! Bytes that a layer keeps for backward, on the graphs of real models under plans that the search makes, against the
//! closed formulas of the literature, for every mode of recomputation.
//!
//! With `s` tokens, `b` sequences, `h` hidden, `a` heads, `t` tensor-parallel devices, 16-bit numbers, per micro-batch:
//! ```text
//! GPT    none       sbh (34 + 5 a s / h)             eq. 1 of Korthikanti et al. 2022, arXiv 2205.05198
//!        tensor     sbh (10 + 24 / t + 5 a s / h t)  eq. 2
//!        sequence   sbh / t (34 + 5 a s / h)         eq. 4
//!        selective  34 sbh / t                       table 2
//!        full       2 sbh                            table 2
//! ```
//! Ours differ for reasons that are exact numbers of bytes, and tested as such:
//! - by default there is no dropout: 2 masks of one byte per element, and of the 5 a s^2 b of the core a mask and the
//!   dropped-out
//!   probabilities, 3 a s^2 b; with it they are the paper's, and what engines hold besides is theirs;
//! - flash attention keeps the log-sum-exp of each query in fp32, 4 a s b, instead of the probabilities (Dao 2023,
//!   arXiv
//!   2307.08691, section 3.1);
//! - computing the core again, its result of 2 sbh is not kept either: the paper's selective recomputation keeps it;
//! - computing a whole layer again, the stream is kept as it arrives: in parts where it is in parts.
//!
//! A Llama layer has no biases and no GELU but gate, up and their product of `f` each, and `g` key/value heads: two
//! norms' inputs 4 sbh, two norms' results 4 sbh, queries and the core's result 4 sbh, keys and values 4 sbh g / a, 6
//! sbf.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its own input has failed")]

use cost_model::Constants;
use cost_model::program_memory::{MemoryContext, program_memory};
use frontends::{Size, read_cluster, read_model, rescale, shipped_cluster, shipped_model};
use ir::cluster::Precision;
use ir::engine::{Dropout, Engine, Recomputation, StageOutputs};
use ir::op_work::KernelChoice;
use ir::plan::Plan;
use ir::plan::check::open;
use ir::token_order::TokenOrder;
use ir::units::Bytes;
use ir::work::AttentionKernel;
use planner::price::price;
use planner::request::{Job, Pins, Progress, RecomputeKind, Request, ScheduleKind, SequenceParallel, Solver};

/// Tokens of a sequence, and sequences of a micro-batch.
const S: f64 = 1024.0;
const B: f64 = 2.0;

/// How the layers are cut over 4 devices.
#[derive(Clone, Copy)]
enum Cut {
    /// Not: one device of the four holds a stage.
    Stages,
    /// Heads and columns, the stream whole.
    Tensor,
    /// Heads and columns, the stream along the sequence.
    TensorAndSequence,
}

fn pins(cut: Cut, recompute: RecomputeKind) -> Pins {
    let (tp, pp, sequence_parallel) = match cut {
        Cut::Stages => (1, 4, None),
        Cut::Tensor => (4, 1, Some(SequenceParallel::Off)),
        Cut::TensorAndSequence => (4, 1, Some(SequenceParallel::On)),
    };
    Pins {
        tp: Some(tp),
        pp: Some(pp),
        dp: Some(1),
        cp: Some(1),
        vpp: Some(1),
        schedule: Some(ScheduleKind::OneFOneB),
        micro_batch: Some(B as u64),
        zero: Some(1),
        recompute: Some(recompute),
        sequence_parallel,
        ..Pins::default()
    }
}

/// The plan of a model on 4 devices.
fn plan(model: &str, attention: AttentionKernel, engine: Engine, pins: Pins) -> Plan {
    let model = read_model(model, shipped_model(model).unwrap().text).unwrap();
    let cluster = read_cluster("dgx-h200", shipped_cluster("dgx-h200").unwrap().text).unwrap();
    let cluster = rescale(&cluster, Size::Devices(4)).unwrap();
    let job = Job {
        sequence: S as u64,
        global_batch: 8,
        precision: Precision::Bf16,
        attention,
        token_order: TokenOrder::ZigZag,
        engine,
    };
    let request = Request { model, cluster, job, pins, solver: Solver::Structured };
    planner::optimize(&request, &|_: Progress| ()).unwrap_or_else(|error| panic!("{error}"))
}

/// Bytes that a device keeps for one micro-batch of the layers whose names a test knows: the first of them.
fn saved_of(plan: &Plan, is_it: impl Fn(&str) -> bool) -> f64 {
    let opened = open(plan).unwrap();
    let constants = Constants::load();
    let context = MemoryContext {
        precision: Precision::Bf16,
        engine: plan.job.engine,
        kernels: KernelChoice::of(
            &Engine { dropout: plan.job.engine.dropout, ..Engine::default() },
            (plan.job.attention, TokenOrder::ZigZag),
            2.0,
        ),
        constants: &constants,
    };
    let at = (0..plan.entries.len()).find(|&at| is_it(plan.entries[at].layer.as_str())).unwrap();
    let (layer, sizes) = (opened.layer(at), opened.sizes(plan, at));
    program_memory(&context, layer, &plan.mesh, &sizes, &opened.entries[at].program).saved_total().0
}

fn is_decoder(name: &str) -> bool {
    !["embedding", "head"].contains(&name)
}

/// Bytes that a device keeps of one decoder layer for one micro-batch.
fn saved(model: &str, attention: AttentionKernel, cut: Cut, recompute: RecomputeKind) -> f64 {
    saved_of(&plan(model, attention, Engine::default(), pins(cut, recompute)), is_decoder)
}

use AttentionKernel::{Eager, Flash};
use RecomputeKind::{Full, None as Nothing, Selective};

/// A GPT layer of Megatron's 1.7 B model: 2304 hidden, 24 heads.
mod gpt {
    use super::*;

    const H: f64 = 2304.0;
    const A: f64 = 24.0;
    const SBH: f64 = S * B * H;
    /// Dropout's masks of two results.
    const MASKS: f64 = 2.0 * SBH;
    /// A byte per pair of query and key.
    const PAIRS: f64 = A * S * S * B;
    /// What the paper counts of the core for dropout.
    const CORE_DROPOUT: f64 = 3.0 * PAIRS;
    /// Log-sum-exp of every query instead of the probabilities.
    const FLASH: f64 = 4.0 * A * S * B;

    fn of(attention: AttentionKernel, cut: Cut, recompute: RecomputeKind) -> f64 {
        saved("megatron-1.7b", attention, cut, recompute)
    }

    #[test]
    fn everything_is_kept() {
        let paper = 34.0 * SBH + 5.0 * PAIRS;
        assert_eq!(of(Eager, Cut::Stages, Nothing), paper - MASKS - CORE_DROPOUT);
        assert_eq!(of(Flash, Cut::Stages, Nothing), 34.0 * SBH - MASKS + FLASH);
    }

    #[test]
    fn tensor_parallel_devices_keep_ten_whole() {
        let t = 4.0;
        let paper = SBH * (10.0 + 24.0 / t) + 5.0 * PAIRS / t;
        assert_eq!(of(Eager, Cut::Tensor, Nothing), paper - MASKS - CORE_DROPOUT / t);
        assert_eq!(of(Flash, Cut::Tensor, Nothing), SBH * (10.0 + 24.0 / t) - MASKS + FLASH / t);
    }

    #[test]
    fn sequence_parallel_devices_keep_everything_in_parts() {
        let t = 4.0;
        let paper = (34.0 * SBH + 5.0 * PAIRS) / t;
        assert_eq!(of(Eager, Cut::TensorAndSequence, Nothing), paper - (MASKS + CORE_DROPOUT) / t);
    }

    #[test]
    fn the_core_is_computed_again() {
        let (t, core_result) = (4.0, 2.0 * SBH);
        let paper = 34.0 * SBH;
        for attention in [Eager, Flash] {
            assert_eq!(of(attention, Cut::Stages, Selective), paper - MASKS - core_result);
            let in_parts = (paper - MASKS - core_result) / t;
            assert_eq!(of(attention, Cut::TensorAndSequence, Selective), in_parts);
        }
    }

    #[test]
    fn the_layer_is_computed_again() {
        let (t, paper) = (4.0, 2.0 * SBH);
        assert_eq!(of(Flash, Cut::Stages, Full), paper);
        assert_eq!(of(Flash, Cut::Tensor, Full), paper);
        assert_eq!(of(Flash, Cut::TensorAndSequence, Full), paper / t);
    }
}

/// The same model with dropout: the paper's own figures.
mod gpt_with_dropout {
    use super::*;

    const SBH: f64 = S * B * 2304.0;
    const PAIRS: f64 = 24.0 * S * S * B;

    fn with(engine: Engine, cut: Cut, recompute: RecomputeKind) -> Plan {
        plan("megatron-1.7b", Eager, engine, pins(cut, recompute))
    }

    fn decoder(cut: Cut, recompute: RecomputeKind) -> f64 {
        saved_of(&with(Engine::MEGATRON_LM, cut, recompute), is_decoder)
    }

    #[test]
    fn a_layer_keeps_what_the_paper_counts() {
        let t = 4.0;
        assert_eq!(decoder(Cut::Stages, Nothing), 34.0 * SBH + 5.0 * PAIRS);
        assert_eq!(decoder(Cut::Tensor, Nothing), SBH * (10.0 + 24.0 / t) + 5.0 * PAIRS / t);
        assert_eq!(decoder(Cut::TensorAndSequence, Nothing), (34.0 * SBH + 5.0 * PAIRS) / t);
    }

    /// Nothing but its input, where all of it runs again; the last sum does not where only what backward needs does, so
    /// that its mask is kept.
    #[test]
    fn a_layer_that_runs_again_keeps_its_input() {
        assert_eq!(decoder(Cut::Stages, Full), 2.0 * SBH);
        assert_eq!(decoder(Cut::Tensor, Full), 2.0 * SBH);
        let needed = Engine { recomputation: Recomputation::Needed, ..Engine::MEGATRON_LM };
        assert_eq!(saved_of(&with(needed, Cut::Stages, Full), is_decoder), 3.0 * SBH);
    }

    /// The mask of what is embedded, of one byte per element, whatever layers do.
    #[test]
    fn an_embedding_keeps_its_mask() {
        for (cut, mask) in [(Cut::Stages, SBH), (Cut::Tensor, SBH), (Cut::TensorAndSequence, SBH / 4.0)] {
            let of = |engine| saved_of(&with(engine, cut, Full), |name| name == "embedding");
            assert_eq!(of(Engine::MEGATRON_LM), mask);
            assert_eq!(of(Engine { dropout: Dropout::Off, ..Engine::MEGATRON_LM }), 0.0);
        }
    }

    /// Streams that stages hold after they are sent, per stage. Under 1F1B stage i of p has p - i micro-batches in
    /// flight.
    fn held(outputs: StageOutputs, (tp, pp): (u64, u64)) -> Vec<f64> {
        let engine = Engine { stage_outputs: outputs, ..Engine::MEGATRON_LM };
        let alone = Pins { tp: Some(tp), pp: Some(pp), sequence_parallel: None, ..pins(Cut::Stages, Full) };
        let tensor = Pins { sequence_parallel: Some(SequenceParallel::Off), ..alone.clone() };
        let plan = plan("megatron-1.7b", Eager, engine, if tp > 1 { tensor } else { alone });
        let stages = price(&plan).unwrap().stages;
        let of = |bytes: Option<&Bytes>| bytes.map_or(0.0, |bytes| bytes.0);
        stages.iter().map(|stage| of(stage.memory.get("activations: streams between stages"))).collect()
    }

    #[test]
    fn stages_hold_what_they_have_sent_where_their_engine_does() {
        let stream = 2.0 * SBH;
        assert_eq!(held(StageOutputs::Freed, (1, 4)), [0.0; 4]);
        let outputs = [4.0, 3.0, 2.0, 0.0].map(|n| n * stream);
        assert_eq!(held(StageOutputs::Held, (1, 4)), outputs);
        // What came from the stage before is there a second time.
        let both = [4.0, 6.0, 4.0, 1.0].map(|n| n * stream);
        assert_eq!(held(StageOutputs::HeldInParts, (1, 4)), both);
        // Two devices hold half of it each.
        assert_eq!(held(StageOutputs::Held, (2, 2)), [2.0 * stream, 0.0]);
        assert_eq!(held(StageOutputs::HeldInParts, (2, 2)), [stream, 0.0]);
    }
}

/// A layer of Llama 3 8B: 4096 hidden, 32 heads, 8 key/value heads, 14336 inside.
mod llama {
    use super::*;

    const H: f64 = 4096.0;
    const A: f64 = 32.0;
    const G: f64 = 8.0;
    const F: f64 = 14336.0;
    const SBH: f64 = S * B * H;
    const FLASH: f64 = 4.0 * A * S * B;
    /// Two norms' inputs and results.
    const WHOLE: f64 = 8.0 * SBH;
    /// Queries, keys, values, and gate, up and product.
    const INSIDE: f64 = (2.0 + 4.0 * G / A) * SBH + 6.0 * S * B * F;
    /// The core's result.
    const CORE: f64 = 2.0 * SBH;

    fn of(cut: Cut, recompute: RecomputeKind) -> f64 {
        saved("llama-3-8b", Flash, cut, recompute)
    }

    #[test]
    fn everything_is_kept() {
        let t = 4.0;
        assert_eq!(of(Cut::Stages, Nothing), WHOLE + INSIDE + CORE + FLASH);
        assert_eq!(of(Cut::Tensor, Nothing), WHOLE + (INSIDE + CORE + FLASH) / t);
        assert_eq!(of(Cut::TensorAndSequence, Nothing), (WHOLE + INSIDE + CORE + FLASH) / t);
    }

    #[test]
    fn the_core_is_computed_again() {
        let t = 4.0;
        assert_eq!(of(Cut::Stages, Selective), WHOLE + INSIDE);
        assert_eq!(of(Cut::TensorAndSequence, Selective), (WHOLE + INSIDE) / t);
    }

    #[test]
    fn the_layer_is_computed_again() {
        assert_eq!(of(Cut::Stages, Full), 2.0 * SBH);
        assert_eq!(of(Cut::TensorAndSequence, Full), 2.0 * SBH / 4.0);
    }
}
