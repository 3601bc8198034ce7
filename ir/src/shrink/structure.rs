//! The pipeline of a shrunk plan: stages, virtual stages, micro-batches and the layers of each chunk.
//!
//! Neighbouring chunks of the large plan become one chunk of the small; it keeps one layer of every entry that occurs
//! in them, in their order, as long as each stream still arrives as the layer before leaves it.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::graph::{Layer, Segment};
use crate::links::{Link, links};
use crate::mesh::Mesh;
use crate::plan::check::OpenPlan;
use crate::plan::{EntryRun, Plan};
use crate::schedule::Schedule;
use crate::shrink::{ShrinkError, ShrinkLimits};

/// Stages kept where there are that many: a first, a last and two between, so that a middle stage has middle
/// neighbours.
const STAGES: u64 = 4;
/// Stages below which a pipeline is none.
const FEWEST_STAGES: u64 = 2;
/// Virtual stages kept: the order within and between them is then all there.
const VIRTUAL_STAGES: u32 = 2;
/// Waves kept: a wave then also follows another.
const WAVES: u32 = 2;
/// Slices kept: a first, a last and one between.
const SLICES: u32 = 3;
/// Micro-batches beyond the stages, so that warm-up, steady state and cool-down all occur.
const EXTRA_MICRO_BATCHES: u64 = 2;
/// Up to so many chunks a run keeps two layers, so that a layer also follows one of its own kind.
const FEW_CHUNKS: usize = 2;

/// The pipeline of a shrunk plan.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Structure {
    pub(super) n_stages: u64,
    pub(super) schedule: Schedule,
    pub(super) n_micro_batches: u64,
    pub(super) chunks: Vec<Vec<EntryRun>>,
    /// Where meshes of stages differ, that of the stages for which each stands.
    pub(super) meshes: Vec<Mesh>,
}

/// Reduces the pipeline of a plan of whose meshes each will have so many devices.
pub(super) fn reduce(
    plan: &Plan,
    open: &OpenPlan,
    devices: &dyn Fn(&Mesh) -> u64,
    limits: &ShrinkLimits,
) -> Result<Structure, ShrinkError> {
    let small = |n_stages: u64| (n_stages, small_schedule(plan, n_stages));
    // Not all stages and virtual stages can be put together: at worst all stay.
    let whole = (plan.n_stages, (plan.schedule, small_schedule(plan, plan.n_stages).1));
    let candidates = match plan.schedule {
        // Its table is for so many stages and no other number.
        Schedule::Custom(_) => vec![whole],
        Schedule::GPipe
        | Schedule::OneFOneB
        | Schedule::Eager
        | Schedule::Dapple { .. }
        | Schedule::Interleaved { .. }
        | Schedule::BreadthFirst { .. }
        | Schedule::ZbH1
        | Schedule::ZbH2
        | Schedule::ZbV
        | Schedule::VHalf
        | Schedule::VMin
        | Schedule::Hanayo { .. }
        | Schedule::DualPipeV
        | Schedule::Chimera
        | Schedule::Seq1F1B { .. }
        | Schedule::TeraPipe { .. } => {
            let few = [STAGES, FEWEST_STAGES].map(|n| small(plan.n_stages.min(n)));
            few.into_iter().chain([small(plan.n_stages), whole]).collect()
        }
    };
    let mut needed = u64::MAX;
    for (n_stages, (schedule, n_micro_batches)) in candidates {
        let n_chunks = schedule.placement().n_chunks(u32::try_from(n_stages).unwrap_or(u32::MAX)) as usize;
        let Some(meshes) = meshes(plan, schedule, n_stages).filter(|_| is_joined(plan, open, n_chunks))
        else {
            continue;
        };
        let ranks = match meshes.as_slice() {
            [] => n_stages.saturating_mul(devices(&plan.mesh)),
            meshes => meshes.iter().map(devices).fold(0, u64::saturating_add),
        };
        needed = needed.min(ranks);
        if ranks <= limits.max_ranks {
            let chunks = chunks(plan, open, n_chunks);
            return Ok(Structure { n_stages, schedule, n_micro_batches, chunks, meshes });
        }
    }
    Err(ShrinkError::TooManyRanks { needed, limit: limits.max_ranks })
}

/// The mesh of the stages for which every stage of a shrunk pipeline stands; nothing where all have one mesh, `None`
/// where one would stand for stages of several.
fn meshes(plan: &Plan, schedule: Schedule, n_stages: u64) -> Option<Vec<Mesh>> {
    if plan.stage_meshes.is_empty() {
        return Some(Vec::new());
    }
    let (n_stages, placement) = (u32::try_from(n_stages).ok()?, schedule.placement());
    let n_chunks = placement.n_chunks(n_stages) as usize;
    let mut meshes: Vec<Option<&Mesh>> = vec![None; n_stages as usize];
    for chunk in 0..n_chunks {
        for large in group(plan, chunk, n_chunks) {
            for stage in placement.ranks(n_stages, chunk as u32) {
                let own = plan.mesh_of_chunk(large);
                if *meshes[stage as usize].get_or_insert(own) != own {
                    return None;
                }
            }
        }
    }
    meshes.into_iter().map(|mesh| mesh.cloned()).collect()
}

/// The chunks of the large plan that become one.
pub(super) fn group(plan: &Plan, chunk: usize, n_chunks: usize) -> Range<usize> {
    let n = plan.chunks.len();
    chunk * n / n_chunks..(chunk + 1) * n / n_chunks
}

/// Whether chunks that become one leave their streams as those behind them in it read them.
fn is_joined(plan: &Plan, open: &OpenPlan, n_chunks: usize) -> bool {
    let of_group = |at: usize| group(plan, at, n_chunks).map(move |chunk| (at, chunk));
    let runs: Vec<(usize, usize, usize)> = (0..n_chunks)
        .flat_map(of_group)
        .flat_map(|(at, chunk)| plan.chunks[chunk].iter().map(move |run| (at, chunk, run.entry)))
        .collect();
    links(runs.iter().map(|(.., entry)| open.layer(*entry))).iter().all(|link| {
        let ((at, from, left), (other, to, reads)) = (runs[link.from], runs[link.to]);
        let is_inside = at == other && from != to;
        !is_inside || open.entries[left].choice.out == open.entries[reads].choice.stream
    })
}

/// The schedule over fewer stages, with as many micro-batches as it takes to see all of its phases.
fn small_schedule(plan: &Plan, n_stages: u64) -> (Schedule, u64) {
    let at_most = |n: u64| plan.n_micro_batches.min(n + EXTRA_MICRO_BATCHES);
    match plan.schedule {
        Schedule::GPipe | Schedule::OneFOneB | Schedule::ZbH1 | Schedule::Chimera => {
            (plan.schedule, at_most(n_stages))
        }
        // Their warm-up is twice as long.
        Schedule::Eager
        | Schedule::ZbH2
        | Schedule::ZbV
        | Schedule::VHalf
        | Schedule::VMin
        | Schedule::DualPipeV => (plan.schedule, at_most(2 * n_stages)),
        Schedule::Dapple { warm_up } => {
            let warm_up = warm_up.min(u32::try_from(n_stages).unwrap_or(u32::MAX));
            (Schedule::Dapple { warm_up }, at_most(2 * n_stages))
        }
        Schedule::BreadthFirst { virtual_stages } => {
            (Schedule::BreadthFirst { virtual_stages: virtual_stages.min(VIRTUAL_STAGES) }, at_most(n_stages))
        }
        Schedule::Hanayo { waves } => (Schedule::Hanayo { waves: waves.min(WAVES) }, at_most(n_stages)),
        Schedule::Interleaved { virtual_stages } => {
            // Groups of as many micro-batches as stages: whole ones in the large plan, and in the small.
            let groups = (n_stages + EXTRA_MICRO_BATCHES).div_ceil(n_stages);
            let virtual_stages = virtual_stages.min(VIRTUAL_STAGES);
            let groups = groups.min(plan.n_micro_batches / n_stages);
            (Schedule::Interleaved { virtual_stages }, groups * n_stages)
        }
        Schedule::Seq1F1B { slices } => (Schedule::Seq1F1B { slices: slices.min(SLICES) }, at_most(n_stages)),
        Schedule::TeraPipe { slices } => {
            (Schedule::TeraPipe { slices: slices.min(SLICES) }, at_most(n_stages))
        }
        // Its table is what it is.
        Schedule::Custom(_) => (plan.schedule, plan.n_micro_batches),
    }
}

/// The model's sequence that a list of chunks makes up.
pub(super) fn sequence(chunks: &[Vec<EntryRun>], open: &OpenPlan) -> Vec<Segment> {
    let mut sequence: Vec<Segment> = Vec::new();
    for run in chunks.iter().flatten() {
        let layer = open.entries[run.entry].layer;
        match sequence.last_mut() {
            Some(last) if last.layer == layer => last.count += run.count,
            _ => sequence.push(Segment { layer, count: run.count }),
        }
    }
    sequence
}

fn chunks(plan: &Plan, open: &OpenPlan, n_chunks: usize) -> Vec<Vec<EntryRun>> {
    let keep = if n_chunks <= FEW_CHUNKS { 2 } else { 1 };
    let groups = groups(plan, n_chunks);
    let all: Vec<Vec<EntryRun>> = groups.iter().map(|group| merged(group, keep)).collect();
    let distinct: Vec<Vec<EntryRun>> = all.iter().map(|runs| first_of_each(runs)).collect();
    let mut chunks = if is_chained(&distinct, open) { distinct } else { all };
    keep_uneven(plan, open, &groups, &mut chunks);
    chunks
}

/// The large plan's chunks, `n_chunks` neighbouring groups of them.
fn groups(plan: &Plan, n_chunks: usize) -> Vec<Vec<Vec<EntryRun>>> {
    (0..n_chunks).map(|chunk| plan.chunks[group(plan, chunk, n_chunks)].to_vec()).collect()
}

/// The runs of a group with at most `keep` layers each.
fn merged(group: &[Vec<EntryRun>], keep: u64) -> Vec<EntryRun> {
    let mut runs: Vec<EntryRun> = Vec::new();
    for run in group.iter().flatten() {
        match runs.last_mut() {
            Some(last) if last.entry == run.entry => last.count = last.count.saturating_add(run.count),
            _ => runs.push(*run),
        }
    }
    runs.iter().map(|run| EntryRun { count: run.count.min(keep), ..*run }).collect()
}

fn first_of_each(runs: &[EntryRun]) -> Vec<EntryRun> {
    let mut seen = BTreeSet::new();
    runs.iter().copied().filter(|run| seen.insert(run.entry)).collect()
}

/// Whether every stream arrives as a layer before leaves it, and only the loss is left.
fn is_chained(chunks: &[Vec<EntryRun>], open: &OpenPlan) -> bool {
    let entries: Vec<usize> = chunks.iter().flatten().map(|run| run.entry).collect();
    let layers = || entries.iter().map(|&entry| open.layer(entry));
    let links = links(layers());
    let all = |count: fn(&Layer) -> usize| layers().map(count).sum::<usize>();
    let alike = |link: &Link| {
        let (before, after) = (entries[link.from], entries[link.to]);
        let (left, read) = (open.layer(before), open.layer(after));
        left.extents(left.out[link.left]) == read.extents(read.stream_in[link.read])
            && open.entries[before].choice.out == open.entries[after].choice.stream
    };
    links.len() == all(|layer| layer.stream_in.len())
        && links.len() + 1 == all(|layer| layer.out.len())
        && links.iter().all(alike)
}

/// Where some chunk had more of the repeated layers than another, one still has.
fn keep_uneven(plan: &Plan, open: &OpenPlan, groups: &[Vec<Vec<EntryRun>>], chunks: &mut [Vec<EntryRun>]) {
    let times = |entry: usize| {
        let layer = open.entries[entry].layer;
        open.model.sequence.iter().filter(|run| run.layer == layer).map(|run| run.count).sum::<u64>()
    };
    let body =
        |runs: &[EntryRun]| runs.iter().filter(|run| times(run.entry) > 1).map(|run| run.count).sum::<u64>();
    let is_even = |lengths: &[u64]| lengths.windows(2).all(|pair| pair[0] == pair[1]);
    let before: Vec<u64> = plan.chunks.iter().map(|runs| body(runs)).collect();
    let after: Vec<u64> = chunks.iter().map(|runs| body(runs)).collect();
    if is_even(&before) || !is_even(&after) || chunks.len() < 2 {
        return;
    }
    let longest = before.iter().copied().max().unwrap_or(0);
    let at = groups.iter().position(|group| group.iter().any(|runs| body(runs) == longest));
    let Some(at) = at else { return };
    let repeats = |entry: usize| groups[at].iter().flatten().any(|run| run.entry == entry && run.count > 1);
    if let Some(run) = chunks[at].iter_mut().find(|run| repeats(run.entry)) {
        run.count += 1;
    }
}
