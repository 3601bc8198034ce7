//! Which layer reads what which layer leaves: streams over the stack by which layers hand them on (`graph`).

use crate::graph::Layer;

/// A stream from the layer that leaves it to the one that reads it, by their positions in a list of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Link {
    /// Position of the layer that leaves it.
    pub from: usize,
    /// Which of the streams that it leaves: a position in `Layer::out`.
    pub left: usize,
    /// Position of the layer that reads it.
    pub to: usize,
    /// Which of the streams that it reads: a position in `Layer::stream_in`.
    pub read: usize,
}

/// All streams of a list of layers, readers in order. A layer may stand for a run of equal ones, which hand on what
/// they read among themselves. What a layer lacks on the stack has no link: `graph::check` asks that nothing lacks.
pub fn links<'a>(layers: impl IntoIterator<Item = &'a Layer>) -> Vec<Link> {
    let mut stack: Vec<(usize, usize)> = Vec::new();
    let mut links = Vec::new();
    for (to, layer) in layers.into_iter().enumerate() {
        let rest = stack.len().saturating_sub(layer.stream_in.len());
        let taken = stack.drain(rest..).enumerate();
        links.extend(taken.map(|(read, (from, left))| Link { from, left, to, read }));
        stack.extend((0..layer.out.len()).map(|left| (to, left)));
    }
    links
}

/// Positions of layers that do not take over exactly what the one before has left: where branches begin and where they
/// meet. None where every layer reads of the one before, whatever else it reads: layers then run in turn, and no branch
/// beside another.
pub fn bends<'a>(layers: impl IntoIterator<Item = &'a Layer> + Clone) -> Vec<usize> {
    let n_left: Vec<usize> = layers.clone().into_iter().map(|layer| layer.out.len()).collect();
    let mut straight = vec![0; n_left.len()];
    let mut bent = vec![false; n_left.len()];
    for link in links(layers) {
        if link.from + 1 == link.to { straight[link.to] += 1 } else { bent[link.to] = true }
    }
    if straight.iter().skip(1).all(|&read| read > 0) {
        return Vec::new();
    }
    (1..n_left.len()).filter(|&at| bent[at] || straight[at] != n_left[at - 1]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::TensorId;

    fn layer(reads: usize, leaves: usize) -> Layer {
        let streams = |n: usize| (0..n).map(TensorId).collect();
        Layer {
            name: String::new(),
            dims: Vec::new(),
            tensors: Vec::new(),
            ops: Vec::new(),
            stream_in: streams(reads),
            out: streams(leaves),
        }
    }

    fn of(layers: &[(usize, usize)]) -> Vec<[usize; 4]> {
        let layers: Vec<Layer> = layers.iter().map(|&(reads, leaves)| layer(reads, leaves)).collect();
        links(&layers).into_iter().map(|link| [link.from, link.left, link.to, link.read]).collect()
    }

    #[test]
    fn a_chain_hands_on_one_stream() {
        assert_eq!(of(&[(0, 1), (1, 1), (1, 1)]), [[0, 0, 1, 0], [1, 0, 2, 0]]);
    }

    /// Encoder, then a decoder's embedding above what the encoder has left, and layers that read and leave both.
    #[test]
    fn what_lies_below_waits_for_the_layer_that_reads_both() {
        let links = of(&[(0, 1), (1, 1), (0, 1), (2, 2), (2, 1)]);
        assert_eq!(links, [[0, 0, 1, 0], [1, 0, 3, 0], [2, 0, 3, 1], [3, 0, 4, 0], [3, 1, 4, 1]]);
    }

    #[test]
    fn branches_begin_and_meet_where_layers_do_not_take_over_from_the_one_before() {
        let bends = |layers: &[(usize, usize)]| {
            let layers: Vec<Layer> = layers.iter().map(|&(reads, leaves)| layer(reads, leaves)).collect();
            super::bends(&layers)
        };
        assert!(bends(&[(0, 1), (1, 1), (1, 1)]).is_empty());
        assert_eq!(bends(&[(0, 1), (1, 1), (0, 1), (2, 2), (2, 1)]), [2, 3]);
        assert!(bends(&[(0, 1), (1, 2), (1, 1), (2, 1)]).is_empty());
    }
}
