//! Ways of streams: from a layer to the next of its chunk by hand, else over a border, to another chunk or past layers
//! of its own.

use ir::conversion::{Step, steps};
use ir::links::{Link, links};
use ir::program::{Program, ValueId};
use ir::sharding::Sharding;

use crate::error::ExecutorError;
use crate::handover::{self, Part};
use crate::lifetimes::Direction;
use crate::prepare::{Prepared, unfit};

/// Where all streams of a run come from and go.
#[derive(Default)]
pub(crate) struct Ways {
    /// Streams that go further than from one layer to the next of a chunk.
    pub(crate) borders: Vec<Border>,
    /// Per layer and stream that it reads, where it comes from.
    pub(crate) reads: Vec<Vec<Way>>,
    /// Per layer and stream that it leaves, where it goes; the loss goes nowhere.
    pub(crate) leaves: Vec<Vec<Option<Way>>>,
}

/// How a stream gets from the layer that leaves it to the one that reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From hand to hand: the neighbour in the same chunk has it at this position.
    Near(usize),
    /// Over this one of the borders.
    Border(usize),
}

/// A stream from one chunk to another, or past other layers of its own.
pub(crate) struct Border {
    /// The layers.
    pub(crate) link: Link,
    /// Chunks of the layer that leaves it and of the one that reads it.
    pub(crate) chunks: [u32; 2],
    /// How the stream leaves the chunk before; its gradient arrives there in the dual.
    pub(crate) sent: Sharding,
    /// How its gradient leaves this chunk.
    pub(crate) gradient: Sharding,
    /// From the sharding in which the stream is sent to the one in which it is read.
    pub(crate) forward: Vec<Step>,
    /// From the sharding in which its gradient leaves to the one in which it is sent back.
    pub(crate) backward: Vec<Step>,
    /// Lengths of the whole stream's dims, per slice.
    shapes: Vec<Vec<u64>>,
    /// Where the stages have other meshes: what goes from whom to whom, per slice.
    handover: Option<Handover>,
}

/// The stream between stages of other meshes, which is sent in the sharding in which it is read.
pub(crate) struct Handover {
    /// How it is read.
    pub(crate) read: Sharding,
    /// How its gradient leaves.
    pub(crate) left: Sharding,
    /// Per slice, its parts, and those of its gradient.
    parts: Vec<[Vec<Part>; 2]>,
}

impl Border {
    /// Lengths of the whole stream's dims in a slice.
    pub(crate) fn shape(&self, slice: u32) -> &[u64] {
        &self.shapes[slice as usize]
    }

    /// What goes from whom to whom for a slice, where the stages have other meshes.
    pub(crate) fn parts(&self, direction: Direction, slice: u32) -> Option<(&Handover, &[Part])> {
        let handover = self.handover.as_ref()?;
        let [forward, backward] = &handover.parts[slice as usize];
        Some((handover, if direction == Direction::Forward { forward } else { backward }))
    }
}

impl Ways {
    /// The ways of all streams of a run.
    ///
    /// # Errors
    /// Where a stream is left in another shape or sharding than its reader can take over.
    pub(crate) fn find(run: &Prepared<'_>) -> Result<Self, ExecutorError> {
        let links = links((0..run.instances.len()).map(|layer_idx| run.layer(layer_idx)));
        let mut borders = Vec::new();
        let mut reads: Vec<Vec<Way>> = vec![Vec::new(); run.instances.len()];
        let mut leaves: Vec<Vec<Option<Way>>> =
            (0..run.instances.len()).map(|layer_idx| vec![None; run.program(layer_idx).out.len()]).collect();
        for link in links {
            let border = find_border(run, link)?;
            let [read, left] = match border {
                None => [Way::Near(link.left), Way::Near(link.read)],
                Some(border) => {
                    borders.push(border);
                    [Way::Border(borders.len() - 1); 2]
                }
            };
            reads[link.to].push(read);
            leaves[link.from][link.left] = Some(left);
        }
        for (layer_idx, reads) in reads.iter().enumerate() {
            if reads.len() < run.program(layer_idx).stream.len() {
                let place = format!("layer {layer_idx} `{}`", run.layer(layer_idx).name);
                return Err(unfit(format!("{place}: no layer leaves the stream that it reads")));
            }
        }
        Ok(Self { borders, reads, leaves })
    }
}

/// What passes a link that is more than from one layer to the next of the same chunk.
fn find_border(run: &Prepared<'_>, link: Link) -> Result<Option<Border>, ExecutorError> {
    let (before, after) = (run.program(link.from), run.program(link.to));
    let place = format!("layer {} `{}`", link.to, run.layer(link.to).name);
    let at = |ids: &[ValueId], at: usize, program: &Program| ids.get(at).map(|&id| program.value(id));
    let [sent, wanted] = [&before.out, &before.out_gradient].map(|ids| at(ids, link.left, before));
    let [read, left] = [&after.stream, &after.stream_gradient].map(|ids| at(ids, link.read, after));
    let (Some(sent), Some(wanted), Some(read), Some(left)) = (sent, wanted, read, left) else {
        return Err(unfit(format!("{place}: its program reads no stream")));
    };
    let (left, wanted) = (left.sharding, wanted.sharding);
    let slices = 0..run.execution.slices.n();
    let shapes: Vec<_> = slices.map(|slice| run.shape_of(link.to, read.tensor, slice)).collect();
    if Some(&run.shape_of(link.from, sent.tensor, 0)) != shapes.first() {
        return Err(unfit(format!("{place}: the layer before gives a stream of another shape")));
    }
    let [first, second] = [link.from, link.to].map(|layer_idx| run.instances[layer_idx].chunk);
    if first == second && (sent.sharding != read.sharding || left != wanted) {
        return Err(unfit(format!("{place}: the layer before gives the stream in another sharding")));
    }
    if first == second && link.to == link.from + 1 {
        return Ok(None);
    }
    let meshes = [first, second].map(|chunk| run.execution.mesh_of_chunk(chunk as usize));
    let all = [sent.sharding, read.sharding, left, wanted];
    if meshes[0] != meshes[1] && all.iter().any(|sharding| !sharding.partial_axes().is_empty()) {
        return Err(unfit(format!("{place}: unfinished sums cannot go to another mesh")));
    }
    let handover = (meshes[0] != meshes[1]).then(|| {
        let side = |mesh, sharding| handover::Side { mesh, sharding };
        let of = |shape: &Vec<u64>| {
            [
                handover::parts(side(meshes[0], sent.sharding), side(meshes[1], read.sharding), shape),
                handover::parts(side(meshes[1], left), side(meshes[0], wanted), shape),
            ]
        };
        Handover { read: read.sharding, left, parts: shapes.iter().map(of).collect() }
    });
    let find = |from, to| {
        if handover.is_some() {
            return Ok(Vec::new());
        }
        steps(from, to).ok_or_else(|| unfit(format!("{place}: no conversion leads to its stream's sharding")))
    };
    let (forward, backward) = (find(sent.sharding, read.sharding)?, find(left, wanted)?);
    Ok(Some(Border {
        link,
        chunks: [first, second],
        sent: sent.sharding,
        gradient: wanted,
        forward,
        backward,
        shapes,
        handover,
    }))
}
