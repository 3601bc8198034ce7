//! Chunks so that the device that works most is as fast as can be, where devices have several.
//!
//! A pipeline of virtual stages is as fast as its slowest device, whatever single chunks take: a chunk with a long head
//! may stand beside short ones. Cuts for the least slowest chunk (`partition`) leave open what the others on its device
//! take. From chunks with as many layers each, layers go one at a time from the device that works most to the one that
//! works least, as long as the squares of what devices work become less; first by the least that layers take, then by
//! what they take in the memory that there is.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::levels::Chunk;
use crate::memos::lock;
use crate::partition::{Known, Place, counted};

/// Layers that go to another device for what they take in their memory, at most.
const MOVED_IN_MEMORY: usize = 8;

/// How many layers chunks have by what layers take at least, by the devices of the chunks and those times: the same at
/// most prices of memory, and however devices are shared.
#[derive(Debug, Default)]
pub(crate) struct Evened(Mutex<BTreeMap<Vec<usize>, Counted>>);

/// What layers take at least, and how many of them chunks then have.
type Counted = (Vec<f64>, Vec<usize>);

impl Evened {
    fn counts(&self, places: &[Place<'_>], device: &[usize]) -> Vec<usize> {
        let alike = places.chunk_by(|a, b| std::ptr::eq(a.levels, b.levels));
        let times: Vec<f64> = alike.flat_map(|own| own[0].levels.least_times()).copied().collect();
        if let Some((_, counts)) = lock(&self.0).get(device).filter(|(known, _)| *known == times) {
            return counts.clone();
        }
        let counts = evened(places, device);
        lock(&self.0).insert(device.to_vec(), (times, counts.clone()));
        counts
    }
}

/// As many layers in each chunk as even out what devices work at least.
fn evened(places: &[Place<'_>], device: &[usize]) -> Vec<usize> {
    let (n_layers, n_places) = (places.first().map_or(0, |place| place.levels.kinds.len()), places.len());
    let even = |chunk: usize| (chunk + 1) * n_layers / n_places - chunk * n_layers / n_places;
    let mut counts: Vec<usize> = (0..n_places).map(even).collect();
    let mut least = |counts: &[usize]| {
        let mut from = 0;
        let of_chunk = |(place, count): (&Place<'_>, &usize)| {
            from += count;
            place.levels.least(from - count, from)
        };
        Some(places.iter().zip(counts).map(of_chunk).collect::<Vec<f64>>())
    };
    balance(&mut counts, device, (n_layers, &mut least));
    counts
}

/// Cuts the layers into chunks, one per place, of which each stands on a device.
///
/// `None` where there are fewer layers than chunks, or some chunk does not fit.
pub(crate) fn by_device(places: &[Place<'_>], device: &[usize], evened: &Evened) -> Option<Vec<Chunk>> {
    if places.len() > places.first()?.levels.kinds.len() {
        return None;
    }
    let mut counts = evened.counts(places, device);
    let mut known: Vec<Known<'_>> = places.iter().map(Known::new).collect();
    let mut in_memory = |counts: &[usize]| {
        let chunks = counted(counts, &mut known)?;
        Some(chunks.iter().map(|chunk| chunk.time).collect())
    };
    balance(&mut counts, device, (MOVED_IN_MEMORY, &mut in_memory));
    counted(&counts, &mut known)
}

/// Pairs of chunks between which a layer is moved to see whether that evens out what devices work.
const TRIED: usize = 4;

/// What chunks with so many layers take; nothing where they do not fit.
type Times<'t> = &'t mut dyn FnMut(&[usize]) -> Option<Vec<f64>>;

/// Moves so many layers at most.
fn balance(counts: &mut Vec<usize>, device: &[usize], (most, times): (usize, Times<'_>)) {
    let Some(mut known) = times(counts) else { return };
    for _ in 0..most {
        let Some((next, its)) = moved(counts, device, (&known, &mut *times)) else { return };
        (*counts, known) = (next, its);
    }
}

/// The same with a layer less on the device that works most, and what its chunks then take; nothing where that evens
/// nothing out.
fn moved(
    counts: &[usize],
    device: &[usize],
    (known, times): (&[f64], Times<'_>),
) -> Option<(Vec<usize>, Vec<f64>)> {
    let works = work(device, known);
    let squares = |works: &[f64]| works.iter().map(|work| work * work).sum::<f64>();
    let order = |a: &usize, b: &usize| works[*a].total_cmp(&works[*b]).then(a.cmp(b));
    let (most, least) = ((0..works.len()).max_by(order)?, (0..works.len()).min_by(order)?);
    let on = |own: usize| {
        let mut chunks: Vec<usize> = (0..device.len()).filter(|&chunk| device[chunk] == own).collect();
        chunks.sort_by(|&a, &b| known[a].total_cmp(&known[b]).then(a.cmp(&b)));
        chunks
    };
    let longest = on(most).into_iter().rev().filter(|&chunk| counts[chunk] > 1);
    let shortest = on(least);
    let pairs = longest.flat_map(|from| shortest.iter().map(move |&to| (from, to)));
    let mut evened = pairs.take(TRIED).filter_map(|(from, to)| {
        let mut next = counts.to_vec();
        next[from] -= 1;
        next[to] += 1;
        let its = times(&next)?;
        (squares(&work(device, &its)) < squares(&works)).then_some((next, its))
    });
    evened.next()
}

/// What every device works.
fn work(device: &[usize], times: &[f64]) -> Vec<f64> {
    let mut works = vec![0.0; device.iter().max().map_or(0, |last| last + 1)];
    device.iter().zip(times).for_each(|(&own, time)| works[own] += time);
    works
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::flights::Flight;
    use crate::levels::{LayerCost, Levels};
    use crate::partition::partition;

    use super::*;

    fn levels(times: &[f64], sequence: &[usize]) -> Levels {
        let cost = |time: &f64| LayerCost { time: *time, state: 1.0, saved: 1.0, ..LayerCost::default() };
        Levels::new(vec![times.iter().map(cost).collect()], sequence.to_vec())
    }

    fn slowest(chunks: &[Chunk], device: &[usize]) -> f64 {
        let times: Vec<f64> = chunks.iter().map(|chunk| chunk.time).collect();
        work(device, &times).into_iter().fold(0.0, f64::max)
    }

    /// GPT-2 in four chunks on two devices: its head takes five and a half layers.
    #[test]
    fn a_long_head_stands_beside_a_short_chunk() {
        let sequence: Vec<usize> = [0].into_iter().chain([1; 12]).chain([2]).collect();
        let levels = levels(&[0.0, 1.0, 5.5], &sequence);
        let (places, device) = ([levels.place(Flight::whole(1.0), 100.0); 4], [0, 1, 0, 1]);
        let found = by_device(&places, &device, &Evened::default()).unwrap();
        assert_eq!(slowest(&found, &device), 9.0);
        assert!(slowest(&partition(&places, &[]).unwrap(), &device) > 10.0);
    }

    #[test]
    fn chunks_that_do_not_fit_are_none() {
        let levels = levels(&[1.0], &[0; 8]);
        let place = |capacity: f64| levels.place(Flight::whole(1.0), capacity);
        assert_eq!(by_device(&[place(3.0); 4], &[0, 1, 0, 1], &Evened::default()), None);
        assert_eq!(by_device(&[place(100.0); 9], &[0; 9], &Evened::default()), None);
        assert!(by_device(&[place(4.0); 4], &[0, 1, 0, 1], &Evened::default()).is_some());
    }

    proptest! {
        /// Of layers of one kind between a first and a last of their own no device works a layer more than it must.
        #[test]
        fn no_device_works_a_layer_more_than_it_must(
            n_layers in 16..80_usize,
            ends in (0.0..3.0_f64, 0.0..3.0_f64),
            n_devices in 1..5_usize,
            n_virtual in 2..4_usize,
        ) {
            let sequence: Vec<usize> = [0].into_iter().chain(vec![1; n_layers]).chain([2]).collect();
            let levels = levels(&[ends.0, 1.0, ends.1], &sequence);
            let device: Vec<usize> = (0..n_devices * n_virtual).map(|chunk| chunk % n_devices).collect();
            let places = vec![levels.place(Flight::whole(1.0), 1e9); device.len()];
            let found = by_device(&places, &device, &Evened::default()).unwrap();
            let average = (n_layers as f64 + ends.0 + ends.1) / n_devices as f64;
            prop_assert!(slowest(&found, &device) <= average + 1.0 + 1e-9);
            prop_assert_eq!(found.last().map(|chunk| chunk.to), Some(n_layers + 2));
        }
    }
}
