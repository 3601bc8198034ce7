use ir::graph::Extent;
use ir::mesh::AxisId;
use ir::op_work::KernelChoice;
use ir::program::AxisSet;
use ir::token_order::TokenOrder;
use ir::work::AttentionKernel;
use ir::work::GemmOutput;

use super::*;
use crate::collective;
use crate::constants::tests::of_examples;
use crate::gemm::{GemmShape, gemm_time};
use crate::group::tests::{dgx_a100, group};
use crate::program_fixture::{
    DATA, EXPERT, Extra, Lowered, PLAIN, Shape, TENSOR, TENSOR_AND_SEQUENCE, gpt, lowered, mlp, moe,
};
use crate::rates::tests::a100;
use ir::engine::{Accumulation, Engine, Experts, GradientFormat, Recomputation, TensorOverlap};

const SHAPE: Shape = Shape { b: 8, s: 1024, h: 2048, heads: 16, f: 8192 };

fn price_with(lowered: &Lowered, tensor_overlap: TensorOverlap, rank_offset: u64) -> ProgramPrice {
    price_under(lowered, Engine { tensor_overlap, ..Engine::default() }, rank_offset)
}

fn price_under(lowered: &Lowered, engine: Engine, rank_offset: u64) -> ProgramPrice {
    let (cluster, device, constants) = (dgx_a100(), a100(), of_examples().under(engine));
    let context = PriceContext {
        cluster: &cluster,
        device: &device,
        precision: ir::cluster::Precision::Bf16,
        gradients: GradientFormat::Full,
        constants: &constants,
        kernels: KernelChoice {
            experts: engine.experts,
            ..KernelChoice::of(&engine, (AttentionKernel::Flash, TokenOrder::ZigZag), 2.0)
        },
        tensor_overlap: engine.tensor_overlap,
        rank_offset,
        home: None,
    };
    price_program(&context, &lowered.layer, &lowered.mesh, &lowered.sizes, &lowered.program)
}

/// The same with the experts of a device one after another.
fn price_each(lowered: &Lowered) -> ProgramPrice {
    price_under(lowered, Engine { experts: Experts::Each, ..Engine::default() }, 0)
}

fn price(lowered: &Lowered) -> ProgramPrice {
    price_with(lowered, TensorOverlap::Absent, 0)
}

fn gemm(m: f64, n: f64, k: f64, output: GemmOutput) -> Seconds {
    let constants = of_examples();
    let rates = Rates::new(&a100(), ir::cluster::Precision::Bf16, &constants);
    gemm_time(GemmShape { batch: 1.0, m, n, k }, output, &rates, &constants)
}

fn moved(kind: CollectiveKind, full: f64, axes: &[(u64, u64)]) -> Seconds {
    let cluster = dgx_a100();
    collective::price(kind, Bytes(full), &group(axes, &cluster), &cluster, &of_examples())
}

#[track_caller]
fn close(found: Seconds, expected: Seconds) {
    assert!((found.0 - expected.0).abs() <= 1e-12 * expected.0.abs(), "{found:?} is not {expected:?}");
}

fn counts(section: &SectionPrice) -> Vec<(CommunicationClass, CollectiveKind, u32)> {
    section.communication.iter().map(|(&(class, kind), price)| (class, kind, price.count)).collect()
}

#[test]
fn the_compute_of_two_products_is_two_products_forward_and_four_backward() {
    let price = price(&lowered(mlp(SHAPE), SHAPE, &[1], &[], &PLAIN));
    let (t, h, f) = (8192.0, 2048.0, 8192.0);
    let (plain, sum) = (GemmOutput::Operand, GemmOutput::Accumulator);
    close(price.forward.compute.gemm, gemm(t, f, h, plain) + gemm(t, h, f, plain));
    let weights = gemm(h, f, t, sum) + gemm(f, h, t, sum);
    close(price.backward.weight_gradient, weights);
    close(price.backward.compute.gemm, gemm(t, f, h, plain) + gemm(t, h, f, plain) + weights);
    assert!(price.forward.communication.is_empty());
    close(price.forward.seconds(), price.forward.compute.gemm + price.forward.compute.stream);
    assert_eq!(price.forward.compute.attention, Seconds::ZERO);
}

#[test]
fn what_is_computed_again_is_priced_apart() {
    let plain = price(&lowered(gpt(SHAPE), SHAPE, &[1], &[], &PLAIN));
    let extra = Extra { recompute: &["attention"], ..PLAIN };
    let again = price(&lowered(gpt(SHAPE), SHAPE, &[1], &[], &extra));
    assert_eq!(plain.backward.compute.recompute, Seconds::ZERO);
    assert_eq!(again.backward.compute.recompute, plain.forward.compute.attention);
    assert_eq!(again.backward.compute.gemm, plain.backward.compute.gemm);
}

/// Megatron's checkpoint measures 7.6 ms of recomputation for a forward of 7.7 ms (arXiv 2205.05198 table 4).
#[test]
fn an_engine_that_runs_whole_layers_again_pays_all_of_forward() {
    let layer = gpt(SHAPE);
    let names: Vec<String> = layer.ops.iter().map(|op| op.name.clone()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let extra = Extra { recompute: &names, ..PLAIN };
    let lowered = lowered(layer, SHAPE, &[8], &[TENSOR], &extra);
    let needed = price(&lowered);
    let whole = Engine { recomputation: Recomputation::Whole, ..Engine::default() };
    let whole = price_under(&lowered, whole, 0);
    assert_eq!(needed.forward, whole.forward);
    assert!(needed.backward.compute.recompute < needed.forward.compute.total() * 0.8);
    close(whole.backward.compute.recompute, whole.forward.compute.total());
    let again = |price: &ProgramPrice| -> Seconds {
        let all = price.backward.communication.iter();
        all.filter(|((class, _), _)| *class == CommunicationClass::Recompute)
            .map(|(_, one)| one.exposed)
            .sum()
    };
    close(again(&whole), whole.forward.exposed());
    close(again(&needed) * 2.0, needed.forward.exposed());
}

#[test]
fn a_gradient_that_is_added_apart_is_read_and_the_accumulator_read_and_written() {
    let lowered = lowered(mlp(SHAPE), SHAPE, &[1], &[], &PLAIN);
    let apart = Engine { accumulation: Accumulation::Separate, ..Engine::default() };
    let (fused, apart) = (price(&lowered), price_under(&lowered, apart, 0));
    let more = apart.backward.compute.stream - fused.backward.compute.stream;
    let (bytes, gaps) = (Bytes(PARAMETERS * (2.0 + 2.0 * 4.0)), of_examples().kernel_gap_s * 2.0);
    let memory = Rates::new(&a100(), ir::cluster::Precision::Bf16, &of_examples()).memory;
    assert!((more.0 / (bytes / memory + gaps).0 - 1.0).abs() < 1e-9, "{more:?}");
}

#[test]
fn an_operands_gradient_is_reduced_behind_the_product_for_the_weight() {
    let lowered = lowered(gpt(SHAPE), SHAPE, &[8], &[TENSOR], &PLAIN);
    let beside = price_with(&lowered, TensorOverlap::Gradients, 0);
    let absent = price(&lowered);
    assert_eq!(beside.forward.exposed(), absent.forward.exposed(), "forward has nothing to hide behind");
    assert!(beside.backward.exposed() < absent.backward.exposed());
}

const STREAM: f64 = 8.0 * 1024.0 * 2048.0 * 2.0;

#[test]
fn tensor_parallelism_shows_two_all_reduces_of_the_stream_each_way() {
    let price = price(&lowered(gpt(SHAPE), SHAPE, &[8], &[TENSOR], &PLAIN));
    let one = moved(CollectiveKind::AllReduce, STREAM, &[(8, 1)]);
    close(price.forward.exposed(), one * 2.0);
    close(price.backward.exposed(), one * 2.0);
    assert_eq!(price.forward.bytes_per_tier, [Bytes(2.0 * 2.0 * STREAM * 7.0 / 8.0), Bytes(0.0)]);
}

#[test]
fn with_cut_norms_it_gathers_and_scatters_twice_and_gathers_again_behind_products() {
    use CollectiveKind::{AllGather, ReduceScatter};
    use CommunicationClass::{Forward, Gradient, Recompute};
    let price = price(&lowered(gpt(SHAPE), SHAPE, &[8], &[TENSOR_AND_SEQUENCE], &PLAIN));
    assert_eq!(counts(&price.forward), [(Forward, AllGather, 2), (Forward, ReduceScatter, 2)]);
    assert_eq!(
        counts(&price.backward),
        [(Recompute, AllGather, 2), (Gradient, AllGather, 2), (Gradient, ReduceScatter, 2)]
    );
    let regather = price.backward.communication[&(Recompute, AllGather)];
    assert!(regather.exposed < regather.total * 0.5, "{regather:?}");
    let gather = price.backward.communication[&(Gradient, AllGather)];
    assert_eq!(gather.exposed, gather.total);
}

#[test]
fn products_in_chunks_leave_a_quarter_of_gathers_and_scatters() {
    let lowered = lowered(gpt(SHAPE), SHAPE, &[8], &[TENSOR_AND_SEQUENCE], &PLAIN);
    let (absent, chunked) = (price(&lowered), price_with(&lowered, TensorOverlap::Chunked, 0));
    for ((key, all), quarter) in
        absent.forward.communication.iter().zip(chunked.forward.communication.values())
    {
        assert!(quarter.exposed >= all.exposed * 0.25, "{key:?}");
        assert!(quarter.exposed < all.exposed, "{key:?}");
    }
}

#[test]
fn a_mesh_that_does_not_start_at_a_node_is_priced_by_its_worst_group() {
    let lowered = lowered(gpt(SHAPE), SHAPE, &[8], &[TENSOR], &PLAIN);
    let across = price_with(&lowered, TensorOverlap::Absent, 4);
    let inside = price_with(&lowered, TensorOverlap::Absent, 8);
    assert_eq!(inside, price(&lowered));
    assert!(across.forward.exposed() > inside.forward.exposed());
}

fn data_parallel(storage: Storage) -> ProgramPrice {
    price(&lowered(mlp(SHAPE), SHAPE, &[8], &[DATA], &Extra { storage, recompute: &[] }))
}

const PARAMETERS: f64 = 2.0 * 2048.0 * 8192.0;

#[test]
fn gradients_are_reduced_in_one_bucket_of_fp32() {
    let price = data_parallel(Storage::default()).update;
    close(price.gradient_reduce, moved(CollectiveKind::AllReduce, 4.0 * PARAMETERS, &[(8, 1)]));
    assert_eq!(price.parameter_gather, Seconds::ZERO);
}

#[test]
fn a_cut_optimizer_scatters_gradients_gathers_parameters_and_updates_an_eighth() {
    let plain = data_parallel(Storage::default()).update;
    let cut = AxisSet::of(&[AxisId(0)]);
    let price = data_parallel(Storage { optimizer: cut, ..Storage::default() }).update;
    close(price.gradient_reduce, moved(CollectiveKind::ReduceScatter, 4.0 * PARAMETERS, &[(8, 1)]));
    close(price.parameter_gather, moved(CollectiveKind::AllGather, 2.0 * PARAMETERS, &[(8, 1)]));
    assert!(price.optimizer < plain.optimizer * 0.2);
}

/// An eighth of the gradients goes down at 0.8 of 31 GB/s, the host updates them at an eighth of its rate, and the
/// values come up; the device computes nothing, and its collectives are the same.
#[test]
fn an_optimizer_on_the_host_moves_and_updates_an_eighth_there() {
    let cut = Storage { optimizer: AxisSet::of(&[AxisId(0)]), ..Storage::default() };
    let (device, host) = (data_parallel(cut).update, data_parallel(cut.on_host()).update);
    assert_eq!((device.host, host.optimizer), (Seconds::ZERO, Seconds::ZERO));
    assert_eq!(host.communication, device.communication);
    let (own, link, rate) = (PARAMETERS / 8.0, 31e9 * 0.8, 4e9 / 8.0);
    close(host.host, Seconds(own * 4.0 / link + own / rate + own * 2.0 / link));
}

#[test]
fn gathered_parameters_move_beside_the_compute_of_every_micro_batch() {
    let cut = AxisSet::of(&[AxisId(0)]);
    let price = data_parallel(Storage::on_device(cut, cut, cut));
    let gather = moved(CollectiveKind::AllGather, 2.0 * PARAMETERS, &[(8, 1)]);
    let reduce = moved(CollectiveKind::ReduceScatter, 4.0 * PARAMETERS, &[(8, 1)]);
    let constants = of_examples();
    let wall = |section: &SectionPrice, total| gathered_layer(section.compute.total(), total, &constants);
    close(price.forward.seconds(), wall(&price.forward, gather));
    close(price.backward.seconds(), wall(&price.backward, gather + reduce));
    assert_eq!(price.update.gradient_reduce, Seconds::ZERO);
}

#[test]
fn experts_exchange_only_slots_that_hold_a_token() {
    use CollectiveKind::AllToAll;
    let shape = Shape { b: 16, s: 512, h: 1024, heads: 1, f: 2048 };
    let price = price(&lowered(moe(shape, 16), shape, &[8], &[EXPERT], &PLAIN));
    // A rank holds 2 x 512 tokens, each in a quarter of 16 experts, 1024 wide.
    let one = moved(AllToAll, 2.0 * 512.0 * 4.0 * 1024.0 * 2.0, &[(8, 1)]);
    let both = [(CommunicationClass::Forward, AllToAll, 2)];
    assert_eq!(counts(&price.forward), both);
    close(price.forward.exposed(), one * 2.0);
    // Backward exchanges the gradients back, and the expert's results are not kept where the combine wants them.
    close(price.backward.communication[&(CommunicationClass::Gradient, AllToAll)].total, one * 2.0);
}

/// 0.8 of what its link is listed with: what is kept takes as long each way, and a pass the longer of that and its own
/// work.
#[test]
fn a_layer_takes_the_longer_of_its_work_and_its_link_to_the_host() {
    let all: Vec<String> = gpt(SHAPE).ops.iter().map(|op| op.name.clone()).collect();
    let again: Vec<&str> = all.iter().map(String::as_str).collect();
    for recompute in [&[] as &[&str], &again] {
        let mut lowered = lowered(gpt(SHAPE), SHAPE, &[1], &[], &Extra { recompute, ..PLAIN });
        let here = price(&lowered);
        lowered.program.kept = ir::program::Home::Host;
        let there = price(&lowered);
        let (precision, engine) = (ir::cluster::Precision::Bf16, Engine::default());
        let kernels = KernelChoice::of(&engine, (AttentionKernel::Flash, TokenOrder::ZigZag), 2.0);
        let memory = MemoryContext { precision, engine, kernels, constants: &of_examples() };
        let bytes = kept_on_host(&memory, (&lowered.layer, &lowered.mesh, &lowered.sizes), &lowered.program);
        let link = bytes.0 / (0.8 * a100().host_link_bytes_per_s.0);
        for (here, there) in [(&here.forward, &there.forward), (&here.backward, &there.backward)] {
            let expected = here.seconds().0.max(link);
            assert!((there.seconds().0 / expected - 1.0).abs() < 1e-12, "{there:?} {expected}");
            assert_eq!(there.waiting(), here.waiting());
            assert_eq!(there.waiting_for_host(), there.seconds() - here.seconds());
        }
    }
}

/// Eight experts of which each device has two: a kernel more for each of the two products forward, two for each
/// backward, and rows read and written once more on both sides of the exchange.
#[test]
fn experts_one_after_another_are_launched_and_sorted_apart() {
    let lowered = lowered(moe(SHAPE, 8), SHAPE, &[4], &[EXPERT], &PLAIN);
    let (together, each) = (price(&lowered), price_each(&lowered));
    let launch = of_examples().launch_s;
    close(each.forward.launch, together.forward.launch + launch * 2.0);
    close(each.backward.launch, together.backward.launch + launch * 4.0);
    assert_eq!(each.forward.compute.gemm, together.forward.compute.gemm);
    assert!(each.forward.compute.stream > together.forward.compute.stream);
    assert_eq!(together.forward.counts, Seconds::ZERO);
}

/// With experts so small that launching them takes longer than they do, the device waits once the host knows their
/// tokens.
#[test]
fn launches_behind_the_count_of_tokens_show_where_they_take_longer() {
    let small = Shape { b: 1, s: 256, h: 64, heads: 1, f: 64 };
    let dropless = lowered(moe(small, 8), small, &[1], &[], &PLAIN);
    let price = price_each(&dropless);
    // Dispatch, two products of eight experts, and what lies between them.
    let launches = of_examples().launch_s * 18.0;
    assert!(price.forward.counts > launches * 0.5 && price.forward.counts < launches, "{price:?}");
    assert_eq!(price.backward.counts, Seconds::ZERO);
    let mut layer = moe(small, 8);
    for dim in &mut layer.dims {
        if let Extent::Slots { capacity, .. } = &mut dim.extent {
            *capacity = Some(1.0);
        }
    }
    let limited = lowered(layer, small, &[1], &[], &PLAIN);
    assert_eq!(price_each(&limited).forward.counts, Seconds::ZERO);
}
