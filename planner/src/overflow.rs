//! What a candidate that does not fit would need at least, and for what.

use crate::arrange::with_ends;
use crate::candidate::{Candidate, Dropped, Scope};
use crate::partition::{LayerCost, Levels};
use crate::schedules::in_flight;

impl Scope<'_> {
    /// Bytes of a device that no plan may use.
    pub fn reserve(&self) -> f64 {
        self.setting.reserve()
    }

    /// What the candidate would need at least, for the report.
    pub(crate) fn overflow(&self, candidate: &Candidate, levels: &Levels) -> Dropped {
        let last = levels.costs.len() - 1;
        let smallest = Levels::new(vec![levels.costs[last].clone()], levels.kinds.clone());
        let Some(&schedule) = self.schedules(candidate).first() else { return Dropped::NoStrategy };
        let in_flight = in_flight(candidate, schedule);
        let cuts = match &self.pins().layers_per_stage {
            Some(counts) => smallest.as_given(&with_ends(counts), &in_flight, f64::INFINITY),
            None => smallest.partition(&in_flight, f64::INFINITY),
        };
        let Some(cuts) = cuts else { return Dropped::NoStrategy };
        let worst =
            cuts.iter().enumerate().max_by(|a, b| a.1.memory.total_cmp(&b.1.memory).then(b.0.cmp(&a.0)));
        let Some((stage, cut)) = worst else { return Dropped::NoStrategy };
        let sum = |of: &dyn Fn(&LayerCost) -> f64| -> f64 {
            (cut.from..cut.to).map(|layer| of(&smallest.costs[0][smallest.kinds[layer]])).sum()
        };
        let (state, saved) = (sum(&|c| c.state), sum(&|c| c.saved) * in_flight[stage]);
        let working = cut.memory - state - saved;
        let term = if state >= saved && state >= working {
            "parameters, gradients and optimizer state"
        } else if saved >= working {
            "activations kept for backward"
        } else {
            "working tensors of one layer"
        };
        // Each of a stage's chunks may take its share of the device.
        let needed = cut.memory * f64::from(schedule.n_virtual_stages());
        Dropped::Memory { stage: stage % candidate.n_stages as usize, term, needed }
    }
}
