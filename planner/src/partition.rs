//! Stages: which layers on which rank, at which price of memory, so that the slowest chunk is as fast as can be.
//!
//! Greedy for a given limit on a chunk's time, bisection on the limit between those at which some chunk would take a
//! layer more: for chunks of consecutive layers this finds the least limit, since a chunk that takes more layers never
//! hurts those behind it. Where chunks stand on different devices the result is the limit of a dynamic program over all
//! cuts, which is exact also where a chunk with more layers fits in a faster way. Embedding, head and loss are layers
//! like any other and count with their own time and memory.

use crate::flights::Flight;
use crate::levels::{Chunk, Levels};

/// Where a chunk runs: what layers cost there, and how much memory they may take.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Costs of the layers of the model there.
    pub levels: &'a Levels,
    /// Micro-batches that it holds something of.
    pub flight: Flight,
    /// What the chunk may take.
    pub capacity: f64,
    /// Where it shares that with other chunks: the device, and how many of them come behind it.
    pub shared: Option<(usize, u32)>,
}

/// Bytes of the chunks that a device has so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Used {
    /// Of all together.
    pub(crate) lasting: f64,
    /// Of the one that needs most while it runs.
    pub(crate) passing: f64,
}

impl Used {
    /// With one more chunk.
    pub(crate) fn and(self, chunk: &Chunk) -> Self {
        Self { lasting: self.lasting + chunk.lasting, passing: self.passing.max(chunk.passing) }
    }

    /// At the peak.
    pub(crate) fn all(self) -> f64 {
        self.lasting + self.passing
    }
}

/// What the chunks so far use of every device that several share, by its number.
#[derive(Debug, Default)]
struct Devices(Vec<Used>);

impl Devices {
    fn beside(&self, place: &Place<'_>) -> Used {
        place.shared.and_then(|(device, _)| self.0.get(device).copied()).unwrap_or_default()
    }

    fn add(&mut self, place: &Place<'_>, chunk: &Chunk) {
        if let Some((device, _)) = place.shared {
            if device >= self.0.len() {
                self.0.resize(device + 1, Used::default());
            }
            self.0[device] = self.0[device].and(chunk);
        }
    }
}

impl Place<'_> {
    fn chunk_beside(&self, from: usize, to: usize, used: Used) -> Option<Chunk> {
        let later = self.shared.map_or(0.0, |(_, later)| f64::from(later));
        self.levels.chunk_beside(from, to, (self.flight, self.capacity), (used, later))
    }

    fn n_layers(&self) -> usize {
        self.levels.kinds.len()
    }
}

/// Cuts the layers into chunks, one per place, with the least time of the slowest. No chunk goes past one of the
/// `ends`, which rise.
///
/// `None` where some chunk cannot fit.
pub fn partition(places: &[Place<'_>], ends: &[usize]) -> Option<Vec<Chunk>> {
    let n_layers = places.first()?.n_layers();
    if places.len() > n_layers {
        return None;
    }
    let all = |levels: &Levels, level: usize| levels.sum(0, n_layers, level, |cost| cost.time);
    let slowest = |place: &Place<'_>| {
        (0..place.levels.costs.len()).map(|level| all(place.levels, level)).fold(0.0, f64::max)
    };
    let high = places.iter().map(slowest).fold(0.0, f64::max) * 2.0;
    if places.iter().all(|place| std::ptr::eq(place.levels, places[0].levels)) {
        return bisected((places, ends), high);
    }
    let known = bisected((places, ends), high);
    let limit =
        known.as_ref().map_or(high, |chunks| chunks.iter().map(|chunk| chunk.time).fold(0.0, f64::max));
    exact((places, ends), limit).or(known)
}

/// Takes as many layers as fit a limit, and bisects the limit. Below `low` none will do; it is a limit at which some
/// chunk takes a layer more than just below, so every other time it is tried itself: if it will do, it is the least.
fn bisected((places, ends): (&[Place<'_>], &[usize]), mut high: f64) -> Option<Vec<Chunk>> {
    let mut known: Vec<Known<'_>> = places.iter().map(Known::new).collect();
    let mut best = fill((&mut known, ends), high).ok()?;
    let least_of_all = places.iter().map(|place| place.levels.least_of_all()).fold(f64::INFINITY, f64::min);
    let mut low = least_of_all / places.len() as f64;
    // Were memory free, no chunk need take a layer more than its share.
    let mut guess = Some(low + places.first()?.levels.longest_least());
    for round in 0..BISECTIONS {
        if high - low <= TOLERANCE * high {
            break;
        }
        let halving = if round % 2 == 0 { 0.5 * (low + high) } else { low };
        let limit = guess.take().filter(|guess| *guess < high).unwrap_or(halving);
        match fill((&mut known, ends), limit) {
            Ok(found) => {
                high = found.iter().map(|chunk| chunk.time).fold(0.0, f64::max).min(limit);
                best = found;
            }
            Err(TooLow { next }) => low = next.max(limit),
        }
    }
    Some(best)
}

/// A limit at which chunks do not take all layers.
struct TooLow {
    /// The least limit at which one of them takes more.
    next: f64,
}

/// A place, and what it has said of layers that are all of one kind: whichever limit or cut is tried, it is asked the
/// same.
pub(crate) struct Known<'a> {
    place: &'a Place<'a>,
    /// By kind, number of layers and what is used beside them, in that order: there are few, for which a map takes
    /// longer.
    alike: Vec<(Alike, Option<Chunk>)>,
}

/// Layers of one kind, how many they are, and the bytes beside them.
type Alike = (usize, usize, [u64; 2]);

impl<'a> Known<'a> {
    pub(crate) fn new(place: &'a Place<'a>) -> Self {
        Self { place, alike: Vec::new() }
    }

    fn chunk(&mut self, from: usize, to: usize, used: Used) -> Option<Chunk> {
        let kind = self.place.levels.kinds[from];
        if self.place.levels.count(from, to, kind) < (to - from) as f64 {
            return self.place.chunk_beside(from, to, used);
        }
        let asked = (kind, to - from, [used.lasting.to_bits(), used.passing.to_bits()]);
        let at = self.alike.binary_search_by_key(&asked, |(known, _)| *known).unwrap_or_else(|at| {
            self.alike.insert(at, (asked, self.place.chunk_beside(from, to, used)));
            at
        });
        self.alike[at].1.clone().map(|chunk| Chunk { from, to, ..chunk })
    }
}

/// How far a chunk may go that begins at a layer.
fn end_after(ends: &[usize], from: usize) -> usize {
    ends.iter().copied().find(|&end| end > from).unwrap_or(usize::MAX)
}

/// Takes for every chunk as many layers as fit the limit and the memory, and leaves one for each that follows.
fn fill((places, ends): (&mut [Known<'_>], &[usize]), limit: f64) -> Result<Vec<Chunk>, TooLow> {
    let n_layers = places.first().map_or(0, |known| known.place.n_layers());
    let n_places = places.len();
    let (mut from, mut hint, mut next) = (0, 0, f64::INFINITY);
    let mut chunks = Vec::with_capacity(n_places);
    let mut devices = Devices::default();
    for (i, place) in places.iter_mut().enumerate() {
        let last = (n_layers - (n_places - 1 - i)).min(end_after(ends, from));
        let used = devices.beside(place.place);
        // Of the layers that a chunk refuses, the one behind it is always among those asked.
        let mut refused = f64::INFINITY;
        let mut good = |to: usize| {
            let chunk = place.chunk(from, to, used)?;
            if chunk.time > limit {
                refused = refused.min(chunk.time);
            }
            Some(chunk).filter(|chunk| chunk.time <= limit)
        };
        // As many as the chunk before it took, as a first guess; or at least one.
        let guess = Some(from + hint).filter(|&to| hint > 1 && to <= last);
        let guessed = guess.and_then(&mut good);
        let mut high = if guessed.is_some() { last } else { guess.map_or(last, |refused| refused - 1) };
        let first = guessed.or_else(|| Some(from + 1).filter(|_| from < last).and_then(&mut good));
        let Some(mut found) = first else { return Err(TooLow { next: next.min(refused) }) };
        // Steps that double until one is too large, then bisection: chunks are short where there are many.
        let mut step = 1;
        while found.to < high {
            match good((found.to + step).min(high)) {
                Some(chunk) => {
                    found = chunk;
                    step *= 2;
                }
                None => {
                    high = (found.to + step).min(high) - 1;
                    break;
                }
            }
        }
        while found.to < high {
            let middle = (found.to + high).div_ceil(2);
            match good(middle) {
                Some(chunk) => found = chunk,
                None => high = middle - 1,
            }
        }
        next = next.min(refused);
        hint = found.to - from;
        from = found.to;
        devices.add(place.place, &found);
        chunks.push(found);
    }
    if from == n_layers { Ok(chunks) } else { Err(TooLow { next }) }
}

/// The cut with the least slowest chunk among those whose chunks all take no more than a limit; of equal ones one with
/// little time in all.
///
/// Dynamic programming over (chunks, layers):
/// `best(s, to) = min over from of max(best(s - 1, from), time(s, from, to))`. Only runs of layers that could meet the
/// limit are asked about, so that it takes about as many steps as there are pairs of layers.
fn exact((places, ends): (&[Place<'_>], &[usize]), limit: f64) -> Option<Vec<Chunk>> {
    let n_layers = places.first()?.n_layers();
    let mut reached: Vec<Option<Reached>> = vec![None; n_layers + 1];
    reached[0] = Some(Reached { slowest: 0.0, total: 0.0 });
    let mut rows: Vec<Vec<Option<Chunk>>> = Vec::with_capacity(places.len());
    for (i, place) in places.iter().enumerate() {
        let mut known = Known::new(place);
        let last = n_layers - (places.len() - 1 - i);
        let (mut row, mut next) = (vec![None; n_layers + 1], vec![None; n_layers + 1]);
        for (from, before) in reached.iter().enumerate().take(last) {
            let Some(before) = before else { continue };
            let near = |to: &usize| place.levels.least(from, *to) <= limit;
            for to in (from + 1..=last.min(end_after(ends, from))).take_while(near) {
                let Some(chunk) = known.chunk(from, to, Used::default()) else { continue };
                let found = before.and(chunk.time);
                if found.slowest <= limit && next[to].as_ref().is_none_or(|known| found.is_better(known)) {
                    (next[to], row[to]) = (Some(found), Some(chunk));
                }
            }
        }
        reached = next;
        rows.push(row);
    }
    let mut to = n_layers;
    let mut chunks = Vec::with_capacity(places.len());
    for mut row in rows.into_iter().rev() {
        let chunk = row[to].take()?;
        to = chunk.from;
        chunks.push(chunk);
    }
    chunks.reverse();
    Some(chunks)
}

/// Times of the chunks so far.
#[derive(Clone, Copy, Debug)]
struct Reached {
    slowest: f64,
    total: f64,
}

impl Reached {
    fn and(self, time: f64) -> Self {
        Self { slowest: self.slowest.max(time), total: self.total + time }
    }

    fn is_better(&self, known: &Self) -> bool {
        self.slowest.total_cmp(&known.slowest).then(self.total.total_cmp(&known.total)).is_lt()
    }
}

/// Cuts the layers as the user says: counts of layers per chunk that must add up.
pub fn as_given(counts: &[usize], places: &[Place<'_>]) -> Option<Vec<Chunk>> {
    counted(counts, &mut places.iter().map(Known::new).collect::<Vec<_>>())
}

/// The same where places are asked again and again.
pub(crate) fn counted(counts: &[usize], places: &mut [Known<'_>]) -> Option<Vec<Chunk>> {
    let mut from = 0;
    let mut chunks = Vec::new();
    let mut devices = Devices::default();
    for (&count, known) in counts.iter().zip(&mut *places) {
        let chunk = known.chunk(from, from + count, devices.beside(known.place))?;
        devices.add(known.place, &chunk);
        chunks.push(chunk);
        from += count;
    }
    (from == places.first()?.place.n_layers()).then_some(chunks)
}

/// Halvings of the limit: to one part in 10^9 of the whole model's time.
const BISECTIONS: usize = 30;

/// Part of the slowest chunk's time below which differences are of no interest.
const TOLERANCE: f64 = 1e-7;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::levels::{LayerCost, Once};

    use super::*;

    fn memory(chunk: &Chunk) -> f64 {
        Used::default().and(chunk).all()
    }

    fn levels(times: &[f64], sequence: &[usize]) -> Levels {
        let cost = |time: &f64| LayerCost {
            time: *time,
            state: 1.0,
            saved: 1.0,
            working: 0.0,
            logits: 0.0,
            ..LayerCost::default()
        };
        let small = |time: &f64| LayerCost {
            time: *time * 1.5,
            state: 1.0,
            saved: 0.1,
            working: 0.0,
            logits: 0.0,
            ..LayerCost::default()
        };
        Levels::new(
            vec![times.iter().map(cost).collect(), times.iter().map(small).collect()],
            sequence.to_vec(),
        )
    }

    #[test]
    fn a_heavy_head_gets_fewer_layers_beside_it() {
        let levels = levels(&[1.0, 3.0], &[0, 0, 0, 0, 0, 1]);
        let chunks = partition(&[levels.place(Flight::whole(1.0), 100.0); 2], &[]).unwrap();
        assert_eq!(chunks.iter().map(|c| c.to - c.from).collect::<Vec<_>>(), [4, 2]);
    }

    #[test]
    fn only_as_many_layers_as_must_are_made_smaller() {
        let levels = levels(&[1.0], &[0; 8]);
        // Eight layers, two in flight: 8 * (1 + 2) = 24 bytes; each smaller layer saves 1.8.
        let chunk = levels.chunk(0, 8, Flight::whole(2.0), 20.0).unwrap();
        assert_eq!((chunk.level, chunk.smaller), (0, 3));
        assert!(memory(&chunk) <= 20.0);
    }

    #[test]
    fn of_two_kinds_that_alternate_the_one_that_pays_least_for_a_byte_goes_first() {
        let cost = |time: f64, saved: f64| LayerCost { time, saved, ..LayerCost::default() };
        let costs = [vec![cost(1.0, 4.0), cost(2.0, 4.0)], vec![cost(1.5, 2.0), cost(2.1, 2.0)]];
        let levels = Levels::in_steps(&costs, [0, 1].repeat(4), (1.0, Once::default()));
        let chunk = |capacity: f64| levels.chunk(0, 8, Flight::whole(1.0), capacity).unwrap();
        let told =
            |chunk: Chunk| (chunk.level, chunk.smaller, chunk.kind, (chunk.time * 10.0).round() as u64);
        // Thirty-two bytes, of which each smaller layer saves two: all of the second kind, then as many of the first as
        // must.
        assert_eq!(told(chunk(32.0)), (0, 0, 0, 120));
        assert_eq!(told(chunk(28.0)), (0, 2, 1, 122));
        assert_eq!(told(chunk(21.0)), (1, 2, 0, 134));
        assert_eq!(told(chunk(16.0)), (2, 0, 0, 144));
        assert_eq!((levels.price(1, 0), levels.price(1, 1), levels.highest_price(1)), (0, 1, 1));
    }

    #[test]
    fn what_a_step_has_once_counts_where_layers_are_made_smaller() {
        // Smaller layers compute longer, but have fewer gradients to reduce, which nothing hides.
        let cost = |time, state, reduce| LayerCost { time, state, reduce, ..LayerCost::default() };
        let costs = [vec![cost(1.0, 4.0, 2.0)], vec![cost(1.5, 2.0, 0.5)]];
        let chunk = |micro_batches: u64| {
            let once = Once { micro_batches, slowdown: None };
            let levels = Levels::in_steps(&costs, vec![0; 4], (1.0, once));
            levels.chunk(0, 4, Flight::whole(1.0), 14.0).unwrap()
        };
        // With one micro-batch 2 seconds each instead of 3; with eight 1.56 instead of 1.25.
        assert_eq!((chunk(1).level, chunk(1).smaller), (1, 0));
        assert_eq!((chunk(8).level, chunk(8).smaller), (0, 1));
    }

    #[test]
    fn a_layer_works_beside_what_those_before_it_keep() {
        let cost = |working, logits, saved| LayerCost {
            time: 1.0,
            state: 0.0,
            saved,
            working,
            logits,
            ..LayerCost::default()
        };
        let levels = |first| Levels::new(vec![vec![cost(first, 0.0, 1.0), cost(1.0, 3.0, 2.0)]], vec![0, 1]);
        // Three bytes are kept; the last layer works in four, and the first in its own beside all but two.
        assert_eq!(levels(5.0).chunk(0, 2, Flight::whole(1.0), 8.0).map(|chunk| memory(&chunk)), Some(7.0));
        assert_eq!(levels(8.0).chunk(0, 2, Flight::whole(1.0), 9.0).map(|chunk| memory(&chunk)), Some(9.0));
        assert_eq!(levels(8.0).chunk(0, 2, Flight::whole(1.0), 8.0), None);
    }

    #[test]
    fn what_fits_nowhere_has_no_partition() {
        assert_eq!(partition(&[levels(&[1.0], &[0; 8]).place(Flight::whole(1.0), 2.0); 2], &[]), None);
    }

    #[test]
    fn chunks_of_a_device_run_one_at_a_time() {
        let cost = LayerCost { time: 1.0, state: 1.0, saved: 1.0, working: 2.0, ..LayerCost::default() };
        let levels = Levels::new(vec![vec![cost]], vec![0; 8]);
        // Eight layers hold 16 bytes and one of them works in two; apart, each half would need ten.
        let sharing = |later| Place { shared: Some((0, later)), ..levels.place(Flight::whole(1.0), 18.0) };
        let chunks = partition(&[sharing(1), sharing(0)], &[]).unwrap();
        assert_eq!(chunks.iter().map(|c| c.to - c.from).collect::<Vec<_>>(), [4, 4]);
        assert_eq!(partition(&[levels.place(Flight::whole(1.0), 9.0); 2], &[]), None);
    }

    #[test]
    fn the_bottleneck_is_the_least_of_all_cuts() {
        let times = [1.0, 2.5, 4.0];
        let sequence = [0, 1, 1, 2, 0, 1, 0, 2];
        let levels = levels(&times, &sequence);
        let found = partition(&[levels.place(Flight::whole(1.0), 1e9); 3], &[]).unwrap();
        let slowest = found.iter().map(|c| c.time).fold(0.0, f64::max);
        let sum = |a: usize, b: usize| sequence[a..b].iter().map(|&k| times[k]).sum::<f64>();
        let brute = (1..7)
            .flat_map(|i| (i + 1..8).map(move |j| (i, j)))
            .map(|(i, j)| sum(0, i).max(sum(i, j)).max(sum(j, 8)))
            .fold(f64::INFINITY, f64::min);
        assert_eq!(slowest, brute);
    }

    /// Least time of the slowest chunk over all cuts that go past no end, each chunk as fast as it fits.
    fn brute(places: &[Place<'_>], ends: &[usize], from: usize) -> f64 {
        let Some((first, rest)) = places.split_first() else {
            return f64::INFINITY;
        };
        let n = first.n_layers();
        let time = |to: usize| match ends.iter().any(|&end| from < end && end < to) {
            true => f64::INFINITY,
            false => first.chunk_beside(from, to, Used::default()).map_or(f64::INFINITY, |chunk| chunk.time),
        };
        if rest.is_empty() {
            return if from < n { time(n) } else { f64::INFINITY };
        }
        (from + 1..n).map(|to| time(to).max(brute(rest, ends, to))).fold(f64::INFINITY, f64::min)
    }

    proptest! {
        #[test]
        fn no_cut_over_unequal_devices_has_a_faster_slowest_chunk(
            fast in proptest::collection::vec(0.5..4.0_f64, 3),
            slow in proptest::collection::vec(0.5..9.0_f64, 3),
            sequence in proptest::collection::vec(0..3_usize, 4..10),
            stages in proptest::collection::vec((proptest::bool::ANY, 1.0..3.0_f64, 2.0..30.0_f64), 2..5),
            ends in proptest::collection::btree_set(1..4_usize, 0..3),
        ) {
            let ends: Vec<usize> = ends.into_iter().collect();
            let on = |stage: &(bool, f64, f64)| levels(if stage.0 { &slow } else { &fast }, &sequence);
            let own: Vec<Levels> = stages.iter().map(on).collect();
            let places: Vec<Place<'_>> =
                own.iter().zip(&stages).map(|(own, stage)| own.place(Flight::whole(stage.1), stage.2)).collect();
            let least = brute(&places, &ends, 0);
            match partition(&places, &ends) {
                Some(found) => {
                    let slowest = found.iter().map(|chunk| chunk.time).fold(0.0, f64::max);
                    prop_assert!(slowest <= least * (1.0 + 1e-6), "{slowest} of {least}");
                    let fits = |(chunk, place): (&Chunk, &Place<'_>)| memory(chunk) <= place.capacity + 1e-9;
                    prop_assert!(found.iter().zip(&places).all(fits));
                    let is_end = |end: &usize| found.iter().any(|chunk| chunk.to == *end);
                    prop_assert!(ends.iter().all(is_end));
                }
                None => prop_assert!(least.is_infinite(), "{least}"),
            }
        }
    }
}
