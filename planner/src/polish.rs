//! What is done for the best candidates once all are worked out: all forms of their layers, then in these more prices
//! of memory and one storage for all parameters, fewer axes.

use std::collections::BTreeSet;
use std::ops::Range;

use rayon::prelude::*;

use crate::arrange::{Arranged, fastest};
use crate::asking::{Asking, Way, ways};
use crate::bound::Bound;
use crate::candidate::{Candidate, Scope};
use crate::enumerate::takes_finest;
use crate::evaluate::ROUNDS;
use crate::forms::Forms;
use crate::found::{Misnamed, Tally};
use crate::given::{HomeRule, RecomputeRule};
use crate::request::Stop;
use crate::shapes::{Facts, Shape, shapes, without_names};
use crate::work_out::BATCH;
use ir::units::Seconds;

/// Candidates that are worked out again with all forms of their layers, at most.
const MAX_FORMS_CHOSEN: u64 = 16;

/// The same where bounds are those of the leading forms.
const MAX_LEADING_FORMS_CHOSEN: u64 = 2;

/// Candidates that try more prices of memory, and storages for all parameters, at most.
const MAX_REFINED: usize = 4;

/// Of a search that is of interest only if it undercuts something, what takes more than so many times that tries them
/// only if one before it gained as much by them: of 48 candidates a quarter did.
const GAINED: f64 = 1.02;

/// They take no more than so many times the best.
pub(crate) const NEAR_BEST: f64 = 1.05;

/// The same where memory is crowded: prices between those that were tried gain more there than a storage for all does.
const NEAR_BEST_CROWDED: f64 = 1.1;

/// The same where hosts may hold what devices do: their memory has a price too, so that the first prices miss more.
const NEAR_BEST_ON_HOSTS: f64 = 1.25;

/// More prices of memory are tried where the fastest choices take at least so much of it, buffers apart.
pub(crate) const CROWDED: f64 = 0.6;

/// Where memory is free, prices of choices miss something of a candidate that takes so many times its bound: launches.
const MISSED: f64 = 1.1;

/// Layers move between stages where a step has up to so many times as many micro-batches: where more, only the longest
/// stage matters, for which cuts are made.
const MOST_TO_SHIFT: u64 = 4;

/// Pipelines whose layers move, at most.
const MAX_SHIFTED: usize = 16;

/// Candidates whose parameters are all stored alike, at most; that chooses nothing else again, so that it takes little.
const MAX_CHANGED: usize = 16;

/// They take no more than so many times the best: a step became up to 1.16 times as fast by it.
const NEAR_BEST_TO_CHANGE: f64 = 1.25;

/// They take no more than so many times the best: a step became up to 1.25 times as fast by it.
pub(crate) const NEAR_BEST_TO_SHIFT: f64 = 1.1;

/// Times that differ by no more than this fraction are those of the same plan: sums in another order.
const SAME: f64 = 1e-6;

/// A candidate that was worked out, and its bound.
pub(crate) struct Worked {
    pub(crate) arranged: Arranged,
    pub(crate) bound: Bound,
    /// What all its layers have in common, where that was found to be faster.
    pub(crate) way: Way,
    /// Whether other ways were asked about.
    pub(crate) is_asked_in_ways: bool,
    /// Per kind, the form that was found among all; nothing where they were not asked.
    pub(crate) forms: Option<Vec<usize>>,
    /// Whether more prices of memory and storages were tried.
    pub(crate) is_refined: bool,
}

impl Worked {
    /// In some way, in the leading forms of layers, at the first prices of memory.
    pub(crate) fn new(arranged: Arranged, bound: Bound, way: Way) -> Self {
        Self { arranged, bound, way, is_asked_in_ways: false, forms: None, is_refined: false }
    }

    /// Times that more prices of memory are worth a try.
    fn rounds(&self) -> usize {
        if self.bound.crowding < CROWDED { 0 } else { ROUNDS }
    }

    /// What it could take in fused forms, if they save so many times what their prices do, and all that devices wait
    /// for launches, which prices do not see.
    fn fused(&self, factor: f64) -> Seconds {
        self.arranged.step_time() - self.bound.saving * factor - self.arranged.waiting()
    }

    /// The forms in which it is worked out further.
    fn own_forms(&self) -> Forms<'_> {
        self.forms.as_deref().map_or(Forms::Leading, Forms::Chosen)
    }
}

/// Improves the best of what was worked out, the fastest first. Where it is of interest only if it undercuts something,
/// and does not yet, it is given up as soon as it hardly can.
pub(crate) fn polish(
    scope: &Scope<'_>,
    worked: &mut Vec<Worked>,
    (undercuts, tally): (Option<Seconds>, &mut Tally),
    stop: Stop<'_>,
) {
    let of = if tally.bounds_leading { Forms::Leading } else { Forms::All };
    keep_distinct(worked);
    // On fewer axes layers choose other forms, though they take as long before.
    look_coarser((scope, of), worked, tally, stop);
    choose_forms(scope, worked, tally, stop);
    refine(scope, worked, undercuts);
    // What was refined in one form may have come closer to the best than others save.
    choose_forms(scope, worked, tally, stop);
    store_alike(scope, worked);
    blend(scope, worked);
    simplify(scope, worked);
    shift(scope, worked);
}

/// Keeps the fastest first; equals in the order in which they came.
pub(crate) fn insert(ranking: &mut Vec<Worked>, one: Worked) {
    let time = one.arranged.step_time();
    let at = ranking.partition_point(|known| known.arranged.step_time() <= time);
    ranking.insert(at, one);
}

/// The fastest first; equals stay in their order.
pub(crate) fn by_time(worked: &mut [Worked]) {
    worked.sort_by(|a, b| a.arranged.step_time().0.total_cmp(&b.arranged.step_time().0));
}

/// Keeps the first of those that are the same plan: meshes whose axes are used alike.
pub(crate) fn keep_distinct(worked: &mut Vec<Worked>) {
    let mut known = BTreeSet::new();
    worked.retain(|Worked { arranged: Arranged { candidate, step, .. }, .. }| {
        known.insert((candidate.n_stages, candidate.micro_batch, step.time.0.to_bits()))
    });
}

/// Works candidates out once more that by their bounds could be faster than the best, where layers compute as much
/// again as each other. Prices weigh what a layer holds all the time, not what it needs while it runs: where that is
/// much, choices that no price makes are faster. More prices, and one storage for all parameters, gained nothing in 164
/// questions and took four fifths of the time.
pub(crate) fn reconsider(
    scope: &Scope<'_>,
    worked: &mut Vec<Worked>,
    promising: &[(Candidate, Bound)],
    best: Seconds,
) {
    let pins = &scope.request.pins;
    let is_free = pins.recompute.is_none() && pins.forbid.recompute.is_empty() && pins.constraints.is_empty();
    if !is_free {
        return;
    }
    let limit = worked.first().map_or(best, |one| one.arranged.step_time().min(best)).0;
    let each = [RecomputeRule::AttentionOnly, RecomputeRule::Always].map(|rule| Asking {
        limit,
        way: Way::again(rule),
        rounds: ROUNDS,
        ..Asking::of(Forms::Leading)
    });
    let found: Vec<Vec<(Way, Option<Arranged>)>> = promising
        .par_iter()
        .with_max_len(1)
        .map(|(candidate, bound)| scope.evaluate_in(candidate, bound, &each))
        .collect();
    let found = promising.iter().zip(found).flat_map(|((_, bound), found)| {
        let worked = |(way, found): (Way, Option<Arranged>)| {
            Some(Worked { is_refined: true, ..Worked::new(found?, bound.clone(), way) })
        };
        found.into_iter().filter_map(worked)
    });
    for one in found.filter(|one| one.arranged.step_time().0 < limit) {
        let is_same = |known: &Worked| known.arranged.candidate == one.arranged.candidate;
        let known = worked.iter().position(is_same);
        if known.is_none_or(|at| one.arranged.is_worth_it(&worked[at].arranged)) {
            if let Some(at) = known {
                worked.remove(at);
            }
            insert(worked, one);
        }
    }
}

/// Lets the best candidates try more prices of memory, and storages that are the same for all parameters: what is
/// gathered and reduced in buckets over a stage hides better than a parameter alone, which is what choices inside
/// layers go by. Where something must be undercut, one by one until one does.
fn refine(scope: &Scope<'_>, worked: &mut [Worked], undercuts: Option<Seconds>) {
    let n_refined = worked.len().min(MAX_REFINED);
    let (mut next, mut gained) = (0, GAINED);
    while let Some(limit) = undercuts.filter(|_| next < n_refined) {
        let before = worked[next].arranged.step_time();
        if before > limit * gained {
            next = n_refined;
            break;
        }
        refine_some(scope, worked, next..next + 1);
        let now = worked[next].arranged.step_time();
        gained = gained.max(before / now);
        next += 1;
        if now < limit {
            break;
        }
    }
    refine_some(scope, worked, next..n_refined);
    by_time(worked);
}

/// The same of some of them, all at once.
fn refine_some(scope: &Scope<'_>, worked: &mut [Worked], some: Range<usize>) {
    let best = worked.first().map_or(0.0, |one| one.arranged.step_time().0);
    let ways: Vec<Way> = ways(&scope.request.pins).collect();
    let crowded =
        if scope.given().parameters == HomeRule::Device { NEAR_BEST_CROWDED } else { NEAR_BEST_ON_HOSTS };
    // With as many prices as before and storages as they pay it is what it was.
    let is_new = |one: &Worked, way: Way| {
        let near = match way.storage {
            None if one.rounds() == 0 => return false,
            None => crowded,
            Some(_) => NEAR_BEST,
        };
        one.arranged.step_time().0 <= best * near
    };
    let found: Vec<Vec<(Way, Option<Arranged>)>> = worked[some.clone()]
        .par_iter()
        .with_max_len(1)
        .map(|one| {
            let ways = ways.iter().copied().filter(|&way| is_new(one, way));
            let asked = |way: Way| {
                // Prices between those in use go on from the fastest so far, and a limit changes which that is.
                let (forms, limit) = match way.storage {
                    None if one.forms.is_some() => (Forms::All, f64::INFINITY),
                    None | Some(_) => (one.own_forms(), one.arranged.step_time().0),
                };
                Asking { limit, way, rounds: one.rounds(), ..Asking::of(forms) }
            };
            let each: Vec<Asking<'_>> = ways.map(asked).collect();
            scope.evaluate_in(&one.arranged.candidate, &one.bound, &each)
        })
        .collect();
    for (at, (way, found)) in
        some.zip(found).flat_map(|(at, found)| found.into_iter().map(move |one| (at, one)))
    {
        worked[at].is_refined = true;
        let is_better = |found: &Arranged| match way.storage {
            None if worked[at].forms.is_some() => found.step_time() < worked[at].arranged.step_time(),
            None | Some(_) => found.is_worth_it(&worked[at].arranged),
        };
        if let Some(found) = found.filter(is_better) {
            (worked[at].arranged, worked[at].way) = (found, way);
        }
    }
}

/// Whether micro-batches are so few that layers may be worth moving between stages.
pub(crate) fn are_few(candidate: &Candidate) -> bool {
    candidate.n_stages > 1 && candidate.n_micro_batches <= MOST_TO_SHIFT * candidate.n_stages
}

/// Lets layers of the best pipelines move between their stages, as far as micro-batches are few.
fn shift(scope: &Scope<'_>, worked: &mut [Worked]) {
    let best = worked.first().map_or(0.0, |one| one.arranged.step_time().0);
    let is_asked = |one: &Worked| {
        are_few(&one.arranged.candidate)
            && scope.may_shift(&one.arranged)
            && one.arranged.step_time().0 <= best * NEAR_BEST_TO_SHIFT
    };
    let first = worked.len().min(MAX_SHIFTED);
    let found: Vec<Option<Arranged>> = worked[..first]
        .par_iter()
        .with_max_len(1)
        .map(|one| {
            let (way, rounds) = (one.way, if one.is_refined { one.rounds() } else { 0 });
            let asked = Asking { way, rounds, shifts: true, ..Asking::of(one.own_forms()) };
            is_asked(one).then(|| scope.evaluate_below(&one.arranged.candidate, &one.bound, asked).ok())?
        })
        .collect();
    for (one, found) in worked.iter_mut().zip(found) {
        if let Some(found) = found.filter(|found| found.is_worth_it(&one.arranged)) {
            one.arranged = found;
        }
    }
    by_time(worked);
}

/// Lets the candidates that fused layers could make the best choose among all forms of their layers.
fn choose_forms(scope: &Scope<'_>, worked: &mut [Worked], tally: &mut Tally, stop: Stop<'_>) {
    let most = if tally.bounds_leading { MAX_LEADING_FORMS_CHOSEN } else { MAX_FORMS_CHOSEN };
    // Programs of fused forms have fewer launches too, which prices miss: the most that some were seen to save.
    let mut factor: f64 = 1.0;
    loop {
        let limit = worked.first().map_or(0.0, |best| best.arranged.step_time().0);
        let could =
            |one: &Worked| one.forms.is_none() && (tally.bounds_leading || one.fused(factor).0 < limit);
        let open: Vec<usize> = (0..worked.len()).filter(|&at| could(&worked[at])).collect();
        let stopped = !open.is_empty() && stop.now(tally.work);
        if stopped {
            tally.stopped = true;
            let least = open.iter().map(|&at| worked[at].fused(factor)).chain(tally.open_bound);
            tally.open_bound = least.min_by(|a, b| a.0.total_cmp(&b.0));
        }
        if open.is_empty() || tally.n_forms_chosen >= most || stopped {
            tally.n_forms_open = open.len() as u64;
            return;
        }
        let batch: Vec<usize> = open.into_iter().take(BATCH.min(most as usize)).collect();
        tally.n_forms_chosen += batch.len() as u64;
        tally.work += 1;
        let found: Vec<Option<Arranged>> =
            batch.par_iter().map(|&at| in_all_forms(scope, &worked[at])).collect();
        for (at, found) in batch.into_iter().zip(found) {
            let one = &mut worked[at];
            if let Some(found) = found.filter(|found| found.step_time() < one.arranged.step_time()) {
                let saved = one.arranged.step_time() - found.step_time();
                if one.bound.saving.0 > 0.0 {
                    factor = factor.max(saved / one.bound.saving);
                }
                one.arranged = found;
            }
            one.forms = Some(scope.main_forms(&one.arranged));
        }
        by_time(worked);
    }
}

/// A candidate with all forms of its layers, and with what all its parameters keep to, if anything: what pays with one
/// form need not with another.
fn in_all_forms(scope: &Scope<'_>, one: &Worked) -> Option<Arranged> {
    let rounds = if one.is_refined { one.rounds() } else { 0 };
    let with = |way| {
        let asked = Asking { way, rounds, ..Asking::of(Forms::All) };
        scope.evaluate_below(&one.arranged.candidate, &one.bound, asked).ok()
    };
    let stored = one.way.storage.and_then(|_| with(one.way));
    // Nor what is the best of one form's choices where something of what a step sends shows.
    let covering = Way { storage: None, ..one.way };
    let plain = Way { covers: None, stream: None, ..covering };
    let plainly = (plain != covering).then(|| with(plain)).flatten();
    fastest(with(covering).into_iter().chain(stored).chain(plainly))
}

/// Works the best out on meshes that were left out for theirs, where choices are made by prices that miss something:
/// with fewer choices others are made. What has the degrees that are pinned only in fused forms of its layers chooses
/// these among itself.
fn look_coarser(
    (scope, of): (&Scope<'_>, Forms<'_>),
    worked: &mut Vec<Worked>,
    tally: &mut Tally,
    stop: Stop<'_>,
) {
    let best = worked.first().map_or(0.0, |one| one.arranged.step_time().0);
    let is_near = |one: &&Worked| one.arranged.step_time().0 <= best * NEAR_BEST * MISSED;
    let misses =
        |one: &&Worked| one.bound.crowding < CROWDED && one.arranged.step_time() > one.bound.time * MISSED;
    let near = worked.iter().take_while(is_near).filter(misses).take(MAX_REFINED);
    let mut coarser: Vec<Candidate> = near.flat_map(|one| coarser(scope, &one.arranged.candidate)).collect();
    coarser.dedup();
    let asked = Asking { limit: best, ..Asking::of(Forms::Leading) };
    let found: Vec<Option<Worked>> =
        coarser.into_par_iter().map(|candidate| work_out(scope, &candidate, of, asked)).collect();
    let (mut misnamed, named): (Vec<Worked>, Vec<Worked>) =
        found.into_iter().flatten().partition(|one| is_misnamed(scope, one));
    by_time(&mut misnamed);
    choose_forms(scope, &mut misnamed, tally, stop);
    misnamed.retain(|one| !is_misnamed(scope, one));
    misnamed.into_iter().chain(named).for_each(|one| insert(worked, one));
}

/// Whether it has not the degrees that are pinned.
fn is_misnamed(scope: &Scope<'_>, one: &Worked) -> bool {
    Misnamed::of(scope, &one.arranged).is_some()
}

/// A candidate on the meshes that were left out for its own, those with the fewest axes first.
fn coarser(scope: &Scope<'_>, candidate: &Candidate) -> Vec<Candidate> {
    let request = scope.request;
    // Where degrees are pinned or ruled out, free axes are those of a plan that comes to them, or to others.
    let pins = without_names(&request.pins);
    let pins = pins.as_ref().unwrap_or(&request.pins);
    if !takes_finest(request, pins) || !candidate.meshes.is_empty() {
        return Vec::new();
    }
    let facts = Facts::of(request);
    let own = &candidate.shape;
    // What an axis is barred from by the degrees that are asked for, those that it is made of are.
    let barred = |shape: Shape| Some(Shape { barred: own.joined_bars(&shape)?, ..shape });
    let all = shapes(own.mesh.n_devices(), facts, pins).into_iter().filter_map(barred);
    let mut coarser: Vec<Shape> = all.filter(|shape| own.covers(shape, facts.node)).collect();
    coarser.sort_by_key(|shape| shape.mesh.axes.len());
    coarser.dedup();
    coarser.into_iter().map(|shape| Candidate { shape, ..candidate.clone() }).collect()
}

/// Stores all parameters of what is near the best alike, where that is worth it.
fn store_alike(scope: &Scope<'_>, worked: &mut [Worked]) {
    change_near_best(worked, |one| scope.stored_alike(&one.arranged));
}

/// Blends layers of what is near the best, where that is worth it.
fn blend(scope: &Scope<'_>, worked: &mut [Worked]) {
    let Some(best) = worked.first().map(|one| one.arranged.step_time()) else { return };
    change_near_best(worked, |one| scope.blended((&one.arranged, &one.bound), one.own_forms(), best));
}

/// Puts something else in the place of what is near the best, where that is worth it.
fn change_near_best(worked: &mut [Worked], change: impl Fn(&Worked) -> Option<Arranged> + Sync + Send) {
    let best = worked.first().map_or(0.0, |one| one.arranged.step_time().0);
    let is_near = |one: &&Worked| one.arranged.step_time().0 <= best * NEAR_BEST_TO_CHANGE;
    let n_near = worked.iter().take(MAX_CHANGED).take_while(is_near).count();
    let found: Vec<Option<Arranged>> = worked[..n_near].par_iter().with_max_len(1).map(change).collect();
    for (one, found) in worked.iter_mut().zip(found) {
        if let Some(found) = found.filter(|found| found.is_worth_it(&one.arranged)) {
            one.arranged = found;
        }
    }
    by_time(worked);
}

/// Puts the best on fewer axes, and what is near it where devices wait for launches: with fewer choices others are
/// made, which may have fewer of them.
fn simplify(scope: &Scope<'_>, worked: &mut [Worked]) {
    let best = worked.first().map_or(0.0, |one| one.arranged.step_time().0);
    let is_asked =
        |at: usize, one: &Arranged| at == 0 || one.step_time().0 <= best * NEAR_BEST && one.waits_much();
    for (at, one) in worked.iter_mut().enumerate().take(MAX_REFINED) {
        if is_asked(at, &one.arranged)
            && let Some(simpler) = on_fewer_axes(scope, one)
        {
            *one = simpler;
        }
    }
    by_time(worked);
}

/// What was found, on the mesh with the fewest axes on which it takes no longer: where axes are used alike, whoever
/// reads the plan need not see that they are several.
fn on_fewer_axes(scope: &Scope<'_>, found: &Worked) -> Option<Worked> {
    let limit = found.arranged.step_time().0 * (1.0 + SAME);
    let rounds = found.rounds();
    let on = |candidate: Candidate| {
        let stream = match found.way.stream {
            Some(stream) => Some(found.arranged.candidate.shape.joined(&candidate.shape, stream)?),
            None => None,
        };
        let way = Way { stream, ..found.way };
        let asked = Asking { limit, way, rounds, ..Asking::of(found.own_forms()) };
        let on_fewer = work_out(scope, &candidate, Forms::Leading, asked)?;
        let is_as_fast = on_fewer.arranged.step_time().0 <= limit && !is_misnamed(scope, &on_fewer);
        // Layers that move afterwards keep the forms that were chosen.
        let (forms, is_refined) = (found.forms.clone(), found.is_refined);
        is_as_fast.then_some(Worked { forms, is_refined, ..on_fewer })
    };
    coarser(scope, &found.arranged.candidate).into_par_iter().find_map_first(on)
}

/// A candidate that nobody has a bound of yet.
fn work_out(scope: &Scope<'_>, candidate: &Candidate, of: Forms<'_>, asked: Asking<'_>) -> Option<Worked> {
    let bound = scope.bound(candidate, of)?;
    let arranged = scope.evaluate_below(candidate, &bound, asked).ok()?;
    Some(Worked::new(arranged, bound, asked.way))
}
