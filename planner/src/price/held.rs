//! Micro-batches that a stage holds when all that it keeps for backward is most.
//!
//! Chunks of a stage may hold more layers than others, or the head, and are under way in other numbers: bytes are
//! counted chunk by chunk along the row of the stage, and told as micro-batches of the whole stage.

use std::collections::BTreeMap;

use cost_model::Turns;
use ir::schedule::{Action, InFlight};
use ir::units::Bytes;

use crate::price::setting::{Entry, SliceFigures};
use crate::price::staged::Staged;

/// Micro-batches that a stage holds, in whole stages: a chunk counts as much as it keeps of all that the stage does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Held {
    /// All that forward keeps.
    pub saved: f64,
    /// The same where that alone is most: what hosts hold.
    pub kept: f64,
    /// What the second part of backward needs.
    pub carried: f64,
    /// Streams that were sent on: all chunks' are alike.
    pub streams: f64,
    /// All that forward keeps, and what the second part of backward needs, were all chunks alike.
    pub alike: [f64; 2],
    /// Bytes of gradients that slices leave for those before them.
    pub owed: Bytes,
    /// Where chunks are not alike, micro-batches in each: of which it holds all that forward keeps, and what the second
    /// part of backward needs.
    pub chunks: Vec<[f64; 2]>,
}

impl Held {
    /// Of chunks that are alike, which carry nothing.
    fn of_alike(saved: f64) -> Self {
        Self { saved, kept: saved, streams: saved, alike: [saved, 0.0], ..Self::default() }
    }

    /// The same were all chunks alike.
    pub(crate) fn were_alike(&self) -> Self {
        let [saved, carried] = self.alike;
        Self { saved, carried, streams: saved, chunks: Vec::new(), ..*self }
    }

    /// Whether it could hold more were all chunks alike.
    pub(crate) fn holds_less_than_alike(&self) -> bool {
        self.alike[0] > self.saved || self.alike[1] > self.carried || self.alike[0] > self.streams
    }

    /// What it holds of one of its chunks.
    pub(crate) fn of_chunk(&self, at: usize) -> [f64; 2] {
        self.chunks.get(at).copied().unwrap_or([self.saved, self.carried])
    }
}

/// What a stage holds at its peak: when all bytes together are most.
pub(super) fn held(staged: &Staged<'_>, stage: usize, row: &[Action]) -> Held {
    match staged.slices.n() {
        1 => held_whole(staged, stage, row),
        _ => held_sliced(staged, stage, row),
    }
}

/// Bytes of a micro-batch in every chunk of a stage.
struct PerChunk {
    /// What forward keeps on the device.
    saved: Vec<f64>,
    /// What it keeps on the host.
    on_host: Vec<f64>,
    /// What the second part of backward needs.
    carried: Vec<f64>,
}

impl PerChunk {
    fn of(staged: &Staged<'_>, stage: usize) -> Self {
        let sums = |of: &dyn Fn(&Entry) -> Bytes| -> Vec<f64> {
            let sum = |runs: &Vec<(usize, u64)>| {
                runs.iter().map(|&(entry, count)| of(&staged.entries[entry]).0 * count as f64).sum()
            };
            staged.chunks_of(stage).map(sum).collect()
        };
        Self {
            saved: sums(&|entry| entry.slice(0).saved),
            on_host: sums(&|entry| entry.memory.kept_on_host),
            carried: sums(&|entry| entry.slice(0).carried),
        }
    }

    fn are_alike(&self) -> bool {
        let all = |list: &[f64]| list.iter().all(|one| one.total_cmp(&list[0]).is_eq());
        [&self.saved, &self.on_host, &self.carried].into_iter().all(|list| all(list))
    }
}

/// Counts micro-batches in whole stages, of so many in every chunk: by the bytes of each, or by their number where
/// there are none.
struct InStages<'e> {
    each: &'e [f64],
    all: f64,
}

impl<'e> InStages<'e> {
    fn new(each: &'e [f64]) -> Self {
        Self { each, all: each.iter().sum() }
    }

    fn of(&self, counts: &[u32]) -> f64 {
        if self.all > 0.0 { bytes_of(counts, self.each) / self.all } else { plainly(counts) }
    }
}

fn bytes_of(counts: &[u32], each: &[f64]) -> f64 {
    counts.iter().zip(each).map(|(&count, bytes)| f64::from(count) * bytes).sum()
}

/// The same of chunks that are alike.
fn plainly(counts: &[u32]) -> f64 {
    f64::from(counts.iter().sum::<u32>()) / counts.len().max(1) as f64
}

/// What a stage holds at its peak whose rank takes turns, which owes nothing and carries nothing.
pub(super) fn held_in_turns(staged: &Staged<'_>, stage: usize, turns: &Turns) -> Held {
    let rank = stage as u32;
    let v = staged.schedule.n_virtual_stages();
    let mut most = Held::of_alike(f64::from(turns.most_in_flight(rank)) / f64::from(v));
    if v == 1 {
        return most;
    }
    let each = PerChunk::of(staged, stage);
    if each.are_alike() {
        return most;
    }
    (most.saved, most.kept) = (0.0, 0.0);
    let [saved_in, kept_in] = [&each.saved, &each.on_host].map(|each| InStages::new(each));
    turns.under_way(rank, |counts| {
        let saved = saved_in.of(counts);
        if saved >= most.saved {
            (most.saved, most.streams) = (saved, plainly(counts));
            most.chunks.clear();
            most.chunks.extend(counts.iter().map(|&count| [f64::from(count), 0.0]));
        }
        most.kept = most.kept.max(kept_in.of(counts));
    });
    most
}

/// What a stage holds at its peak of whole sequences, which owe nothing.
fn held_whole(staged: &Staged<'_>, stage: usize, row: &[Action]) -> Held {
    let each = PerChunk::of(staged, stage);
    let [saved_in, carried_in, kept_in] =
        [&each.saved, &each.carried, &each.on_host].map(|each| InStages::new(each));
    let are_alike = each.are_alike();
    let is_on_host = kept_in.all > 0.0;
    let v = staged.schedule.n_virtual_stages() as usize;
    let (mut saved, mut carried, mut all) = (vec![0; v], vec![0; v], InFlight::default());
    let mut most = (f64::NEG_INFINITY, 0, Held::default());
    let mut most_alike = (f64::NEG_INFINITY, 0, InFlight::default());
    let (mut kept, mut most_saved): (f64, u32) = (0.0, 0);
    for action in row {
        let chunk = action.virtual_stage as usize;
        let before = InFlight { saved: saved[chunk], carried: carried[chunk] };
        let mut now = before;
        now.pass(action.section);
        (saved[chunk], carried[chunk]) = (now.saved, now.carried);
        all.saved = all.saved + now.saved - before.saved;
        all.carried = all.carried + now.carried - before.carried;
        // Nothing is most once something went and nothing came.
        if now.total() < before.total() {
            continue;
        }
        most_saved = most_saved.max(all.saved);
        if is_on_host {
            kept = kept.max(kept_in.of(&saved));
        }
        let is_more =
            |bytes: f64, than: (f64, u32)| bytes.total_cmp(&than.0).then(all.total().cmp(&than.1)).is_ge();
        let bytes = f64::from(all.saved) * saved_in.all + f64::from(all.carried) * carried_in.all;
        if is_more(bytes, (most_alike.0, most_alike.1)) {
            most_alike = (bytes, all.total(), all);
        }
        if are_alike {
            continue;
        }
        let bytes = bytes_of(&saved, &each.saved) + bytes_of(&carried, &each.carried);
        if is_more(bytes, (most.0, most.1)) {
            (most.0, most.1) = (bytes, all.total());
            let held = &mut most.2;
            (held.saved, held.carried) = (saved_in.of(&saved), carried_in.of(&carried));
            held.streams = f64::from(all.saved) / v as f64;
            held.chunks.clear();
            let counts = saved.iter().zip(&carried);
            held.chunks.extend(counts.map(|(&saved, &carried)| [saved, carried].map(f64::from)));
        }
    }
    let in_stages = |count: u32| f64::from(count) / v as f64;
    let alike = [most_alike.2.saved, most_alike.2.carried].map(in_stages);
    let kept = if is_on_host { kept } else { in_stages(most_saved) };
    let found = Held { kept, alike, ..most.2 };
    if are_alike { found.were_alike() } else { found }
}

/// The same of sequences that are cut.
fn held_sliced(staged: &Staged<'_>, stage: usize, row: &[Action]) -> Held {
    let (v, n_slices) = (f64::from(staged.schedule.n_virtual_stages()), staged.slices.n());
    let sums = |of: &dyn Fn(&SliceFigures) -> Bytes| -> Vec<f64> {
        let one = |slice: u32| {
            let runs = staged.runs(stage);
            runs.map(|(entry, count)| of(&entry.slice(slice as usize)).0 * count as f64).sum::<f64>()
        };
        (0..n_slices).map(one).collect()
    };
    let (saved, carried, owed) = (sums(&|one| one.saved), sums(&|one| one.carried), sums(&|one| one.owed));
    let total = |counts: &dyn Fn(&InFlight) -> u32, now: &[InFlight], each: &[f64]| -> f64 {
        now.iter().zip(each).map(|(now, each)| f64::from(counts(now)) * each).sum()
    };
    let mut left: BTreeMap<(u32, u32), f64> = BTreeMap::new();
    let mut most = (f64::NEG_INFINITY, 0, Held::default());
    let mut now = vec![InFlight::default(); n_slices as usize];
    for action in row {
        now[action.slice as usize].pass(action.section);
        if action.section.yields_gradient() {
            let (of, owes) = ((action.virtual_stage, action.micro_batch), owed[action.slice as usize]);
            // The first slice owes nothing: only micro-batches under way are kept.
            if owes > 0.0 {
                left.insert(of, owes);
            } else {
                left.remove(&of);
            }
        }
        let (kept, carries) = (total(&|n| n.saved, &now, &saved), total(&|n| n.carried, &now, &carried));
        let owes: f64 = left.values().sum();
        let (bytes, count) = (kept + carries + owes, now.iter().map(|n| n.total()).sum::<u32>());
        if bytes.total_cmp(&most.0).then(count.cmp(&most.1)).is_ge() {
            // Slices may differ; micro-batches are counted, so that no rounding comes in.
            let whole = |part: f64, each: &[f64], counts: u32| match each.iter().sum::<f64>() {
                all if all > 0.0 && n_slices > 1 => part / all / v,
                _ => f64::from(counts) / f64::from(n_slices) / v,
            };
            let count_of = |of: &dyn Fn(&InFlight) -> u32| now.iter().map(of).sum::<u32>();
            let saved_now = whole(kept, &saved, count_of(&|n| n.saved));
            let held = Held {
                saved: saved_now,
                // Hosts hold nothing of slices.
                kept: saved_now,
                carried: whole(carries, &carried, count_of(&|n| n.carried)),
                streams: saved_now,
                owed: Bytes(owes / v),
                ..Held::default()
            };
            let held = Held { alike: [held.saved, held.carried], ..held };
            most = (bytes, count, held);
        }
    }
    most.2
}
