//! Streams from chunk to chunk: which chunk takes over what another has left, in which sharding.

use ir::graph::TensorId;
use ir::links::links;
use ir::sharding::Sharding;
use ir::units::Bytes;

use crate::price::setting::Setting;
use crate::price::staged::{Staged, elements_of};

/// What the layers of one run leave for those of a later one, in another chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crossing {
    /// The chunk that leaves it.
    pub from: usize,
    /// The chunk that takes it over.
    pub to: usize,
    /// Entry of the layer that reads it.
    reader: usize,
    /// What that layer reads of it.
    streams: Vec<TensorId>,
    /// The sharding in which it is left.
    pub sent: Sharding,
    /// The sharding in which it is read.
    pub read: Sharding,
}

impl Crossing {
    /// What crosses: the entry of the layer that reads it, and what that reads of it.
    pub(super) fn what(&self) -> (usize, &[TensorId]) {
        (self.reader, &self.streams)
    }
}

/// Of all that crosses, in the order of the chunks that take it over, what one of them does.
pub fn taken_over(crossings: &[Crossing], chunk: usize) -> &[Crossing] {
    let before = |to: usize| crossings.partition_point(|crossing| crossing.to < to);
    &crossings[before(chunk)..before(chunk + 1)]
}

impl Staged<'_> {
    /// Everything that crosses from one chunk to another, in the order of the chunks that take it over.
    pub fn crossings(&self) -> Vec<Crossing> {
        if self.model.is_chain() {
            return (1..self.chunks.len()).filter_map(|chunk| self.crossing_of_chain(chunk)).collect();
        }
        self.handed_on().into_iter().filter(|one| one.from != one.to).collect()
    }

    /// Whether every chunk takes over from the one before, and from no other: a micro-batch then passes them as a
    /// chain.
    pub(super) fn runs_in_turn(&self) -> bool {
        if self.model.is_chain() {
            return true;
        }
        let crossings = self.crossings();
        (1..self.chunks.len()).all(|to| {
            let taken = taken_over(&crossings, to);
            !taken.is_empty() && taken.iter().all(|crossing| crossing.from + 1 == to)
        })
    }

    /// What a chunk of a chain takes over from the one before.
    pub(super) fn crossing_of_chain(&self, to: usize) -> Option<Crossing> {
        let from = to.checked_sub(1)?;
        let (&(left, _), &(reader, _)) = (self.chunks.get(from)?.last()?, self.chunks.get(to)?.first()?);
        let streams = self.model.layers[self.entries[reader].kind].stream_in.clone();
        let (sent, read) = (self.entries[left].choice.out, self.entries[reader].choice.stream);
        Some(Crossing { from, to, reader, streams, sent, read })
    }

    /// What layers leave for later ones: all that goes further than to the next layer of the same chunk.
    fn handed_on(&self) -> Vec<Crossing> {
        let of_chunk = |(at, runs): (usize, &Vec<(usize, u64)>)| {
            runs.iter().map(move |run| (at, run.0)).collect::<Vec<(usize, usize)>>()
        };
        let runs: Vec<(usize, usize)> = self.chunks.iter().enumerate().flat_map(of_chunk).collect();
        let layers = runs.iter().map(|(_, entry)| &self.model.layers[self.entries[*entry].kind]);
        let mut found: Vec<((usize, usize), Crossing)> = Vec::new();
        for link in links(layers) {
            let ((from, left), (to, reader)) = (runs[link.from], runs[link.to]);
            if from == to && link.from + 1 == link.to {
                continue;
            }
            let stream = self.model.layers[self.entries[reader].kind].stream_in[link.read];
            let run = (link.from, link.to);
            match found.iter_mut().find(|(known, _)| *known == run) {
                Some((_, crossing)) => crossing.streams.push(stream),
                None => {
                    let (sent, read) = (self.entries[left].choice.out, self.entries[reader].choice.stream);
                    found.push((run, Crossing { from, to, reader, streams: vec![stream], sent, read }));
                }
            }
        }
        found.into_iter().map(|(_, crossing)| crossing).collect()
    }

    /// Bytes that a device of a stage has of streams, or of their gradients, that wait for a layer behind others: one
    /// where both are in one chunk; of what comes from a chunk further back than the one before, as many as that can be
    /// ahead.
    pub(super) fn waiting(&self, setting: &Setting<'_>, stage: usize) -> Bytes {
        if self.model.is_chain() {
            return Bytes::ZERO;
        }
        let mesh = self.meshes.of(stage as u64);
        let of = |crossing: &Crossing| {
            let ahead = (crossing.to - crossing.from).saturating_sub(1) as u64;
            let n = if crossing.to == crossing.from { 1 } else { ahead.min(self.n_micro_batches) };
            let shapes = self.shapes(crossing, setting.job.sequence);
            setting.activation(elements_of(crossing.read, mesh, &shapes)) * n as f64
        };
        self.handed_on().iter().filter(|crossing| self.is_at(crossing.to, stage)).map(of).sum()
    }

    /// Lengths of the dims of what crosses, of so many tokens.
    pub(super) fn shapes(&self, crossing: &Crossing, tokens: u64) -> Vec<Vec<u64>> {
        let layer = &self.model.layers[self.entries[crossing.reader].kind];
        let sizes = layer.sizes(self.micro_batch, tokens);
        crossing.streams.iter().map(|&stream| layer.shape(stream, &sizes)).collect()
    }
}
