//! Layers cut into chunks, the schedule simulated, and what a step has once: a candidate's figures.

use std::borrow::Cow;
use std::collections::BTreeMap;

use ir::graph::Model;
use ir::names::{Arrangement, PlacedLayer, Roles, roles};
use ir::schedule::Schedule;
use ir::slices::Slices;
use ir::units::Seconds;

use crate::bound::Work;
use crate::by_device::{Evened, by_device};
use crate::candidate::{Candidate, Scope};
use crate::flights::Flight;
use crate::forbid::broken;
use crate::levelled::levelled;
use crate::levels::{Chunk, Levels};
use crate::partition::{Known, Place, as_given, counted, partition};
use crate::price::held::Held;
use crate::price::hosts;
use crate::price::setting::Entry;
use crate::price::stage_memory::stage_peak;
use crate::price::staged::{Layers, Staged};
use crate::price::step::{Step, Streams, least_between, step_between, stragglers};
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

/// What more programs must save to be worth them, as a fraction of the step: whoever runs the plan has to read them.
const WORTH_PROGRAMS: f64 = 0.002;

/// What a cut misses of a stage's memory, at most, that is left out for another cut.
const LITTLE: f64 = 0.05;

/// How the chunks of a device share its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    /// Each takes what it needs, and leaves as much for layers behind it.
    Device,
    /// Each may take the same, with all that it needs while it runs.
    Equal,
}

impl Share {
    /// Ways to share; a copy of a chunk on each of two devices shares with neither, and
    /// cuts over unequal devices are searched chunk by chunk, each by itself.
    pub(crate) fn of(schedule: Schedule, n_grounds: usize) -> &'static [Self] {
        match (schedule.n_virtual_stages(), schedule.placement().n_copies(), n_grounds) {
            (2.., 1, 1) => &[Self::Device, Self::Equal],
            (_, _, _) => &[Self::Equal],
        }
    }
}

/// How layers are cut into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cutting {
    /// For the least slowest chunk.
    Anywhere,
    /// The same, also wherever branches begin and meet, so that no chunk has layers of two: they then run side by side.
    AtBends,
    /// For the least slowest device.
    ByDevice,
}

/// The device of a chunk, and how many chunks come behind it there.
fn device_of(schedule: Schedule, n_stages: u32, chunk: u32) -> (usize, u32) {
    let placement = schedule.placement();
    let rank = placement.seat(n_stages, chunk, 0).rank;
    let later = placement.chunks_of(n_stages, rank).filter(|&other| other > chunk).count();
    (rank as usize, later as u32)
}

/// Bytes that stages of an arrangement need beyond what they have, which the cut of its layers did not see: it takes
/// the chunks of a stage for alike, and no queues between stages for granted.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Over {
    of_stages: Vec<f64>,
}

impl Over {
    fn is_none(&self) -> bool {
        self.most().1 == 0.0
    }

    /// Whether it is so little of each stage's memory that other cuts of these layers may do with less.
    pub(crate) fn is_little(&self, capacity: f64) -> bool {
        self.most().1 <= LITTLE * capacity
    }

    /// The stage that overflows most, the first of equals, and by how much.
    pub(crate) fn most(&self) -> (usize, f64) {
        let most = |most: (usize, f64), one: (usize, f64)| if one.1 > most.1 { one } else { most };
        self.of_stages.iter().copied().enumerate().fold((0, 0.0), most)
    }

    /// That which overflows less, the first of equals.
    pub(crate) fn lesser(self, other: Self) -> Self {
        if other.most().1 < self.most().1 { other } else { self }
    }

    /// What is left out for both.
    pub(crate) fn and(&self, other: &Self) -> Self {
        let sum = |(stage, bytes): (usize, &f64)| bytes + self.of_stages.get(stage).unwrap_or(&0.0);
        Self { of_stages: other.of_stages.iter().enumerate().map(sum).collect() }
    }
}

/// Why chunks are no arrangement.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Failed {
    /// Somebody forbade it, or no host or schedule has room for it.
    Unfit,
    /// Stages overflow.
    Overflows(Over),
    /// It takes no less than the limit.
    Slower,
}

/// Devices wait much for launches where that is more than this part of a step.
const MUCH_WAITING: f64 = 0.05;

impl Arranged {
    /// Whole step.
    pub fn step_time(&self) -> Seconds {
        self.step.time
    }

    /// What devices wait for launches, bubble included: fewer of them would save no more.
    pub(crate) fn waiting(&self) -> Seconds {
        let (mut waits, mut all) = (0.0, 0.0);
        for &(entry, count) in self.chunks.iter().flatten() {
            let entry = &self.entries[entry];
            let sections = std::iter::once(&entry.price.forward).chain(entry.backward());
            waits += sections.map(|section| section.waiting().0).sum::<f64>() * count as f64;
            all += (entry.forward_seconds() + entry.backward_seconds()).0 * count as f64;
        }
        if all > 0.0 { self.step.parts.pipeline * (waits / all) } else { Seconds::ZERO }
    }

    /// Whether that is much of the step.
    pub(crate) fn waits_much(&self) -> bool {
        self.waiting() > self.step_time() * MUCH_WAITING
    }

    /// Whether it is faster than one that is known: clearly so, where it has more programs.
    pub(crate) fn is_worth_it(&self, known: &Self) -> bool {
        let saving = if self.entries.len() > known.entries.len() { WORTH_PROGRAMS } else { 0.0 };
        self.step_time().0 < known.step_time().0 * (1.0 - saving)
    }

    /// The arrangement as prices see it.
    pub fn staged<'a>(&'a self, model: &'a Model) -> Staged<'a> {
        staged(model, &self.candidate, self.schedule, (&self.entries, &self.chunks), &self.slices)
    }
}

/// An arrangement of a candidate as prices see it.
pub(crate) fn staged<'a>(
    model: &'a Model,
    candidate: &'a Candidate,
    schedule: Schedule,
    (entries, chunks): Layers<'a>,
    slices: &'a Slices,
) -> Staged<'a> {
    Staged {
        model,
        meshes: candidate.meshes(),
        n_stages: candidate.n_stages,
        micro_batch: candidate.micro_batch,
        n_micro_batches: candidate.n_micro_batches,
        schedule,
        table: None,
        slices,
        entries,
        chunks,
        replicas: &[],
    }
}

/// The fastest; of equal ones the first.
pub(crate) fn fastest(all: impl Iterator<Item = Arranged>) -> Option<Arranged> {
    all.min_by(|a, b| a.step_time().0.total_cmp(&b.step_time().0))
}

impl Scope<'_> {
    /// How the layers of a candidate are cut for a schedule, in the ways that are tried one after the other.
    pub(crate) fn cuttings(&self, candidate: &Candidate, schedule: Schedule) -> &'static [Cutting] {
        if candidate.n_stages < 2 || self.pins().layers_per_stage.is_some() {
            return &[Cutting::Anywhere];
        }
        if !self.bends.is_empty() {
            return &[Cutting::Anywhere, Cutting::AtBends];
        }
        let ranks = schedule.placement().ranks(candidate.n_stages as u32, 0);
        if schedule.n_virtual_stages() > 1 && ranks.len() == 1 {
            return &[Cutting::Anywhere, Cutting::ByDevice];
        }
        &[Cutting::Anywhere]
    }

    /// Per kind, the form that most of its layers have; the leading one where there are none.
    pub(crate) fn main_forms(&self, arranged: &Arranged) -> Vec<usize> {
        let runs = || arranged.chunks.iter().flatten();
        let of_kind = |kind: usize| {
            let layers = |form: &usize| -> u64 {
                let has = |entry: usize| arranged.entries[entry].kind == self.wide_kind(kind, *form);
                runs().filter(|run| has(run.0)).map(|run| run.1).sum()
            };
            let forms = (0..self.forms[kind].len()).rev();
            let most = forms.map(|form| (layers(&form), form)).max_by_key(|(layers, _)| *layers);
            most.filter(|(layers, _)| *layers > 0).map_or(self.leading[kind], |(_, form)| form)
        };
        (0..self.forms.len()).map(of_kind).collect()
    }

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
        // Where stages have other meshes, the words are those of the first.
        let mesh_on = |ground| self.mesh_on(&arranged.candidate, ground);
        let mesh = ground.map_or(&arranged.candidate.shape.mesh, mesh_on);
        let is_there = |entry: &Entry| {
            ground.is_none_or(|ground| entry.ground == ground) && mesh_on(entry.ground) == mesh
        };
        let placed = arranged.entries.iter().zip(counts).filter(|(entry, _)| is_there(entry));
        roles(&Arrangement {
            mesh,
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

    /// The layers of a candidate on its stages, one chunk of a schedule after the other: in every way in which the
    /// chunks of a device may share it, that with the least time first.
    pub(crate) fn cuts(
        &self,
        candidate: &Candidate,
        (schedule, cutting): (Schedule, Cutting),
        (levels, over, evened): (&[Levels], &Over, &Evened),
    ) -> Vec<Vec<Chunk>> {
        let p = candidate.n_stages as u32;
        let device = |n_chunks: usize| -> Vec<usize> {
            (0..n_chunks as u32).map(|chunk| device_of(schedule, p, chunk).0).collect()
        };
        let is_given = self.pins().layers_per_stage.is_some();
        let cut = |places: &[Place<'_>]| match cutting {
            Cutting::AtBends if !is_given => partition(places, &self.bends),
            Cutting::ByDevice if !is_given => by_device(places, &device(places.len()), evened),
            Cutting::Anywhere | Cutting::AtBends | Cutting::ByDevice => self.cut_anywhere(places),
        };
        self.shared_out(candidate, (schedule, levels, over), cut)
    }

    /// Chunks in every way in which those of a device may share it, that with the least time first; of equals the
    /// first.
    fn shared_out(
        &self,
        candidate: &Candidate,
        (schedule, levels, over): (Schedule, &[Levels], &Over),
        cut: impl Fn(&[Place<'_>]) -> Option<Vec<Chunk>>,
    ) -> Vec<Vec<Chunk>> {
        let sizes = of_slices(schedule, levels);
        let ways = self.ways_to_share(candidate, (schedule, over), &sizes);
        let all = ways.iter().filter_map(|places| Some((places, cut(places)?)));
        self.by_time(candidate, schedule, all.flat_map(|(places, cuts)| with_levelled(places, cuts)))
    }

    /// Where the chunks of a schedule run, in every way in which those of a device may share it, with layers that run
    /// in any of some sizes.
    fn ways_to_share<'l>(
        &self,
        candidate: &Candidate,
        (schedule, over): (Schedule, &Over),
        sizes: &'l [Cow<'_, [Levels]>],
    ) -> Vec<Vec<Place<'l>>> {
        let shares = |levels: &'l Cow<'_, [Levels]>| {
            let all = Share::of(schedule, levels.len()).iter();
            all.map(|share| self.places(candidate, (schedule, *share), (levels, over)))
        };
        sizes.iter().flat_map(shares).collect()
    }

    /// Chunks in some ways, that with the least time first; of equals the first.
    fn by_time(
        &self,
        candidate: &Candidate,
        schedule: Schedule,
        all: impl Iterator<Item = Vec<Chunk>>,
    ) -> Vec<Vec<Chunk>> {
        let timed = |cuts: Vec<Chunk>| (self.least_time(candidate, schedule, &cuts), cuts);
        let mut all: Vec<(f64, Vec<Chunk>)> = all.map(timed).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        all.into_iter().map(|(_, cuts)| cuts).collect()
    }

    /// Layers cut as if memory were free, at levels that are chosen for all chunks of a device together: what a chunk
    /// leaves to those behind it is a guess otherwise, by which none may be left for the last. Nothing where devices
    /// have one chunk each.
    pub(crate) fn cut_together(
        &self,
        candidate: &Candidate,
        schedule: Schedule,
        (levels, over): (&[Levels], &Over),
    ) -> Option<Vec<Chunk>> {
        if !Share::of(schedule, levels.len()).contains(&Share::Device) {
            return None;
        }
        let places = self.places(candidate, (schedule, Share::Device), (levels, over));
        let roomy: Vec<Place<'_>> =
            places.iter().map(|place| Place { capacity: f64::INFINITY, ..*place }).collect();
        levelled(&places, &self.cut_anywhere(&roomy)?)
    }

    /// Layers cut for the least slowest chunk, or as the user says, who counts decoder layers; embedding and head stand
    /// at the ends. Nothing where there are not as many chunks as counts.
    pub(crate) fn cut_anywhere(&self, places: &[Place<'_>]) -> Option<Vec<Chunk>> {
        match &self.pins().layers_per_stage {
            Some(counts) if counts.len() == places.len() => as_given(&with_ends(counts), places),
            Some(_) => None,
            None => partition(places, &[]),
        }
    }

    /// Where the chunks of a schedule run.
    fn places<'l>(
        &self,
        candidate: &Candidate,
        (schedule, share): (Schedule, Share),
        (levels, over): (&'l [Levels], &Over),
    ) -> Vec<Place<'l>> {
        let (flights, grounds) = (self.in_flight(candidate, schedule), self.grounds(candidate));
        let ground = |chunk: usize| grounds.of_chunk(schedule.placement(), chunk);
        let buckets = self.setting.copied_buckets().0;
        let place = |(chunk, &flight): (usize, &Flight)| {
            let ranks = schedule.placement().ranks(candidate.n_stages as u32, chunk as u32);
            let over = ranks.filter_map(|rank| over.of_stages.get(rank as usize)).fold(0.0, |a, b| b.max(a));
            let capacity = grounds.capacity_of_chunk(schedule.placement(), chunk) - buckets - over;
            let levels = &levels[ground(chunk)];
            match share {
                Share::Equal => levels.place(flight, capacity / f64::from(schedule.n_virtual_stages())),
                Share::Device => Place {
                    shared: Some(device_of(schedule, candidate.n_stages as u32, chunk as u32)),
                    ..levels.place(flight, capacity)
                },
            }
        };
        flights.iter().enumerate().map(place).collect()
    }

    /// The same with so many layers in each chunk, in the way that has the least time; for every list of counts, with
    /// nothing where they do not fit.
    pub(crate) fn cuts_of(
        &self,
        candidate: &Candidate,
        (schedule, all): (Schedule, &[Vec<usize>]),
        levels: &[Levels],
    ) -> Vec<Option<Vec<Chunk>>> {
        let sizes = of_slices(schedule, levels);
        let ways = self.ways_to_share(candidate, (schedule, &Over::default()), &sizes);
        let mut known: Vec<Vec<Known<'_>>> =
            ways.iter().map(|places| places.iter().map(Known::new).collect()).collect();
        let mut of = |counts: &Vec<usize>| {
            let cut = |(places, known): (&Vec<_>, &mut Vec<_>)| {
                Some(with_levelled(places, counted(counts, known)?))
            };
            let cuts = ways.iter().zip(&mut known).filter_map(cut).flatten();
            self.by_time(candidate, schedule, cuts).into_iter().next()
        };
        all.iter().map(&mut of).collect()
    }

    /// Least time of a step of such chunks: of the stage that works most, with the fill and drain of the others.
    pub(crate) fn least_time(&self, candidate: &Candidate, schedule: Schedule, cuts: &[Chunk]) -> f64 {
        let p = candidate.n_stages as u32;
        let mut stages = vec![0.0; p as usize];
        for (chunk, cut) in (0..).zip(cuts) {
            let ranks = schedule.placement().ranks(p, chunk);
            let share = cut.time / ranks.len().max(1) as f64;
            ranks.for_each(|rank| stages[rank as usize] += share);
        }
        let average = stages.iter().sum::<f64>() / f64::from(p);
        let work = Work { average, slowest: stages.into_iter().fold(0.0, f64::max), ..Work::default() };
        self.filled_time(candidate, schedule, work)
    }

    /// The same of layers that divide evenly, in any schedule.
    pub(crate) fn least_divided(&self, candidate: &Candidate, levels: &[Levels]) -> f64 {
        let times = self.schedules(candidate).into_iter();
        times.map(|schedule| self.least_divided_in(candidate, schedule, levels)).fold(f64::INFINITY, f64::min)
    }

    /// The same in one: no cut takes less.
    pub(crate) fn least_divided_in(
        &self,
        candidate: &Candidate,
        schedule: Schedule,
        levels: &[Levels],
    ) -> f64 {
        let layers = levels.iter().map(Levels::least_of_all).fold(f64::INFINITY, f64::min);
        let average = layers / candidate.n_stages as f64;
        let work = Work { average, slowest: average, ..Work::default() };
        self.filled_time(candidate, schedule, work)
    }

    fn filled_time(&self, candidate: &Candidate, schedule: Schedule, work: Work) -> f64 {
        let micro_batch = work.filled(candidate.n_stages, self.idle(candidate, schedule).bubble);
        candidate.n_micro_batches as f64 * micro_batch * stragglers(&self.setting, candidate.meshes())
    }

    /// Such chunks as a schedule, simulated if that may take less than a limit; `levels` and `shelves` are those of the
    /// candidate's grounds.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn arrange(
        &self,
        candidate: &Candidate,
        (schedule, cuts): (Schedule, &[Chunk]),
        (levels, shelves): (&[Levels], &[Shelf]),
        limit: f64,
    ) -> Result<Arranged, Failed> {
        let grounds = self.grounds(candidate);
        let ground = |chunk: usize| grounds.of_chunk(schedule.placement(), chunk);
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
            return self.finish(candidate, schedule, (entries, chunks), (whole, limit));
        }
        let all = self.cut_sequences(candidate, schedule, &entries).into_iter();
        let found = all.filter_map(|(slices, entries)| {
            self.finish(candidate, schedule, (entries, chunks.clone()), (slices, limit)).ok()
        });
        fastest(found).ok_or(Failed::Unfit)
    }

    /// Simulates the schedule and adds what a step has once.
    pub(crate) fn finish(
        &self,
        candidate: &Candidate,
        schedule: Schedule,
        (entries, chunks): (Vec<Entry>, Vec<Vec<(usize, u64)>>),
        (slices, limit): (Slices, f64),
    ) -> Result<Arranged, Failed> {
        let staged = staged(&self.wide, candidate, schedule, (&entries, &chunks), &slices);
        let streams = Streams::of(&self.setting, &staged);
        if least_between(&self.setting, &staged, &streams).0 >= limit {
            return Err(Failed::Slower);
        }
        let step = step_between(&self.setting, &staged, &streams).map_err(|_| Failed::Unfit)?;
        // Bounds take the chunks of a stage for alike: what fits only because they are not is none of the space.
        let peak = |stage: usize| {
            let held = &step.held[stage];
            let of = |held: &Held| stage_peak(&self.setting, &staged, stage, held).0;
            let own = of(held);
            if held.holds_less_than_alike() { own.max(of(&held.were_alike())) } else { own }
        };
        let grounds = self.grounds(candidate);
        let over = |stage: usize| (peak(stage) - grounds.at(stage).memory).max(0.0);
        let over = Over { of_stages: (0..step.held.len()).map(over).collect() };
        if !over.is_none() {
            return Err(Failed::Overflows(over));
        }
        let fits = hosts::fullest(&self.setting, &staged, &step.held).is_none_or(|host| host.fits());
        let found = Arranged { candidate: candidate.clone(), schedule, entries, chunks, slices, step };
        if fits && self.is_allowed(&found, grounds.settings.len()) { Ok(found) } else { Err(Failed::Unfit) }
    }

    /// Whether nothing is forbidden on any ground, and the grounds go together.
    fn is_allowed(&self, found: &Arranged, n_grounds: usize) -> bool {
        let forbid = &self.pins().forbid;
        let any_roles = forbid.leaves_layers();
        if n_grounds == 1 && any_roles {
            return true;
        }
        let roles: Vec<Roles> = (0..n_grounds).map(|ground| self.roles_on(found, Some(ground))).collect();
        // Tokens have one order everywhere, which is made for one number of parts.
        let alike = roles.iter().all(|own| own.cp == roles[0].cp);
        alike && (any_roles || roles.iter().all(|own| !broken(forbid, own)))
    }
}

/// Costs of layers as a schedule runs them, each with as much as they may need while they run: where it cuts sequences,
/// what a slice of equal length needs if all of it falls with the length, twice that, and what a whole sequence needs.
/// Kept tensors fall with what is in flight, and time is that of all slices.
fn of_slices(schedule: Schedule, levels: &[Levels]) -> Vec<Cow<'_, [Levels]>> {
    let n_slices = f64::from(schedule.n_slices());
    let sliced = |part: f64| Cow::Owned(levels.iter().map(|own| own.of_slices(part)).collect());
    let parts = [1.0 / n_slices, 2.0 / n_slices].into_iter().filter(|part| *part < 1.0);
    parts.map(sliced).chain([Cow::Borrowed(levels)]).collect()
}

/// Chunks, and the same at levels that are chosen for all chunks of a device together, where these are others.
fn with_levelled(places: &[Place<'_>], cuts: Vec<Chunk>) -> impl Iterator<Item = Vec<Chunk>> + use<> {
    let together = levelled(places, &cuts).filter(|other| *other != cuts);
    std::iter::once(cuts).chain(together)
}

/// Layers per chunk, embedding and head included, of the decoder layers that the user counts.
fn with_ends(counts: &[u64]) -> Vec<usize> {
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
    let mut smaller = cut.smaller;
    let mut list: Vec<(usize, u64)> = Vec::new();
    for &kind in range {
        let down = kind == cut.kind && smaller > 0;
        if down {
            smaller -= 1;
        }
        let level = if down { cut.level + 1 } else { cut.level };
        let entry = name(kind, shelf.levels[kind][levels.price(level, kind)]);
        match list.last_mut() {
            Some((last, count)) if *last == entry => *count += 1,
            _ => list.push((entry, 1)),
        }
    }
    list
}
