//! What the search of a plan was restricted to, so that questions about the plan are asked of the same space.

use ir::plan::Plan;
use planner::request::Forbid;
use planner::target::Target;

use crate::args::TargetArg;
use crate::failure::Failure;
use crate::forbid;
use crate::input;

/// Restrictions that a plan says.
pub(crate) struct Restricted {
    /// The engine that had to run it.
    pub(crate) target: Option<Target>,
    /// What was ruled out.
    pub(crate) forbid: Forbid,
}

impl Restricted {
    /// Those of a plan of a file, and what is ruled out besides.
    pub(crate) fn of(file: &str, plan: &Plan, forbidden: &[String]) -> Result<Self, Failure> {
        let report = plan.search.as_ref();
        let own = report.map_or(&[][..], |report| &report.forbidden);
        let forbid = forbid::read(own)
            .map_err(|why| input::fault_of_plan(file, "search.forbidden".into(), why.to_string()))?;
        let named = |name: &String| {
            Target::named(name).ok_or_else(|| {
                let what = format!("expected the name of an engine as `--target` knows it, found `{name}`");
                input::fault_of_plan(file, "search.target".into(), what)
            })
        };
        let target = report.and_then(|report| report.target.as_ref()).map(named).transpose()?;
        let forbid = if forbidden.is_empty() { forbid } else { forbid::read(&[own, forbidden].concat())? };
        Ok(Self { target, forbid })
    }
}

/// A plan that says what its search was restricted to.
pub(crate) fn recorded(mut plan: Plan, target: Option<TargetArg>, forbidden: &[String]) -> Plan {
    if let Some(report) = &mut plan.search {
        report.target = target.map(|one| Target::from(one).name().to_owned());
        report.forbidden = forbidden.to_vec();
    }
    plan
}

/// A plan in place of another that says the same restrictions, and what was ruled out besides.
pub(crate) fn like(before: &Plan, forbidden: &[String], mut plan: Plan) -> Plan {
    if let (Some(known), Some(report)) = (&before.search, &mut plan.search) {
        report.target = known.target.clone();
        report.forbidden = [known.forbidden.as_slice(), forbidden].concat();
    }
    plan
}

impl From<TargetArg> for Target {
    fn from(arg: TargetArg) -> Self {
        match arg {
            TargetArg::Megatron => Self::Megatron,
            TargetArg::TorchTitan => Self::TorchTitan,
            TargetArg::DeepSpeed => Self::DeepSpeed,
        }
    }
}
