//! The constants that measurements may move, by name: what a fit searches and what a calibration of a cluster sets.
//!
//! A name is that of the data file, `table.family.precision` where it is a table. One figure may stand for several
//! entries: 16-bit formats run on the same units.

use std::collections::BTreeMap;

use ir::cluster::{Architecture, Cluster, Precision};
use ir::engine::Engine;
use ir::units::{Bytes, Seconds};

use crate::constants::Constants;

/// A constant that may be moved, and between which values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameter {
    /// Name in the data file.
    pub name: &'static str,
    /// Least value with a meaning.
    pub least: f64,
    /// Largest value with a meaning.
    pub most: f64,
    /// The value at which what it stands for is gone, if there is one.
    pub without: Option<f64>,
    /// Of those that published runs decide, what is known before any run; others are for calibrations only.
    pub known: Option<(f64, f64)>,
}

/// Least and largest value.
type Range = (f64, f64);

/// A value and how far from it would be no surprise.
type Known = (f64, f64);

const fn rate(name: &'static str, range: Range, known: Known) -> Parameter {
    Parameter { name, least: range.0, most: range.1, without: None, known: Some(known) }
}

const fn effect(name: &'static str, range: Range, known: Known, without: f64) -> Parameter {
    Parameter { name, least: range.0, most: range.1, without: Some(without), known: Some(known) }
}

const fn fixed(name: &'static str, range: Range) -> Parameter {
    Parameter { name, least: range.0, most: range.1, without: None, known: None }
}

/// All constants that may be moved.
///
/// What is known beforehand: libraries sustain a half to four fifths of a peak in products (NVIDIA's and AMD's GEMM
/// benchmarks), tiled attention a quarter to a half (FlashAttention papers, arXiv 2205.14135, 2307.08691, 2407.08608,
/// with causal halves counted), memory four fifths and more (STREAM); rows that no load can align cost tensor cores
/// most of their rate (NVIDIA's "Matrix Multiplication Background"); four chunks of an overlapped product leave a
/// quarter open. FlashAttention-2 does not use what Hopper added: it reaches 33 % of an H100's peak where it reaches 61
/// % of an A100's (charts of Dao-AILab/flash-attention, length 128, causal, 16k), so 0.55 of what is known of Ampere.
#[rustfmt::skip]
pub const PARAMETERS: &[Parameter] = &[
    rate("gemm_efficiency_fraction_of_peak.volta.fp16",           (0.3,  1.0),  (0.65, 0.15)),
    rate("gemm_efficiency_fraction_of_peak.ampere.bf16",          (0.3,  1.0),  (0.65, 0.15)),
    rate("gemm_efficiency_hopper_before_2025_fraction_of_peak",   (0.3,  1.0),  (0.65, 0.15)),
    rate("gemm_efficiency_fraction_of_peak.hopper.fp8",           (0.3,  1.0),  (0.55, 0.15)),
    rate("gemm_efficiency_fraction_of_peak.blackwell.bf16",       (0.3,  1.0),  (0.65, 0.15)),
    rate("gemm_efficiency_fraction_of_peak.blackwell.fp8",        (0.2,  1.0),  (0.55, 0.15)),
    rate("attention_efficiency_fraction_of_peak.ampere",          (0.1,  1.0),  (0.35, 0.10)),
    rate("attention_efficiency_hopper_before_2025_fraction_of_peak", (0.1, 1.0), (0.35, 0.10)),
    rate("attention_efficiency_fraction_of_peak.blackwell",       (0.1,  1.0),  (0.35, 0.10)),
    rate("attention_efficiency_hopper_flash_2_before_2025_fraction_of_peak", (0.1, 1.0), (0.20, 0.04)),
    effect("gemm_misaligned_fraction",                            (0.02, 1.0),  (0.15, 0.15),   1.0),
    effect("memory_efficiency_fraction",                          (0.3,  1.0),  (0.85, 0.10),   1.0),
    effect("eager_stream_factor",                                 (1.0,  3.0),  (1.4,  0.3),    1.0),
    effect("network_contention_per_log2_nodes",                   (0.0,  2.0),  (0.1,  0.1),    0.0),
    effect("gathered_overlap_slowdown_fraction",                  (0.0,  1.0),  (0.2,  0.2),    0.0),
    effect("tensor_overlap_residual_fraction",                    (0.0,  1.0),  (0.25, 0.25),   1.0),
    effect("jitter_fraction_per_log2_nodes",                      (0.0,  0.03), (5e-3, 5e-3),   0.0),
    effect("launch_s",                                            (0.0,  2e-4), (3e-5, 2e-5),   0.0),
    effect("network_efficiency_fraction",                         (0.3,  0.98), (0.85, 0.10),   0.98),
    effect("host_per_iteration_s",                                (0.0,  0.2),  (0.02, 0.02),   0.0),
    fixed("gemm_efficiency_fraction_of_peak.hopper.bf16",         (0.3,  1.0)),
    fixed("attention_efficiency_fraction_of_peak.hopper",         (0.1,  1.0)),
    fixed("attention_efficiency_hopper_flash_2_fraction_of_peak", (0.1,  1.0)),
    fixed("gemm_efficiency_fraction_of_peak.ada.bf16",            (0.1,  1.0)),
    fixed("gemm_efficiency_fraction_of_peak.ada.fp8",             (0.1,  1.0)),
    fixed("gemm_efficiency_fraction_of_peak.cdna2.bf16",          (0.1,  1.0)),
    fixed("gemm_efficiency_fraction_of_peak.cdna3.bf16",          (0.1,  1.0)),
    fixed("gemm_efficiency_fraction_of_peak.cdna3.fp8",           (0.1,  1.0)),
    fixed("gemm_efficiency_fraction_of_peak.tpu.bf16",            (0.1,  1.0)),
    fixed("gemm_efficiency_fraction_of_peak.gaudi.bf16",          (0.1,  1.0)),
    fixed("gemm_efficiency_fraction_of_peak.gaudi.fp8",           (0.1,  1.0)),
    fixed("gemm_efficiency_fraction_of_peak.other.bf16",          (0.1,  1.0)),
    fixed("gemm_efficiency_fraction_of_peak.other.fp8",           (0.1,  1.0)),
    fixed("attention_efficiency_fraction_of_peak.volta",          (0.02, 1.0)),
    fixed("attention_efficiency_fraction_of_peak.ada",            (0.02, 1.0)),
    fixed("attention_efficiency_fraction_of_peak.cdna2",          (0.02, 1.0)),
    fixed("attention_efficiency_fraction_of_peak.cdna3",          (0.02, 1.0)),
    fixed("attention_efficiency_fraction_of_peak.tpu",            (0.02, 1.0)),
    fixed("attention_efficiency_fraction_of_peak.gaudi",          (0.02, 1.0)),
    fixed("attention_efficiency_fraction_of_peak.other",          (0.02, 1.0)),
    fixed("gemm_prologue_k",                                      (0.0,  400.0)),
    fixed("gemm_single_misaligned_fraction",                      (0.02, 1.0)),
    fixed("node_link_efficiency_fraction",                        (0.4,  1.0)),
    fixed("in_switch_node_fraction",                              (0.05, 1.0)),
    fixed("in_switch_network_fraction",                           (0.05, 1.0)),
    fixed("overlap_slowdown_fraction",                            (0.0,  1.0)),
    fixed("host_link_efficiency_fraction",                        (0.05, 1.0)),
    fixed("host_update_parameters_per_s",                         (1e6,  1e12)),
    fixed("host_memory_usable_fraction",                          (0.0,  1.0)),
    fixed("fragmentation_factor",                                 (1.0,  2.0)),
    fixed("context_bytes",                                        (0.0,  1e10)),
    fixed("communicator_bytes",                                   (0.0,  1e10)),
    fixed("workspace_bytes",                                      (0.0,  1e10)),
];

/// What is wrong with a calibrated constant.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CalibrationError {
    /// No constant of the name.
    #[error("{0}: no constant of this name can be calibrated")]
    Unknown(String),
    /// A value without meaning.
    #[error("{name}: {value} is outside {least} to {most}")]
    Range {
        /// The constant.
        name: String,
        /// What was given.
        value: f64,
        /// Least value with a meaning.
        least: f64,
        /// Largest.
        most: f64,
    },
}

/// Where a constant lives.
enum Place<'a> {
    Plain(&'a mut f64),
    Time(&'a mut Seconds),
    Size(&'a mut Bytes),
    Gemm(&'a mut Constants, Architecture, &'static [Precision]),
    Attention(&'a mut Constants, Architecture),
}

impl Constants {
    /// Value of a constant that may be moved.
    pub fn get(&self, name: &str) -> Option<f64> {
        let mut copy = self.clone();
        Some(match copy.place(name)? {
            Place::Plain(value) => *value,
            Place::Time(time) => time.0,
            Place::Size(size) => size.0,
            Place::Gemm(own, architecture, precisions) => {
                own.gemm_efficiency_fraction_of_peak.of(architecture, *precisions.first()?)
            }
            Place::Attention(own, architecture) => own.attention_efficiency_fraction_of_peak.of(architecture),
        })
    }

    /// The same world with some constants as they were measured.
    ///
    /// # Errors
    /// The first that has no such name, or a value without a meaning.
    pub fn calibrated(mut self, values: &BTreeMap<String, f64>) -> Result<Self, CalibrationError> {
        for (name, &value) in values {
            let unknown = || CalibrationError::Unknown(name.clone());
            let parameter = PARAMETERS.iter().find(|one| one.name == name).ok_or_else(unknown)?;
            let (least, most) = (parameter.least, parameter.most);
            if !(least..=most).contains(&value) {
                return Err(CalibrationError::Range { name: name.clone(), value, least, most });
            }
            self.set(name, value).ok_or_else(unknown)?;
        }
        Ok(self)
    }

    /// The same world on a cluster, as measurements there have it, and as an engine sees it.
    ///
    /// # Errors
    /// What is wrong with the cluster's calibration.
    pub fn on(self, cluster: &Cluster, engine: Engine) -> Result<Self, CalibrationError> {
        match &cluster.calibration {
            Some(calibration) => Ok(self.calibrated(&calibration.constants)?.under(engine)),
            None => Ok(self.under(engine)),
        }
    }

    /// Moves a constant; `None` where none of the name may be moved.
    pub fn set(&mut self, name: &str, to: f64) -> Option<()> {
        match self.place(name)? {
            Place::Plain(value) => *value = to,
            Place::Time(time) => *time = Seconds(to),
            Place::Size(size) => *size = Bytes(to),
            Place::Gemm(own, architecture, precisions) => {
                for &precision in precisions {
                    own.gemm_efficiency_fraction_of_peak.set(architecture, precision, to);
                }
            }
            Place::Attention(own, architecture) => {
                own.attention_efficiency_fraction_of_peak.set(architecture, to);
            }
        }
        Some(())
    }

    fn place(&mut self, name: &str) -> Option<Place<'_>> {
        const HALF: &[Precision] = &[Precision::Bf16, Precision::Fp16];
        const EIGHT: &[Precision] = &[Precision::Fp8];
        let (table, rest) = name.split_once('.').unwrap_or((name, ""));
        let (family, precision) = rest.split_once('.').unwrap_or((rest, ""));
        Some(match table {
            "gemm_efficiency_fraction_of_peak" => {
                let precisions = match precision {
                    "bf16" | "fp16" => HALF,
                    "fp8" => EIGHT,
                    _ => return None,
                };
                Place::Gemm(self, architecture(family)?, precisions)
            }
            "attention_efficiency_fraction_of_peak" => Place::Attention(self, architecture(family)?),
            "attention_efficiency_hopper_flash_2_fraction_of_peak" => {
                Place::Plain(&mut self.attention_efficiency_hopper_flash_2_fraction_of_peak)
            }
            "gemm_efficiency_hopper_before_2025_fraction_of_peak" => {
                Place::Plain(&mut self.gemm_efficiency_hopper_before_2025_fraction_of_peak)
            }
            "attention_efficiency_hopper_before_2025_fraction_of_peak" => {
                Place::Plain(&mut self.attention_efficiency_hopper_before_2025_fraction_of_peak)
            }
            "attention_efficiency_hopper_flash_2_before_2025_fraction_of_peak" => {
                Place::Plain(&mut self.attention_efficiency_hopper_flash_2_before_2025_fraction_of_peak)
            }
            "gemm_prologue_k" => Place::Plain(&mut self.gemm_prologue_k),
            "memory_efficiency_fraction" => Place::Plain(&mut self.memory_efficiency_fraction),
            "eager_stream_factor" => Place::Plain(&mut self.eager_stream_factor),
            "node_link_efficiency_fraction" => Place::Plain(&mut self.node_link_efficiency_fraction),
            "network_efficiency_fraction" => Place::Plain(&mut self.network_efficiency_fraction),
            "in_switch_node_fraction" => Place::Plain(&mut self.in_switch_node_fraction),
            "in_switch_network_fraction" => Place::Plain(&mut self.in_switch_network_fraction),
            "gathered_overlap_slowdown_fraction" => {
                Place::Plain(&mut self.gathered_overlap_slowdown_fraction)
            }
            "overlap_slowdown_fraction" => Place::Plain(&mut self.overlap_slowdown_fraction),
            "tensor_overlap_residual_fraction" => Place::Plain(&mut self.tensor_overlap_residual_fraction),
            "jitter_fraction_per_log2_nodes" => Place::Plain(&mut self.jitter_fraction_per_log2_nodes),
            "host_per_iteration_s" => Place::Time(&mut self.host_per_iteration_s),
            "launch_s" => Place::Time(&mut self.launch_s),
            "host_link_efficiency_fraction" => Place::Plain(&mut self.host_link_efficiency_fraction),
            "host_update_parameters_per_s" => Place::Plain(&mut self.host_update_parameters_per_s),
            "host_memory_usable_fraction" => Place::Plain(&mut self.host_memory_usable_fraction),
            "fragmentation_factor" => Place::Plain(&mut self.fragmentation_factor),
            "context_bytes" => Place::Size(&mut self.context_bytes),
            "communicator_bytes" => Place::Size(&mut self.communicator_bytes),
            "workspace_bytes" => Place::Size(&mut self.workspace_bytes),
            "gemm_misaligned_fraction" => Place::Plain(&mut self.gemm_misaligned_fraction),
            "gemm_single_misaligned_fraction" => Place::Plain(&mut self.gemm_single_misaligned_fraction),
            "network_contention_per_log2_nodes" => Place::Plain(&mut self.network_contention_per_log2_nodes),
            _ => return None,
        })
    }
}

fn architecture(name: &str) -> Option<Architecture> {
    serde_json::from_value(serde_json::Value::String(name.into())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parameter_can_be_read_and_moved_and_nothing_else_moves() {
        for parameter in PARAMETERS {
            let before = Constants::load();
            let value = before.get(parameter.name).unwrap();
            assert!((parameter.least..=parameter.most).contains(&value), "{}: {value}", parameter.name);
            let mut after = before.clone();
            after.set(parameter.name, parameter.most).unwrap();
            assert_eq!(after.get(parameter.name), Some(parameter.most));
            after.set(parameter.name, value).unwrap();
            assert_eq!(after, before, "{}", parameter.name);
        }
    }

    #[test]
    fn an_unknown_name_moves_nothing() {
        let mut constants = Constants::load();
        assert_eq!(constants.set("gemm_efficiency_fraction_of_peak.ampere.int4", 0.5), None);
        assert_eq!(constants.get("nothing"), None);
    }
}
