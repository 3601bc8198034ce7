//! A progress bar over the steps of several trainings.

use std::time::Duration;

use executor::observe::{Activity, Moved, Observer};
use indicatif::{ProgressBar as Bar, ProgressDrawTarget, ProgressStyle};

use crate::terminal::ProgressBar;

use super::trace::Trace;

/// Redraws per second: enough to look alive.
const REDRAWS: u8 = 10;

/// Trainings of a command: one device, the same from a moved start, the plan.
const TRAININGS: u64 = 3;

/// The bar.
pub(super) struct Progress(Bar);

impl Progress {
    /// A bar for three trainings of so many steps.
    pub(super) fn new(shown: ProgressBar, steps: u32) -> Self {
        let target = match shown {
            ProgressBar::Shown => ProgressDrawTarget::stderr_with_hz(REDRAWS),
            ProgressBar::Hidden => ProgressDrawTarget::hidden(),
        };
        let bar = Bar::with_draw_target(Some(TRAININGS * u64::from(steps)), target);
        if let Ok(style) = ProgressStyle::with_template("{elapsed:>4} [{bar:30}] {pos}/{len} steps, {msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        if shown == ProgressBar::Shown {
            bar.enable_steady_tick(Duration::from_millis(500));
        }
        Self(bar)
    }

    /// Takes the bar away.
    pub(super) fn finish(&self) {
        self.0.finish_and_clear();
    }

    /// Counts the steps of a training.
    pub(super) fn of(&self, what: &'static str) -> Counted<'_> {
        self.0.set_message(what);
        Counted { bar: &self.0, trace: None }
    }

    /// Counts the steps of the plan, and lets a trace listen too.
    pub(super) fn with<'a>(&'a self, trace: &'a Trace) -> Counted<'a> {
        Counted { bar: &self.0, trace: Some(trace) }
    }
}

/// Counts the steps of a training: the updates of its first rank.
pub(super) struct Counted<'a> {
    bar: &'a Bar,
    trace: Option<&'a Trace>,
}

impl Observer for Counted<'_> {
    fn begins(&self, rank: usize, activity: Activity<'_>) {
        if rank == 0 && matches!(activity, Activity::Update { .. }) {
            self.bar.inc(1);
        }
        if let Some(trace) = self.trace {
            trace.begins(rank, activity);
        }
    }

    fn ends(&self, rank: usize, moved: Moved) {
        if let Some(trace) = self.trace {
            trace.ends(rank, moved);
        }
    }
}
