//! Which of several outcomes nothing beats: those that no other is at least as good as in everything and better in one.

/// Positions of the outcomes that are not dominated, in order. Smaller is better; of equal ones the first stays.
///
/// `a` dominates `b` if `a[k] <= b[k]` for every `k`, and `a[k] < b[k]` for one. (1, 3) and (2, 2) stay, (2, 4) goes.
pub fn non_dominated(outcomes: &[Vec<f64>]) -> Vec<usize> {
    let no_worse = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| a <= b);
    let beaten = |at: usize| {
        let mine = &outcomes[at];
        let beats = |(other, its): (usize, &Vec<f64>)| no_worse(its, mine) && (its != mine || other < at);
        outcomes.iter().enumerate().any(beats)
    };
    (0..outcomes.len()).filter(|&at| !beaten(at)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_worse_in_everything_goes() {
        let outcomes = [vec![1.0, 3.0], vec![2.0, 4.0], vec![2.0, 2.0], vec![1.0, 3.0], vec![3.0, 1.0]];
        assert_eq!(non_dominated(&outcomes), [0, 2, 4]);
    }

    proptest! {
        #[test]
        fn whatever_goes_is_beaten_by_something_that_stays(points in prop::collection::vec(prop::collection::vec(0_u8..6, 3), 1..40)) {
            let points: Vec<Vec<f64>> = points.iter().map(|one| one.iter().map(|&x| f64::from(x)).collect()).collect();
            let stay = non_dominated(&points);
            prop_assert!(!stay.is_empty());
            let covers = |a: &Vec<f64>, b: &Vec<f64>| a.iter().zip(b).all(|(a, b)| a <= b);
            for (at, point) in points.iter().enumerate() {
                let by_others = stay.iter().filter(|&&other| other != at && covers(&points[other], point)).count();
                prop_assert_eq!(stay.contains(&at), by_others == 0);
            }
        }
    }
}
