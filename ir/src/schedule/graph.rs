//! Which chunks hand streams to which, where a model is no chain: then a stage may begin before the one before it has
//! ended.

/// The chunks before and behind each chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkGraph {
    before: Vec<Vec<u32>>,
    behind: Vec<Vec<u32>>,
}

impl ChunkGraph {
    /// From pairs of chunks of which the first hands something to the second, a later one.
    pub fn new(n_chunks: usize, pairs: impl IntoIterator<Item = (u32, u32)>) -> Self {
        let mut graph = Self { before: vec![Vec::new(); n_chunks], behind: vec![Vec::new(); n_chunks] };
        for (from, to) in pairs.into_iter().filter(|(from, to)| from < to && (*to as usize) < n_chunks) {
            if !graph.before[to as usize].contains(&from) {
                graph.before[to as usize].push(from);
                graph.behind[from as usize].push(to);
            }
        }
        graph
    }

    /// Chunks from which one takes streams over.
    pub fn before(&self, chunk: u32) -> &[u32] {
        self.before.get(chunk as usize).map_or(&[], Vec::as_slice)
    }

    /// Chunks that take streams over from one.
    pub fn behind(&self, chunk: u32) -> &[u32] {
        self.behind.get(chunk as usize).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_takes_over_from_both_branches_that_meet_there() {
        // Chunks 0 and 1, and 2 beside them, meet in 3.
        let graph = ChunkGraph::new(5, [(0, 1), (1, 3), (2, 3), (2, 3), (3, 4)]);
        assert_eq!((graph.before(3), graph.behind(2)), ([1, 2].as_slice(), [3].as_slice()));
    }
}
