//! `planner verify`.

use crate::args::VerifyArgs;
use crate::failure::Failure;
use crate::terminal::Terminal;

pub(crate) fn run(_args: &VerifyArgs, _terminal: &mut Terminal<'_>) -> Result<(), Failure> {
    Err(Failure::argument("not yet"))
}
