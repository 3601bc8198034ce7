use ir::mesh::AxisId;
use ir::sharding::Placement::Replicate;

use super::*;
use crate::program_fixture::{
    AxisPlan, DATA, EXPERT, Extra, Lowered, PLAIN, Shape, TENSOR, TENSOR_AND_SEQUENCE, gpt, head, head_ahead,
    lowered, mlp, moe,
};
use ir::engine::{Accumulation, Copies, Dropout, GradientReduction, LossKernel};
use ir::token_order::TokenOrder;
use ir::work::AttentionKernel;

const SHAPE: Shape = Shape { b: 2, s: 16, h: 32, heads: 4, f: 128 };

fn account(lowered: &Lowered, attention: AttentionKernel, loss: LossKernel) -> ProgramMemory {
    let constants = Constants::load();
    let context = context(attention, loss, &constants);
    program_memory(&context, &lowered.layer, &lowered.mesh, &lowered.sizes, &lowered.program)
}

fn context(attention: AttentionKernel, loss: LossKernel, constants: &Constants) -> MemoryContext<'_> {
    let engine = Engine { loss, accumulation: Accumulation::Separate, ..Engine::default() };
    let kernels = KernelChoice::of(&engine, (attention, TokenOrder::ZigZag), 2.0);
    MemoryContext { precision: Precision::Bf16, engine, kernels, constants }
}

fn flash(lowered: &Lowered) -> ProgramMemory {
    account(lowered, AttentionKernel::Flash, LossKernel::Fused)
}

fn gpt_on(mesh: &[u64], plans: &[AxisPlan], recompute: &[&str]) -> Lowered {
    lowered(gpt(SHAPE), SHAPE, mesh, plans, &Extra { recompute, ..PLAIN })
}

/// Elements of the residual stream, and pairs of queries and keys of all heads.
const SBH: f64 = 2.0 * 16.0 * 32.0;
const PAIRS: f64 = 2.0 * 4.0 * 16.0 * 16.0;
const QUERIES: f64 = 2.0 * 4.0 * 16.0;

// arXiv 2205.05198, equations 1, 2 and 4, less dropout: its masks and the dropped-out probabilities. What is left of
// 34 s b h + 5 a s^2 b is 32 s b h + 2 a s^2 b.

#[test]
fn a_gpt_layer_saves_32_bytes_per_element_and_two_per_probability() {
    let saved = account(&gpt_on(&[1], &[], &[]), AttentionKernel::Eager, LossKernel::Fused).saved_total();
    assert_eq!(saved, Bytes(32.0 * SBH + 2.0 * PAIRS));
}

/// Masks of one byte, and the probabilities after dropout: the paper's own figure.
#[test]
fn with_dropout_a_gpt_layer_saves_34_bytes_per_element_and_five_per_probability() {
    let constants = Constants::load();
    let lowered = gpt_on(&[1], &[], &[]);
    let engine = Engine { dropout: Dropout::On, ..Engine::default() };
    let context = MemoryContext { engine, ..context(AttentionKernel::Eager, LossKernel::Fused, &constants) };
    let saved = program_memory(&context, &lowered.layer, &lowered.mesh, &lowered.sizes, &lowered.program);
    assert_eq!(saved.saved_total(), Bytes(34.0 * SBH + 5.0 * PAIRS));
}

/// Two bytes per weight of the four products, cut as they are; nothing where gradients have tensors of their own.
#[test]
fn sums_inside_products_leave_a_stand_in_per_weight() {
    let constants = Constants::load();
    let inside = |lowered: &Lowered| {
        let engine = Engine { loss: LossKernel::Fused, ..Engine::default() };
        let context =
            MemoryContext { engine, ..context(AttentionKernel::Flash, LossKernel::Fused, &constants) };
        program_memory(&context, &lowered.layer, &lowered.mesh, &lowered.sizes, &lowered.program)
    };
    let weights = (4 * 32 * 32 + 2 * 32 * 128) as f64;
    let whole = gpt_on(&[1], &[], &[]);
    assert_eq!(inside(&whole).stand_ins, Bytes(2.0 * weights));
    assert_eq!(inside(&gpt_on(&[4], &[TENSOR], &[])).stand_ins, Bytes(2.0 * weights / 4.0));
    assert_eq!(flash(&whole).stand_ins, Bytes::ZERO);
    assert!(flash(&whole).working() > inside(&whole).working());
}

#[test]
fn flash_attention_saves_four_bytes_per_query_instead_of_the_probabilities() {
    assert_eq!(flash(&gpt_on(&[1], &[], &[])).saved_total(), Bytes(32.0 * SBH + 4.0 * QUERIES));
}

#[test]
fn tensor_parallelism_leaves_8_bytes_whole_and_cuts_24() {
    let saved =
        account(&gpt_on(&[4], &[TENSOR], &[]), AttentionKernel::Eager, LossKernel::Fused).saved_total();
    assert_eq!(saved, Bytes((8.0 + 24.0 / 4.0) * SBH + 2.0 * PAIRS / 4.0));
}

#[test]
fn with_sequence_parallelism_everything_saved_is_cut() {
    let plan = [TENSOR_AND_SEQUENCE];
    let saved = account(&gpt_on(&[4], &plan, &[]), AttentionKernel::Eager, LossKernel::Fused).saved_total();
    assert_eq!(saved, Bytes((32.0 * SBH + 2.0 * PAIRS) / 4.0));
}

#[test]
fn attention_computed_again_saves_neither_its_result_nor_its_probabilities() {
    let lowered = gpt_on(&[1], &[], &["attention"]);
    let memory = account(&lowered, AttentionKernel::Eager, LossKernel::Fused);
    assert_eq!(memory.saved_total(), Bytes(30.0 * SBH));
    assert!(!memory.saved.contains_key(&ActivationKind::Attention));
}

#[test]
fn a_layer_computed_again_saves_its_input() {
    let all: Vec<String> = gpt(SHAPE).ops.iter().map(|op| op.name.clone()).collect();
    let names: Vec<&str> = all.iter().map(String::as_str).collect();
    let memory = flash(&gpt_on(&[1], &[], &names));
    assert_eq!(memory.saved, BTreeMap::from([(ActivationKind::Stream, Bytes(2.0 * SBH))]));
}

/// What lies on the host is not saved on the device; while the layer runs it has it twice: its own and a neighbour's.
#[test]
fn what_is_kept_on_the_host_is_on_the_device_while_the_layer_runs() {
    let mut lowered = gpt_on(&[1], &[], &["attention"]);
    let there = flash(&lowered);
    lowered.program.kept = Home::Host;
    let kept = flash(&lowered);
    assert_eq!((kept.kept_on_host, kept.saved_total()), (Bytes(30.0 * SBH), Bytes::ZERO));
    assert_eq!(kept.working(), there.working() + Bytes(2.0 * 30.0 * SBH));
    assert_eq!((kept.states(), there.kept_on_host), (there.states(), Bytes::ZERO));
}

#[test]
fn saved_bytes_are_told_apart_by_what_computes_them() {
    let saved = flash(&gpt_on(&[1], &[], &[])).saved;
    let expected = [
        (ActivationKind::Stream, 4.0 * SBH),
        (ActivationKind::Norm, 4.0 * SBH),
        (ActivationKind::Linear, (6.0 + 8.0) * SBH),
        (ActivationKind::Attention, 2.0 * SBH + 4.0 * QUERIES),
        (ActivationKind::Activation, 8.0 * SBH),
    ];
    assert_eq!(saved, expected.map(|(kind, bytes)| (kind, Bytes(bytes))).into());
}

/// 2 x 3 tokens, x 10 wide and u 100 wide: 120 B and 1200 B.
const NARROW: Shape = Shape { b: 2, s: 3, h: 10, heads: 1, f: 100 };

#[test]
fn the_peaks_of_two_products_are_those_of_a_walk_by_hand() {
    let memory = flash(&lowered(mlp(NARROW), NARROW, &[1], &[], &PLAIN));
    // Saved: x, u, a. Forward ends with these and y.
    assert_eq!(memory.saved_total(), Bytes(120.0 + 1200.0 + 1200.0));
    assert_eq!(memory.forward_peak, Bytes(2520.0 + 120.0));
    // Backward of the second product holds all that, dy, da, and dw of 1000 elements.
    assert_eq!(memory.backward_peak, Bytes(2520.0 + 120.0 + 1200.0 + 2000.0));
    assert_eq!(memory.working(), Bytes(3320.0));
}

#[test]
fn what_is_computed_again_is_working_memory_of_backward() {
    let extra = Extra { recompute: &["act"], ..PLAIN };
    let memory = flash(&lowered(mlp(NARROW), NARROW, &[1], &[], &extra));
    assert_eq!(memory.saved_total(), Bytes(120.0 + 1200.0));
    assert_eq!(memory.backward_peak, Bytes(2520.0 + 120.0 + 1200.0 + 2000.0));
}

#[test]
fn states_are_cut_as_stored_and_gathered_parameters_stand_apart() {
    let cut = AxisSet::of(&[AxisId(0)]);
    let on = |storage: Storage| {
        flash(&lowered(mlp(SHAPE), SHAPE, &[2], &[DATA], &Extra { storage, recompute: &[] }))
    };
    let n = 2.0 * 32.0 * 128.0;
    let plain = on(Storage::default());
    let states = |memory: &ProgramMemory| [memory.parameters.0, memory.gradients.0, memory.optimizer.0];
    assert_eq!(states(&plain), [2.0 * n, 4.0 * n, 12.0 * n]);
    assert_eq!((plain.gathered, plain.unreduced), (Bytes::ZERO, Bytes::ZERO));
    let optimizer = on(Storage { optimizer: cut, ..Storage::default() });
    assert_eq!(states(&optimizer), [2.0 * n, 4.0 * n, 6.0 * n]);
    let all = on(Storage::on_device(cut, cut, cut));
    // On the host: fp32 value, moments and the gradient that came down; the device keeps what it reads.
    let host = on(Storage { optimizer: cut, ..Storage::default() }.on_host());
    assert_eq!((states(&host), host.host), ([2.0 * n, 4.0 * n, 0.0], Bytes(16.0 * n / 2.0)));
    let host = on(Storage::on_device(cut, cut, cut).on_host());
    assert_eq!((states(&host), host.host), ([n, 2.0 * n, 0.0], Bytes(16.0 * n / 2.0)));
    // On the drives: fp32 value and moments, which pass through the host's memory a parameter at a time; the gradient
    // stays there.
    let nvme = on(Storage { optimizer: cut, ..Storage::default() }.on_nvme());
    assert_eq!((states(&nvme), nvme.nvme), ([2.0 * n, 4.0 * n, 0.0], Bytes(12.0 * n / 2.0)));
    assert_eq!((nvme.host, nvme.nvme_passing), (Bytes(4.0 * n / 2.0), Bytes(12.0 * n / 2.0 / 2.0)));
    // Cut like its optimizer state, the parameter is that state's own fp32 copy.
    assert_eq!(states(&all), [0.0, 2.0 * n, 6.0 * n]);
    assert_eq!((all.gathered, all.unreduced), (Bytes(2.0 * n), Bytes(4.0 * n)));
}

/// Gradients that are reduced all at once are whole until then, however they are cut afterwards.
#[test]
fn gradients_that_are_reduced_at_once_are_whole() {
    let constants = Constants::load();
    let cut = AxisSet::of(&[AxisId(0)]);
    let lowered = |storage| lowered(mlp(SHAPE), SHAPE, &[2], &[DATA], &Extra { storage, recompute: &[] });
    let at_once = |storage| {
        let one = lowered(storage);
        let context = context(AttentionKernel::Flash, LossKernel::Fused, &constants);
        let engine = Engine { gradient_reduction: GradientReduction::AtOnce, ..context.engine };
        program_memory(&MemoryContext { engine, ..context }, &one.layer, &one.mesh, &one.sizes, &one.program)
    };
    let n = 2.0 * 32.0 * 128.0;
    for storage in
        [Storage { gradient: cut, optimizer: cut, ..Storage::default() }, Storage::on_device(cut, cut, cut)]
    {
        let (found, by_layer) = (at_once(storage), flash(&lowered(storage)));
        assert_eq!((found.gradients, found.unreduced), (Bytes(4.0 * n), Bytes::ZERO));
        assert_eq!((found.optimizer, found.gathered), (by_layer.optimizer, by_layer.gathered));
        assert_eq!(by_layer.gradients, Bytes(2.0 * n));
    }
}

/// What the optimizer copies holds the gradient that backward yields: it is no working memory of the layer.
#[test]
fn the_largest_gradient_is_known_and_counted_once() {
    let constants = Constants::load();
    let one = lowered(mlp(NARROW), NARROW, &[1], &[], &PLAIN);
    let context = context(AttentionKernel::Flash, LossKernel::Fused, &constants);
    let engine = Engine { copies: Copies::Buckets, ..context.engine };
    let copied = MemoryContext { engine, ..context };
    let copied = program_memory(&copied, &one.layer, &one.mesh, &one.sizes, &one.program);
    let plain = flash(&one);
    assert_eq!((plain.largest_gradient, copied.largest_gradient), (1000.0, 1000.0));
    assert_eq!(plain.backward_peak - copied.backward_peak, Bytes(2000.0));
}

#[test]
fn scores_take_what_the_kernel_of_the_loss_says_and_are_saved_as_one_fp32_tensor() {
    let shape = Shape { b: 2, s: 3, h: 4, heads: 1, f: 50 };
    let memory = |loss| {
        let plan = AxisPlan { stream: Replicate, elsewhere: None, uses: &[] };
        account(&lowered(head(shape), shape, &[1], &[plan], &PLAIN), AttentionKernel::Flash, loss)
    };
    let logits = 6.0 * 50.0;
    for (loss, peak) in [(LossKernel::Plain, 14.0), (LossKernel::Unfused, 8.0), (LossKernel::Fused, 4.0)] {
        let memory = memory(loss);
        assert_eq!(memory.saved[&ActivationKind::Logits], Bytes(4.0 * logits));
        assert_eq!(memory.logits, Bytes((peak - 4.0) * logits));
        assert_eq!(memory.saved[&ActivationKind::Loss], Bytes(2.0 * 6.0 * 4.0));
    }
}

/// Losses of two predictions follow one another: while one is at its peak, of the other lies what is kept.
#[test]
fn of_several_predictions_one_at_a_time_is_at_its_peak() {
    let shape = Shape { b: 2, s: 3, h: 4, heads: 1, f: 50 };
    let logits = 6.0 * 50.0;
    for (loss, peak) in [(LossKernel::Plain, 14.0), (LossKernel::Unfused, 8.0), (LossKernel::Fused, 4.0)] {
        let plan = AxisPlan { stream: Replicate, elsewhere: None, uses: &[] };
        let lowered = lowered(head_ahead(shape, 2), shape, &[1], &[plan], &PLAIN);
        let memory = account(&lowered, AttentionKernel::Flash, loss);
        assert_eq!(memory.saved[&ActivationKind::Logits], Bytes(2.0 * 4.0 * logits));
        assert_eq!(memory.logits, Bytes((peak - 4.0) * logits));
    }
}

#[test]
fn expert_slots_are_saved_as_far_as_they_hold_a_token() {
    let shape = Shape { b: 4, s: 8, h: 16, heads: 1, f: 32 };
    let memory = flash(&lowered(moe(shape, 8), shape, &[2], &[EXPERT], &PLAIN));
    // 16 tokens a rank, each in 2 of 8 experts: dispatched ones are 16 wide, activations between the products 32; the
    // routing weights are 8.
    let slots = 16.0 * 2.0;
    assert_eq!(memory.saved[&ActivationKind::Experts], Bytes(2.0 * (slots * 16.0 + 16.0 * 8.0)));
    assert_eq!(memory.saved[&ActivationKind::Activation], Bytes(2.0 * slots * 32.0));
}
