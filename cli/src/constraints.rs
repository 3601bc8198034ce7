//! `--constraints FILE`: what must hold of single layers and tensors.

use std::path::Path;

use frontends::InputError;
use planner::constraints::Constraints;
use planner::request::NoPlan;

use crate::failure::Failure;
use crate::input::read_file;
use crate::json_input;

/// What such a file says.
const EXAMPLE: &str = "for example {\"layers\": {\"decoder\": {\"parts\": {\"mlp.up.weight\": {\"f\": 8}}, \
                       \"recompute\": {\"*\": \"again\"}, \"storage\": {\"mlp.up.weight\": 3}}}}";

/// Reads a file of constraints; an error says where in it.
pub(crate) fn read(file: &str) -> Result<Constraints, Failure> {
    let text = read_file(Path::new(file), file, frontends::MAX_FILE_BYTES)?;
    let read: Constraints = json_input::parse(file, &text, EXAMPLE)?;
    if read.is_empty() {
        return Err(InputError::whole(file, "nothing is said of any layer").with_hint(EXAMPLE).into());
    }
    Ok(read)
}

/// In place of a search's answer that there is no plan, where that names a fault of the constraints themselves: nobody
/// need ask what there is without them.
pub(crate) fn wrong(file: &str, no_plan: &NoPlan) -> Option<Failure> {
    let said = no_plan.to_string();
    Some(Failure::argument(format!("{file}: {}", said.strip_prefix("constraints: ")?)))
}

/// The same where there would be a plan without the constraints.
pub(crate) fn refused(file: &str, no_plan: &NoPlan) -> Failure {
    Failure::argument_with_hint(
        format!("{file}: no plan honours all that it says of layers and tensors: {no_plan}"),
        "without it there is a plan: take annotations back, or pin degrees that go with them",
    )
}
