//! Whether the devices of a plan's cluster, its hosts and their drives hold what the plan puts there, by its price.
//!
//! What a plan needs and what there is are the figures by which the search drops what does not fit: the reserve of a
//! device and the part of a host's memory that a run may take count in both alike.

use cost_model::Constants;
use cost_model::offload::{NodeMemory, OnNode, fullest_node};
use ir::plan::Plan;
use ir::plan::check::OpenPlan;
use ir::plan::prediction::{Prediction, StagePrediction};
use ir::units::Bytes;
use planner::request::{NoPlan, Relaxation};
use serde::Serialize;

use crate::args::MemoryArgs;
use crate::failure::Failure;
use crate::figures;
use crate::priced;
use crate::report;

/// Overflows that are told; there may be as many as stages.
const SHOWN: usize = 8;

/// How full the memories of a plan's cluster are.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Memory {
    fits: bool,
    /// A device of the fullest stage.
    fullest: Filled,
    /// The fullest of all nodes' hosts and drives; nothing where none hold anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    fullest_node: Option<Filled>,
    /// What overflows: the fullest node, then a device of each stage, the fullest first.
    overflows: Vec<Filled>,
}

/// One memory, what a plan puts there, and what it has for that.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Filled {
    /// The stage of the device, or of the first device of the node.
    stage: usize,
    /// What most of it is.
    term: String,
    needed_bytes: Bytes,
    capacity_bytes: Bytes,
}

impl Filled {
    fn of_stage(stage: usize, predicted: &StagePrediction) -> Self {
        // What is kept free is nobody's choice.
        let chosen = predicted.memory.iter().filter(|(name, _)| *name != "reserve");
        let largest = chosen.max_by(|a, b| a.1.0.total_cmp(&b.1.0));
        Self {
            stage,
            term: largest.map_or(String::new(), |(name, _): (&String, &Bytes)| name.clone()),
            needed_bytes: predicted.peak_memory_bytes,
            capacity_bytes: predicted.capacity_bytes,
        }
    }

    fn of_node(node: &NodeMemory) -> Self {
        Self {
            stage: node.stage,
            term: node.store.term().into(),
            needed_bytes: node.needed,
            capacity_bytes: node.capacity,
        }
    }

    /// `79.1 GiB of 40.0 GiB on stage 1, 39.1 GiB too many, most of it gradients`
    fn words(&self) -> String {
        let over = self.needed_bytes - self.capacity_bytes;
        let over =
            if over > Bytes::ZERO { format!(", {} too many", figures::bytes(over)) } else { String::new() };
        format!(
            "{} of {} on stage {}{over}, most of it {}",
            figures::bytes(self.needed_bytes),
            figures::bytes(self.capacity_bytes),
            self.stage,
            self.term
        )
    }

    fn no_plan(self, relaxations: Vec<Relaxation>) -> NoPlan {
        NoPlan::Overflows {
            stage: self.stage,
            term: self.term,
            needed: self.needed_bytes,
            capacity: self.capacity_bytes,
            relaxations,
        }
    }
}

/// True of a device that lacks memory.
pub(crate) fn overflows(stage: &StagePrediction) -> bool {
    // The search adds up the same terms in another order: below a byte it is rounding.
    stage.peak_memory_bytes.0 - stage.capacity_bytes.0 >= 1.0
}

impl Memory {
    /// That of a plan, by its price; nothing of a plan without stages.
    pub(crate) fn of(plan: &Plan, opened: &OpenPlan, predicted: &Prediction) -> Option<Self> {
        Self::filled(&predicted.stages, fullest_host(plan, opened, predicted).as_ref())
    }

    fn filled(stages: &[StagePrediction], node: Option<&NodeMemory>) -> Option<Self> {
        let fullest = report::fullest(stages)?;
        let full_node = node.filter(|node| !node.fits()).map(Filled::of_node);
        let mut full: Vec<usize> = (0..stages.len()).filter(|&at| overflows(&stages[at])).collect();
        full.sort_by(|&a, &b| report::filled(&stages[b]).total_cmp(&report::filled(&stages[a])));
        let full_stages = full.into_iter().map(|at| Filled::of_stage(at, &stages[at]));
        let overflows: Vec<Filled> = full_node.into_iter().chain(full_stages).collect();
        Some(Self {
            fits: overflows.is_empty(),
            fullest: Filled::of_stage(fullest, &stages[fullest]),
            fullest_node: node.map(Filled::of_node),
            overflows,
        })
    }

    /// What overflows first, if anything does.
    pub(crate) fn overflow(&self) -> Option<String> {
        self.overflows.first().map(Filled::words)
    }

    /// Whether everything fits.
    pub(crate) fn fits(&self) -> bool {
        self.fits
    }

    /// What is fullest, or what overflows, as lines of a list.
    pub(crate) fn lines(&self) -> Vec<(&'static str, String)> {
        let told: Vec<String> = if self.fits {
            let all = std::iter::once(&self.fullest).chain(&self.fullest_node);
            all.map(|one| format!("fits: {}", one.words())).collect()
        } else {
            let told = self.overflows.iter().take(SHOWN).map(|one| format!("DOES NOT FIT: {}", one.words()));
            let more = self.overflows.len().saturating_sub(SHOWN);
            told.chain((more > 0).then(|| format!("and {more} more; --json has all"))).collect()
        };
        std::iter::once("memory").chain(std::iter::repeat("")).zip(told).collect()
    }

    /// Refuses a plan that overflows and has been reported, unless the user asks for nothing else.
    pub(crate) fn judge(&self, file: &str, asked: &MemoryArgs) -> Result<(), Failure> {
        match self.overflows.first().filter(|_| !asked.ignore_memory) {
            None => Ok(()),
            Some(first) => {
                Err(Failure::Overflows { file: file.into(), what: first.clone().no_plan(Vec::new()) })
            }
        }
    }
}

/// Refuses a priced plan that overflows, with changes that would help.
pub(crate) fn fits(plan: &Plan, opened: &OpenPlan) -> Result<(), Failure> {
    let memory = plan.predicted.as_ref().and_then(|predicted| Memory::of(plan, opened, predicted));
    match memory.and_then(|memory| memory.overflows.into_iter().next()) {
        None => Ok(()),
        Some(first) => {
            let relaxations = planner::relaxations(&priced::request(plan, opened));
            Err(Failure::NoPlan(first.no_plan(relaxations)))
        }
    }
}

/// The node whose host or drives are fullest; nothing where none hold anything.
pub(crate) fn fullest_host(plan: &Plan, opened: &OpenPlan, predicted: &Prediction) -> Option<NodeMemory> {
    let constants = Constants::load().on(&plan.cluster, priced::request(plan, opened).job.engine).ok()?;
    let stages = (0..).zip(&predicted.stages);
    let of_stage = |(at, stage): (u64, &StagePrediction)| {
        let held = OnNode { host: stage.host_memory_bytes, nvme: stage.nvme_bytes };
        (held, plan.mesh_of(at).n_devices())
    };
    let stages: Vec<(OnNode, u64)> = stages.map(of_stage).collect();
    fullest_node((&plan.cluster, &constants), &stages)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use cost_model::offload::NodeStore;
    use ir::units::{GIB, Seconds};

    use super::*;

    /// A stage whose devices need so many bytes, most of them reserve, of so many.
    fn stage(needed: f64, capacity: f64) -> StagePrediction {
        let parts = [("reserve", 0.6), ("gradients", 0.3), ("parameters", 0.1)];
        StagePrediction {
            layers: 1,
            forward_s: Seconds::ZERO,
            backward_s: Seconds::ZERO,
            peak_memory_bytes: Bytes(needed),
            capacity_bytes: Bytes(capacity),
            host_memory_bytes: Bytes::ZERO,
            nvme_bytes: Bytes::ZERO,
            memory: parts.into_iter().map(|(name, share)| (name.into(), Bytes(needed * share))).collect(),
            bytes_per_tier: BTreeMap::new(),
            roles: None,
        }
    }

    fn node(needed: f64, capacity: f64) -> NodeMemory {
        NodeMemory { store: NodeStore::Nvme, stage: 1, needed: Bytes(needed), capacity: Bytes(capacity) }
    }

    fn of(stages: &[StagePrediction], node: Option<NodeMemory>) -> Memory {
        Memory::filled(stages, node.as_ref()).expect("there are stages")
    }

    const ASKED: MemoryArgs = MemoryArgs { ignore_memory: false };
    const IGNORED: MemoryArgs = MemoryArgs { ignore_memory: true };

    fn judged(memory: &Memory, asked: &MemoryArgs) -> Result<(), u8> {
        memory.judge("plan.json", asked).map_err(|failure| failure.exit_code())
    }

    #[test]
    fn a_device_may_be_full_to_the_last_byte() {
        let gib = 80.0 * GIB;
        // What another order of a sum makes of it is no overflow.
        for needed in [gib, gib + 1e-4] {
            let memory = of(&[stage(needed, gib)], None);
            assert_eq!((memory.fits(), judged(&memory, &ASKED)), (true, Ok(())));
        }
        let memory = of(&[stage(gib + 1.0, gib)], None);
        assert_eq!((memory.fits(), judged(&memory, &ASKED)), (false, Err(3)));
        assert_eq!(judged(&memory, &IGNORED), Ok(()));
        let lines = memory.lines();
        let said = "DOES NOT FIT: 80.0 GiB of 80.0 GiB on stage 0, 1.00 B too many, most of it gradients";
        assert_eq!(lines, [("memory", said.to_owned())]);
    }

    /// The stage with the most bytes is not the one that lacks them.
    #[test]
    fn a_stage_of_small_devices_overflows_beside_one_of_large_devices() {
        let stages = [stage(60.0 * GIB, 80.0 * GIB), stage(40.0 * GIB, 32.0 * GIB)];
        let memory = of(&stages, None);
        let stages: Vec<usize> = memory.overflows.iter().map(|one| one.stage).collect();
        assert_eq!((memory.fullest.stage, stages), (1, vec![1]));
    }

    #[test]
    fn drives_and_all_stages_that_overflow_are_told_the_fullest_first() {
        let stages = [stage(3.0, 2.0), stage(1.0, 2.0), stage(5.0, 2.0)];
        let memory = of(&stages, Some(node(7.0, 3.0)));
        let told: Vec<(usize, &str)> =
            memory.overflows.iter().map(|one| (one.stage, one.term.as_str())).collect();
        let drives = (1, NodeStore::Nvme.term());
        assert_eq!(told, [drives, (2, "gradients"), (0, "gradients")]);
        assert_eq!(memory.lines().len(), 3);
        assert!(of(&stages[1..2], Some(node(3.0, 3.0))).fits());
        assert!(!of(&stages[1..2], Some(node(7.0, 3.0))).fits());
    }

    #[test]
    fn of_many_stages_the_first_are_told_and_the_rest_counted() {
        let memory = of(&vec![stage(3.0, 2.0); SHOWN + 3], None);
        let lines = memory.lines();
        assert_eq!(lines.len(), SHOWN + 1);
        assert_eq!(lines[SHOWN], ("", "and 3 more; --json has all".to_owned()));
    }
}
