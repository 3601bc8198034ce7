//! What other choices of layers inside the candidates that were worked out could come to.
//!
//! A candidate whose fastest choices overflow memory is worked out by some of the choices that fit. What all of them could
//! come to is its bound in the memory that there is: asked of those alone whose bounds are the least, once the best
//! is known.

use ir::units::Seconds;
use rayon::prelude::*;

use crate::forms::Forms;
use crate::frontier::Frontier;
use crate::optimize::{BATCH, BOUND_SLACK};

/// Times that the candidates with the least bounds are asked again.
const ROUNDS: usize = 2;

/// What candidates could come to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Inside {
    /// The least of all.
    pub(crate) least: Option<Seconds>,
    /// Those that could be faster than the limit, the most promising first.
    pub(crate) promising: Vec<usize>,
}

/// What some candidates could come to, as far as that is less than a limit.
pub(crate) fn inside(frontier: &Frontier<'_>, worked_out: &[usize], (of, limit): (Forms<'_>, f64)) -> Inside {
    let by_bound =
        |list: &mut Vec<(f64, usize)>| list.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut open: Vec<(f64, usize)> = worked_out.iter().map(|&at| (frontier.least(at), at)).collect();
    let mut asked: Vec<(f64, usize)> = Vec::new();
    by_bound(&mut open);
    for _ in 0..ROUNDS {
        let known = asked.iter().map(|(least, _)| *least).fold(limit, f64::min);
        let n_least = open.iter().take(BATCH).take_while(|(least, _)| *least < known).count();
        let found = open.par_drain(..n_least);
        let found = found.map(|(least, at)| (in_memory(frontier, at, of, limit).max(least), at));
        asked.extend(found.collect::<Vec<_>>());
    }
    let mut all = [asked, open].concat();
    by_bound(&mut all);
    let least = all.first().filter(|(least, _)| least.is_finite());
    Inside {
        least: least.map(|(least, _)| Seconds(least * BOUND_SLACK)),
        promising: all.iter().take_while(|(least, _)| *least < limit).map(|(_, at)| *at).collect(),
    }
}

/// What a candidate could come to in the memory that there is, looked for up to a limit; 0 where memory says nothing.
fn in_memory(frontier: &Frontier<'_>, at: usize, of: Forms<'_>, limit: f64) -> f64 {
    let (scope, candidate) = (frontier.scope(), frontier.at(at));
    let room = |bound| scope.bound_in_room((candidate, bound), candidate, (of, Seconds(limit)));
    frontier.own(at).and_then(room).map_or(0.0, |time| time.0)
}
