//! Where a command reads nothing from and writes everything to.

use std::io::Write;

use crate::interrupt::Interrupt;

/// The two streams of a command.
pub struct Terminal<'a> {
    /// Data.
    pub out: &'a mut dyn Write,
    /// Talk.
    pub err: &'a mut dyn Write,
    /// Whether a search may draw a progress bar.
    pub progress: ProgressBar,
    /// Ctrl-C, as far as the process listens to it.
    pub interrupt: &'a Interrupt,
}

/// Whether a search draws a progress bar on the process's standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgressBar {
    /// It does: standard error is a terminal.
    Shown,
    /// It does not.
    Hidden,
}
