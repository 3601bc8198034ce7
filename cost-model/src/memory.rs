//! Bytes on a device: model states per parameter, logits, gathered units, and what lies beyond the tensors.
//!
//! It prices what it is told lives; which tensors live when is the schedule's business.

use std::collections::BTreeMap;

use ir::cluster::Precision;
use ir::engine::{Copies, GradientFormat, LossKernel};
use ir::units::{Bytes, BytesPerSecond};
use serde::{Deserialize, Serialize};

use crate::constants::Constants;
use crate::offload::OnNode;
use crate::rates::element_bytes;

/// Bytes that one parameter's states take, each where it is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateBytes {
    /// The copy that computation reads.
    pub parameter: Bytes,
    /// The gradient accumulator.
    pub gradient: Bytes,
    /// The fp32 master copy, where the parameter itself is not fp32.
    pub master: Bytes,
    /// AdamW's first and second moment.
    pub moments: Bytes,
}

impl StateBytes {
    /// States of mixed-precision AdamW: 2 + (4 or 2) + 4 + 8, in fp32 4 + 4 + 0 + 8.
    ///
    /// With fp32 gradients 18 bytes per parameter: NVIDIA/Megatron-LM megatron/training/theoretical_memory_usage.py.
    pub fn adamw(precision: Precision, gradients: GradientFormat) -> Self {
        let parameter = element_bytes(precision);
        let gradient = match gradients {
            GradientFormat::Full => Bytes(4.0),
            GradientFormat::Half => parameter,
        };
        let master = match precision {
            Precision::Fp32 => Bytes::ZERO,
            Precision::Fp16 | Precision::Bf16 | Precision::Fp8 => Bytes(4.0),
        };
        Self { parameter, gradient, master, moments: Bytes(8.0) }
    }

    /// Everything the optimizer owns.
    pub fn optimizer(self) -> Bytes {
        self.master + self.moments
    }

    /// Whether the optimizer's copy of a parameter can stand for it: an fp32 one has none.
    pub(crate) fn has_master(self) -> bool {
        self.master > Bytes::ZERO
    }

    /// A parameter with what the optimizer owns, cut alike: its fp32 copy is then the only one.
    pub fn cut_alike(self) -> Bytes {
        if self.has_master() { self.optimizer() } else { self.parameter + self.optimizer() }
    }

    /// All states of one parameter that no axis shards.
    pub fn total(self) -> Bytes {
        self.parameter + self.gradient + self.optimizer()
    }
}

/// Bytes that AdamW's update moves through device memory for `n_parameters` local ones.
///
/// Reads the gradient; reads and writes the moments and the fp32 value; casts that to the parameter where it is a copy;
/// and passes three times more over the gradient, to take its norm, to scale it (read and written) and to clear it.
/// bf16 with fp32 gradients: 4 + 2 x 12 + 2 + 4 x 4 = 46 bytes.
pub fn update_traffic(n_parameters: f64, states: StateBytes) -> Bytes {
    let (value, cast) = match states.has_master() {
        true => (states.master, states.parameter),
        false => (states.parameter, Bytes::ZERO),
    };
    (states.gradient * 5.0 + (value + states.moments) * 2.0 + cast) * n_parameters
}

/// Peak bytes of `n_logits` local logits.
///
/// 8192 tokens, 128256 words, over 8 ranks, unfused: 131 M logits, 1.05 GB.
pub fn logits_bytes(n_logits: f64, kernel: LossKernel, constants: &Constants) -> Bytes {
    Bytes(
        n_logits
            * match kernel {
                LossKernel::Plain => constants.logits_plain_bytes_per_element,
                LossKernel::Unfused => constants.logits_unfused_bytes_per_element,
                LossKernel::Fused => constants.logits_fused_bytes_per_element,
            },
    )
}

/// What of them is kept for backward: one fp32 tensor, or less where the kernel's peak is less.
pub fn kept_logits(n_logits: f64, kernel: LossKernel, constants: &Constants) -> Bytes {
    logits_bytes(n_logits, kernel, constants).min(element_bytes(Precision::Fp32) * n_logits)
}

/// Predictions of a token in scores of such a shape: lengths of dims between the tokens' and the vocabulary. Their
/// losses are taken one after another.
pub fn predictions(scores: &[u64]) -> f64 {
    let between = scores.get(2..scores.len().saturating_sub(1)).unwrap_or_default();
    between.iter().product::<u64>().max(1) as f64
}

/// A layer whose parameters are gathered for use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatheredUnit {
    /// Its parameters, whole.
    pub parameters: Bytes,
    /// Its gradient before that is reduced.
    pub gradient: Bytes,
    /// Such layers of a stage.
    pub count: f64,
}

/// Parameters gathered for use, of all layers of a stage: the unit in use and the one being fetched, and the gradient
/// of one before it is reduced (Zhao et al. 2023, arXiv 2304.11277, section 4.3.1). Which two are neighbours is not
/// asked: the two largest.
///
/// Units of 200 M parameters in bf16 with fp32 gradients: 2 x 0.4 GB + 0.8 GB.
pub fn gathered_units(units: impl Iterator<Item = GatheredUnit>) -> Bytes {
    // Plain numbers: the search asks this for every cut that it tries.
    let (mut first, mut second, mut gradient) = (0.0_f64, 0.0_f64, 0.0_f64);
    for unit in units.filter(|unit| unit.count > 0.0) {
        let parameters = unit.parameters.0;
        let again = if unit.count > 1.0 { parameters } else { 0.0 };
        (first, second) = (first.max(parameters), second.max(first.min(parameters)).max(again));
        gradient = gradient.max(unit.gradient.0);
    }
    Bytes(first + second + gradient)
}

/// Parameters of a device, as an optimizer that copies sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Owned {
    /// Those it holds.
    pub local: f64,
    /// Those it updates.
    pub updated: f64,
    /// Those of the largest tensor.
    pub largest: f64,
}

/// What an optimizer copies beside the states, with what the allocator keeps of it: what is freed serves the copies
/// after it.
///
/// 2e9 parameters in bf16, a fourth of them updated, 1e8 in the largest tensor: 4e9 + 0.4e9 + 1e9 bytes; in fp16 1e9
/// for the part's gradients, 0.2e9 + 1e9 for a fresh gradient and a bucket, where casts and the flat half of what is
/// updated fit, and 2e9 for its fp32.
pub fn copied_bytes(copies: Copies, owned: Owned, precision: Precision, constants: &Constants) -> Bytes {
    let copied = Copied::of(copies, owned, precision, constants);
    copied_for_ever(copies, (owned.local, owned.updated), precision)
        + copied.part
        + taken_in_turn(&copied.in_turn())
}

/// Copies that stay: bf16 gradients as backward yields them, until the next micro-batch
/// (deepspeed/runtime/bf16_optimizer.py, `update_hp_grads`), beside their fp32 sums; and with a whole master the fp32
/// parameters that others update.
fn copied_for_ever(copies: Copies, (n_local, n_updated): (f64, f64), precision: Precision) -> Bytes {
    let (half, full) = (element_bytes(precision), element_bytes(Precision::Fp32));
    match (copies, precision) {
        (Copies::None, _) | (_, Precision::Fp16 | Precision::Fp32) => Bytes::ZERO,
        (Copies::Buckets, Precision::Bf16 | Precision::Fp8) => half * n_local,
        (Copies::WholeMaster, Precision::Bf16 | Precision::Fp8) => {
            half * n_local + full * (n_local - n_updated)
        }
    }
}

/// Copies that an optimizer makes once per step, one after the other.
#[derive(Clone, Copy, Debug, Default)]
struct Copied {
    /// The largest gradient as backward yields it, before it is added to the last micro-batch's.
    fresh: Bytes,
    /// A bucket of gradients under reduction.
    reduced: Bytes,
    /// The gradients of all tensors that the updated part touches, beside all that follows.
    part: Bytes,
    /// The largest gradient, cast to find overflows.
    searched: Bytes,
    /// The same for the norm.
    normed: Bytes,
    /// What is updated, flattened, and in fp32.
    updated: [Bytes; 2],
    /// A bucket of parameters being gathered.
    gathered: Bytes,
}

impl Copied {
    /// What DeepSpeed copies. Buckets have 5e8 elements, with contiguous gradients (runtime/zero/config.py). 16-bit
    /// gradients are copied out of the bucket of those tensors that the updated part touches, of the fullest rank; the
    /// part is cast to fp32 to find overflows, to fp64 for the norm, then flattened and cast to fp32
    /// (runtime/zero/stage_1_and_2.py, `ipg_buffer`, `grads_in_partition`, `_has_inf_or_nan`, `get_grad_norm_direct`,
    /// `step`). A bf16 gradient is cast to be added to its sum, and sums are reduced where they lie
    /// (runtime/bf16_optimizer.py).
    fn of(copies: Copies, owned: Owned, precision: Precision, constants: &Constants) -> Self {
        let (half, full) = (element_bytes(precision), element_bytes(Precision::Fp32));
        let (reduced, gathered) =
            (half * constants.bucket_elements, half * owned.local.min(constants.bucket_elements));
        let slice = owned.largest.min(owned.updated);
        let touched = if owned.updated > 0.0 { (owned.largest / owned.updated).ceil().max(1.0) } else { 0.0 };
        match (copies, precision) {
            (Copies::None, _) => Self::default(),
            (_, Precision::Fp32) => {
                let part = full * owned.updated * touched;
                Self { fresh: full * owned.largest, reduced, part, gathered, ..Self::default() }
            }
            (_, Precision::Bf16 | Precision::Fp8) => {
                Self { searched: full * owned.largest, gathered, ..Self::default() }
            }
            (Copies::Buckets | Copies::WholeMaster, Precision::Fp16) => Self {
                fresh: half * owned.largest,
                reduced,
                part: half * owned.updated * touched,
                searched: full * slice,
                normed: full * slice * 2.0,
                updated: [half * owned.updated, full * owned.updated],
                gathered,
            },
        }
    }

    /// What is alive at a time.
    fn in_turn(self) -> Vec<Vec<Bytes>> {
        let alone = |bytes: Bytes| vec![bytes];
        let [fresh, reduced, searched, normed] =
            [self.fresh, self.reduced, self.searched, self.normed].map(alone);
        vec![fresh, reduced, searched, normed, self.updated.to_vec(), alone(self.gathered)]
    }
}

/// What the caching allocator takes for tensors that are alive in turn: each has the smallest free block that is large
/// enough, which is split, or a new one; what a turn frees is whole again for the next (pytorch/pytorch
/// c10/cuda/CUDACachingAllocator.cpp).
///
/// Turns of 1, of 3, then of 2 and 1: 4 bytes.
fn taken_in_turn(turns: &[Vec<Bytes>]) -> Bytes {
    let mut blocks: Vec<f64> = Vec::new();
    for turn in turns {
        let mut free: Vec<(f64, usize)> = blocks.iter().copied().zip(0..).collect();
        for bytes in turn.iter().map(|bytes| bytes.0) {
            let fitting = free.iter_mut().filter(|(left, _)| *left >= bytes);
            match fitting.min_by(|a, b| a.0.total_cmp(&b.0)) {
                Some((left, _)) => *left -= bytes,
                None => blocks.push(bytes),
            }
        }
    }
    Bytes(blocks.iter().sum())
}

/// No less than what an optimizer copies of a layer, as many bytes for every parameter, so that those of layers add up.
pub fn copied_gradients(
    copies: Copies,
    (n_local, n_updated): (f64, f64),
    precision: Precision,
    constants: &Constants,
) -> Bytes {
    let owned = Owned { local: n_local, updated: n_updated, largest: 0.0 };
    let copied = Copied::of(copies, owned, precision, constants);
    copied_for_ever(copies, (n_local, n_updated), precision) + copied.part + copied.updated.into_iter().sum()
}

/// No less than what it copies of a stage whatever its parameters.
pub fn copied_buckets(copies: Copies, precision: Precision, constants: &Constants) -> Bytes {
    let owned = Owned { local: f64::INFINITY, ..Owned::default() };
    let Copied { reduced, gathered, .. } = Copied::of(copies, owned, precision, constants);
    reduced + gathered
}

/// No less than what it copies of the largest gradient of a stage, of whose layer a rank updates so many elements. The
/// gradients of what it updates are counted with those of layers, but where it updates less than the tensor of which it
/// does.
pub fn copied_tensors(
    copies: Copies,
    (largest, updated): (f64, f64),
    precision: Precision,
    constants: &Constants,
) -> Bytes {
    let owned = Owned { local: largest, updated: largest, largest };
    let Copied { fresh, part, searched, normed, .. } = Copied::of(copies, owned, precision, constants);
    let beyond = if updated < largest { part } else { Bytes::ZERO };
    fresh + beyond + searched + normed
}

/// Link at which the buffers of a communicator were measured.
const MEASURED_LINK: BytesPerSecond = BytesPerSecond(300e9);

/// Link beyond which no more channels are opened: NCCL has 64 at most (`MAXCHANNELS`), and 24 at 300 GB/s.
const WIDEST_LINK: BytesPerSecond = BytesPerSecond(800e9);

/// Buffers of one communicator of devices on a link.
///
/// NCCL opens channels until they carry what the link does, each with buffers of its own, so bytes grow with its rate.
/// A100 at 300 GB/s: 0.57 GiB as measured; V100 at 150 GB/s: 0.29; a card on PCI Express at 31.5 GB/s: 0.06.
pub fn communicator_bytes(link: BytesPerSecond, constants: &Constants) -> Bytes {
    constants.communicator_bytes * (link.min(WIDEST_LINK) / MEASURED_LINK)
}

/// What the device holds beyond the plan's tensors, whatever they are: the context, the matrix library's workspace and
/// the buffers of each communicator.
///
/// Four communicators at 300 GB/s: 0.6 + 0.0625 + 4 x 0.574 = 2.96 GiB. What the allocator loses to fragments comes on
/// top (`fragmentation_factor`).
pub fn reserve_bytes(n_communicators: u32, link: BytesPerSecond, constants: &Constants) -> Bytes {
    constants.context_bytes
        + constants.workspace_bytes
        + communicator_bytes(link, constants) * f64::from(n_communicators)
}

/// Peak bytes of one device by category.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryBreakdown {
    /// Parameters as stored.
    pub parameters: Bytes,
    /// Gradient accumulators.
    pub gradients: Bytes,
    /// Optimizer states and master copies.
    pub optimizer: Bytes,
    /// Saved activations of all micro-batches in flight, by kind.
    pub activations: BTreeMap<String, Bytes>,
    /// Logits and their gradient.
    pub logits: Bytes,
    /// Parameters gathered for use.
    pub gathered_units: Bytes,
    /// Working tensors, transfers and recomputation of one layer.
    pub buffers: Bytes,
    /// Allocator, context and communicators.
    pub reserve: Bytes,
    /// States in the memory of the host and on its drives: no part of the total.
    pub on_node: OnNode,
}

impl MemoryBreakdown {
    /// Everything together: what must not exceed the device's memory.
    pub fn total(&self) -> Bytes {
        self.allocated() + self.reserve
    }

    /// Everything but the reserve: what frameworks print as allocated.
    pub fn allocated(&self) -> Bytes {
        let states = self.parameters + self.gradients + self.optimizer;
        states + self.saved() + self.logits + self.gathered_units + self.buffers
    }

    /// Saved activations of all kinds.
    pub fn saved(&self) -> Bytes {
        self.activations.values().copied().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn megatron_bf16_takes_18_bytes_per_parameter_and_fp32_16() {
        let total = |precision, gradients| StateBytes::adamw(precision, gradients).total().0;
        assert_eq!(total(Precision::Bf16, GradientFormat::Full), 18.0);
        assert_eq!(total(Precision::Bf16, GradientFormat::Half), 16.0);
        assert_eq!(total(Precision::Fp32, GradientFormat::Full), 16.0);
    }

    #[test]
    fn the_update_moves_46_bytes_per_bf16_parameter_and_44_per_fp32_one() {
        let moved = |precision| update_traffic(1.0, StateBytes::adamw(precision, GradientFormat::Full)).0;
        assert_eq!((moved(Precision::Bf16), moved(Precision::Fp32)), (46.0, 44.0));
    }

    #[test]
    fn logits_take_what_their_kernel_keeps() {
        let constants = Constants::load();
        let bytes = |kernel| logits_bytes(100.0, kernel, &constants).0;
        let all = [bytes(LossKernel::Plain), bytes(LossKernel::Unfused), bytes(LossKernel::Fused)];
        assert_eq!(all, [1400.0, 800.0, 400.0]);
    }

    #[test]
    fn the_reserve_grows_with_communicators_and_their_link() {
        let of = |n, link| reserve_bytes(n, BytesPerSecond(link), &Constants::load()).0 / 1024.0_f64.powi(3);
        assert!((of(0, 300e9) - 0.6625).abs() < 1e-9);
        assert!((of(4, 300e9) - 0.6625 - 4.0 * 0.5737).abs() < 1e-3, "{}", of(4, 300e9));
        assert!((of(4, 150e9) - of(0, 150e9)) * 2.0 - (of(4, 300e9) - of(0, 300e9)) < 1e-9);
        assert!((of(4, 7200e9) - of(4, 800e9)).abs() < 1e-9, "{}", of(4, 7200e9));
    }

    /// The figures of its comment, and those of DeepSpeed as it was.
    #[test]
    fn deepspeed_copies_buckets_gradients_and_the_largest_of_them() {
        let constants = Constants::load();
        let owned = Owned { local: 2e9, updated: 0.5e9, largest: 1e8 };
        let of = |copies, precision| copied_bytes(copies, owned, precision, &constants).0;
        // The bucket of parameters is larger than the cast gradient.
        assert_eq!(of(Copies::Buckets, Precision::Bf16), 4e9 + 0.4e9 + 1e9);
        // The blocks of the fresh gradient and of the bucket serve all that follows but what is updated in fp32.
        assert_eq!(of(Copies::Buckets, Precision::Fp16), 1e9 + 0.2e9 + 1e9 + 2e9);
        assert_eq!(
            of(Copies::WholeMaster, Precision::Bf16),
            of(Copies::Buckets, Precision::Bf16) + 4.0 * 1.5e9
        );
        assert_eq!(of(Copies::WholeMaster, Precision::Fp16), of(Copies::Buckets, Precision::Fp16));
        assert_eq!(of(Copies::None, Precision::Bf16), 0.0);
        // The norm of a large tensor takes more than what is updated.
        let large = Owned { local: 2e9, updated: 0.5e9, largest: 0.5e9 };
        let large = copied_bytes(Copies::Buckets, large, Precision::Fp16, &constants);
        assert_eq!(large, Bytes(1e9 + 1e9 + 2e9 + 4e9));
        // Of a tensor larger than that a rank has one end, and all of it in its gradients.
        let larger = Owned { local: 2e9, updated: 0.5e9, largest: 0.6e9 };
        let larger = copied_bytes(Copies::Buckets, larger, Precision::Fp16, &constants);
        assert_eq!(larger - large, Bytes(1e9 + 0.2e9));
    }

    /// What the search adds up layer by layer is no less than what a stage takes.
    #[test]
    fn parts_of_copies_are_no_less_than_the_whole() {
        let constants = Constants::load();
        for copies in [Copies::None, Copies::Buckets, Copies::WholeMaster] {
            for precision in [Precision::Fp16, Precision::Bf16, Precision::Fp32] {
                for (local, updated, largest) in [(2e9, 2e9, 1e9), (2e9, 5e8, 9e8), (3e8, 1e7, 1e8)] {
                    let whole =
                        copied_bytes(copies, Owned { local, updated, largest }, precision, &constants);
                    let parts = copied_gradients(copies, (local, updated), precision, &constants)
                        + copied_buckets(copies, precision, &constants)
                        + copied_tensors(copies, (largest, updated), precision, &constants);
                    assert!(whole <= parts, "{copies:?} {precision:?} {local}: {whole:?} {parts:?}");
                }
            }
        }
    }

    #[test]
    fn blocks_serve_again_where_they_are_large_enough() {
        let taken = |turns: &[&[f64]]| {
            let turns: Vec<Vec<Bytes>> =
                turns.iter().map(|turn| turn.iter().map(|bytes| Bytes(*bytes)).collect()).collect();
            taken_in_turn(&turns).0
        };
        assert_eq!(taken(&[&[1.0], &[3.0], &[2.0, 1.0]]), 4.0);
        assert_eq!(taken(&[&[4.0], &[1.0, 2.0, 2.0]]), 6.0);
        assert_eq!(taken(&[&[1.0, 1.0], &[2.0]]), 4.0);
        assert_eq!(taken(&[]), 0.0);
    }

    #[test]
    fn gathered_units_are_the_two_largest_and_a_gradient() {
        let unit = |parameters, count| GatheredUnit {
            parameters: Bytes(parameters),
            gradient: Bytes(2.0 * parameters),
            count,
        };
        let of = |units: &[GatheredUnit]| gathered_units(units.iter().copied()).0;
        assert_eq!(of(&[unit(0.4e9, 12.0)]), 1.6e9);
        assert_eq!(of(&[unit(3.0, 1.0)]), 9.0);
        assert_eq!(of(&[unit(3.0, 1.0), unit(1.0, 8.0), unit(4.0, 1.0)]), 15.0);
        assert_eq!(of(&[unit(1.0, 2.0), unit(3.0, 1.0), unit(9.0, 0.0)]), 10.0);
    }

    #[test]
    fn the_total_adds_each_category_once() {
        let memory = MemoryBreakdown {
            parameters: Bytes(1.0),
            gradients: Bytes(10.0),
            optimizer: Bytes(100.0),
            activations: BTreeMap::from([("attention".into(), Bytes(200.0)), ("mlp".into(), Bytes(800.0))]),
            logits: Bytes(1e4),
            gathered_units: Bytes(1e5),
            buffers: Bytes(1e6),
            reserve: Bytes(1e7),
            on_node: OnNode { host: Bytes(1e8), nvme: Bytes(1e8) },
        };
        assert_eq!((memory.total(), memory.saved()), (Bytes(11_111_111.0), Bytes(1000.0)));
    }
}
