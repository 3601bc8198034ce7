//! Constants of a cluster of one's own, as a file: what was measured, and what it moved.

use std::collections::BTreeMap;

use cost_model::{Constants, PARAMETERS};
use serde::{Deserialize, Serialize};

/// Version of the file that this build reads and writes.
pub const CALIBRATION_SCHEMA_VERSION: u32 = 1;

/// A calibration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Version of this form: 1.
    pub schema_version: u32,
    /// Version of the planner that wrote it.
    pub tool_version: String,
    /// What it was made from, in words: files, rows, dates.
    pub provenance: Vec<String>,
    /// Constants that differ from the shipped ones, by name.
    pub constants: BTreeMap<String, f64>,
    /// For each of them how far the measurements leave it open: one standard deviation.
    #[serde(default)]
    pub deviations: BTreeMap<String, f64>,
    /// What the runs that it was fitted to are still off by on average, as a part of their time; absent where it has
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runs_off: Option<f64>,
}

/// Runs that are off by more than so many times their time say nothing.
const MOST_OFF: f64 = 10.0;

/// What is wrong with a calibration.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CalibrationError {
    /// Of another version.
    #[error("schema_version: expected {CALIBRATION_SCHEMA_VERSION}, found {0}")]
    Version(u32),
    /// An error that is none.
    #[error("runs_off: expected a number from 0 to {MOST_OFF}, found {0}")]
    RunsOff(f64),
    /// A deviation that is none.
    #[error("deviations.{name}: expected a number from 0, found {off}")]
    Deviation {
        /// Of which constant.
        name: String,
        /// What it is.
        off: f64,
    },
    /// A constant that is none, or a value without meaning.
    #[error("constants.{0}")]
    Constant(#[from] cost_model::CalibrationError),
}

impl Calibration {
    /// Checks what a file said: names, values and version.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), CalibrationError> {
        if self.schema_version != CALIBRATION_SCHEMA_VERSION {
            return Err(CalibrationError::Version(self.schema_version));
        }
        if let Some(off) = self.runs_off.filter(|off| !(0.0..=MOST_OFF).contains(off)) {
            return Err(CalibrationError::RunsOff(off));
        }
        let is_none = |off: &f64| !(off.is_finite() && *off >= 0.0);
        if let Some((name, &off)) = self.deviations.iter().find(|(_, off)| is_none(off)) {
            return Err(CalibrationError::Deviation { name: name.clone(), off });
        }
        // Applied once, so that a name or a value that is wrong shows where the file is read.
        Constants::load().calibrated(&self.constants)?;
        Ok(())
    }

    /// Constants with those of the calibration in their place.
    ///
    /// # Errors
    /// What is wrong with it; nothing, where it was read from a file.
    pub fn applied(&self, constants: Constants) -> Result<Constants, CalibrationError> {
        Ok(constants.calibrated(&self.constants)?)
    }

    /// What a cluster's description keeps of it.
    pub fn of_cluster(&self) -> ir::cluster::Calibration {
        let (provenance, constants) = (self.provenance.clone(), self.constants.clone());
        ir::cluster::Calibration { provenance, constants, runs_off: self.runs_off }
    }

    /// The calibration that leads from the shipped constants to others.
    pub fn between(shipped: &Constants, fitted: &Constants, tool_version: &str) -> Self {
        let moved = PARAMETERS.iter().filter_map(|parameter| {
            let (before, after) = (shipped.get(parameter.name)?, fitted.get(parameter.name)?);
            (before != after).then(|| (parameter.name.to_owned(), after))
        });
        Self {
            schema_version: CALIBRATION_SCHEMA_VERSION,
            tool_version: tool_version.into(),
            provenance: Vec::new(),
            constants: moved.collect(),
            deviations: BTreeMap::new(),
            runs_off: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(constants: &str) -> Result<Calibration, String> {
        let text = format!(
            r#"{{"schema_version": 1, "tool_version": "t", "provenance": [], "constants": {{{constants}}}}}"#
        );
        let found: Calibration = serde_json::from_str(&text).unwrap();
        found.check().map_err(|error| error.to_string())?;
        Ok(found)
    }

    #[test]
    fn a_calibration_moves_what_it_names() {
        let shipped = Constants::load();
        let moved = read(r#""memory_efficiency_fraction": 0.9"#).unwrap().applied(shipped.clone()).unwrap();
        assert_eq!(moved.memory_efficiency_fraction, 0.9);
        let found = Calibration::between(&shipped, &moved, "t");
        assert_eq!(
            found.constants.into_iter().collect::<Vec<_>>(),
            [("memory_efficiency_fraction".into(), 0.9)]
        );
    }

    #[test]
    fn faults_are_named() {
        assert_eq!(
            read(r#""speed": 1"#).unwrap_err(),
            "constants.speed: no constant of this name can be calibrated"
        );
        assert_eq!(
            read(r#""memory_efficiency_fraction": 7"#).unwrap_err(),
            "constants.memory_efficiency_fraction: 7 is outside 0.3 to 1"
        );
        let off = Calibration { runs_off: Some(-1.0), ..read("").unwrap() };
        let said = |one: &Calibration| one.check().unwrap_err().to_string();
        assert_eq!(said(&off), "runs_off: expected a number from 0 to 10, found -1");
        assert!(Calibration { runs_off: Some(1e9), ..off.clone() }.check().is_err());
        let below = Calibration { runs_off: None, deviations: BTreeMap::from([("x".into(), -5.0)]), ..off };
        assert_eq!(said(&below), "deviations.x: expected a number from 0, found -5");
    }
}
