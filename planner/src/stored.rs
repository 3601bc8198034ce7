//! What was found, with every parameter stored alike: the same strategies, other ZeRO stages.
//!
//! Choices inside layers weigh what gradients and parameters send by what shows of it beside one layer; of a step with
//! few micro-batches and slow links programs may show much more, or less. Storage is what that changes most, and it is
//! the cheapest to try: nothing else is chosen again.

use ir::graph::Layer;
use ir::lower::{LayerChoice, whole_axes};
use ir::mesh::Mesh;
use ir::program::Storage;
use ir::signature::signature;
use ir::strategy::placements;

use crate::arrange::{Arranged, fastest};
use crate::arrangements::Arrangements;
use crate::asking::open_storages;
use crate::candidate::Scope;
use crate::given::StorageRule;
use crate::price::setting::Entry;
use crate::shelf::Shelf;

impl Scope<'_> {
    /// The fastest of what was found with one ZeRO stage for all learned parameters, of what may be faster than it.
    /// Nothing where layers of one kind differ, stages stand on several grounds, or somebody says how parameters are
    /// stored.
    pub(crate) fn stored_alike(&self, found: &Arranged) -> Option<Arranged> {
        let rules = open_storages(self.pins());
        if rules.is_empty() {
            return None;
        }
        let candidate = &found.candidate;
        let grounds = self.grounds(candidate);
        let benches = self.benches(candidate, &grounds);
        let [bench] = benches.as_slice() else { return None };
        let choices = self.choice_of_each_kind(found)?;
        let stored_so = |rule: StorageRule| {
            let mut shelf = Shelf::new(self.forms.len());
            for (kind, (form, choice)) in choices.iter().enumerate() {
                let layer = &self.forms[kind][*form].layer;
                let choice = stored(layer, bench.prices.mesh(), choice, rule);
                self.put((&mut shelf, 0), bench, (kind, *form), choice)?;
            }
            let (shelves, mut known) = ([shelf], Arrangements::below(found.step_time().0));
            self.arrange_all(candidate, &shelves, &mut known);
            self.moved(candidate, known, (&shelves, false))
        };
        fastest(rules.into_iter().filter_map(stored_so))
    }

    /// Per layer kind, the form that is used and its choice, if all its layers have the same.
    fn choice_of_each_kind<'f>(&self, found: &'f Arranged) -> Option<Vec<(usize, &'f LayerChoice)>> {
        let of_kind = |kind: usize| {
            let form = |entry: &'f Entry| Some((self.form_of(kind, entry.kind)?, &entry.choice));
            let mut own = found.entries.iter().filter_map(form);
            own.next().filter(|_| own.next().is_none())
        };
        (0..self.forms.len()).map(of_kind).collect()
    }
}

/// A choice whose learned parameters are all cut by a rule, where they are.
fn stored(layer: &Layer, mesh: &Mesh, choice: &LayerChoice, rule: StorageRule) -> LayerChoice {
    let mut next = choice.clone();
    for (op, &strategy) in layer.ops.iter().zip(&choice.strategies) {
        let used = placements(&signature(layer, op), strategy).operands;
        for (&tensor, used) in op.operands.iter().zip(used) {
            if !layer.is_parameter(tensor) || !layer.is_trained(tensor) {
                continue;
            }
            if let Some(cuts) = rule.cuts(whole_axes(mesh, used))
                && let Some(storage) = next.storage.get_mut(&tensor)
            {
                *storage = Storage { home: storage.home, ..cuts };
            }
        }
    }
    next
}
