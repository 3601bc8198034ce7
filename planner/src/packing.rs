//! How long the slowest stage of a pipeline takes at least, because layers are not cut: embedding and head stand on the
//! first and the last stage, and every stage has a whole number of the others.
//!
//! ```text
//! sum over stages s of floor((T - e(s)) / t)  >=  layers that take t at least
//! ```
//! for every `t`, where `e` is what the ends take on their stages. Both ends are on one rank where that leaves more
//! room.

/// Whole layers are not missed by rounding.
const WHOLE: f64 = 1.0 + 1e-9;

/// Layers of a pipeline by their least seconds on a stage.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pieces {
    /// Of the first layer, on the first stage, and of the last one, on the last; 0 where they are none of their own.
    pub(crate) ends: [f64; 2],
    /// Of the others: seconds of one, and how many.
    pub(crate) layers: Vec<(f64, u64)>,
}

impl Pieces {
    /// Least seconds of the slowest of so many stages.
    pub(crate) fn least_slowest(&self, n_stages: u64) -> f64 {
        let ends: f64 = self.ends.into_iter().fold(0.0, f64::max);
        let of_kinds = self.layers.iter().filter(|(time, _)| *time > 0.0 && time.is_finite());
        of_kinds.map(|(time, _)| self.least_for(*time, n_stages)).fold(ends, f64::max)
    }

    /// The same for layers that take so long at least, each as if it took no longer.
    fn least_for(&self, time: f64, n_stages: u64) -> f64 {
        let slow = self.layers.iter().filter(|(own, _)| *own >= time);
        let needed: u64 = slow.map(|(_, count)| count).sum();
        let [first, last] = self.ends;
        // Were layers cut; within two layers of what is looked for.
        let average = (needed as f64 * time + first + last) / n_stages as f64;
        let average = average.max(first).max(last);
        let starts = [0.0, first, last, first + last];
        starts
            .into_iter()
            .map(|start| self.first_with_room(start, (time, needed), (average, n_stages)))
            .fold(f64::INFINITY, f64::min)
    }

    /// The first of `start`, `start + time`, `start + 2 time`, … in which stages have room for so many layers.
    fn first_with_room(
        &self,
        start: f64,
        (time, needed): (f64, u64),
        (average, n_stages): (f64, u64),
    ) -> f64 {
        let mut n = ((average - start) / (time * WHOLE)).ceil().max(0.0);
        while self.room(start + n * time, time, n_stages) < needed as f64 {
            n += 1.0;
        }
        start + n * time
    }

    /// Layers of so many seconds for which stages have room; less than none where an end has none.
    fn room(&self, limit: f64, time: f64, n_stages: u64) -> f64 {
        let of_stage = |taken: f64| ((limit - taken) * WHOLE / time).floor();
        let [first, last] = self.ends;
        let p = n_stages as f64;
        let (alone, both) = (of_stage(0.0), of_stage(first + last));
        let together = both + (p - 1.0) * alone;
        let apart = of_stage(first) + of_stage(last) + (p - 2.0) * alone;
        let holds = |of: f64| of >= 0.0;
        match (holds(both), n_stages > 1 && holds(of_stage(first)) && holds(of_stage(last))) {
            (true, true) => together.max(apart),
            (true, false) => together,
            (false, true) => apart,
            (false, false) => -1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_head_makes_the_last_stage_the_slowest_where_layers_divide() {
        let pieces = Pieces { ends: [0.0, 0.4], layers: vec![(1.0, 96)] };
        assert!((pieces.least_slowest(32) - 3.4).abs() < 1e-9);
        // Ten and a head, or eleven: 80 layers and a head that takes more than one of them.
        let pieces = Pieces { ends: [0.0, 1.2], layers: vec![(1.0, 80)] };
        assert!((pieces.least_slowest(8) - 11.0).abs() < 1e-9);
    }

    #[test]
    fn one_stage_holds_all() {
        let pieces = Pieces { ends: [0.5, 1.5], layers: vec![(1.0, 3)] };
        assert!((pieces.least_slowest(1) - 5.0).abs() < 1e-9);
    }

    /// Least time of the slowest stage over all ways to cut a sequence of layers into runs.
    fn brute(times: &[f64], n_stages: usize) -> f64 {
        if n_stages == 1 {
            return times.iter().sum();
        }
        let cut = |n: usize| times[..n].iter().sum::<f64>().max(brute(&times[n..], n_stages - 1));
        (0..=times.len()).map(cut).fold(f64::INFINITY, f64::min)
    }

    proptest! {
        #[test]
        fn no_cut_is_shorter(
            ends in [0.0..3.0_f64, 0.0..3.0_f64],
            kinds in proptest::collection::vec((0.1..3.0_f64, 1..4_u64), 1..3),
            n_stages in 1..5_usize,
        ) {
            let mut times = vec![ends[0]];
            kinds.iter().for_each(|&(time, count)| times.extend(vec![time; count as usize]));
            times.push(ends[1]);
            let found = Pieces { ends, layers: kinds }.least_slowest(n_stages as u64);
            let least = brute(&times, n_stages);
            prop_assert!(found <= least * (1.0 + 1e-6), "{found} of {least}");
        }
    }
}
