//! Peaks of device memory: predicted against measured, and runs that died of memory.

use std::collections::BTreeMap;

use cost_model::Constants;
use ir::plan::prediction::{Prediction, StagePrediction};
use ir::units::GIB;
use rayon::prelude::*;
use serde::Serialize;

use crate::case::Case;
use crate::express_cluster::{Memory, cluster};
use crate::row::Row;
use crate::score::{Errors, Pair};

/// What a source measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Measure {
    /// Tensors alive, as the framework counts them: the reserve is not in it.
    Allocated,
    /// What the framework's allocator holds: also what it loses to fragments.
    Reserved,
    /// What the device says is taken: allocator, context and communication buffers as well.
    Taken,
}

impl Measure {
    fn of(row: &Row) -> Self {
        if row.memory_kind.contains("nvidia-smi") {
            Self::Taken
        } else if row.memory_kind.contains("reserved") {
            Self::Reserved
        } else {
            Self::Allocated
        }
    }
}

/// Whether a source looked at a stage: at all of them where it does not say at which.
fn is_seen(row: &Row, stage: usize, n_stages: usize) -> bool {
    let (is_first, is_last) = (stage == 0, stage + 1 == n_stages);
    if row.memory_kind.contains("first rank") {
        is_first
    } else if row.memory_kind.contains("first/last node") {
        is_first || is_last
    } else if row.memory_kind.contains("logged rank") {
        // Megatron logs on its last one.
        is_last
    } else {
        true
    }
}

/// One source.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemorySource {
    /// Its name.
    pub name: String,
    /// What it measured.
    pub measure: Measure,
    /// How far the predictions are off.
    pub errors: Errors,
    /// The most that a prediction is too low, as a fraction.
    pub most_below: f64,
    /// Runs that died of memory and are priced.
    pub died: usize,
    /// How many of them are predicted not to fit.
    pub died_as_predicted: usize,
    /// Each row.
    pub rows: Vec<MemoryRow>,
}

/// One row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryRow {
    /// Its name.
    pub id: String,
    /// GiB measured; the device's memory for a run that died of it.
    pub measured_gib: f64,
    /// GiB predicted on the stage with most.
    pub predicted_gib: f64,
    /// `predicted / measured - 1`.
    pub error: f64,
    /// Whether the run died of memory.
    pub died: bool,
}

/// Peaks of every row that has one and can be priced, by source.
pub fn memory_report(rows: &[Row], constants: &Constants) -> Vec<MemorySource> {
    let priced: Vec<(String, Measure, MemoryRow)> = rows
        .par_iter()
        .filter_map(|row| Some((source_name(row), Measure::of(row), priced(row, constants)?)))
        .collect();
    let mut sources: BTreeMap<(String, Measure), Vec<MemoryRow>> = BTreeMap::new();
    for (name, measure, row) in priced {
        sources.entry((name, measure)).or_default().push(row);
    }
    sources.into_iter().map(|((name, measure), rows)| source(name, measure, rows)).collect()
}

fn source_name(row: &Row) -> String {
    if row.is_mixture() { format!("{}, experts", row.source) } else { row.source.clone() }
}

fn priced(row: &Row, constants: &Constants) -> Option<MemoryRow> {
    let died = row.oom == 1;
    // Bytes are those of a plan; where a planner of theirs cut the states, it is not told how.
    let is_told = row.zero.parse::<u8>().is_ok() || row.dp == Some(1);
    // Where a paper prints what its formulas say, nothing was measured.
    let is_measured = died || row.peak_memory_gb.is_some() && !row.memory_kind.contains("formulas");
    if !(is_told && is_measured) {
        return None;
    }
    // What was measured of time is of no account here, and a run that died has none.
    let whole = Row { step_s: Some(1.0), complete: row.complete.max(u8::from(died)), ..row.clone() };
    let prediction = Case::new(&whole, constants).ok()?.price(constants)?;
    let measured_gib = match row.peak_memory_gb {
        Some(peak) if !died => peak,
        Some(_) | None => cluster(row, Memory::Listed).ok()?.groups.first()?.device.memory_bytes.0 / GIB,
    };
    let measure = if died { Measure::Taken } else { Measure::of(row) };
    let bytes = |stage: &StagePrediction| match measure {
        Measure::Allocated => allocated_on(stage),
        Measure::Reserved => allocated_on(stage) * constants.fragmentation_factor,
        Measure::Taken => stage.peak_memory_bytes.0,
    };
    let n_stages = prediction.stages.len();
    let seen = prediction.stages.iter().enumerate().filter(|(at, _)| died || is_seen(row, *at, n_stages));
    let predicted_gib = seen.map(|(_, stage)| bytes(stage)).fold(0.0, f64::max) / GIB;
    let error = predicted_gib / measured_gib - 1.0;
    Some(MemoryRow { id: row.id.clone(), measured_gib, predicted_gib, error, died })
}

/// Bytes of tensors alive at most on a device of a stage: no reserve.
fn allocated_on(stage: &StagePrediction) -> f64 {
    stage.peak_memory_bytes.0 - stage.memory.get("reserve").map_or(0.0, |bytes| bytes.0)
}

/// The same on the stage with most.
pub(crate) fn allocated(prediction: &Prediction) -> f64 {
    prediction.stages.iter().map(allocated_on).fold(0.0, f64::max)
}

fn source(name: String, measure: Measure, rows: Vec<MemoryRow>) -> MemorySource {
    let lived = rows.iter().filter(|row| !row.died);
    let pairs: Vec<Pair> =
        lived.clone().map(|row| Pair { measured: row.measured_gib, predicted: row.predicted_gib }).collect();
    MemorySource {
        name,
        measure,
        errors: Errors::of(&pairs),
        most_below: lived.map(|row| -row.error).fold(0.0, f64::max),
        died: rows.iter().filter(|row| row.died).count(),
        died_as_predicted: rows.iter().filter(|row| row.died && row.error > 0.0).count(),
        rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::shipped;

    fn of(source: &str) -> MemorySource {
        let is_own = |row: &Row| row.source == source && !row.is_mixture();
        let rows: Vec<Row> = shipped().into_iter().filter(is_own).collect();
        let mut report = memory_report(&rows, &Constants::load());
        assert_eq!(report.len(), 1, "{report:?}");
        report.remove(0)
    }

    /// What `nvidia-smi` showed of Megatron-DeepSpeed on A100 and V100, of which nothing is fitted. Runs of 2021
    /// without a pipeline took some four bytes a parameter more than those with one, for which nothing is counted.
    #[test]
    fn taken_peaks_hold_with_the_reserve_and_what_deepspeed_copies() {
        for (source, mean, bias) in [("bloom-prequel", 0.065, 0.02), ("bigscience-v100-1b3", 0.14, 0.11)] {
            let found = of(source);
            assert_eq!(found.measure, Measure::Taken);
            assert!(found.errors.mean <= mean && found.errors.bias.abs() <= bias, "{:?}", found.errors);
        }
    }

    /// Megatron-Core with its flags known, 31 dense runs of 8 B200; and a fork of Megatron-LM, 16 runs with
    /// vocabularies of 32k to 256k on 8 A100, on the first of them.
    #[test]
    fn allocated_peaks_hold_where_the_flags_are_known() {
        for (name, n_rows) in [("simumax-b200", 31), ("vocabpar-2024", 16)] {
            let source = of(name);
            assert!(source.errors.rows >= n_rows && source.measure == Measure::Allocated);
            let within =
                source.errors.mean <= 0.015 && source.errors.max <= 0.04 && source.most_below <= 0.03;
            assert!(within, "{name}: {:?}, most below {}", source.errors, source.most_below);
        }
    }

    /// The same engine with experts: four layers of DeepSeek-V2 and V3.
    #[test]
    fn allocated_peaks_of_experts_hold_where_the_flags_are_known() {
        let rows: Vec<Row> = shipped().into_iter().filter(|row| row.source == "simumax-b200").collect();
        let report = memory_report(&rows, &Constants::load());
        let [_dense, experts] = &report[..] else { panic!("{report:?}") };
        assert!(experts.errors.rows == 12 && experts.errors.max <= 0.04, "{:?}", experts.errors);
    }

    /// XLA's allocator, whose reuse of buffers nobody tells.
    #[test]
    fn alpas_peaks_hold_with_gradients_whole_until_backward_is_done() {
        let source = of("alpa-intra-v100");
        let within = source.errors.mean <= 0.025 && source.errors.max <= 0.06 && source.most_below <= 0.03;
        assert!(within && source.died_as_predicted == source.died, "{source:?}");
    }

    /// The peaks that arXiv 2205.05198 prints are its formulas, so they are none: 18 bytes per parameter of the layers,
    /// and 34 s b h of activations, of as many layers as a first stage of an interleaved pipeline has under way
    /// (sections 3 and 4, Fig. 1).
    #[test]
    fn peaks_that_are_formulas_are_no_measurements() {
        let rows: Vec<Row> = shipped().into_iter().filter(|row| row.source == "korthikanti-2022").collect();
        assert_eq!(memory_report(&rows, &Constants::load()), []);
        let printed: Vec<&Row> = rows.iter().filter(|row| row.peak_memory_gb.is_some()).collect();
        assert_eq!(printed.len(), 4);
        for row in printed {
            let of = |count: Option<u64>| count.unwrap_or(1) as f64;
            let (t, p, v) = (of(row.tp), of(row.pp), f64::from(row.vpp.unwrap_or(1)));
            let (l, h) = (row.layers as f64, row.hidden as f64);
            let states = 18.0 * 12.0 * l * h * h / (t * p);
            let in_flight = if v > 1.0 { 1.0 + (p - 1.0) / (p * v) } else { 1.0 };
            let activations = 34.0 * row.seq as f64 * of(row.micro_batch) * h * l / t * in_flight;
            let formula = (states + activations) / GIB;
            assert!((formula - row.peak_memory_gb.unwrap_or(0.0)).abs() < 0.01, "{}: {formula}", row.id);
        }
    }

    #[test]
    fn a_source_sees_the_stages_it_looked_at() {
        let row = |kind: &str| Row { memory_kind: kind.into(), ..shipped().remove(0) };
        let seen = |kind: &str| -> Vec<usize> {
            let row = row(kind);
            (0..3).filter(|stage| is_seen(&row, *stage, 3)).collect()
        };
        assert_eq!(seen("nvidia-smi max on first/last node (GB)"), [0, 2]);
        assert_eq!(seen("GiB max allocated on the first rank"), [0]);
        assert_eq!(seen("nvidia-smi GB per GPU"), [0, 1, 2]);
    }
}
