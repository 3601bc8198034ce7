//! The one use and storage of parameters that are one: the table of an embedding and its head.

use std::collections::BTreeMap;

use ir::graph::{ParameterRef, TensorId, Tie};
use ir::lower::{LayerChoice, whole_axes};
use ir::program::{AxisSet, StateHome, Storage};
use ir::sharding::Sharding;
use ir::units::Seconds;

use crate::candidate::{Candidate, Scope};
use crate::clock::Covers;
use crate::forms::Forms;
use crate::given::{Given, StorageRule, TiedUse};
use crate::layer_problem::LayerProblem;
use crate::priced_choices::with_tied;
use crate::shelf::Bench;

/// Use and storage that tied parameters of a layer kind must have.
pub(crate) type TiedUses = BTreeMap<TensorId, TiedUse>;

/// What another use than the copy's fastest must save, as a part of the step: where memory is short, that leaves most
/// room.
const WORTH_ANOTHER: f64 = 0.002;

/// A side of a tie with one use.
struct Side {
    /// Seconds of a step that its layers take.
    time: f64,
    used: [Sharding; 2],
    storage: Storage,
    choice: LayerChoice,
}

/// Both sides of a tie.
struct Joint {
    /// The copy's, with the storage that the owner has for it.
    side: Side,
    /// Seconds of both.
    time: f64,
    /// The same were they not tied.
    apart: f64,
}

/// How both sides of ties go together.
#[derive(Clone, Copy)]
pub(crate) struct Tying {
    /// Whether both leave the gradient alike, so that the owner holds the copy: all layers are on one stage.
    is_summed: bool,
    /// Seconds of a step that another use than the copy's fastest must save.
    worth: f64,
}

impl Scope<'_> {
    /// How ties of a candidate may be made, whose layers take no less than a time on one of its stages; the later where
    /// the earlier have no strategy.
    pub(crate) fn tyings(
        &self,
        candidate: &Candidate,
        least: Seconds,
    ) -> impl Iterator<Item = Tying> + use<> {
        let may_sum = candidate.holds_ties_once() && !self.model().ties.is_empty();
        let worth = least.0 * candidate.n_stages as f64 * WORTH_ANOTHER;
        let summed = may_sum.then_some(Tying { is_summed: true, worth });
        summed.into_iter().chain([Tying { is_summed: false, worth }])
    }

    /// Seconds by which a bound rises as both sides of every tie use their parameters alike, where compute covers so
    /// much.
    pub(crate) fn more_where_tied(&self, bench: &Bench<'_>, covers: Covers) -> f64 {
        let candidate = bench.candidate;
        let given = Given { covers, ..self.given_fastest() };
        let more = |tie: &Tie| {
            let of = |tying| self.best_together(bench, (&given, tying), tie);
            let found = self.tyings(candidate, Seconds::ZERO).find_map(of);
            found.map_or(0.0, |found| (found.time - found.apart) / candidate.n_stages as f64)
        };
        // Further copies of an owner count no more than the first.
        let first = |(at, tie): &(usize, &Tie)| {
            self.model().ties[..*at].iter().all(|before| before.owner.layer != tie.owner.layer)
        };
        self.model().ties.iter().enumerate().filter(first).map(|(_, tie)| more(tie)).sum()
    }

    /// Use and storage of every tied parameter, per kind: one for all levels, since both sides must agree. Several to
    /// try, the smaller behind the faster; nothing where some tie has no use that both sides can have.
    ///
    /// The use is that in which both sides take least together; optimizer states are cut as far as they can be and are
    /// on the host or its drives where they may be, and gradients are whole or cut, unless the user says otherwise.
    pub(crate) fn tied_uses(
        &self,
        bench: &Bench<'_>,
        base: &Given,
        tying: Tying,
    ) -> Option<Vec<BTreeMap<usize, TiedUses>>> {
        // With gradients whole, and cut, in each of the memories.
        let homes = base.homes.tied_homes();
        let mut all = vec![BTreeMap::<usize, TiedUses>::new(); 2 * homes.len()];
        for tie in &self.model().ties {
            let known = |uses: &BTreeMap<usize, TiedUses>| {
                uses.get(&tie.owner.layer).and_then(|uses| uses.get(&tie.owner.tensor)).copied()
            };
            // One for all copies of an owner.
            let of_owner: Option<Vec<TiedUse>> = all.iter().map(known).collect();
            let each = match of_owner {
                Some(each) => each,
                None => self.uses_of(bench, (base, tying), tie)?,
            };
            for (uses, one) in all.iter_mut().zip(each) {
                for side in [tie.owner, tie.copy] {
                    uses.entry(side.layer).or_default().insert(side.tensor, one);
                }
            }
        }
        all.dedup();
        Some(all)
    }

    /// The same of one tie: its use with gradients whole, and cut, in each of the memories.
    fn uses_of(&self, bench: &Bench<'_>, (base, tying): (&Given, Tying), tie: &Tie) -> Option<Vec<TiedUse>> {
        let Side { used: [used, gradient], storage, .. } =
            self.best_together(bench, (base, tying), tie)?.side;
        let homes = base.homes.tied_homes();
        let is_frozen = !self.model().layers[tie.copy.layer].is_trained(tie.copy.tensor);
        let is_free = base.storage == StorageRule::Free && base.forbid.zero.is_empty();
        let storages = match (is_free, is_frozen) {
            (true, true) => vec![Storage::default(); 2 * homes.len()],
            (true, false) => {
                let cut = bench.prices.shardable(whole_axes(bench.prices.mesh(), used));
                let may_cut = bench.prices.is_crossed_at_any_time(cut);
                let gradients = [AxisSet::EMPTY, if may_cut { cut } else { AxisSet::EMPTY }];
                let stored = |&home: &StateHome| {
                    gradients
                        .map(|gradient| Storage { home, ..Storage::on_device(AxisSet::EMPTY, gradient, cut) })
                };
                homes.iter().flat_map(stored).collect()
            }
            (false, _) => vec![storage; 2 * homes.len()],
        };
        let summed = tying.is_summed.then_some(gradient);
        Some(storages.into_iter().map(|storage| TiedUse { used, summed, storage: Some(storage) }).collect())
    }

    /// The use in which both sides of a tie take least together, each by its own cheapest choices.
    fn best_together(
        &self,
        bench: &Bench<'_>,
        (base, Tying { is_summed, worth }): (&Given, Tying),
        tie: &Tie,
    ) -> Option<Joint> {
        let (copy, problem) = self.side(bench, base, tie.copy)?;
        let (owner, _) = self.side(bench, base, tie.owner)?;
        let apart = copy.time + owner.time;
        let as_one = |[used, gradient]: [Sharding; 2]| TiedUse {
            used,
            summed: is_summed.then_some(gradient),
            storage: None,
        };
        if as_one(copy.used) == as_one(owner.used) {
            let side = Side { storage: owner.storage, ..copy };
            return Some(Joint { side, time: apart, apart });
        }
        let mut uses: Vec<TiedUse> = Vec::new();
        // The copy's own first: others must undercut it.
        for one in std::iter::once(copy.used).chain(problem.uses(tie.copy.tensor)).map(as_one) {
            if !uses.contains(&one) {
                uses.push(one);
            }
        }
        let mut best: Option<Joint> = None;
        for one in uses {
            let least = best.as_ref().map_or(f64::INFINITY, |best| best.time - worth);
            let with = |side| self.side_with(bench, (base, one), side);
            let Some(copy) = with(tie.copy).filter(|copy| copy.time + owner.time < least) else { continue };
            let Some(owner) = with(tie.owner).filter(|owner| copy.time + owner.time < least) else {
                continue;
            };
            let time = copy.time + owner.time;
            best = Some(Joint { side: Side { storage: owner.storage, ..copy }, time, apart });
        }
        best
    }

    /// Choices of the owner and of the copy of a tie in every use that both can have, each the cheapest with that.
    pub(crate) fn both_sides(
        &self,
        bench: &Bench<'_>,
        base: &Given,
        tie: &Tie,
    ) -> Vec<[(usize, LayerChoice); 2]> {
        let is_summed = bench.candidate.holds_ties_once();
        let Some((_, problem)) = self.side(bench, base, tie.copy) else { return Vec::new() };
        let of_use = |[used, gradient]: [Sharding; 2]| {
            let one = TiedUse { used, summed: is_summed.then_some(gradient), storage: None };
            let owner = self.side_with(bench, (base, one), tie.owner)?;
            let with_owner = TiedUse { storage: Some(owner.storage), ..one };
            let copy = self.side_with(bench, (base, with_owner), tie.copy)?;
            Some([(tie.owner.layer, owner.choice), (tie.copy.layer, copy.choice)])
        };
        problem.uses(tie.copy.tensor).into_iter().filter_map(of_use).collect()
    }

    /// A side of a tie by its cheapest choices with one use.
    fn side_with(
        &self,
        bench: &Bench<'_>,
        (base, one): (&Given, TiedUse),
        side: ParameterRef,
    ) -> Option<Side> {
        let tied = BTreeMap::from([(side.layer, TiedUses::from([(side.tensor, one)]))]);
        Some(self.side(bench, &with_tied(base, &tied, side.layer), side)?.0)
    }

    /// A side of a tie by its cheapest choices, and the problem of its layer.
    fn side<'s>(
        &'s self,
        bench: &Bench<'s>,
        given: &Given,
        of: ParameterRef,
    ) -> Option<(Side, LayerProblem<'s>)> {
        let (_, problem) = self.asked(bench, of.layer, given, Forms::Leading).into_iter().next()?;
        let cheapest = self.chooser(&problem).cheapest(0.0)?;
        let choice = problem.choice(&cheapest.choices);
        let time = problem.problem.total(&cheapest.choices)?.time * self.counts[of.layer] as f64;
        let used = problem.used(&choice, of.tensor)?;
        let storage = choice.storage.get(&of.tensor).copied()?;
        Some((Side { time, used, storage, choice }, problem))
    }
}
