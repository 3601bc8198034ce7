//! The choices tried so far for every layer kind of a candidate, each lowered and priced from its program.
//!
//! A level is a price of memory: at each the choice problem of every kind is solved once more. What an entry costs is
//! read off its program, not off the problem.

use std::collections::BTreeMap;

use ir::graph::{Sizes, TensorId};
use ir::lower::{lower, whole_axes};
use ir::program::{AxisSet, Storage};
use ir::sharding::Sharding;

use crate::bound::Bound;
use crate::candidate::{Candidate, Scope};
use crate::chooser::Chooser;
use crate::layer_problem::{Given, LayerProblem, StorageRule};
use crate::partition::{LayerCost, Levels};
use crate::price::setting::Entry;
use crate::prices::Prices;

/// Use and storage that tied parameters of a layer kind must have.
type TiedUses = BTreeMap<TensorId, (Sharding, Storage)>;

/// The choices tried so far for every layer kind, with their figures.
#[derive(Default)]
pub(crate) struct Shelf {
    /// Per kind, distinct choices.
    pub(crate) entries: Vec<Vec<Entry>>,
    /// Per kind and price of memory, which choice.
    pub(crate) levels: Vec<Vec<usize>>,
}

impl<'a> Scope<'a> {
    /// Adds the choices at the next price of memory to the shelf, and their figures.
    pub(crate) fn extend(
        &self,
        shelf: &mut Shelf,
        (problems, ready): (&[LayerProblem<'_>], &[Chooser<'_>]),
        (prices, sizes): (&Prices<'_>, &[Sizes]),
        price: f64,
    ) -> Option<()> {
        for (kind, (problem, ready)) in problems.iter().zip(ready).enumerate() {
            if shelf.entries.len() <= kind {
                shelf.entries.push(Vec::new());
                shelf.levels.push(Vec::new());
            }
            let (_, choices) = ready.cheapest(price)?;
            let choice = problem.choice(&choices);
            let known = shelf.entries[kind].iter().position(|entry| entry.choice == choice);
            let at = match known {
                Some(at) => at,
                None => {
                    let layer = &self.model().layers[kind];
                    let program = lower(layer, prices.mesh(), &sizes[kind], &choice).ok()?;
                    let at = (prices.mesh(), &sizes[kind]);
                    shelf.entries[kind].push(self.setting.entry(self.model(), (kind, choice), at, &program));
                    shelf.entries[kind].len() - 1
                }
            };
            shelf.levels[kind].push(at);
        }
        Some(())
    }

    pub(crate) fn levels(&self, shelf: &Shelf) -> Levels {
        let slack = self.constants.fragmentation_factor;
        let cost = |entry: &Entry| LayerCost {
            time: (entry.price.forward.seconds() + entry.price.backward.seconds()).0,
            state: entry.memory.states().0,
            saved: entry.memory.saved_total().0 * slack,
            working: (entry.memory.working() + entry.memory.logits).0 * slack,
        };
        let depth = shelf.levels.first().map_or(0, Vec::len);
        let at = |level: usize| {
            shelf.levels.iter().zip(&shelf.entries).map(|(levels, list)| cost(&list[levels[level]])).collect()
        };
        Levels::new((0..depth).map(at).collect(), self.model().kinds_in_order())
    }

    /// The choice problem of every layer kind, the stream passing in the sharding of the bound.
    pub(crate) fn problems(
        &self,
        (candidate, bound): (&Candidate, &Bound),
        prices: &Prices<'_>,
        sizes: &[Sizes],
        given: &Given,
    ) -> Option<Vec<LayerProblem<'a>>> {
        let clock = Self::clock(candidate);
        let layers = &self.model().layers;
        let problem =
            |kind: usize, given: &Given| LayerProblem::new(&layers[kind], &sizes[kind], prices, clock, given);
        let base = Given { stream: Some(bound.stream), ..given.clone() };
        let tied = self.tied_uses(prices, &base, &problem)?;
        (0..layers.len())
            .map(|kind| {
                problem(kind, &Given { tied: tied.get(&kind).cloned().unwrap_or_default(), ..base.clone() })
            })
            .collect()
    }

    /// Use and storage of every tied parameter, per kind: one for all levels, since both sides must agree.
    ///
    /// The use is that of the copy's fastest choice; the states beside the parameter are cut as far as they can be,
    /// unless the user says otherwise.
    fn tied_uses<'p>(
        &self,
        prices: &Prices<'_>,
        base: &Given,
        problem: &dyn Fn(usize, &Given) -> Option<LayerProblem<'p>>,
    ) -> Option<BTreeMap<usize, TiedUses>> {
        let mut uses: BTreeMap<usize, TiedUses> = BTreeMap::new();
        for tie in &self.model().ties {
            let built = problem(tie.copy.layer, base)?;
            let choice = built.choice(&self.chooser(&built).fastest(&built.problem)?.2);
            let used = built.used(&choice, tie.copy.tensor)?;
            let storage = match base.storage {
                StorageRule::Free => {
                    let cut = whole_axes(prices.mesh(), used);
                    Storage { parameter: AxisSet::EMPTY, gradient: cut, optimizer: cut }
                }
                StorageRule::Whole
                | StorageRule::Optimizer
                | StorageRule::Gradient
                | StorageRule::Parameter => choice.storage.get(&tie.copy.tensor).copied()?,
            };
            for side in [tie.owner, tie.copy] {
                uses.entry(side.layer).or_default().insert(side.tensor, (used, storage));
            }
        }
        Some(uses)
    }
}
