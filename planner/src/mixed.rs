//! How fast a candidate could be whose stages stand on different devices.
//!
//! Let `t[c][k]` be the least seconds of a layer of kind `k` on ground `c`, `n[k]` the layers of that kind, and `c(s)`
//! the ground of stage `s`. Whatever layers the stages get, the slowest takes at least `T` seconds where
//!
//! ```text
//! sum_k n[k] t[r][k]  <=  T sum_s 1 / x[c(s)],  x[c] = min_k t[c][k] / t[r][k]     for every ground r -> by_speed()
//! n[k]  <=  sum_s floor(T / t[c(s)][k])                                            for every kind k   -> by_count()
//! ```
//! and all stages together take, for any `m[c] >= 0`, in the micro-batches of a step at least
//!
//! ```text
//! sum_k n[k] min_c t[c][k] (1 + m[c])  -  T sum_s m[c(s)]                                                    -> together()
//! ```
//! The first says that devices together are no faster than the sum of their speeds: a stage with the share `w` of the
//! work, counted in seconds of `r`, takes at least `x w`. The second, that layers are not cut. The third, that layers
//! are where each is the fastest only as far as stages there have time: what others take then makes a bubble longer.

use ir::units::Seconds;

use crate::bound::{Bound, Busy, LayerTimes, Together, Work};
use crate::candidate::{Candidate, Scope};
use crate::price::grounds::Grounds;

/// Halvings of the range in which the least time of the slowest stage lies.
const BISECTIONS: usize = 40;

/// Far more than rounding can add to a quotient.
const ROUNDING: f64 = 1e-9;

/// Seconds of one layer per ground and kind, layers per kind, and the ground of every stage.
struct Pieces<'a> {
    times: Vec<Vec<f64>>,
    counts: &'a [u64],
    of_stage: &'a [usize],
}

impl Scope<'_> {
    /// The bound of a candidate from those with all stages on one of its grounds.
    pub(crate) fn mixed(
        &self,
        candidate: &Candidate,
        grounds: &Grounds<'_>,
        of_ground: Vec<Bound>,
    ) -> Option<Bound> {
        let pieces = |of: &dyn Fn(&LayerTimes) -> f64| Pieces {
            times: of_ground.iter().map(|bound| bound.layers.iter().map(of).collect()).collect(),
            counts: &self.counts,
            of_stage: &grounds.of_stage,
        };
        let work = |of: fn(&LayerTimes) -> Busy| {
            let work = pieces(&|layer| of(layer).step).work();
            let repeated = pieces(&|layer| of(layer).repeated);
            let together = Some(repeated.together(work.slowest));
            Work { once: work.average - repeated.average(), together, ..work }
        };
        let (work, plain) = (work(|layer| layer.least), work(|layer| layer.plain));
        let time = self.with_bubble(candidate, work)?;
        let saving = (self.with_bubble(candidate, plain)? - time).max(Seconds::ZERO);
        // The ground with most stages decides in which sharding the stream passes everywhere; ties to the first.
        let n_stages = |ground: usize| grounds.of_stage.iter().filter(|of| **of == ground).count();
        let most = (0..of_ground.len()).rev().max_by_key(|&ground| n_stages(ground))?;
        let crowding = of_ground.iter().map(|bound| bound.crowding).fold(0.0, f64::max);
        Some(Bound { time, work, saving, crowding, grounds: of_ground.clone(), ..of_ground[most].clone() })
    }
}

impl Pieces<'_> {
    /// Seconds of the average stage, were every layer where it is the fastest.
    fn average(&self) -> f64 {
        let least = |kind: usize| self.times.iter().map(|times| times[kind]).fold(f64::INFINITY, f64::min);
        let all: f64 = self.counts.iter().enumerate().map(|(kind, &n)| n as f64 * least(kind)).sum();
        all / self.of_stage.len() as f64
    }

    fn work(&self) -> Work {
        let average = self.average();
        let by_speed = (0..self.times.len()).map(|ground| self.by_speed(ground));
        let by_count = (0..self.counts.len()).map(|kind| self.by_count(kind));
        let slowest = by_speed.chain(by_count).fold(average, f64::max);
        Work { average, slowest, ..Work::default() }
    }

    /// What stages take together, none of them longer than so many seconds.
    ///
    /// Were a second of a stage on ground `c` worth `1 + m[c]`, all layers would take at least
    /// `sum_k n[k] min_c t[c][k] (1 + m[c])`, of which `T sum_s m[c(s)]` at most is of what seconds are worth more: for
    /// any `m` that is not below 0, so that the work is moved to where it takes longest that is not full.
    fn together(&self, slowest: f64) -> Together {
        let main = (0..self.counts.len()).max_by_key(|&kind| self.counts[kind]).unwrap_or(0);
        let as_long_as = |reference: usize| {
            let worth: Vec<f64> = self
                .times
                .iter()
                .map(|times| (self.times[reference][main] / times[main]).max(1.0))
                .map(|worth| if worth.is_finite() { worth } else { 1.0 })
                .collect();
            let least = |kind: usize| {
                self.times
                    .iter()
                    .zip(&worth)
                    .map(|(times, worth)| times[kind] * worth)
                    .fold(f64::INFINITY, f64::min)
            };
            let all = self.counts.iter().enumerate().map(|(kind, &n)| n as f64 * least(kind)).sum();
            Together { all, falls: self.of_stage.iter().map(|&ground| worth[ground] - 1.0).sum() }
        };
        let at = |one: &Together| one.all - one.falls * slowest;
        let all = (0..self.times.len()).map(as_long_as);
        all.max_by(|a, b| at(a).total_cmp(&at(b))).unwrap_or(Together { all: 0.0, falls: 0.0 })
    }

    /// Seconds of the slowest stage were layers cut as the speeds are, in seconds of one ground.
    fn by_speed(&self, reference: usize) -> f64 {
        let own = &self.times[reference];
        let kinds = || (0..own.len()).filter(|&kind| self.counts[kind] > 0 && own[kind] > 0.0);
        let all: f64 = kinds().map(|kind| self.counts[kind] as f64 * own[kind]).sum();
        let slower = |ground: usize| {
            kinds().map(|kind| self.times[ground][kind] / own[kind]).fold(f64::INFINITY, f64::min)
        };
        let speeds: f64 = self.of_stage.iter().map(|&ground| 1.0 / slower(ground)).sum();
        all / speeds
    }

    /// Least seconds in which the stages have room for all layers of a kind, none of them cut; from below.
    fn by_count(&self, kind: usize) -> f64 {
        let needed = self.counts[kind] as f64;
        let time = |ground: &usize| self.times[*ground][kind];
        let room = |limit: f64| -> f64 {
            self.of_stage.iter().map(|ground| (limit / time(ground) * (1.0 + ROUNDING)).floor()).sum()
        };
        let most = self.of_stage.iter().map(time).fold(0.0, f64::max) * needed;
        if !(most > 0.0 && most.is_finite()) || self.of_stage.iter().any(|ground| time(ground) <= 0.0) {
            return 0.0;
        }
        let (mut low, mut high) = (0.0, most);
        for _ in 0..BISECTIONS {
            let middle = 0.5 * (low + high);
            if room(middle) >= needed { high = middle } else { low = middle }
        }
        low
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Least time of the slowest stage over all ways to cut a sequence of kinds into runs.
    fn brute(times: &[Vec<f64>], kinds: &[usize], of_stage: &[usize]) -> f64 {
        let Some((&ground, rest)) = of_stage.split_first() else {
            return if kinds.is_empty() { 0.0 } else { f64::INFINITY };
        };
        let time = |n: usize| kinds[..n].iter().map(|&kind| times[ground][kind]).sum::<f64>();
        (0..=kinds.len()).map(|n| time(n).max(brute(times, &kinds[n..], rest))).fold(f64::INFINITY, f64::min)
    }

    /// Least time of all stages together over all ways to cut a sequence of kinds into runs, none of which takes longer
    /// than a limit.
    fn brute_total(times: &[Vec<f64>], kinds: &[usize], (of_stage, limit): (&[usize], f64)) -> Option<f64> {
        let Some((&ground, rest)) = of_stage.split_first() else { return kinds.is_empty().then_some(0.0) };
        let time = |n: usize| kinds[..n].iter().map(|&kind| times[ground][kind]).sum::<f64>();
        let fits = (0..=kinds.len()).filter(|&n| time(n) <= limit);
        let total = |n: usize| Some(time(n) + brute_total(times, &kinds[n..], (rest, limit))?);
        fits.filter_map(total).min_by(f64::total_cmp)
    }

    #[test]
    fn a_bubble_beside_full_stages_is_longer() {
        let pieces = Pieces { times: vec![vec![1.0], vec![3.0]], counts: &[8], of_stage: &[0, 1] };
        // Where neither takes more than 6 seconds both are full: 12 in all, and 2 less for every second more.
        assert_eq!(pieces.together(6.0), Together { all: 24.0, falls: 2.0 });
        let work = Work { together: Some(pieces.together(6.0)), ..pieces.work() };
        assert!((work.filled(2, 0.1) - 6.6).abs() < 1e-6);
        // A long bubble is worth a longer slowest stage: at 6.86 seconds the other has half of that, and there is none
        // beside it.
        assert!((work.filled(2, 0.5) - (6.0 + 6.0 / 7.0)).abs() < 1e-6);
    }

    #[test]
    fn devices_of_unequal_speed_share_the_work_as_their_speeds_are() {
        let pieces = Pieces { times: vec![vec![1.0], vec![3.0]], counts: &[8], of_stage: &[0, 1] };
        // 8 layers at speeds 1 and 1/3: 6 seconds each; and 6 layers there, 2 here.
        assert!((pieces.work().slowest - 6.0).abs() < 1e-6);
        assert_eq!(pieces.work().average, 4.0);
    }

    #[test]
    fn layers_are_not_cut() {
        let pieces = Pieces { times: vec![vec![2.0], vec![3.0]], counts: &[2], of_stage: &[0, 1] };
        assert!((pieces.work().slowest - 3.0).abs() < 1e-6);
    }

    proptest! {
        #[test]
        fn no_cut_of_the_layers_is_faster_than_the_bound(
            times in proptest::collection::vec(proptest::collection::vec(0.1..4.0_f64, 3), 2),
            kinds in proptest::collection::vec(0..3_usize, 1..9),
            of_stage in proptest::collection::vec(0..2_usize, 1..4),
        ) {
            let mut counts = vec![0; 3];
            kinds.iter().for_each(|&kind| counts[kind] += 1);
            let pieces = Pieces { times: times.clone(), counts: &counts, of_stage: &of_stage };
            let found = pieces.work();
            let least = brute(&times, &kinds, &of_stage);
            prop_assert!(found.slowest <= least * (1.0 + ROUNDING), "{} of {least}", found.slowest);
            let total: f64 = kinds.iter().map(|&kind| times[0][kind].min(times[1][kind])).sum();
            prop_assert!(found.average * of_stage.len() as f64 <= total * (1.0 + ROUNDING));
            for slowest in [found.slowest, found.slowest * 1.3, found.slowest * 2.0] {
                let Together { all, falls } = pieces.together(slowest);
                for more in [1.0, 1.1, 1.7] {
                    let limit = slowest * more;
                    if let Some(least) = brute_total(&times, &kinds, (&of_stage, limit)) {
                        prop_assert!(all - falls * limit <= least * (1.0 + ROUNDING), "{limit}: {all} {falls} of {least}");
                    }
                }
            }
        }
    }
}
