//! `planner explain`.

use crate::args::ExplainArgs;
use crate::failure::Failure;
use crate::terminal::Terminal;

pub(crate) fn run(_args: &ExplainArgs, _terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    Err(Failure::argument("not yet"))
}
