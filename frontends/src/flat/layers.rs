//! Which operators are a layer: every word of a run, and what lies before, between and behind runs in as few pieces as
//! keep branches, embedding and head apart.

use std::collections::BTreeSet;
use std::ops::Range;

use ir::native::DocumentError;

use super::cut::{CutFault, Cuts};
use super::flow::{Flow, fault};
use super::repeat::{Run, Words};

/// Operators of each layer, in order.
///
/// # Errors
/// Where more than `most` operators hang together without a place to cut, and why they do.
pub(crate) fn layers(flow: &Flow<'_>, cuts: &Cuts, most: usize) -> Result<Vec<Range<usize>>, DocumentError> {
    let words = Words::new(flow, cuts, most);
    let runs = words.runs();
    let plateaus = cuts.plateaus();
    let mut borders = BTreeSet::from([0, flow.len()]);
    for run in &runs {
        borders.extend((0..=run.count).map(|word| run.start + word * run.length));
    }
    let stretches = between(&runs, flow.len());
    let first = stretches.first().cloned().unwrap_or(0..0);
    let last = stretches.last().cloned().unwrap_or(0..0);
    borders.extend(embedding_end(flow, &plateaus).filter(|at| first.contains(at)));
    borders.extend(plateaus.last().map(|low| low.start).filter(|at| *at > last.start));
    let head = borders.range(..flow.len()).next_back().copied().unwrap_or(0);
    let embedding = borders.range(1..).next().copied().unwrap_or(0);
    for stretch in &stretches {
        let inside = stretch.start.max(embedding)..stretch.end.min(head.max(1));
        let before = runs.iter().find(|run| run.end() == stretch.start);
        let own = |at: &usize| *at > inside.start && *at < stretch.end && cuts.is_valid(*at);
        borders.extend(branch_starts(flow, stretch.clone()).filter(own));
        borders.extend(before.and_then(|run| join(flow, run, stretch)).filter(own));
        borders.extend(beginnings(&words, cuts, &runs, &inside).into_iter().filter(own));
    }
    // Without repetition nothing says how large a layer is: every narrow place is a border.
    let usual = runs.iter().map(|run| run.length).max().unwrap_or(0);
    let pieces = pairs(&borders);
    for piece in &pieces[1..pieces.len().max(2) - 1] {
        if piece.len() > usual && !runs.iter().any(|run| run.start <= piece.start && piece.end <= run.end()) {
            borders.extend(plateaus.iter().map(|low| low.start).filter(|at| piece.contains(at)));
        }
    }
    // A tie joins layers: one that uses a parameter twice is parted where it can be.
    for layer in pairs(&borders).iter().filter(|layer| uses_twice(flow, layer)) {
        borders.extend(plateaus.iter().map(|low| low.start).filter(|at| layer.contains(at)));
    }
    for layer in pairs(&borders).iter().filter(|layer| layer.len() > most) {
        borders.extend(parted(&plateaus, layer, most));
    }
    let layers = pairs(&borders);
    match layers.iter().find(|layer| layer.len() > most) {
        Some(layer) => Err(too_large(flow, cuts, layer, most)),
        None => Ok(layers),
    }
}

/// Narrow places in a layer that is too large, as far apart as a layer may be long.
fn parted(plateaus: &[Range<usize>], layer: &Range<usize>, most: usize) -> Vec<usize> {
    let mut borders = vec![layer.start];
    let places = plateaus.iter().cloned().flatten().filter(|at| layer.contains(at)).chain([layer.end]);
    let mut before = layer.start;
    for place in places {
        if place - borders[borders.len() - 1] > most {
            borders.push(before);
        }
        before = place;
    }
    borders
}

fn uses_twice(flow: &Flow<'_>, layer: &Range<usize>) -> bool {
    let mut seen = BTreeSet::new();
    let operands = layer.clone().flat_map(|at| &flow.operands[at]);
    operands.filter(|&&tensor| flow.whole.is_parameter(tensor)).any(|tensor| !seen.insert(tensor))
}

fn pairs(borders: &BTreeSet<usize>) -> Vec<Range<usize>> {
    borders.iter().zip(borders.iter().skip(1)).map(|(&start, &end)| start..end).collect()
}

/// What lies before, between and behind runs, empty stretches left out.
fn between(runs: &[Run], end: usize) -> Vec<Range<usize>> {
    let starts = std::iter::once(0).chain(runs.iter().map(Run::end));
    let ends = runs.iter().map(|run| run.start).chain([end]);
    starts.zip(ends).map(|(start, end)| start..end).filter(|stretch| !stretch.is_empty()).collect()
}

/// End of the embedding: the end of the first narrow place at which no other table is looked up next.
fn embedding_end(flow: &Flow<'_>, plateaus: &[Range<usize>]) -> Option<usize> {
    plateaus.iter().map(|low| low.end - 1).find(|&at| !flow.begins(at))
}

/// Places at which another branch begins.
fn branch_starts<'a>(flow: &'a Flow<'_>, stretch: Range<usize>) -> impl Iterator<Item = usize> + 'a {
    let start = stretch.start.max(1);
    (start..stretch.end).filter(|&at| flow.begins(at) && !flow.begins(at - 1))
}

/// The first place behind a run that reads what waited while the run was worked on: two branches meet there.
fn join(flow: &Flow<'_>, run: &Run, stretch: &Range<usize>) -> Option<usize> {
    let used: BTreeSet<_> = (run.start..run.end()).flat_map(|at| flow.reads(at)).collect();
    let waited = |at: usize| {
        flow.reads(at).any(|value| flow.made[value.0] < Some(run.start) && !used.contains(&value))
    };
    stretch.clone().find(|&at| waited(at))
}

/// Places at which what follows begins like a word of a run: up to the first place inside the word that is as narrow
/// as its start. Where the whole word follows, its end is one too.
fn beginnings(words: &Words<'_>, cuts: &Cuts, runs: &[Run], inside: &Range<usize>) -> Vec<usize> {
    let mut found = Vec::new();
    for run in runs {
        let width = cuts.at[run.start].width;
        let is_narrow = |at: &usize| cuts.is_valid(*at) && cuts.at[*at].width <= width;
        let end = run.start + run.length;
        let beginning = (run.start + 1..end).find(is_narrow).unwrap_or(end) - run.start;
        for at in inside.clone().filter(|&at| at > 0 && cuts.is_valid(at)) {
            let fits = |length: usize| at + length <= inside.end && words.alike(run.start, at, length);
            if fits(beginning) {
                found.push(at);
                found.extend(fits(run.length).then_some(at + run.length));
            }
        }
    }
    found
}

/// The error for a layer that is larger than can be planned for, with the reason why its middle is no cut.
fn too_large(flow: &Flow<'_>, cuts: &Cuts, layer: &Range<usize>, most: usize) -> DocumentError {
    let narrowest = layer.clone().skip(1).min_by_key(|&at| (cuts.at[at].width, at)).unwrap_or(layer.start);
    let op = |at: usize| &flow.op(at).name;
    let name = |tensor: ir::graph::TensorId| &flow.whole.tensors[tensor.0].name;
    let why = match cuts.at[narrowest].fault {
        None => "nothing in them repeats".to_owned(),
        Some(CutFault::Dims(value)) => {
            format!("`{}` does not have the dims of a stream, sequences, tokens and more", name(value))
        }
        Some(CutFault::Ranks(a, b)) => {
            format!("`{}` and `{}` have different numbers of dims", name(a), name(b))
        }
        Some(CutFault::NoGradient(value)) => format!("`{}` has no gradient", name(value)),
        Some(CutFault::OnlyLoss) => "only the loss follows".to_owned(),
    };
    let what = format!(
        "{} operators from `{}` to `{}` hang together, at most {most} are one layer; the fewest elements cross before `{}`, \
         and {why}",
        layer.len(),
        op(layer.start),
        op(layer.end - 1),
        op(narrowest),
    );
    fault(format!("ops[{}]", flow.order[layer.start]), what)
}
