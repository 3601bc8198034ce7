//! Peaks of device memory: predicted against measured, and runs that died of memory.

use std::collections::BTreeMap;

use cost_model::Constants;
use ir::plan::prediction::StagePrediction;
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
    /// What the device says is taken: allocator, context and communication buffers as well.
    Taken,
}

impl Measure {
    fn of(row: &Row) -> Self {
        if row.memory_kind.contains("nvidia-smi") { Self::Taken } else { Self::Allocated }
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
        .filter_map(|row| Some((row.source.clone(), Measure::of(row), priced(row, constants)?)))
        .collect();
    let mut sources: BTreeMap<(String, Measure), Vec<MemoryRow>> = BTreeMap::new();
    for (name, measure, row) in priced {
        sources.entry((name, measure)).or_default().push(row);
    }
    sources.into_iter().map(|((name, measure), rows)| source(name, measure, rows)).collect()
}

fn priced(row: &Row, constants: &Constants) -> Option<MemoryRow> {
    let died = row.oom == 1;
    // Bytes are those of a plan; where a planner of theirs cut the states, it is not told how.
    let is_told = row.zero.parse::<u8>().is_ok() || row.dp == Some(1);
    let is_measured = died || row.peak_memory_gb.is_some();
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
    let bytes = |stage: &StagePrediction| {
        let reserve = stage.memory.get("reserve").map_or(0.0, |bytes| bytes.0);
        match measure {
            Measure::Allocated => stage.peak_memory_bytes.0 - reserve,
            Measure::Taken => stage.peak_memory_bytes.0,
        }
    };
    let predicted_gib = prediction.stages.iter().map(bytes).fold(0.0, f64::max) / GIB;
    let error = predicted_gib / measured_gib - 1.0;
    Some(MemoryRow { id: row.id.clone(), measured_gib, predicted_gib, error, died })
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

    /// What `nvidia-smi` showed of Megatron-DeepSpeed on A100 and V100, of which nothing is fitted.
    #[test]
    fn taken_peaks_hold_with_the_reserve_and_what_deepspeed_copies() {
        for (source, mean, bias) in [("bloom-prequel", 0.07, 0.03), ("bigscience-v100-1b3", 0.11, 0.08)] {
            let rows: Vec<Row> = shipped().into_iter().filter(|row| row.source == source).collect();
            let report = memory_report(&rows, &Constants::load());
            let [found] = &report[..] else { panic!("{report:?}") };
            assert_eq!(found.measure, Measure::Taken);
            assert!(found.errors.mean <= mean && found.errors.bias.abs() <= bias, "{:?}", found.errors);
        }
    }

    /// Megatron-Core with its flags known: 31 dense runs of 8 B200.
    #[test]
    fn allocated_peaks_hold_where_the_flags_are_known() {
        let rows: Vec<Row> = shipped().into_iter().filter(|row| row.source == "simumax-b200").collect();
        let report = memory_report(&rows, &Constants::load());
        let [source] = &report[..] else { panic!("{report:?}") };
        assert!(source.errors.rows >= 31 && source.measure == Measure::Allocated);
        let within = source.errors.mean <= 0.015 && source.errors.max <= 0.04 && source.most_below <= 0.03;
        assert!(within, "{:?}, most below {}", source.errors, source.most_below);
    }
}
