//! Bytes on a device: model states per parameter, logits, gathered units, and what lies beyond the tensors.
//!
//! It prices what it is told lives; which tensors live when is the schedule's business.

use std::collections::BTreeMap;

use ir::cluster::Precision;
use ir::engine::{Copies, GradientFormat, LossKernel};
use ir::units::{Bytes, BytesPerSecond};
use serde::{Deserialize, Serialize};

use crate::constants::Constants;
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

    /// All states of one parameter that no axis shards.
    pub fn total(self) -> Bytes {
        self.parameter + self.gradient + self.optimizer()
    }
}

/// Bytes that AdamW's update moves through device memory for `n_parameters` local ones.
///
/// Reads the gradient; reads and writes the moments and the fp32 value; casts that to the parameter where it is a copy;
/// and passes twice more over the gradient, to take its norm and to clear it.
/// bf16 with fp32 gradients: 4 + 2 x 12 + 2 + 2 x 4 = 38 bytes.
pub fn update_traffic(n_parameters: f64, states: StateBytes) -> Bytes {
    let (value, cast) = if states.master == Bytes::ZERO {
        (states.parameter, Bytes::ZERO)
    } else {
        (states.master, states.parameter)
    };
    (states.gradient * 3.0 + (value + states.moments) * 2.0 + cast) * n_parameters
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

/// Parameters gathered for use, of all layers of a stage: the unit in use and the one being fetched, and the gradient of
/// one before it is reduced (Zhao et al. 2023, arXiv 2304.11277, section 4.3.1). Which two are neighbours is not asked: the
/// two largest.
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

/// What an optimizer copies beside the states, for `n_local` parameters of a device of which it updates `n_updated`.
///
/// DeepSpeed (runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py, defaults of runtime/zero/config.py): one bucket of
/// gradients under reduction and one of parameters being gathered, each of up to 5e8 elements; then, of 16-bit gradients, the
/// part that is updated is flattened and cast to fp32 (`self.flatten(self.averaged_gradients[i]).to(...)`): two copies, both
/// alive while the second is made. In bf16 gradients are summed in fp32, and those that backward yields stay beside the
/// sums until it is done.
///
/// 2e9 parameters in bf16, a fourth of them updated: 1e9 + 1e9 + 4e9 bytes; in fp16 1e9 + 1e9 + 3e9.
pub fn copied_bytes(
    copies: Copies,
    (n_local, n_updated): (f64, f64),
    precision: Precision,
    constants: &Constants,
) -> Bytes {
    copied_buckets(copies, n_local, precision, constants)
        + copied_gradients(copies, (n_local, n_updated), precision)
}

/// Of it, the two buckets.
pub fn copied_buckets(copies: Copies, n_local: f64, precision: Precision, constants: &Constants) -> Bytes {
    match copies {
        Copies::None => Bytes::ZERO,
        Copies::Buckets => element_bytes(precision) * n_local.min(constants.bucket_elements) * 2.0,
    }
}

/// Of it, the gradients: as many bytes for every parameter, so that those of layers add up.
pub fn copied_gradients(copies: Copies, (n_local, n_updated): (f64, f64), precision: Precision) -> Bytes {
    match (copies, precision) {
        (Copies::None, _) | (Copies::Buckets, Precision::Fp32) => Bytes::ZERO,
        (Copies::Buckets, Precision::Fp16) => {
            (element_bytes(precision) + element_bytes(Precision::Fp32)) * n_updated
        }
        (Copies::Buckets, Precision::Bf16 | Precision::Fp8) => element_bytes(precision) * n_local,
    }
}

/// Link at which the buffers of a communicator were measured.
const MEASURED_LINK: BytesPerSecond = BytesPerSecond(300e9);

/// Buffers of one communicator of devices on a link.
///
/// NCCL opens channels until they carry what the link does, each with buffers of its own, so bytes grow with its rate.
/// A100 at 300 GB/s: 0.57 GiB as measured; V100 at 150 GB/s: 0.29; a card on PCI Express at 31.5 GB/s: 0.06.
pub fn communicator_bytes(link: BytesPerSecond, constants: &Constants) -> Bytes {
    constants.communicator_bytes * (link / MEASURED_LINK)
}

/// What the device holds beyond the plan's tensors, whatever they are: the context, the matrix library's workspace and
/// the buffers of each communicator.
///
/// Four communicators at 300 GB/s: 0.6 + 0.0625 + 4 x 0.574 = 2.96 GiB. What the allocator loses to fragments comes on top
/// (`fragmentation_factor`).
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
    /// States in the host's memory: no part of the total.
    pub host: Bytes,
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
    fn the_update_moves_38_bytes_per_bf16_parameter_and_36_per_fp32_one() {
        let moved = |precision| update_traffic(1.0, StateBytes::adamw(precision, GradientFormat::Full)).0;
        assert_eq!((moved(Precision::Bf16), moved(Precision::Fp32)), (38.0, 36.0));
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
    }

    /// The figures of its comment.
    #[test]
    fn deepspeed_copies_two_buckets_and_gradients() {
        let constants = Constants::load();
        let of = |copies, precision| copied_bytes(copies, (2e9, 0.5e9), precision, &constants).0;
        assert_eq!(of(Copies::Buckets, Precision::Bf16), 6e9);
        assert_eq!(of(Copies::Buckets, Precision::Fp16), 5e9);
        assert_eq!(of(Copies::None, Precision::Bf16), 0.0);
        let small = copied_bytes(Copies::Buckets, (1e8, 1e8), Precision::Fp16, &constants);
        assert_eq!(small, Bytes(2.0 * 2e8 + 6e8));
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
            host: Bytes(1e8),
        };
        assert_eq!((memory.total(), memory.saved()), (Bytes(11_111_111.0), Bytes(1000.0)));
    }
}
