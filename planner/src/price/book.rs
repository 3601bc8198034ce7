//! Prices of layers, each worked out once and kept, and steps that are evaluated from them.
//!
//! A section is a layer kind with a choice on a mesh at a micro-batch: its program is lowered, priced and weighed when
//! it is first asked for. A [`Sketch`] puts sections on stages in the order of a schedule; what it takes is worked out
//! by the same functions as a plan's figures, and what a pair of sections passes on between two stages is priced once
//! too. Where the ranks of the schedule take turns, no table is written: a few microseconds for a pipeline of sixteen
//! stages.
//!
//! The book knows one kind of machine and whole sequences.

use std::collections::BTreeMap;
use std::fmt;

use cost_model::SimulateError;
use ir::graph::Model;
use ir::lower::{LayerChoice, LowerError, lower};
use ir::mesh::{Mesh, Meshes};
use ir::schedule::Schedule;
use ir::slices::Slices;
use ir::units::{Bytes, Seconds};
use thiserror::Error;

use crate::price::setting::{Backward, Entry, Setting};
use crate::price::stage_memory::stage_peak;
use crate::price::staged::{Staged, Takeover};
use crate::price::step::{Streams, step_between};

/// A section of a book.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SectionId(usize);

/// Layers on stages, by their sections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sketch<'s> {
    /// Mesh of every stage.
    pub mesh: &'s Mesh,
    /// Pipeline stages.
    pub n_stages: u64,
    /// Sequences of a micro-batch over the mesh.
    pub micro_batch: u64,
    /// Micro-batches of a step.
    pub n_micro_batches: u64,
    /// Their order.
    pub schedule: Schedule,
    /// Per chunk, how many layers of which section follow each other.
    pub chunks: &'s [Vec<(SectionId, u64)>],
}

/// What a sketch takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Time of a step.
    pub step_time: Seconds,
    /// Peak memory of a device of each stage.
    pub peaks: Vec<Bytes>,
}

/// Why a sketch has no figures.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum BookError {
    /// A choice that no program has.
    #[error(transparent)]
    Choice(#[from] LowerError),
    /// A layer kind that the model does not have.
    #[error("layer kind {kind} of {n_kinds}")]
    Kind {
        /// The one that was asked for.
        kind: usize,
        /// Those of the model.
        n_kinds: usize,
    },
    /// Devices differ, so that a section has a price on each.
    #[error("a book is of one kind of device")]
    Mixed,
    /// The schedule cuts sequences, which sections do not.
    #[error("a book has no prices of slices, which `{schedule}` runs")]
    Sliced {
        /// The schedule.
        schedule: Schedule,
    },
    /// The schedule splits backward and the book's prices do not, or the other way round.
    #[error("the book's backward is priced otherwise than `{schedule}` runs it")]
    Backward {
        /// The schedule.
        schedule: Schedule,
    },
    /// Another number of chunks than the schedule has.
    #[error("expected {expected} chunks, found {found}")]
    Chunks {
        /// Those of the schedule.
        expected: u64,
        /// Those of the sketch.
        found: usize,
    },
    /// A section that is not of this book, or not of the sketch's mesh and micro-batch.
    #[error("section {at} of chunk {chunk} is of another mesh or micro-batch, or of another book")]
    Section {
        /// Its place in the chunk.
        at: usize,
        /// The chunk.
        chunk: usize,
    },
    /// The schedule cannot run.
    #[error(transparent)]
    Schedule(#[from] SimulateError),
}

/// What a section is made of, beside its choice.
#[derive(Clone, Debug, PartialEq)]
struct Ground {
    mesh: Mesh,
    micro_batch: u64,
}

/// What passes from the last section of a chunk to the first of the next.
#[derive(Clone, Copy, Debug)]
struct Passed {
    forward: Seconds,
    backward: Seconds,
    sent: Seconds,
}

/// Prices of sections.
pub struct Book<'a> {
    setting: Setting<'a>,
    model: &'a Model,
    grounds: Vec<Ground>,
    /// Per section, which ground it is on.
    on: Vec<usize>,
    entries: Vec<Entry>,
    /// By stages that send and receive and the sections there.
    passed: BTreeMap<(u64, u64, usize, usize), Passed>,
    /// Chunks of the last sketch: room for those of the next.
    chunks: Vec<Vec<(usize, u64)>>,
}

impl fmt::Debug for Book<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Book of {} sections on {} grounds", self.entries.len(), self.grounds.len())
    }
}

impl<'a> Book<'a> {
    /// A book without prices.
    ///
    /// # Errors
    /// Where devices or their links differ.
    pub fn new(setting: Setting<'a>, model: &'a Model) -> Result<Self, BookError> {
        let cluster = setting.machine.cluster;
        if cluster.is_mixed() || cluster.groups.iter().any(|group| !group.links.is_empty()) {
            return Err(BookError::Mixed);
        }
        let (grounds, on, entries, chunks) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Ok(Self { setting, model, grounds, on, entries, passed: BTreeMap::new(), chunks })
    }

    /// A choice for a layer kind on a mesh at a micro-batch, priced if it is new.
    ///
    /// # Errors
    /// Where the model has no such layer kind, or the choice no program.
    pub fn section(
        &mut self,
        (kind, choice): (usize, LayerChoice),
        (mesh, micro_batch): (&Mesh, u64),
    ) -> Result<SectionId, BookError> {
        let n_kinds = self.model.layers.len();
        let layer = self.model.layers.get(kind).ok_or(BookError::Kind { kind, n_kinds })?;
        let known = self.ground(mesh, micro_batch);
        let is_same = |at: &usize| {
            Some(self.on[*at]) == known
                && self.entries[*at].kind == kind
                && self.entries[*at].choice == choice
        };
        if let Some(at) = (0..self.entries.len()).find(is_same) {
            return Ok(SectionId(at));
        }
        let sizes = layer.sizes(micro_batch, self.setting.job.sequence);
        let program = lower(layer, mesh, &sizes, &choice)?;
        let entry = self.setting.entry(self.model, (kind, choice), (mesh, &sizes), &program);
        self.on.push(known.unwrap_or(self.grounds.len()));
        if known.is_none() {
            self.grounds.push(Ground { mesh: mesh.clone(), micro_batch });
        }
        self.entries.push(entry);
        Ok(SectionId(self.entries.len() - 1))
    }

    /// How many sections have a price.
    pub fn n_sections(&self) -> usize {
        self.entries.len()
    }

    /// What a sketch takes: what the plan's own figures are.
    ///
    /// # Errors
    /// What is wrong with the sketch.
    pub fn evaluate(&mut self, sketch: &Sketch<'_>) -> Result<Evaluation, BookError> {
        self.check(sketch)?;
        let mut chunks = std::mem::take(&mut self.chunks);
        chunks.resize_with(sketch.chunks.len(), Vec::new);
        for (runs, own) in chunks.iter_mut().zip(sketch.chunks) {
            runs.clear();
            runs.extend(own.iter().map(|&(SectionId(at), count)| (at, count)));
        }
        let slices = Slices::whole(self.setting.job.sequence);
        let entries = std::mem::take(&mut self.entries);
        let staged = Staged {
            model: self.model,
            meshes: Meshes::all(sketch.mesh),
            n_stages: sketch.n_stages,
            micro_batch: sketch.micro_batch,
            n_micro_batches: sketch.n_micro_batches,
            schedule: sketch.schedule,
            table: None,
            slices: &slices,
            entries: &entries,
            chunks: &chunks,
            replicas: &[],
        };
        let found = self.figures(&staged);
        (self.entries, self.chunks) = (entries, chunks);
        Ok(found?)
    }

    fn figures(&mut self, staged: &Staged<'_>) -> Result<Evaluation, SimulateError> {
        let streams = self.streams(staged);
        let step = step_between(&self.setting, staged, &streams)?;
        let peak = |(stage, held)| stage_peak(&self.setting, staged, stage, held);
        let peaks = step.held.iter().enumerate().map(peak).collect();
        Ok(Evaluation { step_time: step.time, peaks })
    }

    fn check(&self, sketch: &Sketch<'_>) -> Result<(), BookError> {
        let schedule = sketch.schedule;
        if schedule.n_slices() > 1 {
            return Err(BookError::Sliced { schedule });
        }
        let splits = self.setting.backward == Backward::Parts;
        if splits != schedule.splits_backward() {
            return Err(BookError::Backward { schedule });
        }
        let n_stages = u32::try_from(sketch.n_stages).unwrap_or(u32::MAX);
        let (expected, found) = (u64::from(schedule.placement().n_chunks(n_stages)), sketch.chunks.len());
        if expected != found as u64 || found == 0 {
            return Err(BookError::Chunks { expected, found });
        }
        let ground = self.ground(sketch.mesh, sketch.micro_batch);
        for (chunk, runs) in sketch.chunks.iter().enumerate() {
            let is_foreign = |(SectionId(at), _): &(SectionId, u64)| self.on.get(*at).copied() != ground;
            if let Some(at) = runs.iter().position(|run| ground.is_none() || is_foreign(run)) {
                return Err(BookError::Section { at, chunk });
            }
        }
        Ok(())
    }

    fn ground(&self, mesh: &Mesh, micro_batch: u64) -> Option<usize> {
        self.grounds.iter().position(|known| known.micro_batch == micro_batch && known.mesh == *mesh)
    }

    /// What goes from chunk to chunk, of which most was asked before.
    fn streams(&mut self, staged: &Staged<'_>) -> Streams {
        let n_copies = staged.schedule.placement().n_copies();
        if n_copies > 1 || staged.chunks.iter().any(Vec::is_empty) || !staged.model.is_chain() {
            return Streams::of(&self.setting, staged);
        }
        let mut streams = Streams::default();
        streams.takeovers.push(Takeover::default());
        for chunk in 1..staged.chunks.len() {
            let passed = self.passed(staged, chunk);
            let Passed { forward, backward, sent } = passed;
            streams.takeovers.push(Takeover { forward, backward, bytes_per_tier: Vec::new() });
            streams.boundaries.push(sent);
        }
        streams
    }

    fn passed(&mut self, staged: &Staged<'_>, chunk: usize) -> Passed {
        let (from, to) = (staged.stage_at(chunk - 1, 0), staged.stage_at(chunk, 0));
        let ends = (staged.chunks[chunk - 1].last(), staged.chunks[chunk].first());
        let (last, first) = (ends.0.map_or(0, |run| run.0), ends.1.map_or(0, |run| run.0));
        let key = (from, to, last, first);
        if let Some(known) = self.passed.get(&key) {
            return *known;
        }
        let tokens = self.setting.job.sequence;
        let crossing = staged.crossing_of_chain(chunk);
        let takeover = staged.takeover(&self.setting, crossing.as_slice(), tokens);
        let times = crossing.iter().map(|crossing| staged.border(&self.setting, 0, (crossing, tokens)).time);
        let sent = times.sum();
        let passed = Passed { forward: takeover.forward, backward: takeover.backward, sent };
        self.passed.insert(key, passed);
        passed
    }
}
