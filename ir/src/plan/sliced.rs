//! Slices of a plan: whether its sequences can be cut as it says, and what every slice then runs.

use crate::graph::{Model, Sizes};
use crate::lower::lower;
use crate::plan::check::OpenEntry;
use crate::plan::{Plan, PlanError};
use crate::schedule::Schedule;
use crate::slices::{MAX_SLICES, Slices, sliced_choice, sliced_model};
use crate::token_order::TokenOrder;

/// What runs slice by slice: the model, choices and programs in their sliced form.
#[derive(Clone, Debug, PartialEq)]
pub struct Sliced {
    /// Where sequences are cut.
    pub slices: Slices,
    /// The model, every layer in its sliced form.
    pub model: Model,
    /// The plan's entries for it, in its order. All slices run one program.
    pub entries: Vec<OpenEntry>,
}

impl Sliced {
    /// Lengths of the dims of an entry's layer for one slice.
    pub fn sizes(&self, plan: &Plan, entry: usize, slice: u32) -> Sizes {
        self.slices.sizes(&self.model.layers[self.entries[entry].layer], plan.micro_batch, slice)
    }
}

/// Whether the lengths fit the job and the schedule.
pub(super) fn check_lengths(plan: &Plan) -> Result<(), PlanError> {
    let fail = |what: String| Err(PlanError::new("slices", what));
    let n = plan.slices.len() as u64;
    let asked = u64::from(plan.schedule.n_slices());
    let own_table = matches!(plan.schedule, Schedule::Custom(_));
    if own_table && n == 1 {
        return fail("one slice is the whole sequence: leave `slices` out".into());
    }
    if !own_table && asked == 1 && n > 0 {
        return fail(format!("`{}` runs whole sequences: leave `slices` out", plan.schedule));
    }
    if !own_table && n.max(1) != asked {
        return fail(format!("`{}` needs the lengths of {asked} slices, found {n}", plan.schedule));
    }
    if n > MAX_SLICES {
        return fail(format!("a sequence has at most {MAX_SLICES} slices, found {n}"));
    }
    if n == 0 {
        return Ok(());
    }
    match Slices::of_lengths(&plan.slices) {
        None => fail("a slice has at least one token".into()),
        Some(slices) if slices.sequence() != plan.job.sequence => fail(format!(
            "slices of {} tokens in all are not a sequence of {}",
            slices.sequence(),
            plan.job.sequence
        )),
        Some(_) => Ok(()),
    }
}

/// The sliced form of a plan's layers; nothing where sequences are not cut.
pub(super) fn open_slices(
    plan: &Plan,
    model: &Model,
    entries: &[OpenEntry],
    token_parts: u64,
) -> Result<Option<Sliced>, PlanError> {
    let Some(slices) = Slices::of_lengths(&plan.slices).filter(Slices::is_cut) else { return Ok(None) };
    if token_parts > 1 && plan.job.token_order != TokenOrder::Natural {
        let what = "tokens that a slice needs stand far behind it: slices need the natural order";
        return Err(PlanError::new("job.token_order", what));
    }
    let fail = |error: crate::slices::NotSliceable| PlanError::new("slices", error.to_string());
    let sliced = sliced_model(model).map_err(fail)?;
    let mut found = Vec::new();
    for (i, entry) in entries.iter().enumerate() {
        let (layer, own) = (&model.layers[entry.layer], &sliced.layers[entry.layer]);
        let choice = sliced_choice(layer, own, &entry.choice).map_err(fail)?;
        let (mut program, mesh) = (None, plan.mesh_of_entry(i));
        for slice in 0..slices.n() {
            let sizes = slices.sizes(own, plan.micro_batch, slice);
            let place = |error: crate::lower::LowerError| {
                PlanError::new("slices", format!("slice {slice} of {:?}: {error}", slices.range(slice)))
            };
            let lowered = lower(own, mesh, &sizes, &choice).map_err(place)?;
            // What is kept on which side of a conversion does not depend on how long a slice is, or it could not be
            // read by the next.
            if program.as_ref().is_some_and(|first| *first != lowered) {
                return Err(PlanError::new("slices", format!("slice {slice} would run another program")));
            }
            program = Some(lowered);
        }
        let rules = plan.entries[i].rules(layer, mesh)?;
        found.extend(program.map(|program| OpenEntry {
            layer: entry.layer,
            choice,
            program: program.run_by(&rules),
        }));
    }
    Ok(Some(Sliced { slices, model: sliced, entries: found }))
}
