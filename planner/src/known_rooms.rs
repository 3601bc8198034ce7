//! What layers take at least in the memory that there is, left by one search to the next of the same question under
//! other schedules.
//!
//! Wherever embedding and head stand, it depends on a schedule by nothing but how many micro-batches are in flight on
//! every stage, so what was found for one holds for all that have no fewer: most candidates that were too slow under
//! 1F1B are so at once under schedules that split backward.

use std::cmp::Ordering;

use crate::bound::Work;
use crate::candidate::Candidate;
use crate::known_bounds::ByCandidate;

/// Least work of a candidate in the memory that there is, in schedules that hold no less than so much.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WorkInRoom {
    /// Sequences in flight per stage, ascending.
    in_flight: Vec<f64>,
    pub(crate) work: Work,
}

impl WorkInRoom {
    /// In schedules that have no fewer micro-batches of a candidate in flight.
    pub(crate) fn new(candidate: &Candidate, in_flight: &[f64], work: Work) -> Self {
        Self { in_flight: sequences(candidate, in_flight), work }
    }

    /// Whether it holds where so many sequences are in flight.
    fn is_of(&self, in_flight: &[f64]) -> bool {
        let holds = |(least, own): (&f64, &f64)| *own >= *least;
        self.in_flight.len() == in_flight.len() && self.in_flight.iter().zip(in_flight).all(holds)
    }
}

/// Sequences in flight per stage, ascending.
fn sequences(candidate: &Candidate, in_flight: &[f64]) -> Vec<f64> {
    let mut all: Vec<f64> = in_flight.iter().map(|flight| flight * candidate.micro_batch as f64).collect();
    all.sort_by(f64::total_cmp);
    all
}

/// What was found so far, on stages that stand on one ground.
#[derive(Default)]
pub(crate) struct KnownRooms(ByCandidate<Vec<WorkInRoom>>);

impl KnownRooms {
    /// Keeps what is known of a candidate.
    pub(crate) fn keep(&self, candidate: &Candidate, works: &[WorkInRoom]) {
        if !works.is_empty() {
            self.0.change(candidate, |known| known.extend_from_slice(works));
        }
    }

    /// What is known of a candidate.
    pub(crate) fn of(&self, candidate: &Candidate) -> Option<Vec<WorkInRoom>> {
        self.0.of(candidate)
    }
}

/// The most that is known of a candidate in schedules with so many micro-batches in flight on its stages.
pub(crate) fn most_work(known: &[WorkInRoom], candidate: &Candidate, in_flight: &[f64]) -> Option<Work> {
    let in_flight = sequences(candidate, in_flight);
    let by_work = |a: &Work, b: &Work| -> Ordering {
        a.average.total_cmp(&b.average).then(a.slowest.total_cmp(&b.slowest))
    };
    known.iter().filter(|one| one.is_of(&in_flight)).map(|one| one.work).max_by(by_work)
}

#[cfg(test)]
mod tests {
    use ir::mesh::Mesh;

    use super::*;
    use crate::shapes::Shape;
    use crate::space::AxisRule;

    #[test]
    fn what_holds_for_few_in_flight_holds_for_more() {
        let mesh = Mesh::of_sizes(&[2]).unwrap();
        let shape = Shape { mesh, rules: vec![AxisRule::Free], data_degree: 1, barred: Vec::new() };
        let candidate =
            Candidate { shape, meshes: Vec::new(), n_stages: 2, micro_batch: 4, n_micro_batches: 8 };
        let work = |average: f64| Work { average, ..Work::default() };
        let known = KnownRooms::default();
        known.keep(&candidate, &[WorkInRoom::new(&candidate, &[2.0, 1.0], work(3.0))]);
        known.keep(&candidate, &[WorkInRoom::new(&candidate, &[2.5, 2.5], work(5.0))]);
        let works = known.of(&candidate).unwrap();
        let of = |in_flight: [f64; 2]| most_work(&works, &candidate, &in_flight).map(|work| work.average);
        // The order of the stages does not matter, for any may hold any layers.
        assert_eq!(of([1.0, 2.0]), Some(3.0));
        assert_eq!(of([2.4, 2.5]), Some(3.0));
        assert_eq!(of([2.5, 3.0]), Some(5.0));
        assert_eq!(of([1.0, 1.5]), None);
        let other = Candidate { micro_batch: 8, n_micro_batches: 4, ..candidate.clone() };
        assert_eq!(known.of(&other), None);
    }
}
