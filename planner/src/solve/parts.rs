//! The cheapest combination, in parts where elimination at once would make tables too large.
//!
//! Axes of one size that join the same links may change places in every choice, so of a layer with many operators on
//! three of them dozens of combinations are equally cheap and few classes can be closed. The open classes of a node in
//! the largest table are then halved, those whose bounds are lower first, and each part is narrowed by itself below the
//! best so far (Land and Doig 1960).

use super::bucket;
use super::narrow::{Aim, Moved, TOLERANCE};
use super::weighed::Weighed;

/// Values that are looked up to eliminate all nodes, up to which that is done at once: some hundredths of a second.
pub(super) const MOST_WORK: f64 = 4e6;

/// The cheapest combination of a narrowed problem and its cost, of which a part that takes more than so much work is
/// halved. `None` where every combination is forbidden.
///
/// Among equals the first that is found.
pub(super) fn cheapest(narrowed: Moved, most_work: f64) -> Option<(f64, Vec<usize>)> {
    let mut best: Option<(f64, Vec<usize>)> = None;
    let mut parts: Vec<Weighed> = Vec::new();
    let mut next = Some(narrowed);
    loop {
        if let Some(moved) = next {
            match bucket::heaviest(&moved.weighed, most_work) {
                Some(node) => parts.extend(moved.halves(node)),
                None => {
                    let choices = moved.weighed.choices.clone();
                    let found = bucket::cheapest(moved.weighed);
                    if let Some((value, classes)) = found
                        && best.as_ref().is_none_or(|(known, _)| value < *known)
                    {
                        let choice = |(node, &class): (usize, &usize)| choices[node][class];
                        best = Some((value, classes.iter().enumerate().map(choice).collect()));
                    }
                }
            }
        }
        let Some(part) = parts.pop() else { return best };
        let below = best.as_ref().map_or(f64::INFINITY, |(known, _)| known - TOLERANCE * known.abs());
        next = Moved::new(part).narrow(Aim::CheapestBelow(below));
    }
}
