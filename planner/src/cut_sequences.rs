//! Where a schedule of slices cuts sequences: into equal parts, and so that all slices take equally long.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use cost_model::{SliceCost, balanced_slices, equal_slices};
use ir::graph::{Extent, Layer};
use ir::lower::{LayerChoice, lower};
use ir::program::Program;
use ir::schedule::Schedule;
use ir::signature::{FactorId, signature};
use ir::slices::{Slices, sliced_choice, sliced_layer};

use crate::candidate::{Candidate, Scope};
use crate::memos::lock;
use crate::price::setting::Entry;

/// Tokens to whose multiples slices are cut where that leaves enough of them: the tile of attention kernels.
const TILE: u64 = 128;

/// Candidates whose sliced entries are kept at most.
const MOST: usize = 8;

/// A choice for a layer kind on one ground, and the lengths of the slices.
type Cut = (usize, usize, LayerChoice, Vec<u64>);

/// What was priced by slices of one candidate; nothing where a strategy cuts a slice that does not divide.
type Priced = BTreeMap<Cut, Option<Entry>>;

/// Entries that were priced by slices, of the candidates that were looked at last: where layers move from stage to
/// stage the same ones are asked for again and again, and each costs as many prices as there are slices. Clones share
/// it.
#[derive(Clone, Default)]
pub(crate) struct SlicedEntries(Arc<Mutex<VecDeque<(Candidate, Priced)>>>);

impl SlicedEntries {
    fn known(&self, candidate: &Candidate, cut: &Cut) -> Option<Option<Entry>> {
        let all = lock(&self.0);
        let (_, own) = all.iter().find(|(known, _)| known == candidate)?;
        own.get(cut).cloned()
    }

    fn keep(&self, candidate: &Candidate, cut: Cut, entry: Option<Entry>) {
        let mut all = lock(&self.0);
        match all.iter_mut().find(|(known, _)| known == candidate) {
            Some((_, own)) => _ = own.insert(cut, entry),
            None => {
                all.push_back((candidate.clone(), BTreeMap::from([(cut, entry)])));
                if all.len() > MOST {
                    all.pop_front();
                }
            }
        }
    }
}

/// An entry in its sliced form.
struct SlicedForm {
    layer: Layer,
    choice: LayerChoice,
}

impl Scope<'_> {
    /// Entries priced by slices, for each way to cut that is tried; none where some layer cannot be run slice by slice.
    pub(crate) fn cut_sequences(
        &self,
        candidate: &Candidate,
        schedule: Schedule,
        entries: &[Entry],
    ) -> Vec<(Slices, Vec<Entry>)> {
        let form = |entry: &Entry| {
            let whole = &self.wide.layers[entry.kind];
            let layer = sliced_layer(whole).ok()?;
            let choice = sliced_choice(whole, &layer, &entry.choice).ok()?;
            Some(SlicedForm { layer, choice })
        };
        let Some(forms) = entries.iter().map(form).collect::<Option<Vec<_>>>() else { return Vec::new() };
        let (sequence, k) = (self.request.job.sequence, u64::from(schedule.n_slices()));
        let granule = granule(candidate, &forms, (sequence, k));
        let mut cuts: Vec<Vec<u64>> = equal_slices(sequence, granule, k).into_iter().collect();
        if let Some(cost) = self.slice_cost(candidate, (entries, &forms), granule) {
            cuts.extend(balanced_slices(cost, sequence, granule, k).filter(|found| !cuts.contains(found)));
        }
        let slices = cuts.iter().filter_map(|lengths| Slices::of_lengths(lengths));
        let priced = slices.map(|slices| {
            let entries = self.priced(candidate, (entries, &forms), &slices)?;
            Some((slices, entries))
        });
        priced.flatten().collect()
    }

    /// What a token and a pair of tokens cost in the layers of a candidate, each kind as often as the model has it.
    fn slice_cost(
        &self,
        candidate: &Candidate,
        (entries, forms): (&[Entry], &[SlicedForm]),
        granule: u64,
    ) -> Option<SliceCost> {
        let sequence = self.request.job.sequence;
        let half = sequence / granule / 2 * granule;
        let halves = Slices::of_lengths(&[half, sequence - half])?;
        let kinds = 0..self.forms.len();
        let is_form = |kind: &usize, entry: &Entry| self.form_of(*kind, entry.kind).is_some();
        let layers = |entry: &Entry| {
            kinds.clone().find(|kind| is_form(kind, entry)).map_or(1, |kind| self.counts[kind]) as f64
        };
        let time = |entry: &Entry, slice: usize| {
            let figures = entry.slice(slice);
            (figures.forward + figures.backward).0 * layers(entry)
        };
        let sum = |priced: &[Entry], slice: usize| priced.iter().map(|entry| time(entry, slice)).sum::<f64>();
        let cut = self.priced(candidate, (entries, forms), &halves)?;
        let all = self.priced(candidate, (entries, forms), &Slices::whole(sequence))?;
        Some(SliceCost::fitted(sequence as f64, [sum(&cut, 0), sum(&cut, 1), sum(&all, 0)]))
    }

    /// Entries priced by slices; nothing where a strategy cuts a slice that does not divide.
    fn priced(
        &self,
        candidate: &Candidate,
        (entries, forms): (&[Entry], &[SlicedForm]),
        slices: &Slices,
    ) -> Option<Vec<Entry>> {
        let (mesh, grounds) = (&candidate.shape.mesh, self.grounds(candidate));
        let one = |(entry, form): (&Entry, &SlicedForm)| {
            let program = |slice: u32| -> Option<Program> {
                let sizes = slices.sizes(&form.layer, candidate.micro_batch, slice);
                lower(&form.layer, mesh, &sizes, &form.choice).ok()
            };
            let first = program(0)?;
            let legal = (1..slices.n()).all(|slice| program(slice).as_ref() == Some(&first));
            let setting = &grounds.settings[entry.ground];
            let place = (mesh, candidate.micro_batch);
            legal.then(|| setting.sliced(entry, (&form.layer, &first), place, slices))
        };
        let known = |(entry, form): (&Entry, &SlicedForm)| {
            let cut = (entry.ground, entry.kind, entry.choice.clone(), slices.lengths());
            let known = self.sliced.known(candidate, &cut);
            known.unwrap_or_else(|| {
                let priced = one((entry, form));
                self.sliced.keep(candidate, cut, priced.clone());
                priced
            })
        };
        entries.iter().zip(forms).map(known).collect()
    }
}

/// Tokens of which every slice is a multiple: as many as devices cut slices into, or a tile where there are enough.
fn granule(candidate: &Candidate, forms: &[SlicedForm], (sequence, k): (u64, u64)) -> u64 {
    let mesh = &candidate.shape.mesh;
    let parts = forms.iter().flat_map(|form| {
        form.layer.ops.iter().zip(&form.choice.strategies).flat_map(|(op, strategy)| {
            let sig = signature(&form.layer, op);
            let of_tokens = |(at, factor): (usize, &ir::signature::Factor)| {
                let extent = form.layer.dims[factor.dim.0].extent;
                let tokens = extent == Extent::Sequence || extent.is_one_slot_per_token();
                tokens.then(|| strategy.parts(mesh, FactorId(at as u8)))
            };
            sig.factors.iter().enumerate().filter_map(of_tokens).collect::<Vec<_>>()
        })
    });
    let least = parts.fold(1, lcm);
    let tile = lcm(least, TILE);
    if sequence.is_multiple_of(tile) && sequence / tile >= k { tile } else { least }
}

fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x.max(1) * b
}

#[cfg(test)]
mod tests {
    use super::lcm;

    #[test]
    fn the_least_common_multiple_is_a_multiple_of_both() {
        assert_eq!([lcm(1, 128), lcm(6, 128), lcm(256, 128)], [128, 384, 256]);
    }
}
