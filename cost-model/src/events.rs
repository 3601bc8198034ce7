//! What runs at once on one rank: a stream of computation and links, each one thing at a time.
//!
//! Computation runs in its order; a link carries, of what is ready, the most urgent and then the first: what is more
//! urgent goes before the rest of what is under way, as it would share the link with buckets of it. While a transfer
//! runs beside computation both go at `1 / (1 + slowdown)` of their rates: alone that gives
//! `max(a, b) + slowdown * min(a, b)`, which is `overlap::side_by_side`.

use std::collections::BTreeSet;

use ir::units::Seconds;

/// What a rank does one thing at a time with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Its processors.
    Compute,
    /// Links inside the node.
    Node,
    /// Links across nodes.
    Network,
    /// The link to its host.
    ToHost,
    /// The same, the other way.
    FromHost,
}

/// In the order of their declaration.
const LANES: [Lane; 5] = [Lane::Compute, Lane::Node, Lane::Network, Lane::ToHost, Lane::FromHost];

/// How soon a link takes a transfer that is ready; the soonest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Urgency {
    /// Tokens to their experts and back.
    Exchange,
    /// What computation waits for.
    Awaited,
    /// What is needed later.
    Ahead,
}

/// One thing that is done.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Event {
    /// Where.
    pub(crate) lane: Lane,
    /// How long it takes alone.
    pub(crate) alone: Seconds,
    /// What must have ended before, by its place in the list: before its own.
    pub(crate) needs: Vec<usize>,
    /// What a transfer and the computation beside it cost each other.
    pub(crate) slowdown: f64,
    /// How soon a link takes it.
    pub(crate) urgency: Urgency,
}

/// When every event ends.
///
/// 10 s of computation beside 4 s of transfer that slows both by a quarter: 5 s for both, then 6 s: 11 s.
pub(crate) fn ends(events: &[Event]) -> Vec<Seconds> {
    let mut rank = Rank::new(events);
    while rank.start_and_run() {}
    rank.ends
}

/// A rank under way.
struct Rank<'e> {
    events: &'e [Event],
    now: Seconds,
    ends: Vec<Seconds>,
    /// How many of its needs have not ended.
    open: Vec<usize>,
    /// Which events wait for one.
    waiting: Vec<Vec<usize>>,
    /// Computation, in its order, and how much of it has begun.
    compute: Vec<usize>,
    next: usize,
    /// What could begin on each link.
    ready: [BTreeSet<(Urgency, usize)>; LANES.len()],
    /// What runs on each lane.
    running: [Option<usize>; LANES.len()],
    /// What is left of every event.
    left: Vec<Seconds>,
}

impl<'e> Rank<'e> {
    fn new(events: &'e [Event]) -> Self {
        let mut waiting = vec![Vec::new(); events.len()];
        let mut open = vec![0; events.len()];
        for (at, event) in events.iter().enumerate() {
            for &need in event.needs.iter().filter(|&&need| need < at) {
                waiting[need].push(at);
                open[at] += 1;
            }
        }
        let compute = (0..events.len()).filter(|&at| events[at].lane == Lane::Compute).collect();
        let mut ready: [BTreeSet<(Urgency, usize)>; LANES.len()] = Default::default();
        for (at, event) in events.iter().enumerate().filter(|(at, _)| open[*at] == 0) {
            ready[event.lane as usize].insert((event.urgency, at));
        }
        let (now, ends) = (Seconds::ZERO, vec![Seconds::ZERO; events.len()]);
        let left = events.iter().map(|event| event.alone).collect();
        Self { events, now, ends, open, waiting, compute, next: 0, ready, running: [None; LANES.len()], left }
    }

    /// Begins what can begin and runs until something ends; says whether anything ran.
    fn start_and_run(&mut self) -> bool {
        for lane in LANES {
            let slot = lane as usize;
            self.running[slot] = match lane {
                Lane::Compute => self.compute.get(self.next).copied().filter(|&at| self.open[at] == 0),
                Lane::Node | Lane::Network | Lane::ToHost | Lane::FromHost => {
                    self.ready[slot].first().map(|&(_, at)| at)
                }
            };
        }
        let rates = self.rates();
        let until = |slot: usize| self.running[slot].map(|at| self.left[at] / rates[slot]);
        let Some(step) = (0..LANES.len()).filter_map(until).min_by(|a, b| a.0.total_cmp(&b.0)) else {
            return false;
        };
        self.now += step;
        let ran = self.running;
        for (at, rate) in ran.into_iter().zip(rates).filter_map(|(at, rate)| Some((at?, rate))) {
            if self.left[at] / rate <= step {
                self.end(at);
            } else {
                self.left[at] = self.left[at] - step * rate;
            }
        }
        true
    }

    /// Of its own speed, what each lane runs at.
    fn rates(&self) -> [f64; LANES.len()] {
        let slowdown = |slot: usize| self.running[slot].map_or(0.0, |at| self.events[at].slowdown);
        let (node, network) = (slowdown(Lane::Node as usize), slowdown(Lane::Network as usize));
        match self.running[Lane::Compute as usize] {
            None => [1.0; LANES.len()],
            // What goes to the host and comes from there slows nothing.
            Some(_) => [node.max(network), node, network, 0.0, 0.0].map(|slowdown| 1.0 / (1.0 + slowdown)),
        }
    }

    fn end(&mut self, at: usize) {
        self.ends[at] = self.now;
        let Event { lane, urgency, .. } = self.events[at];
        match lane {
            Lane::Compute => self.next += 1,
            Lane::Node | Lane::Network | Lane::ToHost | Lane::FromHost => {
                self.ready[lane as usize].remove(&(urgency, at));
            }
        }
        for &later in &self.waiting[at] {
            self.open[later] -= 1;
            if self.open[later] == 0 {
                let event = &self.events[later];
                self.ready[event.lane as usize].insert((event.urgency, later));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overlap::side_by_side;

    fn event(lane: Lane, alone: f64, needs: &[usize]) -> Event {
        Event { lane, alone: Seconds(alone), needs: needs.to_vec(), slowdown: 0.0, urgency: Urgency::Awaited }
    }

    fn check(events: &[Event], expected: &[f64]) {
        let found: Vec<f64> = ends(events).into_iter().map(|end| end.0).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_transfer_beside_computation_slows_both() {
        for (compute, transfer) in [(10.0, 4.0), (4.0, 10.0), (5.0, 5.0)] {
            let beside = Event { slowdown: 0.25, ..event(Lane::Node, transfer, &[]) };
            let found = ends(&[event(Lane::Compute, compute, &[]), beside]);
            let last = found[0].max(found[1]);
            let expected = side_by_side(Seconds(compute), Seconds(transfer), 0.25);
            assert!((last - expected).0.abs() < 1e-12, "{last:?} {expected:?}");
        }
    }

    #[test]
    fn computation_keeps_its_order_and_waits_for_what_it_needs() {
        let events =
            [event(Lane::Network, 5.0, &[]), event(Lane::Compute, 1.0, &[0]), event(Lane::Compute, 1.0, &[])];
        check(&events, &[5.0, 6.0, 7.0]);
    }

    #[test]
    fn tokens_go_before_gradients_on_a_link_and_beside_them_on_another() {
        let gradients = |lane| Event { urgency: Urgency::Ahead, ..event(lane, 4.0, &[0]) };
        let tokens = Event { urgency: Urgency::Exchange, ..event(Lane::Network, 2.0, &[0]) };
        let start = event(Lane::Compute, 1.0, &[]);
        check(&[start.clone(), gradients(Lane::Network), tokens.clone()], &[1.0, 7.0, 3.0]);
        check(&[start, gradients(Lane::Node), tokens], &[1.0, 5.0, 3.0]);
        let early = Event { urgency: Urgency::Ahead, ..event(Lane::Network, 4.0, &[]) };
        let late = Event { urgency: Urgency::Exchange, ..event(Lane::Network, 2.0, &[1]) };
        check(&[early, event(Lane::Compute, 1.0, &[]), late], &[6.0, 1.0, 3.0]);
    }

    #[test]
    fn chunks_of_a_gather_run_beside_chunks_of_its_product() {
        let mut events: Vec<Event> = (0..4).map(|_| event(Lane::Node, 1.0, &[])).collect();
        events.extend((0..4).map(|at| event(Lane::Compute, 2.0, &[at])));
        assert_eq!(ends(&events)[7], Seconds(9.0));
    }
}
