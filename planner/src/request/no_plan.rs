//! How the search answers when there is no plan.

use cost_model::offload::NodeMemory;
use ir::units::{Bytes, GIB, Seconds};
use serde::Serialize;

/// A change that would make a plan fit.
#[derive(Clone, Debug, PartialEq)]
pub struct Relaxation {
    /// The change: `4 times the nodes (32 devices)`.
    pub change: String,
    /// Step time of a plan that then fits; a whole search may find a faster one.
    pub step_time: Seconds,
    /// Tokens of a step then.
    pub tokens: f64,
}

impl Relaxation {
    /// Tokens that all devices train on in a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens / self.step_time.0
    }
}

/// Whose memory a refusal tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Need {
    /// That of the candidate that overflows least.
    Closest,
    /// What no plan does without: the states alone, however they are cut. None was worked out.
    Any,
}

/// What a search without a plan has left out when somebody ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Untried {
    /// Candidates: a plan that fits may be there.
    Plans,
    /// Changes that may make one fit.
    Changes,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NoPlan {
    /// The question contradicts itself or the model.
    #[error("{what}")]
    Impossible {
        /// What is wrong, and the fix.
        what: String,
    },
    /// The search found what is no plan: a fault of the planner.
    #[error("the plan is wrong at {place}: {what}")]
    Broken {
        /// Where.
        place: String,
        /// What is wrong there.
        what: String,
    },
    /// Everything that was tried needs more memory than there is.
    #[error(
        "{}: {}",
        if *untried == Some(Untried::Plans) { "no plan was found in time" } else { "no plan fits" },
        lack((*need, *stage, term), (*needed, *capacity), also.as_deref())
    )]
    NothingFits {
        /// Whose memory is told.
        need: Need,
        /// The stage that overflows in the closest candidate.
        stage: usize,
        /// The largest category there.
        term: String,
        /// What it needs.
        needed: Bytes,
        /// What it has.
        capacity: Bytes,
        /// A node whose host, or drives, lack memory besides.
        also: Option<Box<NodeMemory>>,
        /// Changes that would help, each with the time of the plan it allows; best first.
        relaxations: Vec<Relaxation>,
        /// What was not tried, for somebody wanted an answer.
        untried: Option<Untried>,
    },
    /// The plan that was given needs more memory than there is.
    #[error(
        "the plan does not fit: it needs {:.1} GiB of {:.1} GiB on stage {stage}, most of it {term}",
        needed.0 / GIB, capacity.0 / GIB
    )]
    Overflows {
        /// The fullest stage.
        stage: usize,
        /// The largest category there.
        term: String,
        /// What it needs.
        needed: Bytes,
        /// What it has.
        capacity: Bytes,
        /// Changes that would help, each with the time of the plan it allows; best first.
        relaxations: Vec<Relaxation>,
    },
}

/// Digits of a GiB behind the point, at most.
const MOST_DIGITS: usize = 9;

/// What overflows, and what of a node does besides, in words.
pub fn lack(
    (need, stage, term): (Need, usize, &str),
    (needed, capacity): (Bytes, Bytes),
    also: Option<&NodeMemory>,
) -> String {
    let of = |needed: Bytes, capacity: Bytes| {
        let [needed, capacity] = [needed, capacity].map(|bytes| bytes.0 / GIB);
        // As many digits as it takes to see which is more.
        let differ = |digits: &usize| format!("{needed:.digits$}") != format!("{capacity:.digits$}");
        let digits = (1..MOST_DIGITS).find(differ).unwrap_or(MOST_DIGITS);
        format!("{needed:.digits$} GiB of {capacity:.digits$} GiB")
    };
    let own = of(needed, capacity);
    let also = also.map_or(String::new(), |node| {
        format!("; besides, {} are needed for {}", of(node.needed, node.capacity), node.store.term())
    });
    match need {
        Need::Closest => format!("the closest needs {own} on stage {stage}, most of it {term}{also}"),
        Need::Any => format!("any needs at least {own} per device for {term}{also}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_short_is_told_in_as_many_digits_as_it_takes() {
        let said = |needed: f64, capacity: f64| {
            lack((Need::Closest, 1, "gradients"), (Bytes(needed * GIB), Bytes(capacity * GIB)), None)
        };
        assert_eq!(
            said(80.3, 79.6),
            "the closest needs 80.3 GiB of 79.6 GiB on stage 1, most of it gradients"
        );
        assert_eq!(
            said(6.942, 6.9),
            "the closest needs 6.94 GiB of 6.90 GiB on stage 1, most of it gradients"
        );
    }
}
