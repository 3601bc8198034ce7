//! Which chunks hand streams to which, where a model is no chain: then a stage may begin before the one before it has ended.

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

    /// Every chunk hands on to the next.
    pub fn chain(n_chunks: usize) -> Self {
        let n = u32::try_from(n_chunks).unwrap_or(u32::MAX);
        Self::new(n_chunks, (1..n).map(|to| (to - 1, to)))
    }

    /// Chunks from which one takes streams over.
    pub fn before(&self, chunk: u32) -> &[u32] {
        self.before.get(chunk as usize).map_or(&[], Vec::as_slice)
    }

    /// Chunks that take streams over from one.
    pub fn behind(&self, chunk: u32) -> &[u32] {
        self.behind.get(chunk as usize).map_or(&[], Vec::as_slice)
    }

    /// Chunks on the longest way that streams take: as many as there are chunks in a chain.
    pub fn depth(&self) -> usize {
        let mut depths: Vec<usize> = Vec::with_capacity(self.before.len());
        for before in &self.before {
            let longest = before.iter().map(|&chunk| depths[chunk as usize]).max().unwrap_or(0);
            depths.push(longest + 1);
        }
        depths.into_iter().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_branches_are_as_deep_as_the_longer() {
        assert_eq!(ChunkGraph::chain(5).depth(), 5);
        // Chunks 0 and 1, and 2 beside them, meet in 3.
        let graph = ChunkGraph::new(5, [(0, 1), (1, 3), (2, 3), (2, 3), (3, 4)]);
        assert_eq!((graph.depth(), graph.before(3), graph.behind(2)), (4, [1, 2].as_slice(), [3].as_slice()));
    }
}
