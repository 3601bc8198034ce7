//! What was found, with layers of one kind in two choices: some that send less once per step, others that compute less;
//! and tied parameters in other uses.
//!
//! What shows of gradients and parameters is what they take beyond the compute that they hide behind. Where all layers
//! of a kind have one choice a step waits for the one or the other; between the two it waits for neither. A bound
//! prices each by a mean of both (`clock::Clock::beside`), and only a blend of layers comes down to it.

use std::collections::BTreeMap;

use ir::lower::LayerChoice;
use ir::sharding::Sharding;
use ir::slices::Slices;
use ir::units::Seconds;

use crate::arrange::{Arranged, fastest};
use crate::asking::{Asking, Way, open_storages};
use crate::bound::Bound;
use crate::candidate::Scope;
use crate::clock::Covers;
use crate::evaluate::on_ground;
use crate::forms::Forms;
use crate::found::Misnamed;
use crate::inside::MANY_PAIRS;
use crate::levels::is_frequent;
use crate::price::setting::Entry;
use crate::priced_choices::Hides;
use crate::shelf::Bench;

/// A step of which less than this part shows once has nothing to blend for.
const SHOWS: f64 = 0.01;

/// What compute is taken to cover in other choices, as parts of the way from all to the least.
const COVERED: [f64; 6] = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0];

/// What is changed once takes no more than so many times as long as before, or is changed no further.
const NEARLY: f64 = 1.02;

/// What other counts of what compute covers lead to is changed on where it takes no more than so many times as long as
/// what was found.
const STARTS: f64 = 1.2;

/// Of what is changed once, the fastest that are changed on.
const MOST_FIRST: usize = 4;

/// What a blend must save, as a part of the step: layers that differ are more to read.
const WORTH_BLENDING: f64 = 0.002;

/// Times that layers are blended, each time with another choice.
const MOST_BLENDS: usize = 3;

/// What layers of a candidate on one ground may do otherwise than in what was found for it. What is asked again of a
/// kind is kept.
struct Blending<'s> {
    scope: &'s Scope<'s>,
    bench: &'s Bench<'s>,
    bound: &'s Bound,
    /// Entries of a kind in a form, by the sharding in which it passes the stream.
    of_kinds: BTreeMap<(usize, usize, Sharding), Vec<Entry>>,
    /// Entries of both sides of the one tie in every use, by the sharding of the stream.
    of_uses: BTreeMap<Sharding, Vec<[Entry; 2]>>,
}

impl Scope<'_> {
    /// The fastest of what was found with some layers of its frequent kinds in other choices, of what is worth it.
    /// Nothing where stages stand on several grounds or work on slices, little of what a step has once shows, or
    /// without that it would take no less than `best`.
    pub(crate) fn blended(
        &self,
        (found, bound): (&Arranged, &Bound),
        forms: Forms<'_>,
        best: Seconds,
    ) -> Option<Arranged> {
        let shows = found.step.parts.once() - found.step.parts.optimizer;
        let is_in_vain = shows < found.step_time() * SHOWS || found.step_time() - shows > best;
        if is_in_vain || found.slices.is_cut() || bound.other_covers.is_empty() {
            return None;
        }
        let grounds = self.grounds(&found.candidate);
        let benches = self.benches(&found.candidate, &grounds);
        let [bench] = benches.as_slice() else { return None };
        let mut blending =
            Blending { scope: self, bench, bound, of_kinds: BTreeMap::new(), of_uses: BTreeMap::new() };
        // What gains most by itself is not always what gains most with others.
        let near = found.step_time() * NEARLY;
        let limit = found.step_time().0 * STARTS;
        let of = |covers| {
            let way = Way { covers: Some(covers), ..Way::default() };
            let asked = Asking { limit, way, ..Asking::of(forms) };
            let start = self.evaluate_at(&benches, bound, asked).ok()?;
            (start.slices == found.slices && Misnamed::of(self, &start).is_none()).then_some(start)
        };
        // Where a layer has many choices, each takes seconds.
        let covers = if bound.n_pairs > MANY_PAIRS { Vec::new() } else { all_covers(bound) };
        let mut starts: Vec<Arranged> = covers.into_iter().filter_map(of).collect();
        starts.sort_by(|a, b| a.step_time().0.total_cmp(&b.step_time().0));
        starts.dedup_by_key(|one| one.step_time().0.to_bits());
        starts.truncate(MOST_FIRST);
        let first = blending.changes(found).into_iter();
        let first = first.take_while(|next| next.step_time() < near).take(MOST_FIRST).chain(starts);
        let last = |first: Arranged| {
            let mut best = first;
            for _ in 1..MOST_BLENDS {
                let next = blending.changes(&best).into_iter().next();
                let Some(next) = next.filter(|next| next.is_worth_it(&best)) else { break };
                best = next;
            }
            best
        };
        let worth = found.step_time() * (1.0 - WORTH_BLENDING);
        fastest(first.map(last)).filter(|one| one.step_time() < worth)
    }
}

impl Blending<'_> {
    /// What is known, with some layers in one other choice, or tied parameters in another use; the fastest first.
    fn changes(&mut self, known: &Arranged) -> Vec<Arranged> {
        let otherwise = self.used_otherwise(known);
        let others = self.others(known);
        let blends = others.iter().filter_map(|other| self.blended_with(known, other));
        // The layers of the other choice may be most of them, and name what is pinned.
        let is_as_pinned = |next: &Arranged| Misnamed::of(self.scope, next).is_none();
        let mut list: Vec<Arranged> = blends.chain(otherwise).filter(is_as_pinned).collect();
        list.sort_by(|a, b| a.step_time().0.total_cmp(&b.step_time().0));
        list
    }

    /// What is known with the one tied parameter of the model in another use.
    fn used_otherwise(&mut self, known: &Arranged) -> Vec<Arranged> {
        let (scope, bench, bound) = (self.scope, self.bench, self.bound);
        let [tie] = scope.model().ties.as_slice() else { return Vec::new() };
        let most = scope.most_frequent();
        let is_most = |entry: &&Entry| scope.form_of(most, entry.kind).is_some();
        let Some(body) = known.entries.iter().find(is_most) else { return Vec::new() };
        let stream = scope.passes(most, &body.choice);
        let of_uses = self.of_uses.entry(stream).or_insert_with(|| {
            let given = on_ground(0, (bound, Some(stream)), Way::default(), scope.given_fastest());
            let entry = |(kind, choice): (usize, LayerChoice)| {
                scope.entry_of(bench, &bench.sizes[kind][0], (scope.wide_kind(kind, 0), choice))
            };
            let both = |[owner, copy]: [_; 2]| Some([entry(owner)?, entry(copy)?]);
            scope.both_sides(bench, &given, tie).into_iter().filter_map(both).collect()
        });
        let with = |sides: &[Entry; 2]| {
            let own =
                |entry: &Entry| sides.iter().find(|side| side.kind == entry.kind).unwrap_or(entry).clone();
            let entries = known.entries.iter().map(own).collect();
            self.scope
                .finish(&known.candidate, known.schedule, (entries, known.chunks.clone()), as_known(known))
                .ok()
        };
        of_uses.iter().filter_map(with).collect()
    }

    /// Other entries for layers of frequent kinds, each with the place of the entry that it may stand for. Tied
    /// parameters are used in one way.
    fn others(&mut self, known: &Arranged) -> Vec<(usize, Entry)> {
        let scope = self.scope;
        let n_layers: u64 = scope.counts.iter().sum();
        let is_tied = |kind: usize| {
            scope.model().ties.iter().any(|tie| tie.owner.layer == kind || tie.copy.layer == kind)
        };
        let kinds = (0..scope.forms.len())
            .filter(|&kind| is_frequent(scope.counts[kind], n_layers) && !is_tied(kind));
        kinds.flat_map(|kind| self.others_of(known, kind)).collect()
    }

    /// The same of one kind, in the form of most of its layers.
    fn others_of(&mut self, known: &Arranged, kind: usize) -> Vec<(usize, Entry)> {
        let scope = self.scope;
        let count =
            |at: usize| known.chunks.iter().flatten().filter(|run| run.0 == at).map(|run| run.1).sum::<u64>();
        let form_of = |at: usize| Some((at, scope.form_of(kind, known.entries[at].kind)?));
        let own = (0..known.entries.len()).filter_map(form_of);
        let Some((at, form)) = own.rev().max_by_key(|&(at, _)| count(at)) else { return Vec::new() };
        let stream = scope.passes(kind, &known.entries[at].choice);
        let is_new = |other: &&Entry| known.entries.iter().all(|entry| entry.choice != other.choice);
        self.of_kind((kind, form), stream).iter().filter(is_new).map(|other| (at, other.clone())).collect()
    }

    /// Entries of a kind in a form, by every way to store parameters and as much as compute may cover.
    fn of_kind(&mut self, (kind, form): (usize, usize), stream: Sharding) -> &[Entry] {
        let (scope, bench, bound) = (self.scope, self.bench, self.bound);
        self.of_kinds.entry((kind, form, stream)).or_insert_with(|| {
            let chosen: Vec<usize> =
                (0..scope.forms.len()).map(|other| if other == kind { form } else { 0 }).collect();
            let rules = open_storages(scope.pins()).into_iter().map(Way::stored);
            // What hosts hold by the user's word they hold of these layers too.
            let (usual, layer) = (scope.given(), &scope.forms[kind][form].layer);
            let [kept, parameters] = [usual.kept, usual.parameters].map(|rule| rule.on(layer).usual());
            let mut list: Vec<Entry> = Vec::new();
            for way in std::iter::once(Way::default()).chain(rules) {
                let given = on_ground(0, (bound, Some(stream)), way, scope.given_fastest());
                let mut asked = scope.asked(bench, kind, &given, Forms::Chosen(&chosen));
                for covers in all_covers(bound) {
                    let clock = scope.clock(bench.candidate, covers);
                    asked.iter_mut().for_each(|(_, problem)| problem.set_clock(clock));
                    let choosers = scope.choosers(&asked, &[]);
                    for hides in [Hides::BehindOperator, Hides::BehindLayer] {
                        let Some((form, choice)) = choosers.best(0.0, (0.0, false), hides) else { continue };
                        let choice = LayerChoice { kept, parameters, ..choice };
                        if list.iter().all(|known| known.choice != choice) {
                            let what = (scope.wide_kind(kind, form), choice);
                            list.extend(scope.entry_of(bench, &bench.sizes[kind][form], what));
                        }
                    }
                }
            }
            list
        })
    }

    /// The fastest with some layers of an entry in another choice: as large a part of them in every chunk.
    fn blended_with(&self, known: &Arranged, (at, other): &(usize, Entry)) -> Option<Arranged> {
        let own = |run: &(usize, u64)| if run.0 == *at { run.1 } else { 0 };
        let of_chunk = |runs: &Vec<(usize, u64)>| runs.iter().map(own).sum::<u64>();
        let most = known.chunks.iter().map(of_chunk).max()?;
        let mut tried: BTreeMap<u64, Option<Arranged>> = BTreeMap::new();
        let mut time = |parts: u64| {
            let found = tried.entry(parts).or_insert_with(|| {
                let what = with_parts(known, (*at, other), (parts, most));
                self.scope.finish(&known.candidate, known.schedule, what, as_known(known)).ok()
            });
            found.as_ref().map_or(f64::INFINITY, |found| found.step_time().0)
        };
        // What a step waits for falls with the layers that send less, until it rises with what these compute more.
        let (mut low, mut high) = (0, most);
        while high - low > 2 {
            let (left, right) = (low + (high - low) / 3, high - (high - low) / 3);
            if time(left) <= time(right) { high = right } else { low = left }
        }
        (low.max(1)..=high).for_each(|parts| {
            time(parts);
        });
        fastest(tried.into_values().flatten())
    }
}

/// How much compute may be taken to cover: as bounds say, and in steps from all to the least that one of them says.
fn all_covers(bound: &Bound) -> Vec<Covers> {
    bound.said_covers().chain(bound.covers_between(&COVERED)).collect()
}

/// Slices like those of what is known, and no time that must be undercut.
fn as_known(known: &Arranged) -> (Slices, f64) {
    (known.slices.clone(), f64::INFINITY)
}

/// Entries and runs with `parts` of `most` layers of an entry in another choice, the first of every chunk.
fn with_parts(
    known: &Arranged,
    (at, other): (usize, &Entry),
    parts: (u64, u64),
) -> (Vec<Entry>, Vec<Vec<(usize, u64)>>) {
    let (kept, chunks) = runs_with_parts(&known.chunks, (at, known.entries.len()), parts);
    let entry = |at: usize| known.entries.get(at).unwrap_or(other).clone();
    (kept.into_iter().map(entry).collect(), chunks)
}

/// The same of runs alone, and which entries these are of: what no layer has any more is none.
fn runs_with_parts(
    chunks: &[Vec<(usize, u64)>],
    (at, new): (usize, usize),
    (parts, most): (u64, u64),
) -> (Vec<usize>, Vec<Vec<(usize, u64)>>) {
    let mut kept: Vec<usize> = Vec::new();
    let mut place = |entry: usize| {
        kept.iter().position(|&known| known == entry).unwrap_or_else(|| {
            kept.push(entry);
            kept.len() - 1
        })
    };
    let mut blended = Vec::with_capacity(chunks.len());
    for runs in chunks {
        let own: u64 = runs.iter().filter(|run| run.0 == at).map(|run| run.1).sum();
        // To the nearest.
        let mut left = (own * parts * 2 + most) / (2 * most);
        let mut next = Vec::with_capacity(runs.len() + 1);
        for &(entry, count) in runs {
            let others = if entry == at { left.min(count) } else { 0 };
            left -= others;
            let split = [(new, others), (entry, count - others)].into_iter().filter(|run| run.1 > 0);
            next.extend(split.map(|(entry, count)| (place(entry), count)));
        }
        blended.push(next);
    }
    (kept, blended)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn as_large_a_part_of_every_chunk_is_in_the_other_choice(
            counts in prop::collection::vec(prop::collection::vec((0..3_usize, 1..9_u64), 1..5), 1..5),
            part in 0.0..=1.0_f64,
        ) {
            let own = |runs: &[(usize, u64)], entry: usize| {
                runs.iter().filter(|run| run.0 == entry).map(|run| run.1).sum::<u64>()
            };
            let most = counts.iter().map(|runs| own(runs, 1)).max().unwrap_or(0);
            prop_assume!(most > 0);
            let parts = (most as f64 * part).round() as u64;
            let (kept, blended) = runs_with_parts(&counts, (1, 3), (parts, most));
            for (before, after) in counts.iter().zip(&blended) {
                let after: Vec<(usize, u64)> = after.iter().map(|&(place, count)| (kept[place], count)).collect();
                prop_assert!(after.iter().all(|run| run.1 > 0));
                for other in [0, 2] {
                    prop_assert_eq!(own(before, other), own(&after, other));
                }
                let (layers, others) = (own(before, 1), own(&after, 3));
                prop_assert_eq!(layers, own(&after, 1) + others);
                let exact = layers as f64 * parts as f64 / most as f64;
                prop_assert!((others as f64 - exact).abs() <= 0.5);
            }
            let used: std::collections::BTreeSet<usize> =
                blended.iter().flatten().map(|run| run.0).collect();
            prop_assert_eq!(used, (0..kept.len()).collect());
        }
    }
}
