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
}

/// What is wrong with a calibration.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CalibrationError {
    /// Not of this form.
    #[error("not a calibration: {0}")]
    Form(String),
    /// Of another version.
    #[error("schema_version: expected {CALIBRATION_SCHEMA_VERSION}, found {0}")]
    Version(u32),
    /// A constant that is none, or a value without meaning.
    #[error("constants.{0}")]
    Constant(#[from] cost_model::CalibrationError),
}

impl Calibration {
    /// Reads a file's text.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(text: &str) -> Result<Self, CalibrationError> {
        let read: Self = serde_json::from_str(text).map_err(|e| CalibrationError::Form(e.to_string()))?;
        if read.schema_version != CALIBRATION_SCHEMA_VERSION {
            return Err(CalibrationError::Version(read.schema_version));
        }
        // Applied once, so that a name or a value that is wrong shows where the file is read.
        Constants::load().calibrated(&read.constants)?;
        Ok(read)
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
        ir::cluster::Calibration { provenance: self.provenance.clone(), constants: self.constants.clone() }
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
        Calibration::read(&text).map_err(|error| error.to_string())
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
        assert!(Calibration::read("{}").is_err());
    }
}
