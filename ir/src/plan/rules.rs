//! The algorithms of an entry's collectives, in names, and the way there and back.

use crate::collective::{Algorithm, CollectiveKind, Rule};
use crate::graph::{Layer, TensorId};
use crate::mesh::Mesh;
use crate::plan::PlanError;
use crate::plan::entry::{CollectiveEntry, Entry, read_axes, write_axes};
use crate::program::AxisSet;

impl Entry {
    /// The entry with rules written down: those that differ only in their tensor share a row.
    pub fn with_rules(mut self, layer: &Layer, mesh: &Mesh, rules: &[Rule]) -> Self {
        for rule in rules {
            let mut row = CollectiveEntry {
                class: rule.class,
                collective: rule.kind,
                axes: write_axes(AxisSet::of(&rule.axes), mesh),
                algorithm: rule.algorithm,
                tensors: Vec::new(),
            };
            let tensor = rule.tensor.map(|tensor| layer.tensors[tensor.0].name.clone());
            let same = |other: &&mut CollectiveEntry| {
                (other.class, other.collective, other.algorithm) == (row.class, row.collective, row.algorithm)
                    && other.axes == row.axes
                    && !other.tensors.is_empty()
            };
            match (self.collectives.iter_mut().find(same), tensor) {
                (Some(known), Some(tensor)) => known.tensors.push(tensor),
                (_, tensor) => {
                    row.tensors.extend(tensor);
                    self.collectives.push(row);
                }
            }
        }
        self
    }

    /// Reads the rules back, one per tensor. Places in errors are relative to the entry.
    ///
    /// # Errors
    /// Where a name is unknown, an algorithm is none of the collective's, or a collective has no axes or two
    /// algorithms.
    pub fn rules(&self, layer: &Layer, mesh: &Mesh) -> Result<Vec<Rule>, PlanError> {
        let mut rules: Vec<Rule> = Vec::new();
        for (i, row) in self.collectives.iter().enumerate() {
            let at = |field: &str| format!("collectives[{i}].{field}");
            check_algorithm(row.collective, row.algorithm)
                .map_err(|what| PlanError::new(at("algorithm"), what))?;
            let axes = read_axes(&row.axes, mesh).map_err(|what| PlanError::new(at("axes"), what))?.axes();
            if axes.is_empty() {
                let what = format!("`{}` runs along one axis at least", row.collective.name());
                return Err(PlanError::new(at("axes"), what));
            }
            let rule = |tensor| Rule {
                class: row.class,
                kind: row.collective,
                axes: axes.clone(),
                tensor,
                algorithm: row.algorithm,
            };
            let mut add = |rule: Rule| {
                let is_same = |other: &Rule| {
                    (other.class, other.kind, other.tensor) == (rule.class, rule.kind, rule.tensor)
                        && other.axes == rule.axes
                };
                if rules.iter().any(is_same) {
                    let what = format!("the algorithm of this `{}` is said twice", row.collective.name());
                    return Err(PlanError::new(format!("collectives[{i}]"), what));
                }
                rules.push(rule);
                Ok(())
            };
            if row.tensors.is_empty() {
                add(rule(None))?;
            }
            for name in &row.tensors {
                let found = layer.tensors.iter().position(|tensor| tensor.name == *name);
                let what = || format!("layer `{}` has no tensor `{name}`", layer.name);
                let tensor = found.ok_or_else(|| PlanError::new(at("tensors"), what()))?;
                add(rule(Some(TensorId(tensor))))?;
            }
        }
        Ok(rules)
    }
}

fn check_algorithm(kind: CollectiveKind, algorithm: Algorithm) -> Result<(), String> {
    if kind.algorithms().contains(&algorithm) {
        return Ok(());
    }
    let names: Vec<&str> = kind.algorithms().iter().map(|one| one.name()).collect();
    Err(format!(
        "`{}` does not run as `{}`: expected one of `{}`",
        kind.name(),
        algorithm.name(),
        names.join("`, `")
    ))
}
