//! Bounds by what compute covers of what a step sends once.
//!
//! What shows of gradients is at least what they take beyond the backward that they hide behind, and at least a bucket
//! of them; of parameters likewise beside forward. Either is a sum over layers (`clock::Clock::beside`), and any mean
//! of both is a bound: how high, is a concave function of the share of each.

use ir::units::Seconds;

use crate::bound::Bound;
use crate::candidate::{Candidate, Scope};
use crate::clock::{Covers, Spans};
use crate::forms::Forms;
use crate::shelf::{Asked, Bench};

/// A second bound is worked out where at least so much of the first could show of the communication of a step.
const SHOWS: f64 = 0.02;

/// Means of two bounds that are tried, at most.
const MEANS: usize = 2;

/// A mean is tried where it could come to so many times as much.
const WORTH_A_MEAN: f64 = 1.005;

/// Times that both shares are looked for, each beside the other.
const TURNS: usize = 2;

/// A mean of two bounds: of both any mean is a bound, and how high it is, is a concave function of the share of the
/// second.
#[derive(Clone, Copy, Debug)]
struct Mean {
    /// Share of the second.
    part: f64,
    /// Least seconds of the average stage.
    average: f64,
    /// Seconds by which the choices that take so long take longer by the second than by the first.
    rises: f64,
}

impl Mean {
    /// The share between two at which the tangents meet; nothing where they meet no higher than asked.
    fn meets(&self, high: &Self, least: f64) -> Option<f64> {
        if self.rises <= 0.0 || high.rises >= 0.0 {
            return None;
        }
        let above = high.average - self.average + high.rises * (self.part - high.part);
        let from = above / (self.rises - high.rises);
        let part = self.part + from;
        (part > self.part && part < high.part && self.average + self.rises * from > least).then_some(part)
    }
}

/// A bound by what compute covers, and what all layers have once per step by the choices that it is made of.
type At<'b> = &'b mut dyn FnMut(Covers) -> Option<(Bound, Spans)>;

impl Bound {
    /// What compute covers of what a step sends once, as it says and as lower bounds do.
    pub(crate) fn said_covers(&self) -> impl Iterator<Item = Covers> {
        self.other_covers.iter().copied().chain([self.covers])
    }

    /// More that it may cover, as parts of the way from all to the least that one of them says.
    pub(crate) fn covers_between(&self, parts: &[f64]) -> impl Iterator<Item = Covers> {
        let sum = |covers: &Covers| covers.reduce + covers.spread;
        let least = self.said_covers().min_by(|a, b| sum(a).total_cmp(&sum(b))).unwrap_or_default();
        let between = parts.iter().map(move |&part| Covers::default().towards(least, part));
        between.filter(|covers| self.said_covers().all(|said| said != *covers))
    }
}

impl Scope<'_> {
    /// The larger of two bounds by choice problems, with all of what a step sends once covered that can be, and with
    /// all of what takes longer than its compute shown; or a mean of both that is higher.
    pub(crate) fn bound_by(
        &self,
        bench: &Bench<'_>,
        asked: &mut [Asked<'_>],
        of: Forms<'_>,
    ) -> Option<Bound> {
        let p = bench.candidate.n_stages as f64;
        let whole = self.clock(bench.candidate, Covers::default());
        let mut at = self.by_covers(bench, asked, of);
        let (covered, once) = at(Covers::default())?;
        let covers = once.covers();
        if self.clock(bench.candidate, covers) == whole || once.uncovered() / p < SHOWS * covered.time.0 {
            return Some(covered);
        }
        let shown = at(covers)?;
        let (best, others) = self.between(bench.candidate, &mut at, [(covered, once), shown])?;
        Some(Bound { other_covers: others, ..best })
    }

    /// The bound by what compute covers, whatever that is.
    fn by_covers<'q>(
        &'q self,
        bench: &'q Bench<'_>,
        asked: &'q mut [Asked<'_>],
        of: Forms<'q>,
    ) -> impl FnMut(Covers) -> Option<(Bound, Spans)> + 'q {
        let whole = self.clock(bench.candidate, Covers::default());
        let repeated = self.repeated(bench, asked, whole.of_micro_batches());
        move |covers| {
            let clock = self.clock(bench.candidate, covers);
            asked.iter_mut().flatten().for_each(|(_, problem)| problem.set_clock(clock));
            self.bound_of(bench, asked, (of, covers), &repeated)
        }
    }

    /// The highest of two bounds and some means of them, and what compute covers by the others.
    fn between(
        &self,
        candidate: &Candidate,
        at: At<'_>,
        ends: [(Bound, Spans); 2],
    ) -> Option<(Bound, Vec<Covers>)> {
        let [from, to] = [&ends[0].0, &ends[1].0].map(|bound| bound.covers);
        let [first, second] = [from, to].map(|covers| self.clock(candidate, covers));
        let rises = |once: &Spans| (second.seconds(*once) - first.seconds(*once)) / candidate.n_stages as f64;
        let mean = |part: f64, (bound, once): &(Bound, Spans)| Mean {
            part,
            average: bound.work.average,
            rises: rises(once),
        };
        let (mut low, mut high) = (mean(0.0, &ends[0]), mean(1.0, &ends[1]));
        let [(first, _), (second, _)] = ends;
        let (mut best, other) = if second.time > first.time { (second, from) } else { (first, to) };
        let mut others = vec![other];
        for _ in 0..MEANS {
            let Some(part) = low.meets(&high, best.work.average * WORTH_A_MEAN) else { break };
            let found = at(from.towards(to, part))?;
            let mean = mean(part, &found);
            if mean.rises > 0.0 {
                low = mean
            } else {
                high = mean
            }
            if found.0.time > best.time {
                others.push(best.covers);
                best = found.0;
            }
        }
        Some((best, others))
    }

    /// A bound of a candidate on one ground that is closer than another: gradients and parameters show in shares of
    /// their own, and both sides of what is tied use it in one way. It takes several times as long.
    pub(crate) fn bound_closely(&self, candidate: &Candidate, known: &Bound, of: Forms<'_>) -> Seconds {
        let bench = self.bench(candidate);
        let given = self.given_fastest();
        let mut asked: Vec<Asked<'_>> =
            (0..self.forms.len()).map(|kind| self.asked(&bench, kind, &given, of)).collect();
        let mut at = self.by_covers(&bench, &mut asked, of);
        let mut best = known.clone();
        for turn in 0..2 * TURNS {
            let with = |cover: f64| match turn % 2 {
                0 => Covers { reduce: cover, ..best.covers },
                _ => Covers { spread: cover, ..best.covers },
            };
            let (Some(from), Some(to)) = (at(with(1.0)), at(with(0.0))) else { break };
            let Some((found, _)) = self.between(candidate, &mut at, [from, to]) else { break };
            if found.time > best.time {
                best = found;
            }
        }
        best.time + Seconds(self.more_where_tied(&bench, best.covers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_of_two_bounds_is_higher_than_either() {
        // Three choices, by the first bound and by the second: the third is neither's.
        let choices = [(10.0, 20.0), (19.0, 11.0), (14.0, 14.5)];
        let at = |part: f64| {
            let mean = |&(first, second): &(f64, f64)| first + (second - first) * part;
            let least = choices.iter().min_by(|a, b| mean(a).total_cmp(&mean(b))).unwrap();
            Mean { part, average: mean(least), rises: least.1 - least.0 }
        };
        let (low, high) = (at(0.0), at(1.0));
        let part = low.meets(&high, high.average * WORTH_A_MEAN).unwrap();
        // 10 + 10 x = 19 - 8 x.
        assert_eq!((low.average, high.average, part), (10.0, 11.0, 0.5));
        assert_eq!(at(part).average, 14.25);
        // No share promises a third more, and of two bounds that rise or fall together none does.
        assert_eq!(low.meets(&high, 20.0), None);
        assert_eq!(high.meets(&low, 0.0), None);
    }
}
