//! Layers cut into chunks, the schedule simulated, and what a step has once: a candidate's figures.

use std::collections::BTreeMap;

use ir::graph::Model;
use ir::names::{Arrangement, PlacedLayer, Roles, roles};
use ir::schedule::Schedule;
use ir::slices::Slices;
use ir::units::Seconds;

use crate::candidate::{Candidate, Scope};
use crate::forbid::broken;
use crate::partition::{Chunk, Levels, Place, as_given, partition};
use crate::price::setting::Entry;
use crate::price::stage_memory::stage_memory;
use crate::price::staged::{Layers, Staged};
use crate::price::step::{Step, step};
use crate::schedules::in_flight;
use crate::shelf::Shelf;

/// A candidate worked out: stages, schedule, figures.
#[derive(Clone, Debug)]
pub struct Arranged {
    /// What it was made from.
    pub candidate: Candidate,
    /// Order of micro-batches.
    pub schedule: Schedule,
    /// Entries in use.
    pub entries: Vec<Entry>,
    /// Per chunk, runs of (entry, count).
    pub chunks: Vec<Vec<(usize, u64)>>,
    /// Where sequences are cut.
    pub slices: Slices,
    /// The step in time.
    pub step: Step,
}

impl Arranged {
    /// Whole step.
    pub fn step_time(&self) -> Seconds {
        self.step.time
    }

    /// The arrangement as prices see it.
    pub fn staged<'a>(&'a self, model: &'a Model) -> Staged<'a> {
        staged(model, &self.candidate, self.schedule, (&self.entries, &self.chunks), &self.slices)
    }
}

fn staged<'a>(
    model: &'a Model,
    candidate: &'a Candidate,
    schedule: Schedule,
    (entries, chunks): Layers<'a>,
    slices: &'a Slices,
) -> Staged<'a> {
    Staged {
        model,
        mesh: &candidate.shape.mesh,
        n_stages: candidate.n_stages,
        micro_batch: candidate.micro_batch,
        n_micro_batches: candidate.n_micro_batches,
        schedule,
        table: None,
        slices,
        entries,
        chunks,
    }
}

impl Scope<'_> {
    /// An arrangement in the literature's words.
    pub(crate) fn roles(&self, arranged: &Arranged) -> Roles {
        self.roles_on(arranged, None)
    }

    /// The same of the layers on one ground.
    fn roles_on(&self, arranged: &Arranged, ground: Option<usize>) -> Roles {
        let mut counts = vec![0; arranged.entries.len()];
        for &(entry, count) in arranged.chunks.iter().flatten() {
            counts[entry] += count;
        }
        let is_there = |entry: &Entry| ground.is_none_or(|ground| entry.ground == ground);
        let placed = arranged.entries.iter().zip(counts).filter(|(entry, _)| is_there(entry));
        roles(&Arrangement {
            mesh: &arranged.candidate.shape.mesh,
            layers: placed
                .map(|(entry, count)| {
                    let layer = &self.wide.layers[entry.kind];
                    PlacedLayer { layer, choice: &entry.choice, count }
                })
                .collect(),
            n_stages: arranged.candidate.n_stages,
            schedule: arranged.schedule,
            micro_batch: arranged.candidate.micro_batch,
            n_micro_batches: arranged.candidate.n_micro_batches,
        })
    }

    /// The layers of a candidate on its stages; `levels` and `shelves` are those of its grounds.
    pub(crate) fn arrange(
        &self,
        candidate: &Candidate,
        schedule: Schedule,
        (levels, shelves): (&[Levels], &[Shelf]),
    ) -> Option<Arranged> {
        let (in_flight, grounds) = (in_flight(candidate, schedule), self.grounds(candidate));
        let ground = |chunk: usize| grounds.of_chunk(schedule.placement(), chunk);
        let place = |(chunk, &flight): (usize, &f64)| {
            let capacity = grounds.capacity_of_chunk(schedule.placement(), chunk);
            levels[ground(chunk)].place(flight, capacity / f64::from(schedule.n_virtual_stages()))
        };
        let places: Vec<Place<'_>> = in_flight.iter().enumerate().map(place).collect();
        let cuts = match &self.pins().layers_per_stage {
            // The user counts decoder layers; embedding and head stand at the ends.
            Some(counts) if counts.len() == in_flight.len() => as_given(&with_ends(counts), &places)?,
            Some(_) => return None,
            None => partition(&places)?,
        };
        let mut names: BTreeMap<(usize, usize, usize), usize> = BTreeMap::new();
        let mut entries: Vec<Entry> = Vec::new();
        let of_chunk = |(chunk, cut): (usize, &Chunk)| {
            let own = ground(chunk);
            runs(cut, &levels[own], &shelves[own], &mut |kind, at| {
                *names.entry((own, kind, at)).or_insert_with(|| {
                    entries.push(shelves[own].entries[kind][at].clone());
                    entries.len() - 1
                })
            })
        };
        let chunks: Vec<Vec<(usize, u64)>> = cuts.iter().enumerate().map(of_chunk).collect();
        let whole = Slices::whole(self.request.job.sequence);
        if schedule.n_slices() == 1 {
            return self.finish(candidate, schedule, (entries, chunks), whole);
        }
        let all = self.cut_sequences(candidate, schedule, &entries).into_iter();
        let found = all.filter_map(|(slices, entries)| {
            self.finish(candidate, schedule, (entries, chunks.clone()), slices)
        });
        found.min_by(|a, b| a.step_time().0.total_cmp(&b.step_time().0))
    }

    /// Simulates the schedule and adds what a step has once; `None` where a stage overflows.
    fn finish(
        &self,
        candidate: &Candidate,
        schedule: Schedule,
        (entries, chunks): (Vec<Entry>, Vec<Vec<(usize, u64)>>),
        slices: Slices,
    ) -> Option<Arranged> {
        let staged = staged(&self.wide, candidate, schedule, (&entries, &chunks), &slices);
        let step = step(&self.setting, &staged).ok()?;
        let peak = |stage: usize| stage_memory(&self.setting, &staged, stage, step.held[stage]).total().0;
        let grounds = self.grounds(candidate);
        let fits = (0..step.held.len()).all(|stage| peak(stage) <= grounds.at(stage).memory);
        let found = Arranged { candidate: candidate.clone(), schedule, entries, chunks, slices, step };
        let forbid = &self.pins().forbid;
        if grounds.settings.len() == 1 {
            let is_left = || forbid.is_empty() || !broken(forbid, &self.roles(&found));
            return (fits && is_left()).then_some(found);
        }
        let on = |ground: usize| self.roles_on(&found, Some(ground));
        let roles: Vec<Roles> = (0..grounds.settings.len()).map(on).collect();
        // Tokens have one order everywhere, which is made for one number of parts.
        let alike = roles.iter().all(|own| own.cp == roles[0].cp);
        let is_left = forbid.is_empty() || roles.iter().all(|own| !broken(forbid, own));
        (fits && alike && is_left).then_some(found)
    }
}

/// Layers per chunk, embedding and head included, of the decoder layers that the user counts.
pub(crate) fn with_ends(counts: &[u64]) -> Vec<usize> {
    let last = counts.len().saturating_sub(1);
    let ends = |at: usize| usize::from(at == 0) + usize::from(at == last);
    counts.iter().enumerate().map(|(at, &n)| n as usize + ends(at)).collect()
}

/// The runs of equal entries of a chunk.
fn runs(
    cut: &Chunk,
    levels: &Levels,
    shelf: &Shelf,
    name: &mut dyn FnMut(usize, usize) -> usize,
) -> Vec<(usize, u64)> {
    let range = &levels.kinds[cut.from..cut.to];
    let mut counts: BTreeMap<usize, u64> = BTreeMap::new();
    for &kind in range {
        *counts.entry(kind).or_default() += 1;
    }
    let main = counts.iter().max_by(|a, b| a.1.cmp(b.1).then(b.0.cmp(a.0))).map_or(0, |(&kind, _)| kind);
    let mut smaller = cut.smaller;
    let mut list: Vec<(usize, u64)> = Vec::new();
    for &kind in range {
        let down = kind == main && smaller > 0;
        if down {
            smaller -= 1;
        }
        let level = if down { cut.level + 1 } else { cut.level };
        let entry = name(kind, shelf.levels[kind][level]);
        match list.last_mut() {
            Some((last, count)) if *last == entry => *count += 1,
            _ => list.push((entry, 1)),
        }
    }
    list
}
