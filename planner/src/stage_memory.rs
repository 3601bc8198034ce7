//! Memory of a stage: its peak by category, and what the smallest arrangement of a candidate would need.

use ir::units::Bytes;

use crate::arrange::Arranged;
use crate::candidate::{Candidate, Dropped, Scope};
use crate::partition::{LayerCost, Levels};

impl Scope<'_> {
    /// Bytes of a device that no plan may use.
    pub fn reserve(&self) -> f64 {
        let smallest =
            self.machine.cluster.groups.iter().map(|g| g.device.memory_bytes.0).min_by(f64::total_cmp);
        smallest.unwrap_or(0.0) - self.capacity
    }

    /// Peak memory of a stage by category.
    pub fn stage_memory(&self, arranged: &Arranged, stage: usize) -> cost_model::MemoryBreakdown {
        let p = arranged.candidate.n_stages as usize;
        let mut memory = cost_model::MemoryBreakdown::default();
        let in_flight = arranged.in_flight[stage];
        let (mut working, mut freed) = (Bytes::ZERO, Bytes::ZERO);
        for &(entry, count) in arranged.chunks.iter().skip(stage).step_by(p).flatten() {
            let own = &arranged.entries[entry].memory;
            memory.parameters += own.parameters * count as f64;
            memory.gradients += own.gradients * count as f64;
            memory.optimizer += own.optimizer * count as f64;
            for (kind, bytes) in &own.saved {
                let all = *bytes * (count as f64 * in_flight);
                *memory.activations.entry(kind.name().to_string()).or_default() += all;
                freed += all;
            }
            memory.logits = memory.logits.max(own.logits);
            working = working.max(own.working());
        }
        memory.buffers = working;
        freed += working + memory.logits;
        memory.reserve = freed * (self.constants.fragmentation_factor - 1.0) + Bytes(self.reserve());
        memory
    }

    /// What the candidate would need at least, for the report.
    pub(crate) fn overflow(&self, candidate: &Candidate, levels: &Levels) -> Dropped {
        let last = levels.costs.len() - 1;
        let smallest = Levels::new(vec![levels.costs[last].clone()], levels.kinds.clone());
        let schedule = self.schedule(1);
        let in_flight = Self::in_flight(candidate, schedule);
        let Some(cuts) = smallest.partition(&in_flight, f64::INFINITY) else { return Dropped::NoStrategy };
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
        Dropped::Memory { stage, term, needed: cut.memory }
    }
}
