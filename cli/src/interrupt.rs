//! Ctrl-C, as a search hears it: the first ends the search with the best plan so far, the second the program.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether somebody listens to Ctrl-C, and whether it was pressed.
#[derive(Debug, Default)]
pub struct Interrupt {
    listening: AtomicBool,
    raised: AtomicBool,
}

impl Interrupt {
    /// Nobody listens, and nothing was pressed.
    pub const fn new() -> Self {
        Self { listening: AtomicBool::new(false), raised: AtomicBool::new(false) }
    }

    /// Takes note of Ctrl-C. False where nobody will act on it: nobody listens, or it was pressed before.
    pub fn raise(&self) -> bool {
        self.listening.load(Ordering::SeqCst) && !self.raised.swap(true, Ordering::SeqCst)
    }

    /// Runs something that asks the interrupt now and then whether to end.
    pub(crate) fn heard_by<T>(&self, run: impl FnOnce() -> T) -> T {
        self.raised.store(false, Ordering::SeqCst);
        self.listening.store(true, Ordering::SeqCst);
        let answer = run();
        self.listening.store(false, Ordering::SeqCst);
        answer
    }

    /// Whether to end.
    pub(crate) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_is_heard_and_only_by_who_listens() {
        let interrupt = Interrupt::new();
        assert!(!interrupt.raise(), "nobody listens");
        let heard = interrupt.heard_by(|| {
            assert!(!interrupt.is_raised());
            [interrupt.raise(), interrupt.is_raised(), interrupt.raise()]
        });
        assert_eq!(heard, [true, true, false]);
        assert!(!interrupt.raise(), "nobody listens any more");
        assert!(!interrupt.heard_by(|| interrupt.is_raised()), "an old one is forgotten");
    }
}
