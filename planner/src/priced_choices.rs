//! The choices of a layer kind at a price of memory: its problems in the hands of the solver, and the best over its
//! forms.

use std::cell::RefCell;
use std::collections::BTreeMap;

use ir::lower::LayerChoice;

use crate::candidate::Scope;
use crate::chooser::{Cheapest, Chooser, Question};
use crate::forms::Forms;
use crate::given::{Given, StateRule};
use crate::layer_problem::LayerProblem;
use crate::shelf::{Asked, Bench, Shelf};
use crate::tied::TiedUses;

/// Behind what parameters are gathered and gradients reduced that move every micro-batch, as choices go by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Hides {
    /// Behind their own operator.
    BehindOperator,
    /// Behind all that their layer computes, as in its program.
    BehindLayer,
}

/// The sum that choices go by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sum {
    /// Seconds for a byte.
    pub(crate) price: f64,
    /// A byte that is kept for backward counts so much of that for each of the micro-batches that the first stage has
    /// in flight.
    pub(crate) kept: f64,
    pub(crate) hides: Hides,
}

impl Sum {
    /// With all that is kept on the first stage.
    pub(crate) fn at(price: f64, hides: Hides) -> Self {
        Self { price, kept: 1.0, hides }
    }
}

/// The forms of a layer kind that are asked, in the hands of the solver.
pub(crate) struct Choosers<'s> {
    /// With the states where they may be.
    own: Vec<(usize, Chooser<'s>)>,
    /// With those off the device on drives; none where states may not be on either.
    on_drives: Vec<(usize, Chooser<'s>)>,
    /// What was asked so far: sums that differ in what they make of one price ask the same at others.
    known: RefCell<BTreeMap<Asking, Option<OfForm>>>,
}

/// What is asked: the bits of a price of a byte and of one that is kept for backward, whether states off the device are
/// on drives.
type Asking = (u64, u64, Hides, bool);

/// A form of a layer kind with a choice for it.
pub(crate) type OfForm = (usize, LayerChoice);

impl Choosers<'_> {
    /// The best choice over all forms at prices of a byte, and of one that is kept for backward, with states off the
    /// device on drives or not; ties to the earlier form.
    pub(crate) fn best(&self, price: f64, (kept, on_drives): (f64, bool), hides: Hides) -> Option<OfForm> {
        let asking = (price.to_bits(), kept.to_bits(), hides, on_drives);
        if let Some(known) = self.known.borrow().get(&asking) {
            return known.clone();
        }
        let ready = if on_drives { &self.on_drives } else { &self.own };
        let mut best: Option<(f64, usize, Vec<usize>)> = None;
        for (at, (_, chooser)) in ready.iter().enumerate() {
            let limit = best.as_ref().map_or(f64::INFINITY, |(known, ..)| *known);
            let found = match hides {
                Hides::BehindOperator => chooser.cheapest_by_own((price, kept, limit)),
                Hides::BehindLayer => chooser
                    .cheapest_apart(Question { limit, ..Question::apart(price, kept) })
                    .map(|Cheapest { value, choices, .. }| (value, choices)),
            };
            if let Some((value, choices)) = found.filter(|(value, _)| *value < limit) {
                best = Some((value, at, choices));
            }
        }
        let best = best.map(|(_, at, choices)| (ready[at].0, ready[at].1.problem().choice(&choices)));
        self.known.borrow_mut().insert(asking, best.clone());
        best
    }
}

/// The choice problems of a layer kind by its forms, for both.
pub(crate) type AskedOfKind<'s> = [Asked<'s>; 2];

impl Scope<'_> {
    /// The choice problems of every kind.
    pub(crate) fn all_asked<'s>(
        &'s self,
        bench: &Bench<'s>,
        (base, tied): (&Given, &BTreeMap<usize, TiedUses>),
        forms: Forms<'_>,
    ) -> Vec<AskedOfKind<'s>> {
        let of_kind = |kind: usize| {
            let given = with_tied(base, tied, kind);
            let own = self.asked(bench, kind, &given, forms);
            let on_drives = match given.homes {
                StateRule::Anywhere => {
                    self.asked(bench, kind, &Given { homes: StateRule::OrNvme, ..given }, forms)
                }
                StateRule::Device
                | StateRule::Free
                | StateRule::OrNvme
                | StateRule::Host
                | StateRule::Nvme => Vec::new(),
            };
            [own, on_drives]
        };
        (0..self.forms.len()).map(of_kind).collect()
    }

    /// Adds the best choice over all forms at a price of memory, as a level; ties to the earlier form. Where hosts may
    /// hold some of it, what that makes of it is weighed too.
    pub(crate) fn add(
        &self,
        on: (&mut Shelf, usize),
        bench: &Bench<'_>,
        (kind, ready): (usize, &Choosers<'_>),
        Sum { price, kept: part, hides }: Sum,
    ) -> Option<()> {
        let best = |(kept, on_drives): (Option<f64>, bool)| {
            ready.best(price, (kept.unwrap_or(price * part), on_drives), hides)
        };
        if self.is_on_device(kind) {
            let (form, choice) = best((None, false))?;
            return self.put(on, bench, (kind, form), choice);
        }
        self.put_with_hosts(on, bench, (kind, &best), price)
    }

    /// Hands the problems of a layer kind over.
    pub(crate) fn choosers<'s>(
        &'s self,
        own: &'s [(usize, LayerProblem<'s>)],
        on_drives: &'s [(usize, LayerProblem<'s>)],
    ) -> Choosers<'s> {
        let handed = |asked: &'s [(usize, LayerProblem<'s>)]| {
            asked.iter().map(|(form, problem)| (*form, self.chooser(problem))).collect()
        };
        Choosers { own: handed(own), on_drives: handed(on_drives), known: RefCell::default() }
    }
}

/// What is given to one layer kind, with the uses and storages of its parameters that are tied.
pub(crate) fn with_tied(base: &Given, tied: &BTreeMap<usize, TiedUses>, kind: usize) -> Given {
    Given { tied: tied.get(&kind).cloned().unwrap_or_default(), ..base.clone() }
}
