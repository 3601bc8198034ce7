//! `planner explain --why-not`: the best plan with choices of the user's, term by term beside the one that was found,
//! or what keeps such a plan from being one.

use cost_model::Constants;
use cost_model::offload::NodeMemory;
use ir::plan::check::{OpenPlan, open};
use ir::plan::{Plan, PlanError};
use ir::units::Bytes;
use planner::request::{Job, Need, NoPlan, Pins, Request, Stop, lack};
use planner::target::optimize_for;
use serde::Serialize;

use crate::args::ThreadArgs;
use crate::compare::{Comparison, Named};
use crate::failure::Failure;
use crate::pins;
use crate::priced;
use crate::restricted::Restricted;
use crate::search::{AlsoDocument, pool};

/// The answer.
#[derive(Serialize)]
pub(crate) struct WhyNot {
    asked: String,
    answer: Answer,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
enum Answer {
    /// There is such a plan: the plan of the file first, then the best with these choices.
    Priced(Comparison),
    /// It is none: a rule or a length forbids it.
    Illegal { reason: String },
    /// It needs more memory than there is.
    DoesNotFit {
        need: Need,
        stage: usize,
        term: String,
        needed_bytes: f64,
        capacity_bytes: f64,
        /// What a node lacks besides.
        #[serde(skip_serializing_if = "Option::is_none")]
        also: Option<AlsoDocument>,
        #[serde(skip)]
        said: String,
    },
}

impl Answer {
    fn does_not_fit(
        (need, stage, term): (Need, usize, String),
        (needed, capacity): (Bytes, Bytes),
        also: Option<&NodeMemory>,
    ) -> Self {
        let said = lack((need, stage, &term), (needed, capacity), also);
        let (needed_bytes, capacity_bytes) = (needed.0, capacity.0);
        let also = also.map(AlsoDocument::of);
        Self::DoesNotFit { need, stage, term, needed_bytes, capacity_bytes, also, said }
    }
}

impl WhyNot {
    /// Searches for the best plan with the choices, for the question that a plan answers: among those that it was
    /// chosen from.
    pub(crate) fn of(
        (file, plan, opened): (&str, &Plan, &OpenPlan),
        choices: &str,
        threads: &ThreadArgs,
    ) -> Result<Self, Failure> {
        let Restricted { target, forbid } = Restricted::of(file, plan, &[])?;
        let pins = Pins { forbid, ..pins::read_of("--why-not", choices)? };
        let asked = priced::request(plan, opened);
        // In which order tokens lie a plan has chosen too, and one that cuts no sequences says nothing of it.
        let token_order = Job::default_order(asked.job.sequence, asked.cluster.n_devices());
        let request = Request { pins, job: Job { token_order, ..asked.job }, ..asked };
        let found = pool(threads)?.install(|| match target {
            Some(target) => optimize_for(&request, target, (Stop::never(), &|_| ())),
            None => planner::optimize_with(&request, &Constants::load(), &|_| ()),
        });
        let answer = match found {
            Ok(other) => {
                let fault = |error: PlanError| Failure::bug(format!("{}: {}", error.place, error.what));
                let found = open(&other).map_err(fault)?;
                let first = Named { name: "the plan", plan, opened };
                let second = Named { name: choices, plan: &other, opened: &found };
                Answer::Priced(Comparison::of(&[first, second])?)
            }
            Err(NoPlan::Impossible { what }) => Answer::Illegal { reason: what },
            Err(NoPlan::NothingFits { need, stage, term, needed, capacity, also, .. }) => {
                Answer::does_not_fit((need, stage, term), (needed, capacity), also.as_deref())
            }
            Err(NoPlan::Overflows { stage, term, needed, capacity, .. }) => {
                Answer::does_not_fit((Need::Closest, stage, term), (needed, capacity), None)
            }
            Err(broken @ NoPlan::Broken { .. }) => return Err(broken.into()),
        };
        Ok(Self { asked: choices.to_owned(), answer })
    }

    /// For people.
    pub(crate) fn text(&self) -> String {
        match &self.answer {
            Answer::Priced(comparison) => comparison.text(),
            Answer::Illegal { reason } => format!("{} is no plan: {reason}\n", self.asked),
            Answer::DoesNotFit { said, .. } => format!("{} does not fit: {said}\n", self.asked),
        }
    }
}
