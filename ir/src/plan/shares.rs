//! Unequal shares of the micro-batches: coordinates of the outermost axis that run different numbers of them.
//!
//! Where the devices along an axis differ in speed, equal numbers of micro-batches let the fast ones wait. A plan may
//! say how many each coordinate runs; they are of one size, `micro_batch / size of the axis` sequences, and together
//!
//! ```text
//! sum of shares = size of the axis x n_micro_batches                     -> check_counts()
//! ```
//! so that a step has the sequences of the global batch, each once: in the order of the coordinates, each takes its own
//! run of blocks. Coordinates that run unequal numbers cannot meet within a micro-batch. So every operator with
//! sequences cuts them along the axis, nothing of a micro-batch is gathered, reduced or exchanged along it, and each
//! coordinate leaves the loss of its own sequences, a term of the sum (`check_entries()`). What is left is what data
//! parallelism with or without a cut optimizer state sends once per step: gradients and new parameters (proportional
//! data shares: AccPar, Song et al. 2020, HPCA; Whale, Jia et al. 2022, arXiv 2011.09208).

use crate::graph::{DimId, Extent, Layer, Op};
use crate::mesh::AxisId;
use crate::plan::check::{OpenEntry, OpenPlan};
use crate::plan::{Plan, PlanError};
use crate::program::Storage;
use crate::schedule::Schedule;
use crate::sharding::{Placement, Sharding};
use crate::signature::signature;
use crate::strategy::{AxisUse, Strategy};

/// The axis whose coordinates may run unequal shares: the outermost, which lies across groups of devices.
pub const AXIS: AxisId = AxisId(0);

/// The sharding in which the last layer leaves the loss.
pub fn loss(plan: &Plan) -> Sharding {
    match plan.shares.is_empty() {
        true => Sharding::REPLICATED,
        false => Sharding::REPLICATED.with(AXIS, Placement::PartialSum),
    }
}

/// Whether an operator leaves every coordinate its own sequences.
pub fn keeps_apart(layer: &Layer, op: &Op, strategy: Strategy) -> bool {
    let loops = signature(layer, op).factors;
    let sequences = |dim: DimId| layer.dims[dim.0].extent == Extent::MicroBatch;
    match strategy.on(AXIS) {
        AxisUse::Factor(own) => sequences(loops[own.0 as usize].dim),
        // Of what is the same for all sequences, such as a table of positions, every coordinate computes all.
        AxisUse::Same | AxisUse::Defer => !loops.iter().any(|own| sequences(own.dim)),
        AxisUse::Ring(_) | AxisUse::Through => false,
    }
}

/// Whether a parameter so stored is sent between coordinates once per step, not in a micro-batch.
pub fn is_sent_once(Storage { parameter, gradient, .. }: Storage) -> bool {
    !parameter.axes().contains(&AXIS) && !gradient.axes().contains(&AXIS)
}

/// Whether the shares make up the global batch, and the schedule has a table for each.
pub(super) fn check_counts(plan: &Plan) -> Result<(), PlanError> {
    let fail = |what: String| Err(PlanError::new("shares", what));
    if plan.shares.is_empty() {
        return Ok(());
    }
    let size = plan.mesh.axes.first().map_or(0, |axis| axis.size);
    if plan.shares.len() as u64 != size {
        let n = plan.shares.len();
        return fail(format!(
            "expected a share for each of the {size} coordinates of the outermost axis, found {n}"
        ));
    }
    if !plan.stage_meshes.is_empty() {
        return fail("stages of unequal meshes run equal shares: leave `shares` out".into());
    }
    if !plan.slices.is_empty() || matches!(plan.schedule, Schedule::Custom(_)) {
        return fail("the schedule must be one of whole sequences that writes its own table".into());
    }
    if plan.schedule.placement().n_copies() > 1 {
        return fail(format!("`{}` runs equal shares: leave `shares` out", plan.schedule));
    }
    let all = plan.shares.iter().try_fold(0_u64, |sum, &share| sum.checked_add(share));
    let wanted = plan.n_micro_batches.checked_mul(size);
    if plan.shares.contains(&0) || all.is_none() || all != wanted {
        return fail(format!(
            "expected {size} shares of at least one micro-batch that add up to {size} x {}, found {:?}",
            plan.n_micro_batches, plan.shares
        ));
    }
    for (at, &share) in plan.shares.iter().enumerate() {
        let named = |error: PlanError| PlanError::new(format!("shares[{at}]"), error.what);
        plan.actions_of(share).map_err(named)?;
    }
    Ok(())
}

/// Whether nothing of a micro-batch crosses the axis.
pub(super) fn check_entries(plan: &Plan, open: &OpenPlan) -> Result<(), PlanError> {
    if plan.shares.is_empty() {
        return Ok(());
    }
    (0..open.entries.len()).try_for_each(|at| check_entry(plan, open, at))
}

fn check_entry(plan: &Plan, open: &OpenPlan, at: usize) -> Result<(), PlanError> {
    let (layer, OpenEntry { choice, program, .. }) = (open.layer(at), &open.entries[at]);
    let axis = &plan.mesh.axes[AXIS.0].name;
    for (i, (op, &strategy)) in layer.ops.iter().zip(&choice.strategies).enumerate() {
        if !keeps_apart(layer, op, strategy) {
            let what = format!(
                "`{}` must cut the sequences along {axis}, whose coordinates run unequal shares",
                op.name
            );
            return Err(PlanError::new(format!("entries[{at}].ops[{i}].axes[0]"), what));
        }
    }
    for (i, tensor) in layer.parameters().enumerate() {
        if !is_sent_once(choice.storage.get(&tensor).copied().unwrap_or_default()) {
            let what = format!(
                "only the optimizer state may be cut along {axis}, whose coordinates run unequal shares"
            );
            return Err(PlanError::new(format!("entries[{at}].parameters[{i}]"), what));
        }
    }
    let crosses = program.forward.iter().chain(&program.backward).any(|one| one.axes().contains(&AXIS));
    if crosses {
        let what = format!("a value is converted along {axis}, whose coordinates run unequal shares");
        return Err(PlanError::new(format!("entries[{at}]"), what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::plan::Plan;
    use crate::plan::check::check_plan;
    use crate::plan::samples::{Family, Policy, Sample};
    use crate::schedule::Schedule;
    use crate::shrink::{ShrinkLimits, shrink};

    fn sample() -> Sample {
        Sample {
            zero: 1,
            n_stages: 2,
            n_micro_batches: 4,
            ..Sample::new(Family::Dense, &[(2, Policy::Data), (2, Policy::TensorSequence)])
        }
    }

    /// Two stages whose first coordinate runs five micro-batches and whose second runs three.
    fn unequal(sample: &Sample) -> Plan {
        let mut plan = sample.plan();
        plan.shares = vec![5, 3];
        plan.entries.iter_mut().for_each(|entry| {
            if entry.out == "replicated" {
                entry.out = "sum@x0".into();
            }
        });
        plan
    }

    #[test]
    fn coordinates_may_run_unequal_shares_of_the_batch() {
        let plan = unequal(&sample());
        check_plan(&plan).unwrap();
        assert_eq!(plan.most_micro_batches(), 5);
        assert_eq!((plan.micro_batches_of(1, 1), plan.micro_batches_of(1, 2)), (5, 3));
        let lengths = |share: u64| plan.actions_of(share).unwrap()[0].len();
        assert_eq!((lengths(5), lengths(3)), (10, 6));
        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
        assert_eq!(crate::text::read_plan(&crate::text::write_plan(&plan)).unwrap().shares, [5, 3]);
    }

    #[test]
    fn a_shrunk_plan_keeps_which_coordinate_runs_more() {
        let large = Sample { n_micro_batches: 32, ..sample() };
        let small = |shares: [u64; 2]| {
            let plan = Plan { shares: shares.to_vec(), ..unequal(&large) };
            shrink(&plan, &ShrinkLimits { max_ranks: 64 }).unwrap().plan.shares
        };
        assert_eq!(small([40, 24]), [5, 3]);
        assert_eq!(small([10, 54]), [3, 5]);
    }

    #[test]
    fn what_cannot_be_unequal_is_named() {
        let said = |change: &dyn Fn(&mut Plan), sample: Sample| {
            let mut plan = unequal(&sample);
            change(&mut plan);
            let error = check_plan(&plan).unwrap_err();
            format!("{}: {}", error.place, error.what)
        };
        let same = |_: &mut Plan| ();
        let interleaved = Schedule::Interleaved { virtual_stages: 2 };
        let swapped = vec![(2, Policy::TensorSequence), (2, Policy::Data)];
        let all = [
            said(&|plan| plan.shares = vec![8], sample()),
            said(&|plan| plan.shares = vec![5, 4], sample()),
            said(&|plan| plan.shares = vec![8, 0], sample()),
            said(&|plan| plan.shares = vec![u64::MAX, 9], sample()),
            said(&same, Sample { schedule: interleaved, ..sample() }),
            said(&same, Sample { schedule: Schedule::Chimera, ..sample() }),
            said(&|plan| plan.entries[2].out = "replicated".into(), sample()),
            said(&same, Sample { zero: 2, ..sample() }),
            said(&same, Sample { axes: swapped, ..sample() }),
            said(&|plan| plan.entries[1].ops[0].axes[0] = "-".into(), sample()),
        ];
        insta::assert_snapshot!(all.join("\n"));
    }
}
