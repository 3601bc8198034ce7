//! Chunks of a device at levels that are chosen for all of them together.
//!
//! Cuts take one chunk after the other: what the first leaves to those behind it is a guess, so that some run slower
//! than they must and others faster than is of use. Once layers are cut, all chunks of a device are as one stage: at
//! the fastest level at which they fit, but for as many of the first layers as must run at the next. So they are the
//! first on every device, and micro-batches meet the longer chunks of all devices in the same rounds; spread over the
//! chunks of each, steps took up to 0.4 % longer.

use std::collections::BTreeMap;

use crate::levels::{Chunk, LayerCost, Levels, Range};
use crate::partition::{Place, Used};

/// The same layers in chunks, at other levels; nothing where no device has several chunks, or some device has no level
/// for all of its own.
pub(crate) fn levelled(places: &[Place<'_>], chunks: &[Chunk]) -> Option<Vec<Chunk>> {
    let mut devices: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (at, place) in places.iter().enumerate() {
        devices.entry(place.shared?.0).or_default().push(at);
    }
    let mut found = chunks.to_vec();
    for own in devices.values() {
        let parts: Vec<Part<'_>> = own.iter().map(|&at| Part::new(&places[at], &chunks[at])).collect();
        let Place { levels, capacity, .. } = places[own[0]];
        for (&at, chunk) in own.iter().zip(together(levels, &parts, capacity)?) {
            found[at] = chunk;
        }
    }
    Some(found)
}

/// A chunk, at whatever level.
struct Part<'a> {
    place: &'a Place<'a>,
    chunk: &'a Chunk,
    range: Range,
}

impl<'a> Part<'a> {
    fn new(place: &'a Place<'a>, chunk: &'a Chunk) -> Self {
        Self { place, chunk, range: place.levels.range(chunk.from, chunk.to) }
    }

    /// Bytes of a layer all the time.
    fn lasts(&self, cost: &LayerCost) -> f64 {
        cost.lasts(self.place.flight)
    }

    fn count(&self, kind: usize) -> u64 {
        self.place.levels.count(self.chunk.from, self.chunk.to, kind) as u64
    }

    /// All of it at a level.
    fn at(&self, level: usize, kind: usize) -> Chunk {
        let Chunk { from, to, .. } = *self.chunk;
        self.place.levels.at((from, to), &self.range, (level, kind), self.place.flight)
    }
}

/// The chunks of one device.
fn together(levels: &Levels, parts: &[Part<'_>], capacity: f64) -> Option<Vec<Chunk>> {
    let count = |kind: usize| parts.iter().map(|part| part.count(kind)).sum::<u64>();
    let main = (0..levels.costs[0].len()).rev().max_by_key(|&kind| count(kind))?;
    let all = |level: usize| -> Vec<Chunk> { parts.iter().map(|part| part.at(level, main)).collect() };
    let needs = |chunks: &[Chunk]| chunks.iter().fold(Used::default(), Used::and).all();
    let mut faster: Option<Vec<Chunk>> = None;
    for level in 0..levels.costs.len() {
        let plain = all(level);
        if needs(&plain) > capacity {
            faster = Some(plain);
            continue;
        }
        let Some(faster) = faster else { return Some(plain) };
        let over = needs(&faster) - capacity;
        let kind = levels.going_down(level - 1, main);
        return Some(mixed(levels, (parts, kind), faster, over).unwrap_or(plain));
    }
    None
}

/// Chunks that need so many bytes too much, with as few layers as must at the next level, if that is faster than all of
/// them there.
fn mixed(
    levels: &Levels,
    (parts, kind): (&[Part<'_>], usize),
    faster: Vec<Chunk>,
    over: f64,
) -> Option<Vec<Chunk>> {
    let level = faster.first()?.level;
    let (from, to) = (&levels.costs[level][kind], &levels.costs[level + 1][kind]);
    // While one of the others runs it may need more.
    let more = from.working_more(to);
    let gain = parts.iter().map(|part| part.lasts(from) - part.lasts(to)).fold(f64::INFINITY, f64::min);
    let n_layers: u64 = parts.iter().map(|part| part.count(kind)).sum();
    let needed = ((over + more) / gain).ceil();
    if !(gain > 0.0 && needed >= 1.0 && needed < n_layers as f64) {
        return None;
    }
    let needed = needed as u64;
    let mut before = 0;
    let chunks = parts.iter().zip(faster).map(|(part, chunk)| {
        let behind = before + part.count(kind);
        let own = behind.min(needed) - before.min(needed);
        before = behind;
        Chunk {
            smaller: own,
            kind,
            price: if own > 0 { levels.highest_price(level + 1) } else { chunk.price },
            time: chunk.time + own as f64 * (to.time - from.time),
            lasting: chunk.lasting - own as f64 * (part.lasts(from) - part.lasts(to)),
            passing: chunk.passing + more,
            ..chunk
        }
    });
    let chunks: Vec<Chunk> = chunks.collect();
    let all = |level: usize, of: fn(&LayerCost) -> f64| -> f64 {
        parts.iter().map(|part| part.range.sum(&levels.costs[level], of)).sum()
    };
    let n = parts.iter().map(|part| part.chunk.to - part.chunk.from).sum();
    let own = levels.with_once(n, |of| all(level + 1, of));
    let between = levels.with_once(n, |of| all(level, of) + needed as f64 * (of(to) - of(from)));
    (between < own).then_some(chunks)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::flights::Flight;

    use super::*;

    /// Layers of two kinds, the first of them once, that take 1 or 1.5 seconds and 3 bytes or 2.
    fn levels(n_layers: usize) -> Levels {
        let cost = |time: f64, saved: f64| LayerCost { time, state: 1.0, saved, ..LayerCost::default() };
        let end = |time: f64| LayerCost { time, state: 4.0, working: 2.0, ..LayerCost::default() };
        let kinds = std::iter::once(0).chain(std::iter::repeat_n(1, n_layers - 1)).collect();
        Levels::new(vec![vec![end(0.1), cost(1.0, 2.0)], vec![end(0.2), cost(1.5, 1.0)]], kinds)
    }

    /// Chunks of so many layers, on devices in turn, each of which has so many bytes.
    fn places<'l>(
        levels: &'l Levels,
        (n_devices, n_chunks): (usize, usize),
        capacity: f64,
    ) -> Vec<Place<'l>> {
        let later = |chunk: usize| ((n_chunks - 1 - chunk) / n_devices) as u32;
        let shared = |chunk: usize| Some((chunk % n_devices, later(chunk)));
        let place = |chunk| Place { shared: shared(chunk), ..levels.place(Flight::whole(1.0), capacity) };
        (0..n_chunks).map(place).collect()
    }

    fn cut(levels: &Levels, counts: &[usize]) -> Vec<Chunk> {
        let mut from = 0;
        let chunk = |&count: &usize| {
            let to = from + count;
            let chunk = levels.chunk(from, to, Flight::whole(1.0), f64::INFINITY).unwrap();
            from = to;
            chunk
        };
        counts.iter().map(chunk).collect()
    }

    #[test]
    fn the_first_layers_of_a_device_are_those_that_must_be_smaller() {
        let levels = levels(8);
        // Seven layers of three bytes and an end of four; two bytes must go.
        let found = levelled(&places(&levels, (1, 4), 23.0), &cut(&levels, &[2, 2, 2, 2])).unwrap();
        assert_eq!(found.iter().map(|chunk| chunk.smaller).collect::<Vec<_>>(), [1, 1, 0, 0]);
        assert!(found.iter().all(|chunk| chunk.level == 0 && chunk.kind == 1));
        assert_eq!(found.iter().map(|chunk| chunk.time).sum::<f64>(), 0.1 + 3.0 + 5.0);
    }

    #[test]
    fn where_some_device_has_no_level_nothing_is_said() {
        let levels = levels(8);
        assert_eq!(levelled(&places(&levels, (2, 4), 9.0), &cut(&levels, &[2, 2, 2, 2])), None);
        let apart = vec![levels.place(Flight::whole(1.0), 100.0); 4];
        assert_eq!(levelled(&apart, &cut(&levels, &[2, 2, 2, 2])), None);
    }

    proptest! {
        #[test]
        fn devices_hold_their_chunks_with_as_few_smaller_layers_as_must(
            counts in proptest::collection::vec(1..5_usize, 2..9),
            capacity in 10.0..60.0_f64,
        ) {
            let (levels, n_devices) = (levels(counts.iter().sum()), if counts.len() % 2 == 0 { 2 } else { 1 });
            let places = places(&levels, (n_devices, counts.len()), capacity);
            let Some(found) = levelled(&places, &cut(&levels, &counts)) else { return Ok(()) };
            for device in 0..n_devices {
                let own: Vec<&Chunk> = found.iter().skip(device).step_by(n_devices).collect();
                let n_layers: usize = own.iter().map(|chunk| chunk.to - chunk.from).sum();
                let has_end = device == 0;
                let bytes = 3.0 * (n_layers - usize::from(has_end)) as f64 + if has_end { 4.0 } else { 0.0 };
                let held: f64 = own.iter().map(|chunk| chunk.lasting).sum();
                prop_assert!(held <= capacity + 1e-9);
                let level = own[0].level;
                prop_assert!(own.iter().all(|chunk| chunk.level == level));
                let smaller: u64 = own.iter().map(|chunk| chunk.smaller).sum();
                if level == 0 {
                    // What the end works in may be beside all that layers keep.
                    let passing = own.iter().map(|chunk| chunk.passing).fold(0.0, f64::max);
                    prop_assert_eq!(smaller as f64, (bytes + passing - capacity).max(0.0).ceil());
                } else {
                    prop_assert_eq!(smaller, 0);
                }
            }
        }
    }
}
