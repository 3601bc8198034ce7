//! The constants of the world that no cluster description gives: efficiencies, fixed times, memory overheads.
//!
//! They live in `data/constants.json`, each with value, unit (in its name), meaning and source; reading refuses an
//! entry that lacks one of them. A caller that calibrates for its own cluster changes the fields of a loaded set.

use std::collections::BTreeMap;

use ir::cluster::{Architecture, Precision};
use ir::engine::{Engine, FlashKernel, Generation, Kernels, Launches};
use ir::units::{Bytes, BytesPerSecond, Seconds};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

/// The embedded data file, for reports that show where a figure comes from.
pub const CONSTANTS_JSON: &str = include_str!("../data/constants.json");

/// A tile of a matrix product's result.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tile {
    /// Rows.
    pub m: f64,
    /// Columns.
    pub n: f64,
    /// Rate against that of the largest tile.
    pub efficiency_fraction: f64,
}

/// Efficiency of matrix products per family and precision.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmEfficiencies([[f64; N_PRECISIONS]; N_ARCHITECTURES]);

/// Efficiency of the attention core per family.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionEfficiencies([f64; N_ARCHITECTURES]);

/// What devices of a family draw at full power per listed TFLOP/s in 16 bits, where that is known of the devices whose
/// efficiencies were fitted.
#[derive(Clone, Debug, PartialEq)]
pub struct FullPower([Option<f64>; N_ARCHITECTURES]);

const N_ARCHITECTURES: usize = Architecture::Other as usize + 1;
const N_PRECISIONS: usize = Precision::Fp8 as usize + 1;

/// Every constant of the cost model; the data file says what each means and where it is from.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constants {
    /// Sustained over peak rate of matrix products.
    #[serde(deserialize_with = "gemm_efficiencies")]
    pub gemm_efficiency_fraction_of_peak: GemmEfficiencies,
    /// Sustained over 16-bit peak rate of the attention core.
    #[serde(deserialize_with = "attention_efficiencies")]
    pub attention_efficiency_fraction_of_peak: AttentionEfficiencies,
    /// The same for Hopper with FlashAttention-2.
    #[serde(deserialize_with = "value")]
    pub attention_efficiency_hopper_flash_2_fraction_of_peak: f64,
    /// Sustained over peak rate of 16-bit matrix products on Hopper with libraries of before 2025.
    #[serde(deserialize_with = "value")]
    pub gemm_efficiency_hopper_before_2025_fraction_of_peak: f64,
    /// The same of the attention core.
    #[serde(deserialize_with = "value")]
    pub attention_efficiency_hopper_before_2025_fraction_of_peak: f64,
    /// The same with kernels of the FlashAttention-2 era.
    #[serde(deserialize_with = "value")]
    pub attention_efficiency_hopper_flash_2_before_2025_fraction_of_peak: f64,
    /// Power at which the families' efficiencies hold.
    #[serde(deserialize_with = "full_power")]
    pub full_power_watts_per_tflops: FullPower,
    /// Tiles that a kernel may choose from.
    #[serde(deserialize_with = "value")]
    pub gemm_tiles: [Tile; 7],
    /// Ways to split the contraction.
    #[serde(deserialize_with = "value")]
    pub gemm_splits: [f64; 3],
    /// Start and end of a tile, in units of the contraction length.
    #[serde(deserialize_with = "value")]
    pub gemm_prologue_k: f64,
    /// Step of a contraction.
    #[serde(deserialize_with = "value")]
    pub gemm_contraction_step: f64,
    /// Rate of misaligned over aligned products, of batches of them.
    #[serde(deserialize_with = "value")]
    pub gemm_misaligned_fraction: f64,
    /// The same of single ones.
    #[serde(deserialize_with = "value")]
    pub gemm_single_misaligned_fraction: f64,
    /// Reached over listed memory bandwidth.
    #[serde(deserialize_with = "value")]
    pub memory_efficiency_fraction: f64,
    /// Gap between kernels.
    #[serde(deserialize_with = "value")]
    pub kernel_gap_s: Seconds,
    /// Slow-down of unfused memory-bound operators.
    #[serde(deserialize_with = "value")]
    pub eager_stream_factor: f64,
    /// fp32 over 16-bit rate where a device lists none.
    #[serde(deserialize_with = "value")]
    pub fp32_over_half_rate_fraction: f64,
    /// Queries at which attention reaches half its rate.
    #[serde(deserialize_with = "value")]
    pub attention_saturation_queries: f64,
    /// Backward over forward rate of attention.
    #[serde(deserialize_with = "value")]
    pub attention_backward_efficiency_factor: f64,
    /// Reached over listed bandwidth inside a node.
    #[serde(deserialize_with = "value")]
    pub node_link_efficiency_fraction: f64,
    /// Reached over listed bandwidth between nodes.
    #[serde(deserialize_with = "value")]
    pub network_efficiency_fraction: f64,
    /// Network rate lost per doubling of nodes.
    #[serde(deserialize_with = "value")]
    pub network_contention_per_log2_nodes: f64,
    /// Fixed time of a collective phase.
    #[serde(deserialize_with = "value")]
    pub collective_launch_s: Seconds,
    /// Extra time of a phase per doubling of nodes.
    #[serde(deserialize_with = "value")]
    pub network_sync_s_per_log2_nodes: Seconds,
    /// What a channel of a ring hands on at a time.
    #[serde(deserialize_with = "value")]
    pub collective_slot_bytes: Bytes,
    /// Tree over ring bandwidth.
    #[serde(deserialize_with = "value")]
    pub tree_bandwidth_fraction: f64,
    /// In-switch over link bandwidth inside a node.
    #[serde(deserialize_with = "value")]
    pub in_switch_node_fraction: f64,
    /// In-switch over link bandwidth in the network.
    #[serde(deserialize_with = "value")]
    pub in_switch_network_fraction: f64,
    /// Devices per uplink of a bus.
    #[serde(deserialize_with = "value")]
    pub bus_devices_per_uplink: f64,
    /// Slow-down of overlapped streams.
    #[serde(deserialize_with = "value")]
    pub overlap_slowdown_fraction: f64,
    /// The same where parameters are gathered per layer.
    #[serde(deserialize_with = "value")]
    pub gathered_overlap_slowdown_fraction: f64,
    /// Share of tensor parallel gathers that shows.
    #[serde(deserialize_with = "value")]
    pub tensor_overlap_residual_fraction: f64,
    /// Stragglers per doubling of nodes.
    #[serde(deserialize_with = "value")]
    pub jitter_fraction_per_log2_nodes: f64,
    /// Host time of one iteration.
    #[serde(deserialize_with = "value")]
    pub host_per_iteration_s: Seconds,
    /// Host time per kernel of a layer.
    #[serde(deserialize_with = "value")]
    pub launch_s: Seconds,
    /// Power of a waiting device over its limit.
    #[serde(deserialize_with = "value")]
    pub idle_power_fraction: f64,
    /// Storage's share of a device.
    #[serde(deserialize_with = "value")]
    pub storage_bytes_per_s_per_device: BytesPerSecond,
    /// From a failure until training goes on.
    #[serde(deserialize_with = "value")]
    pub restart_s: Seconds,
    /// Reached over listed rate of the link to the host.
    #[serde(deserialize_with = "value")]
    pub host_link_efficiency_fraction: f64,
    /// Parameters that the processors of a node update in a second.
    #[serde(deserialize_with = "value")]
    pub host_update_parameters_per_s: f64,
    /// Share of a node's memory that states may take.
    #[serde(deserialize_with = "value")]
    pub host_memory_usable_fraction: f64,
    /// Reserved over allocated bytes.
    #[serde(deserialize_with = "value")]
    pub fragmentation_factor: f64,
    /// Device context.
    #[serde(deserialize_with = "value")]
    pub context_bytes: Bytes,
    /// Elements of a bucket of an engine that has them.
    #[serde(deserialize_with = "value")]
    pub bucket_elements: f64,
    /// Buffers of one communicator on links of 300 GB/s.
    #[serde(deserialize_with = "value")]
    pub communicator_bytes: Bytes,
    /// Workspace of the matrix library.
    #[serde(deserialize_with = "value")]
    pub workspace_bytes: Bytes,
    /// Peak bytes per logit, plain eager cross-entropy.
    #[serde(deserialize_with = "value")]
    pub logits_plain_bytes_per_element: f64,
    /// Peak bytes per logit, Megatron's cross-entropy.
    #[serde(deserialize_with = "value")]
    pub logits_unfused_bytes_per_element: f64,
    /// Peak bytes per logit, fused cross-entropy.
    #[serde(deserialize_with = "value")]
    pub logits_fused_bytes_per_element: f64,
    /// The software that runs the job; no constant, but what decides which of them count.
    #[serde(skip)]
    pub engine: Engine,
}

impl Constants {
    /// The constants shipped with the crate. Parsing takes about 50 us: load once per run, not per price.
    pub fn load() -> Self {
        serde_json::from_str(CONSTANTS_JSON).expect("a test reads the embedded file")
    }

    /// The same world as one engine sees it.
    pub fn under(self, engine: Engine) -> Self {
        Self { engine, ..self }
    }

    /// Slow-down of memory-bound operators of a layer against fused kernels.
    pub(crate) fn stream_factor(&self) -> f64 {
        match self.engine.kernels {
            Kernels::Fused => 1.0,
            Kernels::Libraries | Kernels::Eager => self.eager_stream_factor,
        }
    }

    /// Host time per kernel of a layer; what is not fused is so many kernels more.
    pub(crate) fn launch(&self) -> Seconds {
        match self.engine.launches {
            Launches::Host => self.launch_s * self.stream_factor(),
            Launches::Graph => Seconds::ZERO,
        }
    }

    /// Sustained over peak rate of matrix products on a family.
    pub(crate) fn gemm_efficiency(&self, architecture: Architecture, precision: Precision) -> f64 {
        let in_half = matches!(precision, Precision::Bf16 | Precision::Fp16);
        if architecture == Architecture::Hopper && in_half && !self.engine.generation.is_current() {
            return self.gemm_efficiency_hopper_before_2025_fraction_of_peak;
        }
        self.gemm_efficiency_fraction_of_peak.of(architecture, precision)
    }

    /// Sustained over 16-bit peak rate of the attention core on a family.
    pub(crate) fn attention_efficiency(&self, architecture: Architecture) -> f64 {
        if architecture != Architecture::Hopper {
            return self.attention_efficiency_fraction_of_peak.of(architecture);
        }
        match (self.engine.flash, self.engine.generation) {
            (FlashKernel::Current, Generation::Current) => {
                self.attention_efficiency_fraction_of_peak.of(architecture)
            }
            (FlashKernel::Second, Generation::Current) => {
                self.attention_efficiency_hopper_flash_2_fraction_of_peak
            }
            (FlashKernel::Current, Generation::Before2025) => {
                self.attention_efficiency_hopper_before_2025_fraction_of_peak
            }
            (FlashKernel::Second, Generation::Before2025) => {
                self.attention_efficiency_hopper_flash_2_before_2025_fraction_of_peak
            }
        }
    }
}

impl GemmEfficiencies {
    /// Fraction of peak for a family and precision.
    pub fn of(&self, architecture: Architecture, precision: Precision) -> f64 {
        self.0[architecture as usize][precision as usize]
    }

    /// Replaces one figure, to calibrate.
    pub fn set(&mut self, architecture: Architecture, precision: Precision, fraction: f64) {
        self.0[architecture as usize][precision as usize] = fraction;
    }
}

impl AttentionEfficiencies {
    /// Fraction of the 16-bit peak for a family.
    pub fn of(&self, architecture: Architecture) -> f64 {
        self.0[architecture as usize]
    }

    /// Replaces one figure, to calibrate.
    pub fn set(&mut self, architecture: Architecture, fraction: f64) {
        self.0[architecture as usize] = fraction;
    }
}

impl FullPower {
    /// Watts per TFLOP/s for a family.
    pub fn of(&self, architecture: Architecture) -> Option<f64> {
        self.0[architecture as usize]
    }
}

/// One constant as the data file has it: nothing may be left out.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry<T> {
    value: T,
    #[serde(deserialize_with = "words")]
    #[expect(dead_code, reason = "read so that an entry without it is refused")]
    meaning: (),
    #[serde(deserialize_with = "words")]
    #[expect(dead_code, reason = "read so that an entry without it is refused")]
    source: (),
}

fn words<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
    match String::deserialize(deserializer)?.trim() {
        "" => Err(D::Error::custom("meaning and source of a constant must not be empty")),
        _ => Ok(()),
    }
}

fn value<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Ok(Entry::deserialize(deserializer)?.value)
}

/// A family gives at least its bf16 figure, which stands for the precisions it leaves out.
fn gemm_efficiencies<'de, D: Deserializer<'de>>(deserializer: D) -> Result<GemmEfficiencies, D::Error> {
    let rows = BTreeMap::<Architecture, BTreeMap<Precision, Entry<f64>>>::deserialize(deserializer)?;
    let mut table = [[f64::NAN; N_PRECISIONS]; N_ARCHITECTURES];
    for (architecture, row) in rows {
        let bf16 = row.get(&Precision::Bf16).ok_or_else(|| D::Error::missing_field("bf16"))?.value;
        table[architecture as usize] = [bf16; N_PRECISIONS];
        for (precision, entry) in row {
            table[architecture as usize][precision as usize] = entry.value;
        }
    }
    match table.as_flattened().iter().all(|fraction| fraction.is_finite()) {
        true => Ok(GemmEfficiencies(table)),
        false => Err(D::Error::custom("an architecture is missing")),
    }
}

fn attention_efficiencies<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<AttentionEfficiencies, D::Error> {
    let rows = BTreeMap::<Architecture, Entry<f64>>::deserialize(deserializer)?;
    let mut table = [f64::NAN; N_ARCHITECTURES];
    for (architecture, entry) in rows {
        table[architecture as usize] = entry.value;
    }
    match table.iter().all(|fraction| fraction.is_finite()) {
        true => Ok(AttentionEfficiencies(table)),
        false => Err(D::Error::custom("an architecture is missing")),
    }
}

fn full_power<'de, D: Deserializer<'de>>(deserializer: D) -> Result<FullPower, D::Error> {
    let rows = BTreeMap::<Architecture, Entry<f64>>::deserialize(deserializer)?;
    let mut table = [None; N_ARCHITECTURES];
    for (architecture, entry) in rows {
        table[architecture as usize] = Some(entry.value);
    }
    Ok(FullPower(table))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The figures of the examples in the documentation: a fit moves the shipped ones, and no formula with them.
    pub(crate) fn of_examples() -> Constants {
        let mut constants = Constants {
            memory_efficiency_fraction: 0.65,
            eager_stream_factor: 1.44,
            node_link_efficiency_fraction: 0.771,
            network_efficiency_fraction: 0.98,
            gathered_overlap_slowdown_fraction: 0.29,
            tensor_overlap_residual_fraction: 0.25,
            jitter_fraction_per_log2_nodes: 0.0061,
            ..Constants::load()
        };
        let gemm = &mut constants.gemm_efficiency_fraction_of_peak;
        gemm.set(Architecture::Ampere, Precision::Bf16, 0.793);
        constants.attention_efficiency_fraction_of_peak.set(Architecture::Ampere, 0.347);
        constants
    }

    #[test]
    fn the_embedded_file_is_complete() {
        let efficiency = Constants::load().gemm_efficiency_fraction_of_peak;
        let of_tpu = |precision| efficiency.of(Architecture::Tpu, precision);
        assert_eq!(
            of_tpu(Precision::Fp32),
            of_tpu(Precision::Bf16),
            "bf16 stands for what a family leaves out"
        );
        assert!(efficiency.of(Architecture::Hopper, Precision::Fp8) > 0.3);
    }

    #[test]
    fn every_fraction_of_the_file_lies_in_zero_to_one() {
        let file: BTreeMap<String, serde_json::Value> = serde_json::from_str(CONSTANTS_JSON).unwrap();
        for (name, entry) in file.iter().filter(|(name, _)| name.contains("fraction")) {
            for value in values(entry) {
                assert!((0.0..=1.0).contains(&value), "{name}: {value}");
            }
        }
    }

    fn values(entry: &serde_json::Value) -> Vec<f64> {
        match entry.get("value") {
            Some(value) => value.as_f64().into_iter().collect(),
            None => entry.as_object().unwrap().values().flat_map(values).collect(),
        }
    }

    #[test]
    fn a_constant_without_a_source_is_refused() {
        let bare = CONSTANTS_JSON.replacen(
            "\"source\": \"NVIDIA/nccl src/graph/tuning.cc\"",
            "\"source\": \" \"",
            1,
        );
        let error = serde_json::from_str::<Constants>(&bare).unwrap_err().to_string();
        assert!(error.starts_with("meaning and source of a constant must not be empty"), "{error}");
    }
}
